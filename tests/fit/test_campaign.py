"""Plans of measurements: which rows they mean, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gpuir.cost.tile import predict
from gpuir.fit.benchmarks import BENCHMARKS, works_of
from gpuir.fit.campaign import read_plan, shipped_plan
from gpuir.ir.errors import UsageError
from gpuir.targets.load import load_target

GRID = '[[grid]]\nop = "softmax"\ndtypes = ["f32", "f16"]\nrows = [1, 8]\ncols = 64\n'
ROWS = '[[rows]]\nop = "matmul"\ndtypes = ["f32"]\nb = 2\ncolumns = ["m", "n", "k"]\n'
ROWS += "rows = [[1, 2, 3], [4, 5, 6]]\n"
DRAW = '[[draw]]\nop = ["add", "mul"]\ndtypes = ["f32"]\ncount = 20\n'
DRAW += "cells = { from = 8, to = 4096, step = 8 }\n"


@pytest.fixture
def plan(tmp_path: Path):
    def write(text: str):
        path = tmp_path / "plan.toml"
        path.write_text(text, encoding="utf-8")
        return read_plan(path)

    return write


def test_a_grid_is_all_combinations(plan):
    assert [str(c) for c in plan(GRID)] == [
        "softmax f32 rows=1 cols=64",
        "softmax f32 rows=8 cols=64",
        "softmax f16 rows=1 cols=64",
        "softmax f16 rows=8 cols=64",
    ]


def test_rows_are_as_listed(plan):
    assert [str(c) for c in plan(ROWS)] == [
        "matmul f32 b=2 m=1 n=2 k=3",
        "matmul f32 b=2 m=4 n=5 k=6",
    ]


def test_draws_are_of_the_seed(plan):
    problems = plan(DRAW)
    assert problems == plan(DRAW) != plan("seed = 1\n" + DRAW)
    assert Counter(c.op for c in problems).keys() == {"add", "mul"}
    sizes = [c.shape["cells"] for c in problems]
    assert all(n % 8 == 0 and 8 <= n <= 4096 for n in sizes)
    assert min(sizes) < 128 < 1024 < max(sizes)  # even on a logarithmic scale


def test_a_row_is_measured_once(plan):
    assert len(plan(GRID + GRID)) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the plan has no rows"),
        ("seed = -1\n" + GRID, "seed must be a whole number"),
        ("[grid]\n", "grid must be a list of tables"),
        (
            GRID.replace("[[grid]]", "[[gird]]"),
            "no entry has the name gird\n  fix:      did you mean grid",
        ),
        (GRID.replace("softmax", "sofmax"), "no such operator: sofmax"),
        (GRID.replace('op = "softmax"\n', ""), "op is missing"),
        (GRID.replace('["f32", "f16"]', '"f32"'), "dtypes must be a list of names"),
        (GRID.replace('"f16"', '"i8"'), "softmax cannot be measured in i8"),
        (GRID.replace("cols = 64\n", ""), "cols missing"),
        (GRID + "depth = 3\n", "no extent has the name depth"),
        (GRID.replace("64", "0"), "cols must be a positive whole number"),
        (GRID.replace("64", '"64"'), "cols must be a positive whole number"),
        (ROWS.replace("[4, 5, 6]", "[4, 5]"), "a row must have 3 numbers"),
        (ROWS.replace('columns = ["m", "n", "k"]\n', ""), "columns or rows are missing"),
        (DRAW.replace("count = 20\n", ""), "count must be a number of rows"),
        (DRAW.replace("from = 8", "form = 8"), "cells is not a valid range"),
        (DRAW.replace("to = 4096", "to = 4"), "cells runs from 8 down to 4"),
        ("[[grid]\n", "not valid TOML"),
    ],
)
def test_refused(plan, text, message):
    with pytest.raises(UsageError) as error:
        plan(text)
    assert message in str(error.value)
    assert error.value.where


def test_a_plan_that_is_not_there():
    with pytest.raises(UsageError, match="cannot read the plan"):
        read_plan(Path("nowhere.toml"))


@pytest.mark.parametrize("name", ["calibrate", "calibrate-cpu", "collect", "collect-cpu"])
def test_shipped_plans_hold_what_can_be_predicted(name: str):
    problems = read_plan(shipped_plan(name))
    target = load_target("cpu" if name.endswith("cpu") else "h100")
    if name.startswith("calibrate"):
        assert 55 <= len(problems) <= 70
    if name.startswith("collect"):
        assert {c.op for c in problems} >= {*BENCHMARKS} - {"attention_causal"}
    for problem in problems[:: max(1, len(problems) // 60)]:
        for work in works_of(problem.op, problem.dtype, {c: float(n) for c, n in problem.extents}):
            assert predict(work, target).time_s[0] > 0, problem
