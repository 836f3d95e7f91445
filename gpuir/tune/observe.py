"""What measurements of tiles teach the prediction of others: an `Observed` model.

The logarithm of measured over predicted seconds is a Gaussian process (`cost.gaussian`) over
kernels and tiles. Before there are measurements it is as wide as the predictor's own interval; each
narrows it, most for tiles that are alike. `cost.local` compares shapes alone; here tiles are
compared as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np

from gpuir.cost import local
from gpuir.cost.gaussian import Array, Process, smooth, squares
from gpuir.cost.nest import PARTS, PLAIN, Tiles
from gpuir.cost.work import Work
from gpuir.ir.door import NUMBER, holds, many, of_type, takes
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import TILE, Tile
from gpuir.targets.target import Target
from gpuir.tune.kernels import KERNEL, TARGET, Kernel
from gpuir.tune.legal import check
from gpuir.tune.space import TILES, Predictions, Ranked, device_of, predict, ranked

TAIL = 1.2816  # standard deviations between which 80 % of a normal distribution lie, each way
# Shares of the variance: what all kernels on a target have in common, what those of a kind do, what
# tiles share that are alike in a kernel alike, widely and narrowly, and what a measurement is off
# by itself. Chosen on seven sweeps of Kernel Tuner (docs/validation/tuning.md): of the
# errors of `generated@1` there the narrow part is the largest. That of kinds is assumed.
COMMON, KIND, WIDE, NARROW, ALONE = 0.10, 0.10, 0.15, 0.50, 0.15
WIDE_REACH, NARROW_REACH = 8.0, 1.5  # in doublings of a tile's numbers; of a kernel's, twice that
KERNEL_REACH = 0.5
# How many measurements the predictor's own interval counts for, where they tell how far off it is.
PRIOR = 4.0


@dataclass(frozen=True)
class Observation:
    """A measurement of a tile: of which kernel, by its kind and its columns (`cost.local`), the
    logarithm of measured over predicted, and the standard deviation that was expected of it."""

    kind: str
    columns: tuple[tuple[str, float], ...]
    tile: Tile
    error: float
    deviation: float

    @staticmethod
    def of(kind: str, columns: Mapping[str, float], x: Ranked, measured_s: float) -> Observation:
        """From a prediction, and the seconds that were measured."""
        error = float(np.log(measured_s / x.time_s))
        return Observation(kind, tuple(columns.items()), x.tile, error, deviation(*x.interval_s))


@holds(target=of_type(Target, "a target", "gpuir.load_target('a100')"))
@dataclass(frozen=True)
class Observed:
    """Predictions for one target, corrected by measurements of tiles there.

    `observe` gives a new model that knows one more; this one stays as it is. `predict` is as
    `gpuir.predict`.
    """

    target: Target
    seen: tuple[Observation, ...] = ()

    def __repr__(self) -> str:
        return f"<Observed on {self.target.name}: {len(self.seen):,} measurements>"

    @takes(kernel=KERNEL, tile=TILE, seconds=NUMBER)
    def observe(self, kernel: Kernel, tile: Tile, seconds: float) -> Observed:
        """The model that also knows what a tile of a kernel was measured to take.

        UsageError for no positive time, and for a tile that the target cannot run.
        """
        if not (isfinite(seconds) and seconds > 0):
            raise UsageError(
                f"a measurement of {kernel.name} is not a valid time",
                expected="seconds, above 0",
                found=f"{seconds!r}",
                fix="leave out the measurements that failed",
            )
        check(kernel.work, tile, self.target, kernel.name)
        x = ranked(kernel, tile, self.target)
        kind, columns = local.label(kernel.work), _columns(kernel.work)
        return self.learn(Observation.of(kind, columns, x, seconds))

    @takes(more=many(of_type(Observation, "an observation")))
    def learn(self, *more: Observation) -> Observed:
        """The model that also knows these."""
        return replace(self, seen=(*self.seen, *more))

    @takes(kernel=KERNEL, tiles=TILES, target=TARGET)
    def predict(
        self, kernel: Kernel, tiles: Tiles | None = None, target: str | Target = ""
    ) -> Predictions:
        """Seconds of many tiles of one kernel, corrected; of the library's own kernels, as they
        are. UsageError for another target than the model's."""
        plain = predict(kernel, tiles, target or self.target)
        if tiles is None or not self.seen:
            return plain
        if (device := device_of(kernel, target or self.target)) != self.target:
            raise UsageError(
                "the measurements belong to another target",
                expected=self.target.name,
                found=device.name,
                fix=f"use Observed(load_target({device.name!r})), one model for each target",
            )
        mean, share = self._correction(kernel.work, tiles, len(plain))
        before = np.where(plain.legal.ok, plain.time_s, 1.0)
        low_s, high_s = (np.where(plain.legal.ok, t, 1.0) for t in (plain.low_s, plain.high_s))
        wide = np.log(high_s / low_s) / (2 * TAIL)
        after = before * np.exp(wide * mean)
        down = after * (low_s / before) ** share
        up = after * (high_s / before) ** share
        fits = plain.legal.ok
        after, down, up = (np.where(fits, t, np.inf) for t in (after, down, up))
        return Predictions(after, down, up, plain.legal)

    def _correction(self, work: Work, tiles: Tiles, count: int) -> tuple[Array, Array]:
        """Of each tile the mean of its error, and the width of its interval, both as shares of the
        standard deviation that the predictor expects."""
        process, weights, scale = self._fitted
        mine = _columns(work)
        found = np.full((count, len(self.seen)), COMMON)
        if known := self._kinds.get(local.label(work)):
            here = _places(mine, tiles, count)
            found[:, known.which] += _alike(known.points(here), known.points(known.places))
        left = np.maximum(1.0 - process.known(found), ALONE)
        return found @ weights, np.sqrt(left * scale)

    @cached_property
    def _fitted(self) -> tuple[Process, Array, float]:
        """The process of the observations, their weights, and by how much errors are larger than
        expected (Gelman et al., Bayesian Data Analysis, 2013, section 3.3: the scale of
        a normal distribution, with the predictor's own interval as `PRIOR` observations). Where
        they are smaller nothing follows: a search measures tiles that are alike."""
        n = len(self.seen)
        alike = np.full((n, n), COMMON) + ALONE * np.eye(n)
        for known in self._kinds.values():
            at = known.points(known.places)
            alike[np.ix_(known.which, known.which)] += _alike(at, at)
        process = Process(alike)
        errors = np.array([x.error / x.deviation for x in self.seen])
        weights = process.weights(errors)
        scale = max(1.0, (PRIOR + float(errors @ weights)) / (PRIOR + n))
        return process, weights, scale

    @cached_property
    def _kinds(self) -> dict[str, Known]:
        """The observations by kind of kernel."""
        kinds = dict.fromkeys(x.kind for x in self.seen)
        return {kind: Known.of(self.seen, kind) for kind in kinds}


