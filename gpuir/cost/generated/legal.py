"""Which configurations of generated kernels a target can run, for many at once; why others not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuir.cost.generated import estimate, needs
from gpuir.cost.generated.parts import BlockCounts
from gpuir.cost.legal import Need, candidates
from gpuir.cost.nest import Tiles
from gpuir.cost.work import Work
from gpuir.ir.notes import BY_DIMENSION, BY_OPERAND, Tile
from gpuir.targets.target import Target

Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Legal:
    """Of each of many tiles whether the target can run it. `reasons` has a text for each; those of
    legal ones are empty."""

    ok: Flags
    broken: tuple[tuple[Flags, Need], ...]
    target: Target

    @property
    def reasons(self) -> list[str]:
        """Why each is not legal: the first thing that does not fit."""
        found = [""] * len(self.ok)
        for wrong, need in reversed(self.broken):
            wants = np.broadcast_to(need.wants, self.ok.shape)
            has = np.broadcast_to(need.has, self.ok.shape)
            for i in np.flatnonzero(wrong):
                one = Need(need.what, wants[i], has[i], need.unit, need.of_target)
                found[i] = one.broken(self.target)
        return found


def joined(parts: Sequence[Legal]) -> Legal:
    """The answers of parts of an array, one after another."""
    if len(parts) == 1:
        return parts[0]
    size = sum(len(p.ok) for p in parts)
    found: dict[str, tuple[Flags, Need]] = {}
    begin = 0
    for p in parts:
        here = slice(begin, begin + len(p.ok))
        begin = here.stop
        for wrong, need in p.broken:
            if need.what not in found:
                whole = Need(need.what, np.zeros(size), np.zeros(size), need.unit, need.of_target)
                found[need.what] = np.zeros(size, bool), whole
            flags, whole = found[need.what]
            flags[here], whole.wants[here], whole.has[here] = wrong, need.wants, need.has
    broken = found.values()
    return Legal(np.concatenate([p.ok for p in parts]), tuple(broken), parts[0].target)


def is_legal(
    work: Work, tiles: Tiles, target: Target, count: int, counted: BlockCounts | None = None
) -> Legal:
    """Whether each of `count` tiles, or kernels, can run on the target; `counted` is what their
    blocks do, where that is known."""
    ok, broken = np.ones(count, bool), list[tuple[Flags, Need]]()
    for need in needs(work, tiles, target, counted):
        wrong = np.broadcast_to(np.asarray(need.wants) > need.has, (count,))
        if wrong.any():
            ok &= ~wrong
            broken.append((wrong, need))
    return Legal(ok, tuple(broken), target)


def fastest(work: Work, target: Target) -> Tile | None:
    """Of the candidates of one kernel, the legal one of least time; None where none is legal. It
    stands for the library's choice where no library has the kernel: a nest."""
    tiles = candidates(work, target)
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
