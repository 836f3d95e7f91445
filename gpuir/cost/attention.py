"""Fused attention: strips of queries that walk over the keys, and caches read by one query each.

A block takes a strip of `s` rows (queries, or with few of them also the heads that share their keys
and values) and walks over the keys in steps of `d`: q·k, the exponentials, p·v, nothing leaving the
chip (Dao et al., FlashAttention, NeurIPS 2022, and FlashAttention-2, ICLR 2024). Where strips are
too few for the device, the walk is split among blocks whose parts a second pass combines (Dao et
al., Flash-Decoding, 2023).

Which of a library's kernels runs, and its strips, steps and splits, is told by `gpuir.cost.strips`.

None of these is of f32. There it is the kernel that PyTorch has from xFormers (aten/src/ATen/
native/transformers/cuda/mem_eff_attention), made for sm_80 and run on all after: keys for each head
of queries, no split walks, and on the matrix units three products in TF32 for one, of numbers that
the lanes take apart; before sm_80 it runs on the lanes. Where TF32 itself is allowed, it is one
product, as Triton's `tl.dot` has it. No measurements of f32 are at hand: what is fitted is taken
from bf16's.

That kernel also runs attention in 16 bits where PyTorch is given a mask, which FlashAttention does
not take, and before sm_80, where there is none (2.13: sdp_utils.cpp, can_use_flash_attention); on
sm_90 and sm_100 cuDNN comes first, and takes masks (check_prefer_cudnn_attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuir.cost import power
from gpuir.cost.data import of_isa, table
from gpuir.cost.family import Family, FormulaInputs, Terms
from gpuir.cost.nest import (
    MOST_REGISTERS,
    OWN_REGISTERS,
    Tiles,
    board_watts,
    has_clusters,
    is_partitioned,
    peak_of,
    takes_three,
)
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.strips import (
    SEGMENTS,
    TRITON,
    TRITON_SPLITS,
    RanKernel,
    blocks_held,
    candidates,
    halves,
    heads_of,
    is_blackwell,
    is_efficient,
    is_narrow,
    is_plain,
    is_synchronous,
    is_unsplit,
    key_heads,
    library,
    ran,
    sums_parts,
    usual,
)
from gpuir.cost.work import Work
from gpuir.ir.types import f32
from gpuir.targets.target import Target

BANK_BYTES = 128.0  # that shared memory gives a clock: 32 banks of 4 bytes, the same guide
SYNC_FLOPS = 2048.0  # a clock of an SM by `mma.sync` on sm_10x: assumed Ampere's, and so seen
# In f32, by three products in TF32: a warp takes apart what its cells of `WARP` rows and columns
# read, each number by two roundings and a difference (cutlass, mma_tensor_op_fast_f32.h;
# kernel_forward.h, kNumWarpsPerBlock).
SPLIT_OPS, WARP = 3.0, 32.0
# Kernels in Triton mask each score: a comparison and an `and` a bound (the keys there are, a causal
# mask, a window), and a choice (SGLang, extend_attention.py). Products of 8 bits want values
# turned, which no instruction does while it loads (PTX ISA, ldmatrix: `.trans` is of 16 bits), and
# are read word by word.
BOUND_OPS, WORD_BYTES = 2.0, 4.0
HEAD_STEP = 32.0  # cells that heads are padded to multiples of: FlashAttention-2
STRIP = 64.0  # rows of one warp group, which has no other to take turns with: FlashAttention-3
GATHERED_ROWS = 16.0  # assumed: rows of a strip whose parts one block combines
LANE_BLOCKS = 3.0  # of TensorRT-LLM's without matrix instructions, that an SM holds: by its times
WARP_ROWS = 16.0  # that a warp has at least: of a matrix instruction, PTX ISA, mma.sync
MATRIX_HEAD = 16.0  # cells that a matrix instruction takes of a head at once: PTX ISA, mma.sync

# Of the L2, by how much more than it keeps a call reads until nothing of it is found again: caches
# that are walked in order, and replace what was used least lately, lose all at once. Assumed.
LOST = 0.25

# TensorRT-LLM's kernels of one query on caches of 8 bits on sm_89, by their times on L40S: how much
# longer those without matrix instructions take, and clocks that XQA waits for a key, but for a
# fourth with heads of 64 cells.
NARROW_TIMES, NARROW_WAIT = 3.5, 80.0
CAST_OPS = 24.0  # lane instructions to widen a cell of FlashInfer's narrow caches: by those times
SETTLE_S = 0.74e-3  # until the clock follows the power: as products on the lanes have it, cost.simt

# Registers of a thread of TensorRT-LLM's kernels that are not tiled (fmha_v2,
# fused_multihead_flash_attention_kernel_noloop.h): its share of the results, the scores and the
# queries, and of keys or values two steps of an instruction, which a warp needs whole. Those beyond
# `MOST_REGISTERS` are spilled.
FRAGMENT_CELLS = 4.0  # of a key or value whose sixteens, of 2 bytes, are a register of each lane

# Of FlashAttention-2's rate, in 16 bits: that is 1.7 times its predecessor's at least (Dao,
# FlashAttention-2, 2023, section 4.1), whose like xFormers' kernel is. Assumed of all GPUs.
EFFICIENT_SHARE = 0.59

# Of the shorter of products and softmax, what cuDNN's kernels hide from sm_90 on, where the factor
# `overlap` is FlashAttention's: three of NVIDIA's own times, H200 and GB200, cuDNN 9.19 to 9.27
# (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results).
CUDNN_OVERLAP = 0.75

FACTORS = table("factors/attention", Factor)


@dataclass(frozen=True)
class KeyWalk:
    """The strips of an attention and their walks over the keys."""

    strips: Number  # of one head of keys and values, all its queries
    blocks: Number
    keys: Number  # that the rows of a strip see, on average
    steps: Number  # of a block, on average
    longest: Number  # steps of the longest walk


def walk(s: Sheet, work: Work, tiles: Tiles, target: Target) -> KeyWalk:
    """How `tiles` cut an attention. Heads that share their keys share a tile where they are packed
    (`RanKernel`)."""
    xp, queries, keys = s.xp, work.extents["s"], work.extents["d"]
    group, density = heads_of(work).group, work.density
    reach, blocked = heads_of(work).reach, heads_of(work).blocked
    rows, step, split = tiles.dims["s"], tiles.dims["d"], tiles.split
    packed = ran(work, target, xp).packed
    apart = group * xp.ceil(queries / rows)
    together = xp.ceil(queries * group / rows)
    strips = s.put("strips a key head", packed * together + (1 - packed) * apart)
    blocks = key_heads(work) * strips * split * halves(work, target, xp)
    blocks = s.put("blocks", blocks, "", "x split, and x halves of a wide result")
    span = xp.minimum(queries, xp.maximum(rows / (packed * group + 1 - packed), 1.0))
    masked = xp.where(density < 1.0, 1.0, 0.0)
    windowed = xp.where(reach < keys, 0.5, 0.0)
    loose = 1.0 - blocked  # of blocks of a mask all rows of a strip see the same keys, whole steps
    seen = xp.minimum(keys, density * keys + masked * loose * (span - 1) * (0.5 + windowed))
    seen = s.put("keys a strip sees", seen)
    most = xp.ceil(keys / step)
    ragged = xp.minimum(most, seen / step + 0.5 * loose)
    steps = masked * ragged + (1 - masked) * most
    steps = s.put("steps a block", xp.maximum(steps / split, 1.0))
    longest = xp.minimum(most, (reach + loose * (span - 1)) / step + loose) / split
    return KeyWalk(strips, blocks, seen, steps, s.put("steps of the longest", xp.ceil(longest)))


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """An SM runs its share of the blocks, some at a time. A step takes its products and, partly
    beside them, its exponentials, or the wait for its loads; a block begins with a wait of its own.
    """
    x, xp = FormulaInputs(s, work, tiles, target, p), s.xp
    w, kernel = walk(s, work, tiles, target), ran(work, target, xp)
    peak = s.put("peak", peak_of(work, target), "flop/s")
    resident = s.put("blocks an SM holds", _resident(x, kernel))
    hidden = _hidden_steps(x, w)
    steps, longest = w.steps + hidden, w.longest + hidden
    load = s.put("blocks of the busiest SM", xp.ceil(w.blocks / target.sms))
    step_s = _step_s(x, kernel, resident, load)
    rounds = xp.maximum(load / resident, 1.0)
    drawn_s = xp.minimum(tiles.dims["d"], w.keys) * _key_bytes(work) / _port(target, p)
    wait_s = xp.maximum(p["step wait"] / target.clock_hz, drawn_s)
    loads_s, start_s = _loads_s(x), _start_s(x, w, kernel)
    if is_unsplit(work, target):
        narrow = is_narrow(work, xp)
        step_s = step_s * (1 + narrow * kernel.lanes * (NARROW_TIMES - 1))
        start_s = start_s * (1 + narrow * kernel.lanes * (NARROW_TIMES - 1))
        each = xp.where(heads_of(work).head > 64, NARROW_WAIT, NARROW_WAIT / 4)
        keys = xp.minimum(tiles.dims["d"], w.keys)
        wait_s = wait_s + narrow * kernel.xqa * keys * each / target.clock_hz
    compute_s = s.put("arithmetic", xp.maximum(load * steps, longest) * step_s, "s")
    waited_s = xp.maximum(step_s + loads_s, wait_s)
    chain_s = rounds * (start_s + steps * waited_s) + (longest - steps) * waited_s
    slower = _slower(s, work, target, xp.maximum(compute_s, chain_s))
    compute_s = compute_s * slower
    waited_s = xp.maximum(step_s * slower + loads_s, wait_s)
    chain_s = rounds * (start_s + steps * waited_s) + (longest - steps) * waited_s
    busy_s = s.put("busiest SM", xp.maximum(compute_s, chain_s), "s", "block after block")

    memory_s, missed = _memory_s(x, w)
    open_share = p["sync unhidden"]
    if not is_synchronous(work, target):  # and so loads that no thread waits for
        single = kernel.single
        open_share = single * p["cache unhidden"] + (1 - single) * p["unhidden"]
    both = xp.maximum(busy_s, memory_s) + open_share * xp.minimum(busy_s, memory_s)
    exposed = s.put("exposed waits", both - xp.maximum(compute_s, memory_s), "s")
    _put_features(s, work, target, w)
    latency = exposed + _calls_s(x, missed, kernel)
    return Terms(compute_s, memory_s, latency, work.products * work.density / peak)


def _hidden_steps(x: FormulaInputs, w: KeyWalk) -> Number:
    """Steps that SGLang's kernel in Triton takes over keys that a window hides, of many queries: it
    goes by them without their products (extend_attention.py, SKIP_TILE), as whole steps."""
    s, work = x.s, x.work
    if work.kind != "triton":
        return 0.0
    xp, queries, keys = s.xp, work.extents["s"], work.extents["d"]
    all_seen = keys - xp.minimum(queries, keys) / 2  # of a causal mask alone
    behind = xp.maximum(all_seen - w.keys, 0.0) / x.tiles.dims["d"]
    many = heads_of(work).windowed * xp.where(queries > 1, 1.0, 0.0)
    return s.put("steps that a window hides", many * x.p["triton skipped"] * behind)


def _loads_s(x: FormulaInputs) -> Number:
    """Seconds that a block waits in each step for its keys and values, where nothing else of it
    goes on meanwhile: kernels in Triton of one stage, whose loads go by cells whatever their
    dtype. More warps load as much more."""
    s, work, tiles, target, p = x
    if library(work, target) not in TRITON:
        return 0.0
    cells = tiles.dims["d"] * (heads_of(work).head + work.extents["e"])
    clocks = cells / (p["triton cells"] * tiles.warps / 4)
    return s.put("loads of a step", clocks / target.clock_hz, "s", "which nothing hides")


def _own(p: Mapping[str, Number], own: str, what: str) -> Number:
    """A factor of a library's kernels: FlashInfer's and FlashAttention-3's are FlashAttention's."""
    if own in ("", "fa3", "flashinfer"):
        return 1.0
    return p[f"{'triton' if own in TRITON else own} {what}"]


def _key_bytes(work: Work) -> Number:
    """Of one key and its value."""
    return work.operands[1].cell_bytes + work.operands[2].cell_bytes * work.extents["e"]


def _port(target: Target, p: Mapping[str, Number]) -> Number:
    """Bytes a second that one SM draws."""
    return p["sm bytes"] * target.clock_hz


def _step_s(x: FormulaInputs, kernel: RanKernel, resident: Number, load: Number) -> Number:
    """Seconds of the arithmetic of one step: its products, and of its exponentials what they do not
    hide, nor the other blocks of the SM."""
    s, work, tiles, target, p = x
    xp, sms = s.xp, target.sms
    rows, step = tiles.dims["s"], tiles.dims["d"]
    value = work.extents["e"] / halves(work, target, xp)
    sync, own = is_synchronous(work, target), library(work, target)
    cells = _padded(xp, heads_of(work).head, work, target, kernel)
    cells = cells + _padded(xp, value, work, target, kernel, is_value=True)
    share = p["compute share"] * _own(p, own, "sync" if sync and own in TRITON else "compute")
    share = share * (EFFICIENT_SHARE if _is_narrow_efficient(work, target) else 1.0)
    rate = peak_of(work, target)
    old = kernel.synchronous
    rate = rate * (1 - old) + old * SYNC_FLOPS * sms * target.clock_hz
    product_s = 2 * rows * step * cells * sms / (rate * share)
    if sync and own in ("trtllm", "flashinfer"):
        staged = is_plain(work, tiles, kernel, xp) * step * _key_bytes(work) / p["staged bytes"]
        product_s = product_s + staged / target.clock_hz
    if sync and own == "trtllm":
        product_s = product_s * (1 + p["trtllm spilled"] * _spilled(x, kernel))
    # Before sm_90 products take operands from registers, and each warp of a strip reads all keys
    # and values from shared memory; XQA's warps share the keys out among them.
    apart = 1.0 - kernel.whole if sync else old
    each = xp.minimum(tiles.warps, xp.maximum(rows / WARP_ROWS, 1.0))  # else they share out keys
    if sync and own == "triton":
        # Of products in a chain all warps go along the longer side of the scores, and where it has
        # no rows for them they repeat others' (Triton, AccelerateMatmul.cpp, warpsPerTileV2): seen
        # of prefill_attention.py, for calls without a mask, and not of extend_attention.py.
        repeated = xp.where(
            work.density < 1.0, 1.0, xp.maximum(tiles.warps * WARP_ROWS / rows, 1.0)
        )
        repeated = xp.where(rows < step, 1.0, repeated)
        product_s, each = product_s * repeated, each * repeated
    read = cells * work.dtype.bits / 8
    if work.dtype.bits < 16 and own in TRITON:
        padded = _padded(xp, value, work, target, kernel, is_value=True)
        read = read + padded * (WORD_BYTES - work.dtype.bits / 8)
    bank_s = each * step * read / (BANK_BYTES * target.clock_hz)
    bank_s = s.put("shared memory of a step", apart * bank_s, "s")
    fetched_s = 0.0
    if sync and own == "trtllm":
        # Of halves of a wide result: a latent is fetched as keys, its half again as values, while
        # products run that do not wait for shared memory, or another block's.
        parts = halves(work, target, xp)
        bytes_ = step * (heads_of(work).head + value) * work.dtype.bits / 8  # 8-bit caches alike
        fetched_s = xp.where(parts > 1, bytes_, 0.0) / (p["staged bytes"] * target.clock_hz)
        alone = 1 - p["overlap"] * xp.where(xp.minimum(load, resident) > 1, 1.0, 0.0)
        beside_s = p["overlap"] * xp.maximum(product_s - bank_s, 0.0)
        fetched_s = s.put("fetched in a step", xp.maximum(fetched_s * alone - beside_s, 0.0), "s")
    hidden = p["overlap"]
    if heads_of(work).call == "cudnn" and has_clusters(target):
        hidden = CUDNN_OVERLAP
    turns = hidden * xp.where(rows > STRIP, 1.0, xp.where(resident > 1, 1.0, 0.0))
    product_s = s.put("products of a step", product_s + (1 - turns) * bank_s + fetched_s, "s")
    lanes = target.peak("vector", f32) / target.sm.flops_per_lane_clock / sms
    exponentials = of_isa("exponentials", target.isa) * target.clock_hz
    each = p["softmax ops"]
    if work.dtype.bits < 16:
        each = each + p["narrow ops"]
        each = each + (p["narrow layout ops"] if target.isa.startswith("sm_90") else 0.0)
    if takes_three(work, target):
        each = each + SPLIT_OPS * 2 / WARP * cells
    softmax_s = rows * step * (1 / exponentials + each / lanes)
    if sync and own in TRITON:
        bounds = 1 + xp.where(work.density < 1.0, 1.0, 0.0) + heads_of(work).windowed
        softmax_s = softmax_s + rows * step * (1 + BOUND_OPS * bounds) / lanes
    if own == "flashinfer":
        cast = kernel.single * is_narrow(work, xp) * step * (heads_of(work).head + value)
        softmax_s = softmax_s + CAST_OPS * cast / lanes
    softmax_s = s.put("softmax of a step", softmax_s, "s")
    shorter = xp.minimum(product_s, softmax_s)
    return s.put("step", xp.maximum(product_s, softmax_s) + (1 - turns) * shorter, "s")


def _spilled(x: FormulaInputs, kernel: RanKernel) -> Number:
    """Registers that a thread of TensorRT-LLM's kernels before sm_90 lacks, of those not tiled."""
    s, work, tiles = x.s, x.work, x.tiles
    xp, rows, step = s.xp, tiles.dims["s"], tiles.dims["d"]
    head, value = heads_of(work).head, work.extents["e"]
    threads = tiles.warps * x.target.sm.warp
    sums = rows * (value + step) / threads
    queries = rows * head * work.dtype.bits / 32 / threads
    fragments = 2 * xp.maximum(step, value) / FRAGMENT_CELLS
    wanted = sums + queries + fragments + OWN_REGISTERS
    plain = is_plain(work, tiles, kernel, xp)
    return s.put("registers spilled", plain * xp.maximum(wanted - MOST_REGISTERS, 0.0))


