"""Kernels that work on rows: softmax, norms, sums.

A row that a block holds in registers or shared memory comes in once. A longer one is read again for
every pass over it: to find its largest cell, to sum, to write. Between passes a block waits for its
threads to agree, so that what hides the wait is the other blocks that an SM holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.family import Family, Terms
from gpuir.cost.nest import (
    FULL_REGISTERS,
    TiledNest,
    Tiles,
    cut,
    held,
    l2_drawn,
    library_block,
    residents,
)
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.stream import dram_share, drawn, joined, lanes_s, slots, sustained_hz
from gpuir.cost.work import SECTOR_BYTES, Channels, Work
from gpuir.targets.target import Target

# Passes over a row that its block does not hold. PyTorch's softmax: the largest cell, the sum of
# exponentials, the results; its norms: mean and variance together, the results.
PASSES = {"softmax": 3.0, "norm": 2.0, "rms": 2.0, "sum": 1.0, "scan": 1.0}
# Inductor's: the largest cell and the sum together, the results (torch/_inductor/lowering.py and
# config.py, online_softmax).
TRITON_PASSES = {**PASSES, "softmax": 2.0}
LAST_THREADS = 2048.0  # of an SM: of most GPUs
VECTOR_BYTES = 16  # of a thread's load, where rows allow it
LINE_BYTES = 128  # of the caches: a warp's loads of a row that starts elsewhere touch one more

# Dependent multiply-adds issue after 6 clocks on Pascal, after 4 from Volta on (Jia, Maggioni,
# Staiger, Scarpazza: Dissecting the NVIDIA Volta GPU architecture via microbenchmarking, 2018).
PASCAL_CHAIN = 1.5

# Of a norm's pass on an SM of 128 lanes: mean and variance are brought together by many warps'
# arithmetic. Short rows were fitted on 64 lanes and on Pascal alone; A40's are long, and bound by
# memory. Read off half a of timm's runs on RTX 3090 and 4090 (docs/validation/models.md).
WIDE_CHAIN = 0.6

# PyTorch's group norm is a kernel of moments, a small one of what scales each channel, and one that
# scales the cells (aten/src/ATen/native/cuda/group_norm_kernel.cu). A group is a block of threads,
# or of one warp. A thread takes one cell after another, each a load and a step of Welford's sums
# with its division: 1,130 to 1,220 clocks on A100 and L40S, 1,180 on T4 (KernelBench's program 35),
# 900 on H100. Instructions: read off Liger-Kernel's B200, 65,536 groups of 2,048 cells.
GROUP_THREADS = 512.0
MOMENT_CLOCKS = 1100.0  # of a cell
MOMENT_OPS, SCALE_OPS = 30.0, 20.0  # lane instructions of a cell in each of the large kernels
AGREE_OPS = 500.0  # of a thread, until the threads of a block have one mean and variance
GROUP_LAUNCHES = 2  # beyond the first

# Of the bandwidth that other rows reach, what PyTorch's running sums of several rows do, whose
# blocks wait after every two cells a thread: 0.75 and 0.66 on L40S and H100, 0.91 on RTX A6000
# (KernelBench, level 1, problems 90, 91 and 93, rows of 32,768 cells).
SCAN_SHARE = 0.78

FACTORS = table("factors/rows", Factor)


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """Waves of blocks that each make their passes, on DRAM, L2 and instruction issue."""
    xp = s.xp
    nest = cut(work, tiles, s)
    block = library_block(nest, target, s)
    resident = residents(s, nest, target, block)
    if work.kind == "rms":
        resident = held(xp, target, block.threads, FULL_REGISTERS, block.smem_bytes)
    waves = s.put("waves", xp.maximum(1.0, nest.blocks / (target.sms * resident)))
    if work.kind == "group norm":
        return _group_norm(s, nest, waves, target, p)
    memory = _memory_s(s, nest, resident, target, p)

    slower = 1 + p["straddle"] * within(s, work, LINE_BYTES)
    kind = "norm" if work.kind == "norm" else "softmax"
    alone = nest.sizes["r"] >= work.extents["r"] if is_triton(work) else nest.sizes["o"] > 1
    turns = xp.where(alone, 1.0, passes_of(work))
    turns = s.put("passes of a block", turns, "", "one, where its warps hold their rows")
    clock_hz = sustained_hz(s, target, p)
    padded = nest.blocks * nest.step_points * nest.steps / xp.maximum(work.points, 1.0)
    padded = xp.where(turns > 1, 1 + p["repeat lanes"] * (turns - 1), padded)
    cells = work.lane_ops * padded * p[f"{kind} lanes"]
    agree = nest.blocks * block.threads * turns * p[f"{kind} threads"]
    compute = lanes_s(s, cells * slower, clock_hz, target, p, beside=agree * slower)

    steps = row_steps(s, work, nest.sizes["r"], block.threads, tiles.split)
    steps = s.put("steps of a pass", steps)
    step = p["cell step" if work.kind == "rms" else "step clocks"]
    waits = p[f"{kind} pass"] * chain(target, kind)
    if is_triton(work):  # sums alone: Welford's steps are PyTorch's
        waits = p["softmax pass"]
    clocks = turns * (waits + steps * step) * slower
    block_s = s.put("a block's waits", clocks / target.clock_hz, "s")
    busy = s.put("waves of waits", waves * block_s, "s")

    _put_features(s, nest, waves, steps)
    start = s.put("start and end", p["start clocks"] / target.clock_hz, "s")
    end = s.put("drain: the last blocks", p["drain"] * _last_s(s, nest, target, block_s, p), "s")
    return joined(s, Terms(compute, memory, start + end), busy, _overlap(target, p))


def _group_norm(
    s: Sheet, nest: TiledNest, waves: Number, target: Target, p: Mapping[str, Number]
) -> Terms:
    """PyTorch's kernels of a group norm, one after the other: what the second reads is found in the
    L2 where all of it fits."""
    work, xp, q = nest.work, s.xp, _overlap(target, p)
    steps = s.put("steps of a pass", nest.steps)
    waits = waves * (steps * MOMENT_CLOCKS + p["norm pass"]) / target.clock_hz
    waits = s.put("waves of waits", waits, "s")
    _put_features(s, nest, waves, steps)
    within(s, work, LINE_BYTES)

    rate = target.dram_bytes_per_s * dram_share(target, p)
    rate = s.put("dram rate", rate, "bytes/s")
    reads = sum((o.nbytes for o in work.operands if o.staging != "written"), 0.0)
    read_s = s.put("read once", reads * gone(work.nbytes, target, p) / rate, "s")
    again = (work.nbytes - reads) + reads * gone(reads, target, p)
    scaled_s = s.put("read again, and written", again / rate, "s")
    issue = slots(target) * target.sms * p["issue share"] * target.clock_hz
    moments = nest.blocks * s.values["threads a block"] * AGREE_OPS + work.points * MOMENT_OPS
    moments_s = s.put("instructions of moments", moments / issue, "s")
    scaling_s = s.put("instructions of scaling", work.points * SCALE_OPS / issue, "s")

    first = (read_s**q + moments_s**q + waits**q) ** (1 / q)
    second = (scaled_s**q + scaling_s**q) ** (1 / q)
    first, second = s.put("moments", first, "s", "p-norm"), s.put("scaling", second, "s", "p-norm")
    memory = s.put("memory", read_s + scaled_s, "s")
    compute = s.put("arithmetic", moments_s + scaling_s, "s")
    small = GROUP_LAUNCHES * (p["start clocks"] / target.clock_hz + target.launch_s)
    open_s = first + second - xp.maximum(memory, compute)
    return Terms(compute, memory, s.put("what neither hides", open_s + small, "s"))


def _overlap(target: Target, p: Mapping[str, Number]) -> Number:
    return p["amd overlap" if target.vendor == "AMD" else "overlap"]


def _last_s(
    s: Sheet, nest: TiledNest, target: Target, block_s: Number, p: Mapping[str, Number]
) -> Number:
    """Seconds of the last blocks, on SMs that have the memory to themselves: as many at once as
    make 2048 threads, and no more than an SM runs in all. More SMs do not make them longer."""
    xp, q = s.xp, _overlap(target, p)
    at_once = LAST_THREADS / s.values["threads a block"]
    at_once = xp.maximum(1.0, xp.minimum(at_once, nest.blocks / target.sms))
    share = at_once / nest.blocks
    taken = s.values["l2 bytes"] * share / l2_drawn(target)
    issued = s.values["lane instructions"] * share / (slots(target) * target.clock_hz)
    return s.put("last blocks", (taken**q + issued**q + block_s**q) ** (1 / q), "s", "p-norm")


def _memory_s(
    s: Sheet, nest: TiledNest, resident: Number, target: Target, p: Mapping[str, Number]
) -> Number:
    """Seconds of DRAM or the L2, whichever is longer. A row that its block does not hold is read
    for each pass, again from DRAM where the rows under way are too many for the L2 to keep."""
    work, xp = nest.work, s.xp
    held = nest.sizes["r"] * nest.tiles.split >= work.extents["r"]
    passes = s.put("passes over a row", xp.where(held, 1.0, passes_of(work)))
    reads = sum((o.nbytes for o in work.operands if o.staging != "written" and "o" in o.dims), 0.0)
    in_flight = xp.minimum(nest.blocks, target.sms * resident) * nest.sizes["o"]
    row_bytes = reads / xp.maximum(work.extents["o"], 1.0)
    live = s.put("bytes of rows under way", in_flight * row_bytes, "bytes")
    missed = s.put("read again from dram", gone(live, target, p))
    kept = s.put("found in the l2", 1 - gone(work.nbytes, target, p))
    moved = work.nbytes + (passes - 1) * reads * missed
    dram_bytes = s.put("dram bytes", moved * (1 - kept), "bytes")
    share = dram_share(target, p)
    if is_triton(work):
        if work.is_of_columns and work.writes_rows:
            share = share * p["column share"]
    elif work.kind == "scan":
        share = share * xp.where(work.extents["o"] > 1, SCAN_SHARE, 1.0)
    elif isinstance(work.detail, Channels) and work.detail.batch and not keeps_up(work, target):
        share = share * p["batch share"]
    dram_rate = s.put("dram rate", target.dram_bytes_per_s * share, "bytes/s")
    partial = 1 + p["partial sectors"] * within(s, work, SECTOR_BYTES)
    dram_s = s.put("dram time", dram_bytes * partial / dram_rate, "s")
    l2_rate = s.put("l2 rate", drawn(s, nest.blocks, target, p), "bytes/s")
    l2_bytes = s.put("l2 bytes", work.nbytes + (passes - 1) * reads, "bytes")
    l2_s = s.put("l2 time", l2_bytes / l2_rate, "s")
    return xp.maximum(dram_s, l2_s)


def keeps_up(work: Work, target: Target) -> bool:
    """Whether blocks of a norm over a batch have enough bytes under way for the memory: those of
    f32, twice as many as of 16 bits, for GDDR (KernelBench, level 1, problem 33: 0.74 of L40S's
    bandwidth and 0.83 of RTX A6000's, 0.39 of A100's and 0.41 of H100's)."""
    cells = [float(np.min(o.cell_bytes)) for o in work.operands if {"o", "r"} <= {*o.dims}]
    return not target.dram.kind.startswith("HBM") and min(cells, default=0) >= 4


def _put_features(s: Sheet, nest: TiledNest, waves: Number, steps: Number) -> None:
    """What the network sees."""
    length = s.xp.maximum(nest.work.extents["r"], 1.0)
    s.put("log row length", s.xp.log(length))
    s.put("log waves", s.xp.log(waves))
    s.put("log steps", s.xp.log(s.xp.maximum(steps, 1.0)))
    s.put("last step", steps * nest.sizes["r"] / length)
    s.put("is a norm", float(nest.work.kind == "norm") + 0.0 * length)


def is_triton(work: Work) -> bool:
    """Whether a compiler wrote the kernel for its rows."""
    return work.form.endswith("triton")


def passes_of(work: Work) -> float:
    """Passes over a row that its block does not hold."""
    return (TRITON_PASSES if is_triton(work) else PASSES)[work.kind]


def chain(target: Target, kind: str) -> float:
    """Clocks from an instruction to the next that needs its result, over those of most GPUs."""
    if target.isa.startswith("sm_6"):
        return PASCAL_CHAIN
    wide = target.vendor == "NVIDIA" and target.sm.fp32_lanes > 64
    return WIDE_CHAIN if kind == "norm" and wide else 1.0


def within(s: Sheet, work: Work, size: int) -> Number:
    """1 where rows start inside a unit of so many bytes, else 0."""
    units = work.extents["r"] * (work.dtype.bits / 8) / size
    inside = s.xp.where(units > s.xp.floor(units), 1.0, 0.0)
    return s.put(f"rows start inside {size} bytes", inside)


def row_steps(s: Sheet, work: Work, chunk: Number, threads: Number, split: Number = 1.0) -> Number:
    """Loads that follow each other in a thread's pass over a row.

    Of a norm: vectors. Of a softmax that its block does not hold: as many whole chunks of vectors
    as there are, then the rest cell by cell; a row that starts inside a vector takes a load more,
    which uses up a cell a thread (PyTorch, SoftMax.cu: ilpReduce, WriteFpropResults). Of rows of an
    odd number of cells three in four do, of two modulo four every other.
    """
    xp = s.xp
    length = work.extents["r"]
    if work.kind != "softmax":
        return xp.ceil(length / (chunk * split))

    def loads(cells: Number) -> Number:
        chunks = xp.floor(cells / chunk)
        return chunks + xp.ceil((cells - chunks * chunk) / threads)

    half, quarter = length / 2, length / 4
    odd = xp.where(half > xp.floor(half), 0.75, xp.where(quarter > xp.floor(quarter), 0.5, 0.0))
    aligned = s.put("loads of a row that starts with a vector", loads(length))
    shifted = 1 + loads(xp.maximum(length - threads, 0.0))
    shifted = s.put("loads of one that starts inside", shifted)
    return xp.where(chunk >= length, 1.0, aligned + odd * (shifted - aligned))


def gone(nbytes: Number, target: Target, p: Mapping[str, Number]) -> Number:
    """The share of so many bytes, used again in turn, that the L2 no longer has."""
    ratio = (nbytes / (target.l2_bytes * p["l2 keeps"])) ** p["l2 edge"]
    return ratio / (1 + ratio)


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """PyTorch's kernels. Softmax of at most 1024 cells: a warp holds a row, of up to 128 cells two,
    four warps a block; beyond, a block of 8 warps a row, of 16 beyond 2048 cells (on AMD of 1024
    threads, and in shared memory when vectors of four divide the row). Norms: four warps a row,
    vectors of four; an "rms" norm (vLLM of 2023): a cell a thread, 1024 of them. Source:
    aten/src/ATen/native/cuda, SoftMax.cu, PersistentSoftmax.cuh and layer_norm_kernel.cu; launches
    in the NeuSight kernel tables agree. Norms of columns have blocks along them too, as sums have
    (Normalization.cuh, batch_norm_collect_statistics_channels_last_kernel).
    """
    length = np.asarray(work.extents["r"], float)
    warp, amd = float(target.sm.warp), target.vendor == "AMD"
    if is_triton(work):
        return written(work, target)
    if work.kind == "softmax":
        padded = 2.0 ** np.ceil(np.log2(np.maximum(length, 1.0)))
        short = length <= 1024
        rows = 128 / np.minimum(padded, warp) * np.where(padded <= 128, 2, 1)
        vector = VECTOR_BYTES * 8 / work.dtype.bits
        most = np.minimum(np.floor(length / vector), 1024) / 2
        warps = np.clip(2.0 ** np.ceil(np.log2(np.maximum(most, 1.0))) / warp, 1, 32)
        chunk = warps * warp * vector
        if amd:
            warps = np.full(length.shape, 1024 / warp)
            steps = np.where(length < 1024 * vector, 1024, 1024 * vector)
            fits = length * work.dtype.bits / 8 <= target.sm.smem_bytes_per_block - 4096
            chunk = np.where(fits & (length % vector == 0), length, steps)
        return Tiles(
            {"o": np.where(short, rows, 1.0), "r": np.where(short, padded, chunk)},
            np.ones(length.shape),
            np.where(short, 128 / warp, warps),
            np.ones(length.shape),
        )
    one = np.ones(length.shape)
    if work.kind == "sum" or work.is_of_columns:
        return sums(work, target)
    if work.kind == "scan":
        return scans(work, target)
    if work.kind == "group norm":
        threads = np.where(length < GROUP_THREADS, warp, GROUP_THREADS)
        return Tiles({"o": one, "r": threads}, one, threads / warp, one)
    if work.kind == "rms":
        threads = np.minimum(1024.0, np.ceil(length / warp) * warp)
        return Tiles({"o": one, "r": threads}, one, threads / warp, one)
    return Tiles({"o": one, "r": 16 * warp * one}, one, 4 * one, one)


def written(work: Work, target: Target) -> Tiles:
    """Triton's kernels of rows side by side, as Inductor writes them; lengths and numbers of rows
    count as the next power of two. Rows of up to 1024 cells are held whole: of 256 and more by a
    warp each 1024 cells, or, where that leaves too few blocks, one by a block; shorter ones by two
    warps, of as many rows as it finds to be quickest among 1, 8, 32 and 128, here the most that
    make 2048 cells (assumed). Longer rows come 2048 cells at a time, 1024 on Blackwell, those of up
    to 2048 in pairs. (torch 2.13: torch/_inductor/runtime/triton_heuristics.py,
    _persistent_reduction_configs, _reduction_configs, _num_warps.)
    """
    length = 2.0 ** np.ceil(np.log2(np.maximum(np.asarray(work.extents["r"], float), 1.0)))
    rows = 2.0 ** np.ceil(np.log2(np.maximum(np.asarray(work.extents["o"], float), 1.0)))
    whole, short, few = length <= 1024, length < 256, rows < 8 * 128
    tried = np.array([1.0, 8.0, 32.0, 128.0])
    fit = (tried * length[..., None] <= 2048) & (tried <= rows[..., None])
    most = np.where(fit, tried, 1.0).max(axis=-1)
    each = np.where(few, 1.0, np.minimum(1024 / length, 8.0))
    at_once = np.where(short, most, np.where(whole, each, np.where(length <= 2048, 2.0, 1.0)))
    step = np.minimum(length, 1024.0 if target.isa.startswith(("sm_10", "sm_12")) else 2048.0)
    warps = np.clip(step / 128, 2.0, np.where(whole, 8.0, 16.0))
    warps = np.where(whole & ~short & ~few, 1.0, warps) * 32 / target.sm.warp
    one = np.ones(length.shape)
    return Tiles({"o": at_once, "r": step}, one, np.maximum(warps, 1.0), one)


def sums(work: Work, target: Target) -> Tiles:
    """Blocks of 8 warps over 1024 cells at a time, of as many rows as those hold. Where rows are
    few and long, several blocks share one, of at least 16 such steps each (PyTorch, Reduce.cuh).
    """
    length = np.maximum(np.asarray(work.extents["r"], float), 1.0)
    chunk = np.minimum(2.0 ** np.ceil(np.log2(length)), 1024.0)
    count = 1024 / chunk
    blocks = np.ceil(work.extents["o"] / count)
    wanted = np.ceil(8 * target.sms / np.maximum(blocks, 1.0))
    split = np.clip(wanted, 1.0, np.maximum(1.0, np.floor(length / (16 * 1024))))
    one = np.ones(length.shape)
    return Tiles({"o": count, "r": chunk}, one, 256 / target.sm.warp * one, split)


def scans(work: Work, target: Target) -> Tiles:
    """As of sums, but that of several rows each is one block's; one row is shared, in one pass
    (PyTorch, ScanUtils.cuh; cub's DeviceScan: Merrill and Garland, Single-pass Parallel Prefix Scan
    with Decoupled Look-back, 2016).
    """
    tiles = sums(work, target)
    alone = np.asarray(work.extents["o"]) == 1
    return replace(tiles, split=np.where(alone, tiles.split, 1.0))


def candidates(work: Work, target: Target) -> Tiles:
    """Rows whole or in steps, 1 to 16 a block."""
    extent = float(np.max(work.extents["r"]))
    whole = 2.0 ** np.ceil(np.log2(max(extent, 1.0)))
    table = [
        (rows, chunk, float(warps))
        for chunk in (min(whole, 8192.0), 512.0, 1024.0, 2048.0, 4096.0)
        for rows in (1.0, 4.0, 8.0, 16.0)
        for warps in (4, 8, 16, 32, 2, 1)
    ]
    rows, chunk, warps = np.array(table).T
    one = np.ones(len(table))
    return Tiles({"o": rows, "r": chunk}, one, warps, one)


FEATURES = (
    *("log row length", "log waves", "log steps", "last step", "is a norm"),
    f"rows start inside {LINE_BYTES} bytes",
)

FAMILY = Family("rows", FACTORS, candidates, seconds, choose, features=FEATURES, bound=0.2)
