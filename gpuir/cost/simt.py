"""Products on the lanes: f32 GEMM and batched GEMM as cuBLAS runs them.

Blocks of a tile of the result march along k, eight cells a step. A block alone on an SM waits for
its loads, several hide each other's; the lanes lose issue slots to loads of operands; the board's
power holds the clock down once a kernel runs long enough. Against that stand the bytes from DRAM
and through the L2. Which tile a library takes is learned from the kernel names in the NeuSight
GEMM table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from gpuir.cost.family import Family, Terms, fastest
from gpuir.cost.nest import Tiles, of_isa
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import Work
from gpuir.targets.load import load_target
from gpuir.targets.target import Target

Chosen = tuple[Number, Number, Number, Number, Number]  # columns, rows, slices, warps, split
Times = Callable[[Chosen], Number]  # seconds of each product under each of these

_where: Callable[..., Number] = np.where

STEP = 8.0  # of k a step: the depth in sgemm_128x128x8, and of maxwell, volta and ampere_sgemm
# What P100's L2 gives of its listed bandwidth, beside V100's: 1624 of 2722 and 2155 of 2826 GB/s
# measured by Jia et al., table 3.1.
P100_L2 = 0.78
# The GPUs whose kernels were named, by architecture, and by how much slower than the fastest
# kernel, as these formulas have it, the one may be that the rule of choice names: of those that
# ran, 19 in 20 are within a third (NeuSight GEMM table). Beyond that the fastest is taken; on GPUs
# with as many SMs where it is on the one that was named, since at a limit of its own each would
# jump elsewhere. On other architectures the fastest is taken: A100's rule is right for half of
# V100's layers and a fourth of T4's. So it is of few rows, of which the table has none: what takes
# a tile of more rows takes no longer.
NAMED = {
    "sm_60": "p100-pcie-16gb",
    "sm_61": "p4",
    "sm_70": "v100-pcie-32gb",
    "sm_75": "t4",
    "sm_80": "a100-pcie-40gb",
}
SLACK = 0.25
FEW_ROWS = 16.0
LEAST_DEPTH = 64.0  # of k that a split leaves a block: what the NeuSight GEMM table shows
LINE_BYTES = 128.0  # of a cache line: CUDA C++ Programming Guide, compute capability 5.x on
# Parts of an SM, each with its lanes and scheduler: P100 and V100 architecture whitepapers.
PARTS = {"sm_60": 2.0, "": 4.0}
# Of k, from where few rows share a page: P100's layers slow down with the bytes of their input, not
# of their weight, by nothing at 16 KB a row and by all at 100 KB (NeuSight GEMM table).
LONG_ROW_BYTES = 45e3
TLB_BYTES = 32e6  # what Pascal's first TLB reaches: Jia et al., arXiv 1804.06826, table 3.2

FIT = "fitted on the NeuSight GEMM table"
FACTORS = (
    Factor("lane share", 1.015, 0.85, 1.05, 0.04, f"of the listed rate in the inner loop; {FIT}"),
    Factor("operand slots", 0.06, 0.0, 1.0, 0.0, f"issue slots, over sqrt(cells a thread); {FIT}"),
    Factor("load slots", 1.9, 0.0, 10.0, 0.0, f"issue slots a cell that comes in; {FIT}"),
    Factor("sliced slots", 1.16, 1.0, 1.5, 0.0, f"of warps that share out a step; {FIT}"),
    Factor("step clocks", 1100.0, 50.0, 4000.0, 0.15, f"until a step's operands are in; {FIT}"),
    Factor("block clocks", 2500.0, 100.0, 20000.0, 0.15, f"to start and end a block; {FIT}"),
    Factor("stores", 0.65, 0.0, 3.0, 0.0, f"of a block, through the L2, that nothing hides; {FIT}"),
    Factor("tail", 0.92, 0.0, 1.0, 0.0, f"share of an unfilled round that is lost; {FIT}"),
    Factor("hiding", 3.0, 1.0, 8.0, 0.0, f"norm that joins products and waits; {FIT}"),
    Factor("joules", 1.05, 0.5, 2.0, 0.2, f"of cost.simt.JOULES; {FIT}"),
    Factor("l2 joules", 4.3, 0.0, 20.0, 0.0, f"a byte through the L2, in flops; {FIT}"),
    Factor("dram joules", 32.0, 0.0, 300.0, 0.0, f"pJ a byte from DRAM; {FIT}"),
    Factor("idle", 0.2, 0.05, 0.4, 0.0, f"of the board's power, spent on the rest; {FIT}"),
    Factor("bend", 0.94, 0.3, 1.0, 0.0, f"exponent of time over excess power; {FIT}"),
    Factor("settle", 0.74, 0.05, 20.0, 0.0, f"ms until the clock follows the power; {FIT}"),
    Factor("dram share", 0.73, 0.5, 1.0, 0.06, f"of the listed bandwidth; {FIT}"),
    Factor("l2 share", 0.4, 0.15, 1.2, 0.15, f"of the listed bandwidth; {FIT}"),
    Factor("ragged", 0.18, 0.0, 1.0, 0.0, f"more from DRAM when rows begin in a sector; {FIT}"),
    Factor("l2 kept", 0.46, 0.02, 1.5, 0.0, f"of the L2, holds what is read again; {FIT}"),
    Factor("l2 warm", 0.4, 0.02, 1.5, 0.0, f"of the L2, holds operands of the last call; {FIT}"),
    Factor("lines", 1.7, 0.0, 6.0, 0.0, f"times a line is read again when the L2 drops it; {FIT}"),
    Factor("line depth", 280.0, 8.0, 2000.0, 0.0, f"cells of k until lines drop; {FIT}"),
    Factor("line share", 0.11, 0.02, 2.0, 0.0, f"of the L2, holds lines in use; {FIT}"),
    Factor("pages", 1.2, 0.0, 4.0, 0.0, f"of Pascal, over log(1 + input / TLB); {FIT}"),
    Factor("overlap", 5.0, 1.5, 16.0, 0.0, f"norm that joins compute and memory; {FIT}"),
    Factor("split", 6.0, 0.0, 20.0, 0.1, f"us to join partial sums; {FIT}"),
    Factor("split each", 4.5, 0.0, 10.0, 0.0, f"us, times the logarithm of the split; {FIT}"),
)

# Picojoules of an f32 flop on the lanes, its operands' way through registers and shared memory
# included, by process. Fitted on the NeuSight GEMM table up to sm_80 (sm_60 reaches no limit); 8, 5
# and 4 nm are read across from the rates per watt that data sheets list.
JOULES = {
    "sm_6": 12.5,
    "sm_70": 11.5,
    "sm_75": 15.0,
    "sm_80": 9.7,
    "sm_86": 6.8,
    "gfx9": 3.9,
    "": 3.9,
}

# Issue slots on SMs of 128 lanes, where those of 64 issue loads in the second clock of a warp's
# multiply-add: sgemm reaches 77 to 80 % of the peak on H100 with 64 cells a thread. Pascal issues
# two instructions a clock: sgemm_128x128x8 reaches 86 % on P4 (NeuSight GEMM table); P4's number
# does for P100's layers too, of 64 lanes an SM (74 and 81 % with 16 and 64 cells a thread). On
# GA10x, AD10x and GB20x half of the lanes run integers too (NVIDIA GA102 whitepaper): torch.mm
# reaches 0.61 to 0.63 of the peak at the clock under load (specs/measurements/torch-mm.csv).
WIDE_SLOTS = {"sm_6": 1.2, **dict.fromkeys(("sm_86", "sm_89", "sm_12"), 4.5), "": 1.75}


@dataclass(frozen=True)
class Cut:
    """A product cut into blocks."""

    extents: tuple[Number, Number, Number, Number]  # b, m, n, k
    down: Number  # tiles along m
    across: Number  # tiles along n
    whole: Number  # tiles of all batches
    steps: Number  # of one block
    slices: Number  # parts of a step, each for a group of warps
    cells: Number  # of the result that a thread sums in a slice
    resident: Number  # blocks an SM holds
    load: Number  # blocks of the busiest SM, an unfilled round in part
    most: Number  # the same, whole


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of a product under its tile."""
    xp = s.xp
    cut = _cut(s, work, tiles, target, p)
    peak = target.peak(work.pipe, work.rate_dtype)
    busy_s = _busy_s(s, work, tiles, target, p, cut, peak)
    l2_bytes, dram_bytes, memory_s = _moved(s, work, tiles, target, p, cut)
    longer, shorter = xp.maximum(busy_s, memory_s), xp.minimum(busy_s, memory_s)
    both = (1.0 + (shorter / longer) ** p["overlap"]) ** (1.0 / p["overlap"])
    run_s = longer * both
    slower = _slower(s, work, tiles, target, p, cut, l2_bytes, dram_bytes, run_s)
    compute_s, memory_s = busy_s * slower, memory_s * slower
    join_s = (p["split"] + p["split each"] * xp.log(tiles.split)) * 1e-6
    join_s = xp.where(tiles.split > 1.0, join_s, 0.0)
    latency_s = s.put("compute and memory at once", longer * slower * (both - 1.0), "s") + join_s
    return Terms(compute_s, memory_s, latency_s, work.products / peak)


