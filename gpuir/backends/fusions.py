"""What fusing saves: each launch that stands for several, beside those it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuir.backends.structured import json_text, record
from gpuir.backends.terminal import Layout, Page
from gpuir.report.answer import Answer
from gpuir.report.equal import pattern
from gpuir.report.fusions import Fusion, alike_fusions, fusions
from gpuir.report.names import node_name
from gpuir.report.units import percent, quantity


def fusions_text(fused: Answer, unfused: Answer, layout: Layout) -> str:
    """A line for each fusion, those that are alike together, and what all of them save."""
    page = Page(layout.width, layout.color)
    groups = alike_fusions(fusions(fused, unfused))
    title = fused.device.title or fused.device.name
    page.heading(f"{fused.model} on {title} under {fused.profile}: what fusing saves")
    page.line()
    for label, before, after in (
        ("launches", f"{unfused.launches:,}", f"{fused.launches:,}"),
        ("device", quantity(unfused.device_s, "s"), quantity(fused.device_s, "s")),
        ("bytes", quantity(unfused.bytes, "bytes"), quantity(fused.bytes, "bytes")),
        ("latency", quantity(unfused.latency_s, "s"), quantity(fused.latency_s, "s")),
    ):
        page.wrapped(label, f"{before} op by op, {after} fused")
    page.line()
    if not groups:
        page.line("Every launch runs one model node, so fusing saves nothing.")
        return page.text()
    columns = [
        *((title, True) for title in ("saved", "share", "bytes", "runs", "launches", "fused")),
        ("of", True),
        ("kernel", False),
        ("computes", False),
    ]
    shown = groups[: layout.top]
    page.table(columns, [_row(g, unfused) for g in shown], drop=("share", "runs", "of"))
    rest = groups[layout.top :]
    if rest:
        saved = quantity(sum(f.time_s for g in rest for f in g), "s")
        page.line(f"{sum(map(len, rest))} more save {saved}: see --top")
    page.line()
    page.wrapped(
        "",
        "saved: time on the device; bytes: operands and results that kernels no longer read and "
        "write; launches: of the model nodes, one by one; fused: time of the kernel; of: time of "
        "the launches that it replaces.",
        0,
    )
    return page.text()


def fusions_json(fused: Answer, unfused: Answer) -> str:
    """`{"schema": "gpuir.fusions/1", ...}`, a record a fused kernel."""
    names = "launches latency_s device_s bytes"
    return json_text(
        "gpuir.fusions/1",
        model=fused.model,
        target=fused.device.name,
        profile=fused.profile,
        fused=record(fused, names),
        unfused=record(unfused, names),
        fusions=[_record(f) for f in fusions(fused, unfused)],
    )


def _record(f: Fusion) -> dict[str, Any]:
    x = f.fused
    return record(
        x,
        "path locs",
        op=x.node.op.name,
        launches=f.launches,
        saved_s=f.time_s,
        saved_bytes=f.bytes,
        fused_s=x.time_s,
        fused_bytes=x.runs * x.bytes,
        parts=[
            record(part, "path time_s", op=part.node.op.name, bytes=part.runs * part.bytes)
            for part in f.parts
        ],
    )


def _row(group: Sequence[Fusion], unfused: Answer) -> tuple[str, ...]:
    saved = sum(f.time_s for f in group)
    one = group[0]
    return (
        quantity(saved, "s"),
        percent(saved, unfused.device_s),
        quantity(sum(f.bytes for f in group), "bytes"),
        f"x{len(group)}" if len(group) > 1 else "",
        f"{one.launches} to {one.fused.launches}",
        quantity(one.fused.time_s, "s"),
        quantity(one.fused.time_s + one.time_s, "s"),
        one.fused.kind,
        " + ".join(_names(group)),
    )


def _names(group: Sequence[Fusion]) -> list[str]:
    """The model nodes of the parts, what layers share said once."""
    parts = zip(*([node_name(x.anchor) for x in f.parts] for f in group), strict=True)
    return list(dict.fromkeys(pattern(list(names)) for names in parts))
