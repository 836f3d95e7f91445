"""Which configurations are measured: the fastest predicted, and some unlike them."""

from __future__ import annotations

import numpy as np
import pytest

import gpuir
from gpuir.tune.keep import keep, worst_loss
from gpuir.tune.space import Predictions, predict


def tiles(**columns: list[float]) -> gpuir.Tiles:
    return gpuir.Tiles({d: np.array(c, float) for d, c in columns.items()})


def test_all_are_kept_where_few_can_run():
    times = np.array([3.0, np.inf, 1.0])
    assert keep(times, tiles(m=[16, 32, 64]), 2) == [2, 0]


def test_one_in_four_is_there_whatever_is_predicted():
    # by hand: 8 places, 6 by prediction (0 to 5 of `times`), then the first given (place 19, the
    # slowest), then the shape farthest from all those: 512, three doublings from 64
    times = np.arange(20.0)[::-1]
    shapes = [64.0] * 20
    shapes[2], shapes[3] = 512.0, 128.0
    got = keep(times, tiles(m=shapes), 8)
    assert got == [19, 18, 17, 16, 15, 14, 2, 0]


def test_of_a_far_shape_the_fastest_is_taken():
    times = np.array([1.0, 2.0, 3.0, 9.0, 8.0, 4.0])
    assert keep(times, tiles(m=[16, 16, 16, 256, 256, 16]), 3) == [0, 1, 4]


def test_one_place_is_the_fastest():
    assert keep(np.array([2.0, 1.0, 3.0]), tiles(m=[1, 2, 3]), 1) == [1]


def test_same_shapes_leave_the_places_to_the_fastest():
    assert keep(np.array([5.0, 1.0, 2.0, 3.0, 4.0]), tiles(m=[16] * 5), 4) == [1, 2, 3, 0]


def test_worst_loss_is_what_the_intervals_allow():
    k = gpuir.kernel("gemm", m=64, n=64, k=64, target="a100")
    legal = predict(k, tiles(m=[16, 32], n=[16, 32])).legal
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
    assert 1 <= worst_loss(found, keep(found.time_s, many, 8)) <= widest * 1.0001
