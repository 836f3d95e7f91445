"""`gpuir eval models`: whole models against measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli.exam import FILES, ExamOutput, ScoredRow, commands_report
from gpuir.cli.output import note
from gpuir.cli.request import ask, held, option, request
from validation.commands import Analysis, Asked
from validation.commands import config as written

if TYPE_CHECKING:
    from gpuir.cost.table import Predictor
    from gpuir.ir.graph import Graph
    from gpuir.targets.target import Target
    from validation.cases import Case, Predicted, Program, Result


@dataclass(frozen=True)
class WholeModels:
    files: tuple[str, ...] = ask(FILES)
    configs: str | None = option("Configs of the models, by name: JSON.", type=click.Path())
    unseen: str | None = option(
        "Score each GPU by weights trained without it too: a100-pcie-40gb.json, from"
        " `gpuir fit --without`.",
        type=click.Path(),
        metavar="FOLDER",
    )
    ops: str | None = option(
        "Operators of the same models run one by one: errors by kind of operator too.",
        type=click.Path(),
        metavar="TABLE",
    )
    store: str | None = option(
        "Of throughputs: keep predictions here, and go on from those that are there.",
        type=click.Path(),
        metavar="FILE",
    )
    jobs: int | None = option("Of throughputs: programs at a time.", type=click.IntRange(1))
    model: tuple[str, ...] = option(
        "Of throughputs: these models alone; `resnet*`.", multiple=True, metavar="NAME"
    )
    each: bool = option("Of throughputs: show every case.")
    picture: str | None = option(
        "Of throughputs: draw predicted against measured times (png, svg, pdf).",
        type=click.Path(),
        metavar="FILE",
    )
    shown: ExamOutput = held(ExamOutput)


THROUGHPUTS = ("store", "jobs", "model", "each", "picture")


@request(WholeModels)
def models(asked: WholeModels) -> None:
    """Whole models: FILES are tables of cases, each a model, a mode, sizes and a GPU.

    Each model is built from its config as it was measured (docs/validation/data.md),
    exported once for all GPUs, and predicted; beside it stands what others predicted of the same
    case.

    Tables of published throughputs (image models, Stable Diffusion, language models), of decoders'
    layers and of deployments of language models are known by their columns. Their configs are in
    them, or come with gpuir.

    \b
    gpuir eval models timm.csv convnets.csv --store predicted.jsonl --picture models.png
    gpuir eval models labels.csv --configs model_configs.json
    gpuir eval models mlp_ops.parquet
    gpuir eval models e2e_serving.parquet --json -
    gpuir eval models serving_cases.csv --commands
    gpuir eval models labels.csv --configs model_configs.json --unseen weights --json -
    """
    from gpuir.ir.errors import UsageError
    from validation import decoders, model_scores
    from validation.models import groups, read_configs, read_labels, results
    from validation.operators import compared, read_traces
    from validation.throughput import cases as throughputs
    from validation.throughput.show import show

    asked.shown.check()
    labels = asked.files[0]
    if all(map(throughputs.is_one, asked.files)):
        _refuse(asked, ("configs", "unseen", "ops"))
        if asked.shown.commands:
            raise UsageError(THEIR_MODULES, where=labels, fix="leave out --commands")
        return show(asked.files, asked.shown, **{n: getattr(asked, n) for n in THROUGHPUTS})
    _refuse(asked, THROUGHPUTS)
    if len(asked.files) > 1:
        raise UsageError(
            "tables of several kinds, or several of one that is scored alone",
            found=", ".join(asked.files),
            fix="one table at a time, or published throughputs alone",
        )
    if decoders.are_in(labels):
        _refuse(asked, ("configs", "ops"))
        return asked.shown.show(decoders.report(labels, asked.unseen, asked.shown.commands))
    if asked.configs is None:
        raise UsageError(
            "the models of these labels need their configs",
            where=labels,
            fix="--configs model_configs.json",
        )
    known = read_configs(asked.configs)
    table = read_labels(labels, known)
    traces = read_traces(asked.ops) if asked.ops else {}
    predict = predictor(known, asked.unseen)
    cases = [noted(r) for r in results(table.cases, predict)]
    if asked.shown.commands:
        rows = (row_of(r, known[r.case.program.model]) for r in cases)
        return asked.shown.show(commands_report("models", rows))
    scores = model_scores.Scores(table, cases, groups(cases), compared(cases, traces))
    return asked.shown.show(model_scores.scores_report(scores))


THEIR_MODULES = "modules of timm and diffusers are built in Python: no command has their options"


def _refuse(asked: WholeModels, names: Iterable[str]) -> None:
    """UsageError for an option that is of other tables."""
    from gpuir.ir.errors import UsageError

    for name in (n for n in names if getattr(asked, n)):
        raise UsageError(f"--{name} is for other tables", where=asked.files[0], fix="leave it out")


def asked(program: Program, config: Mapping[str, Any]) -> Asked:
    """A config's model as it was measured."""
    from validation.models import load_options

    return Asked(written(config, program.model), load_options(program, config))


def row_of(result: Result, config: Mapping[str, Any]) -> ScoredRow:
    """A case's time, and the command that gives it."""
    case, time_s = result.case, result.predicted.times.total_s
    if case.program.mode == "train":
        return ScoredRow(
            time_s, "s", "", "its loss is not timed, and backward begins on an idle GPU"
        )
    if "expert_capacity" in config:
        return ScoredRow(
            time_s, "s", "", "all its tokens choose one expert, which no --expert-skew says"
        )
    of = asked(case.program, config)
    run = Analysis(of.model, of.options, case.profile, tf32=False, target=case.target.name)
    return ScoredRow(time_s, "s", run.command, "reports.0.latency_s")


def noted(result: Result) -> Result:
    case, times = result.case, result.predicted.times
    error = times.error(case.measured)
    note(f"{case.program} {case.option} on {case.target.name}: {error:+.1f} %")
    return result


def predictor(
    configs: Mapping[str, Mapping[str, Any]], unseen: str | None
) -> Callable[[Case], tuple[Predicted, Predicted | None]]:
    """A case's predictions: by the weights that come with gpuir, and by those without its GPU. The
    program, and what a stack makes of it, are kept until another is asked for."""
    import gpuir
    from validation.models import as_measured, predicted
    from validation.weights import weights

    @lru_cache(1)
    def graph(program: Program) -> Graph:
        begun = perf_counter()
        config = configs[program.model]
        g = as_measured(asked(program, config).graph(), program, config)
        note(f"{program}: {len(g.nodes):,} ops, {perf_counter() - begun:.1f} s")
        return g

    @lru_cache(2)
    def lowered(program: Program, profile: str) -> Graph:
        return gpuir.lower(graph(program), profile=profile, tf32=False)

    @lru_cache(None)
    def other(target: Target) -> Predictor | None:
        return weights(unseen, target)

    def predict(case: Case) -> tuple[Predicted, Predicted | None]:
        g = lowered(case.program, case.profile)
        without = other(case.target)

        def by(chosen: str | Predictor) -> Predicted:
            costed = gpuir.analyze(g, case.target.name, predictor=chosen).graph
            return predicted(costed, case.profile)

        return by("tile"), None if without is None else by(without)

    return predict
