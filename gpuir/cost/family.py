"""What a family of kernels is to the tile model.

One function, `Family.seconds`, is the model of a family. It runs on numpy arrays to predict, on
torch tensors to be fitted, and on numbers that remember their formula to be explained: it computes
with operators and with the functions of `Sheet.xp` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import Work
from gpuir.targets.target import Target


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
