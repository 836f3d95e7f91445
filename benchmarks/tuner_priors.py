"""Measured sweeps replayed: trials to within 5 % of the best, with gpuir's predictions and without.

    python benchmarks/tuner_priors.py ../shared/data/tuning --seeds 5 --most 200

A line a sweep of Kernel Tuner's benchmarks (README.md there) on a GPU that gpuir has: the median
over seeds of the trials that Optuna takes with our sampler and with its TPE, and that Kernel Tuner
takes with our strategy and with its random sample and genetic algorithm; at a search of half so
many trials, how many times the best its best is. Needs `gpuir[eval,kernel-tuner,tune]`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.tune import kernel_tuner as adapter
from gpuir.tune.choices import Choices, choices_of
from gpuir.tune.optuna import sampler, suggest
from gpuir.tune.published import TEMPLATES

IMAGE = {"y": 4096, "x": 4096, "i": 15, "j": 15}
PRODUCT = {"m": 4096, "n": 4096, "k": 4096}
SWEEPS = {
    "convolution_a/A100-PCIE-40GB": ("kernel_tuner.convolution", IMAGE, "a100-pcie-40gb"),
    "convolution_a/RTX-A4000": ("kernel_tuner.convolution", IMAGE, "rtx-a4000"),
    "convolution_a/W6600": ("kernel_tuner.convolution", IMAGE, "w6600"),
    "gemm/RTX3090": ("clblast.xgemm", PRODUCT, "rtx3090"),
}
Seconds = np.ndarray[Any, np.dtype[np.float64]]


def read(data: Path, sweep: str) -> tuple[Choices, Seconds]:
    """What was measured, its predictions, and the seconds of each: infinite where it failed."""
    from pyarrow import parquet

    kernel, gpu = sweep.split("/")
    template, launch, target = SWEEPS[sweep]
    file = data / f"sweeps_{kernel.partition('_')[0]}.parquet"
    table = parquet.read_table(file, filters=[("kernel", "=", kernel), ("gpu", "=", gpu)])
    names = list(TEMPLATES[template].parameters)
    rows = zip(*(table[n].to_pylist() for n in names))
    times = zip(table["status"].to_pylist(), table["median_ms"].to_pylist())
    seconds = dict(zip(rows, (t * 1e-3 if status == "ok" else np.inf for status, t in times)))
    whole = choices_of(TEMPLATES[template], launch, target)
    found = whole.only([i for i, r in enumerate(whole.rows.tolist()) if tuple(r) in seconds])
    return found, np.array([seconds[tuple(r)] for r in found.rows.tolist()])


def with_optuna(found: Choices, seconds: Seconds, how: Any, trials: int) -> list[float]:
    import optuna

    study = optuna.create_study(sampler=how)

    def objective(trial: Any) -> float:
        place = found.find(suggest(trial, found))
        if place is None or not np.isfinite(seconds[place]):
            raise optuna.TrialPruned("does not run")
        return float(seconds[place])

    study.optimize(objective, n_trials=trials)
    return [np.inf if t.value is None else t.value for t in study.trials]


def with_kernel_tuner(cache: Path, found: Choices, trials: int, **how: Any) -> list[float]:
    import kernel_tuner

    results, _ = kernel_tuner.tune_kernel(
        *(found.kernel.name, "", 1, [], adapter.parameters(found)),
        restrictions=[adapter.allows(found)],
        strategy_options={"max_fevals": trials},
        simulation_mode=True,
        cache=str(cache),
        lang="CUDA",
        quiet=True,
        **how,
    )
    return [np.inf if "__error__" in r else r["time"] * 1e-3 for r in results]


def write(cache: Path, found: Choices, seconds: Seconds) -> None:
    """The sweep as a cache file of Kernel Tuner's, in ms."""
    rows: dict[str, Any] = {}
    for row, t in zip(found.rows.tolist(), seconds.tolist(), strict=True):
        time = t * 1e3 if np.isfinite(t) else "RuntimeFailedConfig"
        timing = dict.fromkeys(("compile_time", "verification_time", "benchmark_time"), 0)
        values = dict(zip(found.names, row, strict=True))
        rows[",".join(map(str, row))] = {**values, **timing, "time": time}
    head = {"device_name": found.target.name, "kernel_name": found.kernel.name}
    keys = {"tune_params_keys": list(found.names), "tune_params": found.parameters}
    cache.write_text(
        json.dumps({**head, "problem_size": [1], **keys, "objective": "time", "cache": rows})
    )


def line(runs: list[list[float]], best: float, most: int) -> str:
    """Median trials to within 5 %, and the best of half the trials over the best there is."""
    first = [next((i for i, t in enumerate(r, 1) if t <= 1.05 * best), most + 1) for r in runs]
    half = [min(r[: most // 2]) / best for r in runs]
    trials = float(np.median(first))
    return f"{f'{trials:.0f}' if trials <= most else f'> {most}':>8}{np.median(half):8.2f}"


def ways(
    found: Choices, seconds: Seconds, cache: Path, most: int
) -> dict[str, Callable[[int], list[float]]]:
    """Searches by name: from a seed to the seconds of each trial."""
    from optuna.samplers import TPESampler

    def optuna(how: Any) -> list[float]:
        return with_optuna(found, seconds, how, most)

    def tuner(strategy: Any, seed: int) -> list[float]:
        return with_kernel_tuner(cache, found, most, strategy=strategy, seed=seed)

    return {
        "optuna, ours": lambda s: optuna(sampler(found, seed=s)),
        "optuna, TPE": lambda s: optuna(TPESampler(seed=s)),
        "kernel tuner, ours": lambda s: tuner(adapter.strategy(found, seed=s), s),
        "kernel tuner, random": lambda s: tuner("random_sample", s),
        "kernel tuner, genetic": lambda s: tuner("genetic_algorithm", s),
    }


def main() -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("data", type=Path)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--most", type=int, default=200)
    options.add_argument("--sweeps", default=",".join(SWEEPS))
    given = options.parse_args()
    for sweep in given.sweeps.split(","):
        found, seconds = read(given.data, sweep)
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) / "cache.json"
            write(cache, found, seconds)
            for name, way in ways(found, seconds, cache, given.most).items():
                runs = [way(seed) for seed in range(given.seeds)]
                found_in = line(runs, float(seconds.min()), given.most)
                print(f"{sweep:30} {name:22}{found_in}", flush=True)


if __name__ == "__main__":
    main()
