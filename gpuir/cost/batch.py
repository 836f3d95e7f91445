"""Kernels are costed in batches: those that are alike as one work of many, by one run of the
formulas. One kernel is a batch of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from gpuir.cost import habits, stream
from gpuir.cost.families import check_factors, family_of
from gpuir.cost.family import Places
from gpuir.cost.habits import Habit, Instead, Kernel, usual
from gpuir.cost.learned import Array, Model, correction, shipped, stands_for
from gpuir.cost.nest import Tiles, peak_of
from gpuir.cost.reading import work_of
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.tile import (
    BY,
    Estimate,
    as_noted,
    estimate,
    familiar,
    interval,
    is_measured,
    library_tiles,
    no_tile,
    trained,
)
from gpuir.cost.work import Work, stacked
from gpuir.ir.errors import ModelError
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.ir.sizes import NOWHERE, Columns, value
from gpuir.ir.types import f32
from gpuir.ops.kernel import KernelOp
from gpuir.targets.target import Target

BOUNDS: tuple[Bound, ...] = ("compute", "memory", "latency")  # the order of a cost's terms
KEPT = 65_536  # tiles of a target that are kept


@dataclass(frozen=True)
class AlikeWorks:
    """Kernels that one run of the formulas costs: their places among all, and one work of them."""

    places: Places
    many: Work


def alike(works: Sequence[Work], also: Sequence[Hashable] = ()) -> list[AlikeWorks]:
    """Kernels by their likeness, and by what else of each has to be equal."""
    groups: dict[Hashable, list[int]] = {}
    for i, work in enumerate(works):
        groups.setdefault((work.likeness, also[i] if also else None), []).append(i)
    return [
        AlikeWorks(np.array(g, np.intp), stacked([works[i] for i in g])) for g in groups.values()
    ]


def _groups(works: Sequence[tuple[Work, KernelRows]]) -> Iterator[AlikeWorks]:
    """Kernels at many points by their likeness."""
    first = [0, *accumulate(x.points for _, x in works)]
    groups: dict[Hashable, list[int]] = {}
    for i, (work, _) in enumerate(works):
        groups.setdefault(work.likeness, []).append(i)
    for some in groups.values():
        every = [_columns(*works[i]) for i in some]
        columns: Iterator[Array] = iter([*np.concatenate(every, axis=1)])
        places = np.concatenate([np.arange(first[i], first[i + 1]) for i in some])
        yield AlikeWorks(places, works[some[0]][0].each(lambda _, c=columns: next(c)))


def _columns(work: Work, x: KernelRows) -> Array:
    """The numbers of a work, a row each, at many points."""
    numbers: list[Number] = []
    work.each(numbers.append)  # pyright: ignore[reportArgumentType]
    found = np.empty((len(numbers), x.points))
    known: dict[Any, Any] = {}
    for row, n in zip(found, numbers, strict=True):
        row[:] = value(n, x.at, known)
    return found


def terms_of(e: Estimate, count: int) -> tuple[Array, Array]:
    """Of each kernel the terms of its cost, a row for each of `BOUNDS`; and its seconds."""
    rows = (np.broadcast_to(n, (count,)) for n in (e.compute, e.memory, e.latency))
    terms = np.array(list(rows), float)
    return terms, np.maximum(terms[0], terms[1]) + terms[2]


# ---------------------------------------------------------------------------- tiles


def best_tiles(works: Mapping[Work, str], target: Target) -> dict[Work, Tile]:
    """The tile that a library would take for each kernel, as a note: where that is not legal on a
    target with numbers changed, the best that is. Kernels come with their names, for errors."""
    known = _known(target)
    new = [work for work in works if work not in known]
    if len(known) + len(new) > KEPT:
        known.clear()
        new = list(works)
    for group in alike(new):
        for some, tiles in library_tiles(group.many, target):
            places: list[int] = group.places[some].tolist()
            ones = [new[i] for i in places]
            if tiles is None:
                raise no_tile(ones[0], target, works[ones[0]])
            known.update(zip(ones, notes(ones, tiles), strict=True))
    return {work: known[work] for work in works}


@lru_cache(maxsize=64)
def _known(target: Target) -> dict[Work, Tile]:
    """What `best_tiles` found on a target: most kernels are asked for again."""
    return {}


def notes(works: Sequence[Work], tiles: Tiles) -> Iterator[Tile]:
    """The tile of each kernel as a note: of batches and heads, of which a block takes one, only
    where there are several."""

    def whole(n: Number) -> list[int]:
        return np.broadcast_to(np.asarray(n).astype(int), (len(works),)).tolist()

    dims = {d: whole(n) for d, n in tiles.dims.items()}
    options = zip(*map(whole, (tiles.stages, tiles.warps, tiles.split)), strict=True)
    for i, (work, rest) in enumerate(zip(works, options, strict=True)):
        cut = (d for d, n in work.dims if d in dims and (n > 1 or d not in "bh"))
        yield Tile(tuple((d, dims[d][i]) for d in cut), *rest)


# ---------------------------------------------------------------------------- costs as columns


@dataclass(frozen=True)
class Costs:
    """What kernels cost on one target: seconds, and between what 80 % of measurements lie. `bound`
    is a place in `BOUNDS`; `split` is that of the tile, how many blocks share one sum. `failed` are
    those that no tile fits, and what is said."""

    time_s: Array
    low_s: Array
    high_s: Array
    bound: np.ndarray[Any, np.dtype[np.int8]]
    split: np.ndarray[Any, np.dtype[np.int32]]
    failed: dict[int, str]

    def first(self, count: int) -> Costs:
        """Those of so many kernels, the first."""
        columns = {name: n[:count] for name, n in vars(self).items() if name != "failed"}
        return Costs(**columns, failed={i: why for i, why in self.failed.items() if i < count})

    @staticmethod
    def room(count: int) -> Costs:
        """For so many kernels."""
        return Costs(
            *(np.zeros(count), np.zeros(count), np.zeros(count)),
            bound=np.zeros(count, np.int8),
            split=np.ones(count, np.int32),
            failed={},
        )


class Replaced(NamedTuple):
    """Kernels of one habit: their places among all, those of their works (a row for the first of
    each, the second, and so on), and their flops."""

    habit: Habit
    places: Places
    works: np.ndarray[Any, np.dtype[np.intp]]
    flops: Array

    def write(self, into: Costs, target: Target) -> None:
        """What they cost in place of the usual kernels."""
        ends = into.time_s, into.low_s, into.high_s
        works = np.array([n[self.works] for n in ends]).swapaxes(0, 1)
        for column, seconds in zip(
            ends, self.habit.seconds(works, self.flops, target), strict=True
        ):
            column[self.places] = seconds
        if not self.habit.factors:
            into.bound[self.places] = BOUNDS.index("compute")
        for i, why in [*into.failed.items()]:
            some = self.places[(self.works == i).any(axis=0)]
            into.failed.update(dict.fromkeys(some.tolist(), why))


class KernelRows(NamedTuple):
    """A kernel at so many `points`: sizes in it are columns of `at`, by the names of symbols."""

    kernel: Kernel
    points: int = 1
    at: Columns = NOWHERE


@dataclass(frozen=True)
class Batch:
    """Kernels, so many, that are costed on one target after another, under the tiles that a library
    would take. Behind the usual ones are those that a release runs instead, as `replaced` says:
    `size` in all. `learned` keeps what the network says of a group on GPUs of one architecture.
    """

    count: int
    size: int
    groups: tuple[AlikeWorks, ...]
    replaced: tuple[Replaced, ...] = ()
    learned: dict[Hashable, Number] = field(default_factory=dict[Hashable, Number])

    @staticmethod
    def of(kernels: Iterable[Kernel]) -> Batch:
        return Batch.at(list(map(KernelRows, kernels)))

    @staticmethod
    def at(rows: Sequence[KernelRows]) -> Batch:
        """Kernels at many points, those of one kernel side by side."""
        works = [(usual(x.kernel), x) for x in rows]
        first = [0, *accumulate(x.points for x in rows)]
        count = size = first[-1]
        groups: dict[tuple[Habit, int], list[tuple[Places, list[Places], Array]]] = {}
        for x, start in zip(rows, first, strict=False):
            own = np.arange(start, start + x.points)
            if not isinstance(x.kernel, Instead):
                continue
            new = [w for w in x.kernel.works if w != x.kernel.usual]
            parts = [
                np.arange(size + i * x.points, size + (i + 1) * x.points) for i in range(len(new))
            ]
            parts = parts if new or not x.kernel.works else [own]
            works += [(w, x) for w in new]
            size += len(new) * x.points
            flops = np.full(x.points, value(x.kernel.flops, x.at), float)
            groups.setdefault((x.kernel.habit, len(parts)), []).append((own, parts, flops))
        replaced: list[Replaced] = []
        for (habit, n), some in groups.items():
            places = np.concatenate([own for own, _, _ in some])
            parts = [np.reshape(parts, (n, len(own))).astype(int) for own, parts, _ in some]
            flops = np.concatenate([flops for _, _, flops in some])
            replaced.append(Replaced(habit, places, np.concatenate(parts, axis=1), flops))
        return Batch(count, size, tuple(_groups(works)), tuple(replaced))

    def on(self, target: Target) -> Costs:
        """What each costs there."""
        check_factors(target)
        found = Costs.room(self.size)
        for group in self.groups:
            parts: list[tuple[Places, Tiles]] = []
            for some, tiles in library_tiles(group.many, target):
                if tiles is not None:
                    parts.append((some, as_noted(group.many.take(some), tiles)))
                    continue
                for j in some.tolist():
                    work = group.many.each(lambda n, j=j: np.asarray(n)[j].item())
                    found.failed[int(group.places[j])] = str(no_tile(work, target, work.kernel))
            some = np.concatenate([places for places, _ in parts])
            if some.size:
                self._cost(group, some, Tiles.joined([x for _, x in parts]), target, found)
        for x in self.replaced:
            if x.habit.holds_on(target):
                x.write(found, target)
        return found.first(self.count)

    def _cost(
        self, group: AlikeWorks, some: Places, tiles: Tiles, target: Target, into: Costs
    ) -> None:
        """Writes what some of a group cost under their tiles."""
        learned = self._learned(group, target)
        learned = learned[some] if np.ndim(learned) else learned
        work, rows = group.many.take(some), group.places[some]
        terms, time_s = terms_of(estimate(work, tiles, target, learned=learned), len(some))
        into.time_s[rows] = time_s
        into.low_s[rows], into.high_s[rows] = interval(work, target, time_s)
        into.bound[rows] = terms.argmax(axis=0)
        into.split[rows] = tiles.split

    def _learned(self, group: AlikeWorks, target: Target) -> Number:
        """The network's correction: the same on all targets that one measured GPU stands for."""
        family = family_of(group.many, target)
        key = int(group.places[0]), family.name, target.isa
        if key in self.learned:
            return self.learned[key]
        found = correction(group.many, family, target, shipped())
        if stands_for(trained(group.many, target), target).name != target.name:
            self.learned[key] = found
        return found


