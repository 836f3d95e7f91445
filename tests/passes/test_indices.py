"""Which rows lookups name: as a user states it, and what is taken to be so."""

from __future__ import annotations

import pytest

import gpuir
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.ir.graph import Graph
from gpuir.ops import tensor as t
from gpuir.passes.indices import lookups
from gpuir.stacks.table import pipeline

MODEL = """graph @two {
  in %i: i64[8, 4]
  in %x: f32[8, 4]
  param %users: f32[1000, 16]
  param %items: f32[500, 16]
  param %names: f32[4, 16]
  %places: i64[8, 4] = t.iota(i64[8, 4], 1) at "p"
  %a: f32[8, 4, 16] = t.gather(%users, %i) at "a"
  %b: f32[8, 4, 16] = t.gather(%items, %i) at "b"
  %c: f32[8, 4, 16] = t.gather(%names, %places) at "c"
  %y: f32[8, 4, 16] = t.map("add", [%a, %b]) at "y"
  %z: f32[8, 4, 16] = t.map("add", [%y, %c]) at "z"
  %s: f32[] = t.reduce("sum", %z, [0, 1, 2]) at "s"
  out %s
}"""


def spreads(g: Graph) -> dict[str, str]:
    return {n.results[0].name: n.op.spread for n in g.nodes if isinstance(n.op, t.Gather)}


def test_lookups_are_of_params_by_inputs():
    found = {y.name: w.name for y, w in lookups(gpuir.parse(MODEL))}
    assert found == {"a": "users", "b": "items"}


def test_tables_by_name_and_the_rest():
    g = pipeline('indices{spread="zipf:1.05",tables="us*"},indices').run(gpuir.parse(MODEL))
    assert spreads(g) == {"a": "zipf:1.05", "b": "uniform", "c": ""}
    assert g.assumed == ("every row of a table is looked up equally often (--indices)",)
    assert gpuir.parse(gpuir.show(g)) == g


def test_nothing_is_assumed_where_all_is_stated_or_tables_are_few():
    g = pipeline('indices{spread="uniform"},indices').run(gpuir.parse(MODEL))
    assert spreads(g) == {"a": "uniform", "b": "uniform", "c": ""} and not g.assumed
    more = MODEL.replace("  param %names", "  param %much: f32[10000, 16]\n  param %names")
    more = more.replace("out %s", "out %s, %much")
    assert set(spreads(pipeline("indices").run(gpuir.parse(more))).values()) == {""}


def test_the_gradient_of_a_lookup_spreads_alike():
    g = pipeline('indices{spread="zipf:1.5",tables=items},autodiff').run(gpuir.parse(MODEL))
    found = [n.op.spread for n in g.nodes if isinstance(n.op, t.ScatterND)]
    assert sorted(found) == ["", "", "zipf:1.5"]


def test_an_update_in_place_touches_the_rows_that_are_named():
    text = """graph @u {
  in %i: i64[100000, 1]
  in %d: f32[100000, 64]
  param %w: f32[1000000, 64]
  %new: f32[1000000, 64] = t.scatter_nd(%w, %i, %d, "add", spread="SPREAD") at "u"
  out %new over %w
}"""
    times: list[float] = []
    for spread in ("uniform", "zipf:1.05", "zipf:2"):
        graph = gpuir.parse(text.replace("SPREAD", spread))
        (node,) = gpuir.analyze(graph, "a100", profile="eager").graph.nodes
        assert node.cost is not None
        times.append(node.cost.time_s)
    assert times == sorted(times, reverse=True) and times[-1] < 0.8 * times[0]


def test_a_graph_without_that_table_says_so():
    with pytest.raises(UsageError, match="a table with the name 'item'") as caught:
        pipeline('indices{spread="uniform",tables=item}').run(gpuir.parse(MODEL))
    assert "did you mean items" in str(caught.value)
    with pytest.raises(GpuirError, match="no distribution of indices has the name 'zipff'"):
        pipeline('indices{spread="zipff:1"}')
