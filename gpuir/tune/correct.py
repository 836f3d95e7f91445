"""What measurements add to predictions: differences of logarithms, carried to what is like it."""

from __future__ import annotations

import numpy as np

from gpuir.cost.gaussian import Array, Process, smooth, squares

# Standard deviations of what all predictions of a kernel are wrong by, of what a configuration is
# besides, and of a measurement, in logarithms; and over what distance, in standard deviations of
# the features, the second fades by e. The second is that of predictions of a convolution on an A100
# and of a product on an RTX 3090 (0.35, 0.31: benchmarks/tuner_priors.py); the others are assumed.
SCALE, OWN, NOISE, REACH = 2.0, 0.35, 0.05, 0.5


def differences(points: Array, at: Array, found: Array) -> tuple[Array, Array]:
    """What to add to the logarithm of each prediction, and its standard deviation: a Gaussian
    process with a constant.

    `points` has a row of features for each, `at` those that were measured, `found` the logarithms
    of measured over predicted there.
    """
    if not len(found):
        return np.zeros(len(points)), np.full(len(points), np.hypot(SCALE, OWN))
    spread = points.std(axis=0)
    scale = np.where(spread > 0, spread, 1.0) * REACH * np.sqrt(points.shape[1] / 2)

    def shared(a: Array) -> Array:
        """The covariance of each of `a` with each that was measured."""
        return SCALE**2 + smooth(squares(a / scale, at / scale), OWN**2, 1.0)

    process = Process(shared(at) + NOISE**2 * np.eye(len(at)))
    across = shared(points)
    left = SCALE**2 + OWN**2 - process.known(across)
    return across @ process.weights(found), np.sqrt(np.maximum(left, 0.0))
