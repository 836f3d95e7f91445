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
from typing import Any

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
FEW_ROWS = 128.0  # assumed: rows up to which a strip is a cache read, whose walk may be split
STRIP = 64.0  # rows of one warp group, which has no other to take turns with: FlashAttention-3
UNSPLIT_STEPS = 4.0  # steps that are not worth splitting: FlashAttention's split heuristic
MOST_SPLITS = 128.0  # of one strip: the same
EAGER_BLOCKS = 8.0  # of an SM, up to which TensorRT-LLM splits walks: seen in its times

FACTORS = (
    Factor("compute share", 0.85, 0.3, 1.0, 0.08, "of the listed tensor rate, in the inner loop"),
    Factor("softmax ops", 1.5, 0.0, 20.0, 0.0, "lane instructions a score besides the exponential"),
    Factor("narrow ops", 5.5, 0.0, 40.0, 0.0, "lane instructions more to round a score to 8 bits"),
    Factor("overlap", 0.5, 0.0, 1.0, 0.0, "of the shorter of products and softmax hidden"),
    Factor("dram share", 0.86, 0.4, 1.0, 0.08, "of the listed DRAM bandwidth"),
    Factor("l2 share", 0.64, 0.1, 1.5, 0.15, "of the listed L2 bandwidth"),
    Factor("l2 kept", 0.3, 0.2, 1.0, 0.0, "of the L2, what the last call's operands may fill"),
    Factor("block start", 5000.0, 200.0, 30000.0, 0.15, "clocks from a block's start to its loop"),
    Factor("head start", 8.0, 0.0, 60.0, 0.0, "clocks more of a block's start, a cell of its head"),
    Factor("small start", 0.7, 0.1, 1.5, 0.0, "times block start, of tiles of few rows"),
    Factor("step wait", 600.0, 100.0, 10000.0, 0.0, "clocks of a step that only waits for loads"),
    Factor("alone", 2.4, 1.0, 4.0, 0.0, "before sm_90: times slower that a block runs alone"),
    Factor("unhidden", 0.3, 0.0, 1.0, 0.0, "of the shorter of arithmetic and memory"),
    Factor("op start", 3.5e-06, 1e-7, 2e-5, 0.2, "seconds that a call takes besides its blocks"),
    Factor("cache op start", 3e-06, 1e-7, 2e-5, 0.2, "the same of one query on a cache"),
    Factor("combine start", 3e-06, 1e-7, 2e-5, 0.2, "seconds to combine the parts of a split walk"),
    Factor("plan start", 1e-06, 1e-7, 1e-5, 0.0, "FlashAttention-3: seconds to plan its walks"),
    Factor(
        "trtllm append start", 1.5e-06, 1e-8, 2e-5, 0.0, "TensorRT-LLM: instead of append start"
    ),
    Factor("append start", 2e-06, 1e-8, 2e-5, 0.2, "seconds to write the cache in the same call"),
    Factor("query copies", 0.4, 0.0, 4.0, 0.0, "times queries are moved before, beside the cache"),
    Factor("triton compute", 0.17, 0.05, 1.2, 0.0, "Triton: times compute share"),
    Factor("triton start", 0.8, 0.3, 4.0, 0.0, "Triton: times block start"),
    Factor("trtllm compute", 0.83, 0.5, 1.2, 0.0, "TensorRT-LLM: times compute share"),
    Factor("trtllm query copies", 3.0, 0.0, 6.0, 0.0, "TensorRT-LLM: instead of query copies"),
    Factor("trtllm start", 1.2, 0.3, 4.0, 0.0, "TensorRT-LLM: times block start"),
    Factor("trtllm op start", 1.8, 0.3, 4.0, 0.0, "TensorRT-LLM: times op start"),
    Factor("triton op start", 1.0, 0.3, 4.0, 0.0, "Triton: times op start"),
)


def packs(work: Work, target: Target) -> bool:
    """Whether a strip of many queries also takes the heads that share their keys: FlashAttention-3
    (its pack_gqa). Every library packs those of one query on a cache."""
    return target.isa.startswith("sm_90") and work.kind == ""


