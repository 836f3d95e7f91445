"""Nests on the lanes whose threads each compute cells of their own: products in f32, stencils and
whatever a kernel tuner's template loops over.

A block takes its inputs in steps, through shared memory or straight from the caches, and computes
from registers. An SM is as busy as its lanes, its issue slots and its load units are, all at once;
blocks beside each other hide what one waits for. Against that stand the L2 and the DRAM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.family import Terms
from gpuir.cost.generated.parts import (
    BANKS,
    LINE_BYTES,
    BlockCounts,
    clocks,
    conflicts,
    footprint,
    hold,
    is_amd,
    joined,
    load_lanes,
    schedulers,
    waves_of,
    where,
)
from gpuir.cost.nest import BlockShare, TiledNest, Tiles, cut
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.sized import terms
from gpuir.cost.work import SECTOR_BYTES, Operand, Work, product
from gpuir.ir.types import f32
from gpuir.targets.target import Target

UNROLLED = 4.0  # assumed: trips of a loop that a compiler writes out where nobody says how many
TOGETHER = 8.0  # assumed: loads in place that a thread waits for at once
WIDEST = 4.0  # words of a load: 128 bits (PTX ISA, ld)


@dataclass(frozen=True)
class Reads(BlockCounts):
    """What the reads of a block come to, added up over operands.

    Of a thread, over its life: loads from shared memory and in place, as they are if every value is
    loaded once (`least`) and if it is at each use (`most`); `waves` are the passes that those of
    one warp take, times the loads. `kept` values are in registers to be used again.
    """

    shared_least: Number = 0.0
    shared_most: Number = 0.0
    shared_waves: Number = 0.0  # of the least
    direct_least: Number = 0.0
    direct_most: Number = 0.0
    direct_waves: Number = 0.0  # of the least
    read_only: Number = 0.0  # of the least, by read-only loads
    between: Number = 0.0  # values loaded between two uses of one
    kept: Number = 0.0
    computed: Number = 0.0  # loads whose address is computed when they run
    computed_more: Number = 0.0  # of those, of cells beyond a thread's first
    computed_rows: Number = 0.0
    staged: Number = 0.0  # loads that stage
    stage_waves: Number = 0.0  # of those, in the first cache
    store_waves: Number = 0.0  # into shared memory
    staging: Number = 0.0  # 1 where anything is staged
    fragments: Number = 0.0  # cells in registers at once
    smem_bytes: Number = 0.0
    direct_bytes: Number = 0.0  # of a block's loads in place
    held_bytes: Number = 0.0  # what those come back to
    l2_bytes: Number = 0.0  # of all blocks

    def __add__(self, other: Reads) -> Reads:
        return Reads(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Nested(BlockCounts):
    """What a block does, its reads among it."""

    reads: Reads
    threads: Number
    filled: Number  # lanes of its warps over its threads
    blocks: Number
    used: Number  # share of the points it visits that the nest has, where it skips the others
    ops: Number  # multiply-adds, or what the nest has for them, of a thread
    steps: Number
    stages: Number
    trips: Number  # of loops that are not unrolled
    windows: Number  # of code that is: what spills, spills in each
    cells: Number  # of a thread
    dram_bytes: Number
    ragged: Number  # 1 where tiles do not divide the nest
    slower: Number  # than f32, the lanes in its dtype

    def each(self, change: Any) -> Nested:
        plain = {f.name: change(getattr(self, f.name)) for f in fields(self)[1:]}
        return Nested(self.reads.each(change), **plain)


@dataclass(frozen=True)
class BlockCut:
    """A nest under a tile: along each loop the cells and threads of a block, the lanes of a warp,
    and how far apart the cells of a thread are."""

    nest: TiledNest
    target: Target
    threads: Mapping[str, Number]
    lanes: Mapping[str, Number]
    steps: Number  # on average, where blocks share a sum

    @property
    def work(self) -> Work:
        return self.nest.work

    @property
    def tiles(self) -> Tiles:
        return self.nest.tiles

    @property
    def sizes(self) -> Mapping[str, Number]:
        return self.nest.sizes

    @property
    def block(self) -> Number:
        return product(self.threads.values())

    def cells(self, d: str) -> Number:
        return self.sizes[d] / self.threads[d]

    def apart(self, d: str) -> Number:
        strided = np.asarray(self.tiles.strided.get(d, 0.0)) > 0
        return where(strided, self.threads[d], 1.0)


def cut_of(work: Work, tiles: Tiles, target: Target) -> BlockCut:
    threads = {d: tiles.threads.get(d, 1.0) for d, _ in work.dims}
    left: Number = float(target.sm.warp)
    lanes: dict[str, Number] = dict.fromkeys(threads, 1.0)
    for d in tiles.threads:  # the first of them has neighbours in a warp
        lanes[d] = np.minimum(threads[d], np.maximum(left, 1.0))
        left = left / lanes[d]
    nest = cut(work, tiles)
    steps = product(nest.counts[d] for d in work.reduced) / tiles.split
    return BlockCut(nest, target, threads, lanes, steps)


def count(work: Work, tiles: Tiles, target: Target) -> Nested:
    """What blocks do under tiles that say how their threads lie."""
    cut = cut_of(work, tiles, target)
    blocks, counts = cut.nest.blocks, cut.nest.counts
    visited = {d: counts[d] * cut.sizes[d] for d in work.grid}
    share = product(np.maximum(work.extents[d], 1.0) / n for d, n in visited.items())
    points = product(cut.cells(d) for d in cut.sizes) * cut.steps
    reduced = product(cut.sizes[d] for d in work.reduced) * cut.steps
    window = product(cut.sizes[d] for d in window_of(work))
    unroll = where(np.asarray(tiles.unroll) > 1, tiles.unroll, UNROLLED)
    ops = work.products / 2 if np.any(work.products) else work.lane_ops
    if work.kernel == "nest":
        ops = work.products / 2 + work.lane_ops
    inputs = [(i, o) for i, o in enumerate(work.operands) if o.staging not in ("written", "kept")]
    reads = reduce(Reads.__add__, (reads_of(i, o, cut, blocks) for i, o in inputs), Reads())
    warp = float(target.sm.warp)
    written = sum((o.nbytes for o in work.operands if o.staging == "written"), 0.0)
    none = 0.0 * blocks
    f32_peak = target.peak("vector", f32)
    return Nested(
        reads=(reads + Reads(l2_bytes=written * tiles.split)).each(lambda n: n + none),
        threads=cut.block + none,
        filled=np.ceil(cut.block / warp) * warp / cut.block + none,
        blocks=blocks,
        used=(share if is_computed(work) else 1.0) + none,
        ops=points * ops / np.maximum(work.points, 1.0) + none,
        steps=cut.steps + none,
        stages=np.asarray(tiles.stages, float) + none,
        trips=np.maximum(reduced / np.maximum(window, unroll), 1.0) + none,
        windows=np.maximum(reduced / window, 1.0) + none,
        cells=product(cut.cells(d) for d in work.grid) + none,
        dram_bytes=work.nbytes + none,
        ragged=1.0 * (share < 1 - 1e-9) + none,
        slower=np.maximum(1.0, f32_peak / target.peak("vector", work.dtype)) + none,
    )


def is_computed(work: Work) -> bool:
    """Whether an operand's addresses are computed when the kernel runs: a step has a fraction."""
    return any(step % 1 for o in work.operands for a in o.dims for step, _ in terms(a))


