"""`compiled` against torch's Inductor, which schedules each program for a GPU that is not there.

See tools/inductor_agreement.py and docs/fusion.md.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torch._inductor.scheduler", reason="this PyTorch has no Inductor")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
TOOL = Path(__file__).parent.parent.parent / "tools" / "inductor_agreement.py"
nn = torch.nn


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("inductor_agreement", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["inductor_agreement"] = module
    spec.loader.exec_module(module)
    return module


class Residual(nn.Module):
    """The sum of a residual stream is read by a norm and by the next sum: computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Any) -> Any:
        h = x + self.a(x)
        return h + self.b(self.n(h))


class Heads(nn.Module):
    """Attention in primitives, masked: heads are copied for the batched product, with their
    biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = (f(x).view(2, 32, 4, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = torch.softmax(q @ k.transpose(-1, -2) * 0.25 + mask, -1)
        return self.o((p @ v).transpose(1, 2).reshape(2, 32, 64))


class Plain(nn.Module):
    """Attention in primitives, with scaled scores: a pattern that Inductor knows."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


class Rotary(nn.Module):
    """Halves turned and joined again: slices and a join are read in place."""

    def forward(self, x: Any, c: Any, s: Any) -> Any:
        a, b = x[..., :32], x[..., 32:]
        return x * c + torch.cat((-b, a), -1) * s


class Square(nn.Module):
    """Squeeze and excitation: an average over an image is two kernels, the gate a third."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = nn.Conv2d(32, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128)
        self.s = nn.Conv2d(128, 128, 1)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.n(self.c(x)))
        return y * torch.sigmoid(self.s(y.mean((2, 3), keepdim=True)))


def mlp() -> Any:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))


X = torch.zeros(2, 32, 64)
CASES = {
    # 3 products; a bias goes with the GELU that alone reads it, and into the call before a norm
    "mlp": (mlp, (X,), [2, 1, 1]),
    "residual": (Residual, (X,), [2, 1, 1]),
    "heads": (Heads, (X, torch.zeros(2, 1, 32, 32)), [6, 4, 1]),
    "rotary": (Rotary, (X, X, X), [0, 1, 0]),
    "squeeze": (Square, (torch.zeros(2, 32, 28, 28),), [2, 4, 2]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_those_of_inductor(tool: Any, name: str) -> None:
    build, args, expected = CASES[name]
    found = tool.compare(name, build(), *args)
    kinds = ("extern", "pointwise", "reduction")
    assert [sum(x.kind == kind for x in found.theirs) for kind in kinds] == expected
    ours, theirs = (
        # Inductor divides a sum where it is read, and forgets of its second step whose it is
        sorted(sorted(x.ops - {"mean"}) for x in side)
        for side in (found.ours, found.theirs)
    )
    assert ours == theirs


def test_attention_that_a_pattern_finds_is_one_call(tool: Any) -> None:
    heads = torch.zeros(2, 4, 32, 16)
    found = tool.compare("plain", Plain(), heads, heads, heads)
    assert [x.kind for x in found.theirs] == [x.kind for x in found.ours] == ["extern"]


# launches over Inductor's kernels, F1 of pairs of ops that share one, kernels of the same ops
MODELS = {
    "bert-eager": (1.0, 1.0, 1.0),
    "gpt2-sdpa": (0.9, 0.93, 0.81),
    "llama-sdpa": (0.94, 0.93, 0.76),
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_agree_at_least_as_far(tool: Any, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    ratio, f1, same = MODELS[name]
    module, args, kwargs = tool.MODELS[name]()
    found = tool.compare(name, module, *args, **kwargs)
    assert ratio <= found.ratio <= 1.02
    assert found.shared()[2] >= f1
    assert found.same() >= same
