"""Convolutions: which way is the fastest, and what bounds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuir.cost import conv, tensor
from gpuir.cost.families import family_of
from gpuir.cost.sheet import Sheet
from gpuir.cost.sized import conv as convolution
from gpuir.cost.tile import predict
from gpuir.cost.work import Work
from gpuir.ir.types import f16, f32
from gpuir.targets.load import load_target

P100, T4, H100 = (load_target(name) for name in ("p100-pcie-16gb", "t4", "h100-sxm-80gb"))


def square(images: Any, channels: Any, size: Any, filters: Any, window: int = 3, **more: Any):
    given: dict[str, Any] = {"dtype": f32, "padding": window // 2, **more}
    return convolution(images, channels, (size, size), filters, (window, window), **given)


def seconds(work: Work, target: Any = P100) -> float:
    return float(predict(work, target, model={}).time_s[0])


def sheet(work: Work) -> Sheet:
    s = Sheet()
    p = {f.name: f.value for f in conv.FAMILY.factors}
    conv.seconds(s, work, conv.choose(work, P100, p), P100, p)
    return s


def test_families():
    assert family_of(square(8, 64, 56, 64), P100) is conv.FAMILY
    assert family_of(square(8, 64, 56, 64, dtype=f16), H100) is tensor.FAMILY
    assert family_of(square(8, 64, 56, 64, dtype=f16, groups=64), H100) is conv.FAMILY


def test_winograd_beats_the_peak():
    """2 x 32 x 256 x 56 x 56 x 256 x 9 flops are 118 Gflop: 12.4 ms at the peak of 9.5 Tflop/s."""
    work = square(32, 256, 56, 256)
    assert work.products == 2 * 32 * 256 * 56 * 56 * 256 * 9
    assert seconds(work) < work.products / P100.peak("vector", f32)
    assert sheet(work).values["winograd 4x4"] < sheet(work).values["implicit gemm"]


@pytest.mark.parametrize("other", [{"stride": 2}, {"dilation": 2, "padding": 2}])
def test_winograd_is_for_dense_windows(other: dict[str, int]):
    work = square(32, 256, 56, 256, **other)
    assert seconds(work) > 0.7 * work.products / P100.peak("vector", f32)


def test_other_windows_are_implicit_gemm():
    for window in (1, 5, 7):
        work = square(32, 256, 28, 256, window)
        assert seconds(work) > work.products / P100.peak("vector", f32)


def test_depthwise_is_bound_by_memory():
    """32 x 512 x 28 x 28 cells of 4 bytes read and written: 103 MB, 0.14 ms at 732 GB/s."""
    work = square(32, 512, 28, 512, groups=512)
    memory = work.nbytes / P100.dram_bytes_per_s
    assert memory < seconds(work) < 5 * memory


def test_images_are_filled_up_to_sixteen():
    """F(4x4) computes 16, 32, ... images: of 17 it computes as many as of 32."""
    work = square(np.array([16, 17, 32]), 512, 14, 512)
    batched = sheet(work).values["winograd 4x4: memory"]
    assert batched[1] == batched[2] > batched[0]


def test_measured_rows():
    """NeuSight conv.parquet, P100: 64 x 168 x 32 x 32 by 196 filters and others, within a third."""
    rows = {(57, 262, 15, 571): 1994e-6, (52, 997, 27, 44): 3573e-6, (42, 252, 12, 1287): 2478e-6}
    for (images, channels, size, filters), measured in rows.items():
        found = seconds(square(images, channels, size, filters))
        assert measured / 1.34 < found < measured * 1.34


def test_many_at_once():
    many = predict(square(np.array([1, 8, 64]), 64, 56, 64), T4, model={}).time_s
    each = [seconds(square(n, 64, 56, 64), T4) for n in (1, 8, 64)]
    np.testing.assert_allclose(many, each)
    assert np.all(np.diff(many) > 0)
