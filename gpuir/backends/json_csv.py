"""A run for programs: the fields of JSON as docs/reference/json-schema.md describes them, and a row
a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuir.backends.structured import record
from gpuir.report.answer import Answer
from gpuir.report.equal import tile_text
from gpuir.report.kernels import KernelRow, Total
from gpuir.report.modules import modules
from gpuir.report.table import Column, Table, fields

if TYPE_CHECKING:
    from gpuir.simulate.memory import Memory

TERMS = ("compute", "memory", "latency", "network")


def fields_of(s: Answer) -> dict[str, Any]:
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
        kernels=_kernels(s),
    )


def _total(total: Total) -> dict[str, Any]:
    names = "kind kernels launches time_s flops bytes dram_bytes"
    return record(total, names, bound_s=dict(total.bounds))


def memory_record(m: Memory) -> dict[str, Any]:
    return record(
        m,
        "peak_bytes parts allocator reserved_bytes available_bytes spare_bytes fits",
        peak_at={"path": m.peak.path, "locs": m.peak.locs},
        largest=m.largest[:20],
    )


def kernel_record(x: KernelRow) -> dict[str, Any]:
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


def _kernels(s: Answer) -> Table:
    """A row a kernel, in graph order; times in seconds, a column a fact."""

    def terms(x: KernelRow) -> dict[str, float]:
        return {f"{name}_s": x.cost.term(name) for name in TERMS}

    def facts(x: KernelRow) -> dict[str, Any]:
        return {f"fact_{name}": value for name, value in x.cost.facts}

    return Table(
        s.kernels,
        (
            Column(field="kernel", value="name"),
            Column(field="op", value="node.op.name"),
            *fields("shape"),
            Column(field="locs", value=lambda x: " + ".join(x.locs)),
            *fields("status runs launches time_s"),
            Column(field="interval_s", value="interval"),
            Column(field="time_each_s", value="cost.time_s"),
            *fields("bound by", "cost"),
            Column(field="unseen", value=lambda x: " ".join(x.cost.unseen)),
            *(Column(field=f"{n}_each", value=n) for n in ("flops", "bytes", "dram_bytes")),
            Column(field="tile", value=tile_text),
            Column(field="terms", value=terms, inline=True),
            Column(field="facts", value=facts, inline=True),
        ),
        {"model": s.model, "target": s.device.name, "profile": s.profile},
        nested=lambda: [kernel_record(x) for x in s.kernels],
    )
