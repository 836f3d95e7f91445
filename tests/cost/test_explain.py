"""Explanations: every formula gives its value, and the last line is the cost."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cost.kernels import gemm, mapped
from cost.test_predictors import TARGETS, kernels, tiled
from cost.works import flat
from hypothesis import given
from hypothesis import strategies as st

from gpuir.cost.data import OfArchitecture, table
from gpuir.cost.explain import LONGEST, SheetLine, explained, number, terms
from gpuir.cost.learned import Interval, Trained
from gpuir.cost.reading import work_of
from gpuir.cost.table import PREDICTORS
from gpuir.ir.errors import UsageError
from gpuir.ir.types import f16, f32
from gpuir.targets.load import load_target
from gpuir.targets.target import FrozenTable

A100 = load_target("a100")


NUMERAL = re.compile(r"(?<![\w.])\d+\.?\d*(?:e[+-]?\d+)?")


def value(formula: str) -> float:
    return eval(formula, {**vars(math), "min": min, "max": max})


@given(kernels(), st.sampled_from(TARGETS), st.sampled_from(["tile", "roofline"]))
def test_formulas_give_their_values(op, target, predictor):
    tile = tiled(op, target)
    lines = terms(op, tile, target, predictor=predictor)
    for line in lines:
        assert len(line.formula) < LONGEST + 20, line
        if line.formula:
            # the numbers in a formula have seven digits; a difference of two, or the logarithm of
            # one near 1, loses some
            whole = 1.0 if "log(" in line.formula else 0.0
            whole += abs(value(line.formula.replace(" - ", " + ")))
            near = pytest.approx(line.value, rel=1e-5, abs=1e-6 * whole)
            assert value(line.formula) == near, line
    assert lines[-1].name in ("time", "time in all")
    cost = PREDICTORS[predictor](op, tile, target)
    assert lines[-1].value == pytest.approx(cost.time_s, rel=1e-12)


@cache
def constants() -> frozenset[str]:
    """Numbers that the formulas' own code states, or the table of architectures."""
    found = {"0.5", "16"}  # bits / 2 and the like
    for path in (Path(__file__).parents[2] / "gpuir/cost").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
                found.add(number(node.value))
    return frozenset(found | {number(q.value) for q in table("architectures", OfArchitecture)})


@pytest.mark.slow
@given(kernels(), st.sampled_from(TARGETS))
def test_every_number_in_a_formula_has_a_line_before_it_or_a_source(op, target):
    """Or is an extent of the kernel or its tile, or a cell's bytes, or stands in the code or the
    specification. Numbers of three digits can be ratios of those."""
    tile, work = tiled(op, target), work_of(op)
    inside = (*work.extents.values(), *flat(work.detail).values(), work.simd_ops)
    known = {*constants()} | {number(x) for x in (*inside, *(x for _, x in tile.dims))}
    known |= {number(o.cell_bytes) for o in work.operands} | {number(work.density)}
    known |= {number(x) for x in (tile.stages, tile.warps, tile.split)}
    known |= {number(row.value) for row in target.rows() if isinstance(row.value, int | float)}
    for line in terms(op, tile, target):
        if line.name.startswith(("flops", "products", "bytes of")):
            known.add(number(line.value))
            continue
        long = {n for n in NUMERAL.findall(line.formula) if len(n.strip("0.")) > 4}
        assert line.source or long <= known, line
        known.add(number(line.value))


def test_lines_go_from_the_work_to_the_time():
    names = [
        line.name for line in terms(gemm(512, 512, 512), tiled(gemm(512, 512, 512), A100), A100)
    ]
    wanted = ["flops", "bytes of %a", "blocks", "waves", "peak", "dram bytes", "on the device",
              "launch", "compute", "memory", "latency", "time"]  # fmt: skip
    assert [n for n in names if n in wanted] == wanted


