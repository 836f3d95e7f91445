"""Matrix products, convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import (
    column_image,
    matrix_product,
    reshaped,
    sliced,
    transposed,
)
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t

# ---------------------------------------------------------------------------- matrix products


def matmul(n: OnnxNode, e: Emitter) -> Value:
    """A vector is a row on the left and a column on the right, and leaves no axis behind."""
    a, b = n[0], n[1]
    if min(a.type.rank, b.type.rank) == 0:
        raise n.refused(
            "an input is a scalar",
            "inputs with at least one axis",
            f"{a.type}, {b.type}",
            "use Mul",
        )
    return matrix_product(e, a, b)


def gemm(n: OnnxNode, e: Emitter) -> Value:
    """alpha A B + beta C, either of A and B transposed."""
    a, b, c = n[0], n[1], n.get(2)
    for v in (a, b):
        if v.type.rank != 2:
            raise n.refused("an input is not a matrix", "two axes", v.type)
    a = e(t.Transpose(a, (1, 0))) if n.attr("transA", 0) else a
    b = e(t.Transpose(b, (1, 0))) if n.attr("transB", 0) else b
    y = scaled(e(t.Matmul(a, b)), n.attr("alpha", 1.0), n, e)
    beta = n.attr("beta", 1.0)
    if c is None or beta == 0:
        return y
    if t.broadcast(c.type.shape, y.type.shape) != y.type.shape:
        raise n.refused("the shape of C does not broadcast to the product", y.type, c.type)
    return e.map("add", y, scaled(c, beta, n, e, fold=False))


def scaled(x: Value, factor: float, n: OnnxNode, e: Emitter, fold: bool = True) -> Value:
    if factor == 1:
        return x
    if x.type.dtype.is_integer:
        if not float(factor).is_integer():
            raise n.refused(
                "alpha and beta must be integers for integer inputs", "integers", factor
            )
        factor = int(factor)
    return e(t.Map("mul", (x,), (factor,)), fold=fold)


# ---------------------------------------------------------------------------- einsum

Label = str | int  # a letter, or an axis of the ellipsis: -1 is its last
Term = tuple[Value, tuple[Label, ...]]  # a tensor and what its axes are called


def einsum(n: OnnxNode, e: Emitter) -> Value:
    """Operands meet one after another, each time summing what nobody needs any more. A sum over
    shared labels is a matmul, no sum a product, and no shared rows or columns a product and sum."""
    operands = [v for v in n.inputs if v is not None]
    terms, output = parse_equation(n.attr("equation"), operands)
    extents: dict[Label, int] = {}
    for x, labels in terms:
        for label, extent in zip(labels, x.type.shape, strict=True):
            if extents.setdefault(label, extent) == 1:
                extents[label] = extent
            elif extent not in (1, extents[label]):
                raise n.refused(f"label {label!r} has two different sizes", extents[label], extent)
    terms = [simplify(diagonal(term, e), extents, e) for term in terms]
    first, *rest = terms
    while rest:
        second, *rest = rest
        later = {label for _, labels in rest for label in labels} | set(output)
        first, second = (
            sum_out(first, {*later, *second[1]}, e),
            sum_out(second, {*later, *first[1]}, e),
        )
        first = contract(first, second, later, () if rest else output, e)
    x, labels = sum_out(first, set(output), e)
    missing = [label for label in output if label not in labels]  # of extent 1 in every operand
    x = reshaped(e, x, (*x.type.shape, *(1 for _ in missing)))
    return transposed(e, x, [(*labels, *missing).index(label) for label in output])


def parse_equation(
    equation: str, operands: Sequence[Value]
) -> tuple[list[Term], tuple[Label, ...]]:
    """The labels of each operand's axes and of the result's; ellipses align on the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(operands):
        raise ModelError(
            "Einsum: the number of terms in the equation is not the number of inputs",
            expected=f"{len(operands)} terms",
            found=repr(equation),
        )
    terms: list[Term] = []
    widest = 0
    for text, x in zip(texts, operands, strict=True):
        head, dots, tail = text.partition("...")
        width = x.type.rank - len(head) - len(tail)
        if width < 0 or (width and not dots) or (not (head + tail).isalpha() and head + tail):
            raise ModelError(
                f"Einsum: term {text!r} does not match its input",
                expected=f"{x.type.rank} letters, one for each axis",
                found=f"{x.type} in {equation!r}",
            )
        widest = max(widest, width)
        terms.append((x, (*head, *range(-width, 0), *tail)))
    ellipsis = tuple(range(-widest, 0))
    if arrow:
        head, dots, tail = right.partition("...")
        output: tuple[Label, ...] = (*head, *(ellipsis if dots else ()), *tail)
    else:
        letters = [c for c in left if c.isalpha()]
        output = (*ellipsis, *sorted(c for c in set(letters) if letters.count(c) == 1))
    known = {label for _, labels in terms for label in labels}
    if len(set(output)) != len(output) or not known.issuperset(output):
        raise ModelError(
            "Einsum: the output has a label that is repeated or that no input has",
            found=repr(equation),
        )
    return terms, output


