"""What torch.export takes: a module and its arguments, from Python code or from a config."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._pytree import SUPPORTED_NODES, tree_map

from gpuir.frontends.torch import masks
from gpuir.frontends.torch.subclasses import as_layers, read_elsewhere
from gpuir.ir.errors import GpuirError, ModelError, UsageError, nearest, raised
from gpuir.ir.graph import Role
from gpuir.plugins import own_module, unwarned

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}
OF_DATA = re.compile(r"u\d+")  # torch's names of sizes that it knows when the program runs


@dataclass(frozen=True)
class TorchProgram:
    """A module, the arguments to run it on, and what is known of them.

    `roles` names inputs, as the exported program does, that hold something else than inputs;
    `over` goes along the outputs: the input whose storage the output takes over, or None.
    `repeats` where layers that are made alike do the same, whatever their number. `made_for` is the
    class and the phase that gpuir itself made the arguments for, whose faults are not the user's.
    """

    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str = ""
    roles: Mapping[str, Role] = field(default_factory=dict[str, Role])
    over: tuple[str | None, ...] = ()
    assumed: tuple[str, ...] = ()
    repeats: bool = False
    made_for: str = ""

    def export(self) -> ExportedProgram:
        """The program as torch.export writes it down; ModelError with torch's reason when it
        cannot."""
        try:
            return self._traced()
        except GpuirError:
            raise
        except Exception as error:  # whatever the module's own code raises
            if self.made_for:
                raise unsupported(self.made_for, self.name, error) from error
            raise ModelError(
                "torch.export cannot trace the model",
                where=self.name,
                found=raised(error),
                fix=remedy(error),
            ) from error

    def _traced(self, left: Collection[str] = ()) -> ExportedProgram:
        try:
            with (
                torch.set_grad_enabled(self.module.training),
                unheard(),
                graphs_alone(),
                masks.as_run(self.module),
                masks.on_any_device(),
                as_layers(self.module, left) as module,
                masks.held(module, self.args, self.kwargs) as (args, kwargs),
            ):
                made = torch.export.export(module, args, kwargs, strict=False)
            more = read_elsewhere(made, self.module)
            return self._traced({*left, *more}) if more else made
        except RuntimeError as error:
            if "not a known type" in str(error) and register_caches(self.module):
                return self._traced()
            raise


def unsupported(made_for: str, where: str, error: BaseException) -> ModelError:
    """What to say where a class does not run on what gpuir makes of its config."""
    return ModelError(
        f"gpuir does not support {made_for}: it does not run on the inputs that gpuir makes of "
        "its config",
        where=where,
        found=raised(error),
        fix="build the module and its arguments in Python: gpuir analyze my.module:build. Or check "
        "the config: its numbers may not fit together",
    )


def register_caches(module: torch.nn.Module) -> bool:
    """Tells torch.export what the caches of transformers' models hold, which a language model gives
    beside its logits; False where it knows them already, or there is no such model."""
    library: Any = sys.modules.get("transformers")
    models = [m for m in module.modules() if library and isinstance(m, library.PreTrainedModel)]
    known = len(SUPPORTED_NODES)
    if models:
        from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

        register_cache_pytrees_for_model(cast(Any, models[0]))
    return len(SUPPORTED_NODES) > known


def traced_inputs(program: ExportedProgram) -> list[tuple[str, Any]]:
    """The inputs by name, each as it was traced: a tensor, whose sizes may be symbolic, or None."""
    nodes = program.graph.find_nodes(op="placeholder")
    values = {node.name: node.meta.get("val") for node in nodes}
    names = map(str, program.graph_signature.user_inputs)
    return [(name, values.get(name)) for name in names]


@contextmanager
def unheard() -> Generator[None]:
    """torch says nothing of its own, and what the model prints is no part of our results: a failed
    export logs a traceback and prints the program so far, ahead of the error that says it all."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def graphs_alone() -> Generator[None]:
    """torch traces graphs, without Python code to run them and without a stack trace for each node:
    a quarter of the time of an export. Code is still made if somebody runs the graph."""
    before = fx_config.do_not_emit_stack_traces
    fx_config.do_not_emit_stack_traces = True
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        fx_config.do_not_emit_stack_traces = before


def remedy(error: Exception) -> str:
    """What to do about an export that failed, by the kind of failure."""
    text = f"{type(error).__name__}: {error}"
    for words, fix in REMEDIES:
        if any(word in text for word in words):
            return fix
    return "run the module on these arguments in PyTorch first: torch.export runs the same code"


