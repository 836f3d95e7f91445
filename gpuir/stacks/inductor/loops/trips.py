"""What a trip of a loop takes of a tensor by its own number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from gpuir.fusion.launch import fused, inner, needed
from gpuir.ir.graph import Graph, Node, Value
from gpuir.ops import tensor as t


def taken_apart(body: Graph) -> Graph:
    """The body of a loop, fused, whose launches get what a trip takes of a tensor from launches of
    their own: those will be views, for who launches the trips knows where it lies."""
    nodes: list[Node] = []
    done: set[Value] = set()
    for node in body.nodes:
        inside = inner(node)
        found = [n.results[0] for n in inside if is_of_trip(n, inside, body.inputs[0])]
        if not found or not {*node.results}.isdisjoint(found):
            nodes.append(node)
            continue
        new = [v for v in found if v not in done]
        done.update(new)
        nodes += (fused(needed(inside, [v], set()), [v]) for v in new)
        nodes.append(fused(needed(inside, node.results, {*found}), node.results))
    return replace(body, nodes=tuple(nodes))


def is_of_trip(node: Node, beside: Sequence[Node], trip: Value) -> bool:
    """Whether a node of a launch takes a part of a tensor in memory, along its outermost axis, that
    the trip's number alone decides."""
    gather = node.op
    if not isinstance(gather, t.Gather) or gather.indices.type.size != 1:
        return False
    made = {v for n in beside for v in n.results}
    index = needed(beside, [gather.indices], set())
    simple = all(isinstance(n.op, t.Pointwise | t.Constant) for n in index)
    read = {v for n in index for v in n.op.operands} - made or {gather.indices}
    outermost = prod(gather.x.type.shape[: gather.axis]) == 1
    return simple and outermost and read == {trip} and gather.x not in made
