"""What a run comes to."""

from __future__ import annotations

from math import isnan

import pytest

import gpuir
from gpuir.ir.errors import ModelError, UsageError
from gpuir.report.answer import check_runs
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
