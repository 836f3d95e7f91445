"""Benchmarks of layers that are several kernels: mixtures of experts, and recurrent cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from gpuir.cost import routing, sized
from gpuir.cost.lanes import LANE_OPS
from gpuir.cost.work import Looped, Work
from gpuir.fit.kit import FLOATS, Benchmark, Extents, Kit, Run
from gpuir.ir.types import DType

# ---------------------------------------------------------------------------- experts


def _experts_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    tokens, topk, experts = e["tokens"], e["topk"], e["experts"]
    return (routing.mixture(tokens, e["hidden"], e["inter"], topk, experts, dtype=dtype),)


def _experts(kit: Kit, e: Mapping[str, int]) -> Run:
    """From the router's choice to the sum of each token's rows, experts gated by SiLU.

    Token i goes to the experts i + j stride, as `cost.routing.shares` has it without skew. How rows
    are sorted by expert is known before.
    """
    torch, tokens, topk, experts = kit.torch, e["tokens"], e["topk"], e["experts"]
    x = kit.random(tokens, e["hidden"])
    into = kit.random(experts, e["hidden"], 2 * e["inter"])
    back = kit.random(experts, e["inter"], e["hidden"])
    stride = -(-experts // topk)
    chosen = torch.arange(tokens)[:, None] + stride * torch.arange(topk)
    expert, order = (chosen % experts).flatten().sort(stable=True)
    counts = torch.bincount(expert, minlength=experts)
    source = torch.tensor((order // topk).tolist(), device=kit.device)
    multiply = _grouped(kit, counts.tolist())

    def run() -> Any:
        gate, up = multiply(x[source], into).chunk(2, -1)
        rows = multiply(torch.nn.functional.silu(gate) * up, back)
        return torch.zeros_like(x).index_add_(0, source, rows, alpha=1 / topk)

    return run


def _grouped(kit: Kit, counts: Sequence[int]) -> Callable[[Any, Any], Any]:
    """rows sorted by expert, a matrix each expert → their products: in one kernel where torch has
    one for this dtype and device, else one after another."""
    torch = kit.torch
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, device=kit.device)

    def at_once(x: Any, w: Any) -> Any:
        return torch._grouped_mm(x, w, offs=ends)

    def one_by_one(x: Any, w: Any) -> Any:
        out = x.new_empty(len(x), w.shape[-1])
        for rows, result, each in zip(x.split(counts), out.split(counts), w, strict=True):
            if len(rows):
                torch.mm(rows, each, out=result)
        return out

    try:
        at_once(kit.random(sum(counts), 16), kit.random(len(counts), 16, 16))
    except (RuntimeError, AttributeError, TypeError):
        return one_by_one
    return at_once


# ---------------------------------------------------------------------------- recurrence

# cell → its gates, and instructions a cell of state: sigmoids, tanh, and what adds and multiplies
_CELLS = {
    "lstm": (4, 3 * LANE_OPS["sigmoid"] + 2 * LANE_OPS["tanh"] + 8),
    "gru": (3, 2 * LANE_OPS["sigmoid"] + LANE_OPS["tanh"] + 8),
    "rnn": (1, LANE_OPS["tanh"] + 1),
}


def _recurrent(cell: str) -> Benchmark:
    """One layer, one direction: all steps' inputs in one product, then a product and a map a step,
    as `frontends.recurrence` writes them."""
    gates, ops = _CELLS[cell]

    def works(e: Extents, dtype: DType) -> tuple[Work, ...]:
        batch, steps, hidden = e["batch"], e["steps"], e["hidden"]
        reads = (dtype,) * (2 * gates + 1)
        product = sized.gemm(batch, gates * hidden, hidden, dtype)
        writes = (dtype,) * (1 + (cell == "lstm"))
        pointwise = sized.pointwise(batch * hidden, reads, writes, ops=ops)
        between = pointwise.nbytes - product.operands[-1].nbytes  # see `k.Gemm`
        product = replace(product, detail=Looped(between))
        inputs = sized.gemm(steps * batch, gates * hidden, e["features"], dtype)
        each = (product, pointwise)
        return (inputs, *(replace(w, times=steps) for w in each))

    def make(kit: Kit, e: Mapping[str, int]) -> Run:
        layer = {"lstm": "LSTM", "gru": "GRU", "rnn": "RNN"}[cell]
        options = {"device": kit.device, "dtype": kit.kind}
        net = getattr(kit.torch.nn, layer)(e["features"], e["hidden"], **options).eval()
        x = kit.random(e["steps"], e["batch"], e["features"])
        return lambda: net(x)[0]

    columns = ("batch", "steps", "features", "hidden")
    return Benchmark(columns, works, make, ("f32", "tf32", "f16", "bf16"))


LAYERS: dict[str, Benchmark] = {
    "experts": Benchmark(
        ("tokens", "hidden", "inter", "topk", "experts"), _experts_works, _experts, FLOATS[:3]
    ),
    **{cell: _recurrent(cell) for cell in _CELLS},
}
