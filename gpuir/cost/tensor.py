"""Products on matrix units: GEMM and batched GEMM in the dtypes that the target multiplies there.

Blocks of a tile of the result march along k in steps of 128 bytes. A step takes as long as its
products, its way in through the L2 or its own latency; blocks run in waves, and where they are few
they share out k. Against that stand the bytes from DRAM and the power of the board.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Factor, Family, Number, Sheet, Terms
from gpuir.cost.work import Work
from gpuir.targets.target import Target

STEP_BYTES = 128  # of k in one step: the widest swizzled row of shared memory (PTX ISA)

# Distinct weights that take turns in the measurements (README of the kernel tables: 5 or 6 copies
# of a layer): a weight is met in the L2 only if so many fit.
COPIES = 5.0

# Tiles (m, n) as the libraries have them: multiples of the matrix instruction, which spans 16 x 8
# (mma.sync), 64 x 8..256 (wgmma) or 128 x 8..256 (tcgen05; 256 rows by two SMs). PTX ISA. Either
# side may serve m or n.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "mma": (
        *((128, 128), (256, 128), (128, 256), (128, 64), (64, 128)),
        *((64, 64), (32, 64), (16, 64), (16, 128)),
    ),
    "wgmma": (
        *((128, 128), (256, 128), (128, 256), (128, 64), (64, 128)),
        *((64, 64), (32, 64), (16, 64), (16, 128)),
    ),
    "tcgen05": (
        *((128, 128), (256, 256), (256, 128), (128, 256), (128, 64), (64, 128)),
        *((32, 128), (16, 128)),
    ),
}

FACTORS = (
    Factor("compute share", 0.95, 0.5, 1.0, 0.05, "of the listed rate, in the inner loop"),
    Factor("joules mma", 1.0, 0.1, 3.0, 0.1, "pJ a 16-bit flop"),
    Factor("joules wgmma", 0.8, 0.1, 3.0, 0.1, "pJ a 16-bit flop"),
    Factor("joules tcgen05", 0.7, 0.1, 3.0, 0.1, "pJ a 16-bit flop"),
    Factor("power bend", 0.6, 0.5, 0.7, 0.0, "exponent"),
    Factor("sm bytes", 128.0, 16.0, 256.0, 0.1, "bytes a clock from the L2 into one SM"),
    Factor("l2 share", 1.5, 0.3, 3.0, 0.1, "of the listed L2 bandwidth"),
    Factor("leak mma", 0.2, 0.0, 1.0, 0.0, "of the shorter of products and feed, not hidden"),
    Factor("leak async", 0.03, 0.0, 1.0, 0.0, "of the shorter of products and feed, not hidden"),
    Factor("step clocks mma", 200.0, 20.0, 400.0, 0.1, "least clocks of a step"),
    Factor("step clocks async", 160.0, 20.0, 400.0, 0.1, "least clocks of a step"),
    Factor("tile clocks mma", 900.0, 50.0, 6000.0, 0.1, "clocks to start and finish one more tile"),
    Factor("tile clocks async", 300.0, 50.0, 6000.0, 0.1, "clocks to start and finish one more tile"),
    Factor("tail mma", 0.4, 0.0, 1.0, 0.0, "share of an unfilled wave that is lost"),
    Factor("tail async", 0.1, 0.0, 1.0, 0.0, "share of an unfilled wave that is lost"),
    Factor("dram share HBM2", 0.82, 0.5, 1.0, 0.05, "of the listed bandwidth"),
    Factor("dram share HBM3", 0.9, 0.5, 1.0, 0.05, "of the listed bandwidth"),
    Factor("dram share GDDR", 0.85, 0.5, 1.0, 0.05, "of the listed bandwidth"),
    Factor("dram ramp mma", 1.5, 0.05, 10.0, 0.1, "us until DRAM streams"),
    Factor("dram ramp async", 0.4, 0.05, 10.0, 0.1, "us until DRAM streams"),
    Factor("overlap", 0.25, 0.0, 1.0, 0.0, "of the shorter of compute and memory, not hidden"),
    Factor("split", 2.5, 0.05, 10.0, 0.1, "us to join partial sums"),
    Factor("split rate", 0.5, 0.02, 5.0, 0.1, "of the l2 rate"),
    Factor("l2 kept", 0.7, 0.01, 1.5, 0.0, "of the L2 that holds what is read again"),
    Factor("l2 weights", 0.03, 0.01, 1.5, 0.0, "of the L2 that holds weights"),
    Factor("l2 results", 0.03, 0.01, 1.5, 0.0, "of the L2 that holds results"),
    Factor("store bytes", 20.0, 4.0, 256.0, 0.1, "bytes a clock from one SM"),
)


def instruction(target: Target) -> str:
    """The matrix instruction of a target (PTX ISA); other vendors' are most like mma.sync."""
    if target.isa.startswith("sm_90"):
        return "wgmma"
    return "tcgen05" if target.isa.startswith("sm_10") else "mma"


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of a product under its tile."""
    unit = instruction(target)
    way = "mma" if unit == "mma" else "async"
    xp, sms, clock = s.xp, target.sms, target.clock_hz
    b, m, n, k = (work.extents[d] for d in ("b", "m", "n", "k"))
    tm, tn, tk = tiles.dims["m"], tiles.dims["n"], tiles.dims["k"]
    left, right = work.operands[0], work.operands[1]
    cell = work.dtype.bits / 8

    down, across = xp.ceil(m / tm), xp.ceil(n / tn)
    whole = b * down * across
    blocks = s.put("blocks", whole * tiles.split)
    steps = s.put("steps a block", xp.ceil(k / (tk * tiles.split)))
    waves = s.put("waves", blocks / sms)
    resident = tiles.warps * 0.0 + xp.maximum(
        1.0, xp.floor(target.sm.smem_bytes / (3.0 * STEP_BYTES * (tm + tn) + 1024.0))
    )
    resident = xp.minimum(resident, xp.floor(512.0 * 128 / (tm * tn)))
    resident = xp.maximum(resident, 1.0)
    together = xp.minimum(resident, xp.maximum(1.0, waves))

    peak = target.peak(work.pipe, work.dtype, tf32=work.tf32)
    product_s = 2.0 * tm * tn * tk * sms / (peak * p["compute share"])
    stage = (tm + tn) * tk * cell
    sm_rate = p["sm bytes"] * clock
    l2_rate = p["l2 share"] * target.l2_bytes_per_s / xp.minimum(blocks, sms)
    feed_s = stage / xp.minimum(sm_rate, l2_rate)
    wait_s = p[f"step clocks {way}"] / clock / together
    step_s = xp.maximum(xp.maximum(product_s, feed_s), wait_s) + p[f"leak {way}"] * xp.minimum(
        product_s, feed_s
    )
    store_s = tm * tn * work.operands[-1].cell_bytes / xp.minimum(p["store bytes"] * clock, l2_rate)
    busy = steps * step_s + p[f"tile clocks {way}"] / clock / together + store_s
    whole_waves = xp.ceil(waves)
    rounds = xp.maximum(1.0, waves + p[f"tail {way}"] * (whole_waves - waves))
    busy_s = rounds * busy
    bits = work.dtype.bits
    watts = peak * p[f"joules {unit}"] * 1e-12 * bits / 16
    available = (target.tdp_w or 1e9) * 0.75
    share = xp.minimum(1.0, (available / watts) ** p["power bend"])
    power_s = work.products / (peak * share)
    compute_s = xp.maximum(busy_s, power_s)

    l2 = target.l2_bytes * p["l2 kept"]
    out_bytes = work.operands[-1].nbytes
    turn = COPIES * right.nbytes + left.nbytes + out_bytes
    once = right.nbytes + left.nbytes + out_bytes
    cold = xp.maximum(0.0, 1.0 - p["l2 weights"] * target.l2_bytes / turn)
    cool = xp.maximum(0.0, 1.0 - p["l2 results"] * target.l2_bytes / once)
    patch = xp.minimum(whole, sms * 1.0)
    wide = xp.minimum(across, xp.maximum(xp.sqrt(patch), patch / down))
    tall = xp.minimum(down, patch / wide)
    missed = xp.maximum(0.0, 1.0 - l2 / (left.nbytes + right.nbytes))
    again_l = 1.0 + missed * (xp.maximum(1.0, across / wide) - 1.0)
    again_r = 1.0 + missed * (xp.maximum(1.0, down / tall) - 1.0)
    dram = right.nbytes * cold * again_r + left.nbytes * cool * again_l + out_bytes * cool
    dram_s = dram / (target.dram_bytes_per_s * p[f"dram share {target.dram.kind[:4]}"])
    memory_s = dram_s
    ramp = p[f"dram ramp {way}"] * 1e-6 * dram_s / (dram_s + 1e-6)
    split_s = xp.where(tiles.split > 1, p["split"] * 1e-6 + 8.0 * tiles.split * b * m * n / (p["split rate"] * target.l2_bytes_per_s), 0.0)
    latency = ramp + split_s + p["overlap"] * xp.minimum(compute_s, memory_s)
    return Terms(compute_s, memory_s, latency, work.products / peak)


@cache
def _shapes(target: Target) -> tuple[tuple[int, int], ...]:
    return SHAPES[instruction(target)]


def candidates(work: Work, target: Target) -> Tiles:
    raise NotImplementedError


def options(work: Work, target: Target) -> Tiles:
    """Each shape whole, and with k shared out among as many blocks as the device holds."""
    tk = STEP_BYTES * 8 // work.dtype.bits
    shapes = np.array(_shapes(target), float)
    tm, tn = np.repeat(shapes[:, 0], 2), np.repeat(shapes[:, 1], 2)
    b, m, n, k = (np.asarray(work.extents[d], float)[:, None] for d in "bmnk")
    blocks = b * np.ceil(m / tm) * np.ceil(n / tn)
    steps = np.ceil(k / tk)
    split = np.clip(
        np.floor(target.sms / blocks), 1, np.maximum(1, np.minimum(16, np.floor(steps / 4)))
    )
    split[:, ::2] = 1.0
    return Tiles({"m": tm, "n": tn, "k": float(tk)}, 3.0, 4.0, split)


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The tile that a library takes: of least time."""
    tiles = options(work, target)
    terms = seconds(Sheet(), work.each(lambda x: np.asarray(x, float)[..., None]), tiles, target, p)
    time = np.maximum(terms.compute, terms.memory) + terms.latency
    best = np.argmin(time, axis=1)
    rows = np.arange(len(best))
    dims = {"m": tiles.dims["m"][best], "n": tiles.dims["n"][best], "k": tiles.dims["k"]}
    return Tiles(dims, 3.0, 4.0, tiles.split[rows, best])


FAMILY = Family("tensor", FACTORS, candidates, seconds, (), 0.0, choose)
