"""Operators of com.microsoft: what onnxruntime's optimisers fuse, and its own additions.

What only another layout, sum or activation sets apart from an operator of ai.onnx is that
operator's tensor op with the rest around it. Attention and quantised operators are elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import log, prod

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import (
    cast,
    channels_first,
    channels_last,
    experts,
    part,
    reshaped,
    softmax_from,
    split_heads,
    transposed,
)
from gpuir.frontends.onnx import contraction, layout, pointwise, sampling
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.ir.errors import ModelError, nearest
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, bool_, i32, i64, u32
from gpuir.ops import tensor as t

# ---------------------------------------------------------------------------- activations


def activated(e: Emitter, x: Value, name: str, settings: tuple[float, ...] = ()) -> Value:
    """x after a fused activation, known by its ONNX name; `settings` in onnxruntime's order."""
    plain = {
        "Relu": "relu",
        "Tanh": "tanh",
        "Sigmoid": "sigmoid",
        "Softplus": "softplus",
        "HardSwish": "hard_swish",
        "Gelu": "gelu",
        "FastGelu": "gelu_tanh",
        "Swish": "silu",
        "Silu": "silu",
    }
    with_settings = {
        "LeakyRelu": ("leaky_relu", (0.01,)),
        "Elu": ("elu", (1.0,)),
        "HardSigmoid": ("hard_sigmoid", (0.2, 0.5)),
        "Clip": ("clip", (-3.4028235e38, 3.4028235e38)),
    }
    if name in ("", "Identity"):
        return x
    if name in plain:
        return e.map(plain[name], x)
    if name in with_settings:
        fn, default = with_settings[name]
        given = (*settings[: len(default)], *default[len(settings) :])
        return e.map(fn, x, *map(float, given))
    raise ModelError(
        f"the fused activation {name!r} is unknown", fix=nearest(name, {**plain, **with_settings})
    )


def plus(e: Emitter, x: Value, *terms: Value | None) -> Value:
    """x and those of `terms` that are there, added up."""
    for v in terms:
        if v is not None:
            x = e.map("add", x, v)
    return x


def with_bias(n: OnnxNode, e: Emitter, fn: str) -> Value:
    """fn(x + bias), the bias optional."""
    return e.map(fn, plus(e, n[0], n.get(1)))


def bias_add(n: OnnxNode, e: Emitter) -> Value:
    return plus(e, n[0], n[1], n.get(2))


def bias_split_gelu(n: OnnxNode, e: Emitter) -> Value:
    """The left half of x + bias times the gelu of the right half."""
    x = plus(e, n[0], n[1])
    half, last = x.type.shape[-1] // 2, x.type.rank - 1
    left, right = (part(e, x, last, i * half, half) for i in (0, 1))
    return e.map("mul", left, e.map("gelu", right))


def bias_dropout(n: OnnxNode, e: Emitter) -> Results:
    """data + bias + residual, then ratio and training_mode: nothing is dropped in inference."""
    refuse_training(n, 4)
    y = plus(e, n[0], n[1], n.get(2))
    return y, kept_mask(n, e, y.type)


def bitmask_dropout(n: OnnxNode, e: Emitter) -> Results:
    """data, ratio, training_mode."""
    refuse_training(n, 2)
    return n[0], kept_mask(n, e, n[0].type)


def refuse_training(n: OnnxNode, i: int) -> None:
    mode = n.known(i)
    if n.get(i) is not None and (mode is None or mode.any()):
        raise n.refused("training_mode is not supported", fix="export the model for inference")


