"""What fusing saves: each launch that stands for several, beside those it replaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuir.backends.structured import record
from gpuir.report.answer import Answer
from gpuir.report.equal import pattern
from gpuir.report.fusions import FusedKernel, alike_fusions, fusions
from gpuir.report.names import node_name
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import quantity, share


def fusions_report(fused: Answer, unfused: Answer, top: int = 15) -> Report:
    """A line for each fusion, those that are alike together, and what all of them save. Programs
    have each fused kernel."""
    names = "launches latency_s device_s bytes"
    context = {"model": fused.model, "target": fused.device.name, "profile": fused.profile}
    each = Table(fusions(fused, unfused), COLUMNS, context)
    return Report(
        "gpuir.fusions/1",
        lambda: _parts(fused, unfused, each.rows, top),
        lambda: {
            **context,
            "fused": record(fused, names),
            "unfused": record(unfused, names),
            "fusions": each,
        },
    )


LEGEND = (
    "saved: time on the device; bytes: operands and results that kernels no longer read and write;"
    " launches: of the model nodes, one by one; fused: time of the kernel; of: time of the launches"
    " that it replaces."
)


def _parts(fused: Answer, unfused: Answer, each: Sequence[FusedKernel], top: int) -> Iterator[Part]:
    title = fused.device.title or fused.device.name
    yield Heading(f"{fused.model} on {title} under {fused.profile}: what fusing saves")
    both = (
        ("launches", *(f"{s.launches:,}" for s in (unfused, fused))),
        ("device", *(quantity(s.device_s, "s") for s in (unfused, fused))),
        ("bytes", *(quantity(s.bytes, "bytes") for s in (unfused, fused))),
        ("latency", *(quantity(s.latency_s, "s") for s in (unfused, fused))),
    )
    yield Notes([(name, f"{a} op by op, {b} fused") for name, a, b in both])
    if not each:
        yield Notes([("", "Every launch runs one model node, so fusing saves nothing.")], 0)
        return
    groups = alike_fusions(each)
    rest = groups[top:]
    saved = quantity(sum(map(_saved_s, rest)), "s")
    yield Table(
        groups,
        (
            Column("saved", "s", value=_saved_s),
            Column("share", "%", value=lambda g: share(_saved_s(g), unfused.device_s), drop=1),
            Column("bytes", "bytes", value=lambda g: sum(f.bytes for f in g)),
            Column("runs", "x", value=len, drop=2),
            Column("launches", "count", text=lambda g: f"{g[0].launches} to {g[0].fused.launches}"),
            Column("fused", "s", value=lambda g: g[0].fused.time_s),
            Column("of", "s", value=lambda g: g[0].fused.time_s + g[0].time_s, drop=3),
            Column("kernel", value=lambda g: g[0].fused.kind),
            Column("computes", value=lambda g: " + ".join(_names(g))),
        ),
        top=top,
        more=(f"{sum(map(len, rest))} more save {saved}: see --top",) * bool(rest),
    )
    yield Notes([("", LEGEND)], 0)


def _saved_s(group: Sequence[FusedKernel]) -> float:
    return sum(f.time_s for f in group)


def _part(x: Any) -> dict[str, Any]:
    return record(x, "path time_s", op=x.node.op.name, bytes=x.runs * x.bytes)


COLUMNS = (
    *fields("path locs", "fused"),
    Column(field="op", value="fused.node.op.name"),
    *fields("launches"),
    Column(field="saved_s", value="time_s"),
    Column(field="saved_bytes", value="bytes"),
    Column(field="fused_s", value="fused.time_s"),
    Column(field="fused_bytes", value=lambda f: f.fused.runs * f.fused.bytes),
    Column(field="parts", value=lambda f: list(map(_part, f.parts))),
)


def _names(group: Sequence[FusedKernel]) -> list[str]:
    """The model nodes of the parts, what layers share said once."""
    parts = zip(*([node_name(x.anchor) for x in f.parts] for f in group), strict=True)
    return list(dict.fromkeys(pattern(list(names)) for names in parts))
