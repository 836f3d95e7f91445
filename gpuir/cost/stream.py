"""Kernels that stream their operands once: maps, copies, gathers, quantisation.

Each cell is read, worked on by a few instructions and written, by blocks that have nothing to say
to each other: the bandwidth of the memory that holds the operands decides, or, where a cell takes
many instructions, their issue.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuir.cost import lookup
from gpuir.cost.data import of_isa, table
from gpuir.cost.family import Family, Terms
from gpuir.cost.nest import (
    COPY_SHARE,
    FULL_REGISTERS,
    Tiles,
    cut,
    held,
    is_partitioned,
    kept_bytes,
    library_block,
    memory_share,
    residents,
)
from gpuir.cost.power import sustained
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.steps import RoutineSteps
from gpuir.cost.work import SECTOR_BYTES, CellByCell, Lookup, Serial, Threads, Windowed, Work
from gpuir.targets.target import Target

CELLS_A_THREAD = 4  # PyTorch's pointwise kernels: vectors of four
GATHER_BLOCKS = 8.0  # an SM's in PyTorch's index_select: aten/src/ATen/native/cuda/Indexing.cu
QUANTISE_BYTES = 16  # a thread's load in the kernels that quantise, of vLLM and TensorRT-LLM
TURN_S = 2.75e-7  # assumed: of a turn that waits for its loads from DRAM
# Clocks that a thread waits for a load out of caches, and how many more where it comes from DRAM:
# bilinear and bicubic resampling on an H200 (specs/measurements/pixels.csv), bicubic on a B200
# (pytorch pull request 174578).
LOAD_CLOCKS, DRAM_CLOCKS = 190.0, 120.0
POOL_WARPS = 8  # of its pools: BLOCK_THREADS in aten/src/ATen/native/cuda/DilatedMaxPool2d.cu
MAP_WARPS = 4  # of its pointwise kernels: 128 threads a block, 256 on AMD

FACTORS = table("factors/stream", Factor)


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The longest of DRAM, L2, instructions and the waits of blocks, which hide each other but at
    the start and the end."""
    nest = cut(work, tiles, s)
    block = library_block(nest, target, s)
    residents(s, nest, target, block)
    again = missed(s, work, target)
    more = scattered(s, work, tiles)
    memory = memory_s(s, work.nbytes, nest.blocks, target, p, more=more, again=again)
    clock_hz = sustained_hz(s, target, p)
    compute = lanes_s(s, work.lane_ops, clock_hz, target, p)
    busy = 0.0
    shares = work.detail.threads if isinstance(work.detail, RoutineSteps) else work.detail
    if isinstance(shares, Threads):
        busy = _turns_s(s, shares, target)
    elif isinstance(work.detail, Serial):
        threads = work.points / work.detail.turns
        waves = s.put("waves", s.xp.ceil(threads / (target.sms * target.sm.threads)))
        turns = s.put("turns of a thread", work.detail.turns)
        busy = s.put("turns one after another", waves * turns * TURN_S, "s")
    elif takes_cells(work):
        resident = held(s.xp, target, block.threads, FULL_REGISTERS, block.smem_bytes)
        if work.kernel == "k.gather":
            resident = s.xp.minimum(resident, GATHER_BLOCKS)
        resident = s.put("blocks at once on an SM", resident)
        waves = s.xp.maximum(1.0, nest.blocks / (target.sms * resident))
        if isinstance(work.detail, Windowed):
            waves = s.put("waits of a thread", work.detail.waits) * waves
        wait = p["cell wait"] / target.clock_hz
        if isinstance(work.detail, CellByCell):
            wait = p["strided wait"]
        busy = s.put("waves of waits", waves * wait, "s")
    read = sum((o.nbytes for o in work.operands if o.staging != "written"), 0.0)
    # The network saw lookups by indices drawn evenly alone, and sees others as if they were.
    fewer = work.detail.fewer if isinstance(work.detail, Lookup) else 0.0
    moved, read = s.xp.maximum(work.nbytes + fewer, 1.0), read + fewer
    s.put("log bytes over l2", s.xp.log(moved / target.l2_bytes))
    s.put("log bytes", s.xp.log(moved))
    s.put("read share", read / moved)
    s.put("a cell at a time", 1.0 if looks_up(work) else 0.0)
    s.put("instructions a byte", work.lane_ops / moved)
    start = p["start clocks"] / target.clock_hz
    if work.kind == "quantise":  # from launch to launch: what graphs of them show
        start = s.xp.maximum(p["quantise clocks"] / target.clock_hz - target.launch_s, 0.0)
    start = s.put("start and end", start, "s", "less the launch")
    return joined(s, Terms(compute, memory, start), busy, p["overlap"])


