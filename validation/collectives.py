"""`gpuir eval collectives`: collectives against measurements, and the fit of their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from gpuir.cli import commands, options
from gpuir.cli.output import check_ahead, emit, layout, note, write

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page, Terminal
    from gpuir.cost.kriging import Field
    from gpuir.fit.collectives import CollectiveSeries, CollectiveTable, Picked

PROTOCOLS = ("sizes", "ranks", "systems")
TITLES = {
    "shipped": "The weights that are shipped",
    "sizes": "Sizes not fitted: each tenth of a system's message sizes left out in turn",
    "ranks": "Numbers of ranks not fitted: each of a system's left out in turn",
    "systems": "Systems not fitted: each GPU with its links left out in turn",
}
GOALS = {"sizes": 8, "ranks": 15, "systems": 20}  # percent
BAND_NAMES = ("<= 32 KiB", "<= 1 MiB", "<= 32 MiB", "above")
# A row is noisy whose repeats differ by more, or that may hold waits for the peers: kernels of a
# profile up to this size (kernels/README.md beside the tables).
SPREAD, WAITS = 0.25, 1 << 20


@dataclass(frozen=True)
class Errors:
    """Errors in percent of the measurement: the mean and median of the absolute ones, the mean
    signed one, the share inside the 80 % interval; the mean of rows that are not noisy, and how
    many these are."""

    protocol: str
    file: str
    op: str
    system: str
    target: str
    library: str
    mode: str
    nodes: int
    band: str
    n: int
    mape: float
    median_ape: float
    bias: float
    coverage: float
    steady_n: int
    steady_mape: float | None


@dataclass(frozen=True)
class Scored:
    """Rows of a series with their errors."""

    series: CollectiveSeries
    error: Any
    inside: Any
    noisy: Any
    band: Any


def scored(picked: Sequence[Picked], field: Field, familiar: str = "") -> list[Scored]:
    """Errors of what was predicted; intervals are those of `familiar` systems, or of what each is
    to the weights."""
    from gpuir.cost.kriging import BANDS

    found: list[Scored] = []
    for s, time_s in picked:
        error = 100 * (time_s / s.time_s - 1)
        band = np.searchsorted(BANDS, s.nbytes)
        known = field.ends.get(familiar or field.familiar(s.curve))
        low, high = np.array(known or [(-0.69, 0.69)] * 4)[band].T
        ratio = np.log(s.time_s / time_s)
        noisy = s.spread > SPREAD
        if s.curve.mode == "kernel_trace":
            noisy |= s.nbytes <= WAITS
        found.append(Scored(s, error, (low <= ratio) & (ratio <= high), noisy, band))
    return found


def groups(protocol: str, rows: Sequence[Scored]) -> Iterator[Errors]:
    """By system, library, mode, collective and nodes, each in all sizes and by band."""
    found: dict[tuple[Any, ...], list[Scored]] = {}
    for r in rows:
        s, c = r.series, r.series.curve
        key = (s.file, c.op, s.system, s.target, c.library, c.mode, c.nodes)
        found.setdefault(key, []).append(r)
    for key, some in found.items():
        for band in (None, *range(4)):
            if errors := _errors(protocol, key, some, band):
                yield errors


def _errors(
    protocol: str, key: tuple[Any, ...], some: Sequence[Scored], band: int | None
) -> Errors | None:
    error, inside, noisy, bands = (
        np.concatenate([getattr(r, n) for r in some]) for n in ("error", "inside", "noisy", "band")
    )
    mine = np.ones(len(error), bool) if band is None else bands == band
    if not mine.any():
        return None
    off, steady = np.abs(error[mine]), ~noisy[mine]
    file, op, system, target, library, mode, nodes = key
    return Errors(
        protocol,
        *(file, op, system, target, library, mode, nodes),
        band="all" if band is None else BAND_NAMES[band],
        n=len(off),
        mape=float(off.mean()),
        median_ape=float(np.median(off)),
        bias=float(error[mine].mean()),
        coverage=100 * float(inside[mine].mean()),
        steady_n=int(steady.sum()),
        steady_mape=float(off[steady].mean()) if steady.any() else None,
    )


# ---- protocols --------------------------------------------------------------------------------


def run(protocol: str, series: Sequence[CollectiveSeries], field: Field) -> list[Picked]:
    from gpuir.fit import collectives as fit

    ways: Mapping[str, Callable[[], list[Picked]]] = {
        "shipped": lambda: fit.shipped(series, field),
        "sizes": lambda: fit.unseen_sizes(series),
        "ranks": lambda: fit.unseen(series, fit.by_ranks(series)),
        "systems": lambda: fit.unseen(series, fit.by_system),
    }
    note(f"{TITLES[protocol]} ...")
    return ways[protocol]()


DTYPES = {8: "i8", 16: "bf16", 32: "f32", 64: "f64"}


def rows(picked: Sequence[Picked]) -> Iterator[commands.ScoredRow]:
    """Each row's time with its call."""
    from gpuir.fit.collectives import BITS, OPS

    for s, times in picked:
        c = s.curve
        given = {"near": s.near, "dtype": DTYPES[BITS[s.dtype]], "library": c.library}
        given |= {"mode": c.mode, "version": c.version, "run": c.run}
        words = ", ".join(f"{name}={value!r}" for name, value in given.items() if value)
        for nbytes, time_s in zip(s.nbytes.tolist(), times.tolist(), strict=True):
            what = f"{OPS[s.op]!r}, {nbytes!r}, {s.target!r}, {int(s.group.ranks)}, {words}"
            yield commands.ScoredRow(time_s, "s", f"gpuir.collective({what}).time_s")


