"""Bags of embeddings: sums of the rows that indices name, a bag from each offset to the next."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, reshaped
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t

MODES = ("sum", "mean", "max")


def embedding_bag(n: TorchNode, e: Emitter) -> Results:
    """Bags that are known to be of one length are rows of indices: a gather and a reduction, one
    launch. Otherwise each row is scattered to its bag."""
    indices, offsets = n["indices"], n["offsets"]
    mode = MODES[int(n.args["mode"])]
    padding = n.args.get("padding_idx")
    if padding is not None and padding >= 0:
        raise ModelError("embedding_bag: padding is not supported", fix="build without padding_idx")
    bags, rows = n.type.shape[0], indices.type.shape[0]
    length = rows // bags if bags else 0
    even = bags * length == rows and counted_by(e, offsets) == length
    if even:
        indices = reshaped(e, indices, (bags, length))
    y = e(t.Gather(n["weight"], indices, 0))
    if (share := n.get("per_sample_weights")) is not None:
        share = reshaped(e, share, (*indices.type.shape, 1))
        y = e(t.Map("mul", (y, share)))
    if even:
        return (e(t.Reduce(mode, y, (1,))), None, None, None)
    return (scattered(n, e, y, offsets, mode), None, None, None)


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


def scattered(n: TorchNode, e: Emitter, rows: Value, offsets: Value, mode: str) -> Value:
    """Rows combined into the bags that begin at `offsets`; empty bags are zeros."""
    type, count = n.type, rows.type.shape[0]
    bags = type.shape[0]
    if offsets.type.shape[0] > bags:  # the last one is where all end
        offsets = e(t.Slice(offsets, (0,), (bags,), (1,)))
    none = e.fill(0, TensorType((count + 1,), i64))
    ones = e.fill(1, TensorType((bags,), i64))
    at = cast(e, e(t.Reshape(offsets, (bags, 1))), i64)
    begun = e(t.Cumulative("sum", e(t.ScatterND(none, at, ones, "add")), 0))
    bag = e(t.Map("sub", (e(t.Slice(begun, (0,), (count,), (1,))),), (1,)))
    bag = e(t.Reshape(bag, (count, 1)))
    combine: Any = "max" if mode == "max" else "add"
    least = -np.inf if mode == "max" else 0
    y = e(t.ScatterND(e.fill(least, type), bag, rows, combine))
    if mode == "sum":
        return y
    whole = e.fill(1, TensorType((count,), type.dtype))
    sizes = e(t.ScatterND(e.fill(0, TensorType((bags,), type.dtype)), bag, whole, "add"))
    sizes = e(t.Reshape(sizes, (bags, 1)))
    if mode == "mean":
        return e(t.Map("div", (y, e(t.Map("max", (sizes,), (1.0,))))))
    filled = e(t.Map("gt", (sizes,), (0.0,)))
    return e(t.Map("where", (filled, y, e.fill(0, TensorType((), type.dtype)))))


CONVERTERS: dict[str, Converter] = dict.fromkeys(
    ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), embedding_bag
)
