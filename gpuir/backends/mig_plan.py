"""Plans that divide GPUs among models: a table and a picture, JSON, and what divides the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpuir.backends import structured
from gpuir.backends.mig import Divided, counted, picture
from gpuir.backends.mig import svg as drawing
from gpuir.backends.mig_parted import config_name, mig_parted, nvidia_smi
from gpuir.backends.terminal import Layout, Page
from gpuir.ir.errors import UsageError, nearest
from gpuir.plan.mig.reasons import PART, TURN, Cause, Reason, causes, reasons
from gpuir.plan.mig.search import Found, Objective, Outcome, Seat, Seated
from gpuir.plan.mig.workloads import Setting
from gpuir.report.units import percent, quantity, significant
from gpuir.simulate.sharing import Load, Served
from gpuir.targets.load import load_target
from gpuir.targets.mig import mig_of

SCHEMA = "gpuir.mig.plan/1"
FORMS = ("table", "json", "mig-parted", "nvidia-smi", "svg")
PERCENTILES = (50, 90, 99)
NAMED = 3  # reasons that a plan's line names


@dataclass(frozen=True)
class Planned:
    """A search, what it was for, and what to say with it."""

    found: Found
    setting: Setting
    objective: Objective
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Outcome:
        return self.found.outcomes[0]

    def why(self, outcome: Outcome) -> tuple[Reason, ...]:
        given = self.setting, self.found.references, self.objective
        return reasons(outcome, self.best, *given)


def forms(name: str) -> None:
    """UsageError for a form that there is not."""
    if name not in FORMS:
        raise UsageError(f"no format of a plan has the name {name!r}", fix=nearest(name, FORMS))


def text_of(planned: Planned, form: str, best: int, layout: Layout) -> str:
    """The plans, or the best one as a file that other tools read."""
    if form == "json":
        return json_text(planned)
    if form == "mig-parted":
        return mig_parted({config(planned.best): divided(planned.best)}, seated(planned))
    if form == "nvidia-smi":
        return nvidia_smi(divided(planned.best))
    if form == "svg":
        return svg(planned)
    return report(planned, best, layout)


# ---- for other tools ----------------------------------------------------------------------------


def divided(outcome: Outcome) -> list[Divided]:
    """The GPUs of a plan, as they are to be divided."""
    return [Divided(load_target(gpu.gpu), gpu.layout or None, gpu.index) for gpu in outcome.gpus]


def seated(planned: Planned) -> list[str]:
    """Which models run where, a line a GPU."""
    lines: list[str] = []
    for gpu in planned.best.gpus:
        seats = [
            f"{seat.placement or 'whole'}: {_names(planned, seat)}"
            for seat in gpu.seats
            if seat.members
        ]
        lines.append(f"GPU {gpu.index}, {gpu.gpu}: {'; '.join(seats) or 'unused'}")
    return lines


def config(outcome: Outcome) -> str:
    """What mig-parted's file calls the plan: what a single GPU is divided into, else gpuir."""
    geometry = outcome.gpus[0].geometry
    if len(outcome.gpus) > 1:
        return "gpuir"
    return "all-disabled" if geometry is None else config_name(geometry.profiles)


def svg(planned: Planned) -> str:
    """A picture of the one GPU that the best plan divides."""
    (gpu, *others) = [x for x in planned.best.gpus if x.geometry is not None] or [None]
    if gpu is None or others:
        found = "no GPU is divided" if gpu is None else f"{1 + len(others)} GPUs are divided"
        raise UsageError(
            "a picture shows one GPU that is divided", found=found, fix="--format table"
        )
    title = f"{gpu.gpu}: {gpu.geometry}"
    return drawing(mig_of(load_target(gpu.gpu)), gpu.layout, labels(planned, gpu), title)


def json_text(planned: Planned) -> str:
    """`{"schema", "objective", "models": [...], "plans": [...], "left": [...]}`, the best first."""
    found, setting = planned.found, planned.setting
    return structured.json_text(
        SCHEMA,
        objective=planned.objective,
        simulated=found.tried,
        models=[
            {
                "name": w.name,
                "count": w.count,
                "rate_per_s": w.load.rate,
                "deadline_s": w.load.deadline_s,
                "alone": structured.record(
                    a, "time_s device_s host_s filled bandwidth watts reserved_bytes"
                ),
            }
            for w, a in zip(setting.workloads, found.references, strict=True)
        ],
        plans=[_plan(planned, outcome) for outcome in found.outcomes],
        left=[structured.record(x, "workload target missing_bytes") for x in found.left],
        notes=list(planned.notes),
    )


