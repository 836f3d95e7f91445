"""Products, convolutions, pools and attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import as_in_numpy, cast, reshaped, scale_of_heads, widened
from gpuir.frontends.torch.complex import conjugated, is_complex, pair
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.frontends.torch.pointwise import mapped
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.phases import beside
from gpuir.ir.types import DType, bool_, f32
from gpuir.ops import tensor as t

NO_DROPOUT = "dropout inside attention is counted as free"


def product(e: Emitter, a: Value, b: Value, dtype: DType | None = None) -> Value:
    """torch.matmul: a vector is a row on the left, a column on the right, and its axis goes. The
    sums come out in this dtype, without one in the operands'. Of two vectors it is a sum of
    products: a kernel that reads both once (cuBLAS, dot_kernel). torch.export lets floats of two
    widths through, and the product then fails where it runs: ModelError."""
    kinds = (a.type.dtype, b.type.dtype)
    if kinds[0] != kinds[1] and all(x.is_float and x.bits > 8 for x in kinds):
        raise ModelError(
            "PyTorch does not multiply tensors of two dtypes",
            expected=f"both {kinds[0]}, or both {kinds[1]}",
            found=f"{a.type}, {b.type}",
            fix="cast one of them in the model, or run it in f32: --dtype f32 for a Hugging Face "
            "config",
        )
    dtype = None if dtype == a.type.dtype else dtype
    if a.type.rank == b.type.rank == 1 and dtype is None:
        return e(t.Reduce("sum", e.map("mul", a, b), (0,)))
    return as_in_numpy(e, a, b, lambda a, b: e(t.Matmul(a, b, dtype)))


def matmul(n: TorchNode, e: Emitter) -> Value:
    return product(e, n["self"], n.one_of("other", "mat2", "vec", "tensor"), n.type.dtype)


def conjugate_product(n: TorchNode, e: Emitter) -> Value:
    """vdot: the sum of conj(self) times other."""
    return product(e, conjugated(e, n["self"]), n["other"])


def scaled_product(n: TorchNode, e: Emitter) -> Value:
    """self @ mat2, of 8 bits or less, summed in f32; times both scales, plus bias: one launch.
    Scales are numbers, or one a row and one a column. Those of blocks of what is summed are left
    out, and said so: kernels apply them on the way (cuBLASLt, block scaling)."""
    a, b = n["self"], n["mat2"]
    y = product(e, a, b, f32)
    rows, columns = y.type.shape
    scales = (n["scale_a"], n["scale_b"])
    if all(s.type.size == 1 or s.type.size == size for s, size in zip(scales, (rows, columns))):
        for s, shape in zip(scales, ((rows, 1), (1, columns)), strict=True):
            s = reshaped(e, s, () if s.type.size == 1 else shape)
            y = mapped(e, "mul", y, s, dtype=f32)
    else:
        e.assume(f"{n.name}: the scales of the blocks are not applied and are counted as free")
    if (bias := n.get("bias")) is not None:
        y = mapped(e, "add", y, bias, dtype=f32)
    if (whole := n.get("scale_result")) is not None:
        y = mapped(e, "mul", y, reshaped(e, whole, ()), dtype=f32)
    return cast(e, y, n.type.dtype)


def linear(n: TorchNode, e: Emitter) -> Value:
    """input @ weight^T + bias."""
    weight = n["weight"]
    if weight.type.rank == 2:
        weight = e(t.Transpose(weight, (1, 0)), f"{n.name}/weight.T")
    y = product(e, n["input"], weight)
    bias = n.get("bias")
    return y if bias is None else e.map("add", y, bias)


def add_product(n: TorchNode, e: Emitter, a: str, b: str, sums: bool = False) -> Value:
    """beta * self + alpha * (a @ b); `sums` adds up the batch."""
    dtype = n.type.dtype
    y = product(e, n[a], n[b], dtype)
    if sums:
        y = e(t.Reduce("sum", y, (0,)))
    alpha, beta = n.args["alpha"], n.args["beta"]
    y = y if alpha == 1 else mapped(e, "mul", y, alpha, dtype=dtype)
    x = n["self"]
    if beta == 0:
        return y
    x = x if beta == 1 else mapped(e, "mul", x, beta, dtype=dtype)
    return mapped(e, "add", y, x, dtype=dtype)


def outer(n: TorchNode, e: Emitter) -> Value:
    a, b = n["self"], n["vec2"]
    return mapped(e, "mul", reshaped(e, a, (a.type.size, 1)), b, dtype=n.type.dtype)


# ---------------------------------------------------------------------------- convolutions


def conv(n: TorchNode, e: Emitter) -> Value:
    """Any number of spatial axes, transposed or not; an image alone is a batch of one."""
    x, w = n["input"], n["weight"]
    count = w.type.rank - 2
    alone = x.type.rank == count + 1
    x = reshaped(e, x, (1, *x.type.shape)) if alone else x
    strides, dilations = (spread(n.args[a], count) for a in ("stride", "dilation"))
    groups = int(n.args["groups"])
    transposes = n.args.get("transposed", "output_padding" in n.args)
    padding = n.args["padding"]
    if isinstance(padding, str):
        totals = [d * (k - 1) for d, k in zip(dilations, w.type.shape[2:], strict=True)]
        low = tuple(0 if padding == "valid" else total // 2 for total in totals)
        high = tuple(0 if padding == "valid" else total - total // 2 for total in totals)
    else:
        low = high = spread(padding, count)
    slide = t.SlidingWindow(w.type.shape[2:], strides, low, high, dilations).slide
    extra = spread(n.args["output_padding"], count) if transposes else ()

    def convolved(x: Value, w: Value, bias: Value | None) -> Value:
        if transposes:
            y = e(t.ConvTranspose(x, w, **slide, groups=groups, extra=extra))
        else:
            y = e(t.Conv(x, w, **slide, groups=groups))
        if bias is None:
            return y
        return e.map("add", y, reshaped(e, bias, (bias.type.size, *(1,) * count)))

    bias = n.get("bias")
    y = by_parts(e, convolved, x, w, bias) if is_complex(x) else convolved(x, w, bias)
    return reshaped(e, y, y.type.shape[1:]) if alone else y


def by_parts(
    e: Emitter,
    convolved: Callable[[Value, Value, Value | None], Value],
    x: Value,
    w: Value,
    bias: Value | None,
) -> Value:
    """A convolution of complex numbers as PyTorch runs it, in three of real ones: p of the real
    parts, q of the imaginary ones and r of their sums give p - q + i (r - p - q). Each step is a
    call, so each has a location of its own (aten/src/ATen/native/Convolution.cpp,
    complex_convolution)."""
    where = e.builder.locs

    def at(part: str) -> None:
        e.builder.locs = beside(where, part)

    def call(part: str, fn: str, *args: Any) -> Value:
        at(part)
        return e.map(fn, *args)

    def parts(of: str, v: Value) -> tuple[Value, Value, Value]:
        at("parts")
        real, imaginary = pair(e, v)
        return real, imaginary, call(f"sum of {of}", "add", real, imaginary)

    xs, ws = parts("x", x), parts("w", w)
    biases = (None, None, None) if bias is None else parts("bias", bias)
    at("real")
    p = convolved(xs[0], ws[0], biases[0])
    at("imaginary")
    q = convolved(xs[1], ws[1], None)
    at("both")
    r = convolved(xs[2], ws[2], biases[2])
    real = call("real - imaginary", "sub", p, q)
    rest = call("both - imaginary - real", "sub", call("both - real", "sub", r, p), q)
    at("i")
    turned = mapped(e, "mul", rest, 1j, dtype=x.type.dtype)
    at("result")
    y = mapped(e, "add", real, turned, dtype=x.type.dtype)
    e.builder.locs = where
    return y


def spread(sizes: Any, count: int) -> tuple[int, ...]:
    """One number for each spatial axis; a single one serves all."""
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes * count if len(sizes) == 1 else sizes


# ---------------------------------------------------------------------------- pools


def pool(n: TorchNode, e: Emitter, fn: Any, count: int) -> Results:
    """max_pool and avg_pool over `count` spatial axes; with indices where the call gives them."""
    x = n["self"]
    image = reshaped(e, x, (1, *x.type.shape)) if x.type.rank == count + 1 else x
    s = sliding(n, image.type.shape[2:], n.type.shape[-count:])
    if fn == "max":
        op = t.Pool("max", image, s.sizes, **s.slide)
        found = [e(op), *(e(replace(op, fn="argmax")) for _ in n.types[1:])]
        shown = [reshaped(e, y, n.type.shape) for y in found]
        return shown if len(shown) > 1 else shown[0]
    divisor = n.args.get("divisor_override")
    include = bool(n.args.get("count_include_pad", True)) or bool(divisor)
    extra = s.extra if include and any(s.extra) and not divisor else ()
    y = e(t.Pool("mean", image, s.sizes, **s.slide, include_pad=include, extra=extra))
    if divisor:
        y = mapped(e, "mul", y, math.prod(s.sizes) / divisor, dtype=y.type.dtype)
    return reshaped(e, y, n.type.shape)


def sliding(n: TorchNode, spatial: tuple[int, ...], extents: tuple[int, ...]) -> t.SlidingWindow:
    """The windows of a pool over so many cells, `extents` of them: in ceil mode the last one may
    hang over."""
    count = len(spatial)
    sizes = spread(n.args["kernel_size"], count)
    strides = spread(n.args["stride"] or sizes, count)
    low = spread(n.args["padding"], count)
    dilations = spread(n.args.get("dilation", 1), count)
    return t.SlidingWindow(sizes, strides, low, low, dilations).hanging(spatial, extents)


def adaptive_mean(n: TorchNode, e: Emitter) -> Results:
    """The mean over windows as wide as it takes to give so many. Whole ones are a pool; others, of
    unequal widths, a routine."""
    x, count = n["self"], len(n.args["output_size"])
    spatial, wanted = x.type.shape[-count:], n.type.shape[-count:]
    if len(spatial) != len(wanted):
        raise n.refused(
            "the number of axes of the result is not that of output_size",
            f"{count} axes after the channels",
            f"{x.type} to {n.type}",
        )
    if not n.type.size:
        return e.fill(0, n.type)
    if any(a % b for a, b in zip(spatial, wanted, strict=True)):
        return uneven(n, e, "mean", count)[0]
    if all(size == 1 for size in wanted):
        return e(t.Reduce("mean", x, tuple(range(x.type.rank - count, x.type.rank)), True))
    window = tuple(a // b for a, b in zip(spatial, wanted, strict=True))
    image = reshaped(e, x, (1, *x.type.shape)) if x.type.rank == count + 1 else x
    none, one = (0,) * count, (1,) * count
    s = t.SlidingWindow(window, window, none, none, one)
    y = e(t.Pool("mean", image, s.sizes, **s.slide, adaptive=True))
    return reshaped(e, y, n.type.shape)


def uneven(n: TorchNode, e: Emitter, fn: str, count: int) -> tuple[Value, ...]:
    """Windows from floor(i a / b) to ceil((i + 1) a / b) along an axis of a cells and b results."""
    x = n["self"]
    rows = zip(x.type.shape[-count:], n.type.shape[-count:], strict=True)
    work = n.type.size * math.prod(-(-a // b) for a, b in rows)
    attrs = (("fn", fn), ("shape", n.type.shape), ("count", count))
    gives = tuple(type for type in n.types if type is not None)
    return e.add(t.Routine("adaptive_pool", (x,), gives, attrs, work=work))


def adaptive_max(n: TorchNode, e: Emitter, count: int) -> Results:
    """The largest of such windows, and where it is in the image laid flat."""
    return uneven(n, e, "max", count)


# ---------------------------------------------------------------------------- attention


def no_dropout(n: TorchNode, e: Emitter) -> None:
    if n.args.get("dropout_p"):
        e.assume(NO_DROPOUT)  # of no node by name, so that layers stay alike


def scale_of(n: TorchNode, q: Value) -> float:
    scale = n.args.get("scale")
    return scale_of_heads(q.type.shape[-1]) if scale is None else float(scale)


def mask_of(n: TorchNode, e: Emitter, q: Value) -> Value | None:
    mask = n.get("attn_mask") or n.get("attn_bias")
    return mask if mask is None or mask.type.dtype == bool_ else cast(e, mask, q.type.dtype)


def attention(n: TorchNode, e: Emitter) -> Results:
    """scaled_dot_product_attention: one kernel. The scale is 1 / sqrt of the heads' width where the
    call says none. Causal: query i sees keys up to i."""
    q, k, v = (n[name] for name in ("query", "key", "value"))
    no_dropout(n, e)
    scale, mask = scale_of(n, q), mask_of(n, e, q)
    if not n.args.get("enable_gqa"):
        lead = n.type.shape[:-2]
        q, k, v = (widened(e, x, (*lead, *x.type.shape[-2:])) for x in (q, k, v))
    if q.type.rank != 4:
        if mask is not None and mask.type.rank > 2:
            mask = widened(e, mask, (*q.type.shape[:-2], *mask.type.shape[-2:]))
            mask = in_one_batch(e, mask)
        q, k, v = (in_one_batch(e, x) for x in (q, k, v))
    y = e(t.Attention(q, k, v, mask, scale=scale, causal=bool(n.args.get("is_causal"))))
    return reshaped(e, y, n.type.shape)


def in_one_batch(e: Emitter, x: Value) -> Value:
    """[.., s, d]  →  [b, s, d]: PyTorch's fused kernels take four axes alone, so three stay told
    apart."""
    return reshaped(e, x, (math.prod(x.type.shape[:-2]), *x.type.shape[-2:]))


CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "_int_mm"), matmul),
    "vdot": conjugate_product,
    "_scaled_mm": scaled_product,
    "linear": linear,
    "addmm": partial(add_product, a="mat1", b="mat2"),
    "addmv": partial(add_product, a="mat", b="vec"),
    "addbmm": partial(add_product, a="batch1", b="batch2", sums=True),
    "baddbmm": partial(add_product, a="batch1", b="batch2"),
    "outer": outer,
    **dict.fromkeys(
        (
            *("convolution", "conv1d", "conv2d", "conv3d"),
            *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        ),
        conv,
    ),
    **{f"avg_pool{d}d": partial(pool, fn="mean", count=d) for d in (1, 2, 3)},
    **{f"max_pool{d}d": partial(pool, fn="max", count=d) for d in (1, 2, 3)},
    **{f"max_pool{d}d_with_indices": partial(pool, fn="max", count=d) for d in (2, 3)},
    **{f"adaptive_avg_pool{d}d": adaptive_mean for d in (1, 2, 3)},
    **{f"_adaptive_avg_pool{d}d": adaptive_mean for d in (2, 3)},
    **{f"adaptive_max_pool{d}d": partial(adaptive_max, count=d) for d in (1, 2, 3)},
    "scaled_dot_product_attention": attention,
}
