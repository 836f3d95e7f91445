"""Intervals: they hold four measurements of five, on GPUs that they were not made from."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from gpuir.cost import sized
from gpuir.cost.batch import costs_of
from gpuir.cost.learned import Familiar, Trained, shipped
from gpuir.cost.tile import predict
from gpuir.fit.backtest import (
    USUAL_GPUS,
    Backtests,
    Misses,
    _ends_elsewhere,  # pyright: ignore[reportPrivateUsage]
    held,
    interval_of,
    usual_spread,
    with_intervals,
)
from gpuir.fit.columns import Floats
from gpuir.fit.score import score
from gpuir.ir.notes import Tile
from gpuir.ir.types import f32
from gpuir.targets.load import load_target
from gpuir.targets.target import FrozenTable

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[3] / "shared" / "data"
TIME_S = np.geomspace(1e-5, 1e-3, 600)


def gpus(count: int, apart: float, within: float, seed: int, dtype: str = "f32") -> list[Misses]:
    """GPUs whose rows are off by `within`, and all of one GPU's by `apart`, left out one by one:
    each is compared to the mean of the others."""
    draw = np.random.default_rng(seed)
    own = draw.normal(0, apart, count)
    left_out = (own - own.mean()) * count / (count - 1)
    rows = draw.normal(0, within, (count, len(TIME_S)))
    return [
        Misses(f"g{i}", dtype, TIME_S, o + r)
        for i, (o, r) in enumerate(zip(left_out.tolist(), rows))
    ]


def ends_of(errors: list[Misses], usual: float | None = None) -> tuple[float, float]:
    """Of 100 us, as logarithms."""
    low, high = interval_of(errors, usual).at(1e-4)
    return float(np.log(low / 1e-4)), float(np.log(high / 1e-4))


def holds(ends: tuple[float, float], error: Floats) -> float:
    low, high = ends
    return float(np.mean((low <= error) & (error <= high)))


def test_on_the_same_gpus_an_interval_holds_four_of_five():
    draw = np.random.default_rng(3)
    seen = [Misses(g, "f32", np.full(4000, 1e-4), draw.normal(0.05, 0.1, 4000)) for g in "abc"]
    assert 0.78 <= holds(ends_of(seen), draw.normal(0.05, 0.1, 4000)) <= 0.82


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_on_another_gpu_too_however_few_there_were(count: int):
    """Families of `count` GPUs that differ as families do, some little and some much: over 400 of
    them, four of five rows of the next GPU are held."""
    shares: list[float] = []
    draw = np.random.default_rng(count)
    for seed in range(400):
        apart = 0.1 * float(np.sqrt(USUAL_GPUS / draw.chisquare(USUAL_GPUS)))
        ends = ends_of(gpus(count, apart, 0.05, 1000 + seed), usual=0.1)
        next_one = float(draw.normal(0, apart * sqrt(1 + 1 / count)))
        shares.append(holds(ends, next_one + draw.normal(0, 0.05, 600)))
    assert 0.77 <= np.mean(shares) <= 0.83


def test_few_gpus_say_less():
    few, many = (ends_of(gpus(n, 0.1, 0.05, 1), usual=0.1) for n in (2, 40))
    assert few[1] - few[0] > many[1] - many[0]


def test_one_gpu_says_nothing_of_others_but_what_is_usual():
    """Twice the variance that GPUs have among themselves, and the rows' own: 0.05 at four fifths
    of Student's t with three degrees of freedom (1.64), for rows that do not vary."""
    (alone,) = gpus(2, 0.0, 0.0, 0)[:1]
    low, high = ends_of([alone], usual=0.05)
    assert high == pytest.approx(1.638 * 0.05 * np.sqrt(2), rel=0.02)
    assert low == pytest.approx(-high, rel=0.02)
    model = with_intervals({"x": Trained()}, Backtests(known={"x": [alone]}))
    assert set(model["x"].intervals) == {"known", "unseen"}


def test_what_nothing_was_fitted_to_is_off_by_as_much_elsewhere():
    """A CPU of listed rates that takes 1.5 times as long: the next may too, or 1 / 1.5."""
    (alone,) = gpus(2, 0.0, 0.0, 0)[:1]
    slow = replace(alone, error=alone.error + np.log(1.5))
    found = with_intervals({"cpu": Trained()}, Backtests({"cpu": [slow]}, {"cpu": [alone]}))
    ends = {place: i.at(1e-4) for place, i in found["cpu"].intervals.items()}
    assert set(ends) == {"unseen", "calibrated"}
    assert ends["unseen"][1] > 1.5e-4 > ends["calibrated"][1]
    assert ends["unseen"][0] < 1e-4 / 1.5


