"""A kernel's loop nest cut by a tile: blocks, occupancy and waves.

Everything comes from the kernel's `Work`, once for all kernels. Formulas take one kernel and tile
or many (arrays for numbers), so that the search over tiles, the prediction of one and its
explanation are the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuir.cost.data import of_isa
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.work import Staging, Work
from gpuir.ir.notes import BY_DIMENSION, BY_OPERAND, Tile
from gpuir.ir.types import DType, f32, tf32
from gpuir.targets.target import Target

BLOCK_SMEM_BYTES = 1024  # what the system takes of each block: CUDA C++ Programming Guide, sm_80 on
OWN_REGISTERS = 32  # assumed: addresses, counters and fragments of one thread
PLAIN = ("stages", "warps", "split", "group", "unroll")  # options of a whole tile
PARTS = (*BY_DIMENSION, *BY_OPERAND)
IDLE_SHARE = 0.25  # assumed: of the board's power, for memory, fans and leakage
WIDEST_HEAD_BYTES = 512  # assumed: attention brings wider heads in by parts


@dataclass(frozen=True)
class Tiles:
    """One tile, or many in arrays. A dimension that `dims` leaves out is not cut.

    The rest is as in `ir.notes.Tile`.
    """

    dims: Mapping[str, Number]
    stages: Number = 1.0
    warps: Number = 4.0
    split: Number = 1.0
    group: Number = 1.0
    unroll: Number = 1.0
    threads: Mapping[str, Number] = field(default_factory=dict[str, Number])
    vector: Mapping[str, Number] = field(default_factory=dict[str, Number])
    strided: Mapping[str, Number] = field(default_factory=dict[str, Number])
    direct: Mapping[int, Number] = field(default_factory=dict[int, Number])
    fetch: Mapping[int, Number] = field(default_factory=dict[int, Number])
    pad: Mapping[int, Number] = field(default_factory=dict[int, Number])

    def __repr__(self) -> str:
        many = max((np.size(n) for n in (*self.dims.values(), self.stages, self.warps)), default=1)
        return f"<Tiles: {many:,}, along {', '.join(self.dims)}>"

    @staticmethod
    def of(tile: Tile, work: Work) -> Tiles:
        """The tile of a kernel, whole along what it does not cut."""
        whole = {d: max(float(n), 1.0) for d, n in work.extents.items()}
        given: dict[str, Any] = {name: float(getattr(tile, name)) for name in PLAIN}
        given |= {part: dict(getattr(tile, part)) for part in PARTS}
        return Tiles(whole | {d: float(n) for d, n in tile.dims}, **given)

    @staticmethod
    def joined(parts: Sequence[Tiles]) -> Tiles:
        """Those of several parts, one after another, which are all along the same dimensions."""
        if not parts:
            return Tiles({})
        numbers = zip(*(part.numbers for part in parts), strict=True)
        columns = (np.concatenate([np.atleast_1d(n) for n in column]) for column in numbers)
        return parts[0].each(lambda _: next(columns))

    @property
    def numbers(self) -> tuple[Number, ...]:
        """All numbers, in the order of the fields."""
        found: list[Number] = []
        self.each(found.append)
        return tuple(found)

    @property
    def likeness(self) -> tuple[Hashable, ...]:
        """All that is no number."""
        return tuple(self.dims), *(tuple(getattr(self, part)) for part in PARTS)

    def along(self, d: str, work: Work, s: Sheet) -> Number:
        """The tile's extent along a dimension."""
        return self.dims[d] if d in self.dims else s.xp.maximum(work.extents[d], 1.0)

    def take(self, which: Number) -> Tiles:
        """The tiles at these places, of many."""
        return self.each(lambda n: np.asarray(n)[which] if np.ndim(n) else n)

    def each(self, change: Callable[[Number], Number]) -> Tiles:
        """The tiles with every number changed, in the order of the fields."""
        dims = {d: change(n) for d, n in self.dims.items()}
        given: dict[str, Any] = {name: change(getattr(self, name)) for name in PLAIN}
        for part in PARTS:
            given[part] = {of: change(n) for of, n in getattr(self, part).items()}
        return Tiles(dims, **given)


