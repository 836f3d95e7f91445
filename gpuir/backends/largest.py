"""What fits a device: the largest value of a dimension, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuir.backends.json_csv import memory_record
from gpuir.backends.structured import json_text, record
from gpuir.backends.terminal import Layout, Page, fits_text, memory_text
from gpuir.report.searches import LargestFit
from gpuir.report.units import quantity

SCHEMA = "gpuir.largest/1"


def largest_text(searches: Sequence[LargestFit], layout: Layout) -> str:
    """What fits and what its peak is made of, then every value that was tried, each device."""
    page = Page(layout.width, layout.color)
    for i, f in enumerate(searches):
        if i:
            page.line()
        title = f"{f.device.title} ({f.device.name})" if f.device.title else f.device.name
        page.heading(f"{f.model} on {title}: the largest {f.dim} that fits")
        page.line()
        page.wrapped(f.dim, _verdict(f))
        memory = f.search.tried[f.least if f.search.value is None else f.search.value]
        page.wrapped("memory", memory_text(memory))
        page.wrapped("fits", fits_text(memory))
        for a, b in f.search.shrinking:
            text = f"{b:,} takes less than {a:,}: a value beyond may fit too"
            page.wrapped("warning", text)
        page.line()
        columns = [(title, True) for title in (f.dim, "peak", "reserved", "to spare")]
        rows = [
            (
                f"{n:,}",
                *(quantity(x, "bytes") for x in (m.peak_bytes, m.reserved_bytes)),
                quantity(m.spare_bytes or 0, "bytes"),
            )
            for n, m in f.search.tried.items()
        ]
        page.table(columns, rows)
    return page.text()


def _verdict(f: LargestFit) -> str:
    value, impossible = f.search.value, f.search.impossible
    if value is None:
        return f"none: not even {f.least:,} fits"
    if impossible == value + 1:
        return f"{value:,}; the model takes no {impossible:,}: {f.refusal}"
    return f"{value:,}" + ("; no more were tried" if value == f.most else "")


def largest_json(searches: Sequence[LargestFit]) -> str:
    """`{"schema": "gpuir.largest/1", "fits": [...]}`, docs/reference/json-schema.md."""
    return json_text(SCHEMA, fits=[_record(f) for f in searches])


def _record(f: LargestFit) -> dict[str, Any]:
    return record(
        f,
        "model dim least most",
        target=f.device.name,
        largest=f.search.value,
        impossible=f.search.impossible,
        tried=[{"value": n, "memory": memory_record(m)} for n, m in f.search.tried.items()],
    )
