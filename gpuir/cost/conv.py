"""Convolutions on the lanes: the fastest of the ways that cuDNN has.

Implicit GEMM multiplies windows of the input by the filters, tile by tile, whatever the window.
Windows of 3 x 3 with stride 1 have two more, with fewer products (Lavin and Gray, "Fast Algorithms
for Convolutional Neural Networks", CVPR 2016): F(2x2, 3x3) in one kernel, 16 products for 36, and
F(4x4, 3x3), 36 for 144, as a batched GEMM between passes that transform its operands and its
result. With few channels a group there is nothing to share between threads: each output sums its
own window. Which one runs is what cudnn.benchmark finds: the fastest; of depthwise ones that are
ATen's, the last.

On matrix units a convolution is implicit GEMM, and the family of products describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gpuir.cost.data import table, tiles_of
from gpuir.cost.family import Family, FormulaInputs, Terms, fastest
from gpuir.cost.nest import Tiles
from gpuir.cost.power import lane_j
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.stream import slots
from gpuir.cost.work import ConvShape, Work
from gpuir.ir.types import f32
from gpuir.targets.target import Target

FILTERS = 32.0

# Tiles of the batched GEMM of F(4x4, 3x3): tiles of 4 x 4 outputs by filters, as in the names. The
# images are filled up to a multiple, as the grids show.
IMAGES = 16.0

FEWEST = 36 / 144  # products that F(4x4, 3x3) has, of those of the windows

# Channels a group from which products are shared between threads.
FEW_CHANNELS = 8.0

# Instructions of a lane for each cell of a window, where each output sums its own: of cuDNN's
# kernels assumed, with operands in registers for several outputs; of ATen's counted in
# cuda/DepthwiseConv2d.cu, of windows that its compiler knows (1, 3 x 3) and others: bounds, an
# offset, two loads, two conversions, a multiply-add, and a loop. The gradient of images finds its
# output by division, that of weights its place in the image for each cell. What each result takes
# besides, to find its place by three divisions and wait for its first loads, is read off published
# times: between what A100 and V100 say (convnets.csv, EfficientNet in f32), 200 and less than 50,
# and 200 of H100 and 350 of RTX A6000 (KernelBench, level 1, problem 84).
CUDNN_SLOTS = 5.0
ATEN_SLOTS = (9.0, 15.0)
ATEN_GRADIENT_SLOTS = 2.0
ATEN_WEIGHT_SLOTS = 35.0
ATEN_PLACE_SLOTS = 150.0

FACTORS = table("factors/conv", Factor)


class ConvWay(NamedTuple):
    """Seconds of arithmetic, of memory, and of what neither hides; bytes from and to DRAM;
    instructions of lanes, where they say more than the products do."""

    compute: Any
    memory: Any
    rest: Any
    dram_bytes: Any
    issued: Any


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of the fastest way that there is for a convolution."""
    x = FormulaInputs(s, work, tiles, target, p)
    best = _direct(x)
    if work.detail_as(ConvShape).library != "aten":
        best = _shared(x, best)
    s.put("dram bytes", best.dram_bytes, "bytes", "of the way taken")
    s.put("lane instructions", best.issued, "", "of the way taken")
    return Terms(best.compute, best.memory, best.rest, 0.0 * best.compute)


def _shared(x: FormulaInputs, direct: ConvWay) -> ConvWay:
    """The fastest of the ways that share products between threads, and of `direct` where groups
    have few channels."""
    s, work = x.s, x.work
    peak = s.put("peak", x.target.peak("vector", work.dtype), "flop/s")
    rate = s.put("rate", peak * x.p["compute share"], "flop/s")
    window = work.detail_as(ConvShape)
    few = 1.0 * (work.extents["b"] > 1) * (work.extents["k"] < FEW_CHANNELS * window.taps)
    best = _faster(s, _implicit(x, rate), direct, few)
    if work.dtype == f32:
        for way in (_fused(x, rate), _passes(x, rate)):
            best = _faster(s, best, way, 1.0 * _has_fewer(window))
    return best


def _has_fewer(window: ConvShape) -> Number:
    """Whether there are algorithms with fewer products than a window has cells."""
    dense = (window.stride == 1) * (window.dilation == 1)
    return dense * (window.widest == 3) * (window.taps == 9)


def least_share(s: Sheet, work: Work) -> Number:
    """The share of its flops that the algorithm of a kernel does at least: all, but of an f32
    convolution with a window of 3 x 3 the 36 of 144 products that F(4x4, 3x3) has."""
    if not isinstance(work.detail, ConvShape) or work.dtype != f32:
        return 1.0
    return s.xp.where(_has_fewer(work.detail) > 0, FEWEST, 1.0)


