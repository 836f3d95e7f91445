"""Reductions, scans, sorting, softmax, normalizations and losses."""

from __future__ import annotations

from functools import partial
from math import prod

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import along_channels, cast, inverse_root, line, moments, over, reshaped
from gpuir.frontends.onnx.layout import axes_of
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, f32, f64
from gpuir.ops import tensor as t


def at_least_f32(dtype: DType) -> DType:
    """What statistics are computed in."""
    return f64 if dtype == f64 else f32


# ---------------------------------------------------------------------------- reductions


def reduced_axes(n: OnnxNode) -> tuple[int, ...]:
    """Attribute or operand; all axes when there are none, or no axis under noop_with_empty_axes."""
    rank = n[0].type.rank
    axes = axes_of(n, 1, rank)
    if axes:
        return tuple(sorted(axes))
    return () if n.attr("noop_with_empty_axes", 0) else tuple(range(rank))


def reduction(n: OnnxNode, e: Emitter, fn: str, before: str = "", after: str = "") -> Value:
    """Reduce* as `fn` of `before` of each cell, `after` of the result. Its square is x * x."""
    x = n[0]
    if before:
        x = e.map("mul", x, x) if before == "square" else e.map(before, x)
    y = over(e, fn, x, reduced_axes(n), bool(n.attr("keepdims", 1)))
    return e.map(after, y) if after else y


def reduce_log_sum_exp(n: OnnxNode, e: Emitter) -> Value:
    """max x + log sum exp(x - max x), which does not overflow."""
    x, axes = n[0], reduced_axes(n)
    if not axes:
        return x
    most = over(e, "max", x, axes)
    total = over(e, "sum", e.map("exp", e.map("sub", x, most)), axes)
    y = e.map("add", e.map("log", total), most)
    if n.attr("keepdims", 1):
        return y
    return reshaped(e, y, tuple(s for i, s in enumerate(x.type.shape) if i not in axes))


def arg_reduction(n: OnnxNode, e: Emitter, fn: str) -> Value:
    keepdims, last = bool(n.attr("keepdims", 1)), bool(n.attr("select_last_index", 0))
    axis = n.axis(n[0].type.rank)
    return e(t.ArgReduce(fn=fn, x=n[0], axis=axis, keepdims=keepdims, last=last))  # type: ignore[arg-type]


def cumulative(n: OnnxNode, e: Emitter, fn: str) -> Value:
    axis = n.integer(1, "its axis")
    exclusive, reverse = bool(n.attr("exclusive", 0)), bool(n.attr("reverse", 0))
    axis = n.from_front(axis, n[0].type.rank)
    return e(t.Cumulative(fn=fn, x=n[0], axis=axis, exclusive=exclusive, reverse=reverse))  # type: ignore[arg-type]


def top_k(n: OnnxNode, e: Emitter) -> Results:
    """k is an attribute before opset 10. Sorted, whether or not that is asked for."""
    k = n.attr("k") if n.version < 10 else n.integer(1, "k, the number of results")
    axis = n.axis(n[0].type.rank, -1)
    return e.add(t.TopK(n[0], int(k), axis, bool(n.attr("largest", 1))))


# ---------------------------------------------------------------------------- softmax


def along_rows(n: OnnxNode, e: Emitter, row: str, **attrs: bool) -> Value:
    """Softmax or hardmax along an axis, by default the last; before opset 13 along all axes from
    `axis` on (by default 1), as one."""
    x = n[0]
    rank, shape = x.type.rank, x.type.shape
    axis = n.axis(rank, -1 if n.version >= 13 else 1)
    merge = n.version < 13 and prod(shape[axis + 1 :]) != 1
    if merge:
        x, axis = e(t.Reshape(x, (prod(shape[:axis]), prod(shape[axis:])))), 1
    if not x.type.shape:
        x, axis = e(t.Reshape(x, (1,))), 0
    y = hardmax(e, x, axis) if row == "hardmax" else e(t.Softmax(x, axis, row == "log_softmax"))
    return reshaped(e, y, shape)


def hardmax(e: Emitter, x: Value, axis: int) -> Value:
    """1 where the largest cell first stands, else 0."""
    fold = e.const_of(x) is not None
    best = e(t.ArgReduce("max", x, axis, keepdims=True))
    numbers = line(e, x.type.shape[axis], axis=axis, rank=x.type.rank, fold=fold)
    return e(t.Cast(e.map("eq", best, numbers), x.type.dtype))


def row_wise(row: str) -> Converter:
    return lambda n, e: along_rows(n, e, row)


# ---------------------------------------------------------------------------- normalization


def channelled(n: OnnxNode) -> Value:
    """The first operand, which has a batch and a channel axis."""
    if n[0].type.rank < 2:
        raise n.refused("the input has no channel axis", "[N, C, ...]", n[0].type)
    return n[0]