def _is_narrow_efficient(work: Work, target: Target) -> bool:
    return work.dtype != f32 and is_efficient(work, target)


def _slower(s: Sheet, work: Work, target: Target, run_s: Number) -> Number:
    """How much longer SMs take at the clock that the power of the board allows (`cost.power`),
    where they run for `run_s` at the full one. From sm_90 on the share of the rate has it."""
    listed = target.peak_rule(work.pipe, work.rate_dtype).startswith("tensor")
    if has_clusters(target) or not listed or work.dtype.bits > 16:
        return 1.0
    if target.tdp_w is None:
        return 1.0
    joules = power.matrix_j(target, work.dtype.bits) * work.products * work.density
    joules = joules + power.lane_j(target, 32) * work.lane_ops
    excess = joules / run_s / board_watts(target)
    slower = 1.0 + (s.xp.maximum(excess, 1.0) - 1.0) * run_s / (run_s + SETTLE_S)
    return s.put("slower for lack of power", slower, "", "once the kernel outlasts SETTLE_S")


def _padded(
    xp: Any, cells: Number, work: Work, target: Target, kernel: RanKernel, is_value: bool = False
) -> Number:
    """Cells that a head's products take. TensorRT-LLM's own kernels of sm_90 come for 64 and 128,
    those before as instructions divide a head (its fmha_v2); Triton's extents are powers of two,
    but for queries and keys of 192 and 576 (SGLang, extend_attention.py)."""
    whole = xp.ceil(cells / HEAD_STEP) * HEAD_STEP
    own = library(work, target)
    if own in TRITON:
        power_of_two: Number = 16.0
        for least in (16.0, 32.0, 64.0, 128.0, 256.0):
            power_of_two = xp.where(cells > least, 2 * least, power_of_two)
        two = xp.where(cells > 512.0, whole, power_of_two)
        if own == "unified" or is_value:
            return two
        return xp.where(cells > 191.0, xp.where(cells < 193.0, whole, two), two)
    if own != "trtllm":
        return whole
    if not has_clusters(target):
        return xp.ceil(cells / MATRIX_HEAD) * MATRIX_HEAD
    double = xp.where(cells > 64, xp.maximum(whole, 128.0), whole)
    share = kernel.synchronous if is_blackwell(work, target) else 1.0
    return share * double + (1 - share) * whole


