"""Gaussian processes: what observed values say of others, by how much each pair has in common
(Rasmussen, Williams: Gaussian Processes for Machine Learning, 2006; its numbers below).

Who uses them says what two values have in common, a covariance; here are its two shapes and what
follows from it. Algorithm 2.1 solves by Cholesky's factor. numpy solves with no triangle, so this
solves with the covariance itself, which with its noise is far from singular.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def squares(a: Array, b: Array) -> Array:
    """The square of how far each point of `a` [..., d] is from each of `b` [n, d]."""
    both = (a**2).sum(-1)[..., None] + (b**2).sum(-1) - 2 * a @ b.T
    return np.maximum(both, 0.0)


def smooth(apart2: Array, variance: float, reach: float) -> Array:
    """A covariance that fades by the square of a distance (squared exponential, equation 4.9)."""
    return variance * np.exp(-0.5 * apart2 / reach**2)


def rough(apart: Array, variance: float, reach: float | Array) -> Array:
    """A covariance that fades by e with each `reach` of a distance (exponential, section 4.2.1)."""
    return variance * np.exp(-apart / reach)


@dataclass(frozen=True)
class Process:
    """Observations, by their covariance [n, n], the noise of each in it. Their mean is 0."""

    covariance: Array

    @cached_property
    def inverse(self) -> Array:
        return np.asarray(np.linalg.inv(self.covariance), float)

    def weights(self, values: Array) -> Array:
        """By which the covariances of a point with the observations give its mean (2.25)."""
        return np.asarray(np.linalg.solve(self.covariance, values), float)

    def known(self, across: Array) -> Array:
        """What the observations take from the variance of points (2.26): `across` [points, n] are
        their covariances."""
        return np.asarray(((across @ self.inverse) * across).sum(-1), float)

    def left_out(self, values: Array) -> Array:
        """The error of each observation, predicted by all others (5.12)."""
        return np.asarray(self.inverse @ values / np.diag(self.inverse), float)

    def weights_without(self, out: Any, values: Array) -> Array:
        """The weights of the other observations' `values` alone, where `out` [n] says which are
        left out: from the inverse of all (appendix A.3, a matrix in blocks)."""
        p = self.inverse
        inner, cross = p[np.ix_(out, out)], p[np.ix_(~out, out)]
        left = p[np.ix_(~out, ~out)] @ values - cross @ np.linalg.solve(inner, cross.T @ values)
        return np.asarray(left, float)
