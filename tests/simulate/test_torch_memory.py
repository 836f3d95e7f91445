"""Peaks beside PyTorch's own accounting of the same program (validation.agreement.torch_memory)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("validation.agreement.torch_memory")


MODELS = ("perceptron", "convolutions", "block", "block, scores in memory", "tower of 4 blocks")


@pytest.mark.parametrize("name", MODELS)
def test_inference_to_the_byte(tool: ModuleType, name: str):
    eager, program, graph = tool.inference(tool.MODELS[name]())
    assert tool.memory(graph, block=1).peak_bytes == program <= eager


@pytest.mark.parametrize("name", MODELS)
def test_training_within_one_percent(tool: ModuleType, name: str):
    eager, stepped, joint, own = tool.training(name, tool.MODELS[name]())
    assert tool.memory(joint, block=1).peak_bytes == pytest.approx(eager, rel=1e-3)
    off = 0.1 if name == "convolutions" else 0.01  # a mean's gradient is a view
    assert tool.memory(own, block=1).peak_bytes == pytest.approx(eager, rel=off)
    step = tool.memory(tool.with_step(own), block=1)
    assert step.peak_bytes == pytest.approx(stepped, rel=off)


def test_hugging_face_models_keep_what_is_tied_once(tool: ModuleType):
    pytest.importorskip("transformers")
    eager, program, graph = tool.inference(tool.MODELS["GPT-2"]())
    assert tool.memory(graph, block=1).peak_bytes == program == eager
