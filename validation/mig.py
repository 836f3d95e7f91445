"""`gpuir eval mig`: measurements on MIG slices and on the same GPUs whole.

Absolute times depend on much that the table does not state, so what is judged first is how slices
compare: ratios to the whole GPU, or curves over profiles after one scale for each model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from gpuir.cli import options
from gpuir.cli.output import check_ahead, emit, layout, note
from gpuir.fit.columns import Floats, TableFile
from gpuir.fit.score import ALL, Group, Score, Scores, row_errors
from gpuir.ir.errors import UsageError

if TYPE_CHECKING:
    from gpuir.backends.terminal import Layout

WORDS = (
    *("id", "series", "gpu", "mode", "profile", "co_runners", "scope", "model", "phase"),
    *("framework", "precision", "metric", "quality"),
)
FIELDS = tuple("beside" if n == "co_runners" else n for n in WORDS)  # of a row
NUMBERS = ("n_gpus", "batch", "seq_len", "value")
COLUMNS = (*WORDS, *NUMBERS)
A30 = "a30"
A100 = "a100-sxm-40gb"
SLICES = 4  # of an A30, 1g.6gb
THROUGHPUT = "throughput"
LATENCIES = {"latency p90": "one query", "latency p99 (8-sample query)": "queries of 8"}
IDLE, BUSY = "other instances idle", "all other instances busy with other MLPerf models"
BESIDE = "one instance, others busy"
SAME = "same workload on every instance"
# Images a second that the node of `redhat` prepares for all its jobs: the middle of the 7,300 to
# 8,000 near which it saturates (README of the table).
NODE_IMAGES_PER_S = 7650.0
HOST_BOUND = "host-bound"
RATIO = "published ratio"
USED = ("ok", "official submission", RATIO, HOST_BOUND)
WHY = {
    "unstable": "unstable: over 10 % standard deviation",
    "anecdotal": "anecdotal: no page to cite",
}


@dataclass(frozen=True)
class Row:
    """A line of the table; `gpus` is n_gpus, of `batch` and `seq` 0 is not stated."""

    id: str
    series: str
    gpu: str
    mode: str
    profile: str
    beside: str
    scope: str
    model: str
    phase: str
    framework: str
    precision: str
    metric: str
    quality: str
    gpus: int
    batch: int
    seq: int
    value: float


@dataclass(frozen=True)
class Case:
    """A measurement and what is predicted of it, in `unit`. `op` is what is compared; `apart` says
    why it is not in the totals."""

    row: Row
    op: str
    target: str
    unit: str
    measured: float
    predicted: float
    apart: str = ""

    @property
    def error(self) -> float:
        """In percent of the measurement."""
        return 100 * (self.predicted / self.measured - 1)


@dataclass(frozen=True)
class Fit:
    """Whether a job fits an instance: measured, and predicted."""

    row: Row
    target: str
    measured: bool
    predicted: bool


@dataclass(frozen=True)
class Found:
    """What is made of a table: cases, questions of room, and rows left out by reason."""

    file: str
    count: int
    cases: tuple[Case, ...]
    fits: tuple[Fit, ...]
    skipped: Mapping[str, int]


# ---------------------------------------------------------------------------- reading


def read(path: str | Path) -> tuple[Row, ...]:
    """The rows of a table; UsageError for one of other columns."""
    file = TableFile(Path(path))
    if missing := [name for name in COLUMNS if name not in file.names]:
        raise UsageError(
            "not a table of MIG measurements",
            where=str(path),
            expected=f"the columns {', '.join(COLUMNS)}",
            found=f"no {', '.join(missing)}",
            fix="gpuir eval mig mig_measurements.csv",
        )
    columns = file.read(COLUMNS)
    words = [columns.words(n) for n in WORDS]
    numbers = [columns.numbers(n, 0.0) for n in NUMBERS]
    rows: list[Row] = []
    for i in range(columns.count):
        text: list[str] = [w.names[w.codes[i]] for w in words]
        gpus, batch, seq, value = (float(n[i]) if n[i] > 0 else 0.0 for n in numbers)
        cells: dict[str, Any] = dict(zip(FIELDS, text, strict=True))
        rows.append(Row(**cells, gpus=int(gpus), batch=int(batch), seq=int(seq), value=value))
    return tuple(rows)


# ---------------------------------------------------------------------------- ratios to the GPU


def ratios(rows: Sequence[Row]) -> tuple[list[Case], Counter[str]]:
    """MLPerf's rows of slices, each over the same of a whole GPU."""
    wholes = whole_gpus(rows)
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        found = _ratio(row, wholes)
        if isinstance(found, Case):
            cases.append(found)
            note(f"{row.model}, {found.op}: {found.error:+.1f} %")
        else:
            skipped[found] += 1
    return cases, skipped


