"""`gpuir eval dlrm`: training iterations against measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from gpuir.cli import commands, options
from gpuir.cli.output import check_ahead, emit, layout, note

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page, Terminal
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


ALONE = "an iteration in parts that begin on an idle device: validation/dlrm.py alone has them"


def rows(table: Table | Steps) -> Iterator[commands.ScoredRow]:
    """What gives each number, where a command does."""
    if isinstance(table, Steps):
        for f in table.forecasts:
            yield from f.rows
        return
    for r in table.results:
        yield commands.ScoredRow(r.time_s, "s", "", ALONE)


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


def json_text(found: Sequence[Table | Steps]) -> str:
    """`{"schema", "kind": "dlrm", "rows": [...], "cases": [...], "files": [...]}`; README.md."""
    from gpuir.backends.scores import SCHEMA
    from gpuir.cost.tile import BY

    tables = [t for t in found if isinstance(t, Table)]
    published = [t for t in found if isinstance(t, Steps)]
    rows = [_rounded(vars(e)) | {"dtype": "fp32"} for t in tables for e in scores(t)]
    rows += [_rounded(vars(e)) | {"dtype": "all"} for t in published for e in step_scores(t)]
    cases = [_case(t.file, r) for t in tables for r in t.results]
    cases += [_step(t.file, f) for t in published for f in t.forecasts]
    files = [
        {"file": t.file, "scored": count, "skipped": dict(t.skipped)}
        for t in found
        for count in (len(t.results if isinstance(t, Table) else t.forecasts),)
    ]
    head = {"schema": SCHEMA, "kind": "dlrm", "predictor": BY}
    text = {**head, "rows": rows, "cases": cases, "files": files}
    return json.dumps(text, indent=1, allow_nan=False) + "\n"


def _case(file: str, r: Result) -> dict[str, Any]:
    c = r.case
    numbers = {
        "measured_s": c.measured_s,
        "predicted_s": r.time_s,
        "error": r.error,
        "measured_active_s": c.active_s,
        "predicted_active_s": r.active_s,
        "active_error": r.active_error,
        "published_error": c.published,
        "published_active_error": c.published_active,
    }
    place = {"file": file, "device": c.gpu, "target": c.target, "model": c.model, "batch": c.batch}
    between = None if r.interval is None else [float(f"{x:.6g}") for x in r.interval]
    return place | _rounded(numbers) | {"interval_s": between, "launches": r.launches}


def _step(file: str, f: Forecast) -> dict[str, Any]:
    run = f.run
    place = {"file": file, "device": run.target, "target": run.target, "model": run.model}
    numbers = {"measured_s": run.measured_s, "predicted_s": f.time_s, "error": f.error}
    more = {"batch": run.batch, "gpus": run.gpus, "dtype": run.dtype, "parts": _rounded(f.parts)}
    return place | more | _rounded(numbers)


def _rounded(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        n: (None if math.isnan(v) else float(f"{v:.6g}")) if isinstance(v, float) else v
        for n, v in numbers.items()
    }


LEGEND = (
    "Errors in percent of the measurement, positive where too slow is predicted; active: kernels"
    " and copies alone; theirs: of the published model, which takes traces of the very run. gmean:"
    f" the geometric mean of absolute errors, each at least {LEAST_APE}."
)


def report(tables: Sequence[Table | Steps], layout: Terminal) -> str:
    from gpuir.backends.terminal import Page

    page = Page(layout.width, layout.color)
    for i, table in enumerate(tables):
        if i:
            page.line()
        if isinstance(table, Steps):
            _steps(page, table)
            continue
        page.heading(f"{table.file}: {len(table.results)} training iterations")
        if table.results:
            page.wrapped("", LEGEND, 0)
            page.line()
            _cases(page, table)
            page.line()
            _groups(page, scores(table))
        for reason, count in sorted(table.skipped.items()):
            page.wrapped("skipped", f"{count} line{'s' * (count != 1)}: {reason}")
        for model in dict.fromkeys(r.case.model for r in table.results):
            if model in assumed():
                page.wrapped("assumed", f"{model}: {assumed()[model]}")
    return page.text()


def _steps(page: Page, steps: Steps) -> None:
    from validation.sharded import in_order

    page.heading(f"{steps.file}: {len(steps.forecasts)} published steps, tables over GPUs")
    columns = [("model", False), ("gpu", False), ("gpus", True), ("dtype", False)]
    columns += [("measured", True), ("predicted", True), ("error", True), ("largest parts", False)]
    rows = [
        (
            *(f.run.model, f.run.target, str(f.run.gpus), f.run.dtype),
            *(_ms(f.run.measured_s), _ms(f.time_s), f"{f.error:+.1f}"),
            ", ".join(
                f"{name} {_ms(s)}" for name, s in sorted(f.parts.items(), key=lambda x: -x[1])[:3]
            ),
        )
        for f in steps.forecasts
    ]
    page.table(columns, rows)
    page.line()
    _groups(page, step_scores(steps))
    right, pairs = in_order(steps.forecasts)
    page.line()
    page.wrapped(
        "in order",
        f"{right} of {pairs} pairs of runs of one model and dtype that lie 5 % apart at least",
    )
    for reason, count in sorted(steps.skipped.items()):
        page.wrapped("skipped", f"{count} line{'s' * (count != 1)}: {reason}")


def assumed() -> Mapping[str, str]:
    from validation.recommenders import ASSUMED

    return ASSUMED


def _cases(page: Page, table: Table) -> None:
    columns = [("gpu", False), ("model", False), ("batch", True), ("measured", True)]
    columns += [("predicted", True), ("error", True), ("theirs", True), ("inside", False)]
    columns += [("active", True), ("predicted", True), ("error", True), ("theirs", True)]
    rows = [
        (
            *(r.case.gpu, r.case.model, str(r.case.batch)),
            *(_ms(r.case.measured_s), _ms(r.time_s), f"{r.error:+.1f}"),
            *(_signed(r.case.published), "yes" if r.is_inside else "no"),
            *(_ms(r.case.active_s), _ms(r.active_s), _signed(r.active_error)),
            _signed(r.case.published_active),
        )
        for r in table.results
    ]
    page.table(columns, rows)


def _groups(page: Page, groups: Sequence[Errors]) -> None:
    columns = [("what", False), ("gpu", False), ("cases", True), ("gmean", True), ("mean", True)]
    columns += [("median", True), ("bias", True), ("inside", True), ("theirs, mean", True)]
    rows = [
        (
            *(e.op, e.device, str(e.n), f"{e.gmape:.1f}", f"{e.mape:.1f}"),
            *(f"{e.median_ape:.1f}", f"{e.bias:+.1f}"),
            "-" if e.coverage is None else f"{e.coverage:.0f} %",
            "-" if e.published_mape is None else f"{e.published_mape:.1f}",
        )
        for e in groups
    ]
    page.table(columns, rows)


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f} ms"


def _signed(percent: float) -> str:
    return "-" if math.isnan(percent) else f"{percent:+.1f}"


@click.command()
@click.argument("files", nargs=-1, type=click.Path())
@click.option(
    "--models", type=click.Path(), help=f"Models of sharded steps.  [{MODELS_FILE} beside them]"
)
@click.option("--json", "json_path", type=click.Path(), help="Write the scores here as JSON.")
@commands.option
@options.width
@options.output
def dlrm(files: tuple[str, ...], **given: Any) -> None:
    """Training of recommenders: FILES are tables of iterations on one GPU, or of steps with their
    embeddings over many.

    Each is built as it was trained (docs/validation/data.md). Iterations are predicted on the host
    that was traced, and beside them stands what the published model missed by.

    \b
    gpuir eval dlrm dlrm_e2e.csv
    gpuir eval dlrm dlrm_e2e.csv embedding_sharding.csv --json -
    """
    from gpuir.ir.errors import UsageError
    from validation import sharded

    if not files:
        raise UsageError("no table is given", fix="gpuir eval dlrm FILE...")
    check_ahead(given["json_path"])
    for path in files:
        if sharded.are_in(path):
            sharded.read(path, sharded.read_models(models_of(path, given["models"])))
        else:
            read(path)
    tables = evaluate(dict.fromkeys(files), given["models"])
    if given["commands"]:
        return emit(commands.report(row for t in tables for row in rows(t)), given["output"])
    if given["json_path"]:
        emit(json_text(tables), given["json_path"])
    if given["json_path"] != "-":
        emit(report(tables, layout(given["width"], given["output"])), given["output"])
