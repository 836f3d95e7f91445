"""Where to cut a row of nodes so that the longest part is as short as it can be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from gpuir.ir.graph import Node, Value
from gpuir.ops import tensor as t
from gpuir.targets.target import Target

Weigh = Callable[[Node], float]
Rows = Sequence[Sequence[float]]  # a row a part: what nodes weigh there, or sums of that
SPARE = 1.25  # assumed: how much longer a part may be for fewer bytes between parts


def roofline_s(target: Target) -> Weigh:
    """Seconds of a node by itself: its arithmetic at the peak, or its operands and results through
    memory, whichever is longer (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009)."""

    def weigh(node: Node) -> float:
        op = node.op
        if isinstance(op, t.Layout | t.Generating):
            return 0.0
        values = (*op.operands, *node.results)
        pipe = "tensor" if op.contraction else "vector"
        dtype = next((v.type.dtype for v in values if v.type.dtype.is_inexact), None)
        compute = op.flops() / target.peak(pipe, dtype) if dtype else 0.0
        return max(compute, sum(v.type.nbytes for v in values) / target.dram_bytes_per_s)

    return weigh


def longest_of(weighs: Sequence[Weigh]) -> Weigh:
    """What a node weighs where ranks on several devices run it, and wait for each other."""
    return weighs[0] if len(weighs) == 1 else lambda node: max(weigh(node) for weigh in weighs)


def paced(weigh: Weigh, factor: float) -> Weigh:
    """Nodes that weigh so many times as much."""
    return lambda node: factor * weigh(node)


def work(node: Node) -> float:
    """Where no device is known: an operation counts as one, a byte as a hundred (assumed; an A100
    does 156 operations in TF32 while it moves a byte)."""
    if isinstance(node.op, t.Layout | t.Generating):
        return 0.0
    values = (*node.op.operands, *node.results)
    return float(max(node.op.flops(), 100 * sum(v.type.nbytes for v in values)))


def bytes_between(nodes: Sequence[Node], fixed: Mapping[Value, int]) -> list[int]:
    """Bytes of what is made before each node and read by it or a later one; `fixed` are the values
    made by `nodes`, each with its node's place."""
    last = dict(fixed)
    for i, node in enumerate(nodes):
        last.update((v, i) for v in node.op.operands if v in fixed)
    change = [0] * (len(nodes) + 1)
    for v, made in fixed.items():
        if last[v] > made:
            change[made + 1] += v.type.nbytes
            change[last[v] + 1] -= v.type.nbytes
    return list(accumulate(change))[: len(nodes)]


def best_cuts(weights: Rows, allowed: Sequence[int], bytes: Sequence[int]) -> tuple[int, ...]:
    """The places, each before a node, that cut a row of nodes in as many parts as there are
    `weights`: of all nodes, as the first, the second ... part would have them.

    Of the places `allowed` those are used at which the fewest bytes are alive, and as many of them
    as it takes for a longest part that is at most `SPARE` times the shortest possible. Among all
    choices of them the longest part is the shortest there is; among those the parts are the most
    even (least sum of squares).
    """
    sums = _by_row(weights, lambda row: (0.0, *accumulate(row)))
    count, parts = len(weights[0]), len(weights)

    def ends(most: float) -> list[int]:
        return [0, *(i for i in allowed if bytes[i] <= most), count]

    def at(places: Sequence[int]) -> Rows:
        return _by_row(sums, lambda row: [row[i] for i in places])

    def longest(most: float) -> float:
        rows = ends(most)
        return shortest_longest(at(rows)) if len(rows) > parts else inf

    limits = sorted({bytes[i] for i in allowed})
    most = limits[-1] if limits else 0
    enough = SPARE * longest(most)
    most = limits[bisect_left(limits, True, key=lambda n: longest(n) <= enough)] if limits else 0
    rows = ends(most)
    return tuple(rows[i] for i in most_even(at(rows)))


def _by_row(rows: Rows, made: Callable[[Sequence[float]], Sequence[float]]) -> Rows:
    """Something of each row, once of those that are the same object."""
    known = {id(row): row for row in rows}
    found = {key: made(row) for key, row in known.items()}
    return [found[id(row)] for row in rows]


def shortest_longest(sums: Rows) -> float:
    """The longest part of the best way to cut a row in as many parts as there are `sums`: of all
    weights before each place, as each part has them, the first and the last end included."""
    last = len(sums[0]) - 1
    low = min(own[-1] for own in sums) / len(sums) * 0.5
    high = max(own[-1] - own[0] for own in sums)
    if any(own is not sums[0] for own in sums):
        return _least(lambda limit: _reaches(sums, limit), high)

    def longest(limit: float, strictly: bool) -> float | None:
        """Of parts that are filled one after another as far as the limit allows."""
        at, found = 0, 0.0
        find = bisect_left if strictly else bisect_right
        for part, own in enumerate(sums):
            if at == last:
                break
            left, start = len(sums) - 1 - part, own[at]
            end = min(find(own, limit, key=lambda x: x - start) - 1, last - left)
            if end <= at:
                return None
            found, at = max(found, own[end] - start), end
        return found if at == last else None

    for _ in range(50):
        middle = (low + high) / 2
        if (now := longest(middle, strictly=False)) is not None:
            high = min(high, now)
        else:
            low = middle
    while (now := longest(high, strictly=True)) is not None:
        high = now
    return high


def _least(is_enough: Callable[[float], bool], high: float) -> float:
    """The least limit that is enough, as near as numbers of 53 bits tell; `high` is."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _reaches(sums: Rows, limit: float) -> bool:
    """Whether a row can be cut so that no part is longer than the limit, where a node may be too
    long for one part and not for another: all places where each part may end."""
    places = np.arange(len(sums[0]))
    ends = places == 0
    for own in map(np.asarray, sums):
        before = np.maximum.accumulate(np.where(ends, places, -1))[:-1]  # the last start before
        ends = np.zeros_like(ends)
        ends[1:] = (before >= 0) & (own[1:] - own[before] <= limit)
    return bool(ends[-1])


def most_even(sums: Rows) -> tuple[int, ...]:
    """The places between parts, none of which is longer than has to be, with the least sum of the
    squares of their lengths: a dynamic programme over the parts."""
    count, parts = len(sums[0]) - 1, len(sums)
    limit = shortest_longest(sums) * (1 + 1e-12)
    best: dict[int, float] = {0: 0.0}  # by where the parts so far end
    came: list[dict[int, int]] = []
    for part, own in enumerate(sums, 1):
        left = parts - part
        ends = range(count, count + 1) if not left else range(part, count - left + 1)
        starts = sorted(best)
        now, before = dict[int, float](), dict[int, int]()
        for end in ends:
            whole = own[end]
            first = bisect_left(starts, True, key=lambda i: whole - own[i] <= limit)
            for i in starts[first:]:
                if i >= end:
                    break
                cost = best[i] + (whole - own[i]) ** 2
                if cost < now.get(end, inf):
                    now[end], before[end] = cost, i
        best = now
        came.append(before)
    at, found = count, list[int]()
    for before in reversed(came[1:]):
        at = before[at]
        found.append(at)
    return tuple(reversed(found))


def lengths(weights: Rows, cuts: Sequence[int]) -> tuple[float, ...]:
    """The sum of the weights of each part."""
    ends = pairwise((0, *cuts, len(weights[0])))
    return tuple(sum(own[a:b]) for own, (a, b) in zip(weights, ends, strict=True))