@dataclass(frozen=True)
class TiledNest:
    """A work under tiles on a target."""

    work: Work
    tiles: Tiles
    sizes: Mapping[str, Number]  # the tile's extent along each dimension
    blocks: Number
    steps: Number  # of one block over its share of the reduced dimension
    step_points: Number  # of the nest that one block computes in a step, padding included
    smem_bytes: Number  # of one block
    threads: Number
    accumulators: Number  # of one block, in registers
    registers: Number  # of one thread
    limits: Mapping[str, Number]  # blocks an SM can hold, by what runs out
    resident: Number  # blocks an SM holds at once
    waves: Number  # blocks over what the device holds at once
    load: Number  # blocks the busiest SM runs
    tail: Number  # share of the SM time that is used when blocks do not divide evenly
    padding: Number  # nest points over points computed


def cut(work: Work, tiles: Tiles, target: Target, s: Sheet | None = None) -> TiledNest:
    """The nest of `work` cut by `tiles` on `target`."""
    s = s or Sheet()
    xp, sm, extents = s.xp, target.sm, work.extents
    sizes = {d: tiles.along(d, work, s) for d, _ in work.dims}
    grid = _product(
        s.put(f"blocks along {d}", xp.ceil(xp.maximum(extents[d], 1.0) / sizes[d]))
        for d in work.grid
    )
    blocks = s.put("blocks", grid * tiles.split, "", "tiles of the grid, times split")
    steps: Number = 1.0
    for d in work.reduced:
        steps = xp.ceil(xp.ceil(xp.maximum(extents[d], 1.0) / sizes[d]) / tiles.split)
    steps = s.put("steps a block", steps)
    step_points = s.put("points a step", _product(sizes.values()))
    points = xp.maximum(work.points, 1.0)
    padding = s.put("padding: used share of the tiles", points / (step_points * steps * blocks))

    threads = s.put("threads a block", tiles.warps * sm.warp)
    stage, held, accumulators = _on_chip(s, work, sizes)
    if work.is_contraction:
        smem = tiles.stages * stage + held
    else:
        smem = 4.0 * tiles.warps if work.reduced else 0.0 * tiles.warps
    smem = s.put("shared memory a block", smem, "bytes")
    registers = s.put(
        "registers a thread",
        xp.ceil((accumulators / threads + OWN_REGISTERS) / 8) * 8,
        "",
        "allocated by eights; cost.nest.OWN_REGISTERS",
    )
    limits = {
        "shared memory": xp.floor(sm.smem_bytes / (smem + BLOCK_SMEM_BYTES)),
        "registers": xp.floor(sm.registers / (registers * threads)),
        "threads": xp.floor(sm.threads / threads),
        "blocks": sm.blocks + 0.0 * threads,
    }
    resident: Number = limits["blocks"]
    for limit in (limits["threads"], limits["registers"], limits["shared memory"]):
        resident = xp.minimum(resident, limit)
    resident = s.put(
        "blocks an SM holds",
        xp.maximum(resident, 1.0),
        "",
        "the least that blocks, threads, registers and shared memory allow",
    )
    waves = s.put("waves", blocks / (target.sms * resident))
    load = s.put("blocks of the busiest SM", xp.ceil(blocks / target.sms))
    tail = s.put("tail: used share of SM time", blocks / (load * target.sms))
    return TiledNest(
        work=work,
        tiles=tiles,
        sizes=sizes,
        blocks=blocks,
        steps=steps,
        step_points=step_points,
        smem_bytes=smem,
        threads=threads,
        accumulators=accumulators,
        registers=registers,
        limits=limits,
        resident=resident,
        waves=waves,
        load=load,
        tail=tail,
        padding=padding,
    )


def _on_chip(s: Sheet, work: Work, sizes: Mapping[str, Number]) -> tuple[Number, Number, Number]:
    """Of one block: bytes of one step's tiles, bytes held throughout, accumulators in registers."""
    if not work.is_contraction:
        return 0.0, 0.0, _product(sizes.values())
    stage, held = (_bytes_in(s, work, sizes, staging) for staging in ("staged", "held"))
    accumulators = _product(sizes[d] for d in work.grid)
    if work.kernel == "k.attention":  # the scores of a step live beside the result
        accumulators = accumulators + sizes["s"] * sizes["d"]
    return stage, held, accumulators * (work.accumulator_bits / 32)


def _product(numbers: Iterable[Number]) -> Number:
    result: Number = 1.0
    for n in numbers:
        result = result * n
    return result


