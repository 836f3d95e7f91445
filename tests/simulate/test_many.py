"""Launches on many devices at once, and memory whatever the tiles: as on each device alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

import gpuir
from gpuir.ir.errors import GpuirError
from gpuir.plan.space.answers import answers, cost_table
from gpuir.plan.space.program import program_of, read, written

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")
GPUS = ("a100", "t4", "a100+sms=40+dram.bytes_per_s=1e12", "h100-sxm", "a30:1g.6gb", "mi300x")
NAMES = (*GPUS, "x86-64-v3")
PROFILES = ("ort", "eager", "compiled", "cudagraph", "tensorrt", "llm-foundry+products=fp8")


def assert_as_alone(graph, names=NAMES):
    """The answers of its programs, through their text, are what the report of each device says."""
    for on_cpu in (False, True):
        targets = [x for x in map(gpuir.load_target, names) if x.is_cpu == on_cpu]
        if targets:
            assert_answers(graph, program_of(graph, on_cpu), targets)


def assert_answers(graph, made, targets):
    program = read(written(made))
    assert program == made
    works = dict(zip(program.keys, program.works, strict=True))
    table = cost_table(works, targets)
    again = cost_table(works, targets, {key: table.packed(key) for key in works})
    assert all((table.parts[name] == again.parts[name]).all() for name in table.parts)
    said = answers(dict.fromkeys(range(len(targets)), program), targets, table)
    for t, target in enumerate(targets):
        found = said[t]
        try:
            alone = gpuir.analyze(graph, target.name)
        except GpuirError as error:
            assert error.what in found.why
            continue
        if not alone.latency_s:
            assert "nothing runs under" in found.why
            continue
        assert found.latency_s == alone.latency_s
        assert found.device_s == alone.device_s
        assert found.interval == alone.interval
        assert found.is_host_bound == alone.timeline.is_host_bound
        bounds = dict(alone.bounds)
        assert found.bound == max(bounds, key=lambda name: bounds[name])
        assert found.peak_bytes == alone.memory.peak_bytes
        assert found.reserved_bytes == alone.memory.reserved_bytes
        assert found.available_bytes == alone.memory.available_bytes
        assert bool(found.why) == (not alone.memory.fits)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_model_on_many_devices_is_as_on_each_alone(profile):
    for batch in (1, 24):
        graph = gpuir.load(ENCODER, dims={"batch": batch, "seq": 32})
        assert_as_alone(gpuir.lower(graph, profile=profile))


@pytest.mark.slow
def test_a_training_step_is_too():
    graph = gpuir.load(ENCODER, dims={"batch": 2, "seq": 32}, train=True, optimizer="adamw")
    assert_as_alone(gpuir.lower(graph, profile="eager"))


@pytest.mark.slow
@given(graph=graphs(), profile=st.sampled_from(PROFILES))
def test_any_graph_is_too(graph, profile):
    try:
        kernels = gpuir.lower(graph, profile=profile)
    except GpuirError:
        return
    assert_as_alone(kernels)


CONTROL = """graph @control {
  in %x: f16[64, 256]
  in %p: bool[]
  param %w: f16[256, 256]
  param %wide: f16[256, 4096]
  param %back: f16[4096, 256]
  %a: f16[64, 256] = t.loop({
    in %i: i64[]
    in %s: f16[64, 256]
    in %u: f16[256, 256]
    in %q: bool[]
    %h: f16[64, 256] = t.matmul(%s, %u) at "matmul"
    %r: f16[64, 256] = t.cond(%q, {
      in %v: f16[64, 256]
      %n: f16[64, 256] = t.map("neg", [%v]) at "neg"
      out %n
    }, {
      in %v: f16[64, 256]
      %e: f16[64, 256] = t.map("exp", [%v]) at "exp"
      %f: f16[64, 256] = t.softmax(%e, 1) at "softmax"
      out %f
    }, [%h]) at "choose"
    out %r
  }, 40, [%x], [%w, %p]) at "loop"
  %y: f16[64, 256] = t.cond(%p, {
    in %v: f16[64, 256]
    in %w1: f16[256, 4096]
    in %w2: f16[4096, 256]
    %m: f16[64, 4096] = t.matmul(%v, %w1) at "up"
    %n: f16[64, 256] = t.matmul(%m, %w2) at "down"
    out %n
  }, {
    in %v: f16[64, 256]
    in %w1: f16[256, 4096]
    in %w2: f16[4096, 256]
    %n: f16[64, 256] = t.map("exp", [%v]) at "exp2"
    out %n
  }, [%a, %wide, %back]) at "branch"
  out %y
}
"""


@pytest.mark.parametrize("profile", ["ort", "eager", "cudagraph", "ideal"])
def test_loops_and_branches_are_too(profile):
    graph = gpuir.lower(gpuir.parse(CONTROL), profile=profile)
    assert any(n.op.name == "k.cond" for n in graph.walk())
    assert_as_alone(graph)


def test_several_streams_are_too(tmp_path):
    path = tmp_path / "streams.toml"
    path.write_text('base = "eager"\nstreams = 3\n\n[sources]\nstreams = "made up"\n')
    graph = gpuir.load(ENCODER, dims={"batch": 1, "seq": 32})
    assert_as_alone(gpuir.lower(graph, profile=str(path)))


def test_collectives_of_unknown_links_are_too():
    graph = gpuir.load(ENCODER, dims={"batch": 8, "seq": 32})
    graph = gpuir.pipeline("shard{ranks=2,by=tensor}").run(graph)
    graph = gpuir.lower(graph, profile="eager")
    assert any(n.op.name == "k.collective" for n in graph.nodes)
    assert_as_alone(graph, GPUS)
