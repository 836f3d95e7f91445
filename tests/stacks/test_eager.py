"""The eager profile launches what eager PyTorch dispatches: the same products, copies and the
rest."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("validation.agreement.eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("perceptron", "convolutions", "block", "block, scores in memory"),
        *("tower of 4 blocks", "BERT", "ViT"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_inference_launches_what_is_dispatched(tool: ModuleType, name: str):
    seen, ours = tool.inference(tool.MODELS[name]())
    assert ours == seen and seen.total() > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "floor"), [("block, scores in memory", 1.0), ("convolutions", 0.85), ("Llama", 0.97)]
)
@pytest.mark.filterwarnings("ignore")
def test_training_launches_the_same_products(tool: ModuleType, name: str, floor: float):
    """A loss is a few launches more here."""
    seen, ours = tool.training(name, tool.MODELS[name]())
    assert ours["product"] == seen["product"]
    assert tool.share(seen, ours) >= floor
