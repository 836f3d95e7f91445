"""A sweep: a table each for a few series, a line each for many, and who wins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gpuir.backends.analysis import to_fit_text
from gpuir.backends.structured import record
from gpuir.plan.sweep import SizeSeries, SweepAnswers
from gpuir.report.answer import Answer, Dims
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import between, percent, quantity, rate, share, usd

DETAILED = 6  # series, up to which each has a table of its own


def sweep_report(s: SweepAnswers) -> Report:
    """JSON is described in docs/guide/sweep.md; programs have a row for each run."""
    return Report("gpuir.sweep/1", lambda: _parts(s), lambda: _fields(s))


def sizes_report(s: SweepAnswers) -> Report:
    """A table of all sizes for each target and profile; for programs that of a sweep."""
    return Report("gpuir.sweep/1", lambda: _tables(s), lambda: _fields(s))


def _tables(s: SweepAnswers) -> Iterator[Part]:
    of = {id(p): x for x in s.series for p in x.points}
    for target, profile in dict.fromkeys((p.target, p.profile) for p in s.points):
        yield Heading(f"{s.model} on {target} under {profile}")
        yield Table(
            [p for p in s.points if (p.target, p.profile) == (target, profile)],
            (
                *(
                    Column(name, "count", value=lambda p, name=name: dict(p.dims)[name])
                    for name, _ in s.axes
                ),
                Column("latency", "s", "latency_s"),
                Column("80 %", text=lambda p: between(p.interval), drop=1),
                Column(f"{unit(s)}/s", "1/s", "items_per_s"),
                Column("memory", "bytes", "reserved_bytes", drop=2),
                Column("", value=lambda p: ", ".join(_notes(of[id(p)], p))),
            ),
        )
    if lines := [x for x in _verdict(s) if x[0] in ("refused", "assumed", "")]:
        yield Notes(lines)


def _parts(s: SweepAnswers) -> Iterator[Part]:
    if (p := s.nearest) is not None:
        short = quantity(-(p.spare_bytes or 0), "bytes")
        yield Heading(f"nothing fits: the nearest is {_where(s, p)}, {short} short")
        yield Notes([("to fit", to_fit_text(s.to_fit))])
    if len(s.series) <= DETAILED:
        for series in s.series:
            yield from _series(s, series)
    else:
        yield from _overview(s)
    if lines := list(_verdict(s)):
        yield Notes(lines)


def _series(s: SweepAnswers, x: SizeSeries) -> Iterator[Part]:
    price = dict(s.prices).get(x.target)
    paid = f"{usd(price.usd_per_hour)} an hour ({price})" if price else ""
    yield Heading(f"{s.model} on {_name(x)}", paid)
    sized = [Column(f"x {x.dim}", "1/s", value=x.rate)] if x.counts_sizes else []
    priced = [Column(f"per million {unit(s)}", "usd", "usd_per_million")] if price else []
    yield Table(
        x.points,
        (
            Column(x.dim, "count", value=x.size),
            Column("latency", "s", "latency_s"),
            Column(f"{unit(s)}/s", "1/s", "items_per_s"),
            *sized,
            Column("device", "%", value=lambda p: share(p.device_s, p.latency_s), drop=1),
            Column("memory", "bytes", "reserved_bytes", drop=2),
            *priced,
            Column("", value=lambda p: ", ".join(_notes(x, p))),
        ),
    )


def _notes(series: SizeSeries, p: Answer) -> Iterable[str]:
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


def _overview(s: SweepAnswers) -> Iterator[Part]:
    """A line a series, the fastest first."""
    found = sorted(s.series, key=lambda x: -x.best.items_per_s if x.best else 0.0)
    dim, sizes = s.axes[0]
    one = len({x.profile for x in found}) == 1  # else a row is not told from its neighbour
    yield Heading(f"{s.model}: {dim} {', '.join(f'{n:,}' for n in sizes)}")

    def size(title: str, of: str, drop: int = 0) -> Column:
        return Column(
            title, "count", value=lambda x: (p := getattr(x, of)) and x.size(p), drop=drop
        )

    def best(title: str, unit: str, of: str) -> Column:
        return Column(title, unit, value=lambda x: x.best and getattr(x.best, of))

    yield Table(
        found,
        (
            Column("target", "", "target"),
            Column("profile", "", "profile", drop=3 * one),
            *(
                Column(name, "count", value=lambda x, name=name: dict(x.others)[name])
                for name, _ in s.axes[1:]
            ),
            size(f"best {dim}", "best"),
            best("latency", "s", "latency_s"),
            best(f"{unit(s)}/s", "1/s", "items_per_s"),
            Column("slower", "%", value=s.slower, drop=3),
            *([best("per million", "usd", "usd_per_million")] if s.prices else []),
            size("no fit from", "unfit", 3 * (not one)),
            size("device-bound from", "busy", 2),
            Column(
                "slower than the last",
                value=lambda x: ", ".join(f"{x.size(b):,}" for _, b in x.cliffs),
                drop=1,
            ),
        ),
    )


def _verdict(s: SweepAnswers) -> Iterator[tuple[str, str]]:
    if (p := s.fastest) is not None:
        yield "fastest", f"{_where(s, p)}: {rate(p.items_per_s)} {unit(s)}/s"
        odds = [(x.best, p) for x in s.series if x.best and (p := s.slower(x)) is not None]
        if odds and len(s.series) <= DETAILED:
            others = (f"{_where(s, best)} in {percent(p)}" for best, p in odds)
            yield "slower", f"{', '.join(others)} of cases"
        elif odds:
            yield "slower", "share of cases in which it is slower than the fastest"
    if (p := s.cheapest) is not None and p.usd_per_million is not None:
        text = f"{_where(s, p)}: {usd(p.usd_per_million)} per million {unit(s)}"
        if s.apart:
            others = ", ".join(f"{name} ({price.kind})" for name, price in s.apart)
            text += f"; not compared, for a price of another kind: {others}"
        yield "cheapest", text
    for dims, why in s.refused:
        yield "refused", f"{_dims(dims)}: {why}"
    of = _grouped((f"{profile} on ", why, target) for target, profile, why in s.unsupported)
    for (profile, why), names in of:
        yield "refused", f"{profile}{names}: {why}"
    for (_, text), names in _grouped(("", text, target) for target, text in s.elsewhere):
        yield "assumed", f"{names}: {text}"
    paid = (("", str(price), f"{name} {usd(price.usd_per_hour)}/h") for name, price in s.prices)
    for (_, source), names in _grouped(paid):
        yield "prices", f"{source}: {names}"


def _grouped(said: Iterable[tuple[str, str, str]]) -> Iterator[tuple[tuple[str, str], str]]:
    """What is said of several, with the names of all of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for *what, name in said:
        found.setdefault((what[0], what[1]), []).append(name)
    return ((what, ", ".join(names)) for what, names in found.items())


