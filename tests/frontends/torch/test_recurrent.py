"""nn.LSTM, GRU and RNN: what gpuir loads means what torch computes, and launches what it may."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.interp import run  # noqa: E402
from gpuir.ir.errors import ModelError  # noqa: E402
from gpuir.ir.verify import verify  # noqa: E402

CELLS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}
STEPS, BATCH, INPUTS, HIDDEN = 3, 4, 6, 5


def layer(cell: str, **how: Any) -> Any:
    torch.manual_seed(0)
    return CELLS[cell](INPUTS, HIDDEN, **how).eval()


def agrees(net: Any, x: Any, *hx: Any) -> gpuir.Graph:
    """The loaded graph, having given what torch gives."""
    model = load(net, args=(x, *hx))
    verify(model.graph, "torch")
    assert not model.warnings
    flat = [x, *(h for given in hx for h in (given if isinstance(given, tuple) else (given,)))]
    names = [v.name for v in model.graph.inputs]
    feeds = {name: v.numpy() for name, v in zip(names, flat, strict=True)}
    weights = {p.name: model.weights[p.name] for p in model.graph.params}
    with torch.no_grad():
        y, last = net(x, *hx)
    wanted = (y, *(last if isinstance(last, tuple) else (last,)))
    found = run(model.graph, weights | feeds)
    for value, array in zip(model.graph.outputs, wanted, strict=True):
        np.testing.assert_allclose(found[value.name], array.numpy(), rtol=1e-4, atol=1e-5)
    return model.graph


HOW = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "batch_first": True},
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_as_torch(cell: str, how: dict[str, Any]):
    agrees(layer(cell, **how), torch.randn(STEPS, BATCH, INPUTS))


@pytest.mark.parametrize("cell", CELLS)
def test_from_a_given_state(cell: str):
    h, c = torch.randn(2, 1, BATCH, HIDDEN)
    agrees(layer(cell), torch.randn(STEPS, BATCH, INPUTS), (h, c) if cell == "lstm" else h)


@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_without_a_batch(cell: str):
    agrees(layer(cell), torch.randn(STEPS, INPUTS))


def test_rnn_of_relu():
    agrees(layer("rnn", nonlinearity="relu"), torch.randn(STEPS, BATCH, INPUTS))


@pytest.mark.parametrize(("cell", "maps"), [("lstm", 1), ("gru", 1), ("rnn", 0)])
def test_a_layer_is_a_product_and_a_loop_of_one_more(cell: str, maps: int):
    graph = agrees(layer(cell), torch.randn(STEPS, BATCH, INPUTS))
    kernels = Counter(n.op.name for n in gpuir.lower(graph, profile="ideal").walk())
    assert kernels["k.gemm"] == 2 and kernels["k.map"] == maps
    assert not kernels["k.copy"] + kernels["k.gather"]


def test_projections_are_refused():
    with pytest.raises(ModelError, match="proj_size"):
        load(layer("lstm", proj_size=3), args=(torch.randn(STEPS, BATCH, INPUTS),))
