"""A kernel's loop nest cut by a tile: blocks, traffic, occupancy and waves.

Everything comes from the kernel's `Space`, once for all kernels. Formulas take one tile or many at
once (`Tiles`, with numpy arrays for the numbers), so that the search over tiles, the prediction of
one and its explanation are the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np

from gpuir.ir.graph import Access, Graph, Space
from gpuir.ir.notes import Tile
from gpuir.ir.types import DType
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.scalar import SCALARS
from gpuir.targets.target import Pipe, Target

Number = Any  # a float, or a numpy array with one entry a tile

# How an operand reaches the arithmetic: `staged` through shared memory step by step, `held` there
# for the whole block, `streamed` straight to registers, or `written`.
Role = Literal["staged", "held", "streamed", "written"]

SECTOR_BYTES = 32  # the least a cache fetches: CUDA C++ Best Practices Guide, coalesced access
BLOCK_SMEM_BYTES = 1024  # what the system takes of each block: CUDA C++ Programming Guide, sm_80 on
OWN_REGISTERS = 32  # assumed: addresses, counters and fragments of one thread
MOST_REGISTERS = 255  # of one thread: CUDA C++ Programming Guide, compute capability table
MOST_THREADS = 1024  # of one block: the same table
WIDEST_HEAD_BYTES = 512  # assumed: attention brings wider heads in by parts
CLUSTER_READS = 0.75  # assumed: blocks in pairs, one operand of two read once for both
L2_SHARE = 0.6  # assumed: of the L2, what data read again can count on

# Instructions a scalar function costs on the lanes, where that is not its count of flops. Assumed
# from the usual implementations: division and roots by a special-function unit at a quarter rate
# and a step or two of refinement, the rest as polynomials with range reduction.
LANE_OPS: dict[str, float] = {
    **dict.fromkeys(("div", "reciprocal", "sqrt", "rsqrt"), 8.0),
    **dict.fromkeys(("exp", "log", "sin", "cos"), 8.0),
    **dict.fromkeys(("expm1", "log1p", "erf", "sinh", "cosh", "tan", "tanh"), 20.0),
    **dict.fromkeys(("asin", "acos", "atan", "asinh", "acosh", "atanh"), 24.0),
    **dict.fromkeys(("sigmoid", "silu", "softplus", "elu", "mish"), 18.0),
    **dict.fromkeys(("gelu", "gelu_tanh"), 26.0),
    **dict.fromkeys(("mod", "fmod"), 16.0),
    "pow": 40.0,
}
SOFTMAX_LANE_OPS = 14.0  # a cell: maximum, subtraction, exponential, sum, division


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand in the nest: the dimensions that index it, and the bytes behind one index.

    It has no name, so that kernels that differ in names alone have equal works.
    """

    dims: tuple[str, ...]
    cell_bytes: float
    nbytes: float  # what has to move at least: each cell that the nest visits, once
    role: Role


@dataclass(frozen=True)
class Work:
    """What a kernel does, whatever its tile and target. Equal works cost the same."""

    kernel: str
    dims: tuple[tuple[str, int], ...]
    reduced: tuple[str, ...]
    operands: tuple[Operand, ...]
    flops: int  # as the kernel counts them
    products: int  # flops of the contraction, of the operands' dtype
    lane_ops: float  # instructions on the vector lanes besides
    dtype: DType
    pipe: Pipe
    accumulator_bits: int = 32
    visible: float = 1.0  # the share of the nest that runs: causal attention skips the rest

    @cached_property
    def extents(self) -> dict[str, int]:
        return dict(self.dims)

    @property
    def points(self) -> int:
        return prod(self.extents.values())

    @property
    def grid(self) -> tuple[str, ...]:
        """The dimensions that blocks divide among them."""
        return tuple(d for d, _ in self.dims if d not in self.reduced)

    @property
    def nbytes(self) -> float:
        """Each operand moved once."""
        return sum(o.nbytes for o in self.operands)

    @property
    def output_points(self) -> int:
        return prod(self.extents[d] for d in self.grid)

    @property
    def face(self) -> tuple[str, str]:
        """The two dimensions whose products meet: rows and columns of a contraction's tile."""
        return ("s", "d") if self.kernel == "k.attention" else ("m", "n")

    @property
    def is_contraction(self) -> bool:
        return self.kernel in ("k.gemm", "k.conv", "k.attention")


