"""The tile predictor: waves of tiles over the SMs, at the rate that each tile can sustain.

In the manner of NeuSight (Lee, Phanishayee, Mahajan, ASPLOS 2025): a kernel is equal tiles that run
in waves, the work of a tile over the device's roof gives its time, and what is learned is bounded
by it. Here the utilisation is formulas first, one set for each family of kernels, with few fitted
factors; a small network may correct it by a bounded share, from counts and shapes alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from gpuir.cost import legal, local, stream
from gpuir.cost.conv import least_share
from gpuir.cost.families import family_of
from gpuir.cost.learned import (
    Array,
    Familiar,
    Model,
    Trained,
    correction,
    factors,
    is_uneven,
    shipped,
)
from gpuir.cost.nest import Tiles, cut, peak_of, runs_on_tensor
from gpuir.cost.products import costed_as
from gpuir.cost.reading import work_of
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.uncertainty import is_unfitted, uncertainty
from gpuir.cost.work import Work, stacked
from gpuir.ir.errors import ModelError
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.ir.types import f32
from gpuir.ops.kernel import KernelOp
from gpuir.targets.target import Target

T = TypeVar("T")
BY = "tile@2"
THREADED = 32_768  # kernels, from where threads pay
UNMEASURED = 1.5  # assumed: how much further off the model may be where it never was measured
CHUNK = 8192  # kernels predicted at once: their numbers stay in a core's cache


def _where(test: bool, yes: float, no: float) -> float:
    return yes if test else no


# The functions of a `Sheet` on Python floats: for one kernel ten times faster than arrays of one.
SCALAR = SimpleNamespace(
    maximum=max,
    minimum=min,
    where=_where,
    ceil=math.ceil,
    floor=math.floor,
    sqrt=math.sqrt,
    exp=math.exp,
    log=math.log,
    log1p=math.log1p,
    tanh=math.tanh,
)


@dataclass(frozen=True)
class Estimate:
    """Seconds of kernels: `time_s` is the larger of compute and memory, plus latency; `launch_s`,
    the gap between kernels that none escapes, is part of latency."""

    compute: Number
    memory: Number
    latency: Number
    time_s: Number


def estimate(
    work: Work,
    tiles: Tiles,
    target: Target,
    *,
    s: Sheet | None = None,
    model: Model | None = None,
    learned: Number | None = None,
) -> Estimate:
    """The time of `work` under `tiles`: the family's formulas, corrected by what was learned, which
    is `learned` where that is known already.

    Clocks are those under load. The correction scales every term alike, and never below the
    arithmetic at the peak, nor DRAM at its listed rate with what no cache holds. (Those of a CPU
    are assumed: its files are no products.)
    """
    s, model, target = s or Sheet(), shipped() if model is None else model, target.under_load
    family = family_of(work, target)
    p = s.factors(family.name, family.factors, target, factors(family, target, model))
    terms = family.seconds(s, work, tiles, target, p)
    if "dram bytes" not in s.values:
        s.put("dram bytes", work.nbytes, "bytes", "each operand once")
    compute = s.put("by arithmetic", terms.compute, "s")
    memory = s.put("by memory", terms.memory, "s")
    waits = s.put("by waits", terms.latency, "s")
    busy = s.put("on the device", s.xp.maximum(compute, memory) + waits, "s")
    held = target.l2_bytes + (target.l3.bytes if target.l3 else 0)
    streamed = s.xp.maximum(work.nbytes - held, 0.0) / target.dram_bytes_per_s
    roof = terms.roof if target.is_cpu else s.xp.maximum(terms.roof, streamed)
    flops = work.flops * least_share(s, work) / _times(work)
    roof = s.xp.maximum(roof, flops / peak_of(work, target))
    roof = s.put("roof", roof, "s", "arithmetic at the listed peak, DRAM with what no cache holds")
    if learned is None:
        learned = correction(work, family, target, model)
    if family.features:
        source = f"a network (cost.learned) sees {', '.join(family.features)}: exp(±{family.bound})"
        learned = s.put("learned correction", learned, "", source, terse=True)
    if target.local:
        learned = learned * s.put("as measured nearby", local.correction(work, target), "", "local")
    share = s.put("corrected", s.xp.maximum(busy * learned, roof) / busy)
    launch = s.put("launch", target.launch_s, "s", target.source("launch_s"))
    once = Estimate(
        compute=s.put("compute", compute * share, "s"),
        memory=s.put("memory", memory * share, "s"),
        latency=s.put("latency", waits * share + launch, "s"),
        time_s=s.put("time", busy * share + launch, "s"),
    )
    if work.beside and target.vendor == "NVIDIA" and runs_on_tensor(work, target):
        more = s.put("conversions", _beside_s(s, work, target, model), "s", "cost.stream, for each")
        latency, time_s = once.latency + more, once.time_s + more
        once = replace(once, latency=s.put("with conversions", latency, "s"), time_s=time_s)
    if work.times is None:
        return once
    count = s.put("times", work.times)
    parts = vars(once).items()
    return Estimate(
        *(s.put(f"{name.removesuffix('_s')} in all", n * count, "s") for name, n in parts)
    )


def _beside_s(s: Sheet, work: Work, target: Target, model: Model) -> Number:
    """Seconds of the kernels launched besides, one after another, which only move bytes."""
    total: Number = 0.0
    p = factors(stream.FAMILY, target, model)
    for other in work.beside:
        tiles = stream.choose(other, target, p)
        terms = stream.seconds(Sheet(s.xp), other, tiles, target, p)
        busy = s.xp.maximum(terms.compute, terms.memory) + terms.latency
        total = total + busy + target.launch_s
    return total


# ---------------------------------------------------------------------------- which tile


def choose(work: Work, target: Target, *, model: Model | None = None) -> Tiles:
    """The tile that a library would take, for one kernel or for each of many."""
    model = shipped() if model is None else model
    family = family_of(work, target)
    return family.choose(work, target, factors(family, target, model))


def tables(work: Work, target: Target) -> tuple[Callable[[Work, Target], Tiles], ...]:
    """What gives the tiles that are searched, the next where none before fits."""
    return family_of(work, target).tiles, legal.candidates


def search(work: Work, target: Target, where: str) -> Tiles:
    """Of the family's tiles the one of least time among those that fit the target; where none does,
    of those that any kernel may have. ModelError, at `where`, when none of those does."""
    column = work.each(lambda n: np.asarray(n, float)[..., None])
    for candidates in tables(work, target):
        tiles = candidates(work, target)
        found = estimate(column, tiles, target).time_s
        time_s = np.where(is_legal(column, tiles, target), found, np.inf)
        least = time_s.min(axis=-1, keepdims=True)
        if np.all(np.isfinite(least)):
            # of equals the first: candidates list the usual ones first
            best = np.argmax(time_s <= least * (1 + 1e-9), axis=-1)
            return tiles.each(lambda n, time_s=time_s, best=best: _pick(n, time_s.shape, best))
    raise ModelError(
        f"no tile of {work.kernel} fits {target.name}",
        where=where,
        found=", ".join(f"{d}={n}" for d, n in work.dims),
        fix="give a tile in a schedule",
    )


def is_legal(work: Work, tiles: Tiles, target: Target) -> Number:
    """Whether each of the tiles fits its kernel and the target."""
    fits: Number = True
    work, tiles = costed_as(work, tiles, target)
    for need in legal.needs(cut(work, tiles, target), target):
        fits = fits & (np.asarray(need.wants) <= need.has)
    return fits


def _pick(numbers: Number, shape: tuple[int, ...], best: Any) -> Number:
    """The entry of each row that was chosen."""
    spread = np.broadcast_to(np.asarray(numbers, float), shape)
    return np.take_along_axis(spread, np.expand_dims(best, -1), axis=-1)[..., 0]


def best_tiles(works: Mapping[Work, str], target: Target) -> dict[Work, Tile]:
    """The tile that a library would take for each kernel, as a note: where that is not legal on a
    target with numbers changed, the best that is. Kernels come with their names, for errors, and
    those that are alike are done at once; each is found once a target."""
    known: dict[Work, Tile] = target.__dict__.setdefault("_tiles", {})
    groups: dict[tuple[Hashable, ...], list[Work]] = {}
    for work in works:
        if work not in known:
            groups.setdefault(work.likeness, []).append(work)
    for group in groups.values():
        many = stacked(group)
        size = (len(group),)
        tiles = choose(many, target).each(lambda n, size=size: np.broadcast_to(n, size))
        fits = np.broadcast_to(is_legal(many, tiles, target), size)
        for i, work in enumerate(group):
            tile = tiles.each(lambda n, i=i: n[i])
            if not fits[i]:
                tile = search(work, target, works[work])
            known[work] = _note(work, tile)
    return {work: known[work] for work in works}


def _note(work: Work, tiles: Tiles) -> Tile:
    dims = tuple(
        (d, int(tiles.dims[d]))
        for d, n in work.dims
        if d in tiles.dims and (n > 1 or d not in "bh")
    )
    return Tile(dims, int(tiles.stages), int(tiles.warps), int(tiles.split))


# ---------------------------------------------------------------------------- many kernels


@dataclass(frozen=True)
class Predictions:
    """Seconds of many kernels, with the interval that holds 80 % of the measurements."""

    time_s: Array
    low_s: Array
    high_s: Array
    tiles: Tiles


def predict(
    work: Work, target: Target, *, tiles: Tiles | None = None, model: Model | None = None
) -> Predictions:
    """The time of each of many kernels, under `tiles` or those that a library would take."""
    model = shipped() if model is None else model
    count = int(np.size(work.points))
    work = work.each(lambda n: np.broadcast_to(np.asarray(n, float), (count,)))
    part = partial(_predict_rows, work, target, tiles, model)
    parts = in_parts(part, count)
    time_s = np.concatenate([t for t, _ in parts]) if parts else np.zeros(0)
    low_s, high_s = interval(work, target, time_s, model)
    return Predictions(time_s, low_s, high_s, _joined([t for _, t in parts]))


def _predict_rows(
    work: Work, target: Target, tiles: Tiles | None, model: Model, rows: slice
) -> tuple[Array, Tiles]:
    """Seconds of some of the kernels, and their tiles."""
    some = work.take(rows)
    if tiles is None:
        size = np.shape(some.points)
        cut_by = choose(some, target, model=model).each(lambda n: np.broadcast_to(n, size))
    else:
        size = np.shape(work.points)
        cut_by = tiles.each(lambda n: np.broadcast_to(n, size)[rows])
    return estimate(some, cut_by, target, model=model).time_s, cut_by


def in_parts(part: Callable[[slice], T], count: int) -> list[T]:
    """What a function gives for each part of `count` rows, in order; of many, side by side."""
    rows = [slice(i, min(i + CHUNK, count)) for i in range(0, count, CHUNK)]
    if count <= THREADED:
        return [part(some) for some in rows]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # more wait for each other
        return list(pool.map(part, rows))


def _joined(parts: list[Tiles]) -> Tiles:
    if not parts:
        return Tiles({})

    def column(numbers: list[Number]) -> Array:
        return np.concatenate([np.atleast_1d(n) for n in numbers])

    return Tiles(
        {d: column([p.dims[d] for p in parts]) for d in parts[0].dims},
        column([p.stages for p in parts]),
        column([p.warps for p in parts]),
        column([p.split for p in parts]),
    )


def interval(
    work: Work, target: Target, time_s: Number, model: Model | None = None
) -> tuple[Number, Number]:
    """Between what 80 % of the measurements lie: by backtests on kernels of the same family, of
    the same dtype where there are enough, on GPUs as familiar as this one; further apart for a
    dtype or a size that was never measured, and by a factor for a kind that never was. Never less
    far than the backtest of the target's own calibration says.
    """
    known = trained(work, target, model)
    test = known.backtest(work, familiar(work, target, known))
    down, up = uncertainty(work, target, is_measured(work, target, known), test)
    low, high = local.left_out_ends(family_of(work, target).name, target)
    if is_unfitted(work, test):
        return time_s * np.exp(min(-down, low)), time_s * np.exp(max(up, high))
    new = known.beyond(work) | known.is_novel(work) | is_uneven(work)
    own = known.intervals[test].holding(low, high)
    return own.at(time_s, np.where(new, UNMEASURED, 1.0), (down, up))


def is_measured(work: Work, target: Target, known: Trained) -> bool:
    """Whether kernels of this kind were measured: by the tables, or on this GPU."""
    return known.has_kind(work) or local.label(work) in local.groups(target.local)


def trained(work: Work, target: Target, model: Model | None = None) -> Trained:
    """What training found for the family that a kernel belongs to."""
    model = shipped() if model is None else model
    return model.get(family_of(work, target).name, Trained())


def familiar(work: Work, target: Target, known: Trained) -> Familiar:
    """How familiar a target is to the family that a kernel belongs to."""
    if target.device in known.devices:
        return "known"
    family = family_of(work, target).name
    return "calibrated" if local.calibrated(work, family, target) else "unseen"


# ---------------------------------------------------------------------------- one kernel


def tile_cost(op: KernelOp, tile: Tile | None, target: Target) -> Cost:
    """The tile predictor's cost of one kernel under its tile."""
    return cost_of(work_of(op), tile or Tile(()), target)


