"""What each `t.routine` computes, in numpy: whole library routines, by name.

A row of `ROUTINES` is a function from the routine's settings and operands to its results:

    def nms(attrs: Mapping[str, Any], boxes: Array, scores: Array) -> tuple[Array, ...]

`attrs` are `op.attrs` as a dictionary. Operands come in the order of `op.args`, as numpy arrays of
exactly the operands' dtypes (narrow floats from ml_dtypes), and must not be changed. Results are a
tuple, one for each of `op.gives` and of exactly its dtype; interp checks dtypes and shapes. Where
`gives` holds an upper bound of a length that depends on the data, a result may be shorter, and the
graph says so in `assumed`. An absent optional operand is left out of `args`, so `attrs` says which
are there when it matters. Numpy only: no onnx, no scipy.
"""

# numpy's stubs leave many types partly unknown
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from gpuir.interp.arrays import Array
from gpuir.interp.linalg import LINALG
from gpuir.interp.multi_tensor import multi_tensor

Routine = Callable[..., tuple[Array, ...]]  # (attrs, *operands) -> results


# ---------------------------------------------------------------------------- sampling at points

Fold = Callable[[Array, int], tuple[Array, Array]]  # (indices, extent) -> (cells, which are there)


def outside_is_zero(index: Array, extent: int) -> tuple[Array, Array]:
    return np.clip(index, 0, extent - 1).astype(np.intp), (index >= 0) & (index < extent)


def outside_is_edge(index: Array, extent: int) -> tuple[Array, Array]:
    return np.clip(index, 0, extent - 1).astype(np.intp), np.ones(index.shape, bool)


def reflected(x: Array, low: float, high: float) -> Array:
    """x where it lies between the borders, else folded back at them until it does."""
    span = high - low
    if span <= 0:
        return np.full_like(x, low)
    u = np.mod(x - low, 2 * span)
    return np.where((x < low) | (x > high), low + np.minimum(u, 2 * span - u), x)


def keys_weight(distance: Array, a: float = -0.75) -> Array:
    """R. G. Keys, Cubic convolution interpolation, IEEE Trans. ASSP 29(6), 1981."""
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def linear_weight(distance: Array) -> Array:
    return np.maximum(1 - np.abs(distance), 0)


def weighted_taps(
    image: Array,
    points: Array,
    fold: Fold,
    taps: tuple[int, ...] = (0, 1),
    weight: Callable[[Array], Array] = linear_weight,
) -> Iterator[Array]:
    """image[c, ..] at each of points[p, axis], one [c, p] for every tap around it: their sum is the
    interpolated value."""
    below = np.floor(points)
    for offsets in itertools.product(taps, repeat=points.shape[1]):
        factor = np.ones(len(points), points.dtype)
        cells: list[Array] = []
        for axis, offset in enumerate(offsets):
            index = below[:, axis] + offset
            cell, there = fold(index, image.shape[1 + axis])
            factor = factor * np.where(there, weight(points[:, axis] - index), 0)
            cells.append(cell)
        yield image[(slice(None), *cells)] * factor


