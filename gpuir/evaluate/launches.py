"""The tile that a library took, from the name and grid of the kernel it launched.

Names and grids as in the README of the NeuSight tables, checked there on every row: cuBLAS's fp32
kernels state the tile of the column-major product, hence of ours turned round, and count splits in
the last dimension of their grid; Tensile's (AMD) state tile (`MT`) and splits (`GSU`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.evaluate.batch import Batch, Flags
from gpuir.evaluate.columns import Floats

SGEMM = re.compile(r"(?:maxwell|volta|ampere|turing|pascal)_sgemm_(\d+)x(\d+)(?:_|$)")
OLD_SGEMM = re.compile(r"^sgemm_(\d+)x(\d+)x\d+_")  # its tile is stated the other way round
TENSILE = re.compile(r"_MT(\d+)x(\d+)x\d+_.*?GSU(\d+)")
MOST_BLOCKS = 65_535  # in the last dimension of a grid: CUDA C++ Programming Guide


@dataclass(frozen=True)
class Launched:
    """Rows of a batch whose kernel states its tile: rows and columns of it, and the split."""

    rows: Flags
    m: Floats
    n: Floats
    split: Floats


def launched(batch: Batch) -> Launched | None:
    """What the kernels of a batch of products say, or None where the table names no kernels."""
    if "kernel_name" not in batch.words or "grid_z" not in batch.words:
        return None
    names, grid = batch.words["kernel_name"], batch.words["grid_z"]
    stated = np.array([_stated(name) for name in names.names] or [(0.0, 0.0, 0.0)])
    m, n, split = stated[names.codes].T
    depth = np.array([float(z) if z else 0.0 for z in grid.names])[grid.codes]
    batches = np.broadcast_to(batch.works[-1].extents["b"], (int(batch.which.max()) + 1,))
    by_grid = depth / np.asarray(batches, float)[batch.which]
    split = np.where(split > 0, split, by_grid)
    known = (m > 0) & (split >= 1) & (split == np.round(split)) & (depth < MOST_BLOCKS)
    return Launched(known, m[known], n[known], split[known])


def _stated(name: str) -> tuple[float, float, float]:
    """Rows, columns and split (0: see the grid) that a kernel's name states; zeros if none."""
    if found := SGEMM.search(name):
        return float(found[2]), float(found[1]), 0.0
    if found := OLD_SGEMM.search(name):
        return float(found[1]), float(found[2]), 0.0
    if found := TENSILE.search(name):
        return float(found[2]), float(found[1]), float(found[3])
    return 0.0, 0.0, 0.0


def agreement(chosen: Tiles, stated: Launched) -> tuple[float, float]:
    """The shares of kernels whose tile was predicted, and tile and split both."""
    tile = (chosen.dims["m"] == stated.m) & (chosen.dims["n"] == stated.n)
    return float(tile.mean()), float((tile & (chosen.split == stated.split)).mean())
