"""Training: it finds the factors that made the measurements, and gives the same weights twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuir.cost import sized
from gpuir.cost.families import FAMILIES
from gpuir.cost.learned import Trained, correction, factors, read, written
from gpuir.cost.tile import familiar, predict
from gpuir.fit.backtest import Backtests, Misses, halves, leave_one_out, with_intervals
from gpuir.fit.batch import Clock, MeasuredBatch
from gpuir.fit.learn import fit, samples, together
from gpuir.ir.types import f32
from gpuir.targets.load import load_target

pytest.importorskip("torch")

STREAM = FAMILIES["stream"]
GPUS = ("a100-pcie", "v100-pcie-32gb", "t4")
TRUE = {"hbm share": 0.7, "gddr share": 0.6}  # of the listed bandwidth


def measured(gpu: str, seed: int, noise: float = 0.0, rows: int = 300) -> MeasuredBatch:
    """Additions as a GPU would run them whose streams reach the shares in `TRUE`."""
    target = load_target(gpu)
    draw = np.random.default_rng(seed)
    cells = np.exp(draw.uniform(np.log(1e7), np.log(4e8), rows)).round()
    adds = sized.pointwise(cells, [f32, f32], [f32])
    start = {f.name: f.value for f in STREAM.factors}
    truth = {"stream": Trained(factors={**start, **TRUE})}
    time_s = predict(adds, target, model=truth).time_s * np.exp(draw.normal(0, noise, rows))
    return MeasuredBatch("made", "add", gpu, "fp32", target, (adds,), np.arange(rows), time_s)


def test_factors_are_found_again():
    model = fit([measured(gpu, i) for i, gpu in enumerate(GPUS)], families=["stream"])
    for gpu in GPUS:
        target = load_target(gpu)
        found = factors(STREAM, target, model)
        share = "gddr share" if target.dram.kind.startswith("GDDR") else "hbm share"
        assert found[share] == pytest.approx(TRUE[share], rel=0.03)


def test_the_same_measurements_give_the_same_weights():
    batches = [measured(gpu, i, noise=0.05) for i, gpu in enumerate(GPUS)]
    once, again = (written(fit(batches, families=["stream"])) for _ in range(2))
    assert once == again


def test_a_gpu_that_differs_is_known_to():
    slow = measured("t4", 2)
    slow = replace(slow, latency_s=slow.latency_s * 1.2)
    model = fit([measured("a100-pcie", 0), measured("l4", 1), slow], families=["stream"])
    there = predict(slow.works[0], slow.target, model=model).time_s
    assert np.abs(there / slow.latency_s - 1).mean() < 0.08
    found, add = model["stream"], slow.works[0]
    assert set(found.outside(add, familiar(add, slow.target, found), True)) == {()}
    unseen = familiar(add, load_target("b200"), found)
    assert set(found.outside(add, unseen, True)) == {("gpu",)}


def test_what_is_found_of_a_gpu_is_its_architectures():
    """Two of one architecture that were measured apart: that with more of everything is no slower,
    though its rows said so; and one of them left out has what the other told."""
    slow = measured("h200", 1)
    slow = replace(slow, latency_s=slow.latency_s * 1.3)
    batches = [measured("h100-sxm", 0), slow, measured("a100-pcie", 2), measured("t4", 3)]
    model, without = (fit(b, families=["stream"]) for b in (batches, batches[:1] + batches[2:]))
    h100, h200 = load_target("h100-sxm"), load_target("h200")
    assert factors(STREAM, h100, model) == factors(STREAM, h200, model)
    for found in (model, without):
        adds = slow.works[0]
        assert np.all(
            predict(adds, h200, model=found).time_s <= predict(adds, h100, model=found).time_s
        )
    assert set(model["stream"].architectures) == {"sm_75", "sm_80", "sm_90"}
    assert familiar(slow.works[0], h200, without["stream"]) == "unseen"


def test_samples_alike_are_fitted_together():
    """As many rows in fewer samples, each with its weight; others' works and GPUs apart."""
    batches = [measured("t4", 0, rows=40), measured("t4", 1, rows=60), measured("l4", 2, rows=30)]
    found = samples(STREAM, batches, {})
    joined = together(found)
    assert [len(s.device_s) for s in joined] == [100, 30]
    np.testing.assert_array_equal(
        joined[0].work.nbytes, np.concatenate([s.work.nbytes for s in found[:2]])
    )
    assert sum(s.weight.sum() for s in joined) == pytest.approx(3)


