"""A kernel's loop nest cut by a tile, the blocks that an SM holds, and what targets can do.

Everything comes from the kernel's `Work`, once for all kernels. Formulas take one kernel and tile
or many (arrays for numbers), so that the search over tiles, the prediction of one and its
explanation are the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from gpuir.cost.data import of_isa
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.work import Staging, Work, product
from gpuir.ir.notes import BY_DIMENSION, BY_OPERAND, Tile
from gpuir.ir.types import DType, f32, tf32
from gpuir.targets.target import Target

BLOCK_SMEM_BYTES = 1024  # what the system takes of each block: CUDA C++ Programming Guide, sm_80 on
MOST_REGISTERS = 255  # of one thread: CUDA C++ Programming Guide, compute capability table
FULL_REGISTERS = 32.0  # of a thread at most, where an SM is to hold all the threads that it can
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

    def note(self, i: int) -> Tile:
        """The one at a place, as a note."""

        def whole(n: Number) -> int:
            return int(n if np.ndim(n) == 0 else n[i if len(n) > 1 else 0])

        plain = (whole(getattr(self, name)) for name in PLAIN)
        parts = (
            tuple((of, whole(n)) for of, n in getattr(self, part).items() if whole(n))
            for part in PARTS
        )
        return _note(tuple((d, whole(n)) for d, n in self.dims.items()), *plain, *parts)

    @staticmethod
    def joined(parts: Sequence[Tiles]) -> Tiles:
        """Those of several parts, one after another, which are all along the same dimensions."""
        if not parts:
            return Tiles({})
        each = (np.broadcast_arrays(*map(np.atleast_1d, part.numbers)) for part in parts)
        columns = map(np.concatenate, zip(*each, strict=True))
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


@lru_cache(maxsize=16384)
def _note(dims: tuple[tuple[str, int], ...], *options: Any) -> Tile:
    """A tile by its fields in order, checked once."""
    return Tile(dims, **dict(zip((*PLAIN, *PARTS), options, strict=True)))


@dataclass(frozen=True)
class TiledNest:
    """A work cut by tiles, whatever the target."""

    work: Work
    tiles: Tiles
    sizes: Mapping[str, Number]  # of a block, along each dimension
    counts: Mapping[str, Number]  # of tiles along each dimension
    blocks: Number
    steps: Number  # of one block over its share of the reduced dimensions
    step_points: Number  # of the nest that one block computes in a step, padding included


def cut(work: Work, tiles: Tiles, s: Sheet | None = None) -> TiledNest:
    """The nest of `work` cut by `tiles`."""
    s = s or Sheet()
    xp, extents = s.xp, work.extents
    sizes = {d: tiles.along(d, work, s) for d in extents}
    counts = {d: xp.ceil(xp.maximum(n, 1.0) / sizes[d]) for d, n in extents.items()}
    counts |= {d: s.put(f"blocks along {d}", counts[d]) for d in work.grid}
    grid = product(counts[d] for d in work.grid)
    blocks = s.put("blocks", grid * tiles.split, "", "tiles of the grid, times split")
    steps = xp.ceil(product(counts[d] for d in work.reduced) / tiles.split)
    steps = s.put("steps a block", steps)
    step_points = s.put("points a step", product(sizes.values()))
    return TiledNest(
        work, tiles, sizes, counts, blocks=blocks, steps=steps, step_points=step_points
    )


# ---------------------------------------------------------------------------- blocks on an SM


@dataclass(frozen=True)
class BlockShare:
    """What one block takes of an SM. `registers` are a thread's, None where a compiler spills what
    does not fit; `tensor_bytes` are of tensor memory, None where it keeps no sums there."""

    threads: Number
    smem_bytes: Number
    registers: Number | None = None
    tensor_bytes: Number | None = None


def library_block(nest: TiledNest, target: Target, s: Sheet | None = None) -> BlockShare:
    """A block of a library's kernel: operands of all stages, and sums in registers."""
    s = s or Sheet()
    work, tiles, sizes = nest.work, nest.tiles, nest.sizes
    threads = s.put("threads a block", tiles.warps * target.sm.warp)
    if work.is_contraction:
        stage, kept = (_bytes_in(s, work, sizes, staging) for staging in ("staged", "held"))
        smem = tiles.stages * stage + kept
        sums = product(sizes[d] for d in work.grid)
        if work.kernel == "k.attention":  # the scores of a step live beside the result
            sums = sums + sizes["s"] * sizes["d"]
        sums = sums * (work.accumulator_bits / 32)
    else:
        smem = 4.0 * tiles.warps if work.reduced else 0.0 * tiles.warps
        sums = product(sizes.values())
    smem = s.put("shared memory a block", smem, "bytes")
    if work.kernel == "k.attention" and target.isa.startswith("sm_10"):
        return BlockShare(threads, smem, tensor_bytes=4.0 * sums)
    registers = allocated(s.xp, sums / threads + OWN_REGISTERS)
    source = "allocated by eights; cost.nest.OWN_REGISTERS"
    return BlockShare(threads, smem, s.put("registers a thread", registers, "", source))


