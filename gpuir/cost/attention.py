"""Fused attention: strips of queries that walk over the keys, and caches read by one query each.

A block takes a strip of `s` rows (queries, or with few of them also the heads that share their keys
and values) and walks over the keys in steps of `d`: q·k, the exponentials, p·v, nothing leaving the
chip (Dao et al., FlashAttention, NeurIPS 2022, and FlashAttention-2, ICLR 2024). Where strips are
too few for the device, the walk is split among blocks whose parts a second pass combines (Dao et
al., Flash-Decoding, 2023).

Strips, steps and splits are those of each library's own rules: FlashAttention-2 and -3 (csrc/
flash_attn and hopper of github.com/Dao-AILab/flash-attention), TensorRT-LLM (cpp/tensorrt_llm/
kernels of github.com/NVIDIA/TensorRT-LLM) and the kernels it generates for sm_100, which FlashInfer
ships too (include/flashinfer/trtllm/fmha of github.com/flashinfer-ai/flashinfer).

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

import numpy as np

from gpuir.cost.family import Family, Terms
from gpuir.cost.nest import (
    BLOCK_SMEM_BYTES,
    OWN_REGISTERS,
    Tiles,
    has_clusters,
    peak_of,
    takes_three,
)
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import Heads, Work
from gpuir.ir.types import bf16, f32
from gpuir.targets.target import Target

# Exponentials an SM gives a clock: 16 (CUDA C++ Programming Guide, arithmetic throughput, special
# functions), twice as many on Blackwell Ultra, sm_103 (NVIDIA technical blog "Inside NVIDIA
# Blackwell Ultra", 2025: attention-layer instructions at double rate).
EXPONENTIALS = 16.0
EXPONENTIALS_OF = {"sm_103": 32.0}
BANK_BYTES = 128.0  # that shared memory gives a clock: 32 banks of 4 bytes, the same guide
SYNC_FLOPS = 2048.0  # a clock of an SM by `mma.sync` on sm_10x: assumed Ampere's, and so seen
# In f32, by three products in TF32: a warp takes apart what its cells of `WARP` rows and columns
# read, each number by two roundings and a difference (cutlass, mma_tensor_op_fast_f32.h;
# kernel_forward.h, kNumWarpsPerBlock).
SPLIT_OPS, WARP = 3.0, 32.0
HEAD_STEP = 32.0  # cells that heads are padded to multiples of: FlashAttention-2
LATENT_HEAD = 512.0  # cells above which a head is a latent: DeepSeek-V2, arXiv 2405.04434
STRIP = 64.0  # rows of one warp group, which has no other to take turns with: FlashAttention-3
FEW_ROWS = 128.0  # assumed: rows up to which a strip is a cache read, whose walk may be split
UNSPLIT_STEPS = 4.0  # steps that are not worth splitting: hopper/heuristics.h, num_splits_heuristic
MOST_SPLITS = 128  # of one strip: the same
# The same: the share of SMs that needs no split, and of the best filling the share that will do.
FULL, GOOD = 0.8, 0.85
GATHERED_ROWS = 16.0  # assumed: rows of a strip whose parts one block combines

# TensorRT-LLM's kernels of one query on a cache before sm_100 (decoderMaskedMultiheadAttention,
# decoderXQAConstants.h, computeMultiBlockCount and mayHavePerfGain): XQA, of heads that share keys
# with 2 to 32 in all, where a fourth of the SMs gets a block for each `XQA_KEYS` keys of a head;
# else one without matrix instructions, a block for each head.
XQA_KEYS, XQA_LEAST, XQA_WAVES, XQA_HEADS = 128.0, 4.0, 8.0, 32.0
LANE_BLOCKS = 3.0  # of the other, that an SM holds: by its times, alike on A100, H100 and H200
LANE_STEP = 2048.0  # cells of keys that one of its steps reads: the same
LANE_UNSPLIT, LANE_SPLIT, LANE_WAVES = 1024.0, 512.0, 2.0  # its splits: the same
GEN_SPLIT = 256.0  # keys that a split has at least, of the kernels generated for sm_100
GEN_LATENT = 1024.0  # keys up to which these take 16 heads of a latent a block: fmhaKernels.cuh

# Of FlashAttention-2's rate, in 16 bits: that is 1.7 times its predecessor's at least (Dao,
# FlashAttention-2, 2023, section 4.1), whose like xFormers' kernel is. Assumed of all GPUs.
EFFICIENT_SHARE = 0.59

FACTORS = (
    Factor("compute share", 0.85, 0.3, 1.0, 0.08, "of the listed tensor rate, in the inner loop"),
    Factor("softmax ops", 1.5, 0.0, 20.0, 0.0, "lane instructions a score besides the exponential"),
    Factor("narrow ops", 1.0, 0.0, 40.0, 0.0, "lane instructions more to round a score to 8 bits"),
    Factor(
        "narrow layout ops",
        5.0,
        0.0,
        40.0,
        0.0,
        "the same on sm_90 for the layout that its 8-bit products want: FlashAttention-3, 3.3",
    ),
    Factor("overlap", 0.5, 0.0, 1.0, 0.0, "of the shorter of products and softmax hidden"),
    Factor("dram share", 0.86, 0.4, 1.0, 0.08, "of the listed DRAM bandwidth"),
    Factor("l2 share", 0.64, 0.1, 1.5, 0.15, "of the listed L2 bandwidth"),
    Factor("l2 kept", 0.3, 0.2, 1.0, 0.0, "of the L2, what the last call's operands may fill"),
    Factor("sm bytes", 32.0, 8.0, 128.0, 0.0, "bytes a clock that one SM draws from the L2"),
    Factor("block start", 5000.0, 200.0, 30000.0, 0.15, "clocks from a block's start to its loop"),
    Factor("head start", 8.0, 0.0, 60.0, 0.0, "clocks more of a block's start, a cell of its head"),
    Factor(
        "small start",
        0.5,
        0.1,
        1.5,
        0.0,
        "times block start, of tiles of few rows from sm_90 on: one begins while another ends",
    ),
    Factor("lane start", 1.4, 0.1, 3.0, 0.0, "times block start, without matrix instructions"),
    Factor("xqa start", 1.2, 0.5, 3.0, 0.0, "XQA: times block start"),
    Factor("step wait", 600.0, 100.0, 10000.0, 0.0, "clocks of a step that only waits for loads"),
    Factor("unhidden", 0.4, 0.0, 1.0, 0.0, "of the shorter of arithmetic and memory"),
    Factor(
        "cache unhidden", 0.25, 0.0, 1.0, 0.0, "the same of one query where loads are asynchronous"
    ),
    Factor("op start", 3.5e-06, 1e-7, 2e-5, 0.2, "seconds that a call takes besides its blocks"),
    Factor("cache op start", 3e-06, 1e-7, 2e-5, 0.2, "the same of one query on a cache"),
    Factor("combine start", 3e-06, 1e-7, 2e-5, 0.2, "seconds to combine the parts of a split walk"),
    Factor("inner combine", 1.5e-06, 1e-7, 1e-5, 0.0, "the same within the kernel"),
    Factor(
        "trtllm append start", 1.5e-06, 1e-8, 2e-5, 0.0, "TensorRT-LLM: instead of append start"
    ),
    Factor("append start", 2e-06, 1e-8, 2e-5, 0.2, "seconds to write the cache in the same call"),
    Factor("query copies", 0.4, 0.0, 4.0, 0.0, "times queries are moved before, beside the cache"),
    Factor("triton compute", 0.17, 0.05, 1.2, 0.0, "Triton: times compute share"),
    Factor("triton start", 0.8, 0.3, 4.0, 0.0, "Triton: times block start"),
    Factor("trtllm compute", 0.83, 0.5, 1.2, 0.0, "TensorRT-LLM: times compute share"),
    Factor("trtllm query copies", 3.0, 0.0, 6.0, 0.0, "TensorRT-LLM: instead of query copies"),
    Factor("trtllm start", 1.2, 0.3, 4.0, 0.0, "TensorRT-LLM: times block start, many queries"),
    Factor("trtllm op start", 1.8, 0.3, 4.0, 0.0, "TensorRT-LLM: times op start"),
    Factor("triton op start", 1.0, 0.3, 4.0, 0.0, "Triton: times op start"),
)


def is_efficient(work: Work, target: Target) -> bool:
    """Whether it is xFormers' kernel that runs, PyTorch's `efficient_attention`: in f32, before
    sm_80, and where neither FlashAttention takes a call (a mask, heads of more than 256 cells, or
    of other sizes for keys and values) nor cuDNN does."""
    if work.dtype == f32:
        return True
    call, number = _call_of(work, target)
    if not call:
        return False
    has_cudnn = 90 <= number < 110
    return number < 80 or call == "wide sdpa" or (call == "odd sdpa" and not has_cudnn)


def is_written_out(work: Work, target: Target) -> bool:
    """Whether PyTorch has no fused kernel for it on a device: bf16 before sm_80."""
    call, number = _call_of(work, target)
    return bool(call) and number < 80 and work.dtype == bf16


def _call_of(work: Work, target: Target) -> tuple[str, int]:
    """How PyTorch's attention is called, and the number of the target's sm_; nothing elsewhere."""
    family, _, number = target.isa.partition("_")
    call = work.detail.call if isinstance(work.detail, Heads) else ""
    return (call, int(number)) if family == "sm" and number.isdecimal() else ("", 0)


def _heads(work: Work) -> Heads:
    return work.detail_as(Heads)


def _is_blackwell(work: Work, target: Target) -> bool:
    return target.isa.startswith("sm_10") and not is_efficient(work, target)


def _has_clusters(work: Work, target: Target) -> bool:
    return has_clusters(target) and not is_efficient(work, target)


def _library(work: Work) -> str:
    """Whose factors: FlashAttention-3 has those of FlashAttention."""
    return "" if work.kind == "fa3" else work.kind


@dataclass(frozen=True)
class Ran:
    """Which of a library's kernels ran: 1 or 0, by shape."""

    single: Number  # that of one query a sequence; TensorRT-LLM takes a first token for a prompt
    lanes: Number  # TensorRT-LLM's without matrix instructions
    xqa: Number  # its other of one query
    whole: Number  # one that does all a call does: these two
    synchronous: Number  # of the generation before, where TensorRT-LLM generates none for a head
    packed: Number  # whose strips also take the heads that share keys


