"""Kernels → tiled kernels: the tiles legal on the target, each costed, the cheapest kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np

from gpuir.cost.nest import (
    WIDEST_HEAD_BYTES,
    Tiles,
    Work,
    needs,
    runs_on_tensor,
    why_illegal,
    work_of,
)
from gpuir.cost.tile import estimate, rates
from gpuir.ir.errors import ModelError, UsageError
from gpuir.ir.graph import Graph, Level, Node
from gpuir.ir.notes import Schedule, Tile
from gpuir.ops.kernel import KernelOp
from gpuir.passes.manager import Pass
from gpuir.schedule import Path as KernelPath
from gpuir.schedule import apply
from gpuir.targets.load import load_target
from gpuir.targets.target import Target


@dataclass(frozen=True)
class TilePass(Pass):
    """Gives every kernel with a loop nest a tile for `target`: the cheapest of the legal ones by
    the tile predictor, or what the file `schedule` says. What that leaves out is searched.

    `target` is a name, an alias, a path, or one with numbers changed: `a100+sms=120`. `tf32` lets
    f32 products run on the matrix units.
    """

    name: ClassVar[str] = "tile"
    takes: ClassVar[Level | None] = Level.kernel
    gives: ClassVar[Level | None] = Level.tiled
    target: str
    schedule: str = ""
    tf32: bool = False

    def run(self, g: Graph) -> Graph:
        target = load_target(self.target)
        schedule = Schedule(g.name, self.target, ())
        if self.schedule:
            schedule = read_schedule(self.schedule, self.target, target)
        return tile_graph(g, schedule, target, self.tf32)


def schedule_in(path: str) -> Schedule:
    """The schedule that a file states; UsageError or TextError when it states none."""
    from gpuir.text import parse_schedule

    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found = str(error.strerror) if isinstance(error, OSError) else str(error)
        raise UsageError("the schedule cannot be read", where=path, found=found) from error
    return parse_schedule(text, path)


def read_schedule(path: str, name: str, target: Target) -> Schedule:
    """The schedule in a file, for the target named `name`; UsageError when it is for another."""
    schedule = schedule_in(path)
    if schedule.target != name and load_target(schedule.target) != target:
        raise UsageError(
            f"schedule @{schedule.name} is for another target",
            where=path,
            expected=name,
            found=schedule.target,
            fix=f"tile for {schedule.target}, or write `for {name}` in its first line: "
            "its tiles are then checked against that",
        )
    return Schedule(schedule.name, name, schedule.tiles)


def tile_graph(g: Graph, schedule: Schedule, target: Target, tf32: bool = False) -> Graph:
    """The graph tiled by the schedule, checked, and by search where that has no tile.

    UsageError names the kernel whose tile is illegal, and why.
    """
    known: dict[Work, Tile] = {}

    def choose(path: KernelPath, node: Node, wanted: Tile | None) -> Tile:
        op = node.op
        assert isinstance(op, KernelOp), "the verifier has seen to it"
        if wanted is None:
            work = work_of(op, tf32)
            if work not in known:
                known[work] = best_tile(work, target, tf32, where="/".join(path))
            return known[work]
        if why := why_illegal(op, wanted, target, tf32):
            raise UsageError(
                f"the tile of %{'/'.join(path)} is not legal",
                where=f"schedule @{schedule.name}",
                found=f"{wanted}\n{why}",
                fix="make it fit, or leave the kernel out of the schedule to have it searched",
            )
        return wanted

    return apply(g, schedule, choose)


# ---------------------------------------------------------------------------- the search

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def best_tile(work: Work, target: Target, tf32: bool = False, where: str = "") -> Tile:
    """The cheapest legal tile; of equals the first, as `candidates` lists the usual ones first."""
    on_tensor = runs_on_tensor(work, target, tf32)
    tiles, names = candidates(work, on_tensor, splits=_splits(work, target))
    found = estimate(work, tiles, target, rates(work, target, tf32))
    legal = np.ones(len(tiles.stages), dtype=bool)
    for need in needs(found.nest, target, on_tensor):
        legal &= np.asarray(need.wants <= need.has)
    if work.is_contraction:  # libraries split k to fill SMs that the grid leaves idle, no further
        idle = found.nest.blocks < target.sms * tiles.split
        legal &= (tiles.split == 1) | (idle & (found.nest.waves <= 2))
    if not legal.any():
        raise ModelError(
            f"no tile of {work.kernel} fits {target.name}",
            where=where,
            found=", ".join(f"{d}={n}" for d, n in work.dims),
            fix="give one in a schedule",
        )
    time_s = np.where(legal, found.time_s, np.inf)
    i = int(np.argmax(time_s <= time_s.min() * (1 + 1e-9)))
    return Tile(
        dims=tuple((d, int(tiles.dims[d][i])) for d in names),
        stages=int(tiles.stages[i]),
        warps=int(tiles.warps[i]),
        split=int(tiles.split[i]),
    )


def _splits(work: Work, target: Target) -> bool:
    """Whether dividing the reduced dimension could fill more SMs: few outputs for its length."""
    if not work.reduced:
        return False
    outputs = work.output_points
    if work.is_contraction:
        return outputs <= 2 * target.sms * 128 * 128
    return work.kernel == "k.reduce" and outputs <= 64 * target.sms


def candidates(work: Work, on_tensor: bool, splits: bool) -> tuple[Tiles, tuple[str, ...]]:
    """The tiles worth costing, and the dimensions that they name.

    Matrix units: m and n from 16 to 256, k of 32 to 128 bytes, 1 to 5 stages, 4 or 8 warps (fewer
    for small tiles). Lanes: m and n from 32 to 128, smaller only for smaller matrices, k of 8 or
    16, up to 256 for vectors. Attention: 16 to 256 queries by 32 to 128 keys. Maps: 128 to 8192
    cells a block. Reductions: 1 to 1024 rows a block, whole or in chunks. What is a sum is also
    split, where outputs are few. Tiles beyond the next power of two of a dimension are left out.
    """
    extents = work.extents
    if work.kernel == "k.attention":
        wide = extents["e"] * work.dtype.bits > WIDEST_HEAD_BYTES * 8
        free = ("s", "e", "d") if wide else ("s", "d")
        s, d = _cap(extents["s"], 16, 256), _cap(extents["d"], 32, 128)
        table = _wide_attention(s, d, splits) if wide else _attention(s, d, splits)
    elif on_tensor:
        free, most = ("m", "n", "k"), (extents["m"], extents["n"], max(extents["k"], 1))
        table = _matrix(
            _cap(most[0], 16, 256), _cap(most[1], 16, 256), most[2], work.dtype.bits, splits
        )
    elif work.is_contraction:
        free = ("m", "n", "k")
        table = _lanes(
            _cap(extents["m"], 1, 128),
            _cap(extents["n"], 1, 128),
            _cap(extents["k"], 8, 256),
            splits,
        )
    elif work.reduced:
        outer, inner = extents["o"], max(extents["r"], 1)
        free = ("o", "r")
        table = _rows(_cap(outer, 1, 1024), inner, splits)
    else:
        free = ("i",)
        table = _cells(_cap(extents["i"], 128, 8192))
    columns = table.T
    named = [d for d, n in work.dims if d in free or (d in work.grid and n > 1 and d in "bh")]
    ones = np.ones(len(table))
    dims = {
        d: columns[free.index(d)] if d in free else ones if d in named else ones * max(n, 1)
        for d, n in work.dims
    }
    stages, warps, split = columns[len(free) :]
    return Tiles(dims, stages, warps, split), tuple(named)


def _cap(extent: int, least: int, most: int) -> int:
    """The next power of two of an extent, kept between `least` and `most`."""
    return min(max(1 << (max(extent, 1) - 1).bit_length(), least), most)


def _powers(least: int, most: int) -> list[int]:
    """Powers of two, largest first."""
    return [1 << b for b in range(most.bit_length() - 1, least.bit_length() - 2, -1)]


def _table(rows: Iterable[tuple[int, ...]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array(list(rows), dtype=np.float64)


@lru_cache(maxsize=4096)
def _matrix(m: int, n: int, k: int, bits: int, splits: bool):
    deep, wide, least = (nbytes * 8 // bits for nbytes in (128, 64, 32))
    ks = [s for s in (deep, wide) if s <= k] or [least]
    return _table(
        (tm, tn, tk, stages, warps, split)
        for tm, tn, tk in product(_powers(16, m), _powers(16, n), ks)
        for warps in (4, 8, 2, 1)
        if 256 <= tm * tn / warps <= 8192 and (warps >= 4 or tm * tn <= 4096)
        for stages in (3, 2, 4, 5, 1)
        for split in (SPLITS if splits else (1,))
    )


@lru_cache(maxsize=4096)
def _lanes(m: int, n: int, k: int, splits: bool):
    thin = min(m, n) < 32  # a vector, or a few channels: long steps along k
    ks = [s for s in ((16, 8, 32, 64, 256) if thin else (8, 16)) if s <= max(k, 8)]
    return _table(
        (tm, tn, tk, stages, warps, split)
        for tm, tn, tk in product(_powers(min(m, 32), m), _powers(min(n, 32), n), ks)
        for warps in (8, 4, 2, 1)
        if (tm * tn * tk >= 32 * warps or warps == 1)
        and tm * tn <= 64 * 32 * warps
        and (tk <= 32 or tm == 1 or tn == 1)
        for stages in (2, 1, 3)
        for split in (SPLITS if splits else (1,))
    )


@lru_cache(maxsize=4096)
def _attention(s: int, d: int, splits: bool):
    return _table(
        (ts, td, stages, warps, split)
        for ts, td in product(_powers(16, s), _powers(32, d))
        for warps in (4, 8, 2, 1)
        if ts >= 4 * warps or warps == 1
        for stages in (2, 1, 3)
        for split in (SPLITS if splits else (1,))
    )


@lru_cache(maxsize=4096)
def _wide_attention(s: int, d: int, splits: bool):
    return _table(
        (ts, te, td, stages, warps, split)
        for ts, te, td in product(_powers(16, s), (256, 128, 64), _powers(8, d))
        for warps in (4, 8, 2, 1)
        for stages in (2, 1)
        for split in (SPLITS if splits else (1,))
    )


@lru_cache(maxsize=4096)
def _rows(o: int, r: int, splits: bool):
    whole = [r] if r <= 32768 else []
    chunks = [c for c in (8192, 4096, 1024) if c < r]
    return _table(
        (to, tr, 1, warps, split)
        for tr in (*whole, *chunks)
        for to in _powers(1, o)
        for warps in (4, 8, 16, 32, 2, 1)
        if to * tr >= 32 * warps or warps == 1
        for split in ((1, 2, 4, 8, 16, 32, 64, 128, 256) if splits else (1,))
    )


@lru_cache(maxsize=4096)
def _cells(i: int):
    usual = (512, 1024, 256, 2048, 4096, 8192, 128)  # PyTorch's pointwise kernels take 512 cells
    return _table(
        (ti, 1, warps, 1)
        for ti in usual
        if ti <= i
        for warps in (4, 8, 16, 2, 1)
        if 32 * warps <= ti <= 16 * 32 * warps
    )
