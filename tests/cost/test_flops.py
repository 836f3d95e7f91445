"""A law: no kernel is faster than its flops at the peak of its dtype."""

from __future__ import annotations

import numpy as np
import pytest

from gpuir.cost import routing, sized, tile
from gpuir.cost.nest import takes_three
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.ir.types import bf16, c64, c128, f8e4m3, f16, f32, f64, i8, tf32
from gpuir.targets.load import load_target, target_names

ROWS = 40  # kernels of each kind on each target

MATRIX = (f64, f32, f16, bf16, f8e4m3, i8, c64, c128)
LANES = (f64, f32, f16, bf16, c64, c128)


def extents(rng: np.random.Generator) -> Number:
    """As many small ones as large ones."""
    large = rng.choice([64, 100, 512, 777, 1024, 4096, 8192], ROWS)
    return np.where(rng.random(ROWS) < 0.5, rng.integers(1, 41, ROWS), large).astype(float)


def works() -> dict[str, Work]:
    rng = np.random.default_rng(1)

    def draw() -> Number:
        return extents(rng)

    def few(most: int) -> Number:
        return rng.integers(1, most, ROWS).astype(float)

    found = {f"{d} gemm": sized.gemm(draw(), draw(), draw(), d, epilogue=("bias",)) for d in MATRIX}
    found |= {f"{d} in tf32": sized.gemm(draw(), draw(), draw(), d, math=tf32) for d in (f32, c64)}
    for d in LANES:
        found[f"{d} bmm"] = sized.gemm(few(200), few(200), few(200), d, b=few(2000))
        for window, stride in ((1, 1), (3, 1), (3, 2)):
            found[f"{d} conv {window} by {stride}"] = sized.conv(
                *(few(65), 16 * few(33), (56, 56), 16 * few(33), (window, window), d),
                stride=stride,
                padding=window // 2,
            )
        for fn in ("add", "mul", "div", "exp", "tanh"):
            reads = [d] * (2 if fn in ("add", "mul", "div") else 1)
            found[f"{d} {fn}"] = sized.mapped(fn, 64 * draw() * draw(), reads, d)
        if not d.is_complex:
            found[f"{d} softmax"] = sized.rows(draw(), draw(), d, "softmax")
            found[f"{d} sum"] = sized.rows(draw(), draw(), d, "sum")
    for d in (f16, bf16, f32):
        head = rng.choice([32.0, 64.0, 128.0], ROWS)
        keys = draw()
        found[f"{d} attention"] = sized.attention(few(9), few(9), keys, keys, head, d, causal=True)
    found["experts"] = routing.mixture(draw(), 64 * few(30), 128 * few(30), 2, 8, bf16)
    return found


WORKS = works()


@pytest.mark.parametrize("name", target_names())
def test_no_kernel_is_faster_than_its_flops_at_the_peak(name: str):
    """At the clock under load. Of a convolution on the lanes those of the algorithm with fewest: a
    quarter (A. Lavin and S. Gray, CVPR 2016). Attention in f32 may multiply three times in TF32."""
    target = load_target(name)
    peaks = target.under_load
    for kind, work in WORKS.items():
        peak = peaks.peak(work.pipe, work.rate_dtype)
        if takes_three(work, target):
            peak = peaks.peak("tensor", tf32) / 3
        share = 0.25 if kind.startswith("f32 conv 3 by 1") else 1.0
        least = np.broadcast_to(work.flops * share / peak, ROWS)
        found = tile.predict(work, target)
        assert (found.time_s >= least * (1 - 1e-9)).all(), kind


@pytest.mark.parametrize("name", ["a100", "l4", "mi300x", "rtx4090", "epyc-zen5-core"])
def test_complex_products_take_at_least_their_four_real_ones(name: str):
    """At the peak: where memory bounds them less."""
    target = load_target(name)
    for whole, part in ((c64, f32), (c128, f64)):
        one = sized.gemm(4096.0, 4096.0, 4096.0, part)
        four = sized.gemm(4096.0, 4096.0, 4096.0, whole)
        assert four.flops == 4 * one.flops
        peak = target.under_load.peak("tensor", part)
        assert tile.predict(four, target).time_s[0] >= 4 * one.flops / peak
