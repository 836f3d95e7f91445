"""Products on matrix units that a compiler made for a given tile: Triton's, CUTLASS's, TVM's.

A block walks along k in steps: copies of its operands' tiles into shared memory run `stages` ahead
of the products. A step is as long as its products, its reads of shared memory, its share of the
L2's rate, or the wait for copies that were not started early enough. Blocks go over the result in
groups of rows, and what they read together is what the L2 has to hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.family import Terms
from gpuir.cost.generated.parts import (
    LINE_BYTES,
    BlockCounts,
    clocks,
    hold,
    is_amd,
    joined,
    joined_least,
    power_of_two,
    where,
)
from gpuir.cost.generated.shared import ProductStep, Staged, smem_bytes
from gpuir.cost.lanes import SOFTMAX_LANE_OPS
from gpuir.cost.nest import MOST_REGISTERS, BlockShare, Tiles, cut, has_clusters, instruction
from gpuir.cost.sheet import Factor, Number, Sheet, Unwritten
from gpuir.cost.work import Grouped, Work, product
from gpuir.ir.types import f32
from gpuir.targets.target import Target

WARP_ROWS = 16  # of one matrix instruction of a warp, of eight columns (PTX ISA, mma.m16n8)
GROUP_ROWS = 64  # of one of four warps (PTX ISA, wgmma.m64)


FACTORS = table("factors/generated_matrix", Factor)


@dataclass(frozen=True)
class ProductBlocks(BlockCounts):
    """What the blocks of a product do."""

    wide: bool  # whether the target has instructions of four warps
    m: Number
    n: Number
    k: Number
    warps: Number
    blocks: Number
    steps: Number
    stages: Number  # copies in shared memory at once
    grouped_warps: Number  # 1 where those instructions run
    warps_down: Number
    warps_across: Number
    density: Number  # products of a step over those of its points
    left_bytes: Number  # of a step
    right_bytes: Number
    unpacked: Number  # weights of a step that the lanes unpack
    scaled: Number  # sums of a step that get a scale
    scores: Number  # of a step of attention, in registers beside the sums
    out_bytes: Number  # of a block
    smem_bytes: Number
    split: Number
    down: Number  # tiles of rows, of one matrix
    across: Number
    group: Number
    matrices: Number
    left_all: Number  # bytes of the whole operands
    right_all: Number
    out_all: Number
    products: Number
    lane_ops: Number


def names(work: Work) -> tuple[str, str, str]:
    """The dimensions of a product's rows, columns and sum."""
    return ("s", "e", "d") if work.kernel == "k.attention" else ("m", "n", "k")


def count(work: Work, tiles: Tiles, target: Target) -> ProductBlocks:
    """What blocks do under tiles of m, n and k; of attention, of queries, cells and keys."""
    nest = cut(work, tiles)
    rows, cols, deep = names(work)
    m, n, k = (np.asarray(nest.sizes[d], float) for d in (rows, cols, deep))
    inputs = [o for o in work.operands if o.staging in ("staged", "held")]
    left, right = inputs[0], inputs[1]
    a, w = left.cell_bytes, right.cell_bytes
    left_bytes, right_bytes, held_bytes = m * k * a, n * k * w, 0.0
    scores = 0.0
    if work.kernel == "k.attention":  # queries stay, keys and values go by
        left_bytes, held_bytes = 0.0, m * a
        right_bytes = k * (w + n * inputs[2].cell_bytes)
        scores = m * k
        w = a
    wide = has_clusters(target)
    four = (m >= GROUP_ROWS) & (tiles.warps % 4 == 0)
    grouped = 1.0 * (four if wide else np.zeros_like(m, bool))
    fits = np.minimum(tiles.warps, np.maximum(m / WARP_ROWS, 1.0))
    balanced = power_of_two(np.sqrt(tiles.warps * m / n))
    warps_down = where(grouped > 0, fits, np.minimum(fits, balanced))
    written = [o for o in work.operands if o.staging == "written"]
    out = sum((o.cell_bytes for o in written), 0.0)
    buffers = np.maximum(where(grouped > 0, tiles.stages, tiles.stages - 1), 1.0)
    if is_amd(target):
        buffers = np.maximum(tiles.stages - 1, 1.0)
    copies = tiles.stages if target.isa == "gfx950" else buffers  # `cost.generated.shared`
    smem = copies * right_bytes + held_bytes
    if work.kernel != "k.attention":
        step = ProductStep(
            target,
            work.dtype,
            left=Staged(m, a, left.dims[-1] == deep),
            right=Staged(n, w, right.dims[-1] == deep),
            k=k,
            stages=tiles.stages,
            warps=tiles.warps,
            four=grouped,
            form=work.form,
        )
        smem = smem_bytes(step)
    narrow = 1.0 * np.less(w, a)
    grid = of_grid(work, tiles, m, n, k)
    none = 0.0 * grid["blocks"]
    found: dict[str, Number] = dict(  # noqa: C408
        m=m,
        n=n,
        k=k,
        warps=tiles.warps,
        stages=buffers,
        grouped_warps=grouped,
        warps_down=warps_down,
        warps_across=np.maximum(tiles.warps / warps_down, 1.0),
        left_bytes=left_bytes,
        right_bytes=right_bytes,
        unpacked=n * k * narrow,
        scaled=m * n * float(work.kind == "block scales"),
        out_bytes=m * n * out,
        scores=scores,
        smem_bytes=smem,
    )
    return ProductBlocks(wide, **{name: v + none for name, v in (found | grid).items()})