def window_of(work: Work) -> set[str]:
    """The reduced loops that operands index together with another one, a stencil's window:
    compilers write those out."""
    axes = [terms(a) for o in work.operands for a in o.dims]
    return {
        d
        for axis in axes
        if len(axis) > 1
        for step, d in axis
        if d in work.reduced and step % 1 == 0
    }


def uses_of(axis: str, cut: BlockCut) -> tuple[Number, Number, Number]:
    """Along one axis of an operand, of a thread in a step: cells it reads, as many as it reads if
    each is loaded at every use, and those of them used more than once."""
    plain = [d for step, d in terms(axis) if step % 1 == 0 and d not in cut.work.reduced]
    inside = [d for step, d in terms(axis) if step % 1 == 0 and d in cut.work.reduced]
    most = product(cut.cells(d) for _, d in terms(axis))
    if not (plain and inside) or len(terms(axis)) > 2:
        return most, most, 0.0
    n, window, apart = cut.cells(plain[0]), cut.cells(inside[0]), cut.apart(plain[0])
    meets = apart < window
    least: Number = where(meets, apart * (n - 1) + window, most)
    again = where(meets & (n > 1), np.maximum(apart * (n - 3) + window, 0.0), 0.0)
    return least, most, again


@dataclass(frozen=True)
class WarpAccess:
    """How an operand lies before a warp, as one load of it sees it: neighbouring lanes along its
    last axis, the words between the cells of two, the rows that the others read, and the loops that
    blocks divide among them."""

    near: str  # the loop of those lanes, or nothing
    lanes: Number
    stride: Number
    rows: Number
    vector: Number
    width: Number  # cells of a block's row
    pitch: Number  # and from one to the next in shared memory
    grid: tuple[str, ...]

    @staticmethod
    def of(i: int, o: Operand, cut: BlockCut) -> WarpAccess:
        inner = [d for _, d in terms(o.dims[-1])] if o.dims else []
        wide = [cut.tiles.vector[d] for d in inner if d in cut.tiles.vector]
        grid = [d for a in o.dims for _, d in terms(a) if d not in cut.work.reduced]
        near = next((d for d in inner if d in grid), "")
        lanes = cut.lanes[near] if near else 1.0
        width = footprint(o.dims[-1:], cut.sizes)
        padded = width + (lanes - width) % BANKS
        return WarpAccess(
            near=near,
            lanes=lanes,
            stride=where(cut.apart(near) > 1, 1.0, cut.cells(near)) if near else 1.0,
            rows=product(cut.lanes[d] for d in grid if d != near),
            vector=np.minimum(wide[0] if wide else 1.0, WIDEST),
            width=width,
            pitch=where(cut.tiles.pad.get(i, 0.0), padded, width),
            grid=tuple(grid),
        )


