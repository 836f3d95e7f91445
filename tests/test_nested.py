"""Loops and branches inside one another: work that grows with the graph, and a bound on depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from calls import calls

import gpuir
from gpuir.backends.table import BACKENDS
from gpuir.backends.terminal import Terminal
from gpuir.ir.build import Builder
from gpuir.ir.errors import GpuirError, TextError, VerifyError
from gpuir.ir.graph import DEEPEST, Graph, Level, Value
from gpuir.ir.types import TensorType, bool_, f32, i64
from gpuir.ir.verify import verify
from gpuir.ops import tensor as t
from gpuir.stacks.table import PASSES, pipeline

X = TensorType((64,), f32)


def body(b: Builder, kind: str, depth: int, x: Value, c: Value, w: Value) -> Value:
    b.locs = (f"m:{depth}",)
    y = b(t.Map("mul", (x, w)))
    if not depth:
        return y
    inner = Builder(Level.graph, "", names=b.names)
    inner.locs = b.locs
    if kind == "loop":
        inner.input("i", TensorType((), i64))
    (y_in, c_in, w_in) = (inner.input(v.name, v.type) for v in (y, c, w))
    made = inner.finish([body(inner, kind, depth - 1, y_in, c_in, w_in)])
    if kind == "loop":
        return b.add(t.Loop(made, 100, (y,), (c, w)))[0]
    other = Builder(Level.graph, "", names=b.names)
    other.locs = b.locs
    y_in, *_ = (other.input(v.name, v.type) for v in (y, c, w))
    return b.add(t.Cond(c, made, other.finish([other(t.Map("exp", (y_in,)))]), (y, c, w)))[0]


def ladder(kind: str, depth: int) -> Graph:
    """A loop within a loop within a loop, or a branch within a branch, so many levels deep."""
    b = Builder(Level.graph, "ladder")
    x, c = b.input("x", X), b.input("c", TensorType((), bool_))
    return b.finish([body(b, kind, depth, x, c, b.param("w", X))])


def costed(g: Graph, profile: str) -> Graph:
    return gpuir.analyze(g, "a100", profile=profile).graph


def grows(work: Callable[[Graph], object], kind: str, profile: str = "") -> float:
    """How many times the calls of `work` are more on a ladder of 16 levels than on one of 8.

    On fewer, the trips until a loop's queue of launches is full are most of a timeline's calls.
    """
    counts: list[int] = []
    for depth in (8, 16):
        g = ladder(kind, depth)
        g = costed(g, profile) if profile else g
        work(g)  # what is imported and remembered once
        g = replace(g)
        counts.append(calls(lambda g=g: work(g)))
    return counts[1] / counts[0]


LEVELS = 2**2 * 1.3  # a walk down to each level, at most: no more than the square of the depth


@pytest.mark.parametrize("profile", ["eager", "ort", "cudagraph"])
@pytest.mark.parametrize("kind", ["loop", "branch"])
def test_a_report_takes_a_walk_a_level_at_most(kind: str, profile: str):
    assert grows(lambda g: gpuir.memory(g), kind, profile) < LEVELS
    assert grows(lambda g: gpuir.timeline(g, gpuir.load_profile(profile)), kind, profile) < LEVELS
    assert grows(lambda g: gpuir.analyze(g), kind, profile) < LEVELS


@pytest.mark.parametrize("kind", ["loop", "branch"])
def test_so_does_every_format_and_what_reads_a_graph(kind: str):
    layout = Terminal(100, file="x.svg")
    for name in ("text", "json", "csv", "markdown", "ir", "schedule", "trace"):
        grown = grows(lambda g, name=name: BACKENDS[name]([gpuir.analyze(g)], layout), kind, "ort")
        assert grown < LEVELS, name
    assert grows(lambda g: gpuir.memory(g), kind) < LEVELS
    assert grows(lambda g: gpuir.parse(gpuir.show(g)), kind) < LEVELS
    assert grows(lambda g: [n.op.flops() for n in gpuir.parse(gpuir.show(g)).nodes], kind) < LEVELS


@pytest.mark.parametrize("kind", ["loop", "branch"])
def test_so_does_every_pass(kind: str):
    before = {Level.graph: "", Level.fused: "fuse,", Level.kernel: "fuse,legalize,"}
    options = {"tile": "{target=a100}", "extend": "{old=1000,new=1001}"}
    options["shard"] = "{ranks=2,by=data}"
    for name, made in PASSES.items():
        if name in ("autodiff", "optimizer", "accumulate", "annotate", "microbatch"):
            continue
        text = before[made.takes or Level.graph] + name + options.get(name, "")
        assert grows(lambda g, text=text: pipeline(text).run(g), kind) < LEVELS, name
    for profile in gpuir.profile_names():
        assert grows(lambda g, p=profile: gpuir.lower(g, profile=p), kind) < LEVELS, profile
    assert grows(lambda g: costed(g, "ort"), kind) < LEVELS


def test_training_through_branches_too():
    assert grows(lambda g: pipeline("autodiff").run(g), "branch") < LEVELS


def test_a_loop_without_kernels_ends_at_once():
    """The host goes on alone: no trip brings the device to its pace."""
    trip = TensorType((), i64)
    inner = Builder(Level.graph, "")
    inner.locs = ("m:a",)
    inner.input("i", trip)
    x = inner.input("x", X)
    b = Builder(Level.graph, "g")
    b.locs = ("m:l",)
    y = b.add(t.Loop(inner.finish([inner(t.Reshape(x, (64,)))]), 1 << 40, (b.input("x", X),)))
    g = costed(b.finish(y), "eager")
    assert calls(lambda: gpuir.timeline(g, gpuir.load_profile("eager"))) < 5000


def test_a_long_loop_on_a_cpu_ends_at_once():
    """There the host takes no time, so its pace is never the device's."""
    b = Builder(Level.graph, "g")
    b.locs = ("m:l",)
    inner = Builder(Level.graph, "")
    inner.locs = b.locs
    inner.input("i", TensorType((), i64))
    y = inner(t.Map("exp", (inner.input("x", X),)))
    y = b.add(t.Loop(inner.finish([y]), 1 << 30, (b.input("x", X),)))
    g = gpuir.analyze(b.finish(y), "x86-64-v3", profile="eager").graph
    assert calls(lambda: gpuir.timeline(g, gpuir.load_profile("eager"))) < 100_000


