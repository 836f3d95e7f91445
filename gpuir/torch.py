"""For PyTorch sessions: what torch.compile is about to run, reported before it runs.

model = torch.compile(model, backend=gpuir.torch.backend("h100-sxm"))
model(x)  # the report of every graph that is compiled goes to stderr; the result is the same
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from gpuir.ir.errors import GpuirError, UsageError, reason
from gpuir.report.answer import Answer
from gpuir.run.loading import LoadOptions
from gpuir.run.runs import analyze

if TYPE_CHECKING:
    import torch
    from torch import fx

    from gpuir.frontends.torch.program import TorchProgram

ANY_SIZE = (
    "the graph is compiled for any size, and this report is for the "
    "sizes of the call that compiled it"
)

Report = Callable[[Answer], None]
Backend = Callable[["fx.GraphModule", "Sequence[torch.Tensor]"], Callable[..., Any]]


def backend(
    target: str,
    report: Report | None = None,
    profile: str | None = None,
    **options: Unpack[LoadOptions],
) -> Backend:
    """A backend for torch.compile: each graph is analysed for `target` under `profile` (`eager`
    without one), and then run unchanged.

    `report` gets the answer of each, in the order that they are compiled; without it the table
    goes to stderr. A graph that is compiled for any size (`dynamic=True`, or a second batch size)
    is reported once, for the sizes of the call that compiled it, and says so. What cannot be
    analysed is text there too, and runs all the same.
    """

    def compile(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        try:
            found = analyze(_program(module, inputs), target, profile=profile, **options)
        except GpuirError as error:
            print(f"gpuir: {error}", file=sys.stderr)
        except Exception as error:  # a fault of ours is not to end the user's session
            print(
                f"gpuir: {reason(error)}: this is a bug in gpuir, please report it", file=sys.stderr
            )
        else:
            (report or show)(found)
        return module.forward

    return compile


def show(found: Answer) -> None:
    """The report as a table, on stderr."""
    from gpuir.backends.table import BACKENDS
    from gpuir.backends.terminal import Terminal

    print(BACKENDS["text"]([found], Terminal()), file=sys.stderr)


def named_backend(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """`torch.compile(model, backend="gpuir", options={"target": "h100-sxm"})`."""
    given = dict(options or {})
    if "target" not in given:
        raise UsageError("no target given", fix='options={"target": "a100"}')
    return backend(given.pop("target"), **given)(module, inputs)


def _program(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> TorchProgram:
    """The graph as a module that holds its parameters, as the model did, and its other inputs."""
    import torch

    from gpuir.frontends.torch.program import TorchProgram

    class Closed(torch.nn.Module):
        def forward(self, *rest: torch.Tensor) -> Any:
            others = iter(rest)
            return module(*(getattr(self, n) if n in held else next(others) for n in names))

    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    pairs: dict[str, Any] = dict(zip(names, inputs, strict=True))
    symbols: Any = [(name, x) for name, x in pairs.items() if isinstance(x, symbolic)]
    sizes = {str(name): x.node.hint for name, x in symbols}
    pairs |= sizes
    held = {name: x for name, x in pairs.items() if isinstance(x, torch.nn.Parameter)}
    closed = Closed()
    for name, parameter in held.items():
        closed.register_parameter(name, parameter)
    rest = tuple(x for name, x in pairs.items() if name not in held)
    text = ", ".join(f"{name}={size}" for name, size in sizes.items())
    assumed = (f"{ANY_SIZE}: {text}",) if sizes else ()
    return TorchProgram(closed, rest, name="graph", assumed=assumed)