def _lines(o: Operand, cut: BlockCut, lying: WarpAccess) -> Number:
    """Lines of the first cache that a warp's load takes, or passes over its banks."""
    span = lying.lanes * np.maximum(lying.stride, lying.vector) * o.cell_bytes
    spread = sum(
        (step * cut.lanes[d] * where(cut.apart(d) > 1, 1.0, cut.cells(d)) * o.cell_bytes)
        for step, d in terms(o.dims[-1])
        if step % 1
    )
    if np.any(spread):  # rows that begin a little further each
        return 1.0 + (span + spread) / LINE_BYTES
    if len(terms(o.dims[-1])) > 1:  # rows of a window begin anywhere in a line
        drift = 1 - o.cell_bytes / LINE_BYTES
        return np.maximum(lying.rows, 1.0) * np.maximum(1.0, span / LINE_BYTES + drift)
    words = lying.lanes * lying.vector * o.cell_bytes / 4
    return np.maximum(np.maximum(1.0, span / LINE_BYTES), words / BANKS)


def _staged(i: int, o: Operand, cut: BlockCut, lying: WarpAccess, cells: Number) -> Reads:
    """What it takes to bring a block's cells of an operand into shared memory: `fetch` threads side
    by side, each with neighbouring cells."""
    tiles, warp, vector = cut.tiles, float(cut.target.sm.warp), lying.vector
    side = tiles.fetch.get(i, np.minimum(cut.block, warp) if lying.near else 1.0)
    each: Number = where(tiles.fetch.get(i, 0.0) > 0, lying.width / side, vector)
    loads = cells / cut.block / vector * cut.steps
    reach, down = np.minimum(side, warp), np.maximum(1.0, warp / side)
    return Reads(
        staged=loads,
        stage_waves=loads * down * np.maximum(1.0, reach * each * o.cell_bytes / LINE_BYTES),
        store_waves=loads * down * waves_of(reach, np.maximum(each, vector), vector),
        staging=1.0,
        smem_bytes=cells / lying.width * lying.pitch * o.cell_bytes * tiles.stages,
    )


def _passes(lying: WarpAccess) -> Number:
    """Passes over shared memory of a warp's load."""
    near = waves_of(lying.lanes, np.maximum(lying.stride, lying.vector), lying.vector)
    return where(lying.rows > 1, conflicts(lying.lanes, lying.rows, lying.pitch), near)


