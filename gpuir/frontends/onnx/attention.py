"""Attention: of ai.onnx, of com.microsoft as onnxruntime's optimiser writes it, and what goes with
it: rotary embedding, key and value caches, linear attention.

Whatever the operator, scores, mask, softmax and the product with the values stay one `t.attention`,
unless the model reads the scores or adds a sink to the softmax: then they are separate ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import (
    backwards,
    cast,
    cut,
    join_heads,
    joined,
    line,
    matrices_turned,
    part,
    pick,
    product,
    reshaped,
    scale_of_heads,
    split_heads,
)
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.frontends.onnx.quant import Codes, matmul_to_float, quantize
from gpuir.interp import unseen
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, bool_, f32, f64, i64
from gpuir.ops import tensor as t

# ---------------------------------------------------------------------------- heads, caches


@dataclass(frozen=True)
class KeyValueCache:
    """Keys or values: `all` that are attended to, and the buffer `present` that is given back."""

    all: Value
    present: Value


def extended(e: Emitter, past: Value | None, new: Value, used: int) -> KeyValueCache:
    """`new` behind the first `used` of `past`: written there if the buffer has room for it, as one
    that past and present share does; else behind all of it, in a new tensor."""
    if past is None:
        return KeyValueCache(new, new)
    held, count = past.type.shape[2], new.type.shape[2]
    if used == held:
        everything = joined(e, (past, new), 2)
        return KeyValueCache(everything, everything)
    if used + count > held:
        everything = joined(e, (part(e, past, 2, 0, used), new), 2)
        return KeyValueCache(everything, everything)
    start = e.fill(used, TensorType((past.type.shape[0],), i64))
    present = written(e, past, new, start, 2)
    return KeyValueCache(part(e, present, 2, 0, used + count), present)


def written(
    e: Emitter, cache: Value, new: Value, start: Value | None, axis: int, *, circular: bool = False
) -> Value:
    """`cache` with `new` in place of its cells along `axis` from start[b] on."""
    *lead, steps = new.type.shape[: axis + 1]
    grid = TensorType((*lead, steps, 1), i64)
    columns = [e(t.Iota(grid, i)) for i in range(axis)]
    at = e(t.Iota(grid, axis))
    if start is not None:
        at = e.map("add", at, e(t.Reshape(cast(e, start, i64), (lead[0], *(1,) * (axis + 1)))))
    if circular:
        at = e.map("mod", at, cache.type.shape[axis])
    return e(t.ScatterND(cache, e(t.Concat((*columns, at), axis + 1), "positions"), new))


# ---------------------------------------------------------------------------- the core


@dataclass(frozen=True)
class Stages:
    """Attention in separate ops: the result, and the scores at each stage on the way to it."""

    y: Value
    raw: Value
    capped: Value
    masked: Value
    weights: Value


def times_keys(e: Emitter, q: Value, k: Value) -> Value:
    """q [b, h, s, w] by k [b, g, d, w] over w: scores [b, h, s, d], or by group of heads that share
    their keys [b, g, h / g, s, d]."""
    b, h, s, width = q.type.shape
    g, d = k.type.shape[1:3]
    if h != g:
        q = e(t.Reshape(q, (b, g, h // g, s, width)))
        k = e(t.Reshape(k, (b, g, 1, d, width)))
    return e(t.Matmul(q, matrices_turned(e, k)))


def times_values(e: Emitter, weights: Value, v: Value) -> Value:
    """Weights [b, h, s, d] by v [b, g, d, f] over d: [b, h, s, f]."""
    b, h, s, d = weights.type.shape
    g, width = v.type.shape[1], v.type.shape[3]
    if h != g:
        weights = e(t.Reshape(weights, (b, g, h // g, s, d)))
        v = e(t.Reshape(v, (b, g, 1, d, width)))
    return reshaped(e, e(t.Matmul(weights, v)), (b, h, s, width))


def attend_in_stages(
    e: Emitter, op: t.Attention, precision: DType | None = None, sink: Value | None = None
) -> Stages:
    """Attention whose scores are read, or with a `sink` [heads]: one more score in each softmax
    that no value belongs to (Xiao et al., Efficient Streaming Language Models, 2023)."""
    b, h, s, _ = op.q.type.shape
    d = op.k.type.shape[2]
    raw = e.map("mul", times_keys(e, op.q, op.k), op.scale)
    raw = reshaped(e, raw, (b, h, s, d))
    capped = raw
    if op.softcap > 0:
        capped = e.map("tanh", e.map("div", raw, op.softcap))
        capped = e.map("mul", capped, op.softcap)
    place = None
    if op.causal or op.window is not None:
        place = e.lazy(TensorType((s, d), bool_), lambda: ~unseen(op), "visible")
    masked = capped
    for m in (place, op.mask):
        if m is None:
            continue
        if m.type.dtype == bool_:
            masked = e.map("where", m, masked, e.constant(-inf, raw.type.dtype))
        else:
            masked = e.map("add", masked, m)
    weights = cast(e, masked, precision or raw.type.dtype)
    if sink is not None:
        column = e(t.Reshape(cast(e, sink, weights.type.dtype), (1, h, 1, 1)))
        column = e(t.Broadcast(column, (b, h, s, 1)))
        weights = e(t.Softmax(e(t.Concat((weights, column), 3)), 3))
        weights = part(e, weights, 3, 0, d)
    else:
        weights = e(t.Softmax(weights, 3))
        if masked is not capped:  # a query that sees no key gives zeros
            none = e.map("isinf", masked)
            weights = e.map("where", none, e.constant(0, weights.type.dtype), weights)
    weights = cast(e, weights, raw.type.dtype)
    y = times_values(e, weights, op.v)
    return Stages(y=y, raw=raw, capped=capped, masked=masked, weights=weights)


def attended(
    e: Emitter,
    op: t.Attention,
    *,
    shown: str = "",
    precision: DType | None = None,
    sink: Value | None = None,
) -> tuple[Value, Value | None]:
    """The result, and the scores at the stage `shown`: one kernel, unless scores are read or there
    is a sink."""
    if not shown and sink is None:
        return e(op), None
    stages = attend_in_stages(e, op, precision, sink)
    return stages.y, getattr(stages, shown) if shown else None


def both(e: Emitter, seen: Value | None, added: Value | None, hidden: float = -inf) -> Value | None:
    """A boolean and an additive mask as one: the additive, and `hidden` where not seen."""
    if seen is None or added is None:
        return added if seen is None else seen
    return e.map("where", seen, added, e.constant(hidden, added.type.dtype))


def all_of(e: Emitter, *masks: Value | None) -> Value | None:
    """Boolean masks as one."""
    result: Value | None = None
    for m in masks:
        if m is not None:
            result = m if result is None else e.map("and", result, m)
    return result


def within(e: Emitter, lengths: Value, keys: int) -> Value:
    """lengths [b]  →  whether key d is among the first lengths[b]: bool[b, 1, 1, d]"""
    column = e(t.Reshape(lengths, (lengths.type.size, 1, 1, 1)))
    return e.map("lt", line(e, keys, lengths.type.dtype, axis=3, rank=4, fold=True), column)


# ---------------------------------------------------------------------------- ai.onnx Attention


def attention(n: OnnxNode, e: Emitter) -> Results:
    """q, k, v, mask, past key, past value, count of keys that are not padding; 3-D operands have
    their heads in the last axis."""
    q = n.of_rank(0, 3, 4)
    k, v = (n.of_rank(i, q.type.rank) for i in (1, 2))
    flat = q.type.rank == 3
    if flat:
        for name in ("q_num_heads", "kv_num_heads"):
            if not n.attr(name):
                raise n.refused(f"inputs with three axes need the attribute {name}")
        q = split_heads(e, q, n.attr("q_num_heads"))
        k, v = (split_heads(e, x, n.attr("kv_num_heads")) for x in (k, v))
    if n.get(4) is not None or n.get(5) is not None:
        for i in (4, 5):
            n.of_rank(i, 4)
    past = 0 if n.get(4) is None else n[4].type.shape[2]
    keys, values = extended(e, n.get(4), k, past), extended(e, n.get(5), v, past)
    s, d = q.type.shape[2], keys.all.type.shape[2]
    scale = n.attr("scale")
    left, right = n.attr("left_window_size", -1), n.attr("right_window_size", -1)
    reach = right if right >= 0 else None  # how far ahead a query may see
    if n.attr("is_causal", 0):
        reach = 0
    op = t.Attention(
        q,
        keys.all,
        values.all,
        scale=scale_of_heads(q.type.shape[3]) if scale is None else float(scale),
        causal=reach is not None,
        offset=past + (reach or 0),
        window=left + (reach or 0) if left >= 0 else None,
        softcap=float(n.attr("softcap", 0.0)),
    )
    mask, seen = n.get(3), None
    if (lengths := n.get(6)) is not None:
        seen = within(e, lengths, d)
        if op.window is not None or (op.causal and (s > 1 or reach)):
            seen = all_of(e, seen, in_window(e, lengths, op))
        op = replace(op, causal=False, offset=0, window=None)
    if mask is not None:
        n.of_rank(3, 1, 2, 3, 4)
        mask = filled(e, mask if mask.type.dtype == bool_ else cast(e, mask, q.type.dtype), d)
        mask = all_of(e, seen, mask) if mask.type.dtype == bool_ else both(e, seen, mask)
    else:
        mask = seen

    shown, precision = "", None
    if n.has_output(3):
        if n.attr("softmax_precision") is not None:
            precision = n.dtype("softmax_precision")
        kinds = ("raw", "capped", "masked", "weights")
        mode = n.attr("qk_matmul_output_mode", 0)
        if not 0 <= mode < len(kinds):
            raise n.refused("qk_matmul_output_mode is out of range", "0..3", mode)
        shown = kinds[mode]
    y, scores = attended(e, replace(op, mask=mask), shown=shown, precision=precision)
    return join_heads(e, y) if flat else y, keys.present, values.present, scores


def in_window(e: Emitter, lengths: Value, op: t.Attention) -> Value:
    """Which keys the settings leave in view, the queries being the last s of each sequence."""
    dtype, s, d = lengths.type.dtype, op.q.type.shape[2], op.k.type.shape[2]
    start = e(t.Reshape(lengths, (lengths.type.size, 1, 1, 1)))
    start = e.map("add", start, op.offset - s)
    here = e.map("add", start, line(e, s, dtype, axis=2, rank=4, fold=True))
    key = line(e, d, dtype, axis=3, rank=4, fold=True)
    seen: Value | None = e.map("ge", here, key) if op.causal else None
    if op.window is not None:
        oldest = e.map("sub", here, op.window)
        seen = all_of(e, seen, e.map("le", oldest, key))
    assert seen is not None
    return seen


def filled(e: Emitter, mask: Value, keys: int) -> Value:
    """A mask of fewer keys hides the others."""
    short = keys - mask.type.shape[-1]
    if short <= 0 or mask.type.rank == 0:
        return mask
    low, high = (0,) * mask.type.rank, (*(0,) * (mask.type.rank - 1), short)
    hidden = False if mask.type.dtype == bool_ else -inf
    return e(t.Pad(mask, low, high, e.constant(hidden, mask.type.dtype)))


def flex_attention(n: OnnxNode, e: Emitter) -> Value:
    """q, k, v, and subgraphs that change the scores and the weights: then each step is its own op.

    Dong et al., Flex Attention, 2024.
    """
    q, k, v = n[0], n[1], n[2]
    b, h, s, width = q.type.shape
    scale = n.attr("scale")
    scale = scale_of_heads(width) if scale is None else float(scale)
    change_scores, change_weights = n.attr("score_mod"), n.attr("prob_mod")
    if change_scores is None and change_weights is None:
        return e(t.Attention(q, k, v, scale=scale))
    dtype = q.type.dtype
    precision = n.dtype("softmax_precision", f64 if dtype == f64 else f32)
    scores = e.map("mul", cast(e, times_keys(e, q, k), precision), scale)
    scores = reshaped(e, scores, (b, h, s, k.type.shape[2]))
    if change_scores is not None:
        (scores,) = n.walk.inside().enter(change_scores, (scores,))
    weights = e(t.Softmax(scores, 3))
    if change_weights is not None:
        (weights,) = n.walk.inside().enter(change_weights, (weights,))
    return times_values(e, cast(e, weights, dtype), v)


# ---------------------------------------------------------------------------- rotary embedding


@dataclass(frozen=True)
class Turn:
    """By which angles pairs of cells turn: cos [.., r], and sin with both its signs [.., 2 r]: -sin
    for the first of each pair, sin for the second. Pairs are neighbours where `interleaved`, else
    r apart."""

    cos: Value
    signed: Value
    interleaved: bool

    def of(self, rows: Callable[[Value], Value]) -> Turn:
        """The same for these rows of both tables."""
        return replace(self, cos=rows(self.cos), signed=rows(self.signed))


def angles(n: OnnxNode, e: Emitter, cos: Value, sin: Value) -> Turn:
    """Whole tables cos and sin [.., r], cut to the columns that turn; so it folds."""
    interleaved = bool(n.attr("interleaved", 0) or n.attr("rotary_interleaved", 0))
    last = cos.type.rank - 1
    r = n.attr("rotary_embedding_dim", 0) // 2 or cos.type.shape[last]
    cos, sin = (part(e, v, last, 0, r) for v in (cos, sin))
    lead = sin.type.shape[:-1]
    signs = (e.map("neg", sin), sin)
    if interleaved:
        signs = tuple(e(t.Reshape(v, (*lead, r, 1))) for v in signs)
    signed = e(t.Concat(signs, last + interleaved))
    return Turn(cos, reshaped(e, signed, (*lead, 2 * r)), interleaved)


def rotated(e: Emitter, x: Value, turn: Turn) -> Value:
    """Each pair (a, b) of the leading 2 r cells of x's last axis turned to (a cos - b sin, b cos +
    a sin): with the pair as an axis, x cos + (x reversed along it) * signed sin.

    Su et al., RoFormer, 2021.
    """
    cos, signed, interleaved = turn.cos, turn.signed, turn.interleaved
    r, width = cos.type.shape[-1], x.type.shape[-1]
    lead, last = x.type.shape[:-1], x.type.rank - 1
    pair, axis = ((r, 2), last + 1) if interleaved else ((2, r), last)
    pairs = e(t.Reshape(part(e, x, last, 0, 2 * r), (*lead, *pair)))
    swapped = backwards(e, pairs, axis)
    wide = (r, 1) if interleaved else (1, r)
    cos = cast(e, reshaped(e, cos, (*cos.type.shape[:-1], *wide)), x.type.dtype)
    signed = cast(e, reshaped(e, signed, (*signed.type.shape[:-1], *pair)), x.type.dtype)
    y = e.map("add", e.map("mul", pairs, cos), e.map("mul", swapped, signed))
    y = e(t.Reshape(y, (*lead, 2 * r)))
    if 2 * r == width:
        return y
    return e(t.Concat((y, part(e, x, last, 2 * r, width - 2 * r)), last))


def rotary(e: Emitter, x: Value, turn: Turn, heads: int = 0) -> Value:
    """x [b, heads, s, d] or [b, s, heads * d], turned by angles [b, s, ..] (b may be 1)."""
    shape = x.type.shape
    if x.type.rank == 4:
        turn = turn.of(lambda v: e(t.Reshape(v, (v.type.shape[0], 1, *v.type.shape[1:]))))
        return rotated(e, x, turn)
    if x.type.rank != 3 or not heads or shape[2] % heads:
        raise ModelError(
            "RotaryEmbedding: num_heads does not divide the hidden size",
            expected="an input with four axes, or with three and the attribute num_heads",
            found=f"{x.type}, num_heads={heads}",
        )
    x = e(t.Reshape(x, (*shape[:2], heads, shape[2] // heads)))
    turn = turn.of(lambda v: e(t.Reshape(v, (*v.type.shape[:2], 1, v.type.shape[2]))))
    return e(t.Reshape(rotated(e, x, turn), shape))


def rotary_embedding(n: OnnxNode, e: Emitter) -> Value:
    """x, cos and sin: [b, s, r], or tables that position_ids [b, s] index."""
    ids = n.get(3)
    rank = 3 if ids is None else 2
    turn = angles(n, e, n.of_rank(1, rank), n.of_rank(2, rank))
    if ids is not None:
        turn = turn.of(lambda v: e(t.Gather(v, ids, 0)))
    return rotary(e, n[0], turn, n.attr("num_heads", 0))


def rows_at(e: Emitter, table: Value, ids: Value, s: int) -> Value:
    """Rows of a cos or sin table: at ids [b, s], or at the s positions from one id on."""
    if ids.type.rank == 0:
        ids = e(t.Reshape(ids, (1,)))
    if ids.type.size == 1 and ids.type.rank == 1 and s != 1:
        ids = e.map("add", line(e, s, ids.type.dtype, fold=True), ids)
    if ids.type.rank == 1:
        ids = e(t.Reshape(ids, (1, ids.type.size)))
    return e(t.Gather(table, ids, 0))


def ms_rotary_embedding(n: OnnxNode, e: Emitter) -> Value:
    """x, position_ids, and the tables cos and sin."""
    x = n[0]
    s = x.type.shape[2 if x.type.rank == 4 else 1]
    heads = n.attr("num_heads", 0) or x.type.shape[-1] // max(2 * n[2].type.shape[-1], 1)
    turn = angles(n, e, n[2], n[3]).of(lambda v: rows_at(e, v, n[1], s))
    y = rotary(e, x, turn, heads)
    scale = float(n.attr("scale", 1.0))
    return y if scale == 1 else e.map("mul", y, scale)


def ms_multimodal_rotary(n: OnnxNode, e: Emitter) -> Value:
    """Three streams of positions [3, b, s], each for its own columns of the angle."""
    x, ids, sections = n[0], n[1], tuple(n.attr("mrope_section"))
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != n[2].type.shape[1]:
        raise n.refused(
            "mrope_section does not match the sin and cos tables",
            f"three numbers whose sum is {n[2].type.shape[1]}, the number of columns of the tables",
            list(sections),
        )
    tables: list[Value] = []
    for table in (n[2], n[3]):
        r = table.type.shape[1]
        stream = np.zeros(r, np.int64)
        if n.attr("mrope_layout", 0):
            for i in (1, 2):
                stream[i : 3 * sections[i] : 3] = i
        else:
            stream = np.repeat(np.arange(3), sections)
        rows, chosen = e(t.Gather(table, ids, 0)), None
        for i in (0, 1, 2):
            mine = pick(e, rows, 0, i)
            if chosen is None:
                chosen = mine
            elif (stream == i).any():
                chosen = e.map("where", e.constant(stream == i, bool_), mine, chosen)
        assert chosen is not None
        tables.append(chosen)
    heads = n.attr("num_heads", 0) or x.type.shape[-1] // max(2 * tables[0].type.shape[-1], 1)
    cos, sin = tables
    return rotary(e, x, angles(n, e, cos, sin), heads)


def ms_gemma_rotary(n: OnnxNode, e: Emitter) -> Results:
    """angles [b, s, d], q, q turned by a quarter, k, k turned."""
    angles = n[0]
    b, s, d = angles.type.shape
    cos, sin = (
        e(t.Reshape(cast(e, e.map(fn, angles), n[1].type.dtype), (b, 1, s, d)))
        for fn in ("cos", "sin")
    )

    def turn(x: Value, quarter: Value) -> Value:
        return e.map("add", e.map("mul", x, cos), e.map("mul", quarter, sin))

    return turn(n[1], n[2]), turn(n[3], n[4])


# ---------------------------------------------------------------------------- com.microsoft


def key_mask(e: Emitter, mask: Value | None, b: int, s: int, d: int) -> Value | None:
    """An integer mask, in any of the forms onnxruntime takes, as bool that broadcasts to
    [b, h, s, d]: lengths [b], ends and starts [2b], lengths first [3b + 2], [b, d], [b, s, d], or
    [b, 1, most, most] of which the last s queries' rows count."""
    if mask is None:
        return None
    shape = mask.type.shape
    if len(shape) == 1:
        lengths = part(e, mask, 0, 0, b)
        seen = within(e, lengths, d)
        if shape == (2 * b,):
            start = e(t.Reshape(part(e, mask, 0, b, b), (b, 1, 1, 1)))
            key = line(e, d, mask.type.dtype, axis=3, rank=4, fold=True)
            seen = e.map("and", seen, e.map("ge", key, start))
        elif shape not in ((b,), (3 * b + 2,)):
            raise ModelError(
                "the attention mask has the wrong shape",
                expected=f"[{b}], [{2 * b}] or [{3 * b + 2}]",
                found=str(mask.type),
            )
        return seen
    if len(shape) == 4:
        mask = part(e, part(e, mask, 2, d - s, s), 3, 0, d)
    elif len(shape) == 2:
        mask = e(t.Reshape(mask, (shape[0], 1, 1, shape[1])))
    elif len(shape) == 3:
        mask = e(t.Reshape(mask, (shape[0], 1, *shape[1:])))
    return mask if mask.type.dtype == bool_ else e.map("gt", mask, 0)


