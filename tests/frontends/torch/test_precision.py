"""Regions under torch.autocast have the casts that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.interp import run  # noqa: E402
from gpuir.ir.types import bf16, f32  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Mixed(torch.nn.Module):
    """A region that casts, one in it that does not, and what follows."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(16)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=self.device, dtype=torch.bfloat16):
            y = self.norm(torch.nn.functional.gelu(self.a(x)))
            y = torch.softmax(self.b(y), -1) @ self.b.weight
            with torch.autocast(device_type=self.device, enabled=False):
                z = self.b(y.float())
            z = torch.nn.functional.mse_loss(z, x, reduction="none") + z
        return z * 2 + x


class Attends(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return y + x


def values(made: Any, x: torch.Tensor) -> np.ndarray[Any, Any]:
    weights = {v.name: made.weights[v.name] for v in made.graph.params}
    (found,) = run(made.graph, {made.graph.inputs[0].name: x.numpy(), **weights}).values()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True])
def test_the_casts_of_a_region(saved: bool, tmp_path: Path):
    torch.manual_seed(0)
    module, x = Mixed().eval(), torch.randn(4, 8)
    with torch.no_grad():
        wanted = module(x)
    source: Any = torch.export.export(module, (x,))
    if saved:
        torch.export.save(source, tmp_path / "mixed.pt2")
        source = tmp_path / "mixed.pt2"
    made = load(source, strict=True)
    if not saved:  # of a file's weights the shapes alone are read
        np.testing.assert_allclose(values(made, x), wanted.numpy(), rtol=2e-2, atol=2e-2)
    products = [n for n in made.graph.nodes if isinstance(n.op, t.Matmul)]
    dtypes = [n.op.a.type.dtype for n in products if isinstance(n.op, t.Matmul)]
    assert dtypes == [bf16, bf16, bf16, f32]
    assert [str(n.locs[0]).split(":")[1] for n in products][:2] == ["a/linear", "b/linear_1"]
    assert not [a for a in made.graph.assumed if "autocast" in a]


def test_the_region_of_a_live_module():
    x = torch.randn(1, 2, 6, 8)
    made = load(Attends(), args=(x,), strict=True)
    (attention,) = [n.op for n in made.graph.nodes if isinstance(n.op, t.Attention)]
    assert attention.q.type.dtype == bf16
    np.testing.assert_allclose(values(made, x), Attends()(x).numpy(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("autodiff", ["torch", "gpuir"])
def test_a_region_is_trained(autodiff: str):
    graph = gpuir.load(Mixed(), args=(torch.randn(4, 8),), train=True, autodiff=autodiff)
    made = [v for v in graph.outputs if v.name.endswith(".grad")]
    assert len(made) == 6 and all(v.type.dtype == f32 for v in made)
    assert bf16 in {v.type.dtype for n in graph.nodes for v in n.results}


@pytest.mark.parametrize(("device", "place"), [("cpu", "meta"), ("cuda", "cpu")])
def test_a_region_that_torch_leaves_as_it_is_says_so(device: str, place: str):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("torch turns autocast for a GPU off only where there is none")
    module = Mixed(device).eval().to(place)
    graph = load(module, args=(torch.randn(4, 8, device=place),), strict=True).graph
    (said,) = [a for a in graph.assumed if f"autocast('{device}')" in a]
    assert f"does not cast tensors on {place}" in said and "not in bf16" in said
