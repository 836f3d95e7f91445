"""`gpuir tune`: the fastest tiles of a model's kernels, as a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.lowering import analyze, once
from gpuir.cli.modules import Loaded
from gpuir.cli.output import check_ahead, check_binary, emit, progress, show, warn, write
from gpuir.cli.request import ask, held, option, request

if TYPE_CHECKING:
    from gpuir.cli.modules import Loaded
    from gpuir.ir.graph import Graph
    from gpuir.targets.target import Target
    from gpuir.tune.groupings import Groupings
    from gpuir.tune.results import Results
    from gpuir.tune.tasks import How, Measure, Tuned, Tuning, TuningTask

MOST_TRIES = 1 << 30


@dataclass(frozen=True)
class Tune(options.Runs):
    model: str = ask(options.model)
    target: str | None = ask(options.target())
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing, without="predictor schedule cluster")
    by: str = option(
        "exhaustive, beam, optuna; auto is exhaustive, or a beam beyond 200,000 tiles.",
        "--search",
        default="auto",
    )
    tries: int | None = option(
        "Tiles of a kernel to predict at most.  [all; beam 4000, optuna 300]",
        type=click.IntRange(1, MOST_TRIES),
    )
    wide: bool = option("More tiles: all combinations, group and unroll too.")
    kernels: int | None = option("Only so many, those of most time.  [all]", type=click.IntRange(1))
    fusion: bool = option("Search first which ops share a launch.")
    groupings: int = option(
        "Pipelines that --fusion tries.", type=click.IntRange(1, 10_000), default=64
    )
    everything: bool = option("Tiles of kernels too that get no faster.", "--all")
    store: str | None = option("Keep results in this file, and go on from it.", type=click.Path())
    forget: bool = option("Take predictions by other versions out of the store first.")
    measure: str | None = option(
        "A command that measures: a kernel and a tile as JSON on stdin, seconds on stdout.",
        metavar="CMD",
    )
    best: int = option("Tiles of each kernel to measure.", type=click.IntRange(1, 64), default=8)
    timeout: float = option(
        "Seconds that one measurement may take.",
        type=options.Finite(0.001, options.MOST_S),
        default=60.0,
    )
    top: int = option("Kernels listed.", type=click.IntRange(0), default=15)
    format: str = ask(
        options.stacked(
            options.formats(help="Of what is printed; the schedule is text."), options.as_json
        )
    )
    width: int | None = ask(options.width)
    output: str | None = option("The schedule; - for stdout.", "-o", "--output", type=click.Path())
    loaded: Loaded = ask(options.load_modules)


@request(Tune)
def command(asked: Tune) -> None:
    """Find the fastest tiles for the kernels of MODEL.

    These are kernels that a compiler would generate (Triton, CUTLASS), not the library's own. A
    kernel that would not become faster stays with the library.

    \b
    gpuir tune model.onnx --target h100-sxm -o best.sched
    gpuir analyze model.onnx --target h100-sxm --schedule best.sched
    gpuir tune model.onnx --target h100-sxm --store runs.db --measure "python3 bench.py" -o my.sched
    """
    from gpuir.backends.tuning import tuning_report

    check_binary(asked.format, None, "gpuir tune ... > FILE.parquet")
    check_ahead(asked.output)
    check_ahead(asked.store)
    found = run(asked)
    tiles = schedule_text(found)
    if asked.output == "-":
        emit(tiles)
        return
    show(tuning_report(found, asked.top), asked.format, asked.width, None)
    if asked.output:
        write(asked.output, tiles)


def schedule_text(found: Tuning) -> str:
    """The schedule, and of which pipeline's kernels it is where that is not the profile's."""
    from shlex import quote

    import gpuir

    text = gpuir.show(found.schedule)
    if found.fusion is None or found.fusion.best == found.fusion.start:
        return text
    passes = quote(str(found.fusion.best.pipeline))
    return f"# of the kernels that this makes: --pipeline {passes}\n{text}"


def run(asked: Tune) -> Tuning:
    """Every kernel searched, and measured where that is asked for."""
    from gpuir.ir.errors import UsageError
    from gpuir.targets.profile import profile_of
    from gpuir.tune.measure import command_of
    from gpuir.tune.results import Results
    from gpuir.tune.search import check_search
    from gpuir.tune.tasks import How, Tuning

    if asked.forget and not asked.store:
        raise UsageError("--forget is of a store, and none is named", fix="--store FILE")
    check_search(asked.by)
    words = command_of(asked.measure) if asked.measure else ()
    targets = options.targets_of(asked.run)
    if len(targets) > 1:
        names = ", ".join(target.name for target in targets)
        raise UsageError("a schedule is for one target", found=names, fix="give one --target")
    (target,) = targets
    if target.is_cpu:
        raise UsageError(
            f"{target.name} is a CPU, whose libraries cut kernels by themselves",
            fix="name a GPU: --target h100-sxm",
        )
    how = How(asked.by, asked.tries, asked.wide, asked.best)
    warnings: list[str] = []
    fusion, graph = launches(asked, target, warnings)
    for text in warnings:
        warn(text)
    tasks = tasks_of(graph, target)[: asked.kernels]
    measure = _measure(words, asked.timeout) if words else None
    with Results(asked.store) if asked.store else nullcontext() as store:
        if store is not None:
            _say_others(store, asked.forget)
        found = _tuned(tasks, target, how, store, measure)
    return Tuning(
        graph.name,
        target,
        profile_of(graph).name,
        tuple(found),
        everything=asked.everything,
        store=asked.store or "",
        fusion=fusion,
    )


def launches(asked: Tune, target: Target, warnings: list[str]) -> tuple[Groupings | None, Graph]:
    """The model's kernels costed, in the groups that a search found best where one is asked for."""
    import gpuir
    from gpuir.ir.errors import UsageError
    from gpuir.ir.graph import Level
    from gpuir.passes.math import run_under
    from gpuir.run.analysis import lowering
    from gpuir.tune.groupings import grouping_pass, groupings

    whole = asked.run
    if not asked.fusion:
        return None, analyze(whole, warnings)[0].graph
    stack = asked.costing.stack(asked.loaded)
    model = asked.loading.load(asked.model, asked.loaded, once(warnings), **stack)
    if model.level > Level.graph:
        raise UsageError(
            f"@{model.name} is {model.level.name} already: its ops are grouped",
            fix="leave out --fusion, or start from a graph of level graph",
        )
    g = run_under(model, **stack)
    own = asked.costing.passes(asked.loaded)
    start = own.on(target) if own else lowering(g, target, asked.loaded.passes)
    if start.passes[-1].gives != Level.kernel:
        raise UsageError("--pipeline ends early", expected="legalize as its last", found=str(start))
    grouping_pass(start)
    tries = asked.groupings
    with progress(tries, "fusion") as done:

        def latency(kernels: Graph) -> float:
            done()
            return gpuir.analyze(kernels, target.name).latency_s

        found = groupings(g, start, latency, tries)
    best = replace(asked.costing, pipeline=str(found.best.pipeline))
    return found, analyze(replace(whole, costing=best), warnings, model)[0].graph


