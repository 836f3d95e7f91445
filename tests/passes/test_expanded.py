"""Expanded tensors of PyTorch programs: in memory once, read as often as it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_calls import Call, gives, loaded  # noqa: E402

import gpuir  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


def wide(index: Any) -> Any:
    return index.unsqueeze(-1).expand(-1, -1, 64)


X, AT, SOURCE = torch.randn(2, 8, 64), torch.randint(0, 8, (2, 16)), torch.randn(2, 16, 64)
ONE = torch.randn(1, 8, 64)
UNIQUE = torch.randperm(8)[:4].repeat(2, 1)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gather": (lambda x, at: x.gather(1, wide(at)), (X, AT)),
    "gather of an expanded tensor": (
        lambda x, at: x.expand(2, -1, -1).gather(1, wide(at)),
        (ONE, AT),
    ),
    "expanded, then transposed": (
        lambda x, at: x.gather(2, at.unsqueeze(-1).expand(-1, -1, 8).transpose(1, 2)),
        (X, AT),
    ),
    "scatter": (lambda x, at, s: x.scatter(1, wide(at), s[:, :4]), (X, UNIQUE, SOURCE)),
    "scatter of an expanded source": (
        lambda x, at, s: x.scatter_add(1, wide(at), s.unsqueeze(-1).expand(-1, -1, 64)),
        (X, AT, SOURCE[..., 0]),
    ),
    "index": (lambda x, at: x.expand(2, -1, -1)[:, at[0]], (ONE, AT)),
    "concat": (lambda x, y: torch.cat([x, y.expand(2, -1, -1)], 1), (X, ONE)),
    "product": (lambda x, w: x @ w.transpose(1, 2).expand(2, -1, -1), (X, ONE)),
    "product of heads": (
        lambda x, w: x.view(2, 2, 4, 64) @ w[None].transpose(2, 3).expand(2, 2, -1, -1),
        (X, ONE),
    ),
    "attention": (
        lambda q, k: torch.nn.functional.scaled_dot_product_attention(
            q.view(2, 2, 4, 64), *(k.view(1, 2, 4, 64).expand(2, -1, -1, -1) for _ in "kv")
        ),
        (X, ONE),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("profile", ["eager", "ideal"])
def test_nothing_is_made_of_an_expanded_operand(name: str, profile: str):
    fn, args = CASES[name]
    kernels = gpuir.lower(loaded(fn, *args), profile=profile)
    launches = [n.op.name for n in kernels.nodes if n.op.name != "k.view"]
    assert len(launches) == 1, gpuir.show(kernels)
    np.testing.assert_allclose(gives(kernels, args), fn(*args), rtol=1e-4, atol=1e-5)


def test_an_expanded_index_is_read_as_large_as_it_is():
    def fn(x: Any, at: Any) -> Any:
        return x.gather(1, at.unsqueeze(-1).expand(-1, -1, 65536))

    args = (torch.empty(8, 256, 65536, device="meta"), torch.empty(8, 512, device="meta").long())
    kernels = gpuir.analyze(Call(fn), args, target="h100-sxm").kernels
    (kernel,) = (x for x in kernels if x.node.op.name != "k.view")
    table, result, index = 8 * 256 * 65536 * 4, 8 * 512 * 65536 * 4, 8 * 512 * 8
    assert kernel.bytes == pytest.approx(table + result + index, rel=0.01)


def test_what_is_packed_first_is_a_copy():
    """A softmax walks along rows that lie in memory (aten's contiguous())."""

    def fn(x: Any) -> Any:
        return x[:, None].expand(-1, 8, -1).softmax(-1)

    kernels = gpuir.lower(loaded(fn, torch.randn(4, 64)), profile="eager")
    names = [n.op.name for n in kernels.nodes if n.op.name != "k.view"]
    assert names == ["k.copy", "k.reduce"]
