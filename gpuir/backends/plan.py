"""Parallel plans of a model that were tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuir.backends.plans.record import TrainingPlan
from gpuir.backends.plans.table import PLAN_FORMATS
from gpuir.ir.errors import UsageError
from gpuir.plan.parallel import FoundChoices, ModelBounds, Tried
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import percent, quantity, rate

if TYPE_CHECKING:
    from gpuir.targets.cluster import Cluster
    from gpuir.targets.prices import Price


def best_of(found: FoundChoices) -> Tried:
    """The quickest; UsageError where none fits, with why."""
    if not found.best:
        why = "; ".join(f"{count} plans: {text}" for text, count in found.reasons[:3])
        full = any(text.startswith("memory") for text, _ in found.reasons)
        fix = "use more GPUs, GPUs with more memory, --recompute, a smaller --microbatch, or --cp"
        raise UsageError(
            "no plan fits" if full else "no plan can split the model",
            found=why,
            fix=fix
            if full
            else "give other degrees, or none: gpuir then tries all that divide the GPUs",
        )
    return found.best[0]


def chosen(found: FoundChoices, form: str) -> str:
    """The best plan in one of the forms of `PLAN_FORMATS`."""
    best = best_of(found)
    a, choice = best.answer, best.choice
    return PLAN_FORMATS[form](
        TrainingPlan(choice.parallel, a.items, a.model, a.cluster, recompute=choice.recompute)
    )


@dataclass(frozen=True)
class SearchReport:
    """A search, and what it was for."""

    found: FoundChoices
    model: ModelBounds
    cluster: Cluster
    price: Price | None


def plan_report(s: SearchReport, count: int) -> Report:
    """The best plans, and why the others lost. Programs have all plans, the best first."""
    return Report(
        "gpuir.plans/1",
        lambda: _parts(s, count),
        lambda: {
            "model": s.model.model,
            "cluster": s.cluster.name,
            "gpus": s.model.gpus,
            "batch": s.model.batch,
            "usd_per_gpu_hour": s.price and s.price.usd_per_hour,
            "simulated": s.found.simulated,
            "plans": _plans(s),
        },
    )


def _plans(s: SearchReport) -> Table:
    """All that were tried."""
    return Table(
        s.found.tried,
        (
            *fields("why", "answer"),
            *fields("mfu"),
            Column(field="held_bytes", value="answer.reserved_bytes"),
            *fields("kernels_s exposed_s idle_s"),
            *fields("interval", "answer"),
            *fields("tp_shared"),
            Column(field="time_s", value="answer.latency_s"),
            Column(field="parallel", value="choice.parallel", inline=True),
            *fields("recompute", "choice"),
        ),
        {"model": s.model.model, "cluster": s.cluster.name},
    )


def _parts(s: SearchReport, count: int) -> Iterator[Part]:
    yield Heading(f"{s.model.model} on {s.cluster.gpus:,} GPUs of {s.cluster.name}")
    yield Notes(list(_head(s)))
    yield Table(
        s.found.best,
        (
            Column("step", "s", value="answer.latency_s"),
            Column("MFU", "%", "mfu"),
            Column("kernels", "s", "kernels_s", drop=1),
            Column("exposed", "s", "exposed_s", drop=3),
            Column("waits", "s", "idle_s", drop=2),
            Column("memory", "bytes", value="answer.reserved_bytes"),
            Column("plan", "", "choice"),
        ),
        top=count,
    )
    if s.found.reasons:
        lost = ((f"{n:,}", f"{text}{_example(s.found, text)}") for text, n in s.found.reasons)
        yield Notes(list(lost), 7, "Why the others lost")


def _head(s: SearchReport) -> Iterator[tuple[str, str]]:
    found, best = s.found, best_of(s.found)
    a = best.answer
    yield "best", str(best.choice)
    speed = f"{rate(a.items_per_s)} items a second, {percent(best.mfu, 1)} MFU"
    yield "step", f"{quantity(a.latency_s, 's', 4)} of {a.items:,} items: {speed}"
    if a.interval is not None:
        low, high = (quantity(end, "s") for end in a.interval)
        yield "interval", f"{low} to {high} in 80 % of cases"
    if s.price is not None:
        usd = s.price.usd_per_hour * s.model.gpus
        million = replace(a, usd_per_hour=usd).usd_per_million
        yield "money", f"{usd:,.2f} USD an hour, {million:,.2f} a million items ({s.price})"
    if best.tp_shared is not None:
        yield "tp cuts", f"{best.tp_shared}, by bytes and by flops"
    skipped = len(found.tried) - found.simulated
    kept = f" ({found.kept:,} of them by an earlier search)" if found.kept else ""
    yield "tried", f"{found.simulated:,} simulated{kept}, {skipped:,} left out by bounds"


def _example(found: FoundChoices, why: str) -> str:
    """The one of those that lost so that would have been quickest."""
    x = min((x for x in found.tried if x.answer.why == why), key=lambda x: x.answer.latency_s)
    a = x.answer
    if why.startswith("memory"):
        return f"; the quickest of them takes {quantity(a.reserved_bytes, 'bytes')}: {x.choice}"
    if why.startswith("time"):
        return f"; the quickest of them takes {quantity(a.latency_s, 's')} at least: {x.choice}"
    return f": {x.choice}"
