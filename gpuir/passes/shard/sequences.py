"""Attention over sequences of which each rank has a part: queries meet the keys of all ranks.

Either each rank has all of a sequence for its share of the heads, and all_to_all leads there and
back (Jacobs et al.: DeepSpeed-Ulysses, 2023, section 3); or keys and values are gathered, and each
rank has the queries of its part (Llama team: The Llama 3 Herd of Models, 2024, section 3.3.2); or
they go round a ring of the ranks, block by block (Liu et al.: Ring Attention, 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpuir.ir.build import Builder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.types import TensorType, bool_, f32, i64
from gpuir.ops import tensor as t
from gpuir.ops.tensor import CollectiveKind
from gpuir.passes.shard.axes import blocks_of
from gpuir.passes.shard.place import WHOLE, Group, Kept, Placed, part
from gpuir.passes.shard.rows import closed, opened
from gpuir.passes.shard.ways import Inside, ShardWay

Exchange = Literal["", "heads", "keys", "ring"]
Kind = Literal["heads", "keys", "ring"]
Attends = t.Attention | t.AttentionGradient
LEAST = -1e30  # a logarithm of sums that stands for none


@dataclass(frozen=True)
class Meeting(Inside):
    """How queries meet keys: as `exchange` says, and where it says nothing, by fewest bytes. Of a
    sequence a rank has its part of each of so many `parts` that lie side by side."""

    exchange: Exchange = ""
    parts: int = 1

    def ways(self, op: Op, ranks: int) -> Iterator[ShardWay]:
        """By heads, where queries and keys have as many as can be shared out, and by keys; round a
        ring where that is asked for, and no gradient of a mask is."""
        if not isinstance(op, Attends):
            return
        if any(v.type.shape[-2] % (self.parts * ranks) for v in (op.q, op.k)):
            return
        heads, groups = op.q.type.shape[-3], op.k.type.shape[-3]
        if self.exchange in ("", "heads") and heads % ranks == groups % ranks == 0:
            yield self.way(op, ranks, "heads")
        if self.exchange == "ring" and can_go_round(op):
            yield self.way(op, ranks, "ring")
        elif self.exchange != "heads":
            yield self.way(op, ranks, "keys")

    def way(self, op: Attends, ranks: int, kind: Kind) -> ShardWay:
        rank = op.q.type.rank

        def rows(v: Value, axis: int) -> Placed:
            return part(
                axis, (v.type.shape[axis] // self.parts,) * (self.parts if self.parts > 1 else 0)
            )

        stats = part(rank - 3) if kind == "heads" else rows(op.q, rank - 2)

        def place(v: Value) -> Placed:
            if isinstance(op, t.AttentionGradient) and v == op.stats:
                return stats
            if v == op.mask:
                long = v.type.rank > 1 and v.type.shape[-2] > 1
                return rows(v, v.type.rank - 2) if kind != "heads" and long else WHOLE
            return rows(v, rank - 2)

        gives = (place(op.q), stats)
        if isinstance(op, t.AttentionGradient):
            of_mask = part(rank - 3) if kind == "heads" else place(op.q)
            gives = (place(op.q), place(op.k), place(op.v), of_mask)
        takes = tuple(map(place, op.operands))
        return ShardWay(takes, gives[: len(op.result_types)], kind, _sent(op, ranks, kind))

    def made(self, way: str, op: Op, b: Builder, group: Group, kept: Kept) -> list[Value]:
        assert isinstance(op, Attends)
        rows = Rows(b, group, op.q.type.rank - 2, self.parts, kept)
        match way:
            case "heads":
                return by_heads(op, rows)
            case "ring":
                return round_a_ring(op, rows)
            case _:
                return by_keys(op, rows)


def _sent(op: Attends, ranks: int, kind: Kind) -> float:
    """Bytes of a rank, of a gradient those that the forward pass has not left."""
    keys, queries = op.k.type.nbytes + op.v.type.nbytes, op.q.type.nbytes
    share = (ranks - 1) / ranks
    if kind == "heads":
        return 2 * (queries + (keys if isinstance(op, t.Attention) else 0)) * share / ranks
    once = keys * share
    if isinstance(op, t.Attention):
        return once
    return 2 * once if kind == "keys" else once + keys  # gradients go all the way round


def check_heads(g: Graph, ranks: int) -> None:
    """UsageError where queries or keys have not as many heads as ranks can share out."""
    for op in (n.op for n in g.nodes if isinstance(n.op, t.Attention)):
        heads, groups = op.q.type.shape[-3], op.k.type.shape[-3]
        if heads % ranks or groups % ranks:
            near = [n for n in range(1, groups + 1) if groups % n == heads % n == 0]
            raise UsageError(
                f"shard: {heads} heads of queries and {groups} of keys cannot be "
                f"split evenly over {ranks} ranks",
                expected=f"a number of ranks that divides both: {', '.join(map(str, near))}",
                fix="use attention=keys, or --exchange keys",
            )


def check_blocks(g: Graph) -> None:
    """UsageError where no attention is one op, whose keys may come block by block."""
    if not any(isinstance(n.op, t.Attention) for n in g.nodes):
        raise UsageError(
            "shard: the graph has no attention op, so keys cannot be passed around a ring",
            expected="attention as one op",
            fix="for a config use --attention sdpa; otherwise first run `gpuir "
            "opt MODEL --pipeline canonicalize,recognize -o model.gir`",
        )


def inputs(g: Graph) -> list[Value]:
    """Inputs of sequences: [batch, tokens], or with more behind, of several tokens."""
    made = (v for v in g.inputs if g.role_of(v) == "input" and v.type.rank in (2, 3))
    return [v for v in made if v.type.shape[1] > 1]


# ---------------------------------------------------------------------------- what a rank runs


@dataclass(frozen=True)
class Rows:
    """What a rank has of sequences, along an axis, and how it comes to have more."""

    b: Builder
    group: Group
    axis: int
    parts: int
    kept: Kept

    def heads(self, v: Value) -> Value:
        """A rank's heads of whole sequences."""
        if (v, "heads") not in self.kept:
            self.kept[v, "heads"] = self.moved("all_to_all", v, self.axis - 1)
        return self.kept[v, "heads"]

    def back(self, v: Value) -> Value:
        """All heads of a rank's rows; `heads` of them is where they came from."""
        found = self.moved("all_to_all", v, None, self.axis - 1)
        self.kept[found, "heads"] = v
        return found

    def keys(self, v: Value) -> Value:
        """All rows."""
        if (v, "keys") not in self.kept:
            self.kept[v, "keys"] = self.moved("all_gather", v)
        return self.kept[v, "keys"]

    def shifted(self, v: Value) -> Value:
        """That of the rank before."""
        return self.b(t.Collective("shift", v, *self.group))

    def places(self, extent: int, i: int) -> Value:
        """Where in a sequence the rows are, so many, of the rank i before."""
        every = self.b(t.Iota(TensorType((extent * self.group[1][0],), i64)))
        return self.block(every, 0, extent, i)

    def block(self, v: Value, axis: int, extent: int, i: int) -> Value:
        """Of what is whole along an axis, the part that the rank i before has."""
        if v.type.shape[axis] == 1:
            return v
        b, parts = self.b, self.parts
        x = b(opened(v, axis, parts))
        length = x.type.shape[axis + 1]
        start = length - i * (extent // parts)
        if i:
            whole = x.type.shape
            ends = [(start, length - start), (0, start)]
            pieces = [
                b(
                    t.Slice(
                        x,
                        tuple(a if j == axis + 1 else 0 for j in range(len(whole))),
                        tuple(n if j == axis + 1 else m for j, m in enumerate(whole)),
                        (1,) * len(whole),
                    )
                )
                for a, n in ends
            ]
            x = b(t.Concat(tuple(pieces), axis + 1))
        return b(closed(b(t.Shard(x, axis + 1, *self.group)), axis))

    def moved(
        self, fn: CollectiveKind, v: Value, axis: int | None = None, to: int | None = None
    ) -> Value:
        """What a collective makes of the rows, or of another axis as well."""
        apart = self.parts > 1
        x = self.b(opened(v, self.axis, self.parts)) if apart else v
        rows = self.axis + apart
        along = rows if axis is None else axis
        other = (rows if to is None else to) if fn == "all_to_all" else 0
        y = self.b(t.Collective(fn, x, *self.group, axis=along, to=other))
        return self.b(closed(y, self.axis)) if apart else y


def by_heads(op: Attends, rows: Rows) -> list[Value]:
    """Attention of a rank's heads over whole sequences. What came to a rank for the forward pass is
    there in the backward pass."""
    b, mask = rows.b, op.mask
    if mask is not None and mask.type.rank > 2 and mask.type.shape[-3] > 1:
        mask = b(t.Shard(mask, mask.type.rank - 3, *rows.group))
    ends = {"q": rows.heads(op.q), "k": rows.heads(op.k), "v": rows.heads(op.v), "mask": mask}
    op = replace(op, **blocks_of(op, rows.group[1][0]))
    if isinstance(op, t.Attention):
        y, *stats = b.add(replace(op, **ends))
        return [rows.back(y), *stats]
    made = b.add(replace(op, **ends, y=rows.heads(op.y), dy=rows.heads(op.dy)))
    return [*map(rows.back, made[:3]), *made[3:]]


def by_keys(op: Attends, rows: Rows) -> list[Value]:
    """Attention of a rank's queries to all keys. A mask says which of them its queries see: as many
    as all ranks' on average, which is assumed."""
    ends: dict[str, Any] = {"k": rows.keys(op.k), "v": rows.keys(op.v)}
    if op.causal or op.window is not None:
        ends |= {"mask": _seen(op, rows), "causal": False, "offset": 0, "window": None}
        ends["hidden"] = _hidden(op, rows.group[1][0])
    ends |= _blocks_of_rows(op, rows.group[1][0])
    made = rows.b.add(replace(op, **ends))
    if isinstance(op, t.Attention):
        return list(made)
    dq, dk, dv, *of_mask = made
    return [dq, rows.moved("reduce_scatter", dk), rows.moved("reduce_scatter", dv), *of_mask]


def can_go_round(op: Attends) -> bool:
    """Whether keys may come to an attention block by block."""
    return (
        op.hidden == 0 and not op.block and not (isinstance(op, t.AttentionGradient) and op.of_mask)
    )


def round_a_ring(op: Attends, rows: Rows) -> list[Value]:
    """Attention of a rank's queries to the keys of one rank after another, while those of the next
    are on their way: block i is that of the rank i before. What blocks give is put together by
    their sums of exponentials (Liu et al., 2023, algorithm 1; Dao et al.: FlashAttention, 2022).

    Gradients of keys and values go round with them, each rank adding its own, and then one further,
    which is home. They are added up in their own dtype, as in TransformerEngine.
    """
    b, ranks = rows.b, rows.group[1][0]
    k, v = op.k, op.v
    found: list[Value] = []
    for i in range(ranks):
        then = [rows.shifted(x) for x in (k, v)] if i + 1 < ranks else []
        block = replace(op, k=k, v=v, **_block(op, rows, i))
        if isinstance(block, t.Attention):
            y, s = b.add(replace(block, stats=True))
            found = merged(b, found, y, s) if found else [wide(b, y), s]
        else:
            dq, *dkv = b.add(block)
            if found:
                dq = b(t.Map("add", (found[0], dq)))
                dkv = [b(t.Map("add", x)) for x in zip(found[1:], dkv, strict=True)]
            found = [dq, *map(rows.shifted, dkv)]
        k, v = then or (k, v)
    if isinstance(op, t.AttentionGradient):
        return found
    y, s = found
    y = y if y.type.dtype == op.q.type.dtype else b(t.Cast(y, op.q.type.dtype))
    return [y, s] if op.stats else [y]


def wide(b: Builder, y: Value) -> Value:
    """In which sums are put together."""
    return y if y.type.dtype.bits >= 32 else b(t.Cast(y, f32))


def merged(b: Builder, found: Sequence[Value], y: Value, s: Value) -> list[Value]:
    """The attention to two blocks of keys, from that to each with its logarithm of sums: weighted
    by the sums, over the larger of both so that none overflows. Of a query that sees no key of
    either the sum is zero, and so is the result."""
    before, above = found
    most = b(t.Map("max", (b(t.Map("max", (above, s))),), (LEAST,)))
    shares = [b(t.Map("exp", (b(t.Map("sub", (x, most))),))) for x in (above, s)]
    total = b(t.Map("add", (shares[0], shares[1])))
    one = b(t.Map("max", (total,), (1.0,)))
    terms: list[Value] = []
    for x, share in zip((before, wide(b, y)), shares, strict=True):
        weight = b(t.Map("div", (share, one)))
        if weight.type.dtype != x.type.dtype:
            weight = b(t.Cast(weight, x.type.dtype))
        rows = b(t.Reshape(weight, (*weight.type.shape, 1)))
        terms.append(b(t.Map("mul", (x, rows))))
    both = b(t.Map("add", (terms[0], terms[1])))
    return [both, b(t.Map("add", (b(t.Map("log", (total,))), most)))]


def _block(op: Attends, rows: Rows, i: int) -> dict[str, Any]:
    """What an attention's queries see of the keys of the rank i before.

    Of its own rows a rank's queries see those behind them. Costs take it that of another's they see
    half, as they do where each rank has one chunk from each end of a sequence (Brandon et al.:
    Striped Attention, 2023, and Megatron-LM's and TransformerEngine's order); here rows are in
    order, so that they see all or none.
    """
    s, d, ranks = op.q.type.shape[-2], op.k.type.shape[-2], rows.group[1][0]
    mask = None if op.mask is None else rows.block(op.mask, op.mask.type.rank - 1, d, i)
    found: dict[str, Any] = {"mask": mask}
    if not op.causal and op.window is None:
        return found
    square = s == d and op.offset == 0 and op.window is None
    if square and i == 0:
        return found
    b = rows.b
    if square and rows.parts == 1:  # keys of a rank before are seen by all queries, or else by none
        number = b(t.Shard(b(t.Iota(TensorType((ranks,), i64))), 0, *rows.group))
        seen = b(t.Reshape(b(t.Map("ge", (number,), (i,))), (1, 1)))
    else:
        seen = _visible(op, b, rows.places(s, 0), rows.places(d, i))
    left = s * d // 2 if square else _left(op, ranks) // ranks
    off: dict[str, Any] = {"causal": False, "offset": 0, "window": None}
    return found | off | {"mask": _with_mask(b, seen, mask), "hidden": s * d - left}


def is_balanced(op: Op) -> bool:
    """Whether an op takes it that each rank's queries see as many keys: so they do where a rank has
    one chunk from each end of a sequence (Llama team, 2024, section 3.3.2)."""
    return isinstance(op, Attends) and (op.hidden > 0 or bool(op.block))


def _blocks_of_rows(op: Attends, ranks: int) -> dict[str, Any]:
    """The blocks of a mask that a rank's queries visit, if each rank's visit as many. A rank that
    has fewer queries than a block has its share of them."""
    if not op.block:
        return {}
    every, longest, columns = op.visited
    queries, keys = min(op.block[0], op.q.type.shape[-2]), op.block[1]
    every = -(-every * op.block[0] // (queries * ranks))
    return {"hidden": 0, "block": (queries, keys), "visited": (every, longest, columns)}


def _hidden(op: Attends, ranks: int) -> int:
    """Scores of a head that a rank's queries do not see, if each rank's see as many."""
    return op.q.type.shape[-2] * op.k.type.shape[-2] * ranks - _left(op, ranks)


def _left(op: Attends, ranks: int) -> int:
    """Scores of a head that a rank's queries see of all keys, if each rank's see as many."""

    def long(v: Value) -> Value:
        *lead, rows, cells = v.type.shape
        return Value(v.name, v.type.with_shape((*lead, rows * ranks, cells)))

    one = op if isinstance(op, t.Attention) else op.direct()
    whole = replace(one, q=long(op.q), k=long(op.k), v=long(op.v), mask=None, hidden=0)
    return whole.seen // ranks


def _seen(op: Attends, rows: Rows) -> Value:
    """Which keys of all a rank's queries see, [s, d] or as the mask that there is."""
    b, d = rows.b, op.k.type.shape[-2] * rows.group[1][0]
    queries = rows.places(op.q.type.shape[-2], 0)
    both = _visible(op, b, queries, b(t.Iota(TensorType((d,), i64))))
    return _with_mask(b, both, op.mask)


def _visible(op: Attends, b: Builder, queries: Value, keys: Value) -> Value:
    """Which keys queries at these places of a sequence see, as `causal` and `window` say."""
    last = b(t.Map("add", (b(t.Reshape(queries, (queries.type.size, 1))),), (op.offset,)))
    keys = b(t.Reshape(keys, (1, keys.type.size)))
    seen: list[Value] = []
    if op.causal:
        seen.append(b(t.Map("le", (keys, last))))
    if op.window is not None:
        first = b(t.Map("sub", (last,), (op.window,)))
        seen.append(b(t.Map("ge", (keys, first))))
    return seen[0] if len(seen) == 1 else b(t.Map("and", (seen[0], seen[1])))


def _with_mask(b: Builder, seen: Value, mask: Value | None) -> Value:
    if mask is None:
        return seen
    if mask.type.dtype == bool_:
        return b(t.Map("and", (seen, mask)))
    return b(t.Map("where", (seen, mask), (float("-inf"),)))
