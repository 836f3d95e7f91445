"""An optimiser's step in parts: each updates the weights that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Node, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from gpuir.passes.partition.sums import Sum


class Updates:
    """Which parts need each node of an optimiser's step: tensors belong together where a node reads
    or makes them in the same place of its lists, and a weight with its gradient."""

    def __init__(self, g: Graph, sums: Sequence[Sum]):
        before = {v for found in sums for n in found.once for v in n.results}
        steps = (n for n in g.nodes if phase_of(n) == "optimizer")
        self.nodes = [n for n in steps if not before.intersection(n.results)]
        self.above: dict[Value, Value] = {}
        for node in self.nodes:
            for row in rows(node):
                for v in row[1:]:
                    self.above[self.top(v)] = self.top(row[0])
        for found in sums:
            self.above[self.top(gradient(found))] = self.top(found.weight)
        self.parts: dict[Value, tuple[int, ...]] = {}
        for found in sums:
            parts = self.parts.setdefault(self.top(found.weight), found.parts)
            if parts != found.parts:
                raise UsageError(
                    f"@{g.name} cannot be cut: its optimiser joins weights of several parts",
                    found=f"%{found.weight.name}, of {_named(found.parts)}, with {_named(parts)}",
                    fix="cut the graph before the optimiser's step is added",
                )

    def top(self, v: Value) -> Value:
        """The one that stands for all that belong together."""
        above = self.above.get(v, v)
        while above != v:
            v, above = above, self.above.get(above, above)
        return v

    def has(self, part: int, row: Sequence[Value]) -> bool:
        """Whether a part needs a row; one that belongs to no weight, all do."""
        return part in self.parts.get(self.top(row[0]), (part,))

    def of(self, part: int) -> list[Node]:
        """The nodes of a part, each with its own tensors alone."""
        found: list[Node] = []
        for node in self.nodes:
            kept = [row for row in rows(node) if self.has(part, row)]
            if not kept:
                continue
            match node.op:
                case t.Routine("multi_tensor") as op:
                    found.append(_less(node, op, kept))
                case _:
                    found.append(node)
        return found


def gradient(found: Sum) -> Value:
    """The gradient of a whole step."""
    return found.once[-1].results[0] if found.once else found.own


def rows(node: Node) -> list[tuple[Value, ...]]:
    """The tensors of a node that belong together: of lists, those in the same place."""
    match node.op:
        case t.Routine("multi_tensor") as op:
            count = len(op.args) // int(str(dict(op.attrs)["lists"]))
            return [(*op.args[i::count], *node.results[i::count]) for i in range(count)]
        case _:
            return [(*node.op.operands, *node.results)]


def _less(node: Node, op: t.Routine, kept: Sequence[tuple[Value, ...]]) -> Node:
    """A routine on lists, with some of their places alone."""
    if len(kept) == len(rows(node)):
        return node
    lists = int(str(dict(op.attrs)["lists"]))
    columns = list(zip(*kept, strict=True))
    args = tuple(v for column in columns[:lists] for v in column)
    results = tuple(v for column in columns[lists:] for v in column)
    whole = sum(row[0].type.size for row in rows(node))
    work = op.work * sum(row[0].type.size for row in kept) // max(whole, 1)
    gives = tuple(v.type for v in results)
    return replace(node, op=replace(op, args=args, gives=gives, work=work), results=results)


def _named(parts: Sequence[int]) -> str:
    return f"part{'s' * (len(parts) > 1)} {', '.join(map(str, parts))}"
