"""The sheet that formulas are written on, and the numbers and factors in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
        self, family: str, known: Iterable[Factor], target: Target, values: Mapping[str, Number]
    ) -> Mapping[str, Number]:
        """The factors that a family's formulas get, of all `known`, given their values on the
        target."""
        return values


class Unwritten(Sheet):
    """A sheet that keeps nothing, so that the numbers on their way need no room."""

    def put(
        self, name: str, value: Number, unit: str = "", source: str = "", *, terse: bool = False
    ) -> Number:
        return value


@dataclass(frozen=True)
class Factor:
    """A named number of a family's formulas, the same on all devices until it is calibrated.

    `value` is where fitting starts, `low` and `high` are its bounds, `spread` the standard
    deviation of its logarithm from one device to the next: how far calibration may expect it to
    move. One of spread 0 is never calibrated. `what` says what it is, in which unit, `source` where
    the value comes from.
    """

    name: str
    value: float
    low: float
    high: float
    spread: float
    what: str
    source: str

    @property
    def text(self) -> str:
        return f"{self.what}; {self.source}"
