"""Operators that place, pick, repeat and generate cells without computing with them."""

from __future__ import annotations

from itertools import accumulate
from math import ceil, isfinite, prod
from typing import Any

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, line, reshaped, sliced, widened
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.frontends.onnx.proto import sparse_array, sparse_type, tensor_array, tensor_type
from gpuir.interp import evaluate, to_numpy_dtype, to_type, wide
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, f32, i64
from gpuir.ops import tensor as t


def attr_or_ints(n: OnnxNode, attr: str, i: int) -> tuple[int, ...] | None:
    """Integers that are an attribute in early opsets and operand `i` since; None where absent."""
    if n.attr(attr) is not None:
        return tuple(n.attr(attr))
    return None if n.get(i) is None else n.ints(i, f"its {attr}")


def axes_of(n: OnnxNode, i: int, rank: int) -> tuple[int, ...] | None:
    """`axes`, attribute or operand `i`, counted from the front."""
    axes = attr_or_ints(n, "axes", i)
    if axes is None:
        return None
    found = tuple(n.from_front(a, rank) for a in axes)
    if len(set(found)) != len(found):
        raise n.refused("an axis is listed twice", found=list(axes))
    return found


# ---------------------------------------------------------------------------- shape


def reshape(n: OnnxNode, e: Emitter) -> Value:
    """0 copies an extent (unless allowzero), one -1 takes what is left."""
    x = n[0]
    wanted = attr_or_ints(n, "shape", 1)
    if wanted is None:
        raise n.refused("the target shape is missing")
    shape = list(wanted)
    if not n.attr("allowzero", 0):
        for i, extent in enumerate(shape):
            if extent == 0 and i >= x.type.rank:
                raise n.refused(
                    "a 0 in the shape copies a size from the input, but the input has no such axis",
                    found=shape,
                )
            shape[i] = x.type.shape[i] if extent == 0 else extent
    if -1 in shape:
        rest = prod(s for s in shape if s != -1)
        fits = shape.count(-1) == 1 and rest > 0 and x.type.size % rest == 0
        if not fits and not (rest == 0 == x.type.size and shape.count(-1) == 1):
            raise n.refused(
                "the target shape has a different number of elements",
                f"the {x.type.size} elements of {x.type}",
                list(wanted),
            )
        shape[shape.index(-1)] = x.type.size // rest if rest else 0
    return reshaped(e, x, tuple(shape))


