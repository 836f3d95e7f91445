"""Calibration: a few physically named factors of the model moved to agree with one's own device,
and what they leave of the error written down (`gpuir.cost.near`).

Each family's factors that differ from one device to the next (`Factor.spread`) get a multiplier,
the likeliest one given the measurements and how far such factors have been seen to move: least
squares on the logarithm of the error with Gaussian priors, outliers weighing less (Huber, Robust
Estimation of a Location Parameter, 1964), by Gauss-Newton with differences for derivatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuir.cost import near
from gpuir.cost.families import family_of
from gpuir.cost.learned import Array, Model, factors, shipped
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Factor
from gpuir.cost.tile import predict
from gpuir.cost.work import Work
from gpuir.evaluate.batch import Batch
from gpuir.evaluate.columns import Floats, Ints
from gpuir.targets.target import Table, Target

STEPS = 8  # of Gauss-Newton; it mostly ends after four
HALVINGS = 4  # of one step that does not help
DIFFERENCE = 0.02  # of a factor's logarithm, for a derivative
USUAL_ERROR = 0.1  # logarithm that a row is off by, before the rows themselves say
USUAL_ROWS = 5  # how many rows that counts for
LEAST_ERROR = 0.03  # rows are never trusted beyond this: clocks and temperatures drift
MADS = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution
TELLING = 0.005  # a factor that moved by less did not move
BENT = 1.5  # times the usual error, from where a row weighs by its error and not its square
WORTH = 0.95  # of the error, that corrections from others must come below to be kept
MOST_NEAR = 200  # kernels of a kind that correct others
FOLDS = 5  # of the measurements: each is predicted by a calibration on the others
MOST = np.log(10.0)  # that a factor may move: Target.factors


@dataclass(frozen=True)
class Found:
    """What calibration made of one family: mean absolute errors of `rows` measurements, by the
    target as it was, and each by a calibration on others; the factors that moved, and how many of
    the kernels correct those near them."""

    family: str
    rows: int
    before: float
    after: float
    moved: Mapping[str, float]
    near: int


@dataclass(frozen=True)
class Sample:
    """Rows of one batch, one entry each: their kernels, and what was measured."""

    works: tuple[Work, ...]
    lead_s: float  # of the host's time, and of launches that the measurement does not hold
    floor_s: float
    latency_s: Floats

    def take(self, rows: Ints) -> Sample:
        works = tuple(w.take(rows) for w in self.works)
        return replace(self, works=works, latency_s=self.latency_s[rows])


@dataclass(frozen=True)
class Knob:
    """A factor that calibration may move: how its logarithm is bounded."""

    family: str
    factor: Factor
    low: float
    high: float

    @property
    def path(self) -> str:
        return f"{self.family}.{self.factor.name}"


def calibrated(target: Target, batches: Iterable[Batch], *, model: Model | None = None) -> Target:
    """The target with the factors that agree best with measurements on it."""
    model = shipped() if model is None else model
    for group in groups(target, batches):
        target = _fitted(target, group, model)
    return target


def calibration(
    target: Target, batches: Iterable[Batch], *, model: Model | None = None
) -> tuple[Target, tuple[Found, ...]]:
    """The calibrated target, and how well a calibration predicts rows that it has not seen.

    Families of which it does not predict those better are left as they were.
    """
    model = shipped() if model is None else model
    found: list[Found] = []
    for group in groups(target, batches):
        names = sorted({family_of(w, target).name for s in group for w in s.works})
        rows = sum(len(s.latency_s) for s in group)
        before = _mean_size([_errors(target, s, model) for s in group])
        after = _mean_size(_held_out(target, group, model))
        if after >= before:
            found.append(Found(", ".join(names), rows, before, before, {}, 0))
            continue
        known, target = target, _fitted(target, group, model)
        moved = {p: v for p, v in target.factors.items() if p.partition(".")[0] in names}
        near = len(set(target.near.items()) - set(known.near.items()))
        found.append(Found(", ".join(names), rows, before, after, moved, near))
    return target, tuple(found)


def with_factors(target: Target, moved: Mapping[str, float]) -> Target:
    return replace(target, factors=Table({**target.factors, **moved}))


def _mean_size(errors: Sequence[Floats]) -> float:
    """Mean absolute error, as a share, of logarithms of predicted over measured."""
    return float(np.mean(np.abs(np.expm1(np.concatenate(errors)))))


# ---------------------------------------------------------------------------- measurements


def groups(target: Target, batches: Iterable[Batch]) -> list[list[Sample]]:
    """The usable rows, those of different families apart unless their kernels come together."""
    found: list[tuple[set[str], list[Sample]]] = []
    for batch in batches:
        rows = np.flatnonzero(~batch.on_floor)
        if batch.suspect or not len(rows):
            continue
        clock = batch.clock
        lead_s = clock.lead_s - (0 if clock.launches else len(batch.works) * target.launch_s)
        works = tuple(w.take(batch.which[rows]) for w in batch.works)
        sample = Sample(works, lead_s, clock.floor_s, batch.latency_s[rows])
        names = {family_of(w, target).name for w in works}
        together = [g for g in found if g[0] & names]
        found = [g for g in found if not g[0] & names]
        merged = [s for _, samples in together for s in samples]
        found.append((names.union(*(n for n, _ in together)), [*merged, sample]))
    return [samples for _, samples in found]


def _errors(
    target: Target, sample: Sample, model: Model, tiles: Sequence[Tiles] | None = None
) -> Floats:
    """Logarithms of predicted over measured."""
    total = np.full(len(sample.latency_s), sample.lead_s)
    for i, w in enumerate(sample.works):
        total = total + predict(w, target, tiles=tiles[i] if tiles else None, model=model).time_s
    return np.log(np.maximum(total, max(sample.floor_s, 1e-9)) / sample.latency_s)


# ---------------------------------------------------------------------------- fitting


def _knobs(target: Target, group: Sequence[Sample], model: Model) -> list[Knob]:
    """The factors that may move, in multiples of what the model has for this device."""
    families = {f.name: f for s in group for f in (family_of(w, target) for w in s.works)}
    plain = replace(target, factors=Table())
    found: list[Knob] = []
    for family in families.values():
        values = factors(family, plain, model)
        for f in family.factors:
            if f.spread > 0:
                with np.errstate(divide="ignore"):  # some may be as low as 0
                    low, high = (float(np.log(end / values[f.name])) for end in (f.low, f.high))
                found.append(Knob(family.name, f, max(low, -MOST), min(high, MOST)))
    return found


def _fitted(target: Target, group: Sequence[Sample], model: Model) -> Target:
    """The target with factors and corrections for one group's kernels, in place of what it has."""
    names = {family_of(w, target).name for s in group for w in s.works}
    kinds = {near.label(w) for s in group for w in s.works}
    target = replace(
        target,
        factors=_without(target.factors, names),
        near=_without(target.near, kinds),
    )
    target = with_factors(target, _multipliers(target, group, model))
    return replace(target, near=Table({**target.near, **_near(target, group, model)}))


