"""Resampling, region pooling, signal transforms and detection post-processing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, log2, prod

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import reshaped, sampled
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.frontends.onnx.proto import DTYPES
from gpuir.interp import cast, evaluate
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, f32, i64
from gpuir.ops import tensor as t

# ---------------------------------------------------------------------------- resize

COORDS = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
    *("tf_half_pixel_for_nn", "tf_crop_and_resize"),
)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
INTERPOLATION = ("nearest", "linear", "cubic")


def resize(n: OnnxNode, e: Emitter) -> Value:
    """Opset 11 on; the settings of 10 and of Upsample are fixed.

    The operator's text multiplies a scaled extent by the region's; ONNX's own shape inference and
    evaluator, and onnxruntime, do not, and neither do we.
    """
    if n.version < 11:
        return legacy_resize(n[0], n.numbers(1, "the scales"), n, e)
    x = n[0]
    rank = x.type.rank
    axes = [a % rank for a in n.attr("axes") or range(rank)]
    coords = n.choice("coordinate_transformation_mode", "half_pixel", COORDS)
    roi = ([0.0] * rank, [1.0] * rank)
    if coords == "tf_crop_and_resize":
        given = n.numbers(1, "the region of interest")
        expect(n, "values of roi (a start and an end for each axis)", len(given) / 2, len(axes))
        for ends, row in zip(roi, (given[: len(axes)], given[len(axes) :]), strict=True):
            for axis, end in zip(axes, row, strict=True):
                ends[axis] = float(end)
    factors = [1.0] * rank
    shape = list(x.type.shape)
    if n.get(3) is not None and n[3].type.size:
        sizes = n.ints(3, "the sizes")
        expect(n, "sizes", len(sizes), len(axes))
        stretch(n, shape, factors, axes, sizes)
    else:
        scales = n.numbers(2, "the scales")
        expect(n, "scales", len(scales), len(axes))
        for axis, scale in zip(axes, scales, strict=True):
            factors[axis] = float(scale)
            shape[axis] = scaled(n, shape[axis], scale)
    if shape == list(x.type.shape) and all(f == 1 for f in factors) and roi[1] == [1.0] * rank:
        return x
    return e(
        t.Resize(
            x,
            shape=tuple(shape),
            scales=tuple(factors),
            mode=n.choice("mode", "nearest", INTERPOLATION),
            coords=coords,
            nearest=n.choice("nearest_mode", NEAREST[0], NEAREST),
            cubic_a=n.attr("cubic_coeff_a", -0.75),
            exclude_outside=bool(n.attr("exclude_outside", 0)),
            antialias=bool(n.attr("antialias", 0)),
            roi=(*roi[0], *roi[1]) if coords == "tf_crop_and_resize" else (),
            outside=n.attr("extrapolation_value", 0.0),
        )
    )


def scaled(n: OnnxNode, extent: int, scale: float) -> int:
    """An extent times a scale, rounded down; in f32, as scales are."""
    if not 0 < scale < 2**31:
        raise n.refused("a scale is out of range", "more than 0, less than 2^31", f"{scale:g}")
    return int(np.floor(np.float32(extent) * np.float32(scale)))


def expect(n: OnnxNode, what: str, found: float, count: int) -> None:
    if found != count:
        raise n.refused(
            f"the number of {what} is wrong", f"one for each of {count} axes", f"{found:g}"
        )


def stretch(
    n: OnnxNode, shape: list[int], factors: list[float], axes: list[int], sizes: tuple[int, ...]
) -> None:
    """Sets the extents and factors that `sizes` ask for, rounding halves up where the aspect ratio
    is kept."""
    policies = ("stretch", "not_larger", "not_smaller")
    policy = n.choice("keep_aspect_ratio_policy", "stretch", policies)
    ratios = [size / max(shape[axis], 1) for axis, size in zip(axes, sizes, strict=True)]
    for axis, size, ratio in zip(axes, sizes, ratios, strict=True):
        factor = {"not_larger": min(ratios), "not_smaller": max(ratios)}.get(policy, ratio)
        factors[axis] = factor
        shape[axis] = size if policy == "stretch" else int(factor * shape[axis] + 0.5)


def upsample(n: OnnxNode, e: Emitter) -> Value:
    scales = n.attr("scales") if n.version < 9 else n.numbers(1, "the scales")
    if scales is None:
        raise n.refused("the scales are missing")
    return legacy_resize(n[0], tuple(scales), n, e)


def legacy_resize(x: Value, scales: tuple[float, ...], n: OnnxNode, e: Emitter) -> Value:
    """Output cell i samples i / scale. The nearest cell is the one below; in Resize-10, along an
    axis that shrinks, the one above: what ONNX's own example and onnxruntime do."""
    expect(n, "scales", len(scales), x.type.rank)
    mode = n.choice("mode", "nearest", ("nearest", "linear", "bilinear"))
    mode = "linear" if mode == "bilinear" else mode

    def along(x: Value, chosen: Callable[[float], bool], nearest: str) -> Value:
        factors = [float(s) if chosen(s) else 1.0 for s in scales]
        if all(f == 1 for f in factors):
            return x
        rows = zip(x.type.shape, factors, strict=True)
        shape = tuple(scaled(n, extent, f) for extent, f in rows)
        return e(
            t.Resize(
                x,
                shape=shape,
                scales=tuple(factors),
                mode=mode,
                coords="asymmetric",
                nearest=nearest,
            )
        )

    if mode != "nearest" or n.op == "Upsample":
        return along(x, lambda s: True, "floor")
    return along(along(x, lambda s: s < 1, "ceil"), lambda s: s >= 1, "floor")


