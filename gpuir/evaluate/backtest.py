"""How far off the model is on what it was not fitted on, and the intervals that follow.

Two backtests: a GPU left out whole (an unseen GPU), and half of the shapes left out (a known one).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from gpuir.cost.families import FAMILIES, family_of
from gpuir.cost.learned import Interval, Model, Trained
from gpuir.cost.tile import predict
from gpuir.evaluate.batch import Batch
from gpuir.evaluate.columns import Floats
from gpuir.evaluate.fit import Watch, samples, train, usable

COVERED = 0.8  # share of measurements that an interval is to hold
LEAST = 150  # rows that a point of an interval rests on
POINTS = 6  # of an interval, at most, along the predicted time


@dataclass(frozen=True)
class Misses:
    """What a backtest found on the rows of one family and GPU."""

    device: str
    dtype: str
    time_s: Floats  # predicted, of the family's kernel
    error: Floats  # log(measured / predicted)


Backtest = Mapping[str, Sequence[Misses]]  # by family


def both(
    batches: Sequence[Batch], *, seed: int = 0, watch: Watch | None = None
) -> tuple[Backtest, Backtest]:
    """The errors on GPUs left out one by one, and on half of the shapes."""
    batches = usable(batches, seed)
    models = _each_left_out(batches, seed, watch)
    if watch is not None:
        watch("without half of the shapes")
    fitted, rest = halves(batches, seed)
    return _of_left_out(batches, models), misses(rest, train(fitted, seed=seed))


def leave_one_out(
    batches: Sequence[Batch], *, seed: int = 0, watch: Watch | None = None
) -> dict[str, Model]:
    """For each GPU of the measurements, the model fitted to those of all the others. Its intervals
    are from the errors that those had when they were left out."""
    batches = usable(batches, seed)
    models = _each_left_out(batches, seed, watch)
    errors = _of_left_out(batches, models)
    done: dict[str, Model] = {}
    for device, model in models.items():
        others = {name: [m for m in found if m.device != device] for name, found in errors.items()}
        done[device] = with_intervals(model, others, {})
    return done


def _each_left_out(batches: Sequence[Batch], seed: int, watch: Watch | None) -> dict[str, Model]:
    """The models, made in as many processes as there are cores."""
    devices = sorted({b.target.device for b in batches})
    models: dict[str, Model] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for device, model in zip(
            devices, pool.map(partial(_without, batches, seed), devices), strict=True
        ):
            models[device] = model
            if watch is not None:
                watch(f"without {device}")
    return models


def _without(batches: Sequence[Batch], seed: int, device: str) -> Model:
    """The model of the families that a GPU has, fitted to the others' measurements."""
    rest = [b for b in batches if b.target.device != device]
    own = {
        family_of(w, b.target).name for b in batches if b.target.device == device for w in b.works
    }
    return train(rest, seed=seed, families=[name for name in FAMILIES if name in own])


def _of_left_out(batches: Sequence[Batch], models: Mapping[str, Model]) -> Backtest:
    """The errors of each GPU's rows by the model that has not seen them."""
    found: dict[str, list[Misses]] = {}
    for device, model in models.items():
        own = [b for b in batches if b.target.device == device]
        for name, errors in misses(own, model).items():
            if name in model:
                found.setdefault(name, []).extend(errors)
    return found


def halves(batches: Iterable[Batch], seed: int) -> tuple[list[Batch], list[Batch]]:
    """The batches, their shapes divided in two at random."""
    sides: tuple[list[Batch], list[Batch]] = ([], [])
    rng = np.random.default_rng(seed)
    for batch in batches:
        left = rng.random(int(batch.which.max(initial=0)) + 1) < 0.5
        for side, rows in zip(sides, (left[batch.which], ~left[batch.which]), strict=True):
            if rows.any():
                side.append(batch.take(rows))
    return sides


def misses(batches: Iterable[Batch], model: Model) -> dict[str, list[Misses]]:
    """The errors of a model, by family."""
    batches = usable(batches)
    found: dict[str, list[Misses]] = {}
    for name, family in FAMILIES.items():
        for s in samples(family, batches, model):
            time_s = predict(s.work, s.target, model=model).time_s
            shown = time_s - s.target.launch_s + s.other_s
            found.setdefault(name, []).append(
                Misses(s.device, s.dtype, time_s, np.log(s.device_s / shown))
            )
    return found


def with_intervals(model: Model, unseen: Backtest, known: Backtest) -> dict[str, Trained]:
    """The model with the intervals that its backtests amount to."""
    done: dict[str, Trained] = {}
    for name, trained in model.items():
        intervals: dict[str, Interval] = {}
        for place, errors in (("unseen", unseen.get(name, ())), ("known", known.get(name, ()))):
            for key, some in _groups(place, errors):
                intervals[key] = interval_of(some, place == "unseen")
        if "known" in intervals and "unseen" not in intervals:
            intervals["unseen"] = _twice(intervals["known"])
        done[name] = replace(trained, intervals=intervals)
    return done


def _twice(interval: Interval) -> Interval:
    """Of a family that was measured on one GPU: assumed twice as far off on another."""
    return Interval(interval.log_time, 2 * interval.low, 2 * interval.high)


def _groups(place: str, errors: Sequence[Misses]) -> list[tuple[str, list[Misses]]]:
    """All of them, and those of each dtype that was measured on three GPUs or more."""
    groups = [(place, list(errors))] if errors else []
    for dtype in sorted({m.dtype for m in errors}):
        some = [m for m in errors if m.dtype == dtype]
        if len({m.device for m in some}) >= 3 and len(some) < len(errors):
            groups.append((f"{place} {dtype}", some))
    return groups


def interval_of(errors: Sequence[Misses], new_device: bool) -> Interval:
    """Between which logarithms 80 % of the errors lie, by predicted time, GPUs weighing alike.

    Of n GPUs left out one by one, the next one's error varies more than theirs: as sqrt(1 + 1/n)
    of it, if GPUs are draws from one distribution.
    """
    count = {m.device: sum(len(o.error) for o in errors if o.device == m.device) for m in errors}
    error = np.concatenate([m.error for m in errors])
    log_time = np.log(np.concatenate([m.time_s for m in errors]))
    weight = np.concatenate([np.full(len(m.error), 1 / count[m.device]) for m in errors])
    widen = np.sqrt(1 + 1 / len(count)) if new_device else 1.0
    points = int(np.clip(len(error) // LEAST, 1, POINTS))
    order = np.argsort(log_time, kind="stable")
    at: list[float] = []
    sides: list[tuple[float, float]] = []
    for rows in np.array_split(order, points):
        at.append(float(np.median(log_time[rows])))
        shares = ((1 - COVERED) / 2, (1 + COVERED) / 2)
        low, high = (_quantile(error[rows], weight[rows], share) for share in shares)
        sides.append((min(low * widen, 0.0), max(high * widen, 0.0)))
    low, high = np.array(sides).T
    return Interval(np.array(at), low, high)


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    total: Any = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, share * total[-1])])
