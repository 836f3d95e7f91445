"""What software computed a published run, as gpuir says it: how the program is written, how it is
loaded, laid out over ranks, and which kernels take other times than those of today's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuir.cost import sized
from gpuir.cost.reading import work_of
from gpuir.cost.tile import tile_cost
from gpuir.cost.work import Work
from gpuir.distributed import scaled
from gpuir.fit.score import kernel_s
from gpuir.ir.notes import Cost, Tile
from gpuir.ir.types import DType, bf16, f8e4m3
from gpuir.ops import kernel as k
from gpuir.simulate.parallel import Parallel
from gpuir.targets.target import Target
from validation.precisions import precision_of
from validation.programs import Form
from validation.runs import EXAMPLES, LLM_FOUNDRY, MEGATRON_LM, MEGATRON_ON_FOUR, Run

# Shares of the peak that attention reaches, and between what they lie; forward, then backward. The
# first FlashAttention: of an A100 (Dao, FlashAttention-2, arXiv 2307.08691, section 1); its
# products are `mma.sync`, of which an SM does 2048 operations a clock in 16 bits, on Hopper too
# (half of its `wgmma`). The second: of an H100 (Shah et al., arXiv 2407.08608, section 1: 35 %).
FLASH = {
    "first": ((0.4, 0.3, 0.5), (0.3, 0.25, 0.35)),
    "second": ((0.35, 0.3, 0.4), (0.35, 0.3, 0.4)),
}
SYNC_FLOPS = 2048.0
BEFORE_THIRD = ("NeMo container 24", "r0.8.0, July 2024")  # releases with the second

NARROW = ("fp8", "mxfp8")
BLOCKS = "mxfp8"  # its scales are those of blocks

# What llm-foundry's stack of 2023 takes beyond gpuir's times: kernels bound by memory, by
# architecture, so many times as long, and so much of the time of collectives that are hidden. Least
# squares on its runs of MPT-1B and MPT-7B; the others are scored and not fitted.
FOUNDRY_MEMORY = (("sm_80", 1.2), ("sm_90", 1.95))
FOUNDRY_FELT = 0.4
FOUNDRY_FITTED = ("mpt-1b", "mpt-7b")

# Experts in narrow floats. With scales of blocks DeepGEMM's, which on sm_100 are factors of the
# matrix units' own instruction, as those of mxfp8 are (DeepGEMM's README).
GROUPED = {"fp8": "cutlass f8", "mxfp8": "deepgemm f8 block"}

# Megatron Core: products and collectives of tensor ranks in pieces that run beside each other, and
# the distributed optimizer (its README; docs of NeMo, performance).
CORE = (
    *("NeMo / Megatron Core", "Megatron-Bridge / Megatron Core"),
    "Megatron-LM / Megatron Core",
)
PASS_TOKENS = 16384  # assumed, of a rank and pass, where a page does not print them
EXCHANGE = "tokens go to experts by all_to_all, a row for each, and nothing runs beside it"
ONE_BY_ONE = ("September 2020", "April 2021")  # before norms were cut along the sequence


@dataclass(frozen=True)
class Software:
    """How a run is built: the form of its program, options of `gpuir.load`, the profile, its
    layout, sequences a rank and pass, the kernels that differ, and what of all that its page does
    not say. `felt` is the share of hidden collectives' time that is felt all the same. `reentrant`
    checkpoints run a block whole again, its last product too, whose result nobody reads
    (Megatron-LM's CheckpointFunction; torch.utils.checkpoint stops before it)."""

    form: Form
    profile: str
    options: Mapping[str, Any]
    parallel: Parallel
    micro: int
    kernels: Kernels
    assumed: tuple[str, ...] = ()
    felt: float = 0.0
    reentrant: bool = False


@dataclass(frozen=True)
class Kernels:
    """A predictor: that of gpuir but for kernels that the run's software had others of.

    Attention is the `first` FlashAttention, on sequences whose padding is taken out before and put
    in behind, or on Hopper the `second` (`flash`). Products within layers are in `narrow` floats
    (`fp8`, `mxfp8`), and what they read is cast; `wide` are extents that tell products that are not
    narrow, of the vocabulary and of routers. Kernels that memory bounds take as many times as long
    as `memory` says of an architecture.
    """

    flash: str = ""
    narrow: str = ""
    wide: frozenset[int] = frozenset()
    memory: tuple[tuple[str, float], ...] = ()
    __name__ = "kernels"  # what errors call a predictor

    def __call__(self, op: k.KernelOp, tile: Tile | None, target: Target) -> Cost:
        if isinstance(op, k.Attention | k.AttentionGradient) and (
            self.flash == "first" or (self.flash and target.isa == "sm_90")
        ):
            return _flash(op, self.flash, target)
        match op:
            case k.Experts() | k.ExpertsGradient() if self.narrow:
                return _narrow_experts(op, self.narrow, target)
            case k.Gemm() if self.narrow and self.wide.isdisjoint(op.space().dims.values()):
                return _narrow(op, self.narrow, target)
            case k.Map() | k.Copy() | k.Reduce() | k.Gather() | k.Scatter() if self.memory:
                factor = dict(self.memory).get(target.isa, 1.0)
                return scaled(tile_cost(op, tile, target), factor)
            case _:
                return tile_cost(op, tile, target)


def _cost(time_s: float, low_s: float, high_s: float) -> Cost:
    return Cost(time_s, "compute", "run@1", (("compute", time_s),), interval=(low_s, high_s))


def _flash(op: k.Attention | k.AttentionGradient, which: str, target: Target) -> Cost:
    """The first has copies around it: queries, keys and values without their padding, the result
    with it, which is zeroed first; the same of gradients (flash_attn/bert_padding.py)."""
    first, backward = which == "first", isinstance(op, k.AttentionGradient)
    peak = target.peak("tensor", bf16)
    if first:
        peak = min(peak, SYNC_FLOPS * target.sms * target.clock_hz)
    share, least, most = FLASH[which][backward]
    times = tuple(op.flops() / peak / by for by in (share, most, least))
    if first:
        cells = float(op.operands[0].type.size)
        copied = _pointwise(cells * (4.0 + (3.0 if backward else 1.0) / 2), target)
        times = tuple(a + b for a, b in zip(times, copied, strict=True))
    return _cost(*times)


def _narrow(op: k.Gemm, narrow: str, target: Target) -> Cost:
    """A product in fp8, and the kernel that casts what it reads, as it lies and turned
    (Transformer Engine's cast_transpose). A gradient of weights reads what is cast already."""
    dims = op.space().dims
    m, n, depth = (np.full(1, float(dims[d] * (dims["b"] if d == "m" else 1))) for d in "mnk")
    product = sized.gemm(m, n, depth, f8e4m3, out=bf16)
    if narrow == BLOCKS:
        product = replace(product, kind="block scales")
    times = _times(product, target)
    if op.types()[0].rank > 2:
        cast_work = sized.pointwise(m * depth, (bf16,), (f8e4m3, f8e4m3), ops=4.0)
        times = tuple(a + b for a, b in zip(times, _times(cast_work, target), strict=True))
    return _cost(*times)


def _narrow_experts(op: k.Experts | k.ExpertsGradient, narrow: str, target: Target) -> Cost:
    """Experts in fp8: what their products read is cast by kernels that count to them."""
    work = work_of(op)
    x, weights, y = work.operands
    weights = replace(weights, cell_bytes=1.0, nbytes=weights.nbytes / weights.cell_bytes)
    work = replace(work, dtype=f8e4m3, operands=(x, weights, y), kind=GROUPED[narrow])
    return _cost(*_times(work, target))


def _pointwise(cells: float, target: Target, dtype: DType = bf16) -> tuple[float, ...]:
    """A kernel that reads and writes as many cells."""
    return _times(sized.pointwise(np.full(1, cells), (dtype,), (dtype,)), target)


def _times(work: Work, target: Target) -> tuple[float, ...]:
    """Seconds, and between what 80 % of measurements lie."""
    return tuple(float(x[0]) for x in kernel_s(work, target)[:3])


def software_of(run: Run) -> Software:
    """What ran."""
    import torch

    micro, assumed = _micro(run)
    full = {"checkpoint": "layers.*"} if run.recomputed.startswith("full") else {}
    parallel = _parallel(run, micro)
    narrow = run.dtype if run.dtype in NARROW else ""
    half = torch.float16 if run.dtype == "fp16" else torch.bfloat16  # beside narrow products too
    wide = frozenset({run.facts.vocab, run.facts.mixture.experts if run.facts.mixture else 0})
    if run.framework == LLM_FOUNDRY:
        # FSDP's mixed precision: weights in f32, gathered and read in 16 bits; PURE has all so.
        form = Form(
            half if run.is_pure else torch.float32, half, wide_loss=False, metrics=2, gelu="none"
        )
        # Composer's DecoupledAdamW goes tensor by tensor (decoupled_weight_decay.py).
        adamw = {"optimizer": "adamw", "foreach": False, "clip": 1.0}
        kernels = Kernels("first", narrow, wide, FOUNDRY_MEMORY)
        options = {**adamw, **full}
        return Software(
            form, "eager", options, parallel, micro, kernels, assumed, felt=FOUNDRY_FELT
        )
    fused = {"optimizer": "adamw", "fused": True, "clip": 1.0}
    if run.framework in (MEGATRON_LM, MEGATRON_ON_FOUR):
        in_f32 = run.framework == MEGATRON_ON_FOUR
        dtype = torch.float32 if in_f32 else half
        # Megatron's fused softmax, which masks too, is of 16 bits.
        form = Form(dtype, dtype, "scores", masked=in_f32, dropout=0.1)
        if in_f32 and run.pp == 1:
            # Gradients are added to buffers, which are summed over ranks when all are there
            # (megatron/core/distributed: main_grad; overlap_grad_reduce is off by default).
            fused["accumulate"] = True
        if run.recomputed.startswith("selective"):
            full = {"checkpoint": "layers.*.core"}
        return Software(
            *(form, "eager", {**fused, **full}, parallel, micro),
            *(Kernels(narrow=narrow, wide=wide), assumed),
            reentrant=run.recomputed.startswith("full"),
        )
    if run.framework == EXAMPLES:
        form = Form(torch.float32, torch.float32, "scores", dropout=0.1, gelu="none")
        autocast = precision_of(run.dtype).autocast
        amp = {"autocast": autocast} if autocast else {}
        return Software(form, "eager", {**fused, **amp}, parallel, micro, Kernels(), assumed)
    form = Form(half, half)
    flash = "second" if run.version.startswith(BEFORE_THIRD) else ""
    kernels = Kernels(flash, narrow, wide)
    assumed = ("no recomputation", *(EXCHANGE,) * (run.ep > 1), *assumed)
    return Software(form, "compiled", fused, parallel, micro, kernels, assumed)


def _micro(run: Run) -> tuple[int, tuple[str, ...]]:
    """Sequences a rank and pass."""
    if run.micro:
        return run.micro, ()
    most = min(max(PASS_TOKENS // run.seq, 1), run.batch // run.dp)
    fits = max(n for n in range(1, most + 1) if run.batch // run.dp % n == 0)
    return fits, (f"the micro batch is as many sequences as {PASS_TOKENS:,} tokens are",)


def is_fitted(run: Run) -> bool:
    """Whether constants of its software were fitted to a run."""
    return run.framework == LLM_FOUNDRY and run.model in FOUNDRY_FITTED


def _parallel(run: Run, micro: int) -> Parallel:
    """FSDP is stage 3: `SHARD_GRAD_OP` too, though it gathers weights once a pass and not twice.
    Megatron Core's distributed optimizer is stage 1. Ranks that share experts have tokens of their
    own, and count to the table's dp."""
    zero, dp = 0, run.dp // run.ep
    if dp > 1:
        zero = 3 if run.is_fsdp else 1 if run.framework in CORE else 0
    chunks = max(run.vp, 1) if run.pp > 1 else 1
    return Parallel(
        dp=dp,
        ep=run.ep,
        tp=run.tp,
        pp=run.pp,
        cp=run.cp,
        zero=zero,
        sequence=sequential(run),
        overlap=sequential(run) and run.framework in CORE,
        microbatches=run.batch // run.dp // micro,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )


def sequential(run: Run) -> bool:
    """Whether norms and residuals are cut along the sequence: since 2022 (arXiv 2205.05198)."""
    return run.tp > 1 and run.framework != MEGATRON_ON_FOUR and run.version not in ONE_BY_ONE