# ---------------------------------------------------------------------------- sampling at points


def grid_sample(n: OnnxNode, e: Emitter) -> Value:
    x, grid = n[0], n[1]
    spatial = x.type.rank - 2
    if grid.type.rank != x.type.rank or grid.type.shape[-1] != spatial:
        raise n.refused(
            "the shape of the grid does not match x",
            f"[N, .., {spatial}] with {x.type.rank} axes",
            f"x: {x.type}, grid: {grid.type}",
        )
    mode = n.choice("mode", "linear", (*INTERPOLATION, "bilinear", "bicubic"))
    padding = n.choice("padding_mode", "zeros", ("zeros", "border", "reflection"))
    align = bool(n.attr("align_corners", 0))
    return sampled(e, x, grid, mode=mode.removeprefix("bi"), padding=padding, align=align)


def affine_grid(n: OnnxNode, e: Emitter) -> Value:
    """Every cell's position in -1..1, with a one behind, times the transposed matrix."""
    theta = n[0]
    batch, *_ = size = n.ints(1, "the size of the grid") or (0,)
    extents = size[2:]
    spatial = len(extents)
    if theta.type.shape != (batch, spatial, spatial + 1):
        raise n.refused(
            "the shape of theta does not match the size", [batch, spatial, spatial + 1], theta.type
        )
    align = bool(n.attr("align_corners", 0))

    def positions() -> np.ndarray:
        rows = [
            np.linspace(-1, 1, count) if align else (2 * np.arange(count) + 1) / count - 1
            for count in extents
        ]
        axes = np.meshgrid(*rows, indexing="ij")
        flat = np.stack([*reversed(axes), np.ones(extents)], axis=-1).reshape(-1, spatial + 1)
        return cast(flat, theta.type.dtype)

    points = e.lazy(TensorType((prod(extents), spatial + 1), theta.type.dtype), positions, "grid")
    y = e(t.Matmul(points, e(t.Transpose(theta, (0, 2, 1)))))
    return reshaped(e, y, (batch, *extents, spatial))


# ---------------------------------------------------------------------------- regions


