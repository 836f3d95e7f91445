"""When to divide GPUs anew over a day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuir.backends.mig_plan import asked_of, name_of, seats_of
from gpuir.plan.mig.search import Seated
from gpuir.plan.mig.timetable import DAY_S, PlannedStretch, Timetable, clock
from gpuir.plan.mig.workloads import ServingSetting
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table
from gpuir.report.units import percent, significant


def timetable_report(made: Timetable, setting: ServingSetting, notes: Sequence[str]) -> Report:
    """A row for each stretch in which the division stays, and what the day comes to."""

    def parts() -> Iterator[Part]:
        yield Heading(f"{asked_of(setting, made.entries[0].outcome)}: a day")
        yield _entries(made, setting)
        said = [*_day(made, setting), *(("assumed", text) for text in notes)]
        yield Notes(said, 14)

    return Report(
        "gpuir.mig.timetable/1",
        parts,
        lambda: _fields(made, setting, notes),
    )


def _entries(made: Timetable, setting: ServingSetting) -> Table:
    def rates(x: PlannedStretch) -> dict[str, float | None]:
        pairs = zip(setting.workloads, x.stretch.rates, strict=True)
        return {w.name: rate for w, rate in pairs}

    def moves(x: PlannedStretch) -> str:
        return ", ".join(dict.fromkeys(x.move.names)) or "-"

    def missed(x: PlannedStretch) -> str:
        return str(x.outcome.missed or "-")

    def away(x: PlannedStretch) -> str:
        return f"{x.move.away_s:.0f} s" if x.move.names else "-"

    return Table(
        made.entries,
        (
            Column("from", "", "start_s", "stretch.start_s", lambda x: clock(x.stretch.start_s)),
            Column("to", "", "end_s", "stretch.end_s", lambda x: clock(x.stretch.end_s)),
            Column("division", text=lambda x: _named(x.outcome.gpus, setting)),
            Column(field="rates_per_s", value=rates),
            Column(field="plan", value=lambda x: name_of(x.outcome)),
            Column(field="seats", value=lambda x: _seats(x.outcome.gpus, setting)),
            Column("throughput", "number", "throughput", "outcome.throughput", drop=1),
            Column("missed", "count", "missed", "outcome.missed", missed),
            Column("moves", "", "moved", lambda x: list(x.move.names), moves),
            Column("away", "s", "away_s", "move.away_s", away, drop=2),
        ),
    )


def _fields(made: Timetable, setting: ServingSetting, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "entries": _entries(made, setting),
        "changes": made.changes,
        "missed_s": made.spent.missed_s,
        "progress_s": made.spent.progress_s,
        "fixed": {
            "seats": _seats(made.fixed, setting),
            "missed_s": made.fixed_spent.missed_s,
            "progress_s": made.fixed_spent.progress_s,
        },
        "notes": notes,
    }


def _seats(gpus: Sequence[Seated], setting: ServingSetting) -> list[dict[str, Any]]:
    return [{"gpu": gpu.index, **seat} for gpu in gpus for seat in seats_of(gpu, setting)]


def _day(made: Timetable, setting: ServingSetting) -> Iterator[tuple[str, str]]:
    yield "changes", str(made.changes)
    yield "missed", _missed(made.spent.missed_s, setting)
    average = f"{significant(made.fixed_spent.progress_s / DAY_S)} instead of "
    average += significant(made.spent.progress_s / DAY_S)
    missed = _missed(made.fixed_spent.missed_s, setting)
    text = f"the best for all day is {_named(made.fixed, setting)}. It misses {missed}; "
    yield "one division", f"{text}progress is {average} on average"


def _missed(seconds: float, setting: ServingSetting) -> str:
    whole = DAY_S * len(setting.members)
    if not seconds:
        return "no load"
    return f"the load for {percent(seconds, whole)} of the models' time"


def _named(gpus: Sequence[Seated], setting: ServingSetting) -> str:
    """`2g.12gb: bert; 1g.6gb: resnet50`, or how all share the whole GPU."""
    parts: list[str] = []
    for gpu in gpus:
        for seat in gpu.seats:
            if seat.members:
                models = "+".join(setting.workloads[i].name for i in seat.members)
                where = "whole" if seat.placement is None else seat.placement.profile.name
                how = "" if len(seat.members) < 2 else f" ({seat.part.how})"
                parts.append(f"{where}: {models}{how}")
    return "; ".join(parts)
