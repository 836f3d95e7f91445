"""The door for PyTorch: an exported program, live or saved, or a module and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from gpuir.frontends.emit import INLINE, Emitter, Scope, nested_too_deep
from gpuir.frontends.model import Model, Weights
from gpuir.frontends.torch.archive import open_program
from gpuir.frontends.torch.dims import Dims
from gpuir.frontends.torch.fallbacks import heard
from gpuir.frontends.torch.inplace import kept_operands
from gpuir.frontends.torch.joint import load_joint
from gpuir.frontends.torch.precision import has_casts, kept_places, unreached
from gpuir.frontends.torch.program import TorchProgram, graphs_alone, unheard, unsupported
from gpuir.frontends.torch.recurrent import CONVERTERS as RECURRENT
from gpuir.frontends.torch.repeat import grown
from gpuir.frontends.torch.serialized import names_of
from gpuir.frontends.torch.sparse import Sparse, examples, is_sparse, placed, unknown
from gpuir.frontends.torch.subclasses import assumed_of, calls_of, has_subclasses, is_quantised
from gpuir.frontends.torch.walk import TorchWalk, numbers
from gpuir.ir.errors import GpuirError, ModelError, UsageError, reason
from gpuir.ir.graph import Graph, Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t

HARMLESS = ("aten::detach_", "aten::lift_fresh_copy")  # in-place by name, not in what they do
IN_TRAINING = (
    "the module is in training mode, so its dropout and batch "
    "statistics are counted; call .eval() to leave them out"
)


Loadable = ExportedProgram | TorchProgram | torch.nn.Module | str | Path


def load(
    source: Loadable,
    *,
    name: str = "",
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] = {},
    inputs: Mapping[str, tuple[int, ...]] = {},
    trip_counts: Mapping[str, int] = {},
    expert_skew: float = 0.0,
    converters: Mapping[str, Callable[..., Any]] = {},
    strict: bool = False,
    train: bool = False,
    joint: bool = False,
    unrolled: bool = True,
    channels_last: bool = False,
) -> Model:
    """A program as a graph of level `graph`. Weights are not read.

    `source` is an exported program, the `.pt2` file of one, or a module (an fx.GraphModule too)
    with its arguments, which is exported first. Composite operators (linear, layer_norm,
    scaled_dot_product_attention) stay what they are; what has no converter is decomposed as torch
    does, or becomes a `t.opaque` with a warning, which `strict` refuses. `dims` gives symbolic
    sizes their numbers, by the name of a `Dim` or of an axis (`x.0`), or `inputs` whole shapes;
    `trip_counts` says how often a while_loop runs that cannot be counted now, `expert_skew` how
    unevenly routers choose experts. A module is put in training mode by `train`; `joint` adds the
    backward pass, as AOTAutograd derives it; not, without `unrolled`, that of a program with
    recurrent operators, as it takes those apart step by step. With `channels_last` weights and
    inputs of four axes or five lie as torch.channels_last has them. Locations begin with `name`.
    Raises `ModelError`.
    """
    with _placed(name or source_name(source)):
        made = _program(source, args, kwargs)
    name = name or program_name(made, Path(source).stem if isinstance(source, str | Path) else "")
    if isinstance(made, TorchProgram) and made.repeats:
        again: dict[str, Any] = {"trip_counts": trip_counts, "expert_skew": expert_skew}
        again |= {"converters": converters, "strict": strict, "train": train, "joint": joint}
        again |= {"name": name, "dims": dims, "inputs": inputs, "unrolled": unrolled}
        again |= {"channels_last": channels_last}
        if (model := grown(made, partial(load, **again), joint)) is not None:
            return model
    emit = Emitter(name, Scope(expert_skew=expert_skew, converters=converters))
    emit.builder.framework = "pytorch"
    sizes = Dims(dict(dims), channels_last=channels_last)
    walk = TorchWalk(name, emit, sizes, strict, trip_counts=trip_counts)
    module = made.module if isinstance(made, TorchProgram) else None
    with _placed(name, emit), sizes.all_asked(), heard(module) as fallbacks:
        if (train or joint) and is_quantised(
            made.module if isinstance(made, TorchProgram) else made
        ):
            raise UsageError(
                "a model with quantised weights cannot be trained",
                found="weights that are tensor subclasses of torchao",
                fix="give the module as it was before torchao.quantization.quantize_",
            )
        if train and isinstance(made, TorchProgram):
            made.module.train()
        elif isinstance(made, TorchProgram) and _is_in_training(made.module):
            walk.warnings.append(IN_TRAINING)
        if isinstance(made, ExportedProgram):
            walk.dims.bind(made, inputs)
        elif inputs:
            raise UsageError(
                f"a shape is given for {', '.join(inputs)}, but a module runs on "
                "the arguments that you give it",
                fix="remove the shape, and change the arguments",
            )
        if joint and (unrolled or not _recurrent(made)):
            model = load_joint(made, name, walk)
        else:
            exported = made.export() if isinstance(made, TorchProgram) else made
            emit.scope.assumed += unreached(exported)
            if isinstance(made, TorchProgram):
                emit.scope.assumed += assumed_of(exported, made.module)
            with kept_operands(exported) if train else nullcontext():
                plain = functional(
                    exported, made.made_for if isinstance(made, TorchProgram) else ""
                )
            model = _load(plain, walk)
        walk.dims.check_all_used(live=isinstance(made, TorchProgram))
        walk.check_trip_counts()
    graph = with_layout(model.graph)
    model = replace(model, graph=replace(graph, assumed=(*graph.assumed, *fallbacks)))
    return _annotated(model, made) if isinstance(made, TorchProgram) else model


@contextmanager
def _placed(name: str, emit: Emitter | None = None) -> Generator[None]:
    """Errors say where they are, and what is none of ours becomes a `ModelError`."""
    try:
        yield
    except RecursionError:
        raise nested_too_deep(name) from None
    except GpuirError as error:
        error.where = error.where or name
        raise
    except Exception as error:
        raise ModelError(
            "the program is not valid, or gpuir reads it wrongly",
            where=str(next(iter(emit.builder.locs if emit else ()), name)),
            found=reason(error),
            fix="run it in PyTorch; if it runs there, please report this as a bug",
        ) from error


def _is_in_training(module: torch.nn.Module) -> bool:
    """Whether a part of it computes something else than it would for inference."""
    parts = (m for m in module.modules() if isinstance(m, (_DropoutNd, _NormBase)))
    return any(m.training for m in parts)


def _recurrent(made: ExportedProgram | TorchProgram) -> bool:
    """Whether it has an operator that a library runs whole, all steps of it."""
    if isinstance(made, TorchProgram):
        return any(isinstance(module, torch.nn.RNNBase) for module in made.module.modules())
    targets = (str(node.target) for node in made.graph.nodes if node.op == "call_function")
    return any(target.removeprefix("aten.") in RECURRENT for target in targets)


def source_name(source: Loadable) -> str:
    """What is named in an error before the program is read."""
    if isinstance(source, str | Path):
        return Path(source).name
    return (
        program_name(source)
        if isinstance(source, ExportedProgram | TorchProgram)
        else _name(source)
    )


def program_name(program: ExportedProgram | TorchProgram, default: str = "") -> str:
    """What a graph is called, and locations begin with: the class of the module, as the trace notes
    it in an exported program."""
    if isinstance(program, TorchProgram):
        return program.name or _name(program.module)
    stacks = (node.meta.get("nn_module_stack") for node in program.graph.nodes)
    classes = (next(iter(stack.values()))[-1] for stack in stacks if stack)
    names = (str(getattr(found, "__name__", found)).rpartition(".")[2] for found in classes)
    own = (n for n in names if n.isidentifier() and not n.startswith("_"))  # torch's own do
    return next(own, default or "program")


def _name(thing: object) -> str:
    return type(thing).__name__


def _program(
    source: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> ExportedProgram | TorchProgram:
    if isinstance(source, str | Path):
        return open_program(source)
    if isinstance(source, ExportedProgram | TorchProgram):
        if args or kwargs:
            raise UsageError(
                "arguments are given for an exported program, which has its own arguments",
                fix="remove the arguments, or give the module instead of the program",
            )
        return source
    if not isinstance(source, torch.nn.Module):
        raise UsageError(
            "not a model",
            expected="a path, a torch.nn.Module with its arguments, an exported program, an "
            "onnx.ModelProto or its bytes",
            found=type(source).__name__,
            fix=_as_module(source),
        )
    if args is None and kwargs is None:
        raise UsageError(
            "a module is given without arguments",
            fix="give the arguments of the module: gpuir.load(module, args=(x,))",
        )
    return TorchProgram(source, tuple(args or ()), dict(kwargs or {}))


def _as_module(source: Any) -> str:
    """How what was given for a model can be one."""
    if isinstance(source, type) and issubclass(source, torch.nn.Module):
        return f"give a module, not its class: {source.__name__}(...)"
    if callable(source):
        return "make the function a module: class M(torch.nn.Module) with a forward method"
    return ""


def with_layout(graph: Graph) -> Graph:
    """The graph with a word on how images lie in memory, where convolutions read some that come
    from outside."""
    read = {v for n in graph.walk() if isinstance(n.op, CONVOLUTIONS) for v in n.op.operands}
    images = [v.type for v in (*graph.inputs, *graph.params) if v in read and v.type.rank > 3]
    if not images:
        return graph
    last = [x.is_channels_last for x in images]
    how = "row-major (NCHW), as they are given; --channels-last"
    if any(last):
        how = "channels-last (NHWC)" if all(last) else "channels-last (NHWC) in part"
    return replace(graph, assumed=(*graph.assumed, f"images have the memory layout {how}"))


CONVOLUTIONS = (t.Conv, t.ConvTranspose)


def _annotated(model: Model, program: TorchProgram) -> Model:
    """The graph with what only the program's maker knew."""
    graph = model.graph
    values = {v.name: v for v in (*graph.inputs, *graph.params)}
    over = tuple(values[name] if name else None for name in program.over) or graph.over
    known = {name for name, _ in graph.roles}
    roles = tuple((n, r) for n, r in program.roles.items() if n in values and n not in known)
    assumed = tuple(dict.fromkeys((*graph.assumed, *program.assumed)))
    graph = replace(graph, over=over, roles=(*graph.roles, *roles), assumed=assumed)
    return replace(model, graph=graph)