def _where(s: SweepAnswers, p: Answer) -> str:
    under = f" under {p.profile}" if len({x.profile for x in s.points}) > 1 else ""
    return f"{p.target}{under}, {_dims(p.dims)}"


def _name(series: SizeSeries) -> str:
    others = f", {_dims(series.others)}" if series.others else ""
    return f"{series.target} under {series.profile}{others}"


def _dims(dims: Dims) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in dims)


def unit(s: SweepAnswers) -> str:
    """What is counted: items of a batch, or runs where nothing is called a batch."""
    return "runs" if all(p.items == 1 for p in s.points) else "items"


# ---------------------------------------------------------------------------- for programs


def _points(s: SweepAnswers, *points: Answer) -> Table:
    """These runs, or all of them."""
    best = {id(x.best) for x in s.series}
    return Table(
        points or s.points,
        (
            *fields("target profile"),
            Column(field="dims", value=lambda p: dict(p.dims), inline=True),
            *fields("items latency_s"),
            Column(field="interval_s", value=lambda p: p.interval),
            *fields("device_s items_per_s"),
            Column(field="host_bound", value=lambda p: p.is_host_bound),
            *fields("peak_bytes reserved_bytes available_bytes fits usd_per_hour usd_per_million"),
            Column(field="best", value=lambda p: id(p) in best),
        ),
        {"model": s.model},
    )


def _fields(s: SweepAnswers) -> dict[str, Any]:
    def one(p: Answer | None) -> dict[str, Any] | None:
        return p and _points(s, p).records()[0]

    return {
        "model": s.model,
        "axes": [{"dim": name, "values": values} for name, values in s.axes],
        "points": _points(s),
        "series": [_series_record(s, x) for x in s.series],
        "fastest": one(s.fastest),
        "cheapest": one(s.cheapest),
        "to_fit": s.to_fit,
        "refused": [{"dims": dict(dims), "why": why} for dims, why in s.refused],
        "unsupported": [
            dict(zip(("target", "profile", "why"), x, strict=True)) for x in s.unsupported
        ],
        "elsewhere": [{"target": target, "text": text} for target, text in s.elsewhere],
        "prices": [record(price, target=name) for name, price in s.prices],
    }


def _series_record(s: SweepAnswers, x: SizeSeries) -> dict[str, Any]:
    def size(p: Answer | None) -> int | None:
        return None if p is None else x.size(p)

    return record(
        x,
        "target profile",
        others=dict(x.others),
        best=size(x.best),
        slower=s.slower(x),
        no_fit_from=size(x.unfit),
        device_bound_from=size(x.busy),
        cliffs=[{"from": size(a), "to": size(b), "lost": x.lost(a, b)} for a, b in x.cliffs],
    )
