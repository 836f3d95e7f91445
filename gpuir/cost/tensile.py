"""Products in f32 on AMD's matrix cores, as rocBLAS runs them: the formulas of `cost.simt`, with
Tensile's kernels and its choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

import numpy as np

from gpuir.cost import simt
from gpuir.cost.family import Family, Terms
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.work import Work
from gpuir.targets.target import Target

FIT = "fitted on the MI100 rows of the NeuSight GEMM table"
START = {
    "lane share": 0.917,
    "operand slots": 0.9,
    "load slots": 1.1,
    "sliced slots": 1.01,
    "step clocks": 130.0,
    "block clocks": 5500.0,
    "hiding": 4.5,
    "joules": 1.0,
    "ragged": 0.6,
    "settle": 12.0,
    "l2 share": 1.05,
    "dram share": 0.94,
    "lines": 0.21,
    "line depth": 60.0,
    "overlap": 1.9,
    "split": 2.4,
}
FACTORS = tuple(
    replace(f, value=START.get(f.name, f.value), what=f.what.replace(simt.FIT, FIT))
    for f in simt.FACTORS
)

# One product (of a layer with a bias), as in `cost.simt.SINGLE`: which kernel Tensile took on
# MI100, by the names in the NeuSight GEMM table. Half of the rows get the right one.
SINGLE = simt.Kernels(
    (
        (128, 96, 4, 4, 2, 0.00, 41, 1.7, 0.44),
        (64, 128, 4, 4, 2, 0.07, 14, 2.1, 0.47),
        (64, 32, 4, 4, 2, 1.63, 20, 8.3, 0.00),
        (128, 128, 4, 4, 2, 0.31, 20, 1.1, 0.36),
        (96, 96, 4, 4, 2, 0.36, 19, 0.94, 0.39),
        (64, 64, 4, 4, 2, 0.42, 9, 1.7, 0.42),
        (144, 64, 4, 4, 2, 0.34, 41, 0.86, 0.42),
        (128, 160, 2, 4, 2, 0.21, 32, 0.58, 0.44),
        (64, 128, 2, 4, 2, 0.25, 25, 1.5, 0.44),
        (64, 64, 2, 4, 2, 0.25, 24, 2.7, 0.53),
    ),
    0.21,
)

# Batches: Tensile takes the kernel that was found best for the nearest of some tuned sizes
# (Tensile wiki, library logic), whatever the batch. Kernel (columns, rows, eights of k a step,
# wavefronts, split): sizes (m, n, k) at which MI100 took it in the NeuSight GEMM table; of sizes
# left out one by one, the nearest of the others has the right kernel for 64 %.
BATCH: dict[tuple[int, int, int, int, int], tuple[tuple[int, int, int], ...]] = {
    (144, 64, 2, 4, 1): (
        (256, 4096, 4096),
        (3072, 3072, 256),
    ),
    (128, 144, 2, 4, 1): (
        (1024, 1024, 64),
        (1024, 1024, 96),
        (1024, 1024, 128),
        (4096, 256, 4096),
        (4096, 4096, 256),
    ),
    (128, 64, 4, 4, 1): ((256, 2048, 2048),),
    (128, 64, 3, 4, 1): ((3072, 256, 3072),),
    (128, 64, 2, 4, 1): (
        (512, 512, 64),
        (1024, 128, 1024),
        (2048, 256, 2048),
    ),
    (128, 32, 1, 4, 1): (
        (4096, 4096, 64),
        (4096, 4096, 96),
        (4096, 4096, 128),
    ),
    (96, 96, 2, 4, 1): ((1024, 96, 1024),),
    (64, 128, 4, 4, 1): ((1024, 64, 1024),),
    (64, 128, 2, 4, 1): (
        (96, 4096, 4096),
        (128, 4096, 4096),
        (384, 96, 384),
        (384, 128, 384),
        (512, 64, 512),
    ),
    (64, 64, 4, 4, 1): (
        (64, 4096, 4096),
        (96, 2048, 2048),
        (96, 3072, 3072),
        (128, 2048, 2048),
        (128, 3072, 3072),
        (256, 1024, 1024),
        (384, 64, 384),
        (1024, 256, 1024),
        (2048, 96, 2048),
        (2048, 128, 2048),
        (3072, 96, 3072),
        (3072, 128, 3072),
        (4096, 64, 4096),
    ),
    (64, 64, 2, 4, 1): (
        (256, 3072, 3072),
        (384, 384, 64),
        (384, 384, 96),
        (384, 384, 128),
        (1024, 1024, 256),
        (2048, 2048, 64),
        (2048, 2048, 96),
        (2048, 2048, 128),
        (2048, 2048, 256),
        (3072, 3072, 64),
        (3072, 3072, 96),
        (3072, 3072, 128),
    ),
    (64, 32, 4, 4, 1): ((2048, 64, 2048),),
    (64, 32, 2, 4, 1): (
        (196, 64, 196),
        (196, 96, 196),
        (196, 128, 196),
        (4096, 96, 4096),
        (4096, 128, 4096),
    ),
    (64, 32, 2, 2, 1): (
        (196, 196, 64),
        (196, 196, 96),
        (196, 196, 128),
    ),
    (64, 16, 4, 4, 1): (
        (384, 384, 256),
        (512, 512, 96),
        (512, 512, 128),
        (512, 512, 256),
    ),
    (32, 64, 4, 4, 1): (
        (64, 3072, 3072),
        (3072, 64, 3072),
    ),
    (32, 32, 4, 4, 1): (
        (64, 1024, 1024),
        (64, 2048, 2048),
        (96, 512, 512),
        (96, 1024, 1024),
        (128, 512, 512),
        (128, 1024, 1024),
        (256, 512, 512),
        (512, 256, 512),
    ),
    (16, 64, 4, 4, 1): (
        (256, 384, 384),
        (384, 256, 384),
    ),
    (16, 16, 4, 4, 1): ((64, 384, 384),),
    (16, 16, 4, 1, 1): (
        (96, 384, 384),
        (128, 384, 384),
        (196, 196, 256),
        (196, 256, 196),
        (256, 196, 196),
        (512, 96, 512),
        (512, 128, 512),
    ),
    (16, 16, 2, 4, 8): ((64, 512, 512),),
    (16, 8, 4, 2, 1): (
        (64, 196, 196),
        (96, 196, 196),
        (128, 196, 196),
    ),
}


@cache
def _tuned() -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the tuned sizes, and the kernel of each."""
    rows = [(size, kernel) for kernel, sizes in BATCH.items() for size in sizes]
    return np.log2([size for size, _ in rows]), np.array([k for _, k in rows], float)


