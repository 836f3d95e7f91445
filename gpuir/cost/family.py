"""What a family of kernels is to the tile model.

One function, `Family.seconds`, is the model of a family. It runs on numpy arrays to predict, on
torch tensors to be fitted, and on numbers that remember their formula to be explained: it computes
with operators and with the functions of `Sheet.xp` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import Work
from gpuir.targets.target import Target

Places = np.ndarray[tuple[int], np.dtype[np.intp]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class FormulaInputs(NamedTuple):
    """What the formulas of a family go by, as `Family.seconds` is given it: kernels under tiles on
    a target, the values of the factors, and the sheet that all is written on."""

    s: Sheet
    work: Work
    tiles: Tiles
    target: Target
    p: Mapping[str, Number]


@dataclass(frozen=True)
class Terms:
    """Seconds of kernels: the time is the larger of `compute` and `memory`, plus `latency`.

    `latency` is waiting that nothing hides; the launch is not in it. `roof` is what no correction
    may beat: arithmetic at the listed peak, or 0 where an algorithm does with fewer operations.
    """

    compute: Number
    memory: Number
    latency: Number
    roof: Number = 0.0


@dataclass(frozen=True)
class Family:
    """Kernels that one set of formulas describes.

    `choose` gives the tile that a library takes, `tiles` those worth considering where a target
    cannot hold that one. `features` name quantities on the sheet that a small network sees, which
    multiplies the time by at most exp(±`bound`): counts and shapes, never rates, so that a target
    with every rate raised is never slower and nothing tells one device from another. What it
    learns on some GPUs `carries` over to others, or it serves those alone.
    """

    name: str
    factors: tuple[Factor, ...]
    tiles: Callable[[Work, Target], Tiles]
    seconds: Callable[[Sheet, Work, Tiles, Target, Mapping[str, Number]], Terms]
    choose: Callable[[Work, Target, Mapping[str, Number]], Tiles]
    features: tuple[str, ...] = ()
    bound: float = 0.0
    carries: bool = False

    def __hash__(self) -> int:
        return hash(self.name)


def fastest(
    seconds: Callable[[Sheet, Work, Tiles, Target, Mapping[str, Number]], Terms],
    work: Work,
    tiles: Tiles,
    target: Target,
    p: Mapping[str, Number],
) -> Tiles:
    """Of `tiles` the one of least time, for each of many kernels, by a family's formulas."""
    column = work.each(lambda n: np.asarray(n, float)[..., None])
    terms = seconds(Sheet(), column, tiles, target, p)
    best = np.argmin(np.maximum(terms.compute, terms.memory) + terms.latency, axis=-1)
    return tiles.take(best)


def among(work: Work, table: Callable[[Work], Tiles]) -> Iterator[tuple[Places, Tiles]]:
    """Of many kernels the places of those for which a table has the same tiles, and these tiles."""
    groups: dict[Hashable, tuple[list[int], Tiles]] = {}
    for i in range(np.size(work.points)):
        tiles = table(work.take(i))
        numbers = tuple(np.asarray(n, float).tobytes() for n in tiles.numbers)
        groups.setdefault((tiles.likeness, numbers), ([], tiles))[0].append(i)
    for places, tiles in groups.values():
        yield np.array(places), tiles
