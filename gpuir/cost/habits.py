"""Kernels of software that has other ones than those that gpuir's times are of, as its profile
says: early releases of FlashAttention, products in 8-bit floats, slower kernels of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpuir.cost import sized
from gpuir.cost.batch import tile_cost
from gpuir.cost.reading import work_of
from gpuir.cost.tile import predict
from gpuir.cost.work import Work
from gpuir.ir.graph import Graph, Value
from gpuir.ir.notes import Cost, Tile
from gpuir.ir.types import bf16, f8e4m3
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.targets.profile import Habits, Profile
from gpuir.targets.target import FrozenTable, Target

BY = "habits@1"

# Shares of the peak that attention reaches, and between what they lie; forward, then backward. The
# first FlashAttention: of an A100 (Dao, FlashAttention-2, arXiv 2307.08691, section 1); its
# products are `mma.sync`, of which an SM does 2048 operations a clock in 16 bits, on Hopper too
# (half of its `wgmma`). The second: of an H100 (Shah et al., arXiv 2407.08608, section 1: 35 %).
REACHED = {
    "flash-1": ((0.4, 0.3, 0.5), (0.3, 0.25, 0.35)),
    "flash-2": ((0.35, 0.3, 0.4), (0.35, 0.3, 0.4)),
}
SYNC_FLOPS = 2048.0

BLOCKS = "mxfp8"  # its scales are those of blocks
# Experts in narrow floats. With scales of blocks DeepGEMM's, which on sm_100 are factors of the
# matrix units' own instruction, as those of mxfp8 are (DeepGEMM's README).
GROUPED = {"fp8": "cutlass f8", "mxfp8": "deepgemm f8 block"}


@dataclass(frozen=True)
class Kernels:
    """The predictor `tile` but for kernels that the software has others of.

    `flash-1` is attention on sequences whose padding is taken out before and put in behind;
    `flash-2` differs from today's kernels on Hopper alone. Products are in `narrow` floats (`fp8`,
    `mxfp8`), and what they read is cast, but for those with one of the extents `wide`: of the
    vocabulary and of routers. Kernels without products take as many times as long as `memory` says
    of an architecture.
    """

    attention: str = ""
    memory: FrozenTable[float] = field(default_factory=lambda: FrozenTable[float]())
    narrow: str = ""
    wide: frozenset[int] = frozenset()
    known: dict[Any, Cost] = field(default_factory=dict[Any, Cost], compare=False, repr=False)
    __name__ = "habits"  # what errors call a predictor

    def __call__(self, op: k.KernelOp, tile: Tile | None, target: Target) -> Cost:
        """The cost of a kernel; of those that do the same, found once."""
        key = type(op), work_of(op), op.result_types[0].rank, tile, target
        if key not in self.known:
            self.known[key] = self.cost(op, tile, target)
        return self.known[key]

    def cost(self, op: k.KernelOp, tile: Tile | None, target: Target) -> Cost:
        if isinstance(op, k.Attention | k.AttentionGradient) and (
            self.attention == "flash-1" or (self.attention and target.isa == "sm_90")
        ):
            return _attention(op, self.attention, target)
        match op:
            case k.Experts() | k.ExpertsGradient() if self.narrow:
                return _narrow_experts(op, self.narrow, target)
            case k.Gemm() if self.narrow and self.wide.isdisjoint(op.space().dims.values()):
                return _narrow(op, self.narrow, target)
            case k.Map() | k.Copy() | k.Reduce() | k.Gather() | k.Scatter() if self.memory:
                found = tile_cost(op, tile, target).scaled(self.memory.get(target.isa, 1.0))
                return replace(found, by=BY)
            case _:
                return tile_cost(op, tile, target)


def predictor_of(profile: Profile, graph: Graph) -> Kernels | None:
    """What costs a graph's kernels under a profile, where that is not the predictor `tile`. The
    graph is that of the whole model: none that is cut knows its vocabulary."""
    habits = profile.habits or Habits()
    if not (profile.products or habits.attention or habits.memory):
        return None
    wide = frozenset(_wide(graph)) if profile.products else frozenset[int]()
    return Kernels(habits.attention, habits.memory, profile.products, wide)


def _wide(graph: Graph) -> Iterator[int]:
    """How many rows the tables have that words are looked up in, and experts a router chooses
    from."""
    params, inputs, made = set(graph.params), set(graph.inputs), graph.producers()

    def source(v: Value) -> Value:
        """What a value is, before it is cast, cut or turned."""
        while v in made and len(made[v].op.operands) == 1:
            (v,) = made[v].op.operands
        return v

    for n in graph.walk():
        match n.op:
            case t.Gather() | k.Gather():
                read = {source(v) for v in n.op.operands}
                yield from (v.type.shape[0] for v in read & params if read & inputs)
            case t.Experts(up=up):
                yield up.type.shape[0]
            case k.Experts():
                yield n.op.experts.up.type.shape[0]
            case _:
                pass


def _cost(time_s: float, low_s: float, high_s: float) -> Cost:
    return Cost(time_s, "compute", BY, (("compute", time_s),), interval=(low_s, high_s))


def _attention(op: k.Attention | k.AttentionGradient, which: str, target: Target) -> Cost:
    """The first has copies around it: queries, keys and values without their padding, the result
    with it, which is zeroed first; the same of gradients (flash_attn/bert_padding.py)."""
    first, backward = which == "flash-1", isinstance(op, k.AttentionGradient)
    peak = target.peak("tensor", bf16)
    if first:
        peak = min(peak, SYNC_FLOPS * target.sms * target.clock_hz)
    share, least, most = REACHED[which][backward]
    times = tuple(op.flops() / peak / by for by in (share, most, least))
    if first:
        cells = float(op.operands[0].type.size) * (4.0 + (3.0 if backward else 1.0) / 2)
        copied = _times(sized.pointwise(np.full(1, cells), (bf16,), (bf16,)), target)
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


def _times(work: Work, target: Target) -> tuple[float, ...]:
    """Seconds, and between what 80 % of measurements lie."""
    found = predict(work, target)
    return tuple(float(x[0]) for x in (found.time_s, found.low_s, found.high_s))
