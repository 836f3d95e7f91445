"""What could be done otherwise so that a model runs faster or for less: proposals, untried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import floor
from typing import Any, Literal, get_args

from gpuir.ir.graph import Graph, Level
from gpuir.ir.types import DType, bf16, f32
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.report.answer import Answer
from gpuir.targets.load import load_target, target_names
from gpuir.targets.profile import load_profile, on_same_host
from gpuir.targets.support import runs_on
from gpuir.targets.target import Target

ChangeKind = Literal[
    "batch",
    "precision",
    "weights",
    "padding",
    "attention",
    "stack",
    "layout",
    "optimizer",
    "recomputing",
    "gpu",
]
CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
ModelForm = Literal["config", "torch", "onnx", "text"]  # what a model is read from

DOUBLINGS = 3  # of the batch
WAVES = 3  # batches that fill a wave: those of so many kernels, the slowest
# Extents to make dimensions a multiple of: 8 cells of 16 bits are what a thread loads at once
# (cuBLAS documentation, Tensor Core usage), 64 the usual least side of a tile.
ALIGNED = (8, 64)


@dataclass(frozen=True)
class Setup:
    """All that a prediction hangs on: what the model leaves open (`options` of loading, sizes
    apart, in `dims`), `passes` on it as text, the GPU, the software stack, and whether f32 products
    run in TF32."""

    target: str
    profile: str | None = None
    tf32: bool | None = None
    passes: str = ""
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def with_dim(self, name: str, value: int) -> Setup:
        return replace(self, dims={**self.dims, name: value})

    def with_option(self, name: str, value: Any) -> Setup:
        return replace(self, options={**self.options, name: value})

    def with_pass(self, text: str) -> Setup:
        return replace(self, passes=f"{self.passes},{text}" if self.passes else text)

    @property
    def is_derived_here(self) -> bool:
        """Whether the backward pass is by gpuir's rules: torch's own, which its programs get by
        default, know no autocast, checkpoints or loss."""
        ours = any(self.options.get(name) for name in ("autocast", "checkpoint", "loss"))
        return bool(self.options.get("train")) and (ours or self.options.get("autodiff") == "gpuir")


@dataclass(frozen=True)
class ModelChange:
    """One thing to do otherwise: `what` it is, and what it `costs`, in words. Of changes of one
    kind with the same `aim`, one is advised."""

    kind: ChangeKind
    what: str
    costs: str
    apply: Callable[[Setup], Setup] = field(compare=False, repr=False)
    aim: str = ""


# ---------------------------------------------------------------------------- proposals


@dataclass(frozen=True, eq=False)
class Situation:
    """What the proposals go by: the setup, the model's graph, and the run as it is now."""

    setup: Setup
    graph: Graph
    now: Answer
    batch: str | None  # the dimension that is one
    source: ModelForm

    @property
    def target(self) -> Target:
        return load_target(str(self.now.graph.target))

    @property
    def trains(self) -> bool:
        return bool(self.setup.options.get("train"))

    def kernels(self) -> list[tuple[k.KernelOp, float, float]]:
        """Kernels, the slowest first: op, seconds, waves."""
        found = [
            (n.op, n.cost.time_s, n.cost.fact("waves") or 0.0)
            for n in self.now.graph.walk()
            if isinstance(n.op, k.KernelOp) and n.cost is not None and n.cost.time_s
        ]
        return sorted(found, key=lambda x: -x[1])


Proposal = Callable[[Situation], Iterable[ModelChange]]


def larger_batches(case: Situation) -> Iterator[ModelChange]:
    """Twice the batch, and so on."""
    if case.batch is None:
        return
    for i in range(1, DOUBLINGS + 1):
        yield _batch(case.batch, case.setup.dims[case.batch] << i, "more items")


def whole_waves(case: Situation) -> Iterator[ModelChange]:
    """Batches with which the blocks of a slow kernel fill its last wave."""
    if case.batch is None:
        return
    now = case.setup.dims[case.batch]
    sizes: dict[int, None] = {}
    for _, _, waves in case.kernels():
        for whole in (floor(waves), floor(waves) + 1):
            size = floor(now * whole / waves) if waves else 0
            if whole and now / 2 <= size <= 2 * now and size not in (0, now, 2 * now):
                sizes.setdefault(size)
        if len(sizes) >= WAVES:
            break
    for size in list(sizes)[:WAVES]:
        yield _batch(case.batch, size, "whole waves", "fills whole waves of a slow kernel; ")


def _batch(name: str, size: int, aim: str, why: str = "") -> ModelChange:
    costs = (
        f"{why}a run takes longer and needs more memory; {size:,} items must be waiting at a time"
    )
    return ModelChange(
        kind="batch",
        what=f"{name} {size:,}",
        costs=costs,
        apply=lambda s: s.with_dim(name, size),
        aim=aim,
    )


def fewer_bits(case: Situation) -> Iterator[ModelChange]:
    """bf16 where the GPU has units for it, else f16, in place of f32, or of bf16 without units."""
    rates = case.target.flops_per_s.tensor
    dtype = next((d for d in ("bf16", "f16") if d in rates), None)
    wide = _has_products(case, f32) or (_has_products(case, bf16) and "bf16" not in rates)
    if dtype is None or not wide:
        return
    if case.trains:
        scaled = ", and the loss is scaled" if dtype == "f16" else ""
        costs = f"mixed precision: weights stay in f32{scaled}; watch the loss"
        if case.setup.options.get("autocast") in (None, "bf16" if dtype == "f16" else None):
            yield ModelChange(
                "precision",
                f"autocast in {dtype}",
                costs,
                lambda s: s.with_option("autocast", dtype),
            )
        return
    costs = "check accuracy; half the memory for weights"
    if not _has_products(case, f32):
        costs = (
            "check accuracy, because f16 cannot hold numbers above 65,504; "
            "the GPU has no bf16 units"
        )
    what = f"numbers in {dtype}"
    if case.source == "config":
        yield ModelChange("precision", what, costs, lambda s: s.with_option("dtype", dtype))
    else:
        text = f"convert{{dtype={dtype}}}"
        yield ModelChange("precision", what, costs, lambda s: s.with_pass(text))


