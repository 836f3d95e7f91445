"""Every predictor by name; those of third parties are looked up when asked for."""

from __future__ import annotations

from typing import Protocol

from gpuir.cost.roofline import roofline
from gpuir.cost.tile import tile_cost
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.notes import Cost, Tile
from gpuir.ops.kernel import KernelOp
from gpuir.targets.target import Target


class Predictor(Protocol):
    """Gives a kernel's cost under a tile on a target, signed with its own name and version.

    `tf32` lets f32 products run on the matrix units where the target has TF32.
    """

    def __call__(
        self, op: KernelOp, tile: Tile | None, target: Target, *, tf32: bool = False
    ) -> Cost: ...


PREDICTORS: dict[str, Predictor] = {"roofline": roofline, "tile": tile_cost}
LOADED: dict[str, Predictor] = {}  # of modules that the user has named: `--load my.module`


def find_predictor(name: str) -> Predictor:
    """The predictor of that name: ours, then of a module the user loaded, then an entry point's.

    Entry points are of the group `gpuir.predictors`. A version may follow: `tile@1` is `tile`.
    """
    plain = name.partition("@")[0]
    if found := PREDICTORS.get(plain) or LOADED.get(name) or LOADED.get(plain):
        return found
    from importlib.metadata import entry_points  # slow to import, seldom needed

    installed = {e.name: e for e in entry_points(group="gpuir.predictors")}
    if plain in installed:
        return installed[plain].load()
    known = [*PREDICTORS, *LOADED, *installed]
    raise UsageError(f"no predictor {name!r}", expected=nearest(plain, known))
