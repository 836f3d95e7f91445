"""Kernels with meta-parameters, as tuners know them: which kernel they are, which tile they make.

A template is a small mapping: from the arguments of a launch to a `Kernel`, and from values of the
meta-parameters, or arrays of them, to `Tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Number
from gpuir.ir.errors import UsageError, nearest
from gpuir.tune.kernels import Kernel

Meta = Mapping[str, Number]


@dataclass(frozen=True)
class TriedValues:
    """What a tuner tries for one meta-parameter of a kernel: a row of data/spaces.csv."""

    kernel: str
    parameter: str
    values: tuple[int, ...]


def values_of(kernel: str) -> dict[str, tuple[int, ...]]:
    """What tuners try for each meta-parameter of a public kernel."""
    return {
        v.parameter: v.values for v in table("spaces", TriedValues, "tune") if v.kernel == kernel
    }


@dataclass(frozen=True)
class Template:
    """A kernel with meta-parameters.

    `kernel` makes the kernel from what a launch is given, by name; `tile` the tiles from the
    meta-parameters. `parameters` are their usual values, the most usual first: the space that a
    tuner searches, without what the kernel's own text rules out. `allows` says which values
    (arrays) it can take.
    """

    name: str
    kernel: Callable[[Mapping[str, Any]], Kernel]
    tile: Callable[[Meta], Tiles]
    parameters: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    allows: Callable[[Kernel, Meta], Any] = lambda kernel, meta: True

    def tiles(self, meta: Meta) -> Tiles:
        """The tiles of meta-parameters; UsageError for one that is not known or missing."""
        for name in meta:
            if name not in self.parameters:
                raise UsageError(
                    f"{self.name} has no meta-parameter {name!r}",
                    fix=nearest(name, self.parameters),
                )
        for name in self.parameters:
            if name not in meta:
                raise UsageError(
                    f"{self.name} needs the meta-parameter {name!r}", fix=f"give {name}="
                )
        return self.tile(meta)

    def space(self, kernel: Kernel, **held: int) -> dict[str, np.ndarray[Any, Any]]:
        """Every combination of usual values that `allows` lets through, as arrays of one length;
        `held` are parameters that keep one value."""
        for name in held:
            if name not in self.parameters:
                raise UsageError(
                    f"{self.name} has no meta-parameter {name!r}",
                    fix=nearest(name, self.parameters),
                )
        values = [[held[p]] if p in held else list(v) for p, v in self.parameters.items()]
        grids = np.meshgrid(*(np.array(v, np.int64) for v in values), indexing="ij")
        found = {p: g.reshape(-1) for p, g in zip(self.parameters, grids, strict=True)}
        count = len(next(iter(found.values()), ()))
        takes = np.flatnonzero(np.broadcast_to(self.allows(kernel, found), (count,)))
        return {p: column[takes] for p, column in found.items()}
