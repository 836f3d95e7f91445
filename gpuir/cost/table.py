"""Every predictor by name; those of third parties are looked up when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gpuir.cost.batch import tile_cost
from gpuir.cost.roofline import roofline
from gpuir.ir.notes import Cost, Tile
from gpuir.ops.kernel import KernelOp
from gpuir.plugins import find_named
from gpuir.targets.target import Target


class Predictor(Protocol):
    """Gives a kernel's cost under a tile on a target, signed with its own name and version."""

    def __call__(self, op: KernelOp, tile: Tile | None, target: Target) -> Cost: ...


PREDICTORS: dict[str, Predictor] = {"roofline": roofline, "tile": tile_cost}


def find_predictor(name: str, loaded: Mapping[str, Predictor] | None = None) -> Predictor:
    """The predictor of that name: ours, a loaded module's, or an entry point's of
    `gpuir.predictors`. A version may follow: `tile@2` is `tile`."""
    plain = name.partition("@")[0]
    return find_named(plain, PREDICTORS, loaded, kind="predictor", group="predictors")
