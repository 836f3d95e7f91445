"""Tunes a kernel with meta-parameters, with gpuir's predictions as a prior.

    python examples/tune_a_template.py optuna
    python examples/tune_a_template.py kernel-tuner

The kernel is a matrix product of blocks, as a tutorial of Triton has it. Nothing is measured here:
`measure` makes a time up, a prediction that is wrong by up to a third. Put your benchmark there,
or, for Kernel Tuner, leave out `simulation_mode` and give the source of the kernel. Prints how many
configurations it took to come within 5 % of the best, and that configuration as a schedule.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import gpuir
from gpuir.cost.nest import Tiles
from gpuir.tune import kernel_tuner as adapter
from gpuir.tune.choices import Choices, choices_of
from gpuir.tune.optuna import sampler, suggest
from gpuir.tune.templates import Template

TEMPLATE = Template(
    "product",
    kernel=lambda launch: gpuir.kernel("gemm", **launch),
    tile=lambda p: Tiles(
        {"b": 1, "m": p["BLOCK_M"], "n": p["BLOCK_N"], "k": p["BLOCK_K"]}, p["stages"], p["warps"]
    ),
    parameters={
        "BLOCK_M": (32, 64, 128, 256),
        "BLOCK_N": (32, 64, 128, 256),
        "BLOCK_K": (32, 64),
        "stages": (2, 3, 4),
        "warps": (4, 8),
    },
)


def measure(found: Choices, values: dict[str, int]) -> float:
    """Seconds of one configuration, made up; infinite where it does not run."""
    place = found.find(values)
    assert place is not None
    wrong = 0.3 * np.sin(found.features[place] @ np.linspace(0.2, 1.0, len(found.names)))
    return float(found.predictions.time_s[place] * np.exp(wrong))


def with_optuna(found: Choices, trials: int) -> list[tuple[float, dict[str, int]]]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler(found, seed=0))

    def objective(trial: Any) -> float:
        seconds = measure(found, suggest(trial, found))
        if not np.isfinite(seconds):
            raise optuna.TrialPruned("does not run")
        return seconds

    study.optimize(objective, n_trials=trials)
    return [(t.value if t.value is not None else np.inf, t.params) for t in study.trials]


def with_kernel_tuner(found: Choices, trials: int) -> list[tuple[float, dict[str, int]]]:
    import kernel_tuner

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache.json"
        cache.write_text(json.dumps(replayed(found)))
        results, _ = kernel_tuner.tune_kernel(
            found.kernel.name,
            *("", 1, []),  # source, problem size and arguments: none, when a cache is replayed
            adapter.parameters(found),
            restrictions=[adapter.allows(found)],
            strategy=adapter.strategy(found, seed=0),
            strategy_options={"max_fevals": trials},
            simulation_mode=True,
            cache=str(cache),
            lang="CUDA",
            quiet=True,
        )
    times = [np.inf if "__error__" in r else r["time"] * 1e-3 for r in results]
    return [(t, {n: r[n] for n in found.names}) for t, r in zip(times, results, strict=True)]


def replayed(found: Choices) -> dict[str, Any]:
    """A cache of Kernel Tuner's, format 1.0: what `measure` says of every configuration, in ms."""
    timing = ("compile_time", "verification_time", "benchmark_time")
    rows: dict[str, dict[str, Any]] = {}
    for place in range(len(found)):
        values = found.values(place)
        seconds = measure(found, values)
        row = {**values, **dict.fromkeys((*timing, "strategy_time", "framework_time"), 0)}
        row["time"] = seconds * 1e3 if np.isfinite(seconds) else "RuntimeFailedConfig"
        rows[",".join(map(str, values.values()))] = row
    head = {"device_name": found.target.name, "kernel_name": found.kernel.name}
    keys = {"tune_params_keys": list(found.names), "tune_params": found.parameters}
    return {**head, "problem_size": [1], **keys, "objective": "time", "cache": rows}


def main(tuner: str, trials: int = 30) -> None:
    launch = {"m": 4096, "n": 4096, "k": 1024}
    found = choices_of(
        TEMPLATE, launch, "a100", allowed=lambda p: p["BLOCK_M"] * p["BLOCK_N"] <= 32768
    )
    tried = (with_optuna if tuner == "optuna" else with_kernel_tuner)(found, trials)
    best = min(measure(found, found.values(i)) for i in range(len(found)))
    first = next((i for i, (t, _) in enumerate(tried, 1) if t <= 1.05 * best), None)
    print(f"{len(found)} configurations, within 5 % of the best at number {first}")
    print(gpuir.show(found.schedule(min(tried, key=lambda pair: pair[0])[1])))


if __name__ == "__main__":
    main(sys.argv[1])
