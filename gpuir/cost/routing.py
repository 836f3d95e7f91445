"""Mixtures of experts: who gets which rows, which data decides and costs take a stated expectation
of; and the work that it comes to."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from gpuir.cost.sheet import Number
from gpuir.cost.work import Detail, Operand, Work
from gpuir.ir.sizes import is_size, of_sizes, pinned
from gpuir.ir.types import DType, f4e2m1, i4, u4

Array = np.ndarray[Any, np.dtype[np.float64]]

ROWS = (8, 16, 32, 64, 128, 256)  # tiles of m: rows of one expert that a block takes
SCALE_BYTES = {"f4e2m1": 1 / 16, "i4": 2 / 128}  # a weight's share of its scale: nvfp4, int4 groups
CONVERTED = (i4, u4, f4e2m1)  # dtypes of experts' weights that were measured converted
DRAWS = 5  # of expert popularity, as in the measurements (data README)


@dataclass(frozen=True)
class Shares(Detail):
    """How the busiest rank's experts share the rows: all of its rows, experts that get any, tokens
    that have a row there, and tiles of each of `ROWS` rows."""

    rows: Number
    active: Number
    touched: Number
    tiles: tuple[Number, ...]


@dataclass(frozen=True)
class Routed(Detail):
    """Of a mixture of experts: its tokens, the rows that the router sends to any rank, matrices
    that a row goes through before the activation, and how the rows are shared. `again`: it ran
    again and again, as it was measured, and nothing between took its weights from the L2."""

    tokens: Number
    sent: Number
    into: Number
    shares: Shares
    again: bool = False


def shares(tokens: Number, topk: Number, experts: Number, ranks: Number, skew: Number) -> Shares:
    """How the busiest rank's experts share the rows of so many tokens, each sent to `topk` experts.

    Without skew every expert gets as many, but for rest. With it, popularity is drawn from a power
    law of exponent `skew` between one row and four fifths of the tokens, as the measurements have
    it (ai-dynamo/aiconfigurator, collector/helper.py); an expert gets a token once at most.
    """
    if is_size(tokens):
        how = json.dumps([pinned(n) for n in (topk, experts, ranks, skew)])
        rows, active, touched, *tiles = (_share(i, tokens, how) for i in range(3 + len(ROWS)))
        return Shares(rows, active, touched, tuple(tiles))
    columns = np.broadcast_arrays(*(np.asarray(n, float) for n in (tokens, topk, experts, ranks)))
    skews = np.broadcast_to(np.asarray(skew, float), columns[0].shape)
    found = _even(*columns)
    drawn = skews > 0
    if np.any(drawn):
        cases = np.stack([*(c[drawn] for c in columns), skews[drawn]], axis=-1)
        kinds, which = np.unique(cases, axis=0, return_inverse=True)
        values = np.array([_drawn(*(int(n) for n in case[:4]), float(case[4])) for case in kinds])
        found = np.where(drawn, 0.0, found)
        found[..., drawn] = values[which.reshape(-1)].T
    rows, active, touched, *tiles = found
    return Shares(rows, active, touched, tuple(tiles))


@of_sizes
def _share(part: int, tokens: Number, how: str) -> float:
    """A part of how the busiest rank's experts share the rows: the first three, and the tiles."""
    return _shared(tokens, how)[int(part)]


@lru_cache(maxsize=4096)
def _shared(tokens: Number, how: str) -> tuple[float, ...]:
    topk, experts, ranks, skew = json.loads(how)
    x = shares(tokens, topk, experts, ranks, skew)
    return tuple(float(n) for n in (x.rows, x.active, x.touched, *x.tiles))


def _even(tokens: Array, topk: Array, experts: Array, ranks: Array) -> Array:
    """Token i goes to the experts i + j stride, stride = experts / topk: whole rounds of them, and
    the rest to the first experts of each stride; fewer tokens than that spread out."""
    local, stride = experts // ranks, np.ceil(experts / topk)
    full, rest = np.divmod(tokens, stride)
    span, bands = np.minimum(local, stride), np.maximum(1.0, local / stride)
    few = np.ceil(rest * span / stride)
    more = np.where(full > 0, np.minimum(span, rest), few) * bands
    fewer = local - more
    blocks = [more * np.ceil((full + 1) / t) + fewer * np.ceil(full / t) for t in ROWS]
    rows = more * (full + 1) + fewer * full
    touched = np.minimum(rows, tokens)
    return np.stack([rows, np.where(full > 0, local, more), touched, *blocks])


@lru_cache(maxsize=65536)
def _drawn(tokens: int, topk: int, experts: int, ranks: int, skew: float) -> tuple[float, ...]:
    """Means over draws of popularity from a power law, by its inverse distribution."""
    total, local = tokens * topk, experts // ranks
    low, high = (1.0, max(0.8 * tokens, 1.0 + 1e-9)) if total > experts else (0.01, 2.0)
    power = (1 - skew) or 1e-6
    u: Array = np.random.default_rng(0).random((DRAWS, ranks, local))
    weight = ((high**power - low**power) * u + low**power) ** (1 / power)
    return _summary(_levelled(weight, total, tokens), tokens)