def _without(multipliers: Table[float], groups: set[str]) -> Table[float]:
    return Table({p: v for p, v in multipliers.items() if p.partition(".")[0] not in groups})


def _multipliers(target: Target, group: Sequence[Sample], model: Model) -> dict[str, float]:
    """Multipliers of the factors of one group's families, rounded to four digits."""
    knobs = _knobs(target, group, model)
    if not knobs:
        return {}

    def at(x: Array) -> Target:
        moved = {k.path: float(np.exp(v)) for k, v in zip(knobs, x, strict=True)}
        return with_factors(target, moved)

    spreads = np.array([k.factor.spread for k in knobs])
    low, high = (np.array([getattr(k, end) for k in knobs]) for end in ("low", "high"))
    steps = list(zip(knobs, np.eye(len(knobs)) * DIFFERENCE, strict=True))
    x = np.clip(np.zeros(len(knobs)), low, high)
    for _ in range(STEPS):
        here = at(x)
        cuts = [[predict(w, here, model=model).tiles for w in s.works] for s in group]

        def errors(x: Array, cuts: Sequence[Sequence[Tiles]] = cuts) -> list[Array]:
            there = at(x)
            return [_errors(there, s, model, c) for s, c in zip(group, cuts, strict=True)]

        each = errors(x)
        r = np.concatenate(each)
        usual = _usual(r)
        slopes = np.stack([_slopes(k, at(x + d), group, cuts, each, model) for k, d in steps])
        weights = np.minimum(1.0, BENT * usual / np.maximum(np.abs(r), 1e-9)) / usual**2
        curve = (slopes * weights) @ slopes.T + np.diag(spreads**-2.0)
        step = -np.linalg.solve(curve, slopes @ (weights * r) + x / spreads**2)
        cost = _cost(r, x, usual, spreads)
        for halving in range(HALVINGS):
            there = np.clip(x + step * 0.5**halving, low, high)
            if _cost(np.concatenate(errors(there)), there, usual, spreads) < cost:
                break
        else:
            break
        moved, x = np.max(np.abs(there - x)), there
        if moved < 1e-3:
            break
    moved = [(k.path, v) for k, v in zip(knobs, x, strict=True) if abs(v) > TELLING]
    return {path: float(f"{np.exp(v):.4g}") for path, v in moved}


