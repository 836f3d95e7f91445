"""`gpuir eval models` of published throughputs: a report, JSON, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields as program_fields
from dataclasses import replace
from fnmatch import fnmatch
from os import cpu_count
from pathlib import Path
from typing import Any

from gpuir.backends.picture import FORMS
from gpuir.backends.picture import picture as drawing
from gpuir.backends.scores import SCHEMA, left_out, number
from gpuir.cli.exam import ExamOutput
from gpuir.cli.output import check_ahead, emit, note
from gpuir.cost.tile import BY
from gpuir.ir.errors import UsageError
from gpuir.report.table import Column, Heading, Notes, Part, Report, fields
from gpuir.report.table import Table as Rows
from validation.throughput.cases import Program, Table, read
from validation.throughput.predict import Result, predict
from validation.throughput.scores import gains, scored

LEGEND = (
    "Errors in percent of the measured time: mean, median, 90th percentile, and signed mean"
    " (positive where too slow is predicted); the percentage of cases inside their 80 % interval;"
    " the mean error of the roofline over the same launches. a, b: mean errors of the two halves of"
    " the models, by name. rank: Spearman's correlation of time by sample. pairs: the percentage of"
    " pairs 5 to 50 % apart that are in the right order."
)


def show(
    files: Sequence[str],
    shown: ExamOutput,
    *,
    store: str | None,
    jobs: int | None,
    model: Sequence[str],
    each: bool,
    picture: str | None,
) -> None:
    """The scores of tables to where a command's options say."""
    drawn = picture
    form = "" if drawn is None else Path(drawn).suffix.removeprefix(".")
    if drawn is not None and form not in FORMS:
        raise UsageError("no such picture", where=drawn, expected=", ".join("." + f for f in FORMS))
    check_ahead(drawn)
    tables = [_chosen(read(path), model) for path in dict.fromkeys(files)]
    cases = [c for t in tables for c in t.cases]
    kept = Path(store) if store else None
    found = predict(cases, jobs=jobs or cpu_count() or 1, kept=kept, watch=note)
    order = {case: i for i, case in enumerate(cases)}
    results = sorted(found, key=lambda r: order[r[0]])
    if drawn is not None:
        emit(drawing(form, (7, 7), lambda figure: _draw(figure, results)), drawn)
    shown.show(throughputs_report(tables, results, each))


def _chosen(table: Table, models: Sequence[str]) -> Table:
    if not models:
        return table
    kept = [c for c in table.cases if any(fnmatch(c.program.model, m) for m in models)]
    left = {**table.skipped, "not among --model": len(table.cases) - len(kept)}
    return replace(table, cases=tuple(kept), skipped={n: x for n, x in left.items() if x})


# ---------------------------------------------------------------------------- the report


def throughputs_report(
    tables: Sequence[Table], results: Sequence[Result], each: bool = False
) -> Report:
    """Errors by table, what a change gains, `each` case, and what is left out. Programs have a row
    for each table."""

    def parts() -> Iterator[Part]:
        files = ", ".join(t.file for t in tables)
        yield Heading(f"{files}: {len(results)} cases of whole models")
        yield Notes([("", LEGEND)], 0)
        yield _scores(results)
        yield _gains(results)
        if each:
            yield _cases(results)
        reasons = Counter(p.why.splitlines()[0] for _, p in results if p.why)
        reasons.update({f"{t.file}: {why}": n for t in tables for why, n in t.skipped.items()})
        if reasons:
            yield left_out(reasons)

    return Report(
        SCHEMA,
        parts,
        lambda: {
            "kind": "models",
            "predictor": BY,
            "cases": _cases(results).records(),
            "tables": _scores(results),
            "gains": gains(results),
            "files": [{"file": t.file, "rows": t.count, "skipped": t.skipped} for t in tables],
        },
    )


def _scores(results: Sequence[Result]) -> Rows:
    def half(name: str) -> Column:
        return number(name, lambda s: s.halves[name].mape if name in s.halves else None, drop=1)

    return Rows(
        scored(results),
        (
            Column("table", field="table"),
            number("cases", "errors.n", form=","),
            number("mean", "errors.mape"),
            number("median", "errors.median_ape", drop=3),
            number("p90", "errors.p90_ape", drop=4),
            number("bias", "errors.bias", form="+.1f"),
            number("inside", "errors.coverage", form=".0f"),
            number("roofline", "errors.roofline_mape"),
            half("a"),
            half("b"),
            number("rank", field="spearman", form=".2f"),
            number("pairs", lambda s: 100 * s.ordered, form=".0f"),
            Column(field="errors", inline=True),
            *fields("halves ordered"),
            Column(field="near_pairs", value="near"),
        ),
    )


def _gains(results: Sequence[Result]) -> Rows:
    return Rows(
        gains(results),
        (
            Column("gain of", field="change"),
            Column("on", field="of"),
            number("models", lambda g: len(g.models), form=","),
            number("measured", field="measured", form=".2f"),
            number("predicted", field="predicted", form=".2f"),
            number("error", field="error"),
            number("rank", field="spearman", form=".2f"),
        ),
        caption="old time by new, medians over models; error of the gain in percent; rank",
    )


def _cases(results: Sequence[Result]) -> Rows:
    def error(name: str) -> Callable[[Result], float]:
        def of(r: Result) -> float:
            return 100 * (getattr(r[1], name) / r[0].measured_s - 1)

        return of

    def inside(r: Result) -> str:
        return "yes" if r[1].low_s <= r[0].measured_s <= r[1].high_s else "no"

    def of(names: str, i: int) -> Iterator[Column]:
        return (Column(field=n, value=lambda r, n=n: getattr(r[i], n)) for n in names.split())

    return Rows(
        results,
        (
            Column("model", value=lambda r: r[0].program.model),
            Column("batch", "count", value=lambda r: r[0].program.batch),
            Column("measured", "s", "measured_s", lambda r: r[0].measured_s),
            Column("predicted", "s", "time_s", lambda r: r[1].time_s),
            number("error", error("time_s"), form="+.1f"),
            Column("inside", text=inside, drop=3),
            number("roofline", error("roofline_s"), form="+.1f", drop=2),
            Column("launches", "count", "launches", lambda r: r[1].launches, drop=1),
            Column("table", "", "table", lambda r: r[0].table),
            *of("file row target profile half", 0),
            *of("low_s high_s device_s roofline_s why", 1),
            *(
                Column(field=f.name, value=lambda r, n=f.name: getattr(r[0].program, n))
                for f in program_fields(Program)
            ),
        ),
    )


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
