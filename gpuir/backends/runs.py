"""A run of several models, one after another: what it comes to, and what of it each part is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuir.backends.analysis import machine_text, rests_on, throughput
from gpuir.backends.structured import record
from gpuir.report.answer import Answer, RunPart
from gpuir.report.parts import ASSUMED
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import between, percent, quantity, rate, share


def runs_report(answers: Sequence[Answer]) -> Report:
    """One run, or several compared; JSON is described in docs/reference/json-schema.md. Programs
    have a row for each part."""
    return Report(
        "gpuir.runs/1",
        lambda: _one(answers[0]) if len(answers) == 1 else _compare(answers),
        lambda: {"reports": list(map(_fields, answers))},
    )


def _one(s: Answer) -> Iterator[Part]:
    device = s.parts[0].whole.device
    title = f"{device.title} ({device.name})" if device.title else device.name
    yield Heading(f"{_short(s)}{s.model} on {title}")
    yield Notes(list(_head(s)))
    yield _parts(s)
    yield Notes(list(rests_on([(x.text, x.whole) for x in s.parts], own=ASSUMED)))


def _short(s: Answer) -> str:
    return "" if s.fits else f"does not fit, {quantity(-(s.spare_bytes or 0), 'bytes')} short: "


def _head(s: Answer) -> Iterator[tuple[str, str]]:
    where = "" if s.fits else ", were there enough memory"
    yield "latency", f"{quantity(s.latency_s, 's', 4)}{where}, {throughput(s)}"
    if s.interval is not None:
        yield "interval", f"{between(s.interval)} in 80 % of cases"
    if s.tokens and s.tokens_per_s:
        yield "tokens", f"{s.tokens:,} generated, {rate(s.tokens_per_s)}/s"
    busy = f"busy {percent(s.busy_s, s.latency_s)} of the time"
    if s.gaps_s:
        busy += f", waits for the host {percent(s.gaps_s, s.latency_s)} ({quantity(s.gaps_s, 's')})"
    yield "device", f"{busy}: host-bound" if s.is_host_bound else busy
    for text in dict.fromkeys(f"{x.each.profile}: {x.whole.stack}" for x in s.parts):
        yield "profile", text
    hosts = (x.whole.software for x in s.parts if x.whole.software.host.call_s)
    for text in dict.fromkeys(map(machine_text, hosts)):
        yield "host", text
    spare, has = s.spare_bytes or 0, s.available_bytes or 0
    verdict = f"{quantity(abs(spare), 'bytes')} {'to spare' if spare >= 0 else 'short'}"
    held = f"{quantity(s.reserved_bytes, 'bytes')} reserved of {quantity(has, 'bytes')}"
    yield "memory", f"{verdict}: {held}, where it is fullest"
    yield "try", "gpuir analyze on one of the parts: its kernels"


def _bound(s: Answer) -> str:
    return "host" if s.is_host_bound else s.bound or ""


def _parts(s: Answer) -> Table:
    """A row a part, in the order in which they run."""
    return Table(
        s.parts,
        (
            Column("time", "s", "latency_s"),
            Column("share", "%", value=lambda x: share(x.latency_s, s.latency_s)),
            Column("times", "count", "times"),
            Column("each", "s", value="each.latency_s", digits=4),
            Column("80 %", text=lambda x: between(x.each.interval), drop=2),
            Column("device", "s", value="each.device_s", drop=1),
            Column("memory", "bytes", value="each.reserved_bytes", drop=3),
            Column("bound", value=lambda x: _bound(x.each)),
            Column("part", value="text", least=24, elided=True),
        ),
    )


def _compare(answers: Sequence[Answer]) -> Iterator[Part]:
    names = _names(answers)
    runs = list(zip(names, answers, strict=True))
    yield Heading(f"{answers[0].model}, {len(answers)} times")
    fastest = min(s.latency_s for s in answers)

    def of_part(i: int, x: RunPart) -> Column:
        title = f"{x.times:,} x {x.each.model}" if x.times > 1 else x.each.model
        return Column(title, "s", value=lambda run: run[1].parts[i].latency_s, drop=1)

    yield Table(
        runs,
        (
            Column("target", value=lambda x: x[0], least=16, elided=True),
            Column("latency", "s", value=lambda x: x[1].latency_s, digits=4),
            Column("80 % of cases", text=lambda x: between(x[1].interval), drop=3),
            Column("x fastest", "number", text=lambda x: f"{x[1].latency_s / fastest:.2f}"),
            *(of_part(i, x) for i, x in enumerate(answers[0].parts)),
            Column("to spare", "bytes", value=lambda x: x[1].spare_bytes, drop=2),
            Column("bound", value=lambda x: _bound(x[1])),
        ),
    )
    wholes = [(f"{n} {x.each.model}", x.whole) for n, s in runs for x in s.parts]
    yield Notes(list(rests_on(wholes, own=ASSUMED)))


def _names(answers: Sequence[Answer]) -> list[str]:
    """What tells the runs apart: their targets, profiles, or both."""
    targets, profiles = ([getattr(s, of) for s in answers] for of in ("target", "profile"))
    if len(set(profiles)) == 1:
        return targets
    if len(set(targets)) == 1:
        return profiles
    return [f"{target} {profile}" for target, profile in zip(targets, profiles, strict=True)]


# ---------------------------------------------------------------------------- for programs


def _fields(s: Answer) -> dict[str, Any]:
    return record(
        s,
        "model target profile batch latency_s device_s busy_s gaps_s bound peak_bytes"
        " reserved_bytes available_bytes fits tokens tokens_per_s",
        interval_s=s.interval,
        host_bound=s.is_host_bound,
        assumed=(*ASSUMED, *dict.fromkeys(x for part in s.parts for x in part.whole.assumed)),
        warnings=tuple(dict.fromkeys(x for part in s.parts for x in part.whole.warnings)),
        parts=Table(
            s.parts,
            (
                Column(field="part", value="text"),
                *fields("times latency_s"),
                *fields("model profile batch", "each"),
                Column(field="each_s", value="each.latency_s"),
                Column(field="interval_s", value="each.interval"),
                *fields("device_s busy_s gaps_s", "each"),
                Column(field="host_bound", value="each.is_host_bound"),
                *fields("bound peak_bytes reserved_bytes", "each"),
            ),
            {"run": s.model, "target": s.target},
        ),
    )
