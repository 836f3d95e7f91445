"""Bags of embeddings: sums of the rows that indices name, a bag from each offset to the next; and
the gradients of such sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, part, reshaped
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, i64
from gpuir.ops import tensor as t

MODES = ("sum", "mean", "max")
# Of CUB's radix sort, dispatch_radix_sort.cuh: the bits of a pass (ONESWEEP_RADIX_BITS), and how
# many keys, of 4 bytes, one block sorts by itself (SingleTilePolicy: 256 threads of 19).
DIGIT_BITS = 8
TILE_THREADS, TILE_KEYS = 256, 19
PART_ROWS = 10  # that a thread sums: NROWS_PER_THREAD, ATen/native/cuda/EmbeddingBackwardKernel.cu


def embedding_bag(n: TorchNode, e: Emitter) -> Results:
    """Bags that are known to be of one length are rows of indices: a gather and a reduction, one
    launch. Otherwise each row is scattered to its bag."""
    indices, offsets = n["indices"], n["offsets"]
    mode = MODES[int(n.args["mode"])]
    check_padding(n)
    bags = n.type.shape[0]
    length = even_length(e, indices, offsets, bags)
    if length is not None:
        indices = reshaped(e, indices, (bags, length))
    y = e(t.Gather(n["weight"], indices, 0))
    if (share := n.get("per_sample_weights")) is not None:
        share = reshaped(e, share, (*indices.type.shape, 1))
        y = e.map("mul", y, share)
    if length is None:
        bag = reshaped(e, bag_of(e, indices, offsets, bags), (indices.type.size, 1))
        return (combined(e, y, bag, n.type, mode), None, None, None)
    largest: Value | None = None
    if mode == "max" and len(n.types) > 3:
        places = e(t.ArgReduce("max", y, 1, False))
        largest = e(t.GatherElements(indices, cast(e, places, i64), 1))
    return (e(t.Reduce(mode, y, (1,))), None, None, largest)


def check_padding(n: TorchNode) -> None:
    padding = n.args.get("padding_idx")
    if padding is not None and padding >= 0:
        raise ModelError(
            "embedding_bag: padding is not supported", fix="build the module without padding_idx"
        )


def even_length(e: Emitter, indices: Value, offsets: Value, bags: int) -> int | None:
    """How many rows each bag has, where all are known to have as many."""
    rows = indices.type.shape[0]
    length = rows // bags if bags else 0
    return length if bags * length == rows and counted_by(e, offsets) == length else None


def counted_by(e: Emitter, offsets: Value) -> int | None:
    """The step of a vector that counts from 0, as nn.EmbeddingBag makes one for rows of indices."""
    if (known := e.array_of(offsets)) is not None and known.size > 1:
        step = int(known[1] - known[0])
        return step if np.array_equal(known, np.arange(known.size) * step) else None
    match e.builder.producer(offsets):
        case t.Iota():
            return 1
        case t.Map("mul", (line,), (int(step),)) if counted_by(e, line) == 1:
            return step
        case _:
            return None


def bag_of(e: Emitter, indices: Value, offsets: Value, bags: int) -> Value:
    """The bag of each index, as ATen's forward kernel writes it (`offset2bag`)."""
    count = indices.type.shape[0]
    if (length := even_length(e, indices, offsets, bags)) is not None:
        return e.map("div", e(t.Iota(TensorType((count,), i64))), max(length, 1))
    offsets = part(e, offsets, 0, 0, bags)  # one more is where all end
    none = e.fill(0, TensorType((count + 1,), i64))
    ones = e.fill(1, TensorType((bags,), i64))
    at = cast(e, e(t.Reshape(offsets, (bags, 1))), i64)
    begun = e(t.Cumulative("sum", e(t.ScatterND(none, at, ones, "add")), 0))
    return e.map("sub", part(e, begun, 0, 0, count), 1)


def sizes_of(e: Emitter, bag: Value, bags: int, dtype: DType) -> Value:
    """How many rows are in each bag, as a column."""
    whole = e.fill(1, TensorType(bag.type.shape[:1], dtype))
    none = e.fill(0, TensorType((bags,), dtype))
    return e(t.Reshape(e(t.ScatterND(none, bag, whole, "add")), (bags, 1)))


