"""Sweeps: the numbers of single analyses, and what is found among them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import gpuir
from gpuir.ir.errors import ModelError
from gpuir.plan.sweep import SizeSeries, sweep
from gpuir.report.answer import Answer
from gpuir.run.analysis import lowering
from gpuir.run.program import ModelProgram
from gpuir.targets.prices import Price
from gpuir.targets.profile import under

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")  # two layers of examples/encoder.onnx


SUM = """graph @g {
  in %x: f32[30000000]
  %y: f32[] = t.reduce("sum", %x, [0]) at "m:y"
  out %y
}"""


def programs(model=ENCODER, tf32=None, **dims):
    """What `sweep` asks of a model, whose other sizes are these."""

    @cache
    def under(profile):
        return gpuir.program(model, profile=profile, tf32=tf32, dims=dims)

    return lambda points, profile, target: under(profile).kernels_at(points, target)


def kernels(dims, profile):
    return gpuir.lower(gpuir.load(ENCODER, dims={"seq": 32, **dims}), profile=profile)


@pytest.fixture(scope="module")
def found():
    targets = [gpuir.load_target(name) for name in ("t4", "a100+sms=54", "x86-64-v3")]
    own = {"t4": Price(0.36)}
    axes = {"batch": [1, 4, 16]}
    profiles = ["ort", "ideal"]
    return sweep(
        programs(seq=32), axes, targets, profiles, items=lambda dims: dims["batch"], own=own
    )


@pytest.mark.slow
def test_every_point_is_what_a_single_analysis_says(found):
    assert len(found.points) == 3 * 2 * 3
    for p in found.points:
        g = gpuir.analyze(kernels(dict(p.dims), p.profile), p.target).graph
        alone = gpuir.analyze(g)
        assert p.latency_s == pytest.approx(alone.latency_s, rel=1e-12)
        assert p.device_s == pytest.approx(alone.timeline.device_s, rel=1e-12)
        assert p.interval == pytest.approx(alone.timeline.interval, rel=1e-12)
        assert p.peak_bytes == alone.memory.peak_bytes
        assert p.reserved_bytes == alone.memory.reserved_bytes
        assert p.fits is alone.memory.fits
        assert p.is_host_bound == alone.timeline.is_host_bound


@pytest.mark.slow
def test_tf32_is_as_a_single_analysis_has_it():
    target = gpuir.load_target("a100")
    for tf32 in (True, False):
        (p,) = sweep(programs(tf32=tf32, seq=32), {"batch": [2]}, [target]).points
        g = gpuir.analyze(kernels({"batch": 2}, None), "a100", tf32=tf32).graph
        assert p.latency_s == pytest.approx(gpuir.analyze(g).latency_s, rel=1e-12)


def test_money_is_time_at_the_price_of_an_hour(found):
    p = next(p for p in found.points if p.target == "t4" and p.items == 16)
    assert p.usd_per_hour == 0.36
    assert p.items_per_s == 16 / p.latency_s
    assert p.usd_per_million == pytest.approx(1e6 * p.latency_s / 16 * 0.36 / 3600)
    assert dict(found.prices)["t4"] == Price(0.36)
    free = next(p for p in found.points if p.target == "x86-64-v3")
    assert free.usd_per_million is None
    assert found.cheapest is not None and found.cheapest.usd_per_million is not None


def test_targets_come_as_given_and_sizes_in_order(found):
    order = [(s.target, s.profile) for s in found.series]
    names = ["t4", "a100-sxm-40gb+sms=54", "x86-64-v3"]
    assert order == [(t, p) for t in names for p in ("ort", "ideal")]
    assert all([s.size(p) for p in s.points] == [1, 4, 16] for s in found.series)


def point(batch: int, latency_s: float, waits: bool = False, reserved: int = 1) -> Answer:
    return Answer(
        "model",
        "t4",
        "ort",
        dims=(("batch", batch),),
        batch=batch,
        latency_s=latency_s,
        interval=None,
        device_s=latency_s,
        is_host_bound=waits,
        peak_bytes=reserved,
        reserved_bytes=reserved,
        available_bytes=10,
    )


def test_best_cliffs_and_ends_of_a_series():
    points = (
        point(1, 1.0, waits=True),
        point(2, 1.0, waits=True),
        point(4, 1.0),  # 4 a second
        point(8, 2.5),  # 3.2: a cliff
        point(16, 3.9),  # 4.1: the best that fits
        point(32, 4.0, reserved=11),  # 8, but it does not fit
    )
    s = SizeSeries("t4", "ort", "batch", (), points)
    assert s.best is points[4]
    assert s.cliffs == ((points[2], points[3]),)
    assert s.unfit is points[5]
    assert s.busy is points[2]
    nothing = SizeSeries("t4", "ort", "batch", (), (replace(points[5]),))
    assert nothing.best is None and nothing.busy is nothing.points[0]


def test_along_a_length_work_is_items_times_it():
    points = tuple(
        replace(point(1, time_s), dims=(("seq", size),), batch=4)
        for size, time_s in ((8, 1.0), (16, 1.5), (32, 3.5))
    )
    s = SizeSeries("t4", "ort", "seq", (), points)
    assert [s.rate(p) for p in points] == pytest.approx([32, 4 * 16 / 1.5, 4 * 32 / 3.5])
    assert s.best is points[1] and s.cliffs == ((points[1], points[2]),)
    assert s.lost(points[1], points[2]) == pytest.approx(1 - (32 / 3.5) / (16 / 1.5))


def test_each_target_has_its_own_kernels():
    """Inductor splits a sum of many terms by the multiprocessors that there are."""
    targets = [gpuir.load_target(name) for name in ("a100", "t4", "a100-80gb-pcie")]
    g = gpuir.parse(SUM)
    sxm, t4, pcie = (str(lowering(under(g, "compiled"), target)) for target in targets)
    assert sxm == pcie and "split_sums{sms=40,threads=1024}" in t4
    some = SizedText(SUM, {}, "compiled")
    found = sweep(lambda points, _, target: some.kernels_at(points, target), {"n": [1]}, targets)
    for p, target in zip(found.points, targets, strict=True):
        g = gpuir.analyze(gpuir.parse(SUM), target.name, profile="compiled").graph
        assert p.device_s == pytest.approx(g.time_s)


class SizedText(ModelProgram):
    """Text, which has no sizes to give."""

    def load(self, point):
        return gpuir.parse(self.model)


def test_what_the_model_refuses_is_left_out_and_all_refused_is_an_error():
    t4 = [gpuir.load_target("t4")]
    some = programs(batch=1)
    found = sweep(some, {"seq": [512, 1024]}, t4)
    assert [dict(p.dims)["seq"] for p in found.points] == [512]
    ((dims, why),) = found.refused
    assert dims == (("seq", 1024),) and "do not broadcast" in why
    with pytest.raises(ModelError, match="do not broadcast"):
        sweep(some, {"seq": [1024]}, t4)


def test_several_sizes_make_a_series_for_each_choice_of_the_others():
    steps: list[int] = []
    found = sweep(
        programs(),
        {"batch": [1, 2], "seq": [16, 32]},
        [gpuir.load_target("t4")],
        done=lambda: steps.append(1),
    )
    assert len(steps) == 1
    assert [(s.dim, s.others, len(s.points)) for s in found.series] == [
        ("batch", (("seq", 16),), 2),
        ("batch", (("seq", 32),), 2),
    ]