def test_a_profiler_is_believed_of_an_architecture_s_bandwidth_alone():
    """Starts and waits it counts in its own way; a network says nothing there."""
    profiled = measured("a40", 1)
    profiled = replace(profiled, latency_s=profiled.latency_s * 1.1, clock=Clock(launches=False))
    batches = [measured("a100-pcie", 0), measured("t4", 2), profiled]
    found = fit(batches, families=["stream"])["stream"]
    assert set(found.architectures["sm_86"]) == {"hbm share", "gddr share"}
    assert found.architectures["sm_86"]["gddr share"] < -0.02
    assert set(found.architectures["sm_80"]) > {"hbm share", "gddr share"}
    assert found.net is not None and set(found.net.own) == {"sm_75", "sm_80"}
    assert "a40" in found.devices


def test_what_one_architecture_was_not_measured_of_it_has_from_others():
    """Two GPUs take 30 % longer for maps of one operand than the formulas say; the third was
    measured on two operands alone."""
    batches = [measured(gpu, i) for i, gpu in enumerate(GPUS)]
    for batch in batches[:2]:
        (adds,) = batch.works
        ones = sized.pointwise(adds.points, [f32], [f32])
        start = {f.name: f.value for f in STREAM.factors}
        truth = {"stream": Trained(factors={**start, **TRUE})}
        time_s = 1.3 * predict(ones, batch.target, model=truth).time_s
        batches.append(replace(batch, works=(ones,), latency_s=time_s))
    model = fit(batches, families=["stream"])
    found, t4 = model["stream"], load_target("t4")
    assert found.net is not None
    assert not found.net.out.any()  # streams' is not carried to GPUs of no measured architecture
    (adds,) = batches[2].works
    ones = sized.pointwise(adds.points, [f32], [f32])
    of_one, of_two = (correction(w, STREAM, t4, model) for w in (ones, adds))
    assert np.all(of_one > 1.08 * of_two)  # 1.04 where each architecture learnt by itself


def test_weights_are_read_as_they_were_written():
    model = fit([measured(gpu, i) for i, gpu in enumerate(GPUS)], families=["stream"])
    errors = [Misses(gpu, "f32", np.full(200, 1e-4), np.linspace(-0.1, 0.2, 200)) for gpu in GPUS]
    found = {"stream": errors}
    model = with_intervals(model, Backtests(found, found, found))
    again = read(written(model))
    assert written(again) == written(model)
    adds = measured("a100-pcie", 7).works[0]
    target = load_target("a100-pcie")
    one, other = (predict(adds, target, model=m) for m in (model, again))
    np.testing.assert_allclose(one.time_s, other.time_s, rtol=1e-3)
    np.testing.assert_allclose(one.low_s, other.low_s, rtol=1e-2)


def test_halves_share_no_shape():
    first, second = halves([measured("t4", 0)], seed=5)
    assert not set(first[0].which) & set(second[0].which)
    assert len(first[0]) + len(second[0]) == 300


@pytest.mark.slow
def test_a_gpu_is_left_out_of_its_own_model():
    models = leave_one_out([measured(gpu, i, noise=0.03) for i, gpu in enumerate(GPUS)])
    for gpu in GPUS:
        device = load_target(gpu).device
        assert device not in models[device]["stream"].devices
        assert {"unseen", "calibrated"} <= set(models[device]["stream"].intervals)
