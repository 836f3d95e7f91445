"""Convolutions on the lanes: the fastest of the ways that cuDNN has.

Implicit GEMM multiplies windows of the input by the filters, tile by tile, whatever the window.
Windows of 3 x 3 with stride 1 have two more, with fewer products (Lavin and Gray, "Fast Algorithms
for Convolutional Neural Networks", CVPR 2016): F(2x2, 3x3) in one kernel, 16 products for 36, and
F(4x4, 3x3), 36 for 144, as a batched GEMM between passes that transform its operands and its result.
With few channels a group there is nothing to share between threads: each output sums its own window.
Which one runs is not written down: with cudnn.benchmark, the fastest.

On matrix units a convolution is implicit GEMM, and the family of products describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.cost.power import sustained
from gpuir.cost.sheet import Factor, Family, Number, Sheet, Terms
from gpuir.cost.work import Work
from gpuir.ir.types import f32
from gpuir.targets.target import Target

# Tiles of implicit GEMM: cells of the output (of all images) by filters. As in the kernels' names.
TILES = ((128.0, 64.0), (128.0, 128.0), (128.0, 32.0))

# Of F(2x2, 3x3): images, and tiles of 2 x 2 outputs down and across, that a block takes: 32 tiles.
# From the kernels' names and grids; it takes 32 filters at a time.
PATCHES = ((1, 4, 8), (2, 2, 8), (2, 4, 4), (4, 1, 8), (4, 2, 4), (4, 4, 2))
FILTERS = 32.0

# Tiles of the batched GEMM of F(4x4, 3x3): tiles of 4 x 4 outputs by filters, as in the names.
BATCHED = ((32.0, 128.0), (64.0, 64.0), (128.0, 64.0))

FACTORS = (
    Factor("compute share", 0.85, 0.3, 1.0, 0.1, "of the listed lane rate that the board feeds"),
    Factor("joule share", 0.8, 0.0, 2.0, 0.0, "exponent of the share of peak that it feeds"),
    Factor("load slots", 15.0, 0.0, 60.0, 0.0, "issue slots to bring an operand cell into a tile"),
    Factor("window slots", 0.1, 0.0, 2.0, 0.0, "of a product's slots, to find its input cell"),
    Factor("tile clocks", 4000.0, 200.0, 30000.0, 0.1, "a block's start, first loads, last stores"),
    Factor("tail", 0.6, 0.0, 1.0, 0.0, "of the last wave's idle time, lost"),
    Factor("fused slots", 0.3, 0.0, 3.0, 0.0, "F(2x2): of a product's slots, transforming"),
    Factor("dram share", 0.75, 0.3, 1.0, 0.1, "of the listed DRAM bandwidth"),
    Factor("pass share", 0.7, 0.2, 2.0, 0.1, "of the listed DRAM bandwidth, in transforms"),
    Factor("overlap", 0.3, 0.0, 1.0, 0.0, "of the shorter of compute and memory, not hidden"),
    Factor("start", 3e-6, 1e-7, 5e-5, 0.1, "seconds for each kernel of a convolution"),
    Factor("direct share", 0.15, 0.02, 0.6, 0.0, "of the lane rate, each output by itself; assumed"),
)


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    xp = s.xp
    peak = s.put("peak", target.peak("vector", work.dtype), "flop/s")
    fed = sustained(target, target.peak("vector", f32), False, 32).share
    rate = s.put("rate", peak * p["compute share"] * fed ** p["joule share"], "flop/s")
    implicit = _implicit(s, work, tiles, target, p, rate)
    direct = _direct(s, work, target, p, rate)
    compute, memory, latency = _fastest(s, implicit, direct)
    if work.dtype == f32:
        plain = 1.0 * (work.trait("widest") == 3) * (work.trait("window") == 9)
        plain = plain * (work.trait("stride", 1.0) == 1) * (work.trait("dilation", 1.0) == 1)
        for way in (_fused(s, work, target, p, rate), _passes(s, work, target, p, rate)):
            allowed = tuple(t / xp.maximum(plain, 1e-9) for t in way)
            compute, memory, latency = _fastest(s, (compute, memory, latency), allowed)
    return Terms(compute, memory, latency, 0.0 * compute)


Three = tuple[Any, Any, Any]  # seconds of compute, memory, latency


def _fastest(s: Sheet, one: Three, other: Three) -> Three:
    times = [s.xp.maximum(c, m) + rest for c, m, rest in (one, other)]
    first = times[0] <= times[1]
    return tuple(s.xp.where(first, a, b) for a, b in zip(one, other, strict=True))


def _gemm(
    s: Sheet, target: Target, p: Mapping[str, Number], rate: Number, count: Number, m: Number, n: Number, depth: Number, slots: Number
) -> Number:
    """Seconds of `count` tiles of m by n, `depth` deep, each multiply-add `slots` issue slots more
    than its operands' loads."""
    rounds = count / target.sms
    rounds = s.xp.maximum(1.0, rounds + p["tail"] * (s.xp.ceil(rounds) - rounds))
    products = 2 * m * n * depth * (1 + slots + p["load slots"] * (1 / m + 1 / n))
    return rounds * (products * target.sms / rate + p["tile clocks"] / target.clock_hz)


