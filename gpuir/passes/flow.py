"""Who makes and who reads each value of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuir.ir.graph import Graph, Node, Value
from gpuir.ops import tensor as t

GENERATORS = (t.Constant, t.Iota)  # made again in each launch that reads them


@dataclass(frozen=True)
class Flow:
    """A graph with the places of the nodes that make and that read each value."""

    graph: Graph
    makers: Mapping[Value, int]
    readers: Mapping[Value, list[int]]
    outputs: frozenset[Value]

    @staticmethod
    def of(g: Graph) -> Flow:
        makers = {v: i for i, n in enumerate(g.nodes) for v in n.results}
        return Flow(g, makers, g.readers(), frozenset(g.outputs))

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    def maker(self, v: Value) -> Node | None:
        """The node that makes a value; None for what comes in."""
        i = self.makers.get(v)
        return None if i is None else self.nodes[i]

    def read_by(self, v: Value) -> list[Node]:
        return [self.nodes[i] for i in self.readers.get(v, ())]

    def is_generated(self, v: Value) -> bool:
        node = self.maker(v)
        return node is not None and isinstance(node.op, GENERATORS)

    def in_order(self, values: Iterable[Value]) -> list[Value]:
        """Those of some values that nodes make, as the graph makes them."""
        return sorted((v for v in values if v in self.makers), key=self.makers.__getitem__)