def _plan(planned: Planned, outcome: Outcome) -> dict[str, Any]:
    names = "throughput fairness latency missed usd_per_hour"
    return structured.record(
        outcome,
        names,
        gpus=[
            {
                "index": gpu.index,
                "gpu": gpu.gpu,
                "geometry": None if gpu.geometry is None else str(gpu.geometry),
                "seats": [
                    {
                        "target": seat.part.target,
                        "start": None if seat.placement is None else seat.placement.start,
                        "mode": _mode(seat),
                        "models": [planned.setting.workloads[i].name for i in seat.members],
                    }
                    for seat in gpu.seats
                ],
            }
            for gpu in outcome.gpus
        ],
        served=[
            {
                "model": one.name,
                "gpu": gpu.index,
                "target": seat.part.target,
                "rate_per_s": one.rate,
                "alone_s": one.alone_s,
                "mean_s": one.mean_s,
                **{f"p{p}_s": one.percentile_s(p) for p in PERCENTILES},
                "in_time": one.in_time,
                "keeps_up": one.keeps_up,
                "progress": progress,
                "causes": [
                    structured.record(c, "name seconds")
                    for c in causes(one, planned.found.references[member])
                ],
            }
            for (gpu, seat, member, one), progress in zip(
                _each(outcome), outcome.progress, strict=True
            )
        ],
        reasons=[
            structured.record(r, "workload what here best", cause=r.cause and r.cause.name)
            for r in planned.why(outcome)
        ],
    )


def _mode(seat: Seat) -> str | None:
    return None if len(seat.members) < 2 else seat.part.how


def _each(outcome: Outcome) -> Iterator[tuple[Seated, Seat, int, Served]]:
    for gpu, seat, served in outcome.seats():
        for member, one in zip(seat.members, served, strict=True):
            yield gpu, seat, member, one


# ---- for people ---------------------------------------------------------------------------------


def report(planned: Planned, best: int, layout: Layout) -> str:
    """The plans and why they lost, the GPU divided as the best has it, and how each model fares."""
    page, outcomes = Page(layout.width, layout.color), planned.found.outcomes
    models = ", ".join(
        f"{w.count} x {w.name}" if w.count > 1 else w.name for w in planned.setting.workloads
    )
    gpus = counted_gpus(planned.best)
    page.heading(f"{models} on {gpus}: {planned.objective}")
    page.line()
    shown = _shown(outcomes, best)
    columns = [("", True), ("plan", False), ("throughput", True), ("least", True)]
    columns += [("latency", True), ("missed", True)]
    priced = any(x.usd_per_hour is not None for x in shown)
    columns += [("$/h", True)] if priced else []
    rows = [
        (
            str(outcomes.index(x) + 1),
            name_of(x),
            significant(x.throughput),
            significant(x.fairness),
            significant(x.latency),
            str(x.missed or "-"),
            *([significant(x.usd_per_hour)] if x.usd_per_hour is not None else ["-"] * priced),
        )
        for x in shown
    ]
    page.table(columns, rows, drop=(*(["$/h"] * priced), "least", "latency"))
    page.line()
    for x in shown[1:]:
        why = "; ".join(map(reason_text, planned.why(x)[:NAMED])) or "within 2 % of the best"
        page.wrapped(f"{outcomes.index(x) + 1:2}", why, 4)
    if len(shown) > 1:
        page.line()
    page.wrapped("throughput", "of all models together; 1 is one model alone on a whole GPU", 12)
    page.wrapped("least", "the throughput of the model that gets least", 12)
    page.wrapped("latency", "how many times longer requests take than alone on a whole GPU", 12)
    page.wrapped("missed", "models that miss their deadline (99 % of requests) or fall behind", 12)
    page.line()
    _best(planned, page, layout)
    _notes(planned, page)
    return page.text()


def _shown(outcomes: Sequence[Outcome], best: int) -> list[Outcome]:
    """The best, and whatever rank it has, the best without MIG."""
    shown = list(outcomes[:best])
    off = next((x for x in outcomes if all(g.geometry is None for g in x.gpus)), None)
    return shown if off is None or off in shown else [*shown, off]


def counted_gpus(outcome: Outcome) -> str:
    names = [gpu.gpu for gpu in outcome.gpus]
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


def name_of(outcome: Outcome) -> str:
    """`3g.20gb+2x2g.10gb`, or without MIG how the models share the whole GPU."""
    names: dict[str, int] = {}
    for gpu in outcome.gpus:
        name = "unused"
        if gpu.is_used:
            if gpu.geometry is None:
                name = "whole GPU" if len(gpu.seats[0].members) == 1 else gpu.seats[0].part.how
            else:
                name = counted(gpu.geometry.profiles)
        if len({x.gpu for x in outcome.gpus}) > 1:
            name = f"{gpu.gpu}: {name}"
        names[name] = names.get(name, 0) + 1
    return "; ".join(f"{n} x ({name})" if n > 1 else name for name, n in names.items())


def reason_text(reason: Reason) -> str:
    """`bert: 120 of 151 runs/s, smaller part`."""
    if reason.what == "price":
        return f"${reason.here:.4g} an hour, the best ${reason.best:.4g}"
    if reason.what == "rate":
        what = f"{significant(reason.here)} of {significant(reason.best)} runs/s"
    elif reason.what == "latency":
        what = f"takes {quantity(reason.here, 's')}, there {quantity(reason.best, 's')}"
    elif reason.what == "served":
        what = f"serves {significant(reason.here)} of {significant(reason.best)} requests/s"
    else:
        what = (
            f"99 % within {quantity(reason.here, 's')}, the limit is {quantity(reason.best, 's')}"
        )
    return f"{reason.workload}: {what}" + (
        "" if reason.cause is None else f" ({_cause(reason.cause)})"
    )