def _usual(errors: Array) -> float:
    """How far off a row usually is, whatever all have in common: what the rows say, and some rows
    more that are off by what rows usually are."""
    said = (MADS * float(np.median(np.abs(errors - np.median(errors))))) ** 2
    count = len(errors)
    both = (count * said + USUAL_ROWS * USUAL_ERROR**2) / (count + USUAL_ROWS)
    return max(LEAST_ERROR, float(np.sqrt(both)))


def _slopes(
    knob: Knob,
    there: Target,
    group: Sequence[Sample],
    cuts: Sequence[Sequence[Tiles]],
    here: Sequence[Array],
    model: Model,
) -> Array:
    """How errors follow a factor's logarithm; only kernels of its family do."""
    found: list[Array] = []
    for s, c, r in zip(group, cuts, here, strict=True):
        depends = any(family_of(w, there).name == knob.family for w in s.works)
        found.append((_errors(there, s, model, c) - r) / DIFFERENCE if depends else 0.0 * r)
    return np.concatenate(found)


def _cost(errors: Array, x: Array, usual: float, spreads: Array) -> float:
    """Minus twice the logarithm of how likely this is, but for a constant."""
    size = np.abs(errors) / usual
    bent = np.where(size < BENT, size**2, BENT * (2 * size - BENT))
    return float(bent.sum() + np.sum((x / spreads) ** 2))


def _near(target: Target, group: Sequence[Sample], model: Model) -> dict[str, float]:
    """By how much each kernel measured alone is still missed, where that says something of others:
    kernels of which each is predicted better by the others' errors than without."""
    rows: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for s in group:
        if len(s.works) != 1:
            continue
        work = s.works[0]
        predicted_s = predict(work, target, model=model).time_s
        waits_s = s.lead_s + target.launch_s
        busy_s = np.maximum(predicted_s - target.launch_s, 1e-12)
        left = np.log(np.maximum(s.latency_s - waits_s, 0.1 * busy_s) / busy_s)
        found = near.columns(work)
        known = rows.setdefault((work.kernel, *found), {})
        for i in range(len(left)):
            if busy_s[i] > waits_s / 2 and len(known) < MOST_NEAR:
                point = near.point({c: n[i] if np.ndim(n) else n for c, n in found.items()})
                known.setdefault(f"{near.label(work)}.{point}", []).append(left[i])
    result: dict[str, float] = {}
    for points in filter(None, rows.values()):
        means = np.array([float(np.mean(e)) for e in points.values()])
        errors = np.clip(means, -near.BOUND, near.BOUND)
        left = near.left_out(near.Points.of(points), errors)
        if np.mean(np.abs(left)) < WORTH * np.mean(np.abs(errors)):
            ratios = zip(points, np.exp(errors), strict=True)
            result |= {path: float(f"{ratio:.4g}") for path, ratio in ratios}
    return result


def _held_out(target: Target, group: Sequence[Sample], model: Model) -> list[Floats]:
    """Errors of each sample's rows, every row predicted by a calibration without it."""
    errors = [np.zeros(len(s.latency_s)) for s in group]
    draw = np.random.default_rng(0)
    folds = [draw.permutation(len(e)) % FOLDS for e in errors]
    for fold in range(FOLDS):
        rest = [s.take(np.flatnonzero(f != fold)) for s, f in zip(group, folds, strict=True)]
        there = _fitted(target, [s for s in rest if len(s.latency_s)], model)
        for s, f, e in zip(group, folds, errors, strict=True):
            mine = np.flatnonzero(f == fold)
            if len(mine):
                e[mine] = _errors(there, s.take(mine), model)
    return errors
