"""Grouped products of torch: batched ones of equal groups, and what they mean where they are."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.interp import run  # noqa: E402


class Grouped(torch.nn.Module):
    def forward(self, a: Any, b: Any, ends: Any) -> Any:
        return torch._grouped_mm(a, b, offs=ends)


def array(x: Any) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def loaded(a: tuple[int, ...], b: tuple[int, ...], *ends: int) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    x, w = (torch.randn(shape).to(torch.bfloat16) for shape in (a, b))
    operands = (x, w, torch.tensor(ends, dtype=torch.int32))
    model = load(Grouped(), args=operands)
    assert not model.warnings
    assert model.graph.assumed[-1] == (
        f"rows are spread evenly over the {len(ends)} groups of a grouped product"
    )
    return model, operands


@pytest.mark.parametrize(
    ("a", "b"),
    [((24, 16), (3, 16, 8)), ((3, 16, 8), (8, 24)), ((16, 24), (24, 8))],
    ids=["rows", "columns", "sums"],
)
def test_of_equal_groups_as_torch(a: tuple[int, ...], b: tuple[int, ...]):
    model, operands = loaded(a, b, 8, 16, 24)
    names = [v.name for v in model.graph.inputs]
    found = run(model.graph, dict(zip(names, map(array, operands), strict=True)))
    wanted = Grouped()(*operands).float().numpy()
    (y,) = found.values()
    np.testing.assert_allclose(y.astype(np.float32), wanted, rtol=0.02, atol=0.05)
    kernels = [n.op.name for n in gpuir.lower(model.graph, profile="ideal").nodes]
    assert kernels.count("k.gemm") == 1 and set(kernels) <= {"k.gemm", "k.view"}


def test_fewer_rows_than_groups_read_as_many_matrices():
    model, _ = loaded((2, 16), (8, 16, 8), 0, 1, 1, 1, 2, 2, 2, 2)
    (product,) = (
        n.op for n in gpuir.lower(model.graph, profile="ideal").nodes if n.op.name == "k.gemm"
    )
    assert product.nest.dims == {"b": 2, "m": 1, "n": 8, "k": 16}


def test_groups_are_filled_up():
    model, _ = loaded((25, 16), (3, 16, 8), 8, 16, 25)
    (product,) = (
        n.op for n in gpuir.lower(model.graph, profile="ideal").nodes if n.op.name == "k.gemm"
    )
    assert product.nest.dims == {"b": 3, "m": 9, "n": 8, "k": 16}
    assert model.graph.outputs[0].type.shape == (25, 8)