def ran(work: Work, target: Target, xp: Any) -> Ran:
    queries, keys, head = work.extents["s"], work.extents["d"], _heads(work).head
    group = _heads(work).group
    single = xp.where(queries < 2, 1.0, 0.0)
    if work.kind != "trtllm":
        # FlashAttention-3's pack_gqa; of one query every library packs
        newer = target.isa.startswith("sm_90") and work.kind == ""
        packed = 1.0 if newer or work.kind == "fa3" else single
        packed = 0.0 if is_efficient(work, target) else packed
        return Ran(single, 0.0, 0.0, 0.0, 0.0, packed)
    single = single * xp.where(keys > 1, 1.0, 0.0)
    if _is_blackwell(work, target):
        odd = xp.where(head - 16 * xp.floor(head / 16) > 0, 1.0, 0.0)
        return Ran(single, 0.0, 0.0, 0.0, odd, single)
    whole = single * xp.where(head > LATENT_HEAD, 0.0, 1.0)
    blocks = _key_heads(work) * xp.maximum(xp.floor(keys / XQA_KEYS), 1.0)
    few = xp.where(XQA_LEAST * blocks < target.sms, 1.0, 0.0)
    lanes = whole * xp.where(group < 2, 1.0, xp.where(group > XQA_HEADS, 1.0, few))
    return Ran(single, lanes, whole - lanes, whole, 0.0, single - lanes)


