"""Mixtures of experts as one operator of ours, for code that would choose rows by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, part
from gpuir.frontends.idioms import experts as mixture
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.ir.graph import Value
from gpuir.ops import tensor as t

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "identity": lambda x: x,
}


def gated(
    rows: torch.Tensor,
    *,
    fn: str,
    interleaved: bool,
    alpha: float,
    beta: float,
    limit: float | None,
) -> torch.Tensor:
    """What `t.Experts` makes of the rows of a gate and of those it lets through."""
    gate, up = (rows[..., ::2], rows[..., 1::2]) if interleaved else rows.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ACTIVATIONS[fn](gate * alpha) / alpha * (up + beta)


def one_by_one(
    x: torch.Tensor,
    which: torch.Tensor,
    shares: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    **how: Any,
) -> torch.Tensor:
    """`t.Experts`, one expert after another."""
    y = torch.zeros_like(x)
    for i in range(up.shape[0]):
        token, place = torch.where(which == i)
        rows = functional.linear(x[token], up[i], None if up_bias is None else up_bias[i])
        apart = up.shape[1] == down.shape[2]
        rows = ACTIVATIONS[how["fn"]](rows) if apart else gated(rows, **how)
        rows = functional.linear(rows, down[i], None if down_bias is None else down_bias[i])
        y = y.index_add(0, token, (rows * shares[token, place, None]).to(x.dtype))
    return y


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
    dtype: torch.dtype | None = None,
    each: Sequence[int] | None = None,
) -> torch.Tensor:
    """`t.Experts`; `dtype` is the result's where it is not that of x."""
    how = {"fn": fn, "interleaved": interleaved, "alpha": alpha, "beta": beta, "limit": limit}
    y = one_by_one(x, which, shares, up, down, up_bias=up_bias, down_bias=down_bias, **how)
    return y if dtype is None else y.to(dtype)


@torch.library.custom_op("gpuir::experts_gradient", mutates_args=())
def experts_gradient(
    dy: torch.Tensor,
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
    each: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """`t.ExpertsGradient`."""
    given = (x, which, shares, up, down, up_bias, down_bias)
    operands: list[Any] = [
        None if v is None else v.detach().requires_grad_(v is not which) for v in given
    ]
    with torch.enable_grad():
        how = {"fn": fn, "interleaved": interleaved, "alpha": alpha, "beta": beta, "limit": limit}
        y = one_by_one(*operands, **how)
        wanted = [v for v in operands if v is not None and v is not operands[1]]
        return list(torch.autograd.grad(y, wanted, dy, materialize_grads=True))


@experts.register_fake
def _(x: torch.Tensor, *rest: Any, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
    dtype = dtype or (rest[11] if len(rest) > 11 else None)
    return torch.empty_like(x, dtype=dtype)


@experts_gradient.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, which: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    return [torch.empty_like(v) for v in (x, *rest) if isinstance(v, torch.Tensor)]


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.how, ctx.each = inputs[7:12], inputs[13]


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    operands = ctx.saved_tensors
    found = iter(experts_gradient(dy, *operands, *ctx.how, ctx.each))
    made = [None if v is None or i == 1 else next(found) for i, v in enumerate(operands)]
    return (*made, *(None for _ in ctx.how), None, None)


experts.register_autograd(_backward, setup_context=_save)

NAMES = ("x", "which", "shares", "up", "down")
HOW = ("fn", "interleaved", "alpha", "beta", "limit")


def operands(n: TorchNode, e: Emitter) -> dict[str, Any]:
    """The fields of `t.Experts`. Where the user says how uneven the router is, no rows of each
    expert are known beforehand."""
    biases = {name: n.get(name) for name in ("up_bias", "down_bias")}
    how = {name: n.args[name] for name in HOW}
    each = () if e.scope.expert_skew else tuple(n.args["each"] or ())
    return {name: n[name] for name in NAMES} | biases | how | {"each": each}


def convert(n: TorchNode, e: Emitter) -> Results:
    dtype = n.type.dtype
    return mixture(
        e, t.Experts(**operands(n, e), dtype=None if dtype == n["x"].type.dtype else dtype)
    )


def convert_gradient(n: TorchNode, e: Emitter) -> Results:
    return e.add(t.ExpertsGradient(n["dy"], **operands(n, e), skew=e.scope.expert_skew))


def grouped_product(n: TorchNode, e: Emitter) -> Results:
    """self · mat2, where `offs` are the ends of groups: of rows of self, each with a matrix of
    mat2; of columns of mat2, each with a matrix of self; or of what is summed, each for a matrix of
    the result. The data decide how large they are; here they are equal, as the graph says, and of
    more groups than rows those that get none are left out."""
    a, b, ends = n["self"], n["mat2"], n.get("offs")
    if n.get("bias") is not None:
        raise n.refused("a bias is not supported")
    if ends is None:
        return cast(e, e(t.Matmul(a, b)), n.type.dtype)
    shape, groups = n.type.shape, ends.type.size
    e.assume(f"rows are spread evenly over the {groups} groups of a grouped product")
    length = b.type.shape[1] if a.type.rank == 3 else a.type.shape[0 if b.type.rank == 3 else 1]
    count = min(groups, max(length, 1))
    each = -(-length // count)
    match a.type.rank, b.type.rank:
        case 2, 3:
            y = e(t.Matmul(divided(e, a, 0, count, each), part(e, b, 0, 0, count)))
            y = part(e, e(t.Reshape(y, (count * each, shape[1]))), 0, 0, shape[0])
        case 3, 2:
            y = e(t.Matmul(part(e, a, 0, 0, count), divided(e, b, 1, count, each)))
            y = e(t.Reshape(e(t.Transpose(y, (1, 0, 2))), (shape[0], count * each)))
            y = part(e, y, 1, 0, shape[1])
        case _:
            y = e(t.Matmul(divided(e, a, 1, count, each), divided(e, b, 0, count, each)))
            y = y if count == groups else e(t.Pad(y, (0, 0, 0), (groups - count, 0, 0)))
    return cast(e, y, n.type.dtype)


def divided(e: Emitter, x: Value, axis: int, count: int, each: int) -> Value:
    """A matrix as `count` matrices of `each` rows or columns, filled up with zeros."""
    rest = count * each - x.type.shape[axis]
    if rest:
        x = e(t.Pad(x, (0, 0), (rest, 0) if axis == 0 else (0, rest)))
    if axis == 0:
        return e(t.Reshape(x, (count, each, x.type.shape[1])))
    return e(t.Transpose(e(t.Reshape(x, (x.type.shape[0], count, each))), (1, 0, 2)))


CONVERTERS: dict[str, Converter] = {
    "gpuir::experts": convert,
    "gpuir::experts_gradient": convert_gradient,
    "_grouped_mm": grouped_product,
}
