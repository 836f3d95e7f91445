"""Operators of backward passes, and the forward ones that save something for them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import along_channels, cast, inverse_root, reshaped
from gpuir.frontends.torch.contraction import mask_of, no_dropout, scale_of, sliding, spread
from gpuir.frontends.torch.layout import first_cell, padding, padding_around
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.frontends.torch.pointwise import mapped, truth
from gpuir.frontends.torch.reduction import fitted, per_channel
from gpuir.ir.graph import Value
from gpuir.ops import tensor as t
from gpuir.ops.scalar import flops_of

# ---------------------------------------------------------------------------- attention


def attention(n: TorchNode, e: Emitter) -> Results:
    """The fused attentions that training calls: the result, and the logarithm of each row's sum of
    exponentials; what else a device's call gives (seeds, lengths) takes no time."""
    q, k, v = (n[name] for name in ("query", "key", "value"))
    no_dropout(n, e)
    if any(n.get(f"{x}_descale") for x in "qkv"):
        e.assume(f"{n.name}: the scales of 8-bit operands are not applied and are counted as free")
    causal = bool(n.args["is_causal"])
    op = t.Attention(q, k, v, mask_of(n, e, q), scale=scale_of(n, q), causal=causal, stats=True)
    y, stats = e.add(op)
    rest = [None if type is None else e.fill(0, type) for type in n.types[2:]]
    return y, fitted(e, stats, n.types[1]), *rest


def attention_backward(n: TorchNode, e: Emitter) -> Results:
    q, k, v = (n[name] for name in ("query", "key", "value"))
    op = t.AttentionGradient(
        *(q, k, v),
        y=n["out"],
        stats=reshaped(e, n["logsumexp"], q.type.shape[:-1]),
        dy=n.one_of("grad_out", "grad_out_"),
        mask=mask_of(n, e, q),
        scale=scale_of(n, q),
        causal=bool(n.args["is_causal"]),
    )
    found = e.add(op)
    rest = [None if type is None else e.fill(0, type) for type in n.types[3:]]
    return *found[:3], *rest


# ---------------------------------------------------------------------------- norms


def layer_norm_backward(n: TorchNode, e: Emitter) -> Results:
    """The gradients of input, weight and bias, those that `output_mask` asks for: two launches."""
    x, count = n["input"], len(n.args["normalized_shape"])
    axes = tuple(range(x.type.rank - count, x.type.rank))
    shape, eps = x.type.shape[-count:], eps_of(n, e, n["rstd"])
    return norm_backward(n, e, n.get("weight"), axes=axes, shape=shape, eps=eps)


def group_norm_backward(n: TorchNode, e: Emitter) -> Results:
    x, groups = n["input"].type, int(n.args["group"])
    axes, shape = tuple(range(1, x.rank)), (x.shape[1], *(1,) * (x.rank - 2))
    scale, eps = per_channel(e, n.get("weight"), x.rank), eps_of(n, e, n["rstd"])
    return norm_backward(n, e, scale, axes=axes, shape=shape, eps=eps, groups=groups)


def batch_norm_backward(n: TorchNode, e: Emitter) -> Results:
    """In training that of a norm over all but channels; else a product with what is known."""
    dy, x, rank = n["grad_out"], n["input"], n["input"].type.rank
    scale, shape = per_channel(e, n.get("weight"), rank), (x.type.shape[1], *(1,) * (rank - 2))
    axes, eps = (0, *range(2, rank)), float(n.args["eps"])
    if n.args["train"]:
        return norm_backward(n, e, scale, axes=axes, shape=shape, eps=eps)
    middle, spread = (along_channels(e, n[f"running_{part}"], rank) for part in ("mean", "var"))
    inverse = inverse_root(e, spread, eps)
    slope = inverse if scale is None else e.map("mul", inverse, scale)
    dx = e.map("mul", dy, cast(e, slope, dy.type.dtype))
    normal = e.map("mul", e.map("sub", x, middle), inverse)
    dw = e(t.Reduce("sum", e.map("mul", dy, normal), axes))
    found = (dx, dw, e(t.Reduce("sum", dy, axes)))
    return tuple(v if w else None for v, w in zip(found, n.args["output_mask"], strict=True))


