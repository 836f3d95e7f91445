"""Optuna: what to choose from as distributions, predictions as a prior, results as schedules.

    found = choices(gpuir.kernel("gemm", m=4096, n=4096, k=4096), "a100")
    study = optuna.create_study(sampler=sampler(found))
    study.optimize(objective, n_trials=30)
    print(gpuir.show(found.schedule(study.best_params)))

Optuna: Akiba et al., KDD 2019; MIT licence.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from gpuir.ir.door import NUMBER, takes, whole
from gpuir.ir.errors import UsageError
from gpuir.tune.choices import CHOICES, Choices


@takes(found=CHOICES)
def distributions(found: Choices) -> dict[str, Any]:
    """Optuna's distributions of the parameters, for `study.ask(distributions(found))`. Some of
    their products may be no configuration: `found.find(trial.params)` is then None."""
    categorical = _optuna().distributions.CategoricalDistribution
    return {name: categorical(tuple(values)) for name, values in found.parameters.items()}


@takes(found=CHOICES)
def suggest(trial: Any, found: Choices) -> dict[str, int]:
    """A trial's configuration; the trial is pruned where its parameters make none."""
    values = {n: trial.suggest_categorical(n, v) for n, v in found.parameters.items()}
    if found.find(values) is None:
        raise _optuna().TrialPruned(f"{values} is not a configuration of {found.kernel.name}")
    return values


@takes(found=CHOICES, count=whole(1))
def enqueue(study: Any, found: Choices, count: int = 8) -> None:
    """Has a study of any sampler begin with the configurations that are predicted to be fastest."""
    for place in found.predictions.order[:count].tolist():
        study.enqueue_trial(found.values(place), skip_if_exists=True)


@takes(found=CHOICES, share=NUMBER, seed=whole())
def sampler(found: Choices, *, share: float = 0.1, seed: int | None = None) -> Any:
    """A sampler of Optuna's that asks for what is expected to be fastest.

    The first trial is of the best prediction; each measurement then corrects the predictions of
    what is like it. In a `share` of the trials it asks for any that was not tried. Every trial is
    a configuration. For one objective, to be minimised: seconds, or what grows as they do.
    """
    if not 0.0 <= share <= 1.0:
        raise UsageError(
            "the share of random trials is out of range", expected="0 to 1", found=str(share)
        )
    optuna = _optuna()
    chance = np.random.default_rng(seed)
    others = optuna.samplers.RandomSampler(seed)
    space = distributions(found)

    class Predicted(optuna.samplers.BaseSampler):  # pyright: ignore[reportUntypedBaseClass]
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return space

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            place = found.next(measured(study, found), chance, share)
            return {} if place is None else found.values(place)

        def sample_independent(self, study: Any, trial: Any, name: str, of: Any) -> Any:
            return others.sample_independent(study, trial, name, of)

        def reseed_rng(self) -> None:
            nonlocal chance
            chance = np.random.default_rng()

    return Predicted()


def measured(study: Any, found: Choices) -> dict[int, float]:
    """What a study has measured, by place; infinite for trials that failed, were pruned, or run."""
    if [d.name for d in study.directions] != ["MINIMIZE"]:
        raise UsageError(
            "the study must minimize one number",
            expected='optuna.create_study(direction="minimize")',
            found=", ".join(d.name.lower() for d in study.directions),
        )
    best: dict[int, float] = {}
    for trial in study.get_trials(deepcopy=False):
        values: Mapping[str, Any] = trial.params
        if all(n in values for n in found.names) and (place := found.find(values)) is not None:
            done = trial.state.name == "COMPLETE" and trial.value > 0
            seconds = float(trial.value) if done else np.inf
            best[place] = min(seconds, best.get(place, np.inf))
    return best


def _optuna() -> Any:
    try:
        return import_module("optuna")
    except ImportError as error:
        raise UsageError(
            "Optuna is not installed", found=str(error), fix="pip install 'gpuir[tune]'"
        ) from error