def used_length(n: OnnxNode, e: Emitter, length: Value | None, held: int, s: int) -> int:
    """How much is filled of a past buffer that is shared with the present: as `length` says, or it
    is taken to become full."""
    known = None if length is None else e.array_of(length)
    if known is not None:
        return int(known.reshape(-1)[0])
    used = max(held - s, 0)
    e.assume(f"{n.name}: {used} of the {held} past positions in the cache are assumed to be filled")
    return used


def scale_of(n: OnnxNode, width: int) -> float:
    scale = float(n.attr("scale", 0.0) or 0.0)
    return scale or scale_of_heads(width)


def masked(
    n: OnnxNode,
    e: Emitter,
    qkv: Sequence[Value],
    past: Sequence[Value | None],
    *,
    mask: Value | None,
    added: Value | None = None,
    length: Value | None = None,
    shared: bool,
) -> Results:
    """The attention of q, k and v [b, heads, s, d] behind a past, under an integer mask and an
    added one; `length` says how much of a past is filled that shares its buffer."""
    q, k, v = qkv
    b, _, s, width = q.type.shape
    used = 0 if past[0] is None else past[0].type.shape[2]
    if shared and past[0] is not None:
        used = used_length(n, e, length, used, s)
    keys, values = extended(e, past[0], k, used), extended(e, past[1], v, used)
    seen = key_mask(e, mask, b, s, keys.all.type.shape[2])
    seen = both(e, seen, added, float(n.attr("mask_filter_value", -1e4)))
    scale, causal = scale_of(n, width), bool(n.attr("unidirectional", 0))
    op = t.Attention(q, keys.all, values.all, seen, scale=scale, causal=causal, offset=used)
    y, scores = attended(e, op, shown="raw" if n.has_output(3) else "")
    return join_heads(e, y), keys.present, values.present, scores