def of_grid(work: Work, tiles: Tiles, m: Number, n: Number, k: Number) -> dict[str, Number]:
    """Of the counts those that the extents of a kernel move, under tiles of m, n and k."""
    rows, cols, deep = names(work)
    extents = {d: np.maximum(e, 1.0) for d, e in work.extents.items()}
    down, across = np.ceil(extents[rows] / m), np.ceil(extents[cols] / n)
    matrices = product(extents[d] for d in work.grid if d not in (rows, cols))
    if isinstance(work.detail, Grouped):
        # rows fall to groups at random (a Poisson law): the tiles that hold one at least, and half
        # a tile more in each that is cut off
        mean = work.extents[rows]
        down = np.maximum(1 - np.exp(-mean), mean / m + 0.5 * np.minimum(1.0, 2 * mean / m))
    left, *others = (o.nbytes for o in work.operands if o.staging in ("staged", "held"))
    right = others[0] + others[1] if work.kernel == "k.attention" else others[0]
    return {
        "blocks": matrices * down * across * tiles.split,
        "steps": np.ceil(extents[deep] * work.density / (k * tiles.split)),
        "density": work.products / np.maximum(float(work.multiply_add) * work.points, 1.0),
        "split": tiles.split,
        "down": down,
        "across": across,
        "group": np.minimum(np.asarray(tiles.group, float), np.maximum(down, 1.0)),
        "matrices": matrices,
        "left_all": left,
        "right_all": right,
        "out_all": sum((o.nbytes for o in work.operands if o.staging == "written"), 0.0),
        "products": work.products,
        "lane_ops": work.lane_ops,
    }


BOUND = 0.25  # assumed: what configurations that formulas take for alike may differ by


@dataclass(frozen=True)
class HeldBlocks(BlockCounts):
    """What an SM holds of blocks: registers a thread wants, those of them that it does not get, and
    blocks at once."""

    threads: Number  # of a block
    wanted: Number
    spilled: Number
    resident: Number


def held(
    s: Sheet, c: ProductBlocks, work: Work, target: Target, p: Mapping[str, Number]
) -> HeldBlocks:
    """What an SM of a target holds of counted blocks."""
    xp, warp = s.xp, target.sm.warp
    threads = s.put("threads a block", c.warps * warp)
    sums = c.m * c.n / threads * (2.0 if work.kind == "block scales" else 1.0)
    if instruction(target) == "tcgen05":
        sums = xp.where(c.grouped_warps > 0, 0.5 * sums, sums)  # tensor memory has them
    sums = sums + c.scores / threads
    operands = (c.left_bytes / c.warps_down + c.right_bytes / c.warps_across) / (4 * warp)
    operands = operands * xp.where(c.grouped_warps > 0, 0.25, 1.0)
    wanted = sums + p["registers"] + p["operands"] * xp.minimum(operands, 128.0)
    wanted = s.put("registers wanted", wanted, "", "a thread")
    over, resident = hold(xp, target, BlockShare(threads, c.smem_bytes, wanted), c.blocks)
    over = s.put("values spilled", over, "", "a thread's")
    return HeldBlocks(threads, wanted, over, s.put("blocks an SM holds", resident))


