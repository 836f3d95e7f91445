"""Branches of a program: both become regions, and the one taken gives torch's numbers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.interp import run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Either(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x) * 2, (x,))
        return y + 1


@pytest.mark.parametrize("sign", [1, -1])
def test_the_branch_taken_gives_the_numbers(sign: int):
    model, x = Either().eval(), torch.rand(3, 8) * sign
    made = load(model, args=(x,), strict=True)
    weights = {v.name: made.weights[v.name] for v in made.graph.params}
    (found,) = run(made.graph, {made.graph.inputs[0].name: x.numpy(), **weights}).values()
    np.testing.assert_allclose(found, model(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_branch_costs_its_dearer_side():
    summary = gpuir.summary(gpuir.analyze(Either().eval(), (torch.rand(3, 8),), target="a100"))
    assert summary.idle > 0
    assert {x.node.op.name for x in summary.kernels if x.runs} >= {"k.gemm", "k.map", "k.reduce"}