def _key_heads(work: Work) -> Number:
    """Heads of keys, of all sequences."""
    return work.extents["b"] * work.extents["h"] / _heads(work).group


@dataclass(frozen=True)
class Walk:
    """The strips of an attention and their walks over the keys."""

    strips: Number  # of one head of keys and values, all its queries
    blocks: Number
    keys: Number  # that the rows of a strip see, on average
    steps: Number  # of a block, on average
    longest: Number  # steps of the longest walk


def walk(s: Sheet, work: Work, tiles: Tiles, target: Target) -> Walk:
    """How `tiles` cut an attention. Heads that share their keys share a tile where `Ran.packed`."""
    xp, queries, keys = s.xp, work.extents["s"], work.extents["d"]
    group, density = _heads(work).group, work.density
    reach = _heads(work).reach
    rows, step, split = tiles.dims["s"], tiles.dims["d"], tiles.split
    packed = ran(work, target, xp).packed
    apart = group * xp.ceil(queries / rows)
    together = xp.ceil(queries * group / rows)
    strips = s.put("strips a key head", packed * together + (1 - packed) * apart)
    blocks = s.put("blocks", _key_heads(work) * strips * split, "", "x split")
    span = xp.minimum(queries, xp.maximum(rows / (packed * group + 1 - packed), 1.0))
    masked = xp.where(density < 1.0, 1.0, 0.0)
    windowed = xp.where(reach < keys, 0.5, 0.0)
    seen = xp.minimum(keys, density * keys + masked * (span - 1) * (0.5 + windowed))
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
    w, kernel = walk(s, work, tiles, target), ran(work, target, xp)
    peak = s.put("peak", peak_of(work, target), "flop/s")
    resident = s.put("blocks an SM holds", _resident(s, work, tiles, target, kernel))
    step_s = _step_s(s, work, tiles, target, p, kernel, resident)
    load = s.put("blocks of the busiest SM", xp.ceil(w.blocks / target.sms))
    compute_s = s.put("arithmetic", xp.maximum(load * w.steps, w.longest) * step_s, "s")
    rounds = xp.maximum(load / resident, 1.0)
    drawn_s = xp.minimum(tiles.dims["d"], w.keys) * _key_bytes(work) / _port(target, p)
    wait_s = xp.maximum(p["step wait"] / target.clock_hz, drawn_s)
    start_s = _start_s(s, work, tiles, target, p, w, kernel)
    chain_s = rounds * (start_s + w.steps * xp.maximum(step_s, wait_s))
    busy_s = s.put("busiest SM", xp.maximum(compute_s, chain_s), "s", "block after block")

    memory_s, missed = _memory_s(s, work, tiles, target, p, w)
    open_share = p["unhidden"]
    if _has_clusters(work, target):  # and so loads that no thread waits for
        single = kernel.single
        open_share = single * p["cache unhidden"] + (1 - single) * p["unhidden"]
    both = xp.maximum(busy_s, memory_s) + open_share * xp.minimum(busy_s, memory_s)
    exposed = s.put("exposed waits", both - xp.maximum(compute_s, memory_s), "s")
    _put_features(s, work, target, w)
    latency = exposed + _calls_s(s, work, tiles, target, p, missed, kernel)
    return Terms(compute_s, memory_s, latency, work.products * work.density / peak)


