"""What fusing saves: each launch that stands for several, beside those it replaces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpuir.backends.terminal import Layout, Page
from gpuir.backends.units import percent, quantity
from gpuir.report.equal import pattern
from gpuir.report.find import node_name
from gpuir.report.fusions import Fusion, alike_fusions, fusions
from gpuir.report.summary import Summary


def fusions_text(fused: Summary, unfused: Summary, layout: Layout) -> str:
    """A line for each fusion, those that are alike together, and what all of them save."""
    page = Page(layout.width, layout.color)
    groups = alike_fusions(fusions(fused, unfused))
    title = fused.device.title or fused.device.name
    page.heading(f"{fused.model} on {title} under {fused.profile.name}: what fusing saves")
    page.line()
    for label, before, after in (
        ("launches", f"{unfused.launches:,}", f"{fused.launches:,}"),
        ("device", quantity(unfused.device_s, "s"), quantity(fused.device_s, "s")),
        ("bytes", quantity(_bytes(unfused), "bytes"), quantity(_bytes(fused), "bytes")),
        ("latency", quantity(unfused.latency_s, "s"), quantity(fused.latency_s, "s")),
    ):
        page.wrapped(label, f"{before} op by op, {after} fused")
    page.line()
    if not groups:
        page.line("No launch stands for several.")
        return page.text()
    columns = [
        *((title, True) for title in ("saved", "share", "bytes", "runs", "launches", "fused")),
        ("of", True),
        ("kernel", False),
        ("stands for", False),
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
        "saved: time on the device; bytes: of operands and results that kernels do not read and "
        "write any more; launches: of the model's nodes one by one; fused, of: what the kernel "
        "takes, and what they took.",
        0,
    )
    return page.text()


def fusions_json(fused: Summary, unfused: Summary) -> str:
    """`{"schema": "gpuir.fusions/1", ...}`, a record a fused kernel."""
    record = {
        "schema": "gpuir.fusions/1",
        "model": fused.model,
        "target": fused.device.name,
        "profile": fused.profile.name,
        "fused": _whole(fused),
        "unfused": _whole(unfused),
        "fusions": [_record(f) for f in fusions(fused, unfused)],
    }
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def _bytes(s: Summary) -> int:
    """What all kernels read and write."""
    return sum(x.runs * x.bytes for x in s.kernels)


def _whole(s: Summary) -> dict[str, Any]:
    return {
        "launches": s.launches,
        "latency_s": s.latency_s,
        "device_s": s.device_s,
        "bytes": _bytes(s),
    }


def _record(f: Fusion) -> dict[str, Any]:
    return {
        "path": f.fused.path,
        "op": f.fused.node.op.name,
        "locs": f.fused.locs,
        "launches": f.launches,
        "saved_s": f.time_s,
        "saved_bytes": f.bytes,
        "fused_s": f.fused.time_s,
        "fused_bytes": f.fused.runs * f.fused.bytes,
        "parts": [
            {"path": x.path, "op": x.node.op.name, "time_s": x.time_s, "bytes": x.runs * x.bytes}
            for x in f.parts
        ],
    }


def _row(group: Sequence[Fusion], unfused: Summary) -> tuple[str, ...]:
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
