"""The kernels of a model as tasks: each searched, measured where that is asked for, and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gpuir.cost.generated import BY
from gpuir.cost.generated.legal import why_illegal
from gpuir.ir.notes import Schedule, Tile
from gpuir.targets.target import Target
from gpuir.tune.groupings import Groupings
from gpuir.tune.kernels import Kernel
from gpuir.tune.keys import columns_in, kernel_key, target_key
from gpuir.tune.observe import Observation, Observed
from gpuir.tune.results import Results
from gpuir.tune.search import Ranking, search
from gpuir.tune.space import Ranked, device_of, ranked

Measure = Callable[["TuningTask", Ranked], "float | str"]  # seconds, or why there are none
LEAST_GAIN = 0.01  # of the library's time: less is no gain to speak of
Path = tuple[str, ...]


@dataclass(frozen=True)
class TuningTask:
    """A kernel of a model, as often as it is there: under which names, for which model nodes, and
    how often it runs. `kernel` has the tile of the library and what the library takes."""

    kernel: Kernel
    paths: tuple[Path, ...]
    labels: tuple[str, ...]
    runs: int


@dataclass(frozen=True)
class How:
    """How to search: by which search, about how many tiles, among more of them or the usual ones,
    and how many are measured."""

    by: str = "auto"
    tries: int | None = None
    wide: bool = False
    best: int = 8

    def __str__(self) -> str:
        return f"{self.by} tries={self.tries} wide={self.wide}"


@dataclass(frozen=True)
class Tuned:
    """What was found of a task. `ranking` is as measurements corrected it; `measured` has seconds
    by tile, `failures` what went wrong in measuring; `kept` says that the ranking is a store's."""

    task: TuningTask
    ranking: Ranking
    measured: tuple[tuple[Tile, float], ...] = ()
    failures: tuple[tuple[Tile, str], ...] = ()
    kept: bool = False

    @cached_property
    def best(self) -> Ranked | None:
        """The generated kernel that is the fastest: of those measured, or else as predicted, with
        its prediction. None where no tile but the library's own is legal: in a schedule that one
        stands for the library's kernel."""
        seconds = dict(self.measured)
        others = [x for x in self.ranking.best if x.tile != self.task.kernel.tile]
        known = [x for x in others if x.tile in seconds]
        return min(known or others, key=lambda x: seconds.get(x.tile, x.time_s), default=None)

    @property
    def time_s(self) -> float:
        """Seconds of the best tile, as measured or else as predicted."""
        if self.best is None:
            return float("inf")
        return dict(self.measured).get(self.best.tile, self.best.time_s)

    @property
    def is_measured(self) -> bool:
        return self.best is not None and self.best.tile in dict(self.measured)

    @property
    def is_faster(self) -> bool:
        """Whether the generated kernel is said to be faster than the library's own."""
        return self.time_s < self.task.kernel.time_s * (1 - LEAST_GAIN)

    @property
    def is_sure(self) -> bool:
        """Whether it is faster even if either is as far off as its interval says."""
        if self.best is None:
            return False
        low, _ = self.task.kernel.interval_s or (self.task.kernel.time_s, 0.0)
        return (self.time_s if self.is_measured else self.best.interval_s[1]) < low


