"""From which size on a model is not held up by the host, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuir.backends.structured import json_text, record
from gpuir.backends.terminal import Layout, Page
from gpuir.report.searches import Crossing
from gpuir.report.units import percent, quantity

SCHEMA = "gpuir.crossover/1"


def crossing_text(crossings: Sequence[Crossing], layout: Layout) -> str:
    """The answer, and every value that was tried, of each run."""
    page = Page(layout.width, layout.color)
    for i, c in enumerate(crossings):
        if i:
            page.line()
        title = c.device.title or c.device.name
        page.heading(f"{c.model} on {title} under {c.profile.name}: {c.dim} and the host")
        page.line()
        page.wrapped(c.dim, verdict(c))
        page.line()
        titles = (c.dim, "latency", f"per {c.dim}", "busy", "waits", "waits for the host")
        rows = [
            (
                f"{n:,}",
                quantity(t.time_s, "s", 4),
                quantity(t.time_s / n, "s"),
                percent(t.busy_s, t.time_s),
                percent(t.gaps_s, t.time_s),
                quantity(t.gaps_s, "s"),
            )
            for n, t in c.search.tried.items()
        ]
        page.table([(title, True) for title in titles], rows, drop=("waits for the host",))
    return page.text()


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
    share = percent(run.gaps_s, run.time_s)
    return (
        f"not host-bound from {found.value:,} on; at {held_up:,} the device waits for the host "
        f"{share} of the time"
    )


def crossing_json(crossings: Sequence[Crossing]) -> str:
    """`{"schema": "gpuir.crossover/1", "runs": [...]}`; `value` is null where none was found."""
    return json_text(SCHEMA, runs=[_record(c) for c in crossings])


def _record(c: Crossing) -> dict[str, Any]:
    return record(
        c.search,
        "value refused",
        model=c.model,
        target=c.device.name,
        profile=c.profile.name,
        dim=c.dim,
        host_bound_at=c.search.held_up,
        tried=[
            record(x, "busy_s gaps_s", value=n, latency_s=x.time_s, host_bound=x.is_host_bound)
            for n, x in c.search.tried.items()
        ],
    )
