"""Resampling, Fourier transforms, distances, and what depends on the data: library routines."""

from __future__ import annotations

from functools import partial
from math import log2, prod
from typing import Any, Literal

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import (
    cast,
    column_image,
    matrices_turned,
    pick,
    reshaped,
    sampled,
    transposed,
    widened,
)
from gpuir.frontends.torch.contraction import spread
from gpuir.frontends.torch.layout import nonzero_places
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.frontends.torch.pointwise import mapped
from gpuir.frontends.torch.reduction import over
from gpuir.ir.graph import Value
from gpuir.ir.types import i64
from gpuir.ops import tensor as t
from gpuir.ops.scalar import flops_of

Mode = Literal["nearest", "linear", "cubic"]


def upsample(n: TorchNode, e: Emitter, mode: Mode, exact: bool, antialias: bool) -> Value:
    """Image axes resampled to the result's extents, by the factors that the call gives, else by
    their ratio. torch's nearest is the cell below, unless `exact`; its antialiased cubic has
    another coefficient. Of a backward call, the gradient of that."""
    shape = n.type.shape
    x: Value = n.one_of("input", "self", "grad_output")
    gradient = "grad_output" in n.args
    before, after = (shape, x.type.shape) if gradient else (x.type.shape, shape)
    scales, coords = _places(n, mode, exact, before[2:], after[2:])
    how: dict[str, Any] = {
        "shape": shape,
        "scales": (1.0, 1.0, *scales),
        "mode": mode,
        "coords": coords,
        "nearest": "round_prefer_ceil" if exact else "floor",
        "cubic_a": -0.5 if antialias else -0.75,
        "antialias": antialias,
    }
    return e(t.ResizeGradient(x, **how) if gradient else t.Resize(x, **how))


