"""An answer as a notebook shows it: its numbers, and the slowest kernels, as plain HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from gpuir.report.equal import alike
from gpuir.report.units import percent, quantity, rate

if TYPE_CHECKING:
    from gpuir.report.answer import Answer

ROWS = 10  # of kernels


def html(s: Answer) -> str:
    """Escaped, without scripts and styles of its own: a notebook's apply."""
    device = s.device.title or s.device.name
    head = f"<caption>{escape(s.model)} on {escape(device)}, {escape(s.profile)}</caption>"
    facts = "".join(
        f"<tr><th>{label}</th><td>{escape(text)}</td></tr>" for label, text in _facts(s)
    )
    titles = ("time", "share", "runs", "kernel", "bound", "node")
    kernels = "".join(
        _row(
            (
                quantity(x.time_s, "s"),
                percent(x.time_s, s.latency_s),
                f"{x.runs:,}",
                x.one.kind,
                x.one.cost.bound,
                x.one.name,
            )
        )
        for x in alike(s)[:ROWS]
    )
    return f"<table>{head}{facts}</table><table>{_row(titles, 'th')}{kernels}</table>"


def _facts(s: Answer) -> Iterable[tuple[str, str]]:
    if s.memory.fits is False:
        changes = " or ".join(x.option for x in s.to_fit)
        short = f"{quantity(-(s.memory.spare_bytes or 0), 'bytes')} short"
        yield "does not fit", f"{short}; {changes} fits" if changes else short
    yield "latency", quantity(s.latency_s, "s", 4)
    if s.interval is not None:
        low, high = s.interval
        yield "80 % of cases", f"{quantity(low, 's')} to {quantity(high, 's')}"
    if s.latency_s and s.batch:
        yield "throughput", f"{rate(s.batch / s.latency_s)}/s at batch {s.batch:,}"
    if s.device_s:
        shares = sorted(s.bounds, key=lambda pair: -pair[1])
        text = ", ".join(f"{name} {percent(part, s.device_s)}" for name, part in shares if part)
        yield "bound", "the host" if s.timeline.is_host_bound else text
    yield "memory at the peak", quantity(s.memory.peak_bytes, "bytes")


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"
