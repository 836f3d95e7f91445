"""What a family of kernels is to the tile model, and the sheet its formulas are written on.

One function, `Family.seconds`, is the model of a family. It runs on numpy arrays to predict, on
torch tensors to be fitted, and on numbers that remember their formula to be explained: it computes
with operators and with the functions of `Sheet.xp` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gpuir.cost.nest import Tiles
    from gpuir.cost.work import Work
    from gpuir.targets.target import Target

Number = Any  # a float, or an array with one entry a kernel; a tensor or a traced number


@dataclass
class Sheet:
    """Where a formula writes down the quantities that it computes, in order, by name.

    `xp` has maximum, minimum, where, ceil, floor, sqrt, exp, log, log1p and tanh for the numbers in
    use: numpy, or what stands in for it.
    """

    xp: Any = np
    values: dict[str, Number] = field(default_factory=dict[str, Number])

    def put(
        self, name: str, value: Number, unit: str = "", source: str = "", *, terse: bool = False
    ) -> Number:
        """Writes a quantity down and gives it back. `unit` and `source` are for explanations, which
        leave the formula of a `terse` one out: its source says where it is."""
        self.values[name] = value
        return value

    def factors(
        self, family: Family, target: Target, values: Mapping[str, Number]
    ) -> Mapping[str, Number]:
        """The factors that a family's formulas get, given their values on the target."""
        return values


@dataclass(frozen=True)
class Factor:
    """A named number of a family's formulas, the same on all devices until it is calibrated.

    `value` is where fitting starts, `low` and `high` are its bounds, `spread` the standard
    deviation of its logarithm from one device to the next: how far calibration may expect it to
    move. One of spread 0 is never calibrated. `what` says what it is, in which unit, and where the
    value comes from.
    """

    name: str
    value: float
    low: float
    high: float
    spread: float
    what: str


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
