"""The tile that a library took, from the name and grid of the kernel it launched.

Names and grids as in the README of the NeuSight tables, checked there on every row: cuBLAS's fp32
kernels state the tile of the column-major product, hence of ours turned round, and count splits in
the last dimension of their grid; Tensile's (AMD) state tile (`MT`) and splits (`GSU`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gpuir.cost.families import family_of
from gpuir.cost.nest import Tiles
from gpuir.cost.work import Work
from gpuir.evaluate.batch import Batch, Flags
from gpuir.evaluate.columns import Floats, Ints
from gpuir.targets.target import Target

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


def as_tiles(stated: Launched, work: Work, target: Target) -> tuple[Ints, Tiles]:
    """The kernels whose tile is among those the model considers, and their tiles with all that a
    name does not say: depth, stages and warps."""
    known = family_of(work, target).tiles(work, target)
    columns = [np.atleast_1d(known.dims[d]) for d in ("m", "n")]
    columns = np.broadcast_arrays(*columns, known.stages, known.warps, known.dims["k"])
    place = {(m, n): i for i, (m, n) in reversed(list(enumerate(zip(*columns[:2]))))}
    found = np.array([place.get((m, n), -1) for m, n in zip(stated.m, stated.n)], np.int64)
    rows = np.flatnonzero(found >= 0)
    _, _, stages, warps, depth = (c[found[rows]] for c in columns)
    dims = {"b": np.ones(len(rows)), "m": stated.m[rows], "n": stated.n[rows], "k": depth}
    return rows, Tiles(dims, stages, warps, stated.split[rows])
