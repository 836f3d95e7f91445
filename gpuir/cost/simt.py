"""Products on the lanes: f32 GEMM and batched GEMM as cuBLAS runs them.

Blocks of a tile of the result march along k, eight cells a step. A block alone on an SM waits for
its loads, several hide each other's; the lanes lose issue slots to loads of operands; the board's
power holds the clock down once a kernel runs long enough. Against that stand the bytes from DRAM
and through the L2. Which tile a library takes is learned from the kernel names in the NeuSight
GEMM table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from gpuir.cost.data import known_gpus, nearest, of_isa, table
from gpuir.cost.family import Family, FormulaInputs, Terms, fastest
from gpuir.cost.nest import Tiles, allocated, held
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import Work
from gpuir.targets.load import load_target
from gpuir.targets.target import Target

Chosen = tuple[Number, Number, Number, Number, Number]  # columns, rows, slices, warps, split
Times = Callable[[Chosen], Number]  # seconds of each product under each of these

_where: Callable[..., Number] = np.where

STEP = 8.0  # of k a step: the depth in sgemm_128x128x8, and of maxwell, volta and ampere_sgemm
# How much slower than the fastest kernel, as these formulas have it, the one may be that the rule
# of choice names: of those that ran, 19 in 20 are within a third (NeuSight GEMM table). Beyond that
# the fastest is taken; on GPUs with as many SMs as one whose kernels were named
# (data/known_gpus.csv) where it is on that one, since at a limit of its own each would jump
# elsewhere. On other architectures the fastest is taken: A100's rule is right for half of V100's
# layers and a fourth of T4's. So it is of few rows, of which the table has none: what takes a tile
# of more rows takes no longer.
SLACK = 0.25
FEW_ROWS = 16.0
# How much longer than the fastest a library's own kernel takes where no names were read: many tiles
# of the result, and more the fewer there are, up to some for each SM. With each architecture of the
# table left out in turn, and the kernels of another, the layers of A100, T4 and V100 are 4 to 7 %
# slower than the fastest kernel, 1 to 6 of more tiles than SMs, 6 to 16 of less than half as many
# (docs/validation/kernels.md, tile choice).
UNREAD, UNREAD_FEW, UNREAD_TILES = 0.025, 0.1, 0.4
UNREAD_SIDE = 128.0  # rows and columns of the tiles counted here: of the largest kernels
# The share of the highest clock below which the voltage falls no more: V100, T4 (`voltage_floor` in
# data/architectures.csv); an RTX 3090 from 1350 MHz down (noonghunna/club-3090, power limits).
VOLTAGE_FLOOR = 0.7
LEAST_DEPTH = 64.0  # of k that a split leaves a block: what the NeuSight GEMM table shows
LINE_BYTES = 128.0  # of a cache line: CUDA C++ Programming Guide, compute capability 5.x on
# Of k, from where few rows share a page: P100's layers slow down with the bytes of their input, not
# of their weight, by nothing at 16 KB a row and by all at 100 KB (NeuSight GEMM table).
LONG_ROW_BYTES = 45e3
TLB_BYTES = 32e6  # what Pascal's first TLB reaches: Jia et al., arXiv 1804.06826, table 3.2

FACTORS = table("factors/simt", Factor)


@dataclass(frozen=True)
class CutProduct:
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


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of a product under its tile."""
    x, xp = FormulaInputs(s, work, tiles, target, p), s.xp
    cut = _cut(x)
    peak = target.peak(work.pipe, work.rate_dtype)
    busy_s = _busy_s(x, cut, peak)
    l2_bytes, dram_bytes, memory_s = _moved(x, cut)
    longer, shorter = xp.maximum(busy_s, memory_s), xp.minimum(busy_s, memory_s)
    both = (1.0 + (shorter / longer) ** p["overlap"]) ** (1.0 / p["overlap"])
    run_s = longer * both
    slower = _slower(x, cut, l2_bytes, dram_bytes, run_s)
    compute_s, memory_s = busy_s * slower, memory_s * slower
    join_s = (p["split"] + p["split each"] * xp.log(tiles.split)) * 1e-6
    join_s = xp.where(tiles.split > 1.0, join_s, 0.0)
    latency_s = s.put("compute and memory at once", longer * slower * (both - 1.0), "s") + join_s
    if target.vendor == "NVIDIA" and target.isa not in known_gpus("gemm"):
        unread = _unread(x, cut)
        compute_s, memory_s = compute_s * unread, memory_s * unread
        latency_s = latency_s * unread
    return Terms(compute_s, memory_s, latency_s, work.products / peak)


