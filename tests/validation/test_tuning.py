"""Rankings of tuned kernels: scores that a hand computes, and what the public tables give."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from gpuir.ir.errors import UsageError
from validation.tuned import read
from validation.tuning import kendall, predicted, score, totals

pq = pytest.importorskip("pyarrow.parquet", reason="pip install 'gpuir[eval]'")
pa = pytest.importorskip("pyarrow")

DATA = Path(__file__).parents[3] / "shared" / "data" / "tuning"
measured = pytest.mark.skipif(
    not DATA.is_dir(), reason="the public tables are not beside the checkout"
)


def slow_kendall(x, y):
    pairs = list(combinations(range(len(x)), 2))
    signs = [np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs]
    free_x = sum(x[i] != x[j] for i, j in pairs)
    free_y = sum(y[i] != y[j] for i, j in pairs)
    return sum(signs) / np.sqrt(free_x * free_y)


@pytest.mark.parametrize("seed", range(5))
def test_kendall_by_all_pairs(seed):
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 12, 40).astype(float), random.integers(0, 12, 40).astype(float)
    assert kendall(x, y) == pytest.approx(slow_kendall(x, y), abs=1e-12)
    assert kendall(x, x) == pytest.approx(1.0) and kendall(x, -x) == pytest.approx(-1.0)


def sweep(tmp_path: Path, **columns) -> str:
    """A sweep of convolutions on a GPU, whose times are as predicted unless they are given."""
    x, y, tile = (g.reshape(-1) for g in np.meshgrid([32, 64, 128], [1, 2, 4, 8], [1, 2, 4]))
    table = {
        "kernel": ["convolution_a"] * len(x),
        "gpu": ["RTX-A4000"] * len(x),
        "block_size_x": x,
        "block_size_y": y,
        "tile_size_x": np.ones_like(x),
        "tile_size_y": tile,
        **{name: np.zeros_like(x) for name in ("read_only", "use_padding", "use_shmem", "staged")},
        "status": ["ok"] * len(x),
        "median_ms": np.ones(len(x)),
        **columns,
    }
    path = tmp_path / "sweep.parquet"
    pq.write_table(pa.table(table), path)
    return str(path)


def test_a_sweep_that_is_as_predicted_has_no_regret(tmp_path):
    (problem,), skipped = read([sweep(tmp_path)])
    time_s, _ = predicted(problem, slice(None))
    (problem,), _ = read([sweep(tmp_path, median_ms=1e3 * time_s)])
    (found,), won = score([problem])
    assert (found.regret_1, found.regret_10, won, skipped) == (0.0, 0.0, [], [])
    assert found.tau == pytest.approx(1.0) and found.coverage == 100.0
    assert found.bias == pytest.approx(0.0, abs=1e-6)
    backwards = 1e3 * time_s.max() * time_s.min() / time_s
    (problem,), _ = read([sweep(tmp_path, median_ms=backwards)])
    (found,), _ = score([problem])
    assert found.tau == pytest.approx(-1.0)
    assert found.regret_1 == pytest.approx(100 * (time_s.max() / time_s.min() - 1))


def test_rows_that_are_not_scored_say_why(tmp_path):
    status = ["ok"] * 30 + ["compile_failed"] * 6
    (problem,), skipped = read([sweep(tmp_path, status=status)])
    assert problem.count == 30
    assert [(s.rows, s.reason) for s in skipped] == [(6, "did not compile, or did not run")]
    _, skipped = read([sweep(tmp_path, gpu=["RTX-A4001"] * 36)])
    assert [s.reason for s in skipped] == ["no target for RTX-A4001"]
    _, skipped = read([sweep(tmp_path, kernel=["nbody"] * 36)])
    assert [s.reason for s in skipped] == ["no template for nbody"]
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="not a table of tuned kernels"):
        read([str(other)])


def test_winners_are_ranked_in_their_space(tmp_path):
    space = {
        "BLOCK_SIZE_M": [64, 128],
        "BLOCK_SIZE_N": [64, 128],
        "BLOCK_SIZE_K": [64],
        "GROUP_SIZE_M": [1, 8],
        "num_warps": [4, 8],
        "num_stages": [3, 4],
    }
    (tmp_path / "space_triton.json").write_text(json.dumps({"mine": space}))
    row = {
        "kernel": "w8a8_block_gemm",
        "gpu": "H100-SXM5-80GB",
        "dtype": "fp8_w8a8",
        "m": 4096,
        "n": 4096,
        "k": 4096,
        "block_n": 128,
        "block_k": 128,
        "experts": None,
        "topk": None,
        "space": "mine",
        "in_space": True,
        **{name: values[-1] for name, values in space.items()},
    }
    outside = {**row, "num_stages": 7}
    path = tmp_path / "best.parquet"
    pq.write_table(pa.Table.from_pylist([row, {**row, "m": 64}, outside]), path)
    (problem,), skipped = read([str(path)])
    assert (problem.count, len(problem.winners)) == (32, 2)
    assert [s.rows for s in skipped] == [1]
    _, (found,) = score([problem])
    time_s, _ = predicted(problem, slice(None))
    ranks = [(row < row[w]).sum() / 32 for row, w in zip(time_s, problem.winners, strict=True)]
    assert found.mean_rank == pytest.approx(np.mean(ranks), abs=0.02)
    assert found.problems == 2 and found.illegal == 0
    none = replace(problem, winners=problem.winners[:0])  # every row of the table is left out
    assert score([none]) == ([], [])


@measured
@pytest.mark.slow
def test_public_tables_rank_as_documented():
    """Winners of Triton's tuners, and products and convolutions of Kernel Tuner: all were in view
    of the fit. docs/explanation/kernels.md has what is left out."""
    files = ("sweeps_gemm", "sweeps_convolution", "best_triton")
    problems, _ = read([str(DATA / f"{name}.parquet") for name in files])
    few = [p for p in problems if p.time_s is not None or len(p.winners) < 40]
    found = totals(*score(few))
    assert found["winner_in_best_tenth"] > 80
    assert found["regret_1"] < 35 and found["tau"] > 0.5