def _start_s(x: FormulaInputs, w: KeyWalk, kernel: RanKernel) -> Number:
    """Seconds from a block's start to its loop."""
    s, work, tiles, target, p = x
    xp, value = s.xp, work.extents["e"]
    own = p["block start"] + p["head start"] * (heads_of(work).head + value) / 2
    if work.kind == "trtllm":
        many = (1 - kernel.single) * p["trtllm start"]
        own = own * (many + kernel.xqa * p["xqa start"] + kernel.single - kernel.xqa)
    else:
        own = own * _own(p, library(work, target), "start")
    own = own * xp.where(tiles.dims["s"] < STRIP, p["small start"], 1.0)
    own = own * (1 - kernel.lanes) + kernel.lanes * p["lane start"] * p["block start"]
    start = own * xp.minimum(w.blocks, 1.0)
    return s.put("block start", start / target.clock_hz, "s")


def _memory_s(x: FormulaInputs, w: KeyWalk) -> tuple[Number, Number]:
    """Seconds of DRAM or the L2, whichever is longer, and the share of bytes that it lacks."""
    s, work, tiles, target, p = x
    xp = s.xp
    q, k, v, o = (operand.nbytes for operand in work.operands[:4])
    rest = sum((operand.nbytes for operand in work.operands[4:]), 0.0)
    nbytes = s.put("bytes", q + k + v + o + rest + heads_of(work).append, "bytes")
    missed = _missed(s, nbytes, target, p)
    dram_bytes = nbytes * missed
    if work.kind == "triton":
        dram_bytes = dram_bytes + _again(x, w)
    dram_bytes = s.put("dram bytes", dram_bytes, "bytes")
    dram_s = dram_bytes / (target.dram_bytes_per_s * p["dram share"])
    dram_s = s.put("dram time", dram_s, "s")
    partial = sums_parts(work, tiles, target, xp) * 8.0 * tiles.split * work.output_points
    again = w.strips * w.keys / xp.maximum(xp.minimum(work.extents["d"], w.keys * w.strips), 1.0)
    l2_bytes = s.put("l2 bytes", nbytes + (k + v) * (xp.maximum(again, 1.0) - 1) + partial, "bytes")
    drawn = w.blocks * (of_isa("cached_bytes", target.isa) or p["sm bytes"]) * target.clock_hz
    l2_s = s.put("l2 time", l2_bytes / xp.minimum(_l2_rate(s, target, p), drawn), "s")
    return s.put("memory", xp.maximum(dram_s, l2_s), "s"), missed


