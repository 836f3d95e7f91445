"""A kernel's loop nest cut by a tile: blocks, occupancy and waves; which tiles are legal.

Everything comes from the kernel's `Work`, once for all kernels. Formulas take one kernel and tile
or many (arrays for numbers), so that the search over tiles, the prediction of one and its
explanation are the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.work import Role, Work, work_of
from gpuir.ir.notes import Tile
from gpuir.ops import kernel as k
from gpuir.targets.target import Target

BLOCK_SMEM_BYTES = 1024  # what the system takes of each block: CUDA C++ Programming Guide, sm_80 on
OWN_REGISTERS = 32  # assumed: addresses, counters and fragments of one thread
MOST_REGISTERS = 255  # of one thread: CUDA C++ Programming Guide, compute capability table
TENSOR_MEMORY_BYTES = 128 * 512 * 4  # lanes, columns, bytes: PTX ISA, tcgen05 tensor memory
MOST_THREADS = 1024  # of one block: the same table
WIDEST_HEAD_BYTES = 512  # assumed: attention brings wider heads in by parts


@dataclass(frozen=True)
class Tiles:
    """One tile, or many in arrays. A dimension that `dims` leaves out is not cut."""

    dims: Mapping[str, Number]
    stages: Number = 1.0
    warps: Number = 4.0
    split: Number = 1.0

    @staticmethod
    def of(tile: Tile) -> Tiles:
        dims = {d: float(n) for d, n in tile.dims}
        return Tiles(dims, float(tile.stages), float(tile.warps), float(tile.split))

    def along(self, d: str, work: Work, s: Sheet) -> Number:
        """The tile's extent along a dimension."""
        return self.dims[d] if d in self.dims else s.xp.maximum(work.extents[d], 1.0)

    def take(self, which: Number) -> Tiles:
        """The tiles at these places, of many."""
        return self.each(lambda n: np.asarray(n)[which] if np.ndim(n) else n)

    def each(self, change: Callable[[Number], Number]) -> Tiles:
        """The tiles with every number changed."""
        dims = {d: change(n) for d, n in self.dims.items()}
        return Tiles(dims, change(self.stages), change(self.warps), change(self.split))


@dataclass(frozen=True)
class Nest:
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