def _cut(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Cut:
    xp, sms, split = s.xp, float(target.sms), tiles.split
    b, m, n, k = (xp.maximum(work.extents[d], 1.0) for d in ("b", "m", "n", "k"))
    tm, tn = tiles.dims["m"], tiles.dims["n"]
    threads = tiles.warps * float(target.sm.warp)
    slices = sliced(s, tiles.dims["k"])
    cell = work.dtype.bits / 8

    down, across = xp.ceil(m / tm), xp.ceil(n / tn)
    whole = b * (down * across)
    blocks = s.put("blocks", whole * split)
    steps = s.put("steps a block", xp.ceil(k / (split * STEP)))
    resident = s.put("blocks an SM holds", held(s, tm, tn, threads, slices, cell, target))
    rounds = s.put("rounds of an SM", blocks / sms)
    load = s.put(
        "blocks of the busiest SM",
        xp.maximum(1.0, rounds + p["tail"] * (xp.ceil(rounds) - rounds)),
        "",
        "the unfilled round counts in part",
    )
    s.put("log rounds", xp.log(rounds))
    s.put("log steps", xp.log(steps))
    s.put("log split", xp.log(split))
    s.put("log slices", xp.log(slices))
    s.put("log tile", xp.log(tm * tn))
    s.put("log aspect", xp.log(tm / tn))
    s.put("rows used", m / (down * tm))
    s.put("columns used", n / (across * tn))
    s.put("no batch", xp.where(b > 1.0, 0.0, 1.0))
    cells = tm * tn * slices / threads
    most = xp.ceil(rounds)
    return Cut((b, m, n, k), down, across, whole, steps, slices, cells, resident, load, most)


def _busy_s(
    s: Sheet,
    work: Work,
    tiles: Tiles,
    target: Target,
    p: Mapping[str, Number],
    cut: Cut,
    peak: Number,
) -> Number:
    """Seconds of the busiest SM: its blocks' steps, each as long as its products or the wait for
    its operands; what they write, at once when their sums are done; and the starts and ends of as
    many turns as it takes."""
    xp, sms, clock, sm = s.xp, float(target.sms), target.clock_hz, target.sm
    tm, tn, together = tiles.dims["m"], tiles.dims["n"], xp.minimum(cut.resident, cut.load)
    old_layer = target.isa.startswith("sm_6") and is_linear(work)  # maxwell_sgemm_..._tn
    wide = sm.fp32_lanes > 64 or old_layer
    loads = of_isa(WIDE_SLOTS, target.isa) if wide else p["operand slots"]
    slots = 1.0 + loads / xp.sqrt(cut.cells) + p["load slots"] * (1.0 / tm + 1.0 / tn)
    slots = slots * xp.where(cut.slices > 1.0, p["sliced slots"], 1.0)
    slots = s.put("issue slots a product", slots)
    busy = s.put("lanes with warps", lanes_used(s, cut.load, tiles.warps, target))
    flops = float(work.multiply_add) * tm * tn * STEP
    product_s = flops * sms * slots / (peak * p["lane share"] * busy)
    wait_s = p["step clocks"] / clock / (together * cut.slices)
    step_s = (product_s ** p["hiding"] + wait_s ** p["hiding"]) ** (1.0 / p["hiding"])
    tile_bytes = work.operands[-1].cell_bytes * tm * tn
    at_work = s.values["blocks"] / cut.load  # SMs, on average
    store_s = p["stores"] * tile_bytes * at_work / _l2_rate(target, p)
    turn_s = p["block clocks"] / clock
    return cut.load * (cut.steps * step_s + store_s) + turn_s * cut.load / together


def lanes_used(s: Sheet, blocks: Number, warps: Number, target: Target) -> Number:
    """The share of an SM's lanes that this many blocks keep busy while they run.

    Blocks of two warps get the parts of an SM by pairs: the second the two that the first has, the
    third and fourth the others. So one takes half as long as two, three or four: 64x64 tiles on
    V100, whose step takes 1, 1.5, 1.6, 1.7, 2.4, 3.1, 3.3 and 3.5 times one block's where an SM
    has 1 to 8 of them (NeuSight GEMM table).
    """
    xp, parts = s.xp, of_isa(PARTS, target.isa)
    if target.vendor != "NVIDIA":
        return xp.minimum(1.0, blocks * warps / parts)
    rounds = xp.floor(blocks / parts)
    left = blocks - parts * rounds
    return blocks / (parts * rounds + xp.minimum(parts, xp.maximum(1.0, parts / warps) * left))


def _l2_rate(target: Target, p: Mapping[str, Number]) -> Number:
    """Bytes that the L2 gives or takes a second."""
    return target.l2_bytes_per_s * p["l2 share"] * (P100_L2 if target.isa == "sm_60" else 1.0)


def _moved(
    s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number], cut: Cut
) -> tuple[Number, Number, Number]:
    """Bytes through the L2, bytes from and to DRAM, and the seconds that the slower takes.

    Blocks at work cover a patch of the result, as square as it can be, and share what they read. A
    line that they do not use up before the L2 drops it is read again; so is a right operand that a
    whole batch shares, where it is more than the L2 keeps.
    """
    xp, split, down, across = s.xp, tiles.split, cut.down, cut.across
    b, m, n, k = cut.extents
    tm, tn, cell = tiles.dims["m"], tiles.dims["n"], work.dtype.bits / 8
    left, right, out = cell * b * m * k, cell * b * k * n, work.operands[-1].cell_bytes * b * m * n
    l2_bytes = s.put("l2 bytes", left * across + right * down + out * split, "bytes")
    skewed_k = s.put("rows of k begin in a sector", skewed(s, k))
    skewed_n = s.put("rows of n begin in a sector", skewed(s, n))
    ragged_k, ragged_n = 1.0 + p["ragged"] * skewed_k, 1.0 + p["ragged"] * skewed_n
    ragged_w = ragged_k if is_linear(work) else ragged_n  # a layer's weight has k innermost
    s.put("log bytes over L2", xp.log((left + right + out) / target.l2_bytes))
    s.put("log reads a result", xp.log((left + right) / out))
    flying = xp.minimum(cut.whole, float(target.sms) * cut.resident)
    patch = xp.minimum(down * across, flying)
    wide_n = xp.minimum(across, xp.maximum(xp.sqrt(patch), patch / down))
    tall_m = xp.minimum(down, patch / wide_n)
    missed = 1.0 - xp.minimum(1.0, p["l2 kept"] * target.l2_bytes / ((left + right) / b))
    drops = p["lines"] * k / (k + p["line depth"])
    lines = p["line share"] * target.l2_bytes / LINE_BYTES
    again_left = 1.0 + drops * xp.maximum(0.0, 1.0 - lines * wide_n / (flying * tm))
    again_right = 1.0
    if is_linear(work):
        again_right = 1.0 + drops * xp.maximum(0.0, 1.0 - lines * tall_m / (flying * tn))
    own = right if "b" in work.operands[1].dims else right / b
    turns = 1.0 - xp.minimum(1.0, p["l2 kept"] * target.l2_bytes / own)
    cold = xp.maximum(0.0, 1.0 - p["l2 warm"] * target.l2_bytes / (left + own + out))
    dram_bytes = s.put(
        "dram bytes",
        ragged_k * again_left * left * (cold + missed * (across / wide_n - 1.0))
        + ragged_w
        * again_right
        * (own * cold + (right - own) * turns + right * missed * (down / tall_m - 1.0))
        + ragged_n * out * (cold + xp.where(split > 1.0, 0.5 * split + 0.5, 0.0)),
        "bytes",
    )
    dram_s = s.put("dram time", dram_bytes / (target.dram_bytes_per_s * p["dram share"]), "s")
    l2_s = s.put("l2 time", l2_bytes / _l2_rate(target, p), "s")
    memory_s = xp.maximum(dram_s, l2_s)
    if target.isa.startswith("sm_6") and is_linear(work):
        long = (k * cell / LONG_ROW_BYTES) ** 2.0
        pages = xp.log1p(left / TLB_BYTES) * long / (1.0 + long)
        memory_s = memory_s * (1.0 + p["pages"] * pages)
    return l2_bytes, dram_bytes, memory_s


