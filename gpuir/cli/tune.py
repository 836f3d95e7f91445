"""`gpuir tune`: the fastest tiles of a model's kernels, as a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.lowering import analyze, once
from gpuir.cli.modules import load_modules
from gpuir.cli.output import check_ahead, check_binary, emit, progress, show, warn, write

if TYPE_CHECKING:
    from gpuir.cli.modules import Loaded
    from gpuir.ir.graph import Graph
    from gpuir.targets.target import Target
    from gpuir.tune.groupings import Groupings
    from gpuir.tune.results import Results
    from gpuir.tune.tasks import How, Measure, Task, Tuned, Tuning

MOST_TRIES = 1 << 30


@click.command()
@options.model
@options.target()
@options.loading
@options.settings
@options.profile
@options.tf32
@options.pipeline
@click.option(
    "--search",
    "by",
    default="auto",
    show_default=True,
    help="exhaustive, beam, optuna; auto is exhaustive, or a beam beyond 200,000 tiles.",
)
@click.option(
    "--tries",
    type=click.IntRange(1, MOST_TRIES),
    help="Tiles of a kernel to predict at most.  [all; beam 4000, optuna 300]",
)
@click.option("--wide", is_flag=True, help="More tiles: all combinations, group and unroll too.")
@click.option("--kernels", type=click.IntRange(1), help="Only so many, those of most time.  [all]")
@click.option("--fusion", is_flag=True, help="Search first which ops share a launch.")
@click.option(
    "--groupings",
    type=click.IntRange(1, 10_000),
    default=64,
    show_default=True,
    help="Pipelines that --fusion tries.",
)
@click.option("--all", "everything", is_flag=True, help="Tiles of kernels too that get no faster.")
@click.option("--store", type=click.Path(), help="Keep results in this file, and go on from it.")
@click.option(
    "--forget", is_flag=True, help="Take predictions by other versions out of the store first."
)
@click.option(
    "--measure",
    metavar="CMD",
    help="A command that measures: a kernel and a tile as JSON on stdin, seconds on stdout.",
)
@click.option(
    "--best",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Tiles of each kernel to measure.",
)
@click.option(
    "--timeout",
    type=options.Finite(0.001, options.MOST_S),
    default=60.0,
    show_default=True,
    help="Seconds that one measurement may take.",
)
@click.option(
    "--top", type=click.IntRange(0), default=15, show_default=True, help="Kernels listed."
)
@options.formats(help="Of what is printed; the schedule is text.")
@options.as_json
@options.width
@click.option("-o", "--output", type=click.Path(), help="The schedule; - for stdout.")
@options.load_modules
def command(**given: Any) -> None:
    """Find the fastest tiles for the kernels of MODEL.

    These are kernels that a compiler would generate (Triton, CUTLASS), not the library's own. A
    kernel that would not become faster stays with the library.

    \b
    gpuir tune model.onnx --target h100-sxm -o best.sched
    gpuir analyze model.onnx --target h100-sxm --schedule best.sched
    gpuir tune model.onnx --target h100-sxm --store runs.db --measure "python3 bench.py" -o my.sched
    """
    from gpuir.backends.tuning import tuning_report

    check_binary(given["format"], None, "gpuir tune ... > FILE.parquet")
    for name in ("output", "store"):
        check_ahead(given[name])
    found = run(given)
    tiles = schedule_text(found)
    if given["output"] == "-":
        emit(tiles)
        return
    show(tuning_report(found, given["top"]), {**given, "output": None})
    if given["output"]:
        write(given["output"], tiles)


def schedule_text(found: Tuning) -> str:
    """The schedule, and of which pipeline's kernels it is where that is not the profile's."""
    from shlex import quote

    import gpuir

    text = gpuir.show(found.schedule)
    if found.fusion is None or found.fusion.best == found.fusion.start:
        return text
    passes = quote(str(found.fusion.best.pipeline))
    return f"# of the kernels that this makes: --pipeline {passes}\n{text}"


def run(given: dict[str, Any]) -> Tuning:
    """Every kernel searched, and measured where that is asked for."""
    from gpuir.ir.errors import UsageError
    from gpuir.targets.profile import profile_of
    from gpuir.tune.measure import command_of
    from gpuir.tune.results import Results
    from gpuir.tune.search import check_search
    from gpuir.tune.tasks import How, Tuning

    if given["forget"] and not given["store"]:
        raise UsageError("--forget is of a store, and none is named", fix="--store FILE")
    check_search(given["by"])
    words = command_of(given["measure"]) if given["measure"] else ()
    loaded = load_modules(given["modules"])
    targets = options.targets_of(given, loaded)
    if len(targets) > 1:
        names = ", ".join(target.name for target in targets)
        raise UsageError("a schedule is for one target", found=names, fix="give one --target")
    (target,) = targets
    if target.is_cpu:
        raise UsageError(
            f"{target.name} is a CPU, whose libraries cut kernels by themselves",
            fix="name a GPU: --target h100-sxm",
        )
    how = How(given["by"], given["tries"], given["wide"], given["best"])
    warnings: list[str] = []
    fusion, graph = launches(given, loaded, target, warnings)
    for text in warnings:
        warn(text)
    tasks = tasks_of(graph, target)[: given["kernels"]]
    measure = _measure(words, given["timeout"]) if words else None
    with Results(given["store"]) if given["store"] else nullcontext() as store:
        if store is not None:
            _say_others(store, given["forget"])
        found = _tuned(tasks, target, how, store, measure)
    return Tuning(
        graph.name,
        target,
        profile_of(graph).name,
        tuple(found),
        given["everything"],
        given["store"] or "",
        fusion,
    )


def launches(
    given: dict[str, Any], loaded: Loaded, target: Target, warnings: list[str]
) -> tuple[Groupings | None, Graph]:
    """The model's kernels costed, in the groups that a search found best where one is asked for."""
    import gpuir
    from gpuir.analysis import lowering
    from gpuir.ir.errors import UsageError
    from gpuir.ir.graph import Level
    from gpuir.passes.math import run_under
    from gpuir.tune.groupings import grouping_pass, groupings

    whole = {**given, "schedule": "", "predictor": "tile", "verbose": False, "cluster": None}
    if not given["fusion"]:
        return None, analyze(whole, loaded, warnings)[0].graph
    profile = loaded.profile(given["profile"]) if given["profile"] else None
    stack: Any = {"profile": profile, "tf32": given["tf32"]}
    how = options.load_options(given, loaded)
    model = gpuir.load(given["model"], warn=once(warnings), **stack, **how)
    if model.level > Level.graph:
        raise UsageError(
            f"@{model.name} is {model.level.name} already: its ops are grouped",
            fix="leave out --fusion, or start from a graph of level graph",
        )
    g = run_under(model, **stack)
    own = options.pipeline_of(given, loaded)
    start = own.on(target) if own else lowering(g, target, loaded.passes)
    if start.passes[-1].gives != Level.kernel:
        raise UsageError("--pipeline ends early", expected="legalize as its last", found=str(start))
    grouping_pass(start)
    tries = given["groupings"]
    with progress(tries, "fusion") as done:

        def latency(kernels: Graph) -> float:
            done()
            return gpuir.analyze(kernels, target.name).latency_s

        found = groupings(g, start, latency, tries)
    whole["pipeline"] = str(found.best.pipeline)
    return found, analyze(whole, loaded, warnings, model)[0].graph


