"""An ONNX model as a graph: the file read, its graph walked, its outputs named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuir.frontends.emit import Emitter, Scope, nested_too_deep
from gpuir.frontends.model import Model, Weights
from gpuir.frontends.onnx.inputs import check_given, define_inputs, show_type
from gpuir.frontends.onnx.proto import declared_type, open_model, text
from gpuir.frontends.onnx.sequence import Items
from gpuir.frontends.onnx.state import OnnxLoad
from gpuir.frontends.onnx.steps import domain_of
from gpuir.frontends.onnx.walk import OnnxWalk
from gpuir.ir.errors import GpuirError, ModelError, nearest
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto


def load(
    source: str | Path | bytes | ModelProto,
    *,
    dims: Mapping[str, int] = {},
    inputs: Mapping[str, tuple[int, ...]] = {},
    values: Mapping[str, Any] = {},
    trip_counts: Mapping[str, int] = {},
    expert_skew: float = 0.0,
    converters: Mapping[str, Callable[..., Any]] = {},
    strict: bool = False,
) -> Model:
    """An ONNX model as a graph of level `graph`. Weights are not read.

    `dims` binds symbolic dimensions by name and `inputs` gives an input its shape; every dimension
    must be known in the end. `values` gives an input its numbers, so that shapes may depend on
    them, or says what a node computes where a shape depends on the data. `trip_counts` says, by
    node, how often a loop runs where the model does not, `expert_skew` how unevenly routers choose
    experts (`t.Experts.skew`); `converters` are the user's own, by operator. An operator nobody
    knows becomes a `t.opaque` and a warning; `strict` refuses it. Raises `ModelError`.
    """
    opened = open_model(source)
    try:
        return run(
            OnnxLoad(
                source=opened,
                dims=dims,
                shapes=inputs,
                values=values,
                trip_counts=trip_counts,
                expert_skew=expert_skew,
                strict=strict,
                converters=converters,
            )
        )
    except RecursionError:
        raise nested_too_deep(opened.name) from None
    except MemoryError:
        raise ModelError(
            "there is not enough memory to load the model", where=opened.name
        ) from None
    except GpuirError as error:
        error.where = error.where or opened.name
        raise
    except Exception as error:
        raise ModelError(
            "the model is not valid ONNX, or gpuir reads it wrongly",
            where=opened.name,
            found=f"{type(error).__name__}: {error}"[:400],
            fix="check the model with onnx.checker; if it finds no error, please report "
            "this as a bug",
        ) from error


def run(load: OnnxLoad) -> Model:
    """The graph of the model, walked from its inputs to its outputs, and its weights."""
    model = load.source.model
    graph = model.graph
    opsets = load.opsets(model.opset_import)
    for f in model.functions:
        key = domain_of(text(f.domain)), text(f.name), text(f.overload)
        if load.functions.setdefault(key, f) != f:
            raise ModelError(
                f"the function {key[1]!r} is defined twice, and the definitions differ"
            )
    load.check_size(load.grown(graph.node), load.source.name)
    steps = load.steps_of(graph)
    title = Path(load.source.name).stem if load.source.folder else text(graph.name)
    emit = Emitter(
        title or "model", Scope(expert_skew=load.expert_skew, converters=load.converters)
    )
    emit.builder.framework = "onnx"
    emit.keep(load.names(graph))
    walk = OnnxWalk(load, emit, opsets)
    walk.types = {v.name: v.type for v in (*graph.value_info, *graph.output)}
    walk.initializers(graph)
    define_inputs(load, graph, walk)
    walk.run(steps)
    check_trip_counts(load)
    check_given(load, load.given_results)
    if load.strict and load.opaque:
        raise load.source.refused(
            "the model has operators that gpuir does not know",
            found="\n".join(dict.fromkeys(load.opaque)),
            fix="without --strict, gpuir counts only the memory traffic of these operators",
        )
    outputs = named_outputs(load, graph, walk)
    read = {v for node in emit.builder.nodes for v in node.op.operands} | set(outputs)
    made = emit.finish(outputs)
    present = {loc for node in made.walk() for loc in node.locs}
    params = tuple(p for p in made.params if p in read)
    folded = tuple(loc for loc in load.visited if loc not in present)
    weights = Weights({p.name: emit.scope.weights[p.name] for p in params})
    by_origin = sorted(
        (pair for pair in load.origins.items() if pair[0] in present), key=lambda x: x[1]
    )
    made = replace(made, params=params, folded=folded, origins=tuple(by_origin))
    return Model(made, weights, tuple(dict.fromkeys(load.warnings)))


def check_trip_counts(load: OnnxLoad) -> None:
    for name in load.trip_counts:
        if name not in load.loops:
            raise load.source.refused(
                f"--trip-count {name}: the model has no such loop",
                fix=nearest(name, load.loops) if load.loops else "the model has no loops",
            )


def named_outputs(load: OnnxLoad, graph: GraphProto, walk: OnnxWalk) -> tuple[Value, ...]:
    """The graph's outputs under the model's names, each a value of its own."""
    emit, builder = walk.emit, walk.emit.builder
    names = [v.name for v in graph.output]
    wanted = dict.fromkeys(names)
    if len(wanted) != len(names):
        raise load.source.refused("two outputs have the same name")
    renamed: dict[Value, Value] = {}
    outputs: dict[str, Value] = {}
    taken: set[Value] = set()
    for v in graph.output:
        name = v.name
        value = walk.value(name, f"{load.source.name}: output")
        if isinstance(value, Items):
            raise load.source.refused(
                f"the output {name!r} is a sequence",
                "tensors of numbers",
                fix="change the model so that each item of the sequence is an output",
            )
        builder.locs = (walk.places.get(name, load.loc(name)),)
        if (const := emit.const_of(value)) is not None:
            const.origin = None  # called as the output
        value = emit.place(value)
        if value.name != name or value in taken:
            free = builder.producer(value) is not None and value not in taken
            if free and value.name not in wanted:
                taken.add(value)
                renamed[value] = emit.rename(value, name)
                value = renamed[value]
            else:
                value = emit.put(t.Map("identity", (value,)), name)
        taken.add(value)
        outputs[name] = value
        check_declared(load, v, value.type)
    if renamed:
        builder.rename(0, renamed)
    return tuple(renamed.get(v, v) for v in outputs.values())


def check_declared(load: OnnxLoad, output: Any, type: TensorType) -> None:
    """Warns where an output's declared shape is not what the model computes."""
    if output.type.WhichOneof("value") != "tensor_type":
        return
    dtype, dims = declared_type(output.type, output.name)
    fits = dims is None or (
        len(dims) == type.rank
        and all(
            n is None or n == m for n, m in zip(map(load.extent, dims), type.shape, strict=True)
        )
    )
    if dtype != type.dtype or not fits:
        load.warn(
            f"{load.source.name}: output {output.name} is declared as "
            f"{show_type((dtype, dims))}, but gpuir computes {type}"
        )
