"""Quantised operators of ai.onnx, and the forms that all quantised operators are written in.

Three forms, always spelt alike so that passes can match them (a scalar is an immediate):

    dequantise   t.cast(x, f32) → sub zero point → mul scale
    quantise     div scale → round → add zero point → clip → t.cast
    requantise   t.cast(acc, f32) → mul scale → round → add zero point → clip → t.cast

A zero point known to be zero is left out; narrow floats neither round nor clip. With block scales
the chain runs on x reshaped to [.., blocks, block, ..]. Dequantising a known weight is not folded:
it stays quantised in memory, and the chain becomes the prologue of the kernel that reads it.

Integer products multiply 8-bit operands into i32 and take zero points off afterwards, exactly:

    sum (a - za)(b - zb) = sum ab - za * (sum b - k * zb) - zb * sum a

where sums over known weights fold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import (
    as_in_numpy,
    cast,
    channels_first,
    channels_last,
    first_cells,
    product,
    reshaped,
)
from gpuir.frontends.onnx.contraction import sliding, spatial_axes
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.frontends.onnx.proto import DTYPES
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, f32, i8, i32, u8
from gpuir.ops import tensor as t

# ---------------------------------------------------------------------------- the forms


def integer_range(dtype: DType) -> tuple[int, int]:
    """The least and greatest value of an integer dtype."""
    if dtype.kind == "uint":
        return 0, 2**dtype.bits - 1
    return -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1) - 1


def offset(e: Emitter, zero_point: Value | None) -> Value | None:
    """A zero point that may be other than zero. Those of blocks are not read: they are many."""
    if zero_point is None or zero_point.type.rank > 1 or e.const_of(zero_point) is None:
        return zero_point
    array = e.array_of(zero_point)
    return None if array is not None and not array.astype(np.float64).any() else zero_point


def along(e: Emitter, v: Value, rank: int, axis: int) -> Value:
    """A per-tensor or per-axis parameter shaped to broadcast against a tensor of this rank."""
    if v.type.size == 1:
        return v if v.type.rank == 0 else e(t.Reshape(v, ()))
    return e(t.Reshape(v, (v.type.size, *(1,) * (rank - 1 - axis))))


class ScaleLayout:
    """How scales lie over x: one for all, one for each index of `axis`, or one for each block of
    `size` along it. `split` shapes x to meet them, `spread` shapes a parameter, `join` undoes.
    """

    def __init__(self, e: Emitter, op: str, x: TensorType, scale: TensorType, axis: int, size: int):
        self.e, self.x, self.axis, self.size = e, x, axis, 0
        if scale.size == 1 and (scale.rank <= 1 or x.size == 1):
            return
        self._whole = True
        if not x.rank or scale.rank not in (1, x.rank):
            raise ModelError(
                f"{op}: the shape of the scales does not match the input",
                expected="one scale in all, one for each index of an axis, or one for each block",
                found=f"x: {x}, scale: {scale}",
            )
        if scale.rank == 1 and not (size and x.rank == 1):
            if x.shape[axis] != scale.shape[0]:
                raise ModelError(
                    f"{op}: the number of scales is not the size of axis {axis}",
                    expected=f"{x.shape[axis]} scales",
                    found=f"x: {x}, scale: {scale}",
                )
            return
        n, blocks = x.shape[axis], scale.shape[axis]
        self.size = size or max(-(-n // max(blocks, 1)), 1)
        wanted = (*x.shape[:axis], -(-n // self.size), *x.shape[axis + 1 :])
        if scale.shape != wanted:
            raise ModelError(
                f"{op}: the scales do not match x in blocks of {self.size} along axis {axis}",
                expected=str(list(wanted)),
                found=f"x: {x}, scale: {scale}",
            )
        self._whole = n % self.size == 0

    def split(self, x: Value) -> Value:
        """[.., n, ..]  →  [.., blocks, size, ..] where blocks divide n."""
        if not self.size or not self._whole:
            return x
        shape, a = self.x.shape, self.axis
        parts = (shape[a] // self.size, self.size)
        return self.e(t.Reshape(x, (*shape[:a], *parts, *shape[a + 1 :])))

    def spread(self, v: Value) -> Value:
        if not self.size:
            return along(self.e, v, self.x.rank, self.axis)
        shape, a, e = v.type.shape, self.axis, self.e
        v = e(t.Reshape(v, (*shape[: a + 1], 1, *shape[a + 1 :])))
        if self._whole:
            return v
        wide = (*shape[: a + 1], self.size, *shape[a + 1 :])
        v = e(t.Broadcast(v, wide), fold=False)
        v = e(t.Reshape(v, (*shape[:a], shape[a] * self.size, *shape[a + 1 :])))
        return first_cells(e, v, self.x.shape)

    def join(self, y: Value) -> Value:
        return y if y.type.shape == self.x.shape else self.e(t.Reshape(y, self.x.shape))


def dequantize(
    e: Emitter,
    x: Value,
    scale: Value,
    zero_point: Value | None = None,
    *,
    axis: int = 0,
    block: int = 0,
    dtype: DType | None = None,
    op: str = "DequantizeLinear",
) -> Value:
    """(x - zero_point) * scale, computed in `dtype`, the scale's own by default.

    Folded only where that takes no more memory: a known weight stays quantised.
    """
    dtype = dtype or scale.type.dtype
    blocks = ScaleLayout(e=e, op=op, x=x.type, scale=scale.type, axis=axis, size=block)
    fold = x.type.dtype.bits >= dtype.bits or x.type.size <= 1
    y = e(t.Cast(blocks.split(x), dtype), fold=fold)
    if (zero := offset(e, zero_point)) is not None:
        packed = zero.type.rank > 1 and zero.type.dtype.bits < dtype.bits  # as many as the blocks
        zero = blocks.spread(zero) if packed else blocks.spread(cast(e, zero, dtype))
        y = e.map("sub", y, e(t.Cast(zero, dtype), fold=False) if packed else zero)
    y = e.map("mul", y, blocks.spread(cast(e, scale, dtype)))
    return blocks.join(y)


def quantize(
    e: Emitter,
    x: Value,
    scale: Value,
    zero_point: Value | None,
    dtype: DType,
    *,
    axis: int = 0,
    block: int = 0,
    precision: DType | None = None,
    saturate: bool = True,
    op: str = "QuantizeLinear",
) -> Value:
    """saturate(round(x / scale) + zero_point) as `dtype`; the division in `precision`."""
    precision = precision or scale.type.dtype
    blocks = ScaleLayout(e=e, op=op, x=x.type, scale=scale.type, axis=axis, size=block)
    y = blocks.split(cast(e, x, precision))
    y = e.map("div", y, blocks.spread(cast(e, scale, precision)))
    zero = offset(e, zero_point)
    zero = None if zero is None else blocks.spread(zero)
    return blocks.join(saturated(e, y, zero, dtype, saturate))


def saturated(
    e: Emitter, y: Value, zero_point: Value | None, dtype: DType, saturate: bool = True
) -> Value:
    """The tail of quantise and requantise: round → add zero point → clip → t.cast."""
    if dtype.is_integer:
        if dtype.bits == 16 and y.type.dtype.bits == 16:
            y = e(t.Cast(y, f32))  # the range does not fit a 16-bit float
        y = e.map("round", y)
    if zero_point is not None:
        y = e.map("add", y, cast(e, zero_point, y.type.dtype))
    if dtype.is_integer:
        low, high = integer_range(dtype)
        y = e.map("clip", y, float(low), float(high))
    return e(t.Cast(y, dtype, saturate))


def requantize(
    e: Emitter, acc: Value, scale: Value, zero_point: Value | None, dtype: DType
) -> Value:
    """saturate(round(acc * scale) + zero_point) as `dtype`."""
    y = e.map("mul", cast(e, acc, scale.type.dtype), scale)
    return saturated(e, y, offset(e, zero_point), dtype)


# ---------------------------------------------------------------------------- ai.onnx, linear


def quantize_linear(n: OnnxNode, e: Emitter) -> Value:
    """y_scale per tensor, per axis (13) or per block (21); output_dtype (21), precision (23)."""
    x, scale, zero_point = n[0], n[1], n.get(2)
    named = DTYPES.get(n.attr("output_dtype", 0))
    if zero_point is not None:
        if named is not None and named != zero_point.type.dtype:
            raise n.refused(
                "output_dtype is not the type of the zero point", zero_point.type.dtype, named
            )
        named = zero_point.type.dtype
    axis = 0 if scale.type.size == 1 and scale.type.rank <= 1 else n.axis(x.type.rank, 1)
    return quantize(
        e,
        x,
        scale,
        zero_point,
        named or u8,
        axis=axis,
        block=n.attr("block_size", 0),
        precision=DTYPES.get(n.attr("precision", 0)),
        saturate=bool(n.attr("saturate", 1)),
    )


def dequantize_linear(n: OnnxNode, e: Emitter) -> Value:
    """x_scale per tensor, per axis (13) or per block (21); output_dtype (23)."""
    x, scale = n[0], n[1]
    dtype = DTYPES.get(n.attr("output_dtype", 0))
    axis = 0 if scale.type.size == 1 and scale.type.rank <= 1 else n.axis(x.type.rank, 1)
    block = n.attr("block_size", 0)
    return dequantize(e, x, scale, n.get(2), axis=axis, block=block, dtype=dtype)


def dynamic_quantize(e: Emitter, x: Value) -> tuple[Codes, Value]:
    """x as u8 over its own range (widened to hold zero), and its scale."""
    axes = tuple(range(x.type.rank))
    low = e.map("min", e(t.Reduce("min", x, axes)), 0.0)
    high = e.map("max", e(t.Reduce("max", x, axes)), 0.0)
    span = e.map("div", e.map("sub", high, low), 255.0)
    flat = e.map("eq", span, 0.0)
    scale = e.map("where", flat, e.fill(1.0, span.type), span)  # all zero: any scale does
    zero = e.map("div", e.map("neg", low), scale)
    zero_point = saturated(e, zero, None, u8)
    return Codes(quantize(e, x, scale, zero_point, u8), zero_point), scale


def dynamic_quantize_linear(n: OnnxNode, e: Emitter) -> Results:
    codes, scale = dynamic_quantize(e, n[0])
    return codes.x, scale, codes.zero


# ---------------------------------------------------------------------------- integer products


@dataclass(frozen=True)
class Codes:
    """Numbers x that stand for x - zero; `zero` is a scalar, or has one for each row or column."""

    x: Value
    zero: Value | None = None


def recentred(e: Emitter, w: Codes) -> Codes:
    """A known u8 weight around 128  →  the i8 weight around zero that it is, bit for bit."""
    if w.zero is None or w.x.type.dtype != u8 or w.zero.type.rank > 1:
        return w
    weights, zeros = e.const_of(w.x), e.array_of(w.zero)
    if weights is None or zeros is None or not (zeros == 128).all():
        return w
    bytes_of, type = weights.array, w.x.type.with_dtype(i8)
    return Codes(e.lazy(type, lambda: (bytes_of() ^ 128).view(np.int8), origin=weights))


def accumulator_of(a: Value, b: Value) -> DType:
    return i32 if a.type.dtype.is_integer and b.type.dtype.is_integer else f32


def total(e: Emitter, x: Value, axis: int, dtype: DType) -> Value:
    return e(t.Reduce("sum", cast(e, x, dtype), (axis,), keepdims=True))


def matmul_integer(e: Emitter, left: Codes, right: Codes) -> Value:
    """sum over k of (a[.., m, k] - za) * (b[.., k, n] - zb), exactly, as numpy's matmul takes 1-D
    operands. za is a scalar or one a row, zb a scalar or one a column."""

    def multiply(a: Value, b: Value) -> Value:
        centred = recentred(e, Codes(b, right.zero))
        b = centred.x
        acc = accumulator_of(a, b)
        y = e(t.Matmul(a, b, acc))
        k = a.type.shape[-1]
        zeros_a, zeros_b = offset(e, left.zero), offset(e, centred.zero)
        zeros_b = None if zeros_b is None else cast(e, zeros_b, acc)
        if zeros_a is not None:
            zeros_a = cast(e, zeros_a, acc)
            if zeros_a.type.rank == 1 and zeros_a.type.size > 1:
                zeros_a = e(t.Reshape(zeros_a, (zeros_a.type.size, 1)))
            columns = total(e, b, b.type.rank - 2, acc)
            if zeros_b is not None:
                columns = e.map("sub", columns, e.map("mul", zeros_b, k))
            y = e.map("sub", y, e.map("mul", columns, zeros_a))
        if zeros_b is not None:
            rows = total(e, a, a.type.rank - 1, acc)
            y = e.map("sub", y, e.map("mul", rows, zeros_b))
        return y

    return as_in_numpy(e, left.x, right.x, multiply)


def matmul_integer_op(n: OnnxNode, e: Emitter) -> Value:
    return matmul_integer(e, Codes(n[0], n.get(2)), Codes(n[1], n.get(3)))


def conv_integer(n: OnnxNode, e: Emitter, image: Codes, weight: Codes) -> Value:
    """The convolution of x - zx with w - zw in i32, exactly. Padding is zero of x - zx: where zx is
    not zero, x is padded with it beforehand."""
    x, w = image.x, weight.x
    s = sliding(n, spatial_axes(x, n), w.type.shape[2:])
    groups = n.attr("group", 1)
    spatial = x.type.rank - 2
    weight = recentred(e, weight)
    w = weight.x
    acc = accumulator_of(x, w)
    zx, zw = offset(e, image.zero), offset(e, weight.zero)
    if zx is not None and any((*s.low, *s.high)):
        x = e(t.Pad(x, (0, 0, *s.low), (0, 0, *s.high), reshaped(e, zx, ())))
        s = replace(s, low=(0,) * spatial, high=(0,) * spatial)
    y = e(t.Conv(x, w, **s.slide, groups=groups, dtype=acc))
    per_channel = (w.type.shape[0], *(1,) * spatial)
    if zw is not None:
        zw = cast(e, zw, acc)
        zw = e(t.Reshape(zw, per_channel if zw.type.size > 1 else ()))
    if zx is not None:
        axes = tuple(range(1, w.type.rank))
        sums = e(t.Reduce("sum", cast(e, w, acc), axes))
        sums = e(t.Reshape(sums, per_channel), "sums")
        if zw is not None:
            sums = e.map("sub", sums, e.map("mul", zw, prod(w.type.shape[1:])))
        zx = cast(e, zx, acc)
        y = e.map("sub", y, e.map("mul", sums, zx))
    if zw is not None:
        ones = e.fill(1, TensorType((groups, *w.type.shape[1:]), w.type.dtype))
        sums = e(t.Conv(x, ones, **s.slide, groups=groups, dtype=acc))
        if groups > 1:
            batch, channels, *rest = y.type.shape
            sums = e(t.Reshape(sums, (batch, groups, 1, *rest)))
            sums = e(t.Broadcast(sums, (batch, groups, channels // groups, *rest)))
            sums = e(t.Reshape(sums, y.type.shape))
        y = e.map("sub", y, e.map("mul", sums, zw))
    return y


def conv_integer_op(n: OnnxNode, e: Emitter) -> Value:
    return conv_integer(n, e, Codes(n[0], n.get(2)), Codes(n[1], n.get(3)))


def qlinear_matmul(n: OnnxNode, e: Emitter) -> Value:
    """a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point."""
    acc = matmul_integer(e, Codes(n[0], n.get(2)), Codes(n[3], n.get(5)))
    sa, sb = n[1], n[4]
    if sa.type.rank == 1 and sa.type.size > 1:
        sa = e(t.Reshape(sa, (sa.type.size, 1)))
    scale = cast(e, product(e, sa, sb), f32)
    scale = e(t.Map("div", (scale, cast(e, n[6], f32))), "scale")
    return requantize(e, acc, scale, n.get(7), n[7].type.dtype)


def qlinear_conv(n: OnnxNode, e: Emitter) -> Value:
    """x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, bias in i32."""
    x, w = n[0], n[3]
    last = bool(n.attr("channels_last", 0))
    if last:
        x = channels_first(e, x)
    acc = conv_integer(n, e, Codes(x, n.get(2)), Codes(w, n.get(5)))
    channels = (w.type.shape[0], *(1,) * (x.type.rank - 2))
    bias = n.get(8)
    if bias is not None:
        acc = e.map("add", acc, e(t.Reshape(bias, channels)))
    ws = n[4] if n[4].type.size == 1 else e(t.Reshape(n[4], channels))
    scale = e(t.Map("div", (product(e, n[1], ws), n[6])), "scale")
    y = requantize(e, acc, scale, n.get(7), n[7].type.dtype)
    return channels_last(e, y) if last else y


def matmul_to_float(
    e: Emitter, a: Codes, b: Codes, scale: Value, bias: Value | None = None
) -> Value:
    """The integer product, then t.cast → mul scale → add bias."""
    acc = matmul_integer(e, a, b)
    y = e.map("mul", cast(e, acc, scale.type.dtype), scale)
    return y if bias is None else e.map("add", y, bias)


CONVERTERS: dict[str, Converter] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "MatMulInteger": matmul_integer_op,
    "ConvInteger": conv_integer_op,
    "QLinearMatMul": qlinear_matmul,
    "QLinearConv": qlinear_conv,
}