# ---------------------------------------------------------------------------- costs as notes


def costs_of(
    kernels: Sequence[tuple[Kernel, Tile]], target: Target, model: Model | None = None
) -> list[Cost]:
    """The cost of each kernel under its tile, as a signed note."""
    works = [usual(x) for x, _ in kernels]
    tiles = [Tiles.of(tile, work) for work, (_, tile) in zip(works, kernels, strict=True)]
    found: dict[int, Cost] = {}
    for group in alike(works, [x.likeness for x in tiles]):
        places: list[int] = group.places.tolist()
        some = stacked([tiles[i] for i in places])
        ones = [works[i] for i in places]
        found.update(zip(places, _costs(ones, group.many, some, target, model), strict=True))
    new: dict[int, Instead] = {}
    for i, (x, _) in enumerate(kernels):
        if not isinstance(x, Instead) or not x.habit.holds_on(target):
            continue
        if x.habit.factors:  # the usual kernel, under its tile
            found[i] = replace(found[i].scaled(x.habit.factor(target)), by=habits.BY)
        else:
            new[i] = x
    found |= _new(new, target) if new else {}
    return [found[i] for i in range(len(kernels))]


def _new(kernels: Mapping[int, Instead], target: Target) -> dict[int, Cost]:
    """What kernels of a release cost that the usual ones have nothing to do with."""
    costs = Batch.of([*kernels.values()]).on(target)
    for why in costs.failed.values():
        raise ModelError(why)
    rows = zip(*(n.tolist() for n in (costs.time_s, costs.low_s, costs.high_s)), strict=True)
    return {
        i: Cost(time_s, "compute", habits.BY, (("compute", time_s),), interval=(low_s, high_s))
        for i, (time_s, low_s, high_s) in zip(kernels, rows, strict=True)
    }