def trained_cost(model: Model) -> Callable[..., Cost]:
    """The tile predictor with another model's numbers, as a predictor of its own."""

    @lru_cache(4096)
    def known(work: Work, tile: Tile, target: Target) -> Cost:
        return cost_of(work, tile, target, model)

    def cost(op: KernelOp, tile: Tile | None, target: Target) -> Cost:
        return known(work_of(op), tile or Tile(()), target)

    return cost


def cost_of(work: Work, tile: Tile, target: Target, model: Model | None = None) -> Cost:
    """The cost of a work under a tile: the estimate, as a signed note."""
    s = Sheet(SCALAR)
    e = estimate(work, Tiles.of(tile, work), target, s=s, model=model)
    terms: tuple[tuple[Bound, float], ...] = (
        ("compute", float(e.compute)),
        ("memory", float(e.memory)),
        ("latency", float(e.latency)),
    )
    time_s = max(float(e.compute), float(e.memory)) + float(e.latency)
    bound = max(terms, key=lambda term: term[1])[0]
    facts = tuple(_facts(work, target, s, time_s, bound))
    known = trained(work, target, model)
    place = familiar(work, target, known)
    low_s, high_s = interval(work, target, time_s, model)
    between = (float(low_s), float(high_s))
    outside = known.outside(work, place, is_measured(work, target, known))
    return Cost(time_s, bound, BY, terms, facts, between, outside)


