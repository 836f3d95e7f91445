"""Calibration: factors found again in made measurements, and less error on recorded ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuir.cost import cpu
from gpuir.cost.families import family_of
from gpuir.cost.tile import predict
from gpuir.fit.batch import Clock, MeasuredBatch
from gpuir.fit.benchmarks import works_of
from gpuir.fit.calibrate import NOTHING, WAYS, calibration, chosen, ends_of, with_factors
from gpuir.fit.campaign import read_plan, shipped_plan
from gpuir.fit.collect import MeasuredRow, batches_of
from gpuir.targets.load import load_target
from gpuir.targets.target import FrozenTable, Target

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[3] / "shared" / "data"
CPU = load_target("cpu")
TRUE = {"cpu.product share": 0.8, "cpu.lane share": 1.3, "cpu.dram share": 0.9}
OTHER = with_factors(CPU, TRUE)


def calibrated(target: Target, batches: list[MeasuredBatch]) -> Target:
    return calibration(target, batches, model={})[0]


def measured(
    noise: float = 0.0, spoilt: float = 0.0, there: Target = OTHER, seed: int = 0
) -> list[MeasuredBatch]:
    """The calibration plan as a CPU with other factors would run it."""
    rng = np.random.default_rng(seed)
    rows: list[MeasuredRow] = []
    for problem in read_plan(shipped_plan("calibrate-cpu")):
        extents = {c: float(n) for c, n in problem.extents}
        time_s = sum(
            float(predict(w, there, model={}).time_s[0])
            for w in works_of(problem.op, problem.dtype, extents)
        )
        wrong = 5.0 if rng.random() < spoilt else 1.0
        rows.append(
            MeasuredRow(problem, time_s * wrong * float(np.exp(rng.normal(0, noise))), 0.0, 1)
        )
    return batches_of(rows, CPU)


def test_factors_are_found_again():
    found = calibrated(CPU, measured()).factors
    for path, value in TRUE.items():
        assert found[path] == pytest.approx(value, rel=0.03), path
    others = [v for path, v in found.items() if path not in TRUE]
    assert others == pytest.approx([1.0] * len(others), rel=0.05)


def test_rows_that_are_far_off_hardly_count():
    found = calibrated(CPU, measured(noise=0.03, spoilt=0.1)).factors
    for path, value in TRUE.items():
        assert found[path] == pytest.approx(value, rel=0.1), path


def test_the_error_shown_is_of_rows_not_seen():
    target, (found,) = calibration(CPU, measured(noise=0.05), model={})
    assert (found.family, found.rows) == ("cpu", sum(map(len, measured())))
    assert found.after < found.before
    assert 0.03 < found.after < 0.1
    assert target.factors == found.moved


def test_noise_moves_little():
    """Rows that are off by half say nothing of the CPU: its kernels nearly stay where they were."""
    rng = np.random.default_rng(1)
    noise = [
        replace(b, latency_s=b.latency_s * np.exp(rng.normal(0, 0.5, len(b))))
        for b in measured(there=CPU)
    ]
    target, (found,) = calibration(CPU, noise, model={})
    moved = [
        np.log(predict(w, target, model={}).time_s / predict(w, CPU, model={}).time_s)
        for b in noise
        for w in b.works
    ]
    assert np.abs(np.concatenate(moved)).mean() < 0.12
    assert found.after < 1.1 * found.before


def test_what_predicts_unseen_rows_worse_is_not_done():
    sizes = {way: np.full(32, 0.1) for way in WAYS}
    assert chosen(sizes, wary=False) == WAYS[0]  # as good: what the priors allow
    assert chosen(sizes, wary=True) == NOTHING  # as good: what was fitted to that GPU
    worse = {**sizes, WAYS[0]: np.linspace(0.1, 0.5, 32), WAYS[2]: np.full(32, 0.11)}
    assert chosen(worse, wary=False) == WAYS[1]
    for known in (True, False):
        for best in (NOTHING, WAYS[0]):
            clear = {way: np.full(32, 0.1 if way == best else 0.2) for way in WAYS}
            assert chosen(clear, known) == best


@pytest.mark.parametrize("count", [1, 4, 8, 9, 30, 63, 300])
def test_ends_hold_as_many_of_further_rows_as_they_say(count: int):
    """Of any distribution, here one with a long side; of fewer than four the largest is too few."""
    rng = np.random.default_rng(0)
    inside: list[float] = []
    for _ in range(400):
        low, high = np.log(ends_of(rng.gamma(2.0, 0.1, count) - 0.2))
        further = rng.gamma(2.0, 0.1, 400) - 0.2
        inside.append(float(np.mean((low <= further) & (further <= high))))
    if count < 4:
        assert np.mean(inside) < 0.8
    else:  # (n + 1) 80 % of n rows, rounded up
        assert 0.79 <= np.mean(inside) <= 0.8 + 2 / (count + 1) + 0.01


@cache
def fitted(noise: float) -> tuple[Target, Any]:
    target, (found,) = calibration(CPU, measured(noise))
    return target, found


@pytest.mark.parametrize(("noise", "most"), [(0.05, 1.0), (0.25, 0.9), (0.6, 0.9)])
def test_an_interval_holds_rows_as_far_off_as_those_left_out(noise: float, most: float):
    """Further measurements as noisy as those of the calibration: 80 % are inside, or more where
    other devices were further off; and noise makes wide intervals."""
    target, fit = fitted(noise)
    assert target.backtest == {"cpu.low": fit.ends[0], "cpu.high": fit.ends[1]}
    inside: list[np.ndarray] = []
    for b in (b for seed in (1, 2) for b in measured(noise, seed=seed) if len(b.works) == 1):
        found = predict(b.works[0].take(b.which), target)
        inside.append((found.low_s <= b.latency_s) & (b.latency_s <= found.high_s))
        assert (found.low_s <= found.time_s * fit.ends[0] * (1 + 1e-9)).all()
        assert (found.high_s >= found.time_s * fit.ends[1] * (1 - 1e-9)).all()
    assert 0.75 < np.mean(np.concatenate(inside)) <= most
    quiet = fitted(0.05)[1].ends
    assert fit.ends[1] / fit.ends[0] >= quiet[1] / quiet[0]
    if noise == 0.6:
        assert fit.ends[0] < 0.7 and fit.ends[1] > 1.5


def test_a_backtest_makes_no_interval_narrower():
    (b, *_) = measured()
    (work,) = b.works
    for target in (CPU, load_target("a100"), load_target("mi210")):
        plain = predict(work, target)
        family = family_of(work, target).name
        for low, high in ((0.99, 1.01), (0.1, 1.0), (1.0, 9.0)):
            told = FrozenTable({f"{family}.low": low, f"{family}.high": high})
            found = predict(work, replace(target, backtest=told))
            assert (found.time_s == plain.time_s).all()
            assert (found.low_s <= np.minimum(plain.low_s, low * plain.time_s) * 1.000001).all()
            assert (found.high_s >= np.maximum(plain.high_s, high * plain.time_s) * 0.999999).all()
        other = FrozenTable({"experts.low": 0.1, "experts.high": 9.0})
        assert (predict(work, replace(target, backtest=other)).high_s == plain.high_s).all()


def test_a_family_that_calibration_makes_worse_stays_as_it_was(monkeypatch: pytest.MonkeyPatch):
    rows = measured(noise=0.3, there=CPU)
    monkeypatch.setattr("gpuir.fit.calibrate.chosen", lambda errors, wary: WAYS[0])
    moved, (worse,) = calibration(CPU, rows, model={})
    target, (kept,) = calibration(CPU, rows, model={}, no_worse=True)
    assert moved.factors and worse.after > worse.before and not worse.refused
    assert kept.after <= kept.before == worse.before
    assert kept.refused in (worse.after, 0.0)
    assert bool(kept.refused) == (target.factors == CPU.factors and not target.local)
    _, (better,) = calibration(CPU, measured(noise=0.05), model={}, no_worse=True)
    assert better.after < better.before and not better.refused


def test_it_is_the_same_each_time():
    assert calibrated(CPU, measured(0.05)) == calibrated(CPU, measured(0.05))


def test_what_was_calibrated_before_does_not_matter():
    again = calibrated(with_factors(CPU, {"cpu.product share": 2.0}), measured())
    assert again.factors["cpu.product share"] == pytest.approx(0.8, rel=0.03)


def test_nothing_to_go_by_moves_nothing():
    assert calibrated(CPU, []) == CPU
    slow = [replace(b, clock=Clock(floor_s=1e3)) for b in measured()]
    assert calibrated(CPU, slow) == CPU  # all of it is the host's time
    assert calibrated(CPU, [replace(b, suspect="why") for b in measured()]) == CPU


def test_few_rows_move_little():
    """One product in half the time it should take is no reason to believe in half the clock."""
    (one,) = (b.take(np.array([0])) for b in measured() if (b.op, b.dtype) == ("linear", "f32"))
    off = replace(one, latency_s=one.latency_s * 4)
    factors = calibrated(CPU, [off]).factors
    assert 0.2 < factors["cpu.product share"] < 0.9


def test_factors_stay_within_their_bounds():
    slow = [replace(b, latency_s=b.latency_s * 1e4) for b in measured()]
    values = {f.name: f for f in cpu.FACTORS}
    for path, multiplier in calibrated(CPU, slow).factors.items():
        f = values[path.partition(".")[2]]
        assert f.low * 0.999 <= f.value * multiplier <= f.high * 1.001
        assert 0.1 <= multiplier <= 10


@pytest.mark.parametrize(("name", "most"), [("elementwise", 0.08), ("softmax", 0.15)])
def test_recorded_measurements(name: str, most: float):
    """32 rows a GPU of the NeuSight tables, five GPUs: little error, no more than before."""
    pytest.importorskip("pyarrow")
    path = DATA / "neusight" / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"the measurements are not here: {path}")
    from validation.readers import read_table

    rng = np.random.default_rng(0)
    gpus: dict[str, list[MeasuredBatch]] = {}
    for b in read_table(path).batches:
        rows = rng.permutation(np.flatnonzero(~b.on_floor))
        if b.target.vendor == "NVIDIA":
            gpus.setdefault(b.target.name, []).append(b.take(rows[: 3 if name[0] == "e" else 32]))
    assert len(gpus) == 5
    before, after = zip(*(errors(batches) for batches in gpus.values()))
    assert np.mean(after) <= np.mean(before)
    assert np.mean(after) < most


def errors(batches: list[MeasuredBatch]) -> tuple[float, float]:
    _, (found,) = calibration(batches[0].target, batches)
    return found.before, found.after