def functional(program: ExportedProgram, made_for: str = "") -> ExportedProgram:
    """The program without operators that write in place, or run under vmap or torch.autocast, whose
    casts it makes, and without tensor subclasses, in whose place are the tensors that they hold;
    itself where there are none. `made_for` is as in `TorchProgram`."""

    def writes(target: Any) -> bool:
        schema = getattr(target, "_schema", None)
        mapped = getattr(target, "__module__", "") == "torch._functorch.predispatch"
        return mapped or (schema is not None and schema.is_mutable and schema.name not in HARMLESS)

    modules = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    written = any(writes(node.target) for m in modules for node in m.graph.nodes)
    if not (written or has_casts(program) or has_subclasses(program)):
        return program
    try:
        with unheard(), graphs_alone(), kept_places(program):
            return program.run_decompositions({})
    except Exception as error:  # whatever torch meets in it
        if made_for:
            raise unsupported(made_for, "", error) from error
        raise ModelError(
            "torch cannot decompose the program, because it writes in place or runs under autocast",
            found=reason(error),
            fix="decompose it when you export: torch.export.export(...).run_decompositions({})",
        ) from error


def _load(program: ExportedProgram, walk: TorchWalk) -> Model:
    emit, dims = walk.emit, walk.dims
    signature, calls = program.graph_signature, calls_of(program)
    emit.scope.assumed += calls.assumed
    walk.layers, walk.parts = calls.made, calls.parts
    held: Mapping[str, Any] = {**program.state_dict, **program.constants}
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    places: dict[str, Value] = {}
    tied: dict[int, Value] = {}  # one tensor under two names is one param
    shared: dict[int, Sparse] = {}  # the same of sparse ones
    given: list[Any] = []
    sparse = examples(program)
    for node in program.graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        spec, value = specs[node.name], node.meta.get("val")
        if spec.target in calls.weights:
            given.append(None)
            continue
        if not isinstance(value, torch.Tensor):
            given.append(dims(value) if isinstance(value, torch.SymInt) else value)
            continue
        tensor = held.get(str(spec.target))
        if is_sparse(value):
            stored = sparse.get(spec.arg.name) if tensor is None else tensor
            if stored is None:
                raise unknown(spec.arg.name)
            if id(stored) not in shared:
                shared[id(stored)] = placed(stored, dims, partial(_part, emit, spec))
            given.append(shared[id(stored)])
            continue
        try:
            type = dims.lying(value)
        except ModelError as error:
            error.where = f"{walk.source}:{spec.arg.name}"
            raise
        made = tied.get(id(tensor)) or _place(held, emit, spec, type)
        if spec.kind is InputKind.PARAMETER:
            tied[id(tensor)] = made
        if spec.kind is not InputKind.USER_INPUT and not getattr(tensor, "requires_grad", False):
            emit.builder.roles.setdefault(made.name, "buffer")
        places[spec.target or node.name] = made
        given.append(made)
    found = walk.run(program.graph_module, given)
    outputs: list[Value] = []
    over: list[Value | None] = []
    values: dict[str, Value] = {}
    for spec, value in zip(signature.output_specs, found, strict=True):
        if isinstance(value, Sparse):
            outputs += [emit.place(part, stored=True) for part in value.parts]
            over += [None] * len(value.parts)
        if not isinstance(value, Value):
            continue
        outputs.append(emit.place(value, stored=True))
        values[spec.arg.name] = outputs[-1]
        mutates = spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
        over.append(places.get(str(spec.target)) if mutates else None)
    keys = {key: values[name].name for name, key in keys_of(program) if name in values}
    graph = emit.finish(outputs, over)
    return Model(graph, Weights(emit.scope.weights), tuple(walk.warnings), keys)