def _unread(x: FormulaInputs, cut: CutProduct) -> Number:
    """How much longer the kernel takes that the library would choose, where no names were read, of
    one product with more than a few rows."""
    s, xp, (b, m, n, _) = x.s, x.s.xp, cut.extents
    tiles = xp.ceil(m / UNREAD_SIDE) * xp.ceil(n / UNREAD_SIDE) / float(x.target.sms)
    more = 1.0 + UNREAD + UNREAD_FEW * xp.exp(-tiles / UNREAD_TILES)
    more = xp.where(b > 1.0, 1.0, xp.where(m > FEW_ROWS, more, 1.0))
    return s.put("the library's choice", more, "", "over the fastest kernel: cost.simt.UNREAD")


def _cut(x: FormulaInputs) -> CutProduct:
    s, work, tiles, target, p = x
    xp, sms, split = s.xp, float(target.sms), tiles.split
    b, m, n, k = (xp.maximum(work.extents[d], 1.0) for d in ("b", "m", "n", "k"))
    tm, tn = tiles.dims["m"], tiles.dims["n"]
    threads, slices = tiles.warps * float(target.sm.warp), sliced(s, tiles.dims["k"])

    down, across = xp.ceil(m / tm), xp.ceil(n / tn)
    whole = b * (down * across)
    blocks = s.put("blocks", whole * split)
    steps = s.put("steps a block", xp.ceil(k / (split * STEP)))
    resident = s.put("blocks an SM holds", _held(x, threads, slices))
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
    return CutProduct(
        *((b, m, n, k), down, across, whole),
        steps=steps,
        slices=slices,
        cells=tm * tn * slices / threads,
        resident=resident,
        load=load,
    )


def _busy_s(x: FormulaInputs, cut: CutProduct, peak: Number) -> Number:
    """Seconds of the busiest SM: its blocks' steps, each as long as its products or the wait for
    its operands; what they write, at once when their sums are done; and the starts and ends of as
    many turns as it takes."""
    s, work, tiles, target, p = x
    xp, sms, clock, sm = s.xp, float(target.sms), target.clock_hz, target.sm
    tm, tn, together = tiles.dims["m"], tiles.dims["n"], xp.minimum(cut.resident, cut.load)
    old_layer = target.isa.startswith("sm_6") and is_linear(work)  # maxwell_sgemm_..._tn
    wide = sm.fp32_lanes > 64 or old_layer
    loads = of_isa("gemm_slots", target.isa) if wide else p["operand slots"]
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
    xp, parts = s.xp, of_isa("sm_parts", target.isa)
    if target.vendor != "NVIDIA":
        return xp.minimum(1.0, blocks * warps / parts)
    rounds = xp.floor(blocks / parts)
    left = blocks - parts * rounds
    return blocks / (parts * rounds + xp.minimum(parts, xp.maximum(1.0, parts / warps) * left))


def _l2_rate(target: Target, p: Mapping[str, Number]) -> Number:
    """Bytes that the L2 gives or takes a second."""
    return target.l2_bytes_per_s * p["l2 share"] * of_isa("gemm_l2_share", target.isa)


def _moved(x: FormulaInputs, cut: CutProduct) -> tuple[Number, Number, Number]:
    """Bytes through the L2, bytes from and to DRAM, and the seconds that the slower takes.

    Blocks at work cover a patch of the result, as square as it can be, and share what they read. A
    line that they do not use up before the L2 drops it is read again; so is a right operand that a
    whole batch shares, where it is more than the L2 keeps.
    """
    s, work, tiles, target, p = x
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
    x: FormulaInputs, cut: CutProduct, l2_bytes: Number, dram_bytes: Number, run_s: Number
) -> Number:
    """How much longer the product takes at the clock that the board's power allows, where it runs
    for `run_s` at the full one."""
    s, work, tiles, target, p = x
    k, tm, tn = cut.extents[3], tiles.dims["m"], tiles.dims["n"]
    flop_pj = of_isa("gemm_pj", target.isa) * p["joules"] * max(work.dtype.bits, 16) / 32
    picojoules = (
        float(work.multiply_add) * cut.whole * tm * tn * k * flop_pj
        + l2_bytes * p["l2 joules"] * flop_pj
        + dram_bytes * p["dram joules"]
    )
    watts = s.put("power wanted", picojoules * 1e-12 / run_s, "W", "of flops, L2 and DRAM")
    slower = 1.0
    if target.tdp_w is not None:
        excess = s.xp.maximum(1.0, watts / (target.tdp_w * (1.0 - p["idle"])))
        if bend := of_isa("gemm_bend", target.isa):
            falls = excess * VOLTAGE_FLOOR ** (1.0 / bend - 1.0)  # with the clock alone
            excess = s.xp.maximum(excess**bend, falls)
        else:
            excess = excess ** p["bend"]
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


