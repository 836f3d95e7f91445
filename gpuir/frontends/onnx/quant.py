"""Quantised operators: of ai.onnx, and of com.microsoft as onnxruntime's quantiser writes them.

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

from collections.abc import Callable
from math import prod

import numpy as np

from gpuir.frontends.onnx import recurrent
from gpuir.frontends.onnx.contraction import mean_pool, sliding, spatial_axes
from gpuir.frontends.onnx.contrib import mask_lengths
from gpuir.frontends.onnx.emit import Converter, Emitter, OnnxNode
from gpuir.frontends.onnx.idioms import (
    cast,
    channels_first,
    channels_last,
    label,
    product,
    reshaped,
)
from gpuir.frontends.onnx.proto import DTYPES
from gpuir.interp import to_numpy_dtype
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, f32, i8, i32, i64, u2, u4, u8
from gpuir.ops import tensor as t

Results = tuple[Value | None, ...]
PACKED = {4: u4, 2: u2}  # the dtype of numbers packed so many bits each


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
        return v if v.type.rank == 0 else e(t.Reshape(v, ()), label(e, v))
    return e(t.Reshape(v, (v.type.size, *(1,) * (rank - 1 - axis))), label(e, v))


class Blocks:
    """How scales lie over x: one for all, one for each index of `axis`, or one for each block of
    `size` along it. `split` shapes x to meet them, `spread` shapes a parameter, `join` undoes.
    """

    def __init__(self, e: Emitter, op: str, x: TensorType, scale: TensorType, axis: int, size: int):
        self.e, self.x, self.axis, self.size = e, x, axis, 0
        if scale.size == 1 and (scale.rank <= 1 or x.size == 1):
            return
        self._whole = True
        if scale.rank == 1 and not (size and x.rank == 1):
            if x.shape[axis] != scale.shape[0]:
                raise ModelError(
                    f"{op}: one scale for each index of axis {axis}",
                    expected=f"{x.shape[axis]} scales",
                    found=f"x: {x}, scale: {scale}",
                )
            return
        n, blocks = x.shape[axis], scale.shape[axis]
        self.size = size or -(-n // max(blocks, 1))
        wanted = (*x.shape[:axis], -(-n // self.size), *x.shape[axis + 1 :])
        if scale.shape != wanted:
            raise ModelError(
                f"{op}: the scales do not cover x in blocks of {self.size} along axis {axis}",
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
        return self.e(t.Reshape(x, (*shape[:a], *parts, *shape[a + 1 :])), label(self.e, x))

    def spread(self, v: Value) -> Value:
        if not self.size:
            return along(self.e, v, self.x.rank, self.axis)
        shape, a, e = v.type.shape, self.axis, self.e
        name = label(e, v)
        v = e(t.Reshape(v, (*shape[: a + 1], 1, *shape[a + 1 :])), name)
        if self._whole:
            return v
        wide = (*shape[: a + 1], self.size, *shape[a + 1 :])
        v = e(t.Broadcast(v, wide), name, fold=False)
        v = e(t.Reshape(v, (*shape[:a], shape[a] * self.size, *shape[a + 1 :])))
        return e(t.Slice(v, (0,) * self.x.rank, self.x.shape, (1,) * self.x.rank))

    def join(self, y: Value) -> Value:
        return y if y.type.shape == self.x.shape else self.e(t.Reshape(y, self.x.shape))


def dequantize(
    e: Emitter,
    x: Value,
    scale: Value,
    zero_point: Value | None = None,
    axis: int = 0,
    block: int = 0,
    dtype: DType | None = None,
    op: str = "DequantizeLinear",
) -> Value:
    """(x - zero_point) * scale, computed in `dtype`, the scale's own by default.

    Folded only where that takes no more memory: a known weight stays quantised.
    """
    dtype = dtype or scale.type.dtype
    blocks = Blocks(e, op, x.type, scale.type, axis, block)
    fold = x.type.dtype.bits >= dtype.bits or x.type.size <= 1
    y = e(t.Cast(blocks.split(x), dtype), fold=fold)
    if (zero := offset(e, zero_point)) is not None:
        y = e(t.Map("sub", (y, blocks.spread(cast(e, zero, dtype)))))
    y = e(t.Map("mul", (y, blocks.spread(cast(e, scale, dtype)))))
    return blocks.join(y)


def quantize(
    e: Emitter,
    x: Value,
    scale: Value,
    zero_point: Value | None,
    dtype: DType,
    axis: int = 0,
    block: int = 0,
    precision: DType | None = None,
    saturate: bool = True,
    op: str = "QuantizeLinear",
) -> Value:
    """saturate(round(x / scale) + zero_point) as `dtype`; the division in `precision`."""
    precision = precision or scale.type.dtype
    blocks = Blocks(e, op, x.type, scale.type, axis, block)
    y = blocks.split(cast(e, x, precision))
    y = e(t.Map("div", (y, blocks.spread(cast(e, scale, precision)))))
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
        y = e(t.Map("round", (y,)))
    if zero_point is not None:
        y = e(t.Map("add", (y, cast(e, zero_point, y.type.dtype))))
    if dtype.is_integer:
        low, high = integer_range(dtype)
        y = e(t.Map("clip", (y,), (float(low), float(high))))
    return e(t.Cast(y, dtype, saturate))


def requantize(
    e: Emitter, acc: Value, scale: Value, zero_point: Value | None, dtype: DType
) -> Value:
    """saturate(round(acc * scale) + zero_point) as `dtype`."""
    y = e(t.Map("mul", (cast(e, acc, scale.type.dtype), scale)))
    return saturated(e, y, offset(e, zero_point), dtype)


# ---------------------------------------------------------------------------- ai.onnx, linear


def quantize_linear(n: OnnxNode, e: Emitter) -> Value:
    """y_scale per tensor, per axis (13) or per block (21); output_dtype (21), precision (23)."""
    x, scale, zero_point = n[0], n[1], n.get(2)
    named = DTYPES.get(n.attr("output_dtype", 0))
    if zero_point is not None:
        if named is not None and named != zero_point.type.dtype:
            raise ModelError(
                "QuantizeLinear: output_dtype differs from the zero point's",
                expected=str(zero_point.type.dtype),
                found=str(named),
            )
        named = zero_point.type.dtype
    axis = 0 if scale.type.size == 1 and scale.type.rank <= 1 else n.axis(x.type.rank, 1)
    return quantize(
        e,
        x,
        scale,
        zero_point,
        named or u8,
        axis,
        n.attr("block_size", 0),
        DTYPES.get(n.attr("precision", 0)),
        bool(n.attr("saturate", 1)),
    )


def dequantize_linear(n: OnnxNode, e: Emitter) -> Value:
    """x_scale per tensor, per axis (13) or per block (21); output_dtype (23)."""
    x, scale = n[0], n[1]
    dtype = DTYPES.get(n.attr("output_dtype", 0))
    axis = 0 if scale.type.size == 1 and scale.type.rank <= 1 else n.axis(x.type.rank, 1)
    return dequantize(e, x, scale, n.get(2), axis, n.attr("block_size", 0), dtype)


def dynamic_quantize(e: Emitter, x: Value) -> tuple[Value, Value, Value]:
    """x as u8 over its own range (widened to hold zero), its scale and its zero point."""
    axes = tuple(range(x.type.rank))
    low = e(t.Map("min", (e(t.Reduce("min", x, axes)),), (0.0,)))
    high = e(t.Map("max", (e(t.Reduce("max", x, axes)),), (0.0,)))
    span = e(t.Map("div", (e(t.Map("sub", (high, low))),), (255.0,)))
    flat = e(t.Map("eq", (span,), (0.0,)))
    scale = e(t.Map("where", (flat, e.fill(1.0, span.type), span)))  # all zero: any scale does
    zero = e(t.Map("div", (e(t.Map("neg", (low,))), scale)))
    zero_point = saturated(e, zero, None, u8)
    return quantize(e, x, scale, zero_point, u8), scale, zero_point


def dynamic_quantize_linear(n: OnnxNode, e: Emitter) -> Results:
    return dynamic_quantize(e, n[0])


# ---------------------------------------------------------------------------- integer products


def recentred(e: Emitter, w: Value, zero_point: Value | None) -> tuple[Value, Value | None]:
    """A known u8 weight around 128  →  the i8 weight around zero that it is, bit for bit."""
    if zero_point is None or w.type.dtype != u8 or zero_point.type.rank > 1:
        return w, zero_point
    weights, zeros = e.const_of(w), e.array_of(zero_point)
    if weights is None or zeros is None or not (zeros == 128).all():
        return w, zero_point
    bytes_of = weights.array
    return e.lazy(
        w.type.with_dtype(i8), lambda: (bytes_of() ^ 128).view(np.int8), label(e, w)
    ), None


def accumulator_of(a: Value, b: Value) -> DType:
    return i32 if a.type.dtype.is_integer and b.type.dtype.is_integer else f32


def total(e: Emitter, x: Value, axis: int, dtype: DType) -> Value:
    return e(t.Reduce("sum", cast(e, x, dtype), (axis,), keepdims=True))


def matmul_integer(
    e: Emitter, a: Value, b: Value, za: Value | None = None, zb: Value | None = None
) -> Value:
    """sum over k of (a[.., m, k] - za) * (b[.., k, n] - zb), exactly, as numpy's matmul takes 1-D
    operands. za is a scalar or one a row, zb a scalar or one a column."""
    vector_a, vector_b = a.type.rank == 1, b.type.rank == 1
    if vector_a:
        a = e(t.Reshape(a, (1, *a.type.shape)))
    if vector_b:
        b = e(t.Reshape(b, (*b.type.shape, 1)))
    b, zb = recentred(e, b, zb)
    acc = accumulator_of(a, b)
    y = e(t.Matmul(a, b, acc))
    k = a.type.shape[-1]
    za, zb = offset(e, za), offset(e, zb)
    zb = None if zb is None else cast(e, zb, acc)
    if za is not None:
        za = cast(e, za, acc)
        if za.type.rank == 1 and za.type.size > 1:
            za = e(t.Reshape(za, (za.type.size, 1)), label(e, za))
        columns = total(e, b, b.type.rank - 2, acc)
        if zb is not None:
            columns = e(t.Map("sub", (columns, e(t.Map("mul", (zb,), (k,))))))
        y = e(t.Map("sub", (y, e(t.Map("mul", (columns, za))))))
    if zb is not None:
        rows = total(e, a, a.type.rank - 1, acc)
        y = e(t.Map("sub", (y, e(t.Map("mul", (rows, zb))))))
    shape = y.type.shape
    if vector_a:
        shape = (*shape[:-2], shape[-1])
    if vector_b:
        shape = shape[:-1]
    return y if shape == y.type.shape else e(t.Reshape(y, shape))


def matmul_integer_op(n: OnnxNode, e: Emitter) -> Value:
    return matmul_integer(e, n[0], n[1], n.get(2), n.get(3))


def matmul_integer16(n: OnnxNode, e: Emitter) -> Value:
    return e(t.Matmul(n[0], n[1], i32))


def mul_integer(n: OnnxNode, e: Emitter) -> Value:
    """(a - za) * (b - zb) in i32."""
    sides: list[Value] = []
    for i in (0, 2):
        v, zero = cast(e, n[i], i32), offset(e, n.get(i + 1))
        if zero is not None:
            v = e(t.Map("sub", (v, cast(e, zero, i32))))
        sides.append(v)
    return e(t.Map("mul", tuple(sides)))


def conv_integer(
    n: OnnxNode, e: Emitter, x: Value, w: Value, zx: Value | None, zw: Value | None
) -> Value:
    """The convolution of x - zx with w - zw in i32, exactly. Padding is zero of x - zx: where zx is
    not zero, x is padded with it beforehand."""
    _, strides, low, high, dilations, _ = sliding(n, spatial_axes(x, n), w.type.shape[2:])
    groups = n.attr("group", 1)
    spatial = x.type.rank - 2
    w, zw = recentred(e, w, zw)
    acc = accumulator_of(x, w)
    zx, zw = offset(e, zx), offset(e, zw)
    if zx is not None and any((*low, *high)):
        x = e(t.Pad(x, (0, 0, *low), (0, 0, *high), reshaped(e, zx, ())))
        low = high = (0,) * spatial
    y = e(t.Conv(x, w, strides, low, high, dilations, groups, acc))
    per_channel = (w.type.shape[0], *(1,) * spatial)
    if zw is not None:
        zw = cast(e, zw, acc)
        zw = e(t.Reshape(zw, per_channel if zw.type.size > 1 else ()), label(e, zw))
    if zx is not None:
        axes = tuple(range(1, w.type.rank))
        sums = e(t.Reduce("sum", cast(e, w, acc), axes))
        sums = e(t.Reshape(sums, per_channel), f"{label(e, w)}.sum")
        if zw is not None:
            sums = e(t.Map("sub", (sums, e(t.Map("mul", (zw,), (prod(w.type.shape[1:]),))))))
        zx = cast(e, zx, acc)
        y = e(t.Map("sub", (y, e(t.Map("mul", (sums, zx))))))
    if zw is not None:
        ones = e.fill(1, TensorType((groups, *w.type.shape[1:]), w.type.dtype))
        sums = e(t.Conv(x, ones, strides, low, high, dilations, groups, acc))
        if groups > 1:
            batch, channels, *rest = y.type.shape
            sums = e(t.Reshape(sums, (batch, groups, 1, *rest)))
            sums = e(t.Broadcast(sums, (batch, groups, channels // groups, *rest)))
            sums = e(t.Reshape(sums, y.type.shape))
        y = e(t.Map("sub", (y, e(t.Map("mul", (sums, zw))))))
    return y


def conv_integer_op(n: OnnxNode, e: Emitter) -> Value:
    return conv_integer(n, e, n[0], n[1], n.get(2), n.get(3))


def qlinear_matmul(n: OnnxNode, e: Emitter) -> Value:
    """a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point."""
    a, b = n[0], n[3]
    acc = matmul_integer(e, a, b, n.get(2), n.get(5))
    sa, sb = n[1], n[4]
    if sa.type.rank == 1 and sa.type.size > 1:
        sa = e(t.Reshape(sa, (sa.type.size, 1)), label(e, sa))
    scale = cast(e, product(e, sa, sb), f32)
    scale = e(t.Map("div", (scale, cast(e, n[6], f32))), "scale")
    return requantize(e, acc, scale, n.get(7), n[7].type.dtype)


def qlinear_conv(n: OnnxNode, e: Emitter) -> Value:
    """x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, bias in i32."""
    x, w = n[0], n[3]
    last = bool(n.attr("channels_last", 0))
    if last:
        x = channels_first(e, x)
    acc = conv_integer(n, e, x, w, n.get(2), n.get(5))
    channels = (w.type.shape[0], *(1,) * (x.type.rank - 2))
    bias = n.get(8)
    if bias is not None:
        acc = e(t.Map("add", (acc, e(t.Reshape(bias, channels), label(e, bias)))))
    ws = n[4] if n[4].type.size == 1 else e(t.Reshape(n[4], channels), label(e, n[4]))
    scale = e(t.Map("div", (product(e, n[1], ws), n[6])), "scale")
    y = requantize(e, acc, scale, n.get(7), n[7].type.dtype)
    return channels_last(e, y) if last else y


# ---------------------------------------------------------------------------- com.microsoft


def ms_axis(n: OnnxNode, x: Value, scale: Value) -> int:
    return 0 if scale.type.size == 1 else n.axis(x.type.rank, 1)


def ms_quantize_linear(n: OnnxNode, e: Emitter) -> Value:
    zero_point = n.get(2)
    dtype = zero_point.type.dtype if zero_point is not None else u8
    return quantize(e, n[0], n[1], zero_point, dtype, ms_axis(n, n[0], n[1]))


def ms_dequantize_linear(n: OnnxNode, e: Emitter) -> Value:
    return dequantize(e, n[0], n[1], n.get(2), ms_axis(n, n[0], n[1]))


def matmul_to_float(
    e: Emitter,
    a: Value,
    b: Value,
    scale: Value,
    za: Value | None,
    zb: Value | None,
    bias: Value | None,
) -> Value:
    """The integer product, then t.cast → mul scale → add bias."""
    acc = matmul_integer(e, a, b, za, zb)
    y = e(t.Map("mul", (cast(e, acc, scale.type.dtype), scale)))
    return y if bias is None else e(t.Map("add", (y, bias)))


def matmul_integer_to_float(n: OnnxNode, e: Emitter) -> Value:
    """a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias."""
    scale = product(e, n[3], n[2]) if n[2].type.size == 1 else product(e, n[2], n[3])
    return matmul_to_float(e, n[0], n[1], scale, n.get(4), n.get(5), n.get(6))


def dynamic_quantize_matmul(n: OnnxNode, e: Emitter) -> Value:
    """a in float, b, b_scale, b_zero_point, bias."""
    a, a_scale, za = dynamic_quantize(e, n[0])
    scale = e(t.Map("mul", (n[2], a_scale)), "scale")
    return matmul_to_float(e, a, n[1], scale, za, n.get(3), n.get(4))


def qlinear_binary(fn: str) -> Converter:
    """a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point."""

    def convert(n: OnnxNode, e: Emitter) -> Value:
        a = dequantize(e, n[0], n[1], n.get(2))
        b = dequantize(e, n[3], n[4], n.get(5))
        y = e(t.Map(fn, (a, b)))
        return quantize(e, y, n[6], n.get(7), n[0].type.dtype)

    return convert


def qlinear_unary(fn: Callable[[OnnxNode, Emitter, Value], Value]) -> Converter:
    """x, x_scale, x_zero_point, y_scale, y_zero_point: `fn` in float between the two forms."""

    def convert(n: OnnxNode, e: Emitter) -> Value:
        x = n[0]
        last = bool(n.attr("channels_last", 0))
        if last:
            x = channels_first(e, x)
        y = fn(n, e, dequantize(e, x, n[1], n.get(2)))
        y = quantize(e, y, n[3], n.get(4), x.type.dtype)
        return channels_last(e, y) if last else y

    return convert


def sigmoid(n: OnnxNode, e: Emitter, x: Value) -> Value:
    return e(t.Map("sigmoid", (x,)))


def leaky_relu(n: OnnxNode, e: Emitter, x: Value) -> Value:
    return e(t.Map("leaky_relu", (x,), (float(n.attr("alpha", 0.01)),)))


def softmax(n: OnnxNode, e: Emitter, x: Value) -> Value:
    """Below opset 13 of its own attribute, over all axes from `axis` on."""
    axis = n.axis(x.type.rank, -1)
    if n.attr("opset", 13) >= 13 or axis == x.type.rank - 1:
        return e(t.Softmax(x, axis))
    shape = x.type.shape
    flat = e(t.Reshape(x, (prod(shape[:axis]), prod(shape[axis:]))))
    return e(t.Reshape(e(t.Softmax(flat, 1)), shape))


def global_average(n: OnnxNode, e: Emitter, x: Value) -> Value:
    return e(t.Reduce("mean", x, tuple(range(2, x.type.rank)), keepdims=True))


def reduce_mean(n: OnnxNode, e: Emitter, x: Value) -> Value:
    rank = x.type.rank
    axes = tuple(sorted(n.from_front(a, rank) for a in n.attr("axes", tuple(range(rank)))))
    return e(t.Reduce("mean", x, axes, keepdims=bool(n.attr("keepdims", 1))))


def qlinear_concat(n: OnnxNode, e: Emitter) -> Value:
    """y_scale, y_zero_point, then x, scale and zero point of each part. A part quantised as the
    result is, is taken as it is."""
    scale, zero_point = n[0], n[1]
    wanted = [e.array_of(v) for v in (scale, zero_point)]
    parts: list[Value] = []
    for i in range(2, len(n.inputs), 3):
        x, own = n[i], (n[i + 1], n.get(i + 2))
        found = [None if v is None else e.array_of(v) for v in own]
        same = all(
            a is not None and b is not None and a.item() == b.item()
            for a, b in zip(wanted, found, strict=True)
        )
        if not same:
            x = quantize(e, dequantize(e, x, *own), scale, zero_point, zero_point.type.dtype)
        parts.append(x)
    return e(t.Concat(tuple(parts), n.axis(parts[0].type.rank, 1)))


def qlinear_where(n: OnnxNode, e: Emitter) -> Value:
    """condition, x, x_scale, x_zero_point, y, y_scale, y_zero_point, z_scale, z_zero_point."""
    dtype = n[1].type.dtype
    x = quantize(e, dequantize(e, n[1], n[2], n.get(3)), n[7], n.get(8), dtype)
    y = quantize(e, dequantize(e, n[4], n[5], n.get(6)), n[7], n.get(8), dtype)
    return e(t.Map("where", (n[0], x, y)))


def qgemm(n: OnnxNode, e: Emitter) -> Value:
    """a, a_scale, a_zero_point, b, b_scale, b_zero_point, c in i32, y_scale, y_zero_point."""
    a, b = n[0], n[3]
    if n.attr("transA", 0):
        a = e(t.Transpose(a, (1, 0)))
    if n.attr("transB", 0):
        b = e(t.Transpose(b, (1, 0)), label(e, b))
    acc = matmul_integer(e, a, b, n.get(2), n.get(5))
    if (c := n.get(6)) is not None:
        acc = e(t.Map("add", (acc, c)))
    scale = product(e, n[4], n[1])
    if (alpha := float(n.attr("alpha", 1.0))) != 1.0:
        scale = e(t.Map("mul", (scale, e.constant(alpha, scale.type.dtype))), "scale")
    if n.get(7) is None:
        return e(t.Map("mul", (cast(e, acc, scale.type.dtype), scale)))
    scale = e(t.Map("div", (scale, n[7])), "scale")
    zero_point = n.get(8)
    dtype = zero_point.type.dtype if zero_point is not None else a.type.dtype
    return requantize(e, acc, scale, zero_point, dtype)


def reduce_sum_integer(n: OnnxNode, e: Emitter) -> Value:
    rank = n[0].type.rank
    axes = tuple(sorted(n.from_front(a, rank) for a in n.attr("axes")))
    return e(t.Reduce("sum", cast(e, n[0], i32), axes, keepdims=bool(n.attr("keepdims", 1))))


# ---------------------------------------------------------------------------- packed weights


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """[.., n] bytes  →  [.., n * 8 / bits] numbers, low bits first, in the dtype of that width."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    flat = numbers.reshape(*packed.shape[:-1], -1)
    return flat.astype(to_numpy_dtype(PACKED[bits]))


