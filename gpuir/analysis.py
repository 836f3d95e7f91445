"""The whole way from a model file to its report: load, lower, analyze, explain, summary."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from gpuir.backends.report import Device, Summary, find_kernel, summarize
from gpuir.cost.explain import Line, explained
from gpuir.cost.table import Predictor
from gpuir.ir.errors import ModelError, TextError, UsageError, VerifyError
from gpuir.ir.graph import Graph, Level
from gpuir.ir.verify import verify
from gpuir.ops.kernel import KernelOp, View
from gpuir.passes.annotate import IN_TF32, Annotate
from gpuir.passes.canonicalize import Canonicalize
from gpuir.passes.fuse import Fuse
from gpuir.passes.legalize import Legalize
from gpuir.passes.manager import Pass, Pipeline, Watch
from gpuir.passes.recognize import Recognize
from gpuir.passes.tile import TilePass
from gpuir.simulate.memory import memory
from gpuir.targets.load import load_target

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from gpuir.frontends.model import Model
    from gpuir.frontends.torch.program import Program

    Source = str | PathLike[str] | nn.Module | ExportedProgram | Program


class LoadOptions(TypedDict, total=False):
    """What a model file leaves open. `dims` binds symbolic dimensions by name, `inputs` gives
    whole shapes, `values` the numbers of inputs that shapes depend on, `trip_counts` those of
    loops by node name, `expert_skew` how unevenly routers choose experts (0: evenly; else the
    exponent of a power law); `strict` refuses an operator that has no converter. A torch module is
    run on `args` and `kwargs`. Of a Hugging Face config, `task` chooses the class, `dtype` the
    numbers (`f32`, `f16`, `bf16`) and `attention` how it is computed (`sdpa`, `eager`); `phase` is
    `prefill` or `decode`, behind `past` tokens; with `train` the loss is computed."""

    dims: Mapping[str, int]
    inputs: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Sequence[float]]
    trip_counts: Mapping[str, int]
    expert_skew: float
    strict: bool
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    task: str | None
    dtype: str | None
    attention: str | None
    phase: str | None
    past: int | None
    train: bool


TAKES = {  # which options each kind of model has a use for
    "an ONNX file": "dims inputs values trip_counts expert_skew strict",
    "IR text, whose numbers are in the text already": "strict",
    "a saved torch program": "dims expert_skew strict",
    "a torch program": "args kwargs dims expert_skew strict",
    "a function": "dims expert_skew strict",
    "a Hugging Face config": "dims task dtype attention phase past train expert_skew strict",
}


def load(
    model: Source,
    *,
    warn: Callable[[str], None] | None = None,
    **options: Unpack[LoadOptions],
) -> Graph:
    """The graph of a model: an ONNX file; a torch program, exported and saved (`.pt2`) or live, or
    a torch module with its arguments; a Hugging Face config (`hf:config.json`, or its folder); what
    a function gives (`my.module:build`); gpuir's own text (`.gir`, or `-` for stdin) at any level.

    What the loader could not be sure of goes to `warn`, Python's warnings by default. ModelError
    or TextError when the file cannot be used.
    """
    path = fspath(model) if isinstance(model, str | PathLike) else ""
    if path.endswith(".gir") or path == "-":
        return _load_text_file(path, options)
    if path and not is_torch(path):
        loaded = _load_onnx(path, options)
    else:
        loaded = _load_torch(path or cast("nn.Module | ExportedProgram", model), options)
    say = warn or partial(warnings.warn, stacklevel=2)
    for text in loaded.warnings:
        say(text)
    return loaded.graph


def is_torch(path: str) -> bool:
    """Whether the text names a torch program: `model.pt2`, `hf:config.json` or a folder with a
    config, `my.module:build`."""
    if path.startswith("hf:") or path.endswith(".pt2"):
        return True
    if Path(path).exists():
        return Path(path).is_dir() or Path(path).name == "config.json"
    return ":" in path and path.rpartition(":")[2].isidentifier()


def _checked(options: LoadOptions, kind: str, where: str) -> dict[str, Any]:
    """The options given; UsageError for one that this kind of model has no use for."""
    takes = TAKES[kind].split()
    given = {name: value for name, value in options.items() if value not in (None, {}, (), False)}
    wrong = [name for name, value in given.items() if name not in takes and value]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} cannot be given for {kind}",
            where=where,
            fix=f"leave it out; {kind} takes {', '.join(takes)}",
        )
    return given


def _load_onnx(path: str, options: LoadOptions) -> Model:
    from gpuir.frontends.onnx.load import load as load_onnx  # pyright: ignore

    return load_onnx(path, **_checked(options, "an ONNX file", path))


def _load_torch(model: str | nn.Module | ExportedProgram, options: LoadOptions) -> Model:
    if find_spec("torch") is None:
        raise UsageError(
            "PyTorch is not installed", fix="pip install 'gpuir[torch]', or export to ONNX"
        )
    from gpuir.frontends.torch import hf, program
    from gpuir.frontends.torch.load import load as load_torch

    if not isinstance(model, str):
        return load_torch(model, **_checked(options, "a torch program", type(model).__name__))
    if model.endswith(".pt2"):
        return load_torch(model, **_checked(options, "a saved torch program", model))
    if program.is_built(model):
        given = _checked(options, "a function", model)
        made = program.built(model, given.pop("dims", {}))
    else:
        given = _checked(options, "a Hugging Face config", model)
        walk = {name: given.pop(name) for name in ("expert_skew", "strict") if name in given}
        made, given = hf.program(model, **given), walk
    return load_torch(made, **given)


def _load_text_file(path: str, options: LoadOptions) -> Graph:
    _checked(options, "IR text, whose numbers are in the text already", path)
    try:
        data = _read_stdin() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ModelError("cannot read the file", where=path, found=str(error.strerror)) from error
    except UnicodeDecodeError as error:
        raise ModelError("not a text file", where=path, found=str(error)) from error
    return load_text(text, "<stdin>" if path == "-" else path)


def _read_stdin() -> bytes:
    if not sys.stdin:  # closed by whoever started us
        raise UsageError("there is no stdin to read IR text from", fix="give the file's name")
    return sys.stdin.buffer.read()


def load_text(text: str, source: str = "<text>") -> Graph:
    """The graph that gpuir's own text states, checked; TextError names its place in `source`."""
    from gpuir.text import parse  # and with it lark

    graph = parse(text, source)
    try:
        verify(graph)
    except VerifyError as error:
        where = f"{source}: {error.where}"
        raise TextError(
            error.what, where=where, expected=error.expected, found=error.found
        ) from error
    return graph


