"""Launches on many devices at once, and memory whatever the tiles: as on each device alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs

import gpuir
from gpuir.ir.errors import GpuirError
from gpuir.plan.space.answers import answers, cost_table
from gpuir.plan.space.program import program_of, read, written

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")
NAMES = ("a100", "t4", "a100+sms=40+dram.bytes_per_s=1e12", "h100-sxm", "a30:1g.6gb", "mi300x")
PROFILES = ("ort", "eager", "compiled", "cudagraph", "tensorrt")


def refuse(target):
    raise AssertionError("it is run with others")


def assert_as_alone(graph, names):
    targets = [gpuir.load_target(name) for name in names]
    program = read(written(program_of(graph)))
    assert program == program_of(graph)
    if program.straight is None:
        return False
    works = dict(zip(program.keys, program.straight.works, strict=True))
    table = cost_table(works, targets)
    again = cost_table(works, targets, {key: table.packed(key) for key in works})
    assert all((table.parts[name] == again.parts[name]).all() for name in table.parts)
    for target, found in zip(targets, answers(program, targets, table, refuse), strict=True):
        try:
            alone = gpuir.analyze(graph, target.name)
        except GpuirError as error:
            assert error.what in found.why
            continue
        if not alone.latency_s:
            assert "the model has nothing to run under" in found.why
            continue
        assert found.latency_s == alone.latency_s
        assert found.device_s == alone.device_s
        interval = found.interval
        assert interval == alone.interval
        assert found.is_host_bound == alone.timeline.is_host_bound
        bounds = dict(alone.bounds)
        assert found.bound == max(bounds, key=lambda name: bounds[name])
        assert found.peak_bytes == alone.memory.peak_bytes
        assert found.reserved_bytes == alone.memory.reserved_bytes
        assert found.available_bytes == alone.memory.available_bytes
        assert bool(found.why) == (not alone.memory.fits)
    return True


@pytest.mark.parametrize("profile", PROFILES)
def test_a_model_on_many_devices_is_as_on_each_alone(profile):
    for batch in (1, 24):
        graph = gpuir.load(ENCODER, dims={"batch": batch, "seq": 32})
        assert assert_as_alone(gpuir.lower(graph, profile=profile), NAMES)


@pytest.mark.slow
def test_a_training_step_is_too():
    graph = gpuir.load(ENCODER, dims={"batch": 2, "seq": 32}, train=True, optimizer="adamw")
    assert assert_as_alone(gpuir.lower(graph, profile="eager"), NAMES)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(graph=graphs(), profile=st.sampled_from(PROFILES))
def test_any_graph_is_too(graph, profile):
    try:
        kernels = gpuir.lower(graph, profile=profile)
    except GpuirError:
        return
    assert_as_alone(kernels, NAMES)
