"""Optuna, run for real: on sweeps made up, and replaying measured ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tuned_kernels import convolution, made_up, product

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.tune.choices import Choices
from gpuir.tune.optuna import distributions, enqueue, measured, sampler, suggest

optuna = pytest.importorskip("optuna", reason="needs gpuir[tune]")
optuna.logging.set_verbosity(optuna.logging.ERROR)


def tuned(found: Choices, seconds: dict[tuple[int, ...], float], how: Any, trials: int) -> Any:
    """A study after so many trials; what fails is pruned."""
    study = optuna.create_study(sampler=how)

    def objective(trial: Any) -> float:
        values = suggest(trial, found)
        t = seconds[tuple(values[n] for n in found.names)]
        if not np.isfinite(t):
            raise optuna.TrialPruned("did not run")
        return t

    study.optimize(objective, n_trials=trials)
    return study


def test_the_sampler_begins_with_the_best_and_gives_configurations_alone():
    found = product()
    study = tuned(found, made_up(found), sampler(found, share=0.3, seed=1), 30)
    first, *others = study.trials
    assert found.find(first.params) == found.predictions.order[0]
    assert all(found.find(t.params) is not None for t in others)
    assert len({tuple(t.params.values()) for t in study.trials}) == 30
    text = gpuir.show(found.schedule(study.best_params))
    assert text.startswith("schedule @gemm for a100-sxm-80gb {")


def test_it_needs_fewer_trials_than_without_predictions():
    found = product()
    seconds = made_up(found, seed=2)
    goal = 1.05 * min(seconds.values())

    def trials(how: Any) -> int:
        study = tuned(found, seconds, how, 60)
        return next((t.number for t in study.trials if t.value and t.value <= goal), 60)

    ours = [trials(sampler(found, seed=seed)) for seed in range(5)]
    random = [trials(optuna.samplers.RandomSampler(seed)) for seed in range(5)]
    assert sum(ours) < sum(random) / 2


def test_any_sampler_may_begin_with_the_best_predictions():
    found = product()
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    enqueue(study, found, 4)
    study.optimize(lambda trial: float(sum(suggest(trial, found).values())), n_trials=6)
    asked = [found.find(t.params) for t in study.trials]
    assert asked[:4] == found.predictions.order[:4].tolist()


def test_ask_and_tell():
    found = product()
    study = optuna.create_study(sampler=sampler(found, seed=0))
    seconds = made_up(found)
    for _ in range(12):
        trial = study.ask(distributions(found))
        place = found.find(trial.params)
        assert place is not None and place not in list(measured(study, found))[:-1]
        study.tell(trial, seconds[tuple(found.rows[place].tolist())])
    assert len(measured(study, found)) == 12


def test_when_all_were_tried_it_goes_on_at_random():
    found = product().only(range(3))
    study = tuned(found, made_up(product()), sampler(found, seed=0), 6)
    assert len({tuple(t.params.values()) for t in study.trials[:3]}) == 3


def test_bad_input_is_said():
    found = product()
    with pytest.raises(UsageError, match="share of random trials"):
        sampler(found, share=3)
    study = optuna.create_study(direction="maximize", sampler=sampler(found))
    with pytest.raises(UsageError, match="the study must minimize one number"):
        study.ask(distributions(found))


def test_a_measured_sweep_replayed():
    """Convolution of 4096 by 4096 on an A100, configurations that fail among them."""
    found, seconds = convolution("A100-PCIE-40GB", "a100-pcie-40gb")
    best = tuned(found, seconds, sampler(found, seed=0), 40).best_value
    assert best < 2.0 * min(seconds.values())  # the median is 3.3 times the best
