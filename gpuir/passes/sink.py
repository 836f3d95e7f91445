"""Transposes behind the ops that read them, where two of them cancel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

Perm = tuple[int, ...]
MOVES = (t.Map, t.Cast, t.Concat, t.Pad, t.Slice, t.Reduce, t.ArgReduce, t.Softmax)


@dataclass(frozen=True)
class Sink(Pass):
    """Moves transposes behind pointwise ops, reductions, joins, pads and slices whose operands are
    all transposed alike, or as small as a bias, and joins those that meet: the layout changes that
    converters put around each op of a model in another layout go away, as onnxruntime's
    TransposeOptimizer has it (onnxruntime/core/optimizer/transpose_optimization)."""

    name = "sink"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        return prune(_Sinker(g).graph()) if any(_is_transpose(n.op) for n in g.walk()) else g


class _Sinker:
    def __init__(self, g: Graph):
        self.g = g
        every = list(_regions(g))
        self.outputs = {v for x in every for v in x.outputs}
        self.uses = {v: nodes for x in every for v, nodes in x.uses().items()}
        self.made_at = {v.name: n.locs for n in g.walk() for v in n.results}
        self.locs: dict[Value, tuple[Loc, ...]] = {}  # of transposes that were moved

    def graph(self) -> Graph:
        return rewrite(self.g, self.rule)

    def rule(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        if len(n.results) != 1:
            return None
        match n.op:
            case t.Transpose(y, q) if (first := b.producer(y)) and isinstance(first, t.Transpose):
                perm = tuple(first.perm[i] for i in q)
                if perm == tuple(range(len(perm))):
                    return (first.x,)
                return b.add(t.Transpose(first.x, perm), (), (*self.locs.get(y, ()), *n.locs))
            case op if isinstance(op, MOVES):
                return self.moved(n, op, b)
            case _:
                return None

    def moved(self, n: Node, op: Op, b: Builder) -> tuple[Value, ...] | None:
        """op(transpose(x), ..)  →  transpose(op(x, ..))"""
        made = {v: b.producer(v) for v in op.operands}
        inner = {v: o for v, o in made.items() if isinstance(o, t.Transpose)}
        perms = {o.perm for o in inner.values()}
        if len(perms) != 1 or not all(map(self.may_move, inner)):
            return None
        (perm,) = perms
        back = _behind(op, perm)
        ends = back == tuple(range(len(back)))
        if not ends and not self.may_move(n.results[0]):
            return None  # it would only be another op's to wait for
        bare: dict[Value, Value] = {v: o.x for v, o in inner.items()}
        for v in set(op.operands) - bare.keys():
            shape = _unmoved(v.type.shape, perm) if isinstance(op, t.Map) else None
            if v.type.size == 1 and v.type.rank == 0:
                continue
            if shape is None:
                return None
            bare[v] = b.add(t.Reshape(v, shape), (f"{v.name}.reshape",), n.locs)[0]
        if ends:
            return b.add(_within(op, perm, bare), (), n.locs)
        (y,) = b.add(_within(op, perm, bare), (f"{n.results[0].name}.inner",), n.locs)
        source = next(v for v in op.operands if v in inner)
        self.locs[n.results[0]] = self.locs.get(source) or self.made_at[source.name]
        return b.add(t.Transpose(y, back), (), self.locs[n.results[0]])

    def may_move(self, v: Value) -> bool:
        """Whether all readers of a transposed value let the transpose pass, or join it."""
        readers = self.uses.get(v, ())
        return v not in self.outputs and all(
            isinstance(r.op, (*MOVES, t.Transpose)) for r in readers
        )


def _regions(g: Graph) -> Iterator[Graph]:
    """The graph, and those of its loops and branches."""
    yield g
    for node in g.nodes:
        if node.op.control:
            for region in node.op.regions:
                yield from _regions(region)


def _is_transpose(op: Op) -> bool:
    return isinstance(op, t.Transpose)


def _unmoved(shape: tuple[int, ...], perm: Perm) -> tuple[int, ...] | None:
    """The shape of a small operand before the transpose; None where its cells would move."""
    if len(shape) > len(perm):
        return None
    full = (1,) * (len(perm) - len(shape)) + shape
    before = [1] * len(perm)
    for i, p in enumerate(perm):
        before[p] = full[i]
    wide = [p for i, p in enumerate(perm) if full[i] != 1]
    return tuple(before) if wide == sorted(wide) else None


def _behind(op: Op, perm: Perm) -> Perm:
    """The transpose of the op's result."""
    match op:
        case t.Reduce(axes=axes, keepdims=False) | t.ArgReduce(axis=axes, keepdims=False):
            gone = {perm[a] for a in (axes if isinstance(axes, tuple) else (axes,))}
            kept = [p for p in perm if p not in gone]
            return tuple(sorted(kept).index(p) for p in kept)
        case _:
            return perm


def _within(op: Op, perm: Perm, bare: Mapping[Value, Value]) -> Op:
    """The op on its operands before the transpose."""
    new = op.substitute(bare)
    match new:
        case t.Concat(axis=axis) | t.Softmax(axis=axis) | t.ArgReduce(axis=axis):
            return replace(new, axis=perm[axis])
        case t.Reduce(axes=axes):
            return replace(new, axes=tuple(perm[a] for a in axes))
        case t.Pad(low=low, high=high):
            return replace(new, low=_inverse(low, perm), high=_inverse(high, perm))
        case t.Slice(starts=starts, sizes=sizes, steps=steps):
            rows = (_inverse(row, perm) for row in (starts, sizes, steps))
            return replace(new, **dict(zip(("starts", "sizes", "steps"), rows, strict=True)))
        case _:
            return new


def _inverse(row: tuple[int, ...], perm: Perm) -> tuple[int, ...]:
    """One number an axis, as the axes were before the transpose."""
    before = [0] * len(perm)
    for i, p in enumerate(perm):
        before[p] = row[i]
    return tuple(before)
