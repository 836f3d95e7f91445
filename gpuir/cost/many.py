"""Many kernels costed at once, each to the last digit as `tile.cost_of` costs it alone.

Numpy's exp, log, tanh and powers, which work on several numbers at a time, differ from those of
Python's `math` in the last digit on some machines. So those few are computed one by one here, and
all other arithmetic, which IEEE 754 fixes, on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from gpuir.cost.families import check_factors, family_of
from gpuir.cost.learned import correction, is_uneven, shipped, stands_for
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.tile import (
    best_tiles,
    choose,
    cost_of,
    estimate,
    interval,
    is_legal,
    search,
    tables,
    trained,
)
from gpuir.cost.work import Work, stacked
from gpuir.ir.errors import ModelError
from gpuir.ir.notes import Bound
from gpuir.targets.target import Target

Array = np.ndarray[Any, np.dtype[np.float64]]

BOUNDS: tuple[Bound, ...] = ("compute", "memory", "latency")  # the order of a cost's terms
# Whole numbers beyond 2**53 are rounded in an array, and are not in Python: kernels of such counts,
# or whose parts may come near, are costed alone.
LARGEST = 2.0**46


class Exact(np.ndarray[Any, np.dtype[np.float64]]):
    """Numbers whose powers are those of Python's floats."""

    def __pow__(self, other: Number) -> Exact:  # type: ignore[override]
        return _powers(self, other)

    def __rpow__(self, other: Number) -> Exact:  # type: ignore[override]
        return _powers(other, self)


def _exact(numbers: Any) -> Exact:
    return np.asarray(numbers, float).view(Exact)


def _powers(x: Number, y: Number) -> Exact:
    shape = np.broadcast_shapes(np.shape(x), np.shape(y))
    xs, ys = (np.broadcast_to(n, shape).ravel().tolist() for n in (x, y))
    return _exact(np.array(list(map(pow, xs, ys)), float).reshape(shape))


def _each(function: Callable[[float], float]) -> Callable[[Number], Number]:
    """A function of Python's floats, of each number of an array."""

    def of(x: Number) -> Number:
        if not isinstance(x, np.ndarray):
            return function(x)
        many = cast(Array, x)
        return _exact(
            np.array(list(map(function, many.ravel().tolist())), float).reshape(np.shape(many))
        )

    return of


def _where(test: Any, yes: Number, no: Number) -> Exact:
    return _exact(np.where(test, yes, no))


XP = SimpleNamespace(
    maximum=np.maximum,
    minimum=np.minimum,
    where=_where,
    ceil=np.ceil,
    floor=np.floor,
    sqrt=np.sqrt,
    **{name: _each(getattr(math, name)) for name in ("exp", "log", "log1p", "tanh")},
)


@dataclass(frozen=True)
class Costs:
    """What kernels cost on one target: seconds, and between what 80 % of measurements lie, which is
    the time itself where nobody `knows`. `bound` is a place in `BOUNDS`; `split` is that of the
    tile, how many blocks share one sum. `failed` are those that no tile fits, and what is said."""

    time_s: Array
    low_s: Array
    high_s: Array
    knows: np.ndarray[Any, np.dtype[np.bool_]]
    bound: np.ndarray[Any, np.dtype[np.int8]]
    split: np.ndarray[Any, np.dtype[np.int32]]
    failed: dict[int, str]

    @staticmethod
    def room(count: int) -> Costs:
        """For so many kernels."""
        return Costs(
            *(np.zeros(count), np.zeros(count), np.zeros(count)),
            *(np.zeros(count, np.bool_), np.zeros(count, np.int8), np.ones(count, np.int32)),
            {},
        )


