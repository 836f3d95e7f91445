"""Where a row of nodes is cut, against all ways to cut it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.passes.partition.balance import (
    SPARE,
    best_cuts,
    bytes_between,
    lengths,
    most_even,
    roofline_s,
    shortest_longest,
    work,
)
from gpuir.passes.partition.partition import partition

ROWS = st.lists(st.sampled_from([0.0, 1.0, 2.5, 3.0, 7.0, 10.0]), min_size=1, max_size=9)


# How many times as long the parts take for a node: alike, quick and slow ones, or in between.
PACES = st.lists(st.sampled_from([1.0, 1.0, 1.0, 3.0, 0.4]), min_size=1, max_size=5)


def all_ways(weights: list[float], parts: int) -> list[tuple[int, ...]]:
    return list(combinations(range(1, len(weights)), parts - 1))


def rows_of(weights: list[float], paces: list[float]) -> list[list[float]]:
    """Of each part, what nodes weigh there: equal ones are one object, as where they are alike."""
    known = {pace: [pace * x for x in weights] for pace in paces}
    return [known[pace] for pace in paces]


def sums(rows: list[list[float]]) -> list[list[float]]:
    return [[sum(row[:i]) for i in range(len(row) + 1)] for row in rows]


@given(ROWS, PACES)
def test_the_longest_part_is_the_shortest_there_is(weights: list[float], paces: list[float]):
    if len(paces) > len(weights):
        return
    rows = rows_of(weights, paces)
    ways = [lengths(rows, way) for way in all_ways(weights, len(paces))]
    best = min(max(way) for way in ways)
    assert shortest_longest(sums(rows)) == pytest.approx(best)
    found = lengths(rows, most_even(sums(rows)))
    assert max(found) == pytest.approx(best)
    squares = [sum(x * x for x in way) for way in ways if max(way) <= best * (1 + 1e-9)]
    assert sum(x * x for x in found) == pytest.approx(min(squares))


@given(ROWS, PACES, st.data())
def test_fewer_bytes_are_worth_a_quarter(weights: list[float], paces: list[float], data):
    """No cut where more bytes are alive than it takes for a part that much longer than the best."""
    parts = len(paces)
    if parts > len(weights):
        return
    rows = rows_of(weights, paces)
    alive = [data.draw(st.sampled_from([1, 2, 8])) for _ in weights]
    allowed = list(range(1, len(weights)))
    cuts = best_cuts(rows, allowed, alive)
    assert len(cuts) == parts - 1 and list(cuts) == sorted(set(cuts))
    best = shortest_longest(sums(rows))
    assert max(lengths(rows, cuts)) <= SPARE * best * (1 + 1e-9)
    most = max((alive[i] for i in cuts), default=0)
    fewer = [i for i in allowed if alive[i] < most]
    ways = list(combinations(fewer, parts - 1)) if most else []
    assert all(max(lengths(rows, way)) > SPARE * best for way in ways)
    near = [i for i in allowed if alive[i] <= most]
    short = [w for w in combinations(near, parts - 1) if max(lengths(rows, w)) <= SPARE * best]
    half = parts // 2  # of the cuts, or one more: no more than a narrow place has
    narrow = min((sorted(alive[i] for i in w)[half - 1] for w in short), default=0) if half else 0
    beyond = [sum(max(alive[i] - narrow, 0) for i in w) for w in short]
    ways = [lengths(rows, w) for w, x in zip(short, beyond, strict=True) if x == min(beyond)]
    assert sum(max(alive[i] - narrow, 0) for i in cuts) == min(beyond)
    longest = min(max(way) for way in ways)
    assert max(lengths(rows, cuts)) == pytest.approx(longest)
    squares = [sum(x * x for x in way) for way in ways if max(way) <= longest * (1 + 1e-9)]
    assert sum(x * x for x in lengths(rows, cuts)) == pytest.approx(min(squares))


def test_a_long_end_leaves_the_cuts_before_it_between_layers():
    """Twelve layers and a head of half a layer in twelve parts: a last layer with the head is too
    long by a little, so one cut goes into it, and no other into a layer."""
    weights, alive = [1.0] * 75, [2, 5, 5, 5, 5, 5] * 12 + [1, 1, 1]
    cuts = best_cuts([weights] * 12, range(1, 75), alive)
    assert cuts == (6, 12, 18, 24, 30, 36, 42, 48, 54, 60, 67)


@given(st.integers(2, 12), st.integers(2, 12), st.floats(0.01, 100.0))
def test_equal_layers_make_the_last_parts_longer(layers: int, parts: int, seconds: float):
    """Whatever a layer takes: the first parts of a pipeline hold the most microbatches."""
    if parts <= layers:
        cuts = best_cuts([[seconds] * layers] * parts, range(1, layers), [1] * layers)
        counts = lengths([[1.0] * layers] * parts, cuts)
        assert list(counts) == sorted(counts) and counts[-1] - counts[0] <= 1


def test_a_quick_part_gets_more_layers():
    """Twelve layers, of which the last device takes three times as long."""
    weights = [1.0] * 12
    assert best_cuts(rows_of(weights, [1.0, 3.0]), range(1, 12), [1] * 12) == (9,)
    weights = [1.0] * 14
    assert best_cuts(rows_of(weights, [3.0, 1.0, 1.0]), range(1, 14), [1] * 14) == (2, 8)


NET = """graph @net {
  in %x: f32[8, 64]
  param %w: f32[64, 256]
  param %v: f32[256, 64]
  param %u: f32[64, 64]
  %a: f32[8, 256] = t.matmul(%x, %w) at "m:a"
  %h: f32[8, 256] = t.map("relu", [%a]) at "m:h"
  %b: f32[8, 64] = t.matmul(%h, %v) at "m:b"
  %r: f32[8, 64] = t.map("add", [%b, %x]) at "m:r"
  %y: f32[8, 64] = t.matmul(%r, %u) at "m:y"
  out %y
}"""


def test_bytes_between_are_what_is_read_later():
    g = gpuir.parse(NET)
    place = {n.results[0]: i for i, n in enumerate(g.nodes)}
    wide, narrow = 4 * 8 * 256, 4 * 8 * 64
    assert bytes_between(g.nodes, place) == [0, wide, wide, narrow, narrow]


def test_a_node_weighs_its_roofline():
    target = gpuir.load_target("a100")
    g = gpuir.parse(NET)
    product, relu = g.nodes[0], g.nodes[1]
    moved = 4 * (8 * 64 + 64 * 256 + 8 * 256)
    assert roofline_s(target)(product) == pytest.approx(moved / target.dram_bytes_per_s)
    assert work(product) == max(2 * 8 * 64 * 256, 100 * moved)
    assert work(relu) == 100 * 2 * 4 * 8 * 256


def test_the_caller_weighs():
    g = gpuir.parse(NET)
    found = partition(g, 2, lambda n: float(n.results[0].name in ("a", "y")))
    assert found.lengths == (1.0, 1.0)
    assert [v.name for v in found.parts[0].sends] in (["b"], ["r"])


@pytest.mark.parametrize(
    ("parts", "message"),
    [(6, "at most 5"), (0, "the number of parts must be at least 1")],
)
def test_what_cannot_be_is_refused(parts: int, message: str):
    with pytest.raises(UsageError, match=message):
        partition(gpuir.parse(NET), parts)


def test_graphs_that_are_no_step_of_one_microbatch_are_refused():
    summed = gpuir.pipeline("autodiff,accumulate").run(gpuir.parse(NET))
    with pytest.raises(UsageError, match="already accumulates gradients"):
        partition(summed, 2)
    with pytest.raises(UsageError, match=", but only a graph of tensor ops can be"):
        partition(gpuir.lower(gpuir.parse(NET), profile="eager"), 2)
    norm = """graph @norm {
      in %x: f32[4, 4]
      param %w: f32[4, 4]
      param %v: f32[4, 4]
      %y: f32[4, 4] = t.matmul(%x, %w) at "m:y"
      %z: f32[4, 4] = t.matmul(%y, %v) at "m:z"
      %w.grad: f32[4, 4] = t.matmul(%x, %y) at "m:y/backward"
      %v.grad: f32[4, 4] = t.matmul(%y, %z) at "m:z/backward"
      %both: f32[4, 4] = t.map("max", [%w.grad, %v.grad]) at "m:max/optimizer"
      %w.new: f32[4, 4] = t.map("sub", [%w, %both]) at "m:sgd/optimizer"
      %v.new: f32[4, 4] = t.map("sub", [%v, %both]) at "m:sgd/optimizer"
      role gradient %w.grad, %v.grad
      out %z, %w.grad, %v.grad, %w.new over %w, %v.new over %v
    }"""
    with pytest.raises(UsageError, match="its optimizer combines weights of several"):
        partition(gpuir.parse(norm), 2)
    assert len(partition(gpuir.parse(norm), 1).parts) == 1