def lower(graph: Graph, *, watch: Watch | None = None) -> Graph:
    """The kernels of a graph, for no target yet: canonicalize, recognize, fuse, legalize."""
    return Pipeline(_lowering(graph.level)).run(graph, watch=watch)


def _lowering(level: Level) -> tuple[Pass, ...]:
    passes = {
        Level.graph: (Canonicalize(), Recognize(), Fuse(), Legalize()),
        Level.fused: (Legalize(),),
    }
    return passes.get(level, ())


def analyze(
    model: Graph | Source,
    *given: str | Sequence[Any] | None,
    target: str | None = None,
    predictor: str | Predictor = "tile",
    schedule: str | PathLike[str] = "",
    tf32: bool = False,
    watch: Watch | None = None,
    **options: Unpack[LoadOptions],
) -> Graph:
    """The model's kernels, tiled and costed for `target`; `summary` of it is the report.

        gpuir.analyze("model.onnx", "a100")
        gpuir.analyze(module, (x,), target="h100-sxm")

    A graph goes on from the level it has. One that is tiled already keeps its target; one that
    is costed comes back as it is; what would change it is refused. `schedule` is a file of tiles
    to use where it names a kernel. `target` is a name, a path, or either with numbers changed:
    `a100+sms=120`. `predictor` is a name too, or a function of yours. `tf32` lets f32 products run
    on the matrix units.
    """
    for thing in given:  # the target, or a module's arguments
        if isinstance(thing, str):
            target = thing
        elif thing is not None:
            options["args"] = thing
    g = model if isinstance(model, Graph) else load(model, **options)
    _check_target(g, target)
    _check_done(g, predictor, schedule, tf32)
    passes = _lowering(g.level)
    if g.level < Level.tiled:
        passes += (TilePass(target=str(target), schedule=fspath(schedule), tf32=tf32),)
    if g.level < Level.costed:
        passes += (Annotate(predictor=predictor, tf32=tf32),)
    return Pipeline(passes).run(g, watch=watch)


def _check_target(g: Graph, target: str | None) -> None:
    if g.target is None:
        if target is None:
            raise UsageError(
                "no target given", fix="name a GPU, like a100; `gpuir targets` lists them"
            )
    elif target is not None and load_target(target).name != load_target(g.target).name:
        raise UsageError(
            f"@{g.name} is {g.level.name} for another target",
            expected=g.target,
            found=target,
            fix="start from a graph of level kernel or before",
        )


def _check_done(
    g: Graph, predictor: str | Predictor, schedule: str | PathLike[str], tf32: bool
) -> None:
    """UsageError when something is asked for that the graph has behind it already."""
    late = [
        ("schedule", schedule and g.level >= Level.tiled),
        ("predictor", predictor != "tile" and g.level >= Level.costed),
        ("tf32", tf32 and g.level >= Level.costed),
    ]
    for name, asked in late:
        if asked:
            raise UsageError(
                f"{name} comes too late: @{g.name} is {g.level.name} already",
                fix="start from a graph of level kernel or before, or leave it out",
            )


def explain(graph: Graph, name: str) -> tuple[Line, ...]:
    """Every quantity that leads to the cost of one kernel of a costed graph, in order.

    `name` is the kernel's first result, or a model node it stands for: whole, or the end of it.
    Empty for a view, a loop or a branch. Of a predictor that does not explain itself, the terms
    and facts that it stated. UsageError, with the nearest names, when nothing or several kernels
    are called so.
    """
    node = find_kernel(graph, name).node
    if node.cost is None:
        raise UsageError(f"@{graph.name} is not costed", fix="run it through gpuir.analyze")
    if not isinstance(node.op, KernelOp) or isinstance(node.op, View):
        return ()
    target = load_target(str(graph.target))
    return explained(node.op, node.tile, target, node.cost, tf32=IN_TF32 in graph.assumed)


def summary(graph: Graph, *, warnings: Iterable[str] = (), batch: int | None = None) -> Summary:
    """The report of a costed graph as records: totals, kernels, classes, memory, coverage,
    assumptions."""
    target = load_target(str(graph.target))
    device = Device(target.name, target.title, target.assumptions, tuple(target.rows()))
    return summarize(graph, device, tuple(warnings), batch, memory(graph, target))
