"""The slices of a split, as one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpuir.fusion.launch import together
from gpuir.ir.build import begin, within
from gpuir.ir.graph import Graph, Level, Loc, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

Cut = tuple[int, int, int]  # an axis, and from where to where


@dataclass(frozen=True)
class Split(Pass):
    """Joins the slices that are all of a value along one axis, each part once: those that one model
    node makes, since a model's Split is a launch and not one for each part; and those of several
    nodes, where no other slices or gathers of the value are there, as onnxruntime's
    GatherSliceToSplitFusion does (onnxruntime/core/optimizer/gather_fusion.cc; models before ONNX
    13, which it leaves alone, are not told apart)."""

    name = "split"
    takes = gives = Level.fused

    def run(self, g: Graph) -> Graph:
        first: dict[Value, Node] = {}  # of each result of a split, the node that all come with
        later: set[Value] = set()
        looped = {n.locs for n in g.nodes if n.op.control}  # recurrent nodes have several results
        producers = g.producers()
        for x, readers in g.uses().items():
            made = producers.get(x)
            whole = made is None or made.locs not in looped
            for nodes in splits(x, readers, whole):
                first[nodes[0].results[0]] = together(nodes, (v for n in nodes for v in n.results))
                later |= {n.results[0] for n in nodes[1:]}
        b = begin(g, Level.fused)
        for node in g.nodes:
            if node.op.control:
                node = replace(node, op=within(node.op, self.run, b.folded))
            if not node.results or node.results[0] not in later:
                b.put(first.get(node.results[0], node) if node.results else node)
        return b.finish(g.outputs)


def splits(x: Value, readers: Sequence[Node], across: bool) -> Iterator[list[Node]]:
    """The readers of x that cut it up, each split's together; of several model nodes if `across`
    says so."""
    own: dict[tuple[Loc, ...], list[Node]] = {}
    for node in readers:
        if takes_part(node, x):
            own.setdefault(node.locs, []).append(node)
    alone = [nodes[0] for nodes in own.values() if len(nodes) == 1]
    for nodes in (*own.values(), *([alone] if across else [])):
        if len(nodes) > 1 and is_whole(x, nodes):
            yield nodes


def takes_part(node: Node, x: Value) -> bool:
    """Whether all that a group does is to take a part of x."""
    if not isinstance(node.op, t.Fused) or len(node.results) != 1 or node.op.args[0] != x:
        return False
    first, *rest = (n.op for n in node.op.body.nodes if not isinstance(n.op, t.Constant))
    parts = isinstance(first, (t.Slice, t.Gather)) and first.x == node.op.body.inputs[0]
    return parts and all(isinstance(op, t.Reshape) for op in rest)


def cut_of(node: Node) -> Cut | None:
    """What a group takes of its operand, if that is all it does: a range of one axis."""
    if not isinstance(node.op, t.Fused) or len(node.op.args) != 1 or len(node.results) != 1:
        return None
    *index, first = (n.op for n in node.op.body.nodes if not isinstance(n.op, t.Reshape))
    match first:
        case t.Gather(x, _, axis) if index and isinstance(index[0], t.Constant):
            at = int(index[0].data[0]) % x.type.shape[axis]
            return (axis, at, at + 1) if len(index[0].data) == 1 else None
        case t.Slice(x, starts, sizes, steps) if not index:
            axes = [i for i, n in enumerate(x.type.shape) if sizes[i] != n]
            if len(axes) != 1 or steps[axes[0]] != 1:
                return None
            return axes[0], starts[axes[0]], starts[axes[0]] + sizes[axes[0]]
        case _:
            return None


def is_whole(x: Value, nodes: Sequence[Node]) -> bool:
    """Whether groups cut all of x up, along one axis, without an overlap."""
    cuts = sorted(cut for n in nodes if (cut := cut_of(n)))
    if len(cuts) < len(nodes):
        return False
    axis, at = cuts[0][0], 0
    for other, start, end in cuts:
        if (other, start) != (axis, at):
            return False
        at = end
    return at == x.type.shape[axis]
