"""What measurements on a busy machine give away, and that no worse target is written of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpuir.fit.calibrate import FamilyFit
from gpuir.fit.campaign import Problem
from gpuir.fit.collect import MeasuredRow
from gpuir.fit.steady import (
    check_gain,
    doubts,
    host_doubts,
    left_as_they_were,
    waited_s,
)
from gpuir.ir.errors import UsageError


def rows(*spreads: float) -> list[MeasuredRow]:
    problem = Problem("add", "f32", (("b", 1), ("h", 64)))
    measured = [MeasuredRow(problem, 1e-5, x, 20) for x in spreads]
    return [*measured, MeasuredRow(problem, float("nan"), 9.0, 0, "no memory")]


def test_repeats_that_differ_are_said():
    assert doubts(rows()) == doubts(rows(0.01, 0.02, 0.9)) == ""  # one of them may be
    assert "differ by 50 %" in doubts(rows(0.01, 0.5, 0.9))


def test_times_that_are_late_alike_are_said(tmp_path: Path):
    """Beside other programs a kernel of 14 us took 20 ms each time, a slice of the scheduler's."""
    steady = rows(0.002, 0.001, 0.003)
    assert doubts(steady, 0.05) == "" and "waited 1.6 s" in doubts(steady, 1.6)
    for thread, text in (("7", "900 1500000000 3\n"), ("8", "10 500000000 1\n"), ("9", "")):
        path = tmp_path / thread / "schedstat"
        path.parent.mkdir()
        path.write_text(text)
    assert waited_s(tmp_path) == 2.0
    assert waited_s(tmp_path / "none") == 0.0


def fit(before: float, after: float, count: int = 10) -> FamilyFit:
    return FamilyFit("gemm", count, before, after, {}, 0)


def test_a_target_that_is_worse_is_refused():
    check_gain([])
    check_gain([fit(0.3, 0.1)])
    check_gain([fit(0.1, 0.1)])  # a GPU that is known stays as it is
    check_gain([fit(0.3, 0.1), fit(0.1, 0.11)])
    for worse in ([fit(0.1, 0.2)], [fit(9.0, 2.32)], [fit(0.3, 0.29, 1), fit(0.1, 0.2)]):
        with pytest.raises(UsageError, match="is not written"):
            check_gain(worse)


def test_what_would_be_worse_is_left_and_said():
    """A family alone that is refused stays as it was; where all are, and no rate was measured, the
    file would say nothing."""
    worse = FamilyFit("conv", 10, 0.1, 0.1, {}, 0, kept=True, refused=0.12)
    (text,) = left_as_they_were([fit(0.3, 0.1), worse])
    assert text.startswith("conv is not calibrated") and "12.0 %" in text and "10.0 %" in text
    check_gain([worse])
    same = FamilyFit("gemm", 10, 0.1, 0.1, {}, 0, kept=True)
    (text,) = left_as_they_were([fit(0.3, 0.1), same, replace(same, family="rows")])
    assert text.startswith("not calibrated") and text.endswith("better: gemm, rows")
    check_gain([fit(0.3, 0.1), worse], has_numbers=False)
    check_gain([fit(0.1, 0.1)], has_numbers=False)
    with pytest.raises(UsageError, match="is not written"):
        check_gain([worse], has_numbers=False)
    with pytest.raises(UsageError, match="is not written"):
        check_gain([FamilyFit("conv", 10, 0.1, 0.1, {}, 0, refused=0.5)])


def test_rounds_of_a_host_that_differ_are_said():
    assert host_doubts(0.05) == ""
    assert "differ by 60 %" in host_doubts(0.6)
