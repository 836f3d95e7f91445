"""Attention that none of PyTorch's fused kernels takes, as PyTorch then runs it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Value
from gpuir.ir.phases import beside
from gpuir.ir.types import DType, TensorType, bf16, bool_, f16, f32, i64
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

ALIGNED = 128  # bits of which a fused kernel wants heads in multiples
FLASH_HEAD = 256  # cells of the widest head that FlashAttention takes


@dataclass(frozen=True)
class MathAttention(Pass):
    """Writes out attention that none of PyTorch's fused kernels takes on a GPU since sm_80: in f64;
    of tensors with another number of axes than four; with heads of no multiple of 16 bytes, but for
    a plain one in 16 bits, which is padded. Products are in f32 then, or wider, and the scores in
    memory: several launches each. (PyTorch 2.13, aten/src/ATen/native/transformers: sdp_utils.cpp,
    can_use_flash_attention and can_use_mem_efficient_attention; attention.cpp,
    _scaled_dot_product_attention_math.)"""

    name = "math_attention"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        if not any(isinstance(n.op, t.Attention) and not is_fused(n.op) for n in g.walk()):
            return g
        return prune(rewrite(g, _Writer().rule))


def is_fused(op: t.Attention) -> bool:
    """Whether one of PyTorch's fused kernels takes it. One with a soft cap or blocks is no call of
    it."""
    dtype, heads = op.q.type.dtype, (op.q.type.shape[-1], op.v.type.shape[-1])
    if op.softcap or op.block:
        return True
    if op.q.type.rank != 4 or dtype not in (f32, f16, bf16):
        return False
    masked = op.mask is not None or op.window is not None or (op.causal and op.offset != 0)
    flash = dtype.bits == 16 and not masked and len(set(heads)) == 1 and heads[0] <= FLASH_HEAD
    return flash or all(cells % (ALIGNED // dtype.bits) == 0 for cells in heads)


@dataclass(frozen=True)
class WrittenParts:
    """What an attention that is written out makes on its way, in the wider dtype: queries, and keys
    turned, times the root of the scale each; the heads of keys and values that share them copied.
    """

    q: Value
    k: Value
    v: Value
    scores: Value
    shares: Value


@dataclass
class _Writer:
    made: dict[str, WrittenParts] = field(
        default_factory=dict[str, WrittenParts]
    )  # by their statistics' name

    def rule(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        match n.op:
            case t.Attention() as op if not is_fused(op):
                step = WrittenOut(op, b, n.locs)
                parts = step.parts()
                if op.stats:
                    self.made[n.results[1].name] = parts
                return step.results(parts)
            case t.AttentionGradient() as op if op.stats.name in self.made:
                return WrittenOut(op.direct(), b, n.locs).gradients(op, self.made[op.stats.name])
            case _:
                return None


@dataclass(frozen=True)
class WrittenOut:
    """One attention. What PyTorch launches by itself has a location of its own."""

    op: t.Attention
    b: Builder
    locs: tuple[Loc, ...]

    def __call__(self, part: str, op: Op) -> Value:
        self.b.locs = beside(self.locs, part) if part else self.locs
        return self.b(op)

    @property
    def wide(self) -> DType:
        return f32 if self.op.q.type.dtype.bits < 32 else self.op.q.type.dtype

    @property
    def root(self) -> float:
        return math.sqrt(abs(self.op.scale))

    def cast(self, part: str, x: Value, dtype: DType) -> Value:
        return x if x.type.dtype == dtype else self(part, t.Cast(x, dtype))

    def turned(self, x: Value) -> Value:
        rank = x.type.rank
        return self("", t.Transpose(x, (*range(rank - 2), rank - 1, rank - 2)))

    def times(self, part: str, x: Value, factor: float) -> Value:
        return self(part, t.Map("mul", (x,), (factor,)))

    def parts(self) -> WrittenParts:
        op = self.op
        q, k, v = (
            self.cast(part, x, self.wide)
            for part, x in (("query", op.q), ("key", op.k), ("value", op.v))
        )
        q = self.times("query.scale", q, math.copysign(self.root, op.scale))
        k, v = self.copied("key.copies", k), self.copied("value.copies", v)
        k = self.times("key.scale", self.turned(k), self.root)
        scores = self("", t.Matmul(q, k))
        for mask in self.masks():
            scores = self("mask.add", t.Map("add", (scores, mask)))
        return WrittenParts(q, k, v, scores, self.shares(scores))

    def copied(self, part: str, x: Value) -> Value:
        """Keys or values with each group's copied for its heads (repeat_interleave)."""
        heads, (*lead, groups, n, cells) = self.op.q.type.shape[-3], x.type.shape
        if heads == groups:
            return x
        each = heads // groups
        x = self(part, t.Reshape(x, (*lead, groups, 1, n, cells)))
        x = self(part, t.Broadcast(x, (*lead, groups, each, n, cells)))
        return self(part, t.Reshape(x, (*lead, heads, n, cells)))

    def masks(self) -> Iterator[Value]:
        """What is added to scores."""
        op = self.op
        if op.mask is not None and op.mask.type.dtype == bool_:
            yield self.hiding("mask", op.mask)
        elif op.mask is not None:
            yield self.cast("mask", op.mask, self.wide)
        if not op.causal and op.window is None:
            return
        queries, keys = op.q.type.shape[-2], op.k.type.shape[-2]
        row = self("causal", t.Iota(TensorType((queries, 1), i64)))
        column = self("causal", t.Iota(TensorType((1, keys), i64), 1))
        behind = self("causal", t.Map("sub", (row, column)))
        least = self("causal", t.Map("ge", (behind,), (-op.offset,))) if op.causal else None
        reach = () if op.window is None else (op.window - op.offset,)
        most = [self("causal", t.Map("le", (behind,), (n,))) for n in reach]
        seen = [x for x in (least, *most) if x is not None]
        yield self.hiding(
            "causal.mask", seen[0] if len(seen) == 1 else self("causal", t.Map("and", (*seen,)))
        )

    def hiding(self, part: str, seen: Value) -> Value:
        """0 where a key is seen, minus infinity elsewhere."""
        zero = self(part, t.Constant(TensorType((), self.wide), (0.0,)))
        return self(part, t.Map("where", (seen, zero), (-math.inf,)))

    def shares(self, scores: Value) -> Value:
        """A softmax that gives zeros where a row is hidden whole (SoftMax.cpp, _safe_softmax)."""
        last = scores.type.rank - 1
        softmax = self("softmax", t.Softmax(scores, last))
        hidden = self("hidden", t.Map("eq", (scores,), (-math.inf,)))
        rows = self("hidden.rows", t.Reduce("min", hidden, (last,), True))
        zero = self("shares", t.Constant(TensorType((), self.wide), (0.0,)))
        return self("shares", t.Map("where", (rows, zero, softmax)))

    def results(self, parts: WrittenParts) -> tuple[Value, ...]:
        op = self.op
        y = self("", t.Matmul(parts.shares, parts.v))
        y = self.cast("result", y, op.q.type.dtype)
        if not op.stats:
            return (y,)
        last = parts.scores.type.rank - 1
        top = self("statistics", t.Reduce("max", parts.scores, (last,), True))
        each = self("statistics", t.Map("exp", (self.less(parts.scores, top),)))
        total = self("statistics", t.Reduce("sum", each, (last,)))
        top = self("statistics", t.Reshape(top, total.type.shape))
        total = self("statistics", t.Map("log", (total,)))
        return y, self("statistics", t.Map("add", (total, top)))

    def less(self, x: Value, y: Value) -> Value:
        return self("statistics", t.Map("sub", (x, y)))

    def gradients(self, op: t.AttentionGradient, parts: WrittenParts) -> tuple[Value, ...]:
        """As autograd derives them from the steps: what these read is kept."""
        dy = self.cast("result", op.dy, self.wide)
        dv = self("", t.Matmul(self.turned(parts.shares), dy))
        shares = self("", t.Matmul(dy, self.turned(parts.v)))
        last = shares.type.rank - 1
        product = self("softmax.product", t.Map("mul", (shares, parts.shares)))
        total = self("softmax", t.Reduce("sum", product, (last,), True))
        scores = self("softmax", t.Map("mul", (parts.shares, total)))
        scores = self("softmax", t.Map("sub", (product, scores)))
        dq = self("", t.Matmul(scores, self.turned(parts.k)))
        dk = self("", t.Matmul(self.turned(parts.q), scores))
        dq = self.times("query.scale", dq, math.copysign(self.root, op.scale))
        dk = self.turned(self.times("key.scale", dk, self.root))
        found = [
            self.cast(part, self.summed(f"{part}.copies", x, like), like.type.dtype)
            for part, x, like in (("query", dq, op.q), ("key", dk, op.k), ("value", dv, op.v))
        ]
        if op.of_mask:
            found.append(self.cast("mask", scores, op.y.type.dtype))
        return tuple(found)

    def summed(self, part: str, x: Value, like: Value) -> Value:
        """The gradient of copies, of what was copied."""
        *lead, heads, n, cells = x.type.shape
        groups = like.type.shape[-3]
        if heads == groups:
            return x
        x = self(part, t.Reshape(x, (*lead, groups, heads // groups, n, cells)))
        return self(part, t.Reduce("sum", x, (x.type.rank - 3,)))
