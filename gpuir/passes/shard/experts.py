"""Experts over ranks: each rank has some of them whole, and tokens travel to theirs and back; or
each has a part of all of them, between their products.

Tokens travel by all_to_all, a row for each of a token's experts (Lepikhin et al.: GShard, 2020,
section 3.1), or all ranks gather all tokens, and each scatters the sum of what its experts give
(Megatron-LM's `allgather` dispatcher). Which tokens go where depends on data, and shapes do not: a
rank has room for all of them, and `routed` says how many bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from gpuir.cost.routing import shares
from gpuir.ir.build import Builder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from gpuir.passes.shard.axes import axes_of
from gpuir.passes.shard.place import Group, Kept, Placed, part
from gpuir.passes.shard.plan import weights_of
from gpuir.passes.shard.rows import first_of
from gpuir.passes.shard.ways import Inside, ShardWay

Dispatch = Literal["", "all_to_all", "all_gather"]
Mix = t.Experts | t.ExpertsGradient
ROWS = part(0)


@dataclass(frozen=True)
class Travel(Inside):
    """How tokens travel: as `dispatch` says (where it says nothing, by fewest bytes), with so many
    times the mean of rows on the busiest rank (`imbalance`), where the router has no skew."""

    dispatch: Dispatch = ""
    imbalance: float = 1.0

    def ways(self, op: Op, ranks: int) -> Iterator[ShardWay]:
        """Tokens in parts and experts in parts."""
        if not isinstance(op, Mix) or op.up.type.shape[0] % ranks or op.x.type.shape[0] % ranks:
            return
        experts = op.up.type.shape[0] * op.ranks
        routed = self.routed(op, op.x.type.shape[0], experts, ranks * op.ranks) / ranks
        bytes_of = {"all_to_all": routed, "all_gather": op.x.type.nbytes}
        for dispatch, moved in bytes_of.items():
            if self.dispatch in ("", dispatch):
                sent = 2 * moved * (ranks - 1) / ranks  # there and back; dy and dx of a gradient
                takes, gives = (ROWS,) * len(op.operands), (ROWS,) * len(op.result_types)
                yield ShardWay(takes, gives, dispatch, sent)

    def routed(self, op: Mix, tokens: int, experts: int, ranks: int) -> int:
        """Bytes of rows that travel, one for each expert of a token: as many as if all of so many
        tokens had the busiest rank's."""
        cells, topk = op.x.type.shape[1], op.which.type.shape[1]
        busiest = self.busiest(tokens, topk, experts, ranks, op.skew)
        return ceil(tokens * topk * busiest) * cells * op.x.type.dtype.bits // 8

    def busiest(self, tokens: int, topk: int, experts: int, ranks: int, skew: float) -> float:
        """Rows of the busiest rank over the mean: as stated, or as the router's skew has it."""
        if skew == 0 or tokens * topk == 0:
            return min(self.imbalance, ranks)
        rows = float(shares(tokens, topk, experts, ranks, skew).rows)
        return min(max(rows * ranks / (tokens * topk), 1.0), ranks)

    def made(self, way: str, op: Op, b: Builder, group: Group, kept: Kept) -> list[Value]:
        """A rank's experts on the tokens of all ranks, of which other ranks' experts make nothing
        here."""
        assert isinstance(op, Mix)
        ranks, tokens = group[1][0], op.x.type.shape[0]
        count, every = op.up.type.shape[0], ranks * op.ranks
        imbalance = 1.0 if op.skew else min(self.imbalance, every)
        routed = None
        if way == "all_to_all":
            routed = self.routed(op, tokens, count * every, every)

        def there(v: Value, routed: int | None = None) -> Value:
            if (v, way) not in kept:
                kept[v, way] = b(t.Collective("all_gather", v, *group, routed=routed))
            return kept[v, way]

        def back(v: Value, routed: int | None = None) -> Value:
            return b(t.Collective("reduce_scatter", v, *group, routed=routed))

        if (op.which, "own") not in kept:
            which = there(op.which)
            kept[op.which, "own"] = b(t.Map("sub", (which, first_of(b, which, count, group))))
        ends = {
            "x": there(op.x, routed),
            "which": kept[op.which, "own"],
            "shares": there(op.shares),
        }
        settings = {
            "ranks": every,
            "imbalance": imbalance,
            "routed": way == "all_to_all",
            "each": (),
        }
        if isinstance(op, t.Experts):
            return [back(b(replace(op, **ends, **settings)), routed)]
        dy = there(op.dy, routed)
        dx, dshares, *weights = b.add(replace(op, **ends, **settings, dy=dy))
        return [back(dx, routed), back(dshares), *weights]


def between_products(op: Op, b: Builder, group: Group) -> Op:
    """Experts of which each rank has a part of all: of what is added behind the second product each
    adds its share."""
    assert isinstance(op, Mix)
    if op.down_bias is None:
        return op
    return replace(op, down_bias=b(t.Map("mul", (op.down_bias,), (1 / group[1][0],))))


# ---------------------------------------------------------------------------- which weights


def homes(g: Graph, ranks: int) -> dict[Value, Placed]:
    """The params that a graph's experts are, or are made from, one expert after another along an
    axis. UsageError where they do not divide."""
    producers, params = g.producers(), frozenset(g.params)
    found: dict[Value, Placed] = {}
    counts: set[int] = set()

    def keep(v: Value, place: Placed) -> None:
        if v in params:
            found[v] = place
            return
        node = producers.get(v)
        axes = axes_of(node.op, lambda _: False) if node is not None else None
        if node is None or axes is None:
            return
        name = axes.results[node.results.index(v)][place.axis]
        for x, names in zip(node.op.operands, axes.operands, strict=True):
            if name and name in names:
                keep(x, part(names.index(name)))

    for v in (v for node in g.nodes if phase_of(node) is None for v in _of_experts(node.op)):
        count = v.type.shape[0]
        before = len(found)
        keep(v, part(0))
        if len(found) > before:
            counts.add(count)
    if not counts:
        raise UsageError(
            "shard: the graph has no experts",
            expected="a mixture of experts, or products by weights [experts, rows, columns]",
            fix="remove --ep; in the pass, use by=tensor or by=data",
        )
    odd = sorted(n for n in counts if n % ranks)
    if odd:
        near = [n for n in range(1, max(odd) + 1) if all(count % n == 0 for count in counts)]
        raise UsageError(
            f"shard: {odd[0]} experts cannot be split evenly over {ranks} ranks",
            expected=f"a number of ranks that divides the experts: {', '.join(map(str, near))}",
        )
    return found


def _of_experts(op: Op) -> tuple[Value, ...]:
    """What of an op's operands has a row an expert along its first axis."""
    match op:
        case t.Experts():
            return weights_of(op)
        case t.Matmul(a, b) if b.type.rank == 3 and b.type.shape[0] > 1:
            return (b,) if a.type.rank == 3 else ()
        case _:
            return ()