def _key_bytes(work: Work) -> Number:
    """Of one key and its value."""
    return work.operands[1].cell_bytes + work.operands[2].cell_bytes * work.extents["e"]


def _port(target: Target, p: Mapping[str, Number]) -> Number:
    """Bytes a second that one SM draws."""
    return p["sm bytes"] * target.clock_hz


def _step_s(
    s: Sheet,
    work: Work,
    tiles: Tiles,
    target: Target,
    p: Mapping[str, Number],
    kernel: Ran,
    resident: Number,
) -> Number:
    """Seconds of the arithmetic of one step: its products, and of its exponentials what they do not
    hide, nor the other blocks of the SM."""
    xp, sms = s.xp, target.sms
    rows, step, value = tiles.dims["s"], tiles.dims["d"], work.extents["e"]
    cells = _padded(xp, _heads(work).head, work, target, kernel)
    cells = cells + _padded(xp, value, work, target, kernel)
    library = _library(work)
    share = p["compute share"] * (p[f"{library} compute"] if library else 1.0)
    share = share * (EFFICIENT_SHARE if _is_narrow_efficient(work, target) else 1.0)
    rate = peak_of(work, target)
    old = kernel.synchronous
    rate = rate * (1 - old) + old * SYNC_FLOPS * sms * target.clock_hz
    product_s = 2 * rows * step * cells * sms / (rate * share)
    # Before sm_90 products take operands from registers, and each warp of a strip reads all keys
    # and values from shared memory; XQA's warps share the keys out among them.
    apart = old if _has_clusters(work, target) else 1.0 - kernel.whole
    bank_s = tiles.warps * step * cells * work.dtype.bits / 8 / (BANK_BYTES * target.clock_hz)
    bank_s = s.put("shared memory of a step", apart * bank_s, "s")
    product_s = s.put("products of a step", product_s + (1 - p["overlap"]) * bank_s, "s")
    lanes = target.peak("vector", f32) / target.sm.flops_per_lane_clock / sms
    exponentials = EXPONENTIALS_OF.get(target.isa, EXPONENTIALS) * target.clock_hz
    each = p["softmax ops"]
    if work.dtype.bits < 16:
        each = each + p["narrow ops"]
        each = each + (p["narrow layout ops"] if target.isa.startswith("sm_90") else 0.0)
    if takes_three(work, target):
        each = each + SPLIT_OPS * 2 / WARP * cells
    softmax_s = rows * step * (1 / exponentials + each / lanes)
    softmax_s = s.put("softmax of a step", softmax_s, "s")
    shorter = xp.minimum(product_s, softmax_s)
    turns = p["overlap"] * xp.where(rows > STRIP, 1.0, xp.where(resident > 1, 1.0, 0.0))
    return s.put("step", xp.maximum(product_s, softmax_s) + (1 - turns) * shorter, "s")