def _turns_s(s: Sheet, d: Threads, target: Target) -> Number:
    """Seconds of threads that take turns: what the warps of the busiest SM issue, or what a thread
    waits for, whichever is longer; about as long, neither hides the other whole."""
    xp = s.xp
    blocks = s.put("blocks", xp.ceil(d.warps / d.block))
    warps = xp.ceil(blocks / target.sms) * xp.minimum(d.block, d.warps)
    warps = s.put("warps of the busiest SM", warps)
    turns = s.put("turns of a thread", d.turns)
    issued = s.put("clocks that warps take", warps * (turns * d.clocks + d.once), "clocks")
    load = LOAD_CLOCKS + DRAM_CLOCKS * (1 - s.values["found in the l2"])
    rounds = xp.maximum(warps * target.sm.warp / target.sm.threads, 1.0)
    waited = s.put("clocks that a thread waits", rounds * turns * d.waits * load, "clocks")
    both = xp.sqrt(issued**2 + waited**2)
    return s.put("turns one after another", both / target.clock_hz, "s", "cost.pixels")


def scattered(s: Sheet, work: Work, tiles: Tiles) -> Number:
    """Bytes through the L2 beyond the operands themselves: what a gather reads of its table again;
    or where threads beside each other fetch cells `apart` in memory, each in a sector of its own;
    rows of the result in one block share them, out of the L1. (AMD's lines are longer, but MI100
    copies keys no slower than sectors tell: products of heads in NeuSight's traces, less the same
    products in its GEMM table.)"""
    if not isinstance(work.detail, CellByCell):
        return work.detail.again if isinstance(work.detail, Lookup) else 0.0
    cell = work.dtype.bits / 8
    line = s.xp.minimum(SECTOR_BYTES, cell * work.detail.apart)
    rows = tiles.along("i", work, s) / work.detail.row
    fetched = s.xp.maximum(line / s.xp.maximum(rows, 1.0), cell)
    return s.put("scattered bytes", work.output_points * (fetched - cell), "bytes")


def missed(s: Sheet, work: Work, target: Target) -> Number:
    """Bytes that lookups fetch from DRAM again: of rows that the L2 held and gave up since."""
    if not isinstance(work.detail, Lookup) or not work.detail.missed:
        return 0.0
    named = s.put("named rows", work.detail.named, "bytes", "cost.lookup")
    held = lookup.L2_SHARE * target.l2_bytes / s.xp.maximum(named, 1.0)
    held = s.put("named rows that the l2 holds", held)
    bytes_again = lookup.between(s.xp, held, work.detail.missed)
    return s.put("missed again", bytes_again, "bytes", "cost.lookup", terse=True)


def takes_cells(work: Work) -> bool:
    """Whether a thread takes one cell at a time: then what is under way does not fill the memory's
    pipeline, and waits show. Vectors do fill it."""
    return looks_up(work) or isinstance(work.detail, CellByCell)


def looks_up(work: Work) -> bool:
    """Whether a thread finds its cell by an index, or by the window of a pool."""
    return work.kernel == "k.gather" or work.kind == "scalar"


def joined(s: Sheet, terms: Terms, busy: Number, q: Number) -> Terms:
    """What of `busy` waits shows, added to the latency. Arithmetic, memory and waits run beside
    each other; where two take about as long neither hides the other whole, which a p-norm
    expresses, of exponent `q`."""
    compute, memory = terms.compute, terms.memory
    total = s.put("joined", (memory**q + compute**q + busy**q) ** (1 / q), "s", "p-norm")
    return Terms(compute, memory, total - s.xp.maximum(compute, memory) + terms.latency)


def memory_s(
    s: Sheet,
    nbytes: Number,
    blocks: Number,
    target: Target,
    p: Mapping[str, Number],
    *,
    more: Number = 0.0,
    again: Number = 0.0,
) -> Number:
    """Seconds for `nbytes` from DRAM, less what the L2 still holds of them, and `again` bytes that
    it did not keep; and through the L2, `more` there.

    What ran before left the operands in the L2 as far as they fit: nearly all of those much
    smaller, nearly none of those larger.
    """
    xp = s.xp
    room = kept_bytes(target) * p["l2 keeps"]
    kept = s.put("found in the l2", 1 / (1 + (nbytes / room) ** p["l2 edge"]))
    dram_bytes = s.put("dram bytes", nbytes * (1 - kept) + again, "bytes")
    dram_rate = s.put("dram rate", target.dram_bytes_per_s * dram_share(target, p), "bytes/s")
    dram_s = s.put("dram time", dram_bytes / dram_rate, "s")
    l2_rate = s.put("l2 rate", drawn(s, blocks, target, p), "bytes/s")
    l2_s = s.put("l2 time", s.put("l2 bytes", nbytes + more, "bytes") / l2_rate, "s")
    return xp.maximum(dram_s, l2_s)


