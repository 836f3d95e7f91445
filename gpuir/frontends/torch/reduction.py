"""Operators along axes: sums, softmax, norms, sorting, losses."""

from __future__ import annotations

from functools import partial
from math import log2, prod
from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import (
    along_channels,
    cast,
    inverse_root,
    line,
    moments,
    over,
    part,
    reshaped,
)
from gpuir.frontends.node import each_named
from gpuir.frontends.torch.complex import is_complex, magnitude, pair
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.frontends.torch.pointwise import mapped, truth
from gpuir.ir.graph import Value
from gpuir.ir.phases import beside
from gpuir.ir.types import TensorType, f32, i64
from gpuir.ops import tensor as t


def reduction(n: TorchNode, e: Emitter, fn: Any) -> Value:
    """`fn` over `dim`, or over all of it, in the result's dtype."""
    x = cast(e, n["self"], n.type.dtype)
    return over(e, fn, x, n.axes(x.type.rank), bool(n.args.get("keepdim", False)))


def truths(n: TorchNode, e: Emitter, fn: Any) -> Value:
    """any, all: the largest or smallest truth value."""
    x = truth(e, n["self"])
    found = over(e, fn, x, n.axes(x.type.rank), bool(n.args.get("keepdim", False)))
    return cast(e, found, n.type.dtype)


def extreme(n: TorchNode, e: Emitter, fn: Any) -> Results:
    """max, min along `dim`, and where they are; of two tensors the larger; else of all."""
    x = n["self"]
    if "other" in n.args:
        return mapped(e, fn, x, n["other"], dtype=n.type.dtype)
    if "dim" not in n.args:
        return over(e, fn, x, tuple(range(x.type.rank)), False)
    keep = bool(n.args.get("keepdim"))
    if not x.type.rank:
        return x, e.fill(0, TensorType((), i64))
    axis = n.axis(x.type.rank)
    return over(e, fn, x, (axis,), keep), e(t.ArgReduce(fn, x, axis, keep))


def place_of(n: TorchNode, e: Emitter, fn: Any) -> Value:
    """argmax, argmin: along `dim`, or in the tensor laid flat."""
    x = n["self"]
    if n.args["dim"] is None:
        flat = reshaped(e, x, (x.type.size,))
        return reshaped(e, e(t.ArgReduce(fn, flat, 0)), n.type.shape)
    if not x.type.rank:
        return e.fill(0, n.type)
    return e(t.ArgReduce(fn, x, n.axis(x.type.rank), bool(n.args["keepdim"])))


