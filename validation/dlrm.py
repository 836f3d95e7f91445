"""`gpuir eval dlrm`: training iterations against measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuir.backends.scores import ERRORS, INSIDE, SCHEMA, left_out, number
from gpuir.cli.exam import FILES, ExamOutput, ScoredRow, commands_report
from gpuir.cli.output import note
from gpuir.cli.request import ask, held, option, request
from gpuir.report.table import Column, Heading, Notes, Part, Report, fields
from gpuir.report.table import Table as Rows
from gpuir.report.units import quantity

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.targets.profile import Profile
    from validation.sharded import Forecast

# The GPUs, at the clocks that init_vars.sh of github.com/owensgroup/ml_perf_model locks.
DEVICES = {
    "V100": "v100-sxm-16gb+clock_hz=1.297e9",
    "Titan Xp": "titan-xp+clock_hz=1.404e9+dram.bytes_per_s=528.5e9",
}
# The host of those traces is that of `eager`, before the share of current machines in it
# (specs/profiles/eager.toml, validation/agreement/host_overheads.py). Its launches were traced with
# the profiler on, whose own time its authors put at 2 us for an event of the host and 4 us for one
# of the device (CPU_EVENT_OVERHEAD and GPU_EVENT_OVERHEAD, analysis/utils.py there).
CURRENT_SHARE = 0.39
PROFILED_S = 6e-6
MEMCPY_S = 17.14e-6 - PROFILED_S  # the call, as traced: kernels/host_overheads.csv
# Copies of inputs from pinned memory: 6.2 of 8 GB/s (Harris, How to Optimize Data Transfers in CUDA
# C/C++, NVIDIA 2012).
PINNED_SHARE = 6.2 / 8
LEAST_APE = 0.5  # of a geometric mean, percent: the errors beside it were read off a figure to that

MODELS_FILE = "embedding_models.json"
COLUMNS = ("gpu", "model", "batch", "phase", "measured_iter_ms")
PUBLISHED = ("err_e2e_pct", "err_gpu_active_pct", "err_kernel_sum_only_pct", "abs_err_ours_pct")


@dataclass(frozen=True)
class Case:
    """An iteration as it was measured: its time, how long the device was active (kernels and
    copies; NaN where the table does not say), and the error of the published model in percent."""

    gpu: str
    target: str
    model: str
    batch: int
    measured_s: float
    active_s: float
    published: float
    published_active: float

    @property
    def op(self) -> str:
        return self.model


@dataclass(frozen=True)
class Result:
    """What is predicted of a case: time, active device, between what 80 % of measurements lie."""

    case: Case
    time_s: float
    active_s: float
    interval: tuple[float, float] | None
    launches: int

    @property
    def error(self) -> float:
        return 100 * (self.time_s / self.case.measured_s - 1)

    @property
    def active_error(self) -> float:
        return 100 * (self.active_s / self.case.active_s - 1)

    @property
    def is_inside(self) -> bool:
        low, high = self.interval or (math.nan, math.nan)
        return low <= self.case.measured_s <= high


@dataclass(frozen=True)
class Table:
    """The cases of a file, what is predicted of them, and what was left out by reason."""

    file: str
    results: tuple[Result, ...]
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Steps:
    """Published steps with tables over many GPUs, what is predicted of them, and what was left out
    by reason."""

    file: str
    forecasts: tuple[Forecast, ...]
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Errors:
    """Errors of cases that belong together, in percent of the measurement: geometric mean, mean and
    median of the absolute ones, the mean signed one, the share inside the 80 % interval, and the
    published model's mean on the same cases."""

    file: str
    op: str
    device: str
    target: str
    n: int
    gmape: float
    mape: float
    median_ape: float
    bias: float
    coverage: float | None
    published_mape: float | None


# ---- reading -----------------------------------------------------------------------------------


