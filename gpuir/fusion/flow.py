"""Who makes and who reads each value of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