def _slower(
    s: Sheet,
    work: Work,
    tiles: Tiles,
    target: Target,
    p: Mapping[str, Number],
    cut: Cut,
    l2_bytes: Number,
    dram_bytes: Number,
    run_s: Number,
) -> Number:
    """How much longer the product takes at the clock that the board's power allows, where it runs
    for `run_s` at the full one."""
    k, tm, tn = cut.extents[3], tiles.dims["m"], tiles.dims["n"]
    flop_pj = of_isa(JOULES, target.isa) * p["joules"] * max(work.dtype.bits, 16) / 32
    picojoules = (
        float(work.multiply_add) * cut.whole * tm * tn * k * flop_pj
        + l2_bytes * p["l2 joules"] * flop_pj
        + dram_bytes * p["dram joules"]
    )
    watts = s.put("power wanted", picojoules * 1e-12 / run_s, "W", "cost.simt.JOULES; L2 and DRAM")
    slower = 1.0
    if target.tdp_w is not None:
        excess = s.xp.maximum(1.0, watts / (target.tdp_w * (1.0 - p["idle"]))) ** p["bend"]
        slower = 1.0 + (excess - 1.0) * run_s / (run_s + p["settle"] * 1e-3)
    return s.put("slower for lack of power", slower, "", "once the kernel outlasts `settle`")