def test_what_is_usual_is_the_middle_family():
    tests = {name: gpus(400, apart, 0.01, 5) for name, apart in zip("abc", (0.02, 0.1, 0.3))}
    assert usual_spread(tests) == pytest.approx(0.1, rel=0.1)
    assert usual_spread({"a": gpus(2, 1, 0.1, 0)[:1]}) == 0.08


def test_dtypes_have_their_own_where_two_gpus_do():
    errors = gpus(4, 0.05, 0.05, 2) + gpus(3, 0.3, 0.05, 3, "f16") + gpus(2, 0.1, 0.1, 4, "i8")[:1]
    found = with_intervals({"x": Trained()}, Backtests(unseen={"x": errors}))["x"].intervals
    assert set(found) == {"unseen", "unseen f16", "unseen f32"}
    assert found["unseen f16"].high[0] > found["unseen f32"].high[0]


def test_coverage_is_of_gpus_not_used():
    """Thirty families of four GPUs each; an interval that had seen the GPU would hold more."""
    tests = {f"f{i}": gpus(4, 0.1, 0.05, i) for i in range(30)}
    assert 0.74 <= np.mean(list(held(tests).values())) <= 0.88


# ---------------------------------------------------------------------------- which one


ADDS = sized.pointwise(1e8, [f32, f32], [f32])
PLACES: list[tuple[Familiar, str, dict[str, float], dict[str, float]]] = [
    ("known", "a100-pcie", {}, {}),
    ("unseen", "rtx-a6000", {}, {}),
    ("unseen", "rtx-a6000", {"tensor.compute share": 1.1}, {}),  # not of this family
    ("calibrated", "rtx-a6000", {"stream.gddr share": 1.1}, {}),
    ("calibrated", "rtx-a6000", {}, {"map f32.i=9 bytes=9 flops=9 ops=9": 1.1}),
    ("known", "a100-pcie", {"stream.hbm share": 1.1}, {}),
]


@pytest.mark.parametrize(("place", "name", "factors", "local"), PLACES)
def test_intervals_are_by_how_familiar_a_gpu_is(
    place: Familiar,
    name: str,
    factors: dict[str, float],
    local: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
):
    ends = {"known": 0.1, "calibrated": 0.2, "unseen": 0.3}
    errors = {p: [Misses("g", "f32", TIME_S, np.tile([-e, e], 300))] for p, e in ends.items()}
    intervals = {p: interval_of(e) for p, e in errors.items()}
    stream = replace(shipped()["stream"], intervals=intervals)
    monkeypatch.setattr("gpuir.cost.tile.shipped", lambda: {**shipped(), "stream": stream})
    target = replace(load_target(name), factors=FrozenTable(factors), local=FrozenTable(local))
    (cost,) = costs_of([(ADDS, Tile(()))], target)
    assert cost.interval is not None
    assert np.log(cost.interval[1] / cost.time_s) == pytest.approx(ends[place], rel=1e-6)
    assert ("gpu" in cost.unseen) == (place == "unseen")


# ---------------------------------------------------------------------------- recorded


RECORDED = {"elementwise": (60, 95), "softmax": (60, 95), "layernorm": (60, 95), "conv": (65, 95)}


@pytest.mark.parametrize("name", RECORDED)
def test_shipped_intervals_on_recorded_tables(name: str):
    """The known GPUs of the NeuSight tables: of a draw of rows, GPUs weighing alike, the share that
    lies in the intervals of their costs, in percent."""
    pytest.importorskip("pyarrow")
    path = DATA / "neusight" / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"the measurements are not here: {path}")
    from validation.readers import read_table

    draw = np.random.default_rng(0)
    some = [b.take(draw.permutation(len(b))[:400]) for b in read_table(path).batches]
    totals = score([b for b in some if not b.rough]).totals
    shares = [t.errors.coverage for t in totals if t.group.device != "all"]
    assert all(s is not None for s in shares)
    least, most = RECORDED[name]
    assert least <= np.mean([s for s in shares if s is not None]) <= most


def test_every_cost_on_a_gpu_has_an_interval():
    for name in ("a100-pcie", "l40s"):
        found = predict(ADDS, load_target(name))
        assert found.low_s[0] < found.time_s[0] < found.high_s[0]


def test_a_gpu_with_many_rows_counts_once():
    """Ten times as many rows of the one that varies least say nothing more of the next."""
    draw = np.random.default_rng(5)
    few, wide = draw.normal(0, 0.01, 2000), draw.normal(0, 0.2, 2000)
    ends = [
        _ends_elsewhere(np.append(np.tile(few, n), wide), np.repeat([0, 1], [2000 * n, 2000]), 0.05)
        for n in (1, 10)
    ]
    assert ends[1] == pytest.approx(ends[0], rel=0.03)
