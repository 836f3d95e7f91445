"""Quantised operators of com.microsoft, as onnxruntime's quantisers write them: see quant.py for
the forms, which these keep to.

Weights packed several numbers to a byte become tensors of narrow dtypes, which take no more memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import (
    cast,
    channels_first,
    channels_last,
    first_cells,
    matrix_product,
    product,
    softmax_from,
)
from gpuir.frontends.onnx import contraction, pointwise, reduction
from gpuir.frontends.onnx.contrib import mask_lengths, mixture
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.frontends.onnx.quant import (
    Codes,
    ScaleLayout,
    dequantize,
    dequantize_linear,
    dynamic_quantize,
    matmul_integer,
    matmul_to_float,
    offset,
    qlinear_conv,
    quantize,
    quantize_linear,
    requantize,
)
from gpuir.interp import to_numpy_dtype
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, f4e2m1, i32, u2, u4, u8
from gpuir.ops import tensor as t

PACKED = {4: u4, 2: u2}  # the dtype of numbers packed so many bits each


# ---------------------------------------------------------------------------- 8 bits


def matmul_integer_to_float(n: OnnxNode, e: Emitter) -> Value:
    """a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias."""
    scale = product(e, n[3], n[2]) if n[2].type.size == 1 else product(e, n[2], n[3])
    a, b = Codes(n[0], n.get(4)), Codes(n[1], n.get(5))
    return matmul_to_float(e, a, b, scale, n.get(6))


def dynamic_quantize_matmul(n: OnnxNode, e: Emitter) -> Value:
    """a in float, b, b_scale, b_zero_point, bias."""
    a, a_scale = dynamic_quantize(e, n[0])
    scale = e(t.Map("mul", (n[2], a_scale)), "scale")
    return matmul_to_float(e, a, Codes(n[1], n.get(3)), scale, n.get(4))


def matmul_integer16(n: OnnxNode, e: Emitter) -> Value:
    return e(t.Matmul(n[0], n[1], i32))


def mul_integer(n: OnnxNode, e: Emitter) -> Value:
    """(a - za) * (b - zb) in i32."""
    sides: list[Value] = []
    for i in (0, 2):
        v, zero = cast(e, n[i], i32), offset(e, n.get(i + 1))
        if zero is not None:
            v = e.map("sub", v, cast(e, zero, i32))
        sides.append(v)
    return e.map("mul", *sides)


def qlinear_binary(n: OnnxNode, e: Emitter, fn: str) -> Value:
    """a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point."""
    a = dequantize(e, n[0], n[1], n.get(2))
    b = dequantize(e, n[3], n[4], n.get(5))
    y = e.map(fn, a, b)
    return quantize(e, y, n[6], n.get(7), n[0].type.dtype)


def qlinear_unary(n: OnnxNode, e: Emitter, fn: Converter) -> Value:
    """x, x_scale, x_zero_point, y_scale, y_zero_point: `fn` in float between the two forms."""
    x = n[0]
    last = bool(n.attr("channels_last", 0))
    if last:
        x = channels_first(e, x)
    y = fn(replace(n, inputs=(dequantize(e, x, n[1], n.get(2)),)), e)
    assert isinstance(y, Value)
    y = quantize(e, y, n[3], n.get(4), x.type.dtype)
    return channels_last(e, y) if last else y


sigmoid = partial(pointwise.elementwise, fn="sigmoid")
leaky_relu = partial(pointwise.with_settings, fn="leaky_relu", alpha=0.01)


def softmax(n: OnnxNode, e: Emitter) -> Value:
    """Below opset 13 of its own attribute, over all axes from `axis` on."""
    x, axis = n[0], n.axis(n[0].type.rank, -1)
    return e(t.Softmax(x, axis)) if n.attr("opset", 13) >= 13 else softmax_from(e, x, axis)


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
            a is not None and b is not None and a.size == b.size == 1 and a.item() == b.item()
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
    return e.map("where", n[0], x, y)


def qgemm(n: OnnxNode, e: Emitter) -> Value:
    """a, a_scale, a_zero_point, b, b_scale, b_zero_point, c in i32, y_scale, y_zero_point."""
    a, b = n[0], n[3]
    if n.attr("transA", 0):
        a = e(t.Transpose(a, (1, 0)))
    if n.attr("transB", 0):
        b = e(t.Transpose(b, (1, 0)))
    acc = matmul_integer(e, Codes(a, n.get(2)), Codes(b, n.get(5)))
    if (c := n.get(6)) is not None:
        acc = e.map("add", acc, c)
    scale = product(e, n[4], n[1])
    if (alpha := float(n.attr("alpha", 1.0))) != 1.0:
        scale = e(t.Map("mul", (scale, e.constant(alpha, scale.type.dtype))), "scale")
    if n.get(7) is None:
        return e.map("mul", cast(e, acc, scale.type.dtype), scale)
    scale = e(t.Map("div", (scale, n[7])), "scale")
    zero_point = n.get(8)
    dtype = zero_point.type.dtype if zero_point is not None else a.type.dtype
    return requantize(e, acc, scale, zero_point, dtype)


def reduce_sum_integer(n: OnnxNode, e: Emitter) -> Value:
    return reduction.reduction(replace(n, inputs=(cast(e, n[0], i32),)), e, "sum")


def qembed_layer_normalization(n: OnnxNode, e: Emitter) -> Results:
    """Rows of quantised tables, dequantised and added, then layer norm: com.microsoft's
    EmbedLayerNormalization with its tables, gamma and beta in 8 bits."""
    ids, segments = n[0], n.get(1)
    length, hidden = ids.type.shape[1], n[2].type.shape[1]

    def rows(i: int, indices: Value, scale: int, zero: int) -> Value:
        return dequantize(e, e(t.Gather(n[i], indices), fold=False), n[scale], n.get(zero))

    position = e(t.Slice(n[3], (0, 0), (length, hidden), (1, 1)))
    y = e.map("add", rows(2, ids, 8, 13), dequantize(e, position, n[9], n.get(14)))
    if segments is not None:
        y = e.map("add", y, rows(4, segments, 10, 15))
    gamma = dequantize(e, n[5], n[11], n.get(16))
    beta = dequantize(e, n[6], n[12], n.get(17))
    y = e(t.Normalize(y, axes=(2,), scale=gamma, bias=beta, eps=float(n.attr("epsilon", 1e-12))))
    return y, mask_lengths(e, n.get(7), ids.type.shape[0]) if n.has_output(1) else None


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
            "this number of bits for weights is not supported",
            expected="2, 4 or 8 bits",
            found=f"{bits} bits",
        )
    if bits == 8 or x.type.dtype.bits == bits:
        return x
    if not x.type.rank:
        raise ModelError("the packed weights are a scalar", found=str(x.type))
    *lead, last = x.type.shape
    shape = (*lead, last * 8 // bits)
    const = e.const_of(x)
    if const is not None:
        return e.lazy(
            TensorType(shape, PACKED[bits]), lambda: unpack(const.array(), bits), origin=const
        )
    column = e(t.Reshape(x, (*lead, last, 1)))
    shifts = e.constant(range(0, 8, bits), u8)
    numbers = e.map("shift_right", column, shifts)
    numbers = e.map("bit_and", numbers, (1 << bits) - 1)
    return e(t.Reshape(numbers, shape))


def matmul_nbits(n: OnnxNode, e: Emitter) -> Value:
    """a [.., K] by weights packed [N, blocks, bytes], scales [N, blocks], zero points, g_idx, bias.

    The zero point is 2^(bits - 1) where none is given; packed along blocks, or one number a block.
    """
    a, packed, scales = n[0], n[1], n[2]
    bits, block = n.attr("bits", 4), n.attr("block_size")
    rows, k = n.attr("N"), n.attr("K")
    if n.get(4) is not None:
        raise n.refused(
            "g_idx (activation order) is not supported",
            fix="quantise without act-order, or reorder the weights when you export",
        )
    if n.attr("weight_prepacked", 0):
        raise n.refused(
            "the weights are packed for the kernel of one GPU",
            "weight_prepacked = 0",
            n.attr("weight_prepacked"),
        )
    dtype, blocks = a.type.dtype, -(-k // block)
    w = unpacked(e, packed, bits)
    w = e(t.Reshape(w, (rows, blocks, block)))
    zero_point = n.get(3)
    if zero_point is not None and not zero_point.type.dtype.is_float:
        zero_point = unpacked(e, zero_point, bits)
        if zero_point.type.rank == 1:
            zero_point = e(t.Reshape(zero_point, (rows, zero_point.type.size // rows)))
        zero_point = first_cells(e, zero_point, (rows, blocks))
    scales = e(t.Reshape(scales, (rows, blocks)))
    w = of_blocks(e, w, scales, zero_point, bits=bits, dtype=dtype)
    w = e(t.Reshape(w, (rows, blocks * block)))
    w = first_cells(e, w, (rows, k))
    y = matrix_product(e, a, e(t.Transpose(w, (1, 0))))
    bias = n.get(5)
    return y if bias is None else e.map("add", y, bias)


def of_blocks(
    e: Emitter, codes: Value, scales: Value, zero_point: Value | None, *, bits: int, dtype: DType
) -> Value:
    """[.., blocks, block] numbers less their block's zero point, or the middle of what `bits` hold,
    times its scale: both [.., blocks]."""
    w = e(t.Cast(codes, dtype), fold=False)
    each = (*codes.type.shape[:-1], 1)
    if zero_point is None:
        w = e.map("sub", w, float(2 ** (bits - 1)))
    else:
        zero_point = e(t.Reshape(zero_point, each))
        if zero_point.type.dtype != dtype:
            zero_point = e(t.Cast(zero_point, dtype), fold=False)
        w = e.map("sub", w, zero_point)
    scales = e(t.Reshape(cast(e, scales, dtype), each))
    return e.map("mul", w, scales)


def quantised_experts(n: OnnxNode, e: Emitter) -> Value:
    """x [.., hidden], router scores, then weights, scales and biases of fc1, fc2, fc3, zero points
    of the three, and the scores that shares are taken from where those that choose are others.

    onnxruntime normalises shares over the k best whatever normalize_routing_weights says, unless
    they come from scores of their own.
    """
    layers = {
        "int": expert_weight,
        "fp8": expert_f8_weight,
        "fp4": expert_f4_weight,
        "nvfp4": expert_f4_weight,
    }
    kind = n.choice("quant_type", "int", layers)
    k = int(n.attr("k", 1))
    best, which = e.add(t.TopK(n[1], k, 1))
    if (own := n.get(14)) is None:
        shares = e(t.Softmax(best, 1))
    else:
        shares = e(t.GatherElements(own, which, 1))
        if n.attr("normalize_routing_weights", 0):
            total = e(t.Reduce("sum", shares, (1,), keepdims=True))
            shares = e.map("div", shares, total)
    stored = (n[2], n[5], n.get(8))
    matrices = (None if v is None else layers[kind](n, e, i, v) for i, v in enumerate(stored))
    fc1, fc2, fc3 = ((w, n.get(4 + 3 * i)) for i, w in enumerate(matrices))
    return mixture(n, e, which, shares, (fc1, fc2, fc3))


def expert_weight(n: OnnxNode, e: Emitter, i: int, packed: Value) -> Value:
    """Layer i of all experts from its packed numbers: a scale a row, or a block of a row."""
    scales, zero_point = n[3 + 3 * i], n.get(11 + i)
    bits = int(n.attr(f"fc{i + 1}_expert_weight_bits", 0) or n.attr("expert_weight_bits", 4))
    codes = unpacked(e, packed, bits)
    experts, rows, cells = codes.type.shape
    blocks = scales.type.size // (experts * rows)
    codes = e(t.Reshape(codes, (experts, rows, blocks, cells // blocks)))
    if zero_point is not None:
        zero_point = unpacked(e, zero_point, bits)
        each = (experts, rows, blocks) if zero_point.type.rank == 3 else (experts, rows)
        zero_point = e(t.Slice(zero_point, (0,) * len(each), each, (1,) * len(each)))
        zero_point = e(t.Reshape(zero_point, (experts, rows, blocks)))
    scales = e(t.Reshape(scales, (experts, rows, blocks)))
    w = of_blocks(e, codes, scales, zero_point, bits=bits, dtype=n[0].type.dtype)
    return e(t.Reshape(w, (experts, rows, cells)))


def expert_f8_weight(n: OnnxNode, e: Emitter, i: int, stored: Value) -> Value:
    """Layer i of all experts from its f8 numbers: a scale an expert, or a square block."""
    block, dtype = int(n.attr("block_size", 0)), n[0].type.dtype
    w = e(t.Cast(stored, dtype), fold=False)
    experts, rows, cells = stored.type.shape
    if block <= 0:
        return e.map("mul", w, global_scale(n, e, i, 2))
    if rows % block or cells % block:
        raise n.refused(
            "the block size does not divide the shape of the weights",
            f"rows and columns that are multiples of {block}",
            stored.type,
        )
    w = e(t.Reshape(w, (experts, rows // block, block, cells // block, block)))
    each = (experts, rows // block, 1, cells // block, 1)
    scales = e(t.Reshape(cast(e, n[3 + 3 * i], dtype), each))
    return e(t.Reshape(e.map("mul", w, scales), (experts, rows, cells)))


def expert_f4_weight(n: OnnxNode, e: Emitter, i: int, packed: Value) -> Value:
    """Layer i of all experts from its f4e2m1 numbers: a scale a block of a row, one an expert."""
    scales, dtype = n[3 + 3 * i], n[0].type.dtype
    codes = e(t.Bitcast(unpacked(e, packed, 4), f4e2m1))
    experts, rows, cells = codes.type.shape
    blocks = scales.type.shape[-1]
    codes = e(t.Reshape(codes, (experts, rows, blocks, cells // blocks)))
    scales = e(t.Reshape(scales, (experts, rows, blocks, 1)))
    w = e.map("mul", *(e(t.Cast(v, dtype), fold=False) for v in (codes, scales)))
    w = e.map("mul", w, global_scale(n, e, i, 3))
    return e(t.Reshape(w, (experts, rows, cells)))


def global_scale(n: OnnxNode, e: Emitter, i: int, axes: int) -> Value:
    """The scale of each expert's layer i, as a number to `axes` axes of weights."""
    if i == 2:
        raise n.refused("a global scale for fc3 is not supported", "fc1 and fc2, or blocks in f8")
    scale = n[15 + i]
    shape = (scale.type.size, *(1,) * axes)
    return e(t.Reshape(cast(e, scale, n[0].type.dtype), shape))


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
        raise n.refused("the weights must be constant, but are computed at run time", "a constant")
    if rows * k % block:
        raise n.refused(
            "the block size does not divide the number of weights",
            f"N * K a multiple of {block}",
            f"N={rows}, K={k}",
        )

    def codes() -> np.ndarray:
        array = const.array().reshape(-1, 1)
        halves = (array >> np.array([4, 0], np.uint8)) & 15
        flat = halves.reshape(-1)[: rows * k]
        return flat.reshape(-1, block).astype(to_numpy_dtype(u4))

    blocks = rows * k // block
    w = e.lazy(TensorType((blocks, block), u4), codes, origin=const)
    book = e.constant(FP4 if n.attr("quant_type") == 0 else NF4, a.type.dtype, "codebook")
    w = e(t.Gather(book, e(t.Cast(w, i32), fold=False)))
    w = e.map("mul", w, e(t.Reshape(absmax, (blocks, 1))))
    w = e(t.Reshape(w, (rows, k)))
    if n.attr("transB", 1):
        w = e(t.Transpose(w, (1, 0)))
    return matrix_product(e, a, w)


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
        zero_point = first_cells(e, zero_point, scales.type.shape)
    if taken == blocked:
        raise n.refused(
            "gather_axis and quantize_axis must differ", "two different axes", f"both {taken}"
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
    return block_dequantize(e, x, scale, zeros, axis=axis, block=block)


def block_dequantize(
    e: Emitter, x: Value, scale: Value, zeros: Value | None, *, axis: int, block: int
) -> Value:
    """`dequantize` where the zero point may be one number for all blocks."""
    op = "GatherBlockQuantized"
    if zeros is None or zeros.type.rank:
        return dequantize(e, x, scale, zeros, axis=axis, block=block, op=op)
    shifted = e(t.Cast(x, scale.type.dtype), fold=False)
    shifted = e.map("sub", shifted, cast(e, zeros, scale.type.dtype))
    blocks = ScaleLayout(e=e, op=op, x=shifted.type, scale=scale.type, axis=axis, size=block)
    y = e.map("mul", blocks.split(shifted), blocks.spread(scale))
    return blocks.join(y)


CONVERTERS: dict[str, Converter] = {
    f"com.microsoft::{name}": converter
    for name, converter in {
        "QuantizeLinear": quantize_linear,
        "DequantizeLinear": dequantize_linear,
        "MatMulIntegerToFloat": matmul_integer_to_float,
        "DynamicQuantizeMatMul": dynamic_quantize_matmul,
        "MatMulInteger16": matmul_integer16,
        "MulInteger": mul_integer,
        "ReduceSumInteger": reduce_sum_integer,
        "QLinearAdd": partial(qlinear_binary, fn="add"),
        "QLinearMul": partial(qlinear_binary, fn="mul"),
        "QLinearSigmoid": partial(qlinear_unary, fn=sigmoid),
        "QLinearLeakyRelu": partial(qlinear_unary, fn=leaky_relu),
        "QLinearSoftmax": partial(qlinear_unary, fn=softmax),
        "QLinearGlobalAveragePool": partial(qlinear_unary, fn=contraction.global_average_pool),
        "QLinearAveragePool": partial(qlinear_unary, fn=contraction.average_pool),
        "QLinearReduceMean": partial(qlinear_unary, fn=partial(reduction.reduction, fn="mean")),
        "QLinearConcat": qlinear_concat,
        "QLinearWhere": qlinear_where,
        "QLinearConv": qlinear_conv,
        "QGemm": qgemm,
        "MatMulNBits": matmul_nbits,
        "QMoE": quantised_experts,
        "MatMulBnb4": matmul_bnb4,
        "GatherBlockQuantized": gather_block_quantized,
        "QEmbedLayerNormalization": qembed_layer_normalization,
    }.items()
}
