"""What every frontend gives: a graph, its weights' numbers, and what was odd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from gpuir.ir.graph import Graph


@dataclass(frozen=True)
class Model:
    """A loaded model: its graph, the numbers of its params (computed when asked for), what was odd
    about it, and the outputs by what the model itself calls them (`logits` of a dictionary)."""

    graph: Graph
    weights: Mapping[str, np.ndarray]
    warnings: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict[str, str])


class Weights(Mapping[str, np.ndarray]):
    """The numbers of params by name, read or computed each time one is asked for."""

    def __init__(self, compute: Mapping[str, Callable[[], np.ndarray]]):
        self._compute = compute

    def __getitem__(self, name: str) -> np.ndarray:
        return self._compute[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._compute)

    def __len__(self) -> int:
        return len(self._compute)
