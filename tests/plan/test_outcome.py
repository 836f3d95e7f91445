"""What a run comes to."""

from __future__ import annotations

import pytest

import gpuir
from gpuir.ir.errors import ModelError
from gpuir.plan.outcome import outcome
from gpuir.text import parse

VIEW = 'graph @v { in %x: f32[2, 4] %y: f32[8] = t.reshape(%x, [8]) at "m:Reshape" out %y }'


def test_a_run_that_takes_no_time_has_no_rate():
    target = gpuir.load_target("a100")
    with pytest.raises(ModelError, match="nothing runs under ideal"):
        outcome(gpuir.analyze(parse(VIEW), "a100", profile="ideal").graph, target)
    run = outcome(gpuir.analyze(parse(VIEW), "a100", profile="eager").graph, target, items=2)
    assert run.item_s == run.latency_s / 2 > 0