@dataclass(frozen=True)
class Tiles:
    """One tile, or many in arrays of one length."""

    dims: Mapping[str, Number]
    stages: Number
    warps: Number
    split: Number

    @staticmethod
    def of(tile: Tile, work: Work) -> Tiles:
        cut = dict(tile.dims)
        dims = {d: float(cut.get(d, max(n, 1))) for d, n in work.dims}
        return Tiles(dims, float(tile.stages), float(tile.warps), float(tile.split))


@dataclass(frozen=True)
class Nest:
    """A work under a tile on a target. Numbers are floats, or arrays over many tiles."""

    work: Work
    tiles: Tiles
    counts: Mapping[str, Number]  # blocks along each dimension of the grid
    blocks: Number
    steps: Number  # of one block over its share of the reduced dimension
    step_points: Number  # of the nest that one block computes in a step, padding included
    stage_bytes: Number
    held_bytes: Number
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
    reads_again: tuple[Number, ...]  # times each operand comes from DRAM
    l2_each: tuple[Number, ...]  # bytes of each operand through the L2
    split_bytes: Number  # partial sums written and read back
    split_dram_bytes: Number  # what of them the L2 does not hold
    dram_bytes: Number
    l2_bytes: Number


# ---------------------------------------------------------------------------- from kernel to work


def work_of(op: k.KernelOp, tf32: bool = False) -> Work:
    """The work of a kernel, computed once: an op never changes. `tf32` lets f32 products run on the
    matrix units."""
    known: dict[bool, Work] = op.__dict__.setdefault("_works", {})
    if tf32 not in known:
        known[tf32] = _work(op, tf32)
    return known[tf32]


def _work(op: k.KernelOp, tf32: bool) -> Work:
    space = op.nest
    match op:
        case k.Gemm() | k.Conv() | k.Attention():
            return _contraction(op, space, tf32)
        case k.Gather() | k.Scatter():
            operands = _indexed(op, space)
        case k.Opaque():
            operands = tuple(
                Operand(a.dims, a.type.dtype.bits / 8, a.type.nbytes, role)
                for a, role in _accesses(space)
            )
        case _:
            operands = tuple(_operand(a, space, role) for a, role in _accesses(space))
    body = op.body if isinstance(op, k.BodyKernel) else None
    return Work(
        kernel=op.name,
        dims=tuple(space.dims.items()),
        reduced=space.reduced,
        operands=operands,
        flops=op.flops(),
        products=0,
        lane_ops=_lane_ops(body) + 4 * max((_cells(a) for a in space.writes), default=0),
        dtype=op.compute_dtype,
        pipe="vector",
    )


def _accesses(space: Space) -> list[tuple[Access, Role]]:
    reads: list[tuple[Access, Role]] = [(a, "streamed") for a in space.reads]
    return [*reads, *((a, "written") for a in space.writes)]


def operand_names(op: k.KernelOp) -> tuple[str, ...]:
    """What to call each of a work's operands: the kernel's values, then its results."""
    reads = op.operands
    if isinstance(op, k.Gemm):
        reads = (op.a, op.b, *op.weights, *op.extra)
    elif isinstance(op, k.Conv):
        reads = (op.x, op.w, *op.weights, *op.extra)
    writes = len(op.nest.writes)
    results = ["result"] if writes == 1 else [f"result {i}" for i in range(writes)]
    return (*(f"%{v.name}" for v in reads), *results)


def _cells(a: Access) -> int:
    return a.type.size


def _operand(a: Access, space: Space, role: Role, inner: int = 1, taps: int = 1) -> Operand:
    """`inner` cells lie behind one index; a nest of fewer points than cells reads only those, one
    of none reads nothing."""
    cell_bytes = inner * a.type.dtype.bits / 8
    if not space.points and role != "written":
        return Operand(a.dims, cell_bytes, 0.0, role)
    visited = cell_bytes * prod(space.dims[d] for d in a.dims) * taps
    return Operand(a.dims, cell_bytes, min(a.type.nbytes, visited), role)