# A fact of a cost, and the quantity of the sheet that it is.
MOVED = {"dram_bytes": "dram bytes", "l2_bytes": "l2 bytes"}
FACTS = {
    "blocks": "blocks",
    "waves": "waves",
    "blocks_per_sm": "blocks an SM holds",
    "tail": "tail: used share of SM time",
}


def _times(work: Work) -> Number:
    return 1 if work.times is None else work.times


def _facts(
    work: Work, target: Target, s: Sheet, time_s: float, bound: Bound
) -> Iterator[tuple[str, float]]:
    values = s.values
    yield "flops", work.flops
    yield "operand_bytes", _plain(work.operand_bytes)
    for fact, name in MOVED.items():
        if name in values:
            yield fact, _plain(values[name] * _times(work))
    for fact, name in FACTS.items():
        if name in values:
            yield fact, _plain(values[name])
        elif fact == "waves" and "blocks an SM holds" in values:
            at_once = target.sms * values["blocks an SM holds"]
            yield fact, _plain(values["blocks"] / at_once)
    if "threads a block" in values:
        threads = values["blocks an SM holds"] * values["threads a block"]
        yield "occupancy", _plain(min(1.0, threads / target.sm.threads))
    if "padding: used share of the tiles" in values:
        yield "padding", _plain(1 - min(1.0, values["padding: used share of the tiles"]))
    yield "peak", _plain(peak_of(work, target))
    shares = _shares(work, target, values, time_s)
    yield from ((name, _plain(share)) for name, share in shares.items())
    yield "bound_share", _plain(_bound_share(bound, shares, values))