def _is_narrow_efficient(work: Work, target: Target) -> bool:
    return work.dtype != f32 and is_efficient(work, target)


def _padded(xp: Any, cells: Number, work: Work, target: Target, kernel: Ran) -> Number:
    """Cells that a head's products take: TensorRT-LLM's own kernels, not those generated, come for
    64 and 128 (its fmha_v2)."""
    whole = xp.ceil(cells / HEAD_STEP) * HEAD_STEP
    if work.kind != "trtllm":
        return whole
    double = xp.where(cells > 64, xp.maximum(whole, 128.0), whole)
    own = kernel.synchronous if _is_blackwell(work, target) else 1.0
    return own * double + (1 - own) * whole


def _start_s(
    s: Sheet,
    work: Work,
    tiles: Tiles,
    target: Target,
    p: Mapping[str, Number],
    w: Walk,
    kernel: Ran,
) -> Number:
    """Seconds from a block's start to its loop."""
    xp, value, library = s.xp, work.extents["e"], _library(work)
    own = p["block start"] + p["head start"] * (_heads(work).head + value) / 2
    if library == "trtllm":
        many = (1 - kernel.single) * p["trtllm start"]
        own = own * (many + kernel.xqa * p["xqa start"] + kernel.single - kernel.xqa)
    elif library:
        own = own * p[f"{library} start"]
    own = own * xp.where(tiles.dims["s"] < STRIP, p["small start"], 1.0)
    own = own * (1 - kernel.lanes) + kernel.lanes * p["lane start"] * p["block start"]
    start = own * xp.minimum(w.blocks, 1.0)
    return s.put("block start", start / target.clock_hz, "s")


def _memory_s(
    s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number], w: Walk
) -> tuple[Number, Number]:
    """Seconds of DRAM or the L2, whichever is longer, and the share of bytes that it lacks."""
    xp = s.xp
    q, k, v, o = (operand.nbytes for operand in work.operands[:4])
    rest = sum((operand.nbytes for operand in work.operands[4:]), 0.0)
    nbytes = s.put("bytes", q + k + v + o + rest + _heads(work).append, "bytes")
    kept = p["l2 kept"] * target.l2_bytes
    missed = xp.minimum(xp.maximum(nbytes / kept - 1, 0.0), 1.0)
    dram_bytes = s.put("dram bytes", nbytes * missed, "bytes")
    dram_s = dram_bytes / (target.dram_bytes_per_s * p["dram share"])
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
        ("head", _heads(work).head),
        ("group", _heads(work).group),
        ("keys over reach", work.extents["d"] / s.xp.maximum(_heads(work).reach, 1.0)),
    ):
        s.put(f"log {name}", s.xp.log1p(many * 1.0), "", "log(1 + n), for the learned correction")
    differ = s.xp.where(w.longest > w.steps, 1.0, 0.0)
    s.put("masked", differ, "", "1 where walks differ in length")
    s.put("narrow", 1.0 if work.dtype.bits < 16 else 0.0, "", "1 of operands under 16 bits")
    s.put("trtllm", 1.0 if work.kind == "trtllm" else 0.0, "", "1 of TensorRT-LLM's kernels")
    appends = s.xp.where(_heads(work).append > 0, 1.0, 0.0)
    s.put("appends", appends, "", "1 where a cache is written")