def reads_of(i: int, o: Operand, cut: BlockCut, blocks: Number) -> Reads:
    """What the reads of one operand come to."""
    lying = WarpAccess.of(i, o, cut)
    axes = [uses_of(a, cut) for a in o.dims]
    least, most = (product(axis[j] for axis in axes) * cut.steps for j in (0, 1))
    cells, vector = footprint(o.dims, cut.sizes), lying.vector
    own = product(cut.cells(d) for d in lying.grid)
    how = np.asarray(cut.tiles.direct.get(i, 0.0))
    direct, staged = 1.0 * (how > 0), 1.0 * (how == 0)
    addressed = 32.0 / load_lanes(cut.target)  # clocks that a warp's addresses take
    sectors = np.maximum(1.0, SECTOR_BYTES / np.maximum(lying.width * o.cell_bytes, 1.0))
    found = Reads(
        shared_least=staged * least / vector,
        shared_most=staged * most / vector,
        shared_waves=staged * least / vector * np.maximum(_passes(lying), addressed),
        direct_least=direct * least / vector,
        direct_most=direct * most / vector,
        direct_waves=direct * least * np.maximum(_lines(o, cut, lying) / vector, addressed),
        read_only=1.0 * (how > 1) * least / vector,
        between=_between(o, cut),
        kept=sum(
            (
                axis[2] * product(other[0] for j, other in enumerate(axes) if j != k)
                for k, axis in enumerate(axes)
            ),
            0.0,
        ),
        fragments=0.0 if window_of(cut.work) else own,
        direct_bytes=direct * least * cut.block * o.cell_bytes,
        held_bytes=direct * cells * o.cell_bytes,
        l2_bytes=blocks * cut.steps * cells * o.cell_bytes * sectors,
    )
    found = found + _staged(i, o, cut, lying, cells).each(lambda n: staged * n)
    if not any(step % 1 for a in o.dims for step, _ in terms(a)):
        return found
    rows = _rows(o, cut) * cut.steps
    return found + Reads(computed=most, computed_more=most * (1 - 1 / own), computed_rows=rows)


def _between(o: Operand, cut: BlockCut) -> Number:
    """Values that a thread loads between two uses of one: the rows of a window it goes through."""
    found: Number = 0.0
    sizes: Number = 1.0
    for axis in reversed(o.dims):
        least, _, again = uses_of(axis, cut)
        plain = [d for _, d in terms(axis) if d not in cut.work.reduced]
        inside = [d for _, d in terms(axis) if d in cut.work.reduced]
        if plain and inside:
            gap = np.minimum(
                cut.apart(plain[0]) * (cut.cells(plain[0]) - 1), cut.cells(inside[0]) - 1
            )
            found = found + where(again > 0, gap * sizes, 0.0)
            sizes = sizes * cut.cells(inside[0]) * cut.cells(plain[0])
        else:
            sizes = sizes * least
    return found


def _rows(o: Operand, cut: BlockCut) -> Number:
    """Cells of a thread along the loops whose step has a fraction, in a step of the block."""
    return product(
        cut.cells(d) for a in o.dims for step, d in terms(a) if step % 1 or d in cut.work.reduced
    )


