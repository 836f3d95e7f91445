"""Maps and reductions of rows that a compiler made for a given tile, as Triton makes them.

A block loads its cells, a vector a thread at a time, computes, reduces over its warps where there
is something to reduce, and stores. Nothing was fitted: no sweep of such kernels is public. The
shares of the rates are those of the families `stream` and `rows`, the rest is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.family import Terms
from gpuir.cost.generated.parts import (
    BlockCounts,
    clocks,
    hold,
    joined,
    schedulers,
)
from gpuir.cost.nest import BlockShare, Tiles, cut
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import SECTOR_BYTES, Work
from gpuir.targets.target import Target

VECTOR_BYTES = 16.0  # of a thread's widest load (PTX ISA, ld.v4)


FACTORS = table("factors/generated_rows", Factor)


@dataclass(frozen=True)
class Streams(BlockCounts):
    """What the blocks of a map or a reduction do."""

    warps: Number
    threads: Number
    blocks: Number
    cells: Number  # of a thread
    passes: Number  # over a row that does not fit the tile
    reduces: Number  # 1 where rows are
    across: Number  # warps that share a row
    loads: Number  # of a thread, and stores
    flight: Number  # bytes of a thread that are under way at once
    ops: Number  # instructions of a thread
    waste: Number  # bytes fetched over bytes asked for
    nbytes: Number
    split: Number


def count(work: Work, tiles: Tiles, target: Target) -> Streams:
    """What blocks do under tiles of cells, or of rows and columns."""
    nest = cut(work, tiles)
    tile = np.asarray(nest.step_points, float)
    warp = float(target.sm.warp)
    threads = np.asarray(tiles.warps, float) * warp
    inner = next(iter(work.reduced), "") or work.dims[-1][0]
    width, passes = nest.sizes[inner], nest.steps
    cell = max((float(np.max(o.cell_bytes)) for o in work.operands), default=4.0)
    cells = tile / threads
    vector = np.clip(cells, 1.0, VECTOR_BYTES / cell)
    trips = np.maximum(cells / vector, 1.0)
    moved = sum((1.0 for o in work.operands if "o" in o.dims or "i" in o.dims), 0.0)
    again = np.where(passes > 1, 2.0, 1.0) if work.reduced else 1.0
    run = np.minimum(width, warp * vector) * cell
    none = 0.0 * tile * passes
    found: dict[str, Number] = dict(  # noqa: C408
        warps=tiles.warps,
        threads=threads,
        blocks=nest.blocks,
        cells=cells,
        passes=passes * again,
        reduces=float(bool(work.reduced)),
        across=np.clip(np.ceil(width / (warp * vector)), 1.0, tiles.warps),
        loads=trips * moved,
        flight=np.minimum(cells * cell, 4 * VECTOR_BYTES) * np.minimum(tile / threads, 1.0),
        ops=np.maximum(cells, 1.0) * work.lane_ops / np.maximum(work.points, 1.0),
        waste=np.maximum(1.0, SECTOR_BYTES / np.maximum(run, 1.0)),
        nbytes=work.nbytes,
        split=tiles.split,
    )
    return Streams(**{name: v + none for name, v in found.items()})


def seconds(s: Sheet, c: Streams, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of counted blocks."""
    xp = s.xp
    wanted = s.put("registers wanted", xp.maximum(c.cells, 1.0) + p["registers"], "", "a thread")
    block = BlockShare(c.threads, 4.0 * c.warps, wanted)
    over, resident = hold(xp, target, block, c.blocks)
    over = s.put("values spilled", over, "", "a thread's")
    resident = s.put("blocks an SM holds", resident)
    instructions = (c.ops + p["address"] * c.loads + p["spill"] * over) * c.passes
    instructions = s.put("instructions", instructions, "", "a thread's")
    busy = p["issue"] * instructions * c.warps / schedulers(target) + 0.1 * p["block"]
    steps = 5 * p["shuffle"] + xp.where(c.across > 1, 2 * p["barrier"], 0.0)
    alone = p["block"] + c.passes * (p["wait"] + c.reduces * steps) + busy
    busy, alone = s.put("block", busy, "clocks"), s.put("block alone", alone, "clocks")
    tail, leak = p["tail"], p["leak"]
    spent = clocks(s, c.blocks, resident, target.sms, busy=busy, alone=alone, tail=tail, leak=leak)
    compute = s.put("busiest SM", spent / target.clock_hz, "s")
    dram = s.put("dram bytes", c.nbytes * xp.maximum(1.0, 0.5 * c.passes), "bytes")
    at_once = xp.minimum(target.sms * resident, c.blocks) * c.threads * c.flight
    rate = xp.minimum(
        p["dram share"] * target.dram_bytes_per_s,
        p["l2 share"] * target.l2_bytes_per_s / c.waste,
    )
    held = xp.where(c.nbytes < 0.5 * target.l2_bytes, p["l2 share"] * target.l2_bytes_per_s, rate)
    # by Little's law: what is under way at once comes a wait apart
    waits = s.put("waits of loads", dram * p["wait"] / target.clock_hz / at_once, "s")
    memory = s.put("from caches and dram", dram / held + waits, "s")
    total = joined(s, 3.0, compute, memory) + p["start"] * 1e-6
    total = total + xp.where(c.split > 1, 2e-6, 0.0)
    return Terms(compute, memory, total - xp.maximum(compute, memory))
