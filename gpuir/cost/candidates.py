"""Tiles that any kernel may have: searched where a library's own do not fit, and where a tuner
starts from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from gpuir.cost.nest import WIDEST_HEAD_BYTES, Tiles, runs_on_tensor
from gpuir.cost.products import is_product, roles_of, spread
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.targets.target import Target

SHORT_SUM = 64  # points: the window of a stencil, which a block takes whole
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def of_any(work: Work, target: Target) -> Tiles:
    """The tiles worth costing.

    Matrix units: m and n from 16 to 256, k of 32 to 128 bytes, 1 to 5 stages, 4 or 8 warps (fewer
    for small tiles). Lanes: m and n from 32 to 128, smaller only for smaller matrices, k of 8 or
    16, up to 256 for vectors. Attention: 16 to 256 queries by 32 to 128 keys. Maps: 128 to 8192
    cells a block. Reductions: 1 to 1024 rows a block, whole or in chunks. Other nests: as matrix
    units or lanes, along the inner of their loops first. What is a sum is also split, where outputs
    are few. Tiles beyond the next power of two of a dimension are left out.
    """
    extents = {d: max(int(np.max(n)), 1) for d, n in work.dims}
    on_tensor, splits = runs_on_tensor(work, target), bool(work.reduced)
    if work.kernel == "k.attention":
        wide = extents["e"] * work.dtype.bits > WIDEST_HEAD_BYTES * 8
        free = ("s", "e", "d") if wide else ("s", "d")
        s, d = _cap(extents["s"], 16, 256), _cap(extents["d"], 32, 128)
        table = _wide_attention(s, d, splits) if wide else _attention(s, d, splits)
    elif on_tensor:
        free, most = ("m", "n", "k"), (extents["m"], extents["n"], max(extents["k"], 1))
        table = _products(work, *most)
    elif work.is_contraction:
        free = ("m", "n", "k")
        table = _lanes(
            _cap(extents["m"], 1, 128),
            _cap(extents["n"], 1, 128),
            _cap(extents["k"], 8, 256),
            splits,
        )
    elif set(extents) not in ({"o", "r"}, {"i"}):
        return _loops(work, target, extents)
    elif work.reduced:
        outer, inner = extents["o"], max(extents["r"], 1)
        free = ("o", "r")
        table = _rows(_cap(outer, 1, 1024), inner, splits)
    else:
        free = ("i",)
        table = _cells(_cap(extents["i"], 128, 8192))
    *columns, stages, warps, split = table.T
    dims = dict(zip(free, columns, strict=True))
    dims.update({d: np.ones(len(table)) for d in work.grid if d in "bh"})
    return Tiles(dims, stages, warps, split)


def _loops(work: Work, target: Target, extents: dict[str, int]) -> Tiles:
    """Tiles of a nest of any loops: along rows, columns and the sum of a product on matrix units;
    on the lanes along its last two loops, a short sum whole."""
    splits, roles = bool(work.reduced), roles_of(work)
    if roles is not None and is_product(work, target):
        parts = (roles.rows, roles.columns, roles.summed)
        m, n, k = (prod(extents[d] for d in loops) for loops in parts)
        table = _products(work, m, n, k)
    else:
        *outer, last = work.grid
        parts: tuple[tuple[str, ...], ...] = (tuple(outer[-1:]), (last,), work.reduced)
        m, n, k = (prod(extents[d] for d in loops) for loops in parts)
        most = (_cap(m, 1, 64), _cap(n, 1, 256))
        table = _blocks(*most, (k,) if k <= SHORT_SUM else (8, 16, 32), splits)
        if k <= SHORT_SUM:
            parts = (*parts[:2], ())
    *columns, stages, warps, split = table.T
    whole = {d: float(extents[d]) for d in work.reduced}
    dims: dict[str, Number] = {d: np.full(len(table), whole.get(d, 1.0)) for d, _ in work.dims}
    for cells, loops in zip(columns, parts, strict=True):
        if loops:
            dims |= spread(cells, loops, extents)
    return Tiles(dims, stages, warps, split)


def _cap(extent: int, least: int, most: int) -> int:
    """The next power of two of an extent, kept between `least` and `most`."""
    return min(max(1 << (max(extent, 1) - 1).bit_length(), least), most)


def _powers(least: int, most: int) -> list[int]:
    """Powers of two, largest first."""
    return [1 << b for b in range(most.bit_length() - 1, least.bit_length() - 2, -1)]


def _table(rows: Iterable[tuple[int, ...]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array(list(rows), dtype=np.float64)


def same_tiles(bits: int, m: int, n: int, k: int) -> tuple[int, int, int]:
    """The least extents of a product on matrix units that has the same tiles."""
    steps = (s for s in _steps(bits)[:2] if s <= k)
    return _cap(m, 16, 256), _cap(n, 16, 256), next(steps, 1)


def _steps(bits: int) -> tuple[int, int, int]:
    """Cells of a long, a usual and a short step along k: 128, 64 and 32 bytes."""
    return 128 * 8 // bits, 64 * 8 // bits, 32 * 8 // bits


def _products(work: Work, m: int, n: int, k: int):
    """Tiles of products of these extents: one table serves all that have the same."""
    m, n, k = same_tiles(work.dtype.bits, m, n, k)
    deep, wide, least = _steps(work.dtype.bits)
    ks = tuple(s for s in (deep, wide) if s <= k) or (least,)
    return _matrix(m, n, ks, bool(work.reduced))


@lru_cache(maxsize=1024)
def _matrix(m: int, n: int, ks: tuple[int, ...], splits: bool):
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
def _blocks(m: int, n: int, ks: tuple[int, ...], splits: bool):
    return _table(
        (tm, tn, tk, stages, warps, split)
        for tm, tn, tk in product(_powers(1, m), _powers(min(n, 32), n), ks)
        for warps in (8, 4, 2, 1)
        if 32 * warps <= tm * tn <= 64 * 32 * warps or (warps == 1 and tm * tn <= 64 * 32)
        for stages in (1, 2)
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