def read(path: str | Path) -> tuple[list[Case], dict[str, int]]:
    """The cases of a table, and why lines are none. UsageError where columns are missing."""
    from gpuir.fit.columns import TableFile
    from gpuir.fit.tables import target_of
    from gpuir.ir.errors import UsageError

    file = TableFile(Path(path))
    missing = [name for name in COLUMNS if name not in file.names]
    if missing:
        raise UsageError(
            "not a table of training iterations",
            where=str(path),
            expected=f"the columns {', '.join(COLUMNS)}",
            found=f"no {', '.join(missing)}",
        )
    columns = file.read((*COLUMNS, *PUBLISHED))
    words = {n: columns.words(n) for n in ("gpu", "model", "phase")}
    numbers = {n: columns.numbers(n) for n in ("batch", "measured_iter_ms", *PUBLISHED)}
    cases: list[Case] = []
    skipped: dict[str, int] = {}
    for i in range(columns.count):
        cells: list[Any] = [w.names[w.codes[i]] for w in words.values()]
        gpu, model, phase = map(str, cells)
        batch, ms, end, active, kernels, other = (
            float(numbers[n][i]) for n in ("batch", "measured_iter_ms", *PUBLISHED)
        )
        target = DEVICES.get(gpu) or (t.name if (t := target_of(gpu)) else "")
        why = ""
        if phase != "train":
            why = f"phase {phase}: only training iterations are built"
        elif model not in programs():
            why = f"nobody has said what {model} is"
        elif not target:
            why = f"no target is called {gpu}"
        elif not (ms > 0 and batch >= 1 and batch.is_integer()):
            why = "no time, or no batch"
        if why:
            skipped[why] = skipped.get(why, 0) + 1
            continue
        # What the published model said of the device, over the measured iteration, and over the
        # device's measured time.
        seconds = ms * 1e-3 * (1 + kernels / 100) / (1 + active / 100)
        known = end if not math.isnan(end) else other
        cases.append(Case(gpu, target, model, int(batch), ms * 1e-3, seconds, known, active))
    return cases, skipped


def programs() -> Sequence[str]:
    from validation import convnets, recommenders

    return (*recommenders.MODELS, *convnets.MODELS)


# ---- predicting --------------------------------------------------------------------------------


@cache
def host() -> Profile:
    """PyTorch, eager, on the machine that was traced."""
    import gpuir
    from gpuir.targets.profile import Copies

    eager = gpuir.load_profile("eager")
    traced = eager.host.scaled(1 / CURRENT_SHARE)
    traced = replace(traced, launch_s=traced.launch_s - PROFILED_S)
    return replace(eager, host=traced, copies=Copies(MEMCPY_S, PINNED_SHARE))


@lru_cache(1)
def step_of(model: str, batch: int) -> Graph:
    """A training step of a model, kept until another is asked for."""
    from validation import convnets, recommenders

    if model in convnets.MODELS:
        return convnets.step(model, batch)
    return recommenders.step(recommenders.MODELS[model], batch)


def predicted(case: Case) -> Result:
    """The spans of an iteration one after another, each from an idle device."""
    import gpuir
    from validation import convnets, recommenders

    here, alone = host(), replace(host(), copies=None)
    costed = gpuir.analyze(step_of(case.model, case.batch), case.target, profile="eager").graph
    if case.model in convnets.MODELS:
        runs = [gpuir.timeline(span, alone) for span in convnets.spans(costed)]
    else:
        first, second = recommenders.spans(costed)
        runs = [gpuir.timeline(first, here), gpuir.timeline(second, alone)]
    between = [run.interval for run in runs if run.interval is not None]
    return Result(
        case,
        sum(run.time_s for run in runs),
        sum(run.busy_s + run.copies_s for run in runs),
        (sum(low for low, _ in between), sum(high for _, high in between)) if between else None,
        sum(len(run.starts) for run in runs),
    )


def evaluate(files: Iterable[str], models: str | None = None) -> list[Table | Steps]:
    from validation import sharded

    tables: list[Table | Steps] = []
    for path in files:
        if sharded.are_in(path):
            known = sharded.read_models(models_of(path, models))
            runs, skipped = sharded.read(path, known)
            forecasts: list[Forecast] = []
            for one in sharded.forecast(runs, known):
                forecasts.append(one)
                note(f"{one.run.model}, {one.run.gpus} x {one.run.target}: {one.error:+.1f} %")
            tables.append(Steps(str(path), tuple(forecasts), skipped))
            continue
        cases, skipped = read(path)
        results: list[Result] = []
        for case in cases:
            results.append(predicted(case))
            note(f"{case.model} {case.batch} on {case.gpu}: {results[-1].error:+.1f} %")
        tables.append(Table(str(path), tuple(results), skipped))
    return tables


