"""`examples/rank_architectures.py`: its latencies are `analyze`'s, its front is one."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpuir

EXAMPLE = Path(__file__).parent.parent / "examples/rank_architectures.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("rank_architectures", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_space_has_as_many_architectures_as_it_says(example):
    found = example.space()
    assert len(found) == len(set(found)) == 20_736


def test_latencies_are_those_of_single_analyses(example):
    choices = random.Random(3).sample(example.space(), 4)
    for choice, (worth, *latencies) in zip(choices, example.ranked(choices), strict=True):
        graph = example.build(choice)
        assert worth == example.objective(graph)
        for gpu, latency_s in zip(example.GPUS, latencies, strict=True):
            alone = gpuir.analyze(graph, gpu, profile="ort")
            assert latency_s == alone.latency_s


def test_nothing_on_the_front_is_beaten_and_all_else_is(example):
    draw = np.random.default_rng(0)
    worth, latency_s = draw.integers(0, 20, 200).astype(float), draw.integers(0, 20, 200) / 7
    front = example.front(worth, latency_s)
    assert list(latency_s[front]) == sorted(set(latency_s[front]))

    def beats(i, j):
        no_worse = worth[i] >= worth[j] and latency_s[i] <= latency_s[j]
        return no_worse and (worth[i], latency_s[i]) != (worth[j], latency_s[j])

    values = {(worth[i], latency_s[i]) for i in front}
    for j in range(len(worth)):
        beaten = any(beats(i, j) for i in range(len(worth)))
        assert beaten == ((worth[j], latency_s[j]) not in values)


@pytest.mark.slow
def test_it_ranks_and_draws(tmp_path):
    table, plot = tmp_path / "rank.csv", tmp_path / "front.svg"
    args = ("--count", "30", "--workers", "1", "--csv", str(table), "--plot", str(plot))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank correlation" in done.stdout
    assert len(table.read_text().splitlines()) == 31
    assert plot.read_text().count("<svg") == 1
