"""Attention under software that has no kernel for it: products and a softmax."""

from __future__ import annotations

from dataclasses import dataclass

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.types import DType
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.stacks.pytorch.math_attention import WrittenOut, WrittenParts


@dataclass(frozen=True)
class AttentionApart(Pass):
    """Writes attention out as two products and a softmax, with the scores in memory, in the dtype
    that it is in. Attention with a soft cap or blocks, and that of a training step, stays."""

    name = "attention_apart"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        if not any(is_plain(n) for n in g.walk()):
            return g
        return prune(rewrite(g, _rule))


def is_plain(n: Node) -> bool:
    op = n.op
    return isinstance(op, t.Attention) and not (op.softcap or op.block or op.stats)


def _rule(n: Node, b: Builder) -> tuple[Value, ...] | None:
    if not is_plain(n):
        return None
    assert isinstance(n.op, t.Attention)
    step = _InPlace(n.op, b, n.locs)
    return step.results(step.parts())


class _InPlace(WrittenOut):
    """Scores are scaled, masked and made shares of in the dtype of the queries, by launches of one
    operator."""

    def __call__(self, part: str, op: Op) -> Value:
        self.b.locs = self.locs
        return self.b(op)

    @property
    def wide(self) -> DType:
        return self.op.q.type.dtype

    def parts(self) -> WrittenParts:
        op = self.op
        k, v = self.copied("key.copies", op.k), self.copied("value.copies", op.v)
        k = self.turned(k)
        scores = self("", t.Matmul(op.q, k))
        if op.scale != 1.0:
            scores = self.times("scale", scores, op.scale)
        for mask in self.masks():
            scores = self("mask.add", t.Map("add", (scores, mask)))
        shares = self("softmax", t.Softmax(scores, scores.type.rank - 1))
        return WrittenParts(op.q, k, v, scores, shares)
