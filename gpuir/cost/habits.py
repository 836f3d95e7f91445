"""Kernels of software that has other ones than those that gpuir's times are of, as its profile
says: early releases of FlashAttention, products in 8-bit floats, slower kernels of memory. Each is
stated by works, and costed with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from gpuir.cost import sized
from gpuir.cost.sheet import Number
from gpuir.cost.work import WeightBytes, Work
from gpuir.ir.graph import Graph, Value
from gpuir.ir.sizes import real
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
class Habit:
    """How long a kernel of a release takes: as its works, on each architecture so many times as
    long as `factors` say, 1 of those not named; of an `attention`, also what its flops take at the
    share of the peak that it reaches. On GPUs that are not of the architecture `isa`, if one is
    named, the release has the usual kernel."""

    factors: tuple[tuple[str, float], ...] = ()
    attention: str = ""
    is_backward: bool = False
    isa: str = ""

    def holds_on(self, target: Target) -> bool:
        return self.isa in ("", target.isa)

    def seconds(self, works: Number, flops: Number, target: Target) -> Number:
        """What kernels take, as expected, at least and at most (rows), each of so many `flops`:
        those of their `works` are the first axis."""
        total: Number = sum(works[1:], works[0]) if len(works) else 0.0
        if self.attention:
            peak = target.peak("tensor", bf16)
            if self.attention == "flash-1":
                peak = min(peak, SYNC_FLOPS * target.sms * target.clock_hz)
            share, least, most = REACHED[self.attention][self.is_backward]
            total = np.divide.outer(flops / peak, (share, most, least)).T + total
        return total * self.factor(target)

    def factor(self, target: Target) -> float:
        return dict(self.factors).get(target.isa, 1.0)


@dataclass(frozen=True)
class Instead:
    """A kernel of a release in place of the `usual` one, whose tile it has: `works` one after
    another, which may be the usual one, and, of attention, so many `flops`."""

    usual: Work
    habit: Habit
    works: tuple[Work, ...]
    flops: float = 0.0

    @property
    def weights(self) -> WeightBytes | None:
        return self.usual.weights


Kernel = Work | Instead


def usual(kernel: Kernel) -> Work:
    """The kernel that gpuir's times are of, whose tile it has."""
    return kernel.usual if isinstance(kernel, Instead) else kernel


@dataclass(frozen=True)
class Release:
    """The kernels of a release of software, but for those that gpuir's times are of.

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

    def kernel(self, op: k.KernelOp, work: Work) -> Kernel:
        """What the release runs for a kernel that does so much work."""
        match op:
            case k.Attention() | k.AttentionGradient() if self.attention:
                return _attention(op, work, self.attention)
            case k.Experts() | k.ExpertsGradient() if self.narrow:
                return Instead(work, Habit(), (_narrow_experts(work, self.narrow),))
            case k.Gemm() if self.narrow and self.wide.isdisjoint(op.space().dims.values()):
                return Instead(work, Habit(), tuple(_narrow(op, self.narrow)))
            case k.Map() | k.Copy() | k.Reduce() | k.Gather() | k.Scatter() if self.memory:
                return Instead(work, Habit(tuple(self.memory.items())), (work,))
            case _:
                return work


def release_of(profile: Profile, graph: Graph) -> Release | None:
    """The kernels of a graph under a profile, where those are not the usual ones. The graph is that
    of the whole model: none that is cut knows its vocabulary."""
    habits = profile.habits or Habits()
    if not (profile.products or habits.attention or habits.memory):
        return None
    wide = frozenset(_wide(graph)) if profile.products else frozenset[int]()
    return Release(habits.attention, habits.memory, profile.products, wide)


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


def _attention(op: k.Attention | k.AttentionGradient, work: Work, which: str) -> Instead:
    """The first has copies around it: queries, keys and values without their padding, the result
    with it, which is zeroed first; the same of gradients (flash_attn/bert_padding.py)."""
    backward = isinstance(op, k.AttentionGradient)
    works: tuple[Work, ...] = ()
    if which == "flash-1":
        cells = real(op.operands[0].type.size) * (4.0 + (3.0 if backward else 1.0) / 2)
        works = (sized.pointwise(cells, (bf16,), (bf16,)),)
    habit = Habit((), which, backward, isa="" if works else "sm_90")
    return Instead(work, habit, works, real(op.flops()))


def _narrow(op: k.Gemm, narrow: str) -> Iterator[Work]:
    """A product in fp8, and the kernel that casts what it reads, as it lies and turned
    (Transformer Engine's cast_transpose). A gradient of weights reads what is cast already."""
    dims = op.space().dims
    m, n, depth = real(dims["b"] * dims["m"]), real(dims["n"]), real(dims["k"])
    scales = "block" if narrow == BLOCKS else ""
    yield sized.gemm(m, n, depth, f8e4m3, out=bf16, scales=scales)
    if op.types()[0].rank > 2:
        yield sized.pointwise(m * depth, (bf16,), (f8e4m3, f8e4m3), ops=4.0)


def _narrow_experts(work: Work, narrow: str) -> Work:
    """Experts in fp8: what their products read is cast by kernels that count to them."""
    x, weights, y = work.operands
    weights = replace(weights, cell_bytes=1.0, nbytes=weights.nbytes / weights.cell_bytes)
    return replace(work, dtype=f8e4m3, operands=(x, weights, y), kind=GROUPED[narrow])
