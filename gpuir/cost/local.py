"""What a device's own measurements say beyond its factors: a correction at the shapes they had, and
near them.

Calibration writes down by how much the formulas, their factors moved, still miss each kernel that
it measured (`Target.local`). Kernels of the same kind in other extents are corrected by those that
are like them: the mean of a Gaussian process (`cost.gaussian`) over logarithms of extents, far
from all of them by nothing. The correction depends on shapes alone, so a target with every rate
raised is still never slower.

It also writes down how far off kernels were that it left out (`Target.backtest`), so that intervals
know of measurements that scatter more than those of other devices did.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import cast

import numpy as np

from gpuir.cost.gaussian import Array, Process, smooth, squares
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.targets.target import FrozenTable, Target

BOUND = 0.5  # the logarithm of a correction, at most
# The process, chosen by predicting rows of the NeuSight and aiconfigurator tables from 32 others of
# the same GPU and family: standard deviations and reaches of a wide and a narrow part, in
# logarithms of the time and of extents, and how far off a row is by itself.
WIDE, WIDE_REACH = 0.15, 6.0
NARROW, NARROW_REACH = 0.2, 2.0
NOISE = 0.1
OTHERS = 0.6  # of the wide part, with kernels of another kind: another dtype, another library


def label(work: Work) -> str:
    """The kind of kernels that a correction is for: `gemm f32`, `reduce softmax f16`."""
    return f"{work.sort} {work.dtype.name}"


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
    """One kernel's columns as text, whole numbers, as `Target.local` has them."""
    return " ".join(f"{name}={round(float(n))}" for name, n in found.items())


def columns_of(text: str) -> dict[str, float]:
    """The columns that `point` wrote."""
    fields = (field.partition("=") for field in text.split())
    return {name: float(n) for name, _, n in fields}


def correction(work: Work, target: Target) -> Number:
    """What the time of kernels is multiplied by, from what was measured near them."""
    if not target.local:
        return 1.0
    found = columns(work)
    known = _known(target.local, work.kernel, tuple(found))
    if known is None:
        return 1.0
    points, weights = known
    here = np.stack(np.broadcast_arrays(*map(_logarithm, found, found.values())), axis=-1)
    own = np.array([kind == label(work) for kind in points.kinds])
    logarithm = np.clip(_alike(here, points.at, own) @ weights, -BOUND, BOUND)
    return np.exp(logarithm) if logarithm.ndim else float(np.exp(logarithm))


def calibrated(work: Work, family: str, target: Target) -> bool:
    """Whether a calibration covers kernels of a family like this one. What a flop takes of the
    board's power is none: whole models tell it, and not how far off kernels are."""
    factors = (path for path in target.factors if ".joules" not in path)
    return any(path.partition(".")[0] == family for path in factors) or label(work) in groups(
        target.local
    )


def left_out_ends(family: str, target: Target) -> tuple[float, float]:
    """Logarithms of measured over predicted that 80 % of the kernels left out by this target's own
    calibration lay between; of a family without one (0, 0)."""
    ends = (target.backtest.get(f"{family}.{end}", 1.0) for end in ("low", "high"))
    low, high = map(log, ends)
    return low, high


@lru_cache(maxsize=64)
def groups(paths: FrozenTable[float]) -> frozenset[str]:
    """The families, or kinds of kernels, that paths of a calibration are of."""
    return frozenset(path.partition(".")[0] for path in paths)


@dataclass(frozen=True)
class Points:
    """Kernels in the space of the logarithms of their columns, called `names`."""

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    at: Array

    @staticmethod
    def of(paths: Iterable[str]) -> Points:
        """From the paths of `Target.local`: a kind of kernels, a point, columns and numbers."""
        kinds, rows = zip(*(_read(path) for path in paths), strict=True)
        at = [[_logarithm(name, n) for name, n in row.items()] for row in rows]
        return Points(kinds, tuple(rows[0]), np.array(at, float))

    def process(self, noise: float = NOISE) -> Process:
        """Of the errors of these kernels, a row by itself being off by `noise`."""
        own = np.array([[a == b for b in self.kinds] for a in self.kinds])
        return Process(_alike(self.at, self.at, own) + noise**2 * np.eye(len(self.at)))


def _read(path: str) -> tuple[str, dict[str, float]]:
    kind, _, text = path.partition(".")
    return kind, columns_of(text)


@lru_cache(maxsize=64)
def _known(
    local: FrozenTable[float], kernel: str, names: tuple[str, ...]
) -> tuple[Points, Array] | None:
    """The points of a kernel's kinds that have these columns, and their weights in corrections."""
    own = kernel.partition(".")[2]
    rows = {
        path: ratio
        for path, ratio in local.items()
        if own == re.split("[ .]", path)[0] and tuple(_read(path)[1]) == names
    }
    if not rows:
        return None
    points = Points.of(rows)
    errors = np.log(np.array(list(rows.values()), float))
    return points, points.process().weights(errors)


def damped(points: Points, errors: Array, noise: float) -> Array:
    """What to write down of errors so that `correction` takes rows to be off by `noise`."""
    return points.process().covariance @ points.process(noise).weights(errors)


def _logarithm(name: str, n: Number) -> Number:
    """An instruction more or less a cell tells two kernels apart more than a row does."""
    return 2.0 * np.log1p(n) if name == "ops" else np.log(np.maximum(n, 1.0))


def _alike(here: Array, there: Array, own: Array) -> Array:
    """The covariance of the errors of kernels here with those of kernels there; `own`: of the same
    kind. Those of other kinds share a part of the wide one."""
    far = squares(here, there)
    wide = smooth(far, WIDE**2, WIDE_REACH) * np.where(own, 1.0, OTHERS)
    return wide + smooth(far, NARROW**2, NARROW_REACH) * own