def unpacked(e: Emitter, x: Value, bits: int) -> Value:
    """Packed bytes as the numbers they hold. Known bytes become a tensor of that width, which
    takes no more memory than they did; others are shifted and masked."""
    if bits not in (2, 4, 8):
        raise ModelError(
            "weights of this width are not supported",
            expected="2, 4 or 8 bits",
            found=f"{bits} bits",
        )
    if bits == 8 or x.type.dtype.bits == bits:
        return x
    *lead, last = x.type.shape
    shape = (*lead, last * 8 // bits)
    const = e.const_of(x)
    if const is not None:
        return e.lazy(
            TensorType(shape, PACKED[bits]), lambda: unpack(const.array(), bits), label(e, x)
        )
    column = e(t.Reshape(x, (*lead, last, 1)))
    shifts = e.constant(range(0, 8, bits), u8)
    numbers = e(t.Map("shift_right", (column, shifts)))
    numbers = e(t.Map("bit_and", (numbers,), ((1 << bits) - 1,)))
    return e(t.Reshape(numbers, shape))


def matmul_nbits(n: OnnxNode, e: Emitter) -> Value:
    """a [.., K] by weights packed [N, blocks, bytes], scales [N, blocks], zero points, g_idx, bias.

    The zero point is 2^(bits - 1) where none is given; packed along blocks, or one number a block.
    """
    a, packed, scales = n[0], n[1], n[2]
    bits, block = n.attr("bits", 4), n.attr("block_size")
    rows, k = n.attr("N"), n.attr("K")
    if n.get(4) is not None:
        raise ModelError(
            "MatMulNBits: g_idx (activation order) is not supported",
            fix="quantise without act-order, or reorder the weights at export",
        )
    if n.attr("weight_prepacked", 0):
        raise ModelError(
            "MatMulNBits: the weights are packed for one GPU's kernel",
            expected="weight_prepacked = 0",
            found=str(n.attr("weight_prepacked")),
        )
    dtype, blocks = a.type.dtype, -(-k // block)
    w = unpacked(e, packed, bits)
    w = e(t.Reshape(w, (rows, blocks, block)), label(e, packed))
    w = e(t.Cast(w, dtype), fold=False)
    zero_point = n.get(3)
    if zero_point is None:
        w = e(t.Map("sub", (w,), (float(2 ** (bits - 1)),)))
    else:
        if not zero_point.type.dtype.is_float:
            zero_point = unpacked(e, zero_point, bits)
            *_, last = zero_point.type.shape
            if zero_point.type.rank == 1:
                last = zero_point.type.size // rows
                zero_point = e(t.Reshape(zero_point, (rows, last)), label(e, zero_point))
            if last != blocks:
                whole = t.Slice(zero_point, (0, 0), (rows, blocks), (1, 1))
                zero_point = e(whole, label(e, zero_point))
        zero_point = e(t.Reshape(zero_point, (rows, blocks, 1)), label(e, zero_point))
        if zero_point.type.dtype != dtype:
            zero_point = e(t.Cast(zero_point, dtype), fold=False)
        w = e(t.Map("sub", (w, zero_point)))
    scales = e(t.Reshape(cast(e, scales, dtype), (rows, blocks, 1)), label(e, scales))
    w = e(t.Reshape(e(t.Map("mul", (w, scales))), (rows, blocks * block)))
    if blocks * block != k:
        w = e(t.Slice(w, (0, 0), (rows, k), (1, 1)))
    y = times(e, a, e(t.Transpose(w, (1, 0))))
    bias = n.get(5)
    return y if bias is None else e(t.Map("add", (y, bias)))


def times(e: Emitter, a: Value, b: Value) -> Value:
    """a [.., k] by b [k, n], whatever a's rank."""
    if a.type.rank != 1:
        return e(t.Matmul(a, b))
    row = e(t.Reshape(a, (1, a.type.size)))
    return e(t.Reshape(e(t.Matmul(row, b)), (b.type.shape[-1],)))


NF4 = (  # the 4-bit normal float code book: Dettmers et al., QLoRA, 2023, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = (  # bitsandbytes' e2m1 variant, scaled so that the largest is one
    *(0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25),
    *(-0.0, -0.0052083333, -0.6666667, -1.0, -0.3333333, -0.5, -0.1666667, -0.25),
)


def matmul_bnb4(n: OnnxNode, e: Emitter) -> Value:
    """a by weights [N, K] as 4-bit indices into a code book, high half of a byte first, one
    absolute maximum a block of the flattened weights."""
    a, packed, absmax = n[0], n[1], n[2]
    rows, k, block = n.attr("N"), n.attr("K"), n.attr("block_size")
    const = e.const_of(packed)
    if const is None:
        raise ModelError("MatMulBnb4: the weights are computed at run time", expected="a constant")
    if rows * k % block:
        raise ModelError(
            "MatMulBnb4: blocks do not divide the weights",
            expected=f"N * K a multiple of {block}",
            found=f"N={rows}, K={k}",
        )

    def codes() -> np.ndarray:
        array = const.array().reshape(-1, 1)
        halves = (array >> np.array([4, 0], np.uint8)) & 15
        flat = halves.reshape(-1)[: rows * k]
        return flat.reshape(-1, block).astype(to_numpy_dtype(u4))

    blocks = rows * k // block
    w = e.lazy(TensorType((blocks, block), u4), codes, label(e, packed))
    book = e.constant(FP4 if n.attr("quant_type") == 0 else NF4, a.type.dtype, "codebook")
    w = e(t.Gather(book, e(t.Cast(w, i32), fold=False)))
    w = e(t.Map("mul", (w, e(t.Reshape(absmax, (blocks, 1)), label(e, absmax)))))
    w = e(t.Reshape(w, (rows, k)))
    if n.attr("transB", 1):
        w = e(t.Transpose(w, (1, 0)))
    return times(e, a, w)


def gather_block_quantized(n: OnnxNode, e: Emitter) -> Value:
    """Rows of a block-quantised table (data, indices, scales, zero points), dequantised."""
    data, indices, scales, zero_point = n[0], n[1], n[2], n.get(3)
    bits, packed = n.attr("bits", 4), data.type.dtype == u8
    if packed:
        data = unpacked(e, data, bits)
    rank = data.type.rank
    taken, blocked = n.axis(rank, 0, "gather_axis"), n.axis(rank, 1, "quantize_axis")
    block = n.attr("block_size", 128) or data.type.shape[blocked]
    if packed and zero_point is not None and bits != 8:
        zero_point = unpacked(e, zero_point, bits)
        if zero_point.type.shape != scales.type.shape:
            whole = t.Slice(zero_point, (0,) * rank, scales.type.shape, (1,) * rank)
            zero_point = e(whole, label(e, zero_point))
    if taken == blocked:
        raise ModelError(
            "GatherBlockQuantized: gathers along the axis that blocks run along",
            expected="gather_axis other than quantize_axis",
            found=f"both {taken}",
        )

    def rows(v: Value) -> Value:
        if v.type.shape[taken] == 1 != data.type.shape[taken]:
            return e(t.Reshape(v, tuple(m for i, m in enumerate(v.type.shape) if i != taken)))
        return e(t.Gather(v, indices, taken), fold=False)

    x, scale = rows(data), rows(scales)
    axis = blocked if blocked < taken else blocked + indices.type.rank - 1
    if zero_point is None:
        zero = 2 ** (bits - 1) if packed else 0
        zeros = e.fill(zero, TensorType((), x.type.dtype)) if zero else None
    else:
        zeros = rows(zero_point)
    return block_dequantize(e, x, scale, zeros, axis, block)


def block_dequantize(
    e: Emitter, x: Value, scale: Value, zeros: Value | None, axis: int, block: int
) -> Value:
    """`dequantize` where the zero point may be one number for all blocks."""
    if zeros is None or zeros.type.rank:
        return dequantize(e, x, scale, zeros, axis, block, op="GatherBlockQuantized")
    shifted = e(t.Cast(x, scale.type.dtype), fold=False)
    shifted = e(t.Map("sub", (shifted, cast(e, zeros, scale.type.dtype))))
    blocks = Blocks(e, "GatherBlockQuantized", shifted.type, scale.type, axis, block)
    y = e(t.Map("mul", (blocks.split(shifted), blocks.spread(scale))))
    return blocks.join(y)


def qembed_layer_normalization(n: OnnxNode, e: Emitter) -> Results:
    """Rows of quantised tables, dequantised and added, then layer norm: com.microsoft's
    EmbedLayerNormalization with its tables, gamma and beta in 8 bits."""
    ids, segments = n[0], n.get(1)
    length, hidden = ids.type.shape[1], n[2].type.shape[1]

    def rows(i: int, indices: Value, scale: int, zero: int) -> Value:
        return dequantize(e, e(t.Gather(n[i], indices), fold=False), n[scale], n.get(zero))

    position = e(t.Slice(n[3], (0, 0), (length, hidden), (1, 1)), label(e, n[3]))
    y = e(t.Map("add", (rows(2, ids, 8, 13), dequantize(e, position, n[9], n.get(14)))))
    if segments is not None:
        y = e(t.Map("add", (y, rows(4, segments, 10, 15))))
    gamma = dequantize(e, n[5], n[11], n.get(16))
    beta = dequantize(e, n[6], n[12], n.get(17))
    y = e(t.Normalize(y, (2,), gamma, beta, float(n.attr("epsilon", 1e-12))))
    return y, mask_lengths(e, n.get(7), ids.type.shape[0]) if n.has_output(1) else None


# ---------------------------------------------------------------------------- recurrent


def dynamic_quantize_lstm(n: OnnxNode, e: Emitter) -> Results:
    """x, w [d, in, 4h], r [d, h, 4h], bias, lengths, h0, c0, peepholes, then scale and zero point
    of w and of r. x is quantised once over all its steps, h at each; products are of 8-bit
    operands. An LSTM otherwise."""
    if n.get(7) is not None or n.attr("input_forget", 0):
        raise ModelError(
            "DynamicQuantizeLSTM: peepholes and input_forget are not supported",
            fix="quantise the model without this node",
        )
    x, w, r = n[0], n[1], n[2]
    way = str(n.attr("direction", "forward")).lower()
    directions = 2 if way == "bidirectional" else 1
    batch, hidden = x.type.shape[1], r.type.shape[1]
    functions = recurrent.activations(n, ("sigmoid", "tanh", "tanh"), directions)
    zero = e.fill(0, TensorType((batch, hidden), x.type.dtype))
    quantized, x_scale, zx = dynamic_quantize(e, x)
    lengths = n.get(4)
    if lengths is not None:
        lengths = e(t.Reshape(e(t.Cast(lengths, i64)), (batch, 1)))
    finals: list[tuple[Value, ...]] = []
    shown: list[Value] = []
    for d in range(directions):
        own, own_r, w_scale, zw, r_scale, zr = (
            recurrent.pick(v, d, 0, e) for v in (w, r, n[8], n[9], n[10], n[11])
        )
        scale = e(t.Map("mul", (w_scale, x_scale)), "scale")
        gates = matmul_to_float(e, quantized, own, scale, zx, zw, None)
        if (bias := n.get(3)) is not None:
            both = recurrent.pick(bias, d, 0, e)
            halves = (recurrent.part(both, i, 4 * hidden, e) for i in (0, 1))
            gates = e(t.Map("add", (gates, e(t.Map("add", tuple(halves))))))

        def cell(
            parts: recurrent.Weights,
            f: list[recurrent.Activation],
            now: Value,
            state: tuple[Value, ...],
            inside: Emitter,
            weights: tuple[Value, Value, Value] = (own_r, r_scale, zr),
        ) -> tuple[Value, ...]:
            own_r, r_scale, zr = weights
            h, scale, zh = dynamic_quantize(inside, state[0])
            scale = inside(t.Map("mul", (r_scale, scale)))
            product = matmul_to_float(inside, h, own_r, scale, zh, zr, None)
            added = inside(t.Map("add", (now, product)))
            i, o, forget, c = (recurrent.part(added, k, hidden, inside) for k in range(4))
            kept = inside(t.Map("mul", (f[0](forget, inside), state[1])))
            new = inside(t.Map("mul", (f[0](i, inside), f[1](c, inside))))
            memory = inside(t.Map("add", (kept, new)))
            shown = f[2](memory, inside)
            return inside(t.Map("mul", (f[0](o, inside), shown))), memory

        init = tuple(
            zero if v is None else recurrent.pick(v, d, 0, e) for v in (n.get(5), n.get(6))
        )
        reverse = way == "reverse" or d == 1
        direction = recurrent.Direction(
            *(cell, functions[d], recurrent.Weights(gates, (), None, ()), init, lengths, reverse, 0)
        )
        name = f"{n.name}.{'reverse' if reverse else 'forward'}"
        final, ys = direction.run(name, n.has_output(0), e)
        finals.append(final)
        shown += [] if ys is None else [e(t.Reshape(ys, (ys.type.shape[0], 1, batch, hidden)))]

    y = None
    if n.has_output(0):
        y = shown[0] if directions == 1 else e(t.Concat(tuple(shown), 1))
    states = [tuple(e(t.Reshape(final[i], (1, batch, hidden))) for final in finals) for i in (0, 1)]
    return y, *(s[0] if directions == 1 else e(t.Concat(s, 0)) for s in states)


CONVERTERS: dict[str, Converter] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "MatMulInteger": matmul_integer_op,
    "ConvInteger": conv_integer_op,
    "QLinearMatMul": qlinear_matmul,
    "QLinearConv": qlinear_conv,
    **{
        f"com.microsoft::{name}": converter
        for name, converter in {
            "QuantizeLinear": ms_quantize_linear,
            "DequantizeLinear": ms_dequantize_linear,
            "MatMulIntegerToFloat": matmul_integer_to_float,
            "DynamicQuantizeMatMul": dynamic_quantize_matmul,
            "MatMulInteger16": matmul_integer16,
            "MulInteger": mul_integer,
            "ReduceSumInteger": reduce_sum_integer,
            "QLinearAdd": qlinear_binary("add"),
            "QLinearMul": qlinear_binary("mul"),
            "QLinearSigmoid": qlinear_unary(sigmoid),
            "QLinearLeakyRelu": qlinear_unary(leaky_relu),
            "QLinearSoftmax": qlinear_unary(softmax),
            "QLinearGlobalAveragePool": qlinear_unary(global_average),
            "QLinearAveragePool": qlinear_unary(mean_pool),
            "QLinearReduceMean": qlinear_unary(reduce_mean),
            "QLinearConcat": qlinear_concat,
            "QLinearWhere": qlinear_where,
            "QLinearConv": qlinear_conv,
            "QGemm": qgemm,
            "MatMulNBits": matmul_nbits,
            "MatMulBnb4": matmul_bnb4,
            "GatherBlockQuantized": gather_block_quantized,
            "QEmbedLayerNormalization": qembed_layer_normalization,
            "DynamicQuantizeLSTM": dynamic_quantize_lstm,
        }.items()
    },
}