# What the network sees: counts and shapes.
FEATURES = (
    *("log rounds", "log steps", "log split", "log slices", "log tile", "log aspect"),
    *("rows used", "columns used", "no batch", "log bytes over L2", "log reads a result"),
    *("rows of k begin in a sector", "rows of n begin in a sector"),
)
BOUND = 0.25  # the network moves the time by at most this much in logarithms


def sliced(s: Sheet, depth: Number) -> Number:
    """Parts of a step that groups of warps share out: a depth of 32 is four of 8 (`sliced1x4`)."""
    return s.xp.where(depth >= 4 * STEP, depth / STEP, 1.0)


def skewed(s: Sheet, row: Number) -> Number:
    """The share of rows of so many 4-byte cells that begin inside a sector of eight."""
    whole = 0.0
    for cells in (2.0, 4.0, 8.0):
        even = row - cells * s.xp.floor(row / cells) < 0.5
        whole = s.xp.where(even, cells / 8.0, s.xp.maximum(whole, 1.0 / 8.0))
    return 1.0 - whole


def held(
    s: Sheet, tm: Number, tn: Number, threads: Number, slices: Number, cell: float, target: Target
) -> Number:
    """Blocks that an SM holds: by registers, of which a thread of 64 cells takes 122 in sgemm and
    one of 16 about 54, by threads and by shared memory for two steps."""
    xp, sm = s.xp, target.sm
    registers = xp.ceil((32.0 + 1.4 * cell / 4.0 * tm * tn * slices / threads) / 8.0) * 8.0
    stage = 2.0 * (tm + tn) * STEP * slices * cell
    resident = xp.minimum(xp.floor(sm.registers / (registers * threads)), float(sm.blocks))
    resident = xp.minimum(resident, xp.floor(sm.threads / threads))
    return xp.maximum(1.0, xp.minimum(resident, xp.floor(sm.smem_bytes / (stage + 1024.0))))


