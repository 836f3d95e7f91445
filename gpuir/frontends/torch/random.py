"""Random numbers, and dropout: other ones than torch draws, of the same distribution."""

from __future__ import annotations

from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, drawn, dropped, reshaped, widened
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.frontends.torch.pointwise import mapped
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, bool_, f32, i64
from gpuir.ops import tensor as t


def uniform(n: TorchNode, e: Emitter) -> Value:
    low, high = float(n.args.get("from", 0)), float(n.args.get("to", 1))
    return drawn(e, "uniform", n.type, low=low, high=high)


def normal(n: TorchNode, e: Emitter) -> Value:
    """Of one mean and deviation, or of those of each cell."""
    mean, scale = n.args.get("mean", 0.0), n.args.get("std", 1.0)
    y = drawn(e, "normal", n.type, mean=0.0, scale=1.0)
    for fn, x, neutral in (("mul", scale, 1), ("add", mean, 0)):
        y = y if x == neutral else mapped(e, fn, y, x, dtype=n.type.dtype)
    return y


def integers(n: TorchNode, e: Emitter) -> Value:
    """Whole numbers from `low` to below `high`."""
    low, high = float(n.args.get("low", 0)), n.args["high"]
    type = TensorType(n.type.shape, f32)
    if isinstance(high, Value):
        y = mapped(e, "mul", drawn(e, "uniform", type, low=0.0, high=1.0), high, dtype=f32)
    else:
        y = drawn(e, "uniform", type, low=low, high=float(high))
    return cast(e, e.map("floor", y), n.type.dtype)


def permutation(n: TorchNode, e: Emitter) -> Value:
    """The places of random numbers in their order."""
    y = drawn(e, "uniform", TensorType(n.type.shape, f32), low=0.0, high=1.0)
    return cast(e, e.add(t.TopK(y, n.type.shape[0], 0))[1], n.type.dtype)


def bernoulli(n: TorchNode, e: Emitter) -> Value:
    p: Any = n.args.get("p")
    if p is None:
        return drawn(e, "bernoulli", n.type, n["self"])
    if isinstance(p, Value):
        odds = widened(e, p, n.type.shape)
        return drawn(e, "bernoulli", n.type, odds)
    return drawn(e, "keep", n.type, ratio=1 - float(p))


def multinomial(n: TorchNode, e: Emitter) -> Value:
    """As many draws a row, by weight."""
    x = n["self"]
    rows = reshaped(e, x, (1, *x.type.shape)) if x.type.rank == 1 else x
    count = int(n.args["num_samples"])
    type = TensorType((rows.type.shape[0], count), i64)
    return reshaped(e, drawn(e, "multinomial", type, e.map("log", rows)), n.type.shape)


def dropout(n: TorchNode, e: Emitter) -> Results:
    """In training cells are dropped with probability p, the rest scaled by 1 / (1 - p)."""
    x, p = n["input"], float(n.args["p"])
    native = len(n.types) > 1
    mask_type = TensorType(x.type.shape, bool_)
    if n.args["train"] is False or p == 0:
        return (x, e.fill(True, mask_type)) if native else x
    keep = drawn(e, "keep", mask_type, ratio=p)
    y = dropped(e, x, keep, p)
    return (y, keep) if native else y


CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_functional"), normal),
    **dict.fromkeys(("randint", "randint_like"), integers),
    "randperm": permutation,
    "bernoulli": bernoulli,
    "multinomial": multinomial,
    "dropout": dropout,
    "native_dropout": dropout,
}
