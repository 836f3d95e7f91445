"""Group norms of images, whose groups do not lie together."""

from __future__ import annotations

from dataclasses import dataclass

from gpuir.ir.build import Builder, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import DType, f32
from gpuir.ops import tensor as t
from gpuir.passes.channels_last import has_channels_innermost
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class SplitNorms(Pass):
    """Takes group norms of images apart where channels are innermost in memory: statistics of a
    group are of a few neighbours of each cell, so that no loop over groups makes the cells in the
    order in which they lie, and Inductor has two kernels. (torch 2.13: torch/_refs,
    native_group_norm; codegen/simd.py, can_fuse.)
    """

    name = "split_norms"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        return rewrite(g, take_apart) if has_channels_innermost(g) else g


def take_apart(n: Node, b: Builder) -> tuple[Value, ...] | None:
    """normalize(x, groups)  →  (x - mean) * rsqrt(var + eps) * scale + bias"""
    match n.op:
        case t.Normalize(x, groups=int(groups)) as op if 1 < groups < x.type.shape[1]:
            pass
        case _:
            return None
    if x.type.rank != 4 or not op.center or n.results[0].type != x.type:
        return None
    images, channels, *cells = x.type.shape
    wide = in_dtype(x, f32, b) if x.type.dtype.bits < 32 else x
    grouped = b(t.Reshape(wide, (images, groups, channels // groups, *cells)))
    axes = (2, 3, 4)
    mean = b(t.Reduce("mean", grouped, axes, keepdims=True))
    off = b(t.Map("sub", (grouped, mean)))
    variance = b(t.Reduce("mean", b(t.Map("mul", (off, off))), axes, keepdims=True))
    again = b(t.Map("sub", (grouped, mean)))  # Inductor sums squares in one step, and keeps none
    deviation = b(t.Map("rsqrt", (b(t.Map("add", (variance,), (op.eps,))),)))
    y = b(t.Reshape(b(t.Map("mul", (again, deviation))), x.type.shape))
    for fn, weight in (("mul", op.scale), ("add", op.bias)):
        if weight is not None:
            y = b(t.Map(fn, (y, in_dtype(weight, y.type.dtype, b))))
    return (in_dtype(y, x.type.dtype, b),)


def in_dtype(x: Value, dtype: DType, b: Builder) -> Value:
    return x if x.type.dtype == dtype else b(t.Cast(x, dtype))