def _few(work: Work, xp: Any) -> Number:
    """Fewer queries than this pack: TensorRT-LLM takes a single token for a prompt, and packs at
    most 32 heads, but for latent attention (seen in its times)."""
    if work.kind != "trtllm":
        return 2.0
    crowd = xp.where(work.trait("head") > 512.0, 0.0, work.trait("group"))
    return xp.where(crowd > 32.0, 1.0, xp.minimum(work.extents["d"], 2.0))


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

    One query on a cache shares a tile with the other heads of its group; many do where `packs`.
    """
    xp, queries, keys = s.xp, work.extents["s"], work.extents["d"]
    group, visible = work.trait("group", 1.0), work.visible
    reach = work.trait("reach", keys)
    rows, step, split = tiles.dims["s"], tiles.dims["d"], tiles.split
    packed = 1.0 if packs(work, target) else xp.where(queries < _few(work, xp), 1.0, 0.0)
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
    xp = s.xp
    w = walk(s, work, tiles, target)
    peak = s.put("peak", target.peak("tensor", work.dtype), "flop/s")
    step_s = _step_s(s, work, tiles, target, p, peak)
    resident = s.put("blocks an SM holds", _resident(s, work, tiles, target))
    load = s.put("blocks of the busiest SM", xp.ceil(w.blocks / target.sms))
    compute_s = s.put("arithmetic", xp.maximum(load * w.steps, w.longest) * step_s, "s")
    rounds = xp.maximum(load / resident, 1.0)
    wait_s = p["step wait"] / target.clock_hz
    start_s = _start_s(s, work, tiles, target, p, w)
    alone = 1.0 if has_clusters(target) else xp.minimum(resident, p["alone"])
    alone_s = step_s * alone
    chain_s = rounds * (start_s + w.steps * xp.maximum(alone_s, wait_s))
    busy_s = s.put("busiest SM", xp.maximum(compute_s, chain_s), "s", "block after block")

    memory_s, missed = _memory_s(s, work, tiles, target, p, w)
    both = xp.maximum(busy_s, memory_s) + p["unhidden"] * xp.minimum(busy_s, memory_s)
    exposed = s.put("exposed waits", both - xp.maximum(compute_s, memory_s), "s")
    _put_features(s, work, target, w)
    combine = xp.where(tiles.split > 1, 1.0, 0.0) * p["combine start"]
    plan = p["plan start"] if packs(work, target) else 0.0
    op = xp.where(work.extents["s"] < 2, p["cache op start"], p["op start"])
    fused = _fused(xp, work, target)
    op = op * (fused + (1 - fused) * (p[f"{work.kind} op start"] if work.kind else 1.0)) + plan
    latency = exposed + op + combine + _append(s, work, missed, target, p)
    return Terms(compute_s, memory_s, latency, work.products * work.visible / peak)


def _step_s(
    s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number], peak: Number
) -> Number:
    """Seconds of the arithmetic of one step: its products, and of its exponentials what they do not
    hide."""
    xp, sms = s.xp, target.sms
    rows, step, value = tiles.dims["s"], tiles.dims["d"], work.extents["e"]
    head = work.trait("head", value)
    cells = xp.ceil(head / HEAD_STEP) * HEAD_STEP + xp.ceil(value / HEAD_STEP) * HEAD_STEP
    share = p["compute share"] * (p[f"{work.kind} compute"] if work.kind else 1.0)
    product_s = 2 * rows * step * cells * sms / (peak * share)
    product_s = s.put("products of a step", product_s, "s")
    lanes = target.peak("vector", f32) / target.sm.flops_per_lane_clock / sms
    exponentials = EXPONENTIALS_OF.get(target.isa, EXPONENTIALS) * target.clock_hz
    each = p["softmax ops"] + (p["narrow ops"] if work.dtype.bits < 16 else 0.0)
    softmax_s = rows * step * (1 / exponentials + each / lanes)
    softmax_s = s.put("softmax of a step", softmax_s, "s")
    shorter = xp.minimum(product_s, softmax_s)
    turns = xp.where(rows > STRIP, p["overlap"], 0.0)
    return s.put("step", xp.maximum(product_s, softmax_s) + (1 - turns) * shorter, "s")


def _start_s(
    s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number], w: Walk
) -> Number:
    """Seconds from a block's start to its loop."""
    value = work.extents["e"]
    own = p["block start"] + p["head start"] * (work.trait("head", value) + value) / 2
    if work.kind:
        own = own * p[f"{work.kind} start"]
    own = own * s.xp.where(tiles.dims["s"] < STRIP, p["small start"], 1.0)
    start = own * s.xp.minimum(w.blocks, 1.0)
    return s.put("block start", start / target.clock_hz, "s")