@dataclass(frozen=True)
class Known:
    """Observations of one kind of kernels: which they are, and their numbers by name, logarithms
    to base 2, an entry for each."""

    which: Any
    places: Mapping[str, Array]

    @staticmethod
    def of(seen: Sequence[Observation], kind: str) -> Known:
        which = [i for i, x in enumerate(seen) if x.kind == kind]
        rows = [_places(dict(seen[i].columns), _tiles(seen[i].tile), 1) for i in which]
        names = dict.fromkeys(name for row in rows for name in row)
        none = np.zeros(1)
        places = {n: np.concatenate([row.get(n, none) for row in rows]) for n in names}
        return Known(np.array(which), places)

    def points(self, places: Mapping[str, Array]) -> Array:
        """Places as vectors, of the names that are known of observations; what has no such number
        is at 0 there."""
        count = len(next(iter(places.values())))
        none = np.zeros(count)
        return np.stack([places.get(name, none) for name in self.places], axis=-1)


def deviation(low_s: float, high_s: float) -> float:
    """The standard deviation of the logarithm of times of which 80 % lie between two."""
    return float(np.log(high_s / low_s) / (2 * TAIL))


def _columns(work: Work) -> dict[str, float]:
    return {name: float(n) for name, n in local.columns(work).items()}


def _tiles(tile: Tile) -> Tiles:
    """The tile's own numbers, whatever kernel it is of."""
    numbers: dict[str, Any] = {name: float(getattr(tile, name)) for name in PLAIN}
    numbers |= {part: dict(getattr(tile, part)) for part in PARTS}
    return Tiles({d: float(n) for d, n in tile.dims}, **numbers)


def _places(columns: Mapping[str, float], tiles: Tiles, count: int) -> dict[str, Array]:
    """What tiles of one kernel are compared by: the logarithms to base 2 of their numbers, and of
    the kernel's columns. Along what a tile does not cut it is as long as the kernel."""
    whole = {d: n for d, n in columns.items() if d not in ("bytes", "flops", "ops")}
    numbers: dict[str, Any] = {f"tile {d}": tiles.dims.get(d, n) for d, n in whole.items()}
    numbers |= {name: getattr(tiles, name) for name in PLAIN}
    numbers |= {f"{p} {of}": 1.0 + n for p in PARTS for of, n in getattr(tiles, p).items()}
    found = {name: np.log2(np.maximum(n, 1.0)) for name, n in numbers.items()}
    found |= {f"kernel {c}": KERNEL_REACH * np.log2(np.maximum(n, 1.0)) for c, n in columns.items()}
    return {name: np.broadcast_to(n, (count,)) for name, n in found.items()}


def _alike(here: Array, there: Array) -> Array:
    """What errors of tiles of one kind of kernels have in common, beside what all have."""
    far = squares(here, there)
    return KIND + smooth(far, WIDE, WIDE_REACH) + smooth(far, NARROW, NARROW_REACH)
