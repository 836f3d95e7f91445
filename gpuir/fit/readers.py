"""Readers of measurement tables: which columns tell one, and which kernels a row is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpuir.cost.work import Work
from gpuir.fit.columns import Columns, Floats
from gpuir.targets.target import Target

# How kernels were timed: `events` around an eager call, the `host`'s clock around it and a
# synchronisation, launched from a CUDA `graph`, or each by a `profiler`.
Timing = Literal["events", "host", "graph", "profiler"]


class Unmodelled(Exception):
    """Why the kernels of some rows are none that we can say anything of."""


@dataclass(frozen=True)
class Shapes:
    """Rows that differ in shape alone: what they have in common in words, and their extents, each
    distinct shape once."""

    words: Mapping[str, str]
    extents: Mapping[str, Floats]
    target: Target

    def __getitem__(self, name: str) -> Floats:
        return self.extents[name]


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of table.

    A table is read by it when it has the columns `key`, and `device` and `latency`. `words` and
    `shape` are the columns that decide which kernels run: `works` gives them, or raises
    `Unmodelled`; extents are at least 1, but for those `or_zero`. Other columns worth keeping for a
    breakdown are `beside`. `prepare` adds columns computed from others. `devices` are names that
    mean something else than the target's own alias. `latency` is in units of `unit_s`. A column
    `suspect` among `words` says why the measurement is suspect, a column `rough` whether (`yes`)
    this row is; one called `profiled`, whether (`yes`) kernels were timed by themselves in a table
    of rows from graphs.
    """

    name: str
    key: tuple[str, ...]
    works: Callable[[Shapes], tuple[Work, ...]]
    op: Callable[[Mapping[str, str]], str]
    dtype: Callable[[Mapping[str, str]], str]
    words: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    or_zero: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    device: str = "device"
    latency: str = "latency_us"
    unit_s: float = 1e-6
    clock: Timing = "graph"
    devices: Mapping[str, str] = field(default_factory=dict[str, str])
    rough: bool = False  # scored, but nothing should be fitted to it
    prepare: Callable[[Columns], Columns] | None = None
    needs: tuple[str, ...] = ()  # columns that `prepare` reads

    @property
    def known_by(self) -> tuple[str, ...]:
        """The columns that tell its tables."""
        return tuple(dict.fromkeys((self.device, *self.key, self.latency)))

    @property
    def reads(self) -> tuple[str, ...]:
        """Every column that it looks at."""
        own = (*self.key, *self.words, *self.shape, *self.beside, *self.needs)
        return (*own, self.device, self.latency, "flag")


@dataclass(frozen=True)
class Other:
    """A kind of table that is known and has no kernels in it: the columns that tell it, and what it
    holds."""

    known_by: tuple[str, ...]
    holds: str
