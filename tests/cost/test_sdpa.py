"""Which kernel PyTorch's attention takes, by what it is given and where."""

from __future__ import annotations

import pytest

import gpuir
from gpuir.cost import attention
from gpuir.cost.reading import work_of
from gpuir.ops import kernel as k
from gpuir.run.loading import load_text

GRAPH = """graph @g of pytorch {{
  in %q: {d}[4, 16, 1024, 64]
  in %k: {d}[4, 16, 1024, 64]
  in %v: {d}[4, 16, 1024, 64]
  in %m: bool[1024, 1024]
  %y: {d}[4, 16, 1024, 64] = t.attention(%q, %k, %v{how}) at "m:sdpa"
  out %y, %m
}}"""


def time_of(how: str, target: str, profile: str = "eager", dtype: str = "f16") -> float:
    g = gpuir.analyze(load_text(GRAPH.format(d=dtype, how=how)), target, profile=profile).graph
    (cost,) = [n.cost for n in g.nodes if isinstance(n.op, k.Attention) and n.cost]
    return cost.time_s


@pytest.mark.parametrize("profile", ["eager", "compiled"])
@pytest.mark.parametrize("target", ["a100", "l4", "rtx4090"])
def test_a_mask_takes_flash_attention_away(profile: str, target: str):
    plain = time_of("", target, profile)
    assert time_of(", %m", target, profile) > 1.2 * plain
    causal = time_of(", causal=true", target, profile)
    assert causal < plain, "what a square causal call hides is skipped"
    assert time_of(", causal=true, window=127", target, profile) > 1.05 * plain, "as a mask"


def test_cudnn_takes_masks():
    """On sm_90 it comes first: no product more, and the mask's bytes."""
    plain, masked = (time_of(how, "h100-sxm") for how in ("", ", %m"))
    assert plain <= masked < 1.1 * plain


def test_cudnn_reads_a_cache_sooner_than_flash_attention_on_ampere():
    """Eight sequences of 8,192 keys of 8 heads, 64 heads of queries: 168 us measured on A100
    (NVIDIA/cudnn-frontend), where FlashAttention-2 splits less than the device has room for."""
    text = """graph @g of pytorch {
  in %q: bf16[8, 64, 1, 128]
  in %k: bf16[8, 8, 8192, 128]
  in %v: bf16[8, 8, 8192, 128]
  %y: bf16[8, 64, 1, 128] = t.attention(%q, %k, %v) at "m:sdpa"
  out %y
}"""

    def kernel(profile: str) -> float:
        return gpuir.analyze(load_text(text), "a100-pcie-80gb", profile=profile).device_s

    assert kernel("eager-cudnn") < 0.8 * kernel("eager")
    assert kernel("eager-cudnn") == pytest.approx(168e-6, rel=0.2)


def test_cudnn_hides_more_of_the_softmax_from_hopper_on():
    for target in ("h200-sxm", "b200"):
        assert time_of("", target, "eager-cudnn") < time_of("", target)


def test_other_stacks_fuse_masks():
    for profile in ("tensorrt", "ideal"):
        plain, masked = (time_of(how, "a100", profile) for how in ("", ", %m"))
        assert plain <= masked < 1.1 * plain


def test_before_ampere_there_is_no_flash_attention():
    assert time_of("", "t4") > 1.2 * time_of("", "t4", "ideal")


WIDE = GRAPH.replace("1024, 64]", "1024, {e}]")


def wide(head: int, target: str) -> gpuir.Graph:
    text = WIDE.format(d="f16", e=head, how="")
    return gpuir.analyze(load_text(text), target, profile="eager").graph


def is_efficient(g: gpuir.Graph, target: str) -> bool:
    (op,) = [n.op for n in g.nodes if isinstance(n.op, k.Attention)]
    return attention.is_efficient(work_of(op), gpuir.load_target(target))


@pytest.mark.parametrize("target", ["a100", "h100-sxm", "rtx4090"])
def test_neither_flash_attention_nor_cudnn_takes_heads_of_more_than_256_cells(target: str):
    found = [is_efficient(wide(head, target), target) for head in (256, 264)]
    assert found == [False, True]


@pytest.mark.parametrize(
    ("target", "said"), [("t4", True), ("v100-sxm2-16gb", True), ("a100", False)]
)
def test_bf16_before_ampere_is_no_fused_kernel_and_that_is_said(target: str, said: bool):
    g = gpuir.analyze(load_text(GRAPH.format(d="bf16", how="")), target, profile="eager").graph
    assert said == any("no fused kernel" in text for text in gpuir.analyze(g).device.assumed)
    (cost,) = [n.cost for n in g.nodes if isinstance(n.op, k.Attention) and n.cost]
    assert cost.interval and said == (cost.interval[1] > 4 * cost.time_s)
