"""Fused attention: strips of queries that walk over the keys, and caches read by one query each.

A block takes a strip of `s` rows (queries, or with few of them also the heads that share their keys
and values) and walks over the keys in steps of `d`: q·k, the exponentials, p·v, nothing leaving the
chip (Dao et al., FlashAttention, NeurIPS 2022, and FlashAttention-2, ICLR 2024). Where strips are
too few for the device, the walk is split among blocks whose parts a second pass combines (Dao et
al., Flash-Decoding, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpuir.cost.nest import BLOCK_SMEM_BYTES, OWN_REGISTERS, Tiles, has_clusters
from gpuir.cost.sheet import Factor, Family, Number, Sheet, Terms
from gpuir.cost.work import Work
from gpuir.ir.types import f32
from gpuir.targets.target import Target

# Exponentials an SM gives a clock: 16 (CUDA C++ Programming Guide, arithmetic throughput, special
# functions), twice as many on Blackwell Ultra, sm_103 (NVIDIA technical blog "Inside NVIDIA
# Blackwell Ultra", 2025: attention-layer instructions at double rate).
EXPONENTIALS = 16.0
EXPONENTIALS_OF = {"sm_103": 32.0}
HEAD_STEP = 32.0  # cells that heads are padded to multiples of: FlashAttention-2
FEW_ROWS = 64.0  # assumed: rows up to which a strip is a cache read, whose walk may be split
UNSPLIT_STEPS = 4.0  # steps that are not worth splitting: FlashAttention's split heuristic
MOST_SPLITS = 128.0  # of one strip: the same

FACTORS = (
    Factor("compute share", 0.85, 0.3, 1.0, 0.08, "of the listed tensor rate, in the inner loop"),
    Factor("softmax ops", 4.0, 0.0, 20.0, 0.0, "lane instructions a score besides the exponential"),
    Factor("overlap", 0.5, 0.0, 1.0, 0.0, "of the shorter of products and softmax hidden"),
    Factor("dram share", 0.85, 0.4, 1.0, 0.08, "of the listed DRAM bandwidth"),
    Factor("l2 share", 0.6, 0.1, 1.5, 0.15, "of the listed L2 bandwidth"),
    Factor("l2 kept", 0.65, 0.2, 1.0, 0.0, "of the L2, what the last call's operands may fill"),
    Factor("block start", 4000.0, 200.0, 30000.0, 0.15, "clocks from a block's start to its loop"),
    Factor("step wait", 1500.0, 100.0, 10000.0, 0.0, "clocks of a step that only waits for loads"),
    Factor("op start", 4e-6, 1e-7, 2e-5, 0.2, "seconds that a call takes besides its blocks"),
    Factor("combine start", 2e-6, 1e-7, 2e-5, 0.2, "seconds to combine the parts of a split walk"),
    Factor("append start", 2e-6, 1e-8, 2e-5, 0.2, "seconds to write the cache in the same call"),
    Factor("uneven", 0.5, 0.0, 1.0, 0.0, "of an unfilled last wave, lost where walks differ"),
)


@dataclass(frozen=True)
class Walk:
    """The strips of an attention and their walks over the keys."""

    strips: Number  # of one head of keys and values, all its queries
    blocks: Number
    keys: Number  # that the rows of a strip see, on average
    steps: Number  # of a block, on average
    longest: Number  # steps of the longest walk


def walk(s: Sheet, work: Work, tiles: Tiles, target: Target) -> Walk:
    """How `tiles` cut an attention.

    Few queries share a tile with the other heads of their group; FlashAttention-2 does so for one
    query, later libraries for as many as fit.
    """
    xp, queries, keys = s.xp, work.extents["s"], work.extents["d"]
    group, visible = work.trait("group", 1.0), work.visible
    reach = work.trait("reach", keys)
    rows, step, split = tiles.dims["s"], tiles.dims["d"], tiles.split
    few = rows if has_clusters(target) else 1.0
    packed = xp.where(queries * 1.0 <= few, 1.0, 0.0)
    apart = group * xp.ceil(queries / rows)
    together = xp.ceil(queries * group / rows)
    strips = s.put("strips a key head", packed * together + (1 - packed) * apart)
    blocks = s.put(
        "blocks", work.extents["b"] * (work.extents["h"] / group) * strips * split, "", "x split"
    )
    span = xp.minimum(queries, xp.maximum(rows / (packed * group + 1 - packed), 1.0))
    masked = xp.where(visible < 1.0, 1.0, 0.0)
    windowed = xp.where(reach < keys, 0.5, 0.0)
    seen = xp.minimum(keys, visible * keys + masked * (span - 1) * (0.5 + windowed))
    seen = s.put("keys a strip sees", seen)
    most = xp.ceil(keys / step)
    ragged = xp.minimum(most, seen / step + 0.5)
    steps = masked * ragged + (1 - masked) * most
    steps = s.put("steps a block", xp.maximum(steps / split, 1.0))
    longest = xp.minimum(most, (reach + span - 1) / step + 1) / split
    return Walk(strips, blocks, seen, steps, s.put("steps of the longest", xp.ceil(longest)))


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """An SM runs its share of the blocks, some at a time. A step takes its products and, partly
    beside them, its exponentials, or the wait for its loads; a block begins with a wait of its own.
    """
    xp, sms, clock = s.xp, target.sms, target.clock_hz
    w = walk(s, work, tiles, target)
    rows, step = tiles.dims["s"], tiles.dims["d"]
    value = work.extents["e"]
    head = work.trait("head", value)
    peak = s.put("peak", target.peak("tensor", work.dtype), "flop/s")
    cells = xp.ceil(head / HEAD_STEP) * HEAD_STEP + xp.ceil(value / HEAD_STEP) * HEAD_STEP
    product_s = 2 * rows * step * cells * sms / (peak * p["compute share"])
    product_s = s.put("products of a step", product_s, "s")
    lanes = target.peak("vector", f32) / target.sm.flops_per_lane_clock / sms
    exponentials = EXPONENTIALS_OF.get(target.isa, EXPONENTIALS) * clock
    softmax_s = rows * step * (1 / exponentials + p["softmax ops"] / lanes)
    softmax_s = s.put("softmax of a step", softmax_s, "s")
    shorter = xp.minimum(product_s, softmax_s)
    step_s = xp.maximum(product_s, softmax_s) + (1 - p["overlap"]) * shorter
    step_s = s.put("step", step_s, "s")

    resident = s.put("blocks an SM holds", _resident(s, work, tiles, target))
    even = xp.ceil(w.blocks / sms)
    masked = xp.where(w.longest > w.steps, 1.0, 0.0)
    load = even - masked * (1 - p["uneven"]) * (even - xp.maximum(w.blocks / sms, 1.0))
    load = s.put("blocks of the busiest SM", load)
    compute_s = s.put("arithmetic", xp.maximum(load * w.steps, w.longest) * step_s, "s")
    rounds = xp.maximum(load / resident, 1.0)
    wait_s, start_s = p["step wait"] / clock, p["block start"] / clock
    chain_s = rounds * (start_s + w.steps * xp.maximum(step_s, wait_s))

    q, k, v, o = (operand.nbytes for operand in work.operands[:4])
    rest = sum((operand.nbytes for operand in work.operands[4:]), 0.0)
    nbytes = s.put("bytes", q + k + v + o + rest + work.trait("append"), "bytes")
    kept = p["l2 kept"] * target.l2_bytes
    missed = xp.minimum(xp.maximum(nbytes / kept - 1, 0.0), 1.0)
    dram_s = nbytes * missed / (target.dram_bytes_per_s * p["dram share"])
    partial = xp.where(tiles.split > 1, 8.0 * tiles.split * work.output_points, 0.0)
    again = w.strips * w.keys / xp.maximum(xp.minimum(work.extents["d"], w.keys * w.strips), 1.0)
    l2_bytes = s.put("l2 bytes", nbytes + (k + v) * (xp.maximum(again, 1.0) - 1) + partial, "bytes")
    l2_s = l2_bytes / (target.l2_bytes_per_s * p["l2 share"] * xp.minimum(1.0, w.blocks / sms))
    memory_s = s.put("memory", xp.maximum(dram_s, l2_s), "s")

    exposed = xp.maximum(chain_s - xp.maximum(compute_s, memory_s), 0.0)
    exposed = s.put("exposed waits", exposed, "s")
    combine = xp.where(tiles.split > 1, 1.0, 0.0) * p["combine start"]
    append = xp.where(work.trait("append") > 0, 1.0, 0.0) * p["append start"]
    latency = exposed + p["op start"] + combine + append
    return Terms(compute_s, memory_s, latency, work.products * work.visible / peak)


def _resident(s: Sheet, work: Work, tiles: Tiles, target: Target) -> Number:
    """Blocks an SM holds: by shared memory (queries, `stages` of keys and values) and registers."""
    xp, sm = s.xp, target.sm
    rows, step, threads = tiles.dims["s"], tiles.dims["d"], tiles.warps * sm.warp
    value = work.extents["e"]
    head = work.trait("head", value)
    cell = work.dtype.bits / 8
    smem = cell * (rows * head + tiles.stages * step * (head + value)) + BLOCK_SMEM_BYTES
    registers = xp.minimum(rows * (value + step) / threads + OWN_REGISTERS, 255.0)
    held = xp.minimum(
        xp.floor(sm.smem_bytes / smem), xp.floor(sm.registers / (registers * threads))
    )
    return xp.maximum(held, 1.0)


# ---------------------------------------------------------------------------- tiles


def usual(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The tile that libraries take: rows by what the matrix instructions want, keys by what the
    shared memory holds.

    Sizes by head: FlashAttention-2 up to sm_89 and on sm_12x (kernel traits of flash-attention 2.x),
    FlashAttention-3 on sm_90 (Shah et al., NeurIPS 2024; tile sizes of its hopper kernels), two
    strips of 128 rows a block on sm_10x (flash-attention 2.8, FlashAttention-4).
    """
    queries, keys = np.asarray(work.extents["s"], float), np.asarray(work.extents["d"], float)
    head = np.asarray(work.trait("head", work.extents["e"]), float)
    group = np.asarray(work.trait("group", 1.0), float)
    rows_at_hand = np.asarray(queries * group)
    if target.isa.startswith("sm_10"):
        rows = np.where(rows_at_hand > 128, np.where(head <= 128, 256.0, 128.0), 128.0)
        rows = np.where(
            rows_at_hand <= 64, np.maximum(16.0, 2 ** np.ceil(np.log2(rows_at_hand))), rows
        )
        step = np.where(head <= 256, 128.0, 64.0)
        warps, stages = np.where(rows > 64, 16.0, 8.0), 2.0
    elif has_clusters(target):
        rows = np.where(rows_at_hand <= 64, 64.0, np.where(head <= 64, 192.0, 128.0))
        step = np.where(
            head <= 64, 128.0, np.where(head <= 128, 176.0, np.where(head <= 192, 112.0, 80.0))
        )
        step = np.where(head > 256, 64.0, step)
        warps, stages = np.where(rows <= 64, 8.0, 12.0), 2.0
    else:
        few = rows_at_hand if target.isa else queries
        rows = np.where(
            few <= 16, 16.0, np.where(few <= 64, 64.0, np.where(head <= 128, 128.0, 64.0))
        )
        step = np.where(head <= 64, 128.0, 64.0)
        warps, stages = np.where(head > 128, 8.0, 4.0), 1.0
    strips = np.ceil(rows_at_hand / rows) * work.extents["b"] * work.extents["h"] / group
    most = np.ceil(np.asarray(work.trait("reach", keys)) / step)
    split = np.minimum(np.floor(target.sms / strips), np.minimum(most, MOST_SPLITS))
    wanted = (rows_at_hand <= FEW_ROWS) & (most > UNSPLIT_STEPS)
    split = np.where(wanted, np.maximum(split, 1.0), 1.0)
    shape = np.broadcast_shapes(rows.shape, step.shape, split.shape)
    one = np.ones(shape)
    return Tiles(
        {"b": one, "h": one, "s": rows * one, "d": step * one}, stages * one, warps * one, split
    )


def candidates(work: Work, target: Target) -> Tiles:
    """Tiles worth costing: 16 to 256 queries by 32 to 256 keys, split up to 64 ways."""
    table = np.array(
        [
            (rows, step, stages, warps, split)
            for rows in (128, 64, 256, 192, 32, 16)
            for step in (128, 64, 176, 80, 32, 256)
            for warps in (4, 8, 12)
            if rows >= 4 * warps
            for stages in (2, 1, 3)
            for split in (1, 2, 4, 8, 16, 32, 64)
        ],
        dtype=float,
    )
    rows, step, stages, warps, split = table.T
    one = np.ones(len(table))
    return Tiles({"b": one, "h": one, "s": rows, "d": step}, stages, warps, split)


FAMILY = Family("attention", FACTORS, candidates, seconds, choose=usual)
