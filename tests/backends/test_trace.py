"""Traces: what the format asks for, what Perfetto needs beyond it, and that the numbers are those
of the timeline."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from strategies import graphs

import gpuir
from gpuir.backends.terminal import Terminal
from gpuir.backends.trace import trace
from gpuir.ir.graph import Graph
from gpuir.report.answer import Answer
from gpuir.simulate.clock import Script
from gpuir.simulate.timeline import Prepared, timeline
from gpuir.targets.profile import load_profile, profile_names

HERE = Path(__file__).parent
SCHEMA = json.loads((HERE / "trace_event.schema.json").read_text())
LAYERS = """graph @layers {
  in %x: f16[256, 512]
  param %w: f16[512, 512]
  param %v: f16[512, 512]
  %a: f16[256, 512] = t.matmul(%x, %w) at "m.onnx:/encoder/layer.0/fc/MatMul"
  %b: f16[256, 512] = t.map("relu", [%a]) at "m.onnx:/encoder/layer.0/Relu"
  %c: f16[256, 512] = t.matmul(%b, %v) at "m.onnx:/encoder/layer.1/fc/MatMul"
  %d: f16[256, 512] = t.softmax(%c, 1) at "m.onnx:/Softmax \\"最後\\""
  out %d
}
"""
Event = dict[str, Any]


def summary(profile: str = "eager", target: str = "a100", text: str = LAYERS) -> Answer:
    return gpuir.analyze(gpuir.load_text(text), target, profile=profile)


def read(*summaries: Answer) -> list[Event]:
    text = trace(summaries, Terminal())
    assert isinstance(text, str)
    found = json.loads(text)
    events: list[Event] = found["traceEvents"]
    found["traceEvents"] = events[:2000]  # checking all of many takes its time
    Draft202012Validator(SCHEMA).validate(found)
    check_nesting(events)
    check_arrows(events)
    return events


def slices(events: list[Event], cat: str = "") -> list[Event]:
    return [e for e in events if e["ph"] == "X" and cat in ("", e["cat"])]


def ns(us: float) -> int:
    return round(us * 1000)


def check_nesting(events: list[Event]) -> None:
    """Perfetto does not show events of a thread that overlap without one being inside the other
    (perfetto.dev/docs/faq), and takes those of equal start in the order of the file."""
    open_until: dict[int, list[int]] = {}
    of_thread: dict[int, list[Event]] = {}
    for e in slices(events):
        of_thread.setdefault(e["tid"], []).append(e)
    for tid, group in of_thread.items():
        stack = open_until.setdefault(tid, [])
        for e in sorted(group, key=lambda e: e["ts"]):
            start, end = ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], e
            stack.append(end)
    assert {(e["pid"], e["tid"]) for e in slices(events)} <= {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"
    }


def check_arrows(events: list[Event]) -> None:
    """Each arrow leaves a launch call and arrives at the kernel of the same correlation."""
    ends = {(e["tid"], e["ts"], e["args"].get("correlation")): e["cat"] for e in slices(events)}
    arrows = [e for e in events if e["ph"] in "sf"]
    assert Counter(e["id"] for e in arrows if e["ph"] == "s") == Counter(
        e["id"] for e in arrows if e["ph"] == "f"
    )
    starts = {e["id"]: e["ts"] for e in arrows if e["ph"] == "s"}
    assert all(starts[e["id"]] <= e["ts"] for e in arrows)
    for e in arrows:
        cat = ends[e["tid"], e["ts"], e["id"]]
        assert cat == ("cuda_runtime" if e["ph"] == "s" else "kernel")


def test_every_launch_is_a_call_an_arrow_and_a_kernel():
    s = summary()
    events = read(s)
    calls, kernels = slices(events, "cuda_runtime"), slices(events, "kernel")
    numbers = [e["args"]["correlation"] for e in calls]
    assert numbers == [e["args"]["correlation"] for e in kernels]
    assert len(set(numbers)) == s.launches == 4 == sum(e["ph"] == "s" for e in events)
    assert {e["name"] for e in calls} == {"cudaLaunchKernel"}
    ops = [e["args"]["External id"] for e in slices(events, "cpu_op")]
    assert ops == [e["args"]["External id"] for e in calls]
    assert ops == [e["args"]["External id"] for e in kernels]


def test_times_are_those_of_the_timeline_in_microseconds():
    s = summary()
    kernels = slices(read(s), "kernel")
    spans = [x for x in s.timeline.spans if x.kind == "kernel"]
    for e, x in zip(kernels, spans, strict=True):
        assert e["ts"] == pytest.approx(1e6 * x.start_s, abs=1e-3)
        assert e["dur"] == pytest.approx(1e6 * (x.end_s - x.start_s), abs=1.1e-3)
    (step,) = (e for e in slices(read(s)) if e["name"] == "ProfilerStep#0")
    assert step["dur"] == pytest.approx(1e6 * s.latency_s, abs=1e-3)


def test_a_kernel_says_why_in_the_words_of_the_report():
    s = summary()
    (record,) = (x for x in s.kernels if x.name == "c")
    (e,) = (e for e in slices(read(s), "kernel") if "layer.1" in str(e["args"]["locs"]))
    assert e["name"] == "gemm f16 b=1 m=256 n=512 k=512"
    args = e["args"]
    assert args["cost"]["time_s"] == record.cost.time_s
    assert args["cost"]["interval_s"] == list(record.cost.interval or ())
    assert args["cost"]["bound"] == record.cost.bound and args["flops"] == record.flops
    assert args["module"] == "encoder.layer.1.fc" and args["tile"]["dims"]["m"]
    softmax = slices(read(s), "kernel")[-1]["args"]
    assert softmax["est. achieved occupancy %"] == round(
        100 * softmax["cost"]["facts"]["occupancy"]
    )


def test_modules_enclose_their_ops_as_calls_do():
    events = read(summary())
    modules = slices(events, "python_function")
    assert [e["args"]["module"] for e in modules] == [
        *("encoder", "encoder.layer.0", "encoder.layer.0.fc"),
        *("encoder.layer.1", "encoder.layer.1.fc"),
    ]
    assert [e["name"] for e in modules] == ["encoder", "layer.0", "fc", "layer.1", "fc"]
    ops = slices(events, "cpu_op")
    assert [e["name"] for e in ops] == ["MatMul", "Relu", "MatMul", 'Softmax "最後"']
    end = modules[0]["ts"] + modules[0]["dur"]
    assert [e["ts"] < end for e in ops] == [True, True, True, False]


def test_a_cuda_graph_is_one_launch_of_all_kernels():
    events = read(summary("cudagraph"))
    (call,) = slices(events, "cuda_runtime")
    assert call["name"] == "cudaGraphLaunch"
    kernels = slices(events, "kernel")
    assert {e["args"]["correlation"] for e in kernels} == {call["args"]["correlation"]}
    assert sum(e["ph"] == "f" for e in events) == 1
    # its ops take no time of the host: they are shown along the device's
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {lanes[e["tid"]] for e in slices(events, "cpu_op")} == {"model"}


def test_without_a_host_there_are_kernels_alone():
    events = read(summary("ideal"))
    assert not slices(events, "cuda_runtime") and slices(events, "kernel")


def test_the_counter_of_memory_reaches_the_peak():
    s = summary()
    held = [e for e in read(s) if e["ph"] == "C" and e["name"] == "memory, bytes"]
    assert max(sum(e["args"].values()) for e in held) == s.memory.peak_bytes
    assert held[0]["ts"] == 0 and held[0]["args"]["weights"] == 2 * 2 * 512 * 512
    assert all(a["args"] != b["args"] for a, b in pairwise(held))


def test_the_counter_of_what_is_achieved_falls_to_none_while_the_device_waits():
    s = summary()
    events = read(s)
    counted = [e["args"] for e in events if e["name"] == "% of peak, stream 0"]
    kernels = slices(events, "kernel")
    assert kernels[0]["ts"] + kernels[0]["dur"] < kernels[1]["ts"]
    facts = kernels[0]["args"]["cost"]["facts"]
    assert counted[0]["flop/s"] == pytest.approx(100 * facts["peak_share"], abs=0.05)
    assert counted[1] == {"flop/s": 0, "memory bandwidth": 0}


def test_runs_keep_apart():
    """Perfetto takes threads of one number for one thread, whatever their processes."""
    runs = [summary(p, t) for t in ("a100", "l4") for p in ("eager", "cudagraph")]
    events = read(*runs)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[1] == "layers on a100-sxm-40gb under cudagraph" and len(set(names)) == 4
    threads = [e["tid"] for e in events if e["name"] == "thread_name"]
    assert len(set(threads)) == len(threads)
    calls = [e["args"]["correlation"] for e in slices(events, "cuda_runtime")]
    assert len(set(calls)) == len(calls) == 4 + 1 + 4 + 1
    assert {e["args"]["device"] for e in slices(events, "kernel")} == {0, 1, 2, 3}


def test_the_critical_path_is_a_lane_without_holes():
    s = summary()
    chain = slices(read(s), "critical_path")
    assert sum(ns(e["dur"]) for e in chain) == pytest.approx(1e9 * s.latency_s, abs=len(chain))


def test_loops_and_branches_read_well():
    graph = gpuir.load(HERE / "mixed.gir")
    s = gpuir.analyze(graph)
    events = read(s)
    kernels = slices(events, "kernel")
    trips = [e for e in slices(events, "gpu_user_annotation") if "more trips" in e["name"]]
    assert len(kernels) < s.launches and len(trips) == 1
    shown = sum(ns(e["dur"]) for e in (*kernels, *trips))
    assert shown == pytest.approx(1e9 * s.device_s, abs=len(kernels))
    eager = s.with_details(timeline=timeline(graph, load_profile("eager")))
    events = read(eager)
    trips = [e for e in slices(events) if "more trips" in e["name"]]
    assert [e["cat"] for e in trips] == ["user_annotation", "gpu_user_annotation"]
    assert len(slices(events, "cuda_runtime")) == len(eager.timeline.launches) < s.launches


def test_training_shows_its_phases(tmp_path: Path):
    (tmp_path / "m.gir").write_text(LAYERS)
    g = gpuir.load(tmp_path / "m.gir", train=True)
    s = gpuir.analyze(g, "a100", profile="eager")
    modules = {e["args"]["module"] for e in slices(read(s), "python_function")}
    assert {"encoder.layer.0.fc", "backward.encoder.layer.0.fc"} <= modules
    graphs = read(gpuir.analyze(g, "a100", profile="cudagraph"))
    calls = [e["args"]["correlation"] for e in slices(graphs, "cuda_runtime")]
    assert len(calls) == len(set(calls)) > 1
    assert set(calls) == {e["args"]["correlation"] for e in slices(graphs, "kernel")}


def test_a_trace_is_the_same_twice_and_compressed_where_the_file_says_so():
    s = summary()
    text, packed = trace([s], Terminal()), trace([s], Terminal(file="a/b.json.gz"))
    assert text == trace([s], Terminal(40, True, 1)) and isinstance(packed, bytes)
    assert gzip.decompress(packed).decode() == text
    assert packed == trace([s], Terminal(file="c.gz"))


@pytest.mark.slow
def test_many_launches_are_as_many_events():
    s = summary()
    made = Prepared.of(s.graph, s.software)
    many = replace(made.script.calls, found=1000 * made.script.calls.found)
    thousand = replace(made, script=Script(many, s.software))
    times = [x.time_s for x in made.costs]
    events = read(s.with_details(timeline=thousand.run(times)))
    assert len(slices(events, "kernel")) == len(slices(events, "cuda_runtime")) == 4000


@pytest.mark.slow
@pytest.mark.parametrize("profile", profile_names())
@settings(max_examples=10)
@given(g=graphs())
def test_any_graph_under_any_profile(profile: str, g: Graph):
    s = gpuir.analyze(g, "a100", profile=profile)
    assert len(slices(read(s), "kernel")) == len(s.timeline.launches)
