"""What tuners choose from, by hand where it can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tuned_kernels import LAUNCH, PRODUCT, made_up, product

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.tune.choices import choices, choices_of
from gpuir.tune.correct import differences


def test_a_template_s_parameters_are_the_columns():
    found = product()
    assert found.parameters == {n: list(v) for n, v in PRODUCT.parameters.items()}
    assert len(found) == (16 - 1) * 2 * 3 * 2  # all but the one of 256 by 256
    values = found.values(7)
    assert found.find(values) == 7 and found.find(values | {"BM": 7}) is None


def test_candidates_of_a_kernel_are_by_the_names_of_a_tile():
    gemm = gpuir.kernel("gemm", m=4096, n=4096, k=4096)
    found = choices(gemm, "a100-sxm-80gb")
    assert {"m", "n", "k", "stages", "warps"} <= set(found.names)
    assert np.isfinite(found.predictions.time_s).all()


def test_a_configuration_is_a_schedule_whose_text_parses():
    found = product()
    schedule = found.schedule({"BM": 128, "BN": 64, "BK": 32, "stages": 3, "warps": 4})
    text = gpuir.show(schedule)
    assert "%gemm: tile(b=1, m=128, n=64, k=32; stages=3, warps=4)" in text
    assert gpuir.parse_schedule(text) == schedule


def test_what_is_no_configuration_is_said():
    found = product()
    with pytest.raises(UsageError, match="no such configuration"):
        found.schedule({"BM": 256, "BN": 256, "BK": 32, "stages": 3, "warps": 4})
    with pytest.raises(UsageError, match="has no 'BM'") as e:
        found.find({"BN": 64, "BMM": 64, "BK": 32, "stages": 3, "warps": 4})
    assert "BMM" in e.value.fix
    with pytest.raises(UsageError, match="rejects all configurations"):
        choices_of(PRODUCT, LAUNCH, "a100-sxm-80gb", lambda c: c["BM"] < 0)
    many = replace(PRODUCT, parameters={n: range(1, 101) for n in PRODUCT.parameters})
    with pytest.raises(UsageError, match="10,000,000,000 configurations"):
        choices_of(many, LAUNCH, "a100-sxm-80gb")


def test_the_first_is_the_best_prediction_and_none_comes_twice():
    found, chance = product(), np.random.default_rng(0)
    seconds = list(made_up(found).values())
    measured: dict[int, float] = {}
    while (place := found.next(measured, chance, share=0.2)) is not None:
        assert place not in measured
        measured[place] = seconds[place]
    first = next(iter(measured))
    assert len(measured) == len(found) and first == found.predictions.order[0]


def test_what_is_not_legal_comes_last():
    found, chance = product(), np.random.default_rng(0)
    measured: dict[int, float] = {}
    for _ in range(len(found)):
        place = found.next(measured, chance, share=0.0, learns=False)
        assert place is not None
        measured[place] = 1.0
    legal = np.isfinite(found.predictions.time_s)[list(measured)]
    assert 0 < legal.sum() < len(found) and legal[: legal.sum()].all()


def test_a_measurement_says_most_of_what_is_like_it():
    points = np.array([[0.0], [0.1], [3.0]])
    added, sd = differences(points, points[:1], np.array([1.0]))
    assert added[0] == pytest.approx(1.0, abs=0.01)
    assert added[0] > added[1] > added[2] > 0.9  # all are wrong by much the same
    assert sd[0] < sd[1] < sd[2]


def test_corrections_lead_to_the_best_although_the_model_is_wrong():
    found, chance = product(), np.random.default_rng(0)
    seconds = list(made_up(found, seed=3).values())
    measured: dict[int, float] = {}
    for _ in range(25):
        place = found.next(measured, chance, share=0.1)
        assert place is not None
        measured[place] = seconds[place]
    assert min(measured.values()) <= 1.05 * min(seconds)