def drawn(s: Sheet, blocks: Number, target: Target, p: Mapping[str, Number]) -> Number:
    """Bytes a second that so many blocks draw from the L2: what it gives, or what the SMs that have
    a block take. Others, however many, take nothing away."""
    taken = s.xp.minimum(blocks, float(target.sms)) * (p["sm bytes"] * target.clock_hz)
    share = p["partitioned l2 share" if is_partitioned(target) else "l2 share"]
    return s.xp.minimum(target.l2_bytes_per_s * share, taken)


def dram_share(target: Target, p: Mapping[str, Number]) -> Number:
    """The share of the listed DRAM bandwidth that streams reach."""
    if not target.dram.kind.startswith("HBM"):
        share = p["gddr share" if target.dram.ecc else "plain gddr share"]
        return share * memory_share(target, COPY_SHARE)
    if target.vendor == "AMD":
        return p["amd hbm share"]
    return p["hbm share"] * of_isa("hbm_share", target.isa)


def slots(target: Target) -> float:
    """What an SM issues in a clock, in lanes. AMD CDNA3 ISA guide: four SIMDs of 16 lanes."""
    if target.vendor != "NVIDIA":
        return float(target.sm.fp32_lanes)
    return of_isa("issue_slots", target.isa)


def lanes_s(
    s: Sheet,
    lane_ops: Number,
    clock_hz: Number,
    target: Target,
    p: Mapping[str, Number],
    *,
    beside: Number = 0.0,
) -> Number:
    """Seconds to issue the instructions of all lanes: those of functions, and those `beside`."""
    cost = p["amd lane cost"] if target.vendor == "AMD" else 1.0
    each_s = slots(target) * target.sms * clock_hz * p["issue share"]
    rate = s.put("issue rate", each_s, "lane instructions/s")
    issued = s.put("lane instructions", lane_ops * cost + beside)
    return s.put("instructions", issued / rate, "s")


def sustained_hz(s: Sheet, target: Target, p: Mapping[str, Number]) -> Number:
    """The clock at which lanes issue. The board's power limit tells most where all of them work all
    the time; here they do so a part of it. Waits are at the listed clock: while an SM waits, it
    leaves its power to others."""
    sm = target.sm
    peak = target.sms * sm.fp32_lanes * sm.flops_per_lane_clock * target.clock_hz
    share = s.put("power share", sustained(target, peak, False, 32), "", "cost.power")
    return s.put("clock", target.clock_hz * share ** p["power pull"], "Hz")


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The blocks of PyTorch's pointwise kernels, all alike. Gathers, and maps of kind "scalar",
    take a cell a thread; what quantises takes as many as one load holds."""
    size = np.shape(work.points)
    if isinstance(work.detail, Windowed):
        warps = np.full(size, float(POOL_WARPS))
        return Tiles({"o": warps * target.sm.warp, "r": 1.0}, np.ones(size), warps, np.ones(size))
    warps = np.full(size, float(MAP_WARPS))
    cells = CELLS_A_THREAD
    if takes_cells(work):
        cells = 1
    elif work.kind == "quantise":
        cells = QUANTISE_BYTES * 8 // work.dtype.bits
    return Tiles({"i": warps * target.sm.warp * cells}, np.ones(size), warps, np.ones(size))


def candidates(work: Work, target: Target) -> Tiles:
    """Blocks of 1 to 16 warps, 1 to 16 cells a thread."""
    table = [
        (float(warps * target.sm.warp * cells), float(warps))
        for cells in (4, 8, 2, 16, 1)
        for warps in (4, 8, 16, 2, 1)
    ]
    cells, warps = np.array(table).T
    return Tiles({"i": cells}, np.ones(len(table)), warps, np.ones(len(table)))


FEATURES = (
    *("log bytes", "log bytes over l2", "read share", "instructions a byte"),
    "a cell at a time",
)

FAMILY = Family("stream", FACTORS, candidates, seconds, choose, features=FEATURES, bound=0.2)
