"""How far off the model is on what it was not fitted on, and the intervals that follow.

Three backtests: a GPU left out whole (an unseen GPU), the same GPU after a calibration on some of
its rows, and half of the shapes left out (a known GPU).

A row of an unseen GPU is off by what all rows of that GPU are, and by its own. Of the former there
are as many examples as GPUs, a handful, so the interval is that of Student's t for the next draw of
a normal distribution whose spread is estimated (Gelman and others, Bayesian Data Analysis, 3rd ed.,
2013, section 3.2), the spread being shrunk to that of other families (section 5.4; Smyth,
Statistical Applications in Genetics and Molecular Biology 3(1), 2004, on few examples each). Of the
latter there are thousands, taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context

import numpy as np

from gpuir.cost.families import FAMILIES, family_of
from gpuir.cost.learned import Familiar, Interval, Model, Trained
from gpuir.cost.tile import predict
from gpuir.fit.batch import MeasuredBatch
from gpuir.fit.calibrate import calibration
from gpuir.fit.columns import Floats, Ints
from gpuir.fit.learn import AS_THEY_ARE, Watch, fitted, samples, usable
from gpuir.fit.score import drawn

COVERED = 0.8  # share of measurements that an interval is to hold
LEAST = 150  # rows that a point of an interval rests on
LEAST_OWN = 10  # of them, that say how far off a GPU is there
POINTS = 6  # of an interval, at most, along the predicted time
CALIBRATED_ON = 32  # rows of each family, of a GPU that is calibrated
# How far apart GPUs are in the median of their errors: the standard deviation of its logarithm in
# the middle one of the families that tile@2 has, and as how many GPUs more it counts (3.8 by
# Smyth's estimator on their standard deviations, 0.03 to 0.36).
USUAL_SPREAD = 0.08
USUAL_GPUS = 3
ENDS = ((1 - COVERED) / 2, (1 + COVERED) / 2)
QUANTILES = (np.arange(200) + 0.5) / 200


@dataclass(frozen=True)
class Misses:
    """What a backtest found on the rows of one family and GPU."""

    device: str
    dtype: str
    time_s: Floats  # predicted, of the family's kernel
    error: Floats  # log(measured / predicted)


Backtest = Mapping[str, Sequence[Misses]]  # by family


@dataclass(frozen=True)
class Backtests:
    """The errors on each GPU by the model fitted without it, and by the same after a calibration;
    on half of the shapes by the model fitted to the other half."""

    unseen: Backtest = field(default_factory=dict[str, Sequence[Misses]])
    calibrated: Backtest = field(default_factory=dict[str, Sequence[Misses]])
    known: Backtest = field(default_factory=dict[str, Sequence[Misses]])

    def places(self) -> dict[Familiar, Backtest]:
        return {"unseen": self.unseen, "calibrated": self.calibrated, "known": self.known}

    def without(self, device: str) -> Backtests:
        """What they found on other GPUs."""

        def others(backtest: Backtest) -> Backtest:
            return {n: [m for m in found if m.device != device] for n, found in backtest.items()}

        return Backtests(others(self.unseen), others(self.calibrated), others(self.known))


def backtests(
    batches: Sequence[MeasuredBatch], *, seed: int = 0, watch: Watch | None = None
) -> Backtests:
    """All three."""
    batches = usable(batches, seed)
    left_out = _each_left_out(batches, seed, watch)
    if watch is not None:
        watch("without half of the shapes")
    half, rest = halves(batches, seed)
    known = misses(rest, fitted(half, seed=seed))
    return replace(_errors(left_out), known=known)


def leave_one_out(
    batches: Sequence[MeasuredBatch], *, seed: int = 0, watch: Watch | None = None
) -> dict[str, Model]:
    """For each GPU of the measurements, the model fitted to those of all the others. Its intervals
    are from the errors that those had when they were left out."""
    left_out = _each_left_out(usable(batches, seed), seed, watch)
    errors = _errors(left_out)
    return {d: with_intervals(found.model, errors.without(d)) for d, found in left_out.items()}


@dataclass(frozen=True)
class _LeftOut:
    """A model without a GPU, its errors there, and those after a calibration."""

    model: Model
    unseen: Backtest
    calibrated: Backtest


def _each_left_out(
    batches: Sequence[MeasuredBatch], seed: int, watch: Watch | None
) -> dict[str, _LeftOut]:
    """By GPU, in as many processes as there are cores."""
    devices = sorted({b.target.device for b in batches})
    done: dict[str, _LeftOut] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for device, found in zip(
            devices, pool.map(partial(_without, batches, seed), devices), strict=True
        ):
            done[device] = found
            if watch is not None:
                watch(f"without {device}")
    return done


def _without(batches: Sequence[MeasuredBatch], seed: int, device: str) -> _LeftOut:
    """The model of the families that a GPU has, fitted to the others' measurements."""
    rest = [b for b in batches if b.target.device != device]
    own = [b for b in batches if b.target.device == device]
    names = {family_of(w, b.target).name for b in own for w in b.works}
    model = fitted(rest, seed=seed, families=[name for name in FAMILIES if name in names])
    seen, others = drawn(own, CALIBRATED_ON, seed)
    targets = {
        name: calibration(target, [b for b in seen if b.target.name == name], model=model)[0]
        for name, target in {b.target.name: b.target for b in own}.items()
    }
    moved = [replace(b, target=targets[b.target.name]) for b in others]
    fitted_names = (*model, *AS_THEY_ARE)
    before, after = (misses(rows, model) for rows in (own, moved))
    unseen, calibrated = ({n: t[n] for n in fitted_names if n in t} for t in (before, after))
    return _LeftOut(model, unseen, calibrated)


