"""What the functions of a kernel's body cost on the vector lanes, in instructions a cell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuir.cost.data import table
from gpuir.cost.sheet import Number
from gpuir.ir.types import DType, f32
from gpuir.ops.scalar import SCALARS, made_of


@dataclass(frozen=True)
class Function:
    """Instructions of a scalar function a cell: a row of data/functions.csv. Where a CPU takes as
    many as a GPU's lanes, `simd_ops` is 0."""

    function: str
    lane_ops: float
    source: str
    simd_ops: float = 0.0


@dataclass(frozen=True)
class Power:
    """Instructions of `pow` by a number: a row of data/powers.csv."""

    exponent: float
    lane_ops: float


LANE_OPS = {f.function: f.lane_ops for f in table("functions", Function)}
SIMD_OPS = {f.function: f.simd_ops for f in table("functions", Function) if f.simd_ops}
POWERS = {p.exponent: p.lane_ops for p in table("powers", Power)}
SOFTMAX_LANE_OPS = 14.0  # a cell: maximum, subtraction, exponential, sum, division
NORM_LANE_OPS = 8.0  # a cell: mean and variance, subtraction, scale and shift
OWN_LANE_OPS = 4.0  # assumed: a result's addresses, bounds check and store
# Of PyTorch's pools with indices, counted in their source (aten/src/ATen/native/cuda/
# DilatedMaxPool2d.cu), for each cell of a window: its address, load, widening, two comparisons, two
# selections, the loop; and for each result of max_pool_forward_nchw, a thread of its own: which
# cell of which image it is, in five divisions of some 20 instructions, and where its window ends.
WINDOW_LANE_OPS = 10.0
PLACE_LANE_OPS = 130.0
# Of a window over three axes without indices (cuda/AveragePool3d.cu), whose loops find each cell by
# strides of 64 bits: 44, 36 and 36 on A100, H100 and T4 (KernelBench, level 1, problem 46).
VOLUME_LANE_OPS = 38.0
DEQUANTISE_LANE_OPS = 2.0  # assumed: a stored weight unpacked and scaled, two to an instruction


def lane_ops(fn: str, dtype: DType = f32) -> float:
    """Instructions that a scalar function costs a cell on a GPU's lanes."""
    parts = made_of(fn, dtype)
    return sum(n * LANE_OPS.get(part, float(SCALARS[part].flops)) for part, n in parts.items())


def simd_ops(maps: Iterable[tuple[str, Number]]) -> Number:
    """The instructions that functions of so many cells take on a CPU beyond those of a GPU's
    lanes."""
    return sum(((SIMD_OPS[fn] - lane_ops(fn)) * n for fn, n in maps if fn in SIMD_OPS), 0.0)