def windows_along(cells: int, results: int) -> list[slice]:
    """From floor(i a / b) to ceil((i + 1) a / b): adaptive pools."""
    return [slice(i * cells // results, -(-(i + 1) * cells // results)) for i in range(results)]


def adaptive_pool(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """The mean or the largest cell of each window, and where that is in the image laid flat."""
    count, shape = attrs["count"], tuple(attrs["shape"])
    spatial = x.shape[-count:]
    y, at = np.zeros(shape, x.dtype), np.zeros(shape, np.int64)
    places = np.arange(int(np.prod(spatial))).reshape(spatial)
    axes = [windows_along(a, b) for a, b in zip(spatial, shape[-count:], strict=True)]
    for index in np.ndindex(*shape[-count:]):
        window = tuple(axis[i] for axis, i in zip(axes, index, strict=True))
        flat = x[(..., *window)].reshape(*x.shape[:-count], -1)
        if attrs["fn"] == "mean":
            y[(..., *index)] = flat.mean(-1, dtype=np.result_type(x, np.float32))
        else:
            best = flat.argmax(-1)
            y[(..., *index)] = np.take_along_axis(flat, best[..., None], -1)[..., 0]
            at[(..., *index)] = places[window].reshape(-1)[best]
    return (y,) if attrs["fn"] == "mean" else (y, at)


def adaptive_pool_gradient(attrs: Mapping[str, Any], dy: Array) -> tuple[Array, ...]:
    """Each mean's gradient, shared out evenly to the cells of its window."""
    count, shape = attrs["count"], tuple(attrs["shape"])
    dx = np.zeros(shape, np.result_type(dy, np.float32))
    extents = zip(shape[-count:], dy.shape[-count:], strict=True)
    axes = [windows_along(a, b) for a, b in extents]
    for index in np.ndindex(*dy.shape[-count:]):
        window = tuple(axis[i] for axis, i in zip(axes, index, strict=True))
        cells = int(np.prod([w.stop - w.start for w in window]))
        one = (slice(None),) * (dy.ndim - count)
        share = dy[(*one, *index)] / cells
        dx[(..., *window)] += share.reshape(*share.shape, *(1,) * count)
    return (dx.astype(dy.dtype),)


def edge_padding_gradient(attrs: Mapping[str, Any], dy: Array) -> tuple[Array, ...]:
    """Of padding with the nearest cell: every gradient added to its cell's."""
    dx = dy.astype(np.result_type(dy, np.float32))
    for axis, (low, cells) in enumerate(zip(attrs["low"], attrs["shape"], strict=True)):
        at = np.clip(np.arange(dx.shape[axis]) - low, 0, cells - 1)
        rows = np.moveaxis(dx, axis, 0)
        total = np.zeros((cells, *rows.shape[1:]), dx.dtype)
        np.add.at(total, at, rows)
        dx = np.moveaxis(total, 0, axis)
    return (dx.astype(dy.dtype),)


def search(attrs: Mapping[str, Any], line: Array, x: Array, *sorter: Array) -> tuple[Array, ...]:
    """How many numbers of a sorted line (of each row's own) are below x, or up to it."""
    if sorter:
        line = np.take_along_axis(line, sorter[0], -1)
    side = "right" if attrs["right"] else "left"
    if line.ndim == 1:
        return (np.searchsorted(line, x, side).astype(attrs["dtype"]),)
    found = np.zeros(x.shape, attrs["dtype"])
    for row in np.ndindex(*line.shape[:-1]):
        found[row] = np.searchsorted(line[row], x[row], side)
    return (found,)


def mode(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """The commonest number along an axis, the least of several, and its last place."""
    rows = np.moveaxis(x, attrs["axis"], -1)
    y, at = np.zeros(rows.shape[:-1], x.dtype), np.zeros(rows.shape[:-1], np.int64)
    for i in np.ndindex(*y.shape):
        values, counts = np.unique(rows[i], return_counts=True)
        y[i] = values[counts.argmax()]
        at[i] = np.flatnonzero(rows[i] == y[i])[-1]
    return y, at


def grid_sample(attrs: Mapping[str, Any], x: Array, grid: Array) -> tuple[Array, ...]:
    """y[n, c, p] = x[n, c] at grid[n, p], whose last axis holds the spatial axes in reverse, each
    in -1..1: from the outer cells' centres under `align_corners`, else from their outer edges."""
    align, padding, mode = attrs["align_corners"], attrs["padding"], attrs["mode"]
    extents = x.shape[2:]
    borders = [(0.0, n - 1.0) if align else (-0.5, n - 0.5) for n in extents]
    fold = outside_is_edge if padding == "border" else outside_is_zero

    def reflecting(index: Array, extent: int) -> tuple[Array, Array]:
        low, high = (0.0, extent - 1.0) if align else (-0.5, extent - 0.5)
        return outside_is_edge(reflected(index, low, high), extent)

    results: list[Array] = []
    for image, where in zip(x, grid, strict=True):
        g = where.reshape(-1, len(extents))[:, ::-1].astype(np.result_type(grid, np.float32))
        sizes = np.asarray(extents, g.dtype)
        points = (g + 1) / 2 * (sizes - 1) if align else ((g + 1) * sizes - 1) / 2
        if mode == "nearest":
            points = np.rint(points)
        for axis, (low, high) in enumerate(borders if mode != "cubic" else ()):
            row = points[:, axis]
            if padding == "border":
                points[:, axis] = np.clip(row, 0, extents[axis] - 1)
            elif padding == "reflection":
                points[:, axis] = reflected(row, low, high)
        taps = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}[mode]
        weight = keys_weight if mode == "cubic" else linear_weight
        how = reflecting if padding == "reflection" else fold
        value = sum(weighted_taps(image.astype(g.dtype), points, how, taps, weight))
        results.append(np.reshape(value, (x.shape[1], *grid.shape[1:-1])))
    shape = (*x.shape[:2], *grid.shape[1:-1])
    return (np.reshape(results, shape).astype(x.dtype),)


def deform_conv(
    attrs: Mapping[str, Any], x: Array, w: Array, offset: Array, mask: Array | None = None
) -> tuple[Array, ...]:
    """y[n, k, p] = sum over c, r of w[k, c, r] * mask[n, r, p] * x[n, c, at]: linear between cells,
    zero outside. at = p * strides - low + r * dilations + offset[n, r, p], an offset for each of
    `offset_groups` groups of channels."""
    groups, parts = attrs["groups"], attrs["offset_groups"]
    window, extents = w.shape[2:], offset.shape[2:]
    spatial, taps = len(window), int(np.prod(window))
    rows = zip(window, extents, attrs["strides"], attrs["low"], attrs["dilations"], strict=True)
    axes: list[Array] = [
        np.arange(r)[:, None] * dilation + np.arange(p)[None] * stride - low
        for r, p, stride, low, dilation in rows
    ]  # [r, p] along each axis
    base = np.zeros((spatial, *window, *extents))
    for i, places in enumerate(axes):
        shape = [1] * (2 * spatial)
        shape[i], shape[spatial + i] = places.shape
        base[i] = places.reshape(shape)
    points = int(np.prod(extents))
    base = base.reshape(spatial, taps, points)
    shifts = offset.astype(np.float64).reshape(len(x), parts, taps, spatial, points)
    y = np.zeros((len(x), w.shape[0], points))
    for n, image in enumerate(x.astype(np.float64)):
        columns: list[Array] = []
        for part, channels in enumerate(np.split(image, parts)):
            at = base + shifts[n, part].transpose(1, 0, 2)
            at = at.reshape(spatial, taps * points).T
            value = sum(weighted_taps(channels, at, outside_is_zero))
            value = np.reshape(value, (len(channels), taps, points))
            if mask is not None:
                value = value * mask.reshape(len(x), parts, taps, points)[n, part]
            columns.append(value)
        cells = np.concatenate(columns).reshape(groups, -1, points)
        y[n] = np.matmul(
            w.astype(np.float64).reshape(groups, w.shape[0] // groups, -1), cells
        ).reshape(w.shape[0], points)
    return (y.reshape(len(x), w.shape[0], *extents).astype(x.dtype),)


# ---------------------------------------------------------------------------- regions


def roi_align(attrs: Mapping[str, Any], x: Array, rois: Array, images: Array) -> tuple[Array, ...]:
    """The mean (or largest) of samples in each cell of each region; `ratio` by `ratio` of them, or
    as many as image cells fit when it is 0. Samples more than a cell outside are zero.

    The largest is of the weighted corners, not of the interpolated values: onnxruntime's meaning,
    which ONNX's tests took over.
    """
    rows, columns = attrs["size"]
    half = np.float32(0.5 if attrs["half_pixel"] else 0)
    extents = np.asarray(x.shape[2:], np.float32)
    y = np.zeros((len(rois), x.shape[1], rows, columns), np.float32)
    for i, (roi, image) in enumerate(zip(rois.astype(np.float32), images, strict=True)):
        left, top, right, bottom = roi * np.float32(attrs["scale"]) - half
        size = np.asarray([bottom - top, right - left])
        if not attrs["half_pixel"]:
            size = np.maximum(size, 1)
        cell = size / np.asarray([rows, columns], np.float32)
        counts = [attrs["ratio"] if attrs["ratio"] > 0 else int(np.ceil(c)) for c in cell]
        if min(counts) < 1:
            continue
        lines: list[Array] = [
            start + (np.arange(n)[:, None] + (np.arange(count) + 0.5) / count) * step
            for start, n, count, step in zip(
                (top, left), (rows, columns), counts, cell, strict=True
            )
        ]
        grid = np.meshgrid(*(line.reshape(-1) for line in lines), indexing="ij")
        points: Array = np.stack(grid, -1).reshape(-1, 2)
        there = np.all((points >= -1) & (points <= extents), axis=1)
        inside: Array = np.clip(points, 0, extents - 1)
        taps = [
            tap * there
            for tap in weighted_taps(x[image].astype(np.float32), inside, outside_is_edge)
        ]
        value = np.max(taps, axis=0) if attrs["mode"] == "max" else np.sum(taps, axis=0)
        value = value.reshape(x.shape[1], rows, counts[0], columns, counts[1])
        y[i] = value.max(axis=(2, 4)) if attrs["mode"] == "max" else value.mean(axis=(2, 4))
    return (y.astype(x.dtype),)


def max_roi_pool(attrs: Mapping[str, Any], x: Array, rois: Array) -> tuple[Array, ...]:
    """The largest cell in each part of each region (image, left, top, right, bottom); zero where a
    part is empty. Corners round to the nearest cell, halves away from zero, and are included."""
    rows, columns = attrs["size"]
    y = np.zeros((len(rois), x.shape[1], rows, columns), x.dtype)
    for i, roi in enumerate(rois):
        scaled = np.asarray(roi[1:], np.float32) * np.float32(attrs["scale"])
        left, top, right, bottom = np.trunc(scaled + np.copysign(0.5, scaled)).astype(int)
        spans: list[list[tuple[int, int]]] = []
        for start, end, count, extent in (
            (top, bottom, rows, x.shape[2]),
            (left, right, columns, x.shape[3]),
        ):
            step = max(end - start + 1, 1) / count
            first: Array = np.clip(np.floor(np.arange(count) * step) + start, 0, extent).astype(int)
            last: Array = np.clip(np.ceil((np.arange(count) + 1) * step) + start, 0, extent)
            spans.append(list(zip(first.tolist(), last.astype(int).tolist(), strict=True)))
        for (r, (a, b)), (c, (d, e)) in itertools.product(*map(enumerate, spans)):
            part = x[int(roi[0]), :, a:b, d:e]
            if part.size:
                y[i, :, r, c] = part.max(axis=(1, 2))
    return (y,)


def nms(attrs: Mapping[str, Any], boxes: Array, scores: Array, *more: Array) -> tuple[Array, ...]:
    """[image, class, box] of the boxes kept, best first: those above `score` that overlap no better
    one of their class by more than `overlap`, at most `most` of them. Boxes are two corners, or
    with `center` centre and size."""

    def setting(name: str, default: float | None) -> Any:
        if f"{name}_operand" in attrs:
            return more[attrs[f"{name}_operand"] - 2].reshape(-1)[0]
        return attrs.get(name, default)

    most, overlap, least = setting("most", 0), setting("overlap", 0.0), setting("score", None)
    if attrs["center"]:
        centre, half = boxes[..., :2], boxes[..., 2:] / 2
        low, high = centre - half, centre + half
    else:
        low = np.minimum(boxes[..., :2], boxes[..., 2:])
        high = np.maximum(boxes[..., :2], boxes[..., 2:])
    area = np.prod(high - low, axis=-1)
    kept: list[tuple[int, int, int]] = []
    for image, label in np.ndindex(*scores.shape[:2]):
        row = scores[image, label]
        chosen: list[int] = []
        for box in np.argsort(-row, kind="stable"):
            if len(chosen) >= most:
                break
            if least is not None and not row[box] > least:
                continue
            sides = np.minimum(high[image, chosen], high[image, box]) - np.maximum(
                low[image, chosen], low[image, box]
            )
            shared = np.prod(np.maximum(sides, 0), axis=-1)
            either = area[image, chosen] + area[image, box] - shared
            over = np.divide(shared, either, out=np.zeros_like(shared), where=shared > 0)
            if not np.any((over > overlap) & (shared > 0)):
                chosen.append(int(box))
        kept += [(image, label, box) for box in chosen]
    return (np.asarray(kept, np.int64).reshape(-1, 3),)


# ---------------------------------------------------------------------------- signals


def as_complex(x: Array) -> Array:
    """The last axis, of one real or two parts, as one number."""
    x = x.astype(np.result_type(x, np.float32))
    return x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]


def as_parts(x: Array, dtype: np.dtype[Any]) -> Array:
    return np.stack([x.real, x.imag], axis=-1).astype(dtype)


def dft(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """The discrete Fourier transform along an axis, cut or zero-padded to `length` first."""
    axis, length = attrs["axis"], attrs["length"]
    signal = as_complex(x)
    if attrs["inverse"] and attrs["onesided"]:
        return (np.fft.irfft(signal, length, axis)[..., None].astype(x.dtype),)
    if attrs["inverse"]:
        return (as_parts(np.fft.ifft(signal, length, axis), x.dtype),)
    y = np.fft.fft(signal, length, axis)
    if attrs["onesided"]:
        y = np.take(y, np.arange(length // 2 + 1), axis)
    return (as_parts(y, x.dtype),)


def fft(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """A transform over `axes`: of real cells (r2c), back to them (c2r), or of complex ones (c2c).
    `normalization` 1 divides by the root of the number of points, 2 by that number."""
    axes, kind = tuple(attrs["axes"]), attrs["kind"]
    extents = [x.shape[axis] for axis in axes]
    if kind == "c2r":
        extents[-1] = attrs["length"]
        y: Array = np.fft.irfftn(x, extents, axes, norm="forward")
    elif kind == "r2c" and attrs["onesided"]:
        y = np.fft.rfftn(x, axes=axes)
    elif kind == "r2c" or attrs["forward"]:
        y = np.fft.fftn(x, axes=axes)
    else:
        y = np.fft.ifftn(x, axes=axes, norm="forward")
    points = float(np.prod(extents))
    y = y / (1.0, points**0.5, points)[attrs["normalization"]]
    single = x.dtype in (np.float32, np.complex64)
    names = ("float32", "float64") if kind == "c2r" else ("complex64", "complex128")
    return (y.astype(names[0] if single else names[1]),)


def stft(attrs: Mapping[str, Any], x: Array, window: Array | None = None) -> tuple[Array, ...]:
    """y[n, f, k] = the transform of x[n, f * step + i] * window[i], i below `frame`."""
    frame = attrs["frame"]
    signal = as_complex(x) if x.ndim == 3 else x.astype(np.result_type(x, np.float32))
    count = max((signal.shape[1] - frame) // attrs["step"] + 1, 0)
    cells = np.arange(count)[:, None] * attrs["step"] + np.arange(frame)
    frames = signal[:, cells]
    if window is not None:
        frames = frames * window.astype(np.float32)
    y = np.fft.fft(frames, axis=-1)
    return (as_parts(y[..., : frame // 2 + 1] if attrs["onesided"] else y, x.dtype),)


# ---------------------------------------------------------------------------- others


def det(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """The determinant of each matrix."""
    y = np.linalg.det(x.astype(np.result_type(x, np.float32)))
    return (np.asarray(y).astype(x.dtype),)


def col2im(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """y[n, c, p * strides - low + r * dilations] = the sum of x[n, (c, r), p] that fall there."""
    image, block, strides, low, dilations = (
        attrs[name] for name in ("image", "block", "strides", "low", "dilations")
    )
    batch, depth, _ = x.shape
    reach = [d * (r - 1) + 1 for d, r in zip(dilations, block, strict=True)]
    counts = attrs["counts"]
    channels = depth // int(np.prod(block))
    columns = x.reshape(batch, channels, *block, *counts)
    padded = [
        max((n - 1) * s + r, extent + a)
        for n, s, r, extent, a in zip(counts, strides, reach, image, low, strict=True)
    ]
    y = np.zeros((batch, channels, *padded), x.dtype)
    for tap in np.ndindex(*block):
        cells = tuple(
            slice(r * d, r * d + (n - 1) * s + 1, s)
            for r, d, n, s in zip(tap, dilations, counts, strides, strict=True)
        )
        y[(slice(None), slice(None), *cells)] += columns[(slice(None), slice(None), *tap)]
    inner = tuple(slice(a, a + extent) for a, extent in zip(low, image, strict=True))
    return (y[(slice(None), slice(None), *inner)].astype(x.dtype),)


def im2col(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """y[n, (c, r), p] = x[n, c, p * strides - low + r * dilations], or zero outside: what `col2im`
    adds up."""
    block, counts, strides, low, dilations = (
        attrs[name] for name in ("block", "counts", "strides", "low", "dilations")
    )
    rows = list(zip(counts, strides, dilations, block, strict=True))
    spans = ((n - 1) * s + d * (r - 1) + 1 for n, s, d, r in rows)
    room = zip(spans, low, x.shape[2:], strict=True)
    ends = (max(span - a - size, 0) for span, a, size in room)
    padded = np.pad(x, ((0, 0), (0, 0), *zip(low, ends, strict=True)))
    y = np.zeros((*x.shape[:2], *block, *counts), x.dtype)
    for tap in np.ndindex(*block):
        cells = tuple(
            slice(r * d, r * d + (n - 1) * s + 1, s)
            for r, (n, s, d, _) in zip(tap, rows, strict=True)
        )
        y[(slice(None), slice(None), *tap)] = padded[(slice(None), slice(None), *cells)]
    return (y.reshape(x.shape[0], x.shape[1] * int(np.prod(block)), -1),)


def tf_idf(
    attrs: Mapping[str, Any], x: Array, pool: Array, places: Array, weights: Array | None = None
) -> tuple[Array, ...]:
    """How often each n-gram of the pool stands in each row, its items up to `skips` apart; IDF says
    only whether it does, and weights multiply."""
    starts = [*attrs["counts"], len(pool)]
    grams: dict[tuple[int, ...], int] = {}
    for length, (start, end) in enumerate(itertools.pairwise(starts), 1):
        for at in range(start, end, length):
            grams[tuple(pool[at : at + length].tolist())] = len(grams)
    rows = x.reshape(-1, x.shape[-1])
    y = np.zeros((len(rows), int(places.max(initial=-1)) + 1), np.float32)
    for row, counts in zip(rows.tolist(), y, strict=True):
        for length in range(attrs["shortest"], attrs["longest"] + 1):
            for apart in range(1, attrs["skips"] + 2 if length > 1 else 2):
                for start in range(len(row) - (length - 1) * apart):
                    gram = tuple(row[start : start + (length - 1) * apart + 1 : apart])
                    if gram in grams:
                        counts[places[grams[gram]]] += 1
    if attrs["mode"] == "IDF":
        y = np.minimum(y, 1)
    if weights is not None:
        scale = np.ones(y.shape[1], np.float32)
        scale[places] = weights
        y = y * scale
    return (y.reshape(*x.shape[:-1], -1),)


# ---------------------------------------------------------------------------- selection, order


def compress(attrs: Mapping[str, Any], x: Array, condition: Array) -> tuple[Array, ...]:
    """The slices along an axis whose condition holds."""
    axis = attrs["axis"]
    kept = np.flatnonzero(condition.reshape(-1)[: x.shape[axis]])
    return (np.take(x, kept, axis),)


def nonzero(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """The coordinates of the cells that are not zero, a column each."""
    return (np.stack(np.nonzero(np.atleast_1d(x))).astype(np.int64),)


def unique(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """Distinct cells or slices, first places, which of them each one is, counts; by value, or by
    first place when not `sorted`."""
    axis = attrs.get("axis")
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    if not attrs["sorted"]:
        order = np.argsort(first)
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return values, *(a.reshape(-1).astype(np.int64) for a in (first, inverse, counts))


def reverse_sequence(attrs: Mapping[str, Any], x: Array, lengths: Array) -> tuple[Array, ...]:
    """The first `lengths[b]` cells along the time axis in reverse order, the rest as they are."""
    time, batch = attrs["time_axis"], attrs["batch_axis"]
    along, across = [1] * x.ndim, [1] * x.ndim
    along[time], across[batch] = x.shape[time], x.shape[batch]
    step = np.arange(x.shape[time]).reshape(along)
    length = lengths.astype(np.int64).reshape(across)
    index: Array = np.where(step < length, length - 1 - step, step)
    return (np.take_along_axis(x, index, time),)


# ---------------------------------------------------------------------------- random numbers


def random(attrs: Mapping[str, Any], *operands: Array) -> tuple[Array, ...]:
    """Numbers drawn by numpy's Mersenne Twister from `seed`, so that a run can be repeated. Another
    library draws others of the same distribution.

    `uniform` and `normal` are f32. `keep` is a dropout's mask, true with probability 1 - ratio;
    `bernoulli` takes probabilities and gives booleans, `multinomial` takes unnormalised
    log-probabilities and gives i64, a row for each row.
    """
    draw, shape = np.random.RandomState(attrs["seed"] % 2**32), tuple(attrs["shape"])
    match attrs["kind"]:
        case "uniform":
            drawn: Array = np.asarray(draw.uniform(attrs["low"], attrs["high"], shape), np.float32)
        case "normal":
            drawn = np.asarray(draw.normal(attrs["mean"], attrs["scale"], shape), np.float32)
        case "keep":
            drawn = np.asarray(draw.uniform(size=shape) >= attrs["ratio"])
        case "bernoulli":
            drawn = np.asarray(draw.uniform(size=shape) < operands[0].astype(np.float64))
        case "multinomial":
            scores = operands[0].astype(np.float64)
            odds = np.exp(scores - scores.max(-1, keepdims=True))
            odds /= odds.sum(-1, keepdims=True)
            rows: list[Array] = [draw.choice(len(row), shape[1], p=row) for row in odds]
            drawn = np.stack(rows).astype(np.int64)
        case kind:
            raise ValueError(f"no distribution {kind!r}")
    return (drawn,)


def linear_attention(
    attrs: Mapping[str, Any], query: Array, key: Array, value: Array, *given: Array
) -> tuple[Array, ...]:
    """For each token S = exp(decay) S + k (x) u and o = scale * S' q, where u = v, or by a delta
    rule u = beta * (v - S' k) with S already decayed.

    Yang et al., Gated Delta Networks, 2024.
    """
    left = list(given)
    state, decay, beta = (
        left.pop(0) if attrs[f"has_{name}"] else None for name in ("state", "decay", "beta")
    )
    heads, groups = attrs["heads"], attrs["groups"]
    steps = query.shape[:2]
    q, k, v = (
        x.astype(np.float64).reshape(*steps, n, -1)
        for x, n in ((query, heads), (key, groups), (value, groups))
    )
    readers = max(heads, groups)
    shape = (steps[0], groups, k.shape[-1], v.shape[-1])
    s = np.zeros(shape) if state is None else state.astype(np.float64).reshape(shape)
    kept = None if decay is None else np.exp(decay.astype(np.float64).reshape(*steps, groups, -1))
    rate = None if beta is None else beta.astype(np.float64)
    y = np.empty((*steps, readers, v.shape[-1]))
    for i in range(steps[1]):
        if kept is not None:
            s = s * kept[:, i, :, :, None]
        u = v[:, i]
        if rate is not None:
            u = rate[:, i, :, None] * (u - np.einsum("bgkv,bgk->bgv", s, k[:, i]))
        s = s + k[:, i, :, :, None] * u[:, :, None, :]
        seen = np.repeat(s, readers // groups, axis=1)
        asked = np.repeat(q[:, i], readers // heads, axis=1)
        y[:, i] = attrs["scale"] * np.einsum("bhkv,bhk->bhv", seen, asked)
    present = s.astype(query.dtype if state is None else state.dtype)
    return y.reshape(*steps, -1).astype(query.dtype), present


# ---------------------------------------------------------------------------- tables, trees


def lookup(
    attrs: Mapping[str, Any], x: Array, keys: Array, values: Array, default: Array
) -> tuple[Array, ...]:
    """The value whose key the cell equals, the last of several; `default` where there is none. NaN
    equals NaN."""
    result = np.full(x.shape, default[0], values.dtype)
    for key, value in zip(keys, values, strict=True):
        result[np.isnan(x) if key != key else x == key] = value
    return (result,)


BRANCHES = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)


def trees(
    attrs: Mapping[str, Any],
    x: Array,
    nodes: Array,
    splits: Array,
    roots: Array,
    leaves: Array,
    targets: Array,
    weights: Array,
    members: Array,
) -> tuple[Array, ...]:
    """Each row of x walks each tree from its root to a leaf, whose weights count for their targets.

    A row of `nodes` is: feature, comparison (of BRANCHES; 6 asks for membership), where to go if
    it holds and whether that is a leaf, the same if not, and whether NaN holds. A row of `leaves`
    is first and number of its entries in `targets` and `weights`. `members` are sets of numbers
    for the membership nodes in order, each ended by NaN.
    """
    ends = np.flatnonzero(np.isnan(members))
    sets: Iterator[Array] = iter(np.split(members, ends + 1))
    asking = np.flatnonzero(nodes[:, 1] == len(BRANCHES))
    member_of: dict[int, Array] = {int(i): next(sets) for i in asking}
    count = attrs["targets"]
    found: list[list[list[Any]]] = [[[] for _ in range(count)] for _ in x]
    for row, cells in zip(x, found, strict=True):
        for root in roots:
            at, is_leaf = root, False
            while not is_leaf:
                feature, mode, yes, yes_leaf, no, no_leaf, nan_holds = nodes[at]
                cell = row[feature]
                if np.isnan(cell):
                    holds = bool(nan_holds)
                elif mode < len(BRANCHES):
                    holds = bool(BRANCHES[mode](cell, splits[at]))
                else:
                    holds = bool(np.any(member_of[at] == cell))
                at, is_leaf = (yes, yes_leaf) if holds else (no, no_leaf)
            first, entries = leaves[at]
            for i in range(first, first + entries):
                cells[targets[i]].append(weights[i])
    how: Callable[[Any], Any] = {"MIN": min, "MAX": max}.get(attrs["aggregate"], sum)
    result = np.array([[how(c) if c else 0 for c in cells] for cells in found], x.dtype)
    if attrs["aggregate"] == "AVERAGE":
        result /= len(roots)
    return (result.reshape(len(x), count),)


def coupled(attrs: Mapping[str, Any], pairs: Array) -> tuple[Array, ...]:
    """A probability for each class from one for each pair of classes i < j, that it is i: Wu, Lin,
    Weng: Probability estimates for multi-class classification by pairwise coupling, JMLR 5, 2004,
    algorithm 2, stopped where libsvm stops."""
    k = attrs["classes"]
    above = np.triu_indices(k, 1)
    found = np.full((len(pairs), k), 1 / k, np.float32)
    for p, row in zip(found, pairs.astype(np.float32), strict=True):
        r = np.zeros((k, k), np.float32)
        r[above] = row
        r.T[above] = 1 - row
        q = -r.T * r
        np.fill_diagonal(q, (r * r).sum(0))
        for _ in range(100):
            qp = q @ p
            total = p @ qp
            if np.abs(qp - total).max() < np.float32(0.005) / k:
                break
            for i in range(k):
                step = (total - qp[i]) / q[i, i]
                p[i] += step
                total = (total + step * (step * q[i, i] + 2 * qp[i])) / (1 + step) ** 2
                qp = (qp + step * q[i]) / (1 + step)
                p /= 1 + step
    return (found,)


def inverse(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """The inverse of each matrix."""
    return (np.linalg.inv(x.astype(np.result_type(x, np.float32))).astype(x.dtype),)


def crop_and_resize(
    attrs: Mapping[str, Any], x: Array, boxes: Array, images: Array
) -> tuple[Array, ...]:
    """y[r, c, i, j] = x[images[r], c] at the point that (i, j) is in box r, corners aligned; a crop
    of one row or column takes the middle."""
    height, width = x.shape[2:]
    sizes = attrs["size"]
    y = np.full((len(boxes), x.shape[1], *sizes), attrs["outside"], np.float64)
    for r, (box, image) in enumerate(zip(boxes.astype(np.float64), images, strict=True)):
        points = []
        for low, high, count, extent in zip(box[:2], box[2:], sizes, (height, width), strict=True):
            span = extent - 1
            step = (high - low) * span / (count - 1) if count > 1 else 0
            start = low * span if count > 1 else (low + high) * span / 2
            points.append(start + step * np.arange(count))
        for i, j in np.ndindex(*sizes):
            row, column = points[0][i], points[1][j]
            if not (0 <= row <= height - 1 and 0 <= column <= width - 1):
                continue
            if attrs["mode"] == "nearest":
                y[r, :, i, j] = x[image, :, int(np.floor(row + 0.5)), int(np.floor(column + 0.5))]
                continue
            a, b = int(np.floor(row)), int(np.floor(column))
            c, d = min(a + 1, height - 1), min(b + 1, width - 1)
            u, v = row - a, column - b
            plane = x[image].astype(np.float64)
            y[r, :, i, j] = (1 - u) * ((1 - v) * plane[:, a, b] + v * plane[:, a, d])
            y[r, :, i, j] += u * ((1 - v) * plane[:, c, b] + v * plane[:, c, d])
    return (y.astype(x.dtype),)


# ---------------------------------------------------------------------------- sums of equal indices


def digit_sort(attrs: Mapping[str, Any], keys: Array, places: Array) -> tuple[Array, ...]:
    """A pass of a radix sort: keys and their places in the order of one digit, equals as they
    were."""
    order = np.argsort((keys >> attrs["shift"]) & ((1 << attrs["bits"]) - 1), kind="stable")
    return keys[order], places[order]


def run_starts(attrs: Mapping[str, Any], keys: Array) -> tuple[Array, ...]:
    """Where each run of equal keys begins, then the number of keys as often as it takes."""
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))[: len(keys)]
    return (np.pad(starts, (0, len(keys) - len(starts)), constant_values=len(keys)),)


def run_parts(attrs: Mapping[str, Any], starts: Array) -> tuple[Array, ...]:
    """How many parts of at most `rows` keys each run has."""
    return (-(-np.diff(starts, append=len(starts)) // attrs["rows"]),)


def sums_before(attrs: Mapping[str, Any], x: Array) -> tuple[Array, ...]:
    """The sum of the numbers before each."""
    return (np.cumsum(x) - x,)


def part_starts(
    attrs: Mapping[str, Any], starts: Array, parts: Array, before: Array
) -> tuple[Array, ...]:
    """Where each part begins; `before` counts those of earlier runs."""
    run = np.repeat(np.arange(len(parts)), parts)
    cuts = starts[run] + attrs["rows"] * (np.arange(len(run)) - before[run])
    return (np.pad(cuts, (0, attrs["length"] - len(cuts)), constant_values=len(starts)),)


def part_sums(
    attrs: Mapping[str, Any],
    dy: Array,
    keys: Array,
    places: Array,
    bag: Array,
    cuts: Array,
    *weights: Array,
) -> tuple[Array, ...]:
    """The sum over each part of its keys' rows of `dy`, weighted, and which key that is; of parts
    that are not there, zero and key 0."""
    rows = dy[bag[places]]
    for weight in weights:
        rows = rows * weight[places][:, None]
    sums = np.zeros((len(cuts), dy.shape[1]), dy.dtype)
    np.add.at(sums, np.searchsorted(cuts, np.arange(len(keys)), side="right") - 1, rows)
    there = cuts < len(keys)
    at = np.where(there, keys[np.where(there, cuts, 0)], 0) if len(keys) else cuts
    return sums, at.astype(np.int64)[:, None]


ROUTINES: dict[str, Routine] = {
    **LINALG,
    "adaptive_pool": adaptive_pool,
    "adaptive_pool_gradient": adaptive_pool_gradient,
    "edge_padding_gradient": edge_padding_gradient,
    "search": search,
    "mode": mode,
    "col2im": col2im,
    "im2col": im2col,
    "crop_and_resize": crop_and_resize,
    "deform_conv": deform_conv,
    "det": det,
    "dft": dft,
    "digit_sort": digit_sort,
    "fft": fft,
    "grid_sample": grid_sample,
    "inverse": inverse,
    "linear_attention": linear_attention,
    "max_roi_pool": max_roi_pool,
    "multi_tensor": multi_tensor,
    "nms": nms,
    "part_starts": part_starts,
    "part_sums": part_sums,
    "roi_align": roi_align,
    "run_parts": run_parts,
    "run_starts": run_starts,
    "stft": stft,
    "sums_before": sums_before,
    "tf_idf": tf_idf,
    "compress": compress,
    "nonzero": nonzero,
    "random": random,
    "reverse_sequence": reverse_sequence,
    "unique": unique,
    "lookup": lookup,
    "trees": trees,
    "coupled": coupled,
}