def _bytes_in(s: Sheet, work: Work, sizes: Mapping[str, Number], staging: Staging) -> Number:
    """Bytes of one step's tiles of the operands staged so; of a wide head, the part in hand."""
    total: Number = 0.0
    for o in work.operands:
        if o.staging == staging:
            cell_bytes = s.xp.minimum(o.cell_bytes, WIDEST_HEAD_BYTES)
            total = total + cell_bytes * _product(sizes[d] for d in o.dims)
    return total


# ---------------------------------------------------------------------------- what targets can do


def copies_asynchronously(target: Target) -> bool:
    """Copies from global to shared memory that bypass registers: sm_80 on (CUDA C++ Programming
    Guide, asynchronous data copies)."""
    digits = target.isa.removeprefix("sm_")
    return digits != target.isa and int("".join(c for c in digits if c.isdigit()) or 0) >= 80


def has_clusters(target: Target) -> bool:
    """Blocks that fetch for each other, and four warps to a matrix instruction: sm_90 and sm_100
    (CUDA C++ Programming Guide, thread block clusters; PTX ISA, wgmma and tcgen05)."""
    return target.isa.startswith(("sm_90", "sm_10"))


# Chips whose L2 is in two partitions, each with a copy of what its own SMs read: NVIDIA A100 and
# H100 whitepapers; B200 is two dies.
PARTITIONED = ("sm_80", "sm_90", "sm_10")
# Of bytes that come round again they hold more than half of the L2, as not all are read on both
# sides. Kernels that quantise find their operands up to 37 of H100's 52 MB, and up to all of the
# 101 MB of L40S (kernel tables quantize); products find a single weight up to 33 of H100's.
PARTITIONED_SHARE = 0.7


def is_partitioned(target: Target) -> bool:
    """Whether an SM reads a half of the L2 through the other."""
    return target.isa.startswith(PARTITIONED)


def kept_bytes(target: Target) -> float:
    """Bytes that the L2 has room for, of those that come round again."""
    return target.l2_bytes * (PARTITIONED_SHARE if is_partitioned(target) else 1.0)


def l2_drawn(target: Target) -> float:
    """Bytes a second that the L2 gives an SM where all draw."""
    return of_isa("l2_bytes", target.isa) * target.clock_hz


def board_watts(target: Target) -> float:
    """Watts that a board has for arithmetic; infinite without a power limit in the spec."""
    return math.inf if target.tdp_w is None else target.tdp_w * (1 - IDLE_SHARE)


def missed(xp: Any, nbytes: Number, room: Number, edge: Number) -> Number:
    """The share of what comes round again after `nbytes` that a cache no longer has: nothing up to
    its room, all from `edge` times as much more on."""
    return xp.minimum(1.0, xp.maximum(0.0, (nbytes / room - 1) / edge))


def is_halved(target: Target, dtype: DType) -> bool:
    """Whether a board's matrix units are held to a part of what those of its architecture do, in
    sums in f32: GeForce, L20, H20."""
    full = of_isa("matrix_flops", target.isa)
    return dtype.is_float and (target.sm.tensor_flops_per_clock or full) < full


def instruction(target: Target) -> str:
    """The matrix instruction of a target (PTX ISA); those of other vendors are most like mma."""
    if not has_clusters(target):
        return "mma"
    return "wgmma" if target.isa.startswith("sm_90") else "tcgen05"


def peak_of(work: Work, target: Target) -> float:
    """Flop/s that a kernel's products reach at most."""
    if takes_three(work, target):
        return target.peak(work.pipe, tf32) / 3
    return target.peak(work.pipe, work.rate_dtype)


def takes_three(work: Work, target: Target) -> bool:
    """Whether three products in TF32 make one in f32: fused attention does so on sm_80 and later
    (PyTorch, aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h:
    OpMultiplyAddFastF32, whatever torch.backends.cuda.matmul.allow_tf32 says)."""
    nvidia = target.isa.startswith("sm_") and "tf32" in target.flops_per_s.tensor
    return nvidia and work.kernel == "k.attention" and work.rate_dtype == f32


def runs_on_tensor(work: Work, target: Target) -> bool:
    """Whether the products run on the matrix units of `target`."""
    rule = target.peak_rule(work.pipe, work.rate_dtype)
    return work.is_contraction and work.pipe == "tensor" and rule.startswith("tensor")
