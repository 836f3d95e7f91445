"""The tiles of least time of a kernel, or of each of many kernels, among all that are worth trying.

Products on matrix units have thousands of candidates, and what a step of them takes is the same
whatever the extents: it is counted once for all kernels with the same table of tiles. From it comes
a time that none of them is below, and only those that may be among the fastest are costed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from gpuir.cost.candidates import of_any, same_tiles
from gpuir.cost.family import Flags, Places, Terms
from gpuir.cost.generated import corrected, counts, estimate, in_all, matrix, shipped, stands_for
from gpuir.cost.generated.legal import is_legal
from gpuir.cost.generated.parts import share_of
from gpuir.cost.learned import Array
from gpuir.cost.nest import Tiles, peak_of, runs_on_tensor
from gpuir.cost.sheet import Number, Sheet, Unwritten
from gpuir.cost.work import Work, stacked
from gpuir.ir.notes import Tile
from gpuir.targets.target import Target

GREAT = 2.0**30  # an extent that has more blocks than any GPU holds, whatever the tile
ROUNDING = 1e-9  # far more than a bound is off
MOST_S = 1e300  # of any tile
NEAR = (
    1.25  # the first to be costed whole have bounds up to so many times the least, a launch aside
)
KERNELS = 32  # whose tiles are costed at once
PAIRS = 1024
TOGETHER = 2048  # tiles of kernels without a table that are costed at once
CELLS = 1 << 13  # kernels times tiles that are bounded at once: numpy asks no system for so few


@dataclass(frozen=True)
class Fastest:
    """Legal tiles of one kernel and their seconds, the fastest first."""

    tiles: tuple[Tile, ...]
    time_s: Array


def fastest_of(works: Sequence[Work], target: Target, count: int) -> list[Fastest]:
    """Of each kernel the `count` fastest of its legal candidates, or all where there are fewer. Of
    equal times the one comes first that `of_any` has first."""
    found: dict[int, Fastest] = {}
    tables: dict[Hashable, list[int]] = {}
    groups: dict[Hashable, list[int]] = {}
    for i, work in enumerate(works):
        alike = work.likeness, tuple(o.cell_bytes for o in work.operands)
        if _has_table(work, target):
            tables.setdefault((alike, _least_extents(work)), []).append(i)
        else:  # by what formulas ask of all kernels at once
            asked = bool(work.products), tuple(n > 1 for _, n in work.dims)
            groups.setdefault((alike, asked), []).append(i)
    for places in tables.values():
        table = _table(_least(works[places[0]]), target)
        for begin in range(0, len(places), KERNELS):
            some = places[begin : begin + KERNELS]
            found.update(zip(some, table.fastest_of([works[i] for i in some], count), strict=True))
    for places in groups.values():
        each = _of_all([works[i] for i in places], target, count)
        found.update(zip(places, each, strict=True))
    return [found[i] for i in range(len(works))]


def _of_all(works: Sequence[Work], target: Target, count: int) -> Iterator[Fastest]:
    """The fastest tiles of alike kernels, all of whose candidates are costed."""
    waiting: list[tuple[Work, Tiles]] = []
    size = 0
    for work in works:
        tiles = of_any(work, target)
        if size and size + len(np.ravel(tiles.stages)) > TOGETHER:
            yield from _at_once(waiting, target, count)
            waiting, size = [], 0
        waiting.append((work, tiles))
        size += len(np.ravel(tiles.stages))
    yield from _at_once(waiting, target, count)


def _at_once(
    kernels: Sequence[tuple[Work, Tiles]], target: Target, count: int
) -> Iterator[Fastest]:
    """The fastest of their tiles of each of alike kernels."""
    sizes = [len(np.ravel(tiles.stages)) for _, tiles in kernels]
    work, tiles = kernels[0][0], Tiles.joined([tiles for _, tiles in kernels])
    if len(kernels) > 1:
        many = stacked([work for work, _ in kernels]).take(np.repeat(range(len(sizes)), sizes))
        pairs = zip(many.operands, work.operands, strict=True)
        operands = (replace(o, cell_bytes=one.cell_bytes) for o, one in pairs)
        work = replace(many, operands=tuple(operands))
    size = sum(sizes)
    counted = counts(work, tiles, target)
    legal = is_legal(work, tiles, target, size, counted).ok
    time_s = np.broadcast_to(estimate(work, tiles, target, counted=counted).time_s, (size,))
    time_s = np.where(legal, time_s, np.inf)
    ends = np.cumsum([0, *sizes]).tolist()
    for begin, end in pairwise(ends):
        most = min(count, int(legal[begin:end].sum()))
        order = begin + np.argsort(time_s[begin:end], kind="stable")[:most]
        yield Fastest(tuple(map(tiles.note, order.tolist())), time_s[order])


# ---------------------------------------------------------------------------- products


def _has_table(work: Work, target: Target) -> bool:
    """Whether a kernel is a product of which a step takes as long whatever the extents."""
    if work.kernel not in ("k.gemm", "k.conv", "k.experts"):
        return False
    if target.is_cpu or not runs_on_tensor(work, target):
        return False
    points = float(work.multiply_add) * work.points
    return bool(abs(work.products - points) <= ROUNDING * points)


def _least_extents(work: Work) -> tuple[int, int, int]:
    m, n, k = (max(int(work.extents[d]), 1) for d in "mnk")
    return same_tiles(work.dtype.bits, m, n, k)


def _least(work: Work) -> Work:
    """The product of least extents that has the same tiles, whose steps take as long."""
    return replace(
        work,
        dims=(("b", 1), *zip("mnk", _least_extents(work), strict=True)),
        operands=tuple(replace(o, nbytes=0.0) for o in work.operands),
        flops=0.0,
        products=0.0,
        lane_ops=0.0,
        simd_ops=0.0,
        detail=None,
        beside=(),
    )


@lru_cache(maxsize=64)
def _table(least: Work, target: Target) -> _Table:
    """What products have in common that are alike but for their extents."""
    tiles = of_any(least, target)
    size = len(tiles.stages)
    tiles = tiles.each(lambda n: np.broadcast_to(np.asarray(n, float), (size,)))
    dims = tuple((d, GREAT) for d, _ in least.dims)
    great = replace(least, dims=dims, products=least.multiply_add * GREAT ** len(dims))
    counted = matrix.count(great, tiles, target)
    legal = np.flatnonzero(is_legal(great, tiles, target, size, counted).ok)
    tiles = tiles.take(legal)
    counted = counted.each(lambda n: np.asarray(n)[legal])
    factors = shipped().factors["matrix"]
    step = matrix.step_of(Sheet(), counted, great, target, factors)
    seen = matrix.held(Sheet(), counted, great, stands_for(target), factors)
    by_extents = dict.fromkeys(matrix.of_grid(great, tiles, 1.0, 1.0, 1.0), 0.0)
    each = _Candidates(tiles, replace(counted, **by_extents), step, seen)
    return _Table(target, each.each(_once), *each.by_stages())


def _once(numbers: Number) -> Number:
    """A number that all tiles have in common, or those of each."""
    is_same = np.size(numbers) and (numbers == np.ravel(numbers)[0]).all()
    return float(np.ravel(numbers)[0]) if is_same else numbers


def _is_many(n: Number) -> bool:
    """As `np.ndim`, in a tenth of the time."""
    return isinstance(n, np.ndarray)


@dataclass(frozen=True)
class _Candidates:
    """Tiles, what a step of each takes, and what an SM holds as the network sees it, full of
    blocks."""

    tiles: Tiles
    counted: matrix.ProductBlocks
    step: matrix.LoopStep
    seen: matrix.HeldBlocks

    def each(self, change: Callable[[Number], Number]) -> _Candidates:
        return _Candidates(*(x.each(change) for x in vars(self).values()))

    def take(self, places: Places) -> _Candidates:
        def some(n: Number) -> Number:
            return n[places] if _is_many(n) else n

        return self.each(some)

    def by_stages(self) -> tuple[_Candidates, Places]:
        """Those that differ in stages alone as one that is as fast as any of them, a column of
        all splits for each; and where their rows of all splits begin and end among all."""
        tiles, count = self.tiles, max(len(np.unique(self.tiles.split)), 1)
        found = np.stack((*(tiles.dims[d] for d in "mnk"), tiles.warps))[:, ::count]
        new = (np.diff(found, prepend=np.nan) != 0).any(axis=0)
        begins = np.flatnonzero(new)
        first = self.take(begins * count)
        least, most = (
            {name: f.reduceat(getattr(self.step, name)[::count], begins) for name in names}
            for f, names in ((np.minimum, ("busy", "alone")), (np.maximum, ("resident", "ahead")))
        )

        alike = replace(first, step=replace(first.step, **least, **most))
        split = tiles.split[:count, None]
        alike = replace(alike, tiles=replace(alike.tiles, split=split))
        return alike, np.append(begins, found.shape[1])

    def on(self, work: Work, target: Target) -> tuple[matrix.ProductBlocks, matrix.LoopStep]:
        """What blocks and steps do on a kernel's own extents."""
        c = self.counted
        c = replace(c, **matrix.of_grid(work, self.tiles, c.m, c.n, c.k))
        resident = np.minimum(self.step.resident, share_of(np, c.blocks, target))
        return c, replace(self.step, resident=resident)

    def corrected(self, terms: Terms, work: Work, target: Target) -> Terms:
        """The terms as the network corrects them."""
        if (net := shipped().net) is None:
            return terms
        c, _ = self.on(work, target)
        there = stands_for(target)
        resident = np.minimum(self.seen.resident, share_of(np, c.blocks, there))
        seen = matrix.features_of(c, replace(self.seen, resident=resident), work, there)
        return corrected(Unwritten(), terms, seen, net)


