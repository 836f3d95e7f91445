"""What a whole run is off under a profile, besides what its kernels are off."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log

import numpy as np
import pytest

import gpuir
from gpuir.run.loading import load_text
from gpuir.simulate.launches import Launches
from gpuir.simulate.timeline import further, timeline
from gpuir.targets.load import load_target
from gpuir.targets.target import FrozenTable

GRAPH = """graph @g of pytorch {
  in %a: f32[4096, 4096]
  in %b: f32[4096, 4096]
  %y: f32[4096, 4096] = t.matmul(%a, %b) at "m:y"
  out %y
}"""


def test_errors_add_up_as_squares_of_logarithms():
    assert 0.9 * further(0.9, log(1 / 1.2)) == pytest.approx(exp(-hypot(log(0.9), log(1.2))))
    assert 1.1 * further(1.1, log(1.3)) == pytest.approx(exp(hypot(log(1.1), log(1.3))))
    assert further(1.1, 0.0) == 1.0
    ends = np.array([1.0, 1.1])
    assert ends[0] * further(ends, log(1.3))[0] == pytest.approx(1.3)


def test_a_run_is_less_certain_than_its_kernels():
    graph = gpuir.analyze(load_text(GRAPH), "a100", profile="eager").graph
    profile = replace(gpuir.load_profile("eager"), quicker=None, slower=None)

    def interval(**spread: float) -> tuple[float, float]:
        found = timeline(graph, replace(profile, **spread)).interval
        assert found is not None
        return found

    low, high = interval()
    assert interval(quicker=1.2) == (pytest.approx(low / 1.2, rel=0.2), high)
    assert interval(quicker=1.2)[0] < low
    assert interval(slower=2.0)[0] == low and interval(slower=2.0)[1] > 1.5 * high


def test_what_was_measured_on_a_device_has_it_already():
    profile, none = gpuir.load_profile("eager"), Launches()
    known = replace(load_target("a100"), backtest=FrozenTable({"gemm.low": 0.9}))
    assert none.host(profile, load_target("a100")).slower == profile.slower > 1
    assert none.host(profile, known).slower is None
    assert none.host(profile, load_target("x86-64-v4")).slower is None
