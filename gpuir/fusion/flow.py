"""Who makes and who reads each value of a graph."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gpuir.fusion.launch import fused, known
from gpuir.ir.build import NameTable
from gpuir.ir.graph import Graph, Node, Op, Value
from gpuir.ops import tensor as t


@dataclass
class Flow:
    """A graph with the places of the nodes that make and that read each value. A pass may `add`
    nodes behind the graph's own; nobody in the graph reads them."""

    graph: Graph
    nodes: list[Node] = field(init=False)
    makers: dict[Value, int] = field(init=False)
    readers: dict[Value, list[int]] = field(init=False)
    outputs: frozenset[Value] = field(init=False)
    names: NameTable = field(default_factory=NameTable, init=False)

    def __post_init__(self) -> None:
        g = self.graph
        self.nodes = [*g.nodes]
        self.makers = {v: i for i, n in enumerate(g.nodes) for v in n.results}
        self.readers = g.readers()
        self.outputs = frozenset(g.outputs)
        self.names.taken.update(v.name for v in (*g.inputs, *g.params, *self.makers))

    def add(self, op: Op, like: Node) -> Node:
        """A node of one result, named and placed in the model after another."""
        (type,) = op.result_types
        made = Value(self.names.fresh(like.results[0].name), type)
        self.makers[made] = len(self.nodes)
        self.nodes.append(Node(op, (made,), like.locs))
        return self.nodes[-1]

    def maker(self, v: Value) -> Node | None:
        """The node that makes a value; None for what comes in."""
        i = self.makers.get(v)
        return None if i is None else self.nodes[i]

    def read_by(self, v: Value) -> list[Node]:
        return [self.nodes[i] for i in self.readers.get(v, ())]

    def is_generated(self, v: Value) -> bool:
        node = self.maker(v)
        return node is not None and isinstance(node.op, t.Generating)

    def in_order(self, values: Iterable[Value]) -> list[Value]:
        """Those of some values that nodes make, as the graph makes them."""
        return sorted((v for v in values if v in self.makers), key=self.makers.__getitem__)

    @cached_property
    def known(self) -> set[Value]:
        """Weights, and what is computed from them alone."""
        return known(self.graph.nodes, self.graph.params)

    @cached_property
    def reading(self) -> dict[int, list[int]]:
        """The places of the nodes that read what the node at each place makes."""
        return {
            i: [u for v in n.results for u in self.readers.get(v, ())]
            for i, n in enumerate(self.graph.nodes)
        }

    def before(self, i: int) -> set[int]:
        """The places of the nodes that make what node i reads."""
        return {self.makers[v] for v in self.nodes[i].op.operands if v in self.makers}

    def leaving(self, places: Iterable[int], inside: Container[int]) -> Iterator[Value]:
        """What nodes at these places make that nodes which are not `inside` read, or the graph
        gives."""
        for i in places:
            for v in self.nodes[i].results:
                readers = self.readers.get(v, ())
                if v in self.outputs or any(u not in inside for u in readers):
                    yield v

    def fused(self, places: Iterable[int], results: Iterable[Value]) -> Node:
        """Nodes as one launch, in the model's order, that generates again what they read of
        generators."""
        nodes = [self.nodes[i] for i in places]
        read = {self.makers[v] for n in nodes for v in n.op.operands if self.is_generated(v)}
        return fused((*(self.nodes[i] for i in sorted(read)), *nodes), results)
