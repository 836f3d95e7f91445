"""The report for programs: JSON as docs/reference/json-schema.md describes it, and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuir.backends import structured
from gpuir.backends.structured import record
from gpuir.backends.terminal import Layout, tile_text
from gpuir.report.answer import SCHEMA, Answer
from gpuir.report.kernels import Kernel, Total
from gpuir.report.modules import modules

if TYPE_CHECKING:
    from gpuir.simulate.memory import Memory

TERMS = ("compute", "memory", "latency", "network")
COLUMNS = (  # of CSV, before the facts
    *("model", "target", "profile", "kernel", "op", "shape", "locs", "status", "runs"),
    *("launches", "time_s", "low_s", "high_s", "time_each_s", "bound", "by", "unseen"),
    *("flops_each", "bytes_each", "dram_bytes_each", "tile", *(f"{name}_s" for name in TERMS)),
)


def json_text(summaries: Sequence[Answer], _: Layout) -> str:
    """`{"schema": "gpuir.report/2", "reports": [...]}`, a report a target."""
    return structured.json_text(SCHEMA, reports=[_report(s) for s in summaries])


def _report(s: Answer) -> dict[str, Any]:
    run = s.timeline
    return record(
        s,
        "model batch latency_s device_s certain_s unfitted_s unseen launches views flops bytes"
        " dram_bytes nodes assumed warnings",
        framework=s.graph.framework,
        target=record(s.device, "name title numbers"),
        predictors=s.by,
        tf32=s.tf32,
        profile=record(s.software, "name machine", title=s.stack, numbers=s.software.rows()),
        **record(run, "busy_s host_s gaps_s head_s tail_s copies_s"),
        host_bound=run.is_host_bound,
        gains=[record(x, "cause gain_s") for x in s.gains],
        critical=[record(x, "lane start_s end_s") for x in run.critical],
        interval_s=s.interval,
        idle_kernels=s.idle,
        bound_s=dict(s.bounds),
        totals=[_total(total) for total in s.totals],
        phases=[_total(total) for total in s.phases],
        modules=[_total(module.total) for module in modules(s.running)],
        memory=memory_record(s.memory),
        to_fit=[record(x, "change option spare_bytes") for x in s.to_fit],
        coverage={
            share.status: record(share, "nodes flops bytes time_s", what=dict(share.what))
            for share in s.coverage
        },
        folded_nodes=s.folded,
        kernels=[kernel_record(x) for x in s.kernels],
    )


def _total(total: Total) -> dict[str, Any]:
    names = "kind kernels launches time_s flops bytes dram_bytes"
    return record(total, names, bound_s=dict(total.bounds))


def memory_record(m: Memory) -> dict[str, Any]:
    return record(
        m,
        "peak_bytes parts allocator reserved_bytes available_bytes spare_bytes fits",
        peak_at={"path": m.peak.path, "locs": m.peak.node.locs if m.peak.node else ()},
        largest=m.largest[:20],
    )


def kernel_record(x: Kernel) -> dict[str, Any]:
    tile, cost = x.tile, x.cost
    return record(
        x,
        "path shape locs phase status runs launches rest time_s flops bytes dram_bytes",
        op=x.node.op.name,
        results=[str(v.type) for v in x.node.results],
        module=".".join(x.module),
        tile=tile and record(tile, "stages warps split", dims=dict(tile.dims)),
        cost=record(
            cost,
            "time_s bound by unseen",
            interval_s=cost.interval,
            terms_s=dict(cost.terms),
            facts=dict(cost.facts),
        ),
    )


def csv_text(summaries: Sequence[Answer], _: Layout) -> str:
    """A row a kernel, target and profile, in graph order; times in seconds, a column a fact."""
    rows = (_row(s, x) for s in summaries for x in s.kernels)
    return structured.csv_text(COLUMNS, rows)


def _row(s: Answer, x: Kernel) -> dict[str, Any]:
    cost = x.cost
    low, high = x.interval or (None, None)
    return record(
        x,
        "shape status runs launches time_s",
        model=s.model,
        target=s.device.name,
        profile=s.profile,
        kernel=x.name,
        op=x.node.op.name,
        locs=" + ".join(x.locs),
        low_s=low,
        high_s=high,
        time_each_s=cost.time_s,
        bound=cost.bound,
        by=cost.by,
        unseen=" ".join(cost.unseen),
        flops_each=x.flops,
        bytes_each=x.bytes,
        dram_bytes_each=x.dram_bytes,
        tile=tile_text(x),
        **{f"{name}_s": cost.term(name) for name in TERMS},
        **{f"fact_{name}": value for name, value in cost.facts},
    )
