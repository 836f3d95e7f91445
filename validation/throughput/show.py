"""`gpuir eval models` of published throughputs: a report, JSON, and a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from os import cpu_count
from pathlib import Path
from typing import Any

from gpuir.backends import structured
from gpuir.backends.picture import FORMS, picture
from gpuir.backends.scores import SCHEMA
from gpuir.backends.terminal import Page, Terminal
from gpuir.cli.output import check_ahead, emit, layout, note
from gpuir.cost.tile import BY
from gpuir.ir.errors import UsageError
from validation.throughput.cases import Table, read
from validation.throughput.predict import Result, predict
from validation.throughput.scores import Gain, TableScore, gains, scored

LEGEND = (
    "Errors in percent of the measured time: mean, median, 90th percentile, and signed mean"
    " (positive where too slow is predicted); the percentage of cases inside their 80 % interval;"
    " the mean error of the roofline over the same launches. a, b: mean errors of the two halves of"
    " the models, by name. rank: Spearman's correlation of time by sample. pairs: the percentage of"
    " pairs 5 to 50 % apart that are in the right order."
)
COLUMNS = (
    *(("table", False), ("cases", True), ("mean", True), ("median", True), ("p90", True)),
    *(("bias", True), ("inside", True), ("roofline", True), ("a", True), ("b", True)),
    *(("rank", True), ("pairs", True)),
)
GAINS = (
    *(("gain of", False), ("on", False), ("models", True), ("measured", True)),
    *(("predicted", True), ("error", True), ("rank", True)),
)


def show(
    files: Sequence[str],
    *,
    store: str | None,
    jobs: int | None,
    chosen: Sequence[str],
    picture_path: str | None,
    json_path: str | None,
    width: int | None,
    output: str | None,
    each: bool,
) -> None:
    """The scores of tables to where a command's options say."""
    form = "" if picture_path is None else Path(picture_path).suffix.removeprefix(".")
    if picture_path is not None and form not in FORMS:
        raise UsageError(
            "no such picture", where=picture_path, expected=", ".join("." + f for f in FORMS)
        )
    check_ahead(picture_path)
    tables = [_chosen(read(path), chosen) for path in dict.fromkeys(files)]
    cases = [c for t in tables for c in t.cases]
    jobs = jobs or cpu_count() or 1
    found = predict(cases, jobs=jobs, kept=Path(store) if store else None, watch=note)
    order = {case: i for i, case in enumerate(cases)}
    results = sorted(found, key=lambda r: order[r[0]])
    if picture_path is not None:
        emit(picture(form, (7, 7), lambda figure: _draw(figure, results)), picture_path)
    if json_path:
        emit(json_text(tables, results), json_path)
    if json_path != "-":
        emit(report(tables, results, layout(width, output), each), output)


def _chosen(table: Table, models: Sequence[str]) -> Table:
    if not models:
        return table
    kept = [c for c in table.cases if any(fnmatch(c.program.model, m) for m in models)]
    left = {**table.skipped, "not among --model": len(table.cases) - len(kept)}
    return replace(table, cases=tuple(kept), skipped={n: x for n, x in left.items() if x})


# ---------------------------------------------------------------------------- for a terminal


def report(
    tables: Sequence[Table], results: Sequence[Result], shape: Terminal, each: bool = False
) -> str:
    page = Page(shape.width, shape.color)
    files = ", ".join(t.file for t in tables)
    page.heading(f"{files}: {len(results)} cases of whole models")
    page.wrapped("", LEGEND, 0)
    page.line()
    page.table(COLUMNS, [_row(s) for s in scored(results)], drop=("a", "b", "median", "p90"))
    if changed := gains(results):
        page.line()
        page.line("old time by new, medians over models; error of the gain in percent; rank")
        page.table(GAINS, [_gain(g) for g in changed])
    if each:
        page.line()
        _cases(page, results)
    reasons = Counter(p.why.splitlines()[0] for _, p in results if p.why)
    reasons.update({f"{t.file}: {why}": n for t in tables for why, n in t.skipped.items()})
    if reasons:
        page.line()
    for reason, count in sorted(reasons.items()):
        page.wrapped("left out", f"{count} row{'s' * (count != 1)}: {reason}")
    return page.text()


