"""Kernels generated with a given tile: what this configuration takes, not the library's best.

A draft of the interface: `estimate` and `needs` take one kernel or many, tiles or arrays of them.
"""

from __future__ import annotations

import numpy as np

from gpuir.cost import tile as library
from gpuir.cost.legal import Need
from gpuir.cost.legal import needs as plain_needs
from gpuir.cost.nest import Tiles, cut
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.work import Work
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.targets.target import Target

BY = "generated@1"


def estimate(
    work: Work, tiles: Tiles, target: Target, *, s: Sheet | None = None
) -> library.Estimate:
    """Seconds of `work` generated with `tiles`."""
    return library.estimate(work, tiles, target, s=s)


def needs(work: Work, tiles: Tiles, target: Target) -> tuple[Need, ...]:
    """What tiles ask of the target."""
    return plain_needs(cut(work, tiles, target), target)


def interval(work: Work, target: Target, time_s: Number) -> tuple[Number, Number]:
    """Seconds between which 80 % of measurements are expected."""
    return time_s / 1.6, time_s * 1.6


def cost_of(work: Work, tile: Tile, target: Target) -> Cost:
    """The cost of one generated kernel, as a signed note."""
    e = estimate(work, Tiles.of(tile, work), target)
    terms: tuple[tuple[Bound, float], ...] = (
        ("compute", float(e.compute)),
        ("memory", float(e.memory)),
        ("latency", float(e.latency)),
    )
    time_s = float(np.ravel(e.time_s)[0])
    low, high = interval(work, target, time_s)
    return Cost(time_s, max(terms, key=lambda t: t[1])[0], BY, terms, (), (low, high))
