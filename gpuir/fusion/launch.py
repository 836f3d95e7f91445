"""The bodies of launches, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ops import tensor as t


def needed(
    nodes: Sequence[Node], wanted: Iterable[Value], given: AbstractSet[Value] = frozenset()
) -> tuple[Node, ...]:
    """The nodes that `wanted` is computed by from what is `given`, in order."""
    live = {*wanted} - given
    found: list[Node] = []
    for node in reversed(nodes):
        if not live.isdisjoint(node.results):
            found.append(node)
            live |= {*node.op.operands} - given
    return tuple(reversed(found))


def fused(nodes: Iterable[Node], results: Iterable[Value]) -> Node:
    """Nodes as one launch, what comes twice among them (a constant) once. What a contraction reads
    lies in memory: a constant too is an argument then."""
    nodes, results = tuple(dict.fromkeys(nodes)), tuple(results)
    read = {v for n in nodes if n.op.contraction for v in n.op.operands}
    nodes = tuple(
        n for n in nodes if not isinstance(n.op, t.Generating) or read.isdisjoint(n.results)
    )
    made = {v for n in nodes for v in n.results}
    args = tuple(dict.fromkeys(v for n in nodes for v in n.op.operands if v not in made))
    locs = tuple(dict.fromkeys(loc for n in nodes for loc in n.locs))
    return Node(t.Fused(args, Graph(Level.graph, "", args, (), nodes, results)), results, locs)
