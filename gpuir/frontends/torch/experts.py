"""Mixtures of experts as one operator of ours, for code that would choose rows by their numbers."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import experts as mixture
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.ops import tensor as t

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "identity": lambda x: x,
}


def gated(
    rows: torch.Tensor, fn: str, interleaved: bool, alpha: float, beta: float, limit: float | None
) -> torch.Tensor:
    """What `t.Experts` makes of the rows of a gate and of those it lets through."""
    gate, up = (rows[..., ::2], rows[..., 1::2]) if interleaved else rows.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ACTIVATIONS[fn](gate * alpha) / alpha * (up + beta)


@torch.library.custom_op("gpuir::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    which: torch.Tensor,
    shares: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    fn: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """`t.Experts`, one expert after another."""
    y = torch.zeros_like(x)
    for i in range(up.shape[0]):
        token, place = torch.where(which == i)
        bias = None if up_bias is None else up_bias[i]
        rows = functional.linear(x[token], up[i], bias)
        if up.shape[1] != down.shape[2]:
            rows = gated(rows, fn, interleaved, alpha, beta, limit)
        else:
            rows = ACTIVATIONS[fn](rows)
        rows = functional.linear(rows, down[i], None if down_bias is None else down_bias[i])
        y.index_add_(0, token, (rows * shares[token, place, None]).to(x.dtype))
    return y


@experts.register_fake
def _(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(x)


def convert(n: TorchNode, e: Emitter) -> Results:
    return mixture(
        e,
        t.Experts(
            *(n[name] for name in ("x", "which", "shares", "up", "down")),
            up_bias=n.get("up_bias"),
            down_bias=n.get("down_bias"),
            **{name: n.args[name] for name in ("fn", "interleaved", "alpha", "beta", "limit")},
        ),
    )


CONVERTERS: dict[str, Converter] = {"gpuir::experts": convert}
