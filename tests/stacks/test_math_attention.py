"""Attention that none of PyTorch's fused kernels takes: which that is, the numbers of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_calls import Call, gives, loaded  # noqa: E402

import gpuir  # noqa: E402
from gpuir.interp import run  # noqa: E402
from gpuir.ops import kernel as k  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
f16, f64 = torch.float16, torch.float64
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def operands(*q: int, keys: int = 16, groups: int = 3, dtype: Any = None) -> Any:
    """Queries, and keys and values of so many groups of heads."""
    lead = (*q[:-3], groups) if len(q) > 3 else q[:-2]
    of_keys = (torch.randn(*lead, keys, q[-1], dtype=dtype) for _ in range(2))
    return (torch.randn(*q, dtype=dtype), *of_keys)


def mask() -> torch.Tensor:
    seen = torch.rand(2, 1, 16, 16) > 0.5
    seen[0, 0, 3] = False  # a query that sees no key gives zeros
    return seen


CASES: dict[str, Case] = {
    "three axes": (sdpa, operands(6, 12, 8)),
    "two axes": (sdpa, operands(12, 8)),
    "five axes": (sdpa, operands(2, 1, 3, 12, 8)),
    "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), operands(6, 16, 8)),
    "f64": (sdpa, operands(2, 3, 12, 8, dtype=f64)),
    "odd heads in f32": (lambda q, k, v: sdpa(q, k, v, scale=-0.3), operands(2, 3, 12, 5)),
    "groups": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), operands(2, 6, 12, 5)),
    "odd heads in f16, masked": (sdpa, (*operands(2, 3, 16, 12, dtype=f16), mask())),
    "odd heads, a mask added": (sdpa, (*operands(2, 3, 16, 5), torch.randn(16, 16))),
}
FUSED: dict[str, Case] = {
    "f32": (sdpa, operands(2, 3, 12, 8)),
    "f32, masked": (sdpa, (*operands(2, 3, 16, 4), mask())),
    "f16": (sdpa, operands(2, 3, 12, 8, dtype=f16)),
    "odd heads in f16, padded": (sdpa, operands(2, 3, 12, 5, dtype=f16)),
}


@pytest.mark.parametrize("profile", ["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_what_no_fused_kernel_takes_is_written_out(name: str, profile: str):
    fn, args = CASES[name]
    lowered = gpuir.lower(loaded(fn, *args), profile=profile)
    ops = Counter(type(n.op) for n in lowered.nodes)
    assert not ops[k.Attention] and ops[k.Gemm] == 2
    expected = fn(*args).numpy()
    close = 2e-3 if args[0].dtype == f16 else 1e-5
    np.testing.assert_allclose(gives(lowered, args), expected, rtol=close, atol=close)


@pytest.mark.parametrize("name", FUSED)
def test_the_rest_is_one_kernel(name: str):
    fn, args = FUSED[name]
    lowered = gpuir.lower(loaded(fn, *args), profile="eager")
    assert sum(isinstance(n.op, k.Attention) for n in lowered.nodes) == 1


def test_other_stacks_have_kernels_of_their_own():
    fn, args = CASES["three axes"]
    for profile in ("ideal", "tensorrt"):
        lowered = gpuir.lower(loaded(fn, *args), profile=profile)
        assert sum(isinstance(n.op, k.Attention) for n in lowered.nodes) == 1


class Trained(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any], like: torch.Tensor):
        super().__init__()
        self.fn = fn
        names = ("q", "k", "v")
        for name in names:
            scale = torch.ones(like.shape[-1], dtype=like.dtype)
            self.register_parameter(name, torch.nn.Parameter(scale))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        y = self.fn(q * self.q, k * self.k, v * self.v)
        return (y * y).sum()


@pytest.mark.parametrize(
    ("name", "autodiff"),
    [  # groups torch writes out itself: for a CPU it has no fused attention of them
        *(("f64", "gpuir"), ("f64", "torch"), ("causal of four axes", "gpuir")),
        *(("causal of four axes", "torch"), ("groups", "gpuir")),
    ],
)
def test_its_gradient_is_written_out_too(name: str, autodiff: str):
    causal = (CASES["causal"][0], operands(2, 3, 16, 5))
    fn, args = CASES.get(name, causal)
    module = Trained(fn, args[0])
    graph = gpuir.load(module, args=args, train=True, autodiff=autodiff)
    lowered = gpuir.lower(graph, profile="eager")
    attentions = (k.Attention, k.AttentionGradient)
    assert not any(isinstance(n.op, attentions) for n in lowered.nodes)
    values = {v.name: x.numpy() for v, x in zip(graph.inputs, args, strict=True)}
    values |= {name: x.detach().numpy() for name, x in module.named_parameters()}
    found = run(lowered, values)
    module(*args).backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[f"{key}.grad"], parameter.grad.numpy(), rtol=1e-3)


def test_scores_are_in_memory():
    """Eight of 1,024 by 1,024 in f32, and several times as long as the fused kernel."""
    args = [torch.empty(8, 1024, 64, dtype=f16, device="meta") for _ in range(3)]
    three = gpuir.analyze(Call(sdpa), args, "a100").graph
    four = gpuir.analyze(Call(sdpa), [x[None] for x in args], "a100").graph
    took = [sum(n.cost.time_s for n in g.nodes if n.cost) for g in (three, four)]
    assert took[0] > 3 * took[1]
    made = {v.type.nbytes for n in three.nodes for v in n.results}
    assert 8 * 1024 * 1024 * 4 in made
