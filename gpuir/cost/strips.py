"""How libraries cut an attention: rows of a strip, keys of a step, warps, splits of a walk.

Each library's own rules, read off its sources:

- FlashAttention-2 and -3 (github.com/Dao-AILab/flash-attention, csrc/flash_attn and hopper);
- FlashInfer (github.com/flashinfer-ai/flashinfer, include/flashinfer/attention), whose kernels of
  sm_80 and after are its own, and on sm_90 and sm_100 those of FlashAttention-3 and TensorRT-LLM;
- TensorRT-LLM (github.com/NVIDIA/TensorRT-LLM, cpp/tensorrt_llm/kernels and cpp/kernels/fmha_v2);
- those written in Triton: SGLang's (github.com/sgl-project/sglang, srt/layers/attention/triton_ops)
  and vLLM's unified attention (github.com/vllm-project/vllm, v1/attention/ops);
- xFormers', as PyTorch has it (aten/src/ATen/native/transformers/cuda/mem_eff_attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles, has_clusters, held
from gpuir.cost.sheet import Number
from gpuir.cost.work import Heads, Work
from gpuir.ir.types import bf16, f32
from gpuir.targets.target import Target

LATENT_HEAD = 512.0  # cells above which a head is a latent: DeepSeek-V2, arXiv 2405.04434
FEW_ROWS = 128.0  # assumed: rows up to which a strip is a cache read, whose walk may be split
UNSPLIT_STEPS = 4.0  # steps that are not worth splitting: hopper/heuristics.h, num_splits_heuristic
MOST_SPLITS = 128  # of one strip: the same
# The same: the share of SMs that needs no split, and of the best filling the share that will do.
FULL, GOOD = 0.8, 0.85

# TensorRT-LLM's kernels of one query on a cache before sm_100 (decoderMaskedMultiheadAttention,
# decoderXQAConstants.h, computeMultiBlockCount and mayHavePerfGain): XQA, of heads that share keys
# with 2 to 32 in all, where a fourth of the SMs gets a block for each `XQA_KEYS` keys of a head;
# else one without matrix instructions, a block for each head.
XQA_KEYS, XQA_LEAST, XQA_WAVES, XQA_HEADS = 128.0, 4.0, 8.0, 32.0
LANE_STEP = 2048.0  # cells of keys that one of the other's steps reads: by its times
LANE_UNSPLIT, LANE_SPLIT, LANE_WAVES = 1024.0, 512.0, 2.0  # its splits: the same
# Columns of a result that a block of its tiled kernels computes (fmha_v2, kernel_traits.h): of a
# latent, two blocks compute halves, and each all of the scores (ctas_per_o_row).
# Of operands they hold slices, twice (USE_GRANULAR_TILING): of queries and keys so many cells, of
# values so many rows, by their times on L40S, which holds two blocks an SM.
BLOCK_COLUMNS = 256.0
SLICE_CELLS, SLICE_ROWS = 64.0, 16.0
GEN_SPLIT = 256.0  # keys that a split has at least, of the kernels generated for sm_100
GEN_LATENT = 1024.0  # keys up to which these take 16 heads of a latent a block: fmhaKernels.cuh

PLAN_BLOCKS, PLAN_KEYS = 2.0, 128.0  # FlashInfer's blocks an SM, keys of a split: scheduler.cuh
TRITON_HEADS = 16.0  # of queries a block takes of one of keys: SGLang, decode_attention.py
TRITON_SPLITS, TRITON_SPLIT = 8.0, 32.0  # most splits, keys of one: triton_backend.py
SEGMENTS, SEGMENTED = 16.0, 128.0  # vLLM: splits, and heads of keys up to which there are any


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
    call = "" if call == "cudnn" else call
    return (call, int(number)) if family == "sm" and number.isdecimal() else ("", 0)


def heads_of(work: Work) -> Heads:
    return work.detail_as(Heads)


def key_heads(work: Work) -> Number:
    """Heads of keys, of all sequences."""
    return work.extents["b"] * work.extents["h"] / heads_of(work).group


def is_blackwell(work: Work, target: Target) -> bool:
    """Whether its kernels are those made for sm_100."""
    other = work.kind in TRITON or is_efficient(work, target)
    return target.isa.startswith("sm_10") and not other


def is_synchronous(work: Work, target: Target) -> bool:
    """Whether warps themselves fetch and multiply, by `mma.sync`: before sm_90, and xFormers'."""
    return not has_clusters(target) or is_efficient(work, target)


