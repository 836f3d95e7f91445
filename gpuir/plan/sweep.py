"""A model at many sizes, on many GPUs, under several software stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, product

import numpy as np

from gpuir.cost.table import PREDICTORS, Predictor
from gpuir.ir.errors import GpuirError, ModelError
from gpuir.ir.graph import Graph
from gpuir.ir.notes import Schedule
from gpuir.ir.sizes import Columns
from gpuir.ops import kernel as k
from gpuir.passes.annotate import cost_graph, costing
from gpuir.passes.tile import tile_graph
from gpuir.plan.space.points import ProgramPoints, answers, at
from gpuir.report.answer import Answer, Device, Dims, answer_of, check_runs
from gpuir.report.order import slower_share
from gpuir.simulate.fitting import ToFit
from gpuir.simulate.memory import memory
from gpuir.targets.prices import Price, prices_together
from gpuir.targets.profile import profile_of
from gpuir.targets.support import elsewhere, reason, refusal
from gpuir.targets.target import Target

# Kernels at sizes under a profile on a target, or why there are none, and for which of the sizes.
Programs = Callable[
    [Columns, str | None, Target], Iterable[tuple[Graph | GpuirError, ProgramPoints]]
]
LEAST_DROP = 0.01  # of the throughput, from one size to the next: less is no cliff to speak of


@dataclass(frozen=True)
class SizeSeries:
    """Answers that differ in one size alone, from the least to the largest."""

    target: str
    profile: str
    dim: str
    others: Dims
    points: tuple[Answer, ...]

    def size(self, point: Answer) -> int:
        return dict(point.dims)[self.dim]

    @cached_property
    def counts_sizes(self) -> bool:
        """Whether a run's work is its items times its size, as of a length: what is swept is not
        the batch."""
        return len(self.points) > 1 and len({p.items for p in self.points}) == 1

    def rate(self, point: Answer) -> float:
        """Work a second: items, or cells of all items along the size."""
        return point.items_per_s * (self.size(point) if self.counts_sizes else 1)

    @cached_property
    def best(self) -> Answer | None:
        """The most work a second, of those that fit; of equals the least size."""
        return max((p for p in self.points if p.fits), key=self.rate, default=None)

    @cached_property
    def unfit(self) -> Answer | None:
        """The least size that does not fit."""
        return next((p for p in self.points if not p.fits), None)

    @cached_property
    def busy(self) -> Answer | None:
        """The least size from which on the device no longer waits for the host."""
        waiting = [i for i, p in enumerate(self.points) if p.is_host_bound]
        rest = self.points[waiting[-1] + 1 :] if waiting else self.points
        return rest[0] if rest else None

    @cached_property
    def cliffs(self) -> tuple[tuple[Answer, Answer], ...]:
        """Neighbours of which the larger does less work a second: a wave more, for few blocks."""
        return tuple((a, b) for a, b in pairwise(self.points) if self.lost(a, b) > LEAST_DROP)

    def lost(self, a: Answer, b: Answer) -> float:
        """The part of a's work a second that b does not do."""
        return 1 - self.rate(b) / self.rate(a)


@dataclass(frozen=True)
class SweepAnswers:
    """All runs of one model. `refused` are the sizes that it does not take, and what it says;
    `unsupported` targets and profiles that do not go together, or not with the model, and why;
    `elsewhere` what is said of targets that a profile is not made for. `to_fit` has what makes the
    `nearest` run fit, where none does."""

    model: str
    axes: tuple[tuple[str, tuple[int, ...]], ...]
    points: tuple[Answer, ...]
    refused: tuple[tuple[Dims, str], ...] = ()
    prices: tuple[tuple[str, Price], ...] = ()
    unsupported: tuple[tuple[str, str, str], ...] = ()
    elsewhere: tuple[tuple[str, str], ...] = ()
    to_fit: tuple[ToFit, ...] = ()

    @property
    def nearest(self) -> Answer | None:
        """Where nothing fits, the run that lacks the least memory."""
        if any(p.fits for p in self.points):
            return None
        return min(self.points, key=lambda p: -(p.spare_bytes or 0), default=None)

    @cached_property
    def series(self) -> tuple[SizeSeries, ...]:
        """The points along the first of the sizes, a series for each target, profile and choice of
        the others."""
        dim = self.axes[0][0]
        groups: dict[tuple[str, str, Dims], list[Answer]] = {}
        for p in self.points:
            others = tuple((name, n) for name, n in p.dims if name != dim)
            groups.setdefault((p.target, p.profile, others), []).append(p)
        return tuple(
            SizeSeries(*key[:2], dim, key[2], tuple(sorted(group, key=lambda p: dict(p.dims)[dim])))
            for key, group in groups.items()
        )

    @cached_property
    def fastest(self) -> Answer | None:
        """The most items a second of all."""
        best = [s.best for s in self.series if s.best]
        return max(best, key=lambda p: p.items_per_s, default=None)

    def slower(self, series: SizeSeries) -> float | None:
        """In what share of cases the best size of a series is slower than the fastest of all; None
        of that one, and of a series without a best size or an interval."""
        if series.best is None or self.fastest is None or series.best is self.fastest:
            return None
        return slower_share(series.best, self.fastest)

    @cached_property
    def apart(self) -> tuple[tuple[str, Price], ...]:
        """Targets whose price is of another kind than that of most, so that it is not compared."""
        kinds = Counter(price.kind for _, price in self.prices if price.kind)
        most = max(kinds, key=kinds.__getitem__, default="")
        return tuple((name, price) for name, price in self.prices if price.kind not in ("", most))

    @cached_property
    def cheapest(self) -> Answer | None:
        """The least money an item of all whose prices are of one kind."""
        apart = dict(self.apart)
        best = [s.best for s in self.series if s.best and s.target not in apart]
        priced = [p for p in best if p.usd_per_million is not None]
        return min(priced, key=lambda p: p.usd_per_million or 0.0, default=None)