def roi_align(n: OnnxNode, e: Emitter) -> Value:
    """Work: for each result cell its samples, each eight operations of bilinear interpolation.

    He et al., Mask R-CNN, ICCV 2017.
    """
    x, rois, images = n[0], n[1], n[2]
    size = (n.attr("output_height", 1), n.attr("output_width", 1))
    ratio = n.attr("sampling_ratio", 0)
    if ratio <= 0:
        e.assume(
            f"{n.name}: RoiAlign with sampling_ratio 0 is assumed to take 2 by 2 "
            "sampling points in each cell"
        )
    default = "half_pixel" if n.version >= 16 else "output_half_pixel"
    attrs = (
        ("mode", n.choice("mode", "avg", ("avg", "max"))),
        ("size", size),
        ("ratio", ratio),
        ("scale", n.attr("spatial_scale", 1.0)),
        ("half_pixel", n.attr("coordinate_transformation_mode", default) == "half_pixel"),
    )
    result = x.type.with_shape((rois.type.shape[0], x.type.shape[1], *size))
    work = 8 * result.size * (ratio if ratio > 0 else 2) ** 2
    return e(t.Routine("roi_align", (x, rois, images), (result,), attrs, work=work))


def max_roi_pool(n: OnnxNode, e: Emitter) -> Value:
    """Work: a comparison for each cell of an image a region: at most the whole of it.

    Girshick, Fast R-CNN, ICCV 2015.
    """
    x, rois = n[0], n[1]
    size = tuple(n.attr("pooled_shape"))
    result = x.type.with_shape((rois.type.shape[0], x.type.shape[1], *size))
    attrs = (("size", size), ("scale", n.attr("spatial_scale", 1.0)))
    work = rois.type.shape[0] * prod(x.type.shape[1:])
    return e(t.Routine("max_roi_pool", (x, rois), (result,), attrs, work=work))


def non_max_suppression(n: OnnxNode, e: Emitter) -> Value:
    """Work, for each image and class: a sort, n log2 n comparisons, and each box against those kept
    before it, 15 operations (four extrema, two differences, areas, quotient, comparison)."""
    boxes, scores = n[0], n[1]
    images, count = boxes.type.shape[:2]
    classes = scores.type.shape[1]
    attrs: list[tuple[str, int | float]] = [("center", int(n.attr("center_point_box", 0)))]
    args = [boxes, scores]
    most = count if n.get(2) is not None else 0
    for i, name in ((2, "most"), (3, "overlap"), (4, "score")):
        value, known = n.get(i), n.known(i)
        if value is None or not value.type.size:
            continue
        if known is None:
            attrs.append((f"{name}_operand", len(args)))
            args.append(value)
        else:
            attrs.append((name, known.reshape(()).item() if known.size == 1 else known.item(0)))
            most = min(most, max(int(known.item(0)), 0)) if name == "most" else most
    bound = images * classes * most
    work = images * classes * (count * ceil(log2(max(count, 2))) + 15 * count * most)
    result = TensorType((bound, 3), i64)
    op = t.Routine("nms", tuple(args), (result,), tuple(attrs), work=work)
    return bounded(op, n, e, f"{n.name}: all {bound} boxes taken as selected")


def bounded(op: t.Routine, n: OnnxNode, e: Emitter, assumption: str) -> Value:
    """A routine whose result may be shorter than its type: exactly known if the operands are."""
    known = {v: e.array_of(v) for v in op.args}
    arrays = {v: array for v, array in known.items() if array is not None}
    if len(arrays) == len(known):
        return e.constant(evaluate(op, arrays, loose=True)[0])
    if op.gives[0].size:
        e.assume(assumption)
    return e(op)


# ---------------------------------------------------------------------------- signals


def fft_work(length: int, transforms: int, real: bool) -> int:
    """5 n log2 n for a complex transform, half of it for a real one: the usual count, of
    radix 2 (Frigo and Johnson, FFTW, ICASSP 1998)."""
    each = 5 * length * log2(max(length, 2))
    return ceil(each * transforms / (2 if real else 1))