def is_small(target: Target) -> bool:
    """Of the generation of sm_80, with 100 KB of shared memory an SM: sm_86 and sm_89."""
    return target.isa in ("sm_86", "sm_89")


TRITON = ("triton", "unified")


def library(work: Work, target: Target) -> str:
    """Whose kernels run: FlashInfer's are its own before sm_90 alone."""
    return "" if work.kind == "flashinfer" and has_clusters(target) else work.kind


@dataclass(frozen=True)
class RanKernel:
    """Which of a library's kernels ran: 1 or 0, by shape."""

    single: Number  # that of one query a sequence; TensorRT-LLM takes a first token for a prompt
    packed: Number  # whose strips also take the heads that share keys
    lanes: Number = 0.0  # TensorRT-LLM's without matrix instructions
    xqa: Number = 0.0  # its other of one query
    whole: Number = 0.0  # one that does all a call does: these two
    synchronous: Number = 0.0  # of the generation before: TensorRT-LLM generates none for a head


def ran(work: Work, target: Target, xp: Any) -> RanKernel:
    """By the library's rules. FlashAttention-2 packs heads of one query, but behind a window
    (flash_api.cpp, seqlenq_ngroups_swapped); FlashAttention-3 does of many too (pack_gqa), and
    FlashInfer and vLLM's unified attention always."""
    queries, keys, head = work.extents["s"], work.extents["d"], heads_of(work).head
    group, own = heads_of(work).group, library(work, target)
    single = xp.where(queries < 2, 1.0, 0.0)
    if own != "trtllm":
        always = own in ("fa3", "flashinfer", "unified")
        always = always or (target.isa.startswith("sm_90") and own == "")
        packed = 1.0 if always else single
        if own == "" and not has_clusters(target):
            packed = single * (1 - heads_of(work).windowed)
        packed = 0.0 if is_efficient(work, target) else packed
        return RanKernel(single, packed)
    single = single * xp.where(keys > 1, 1.0, 0.0)
    if is_blackwell(work, target):
        odd = xp.where(head - 16 * xp.floor(head / 16) > 0, 1.0, 0.0)
        return RanKernel(single, packed=single, synchronous=odd)
    whole = single * xp.where(head > LATENT_HEAD, 0.0, 1.0)
    blocks = key_heads(work) * xp.maximum(xp.floor(keys / XQA_KEYS), 1.0)
    few = xp.where(XQA_LEAST * blocks < target.sms, 1.0, 0.0)
    lanes = whole * xp.where(group < 2, 1.0, xp.where(group > XQA_HEADS, 1.0, few))
    return RanKernel(single, packed=single - lanes, lanes=lanes, xqa=whole - lanes, whole=whole)


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
    causal: Any  # masked, and by no window

    def strips(self, rows: Any) -> Any:
        return np.ceil(self.rows / rows) * self.heads


Cut = tuple[Any, Any, Any, Any, Any]  # rows, step, stages, warps, split


