"""What a prompt or a debugger shows of the public records: a line each, however large they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import gpuir
from gpuir.stacks.table import pipeline

ENCODER = "tests/encoder.onnx"
LONGEST = 400  # characters: what a line of a terminal, or a few, hold


@cache
def model() -> gpuir.Graph:
    return gpuir.load(ENCODER, dims={"batch": 8, "seq": 128})


@cache
def costed() -> gpuir.Graph:
    return gpuir.analyze(model(), "a100").graph


@cache
def gemm() -> gpuir.Kernel:
    return gpuir.kernel("gemm", m=512, n=512, k=512, dtype="f16", target="a100")


MADE: dict[str, Callable[[], Any]] = {
    "analyze": lambda: gpuir.analyze(model(), "a100"),
    "apply": lambda: gpuir.apply(gpuir.strip(costed()), gpuir.extract(costed())),
    "candidates": lambda: gpuir.candidates(gemm()),
    "collective": lambda: gpuir.collective("all_reduce", 1 << 20, "dgx-h100"),
    "explain": lambda: gpuir.explain(costed(), gpuir.analyze(costed()).slowest()[0].name),
    "extract": lambda: gpuir.extract(costed()),
    "heuristics": lambda: gpuir.heuristics(gemm()),
    "kernel": gemm,
    "load": model,
    "load_cluster": lambda: gpuir.load_cluster("dgx-h100+dgx-a100"),
    "load_host": lambda: gpuir.load_host("dgx-a100"),
    "load_profile": lambda: gpuir.load_profile("eager"),
    "load_target": lambda: gpuir.load_target("a100"),
    "load_text": lambda: gpuir.load_text(gpuir.show(model())),
    "lower": lambda: gpuir.lower(model()),
    "memory": lambda: gpuir.memory(costed()),
    "parse": lambda: gpuir.parse(gpuir.show(costed())),
    "parse_schedule": lambda: gpuir.parse_schedule(gpuir.show(gpuir.extract(costed()))),
    "pipeline": lambda: pipeline(gpuir.load_profile("compiled").passes),
    "program": lambda: gpuir.program(ENCODER),
    "PointTimes": lambda: gpuir.program(ENCODER, dims={"seq": 128}).times({"batch": [2]}, "a100"),
    "predict": lambda: gpuir.predict(gemm(), gpuir.candidates(gemm())),
    "search": lambda: gpuir.search(gemm()),
    "simulate_ranks": lambda: gpuir.simulate_ranks(model(), "dgx-a100", gpuir.Parallel(tp=2)),
    "strip": lambda: gpuir.strip(costed()),
    "timeline": lambda: gpuir.timeline(costed(), gpuir.load_profile("ort")),
    "Observed": lambda: gpuir.Observed(gpuir.load_target("a100")).observe(
        gemm(), gpuir.Tile((("m", 64), ("n", 64), ("k", 32))), 1e-5
    ),
    "Parallel": lambda: gpuir.Parallel(tp=2),
    "Cost": lambda: gemm().cost,
    "Tile": lambda: gemm().tile,
}
# These give text or names, or are made above by the function that gives them.
TEXT = {"cluster_names", "host_names", "profile_names", "show", "target_names"}
BY_A_FUNCTION = {
    *("Cluster", "Graph", "HostMachine", "Kernel", "Memory", "Pipeline", "Predictions"),
    *("ModelProgram", "Profile", "Schedule", "Step", "Answer", "Target", "Tiles", "Timeline"),
}
NO_RECORD = {"GpuirError", "LoadOptions", "Pass"}


def test_every_public_name_is_looked_at():
    assert set(gpuir.__all__) == {*MADE, *TEXT, *BY_A_FUNCTION, *NO_RECORD}


@pytest.mark.parametrize("name", MADE)
def test_a_record_is_a_line(name: str):
    made = MADE[name]()
    records = made if type(made) in (list, tuple) else [made]
    for record in records:
        assert "\n" not in repr(record)
        assert len(repr(record)) <= LONGEST


def test_a_graph_says_what_it_is():
    assert repr(model()) == f"<Graph @encoder of level graph: {len(model().nodes)} nodes>"
    shown = repr(costed())
    assert shown.startswith("<Graph @encoder of level costed for a100 under ort: ")
    assert f"kernels {costed().time_s:.4g} s>" in shown


def test_the_latency_of_a_graph_survives_its_text():
    for profile in ("ort", "tensorrt"):
        once = gpuir.analyze(model(), "a100", profile=profile)
        again = gpuir.analyze(gpuir.parse(gpuir.show(once.graph)))
        assert again == once != replace(once, latency_s=once.graph.time_s)


def test_an_answer_of_numbers_alone_says_where_its_graph_is():
    with pytest.raises(gpuir.GpuirError, match="numbers alone") as e:
        _ = gpuir.Answer("encoder", "a100").graph
    assert "gpuir.analyze(model, target)" in str(e.value)


def test_a_cost_is_a_number_and_its_text_the_whole():
    cost = gemm().cost
    assert cost is not None
    assert repr(cost) == f"<Cost by {cost.by}: {cost.time_s:.4g} s, bound by {cost.bound}>"
    assert str(cost).startswith("cost(time_s=")