def _shape(s: Sheet, work: Work) -> tuple[Number, Number, Number, Number, Number]:
    """Groups, outputs of all images, filters and channels a group, images."""
    b, m, n, k = (work.extents[d] for d in "bmnk")
    channels = k / work.trait("window", 1.0)
    x = work.operands[0]
    images = x.nbytes / (x.cell_bytes * b * channels * work.trait("cells", 1.0))
    return b, m, n, channels, s.xp.maximum(images, 1.0)


def _implicit(
    s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number], rate: Number
) -> Three:
    b, m, n, k = (work.extents[d] for d in "bmnk")
    tm, tn = tiles.along("m", work, s), tiles.along("n", work, s)
    count = s.put("blocks", b * s.xp.ceil(m / tm) * s.xp.ceil(n / tn))
    compute = _gemm(s, target, p, rate, count, tm, tn, k, p["window slots"])
    memory = work.nbytes / (target.dram_bytes_per_s * p["dram share"])
    latency = p["overlap"] * s.xp.minimum(compute, memory) + p["start"]
    return s.put("implicit gemm", compute, "s"), memory, latency


def _direct(s: Sheet, work: Work, target: Target, p: Mapping[str, Number], rate: Number) -> Three:
    compute = work.products / (rate * p["direct share"])
    memory = work.nbytes / (target.dram_bytes_per_s * p["dram share"])
    return compute, memory, p["start"] + 0.0 * compute


def _fused(s: Sheet, work: Work, target: Target, p: Mapping[str, Number], rate: Number) -> Three:
    xp = s.xp
    b, m, n, channels, images = _shape(s, work)
    side = xp.sqrt(m / images)
    patches: Any = None
    for count, down, across in PATCHES:
        found = xp.ceil(images / count) * xp.ceil(side / (2 * down)) * xp.ceil(side / (2 * across))
        patches = found if patches is None else xp.minimum(patches, found)
    blocks = b * patches * xp.ceil(n / FILTERS)
    compute = _gemm(s, target, p, rate, blocks, 128.0, 128.0, channels, p["fused slots"])
    weights = work.operands[1].nbytes
    filters = weights * (1 + 16 / 9) / (target.dram_bytes_per_s * p["pass share"])
    memory = work.nbytes / (target.dram_bytes_per_s * p["dram share"])
    latency = p["overlap"] * xp.minimum(compute, memory) + filters + 2 * p["start"]
    return s.put("winograd 2x2", compute, "s"), memory, latency


def _passes(s: Sheet, work: Work, target: Target, p: Mapping[str, Number], rate: Number) -> Three:
    xp = s.xp
    b, m, n, channels, images = _shape(s, work)
    side = xp.sqrt(m / images)
    spots = images * xp.ceil(side / 4) ** 2
    compute: Any = None
    for tm, tn in BATCHED:
        count = 36 * b * xp.ceil(spots / tm) * xp.ceil(n / tn)
        found = _gemm(s, target, p, rate, count, tm, tn, channels, 0.0)
        compute = found if compute is None else xp.minimum(compute, found)
    cell = work.dtype.bits / 8
    x, w, y = (o.nbytes for o in work.operands[:3])
    inputs, outputs = 36 * spots * channels * b * cell, 36 * spots * n * b * cell
    memory = (inputs + 4 * w + outputs) / (target.dram_bytes_per_s * p["dram share"])
    passes = (x + inputs + 5 * w + outputs + y) / (target.dram_bytes_per_s * p["pass share"])
    latency = p["overlap"] * xp.minimum(compute, memory) + passes + 4 * p["start"]
    return s.put("winograd 4x4", compute, "s"), memory, latency


def candidates(work: Work, target: Target) -> Tiles:
    """The tiles of implicit GEMM, whose k goes in steps of 8."""
    m, n = np.array(TILES).T
    return Tiles({"b": 1.0, "m": m, "n": n, "k": 8.0}, 2.0, 4.0)


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The tile of least time."""
    column = work.each(lambda x: np.asarray(x, float)[..., None])
    tiles = candidates(work, target)
    terms = seconds(Sheet(), column, tiles, target, p)
    best = np.argmin(np.maximum(terms.compute, terms.memory) + terms.latency, axis=-1)
    return tiles.each(lambda x: np.asarray(x)[best] if np.ndim(x) else x)


FAMILY = Family("conv", FACTORS, candidates, seconds, choose=choose)