def models_of(path: str, models: str | None) -> Path:
    """The file of the models: as given, or beside the table under its usual name."""
    from gpuir.ir.errors import UsageError

    found = Path(models) if models else Path(path).with_name(MODELS_FILE)
    if not found.exists():
        raise UsageError(
            "the models of these steps are not beside them",
            where=str(found),
            fix="--models embedding_models.json",
        )
    return found


ALONE = "each part of an iteration begins on an idle GPU, under a host that is made here"


def rows(table: Table | Steps) -> Iterator[ScoredRow]:
    """What gives each number, where a command does."""
    if isinstance(table, Steps):
        for f in table.forecasts:
            yield from f.rows
        return
    for r in table.results:
        yield ScoredRow(r.time_s, "s", "", ALONE)


# ---- scoring -----------------------------------------------------------------------------------


def step_scores(steps: Steps) -> list[Errors]:
    """By software, and of each GPU."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for f in steps.forecasts:
        software = "TensorFlow" if f.run.model.startswith("synthetic") else "PyTorch"
        for device in (f.run.target, "all"):
            groups.setdefault((software, device, device), []).append(f.error)
    return [
        _errors(steps.file, f"sharded step, {software}", place, errors, None, [])
        for (software, *place), errors in groups.items()
    ]


def scores(table: Table) -> list[Errors]:
    """By model family and GPU, and of all GPUs; what the device is active by itself."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for r in table.results:
        family = r.case.model.partition("_")[0]
        for device, target in ((r.case.gpu, r.case.target), ("all", "all")):
            groups.setdefault((family, device, target), []).append(r)
    found: list[Errors] = []
    for (family, *place), some in groups.items():
        ends = [r.error for r in some]
        inside = [r.is_inside for r in some if r.interval]
        coverage = 100 * sum(inside) / len(inside) if inside else None
        published = [abs(r.case.published) for r in some if not math.isnan(r.case.published)]
        found.append(_errors(table.file, f"{family} iteration", place, ends, coverage, published))
        busy = [r for r in some if not math.isnan(r.case.active_s)]
        if busy:
            apart = [r.active_error for r in busy]
            published = [abs(r.case.published_active) for r in busy]
            found.append(_errors(table.file, f"{family} active", place, apart, None, published))
    return found


def _errors(
    file: str,
    op: str,
    place: Sequence[str],
    errors: Sequence[float],
    coverage: float | None,
    published: Sequence[float],
) -> Errors:
    off = np.abs(errors)
    return Errors(
        *(file, op, *place),
        n=len(off),
        gmape=float(np.exp(np.mean(np.log(np.maximum(off, LEAST_APE))))),
        mape=float(off.mean()),
        median_ape=float(np.median(off)),
        bias=float(np.mean(errors)),
        coverage=coverage,
        published_mape=float(np.mean(published)) if published else None,
    )


# ---- writing -----------------------------------------------------------------------------------

LEGEND = (
    "Errors in percent of the measurement, positive where too slow is predicted; active: kernels"
    " and copies alone; theirs: of the published model, which takes traces of the very run. gmean:"
    f" the geometric mean of absolute errors, each at least {LEAST_APE}."
)


def report(tables: Sequence[Table | Steps]) -> Report:
    """Each case, and errors of cases together, which programs have a row each of."""

    def parts() -> Iterator[Part]:
        for t in tables:
            yield from _steps(t) if isinstance(t, Steps) else _iterations(t)
            if t.skipped:
                yield left_out(t.skipped)

    def found() -> dict[str, Any]:
        from gpuir.cost.tile import BY

        cases = [
            {"file": t.file, **row}
            for t in tables
            for row in (_published(t) if isinstance(t, Steps) else _cases(t)).records()
        ]
        files = [{"file": t.file, "scored": len(_of(t)), "skipped": t.skipped} for t in tables]
        groups = [e for t in tables for e in _scores(t)]
        head = {"kind": "dlrm", "predictor": BY}
        return {**head, "rows": Rows(groups, COLUMNS_OF_ERRORS), "cases": cases, "files": files}

    return Report(SCHEMA, parts, found)


def _of(t: Table | Steps) -> Sequence[Any]:
    return t.forecasts if isinstance(t, Steps) else t.results


def _scores(t: Table | Steps) -> list[Errors]:
    return step_scores(t) if isinstance(t, Steps) else scores(t)


