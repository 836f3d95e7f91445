"""Which of two runs is faster, as sure as their intervals allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gpuir
from gpuir.report.answer import Answer
from gpuir.report.order import slower_share, slower_than_fastest
from gpuir.run.loading import load_text

GRAPH = """graph @g of pytorch {
  in %a: f32[64]
  %y: f32[64] = t.map("relu", [%a]) at "m:y"
  out %y
}"""


@pytest.fixture(scope="module")
def run() -> Answer:
    return gpuir.analyze(load_text(GRAPH), "a100", profile="eager")


def test_two_runs_alike_are_a_toss_up(run: Answer):
    assert slower_share(run, run) == pytest.approx(0.5)


def test_as_sure_as_the_intervals(run: Answer):
    """80 % of cases lie within 1.28 standard deviations: 20 % apart with 20 % both ways on one, the
    other certain, is one end of the interval."""
    sure = replace(run, latency_s=1.0, interval=(1.0, 1.0))
    wide = replace(run, latency_s=1.2, interval=(1.0, 1.44))
    assert slower_share(wide, sure) == pytest.approx(0.9)
    assert slower_share(sure, wide) == pytest.approx(0.1)
    both = replace(run, latency_s=1.0, interval=(1 / 1.2, 1.2))
    assert 0.5 < (slower_share(wide, both) or 0) < 0.9
    assert slower_share(replace(sure, latency_s=1.1, interval=(1.1, 1.1)), sure) == 1.0
    assert slower_share(replace(run, interval=None), sure) is None


def test_against_the_fastest(run: Answer):
    runs = [replace(run, latency_s=x, interval=(x / 1.2, x * 1.2)) for x in (2.0, 1.0, 1.1)]
    first, none, last = slower_than_fastest(runs)
    assert none is None and first is not None and last is not None and first > 0.99 > last > 0.6
