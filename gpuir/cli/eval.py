"""`gpuir eval`: predictions against measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import click

from gpuir.cli import checkout, options
from gpuir.cli.exam import FILES, ExamOutput, ScoredRow, commands_report
from gpuir.cli.output import note
from gpuir.cli.request import ask, held, option, request

if TYPE_CHECKING:
    from gpuir.cost.learned import Model
    from gpuir.cost.work import Work
    from gpuir.fit.batch import MeasuredBatch
    from gpuir.fit.score import GroupScores
    from gpuir.fit.tables import MeasuredTable
    from gpuir.targets.target import Target

# Of a checkout: the module of `validation` that has the command.
IN_CHECKOUT = {
    "models": "whole",
    "dlrm": "dlrm",
    "collectives": "collectives",
    "training": "training",
    "mig": "mig",
    "tuning": "tuning",
    "field": "field",
}


class Kinds(click.Group):
    """A kind of measurement is a command; the modules of those not asked for stay unread. Whole
    models are of a checkout."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["kernels", *(IN_CHECKOUT if checkout.exists() else ())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        if cmd_name == "kernels":
            return kernels
        return getattr(checkout.module(IN_CHECKOUT[cmd_name]), cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            _refuse(args[0], known)
        return super().resolve_command(ctx, args)


def _refuse(kind: str, known: Sequence[str]) -> None:
    from gpuir.ir.errors import UsageError, nearest

    if kind in IN_CHECKOUT:
        raise UsageError(
            f"`gpuir eval {kind}` is not a part of the package",
            found="it reads tables of others, and configs that stand in no package",
            fix="run it in a checkout of the repository, which has `validation/`",
        )
    raise UsageError(
        f"nothing called {kind!r} can be evaluated",
        expected=", ".join(known),
        fix=nearest(kind, known) + ": gpuir eval kernels FILE...",
    )


@click.group(cls=Kinds)
def command() -> None:
    """Compare predictions with measurements.

    \b
    gpuir eval kernels gemm.parquet conv.parquet --json scores.json
    gpuir eval models labels.csv --configs model_configs.json    (in a checkout)
    gpuir eval dlrm dlrm_e2e.csv                                  (in a checkout)
    gpuir eval collectives collectives.parquet                    (in a checkout)
    gpuir eval tuning sweeps.parquet best.parquet                 (in a checkout)
    gpuir eval training llm_training.csv                          (in a checkout)
    gpuir eval mig mig_measurements.csv                           (in a checkout)
    gpuir eval field points.csv --inputs inputs                   (in a checkout)
    """


@dataclass(frozen=True)
class KernelExam:
    files: tuple[str, ...] = ask(FILES)
    by: tuple[str, ...] = option("Tell rows apart by a column besides: framework.", multiple=True)
    calibrate: int | None = option(
        "Calibrate on N rows of each GPU and family first, and score the rest.",
        type=click.IntRange(1),
        metavar="N",
    )
    leave_one_out: str | None = option(
        "Train anew without each GPU in turn, and score what is predicted of it. Needs torch.",
        type=click.Choice(["device"]),
    )
    seed: int = option("Of what is drawn.", type=options.SEED, default=0)
    shown: ExamOutput = held(ExamOutput)


@request(KernelExam)
def kernels(asked: KernelExam) -> None:
    """Kernels one by one: FILES are tables of measurements.

    Tables are parquet or csv files; what they hold is told by their columns (docs/guide/eval.md).

    \b
    gpuir eval kernels gemm.parquet softmax.csv
    gpuir eval kernels gemm.parquet conv.parquet --json scores.json
    gpuir eval kernels gemm.parquet --calibrate 32 --seed 1
    gpuir eval kernels gemm.parquet --leave-one-out device
    gpuir eval kernels softmax.csv --commands
    """
    from gpuir.backends.scores import scores_report
    from gpuir.fit.tables import read_table
    from gpuir.ir.errors import UsageError

    _check_ahead(asked)
    if asked.shown.commands:
        if asked.calibrate or asked.leave_one_out:
            raise UsageError(
                "--commands prints calls with the weights and the targets that ship",
                fix="leave out --calibrate and --leave-one-out",
            )
        paths = dict.fromkeys(asked.files)
        read = (read_table(path, checkout.readers()) for path in paths)
        rows = (row for table in read for batch in table.batches for row in commanded(batch))
        return asked.shown.show(commands_report("kernels", rows))
    tables, errors = evaluate(asked)
    head = {"kind": "kernels", "predictor": _predictor(), "calibrated_rows": asked.calibrate}
    head |= {"left_out": asked.leave_one_out, "seed": asked.seed}
    asked.shown.show(scores_report(tables, errors, head))


command.add_command(kernels)


def _check_ahead(asked: KernelExam) -> None:
    """What can be wrong is said before minutes of work, not after."""
    from gpuir.fit.columns import TableFile
    from gpuir.fit.tables import recognise

    readers = checkout.readers()
    for path in asked.files:
        recognise(TableFile(Path(path)), readers)
    asked.shown.check()


def _predictor() -> str:
    from gpuir.cost.tile import BY

    return BY


def evaluate(asked: KernelExam) -> tuple[list[MeasuredTable], GroupScores]:
    """The tables, read, and their scores. Without the options that need all rows at once, a table
    is scored before the next is read, and its rows are forgotten."""
    from gpuir.fit.score import GroupScores, score
    from gpuir.fit.tables import read_table

    tables: list[MeasuredTable] = []
    errors = GroupScores()
    together = bool(asked.calibrate or asked.leave_one_out)
    for path in dict.fromkeys(asked.files):
        begun = perf_counter()
        table = read_table(path, checkout.readers())
        _check_columns(table, asked.by)
        tables.append(table)
        if not together:
            errors += score(table.batches, asked.by)
            light = tuple(replace(b, works=(), words={}, dims={}) for b in table.batches)
            tables[-1] = replace(table, batches=light)
        note(f"{table.file}: {table.count:,} rows, {perf_counter() - begun:.1f} s")
    if together:
        batches = [b for t in tables for b in t.batches]
        models = _left_out(batches, asked.seed) if asked.leave_one_out else {}
        if asked.calibrate:
            batches = _calibrated(batches, asked.calibrate, asked.seed, models)
        errors = score(batches, asked.by, models)
    return tables, errors


def commanded(batch: MeasuredBatch) -> Iterator[ScoredRow]:
    """What is predicted of each distinct shape, and the call that gives it: the kernels one after
    another, as the clock of the measurement shows them."""
    import numpy as np

    from gpuir.fit.score import forecast

    found = np.unique(batch.which)
    some = replace(batch, works=tuple(w.take(found) for w in batch.works))
    some = replace(some, which=np.arange(len(found)))
    times = forecast(some).time_s.tolist()
    for i, time_s in enumerate(times):
        works = [w.each(lambda n, i=i: float(np.asarray(n)[i])) for w in some.works]
        yield ScoredRow(time_s, "s", *_call(works, batch))


def _call(works: Iterable[Work], batch: MeasuredBatch) -> tuple[str, str]:
    """The call that gives a row's time; or nothing, and why."""
    from gpuir.tune.calls import call_of, why_none

    clock, parts = batch.clock, list[str]()
    for work in works:
        call = call_of(work, batch.target.name)
        if not call:
            return "", why_none(work)
        time_s = f"{call}.time_s"
        launch = batch.target.launch_s
        parts.append(time_s if clock.launches else f"max({time_s} - {launch!r}, 0.0)")
    total = " + ".join(parts)
    if clock.floor_s or clock.lead_s:
        total = f"max({float(clock.floor_s)!r}, {float(clock.lead_s)!r} + {total})"
    return total, ""


def _check_columns(table: MeasuredTable, by: Sequence[str]) -> None:
    from gpuir.ir.errors import UsageError, nearest

    known = {name for b in table.batches for name in b.words}
    for name in by:
        if table.batches and name not in known:
            fix = nearest(name, known) if known else "this table has none: leave --by out"
            raise UsageError(f"no column {name!r} to tell rows apart by", where=table.file, fix=fix)


def _left_out(batches: Sequence[MeasuredBatch], seed: int) -> dict[str, Model]:
    """For each GPU the model trained on the other ones' measurements."""
    from gpuir.fit.backtest import leave_one_out
    from gpuir.ir.errors import UsageError

    if len({b.target.device for b in batches}) < 2:
        raise UsageError(
            "nothing is left to train on without the one GPU of these tables",
            where=", ".join(dict.fromkeys(b.file for b in batches)),
            fix="add tables of other GPUs, or leave --leave-one-out out",
        )
    return leave_one_out(batches, seed=seed, watch=note)


def _calibrated(
    batches: Sequence[MeasuredBatch], count: int, seed: int, models: Mapping[str, Model]
) -> list[MeasuredBatch]:
    """The rows that calibration does not see, on targets that it moved."""
    from gpuir.fit.calibrate import calibration
    from gpuir.fit.score import drawn

    seen, rest = drawn(batches, count, seed)
    targets: dict[str, Target] = {}
    for name in dict.fromkeys(b.target.name for b in seen):
        begun = perf_counter()
        mine = [b for b in seen if b.target.name == name]
        own = models.get(mine[0].target.device)
        targets[name], _ = calibration(mine[0].target, mine, model=own)
        rows = sum(map(len, mine))
        note(f"calibrated {name} on {rows:,} rows: {perf_counter() - begun:.1f} s")
    return [replace(b, target=targets.get(b.target.name, b.target)) for b in rest]
