"""Norms and softmaxes that a loop over rows cannot finish: their rows do not lie together, or are
few and long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from gpuir.ir.build import Builder, rewrite
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.sizes import real
from gpuir.ir.types import DType, f32
from gpuir.ops import tensor as t
from gpuir.stacks.inductor.channels_last import has_channels_innermost
from gpuir.stacks.inductor.innermost import innermost
from gpuir.stacks.inductor.split_sums import ASSUMED, Splits, cut, saying

Statistics = tuple[Value, Value]  # the mean and the variance of a norm


@dataclass(frozen=True)
class SplitNorms(Splits):
    """Takes norms and softmaxes apart that no loop over rows makes in one launch.

    Group norms of images where channels are innermost in memory: statistics of a group are of a few
    neighbours of each cell, so that no loop over groups makes the cells in the order in which they
    lie, and Inductor has two kernels. The same over a middle axis. Those of few long rows, or over
    another axis than the innermost: statistics of parts, then of rows, then the cells. How many
    parts there are is as in `split_sums`. What else asks for the statistics of such a norm, as a
    batch norm of a training step does for its running ones, reads them.

    (torch 2.13: torch/_refs, native_group_norm, native_layer_norm; torch/_inductor/ir.py,
    WelfordReduction, OnlineSoftmaxReduction; codegen/simd.py, can_fuse; scheduler.py,
    fusable_read_and_write.)
    """

    name = "split_norms"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        rows = {n.results[0]: n.op for n in g.nodes if isinstance(n.op, t.Normalize | t.Softmax)}
        if not rows:
            return g
        images = has_channels_innermost(g)
        axes = innermost(g, images)
        sums = {v: found for v, op in rows.items() if (found := sums_of(op, axes[op.x]))}
        parts = {v: self.parts(*found) for v, found in sums.items()}
        between = {v for v in sums if is_between(rows[v], axes[rows[v].x])}
        assumed = [ASSUMED for found in sums.values() if self.is_assumed(*found)]
        asked = asked_of(g, rows)
        made: dict[Value, Statistics] = {}

        def take_apart(n: Node, b: Builder) -> tuple[Value, ...] | None:
            result = n.results[0]
            if result in asked and asked[result][0] in made:
                norm, which = asked[result]
                found = b(t.Reshape(made[norm][which], result.type.shape))
                return (in_dtype(found, result.type.dtype, b),)
            count = parts.get(result, 1)
            match n.op:
                case t.Normalize() as op if count > 1 or result in between:
                    if (apart := by_part(op, count, b)) is not None:
                        y, made[result] = apart
                        return (y,)
                case t.Softmax() as op if count > 1 or result in between:
                    return softmax_by_part(op, count, b)
                case t.Normalize(groups=int()) as op if images and op.center:
                    return by_group(op, b)
                case _:
                    pass
            return None

        return saying(rewrite(g, take_apart), assumed)


def sums_of(op: t.Normalize | t.Softmax, neighbours: int) -> tuple[int, int, bool] | None:
    """The sums of a norm or a softmax that may be split: their terms, how many there are, and
    whether they are over another axis than `neighbours`, along which cells lie side by side."""
    axes = op.reduced_axes()
    terms = prod(op.x.type.shape[a] for a in axes)
    if (isinstance(op, t.Normalize) and op.groups not in (None, 1)) or not terms:
        return None
    return terms, op.x.type.size // terms, neighbours not in axes


def is_between(op: t.Normalize | t.Softmax, neighbours: int) -> bool:
    """Whether the cells of a row lie between those of others."""
    axes = op.reduced_axes()
    first = (a for a, n in enumerate(op.x.type.shape) if n > 1 and a != neighbours)
    return neighbours not in axes and any(a not in axes and a < max(axes) for a in first)


def asked_of(g: Graph, norms: Mapping[Value, Op]) -> dict[Value, tuple[Value, int]]:
    """Of which norm a value is the mean (0) or the variance (1)."""
    of = {
        (op.x, op.reduced_axes()): v
        for v, op in norms.items()
        if isinstance(op, t.Normalize) and op.center
    }
    makers = {n.results[0]: n.op for n in g.nodes if len(n.results) == 1}
    found: dict[Value, tuple[Value, int]] = {}
    for n in g.nodes:
        match n.op:
            case t.Reduce("mean", x, axes, keepdims=True) if (x, axes) in of:
                found[n.results[0]] = of[x, axes], 0
            case t.Reduce("mean", y, axes, keepdims=True):
                match makers.get(y):
                    case t.Map("mul", (off, again)) if off == again:
                        pass
                    case _:
                        continue
                match makers.get(off):
                    case t.Map("sub", (x, mean)) if found.get(mean) == (of.get((x, axes)), 0):
                        found[n.results[0]] = of[x, axes], 1
                    case _:
                        pass
            case _:
                pass
    return found


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


def by_part(op: t.Normalize, parts: int, b: Builder) -> tuple[Value, Statistics] | None:
    """normalize(x)  →  (x - mean) * rsqrt(var + eps) * scale + bias, and its mean and variance.

    With sums s and squares q of parts: mean = sum(s) / n, var = sum(q + (s / k - mean)^2 * k) / n.
    (Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
    variances, 1979.) Without a mean the variance is that of squares alone."""
    shape, inner, outer = cut(op.x.type.shape, op.axes, parts)
    if parts > 1 and not outer:
        return None
    y = b(t.Reshape(widened(op.x, b), shape)) if outer else widened(op.x, b)
    together = prod(shape[a] for a in inner)
    whole = together * prod(shape[a] for a in outer)

    def total(v: Value, axes: tuple[int, ...]) -> Value:
        return b(t.Reduce("sum", v, axes, keepdims=True)) if axes else v

    def share(v: Value, of: int) -> Value:
        return b(t.Map("div", (v,), (real(of),)))

    if not op.center:
        squares = total(total(b(t.Map("mul", (y, y))), inner), outer)
        variance = mean = share(squares, whole)
        return finished(op, y, None, variance, b), (mean, variance)
    sums = total(y, inner)
    means = share(sums, together)
    squares = total(squared(y, means, b), inner)
    if outer:
        mean = share(total(sums, outer), whole)
        between = b(t.Map("mul", (squared(means, mean, b),), (real(together),)))
        squares = total(b(t.Map("add", (squares, between))), outer)
    else:
        mean = means
    variance = share(squares, whole)
    return finished(op, y, mean, variance, b), (mean, variance)


def softmax_by_part(op: t.Softmax, parts: int, b: Builder) -> tuple[Value, ...] | None:
    """softmax(x)  →  exp(x - m) / s, with m the largest and s = sum(exp(x - m)); its logarithm
    x - m - log(s). Of parts with m' and s': m = max(m'), s = sum(s' * exp(m' - m))."""
    shape, inner, outer = cut(op.x.type.shape, (op.axis,), parts)
    if parts > 1 and not outer:
        return None
    x = widened(op.x, b)
    y = b(t.Reshape(x, shape)) if outer else x

    def off(v: Value, most: Value) -> Value:
        return b(t.Map("sub", (v, most)))

    most = b(t.Reduce("max", y, inner, keepdims=True))
    sums = b(t.Reduce("sum", b(t.Map("exp", (off(y, most),))), inner, keepdims=True))
    if outer:
        parts_most, most = most, b(t.Reduce("max", most, outer, keepdims=True))
        shares = b(t.Map("mul", (sums, b(t.Map("exp", (off(parts_most, most),))))))
        sums = b(t.Reduce("sum", shares, outer, keepdims=True))
    if op.log:
        y = off(off(y, most), b(t.Map("log", (sums,))))
    else:
        y = b(t.Map("div", (b(t.Map("exp", (off(y, most),))), sums)))
    return (in_dtype(b(t.Reshape(y, op.x.type.shape)) if outer else y, op.x.type.dtype, b),)


def finished(op: t.Normalize, y: Value, mean: Value | None, variance: Value, b: Builder) -> Value:
    """What is left once a norm's statistics are there; `y` is its operand in another shape."""
    deviation = b(t.Map("rsqrt", (b(t.Map("add", (variance,), (op.eps,))),)))
    y = y if mean is None else b(t.Map("sub", (y, mean)))
    y = b(t.Map("mul", (y, deviation)))
    y = b(t.Reshape(y, op.x.type.shape)) if y.type.shape != op.x.type.shape else y
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
