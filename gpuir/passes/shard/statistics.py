"""Batch norm in training, where the batch is cut: of the whole batch, or of a rank's own part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from gpuir.passes.shard.place import SUM, WHOLE, Placed, part
from gpuir.passes.shard.ways import ShardWay

Statistics = Literal["batch", "rank"]
Norm = t.Normalize | t.NormalizeGradient | t.NormalizeScaleGradient


def of_ranks(g: Graph) -> Iterator[Value]:
    """The first results of what takes statistics over the first axis, which the batch is cut along:
    norms, their gradients, and the running means and variances that a norm's node keeps."""
    norms = {
        loc
        for n in g.nodes
        if isinstance(n.op, t.Normalize) and 0 in n.op.axes and phase_of(n) is None
        for loc in n.locs
    }
    for n in g.nodes:
        match n.op:
            case t.Normalize() | t.NormalizeGradient() | t.NormalizeScaleGradient():
                if 0 in n.op.axes:
                    yield n.results[0]
            case t.Reduce("mean", _, axes) if 0 in axes and not norms.isdisjoint(n.locs):
                yield n.results[0]
            case _:
                pass


def ways(op: Op, ranks: int) -> Iterator[ShardWay]:
    """The way of a rank by itself: of its part of the batch; statistics count as if they were of
    all of it, and gradients of scales are terms of sums."""
    rows, of = part(0), op.operands[0].type

    def place(v: Value) -> Placed:
        return rows if v.type.rank == of.rank and v.type.shape[0] == of.shape[0] else WHOLE

    if not rows.fits(of, ranks):
        return
    match op:
        case t.Reduce():
            gives = WHOLE
        case t.NormalizeScaleGradient():
            gives = SUM
        case _:
            gives = rows
    yield ShardWay(tuple(map(place, op.operands)), (gives,) * len(op.result_types), "own")