def tile_cost(op: KernelOp, tile: Tile | None, target: Target) -> Cost:
    """The tile predictor's cost of one kernel under its tile."""
    return costs_of([(work_of(op), tile or Tile(()))], target)[0]


def trained_cost(model: Model) -> Callable[..., Cost]:
    """The tile predictor with another model's numbers, as a predictor of its own."""

    @lru_cache(4096)
    def known(work: Work, tile: Tile, target: Target) -> Cost:
        return costs_of([(work, tile)], target, model)[0]

    def cost(op: KernelOp, tile: Tile | None, target: Target) -> Cost:
        return known(work_of(op), tile or Tile(()), target)

    return cost


def _costs(
    works: Sequence[Work], many: Work, tiles: Tiles, target: Target, model: Model | None
) -> Iterator[Cost]:
    """Those of alike kernels."""
    s, count = Sheet(), len(works)
    terms, time_s = terms_of(estimate(many, tiles, target, s=s, model=model), count)
    bound: Places = terms.argmax(axis=0)
    facts = {
        name: np.broadcast_to(np.asarray(n, float), (count,)).tolist()
        for name, n in _facts(many, target, s.values, time_s, bound)
    }
    known = trained(many, target, model)
    unseen = known.outside(many, familiar(many, target, known), is_measured(many, target, known))
    ends = (n.tolist() for n in interval(many, target, time_s, model))
    columns = (time_s.tolist(), bound.tolist(), terms.T.tolist(), zip(*ends, strict=True), unseen)
    rows = zip(*columns, strict=True)
    for i, (seconds, largest, row, between, new) in enumerate(rows):
        own = (("flops", works[i].flops), *((fact, _plain(n[i])) for fact, n in facts.items()))
        stated = tuple(zip(BOUNDS, row, strict=True))
        yield Cost(seconds, BOUNDS[largest], BY, stated, own, interval=between, unseen=new)


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
    work: Work, target: Target, values: Mapping[str, Number], time_s: Array, bound: Places
) -> Iterator[tuple[str, Number]]:
    yield "operand_bytes", work.operand_bytes
    for fact, name in MOVED.items():
        if name in values:
            yield fact, values[name] * _times(work)
    for fact, name in FACTS.items():
        if name in values:
            yield fact, values[name]
        elif fact == "waves" and "blocks an SM holds" in values:
            yield fact, values["blocks"] / (target.sms * values["blocks an SM holds"])
    if "threads a block" in values:
        threads = values["blocks an SM holds"] * values["threads a block"]
        yield "occupancy", np.minimum(1.0, threads / target.sm.threads)
    if "padding: used share of the tiles" in values:
        yield "padding", 1 - np.minimum(1.0, values["padding: used share of the tiles"])
    yield "peak", peak_of(work, target)
    shares = _shares(work, target, values, time_s)
    yield from shares.items()
    yield "bound_share", _bound_share(bound, shares, values)


