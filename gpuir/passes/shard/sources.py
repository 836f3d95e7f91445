"""From params to the ops that read them: through casts, views and arithmetic on params alone, as
what unpacks a quantised weight or adds the product of two narrow ones to it (LoRA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from gpuir.ir.graph import Graph, Node, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from gpuir.passes.shard.axes import axes_of
from gpuir.passes.shard.place import Placed, part

Homes = dict[Value, Placed]
CARRIES = (t.Layout, t.Pointwise, t.Joining, t.Reducing, t.Matmul)


@dataclass
class Sources:
    """What the forward pass of a graph makes of its params alone, and what reads that."""

    g: Graph
    ranks: int
    is_zero: Callable[[Value], bool]
    known: dict[Value, frozenset[Value] | None] = field(
        default_factory=dict[Value, frozenset[Value] | None]
    )

    def __post_init__(self) -> None:
        g = self.g
        self.producers = g.producers()
        self.params = frozenset(g.params)
        forward = replace(g, nodes=tuple(n for n in g.nodes if phase_of(n) is None))
        self.ahead = forward.uses()
        self.numbers = {n.results[0]: i for i, n in enumerate(g.nodes) if n.results}

    def of(self, v: Value) -> frozenset[Value] | None:
        """The params that a value is made of, and constants; None where it is made of others."""
        if v not in self.known:
            node = self.producers.get(v)
            if v in self.params:
                self.known[v] = frozenset({v})
            elif node is None:
                self.known[v] = None
            elif isinstance(node.op, t.Generating):
                self.known[v] = frozenset()
            else:
                self.known[v] = self.together(node)
        return self.known[v]

    def together(self, node: Node) -> frozenset[Value] | None:
        if not isinstance(node.op, CARRIES) or phase_of(node) is not None:
            return None
        found: frozenset[Value] = frozenset()
        for v in node.op.operands:
            if (more := self.of(v)) is None:
                return None
            found |= more
        return found

    def homes(self, v: Value, place: Placed) -> Homes | None:
        """The parts of params from which a value that is made of them comes in the parts that are
        wanted; None where it does not."""
        params = self.of(v)
        if params is None or not place.fits(v.type, self.ranks):
            return None
        if not params or v in self.params:
            return {v: place} if params else {}
        node = self.producers[v]
        axes = axes_of(node.op, self.is_zero)
        name = axes.results[node.results.index(v)][place.axis] if axes else ""
        if not axes or not name:
            return None
        found: Homes = {}
        for x, names in zip(node.op.operands, axes.operands, strict=True):
            if name not in names:
                continue
            there = part(names.index(name), place.parts)
            if there.parts and sum(there.parts) != x.type.shape[there.axis]:
                return None
            more = self.homes(x, there)
            if more is None or any(found.get(p, home) != home for p, home in more.items()):
                return None
            found |= more
        return found

    def between(self, v: Value) -> list[Node]:
        """The nodes that make a value of params, in order."""
        found: dict[int, Node] = {}
        open_ = [v]
        while open_:
            node = self.producers.get(open_.pop())
            if node is not None and (i := self.numbers[node.results[0]]) not in found:
                found[i] = node
                open_ += node.op.operands
        return [found[i] for i in sorted(found)]

    def readers(self, homes: Mapping[Value, Placed]) -> list[tuple[Node, Homes]] | None:
        """The nodes of the forward pass that read params, or what is made of them alone, with the
        parts in which they get these; None where one gets some of two cuts."""
        places, found = dict(homes), list[tuple[Node, Homes]]()
        open_: list[int] = []

        def follow(v: Value) -> None:
            for reader in self.ahead.get(v, ()):
                if reader.results and (i := self.numbers[reader.results[0]]) not in open_:
                    heappush(open_, i)

        for v in homes:
            follow(v)
        while open_:
            node = self.g.nodes[heappop(open_)]
            given = {v: places[v] for v in node.op.operands if v in places}
            carried = self.carried(node, given)
            if carried is None:
                return None
            if not carried:
                found.append((node, given))
            for v, p in carried.items():
                places[v] = p
                follow(v)
        return found

    def carried(self, node: Node, given: Homes) -> Homes | None:
        """The parts in which a node gives what it makes of params, which it has in parts; none
        where it makes something else, or a sum. None where they are of two cuts."""
        if self.of(node.results[0]) is None:
            return {}
        axes = axes_of(node.op, self.is_zero)
        if axes is None:
            return {}
        pairs = zip(node.op.operands, axes.operands, strict=True)
        cuts = {(names[p.axis], p.parts) for v, names in pairs if (p := given.get(v))}
        if len(cuts) > 1:
            return None
        ((name, parts),) = cuts
        found: Homes = {}
        for v, names in zip(node.results, axes.results, strict=True):
            if not name or name not in names:
                return {}
            found[v] = part(names.index(name), parts)
            alike = not parts or sum(parts) == v.type.shape[found[v].axis]
            if not alike or not found[v].fits(v.type, self.ranks):
                return None
        return found