def usual(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The tile that libraries take: rows by what the matrix instructions want, keys by what the
    shared memory holds, splits by what the device lacks of blocks."""
    heads, own = heads_of(work), library(work, target)
    keys = np.asarray(work.extents["d"], float)
    group = np.asarray(heads.group, float)
    share = np.where(np.asarray(ran(work, target, np).packed) > 0, group, 1.0)
    windowed = np.asarray(heads.windowed) > 0
    x = Shape(
        work,
        target,
        keys=keys,
        head=np.asarray(heads.head, float),
        group=group,
        reach=np.asarray(heads.reach),
        rows=np.asarray(work.extents["s"] * share),
        heads=work.extents["b"] * work.extents["h"] / share,
        single=(np.asarray(work.extents["s"]) < 2) & (keys > 1),
        causal=(np.asarray(work.density) < 1) & ~windowed,
    )
    if is_efficient(work, target):
        cut = _of_efficient(x)
    elif own in TRITON:
        cut = _of_triton(x) if own == "triton" else _of_unified(x)
    elif is_blackwell(work, target):
        cut = _of_blackwell(x)
    elif has_clusters(target):
        cut = _of_hopper(x)
    elif own == "flashinfer":
        cut = _of_flashinfer(x)
    elif own == "fa3":
        cut = _of_newer_on_ampere(x)
    else:
        cut = _of_fmha(x) if own == "trtllm" else _of_ampere(x)
    if own == "trtllm" and not is_blackwell(work, target):
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
    """FlashAttention-2, up to sm_89 and on sm_12x (flash_fwd_launch_template.h): smaller tiles
    where shared memory is. Caches in pages are read by its splitting kernel, of 64 rows by up to
    256 keys. One query is split among twice the SMs, on a cache in pages only where heads are
    packed (mha_varlen_fwd; mha_fwd, which PyTorch calls, does it always)."""
    small, smem = x.target.isa.startswith("sm_8") and x.target.isa != "sm_80", x.target.sm
    causal = small & x.causal
    # Of heads of 256 cells: two blocks of 64 rows an SM where they fit, else one of 128.
    wide = (smem.smem_bytes_per_block >= 131_072) & (smem.smem_bytes < 196_608)
    rows = np.select(
        [x.head <= 64, x.head <= 160, x.head <= 192],
        [128.0, np.where(causal, 64.0, 128.0), 128.0],
        128.0 if wide else 64.0,
    )
    step = np.select(
        [x.head <= 64, x.head <= 96, x.head <= 128, x.head <= 160],
        [
            128.0,
            64.0,
            np.where(small & ~causal, 32.0, 64.0),
            64.0 if small else 32.0,
        ],
        64.0,
    )
    warps = np.where((rows > 64) & (x.head > (128 if small else 160)), 8.0, 4.0)
    paged = x.work.detail_as(Heads).paged
    splits = paged | x.single
    rows, warps = np.where(splits, 64.0, rows), np.where(splits, 4.0, warps)
    step = np.where(splits, np.select([x.head <= 64, x.head <= 128], [256.0, 128.0], 64.0), step)
    split = _flash_splits(x.strips(rows), x.target.sms * 2, np.ceil(x.reach / step))
    packed = np.asarray(ran(x.work, x.target, np).packed) > 0
    wanted = x.single & ((packed & (x.group > 1)) | (not paged))
    return rows, step, 1.0, warps, np.where(wanted, split, 1.0)


def _of_newer_on_ampere(x: Shape) -> Cut:
    """FlashAttention-3's kernels for sm_80 to sm_89 (hopper/tile_size.h, tile_size_fwd_sm8x); of
    few rows as FlashAttention-2's (assumed)."""
    small, few = is_small(x.target), x.rows <= 64
    rows = np.where(few, 64.0, 128.0)
    step = np.select(
        [few & (x.head <= 128) | (x.head <= 64), x.head <= 96, x.head <= 128, x.head <= 192],
        [128.0, 64.0, 128.0 if small else 64.0, 64.0],
        64.0 if small else 96.0,
    )
    eight = (x.head > 128) | ~few & ((x.head <= 64) | (x.head > 96) & small)
    split = _flash_splits(x.strips(rows), x.target.sms, np.ceil(x.reach / step))
    return rows, step, 1.0, np.where(eight, 8.0, 4.0), np.where(x.rows <= FEW_ROWS, split, 1.0)


def _of_flashinfer(x: Shape) -> Cut:
    """FlashInfer's own (utils.cuh, FA2DetermineCtaTileQ; prefill.cuh): rows by those there are, of
    heads that share keys together; as many keys, by sixteens for each warp along them, as two
    blocks an SM leave shared memory for. Walks are split until all of those blocks are at work."""
    rows = np.select([(x.rows > 64) & (x.head < 256), x.rows > 16], [128.0, 64.0], 16.0)
    value = np.asarray(x.work.extents["e"], float)
    key_cell = np.asarray(x.work.operands[1].cell_bytes) / x.head
    held = rows * x.head * x.work.dtype.bits / 8
    each = (x.head + value) * 16.0 * np.where(rows < 64, 4.0, 1.0) * key_cell
    has = x.target.sm.smem_bytes
    room = np.where(2 * (held + each) <= has, has / 2, has) - held
    most = np.minimum(np.floor(room / each), np.where(rows > 64, 4.0, 8.0))
    step = 16.0 * np.where(rows < 64, 4.0, 1.0) * 2 ** np.floor(np.log2(np.maximum(most, 1.0)))
    strips = x.strips(rows)
    split = np.minimum(np.floor(PLAN_BLOCKS * x.target.sms / strips), np.ceil(x.reach / PLAN_KEYS))
    return rows, step, 1.0, 4.0, np.maximum(split, 1.0)


def _of_fmha(x: Shape) -> Cut:
    """TensorRT-LLM's of many queries before sm_90 (fmha_v2/setup.py; fmhaRunner.cpp,
    setupLaunchParams): strips of 64 rows with few keys in registers, or tiled by 128 keys, which
    sm_86 and sm_89 take for wide heads alone; of 8 bits never."""
    small = is_small(x.target) or x.target.isa.startswith("sm_12")
    latent = x.head == np.asarray(x.work.extents["e"], float) + 64
    if x.work.dtype.bits < 16:
        whole = x.head <= 64
        return np.where(whole, 128.0, 64.0), np.where(whole, 128.0, 32.0), 1.0, 4.0, 1.0
    tiled = (x.keys > 64) & ((x.head >= 256) | (not small)) | latent
    rows = np.where(tiled & (x.head <= 64), 128.0, 64.0)
    few = np.select([x.head <= 32, x.head <= 128], [64.0, 32.0], 16.0)
    step = np.where(tiled, np.where(x.head <= 256, 128.0, 64.0), few)
    return rows, step, 1.0, 4.0, 1.0


def sums_parts(work: Work, tiles: Tiles, target: Target, xp: Any) -> Number:
    """Whether a call sums parts that its blocks wrote: 1 or 0. SGLang's of one query on a cache
    does, however many parts there are (decode_attention.py, decode_attention_fwd_normal)."""
    whole: Number = 0.0
    if work.kind == "triton" and not is_efficient(work, target):
        whole = ran(work, target, xp).single * xp.where(work.extents["d"] > 1, 1.0, 0.0)
    return xp.where(tiles.split > 1, 1.0, whole)


def is_narrow(work: Work, xp: Any) -> Number:
    """Whether the cache stores fewer bits than products take: 1 or 0."""
    wide = heads_of(work).head * work.dtype.bits / 8
    return xp.where(work.operands[1].cell_bytes < wide, 1.0, 0.0)


def is_unsplit(work: Work, target: Target) -> bool:
    """Whether TensorRT-LLM's kernels of one query on a narrow cache are those of sm_89, which are
    not split and slow: by their times on L40S, not by a source."""
    return work.kind == "trtllm" and target.isa == "sm_89"


def halves(work: Work, target: Target, xp: Any) -> Number:
    """Blocks that share out a strip's columns, and repeat its scores: TensorRT-LLM's tiled kernels
    before sm_90."""
    if work.kind != "trtllm" or has_clusters(target):
        return 1.0
    return xp.ceil(work.extents["e"] / BLOCK_COLUMNS)


def is_plain(work: Work, tiles: Tiles, kernel: RanKernel, xp: Any) -> Number:
    """Whether a kernel before sm_90 takes a step's keys and values before it goes on: FlashInfer's
    of many queries, TensorRT-LLM's that are not tiled. 1 or 0, by the tile it has."""
    if work.kind == "flashinfer":
        return 1 - kernel.single
    narrow = work.dtype.bits < 16
    few = xp.where(tiles.dims["d"] < 128.0, 1.0, 1.0 if narrow else 0.0)
    latent = xp.where(work.extents["e"] < heads_of(work).head, 1.0, 0.0)
    return few * (1 - kernel.whole) * (1 - latent)


def _of_triton(x: Shape) -> Cut:
    """SGLang's (extend_attention.py, prefill_attention.py for calls without a mask,
    decode_attention.py). Of one query up to 16 heads of queries share a block, and walks are split
    by as many blocks as SMs, more for long caches."""
    number = int(x.target.isa.removeprefix("sm_")[:3]) if x.target.isa.startswith("sm_") else 80
    if number >= 100:
        rows, step = np.where(x.head <= 256, 64.0, 16.0), 64.0
    elif number >= 90:
        rows, step = np.where(x.head <= 256, 128.0, 32.0), 64.0
    elif is_small(x.target):
        rows = np.select([x.head <= 256], [64.0], 32.0)
        step = np.select([x.head <= 128, x.head <= 256], [128.0, 64.0], 32.0)
    else:
        rows = np.select([x.head <= 128, x.head <= 256], [128.0, 64.0], 32.0)
        step = np.where(x.head <= 128, 128.0, 64.0)
    open_ = np.asarray(x.work.density) >= 1
    plain = 128.0 if number >= 90 else 64.0
    rows = np.where(open_ & ~x.single, plain, rows)
    step = np.where(open_ & ~x.single, plain, step)
    rows = np.where(x.single, TRITON_HEADS, rows)
    step = np.where(x.single, np.where(x.group < 2, 64.0, 32.0), step)
    warps = np.where(x.single | (x.head <= 64), 4.0, 8.0)
    busy = x.target.sms * np.maximum(np.log2(np.maximum(x.reach / 64.0, 2.0)), 1.0)
    split = np.minimum(np.ceil(busy / x.strips(rows)), TRITON_SPLITS)
    split = np.minimum(split, np.ceil(x.reach / TRITON_SPLIT))
    return rows, step, 1.0, warps, np.where(x.single, np.maximum(split, 1.0), 1.0)


def _of_unified(x: Shape) -> Cut:
    """vLLM's (triton_unified_attention.py): the heads that share keys a block, of one query or a
    few; walks of one query in 16 segments where sequences are few."""
    rows = np.where(x.group <= 16, 16.0, 2.0 ** np.ceil(np.log2(x.group)))
    step = np.where(x.single & (x.work.dtype.bits >= 16), 16.0, 32.0)
    split = np.minimum(SEGMENTS, np.ceil(x.reach / step))
    wanted = x.single & (x.heads <= SEGMENTED)
    return rows, step, 3.0, 4.0, np.where(wanted, split, 1.0)


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
    most = np.floor(XQA_WAVES * x.target.sms / key_heads(x.work))
    parts = np.minimum(np.minimum(parts, np.rint(np.sqrt(8 * parts))), most)
    own = np.where(x.reach < LANE_UNSPLIT, 1.0, np.ceil(x.reach / LANE_SPLIT))
    most = np.floor(LANE_WAVES * x.target.sms / (x.work.extents["b"] * x.work.extents["h"]))
    own = np.minimum(own, most)
    lane = (16.0, np.maximum(np.rint(LANE_STEP / x.head), 8.0), 1.0, 8.0, np.maximum(own, 1.0))
    narrow = is_narrow(x.work, np) > 0
    parts = np.where(narrow & is_unsplit(x.work, x.target), 1.0, parts)
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


def blocks_held(work: Work, tiles: Tiles, target: Target, registers: Number, xp: Any) -> Number:
    """Blocks that an SM holds by its shared memory (queries, `stages` of keys and values as the
    cache stores them) and its registers, of which a thread has `registers`."""
    heads, value = heads_of(work), work.extents["e"] / halves(work, target, xp)
    rows, step, threads = tiles.dims["s"], tiles.dims["d"], tiles.warps * target.sm.warp
    cell = work.operands[1].cell_bytes / heads.head
    smem = rows * heads.head * work.dtype.bits / 8
    smem = smem + tiles.stages * step * (heads.head + value) * cell
    sliced = 2 * ((rows + step) * SLICE_CELLS + SLICE_ROWS * value) * cell
    smem = xp.where(halves(work, target, xp) > 1, sliced, smem)
    return held(xp, target, threads, registers, smem)


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
