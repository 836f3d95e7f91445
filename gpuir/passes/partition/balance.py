"""Where to cut a row of nodes so that the longest part is as short as it can be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from gpuir.ir.graph import Node, Value
from gpuir.ops import tensor as t
from gpuir.targets.target import Target

Weigh = Callable[[Node], float]
Rows = Sequence[Sequence[float]]  # a row a part: what nodes weigh there, or sums of that
Floats = NDArray[np.float64]
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
    as it takes for a longest part that is at most `SPARE` times the shortest possible. Of all ways
    to cut there, within that length, those with the fewest bytes at all cuts together are taken:
    if one long node takes a wide place, the other cuts stay at narrow ones. Among these the longest
    part is the shortest there is, and then the parts are the most even (least sum of squares).
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
    inner = np.asarray([bytes[i] for i in rows[1:-1]], float)
    below = limits[: bisect_right(limits, most)]

    def beyond(narrow: int) -> Floats:
        return np.concatenate(([0.0], np.maximum(inner - narrow, 0.0), [0.0]))

    def is_narrow(narrow: int) -> bool:
        return 2 * fewest(at(rows), np.sign(beyond(narrow)), enough) <= parts - 1

    narrow = below[bisect_left(below, True, key=is_narrow)] if limits else 0
    return tuple(rows[i] for i in most_even(at(rows), beyond(narrow), enough))


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


def _least(is_enough: Callable[[float], bool], high: float, low: float = 0.0) -> float:
    """The least limit that is enough, as near as numbers of 53 bits tell; `high` is."""
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


def most_even(sums: Rows, cost: Floats | None = None, enough: float = 0.0) -> tuple[int, ...]:
    """The places between parts with the least cost in all, of those that leave no part longer than
    `enough`, or than has to be. Of these the longest part is the shortest, and then the sum of the
    squares of lengths the least: a dynamic programme over the parts. Of equal ones, rounding aside,
    the last part is the longest: a pipeline's first ones hold the most microbatches."""
    count, parts = len(sums[0]) - 1, len(sums)
    cost = np.zeros(count + 1) if cost is None else cost
    limit = shortest_longest(sums) * (1 + 1e-12)
    least = fewest(sums, cost, max(enough, limit))
    if fewest(sums, cost, limit) > least:
        limit = _least(lambda x: fewest(sums, cost, x) <= least, enough, limit)
    before = _costs(sums, cost, limit)
    turned = _by_row(sums[::-1], lambda own: [own[-1] - x for x in own[::-1]])
    after = _costs(turned, cost[::-1], limit * (1 + 1e-9))
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}  # by where the parts so far end
    came: list[dict[int, int]] = []
    for part, own in enumerate(sums, 1):
        through = before[part] + after[parts - part][::-1] - cost  # of the best way by each place
        starts = sorted(best)
        now, last = dict[int, tuple[float, float]](), dict[int, int]()
        for end in map(int, np.flatnonzero(through <= least)):
            whole = own[end]
            first = bisect_left(starts, whole - limit, key=own.__getitem__)
            for i in starts[first:]:
                if i >= end:
                    break
                wide, uneven = best[i]
                wide, uneven = wide + float(cost[end]), uneven + (whole - own[i]) ** 2
                found = now.get(end, (inf, inf))
                if wide < found[0] or (wide == found[0] and uneven < found[1] * (1 - 1e-9)):
                    now[end], last[end] = (wide, uneven), i
        best = now
        came.append(last)
    at, places = count, list[int]()
    for last in reversed(came[1:]):
        at = last[at]
        places.append(at)
    return tuple(reversed(places))


def fewest(sums: Rows, cost: Floats, limit: float) -> float:
    """The least cost of all places between parts, with no part longer than the limit."""
    return float(_costs(sums, cost, limit)[-1][-1])


def _costs(sums: Rows, cost: Floats, limit: float) -> list[Floats]:
    """Of no part, the first part, the first two ...: the least cost of all ends so far, by where
    the last one is, with no part longer than the limit."""
    now = np.where(np.arange(len(cost)) == 0, 0.0, inf)
    found = [now]
    firsts = {id(own): np.searchsorted(own, np.asarray(own) - limit) for own in sums}
    for own in sums:
        now = cost + _least_since(now, firsts[id(own)])
        found.append(now)
    return found


def _least_since(values: Floats, firsts: NDArray[np.intp]) -> Floats:
    """For each place, the least of the values from its first one to the one before it: of two
    stretches of a power of two that cover them (a sparse table)."""
    places = np.arange(len(values))
    found = np.full(len(values), inf)
    size = 1
    while size < len(places):
        some = (places - firsts >= size) & (places - firsts < 2 * size)
        found[some] = np.minimum(values[firsts[some]], values[places[some] - size])
        values = np.minimum(values[:-size], values[size:])
        size *= 2
    return found


def lengths(weights: Rows, cuts: Sequence[int]) -> tuple[float, ...]:
    """The sum of the weights of each part."""
    ends = pairwise((0, *cuts, len(weights[0])))
    return tuple(sum(own[a:b]) for own, (a, b) in zip(weights, ends, strict=True))