def tasks_of(graph: Graph, target: Target) -> list[TuningTask]:
    """The kernels of a costed graph that have a tile, equal ones once, those of most time first."""
    from gpuir.cost.reading import work_of
    from gpuir.cost.work import Work
    from gpuir.ops.kernel import KernelOp
    from gpuir.report.kernels import KernelRow as Reported
    from gpuir.report.kernels import kernels_of
    from gpuir.tune.kernels import Kernel
    from gpuir.tune.tasks import TuningTask

    groups: dict[Work, list[Reported]] = {}
    for x in kernels_of(graph):
        op = x.node.op
        if isinstance(op, KernelOp) and op.tiled and x.runs and not (x.rest or x.cost.on_host):
            groups.setdefault(work_of(op), []).append(x)
    tasks = [
        TuningTask(
            Kernel(f"%{some[0].name}", work, target, some[0].tile, some[0].cost),
            tuple(x.path for x in some),
            tuple(x.label for x in some),
            sum(x.runs for x in some),
        )
        for work, some in groups.items()
    ]
    return sorted(tasks, key=lambda task: -task.runs * task.kernel.time_s)


def _tuned(
    tasks: Sequence[TuningTask],
    target: Target,
    how: How,
    store: Results | None,
    measure: Measure | None,
) -> list[Tuned]:
    from gpuir.tune.observe import Observed
    from gpuir.tune.tasks import remembered, tune

    model = remembered(store, tasks, target) if store else Observed(target)
    found: list[Tuned] = []
    with progress(len(tasks), "tune") as done:
        for task in tasks:
            tuned, model = tune(task, model, how, store=store, measure=measure, said=warn)
            found.append(tuned)
            done()
    return found


def _measure(words: Sequence[str], timeout_s: float) -> Measure:
    """Measures by the user's command."""
    from gpuir.tune.measure import measured, request
    from gpuir.tune.space import Ranked

    def measure(task: TuningTask, predicted: Ranked) -> float | str:
        asked = request(task.kernel, predicted, list(dict.fromkeys(task.labels)))
        return measured(words, asked, timeout_s)

    return measure


def _say_others(store: Results, forget: bool) -> None:
    """Of predictions by other versions of the predictor: they are not used."""
    if forget:
        store.forget_others()
    others = store.others()
    if others and not forget:
        count, names = sum(others.values()), ", ".join(others)
        warn(
            f"{store.path}: {count:,} predictions are by {names}, not by {store.predictor}, and "
            "are made anew; measurements count. `--forget` takes the old ones out of the store"
        )
