"""The tile predictor: waves of tiles over the SMs, at the rate that each tile can sustain.

In the manner of NeuSight (Lee, Phanishayee, Mahajan, ASPLOS 2025): a kernel is equal tiles that run
in waves, the work of a tile over the device's roof gives its time, and what is learned is bounded
by it. Here the utilisation is formulas first, one set for each family of kernels, with few fitted
factors; a small network may correct it by a bounded share, from counts and shapes alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from gpuir.cost import local, stream
from gpuir.cost.candidates import of_any
from gpuir.cost.conv import least_share
from gpuir.cost.data import of_isa
from gpuir.cost.families import family_of
from gpuir.cost.family import Flags, Places, among
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
from gpuir.cost.legal import Need, needs_of, product_rules
from gpuir.cost.nest import Tiles, cut, library_block, peak_of, runs_on_tensor
from gpuir.cost.products import costed_as
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.uncertainty import is_unfitted, uncertainty
from gpuir.cost.work import Work
from gpuir.ir.errors import ModelError
from gpuir.targets.target import Target

T = TypeVar("T")
# What GPUs of an architecture have (`cost.data.of_isa`) of what a tile needs.
MADE_FOR = {"shared memory": "block_smem_bytes", "register file": "file_registers"}
BY = "tile@2"
THREADED = 32_768  # kernels, from where threads pay
UNMEASURED = 1.5  # assumed: how much further off the model may be where it never was measured
CHUNK = 8192  # kernels predicted at once: their numbers stay in a core's cache


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
    flops = work.flops * least_share(s, work) / (1 if work.times is None else work.times)
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


def library_tiles(
    work: Work, target: Target, model: Model | None = None
) -> Iterator[tuple[Places, Tiles | None]]:
    """Of many kernels the tiles that a library would take; where one does not fit a target, which
    has numbers changed, the best of those that do, and None where none does. With the places of
    the kernels among all; the first have their library's."""
    size = np.shape(work.points)
    tiles = choose(work, target, model=model).each(lambda n: np.broadcast_to(n, size))
    fits = np.broadcast_to(has_room(work, tiles, target), size)
    yield np.flatnonzero(fits), tiles.take(fits)
    left = np.flatnonzero(~fits)
    for candidates in (family_of(work, target).tiles, of_any) if left.size else ():
        rest: list[Places] = []
        for some, found in among(work.take(left), partial(candidates, target=target)):
            fits, best = search(work.take(left[some]), found, target, model)
            yield left[some][fits], best.take(fits)
            rest.append(left[some][~fits])
        left = np.concatenate([*rest, left[:0]])
    if left.size:
        yield left, None


def search(
    work: Work, tiles: Tiles, target: Target, model: Model | None = None
) -> tuple[Flags, Tiles]:
    """Of `tiles` the one of least time among those that fit the target, for each of many kernels;
    and whether any does."""
    column = work.each(lambda n: np.asarray(n, float)[..., None])
    fits = is_legal(column, tiles, target)
    time_s = np.where(fits, estimate(column, tiles, target, model=model).time_s, np.inf)
    least = time_s.min(axis=-1, keepdims=True)
    # of equals the first: candidates list the usual ones first
    best = np.argmax(time_s <= least * (1 + 1e-9), axis=-1)
    return np.isfinite(least[..., 0]), tiles.each(lambda n: _pick(n, time_s.shape, best))


def is_legal(work: Work, tiles: Tiles, target: Target) -> Number:
    """Whether each of the tiles fits its kernel and the target."""
    return _are_met(needs(work, tiles, target))


def _are_met(needs: Iterable[Need]) -> Number:
    fits: Number = True
    for need in needs:
        fits = fits & (np.asarray(need.wants) <= need.has)
    return fits


def has_room(work: Work, tiles: Tiles, target: Target) -> Number:
    """Whether a target has what the tiles of libraries' own kernels need. Those of products and
    attention run on every GPU with as much as those of the architecture that they were made for:
    which instructions they take and how they split is the library's business, and what we count of
    memory may be more than they take (TensorRT-LLM's hold slices of operands, Tensile's share
    registers)."""
    if not work.is_contraction:
        return is_legal(work, tiles, target)
    asked = (need for need in needs(work, tiles, target) if need.of_target)
    return _are_met(_as_made(need, target) for need in asked)


