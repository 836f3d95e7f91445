"""`gpuir eval field`: published measurements beside the commands that an engineer would type."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from io import StringIO
from itertools import chain
from statistics import mean
from typing import Any

import click

from gpuir.backends.scores import ERRORS, INSIDE, SCHEMA, number
from gpuir.cli.exam import FILES, ExamOutput, ScoredRow, commands_report
from gpuir.cli.output import check_ahead, note, write
from gpuir.cli.request import ask, held, option, request
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table
from gpuir.report.table import fields as programs_fields
from gpuir.report.units import quantity
from validation.field_page import page
from validation.field_rows import (
    GROUPS,
    FieldExam,
    FieldResult,
    FieldRow,
    FieldScore,
    Question,
    Told,
    is_call,
    judged,
    read,
)

PER_WORKER = 40  # commands, behind which a process is started anew: they grow


# ---- asking ------------------------------------------------------------------------------------


def ask_all(
    questions: Sequence[Question], folder: str, jobs: int, watch: Callable[[str], None] = note
) -> dict[Question, Told]:
    """What every command says, each run once in the folder, some at a time."""
    found: dict[Question, Told] = {}
    context, some = multiprocessing.get_context("spawn"), PER_WORKER * jobs
    for part in (questions[i : i + some] for i in range(0, len(questions), some)):
        with ProcessPoolExecutor(jobs, context, _begin, (os.path.abspath(folder),)) as pool:
            asked = {pool.submit(told, q): q for q in part}
            for done in as_completed(asked):
                question = asked[done]
                try:
                    found[question] = done.result()
                except BrokenExecutor:
                    found[question] = Told(why="the process ended: too little memory?")
                said = found[question].why or quantity(found[question].time_s, "s", 4)
                watch(f"{len(found)} of {len(questions)}: {said}: {question.command}")
    return found


def _begin(folder: str) -> None:
    """A process that runs commands, in the folder of their models."""
    os.chdir(folder)
    sys.path.insert(0, folder)


def told(question: Question) -> Told:
    """What a command says, run in this process as from a shell; the message of one that fails."""
    try:
        if is_call(question.command):
            return _called(question.command)
        doc = said(question.command)
        words = shlex.split(question.command)
        match words[1]:
            case "analyze":
                return _analyzed(doc["reports"][0], question)
            case "simulate":
                peak = doc["peak_flops_per_s"]
                roof = doc["flops"] / peak if peak else None
                return Told(doc["time_s"], _ends(doc["interval"]), roof, "time_s")
            case _:
                return Told(_mean(doc, question.read.removeprefix("mean").removeprefix(":")))
    except Exception as error:  # a row that fails is counted, and the others go on
        return Told(why=str(error) or type(error).__name__)


def said(command: str) -> Any:
    """The JSON that a command line prints; RuntimeError with its message where it fails."""
    from gpuir.cli.main import main

    out, complaints, status = StringIO(), StringIO(), None
    words = [*shlex.split(command)[1:], "--format", "json"]
    with redirect_stdout(out), redirect_stderr(complaints):
        try:
            status = main.main(words, prog_name="gpuir")
        except SystemExit as end:
            status = end.code
    if status:  # 1: it runs nowhere, or does not fit
        raise RuntimeError(" ".join(complaints.getvalue().split()) or f"exit status {status}")
    return json.loads(out.getvalue())


def _called(text: str) -> Told:
    """The time of one kernel: a call with constants alone."""
    import gpuir

    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    words: dict[str, Any] = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    found = gpuir.kernel(*map(ast.literal_eval, call.args), **words)
    return Told(found.time_s, found.interval_s)


def _analyzed(report: Mapping[str, Any], question: Question) -> Told:
    ends, device_s = _ends(report["interval_s"]), report["device_s"]
    roof = roofline(report, question.dtype) if "flops" in report else None
    if question.read != "device":
        return Told(report["latency_s"], ends, roof, "reports.0.latency_s")
    busy = [k for k in report.get("kernels", ()) if k["time_s"]]
    own = _ends(busy[0]["cost"]["interval_s"]) if len(busy) == 1 else None
    if own is not None:  # of one kernel, without the host
        ends = own[0] * busy[0]["runs"], own[1] * busy[0]["runs"]
    elif ends is not None:
        share = device_s / report["latency_s"]
        ends = ends[0] * share, ends[1] * share
    return Told(device_s, ends, roof, "reports.0.device_s")


def roofline(report: Mapping[str, Any], dtype: str) -> float:
    """The whole run as one: its flops at the peak of the dtype, or the bytes that its kernels read
    and write at the bandwidth of the memory, whichever takes longer.

    Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
    """
    from gpuir.ir.types import DTYPES, tf32
    from gpuir.targets.load import load_target

    target = load_target(report["target"]["name"])
    peak = target.peak("tensor", DTYPES.get(dtype, tf32))
    compute = report["flops"] / peak
    return max(compute, report["bytes"] / target.dram_bytes_per_s)


def _mean(doc: Mapping[str, Any], way: str) -> float:
    """The mean time of a run in the first plan in which all models share in this way."""
    for plan in doc["plans"]:
        seats = [s for gpu in plan["gpus"] for s in gpu["seats"]]
        ways = ({s.get("mode"), (s.get("target") or "").partition(":")[2]} for s in seats)
        if not way or all(way in x for x in ways):
            return mean(x["mean_s"] for x in plan["served"])
    raise LookupError(f"no plan has all models share by {way}")


def _ends(given: Sequence[float] | None) -> tuple[float, float] | None:
    return (given[0], given[1]) if given else None


# ---- writing -----------------------------------------------------------------------------------

LEGEND = (
    "Errors in percent of the measured time: mean and median of the absolute ones, and the mean"
    " signed one, positive where too slow is predicted; inside: of the 80 % interval. Roofline: the"
    " larger of all flops at the peak of their dtype and all bytes at the memory's bandwidth."
)


def columns(title: str) -> tuple[Column, ...]:
    """Of scores of groups, whose names stand under the title."""
    return (
        Column(title, field="op"),
        number("rows", field="n", form=","),
        *ERRORS,
        INSIDE,
        number("roofline: mean", field="roofline_mape"),
        number("bias", field="roofline_bias", form="+.1f"),
    )


def cases(results: Sequence[FieldResult]) -> Table:
    """A row a measurement."""

    def ends(r: FieldResult) -> str:
        return " to ".join(quantity(x, "s") for x in r.interval or ())

    def inside(r: FieldResult) -> str:
        return {None: "-", True: "yes", False: "no"}[r.is_inside]

    return Table(
        results,
        (
            Column("row", field="id", value="row.id", elided=True, least=16),
            *programs_fields("gpu software dtype generation regime phase suspect source", "row"),
            Column("measured", "s", "measured_s", "row.measured_s", digits=4),
            Column("predicted", "s", "predicted_s", digits=4),
            Column("interval", field="interval_s", value="interval", text=ends, drop=2),
            Column("inside", field="inside", value="is_inside", text=inside, drop=1),
            number("error", field="error", form="+.1f"),
            number("roofline", field="roofline_error", form="+.1f", drop=3),
            Column(field="command", value="row.command"),
            Column(field="why"),
        ),
    )


def report(exams: Sequence[FieldExam]) -> Report:
    """Totals, groups and each row; programs have a row for each group."""
    from gpuir.cost.tile import BY

    def grouped(exam: FieldExam) -> list[dict[str, Any]]:
        found = [("", s) for s in exam.totals]
        found += [(f"{key}: ", s) for key in GROUPS for s in exam.by(key)]
        plain = [(name, {f.name: getattr(s, f.name) for f in fields(s)}) for name, s in found]
        return [{"file": exam.file, **s, "op": name + s["op"]} for name, s in plain]

    names = ("file", *(f.name for f in fields(FieldScore)))
    group_columns = tuple(Column(field=n, value=lambda x, n=n: x[n]) for n in names)
    return Report(
        SCHEMA,
        lambda: (part for exam in exams for part in _parts(exam)),
        lambda: {
            "kind": "field",
            "predictor": BY,
            "rows": Table(list(chain(*map(grouped, exams))), group_columns),
            "cases": [{"file": x.file, **row} for x in exams for row in cases(x.results).records()],
            "files": [
                {"file": x.file, "rows": len(x.results), "scored": len(x.sound)} for x in exams
            ],
        },
    )


def _parts(exam: FieldExam) -> Iterator[Part]:
    yield Heading(f"{exam.file}: {len(exam.results)} published measurements")
    yield Notes([("", LEGEND)], 0)
    if exam.sound:
        yield Table(exam.totals, columns("rows of"))
        yield from (Table(exam.by(key), columns(key)) for key in GROUPS)
        order = sorted(exam.sound, key=lambda r: -abs(r.error))
        yield cases(order)
    if lines := [
        *(("suspect", f"{r.row.id}, {r.error:+.1f} %: {r.row.suspect}") for r in exam.suspect),
        *(("failed", f"{r.row.id}: {r.why}") for r in exam.failed),
    ]:
        yield Notes(lines)


@dataclass(frozen=True)
class Field:
    files: tuple[str, ...] = ask(FILES)
    inputs: str = option(
        "The folder of the models, in which the commands run.",
        type=click.Path(exists=True, file_okay=False),
        required=True,
    )
    jobs: int = option("Commands at a time.", type=click.IntRange(1), default=1)
    only: str | None = option(
        "Rows alone whose id, GPU, software or command this regular expression finds.",
        metavar="REGEX",
    )
    page: str | None = option(
        "Write the results as a page of the documentation too.", type=click.Path()
    )
    shown: ExamOutput = held(ExamOutput)


@request(Field)
def field(asked: Field) -> None:
    """The field: FILES are tables of published measurements, each with the command that an engineer
    would type for the same case.

    \b
    gpuir eval field points.csv --inputs inputs
    gpuir eval field points.csv --inputs inputs --jobs 2 --page docs/validation/field.md
    gpuir eval field points.csv --inputs inputs --only vllm --json -
    gpuir eval field points.csv --inputs inputs --commands
    """
    from gpuir.ir.errors import UsageError

    asked.shown.check()
    check_ahead(asked.page)
    tables = {path: _chosen(read(path), asked.only) for path in dict.fromkeys(asked.files)}
    rows = [row for some in tables.values() for row in some]
    if not rows:
        raise UsageError("no row is like this", found=str(asked.only), fix="another --only")
    questions = list(dict.fromkeys(q for row in rows for q in row.questions))
    found = ask_all(questions, asked.inputs, min(asked.jobs, len(questions)))
    if asked.shown.commands:
        scored = (commanded(q, found[q]) for q in questions)
        asked.shown.show(commands_report("field", scored))
        return
    exams = [
        FieldExam(path, tuple(judged(row, found) for row in some)) for path, some in tables.items()
    ]
    if asked.page:
        write(asked.page, page(exams))
    asked.shown.show(report(exams))


def _chosen(rows: Sequence[FieldRow], only: str | None) -> list[FieldRow]:
    from gpuir.ir.errors import UsageError

    try:
        wanted = re.compile(only or "")
    except re.error as error:
        raise UsageError(f"not a regular expression: {error}", found=str(only)) from None
    return [r for r in rows if any(map(wanted.search, (r.id, r.gpu, r.software, r.command)))]


def commanded(question: Question, found: Told) -> ScoredRow:
    """The time that a command gives to a row, and the command."""
    if found.why:
        return ScoredRow(0.0, "s", "", found.why)
    if is_call(question.command):
        return ScoredRow(found.time_s, "s", f"{question.command}.time_s")
    if not found.place:
        why = f"the mean run of a plan, of {question.command}"
        return ScoredRow(found.time_s, "s", "", why)
    return ScoredRow(found.time_s, "s", question.command, found.place)