def _shares(
    work: Work, target: Target, values: Mapping[str, Number], time_s: float
) -> dict[str, float]:
    """What a kernel reaches of each listed rate: of flop/s, of the memories, of the instructions
    that lanes can issue."""
    counted = work.products * work.density or work.flops
    shares = {"peak_share": counted / time_s / peak_of(work, target)}
    rates = {"dram": target.dram_bytes_per_s, "l2": target.l2_bytes_per_s}
    for name, rate in rates.items():
        if f"{name} bytes" in values and rate:
            shares[f"{name}_share"] = values[f"{name} bytes"] * _times(work) / time_s / rate
    if "lane instructions" in values:
        issued = values["lane instructions"] * _times(work)
        shares["lane_share"] = issued / time_s / _issue_rate(target)
    return shares


def _issue_rate(target: Target) -> float:
    """Instructions of lanes a second, at the listed clock."""
    if target.is_cpu:
        return target.peak("vector", f32) / target.sm.flops_per_lane_clock
    return stream.slots(target) * target.sms * target.clock_hz


def _bound_share(bound: Bound, shares: Mapping[str, float], values: Mapping[str, Number]) -> float:
    """The share of the rate that bounds a kernel: of the memory that takes longer, of arithmetic or
    of the lanes that issue it, whichever is nearer to what it can do. Waits have no rate: of all
    the nearest."""
    if bound == "memory":
        slower = values.get("l2 time", 0.0) > values.get("dram time", 0.0)
        return min(shares.get("l2_share" if slower else "dram_share", 0.0), 1.0)
    own = ("peak_share", "lane_share") if bound == "compute" else tuple(shares)
    return min(max(shares.get(name, 0.0) for name in own), 1.0)


def _plain(number: Any) -> float:
    """A Python number: whole where it is one, else to six significant digits."""
    value = float(number)
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")
