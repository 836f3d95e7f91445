"""PyTorch's group norm: a kernel of moments and one that scales, as long as they were measured."""

from __future__ import annotations

from typing import Any

import pytest

import gpuir
from gpuir.ops import kernel as k
from gpuir.run.loading import load_text

GRAPH = """graph @g of pytorch {{
  in %x: f32[{images}, {channels}, {cells}]
  %y: f32[{images}, {channels}, {cells}] = t.normalize(%x, [1, 2], groups={groups}) at "m:norm"
  out %y
}}"""


def answer(target: str, profile: str = "eager", **sizes: int) -> gpuir.Answer:
    return gpuir.analyze(load_text(GRAPH.format(**sizes)), target, profile=profile)


@pytest.mark.parametrize(
    ("target", "measured_s"),
    [
        ("a100-sxm-40gb", 1.21e-3),
        ("a100-sxm-80gb", 1.15e-3),
        ("h100-sxm-80gb", 0.675e-3),
        ("l40s", 1.24e-3),
        ("rtx-a6000", 1.27e-3),
        ("t4", 3.9e-3),
    ],
)
def test_few_large_groups(target: str, measured_s: float):
    """128 groups of 524,288 cells: KernelBench, level 1, problem 35."""
    found = answer(target, images=16, channels=64, cells=65536, groups=8)
    assert found.device_s == pytest.approx(measured_s, rel=0.25)


@pytest.mark.parametrize(("channels", "measured_s"), [(256, 135e-6), (512, 258e-6)])
def test_many_small_groups(channels: int, measured_s: float):
    """Groups of 2,048 cells on B200: linkedin/Liger-Kernel 0.7.0, its column huggingface."""
    found = answer("b200", images=128, channels=channels, cells=512, groups=channels // 4)
    assert found.device_s == pytest.approx(measured_s, rel=0.25)


def test_other_stacks_have_kernels_of_their_own():
    sizes: dict[str, Any] = {"images": 16, "channels": 64, "cells": 65536, "groups": 8}
    for profile, library in (("eager", "aten"), ("compiled", "triton"), ("ort", "")):
        nodes = answer("a100", profile, **sizes).graph.nodes
        assert {n.op.library for n in nodes if isinstance(n.op, k.Reduce)} == {library}
    assert answer("a100", "ideal", **sizes).device_s < answer("a100", **sizes).device_s