def variance(n: TorchNode, e: Emitter, root: bool, mean: bool) -> Results:
    """The mean square off the mean, its divisor less `correction`; its root, and the mean too."""
    x, dtype = n["self"], n.type.dtype
    axes, keep = n.axes(x.type.rank), bool(n.args.get("keepdim", False))
    correction = n.args.get("correction", 1 if n.args.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    parted = is_complex(x)
    middle = over(e, "mean", x, axes, True) if mean or not parted else x
    if parted:
        total = squares_apart(e, x, axes, keep)
    else:
        apart = mapped(e, "sub", x, middle, dtype=dtype)
        total = over(e, "sum", mapped(e, "mul", apart, apart, dtype=dtype), axes, keep)
    count = prod(x.type.shape[a] for a in axes)
    found = mapped(e, "div", total, max(count - correction, 0), dtype=dtype)
    found = e.map("sqrt", found) if root else found
    if not mean:
        return found
    return found, reshaped(e, middle, found.type.shape)


def squares_apart(e: Emitter, x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    """The sums of squares off the mean of both parts, each by a kernel of its own, together
    (aten/src/ATen/native/ReduceOps.cpp, std_var_out)."""
    where, sums = e.builder.locs, list[Value]()
    for name, v in zip(("real", "imaginary"), pair(e, x), strict=True):
        e.builder.locs = beside(where, name)
        apart = e.map("sub", v, over(e, "mean", v, axes, True))
        sums.append(over(e, "sum", e.map("mul", apart, apart), axes, keep))
    e.builder.locs = where
    return e.map("add", *sums)


def cumulative(n: TorchNode, e: Emitter, fn: Any) -> Value:
    x = cast(e, n["self"], n.type.dtype)
    return e(t.Cumulative(fn, x, n.axis(x.type.rank))) if x.type.rank else x


def top_k(n: TorchNode, e: Emitter) -> Results:
    x = n["self"]
    if not x.type.rank:
        return x, e.fill(0, TensorType((), i64))
    return e.add(t.TopK(x, n.args["k"], n.axis(x.type.rank), bool(n.args["largest"])))


def sort(n: TorchNode, e: Emitter) -> Results:
    """All of the axis: its top so many, largest or smallest first."""
    x = n["self"]
    if not x.type.rank:
        found: Results = (x, e.fill(0, TensorType((), i64)))
    else:
        axis = n.axis(x.type.rank)
        found = e.add(t.TopK(x, x.type.shape[axis], axis, bool(n.args["descending"])))
    return found[1] if n.op.startswith("argsort") else found


def running_extreme(n: TorchNode, e: Emitter, fn: Any) -> Results:
    """cummax, cummin: along an axis so far, and the last place where it was reached."""
    x = n["self"]
    if not x.type.rank:
        return x, e.fill(0, TensorType((), i64))
    axis = n.axis(x.type.rank)
    y = e(t.Cumulative(fn, x, axis))
    reached = e.map("eq", x, y)
    if x.type.dtype.is_float:  # once there is a NaN it stays
        reached = e.map("or", reached, e.map("isnan", x))
    places = line(e, x.type.shape[axis], axis=axis, rank=x.type.rank)
    at = e.map("where", reached, places, e.constant(0, i64))
    return y, e(t.Cumulative("max", at, axis))


def kth_value(n: TorchNode, e: Emitter) -> Results:
    """The k-th smallest along an axis, and its place."""
    return smallest(e, n["self"], int(n.args["k"]), n.args["dim"], bool(n.args["keepdim"]))


def smallest(e: Emitter, x: Value, k: int, dim: int, keep: bool) -> tuple[Value, Value]:
    if not x.type.rank:
        return x, e.fill(0, TensorType((), i64))
    axis = dim % x.type.rank
    found = e.add(t.TopK(x, k, axis, False))
    last = (part(e, v, axis, k - 1, 1) for v in found)
    shape = tuple(1 if i == axis else size for i, size in enumerate(x.type.shape))
    shape = shape if keep else (*shape[:axis], *shape[axis + 1 :])
    value, place = (reshaped(e, v, shape) for v in last)
    return value, place


def median(n: TorchNode, e: Emitter) -> Results:
    """The lower one of the two in the middle; NaN where there is one."""
    x = n["self"]
    whole = "dim" not in n.args
    flat = reshaped(e, x, (x.type.size,)) if whole else x
    dim = 0 if whole else n.args["dim"]
    count = flat.type.shape[dim] if flat.type.rank else 1
    if not flat.type.size:
        return e.fill(float("nan") if x.type.dtype.is_float else 0, n.type)
    value, place = smallest(e, flat, (count + 1) // 2, dim, bool(n.args.get("keepdim")))
    if x.type.dtype.is_float and flat.type.rank:
        keep = bool(n.args.get("keepdim"))
        none = cast(e, e.map("isnan", flat), i64)
        spoiled = over(e, "max", none, (dim % flat.type.rank,), keep)
        spoiled = e.map("ne", spoiled, 0)
        value = e.map("where", spoiled, e.constant(float("nan"), x.type.dtype), value)
    return value if whole else (value, place)


def number_median(n: TorchNode, e: Emitter) -> Results:
    """nanmedian: of the numbers alone, which sorting puts before NaN."""
    x = n["self"]
    if not x.type.dtype.is_float or not x.type.rank:
        return median(n, e)
    whole = "dim" not in n.args
    x = reshaped(e, x, (x.type.size,)) if whole else x
    if not x.type.size:
        return e.fill(float("nan"), n.type)
    axis = 0 if whole else n.axis(x.type.rank)
    ordered, places = e.add(t.TopK(x, x.type.shape[axis], axis, False))
    good = cast(e, e.map("not", e.map("isnan", x)), i64)
    last = e.map("sub", over(e, "sum", good, (axis,), True), 1)
    middle = e.map("div", e.map("max", last, 0), 2)
    value, place = (
        reshaped(e, e(t.GatherElements(v, middle, axis)), n.type.shape) for v in (ordered, places)
    )
    return value if whole else (value, place)


def commonest(n: TorchNode, e: Emitter) -> Results:
    """mode: work as of sorting."""
    x = n["self"]
    if not x.type.rank:
        return x, e.fill(0, TensorType((), i64))
    axis = n.axis(x.type.rank)
    shape = tuple(size for i, size in enumerate(x.type.shape) if i != axis)
    gives = (TensorType(shape, x.type.dtype), TensorType(shape, i64))
    work = round(x.type.size * log2(max(x.type.shape[axis], 2)))
    found = e.add(t.Routine("mode", (x,), gives, (("axis", axis),), work=work))
    return tuple(reshaped(e, v, n.type.shape) for v in found)


def searched(n: TorchNode, e: Emitter, ordered: str) -> Value:
    """searchsorted, bucketize: by bisection of the argument of that name, a comparison a step."""
    seen, x = n[ordered], n.args["self"]
    x = x if isinstance(x, Value) else e.constant(x, f32 if isinstance(x, float) else i64)
    dtype = n.promoted("self", ordered)
    right = bool(n.args["right"]) or n.args.get("side") == "right"
    sorter = n.get("sorter")
    work = round(n.type.size * log2(max(seen.type.shape[-1], 2)))
    attrs = (("right", right), ("dtype", "int32" if n.args["out_int32"] else "int64"))
    args = (cast(e, seen, dtype), cast(e, x, dtype), *((sorter,) if sorter else ()))
    return e(t.Routine("search", args, (n.type,), attrs, work=work))


def softmax(n: TorchNode, e: Emitter, log: bool) -> Value:
    x = cast(e, n["self"], n.type.dtype)
    if not x.type.rank:
        return e.fill(0.0 if log else 1.0, x.type)
    return e(t.Softmax(x, n.axis(x.type.rank), log))


def safe_softmax(n: TorchNode, e: Emitter) -> Value:
    """Zeros where a whole row is -inf."""
    x = cast(e, n["self"], n.type.dtype)
    axis = n.axis(x.type.rank)
    hidden = over(e, "max", x, (axis,), True)
    none = e.map("eq", hidden, float("-inf"))
    return e.map("where", none, e.constant(0, x.type.dtype), e(t.Softmax(x, axis)))


def softmax_backward(n: TorchNode, e: Emitter) -> Value:
    """dx = y dy - y sum(y dy). PyTorch launches the product y dy by itself, so it has a location of
    its own (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    dy, y = n["grad_output"], n["output"]
    where = e.builder.locs
    e.builder.locs = beside(where, "product")
    product = e.map("mul", dy, y)
    e.builder.locs = where
    axis = n.axis(y.type.rank) if y.type.rank else 0
    total = over(e, "sum", product, (axis,), True) if y.type.rank else product
    return cast(e, e.map("sub", product, e.map("mul", y, total)), n.type.dtype)


def norm(n: TorchNode, e: Emitter) -> Value:
    """The p-norm over axes: the root of the sum of powers, the largest, or how many are not 0."""
    x, dtype, p = n["self"], n.type.dtype, float(n.args["ord"])
    axes, keep = n.axes(x.type.rank), bool(n.args["keepdim"])
    x = magnitude(e, x) if is_complex(x) else mapped(e, "abs", x, dtype=dtype)
    x = cast(e, x, dtype)
    if p == 0:
        return over(e, "sum", cast(e, truth(e, x), dtype), axes, keep)
    if abs(p) == float("inf"):
        return over(e, "max" if p > 0 else "min", x, axes, keep)
    if p == 1:
        return over(e, "sum", x, axes, keep)
    if p == 2:
        return e.map("sqrt", over(e, "sum", e.map("mul", x, x), axes, keep))
    total = over(e, "sum", mapped(e, "pow", x, p, dtype=dtype), axes, keep)
    return mapped(e, "pow", total, 1 / p, dtype=dtype)


def extremes(n: TorchNode, e: Emitter) -> Results:
    """aminmax: both, along an axis or of all."""
    x, dim = n["self"], n.args["dim"]
    axes = n.axes(x.type.rank) if dim is None else (n.axis(x.type.rank),) * bool(x.type.rank)
    keep = bool(n.args["keepdim"])
    return tuple(reshaped(e, over(e, fn, x, axes, keep), n.type.shape) for fn in ("min", "max"))


# ---------------------------------------------------------------------------- norms


def layer_norm(n: TorchNode, e: Emitter) -> Results:
    """Over the last axes, as many as `normalized_shape` has; the native call gives the statistics
    too."""
    x, count = n["input"], len(n.args["normalized_shape"])
    axes = tuple(range(x.type.rank - count, x.type.rank))
    y = e(
        t.Normalize(
            x, axes=axes, scale=n.get("weight"), bias=n.get("bias"), eps=float(n.args["eps"])
        )
    )
    if len(n.types) == 1:
        return y
    return y, *statistics(n, e, x, axes, float(n.args["eps"]))


def statistics(
    n: TorchNode, e: Emitter, x: Value, axes: tuple[int, ...], eps: float
) -> tuple[Value, Value]:
    """The mean and 1 / sqrt(variance + eps), in the dtype and shape of the results 1 and 2."""
    type = n.types[1]
    assert type is not None
    middle, _, spread = moments(e, cast(e, x, type.dtype), axes)
    inverse = inverse_root(e, spread, eps)
    return reshaped(e, middle, type.shape), reshaped(e, inverse, type.shape)


def rms_norm(n: TorchNode, e: Emitter) -> Value:
    """Without eps torch takes the dtype's own."""
    x, count = n["input"], len(n.args["normalized_shape"])
    axes = tuple(range(x.type.rank - count, x.type.rank))
    eps = n.args["eps"]
    eps = EPSILON[x.type.dtype.name] if eps is None else float(eps)
    if not is_complex(x):
        return e(t.Normalize(x, axes=axes, scale=n.get("weight"), bias=None, eps=eps, center=False))
    spread = over(e, "mean", e.map("mul", x, x), axes, True)  # not of sizes: as torch has it
    y = e.map("mul", x, e.map("rsqrt", e.map("add", spread, eps)))
    return y if (scale := n.get("weight")) is None else e.map("mul", y, scale)


EPSILON = {  # 1 + eps > 1
    **dict.fromkeys(("f64", "c128"), 2.0**-52),
    **dict.fromkeys(("f32", "c64"), 2.0**-23),
    "f16": 2.0**-10,
    "bf16": 2.0**-7,
}


def group_norm(n: TorchNode, e: Emitter) -> Results:
    """The native call says its extents, and gives the statistics too."""
    native = n.op.startswith("native")
    x = n["input"]
    groups = int(n.one_of("group", "num_groups"))
    axes = tuple(range(1, x.type.rank))
    scale, bias = (per_channel(e, n.get(name), x.type.rank) for name in ("weight", "bias"))
    eps = float(n.args["eps"])
    y = e(t.Normalize(x, axes=axes, scale=scale, bias=bias, eps=eps, groups=groups))
    if not native:
        return y
    count, channels, *_ = x.type.shape
    apart = reshaped(e, x, (count, groups, channels // groups * prod(x.type.shape[2:])))
    return y, *statistics(n, e, apart, (2,), eps)


def per_channel(e: Emitter, v: Value | None, rank: int) -> Value | None:
    """A vector along the channels, where it is there."""
    return None if v is None else along_channels(e, v, rank)


def batch_norm(n: TorchNode, e: Emitter) -> Results:
    """(x - mean) / sqrt(var + eps) * weight + bias by channel: with statistics of the batch in
    training, which also move the running ones, else with those."""
    x, eps = n["input"], float(n.args["eps"])
    training = bool(n.args.get("training"))
    running = [n.get(name) for name in ("running_mean", "running_var")]
    training = training or running[0] is None
    rank = x.type.rank
    scale, bias = (per_channel(e, n.get(name), rank) for name in ("weight", "bias"))
    if training:
        axes = (0, *range(2, rank))
        y = e(t.Normalize(x, axes=axes, scale=scale, bias=bias, eps=eps))
        wide = cast(e, x, f32) if x.type.dtype.bits < 32 else x
        middle, _, spread = moments(e, wide, axes)
        inverse = inverse_root(e, spread, eps)
    else:
        middle, spread = (per_channel(e, v, rank) for v in running)
        assert middle is not None and spread is not None
        apart = e.map("sub", cast(e, x, middle.type.dtype), middle)
        inverse = e.map("rsqrt", e.map("add", spread, eps))
        y = e.map("mul", apart, inverse)
        for fn, v in (("mul", scale), ("add", bias)):
            if v is not None:
                y = e.map(fn, y, cast(e, v, y.type.dtype))
        y = cast(e, y, x.type.dtype)
    if len(n.types) == 1:
        return y
    saved = [
        fitted(e, v, type) if training else empty(e, type)
        for v, type in zip((middle, inverse), n.types[1:3], strict=True)
    ]
    if len(n.types) == 3:
        return y, *saved
    moved = [
        v if not training else moved_to(n, e, v, new, x)
        for v, new in zip(running, (middle, spread), strict=True)
    ]
    moved = [fitted(e, v, type) if v else v for v, type in zip(moved, n.types[-2:], strict=True)]
    if len(n.types) == 5:
        return y, *saved, *moved
    reserve = [empty(e, type) for type in n.types[3:-2]]
    return y, *saved, *reserve, *moved


def fitted(e: Emitter, v: Value, type: TensorType | None) -> Value | None:
    return None if type is None else reshaped(e, cast(e, v, type.dtype), type.shape)


def empty(e: Emitter, type: TensorType | None) -> Value | None:
    return None if type is None else e.fill(0, type)


def moved_to(
    n: TorchNode, e: Emitter, running: Value | None, batch: Value, x: Value
) -> Value | None:
    """(1 - momentum) * running + momentum * the batch's; its variance without bias."""
    if running is None:
        return None
    momentum = float(n.args["momentum"])
    new = reshaped(e, cast(e, batch, running.type.dtype), running.type.shape)
    count = x.type.size // x.type.shape[1]
    if n.get("running_var") is running and count > 1:
        new = e.map("mul", new, count / (count - 1))
    kept = e.map("mul", running, 1 - momentum)
    return e.map("add", kept, e.map("mul", new, momentum))


# ---------------------------------------------------------------------------- losses


def negative_log_likelihood(n: TorchNode, e: Emitter) -> Results:
    """-weight[target] * self[i, target], reduced, and the sum of weights. Cells whose target is
    `ignore_index` weigh nothing."""
    x, target, weight, dtype = n["self"], n["target"], n.get("weight"), n.type.dtype
    axis = 0 if x.type.rank == 1 else 1
    counts = e.map("ne", target, int(n.args["ignore_index"]))
    safe = e.map("where", counts, target, e.constant(0, target.type.dtype))
    shape = target.type.shape
    at = reshaped(e, safe, (*shape[:axis], 1, *shape[axis:]) if x.type.rank > 1 else (1,))
    loss = e.map("neg", reshaped(e, e(t.GatherElements(x, at, axis)), shape))
    weights = cast(e, counts, dtype)
    if weight is not None:
        weights = e.map("mul", weights, reshaped(e, e(t.Gather(weight, safe)), shape))
    loss = e.map("mul", loss, weights)
    axes, how = tuple(range(len(shape))), n.args["reduction"]
    total = over(e, "sum", weights, axes, False)
    if how:
        loss = over(e, "sum", loss, axes, False)
    if how == 1:
        loss = e.map("div", loss, total)
    return (loss, total) if len(n.types) > 1 else loss


CONVERTERS: dict[str, Converter] = each_named(
    {
        "sum": partial(reduction, fn="sum"),
        "mean": partial(reduction, fn="mean"),
        "prod": partial(reduction, fn="prod"),
        "amax": partial(reduction, fn="max"),
        "amin": partial(reduction, fn="min"),
        "any": partial(truths, fn="max"),
        "all": partial(truths, fn="min"),
        "max": partial(extreme, fn="max"),
        "min": partial(extreme, fn="min"),
        "argmax": partial(place_of, fn="max"),
        "argmin": partial(place_of, fn="min"),
        "var": partial(variance, root=False, mean=False),
        "std": partial(variance, root=True, mean=False),
        "var_mean": partial(variance, root=False, mean=True),
        "std_mean": partial(variance, root=True, mean=True),
        "cumsum": partial(cumulative, fn="sum"),
        "cumprod": partial(cumulative, fn="prod"),
        "cummax": partial(running_extreme, fn="max"),
        "cummin": partial(running_extreme, fn="min"),
        "logcumsumexp": partial(cumulative, fn="logaddexp"),
        "kthvalue": kth_value,
        "median": median,
        "nanmedian": number_median,
        "mode": commonest,
        "searchsorted": partial(searched, ordered="sorted_sequence"),
        "bucketize": partial(searched, ordered="boundaries"),
        "topk": top_k,
        "sort argsort": sort,
        "_safe_softmax": safe_softmax,
        "_softmax_backward_data": softmax_backward,
        "linalg_vector_norm": norm,
        "aminmax": extremes,
        "layer_norm native_layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "group_norm native_group_norm": group_norm,
        "batch_norm native_batch_norm _native_batch_norm_legit": batch_norm,
        "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training": batch_norm,
        "nll_loss_forward nll_loss2d_forward nll_loss_nd": negative_log_likelihood,
        **{name: partial(softmax, log=False) for name in ("softmax", "_softmax")},
        **{name: partial(softmax, log=True) for name in ("log_softmax", "_log_softmax")},
    }
)
