"""Arrays in the dtypes of types: which numpy dtype holds one, and how numbers are cast to it."""

# numpy's stubs leave many types partly unknown
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from gpuir.ir.errors import GpuirError, ModelError
from gpuir.ir.types import (
    DTYPES,
    DType,
    TensorType,
    f8e4m3,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    f8e8m0,
)

Array = np.ndarray[Any, Any]


class NoMeaning(GpuirError):
    """An op that has no numpy meaning, or none for these operands."""


NATIVE = {
    "bool": "bool",
    **{f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"c{bits}": f"complex{bits}" for bits in (64, 128)},
}
NARROW = {  # names in ml_dtypes
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2": "float8_e5m2",
    "f8e5m2fnuz": "float8_e5m2fnuz",
    "f8e8m0": "float8_e8m0fnu",
    "f4e2m1": "float4_e2m1fn",
    **{f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (2, 4)},
}
FROM_NUMPY = {name: DTYPES[ours] for ours, name in (NATIVE | NARROW).items()}
SATURATING = (f8e4m3, f8e4m3fnuz, f8e5m2, f8e5m2fnuz)


@cache
def to_numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype that holds `dtype`; narrow floats and integers come from ml_dtypes."""
    if dtype.name in NATIVE:
        return np.dtype(NATIVE[dtype.name])
    try:
        import ml_dtypes
    except ImportError:
        raise NoMeaning(
            f"numbers of dtype {dtype} need the package ml_dtypes", fix="pip install ml_dtypes"
        ) from None
    return np.dtype(getattr(ml_dtypes, NARROW[dtype.name]))


def to_type(array: Array) -> TensorType:
    """The row-major type of an array."""
    dtype = FROM_NUMPY.get(array.dtype.name)
    if dtype is None:
        raise ModelError(
            "gpuir does not know the data type of the array",
            expected="booleans, integers, floats or complex numbers",
            found=f"numpy {array.dtype}",
        )
    return TensorType(array.shape, dtype)


def wide(x: Array) -> Array:
    """x in the dtype it is computed in: f32 for narrow floats, i32 for narrow integers."""
    dtype = FROM_NUMPY[x.dtype.name]
    if dtype.is_float and dtype.bits < 32:
        return x.astype(np.float32)
    return x.astype(np.int32) if dtype.bits < 8 else x


def cast(x: Array, dtype: DType, saturate: bool = True, rounding: str = "up") -> Array:
    """x as `dtype`, as ONNX Cast (opsets 19 to 25) says.

    Floats to integers truncate towards zero and wrap. `saturate` clamps to the finite range of an
    8-bit float, infinities included; without it what does not fit is NaN, or infinite where the
    format has infinities. f4e2m1 always clamps. `rounding` is of f8e8m0 alone.
    """
    target = to_numpy_dtype(dtype)
    if x.dtype == target:
        return x
    source = FROM_NUMPY[x.dtype.name]
    x = wide(x)
    with np.errstate(all="ignore"):
        if dtype.kind == "bool":
            return x != 0
        if dtype is f8e8m0:
            return _power_of_two(x.astype(np.float32), saturate, rounding)
        if dtype in SATURATING and saturate:
            import ml_dtypes

            limit = float(ml_dtypes.finfo(target).max)
            return np.clip(x.astype(np.float32), -limit, limit).astype(target)
        if dtype.is_integer and source.is_float and dtype.bits < 64:
            return x.astype(np.int64).astype(target)
        if x.dtype == bool and dtype.name in NARROW:
            x = x.astype(np.int32)
        if source.kind == "complex" and dtype.kind != "complex":
            x = x.real
        return x.astype(target)


def _power_of_two(x: Array, saturate: bool, rounding: str) -> Array:
    """f32 to f8e8m0, which is the exponent field alone: value 2 ** (bits - 127), 255 for NaN.

    OCP Microscaling Formats specification 1.0, section 5.4.1; roundings as in ONNX Cast-24. The
    sign is dropped, and infinities become NaN.
    """
    bits = np.ascontiguousarray(x).view(np.uint32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    special = exponent == 0xFF
    if rounding == "nearest":  # a tie goes up, but from zero's exponent
        up = (fraction > 0x400000) | ((fraction == 0x400000) & (exponent > 0))
    else:
        up = (fraction > 0) & (rounding == "up")
    if saturate:
        up &= exponent != 0xFE
    result = np.where(special, 0xFF, exponent + up).astype(np.uint8)
    return result.view(to_numpy_dtype(f8e8m0))


def limit(dtype: np.dtype[Any], lowest: bool) -> Any:
    """The least or the greatest value of a dtype; infinite for floats."""
    if dtype.kind == "b":
        return not lowest
    if dtype.kind == "f":
        return -np.inf if lowest else np.inf
    info = np.iinfo(dtype)
    return info.min if lowest else info.max
