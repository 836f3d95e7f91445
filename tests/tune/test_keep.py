"""Which configurations are measured: the fastest predicted, and some unlike them."""

from __future__ import annotations

import numpy as np
import pytest

import gpuir
from gpuir.tune.keep import keep, worst_loss
from gpuir.tune.space import Predictions, predict


def test_all_are_kept_where_few_can_run():
    assert keep(np.array([3.0, np.inf, 1.0]), 2) == [2, 0]


def test_one_in_four_is_there_whatever_is_predicted():
    """By hand: of 20, with 8 places, the six fastest; the first given, which is the slowest; and
    the middle one of the 13 others."""
    times = np.arange(20.0)[::-1]
    assert keep(times, 8) == [19, 18, 17, 16, 15, 14, 7, 0]


def test_the_others_are_spread_over_the_whole_order():
    """Of 40, with 16 places: twelve, among them the first, and the middles of four times seven."""
    assert keep(np.arange(40.0), 16) == [*range(12), 12 + 3, 19 + 3, 26 + 3, 33 + 3]


def test_usual_ones_are_kept_in_place_of_the_first():
    times = np.arange(20.0)[::-1]
    assert keep(times, 8, [3]) == [19, 18, 17, 16, 15, 14, 7, 3]
    assert 0 not in keep(times, 8, [])
    infinite = np.array([np.inf, 4.0, 3.0, 2.0, 1.0])
    assert keep(infinite, 2, [0]) == [4, 2]


def test_one_place_is_the_fastest():
    assert keep(np.array([2.0, 1.0, 3.0]), 1) == [1]


def test_what_cannot_run_is_not_in_the_safety_set():
    times = np.array([np.inf, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert keep(times, 4) == [5, 4, 3, 1]


def test_predictions_upside_down_cost_less_with_the_safety_set():
    rng = np.random.default_rng(0)
    times = np.exp(rng.normal(0, 0.7, 1000))
    kept, fastest = keep(1 / times, 8), np.argsort(1 / times)[:8]
    assert times[kept].min() < times[fastest].min() / 2


def test_worst_loss_is_what_the_intervals_allow():
    k = gpuir.kernel("gemm", m=64, n=64, k=64, target="a100")
    sizes = np.array([16.0, 32.0])
    legal = predict(k, gpuir.Tiles({"m": sizes, "n": sizes, "k": 32.0})).legal
    found = Predictions(np.array([1.0, 4.0]), np.array([0.5, 2.0]), np.array([2.0, 8.0]), legal)
    assert worst_loss(found, [1]) == 16.0  # 8 s at most, where the other takes 0.5 s at least
    assert worst_loss(found, [0]) == 1.0  # 2 s at most, where the other takes 2 s at least
    assert worst_loss(found, [0, 1]) == 1.0


@pytest.mark.parametrize("target", ["a100", "h100-sxm", "t4"])
def test_the_loss_is_never_above_what_two_intervals_span(target: str):
    k = gpuir.kernel("gemm", m=512, n=512, k=512, target=target)
    many = gpuir.candidates(k)
    found = predict(k, many)
    widest = float((found.high_s / found.low_s).max())
    assert 1 <= worst_loss(found, keep(found.time_s, 8)) <= widest * 1.0001
