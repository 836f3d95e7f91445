"""A model loaded at a few sizes, and the graph that says what it is at others.

Frontends read a model at one size: what they decide by it they do not write down. So a model is
loaded at the ends of what is asked for, and at one point between. Where all graphs are alike but
for numbers, each of these is a sum of products of the sizes, or a part of one, and the graph that
has the expressions is proved by the point between. It stands for all points within the ends. Sizes
of 0 and 1 are apart: axes of one cell broadcast, and torch traces programs of their own for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import combinations
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Graph
from gpuir.ir.sizes import Columns, Size, each_size, value

Point = Mapping[str, int]
# A graph, or why there is none, and the places of the points that it is for.
FoundGraph = tuple["SymbolicGraph | GpuirError", NDArray[np.int64]]
Load = Callable[[Point], Graph]
APART = 1  # sizes up to this stand for themselves alone
KEPT = 16  # graphs of single points
TERMS = 3  # an expression has, at most
PARTS = (2, 4, 8, 16, 32, 64)  # by which images are cut down
FAR = (16, 4)  # times a size: so far may those be that are asked for next


class UnlikeGraphs(Exception):
    """Graphs of several sizes do not tell that of others."""


def is_between(low: Point, point: Point, high: Point) -> bool:
    """Whether each size of a point is."""
    return all(low[name] <= n <= high[name] for name, n in point.items())


@dataclass(frozen=True)
class SymbolicGraph:
    """A graph whose sizes are expressions, right from `low` to `high` of each symbol."""

    graph: Graph
    low: Point
    high: Point

    def covers(self, points: Columns) -> NDArray[np.bool_]:
        """Of each point, whether it is within."""
        rows = (
            (points[name] >= low) & (points[name] <= self.high[name])
            for name, low in self.low.items()
        )
        return np.logical_and.reduce(list(rows))

    def holds(self, *points: Point) -> bool:
        """Whether points are within."""
        return all(is_between(self.low, point, self.high) for point in points)

    @property
    def symbols(self) -> set[str]:
        """Those that it has."""
        return {name for name in self.low if self.low[name] < self.high[name]}

    def reaching(self, low: Point, high: Point) -> SymbolicGraph:
        """From and to further."""
        return SymbolicGraph(
            self.graph,
            {name: min(n, self.low[name]) for name, n in low.items()},
            {name: max(n, self.high[name]) for name, n in high.items()},
        )

    def at(self, point: Point) -> Graph:
        """With numbers."""
        return each_size(self.graph, lambda x: value(x, point))


@dataclass
class Sampled:
    """A model as `load` gives it at points, and what is known of it already: graphs with
    expressions, and those of single points."""

    load: Load
    known: list[SymbolicGraph] = field(default_factory=list[SymbolicGraph])
    loaded: dict[tuple[tuple[str, int], ...], Graph] = field(
        default_factory=dict[tuple[tuple[str, int], ...], Graph]
    )

    def graphs(self, points: Columns) -> Iterator[FoundGraph]:
        """Graphs that together are right at all points, and the places of those each is for. Of
        points that the model does not take, what it says."""
        left = np.arange(len(next(iter(points.values()))))
        for one in self.known:
            own = one.covers({n: x[left] for n, x in points.items()})
            if own.any():
                yield one, left[own]
                left = left[~own]
        for some in _apart({n: x[left] for n, x in points.items()}):
            yield from self._reaching(points, left[some])

    def _reaching(self, points: Columns, some: NDArray[np.int64]) -> Iterator[FoundGraph]:
        """Of points of a kind: a graph of others, where that is right at their ends too."""
        low, high = (
            {name: int(end(n[some])) for name, n in points.items()} for end in (np.min, np.max)
        )
        found = self.reached(low, high)
        if found is None:
            yield from self._new(points, some)
        else:
            yield found, some

    def reached(self, low: Point, high: Point) -> SymbolicGraph | None:
        """A graph that is known, from and to further, where it is right at these ends too."""
        for i, one in enumerate(self.known):
            if not one.symbols >= {name for name in low if low[name] < high[name]}:
                continue
            ends = [low] if any(low[n] < one.low[n] for n in low) else []
            ends += [high] if any(high[n] > one.high[n] for n in high) else []
            with suppress(GpuirError):
                if all(one.at(p) == self._load(p) for p in ends):
                    self.known[i] = one.reaching(low, high)
                    return self.known[i]
        return None

    def beyond(self, point: Point, others: Sequence[Point]) -> SymbolicGraph:
        """The graph of all points between some, and far beyond where they do not tell that yet; of
        those between the first two alone where the model does not take points so far. They are
        alike in what of them is 0 or 1, and few have to be loaded beside them. UnlikeGraphs where
        they do not tell what is between."""
        if len(self._load(point).nodes) != len(self._load(others[0]).nodes):
            raise UnlikeGraphs
        for near, reach in (*((others, times) for times in FAR), (others[:1], 0)):
            free = [name for name, n in point.items() if any(p[name] != n for p in near)]
            count = 2 * len(free) + 1
            every = [point, *near[: count - 2]]
            low, high = ({n: end(p[n] for p in every) for n in point} for end in (min, max))
            for name in free if reach else ():
                if len({p[name] for p in every}) < 3:
                    high[name] = (reach * high[name] | 63) + 2  # odd, and more than whole blocks
            corners = [{**low, name: high[name]} for name in free]
            middle = {name: _between(low[name], high[name]) for name in low}
            every = {tuple(p.items()): p for p in (*every, high, *corners, middle)}
            with suppress(UnlikeGraphs):
                return SymbolicGraph(
                    self._joined([*every.values()][:count], free, free[0]), low, high
                )
        raise UnlikeGraphs

    def _new(self, points: Columns, some: NDArray[np.int64]) -> Iterator[FoundGraph]:
        """Of points that no graph stands for, all of a kind."""
        ends = {name: (int(n[some].min()), int(n[some].max())) for name, n in points.items()}
        low, high = ({n: x[i] for n, x in ends.items()} for i in (0, 1))
        try:
            made = self.sample(low, high)
        except UnlikeGraphs as error:
            for part in self._parts(points, some, str(error)):
                yield from self._new(points, part)
            return
        except GpuirError as error:  # of a single point
            yield error, some
            return
        self.known.append(made)
        yield made, some

    def sample(self, low: Point, high: Point) -> SymbolicGraph:
        """The graph of all points between; UnlikeGraphs, of a symbol, where it takes several."""
        free = [name for name in low if low[name] < high[name]]
        if not free:
            return SymbolicGraph(self._load(low), low, high)
        corners = [{**low, name: high[name]} for name in free]
        middle = {name: _between(low[name], high[name]) for name in low}
        every = [low, *corners, *([high] if len(free) > 1 else []), middle]
        try:
            return SymbolicGraph(self._joined(every, free, free[0]), low, high)
        except UnlikeGraphs:
            for name in free:  # whose fault is it
                between = _between(low[name], high[name])
                self._joined((low, {**low, name: between}, {**low, name: high[name]}), [name], name)
            raise

    def _joined(self, every: Iterable[Point], free: Sequence[str], name: str) -> Graph:
        points = list({tuple(p.items()): p for p in every}.values())
        try:
            return joined([self._load(p) for p in points], points, free)
        except (UnlikeGraphs, GpuirError):
            raise UnlikeGraphs(name) from None

    def _load(self, point: Point) -> Graph:
        key = tuple(sorted(point.items()))
        if key not in self.loaded:
            if len(self.loaded) >= KEPT:
                del self.loaded[next(iter(self.loaded))]
            self.loaded[key] = self.load(point)
        return self.loaded[key]

    def _parts(
        self, points: Columns, some: NDArray[np.int64], name: str
    ) -> Iterator[NDArray[np.int64]]:
        """The places in two parts along a symbol: its largest number by itself, where the rest is
        alike, as what a model was built for; else in the middle."""
        column = points[name][some]
        numbers = np.unique(column)
        cut = numbers[(len(numbers) - 1) // 2]
        if len(numbers) > 2 and self._are_alike(points, some, name, numbers):
            cut = numbers[-2]
        yield some[column <= cut]
        yield some[column > cut]

    def _are_alike(
        self, points: Columns, some: NDArray[np.int64], name: str, numbers: NDArray[np.int64]
    ) -> bool:
        low = {n: int(x[some].min()) for n, x in points.items()}
        ends = (low, {**low, name: int(numbers[-2])})
        try:
            self._joined(ends, [name], name)
        except UnlikeGraphs:
            return False
        return True


def _between(low: int, high: int) -> int:
    """A number between, one more than whole blocks, as large ones as there are: there it shows by
    how much what is rounded is rounded up."""
    middle = low + int(0.618 * (high - low))
    ones = (middle // part * part + 1 + up for part in reversed(PARTS) for up in (0, part))
    return next((n for n in ones if low < n < high), middle)


def _apart(points: Columns) -> Iterator[NDArray[np.int64]]:
    """The places of points that are alike in what of them is 0 or 1."""
    if not len(next(iter(points.values()))):
        return
    rows = np.array([np.where(n <= APART, n, APART + 1) for n in points.values()])
    kinds, which = np.unique(rows, axis=1, return_inverse=True)
    for kind in reversed(range(kinds.shape[1])):  # those of many first: they may reach further
        yield np.flatnonzero(which.reshape(-1) == kind)


def joined(graphs: Sequence[Graph], points: Sequence[Point], free: Sequence[str]) -> Graph:
    """One graph from those of several points: its numbers are expressions. UnlikeGraphs where they
    differ in more than numbers."""
    return _Join(points, free).of(graphs)


@dataclass
class _Join:
    points: Sequence[Point]
    free: Sequence[str]
    numbers: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any])
    known: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any])

    def of(self, every: Sequence[Any]) -> Any:
        first: Any = every[0]
        kind = cast(Any, type(first))
        if any(type(x) is not kind for x in every):
            raise UnlikeGraphs
        if kind is int or kind is float:
            return first if all(x == first for x in every) else self.number(tuple(every))
        key = tuple(map(id, every))
        if key not in self.known:
            self.known[key] = self.record(first, every), every  # whose identities are the key
        return self.known[key][0]

    def record(self, first: Any, every: Sequence[Any]) -> Any:
        if isinstance(first, tuple):
            return self.row(cast("tuple[Any, ...]", first), every)
        if is_dataclass(first):
            old = {f.name: getattr(first, f.name) for f in fields(first)}
            new = {name: self.of([getattr(x, name) for x in every]) for name in old}
            changed = {name: x for name, x in new.items() if x is not old[name]}
            return replace(cast(Any, first), **changed) if changed else first
        if not all(np.array_equal(first, x) for x in every):
            raise UnlikeGraphs
        return first

    def row(self, first: tuple[Any, ...], rows: Sequence[tuple[Any, ...]]) -> Any:
        if any(len(x) != len(first) for x in rows):
            raise UnlikeGraphs
        made = [self.of(xs) for xs in zip(*rows, strict=True)]
        if all(a is b for a, b in zip(made, first, strict=True)):
            return first
        kind: Any = type(first)
        return kind(*made) if hasattr(kind, "_fields") else tuple(made)

    def number(self, found: tuple[Any, ...]) -> Any:
        """The expression that gives these numbers at the points, the simplest."""
        if found not in self.numbers:
            self.numbers[found] = self.solved(found)
        return self.numbers[found]

    def solved(self, found: tuple[Any, ...]) -> Any:
        target = np.array(found, float)
        monomials = [m for n in range(3) for m in combinations((*self.free, *self.free), n)]
        monomials = sorted({tuple(sorted(m)) for m in monomials}, key=len)
        columns = {
            m: np.array([prod(p[s] for s in m) for p in self.points], float) for m in monomials
        }
        for count in range(1, min(TERMS, len(self.points) - 1) + 1):
            for some in combinations(monomials, count):
                a = np.stack([columns[m] for m in some], axis=1)
                factors, _, rank, _ = np.linalg.lstsq(a, target)
                if rank < count:
                    continue
                near = np.round(factors)
                if np.array_equal(a @ near, target):
                    return self.expression(zip(some, near.tolist(), strict=True))
        if isinstance(found[0], int):
            for part in PARTS:
                for made in self.parts(found, part):
                    return made
        raise UnlikeGraphs

    def expression(self, terms: Iterable[tuple[tuple[str, ...], float]]) -> Any:
        total: Any = 0
        for names, factor in terms:
            term: Any = int(factor)
            for name in names:
                term = term * Size.symbol(name, self.points[0][name])
            total = total + term
        return total

    def parts(self, found: tuple[int, ...], part: int) -> Iterator[Any]:
        """A symbol and a number over, in parts: cells of an image that is cut down."""
        for name in self.free:
            column = [p[name] for p in self.points]
            low = max(part * n - x for n, x in zip(found, column, strict=True))
            high = min(part * n + part - 1 - x for n, x in zip(found, column, strict=True))
            for over in range(low, min(high, low + part) + 1):
                if all((x + over) // part == n for n, x in zip(found, column, strict=True)):
                    yield (Size.symbol(name, column[0]) + over) // part
                    break
