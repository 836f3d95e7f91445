"""What a run comes to."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest

import gpuir
from gpuir.ir.errors import ModelError, UsageError
from gpuir.report.answer import check_runs
from gpuir.report.kernels import kernels_of
from gpuir.text import parse

VIEW = 'graph @v { in %x: f32[2, 4] %y: f32[8] = t.reshape(%x, [8]) at "m:Reshape" out %y }'


def test_a_run_that_takes_no_time_has_no_rate():
    with pytest.raises(ModelError, match="nothing runs under ideal"):
        check_runs(gpuir.analyze(parse(VIEW), "a100", profile="ideal"))
    run = check_runs(gpuir.analyze(parse(VIEW), "a100", profile="eager", batch=2))
    assert run.item_s == run.latency_s / 2 > 0
    assert run.items_per_s == 2 / run.latency_s


def test_an_answer_without_a_latency_has_no_numbers():
    none = gpuir.Answer("m", "a100", why="it does not support bf16")
    assert not none.ran and isnan(none.latency_s) and "bf16" in repr(none)
    assert {n for n, v in none.row().items() if v not in (None, "")} == {"why"}


def test_the_numbers_are_those_of_the_whole():
    whole = gpuir.analyze(parse(VIEW), "a100", profile="eager")
    assert whole.numbers == whole and whole.numbers.row() == whole.row()
    with pytest.raises(UsageError, match="numbers alone"):
        _ = whole.numbers.kernels


def test_a_step_of_many_ranks_says_where_its_graphs_are():
    text = "graph @m { in %x: f16[8, 64] param %w: f16[64, 64] %y: f16[8, 64] = t.matmul(%x, %w) "
    graph = parse(text + 'at "m:y" out %y }')
    found = gpuir.simulate_ranks(graph, "dgx-a100", gpuir.Parallel(dp=2))
    assert found.latency_s == found.step.time_s > 0 and found.cluster == "dgx-a100"
    with pytest.raises(UsageError, match="numbers alone") as e:
        _ = found.graph
    assert "answer.step.parts" in e.value.fix and found.step.parts[0].runs[0].graph
    with pytest.raises(UsageError, match="of one device"):
        _ = gpuir.analyze(parse(VIEW), "a100", profile="eager").step


def test_what_a_million_items_cost():
    """An hour at 3.6 dollars is a tenth of a cent a second; a million of 2 ms take 2,000 s."""
    answer = gpuir.Answer("m", "a100", batch=4, latency_s=8e-3, usd_per_hour=3.6)
    assert answer.usd_per_million == pytest.approx(2.0)
    assert gpuir.Answer("m", "a100", batch=4, latency_s=8e-3).usd_per_million is None


LOOPS = """graph @m {
  in %x: f32[4, 64]
  %y: f32[4, 64] = t.loop({
    in %i: i64[]
    in %h: f32[4, 64]
    %g: f32[4, 64] = t.loop({
      in %j: i64[]
      in %k: f32[4, 64]
      %a: f32[4, 64] = t.map("tanh", [%k]) at "m:a"
      out %a
    }, 5, [%h]) at "m:inner"
    out %g
  }, 3, [%x]) at "m:outer"
  out %y
}"""


def test_what_a_loop_takes_beyond_its_kernels_counts_in_each_run():
    graph = gpuir.analyze(parse(LOOPS), "a100", profile="ideal").graph
    (outer,) = graph.nodes
    (inner,) = outer.op.body.nodes
    twice = replace(inner, cost=inner.cost.scaled(2.0))
    body = replace(outer.op.body, nodes=(twice,))
    outer = replace(outer, op=replace(outer.op, body=body), cost=outer.cost.scaled(2.0))
    kernel, rest, *_ = kernels_of(replace(graph, nodes=(outer,)))
    assert (kernel.runs, rest.runs, rest.rest) == (15, 3, True)
    assert kernel.time_s == pytest.approx(rest.time_s)
    assert kernel.time_s + rest.time_s == pytest.approx(outer.cost.time_s)
