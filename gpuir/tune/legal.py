"""What tuners are told of a configuration that cannot run."""

from __future__ import annotations

from gpuir.cost.generated.legal import why_illegal
from gpuir.cost.work import Work
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Tile
from gpuir.targets.target import Target


def check(work: Work, tile: Tile, target: Target, name: str) -> None:
    """UsageError when the target cannot run the tile."""
    if why := why_illegal(work, tile, target):
        raise UsageError(
            f"the tile of {name} is not legal on {target.name}",
            found=f"{tile}\n{why}",
            fix="change the tile; gpuir.candidates(kernel, target) lists legal tiles",
        )
