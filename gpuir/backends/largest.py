"""What fits a device: the largest value of a dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuir.backends.analysis import fits_text, memory_text
from gpuir.backends.json_csv import memory_record
from gpuir.backends.structured import record
from gpuir.plan.searches import LargestFit
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table


def largest_report(searches: Sequence[LargestFit]) -> Report:
    """What fits and what its peak is made of, then every value that was tried, each device."""
    return Report(
        "gpuir.largest/1",
        lambda: (part for f in searches for part in _parts(f)),
        lambda: {"fits": [_record(f) for f in searches]},
    )


def _parts(f: LargestFit) -> Iterator[Part]:
    title = f"{f.device.title} ({f.device.name})" if f.device.title else f.device.name
    yield Heading(f"{f.model} on {title}: the largest {f.dim} that fits")
    memory = f.search.tried[f.least if f.search.value is None else f.search.value]
    yield Notes(
        [
            (f.dim, _verdict(f)),
            ("memory", memory_text(memory)),
            ("fits", fits_text(memory)),
            *(
                ("warning", f"{b:,} takes less than {a:,}: a value beyond may fit too")
                for a, b in f.search.shrinking
            ),
        ]
    )
    yield _tried(f)


def _tried(f: LargestFit) -> Table:
    return Table(
        list(f.search.tried.items()),
        (
            Column(f.dim, "count", "value", lambda x: x[0]),
            Column("peak", "bytes", "", lambda x: x[1].peak_bytes),
            Column("reserved", "bytes", "", lambda x: x[1].reserved_bytes),
            Column("to spare", "bytes", "", lambda x: x[1].spare_bytes or 0),
            Column(field="memory", value=lambda x: memory_record(x[1]), inline=True),
        ),
        {"model": f.model, "target": f.device.name, "dim": f.dim},
    )


def _verdict(f: LargestFit) -> str:
    value, impossible = f.search.value, f.search.impossible
    if value is None:
        return f"none: not even {f.least:,} fits"
    if impossible == value + 1:
        return f"{value:,}; the model takes no {impossible:,}: {f.refusal}"
    return f"{value:,}" + ("; no more were tried" if value == f.most else "")


def _record(f: LargestFit) -> dict[str, Any]:
    return record(
        f,
        "model dim least most",
        target=f.device.name,
        largest=f.search.value,
        impossible=f.search.impossible,
        tried=_tried(f),
    )
