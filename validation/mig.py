"""`gpuir eval mig`: measurements on MIG slices and on the same GPUs whole.

Absolute times depend on much that the table does not state, so what is judged first is how slices
compare: ratios to the whole GPU, or curves over profiles after one scale for each model. What is
made of a row follows from what it says (`mig_rows`), not from its series.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuir.cli.exam import FILES, ExamOutput, commands_report
from gpuir.cli.exam import ScoredRow as Given
from gpuir.cli.output import note
from gpuir.cli.request import ask, held, request
from gpuir.fit.columns import Floats
from gpuir.fit.score import ALL, GroupScores, Score, ScoredRows, row_errors
from gpuir.ir.errors import GpuirError
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table

if TYPE_CHECKING:
    from gpuir.simulate.sharing import Mode
    from validation.mig_rows import Row
    from validation.slices import Job

# Images a second that a series' node prepares for all its jobs: of `redhat` the middle of the
# 7,300 to 8,000 near which it saturates (README of the table).
NODES: Mapping[str, float] = {"redhat": 7650.0}
HOST_BOUND = "host-bound"
USED = ("", "ok", "official submission", "published ratio", HOST_BOUND)
WHY = {
    "unstable": "unstable: over 10 % standard deviation",
    "anecdotal": "anecdotal: no page to cite",
}
HOST = "the host is slower than the device"
SCALED = "one scale a model"


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
    given: tuple[str, str] = ("", "")  # the call that gives it, of times in seconds; or why none

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


# ---------------------------------------------------------------------------- all of it


def evaluate(path: str | Path) -> Found:
    from validation.mig_rows import NotScored, read

    rows = read(path)
    cases: list[Case] = []
    fits: list[Fit] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            found = answer(row, rows)
        except NotScored as why:
            skipped[str(why)] += 1
            continue
        except (GpuirError, RuntimeError, MemoryError) as error:
            what = error.what if isinstance(error, GpuirError) else "too large to be built here"
            skipped[f"{row.model}: {what}"] += 1
            continue
        if isinstance(found, Fit):
            fits.append(found)
            continue
        cases.append(found)
        note(f"{row.model}, {found.op}: {found.error:+.1f} %")
    every = (*cases, *scaled(cases))
    return Found(str(path), len(rows), every, tuple(fits), dict(skipped))


def answer(row: Row, rows: Sequence[Row]) -> Case | Fit:
    """What is predicted of a row; NotScored where that is nothing. `rows` are those of its
    table."""
    from validation import mig_rows

    if row.odd or row.quality not in USED:
        raise mig_rows.NotScored(row.odd or WHY.get(row.quality, f"quality: {row.quality}"))
    if mig_rows.is_relative(row):
        return together(row, rows)
    if mig_rows.is_offline(row):
        return ratio(row, rows)
    return absolute(row)


# ---------------------------------------------------------------------------- ratios to the GPU


def ratio(row: Row, rows: Iterable[Row]) -> Case:
    """A slice of MLPerf's over the same of the whole GPU."""
    from validation import mig_rows, slices
    from validation.mig_rows import IDLE, SAME, SERVER, NotScored

    gpu = mig_rows.gpu_of(row)
    if row.mode == "full":
        reason = "a whole GPU: what slices are compared with"
        raise NotScored(reason if mig_rows.has_mig(gpu) else "no MIG GPU")
    metric = row.metric.lower()
    if metric.startswith("server"):
        raise NotScored(SERVER)
    target, job = mig_rows.target_of(row), mig_rows.offline_job(row)
    whole = whole_gpu(row, gpu, rows)
    if whole is None:
        raise NotScored(f"no whole GPU has {row.model}, {row.metric}")
    if not row.value > 0:
        raise NotScored("no value is stated")
    if metric.startswith("latency"):
        several = re.search(r"(\d+)-sample", metric)
        one = replace(job, batch=int(several[1]) if several else 1)
        slower = slices.seconds(one, target) / slices.seconds(one, gpu)
        op = f"latency, {f'queries of {one.batch}' if several else 'one query'}"
        call = f"{slices.given(one, target)} / {slices.given(one, gpu)}"
        return Case(row, op, target, "of the GPU's", row.value / whole, slower, given=(call, ""))
    if not metric.startswith("throughput"):
        raise NotScored(f"metric {row.metric}: not predicted")
    together = mig_rows.active(row)
    count = together if together > 1 else mig_rows.most(target)
    kind = mig_rows.company(row)
    others: tuple[float, ...] = ()
    if kind == IDLE:
        op = "one instance, others idle"
    elif kind == SAME:
        others, op = (slices.wanted_w(job, target),) * (count - 1), "all instances"
    else:
        others, op = slices.others_w(job.model, target, count - 1), "one instance, others busy"
    share = slices.seconds(job, gpu) / slices.beside(job, target, others)
    of = 1 / row.n_gpus if mig_rows.is_aggregate(row) and row.n_gpus else count
    call = f"{count} * {slices.given(job, gpu)} / {slices.given(job, target)}"
    given = ("", BESIDE) if others else (call, "")
    measured = of * row.value / whole
    return Case(row, op, target, "of the GPU's", measured, count * share, given=given)


