"""Errors are what a hand computes, rows that tell of the host stand apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuir.cost import sized
from gpuir.cost.tile import predict
from gpuir.fit.batch import Clock, MeasuredBatch
from gpuir.fit.columns import WordColumn
from gpuir.fit.score import drawn, forecast, middle, row_errors, score
from gpuir.ir.types import bf16
from gpuir.targets.load import load_target

H100 = load_target("h100")
M = np.array([128.0, 1024.0, 4096.0])
GEMM = sized.gemm(M, 4096.0 + 0 * M, 4096.0 + 0 * M, bf16)
TIME_S = predict(GEMM, H100).time_s


def batch(latency_s: np.ndarray, which: np.ndarray | None = None, **more: object) -> MeasuredBatch:
    which = np.arange(len(latency_s)) if which is None else which
    plain = MeasuredBatch("t.csv", "gemm", "h100_sxm", "bf16", H100, (GEMM,), which, latency_s)
    return replace(plain, **more)  # pyright: ignore[reportArgumentType]


def test_errors_by_hand():
    measured, predicted = np.array([100.0, 100, 200, 200]), np.array([110.0, 90, 200, 260])
    roofline = np.array([50.0, 50, 100, 100])
    middle = np.array([100.0, 100, np.nan, 220])
    told = (predicted, predicted - 15, predicted + 5, roofline, middle)
    found = row_errors(np.stack([measured, *told]))
    assert found.n == 4
    assert found.mape == pytest.approx((10 + 10 + 0 + 30) / 4)
    assert found.median_ape == pytest.approx(10)
    assert found.p90_ape == pytest.approx(24)
    assert found.bias == pytest.approx((10 - 10 + 0 + 30) / 4)
    assert found.roofline_mape == pytest.approx(50)
    assert found.spread == pytest.approx((0 + 0 + 10) / 3)
    assert found.coverage == pytest.approx(50)  # the first row, and the third


def test_what_is_predicted_right_has_no_error():
    which = np.array([2, 0, 0, 1])
    (found,) = score([batch(TIME_S[which], which)]).groups
    assert found.errors.mape == pytest.approx(0, abs=1e-9)
    assert found.errors.roofline_mape > 0


def test_kernels_of_a_row_add_up():
    twice = forecast(batch(TIME_S, works=(GEMM, GEMM)))
    assert np.allclose(twice.time_s, 2 * TIME_S)


def test_a_profiler_sees_no_launch():
    seen = forecast(batch(TIME_S, clock=Clock(launches=False)))
    assert np.allclose(seen.time_s, TIME_S - H100.launch_s)


def test_a_clock_shows_at_least_its_floor():
    clock = Clock(50e-6, 20e-6)
    shown = forecast(batch(TIME_S, clock=clock)).time_s
    assert np.allclose(shown, np.maximum(50e-6, 20e-6 + TIME_S))


def test_rows_on_the_floor_and_suspect_ones_stand_apart():
    clock = Clock(50e-6, 20e-6)
    rows = batch(clock.shows(TIME_S), clock=clock)
    suspect = batch(TIME_S, suspect="noise")
    found = score([rows, suspect])
    assert [(s.group.title, s.errors.n) for s in found.groups] == [
        ("gemm", 1),
        ("gemm (suspect)", 3),
        ("gemm (launch floor)", 2),
    ]
    assert all(total.errors.n == 1 for total in found.totals)


def test_splits_and_columns_tell_rows_apart():
    words = {
        "split": WordColumn.of(["train", "test", "train"]),
        "framework": WordColumn.of(["vllm", "vllm", "sglang"]),
    }
    found = score([batch(TIME_S, words=words)], by=("framework",))
    assert [(s.group.by, s.errors.n) for s in found.groups] == [
        ((("framework", "sglang"),), 1),
        ((("framework", "vllm"),), 2),
    ]
    assert {name: e.n for name, e in found.totals[0].splits.items()} == {"train": 2, "test": 1}


def test_the_middle_of_a_shape():
    rows = batch(np.array([4.0, 1, 9, 2, 5]), np.array([0, 1, 0, 2, 0]))
    assert np.array_equal(middle(rows), [5, np.nan, 5, np.nan, 5], equal_nan=True)
    even = batch(np.array([4.0, 1]), np.array([1, 1]))
    assert list(middle(even)) == [2.5, 2.5]


def test_what_is_drawn_is_not_scored():
    rows = batch(np.tile(TIME_S, 20), np.tile([0, 1, 2], 20))
    seen, rest = drawn([rows], 32, seed=1)
    assert sum(map(len, seen)) == 32
    assert sum(map(len, rest)) == 28
    again, _ = drawn([rows], 32, seed=1)
    assert np.array_equal(seen[0].which, again[0].which)
    everything, nothing = drawn([rows], 1000, seed=1)
    assert sum(map(len, everything)) == 60
    assert not nothing
