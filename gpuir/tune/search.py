"""Searches: from a kernel, the tiles that it may have and a budget to a ranking.

A search asks `predict` about tiles, at most `tries` of them, and ranks what it asked about. As many
as `MANY` are predicted in less than a second, all at once; of more, a search asks about a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np

from gpuir.cost.candidates import of_any
from gpuir.cost.generated.legal import is_legal
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.ir.door import CALLED, FLAG, TEXT, takes, whole
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.notes import Tile
from gpuir.targets.target import Target
from gpuir.tune.kernels import KERNEL, TARGET, Kernel
from gpuir.tune.space import (
    Predict,
    Predictions,
    Ranked,
    candidates,
    device_of,
    predict,
    size,
)

Places = np.ndarray[Any, np.dtype[np.intp]]

MANY = 200_000  # tiles: they take less than a second
KEPT = 64  # of the fastest tiles a ranking has so many
WIDTH = 16  # of the beam
SEED = 0  # the same search gives the same ranking
GROUPS, UNROLLS = (1, 4, 8, 16), (1, 2, 4)  # values that Triton's and CUTLASS's own tuners try


@dataclass(frozen=True)
class Ranking:
    """What a search found: the fastest of the tiles that it asked about, the fastest first. `by` is
    the search; it asked about `tried` of `legal` tiles, which the target can run, of `count`."""

    best: tuple[Ranked, ...]
    by: str
    tried: int
    legal: int
    count: int

    def __repr__(self) -> str:
        best = (f", the fastest {x.time_s:.4g} s, {x.tile}" for x in self.best[:1])
        return f"<Ranking by {self.by}: {self.tried:,} of {self.legal:,} tiles{''.join(best)}>"


Search = Callable[[Kernel, Tiles, int, Predict], tuple[Places, Predictions]]


@takes(kernel=KERNEL, target=TARGET, by=TEXT, tries=whole(1), wide=FLAG, predict=CALLED)
def search(
    kernel: Kernel,
    target: str | Target = "",
    *,
    by: str = "auto",
    tries: int | None = None,
    wide: bool = False,
    predict: Predict = predict,
) -> Ranking:
    """The fastest tiles of a kernel on a target, by one of `SEARCHES`; `auto` asks about all where
    they are few, else it is a beam. `wide` tries more tiles than `gpuir.candidates` has: every
    combination of their numbers, with `group` and `unroll`.

    `predict` says how long tiles take: `gpuir.predict`, or that of an `Observed` model.
    """
    device = device_of(kernel, target)
    kernel = replace(kernel, target=device)
    space, count = wider(kernel, device) if wide else usual(kernel, device)
    fitting = size(kernel.work, space) if count else 0
    name = choose(by, fitting)
    if not fitting:
        return Ranking((), name, 0, 0, count)
    find, usually = SEARCHES[name]
    places, found = find(kernel, space, min(usually if tries is None else tries, fitting), predict)
    best = [
        Ranked(
            plain(kernel.work, space.note(int(places[i]))),
            float(found.time_s[i]),
            (float(found.low_s[i]), float(found.high_s[i])),
        )
        for i in found.order[:KEPT].tolist()
        if np.isfinite(found.time_s[i])
    ]
    return Ranking(tuple(best), name, len(places), fitting, count)


def choose(by: str, count: int) -> str:
    """The name of a search for so many tiles."""
    check_search(by)
    if by == "auto":
        return "exhaustive" if count <= MANY else "beam"
    return by


def check_search(by: str) -> None:
    """UsageError where there is no search of that name, or where its package is missing."""
    if by not in ("auto", *SEARCHES):
        raise UsageError(f"no search {by!r}", fix=nearest(by, ["auto", *SEARCHES]))
    if by == "optuna" and find_spec("optuna") is None:
        raise UsageError(
            "the search 'optuna' needs the package optuna",
            fix="pip install 'gpuir[tune]', or another search: exhaustive, beam",
        )


def plain(work: Work, tile: Tile) -> Tile:
    """The tile as a library's own is written: in the order of the loops, without batches and heads
    of which there is one."""
    extents = work.extents
    kept = [d for d in extents if d in dict(tile.dims) and (extents[d] > 1 or d not in "bh")]
    return replace(tile, dims=tuple((d, tile[d]) for d in kept))


# ---------------------------------------------------------------------------- what there is


def usual(kernel: Kernel, target: Target) -> tuple[Tiles, int]:
    """The legal ones of the candidates, and how many candidates there are."""
    return candidates(kernel, target), size(kernel.work, of_any(kernel.work, target))


def wider(kernel: Kernel, target: Target) -> tuple[Tiles, int]:
    """The legal ones of all combinations of the candidates' numbers, with `group` and `unroll`; and
    how many combinations there are."""
    known = of_any(kernel.work, target)
    values = [_values(n) for n in columns(known)]
    if kernel.work.is_contraction:
        i = len(known.dims) + 3
        values[i : i + 2] = [np.array(more, float) for more in (GROUPS, UNROLLS)]
    table = [axis.reshape(-1) for axis in np.meshgrid(*values, indexing="ij")]
    count = len(table[0])
    rest = iter(table)
    tiles = known.each(lambda _: next(rest))
    return tiles.take(np.flatnonzero(is_legal(kernel.work, tiles, target, count).ok)), count


def _values(numbers: Any) -> Any:
    """Each value once, in the order of the candidates: they have the usual ones first."""
    values, first = np.unique(np.asarray(numbers, float), return_index=True)
    return values[np.argsort(first)]


def columns(tiles: Tiles) -> list[Number]:
    """The numbers that tell tiles apart, in the order that `Tiles.each` goes through them: those of
    `dims`, stages, warps, split, group, unroll, the rest."""
    found: list[Number] = []

    def note(n: Number) -> Number:
        found.append(n)
        return n

    tiles.each(note)
    return found


@dataclass(frozen=True)
class TileGrid:
    """Tiles as places on axes: of each axis its values in order, and where on it each tile is. What
    is the same for all tiles is no axis."""

    sizes: tuple[int, ...]
    at: Places  # [tile, axis]
    codes: Places  # one number a tile, in order
    order: Places  # which tile has it

    @staticmethod
    def of(tiles: Tiles, count: int) -> TileGrid:
        sizes: list[int] = []
        at: list[Any] = []
        for numbers in columns(tiles):
            values, places = np.unique(np.asarray(numbers, float), return_inverse=True)
            if len(values) > 1:
                sizes.append(len(values))
                at.append(places)
        table = np.stack(at, axis=-1) if at else np.zeros((count, 0), np.intp)
        codes = _code(table, tuple(sizes))
        order = np.argsort(codes, kind="stable")
        return TileGrid(tuple(sizes), table, codes[order], order)

    def find(self, at: Places) -> Places:
        """Which tiles are at these places; -1 where none is."""
        inside = np.all((at >= 0) & (at < np.array(self.sizes, int)), axis=-1)
        codes = _code(np.where(inside[:, None], at, 0), self.sizes)
        found = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        known = inside & (self.codes[found] == codes)
        return np.where(known, self.order[found], -1)

    def around(self, which: Places) -> Places:
        """The tiles one step away from these: along one axis, or up one and down another."""
        one = np.eye(len(self.sizes), dtype=int)
        steps = [s * a for a in one for s in (1, -1)]
        steps += [a - b for a, b in product(one, one) if not np.array_equal(a, b)]
        if not steps:
            return np.zeros(0, np.intp)
        near = self.at[which][:, None, :] + np.array(steps)[None, :, :]
        found = np.unique(self.find(near.reshape(-1, len(self.sizes))))
        return found[found >= 0]


def _code(at: Any, sizes: tuple[int, ...]) -> Places:
    code = np.zeros(len(at), np.intp)
    for i, n in enumerate(sizes):
        code = code * n + at[:, i]
    return code


# ---------------------------------------------------------------------------- searches


def exhaustive(
    kernel: Kernel, tiles: Tiles, tries: int, predict: Predict
) -> tuple[Places, Predictions]:
    """Every tile, or the first `tries` of them."""
    places = np.arange(min(size(kernel.work, tiles), tries))
    return places, _asked(kernel, tiles, places, predict)


def beam(kernel: Kernel, tiles: Tiles, tries: int, predict: Predict) -> tuple[Places, Predictions]:
    """From tiles all over the space to their neighbours, of which the fastest `WIDTH` go on; when
    no neighbour is new, from others again, until `tries` were asked about."""
    count = size(kernel.work, tiles)
    grid, random = TileGrid.of(tiles, count), np.random.default_rng(SEED)
    time_s = np.full(count, np.inf)
    asked = np.zeros(count, bool)
    front = np.unique(np.linspace(0, count - 1, min(4 * WIDTH, count, tries)).astype(np.intp))
    while len(front) and asked.sum() < tries:
        front = front[: tries - int(asked.sum())]
        time_s[front] = _asked(kernel, tiles, front, predict).time_s
        asked[front] = True
        near = grid.around(np.argsort(time_s, kind="stable")[:WIDTH])
        front = near[~asked[near]]
        if not len(front):
            others = np.flatnonzero(~asked)
            front = random.choice(others, min(WIDTH, len(others)), replace=False)
    places = np.flatnonzero(asked)
    return places, _asked(kernel, tiles, places, predict)


def optuna(
    kernel: Kernel, tiles: Tiles, tries: int, predict: Predict
) -> tuple[Places, Predictions]:
    """Optuna's tree of Parzen estimators over the axes of the tiles. It begins with tiles all over
    the space; where it asks for a combination that is no candidate, or for one again, it gets the
    nearest that is new."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    count = size(kernel.work, tiles)
    grid = TileGrid.of(tiles, count)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED))
    for i in np.unique(np.linspace(0, count - 1, min(WIDTH, count, tries)).astype(int)):
        study.enqueue_trial({str(axis): int(n) for axis, n in enumerate(grid.at[i])})
    asked: list[int] = []
    left = np.ones(count, bool)
    while len(asked) < min(tries, count):
        trial = study.ask()
        at = [trial.suggest_int(str(axis), 0, n - 1) for axis, n in enumerate(grid.sizes)]
        apart = np.abs(grid.at - np.array(at, int)).sum(axis=-1)
        place = int(np.argmin(np.where(left, apart, np.inf)))
        left[place] = False
        asked.append(place)
        found = _asked(kernel, tiles, np.array([place]), predict)
        study.tell(trial, float(np.log(found.time_s[0])))
    places = np.array(sorted(asked), np.intp)
    return places, _asked(kernel, tiles, places, predict)


def _asked(kernel: Kernel, tiles: Tiles, places: Places, predict: Predict) -> Predictions:
    """What some of the tiles are predicted to take."""
    count = size(kernel.work, tiles)
    some = tiles.each(lambda n: np.broadcast_to(np.asarray(n, float), (count,))[places])
    return predict(kernel, some, "")


# By name: the search, and how many tiles it asks about unless it is told.
SEARCHES: Mapping[str, tuple[Search, int]] = {
    "exhaustive": (exhaustive, 4_000_000),
    "beam": (beam, 4000),
    "optuna": (optuna, 300),
}