def candidates(work: Work, target: Target) -> Tiles:
    """Tensile's kernels for one product."""
    n, m, slices, warps = np.array(SINGLE.rows).T[:4]
    return Tiles({"b": 1.0, "m": m, "n": n, "k": simt.STEP * slices}, 2.0, warps, 1.0)


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The kernel and split that rocBLAS would take, for each of many products."""
    shape = np.shape(work.points)
    rows = work.each(lambda n: np.broadcast_to(np.asarray(n, float), shape))
    b, *extents = (rows.extents[d] for d in "bmnk")
    taken = simt.cheapest(rows, SINGLE, target, False)
    if not (b <= 1).all():
        sizes, tuned = _tuned()
        at = np.log2(np.maximum(np.stack(extents, axis=-1), 1.0))
        away = sum((at[..., None, i] - sizes[:, i]) ** 2 for i in range(3))
        tn, tm, slices, warps, split = np.moveaxis(tuned[np.argmin(away, axis=-1)], -1, 0)
        taken = simt.either(b <= 1, taken, (tn, tm, slices, warps, split))
    return simt.tiles_of(simt.thinned(taken, rows, target, partial(simt.times_of, rows, target, p)))


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """Those of `cost.simt`. The bias of a layer is copied into the result first, by a kernel of its
    own, and the product adds to that (README of the NeuSight tables; PyTorch on ROCm, addmm)."""
    terms = simt.seconds(s, work, tiles, target, p)
    if not simt.is_linear(work):
        return terms
    written = work.operands[-1].nbytes / (target.dram_bytes_per_s * p["dram share"])
    copied = s.put("bias copied into the result", written + target.launch_s, "s")
    return replace(terms, latency=terms.latency + copied)


FAMILY = Family("tensile", FACTORS, candidates, seconds, choose, simt.FEATURES, simt.BOUND)
