"""A model's kernels under one profile after another, and what they cost on one target after
another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuir.cli import options

if TYPE_CHECKING:
    from gpuir.cli.modules import Loaded
    from gpuir.cli.options import ModelRun
    from gpuir.ir.errors import GpuirError
    from gpuir.ir.graph import Graph
    from gpuir.passes.manager import Pipeline
    from gpuir.report.answer import Answer
    from gpuir.run.keeping import ModelCache
    from gpuir.targets.target import Target

Read = Callable[["str | None"], "Graph"]
Place = tuple[str | None, str | None]  # the names of a target and of a profile


@dataclass
class LoweredModels:
    """The kernels that each profile makes of the model that `read` gives. It is read once, but for
    a training step, whose backward pass hangs on the profile: read anew for each. Targets for which
    a profile makes the same kernels share them.

    `passes` run before those of the profile, or in their place.
    """

    read: Read
    tf32: bool | None
    passes: Pipeline | None
    loaded: Loaded
    first: Graph | None = field(default=None, init=False)
    kept: ModelCache | None = None
    graphs: dict[str | None, Graph] = field(default_factory=dict[Any, Any], init=False)
    made: dict[tuple[str | None, Pipeline], Graph] = field(
        default_factory=dict[Any, Any], init=False
    )

    def under(self, profile: str | None, target: Target | None) -> Graph:
        from gpuir.ir.graph import Level
        from gpuir.run.analysis import lowering

        if profile not in self.graphs:
            self.graphs[profile] = self._graph(profile)
        g = self.graphs[profile]
        if g.level >= Level.kernel:
            return g
        steps = lowering(g, target, self.loaded.passes)
        if (profile, steps) not in self.made:
            run = self.kept.lowered if self.kept and self.passes is None else _run
            self.made[profile, steps] = run(g, steps)
        return self.made[profile, steps]

    def _graph(self, profile: str | None) -> Graph:
        """The model as the profile finds it."""
        from gpuir.passes.math import run_under

        if self.first is None:
            g = self.first = self.read(profile)
        else:
            g = self.first if self.first.profile is None else self.read(profile)
        g = run_under(g, profile, self.tf32)
        return g if self.passes is None else self.passes.run(g)


def _run(g: Graph, steps: Pipeline) -> Graph:
    return steps.run(g)


def analyze(asked: ModelRun, warnings: list[str], model: Graph | None = None) -> list[Answer]:
    """The answer for each target and profile; the model is loaded once, unless it is given, and
    lowered once for each profile and kind of target, if that was not done before."""
    return list(analyze_each(asked, warnings, model).values())


def analyze_each(
    asked: ModelRun, warnings: list[str], model: Graph | None = None
) -> dict[Place, Answer]:
    """The same by the names of target and profile; without those that do not go together."""
    with asked.loading.kept(asked.loaded) as kept:
        return _answers(asked, warnings, model, kept)


def _answers(
    asked: ModelRun, warnings: list[str], model: Graph | None, kept: ModelCache | None
) -> dict[Place, Answer]:
    import gpuir
    from gpuir.ir.errors import UsageError
    from gpuir.ir.graph import Level
    from gpuir.run.analysis import answer, costed
    from gpuir.targets.support import reason, refusal

    loading, costing, loaded = asked.loading, asked.costing, asked.loaded
    cluster = costing.cluster
    targets = asked.targets
    for name in targets:  # what is misspelt is said before the work is done
        gpuir.load_target(name)
    profiles = list(dict.fromkeys(map(loaded.profile, options.split_names(costing.profile))))
    for name in profiles:
        gpuir.load_profile(name)
    if costing.changes and not targets:
        raise UsageError("--set, --power-limit and --clocks need a target", fix="--target NAME")
    predictor = costing.predicts(loaded)

    def read(profile: str | None) -> Graph:
        g = model or (kept or gpuir).load(
            asked.model,
            warn=once(warnings),
            profile=profile,
            tf32=costing.tf32,
            **loading.options(loaded),
        )
        if loading.strict:
            refuse_opaque(g)
        return g

    passes = costing.passes(loaded)
    kernels_of = LoweredModels(
        read=read, tf32=costing.tf32, passes=passes, loaded=loaded, kept=kept
    )
    graphs: dict[Place, Graph] = {}
    refused: list[GpuirError] = []
    for name in targets or [None]:
        for profile in profiles or [None]:
            kernels = kernels_of.under(profile, gpuir.load_target(name) if name else None)
            on = gpuir.load_target(name or str(kernels.target)) if name or kernels.target else None
            error = refusal(kernels, on) if on and kernels.level < Level.costed else None
            if error is not None and on is not None:
                refused.append(error)
                warnings.append(f"not supported: {kernels.profile} on {on.name}: {reason(error)}")
                continue
            graphs[name, profile] = costed(
                kernels,
                target=name,
                predictor=predictor,
                schedule=costing.schedule,
                tf32=costing.tf32,
                cluster=cluster,
            )
    if refused and not graphs:
        raise refused[0]
    batch = loading.batch
    return {place: answer(g, warnings=warnings, batch=batch) for place, g in graphs.items()}


def once(warnings: list[str]) -> Callable[[str], None]:
    """Keeps a text that was not said before."""

    def say(text: str) -> None:
        if text not in warnings:
            warnings.append(text)

    return say


def refuse_opaque(g: Graph) -> None:
    """ModelError when a graph, perhaps from IR text, holds an op that nobody knows."""
    from gpuir.ir.errors import ModelError
    from gpuir.ops.tensor import Opaque

    for node in g.walk():
        inside = [node.op, *(n.op for r in node.op.regions for n in r.nodes)]
        for op in inside:
            if isinstance(op, Opaque):
                raise ModelError(
                    f"{op.kind} is not modelled, and --strict does not allow that",
                    where=" + ".join(node.locs),
                    fix="without --strict, gpuir counts its operands and results, but "
                    "not its arithmetic",
                )