def _missed(s: Sheet, nbytes: Number, target: Target, p: Mapping[str, Number]) -> Number:
    """The share of bytes, read again and again, that the L2 has lost since: an L2 in one piece
    keeps all that fits, one in two partitions also copies of the other's (`cost.tensor`)."""
    found = p["l2 found"] if is_partitioned(target) else 1.0
    beyond = s.xp.maximum(nbytes / target.l2_bytes, found) - found
    return s.xp.minimum(beyond / LOST, 1.0)


def _again(x: FormulaInputs, w: KeyWalk) -> Number:
    """Bytes of keys and values that SGLang's kernels in Triton read once more for each strip: their
    blocks go through all sequences and heads before the next strip (extend_attention.py, grid)."""
    s, work, tiles, target, p = x
    kv = work.operands[1].nbytes + work.operands[2].nbytes
    passes = s.xp.maximum(s.xp.ceil(work.extents["s"] / tiles.dims["s"]) - 1, 0.0)
    seen = w.keys / s.xp.maximum(work.extents["d"] * 1.0, 1.0)
    return kv * seen * passes * _missed(s, kv, target, p)


def _l2_rate(s: Sheet, target: Target, p: Mapping[str, Number]) -> Number:
    """Bytes a second of the L2: a share of the listed rate, and no more than was measured."""
    rate = target.l2_bytes_per_s * p["l2 share"]
    measured = of_isa("cached_bytes", target.isa)
    return s.xp.minimum(rate, measured * target.sms * target.clock_hz) if measured else rate


