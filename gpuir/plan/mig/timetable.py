"""When to divide a GPU anew as its load changes over a day.

For each stretch of the day the best plans are found; each of them is simulated under the load of
every other stretch. Which one to have when is then the shortest path through the day: a stretch
counts the time of models that miss what is asked, and what the others get; a change counts the time
in which the models that move are not there.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import StringIO

from gpuir.files import read_text
from gpuir.ir.errors import UsageError, nearest
from gpuir.plan.mig.search import WAYS, Kind, Objective, Outcome, Search, Seated, Way
from gpuir.plan.mig.workloads import Setting
from gpuir.targets.load import load_target

DAY_S = 86_400.0
# Assumed: destroying and creating instances is a matter of seconds, starting a server with its
# libraries and weights of ten or more. A change of the mode itself resets GPUs of Ampere.
CHANGE_S = 30.0
RESET_S = 30.0
KEPT = 3  # of the best plans of each stretch, that are tried in all others
MOST_STRETCHES = 1440


@dataclass(frozen=True)
class Stretch:
    """From `start_s` of the day until `end_s`, the requests a second of each workload; None of one
    that the table does not name."""

    start_s: float
    end_s: float
    rates: tuple[float | None, ...]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Entry:
    """What a timetable says of a stretch: the plan, what comes of it, which models move at its
    begin, by name, and for how long they are not there."""

    stretch: Stretch
    outcome: Outcome
    moved: tuple[str, ...]
    away_s: float


@dataclass(frozen=True)
class Timetable:
    """The entries of a day, and the best that a single division does all day: model-seconds of
    missed requests and of progress, of both."""

    entries: tuple[Entry, ...]
    missed_s: float
    progress_s: float
    fixed: tuple[Seated, ...]
    fixed_missed_s: float
    fixed_progress_s: float

    @property
    def changes(self) -> int:
        return sum(bool(entry.moved) for entry in self.entries)


# ---- the table of rates -------------------------------------------------------------------------


def read_day(path: str, names: Sequence[str]) -> tuple[Stretch, ...]:
    """The stretches of a CSV file: `time` as 07:30 or hours, then a column of requests a second for
    each model. A line holds until the next; the last until midnight."""
    lines = list(csv.reader(StringIO(read_text(path, "the table of rates"))))
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    fix = "the first line is like: time,resnet50,bert"
    if len(lines) < 2 or lines[0][0].strip().lower() != "time":
        found = ",".join(lines[0])[:60] if lines else "nothing"
        raise UsageError("no table of rates over a day", where=path, found=found, fix=fix)
    head = [cell.strip() for cell in lines[0][1:]]
    for name in head:
        if name not in names or head.count(name) > 1:
            twice = name in names
            raise UsageError(
                f"two columns are called {name}" if twice else f"no model is called {name!r}",
                where=path,
                expected=", ".join(names),
                fix="leave one" if twice else nearest(name, names),
            )
    if len(lines) > MOST_STRETCHES + 1:
        raise UsageError(
            "too many lines for a day", where=path, expected=f"at most {MOST_STRETCHES}",
            found=str(len(lines) - 1), fix="one a minute or fewer",
        )  # fmt: skip
    rows = [_row(line, head, f"{path}:{i}") for i, line in enumerate(lines[1:], 2)]
    starts = [start for start, _ in rows]
    if starts != sorted(set(starts)) or starts[0] != 0:
        raise UsageError(
            "the times of a day rise from 0:00",
            where=path,
            found=", ".join(line[0].strip() for line in lines[1:4]),
            fix="begin with 0:00, and sort the lines",
        )
    ends = [*starts[1:], DAY_S]
    return tuple(
        Stretch(start, end, tuple(rates.get(name) for name in names))
        for (start, rates), end in zip(rows, ends, strict=True)
    )


def _row(line: Sequence[str], head: Sequence[str], where: str) -> tuple[float, dict[str, float]]:
    if len(line) != len(head) + 1:
        raise UsageError(
            "a line has as many cells as the first", where=where,
            expected=str(len(head) + 1), found=str(len(line)), fix="correct the line",
        )  # fmt: skip
    clock = re.fullmatch(r"(\d{1,2})(?::([0-5]\d))?", line[0].strip())
    start = float(clock[1]) * 3600 + float(clock[2] or 0) * 60 if clock else DAY_S
    if start >= DAY_S:
        raise UsageError(
            "no time of a day", where=where, expected="07:30 or an hour from 0 to 23",
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
                f"no rate of {name}", where=where, expected="requests a second, 0 or more",
                found=cell[:40] or "nothing", fix="correct the line",
            )  # fmt: skip
        rates[name] = rate
    return start, rates


# ---- the day ------------------------------------------------------------------------------------


def timetable(
    stretches: Sequence[Stretch],
    kinds: Sequence[Kind],
    setting: Setting,
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
        now = Search(kinds, _under(setting, stretch), objective, requests, ways=ways)
        searches[stretch.rates] = now
        plans.update((x.gpus, None) for x in now.found().outcomes[:KEPT])
    candidates = list(plans)
    outcomes = {
        rates: [search.outcome(plan) for plan in candidates] for rates, search in searches.items()
    }
    costs = [[_cost(x, s) for x in outcomes[s.rates]] for s in stretches]
    moves = [[_moved(a, b, setting, change_s) for b in candidates] for a in candidates]
    chosen = _path(costs, moves)
    entries: list[Entry] = []
    for i, (stretch, at) in enumerate(zip(stretches, chosen, strict=True)):
        moved, away = moves[chosen[i - 1]][at] if i else ((), 0.0)
        entries.append(Entry(stretch, outcomes[stretch.rates][at], moved, away))
    sums = [_total([row[j] for row in costs]) for j in range(len(candidates))]
    fixed = min(range(len(candidates)), key=lambda j: sums[j])
    spent = _total([costs[i][at] for i, at in enumerate(chosen)])
    away = sum(len(x.moved) * x.away_s for x in entries)
    return Timetable(
        entries=tuple(entries),
        missed_s=spent[0] + away,
        progress_s=-spent[1],
        fixed=candidates[fixed],
        fixed_missed_s=sums[fixed][0],
        fixed_progress_s=-sums[fixed][1],
    )


def _under(setting: Setting, stretch: Stretch) -> Setting:
    """The workloads with the rates of a stretch."""
    workloads = [
        w if rate is None else replace(w, load=replace(w.load, rate=rate))
        for w, rate in zip(setting.workloads, stretch.rates, strict=True)
    ]
    return replace(setting, workloads=tuple(workloads))


Cost = tuple[float, float]  # model-seconds of missed requests, and less progress


def _cost(outcome: Outcome, stretch: Stretch) -> Cost:
    return outcome.missed * stretch.seconds, -outcome.throughput * stretch.seconds


def _total(costs: Sequence[Cost]) -> Cost:
    return sum(c[0] for c in costs), sum(c[1] for c in costs)


def _moved(
    before: tuple[Seated, ...], after: tuple[Seated, ...], setting: Setting, change_s: float
) -> tuple[tuple[str, ...], float]:
    """Which models move between two divisions, and how long they are away: a model stays where its
    seat is the same, on a GPU whose mode is. Turning MIG on or off resets some GPUs."""
    names: list[str] = []
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
                names += [setting.workloads[i].name for i in seat.members]
    return tuple(names), away if names else 0.0


def _path(
    costs: Sequence[Sequence[Cost]], moves: Sequence[Sequence[tuple[tuple[str, ...], float]]]
) -> list[int]:
    """The candidate of each stretch with which the day's costs are least."""
    reached = list(costs[0])
    back: list[list[int]] = []
    for row in costs[1:]:
        step: list[Cost] = []
        came: list[int] = []
        for j, own in enumerate(row):
            ways = [(c[0] + len(m[j][0]) * m[j][1], c[1]) for c, m in zip(reached, moves)]
            best = min(range(len(ways)), key=lambda i: (ways[i], i != j))
            came.append(best)
            step.append(_total([ways[best], own]))
        reached = step
        back.append(came)
    at = min(range(len(reached)), key=lambda j: reached[j])
    chosen = [at]
    for came in reversed(back):
        chosen.append(came[chosen[-1]])
    return chosen[::-1]


def clock(seconds: float) -> str:
    """`07:30`."""
    return f"{int(seconds // 3600):02}:{int(seconds % 3600 // 60):02}"
