"""Gaussian processes: what can be worked out by hand, and what leaving out means."""

from __future__ import annotations

import numpy as np
import pytest

from gpuir.cost.gaussian import Process, rough, smooth, squares


def test_one_observation_by_hand():
    """Variance 0.3, noise 0.1, at 1 reach: the mean is 0.8 * 0.3 exp(-1/2) / 0.4."""
    apart2 = squares(np.array([[0.0], [2.0]]), np.array([[0.0]]))
    across = smooth(apart2, 0.3, 2.0)
    process = Process(np.array([[0.4]]))
    there, near = across @ process.weights(np.array([0.8]))
    assert there == pytest.approx(0.6) and near == pytest.approx(0.6 * np.exp(-0.5))
    assert process.known(across) == pytest.approx([0.225, 0.225 * np.exp(-1)])
    assert rough(np.array([0.0, 3.0]), 0.3, 3.0) == pytest.approx([0.3, 0.3 * np.exp(-1)])


def test_distances_are_those_of_each_with_each():
    a, b = np.array([[[0.0, 0.0], [3.0, 4.0]]]), np.array([[0.0, 0.0], [0.0, 4.0], [3.0, 4.0]])
    assert squares(a, b) == pytest.approx(np.array([[[0, 16, 25], [25, 9, 0]]]))


def test_what_is_left_out_is_predicted_by_the_others_alone():
    chance = np.random.default_rng(0)
    at, values = chance.normal(size=(9, 2)), chance.normal(size=9)
    alike = smooth(squares(at, at), 1.0, 1.0)
    process = Process(alike + 0.1 * np.eye(9))
    for i, error in enumerate(process.left_out(values)):
        rest = np.arange(9) != i
        weights = Process(process.covariance[np.ix_(rest, rest)]).weights(values[rest])
        assert values[i] - alike[i, rest] @ weights == pytest.approx(error)
    out = np.arange(9) < 3
    rest = Process(process.covariance[3:, 3:]).weights(values[3:])
    assert process.weights_without(out, values[3:]) == pytest.approx(rest)