def keys_of(program: ExportedProgram) -> list[tuple[str, str]]:
    """The outputs that the module gave a name or a place, each with it: `add_1` is `logits`."""
    names = program.graph_signature.user_outputs
    keys = _keys(program.call_spec.out_spec, ())
    return [(str(name), ".".join(key)) for name, key in zip(names, keys, strict=False) if key]


def _keys(spec: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The ways to the leaves of a tree: keys, fields, or places where a class names none."""
    if spec.is_leaf():
        yield path
        return
    parts = spec.children()
    for name, part in zip(names_of(spec.context, len(parts)) or count(), parts, strict=False):
        yield from _keys(part, (*path, str(name)))


def _part(emit: Emitter, spec: Any, name: str, type: TensorType, part: torch.Tensor) -> Value:
    """One of the tensors that store a sparse input or param."""
    if spec.kind is InputKind.USER_INPUT:
        return emit.input(f"{spec.arg.name}.{name}", type)
    made = emit.param(f"{spec.target}.{name}", type, lambda: numbers(part))
    if not part.requires_grad:
        emit.builder.roles.setdefault(made.name, "buffer")
    return made


def _place(held: Mapping[str, Any], emit: Emitter, spec: Any, type: TensorType) -> Value:
    """The value of a placeholder: an input, a param, or a small known constant."""
    if spec.kind is InputKind.USER_INPUT:
        return emit.input(spec.arg.name, type)
    tensor = held[spec.target]
    if spec.kind is InputKind.CONSTANT_TENSOR and tensor.numel() <= INLINE:
        return emit.weight(type, lambda: numbers(tensor), spec.target)
    return emit.param(spec.target, type, lambda: numbers(tensor))
