"""What measurements add to predictions: differences of logarithms, carried to what is like it."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Standard deviations of what all predictions of a kernel are wrong by, of what a configuration is
# besides, and of a measurement, in logarithms; and over what distance, in standard deviations of
# the features, the second fades by e. The second is that of predictions of a convolution on an A100
# and of a product on an RTX 3090 (0.35, 0.31: benchmarks/tuner_priors.py); the others are assumed.
SCALE, OWN, NOISE, REACH = 2.0, 0.35, 0.05, 0.5


def differences(points: Floats, at: Floats, found: Floats) -> tuple[Floats, Floats]:
    """What to add to the logarithm of each prediction, and its standard deviation.

    `points` has a row of features for each, `at` those that were measured, `found` the logarithms
    of measured over predicted there. A Gaussian process with a constant (Rasmussen, Williams:
    Gaussian Processes for Machine Learning, 2006, chapter 2).
    """
    if not len(found):
        return np.zeros(len(points)), np.full(len(points), np.hypot(SCALE, OWN))
    spread = points.std(axis=0)
    scale = np.where(spread > 0, spread, 1.0) * REACH * np.sqrt(points.shape[1])
    between = _shared(at / scale, at / scale)
    inverse = np.linalg.inv(between + NOISE**2 * np.eye(len(at)))
    across = _shared(points / scale, at / scale)
    mean = across @ (inverse @ found)
    left = SCALE**2 + OWN**2 - ((across @ inverse) * across).sum(axis=1)
    return mean, np.sqrt(np.maximum(left, 0.0))


def _shared(a: Floats, b: Floats) -> Floats:
    """The covariance of each of `a` with each of `b`."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return SCALE**2 + OWN**2 * np.exp(-np.maximum(squares, 0.0))
