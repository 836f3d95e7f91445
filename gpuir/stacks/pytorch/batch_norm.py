"""Batch norms of a training step, as one launch each way."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from gpuir.fusion.flow import Flow
from gpuir.fusion.launch import inner, together
from gpuir.ir.build import begin, within
from gpuir.ir.graph import Graph, Level, Loc, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class BatchNorm(Pass):
    """Joins what a model node computes around a norm over a batch: the norm, its statistics and the
    running ones, or the gradients of operand, scale and bias. cuDNN has one call for each
    (cudnnBatchNormalizationForwardTrainingEx and ..BackwardEx), which PyTorch takes (aten/src/ATen/
    native/cudnn/BatchNorm.cpp)."""

    name = "batch_norm"
    takes = gives = Level.fused

    def run(self, g: Graph) -> Graph:
        own: dict[tuple[Loc, ...], list[int]] = {}
        for i, node in enumerate(g.nodes):
            if node.locs and isinstance(node.op, t.Fused) and not is_of_ranks(node):
                own.setdefault(node.locs, []).append(i)
        flow = Flow(g)
        joined: dict[int, Node | None] = {}
        for places in own.values():
            if len(places) < 2 or not any(is_of_batch(g.nodes[i]) for i in places):
                continue
            made = {v for i in places for v in g.nodes[i].results}
            places = [i for i in places if not is_only_reshape(g.nodes[i], made)]
            nodes = [g.nodes[i] for i in places]
            if len(nodes) > 1 and is_free(g, places):
                joined |= dict.fromkeys(places)
                joined[places[0]] = together(nodes, flow.leaving(places, set(places)))
        b = begin(g, Level.fused)
        for i, node in enumerate(g.nodes):
            if node.op.control:
                node = replace(node, op=within(node.op, self.run, b.folded))
            if (kept := joined.get(i, node)) is not None:
                b.put(kept)
        return b.finish(g.outputs)


def is_of_batch(node: Node) -> bool:
    """Whether a launch holds a norm, or the gradient of one, over the outermost axis too."""
    norms = (n.op for n in inner(node) if isinstance(n.op, t.Normalize | t.NormGradient))
    return any(0 in norm.axes for norm in norms)


def is_of_ranks(node: Node) -> bool:
    """Whether a launch is one of ranks together."""
    return any(isinstance(n.op, t.Collective) for n in inner(node))


def is_only_reshape(node: Node, made: Set[Value]) -> bool:
    """Whether a launch does no more than to reshape what is not made with it: a weight."""
    reshapes = all(isinstance(n.op, t.Reshape) for n in inner(node))
    return reshapes and made.isdisjoint(node.op.operands)


def is_free(g: Graph, places: Sequence[int]) -> bool:
    """Whether all that launches read, and do not make, is there before the first of them."""
    made: set[Value] = {v for i in places for v in g.nodes[i].results}
    later = {v for n in g.nodes[places[0] :] for v in n.results} - made
    return not any(later.intersection(g.nodes[i].op.operands) for i in places)