def _least_s(busy_s: Number, work: Work, tiles: Tiles, target: Target) -> Number:
    """Seconds that no tile takes less than whose formulas say `busy_s`, whatever the network does;
    infinite where more blocks share a sum than it has steps."""
    least = np.exp(-matrix.BOUND) if shipped().net else 1.0
    roof = work.flops / peak_of(work, target)
    time_s = np.maximum(busy_s * least, roof) + target.launch_s
    steps = np.ceil(np.maximum(work.extents["k"], 1.0) / tiles.dims["k"])
    return np.where(tiles.split > steps, np.inf, time_s * (1 - ROUNDING))


@dataclass(frozen=True)
class _Table:
    """The candidates that fit a target: `each` of them, and `alike` those that differ in stages
    alone as one, whose rows of `each` begin and end at `ends`."""

    target: Target
    each: _Candidates
    alike: _Candidates
    ends: Places
    notes: dict[int, Tile] = field(default_factory=dict[int, Tile])

    def fastest_of(self, works: Sequence[Work], count: int) -> list[Fastest]:
        """Of each kernel the fastest tiles. A tile is costed whole where its bound is no more than
        the times of the fastest so far: first the bound of those alike, then its own."""
        many = works[0] if len(works) == 1 else stacked(works)
        alike_s = self._alike_s(many, len(works))
        launch_s = self.target.launch_s
        least_s = alike_s.min(axis=(1, 2), initial=MOST_S) - launch_s
        limit_s = launch_s + NEAR * least_s
        waiting, done = _Pairs.none(), _Pairs.none()
        slowest_s = np.full(len(works), np.inf)
        while True:
            near = alike_s <= limit_s[:, None, None]
            if near.any():
                waiting = waiting.joined(self._pairs(many, near))
                alike_s[near] = np.inf
            near = waiting.time_s <= limit_s[waiting.kernels]
            if near.any():
                for some in waiting.take(near).parts():
                    done = done.joined(self._costed(many, some))
                waiting = waiting.take(~near)
                done, slowest_s = done.fastest(len(works), count)
            elif ((slowest_s < np.inf) | (limit_s >= MOST_S)).all():
                break
            more_s = np.where(limit_s < launch_s + 64 * least_s, 2 * limit_s, MOST_S)
            limit_s = np.where(slowest_s < np.inf, slowest_s, more_s)
        done = done.in_order()
        notes = [self.note(place) for place in done.places.tolist()]
        ends = np.searchsorted(done.kernels, range(len(works) + 1)).tolist()
        rows = (slice(begin, min(begin + count, end)) for begin, end in pairwise(ends))
        return [Fastest(tuple(notes[row]), done.time_s[row]) for row in rows]

    def note(self, place: int) -> Tile:
        """One of the tiles as a note, which is made once."""
        if place not in self.notes:
            self.notes[place] = self.each.tiles.note(place)
        return self.notes[place]

    def _alike_s(self, many: Work, count: int) -> Array:
        """The bounds of those alike, by kernel, split and column."""
        if not np.ndim(many.points):
            return self._alike_part(many)[None]
        cells = max(self.alike.tiles.split.size * self.alike.step.busy.size, 1)
        size = max(CELLS // cells, 1)
        parts = (slice(begin, begin + size) for begin in range(0, count, size))
        columns = many.each(lambda n: n[:, None, None])
        return np.concatenate([self._alike_part(columns.take(part)) for part in parts])

    def _alike_part(self, work: Work) -> Array:
        counted, step = self.alike.on(work, self.target)
        busy_s = matrix.least_s(counted, step, self.target, shipped().factors["matrix"])
        return _least_s(busy_s, work, self.alike.tiles, self.target)

    def _pairs(self, many: Work, near: Flags) -> _Pairs:
        """All candidates of some that are alike, their terms and their own bounds."""
        kernels, splits, columns = np.nonzero(near)
        begin, stages = self.ends[columns], np.diff(self.ends)[columns]
        kernels, splits, begin = (np.repeat(n, stages) for n in (kernels, splits, begin))
        stage = np.arange(len(kernels)) - np.repeat(np.cumsum(stages) - stages, stages)
        places = (begin + stage) * near.shape[1] + splits
        some, work = self.each.take(places), _works(many, kernels)
        given = shipped().factors["matrix"]
        terms = matrix.terms_of(Unwritten(), *some.on(work, self.target), self.target, given)
        busy_s = np.maximum(terms.compute, terms.memory) + terms.latency
        time_s = _least_s(busy_s, work, some.tiles, self.target)
        return _Pairs(
            *(kernels, places, time_s),
            compute=terms.compute,
            memory=terms.memory,
            latency=terms.latency,
        )

    def _costed(self, many: Work, pairs: _Pairs) -> _Pairs:
        """Kernels with tiles, and what they take."""
        work, some = _works(many, pairs.kernels), self.each.take(pairs.places)
        peak = self.target.peak("tensor", work.rate_dtype)
        terms = Terms(pairs.compute, pairs.memory, pairs.latency, work.products / peak)
        terms = some.corrected(terms, work, self.target)
        return replace(pairs, time_s=in_all(Unwritten(), terms, work, self.target).time_s)


def _works(many: Work, kernels: Places) -> Work:
    """Those of many kernels; or the one, whose numbers are none of many."""
    return many.take(kernels) if np.ndim(many.points) else many


@dataclass(frozen=True)
class _Pairs:
    """Kernels with tiles, by their places, seconds of each, and terms before the network."""

    kernels: Places
    places: Places
    time_s: Array
    compute: Array
    memory: Array
    latency: Array

    @staticmethod
    def none() -> _Pairs:
        none, no_s = np.zeros(0, int), np.zeros(0)
        return _Pairs(none, none, no_s, compute=no_s, memory=no_s, latency=no_s)

    def joined(self, other: _Pairs) -> _Pairs:
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Pairs(*(np.concatenate(pair) for pair in both))

    def take(self, which: Places | Flags) -> _Pairs:
        return _Pairs(*(n[which] for n in vars(self).values()))

    def parts(self) -> Iterator[_Pairs]:
        """So few at once that numpy does not wake other threads for the network."""
        for begin in range(0, len(self.kernels), PAIRS):
            yield _Pairs(*(n[begin : begin + PAIRS] for n in vars(self).values()))

    def fastest(self, kernels: int, count: int) -> tuple[_Pairs, Array]:
        """Of each of so many kernels the `count` fastest, and those as fast; and the time of the
        slowest of them, infinite where there are fewer."""
        pairs = self.take(np.argsort(self.kernels, kind="stable"))
        slowest_s = np.full(kernels, np.inf)
        ends = np.searchsorted(pairs.kernels, range(kernels + 1)).tolist()
        for i, (begin, end) in enumerate(pairwise(ends)):
            if end - begin >= count:
                slowest_s[i] = np.partition(pairs.time_s[begin:end], count - 1)[count - 1]
        return pairs.take(pairs.time_s <= slowest_s[pairs.kernels]), slowest_s

    def in_order(self) -> _Pairs:
        """By kernel, and the fastest first, of equals that of the first place."""
        return self.take(np.lexsort((self.places, self.time_s, self.kernels)))