def _indexed(op: k.Gather | k.Scatter, space: Space) -> tuple[Operand, ...]:
    """A gather reads as many cells of its table as it gives, whole sectors; a scatter touches as
    many cells of its tensor as it is given, in place: reads them only to combine."""
    table: dict[str, float] = {}  # body input → bytes read
    touched: dict[int, float] = {}  # result → bytes written
    for node in op.body.nodes:
        match node.op:
            case t.Gather(x=x, axis=axis):
                row = prod(x.type.shape[axis + 1 :]) * x.type.dtype.bits / 8
                size = node.results[0].type.nbytes
                waste = max(1.0, SECTOR_BYTES / row) if row else 1.0
                table[x.name] = min(x.type.nbytes, size * waste)
            case t.GatherElements(x=x) | t.GatherND(x=x):
                table[x.name] = min(x.type.nbytes, node.results[0].type.nbytes)
            case t.Resize(x=x) as resize:
                table[x.name] = min(x.type.nbytes, resize.taps * node.results[0].type.nbytes)
            case (
                t.ScatterElements(x=x, updates=u, combine=c)
                | t.ScatterND(x=x, updates=u, combine=c)
            ):
                table[x.name] = 0.0 if c == "none" else float(u.type.nbytes)
                for i, v in enumerate(op.body.outputs):
                    if v == node.results[0]:
                        touched[i] = float(u.type.nbytes)
            case _:
                pass
    inputs = [v.name for v in op.body.inputs]
    found: list[Operand] = []
    for i, (a, role) in enumerate(_accesses(space)):
        operand = _operand(a, space, role)
        nbytes = operand.nbytes
        if role == "written":
            nbytes = touched.get(i - len(space.reads), nbytes)
        elif i < len(inputs):
            nbytes = table.get(inputs[i], nbytes)
        found.append(Operand(a.dims, operand.cell_bytes, nbytes, role))
    return tuple(found)


def _contraction(op: k.Gemm | k.Conv | k.Attention, space: Space, tf32: bool) -> Work:
    operands: list[Operand] = []
    for i, (a, role) in enumerate(_accesses(space)):
        inner = 1
        if isinstance(op, k.Attention) and i < 2:
            inner = a.type.shape[-1]  # the head's own extent is no dimension of q and k
            role = "held" if i == 0 else role
        if role == "streamed" and set(a.dims) & set(space.reduced):
            role = "staged"
        operands.append(_operand(a, space, role, inner))
    extra = _lane_ops(op.epilogue)
    visible, narrow, accumulator_bits = 1.0, False, 32
    if isinstance(op, k.Attention):
        scores = prod(op.q.type.shape[:-1]) * op.k.type.shape[-2]
        visible = visible_share(op)
        products = 2 * scores * (op.q.type.shape[-1] + op.v.type.shape[-1])
        extra += SOFTMAX_LANE_OPS * scores * visible
        if op.softcap:
            extra += LANE_OPS["tanh"] * scores * visible
    else:
        products = 2 * space.points
        extra += _lane_ops(op.prologue)
        accumulator_bits = op.acc.bits
        # A matrix of one row or column, and a convolution with a few channels a group, do not fill
        # a matrix instruction: libraries run them on the lanes.
        narrow = min(space.dims["m"], space.dims["n"]) == 1 or (
            isinstance(op, k.Conv) and min(space.dims["n"], space.dims["k"]) < 8
        )
    return Work(
        kernel=op.name,
        dims=tuple(space.dims.items()),
        reduced=space.reduced,
        operands=tuple(operands),
        flops=op.flops(),
        products=products,
        lane_ops=extra,
        dtype=op.compute_dtype,
        pipe="vector" if narrow else "tensor",
        accumulator_bits=accumulator_bits,
        visible=visible,
    )


def visible_share(op: k.Attention) -> float:
    """The share of scores that a causal mask and a window leave: the sum over queries i of the
    keys from i + offset - window to i + offset, of all."""
    s, d = op.q.type.shape[-2], op.k.type.shape[-2]
    if not (op.causal or op.window is not None) or s * d == 0:
        return 1.0
    last = np.minimum(np.arange(s) + op.offset, d - 1) if op.causal else np.full(s, d - 1)
    first = 0 if op.window is None else np.maximum(np.arange(s) + op.offset - op.window, 0)
    return float(np.clip(last - first + 1, 0, d).sum() / (s * d))


