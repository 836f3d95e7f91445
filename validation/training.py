"""`gpuir eval training`: published training runs on many GPUs, and steps of models on four."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from gpuir.cli import commands, options
from gpuir.cli.output import check_ahead, emit, layout, note
from validation import runs
from validation.ranks import is_fitted
from validation.runs import Run

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page, Terminal
    from validation.ranks import Forecast

# By what errors are grouped: the name of the group, and of what in it a run is.
GROUPS: Mapping[str, Callable[[Run], str]] = {
    "family": lambda r: r.family,
    "layout": lambda r: r.layout,
    "gpus": lambda r: scale(r.gpus),
    "gpu": lambda r: r.target,
    "dtype": lambda r: r.dtype,
    "framework": lambda r: r.framework,
    "constants": lambda r: "fitted to these" if is_fitted(r) else "not fitted to these",
}
CONFIGS_FILE = "model_configs.json"
SCALES = (1, 8, 16, 64, 128)  # GPUs up to which runs are of one scale


@dataclass(frozen=True)
class Table:
    """What is predicted of the runs of a file: of each configuration once, its measurement the mean
    of its releases; how many lines those were, and what was left out by reason."""

    file: str
    forecasts: tuple[Forecast, ...]
    lines: int
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Errors:
    """Errors of configurations that belong together (`op`: which group), in percent of the
    measurement: mean and median of the absolute ones, the mean signed one, and the share inside the
    80 % interval."""

    file: str
    op: str
    target: str
    n: int
    mape: float
    median_ape: float
    bias: float
    coverage: float


def scale(gpus: int) -> str:
    low = 1
    for high in SCALES:
        if gpus <= high:
            return f"{low} to {high} GPUs" if low < high else "1 GPU"
        low = high + 1
    return f"{low} GPUs and more"


# ---- evaluating --------------------------------------------------------------------------------


def grouped(found: Iterable[Run]) -> list[Run]:
    """One run of each configuration, with the mean of its releases' times."""
    same: dict[Any, list[Run]] = {}
    for run in found:
        same.setdefault(run.key, []).append(run)
    return [
        replace(some[0], measured_s=sum(r.measured_s for r in some) / len(some))
        for some in same.values()
    ]


def read(path: str, models: str | None) -> tuple[list[Run], dict[str, int]]:
    """The runs of a table of either kind, and why lines are none."""
    if runs.are_labels(path):
        from validation.models import read_configs

        return runs.read_labels(path, read_configs(str(models_of(path, models, CONFIGS_FILE))))
    if runs.are_others(path):
        return runs.read_others(path)
    return runs.read(path, runs.read_facts(models_of(path, models)))


def evaluate(path: str, models: str | None) -> Table:
    from validation.ranks import forecast

    found, skipped = read(path, models)
    made: list[Forecast] = []
    for i, run in enumerate(once := grouped(found)):
        made.append(forecast(run))
        if i % 20 == 19:
            note(f"{Path(path).name}: {i + 1} of {len(once)} configurations")
    return Table(path, tuple(made), len(found), skipped)


def models_of(path: str, models: str | None, usual: str = runs.MODELS_FILE) -> Path:
    """The file of the models: as given, or beside the table under its usual name."""
    from gpuir.ir.errors import UsageError

    found = Path(models) if models else Path(path).with_name(usual)
    if not found.exists():
        raise UsageError(
            "the models of these runs are not beside them",
            where=str(found),
            fix=f"--models {usual}",
        )
    return found


def scores(table: Table) -> list[Errors]:
    """Of all configurations, and by each of GROUPS."""
    made = [_errors(table.file, "all", "all", table.forecasts)] if table.forecasts else []
    for stated in (True, False):
        some = [f for f in table.forecasts if f.is_stated == stated]
        if some:
            name = f"stack: {'stated' if stated else 'assumed in part'}"
            made.append(_errors(table.file, name, _target(some), some))
    for name, of in GROUPS.items():
        groups: dict[str, list[Forecast]] = {}
        for f in table.forecasts:
            groups.setdefault(of(f.run), []).append(f)
        made += [_errors(table.file, f"{name}: {g}", _target(x), x) for g, x in groups.items()]
    return made


def _target(some: Sequence[Forecast]) -> str:
    names = {f.run.target for f in some}
    return names.pop() if len(names) == 1 else "all"


def _errors(file: str, op: str, target: str, some: Sequence[Forecast]) -> Errors:
    errors = np.array([f.error for f in some])
    off = np.abs(errors)
    return Errors(
        *(file, op, target, len(some)),
        mape=float(off.mean()),
        median_ape=float(np.median(off)),
        bias=float(errors.mean()),
        coverage=100 * sum(f.is_inside for f in some) / len(some),
    )


# ---- writing -----------------------------------------------------------------------------------