def diagonal(term: Term, e: Emitter) -> Term:
    """x[.., i, .., i] → x[.., i]: both axes last and flat, then every (extent + 1)th cell."""
    x, labels = term
    while repeated := [label for label in labels if labels.count(label) > 1]:
        label = repeated[0]
        i = labels.index(label)
        j = labels.index(label, i + 1)
        others = [k for k in range(len(labels)) if k not in (i, j)]
        lead = [x.type.shape[k] for k in others]
        extent, width = x.type.shape[i], x.type.shape[j]
        if extent != width:
            raise ModelError(
                f"Einsum: label {label!r} is repeated, but the two axes have different sizes",
                found=str(x.type),
            )
        x = reshaped(e, transposed(e, x, (*others, i, j)), (*lead, extent * extent))
        x = sliced(e, x, {len(lead): (0, extent, extent + 1)})
        labels = (*(labels[k] for k in others), label)
    return x, labels


def simplify(term: Term, extents: dict[Label, int], e: Emitter) -> Term:
    """Without the axes of extent 1: they broadcast, or come back at the end."""
    x, labels = term
    rows = [(k, extent) for k, extent in zip(labels, x.type.shape, strict=True) if extent != 1]
    return reshaped(e, x, [extent for _, extent in rows]), tuple(k for k, _ in rows)


def sum_out(term: Term, needed: set[Label], e: Emitter) -> Term:
    x, labels = term
    axes = tuple(i for i, label in enumerate(labels) if label not in needed)
    if axes:
        x = e(t.Reduce("sum", x, axes))
    return x, tuple(label for label in labels if label in needed)


def contract(a: Term, b: Term, needed: set[Label], output: tuple[Label, ...], e: Emitter) -> Term:
    """The product of two terms summed over the shared labels that are not `needed`. The result's
    labels come in the order of `output` where the product can give it."""
    shared = [label for label in a[1] if label in b[1]]
    k = [label for label in shared if label not in needed]
    rows = [label for label in a[1] if label not in shared]
    columns = [label for label in b[1] if label not in shared]
    if not k or not (rows or columns):
        return multiply(a, b, k, output, e)
    batch = [label for label in shared if label in needed]
    if output:
        batch.sort(key=output.index)
        if rows and columns and output.index(rows[-1]) > output.index(columns[-1]):
            a, b, rows, columns = b, a, columns, rows
    size = {
        label: extent
        for x, labels in (a, b)
        for label, extent in zip(labels, x.type.shape, strict=True)
    }
    wide = [size[label] for label in batch]
    keep_rows = not batch and len(k) == 1 and len(rows) > 1  # then b is one matrix, read by all
    left = arrange(a, (*batch, *rows, *k), e)
    if not keep_rows:
        left = reshaped(e, left, (*wide, prod(size[r] for r in rows), prod(size[c] for c in k)))
    right = arrange(b, (*batch, *k, *columns), e)
    right = reshaped(e, right, (*wide, prod(size[c] for c in k), prod(size[c] for c in columns)))
    labels = (*batch, *rows, *columns)
    return reshaped(e, e(t.Matmul(left, right)), [size[label] for label in labels]), labels


def arrange(term: Term, order: Sequence[Label], e: Emitter) -> Value:
    return transposed(e, term[0], [term[1].index(label) for label in order])