def norm_backward(
    n: TorchNode,
    e: Emitter,
    scale: Value | None,
    *,
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    eps: float,
    groups: int | None = None,
) -> Results:
    """`shape` is the scale's, as it is multiplied with x. Its dtype may be wider than that of x."""
    x, dy, wants = n["input"], n["grad_out"], n.args["output_mask"]
    dx = None
    if wants[0]:
        dx = e(t.NormalizeGradient(x, dy, axes, scale, eps=eps, groups=groups))
    if not (wants[1] or wants[2]):
        return dx, None, None
    type = n.types[1] or n.types[2]
    assert type is not None
    dw, db = e.add(t.NormalizeScaleGradient(x, dy, axes, shape, bias=True, eps=eps, groups=groups))
    found = (cast(e, reshaped(e, v, type.shape), type.dtype) for v in (dw, db))
    return dx, *(v if wanted else None for v, wanted in zip(found, wants[1:], strict=True))


def eps_of(n: TorchNode, e: Emitter, inverse: Value) -> float:
    """What was added to the variance whose inverse root this is: the forward pass computed it."""
    op = e.builder.producer(inverse)
    while isinstance(op, t.Reshape | t.Cast):
        op = e.builder.producer(op.x)
    if isinstance(op, t.Map) and op.fn == "rsqrt":
        op = e.builder.producer(op.args[0])
    if not (isinstance(op, t.Map) and op.fn == "add" and op.imm):
        raise n.refused("mean and rstd are not the results of a norm in this program")
    return float(op.imm[0])


# ---------------------------------------------------------------------------- convolutions, pools


def conv_backward(n: TorchNode, e: Emitter) -> Results:
    """The gradients of input, weight and bias, those that `output_mask` asks for."""
    dy, x, w = n["grad_output"], n["input"], n["weight"]
    count = w.type.rank - 2
    strides, low, dilations = (spread(n.args[a], count) for a in ("stride", "padding", "dilation"))
    window = w.type.shape[2:]
    parts = t.SlidingWindow(window, strides, low, low, dilations).slide
    parts["groups"] = int(n.args["groups"])
    transposed = bool(n.args["transposed"])
    wants = n.args["output_mask"]
    dx: Value | None = None
    dw: Value | None = None
    if wants[0]:
        if transposed:
            dx = e(t.Conv(dy, w, **parts))
        else:
            reach = t.ConvTranspose(dy, w, **parts).result_types[0].shape[2:]
            extra = tuple(a - b for a, b in zip(x.type.shape[2:], reach, strict=True))
            dx = e(t.ConvTranspose(dy, w, **parts, extra=extra))
    if wants[1]:
        image, gradient = (dy, x) if transposed else (x, dy)
        dw = e(t.ConvWeightGradient(image, gradient, window, **parts))
    db = e(t.Reduce("sum", dy, (0, *range(2, dy.type.rank)))) if wants[2] else None
    return dx, dw, db


def pool_backward(n: TorchNode, e: Emitter, fn: Any, count: int) -> Value:
    x, dy = n["self"], n["grad_output"]
    alone = x.type.rank == count + 1
    image, dy = (reshaped(e, v, (1, *v.type.shape)) if alone else v for v in (x, dy))
    s = sliding(n, image.type.shape[2:], dy.type.shape[2:])
    shape = image.type.shape
    if fn == "max":
        op = t.PoolGradient("max", dy, shape, s.sizes, **s.slide, x=image)
        return reshaped(e, e(op), n.type.shape)
    if n.args.get("divisor_override"):
        raise n.refused("divisor_override is not supported")
    include = bool(n.args.get("count_include_pad"))
    extra = s.extra if include and any(s.extra) else ()
    op = t.PoolGradient("mean", dy, shape, s.sizes, **s.slide, include_pad=include, extra=extra)
    return reshaped(e, e(op), n.type.shape)