def _errors(left_out: Mapping[str, _LeftOut]) -> Backtests:
    """Those of all GPUs."""
    unseen: dict[str, list[Misses]] = {}
    calibrated: dict[str, list[Misses]] = {}
    for found in left_out.values():
        for name, errors in found.unseen.items():
            unseen.setdefault(name, []).extend(errors)
        for name, errors in found.calibrated.items():
            calibrated.setdefault(name, []).extend(errors)
    return Backtests(unseen, calibrated)


def halves(
    batches: Iterable[MeasuredBatch], seed: int
) -> tuple[list[MeasuredBatch], list[MeasuredBatch]]:
    """The batches, their shapes divided in two at random."""
    sides: tuple[list[MeasuredBatch], list[MeasuredBatch]] = ([], [])
    rng = np.random.default_rng(seed)
    for batch in batches:
        left = rng.random(int(batch.which.max(initial=0)) + 1) < 0.5
        for side, rows in zip(sides, (left[batch.which], ~left[batch.which]), strict=True):
            if rows.any():
                side.append(batch.take(rows))
    return sides


def misses(batches: Iterable[MeasuredBatch], model: Model) -> dict[str, list[Misses]]:
    """The errors of a model on rows that are `usable`, by family."""
    batches = list(batches)
    found: dict[str, list[Misses]] = {}
    for name, family in FAMILIES.items():
        for s in samples(family, batches, model):
            time_s = predict(s.work, s.target, model=model).time_s
            shown = time_s - s.target.launch_s + s.other_s
            found.setdefault(name, []).append(
                Misses(s.device, s.dtype, time_s, np.log(s.device_s / shown))
            )
    return found


# ---------------------------------------------------------------------------- intervals


def with_intervals(model: Model, found: Backtests) -> dict[str, Trained]:
    """The model with the intervals that its backtests amount to. A family that was measured on one
    GPU gets those of its known shapes, as far apart on other GPUs as GPUs usually are; one that
    nothing is fitted of has no known GPU."""
    usual: dict[Familiar, float] = {
        "unseen": usual_spread(found.unseen),
        "calibrated": usual_spread(found.calibrated),
    }
    done: dict[str, Trained] = {}
    for name, trained in model.items():
        known = () if name in AS_THEY_ARE else found.known.get(name, ())
        errors: dict[Familiar, Sequence[Misses]] = {
            "unseen": found.unseen.get(name) or known,
            "calibrated": found.calibrated.get(name, ()),
            "known": known,
        }
        intervals: dict[str, Interval] = {}
        for place, some in errors.items():
            intervals |= _intervals(place, some, usual.get(place))
        done[name] = replace(trained, intervals=intervals)
    return done


def _intervals(
    place: Familiar, errors: Sequence[Misses], usual: float | None
) -> dict[str, Interval]:
    """Of all errors, and of those of each dtype that was measured on two GPUs or more."""
    if not errors:
        return {}
    found = {str(place): interval_of(errors, usual)}
    spread = None if usual is None else _spread(errors, usual)
    for dtype in sorted({m.dtype for m in errors}):
        some = [m for m in errors if m.dtype == dtype]
        if len({m.device for m in some}) > 1 and len(some) < len(errors):
            found[f"{place} {dtype}"] = interval_of(some, spread)
    return found


def held(backtest: Backtest) -> dict[str, float]:
    """The share of each family's errors that intervals from the other GPUs' hold, GPUs weighing
    alike; of families that were measured on two or more."""
    shares: dict[str, float] = {}
    for name, errors in backtest.items():
        each: list[float] = []
        for device in {m.device for m in errors}:
            others = Backtests(unseen=backtest).without(device).unseen
            if others[name]:
                own = [m for m in errors if m.device == device]
                each.append(_held(own, _intervals("unseen", others[name], usual_spread(others))))
        if each:
            shares[name] = float(np.mean(each))
    return shares