FAMILIAR = {"sizes": "size", "ranks": "ranks", "systems": "system"}


def fitted(series: Sequence[CollectiveSeries], out: Path) -> None:
    """Weights fitted to all rows, with intervals from the three protocols."""
    from gpuir.cost.kriging import written
    from gpuir.fit import collectives as fit

    field = fit.fit(series)
    ends = {}
    for p in PROTOCOLS:  # networks differ too much from site to site
        near = [(s, t) for s, t in run(p, series, field) if s.curve.nodes == 1]
        ends[FAMILIAR[p]] = fit.ends(near)
    write(str(out), written(replace(field, ends=ends)))


# ---- writing ----------------------------------------------------------------------------------


def json_text(tables: Sequence[CollectiveTable], scores: Mapping[str, Sequence[Scored]]) -> str:
    """`{"schema", "kind": "collectives", "rows": [...], ...}`: docs/validation/data.md."""
    from gpuir.backends.scores import SCHEMA
    from gpuir.cost.collective import BY

    rows = [_plain(vars(e)) for p, some in scores.items() for e in groups(p, some)]
    files = [
        {
            "file": t.file,
            "rows": t.count,
            "scored": sum(len(s.nbytes) for s in t.series),
            "skipped": dict(t.skipped),
        }
        for t in tables
    ]
    head = {"schema": SCHEMA, "kind": "collectives", "predictor": BY}
    return json.dumps({**head, "rows": rows, "files": files}, indent=1, allow_nan=False) + "\n"


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        n: (None if math.isnan(v) else float(f"{v:.6g}")) if isinstance(v, float) else v
        for n, v in row.items()
    }


LEGEND = (
    "Mean absolute errors in percent of the measurement, by message size; bias is positive where"
    " too slow is predicted; inside: the share in the 80 % interval; steady: without rows whose"
    f" repeats differ by over {SPREAD:.0%}, and without kernels of a profile up to 1 MiB, which"
    " hold waits for the peers; every row counts elsewhere."
)


def report(
    tables: Sequence[CollectiveTable], scores: Mapping[str, Sequence[Scored]], layout: Terminal
) -> str:
    from gpuir.backends.terminal import Page

    page = Page(layout.width, layout.color)
    page.wrapped("", LEGEND, 0)
    for protocol, rows in scores.items():
        goal = f" (goal: {GOALS[protocol]} %)" if protocol in GOALS else ""
        page.line()
        page.heading(TITLES[protocol] + goal)
        _table(page, "system", rows, lambda r: (_system(r), r.series.curve.library))
        page.line()
        _table(page, "collective", rows, lambda r: (r.series.curve.op, r.series.curve.mode))
    page.line()
    for table in tables:
        read = sum(len(s.nbytes) for s in table.series)
        page.line(f"{table.file}: {read:,} of {table.count:,} rows")
        for reason, count in sorted(table.skipped.items()):
            page.wrapped("skipped", f"{count} row{'s' * (count != 1)}: {reason}")
    if set(scores) == {"shipped"}:
        page.wrapped("", "Fits without what is scored: --unseen sizes, ranks, systems or all.", 0)
    return page.text()