def _places(
    n: TorchNode, mode: Mode, exact: bool, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[tuple[float, ...], str]:
    """The factor of each image axis, and the rule of its coordinates."""
    count = len(before)
    given = n.args.get("scale_factors") or [n.args.get(f"scales_{a}") for a in "dhw"[-count:]]
    if count == 1 and "scales" in n.args:
        given = [n.args["scales"]]
    ratios = zip(after, before, given or (None,) * count, strict=True)
    scales = tuple(float(g) if g else a / b for a, b, g in ratios)
    if n.args.get("align_corners"):  # whatever the factors: the ends meet the ends
        return tuple(a / b for a, b in zip(after, before, strict=True)), "align_corners"
    return scales, "asymmetric" if mode == "nearest" and not exact else "half_pixel"


def resampling(mode: Mode, exact: bool = False, antialias: bool = False) -> Converter:
    return partial(upsample, mode=mode, exact=exact, antialias=antialias)


RESAMPLING = {
    **{f"upsample_nearest{d}d": resampling("nearest") for d in (1, 2, 3)},
    **{f"_upsample_nearest_exact{d}d": resampling("nearest", exact=True) for d in (1, 2, 3)},
    "upsample_linear1d": resampling("linear"),
    "upsample_bilinear2d": resampling("linear"),
    "upsample_trilinear3d": resampling("linear"),
    "upsample_bicubic2d": resampling("cubic"),
    "_upsample_bilinear2d_aa": resampling("linear", antialias=True),
    "_upsample_bicubic2d_aa": resampling("cubic", antialias=True),
}


def grid_sample(n: TorchNode, e: Emitter) -> Value:
    mode = ("linear", "nearest", "cubic")[n.args["interpolation_mode"]]
    padding = ("zeros", "border", "reflection")[n.args["padding_mode"]]
    align = bool(n.args["align_corners"])
    return sampled(e, n["input"], n["grid"], mode=mode, padding=padding, align=align)


def folded(n: TorchNode, e: Emitter) -> Value:
    """col2im. Work: an addition a cell."""
    x = n["self"]
    alone = x.type.rank == 2
    x = reshaped(e, x, (1, *x.type.shape)) if alone else x
    image, block = tuple(n.args["output_size"]), tuple(n.args["kernel_size"])
    strides, low, dilations = (spread(n.args[a], 2) for a in ("stride", "padding", "dilation"))
    gives = n.type.with_shape((1, *n.type.shape)) if alone else n.type
    work = x.type.size * flops_of("add", x.type.dtype)
    window = t.SlidingWindow(block, strides, low, low, dilations)
    return reshaped(e, column_image(e, x, image, window, gives=gives, work=work), n.type.shape)


def fourier(n: TorchNode, e: Emitter) -> Value:
    """A discrete Fourier transform over axes: 5 n log2 n operations for n complex cells, as FFTW
    counts (fftw.org/speed), half of that where one side is real."""
    x = n["self"]
    axes = tuple(a % x.type.rank for a in n.args["dim"])
    kind = n.op.partition(".")[0].removeprefix("_fft_")
    length = int(n.args.get("last_dim_size", 0))
    wide = n.type.shape if kind == "c2r" else x.type.shape
    points = prod(wide[a] for a in axes)
    work = round(5 * prod(wide) * log2(max(points, 2)) / (1 if kind == "c2c" else 2))
    attrs = (
        *(("kind", kind), ("axes", axes), ("normalization", int(n.args["normalization"]))),
        *(("onesided", bool(n.args.get("onesided"))), ("forward", bool(n.args.get("forward")))),
        ("length", length),
    )
    return e(t.Routine("fft", (x,), (n.type,), attrs, work=work))


def distances(n: TorchNode, e: Emitter) -> Value:
    """cdist: the p-norm of the difference of each row of x1 and each of x2. As a product where p is
    2 and there are more than 25 rows, as torch computes it."""
    a, b, p = n["x1"], n["x2"], float(n.args["p"])
    rows, columns = a.type.shape[-2], b.type.shape[-2]
    mode = n.args["compute_mode"]
    if p == 2 and (mode == 1 or (mode in (None, 0) and max(rows, columns) > 25)):
        return euclidean(n, e, a, b)
    *lead, _, width = a.type.shape
    left = reshaped(e, a, (*lead, rows, 1, width))
    right = reshaped(e, b, (*b.type.shape[:-2], 1, columns, width))
    apart = e.map("abs", e.map("sub", left, right))
    return norm_of(e, apart, p)


def norm_of(e: Emitter, x: Value, p: float) -> Value:
    """The p-norm along the last axis of what is not negative."""
    dtype, axes = x.type.dtype, (x.type.rank - 1,)
    if p == 0:
        return over(e, "sum", cast(e, e.map("ne", x, 0.0), dtype), axes, False)
    if p == float("inf"):
        return over(e, "max", x, axes, False)
    powers = x if p == 1 else mapped(e, "pow", x, p, dtype=dtype)
    total = over(e, "sum", powers, axes, False)
    return total if p == 1 else mapped(e, "pow", total, 1 / p, dtype=dtype)


def euclidean(n: TorchNode, e: Emitter, a: Value, b: Value) -> Value:
    """sqrt(a^2 + b^2 - 2 a b)."""
    dtype = n.type.dtype
    products = (mapped(e, "mul", x, x, dtype=dtype) for x in (a, b))
    squares = [over(e, "sum", x, (x.type.rank - 1,)) for x in products]
    both = e(t.Matmul(a, matrices_turned(e, b)))
    total = mapped(e, "add", squares[0], matrices_turned(e, squares[1]), dtype=dtype)
    total = mapped(e, "sub", total, mapped(e, "mul", both, 2, dtype=dtype), dtype=dtype)
    return mapped(e, "sqrt", mapped(e, "max", total, 0, dtype=dtype), dtype=dtype)


def pairs(n: TorchNode, e: Emitter) -> Value:
    """pdist: the distances of all pairs of rows, each once."""
    x, p = n["self"], float(n.args["p"])
    first, second = np.triu_indices(x.type.shape[0], 1)
    a, b = (e(t.Gather(x, e.constant(i, i64))) for i in (first, second))
    return norm_of(e, e.map("abs", e.map("sub", a, b)), p)


def masked_scatter(n: TorchNode, e: Emitter) -> Value:
    """The cells where the mask holds, replaced by those of the source one after another: a scan,
    and a pick."""
    x, mask, source = n["self"], n["mask"], n["source"]
    shape = n.type.shape
    x, mask = widened(e, x, shape), widened(e, mask, shape)
    flat = reshaped(e, cast(e, mask, i64), (n.type.size,))
    place = e.map("sub", e(t.Cumulative("sum", flat, 0)), 1)
    place = e.map("clip", place, 0, max(source.type.size - 1, 0))
    taken = e(t.Gather(reshaped(e, source, (source.type.size,)), place))
    return e.map("where", mask, reshaped(e, taken, shape), x)


def nonzero(n: TorchNode, e: Emitter) -> Value:
    """Indices of the cells that are not zero, a row each; how many there are is given."""
    if not n["self"].type.rank:
        return e.fill(0, n.type)
    return transposed(e, nonzero_places(n, e, n["self"], n.type.shape[0]), (1, 0))


def nonzero_columns(n: TorchNode, e: Emitter) -> Results:
    """The same, an axis at a time."""
    x: Value = n.one_of("self", "condition")
    places = nonzero_places(n, e, x, n.type.shape[0])
    return tuple(pick(e, places, 0, i) for i in range(len(n.types)))


def scalar(n: TorchNode, e: Emitter) -> Any:
    raise n.refused(
        "a Python number in the program depends on the data",
        fix="compute with tensors instead of .item()",
    )


CONVERTERS: dict[str, Converter] = {
    **{name + way: how for name, how in RESAMPLING.items() for way in ("", "_backward")},
    "grid_sampler_2d": grid_sample,
    "grid_sampler_3d": grid_sample,
    "col2im": folded,
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), fourier),
    "_cdist_forward": distances,
    "_pdist_forward": pairs,
    "masked_scatter": masked_scatter,
    "nonzero": nonzero,
    "argwhere": nonzero,
    "nonzero_static": nonzero,
    "nonzero_numpy": nonzero_columns,
    "where.default": nonzero_columns,
    "_local_scalar_dense": scalar,
}