def kept_mask(n: OnnxNode, e: Emitter, type: TensorType) -> Value | None:
    """A dropout mask that keeps everything, packed 32 to a number in the bitmask operators."""
    if not n.has_output(1):
        return None
    if n.op.startswith("Bitmask"):
        return e.fill(2**32 - 1, TensorType((-(-type.size // 32),), u32))
    return e.fill(True, type.with_dtype(bool_))


def bias_softmax(n: OnnxNode, e: Emitter) -> Value:
    """softmax(data + bias) over all axes from `axis` on."""
    x, bias = n[0], n[1]
    axis = n.axis(x.type.rank, 1)
    if not n.attr("is_inner_broadcast", 0) and bias.type.rank == x.type.rank:
        bias = reshaped(e, bias, (1,) * axis + bias.type.shape[axis:]) if bias.type.size == prod(
            bias.type.shape[axis:]
        ) else bias  # fmt: skip
    x = plus(e, x, bias)
    return softmax_from(e, x, axis)


def complex_product(n: OnnxNode, e: Emitter, conjugate: bool) -> Value:
    """a * b, or a times b's conjugate, of pairs (real, imaginary) along the last axis."""
    a, b = n[0], n[1]
    (ar, ai), (br, bi) = ([part(e, x, x.type.rank - 1, i, 1) for i in (0, 1)] for x in (a, b))

    def mix(fn: str, *factors: Value) -> Value:
        p, q, r, s = factors
        return e.map(fn, e.map("mul", p, q), e.map("mul", r, s))

    real = mix("add" if conjugate else "sub", ar, br, ai, bi)
    imaginary = mix("sub" if conjugate else "add", ai, br, ar, bi)
    return e(t.Concat((real, imaginary), real.type.rank - 1))


# ---------------------------------------------------------------------------- norms


def normalized(
    n: OnnxNode, e: Emitter, x: Value, bias: Value | None = None, *, center: bool = True
) -> tuple[Value, Value | None, Value | None]:
    """x normalised over its last axis by the scale n[2], and its mean and inverse deviation where
    they are read."""
    last, eps = (x.type.rank - 1,), float(n.attr("epsilon", 1e-12))
    narrow, scale = x.type.dtype, n[2]
    wide = cast(e, x, scale.type.dtype)
    y = e(t.Normalize(wide, axes=last, scale=scale, bias=bias, eps=eps, center=center))
    mean = inverse = None
    if n.has_output(1):
        mean = e(t.Reduce("mean", x, last, keepdims=True))
    if n.has_output(2):
        rest = x if not center else e.map("sub", x, e(t.Reduce("mean", x, last, keepdims=True)))
        var = e(t.Reduce("mean", e.map("mul", rest, rest), last, keepdims=True))
        inverse = e.map("rsqrt", e.map("add", var, eps))
    return cast(e, y, narrow), mean, inverse


def skip_layer_norm(n: OnnxNode, e: Emitter) -> Results:
    """input, skip, gamma, beta, bias. The sum is a result too, where it is read."""
    x = plus(e, n[0], n[1], n.get(4))
    return *normalized(n, e, x, n.get(3)), x


def skip_rms_norm(n: OnnxNode, e: Emitter) -> Results:
    """input, skip, gamma, bias."""
    x = plus(e, n[0], n[1], n.get(3))
    return *normalized(n, e, x, center=False), x


def rms_norm(n: OnnxNode, e: Emitter) -> Results:
    """x, scale; over the axes from `axis` on."""
    x, scale = n[0], n[1]
    rank, eps = x.type.rank, float(n.attr("epsilon", 1e-5))
    axes = tuple(range(n.axis(rank, -1), rank))
    dtype = x.type.dtype
    wide = cast(e, x, scale.type.dtype) if scale.type.dtype.bits > dtype.bits else x
    y = e(
        t.Normalize(
            wide, axes=axes, scale=cast(e, scale, wide.type.dtype), bias=None, eps=eps, center=False
        )
    )
    inverse = None
    if n.has_output(1):
        square = e(t.Reduce("mean", e.map("mul", x, x), axes, keepdims=True))
        inverse = e.map("rsqrt", e.map("add", square, eps))
    return cast(e, y, scale.type.dtype if n.domain == "" else dtype), inverse


def mask_lengths(e: Emitter, mask: Value | None, batch: int) -> Value:
    """How many cells of each row of an integer mask are set; zeros without one."""
    if mask is None:
        return e.fill(0, TensorType((batch,), i32))
    return e(t.Reduce("sum", cast(e, mask, i32), (1,)))


def embed_layer_norm(n: OnnxNode, e: Emitter) -> Results:
    """ids, segments, word, position and segment tables, gamma, beta, mask, positions: rows of the
    tables added and normalised; the count of set mask cells; the sum."""
    ids, segments, places = n[0], n.get(1), n.get(8)
    b, s = ids.type.shape
    x = e(t.Gather(n[2], ids))
    row = part(e, n[3], 0, 0, s) if places is None else e(t.Gather(n[3], places))
    x = plus(e, x, row)
    if segments is not None and n.get(4) is not None:
        x = plus(e, x, e(t.Gather(n[4], segments)))
    y = e(t.Normalize(x, axes=(2,), scale=n[5], bias=n.get(6), eps=float(n.attr("epsilon", 1e-12))))
    lengths = mask_lengths(e, n.get(7), b) if n.has_output(1) else None
    return y, lengths, x


def group_norm(n: OnnxNode, e: Emitter) -> Results:
    """x, gamma, beta, and for SkipGroupNorm skip and bias: over the cells of a group of channels,
    which lie last or second; SiLU behind, where activation = 1."""
    x, groups = n[0], n.attr("groups")
    last = bool(n.attr("channels_last", 1))
    shape, rank = x.type.shape, x.type.rank
    axis = rank - 1 if last else 1
    channels = shape[axis]

    def along(v: Value) -> Value:
        """One number a channel, or [N, C], shaped to meet x."""
        if v.type.rank == 1:
            wide = (channels, *(1,) * (rank - 1 - axis))
        elif v.type.rank == 2:
            wide = tuple(shape[0] if i == 0 else channels if i == axis else 1 for i in range(rank))
        else:
            return v
        return reshaped(e, v, wide)

    if n.op == "SkipGroupNorm":
        x = plus(e, x, along(n[3]), None if n.get(4) is None else along(n[4]))
    gamma, beta = (cast(e, n[i], x.type.dtype) for i in (1, 2))
    eps = float(n.attr("epsilon", 1e-5))
    if last:  # [N, cells, groups, channels of one]: no copy to channels first
        cells = prod(shape[1:-1])
        split = (groups, channels // groups)
        y = e(t.Reshape(x, (shape[0], cells, *split)))
        scale, bias = (reshaped(e, v, split) for v in (gamma, beta))
        y = e(t.Reshape(e(t.Normalize(y, axes=(1, 3), scale=scale, bias=bias, eps=eps)), shape))
    else:
        axes = tuple(range(1, rank))
        y = e(
            t.Normalize(x, axes=axes, scale=along(gamma), bias=along(beta), eps=eps, groups=groups)
        )
    return e.map("silu", y) if n.attr("activation", 0) else y, x


# ---------------------------------------------------------------------------- products


def turned(e: Emitter, x: Value, batch: bool, last: bool) -> Value:
    """FusedMatMul's transposes: `batch` takes axis 0 behind the other batch axes, `last` swaps the
    last two."""
    order = list(range(x.type.rank))
    if batch:
        order = [*order[1:-1], 0, order[-1]]
    if last and len(order) > 1:
        order[-2:] = order[-1], order[-2]
    return transposed(e, x, order)


def fused_matmul(n: OnnxNode, e: Emitter) -> Value:
    """alpha * a' b', either operand transposed; then an activation in FusedMatMulActivation."""
    sides = [
        turned(e, n[i], bool(n.attr(f"transBatch{s}", 0)), bool(n.attr(f"trans{s}", 0)))
        for i, s in enumerate("AB")
    ]
    y = contraction.matmul(replace(n, op="MatMul", inputs=tuple(sides)), e)
    y = contraction.scaled(y, float(n.attr("alpha", 1.0)), n, e)
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    settings = tuple(n.attr(name) for name in names if n.attr(name) is not None)
    return activated(e, y, n.attr("activation", ""), settings)


def fused_gemm(n: OnnxNode, e: Emitter) -> Value:
    y = contraction.gemm(n, e)
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    settings = tuple(n.attr(name) for name in names if n.attr(name) is not None)
    return activated(e, y, n.attr("activation", ""), settings)


def gemm_fast_gelu(n: OnnxNode, e: Emitter) -> Value:
    y = contraction.matmul(replace(n, op="MatMul", inputs=n.inputs[:2]), e)
    return e.map("gelu_tanh", plus(e, y, n.get(2)))


def fused_conv(n: OnnxNode, e: Emitter, nhwc: bool) -> Value:
    """x, w, bias, and a sum z added before the activation; `nhwc`: x and z are channels last."""
    x = channels_first(e, n[0]) if nhwc else n[0]
    inner = replace(n, op="Conv", inputs=(x, n[1], n.get(2)))
    y = contraction.conv(inner, e)
    if nhwc:
        y = channels_last(e, y)
    y = plus(e, y, n.get(3))
    return activated(e, y, n.attr("activation", ""), tuple(n.attr("activation_params") or ()))


def nhwc_max_pool(n: OnnxNode, e: Emitter) -> Value:
    x = channels_first(e, n[0])
    window = contraction.sliding(n, x.type.shape[2:], contraction.kernel_shape(n))
    return channels_last(e, e(t.Pool("max", x, window.sizes, **window.slide)))


def conv_transpose_dynamic_pads(n: OnnxNode, e: Emitter) -> Value:
    """ConvTranspose whose pads are an operand."""
    pads = n.ints(2, "the pads") if n.get(2) is not None else ()
    attrs = {k: n.attrs[k] for k in n.attrs} | ({"pads": pads} if pads else {})
    return contraction.conv_transpose(
        replace(n, op="ConvTranspose", inputs=(n[0], n[1], n.get(3)), attrs=attrs), e
    )


def cdist(n: OnnxNode, e: Emitter) -> Value:
    """The distance of each row of a to each row of b: |a|^2 - 2 a b' + |b|^2, and its root."""
    a, b = n[0], n[1]
    metric = n.choice("metric", "sqeuclidean", ("euclidean", "sqeuclidean"))
    cross = e.map("mul", e(t.Matmul(a, e(t.Transpose(b, (1, 0))))), -2.0)
    rows, columns = (e(t.Reduce("sum", e.map("mul", v, v), (1,), keepdims=True)) for v in (a, b))
    square = plus(e, cross, rows, e(t.Transpose(columns, (1, 0))))
    square = e.map("max", square, 0.0)
    return square if metric == "sqeuclidean" else e.map("sqrt", square)


def inverse(n: OnnxNode, e: Emitter) -> Value:
    """Work: 2 n^3 a matrix (Golub, Van Loan, Matrix Computations, 3.4)."""
    *lead, rows, columns = n[0].type.shape
    if rows != columns:
        raise n.refused("the input is not a square matrix", found=n[0].type)
    work = 2 * prod(lead) * rows**3
    return e(t.Routine("inverse", (n[0],), (n[0].type,), work=work))


# ---------------------------------------------------------------------------- mixture of experts


def mixture_of_experts(n: OnnxNode, e: Emitter) -> Value:
    """x [.., hidden], router scores [tokens, experts], then weights and biases of fc1, fc2, fc3.

    Each token goes to its k best experts, by shares that sum to one where they are normalised.
    """
    k = int(n.attr("k", 1))
    if n.attr("normalize_routing_weights", 0):
        best, which = e.add(t.TopK(n[1], k, 1))
        shares = e(t.Softmax(best, 1))
    else:
        shares, which = e.add(t.TopK(e(t.Softmax(n[1], 1)), k, 1))
    layers = ((n[2], n.get(3)), (n[4], n.get(5)), (n.get(6), n.get(7)))
    return mixture(n, e, which, shares, layers)


Layer = tuple[Value | None, Value | None]  # the matrices of all experts, and their biases


def mixture(
    n: OnnxNode, e: Emitter, which: Value, shares: Value, layers: tuple[Layer, Layer, Layer]
) -> Value:
    """The experts that tokens were sent to. fc1 is activated; fc3, or in swiglu every other row of
    fc1 or its second half, multiplies it."""
    x = n[0]
    (fc1, bias1), (fc2, bias2), (fc3, bias3) = layers
    fns = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "identity": "identity"}
    if n.attr("use_sparse_mixer", 0):
        raise n.refused("use_sparse_mixer is not supported", "0", "1")
    kind = n.choice("activation_type", "relu", (*fns, "swiglu"))
    fusion = int(n.attr("swiglu_fusion", 0))
    if kind == "swiglu" and not fusion and fc3 is None:
        raise n.refused(
            "the activation swiglu needs the weights fc3", "fc3, or swiglu_fusion = 1 or 2"
        )
    assert fc1 is not None and fc2 is not None
    rows = reshaped(e, x, (x.type.size // x.type.shape[-1], x.type.shape[-1]))
    up, gate = ((fc1, bias1), (None, None)) if fc3 is None else ((fc3, bias3), (fc1, bias1))
    assert up[0] is not None
    mix = t.Experts(
        rows,
        which,
        shares,
        up=up[0],
        down=fc2,
        gate=gate[0],
        up_bias=up[1],
        down_bias=bias2,
        gate_bias=gate[1],
        fn=fns.get(kind, "silu"),
        interleaved=kind == "swiglu" and fusion == 1,
    )
    if kind == "swiglu":
        limit = n.attr("swiglu_limit")
        mix = replace(
            mix,
            alpha=float(n.attr("activation_alpha", 1.0)),
            beta=float(n.attr("activation_beta", 0.0)),
            limit=None if limit is None else float(limit),
        )
    return reshaped(e, experts(e, mix), x.type.shape)


# ---------------------------------------------------------------------------- positions


def relative_position_bias(n: OnnxNode, e: Emitter) -> Value:
    """table [buckets, heads], query and key length: T5's bias [1, heads, q, k].

    Raffel et al., Exploring the Limits of Transfer Learning, 2020: near distances have a bucket
    each, far ones share them by logarithm.
    """
    table = n[0]
    queries, keys = (n.integer(i, "the lengths") for i in (1, 2))
    both_ways, most = bool(n.attr("is_bidirectional", 0)), n.attr("max_distance")
    buckets, heads = table.type.shape

    def places() -> np.ndarray:
        far = np.arange(keys) - np.arange(queries)[:, None]
        count, start = buckets, np.zeros(far.shape, np.int64)
        if both_ways:
            count //= 2
            start = np.where(far > 0, count, 0)
            far = np.abs(far)
        else:
            far = np.maximum(-far, 0)
        exact = count // 2
        ratio = np.log(np.maximum(far, 1) / exact) / log(most / exact)
        large = np.minimum(exact + (ratio * (count - exact)).astype(np.int64), count - 1)
        return start + np.where(far < exact, far, large)

    indices = e.lazy(TensorType((queries, keys), i64), places, "buckets")
    bias = e(t.Transpose(e(t.Gather(table, indices)), (2, 0, 1)))
    return e(t.Reshape(bias, (1, heads, queries, keys)))


def gated_relative_position_bias(n: OnnxNode, e: Emitter) -> Value:
    """query, its bias, position bias, weight, its bias, eco_a: WavLM's gate on the position bias.

    Chen et al., WavLM, 2022, section III B.
    """
    if n.get(6) is not None:
        raise n.refused("token_offset (packed tokens) is not supported")
    q = split_heads(e, plus(e, n[0], n[1]), n.attr("num_heads"))
    lead = q.type.shape[:-1]
    columns = n[3].type.shape[1]
    y = plus(e, e(t.Matmul(q, n[3])), n[4])
    y = e(t.Reduce("sum", e(t.Reshape(y, (*lead, 2, columns // 2))), (4,)))
    y = e.map("sigmoid", y)
    u, r = (part(e, y, 3, i, 1) for i in (0, 1))
    gate = e.map("sub", e.map("mul", r, n[5]), 1.0)
    gate = e.map("add", e.map("mul", u, gate), 2.0)
    return e.map("mul", gate, n[2])


# ---------------------------------------------------------------------------- layout, indexing


def ms_pad(n: OnnxNode, e: Emitter) -> Value:
    """Pads may come as [1, 2 * rank]."""
    pads = e.constant(n.ints(1, "the pads"), i64)
    return layout.pad(replace(n, inputs=(n[0], pads, n.get(2))), e)


def ms_range(n: OnnxNode, e: Emitter) -> Value:
    """The step is 1 where none is given; bounds may have one axis."""
    step = n.get(2)
    step = e.constant(1, n[0].type.dtype) if step is None else step
    bounds = tuple(reshaped(e, v, ()) for v in (n[0], n[1], step))
    return layout.range_(replace(n, inputs=bounds), e)


def ms_unique(n: OnnxNode, e: Emitter) -> Results:
    """Values by first place, which of them each cell is, counts."""
    attrs = {k: n.attrs[k] for k in n.attrs} | {"sorted": 0}
    values, _, which, counts = layout.unique(replace(n, attrs=attrs), e)
    return values, which, counts


def expand_dims(n: OnnxNode, e: Emitter) -> Value:
    shape = n[0].type.shape
    axis = n.from_front(n.integer(1, "the axis"), len(shape) + 1)
    return e(t.Reshape(n[0], (*shape[:axis], 1, *shape[axis:])))


def torch_embedding(n: OnnxNode, e: Emitter) -> Value:
    return e(t.Gather(n[0], n[1]))


def unfold(n: OnnxNode, e: Emitter) -> Value:
    """All slices of `size` along `dim`, `step` apart, as a new last axis."""
    x = n[0]
    axis = n.axis(x.type.rank, -1, "dim")
    size, step = n.attr("size"), n.attr("step", 1)
    if step < 1 or not 1 <= size <= x.type.shape[axis]:
        raise n.refused(
            "size or step is out of range",
            f"a size from 1 to {x.type.shape[axis]}, a step of at least 1",
            f"size={size}, step={step}",
        )
    count = (x.type.shape[axis] - size) // step + 1
    cells = TensorType((count, size), i64)
    at = e.lazy(cells, lambda: np.arange(count)[:, None] * step + np.arange(size), "cells")
    y = e(t.Gather(x, at, axis))
    order = [i for i in range(y.type.rank) if i != axis + 1]
    return transposed(e, y, (*order, axis + 1))


def is_all_finite(n: OnnxNode, e: Emitter) -> Value:
    """Whether no operand holds an infinity or, unless isinf_only, a NaN."""
    found: Value | None = None
    for x in n.inputs:
        if x is None:
            continue
        tests = [
            e.map(fn, x)
            for fn, off in (("isinf", "isnan_only"), ("isnan", "isinf_only"))
            if not n.attr(off, 0)
        ]
        odd = tests[0] if len(tests) == 1 else e.map("or", *tests)
        some = e(t.Reduce("max", cast(e, odd, i32), tuple(range(x.type.rank))))
        found = some if found is None else e.map("max", found, some)
    if found is None:
        raise n.refused("there are no inputs")
    return e.map("eq", found, 0)


# ---------------------------------------------------------------------------- images, signals


def crop_and_resize(n: OnnxNode, e: Emitter) -> Value:
    """x [n, c, h, w], boxes [r, 4] (y1, x1, y2, x2, normalised), which image each is of, and the
    crops' size. Work: as a bilinear resize, 8 a cell."""
    x, boxes, images = n[0], n[1], n[2]
    size = n.ints(3, "the size of the crops")
    mode = n.choice("mode", "bilinear", ("bilinear", "nearest"))
    result = TensorType((boxes.type.shape[0], x.type.shape[1], *size), x.type.dtype)
    attrs = (("size", size), ("mode", mode), ("outside", n.attr("extrapolation_value", 0.0)))
    work = 8 * result.size if mode == "bilinear" else 0
    return e(
        t.Routine(
            fn="crop_and_resize", args=(x, boxes, images), gives=(result,), attrs=attrs, work=work
        )
    )


def rfft(n: OnnxNode, e: Emitter) -> Value:
    """The one-sided transform of the last axis, real and imaginary parts in a new last axis."""
    check_signal(n)
    x = e(t.Reshape(n[0], (*n[0].type.shape, 1)))
    return sampling.dft(fourier(n, x, {"onesided": 1, "axis": x.type.rank - 2}), e)


def irfft(n: OnnxNode, e: Emitter) -> Value:
    """The real signal of which the last two axes are the one-sided transform."""
    check_signal(n)
    rank = n[0].type.rank
    y = sampling.dft(fourier(n, n[0], {"onesided": 1, "inverse": 1, "axis": rank - 2}), e)
    return e(t.Reshape(y, y.type.shape[:-1]))


def fourier(n: OnnxNode, x: Value, attrs: dict[str, int]) -> OnnxNode:
    return replace(n, op="DFT", domain="", version=17, inputs=(x,), attrs=attrs)


def check_signal(n: OnnxNode) -> None:
    if n.attr("signal_ndim", 1) != 1 or n.attr("normalized", 0) or not n.attr("onesided", 1):
        raise n.refused(
            "these attributes are not supported", "signal_ndim = 1, normalized = 0, onesided = 1"
        )


def ms_grid_sample(n: OnnxNode, e: Emitter) -> Value:
    n.choice("mode", "bilinear", ("bilinear", "bicubic", "nearest"))
    return sampling.grid_sample(replace(n, domain="", version=16), e)


# ---------------------------------------------------------------------------- not analysed


def like(n: OnnxNode, e: Emitter, operand: int) -> Results:
    """An operator of whose result only the type is known: that of this operand."""
    return n.walk.opaque(n, [n[operand].type][: len(n.outputs)])


def remove_padding(n: OnnxNode, e: Emitter) -> Results:
    """Tokens that are not padding, packed: taken to be all."""
    b, s, hidden = n[0].type.shape
    e.assume(f"{n.name}: all {b * s} tokens are assumed to be valid")
    gives = (
        TensorType((b * s, hidden), n[0].type.dtype),
        TensorType((b, s), i32),
        TensorType((b + 1,), i32),
        TensorType((1,), i32),
    )
    return n.walk.opaque(n, gives)


def restore_padding(n: OnnxNode, e: Emitter) -> Results:
    b, s = n[1].type.shape
    return n.walk.opaque(n, (TensorType((b, s, n[0].type.shape[1]), n[0].type.dtype),))


def packed_attention(n: OnnxNode, e: Emitter) -> Results:
    """input [tokens, hidden], merged weights."""
    sizes = n.attr("qkv_hidden_sizes") or (n[1].type.shape[1] // 3,) * 3
    return n.walk.opaque(n, (TensorType((n[0].type.shape[0], sizes[2]), n[0].type.dtype),))


def packed_multi_head(n: OnnxNode, e: Emitter) -> Results:
    """q [tokens, hidden] or packed [tokens, heads, 3, d], k, v."""
    tokens, heads, *_ = n[0].type.shape
    width = heads * n[0].type.shape[3] if n[0].type.rank == 4 else n[2].type.shape[1]
    return n.walk.opaque(n, (TensorType((tokens, width), n[0].type.dtype),))


def paged_attention(n: OnnxNode, e: Emitter) -> Results:
    """q [tokens, hidden] (with k and v packed behind it where they are not given), caches."""
    tokens, hidden = n[0].type.shape
    if n.get(1) is None:
        heads, groups = n.attr("num_heads"), n.attr("kv_num_heads")
        hidden = hidden * heads // (heads + 2 * groups)
    types = [TensorType((tokens, hidden), n[0].type.dtype), n[3].type, n[4].type]
    return n.walk.opaque(n, types[: len(n.outputs)])


def sparse_attention(n: OnnxNode, e: Emitter) -> Results:
    b, s, hidden = n[0].type.shape
    if n.get(1) is None:
        heads, groups = n.attr("num_heads"), n.attr("kv_num_heads")
        hidden = hidden * heads // (heads + 2 * groups)
    types = [TensorType((b, s, hidden), n[0].type.dtype), n[3].type, n[4].type]
    return n.walk.opaque(n, types[: len(n.outputs)])


def refuse(n: OnnxNode, e: Emitter, why: str, fix: str) -> Results:
    raise n.refused(f"{why}", fix=fix)


generates = partial(
    refuse,
    why="the operator runs whole models in an internal loop",
    fix="analyse the encoder model and the decoder model separately",
)
blocked = partial(
    refuse,
    why="the model was optimised for one CPU: its tensors have the channel-block layout of that "
    "CPU",
    fix="analyse the original model, or save it with graph_optimization_level ORT_ENABLE_EXTENDED",
)


MICROSOFT: dict[str, Converter] = {
    "Gelu": partial(with_bias, fn="gelu"),
    "BiasGelu": partial(with_bias, fn="gelu"),
    "FastGelu": partial(with_bias, fn="gelu_tanh"),
    "QuickGelu": partial(pointwise.swish, alpha=1.702),
    "BiasAdd": bias_add,
    "BiasSplitGelu": bias_split_gelu,
    "BiasDropout": bias_dropout,
    "BitmaskBiasDropout": bias_dropout,
    "BitmaskDropout": bitmask_dropout,
    "BiasSoftmax": bias_softmax,
    "ComplexMul": partial(complex_product, conjugate=False),
    "ComplexMulConj": partial(complex_product, conjugate=True),
    "SkipLayerNormalization": skip_layer_norm,
    "SkipSimplifiedLayerNormalization": skip_rms_norm,
    "SimplifiedLayerNormalization": rms_norm,
    "EmbedLayerNormalization": embed_layer_norm,
    "GroupNorm": group_norm,
    "SkipGroupNorm": group_norm,
    "FusedMatMul": fused_matmul,
    "TransposeMatMul": fused_matmul,
    "FusedMatMulActivation": fused_matmul,
    "FusedGemm": fused_gemm,
    "GemmFastGelu": gemm_fast_gelu,
    "FusedConv": partial(fused_conv, nhwc=False),
    "NhwcConv": partial(fused_conv, nhwc=True),
    "NhwcFusedConv": partial(fused_conv, nhwc=True),
    "NhwcMaxPool": nhwc_max_pool,
    "ConvTransposeWithDynamicPads": conv_transpose_dynamic_pads,
    "CDist": cdist,
    "Inverse": inverse,
    "MoE": mixture_of_experts,
    "RelativePositionBias": relative_position_bias,
    "GatedRelativePositionBias": gated_relative_position_bias,
    "Pad": ms_pad,
    "Range": ms_range,
    "Unique": ms_unique,
    "Trilu": layout.trilu,
    "GatherND": layout.gather_nd,
    "ExpandDims": expand_dims,
    "TorchEmbedding": torch_embedding,
    "UnfoldTensor": unfold,
    "IsAllFinite": is_all_finite,
    "CropAndResize": crop_and_resize,
    "GridSample": ms_grid_sample,
    "Rfft": rfft,
    "Irfft": irfft,
    "NGramRepeatBlock": partial(like, operand=1),
    "RemovePadding": remove_padding,
    "RestorePadding": restore_padding,
    "PackedAttention": packed_attention,
    "PackedMultiHeadAttention": packed_multi_head,
    "PagedAttention": paged_attention,
    "SparseAttention": sparse_attention,
    "LongformerAttention": partial(like, operand=0),
    **dict.fromkeys(("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"), generates),
}
BLOCKED = (
    *("ReorderInput", "ReorderOutput", "Conv", "MaxPool", "AveragePool"),
    *("GlobalMaxPool", "GlobalAveragePool", "Upsample"),
)

CONVERTERS: dict[str, Converter] = {
    **{f"com.microsoft::{name}": converter for name, converter in MICROSOFT.items()},
    **{f"com.microsoft.nchwc::{name}": blocked for name in BLOCKED},
    "SimplifiedLayerNormalization": rms_norm,  # onnxruntime writes it in ONNX's own domain
}
