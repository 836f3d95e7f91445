"""Measured kernels: what ran, on which target, how long it took; many rows at once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gpuir.cost.work import Work
from gpuir.fit.columns import Floats, Ints, WordColumn
from gpuir.targets.target import Target

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Clock:
    """What a measurement holds besides the kernels.

    It takes at least `floor_s`, the host's time between the two events, and its kernels begin
    `lead_s` after the first: max(floor, lead + kernels). Both are 0 where the GPU was given its
    kernels in advance (a CUDA graph) or kernels were timed by themselves (a profiler), in which
    case their launches are not `launches` in it.
    """

    floor_s: float = 0.0
    lead_s: float = 0.0
    launches: bool = True

    def shows(self, time_s: Floats) -> Floats:
        """What the clock shows of kernels that take `time_s`."""
        return np.maximum(self.floor_s, self.lead_s + time_s)


@dataclass(frozen=True)
class MeasuredBatch:
    """Rows of one table, operator, device and dtype, each the same kernels in other extents.

    `works` are the kernels of a row, launched one after another, with one entry for each distinct
    shape; row i has the shape `which[i]`. `clock` says what the measurement holds besides them.
    `words` are columns that the kernels do not depend on (split, framework, kernel names), `dims`
    the shape columns, by distinct shape. `suspect` says why the measurements are suspect; where
    `rough`, `works` are not quite what ran, or not as models run it: nothing is fitted to it.
    """

    file: str
    op: str
    device: str
    dtype: str
    target: Target
    works: tuple[Work, ...]
    which: Ints
    latency_s: Floats
    clock: Clock = Clock()
    suspect: str = ""
    rough: bool = False
    words: Mapping[str, WordColumn] = field(default_factory=dict[str, WordColumn])
    dims: Mapping[str, Floats] = field(default_factory=dict[str, Floats])

    def __len__(self) -> int:
        return len(self.latency_s)

    @property
    def on_floor(self) -> Flags:
        """The rows that tell of the host more than of the GPU: under twice the floor."""
        return self.latency_s < 2 * self.clock.floor_s

    @property
    def device_s(self) -> Floats:
        """The rows' time on the device; of those on the floor, an upper bound."""
        return self.latency_s - self.clock.lead_s

    @property
    def split(self) -> WordColumn:
        return self.words.get("split", WordColumn.same("", len(self)))

    def take(self, rows: Ints | Flags) -> MeasuredBatch:
        """These rows alone; the shapes stay."""
        return replace(
            self,
            which=self.which[rows],
            latency_s=self.latency_s[rows],
            words={n: WordColumn(w.codes[rows], w.names) for n, w in self.words.items()},
        )

    def alone(self) -> MeasuredBatch:
        """The same rows, without the shapes that none of them has."""
        shapes, which = np.unique(self.which, return_inverse=True)
        return replace(
            self,
            works=tuple(w.take(shapes) for w in self.works),
            which=which.astype(np.int64),
            dims={n: values[shapes] for n, values in self.dims.items()},
        )

    def rows_by(self, *names: str) -> list[tuple[tuple[str, ...], Ints]]:
        """The rows of each distinct thing that these columns say, and what that is."""
        if not names:
            return [((), np.arange(len(self)))]
        columns = [self.words.get(n, WordColumn.same("", len(self))) for n in names]
        parts = alike([c.codes for c in columns])
        return [(tuple(c.names[c.codes[rows[0]]] for c in columns), rows) for rows in parts]


def joined(batches: Sequence[MeasuredBatch]) -> list[MeasuredBatch]:
    """The batches with those in one whose kernels differ in numbers alone, so that one run of the
    formulas is of all. Each of their rows has a shape of its own."""
    alike: dict[Hashable, list[MeasuredBatch]] = {}
    for b in batches:
        alike.setdefault((tuple(w.likeness for w in b.works), b.clock), []).append(b)
    found: list[MeasuredBatch] = []
    for some in alike.values():
        if len(some) == 1:
            found += some
            continue
        latency_s = np.concatenate([b.latency_s for b in some])
        kernels = zip(*(b.works for b in some), strict=True)
        works = tuple(_chained(ones, [len(b) for b in some]) for ones in kernels)
        which = np.arange(len(latency_s))
        found.append(
            replace(some[0], works=works, which=which, latency_s=latency_s, words={}, dims={})
        )
    return found


def _chained(works: Sequence[Work], counts: Sequence[int]) -> Work:
    """Works of so many kernels each, one behind the other."""
    rows: list[list[Floats]] = []
    for work, count in zip(works, counts, strict=True):
        row: list[Floats] = []
        work.each(lambda n, r=row, c=count: r.append(np.broadcast_to(np.asarray(n, float), (c,))))
        rows.append(row)
    columns = map(np.concatenate, zip(*rows, strict=True))
    return works[0].each(lambda _: next(columns))


def number_rows(columns: list[Ints]) -> tuple[Ints, Ints]:
    """A number for each distinct row of some columns of codes, and a row that has it.

    → (number of each row, first row of each number)
    """
    number = np.zeros(len(columns[0]), np.int64)
    first = number[:1]
    for column in columns:
        least = column.min(initial=0)
        span = int(column.max(initial=0) - least) + 1
        _, first, number = np.unique(
            number * span + (column - least), return_index=True, return_inverse=True
        )
    return number.reshape(-1).astype(np.int64), first.astype(np.int64)


def alike(columns: list[Ints]) -> list[Ints]:
    """The rows of each distinct combination of codes."""
    if not columns or not len(columns[0]):
        return []
    number, _ = number_rows(columns)
    order = np.argsort(number, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
