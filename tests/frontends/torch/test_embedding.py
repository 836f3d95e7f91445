"""Bags of embeddings against torch, and how many launches they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gpuir  # noqa: E402
from gpuir import interp  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.program import TorchProgram  # noqa: E402

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
    model = load(TorchProgram(module, args))
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
    summary = gpuir.analyze(load(TorchProgram(module.eval(), (ids,))).graph, "a100")
    rows, sums, indices = 2048 * 32 * 64 * 4, 2048 * 64 * 4, 2048 * 32 * 8
    assert sum(kernel.bytes for kernel in summary.kernels) == rows + sums + indices


def test_few_indices_are_sorted_by_one_block():
    """256 threads of 9 keys of eight bytes."""
    for count, launches in ((2304, 1), (2305, 8)):
        module = torch.nn.EmbeddingBag(100, 16, mode="sum", device="meta")
        ids = torch.zeros((count, 1), dtype=torch.int64, device="meta")
        graph = load(TorchProgram(Sum(module).train(), (ids,)), train=True, joint=True).graph
        sorts = [n for n in graph.nodes if getattr(n.op, "fn", "") == "digit_sort"]
        assert len(sorts) == launches


def test_a_tables_gradient_is_sorted_summed_in_parts_and_scattered():
    """The launches of ATen/native/cuda/EmbeddingBag.cu, and the bytes of a few by hand."""
    rows, width, bags, length = 1000, 16, 64, 50
    module = torch.nn.EmbeddingBag(rows, width, mode="sum", device="meta")
    ids = torch.zeros((bags, length), dtype=torch.int64, device="meta")
    loss = Sum(module).train()
    graph = load(TorchProgram(loss, (ids,)), train=True, joint=True).graph
    costed = gpuir.analyze(graph, "a100", profile="eager").graph
    kernels = [k for k in gpuir.analyze(costed).kernels if "embedding_bag_backward" in str(k.locs)]
    count, most = bags * length, rows + bags * length // 10
    line, sums = 8 * count, 4 * most * width + 8 * most
    sizes = [k.bytes for k in kernels]
    assert sizes.count(4 * line) == 8  # keys and places read and written, a digit of eight at once
    assert sum(k.node.op.name == "k.scatter" for k in kernels) == 1
    assert 4 * bags * width + 3 * line + 8 * most + sums in sizes  # parts of ten rows
    assert len(kernels) == 8 + 6  # where runs and parts begin, their sums, the table


class Sum(torch.nn.Module):
    def __init__(self, body: torch.nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Any) -> Any:
        return (self.body(x).square().sum(),)
