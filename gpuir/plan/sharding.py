"""Tables of embeddings over many GPUs: which table is cut how, and which GPU gets what.

A step of training looks every table up, exchanges the sums, and on the way back exchanges their
gradients and updates the rows. Its time is

    indices sent + slowest forward + exchange + exchange back + slowest backward

where an exchange waits for the rank that sends or gets most (all-to-all), and for sums over ranks
where tables are cut by rows (reduce-scatter, all-gather) or held by every rank (all-reduce of
gradients). Ranks begin with samples of their own, so indices go to whoever has the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Literal

import numpy as np

from gpuir.ir.errors import ModelError, UsageError
from gpuir.plan.lookups import STATES, busiest, times
from gpuir.plan.tables import EmbeddingTable
from gpuir.targets.target import Target

Way = Literal["table", "column", "row", "data"]
WAYS: tuple[Way, ...] = ("table", "column", "row", "data")
Kind = Literal["all_to_all", "reduce_scatter", "all_gather", "all_reduce"]
# Seconds of a collective of so many bytes among all ranks. Bytes as nccl-tests count them.
Collective = Callable[[Kind, float], float]
LEAST_WIDTH = 32  # bytes of a row of a part: a sector
ROUNDS = 10  # of local search, each of so many tables and swaps
INDEX_BYTES = 8  # PyTorch's indices are i64
SUM_BYTES = 4  # a cell of a sum, and of its gradient, on the way


@dataclass(frozen=True)
class PlacementSetting:
    """What tables are placed for: GPUs and their memory for tables, samples of a step in all, an
    optimizer, the ways that are allowed, and what a collective takes."""

    target: Target
    gpus: int
    memory_bytes: float
    batch: int
    collective: Collective
    optimizer: str = "rowwise-adagrad"
    ways: tuple[Way, ...] = WAYS
    train: bool = True
    waits_s: float = 0.0  # that nothing hides in a GPU's one launch of lookups, or of updates


@dataclass(frozen=True)
class Option:
    """One way of placing a table: `parts` of it, each on a GPU of its own, and what a part takes
    there: seconds, memory, bytes of sums that it sends and of indices that it is sent. `summed` are
    bytes that a reduce-scatter moves (and an all-gather on the way back), `reduced` those that an
    all-reduce does."""

    way: Way
    parts: int
    forward_s: float
    backward_s: float
    waits_s: float
    memory_bytes: float
    sent_bytes: float
    index_bytes: float = 0.0
    summed_bytes: float = 0.0
    reduced_bytes: float = 0.0

    @property
    def everywhere(self) -> bool:
        return self.way in ("row", "data")


@dataclass(frozen=True)
class TablePlacement:
    """A table, the option that was taken, and the GPUs of its parts."""

    table: EmbeddingTable
    option: Option
    on: tuple[int, ...]


@dataclass(frozen=True)
class GpuLoad:
    """What one GPU has: seconds of lookups and of updates, bytes of tables, of sums that it sends
    and of indices that it gets."""

    forward_s: float
    backward_s: float
    memory_bytes: float
    sent_bytes: float
    index_bytes: float


@dataclass(frozen=True)
class PlacementPlan:
    """Tables placed on GPUs, and what a step takes by that: `parts` in seconds."""

    setting: PlacementSetting = field(repr=False)
    placements: tuple[TablePlacement, ...] = field(repr=False)

    @cached_property
    def loads(self) -> tuple[GpuLoad, ...]:
        sums = np.zeros((self.setting.gpus, 5))
        for p in self.placements:
            sums[list(p.on)] += _row(p.option)
        sums[:, 0] += self.setting.waits_s
        sums[:, 1] = sums[:, 1] + self.setting.waits_s if self.setting.train else 0.0
        return tuple(GpuLoad(*map(float, row)) for row in sums)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by part of a step."""
        set_, options = self.setting, [p.option for p in self.placements]
        sent = max(load.sent_bytes for load in self.loads)
        indices = max(load.index_bytes for load in self.loads)
        summed = sum(o.summed_bytes for o in options)
        reduced = sum(o.reduced_bytes for o in options)

        def take(kind: Kind, count: float) -> float:
            return set_.collective(kind, count) if count and set_.gpus > 1 else 0.0

        found = {
            "indices": take("all_to_all", indices),
            "lookups": max(load.forward_s for load in self.loads),
            "all-to-all": take("all_to_all", sent),
            "reduce-scatter": take("reduce_scatter", summed),
        }
        if set_.train:
            found |= {
                "all-to-all back": take("all_to_all", sent),
                "all-gather back": take("all_gather", summed),
                "updates": max(load.backward_s for load in self.loads),
                "all-reduce": take("all_reduce", reduced),
            }
        return found

    @cached_property
    def time_s(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return all(x.memory_bytes <= self.setting.memory_bytes * (1 + 1e-12) for x in self.loads)

    @property
    def limit(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)


# ---- the options of a table ----------------------------------------------------------------------


def options(table: EmbeddingTable, setting: PlacementSetting) -> tuple[Option, ...]:
    """The ways of placing a table whose parts fit a GPU."""
    return tuple(o for o in _options(table, setting) if o.memory_bytes <= setting.memory_bytes)


def _options(table: EmbeddingTable, setting: PlacementSetting) -> Iterator[Option]:
    n, batch = setting.gpus, setting.batch
    dense, of_row = STATES[setting.optimizer] if setting.train else (0, 0)
    bag, sums = table.lookups, batch * table.features
    memory = table.nbytes * (1 + dense) + table.rows * of_row * 4
    out = sums * table.width * SUM_BYTES  # all sums of a step
    named = sums * bag * INDEX_BYTES

    def option(way: Way, parts: int, part: EmbeddingTable, **moved: float) -> Option:
        bags = ceil(sums / n) if way == "data" else sums
        took = times(replace(part, name="", features=1), bags, dense, setting.target)
        return Option(way, parts, **vars(took), **moved)

    if "table" in setting.ways or n == 1:
        moved = {"sent_bytes": out, "index_bytes": named} if n > 1 else {"sent_bytes": 0.0}
        yield option("table", 1, table, memory_bytes=memory, **moved)
    if n == 1:
        return
    if "column" in setting.ways:
        parts = 2
        least = _least_width(table)
        while parts <= n and table.width % parts == 0 and table.width // parts >= least:
            part = replace(table, width=table.width // parts)
            own = table.nbytes * (1 + dense) / parts + table.rows * of_row * 4
            moved = {"sent_bytes": out / parts, "index_bytes": named}
            yield option("column", parts, part, memory_bytes=own, **moved)
            parts *= 2
    if "row" in setting.ways and table.rows >= n:
        # A rank has some of a bag's rows: of the busiest rank's share, sums of all bags.
        most = busiest(table.rows, n, table.spread)
        looked = max(bag * most, min(bag, 1.0) * most)
        part = replace(table, rows=ceil(table.rows / n), lookups=looked)
        moved = {"sent_bytes": 0.0, "index_bytes": named * most, "summed_bytes": out}
        yield option("row", n, part, memory_bytes=memory / n, **moved)
    if "data" in setting.ways:
        reduced = table.nbytes if setting.train else 0.0
        yield option("data", n, table, memory_bytes=memory, sent_bytes=0.0, reduced_bytes=reduced)


def _least_width(table: EmbeddingTable) -> int:
    """The cells of a part's rows that columns may be cut down to."""
    return max(1, ceil(LEAST_WIDTH * 8 / table.dtype.bits))


def check(tables: Sequence[EmbeddingTable], setting: PlacementSetting) -> list[tuple[Option, ...]]:
    """Every table's options. UsageError where a table has none, or all do not fit together."""
    found = [_known(t, setting) for t in tables]
    for table, ways in zip(tables, found, strict=True):
        if ways:
            continue
        raise _unplaced(table, setting)
    least_of_all = sum(min(o.parts * o.memory_bytes for o in ways) for ways in found)
    if least_of_all > setting.gpus * setting.memory_bytes:
        raise UsageError(
            "the tables do not fit into all GPUs together",
            expected=f"{_size(setting.gpus * setting.memory_bytes)} on {setting.gpus} GPUs",
            found=f"{_size(least_of_all)}, with the state of the optimizer",
            fix=f"use at least {ceil(least_of_all / setting.memory_bytes)} GPUs, "
            "a narrower data type, or an optimizer with less state",
        )
    return found


def _known(table: EmbeddingTable, setting: PlacementSetting) -> tuple[Option, ...]:
    try:
        return options(table, setting)
    except ModelError as error:  # of tensors that nobody can have
        error.where = f"table {table.name}, of {setting.batch:,} samples"
        error.fix = "fewer rows, columns, lookups, features or samples"
        raise


def _unplaced(table: EmbeddingTable, setting: PlacementSetting) -> UsageError:
    """Why no allowed way places a table, and which would."""
    n, ways = setting.gpus, ", ".join(setting.ways)
    least = min(_options(table, replace(setting, ways=WAYS)), key=lambda o: o.memory_bytes)
    fits = least.memory_bytes <= setting.memory_bytes
    on = f"each of {least.parts} GPUs" if least.parts > 1 else "a GPU"
    other = f"--cut {_also(setting, least.way)}: {_size(least.memory_bytes)} on {on}"
    if not any(_options(table, setting)):
        cells = 2 * _least_width(table)
        needs = {
            "column": f"for columns: a width of at least {cells} that 2 divides",
            "row": f"for rows: at least as many rows as GPUs ({n})",
        }
        return UsageError(
            f"table {table.name} cannot be split by {ways}",
            expected=", ".join(needs[way] for way in setting.ways if way in needs),
            found=f"{table.rows:,} rows of {table.width}",
            fix=other if fits else "remove --cut, which allows all ways to split",
        )
    dense, of_row = STATES[setting.optimizer] if setting.train else (0, 0)
    state = table.nbytes * dense + table.rows * of_row * 4
    needed = ceil((table.nbytes + state) / setting.memory_bytes)
    by_rows = f"at least {needed:,} GPUs, or a narrower dtype"
    if "row" not in setting.ways:
        by_rows = f"--cut {_also(setting, 'row')} on {by_rows}"
    return UsageError(
        f"table {table.name} is larger than the memory of a GPU",
        expected=f"{_size(setting.memory_bytes)} a GPU, cut by {ways}",
        found=f"{_size(table.nbytes)} in {table.rows:,} rows of {table.width}"
        + (f", and {_size(state)} of the optimizer's state" if state else ""),
        fix=other if fits else by_rows if table.rows >= needed else "a narrower dtype",
    )


def _also(setting: PlacementSetting, way: Way) -> str:
    return ",".join(dict.fromkeys((*setting.ways, way)))


def _size(count: float) -> str:
    """`5.12 TB`: plan stands above backends, which have the units."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count:,.0f} bytes"


# ---- choosing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundPlacement:
    """The plan that was found, the one that a greedy choice makes, and a time that no plan is
    below, where a solver proved one; `how` says who found it."""

    plan: PlacementPlan
    greedy: PlacementPlan | None
    least_s: float | None
    how: str

    @property
    def proven(self) -> bool:
        """Whether no plan is quicker, where collectives take a fixed time and so much a byte."""
        if self.least_s is None:
            return False
        setting, loads = self.plan.setting, Loads(self.plan.setting)
        for p in self.plan.placements:
            loads.add(p, 1)
        time = loads.time() + setting.waits_s * (2 if setting.train else 1)
        return time <= self.least_s * (1 + 1e-4)


Solver = Callable[
    [
        Sequence[EmbeddingTable],
        Sequence[tuple[Option, ...]],
        PlacementSetting,
        PlacementPlan | None,
    ],
    tuple[PlacementPlan | None, float | None],
]


def shard(
    tables: Sequence[EmbeddingTable], setting: PlacementSetting, solve: Solver | None = None
) -> FoundPlacement:
    """Where to put tables. Never slower than greedy. UsageError where they cannot be placed."""
    ways = check(tables, setting)
    setting = replace(setting, waits_s=max(o.waits_s for some in ways for o in some))
    greedy = greedily(tables, ways, setting, cut=False)
    starts = [p for p in (greedy, greedily(tables, ways, setting, cut=True)) if p is not None]
    plans = [improved(plan, ways) for plan in starts]
    best = min((*starts, *plans), key=lambda p: p.time_s, default=None)
    least: float | None = None
    how = "local search"
    if solve is not None:
        made, least = solve(tables, ways, setting, best)
        if made is not None:
            made = improved(made, ways)
            if best is None or made.time_s < best.time_s * (1 - 1e-9):
                best, how = made, "solver"
    if best is None:
        raise UsageError(
            "gpuir found no placement in which every GPU has enough memory",
            expected=f"{_size(setting.memory_bytes)} a GPU",
            found=f"{_size(sum(t.nbytes for t in tables))} of tables on {setting.gpus} GPUs",
            fix="allow more ways to split, or add a GPU",
        )
    return FoundPlacement(best, greedy, least, how)


def greedily(
    tables: Sequence[EmbeddingTable],
    ways: Sequence[tuple[Option, ...]],
    setting: PlacementSetting,
    cut: bool,
) -> PlacementPlan | None:
    """The dearest table first, whole, to the GPU that has least to do and room for it; by rows,
    else by columns, where none has. With `cut` each takes the option that adds least."""
    loads = Loads(setting)
    cost = [min(o.forward_s + o.backward_s for o in some) for some in ways]
    whole = [next((o for o in some if o.way == "table"), None) for some in ways]
    key = [(o.forward_s + o.backward_s) if o else c for o, c in zip(whole, cost, strict=True)]
    chosen: dict[int, TablePlacement] = {}
    for i in sorted(range(len(tables)), key=lambda i: -key[i]):
        order = ways[i]
        if not cut:
            rank = {"table": 0, "row": 1, "column": 2, "data": 3}
            order = tuple(sorted(order, key=lambda o: (rank[o.way], o.parts)))
        best: tuple[float, TablePlacement] | None = None
        for o in order:
            on = loads.least_loaded(o)
            if on is None:
                continue
            time = loads.time_with(o, on)
            if best is None or time < best[0]:
                best = time, TablePlacement(tables[i], o, on)
            if not cut:
                break
        if best is None:
            return None
        chosen[i] = best[1]
        loads.add(best[1], 1)
    return PlacementPlan(setting, tuple(chosen[i] for i in range(len(tables))))


class Loads:
    """What GPUs have so far, changed in place while one searches."""

    def __init__(self, setting: PlacementSetting):
        self.setting = setting
        self.sums = np.zeros((setting.gpus, 5))  # forward, backward, memory, sent, indices
        self.summed = self.reduced = 0.0
        self.rates = rates(setting)

    def add(self, p: TablePlacement, sign: int) -> None:
        o = p.option
        self.sums[list(p.on)] += sign * np.array(_row(o))
        self.summed += sign * o.summed_bytes
        self.reduced += sign * o.reduced_bytes

    def time(self) -> float:
        """As the plan's, with collectives that take a fixed time and so much a byte."""
        sent, indices = float(self.sums[:, 3].max()), float(self.sums[:, 4].max())
        total = float(self.sums[:, 0].max() + self.sums[:, 1].max())
        counts = (indices, sent, self.summed, self.reduced)
        for (start, slope), count in zip(self.rates, counts, strict=True):
            if count > 1e-3:
                total += start + slope * count
        return total

    def time_with(self, o: Option, on: Sequence[int]) -> float:
        p = TablePlacement(_NOBODY, o, tuple(on))
        self.add(p, 1)
        time = self.time()
        self.add(p, -1)
        return time

    def least_loaded(self, o: Option) -> tuple[int, ...] | None:
        """The GPUs with room that have least to do, as many as an option has parts."""
        free = self.sums[:, 2] + o.memory_bytes <= self.setting.memory_bytes * (1 + 1e-12)
        if o.everywhere:
            return tuple(range(self.setting.gpus)) if free.all() else None
        busy = self.sums[:, 0] + self.sums[:, 1] + self.rates[1][1] * self.sums[:, 3]
        order = [int(g) for g in np.argsort(busy, kind="stable") if free[g]]
        return tuple(sorted(order[: o.parts])) if len(order) >= o.parts else None


_NOBODY = EmbeddingTable("", 1, 1)


def _row(o: Option) -> tuple[float, float, float, float, float]:
    return o.forward_s, o.backward_s, o.memory_bytes, o.sent_bytes, o.index_bytes


def rates(setting: PlacementSetting) -> tuple[tuple[float, float], ...]:
    """What indices, an exchange of sums (both ways), sums over ranks and an all-reduce take at any
    size, and a byte besides: a line through what they take of 16 and of 64 MiB."""
    if setting.gpus == 1:
        return ((0.0, 0.0),) * 4
    kinds: tuple[tuple[Kind, ...], ...] = (
        ("all_to_all",),
        ("all_to_all", "all_to_all") if setting.train else ("all_to_all",),
        ("reduce_scatter", "all_gather") if setting.train else ("reduce_scatter",),
        ("all_reduce",),
    )
    found: list[tuple[float, float]] = []
    for some in kinds:
        a, b = (sum(setting.collective(k, 2.0**e) for k in some) for e in (24, 26))
        slope = max(b - a, 0.0) / (2.0**26 - 2.0**24)
        found.append((max(a - slope * 2.0**24, 0.0), slope))
    return tuple(found)


def improved(plan: PlacementPlan, ways: Sequence[tuple[Option, ...]]) -> PlacementPlan:
    """The plan after moves of one table, or swaps of two, each of which makes it quicker."""
    setting, chosen = plan.setting, list(plan.placements)
    loads = Loads(setting)
    for p in chosen:
        loads.add(p, 1)
    now = loads.time()
    for _ in range(ROUNDS):
        before = now
        for i in _worth_moving(chosen, loads):
            old = chosen[i]
            loads.add(old, -1)
            best, time = old, now
            for o in ways[i]:
                for on in _places(o, loads):
                    p = TablePlacement(old.table, o, on)
                    if (found := loads.time_with(o, on)) < time * (1 - 1e-12):
                        best, time = p, found
            loads.add(best, 1)
            chosen[i], now = best, time
        now = _swapped(chosen, loads, now)
        if now >= before * (1 - 1e-9):
            break
    better = PlacementPlan(setting, tuple(chosen))
    return better if better.fits and better.time_s < plan.time_s else plan


def _worth_moving(chosen: Sequence[TablePlacement], loads: Loads) -> list[int]:
    """Tables with a part on a GPU that decides, the dearest first; tables on every GPU too."""
    tops = {int(loads.sums[:, j].argmax()) for j in (0, 1, 3, 4)}
    found = [i for i, p in enumerate(chosen) if tops & set(p.on)]
    return sorted(found, key=lambda i: -sum(_row(chosen[i].option)[:2]))[:64]


def _places(o: Option, loads: Loads) -> Iterator[tuple[int, ...]]:
    found = loads.least_loaded(o)
    if found is None:
        return
    yield found
    if o.parts == 1:
        order = np.argsort(loads.sums[:, 3], kind="stable")[:4]
        room = loads.setting.memory_bytes * (1 + 1e-12)
        for g in order:
            if (int(g),) != found and loads.sums[g, 2] + o.memory_bytes <= room:
                yield (int(g),)


def _swapped(chosen: list[TablePlacement], loads: Loads, now: float) -> float:
    """Swaps of two whole tables between a GPU that decides and any other."""
    room = loads.setting.memory_bytes * (1 + 1e-12)
    for top in {int(loads.sums[:, j].argmax()) for j in (0, 1, 3, 4)}:
        here = [i for i, p in enumerate(chosen) if p.on == (top,)][:12]
        there = [j for j, p in enumerate(chosen) if len(p.on) == 1 and p.on != (top,)][:64]
        for i in here:
            for j in there:
                a, b = chosen[i], chosen[j]
                if a.on == b.on or len(a.on) != 1 or len(b.on) != 1:
                    continue
                x, y = replace(a, on=b.on), replace(b, on=a.on)
                for p, sign in ((a, -1), (b, -1), (x, 1), (y, 1)):
                    loads.add(p, sign)
                time = loads.time()
                if time < now * (1 - 1e-12) and (loads.sums[:, 2] <= room).all():
                    chosen[i], chosen[j], now = x, y, time
                    continue
                for p, sign in ((x, -1), (y, -1), (a, 1), (b, 1)):
                    loads.add(p, sign)
    return now


# ---- why -----------------------------------------------------------------------------------------


def reasons(found: FoundPlacement) -> dict[str, str]:
    """For each table of a plan, why it lies as it does."""
    plan = found.plan
    fair = sum(x.forward_s + x.backward_s for x in plan.loads) / plan.setting.gpus
    return {p.table.name: _reason(p, plan, fair) for p in plan.placements}


def _reason(p: TablePlacement, plan: PlacementPlan, fair: float) -> str:
    setting, o = plan.setting, p.option
    every = {(x.way, x.parts): x for x in options(p.table, setting)}
    whole = every.get(("table", 1))
    share = (o.forward_s + o.backward_s) / max(fair, 1e-12)
    match o.way:
        case "table":
            return f"{share:.0%} of mean load"
        case _ if whole is None:
            return f"{_size(p.table.nbytes)} is more than a GPU has"
        case "column" | "row":
            alone = (whole.forward_s + whole.backward_s) / max(fair, 1e-12)
            return f"whole: {alone:.0%} of mean load"
        case "data":
            mine, apart = o.reduced_bytes / 1e6, whole.sent_bytes / 1e6
            return f"sends {mine:.2g}, not {apart:.2g} MB"


def ways_of(plan: PlacementPlan) -> Mapping[str, int]:
    """How many tables go which way."""
    return Counter(p.option.way for p in plan.placements)