def is_linear(work: Work) -> bool:
    """Whether a bias is added: then a layer's weight lies with k innermost, and the call goes
    through cuBLASLt, which chooses otherwise than cuBLAS."""
    return len(work.operands) > 3


# ---------------------------------------------------------------------------- which tile


@dataclass(frozen=True)
class Kernels:
    """The kernels that a library has for one architecture and call, and how it chooses.

    A row of `rows` is a tile's columns and rows, parts of a step, warps, blocks an SM holds, and
    four numbers fitted to the kernel names: log cost a cell, cells of k that a block costs at
    least, rounds lost, and how the cost grows with k. The library is taken to compare
    ((rounds + lost) * cells * exp(cost) * (k / split + least) + join) * (k / 1024) ** grows; of an
    unfilled round `quantum` counts, and a split costs `join` and `join_each` for each share of
    each result cell. `even` is what is taken instead where n and k are multiples of four.
    """

    rows: tuple[tuple[float, ...], ...]
    quantum: float = 0.0
    join: float = 0.0
    join_each: float = 0.0
    even: Even | None = None


@dataclass(frozen=True)
class Even:
    """Columns, rows, parts of a step and warps of a kernel that does not share out k, taken where
    its blocks are `blocks` an SM or more; and of the one taken of fewer, whose blocks have up to
    `depth` cells of k each.
    """

    whole: tuple[float, float, float, float]
    blocks: float
    few: tuple[float, float, float, float]
    depth: float


