"""Which configurations of generated kernels a target can run, for many at once; why others not."""

from __future__ import annotations

import numpy as np

from gpuir.cost.candidates import of_any
from gpuir.cost.generated import estimate, needs
from gpuir.cost.generated.parts import BlockCounts
from gpuir.cost.legal import Legal, judged
from gpuir.cost.nest import Tiles
from gpuir.cost.work import Work
from gpuir.ir.notes import BY_DIMENSION, BY_OPERAND, Tile
from gpuir.targets.target import Target


def is_legal(
    work: Work, tiles: Tiles, target: Target, count: int, counted: BlockCounts | None = None
) -> Legal:
    """Whether each of `count` tiles, or kernels, can run on the target; `counted` is what their
    blocks do, where that is known."""
    return judged(needs(work, tiles, target, counted), target, count)


def fastest(work: Work, target: Target) -> Tile | None:
    """Of the candidates of one kernel, the legal one of least time; None where none is legal. It
    stands for the library's choice where no library has the kernel: a nest."""
    tiles = of_any(work, target)
    count = max(np.size(n) for n in (*tiles.dims.values(), tiles.stages, tiles.warps, tiles.split))
    time_s = np.broadcast_to(estimate(work, tiles, target).time_s, (count,))
    time_s = np.where(is_legal(work, tiles, target, count).ok, time_s, np.inf)
    best = int(np.argmin(time_s))
    if not np.isfinite(time_s[best]):
        return None
    one = tiles.each(lambda n: np.broadcast_to(np.asarray(n, float), (count,))[best])
    dims = tuple((d, int(n)) for d, n in one.dims.items())
    return Tile(dims, int(one.stages), int(one.warps), int(one.split))


def why_illegal(work: Work, tile: Tile, target: Target) -> str:
    """Why one tile cannot run, or an empty text."""
    extents = work.extents
    named = [pair for part in BY_DIMENSION for pair in getattr(tile, part)]
    for d, n in (*tile.dims, *named):
        if d not in extents:
            return f"no dimension {d}: {work.kernel} has {', '.join(extents)}"
        if n < 1:
            return f"{d}={n}: a tile needs at least one element along each dimension"
    for part in BY_OPERAND:
        for i, _ in getattr(tile, part):
            if i >= len(work.operands):
                return (
                    f"{part}.{i}: the operands have numbers from 0; there are {len(work.operands)}"
                )
    if min(tile.stages, tile.warps, tile.split, tile.group, tile.unroll) < 1:
        return "stages, warps, split, group and unroll must be at least 1"
    return is_legal(work, Tiles.of(tile, work), target, 1).reasons[0]
