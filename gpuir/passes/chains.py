"""Which ops a software stack runs as one: those of a model node, and chains that it has a fused
kernel for."""

from __future__ import annotations

from collections.abc import Sequence

from gpuir.ir.graph import Graph, Op, Value
from gpuir.ops import tensor as t


def units(g: Graph, chains: Sequence[tuple[str, ...]]) -> list[int]:
    """A number for each node of a graph, the same for those that one kernel of the stack runs.

    Ops of one model node have one. So have the ops of a chain like `conv>add>relu`, each read by
    the next alone, the longest chain first.
    """
    first: dict[tuple[str, ...], int] = {}
    unit = [first.setdefault(n.locs or (str(i),), i) for i, n in enumerate(g.nodes)]
    if not chains:
        return unit
    readers: dict[Value, list[int]] = {}
    for i, node in enumerate(g.nodes):
        for v in dict.fromkeys(node.op.operands):
            readers.setdefault(v, []).append(i)
    taken: set[int] = set()
    for chain in sorted(chains, key=len, reverse=True):
        for i in range(len(g.nodes)):
            found = _follow(g, i, chain, readers)
            if found and not taken & set(found):
                taken |= set(found)
                for j in found:
                    unit[j] = unit[i]
    return unit


def word(op: Op) -> str:
    """What a chain calls an op: the function of a map, else the op's own name: `add`, `conv`."""
    return op.fn if isinstance(op, t.Map) else op.name.removeprefix("t.")


def _follow(g: Graph, i: int, chain: tuple[str, ...], readers: dict[Value, list[int]]) -> list[int]:
    """The nodes of a chain that begins at node i; none if it is no such chain."""
    found = [i] if word(g.nodes[i].op) == chain[0] else []
    for name in chain[1:] if found else ():
        results = g.nodes[found[-1]].results
        after = readers.get(results[0], []) if len(results) == 1 else []
        if len(after) != 1 or results[0] in g.outputs or word(g.nodes[after[0]].op) != name:
            return []
        found.append(after[0])
    return found
