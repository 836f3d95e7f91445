"""What several converters write: short runs of ops, or none where there is nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from gpuir.frontends.emit import Emitter
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType
from gpuir.ops import tensor as t


def cast(e: Emitter, x: Value, dtype: DType) -> Value:
    """x itself where it is of this dtype already."""
    return x if x.type.dtype == dtype else e(t.Cast(x, dtype))


def product(e: Emitter, *scales: Value) -> Value:
    """The product of scales; folds where they are known."""
    result, *rest = scales
    for s in rest:
        result = e(t.Map("mul", (result, s)), "scale")
    return result


def line(e: Emitter, length: int, rank: int, axis: int, dtype: DType, fold: bool = False) -> Value:
    """0, 1, ... along `axis`, of extent 1 along the others: computed on the device, unless `fold`
    asks for known numbers."""
    shape = tuple(length if i == axis else 1 for i in range(rank))
    return e(t.Iota(TensorType(shape, dtype), axis), fold=fold)


def reshaped(e: Emitter, x: Value, shape: Sequence[int]) -> Value:
    """x itself where the shape is already right."""
    shape = tuple(shape)
    return x if x.type.shape == shape else e(t.Reshape(x, shape))


def transposed(e: Emitter, x: Value, perm: Sequence[int]) -> Value:
    """x itself where the order is already right."""
    perm = tuple(perm)
    return x if perm == tuple(range(len(perm))) else e(t.Transpose(x, perm))


def channels_first(e: Emitter, x: Value) -> Value:
    """[N, .., C]  →  [N, C, ..]"""
    last = x.type.rank - 1
    return e(t.Transpose(x, (0, last, *range(1, last))))


def channels_last(e: Emitter, x: Value) -> Value:
    """[N, C, ..]  →  [N, .., C]"""
    return e(t.Transpose(x, (0, *range(2, x.type.rank), 1)))


def split_heads(e: Emitter, x: Value, heads: int) -> Value:
    """[b, s, heads * d]  →  [b, heads, s, d]"""
    if x.type.rank != 3 or heads <= 0 or x.type.shape[2] % heads:
        raise ModelError(
            "the number of heads does not divide the hidden size",
            expected=f"a shape [batch, tokens, hidden] whose hidden size is a multiple of {heads}",
            found=str(x.type),
        )
    b, s, hidden = x.type.shape
    return e(t.Transpose(e(t.Reshape(x, (b, s, heads, hidden // heads))), (0, 2, 1, 3)))


def join_heads(e: Emitter, x: Value) -> Value:
    """[b, heads, s, d]  →  [b, s, heads * d]"""
    b, heads, s, d = x.type.shape
    return e(t.Reshape(e(t.Transpose(x, (0, 2, 1, 3))), (b, s, heads * d)))


def scale_of_heads(width: int) -> float:
    """What attention's scores are multiplied by where nothing is given: 1 / sqrt(width)."""
    if width < 1:
        raise ModelError("attention: the head size is 0", expected="1 or more", found="0")
    return 1 / sqrt(width)


def part(e: Emitter, x: Value, axis: int, start: int, size: int) -> Value:
    """x[.., start : start + size, ..] along `axis`."""
    shape = x.type.shape
    if (start, size) == (0, shape[axis]):
        return x
    starts = tuple(start if i == axis else 0 for i in range(len(shape)))
    sizes = tuple(size if i == axis else n for i, n in enumerate(shape))
    return e(t.Slice(x, starts, sizes, (1,) * len(shape)))


def pick(e: Emitter, x: Value, axis: int, index: int) -> Value:
    """x[.., index, ..], the axis gone."""
    shape = x.type.shape
    one = part(e, x, axis, index, 1)
    return e(t.Reshape(one, shape[:axis] + shape[axis + 1 :]))


def joined(e: Emitter, parts: Sequence[Value | None], axis: int) -> Value:
    """The parts that are there and not empty, one after another."""
    kept = tuple(v for v in parts if v is not None and v.type.shape[axis])
    if not kept:
        return next(v for v in parts if v is not None)
    return kept[0] if len(kept) == 1 else e(t.Concat(kept, axis))


def experts(e: Emitter, mix: t.Experts) -> Value:
    """The experts, their rows shared out as the load was told, or evenly; the graph says so."""
    skew = e.scope.expert_skew
    how = f"by a power law of exponent {skew:g}" if skew else "evenly"
    e.assume(f"rows spread over {mix.up.type.shape[0]} experts {how} (--expert-skew)")
    return e(replace(mix, skew=skew))