def _shares(
    work: Work, target: Target, values: Mapping[str, Number], time_s: Array
) -> dict[str, Number]:
    """What kernels reach of each listed rate: of flop/s, of the memories, of the instructions that
    lanes can issue."""
    products = work.products * work.density
    counted = products + work.flops * np.equal(products, 0)
    shares: dict[str, Number] = {"peak_share": counted / time_s / peak_of(work, target)}
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


def _bound_share(
    bound: Places, shares: Mapping[str, Number], values: Mapping[str, Number]
) -> Number:
    """The share of the rate that bounds kernels: of the memory that takes longer, of arithmetic or
    of the lanes that issue it, whichever is nearer to what it can do. Waits have no rate: of all
    the nearest."""

    def nearest(*names: str) -> Number:
        found = [shares[n] for n in names if n in shares]
        return np.max(np.broadcast_arrays(0.0, *found), axis=0)

    slower = np.asarray(values.get("l2 time", 0.0)) > values.get("dram time", 0.0)
    by_bound: dict[Bound, Number] = {
        "compute": nearest("peak_share", "lane_share"),
        "memory": np.where(slower, nearest("l2_share"), nearest("dram_share")),
        "latency": nearest(*shares),
    }
    return np.minimum(np.choose(bound, [by_bound[name] for name in BOUNDS]), 1.0)


def _plain(value: float) -> float:
    """A Python number: whole where it is one, else to six significant digits."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")