def allocated(xp: Any, registers: Number) -> Number:
    """Registers that a thread gets where it wants so many: they come by eights."""
    return xp.ceil(registers / 8) * 8


def most_registers(xp: Any, target: Target, threads: Number) -> Number:
    """Registers that a thread can have when one block has the whole file."""
    file = xp.floor(target.sm.registers / threads / 8) * 8
    return xp.minimum(MOST_REGISTERS + 0.0 * file, file)


def held(xp: Any, target: Target, threads: Number, registers: Number, smem_bytes: Number) -> Number:
    """Blocks that an SM holds at once, at least one: the least that blocks, threads, registers and
    shared memory allow. `threads` and `smem_bytes` are of a block, `registers` of a thread."""
    sm = target.sm
    resident = xp.minimum(float(sm.blocks), xp.floor(sm.threads / threads))
    resident = xp.minimum(resident, xp.floor(sm.registers / (registers * threads)))
    by_memory = xp.floor(sm.smem_bytes / (smem_bytes + BLOCK_SMEM_BYTES))
    return xp.maximum(xp.minimum(resident, by_memory), 1.0)


def residents(s: Sheet, nest: TiledNest, target: Target, block: BlockShare) -> Number:
    """Blocks that an SM holds at once of a library's kernel. How all of them fill the device is
    written down, for reports."""
    assert block.registers is not None
    computed = nest.step_points * nest.steps * nest.blocks
    used = s.xp.maximum(nest.work.points, 1.0) / computed
    s.put("padding: used share of the tiles", used)
    source = "the least that blocks, threads, registers and shared memory allow"
    resident = held(s.xp, target, block.threads, block.registers, block.smem_bytes)
    resident = s.put("blocks an SM holds", resident, "", source)
    s.put("waves", nest.blocks / (target.sms * resident))
    load = s.put("blocks of the busiest SM", s.xp.ceil(nest.blocks / target.sms))
    s.put("tail: used share of SM time", nest.blocks / (load * target.sms))
    return resident


def _bytes_in(s: Sheet, work: Work, sizes: Mapping[str, Number], staging: Staging) -> Number:
    """Bytes of one step's tiles of the operands staged so; of a wide head, the part in hand."""
    total: Number = 0.0
    for o in work.operands:
        if o.staging == staging:
            cell_bytes = s.xp.minimum(o.cell_bytes, WIDEST_HEAD_BYTES)
            total = total + cell_bytes * product(sizes[d] for d in o.dims)
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


# Of what GDDR6 without error codes gives, by the start of the memory's kind. A GB10 reads 223 to
# 237 of its 273 GB/s (llama.cpp's 8-bit weights, mlx's products of one row: ggml-org/llama.cpp,
# ml-explore/mlx pull 3137), and 218 were measured besides.
READ_SHARE = {"LPDDR": 0.94}
# The same of kernels that read and write: an RTX 5090 copies 1509 to 1529 of its 1792 GB/s, an RTX
# 4090 with GDDR6X 921 of 1008.
COPY_SHARE = {"LPDDR": 0.94, "GDDR7": 0.93}


def memory_share(target: Target, shares: Mapping[str, float]) -> float:
    """The one of `READ_SHARE` or `COPY_SHARE` that the target's memory has; 1 for others."""
    return next((n for kind, n in shares.items() if target.dram.kind.startswith(kind)), 1.0)


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
