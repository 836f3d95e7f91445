"""An optimiser's step in parts: each updates the weights that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Node, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from gpuir.passes.optimizer import adds_squares
from gpuir.passes.partition.sums import Sum, is_linear

RowParts = list[tuple[int, ...] | None]  # the parts of each row of a node; None of what all have


class Updates:
    """Which parts need each node of an optimiser's step: tensors belong together where a node reads
    or makes them in the same place of its lists, and a weight with its gradient.

    What adds up squares of all gradients, to a norm that they are clipped to, each part does for
    its own, a weight of several parts counting in the first: the parts add up their `totals`, and
    what follows from these alone is `common` to all.
    """

    def __init__(self, g: Graph, sums: Sequence[Sum], count: int):
        before = {v for found in sums for n in (*found.sent, *found.once) for v in n.results}
        steps = (n for n in g.nodes if phase_of(n) == "optimizer")
        self.nodes = [n for n in steps if not before.intersection(n.results)]
        self.summed, self.totals = summed(self.nodes)
        self.common, self.early = common(self.nodes, self.totals), sources(self.nodes, self.totals)
        self.above: dict[Value, Value] = {}
        for node in self.nodes:
            if node.results[0] in self.summed and not adds_squares(node.op):
                continue
            for row in rows(node):
                for v in row[1:]:
                    if v not in self.common:
                        self.above[self.top(v)] = self.top(row[0])
        for found in sums:
            self.above[self.top(found.gradient)] = self.top(found.weight)
        self.parts: dict[Value, tuple[int, ...]] = {}
        for found in sums:
            parts = self.parts.setdefault(self.top(found.weight), found.parts)
            if parts != found.parts:
                raise UsageError(
                    f"@{g.name} cannot be split: its optimizer combines weights of several parts",
                    found=f"%{found.weight.name}, of {_named(found.parts)}, with {_named(parts)}",
                    fix="split the graph before the pass optimizer",
                )
        self.wanted: list[list[tuple[Node, RowParts]]] = [[] for _ in range(count)]
        for node in self.nodes:
            places = self.row_parts(node)
            every = not places or None in places
            for part in range(count) if every else {p for x in places if x for p in x}:
                self.wanted[part].append((node, places))

    def top(self, v: Value) -> Value:
        """The one that stands for all that belong together."""
        above = self.above.get(v, v)
        while above != v:
            v, above = above, self.above.get(above, above)
        return v

    def of(self, part: int) -> tuple[list[Node], list[Node]]:
        """The nodes of a part, each with its own tensors alone: up to the totals, and behind."""
        early, late = list[Node](), list[Node]()
        terms: dict[Value, Value] = {}  # what the part has of what it adds up
        for node, places in self.wanted[part]:
            if not places:
                made = _of_terms(node, terms)
            else:
                made = own(node, places, part)
                if made is not None and adds_squares(made.op):
                    terms.update((v, v) for v in made.results)
            if made is not None:
                (early if node.results[0] in self.early else late).append(made)
        return early, late

    def row_parts(self, node: Node) -> RowParts:
        """The parts of each row of a node, of its squares the first alone; none of what adds up
        terms."""
        one = adds_squares(node.op)
        if node.results[0] in self.summed and not one:
            return []
        found = (self.parts.get(self.top(row[0])) for row in rows(node))
        return [parts[:1] if parts and one else parts for parts in found]


def own(node: Node, places: RowParts, part: int) -> Node | None:
    """A node with a part's own rows; those that belong to no weight, all parts have."""
    kept = [i for i, parts in enumerate(places) if parts is None or part in parts]
    if len(kept) == len(places) or not kept:
        return node if kept else None
    match node.op:
        case t.Routine("multi_tensor") as op:
            return _less(node, op, kept)
        case _:
            return node


def rows(node: Node) -> list[tuple[Value, ...]]:
    """The tensors of a node that belong together: of lists, those in the same place."""
    match node.op:
        case t.Routine("multi_tensor") as op:
            count = len(op.args) // int(str(dict(op.attrs)["lists"]))
            return [(*op.args[i::count], *node.results[i::count]) for i in range(count)]
        case _:
            return [(*node.op.operands, *node.results)]


def _less(node: Node, op: t.Routine, kept: Sequence[int]) -> Node:
    """A routine on lists, with some of their places alone."""
    attrs, every = dict(op.attrs), rows(node)
    lists, numbers = int(str(attrs["lists"])), attrs["numbers"]
    columns = list(zip(*(every[i] for i in kept), strict=True))
    args = tuple(v for column in columns[:lists] for v in column)
    results = tuple(v for column in columns[lists:] for v in column)
    whole = sum(row[0].type.size for row in every)
    work = op.work * sum(v.type.size for v in columns[0]) // max(whole, 1)
    gives = tuple(v.type for v in results)
    if adds_squares(op) and isinstance(numbers, tuple) and numbers:
        attrs["numbers"] = tuple(numbers[i] for i in kept)
    made = replace(op, args=args, gives=gives, work=work, attrs=tuple(attrs.items()))
    return replace(node, op=made, results=results)


# ---- a norm of all gradients -------------------------------------------------------------------


def summed(nodes: Sequence[Node]) -> tuple[set[Value], tuple[Value, ...]]:
    """The sums of squares of single gradients, with what adds them up; and the totals, which are
    read by what is not linear."""
    found, totals = set[Value](), dict[Value, None]()
    for node in nodes:
        terms = [v for v in node.op.operands if v in found]
        if adds_squares(node.op) or (terms and adds(node.op)):
            found.update(node.results)
        else:
            totals.update(dict.fromkeys(terms))
    return found, tuple(totals)


def adds(op: Op) -> bool:
    """Whether an op gives of terms of a sum terms of it, or their sum."""
    match op:
        case t.Concat() | t.Reduce("sum"):
            return True
        case _:
            return is_linear(op)


def common(nodes: Sequence[Node], totals: Sequence[Value]) -> set[Value]:
    """The totals, and what follows from them alone."""
    found = set(totals)
    for node in nodes:
        if node.op.operands and found.issuperset(node.op.operands):
            found.update(node.results)
    return found


def sources(nodes: Sequence[Node], totals: Sequence[Value]) -> set[Value]:
    """The results of the nodes that the totals come from."""
    found = set(totals)
    for node in reversed(nodes):
        if not found.isdisjoint(node.results):
            found.update((*node.op.operands, *node.results))
    return found


def _of_terms(node: Node, terms: dict[Value, Value]) -> Node | None:
    """What adds up terms, of those that a part has; None where it has none."""
    own = tuple(terms[v] for v in node.op.operands if v in terms)
    if not own:
        return None
    op = replace(node.op, args=own) if isinstance(node.op, t.Concat) else node.op.substitute(terms)
    results = tuple(Value(v.name, x) for v, x in zip(node.results, op.result_types, strict=True))
    terms.update(zip(node.results, results, strict=True))
    return replace(node, op=op, results=results)


def _named(parts: Sequence[int]) -> str:
    return f"part{'s' * (len(parts) > 1)} {', '.join(map(str, parts))}"