def seconds(s: Sheet, c: Nested, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of counted blocks."""
    xp, r, sm = s.xp, c.reads, target.sm
    amd = " amd" if is_amd(target) else ""
    warps = c.threads * c.filled / sm.warp
    lanes = c.threads * c.filled / 32
    # values that are loaded again rather than kept
    again = r.between / (r.between + p["reload"]) if not is_amd(target) else 0.0 * c.threads
    read_only = xp.where(r.read_only > 0, p["reload read-only"] * (r.kept > 0), 0.0)
    again_direct = xp.where(c.ragged * (r.kept > 0) > 0, 1.0, xp.maximum(again, read_only))
    shared = r.shared_least + (r.shared_most - r.shared_least) * again
    direct = r.direct_least + (r.direct_most - r.direct_least) * again_direct
    shared = s.put("loads from shared memory", shared, "", "a thread's")
    direct = s.put("loads in place", direct, "", "a thread's")
    grown = shared / xp.maximum(r.shared_least, 1e-9), direct / xp.maximum(r.direct_least, 1e-9)
    guards = c.ragged * (r.kept + r.between > 0) * r.direct_most * p[f"guard{amd}"]
    # registers, and what does not fit them
    kept = r.kept * p[f"kept{amd}"] * xp.where((direct > 0) & (c.ragged > 0), 0.0, 1.0)
    wanted = s.put(
        "registers wanted", c.cells + r.fragments + kept + p["registers"], "", "a thread"
    )
    threads = warps * sm.warp
    over, resident = hold(xp, target, BlockShare(threads, r.smem_bytes, wanted), c.blocks)
    over = s.put("values spilled", over * c.windows, "", "a thread's")
    resident = s.put("blocks an SM holds", resident)
    # clocks of one block by unit, the SM to itself
    fma = p["fma"] * c.ops * c.slower * lanes * 32 / (sm.fp32_lanes * sm.flops_per_lane_clock / 2)
    computed = p["point"] * r.computed
    if target.isa.startswith("gfx9"):
        computed = computed + p["points gfx9"] * r.computed_more
    computed = computed + p["row"] * r.computed_rows
    staging = (1 + p["address"]) * r.staged * 2
    instructions = c.ops + shared + direct + guards + computed + staging + 2 * over
    instructions = s.put("instructions", instructions + p["loop"] * c.trips, "", "a thread's")
    issue = p["issue"] * instructions * warps / schedulers(target)
    units = p["shared"] * (r.shared_waves * grown[0] + r.store_waves)
    units = units + p["direct"] * (r.direct_waves * grown[1] + r.stage_waves)
    units = units + p["convert"] * r.computed
    units = s.put("load units", (units + 2 * over) * lanes, "clocks", "of a block")
    busy = joined(s, p["overlap"], fma, issue, units) * c.used
    busy = s.put("block", busy, "clocks", "the longer of lanes, issue and load units")
    waits = r.staging * c.steps * (p["memory wait"] / c.stages + 2 * p["barrier"])
    waits = waits * (1 + r.staged / xp.maximum(c.steps, 1.0) / p["in flight"] * (c.windows <= 1))
    guarded = c.ragged * (r.kept + r.between > 0)  # a stencil's edges are checked
    in_place = xp.where(direct > 0, xp.maximum(c.trips, direct / TOGETHER), 0.0)
    chain = c.trips * p["chain"] * r.staging + in_place * p["direct wait"]
    late = guarded * p[f"guarded chain{amd}"] * r.direct_most
    if amd:
        late = late + guarded * p["ragged amd"] * r.shared_most
    chain = chain + late / TOGETHER * p["direct wait"]
    # the warps of a block hide each other's chains, and wait together where it stages
    alone = waits + p["block"] + xp.maximum(chain, busy) + p["leak"] * xp.minimum(chain, busy)
    tail, leak = p["tail"], p["leak"]
    spent = clocks(s, c.blocks, resident, target.sms, busy=busy, alone=alone, tail=tail, leak=leak)
    compute = s.put("busiest SM", spent / target.clock_hz, "s")
    l1 = float(sm.l1_bytes or sm.smem_bytes)
    # of a block by itself: an SM with room for more of them is no slower for it
    missed = xp.maximum(0.0 * c.blocks, 1 - l1 / xp.maximum(r.held_bytes, 1.0))
    l2_bytes = r.l2_bytes + p["miss"] * missed * r.direct_bytes * grown[1] * c.blocks
    l2_bytes = l2_bytes + p["spill"] * 8 * over * c.threads * c.blocks
    l2_bytes = s.put("l2 bytes", l2_bytes, "bytes")
    through = l2_bytes / (p["l2 share"] * target.l2_bytes_per_s)
    dram = s.put("dram bytes", c.dram_bytes, "bytes") / (p["dram share"] * target.dram_bytes_per_s)
    memory = s.put("from caches and dram", xp.maximum(through, dram), "s")
    total = joined(s, p["overlap"], compute, memory)
    return Terms(compute, memory, total - xp.maximum(compute, memory), 0.0)


FACTORS = table("factors/generated_lanes", Factor)