def sweep(
    programs: Programs,
    axes: Mapping[str, Sequence[int]],
    targets: Sequence[Target],
    profiles: Sequence[str | None] = (None,),
    *,
    items: Callable[[Mapping[str, int]], int] = lambda dims: 1,
    own: Mapping[str, Price] | None = None,
    predictor: str | Predictor = "tile",
    files: Mapping[str, str] | None = None,
    done: Callable[[], None] = lambda: None,
) -> SweepAnswers:
    """Every choice of sizes along `axes`, on every target, under every profile.

    `programs` gives the kernels of the model at many sizes under a profile on a target; a
    ModelError in their place makes the sizes refused, and is raised when the model refuses all. A
    target that a profile does not run the model on has no point. `items` says how many a run does
    at once. `own` are prices by the name of the target, in place of those listed. `files` has the
    names that targets are loaded by, where those are not their own. `done` is called after each
    profile on each target.
    """
    prices = prices_together(targets, own)
    choices = [tuple(zip(axes, values, strict=True)) for values in product(*axes.values())]
    columns = {name: np.array([dict(dims)[name] for dims in choices]) for name in axes}
    pairs = [*product(profiles, range(len(targets)))]
    made = {pair: [*programs(columns, pair[0], targets[pair[1]])] for pair in pairs}
    errors: dict[int, GpuirError] = {}
    for error, x in chain(*made.values()):
        if isinstance(error, GpuirError):
            if not isinstance(error, ModelError):
                raise error
            errors = {int(i): error for i in x.places} | errors
    taken = np.array([i not in errors for i in range(len(choices))])
    unsupported: dict[tuple[str, str], GpuirError] = {}
    strange: dict[tuple[str, str], None] = {}
    points: dict[tuple[str | None, int], dict[int, Answer]] = {}
    model = ""
    for pair, found in made.items():
        target, able = targets[pair[1]], list[tuple[Graph, ProgramPoints]]()
        for g, x in found:
            if isinstance(g, GpuirError) or not taken[x.places].any():
                continue
            model = g.name
            if (error := refusal(g, target)) is not None:
                unsupported[target.name, profile_of(g).name] = error
            else:
                able.append((g, x.taking(taken[x.places])))
                strange.update(((target.name, text), None) for text in elsewhere(g, target))
        points[pair] = _answers(able, target, predictor, files or {})
        done()
    every: list[list[Answer]] = [[] for _ in targets]
    for i, dims in enumerate(choices):
        for pair in pairs:
            if (a := points[pair].get(i)) is not None:
                price = p.usd_per_hour if (p := prices[pair[1]]) else None
                a = replace(a, dims=dims, batch=items(dict(dims)), usd_per_hour=price)
                every[pair[1]].append(check_runs(a))
    for error in (*(errors[i] for i in sorted(errors)), *unsupported.values()):
        if not any(every):
            raise error
    return SweepAnswers(
        model=model,
        axes=tuple((name, tuple(values)) for name, values in axes.items()),
        points=tuple(chain(*every)),
        refused=tuple((choices[i], errors[i].what) for i in sorted(errors)),
        prices=tuple((x.name, price) for x, price in zip(targets, prices, strict=True) if price),
        unsupported=tuple((*pair, reason(error)) for pair, error in unsupported.items()),
        elsewhere=tuple(strange),
    )


def _answers(
    able: Sequence[tuple[Graph, ProgramPoints]],
    target: Target,
    predictor: str | Predictor,
    files: Mapping[str, str],
) -> dict[int, Answer]:
    """What kernels come to at their points, by place: costed together where the tile predictor
    costs them."""
    if predictor in ("tile", PREDICTORS["tile"]):
        return answers([x for _, x in able], target)
    return {
        int(place): _analyzed(at(g, x.points, i), target, files, predictor)
        for g, x in able
        for i, place in enumerate(x.places)
    }


def _analyzed(
    g: Graph, target: Target, files: Mapping[str, str], predictor: str | Predictor
) -> Answer:
    """What the passes tile and annotate make of kernels on a target, which may be a file's."""
    name = files.get(target.name, target.name)
    costs = costing(predictor, target, k.HeldWeights.of(g))
    costed = cost_graph(tile_graph(g, Schedule(g.name, name, ()), target), costs)
    held = memory(costed, target)
    return answer_of(costed, Device(target.name, ""), held=held).numbers