COLUMNS_OF_ERRORS = (
    *fields("file"),
    Column("what", field="op"),
    Column("gpu", field="device"),
    *fields("target"),
    number("cases", field="n", form=","),
    number("gmean", field="gmape"),
    *ERRORS,
    INSIDE,
    number("theirs, mean", field="published_mape"),
)


def _iterations(table: Table) -> Iterator[Part]:
    yield Heading(f"{table.file}: {len(table.results)} training iterations")
    if table.results:
        yield Notes([("", LEGEND)], 0)
        yield _cases(table)
        yield Rows(scores(table), COLUMNS_OF_ERRORS)
    built = dict.fromkeys(r.case.model for r in table.results)
    if lines := [("assumed", f"{m}: {assumed()[m]}") for m in built if m in assumed()]:
        yield Notes(lines)


def assumed() -> Mapping[str, str]:
    from validation.recommenders import ASSUMED

    return ASSUMED


def _cases(table: Table) -> Rows:
    return Rows(
        table.results,
        (
            Column("gpu", "", "device", "case.gpu"),
            *fields("target", "case"),
            Column("model", "", "model", "case.model"),
            Column("batch", "count", "batch", "case.batch"),
            Column("measured", "s", "measured_s", "case.measured_s"),
            Column("predicted", "s", "predicted_s", "time_s"),
            number("error", field="error", form="+.1f"),
            number("theirs", "case.published", field="published_error", form="+.1f"),
            Column("inside", "", "inside", "is_inside", lambda r: "yes" if r.is_inside else "no"),
            Column("active", "s", "measured_active_s", "case.active_s"),
            Column("predicted", "s", "predicted_active_s", "active_s"),
            number("error", field="active_error", form="+.1f"),
            number("theirs", "case.published_active", field="published_active_error", form="+.1f"),
            Column(field="interval_s", value="interval"),
            *fields("launches"),
        ),
    )


def _steps(steps: Steps) -> Iterator[Part]:
    from validation.sharded import in_order

    yield Heading(f"{steps.file}: {len(steps.forecasts)} published steps, tables over GPUs")
    yield _published(steps)
    yield Rows(step_scores(steps), COLUMNS_OF_ERRORS)
    right, pairs = in_order(steps.forecasts)
    of = f"{right} of {pairs} pairs of runs of one model and dtype that lie 5 % apart at least"
    yield Notes([("in order", of)])


def _published(steps: Steps) -> Rows:
    def largest(f: Forecast) -> str:
        some = sorted(f.parts.items(), key=lambda x: -x[1])[:3]
        return ", ".join(f"{name} {quantity(s, 's')}" for name, s in some)

    return Rows(
        steps.forecasts,
        (
            Column("model", "", "model", "run.model"),
            Column("gpu", "", "target", "run.target"),
            Column("gpus", "count", "gpus", "run.gpus"),
            Column("dtype", "", "dtype", "run.dtype"),
            *fields("batch", "run"),
            Column("measured", "s", "measured_s", "run.measured_s"),
            Column("predicted", "s", "predicted_s", "time_s"),
            number("error", field="error", form="+.1f"),
            Column("largest parts", "", "parts", text=largest),
        ),
    )


@dataclass(frozen=True)
class Dlrm:
    files: tuple[str, ...] = ask(FILES)
    models: str | None = option(f"Models of sharded steps.  [{MODELS_FILE} beside them]")
    shown: ExamOutput = held(ExamOutput)


@request(Dlrm)
def dlrm(asked: Dlrm) -> None:
    """Training of recommenders: FILES are tables of iterations on one GPU, or of steps with their
    embeddings over many.

    Each is built as it was trained (docs/validation/data.md). Iterations are predicted on the host
    that was traced, and beside them stands what the published model missed by.

    \b
    gpuir eval dlrm dlrm_e2e.csv
    gpuir eval dlrm dlrm_e2e.csv embedding_sharding.csv --json -
    """
    from validation import sharded

    asked.shown.check()
    for path in asked.files:
        if sharded.are_in(path):
            sharded.read(path, sharded.read_models(models_of(path, asked.models)))
        else:
            read(path)
    tables = evaluate(dict.fromkeys(asked.files), asked.models)
    given = (row for t in tables for row in rows(t))
    asked.shown.show(commands_report("dlrm", given) if asked.shown.commands else report(tables))
