"""Explanations: every formula gives its value, and the last line is the cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from cost.kernels import gemm, mapped
from cost.test_predictors import TARGETS, kernels, tiled
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuir.cost.explain import Line, explained, terms
from gpuir.cost.table import PREDICTORS
from gpuir.ir.errors import UsageError
from gpuir.ir.types import f16, f32
from gpuir.targets.load import load_target

A100 = load_target("a100")


@settings(deadline=None, max_examples=200)
@given(kernels(), st.sampled_from(TARGETS), st.sampled_from(["tile", "roofline"]))
def test_formulas_give_their_values(op, target, predictor):
    tile = tiled(op, target)
    lines = terms(op, tile, target, predictor=predictor)
    for line in lines:
        if line.formula:
            value = eval(line.formula, {**vars(math), "min": min, "max": max})
            # the numbers in a formula have seven digits; a difference of two loses some
            slack = 1e-6 * lines[-1].value if line.name == "exposed" else 0.0
            assert value == pytest.approx(line.value, rel=1e-5, abs=slack), line
        else:
            assert line.source or line.value is not None
    assert lines[-1].name == "time"
    cost = PREDICTORS[predictor](op, tile, target)
    assert lines[-1].value == pytest.approx(cost.time_s, rel=1e-12)


def test_lines_go_from_the_work_to_the_time():
    names = [
        line.name for line in terms(gemm(512, 512, 512), tiled(gemm(512, 512, 512), A100), A100)
    ]
    wanted = ["flops", "bytes of %a", "blocks", "waves", "peak", "dram bytes", "launch", "compute",
              "memory", "time"]  # fmt: skip
    assert [n for n in names if n in wanted] == wanted


def test_listed_numbers_say_where_they_come_from():
    lines = {
        line.name: line for line in terms(gemm(64, 64, 64), tiled(gemm(64, 64, 64), A100), A100)
    }
    assert lines["peak"].source == (
        f"a100-sxm-40gb tensor.f16: {A100.source('flops_per_s.tensor.f16')}"
    )
    assert "assumed" in lines["launch"].source


def test_a_line_reads():
    op = mapped("add", f32, (1 << 20,), (1 << 20,))
    line = next(x for x in terms(op, tiled(op, A100), A100) if x.name == "bytes of %x0")
    assert str(line) == "bytes of %x0: 4194304 bytes = 1048576 * 4  [streamed, moved once]"


def test_what_cannot_be_explained_says_so():
    with pytest.raises(UsageError, match="has no tile"):
        terms(gemm(8, 8, 8, f16), None, A100)
    with pytest.raises(UsageError, match="does not explain itself"):
        terms(gemm(8, 8, 8, f16), None, A100, predictor="mine@2")


def test_a_cost_of_another_version_states_itself():
    op, tile = gemm(512, 512, 512), tiled(gemm(512, 512, 512), A100)
    cost = PREDICTORS["tile"](op, tile, A100)
    assert explained(op, tile, A100, cost) == terms(op, tile, A100)
    later = replace(cost, time_s=2 * cost.time_s, by="tile@9")
    lines = explained(op, tile, A100, later)
    assert lines[-1] == Line("time", later.time_s, "s", source="as tile@9 says")
    assert {"waves", "compute", "memory", "latency"} <= {line.name for line in lines}