# What cuBLAS 12.1 took, as the kernel names in the NeuSight GEMM table say: of one product, there
# of a layer with a bias, and of a batch of them.
SINGLE = {
    "sm_60": Kernels(
        (
            (32, 128, 1, 8, 4, 0.00, 12600, 32, 0.74),
            (64, 64, 1, 2, 8, 0.84, 7830, 18, 0.69),
            (128, 32, 1, 8, 4, 5.26, 120, 0.36, 0.00),
        ),
    ),
    "sm_61": Kernels(
        (
            (32, 128, 1, 8, 4, 0.00, 29300, 18, 0.83),
            (64, 64, 1, 2, 8, 0.10, 26100, 17, 0.82),
            (128, 32, 1, 8, 4, 4.55, 72, 7.7, 0.00),
        ),
        0.16,
        2.1e5,
        4.1,
        # From 48 blocks on P4's 20 SMs on; the parts are those of all 28 layers of fewer.
        Even((128, 128, 1, 8), 2.4, (128, 64, 1, 4), 512.0),
    ),
    "sm_70": Kernels(
        (
            (128, 64, 1, 4, 4, 0.00, 442, 1.1, 0.23),
            (128, 128, 1, 8, 2, 0.33, 295, 0.43, 0.10),
            (128, 32, 1, 8, 4, 0.28, 365, 0.85, 0.23),
            (32, 128, 1, 8, 4, 0.28, 335, 0.88, 0.18),
            (128, 32, 4, 8, 2, 0.96, 151, 0.24, 0.00),
            (64, 32, 4, 8, 2, 0.92, 116, 0.26, 0.03),
            (32, 32, 4, 4, 4, 1.03, 96, 0.43, 0.04),
        ),
        0.0,
        8.4e3,
        3.2,
    ),
    "sm_75": Kernels(
        (
            (128, 128, 1, 8, 2, 0.00, 72, 0.29, 0.03),
            (128, 64, 1, 4, 4, 0.02, 72, 0.38, 0.05),
            (64, 64, 1, 2, 8, 0.13, 74, 0.93, 0.04),
            (32, 128, 1, 8, 4, 0.57, 35, 0.25, 0.00),
            (128, 32, 1, 8, 4, 0.54, 38, 0.48, 0.03),
            (128, 32, 4, 8, 2, 0.37, 160, 0.17, 0.03),
            (64, 32, 4, 8, 2, 0.58, 144, 0.17, 0.01),
            (32, 32, 4, 4, 4, 0.71, 89, 0.47, 0.01),
        ),
        0.17,
        1.6e4,
        0.44,
    ),
    "": Kernels(
        (
            (128, 64, 1, 4, 4, 0.00, 100, 0.83, 0.11),
            (128, 128, 1, 8, 2, 0.18, 121, 0.12, 0.11),
            (64, 64, 1, 2, 8, 0.09, 318, 1.3, 0.17),
            (128, 32, 1, 8, 4, 0.09, 110, 1.0, 0.11),
            (32, 128, 1, 8, 4, 0.15, 92, 0.7, 0.09),
            (128, 32, 4, 8, 2, 0.49, 118, 0.14, 0.00),
            (64, 32, 4, 8, 2, 0.55, 64, 0.1, 0.01),
            (32, 32, 4, 4, 4, 0.57, 37, 0.41, 0.00),
        ),
        0.73,
        1.6e6,
        480.0,
    ),
}
BATCH = {
    "sm_6": Kernels(((128, 64, 1, 4, 4, 0.0, 0.0, 1.0, 0.0),)),
    "sm_70": Kernels(
        (
            (64, 64, 1, 2, 8, -1.18, 5.6, 24.8, 0.0),
            (32, 128, 1, 8, 4, -1.20, 5.7, 26.0, 0.0),
            (128, 32, 1, 8, 4, 0.74, 20, 2.5, 0.0),
        ),
    ),
    "sm_75": Kernels(
        (
            (128, 64, 1, 4, 4, 0.00, 47, 2.5, 0.0),
            (64, 64, 1, 2, 8, 0.25, 48, 3.0, 0.0),
            (128, 32, 1, 8, 4, 0.16, 46, 4.4, 0.0),
            (32, 128, 1, 8, 4, 1.20, 52, 0.96, 0.0),
        ),
        0.04,
    ),
    "": Kernels(((128, 128, 1, 8, 2, 0.0, 0.0, 1.0, 0.0),)),
}

