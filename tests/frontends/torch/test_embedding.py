"""Bags of embeddings against torch, and how many launches they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gpuir  # noqa: E402
from gpuir import interp  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.program import Program  # noqa: E402

ROWS = (torch.randint(0, 50, (7, 5)),)
APART = (torch.randint(0, 50, (20,)), torch.tensor([0, 3, 3, 9, 15]))  # the second bag is empty
TO_THE_END = (APART[0], torch.tensor([0, 3, 9, 20]))


@pytest.mark.parametrize(
    ("how", "args", "launches"),
    [
        ({"mode": "sum"}, ROWS, 1),
        ({"mode": "mean"}, ROWS, 1),
        ({"mode": "max"}, ROWS, 1),
        ({"mode": "sum"}, APART, None),
        ({"mode": "mean"}, APART, None),
        ({"mode": "max"}, APART, None),
        ({"mode": "sum", "include_last_offset": True}, TO_THE_END, None),
    ],
)
def test_bags(how: dict[str, Any], args: tuple[Any, ...], launches: int | None):
    torch.manual_seed(0)
    module = torch.nn.EmbeddingBag(50, 8, **how).eval()
    model = load(Program(module, args))
    graph = model.graph
    values = {v.name: a.numpy() for v, a in zip(graph.inputs, args, strict=True)}
    values |= {v.name: model.weights[v.name] for v in graph.params}
    kernels = gpuir.lower(graph, profile="ideal")
    for g in (graph, kernels):
        (found,) = interp.run(g, values).values()
        np.testing.assert_allclose(found, module(*args).detach().numpy(), rtol=1e-5, atol=1e-6)
    ops = [n.op.name for n in kernels.nodes if n.op.name != "k.view"]
    assert launches is None or ops == ["k.gather"] * launches


def test_a_bag_reads_its_rows_not_its_table():
    module = torch.nn.EmbeddingBag(1_000_000, 64, mode="sum", device="meta")
    ids = torch.zeros((2048, 32), dtype=torch.int64, device="meta")
    summary = gpuir.summary(gpuir.analyze(load(Program(module.eval(), (ids,))).graph, "a100"))
    rows, sums, indices = 2048 * 32 * 64 * 4, 2048 * 64 * 4, 2048 * 32 * 8
    assert sum(kernel.size for kernel in summary.kernels) == rows + sums + indices