def from_projection(
    n: OnnxNode, e: Emitter, qkv: Value, past: Value | None, **operands: Value | None
) -> Results:
    """Self-attention from q, k and v side by side [b, s, 3 * hidden]. past and present hold keys
    and values stacked: [2, b, heads, positions, d]."""
    if n.attr("do_rotary", 0):
        raise n.refused(
            "the attribute do_rotary (rotary embedding inside the kernel) is not supported",
            fix="optimise the model without fusing the rotary embedding",
        )
    sizes = n.attr("qkv_hidden_sizes") or (qkv.type.shape[2] // 3,) * 3
    heads = [split_heads(e, x, n.attr("num_heads")) for x in cut(e, qkv, 2, sizes)]
    halves = [None if past is None else pick(e, past, 0, i) for i in (0, 1)]
    shared = bool(n.attr("past_present_share_buffer", 0))
    y, *presents, _ = masked(n, e, heads, halves, shared=shared, **operands)
    if not n.has_output(1):
        return y, None
    stacked = tuple(e(t.Reshape(x, (1, *x.type.shape))) for x in presents if x is not None)
    return y, e(t.Concat(stacked, 0))


def ms_attention(n: OnnxNode, e: Emitter) -> Results:
    """input, weights, bias, mask, past, added bias, past length."""
    qkv = e(t.Matmul(n[0], n[1]))
    if n.get(2) is not None:
        qkv = e.map("add", qkv, n[2])
    return from_projection(n, e, qkv, n.get(4), mask=n.get(3), added=n.get(5), length=n.get(6))


def ms_qattention(n: OnnxNode, e: Emitter) -> Results:
    """input, weights, bias, their scales, mask, their zero points, past."""
    scale = product(e, n[4], n[3])
    qkv = matmul_to_float(e, Codes(n[0], n.get(6)), Codes(n[1], n.get(7)), scale, n[2])
    return from_projection(n, e, qkv, n.get(8), mask=n.get(5))


def biased(e: Emitter, x: Value, bias: Value | None, start: int, shape: tuple[int, ...]) -> Value:
    """x plus the part of the projections' bias that is its own, of this shape."""
    if bias is None:
        return x
    own = part(e, bias, 0, start, int(np.prod(shape)))
    return e.map("add", x, e(t.Reshape(own, shape)))


def side_by_side(
    e: Emitter, x: Value, count: int, bias: Value | None, start: int
) -> tuple[Value, ...]:
    """[b, s, heads, count, d]  →  each of them [b, heads, s, d], biases from `start` on added."""
    shape = (x.type.shape[2], x.type.shape[4])
    width = shape[0] * shape[1]
    parts = [pick(e, x, 3, i) for i in range(count)]
    rows = [biased(e, v, bias, start + i * width, shape) for i, v in enumerate(parts)]
    return tuple(e(t.Transpose(v, (0, 2, 1, 3))) for v in rows)


def projected(n: OnnxNode, e: Emitter, bias: Value | None) -> tuple[Value, ...]:
    """q, k and v as [b, heads, s, d] from any of the forms that MultiHeadAttention takes: three
    tensors, packed together, k and v packed, or k and v that are a cache."""
    q, k, v, heads = n[0], n.get(1), n.get(2), n.attr("num_heads")
    if q.type.rank == 5:
        return side_by_side(e, q, 3, bias, 0)
    if k is None:
        hidden = bias.type.size if bias is not None else q.type.shape[2]
        q = q if bias is None else e.map("add", q, bias)
        return tuple(split_heads(e, x, heads) for x in cut(e, q, 2, (hidden // 3,) * 3))
    hidden = q.type.shape[2]
    query = split_heads(e, biased(e, q, bias, 0, (hidden,)), heads)
    if k.type.rank == 5:
        return query, *side_by_side(e, k, 2, bias, hidden)
    if v is None:
        raise n.refused("the input `key` is given, but `value` is missing")
    if k.type.rank == 4:
        return query, k, v
    width = k.type.shape[2]
    k = split_heads(e, biased(e, k, bias, hidden, (width,)), heads)
    v = split_heads(e, biased(e, v, bias, hidden + width, (v.type.shape[2],)), heads)
    return query, k, v


def ms_multi_head_attention(n: OnnxNode, e: Emitter) -> Results:
    """q, k, v, bias, mask, added bias, past key, past value, past length, beams."""
    past, how = (n.get(6), n.get(7)), {"mask": n.get(4), "added": n.get(5), "length": n.get(8)}
    shared = n.get(8) is not None
    return masked(n, e, projected(n, e, n.get(3)), past, **how, shared=shared)


def ms_decoder_masked(n: OnnxNode, e: Emitter) -> Results:
    """q, k, v, mask, added bias, past key, past value, past length, beam width, beams, bias."""
    past, how = (n.get(5), n.get(6)), {"mask": n.get(3), "added": n.get(4), "length": n.get(7)}
    shared = bool(n.attr("past_present_share_buffer", 0))
    return masked(n, e, projected(n, e, n.get(10)), past, **how, shared=shared)


def ms_group_query_attention(n: OnnxNode, e: Emitter) -> Results:
    """q, k, v, past key and value, seqlens_k, total length, cos, sin, positions, added bias, sink,
    scales of a quantised cache, norm weights of q and k.

    Every sequence is taken at the full length: that of the cache's buffer or, where the total
    length is known at load, that.
    """
    heads, groups = n.attr("num_heads"), n.attr("kv_num_heads")
    q, k, v = n[0], n.get(1), n.get(2)
    if k is None or v is None:
        width = q.type.shape[2] // (heads + 2 * groups)
        q, k, v = cut(e, q, 2, (heads * width, groups * width, groups * width))
    if n.attr("sliding_window_cache", 0):
        raise n.refused(
            "sliding_window_cache = 1 (a cache that drops old tokens) is not supported",
            "sliding_window_cache = 0",
            "1",
        )
    s = q.type.shape[1]
    q, k, v = split_heads(e, q, heads), split_heads(e, k, groups), split_heads(e, v, groups)
    width = q.type.shape[3]
    if n.get(14) is not None and n.get(15) is not None:
        eps = float(n.attr("qk_norm_epsilon", 1e-6))
        q, k = (
            e(t.Normalize(x, axes=(3,), scale=w, bias=None, eps=eps, center=False))
            for x, w in ((q, n[14]), (k, n[15]))
        )
    past = n.get(3)
    used = cached_length(n, e, 0 if past is None else past.type.shape[2], s)
    if n.attr("do_rotary", 0):
        turn = angles(n, e, n[7], n[8]).of(lambda v: cache_rows(n, e, v, used, s))
        q, k = (rotary(e, x, turn) for x in (q, k))
    keys, values = (quantized_cache(n, e, i, x, used) for i, x in enumerate((k, v)))
    local = n.attr("local_window_size", -1)
    op = t.Attention(
        q,
        keys.all,
        values.all,
        n.get(10),
        scale=scale_of(n, width),
        causal=bool(n.attr("causal", 1)),
        offset=used,
        window=local - 1 if local > 0 else None,
        softcap=float(n.attr("softcap", 0.0) or 0.0),
    )
    sink = n.get(11)
    if n.attr("smooth_softmax", -1) == 1 and sink is None:
        sink = e.fill(0, TensorType((heads,), q.type.dtype))
    shown, output = "", n.attr("qk_output", 0)
    if n.has_output(3) and (output or sink is not None):
        shown = "weights" if output == 2 else "masked"
    y, scores = attended(e, op, shown=shown, sink=sink)
    return join_heads(e, y), keys.present, values.present, scores


def cached_length(n: OnnxNode, e: Emitter, held: int, s: int) -> int:
    """How many past positions are filled: the total length less the new ones, where it is known."""
    total = n.known(6)
    lengths = n.known(5)
    if total is None and lengths is not None and len(set(np.ravel(lengths).tolist())) == 1:
        total = np.ravel(lengths)[:1] + 1
    if total is None:
        e.assume(f"{n.name}: every sequence is assumed to have {held} past and {s} new positions")
        return held
    used = int(np.ravel(total)[0]) - s
    if not 0 <= used <= held:
        raise n.refused(
            "the total sequence length does not fit the cache",
            f"between {s} and {held + s}",
            used + s,
        )
    if lengths is None or (np.ravel(lengths) != used + s - 1).any():
        e.assume(f"{n.name}: every sequence is assumed to have {used} past and {s} new positions")
    return used


def cache_rows(n: OnnxNode, e: Emitter, table: Value, used: int, s: int) -> Value:
    """Rows of a rotary table [b, s, ..] at the new positions, or at those that the model gives."""
    if (ids := n.get(9)) is not None:
        return e(t.Gather(table, ids, 0))
    if used + s > table.type.shape[0]:
        raise n.refused(
            "the rotary tables are shorter than the sequence", f"{used + s} rows", table.type
        )
    rows = part(e, table, 0, used, s)
    return e(t.Reshape(rows, (1, *rows.type.shape)))


def quantized_cache(n: OnnxNode, e: Emitter, i: int, new: Value, used: int) -> KeyValueCache:
    """`extended` of the keys (i = 0) or the values (1), held in 8 bits where the cache has a scale:
    one for all, or for each channel of each head."""
    past, scale = n.get(3 + i), n.get(12 + i)
    if past is None or scale is None or n.attr(f"{'kv'[i]}_quant_type", "NONE") == "NONE":
        return extended(e, past, new, used)
    if n.attr("kv_cache_bit_width", 8) != 8:
        raise n.refused("a cache of 4 bits is not supported", "8 bits")
    if scale.type.size > 1:
        scale = e(t.Reshape(scale, (1, new.type.shape[1], 1, new.type.shape[3])))
    divided = e.map("div", new, cast(e, scale, new.type.dtype))
    one = e.constant(1, new.type.dtype)
    narrow = extended(e, past, quantize(e, divided, one, None, past.type.dtype), used)
    wide = e.map("mul", e(t.Cast(narrow.all, new.type.dtype)), cast(e, scale, new.type.dtype))
    return KeyValueCache(wide, narrow.present)


# ---------------------------------------------------------------------------- states


def linear_attention(n: OnnxNode, e: Emitter) -> Results:
    """query, key, value, past state, decay, beta, as one routine: implementations fuse it.

    Work: for each token and head, two a state cell for the update, two more to take off what the
    state knew (delta rules), one to decay (gated rules), and two a query head to read.
    """
    q, k, v, state, decay, beta = n[0], n[1], n[2], n.get(3), n.get(4), n.get(5)
    heads, groups = n.attr("q_num_heads"), n.attr("kv_num_heads")
    rule = n.choice("update_rule", "gated_delta", ("linear", "gated", "delta", "gated_delta"))
    if n.attr("state_window", 0):
        raise n.refused("state_window is not supported", "0")
    gated, delta = "gated" in rule, "delta" in rule
    if gated != (decay is not None) or delta != (beta is not None):
        if (gated and decay is None) or (delta and beta is None):
            raise n.refused(f"update_rule {rule} needs an input that is missing", "decay, beta")
        decay, beta = decay if gated else None, beta if delta else None
    b, steps, width = q.type.shape
    dk, dv = width // heads, v.type.shape[2] // groups
    scale = float(n.attr("scale", 0.0)) or scale_of_heads(dk)
    readers = max(heads, groups)
    shape = (b, groups, dk, dv)
    dtype = state.type.dtype if state is not None else q.type.dtype
    gives = (TensorType((b, steps, readers * dv), q.type.dtype), TensorType(shape, dtype))
    given = {"state": state, "decay": decay, "beta": beta}
    args = (q, k, v, *(x for x in given.values() if x is not None))
    attrs = (
        *(("heads", heads), ("groups", groups), ("scale", scale), ("rule", str(rule))),
        *((f"has_{name}", x is not None) for name, x in given.items()),
    )
    work = b * steps * dk * dv * (groups * (2 + gated + 2 * delta) + 2 * readers)
    y, present = e.add(
        t.Routine(fn="linear_attention", args=args, gives=gives, attrs=attrs, work=work)
    )
    return y, present


def causal_conv(n: OnnxNode, e: Emitter) -> Results:
    """input, weight, bias, state: a depthwise convolution of x [b, c, l] with the state before."""
    x, w, bias, state = n[0], n[1], n.get(2), n.get(3)
    if n.attr("ndim", 1) != 1 or n.attr("channels_last", 0) or n.attr("state_window", 0):
        raise n.refused(
            "these attributes are not supported", "ndim = 1, channels_last = 0, state_window = 0"
        )
    channels = x.type.shape[1]
    gap = n.count("dilation", 1)
    reach = (w.type.shape[2] - 1) * gap
    if state is None:
        whole = e(t.Pad(x, (0, 0, reach), (0, 0, 0)))
        low = (reach,)
        y = e(t.Conv(x, w, strides=(1,), low=low, high=(0,), dilations=(gap,), groups=channels))
    else:
        whole = joined(e, (state, x), 2)
        y = e(
            t.Conv(whole, w, strides=(1,), low=(0,), high=(0,), dilations=(gap,), groups=channels)
        )
    if bias is not None:
        y = e.map("add", y, e(t.Reshape(bias, (channels, 1))))
    if n.attr("activation", "none") in ("silu", "swish"):
        y = e.map("silu", y)
    if not n.has_output(1):
        return y, None
    present = part(e, whole, 2, whole.type.shape[2] - reach, reach)
    return y, present


def tensor_scatter(n: OnnxNode, e: Emitter) -> Value:
    """cache, update, and where in each sequence it goes; it wraps round where the mode says so."""
    axis = n.axis(n[0].type.rank, -2)
    circular = n.attr("mode", "linear") == "circular"
    return written(e, n[0], n[1], n.get(2), axis, circular=circular)


CONVERTERS: dict[str, Converter] = {
    "Attention": attention,
    "RotaryEmbedding": rotary_embedding,
    "LinearAttention": linear_attention,
    "CausalConvWithState": causal_conv,
    "TensorScatter": tensor_scatter,
    "ai.onnx.preview::FlexAttention": flex_attention,
    "com.microsoft::LinearAttention": linear_attention,
    "com.microsoft::CausalConvWithState": causal_conv,
    "com.microsoft::Attention": ms_attention,
    "com.microsoft::DecoderMaskedSelfAttention": ms_attention,  # one token of it
    "com.microsoft::QAttention": ms_qattention,
    "com.microsoft::MultiHeadAttention": ms_multi_head_attention,
    "com.microsoft::DecoderMaskedMultiHeadAttention": ms_decoder_masked,
    "com.microsoft::GroupQueryAttention": ms_group_query_attention,
    "com.microsoft::RotaryEmbedding": ms_rotary_embedding,
    "com.microsoft::MRotaryEmbedding": ms_multimodal_rotary,
    "com.microsoft::GemmaRotaryEmbedding": ms_gemma_rotary,
}
