"""What serving engines launch for a decoder, how long that takes, and what memory they reserve."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from decoders import LLAMA, MIXTURE, QWEN

import gpuir
from gpuir.fit.score import kernel_s
from gpuir.ir.graph import Graph
from gpuir.ops import kernel as k
from gpuir.report.answer import Answer
from gpuir.stacks.allocators import GIB, MIB, UNLIMITED, caching, find_allocator
from gpuir.stacks.serving.engines import ENGINES
from gpuir.targets.load import load_target
from validation.decoders import served as build
from validation.served import Deployment, Part, Share, Step, decoders, launches

# A layer in the middle of a decoder, from one attention's projection to the next one's.
LAYER = ("gemm", "reduce", "gemm", "map", "gemm", "reduce", "gemm", "scatter", "map", "attention")
LARGE = dict(decoders()["meta-llama/Llama-3.1-8B-Instruct"].config)


@cache
def loaded(config: str, phase: str, batch: int, tokens: int) -> Graph:
    """A step of `batch` sequences: of prompts of so many tokens, or behind so many."""
    dims = {"batch": batch} | ({"seq": tokens} if phase == "prefill" else {})
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        past = tokens if phase == "decode" else None
        return gpuir.load(f"hf:{folder}", phase=phase, past=past, dims=dims, warn=lambda _: None)


def step(config: dict[str, Any], phase: str, batch: int = 4, tokens: int = 64) -> Graph:
    return loaded(json.dumps({**config, "dtype": "bfloat16"}), phase, batch, tokens)


def report(g: Graph, profile: str, target: str = "h100-sxm") -> Answer:
    return gpuir.analyze(g, target, profile=profile)


def kinds(g: Graph, profile: str) -> list[str]:
    nodes = gpuir.lower(g, profile=profile, target="h100-sxm").nodes
    return [n.op.name.removeprefix("k.") for n in nodes if not isinstance(n.op, k.View)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_is_ten_launches(engine: str):
    found = kinds(step(LLAMA, "decode"), engine)
    places = [i for i, kind in enumerate(found) if kind == "attention"]
    for start, end in pairwise(places):
        assert tuple(found[start + 1 : end + 1]) == LAYER
    assert found[-1] == "gemm" and len(places) == LLAMA["num_hidden_layers"]


def test_norms_of_queries_and_keys_do_not_keep_products_apart():
    found = [n.op for n in gpuir.lower(step(QWEN, "decode"), profile="vllm").nodes]
    widths = {op.space().dims["n"] for op in found if isinstance(op, k.Gemm)}
    queries, keys = 8 * 32, 2 * 32
    assert {queries + 2 * keys, 2 * 512} <= widths


@pytest.mark.parametrize("engine", ENGINES)
def test_a_packed_step_is_the_model(engine: str):
    """The same weights, each once, and as much arithmetic in products as the model has."""
    g = step(LLAMA, "prefill")
    packed, plain = (report(g, profile) for profile in (engine, "eager"))
    assert packed.memory.parts["weights"] == plain.memory.parts["weights"]
    flops = [
        sum(x.flops for x in s.kernels if isinstance(x.node.op, k.Gemm)) for s in (packed, plain)
    ]
    assert flops[0] == flops[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_decoding_is_one_launch_of_a_graph(engine: str):
    decode, prefill = (report(step(LLAMA, phase), engine) for phase in ("decode", "prefill"))
    assert [s.name for s in decode.timeline.spans if s.kind == "launch" and s.lane == "host"] == [
        "graph"
    ]
    assert "graph" not in {s.name for s in prefill.timeline.spans}
    there = gpuir.load_profile(engine, gpuir.load_target("h100-sxm"))
    assert decode.timeline.profile.host == there.decode


@pytest.mark.parametrize(
    ("engine", "target", "library", "experts"),
    [
        ("vllm", "a100", "", "vllm"),
        ("vllm", "b200-sxm", "", "trtllm"),
        ("sglang", "a100", "flashinfer", "sglang"),
        ("sglang", "h100-sxm", "fa3", "sglang"),
        ("sglang", "b200-sxm", "", "trtllm"),
        ("trtllm", "h100-sxm", "trtllm", "cutlass"),
    ],
)
def test_whose_kernels(engine: str, target: str, library: str, experts: str):
    g = gpuir.lower(step(MIXTURE, "decode"), profile=engine, target=target)
    assert {n.op.library for n in g.nodes if isinstance(n.op, k.Attention)} == {library}
    assert {n.op.library for n in g.nodes if isinstance(n.op, k.Experts)} == {experts}
    assert not any("no target was known" in text for text in g.assumed)


def test_a_target_that_is_not_known_is_said():
    g = gpuir.lower(step(LLAMA, "decode"), profile="sglang")
    assert any("no target was known" in text for text in g.assumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "phase", "batch", "tokens"),
    [("vllm", "decode", 16, 2048), ("sglang", "decode", 16, 2048), ("trtllm", "prefill", 1, 2048)],
)
def test_steps_take_what_the_kernels_put_down_by_hand_take(
    engine: str, phase: str, batch: int, tokens: int
):
    """Within a tenth: there norms are pointwise kernels, and attention writes its cache."""
    target = load_target("h100-sxm")
    decoder = decoders()["meta-llama/Llama-3.1-8B-Instruct"]
    share = Share.of(build, decoder, 1)
    deployment = Deployment(decoder, target, engine, "bf16", "bf16", 1)
    new = 1 if phase == "decode" else tokens
    part = Part(*(np.array([float(n)]) for n in (batch, new, tokens + (phase == "decode"))))
    by_hand = sum(
        times * float(kernel_s(work, target)[0, 0])
        for times, work in launches(share, deployment, Step((part,)))
    )
    found = report(step(LARGE, phase, batch, tokens), engine).timeline.device_s
    assert found == pytest.approx(by_hand, rel=0.1)


# ---------------------------------------------------------------------------- memory


EVENTS = ((0, 4 * GIB), (1, 64 * MIB), (1, -64 * MIB))


@pytest.mark.parametrize(
    ("engine", "reserved"),
    [("vllm", 0.92 * 80), ("sglang", 0.88 * 80), ("trtllm", 4.0625 + 68.34375)],
)
def test_a_pool_takes_its_share(engine: str, reserved: float):
    found = find_allocator(engine)(EVENTS, {0}, 80 * GIB)
    assert found == pytest.approx(reserved * GIB, rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pool_is_no_less_than_what_is_needed(engine: str):
    held = caching(EVENTS, {0}, UNLIMITED)
    assert find_allocator(engine)(EVENTS, {0}, UNLIMITED) == held
    assert find_allocator(engine)(EVENTS, {0}, 4 * GIB) >= held
