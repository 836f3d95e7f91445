"""Plans that divide GPUs among models, and what divides the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpuir.backends.mig import Divided, counted, picture
from gpuir.backends.mig import svg as drawing
from gpuir.backends.mig_parted import config_name, mig_parted, nvidia_smi
from gpuir.backends.structured import record
from gpuir.ir.errors import UsageError
from gpuir.plan.mig.reasons import PART, TURN, Cause, Reason, causes, reasons
from gpuir.plan.mig.search import FoundPlans, Objective, Outcome, Seat, Seated
from gpuir.plan.mig.workloads import ServingSetting
from gpuir.report.answer import Answer
from gpuir.report.table import Column, Drawing, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import percent, quantity, significant
from gpuir.simulate.sharing import Load, Served
from gpuir.targets.load import load_target
from gpuir.targets.mig import mig_of

FILES = ("mig-parted", "nvidia-smi", "svg")  # of the best plan
PERCENTILES = (50, 90, 99)
NAMED = 3  # reasons that a plan's line names


@dataclass(frozen=True)
class Planned:
    """A search, what it was for, and what to say with it."""

    found: FoundPlans
    setting: ServingSetting
    objective: Objective
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Outcome:
        return self.found.outcomes[0]

    def why(self, outcome: Outcome) -> tuple[Reason, ...]:
        given = self.setting, self.found.references, self.objective
        return reasons(outcome, self.best, *given)


def file_of(planned: Planned, form: str) -> str:
    """The best plan as one of `FILES`, for other tools."""
    if form == "mig-parted":
        return mig_parted({config(planned.best): divided(planned.best)}, seated(planned))
    return nvidia_smi(divided(planned.best)) if form == "nvidia-smi" else svg(planned)


def plans_report(planned: Planned, best: int, width: int) -> Report:
    """The plans and why they lost, the GPU divided as the best has it, and how each model fares.
    Programs have a row for each model of each plan."""
    return Report(
        "gpuir.mig.plan/1",
        lambda: _parts(planned, best, width),
        lambda: _fields(planned),
    )


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


# ---- for programs -------------------------------------------------------------------------------


def _fields(planned: Planned) -> dict[str, Any]:
    found, setting = planned.found, planned.setting
    return {
        "objective": planned.objective,
        "simulated": found.tried,
        "models": [
            {
                "name": w.name,
                "count": w.count,
                "rate_per_s": w.load.rate,
                "deadline_s": w.load.deadline_s,
                "alone": _alone(a),
            }
            for w, a in zip(setting.workloads, found.references, strict=True)
        ],
        "plans": [_plan(planned, outcome) for outcome in found.outcomes],
        "left": [record(x, "workload target missing_bytes") for x in found.left],
        "notes": planned.notes,
    }


def _alone(a: Answer) -> dict[str, Any]:
    """A run alone on a whole GPU."""
    own = {"time_s": a.latency_s, "device_s": a.alone.busy_s}
    needs = record(a.alone, "host_s filled bandwidth watts")
    return {**own, **needs, "reserved_bytes": a.reserved_bytes}


def _plan(planned: Planned, outcome: Outcome) -> dict[str, Any]:
    return record(
        outcome,
        "throughput fairness latency missed usd_per_hour",
        gpus=[
            {
                "index": gpu.index,
                "gpu": gpu.gpu,
                "geometry": None if gpu.geometry is None else str(gpu.geometry),
                "seats": seats_of(gpu, planned.setting),
            }
            for gpu in outcome.gpus
        ],
        served=_served(planned, outcome),
        reasons=[
            record(r, "workload what here best", cause=r.cause and r.cause.name)
            for r in planned.why(outcome)
        ],
    )


def seats_of(gpu: Seated, setting: ServingSetting) -> list[dict[str, Any]]:
    """What runs in each part of a GPU."""
    return [
        {
            "target": seat.part.target,
            "start": None if seat.placement is None else seat.placement.start,
            "mode": None if len(seat.members) < 2 else seat.part.how,
            "models": [setting.workloads[i].name for i in seat.members],
        }
        for seat in gpu.seats
    ]


class Sat(NamedTuple):
    """A model in its seat, and how it fares there."""

    gpu: Seated
    seat: Seat
    member: int
    one: Served
    progress: float


def _each(outcome: Outcome) -> list[Sat]:
    sat = [
        (gpu, seat, member, one)
        for gpu, seat, served in outcome.seats()
        for member, one in zip(seat.members, served, strict=True)
    ]
    return [Sat(*x, progress) for x, progress in zip(sat, outcome.progress, strict=True)]


def _served(planned: Planned, outcome: Outcome) -> Table:
    """How each model fares in a plan."""

    def why(x: Sat) -> list[dict[str, Any]]:
        found = causes(x.one, planned.found.references[x.member])
        return [record(c, "name seconds") for c in found]

    return Table(
        _each(outcome),
        (
            Column(field="model", value="one.name"),
            Column(field="gpu", value="gpu.index"),
            Column(field="target", value="seat.part.target"),
            Column(field="rate_per_s", value="one.rate"),
            Column(field="alone_s", value="one.alone_s"),
            Column(field="mean_s", value="one.mean_s"),
            *(
                Column(field=f"p{p}_s", value=lambda x, p=p: x.one.percentile_s(p))
                for p in PERCENTILES
            ),
            *fields("in_time keeps_up", "one"),
            *fields("progress"),
            Column(field="causes", value=why),
        ),
        {
            "plan": planned.found.outcomes.index(outcome) + 1,
            "division": name_of(outcome),
            **record(outcome, "throughput fairness latency missed usd_per_hour"),
        },
    )


# ---- for people ---------------------------------------------------------------------------------


def _parts(planned: Planned, best: int, width: int) -> Iterator[Part]:
    outcomes = planned.found.outcomes
    shown = _shown(outcomes, best)
    number = {id(x): outcomes.index(x) + 1 for x in shown}
    yield Heading(f"{asked_of(planned.setting, planned.best)}: {planned.objective}")
    priced = any(x.usd_per_hour is not None for x in shown)
    yield Table(
        shown,
        (
            Column("", "count", value=lambda x: number[id(x)]),
            Column("plan", value=name_of),
            Column("throughput", "number", value="throughput"),
            Column("least", "number", value="fairness", drop=2),
            Column("latency", "number", value="latency", drop=3),
            Column("missed", "count", text=lambda x: str(x.missed or "-")),
            *([Column("$/h", "number", value="usd_per_hour", drop=1)] if priced else []),
        ),
    )
    if len(shown) > 1:
        yield Notes([(f"{number[id(x)]:2}", _lost(planned, x)) for x in shown[1:]], 4)
    yield Notes(MEANINGS, 12)
    yield from _best(planned, width)
    yield Notes(list(_notes(planned)), 12)


MEANINGS = (
    ("throughput", "of all models together; 1 is one model alone on a whole GPU"),
    ("least", "the throughput of the model that gets least"),
    ("latency", "how many times longer requests take than alone on a whole GPU"),
    ("missed", "models that miss their deadline (99 % of requests) or fall behind"),
)


def _shown(outcomes: Sequence[Outcome], best: int) -> list[Outcome]:
    """The best, and whatever rank it has, the best without MIG."""
    shown = list(outcomes[:best])
    off = next((x for x in outcomes if all(g.geometry is None for g in x.gpus)), None)
    return shown if off is None or off in shown else [*shown, off]


def _lost(planned: Planned, outcome: Outcome) -> str:
    found = map(reason_text, planned.why(outcome)[:NAMED])
    return "; ".join(found) or "within 2 % of the best"


def asked_of(setting: ServingSetting, outcome: Outcome) -> str:
    """`4 x bert, resnet50 on 2 x a30`."""
    models = ", ".join(
        f"{w.count} x {w.name}" if w.count > 1 else w.name for w in setting.workloads
    )
    return f"{models} on {counted_gpus(outcome)}"


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


def _best(planned: Planned, width: int) -> Iterator[Part]:
    best = planned.best
    many = len(best.gpus) > 1
    for gpu in best.gpus:
        if gpu.is_used and gpu.geometry is not None:
            mig = mig_of(load_target(gpu.gpu))
            lines = picture(mig, gpu.layout, labels(planned, gpu), width)
            yield Drawing(lines, f"GPU {gpu.index}, {gpu.gpu}" if many else gpu.gpu)
        elif gpu.is_used and many:
            yield Heading(f"GPU {gpu.index}, {gpu.gpu}: not divided")

    def latest(p: int, drop: int = 0) -> Column:
        def slowest_s(some: Sequence[Sat]) -> float:
            return max(x.one.percentile_s(p) for x in some)

        return Column(f"p{p}", "s", value=slowest_s, drop=drop)

    yield Table(
        _alike(best),
        (
            Column("model", value=_model),
            Column("in", value=lambda some: _places([(x.gpu, x.seat) for x in some], many)),
            Column(
                "runs/s", "number", value=lambda some: sum(x.one.rate for x in some) / len(some)
            ),
            Column("alone", "s", value=lambda some: some[0].one.alone_s, drop=3),
            latest(50, 1),
            latest(90, 2),
            latest(99),
            Column("load", "count", text=_load),
            Column("slower by", value=lambda some: longer(planned, some)),
        ),
    )


def _alike(outcome: Outcome) -> list[list[Sat]]:
    """The models of a plan, those together that have the same kind of seat with the same others."""
    found: dict[object, list[Sat]] = {}
    for x in _each(outcome):
        found.setdefault((x.member, x.seat.part, x.seat.members), []).append(x)
    return list(found.values())


def _model(some: Sequence[Sat]) -> str:
    name = some[0].one.name
    return name if len(some) == 1 else f"{len(some)} x {name}"


def _load(some: Sequence[Sat]) -> str:
    late = "" if all(x.one.in_time for x in some) else " !"
    return asked(some[0].one.load) + late


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


def longer(planned: Planned, some: Sequence[Sat]) -> str:
    """What makes the slowest slower than alone on a whole GPU: `part 120 %, turn 30 %`."""
    alone = planned.found.references[some[0].member]
    slowest = max((x.one for x in some), key=lambda one: one.percentile_s(99))
    found = causes(slowest, alone)[:2]
    return ", ".join(f"{c.name} {percent(c.seconds, alone.latency_s)}" for c in found) or "-"


def _notes(planned: Planned) -> Iterator[tuple[str, str]]:
    yield "runs/s", "of each, on average; latencies are those of the slowest"
    yield (
        "longer for",
        "more time than alone on a whole GPU: part, a smaller one; turn, the wait for it; else "
        "what is shared",
    )
    smallest: dict[str, tuple[str, int]] = {}
    for x in planned.found.left:
        if x.workload not in smallest or x.missing_bytes < smallest[x.workload][1]:
            smallest[x.workload] = x.target, x.missing_bytes
    for name, (target, missing) in smallest.items():
        text = f"{name} does not fit {target}: {quantity(missing, 'bytes')} are missing"
        yield "too small", text
    for note in planned.notes:
        yield "assumed", note