def _slower(x: FormulaInputs, run_s: Number, flops: Number) -> Number:
    """How much longer arithmetic takes at the clock that the board's power allows, on average over
    the `run_s` of a convolution."""
    s, target, p = x.s, x.target, x.p
    if target.tdp_w is None:
        return 1.0
    joules = lane_j(target, x.work.dtype.bits)
    joules = s.put("energy of a flop", joules, "J", "cost.power.lane_j")
    run_s = s.put("time at the full clock", run_s, "s")
    watts = s.put("power wanted", flops * p["joules"] * joules / run_s, "W")
    return s.xp.maximum(1.0, watts / (target.tdp_w * (1 - p["idle"]))) ** p["bend"]


def _faster(s: Sheet, one: ConvWay, other: ConvWay, allowed: Number = 1.0) -> ConvWay:
    """The other way, where it is allowed and takes less."""
    times = [s.xp.maximum(way.compute, way.memory) + way.rest for way in (one, other)]
    taken = allowed * (times[1] < times[0]) > 0
    return ConvWay(*(s.xp.where(taken, b, a) for a, b in zip(one, other, strict=True)))


def _gemm(x: FormulaInputs, way: str, count: Number, products_s: Number) -> Number:
    """Seconds of `count` tiles, of which the products of one take `products_s` of an SM."""
    s, target, p = x.s, x.target, x.p
    waves = s.put(f"{way}: waves", count / target.sms)
    rounds = s.xp.maximum(1.0, waves + p["tail"] * (s.xp.ceil(waves) - waves))
    rounds = s.put(f"{way}: rounds of the busiest SM", rounds)
    products_s = s.put(f"{way}: products of a tile", products_s, "s")
    return rounds * (products_s + p[f"start {way}"] * 64 / target.sm.fp32_lanes / target.clock_hz)


def _products(x: FormulaInputs, rate: Number, m: Number, n: Number, depth: Number) -> Number:
    """Seconds of the products of a tile of m by n, `depth` deep, on one SM, its loads among them.

    Each operand cell costs issue slots, for m n multiply-adds m + n of them.
    """
    slots = 1 + x.p["load slots"] * (1 / m + 1 / n)
    return x.work.multiply_add * m * n * depth * slots * x.target.sms / rate


def _shape(s: Sheet, work: Work) -> tuple[Number, Number, Number, Number, Number]:
    """Groups, outputs of all images, filters and channels a group, images."""
    b, m, n, k = (work.extents[d] for d in "bmnk")
    window = work.detail_as(ConvShape)
    channels = k / window.taps
    x = work.operands[0]
    images = x.nbytes / (x.cell_bytes * b * channels * window.cells)
    return b, m, n, channels, s.xp.maximum(images, 1.0)


def _implicit(x: FormulaInputs, rate: Number) -> ConvWay:
    s, work, tiles, target, p = x
    b, m, n, k = (work.extents[d] for d in "bmnk")
    tm, tn = tiles.along("m", work, s), tiles.along("n", work, s)
    k = k / work.detail_as(ConvShape).zeros
    count = s.put("blocks", b * s.xp.ceil(m / tm) * s.xp.ceil(n / tn))
    compute = _gemm(x, "implicit gemm", count, _products(x, rate, tm, tn, k))
    memory = work.nbytes / (target.dram_bytes_per_s * p["dram share"])
    flops = work.multiply_add * count * tm * tn * k
    return _way(x, "implicit gemm", compute, memory, flops=flops, rest=p["start"])


def _direct(x: FormulaInputs) -> ConvWay:
    """Each output's window by itself: the instructions for each of its cells, or memory. ATen's
    gradient of images goes through the window of each cell, whatever the stride leaves of it."""
    s, work, target, p = x.s, x.work, x.target, x.p
    window, weights = work.detail_as(ConvShape), work.form == "of weights"
    each, cells = CUDNN_SLOTS, work.products / 2
    if window.library == "aten":
        each = s.xp.where((window.taps == 1) + (window.taps == 9) > 0, *ATEN_SLOTS)
        if weights:
            each = ATEN_WEIGHT_SLOTS
        elif window.transposed:
            each, cells = each + ATEN_GRADIENT_SLOTS, cells * window.stride**2
    cells = s.put("direct: cells of windows", cells)
    each = s.put("direct: instructions for each", each, "", "cost.conv")
    places = 0.0 * cells
    if window.library == "aten" and not weights:
        places = s.put("direct: results", cells / window.taps)
    done = s.put("direct: lane instructions", cells * each + places * ATEN_PLACE_SLOTS)
    issued = slots(target) * target.sms * target.clock_hz * p["compute share"]
    compute = done / issued
    compute = s.put("direct: instructions", compute, "s")
    share = p["dram share"] if weights else p["direct dram share"]
    memory = work.nbytes / (target.dram_bytes_per_s * share)
    memory = s.put("direct: memory", memory, "s")
    return ConvWay(compute, memory, p["start"] + 0.0 * compute, work.nbytes + 0.0 * compute, done)