def _held(x: FormulaInputs, threads: Number, slices: Number) -> Number:
    """Blocks that an SM holds: by registers, of which a thread of 64 cells takes 122 in sgemm and
    one of 16 about 54, by threads and by shared memory for two steps."""
    xp, tm, tn, cell = x.s.xp, x.tiles.dims["m"], x.tiles.dims["n"], x.work.dtype.bits / 8
    registers = allocated(xp, 32.0 + 1.4 * cell / 4.0 * tm * tn * slices / threads)
    stage = 2.0 * (tm + tn) * STEP * slices * cell
    return held(xp, x.target, threads, registers, stage)


def is_linear(work: Work) -> bool:
    """Whether a bias is added: then a layer's weight lies with k innermost, and the call goes
    through cuBLASLt, which chooses otherwise than cuBLAS."""
    return len(work.operands) > 3


# ---------------------------------------------------------------------------- which tile


@dataclass(frozen=True)
class GemmKernel:
    """A kernel that a library has for a call on an architecture: a row of data/gemm_kernels.csv."""

    library: str
    call: str
    isa: str
    columns: float
    rows: float
    slices: float
    warps: float
    resident: float = 0.0
    cost: float = 0.0
    least: float = 0.0
    lost: float = 0.0
    grows: float = 0.0


@dataclass(frozen=True)
class GemmRule:
    """How a library chooses: a row of data/gemm_rules.csv."""

    library: str
    call: str
    isa: str
    splits: int
    quantum: float
    join: float
    join_each: float
    even_blocks: float
    even_depth: float


@cache
def kernels_of(library: str, call: str, isa: str) -> np.ndarray[Any, Any]:
    """Columns, rows, slices, warps, blocks an SM holds, cost, least, lost and grows of the kernels
    that a library has for a call: an array of each, over the kernels."""
    known = [k for k in table("gemm_kernels", GemmKernel) if (k.library, k.call) == (library, call)]
    return np.array([astuple(k)[3:] for k in nearest(known, isa)], float).T


@cache
def _rule(library: str, call: str, isa: str) -> GemmRule:
    known = [r for r in table("gemm_rules", GemmRule) if (r.library, r.call) == (library, call)]
    (found,) = nearest(known, isa)
    return found


STRIP_ROWS = 16.0


@cache
def _splits_of(library: str, call: str, isa: str) -> tuple[np.ndarray[Any, Any], ...]:
    """The numbers of kernels, where the library splits each without and with those that fill an SM
    half and whole; last the blocks an SM that a split aims at, 0 without."""
    columns = kernels_of(library, call, isa)
    aims = (0.0, 0.5, 1.0) if _rule(library, call, isa).splits else (0.0,)
    each = np.repeat(columns, len(aims), axis=1)
    return (*each, np.tile(aims, columns.shape[1]) * each[4])


