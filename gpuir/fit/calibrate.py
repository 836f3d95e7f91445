"""Calibration: a few physically named factors of the model moved to agree with one's own device,
and what they leave of the error written down (`gpuir.cost.local`).

Each family's factors that differ from one device to the next (`Factor.spread`) get a multiplier,
the likeliest one given the measurements and how far such factors have been seen to move: least
squares on the logarithm of the error with Gaussian priors, outliers weighing less (Huber, Robust
Estimation of a Location Parameter, 1964), by Gauss-Newton with differences for derivatives.

How far to go is for the measurements to say, divided in five. A GPU that the model was fitted to
stays as it is unless more predicts rows that were not seen better, by a standard error (Breiman and
others, Classification and Regression Trees, 1984, section 3.4.3). On any other, factors and
corrections are what priors allow, and both are made unless less is better, by half of one: five
folds of 32 rows see gains of a twentieth, as products and attention have, in one draw of four.

The same five parts tell between what multiples of the predicted time rows lie that were not seen.
As many of n errors as make (n + 1) 80 % hold the next one, whatever they are drawn from (Lei and
others, Distribution-Free Predictive Inference for Regression, JASA 113, 2018, section 2; of errors
by cross-validation Barber and others, Predictive inference with the jackknife+, Annals of
Statistics 49, 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np

from gpuir.cost import local
from gpuir.cost.families import family_of
from gpuir.cost.learned import Array, Model, Trained, factors, shipped
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.tile import estimate, predict
from gpuir.fit.batch import MeasuredBatch, joined
from gpuir.fit.columns import Floats, Ints
from gpuir.targets.target import FrozenTable, Target

STEPS = 8  # of Gauss-Newton; it mostly ends after four
HALVINGS = 4  # of one step that does not help
DIFFERENCE = 0.02  # of a factor's logarithm, for a derivative
USUAL_ERROR = 0.1  # logarithm that a row is off by, before the rows themselves say
USUAL_ROWS = 5  # how many rows that counts for
LEAST_ERROR = 0.03  # rows are never trusted beyond this: clocks and temperatures drift
MADS = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution
TELLING = 0.005  # a factor that moved by less did not move
BENT = 1.5  # times the usual error, from where a row weighs by its error and not its square
WORTH = 0.95  # of the error, that corrections from others must come below to be made
NOISES = (0.1, 0.2, 0.4)  # how far off a row by itself may be held to be (`local.NOISE`)
MOST_NEAR = 200  # kernels of a kind that correct others
OUTSIDE = 0.1  # of the next rows, on either side of a backtest's ends
ENDS = ("low", "high")
LEAST_MISS, MOST_MISS = 1e-3, 1e3  # measured over predicted: Target.backtest
FOLDS = 5  # of the measurements: each is predicted by a calibration on the others
MOST = np.log(10.0)  # that a factor may move: Target.factors


@dataclass(frozen=True)
class FamilyFit:
    """What calibration made of one family: mean absolute errors of `rows` measurements, by the
    target as it was, and each by a calibration on others; the factors that moved, and how many of
    the kernels correct those near them. 80 % of rows left out lay between `ends` times what was
    predicted. `kept` families stay as they were; `refused` is the error of a calibration that was
    not made, as it was more, else 0."""

    family: str
    rows: int
    before: float
    after: float
    moved: Mapping[str, float]
    local: int
    ends: tuple[float, float] = (1.0, 1.0)
    kept: bool = False
    refused: float = 0.0


class CalibrationWay(NamedTuple):
    """What calibration may do to a family: move its factors, correct kernels by others' errors."""

    factors: bool
    local: bool


WAYS = (
    CalibrationWay(True, True),
    CalibrationWay(False, True),
    CalibrationWay(True, False),
    CalibrationWay(False, False),
)  # most first
NOTHING = WAYS[-1]


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


