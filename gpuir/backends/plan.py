"""Parallel plans of a model that were tried: as a table for a terminal and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuir.backends import structured
from gpuir.backends.plans.record import Plan
from gpuir.backends.plans.table import PLAN_FORMATS
from gpuir.backends.structured import record
from gpuir.backends.terminal import Layout, Page
from gpuir.ir.errors import UsageError, nearest
from gpuir.plan.parallel import Found, Model, Tried
from gpuir.report.units import percent, quantity, rate

if TYPE_CHECKING:
    from gpuir.targets.cluster import Cluster
    from gpuir.targets.prices import Price

SCHEMA = "gpuir.plans/1"
FORMS = ("table", "json", *PLAN_FORMATS)


def forms(name: str) -> None:
    """UsageError for a form that there is not."""
    if name not in FORMS:
        raise UsageError(f"no format of a plan has the name {name!r}", fix=nearest(name, FORMS))


def best_of(found: Found) -> Tried:
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


def chosen(found: Found, form: str, batch: int, model: str, cluster: str) -> str:
    """The best plan in one of the forms of `PLAN_FORMATS`."""
    best = best_of(found).choice
    return PLAN_FORMATS[form](Plan(best.parallel, batch, model, cluster, recompute=best.recompute))


def json_text(found: Found, model: Model, machine: Cluster, price: Price | None, name: str) -> str:
    """`{"schema", "model", "cluster", "batch", "simulated", "plans": [...]}`, the best first."""
    return structured.json_text(
        SCHEMA,
        model=name,
        cluster=machine.name,
        gpus=model.gpus,
        batch=model.batch,
        usd_per_gpu_hour=None if price is None else price.usd_per_hour,
        simulated=found.simulated,
        plans=[
            record(
                x,
                "why mfu held_bytes kernels_s exposed_s idle_s interval tp_shared",
                time_s=x.time_s if x.time_s < float("inf") else None,
                parallel=x.choice.parallel,
                recompute=x.choice.recompute,
            )
            for x in found.tried
        ],
    )


def report(
    found: Found, model: Model, title: str, price: Price | None, count: int, layout: Layout
) -> str:
    """The best plans, and why the others lost."""
    page = Page(layout.width, layout.color)
    page.heading(title)
    page.line()
    best = best_of(found)
    page.wrapped("best", str(best.choice))
    speed = f"{rate(model.batch / best.time_s)} items a second, {percent(best.mfu, 1)} MFU"
    page.wrapped("step", f"{quantity(best.time_s, 's', 4)} of {model.batch:,} items: {speed}")
    if best.interval is not None:
        low, high = (quantity(end, "s") for end in best.interval)
        page.wrapped("interval", f"{low} to {high} in 80 % of cases")
    if price is not None:
        usd = price.usd_per_hour * model.gpus
        million = usd / 3600 * best.time_s / model.batch * 1e6
        page.wrapped("money", f"{usd:,.2f} USD an hour, {million:,.2f} a million items ({price})")
    skipped = len(found.tried) - found.simulated
    kept = f" ({found.kept:,} of them by an earlier search)" if found.kept else ""
    if best.tp_shared is not None:
        page.wrapped("tp cuts", f"{best.tp_shared}, by bytes and by flops")
    page.wrapped("tried", f"{found.simulated:,} simulated{kept}, {skipped:,} left out by bounds")
    page.line()
    columns = [("step", True), ("MFU", True), ("kernels", True), ("exposed", True)]
    columns += [("waits", True), ("memory", True), ("plan", False)]
    page.table(
        columns,
        [
            [
                quantity(x.time_s, "s"),
                percent(x.mfu, 1),
                quantity(x.kernels_s, "s"),
                quantity(x.exposed_s, "s"),
                quantity(x.idle_s, "s"),
                quantity(x.held_bytes, "bytes"),
                str(x.choice),
            ]
            for x in found.best[:count]
        ],
        drop=("kernels", "waits", "exposed"),
    )
    if found.reasons:
        page.line()
        page.line("Why the others lost", "bold")
        for text, n in found.reasons:
            page.wrapped(f"{n:,}", f"{text}{_example(found, text)}", 7)
    return page.text()


def _example(found: Found, why: str) -> str:
    """The one of those that lost so that would have been quickest."""
    x = min((x for x in found.tried if x.why == why), key=lambda x: x.time_s)
    if why.startswith("memory"):
        return f"; the quickest of them takes {quantity(x.held_bytes, 'bytes')}: {x.choice}"
    if why.startswith("time"):
        return f"; the quickest of them takes {quantity(x.time_s, 's')} at least: {x.choice}"
    return f": {x.choice}"