def dft(n: OnnxNode, e: Emitter) -> Value:
    """The axis is an attribute before opset 20, an input from there on."""
    x = n[0]
    shape = x.type.shape
    rank = len(shape)
    inverse, onesided = bool(n.attr("inverse", 0)), bool(n.attr("onesided", 0))
    if n.version < 20:
        axis = n.axis(rank, 1)
    else:
        given = n.get(2)
        axis = n.from_front(-2 if given is None else n.integer(2, "the axis"), rank)
    if rank < 2 or axis == rank - 1 or shape[-1] not in (1, 2):
        raise n.refused(
            "the shape of the signal or its axis is wrong",
            "[.., signal, .., 1 or 2]: the last axis holds real and imaginary parts, "
            "and the axis of the transform is before it",
            f"{x.type}, axis {axis}",
        )
    if n.get(1) is not None and n[1].type.size:
        length = n.integer(1, "the length of the transform")
    else:
        length = 2 * (shape[axis] - 1) if inverse and onesided else shape[axis]
    bins = length // 2 + 1 if onesided and not inverse else length
    parts = 1 if onesided and inverse else 2
    result = x.type.with_shape((*shape[:axis], bins, *shape[axis + 1 : -1], parts))
    transforms = prod(shape[:-1]) // max(shape[axis], 1)
    attrs = (("axis", axis), ("length", length), ("inverse", inverse), ("onesided", onesided))
    work = fft_work(length, transforms, shape[-1] == 1 or parts == 1)
    return e(t.Routine("dft", (x,), (result,), attrs, work=work))