def _lane_ops(body: Graph | None) -> float:
    """Instructions of a pointwise or reducing body, as the lanes run them."""
    total = 0.0
    for node in body.nodes if body else ():
        match node.op:
            case t.Map(fn=fn):
                total += LANE_OPS.get(fn, SCALARS[fn].flops) * node.results[0].type.size
            case t.Cast() | t.Bitcast():
                total += node.results[0].type.size
            case t.Softmax(x=x):
                total += SOFTMAX_LANE_OPS * x.type.size
            case op:
                total += op.flops()
    return total


# ---------------------------------------------------------------------------- under a tile


def cut(work: Work, tiles: Tiles, target: Target) -> Nest:
    """The nest of `work` cut by `tiles` on `target`."""
    sm, extents = target.sm, work.extents
    counts = {d: np.ceil(np.maximum(extents[d], 1) / tiles.dims[d]) for d in work.grid}
    tile_blocks = _product(counts.values())
    blocks = tile_blocks * tiles.split
    steps: Number = 1.0
    for d in work.reduced:
        steps = np.ceil(np.ceil(np.maximum(extents[d], 1) / tiles.dims[d]) / tiles.split)
    step_points = _product(tiles.dims.values())
    points = max(work.points, 1)
    padding = points / (step_points * steps * blocks)

    stage, held = (
        _product_sum(work, tiles, role) if work.is_contraction else 0.0
        for role in ("staged", "held")
    )
    threads = tiles.warps * sm.warp
    accumulators = _product(tiles.dims[d] for d in work.grid)
    if work.is_contraction:
        if work.kernel == "k.attention":  # the scores of a step live beside the result
            accumulators = accumulators + tiles.dims["s"] * tiles.dims["d"]
        smem = tiles.stages * stage + held
        accumulators = accumulators * (work.accumulator_bits / 32)
    else:
        smem = 4.0 * tiles.warps if work.reduced else 0.0 * tiles.warps
        accumulators = step_points
    registers = np.ceil((accumulators / threads + OWN_REGISTERS) / 8) * 8  # allocated by eights
    limits = {
        "shared memory": np.floor(sm.smem_bytes / (smem + BLOCK_SMEM_BYTES)),
        "registers": np.floor(sm.registers / (registers * threads)),
        "threads": np.floor(sm.threads / threads),
        "blocks": np.floor(sm.blocks + 0.0 * threads),
    }
    resident = limits["blocks"]
    for limit in limits.values():
        resident = np.minimum(resident, limit)
    resident = np.maximum(resident, 1.0)
    load = np.ceil(blocks / target.sms)
    waves = blocks / (target.sms * resident)
    tail = blocks / (load * target.sms)

    again = _reads_again(work, tiles, counts, np.minimum(blocks, target.sms * resident), target)
    shared = CLUSTER_READS if has_clusters(target) else 1.0
    l2: list[Number] = []
    for o, repeats in zip(work.operands, again, strict=True):
        if o.role in ("written", "streamed"):
            l2.append(o.nbytes * repeats)
        else:
            visited = o.cell_bytes * prod(extents[d] for d in o.dims)
            others = _product(counts[d] for d in work.grid if d not in o.dims)
            l2.append(visited * others * work.visible * shared)
    partial = np.where(tiles.split > 1, 2.0 * tiles.split * 4.0 * work.output_points, 0.0)
    spilt = np.maximum(partial - L2_SHARE * target.l2_bytes, 0.0)
    dram = sum((o.nbytes * n for o, n in zip(work.operands, again, strict=True)), 0.0)
    return Nest(
        work=work,
        tiles=tiles,
        counts=counts,
        blocks=blocks,
        steps=steps,
        step_points=step_points,
        stage_bytes=stage,
        held_bytes=held,
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
        reads_again=tuple(again),
        l2_each=tuple(l2),
        split_bytes=partial,
        split_dram_bytes=spilt,
        dram_bytes=dram + spilt,
        l2_bytes=sum(l2, 0.0) + partial,
    )


def _product(numbers: Any) -> Number:
    result: Number = 1.0
    for n in numbers:
        result = result * n
    return result


def _product_sum(work: Work, tiles: Tiles, role: Role) -> Number:
    """Bytes of one step's tiles of the operands in that role; of a wide head, the part in hand."""
    total: Number = 0.0
    for o in work.operands:
        if o.role == role:
            cell_bytes = min(o.cell_bytes, WIDEST_HEAD_BYTES)
            total = total + cell_bytes * _product(tiles.dims[d] for d in o.dims)
    return total


