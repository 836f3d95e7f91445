"""From which size on a model is not held up by the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuir.backends.structured import record
from gpuir.plan.searches import Crossing
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table
from gpuir.report.units import percent, share


def crossing_report(crossings: Sequence[Crossing]) -> Report:
    """The answer of each run, and every value that was tried."""
    return Report(
        "gpuir.crossover/1",
        lambda: (part for c in crossings for part in _parts(c)),
        lambda: {"runs": [_record(c) for c in crossings]},
    )


def _parts(c: Crossing) -> Iterator[Part]:
    a = c.run
    place = a.device.title or a.target
    yield Heading(f"{a.model} on {place} under {a.profile}: {c.dim} and the host")
    yield Notes([(c.dim, verdict(c))])
    yield _tried(c)


def _tried(c: Crossing) -> Table:
    return Table(
        list(c.search.tried.items()),
        (
            Column(c.dim, "count", "value", lambda x: x[0]),
            Column("latency", "s", "latency_s", lambda x: x[1].latency_s, digits=4),
            Column(f"per {c.dim}", "s", "", lambda x: x[1].latency_s / x[0]),
            Column("busy", "%", "", lambda x: share(x[1].busy_s, x[1].latency_s)),
            Column("waits", "%", "", lambda x: share(x[1].gaps_s, x[1].latency_s)),
            Column("waits for the host", "s", "gaps_s", lambda x: x[1].gaps_s, drop=1),
            Column(field="busy_s", value=lambda x: x[1].busy_s),
            Column(field="host_bound", value=lambda x: x[1].is_host_bound),
        ),
        {**record(c.run, "model target profile"), "dim": c.dim},
    )


def verdict(c: Crossing) -> str:
    """`from 6 on; at 5 the device waits for the host 12 % of the time`."""
    found, held_up = c.search, c.search.held_up
    if found.value is None:
        last = max(found.tried)
        limit = (
            f"the model does not accept {found.refused:,}"
            if found.refused is not None
            else f"larger values than {c.most:,} were not tried"
        )
        return f"host-bound even at {last:,}; {limit}"
    if held_up is None:
        return f"not host-bound at {found.value:,}, the smallest value that was tried"
    run = found.tried[held_up]
    return (
        f"not host-bound from {found.value:,} on; at {held_up:,} the device waits for the host "
        f"{percent(run.gaps_s, run.latency_s)} of the time"
    )


def _record(c: Crossing) -> dict[str, Any]:
    """`value` is null where none was found."""
    tried = _tried(c)
    return record(
        c.search,
        "value refused",
        **tried.context,
        host_bound_at=c.search.held_up,
        tried=tried,
    )