BESIDE = "its neighbours draw power too: no command has instances beside it that want so many watts"
SHARED = "jobs that share, simulated run by run: `gpuir mig plan` chooses how they share"


def whole_gpu(row: Row, gpu: str, rows: Iterable[Row]) -> float | None:
    """What one whole GPU does of what a row measures: alone where that was measured, else its part
    of what several do."""
    from validation import mig_rows

    def of(r: Row) -> tuple[str, ...]:
        return r.series, r.model, r.metric, r.precision

    same = [
        r for r in rows if r.mode == "full" and not r.batch and r.value > 0 and of(r) == of(row)
    ]
    for r in sorted(same, key=lambda r: r.n_gpus):
        if r.gpu == row.gpu and mig_rows.gpu_of(r) == gpu:
            several = r.metric.startswith("throughput") and mig_rows.is_aggregate(r)
            return r.value / (max(r.n_gpus, 1) if several else 1)
    return None


# ---------------------------------------------------------------------------- jobs together

AFTER: Mapping[Mode, str] = {
    "serial": "one after another",
    "time-slicing": "at once",
    "mps": "under MPS",
}


def together(row: Row, rows: Iterable[Row]) -> Case:
    """Jobs that share a GPU or have a slice each, over the same jobs as the row's reference has
    them: what the reference does, over what they do."""
    from validation import mig_rows

    reference = mig_rows.reference_of(row, rows)
    times = mig_rows.times(row)
    what, rate = arranged(row)
    if reference is row:
        raise mig_rows.NotScored(f"{what}: what is compared with the rest")
    other, known = arranged(reference)
    op = f"{other} over {what}, {row.gpu}"
    target, given = mig_rows.target_of(row), ("", SHARED)
    return Case(row, op, target, "times", 1 / times, known / rate, given=given)


def arranged(row: Row) -> tuple[str, float]:
    """How a row's jobs have their GPU, in words, and how many steps a second all of them do."""
    from validation import mig_rows, slices, zoo
    from validation.mig_rows import COUNTS, NotScored

    name = zoo.name_of(row.model)
    job = mig_rows.job_of(row, slices.JOB_BATCHES.get(name or "", 0))
    target, shared = mig_rows.target_of(row), mig_rows.sharing(row)
    mode: Mode | None = None
    if shared is None and row.mode == "mig":
        count = mig_rows.active(row)
        if not count:
            raise NotScored("how many instances work is not stated")
        what = "slice"
    else:
        count, mode = shared or (1, "serial")
        what = "job"
    words = {n: w for w, n in COUNTS.items()}
    text = f"{words.get(count, count)} {what}{'s' if count > 1 else ''}"
    text += f" {AFTER[mode]}" if mode and count > 1 else ""
    return text, _steps_per_s(job, target, count, mode)


def _steps_per_s(job: Job, target: str, count: int, mode: Mode | None) -> float:
    from validation import slices
    from validation.mig_rows import NotScored

    rate = slices.steps_per_s(job, target, count, mode)
    if rate is None:
        raise NotScored(f"{count} of {job.model} on {target}: predicted not to fit")
    return rate


# ---------------------------------------------------------------------------- times


