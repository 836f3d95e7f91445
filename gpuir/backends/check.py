"""A check: measured beside predicted, for the whole and for each kernel, and what explains most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuir.backends.structured import record
from gpuir.report.check import Check, CheckedKernels, params_of
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import between, quantity
from gpuir.text import show

CAUSES = 3  # kinds of kernels that explain the difference
LEAST = 0.02  # of what was measured, that a kind explains


def check_report(c: Check, top: int = 15) -> Report:
    """JSON is described in docs/guide/check.md; programs have a row for each kernel, with what
    `gpuir calibrate` reads."""
    return Report("gpuir.check/1", lambda: _parts(c, top), lambda: _fields(c))


def _parts(c: Check, top: int) -> Iterator[Part]:
    a = c.answer
    yield Heading(f"{a.model} on {a.device.title or a.target} under {a.profile}")
    yield Notes(list(_whole(c)))
    rows = sorted(c.rows, key=lambda x: -abs(x.more_s))
    more = f"{len(rows) - top:,} more: see --top" if len(rows) > top else ""
    yield _table(c, rows, top, more)
    if lines := list(_causes(c)):
        yield Notes(lines)


def _whole(c: Check) -> Iterator[tuple[str, str]]:
    t, a = c.trial, c.answer
    runs = f"lower quartile of {t.runs:,} runs, quartiles {100 * t.spread:.0f} % apart"
    yield "measured", f"{quantity(t.seconds, 's')} by {t.by} ({runs})"
    ends = f", 80 % interval {between(a.interval)}" if a.interval else ""
    yield "predicted", f"{quantity(a.latency_s, 's')} ({_error(c.ratio)}){ends}{_verdict(c)}"
    inside, known = c.inside
    if known:
        yield "kernels", f"{inside:,} of {known:,} inside their intervals"
    if c.trial.steps:
        yield "steps", f"{quantity(c.steps_s, 's')} one by one, {len(c.trial.steps):,} of them"


def _verdict(c: Check) -> str:
    return "" if c.is_inside is None else ": inside" if c.is_inside else ": outside"


def _error(ratio: float) -> str:
    """How far off the prediction is, given measured over predicted."""
    return f"{100 * (1 / ratio - 1):+.1f} %"


def _causes(c: Check) -> Iterator[tuple[str, str]]:
    """The kinds of kernels that differ most, if they tell something."""
    for i, (kind, count, measured_s, predicted_s) in enumerate(c.causes()[:CAUSES]):
        if abs(measured_s - predicted_s) > LEAST * c.trial.seconds:
            taken = f"{quantity(measured_s, 's')} measured, {quantity(predicted_s, 's')} predicted"
            times = f"{count:,} {kind}{'s' * (count > 1)}"
            yield "" if i else "most by", f"{times}: {taken}"


def _table(c: Check, rows: Sequence[CheckedKernels], top: int | None = None, more: str = ""):
    def took(x: CheckedKernels) -> str:
        return "" if x.measured_s is None else quantity(x.measured_s, "s")

    def text_of(x: CheckedKernels) -> str:
        graph = x.graph
        return "" if graph is None else " ".join(show(params_of(graph, c.weights)).split("\n"))

    return Table(
        rows,
        (
            Column("measured", "s", "measured_s", text=took),
            Column("predicted", "s", "predicted_s", blank=""),
            Column("80 %", text=lambda x: between(x.interval), drop=1),
            Column("ratio", "x", "ratio", text=lambda x: f"x{x.ratio:.2f}" if x.ratio else ""),
            Column("kernel", text=lambda x: f"{x.kind} {x.shape}".rstrip(), least=24, drop=2),
            Column("layer", "", "name", least=24, elided=True),
            *fields("kind shape"),
            Column(field="low_s", value=lambda x: x.interval and x.interval[0]),
            Column(field="high_s", value=lambda x: x.interval and x.interval[1]),
            Column(field="steps", value=lambda x: " ".join(s.name for s in x.steps)),
            Column(field="weight_bytes", value=lambda _: c.weights.nbytes),
            Column(field="kernels", value=text_of),
        ),
        {
            "model": c.answer.model,
            "device": c.device,
            "profile": c.answer.profile,
            "by": c.trial.by,
        },
        top=top,
        more=(more,) if more else (),
    )


def _fields(c: Check) -> dict[str, Any]:
    return {
        **record(c.answer, "target latency_s"),
        "interval_s": c.answer.interval,
        **record(c.trial, "spread runs notes", measured_s=c.trial.seconds),
        "kernels": _table(c, c.rows),
    }