def combined(e: Emitter, rows: Value, bag: Value, type: TensorType, mode: str) -> Value:
    """Rows combined into their bags, given as a column; empty bags are zeros."""
    combine: Any = "max" if mode == "max" else "add"
    least = -np.inf if mode == "max" else 0
    y = e(t.ScatterND(e.fill(least, type), bag, rows, combine))
    if mode == "sum":
        return y
    sizes = sizes_of(e, bag, type.shape[0], type.dtype)
    if mode == "mean":
        return e.map("div", y, e.map("max", sizes, 1.0))
    filled = e.map("gt", sizes, 0.0)
    return e.map("where", filled, y, e.fill(0, TensorType((), type.dtype)))


# ---------------------------------------------------------------------------- gradients


def bag_backward(n: TorchNode, e: Emitter) -> Value:
    """The table's gradient, by the kernels of ATen/native/cuda/EmbeddingBag.cu, which Inductor
    calls too: indices are sorted with their places, equal ones cut into parts of ten rows, each
    part summed, and the sums added to a table of zeros. The most parts there can be are counted:
    each row of the table and each ten indices begin one. In mode max the gradient of each cell is
    added where the maximum was."""
    check_padding(n)
    if n.args["scale_grad_by_freq"]:
        raise n.refused("scale_grad_by_freq is not supported")
    if n.args.get("sparse"):
        e.assume(f"{n.name}: the gradient of the table is dense, while PyTorch keeps it sparse")
    dy, indices, offsets = n["grad"], n["indices"], n.get("offsets")
    mode, bags = MODES[int(n.args["mode"])], dy.type.shape[0]
    zeros = e.fill(0, n.type)
    if mode == "max":
        if (largest := n.get("maximum_indices")) is None:
            raise n.refused(
                "mode max has no gradient when bags differ in length",
                fix="give a matrix of indices, so that all bags have the same length",
            )
        return e(t.ScatterElements(zeros, largest, dy, axis=0, combine="add"))
    bag = bag_of(e, indices, offsets, bags) if offsets else n["offset2bag"]
    if mode == "mean":
        column = reshaped(e, bag, (bag.type.size, 1))
        sizes = sizes_of(e, column, bags, dy.type.dtype)
        dy = e.map("div", dy, e.map("max", sizes, 1.0))
    keys, places = in_order(e, indices)
    count, width = indices.type.size, dy.type.shape[-1]
    line, most = TensorType((count,), i64), min(count, n.type.shape[0] + count // PART_ROWS)
    step = (("rows", PART_ROWS),)
    starts = e(t.Routine("run_starts", (keys,), (line,)))
    parts = e(t.Routine("run_parts", (starts,), (line,), step))
    before = e(t.Routine("sums_before", (parts,), (line,), work=count))
    cut = (*step, ("length", most))
    cuts = e(t.Routine("part_starts", (starts, parts, before), (TensorType((most,), i64),), cut))
    shares = () if (share := n.get("per_sample_weights")) is None else (share,)
    gives = (TensorType((most, width), dy.type.dtype), TensorType((most, 1), i64))
    args = (dy, keys, places, bag, cuts, *shares)
    sums, rows = e.add(t.Routine("part_sums", args, gives, work=count * width))
    return e(t.ScatterND(zeros, rows, sums, "add"))


def in_order(e: Emitter, indices: Value) -> tuple[Value, Value]:
    """Indices from the least on, and where each was: the passes of a radix sort, over all bits of
    the integers (ATen names no fewer), each a launch that reads and writes both. That digits are
    counted first, which reads the indices once more, is left out. Few are one launch."""
    keys, places = indices, e(t.Iota(indices.type))
    width = indices.type.dtype.bits
    alone = indices.type.size <= TILE_THREADS * (TILE_KEYS * 32 // width)
    bits = width - 1 if alone else DIGIT_BITS  # no index is negative
    for shift in range(0, width - 1, bits):
        attrs, gives = (("bits", bits), ("shift", shift)), (keys.type, places.type)
        keys, places = e.add(t.Routine("digit_sort", (keys, places), gives, attrs))
    return keys, places


def weights_backward(n: TorchNode, e: Emitter) -> Value:
    """The gradient of each index's own weight: its row times its bag's gradient."""
    check_padding(n)
    dy, indices = n["grad"], n["indices"]
    bag = bag_of(e, indices, n["offsets"], dy.type.shape[0])
    both = (e(t.Gather(n["weight"], indices, 0)), e(t.Gather(dy, bag, 0)))
    return e(t.Reduce("sum", e.map("mul", *both), (1,)))


CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(
        ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), embedding_bag
    ),
    "_embedding_bag_backward": bag_backward,
    "_embedding_bag_dense_backward": bag_backward,
    "_embedding_bag_per_sample_weights_backward": weights_backward,
}
