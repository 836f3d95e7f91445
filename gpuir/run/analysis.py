"""The whole way from a model file to its answer: load, lower, cost, analyze, explain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from os import PathLike, fspath
from typing import TYPE_CHECKING

from gpuir.cost.explain import SheetLine, explained
from gpuir.cost.habits import Release, release_of
from gpuir.cost.power import drawn
from gpuir.cost.reading import work_of
from gpuir.cost.strips import is_written_out
from gpuir.cost.table import Predictor
from gpuir.ir.door import FLAG, PATH, TEXT, named, of_type, takes
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.ir.graph import GRAPH, Graph, Level, Node
from gpuir.ir.notes import Schedule
from gpuir.ops.kernel import Attention, KernelOp, View
from gpuir.passes.annotate import Annotate
from gpuir.passes.manager import Pass, Pipeline
from gpuir.passes.math import run_under
from gpuir.passes.tile import TilePass
from gpuir.report.answer import Answer, Device, Needs, answer_of
from gpuir.report.find import find_kernel
from gpuir.report.kernels import KernelRow
from gpuir.report.notebook import html
from gpuir.simulate.fitting import ToFit, larger_target
from gpuir.simulate.memory import memory
from gpuir.simulate.timeline import filled
from gpuir.stacks.table import pipeline
from gpuir.targets.cluster import load_cluster
from gpuir.targets.load import load_target
from gpuir.targets.profile import load_profile, profile_of
from gpuir.targets.support import check, elsewhere, emulated

if TYPE_CHECKING:
    from gpuir.targets.target import Target


PASSES = named(of_type(type, "a class of passes"))


@takes(graph=GRAPH, profile=PATH, tf32=FLAG, target=PATH, passes=PASSES)
def lower(
    graph: Graph,
    *,
    profile: str | PathLike[str] | None = None,
    tf32: bool | None = None,
    target: str | None = None,
    passes: Mapping[str, type[Pass]] | None = None,
) -> Graph:
    """The kernels that a software stack makes of a graph.

    `profile` is a name or a path: by default that of the graph, else `eager` for what came from
    PyTorch and `ort` for the rest; text that says nothing of all that, and is lowered already, has
    none. What a profile has lowered is refused under another. `tf32` lets all f32 products run on
    the matrix units, or none, in place of those that the profile does. With a `target` a stack
    makes the kernels that it makes for that one, else those for any. `passes` are those of the
    user's own modules, by name.
    """
    graph = run_under(graph, profile, tf32)
    if graph.level >= Level.kernel:
        return graph
    device = None if target is None else load_target(target)
    return lowering(graph, device, passes).run(graph)


def lowering(
    graph: Graph, target: Target | None = None, passes: Mapping[str, type[Pass]] | None = None
) -> Pipeline:
    """The passes that `lower` runs on a graph that has its profile. They are equal for targets for
    which the stack makes the same kernels."""
    if graph.profile is None:
        return pipeline("legalize")
    try:
        steps = pipeline(load_profile(graph.profile).passes, passes)
        if steps.passes[-1].gives != Level.kernel:
            raise UsageError(
                "the passes do not end with kernels",
                expected="legalize as the last pass",
                found=f"{steps}",
            )
    except GpuirError as error:
        where = f": {error.where}" if error.where else ""
        error.where = f"profile {graph.profile}: passes{where}"
        raise
    if graph.level == Level.fused:
        steps = Pipeline(tuple(p for p in steps.passes if p.takes == Level.fused))
    return steps if target is None else steps.on(target)


def costed(
    g: Graph,
    target: str | None = None,
    *,
    predictor: str | Predictor | Release = "tile",
    schedule: str | PathLike[str] | Schedule = "",
    profile: str | PathLike[str] | None = None,
    tf32: bool | None = None,
    cluster: str | PathLike[str] | None = None,
) -> Graph:
    """The costed graph of what `analyze` answers, or with the kernels of a `Release` in place of
    those that the profile says."""
    _check_target(g, target)
    _check_done(g, predictor, schedule, tf32)
    g = lower(g, profile=profile, tf32=tf32, target=g.target or target)
    if g.level < Level.costed:
        check(g, load_target(str(g.target or target)))
    own = release_of(profile_of(g), g) if predictor == "tile" else None
    passes: tuple[Pass, ...] = ()
    tiles = schedule if isinstance(schedule, Schedule) else fspath(schedule)
    if g.level < Level.tiled:
        passes += (TilePass(target=str(target), schedule=tiles),)
    if g.level < Level.costed:
        passes += (Annotate(predictor=own or predictor, cluster=fspath(cluster or "")),)
    return Pipeline(passes).run(g)


def _check_target(g: Graph, target: str | None) -> None:
    if g.target is None:
        if target is None:
            raise UsageError(
                "no target given",
                fix="give a GPU, for example a100; `gpuir targets` lists the names",
            )
    elif target is not None and load_target(target).name != load_target(g.target).name:
        raise UsageError(
            f"@{g.name} has the level {g.level.name} and was made for another target",
            expected=g.target,
            found=target,
            fix="start from a graph of level graph, fused or kernel",
        )


def _check_done(
    g: Graph,
    predictor: str | Predictor | Release,
    schedule: str | PathLike[str] | Schedule,
    tf32: bool | None,
) -> None:
    """UsageError when something is asked for that the graph has behind it already."""
    late = [
        ("schedule", schedule and g.level >= Level.tiled),
        ("predictor", predictor != "tile" and g.level >= Level.costed),
        ("tf32", tf32 is not None and g.level >= Level.costed),
    ]
    for name, asked in late:
        if asked:
            raise UsageError(
                f"{name} has no effect, because @{g.name} already has the level {g.level.name}",
                fix="start from a graph of level graph, fused or kernel, or remove the option",
            )


@takes(graph=GRAPH, name=TEXT)
def explain(graph: Graph, name: str) -> tuple[SheetLine, ...]:
    """Every quantity that leads to the cost of one kernel of a costed graph, in order.

    `name` is the kernel's first result, or a model node it stands for: whole, or the end of it.
    Empty for a view, a loop or a branch. Of a predictor that does not explain itself, the terms
    and facts that it stated. UsageError, with the nearest names, when nothing or several kernels
    are called so.
    """
    node = find_kernel(graph, name).node
    if node.cost is None:
        raise UsageError(f"@{graph.name} has no costs", fix="run it through gpuir.analyze")
    return _explained(graph, node)


def _explained(graph: Graph, node: Node) -> tuple[SheetLine, ...]:
    if node.cost is None or not isinstance(node.op, KernelOp) or isinstance(node.op, View):
        return ()
    target = load_target(str(graph.target))
    cluster = load_cluster(graph.cluster) if graph.cluster else None
    cluster = cluster and cluster.part_with(target.device, graph.ranks)
    return explained(node.op, node.tile, target, node.cost, cluster)


def _written_out(graph: Graph, target: Target) -> tuple[str, ...]:
    """What is said of attention that is costed as one kernel, and runs as several."""
    calls = (n.op for n in graph.walk() if isinstance(n.op, Attention) and n.op.library == "sdpa")
    if not any(is_written_out(work_of(op), target) for op in calls):
        return ()
    return (
        "attention in bf16: PyTorch has no fused kernel for it on "
        f"{target.isa} and runs two products and a softmax, with the "
        "scores in memory; gpuir costs it as one kernel",
    )


def _uncounted(graph: Graph, target: Target) -> tuple[str, ...]:
    """What is said of memory that a stack's libraries reserve, and that nobody has counted."""
    profile = profile_of(graph)
    products = any(n.op.contraction for n in graph.walk())
    if profile.workspace or target.is_cpu or not products:
        return ()
    return (f"memory: what the libraries of {profile.name} reserve for themselves is not counted",)