def _levelled(weight: Array, total: int, tokens: int) -> Array:
    """Whole rows of [draws, ranks, experts] by weight, none above `tokens`, `total` in all."""
    drawn = np.rint(weight / weight.sum(axis=(1, 2), keepdims=True) * total)
    rows: Array = np.clip(drawn, 0, tokens)
    for _ in range(8):
        if np.all(rows.sum(axis=(1, 2)) == total):
            break
        rows = np.clip(rows + _rest(rows, total), 0, tokens)
    return rows


def _rest(rows: Array, total: int) -> Array:
    """What rounding left over: to the least loaded of each rank, or from the most."""
    ranks, local = int(rows.shape[1]), int(rows.shape[2])
    over: Array = total - np.sum(rows, axis=(1, 2))[:, None]
    whole, left = np.divmod(np.abs(over), float(ranks))
    each: Array = whole + np.heaviside(left - np.arange(ranks), 0.0)
    each = each.reshape(-1, ranks, 1)
    place = np.argsort(np.argsort(rows, axis=2, kind="stable"), axis=2, kind="stable")
    more: Array = np.where(place < each, 1.0, 0.0) + np.floor(each / local)
    less: Array = np.where(local - 1 - place < each, -1.0, 0.0)
    return np.where(np.expand_dims(over, -1) > 0, more, less)


def _summary(rows: Array, tokens: int) -> tuple[float, ...]:
    """What `shares` gives, of the busiest rank, as means over draws."""
    busiest: Array = rows[np.arange(len(rows)), np.argmax(np.sum(rows, axis=2), axis=1)]
    count = float(len(rows))
    missed: Array = np.prod(1 - busiest / max(tokens, 1), axis=1)
    return (
        float(np.sum(busiest)) / count,
        float(np.sum(busiest > 0)) / count,
        tokens * (1 - float(np.mean(missed))),
        *(float(np.sum(np.ceil(busiest / t))) / count for t in ROWS),
    )


def with_strays(share: Shares, sent: Number, topk: Number, ranks: Number) -> tuple[Number, Shares]:
    """The rows that a rank holds, and how they are shared, where it computes the rows that its
    tokens have with other ranks' experts too, as one more expert's."""
    held: Array = sent + (ranks > 1) * (share.touched * topk - sent)
    more: Array = held - share.rows
    tiles = tuple(n + np.ceil(more / t) for n, t in zip(share.tiles, ROWS, strict=True))
    active: Array = share.active + (more > 0)
    return held, replace(share, rows=held, active=active, tiles=tiles)


# ---------------------------------------------------------------------------- work


def mixture(
    tokens: Number,
    hidden: Number,
    inter: Number,
    topk: Number,
    experts: Number,
    dtype: DType,
    *,
    weight: DType | None = None,
    gated: bool = True,
    shards: Number = 1,
    ranks: Number = 1,
    skew: Number = 0.0,
    scales: str = "",
    library: str = "cutlass",
    math: DType | None = None,
    strays: bool = False,
    routed: bool = False,
    again: bool = False,
) -> Work:
    """A mixture of experts on one rank, from the router's choice to its sum: `tokens` of `hidden`
    cells, each to `topk` of `experts`, which are `inter` wide and lie on `ranks` ranks; each expert
    is cut in `shards`, and `gated` by a second matrix.

    `weight` is the dtype the weights are stored in, where that is not what is multiplied; `scales`
    of "block" belong to blocks along k. `skew`: see `shares`. With `strays`, the rank
    is given the tokens it has an expert for alone, and computes their rows for other ranks' experts
    too, as one more expert's: so SGLang up to 0.5.10 was measured, on GPUs before Blackwell.
    Where tokens were `routed`, those that have no row on the rank are not there. `again`: as one
    that was measured, see `Routed`.
    Between kernels rows lie in 16 bits, or as wide as they are multiplied.
    """
    width, local = inter / shards, experts // ranks
    share = shares(tokens, topk, experts, ranks, skew)
    stored = weight or dtype
    cell = stored.bits / 8 + SCALE_BYTES.get(stored.name, 0.0)
    into = 2.0 if gated else 1.0
    sent: Number = tokens * topk * 1.0
    if strays:
        sent, share = with_strays(share, sent, topk, ranks)
    weights = share.active * (into + 1) * width * hidden * cell
    if routed:
        tokens = share.touched
    row_cell = max(dtype.bits, 16) / 8
    moved = tokens * hidden * row_cell
    products = 2 * share.rows * (into + 1) * width * hidden
    return Work(
        kernel="k.experts",
        dims=(("b", local), ("m", sent / experts), ("n", width), ("k", hidden)),
        reduced=("k",),
        operands=(
            Operand(("m", "k"), row_cell, moved, "staged"),
            Operand(("b", "n", "k"), cell, weights, "staged"),
            Operand(("m", "k"), row_cell, moved, "written"),
        ),
        flops=products,
        products=products,
        lane_ops=0.0 * products,
        dtype=dtype,
        pipe="tensor",
        math=math,
        kind=f"{library} {scheme_of(dtype, weight, scales == 'block')}",
        novel=stored not in (dtype, *CONVERTED),
        detail=Routed(tokens, sent, into, share, again),
    )


def scheme_of(dtype: DType, weight: DType | None, block: bool) -> str:
    """What is multiplied: 16, 8 or 4 bits, with scales by blocks along k, or weights converted."""
    converted = weight is not None and weight != dtype
    return f"f{min(dtype.bits, 16)}" + " block" * block + " converted" * converted
