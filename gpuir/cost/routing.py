"""Who gets which rows of a mixture of experts: what data decides, and costs take a stated
expectation of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from gpuir.cost.sheet import Number

Array = np.ndarray[Any, np.dtype[np.float64]]

ROWS = (8, 16, 32, 64, 128, 256)  # tiles of m: rows of one expert that a block takes
BLOCKS = {f"blocks of {t}": t for t in ROWS}  # the traits that count them
DRAWS = 5  # of expert popularity, as in the measurements (data README)


def shares(
    tokens: Number, topk: Number, experts: Number, ranks: Number, skew: Number
) -> dict[str, Array]:
    """How the busiest rank's experts share the rows: `rows` in all, `active` experts that get any,
    the tokens `touched`, which have a row there, and `blocks` of each of `ROWS` rows.

    Without skew every expert gets as many, but for rest. With it, popularity is drawn from a power
    law of exponent `skew` between one row and four fifths of the tokens, as the measurements have
    it (ai-dynamo/aiconfigurator, collector/helper.py); an expert gets a token once at most.
    """
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
    names = ("rows", "active", "touched", *BLOCKS)
    return dict(zip(names, found, strict=True))


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


def with_strays(
    share: Mapping[str, Number], sent: Number, topk: Number, ranks: Number
) -> tuple[Number, dict[str, Number]]:
    """The rows that a rank holds, and how they are shared, where it computes the rows that its
    tokens have with other ranks' experts too, as one more expert's."""
    held: Array = sent + (ranks > 1) * (share["touched"] * topk - sent)
    more: Array = held - share["rows"]
    blocks = {name: share[name] + np.ceil(more / t) for name, t in BLOCKS.items()}
    active: Array = share["active"] + (more > 0)
    return held, {**share, "rows": held, "active": active, **blocks}
