"""A sharding of embedding tables over GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gpuir.plan.sharding import FoundPlacement, Option, TablePlacement, reasons, ways_of
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import percent, quantity, share

MOST = 40  # tables that a report lists one by one
BUSIEST = 16  # GPUs that it lists


def sharding_report(
    found: FoundPlacement, head: Mapping[str, Any], title: str, notes: Sequence[str]
) -> Report:
    """The step by part, the tables with reasons, the GPUs, what was taken for granted. Programs
    have a row for each table."""
    return Report(
        "gpuir.shard/1",
        lambda: _parts(found, title, notes),
        lambda: _fields(found, head),
    )


def _fields(found: FoundPlacement, head: Mapping[str, Any]) -> dict[str, Any]:
    plan = found.plan
    return {
        **head,
        "time_s": plan.time_s,
        "parts": plan.parts,
        "limit": plan.limit,
        "greedy_s": None if found.greedy is None else found.greedy.time_s,
        "least_s": found.least_s,
        "found_by": found.how,
        "tables": _placed(found, {"cluster": head["cluster"]}),
        "gpus": [{"gpu": g, **asdict(load)} for g, load in enumerate(plan.loads)],
    }


def _placed(found: FoundPlacement, context: Mapping[str, object]) -> Table:
    """Each table, where it lies, and why."""
    why = reasons(found)
    return Table(
        found.plan.placements,
        (
            *fields("name rows width", "table"),
            Column(field="dtype", value="table.dtype.name"),
            *fields("way parts", "option"),
            Column(field="gpus", value=lambda p: list(p.on)),
            *fields("forward_s backward_s memory_bytes", "option"),
            Column(field="why", value=lambda p: why[p.table.name]),
        ),
        context,
    )


def _parts(found: FoundPlacement, title: str, notes: Sequence[str]) -> Iterator[Part]:
    plan = found.plan
    parts = ", ".join(
        f"{name} {quantity(s, 's')} ({percent(s, plan.time_s)})"
        for name, s in plan.parts.items()
        if s
    )
    yield Heading(title)
    yield Notes(
        [
            ("step", f"{quantity(plan.time_s, 's')}: {parts}"),
            ("limit", plan.limit),
            ("compared", _compared(found)),
            ("ways", ", ".join(f"{n} by {way}" for way, n in ways_of(plan).items())),
        ]
    )
    yield _tables(found)
    yield _gpus(found)
    yield Notes([("assumed", note) for note in notes])


def _compared(found: FoundPlacement) -> str:
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


def _tables(found: FoundPlacement) -> Table:
    """The tables that cost most; equal ones that lie alike are one line."""
    why, gpus = reasons(found), found.plan.setting.gpus

    def takes_s(x: Option) -> float:
        return x.forward_s + x.backward_s

    alike: dict[object, list[TablePlacement]] = {}
    for p in sorted(found.plan.placements, key=lambda p: -takes_s(p.option) * p.option.parts):
        alike.setdefault((replace(p.table, name=""), p.option, p.on), []).append(p)
    shown = [(some[0].table, some[0], len(some)) for some in alike.values()]
    more = f"and {len(shown) - MOST:,} more that cost less; --format json has all"
    return Table(
        shown,
        (
            Column("table", text=lambda x: x[0].name if x[2] == 1 else f"{x[0].name} x{x[2]}"),
            Column("rows", "count", value=lambda x: x[0].rows),
            Column("width", "count", value=lambda x: x[0].width, drop=2),
            Column("lookups", "count", text=lambda x: f"{x[0].lookups * x[0].features:g}", drop=1),
            Column("size", "bytes", value=lambda x: x[0].nbytes),
            Column("placed", text=lambda x: _way(x[1].option)),
            Column("gpus", text=lambda x: _on(x[1], gpus)),
            Column("time", "s", value=lambda x: takes_s(x[1].option)),
            Column("why", value=lambda x: why[x[0].name]),
        ),
        top=MOST,
        more=(more,) * (len(shown) > MOST),
    )


def _way(x: Option) -> str:
    return f"{x.way} x{x.parts}" if x.parts > 1 else x.way


def _on(p: TablePlacement, gpus: int) -> str:
    if len(p.on) == gpus > 1:
        return "all"
    return ",".join(map(str, p.on[:4])) + (",.." if len(p.on) > 4 else "")


def _gpus(found: FoundPlacement) -> Table:
    """What the busiest GPUs have."""
    loads, room = found.plan.loads, found.plan.setting.memory_bytes
    order = sorted(range(len(loads)), key=lambda g: -loads[g].forward_s - loads[g].backward_s)
    shown = sorted(order[:BUSIEST])
    held = {g: sum(g in p.on for p in found.plan.placements) for g in shown}
    return Table(
        [(g, loads[g]) for g in shown],
        (
            Column("gpu", "count", value=lambda x: x[0]),
            Column("tables", "count", value=lambda x: held[x[0]]),
            Column("memory", "bytes", value=lambda x: x[1].memory_bytes),
            Column("room", "%", value=lambda x: share(x[1].memory_bytes, room)),
            Column("lookups", "s", value=lambda x: x[1].forward_s),
            Column("updates", "s", value=lambda x: x[1].backward_s),
            Column("sends", "bytes", value=lambda x: x[1].sent_bytes),
        ),
        more=(f"the {len(shown)} busiest of {len(order)} GPUs",) * (len(order) > len(shown)),
    )
