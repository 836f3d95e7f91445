"""How long a GPU takes to look tables of embeddings up, and to update the rows that were."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from gpuir.cost.lookup import classes_of
from gpuir.cost.reading import work_of
from gpuir.cost.tile import choose, estimate
from gpuir.ir.build import Builder
from gpuir.ir.graph import Level, Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.spread import Spread
from gpuir.plan.tables import EmbeddingTable
from gpuir.targets.target import Target

# Cells of an optimizer's state for each of a table's, and for each row.
STATES = {"sgd": (0, 0), "rowwise-adagrad": (0, 1), "adagrad": (1, 0), "adam": (2, 0)}


@dataclass(frozen=True)
class Times:
    """Seconds of a part of a table on a GPU, and of the waits that all parts there share."""

    forward_s: float
    backward_s: float
    waits_s: float


@lru_cache(maxsize=16384)
def times(part: EmbeddingTable, bags: int, state: int, to: Target) -> Times:
    """Of `bags` sums looked up in a part of a table, of as many rows each as its `lookups` says;
    and of their update, which touches `state` more cells for each of a row. One launch serves all
    tables of a GPU (FBGEMM's table-batched embeddings), so each takes its arithmetic or its bytes,
    and what nothing hides (start, waits) counts once. Backward is an update in place: a scatter of
    as many rows as were looked up."""
    count = max(1, round(part.lookups))
    sums = max(1, round(bags * part.lookups / count))
    forward = tile_of(bag_sum(part, count, sums), to)
    wide = replace(part, width=part.width * (1 + state))
    backward = tile_of(update(wide, sums * count), to)
    waits = max(forward[1], backward[1])
    return Times(forward[0], backward[0], waits)


def tile_of(op: k.KernelOp, target: Target) -> tuple[float, float]:
    """What of a kernel's time is arithmetic or bytes, and the rest."""
    work = work_of(op).each(lambda n: np.array([n], float))
    e = estimate(work, choose(work, target), target)
    busy, rest = np.maximum(e.compute, e.memory), e.latency + target.launch_s
    return float(busy[0]), float(rest[0])


def bag_sum(part: EmbeddingTable, bag: int, bags: int) -> k.KernelOp:
    w = Value("table", TensorType((part.rows, part.width), part.dtype))
    at = Value("indices", TensorType((bags, bag), i64))
    b = _body(w, at)
    y = b(t.Gather(w, at, 0, str(part.spread)))
    return k.Gather((w, at), b.finish([b(t.Reduce("sum", y, (1,)))]))


def update(part: EmbeddingTable, count: int) -> k.KernelOp:
    w = Value("table", TensorType((part.rows, part.width), part.dtype))
    at = Value("indices", TensorType((count, 1), i64))
    new = Value("updates", TensorType((count, part.width), part.dtype))
    b = _body(w, at, new)
    added = b(t.ScatterND(w, at, new, "add", str(part.spread)))
    return k.Scatter((w, at, new), b.finish([added]))


def _body(*values: Value) -> Builder:
    b = Builder(Level.graph, "body")
    b.locs = ("shard:table",)
    for v in values:
        b.capture(v)
    return b


def busiest(rows: int, parts: int, spread: Spread) -> float:
    """The share of lookups of the part of a table that gets most, rows dealt out to the parts one
    by one from the most frequent."""
    classes = classes_of(spread, rows)
    first = classes.rows[0] * classes.p[0] if classes.rows[0] < 1.5 else 0.0
    return float(max(1.0 / parts, first + (1.0 - first) / parts)) if parts > 1 else 1.0