def _calls_s(
    s: Sheet,
    work: Work,
    tiles: Tiles,
    target: Target,
    p: Mapping[str, Number],
    missed: Number,
    kernel: Ran,
) -> Number:
    """Seconds of a call besides its blocks: its own start, the kernels before and after, and the
    combination of split walks."""
    xp, library = s.xp, _library(work)
    start_s = xp.where(work.extents["s"] < 2, p["cache op start"], p["op start"])
    if library:
        start_s = start_s * (kernel.whole + (1 - kernel.whole) * p[f"{library} op start"])
    if work.kind == "fa3":  # plans its walks in a kernel before: hopper/flash_prepare_scheduler.cu
        start_s = start_s + target.launch_s
    few = xp.where(tiles.dims["s"] < STRIP, 1.0, 0.0)
    inner = few if _is_blackwell(work, target) else kernel.whole
    rows = xp.minimum(work.extents["s"] * _heads(work).group, tiles.dims["s"])
    parts = tiles.split * xp.minimum(rows, GATHERED_ROWS) * work.extents["e"] * 4.0  # in f32
    combine_s = inner * p["inner combine"] + (1 - inner) * p["combine start"]
    combine_s = xp.where(tiles.split > 1, 1.0, 0.0) * (combine_s + parts / _port(target, p))
    combine_s = s.put("parts combined", combine_s, "s")
    append_s = _append_s(s, work, missed, target, p, kernel)
    return start_s + combine_s + append_s + _swapped_s(s, work, target, p, kernel)


def _append_s(
    s: Sheet,
    work: Work,
    missed: Number,
    target: Target,
    p: Mapping[str, Number],
    kernel: Ran,
) -> Number:
    """A kernel before, that writes new keys and values to the cache: it reads and writes them, and
    TensorRT-LLM's also the queries."""
    xp, bytes_own, trtllm = s.xp, _heads(work).append, work.kind == "trtllm"
    copies = p["trtllm query copies" if trtllm else "query copies"]
    plain = xp.where(_heads(work).head > work.extents["e"], 0.0, 1.0)  # else latent, by halves
    moved = 2 * bytes_own + plain * copies * work.operands[0].nbytes
    dram_s = moved * missed / (target.dram_bytes_per_s * p["dram share"])
    l2_s = moved * (1 - missed) / (target.l2_bytes_per_s * p["l2 share"])
    start_s = p["trtllm append start" if trtllm else "append start"]
    writes = xp.where(bytes_own > 0, 1.0, 0.0) * (1 - kernel.whole)
    return s.put("cache written", writes * (start_s + dram_s + l2_s), "s")


def _swapped_s(
    s: Sheet, work: Work, target: Target, p: Mapping[str, Number], kernel: Ran
) -> Number:
    """FlashAttention-2 packs the heads that share keys by turning queries and results around, a
    copy of each, but where all share the same (flash_api.cpp, seqlenq_ngroups_swapped)."""
    xp = s.xp
    if has_clusters(target) or work.kind or is_efficient(work, target):
        return 0.0
    several = xp.where(work.extents["h"] > _heads(work).group, kernel.single, 0.0)
    swapped = xp.where(_heads(work).group > 1, several, 0.0)
    moved = 2 * (work.operands[0].nbytes + work.operands[3].nbytes)
    copy_s = 2 * target.launch_s + moved / (target.l2_bytes_per_s * p["l2 share"])
    return s.put("heads turned", swapped * copy_s, "s")


def _resident(s: Sheet, work: Work, tiles: Tiles, target: Target, kernel: Ran) -> Number:
    """Blocks an SM holds: by shared memory (queries, `stages` of keys and values) and registers.
    Of specialised warps, which take all registers, one."""
    xp, sm, lanes = s.xp, target.sm, kernel.lanes
    if _has_clusters(work, target):
        return LANE_BLOCKS * lanes + (1 - lanes) * (1.0 + 0.0 * tiles.warps)
    rows, step, threads = tiles.dims["s"], tiles.dims["d"], tiles.warps * sm.warp
    value = work.extents["e"]
    head = _heads(work).head
    cell = work.dtype.bits / 8
    smem = cell * (rows * head + tiles.stages * step * (head + value)) + BLOCK_SMEM_BYTES
    registers = xp.minimum(rows * (value + step) / threads + OWN_REGISTERS, 255.0)
    held = xp.minimum(
        xp.floor(sm.smem_bytes / smem), xp.floor(sm.registers / (registers * threads))
    )
    return xp.maximum(held, 1.0) * (1 - lanes) + LANE_BLOCKS * lanes