def calibration(
    target: Target,
    batches: Iterable[MeasuredBatch],
    *,
    model: Model | None = None,
    no_worse: bool = False,
) -> tuple[Target, tuple[FamilyFit, ...]]:
    """The calibrated target, and how well a calibration predicts rows that it has not seen.

    Families of which less predicts those better are changed by less, or not at all; those whose
    mean error would be more, by however little, only unless `no_worse`.
    """
    model = shipped() if model is None else model
    fits: list[FamilyFit] = []
    for group in groups(target, batches):
        names = sorted({family_of(w, target).name for b in group for w in b.works})
        logarithms = _held_out(target, group, model)
        errors = {way: np.abs(np.expm1(e)) for way, e in logarithms.items()}
        known = all(target.device in model.get(n, Trained()).devices for n in names)
        mixed = not target.is_cpu and len({w.dtype for b in group for w in b.works}) > 1
        means = {way: float(np.mean(e)) for way, e in errors.items()}
        way, refused = chosen(errors, known or mixed), 0.0
        if no_worse and means[way] > means[NOTHING]:
            refused = means[way]
            way = min(reversed(WAYS), key=means.__getitem__)
        plain, target = target, _fitted(target, group, model, (way,))[way]
        moved = {p: v for p, v in target.factors.items() if p.partition(".")[0] in names}
        local = len(set(target.local.items()) - set(plain.local.items()))
        ends = ends_of(-logarithms[way])
        low, high = ({f"{n}.{end}": x for n in names} for end, x in zip(ENDS, ends, strict=True))
        target = replace(target, backtest=FrozenTable({**target.backtest, **low, **high}))
        rows = sum(map(len, group))
        fits.append(
            FamilyFit(
                ", ".join(names),
                rows,
                before=means[NOTHING],
                after=means[way],
                moved=moved,
                local=local,
                ends=ends,
                kept=way == NOTHING,
                refused=refused if way == NOTHING else 0.0,
            )
        )
    return target, tuple(fits)


def chosen(errors: Mapping[CalibrationWay, Floats], wary: bool) -> CalibrationWay:
    """The way to go by how far off each row is in each: when `wary` the least that is about as good
    as the best, else the most. Wary of a known GPU, and on a GPU of rows of several dtypes, where
    the mean of a few is that of the noisiest. Not on a CPU: factors carry over from its kernels to
    those of other models, and corrections do not."""
    best = min(WAYS, key=lambda way: float(np.mean(errors[way])))
    for way in reversed(WAYS) if wary else WAYS:
        more = errors[way] - errors[best]
        clear = (1.0 if wary else 0.5) * np.std(more) / np.sqrt(len(more))
        if np.mean(more) <= clear:
            return way
    return best


def ends_of(misses: Floats) -> tuple[float, float]:
    """Between what multiples of the predicted time the next row is in 80 % of cases, given
    logarithms of what rows not seen were: by both sides where there are enough rows for that, else
    by the size of the errors alone. The largest of fewer than four holds less."""
    count = len(misses)
    outside = int((count + 1) * OUTSIDE)
    if outside:
        low, high = np.sort(misses)[[outside - 1, count - outside]]
    else:
        inside = int(np.ceil((count + 1) * (1 - 2 * OUTSIDE)))
        high = np.sort(np.abs(misses))[min(inside, count) - 1]
        low = -high
    ends = np.clip(np.exp([min(low, 0.0), max(high, 0.0)]), LEAST_MISS, MOST_MISS)
    return float(f"{ends[0]:.4g}"), float(f"{ends[1]:.4g}")


def with_factors(target: Target, moved: Mapping[str, float]) -> Target:
    return replace(target, factors=FrozenTable({**target.factors, **moved}))


# ---------------------------------------------------------------------------- measurements


def groups(target: Target, batches: Iterable[MeasuredBatch]) -> list[list[MeasuredBatch]]:
    """The usable rows, each with kernels of its own, those of different families apart unless their
    kernels come together."""
    related: list[tuple[set[str], list[MeasuredBatch]]] = []
    for batch in batches:
        rows = np.flatnonzero(~batch.on_floor)
        if batch.suspect or not len(rows):
            continue
        mine = _rows(batch, rows)
        names = {family_of(w, target).name for w in mine.works}
        together = [g for g in related if g[0] & names]
        related = [g for g in related if not g[0] & names]
        merged = [b for _, others in together for b in others]
        related.append((names.union(*(n for n, _ in together)), [*merged, mine]))
    return [joined(mine) for _, mine in related]


def _rows(batch: MeasuredBatch, rows: Ints) -> MeasuredBatch:
    """Some rows of a batch, each its own shape."""
    some = batch.take(rows)
    works = tuple(w.take(some.which) for w in some.works)
    return replace(some, works=works, which=np.arange(len(rows)), dims={})


@dataclass
class Trials(Sheet):
    """Where several values of factors are tried at once: by path a column of multipliers, which
    makes a row of times a trial."""

    multipliers: Mapping[str, Array] = field(default_factory=dict[str, Array])

    def factors(
        self, family: str, known: Iterable[Factor], target: Target, values: Mapping[str, Number]
    ) -> Mapping[str, Number]:
        moved = dict(values)
        for f in known:
            if (m := self.multipliers.get(f"{family}.{f.name}")) is not None:
                moved[f.name] = np.clip(values[f.name] * m, f.low, f.high)
        return moved


