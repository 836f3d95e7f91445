"""Sharding of embedding tables: small cases against every placement there is, laws, and what is
refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuir.ir.errors import UsageError
from gpuir.ops.spread import UNIFORM, Spread
from gpuir.plan.exchange import collective_of
from gpuir.plan.highs import is_there
from gpuir.plan.lookups import busiest, times
from gpuir.plan.milp import Highs
from gpuir.plan.sharding import (
    Collective,
    FoundPlacement,
    PlacementPlan,
    PlacementSetting,
    TablePlacement,
    check,
    options,
    reasons,
    shard,
)
from gpuir.plan.tables import EmbeddingTable
from gpuir.targets.cluster import load_cluster
from gpuir.targets.load import load_target

A100 = load_target("a100-sxm-80gb")
HIGHS = Highs(10.0) if is_there() else None


def line(start: float, rate: float) -> Collective:
    """A collective of a fixed time and a rate, as the solver takes all to be."""
    return lambda kind, count: start + count / rate * (2 if kind == "all_reduce" else 1)


def setting(gpus: int, memory: float = 64e9, **more: object) -> PlacementSetting:
    s = PlacementSetting(A100, gpus, memory, 4096, line(1e-5, 1e11))
    return replace(s, **more)


def table(name: str, rows: int = 100_000, width: int = 64, lookups: float = 4) -> EmbeddingTable:
    return EmbeddingTable(name, rows, width, lookups)


SOME = (
    (table("a"), table("b"), table("c", 1_000_000, 128, 20)),
    (table("a", 10), table("b", 2_000_000, 128, 1), table("c", 500, 16, 2)),
    (table("a", lookups=1), table("b", lookups=1), table("c", lookups=30), table("d", 50, 8, 1)),
)


def every(tables: tuple[EmbeddingTable, ...], s: PlacementSetting) -> float:
    """The time of the quickest of all placements."""
    ways = check(tables, s)
    s = replace(s, waits_s=max(o.waits_s for some in ways for o in some))
    choices = [
        [
            TablePlacement(t, o, on)
            for o in some
            for on in (
                [tuple(range(s.gpus))] if o.everywhere else combinations(range(s.gpus), o.parts)
            )
        ]
        for t, some in zip(tables, ways, strict=True)
    ]
    plans = (PlacementPlan(s, chosen) for chosen in product(*choices))
    return min(p.time_s for p in plans if p.fits)


@pytest.mark.skipif(HIGHS is None, reason="highspy is not installed")
@pytest.mark.parametrize("tables", SOME)
@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("memory", [64e9, 700e6])
def test_small_cases_are_as_good_as_every_placement(
    tables: tuple[EmbeddingTable, ...], gpus: int, memory: float
):
    s = setting(gpus, memory)
    if gpus == 1 and memory < 1e9:
        pytest.skip("one GPU has no room")
    found = shard(tables, s, HIGHS if gpus > 1 else None)
    assert found.plan.time_s == pytest.approx(every(tables, s), rel=1e-4)
    assert gpus == 1 or found.proven


def laws(found: FoundPlacement, tables: tuple[EmbeddingTable, ...], s: PlacementSetting) -> None:
    plan = found.plan
    assert [p.table for p in plan.placements] == list(tables)
    assert plan.fits and plan.time_s == pytest.approx(sum(plan.parts.values()))
    for p in plan.placements:
        assert len(set(p.on)) == len(p.on) == p.option.parts
        assert all(0 <= g < s.gpus for g in p.on)
    held = sum(p.option.memory_bytes * p.option.parts for p in plan.placements)
    assert held == pytest.approx(sum(load.memory_bytes for load in plan.loads))
    if found.greedy is not None:
        assert plan.time_s <= found.greedy.time_s * (1 + 1e-12)
    if found.least_s is not None:
        assert found.least_s <= plan.time_s * (1 + 1e-4)
    assert set(reasons(found)) == {t.name for t in tables}


drawn = st.lists(
    st.builds(
        EmbeddingTable,
        name=st.just(""),
        rows=st.sampled_from([7, 1000, 300_000, 5_000_000]),
        width=st.sampled_from([16, 64, 96, 128]),
        lookups=st.sampled_from([1.0, 2.5, 40.0]),
        spread=st.sampled_from([UNIFORM, Spread(1.05)]),
    ),
    min_size=1,
    max_size=12,
).map(lambda some: tuple(replace(t, name=f"t{i}") for i, t in enumerate(some)))


@settings(max_examples=25, deadline=None)
@given(drawn, st.sampled_from([1, 2, 4, 8]), st.sampled_from([3e9, 80e9]), st.booleans())
def test_greedy_is_never_better(
    tables: tuple[EmbeddingTable, ...], gpus: int, memory: float, train: bool
):
    s = setting(gpus, memory, train=train)
    try:
        found = shard(tables, s)
    except UsageError:
        return  # one GPU may have no room for twelve tables of 2.56 GB
    laws(found, tables, s)


@pytest.mark.skipif(HIGHS is None, reason="highspy is not installed")
def test_the_solver_beats_greedy_where_one_table_weighs_most():
    tables = (table("huge", 5_000_000, 128, 100), *(table(f"t{i}") for i in range(6)))
    s = setting(4)
    found = shard(tables, s, HIGHS)
    laws(found, tables, s)
    assert found.greedy is not None
    assert found.plan.time_s < 0.75 * found.greedy.time_s
    huge = found.plan.placements[0]
    assert huge.option.way in ("column", "row")
    assert "whole: " in reasons(found)["huge"]


def test_a_table_larger_than_a_gpu_is_cut_or_said():
    tables = (table("large", 300_000_000, 128, 1),)
    found = shard(tables, setting(4))
    (p,) = found.plan.placements
    assert p.option.way in ("column", "row") and found.greedy is not None
    with pytest.raises(UsageError, match="table large is larger than the memory") as caught:
        shard(tables, setting(4, ways=("table", "data")))
    assert "--cut" in str(caught.value)
    with pytest.raises(UsageError, match="is larger than the memory of a GPU") as caught:
        shard(tables, setting(2))
    assert "GPUs, or a narrower dtype" in str(caught.value)


def test_tables_that_do_not_fit_all_together_are_said():
    tables = tuple(table(f"t{i}", 100_000_000, 128, 1) for i in range(8))
    with pytest.raises(UsageError, match="the tables do not fit into all GPUs together") as caught:
        shard(tables, setting(4))
    assert "at least 7 GPUs" in str(caught.value)


def test_what_a_way_costs():
    """Cut by columns in four, a part has a quarter of the bytes to send and every index; cut by
    rows a quarter of the rows and of the indices, and all sums are added up over ranks."""
    s = setting(4)
    every_way = {(o.way, o.parts): o for o in options(table("t", 1_000_000, 128, 10), s)}
    whole, columns = every_way["table", 1], every_way["column", 4]
    rows, data = every_way["row", 4], every_way["data", 4]
    out = 4096 * 128 * 4
    assert whole.sent_bytes == out and columns.sent_bytes == out / 4
    assert whole.index_bytes == columns.index_bytes == 4 * rows.index_bytes == 4096 * 10 * 8
    assert rows.summed_bytes == out and data.reduced_bytes == 1_000_000 * 128 * 4
    assert rows.memory_bytes == pytest.approx(whole.memory_bytes / 4)
    assert data.memory_bytes == whole.memory_bytes and data.index_bytes == 0
    assert columns.forward_s < whole.forward_s and data.forward_s < whole.forward_s


def test_the_busiest_rank_has_the_most_frequent_row():
    assert busiest(1000, 4, UNIFORM) == 0.25
    assert busiest(1000, 4, Spread(2.0)) > 0.6  # 1 / zeta(2) of the lookups name one row
    part = table("t", 10_000_000, lookups=50)
    few = times(replace(part, spread=Spread(1.5)), 65_536, 0, A100)
    many = times(part, 65_536, 0, A100)
    assert few.forward_s < many.forward_s and few.backward_s < many.backward_s


def test_collectives_go_by_the_cluster():
    """Two nodes send half of their bytes through the fabric; in one node none."""
    one, two = (collective_of(load_cluster(name)) for name in ("dgx-a100", "2xdgx-a100"))
    assert two("all_to_all", 1e9) > 2 * one("all_to_all", 1e9)
    for kind in ("all_to_all", "all_reduce", "reduce_scatter", "all_gather"):
        assert 0 < one(kind, 1e6) < one(kind, 1e9) < two(kind, 1e9)