def multiply(a: Term, b: Term, k: list[Label], output: tuple[Label, ...], e: Emitter) -> Term:
    """The elementwise product, summed over k."""
    labels: list[Label] = [*a[1], *(label for label in b[1] if label not in a[1])]
    if output:
        labels.sort(key=lambda label: output.index(label) if label in output else len(output))

    def aligned(term: Term) -> Value:
        x = arrange(term, [label for label in labels if label in term[1]], e)
        extents = iter(x.type.shape)
        return reshaped(e, x, [next(extents) if label in term[1] else 1 for label in labels])

    return sum_out((e.map("mul", aligned(a), aligned(b)), tuple(labels)), {*labels} - {*k}, e)


# ---------------------------------------------------------------------------- windows


def per_axis(n: OnnxNode, name: str, count: int, default: int) -> tuple[int, ...]:
    values = tuple(int(x) for x in n.attr(name) or (default,) * count)
    if len(values) != count:
        raise n.refused(f"{name} has the wrong length", count, values)
    return values


def kernel_shape(n: OnnxNode) -> tuple[int, ...]:
    shape = n.attr("kernel_shape")
    if shape is None:
        raise n.refused("the attribute kernel_shape is missing")
    return tuple(shape)


def spatial_axes(x: Value, n: OnnxNode) -> tuple[int, ...]:
    if x.type.rank < 3:
        raise n.refused(
            "the input has no spatial axes",
            "axes for batch and channels and at least one more",
            x.type,
        )
    return x.type.shape[2:]


def check_window(n: OnnxNode, window: tuple[int, ...]) -> None:
    """Whether `kernel_shape`, where it is given, is the window that the weights have."""
    if (given := tuple(n.attr("kernel_shape", window))) != window:
        raise n.refused("kernel_shape is not the shape of the weights", list(window), list(given))