def _system(r: Scored) -> str:
    nodes = r.series.curve.nodes
    return r.series.system + (f", {nodes} nodes" if nodes > 1 else "")


def _table(
    page: Page, what: str, rows: Sequence[Scored], by: Callable[[Scored], tuple[str, str]]
) -> None:
    second = "library" if what == "system" else "mode"
    columns = [(what, False), (second, False), ("rows", True), ("mean", True), ("median", True)]
    columns += [("bias", True), *((b, True) for b in BAND_NAMES)]
    columns += [("inside", True), ("steady", True)]
    found: dict[tuple[str, str], list[Scored]] = {}
    for r in rows:
        found.setdefault(by(r), []).append(r)
    lines: list[tuple[str, ...]] = []
    alone: list[list[float]] = []
    for key, some in sorted(found.items()):
        lines.append((*key, *_cells(some)))
        if what == "system" and "nodes" not in key[0]:
            bands = [_errors("", ("",) * 6 + (1,), some, b) for b in (None, 0, 1, 2, 3)]
            alone.append([e.mape if e else math.nan for e in bands])
    if lines:
        lines.append(("all rows", "", *_cells(rows)))
    if alone:
        known = [[x for x in c if not math.isnan(x)] for c in zip(*alone, strict=True)]
        text = [f"{np.mean(c):.1f}" if c else "-" for c in known]
        lines.append(("systems' mean, one node", "", "", text[0], "", "", *text[1:], "", ""))
    page.table(columns, lines)


def _cells(some: Sequence[Scored]) -> tuple[str, ...]:
    every = [_errors("", ("",) * 6 + (1,), some, b) for b in (None, 0, 1, 2, 3)]
    e = every[0]
    if e is None:
        return ("0",) + ("-",) * 9
    return (
        *(f"{e.n:,}", f"{e.mape:.1f}", f"{e.median_ape:.1f}", f"{e.bias:+.1f}"),
        *(f"{b.mape:.1f}" if b else "-" for b in every[1:]),
        f"{e.coverage:.0f} %",
        "-" if e.steady_mape is None else f"{e.steady_mape:.1f}",
    )


@click.command()
@click.argument("files", nargs=-1, type=click.Path())
@click.option("--json", "json_path", type=click.Path(), help="Write the scores here as JSON.")
@commands.option
@click.option(
    "--unseen",
    multiple=True,
    type=click.Choice([*PROTOCOLS, "all"]),
    help="Fit without some rows, and score these: each may take minutes.",
)
@click.option(
    "--fit", "weights", type=click.Path(path_type=Path), help="Fit, and write the weights here."
)
@options.width
@options.output
def collectives(files: tuple[str, ...], **given: Any) -> None:
    """Collectives: FILES are tables of measured times, by size and number of ranks.

    \b
    gpuir eval collectives collectives*.parquet
    gpuir eval collectives collectives*.parquet --unseen all --json scores.json
    gpuir eval collectives collectives*.parquet --commands
    gpuir eval collectives collectives*.parquet --fit collective1.json
    """
    from gpuir.cost.collective import weights
    from gpuir.fit.collectives import read
    from gpuir.ir.errors import UsageError

    if not files:
        raise UsageError("no table is given", fix="gpuir eval collectives FILE...")
    check_ahead(given["json_path"])
    tables = [read(path) for path in dict.fromkeys(files)]
    series = [s for t in tables for s in t.series]
    if given["weights"]:
        check_ahead(str(given["weights"]))
        if not series:
            raise UsageError("no row to fit to", where=", ".join(files))
        fitted(series, given["weights"])
        return None
    asked = PROTOCOLS if "all" in given["unseen"] else dict.fromkeys(given["unseen"])
    field = weights()
    if given["commands"]:
        return emit(commands.report(rows(run("shipped", series, field))), given["output"])
    scores: dict[str, list[Scored]] = {}
    for protocol in ("shipped", *asked):
        found = run(protocol, series, field)
        scores[protocol] = scored(found, field, FAMILIAR.get(protocol, ""))
    if given["json_path"]:
        emit(json_text(tables, scores), given["json_path"])
    if given["json_path"] != "-":
        emit(report(tables, scores, layout(given["width"], given["output"])), given["output"])