def absolute(row: Row) -> Case | Fit:
    """A step or a pass, in milliseconds; whether it fits. Those that the host holds back are
    apart."""
    from validation import mig_rows, slices
    from validation.mig_rows import NotScored

    target, job = mig_rows.target_of(row), mig_rows.job_of(row)
    if row.metric.lower().startswith("fits"):
        if row.value not in (0, 1):
            raise NotScored("no value is stated")
        return Fit(row, target, bool(row.value), slices.fits(job, target))
    measured_s, which = mig_rows.step_s(row, job)
    if row.quality == HOST_BOUND and row.series not in NODES:
        raise NotScored(HOST)
    op = "training step" if job.train else "inference"
    op += f", {which}" if which else ""
    count, mode = mig_rows.sharing(row) or (1, "serial")
    if count > 1 and mode != "serial":
        time_s = count / _steps_per_s(job, target, count, mode)
        op += f", {count} {AFTER[mode]}"
        given = "", SHARED
    else:
        time_s = slices.beside(job, target, neighbours(row, job, target))
        is_alone = time_s == slices.seconds(job, target)
        given = (slices.given(job, target), "") if is_alone else ("", BESIDE)
    if row.series in NODES:
        images_s = job.batch * mig_rows.jobs_of_node(row) / NODES[row.series]
        time_s = max(time_s, images_s)
        given = (f"max({given[0]}, {images_s!r})" if given[0] else "", given[1])
    apart = HOST_BOUND if row.quality == HOST_BOUND else ""
    return Case(row, op, target, "ms", measured_s * 1e3, time_s * 1e3, apart, given)


def commanded(c: Case) -> Given:
    """What gives a case's number, or why nothing does."""
    call, why = c.given
    number, unit = (c.predicted * 1e-3, "s") if c.unit == "ms" else (c.predicted, c.unit)
    return Given(number, unit, call, why)


def neighbours(row: Row, job: Job, target: str) -> tuple[float, ...]:
    """Watts that each of the other instances wants: assumed as many as this one, whatever runs."""
    from validation import mig_rows, slices

    if row.mode != "mig" or mig_rows.company(row) == mig_rows.IDLE:
        return ()
    count = mig_rows.active(row)
    if count < 2 and re.search(r"\b(every|all)\b", row.co_runners.lower()):
        count = mig_rows.most(target)
    return (slices.wanted_w(job, target),) * (count - 1) if count > 1 else ()


def scaled(cases: Sequence[Case]) -> list[Case]:
    """Times after one scale for each series, model and op: that by which they are off on average
    (of logarithms), over what is not apart."""
    by_key: dict[tuple[str, str, str], list[Case]] = {}
    for c in cases:
        if c.unit == "ms" and not c.apart:
            by_key.setdefault((c.row.series, c.row.model, c.op), []).append(c)
    found: list[Case] = []
    for (_, _, op), some in by_key.items():
        if len(some) > 1:
            scale = np.exp(np.mean([np.log(c.measured / c.predicted) for c in some]))
            op = f"{op}, {SCALED}"
            found += [replace(c, op=op, predicted=float(c.predicted * scale)) for c in some]
    return found


# ---------------------------------------------------------------------------- scores


def score(found: Found) -> GroupScores:
    """Errors by op, model and profile's GPU; in total by op and series."""
    groups: dict[ScoredRows, list[Floats]] = {}
    totals: dict[ScoredRows, list[Floats]] = {}
    for c in found.cases:
        by = (("series", c.row.series), ("model", c.row.model))
        dtype, device, target = _dtype(c.row), c.row.gpu, c.target.partition(":")[0]
        group = ScoredRows(found.file, c.op, device, dtype, target, by, suspect=c.apart)
        nan = np.nan
        numbers = np.array([c.measured, c.predicted, nan, nan, nan, nan])
        groups.setdefault(group, []).append(numbers)
        if not c.apart:
            total = group._replace(dtype=ALL, by=(by[0], ("model", ALL)))
            totals.setdefault(total, []).append(numbers)
    return GroupScores(groups=_scores(groups), totals=_scores(totals))