def _held(errors: Sequence[Misses], intervals: Mapping[str, Interval]) -> float:
    inside: list[Floats] = []
    for m in errors:
        interval = intervals.get(f"unseen {m.dtype}", intervals["unseen"])
        low, high = interval.at(m.time_s)
        real = m.time_s * np.exp(m.error)
        inside.append((low <= real) & (real <= high))
    return float(np.mean(np.concatenate(inside)))


def interval_of(errors: Sequence[Misses], usual: float | None = None) -> Interval:
    """Between which logarithms 80 % of the errors are expected, by predicted time: on the GPUs that
    had them, weighing alike; or on another GPU, if `usual` says how far apart GPUs usually are."""
    devices = sorted({m.device for m in errors})
    gpu = np.concatenate([np.full(len(m.error), devices.index(m.device)) for m in errors])
    error = np.concatenate([m.error for m in errors])
    log_time = np.log(np.concatenate([m.time_s for m in errors]))
    weight = 1.0 / np.bincount(gpu)[gpu]
    points = int(np.clip(len(error) // LEAST, 1, POINTS))
    order = np.argsort(log_time, kind="stable")
    at: list[float] = []
    sides: list[tuple[float, float]] = []
    for rows in np.array_split(order, points):
        at.append(float(np.median(log_time[rows])))
        if usual is None:
            low, high = _quantiles(error[rows], weight[rows], np.array(ENDS))
        else:
            low, high = _ends_elsewhere(error[rows], gpu[rows], usual)
        sides.append((min(float(low), 0.0), max(float(high), 0.0)))
    low, high = np.array(sides).T
    return Interval(np.array(at), low, high)


def _ends_elsewhere(error: Floats, gpu: Ints, usual: float) -> Floats:
    """The ends for a GPU that is none of these: what it is off by as a whole, and what its rows are
    by themselves, one as likely with the other."""
    each = [error[gpu == g] for g in np.unique(gpu)]
    each = [e for e in each if len(e) >= LEAST_OWN] or [error]
    own = np.array([np.median(e) for e in each])
    alone = np.concatenate([e - middle for e, middle in zip(each, own, strict=True)])
    weight = np.concatenate([np.full(len(e), 1 / len(e)) for e in each])
    rows = _quantiles(alone, weight, QUANTILES)
    next_one = np.sqrt(_variance(own, usual) * (1 + 1 / len(own)))
    gpus = next_one * _student(len(own) - 1 + USUAL_GPUS)
    return np.asarray(np.quantile(gpus[:, None] + rows, ENDS), float)


def _variance(own: Floats, usual: float) -> float:
    """How far apart GPUs are, squared, given what each was off by when left out: n / (n - 1) times
    as far from the mean of the n - 1 others as from that of all. One alone adds what it was off by
    to what is usual."""
    n = len(own)
    if n == 1:
        return float(usual**2 + own[0] ** 2)
    squares = np.sum((own * (n - 1) / n) ** 2)
    return float((squares + USUAL_GPUS * usual**2) / (n - 1 + USUAL_GPUS))


def _spread(errors: Sequence[Misses], usual: float) -> float:
    return float(np.sqrt(_variance(_medians(errors), usual)))


def usual_spread(backtest: Backtest) -> float:
    """How far apart GPUs are in the middle one of the families that two or more were measured in;
    where there are none, as in those that come with gpuir."""
    each = [own for own in map(_medians, backtest.values()) if len(own) > 1]
    alone = [np.sqrt(np.sum((o * (len(o) - 1) / len(o)) ** 2) / (len(o) - 1)) for o in each]
    return float(np.median(alone)) if alone else USUAL_SPREAD


def _medians(errors: Sequence[Misses]) -> Floats:
    """What the middle row of each GPU is off by."""
    devices = sorted({m.device for m in errors})
    parts = [[m.error for m in errors if m.device == d] for d in devices]
    return np.array([np.median(np.concatenate(p)) for p in parts])


@cache
def _student(freedom: float) -> Floats:
    """Quantiles of Student's t: with x = sqrt(freedom) tan(a), its density is as cos(a) to the
    power of freedom - 1."""
    a = (np.arange(20_000) + 0.5) / 20_000 * np.pi - np.pi / 2
    total = np.cumsum(np.cos(a) ** (freedom - 1))
    return np.sqrt(freedom) * np.tan(np.interp(QUANTILES, total / total[-1], a))


def _quantiles(values: Floats, weights: Floats, shares: Floats) -> Floats:
    order = np.argsort(values, kind="stable")
    total: Floats = np.cumsum(weights[order])
    places: Ints = np.searchsorted(total / total[-1], shares).astype(np.int64)
    return values[order][np.minimum(places, len(values) - 1)]
