"""The model of a command as a function of its sizes: loaded at a few, lowered once for all that its
passes do the same for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from gpuir.cli import options
from gpuir.cli.lowering import refuse_opaque
from gpuir.cli.modules import Loaded
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Graph
from gpuir.ir.sizes import Columns
from gpuir.passes.math import run_under
from gpuir.plan.space.points import ProgramPoints, answers, at
from gpuir.report.answer import Answer
from gpuir.run.analysis import answer, costed
from gpuir.run.program import FEW, ModelProgram, ReadProgram
from gpuir.targets.load import load_target
from gpuir.targets.target import Target

Point = Mapping[str, int]
KEPT = 64  # graphs that are kept
LEAP, AHEAD = 16, 1.25  # how many times a size a search may ask for, at first and then


@dataclass
class SizedModel:
    """A command's model at sizes, under each profile a program. It is loaded once at a point for
    all of them, but for a training step, whose backward pass hangs on the profile. `warn` is told
    at which point the loader says what."""

    model: str
    loading: options.LoadingOptions
    costing: options.Costing
    loaded: Loaded
    warn: Callable[[Point, str], None]
    programs: dict[str | None, ModelProgram] = field(default_factory=dict[Any, Any], init=False)
    graphs: dict[tuple[Any, ...], Graph | GpuirError] = field(
        default_factory=dict[Any, Any], init=False
    )
    ahead: float = field(default=LEAP, init=False)

    def at(
        self, points: Columns, profile: str | None, target: Target
    ) -> Iterator[tuple[Graph | GpuirError, ProgramPoints]]:
        """Kernels that together are right at all points, or why there are none, and the points that
        each is for."""
        program, count = self.under(profile), len(next(iter(points.values())))
        if count > FEW:
            yield from program.kernels_at(points, target)
            return
        for i in range(count):
            here = {name: n[i : i + 1] for name, n in points.items()}
            for found, x in program.kernels_at(here, target):
                yield found, x._replace(places=np.array([i]))

    def one(
        self, name: str, n: int, most: int, profile: str | None, target: Target
    ) -> tuple[Graph, ProgramPoints]:
        """Kernels at one size of a search up to `most`; what is said in their place is raised. A
        size that may come later is loaded with it, where that tells those between."""
        program, here = self.under(profile), {name: np.array([n])}
        if self.ahead and 1 < n < most and not program.reaches(here):
            ends = {name: np.array([n, min(int(self.ahead * n), most)])}
            self.ahead = AHEAD if program.reach(ends) else 0
        (found,) = program.kernels_at(here, target)
        if isinstance(found[0], GpuirError):
            raise found[0]
        return found[0], found[1]

    def answer(self, size: tuple[str, int], most: int, profile: str | None, target: str) -> Answer:
        """What one size of a search comes to."""
        costing, device = self.costing, load_target(target)
        kernels, x = self.one(*size, most, profile, device)
        predictor = costing.predicts(self.loaded)
        if (predictor, costing.schedule, costing.cluster) == ("tile", "", None):
            return answers([x], device)[0]
        made = costed(
            at(kernels, x.points, 0),
            target=target,
            predictor=predictor,
            schedule=costing.schedule,
            cluster=costing.cluster,
        )
        return answer(made).numbers

    def under(self, profile: str | None) -> ModelProgram:
        if profile not in self.programs:
            self.programs[profile] = ReadProgram(
                self.model,
                {},
                profile,
                self.costing.tf32,
                self.loaded.passes,
                read=lambda point: self._lowered(point, profile),
            )
        return self.programs[profile]

    def _lowered(self, point: Point, profile: str | None) -> Graph:
        """The model as the profile finds it."""
        key = tuple(sorted(point.items()))
        first = self.graphs.get(key)
        if isinstance(first, Graph) and first.profile is not None:
            key = (*key, profile)
        if key not in self.graphs:
            if len(self.graphs) >= KEPT:
                del self.graphs[next(iter(self.graphs))]
            try:
                self.graphs[key] = self._load(point, profile)
            except GpuirError as error:  # asked again, it would say the same
                self.graphs[key] = error
        found = self.graphs[key]
        if isinstance(found, GpuirError):
            raise found
        g = run_under(found, profile, self.costing.tf32)
        passes = self.costing.passes(self.loaded)
        return g if passes is None else passes.run(g)

    def _load(self, point: Point, profile: str | None) -> Graph:
        how = options.with_size(self.loading.options(self.loaded), **point)
        stack = {"profile": profile, "tf32": self.costing.tf32}
        say = partial(self.warn, point)
        g = self.loading.load(self.model, self.loaded, say, how, joins=False, **stack)  # we do
        if self.loading.strict:
            refuse_opaque(g)
        return g