# ---------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Shape:
    """An attention as the rules of libraries see it."""

    work: Work
    target: Target
    keys: Any
    head: Any
    group: Any
    reach: Any  # keys that a query sees at most
    rows: Any  # of all strips of a head
    heads: Any  # that have strips of their own, of all sequences
    single: Any  # one query, on a cache

    def strips(self, rows: Any) -> Any:
        return np.ceil(self.rows / rows) * self.heads


Cut = tuple[Any, Any, Any, Any, Any]  # rows, step, stages, warps, split


def usual(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The tile that libraries take: rows by what the matrix instructions want, keys by what the
    shared memory holds, splits by what the device lacks of blocks."""
    keys = np.asarray(work.extents["d"], float)
    head = np.asarray(_heads(work).head, float)
    group = np.asarray(_heads(work).group, float)
    share = np.where(np.asarray(ran(work, target, np).packed) > 0, group, 1.0)
    x = Shape(
        work,
        target,
        keys,
        head,
        group,
        np.asarray(_heads(work).reach),
        np.asarray(work.extents["s"] * share),
        work.extents["b"] * work.extents["h"] / share,
        (np.asarray(work.extents["s"]) < 2) & (keys > 1),
    )
    if is_efficient(work, target):
        cut = _of_efficient(x)
    elif _is_blackwell(work, target):
        cut = _of_blackwell(x)
    else:
        cut = _of_hopper(x) if has_clusters(target) else _of_ampere(x)
        if work.kind == "trtllm":
            cut = _of_trtllm(x, cut)
    rows, step, stages, warps, split = (np.array(n, float) for n in np.broadcast_arrays(*cut))
    one = np.ones(rows.shape)
    return Tiles({"b": one, "h": one, "s": rows, "d": step}, stages, warps, split)


def _of_efficient(x: Shape) -> Cut:
    """Blocks of four warps (mem_eff_attention/kernels/cutlassF.h, those of sm_80): in 16 bits heads
    up to 128 in strips of 64 by 64 or 128, in f32 heads up to 64."""
    rows = np.where(x.head <= (64 if x.work.dtype == f32 else 128), 64.0, 32.0)
    return rows, np.where(x.head <= 64, 64.0, 128.0), 1.0, 4.0, 1.0


def _of_ampere(x: Shape) -> Cut:
    """FlashAttention-2, up to sm_89 and on sm_12x (flash_fwd_launch_template.h). Caches in pages
    are read by its splitting kernel, of 64 rows; TensorRT-LLM's have them too. One query is split
    among twice the SMs, on a cache in pages only where heads share keys (mha_varlen_fwd; mha_fwd,
    which PyTorch calls, does it always); by FlashAttention-3's kernels of this generation as on the
    next."""
    paged = (np.asarray(_heads(x.work).append) > 0) & (x.work.kind == "")
    small = (x.rows <= 64) | (x.head > 128) | paged | (x.work.kind == "trtllm")
    rows = np.where(small, 64.0, 128.0)
    step = np.select(
        [x.head <= 64, (rows <= 64) & (x.head <= 128), x.head <= 256], [128.0, 128.0, 64.0], 32.0
    )
    newer = x.work.kind == "fa3"
    most = np.ceil(x.reach / step)
    split = _flash_splits(x.strips(rows), x.target.sms * (1 if newer else 2), most)
    wanted = x.rows <= FEW_ROWS if newer else x.single & ((x.group > 1) | ~paged)
    return rows, step, 1.0, np.where(x.head > 128, 8.0, 4.0), np.where(wanted, split, 1.0)


def _of_hopper(x: Shape) -> Cut:
    """FlashAttention-3 (Shah et al., NeurIPS 2024; hopper/tile_size.h): 64 rows of a latent."""
    rows = np.select([(x.rows <= 64) | (x.head > LATENT_HEAD), x.head <= 64], [64.0, 192.0], 128.0)
    step = np.select(
        [x.head <= 64, x.head <= 128, x.head <= 192, x.head <= 256],
        [128.0, 176.0, 112.0, 80.0],
        64.0,
    )
    stages = np.where((x.head > 256) & (x.head <= LATENT_HEAD), 1.0, 2.0)
    split = _flash_splits(x.strips(rows), x.target.sms, np.ceil(x.reach / step))
    return (
        rows,
        step,
        stages,
        np.where(rows <= 64, 8.0, 12.0),
        np.where(x.rows <= FEW_ROWS, split, 1.0),
    )


def _flash_splits(strips: Any, sms: int, most: Any) -> Any:
    """The fewest splits that fill waves nearly as well as any: num_splits_heuristic of
    hopper/heuristics.h, and of FlashAttention-2."""
    n = np.arange(1.0, MOST_SPLITS + 1)
    waves = np.asarray(strips)[..., None] * n / sms
    possible = n <= np.minimum(most, sms)[..., None]
    filled = np.where(possible, waves / np.ceil(waves), 0.0)
    enough = filled >= GOOD * filled.max(axis=-1, keepdims=True)
    return np.where(
        (strips >= FULL * sms) | (most <= UNSPLIT_STEPS), 1.0, 1.0 + np.argmax(enough, axis=-1)
    )


def _of_blackwell(x: Shape) -> Cut:
    """Of many queries two strips of 128 rows a block (FlashAttention-4). Of one, the kernels that
    TensorRT-LLM generates: the fewest rows that hold the heads, 16 heads of a latent where they are
    32 at most or walks are short, else 64; one wave of splits (fmhaKernels.cuh,
    selectGqGenerationKernel, selectMlaGenerationKernel, computeCtaAndClusterConfig)."""
    sms, latent = x.target.sms, x.head > LATENT_HEAD
    sixteens = x.heads * np.ceil(x.group / 16)
    parts = np.minimum(np.ceil(x.keys / GEN_SPLIT), np.maximum(np.floor(sms / sixteens), 1.0))
    short = (x.keys <= GEN_LATENT * parts) & (sixteens <= sms)
    rows = np.select(
        [
            x.single & (x.rows <= 16) | x.single & latent & (short | (x.group <= 32)),
            x.single & (x.rows <= 32),
            x.single & ((x.rows <= 64) | latent) | (x.head > 256) & (x.head <= LATENT_HEAD),
            (x.rows > 128) & (x.head <= 128),
        ],
        [16.0, 32.0, 64.0, 256.0],
        128.0,
    )
    step = np.where((x.head <= 256) | x.single & latent, 128.0, 64.0)
    stages, warps = np.where(x.head <= 128, 2.0, 1.0), np.where(rows > 64, 16.0, 8.0)
    if x.work.kind == "trtllm":
        old = np.asarray(ran(x.work, x.target, np).synchronous) > 0
        rows, step = np.where(old, 64.0, rows), np.where(old, 128.0, step)
        warps = np.where(old, 4.0, warps)
    split = np.minimum(np.floor(sms / x.strips(rows)), np.ceil(x.reach / GEN_SPLIT))
    return rows, step, stages, warps, np.where(x.single, np.maximum(split, 1.0), 1.0)


def _of_trtllm(x: Shape, cut: Cut) -> Cut:
    """TensorRT-LLM's kernels of one query before sm_100; the others are cut alike. XQA is sm_80's
    on sm_90 too, but for 8-bit caches, which have one of few rows (mha_sm90.cu)."""
    kernel = ran(x.work, x.target, np)
    which = [np.asarray(kernel.xqa) > 0, np.asarray(kernel.lanes) > 0]
    parts = np.floor(x.keys / XQA_KEYS)
    most = np.floor(XQA_WAVES * x.target.sms / _key_heads(x.work))
    parts = np.minimum(np.minimum(parts, np.rint(np.sqrt(8 * parts))), most)
    own = np.where(x.reach < LANE_UNSPLIT, 1.0, np.ceil(x.reach / LANE_SPLIT))
    most = np.floor(LANE_WAVES * x.target.sms / (x.work.extents["b"] * x.work.extents["h"]))
    own = np.minimum(own, most)
    lane = (16.0, np.maximum(LANE_STEP / x.head, 8.0), 1.0, 8.0, np.maximum(own, 1.0))
    narrow = np.asarray(x.work.operands[1].cell_bytes) < x.head * (x.work.dtype.bits / 8)
    xqa = (
        np.where(narrow & has_clusters(x.target), 16.0, 64.0),
        128.0,
        3.0,
        8.0,
        np.maximum(parts, 1.0),
    )
    rows, step, stages, warps, split = (
        np.select(which, [a, b], c) for a, b, c in zip(xqa, lane, cut, strict=True)
    )
    return rows, step, stages, warps, split


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
