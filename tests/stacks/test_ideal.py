"""`ideal` fuses what any stack here fuses: under no other profile are a model's kernels quicker."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import gpuir
from gpuir.ir.graph import Graph
from gpuir.targets.support import runs_on

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))
LARGE = ("densenet121", "inception_v2", "vgg19")  # their like are smaller
SMALL = [path for path in LIGHT if not path.stem.endswith(LARGE)]
# A release with habits has kernels of its own, which another predictor costs.
# Releases without a kernel for attention are left out: with one key its parts are quicker.
OTHERS = [
    name
    for name in gpuir.profile_names()
    if name not in ("ideal", "ort@1.12", "tensorrt@8.5") and not gpuir.load_profile(name).habits
]
ROUNDING = 1.01  # what is computed twice, and how a fitted model sees kernels that differ little


class Recurrent(nn.Module):
    def __init__(self, kind: str, **how: object) -> None:
        super().__init__()
        self.steps = getattr(nn, kind)(64, 128, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(x)[0].relu()


class Block(nn.Module):
    """A layer of an encoder, whose heads PyTorch cuts out of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(96, 3, batch_first=True)
        self.norm = nn.LayerNorm(96)
        self.wide = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        return x + self.wide(x)


class Gated(nn.Module):
    """Depthwise convolutions, a gate over channels, norms of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU())
        self.depth = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.GroupNorm(8, 32))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 32, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.depth(x).relu()
        return (x + y * self.gate(y)).mean((2, 3)).softmax(-1)


PROGRAMS = {
    "lstm": lambda: (Recurrent("LSTM", num_layers=2, bidirectional=True), torch.zeros(12, 2, 64)),
    "lstm of one sequence": lambda: (Recurrent("LSTM"), torch.zeros(12, 1, 64)),
    "gru": lambda: (Recurrent("GRU", batch_first=True), torch.zeros(4, 12, 64)),
    "rnn": lambda: (Recurrent("RNN"), torch.zeros(12, 8, 64)),
    "encoder": lambda: (nn.Sequential(Block(), Block()), torch.zeros(2, 50, 96)),
    "one token": lambda: (nn.Sequential(Block(), Block()), torch.zeros(1, 1, 96)),
    "convolutions": lambda: (Gated(), torch.zeros(4, 3, 64, 64)),
}


def slower_than(g: Graph, target: str) -> dict[str, float]:
    """How many times longer the kernels of `ideal` take than those of profiles that are quicker."""
    device = gpuir.load_target(target)
    times = {
        name: gpuir.analyze(g, target, profile=name).device_s
        for name in ("ideal", *OTHERS)
        if runs_on(gpuir.load_profile(name), device)
    }
    return {
        name: round(times["ideal"] / time, 3)
        for name, time in times.items()
        if times["ideal"] > ROUNDING * time
    }


@pytest.mark.slow
@pytest.mark.parametrize("target", ["a100", "t4", "h100-sxm"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_stack_is_quicker_on_a_program(name: str, target: str):
    module, x = PROGRAMS[name]()
    assert slower_than(gpuir.load(module.eval(), args=(x,)), target) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [p for p in LIGHT if not p.stem.endswith(LARGE)],
    ids=lambda p: p.stem.removeprefix("light_"),
)
def test_no_stack_is_quicker_on_a_classic_net(path: Path):
    assert slower_than(gpuir.load(path), "a100") == {}


def test_no_stack_is_quicker_on_an_encoder():
    g = gpuir.load("tests/encoder.onnx", dims={"batch": 2, "seq": 64})
    assert slower_than(g, "a100") == {}