def _fused(x: FormulaInputs, rate: Number) -> ConvWay:
    s, work, target, p = x.s, x.work, x.target, x.p
    xp = s.xp
    b, m, n, channels, images = _shape(s, work)
    side = xp.sqrt(m / images)
    patches: Any = None
    for count, down, across in tiles_of("winograd 2x2"):
        found = xp.ceil(images / count) * xp.ceil(side / (2 * down)) * xp.ceil(side / (2 * across))
        patches = found if patches is None else xp.minimum(patches, found)
    blocks = b * patches * xp.ceil(n / FILTERS)
    products = _products(x, rate, 128.0, 128.0, channels) * (1 + p["fused slots"])
    compute = _gemm(x, "winograd 2x2", blocks, products)
    weights = work.operands[1].nbytes
    filters = weights * (1 + 16 / 9) / (target.dram_bytes_per_s * p["filter share"])
    memory = work.nbytes / (target.dram_bytes_per_s * p["dram share"])
    flops = 2 * blocks * 128 * 128 * channels
    rest = filters + 2 * p["start"]
    return _way(x, "winograd 2x2", compute, memory, flops=flops, rest=rest)


def _passes(x: FormulaInputs, rate: Number) -> ConvWay:
    s, work, target, p = x.s, x.work, x.target, x.p
    xp = s.xp
    b, m, n, channels, images = _shape(s, work)
    side = xp.sqrt(m / images)
    spots = IMAGES * xp.ceil(images / IMAGES) * xp.ceil(side / 4) ** 2
    compute: Any = None
    for _, tm, tn in tiles_of("winograd 4x4"):
        count = 36 * b * xp.ceil(spots / tm) * xp.ceil(n / tn)
        found = _gemm(x, "winograd 4x4", count, _products(x, rate, tm, tn, channels))
        compute = found if compute is None else xp.minimum(compute, found)
    cell = work.dtype.bits / 8
    image, w, y = (o.nbytes for o in work.operands[:3])
    inputs, outputs = 36 * spots * channels * b * cell, 36 * spots * n * b * cell
    memory = (inputs + 4 * w + outputs) / (target.dram_bytes_per_s * p["dram share"])
    passes = (image + inputs + outputs + y) / (target.dram_bytes_per_s * p["pass share"])
    passes = passes + 5 * w / (target.dram_bytes_per_s * p["filter share"])
    flops = 2 * 36 * spots * n * b * channels
    rest = passes + 4 * p["start"]
    return _way(x, "winograd 4x4", compute, memory, flops=flops, rest=rest)


def _way(
    x: FormulaInputs, name: str, compute: Number, memory: Number, *, flops: Number, rest: Number
) -> ConvWay:
    """Compute at the clock that power allows, memory, and what neither hides nor is hidden."""
    s, target, p = x.s, x.target, x.p
    run_s = s.xp.maximum(compute, memory) + rest
    compute = compute * _slower(x, run_s, flops)
    compute = s.put(f"{name}: arithmetic", compute, "s", "at the clock that power allows")
    memory = s.put(f"{name}: memory", memory, "s")
    rest = s.put(f"{name}: rest", p["overlap"] * s.xp.minimum(compute, memory) + rest, "s")
    s.put(name, s.xp.maximum(compute, memory) + rest, "s")
    moved = memory * target.dram_bytes_per_s * p["dram share"]
    return ConvWay(compute, memory, rest, moved, 0.0 * compute)


def candidates(work: Work, target: Target) -> Tiles:
    """The tiles of implicit GEMM, whose k goes in steps of 8."""
    _, m, n = np.array(tiles_of("implicit gemm"), float).T
    return Tiles({"b": 1.0, "m": m, "n": n, "k": 8.0}, 2.0, 4.0)


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The tile of least time."""
    return fastest(seconds, work, candidates(work, target), target, p)


FAMILY = Family("conv", FACTORS, candidates, seconds, choose)