def features(
    c: ProductBlocks, work: Work, target: Target, p: Mapping[str, Number]
) -> dict[str, Number]:
    """What the network sees of counted blocks, in its order: counts and shapes. `target` is the GPU
    that stands for its architecture, whatever the one that is asked about has of SMs, registers and
    shared memory: so that one with more of them is no slower."""
    return features_of(c, held(Sheet(), c, work, target, p), work, target)


def features_of(c: ProductBlocks, h: HeldBlocks, work: Work, target: Target) -> dict[str, Number]:
    """The same, of what an SM of that GPU holds."""
    log = np.log2
    return {
        "log rows of a tile": log(c.m),
        "log columns": log(c.n),
        "log bytes of k": log(c.k * work.dtype.bits / 8),
        "log warps": log(c.warps),
        "log stages": log(c.stages),
        "log group": log(np.maximum(c.group, 1.0)),
        "log rows filled": log(np.maximum(work.extents[names(work)[0]], 1.0) / c.m + 0.01),
        "log steps": log(c.steps),
        "log rounds": log(c.blocks / (target.sms * h.resident)),
        "log blocks held": log(h.resident),
        "registers over the most": h.wanted / MOST_REGISTERS,
        "spills": np.minimum(h.spilled / 32, 4.0),
        "bytes": 0.0 * c.m + work.dtype.bits / 8,
        "has scales": 1.0 * (c.scaled > 0),
        "by four warps": c.grouped_warps,
        "log bytes held": log(c.smem_bytes),
        "log sums of a thread": log(c.m * c.n / h.threads),
        "log rows over columns": log(c.m / c.n),
    }


@dataclass(frozen=True)
class LoopStep(BlockCounts):
    """What a block takes for a step, in clocks, whatever the extents of its kernel."""

    resident: Number  # blocks that an SM holds at once
    busy: Number  # of the SM, others beside it
    alone: Number  # of the block, by itself
    ahead: Number  # steps whose copies are under way
    bytes_in: Number
    stores: Number  # at the end, of its results


def seconds(
    s: Sheet, c: ProductBlocks, work: Work, target: Target, p: Mapping[str, Number]
) -> Terms:
    """The terms of counted blocks."""
    terms = terms_of(s, c, step_of(s, c, work, target, p), target, p)
    return replace(terms, roof=c.products / target.peak("tensor", work.rate_dtype))


def terms_of(
    s: Sheet, c: ProductBlocks, step: LoopStep, target: Target, p: Mapping[str, Number]
) -> Terms:
    """The terms of blocks that take such steps, without a roof."""
    compute, memory, join = times(s, c, step, target, p)
    total = joined(s, p["overlap"], compute, memory) + p["start"] * 1e-6 + join
    return Terms(compute, memory, total - s.xp.maximum(compute, memory))


def least_s(c: ProductBlocks, step: LoopStep, target: Target, p: Mapping[str, Number]) -> Number:
    """Seconds that the terms of counted blocks are not below, a launch and the network left out."""
    compute, memory, join = times(Unwritten(), c, step, target, p)
    return joined_least(np, p["overlap"], compute, memory) + p["start"] * 1e-6 + join


def step_of(
    s: Sheet, c: ProductBlocks, work: Work, target: Target, p: Mapping[str, Number]
) -> LoopStep:
    """What a step takes of counted blocks."""
    xp, sm = s.xp, target.sm
    peak = target.peak("tensor", work.rate_dtype)
    h = held(s, c, work, target, p)
    rate = peak * p["inner"] / (target.sms * _clock_hz(target))
    if c.wide:
        rate = rate * xp.where(c.grouped_warps > 0, 1.0, p["narrow"])
    flops = work.multiply_add * c.m * c.n * c.k * c.density
    mma = s.put("products of a step", flops / rate, "clocks")
    reads = c.left_bytes * c.warps_across + c.right_bytes * c.warps_down
    reads = xp.where(c.grouped_warps > 0, c.left_bytes + c.right_bytes, reads)
    bytes_in = c.left_bytes + c.right_bytes
    shared = (reads + p["copy"] * bytes_in) / p["shared bytes"]
    shared = s.put("shared memory of a step", shared, "clocks")
    lanes = (p["convert"] * c.unpacked + p["scale"] * c.scaled) / sm.fp32_lanes
    lanes = lanes + SOFTMAX_LANE_OPS * c.scores / sm.fp32_lanes
    lanes = lanes + p["spill"] * h.spilled * h.threads * 8 / LINE_BYTES
    lanes = s.put("lanes of a step", lanes, "clocks", "unpacking, scales and spilled values")

    def worked(mma: Number) -> Number:
        return xp.maximum(mma, shared) + p["leak"] * xp.minimum(mma, shared) + lanes

    step = s.put("work of a step", worked(mma), "clocks")
    few = xp.maximum(4.0 / c.warps, 1.0) ** p["few warps"]  # of a block that has the SM to itself
    slowly = s.put("work of a step alone", worked(mma * few), "clocks")
    ahead = xp.maximum((c.stages - 1 + (1 - c.grouped_warps)) * p["ahead"], 0.5)
    late = s.put("wait of a step", p["wait"] / (ahead + 0.5), "clocks")
    slow = joined(s, p["overlap"], slowly, late)  # what is late shows before all of it does
    stores = c.out_bytes / p["store bytes"]
    return LoopStep(h.resident, step, slow, ahead, bytes_in=bytes_in, stores=stores)