def test_terms_of_a_large_window_are_not_enumerated():
    b = Builder(Level.graph, "g")
    b.locs = ("m:p",)
    n = 1 << 32
    x = b.input("x", TensorType((1, 1, n), f32))
    g = b.finish([b(t.Pool("max", x, (n,), (1,), (0,), (0,), (1,)))])
    for profile in gpuir.profile_names():
        assert calls(lambda p=profile: gpuir.analyze(costed(g, p))) < 200_000, profile


def test_loops_are_not_written_out_for_streams_without_bound():
    profile = replace(gpuir.load_profile("ort"), streams=2)
    g = costed(ladder("loop", 2), "ort")
    assert gpuir.timeline(g, profile).time_s > 0
    with pytest.raises(GpuirError, match="launches, too many to simulate on several"):
        gpuir.timeline(costed(ladder("loop", 3), "ort"), profile)


def test_a_graph_too_deep_is_refused():
    g = ladder("loop", DEEPEST)
    text = gpuir.show(g)
    verify(g)
    assert gpuir.parse(text) == g
    deeper = ladder("loop", DEEPEST + 1)
    with pytest.raises(VerifyError, match=f"more than {DEEPEST} deep"):
        verify(deeper)
    with pytest.raises(TextError, match="nested too deep"):
        gpuir.parse(gpuir.show(deeper))
