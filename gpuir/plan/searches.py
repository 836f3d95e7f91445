"""What a search along one dimension of a model comes to, on one device."""

from __future__ import annotations

from dataclasses import dataclass

from gpuir.plan.crossover import Crossover
from gpuir.report.answer import Answer, Device
from gpuir.simulate.largest import Largest


@dataclass(frozen=True)
class LargestFit:
    """The search for the largest value of a dimension of one model on one device. `refusal` is what
    the model says to a value that it does not take."""

    model: str
    device: Device
    dim: str
    least: int
    most: int
    search: Largest
    refusal: str = ""


@dataclass(frozen=True)
class Crossing:
    """The search along a dimension: what the `run` of a model is on one device under one profile
    at the least value, and up to which `most` was tried."""

    run: Answer
    dim: str
    most: int
    search: Crossover
