"""What the functions of a kernel's body cost on the vector lanes, in instructions a cell."""

from __future__ import annotations

from collections.abc import Iterable

from gpuir.cost.sheet import Number
from gpuir.ir.types import DType, f32
from gpuir.ops.scalar import SCALARS, made_of

# Instructions a scalar function costs on the lanes, where that is not its count of flops. Assumed
# from the usual implementations: division and roots by a special-function unit at a quarter rate
# and a step or two of refinement, the rest as polynomials with range reduction.
LANE_OPS: dict[str, float] = {
    **dict.fromkeys(("div", "reciprocal", "sqrt", "rsqrt"), 8.0),
    **dict.fromkeys(("exp", "log", "sin", "cos"), 8.0),
    **dict.fromkeys(("expm1", "log1p", "erf", "sinh", "cosh", "tan"), 20.0),
    **dict.fromkeys(("asin", "acos", "atan", "asinh", "acosh", "atanh"), 24.0),
    **dict.fromkeys(("sigmoid", "silu", "softplus", "elu", "mish"), 18.0),
    **dict.fromkeys(("gelu", "gelu_tanh"), 20.0),
    "tanh": 16.0,
    "hypot": 12.0,  # two products, their sum and its root, and a scale that keeps it in range
    **dict.fromkeys(("mod", "fmod"), 16.0),
    **dict.fromkeys(("atan2", "erfinv"), 24.0),
    **dict.fromkeys(("lgamma", "lgamma_gradient"), 40.0),
    "pow": 72.0,  # fitted: elementwise rows of P100, which it bounds there
}
# Of `pow` by a number, those that PyTorch has shorter code for: aten/src/ATen/native/cuda/
# PowKernel.cu. (No measured row has such an exponent.)
POWERS = {2.0: 1.0, 3.0: 2.0, -2.0: 9.0, -1.0: 8.0, 0.5: 8.0, -0.5: 8.0}
# The same in a CPU's SIMD loop, where not as many: measured, in what else an instruction takes, on
# an AMD EPYC (Zen 5) under PyTorch 2.13 (specs/measurements/cpu-epyc-zen5.csv). PyTorch has exp,
# log, sin, erf and tanh to the last bit (SLEEF, MKL), and a shorter exp in silu, sigmoid and gelu.
SIMD_OPS: dict[str, float] = {
    **dict.fromkeys(("silu", "sigmoid"), 5.8),
    **dict.fromkeys(("sin", "cos"), 33.0),
    "gelu": 5.5,
    "div": 1.25,
    "sqrt": 10.0,
    "exp": 19.0,
    "log": 22.0,
    "erf": 32.0,
    "tanh": 68.0,
}
SOFTMAX_LANE_OPS = 14.0  # a cell: maximum, subtraction, exponential, sum, division
NORM_LANE_OPS = 8.0  # a cell: mean and variance, subtraction, scale and shift
OWN_LANE_OPS = 4.0  # assumed: a result's addresses, bounds check and store
# Of PyTorch's pools with indices, counted in their source (aten/src/ATen/native/cuda/
# DilatedMaxPool2d.cu), for each cell of a window: its address, load, widening, two comparisons, two
# selections, the loop; and for each result of max_pool_forward_nchw, a thread of its own: which
# cell of which image it is, in five divisions of some 20 instructions, and where its window ends.
WINDOW_LANE_OPS = 10.0
PLACE_LANE_OPS = 130.0
DEQUANTISE_LANE_OPS = 2.0  # assumed: a stored weight unpacked and scaled, two to an instruction


def lane_ops(fn: str, dtype: DType = f32) -> float:
    """Instructions that a scalar function costs a cell on a GPU's lanes."""
    parts = made_of(fn, dtype)
    return sum(n * LANE_OPS.get(part, float(SCALARS[part].flops)) for part, n in parts.items())


def simd_ops(maps: Iterable[tuple[str, Number]]) -> Number:
    """The instructions that functions of so many cells take on a CPU beyond those of a GPU's
    lanes."""
    return sum(((SIMD_OPS[fn] - lane_ops(fn)) * n for fn, n in maps if fn in SIMD_OPS), 0.0)