def _errors(target: Target, batch: MeasuredBatch, model: Model) -> Floats:
    """Logarithms of predicted over measured."""
    times = [predict(w, target, model=model).time_s for w in batch.works]
    return _compared(batch, sum(times, np.zeros(len(batch))), target)


def _tried(
    target: Target,
    batch: MeasuredBatch,
    tiles: Sequence[Tiles],
    multipliers: Mapping[str, Array],
    model: Model,
) -> Floats:
    """As `_errors` under known tiles, a row for each trial of some factors."""
    total = np.zeros((len(next(iter(multipliers.values()))), len(batch)))
    for w, cut in zip(batch.works, tiles, strict=True):
        sheet = Trials(multipliers=multipliers)
        total = total + estimate(w, cut, target, s=sheet, model=model).time_s
    return _compared(batch, total, target)


def _compared(batch: MeasuredBatch, total: Floats, target: Target) -> Floats:
    """Logarithms of seconds in all of a batch's kernels over what was measured."""
    if not batch.clock.launches:
        total = total - len(batch.works) * target.launch_s
    return np.log(np.maximum(batch.clock.shows(total), 1e-9) / batch.latency_s)


# ---------------------------------------------------------------------------- fitting


def _knobs(target: Target, group: Sequence[MeasuredBatch], model: Model) -> list[Knob]:
    """The factors that may move, in multiples of what the model has for this device."""
    families = {f.name: f for b in group for f in (family_of(w, target) for w in b.works)}
    plain = replace(target, factors=FrozenTable())
    knobs: list[Knob] = []
    for family in families.values():
        values = factors(family, plain, model)
        for f in family.factors:
            if f.spread > 0:
                with np.errstate(divide="ignore"):  # some may be as low as 0
                    low, high = (float(np.log(end / values[f.name])) for end in (f.low, f.high))
                knobs.append(Knob(family.name, f, max(low, -MOST), min(high, MOST)))
    return knobs


def _fitted(
    target: Target,
    group: Sequence[MeasuredBatch],
    model: Model,
    ways: Iterable[CalibrationWay] = WAYS,
) -> dict[CalibrationWay, Target]:
    """The target, calibrated in each of some ways to one group's kernels. What was said of them
    before goes, unless nothing is to be done."""
    names = {family_of(w, target).name for b in group for w in b.works}
    kinds = {local.label(w) for b in group for w in b.works}
    plain = replace(
        target,
        factors=_without(target.factors, names),
        local=_without(target.local, kinds),
    )
    moved = plain
    if any(way.factors for way in ways):
        moved = with_factors(plain, _multipliers(plain, group, model))
    targets: dict[CalibrationWay, Target] = {}
    for way in ways:
        there = moved if way.factors else plain
        if way.local:
            there = replace(
                there, local=FrozenTable({**there.local, **_local(there, group, model)})
            )
        targets[way] = there if any(way) else target
    return targets


def _without(multipliers: FrozenTable[float], groups: set[str]) -> FrozenTable[float]:
    return FrozenTable({p: v for p, v in multipliers.items() if p.partition(".")[0] not in groups})


def _multipliers(target: Target, group: Sequence[MeasuredBatch], model: Model) -> dict[str, float]:
    """Multipliers of the factors of one group's families, rounded to four digits."""
    knobs = _knobs(target, group, model)
    if not knobs:
        return {}
    spreads = np.array([k.factor.spread for k in knobs])
    low, high = np.array([k.low for k in knobs]), np.array([k.high for k in knobs])

    def better(x: Array) -> Array | None:
        """Where a step leads; None if nowhere better."""
        moved = {k.path: float(np.exp(v)) for k, v in zip(knobs, x, strict=True)}
        here = with_factors(target, moved)
        cuts = [[predict(w, here, model=model).tiles for w in b.works] for b in group]

        def errors(tried: Array) -> Array:
            """A row for each trial of all the knobs."""
            columns = {k.path: np.exp(v)[:, None] for k, v in zip(knobs, tried.T, strict=True)}
            rows = (_tried(target, b, c, columns, model) for b, c in zip(group, cuts, strict=True))
            return np.concatenate(list(rows), axis=1)

        around = errors(np.vstack([x, x + DIFFERENCE * np.eye(len(knobs))]))
        r, slopes = around[0], (around[1:] - around[0]) / DIFFERENCE
        usual = _usual(r)
        weights = np.minimum(1.0, BENT * usual / np.maximum(np.abs(r), 1e-9)) / usual**2
        curve: Array = (slopes * weights) @ slopes.T + np.diag(spreads**-2.0)
        away: Array = slopes @ (weights * r) + x / spreads**2
        step = cast(Array, np.linalg.solve(curve, -away))
        ends = np.clip(x + step * 0.5 ** np.arange(HALVINGS)[:, None], low, high)
        costs = [_cost(e, end, usual, spreads) for e, end in zip(errors(ends), ends, strict=True)]
        least = _cost(r, x, usual, spreads)
        return next((end for end, cost in zip(ends, costs, strict=True) if cost < least), None)

    x = np.clip(np.zeros(len(knobs)), low, high)
    for _ in range(STEPS):
        there = better(x)
        if there is None:
            break
        moved, x = np.max(np.abs(there - x)), there
        if moved < 1e-3:
            break
    telling = [(k.path, v) for k, v in zip(knobs, x, strict=True) if abs(v) > TELLING]
    return {path: float(f"{np.exp(v):.4g}") for path, v in telling}


