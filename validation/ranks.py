"""A step of a published run, predicted: what a rank computes, and what it waits for.

Compute is `validation.layers`, collectives are `gpuir.cost.collective`. What runs beside what:

- FSDP gathers the weights of the next layer while it computes one, in the forward pass and again in
  the backward pass, where gradients are scattered too; all of one node's collectives wait for each
  other. A layer takes the longer of the two. The ends are gathered first and scattered last, alone.
- Replicas (DDP, the distributed optimizer) add up gradients beside the last microbatch's backward
  pass, and gather weights beside the first one's forward pass; what does not fit waits.
- Tensor ranks exchange twice a layer and pass, with nothing beside them in the forward pass; in the
  backward pass beside weight gradients. Where products and collectives are cut in pieces that
  overlap (NeMo), the first piece alone waits.
- A pipeline's ranks take turns: its longest stage for each microbatch, and the rest of the pipeline
  once, over the chunks of an interleaved one (arXiv 2104.04473, section 2.2).
- A collective that runs beside kernels takes SMs from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuir.cost.collective import collective_time
from gpuir.ir.types import DType, bf16, f32
from gpuir.targets.cluster import Cluster, load_cluster
from gpuir.targets.load import load_target
from validation.layers import (
    BACKWARD,
    FORWARD,
    Seconds,
    Share,
    Stack,
    Times,
    copies,
    times,
)
from validation.runs import EXAMPLES, MEGATRON_ON_FOUR, Run

NCCL_SMS = 24  # assumed: channels of NCCL on NVLink systems, each a block on an SM of its own
# Megatron Core: products and collectives in pieces, weight gradients added up in f32, and the
# distributed optimizer (its README; docs of NeMo, performance).
CORE = (
    *("NeMo / Megatron Core", "Megatron-Bridge / Megatron Core"),
    "Megatron-LM / Megatron Core",
)
NETWORK = "the network between nodes"
PASS_TOKENS = 16384  # assumed, of a rank and pass, where a page does not print them
ONE_BY_ONE = ("September 2020", "April 2021")  # before collectives ran beside weight gradients
LLM_FOUNDRY = "llm-foundry / Composer / PyTorch FSDP"

# Bytes that an optimizer moves for each weight of a rank. Composer's DecoupledAdamW goes tensor by
# tensor: eight elementwise kernels of two or three f32 tensors each, and a norm and a scaling of
# gradients before (composer/optim/decoupled_weight_decay.py, _single-tensor_). Apex's FusedAdam
# reads gradient, weight and two states, and writes three and the weight in 16 bits; before it
# gradients are read for their norm and scaled (megatron/core/optimizer/clip_grads.py).
LOOPED_BYTES = 96
FUSED_BYTES = 30 + 12
ZEROED_BYTES = 4  # of all gradients a rank has, before the step (zero_grad_buffer)


@dataclass(frozen=True)
class Forecast:
    """A run, and what is predicted of it by part: seconds that add up; between what 80 % of
    measurements lie, as far as kernels can say; what was assumed."""

    run: Run
    parts: Mapping[str, float]
    interval: tuple[float, float]
    assumed: tuple[str, ...]

    @property
    def time_s(self) -> float:
        return sum(self.parts.values())

    @property
    def error(self) -> float:
        return 100 * (self.time_s / self.run.measured_s - 1)

    @property
    def is_stated(self) -> bool:
        """Whether its page says what software ran: all but the network between nodes."""
        return all(text.startswith(NETWORK) for text in self.assumed)

    @property
    def is_inside(self) -> bool:
        low, high = self.interval
        return low <= self.run.measured_s <= high


def forecasts(runs: Iterable[Run]) -> Iterator[Forecast]:
    for run in runs:
        yield forecast(run)


def cluster_of(run: Run) -> tuple[Cluster, tuple[str, ...]]:
    """The machines of a run, and what of them is assumed."""
    base = {"a100": "dgx-a100", "h100": "dgx-h100", "b200": "dgx-b200"}
    if run.gpus < run.node:
        return load_cluster(f"{run.gpus}x{run.target}"), ()
    name = base.get(run.target.partition("-")[0])
    if name is None or (run.gpus > run.node and run.gpus % run.node):
        return load_cluster(f"{run.gpus}x{run.target}"), ()
    nodes = -(-run.gpus // run.node)
    one = load_cluster(f"{nodes}x{name}" if nodes > 1 else name)
    silent = nodes > 1 and not run.network
    return one, (f"{NETWORK} is that of {name}",) * silent


def stack_of(run: Run) -> tuple[Stack, tuple[str, ...]]:
    """What computed a layer, and what of it is assumed."""
    if run.framework == LLM_FOUNDRY:
        return Stack("eager", run.dtype, "first", wide_loss=False, metrics=2), ()
    if run.framework in ("Megatron-LM", MEGATRON_ON_FOUR):
        return Stack("eager", run.dtype, "scores"), ()
    if run.framework == EXAMPLES:
        return Stack("eager", run.dtype, "scores"), ()
    return Stack("compiled", run.dtype), ("no recomputation",)


def micro_of(run: Run) -> tuple[int, tuple[str, ...]]:
    """Sequences a rank and pass."""
    if run.micro:
        return run.micro, ()
    most = min(max(PASS_TOKENS // run.seq, 1), run.batch // run.dp)
    fits = max(n for n in range(1, most + 1) if run.batch // run.dp % n == 0)
    return fits, (f"the micro batch is as many sequences as {PASS_TOKENS:,} tokens are",)


def forecast(run: Run) -> Forecast:
    stack, assumed = stack_of(run)
    cluster, more = cluster_of(run)
    micro, unsaid = micro_of(run)
    share = Share(micro, run.seq, run.tp, run.cp, sequential(run))
    found = times(run.facts, share, stack, run.target)
    step = _fsdp if run.is_fsdp else _replicas
    passes = run.batch // run.dp // micro
    parts, kernels = step(run, stack, found, cluster, passes)
    total = sum(parts.values())
    low, high = total - kernels.time_s + kernels.low_s, total - kernels.time_s + kernels.high_s
    return Forecast(run, parts, (low, high), (*assumed, *more, *unsaid))


def sequential(run: Run) -> bool:
    """Whether norms and residuals are cut along the sequence: since 2022 (arXiv 2205.05198)."""
    return run.tp > 1 and run.framework != MEGATRON_ON_FOUR and run.version not in ONE_BY_ONE


def recompute(run: Run, layer: Mapping[str, Seconds]) -> Seconds:
    """Of a layer; libraries run all of it again, its last product too (torch.utils.checkpoint with
    use_reentrant, Megatron's CheckpointFunction)."""
    return layer[FORWARD] if run.recomputed.startswith("full") else Seconds()


# ---- FSDP --------------------------------------------------------------------------------------


def _fsdp(
    run: Run, stack: Stack, found: Times, cluster: Cluster, passes: int
) -> tuple[dict[str, float], Seconds]:
    """`FULL_SHARD` gathers twice a pass, `SHARD_GRAD_OP` once. Before gradients are scattered they
    are joined, cast, and divided, each by a kernel (torch/distributed/fsdp/_runtime_utils.py,
    _post_backward_hook, _reduce_grad)."""
    facts, ranks = run.facts, run.dp
    wide = bf16 if run.is_pure else f32
    layer, ends = facts.layer_weights, facts.end_weights

    def takes(kind: str, cells: float, dtype: DType) -> float:
        size = (ranks,)
        return collective_time(kind, cells * dtype.bits / 8, dtype, size, (1,), cluster).time_s

    gather, scatter = takes("all_gather", layer, bf16), takes("reduce_scatter", layer, wide)
    again = gather if "SHARD_GRAD_OP" not in run.sharding else 0.0
    forward = found.layer[FORWARD]
    backward = found.layer[BACKWARD] + recompute(run, found.layer)
    sms = load_target(run.target).sms
    reduced = (copies(layer, run.target) + copies(layer, run.target, wide)) * facts.layers
    if wide != bf16:
        reduced += copies(layer, run.target, bf16, wide) * facts.layers
    kernels = (forward + backward) * facts.layers + found.ends[FORWARD] + found.ends[BACKWARD]
    parts = {
        "gradients": reduced.time_s * passes,
        "layers": (forward + backward).time_s * facts.layers * passes,
        "ends": (found.ends[FORWARD] + found.ends[BACKWARD]).time_s * passes,
        "exposed": 0.0,
        "slowed": 0.0,
    }
    for compute, sent in ((forward.time_s, gather), (backward.time_s, again + scatter)):
        slowed = min(compute, sent) * NCCL_SMS / sms
        parts["slowed"] += slowed * facts.layers * passes
        parts["exposed"] += max(0.0, sent - compute - slowed) * facts.layers * passes
    alone = takes("all_gather", ends, bf16) + takes("reduce_scatter", ends, wide) + gather
    parts["exposed"] += (alone + scatter) * passes
    parts["optimizer"] = optimizer_s(run, (layer * facts.layers + ends) / ranks, LOOPED_BYTES)
    return parts, kernels * passes


def optimizer_s(run: Run, cells: float, each: float) -> float:
    target = load_target(run.target)
    return cells * each / (target.dram.bytes_per_s * 0.9)


# ---- replicas ----------------------------------------------------------------------------------


def _replicas(
    run: Run, stack: Stack, found: Times, cluster: Cluster, passes: int
) -> tuple[dict[str, float], Seconds]:
    facts = run.facts
    chunk = facts.layers / run.pp
    forward, backward = found.layer[FORWARD], found.layer[BACKWARD] + recompute(run, found.layer)
    stage = (forward + backward) * chunk
    ends = found.ends[FORWARD] + found.ends[BACKWARD]
    parts = {"layers": stage.time_s * passes, "ends": ends.time_s * passes}
    exchanged = _exchanged(run, found, cluster) * chunk * passes
    parts["tensor"] = exchanged
    chunks = max(run.vp, 1)
    if run.pp > 1:
        parts["bubble"] = (stage.time_s + exchanged / passes) * (run.pp - 1) / chunks
    # Into gradients in f32: a product reads and writes them where it would write 16 bits, or, of
    # f32, a kernel adds what it has written (megatron/core/distributed, main_grad).
    more = 3 / 4 if run.framework in CORE else 3 / 2 if run.framework == MEGATRON_ON_FOUR else 0.0
    summed = copies(facts.layer_weights / run.tp, run.target, f32) * more
    parts["sums"] = summed.time_s * chunk * passes
    weights = facts.layer_weights * chunk / run.tp + facts.end_weights / run.tp / min(run.pp, 2)
    parts |= _gradients(run, weights, (forward * chunk).time_s, (backward * chunk).time_s, cluster)
    return parts, (stage + ends) * passes


def _exchanged(run: Run, found: Times, cluster: Cluster) -> float:
    """Seconds by layer that tensor ranks wait for each other."""
    if run.tp == 1:
        return 0.0
    micro, _ = micro_of(run)
    dtype = f32 if run.dtype == "fp32" else bf16
    nbytes = dtype.bits / 8 * micro * run.seq / run.cp * run.facts.hidden

    def takes(kind: str) -> float:
        return collective_time(kind, nbytes, dtype, (run.tp,), (1,), cluster).time_s

    if not sequential(run):
        again = 2 if run.recomputed.startswith("full") else 0
        beside = found.weights.time_s if run.version not in ONE_BY_ONE else 0.0
        one = takes("all_reduce")
        return (2 + again) * one + max(0.0, 2 * one - beside)
    one = takes("all_gather") + takes("reduce_scatter")
    if run.framework in CORE:
        return 4 * one / run.tp
    return 2 * one + max(0.0, 2 * one + 2 * takes("all_gather") - found.weights.time_s)


def _gradients(
    run: Run, weights: float, forward_s: float, backward_s: float, cluster: Cluster
) -> dict[str, float]:
    ranks, stride = run.dp * run.cp, run.tp
    parts: dict[str, float] = {}
    shared = run.framework in CORE  # the distributed optimizer
    if ranks > 1:
        sizes, strides = (ranks,), (stride,)
        wide = bf16 if run.version in ("September 2020",) else f32

        def takes(kind: str, dtype: DType) -> float:
            nbytes = weights * dtype.bits / 8
            return collective_time(kind, nbytes, dtype, sizes, strides, cluster).time_s

        if shared:
            scatter, gather = takes("reduce_scatter", wide), takes("all_gather", bf16)
            parts["gradients"] = max(0.0, scatter - backward_s) + max(0.0, gather - forward_s)
        else:
            parts["gradients"] = takes("all_reduce", wide)
    each = FUSED_BYTES - 2 * (run.dtype == "fp32")
    updated = optimizer_s(run, weights / (ranks if shared else 1), each)
    parts["optimizer"] = updated + optimizer_s(run, weights, ZEROED_BYTES)
    return parts
