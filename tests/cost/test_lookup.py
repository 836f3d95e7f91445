"""Lookups: rows named, rows that a cache has, and what that makes of a kernel's time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuir
from gpuir.cost.lookup import between, classes_of, rows_missed, rows_named
from gpuir.ir.errors import ModelError
from gpuir.ops.spread import UNIFORM, Spread, parse_spread

sizes = st.integers(1, 100_000)
exponents = st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.05, 1.5, 3.0])
shares = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6).map(
    lambda parts: Spread(
        shares=tuple((1 / len(parts), x / sum(parts)) for x in sorted(parts)[::-1])
    )
)
spreads = st.one_of(exponents.map(Spread), shares)


def drawn(spread, lookups, rows):
    """The rows that lookups name, and the misses beyond the first of each."""
    how = str(spread), lookups, rows
    return rows_named(*how), rows_missed(*how)


@given(spreads, sizes, sizes)
def test_no_more_rows_are_named_than_there_are_or_lookups(spread: Spread, n: int, rows: int):
    named, missed = drawn(spread, n, rows)
    assert 0 < named <= min(n, rows) * (1 + 1e-9)
    assert min(missed) >= 0 and missed[-1] == 0
    assert named + missed[0] == pytest.approx(n, abs=1.0)  # without a cache every lookup misses


@given(spreads, sizes, sizes, st.integers(1, 1000))
def test_more_lookups_name_more_rows(spread: Spread, n: int, rows: int, more: int):
    assert drawn(spread, n + more, rows)[0] >= drawn(spread, n, rows)[0] * (1 - 1e-9)


@given(sizes, sizes, st.floats(0, 1))
def test_more_skew_names_and_misses_fewer_rows(n: int, rows: int, share: float):
    before: list[float] = [np.inf, np.inf]
    cached = share * min(n, rows)
    for exponent in (0.0, 0.5, 1.0, 1.5, 2.5):
        classes = classes_of(Spread(exponent), rows)
        found = [classes.named(n), classes.misses(n, cached)]
        for less, more in zip(found, before, strict=True):
            assert less <= more * (1 + 1e-6)
        before = found


@given(spreads, sizes, sizes)
def test_a_larger_cache_misses_no_more(spread: Spread, n: int, rows: int):
    named, missed = drawn(spread, n, rows)
    assert all(b <= a * (1 + 1e-6) + 1.0 for a, b in pairwise(missed))
    along = between(np, np.linspace(0, 2, 81), missed)
    assert along[0] == pytest.approx(missed[0]) and np.all(along >= 0)
    assert np.all(along[40:] == 0)
    assert named <= n


def lru(draws: Iterable[int], rows: int) -> int:
    """Misses of a cache that holds the rows used last."""
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for row in draws:
        if row in held:
            held.move_to_end(row)
            continue
        missed += 1
        held[row] = None
        if len(held) > rows:
            held.popitem(last=False)
    return missed


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.05, 1.5])
@pytest.mark.parametrize(("rows", "n"), [(1000, 500), (1000, 20_000), (20_000, 20_000)])
def test_misses_are_those_of_a_simulated_cache(exponent: float, rows: int, n: int):
    """8 % of a cache that begins empty (the mean of five draws), 10 % where lines stand for the
    curve between the sizes of cache that are counted."""
    rng = np.random.default_rng(0)
    p = np.arange(1, rows + 1.0) ** -exponent
    draws = [rng.choice(rows, n, p=p / p.sum()) for _ in range(5)]
    spread = Spread(exponent)
    named, missed = drawn(spread, n, rows)
    assert named == pytest.approx(np.mean([len(set(d)) for d in draws]), rel=0.05)
    for cached in (10, 100, 500):
        simulated = np.mean([lru(d, cached) for d in draws])
        assert classes_of(spread, rows).misses(n, cached) == pytest.approx(simulated, rel=0.08)
        drawn_along = named + between(np, cached / named, missed)
        assert drawn_along == pytest.approx(simulated, rel=0.1)


def test_even_draws_are_the_published_formula():
    """Lin et al., TPDS 2024: X rows are cached, the cold start included."""
    rows, n, cached = 1_000_000, 819_200, 24_000
    hits = 1 - (cached + (n - cached) * (rows - cached) / rows) / n
    named, missed = drawn(UNIFORM, n, rows)
    found = 1 - (named + between(np, cached / named, missed)) / n
    assert found == pytest.approx(hits, abs=2e-3)


def test_classes_of_zipf_are_its_rows():
    """Ten thousand rows one by one beside the classes: the rows that lookups name."""
    for exponent in (0.4, 1.0, 1.3):
        p = np.arange(1, 10_001.0) ** -exponent
        p /= p.sum()
        for n in (10, 1000, 100_000):
            exact = np.sum(-np.expm1(n * np.log1p(-p)))
            assert classes_of(Spread(exponent), 10_000).named(n) == pytest.approx(exact, rel=0.005)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zipff:1", "did you mean zipf"),
        ("zipf:", "the distribution of the indices is not valid"),
        ("zipf:-1", "an exponent from 0 to 10"),
        ("zipf:nan", "a finite number"),
        ("shares:2=1", "each from 0 to 1"),
        ("shares:0.5=0.4,0.5=0.4", "lookup shares with the sum 1, because the"),
    ],
)
def test_another_text_is_refused(text: str, message: str):
    with pytest.raises(ModelError, match=message):
        parse_spread(text)


@given(spreads)
def test_a_spread_is_its_text(spread: Spread):
    again = parse_spread(str(spread))
    assert again.exponent == spread.exponent
    assert np.array(again.shares) == pytest.approx(np.array(spread.shares), rel=1e-4)


# ---- a kernel's time


def bags(spread: str, rows: int = 10_000_000, lookups: int = 50) -> gpuir.Graph:
    text = f"""graph @bags {{
  in %i: i64[4096, {lookups}]
  param %w: f32[{rows}, 64]
  %rows: f32[4096, {lookups}, 64] = t.gather(%w, %i, spread="{spread}") at "bag"
  %y: f32[4096, 64] = t.reduce("sum", %rows, [1]) at "bag"
  out %y
}}"""
    return gpuir.parse(text)


@pytest.mark.parametrize("target", ["v100-sxm-16gb", "a100-sxm-80gb", "h100-sxm-80gb", "t4"])
def test_more_skew_is_never_slower(target: str):
    times: list[float] = []
    for spread in ("uniform", "zipf:0.4", "zipf:0.8", "zipf:1.05", "zipf:1.5", "zipf:3"):
        (node,) = gpuir.analyze(bags(spread), target, profile="eager").graph.nodes
        assert node.cost is not None
        times.append(node.cost.time_s)
        assert ("indices" in node.cost.unseen) == (spread != "uniform")
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(times))
    assert times[-1] < 0.9 * times[0]


def test_rows_that_the_l2_gives_up_come_from_dram_again():
    """Each row of a table of 2.56 GB is named 8 times on average, far apart: every lookup is a
    sector row from DRAM. Of one of 2.6 MB, all but the first of each."""
    (large,) = gpuir.analyze(
        bags("uniform", lookups=19_531), "a100-sxm-80gb", profile="eager"
    ).graph.nodes
    (small,) = gpuir.analyze(
        bags("uniform", 10_000, 19_531), "a100-sxm-80gb", profile="eager"
    ).graph.nodes
    read = 4096 * 19_531 * 256
    assert large.cost is not None and small.cost is not None
    assert large.cost.time_s > 0.95 * read / 2.04e12  # the L2 has a few of them
    assert small.cost.time_s < large.cost.time_s
    share = [cost.fact("dram_share") or 0.0 for cost in (large.cost, small.cost)]
    assert share[0] > 0.9 and share[1] < 0.01
