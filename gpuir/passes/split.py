"""The slices of a split, as one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuir.ir.build import begin, within
from gpuir.ir.graph import Graph, Level, Loc, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

Cut = tuple[int, int, int]  # an axis, and from where to where


@dataclass(frozen=True)
class Split(Pass):
    """Joins the slices that one model node makes of a value, where they are all of it along one
    axis: a model's Split is a launch, not one for each part, as onnxruntime runs it."""

    name = "split"
    takes = gives = Level.fused

    def run(self, g: Graph) -> Graph:
        cuts: dict[tuple[Value, tuple[Loc, ...]], list[Node]] = {}
        for node in g.nodes:
            if cut_of(node):
                cuts.setdefault((node.op.operands[0], node.locs), []).append(node)
        first: dict[Value, Node] = {}  # of each result of a split, the node that all come with
        later: set[Value] = set()
        for (x, _), nodes in cuts.items():
            if len(nodes) > 1 and is_whole(x, nodes):
                first[nodes[0].results[0]] = together(nodes)
                later |= {n.results[0] for n in nodes[1:]}
        b = begin(g, Level.fused)
        for node in g.nodes:
            if node.op.control:
                node = replace(node, op=within(node.op, self.run, b.folded))
            if not node.results or node.results[0] not in later:
                b.put(first.get(node.results[0], node) if node.results else node)
        return b.finish(g.outputs)


def cut_of(node: Node) -> Cut | None:
    """What a group takes of its operand, if that is all it does: a range of one axis."""
    if not isinstance(node.op, t.Fused) or len(node.op.args) != 1 or len(node.results) != 1:
        return None
    first, *rest = (n.op for n in node.op.body.nodes)
    if not isinstance(first, t.Slice) or not all(isinstance(op, t.Reshape) for op in rest):
        return None
    whole = first.x.type.shape
    axes = [i for i, n in enumerate(whole) if first.sizes[i] != n]
    if len(axes) != 1 or first.steps[axes[0]] != 1:
        return None
    (axis,) = axes
    return axis, first.starts[axis], first.starts[axis] + first.sizes[axis]


def is_whole(x: Value, nodes: Sequence[Node]) -> bool:
    """Whether groups cut all of x up, along one axis, without an overlap."""
    cuts = sorted(cut for n in nodes if (cut := cut_of(n)))
    axis, at = cuts[0][0], 0
    for other, start, end in cuts:
        if (other, start) != (axis, at):
            return False
        at = end
    return at == x.type.shape[axis]


def together(nodes: Sequence[Node]) -> Node:
    """The groups as one, in the model's order."""
    bodies = [n.op.body for n in nodes if isinstance(n.op, t.Fused)]
    body = replace(
        bodies[0],
        nodes=tuple(n for body in bodies for n in body.nodes),
        outputs=tuple(v for body in bodies for v in body.outputs),
    )
    results = tuple(v for n in nodes for v in n.results)
    return Node(t.Fused(nodes[0].op.operands, body), results, nodes[0].locs)
