"""What a device's own measurements say beyond its factors: a correction at the shapes they had, and
near them.

Calibration writes down by how much the formulas, their factors moved, still miss each kernel that
it measured (`Target.near`). Kernels of the same kind in other extents are corrected by those that
are like them: the mean of a Gaussian process over logarithms of extents (Rasmussen, Williams,
Gaussian Processes for Machine Learning, 2006, section 2.2), far from all of them by nothing. The
correction depends on shapes alone, so a target with every rate raised is still never slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np

from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.targets.target import Table, Target

Array = np.ndarray[Any, np.dtype[np.float64]]

BOUND = 0.5  # the logarithm of a correction, at most
# The process, chosen by predicting rows of the NeuSight and aiconfigurator tables from 32 others of
# the same GPU and family: standard deviations and reaches of a wide and a narrow part, in
# logarithms of the time and of extents, and how far off a row is by itself.
WIDE, WIDE_REACH = 0.15, 6.0
NARROW, NARROW_REACH = 0.1, 2.0
NOISE = 0.1


def label(work: Work) -> str:
    """The kind of kernels that a correction is for: `gemm f32`, `reduce softmax f16`."""
    return " ".join(filter(None, (work.kernel.partition(".")[2], work.kind, work.dtype.name)))


def columns(work: Work) -> dict[str, Number]:
    """What two kernels of a kind are compared by."""
    points = np.maximum(_plain(work.points), 1.0)
    return {
        **{d: _plain(n) for d, n in work.dims},
        "bytes": _plain(work.nbytes),
        "flops": _plain(work.flops),
        "ops": _plain(work.lane_ops) / points,
    }


def _plain(n: Number) -> Number:
    return cast(Array, n) if isinstance(n, np.ndarray) else float(n)


def point(found: Mapping[str, Number]) -> str:
    """One kernel's columns as text, whole numbers, as `Target.near` has them."""
    return " ".join(f"{name}={round(float(n))}" for name, n in found.items())


def columns_of(text: str) -> dict[str, float]:
    """The columns that `point` wrote."""
    fields = (field.partition("=") for field in text.split())
    return {name: float(n) for name, _, n in fields}


def correction(work: Work, target: Target) -> Number:
    """What the time of kernels is multiplied by, from what was measured near them."""
    known = _known(target.near, label(work)) if target.near else None
    if known is None:
        return 1.0
    names, at, weights = known
    found = columns(work)
    if tuple(found) != names:
        return 1.0
    here = np.stack(np.broadcast_arrays(*map(_logarithm, found, found.values())), axis=-1)
    said = np.clip(alike(here, at) @ weights, -BOUND, BOUND)
    return np.exp(said) if said.ndim else float(np.exp(said))


@lru_cache(maxsize=256)
def _known(near: Table[float], kind: str) -> tuple[tuple[str, ...], Array, Array] | None:
    """Of the kernels of a kind: the names of their columns, where they are, their weights."""
    start = f"{kind}."
    rows = {path[len(start) :]: ratio for path, ratio in near.items() if path.startswith(start)}
    if not rows:
        return None
    found = [columns_of(text) for text in rows]
    names, at = tuple(found[0]), positions(found)
    return names, at, weights_of(at, np.log(np.array(list(rows.values()), float)))


def positions(rows: Sequence[Mapping[str, Number]]) -> Array:
    """Kernels as points in the space of the logarithms of their columns."""
    return np.array([[_logarithm(name, n) for name, n in row.items()] for row in rows], float)


def _logarithm(name: str, n: Number) -> Number:
    """An instruction more or less a cell tells two kernels apart more than a row does."""
    return 2.0 * np.log1p(n) if name == "ops" else np.log(np.maximum(n, 1.0))


def alike(here: Array, there: Array) -> Array:
    """The covariance of the errors of kernels here with those of kernels there."""
    far = np.sum((here[..., None, :] - there) ** 2, axis=-1)
    wide = WIDE**2 * np.exp(-0.5 * far / WIDE_REACH**2)
    return wide + NARROW**2 * np.exp(-0.5 * far / NARROW_REACH**2)


def weights_of(at: Array, errors: Array) -> Array:
    return np.asarray(np.linalg.solve(alike(at, at) + NOISE**2 * np.eye(len(at)), errors), float)


def left_out(at: Array, errors: Array) -> Array:
    """The error left of each kernel when all others correct it (the same book, section 5.4.2)."""
    inverse = np.linalg.inv(alike(at, at) + NOISE**2 * np.eye(len(at)))
    return inverse @ errors / np.diag(inverse)