def _put_features(s: Sheet, work: Work, target: Target, w: KeyWalk) -> None:
    """What the network sees."""
    for name, many in (
        ("blocks an SM", w.blocks / target.sms),
        ("steps", w.steps),
        ("keys", w.keys),
        ("queries", work.extents["s"]),
        ("head", heads_of(work).head),
        ("group", heads_of(work).group),
        ("keys over reach", work.extents["d"] / s.xp.maximum(heads_of(work).reach, 1.0)),
    ):
        s.put(f"log {name}", s.xp.log1p(many * 1.0), "", "log(1 + n), for the learned correction")
    differ = s.xp.where(w.longest > w.steps, 1.0, 0.0)
    s.put("masked", differ, "", "1 where walks differ in length")
    s.put("narrow", 1.0 if work.dtype.bits < 16 else 0.0, "", "1 of operands under 16 bits")
    whose = 1.0 if work.kind == "trtllm" else -1.0 if work.kind in TRITON else 0.0
    s.put("whose", whose, "", "1 of TensorRT-LLM's kernels, -1 of those in Triton")
    appends = s.xp.where(heads_of(work).append > 0, 1.0, 0.0)
    s.put("appends", appends, "", "1 where a cache is written")


def _calls_s(x: FormulaInputs, missed: Number, kernel: RanKernel) -> Number:
    """Seconds of a call besides its blocks: its own start, the kernels before and after, and the
    combination of split walks."""
    s, work, tiles, target, p = x
    xp = s.xp
    cache_s, many_s = p["cache op start"], p["op start"]
    if is_synchronous(work, target):
        cache_s, many_s = p["sync cache op start"], p["sync op start"]
        cache_s, many_s = cache_s / target.clock_hz, many_s / target.clock_hz
    start_s = xp.where(work.extents["s"] < 2, cache_s, many_s)
    own = _own(p, library(work, target), "op start")
    alone = xp.where(halves(work, target, xp) > 1, 1.0, kernel.whole)
    start_s = start_s * (alone + (1 - alone) * own)
    if work.kind == "fa3":  # plans its walks in a kernel before: hopper/flash_prepare_scheduler.cu
        start_s = start_s + target.launch_s
    few = xp.where(tiles.dims["s"] < STRIP, 1.0, 0.0)
    inner = few if is_blackwell(work, target) else kernel.whole
    rows = xp.minimum(work.extents["s"] * heads_of(work).group, tiles.dims["s"])
    parts = tiles.split * xp.minimum(rows, GATHERED_ROWS) * work.extents["e"] * 4.0  # in f32
    combine_s = inner * p["inner combine"] + (1 - inner) * p["combine start"]
    combine_s = combine_s + parts / _port(target, p)
    if library(work, target) in TRITON:
        combine_s = combine_s + _summed_s(x)
    combine_s = sums_parts(work, tiles, target, xp) * combine_s
    combine_s = s.put("parts combined", combine_s, "s")
    return start_s + combine_s + _append_s(x, missed, kernel) + _swapped_s(x, kernel)