def _usual(errors: Array) -> float:
    """How far off a row usually is, whatever all have in common: what the rows say, and some rows
    more that are off by what rows usually are."""
    scatter = (MADS * float(np.median(np.abs(errors - np.median(errors))))) ** 2
    count = len(errors)
    both = (count * scatter + USUAL_ROWS * USUAL_ERROR**2) / (count + USUAL_ROWS)
    return max(LEAST_ERROR, float(np.sqrt(both)))


def _cost(errors: Array, x: Array, usual: float, spreads: Array) -> float:
    """Minus twice the logarithm of how likely this is, but for a constant."""
    size = np.abs(errors) / usual
    bent = np.where(size < BENT, size**2, BENT * (2 * size - BENT))
    return float(bent.sum() + np.sum((x / spreads) ** 2))


def _local(target: Target, group: Sequence[MeasuredBatch], model: Model) -> dict[str, float]:
    """By how much each kernel measured is still missed, where that says something of others:
    kernels of which each is predicted better by the others' errors than without. Of several
    launched together it is the last that is missed."""
    rows: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for b in group:
        work = b.works[-1]
        kernel_s = [predict(w, target, model=model).time_s for w in b.works]
        launches = target.launch_s if b.clock.launches else (1 - len(kernel_s)) * target.launch_s
        waits_s = b.clock.lead_s + launches + sum(kernel_s[:-1], np.zeros(len(b)))
        busy_s = np.maximum(kernel_s[-1] - target.launch_s, 1e-12)
        left = np.log(np.maximum(b.latency_s - waits_s, 0.1 * busy_s) / busy_s)
        columns = local.columns(work)
        known = rows.setdefault((work.kernel, *columns), {})
        for i in range(len(left)):
            if busy_s[i] > waits_s[i] / 2 and len(known) < MOST_NEAR:
                point = local.point({c: n[i] if np.ndim(n) else n for c, n in columns.items()})
                known.setdefault(f"{local.label(work)}.{point}", []).append(left[i])
    result: dict[str, float] = {}
    for paths in filter(None, rows.values()):
        means = np.array([float(np.mean(e)) for e in paths.values()])
        errors = np.clip(means, -local.BOUND, local.BOUND)
        points = local.Points.of(paths)
        left = {noise: _mean_size(points.process(noise).left_out(errors)) for noise in NOISES}
        noise = min(NOISES, key=left.__getitem__)
        if left[noise] < WORTH * _mean_size(errors):
            ratios = np.exp(local.damped(points, errors, noise))
            result |= {p: float(f"{r:.4g}") for p, r in zip(paths, ratios, strict=True)}
    return result


def _mean_size(errors: Floats) -> float:
    return float(np.mean(np.abs(errors)))


def _held_out(
    target: Target, group: Sequence[MeasuredBatch], model: Model
) -> dict[CalibrationWay, Floats]:
    """For each way, how far off each row is, predicted by a calibration without it: logarithms of
    predicted over measured."""
    errors_of = {way: [np.zeros(len(b)) for b in group] for way in WAYS}
    draw = np.random.default_rng(0)
    number = draw.permutation(sum(map(len, group))) % FOLDS
    folds = np.split(number, np.cumsum([len(b) for b in group])[:-1])
    for fold in range(FOLDS):
        rest = [_rows(b, np.flatnonzero(f != fold)) for b, f in zip(group, folds, strict=True)]
        there = _fitted(target, [b for b in rest if len(b)], model)
        for i, (b, f) in enumerate(zip(group, folds, strict=True)):
            mine = np.flatnonzero(f == fold)
            if len(mine):
                for way in WAYS:
                    errors_of[way][i][mine] = _errors(there[way], _rows(b, mine), model)
    return {way: np.concatenate(errors) for way, errors in errors_of.items()}
