"""`gpuir eval training`: published training runs on many GPUs, and steps of models on four."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuir.backends.scores import ERRORS, INSIDE, SCHEMA, left_out, number
from gpuir.cli.exam import FILES, ExamOutput, commands_report
from gpuir.cli.output import note
from gpuir.cli.request import ask, held, option, request
from gpuir.report.table import Column, Heading, Notes, Part, Report, fields
from gpuir.report.table import Table as Rows
from gpuir.report.units import percent
from validation import runs
from validation.ranks import is_fitted
from validation.runs import Run

if TYPE_CHECKING:
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

LEGEND = (
    "Errors in percent of the measured step, positive where too slow is predicted; inside: of the"
    " 80 % interval, which is that of the kernels alone. Lines of one configuration in several"
    " releases are one case."
)
GROUPED = (
    *fields("file"),
    Column("runs", field="op"),
    *fields("target"),
    number("cases", field="n", form=","),
    *ERRORS,
    INSIDE,
)


def report(tables: Sequence[Table]) -> Report:
    """Each configuration, and errors by group, which programs have a row each of."""

    def found() -> dict[str, Any]:
        from gpuir.cost.tile import BY

        return {
            "kind": "training",
            "predictor": BY,
            "rows": Rows([e for t in tables for e in scores(t)], GROUPED),
            "cases": [{"file": t.file, **row} for t in tables for row in _cases(t).records()],
            "files": [
                {"file": t.file, "lines": t.lines, "scored": len(t.forecasts)}
                | {"skipped": t.skipped}
                for t in tables
            ],
        }

    return Report(SCHEMA, lambda: (part for t in tables for part in _parts(t)), found)


def _parts(table: Table) -> Iterator[Part]:
    count = len(table.forecasts)
    yield Heading(f"{table.file}: {count} configurations of {table.lines} published runs")
    if table.forecasts:
        yield Notes([("", LEGEND)], 0)
        yield _cases(table)
        yield Rows(scores(table), GROUPED)
    if table.skipped:
        yield left_out(table.skipped)
    said = Counter(text for f in table.forecasts for text in f.assumed)
    if said:
        yield Notes([("assumed", f"of {n}: {text}") for text, n in sorted(said.items())])


def _cases(table: Table) -> Rows:
    def largest(f: Forecast) -> str:
        some = sorted(f.parts.items(), key=lambda x: -x[1])[:3]
        return ", ".join(f"{name} {percent(s, f.time_s)}" for name, s in some)

    return Rows(
        table.forecasts,
        (
            *fields("id task dp tp pp vp cp ep batch framework version", "run"),
            Column("model", "", "model", "run.model"),
            Column("gpu", "", "target", "run.target"),
            Column("gpus", "count", "gpus", "run.gpus"),
            Column("layout", "", "layout", "run.layout"),
            Column("seq", "count", "seq", "run.seq", drop=3),
            Column(
                "micro", "count", "micro", "run.micro", lambda f: str(f.run.micro or "-"), drop=1
            ),
            Column("dtype", "", "dtype", "run.dtype", drop=2),
            Column("measured", "s", "measured_s", "run.measured_s", digits=4),
            Column("predicted", "s", "predicted_s", "time_s", digits=4),
            number("error", field="error", form="+.1f"),
            Column("largest parts", "", "parts_s", "parts", largest),
            Column(field="interval_s", value="interval"),
            *fields("assumed"),
            Column(field="command", value="asked.command"),
        ),
    )


@dataclass(frozen=True)
class Training:
    files: tuple[str, ...] = ask(FILES)
    models: str | None = option(
        f"Facts of the models.  [{runs.MODELS_FILE} or {CONFIGS_FILE} beside them]"
    )
    shown: ExamOutput = held(ExamOutput)


@request(Training)
def training(asked: Training) -> None:
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
    asked.shown.check()
    paths = dict.fromkeys(asked.files)
    for path in paths:
        read(path, asked.models)
    tables = [evaluate(path, asked.models) for path in paths]
    rows = (f.row for t in tables for f in t.forecasts)
    asked.shown.show(commands_report("training", rows) if asked.shown.commands else report(tables))
