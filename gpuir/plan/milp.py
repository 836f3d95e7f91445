"""The choice of sharding as a mixed-integer linear program, solved by HiGHS (highspy, MIT licence).

Tables that are alike are one class. For each class and option an integer says how many take it,
and for each GPU how many parts of them lie there: as many parts as the option has for each, and
on no GPU more than one of a table. Minimised is what `sharding.PlacementPlan` adds up, collectives
taken as a fixed time and a time a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuir.plan import sharding
from gpuir.plan.highs import LinearProgram, Row, require, solve
from gpuir.plan.sharding import Option, PlacementPlan, PlacementSetting, TablePlacement
from gpuir.plan.tables import EmbeddingTable

MOST_COLUMNS = 60_000
# What of an option needs indices, sums sent, sums over ranks, an all-reduce.
NEEDS = ("index_bytes", "sent_bytes", "summed_bytes", "reduced_bytes")


@dataclass(frozen=True)
class Highs:
    """Solves within so many seconds: the best plan found, and a time that none is below."""

    seconds: float = 20.0

    def __call__(
        self,
        tables: Sequence[EmbeddingTable],
        ways: Sequence[tuple[Option, ...]],
        setting: PlacementSetting,
        start: PlacementPlan | None,
    ) -> tuple[PlacementPlan | None, float | None]:
        program = _Program(tables, ways, setting)
        if program.columns > MOST_COLUMNS:
            return None, None
        values, least = program.solve(self.seconds, start)
        plan = None if values is None else program.plan(values)
        return (plan if plan is not None and plan.fits else None), least


class _Program:
    """Columns: of each class and option how many take it, then, where its parts have a choice, how
    many lie on each GPU; then what the slowest takes forward and backward, the most that one sends
    and gets, and whether each collective is needed at all."""

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        ways: Sequence[tuple[Option, ...]],
        setting: PlacementSetting,
    ):
        self.setting, self.gpus = setting, setting.gpus
        classes: dict[object, list[EmbeddingTable]] = {}
        self.ways: list[tuple[Option, ...]] = []
        for table, some in zip(tables, ways, strict=True):
            if some not in classes:
                self.ways.append(some)
            classes.setdefault(some, []).append(table)
        self.tables = list(classes.values())
        self.order = {t.name: i for i, t in enumerate(tables)}
        self.taken: dict[tuple[int, int], int] = {}
        self.laid: dict[tuple[int, int], int] = {}
        at = 0
        for c, some in enumerate(self.ways):
            for o, option in enumerate(some):
                self.taken[c, o] = at
                at += 1
                if not option.everywhere:
                    self.laid[c, o] = at
                    at += self.gpus
        self.forward, self.backward, self.sent, self.got = range(at, at + 4)
        self.needs = range(at + 4, at + 8)
        self.columns = at + 8

    def options(self) -> list[tuple[int, int, Option]]:
        return [(c, o, x) for c, some in enumerate(self.ways) for o, x in enumerate(some)]

    def solve(
        self, seconds: float, start: PlacementPlan | None
    ) -> tuple[np.ndarray[Any, Any] | None, float | None]:
        cost, upper, whole = self._columns()
        known = None if start is None else self._values(start)
        program = LinearProgram(cost, upper, whole, self._rows())
        values, bound = solve(program, seconds, known)
        waits = self.setting.waits_s * (2 if self.setting.train else 1)
        least = bound * _MICRO + waits if bound is not None and bound > 0 else None
        return values, least

    def _columns(self) -> tuple[Any, Any, list[bool]]:
        """What each column costs, in microseconds, its bound, and whether it is whole."""
        cost, upper = np.zeros(self.columns), np.full(self.columns, np.inf)
        whole = [True] * self.columns
        rates = sharding.rates(self.setting)
        indices, exchange, sums, reduced = rates
        for c, o, x in self.options():
            at = self.taken[c, o]
            upper[at] = len(self.tables[c])
            cost[at] = (sums[1] * x.summed_bytes + reduced[1] * x.reduced_bytes) / _MICRO
            if (c, o) in self.laid:
                begin = self.laid[c, o]
                upper[begin : begin + self.gpus] = len(self.tables[c])
        for column, value in (
            (self.forward, 1.0),
            (self.backward, 1.0 if self.setting.train else 0.0),
            (self.sent, exchange[1] * _MIB / _MICRO),
            (self.got, indices[1] * _MIB / _MICRO),
        ):
            cost[column], whole[column] = value, False
        for column, (start, _) in zip(self.needs, rates, strict=True):
            cost[column], upper[column] = start / _MICRO, 1.0
        return cost, upper, whole

    def _rows(self) -> list[Row]:
        inf = float("inf")
        found: list[Row] = []
        for c, some in enumerate(self.ways):
            n = float(len(self.tables[c]))
            found.append((n, n, [(self.taken[c, o], 1.0) for o in range(len(some))]))
        for (c, o), begin in self.laid.items():
            at, parts = self.taken[c, o], self.ways[c][o].parts
            places = range(begin, begin + self.gpus)
            found.append((0.0, 0.0, [*((g, 1.0) for g in places), (at, -float(parts))]))
            if parts > 1:
                found += [(-inf, 0.0, [(g, 1.0), (at, -1.0)]) for g in places]
        room = self.setting.memory_bytes / _MIB
        for g in range(self.gpus):
            load: list[list[tuple[int, float]]] = [[], [], [], [], []]
            for c, o, x in self.options():
                at = self.laid[c, o] + g if (c, o) in self.laid else self.taken[c, o]
                times = (x.forward_s / _MICRO, x.backward_s / _MICRO)
                counts = (y / _MIB for y in (x.memory_bytes, x.sent_bytes, x.index_bytes))
                for entries, value in zip(load, (*times, *counts), strict=True):
                    if value:
                        entries.append((at, value))
            found.append((-inf, 0.0, [*load[0], (self.forward, -1.0)]))
            found.append((-inf, 0.0, [*load[1], (self.backward, -1.0)]))
            found.append((-inf, room, load[2]))
            found.append((-inf, 0.0, [*load[3], (self.sent, -1.0)]))
            found.append((-inf, 0.0, [*load[4], (self.got, -1.0)]))
        for column, name in zip(self.needs, NEEDS, strict=True):
            for c, o, x in self.options():
                if getattr(x, name):
                    n = float(len(self.tables[c]))
                    found.append((-inf, 0.0, [(self.taken[c, o], 1.0), (column, -n)]))
        return found

    def _values(self, plan: PlacementPlan) -> np.ndarray[Any, Any]:
        """A plan as values of the columns."""
        values = np.zeros(self.columns)
        where = {t.name: c for c, some in enumerate(self.tables) for t in some}
        for p in plan.placements:
            c = where[p.table.name]
            o = self.ways[c].index(p.option)
            values[self.taken[c, o]] += 1
            if (c, o) in self.laid:
                for g in p.on:
                    values[self.laid[c, o] + g] += 1
        options = [p.option for p in plan.placements]
        loads = sharding.Loads(self.setting)
        for p in plan.placements:
            loads.add(p, 1)
        values[self.forward] = loads.sums[:, 0].max() / _MICRO
        values[self.backward] = loads.sums[:, 1].max() / _MICRO
        values[self.sent] = loads.sums[:, 3].max() / _MIB
        values[self.got] = loads.sums[:, 4].max() / _MIB
        for column, name in zip(self.needs, NEEDS, strict=True):
            values[column] = any(getattr(x, name) for x in options)
        return values

    def plan(self, values: np.ndarray[Any, Any]) -> PlacementPlan:
        """The plan that the values of columns say: parts are dealt out to a class's tables one
        after another, so that no table has two on a GPU."""
        made: dict[str, TablePlacement] = {}
        for c, some in enumerate(self.ways):
            rest = list(self.tables[c])
            for o, x in enumerate(some):
                mine = [rest.pop() for _ in range(round(values[self.taken[c, o]]))]
                if (c, o) not in self.laid:
                    for table in mine:
                        made[table.name] = TablePlacement(table, x, tuple(range(self.gpus)))
                    continue
                begin = self.laid[c, o]
                left = [round(v) for v in values[begin : begin + self.gpus]]
                for table in mine:
                    most = sorted(range(self.gpus), key=lambda g: -left[g])[: x.parts]
                    for g in most:
                        left[g] -= 1
                    made[table.name] = TablePlacement(table, x, tuple(sorted(most)))
        placed = sorted(made.values(), key=lambda p: self.order[p.table.name])
        return PlacementPlan(self.setting, tuple(placed))


_MICRO, _MIB = 1e-6, 2.0**20  # seconds and bytes in which the program's numbers are near 1


def solver(seconds: float) -> Highs:
    """UsageError where HiGHS is not installed."""
    require("pip install 'gpuir[solve]', or --seconds 0")
    return Highs(seconds)
