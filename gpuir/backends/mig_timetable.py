"""When to divide GPUs anew over a day: as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from gpuir.backends import structured
from gpuir.backends.mig_plan import counted_gpus, name_of
from gpuir.backends.terminal import Layout, Page
from gpuir.plan.mig.search import Outcome, Seated
from gpuir.plan.mig.timetable import DAY_S, Timetable, clock
from gpuir.plan.mig.workloads import Setting
from gpuir.report.units import percent, significant

SCHEMA = "gpuir.mig.timetable/1"


def json_text(made: Timetable, setting: Setting, notes: Sequence[str]) -> str:
    """`{"schema", "entries": [...], "missed_s", "progress_s", "fixed": ...}`."""
    return structured.json_text(
        SCHEMA,
        entries=[
            {
                "start_s": x.stretch.start_s,
                "end_s": x.stretch.end_s,
                "rates_per_s": {
                    w.name: rate for w, rate in zip(setting.workloads, x.stretch.rates, strict=True)
                },
                "plan": name_of(x.outcome),
                "seats": _seats(x.outcome.gpus, setting),
                "throughput": x.outcome.throughput,
                "missed": x.outcome.missed,
                "moved": list(x.move.names),
                "away_s": x.move.away_s,
            }
            for x in made.entries
        ],
        changes=made.changes,
        missed_s=made.spent.missed_s,
        progress_s=made.spent.progress_s,
        fixed={
            "seats": _seats(made.fixed, setting),
            "missed_s": made.fixed_spent.missed_s,
            "progress_s": made.fixed_spent.progress_s,
        },
        notes=list(notes),
    )


def _seats(gpus: Sequence[Seated], setting: Setting) -> list[dict[str, object]]:
    return [
        {
            "gpu": gpu.index,
            "target": seat.part.target,
            "start": None if seat.placement is None else seat.placement.start,
            "mode": None if len(seat.members) < 2 else seat.part.how,
            "models": [setting.workloads[i].name for i in seat.members],
        }
        for gpu in gpus
        for seat in gpu.seats
    ]


def report(made: Timetable, setting: Setting, notes: Sequence[str], layout: Layout) -> str:
    """A row for each stretch in which the division stays, and what the day comes to."""
    page = Page(layout.width, layout.color)
    names = ", ".join(f"{w.count} x {w.name}" if w.count > 1 else w.name for w in setting.workloads)
    page.heading(f"{names} on {counted_gpus(made.entries[0].outcome)}: a day")
    page.line()
    columns = [("from", False), ("to", False), ("division", False), ("throughput", True)]
    columns += [("missed", True), ("moves", False), ("away", True)]
    rows = [
        (
            clock(x.stretch.start_s),
            clock(x.stretch.end_s),
            _division(x.outcome, setting),
            significant(x.outcome.throughput),
            str(x.outcome.missed or "-"),
            ", ".join(dict.fromkeys(x.move.names)) or "-",
            f"{x.move.away_s:.0f} s" if x.move.names else "-",
        )
        for x in made.entries
    ]
    page.table(columns, rows, drop=("throughput", "away"))
    page.line()
    page.wrapped("changes", str(made.changes), 14)
    page.wrapped("missed", _missed(made.spent.missed_s, setting), 14)
    average = f"{significant(made.fixed_spent.progress_s / DAY_S)} instead of "
    average += significant(made.spent.progress_s / DAY_S)
    missed = _missed(made.fixed_spent.missed_s, setting)
    text = f"the best for all day is {_named(made.fixed, setting)}. It misses {missed}; "
    page.wrapped("one division", f"{text}progress is {average} on average", 14)
    for text in notes:
        page.wrapped("assumed", text, 14)
    return page.text()


def _missed(seconds: float, setting: Setting) -> str:
    whole = DAY_S * len(setting.members)
    if not seconds:
        return "no load"
    return f"the load for {percent(seconds, whole)} of the models' time"


def _division(outcome: Outcome, setting: Setting) -> str:
    return _named(outcome.gpus, setting)


def _named(gpus: Sequence[Seated], setting: Setting) -> str:
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