def _summed_s(x: FormulaInputs) -> Number:
    """Of kernels in Triton: a block for each head and sequence that sums its parts, and those that
    are started for parts that there are none of."""
    s, work, tiles, target, p = x
    most = TRITON_SPLITS if work.kind == "triton" else SEGMENTS
    heads = work.extents["b"] * work.extents["h"]
    empty = heads / tiles.dims["s"] * s.xp.maximum(most - tiles.split, 0.0)
    at_once = target.sms * target.sm.threads / (4 * target.sm.warp)
    return (heads + empty) * p["triton block"] / (at_once * target.clock_hz)


def _append_s(x: FormulaInputs, missed: Number, kernel: RanKernel) -> Number:
    """A kernel before, that writes new keys and values to the cache: it reads and writes them, and
    TensorRT-LLM's also the queries."""
    s, work, target, p = x.s, x.work, x.target, x.p
    xp, bytes_own, trtllm = s.xp, heads_of(work).append, work.kind == "trtllm"
    copies = p["trtllm query copies" if trtllm else "query copies"]
    plain = xp.where(heads_of(work).head > work.extents["e"], 0.0, 1.0)  # else latent, by halves
    moved = 2 * bytes_own + plain * copies * work.operands[0].nbytes
    dram_s = moved * missed / (target.dram_bytes_per_s * p["dram share"])
    l2_s = moved * (1 - missed) / (_l2_rate(s, target, p))
    start_s = p["trtllm append start"] if trtllm else _small_s(work, target, p)
    writes = xp.where(bytes_own > 0, 1.0, 0.0) * (1 - kernel.whole)
    return s.put("cache written", writes * (start_s + dram_s + l2_s), "s")


