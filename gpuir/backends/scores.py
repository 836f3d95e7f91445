"""Scores of predictions against measurements, as a table for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import abspath, commonpath, dirname, relpath
from typing import Any

from gpuir.backends import structured
from gpuir.backends.structured import record
from gpuir.backends.terminal import Layout, Page, elided
from gpuir.fit.score import ALL, Score, Scores, TileScore, pooled
from gpuir.fit.tables import Table

SCHEMA = "gpuir.eval/1"
COLUMNS = (
    *(("gpu", False), ("operator", False), ("dtype", False), ("rows", True), ("mean", True)),
    *(("median", True), ("p90", True), ("bias", True), ("roofline", True), ("inside", True)),
    ("spread", True),
)
LEGEND = (
    "Absolute errors in percent of the measurement: mean, median, 90th percentile; mean signed"
    " error (positive: too slow predicted); mean error of the plain roofline; percentage of rows"
    " inside their 80 % interval; mean deviation of rows from the median of their shape's."
)
DROP = ("p90", "spread", "median", "roofline", "inside")


def json_text(tables: Sequence[Table], scores: Scores, head: dict[str, Any]) -> str:
    """`{"schema", "kind", ..., "rows": [...], "files": [...]}`: docs/guide/eval.md."""
    return structured.json_text(
        SCHEMA,
        **head,
        rows=[_record(s) for s in scores.groups],
        totals=[_record(s) for s in scores.totals],
        families=[_record(s) for s in scores.families],
        tiles=[_tile(t) for t in scores.tiles],
        files=[
            record(t, "file kind skipped", rows=t.count, scored=t.count - sum(t.skipped.values()))
            for t in tables
        ],
    )


def _record(s: Score) -> dict[str, Any]:
    g = s.group
    return record(
        g,
        "file device dtype target floor suspect",
        op=g.title,
        **dict(g.by),
        **_rounded(record(s.errors)),
        split={name: _rounded(record(e)) for name, e in s.splits.items()},
    )


def _tile(t: TileScore) -> dict[str, Any]:
    shares = {"same_tile": t.same, "same_tile_and_split": t.same_split}
    errors = {"mape": t.mape, "mape_with_tile_that_ran": t.mape_ran}
    return record(t.group, "file op device dtype target", n=t.n, **_rounded(shares | errors))


def _rounded(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {n: round(v, 4) if isinstance(v, float) else v for n, v in numbers.items()}


# ---------------------------------------------------------------------------- for a terminal


def report(tables: Sequence[Table], scores: Scores, layout: Layout) -> str:
    """Each file: what it is, its scores by GPU and operator, their totals, what was left out."""
    page = Page(layout.width, layout.color)
    if scores.groups:
        page.wrapped("", LEGEND, 0)
        page.line()
    for i, table in enumerate(tables):
        if i:
            page.line()
        page.heading(f"{table.file}: {table.kind or 'no kernels'}, {table.count:,} rows")
        mine = [s for s in scores.groups if s.group.file == table.file]
        totals = [s for s in scores.totals if s.group.file == table.file]
        plain = [s for s in mine if not (s.group.floor or s.group.suspect)]
        if plain:
            _table(page, [*plain, *(t for t in totals if _adds(t, plain))])
        if apart := [s for s in mine if s.group.floor or s.group.suspect]:
            page.line()
            page.line("apart: what measures the host's dispatch more than the GPU, or is suspect")
            _table(page, apart)
        if tiles := [t for t in scores.tiles if t.group.file == table.file]:
            _tiles(page, tiles)
        if table.skipped:
            page.line()
        for reason, count in sorted(table.skipped.items(), key=lambda pair: -pair[1]):
            page.wrapped("skipped", f"{count:,} rows: {reason}")
    if len([t for t in tables if t.batches]) > 1:
        _summary(page, scores.totals)
        _families(page, scores.families)
    return page.text()


def _tiles(page: Page, tiles: Sequence[TileScore]) -> None:
    page.line()
    page.line("tiles: percentage of rows with the tile that ran; mean error with the one predicted")
    columns = [("gpu", False), ("operator", False), ("rows", True), ("same tile", True)]
    columns += [("and split", True), ("mean", True), ("with what ran", True)]
    rows = [
        (
            t.group.target,
            t.group.op,
            f"{t.n:,}",
            *(f"{v:.1f}" for v in (t.same, t.same_split, t.mape, t.mape_ran)),
        )
        for t in tiles
    ]
    page.table(columns, rows)


def _summary(page: Page, totals: Sequence[Score]) -> None:
    """A line for each file and dtype, all GPUs together."""
    columns = [("file", False), ("dtype", False)]
    columns += [(n, True) for n in ("rows", "mean", "by GPU", "bias", "roofline", "inside")]
    columns.append(("spread", True))
    everywhere = [s for s in totals if s.group.device == ALL]
    if not everywhere:
        return
    page.line()
    page.heading("all files")
    folder = commonpath([dirname(abspath(s.group.file)) for s in everywhere])
    rows: list[tuple[str, ...]] = []
    for s in everywhere:
        each = [t for t in totals if t.group._replace(device=ALL, target=ALL) == s.group]
        mean = sum(t.errors.mape for t in each if t != s) / max(len(each) - 1, 1)
        cells = _cells(s, 0)
        name = elided(relpath(abspath(s.group.file), folder), 34)
        rows.append((name, *cells[2:5], f"{mean:.1f}", *cells[7:]))
    page.table(columns, rows, drop=("spread", "roofline", "inside"))
    page.wrapped("", "by GPU: the mean of the GPUs' mean errors", 0)


def _families(page: Page, families: Sequence[Score]) -> None:
    """A line for each family of kernels, all files together."""
    if not families:
        return
    columns = [("family", False), *((n, True) for n in ("GPUs", "rows", "mean", "by GPU", "bias"))]
    columns += [("roofline", True), ("inside", True)]
    rows: list[tuple[str, ...]] = []
    for name in sorted({s.group.op for s in families}):
        mine = [s for s in families if s.group.op == name]
        by_gpu = [
            pooled([s for s in mine if s.group.target == target]).mape
            for target in {s.group.target for s in mine}
        ]
        e = pooled(mine)
        rows.append(
            (
                name,
                f"{len(by_gpu)}",
                f"{e.n:,}",
                f"{e.mape:.1f}",
                f"{sum(by_gpu) / len(by_gpu):.1f}",
                f"{e.bias:+.1f}",
                _or_dash(e.roofline_mape, 1),
                _or_dash(e.coverage),
            )
        )
    page.line()
    page.table(columns, rows)


def _adds(total: Score, rows: Sequence[Score]) -> bool:
    """Whether a total says more than the rows above it."""
    g = total.group
    same = [
        s for s in rows if g.dtype in (ALL, s.group.dtype) and g.device in (ALL, s.group.device)
    ]
    return len(same) > 1


def _table(page: Page, scores: Sequence[Score]) -> None:
    besides = [name for name, _ in scores[0].group.by]
    columns = [*COLUMNS[:3], *((name, False) for name in besides), *COLUMNS[3:]]
    page.table(columns, [_cells(s, len(besides)) for s in scores], drop=DROP)


def _cells(s: Score, besides: int) -> tuple[str, ...]:
    g, e = s.group, s.errors
    values = [value for _, value in g.by] or [""] * besides
    return (
        g.target,
        g.title,
        g.dtype,
        *values,
        f"{e.n:,}",
        f"{e.mape:.1f}",
        f"{e.median_ape:.1f}",
        f"{e.p90_ape:.1f}",
        f"{e.bias:+.1f}",
        _or_dash(e.roofline_mape, 1),
        _or_dash(e.coverage),
        _or_dash(e.spread, 1),
    )


def _or_dash(x: float | None, digits: int = 0) -> str:
    return "-" if x is None else f"{x:.{digits}f}"