def whole_gpus(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """By model and metric, what one whole GPU does: measured alone where that was, else its part of
    what several do."""
    found: dict[tuple[str, str], float] = {}
    for row in sorted(rows, key=lambda r: -r.gpus):
        if row.mode == "full" and row.gpu == "A30":
            part = row.gpus if row.metric == THROUGHPUT else 1
            found[row.model, row.metric] = row.value / part
    return found


def _ratio(row: Row, wholes: Mapping[tuple[str, str], float]) -> Case | str:
    from validation import slices

    if row.mode == "full":
        return "a whole GPU: what slices are compared with" if row.gpu == "A30" else "no MIG GPU"
    if row.metric == "server throughput":
        return "server: how many queries a second meet a deadline is not predicted"
    engine = slices.ENGINES.get(row.model)
    if engine is None:
        return f"{row.model} is not built here"
    whole = wholes.get((row.model, row.metric))
    if whole is None:
        return f"no whole GPU has {row.model}, {row.metric}"
    if row.metric in LATENCIES:
        one = replace(engine, batch=1 if row.metric == "latency p90" else 8)
        slower = slices.seconds(one, slices.SLICE) / slices.seconds(one, A30)
        op = f"latency, {LATENCIES[row.metric]}"
        return Case(row, op, slices.SLICE, "of the GPU's", row.value / whole, slower)
    others: tuple[float, ...] = ()
    if row.beside == IDLE:
        op = "one instance, others idle"
    elif row.beside == BUSY:
        others, op = slices.others_w(row.model, slices.SLICE, SLICES - 1), BESIDE
    else:
        others, op = (slices.wanted_w(engine, slices.SLICE),) * (SLICES - 1), "all instances"
    share = slices.seconds(engine, A30) / slices.beside(engine, slices.SLICE, others)
    count = SLICES if row.scope == "per instance" else 1 / row.gpus
    return Case(row, op, slices.SLICE, "of the GPU's", count * row.value / whole, SLICES * share)


# ---------------------------------------------------------------------------- jobs together


def together(rows: Sequence[Row]) -> tuple[list[Case], Counter[str]]:
    """Four jobs, each on a slice of its own, over the same four without slices."""
    from validation import slices

    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        if row.mode == "mig":
            skipped["four slices: what is compared with the rest"] += 1
            continue
        after = "one after another" in row.beside
        op = f"four slices over four jobs {'one after another' if after else 'at once'}"
        gpu = row.gpu.lower()
        other = slices.steps_per_s(gpu, "serial" if after else "time-slicing")
        predicted = slices.steps_per_s(A30, None) / other
        cases.append(Case(row, f"{op}, {row.gpu}", gpu, "times", 1 / row.value, predicted))
    return cases, skipped


# ---------------------------------------------------------------------------- curves over profiles

HOST = "the host is slower than the device"
AGAIN = "time to threshold: the same run, and how many steps it needs is not predicted"


def curves(rows: Sequence[Row], target_of: Callable[[Row], str]) -> tuple[list[Case], Counter[str]]:
    """Latencies of models by profile."""
    from validation import slices

    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        if row.quality == HOST_BOUND:
            skipped[HOST] += 1
            continue
        target = target_of(row)
        ran = slices.ran(row.model, row.phase, row.batch, row.seq, target)
        op = "inference" if row.phase == "infer" else "training step"
        cases.append(Case(row, op, target, "ms", row.value, ran.time_s * 1e3))
    return cases, skipped


def jobs_of(row: Row) -> int:
    """How many jobs share the node: `24 jobs, three per GPU`."""
    found = re.match(r"(\d+) jobs", row.beside)
    return int(found[1]) if found else 1


def jobs(
    rows: Sequence[Row], target_of: Callable[[Row], str]
) -> tuple[list[Case], list[Fit], Counter[str]]:
    """Training jobs by profile, as seconds of a step; those that the host holds back are apart."""
    from validation import slices

    cases: list[Case] = []
    fits: list[Fit] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        if row.metric == "time to threshold":
            skipped[AGAIN] += 1
            continue
        target = target_of(row)
        ran = slices.ran("ssd-resnet34", "train", row.batch, 0, target)
        if row.metric.startswith("fits"):
            fits.append(Fit(row, target, bool(row.value), ran.fits))
            continue
        limit_s = row.batch * jobs_of(row) / NODE_IMAGES_PER_S
        apart = HOST_BOUND if row.quality == HOST_BOUND else ""
        seconds = max(ran.time_s, limit_s) * 1e3
        measured = row.batch / row.value * 1e3
        cases.append(Case(row, "training step", target, "ms", measured, seconds, apart))
    return cases, fits, skipped


def scaled(cases: Sequence[Case]) -> list[Case]:
    """The same after one scale for each model and op: that by which they are off on average (of
    logarithms), over what is not apart."""
    found: list[Case] = []
    for key in dict.fromkeys((c.row.model, c.op) for c in cases):
        mine = [c for c in cases if (c.row.model, c.op) == key]
        rows = [c for c in mine if not c.apart]
        if len(rows) > 1:
            scale = np.exp(np.mean([np.log(c.measured / c.predicted) for c in rows]))
            op = f"{key[1]}, one scale a model"
            found += [replace(c, op=op, predicted=float(c.predicted * scale)) for c in rows]
    return found


# ---------------------------------------------------------------------------- all of it


def on_a100(row: Row) -> str:
    return f"{A100}:{row.profile}" if row.mode == "mig" else A100


def evaluate(path: str | Path) -> Found:
    rows = read(path)
    skipped = Counter(WHY.get(r.quality, r.quality) for r in rows if r.quality not in USED)
    used = [r for r in rows if r.quality in USED]
    cases, left = ratios([r for r in used if r.series == "mlperf20"])
    more, host = curves([r for r in used if r.series == "migperf40"], on_a100)
    steps, fits, again = jobs([r for r in used if r.series == "redhat"], on_a100)
    seed, reference = together([r for r in used if r.series == "a30blog"])
    known = ("a30blog", "mlperf20", "migperf40", "redhat")
    other = Counter(f"series {r.series}: no model of it" for r in used if r.series not in known)
    for counted in (left, host, again, reference, other):
        skipped.update(counted)
    every = (*seed, *cases, *more, *scaled(more), *steps, *scaled(steps))
    return Found(str(path), len(rows), every, tuple(fits), dict(skipped))


def score(found: Found) -> Scores:
    """Errors by op, model and profile's GPU; in total by op and series."""
    groups: dict[Group, list[Floats]] = {}
    totals: dict[Group, list[Floats]] = {}
    for c in found.cases:
        by = (("series", c.row.series), ("model", c.row.model))
        dtype = "tf32" if c.row.series == "migperf40" else c.row.precision.lower()
        device, target = c.row.gpu, c.target.partition(":")[0]
        group = Group(found.file, c.op, device, dtype, target, by, suspect=c.apart)
        nan = np.nan
        numbers = np.array([c.measured, c.predicted, nan, nan, nan, nan])
        groups.setdefault(group, []).append(numbers)
        if not c.apart:
            total = group._replace(dtype=ALL, by=(by[0], ("model", ALL)))
            totals.setdefault(total, []).append(numbers)
    return Scores(groups=_scores(groups), totals=_scores(totals))


def _scores(rows: Mapping[Group, list[Floats]]) -> tuple[Score, ...]:
    return tuple(
        Score(group, row_errors(np.stack(some, axis=1)), {}) for group, some in sorted(rows.items())
    )


# ---------------------------------------------------------------------------- writing


def json_text(found: Sequence[Found]) -> str:
    """That of `eval kernels`, with `cases` and `fits`."""
    from gpuir.backends import scores
    from gpuir.cost.tile import BY

    head: dict[str, Any] = {"kind": "mig", "predictor": BY}
    head["cases"] = [_case(f.file, c) for f in found for c in f.cases]
    head["fits"] = [
        {"file": f.file, "id": x.row.id, "target": x.target}
        | {"measured": x.measured, "predicted": x.predicted}
        for f in found
        for x in f.fits
    ]
    return scores.json_text([_table(f) for f in found], _together(found), head)


def _case(file: str, c: Case) -> dict[str, Any]:
    named = {n: getattr(c.row, n) for n in ("id", "series", "model", "profile", "batch", "seq")}
    numbers = {n: float(f"{getattr(c, n):.6g}") for n in ("measured", "predicted", "error")}
    named |= {"op": c.op, "target": c.target, "unit": c.unit, "suspect": c.apart}
    return {"file": file, **named, **numbers}


def _table(found: Found) -> Any:
    from gpuir.fit.tables import Table

    return Table(found.file, "MIG slices", found.count, (), found.skipped)


def _together(found: Sequence[Found]) -> Scores:
    total = Scores()
    for f in found:
        total += score(f)
    return total


def report(found: Sequence[Found], shape: Layout) -> str:
    from gpuir.backends import scores
    from gpuir.backends.terminal import Page

    page = Page(shape.width, shape.color)
    columns = [("model", False), ("compared", False), ("profile", False), ("batch", True)]
    columns += [("seq", True), ("measured", True), ("predicted", True), ("error", True)]
    for f in found:
        page.heading(f"{f.file}: cases")
        page.table(columns, [_cells(c) for c in f.cases if not c.op.endswith("scale a model")])
        for x in f.fits:
            said = ["does not fit", "fits"]
            told = f"batch {x.row.batch} {said[x.measured]}, predicted: {said[x.predicted]}"
            page.wrapped("room", f"{x.target}, {x.row.model}: {told}")
        page.line()
    return page.text() + scores.report([_table(f) for f in found], _together(found), shape)


def _cells(c: Case) -> tuple[str, ...]:
    number = "{:.3f}" if c.unit != "ms" else "{:.2f} ms"
    op = f"{c.op} ({c.apart})" if c.apart else c.op
    sizes = (str(n) if n else "-" for n in (c.row.batch, c.row.seq))
    numbers = (number.format(n) for n in (c.measured, c.predicted))
    return (c.row.model, op, c.row.profile or "whole", *sizes, *numbers, f"{c.error:+.1f}")


@click.command()
@click.argument("files", nargs=-1, type=click.Path())
@click.option("--json", "json_path", type=click.Path(), help="Write the scores here as JSON.")
@options.width
@options.output
def mig(files: tuple[str, ...], **given: Any) -> None:
    """MIG slices: FILES are tables of measurements on slices and on the same GPUs whole.

    Slices are compared with the whole GPU, and with each other (validation/README.md).

    \b
    gpuir eval mig mig_measurements.csv
    gpuir eval mig mig_measurements.csv --json scores.json
    """
    if not files:
        raise UsageError("no table is given", fix="gpuir eval mig FILE...")
    check_ahead(given["json_path"])
    paths = list(dict.fromkeys(files))
    for path in paths:
        read(path)
    found = [evaluate(path) for path in paths]
    if given["json_path"]:
        emit(json_text(found), given["json_path"])
    if given["json_path"] != "-":
        emit(report(found, layout(given["width"], given["output"])), given["output"])
