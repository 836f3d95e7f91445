"""Scores of predictions against measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from os.path import abspath, commonpath, dirname, relpath
from typing import Any, NamedTuple

from gpuir.backends.structured import record
from gpuir.fit.score import ALL, GroupScores, RowErrors, Score, TileScore, pooled
from gpuir.fit.tables import MeasuredTable as Measured
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table

SCHEMA = "gpuir.eval/1"
LEGEND = (
    "Absolute errors in percent of the measurement: mean, median, 90th percentile; mean signed"
    " error (positive: too slow predicted); mean error of the plain roofline; percentage of rows"
    " inside their 80 % interval; mean deviation of rows from the median of their shape's."
)


def scores_report(
    tables: Sequence[Measured],
    scores: GroupScores,
    head: Mapping[str, Any],
    first: Sequence[Part] = (),
) -> Report:
    """Each file: what it is, its scores by GPU and operator, their totals, what was left out; the
    parts `first` before it all. JSON is described in docs/guide/eval.md, and has `head`."""
    return Report(
        SCHEMA,
        lambda: (*first, *_parts(tables, scores)),
        lambda: _fields(tables, scores, head),
    )


def _fields(
    tables: Sequence[Measured], scores: GroupScores, head: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **head,
        "rows": Table(list(map(_record, scores.groups)), _columns(scores.groups)),
        "totals": [_record(s) for s in scores.totals],
        "families": [_record(s) for s in scores.families],
        "tiles": [_tile(t) for t in scores.tiles],
        "files": [
            record(t, "file kind skipped", rows=t.count, scored=t.count - sum(t.skipped.values()))
            for t in tables
        ],
    }


def _columns(scores: Sequence[Score]) -> tuple[Column, ...]:
    """The fields of a record of scores."""
    names = dict.fromkeys(name for s in scores for name in _record(s))
    return tuple(Column(field=n, value=lambda row, n=n: row.get(n)) for n in names)


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


# ---------------------------------------------------------------------------- for people


def _parts(tables: Sequence[Measured], scores: GroupScores) -> Iterator[Part]:
    if scores.groups:
        yield Notes([("", LEGEND)], 0)
    for table in tables:
        yield Heading(f"{table.file}: {table.kind or 'no kernels'}, {table.count:,} rows")
        mine = [s for s in scores.groups if s.group.file == table.file]
        totals = [s for s in scores.totals if s.group.file == table.file]
        plain = [s for s in mine if not (s.group.floor or s.group.suspect)]
        if plain:
            yield _groups([*plain, *(t for t in totals if _adds(t, plain))])
        if apart := [s for s in mine if s.group.floor or s.group.suspect]:
            yield _groups(apart, APART)
        if tiles := [t for t in scores.tiles if t.group.file == table.file]:
            yield _tiles(tiles)
        if table.skipped:
            yield left_out(table.skipped)
    if len([t for t in tables if t.batches]) > 1:
        yield from _summary(scores.totals)
        if scores.families:
            yield _families(scores.families)


TILES = "tiles: percentage of rows with the tile that ran; mean error with the one predicted"
APART = "apart: what measures the host's dispatch more than the GPU, or is suspect"


def number(
    title: str,
    of: Callable[[Any], Any] | str = "",
    *,
    field: str = "",
    drop: int = 0,
    form: str = ".1f",
) -> Column:
    """A column of errors in percent: `of` reads them as `Column.value` does."""

    def text(row: Any) -> str:
        value = column.of(row)
        return "-" if value is None or isnan(value) else format(value, form)

    column = Column(title, "number", field, of, text, drop=drop)
    return column


def left_out(skipped: Mapping[str, int], label: str = "skipped") -> Notes:
    """How many rows are not scored, by reason, the most first."""
    most = sorted(skipped.items(), key=lambda pair: -pair[1])
    return Notes([(label, f"{n:,} row{'s' * (n != 1)}: {reason}") for reason, n in most])


ERRORS = (
    number("mean", field="mape"),
    number("median", field="median_ape"),
    number("bias", field="bias", form="+.1f"),
)
INSIDE = number("inside", field="coverage", form=".0f")


def _groups(scores: Sequence[Score], caption: str = "") -> Table:
    besides = [name for name, _ in scores[0].group.by]
    return Table(
        scores,
        (
            Column("gpu", value="group.target"),
            Column("operator", value="group.title"),
            Column("dtype", value="group.dtype"),
            *(
                Column(name, value=lambda s, name=name: dict(s.group.by).get(name, ""))
                for name in besides
            ),
            number("rows", "errors.n", form=","),
            number("mean", "errors.mape"),
            number("median", "errors.median_ape", drop=3),
            number("p90", "errors.p90_ape", drop=1),
            number("bias", "errors.bias", form="+.1f"),
            number("roofline", "errors.roofline_mape", drop=4),
            number("inside", "errors.coverage", drop=5, form=".0f"),
            number("spread", "errors.spread", drop=2),
        ),
        caption=caption,
    )


def _tiles(tiles: Sequence[TileScore]) -> Table:
    return Table(
        tiles,
        (
            Column("gpu", value="group.target"),
            Column("operator", value="group.op"),
            number("rows", "n", form=","),
            number("same tile", "same"),
            number("and split", "same_split"),
            number("mean", "mape"),
            number("with what ran", "mape_ran"),
        ),
        caption=TILES,
    )


class Pooled(NamedTuple):
    """Rows of several GPUs together, and the mean of the GPUs' mean errors."""

    name: str
    dtype: str
    gpus: int
    errors: RowErrors
    by_gpu: float