REMEDIES = (
    (
        ("compressed tensor", "SparseCsr"),
        "torch.export traces no compressed sparse tensor that the model makes: take it as an input "
        "or a buffer, or make it with torch.sparse_coo_tensor",
    ),
    (
        ("meta converter nyi",),
        "torch.export takes no view of a sparse tensor: give a copy (`w.values().clone()`)",
    ),
    (
        ("Unsupported input type",),
        "give torch tensors, Python numbers, or lists, tuples and dictionaries of them",
    ),
    (
        ("ata-dependent", "DataDependent"),
        "remove the branch or shape that depends on data, or replace it by a fixed one",
    ),
    (("fake impl",), "give the operator a fake implementation: torch.library.register_fake"),
    (
        ("CUDA", "cuda", "NVIDIA"),
        'the model does not need a GPU: build it under torch.device("meta")',
    ),
    (
        ("DeviceMismatch", "same device", "on device meta"),
        'put the module and its arguments on one device: build both under torch.device("meta")',
    ),
    (
        ("dtype", "scalar type"),
        "the model mixes data types: use the one for which it was written (--dtype f32)",
    ),
)


def is_built(path: str) -> bool:
    """Whether the path names a function: `my.module:build`, `folder/file.py:build`."""
    module, colon, function = path.rpartition(":")
    named = module.endswith(".py") or all(part.isidentifier() for part in module.split("."))
    return bool(colon) and function.isidentifier() and named and module != "hf"


def of_data(name: str) -> bool:
    """Whether the name is one of sizes that depend on the data, or a pattern of such names."""
    return bool(OF_DATA.fullmatch(name) or "*" in name)


def built(
    path: str, dims: Mapping[str, int], dtype: str = ""
) -> tuple[TorchProgram | ExportedProgram, dict[str, int]]:
    """What the function gives: a `TorchProgram`, a module with its arguments, a tuple of them, or
    those and a dictionary of keyword arguments, or what torch.export made of them. With a `dtype`
    the floats of the module and its arguments are in it (`module.to`). It is called with the
    dimensions that it takes, by name; the others come back, for an exported program's symbols, and
    for sizes that depend on the data."""
    place, _, name = path.rpartition(":")
    module = own_module(place, path)
    build = getattr(module, name, None)
    if not callable(build):
        functions = [n for n, thing in vars(module).items() if callable(thing)]
        raise UsageError(
            f"the file has no function {name!r}", where=path, fix=nearest(name, functions)
        )
    parameters = inspect.signature(build).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = {n: size for n, size in dims.items() if n in parameters or (free and not of_data(n))}
    left = {name: size for name, size in dims.items() if name not in taken}
    try:
        with redirect_stdout(sys.stderr), unwarned():
            made = build(**taken)
    except (Exception, SystemExit) as error:
        raise ModelError("the function failed", where=path, found=raised(error)) from error
    program = _program(made, path)
    if dtype:
        program = _in_dtype(program, dtype, path)
    unknown = [name for name in left if not of_data(name)]
    if unknown and isinstance(program, TorchProgram):
        raise _not_taken(unknown[0], parameters, path)
    return program, left


def _in_dtype(made: TorchProgram | ExportedProgram, dtype: str, path: str) -> TorchProgram:
    """The program with all its floats in a dtype."""
    if isinstance(made, ExportedProgram):
        what = "a dtype is for a module: this function returns an exported program"
        raise UsageError(what, where=path, fix="remove --dtype, or return (module, args)")
    if dtype not in DTYPES:
        raise UsageError(f"no dtype {dtype!r}", where=path, fix=nearest(dtype, DTYPES))

    def cast(x: Any) -> Any:
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(DTYPES[dtype]) if is_float else x

    args, kwargs = tree_map(cast, (made.args, dict(made.kwargs)))
    return replace(made, module=made.module.to(DTYPES[dtype]), args=args, kwargs=kwargs)


def _program(made: Any, path: str) -> TorchProgram | ExportedProgram:
    match made:
        case ExportedProgram():
            return made
        case TorchProgram():
            return replace(made, name=function_name(path))
        case (torch.nn.Module() as module, args):
            return TorchProgram(module, _as_tuple(args), name=function_name(path))
        case (torch.nn.Module() as module, args, dict() as kwargs):
            return TorchProgram(module, _as_tuple(args), kwargs, name=function_name(path))
        case _:
            found = (
                f"({', '.join(type(x).__name__ for x in made)})"
                if isinstance(made, tuple)
                else type(made).__name__
            )
            raise ModelError(
                "the function must return a model with its arguments",
                where=path,
                expected="(module, args), (module, args, kwargs) or an ExportedProgram",
                found=found,
            )


def _not_taken(name: str, parameters: Collection[str], path: str) -> UsageError:
    return UsageError(
        f"the function has no parameter {name!r}",
        where=path,
        expected=f"one of its parameters: {', '.join(parameters) or 'it has none'}",
        fix=nearest(name, parameters) if parameters else f"def build({name}): ...",
    )


def function_name(path: str) -> str:
    """What a function's program is called: `my.build` of `folder/my.py:build`."""
    place, _, function = path.rpartition(":")
    return f"{Path(place).name.removesuffix('.py')}.{function}"


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, tuple | list) else (args,)
