"""`gpuir eval models`: whole models against measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.output import check_ahead, emit, layout, note

if TYPE_CHECKING:
    from gpuir.cost.table import Predictor
    from gpuir.ir.graph import Graph
    from gpuir.targets.target import Target
    from validation.cases import Case, Predicted, Program, Result


@click.command()
@click.argument("tables", nargs=-1, required=True, type=click.Path())
@click.option("--configs", type=click.Path(), help="Configs of the models, by name: JSON.")
@click.option(
    "--unseen",
    type=click.Path(),
    metavar="FOLDER",
    help="Score each GPU by weights trained without it too: a100-pcie-40gb.json, from"
    " `gpuir fit --without`.",
)
@click.option(
    "--ops",
    type=click.Path(),
    metavar="TABLE",
    help="Operators of the same models run one by one: errors by kind of operator too.",
)
@click.option(
    "--store",
    type=click.Path(),
    metavar="FILE",
    help="Of throughputs: keep predictions here, and go on from those that are there.",
)
@click.option("--jobs", type=click.IntRange(1), help="Of throughputs: programs at a time.")
@click.option(
    "--model",
    "chosen",
    multiple=True,
    metavar="NAME",
    help="Of throughputs: these models alone; `resnet*`.",
)
@click.option("--each", is_flag=True, help="Of throughputs: show every case.")
@click.option(
    "--picture",
    "picture_path",
    type=click.Path(),
    metavar="FILE",
    help="Of throughputs: draw predicted against measured times (png, svg, pdf).",
)
@click.option("--json", "json_path", type=click.Path(), help="Write the scores here as JSON.")
@options.width
@options.output
def models(tables: tuple[str, ...], configs: str | None, **given: Any) -> None:
    """Whole models: TABLES are of cases, each a model, a mode, sizes and a GPU.

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
    gpuir eval models labels.csv --configs model_configs.json --unseen weights --json -
    """
    from gpuir.ir.errors import UsageError
    from validation import decoders, model_scores
    from validation.models import groups, read_configs, read_labels, results
    from validation.operators import compared, read_traces
    from validation.throughput import cases as throughputs

    check_ahead(given["json_path"])
    of_throughputs = {n: given.pop(n) for n in ("store", "jobs", "chosen", "each", "picture_path")}
    if all(map(throughputs.is_one, tables)):
        from validation.throughput.show import show

        _refuse({"configs": configs, **{n: given.pop(n) for n in ("unseen", "ops")}}, tables[0])
        return show(tables, **of_throughputs, **given)
    _refuse(of_throughputs, tables[0])
    if len(tables) > 1:
        raise UsageError(
            "tables of several kinds, or several of one that is scored alone",
            found=", ".join(tables),
            fix="one table at a time, or published throughputs alone",
        )
    labels = next(iter(tables))
    if decoders.are_in(labels):
        return decoders.show(labels, configs=configs, **given)
    if configs is None:
        raise UsageError(
            "the models of these labels need their configs",
            where=labels,
            fix="--configs model_configs.json",
        )
    known = read_configs(configs)
    table = read_labels(labels, known)
    traces = read_traces(given["ops"]) if given["ops"] else {}
    with TemporaryDirectory() as folder:
        predict = predictor(known, given["unseen"], Path(folder))
        cases = [noted(r) for r in results(table.cases, predict)]
    scores = model_scores.Scores(table, cases, groups(cases), compared(cases, traces))
    if given["json_path"]:
        emit(model_scores.json_text(scores), given["json_path"])
    if given["json_path"] != "-":
        shape = layout(given["width"], given["output"])
        emit(model_scores.report(scores, shape), given["output"])


def _refuse(given: Mapping[str, Any], table: str) -> None:
    """UsageError for an option that is of other tables."""
    from gpuir.ir.errors import UsageError

    for name in (n for n, value in given.items() if value):
        option = {"chosen": "model", "picture_path": "picture"}.get(name, name)
        raise UsageError(f"--{option} is for other tables", where=table, fix="leave it out")


def noted(result: Result) -> Result:
    case, times = result.case, result.predicted.times
    error = times.error(case.measured)
    note(f"{case.program} {case.option} on {case.target.name}: {error:+.1f} %")
    return result


def predictor(
    configs: Mapping[str, Mapping[str, Any]], unseen: str | None, folder: Path
) -> Callable[[Case], tuple[Predicted, Predicted | None]]:
    """A case's predictions: by the weights that come with gpuir, and by those without its GPU. The
    program, and what a stack makes of it, are kept until another is asked for."""
    import gpuir
    from validation.models import as_measured, load_options, predicted
    from validation.weights import weights

    @lru_cache(1)
    def graph(program: Program) -> Graph:
        begun = perf_counter()
        config = configs[program.model]
        place = folder / program.model
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(config))
        g = gpuir.load(f"hf:{place}", warn=lambda _: None, **load_options(program, config))
        g = as_measured(g, program, config)
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
