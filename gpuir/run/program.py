"""A model as a function of its sizes: loaded a few times, then asked for any number of points.

    steps = gpuir.program("hf:config.json", phase="decode", dims={"seq": 1})
    times = steps.times({"batch": [1, 8, 64], "past": 4096}, "h100-sxm")
    times.latency_s

What frontends say at a few sizes becomes one graph whose sizes are symbols (`run.symbols`). The
passes run on it as on any other; what they decide by a size they leave as a condition
(`ir.sizes`). Kernels, launches and allocations then hold for all points that meet the conditions: a
variant. A point that meets those of none makes another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuir.ir.door import FLAG, PATH, of_type, takes
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.ir.graph import Graph, Level
from gpuir.ir.sizes import Columns, Conditions, each_size, moved, recorded, value
from gpuir.passes.manager import Pass
from gpuir.passes.math import run_under
from gpuir.plan.space.points import PointTimes, ProgramPoints, ReservedBytes, distinct, times
from gpuir.plan.space.program import Program, program_of
from gpuir.run.analysis import answer, costed, lowering
from gpuir.run.loading import LoadOptions, load
from gpuir.run.symbols import FoundGraph, Sampled, SymbolicGraph
from gpuir.simulate.parallel import Parallel
from gpuir.targets.load import load_target
from gpuir.targets.support import reason
from gpuir.targets.target import Target

if TYPE_CHECKING:
    from gpuir.report.answer import Answer
    from gpuir.run.loading import Source


@dataclass(frozen=True)
class Variant:
    """Kernels and program of a model, right where `conditions` hold; or the `error` that says why
    there are none."""

    kernels: Graph
    program: Program
    conditions: Conditions
    error: GpuirError | None = None


FEW = 2  # points that are loaded one by one: to know what is between takes a third
LOG = logging.getLogger("gpuir.run.program")
NOTHING = Graph(Level.kernel, "")


@dataclass(repr=False)
class ModelProgram:
    """A model under a software stack, as a function of its sizes."""

    model: Any
    options: LoadOptions
    profile: str | PathLike[str] | None = None
    tf32: bool | None = None
    passes: Mapping[str, type[Pass]] | None = None  # of the user's own modules, by name
    plan: Parallel | None = None
    sampled: dict[tuple[str, ...], Sampled] = field(default_factory=dict[tuple[str, ...], Sampled])
    variants: dict[tuple[int, str], list[Variant]] = field(
        default_factory=dict[tuple[int, str], list[Variant]]
    )

    def __repr__(self) -> str:
        model = self.model if isinstance(self.model, str) else type(self.model).__name__
        stack = "its own stack" if self.profile is None else fspath(self.profile)
        return f"<ModelProgram of {model} under {stack}>"

    def times(self, points: Mapping[str, ArrayLike], target: str) -> PointTimes:
        """Seconds, their intervals and bytes at many points, as `analyze` has them at each.

        `points` gives a number or an array of numbers for each size, by the names that `dims` has,
        or `past`; they broadcast against one another, and the results have an element a point, in
        order (raveled). `why` says of a point why there are none; where the model takes no point at
        all, its error is raised. `target` is a name or a path, or either with numbers changed; of a
        program with a plan, that of a cluster, and the numbers are those of a step of all ranks.
        """
        if self.plan is not None:
            return self._steps(points, target, self.plan)
        device = load_target(target)
        columns = _columns(points)
        own, which = distinct(columns, tuple(columns))
        made = list(self.kernels_at(own, device))
        errors = [x for x, _ in made if isinstance(x, GpuirError)]
        if errors and len(errors) == len(made):
            raise errors[0]
        asked = [x for _, x in made]
        return times(asked, len(next(iter(own.values()))), device).take(which)

    def at(self, point: Mapping[str, int], target: str) -> Answer:
        """What `analyze` answers at one point; of a program with a plan, `simulate_ranks`."""
        columns = _columns(point)
        if any(len(n) != 1 for n in columns.values()):
            raise UsageError("this is more than one point", fix="program.times(points, target)")
        if self.plan is not None:
            ((found, _),) = self._graphs(columns)
            return self._step(found, columns, 0, target, self.plan)
        device = load_target(target)
        ((kernels, x),) = self.kernels_at(columns, device)
        there = {name: int(n[0]) for name, n in columns.items()}
        if x.program.refused or isinstance(kernels, GpuirError):  # it is said as of any other graph
            loaded = self.load(there)
            return answer(costed(loaded, target, profile=self.profile, tf32=self.tf32))
        return answer(costed(each_size(kernels, lambda x: value(x, there)), target))

    def load(self, point: Mapping[str, int]) -> Graph:
        how: dict[str, Any] = {**self.options}
        dims = {**how.get("dims", {}), **point}
        if how.get("phase") and "past" in dims:
            how["past"] = dims.pop("past")
        return load(
            self.model,
            **cast(Any, {**how, "dims": dims}),
            warn=lambda _: None,
            profile=self.profile,
            tf32=self.tf32,
        )

    def kernels_at(
        self, points: Columns, device: Target
    ) -> Iterator[tuple[Graph | GpuirError, ProgramPoints]]:
        """Kernels that together are right at all points, or why there are none, with their program
        at the points that they are for."""
        for variant, some in self._variants(points, device):
            there = {name: n[some] for name, n in points.items()}
            yield variant.error or variant.kernels, ProgramPoints(variant.program, there, some)

    def reach(self, points: Columns) -> bool:
        """Loads what it takes to know all that is between points; whether that can be known."""
        for _ in self._graphs(points):
            pass
        return self.reaches(points)

    def reaches(self, points: Columns) -> bool:
        """Whether what is between points is known."""
        return any(one.covers(points).all() for one in self._sampled(points).known)

    def _sampled(self, points: Columns) -> Sampled:
        return self.sampled.setdefault(tuple(sorted(points)), Sampled(self.load))

    def _variants(
        self, points: Columns, device: Target
    ) -> Iterator[tuple[Variant, NDArray[np.int64]]]:
        """Variants that together are right at all points, and the places of those each is for."""
        for found, places in self._graphs(points):
            if isinstance(found, SymbolicGraph):
                yield from self._of(found, points, places, device)
            else:
                empty = Program("", "", refused=reason(found))
                yield Variant(NOTHING, empty, Conditions(), found), places

    def _graphs(self, points: Columns) -> Iterator[FoundGraph]:
        return self._sampled(points).graphs(points)

    def _steps(self, points: Mapping[str, Any], cluster: str, plan: Parallel) -> PointTimes:
        """Steps of all ranks, one by one."""
        errors: list[GpuirError] = []
        columns = _columns(points)
        own, which = distinct(columns, tuple(columns))
        found = PointTimes.room(len(next(iter(own.values()))))
        reserved = np.zeros(len(found.why), np.int64)
        for graph, places in self._graphs(own):
            for i in places.tolist():
                try:
                    x = self._step(graph, own, i, cluster, plan)
                except GpuirError as error:
                    errors.append(error)
                    found.why[i] = reason(error)
                    continue
                found.latency_s[i] = x.latency_s
                found.low_s[i], found.high_s[i] = x.interval or (np.nan, np.nan)
                found.peak_bytes[i] = reserved[i] = x.reserved_bytes
                found.available_bytes[i] = x.available_bytes or 0
        if errors and len(errors) == len(found.why):
            raise errors[0]
        memory = (ReservedBytes(np.arange(len(reserved)), reserved),)
        return replace(found, memory=memory).take(which)

    def _step(
        self,
        graph: SymbolicGraph | GpuirError,
        points: Columns,
        i: int,
        cluster: str,
        plan: Parallel,
    ) -> Answer:
        if isinstance(graph, GpuirError):
            raise graph
        from gpuir.passes.microbatch import Microbatch
        from gpuir.run.ranks import simulate_ranks

        there = graph.at({name: int(n[i]) for name, n in points.items()})
        there = Microbatch(plan.microbatches).run(there)
        return simulate_ranks(there, cluster, plan, profile=self.profile, tf32=self.tf32)

    def _of(
        self,
        symbolic: SymbolicGraph,
        points: Columns,
        left: NDArray[np.int64],
        device: Target,
    ) -> Iterator[tuple[Variant, NDArray[np.int64]]]:
        graph = run_under(symbolic.graph, self.profile, self.tf32)
        steps = lowering(graph, device, self.passes)
        key = id(symbolic.graph), str(steps) + " on a CPU" * device.is_cpu
        known = self.variants.setdefault(key, [])
        for i in count():
            if not len(left):
                return
            new = i == len(known)
            if new:
                point = {name: int(n[left[0]]) for name, n in points.items()}
                known.append(self._made(graph, point, device))
            own = known[i].conditions.hold({n: x[left] for n, x in points.items()})
            assert own[0] or not new, "conditions hold where they were recorded"
            if own.any():
                yield known[i], left[own]
                left = left[~own]

    def _made(self, graph: Graph, point: Mapping[str, int], device: Target) -> Variant:
        """The variant at a point. What cannot be said of it is said as of any graph."""
        with recorded() as recording:
            there = each_size(graph, lambda x: moved(x, point))
            try:
                kernels = self._lowered(there, device)
                program = program_of(kernels, device.is_cpu)
            except Exception as error:  # what code does not do with sizes, it does with numbers
                LOG.debug("%s at %s alone: %r", graph.name, point, error)
                kernels = program = None
        conditions = recording.conditions()
        if kernels is None or program is None or not conditions.hold_at(point):  # as of rounding
            plain = each_size(graph, lambda x: value(x, point))
            return self._refused(plain, device, Conditions.only(point))
        return Variant(kernels, program, conditions)

    def _refused(self, graph: Graph, device: Target, only: Conditions) -> Variant:
        try:
            kernels = self._lowered(graph, device)
            return Variant(kernels, program_of(kernels, device.is_cpu), only)
        except GpuirError as error:
            empty = Program(graph.name, graph.profile or "", refused=reason(error))
            return Variant(graph, empty, only, error)

    def _lowered(self, graph: Graph, device: Target) -> Graph:
        if graph.level >= Level.kernel:
            return graph
        return lowering(graph, device, self.passes).run(graph)


@dataclass(repr=False)
class ReadProgram(ModelProgram):
    """Of a model that `read` gives at a point, and not `gpuir.load` alone."""

    read: Callable[[Mapping[str, int]], Graph] = field(kw_only=True)

    def load(self, point: Mapping[str, int]) -> Graph:
        return self.read(point)


@takes(
    profile=PATH,
    tf32=FLAG,
    plan=of_type(Parallel, "degrees of parallelism", "gpuir.Parallel(dp=4, tp=2)"),
)
def program(
    model: Source,
    *,
    profile: str | PathLike[str] | None = None,
    tf32: bool | None = None,
    plan: Parallel | None = None,
    **options: Unpack[LoadOptions],
) -> ModelProgram:
    """A model as a function of its sizes, to be asked for many points: `times`, `at`.

    `profile` and `tf32` are as in `analyze`, options as in `load`; `dims` are the sizes that stay
    as they are. Nothing is loaded before the first points are asked for. With a `plan` it is a step
    over the ranks of a cluster, of which the batch is that of all its microbatches; those are
    loaded as few times, and simulated point by point.
    """
    source = fspath(model) if isinstance(model, str | PathLike) else model
    return ModelProgram(source, options, profile, tf32, plan=plan)


def _columns(points: Mapping[str, Any]) -> Columns:
    """Sizes as columns of one length; UsageError where they are none."""
    if not points:
        raise UsageError(
            "no sizes are given", expected='sizes by name: {"batch": [1, 8], "seq": 128}'
        )
    rows: list[NDArray[np.int64]] = []
    for name, n in points.items():
        column = np.asarray(n)
        if column.size and (column.dtype.kind not in "iu" or column.min() < 0):
            raise UsageError(
                f"{name} is not a size", expected="whole numbers of 0 or more", found=repr(n)
            )
        rows.append(column.astype(np.int64))
    try:
        every = np.broadcast_arrays(*rows)
    except ValueError as error:
        raise UsageError("sizes do not broadcast together", found=str(error)) from None
    return {name: row.reshape(-1) for name, row in zip(points, every, strict=True)}