def stft(n: OnnxNode, e: Emitter) -> Value:
    """Work: the frames' transforms, and a multiplication by the window."""
    x, window = n[0], n.get(2)
    step = n.integer(1, "the frame step")
    batch, length, *parts = x.type.shape
    real = parts in ([], [1])
    if n.get(3) is not None and n[3].type.size:
        frame = n.integer(3, "the frame length")
    else:
        frame = window.type.size if window is not None else length
    onesided = bool(n.attr("onesided", 1)) and real
    if step < 1 or frame < 1:
        raise n.refused(
            "the frame length or the frame step is 0", found=f"frame {frame}, step {step}"
        )
    frames = max((length - frame) // step + 1, 0)
    bins = frame // 2 + 1 if onesided else frame
    result = x.type.with_shape((batch, frames, bins, 2))
    attrs = (("step", step), ("frame", frame), ("onesided", onesided))
    args = (x,) if window is None else (x, window)
    work = fft_work(frame, batch * frames, real)
    if window is not None:
        work += batch * frames * frame * prod(parts)
    return e(t.Routine("stft", args, (result,), attrs, work=work))


def window(n: OnnxNode, e: Emitter, first: float, second: float, third: float) -> Value:
    """y[i] = first - second cos(2 pi i / N) + third cos(4 pi i / N), N one less unless periodic."""
    size = n.integer(0, "the size of the window")
    dtype = output_dtype(n)
    period = size if n.attr("periodic", 1) else size - 1

    def compute() -> np.ndarray:
        angle = 2 * np.pi * np.arange(size) / max(period, 1)
        return cast(first - second * np.cos(angle) + third * np.cos(2 * angle), dtype)

    return e.lazy(TensorType((size,), dtype), compute, "window")


def output_dtype(n: OnnxNode) -> DType:
    code = n.attr("output_datatype", 1)
    if code not in DTYPES:
        raise n.refused("output_datatype is not a type of numbers", found=f"output_datatype {code}")
    return DTYPES[code]


def mel_weight_matrix(n: OnnxNode, e: Emitter) -> Value:
    """Triangles over the bins of a onesided spectrum, their corners evenly spaced in mel:
    mel(f) = 2595 log10(1 + f / 700)."""
    bands, length, rate = (n.integer(i, "the filter bank's size") for i in range(3))
    low, high = (n.number(i, "the filter bank's edges") for i in (3, 4))
    bins = length // 2 + 1
    dtype = output_dtype(n)

    def compute() -> np.ndarray:
        low_mel, high_mel = (2595 * np.log10(1 + edge / 700) for edge in (low, high))
        corners = np.arange(bands + 2) * ((high_mel - low_mel) / (bands + 2)) + low_mel
        hertz = 700 * (10 ** (corners / 2595) - 1)
        corners = ((length + 1) * hertz // rate).astype(int)
        start, peak, end = corners[:-2], corners[1:-1], corners[2:]
        j = np.arange(bins)[:, None]
        rising = (j - start) / np.maximum(peak - start, 1)
        falling = (end - j) / np.maximum(end - peak, 1)
        y = np.where((j >= start) & (j <= peak) & (peak > start), rising, 0)
        y = np.where((j == peak) & (peak == start), 1, y)
        return cast(np.where((j >= peak) & (j < end), falling, y), dtype)

    return e.lazy(TensorType((bins, bands), dtype), compute, "mel")


# ---------------------------------------------------------------------------- others


def det(n: OnnxNode, e: Emitter) -> Value:
    """Work: 2/3 m^3 for the LU factors of each matrix, and the product of the diagonal."""
    x = n[0]
    *batch, rows, columns = x.type.shape if x.type.rank > 1 else (0, 1)
    if rows != columns:
        raise n.refused("the input is not a square matrix", found=x.type)
    work = prod(batch) * (2 * rows**3 // 3 + rows)
    return e(t.Routine("det", (x,), (x.type.with_shape(tuple(batch)),), work=work))


def tf_idf(n: OnnxNode, e: Emitter) -> Value:
    """Work: each n-gram at each position and skip looked up once, an operation an item, and one for
    each cell's weight. The pool and what goes with it are operands."""
    x = n[0]
    if n.attr("pool_strings") or n.attr("pool_int64s") is None:
        raise ModelError(
            "TfIdfVectorizer over strings",
            expected="pool_int64s",
            fix="gpuir analyses tensors of numbers only",
        )
    pool, places = (np.asarray(n.attr(name), np.int64) for name in ("pool_int64s", "ngram_indexes"))
    weights = n.attr("weights")
    mode = n.choice("mode", "TF", ("TF", "IDF", "TFIDF"))
    shortest, longest = n.attr("min_gram_length", 1), n.attr("max_gram_length", 1)
    skips = n.attr("max_skip_count", 0)
    args = [x, e.constant(pool), e.constant(places)]
    if weights is not None and mode != "TF":
        args.append(e.constant(np.asarray(weights, np.float32)))
    result = TensorType((*x.type.shape[:-1], int(places.max(initial=-1)) + 1), f32)
    counts = tuple(n.attr("ngram_counts"))
    if not 1 <= shortest <= longest <= len(counts) or skips < 0:
        raise n.refused(
            "the lengths of the n-grams are out of range",
            f"lengths from 1 to {len(counts)} (the length of ngram_counts), and "
            "max_skip_count of 0 or more",
            f"lengths from {shortest} to {longest}, max_skip_count={skips}",
        )
    rows, lookups = prod(x.type.shape[:-1]), 0
    for length in range(shortest, longest + 1):  # length * the sum of tokens - (length - 1) * skip
        tokens, reach = x.type.shape[-1], length - 1
        most = min(skips + 1, (tokens - 1) // reach) if reach else min(1, tokens)
        lookups += length * (most * tokens - reach * most * (most + 1) // 2)
    attrs = (
        *(("mode", mode), ("counts", counts)),
        *(("shortest", shortest), ("longest", longest), ("skips", skips)),
    )
    work = rows * lookups + (result.size if mode != "TF" else 0)
    return e(t.Routine("tf_idf", tuple(args), (result,), attrs, work=work))


def image_decoder(n: OnnxNode, e: Emitter) -> Value:
    raise ModelError(
        "ImageDecoder reads a compressed file: the size of the image is "
        "unknown until it is decoded",
        expected="a model whose input is an image in pixels",
        fix="decode the image before the model, and remove this operator from the model",
    )


CONVERTERS: dict[str, Converter] = {
    "Resize": resize,
    "Upsample": upsample,
    "GridSample": grid_sample,
    "AffineGrid": affine_grid,
    "RoiAlign": roi_align,
    "MaxRoiPool": max_roi_pool,
    "NonMaxSuppression": non_max_suppression,
    "DFT": dft,
    "STFT": stft,
    "HannWindow": partial(window, first=0.5, second=0.5, third=0.0),
    "HammingWindow": partial(window, first=25 / 46, second=21 / 46, third=0.0),
    "BlackmanWindow": partial(window, first=0.42, second=0.5, third=0.08),
    "MelWeightMatrix": mel_weight_matrix,
    "Det": det,
    "TfIdfVectorizer": tf_idf,
    "ImageDecoder": image_decoder,
}