def _dtype(row: Row) -> str:
    """What the precision says: `tf32` where that is what products are in."""
    from validation import mig_rows

    numbers = mig_rows.numbers_of(row)
    is_tf32 = numbers.get("tf32") and not numbers.get("autocast")
    return "tf32" if is_tf32 else row.precision.lower()


def _scores(rows: Mapping[ScoredRows, list[Floats]]) -> tuple[Score, ...]:
    return tuple(
        Score(group, row_errors(np.stack(some, axis=1)), {}) for group, some in sorted(rows.items())
    )


# ---------------------------------------------------------------------------- writing


def report(found: Sequence[Found]) -> Report:
    """That of `eval kernels`, with `cases` and `fits`."""
    from gpuir.backends.scores import scores_report
    from gpuir.cost.tile import BY

    head: dict[str, Any] = {"kind": "mig", "predictor": BY}
    head["cases"] = [_case(f.file, c) for f in found for c in f.cases]
    head["fits"] = [
        {"file": f.file, "id": x.row.id, "target": x.target}
        | {"measured": x.measured, "predicted": x.predicted}
        for f in found
        for x in f.fits
    ]
    first = [part for f in found for part in _parts(f)]
    return scores_report([_table(f) for f in found], _together(found), head, first)


def _case(file: str, c: Case) -> dict[str, Any]:
    named = {n: getattr(c.row, n) for n in ("id", "series", "model", "profile", "batch")}
    named["seq"] = c.row.seq_len
    numbers = {n: float(f"{getattr(c, n):.6g}") for n in ("measured", "predicted", "error")}
    named |= {"op": c.op, "target": c.target, "unit": c.unit, "suspect": c.apart}
    return {"file": file, **named, **numbers}


def _table(found: Found) -> Any:
    from gpuir.fit.tables import MeasuredTable as Measured

    return Measured(found.file, "MIG slices", found.count, (), found.skipped)


def _together(found: Sequence[Found]) -> GroupScores:
    total = GroupScores()
    for f in found:
        total += score(f)
    return total


def _parts(f: Found) -> Iterator[Part]:
    """The cases of a table, and which batches fit."""

    def number(name: str) -> Callable[[Case], str]:
        return lambda c: (f"{getattr(c, name):.3f}", f"{getattr(c, name):.2f} ms")[c.unit == "ms"]

    yield Heading(f"{f.file}: cases")
    yield Table(
        [c for c in f.cases if not c.op.endswith(SCALED)],
        (
            Column("model", value="row.model"),
            Column("compared", text=lambda c: f"{c.op} ({c.apart})" if c.apart else c.op),
            Column("profile", text=lambda c: c.row.profile or "whole"),
            Column("batch", "count", text=lambda c: str(c.row.batch or "-")),
            Column("seq", "count", text=lambda c: str(c.row.seq_len or "-")),
            Column("measured", "number", text=number("measured")),
            Column("predicted", "number", text=number("predicted")),
            Column("error", "number", text=lambda c: f"{c.error:+.1f}"),
        ),
    )
    said = ["does not fit", "fits"]
    told = "{}, {}: batch {} {}, predicted: {}"
    lines = [
        told.format(x.target, x.row.model, x.row.batch, said[x.measured], said[x.predicted])
        for x in f.fits
    ]
    if lines:
        yield Notes([("room", line) for line in lines])


@dataclass(frozen=True)
class MigSlices:
    files: tuple[str, ...] = ask(FILES)
    shown: ExamOutput = held(ExamOutput)


@request(MigSlices)
def mig(asked: MigSlices) -> None:
    """MIG slices: FILES are tables of measurements on slices and on the same GPUs whole.

    Slices are compared with the whole GPU, and with each other (docs/validation/data.md).

    \b
    gpuir eval mig mig_measurements.csv
    gpuir eval mig mig_measurements.csv --json scores.json
    gpuir eval mig mig_measurements.csv --commands
    """
    from validation.mig_rows import read

    asked.shown.check()
    paths = list(dict.fromkeys(asked.files))
    for path in paths:
        read(path)
    found = [evaluate(path) for path in paths]
    cases = (c for f in found for c in f.cases if not c.op.endswith(SCALED))
    given = map(commanded, cases)
    asked.shown.show(commands_report("mig", given) if asked.shown.commands else report(found))