def layer_normalization(n: OnnxNode, e: Emitter) -> Value | Results:
    """Over the axes from `axis` on. Mean and 1 / standard deviation, where they are read, make it
    several ops: they are results of the reductions inside."""
    x, scale, bias = n[0], n[1], n.get(2)
    rank, dtype, eps = x.type.rank, x.type.dtype, n.attr("epsilon", 1e-5)
    axes = tuple(range(n.axis(rank, -1), rank))
    if not n.has_output(1) and not n.has_output(2):
        return e(t.Normalize(x, axes=axes, scale=scale, bias=bias, eps=eps))
    wide = cast(e, x, at_least_f32(dtype))
    mean, centred, variance = moments(e, wide, axes)
    inverse = inverse_root(e, variance, eps)
    y = e.map("mul", cast(e, e.map("mul", centred, inverse), dtype), scale)
    return (y if bias is None else e.map("add", y, bias)), mean, inverse


def rms_normalization(n: OnnxNode, e: Emitter) -> Value:
    axes = tuple(range(n.axis(n[0].type.rank, -1), n[0].type.rank))
    return e(t.Normalize(n[0], axes, n[1], eps=n.attr("epsilon", 1e-5), center=False))


def group_normalization(n: OnnxNode, e: Emitter) -> Value:
    """Scale and bias are per group in opset 18 to 20, per channel since."""
    x, groups = channelled(n), n.attr("num_groups", 1)
    channels = x.type.shape[1]

    def spread(v: Value) -> Value:
        if n.version < 21 and v.type.size != channels:
            v = e(t.Broadcast(e(t.Reshape(v, (groups, 1))), (groups, channels // groups)))
        return along_channels(e, v, x.type.rank)

    axes, eps = tuple(range(1, x.type.rank)), n.attr("epsilon", 1e-5)
    return e(
        t.Normalize(x, axes=axes, scale=spread(n[1]), bias=spread(n[2]), eps=eps, groups=groups)
    )


def instance_normalization(n: OnnxNode, e: Emitter) -> Value:
    x = channelled(n)
    scale, bias = (along_channels(e, v, x.type.rank) for v in (n[1], n[2]))
    return e(
        t.Normalize(
            x,
            axes=tuple(range(2, x.type.rank)),
            scale=scale,
            bias=bias,
            eps=n.attr("epsilon", 1e-5),
        )
    )


def batch_normalization(n: OnnxNode, e: Emitter) -> Value | Results:
    """In inference x * s + b, where s = scale / sqrt(var + eps) and b = bias - mean * s fold when
    they are known. In training with the batch's own statistics, and the running ones renewed."""
    x, scale, bias, mean, variance = (n[i] for i in range(5))
    eps, momentum = n.attr("epsilon", 1e-5), n.attr("momentum", 0.9)
    if n.version >= 14:
        training = bool(n.attr("training_mode", 0))
    else:
        training = any(n.has_output(i) for i in range(1, 5))
    rank, dtype, stats = x.type.rank, x.type.dtype, at_least_f32(x.type.dtype)
    per_cell = scale.type.rank > 1  # opset 7, spatial=0: each cell of [C, ...] has its own

    def fit(v: Value) -> Value:
        return cast(e, v if per_cell else along_channels(e, v, rank), stats)

    renewed: list[Value | None] = []
    if training:
        axes = (0,) if per_cell else (0, *range(2, rank))
        now, centred, spread = moments(e, cast(e, x, stats), axes)
        for old, new in ((mean, now), (variance, spread)):
            flat = cast(e, reshaped(e, new, old.type.shape), old.type.dtype)
            kept = e.map("mul", old, momentum)
            added = e.map("mul", flat, 1 - momentum)
            renewed.append(e.map("add", kept, added))
        saved = (cast(e, reshaped(e, v, mean.type.shape), mean.type.dtype) for v in (now, spread))
        renewed += saved if n.version < 14 else ()
        inverse = inverse_root(e, spread, eps)
        y = e.map("mul", e.map("mul", centred, inverse), fit(scale))
        return cast(e, e.map("add", y, fit(bias)), dtype), *renewed
    root = e.map("sqrt", e.map("add", fit(variance), eps))
    s = e.map("div", fit(scale), root)
    b = e.map("sub", fit(bias), e.map("mul", fit(mean), s))
    return e.map("add", e.map("mul", x, cast(e, s, dtype)), cast(e, b, dtype))


def lrn(n: OnnxNode, e: Emitter) -> Value:
    """x / (bias + alpha * mean of x^2 over `size` channels) ^ beta; the mean counts what lies
    outside as zero. Krizhevsky et al., NeurIPS 2012, section 3.3."""
    x, size = channelled(n), n.count("size")
    batch, channels, *image = x.type.shape
    square = e(t.Reshape(e.map("mul", x, x), (batch, 1, channels, prod(image))))
    low, high = (size - 1) // 2, size // 2
    mean = e(
        t.Pool(
            fn="mean",
            x=square,
            window=(size, 1),
            strides=(1, 1),
            low=(low, 0),
            high=(high, 0),
            dilations=(1, 1),
            include_pad=True,
        )
    )
    scaled = e.map("mul", e(t.Reshape(mean, x.type.shape)), n.attr("alpha", 1e-4))
    below = e.map("add", scaled, n.attr("bias", 1.0))
    return e.map("div", x, e.map("pow", below, n.attr("beta", 0.75)))


def mean_variance_normalization(n: OnnxNode, e: Emitter) -> Value:
    """ONNX adds 1e-9 to the standard deviation; 1e-18 is added to the variance here, which is the
    same for constant rows and differs by less than an f32 can hold elsewhere."""
    rank = n[0].type.rank
    axes = tuple(sorted(n.from_front(a, rank) for a in n.attr("axes", (0, 2, 3))))
    return e(t.Normalize(n[0], axes, eps=1e-18))


def divided(e: Emitter, x: Value, norm: Value) -> Value:
    """x / norm, and 0 where the norm is 0: the smallest divisor is the dtype's least normal."""
    least = {"f64": 1e-300, "f16": 6.104e-5}.get(x.type.dtype.name, 1e-37)
    return e.map("div", x, e.map("max", norm, least))


def lp_normalization(n: OnnxNode, e: Emitter) -> Value:
    x, p = n[0], n.attr("p", 2)
    if p not in (1, 2):
        raise n.refused("the norm p is unknown", "p of 1 or 2", p)
    axis = n.axis(x.type.rank, -1)
    if p == 1:
        return divided(e, x, over(e, "sum", e.map("abs", x), (axis,)))
    return divided(e, x, e.map("sqrt", over(e, "sum", e.map("mul", x, x), (axis,))))


# ---------------------------------------------------------------------------- losses


def picked_loss(n: OnnxNode, e: Emitter, scores: Value) -> Value:
    """-weight[target] * scores[n, target, ...], reduced; `mean` is over the weights. Cells whose
    target is `ignore_index` weigh nothing."""
    target, weight, dtype = n[1], n.get(2), scores.type.dtype
    ignored, how = n.attr("ignore_index"), n.choice("reduction", "mean", ("none", "sum", "mean"))
    shape = target.type.shape
    if shape != scores.type.shape[:1] + scores.type.shape[2:] or scores.type.rank < 2:
        raise n.refused(
            "the shape of the targets does not match the scores",
            "scores' [N, ..]",
            f"scores {scores.type}, targets {target.type}",
        )
    counts: Value | None = None  # where the target counts
    if ignored is not None:
        counts = e.map("ne", target, ignored)
        target = e.map("where", counts, target, e.constant(0, target.type.dtype))
    indices = e(t.Reshape(target, (shape[0], 1, *shape[1:])))
    loss = e.map("neg", e(t.Reshape(e(t.GatherElements(scores, indices, 1)), shape)))
    weights: Value | None = None
    if weight is not None:
        weights = e(t.Gather(cast(e, weight, dtype), target))
        if counts is not None:
            weights = e.map("where", counts, weights, e.constant(0, dtype))
    elif counts is not None:
        weights = cast(e, counts, dtype)
    if weights is not None:
        loss = e.map("mul", loss, weights)
    axes = tuple(range(len(shape)))
    if how == "none" or not axes:
        return loss
    if how == "sum" or weights is not None:
        total = over(e, "sum", loss, axes, keepdims=False)
        if how == "sum" or weights is None:
            return total
        return e.map("div", total, over(e, "sum", weights, axes, keepdims=False))
    return over(e, "mean", loss, axes, keepdims=False)


def negative_log_likelihood(n: OnnxNode, e: Emitter) -> Value:
    return picked_loss(n, e, n[0])


def softmax_cross_entropy(n: OnnxNode, e: Emitter) -> Results:
    """The loss, and the logarithms of the probabilities."""
    scores = e(t.Softmax(n[0], 1, log=True))
    return picked_loss(n, e, scores), scores


CONVERTERS: dict[str, Converter] = {
    **{
        f"Reduce{name}": partial(reduction, fn=name.lower())
        for name in ("Sum", "Mean", "Max", "Min", "Prod")
    },
    "ReduceL1": partial(reduction, fn="sum", before="abs"),
    "ReduceL2": partial(reduction, fn="sum", before="square", after="sqrt"),
    "ReduceSumSquare": partial(reduction, fn="sum", before="square"),
    "ReduceLogSum": partial(reduction, fn="sum", after="log"),
    "ReduceLogSumExp": reduce_log_sum_exp,
    "ArgMax": partial(arg_reduction, fn="max"),
    "ArgMin": partial(arg_reduction, fn="min"),
    "CumSum": partial(cumulative, fn="sum"),
    "CumProd": partial(cumulative, fn="prod"),
    "TopK": top_k,
    "Softmax": row_wise("softmax"),
    "LogSoftmax": row_wise("log_softmax"),
    "Hardmax": row_wise("hardmax"),
    "LayerNormalization": layer_normalization,
    "RMSNormalization": rms_normalization,
    "GroupNormalization": group_normalization,
    "InstanceNormalization": instance_normalization,
    "BatchNormalization": batch_normalization,
    "LRN": lrn,
    "MeanVarianceNormalization": mean_variance_normalization,
    "LpNormalization": lp_normalization,
    "NegativeLogLikelihoodLoss": negative_log_likelihood,
    "SoftmaxCrossEntropyLoss": softmax_cross_entropy,
}
