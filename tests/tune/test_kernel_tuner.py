"""Kernel Tuner, run for real on cache files: simulated searches, which need no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tuned_kernels import convolution, made_up, product, write_cache

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.tune.choices import Choices
from gpuir.tune.kernel_tuner import allows, best, parameters, strategy

kernel_tuner = pytest.importorskip("kernel_tuner", reason="needs gpuir[kernel-tuner]")
pytestmark = pytest.mark.filterwarnings("ignore:None of the tunable parameters specify")


def tuned(
    found: Choices,
    seconds: dict[tuple[int, ...], float],
    folder: Path,
    visits: int,
    restrictions: Any = None,
    **how: Any,
) -> list[dict[str, Any]]:
    write_cache(folder / "cache.json", found, seconds)
    results, _ = kernel_tuner.tune_kernel(
        *(found.kernel.name, "", 1, [], parameters(found)),
        restrictions=[allows(found)] if restrictions is None else restrictions,
        strategy_options={"max_fevals": visits},
        simulation_mode=True,
        cache=str(folder / "cache.json"),
        lang="CUDA",
        quiet=True,
        **how,
    )
    return results


def fastest(results: list[dict[str, Any]]) -> float:
    """Seconds of the best."""
    return min(r["time"] for r in results if "__error__" not in r) * 1e-3


def test_it_visits_in_predicted_order(tmp_path: Path):
    found = product()
    how = strategy(found, share=0.0, learns=False)
    results = tuned(found, made_up(found), tmp_path, 20, strategy=how)
    assert [found.find(r) for r in results] == found.predictions.order[:20].tolist()


def test_a_share_of_the_visits_is_of_any(tmp_path: Path):
    found = product()
    how = strategy(found, share=0.3, learns=False, seed=0)
    visited = [found.find(r) for r in tuned(found, made_up(found), tmp_path, 40, strategy=how)]
    assert len(set(visited)) == 40
    far = [p for p in visited if p not in found.predictions.order[:40].tolist()]
    assert 4 <= len(far) <= 20


def test_it_is_nearer_the_best_than_a_random_search(tmp_path: Path):
    found = product()
    seconds = made_up(found, seed=2)
    ours = fastest(tuned(found, seconds, tmp_path, 15, strategy=strategy(found, seed=0)))
    how: dict[str, Any] = {"strategy": "random_sample"}
    random = [fastest(tuned(found, seconds, tmp_path, 15, seed=s, **how)) for s in range(5)]
    assert ours <= 1.05 * min(seconds.values()) and ours < np.mean(random)


def test_it_ends_when_all_were_visited(tmp_path: Path):
    found = product()
    results = tuned(found, made_up(found), tmp_path, 1000, strategy=strategy(found, seed=0))
    assert len(results) == len(found)
    failed = sum("__error__" in r for r in results)
    assert failed == np.isinf(found.predictions.time_s).sum() > 0


def test_a_smaller_space_of_kernel_tuner_s_own(tmp_path: Path):
    found = product()
    mine = [allows(found), "BM <= 64"]
    how = strategy(found, share=0.0, learns=False)
    results = tuned(found, made_up(found), tmp_path, 10, mine, strategy=how)
    assert max(r["BM"] for r in results) == 64


def test_a_larger_one_is_refused(tmp_path: Path):
    found = product()
    with pytest.raises(UsageError, match="12 configurations in the search space") as e:
        tuned(found, made_up(found), tmp_path, 10, [], strategy=strategy(found))
    assert "allows(found)" in str(e.value)


def test_the_best_is_a_schedule(tmp_path: Path):
    found = product()
    results = tuned(found, made_up(found), tmp_path, 20, strategy=strategy(found, seed=0))
    text = gpuir.show(best(results, found))
    assert text.startswith("schedule @gemm for a100-sxm-80gb {\n  %gemm: tile(b=1, m=")
    with pytest.raises(UsageError, match="no configuration ran"):
        best([r for r in results if "__error__" in r], found)
    with pytest.raises(UsageError, match="share of random visits"):
        strategy(found, share=-1)


def test_a_measured_sweep_replayed(tmp_path: Path):
    """Convolution of 4096 by 4096 on an A100, configurations that fail among them."""
    found, seconds = convolution("A100-PCIE-40GB", "a100-pcie-40gb")
    results = tuned(found, seconds, tmp_path, 60, strategy=strategy(found, seed=0))
    assert len(results) == 60
    assert fastest(results) < 2.0 * min(seconds.values())  # the median is 3.3 times the best