@dataclass(frozen=True)
class Alike:
    """Kernels that one run of the formulas costs: which of all they are, and as one work of many,
    in numpy's numbers and in exact ones. `learned` keeps what the network says of them."""

    rows: tuple[int, ...]
    works: tuple[Work, ...]
    many: Work
    exact: Work
    learned: dict[Hashable, Number] = field(default_factory=dict[Hashable, Number])
    tables: dict[Hashable, Hashable] = field(default_factory=dict[Hashable, Hashable])

    def costed(self, target: Target, into: Costs) -> None:
        """Writes what they cost on a target."""
        tiles = self._tiles(target, into)
        e = estimate(
            self.exact, tiles, target, s=Sheet(XP), learned=self._learned(target), model=shipped()
        )
        size, rows = (len(self.rows),), list(self.rows)
        terms = np.stack(
            [np.broadcast_to(np.asarray(n), size) for n in (e.compute, e.memory, e.latency)]
        )
        time_s = np.maximum(terms[0], terms[1]) + terms[2]
        into.time_s[rows] = time_s
        into.bound[rows] = terms.argmax(axis=0)
        into.split[rows] = np.broadcast_to(np.asarray(tiles.split), size)
        into.low_s[rows], into.high_s[rows] = interval(self.many, target, time_s)
        into.knows[rows] = True

    def _tiles(self, target: Target, into: Costs) -> Tiles:
        """Those that `best_tiles` notes, as `Tiles.of` reads the note."""
        size = (len(self.rows),)
        found = choose(self.many, target).each(lambda n: np.broadcast_to(n, size))
        fits = np.broadcast_to(is_legal(self.many, found, target), size)
        dims: dict[str, Array] = {}
        for d, n in self.many.dims:
            dims[d] = np.maximum(n, 1.0)
            if d in found.dims:
                cut = np.trunc(np.asarray(found.dims[d], float))
                dims[d] = np.where(n > 1, cut, dims[d]) if d in "bh" else cut
        options = [np.trunc(np.array(n, float)) for n in (found.stages, found.warps, found.split)]
        for some in self._searched(np.flatnonzero(~fits).tolist(), target):
            self._search(some, target, dims, options, into)
        stages, warps, split = map(_exact, options)
        return Tiles({d: _exact(n) for d, n in dims.items()}, stages, warps, split)

    def _searched(self, rows: Sequence[int], target: Target) -> list[list[int]]:
        """Rows whose tiles are searched among the same ones, together."""
        groups: dict[Hashable, list[int]] = {}
        for i in rows:
            key = i, target.device, target.isa, target.sm
            if key not in self.tables:
                found = (give(self.works[i], target) for give in tables(self.works[i], target))
                self.tables[key] = tuple(map(_bytes, found))
            groups.setdefault(self.tables[key], []).append(i)
        return list(groups.values())

    def _search(
        self,
        rows: list[int],
        target: Target,
        dims: Mapping[str, Array],
        options: Sequence[Array],
        into: Costs,
    ) -> None:
        """Fills in the tiles of rows that are searched among the same ones."""
        many = stacked([self.works[i] for i in rows])
        first = tables(many, target)[0](many, target)
        column = many.each(lambda n: n[..., None])
        fits = np.broadcast_to(is_legal(column, first, target), (len(rows), np.size(first.warps)))
        some = [bool(row.any()) for row in fits]
        if len({*some}) > 1:
            for fitting in (True, False):
                own = [i for i, fit in zip(rows, some, strict=True) if fit == fitting]
                self._search(own, target, dims, options, into)
            return
        try:
            found = search(many, target, many.kernel)
        except ModelError as error:
            if len(rows) == 1:
                into.failed[self.rows[rows[0]]] = str(error)
                return
            for i in rows:
                self._search([i], target, dims, options, into)
            return
        for d, n in many.dims:
            if d in found.dims:
                cut = np.trunc(np.asarray(found.dims[d], float))
                whole = np.maximum(n, 1.0)
                dims[d][rows] = np.where(n > 1, cut, whole) if d in "bh" else cut
            else:
                dims[d][rows] = np.maximum(n, 1.0)
        for numbers, n in zip(options, (found.stages, found.warps, found.split), strict=True):
            numbers[rows] = np.trunc(n)

    def _learned(self, target: Target) -> Number:
        """The network's correction: the same on all targets that one measured GPU stands for."""
        family = family_of(self.works[0], target)
        key = family.name, target.isa
        if key in self.learned:
            return self.learned[key]
        found = correction(self.many, family, target, shipped())
        if stands_for(trained(self.works[0], target), target).name != target.name:
            self.learned[key] = found
        return found


def _bytes(tiles: Tiles) -> Hashable:
    """What is equal for equal tiles alone."""
    numbers = (*tiles.dims.values(), tiles.stages, tiles.warps, tiles.split)
    return tuple(tiles.dims), tuple(np.asarray(n, float).tobytes() for n in numbers)


class Batch:
    """Kernels that are costed together, on one target after another."""

    def __init__(self, works: Sequence[Work]):
        self.works = tuple(works)
        groups: dict[Hashable, list[int]] = {}
        self.alone: list[int] = []
        for i, work in enumerate(self.works):
            if _is_large(work):
                self.alone.append(i)
            else:
                groups.setdefault((work.likeness, is_uneven(work)), []).append(i)
        self.groups = [self._alike(rows) for rows in groups.values()]

    def _alike(self, rows: list[int]) -> Alike:
        works = tuple(self.works[i] for i in rows)
        many = stacked(works)
        return Alike(tuple(rows), works, many, many.each(_exact))

    def on(self, target: Target) -> Costs:
        """What each costs there, under the tile that a library would take."""
        check_factors(target)
        found = Costs.room(len(self.works))
        if target.local:  # corrections by neighbours are sums over many, in an order of their own
            self._one_by_one(range(len(self.works)), target, found)
            return found
        for group in self.groups:
            group.costed(target, found)
        self._one_by_one(self.alone, target, found)
        return found

    def _one_by_one(self, rows: Sequence[int], target: Target, found: Costs) -> None:
        for i in rows:
            try:
                tile = best_tiles({self.works[i]: self.works[i].kernel}, target)[self.works[i]]
            except ModelError as error:
                found.failed[i] = str(error)
                continue
            cost = cost_of(self.works[i], tile, target)
            found.time_s[i], found.bound[i] = cost.time_s, BOUNDS.index(cost.bound)
            found.low_s[i], found.high_s[i] = cost.interval or (cost.time_s, cost.time_s)
            found.knows[i], found.split[i] = cost.interval is not None, tile.split


def _is_large(work: Work) -> bool:
    """Whether some count may be beyond what an array's numbers hold exactly."""
    return any(float(n) > LARGEST for n in _counts(work))


def _counts(work: Work) -> Iterator[Number]:
    yield from (work.points, work.flops, work.nbytes)
