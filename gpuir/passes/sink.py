"""Transposes behind the ops that read them, where that leaves less to transpose."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

Perm = tuple[int, ...]
Shape = tuple[int, ...]
FIRST = (t.Cast, t.Pad, t.Slice, t.Reduce, t.ArgReduce, t.Softmax)  # with the transpose on one side
MOVES = (t.Map, t.Concat, *FIRST)


@dataclass(frozen=True)
class Sink(Pass):
    """Moves transposes behind pointwise ops, reductions, joins, pads, slices and reshapes that add
    or drop ones, and joins those that meet: the layout changes that converters put around each op
    of a model in another layout go away.

    A transpose moves where less is transposed after than before, counted in axes longer than one,
    as onnxruntime's TransposeOptimizer weighs it (onnxruntime/core/optimizer/
    transpose_optimization/onnx_transpose_optimization.cc, CalculateCost): one on an operand goes
    away if all its readers might let it pass; an operand without one gets one, unless it is known
    beforehand; and so does the result, unless another transpose waits behind it.
    """

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
        self.known = set(g.params)  # weights, and what is computed from them alone
        for n in (n for x in every for n in x.nodes):
            if not n.op.control and self.known.issuperset(n.op.operands):
                self.known.update(n.results)
        self.leading: set[Value] = set()  # what a transpose waits behind, past ops that let it pass
        for n in (n for x in every for n in reversed(x.nodes)):
            if isinstance(n.op, t.Transpose):
                self.leading.add(n.op.x)
            elif self.leading.intersection(n.results):
                self.leading.update(self.passing(n))

    def graph(self) -> Graph:
        return rewrite(self.g, self.rule)

    def rule(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        if len(n.results) != 1:
            return None
        match n.op:
            case t.Transpose(y, q) if (first := b.producer(y)) and isinstance(first, t.Transpose):
                return self.joined(n, y, first, q, b)
            case t.Reshape(y, z) if (first := b.producer(y)) and isinstance(first, t.Transpose):
                q = _as_transpose(y.type.shape, z)
                if q and self.cost(n, (y,), first.perm, b, result=False) < 0:
                    return self.joined(n, y, first, q, b)
                return self.moved(n, b)
            case _:
                return self.moved(n, b)

    def joined(
        self, n: Node, y: Value, first: t.Transpose, q: Perm, b: Builder
    ) -> tuple[Value, ...]:
        """transpose(transpose(x))  →  transpose(x), or x"""
        perm = tuple(first.perm[i] for i in q)
        if perm == tuple(range(len(perm))):
            return (first.x,)
        return b.add(t.Transpose(first.x, perm), (), n.locs)

    def moved(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        """op(transpose(x), ..)  →  transpose(op(x, ..))"""
        operands = self.passing(n)
        made = (b.producer(v) for v in operands)
        for perm in dict.fromkeys(o.perm for o in made if isinstance(o, t.Transpose)):
            if self.cost(n, operands, perm, b) < 0 and (found := self.behind(n, operands, perm, b)):
                return found
        return None

    def passing(self, n: Node) -> tuple[Value, ...]:
        """The operands of a node that transposes could move from behind it; () of others."""
        match n.op:
            case t.Slice() if self.is_gather(n):
                return ()
            case t.Map(_, operands) | t.Concat(operands):
                return tuple(v for v in dict.fromkeys(operands) if v.type.rank)
            case t.Reshape(y, z) if len(z) != y.type.rank and (axes := _units(y.type.shape, z)):
                folded = axes[0] != 0 and len(z) < y.type.rank  # a batch of one, with what follows
                return () if folded else (y,)
            case op if isinstance(op, FIRST):
                return op.operands[:1]
            case _:
                return ()

    def is_gather(self, n: Node) -> bool:
        """Whether a slice is how a model node takes one index: no transpose moves past that."""
        readers = self.uses.get(n.results[0], ())
        return bool(n.locs) and any(
            isinstance(r.op, t.Reshape) and r.locs == n.locs for r in readers
        )

    def cost(
        self, n: Node, operands: tuple[Value, ...], perm: Perm, b: Builder, result: bool = True
    ) -> int:
        """What there is to transpose with a transpose behind node n, less what there is now."""
        cost = 0
        for v in operands:
            made = b.producer(v)
            if isinstance(made, t.Transpose):
                cost -= _long(v.type.shape) if made.perm == perm and self.may_leave(v) else 0
            elif v not in self.known:
                cost += _long(v.type.shape)
        if cost < 0 and result and n.results[0] not in self.leading:
            cost += _long(n.results[0].type.shape)
        return cost

    def may_leave(self, v: Value) -> bool:
        """Whether all readers of a transposed value might let the transpose pass, or join it."""
        return v not in self.outputs and all(
            isinstance(r.op, (*MOVES, t.Transpose, t.Reshape)) and not self.is_gather(r)
            for r in self.uses.get(v, ())
        )

    def behind(
        self, n: Node, operands: tuple[Value, ...], perm: Perm, b: Builder
    ) -> tuple[Value, ...] | None:
        source = next(
            v for v in operands if isinstance(o := b.producer(v), t.Transpose) and o.perm == perm
        )
        locs = self.locs.get(source) or self.made_at[source.name]
        bare: dict[Value, Value] = {}
        for v in operands:
            before = self.before(v, perm, n, locs, b)
            if before is None:
                return None
            bare[v] = before
        op, back = _within(n.op, perm, bare)
        if back == tuple(range(len(back))):
            return b.add(op, (), n.locs)
        (y,) = b.add(op, (f"{n.results[0].name}.inner",), n.locs)
        self.locs[n.results[0]] = locs
        return b.add(t.Transpose(y, back), (), locs)

    def before(
        self, v: Value, perm: Perm, n: Node, locs: tuple[Loc, ...], b: Builder
    ) -> Value | None:
        """What v is a transpose of, made where there is no such thing; None for a weight that
        would have to be another."""
        made = b.producer(v)
        if isinstance(made, t.Transpose) and made.perm == perm:
            return made.x
        if (small := _unmoved(v.type.shape, perm)) is not None:
            return b.add(t.Reshape(v, small), (f"{v.name}.reshape",), n.locs)[0]
        if v in self.known or v.type.rank > len(perm):
            return None
        if missing := len(perm) - v.type.rank:
            wide = t.Reshape(v, (*(1,) * missing, *v.type.shape))
            (v,) = b.add(wide, (f"{v.name}.reshape",), n.locs)
        turn = t.Transpose(v, _inverted(perm))
        if isinstance(made, t.Transpose) and not missing:
            turn = t.Transpose(made.x, tuple(made.perm[i] for i in turn.perm))
            locs = self.locs.get(v) or self.made_at[v.name]
        return b.add(turn, (f"{v.name}.inner",), locs)[0]


def _regions(g: Graph) -> Iterator[Graph]:
    """The graph, and those of its loops and branches."""
    yield g
    for node in g.nodes:
        if node.op.control:
            for region in node.op.regions:
                yield from _regions(region)


def _is_transpose(op: Op) -> bool:
    return isinstance(op, t.Transpose)


def _long(shape: Shape) -> int:
    """How many axes are longer than one."""
    return sum(n != 1 for n in shape)


def _inverted(perm: Perm) -> Perm:
    return tuple(perm.index(i) for i in range(len(perm)))


def _unmoved(shape: Shape, perm: Perm) -> Shape | None:
    """The shape of a small operand before the transpose; None where its cells would move."""
    if len(shape) > len(perm):
        return None
    full = (1,) * (len(perm) - len(shape)) + shape
    before = [1] * len(perm)
    for i, p in enumerate(perm):
        before[p] = full[i]
    wide = [p for i, p in enumerate(perm) if full[i] != 1]
    return tuple(before) if wide == sorted(wide) else None


def _units(before: Shape, after: Shape) -> list[int | None] | None:
    """Of each axis after a reshape, the one it was before, or None where it is a new one. None
    altogether if the reshape does more than to add or to drop ones, or does both."""
    found: list[int | None] = []
    at = dropped = 0
    for n in after:
        while n != 1 and at < len(before) and before[at] == 1:
            at, dropped = at + 1, dropped + 1
        if at < len(before) and before[at] == n:
            found.append(at)
            at += 1
        elif n == 1:
            found.append(None)
        else:
            return None
    dropped += len(before) - at
    if any(n != 1 for n in before[at:]) or (dropped and None in found):
        return None
    return found


def _as_transpose(before: Shape, after: Shape) -> Perm | None:
    """The transpose that moves ones alone and does what a reshape does, if there is one."""
    left = dict(enumerate(before))
    perm: list[int] = []
    for n in after if len(before) == len(after) else ():
        axis = next((i for i, m in left.items() if m == n or (m != 1 and n != 1)), None)
        if axis is None or left.pop(axis) != n:
            return None
        perm.append(axis)
    return tuple(perm) or None


def _within(op: Op, perm: Perm, bare: Mapping[Value, Value]) -> tuple[Op, Perm]:
    """The op on its operands before the transpose, and the transpose of its result."""
    new = op.substitute(bare)
    match new:
        case t.Concat(axis=axis) | t.Softmax(axis=axis):
            return replace(new, axis=perm[axis]), perm
        case t.ArgReduce(axis=axis):
            return replace(new, axis=perm[axis]), perm if new.keepdims else _less(perm, {axis})
        case t.Reduce(axes=axes):
            back = perm if new.keepdims else _less(perm, set(axes))
            return replace(new, axes=tuple(perm[a] for a in axes)), back
        case t.Pad(low=low, high=high):
            return replace(new, low=_before(low, perm), high=_before(high, perm)), perm
        case t.Slice(starts=starts, sizes=sizes, steps=steps):
            rows = (_before(row, perm) for row in (starts, sizes, steps))
            return replace(new, **dict(zip(("starts", "sizes", "steps"), rows, strict=True))), perm
        case t.Reshape(x, shape):
            return _reshaped(x, perm, shape)
        case _:
            return new, perm


def _reshaped(x: Value, perm: Perm, after: Shape) -> tuple[Op, Perm]:
    """reshape(transpose(x)) that adds or drops ones  →  reshape(x), and its transpose"""
    axes = _units(tuple(x.type.shape[p] for p in perm), after) or []
    kept = {perm[a] for a in axes if a is not None}
    if len(after) < len(perm):
        shape = tuple(n for i, n in enumerate(x.type.shape) if i in kept)
        return t.Reshape(x, shape), _less(perm, set(range(len(perm))) - {*axes})
    places = [i for i, a in enumerate(axes) if a is not None]
    shape = [1] * len(after)
    for i, n in zip(places, x.type.shape, strict=True):
        shape[i] = n
    back = tuple(i if a is None else places[perm[a]] for i, a in enumerate(axes))
    return t.Reshape(x, tuple(shape)), back


def _less(perm: Perm, gone: Collection[int | None]) -> Perm:
    """A transpose without some axes of its result."""
    kept = [p for a, p in enumerate(perm) if a not in gone]
    return tuple(sorted(kept).index(p) for p in kept)


def _before(row: tuple[int, ...], perm: Perm) -> tuple[int, ...]:
    """One number an axis, as the axes were before the transpose."""
    return tuple(row[i] for i in _inverted(perm))
