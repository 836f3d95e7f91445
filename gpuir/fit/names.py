"""The tile that a kernel had, from its name and launch: what the library chose."""

from __future__ import annotations

import re

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.fit.batch import Flags, MeasuredBatch
from gpuir.fit.columns import Floats

# `volta_sgemm_128x64_sliced1x4_nn`, `sgemm_128x128x8_NT`: columns and rows of a tile (a row-major
# result is a column-major one transposed), groups of warps that share out a step of 8 cells of k.
# Checked against the grids of all such rows in the NeuSight GEMM table (its README).
SGEMM = re.compile(r"sgemm(?:_largek)?_(\d+)x(\d+)(?:x(\d+))?(?:.*sliced\d+x(\d+))?")
# Tensile's `..._MT64x32x16_..._GSU4_...`: columns, rows, a step of k, and the split.
TENSILE = re.compile(r"_MT(\d+)x(\d+)x(\d+)_(?:.*_GSU(\d+)_)?")
STEP = 8.0


def tile_named(name: str) -> tuple[float, float, float, float] | None:
    """Columns, rows, cells of k a step, and the split where the name says it (else 0)."""
    if match := TENSILE.search(name):
        n, m, k, split = match.groups()
        return float(n), float(m), float(k), float(split or 1)
    if match := SGEMM.search(name):
        n, m, depth, slices = match.groups()
        return float(n), float(m), float(depth or STEP * float(slices or 1)), 0.0
    return None


def tiles_ran(batch: MeasuredBatch) -> tuple[Tiles, Flags] | None:
    """The tile of each row's product as it ran, and which rows' kernels say so; None where the
    table has no kernel names or no launches.

    A kernel whose name has no split launches its parts along the third dimension of the grid.
    """
    if batch.works[-1].kernel != "k.gemm" or "b" not in batch.dims:
        return None
    if not {"kernel_name", "grid_z", "block_x"} <= set(batch.words):
        return None
    names = batch.words["kernel_name"]
    tiles = [tile_named(name) for name in names.names]
    known = np.array([t is not None for t in tiles])[names.codes]
    if not known.any():
        return None
    columns = np.array([t or (1.0, 1.0, STEP, 1.0) for t in tiles])[names.codes]
    parts: Floats = batch.words["grid_z"].numbers() / batch.dims["b"][batch.which]
    split = np.where(columns[:, 3] > 0, columns[:, 3], np.maximum(np.floor(parts), 1.0))
    warps = np.maximum(batch.words["block_x"].numbers() / batch.target.sm.warp, 1.0)
    tiles = Tiles({"m": columns[:, 1], "n": columns[:, 0], "k": columns[:, 2]}, 2.0, warps, split)
    return tiles, known & np.isfinite(split) & np.isfinite(warps)
