"""A sweep for people and for programs: tables, CSV, JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpuir.backends.structured import csv_text, json_text, record
from gpuir.backends.terminal import Layout, Page, to_fit_text
from gpuir.plan.sweep import Dims, Point, Series, Sweep
from gpuir.report.units import percent, quantity, rate

SCHEMA = "gpuir.sweep/1"
DETAILED = 6  # series, up to which each has a table of its own


def sweep_text(s: Sweep, layout: Layout) -> str:
    """A table each for a few series, one line each for many, and who wins."""
    page = Page(layout.width, layout.color)
    if (p := s.nearest) is not None:
        short = quantity(p.reserved_bytes - p.available_bytes, "bytes")
        page.heading(f"nothing fits: the nearest is {_where(s, p)}, {short} short")
        page.wrapped("to fit", to_fit_text(s.to_fit))
        page.line()
    if len(s.series) <= DETAILED:
        for series in s.series:
            _series(s, series, page)
    else:
        _overview(s, page)
    _verdict(s, page)
    return page.text()


# ---------------------------------------------------------------------------- tables


def _series(s: Sweep, series: Series, page: Page) -> None:
    price = dict(s.prices).get(series.target)
    page.heading(f"{s.model} on {_name(series)}")
    if price:
        page.line(f"{usd(price.usd_per_hour)} an hour ({price})", "dim")
    page.line()
    columns = [(t, True) for t in (series.dim, "latency", f"{unit(s)}/s")]
    columns += [(f"x {series.dim}", True)] if series.counts_sizes else []
    columns += [("device", True), ("memory", True)]
    columns += [(f"per million {unit(s)}", True)] if price else []
    columns.append(("", False))
    rows: list[list[str]] = []
    for p in series.points:
        row = [
            f"{series.size(p):,}",
            quantity(p.latency_s, "s"),
            rate(p.items_per_s),
        ]
        row += [rate(series.rate(p))] if series.counts_sizes else []
        row += [percent(p.device_s, p.latency_s), quantity(p.reserved_bytes, "bytes")]
        row += [usd(p.usd_per_million or 0)] if price else []
        rows.append([*row, ", ".join(_notes(s, series, p))])
    page.table(columns, rows, drop=("device", "memory"))
    page.line()


def _notes(s: Sweep, series: Series, p: Point) -> Iterable[str]:
    """What there is to say of one size."""
    if p is series.best:
        yield "best"
    for a, b in series.cliffs:
        if b is p:
            yield f"{percent(series.lost(a, b))} slower than {series.size(a):,}"
    if p.is_host_bound:
        yield "waits for the host"
    if not p.fits:
        yield "does not fit"


def _overview(s: Sweep, page: Page) -> None:
    """A line a series, the fastest first."""
    found = sorted(s.series, key=lambda x: -x.best.items_per_s if x.best else 0.0)
    dim = s.axes[0][0]
    priced = bool(s.prices)
    columns = [("target", False), ("profile", False)]
    columns += [(name, True) for name, _ in s.axes[1:]]
    columns += [(f"best {dim}", True), ("latency", True), (f"{unit(s)}/s", True)]
    columns += [("per million", True)] if priced else []
    columns += [("no fit from", True), ("device-bound from", True), ("slower than the last", False)]
    rows: list[list[str]] = []
    for x in found:
        best = x.best
        row = [x.target, x.profile, *(f"{n:,}" for _, n in x.others)]
        row += (
            [f"{x.size(best):,}", quantity(best.latency_s, "s"), rate(best.items_per_s)]
            if best
            else ["-", "-", "-"]
        )
        if priced:
            cost = best.usd_per_million if best else None
            row.append("-" if cost is None else usd(cost))
        row += [f"{x.size(p):,}" if p else "-" for p in (x.unfit, x.busy)]
        rows.append([*row, ", ".join(f"{x.size(b):,}" for _, b in x.cliffs)])
    page.heading(f"{s.model}: {dim} {', '.join(f'{n:,}' for n in s.axes[0][1])}")
    page.line()
    one = len({x.profile for x in found}) == 1  # else a row is not told from its neighbour
    last = "profile" if one else "no fit from"
    page.table(columns, rows, drop=("slower than the last", "device-bound from", last))
    page.line()


def _verdict(s: Sweep, page: Page) -> None:
    if (p := s.fastest) is not None:
        page.wrapped("fastest", f"{_where(s, p)}: {rate(p.items_per_s)} {unit(s)}/s")
    if (p := s.cheapest) is not None and p.usd_per_million is not None:
        text = f"{_where(s, p)}: {usd(p.usd_per_million)} per million {unit(s)}"
        if s.apart:
            others = ", ".join(f"{name} ({price.kind})" for name, price in s.apart)
            text += f"; not compared, for a price of another kind: {others}"
        page.wrapped("cheapest", text)
    for dims, why in s.refused:
        page.wrapped("refused", f"{_dims(dims)}: {why}")
    whose: dict[tuple[str, str], list[str]] = {}
    for target, profile, why in s.unsupported:
        whose.setdefault((profile, why), []).append(target)
    for (profile, why), names in whose.items():
        page.wrapped("refused", f"{profile} on {', '.join(names)}: {why}")
    strange: dict[str, list[str]] = {}
    for target, text in s.elsewhere:
        strange.setdefault(text, []).append(target)
    for text, names in strange.items():
        page.wrapped("assumed", f"{', '.join(names)}: {text}")
    lists: dict[str, list[str]] = {}
    for name, price in s.prices:
        lists.setdefault(str(price), []).append(f"{name} {usd(price.usd_per_hour)}/h")
    for source, names in lists.items():
        page.wrapped("prices", f"{source}: {', '.join(names)}")


def _where(s: Sweep, p: Point) -> str:
    under = f" under {p.profile}" if len({x.profile for x in s.points}) > 1 else ""
    return f"{p.target}{under}, {_dims(p.dims)}"


def _name(series: Series) -> str:
    others = f", {_dims(series.others)}" if series.others else ""
    return f"{series.target} under {series.profile}{others}"


def _dims(dims: Dims) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in dims)


def unit(s: Sweep) -> str:
    """What is counted: items of a batch, or runs where nothing is called a batch."""
    return "runs" if all(p.items == 1 for p in s.points) else "items"


def usd(value: float) -> str:
    """`$0.0123`, `$12.30`: two digits behind the point, or three that count."""
    return f"${value:,.2f}" if value >= 1 else f"${value:#.3g}"


# ---------------------------------------------------------------------------- for programs


def sweep_csv(s: Sweep) -> str:
    """A row a run; times in seconds, prices in US dollars."""
    best = {id(x.best) for x in s.series}
    columns = ["model", "target", "profile", *(name for name, _ in s.axes), "items", "latency_s"]
    columns += ["low_s", "high_s", "device_s", "items_per_s", "host_bound", "peak_bytes"]
    columns += ["reserved_bytes", "available_bytes", "fits", "usd_per_hour", "usd_per_million"]
    return csv_text([*columns, "best"], (_row(s, p, id(p) in best) for p in s.points))


def _row(s: Sweep, p: Point, is_best: bool) -> dict[str, Any]:
    known = _record(p)
    low, high = known.pop("interval_s") or (None, None)
    flags = {"host_bound": int(p.is_host_bound), "fits": int(p.fits), "best": int(is_best)}
    return {**known.pop("dims"), **known, **flags, "model": s.model, "low_s": low, "high_s": high}


def sweep_json(s: Sweep) -> str:
    """`{"schema": "gpuir.sweep/1", ...}`, as docs/guide/sweep.md describes it."""
    return json_text(
        SCHEMA,
        model=s.model,
        axes=[{"dim": name, "values": values} for name, values in s.axes],
        points=[_record(p) for p in s.points],
        series=[_series_record(x) for x in s.series],
        fastest=s.fastest and _record(s.fastest),
        cheapest=s.cheapest and _record(s.cheapest),
        to_fit=[record(x, "change option spare_bytes") for x in s.to_fit],
        refused=[{"dims": dict(dims), "why": why} for dims, why in s.refused],
        unsupported=[
            {"target": target, "profile": profile, "why": why}
            for target, profile, why in s.unsupported
        ],
        elsewhere=[{"target": target, "text": text} for target, text in s.elsewhere],
        prices=[record(price, target=name) for name, price in s.prices],
    )


def _record(p: Point) -> dict[str, Any]:
    return record(
        p,
        "target profile items latency_s device_s items_per_s peak_bytes reserved_bytes"
        " available_bytes fits usd_per_hour usd_per_million",
        dims=dict(p.dims),
        interval_s=p.interval,
        host_bound=p.is_host_bound,
    )


def _series_record(x: Series) -> dict[str, Any]:
    def size(p: Point | None) -> int | None:
        return None if p is None else x.size(p)

    return record(
        x,
        "target profile",
        others=dict(x.others),
        best=size(x.best),
        no_fit_from=size(x.unfit),
        device_bound_from=size(x.busy),
        cliffs=[{"from": size(a), "to": size(b), "lost": x.lost(a, b)} for a, b in x.cliffs],
    )