def _cause(cause: Cause) -> str:
    if cause.name == PART:
        return "a smaller part"
    return "waits for its turn" if cause.name == TURN else f"shares {cause.name}"


def _best(planned: Planned, page: Page, layout: Layout) -> None:
    best = planned.best
    many = len(best.gpus) > 1
    for gpu in best.gpus:
        if not gpu.is_used:
            continue
        if gpu.geometry is not None:
            page.heading(f"GPU {gpu.index}, {gpu.gpu}" if many else gpu.gpu)
            mig = mig_of(load_target(gpu.gpu))
            for line in picture(mig, gpu.layout, labels(planned, gpu), layout.width):
                page.line(line)
        elif many:
            page.heading(f"GPU {gpu.index}, {gpu.gpu}: not divided")
    if many or best.gpus[0].geometry is not None:
        page.line()
    columns = [("model", False), ("in", False), ("runs/s", True), ("alone", True)]
    columns += [("p50", True), ("p90", True), ("p99", True), ("load", True), ("slower by", False)]
    rows = [_row(planned, some) for some in _alike(best)]
    page.table(columns, rows, drop=("p50", "p90", "alone"))


_Sat = tuple[Seated, Seat, int, Served]


def _alike(outcome: Outcome) -> list[list[_Sat]]:
    """The models of a plan, those together that have the same kind of seat with the same others."""
    found: dict[object, list[_Sat]] = {}
    for sat in _each(outcome):
        _, seat, member, _ = sat
        found.setdefault((member, seat.part, seat.members), []).append(sat)
    return list(found.values())


def _row(planned: Planned, some: Sequence[_Sat]) -> tuple[str, ...]:
    """How models fare that sit alike: on average, and by their slowest."""
    _, _, member, one = some[0]
    served = [x for _, _, _, x in some]
    slowest = max(served, key=lambda x: x.percentile_s(99))
    late = "" if all(x.in_time for x in served) else " !"
    return (
        one.name if len(some) == 1 else f"{len(some)} x {one.name}",
        _places([(gpu, seat) for gpu, seat, _, _ in some], len(planned.best.gpus) > 1),
        significant(sum(x.rate for x in served) / len(served)),
        quantity(one.alone_s, "s"),
        *(quantity(max(x.percentile_s(p) for x in served), "s") for p in PERCENTILES),
        asked(one.load) + late,
        longer(slowest, planned, member),
    )


def labels(planned: Planned, gpu: Seated) -> list[str]:
    """What runs in each slice."""
    return [_names(planned, seat) for seat in gpu.seats if seat.placement]


def _names(planned: Planned, seat: Seat) -> str:
    return ", ".join(planned.setting.workloads[i].name for i in seat.members)


def _places(some: Sequence[tuple[Seated, Seat]], many: bool) -> str:
    """`1g.6gb@0,1` or `whole of GPU 2,3`, and how it is shared."""
    _, seat = some[0]
    where, share = "whole", f", {seat.part.how}" if len(seat.members) > 1 else ""
    numbers = list(dict.fromkeys(gpu.index for gpu, _ in some))
    if seat.placement is not None:
        starts = sorted({x.placement.start for _, x in some if x.placement})
        where = f"{seat.placement.profile.name}@{_listed(starts)}"
    return where + (f" of GPU {_listed(numbers)}" if many else "") + share


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def asked(load: Load) -> str:
    """`200/s in 50 ms`, or nothing of a closed loop without a deadline."""
    rate = "" if load.rate is None else f"{significant(load.rate)}/s"
    within = "" if load.deadline_s is None else f"in {quantity(load.deadline_s, 's')}"
    return " ".join(filter(None, (rate, within))) or "loop"


def longer(one: Served, planned: Planned, member: int) -> str:
    """What makes it slower than alone on a whole GPU: `part 120 %, turn 30 %`."""
    alone = planned.found.references[member]
    found = causes(one, alone)[:2]
    return ", ".join(f"{c.name} {percent(c.seconds, alone.time_s)}" for c in found) or "-"


def _notes(planned: Planned, page: Page) -> None:
    page.line()
    page.wrapped("runs/s", "of each, on average; latencies are those of the slowest", 12)
    page.wrapped("longer for", "more time than alone on a whole GPU: part, a smaller one; turn, "
                 "the wait for it; else what is shared", 12)  # fmt: skip
    smallest: dict[str, tuple[str, int]] = {}
    for x in planned.found.left:
        if x.workload not in smallest or x.missing_bytes < smallest[x.workload][1]:
            smallest[x.workload] = x.target, x.missing_bytes
    for name, (target, missing) in smallest.items():
        text = f"{name} does not fit {target}: {quantity(missing, 'bytes')} are missing"
        page.wrapped("too small", text, 12)
    for note in planned.notes:
        page.wrapped("assumed", note, 12)
