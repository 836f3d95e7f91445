"""Cases of whole models: what was measured, and what is predicted of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuir.targets.target import Target

PROFILES = {"none": "eager", "fusion": "compiled@2.1"}


@dataclass(frozen=True)
class Program:
    """What is exported once and run on any device: a config's model, a mode, sizes, and whether it
    adds a mask to the scores of attention."""

    model: str
    mode: str
    seq: int
    batch: int
    masked: bool = False

    def __str__(self) -> str:
        return f"{self.model} {self.mode} {self.batch}x{self.seq}"


@dataclass(frozen=True)
class Times:
    """Seconds of a call: in all, forward, and of backward, which inference has none of."""

    total_s: float
    forward_s: float
    backward_s: float = math.nan

    def error(self, measured: Times, part: str = "total_s") -> float:
        """Percent of the measurement by which this is more."""
        return 100 * (getattr(self, part) / getattr(measured, part) - 1)


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a case: its times, between what 80 % of measurements lie, the part of
    the time that the device waits for the host, how many kernels were launched, and their seconds
    by kind of operator, forward and backward."""

    times: Times
    interval: tuple[float, float] | None = None
    waiting: float = 0.0
    launches: int = 0
    kinds: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])


@dataclass(frozen=True)
class Case:
    """A line of the labels. `published` is what others predicted of it; `suspect` says why the
    measurement itself is suspect."""

    program: Program
    device: str
    option: str
    target: Target
    measured: Times
    published: Mapping[str, Times] = field(default_factory=dict[str, Times])
    ratios: Mapping[str, float] = field(default_factory=dict[str, float])
    suspect: str = ""
    layers: int = 0  # of the measured model; 0 where the table does not say

    @property
    def profile(self) -> str:
        return PROFILES[self.option]


@dataclass(frozen=True)
class Labels:
    """The cases of a file, and how many of its lines were left out, by reason."""

    file: str
    cases: tuple[Case, ...]
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Result:
    """A case and what is predicted of it; `unseen` by weights that were trained without its GPU."""

    case: Case
    predicted: Predicted
    unseen: Predicted | None = None