# cuBLAS's kernels of complex numbers: columns, rows, parts of a step and warps, as in the names
# that profiles have (maxwell_cgemm_64x64_tn, volta_cgemm_64x32_tn, ampere_cgemm_32x64_nn; on an
# H200 sm80_xmma_gemm_cf32cf32_.._tilesize32x32x8_stage3_warpsize2x2x1). That the fastest is taken
# is assumed.
COMPLEX = ((64, 64, 1, 4), (64, 32, 1, 4), (32, 64, 1, 4), (32, 32, 1, 4))

# Thin products have kernels of their own, whose names the table does not hold: it has no product
# of one row, and no batch of 16 rows or fewer. Assumed: columns, rows, slices and warps.
# How cuBLAS shares out a vector's k is assumed too: where that is faster.
ROW, COLUMN, STRIP = (8.0, 1.0, 32.0, 4.0), (1.0, 8.0, 32.0, 4.0), (32.0, 16.0, 8.0, 4.0)
STRIP_ROWS = 16.0


@cache
def _columns(known: Kernels, splits: bool) -> tuple[np.ndarray, ...]:
    """The numbers of kernels, each without a split and with those that fill an SM half and whole;
    last the blocks an SM that a split aims at, 0 without."""
    rows = np.array(known.rows, float)
    aims = (0.0, 0.5, 1.0) if splits else (0.0,)
    each = np.repeat(rows, len(aims), axis=0)
    return (*each.T, np.tile(aims, len(rows)) * each[:, 4])