def tune(
    task: TuningTask,
    model: Observed,
    how: How,
    *,
    store: Results | None = None,
    measure: Measure | None = None,
    said: Callable[[str], None] = lambda text: None,
) -> tuple[Tuned, Observed]:
    """The best tiles of a task, and the model that also knows what was measured on the way.

    With `measure` up to `how.best` tiles are measured, those that the store has among them: one
    after another that which is then said to be fastest, since each measurement corrects the rest.
    What fails is said and skipped.
    """
    kernel = task.kernel
    known, illegal = _measured(store, kernel) if store else ({}, {})
    for tile, why in illegal.items():
        said(
            f"{kernel.name}, {tile}: was measured before, but is not legal by "
            f"{BY} ({why}); left out"
        )
    failures: dict[Tile, str] = {}
    ranking = store.ranking(kernel, str(how)) if store and not model.seen else None
    kept = ranking is not None
    if ranking is None:
        ranking = _search(kernel, how, model)
        if store and not model.seen:
            store.keep_ranking(kernel, str(how), ranking)
    while measure and len(known) + len(failures) < how.best:
        tried = {*known, *failures, kernel.tile}
        following = next((x for x in ranking.best if x.tile not in tried), None)
        if following is None:
            break
        seconds = measure(task, following)
        if isinstance(seconds, str):
            failures[following.tile] = seconds
            said(f"{kernel.name}, {following.tile}: {seconds}; left out")
            continue
        known[following.tile] = seconds
        if store:
            store.keep_measured(kernel, ranked(kernel, following.tile), seconds)
        model = model.observe(kernel, following.tile, seconds)
        ranking = _search(kernel, how, model)
    ranking = replace(ranking, best=_with_measured(ranking, kernel, model, known))
    return Tuned(task, ranking, tuple(known.items()), tuple(failures.items()), kept), model


def _search(kernel: Kernel, how: How, model: Observed) -> Ranking:
    return search(kernel, by=how.by, tries=how.tries, wide=how.wide, predict=model.predict)


def _measured(store: Results, kernel: Kernel) -> tuple[dict[Tile, float], dict[Tile, str]]:
    """What a store has of a kernel: seconds of tiles, and why others of its tiles are not legal by
    this version of the predictor."""
    device = device_of(kernel, "")
    found = store.measured(kernel)
    illegal = {tile: why for tile in found if (why := why_illegal(kernel.work, tile, device))}
    return {tile: s for tile, s in found.items() if tile not in illegal}, illegal


def _with_measured(
    ranking: Ranking, kernel: Kernel, model: Observed, known: dict[Tile, float]
) -> tuple[Ranked, ...]:
    """The ranking with every tile that was measured in it, also one that others now go before."""
    there = {x.tile for x in ranking.best}
    more = [ranked(kernel, tile, predict=model.predict) for tile in known if tile not in there]
    return tuple(sorted((*ranking.best, *more), key=lambda x: x.time_s))


def remembered(store: Results, tasks: Sequence[TuningTask], target: Target) -> Observed:
    """The model that knows what a store has of a target: of the kernels of these tasks whoever
    predicted them, of others what this version of the predictor did."""
    model = Observed(target)
    here = {kernel_key(task.kernel.work): task.kernel for task in tasks}
    others = [
        Observation.of(kind, columns, x.predicted, x.measured_s)
        for x in store.results(target_key(target))
        if x.measured_s is not None and x.kernel not in here
        for kind, columns in [columns_in(x.kernel_text)]
    ]
    model = model.learn(*others)
    for kernel in here.values():
        for tile, seconds in _measured(store, kernel)[0].items():
            model = model.observe(kernel, tile, seconds)
    return model


@dataclass(frozen=True)
class Tuning:
    """What was found of a model on a target, under a software stack: of each kernel, the one of
    most time first, of the launches that `fusion` found best, or else of the stack's own.
    `everything` says that slower tiles than the library's own are chosen too."""

    model: str
    target: Target
    profile: str
    found: tuple[Tuned, ...]
    everything: bool = False
    store: str = ""
    fusion: Groupings | None = None
    predictor: str = BY

    @property
    def schedule(self) -> Schedule:
        """The tiles that were chosen."""
        tiles = [
            (path, x.best.tile)
            for x in self.found
            if x.best is not None and self.takes(x)
            for path in x.task.paths
        ]
        return Schedule(self.model, self.target.name, tuple(tiles))

    def takes(self, x: Tuned) -> bool:
        """Whether the generated kernel goes into the schedule, and the library's own does not."""
        return x.best is not None and (self.everything or x.is_faster)

    @property
    def library_s(self) -> float:
        """Seconds of all runs of the library's own kernels."""
        return sum(x.task.runs * x.task.kernel.time_s for x in self.found)

    @property
    def chosen_s(self) -> float:
        """Seconds of all runs of the kernels as they were chosen."""
        return sum(
            x.task.runs * (x.time_s if self.takes(x) else x.task.kernel.time_s) for x in self.found
        )
