"""A run of a model, or of several one after another, from their names to the answer in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np

from gpuir.cost.table import Predictor
from gpuir.ir.door import CALLED, FLAG, PATH, TEXT, many, takes, whole
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.notes import SCHEDULE, Schedule
from gpuir.plan.space.points import ProgramPoints, answers, at
from gpuir.report.answer import Answer, RunPart
from gpuir.report.parts import mean, together
from gpuir.run.analysis import answer, costed
from gpuir.run.loading import LoadOptions, load
from gpuir.run.program import program
from gpuir.run.terms import RunTerm, expanded, terms
from gpuir.targets.cluster import load_cluster
from gpuir.targets.load import load_target
from gpuir.targets.support import refusal

if TYPE_CHECKING:
    from gpuir.run.loading import Source


@takes(
    target=PATH,
    predictor=TEXT | CALLED,
    schedule=PATH | SCHEDULE,
    profile=PATH,
    tf32=FLAG,
    cluster=PATH,
    batch=whole(1),
    generate=whole(1),
    warnings=many(TEXT),
)
def analyze(
    model: Graph | Source,
    *given: Any,
    target: str | None = None,
    predictor: str | Predictor = "tile",
    schedule: str | PathLike[str] | Schedule = "",
    profile: str | PathLike[str] | None = None,
    tf32: bool | None = None,
    cluster: str | PathLike[str] | None = None,
    batch: int | None = None,
    generate: int | None = None,
    warnings: Iterable[str] = (),
    **options: Unpack[LoadOptions],
) -> Answer:
    """What a run of the model on `target` comes to: time, memory, and every kernel.

        gpuir.analyze("model.onnx", "a100").latency_s
        gpuir.analyze(module, (x,), target="h100-sxm").graph
        gpuir.analyze("50*unet.onnx + vae.onnx", "a100").parts

    A graph goes on from the level it has. One that is tiled already keeps its target; one that
    is costed comes back as it is; what would change it is refused. `schedule` is a file of tiles
    to use where it names a kernel, or a `Schedule`. `target` is a name, a path, or either
    with numbers changed: `a100+sms=120`. `predictor` is a name too, or a function of yours.
    `profile` is the software stack, and `tf32` what it runs in TF32, as in `lower`. `cluster`, a
    name or a path, joins the ranks of a graph that the pass `shard` has cut; its GPU, if of one
    kind, is then the target. `batch` is how many items a run does at once: without it, what the
    graph was built for. `warnings` are shown in the report.

    Several models that run one after another are one run (`parts`): `50*unet.onnx:batch=2 +
    vae.onnx`, each as often as it says, with sizes and options of its own behind it. With
    `generate` the run is the generation of so many tokens by a config's language model: the prompt
    of `seq` tokens, which gives the first, and a step for each of the others, the cache longer by
    one each time.
    """
    args: list[Any] = []
    for thing in given:  # the target, or a module's arguments: a tuple, or one by one
        if isinstance(thing, str | PathLike) and target is None:
            target = fspath(cast("str | PathLike[str]", thing))
        elif isinstance(thing, str | PathLike):
            raise UsageError("two targets are given", found=f"{target}, {thing}")
        elif thing is not None:
            args.append(thing)
    if cluster is not None and target is None:
        target = load_cluster(fspath(cluster)).only_gpu
    path = fspath(model) if isinstance(model, str | PathLike) else ""
    if generate is not None and not path:
        raise UsageError(
            "a generation is asked of a language model by the path of its config",
            found=type(model).__name__,
            fix='gpuir.analyze("hf:config.json", target, generate=128, dims={"seq": 1024})',
        )
    if path and (several := terms(path, generate)):
        if args or schedule or cluster:
            raise UsageError(
                "args, schedule and cluster are for a run of one model",
                found=path,
                fix="leave them out, or analyze the models one by one",
            )
        return _several(
            several,
            batch,
            target=target,
            predictor=predictor,
            profile=profile,
            tf32=tf32,
            warnings=tuple(warnings),
            options=options,
        )
    if args and isinstance(model, Graph):
        raise UsageError(
            "the arguments are inputs, but a graph already has the shapes of its inputs",
            expected="only the name of a target or the path of its file",
            found=", ".join(type(x).__name__ for x in args),
        )
    if args:
        options["args"] = args[0] if len(args) == 1 else tuple(args)
    g = model if isinstance(model, Graph) else load(model, profile=profile, tf32=tf32, **options)
    made = costed(
        g,
        target=target,
        predictor=predictor,
        schedule=schedule,
        profile=profile,
        tf32=tf32,
        cluster=cluster,
    )
    return answer(made, warnings=warnings, batch=batch)


def _several(found: Iterable[RunTerm], batch: int | None, **how: Any) -> Answer:
    """The answer of a run of several models."""
    parts: list[RunPart] = []
    weights: list[tuple[str, ...]] = []
    tokens = 0
    for term in found:
        for part, lengths in expanded(term, how["options"]):
            parts.append(_part(part, lengths, **how))
            weights.append(part.weights)
        if term.generate is not None:
            tokens += term.times * term.generate * parts[-1].each.items
    return together(parts, weights, batch=batch, tokens=tokens or None)


def _part(
    term: RunTerm,
    lengths: range | None,
    *,
    target: str | None,
    predictor: str | Predictor,
    profile: str | PathLike[str] | None,
    tf32: bool | None,
    warnings: tuple[str, ...],
    options: LoadOptions,
) -> RunPart:
    own: Any = term.options(options)
    stack: Any = {"profile": term.profile or profile, "tf32": tf32}
    if lengths is None:
        graph = load(term.source, **stack, **own)
        made = costed(graph, target, predictor=predictor, **stack)
        return RunPart(str(term), term.times, answer(made, warnings=warnings))
    check_predictor(predictor)
    if target is None:
        raise UsageError("no target given", fix="give a GPU, for example a100")
    made = program(term.source, **stack, **own)
    points = {"past": np.array(lengths)}
    return of_lengths(term, lengths, made.kernels_at(points, load_target(target)), target)


def check_predictor(predictor: str | Predictor) -> None:
    """UsageError for another than ours where steps of many lengths are costed together."""
    if predictor != "tile":
        raise UsageError(
            "only the predictor tile knows steps of many lengths",
            found=str(predictor),
            fix="--phase decode --past 4096 is a step at one length",
        )


def of_lengths(
    term: RunTerm,
    lengths: range,
    found: Iterable[tuple[Graph | GpuirError, ProgramPoints]],
    target: str,
) -> RunPart:
    """Steps of a generation, one at each of these lengths of the cache: `found` has the kernels at
    all of them."""
    device, made = load_target(target), list(_able(found, target))
    rows = answers([x for _, x in made], device)
    if failed := next((a for a in rows.values() if not a.ran), None):
        raise UsageError(failed.why, where=str(term))
    kernels, x = next((g, x) for g, x in made if len(lengths) - 1 in x.places)
    (place,) = (x.places == len(lengths) - 1).nonzero()[0].tolist()
    last = answer(costed(at(kernels, x.points, place), target))
    each = replace(mean([rows[i] for i in sorted(rows)]), batch=last.batch)
    past = f"{lengths[0]}..{lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"
    return RunPart(f"{term}:past={past}", term.times, each, last)


def _able(
    found: Iterable[tuple[Graph | GpuirError, ProgramPoints]], target: str
) -> Iterator[tuple[Graph, ProgramPoints]]:
    """Those that the target runs; the error of the first that it does not."""
    for graph, x in found:
        error = graph if isinstance(graph, GpuirError) else refusal(graph, load_target(target))
        if error is not None:
            raise error
        yield cast(Graph, graph), x
