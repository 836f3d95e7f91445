"""Kernels on a CPU: arithmetic on the SIMD lanes of its cores, or bytes from the cache, or the
memory, that holds them; whichever is slower.

The roofline of Williams, Waterman, Patterson (CACM 52(4), 2009), with a ceiling for each level of
memory and the shares of its ceilings that libraries reach. There are no tiles: a CPU's libraries
block for caches that they share with nobody, and what they lose is in the shares.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Factor, Family, Number, Sheet, Terms
from gpuir.cost.work import OWN_LANE_OPS, Work
from gpuir.ir.types import f32
from gpuir.targets.target import Target

# Work below which a kernel stays on one core, so that so many pieces keep so many cores busy:
# cells of a map or a reduction (at::internal::GRAIN_SIZE in PyTorch's TensorIterator.h), flops of a
# contraction (assumed: a product of 64 by 64 by 64).
GRAIN_CELLS = 32768
GRAIN_FLOPS = 2 * 64**3
# Bytes a clock from a core's own caches: Intel 64 and IA-32 Architectures Optimization Reference
# Manual, cache hierarchy of Skylake Server and later (64 from L2 to L1).
PRIVATE_BYTES_PER_CLOCK = 64
# A store to memory first reads its line: McCalpin, STREAM, on counting bytes (write allocate).
DRAM_WRITES = 2.0
# Half of a footprint so many times a cache's size comes from it, and the sharper the power the
# fewer in between. Assumed: least-recently-used replacement drops data just before it is read
# again, other data take a part.
HELD_SHARE, HELD_POWER = 0.75, 4.0
# A product first brings its operands into the order that its inner loop reads (Goto, van de Geijn,
# ACM TOMS 34(3), 2008), one with a vector does not. Times that they are moved for it: measured.
PACKED = 1.5
# A transpose uses a part of each line it touches: measured against a copy.
TRANSPOSED = 4.0
# Instructions of a result's address and store that a GPU's thread issues for each cell and a SIMD
# loop once for a word of them.
SHARED_OPS = OWN_LANE_OPS - 1
SUM_OPS = 0.25  # of what else an instruction takes, an addition to a sum: measured
ROW_CLOCKS = 60.0  # a row of a softmax or norm begins and ends: measured on norms of short rows

_MEASURED = "measured on two cores of an AMD EPYC (Zen 5) under PyTorch 2.13"
FACTORS = (
    Factor("product share", 0.44, 0.05, 1.0, 0.3, f"of the peak, in f32 products; {_MEASURED}"),
    Factor("narrow product share", 0.93, 0.05, 1.0, 0.3, f"of theirs, in narrower; {_MEASURED}"),
    Factor("convolution share", 0.65, 0.05, 2.0, 0.3, f"of the peak, in convolutions; {_MEASURED}"),
    Factor("attention share", 0.38, 0.02, 1.0, 0.3, f"of the peak, in attention; {_MEASURED}"),
    Factor("lane share", 0.28, 0.02, 1.0, 0.3, f"of it, in all other arithmetic; {_MEASURED}"),
    Factor("dram share", 1.0, 0.2, 2.0, 0.2, f"of the memory's bandwidth; {_MEASURED}"),
    Factor("cache share", 0.8, 0.1, 2.0, 0.3, f"of the shared cache's bandwidth; {_MEASURED}"),
    Factor("private share", 0.4, 0.05, 1.5, 0.3, f"of 64 bytes a clock and core; {_MEASURED}"),
)
THREAD_START_S = 3e-6  # to wake the other cores; assumed


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """Cores divide the work as far as it goes; each then computes, or waits for bytes."""
    xp = s.xp
    multiplies = work.kernel in _SHARES
    pieces = work.products * work.visible / GRAIN_FLOPS if multiplies else work.points / GRAIN_CELLS
    cores = xp.minimum(xp.maximum(pieces, 1.0), float(target.sms))
    cores = s.put("cores at work", cores, "", "cost.cpu.GRAIN_CELLS, GRAIN_FLOPS")
    share = cores / target.sms
    peak = s.put("peak", target.peak(work.pipe, work.dtype, tf32=work.tf32), "flop/s")
    lanes = target.peak("vector", f32) / target.sm.flops_per_lane_clock
    flops = work.products * work.visible
    stored = sum((o.nbytes / o.cell_bytes for o in work.operands if o.role == "written"), 0.0)
    lane_ops = work.lane_ops
    if not multiplies:
        lane_ops = xp.maximum(lane_ops - SHARED_OPS * stored, 0.0)
    if work.kind == "sum":
        lane_ops = lane_ops * SUM_OPS
    compute = lane_ops / (lanes * p["lane share"] * share)
    if multiplies:
        narrow = work.kernel in ("k.gemm", "k.experts") and work.dtype.bits < 32
        reached = p["narrow product share" if narrow else _SHARES[work.kernel]]
        compute = compute + flops / (peak * reached * share)
    elif work.reduced and work.kind != "sum":
        compute = compute + work.output_points * ROW_CLOCKS / (target.clock_hz * cores)
    memory = _memory_s(s, work, cores, target, p)
    wait = THREAD_START_S * (cores - 1.0) / max(target.sms - 1.0, 1.0)
    if work.kernel in ("k.gemm", "k.experts"):
        vector = xp.minimum(work.extents["m"], work.extents["n"]) <= 1
        wait = wait + xp.where(vector, 0.0, PACKED * memory)
    roof = 0.0 if work.kernel == "k.conv" else flops / peak  # Winograd multiplies less
    return Terms(s.put("arithmetic", compute, "s"), memory, s.put("waiting", wait, "s"), roof)


_SHARES = {
    "k.gemm": "product share",
    "k.experts": "product share",
    "k.conv": "convolution share",
    "k.attention": "attention share",
}


def _memory_s(
    s: Sheet, work: Work, cores: Number, target: Target, p: Mapping[str, Number]
) -> Number:
    """Each byte once, from the nearest level that holds all of them: of a table that is gathered
    from, all of it."""
    read = sum((o.nbytes for o in work.operands if o.role != "written"), 0.0)
    footprint = s.put("footprint", s.xp.maximum(work.nbytes, 1.0), "bytes")
    near, away = _byte_s(s, footprint, cores, target, p)
    read_s, write_s = near + away, near + DRAM_WRITES * away
    memory = read * read_s + (work.nbytes - read) * write_s
    if work.kernel == "k.gather":
        table = work.operands[0].nbytes
        around = s.put("table", s.xp.maximum(footprint, work.trait("table")), "bytes")
        memory = memory + table * (sum(_byte_s(s, around, cores, target, p)) - read_s)
    if work.kind == "transpose":
        memory = memory * TRANSPOSED
    return s.put("memory", memory, "s", "cost.cpu.DRAM_WRITES, TRANSPOSED")


def _byte_s(
    s: Sheet, footprint: Number, cores: Number, target: Target, p: Mapping[str, Number]
) -> tuple[Number, Number]:
    """Seconds a byte of a footprint takes in caches and in memory, by what each level holds."""
    own = s.put("held by the cores", _held(footprint, target.sm.smem_bytes * cores))
    shared = s.put("held by the shared cache", _held(footprint, target.l2_bytes))
    own_rate = PRIVATE_BYTES_PER_CLOCK * target.clock_hz * cores * p["private share"]
    own_rate = s.put("cores' caches", own_rate, "bytes/s", "cost.cpu.PRIVATE_BYTES_PER_CLOCK")
    shared_rate = target.l2_bytes_per_s * cores / target.sms * p["cache share"]
    shared_rate = s.put("shared cache", shared_rate, "bytes/s")
    dram_rate = s.put("memory's rate", target.dram_bytes_per_s * p["dram share"], "bytes/s")
    near = own / own_rate + (1 - own) * shared / shared_rate
    return near, (1 - own) * (1 - shared) / dram_rate


def _held(footprint: Number, size: Number) -> Number:
    """The share of a footprint that comes from a cache of a size."""
    return 1.0 / (1.0 + (footprint / (HELD_SHARE * size)) ** HELD_POWER)


def whole(work: Work, target: Target) -> Tiles:
    """One tile that cuts nothing, whatever the kernel."""
    one = np.ones(np.shape(work.points))
    return Tiles({}, one, one, one)


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    return whole(work, target)


FAMILY = Family("cpu", FACTORS, whole, seconds, choose)