def test_listed_numbers_and_factors_say_where_they_come_from():
    op = mapped("add", f32, (1 << 20,), (1 << 20,))
    lines = {line.name: line for line in terms(op, tiled(op, A100), A100)}
    dram = lines["a100-sxm-40gb: dram.bytes_per_s"]
    assert (dram.value, dram.unit) == (A100.dram_bytes_per_s, "bytes/s")
    assert dram.source == A100.source("dram.bytes_per_s")
    assert "launch_s" in A100.sources and lines["launch"].source == A100.source("launch_s")
    (share,) = (x for name, x in lines.items() if name.endswith("hbm share"))
    assert share.source.startswith("of the listed bandwidth")
    lines = {line.name: line for line in terms(op, None, A100, predictor="roofline")}
    peak = lines["a100-sxm-40gb: flops_per_s.vector.f32"]
    assert peak.source == A100.source("flops_per_s.vector.f32")


def test_parts_of_a_long_formula_are_lines_before_it():
    """cuBLAS's products on V100 share what they read from DRAM in many ways: 45 lines of 76."""
    v100, op = load_target("v100-sxm-16gb"), gemm(240, 18385, 120, f32)
    names = [line.name for line in terms(op, tiled(op, v100), v100)]
    parts = [name for name in names if name.startswith("dram bytes: part")]
    assert parts == [f"dram bytes: part {i + 1}" for i in range(len(parts))] and len(parts) > 2
    assert names.index("dram bytes") > names.index(parts[-1])


def test_a_line_reads():
    op = mapped("add", f32, (1 << 20,), (1 << 20,))
    line = next(x for x in terms(op, tiled(op, A100), A100) if x.name == "bytes of %x0")
    assert str(line) == "bytes of %x0: 4194304 bytes = 1048576 * 4  [streamed, moved once]"


def test_what_cannot_be_explained_says_so():
    with pytest.raises(UsageError, match="has no tile"):
        terms(gemm(8, 8, 8, f16), None, A100)
    with pytest.raises(UsageError, match="cannot explain its predictions"):
        terms(gemm(8, 8, 8, f16), None, A100, predictor="mine@2")


def test_a_cost_of_another_version_states_itself():
    op, tile = gemm(512, 512, 512), tiled(gemm(512, 512, 512), A100)
    cost = PREDICTORS["tile"](op, tile, A100)
    lines = terms(op, tile, A100)
    assert explained(op, tile, A100, cost)[: len(lines)] == lines
    later = replace(cost, time_s=2 * cost.time_s, by="tile@9")
    lines = explained(op, tile, A100, later)
    assert lines[-1] == SheetLine("time", later.time_s, "s", source="as tile@9 says")
    assert {"waves", "compute", "memory", "latency"} <= {line.name for line in lines}


def test_the_ends_of_the_interval_name_their_backtest(monkeypatch):
    apart = Interval(np.array([-14.0]), np.log([0.9]), np.log([1.2]))
    model = {
        "tensor": Trained(
            dtypes=("f16",), kinds={"sm_90": ("gemm",)}, intervals={"unseen f16": apart}
        )
    }
    for room in ("tile", "explain"):
        monkeypatch.setattr(f"gpuir.cost.{room}.shipped", lambda: model)
    op, tile = gemm(512, 512, 512), tiled(gemm(512, 512, 512), A100)
    cost = PREDICTORS["tile"](op, tile, A100)
    assert cost.interval == pytest.approx((0.9 * cost.time_s, 1.2 * cost.time_s))
    assert cost.unseen == ("gpu",)
    *_, low, high = explained(op, tile, A100, cost)
    assert (low.value, high.value) == cost.interval
    assert low.source.endswith("backtest of the family tensor on GPUs left out, f16")


def test_the_backtest_of_a_calibration_is_named():
    """Where the target's own makes an interval wider, its ends and its source are told."""
    ends = FrozenTable({"stream.low": 0.2, "stream.high": 5.0})
    sources = FrozenTable({**A100.sources, "backtest": "calibrated on a busy machine"})
    mine = replace(A100, name="mine", backtest=ends, sources=sources)
    op = mapped("add", f32, (4096, 4096), (4096, 4096))
    for target in (A100, mine):
        tile = tiled(op, target)
        *_, low, high = explained(op, tile, target, PREDICTORS["tile"](op, tile, target))
        told = "at least x 0.2 to x 5 on mine: calibrated on a busy machine" in low.source
        assert told == (target is mine)
        assert (high.value / low.value >= 24.99) == (target is mine)