def times(
    s: Sheet, c: ProductBlocks, step: LoopStep, target: Target, p: Mapping[str, Number]
) -> tuple[Number, Number, Number]:
    """Seconds of arithmetic and of memory, which overlap, and those that it takes to join the parts
    of a sum: of blocks that take such steps."""
    xp, sm, clock = s.xp, target.sm, _clock_hz(target)
    busy = c.steps * step.busy + 0.2 * p["block"] + step.stores
    alone = c.steps * step.alone + p["wait"] + p["block"] + step.stores
    busy, alone = s.put("block", busy, "clocks"), s.put("block alone", alone, "clocks")
    tail, leak = p["tail"], p["blocks leak"]
    spent = clocks(
        s, c.blocks, step.resident, target.sms, busy=busy, alone=alone, tail=tail, leak=leak
    )
    own = c.lane_ops * xp.where(c.scores > 0, 0.0, 1.0)
    lane_s = own / target.peak("vector", f32) * sm.flops_per_lane_clock * 0.1
    feed = c.blocks * c.steps * step.bytes_in / (p["l2 share"] * target.l2_bytes_per_s)
    feed = s.put("operands from the l2", feed, "s")  # which all SMs share, however many
    compute = s.put("busiest SM", xp.maximum(spent / clock, feed) + lane_s, "s")
    # what moves
    at_once = xp.minimum(target.sms * step.resident, c.blocks)
    one = xp.maximum(c.down * c.across * c.split, 1e-9)  # blocks of one matrix
    window = xp.maximum(xp.minimum(at_once, one), 1.0)
    columns = xp.minimum(c.across, xp.maximum(window / xp.maximum(c.group, 1.0), 1.0))
    rows = xp.maximum(window / columns, xp.minimum(c.group, xp.maximum(c.down, 1.0)))
    right_again = xp.maximum(c.down / rows, 1.0) - 1
    left_again = xp.maximum(c.across / columns, 1.0) - 1
    l2 = p["l2 kept"] * target.l2_bytes
    right_one = c.right_all / xp.maximum(c.matrices, 1.0)
    left_rows = c.left_all / xp.maximum(c.matrices * c.down, 1e-9) * c.group
    missed_right = right_one / (right_one + l2)
    missed_left = left_rows / (left_rows + l2)
    dram = c.right_all * (1 + right_again * missed_right) + c.out_all
    dram = dram + c.left_all * (1 + left_again * missed_left)
    dram = s.put("dram bytes", dram, "bytes")
    flying = at_once * step.bytes_in * (step.ahead + 0.5) * p["flight"]
    need = target.dram_bytes_per_s * p["wait"] / clock
    fill = flying / (flying + need)
    burst = p["burst HBM" if target.dram.kind.startswith("HBM") else "burst GDDR"]
    row = c.right_bytes / c.n  # which lies along k
    fill = fill * row / (row + burst)
    from_dram = dram / (p["dram share"] * target.dram_bytes_per_s * fill)
    l2_bytes = c.blocks * (c.steps * step.bytes_in + c.out_bytes * xp.where(c.split > 1, 3.0, 1.0))
    l2_bytes = s.put("l2 bytes", l2_bytes, "bytes")
    through = l2_bytes / (p["l2 share"] * target.l2_bytes_per_s)
    memory = s.put("from caches and dram", xp.maximum(from_dram, through), "s")
    return compute, memory, xp.where(c.split > 1, p["split"] * 1e-6, 0.0)


def _clock_hz(target: Target) -> float:
    return target.tensor_clock_hz or target.clock_hz
