"""The eager profile launches what eager PyTorch dispatches: the same products, copies and the
rest."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import pytest

import gpuir

torch = pytest.importorskip("torch")


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


def test_batch_norms_of_mixed_precision_are_one_launch_each_way():
    layers = (torch.nn.Conv2d(8, 8, 1, bias=False), torch.nn.BatchNorm2d(8))
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(0))
    net.register_forward_hook(lambda module, args, y: y.sum())
    args = (torch.zeros(4, 8, 16, 16),)
    g = gpuir.load(net, args=args, train=True, autocast="f16", warn=lambda _: None)
    kernels = gpuir.lower(g, profile="eager")
    norms = [n for n in kernels.nodes if "norm" in str(n.locs) and n.op.name != "k.view"]
    assert [n.op.name for n in norms] == ["k.reduce", "k.reduce"]
