"""What a pass that looks for patterns knows of the graph, and how it replaces them."""

from __future__ import annotations

import math
from typing import Literal

from gpuir.ir.build import Builder
from gpuir.ir.graph import Graph, Loc, Node, Op, Value
from gpuir.ops import tensor as t

Shape = tuple[int, ...]
Term = Value | float  # an argument of a pointwise op, a uniform constant as its number

TOLERANCE = {"f16": 2e-3, "bf16": 2e-2}  # of a formula's constants, relative; else the next
PRECISE = 2e-5


class Matcher:
    """One graph while it is rewritten: who makes and who reads each value, kept up to date. A
    value keeps its name and type when the op that makes it is replaced."""

    def __init__(self, g: Graph):
        self.node = {v: n for n in g.nodes for v in n.results}
        self.place = {n.results[0]: (i, 0) for i, n in enumerate(g.nodes) if n.results}
        self.users: dict[Value, set[Value]] = {}  # each reader by its first result
        for n in g.nodes:
            for v in n.op.operands if n.results else ():
                self.users.setdefault(v, set()).add(n.results[0])
        self.outputs, self.params = set(g.outputs), set(g.params)
        self.order: dict[Loc, int] = {}
        for n in g.nodes:
            for loc in n.locs:
                self.order.setdefault(loc, len(self.order))
        self.read: dict[Value, tuple[str, *tuple[Term, ...]] | tuple[()]] = {}  # what `terms` said
        self.extras: dict[Op, Value] = {}

    # -- replacing

    def matched(self, n: Node, leaves: tuple[Value, ...]) -> list[Node] | None:
        """The nodes between `leaves` and `n`, itself included, that nobody else reads. None if any
        but a constant, a cast or a layout op has other readers."""
        inside: dict[Value, Node] = {}
        stack = [n]
        while stack:
            node = stack.pop()
            inside[node.results[0]] = node
            for v in node.op.operands:
                if v in leaves:
                    continue
                if v not in self.node:
                    return None
                if self.node[v].results[0] not in inside:
                    stack.append(self.node[v])
        dead: dict[Value, Node] = {}
        for key in sorted(inside, key=self.place.__getitem__, reverse=True):
            node = inside[key]
            free = key not in self.outputs and self.users.get(key, set()) <= dead.keys()
            if node is n or (free and len(node.results) == 1):
                dead[key] = node
            elif not isinstance(node.op, t.Constant | t.Cast | t.Layout):
                return None
        return list(dead.values())

    def put(
        self, b: Builder, op: Op, n: Node, dead: list[Node], locs: tuple[Loc, ...] = ()
    ) -> tuple[Value, ...]:
        """`op` in place of `n`, standing for all of `dead` where no `locs` are given."""
        for d in dead:
            for v in d.op.operands:
                self.users[v].discard(d.results[0])
        node = Node(op, n.results, locs or self.locs(dead))
        self.keep(node)
        return b.add(op, locs=node.locs)

    def extra(self, b: Builder, op: Op, n: Node, locs: tuple[Loc, ...]) -> Value:
        """A new op ahead of `n`, named after it; once for all who want the same."""
        if op in self.extras:
            return self.extras[op]
        (value,) = b.add(op, (f"{n.results[0].name}.{op.name[2:]}",), locs)
        self.place[value] = (self.place[n.results[0]][0] - 1, len(b.nodes))
        self.keep(b.nodes[-1])
        self.extras[op] = value
        return value

    def keep(self, node: Node) -> None:
        self.node[node.results[0]] = node
        self.read.pop(node.results[0], None)
        for v in node.op.operands:
            self.users.setdefault(v, set()).add(node.results[0])

    def locs(self, nodes: list[Node]) -> tuple[Loc, ...]:
        """Their locations in the model's order."""
        found = {loc for n in nodes for loc in n.locs}
        return tuple(sorted(found, key=self.order.__getitem__))

    # -- reading

    def op(self, v: Term) -> Op | None:
        node = self.node.get(v) if isinstance(v, Value) else None
        return None if node is None else node.op

    def number(self, v: Value) -> float | None:
        """The number that `v` holds throughout, where that is known."""
        match self.op(v):
            case t.Constant(_, data) if data and all(x == data[0] for x in data):
                return float(data[0])
            case t.Reshape(x) | t.Broadcast(x) | t.Cast(x):
                return self.number(x)
            case _:
                return None

    def terms(self, v: Term) -> tuple[str, *tuple[Term, ...]] | tuple[()]:
        """`v = fn(args)` as (fn, *args), numbers as floats and behind where the order is free; ()
        where v is no pointwise op on floats."""
        if not isinstance(v, Value):
            return ()
        if (known := self.read.get(v)) is not None:
            return known
        op = self.op(v)
        if not isinstance(op, t.Map) or not v.type.dtype.is_float:
            self.read[v] = ()
            return ()
        args: list[Term] = list(op.args)
        for i, x in enumerate(op.args):
            others = (y for j, y in enumerate(args) if j != i and isinstance(y, Value))
            if any(y.type.shape == v.type.shape for y in others):
                number = self.number(x)
                args[i] = x if number is None else number
        args += map(float, op.imm)
        if op.fn in ("add", "mul", "max") and isinstance(args[0], float):
            args.reverse()
        self.read[v] = (op.fn, *args)
        return self.read[v]

    def factor(self, v: Term) -> tuple[Value, float] | None:
        """(x, c) where v is x * c."""
        match self.terms(v):
            case ("mul", Value() as x, float(c)):
                return x, c
            case ("div", Value() as x, float(c)) if c:
                return x, 1 / c
            case _:
                return None

    def reduced(
        self, fn: Literal["sum", "max", "mean"], v: Term | None
    ) -> tuple[Value, Shape] | None:
        """x and the axes where v is `fn` over them, kept as 1."""
        if not isinstance(v, Value):
            return None
        match self.op(v):
            case t.Reduce(f, x, axes) if f == fn and v.type.rank == x.type.rank:
                return x, tuple(sorted(axes))
            case t.Reshape(y):
                match self.op(y):
                    case t.Reduce(f, x, axes) if f == fn and _kept(x, axes) == v.type.shape:
                        return x, tuple(sorted(axes))
                    case _:
                        return None
            case _:
                pass
        if fn == "mean" and (part := self.factor(v)) and (found := self.reduced("sum", part[0])):
            x, axes = found
            if close(part[1] * math.prod(x.type.shape[a] for a in axes), 1.0, v):
                return found
        return None

    def is_weight(self, v: Value) -> bool:
        """Whether v is a param or a constant, cast or laid out differently perhaps."""
        match self.op(v):
            case t.Constant():
                return True
            case t.Reshape(x) | t.Transpose(x) | t.Broadcast(x) | t.Slice(x) | t.Cast(x):
                return self.is_weight(x)
            case _:
                return v in self.params


def close(a: float, b: float, v: Value) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE.get(v.type.dtype.name, PRECISE))


def _kept(x: Value, axes: Shape) -> Shape:
    return tuple(1 if i in axes else n for i, n in enumerate(x.type.shape))
