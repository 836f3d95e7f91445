"""Products in f32 on AMD's matrix cores, as rocBLAS runs them: the formulas of `cost.simt`, with
Tensile's kernels and its choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache, partial

import numpy as np

from gpuir.cost import simt
from gpuir.cost.data import table
from gpuir.cost.family import Family, Terms
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import Work
from gpuir.targets.target import Target

FACTORS = table("factors/tensile", Factor)


@dataclass(frozen=True)
class TunedSize:
    """A size that kernels were tuned at, and the one that was best."""

    m: int
    n: int
    k: int
    columns: int
    rows: int
    slices: int
    warps: int
    split: int


@cache
def _tuned() -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the tuned sizes, and the kernel of each."""
    rows = np.array([astuple(size) for size in table("tensile_sizes", TunedSize)], float)
    return np.log2(rows[:, :3]), rows[:, 3:]


def candidates(work: Work, target: Target) -> Tiles:
    """Tensile's kernels for one product."""
    return simt.tiles_of((*simt.kernels_of("tensile", "one", target.isa)[:4], 1.0))


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The kernel and split that rocBLAS would take, for each of many products."""
    shape = np.shape(work.points)
    rows = work.each(lambda n: np.broadcast_to(np.asarray(n, float), shape))
    b, *extents = (rows.extents[d] for d in "bmnk")
    taken = simt.cheapest(rows, "tensile", "one", target)
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


FAMILY = Family(
    "tensile", FACTORS, candidates, seconds, choose, features=simt.FEATURES, bound=simt.BOUND
)
