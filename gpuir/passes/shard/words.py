"""A vocabulary with as many words more as it takes to be cut: frameworks pad it so."""

from __future__ import annotations

from dataclasses import replace

from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Graph, Node, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t
from gpuir.passes.shard.place import part
from gpuir.passes.shard.sources import Homes, Sources

Sizes = tuple[int, ...]


def vocabulary(g: Graph) -> int:
    """The rows of the largest table that the forward pass looks rows up in; 0 without one."""
    sources = Sources(g, 1, lambda v: False)
    tables: Homes = {}
    for n in g.nodes:
        if isinstance(n.op, t.Gather) and phase_of(n) is None:
            tables |= sources.homes(n.op.x, part(n.op.axis)) or {}
    weights = [v for v in g.params if v in tables and is_weight(g, v)]
    largest = max(weights, key=lambda v: v.type.size, default=None)
    return largest.type.shape[tables[largest].axis] if largest else 0


def is_weight(g: Graph, v: Value) -> bool:
    """Whether a param is a weight, or one that is quantised, which no gradient trains."""
    role = g.role_of(v)
    return role == "weight" or (role == "buffer" and v.type.dtype.bits <= 8)


def padded(g: Graph, words: int, to: int) -> Graph | None:
    """The same model with a larger vocabulary: every axis of so many `words` has `to` instead, in
    tables, gradients and scores. None where an axis of that extent may be something else, or
    what is in a constant or a branch depends on it.

    Scores of the words that are added take part in a softmax, as in Megatron-LM.
    """
    if any(words in v.type.shape for v in g.inputs):
        return None
    if any(v.type.shape.count(words) > 1 for v in g.params):
        return None
    new = {v: _larger(v, words, to) for v in (*g.inputs, *g.params) if words in v.type.shape}
    nodes: list[Node] = []
    for n in g.nodes:
        touched = any(words in v.type.shape for v in (*n.op.operands, *n.results))
        if not touched:
            nodes.append(n)
            continue
        results = tuple(_larger(v, words, to) for v in n.results)
        try:
            op = _resized(n.op.substitute(new), words, to)
            if op is None or op.result_types != tuple(v.type for v in results):
                return None
        except ModelError:
            return None
        new.update(zip(n.results, results, strict=True))
        nodes.append(replace(n, op=op, results=results))
    return replace(
        g,
        inputs=tuple(new.get(v, v) for v in g.inputs),
        params=tuple(new.get(v, v) for v in g.params),
        nodes=tuple(nodes),
        outputs=tuple(new.get(v, v) for v in g.outputs),
        over=tuple(v and new.get(v, v) for v in g.over),
    )


def _swapped(sizes: Sizes, words: int, to: int) -> Sizes:
    return tuple(to if n == words else n for n in sizes)


def _larger(v: Value, words: int, to: int) -> Value:
    return Value(v.name, _type(v.type, words, to))


def _type(type: TensorType, words: int, to: int) -> TensorType:
    return type.with_shape(_swapped(type.shape, words, to))


def _resized(op: Op, words: int, to: int) -> Op | None:
    """An op, whose operands have the new extent, with the attributes that speak of it; None where
    what it does depends on how many words there are."""
    match op:
        case t.Constant(type, data):
            return replace(op, type=_type(type, words, to)) if len(data) == 1 else None
        case t.Iota(type):
            return replace(op, type=_type(type, words, to))
        case t.Slice(_, starts, sizes):
            found = _swapped(sizes, words, to)
            moved = any(a and n != m for a, n, m in zip(starts, sizes, found, strict=True))
            return None if moved else replace(op, sizes=found)
        case t.Reshape() | t.Broadcast() | t.NormalizeScaleGradient():
            return replace(op, shape=_swapped(op.shape, words, to))
        case t.Routine("multi_tensor" | "random"):
            gives = tuple(_type(x, words, to) for x in op.gives)
            before, after = (sum(x.size for x in some) for some in (op.gives, gives))
            attrs = tuple((n, gives[0].shape if n == "shape" else x) for n, x in op.attrs)
            return replace(op, gives=gives, attrs=attrs, work=op.work * after // max(before, 1))
        case t.Routine() | t.Opaque():
            return None
        case _:
            return None if op.control else op