def candidates(work: Work, target: Target) -> Tiles:
    """The library's kernels for this architecture, without a split."""
    n, m, slices, warps, *_ = _columns(of_isa(SINGLE, target.isa), False)
    if work.dtype.is_complex:
        n, m, slices, warps = np.array(COMPLEX, float).T
    return Tiles({"b": 1.0, "m": m, "n": n, "k": STEP * slices}, 2.0, warps, 1.0)


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The kernel and split that cuBLAS would take, for each of many products."""
    shape = np.shape(work.points)
    rows = work.each(lambda n: np.broadcast_to(np.asarray(n, float), shape))
    single = rows.extents["b"] <= 1
    if rows.dtype.is_complex:
        best = fastest(seconds, rows, candidates(rows, target), target, p)
        taken = (best.dims["n"], best.dims["m"], best.dims["k"] / STEP, best.warps, best.split)
    elif single.all():
        taken = cheapest(rows, of_isa(SINGLE, target.isa), target, True, p)
    else:
        taken = cheapest(rows, of_isa(BATCH, target.isa), target, False, p)
        if single.any():
            alone = cheapest(rows, of_isa(SINGLE, target.isa), target, True, p)
            taken = either(single, alone, taken)
    return tiles_of(thinned(taken, rows, target, partial(times_of, rows, target, p)))


def tiles_of(chosen: Chosen) -> Tiles:
    """The tiles of kernels."""
    tn, tm, slices, warps, split = chosen
    return Tiles({"b": 1.0, "m": tm, "n": tn, "k": STEP * slices}, 2.0, warps, split)


def times_of(rows: Work, target: Target, p: Mapping[str, Number], kernels: Chosen) -> Number:
    """Seconds of each product under each kernel, which lie along the last axis."""
    column = rows.each(lambda n: np.asarray(n, float)[..., None])
    terms = seconds(Sheet(), column, tiles_of(kernels), target, p)
    return np.maximum(terms.compute, terms.memory) + terms.latency


def thinned(taken: Chosen, rows: Work, target: Target, times: Times) -> Chosen:
    """The kernels taken, where a product is not too thin for them."""
    m, n, single = rows.extents["m"], rows.extents["n"], rows.extents["b"] <= 1
    strips = ~single & (m <= STRIP_ROWS)
    if strips.any():
        taken = either(strips, (*STRIP, 1.0), taken)
    for thin, kernel in ((n <= 1, COLUMN), (m <= 1, ROW)):
        if thin.any():
            taken = either(thin, _shared(rows, kernel, target, times), taken)
    return taken


def _shared(rows: Work, kernel: tuple[float, ...], target: Target, times: Times) -> Chosen:
    """A vector's kernel, k shared out where blocks are too few for the SMs and that is faster."""
    tn, tm, slices, warps = kernel
    b, m, n, k = (rows.extents[d][..., None] for d in "bmnk")
    grid = b * np.ceil(m / tm) * np.ceil(n / tn)
    most = np.minimum(target.sms // grid, k // (STEP * slices))
    splits = np.minimum(2.0 ** np.arange(6), np.maximum(1.0, most))
    best = times((tn, tm, slices, warps, splits)).argmin(axis=-1)
    return tn, tm, slices, warps, _at(splits, best)


def _at(numbers: Number, best: Number) -> Number:
    """The entry of each row that was chosen."""
    return np.take_along_axis(numbers, best[..., None], axis=-1)[..., 0]


def either(test: Number, yes: Chosen, no: Chosen) -> Chosen:
    """Of each kernel the one or the other."""
    n, m, slices, warps, split = (_where(test, x, y) for x, y in zip(yes, no, strict=True))
    return n, m, slices, warps, split


def cheapest(
    rows: Work, known: Kernels, target: Target, splits: bool, p: Mapping[str, Number] | None = None
) -> Chosen:
    """The kernel that the library finds cheapest; with factors, the fastest, where that one is
    slower by more than `SLACK`, or where no rule was read."""
    m, n, k = (rows.extents[d][..., None] for d in "mnk")
    tn, tm, slices, warps, _, cost, least, lost, grows, aims = _columns(known, splits)
    grid = rows.extents["b"][..., None] * np.ceil(m / tm) * np.ceil(n / tn)
    most = k // LEAST_DEPTH
    split = np.maximum(1.0, np.minimum(np.floor(aims * target.sms / grid), most))
    rounds = grid * split / target.sms
    rounds = rounds + known.quantum * (np.ceil(rounds) - rounds)
    time = (rounds + lost) * (tm * tn * np.exp(cost)) * (k / split + least)
    if splits:
        joined = known.join + known.join_each / target.sms * (m * n) * split
        time = time + np.where(split > 1, joined, 0.0)
        time = time * np.exp(grows * np.log(np.maximum(k, 1.0) / 1024))
    if known.even is not None:
        taken, told, even = _evenly(rows, known.even, target)
        tn, tm, slices, warps = map(np.append, (tn, tm, slices, warps), taken)
        split = np.append(split, told, axis=-1)
        time = np.append(time, even, axis=-1)
    best: Number = np.argmin(time, axis=-1)
    if p is not None:
        kernels = (tn, tm, slices, warps, split)
        told_s = _where(time < np.inf, times_of(rows, target, p, kernels), np.inf)
        there = _named(target)
        judged_s = told_s
        if there is not target:
            judged_s = _where(time < np.inf, times_of(rows, there, p, kernels), np.inf)
        far = _at(judged_s, best) > (1 + SLACK) * judged_s.min(axis=-1)
        unread = (rows.extents["m"] <= FEW_ROWS) | (target.isa not in NAMED)
        best = _where(far | unread, told_s.argmin(axis=-1), best)
    return tn[best], tm[best], slices[best], warps[best], _at(split, best)


def _evenly(rows: Work, even: Even, target: Target) -> tuple[Number, Number, Number]:
    """The two kernels that n and k in fours have, their splits and costs: where n and k are such,
    one of them is the cheapest of all; elsewhere there is neither."""
    m, n, k = (rows.extents[d][..., None] for d in "mnk")
    columns, height, *_ = even.whole
    blocks = rows.extents["b"][..., None] * np.ceil(m / height) * np.ceil(n / columns)
    full = blocks >= even.blocks * target.sms
    split = np.append(np.ones_like(k), np.ceil(k / even.depth), axis=-1)
    there = ((n % 4 == 0) & (k % 4 == 0)) & np.append(full, ~full, axis=-1)
    return np.transpose([even.whole, even.few]), split, _where(there, -np.inf, np.inf)


def _named(target: Target) -> Target:
    """The GPU whose kernels were named, where it has the target's architecture and as many SMs: the
    library takes the same on both. Else the target."""
    if target.name == NAMED.get(target.isa, target.name):
        return target
    there = load_target(NAMED[target.isa])
    return there if there.sms == target.sms else target


FAMILY = Family("simt", FACTORS, candidates, seconds, choose, FEATURES, BOUND)