def _small_s(work: Work, target: Target, p: Mapping[str, Number]) -> Number:
    """Seconds of a small kernel before or after, besides what it moves."""
    if is_synchronous(work, target):
        return p["sync append start"] / target.clock_hz
    return p["append start"]


def _swapped_s(x: FormulaInputs, kernel: RanKernel) -> Number:
    """FlashAttention-2 packs the heads that share keys by turning queries and results around, a
    copy of each, but where all share the same (flash_api.cpp, seqlenq_ngroups_swapped)."""
    s, work, target, p = x.s, x.work, x.target, x.p
    xp = s.xp
    if not is_synchronous(work, target) or work.kind or is_efficient(work, target):
        return 0.0
    several = xp.where(work.extents["h"] > heads_of(work).group, kernel.packed, 0.0)
    swapped = xp.where(heads_of(work).group > 1, several, 0.0)
    moved = 2 * (work.operands[0].nbytes + work.operands[3].nbytes)
    copy_s = 2 * _small_s(work, target, p) + moved / (_l2_rate(s, target, p))
    return s.put("heads turned", swapped * copy_s, "s")


def _resident(x: FormulaInputs, kernel: RanKernel) -> Number:
    """Blocks an SM holds. Of specialised warps, which take all registers, one."""
    work, tiles, target = x.work, x.tiles, x.target
    xp, lanes = x.s.xp, kernel.lanes
    if not is_synchronous(work, target) and work.kind not in TRITON:
        return LANE_BLOCKS * lanes + (1 - lanes) * (1.0 + 0.0 * tiles.warps)
    threads = tiles.warps * target.sm.warp
    value = work.extents["e"] / halves(work, target, xp)
    cells = tiles.dims["s"] * (value + tiles.dims["d"])
    registers = xp.minimum(cells / threads + OWN_REGISTERS, MOST_REGISTERS)
    held = blocks_held(work, tiles, target, registers, xp)
    return held * (1 - lanes) + LANE_BLOCKS * lanes


FEATURES = (
    *("log blocks an SM", "log steps", "log keys", "log queries", "log head", "log group"),
    *("log keys over reach", "masked", "narrow", "whose", "appends"),
)

FAMILY = Family("attention", FACTORS, candidates, seconds, usual, features=FEATURES, bound=0.25)
