"""Corrections by what was measured nearby: how far they reach, what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gpuir
from gpuir.cost import local, sized, work
from gpuir.cost.tile import predict
from gpuir.ir.types import f16, f32
from gpuir.targets.load import dump_target, load_target
from gpuir.targets.target import FrozenTable

A100 = load_target("a100")
ROWS = sized.rows(4096.0, 1024.0, f32, "softmax")
ENCODER = Path(__file__).parents[2] / "tests" / "encoder.onnx"


def knowing(*measured: tuple[work.Work, float], target=A100):
    """The target, with works that took so many times what was predicted."""
    points = {f"{local.label(w)}.{local.point(local.columns(w))}": ratio for w, ratio in measured}
    return replace(target, local=FrozenTable(points))


def ratio(w: work.Work, target) -> float:
    """The time on the device with corrections, over that without."""
    launch = target.launch_s
    times = [
        predict(w, t, model={}).time_s[0] - launch
        for t in (target, replace(target, local=FrozenTable()))
    ]
    return times[0] / times[1]


def test_the_kernel_measured_is_corrected_and_one_far_off_is_not():
    there = knowing((ROWS, 1.2))
    part = local.WIDE**2 + local.NARROW**2
    exactly = 1.2 ** (part / (part + local.NOISE**2))
    assert ratio(ROWS, there) == pytest.approx(exactly, rel=1e-3)
    assert 1.05 < ratio(sized.rows(8192.0, 1024.0, f32, "softmax"), there) < exactly
    assert ratio(sized.rows(4.0, 16.0, f32, "softmax"), there) == pytest.approx(1, abs=0.02)


def test_other_kernels_are_left_alone():
    there = knowing((ROWS, 1.2))
    others = (
        sized.pointwise(4096.0 * 1024, (f32,), (f32,)),
        sized.gemm(4096.0, 1024.0, 64.0, f32),
    )
    assert [ratio(w, there) for w in others] == [1, 1]


def test_another_dtype_is_corrected_less():
    there = knowing((ROWS, 1.2))
    narrow = ratio(sized.rows(4096.0, 1024.0, f16, "softmax"), there)
    assert 1.03 < narrow < ratio(ROWS, there) - 0.03


def test_what_many_agree_on_counts_more():
    rows = [(sized.rows(4096.0 + 64 * i, 1024.0, f32, "softmax"), 1.2) for i in range(8)]
    assert ratio(ROWS, knowing(rows[0])) < ratio(ROWS, knowing(*rows)) < 1.21


def test_a_correction_is_bounded():
    rows = [(sized.rows(4096.0 + 64 * i, 1024.0, f32, "softmax"), 9.0) for i in range(20)]
    assert ratio(ROWS, knowing(*rows)) == pytest.approx(np.exp(local.BOUND))


def test_many_kernels_at_once_are_as_each_alone():
    there = knowing((ROWS, 1.2), (sized.rows(64.0, 8192.0, f32, "softmax"), 0.8))
    many = sized.rows(
        np.array([4096.0, 64.0, 512.0]), np.array([1024.0, 8192.0, 512.0]), f32, "softmax"
    )
    each = [
        sized.rows(o, r, f32, "softmax")
        for o, r in ((4096.0, 1024.0), (64.0, 8192.0), (512.0, 512.0))
    ]
    alone = [predict(w, there, model={}).time_s[0] for w in each]
    assert predict(many, there, model={}).time_s == pytest.approx(alone)


def test_a_target_with_every_rate_raised_is_still_never_slower():
    there = knowing((ROWS, 1.3), (sized.rows(64.0, 8192.0, f32, "softmax"), 0.8))
    faster = replace(
        there,
        dram=replace(there.dram, bytes_per_s=2 * there.dram_bytes_per_s),
        l2=replace(there.l2, bytes_per_s=2 * there.l2_bytes_per_s),
    )
    for w in (ROWS, sized.rows(64.0, 8192.0, f32, "softmax")):
        slow, fast = (predict(w, t, model={}).time_s[0] for t in (there, faster))
        assert fast <= slow


def test_it_is_written_and_read_again(tmp_path):
    there = knowing((ROWS, 1.2), (sized.gemm(512.0, 512.0, 512.0, f16), 0.9))
    sources = FrozenTable({**there.sources, "local": "measured"})
    text = dump_target(replace(there, name="mine", sources=sources))
    assert '[local."reduce softmax f32"]' in text
    (tmp_path / "mine.toml").write_text(text)
    assert load_target(tmp_path / "mine.toml").local == there.local


def test_it_is_explained():
    """The same number in every way of asking, with a line that says what was measured."""
    layer = sized.gemm(256.0, 768.0, 768.0, f32)
    there = knowing((layer, 1.2), target=load_target("cpu"))
    g = gpuir.analyze(ENCODER, "cpu", dims={"batch": 2, "seq": 128}).graph
    name = next(n for n in g.nodes if n.op.name == "k.gemm")
    from gpuir.cost.explain import terms

    lines = {line.name: line.value for line in terms(name.op, name.tile, there)}
    assert lines["as measured nearby"] > 1.05
    plain = {line.name: line.value for line in terms(name.op, name.tile, load_target("cpu"))}
    assert lines["time"] > plain["time"]


def test_points_of_other_columns_correct_nothing():
    there = knowing((ROWS, 1.2))
    odd = FrozenTable({**there.local, "reduce softmax f32.i=4096 bytes=9 flops=9 ops=1": 1.5})
    assert ratio(ROWS, replace(there, local=odd)) == ratio(ROWS, there)