def sliding(n: OnnxNode, spatial: tuple[int, ...], window: tuple[int, ...]) -> t.SlidingWindow:
    """The padding that `pads`, `auto_pad` and `ceil_mode` come to.

    SAME_*: ceil(n / stride) positions, the odd cell of padding at the end (UPPER) or the start.
    `ceil_mode` adds a last window that hangs over, unless it would start in the end padding.
    """
    count = len(spatial)
    if len(window) != count:
        raise n.refused(
            "kernel_shape has the wrong length", f"{count} axes", f"kernel_shape {window}"
        )
    check_window(n, window)
    strides = per_axis(n, "strides", count, 1)
    dilations = per_axis(n, "dilations", count, 1)
    if min(*strides, *dilations, *window) < 1:
        raise n.refused(
            "kernel_shape, strides and dilations must be at least 1",
            "1 or more",
            f"kernel_shape {window}, strides {strides}, dilations {dilations}",
        )
    auto = n.choice("auto_pad", "NOTSET", ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    pads = per_axis(n, "pads", 2 * count, 0) if auto == "NOTSET" else (0,) * (2 * count)
    s = t.SlidingWindow(window, strides, pads[:count], pads[count:], dilations)
    rows = zip(spatial, s.reaches, strides, strict=True)
    if auto.startswith("SAME"):
        totals = [max((-(-n // by) - 1) * by + reach - n, 0) for n, reach, by in rows]
        less = tuple(total // 2 for total in totals)
        more = tuple(total - a for total, a in zip(totals, less, strict=True))
        low, high = (less, more) if auto == "SAME_UPPER" else (more, less)
        return replace(s, low=low, high=high)
    if n.attr("ceil_mode", 0):
        counts: list[int] = []
        for i, (cells, reach, stride) in enumerate(rows):
            count = -(-(cells + s.low[i] + s.high[i] - reach) // stride) + 1
            counts.append(count - ((count - 1) * stride >= cells + s.low[i]))
        return s.hanging(spatial, counts)
    return s


def add_bias(y: Value, bias: Value | None, e: Emitter) -> Value:
    """y[n, k, ..] + bias[k]."""
    if bias is None:
        return y
    if bias.type.size != y.type.shape[1]:
        raise ModelError(
            "the length of the bias is not the number of output channels",
            expected=str(y.type.shape[1]),
            found=str(bias.type),
        )
    shape = (bias.type.size, *(1,) * (y.type.rank - 2))
    column = e(t.Reshape(bias, shape), f"{e.prefix}/bias")
    return e.map("add", y, column)


# ---------------------------------------------------------------------------- convolutions


def conv(n: OnnxNode, e: Emitter) -> Value:
    x, w = n[0], n[1]
    s = sliding(n, spatial_axes(x, n), w.type.shape[2:])
    y = e(t.Conv(x, w, **s.slide, groups=n.attr("group", 1)))
    return add_bias(y, n.get(2), e)


def conv_transpose(n: OnnxNode, e: Emitter) -> Value:
    """`output_shape` fixes the padding, or adds zeros where it exceeds what the product reaches.

    Output padding takes cells back from the end padding first: they hold values, not zeros.
    """
    x, w = n[0], n[1]
    spatial, window = spatial_axes(x, n), w.type.shape[2:]
    check_window(n, window)
    count = len(spatial)
    strides, dilations = per_axis(n, "strides", count, 1), per_axis(n, "dilations", count, 1)
    padding = per_axis(n, "output_padding", count, 0)
    auto = n.attr("auto_pad", "NOTSET")
    wanted = n.attr("output_shape")
    if wanted:
        wanted = tuple(wanted)[-count:]
    elif auto.startswith("SAME"):
        wanted = tuple(i * s for i, s in zip(spatial, strides, strict=True))
    pads = per_axis(n, "pads", 2 * count, 0) if auto == "NOTSET" else (0,) * (2 * count)
    low, high, extra = list(pads[:count]), list(pads[count:]), [0] * count
    for i in range(count):
        if wanted:
            full = strides[i] * (spatial[i] - 1) + dilations[i] * (window[i] - 1) + 1
            total = full + padding[i] - wanted[i]
            low[i] = max(total, 0) // 2
            if auto != "SAME_UPPER":
                low[i] = max(total, 0) - low[i]
            over = low[i] + wanted[i] - full  # cells beyond the product's reach
        else:
            over = padding[i] - high[i]
        high[i], extra[i] = max(-over, 0), max(over, 0)
    y = e(
        t.ConvTranspose(
            x,
            w,
            strides=strides,
            low=tuple(low),
            high=tuple(high),
            dilations=dilations,
            groups=n.attr("group", 1),
            extra=tuple(extra) if any(extra) else (),
        )
    )
    return add_bias(y, n.get(2), e)


def deform_conv(n: OnnxNode, e: Emitter) -> Value:
    """Work: the convolution's, and for each column cell the sampling: two for each of 2^d corners,
    and one for the mask.

    Zhu et al., Deformable ConvNets v2, CVPR 2019.
    """
    x, w, offset, mask = n[0], n[1], n[2], n.get(4)
    spatial = spatial_axes(x, n)
    s = sliding(n, spatial, w.type.shape[2:])
    extents = s.counts(spatial)
    batch, channels = x.type.shape[:2]
    groups, offset_groups = n.attr("group", 1), n.attr("offset_group", 1)
    taps, points = prod(s.sizes), prod(extents)
    deep = offset_groups * taps
    for v, depth in ((offset, deep * len(spatial)), (mask, deep)):
        expected = (batch, depth, *extents)
        if v is not None and v.type.shape != expected:
            raise n.refused("offset or mask has the wrong shape", list(expected), v.type)
    if w.type.shape[1] * groups != channels:
        raise n.refused(
            "the weights have the wrong number of channels",
            f"{channels} / {groups} channels",
            w.type,
        )
    result = TensorType((batch, w.type.shape[0], *extents), x.type.dtype)
    columns = batch * channels * taps * points
    y = e(
        t.Routine(
            "deform_conv",
            (x, w, offset) if mask is None else (x, w, offset, mask),
            (result,),
            (
                *(("strides", s.strides), ("low", s.low), ("dilations", s.dilations)),
                *(("groups", groups), ("offset_groups", offset_groups)),
            ),
            work=2 * result.size * prod(w.type.shape[1:])
            + columns * (2 * 2 ** len(spatial) + (mask is not None)),
        )
    )
    return add_bias(y, n.get(3), e)


# ---------------------------------------------------------------------------- pools


def max_pool(n: OnnxNode, e: Emitter) -> tuple[Value | None, ...]:
    """Indices count through the whole tensor, t.pool's only through one image."""
    x = n[0]
    spatial = spatial_axes(x, n)
    s = sliding(n, spatial, kernel_shape(n))
    y = e(t.Pool("max", x, s.sizes, **s.slide)) if n.has_output(0) else None
    if not n.has_output(1):
        return (y,)
    column_major = bool(n.attr("storage_order", 0))
    winner = e(t.Pool("argmax", x, s.sizes, **s.slide, column_major=column_major))
    images = prod(x.type.shape[:2])
    if images > 1:
        start = TensorType((*x.type.shape[:2], *(1 for _ in spatial)), i64)

        def cells() -> np.ndarray:
            return (np.arange(images, dtype=np.int64) * prod(spatial)).reshape(start.shape)

        winner = e.map("add", winner, e.lazy(start, cells, "start"))
    return y, winner


def average_pool(n: OnnxNode, e: Emitter) -> Value:
    x = n[0]
    s = sliding(n, spatial_axes(x, n), kernel_shape(n))
    include = bool(n.attr("count_include_pad", 0))
    extra = s.extra if include and any(s.extra) else ()
    return e(t.Pool("mean", x, s.sizes, **s.slide, include_pad=include, extra=extra))


def lp_pool(n: OnnxNode, e: Emitter) -> Value:
    x = n[0]
    s = sliding(n, spatial_axes(x, n), kernel_shape(n))
    return e(t.Pool("lp", x, s.sizes, **s.slide, p=n.count("p", 2)))


def global_average_pool(n: OnnxNode, e: Emitter) -> Value:
    return e(t.Reduce("mean", n[0], tuple(range(2, n[0].type.rank)), keepdims=True))


def global_max_pool(n: OnnxNode, e: Emitter) -> Value:
    return e(t.Reduce("max", n[0], tuple(range(2, n[0].type.rank)), keepdims=True))


def global_lp_pool(n: OnnxNode, e: Emitter) -> Value:
    x, p = n[0], n.count("p", 2)
    axes = tuple(range(2, x.type.rank))
    if p == 2:
        square = e.map("mul", x, x)
        return e.map("sqrt", e(t.Reduce("sum", square, axes, keepdims=True)))
    size = e.map("abs", x)
    if p == 1:
        return e(t.Reduce("sum", size, axes, keepdims=True))
    total = e(t.Reduce("sum", e.map("pow", size, p), axes, keepdims=True))
    return e.map("pow", total, 1 / p)


def max_unpool(n: OnnxNode, e: Emitter) -> Value:
    """Zeros with x scattered at `indices`, which count through the whole inferred result; a wished
    shape crops or pads it at the high end."""
    x, indices = n[0], n[1]
    window = kernel_shape(n)
    spatial = spatial_axes(x, n)
    s = sliding(n, spatial, window)
    rows = zip(spatial, s.strides, s.low, s.high, window, strict=True)
    extents = ((i - 1) * stride - a - b + w for i, stride, a, b, w in rows)
    shape = (*x.type.shape[:2], *extents)
    zeros = e.fill(0, TensorType((prod(shape),), x.type.dtype))
    places, updates = (reshaped(e, v, (v.type.size,)) for v in (indices, x))
    y = reshaped(e, e(t.ScatterElements(zeros, places, updates, 0)), shape)
    wanted = shape if n.get(2) is None else n.ints(2, "the target shape")
    if wanted == shape:
        return y
    high = tuple(b - a for a, b in zip(shape, wanted, strict=True))
    return e(t.Pad(y, (0,) * len(shape), high))


def col2im(n: OnnxNode, e: Emitter) -> Value:
    """Work: one addition for each column cell."""
    x = n[0]
    image = n.ints(1, "the shape of the image")
    block = n.ints(2, "the shape of the block")
    s = sliding(n, image, block)
    batch, depth, positions = x.type.shape
    if prod(s.counts(image)) != positions or depth % prod(block):
        raise n.refused(
            "the shape of the input does not match image_shape and block_shape",
            f"[N, C * {prod(block)}, {prod(s.counts(image))}]",
            x.type,
        )
    result = TensorType((batch, depth // prod(block), *image), x.type.dtype)
    return column_image(e, x, image, s, gives=result, work=x.type.size)


CONVERTERS: dict[str, Converter] = {
    "MatMul": matmul,
    "Gemm": gemm,
    "Einsum": einsum,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "DeformConv": deform_conv,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalMaxPool": global_max_pool,
    "GlobalLpPool": global_lp_pool,
    "MaxUnpool": max_unpool,
    "Col2Im": col2im,
}
