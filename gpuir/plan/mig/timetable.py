"""When to divide a GPU anew as its load changes over a day.

For each stretch of the day the best plans are found; each of them is simulated under the load of
every other stretch. Which one to have when is then the shortest path through the day: a stretch
counts what models get, less `MISSED` times the time of those that miss what is asked; a change
counts the time in which the models that move are not there in the same way.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise

from gpuir.files import read_text
from gpuir.ir.errors import UsageError, nearest
from gpuir.plan.mig.search import WAYS, GpuKind, Objective, Outcome, Search, Seated, Way
from gpuir.plan.mig.workloads import ServingSetting
from gpuir.targets.load import load_target

DAY_S = 86_400.0
# Assumed: destroying and creating instances is a matter of seconds, starting a server with its
# libraries and weights of ten or more. A change of the mode itself resets GPUs of Ampere.
CHANGE_S = 30.0
RESET_S = 30.0
MISSED = 10.0  # seconds of progress that a second counts in which a model misses what is asked
KEPT = 3  # of the best plans of each stretch, that are tried in all others
MOST_STRETCHES = 1440


@dataclass(frozen=True)
class DayStretch:
    """From `start_s` of the day until `end_s`, the requests a second of each workload; None of one
    that the table does not name."""

    start_s: float
    end_s: float
    rates: tuple[float | None, ...]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Spent:
    """Model-seconds of a stretch or a day: in which requests are missed, and of progress."""

    missed_s: float = 0.0
    progress_s: float = 0.0

    @property
    def worth(self) -> float:
        return self.progress_s - MISSED * self.missed_s

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.missed_s + other.missed_s, self.progress_s + other.progress_s)


@dataclass(frozen=True)
class Move:
    """Models that move, by name, how long each is away, and what is lost by it."""

    names: tuple[str, ...] = ()
    away_s: float = 0.0
    spent: Spent = Spent()


@dataclass(frozen=True)
class PlannedStretch:
    """What a timetable says of a stretch: the plan, what comes of it, and who moves before it."""

    stretch: DayStretch
    outcome: Outcome
    move: Move


@dataclass(frozen=True)
class Timetable:
    """The entries of a day and what they come to, and the same of the best single division."""

    entries: tuple[PlannedStretch, ...]
    spent: Spent
    fixed: tuple[Seated, ...]
    fixed_spent: Spent

    @property
    def changes(self) -> int:
        return sum(bool(entry.move.names) for entry in self.entries)


# ---- the table of rates -------------------------------------------------------------------------


def read_day(path: str, names: Sequence[str]) -> tuple[DayStretch, ...]:
    """The stretches of a CSV file: `time` as 07:30 or hours, then a column of requests a second for
    each model. A line holds until the next; the last until midnight."""
    lines = list(csv.reader(StringIO(read_text(path, "the table of rates"))))
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    fix = "the first line is like: time,resnet50,bert"
    if len(lines) < 2 or lines[0][0].strip().lower() != "time":
        found = ",".join(lines[0])[:60] if lines else "nothing"
        raise UsageError(
            "the file is not a table of rates over a day", where=path, found=found, fix=fix
        )
    head = [cell.strip() for cell in lines[0][1:]]
    for name in head:
        if name not in names or head.count(name) > 1:
            twice = name in names
            raise UsageError(
                f"two columns have the name {name}" if twice else f"no model has the name {name!r}",
                where=path,
                expected=", ".join(names),
                fix="leave one" if twice else nearest(name, names),
            )
    if len(lines) > MOST_STRETCHES + 1:
        raise UsageError(
            "the table has too many lines for a day",
            where=path,
            expected=f"at most {MOST_STRETCHES}",
            found=str(len(lines) - 1),
            fix="at most one line a minute",
        )
    rows = [_row(line, head, f"{path}:{i}") for i, line in enumerate(lines[1:], 2)]
    starts = [start for start, _ in rows]
    if starts != sorted(set(starts)) or starts[0] != 0:
        raise UsageError(
            "the times of day must start at 0:00 and increase",
            where=path,
            found=", ".join(line[0].strip() for line in lines[1:4]),
            fix="start with 0:00, and sort the lines",
        )
    ends = [*starts[1:], DAY_S]
    return tuple(
        DayStretch(start, end, tuple(rates.get(name) for name in names))
        for (start, rates), end in zip(rows, ends, strict=True)
    )


def _row(line: Sequence[str], head: Sequence[str], where: str) -> tuple[float, dict[str, float]]:
    if len(line) != len(head) + 1:
        raise UsageError(
            "a line must have as many cells as the first line", where=where,
            expected=str(len(head) + 1), found=str(len(line)), fix="correct the line",
        )  # fmt: skip
    clock = re.fullmatch(r"(\d{1,2})(?::([0-5]\d))?", line[0].strip())
    start = float(clock[1]) * 3600 + float(clock[2] or 0) * 60 if clock else DAY_S
    if start >= DAY_S:
        raise UsageError(
            "the time of day is not valid", where=where, expected="07:30, or an hour from 0 to 23",
            found=line[0][:40], fix="correct the line",
        )  # fmt: skip
    rates: dict[str, float] = {}
    for name, cell in zip(head, line[1:], strict=True):
        try:
            rate = float(cell)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1e7:
            raise UsageError(
                f"the rate of {name} is not valid",
                where=where,
                expected="requests a second, 0 or more",
                found=cell[:40] or "nothing",
                fix="correct the line",
            )
        rates[name] = rate
    return start, rates


# ---- the day ------------------------------------------------------------------------------------


def timetable(
    stretches: Sequence[DayStretch],
    kinds: Sequence[GpuKind],
    setting: ServingSetting,
    objective: Objective,
    *,
    requests: int = 1000,
    change_s: float = CHANGE_S,
    ways: Sequence[Way] = WAYS,
    watch: Callable[[str], None] = lambda text: None,
) -> Timetable:
    """Which division when. Stretches of the same load are searched once."""
    searches: dict[tuple[float | None, ...], Search] = {}
    plans: dict[tuple[Seated, ...], None] = {}
    for stretch in stretches:
        if stretch.rates in searches:
            continue
        watch(f"load from {clock(stretch.start_s)} on")
        now = Search(kinds, _under(setting, stretch), objective, requests=requests, ways=ways)
        searches[stretch.rates] = now
        plans.update((x.gpus, None) for x in now.found().outcomes[:KEPT])
    candidates = list(plans)
    outcomes = {
        rates: [search.outcome(plan) for plan in candidates] for rates, search in searches.items()
    }
    spent = [[_spent(x, s) for x in outcomes[s.rates]] for s in stretches]
    moves = [[_move(a, b, setting, change_s) for b in candidates] for a in candidates]
    chosen = _path(spent, moves)
    came = [Move(), *(moves[a][b] for a, b in pairwise(chosen))]
    entries = [
        PlannedStretch(stretch, outcomes[stretch.rates][at], move)
        for stretch, at, move in zip(stretches, chosen, came, strict=True)
    ]
    sums = [sum((row[j] for row in spent), Spent()) for j in range(len(candidates))]
    fixed = max(range(len(candidates)), key=lambda j: sums[j].worth)
    own = (spent[i][at] for i, at in enumerate(chosen))
    return Timetable(
        entries=tuple(entries),
        spent=sum((*own, *(move.spent for move in came)), Spent()),
        fixed=candidates[fixed],
        fixed_spent=sums[fixed],
    )


def _under(setting: ServingSetting, stretch: DayStretch) -> ServingSetting:
    """The workloads with the rates of a stretch."""
    workloads = [
        w if rate is None else replace(w, load=replace(w.load, rate=rate))
        for w, rate in zip(setting.workloads, stretch.rates, strict=True)
    ]
    return replace(setting, workloads=tuple(workloads))


def _spent(outcome: Outcome, stretch: DayStretch) -> Spent:
    return Spent(outcome.missed * stretch.seconds, outcome.throughput * stretch.seconds)


def _move(
    before: tuple[Seated, ...], after: tuple[Seated, ...], setting: ServingSetting, change_s: float
) -> Move:
    """Which models move between two divisions: one stays where its seat is the same, on a GPU whose
    mode is. Turning MIG on or off resets some GPUs."""
    members: list[int] = []
    away = change_s
    for old, new in zip(before, after, strict=True):
        switched = (old.geometry is None) != (new.geometry is None)
        if switched and load_target(new.gpu).isa == "sm_80":
            away = change_s + RESET_S
        same = [] if switched else [seat for seat in new.seats if seat in old.seats]
        for seat in new.seats:
            if seat in same:
                same.remove(seat)
            else:
                members += seat.members
    if not members:
        return Move()
    asked = sum(setting.workloads[i].load.rate is not None for i in members)
    names = tuple(setting.workloads[i].name for i in members)
    return Move(names, away, Spent(asked * away, -(len(members) - asked) * away))


def _path(spent: Sequence[Sequence[Spent]], moves: Sequence[Sequence[Move]]) -> list[int]:
    """The candidate of each stretch with which the day is worth most."""
    reached = [x.worth for x in spent[0]]
    back: list[list[int]] = []
    for row in spent[1:]:
        came = [
            max(
                range(len(row)),
                key=lambda i, j=j: (reached[i] + moves[i][j].spent.worth, i == j),
            )
            for j in range(len(row))
        ]
        reached = [
            reached[i] + moves[i][j].spent.worth + own.worth
            for j, (i, own) in enumerate(zip(came, row, strict=True))
        ]
        back.append(came)
    chosen = [max(range(len(reached)), key=lambda j: reached[j])]
    for came in reversed(back):
        chosen.append(came[chosen[-1]])
    return chosen[::-1]


def clock(seconds: float) -> str:
    """`07:30`."""
    return f"{int(seconds // 3600):02}:{int(seconds % 3600 // 60):02}"