def answer(graph: Graph, *, warnings: Iterable[str] = (), batch: int | None = None) -> Answer:
    """The answer that a costed graph is."""
    target = load_target(str(graph.target))
    notes = (
        *(elsewhere(graph, target), emulated(graph, target)),
        *(_written_out(graph, target), _uncounted(graph, target)),
    )
    assumed = (*target.assumptions, *chain(*notes))

    def explain(x: KernelRow) -> tuple[SheetLine, ...]:
        return () if x.rest else _explained(graph, x.node)

    def fixes(_: Answer) -> tuple[ToFit, ...]:
        found = larger_target(graph, target)
        return () if found is None else (found,)

    return answer_of(
        graph,
        Device(target.name, target.title, assumed, tuple(target.rows()), target.vendor),
        batch=batch,
        held=memory(graph, target),
        warnings=tuple(warnings),
        explain=explain,
        fixes=fixes,
        html=html,
    )


def run_alone(found: Answer) -> Answer:
    """The numbers of a run, with what it takes of its target, alone there."""
    target, clock = load_target(str(found.graph.target)), found.timeline
    moved = found.dram_bytes / target.dram_bytes_per_s
    kernels = [x for x in found.running if x.time_s > 0]
    needs = Needs(
        busy_s=clock.busy_s,
        host_s=min(clock.launched_s, found.latency_s),
        copies_s=clock.copies_s,
        filled=sum(x.time_s * filled(x.cost) for x in kernels) / max(found.device_s, 1e-12),
        bandwidth=min(1.0, moved / found.latency_s),
        watts=_watts(kernels, target),
    )
    return replace(found.numbers, needs=needs)


def _watts(kernels: Iterable[KernelRow], target: Target) -> float:
    """What kernels draw, on average over their time."""
    ops = [(x.node.op, x.time_s) for x in kernels]
    computing = ((op, t) for op, t in ops if isinstance(op, KernelOp) and not isinstance(op, View))
    return drawn(((work_of(op), t) for op, t in computing), target)