def _memory_s(
    s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number], w: Walk
) -> tuple[Number, Number]:
    """Seconds of DRAM or the L2, whichever is longer, and the share of bytes that it lacks."""
    xp = s.xp
    q, k, v, o = (operand.nbytes for operand in work.operands[:4])
    rest = sum((operand.nbytes for operand in work.operands[4:]), 0.0)
    nbytes = s.put("bytes", q + k + v + o + rest + work.trait("append"), "bytes")
    kept = p["l2 kept"] * target.l2_bytes
    missed = xp.minimum(xp.maximum(nbytes / kept - 1, 0.0), 1.0)
    dram_s = nbytes * missed / (target.dram_bytes_per_s * p["dram share"])
    partial = xp.where(tiles.split > 1, 8.0 * tiles.split * work.output_points, 0.0)
    again = w.strips * w.keys / xp.maximum(xp.minimum(work.extents["d"], w.keys * w.strips), 1.0)
    l2_bytes = s.put("l2 bytes", nbytes + (k + v) * (xp.maximum(again, 1.0) - 1) + partial, "bytes")
    active = xp.minimum(1.0, w.blocks / target.sms)
    l2_s = l2_bytes / (target.l2_bytes_per_s * p["l2 share"] * active)
    return s.put("memory", xp.maximum(dram_s, l2_s), "s"), missed


def _put_features(s: Sheet, work: Work, target: Target, w: Walk) -> None:
    """What the network sees."""
    for name, many in (
        ("blocks an SM", w.blocks / target.sms),
        ("steps", w.steps),
        ("keys", w.keys),
        ("queries", work.extents["s"]),
        ("head", work.trait("head", work.extents["e"])),
        ("group", work.trait("group", 1.0)),
        ("keys over reach", work.extents["d"] / s.xp.maximum(work.trait("reach", 1.0), 1.0)),
    ):
        s.put(f"log {name}", s.xp.log1p(many * 1.0), "", "log(1 + n), for the learned correction")
    differ = s.xp.where(w.longest > w.steps, 1.0, 0.0)
    s.put("masked", differ, "", "1 where walks differ in length")
    s.put("narrow", 1.0 if work.dtype.bits < 16 else 0.0, "", "1 of operands under 16 bits")
    s.put("trtllm", 1.0 if work.kind == "trtllm" else 0.0, "", "1 of TensorRT-LLM's kernels")
    appends = s.xp.where(work.trait("append") > 0, 1.0, 0.0)
    s.put("appends", appends, "", "1 where a cache is written")


def _fused(xp: Any, work: Work, target: Target) -> Number:
    """1 where one kernel does all that a call does: TensorRT-LLM's before sm_100 for one query on a
    cache, but of a latent."""
    if work.kind != "trtllm" or target.isa.startswith("sm_10"):
        return 0.0
    plain = xp.where(work.trait("head") > 512.0, 0.0, 1.0)
    return xp.where(work.extents["s"] < _few(work, xp), plain, 0.0)


def _append(
    s: Sheet, work: Work, missed: Number, target: Target, p: Mapping[str, Number]
) -> Number:
    """A kernel before, that writes new keys and values to the cache: it reads and writes them, and
    TensorRT-LLM's also the queries."""
    xp, bytes_own, trtllm = s.xp, work.trait("append"), work.kind == "trtllm"
    copies = p["trtllm query copies" if trtllm else "query copies"]
    plain = xp.where(work.trait("head") > work.extents["e"], 0.0, 1.0)  # else latent, by halves
    moved = 2 * bytes_own + plain * copies * work.operands[0].nbytes
    dram_s = moved * missed / (target.dram_bytes_per_s * p["dram share"])
    l2_s = moved * (1 - missed) / (target.l2_bytes_per_s * p["l2 share"])
    start_s = p["trtllm append start" if trtllm else "append start"]
    writes = xp.where(bytes_own > 0, 1.0, 0.0) * (1 - _fused(xp, work, target))
    return s.put("cache written", writes * (start_s + dram_s + l2_s), "s")