def json_text(tables: Sequence[Table]) -> str:
    """`{"schema", "kind": "training", "rows": [...], "cases": [...], "files": [...]}`."""
    from gpuir.backends.scores import SCHEMA
    from gpuir.cost.tile import BY

    rows = [_rounded(vars(e)) | {"device": e.target} for t in tables for e in scores(t)]
    cases = [_case(t.file, f) for t in tables for f in t.forecasts]
    files = [
        {"file": t.file, "lines": t.lines, "scored": len(t.forecasts), "skipped": dict(t.skipped)}
        for t in tables
    ]
    head = {"schema": SCHEMA, "kind": "training", "predictor": BY}
    text = {**head, "rows": rows, "cases": cases, "files": files}
    return json.dumps(text, indent=1, allow_nan=False) + "\n"


def _case(file: str, f: Forecast) -> dict[str, Any]:
    names = "id model task seq target gpus dp tp pp vp cp ep micro batch dtype framework version"
    run = {n: getattr(f.run, n) for n in names.split()}
    numbers = {"measured_s": f.run.measured_s, "predicted_s": f.time_s, "error": f.error}
    return {
        "file": file,
        **run,
        "layout": f.run.layout,
        **_rounded(numbers),
        "interval_s": [float(f"{x:.6g}") for x in f.interval],
        "parts_s": _rounded(f.parts),
        "assumed": list(f.assumed),
        "command": f.asked.command,
    }


def _rounded(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        n: (None if math.isnan(v) else float(f"{v:.6g}")) if isinstance(v, float) else v
        for n, v in numbers.items()
    }


LEGEND = (
    "Errors in percent of the measured step, positive where too slow is predicted; inside: of the"
    " 80 % interval, which is that of the kernels alone. Lines of one configuration in several"
    " releases are one case."
)


def report(tables: Sequence[Table], layout: Terminal) -> str:
    from gpuir.backends.terminal import Page

    page = Page(layout.width, layout.color)
    for i, table in enumerate(tables):
        if i:
            page.line()
        count = len(table.forecasts)
        page.heading(f"{table.file}: {count} configurations of {table.lines} published runs")
        if table.forecasts:
            page.wrapped("", LEGEND, 0)
            page.line()
            _cases(page, table)
            page.line()
            _groups(page, scores(table))
        for reason, n in sorted(table.skipped.items()):
            page.wrapped("left out", f"{n} line{'s' * (n != 1)}: {reason}")
        said: dict[str, int] = {}
        for f in table.forecasts:
            for text in f.assumed:
                said[text] = said.get(text, 0) + 1
        for text, n in sorted(said.items()):
            page.wrapped("assumed", f"of {n}: {text}")
    return page.text()


def _cases(page: Page, table: Table) -> None:
    columns = [("model", False), ("gpu", False), ("gpus", True), ("layout", False)]
    columns += [("seq", True), ("micro", True), ("dtype", False), ("measured", True)]
    columns += [("predicted", True), ("error", True), ("largest parts", False)]
    rows = [
        (
            *(f.run.model, f.run.target, str(f.run.gpus), f.run.layout, str(f.run.seq)),
            *(str(f.run.micro or "-"), f.run.dtype, f"{f.run.measured_s:.3f} s"),
            *(f"{f.time_s:.3f} s", f"{f.error:+.1f}"),
            ", ".join(
                f"{name} {100 * s / f.time_s:.0f} %"
                for name, s in sorted(f.parts.items(), key=lambda x: -x[1])[:3]
            ),
        )
        for f in table.forecasts
    ]
    page.table(columns, rows)


def _groups(page: Page, groups: Sequence[Errors]) -> None:
    columns = [("runs", False), ("cases", True), ("mean", True), ("median", True)]
    columns += [("bias", True), ("inside", True)]
    rows = [
        (
            *(e.op, str(e.n), f"{e.mape:.1f}", f"{e.median_ape:.1f}", f"{e.bias:+.1f}"),
            f"{e.coverage:.0f} %",
        )
        for e in groups
    ]
    page.table(columns, rows)


@click.command()
@click.argument("files", nargs=-1, type=click.Path())
@click.option(
    "--models",
    type=click.Path(),
    help=f"Facts of the models.  [{runs.MODELS_FILE} or {CONFIGS_FILE} beside them]",
)
@click.option("--json", "json_path", type=click.Path(), help="Write the scores here as JSON.")
@commands.option
@options.width
@options.output
def training(files: tuple[str, ...], **given: Any) -> None:
    """Training on many GPUs: FILES are tables of published runs.

    Each is built from the facts of its model and laid out as its page says
    (docs/validation/data.md).

    \b
    gpuir eval training llm_training.csv
    gpuir eval training llm_training.csv --json scores.json
    gpuir eval training llm_training.csv --commands
    gpuir eval training model_labels.csv          (the lines of several GPUs)
    gpuir eval training other_models.csv          (BERT)
    """
    from gpuir.ir.errors import UsageError

    if not files:
        raise UsageError("no table is given", fix="gpuir eval training FILE...")
    check_ahead(given["json_path"])
    for path in dict.fromkeys(files):
        read(path, given["models"])
    tables = [evaluate(path, given["models"]) for path in dict.fromkeys(files)]
    if given["json_path"]:
        emit(json_text(tables), given["json_path"])
    if given["commands"]:
        rows = (f.row for t in tables for f in t.forecasts)
        emit(commands.report(rows), given["output"])
    elif given["json_path"] != "-":
        emit(report(tables, layout(given["width"], given["output"])), given["output"])
