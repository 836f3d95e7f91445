"""Norms that a loop over rows cannot finish: their rows do not lie together."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gpuir.ir.build import Builder, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.sizes import real
from gpuir.ir.types import DType, f32
from gpuir.ops import tensor as t
from gpuir.stacks.inductor.channels_last import has_channels_innermost
from gpuir.stacks.inductor.innermost import innermost
from gpuir.stacks.inductor.split_sums import ASSUMED, Splits, cut, saying


@dataclass(frozen=True)
class SplitNorms(Splits):
    """Takes two kinds of norms apart.

    Group norms of images where channels are innermost in memory: statistics of a group are of a few
    neighbours of each cell, so that no loop over groups makes the cells in the order in which they
    lie, and Inductor has two kernels. Norms of few long rows, or over another axis than the
    innermost: statistics of parts, then of rows, then the cells. How many parts there are is as in
    `split_sums`.

    (torch 2.13: torch/_refs, native_group_norm, native_layer_norm; torch/_inductor/ir.py,
    WelfordReduction; codegen/simd.py, can_fuse.)
    """

    name = "split_norms"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        norms = {n.results[0]: n.op for n in g.nodes if isinstance(n.op, t.Normalize)}
        if not norms:
            return g
        images = has_channels_innermost(g)
        axes = innermost(g, images)
        sums = {v: found for v, op in norms.items() if (found := sums_of(op, axes[op.x]))}
        parts = {v: self.parts(*found) for v, found in sums.items()}
        assumed = [ASSUMED for found in sums.values() if self.is_assumed(*found)]

        def take_apart(n: Node, b: Builder) -> tuple[Value, ...] | None:
            match n.op:
                case t.Normalize() as op if (found := parts.get(n.results[0], 1)) > 1:
                    return by_part(op, found, b)
                case t.Normalize(groups=int()) as op if images and op.center:
                    return by_group(op, b)
                case _:
                    return None

        return saying(rewrite(g, take_apart), assumed)


def sums_of(op: t.Normalize, neighbours: int) -> tuple[int, int, bool] | None:
    """The sums of a norm that may be split: their terms, how many there are, and whether they are
    over another axis than `neighbours`, along which cells lie side by side."""
    terms = prod(op.x.type.shape[a] for a in op.axes)
    if not op.center or op.groups not in (None, 1) or not terms:
        return None
    return terms, op.x.type.size // terms, neighbours not in op.axes


def by_group(op: t.Normalize, b: Builder) -> tuple[Value, ...] | None:
    """normalize(x, groups)  →  (x - mean) * rsqrt(var + eps) * scale + bias"""
    x, groups = op.x, op.groups or 1
    if x.type.rank != 4 or not 1 < groups < x.type.shape[1]:
        return None
    images, channels, *cells = x.type.shape
    grouped = b(t.Reshape(widened(x, b), (images, groups, channels // groups, *cells)))
    axes = (2, 3, 4)
    mean = b(t.Reduce("mean", grouped, axes, keepdims=True))
    variance = b(t.Reduce("mean", squared(grouped, mean, b), axes, keepdims=True))
    return (finished(op, grouped, mean, variance, b),)


def by_part(op: t.Normalize, parts: int, b: Builder) -> tuple[Value, ...] | None:
    """normalize(x)  →  (x - mean) * rsqrt(var + eps) * scale + bias, with sums s and squares q of
    parts: mean = sum(s) / n, var = sum(q + (s / k - mean)^2 * k) / n. (Chan, Golub, LeVeque:
    Updating formulae and a pairwise algorithm for computing sample variances, 1979.)"""
    shape, inner, outer = cut(op.x.type.shape, op.axes, parts)
    if not outer:
        return None
    y = b(t.Reshape(widened(op.x, b), shape))
    together = prod(shape[a] for a in inner)
    whole = together * prod(shape[a] for a in outer)
    sums = b(t.Reduce("sum", y, inner, keepdims=True))
    means = b(t.Map("div", (sums,), (real(together),)))
    squares = b(t.Reduce("sum", squared(y, means, b), inner, keepdims=True))
    total = b(t.Reduce("sum", sums, outer, keepdims=True))
    mean = b(t.Map("div", (total,), (real(whole),)))
    between = b(t.Map("mul", (squared(means, mean, b),), (real(together),)))
    apart = b(t.Reduce("sum", b(t.Map("add", (squares, between))), outer, keepdims=True))
    variance = b(t.Map("div", (apart,), (real(whole),)))
    return (finished(op, y, mean, variance, b),)


def finished(op: t.Normalize, y: Value, mean: Value, variance: Value, b: Builder) -> Value:
    """What is left once a norm's statistics are there; `y` is its operand in another shape."""
    deviation = b(t.Map("rsqrt", (b(t.Map("add", (variance,), (op.eps,))),)))
    y = b(t.Map("mul", (b(t.Map("sub", (y, mean))), deviation)))
    y = b(t.Reshape(y, op.x.type.shape))
    for fn, weight in (("mul", op.scale), ("add", op.bias)):
        if weight is not None:
            y = b(t.Map(fn, (y, in_dtype(weight, y.type.dtype, b))))
    return in_dtype(y, op.x.type.dtype, b)


def squared(x: Value, mean: Value, b: Builder) -> Value:
    """(x - mean)^2, with a difference of its own: Inductor sums squares in one step, and keeps no
    differences."""
    off = b(t.Map("sub", (x, mean)))
    return b(t.Map("mul", (off, off)))


def widened(x: Value, b: Builder) -> Value:
    return in_dtype(x, f32, b) if x.type.dtype.bits < 32 else x


def in_dtype(x: Value, dtype: DType, b: Builder) -> Value:
    return x if x.type.dtype == dtype else b(t.Cast(x, dtype))
