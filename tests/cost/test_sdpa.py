"""Which kernel PyTorch's attention takes, by what it is given and where."""

from __future__ import annotations

import pytest

import gpuir
from gpuir.loading import load_text
from gpuir.ops import kernel as k

GRAPH = """graph @g of pytorch {{
  in %q: {d}[4, 16, 1024, 64]
  in %k: {d}[4, 16, 1024, 64]
  in %v: {d}[4, 16, 1024, 64]
  in %m: bool[1024, 1024]
  %y: {d}[4, 16, 1024, 64] = t.attention(%q, %k, %v{how}) at "m:sdpa"
  out %y, %m
}}"""


def time_of(how: str, target: str, profile: str = "eager", dtype: str = "f16") -> float:
    g = gpuir.analyze(load_text(GRAPH.format(d=dtype, how=how)), target, profile=profile)
    (cost,) = [n.cost for n in g.nodes if isinstance(n.op, k.Attention) and n.cost]
    return cost.time_s


@pytest.mark.parametrize("profile", ["eager", "compiled"])
@pytest.mark.parametrize("target", ["a100", "l4", "rtx4090"])
def test_a_mask_takes_flash_attention_away(profile: str, target: str):
    plain = time_of("", target, profile)
    assert time_of(", %m", target, profile) > 1.2 * plain
    causal = time_of(", causal=true", target, profile)
    assert causal < plain, "what a square causal call hides is skipped"
    assert time_of(", causal=true, window=127", target, profile) > 1.2 * plain, "as a mask"


def test_cudnn_takes_masks():
    """On sm_90 it comes first: no product more, and the mask's bytes."""
    plain, masked = (time_of(how, "h100-sxm") for how in ("", ", %m"))
    assert plain <= masked < 1.1 * plain


def test_other_stacks_fuse_masks():
    for profile in ("tensorrt", "ideal"):
        plain, masked = (time_of(how, "a100", profile) for how in ("", ", %m"))
        assert plain <= masked < 1.1 * plain


def test_before_ampere_there_is_no_flash_attention():
    assert time_of("", "t4") > 1.2 * time_of("", "t4", "ideal")