def adaptive_mean_backward(n: TorchNode, e: Emitter) -> Value:
    """Each window's share spread over its cells: windows of one width, or a routine."""
    x, dy = n["self"], n["grad_output"]
    count = 2 if "2d" in n.op else 3
    spatial, wanted = x.type.shape[-count:], dy.type.shape[-count:]
    if any(a % b for a, b in zip(spatial, wanted, strict=True)):
        attrs = (("shape", n.type.shape), ("count", count))
        work = dy.type.size * math.prod(-(-a // b) for a, b in zip(spatial, wanted, strict=True))
        return e(t.Routine("adaptive_pool_gradient", (dy,), (n.type,), attrs, work=work))
    window = tuple(a // b for a, b in zip(spatial, wanted, strict=True))
    share = mapped(e, "mul", dy, 1 / math.prod(window), dtype=dy.type.dtype)
    lead = dy.type.shape[:-count]
    apart = tuple(k for size in wanted for k in (size, 1))
    wide = tuple(k for size, w in zip(wanted, window, strict=True) for k in (size, w))
    spread_out = e(t.Broadcast(reshaped(e, share, (*lead, *apart)), (*lead, *wide)))
    return reshaped(e, spread_out, x.type.shape)


def edge_padding_backward(n: TorchNode, e: Emitter) -> Value:
    """Each gradient added to that of the cell that was copied. Work: an addition a cell."""
    x, dy = n["self"], n["grad_output"]
    low, _ = padding(n.args["padding"], x.type.rank)
    attrs = (("low", low), ("shape", x.type.shape))
    work = dy.type.size * flops_of("add", dy.type.dtype)
    return e(t.Routine("edge_padding_gradient", (dy,), (n.type,), attrs, work=work))


# ---------------------------------------------------------------------------- places


def embedding_backward(n: TorchNode, e: Emitter) -> Value:
    """Each row of the gradient added to its row of a table of zeros, but for the padding's."""
    dy, indices = n["grad_output"], n["indices"]
    width = dy.type.shape[-1]
    flat = reshaped(e, dy, (indices.type.size, width))
    at = reshaped(e, indices, (indices.type.size, 1))
    padding = int(n.args["padding_idx"])
    if padding >= 0:
        kept = e.map("ne", at, padding)
        flat = e.map("where", kept, flat, e.constant(0, flat.type.dtype))
    if n.args["scale_grad_by_freq"]:
        raise n.refused("scale_grad_by_freq is not supported")
    return e(t.ScatterND(e.fill(0, n.type), at, flat, "add"))


def slice_backward(n: TorchNode, e: Emitter) -> Value:
    """The gradient among zeros, where the slice was."""
    dy, shape = n["grad_output"], n.type.shape
    axis, step = n.axis(len(shape)), int(n.args["step"])
    length = shape[axis]
    start = first_cell(n, length)
    return padding_around(e, dy, axis, start=start, step=step, length=length)


def select_backward(n: TorchNode, e: Emitter) -> Value:
    dy, shape = n["grad_output"], n.type.shape
    axis = n.axis(len(shape))
    one = reshaped(e, dy, tuple(1 if i == axis else size for i, size in enumerate(shape)))
    length = shape[axis]
    return padding_around(e, one, axis, start=n.args["index"] % length, length=length)


def dropout_backward(n: TorchNode, e: Emitter) -> Value:
    dy, mask = n["grad_output"], n["mask"]
    dtype = n.type.dtype
    scaled = mapped(e, "mul", dy, n.args["scale"], dtype=dtype)
    return e.map("where", truth(e, mask), scaled, e.constant(0, dtype))


FUSED = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_fused_attention_overrideable",
)

CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(FUSED, attention),
    **dict.fromkeys((f"{name}_backward" for name in FUSED), attention_backward),
    "native_layer_norm_backward": layer_norm_backward,
    "native_group_norm_backward": group_norm_backward,
    "native_batch_norm_backward": batch_norm_backward,
    "convolution_backward": conv_backward,
    **{
        f"max_pool{d}d_with_indices_backward": partial(pool_backward, fn="max", count=d)
        for d in (2, 3)
    },
    **{f"avg_pool{d}d_backward": partial(pool_backward, fn="mean", count=d) for d in (2, 3)},
    **{f"_adaptive_avg_pool{d}d_backward": adaptive_mean_backward for d in (2, 3)},
    **{f"replication_pad{d}d_backward": edge_padding_backward for d in (1, 2, 3)},
    "embedding_dense_backward": embedding_backward,
    "slice_backward": slice_backward,
    "select_backward": select_backward,
    "native_dropout_backward": dropout_backward,
}
