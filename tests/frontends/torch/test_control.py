"""Branches and loops of a program become regions that give torch's numbers; attention with
functions of its own is one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.walk import numbers  # noqa: E402
from gpuir.interp import run  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own


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
    summary = gpuir.analyze(Either().eval(), (torch.rand(3, 8),), target="a100")
    assert summary.idle > 0
    assert {x.node.op.name for x in summary.kernels if x.runs} >= {"k.gemm", "k.map", "k.reduce"}


class Call(torch.nn.Module):
    """A function of a layer and of what it is given."""

    def __init__(self, fn: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.fn, self.layer = fn, torch.nn.Linear(8, 8)
        self.held = held

    def forward(self, *args: Any) -> Any:
        return self.fn(self.layer, *args, **self.held)


def agrees(
    fn: Callable[..., Any], *args: Any, trip_counts: Mapping[str, int] = {}, **held: Any
) -> gpuir.Graph:
    """Graph and kernels give what torch gives."""
    model = Call(fn, **held).eval()
    with torch.no_grad():
        made = load(model, args=args, strict=True, trip_counts=trip_counts)
        want = model(*args)
    values = {v.name: numbers(a) for v, a in zip(made.graph.inputs, args, strict=True)}
    values |= {v.name: made.weights[v.name] for v in made.graph.params}
    for graph in (made.graph, gpuir.lower(made.graph, profile="eager")):
        found = run(graph, values).values()
        for a, b in zip(found, want if isinstance(want, tuple) else (want,), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    return made.graph


def trips(graph: gpuir.Graph) -> list[int]:
    return [n.op.trips for n in graph.nodes if n.op.name == "t.loop"]


def test_a_while_loop_runs_as_often_as_its_condition_says():
    from torch._higher_order_ops.while_loop import while_loop

    def counted(layer: Any, x: Any) -> Any:
        start = (torch.zeros((), dtype=torch.int64), x)
        return while_loop(lambda i, x: i < 10, lambda i, x: (i + 1, layer(x).tanh()), start)

    def by_integers(layer: Any, x: Any) -> Any:
        return while_loop(lambda i, x: i < 6, lambda i, x: (i + 2, layer(x).tanh()), (0, x))[1]

    assert trips(agrees(counted, torch.randn(2, 8))) == [10]
    assert trips(agrees(by_integers, torch.randn(2, 8))) == [3]


def test_a_while_loop_whose_condition_is_computed_asks_how_often():
    from torch._higher_order_ops.while_loop import while_loop

    def fn(layer: Any, x: Any) -> Any:
        return while_loop(lambda x: x.sum() < 100, lambda x: (layer(x).abs() + x + 5,), (x,))

    x = torch.zeros(2, 8)
    with pytest.raises(gpuir.GpuirError, match="--trip-count while_loop"):
        agrees(fn, x)
    assert trips(agrees(fn, x, trip_counts={"while_loop": 20})) == [20]  # it stops by itself
    with pytest.raises(gpuir.GpuirError, match="no loop has the name 'while'"):
        agrees(fn, x, trip_counts={"while_loop": 20, "while": 3})


def test_scans_and_maps_run_row_by_row():
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as map_rows
    from torch._higher_order_ops.scan import scan

    def scans(layer: Any, h: Any, x: Any) -> Any:
        return scan(lambda h, x: (layer(h) + x, h.sin()), h, x, dim=0)

    def maps(layer: Any, x: Any, y: Any) -> Any:
        return map_rows(lambda x, y: layer(x) + y, x, y)

    def sums(layer: Any, x: Any) -> Any:
        return associative_scan(lambda a, b: a + b, x, dim=0, combine_mode="generic")

    assert trips(agrees(scans, torch.randn(8), torch.randn(5, 8))) == [5]
    assert trips(agrees(maps, torch.randn(5, 8), torch.randn(8))) == [5]
    agrees(sums, torch.randn(16, 8))


Q = torch.randn(2, 4, 256, 32)
K, V = torch.randn(2, 2, 2, 256, 32)
MASKS: dict[str, tuple[Any, tuple[bool, int | None]]] = {
    "none": (None, (False, None)),
    "causal": (lambda b, h, i, j: i >= j, (True, None)),
    "window": (lambda b, h, i, j: (i >= j) & (i - j <= 30), (True, 30)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_flex_attention_is_one_kernel(mask: str, cap: float):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rule, (causal, window) = MASKS[mask]
    blocks = rule and create_block_mask(rule, None, None, 256, 256, device="cpu")

    def bent(score: Any, *_: Any) -> Any:
        return cap * torch.tanh(score / cap)

    def fn(layer: Any, q: Any, k: Any, v: Any, **held: Any) -> Any:
        return flex_attention(q, k, v, enable_gqa=True, return_lse=True, scale=0.5, **held)

    held = {"block_mask": blocks, "score_mod": bent if cap else None}
    graph = agrees(fn, Q, K, V, **held)
    (op,) = (n.op for n in graph.nodes if n.op.name == "t.attention")
    assert (op.causal, op.window, op.softcap) == (causal, window, cap)