def _summary(totals: Sequence[Score]) -> Iterator[Part]:
    """A line for each file and dtype, all GPUs together."""
    everywhere = [s for s in totals if s.group.device == ALL]
    if not everywhere:
        return
    folder = commonpath([dirname(abspath(s.group.file)) for s in everywhere])
    rows: list[Pooled] = []
    for s in everywhere:
        means = [
            t.errors.mape
            for t in totals
            if t != s and t.group._replace(device=ALL, target=ALL) == s.group
        ]
        name = relpath(abspath(s.group.file), folder)
        by_gpu = sum(means) / max(len(means), 1)
        rows.append(Pooled(name, s.group.dtype, len(means), s.errors, by_gpu))
    yield Heading("all files")
    yield Table(
        rows,
        (
            Column("file", value="name", least=34, elided=True),
            Column("dtype", value="dtype"),
            *POOLED,
            number("roofline", "errors.roofline_mape", drop=2),
            number("inside", "errors.coverage", drop=3, form=".0f"),
            number("spread", "errors.spread", drop=1),
        ),
        more=("by GPU: the mean of the GPUs' mean errors",),
    )


POOLED = (
    number("rows", "errors.n", form=","),
    number("mean", "errors.mape"),
    number("by GPU", "by_gpu"),
    number("bias", "errors.bias", form="+.1f"),
)


def _families(families: Sequence[Score]) -> Table:
    """A line for each family of kernels, all files together."""
    rows: list[Pooled] = []
    for name in sorted({s.group.op for s in families}):
        mine = [s for s in families if s.group.op == name]
        by_gpu = [
            pooled([s for s in mine if s.group.target == target]).mape
            for target in {s.group.target for s in mine}
        ]
        mean = sum(by_gpu) / len(by_gpu)
        rows.append(Pooled(name, "", len(by_gpu), pooled(mine), mean))
    return Table(
        rows,
        (
            Column("family", value="name"),
            Column("GPUs", "count", value="gpus"),
            *POOLED,
            number("roofline", "errors.roofline_mape"),
            number("inside", "errors.coverage", form=".0f"),
        ),
    )


def _adds(total: Score, rows: Sequence[Score]) -> bool:
    """Whether a total says more than the rows above it."""
    g = total.group
    same = [
        s for s in rows if g.dtype in (ALL, s.group.dtype) and g.device in (ALL, s.group.device)
    ]
    return len(same) > 1