def tf32(case: Situation) -> Iterator[ModelChange]:
    """f32 products on the matrix units."""
    if "tf32" in case.target.flops_per_s.tensor and _has_products(case, f32):
        costs = "products keep 10 bits of mantissa; torch.set_float32_matmul_precision('high')"
        yield ModelChange("precision", "TF32", costs, lambda s: replace(s, tf32=True))


def _has_products(case: Situation, dtype: DType) -> bool:
    return any(op.contraction and op.compute_dtype == dtype for op, _, _ in case.kernels())


def packed_weights(case: Situation) -> Iterator[ModelChange]:
    """Weights in 8 bits, where products wait for memory."""
    if case.trains or case.graph.level != Level.graph:
        return
    waits = any(
        n.cost is not None and n.cost.bound == "memory" and isinstance(n.op, k.Gemm)
        for n in case.now.graph.walk()
    )
    if waits:
        costs = "check accuracy; needs kernels that convert weights as they read them"
        yield ModelChange("weights", "weights in 8 bits", costs, lambda s: s.with_pass("pack"))


def round_dimensions(case: Situation) -> Iterator[ModelChange]:
    """Dimensions of weights that no vector of a load divides, made longer."""
    if case.graph.level != Level.graph:
        return
    of_weights = {n for v in case.graph.params for n in v.type.shape}
    odd: dict[int, None] = {}
    for op, _, _ in case.kernels():
        if isinstance(op, k.Gemm):
            for name in ("n", "k"):
                extent = op.nest.dims[name]
                if extent % ALIGNED[0] and extent > ALIGNED[1] and extent in of_weights:
                    odd.setdefault(extent)
    for old in odd:
        for new in dict.fromkeys(-(-old // step) * step for step in ALIGNED):
            yield ModelChange(
                "padding",
                f"change {old:,} to {new:,} wherever a dimension has this size",
                f"the weights get {new - old} rows of zeros; ignore these rows in the output",
                _extended(old, new),
                aim=str(old),
            )


def _extended(old: int, new: int) -> Callable[[Setup], Setup]:
    return lambda s: s.with_pass(f"extend{{old={old},new={new}}}")


def fused_attention(case: Situation) -> Iterator[ModelChange]:
    """One kernel in place of products and a softmax."""
    spelt = any(isinstance(n.op, t.Softmax) for n in case.graph.walk())
    costs = "the scores stay out of memory; the kernel must support the attention mask"
    if case.source == "config" and case.setup.options.get("attention") == "eager":
        yield ModelChange(
            "attention", "fused attention", costs, lambda s: s.with_option("attention", "sdpa")
        )
    elif spelt and not case.trains and case.graph.level == Level.graph:
        text = 'canonicalize,recognize{forms="attention"}'
        yield ModelChange("attention", "fused attention", costs, lambda s: s.with_pass(text))


def other_stacks(case: Situation) -> Iterator[ModelChange]:
    """The same model under a profile that its own names."""
    for name in case.now.software.alternatives:
        profile = load_profile(name)
        if runs_on(profile, case.target):
            yield ModelChange("stack", f"the {name} profile", profile.effort, _under(name))


def _under(name: str) -> Callable[[Setup], Setup]:
    return lambda s: replace(s, profile=on_same_host(name, s.profile))


def channels_last(case: Situation) -> Iterator[ModelChange]:
    """Images as matrix units read them, in place of conversions in each call."""
    written = case.source in ("config", "torch") and not case.setup.options.get("channels_last")
    if written and any(isinstance(x, k.Conv) for x, *_ in case.kernels()):
        costs = "none: model.to(memory_format=torch.channels_last), and inputs too"
        yield ModelChange(
            "layout", "channels last", costs, lambda s: s.with_option("channels_last", True)
        )


def fused_optimizer(case: Situation) -> Iterator[ModelChange]:
    if case.setup.options.get("optimizer") and not case.setup.options.get("fused"):
        costs = "none: an option of torch.optim, fused=True"
        yield ModelChange(
            "optimizer", "a fused optimizer", costs, lambda s: s.with_option("fused", True)
        )


def no_recomputing(case: Situation) -> Iterator[ModelChange]:
    if case.setup.options.get("checkpoint"):
        costs = "activations stay in memory"
        what = "no activation checkpointing"

        def kept(s: Setup) -> Setup:  # by the same derivatives
            return s.with_option("checkpoint", None).with_option("autodiff", "gpuir")

        yield ModelChange("recomputing", what, costs, kept)


def other_gpus(case: Situation) -> Iterator[ModelChange]:
    for name in target_names():
        other = load_target(name)
        if name != case.target.name and not other.is_cpu and not case.target.is_cpu:
            yield ModelChange("gpu", name, f"another GPU: {other.title or name}", _on(name))


def _on(name: str) -> Callable[[Setup], Setup]:
    return lambda s: replace(s, target=name)


PROPOSALS: Mapping[ChangeKind, tuple[Proposal, ...]] = {
    "batch": (larger_batches, whole_waves),
    "precision": (fewer_bits, tf32),
    "weights": (packed_weights,),
    "padding": (round_dimensions,),
    "attention": (fused_attention,),
    "stack": (other_stacks,),
    "layout": (channels_last,),
    "optimizer": (fused_optimizer,),
    "recomputing": (no_recomputing,),
    "gpu": (other_gpus,),
}
