"""Attention over sequences of which each rank has a part: queries meet the keys of all ranks.

Either each rank has all of a sequence for its share of the heads, and all_to_all leads there and
back (Jacobs et al.: DeepSpeed-Ulysses, 2023, section 3); or keys and values are gathered, and each
rank has the queries of its part (Llama team: The Llama 3 Herd of Models, 2024, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpuir.ir.build import Builder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.types import TensorType, bool_, i64
from gpuir.ops import tensor as t
from gpuir.ops.tensor import CollectiveKind
from gpuir.passes.shard.place import WHOLE, Group, Kept, Place, part
from gpuir.passes.shard.rows import closed, opened
from gpuir.passes.shard.ways import Inside, Way

Exchange = Literal["", "heads", "keys"]
Attends = t.Attention | t.AttentionGradient


@dataclass(frozen=True)
class Meeting(Inside):
    """How queries meet keys: as `exchange` says, and where it says nothing, by fewest bytes. Of a
    sequence a rank has its part of each of so many `parts` that lie side by side."""

    exchange: Exchange = ""
    parts: int = 1

    def ways(self, op: Op, ranks: int) -> Iterator[Way]:
        """By heads, where queries and keys have as many as can be shared out, and by keys."""
        if not isinstance(op, Attends):
            return
        if any(v.type.shape[-2] % (self.parts * ranks) for v in (op.q, op.k)):
            return
        heads, groups = op.q.type.shape[-3], op.k.type.shape[-3]
        if self.exchange != "keys" and heads % ranks == groups % ranks == 0:
            yield self.way(op, ranks, "heads")
        if self.exchange != "heads":
            yield self.way(op, ranks, "keys")

    def way(self, op: Attends, ranks: int, kind: Literal["heads", "keys"]) -> Way:
        rank = op.q.type.rank

        def rows(v: Value, axis: int) -> Place:
            return part(
                axis, (v.type.shape[axis] // self.parts,) * (self.parts if self.parts > 1 else 0)
            )

        stats = part(rank - 3) if kind == "heads" else rows(op.q, rank - 2)

        def place(v: Value) -> Place:
            if isinstance(op, t.AttentionGradient) and v == op.stats:
                return stats
            if v == op.mask:
                long = v.type.rank > 1 and v.type.shape[-2] > 1
                return rows(v, v.type.rank - 2) if kind == "keys" and long else WHOLE
            return rows(v, rank - 2)

        gives = (place(op.q), stats)
        if isinstance(op, t.AttentionGradient):
            of_mask = part(rank - 3) if kind == "heads" else place(op.q)
            gives = (place(op.q), place(op.k), place(op.v), of_mask)
        takes = tuple(map(place, op.operands))
        return Way(takes, gives[: len(op.result_types)], kind, _sent(op, ranks, kind))

    def made(self, way: str, op: Op, b: Builder, group: Group, kept: Kept) -> list[Value]:
        assert isinstance(op, Attends)
        rows = Rows(b, group, op.q.type.rank - 2, self.parts, kept)
        return by_heads(op, rows) if way == "heads" else by_keys(op, rows)


def _sent(op: Attends, ranks: int, kind: Literal["heads", "keys"]) -> float:
    """Bytes of a rank, of a gradient those that the forward pass has not left."""
    keys, queries = op.k.type.nbytes + op.v.type.nbytes, op.q.type.nbytes
    share = (ranks - 1) / ranks
    if kind == "heads":
        return 2 * (queries + (keys if isinstance(op, t.Attention) else 0)) * share / ranks
    return (1 if isinstance(op, t.Attention) else 2) * keys * share


def check_heads(g: Graph, ranks: int) -> None:
    """UsageError where queries or keys have not as many heads as ranks can share out."""
    for op in (n.op for n in g.nodes if isinstance(n.op, t.Attention)):
        heads, groups = op.q.type.shape[-3], op.k.type.shape[-3]
        if heads % ranks or groups % ranks:
            near = [n for n in range(1, groups + 1) if groups % n == heads % n == 0]
            raise UsageError(
                f"shard: {heads} heads, {groups} of keys, cannot be shared out over {ranks} ranks",
                expected=f"a number of ranks that divides both: {', '.join(map(str, near))}",
                fix="take attention=keys",
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
    made = rows.b.add(replace(op, **ends))
    if isinstance(op, t.Attention):
        return list(made)
    dq, dk, dv, *of_mask = made
    return [dq, rows.moved("reduce_scatter", dk), rows.moved("reduce_scatter", dv), *of_mask]


def is_balanced(op: Op) -> bool:
    """Whether an op takes it that each rank's queries see as many keys: so they do where a rank has
    one chunk from each end of a sequence (Llama team, 2024, section 3.3.2)."""
    return isinstance(op, Attends) and op.hidden > 0


def _hidden(op: Attends, ranks: int) -> int:
    """Scores of a head that a rank's queries do not see, if each rank's see as many."""

    def long(v: Value) -> Value:
        *lead, rows, cells = v.type.shape
        return Value(v.name, v.type.with_shape((*lead, rows * ranks, cells)))

    one = op if isinstance(op, t.Attention) else op.direct()
    whole = replace(one, q=long(op.q), k=long(op.k), v=long(op.v), mask=None, hidden=0)
    return op.q.type.shape[-2] * whole.k.type.shape[-2] - whole.seen // ranks


def _seen(op: Attends, rows: Rows) -> Value:
    """Which keys of all a rank's queries see, [s, d] or as the mask that there is."""
    b, ranks, s = rows.b, rows.group[1][0], op.q.type.shape[-2]
    d = op.k.type.shape[-2] * ranks
    every = b(opened(b(t.Iota(TensorType((s * ranks,), i64))), 0, rows.parts))
    queries = b(t.Shard(every, 1, *rows.group))
    last = b(t.Map("add", (b(t.Reshape(queries, (s, 1))),), (op.offset,)))
    keys = b(t.Reshape(b(t.Iota(TensorType((d,), i64))), (1, d)))
    seen: list[Value] = []
    if op.causal:
        seen.append(b(t.Map("le", (keys, last))))
    if op.window is not None:
        first = b(t.Map("sub", (last,), (op.window,)))
        seen.append(b(t.Map("ge", (keys, first))))
    both = seen[0] if len(seen) == 1 else b(t.Map("and", (seen[0], seen[1])))
    if op.mask is None:
        return both
    if op.mask.type.dtype == bool_:
        return b(t.Map("and", (both, op.mask)))
    return b(t.Map("where", (both, op.mask), (float("-inf"),)))