def flatten(n: OnnxNode, e: Emitter) -> Value:
    shape, axis = n[0].type.shape, n.attr("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        raise n.refused("axis is out of range", f"0..{len(shape)}", axis)
    axis = axis + len(shape) if axis < 0 else axis
    return reshaped(e, n[0], (prod(shape[:axis]), prod(shape[axis:])))


def squeeze(n: OnnxNode, e: Emitter) -> Value:
    shape = n[0].type.shape
    axes = axes_of(n, 1, len(shape))
    if axes is None:
        axes = tuple(i for i, extent in enumerate(shape) if extent == 1)
    if any(shape[a] != 1 for a in axes):
        raise n.refused(
            "an axis to remove does not have size 1", f"extent 1 at {list(axes)}", n[0].type
        )
    return reshaped(e, n[0], tuple(s for i, s in enumerate(shape) if i not in axes))


def unsqueeze(n: OnnxNode, e: Emitter) -> Value:
    wanted = attr_or_ints(n, "axes", 1) or ()
    axes = axes_of(n, 1, n[0].type.rank + len(wanted)) or ()
    shape = list(n[0].type.shape)
    for axis in sorted(axes):
        shape.insert(axis, 1)
    return reshaped(e, n[0], tuple(shape))


def transpose(n: OnnxNode, e: Emitter) -> Value:
    rank = n[0].type.rank
    perm = tuple(n.attr("perm") or reversed(range(rank)))
    if perm == tuple(range(rank)):
        return n[0]
    return e(t.Transpose(n[0], tuple(p + rank if p < 0 else p for p in perm)))


def expand(n: OnnxNode, e: Emitter) -> Value:
    shape = t.broadcast(n[0].type.shape, n.ints(1, "its shape"))
    return widened(e, n[0], shape)


def tile(n: OnnxNode, e: Emitter) -> Value:
    """Repeats: a broadcast along axes of extent 1, else along new axes that are merged again."""
    x, repeats = n[0], n.ints(1, "its repeats")
    shape = x.type.shape
    if len(repeats) != len(shape) or min(repeats, default=0) < 0:
        raise n.refused("repeats needs one number for each axis", x.type, list(repeats))
    apart: list[int] = []
    spread: list[int] = []
    for extent, count in zip(shape, repeats, strict=True):
        if count != 1 and extent != 1:
            apart.append(1)
            spread.append(count)
        apart.append(extent)
        spread.append(count if extent == 1 else extent)
    x = reshaped(e, x, tuple(apart))
    if spread != apart:
        x = e(t.Broadcast(x, tuple(spread)))
    return reshaped(e, x, tuple(s * r for s, r in zip(shape, repeats, strict=True)))


def concat(n: OnnxNode, e: Emitter) -> Value:
    """Operands without cells are left out."""
    operands = [n[i] for i in range(len(n.inputs))]
    axis = n.axis(operands[0].type.rank, 1)
    full = [v for v in operands if v.type.shape[axis]] or operands[:1]
    return full[0] if len(full) == 1 else e(t.Concat(tuple(full), axis))


MOST_PARTS = 10_000  # of a tensor that is split: each that is read is a node


def split(n: OnnxNode, e: Emitter) -> Results:
    """Equal parts, the last one smaller where they do not come out even (opset 18 on)."""
    x = n[0]
    axis = n.axis(x.type.rank)
    extent, count = x.type.shape[axis], len(n.outputs)
    sizes = attr_or_ints(n, "split", 1)
    if sizes is None:
        given = n.attr("num_outputs", count)
        if not count <= given <= max(count, MOST_PARTS):
            raise n.refused(
                "num_outputs is out of range",
                f"{count} to {MOST_PARTS}, because the node has {count} outputs",
                given,
            )
        count = given
        part = -(-extent // count)
        sizes = tuple(max(min(part, extent - i * part), 0) for i in range(count))
    if sum(sizes) != extent or min(sizes, default=0) < 0 or len(sizes) < len(n.outputs):
        raise n.refused(
            "the sum of the split sizes is not the size of the axis",
            f"{extent} in {len(n.outputs)} parts",
            sizes,
        )
    starts = [0, *accumulate(sizes)][:-1]
    return tuple(
        sliced(e, x, {axis: (start, size, 1)}) if n.has_output(i) else None
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )


def slice_(n: OnnxNode, e: Emitter) -> Value:
    """Bounds count from the end when negative, and are clamped; Python's slices."""
    shape = n[0].type.shape
    starts, ends = attr_or_ints(n, "starts", 1), attr_or_ints(n, "ends", 2)
    if starts is None or ends is None:
        raise n.refused("starts or ends are missing")
    axes = axes_of(n, 3, len(shape))
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = n.ints(4, "its steps") if n.get(4) is not None else (1,) * len(starts)
    fits = len(starts) == len(ends) == len(axes) == len(steps) <= len(shape)
    if not fits or 0 in steps:
        raise n.refused(
            "each axis needs one start, one end and one step that is not 0",
            found=f"starts {starts}, ends {ends}, axes {axes}, steps {steps}",
        )
    cuts: dict[int, tuple[int, int, int]] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cells = range(*slice(start, end, step).indices(shape[axis]))
        cuts[axis] = (cells.start if len(cells) else 0, len(cells), step if len(cells) > 1 else 1)
    return sliced(e, n[0], cuts)


PAD_MODES = ("constant", "edge", "reflect", "wrap")


def pad(n: OnnxNode, e: Emitter) -> Value:
    x, mode = n[0], n.choice("mode", "constant", PAD_MODES)
    rank = x.type.rank
    pads = attr_or_ints(n, "pads", 1) or ()
    axes = axes_of(n, 3, rank) if n.get(3) is not None else tuple(range(rank))
    assert axes is not None
    if len(pads) != 2 * len(axes):
        raise n.refused(
            "the number of pads is wrong",
            f"{2 * len(axes)} numbers: first the padding before each axis, then the "
            "padding after each",
            list(pads),
        )
    before, after = dict(zip(axes, pads, strict=False)), dict(zip(axes, pads[len(axes) :]))
    low, high = (tuple(side.get(i, 0) for i in range(rank)) for side in (before, after))
    if not any(low) and not any(high):
        return x
    return e(
        t.Pad(
            x, low=low, high=high, value=_pad_value(n, e) if mode == "constant" else None, mode=mode
        )
    )


def _pad_value(n: OnnxNode, e: Emitter) -> Value | None:
    """What new cells hold; None for zero."""
    if n.attr("value") or n.get(2) is None:
        return e.constant(n.attr("value"), n[0].type.dtype) if n.attr("value") else None
    known = n.known(2)
    if known is not None and not wide(known).any():
        return None
    return reshaped(e, n[2], ())


def center_crop_pad(n: OnnxNode, e: Emitter) -> Value:
    """Each axis cropped or padded with zeros about its middle; an odd cell goes to the end."""
    x, wanted = n[0], n.ints(1, "its shape")
    axes = axes_of(n, -1, x.type.rank) if n.attr("axes") is not None else range(x.type.rank)
    assert axes is not None
    if len(axes) != len(wanted):
        raise n.refused(
            "the shape has the wrong length", f"{len(axes)} sizes, one for each axis", wanted
        )
    low, high = [0] * x.type.rank, [0] * x.type.rank
    for axis, size in zip(axes, wanted, strict=True):
        more = size - x.type.shape[axis]
        low[axis] = more // 2 if more >= 0 else -(-more // 2)
        high[axis] = more - low[axis]
    return e(t.Pad(x, tuple(low), tuple(high))) if any((*low, *high)) else x


def space_to_depth(n: OnnxNode, e: Emitter) -> Value:
    """Blocks of b x b pixels become b * b times the channels: (block, c), or (c, block) in CRD."""
    x, b = n[0], n.attr("blocksize")
    batch, c, h, w = _image(n, x)
    if not b or h % b or w % b:
        raise n.refused("blocksize does not divide height and width", f"blocks of {b}", x.type)
    apart = e(t.Reshape(x, (batch, c, h // b, b, w // b, b)))
    perm = (0, 1, 3, 5, 2, 4) if n.attr("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return e(t.Reshape(e(t.Transpose(apart, perm)), (batch, c * b * b, h // b, w // b)))


def depth_to_space(n: OnnxNode, e: Emitter) -> Value:
    x, b = n[0], n.attr("blocksize")
    batch, c, h, w = _image(n, x)
    if not b or c % (b * b):
        raise n.refused("blocks do not fit", f"blocks of {b}", x.type)
    if n.attr("mode", "DCR") == "CRD":
        shape, perm = (batch, c // (b * b), b, b, h, w), (0, 1, 4, 2, 5, 3)
    else:
        shape, perm = (batch, b, b, c // (b * b), h, w), (0, 3, 4, 1, 5, 2)
    apart = e(t.Transpose(e(t.Reshape(x, shape)), perm))
    return e(t.Reshape(apart, (batch, c // (b * b), h * b, w * b)))


def _image(n: OnnxNode, x: Value) -> tuple[int, int, int, int]:
    if x.type.rank != 4:
        raise n.refused("the input is not an image", "[N, C, H, W]", x.type)
    batch, c, h, w = x.type.shape
    return batch, c, h, w


# ---------------------------------------------------------------------------- indexing


def gather(n: OnnxNode, e: Emitter) -> Value:
    """ModelError where indices that are known lie beyond the table, as positions do in a sequence
    longer than the model's own."""
    axis = n.axis(n[0].type.rank)
    known, rows = e.array_of(n[1]), n[0].type.shape[axis]
    if known is not None and known.size and not -rows <= known.min() <= known.max() < rows:
        raise n.refused(
            "an index is out of range",
            f"{-rows} to {rows - 1}, of {n[0].type}",
            f"{known.min()} to {known.max()}",
            "choose smaller sizes with --dims, so that all indices are inside the table",
        )
    return e(t.Gather(n[0], n[1], axis))


def gather_elements(n: OnnxNode, e: Emitter) -> Value:
    return e(t.GatherElements(n[0], n[1], n.axis(n[0].type.rank)))


def gather_nd(n: OnnxNode, e: Emitter) -> Value:
    return e(t.GatherND(n[0], n[1], n.attr("batch_dims", 0)))


def _combine(n: OnnxNode) -> t.Combine:
    return n.choice("reduction", "none", ("none", "add", "mul", "min", "max"))


def scatter_elements(n: OnnxNode, e: Emitter) -> Value:
    return e(t.ScatterElements(n[0], n[1], n[2], axis=n.axis(n[0].type.rank), combine=_combine(n)))


def scatter_nd(n: OnnxNode, e: Emitter) -> Value:
    return e(t.ScatterND(n[0], n[1], n[2], _combine(n)))


def compress(n: OnnxNode, e: Emitter) -> Value:
    """The slices whose condition holds: at most as many as there are conditions. A condition that
    is a model input is asked for, as a shape would be."""
    x = n[0]
    if n.attr("axis") is None:
        x, axis = reshaped(e, x, (x.type.size,)), 0
    else:
        axis = n.axis(x.type.rank)
    condition = n.need(1, "its condition") if e.is_model_input(n[1]) else n.known(1)
    if condition is not None:
        kept = np.flatnonzero(condition[: x.type.shape[axis]])
        return e(t.Gather(x, e.constant(kept, i64, "kept"), axis))
    most = min(n[1].type.size, x.type.shape[axis])
    shape = (*x.type.shape[:axis], most, *x.type.shape[axis + 1 :])
    e.assume(f"{n.name}: all {most} conditions of Compress are assumed to be true")
    type = TensorType(shape, x.type.dtype)
    return e(t.Routine("compress", (x, n[1]), (type,), (("axis", axis),)))


def nonzero(n: OnnxNode, e: Emitter) -> Value:
    """The coordinates of the cells that are not zero, a column each: at most all cells."""
    known, x = n.known(0), n[0].type
    if known is not None:
        return e.constant(np.stack(np.nonzero(np.atleast_1d(known))), i64, "nonzero")
    e.assume(f"{n.name}: all {x.size} elements are assumed to be nonzero")
    gives = TensorType((max(x.rank, 1), x.size), i64)
    return e(t.Routine("nonzero", (n[0],), (gives,), work=x.size))


def unique(n: OnnxNode, e: Emitter) -> Results:
    """The distinct cells (or slices along `axis`), where each first stands, which of them each cell
    is, and how often each occurs."""
    x = n[0].type
    axis = None if n.attr("axis") is None else n.axis(x.rank)
    extent = x.size if axis is None else x.shape[axis]
    shape = (extent,) if axis is None else x.shape
    gives = (TensorType(shape, x.dtype), *(TensorType((extent,), i64) for _ in range(3)))
    attrs = (("sorted", n.attr("sorted", 1)), *((("axis", axis),) if axis is not None else ()))
    # a sort: log2 passes of comparisons
    work = x.size * max(extent - 1, 1).bit_length()
    op = t.Routine(fn="unique", args=(n[0],), gives=gives, attrs=attrs, work=work)
    known = n.known(0)
    if known is None:
        e.assume(f"{n.name}: all {extent} elements are assumed to be distinct")
        return e.add(op)
    arrays = evaluate(op, {n[0]: known})
    return tuple(e.constant(a, v.dtype, "unique") for a, v in zip(arrays, gives, strict=True))


def reverse_sequence(n: OnnxNode, e: Emitter) -> Value:
    attrs = (("time_axis", n.axis(2, 0, "time_axis")), ("batch_axis", n.axis(2, 1, "batch_axis")))
    return e(t.Routine("reverse_sequence", (n[0], n[1]), (n[0].type,), attrs))


def one_hot(n: OnnxNode, e: Emitter) -> Value:
    """values[1] where the new axis counts the index (a negative one from the end), else
    values[0]."""
    depth = n.integer(1, "its depth")
    indices, values = n[0], n[2]
    rank = indices.type.rank
    axis = n.axis(rank + 1, -1)
    if indices.type.dtype != i64:
        indices = e(t.Cast(indices, i64))
    behind = e.map("lt", indices, 0)
    indices = e.map("where", behind, e.map("add", indices, depth), indices)
    shape = indices.type.shape
    indices = e(t.Reshape(indices, (*shape[:axis], 1, *shape[axis:])))
    fold = e.const_of(n[0]) is not None
    hot = e.map("eq", indices, line(e, depth, axis=axis, rank=rank + 1, fold=fold))
    off, on = (reshaped(e, sliced(e, values, {0: (i, 1, 1)}), ()) for i in (0, 1))
    return e.map("where", hot, on, off)


def trilu(n: OnnxNode, e: Emitter) -> Value:
    """x where column - row >= k (upper) or <= k, else 0."""
    x = n[0]
    if x.type.rank < 2:
        raise n.refused("the input is not a matrix", "at least two axes", x.type)
    rows, columns = x.type.shape[-2:]
    fold = e.const_of(x) is not None
    across = line(e, columns, axis=1, rank=2, fold=fold)
    down = line(e, rows, axis=0, rank=2, fold=fold)
    offset = e.map("sub", across, down)
    k = reshaped(e, n[1], ()) if n.get(1) is not None else e.constant(0, i64)
    kept = e.map("ge" if n.attr("upper", 1) else "le", offset, k)
    return e.map("where", kept, x, e.constant(0, x.type.dtype))


# ---------------------------------------------------------------------------- generators


def range_(n: OnnxNode, e: Emitter) -> Value:
    low, high, step = (n.number(i, what) for i, what in enumerate(("start", "limit", "delta")))
    dtype = n[0].type.dtype
    if step == 0 or (dtype.is_float and not isfinite((high - low) / step)):
        raise n.refused(
            "start, limit and delta give no valid range", found=f"from {low} to {high} by {step}"
        )
    count = ceil((high - low) / step) if dtype.is_float else -((low - high) // step)
    count = max(int(count), 0)
    exact = to_type(wide(n.need(0, "start"))).dtype
    steps = e(t.Iota(TensorType((count,), exact), 0))
    scaled = e.map("mul", steps, step) if step != 1 else steps
    moved = e.map("add", scaled, low) if low else scaled
    return cast(e, moved, dtype)


def constant(n: OnnxNode, e: Emitter) -> Value:
    """The numbers of a tensor are not read before somebody asks."""
    attrs: Any = n.attrs
    source = n.walk.load.source
    if len(values := [name for name in attrs if "value" in name]) > 1:
        raise n.refused("there is more than one value", "one", ", ".join(values))
    if (a := attrs.proto("value")) is not None:
        return e.weight(tensor_type(a.t), lambda: tensor_array(a.t, source), n.name)
    if (a := attrs.proto("sparse_value")) is not None:
        sparse = a.sparse_tensor
        return e.weight(sparse_type(sparse), lambda: sparse_array(sparse, source), n.name)
    for key, dtype in (("value_float", f32), ("value_int", i64)):
        for attribute in (key, key + "s"):
            if attribute in attrs:
                return e.constant(attrs[attribute], dtype, n.name)
    raise n.refused(
        "the node holds no numbers",
        "value, value_int(s) or value_float(s)",
        ", ".join(attrs) or "no attribute",
    )


def constant_of_shape(n: OnnxNode, e: Emitter) -> Value:
    value = n.attr("value")
    value = np.zeros(1, np.float32) if value is None else np.asarray(value).reshape(-1)
    if value.size != 1:
        raise n.refused("value", "one number", value.size)
    value = value[0]
    shape = n.ints(0, "its operand, the shape")
    dtype = e.constant(value).type.dtype
    return e.fill(value, TensorType(shape, dtype))


def shape(n: OnnxNode, e: Emitter) -> Value:
    extents = n[0].type.shape
    return e.constant(extents[slice(n.attr("start", 0), n.attr("end"))], i64, "shape")


def size(n: OnnxNode, e: Emitter) -> Value:
    return e.constant(n[0].type.size, i64, "size")


def eye_like(n: OnnxNode, e: Emitter) -> Value:
    if n[0].type.rank != 2:
        raise n.refused("the input is not a matrix", "two axes", n[0].type)
    type = TensorType(n[0].type.shape, n.dtype("dtype", n[0].type.dtype))
    rows, columns = type.shape
    k = n.attr("k", 0)

    def numbers() -> np.ndarray:
        return np.eye(rows, columns, k, bool).astype(to_numpy_dtype(type.dtype))

    return e.lazy(type, numbers, "eye")


CONVERTERS: dict[str, Converter] = {
    "Reshape": reshape,
    "Flatten": flatten,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Transpose": transpose,
    "Expand": expand,
    "Tile": tile,
    "Concat": concat,
    "Split": split,
    "Slice": slice_,
    "Pad": pad,
    "CenterCropPad": center_crop_pad,
    "SpaceToDepth": space_to_depth,
    "DepthToSpace": depth_to_space,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Scatter": scatter_elements,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "Compress": compress,
    "NonZero": nonzero,
    "Unique": unique,
    "ReverseSequence": reverse_sequence,
    "OneHot": one_hot,
    "Trilu": trilu,
    "Range": range_,
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "Shape": shape,
    "Size": size,
    "EyeLike": eye_like,
}