def tasks_of(graph: Graph, target: Target) -> list[Task]:
    """The kernels of a costed graph that have a tile, equal ones once, those of most time first."""
    from gpuir.cost.reading import work_of
    from gpuir.cost.work import Work
    from gpuir.ops.kernel import KernelOp
    from gpuir.report.kernels import Kernel as Reported
    from gpuir.report.kernels import kernels_of
    from gpuir.tune.kernels import Kernel
    from gpuir.tune.tasks import Task

    groups: dict[Work, list[Reported]] = {}
    for x in kernels_of(graph):
        op = x.node.op
        if isinstance(op, KernelOp) and op.tiled and x.runs and not (x.rest or x.cost.on_host):
            groups.setdefault(work_of(op), []).append(x)
    tasks = [
        Task(
            Kernel(f"%{some[0].name}", work, target, some[0].tile, some[0].cost),
            tuple(x.path for x in some),
            tuple(x.label for x in some),
            sum(x.runs for x in some),
        )
        for work, some in groups.items()
    ]
    return sorted(tasks, key=lambda task: -task.runs * task.kernel.time_s)


def _tuned(
    tasks: Sequence[Task], target: Target, how: How, store: Results | None, measure: Measure | None
) -> list[Tuned]:
    from gpuir.tune.observe import Observed
    from gpuir.tune.tasks import remembered, tune

    model = remembered(store, tasks, target) if store else Observed(target)
    found: list[Tuned] = []
    with progress(len(tasks), "tune") as done:
        for task in tasks:
            tuned, model = tune(task, model, how, store, measure, warn)
            found.append(tuned)
            done()
    return found


def _measure(words: Sequence[str], timeout_s: float) -> Measure:
    """Measures by the user's command."""
    from gpuir.tune.measure import measured, request
    from gpuir.tune.space import Ranked

    def measure(task: Task, predicted: Ranked) -> float | str:
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