def cut(work: Work, tiles: Tiles, target: Target, s: Sheet | None = None) -> Nest:
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
    return Nest(
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
    stage, held = (_bytes_in(s, work, sizes, role) for role in ("staged", "held"))
    accumulators = _product(sizes[d] for d in work.grid)
    if work.kernel == "k.attention":  # the scores of a step live beside the result
        accumulators = accumulators + sizes["s"] * sizes["d"]
    return stage, held, accumulators * (work.accumulator_bits / 32)


def _product(numbers: Iterable[Number]) -> Number:
    result: Number = 1.0
    for n in numbers:
        result = result * n
    return result


def _bytes_in(s: Sheet, work: Work, sizes: Mapping[str, Number], role: Role) -> Number:
    """Bytes of one step's tiles of the operands in that role; of a wide head, the part in hand."""
    total: Number = 0.0
    for o in work.operands:
        if o.role == role:
            cell_bytes = s.xp.minimum(o.cell_bytes, WIDEST_HEAD_BYTES)
            total = total + cell_bytes * _product(sizes[d] for d in o.dims)
    return total


def _passes(work: Work) -> int:
    """Passes over rows too long to hold: 2 when their cells are results too."""
    return 2 if any(o.role == "written" and "r" in o.dims for o in work.operands) else 1


# ---------------------------------------------------------------------------- legality


@dataclass(frozen=True)
class Need:
    """Something a tile asks of the target: legal while `wants` is at most `has`."""

    what: str
    wants: Number
    has: Number
    unit: str
    of_target: bool = True  # else of the kernel, or of tiles in general

    def broken(self, target: Target) -> str:
        """What a tile wants and may not have, or an empty text."""
        if self.wants <= self.has:
            return ""
        limit = f"{target.name} has" if self.of_target else "at most"
        return f"{self.what}: {float(self.wants):,.0f} {self.unit}, {limit} {float(self.has):,.0f}"


def needs(nest: Nest, target: Target) -> tuple[Need, ...]:
    """What the tiles of a nest ask of the target: of a CPU nothing, whose libraries block for its
    caches by themselves."""
    if target.is_cpu:
        return ()
    tiles, sizes, work, sm = nest.tiles, nest.sizes, nest.work, target.sm
    found = [
        Need("threads", nest.threads, float(min(MOST_THREADS, sm.threads)), "a block"),
        Need("shared memory", nest.smem_bytes, float(sm.smem_bytes_per_block), "bytes a block"),
    ]
    if work.kernel == "k.attention" and target.isa.startswith("sm_10"):
        summed = 4.0 * nest.accumulators
        found.append(Need("tensor memory", summed, float(TENSOR_MEMORY_BYTES), "bytes a block"))
    else:
        file = nest.registers * nest.threads
        found.append(Need("registers", nest.registers, float(MOST_REGISTERS), "a thread"))
        found.append(Need("register file", file, float(sm.registers), "a block"))

    def rule(what: str, wants: Number, has: Number, unit: str) -> None:
        found.append(Need(what, wants, has, unit, of_target=False))

    if not work.is_contraction:
        rule("stages of what has no operands to stage", tiles.stages, 1.0, "deep")
    elif copies_asynchronously(target):
        rule("stages", tiles.stages, 8.0, "deep")
    else:
        rule("stages without asynchronous copies", tiles.stages, 2.0, "deep")
    if runs_on_tensor(work, target):
        rows, cols = work.face
        rule(f"{rows} in steps of 16", sizes[rows] % 16, 0.0, "rows over")
        rule(f"{cols} in steps of 8", sizes[cols] % 8, 0.0, "columns over")
        if work.kernel != "k.attention":
            chunk = sizes["k"] * work.dtype.bits / 8 % 32
            rule("k in steps of 32 bytes", chunk, 0.0, "bytes over")
    for d in work.reduced:
        steps = np.ceil(np.maximum(work.extents[d], 1) / sizes[d])
        rule(f"split of the steps along {d}", tiles.split, steps, "blocks")
    if not (work.is_contraction or (work.kernel == "k.reduce" and _passes(work) == 1)):
        rule("split of what is no sum", tiles.split, 1.0, "blocks")
    return tuple(found)


def copies_asynchronously(target: Target) -> bool:
    """Copies from global to shared memory that bypass registers: sm_80 on (CUDA C++ Programming
    Guide, asynchronous data copies)."""
    digits = target.isa.removeprefix("sm_")
    return digits != target.isa and int("".join(c for c in digits if c.isdigit()) or 0) >= 80


def has_clusters(target: Target) -> bool:
    """Blocks that fetch for each other, and four warps to a matrix instruction: sm_90 and sm_100
    (CUDA C++ Programming Guide, thread block clusters; PTX ISA, wgmma and tcgen05)."""
    return target.isa.startswith(("sm_90", "sm_10"))


def instruction(target: Target) -> str:
    """The matrix instruction of a target (PTX ISA); those of other vendors are most like mma."""
    if not has_clusters(target):
        return "mma"
    return "wgmma" if target.isa.startswith("sm_90") else "tcgen05"


def runs_on_tensor(work: Work, target: Target) -> bool:
    """Whether the products run on the matrix units of `target`."""
    rule = target.peak_rule(work.pipe, work.dtype, tf32=work.tf32)
    return work.is_contraction and work.pipe == "tensor" and rule.startswith("tensor")


def why_illegal(op: k.KernelOp, tile: Tile, target: Target, tf32: bool = False) -> str:
    """Why `tile` cannot run on `target`, or an empty text: the dimension, unit or memory that does
    not fit, what it asks for and what there is."""
    work = work_of(op, tf32)
    extents = work.extents
    for d, n in tile.dims:
        if d not in extents:
            return f"no dimension {d}: {op.name} has {', '.join(extents)}"
        if n < 1:
            return f"{d}={n}: a tile has at least one cell along each dimension"
    if min(tile.stages, tile.warps, tile.split) < 1:
        return "stages, warps and split are at least 1"
    nest = cut(work, Tiles.of(tile), target)
    for need in needs(nest, target):
        if why := need.broken(target):
            return why
    return ""