def _resident(s: Sheet, work: Work, tiles: Tiles, target: Target) -> Number:
    """Blocks an SM holds: by shared memory (queries, `stages` of keys and values) and registers.
    Of specialised warps, which take all registers, one."""
    if has_clusters(target):
        return 1.0 + 0.0 * tiles.warps
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

    Sizes by head: FlashAttention-2 up to sm_89 and on sm_12x (kernel traits of flash-attention 2),
    FlashAttention-3 on sm_90 (Shah et al., NeurIPS 2024; tile sizes of its hopper kernels), two
    strips of 128 rows a block on sm_10x (flash-attention 2.8, FlashAttention-4).
    """
    queries, keys = np.asarray(work.extents["s"], float), np.asarray(work.extents["d"], float)
    head = np.asarray(work.trait("head", work.extents["e"]), float)
    group = np.asarray(work.trait("group", 1.0), float)
    cached = (queries < 2) & (keys > 1)
    together = packs(work, target) | (queries < _few(work, np))
    rows_at_hand = np.asarray(queries * np.where(together, group, 1.0))
    if target.isa.startswith("sm_10"):
        wide = (head > 256) & (head <= 512)
        rows = np.select(
            [
                cached & (rows_at_hand <= 32),
                cached & (rows_at_hand <= 64) | wide,
                (rows_at_hand > 128) & (head <= 128),
            ],
            [16.0, 64.0, 256.0],
            128.0,
        )
        step = np.select([head <= 256, head <= 512], [128.0, 64.0], 64.0)
        warps, stages = np.where(rows > 64, 16.0, 8.0), np.where(head <= 128, 2.0, 1.0)
    elif has_clusters(target):
        rows = np.select([rows_at_hand <= 64, head <= 64], [64.0, 192.0], 128.0)
        step = np.select(
            [head <= 64, head <= 128, head <= 192, head <= 256], [128.0, 176.0, 112.0, 80.0], 64.0
        )
        warps = np.where(rows <= 64, 8.0, 12.0)
        stages = np.where((head > 256) & (head <= 512), 1.0, 2.0)
    else:
        rows = np.where((rows_at_hand <= 64) | (head > 128), 64.0, 128.0)
        step = np.select(
            [head <= 64, (rows <= 64) & (head <= 128), head <= 256], [128.0, 128.0, 64.0], 32.0
        )
        warps, stages = np.where(head > 128, 8.0, 4.0), 1.0
    if work.kind == "trtllm" and not target.isa.startswith("sm_10"):
        # one query of a head that shares its keys with none, or too many, or reads narrow ones
        narrow = np.asarray(work.operands[1].cell_bytes) < head * (work.dtype.bits / 8)
        own = cached & (head <= 512) & ((group < 2) | (group > 32) | narrow)
        rows, step = np.where(own, 16.0, rows), np.where(own, 64.0, step)
        warps, stages = np.where(own, 32.0, warps), np.where(own, 1.0, stages)
    strips = np.ceil(rows_at_hand / rows) * work.extents["b"] * work.extents["h"]
    strips = strips / np.where(together, group, 1.0)
    most = np.ceil(np.asarray(work.trait("reach", keys)) / step)
    wanted = (rows_at_hand <= FEW_ROWS) & (most > UNSPLIT_STEPS)
    room: Any = 1.0
    if work.kind == "trtllm" and not target.isa.startswith("sm_10"):
        eager = cached & (head <= 512) & (group > 1) & (group <= 32)
        wanted, room = wanted | eager, np.where(eager, EAGER_BLOCKS, 1.0)
    split = np.minimum(np.floor(room * target.sms / strips), np.minimum(most, MOST_SPLITS))
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


FEATURES = (
    *("log blocks an SM", "log steps", "log keys", "log queries", "log head", "log group"),
    *("log keys over reach", "masked", "narrow", "trtllm", "appends"),
)

FAMILY = Family("attention", FACTORS, candidates, seconds, usual, FEATURES, 0.25)
