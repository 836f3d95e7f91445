"""A sharding of embedding tables: as a table for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from gpuir.backends import structured
from gpuir.backends.terminal import Layout, Page
from gpuir.plan.sharding import Found, Placement, reasons, ways_of
from gpuir.report.units import percent, quantity

SCHEMA = "gpuir.shard/1"
MOST = 40  # tables that a report lists one by one


def json_text(found: Found, head: dict[str, Any]) -> str:
    """`{"schema", "cluster", .., "time_s", "parts", "tables": [...], "gpus": [...]}`."""
    plan, why = found.plan, reasons(found)
    return structured.json_text(
        SCHEMA,
        **head,
        time_s=plan.time_s,
        parts=plan.parts,
        limit=plan.limit,
        greedy_s=None if found.greedy is None else found.greedy.time_s,
        least_s=found.least_s,
        found_by=found.how,
        tables=[
            {
                "name": p.table.name,
                "rows": p.table.rows,
                "width": p.table.width,
                "dtype": p.table.dtype.name,
                "way": p.option.way,
                "parts": p.option.parts,
                "gpus": list(p.on),
                "forward_s": p.option.forward_s,
                "backward_s": p.option.backward_s,
                "memory_bytes": p.option.memory_bytes,
                "why": why[p.table.name],
            }
            for p in plan.placements
        ],
        gpus=[{"gpu": g, **asdict(load)} for g, load in enumerate(plan.loads)],
    )


def report(found: Found, title: str, notes: Sequence[str], layout: Layout) -> str:
    """The step by part, the tables with reasons, the GPUs, what was taken for granted."""
    page, plan = Page(layout.width, layout.color), found.plan
    page.heading(title)
    parts = ", ".join(
        f"{name} {quantity(s, 's')} ({percent(s, plan.time_s)})"
        for name, s in plan.parts.items()
        if s
    )
    page.wrapped("step", f"{quantity(plan.time_s, 's')}: {parts}")
    page.wrapped("limit", plan.limit)
    page.wrapped("compared", _compared(found))
    page.wrapped("ways", ", ".join(f"{n} by {way}" for way, n in ways_of(plan).items()))
    page.line()
    _tables(page, found)
    page.line()
    _gpus(page, found)
    page.line()
    for note in notes:
        page.wrapped("assumed", note)
    return page.text()


def _compared(found: Found) -> str:
    plan, parts = found.plan, [f"by {found.how}"]
    if found.greedy is None:
        parts.append("whole tables, the slowest first, do not fit")
    else:
        gain = found.greedy.time_s / plan.time_s
        text = f"{quantity(found.greedy.time_s, 's')} with whole tables, the slowest first"
        parts.append(f"{text}: {gain:.2f} times as long")
    if found.proven:
        parts.append(
            "no other is faster (proven, with the time of a collective linear in its bytes)"
        )
    elif found.least_s is not None:
        least = quantity(found.least_s, "s")
        parts.append(f"none is below {least}, with the time of a collective linear in its bytes")
    else:
        parts.append("not proven to be the fastest")
    return "; ".join(parts)


def _tables(page: Page, found: Found) -> None:
    """The tables that cost most; equal ones that lie alike are one line."""
    why = reasons(found)
    ordered = sorted(
        found.plan.placements,
        key=lambda p: -(p.option.forward_s + p.option.backward_s) * p.option.parts,
    )
    columns = [("table", False), ("rows", True), ("width", True), ("lookups", True)]
    columns += [("size", True), ("placed", False), ("gpus", False), ("time", True), ("why", False)]
    alike: dict[object, list[Placement]] = {}
    for p in ordered:
        alike.setdefault((replace(p.table, name=""), p.option, p.on), []).append(p)
    shown = [(some[0], len(some)) for some in alike.values()]
    rows = [
        (
            p.table.name if n == 1 else f"{p.table.name} x{n}",
            *(f"{p.table.rows:,}", str(p.table.width)),
            f"{p.table.lookups * p.table.features:g}",
            quantity(p.table.nbytes, "bytes"),
            f"{p.option.way} x{p.option.parts}" if p.option.parts > 1 else p.option.way,
            _on(p, found.plan.setting.gpus),
            quantity(p.option.forward_s + p.option.backward_s, "s"),
            why[p.table.name],
        )
        for p, n in shown[:MOST]
    ]
    page.table(columns, rows, drop=("lookups", "width"))
    if len(shown) > MOST:
        page.line(f"and {len(shown) - MOST:,} more that cost less; --format json has all")


def _on(p: Placement, gpus: int) -> str:
    if len(p.on) == gpus > 1:
        return "all"
    return ",".join(map(str, p.on[:4])) + (",.." if len(p.on) > 4 else "")


def _gpus(page: Page, found: Found) -> None:
    plan = found.plan
    columns = [("gpu", True), ("tables", True), ("memory", True), ("room", True)]
    columns += [("lookups", True), ("updates", True), ("sends", True)]
    order = sorted(range(len(plan.loads)), key=lambda g: -_busy(found, g))
    shown = sorted(order[:16])
    rows = [
        (
            str(g),
            str(sum(g in p.on for p in plan.placements)),
            quantity(load.memory_bytes, "bytes"),
            percent(load.memory_bytes, plan.setting.memory_bytes),
            quantity(load.forward_s, "s"),
            quantity(load.backward_s, "s"),
            quantity(load.sent_bytes, "bytes"),
        )
        for g, load in ((g, plan.loads[g]) for g in shown)
    ]
    page.table(columns, rows)
    if len(order) > len(shown):
        page.line(f"the {len(shown)} busiest of {len(order)} GPUs")


def _busy(found: Found, g: int) -> float:
    load = found.plan.loads[g]
    return load.forward_s + load.backward_s
