"""The report for programs: JSON as docs/json-schema.md describes it, and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from gpuir.backends.terminal import Layout, printable, tile_text
from gpuir.report.modules import module_of, modules
from gpuir.report.summary import SCHEMA, Kernel, Summary, Total, totals

if TYPE_CHECKING:
    from gpuir.simulate.memory import Memory

FORMULA = ("=", "+", "-", "@")  # and tabs and returns, which are no more here


def json_text(summaries: Sequence[Summary], _: Layout) -> str:
    """`{"schema": "gpuir.report/2", "reports": [...]}`, a report a target."""
    report = {"schema": SCHEMA, "reports": [_report(s) for s in summaries]}
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def _report(s: Summary) -> dict[str, Any]:
    running = [x for x in s.kernels if x.runs]
    return {
        "model": s.model,
        "framework": s.graph.framework,
        "target": {
            "name": s.device.name,
            "title": s.device.title,
            "numbers": [
                {"field": n.field, "value": n.value, "unit": n.unit, "source": n.source}
                for n in s.device.numbers
            ],
        },
        "predictors": s.by,
        "tf32": s.graph.tf32,
        "batch": s.batch,
        "profile": {
            "name": s.profile.name,
            "title": s.profile.title,
            "numbers": [n._asdict() for n in s.profile.rows()],
        },
        "latency_s": s.latency_s,
        "device_s": s.device_s,
        "busy_s": s.timeline.busy_s,
        "host_s": s.timeline.host_s,
        "gaps_s": s.timeline.gaps_s,
        "head_s": s.timeline.head_s,
        "tail_s": s.timeline.tail_s,
        "copies_s": s.timeline.copies_s,
        "host_bound": s.timeline.is_host_bound,
        "critical": [
            {"lane": x.lane, "start_s": x.start_s, "end_s": x.end_s} for x in s.timeline.critical
        ],
        "interval_s": s.interval,
        "certain_s": s.certain_s,
        "unfitted_s": s.unfitted_s,
        "unseen": [{"what": u.what, "kinds": u.kinds, "time_s": u.time_s} for u in s.unseen],
        "launches": s.launches,
        "views": s.views,
        "idle_kernels": s.idle,
        "flops": s.flops,
        "bytes": s.bytes,
        "dram_bytes": s.dram_bytes,
        "bound_s": dict(s.bounds),
        "totals": [_total(total) for total in s.totals],
        "phases": [_total(total) for total in totals(running, lambda x: x.phase)],
        "modules": [_total(module.total) for module in modules(running)],
        "memory": memory_record(s.memory),
        "coverage": {
            share.status: {
                "nodes": share.nodes,
                "flops": share.flops,
                "bytes": share.bytes,
                "time_s": share.time_s,
                "what": dict(share.what),
            }
            for share in s.coverage
        },
        "nodes": s.nodes,
        "folded_nodes": s.folded,
        "assumed": s.assumed,
        "warnings": s.warnings,
        "kernels": [kernel_record(x) for x in s.kernels],
    }


def _total(total: Total) -> dict[str, Any]:
    return {
        "kind": total.kind,
        "kernels": total.kernels,
        "launches": total.launches,
        "time_s": total.time_s,
        "flops": total.flops,
        "bytes": total.bytes,
        "dram_bytes": total.dram_bytes,
        "bound_s": dict(total.bounds),
    }


def memory_record(m: Memory) -> dict[str, Any]:
    return {
        "peak_bytes": m.peak_bytes,
        "parts": m.parts,
        "peak_at": {"path": m.peak.path, "locs": m.peak.node.locs if m.peak.node else ()},
        "reserved_bytes": m.reserved_bytes,
        "available_bytes": m.available_bytes,
        "spare_bytes": m.spare_bytes,
        "fits": m.fits,
        "largest": [h._asdict() for h in m.largest[:20]],
    }


def kernel_record(x: Kernel) -> dict[str, Any]:
    return {
        "path": x.path,
        "op": x.node.op.name,
        "shape": x.shape,
        "results": [str(v.type) for v in x.node.results],
        "locs": x.locs,
        "module": ".".join(module_of(x.anchor)) if x.locs else "",
        "phase": x.phase,
        "status": x.status,
        "runs": x.runs,
        "launches": x.launches,
        "rest": x.rest,
        "time_s": x.time_s,
        "flops": x.flops,
        "bytes": x.bytes,
        "dram_bytes": x.dram_bytes,
        "tile": x.tile
        and {
            "dims": dict(x.tile.dims),
            "stages": x.tile.stages,
            "warps": x.tile.warps,
            "split": x.tile.split,
        },
        "cost": {
            "time_s": x.cost.time_s,
            "bound": x.cost.bound,
            "by": x.cost.by,
            "interval_s": x.cost.interval,
            "unseen": x.cost.unseen,
            "terms_s": dict(x.cost.terms),
            "facts": dict(x.cost.facts),
        },
    }


def csv_text(summaries: Sequence[Summary], _: Layout) -> str:
    """A row a kernel, target and profile, in graph order; times in seconds, a column a fact."""
    facts = dict.fromkeys(name for s in summaries for x in s.kernels for name, _ in x.cost.facts)
    titles = ["model", "target", "profile", "kernel", "op", "shape", "locs", "status", "runs"]
    titles += ["launches", "time_s", "low_s", "high_s", "time_each_s", "bound", "by", "unseen"]
    titles += ["flops_each", "bytes_each", "dram_bytes_each", "tile"]
    titles += [f"{name}_s" for name in ("compute", "memory", "latency")]
    titles += [f"fact_{name}" for name in facts]
    rows = (
        [s.model, s.device.name, s.profile.name, x.name, x.node.op.name, x.shape]
        + [" + ".join(x.locs), x.status, x.runs, x.launches]
        + [x.time_s, *(x.interval or (None, None))]
        + [x.cost.time_s, x.cost.bound, x.cost.by, " ".join(x.cost.unseen)]
        + [x.flops, x.bytes, x.dram_bytes, tile_text(x)]
        + [x.cost.term(name) for name in ("compute", "memory", "latency")]
        + [x.cost.fact(name) for name in facts]
        for s in summaries
        for x in s.kernels
    )
    return "".join(map(csv_line, (titles, *rows)))


def csv_line(cells: Sequence[object]) -> str:
    """One row. What cannot be seen becomes `?`, and a word that a spreadsheet would take for a
    formula gets an apostrophe before it, as OWASP's "CSV Injection" advises."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerow(map(_cell, cells))
    return out.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(FORMULA) else text