def _row(s: TableScore) -> tuple[str, ...]:
    e = s.errors
    halves = (s.halves[h].mape if h in s.halves else math.nan for h in "ab")
    return (
        s.table,
        str(e.n),
        *(_number(x) for x in (e.mape, e.median_ape, e.p90_ape)),
        f"{e.bias:+.1f}",
        *(_number(x, 0 if i == 0 else 1) for i, x in enumerate((e.coverage, e.roofline_mape))),
        *(_number(x) for x in halves),
        _number(s.spearman, 2),
        _number(100 * s.ordered, 0),
    )


def _number(x: float | None, digits: int = 1) -> str:
    return "-" if x is None or math.isnan(x) else f"{x:.{digits}f}"


def _gain(g: Gain) -> tuple[str, ...]:
    ratios = (f"{g.measured:.2f}x", f"{g.predicted:.2f}x")
    return (g.change, g.of, str(len(g.models)), *ratios, _number(g.error), _number(g.spearman, 2))


def _cases(page: Page, results: Iterable[Result]) -> None:
    columns = [("model", False), ("batch", True), ("measured", True), ("predicted", True)]
    columns += [("error", True), ("inside", False), ("roofline", True), ("launches", True)]
    columns += [("table", False)]
    page.table(columns, [_case(r) for r in results], drop=("launches", "roofline", "inside"))


def _case(result: Result) -> tuple[str, ...]:
    case, p = result
    inside = "yes" if p.low_s <= case.measured_s <= p.high_s else "no"
    return (
        case.program.model,
        str(case.program.batch),
        f"{case.measured_s * 1e3:,.1f} ms",
        f"{p.time_s * 1e3:,.1f} ms",
        f"{_error(p.time_s, case.measured_s):+.1f}",
        inside,
        f"{_error(p.roofline_s, case.measured_s):+.1f}",
        str(p.launches),
        case.table,
    )


def _error(time_s: float, measured_s: float) -> float:
    return 100 * (time_s / measured_s - 1)


# ---------------------------------------------------------------------------- for programs


def json_text(tables: Sequence[Table], results: Sequence[Result]) -> str:
    """`{"schema", "kind": "models", "predictor", "cases": [...], "tables": [...], "gains": [...],
    "files": [...]}`; docs/validation/data.md."""
    return structured.json_text(
        SCHEMA,
        kind="models",
        predictor=BY,
        cases=[_known(_record(r)) for r in results],
        tables=[_known(_score(s)) for s in scored(results)],
        gains=[_known(asdict(g)) for g in gains(results)],
        files=[{"file": t.file, "rows": t.count, "skipped": dict(t.skipped)} for t in tables],
    )


def _record(result: Result) -> dict[str, Any]:
    case, p = result
    words = {n: getattr(case, n) for n in ("file", "row", "table", "target", "profile", "half")}
    program = asdict(case.program)
    return {**words, **program, "measured_s": case.measured_s, **asdict(p)}


def _score(s: TableScore) -> dict[str, Any]:
    halves = {h: _known(asdict(e)) for h, e in s.halves.items()}
    ranks = {"spearman": s.spearman, "near_pairs": s.near, "ordered": s.ordered}
    return {"table": s.table, **asdict(s.errors), "halves": halves, **ranks}


def _known(record: dict[str, Any]) -> dict[str, Any]:
    """What is no number is null."""
    return {n: None if isinstance(v, float) and math.isnan(v) else v for n, v in record.items()}


# ---------------------------------------------------------------------------- a picture


def _draw(figure: Any, results: Sequence[Result]) -> None:
    """Predicted against measured time by sample, a colour a table."""
    axes = figure.add_subplot()
    tables: dict[str, list[Result]] = {}
    for case, p in results:
        if not p.why:
            tables.setdefault(case.table, []).append((case, p))
    for name, some in tables.items():
        measured = [1e3 * c.sample_s for c, _ in some]
        predicted = [1e3 * p.time_s / c.program.batch for c, p in some]
        axes.scatter(measured, predicted, s=9, alpha=0.7, linewidths=0, label=name)
    low, high = axes.get_xlim()
    ends = [max(low, 1e-3), high]
    axes.plot(ends, ends, color="0.5", linewidth=0.8, zorder=0)
    for factor in (0.8, 1.25):
        line = [factor * x for x in ends]
        axes.plot(ends, line, color="0.75", linewidth=0.6, linestyle="--", zorder=0)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("measured, ms a sample")
    axes.set_ylabel("predicted, ms a sample (dashed: 25 % off)")
    axes.legend(fontsize=6, frameon=False, loc="upper left")
