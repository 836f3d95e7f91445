"""`gpuir eval collectives`: collectives against measurements, and the fit of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from gpuir.backends.scores import ERRORS, INSIDE, SCHEMA, left_out, number
from gpuir.cli.exam import FILES, ExamOutput, ScoredRow, commands_report
from gpuir.cli.output import check_ahead, note, write
from gpuir.cli.request import ask, held, option, request
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields

if TYPE_CHECKING:
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


def rows(picked: Sequence[Picked]) -> Iterator[ScoredRow]:
    """Each row's time with its call."""
    from gpuir.fit.collectives import BITS, OPS

    for s, times in picked:
        c = s.curve
        given = {"near": s.near, "dtype": DTYPES[BITS[s.dtype]], "library": c.library}
        given |= {"mode": c.mode, "version": c.version, "run": c.run}
        words = ", ".join(f"{name}={value!r}" for name, value in given.items() if value)
        for nbytes, time_s in zip(s.nbytes.tolist(), times.tolist(), strict=True):
            what = f"{OPS[s.op]!r}, {nbytes!r}, {s.target!r}, {int(s.group.ranks)}, {words}"
            yield ScoredRow(time_s, "s", f"gpuir.collective({what}).time_s")


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


COLUMNS = (
    *fields("protocol file op system target library mode nodes band n"),
    *ERRORS,
    INSIDE,
    *fields("steady_n steady_mape"),
)


def scores_report(
    tables: Sequence[CollectiveTable], scores: Mapping[str, Sequence[Scored]]
) -> Report:
    """Errors by system and by collective. Programs have them by both, mode, nodes and sizes."""
    from gpuir.cost.collective import BY

    files = [
        {"file": t.file, "rows": t.count, "scored": _scored(t), "skipped": t.skipped}
        for t in tables
    ]
    return Report(
        SCHEMA,
        lambda: _parts(tables, scores),
        lambda: {
            "kind": "collectives",
            "predictor": BY,
            "rows": Table([e for p, some in scores.items() for e in groups(p, some)], COLUMNS),
            "files": files,
        },
    )


def _scored(table: CollectiveTable) -> int:
    return sum(len(s.nbytes) for s in table.series)


LEGEND = (
    "Mean absolute errors in percent of the measurement, by message size; bias is positive where"
    " too slow is predicted; inside: the share in the 80 % interval; steady: without rows whose"
    f" repeats differ by over {SPREAD:.0%}, and without kernels of a profile up to 1 MiB, which"
    " hold waits for the peers; every row counts elsewhere."
)


def _parts(
    tables: Sequence[CollectiveTable], scores: Mapping[str, Sequence[Scored]]
) -> Iterator[Part]:
    yield Notes([("", LEGEND)], 0)
    for protocol, rows in scores.items():
        goal = f" (goal: {GOALS[protocol]} %)" if protocol in GOALS else ""
        yield Heading(TITLES[protocol] + goal)
        yield _table(("system", "library"), rows, lambda r: (_system(r), r.series.curve.library))
        yield _table(
            ("collective", "mode"), rows, lambda r: (r.series.curve.op, r.series.curve.mode)
        )
    for t in tables:
        yield Heading(f"{t.file}: {_scored(t):,} of {t.count:,} rows")
        if t.skipped:
            yield left_out(t.skipped)
    if set(scores) == {"shipped"}:
        yield Notes(
            [("", "Fits without what is scored: --unseen sizes, ranks, systems or all.")], 0
        )


def _system(r: Scored) -> str:
    nodes = r.series.curve.nodes
    return r.series.system + (f", {nodes} nodes" if nodes > 1 else "")


class ByBand(NamedTuple):
    """Errors of rows in all sizes, and by band."""

    key: tuple[str, str]
    every: Errors | None
    bands: tuple[float | None, ...]

    @classmethod
    def of(cls, key: tuple[str, str], some: Sequence[Scored]) -> ByBand:
        every, *bands = (_errors("", ("",) * 6 + (1,), some, b) for b in (None, 0, 1, 2, 3))
        return cls(key, every, tuple(e and e.mape for e in bands))


def _table(
    titles: tuple[str, str], rows: Sequence[Scored], by: Callable[[Scored], tuple[str, str]]
) -> Table:
    found: dict[tuple[str, str], list[Scored]] = {}
    for r in rows:
        found.setdefault(by(r), []).append(r)
    lines = [ByBand.of(key, some) for key, some in sorted(found.items())]
    alone = [x for x in lines if titles[0] == "system" and "nodes" not in x.key[0]]
    lines += [ByBand.of(("all rows", ""), rows)] if rows else []
    more = [f"mean of the systems of one node: {_mean(alone)}"] if alone else []

    def of(title: str, name: str, form: str = ".1f", drop: int = 0) -> Column:
        return number(title, lambda x: x.every and getattr(x.every, name), form=form, drop=drop)

    return Table(
        lines,
        (
            *(Column(title, value=lambda x, i=i: x.key[i]) for i, title in enumerate(titles)),
            of("rows", "n", ","),
            of("mean", "mape"),
            of("median", "median_ape", drop=2),
            of("bias", "bias", "+.1f"),
            *(number(b, lambda x, i=i: x.bands[i], drop=3 + i) for i, b in enumerate(BAND_NAMES)),
            of("inside", "coverage", ".0f"),
            of("steady", "steady_mape", drop=1),
        ),
        more=tuple(more),
    )


def _mean(alone: Sequence[ByBand]) -> str:
    """Of each system alike, in all sizes and by band."""
    columns = zip(*((x.every and x.every.mape, *x.bands) for x in alone), strict=True)
    known = [[n for n in c if n is not None] for c in columns]
    every, *bands = (f"{np.mean(c):.1f}" if c else "-" for c in known)
    named = (f"{text} {name}" for name, text in zip(BAND_NAMES, bands, strict=True))
    return f"{every}; {', '.join(named)}"


@dataclass(frozen=True)
class Collectives:
    files: tuple[str, ...] = ask(FILES)
    unseen: tuple[str, ...] = option(
        "Fit without some rows, and score these: each may take minutes.",
        multiple=True,
        type=click.Choice([*PROTOCOLS, "all"]),
    )
    fit: Path | None = option("Fit, and write the weights here.", type=click.Path(path_type=Path))
    shown: ExamOutput = held(ExamOutput)


@request(Collectives)
def collectives(asked: Collectives) -> None:
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

    asked.shown.check()
    tables = [read(path) for path in dict.fromkeys(asked.files)]
    series = [s for t in tables for s in t.series]
    if asked.fit:
        check_ahead(str(asked.fit))
        if not series:
            raise UsageError("no row to fit to", where=", ".join(asked.files))
        return fitted(series, asked.fit)
    field = weights()
    if asked.shown.commands:
        given = rows(run("shipped", series, field))
        return asked.shown.show(commands_report("collectives", given))
    scores: dict[str, list[Scored]] = {}
    unseen = PROTOCOLS if "all" in asked.unseen else dict.fromkeys(asked.unseen)
    for protocol in ("shipped", *unseen):
        found = run(protocol, series, field)
        scores[protocol] = scored(found, field, FAMILIAR.get(protocol, ""))
    return asked.shown.show(scores_report(tables, scores))