def _passes(work: Work) -> int:
    """Passes over rows too long to hold: 2 when their cells are results too."""
    return 2 if any(o.role == "written" and "r" in o.dims for o in work.operands) else 1


def _reads_again(
    work: Work, tiles: Tiles, counts: Mapping[str, Number], wave: Number, target: Target
) -> list[Number]:
    """How often each operand comes from DRAM.

    Blocks of one wave run beside each other and share, through the L2, the operands they have in
    common: a wave covers a patch of the grid, as square as it can over m and n, else filled from
    the last dimension. An operand that a dimension does not index is read again for each patch
    along it, but for the part that the L2 keeps from one wave to the next. A row that a reduction
    does not hold whole is read once to reduce it and, when its cells are results too, once more to
    finish them.
    """
    patch: dict[str, Number] = {}
    left = wave
    if "m" in counts and "n" in counts:
        area = np.minimum(wave, counts["m"] * counts["n"])
        patch["n"] = np.minimum(counts["n"], np.maximum(np.sqrt(area), area / counts["m"]))
        patch["m"] = np.minimum(counts["m"], area / patch["n"])
        left = wave / area
    for d in reversed(work.grid):
        if d not in patch:
            patch[d] = np.maximum(1.0, np.minimum(counts[d], left))
            left = left / patch[d]
    read = sum(o.nbytes for o in work.operands if o.role in ("staged", "held"))
    missed = 1 - min(1.0, L2_SHARE * target.l2_bytes / read) if read else 0.0
    again: list[Number] = []
    for o in work.operands:
        repeats: Number = 1.0
        if o.role in ("staged", "held"):
            for d in work.grid:
                if d not in o.dims:
                    repeats = repeats * np.maximum(1.0, counts[d] / patch[d])
        elif work.kernel == "k.reduce" and o.role == "streamed" and "r" in o.dims:
            whole = tiles.dims["r"] * tiles.split >= work.extents["r"]
            again.append(np.where(whole, 1.0, float(_passes(work))))
            continue
        again.append(1.0 + (repeats - 1.0) * missed)
    return again


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


def needs(nest: Nest, target: Target, on_tensor: bool) -> tuple[Need, ...]:
    """What the tiles of a nest ask of the target. `on_tensor`: the products run on matrix units."""
    tiles, work, sm = nest.tiles, nest.work, target.sm
    found = [
        Need("threads", nest.threads, float(min(MOST_THREADS, sm.threads)), "a block"),
        Need("registers", nest.registers, float(MOST_REGISTERS), "a thread"),
        Need("register file", nest.registers * nest.threads, float(sm.registers), "a block"),
        Need("shared memory", nest.smem_bytes, float(sm.smem_bytes_per_block), "bytes a block"),
    ]

    def rule(what: str, wants: Number, has: Number, unit: str) -> None:
        found.append(Need(what, wants, has, unit, of_target=False))

    if not work.is_contraction:
        rule("stages of what has no operands to stage", tiles.stages, 1.0, "deep")
    elif copies_asynchronously(target):
        rule("stages", tiles.stages, 8.0, "deep")
    else:
        rule("stages without asynchronous copies", tiles.stages, 2.0, "deep")
    if on_tensor:
        rows, cols = work.face
        rule(f"{rows} in steps of 16", tiles.dims[rows] % 16, 0.0, "rows over")
        rule(f"{cols} in steps of 8", tiles.dims[cols] % 8, 0.0, "columns over")
        if work.kernel != "k.attention":
            chunk = tiles.dims["k"] * work.dtype.bits / 8 % 32
            rule("k in steps of 32 bytes", chunk, 0.0, "bytes over")
    for d in work.reduced:
        steps = np.ceil(max(work.extents[d], 1) / tiles.dims[d])
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


def runs_on_tensor(work: Work, target: Target, tf32: bool) -> bool:
    """Whether the products run on the matrix units of `target`."""
    rule = target.peak_rule(work.pipe, work.dtype, tf32=tf32)
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
    nest = cut(work, Tiles.of(tile, work), target)
    for need in needs(nest, target, runs_on_tensor(work, target, tf32)):
        if why := need.broken(target):
            return why
    return ""