def _as_made(need: Need, target: Target) -> Need:
    """A need of no more than GPUs of the target's architecture have."""
    if (listed := MADE_FOR.get(need.what)) is None:
        return need
    return replace(need, wants=np.minimum(need.wants, of_isa(listed, target.isa)))


def needs(work: Work, tiles: Tiles, target: Target) -> tuple[Need, ...]:
    """What a library's tiles ask of the target: of a CPU nothing, whose libraries block for its
    caches by themselves."""
    if target.is_cpu:
        return ()
    work, tiles = costed_as(work, tiles, target)
    nest = cut(work, tiles)
    rules: Iterable[Need] = ()
    if runs_on_tensor(work, target):
        face = ("s", "d", "") if work.kernel == "k.attention" else ("m", "n", "k")
        rules = product_rules(nest, face)
    return needs_of(nest, target, library_block(nest, target), rules)


def _pick(numbers: Number, shape: tuple[int, ...], best: Places) -> Number:
    """The entry of each row that was chosen."""
    spread = np.broadcast_to(np.asarray(numbers, float), shape)
    return np.take_along_axis(spread, best[..., None], axis=-1)[..., 0]


# ---------------------------------------------------------------------------- as notes


def as_noted(work: Work, tiles: Tiles) -> Tiles:
    """Many tiles as `Tiles.of` reads their notes."""
    dims: dict[str, Number] = {}
    for d, n in work.dims:
        dims[d] = np.maximum(n, 1.0)
        if d in tiles.dims:
            cells = np.trunc(tiles.dims[d])
            dims[d] = np.where(n > 1, cells, dims[d]) if d in "bh" else cells
    return Tiles(dims, *map(np.trunc, (tiles.stages, tiles.warps, tiles.split)))


def noted_tiles(work: Work, target: Target, model: Model | None = None) -> Tiles:
    """Of many kernels the tiles that `library_tiles` has, as their notes say them; ModelError where
    none fits."""
    parts: list[tuple[Places, Tiles]] = []
    for some, tiles in library_tiles(work, target, model):
        if tiles is None:
            raise no_tile(work.take(some[0]), target, work.kernel)
        parts.append((some, as_noted(work.take(some), tiles)))
    order = np.argsort(np.concatenate([some for some, _ in parts]))
    return Tiles.joined([tiles for _, tiles in parts]).take(order)


def no_tile(work: Work, target: Target, where: str) -> ModelError:
    return ModelError(
        f"no tile of {work.kernel} fits {target.name}",
        where=where,
        found=", ".join(f"{d}={n}" for d, n in work.dims),
        fix="give a tile in a schedule",
    )


# ---------------------------------------------------------------------------- many kernels


@dataclass(frozen=True)
class PredictedSeconds:
    """Seconds of many kernels, with the interval that holds 80 % of the measurements."""

    time_s: Array
    low_s: Array
    high_s: Array
    tiles: Tiles


def predict(
    work: Work, target: Target, *, tiles: Tiles | None = None, model: Model | None = None
) -> PredictedSeconds:
    """The time of each of many kernels, under `tiles` or those that a library would take;
    ModelError where none fits."""
    model = shipped() if model is None else model
    count = int(np.size(work.points))
    work = work.each(lambda n: np.broadcast_to(np.asarray(n, float), (count,)))
    part = partial(_predict_rows, work, target, tiles, model)
    parts = in_parts(part, count)
    time_s = np.concatenate([t for t, _ in parts]) if parts else np.zeros(0)
    low_s, high_s = interval(work, target, time_s, model)
    return PredictedSeconds(time_s, low_s, high_s, Tiles.joined([t for _, t in parts]))


def _predict_rows(
    work: Work, target: Target, tiles: Tiles | None, model: Model, rows: slice
) -> tuple[Array, Tiles]:
    """Seconds of some of the kernels, and their tiles."""
    some = work.take(rows)
    if tiles is None:
        cut_by = noted_tiles(some, target, model)
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