def candidates(work: Work, target: Target) -> Tiles:
    """The library's kernels for this architecture, without a split."""
    call = "complex" if work.dtype.is_complex else "one"
    return tiles_of((*kernels_of("cublas", call, target.isa)[:4], 1.0))


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The kernel and split that cuBLAS would take, for each of many products."""
    shape = np.shape(work.points)
    rows = work.each(lambda n: np.broadcast_to(np.asarray(n, float), shape))
    single = rows.extents["b"] <= 1
    if rows.dtype.is_complex:
        best = fastest(seconds, rows, candidates(rows, target), target, p)
        taken = (best.dims["n"], best.dims["m"], best.dims["k"] / STEP, best.warps, best.split)
    elif single.all():
        taken = cheapest(rows, "cublas", "one", target, p)
    else:
        taken = cheapest(rows, "cublas", "batch", target, p)
        if single.any():
            alone = cheapest(rows, "cublas", "one", target, p)
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
        taken = either(strips, (*_thin("strip"), 1.0), taken)
    for thin, call in ((n <= 1, "column"), (m <= 1, "row")):
        if thin.any():
            taken = either(thin, _shared(rows, _thin(call), target, times), taken)
    return taken


def _thin(call: str) -> tuple[float, float, float, float]:
    tn, tm, slices, warps = kernels_of("cublas", call, "")[:4, 0]
    return tn, tm, slices, warps


def _shared(rows: Work, kernel: tuple[float, ...], target: Target, times: Times) -> Chosen:
    """A vector's kernel, k shared out where blocks are too few for the SMs and that is faster. So
    it is assumed that cuBLAS does."""
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
    rows: Work, library: str, call: str, target: Target, p: Mapping[str, Number] | None = None
) -> Chosen:
    """The kernel that the library finds cheapest. It is taken to compare
    ((rounds + lost) * cells * exp(cost) * (k / split + least) + join) * (k / 1024) ** grows, where
    it splits; else the product alone. With factors, the one that `_believed` takes of these."""
    rule = _rule(library, call, target.isa)
    m, n, k = (rows.extents[d][..., None] for d in "mnk")
    tn, tm, slices, warps, _, cost, least, lost, grows, aims = _splits_of(library, call, target.isa)
    grid = rows.extents["b"][..., None] * np.ceil(m / tm) * np.ceil(n / tn)
    split = np.floor(aims * target.sms / grid)
    split = np.maximum(1.0, np.minimum(split, k // LEAST_DEPTH))
    rounds = grid * split / target.sms
    rounds = rounds + rule.quantum * (np.ceil(rounds) - rounds)
    costs = (rounds + lost) * (tm * tn * np.exp(cost)) * (k / split + least)
    if rule.splits:
        joined = rule.join + rule.join_each / target.sms * (m * n) * split
        costs = costs + np.where(split > 1, joined, 0.0)
        costs = costs * np.exp(grows * np.log(np.maximum(k, 1.0) / 1024))
    kernels = tn, tm, slices, warps, split
    if rule.even_blocks:
        kernels, costs = _with_even(rows, rule, target, kernels, costs)
    best = _believed(rows, kernels, costs, target, p)
    tn, tm, slices, warps, split = kernels
    return tn[best], tm[best], slices[best], warps[best], _at(split, best)


def _with_even(
    rows: Work, rule: GemmRule, target: Target, kernels: Chosen, costs: Number
) -> tuple[Chosen, Number]:
    """Beside the others the two kernels that n and k in fours have: where n and k are such, one of
    them is the cheapest of all; elsewhere there is neither."""
    even = kernels_of(rule.library, "even", rule.isa)[:4]
    columns, height = even[:2, 0]
    m, n, k = (rows.extents[d][..., None] for d in "mnk")
    blocks = rows.extents["b"][..., None] * np.ceil(m / height) * np.ceil(n / columns)
    full = blocks >= rule.even_blocks * target.sms
    there = ((n % 4 == 0) & (k % 4 == 0)) & np.append(full, ~full, axis=-1)
    tn, tm, slices, warps = map(np.append, kernels[:4], even)
    split = np.append(np.ones_like(k), np.ceil(k / rule.even_depth), axis=-1)
    split = np.append(kernels[4], split, axis=-1)
    costs = np.append(costs, _where(there, -np.inf, np.inf), axis=-1)
    return (tn, tm, slices, warps, split), costs


def _believed(
    rows: Work, kernels: Chosen, costs: Number, target: Target, p: Mapping[str, Number] | None
) -> Number:
    """The best by the library's rule. With factors, the fastest by these formulas where that one is
    slower by more than `SLACK` (on the GPU whose kernels were named, if it has the target's
    architecture and as many SMs: the library takes the same on both), and where no rule was read.
    """
    best: Number = np.argmin(costs, axis=-1)
    if p is None:
        return best
    there, known = costs < np.inf, known_gpus("gemm").get(target.isa)
    own_s = _where(there, times_of(rows, target, p, kernels), np.inf)
    if known is None:
        return own_s.argmin(axis=-1)
    named_s = own_s
    if known.sms == target.sms and known.gpu != target.name:
        named = load_target(known.gpu)
        named_s = _where(there, times_of(rows, named, p, kernels), np.inf)
    far = _at(named_s, best) > (1 + SLACK) * named_s.min(axis=-1)
    few = rows.extents["m"] <= FEW_ROWS
    return _where(far | few, own_s.argmin(axis=-1), best)


FAMILY = Family("simt", FACTORS, candidates, seconds, choose, features=FEATURES, bound=BOUND)
