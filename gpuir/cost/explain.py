"""Every quantity behind a kernel's predicted time, as a line a reader can recompute.

The lines are a view of the same `Estimate` that the predictor makes its `Cost` from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

from gpuir.cost import tile as model
from gpuir.cost.nest import OWN_REGISTERS, Nest, Tiles, Work, operand_names, work_of
from gpuir.cost.tile import Estimate, estimate, rates
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Cost, Tile
from gpuir.ops import kernel as k
from gpuir.targets.target import Target


@dataclass(frozen=True)
class Line:
    """One quantity: `formula` is arithmetic with its numbers filled in, in Python's notation, which
    gives `value`; `source` says where a number that is not computed comes from."""

    name: str
    value: float
    unit: str
    formula: str = ""
    source: str = ""

    def __str__(self) -> str:
        formula = f" = {self.formula}" if self.formula else ""
        source = f"  [{self.source}]" if self.source else ""
        return f"{self.name}: {number(self.value)} {self.unit}{formula}{source}".rstrip()


def number(value: Any) -> str:
    """A number as formulas show it: whole, or to seven significant digits."""
    value = float(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.7g}"


def terms(
    op: k.KernelOp,
    tile: Tile | None,
    target: Target,
    *,
    predictor: str = "tile",
    tf32: bool = False,
) -> tuple[Line, ...]:
    """The lines behind the cost of a kernel by `tile` or `roofline`, in the order that one leads to
    the next; the last is the total."""
    match predictor.partition("@")[0]:
        case "tile":
            if tile is None:
                raise UsageError(f"{op.name} has no tile", fix="run the tile pass first")
            lines = _tile_lines(op, tile, target, tf32)
        case "roofline":
            lines = _roofline_lines(op, target, tf32)
        case other:
            raise UsageError(
                f"the predictor {other!r} does not explain itself", expected="tile or roofline"
            )
    return tuple(replace(line, value=float(line.value)) for line in lines)


def explained(
    op: k.KernelOp, tile: Tile | None, target: Target, cost: Cost, *, tf32: bool = False
) -> tuple[Line, ...]:
    """The lines behind a cost, where its predictor is ours and they lead to it; else (a plug-in's,
    or another version's) what the cost states of itself."""
    name = cost.by.partition("@")[0]
    if name == "roofline" or (name == "tile" and tile is not None):
        lines = terms(op, tile, target, predictor=name, tf32=tf32)
        if isclose(lines[-1].value, cost.time_s, rel_tol=1e-9):
            return lines
    source = f"as {cost.by} says"
    return (
        *(Line(name.replace("_", " "), value, "", source=source) for name, value in cost.facts),
        *(Line(name, value, "s", source=source) for name, value in cost.terms),
        Line("time", cost.time_s, "s", source=source),
    )


def _roofline_lines(op: k.KernelOp, target: Target, tf32: bool) -> tuple[Line, ...]:
    work = work_of(op, tf32)
    flops = (work.products or work.flops) * work.visible
    peak = target.peak(work.pipe, work.dtype, tf32=tf32)
    rule = target.peak_rule(work.pipe, work.dtype, tf32=tf32)
    compute, memory = flops / peak, work.nbytes / target.dram_bytes_per_s
    total = max(compute, memory) + target.launch_s
    return (
        Line("flops", flops, "flop", source=f"as {op.name} counts them"),
        Line("peak", peak, "flop/s", source=_peak_source(target, rule)),
        Line("compute", compute, "s", _f("{} / {}", flops, peak)),
        *_operand_lines(op, work),
        Line("bytes", work.nbytes, "bytes", _sum(o.nbytes for o in work.operands)),
        Line(
            "dram bandwidth",
            target.dram_bytes_per_s,
            "bytes/s",
            source=_of(target, "dram.bytes_per_s"),
        ),
        Line("memory", memory, "s", _f("{} / {}", work.nbytes, target.dram_bytes_per_s)),
        Line("launch", target.launch_s, "s", source=_of(target, "launch_s")),
        Line("time", total, "s", _f("max({}, {}) + {}", compute, memory, target.launch_s)),
    )


def _tile_lines(op: k.KernelOp, cut: Tile, target: Target, tf32: bool) -> tuple[Line, ...]:
    work = work_of(op, tf32)
    e = estimate(work, Tiles.of(cut, work), target, rates(work, target, tf32))
    return (
        *_work_lines(op, e),
        *_nest_lines(e.nest, target),
        *_compute_lines(e, target),
        *_memory_lines(e, target),
        *_latency_lines(e, target),
        Line(
            "time",
            e.time_s,
            "s",
            _f("max({}, {}) + {}", e.compute_s, e.memory_s, e.latency_s),
        ),
    )


def _work_lines(op: k.KernelOp, e: Estimate) -> list[Line]:
    work = e.nest.work
    lines = [Line("flops", work.flops, "flop", source=f"as {op.name} counts them")]
    if work.products:
        per_point = work.products / max(work.points, 1)
        lines.append(
            Line(
                "products",
                work.products,
                "flop",
                " * ".join([number(per_point), *(str(n) for _, n in work.dims)]),
                f"per point of {', '.join(d for d, _ in work.dims)}",
            )
        )
    if work.visible != 1:
        lines.append(Line("visible", work.visible, "", source="share that the mask leaves"))
    lines.append(
        Line("lane instructions", work.lane_ops, "", source="cost.nest.LANE_OPS over the body")
    )
    return [*lines, *_operand_lines(op, work)]


def _operand_lines(op: k.KernelOp, work: Work) -> list[Line]:
    lines: list[Line] = []
    for name, o in zip(operand_names(op), work.operands, strict=False):
        cells = o.nbytes / o.cell_bytes if o.cell_bytes else 0
        formula = _f("{} * {}", cells, o.cell_bytes)
        lines.append(Line(f"bytes of {name}", o.nbytes, "bytes", formula, f"{o.role}, moved once"))
    return lines


def _nest_lines(n: Nest, target: Target) -> list[Line]:
    work, tiles, sm = n.work, n.tiles, target.sm

    def pieces(d: str) -> str:
        return f"ceil({work.extents[d]} / {number(tiles.dims[d])})"

    blocks = " * ".join([*map(pieces, work.grid), number(tiles.split)])
    steps = [f"ceil({pieces(d)} / {number(tiles.split)})" for d in work.reduced]
    padding = _f("{} / ({} * {} * {})", work.points, n.step_points, n.steps, n.blocks)
    registers = _f("ceil(({} / {} + {}) / 8) * 8", n.accumulators, n.threads, OWN_REGISTERS)
    smem = _f("{} * {} + {}", tiles.stages, n.stage_bytes, n.held_bytes)
    limits = ", ".join(number(v) for v in n.limits.values())
    limiter = min(n.limits, key=lambda what: float(n.limits[what]))
    by = f"by {', '.join(n.limits)}; the least is {limiter}"
    waves = _f("{} / ({} * {})", n.blocks, target.sms, n.resident)
    tail = _f("{} / ({} * {})", n.blocks, n.load, target.sms)
    return [
        Line("blocks", n.blocks, "", blocks, "tiles of the grid, times split"),
        Line("steps a block", n.steps, "", "".join(steps) or "1"),
        Line(
            "points a step", n.step_points, "", " * ".join(number(v) for v in tiles.dims.values())
        ),
        Line("padding: used share of the tiles", n.padding, "", padding),
        Line("threads a block", n.threads, "", _f("{} * {}", tiles.warps, sm.warp)),
        Line("registers a thread", n.registers, "", registers, "cost.nest.OWN_REGISTERS"),
        Line("shared memory a block", n.smem_bytes, "bytes", smem if work.is_contraction else ""),
        Line("blocks an SM holds", n.resident, "", f"max(1, min({limits}))", by),
        Line("waves", n.waves, "", waves),
        Line("blocks of the busiest SM", n.load, "", _f("ceil({} / {})", n.blocks, target.sms)),
        Line("tail: used share of SM time", n.tail, "", tail),
    ]


def _compute_lines(e: Estimate, target: Target) -> list[Line]:
    n, r, work, sms = e.nest, e.rates, e.nest.work, target.sms
    per_point = work.products / max(work.points, 1) * work.visible
    power = _f("min(1, {} / {})", r.power.available_w, r.power.watts) if r.power.watts else "1"
    lines = [
        Line("peak", r.peak, "flop/s", "", _peak_source(target, r.rule)),
        Line("power share", r.power.share, "", power, "watts there are and take: cost.power"),
    ]
    if work.products:
        rate, share = r.issued, r.issued / r.peak
        name = "TENSOR_SHARE" if r.on_tensor else "LANE_SHARE"
        flops = per_point * n.step_points
        products = _f("{} * {} / ({} / {})", flops, e.issue, rate, sms)
        smem = _f("{} / ({} / {})", e.smem_bytes, r.smem_bytes_per_s, sms)
        lines += [
            Line("flops of a step", flops, "flop", _f("{} * {}", per_point, n.step_points)),
            Line("inner-loop rate", rate, "flop/s", _f("{} * {}", r.peak, share), _const(name)),
            Line(
                "issue slots a multiply-add", e.issue, "", _issue(e, target), _const("LOAD_SLOTS")
            ),
            Line("products of a step", e.product_s, "s", products),
            Line("shared memory of a step", e.smem_s, "s", smem, "in, and out to the matrix units"),
        ]
    lanes = _f("{} / ({} * {}) / ({} / {})", work.lane_ops, n.blocks, n.steps, r.lanes, sms)
    fed = _f("{} * {} * {} * {}", per_point, n.step_points, n.steps, n.blocks)
    compute = _f("max({} * {} * {}, {})", n.steps, n.load, e.step_s, e.power_s)
    return [
        *lines,
        Line("lanes of a step", e.lane_s, "s", lanes, _peak_source(target, "vector.f32")),
        Line("step", e.step_s, "s", _f("max({}, {}) + {}", e.product_s, e.smem_s, e.lane_s)),
        Line("power bound", e.power_s, "s", f"{fed} / {number(r.powered)}", "peak * power share"),
        Line("compute", e.compute_s, "s", compute, "steps * blocks of the busiest SM * step"),
    ]


def _issue(e: Estimate, target: Target) -> str:
    if e.rates.on_tensor:
        return "1"
    m, n = (e.nest.tiles.dims[d] for d in e.nest.work.face)
    cells = _f("max({} * {} / {}, 1)", m, n, e.nest.threads)
    inner = f"(1 + {model.ISSUE_OVERHEAD} + 0.5 / ({cells}) ** 0.5) * {target.sm.fp32_lanes} / 128"
    return f"max(1, {inner}) + " + _f("{} * (1 / {} + 1 / {})", model.LOAD_SLOTS, m, n)


def _memory_lines(e: Estimate, target: Target) -> list[Line]:
    n, r = e.nest, e.rates
    times = zip(n.work.operands, n.reads_again, strict=True)
    dram = " + ".join([*(_f("{} * {}", o.nbytes, t) for o, t in times), number(n.split_dram_bytes)])
    dram_share = model.dram_share(n.work, target)
    active = min(1.0, float(n.blocks) / target.sms)
    dram_rate = _f("{} * {}", target.dram_bytes_per_s, dram_share)
    l2_rate = _f("{} * {}", target.l2_bytes_per_s, model.L2_RATE_SHARE)
    l2 = _f("{} / ({} * {})", n.l2_bytes, r.l2_bytes_per_s, active)
    listed, l2_listed = _of(target, "dram.bytes_per_s"), _of(target, "l2.bytes_per_s")
    each = _sum([*n.l2_each, n.split_bytes])
    return [
        Line("dram bytes", n.dram_bytes, "bytes", dram, "operands, times read; split sums"),
        Line("dram rate", r.dram_bytes_per_s, "bytes/s", dram_rate, f"{listed}; cost.tile"),
        Line("dram time", e.dram_s, "s", _f("{} / {}", n.dram_bytes, r.dram_bytes_per_s)),
        Line("l2 bytes", n.l2_bytes, "bytes", each, "operands through the L2; split sums"),
        Line("l2 rate", r.l2_bytes_per_s, "bytes/s", l2_rate, f"{l2_listed}; cost.tile"),
        Line("l2 time", e.l2_s, "s", l2, "rate times the share of SMs that have a block"),
        Line("memory", e.memory_s, "s", _f("max({}, {})", e.dram_s, e.l2_s)),
    ]


def _latency_lines(e: Estimate, target: Target) -> list[Line]:
    n, r = e.nest, e.rates
    load = _f("{} / {}", model.LATENCY_CLOCKS, target.clock_hz)
    fill = _f("{} / {}", model.FILL_CLOCKS, target.clock_hz)
    wait = _f("({} + {}) / {}", r.latency_s, e.step_s, n.tiles.stages)
    rounds, rest = divmod(float(n.load), float(n.resident))
    full = _f("{} * max({} * {}, {})", rounds, n.resident, e.step_s, e.wait_s)
    last = _f(" + max({} * {}, {})", rest, e.step_s, e.wait_s) if rest else ""
    fills = _f("{} * (ceil({} / {}) - 1)", r.fill_s, n.load, n.resident)
    busy = f"{number(n.steps)} * ({full}{last}) + {fills}"
    exposed = _f("max({} - max({}, {}), 0)", e.busy_s, e.compute_s, e.memory_s)
    total = _sum([e.exposed_s, e.split_s, r.launch_s])
    return [
        Line("load latency", r.latency_s, "s", load, _const("LATENCY_CLOCKS")),
        Line("fill of a block", r.fill_s, "s", fill, _const("FILL_CLOCKS")),
        Line("wait of a block for its next step", e.wait_s, "s", wait, "(latency + step) / stages"),
        Line("busy", e.busy_s, "s", busy, "rounds of resident blocks, fills between"),
        Line("exposed", e.exposed_s, "s", exposed, "what arithmetic and memory do not cover"),
        Line("split", e.split_s, "s", "", _const("SPLIT_S") + ", where a sum is split"),
        Line("launch", r.launch_s, "s", "", _of(target, "launch_s")),
        Line("latency", e.latency_s, "s", total),
    ]


def _const(name: str) -> str:
    return f"cost.tile.{name}"


def _f(form: str, *values: Any) -> str:
    return form.format(*map(number, values))


def _sum(values: Iterable[Any]) -> str:
    return " + ".join(map(number, values)) or "0"


def _of(target: Target, field: str) -> str:
    return f"{target.name} {field}: {target.source(field) or 'no source given'}"


def _peak_source(target: Target, rule: str) -> str:
    field = f"flops_per_s.{rule.split(' ')[0]}"
    return f"{target.name} {rule}: {target.source(field) or 'no source given'}"
