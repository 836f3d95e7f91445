"""Every gradient rule against torch.autograd, in f64 and through interp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import graphs

from gpuir import interp
from gpuir.ir.build import Builder
from gpuir.ir.errors import ModelError, UsageError
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ir.types import TensorType, bool_, c128, f64, i64
from gpuir.ops import tensor as t
from gpuir.ops.scalar import SCALARS
from gpuir.passes.derivatives import FLAT, HOLOMORPHIC, LINEAR
from gpuir.passes.gradients import GRADIENTS, ROUTINES, no_gradient
from gpuir.stacks.table import pipeline
from gpuir.text import parse, show

torch = pytest.importorskip("torch")
F = torch.nn.functional

LOWER = "canonicalize,fuse,legalize,tile{target=a100},annotate"


@dataclass
class Case:
    """An op of float operands, drawn in [`low`, `high`] in these shapes, and the same in torch.
    `given` are operands that nothing is differentiated by. `complex` draws both parts."""

    op: Callable[..., Op]
    torch: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    low: float = -1.0
    high: float = 1.0
    given: tuple[Any, ...] = ()
    complex: bool = False


def build(case: Case, values: list[np.ndarray]) -> Graph:
    """sum(op(...) * weights), whose gradient tells every cell of the result apart."""
    b = Builder(Level.graph, "case")
    b.locs = ("m:op",)
    operands = [b.param(f"x{i}", interp.to_type(v)) for i, v in enumerate(values)]
    operands += [b.input(f"i{i}", interp.to_type(np.asarray(v))) for i, v in enumerate(case.given)]
    y = b.add(case.op(*operands), ["y"])[0]
    if y.type.dtype.kind == "complex":
        y = b(t.Parts(y))
    product = b(t.Map("mul", (y, b.input("weights", y.type))))
    loss = b(t.Reduce("sum", product, tuple(range(y.type.rank))), "loss")
    return b.finish([loss])


def check(case: Case, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    values = [rng.uniform(case.low, case.high, s) for s in case.shapes]
    if case.complex:
        values = [v + 1j * rng.uniform(case.low, case.high, v.shape) for v in values]
    g = build(case, values)
    weights = rng.uniform(0.5, 1.5, next(v for v in g.inputs if v.name == "weights").type.shape)
    tensors = [torch.tensor(v, requires_grad=True) for v in values]
    y = case.torch(*tensors, *(torch.tensor(v) for v in case.given))
    y = torch.view_as_real(y) if y.is_complex() else y
    loss = (y * torch.tensor(weights)).sum()
    loss.backward()

    given = {f"x{i}": v for i, v in enumerate(values)} | {"weights": weights}
    given |= {f"i{i}": np.asarray(v) for i, v in enumerate(case.given)}
    grad = pipeline("autodiff").run(g)
    for graph in (grad, pipeline(LOWER).run(grad)):
        found = interp.run(graph, given)
        np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-6)
        for i, x in enumerate(tensors):
            expected = np.zeros(x.shape) if x.grad is None else x.grad.resolve_conj().numpy()
            if f"x{i}.grad" not in found:  # no gradient is a gradient of zero
                assert not expected.any() and grad.assumed
                continue
            np.testing.assert_allclose(
                found[f"x{i}.grad"],
                expected,
                rtol=1e-6,
                atol=1e-9,
                err_msg=f"x{i} at {graph.level}",
            )


# ---------------------------------------------------------------------------- scalar functions


def of(fn: str, *imm: float) -> Callable[..., Op]:
    return lambda *args: t.Map(fn, args, imm)


ONE = ((3, 4),)
TWO = ((3, 4), (4,))
MAPS: dict[str, Case] = {
    **{fn: Case(of(fn), getattr(torch, fn), ONE) for fn in ("neg", "abs", "exp", "expm1", "erf")},
    **{fn: Case(of(fn), getattr(torch, fn), ONE) for fn in ("sin", "cos", "tan", "sinh", "cosh")},
    **{fn: Case(of(fn), getattr(torch, fn), ONE) for fn in ("tanh", "atan", "asinh", "sigmoid")},
    **{fn: Case(of(fn), getattr(torch, fn), ONE, -0.9, 0.9) for fn in ("asin", "acos", "atanh")},
    **{fn: Case(of(fn), getattr(torch, fn), ONE, 0.2, 2) for fn in ("sqrt", "rsqrt", "log")},
    **{fn: Case(of(fn), getattr(torch, fn), ONE, 0.2, 2) for fn in ("log1p", "reciprocal")},
    "acosh": Case(of("acosh"), torch.acosh, ONE, 1.2, 3),
    **{fn: Case(of(fn), getattr(F, fn), ONE, -5, 5) for fn in ("relu", "silu", "mish")},
    "erfinv": Case(of("erfinv"), torch.erfinv, ONE, -0.9, 0.9),
    "lgamma": Case(of("lgamma"), torch.lgamma, ONE, 0.3, 5),
    "conj": Case(of("conj"), torch.conj, ONE),
    "atan2": Case(of("atan2"), torch.atan2, TWO, 0.3, 2),
    "hypot": Case(of("hypot"), torch.hypot, TWO, 0.3, 2),
    "copysign": Case(of("copysign"), torch.copysign, TWO, 0.3, 2),
    "identity": Case(of("identity"), lambda x: x * 1, ONE),
    "copy": Case(of("copy"), lambda x: x * 1, ONE),
    "softplus": Case(of("softplus"), F.softplus, ONE, -5, 5),
    "gelu": Case(of("gelu"), F.gelu, ONE, -3, 3),
    "gelu_tanh": Case(of("gelu_tanh"), lambda x: F.gelu(x, approximate="tanh"), ONE, -3, 3),
    "hard_swish": Case(of("hard_swish"), F.hardswish, ((5, 8),), -5, 5),
    "hard_sigmoid": Case(of("hard_sigmoid", 1 / 6, 0.5), F.hardsigmoid, ((5, 8),), -5, 5),
    "leaky_relu": Case(of("leaky_relu", 0.1), lambda x: F.leaky_relu(x, 0.1), ONE),
    "elu": Case(of("elu", 1.5), lambda x: F.elu(x, 1.5), ONE, -3, 3),
    "clip": Case(of("clip", -0.5, 0.25), lambda x: x.clamp(-0.5, 0.25), ((5, 8),)),
    "add": Case(of("add"), torch.add, TWO),
    "sub": Case(of("sub"), torch.sub, TWO),
    "mul": Case(of("mul"), torch.mul, TWO),
    "div": Case(of("div"), torch.div, TWO, 0.5, 2),
    "pow": Case(of("pow"), torch.pow, TWO, 0.5, 2),
    "min": Case(of("min"), torch.minimum, TWO),
    "max": Case(of("max"), torch.maximum, TWO),
    "mod": Case(of("mod"), torch.remainder, TWO, 0.3, 3),
    "fmod": Case(of("fmod"), torch.fmod, TWO, 0.3, 3),
    "where": Case(
        lambda a, b, c: t.Map("where", (c, a, b)),
        lambda a, b, c: torch.where(c, a, b),
        TWO,
        given=(np.arange(12).reshape(3, 4) % 3 == 0,),
    ),
}
WITH_NUMBERS: dict[str, Case] = {
    **{
        fn: Case(of(fn, 0.3), lambda x, f=fn: getattr(torch, f)(x, 0.3), ONE)
        for fn in ("add", "sub")
    },
    **{
        fn: Case(of(fn, 0.3), lambda x, f=fn: getattr(torch, f)(x, 0.3), ONE)
        for fn in ("mul", "div")
    },
    "square": Case(of("pow", 2.0), lambda x: x**2, ONE),
    "cube": Case(of("pow", 3.0), lambda x: x**3, ONE),
    "pow zero": Case(of("pow", 0.0), lambda x: x**0, ONE),
    "max zero": Case(of("max", 0.0), lambda x: x.clamp(min=0), ONE),
    "min zero": Case(of("min", 0.0), lambda x: x.clamp(max=0), ONE),
    "mod": Case(of("mod", 0.3), lambda x: x % 0.3, ONE),
    "prelu": Case(of("leaky_relu"), F.prelu, ((2, 3, 4), (1,))),
    "elu alpha": Case(
        of("elu"), lambda x, a: torch.where(x < 0, a * torch.expm1(x), x), ((3, 4), (1,))
    ),
    "clip by a floor": Case(of("clip", 2.0), torch.maximum, TWO),
    "equal": Case(of("max"), torch.maximum, ((2,), (2,)), 1.0, 1.0),
}


@pytest.mark.parametrize("name", MAPS)
def test_gradient_of_scalar_function(name):
    check(MAPS[name])


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_gradient_of_scalar_function_with_numbers(name):
    check(WITH_NUMBERS[name])


def test_every_scalar_function_has_a_derivative_that_is_checked():
    ours = {fn for fn in SCALARS if fn.endswith("_gradient")}
    assert set(MAPS) == set(SCALARS) - set(FLAT) - ours


# ---------------------------------------------------------------------------- tensor ops


def take(x, indices, axis):
    flat = torch.index_select(x, axis, indices.flatten())
    return flat.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def gather_nd(x, indices):
    return x[tuple(indices[..., i] for i in range(indices.shape[-1]))]


def batched_nd(x, indices):
    return torch.stack([gather_nd(a, i) for a, i in zip(x, indices, strict=True)])


def scattered(x, updates, indices, add):
    cells = tuple(indices[..., i] for i in range(indices.shape[-1]))
    return x.index_put(cells, updates, accumulate=add)


def attention(q, k, v, mask=None, **how):
    repeat = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(repeat, -3) for x in (k, v))
    scores = how.get("scale", 1.0) * q @ k.transpose(-1, -2)
    if cap := how.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    behind = torch.arange(q.shape[-2])[:, None] + how.get("offset", 0) - torch.arange(k.shape[-2])
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if how.get("causal"):
        scores = scores.masked_fill(behind < 0, -torch.inf)
    if (window := how.get("window")) is not None:
        scores = scores.masked_fill(behind > window, -torch.inf)
    return scores.softmax(-1) @ v


def attended(shapes: tuple[tuple[int, ...], ...], given: tuple[Any, ...] = (), **how: Any) -> Case:
    return Case(
        lambda q, k, v, *mask: t.Attention(q, k, v, *mask, **how),
        lambda q, k, v, *mask: attention(q, k, v, *mask, **how),
        shapes,
        given=given,
    )


def normalized(x, axes, scale=None, bias=None, center=True, eps=1e-5):
    if center:
        x = x - x.mean(axes, keepdim=True)
    y = x / torch.sqrt((x * x).mean(axes, keepdim=True) + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


cells = np.array
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"fn": "gelu"},
    "experts, gated": {"gate": True},
    "experts, gate and up in one": {"packed": True, "biased": True},
    "experts, by turns, limited": {
        "packed": True,
        "interleaved": True,
        "alpha": 1.7,
        "beta": 1.0,
        "limit": 0.3,
    },
}


def mixed(gate: bool = False, packed: bool = False, biased: bool = False, **how: Any) -> Case:
    """Three experts of width 4 for five tokens of 3 cells, two each."""
    rows = 8 if packed else 4
    matrices = ((3, rows, 3), (3, 3, 4), *[(3, 4, 3)] * gate)
    biases = ((3, rows), (3, 3)) if biased else ()
    which = cells([[0, 1], [1, 2], [0, 2], [1, 0], [0, 1]])
    act = {"silu": F.silu, "gelu": F.gelu}[how.get("fn", "silu")]
    alpha, beta, limit = how.get("alpha", 1.0), how.get("beta", 0.0), how.get("limit")

    def op(x: Value, shares: Value, up: Value, down: Value, *rest: Value) -> Op:
        *rest, index = rest
        names = ["gate"] * gate + ["up_bias", "down_bias"] * biased
        return t.Experts(x, index, shares, up, down, **dict(zip(names, rest, strict=True)), **how)

    def expert(x, up, down, *rest):
        up_bias, down_bias = rest[-2:] if biased else (0.0, 0.0)
        u = x @ up.T + up_bias
        g = x @ rest[0].T if gate else u
        if packed:
            g, u = (u[:, ::2], u[:, 1::2]) if how.get("interleaved") else u.chunk(2, 1)
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        y = act(g * alpha) / alpha
        return (y * (u + beta) if gate or packed else y) @ down.T + down_bias

    def run(x, shares, *rest):
        *weights, index = rest
        y = torch.zeros_like(x)
        for token in range(len(x)):
            for j, e in enumerate(index[token]):
                out = expert(x[token : token + 1], *(w[e] for w in weights))[0]
                y = y.index_add(0, torch.tensor([token]), (shares[token, j] * out)[None])
        return y

    return Case(op, run, ((5, 3), (5, 2), *matrices, *biases), given=(which,))


def conv(dims: int, stride=1, pad=0, dilation=1, groups=1, high=None) -> Callable[..., Op]:
    def op(x: Value, w: Value) -> Op:
        lows, highs = (pad,) * dims, (pad if high is None else high,) * dims
        return t.Conv(x, w, (stride,) * dims, lows, highs, (dilation,) * dims, groups)

    return op


def conv_case(x, w, **how: Any) -> Case:
    run = (F.conv1d, F.conv2d, F.conv3d)[len(x) - 3]
    names = {"stride": "stride", "pad": "padding", "dilation": "dilation", "groups": "groups"}
    return Case(
        conv(len(x) - 2, **how),
        lambda a, b: run(a, b, **{names[k]: v for k, v in how.items()}),
        (x, w),
    )


def transposed_case(x, w, stride=1, pad=0, extra=0, dilation=1, groups=1) -> Case:
    n = len(x) - 2
    run = (F.conv_transpose1d, F.conv_transpose2d)[n - 1]
    parts = ((stride,) * n, (pad,) * n, (pad,) * n, (dilation,) * n, groups, (extra,) * n)
    return Case(
        lambda a, b: t.ConvTranspose(a, b, *parts),
        lambda a, b: run(a, b, None, stride, pad, extra, groups, dilation),
        (x, w),
    )


def pooled(
    fn: str, run: Callable[..., Any], window, stride, pad=0, dilation=1, shape=(2, 3, 8, 7), **how
):
    n = len(shape) - 2
    parts = ((window,) * n, (stride,) * n, (pad,) * n, (pad,) * n, (dilation,) * n)
    return Case(lambda x: t.Pool(fn, x, *parts, **how), run, (shape,))


def resized(mode: str, shape: tuple[int, ...], run: Callable[..., Any], **how: Any) -> Case:
    x = (2, 3, 4, 5)
    scales = tuple(b / a for a, b in zip(x, shape, strict=True))
    return Case(lambda v: t.Resize(v, shape, scales, mode, **how), run, (x,))


def columns(x: Value) -> t.Routine:
    """F.fold of windows of 3 by 3, two cells apart, a cell of padding around."""
    attrs = (
        *(("image", (5, 4)), ("block", (3, 3)), ("counts", (3, 2))),
        *(("strides", (2, 2)), ("low", (1, 1)), ("dilations", (1, 1))),
    )
    return t.Routine("col2im", (x,), (TensorType((2, 2, 5, 4), x.type.dtype),), attrs)


def uneven(x: Value) -> t.Routine:
    shape = (2, 3, 3, 2)
    attrs = (("fn", "mean"), ("shape", shape), ("count", 2))
    return t.Routine("adaptive_pool", (x,), (TensorType(shape, x.type.dtype),), attrs)


TENSOR: dict[str, Case] = {
    "cast": Case(lambda x: t.Cast(x, f64), lambda x: x * 1, ONE),
    "ordered": Case(lambda x: t.Ordered(x, (1, 0)), lambda x: x * 1, ONE),
    "reshape": Case(lambda x: t.Reshape(x, (2, 6)), lambda x: x.reshape(2, 6), ONE),
    "parts": Case(lambda x: t.Parts(x), lambda x: torch.view_as_complex(x), ((3, 4, 2),)),
    "transpose": Case(
        lambda x: t.Transpose(x, (2, 0, 1)), lambda x: x.permute(2, 0, 1), ((2, 3, 4),)
    ),
    "broadcast": Case(lambda x: t.Broadcast(x, (2, 3, 4)), lambda x: x.expand(2, 3, 4), ((3, 1),)),
    "slice": Case(lambda x: t.Slice(x, (1, 0), (2, 2), (1, 1)), lambda x: x[1:3, :2], ((4, 5),)),
    "slice by steps": Case(
        lambda x: t.Slice(x, (1, 0), (2, 2), (2, 3)), lambda x: x[1::2, ::3], ((5, 6),)
    ),
    "slice backwards": Case(
        lambda x: t.Slice(x, (4, 1), (3, 2), (-2, -1)),
        lambda x: x.flip(0)[::2].flip(1)[:, 4:],
        ((5, 6),),
    ),
    "concat": Case(
        lambda a, b: t.Concat((a, b, a), 1), lambda a, b: torch.cat((a, b, a), 1), ((2, 3), (2, 1))
    ),
    "pad": Case(lambda x: t.Pad(x, (0, 1), (2, -1)), lambda x: F.pad(x, (1, -1, 0, 2)), ONE),
    "pad by a value": Case(
        lambda x, v: t.Pad(x, (0, 1), (2, 0), v),
        lambda x, v: F.pad(x, (1, 0, 0, 2)) + v * F.pad(torch.zeros_like(x), (1, 0, 0, 2), value=1),
        ((3, 4), ()),
    ),
    **{
        f"pad by {ours}": Case(
            lambda x, m=ours: t.Pad(x, (0, 0, 1, 2), (0, 0, 2, 1), mode=m),
            lambda x, m=theirs: F.pad(x, (2, 1, 1, 2), mode=m),
            ((1, 2, 4, 4),),
        )
        for ours, theirs in (("edge", "replicate"), ("reflect", "reflect"), ("wrap", "circular"))
    },
    "gather": Case(
        lambda x, i: t.Gather(x, i, 0),
        lambda x, i: take(x, i, 0),
        ((5, 3),),
        given=(cells([[4, 1], [1, 0]]),),
    ),
    "gather along 1": Case(
        lambda x, i: t.Gather(x, i, 1),
        lambda x, i: take(x, i, 1),
        ((2, 5, 3),),
        given=(cells([[4, 1]]),),
    ),
    "gather one": Case(
        lambda x, i: t.Gather(x, i, 1), lambda x, i: x[:, 2], ((2, 5, 3),), given=(cells(2),)
    ),
    "gather elements": Case(
        lambda x, i: t.GatherElements(x, i, 1),
        lambda x, i: torch.gather(x, 1, i),
        ((2, 4),),
        given=(cells([[0, 0, 3], [1, 2, 1]]),),
    ),
    "gather nd": Case(
        lambda x, i: t.GatherND(x, i),
        gather_nd,
        ((3, 4, 2),),
        given=(cells([[0, 1], [0, 1], [2, 3]]),),
    ),
    "gather nd in a batch": Case(
        lambda x, i: t.GatherND(x, i, 1),
        batched_nd,
        ((2, 4, 3),),
        given=(cells([[[0], [0]], [[1], [3]]]),),
    ),
    "scatter elements": Case(
        lambda x, u, i: t.ScatterElements(x, i, u, 1),
        lambda x, u, i: x.scatter(1, i, u),
        ((2, 4), (2, 2)),
        given=(cells([[0, 3], [1, 2]]),),
    ),
    "scatter elements added": Case(
        lambda x, u, i: t.ScatterElements(x, i, u, 1, "add"),
        lambda x, u, i: x.scatter_add(1, i, u),
        ((2, 4), (2, 2)),
        given=(cells([[0, 0], [1, 2]]),),
    ),
    "scatter nd": Case(
        lambda x, u, i: t.ScatterND(x, i, u),
        lambda x, u, i: scattered(x, u, i, False),
        ((4, 3), (2, 3)),
        given=(cells([[3], [1]]),),
    ),
    "scatter nd added": Case(
        lambda x, u, i: t.ScatterND(x, i, u, "add"),
        lambda x, u, i: scattered(x, u, i, True),
        ((4, 3), (2, 3)),
        given=(cells([[1], [1]]),),
    ),
    **{
        f"reduce {fn}{' kept' * kept}": Case(
            lambda x, fn=fn, kept=kept: t.Reduce(fn, x, (0, 2), kept),
            lambda x, fn=fn, kept=kept: getattr(torch, {"max": "amax", "min": "amin"}.get(fn, fn))(
                x, (0, 2), keepdim=kept
            ),
            ((2, 3, 4),),
        )
        for fn in ("sum", "mean", "max", "min")
        for kept in (False, True)
    },
    "reduce max, ties": Case(
        lambda x: t.Reduce("max", x, (1,)), lambda x: torch.amax(x, 1), ((2, 3),), 1.0, 1.0
    ),
    "reduce prod": Case(lambda x: t.Reduce("prod", x, (1,)), lambda x: x.prod(1), ((2, 3, 4),)),
    "reduce prod of two axes": Case(
        lambda x: t.Reduce("prod", x, (0, 2)), lambda x: x.prod(2).prod(0), ((2, 3, 4),)
    ),
    "reduce prod of zeros": Case(
        lambda x: t.Reduce("prod", x, (1,)), lambda x: x.prod(1), ((2, 3),), 0.0, 0.0
    ),
    "cumulative sum": Case(lambda x: t.Cumulative("sum", x, 1), lambda x: x.cumsum(1), ((2, 4),)),
    "cumulative sum, exclusive and back": Case(
        lambda x: t.Cumulative("sum", x, 1, True, True),
        lambda x: x.flip(1).cumsum(1).flip(1) - x,
        ((2, 4),),
    ),
    "cumulative product": Case(
        lambda x: t.Cumulative("prod", x, 1), lambda x: x.cumprod(1), ((2, 4),), 0.5, 2
    ),
    "topk": Case(lambda x: t.TopK(x, 2, 1), lambda x: x.topk(2, 1)[0], ((3, 5),)),
    "softmax": Case(lambda x: t.Softmax(x, 1), lambda x: x.softmax(1), ((2, 3, 4),), -3, 3),
    "log softmax": Case(
        lambda x: t.Softmax(x, 2, True), lambda x: x.log_softmax(2), ((2, 3, 4),), -3, 3
    ),
    "layer norm": Case(
        lambda x, s, b: t.Normalize(x, (2,), s, b),
        lambda x, s, b: F.layer_norm(x, (6,), s, b),
        ((2, 3, 6), (6,), (6,)),
    ),
    "layer norm, plain": Case(
        lambda x: t.Normalize(x, (1, 2)), lambda x: F.layer_norm(x, (3, 6)), ((2, 3, 6),)
    ),
    "rms norm": Case(
        lambda x, s: t.Normalize(x, (2,), s, eps=1e-6, center=False),
        lambda x, s: F.rms_norm(x, (6,), s, 1e-6),
        ((2, 3, 6), (6,)),
    ),
    "group norm": Case(
        lambda x, s, b: t.Normalize(x, (1, 2), s, b, groups=2),
        lambda x, s, b: F.group_norm(x, 2, s[:, 0], b[:, 0]),
        ((2, 4, 6), (4, 1), (4, 1)),
    ),
    "instance norm": Case(
        lambda x, s, b: t.Normalize(x, (2, 3), s, b),
        lambda x, s, b: normalized(x, (2, 3), s, b),
        ((2, 4, 3, 3), (4, 1, 1), (4, 1, 1)),
    ),
    "matmul": Case(lambda a, b: t.Matmul(a, b), torch.matmul, ((3, 4), (4, 5))),
    "linear of a batch": Case(lambda a, b: t.Matmul(a, b), torch.matmul, ((2, 3, 4), (4, 5))),
    "matmul of batches": Case(lambda a, b: t.Matmul(a, b), torch.matmul, ((2, 3, 4), (2, 4, 5))),
    "matmul that broadcasts": Case(
        lambda a, b: t.Matmul(a, b), torch.matmul, ((2, 1, 3, 4), (5, 4, 5))
    ),
    "matmul by a row": Case(lambda a, b: t.Matmul(a, b), torch.matmul, ((3, 4), (2, 4, 5))),
    "conv": conv_case((2, 3, 7, 6), (4, 3, 3, 2)),
    "conv, strided and padded": conv_case((2, 4, 8, 7), (6, 2, 3, 3), stride=2, pad=1, groups=2),
    "conv, dilated": conv_case((1, 3, 9, 9), (2, 3, 3, 3), stride=2, pad=2, dilation=2),
    "conv, depthwise": conv_case((2, 4, 6), (4, 1, 3), pad=1, groups=4),
    "conv in 3-d": conv_case((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), stride=2),
    "conv, padded unevenly": Case(
        conv(1, pad=0, high=2, stride=2),
        lambda x, w: F.conv1d(F.pad(x, (0, 2)), w, stride=2),
        ((2, 3, 8), (4, 3, 3)),
    ),
    "conv transpose": transposed_case((2, 3, 4, 5), (3, 4, 3, 3)),
    "conv transpose, strided": transposed_case((2, 4, 4, 5), (4, 3, 3, 3), 2, 1, 1, 1, 2),
    "conv transpose, dilated": transposed_case((1, 3, 5), (3, 2, 3), 2, 1, 0, 2),
    "max pool": pooled("max", lambda x: F.max_pool2d(x, 2), 2, 2),
    "max pool that overlaps": pooled("max", lambda x: F.max_pool2d(x, 3, 2, 1), 3, 2, 1),
    "max pool, dilated": pooled("max", lambda x: F.max_pool2d(x, 2, 1, 1, 2), 2, 1, 1, 2),
    "mean pool": pooled("mean", lambda x: F.avg_pool2d(x, 3, 2), 3, 2),
    "mean pool over padding": pooled(
        "mean", lambda x: F.avg_pool2d(x, 3, 2, 1), 3, 2, 1, include_pad=True
    ),
    "mean pool without padding": pooled(
        "mean", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), 3, 2, 1
    ),
    "norm pool": pooled("lp", lambda x: F.lp_pool2d(x, 2, 2), 2, 2),
    "attention": attended(((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)), scale=0.5),
    "attention, causal": attended(((2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5)), causal=True),
    "attention, grouped": attended(((4, 4, 5), (2, 6, 5), (2, 6, 5)), causal=True, offset=2),
    "attention, window": attended(((2, 5, 4), (2, 5, 4), (2, 5, 4)), causal=True, window=1),
    "attention, capped": attended(((2, 3, 4), (2, 3, 4), (2, 3, 4)), softcap=0.7, scale=2.0),
    "attention, added mask": attended(((2, 3, 4), (2, 5, 4), (2, 5, 4), (3, 5))),
    "attention, hidden keys": attended(
        ((2, 3, 4), (2, 3, 4), (2, 3, 4)), given=(cells([True, True, False]),)
    ),
    **{name: mixed(**how) for name, how in EXPERTS.items()},
    "columns added up": Case(
        columns, lambda x: F.fold(x, (5, 4), 3, padding=1, stride=2), ((2, 18, 6),)
    ),
    "pool of windows of several widths": Case(
        uneven, lambda x: F.adaptive_avg_pool2d(x, (3, 2)), ((2, 3, 7, 5),)
    ),
    "resize nearest": resized(
        "nearest",
        (2, 3, 8, 10),
        lambda x: F.interpolate(x, scale_factor=2),
        coords="asymmetric",
        nearest="floor",
    ),
    "resize linear": resized(
        "linear", (2, 3, 7, 9), lambda x: F.interpolate(x, (7, 9), mode="bilinear")
    ),
    "resize cubic": resized(
        "cubic", (2, 3, 3, 9), lambda x: F.interpolate(x, (3, 9), mode="bicubic")
    ),
}


@pytest.mark.parametrize("name", TENSOR)
def test_gradient_of_tensor_op(name):
    check(TENSOR[name])


def transform(kind: str, axes: tuple[int, ...], length: int = 0, how: int = 0) -> Callable[..., Op]:
    """`t.routine fft`, as the frontend makes it of torch's."""

    def op(x: Value) -> Op:
        shape, last = list(x.type.shape), axes[-1]
        if kind != "c2c":
            shape[last] = length if kind == "c2r" else shape[last] // 2 + 1
        type = TensorType(tuple(shape), f64 if kind == "c2r" else c128)
        attrs = {"kind": kind, "axes": axes, "normalization": how, "onesided": True}
        attrs |= {"forward": kind == "r2c", "length": length}
        return t.Routine("fft", (x,), (type,), tuple(attrs.items()))

    return op


COMPLEX_MAPS = {
    **{name: getattr(torch, name) for name in ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt")},
    **{name: getattr(torch, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: getattr(torch, name) for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    **{name: getattr(torch, name) for name in ("reciprocal", "sigmoid", "neg")},
    "conj": torch.conj_physical,
    **dict.fromkeys(("identity", "copy"), lambda x: x * 1),
    "silu": lambda x: x * torch.sigmoid(x),
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow")},
    "where": lambda a, b, c: torch.where(c, a, b),
}
HALF = (np.array([[True], [False], [True]]),)


def complex_map(name: str) -> Case:
    if name == "where":
        op = lambda a, b, c: t.Map("where", (c, a, b))  # noqa: E731
        return Case(op, COMPLEX_MAPS[name], ((3, 4), (4,)), given=HALF, complex=True)
    shapes = ((3, 4), (4,))[: SCALARS[name].arity]
    return Case(of(name), COMPLEX_MAPS[name], shapes, 0.1, 0.9, complex=True)


COMPLEX: dict[str, Case] = {
    **{f"map {name}": complex_map(name) for name in COMPLEX_MAPS},
    "pow 3": Case(of("pow", 3.0), lambda x: x**3, ((3,),), complex=True),
    "real part": Case(lambda x: t.Cast(x, f64), lambda x: x.real, ((3, 4),), complex=True),
    "cast": Case(lambda x: t.Cast(x, c128), lambda x: x.to(torch.complex128), ((3, 4),)),
    "parts": Case(lambda x: t.Parts(x), torch.view_as_real, ((3, 4),), complex=True),
    "matmul": Case(t.Matmul, torch.matmul, ((3, 4), (4, 5)), complex=True),
    "matmul of a batch": Case(t.Matmul, torch.matmul, ((2, 3, 4), (4, 5)), complex=True),
    "bmm": Case(t.Matmul, torch.matmul, ((2, 3, 4), (2, 4, 5)), complex=True),
    "conv": replace(conv_case((2, 4, 5, 6), (6, 2, 3, 3), stride=2, pad=1, groups=2), complex=True),
    "conv 1d": replace(conv_case((2, 3, 8), (4, 3, 3), dilation=2), complex=True),
    "transposed": replace(
        transposed_case((2, 4, 5, 5), (4, 3, 3, 3), stride=2, pad=1, extra=1), complex=True
    ),
    **{
        f"reduce {fn}": Case(
            lambda x, fn=fn: t.Reduce(fn, x, (1,)),
            lambda x, fn=fn: getattr(torch, fn)(x, 1),
            ((3, 4),),
            complex=True,
        )
        for fn in ("sum", "mean", "prod")
    },
    **{
        f"running {ours}": Case(
            lambda x, fn=ours: t.Cumulative(fn, x, 1),
            lambda x, fn=theirs: getattr(torch, fn)(x, 1),
            ((3, 4),),
            complex=True,
        )
        for ours, theirs in (("sum", "cumsum"), ("prod", "cumprod"), ("logaddexp", "logcumsumexp"))
    },
    **{
        f"rfft of {n}": Case(transform("r2c", (0, 1)), lambda x: torch.fft.rfft2(x), ((4, n),))
        for n in (1, 2, 5, 6)
    },
    **{
        f"irfft to {n}": Case(
            transform("c2r", (0, 1), n, 2),
            lambda x, n=n: torch.fft.irfft2(x, (4, n)),
            ((4, n // 2 + 1),),
            complex=True,
        )
        for n in (2, 5, 6)
    },
    "ifft": Case(
        transform("c2c", (1,), how=1),
        lambda x: torch.fft.ifft(x, norm="ortho"),
        ((3, 5),),
        complex=True,
    ),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_gradient_of_complex_op(name):
    """That of both parts, as torch has it: with the conjugate of the derivative."""
    check(COMPLEX[name])


def test_every_function_of_complex_numbers_is_checked():
    assert set(COMPLEX_MAPS) == {*LINEAR, *HOLOMORPHIC}


def test_every_tensor_op_is_checked_or_has_no_gradient():
    """New ops come with a rule and a case."""
    rng = np.random.default_rng(0)
    ops = [build(c, [rng.random(s) for s in c.shapes]).nodes[0].op for c in TENSOR.values()]
    none = {op for op, rule in GRADIENTS.items() if rule is no_gradient}
    assert {type(op) for op in ops} - {t.Routine} | none | {t.Map} == set(GRADIENTS)
    complex_ones = {"fft"}  # in COMPLEX
    assert {op.fn for op in ops if isinstance(op, t.Routine)} == set(ROUTINES) - complex_ones
    missing = {op.name for op in t.OPS.values() if op not in GRADIENTS}
    ours = {name for name in t.OPS if name.endswith("_gradient")}
    cut = {"t.collective", "t.shard"}  # a graph is cut after its gradients are derived
    assert missing - ours - cut == {"t.routine", "t.opaque", "t.loop", "t.cond", "t.fused"}


# ---------------------------------------------------------------------------- control flow


def agrees(g: Graph, loss: Callable[..., Any], wrt: str = "*", seed: int = 0) -> None:
    """The gradients of a graph are torch's of `loss`, a function of its inputs and params by name,
    before and after each step of the pipeline."""
    rng = np.random.default_rng(seed)
    given = {v.name: rng.uniform(-1, 1, v.type.shape) for v in (*g.inputs, *g.params)}
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in given.items()}
    value = loss(**tensors)
    value.backward()
    grad = pipeline(f'autodiff{{wrt="{wrt}"}}').run(g)
    for graph in (grad, pipeline(LOWER).run(grad)):
        found = interp.run(graph, given)
        np.testing.assert_allclose(found[g.outputs[0].name], value.item(), rtol=1e-9)
        for name, x in tensors.items():
            if x.grad is not None:
                np.testing.assert_allclose(found[f"{name}.grad"], x.grad, rtol=1e-8, atol=1e-12)


def total(b: Builder, *values: Value) -> Value:
    """The sum of all cells, each value weighted by itself."""
    parts = [b(t.Reduce("sum", b(t.Map("mul", (v, v))), tuple(range(v.type.rank)))) for v in values]
    loss = parts[0]
    for part in parts[1:]:
        loss = b(t.Map("add", (loss, part)))
    return loss


TRIPS, BATCH, WIDTH = 4, 2, 3


def recurrent(index: Callable[[Builder, Value], Value], collects: bool = True) -> Graph:
    """h = tanh(X[index(i)] W + h R + bias), each h times bias collected, too."""
    b = Builder(Level.graph, "rnn")
    b.locs = ("m:rnn",)
    x = b.input("x", TensorType((TRIPS, BATCH, WIDTH), f64))
    h = b.input("h", TensorType((BATCH, WIDTH), f64))
    w, u = (b.param(name, TensorType((WIDTH, WIDTH), f64)) for name in "wu")
    bias = b.param("bias", TensorType((WIDTH,), f64))
    inner = Builder(Level.graph, "")
    inner.locs = b.locs
    trip, before = inner.input("i", TensorType((), i64)), inner.input("h", h.type)
    xs, ws, us, biases = (inner.input(v.name, v.type) for v in (x, w, u, bias))
    now = inner(t.Gather(xs, index(inner, trip), 0))
    product = inner(t.Map("add", (inner(t.Matmul(now, ws)), inner(t.Matmul(before, us)))))
    after = inner(t.Map("tanh", (inner(t.Map("add", (product, biases))),)), "after")
    body = inner.finish([after, inner(t.Map("mul", (after, biases)))])
    last, every = b.add(t.Loop(body, TRIPS, (h,), (x, w, u, bias)), ["last", "every"])
    return b.finish([total(b, last, every) if collects else total(b, last)])


def recurrent_loss(order: list[int], collects: bool = True) -> Callable[..., Any]:
    def loss(x, h, w, u, bias):
        sums = 0.0
        for i in order:
            h = torch.tanh(x[i] @ w + h @ u + bias)
            sums = sums + ((h * bias) ** 2).sum() * collects
        return sums + (h * h).sum()

    return loss


@pytest.mark.parametrize("collects", [True, False])
def test_gradient_of_a_loop(collects):
    agrees(recurrent(lambda b, i: i, collects), recurrent_loss([0, 1, 2, 3], collects))


def test_gradient_of_a_loop_that_reads_backwards():
    def back(b: Builder, i: Value) -> Value:
        return b(t.Map("add", (b(t.Map("neg", (i,))),), (TRIPS - 1,)))

    agrees(recurrent(back), recurrent_loss([3, 2, 1, 0]))


def test_gradient_of_a_loop_that_reads_one_place_twice():
    def half(b: Builder, i: Value) -> Value:
        return b(t.Map("div", (i,), (2,)))

    agrees(recurrent(half), recurrent_loss([0, 0, 1, 1]))


def test_gradient_of_a_loop_that_reads_where_it_is_told():
    """The place is captured; every trip reads it."""
    b = Builder(Level.graph, "told")
    b.locs = ("m:told",)
    place = b(t.Constant(TensorType((), i64), (1,)))
    x, w = b.input("x", TensorType((3, 2, 2), f64)), b.param("w", TensorType((2, 2), f64))
    inner = Builder(Level.graph, "")
    inner.locs = b.locs
    inner.input("i", TensorType((), i64))
    y, xs, ws, at = (
        inner.input(n, v.type) for n, v in (("y", w), ("xs", x), ("ws", w), ("at", place))
    )
    now = inner(t.Matmul(inner(t.Gather(xs, at)), ws))
    body = inner.finish([inner(t.Map("add", (inner(t.Map("tanh", (y,))), now)))])
    (last,) = b.add(t.Loop(body, 3, (w,), (x, w, place)))

    def loss(x, w):
        y = w
        for _ in range(3):
            y = torch.tanh(y) + x[1] @ w
        return (y * y).sum()

    agrees(b.finish([total(b, last)]), loss)


def test_the_weights_of_a_loop_get_one_product():
    """Not one a trip: what the trips give is stacked."""
    g = pipeline("autodiff").run(recurrent(lambda b, i: i))
    loop = [n.op for n in g.nodes if isinstance(n.op, t.Loop)][-1]
    inside = [n for n in loop.body.nodes if isinstance(n.op, t.Matmul)]
    after = [n for n in g.nodes if isinstance(n.op, t.Matmul)]
    assert (len(inside), len(after)) == (1, 2)  # by h; by w and by u


def test_gradient_of_a_loop_in_a_loop():
    """y = (y + x) * x, twice, then y = y w, all that three times."""
    b = Builder(Level.graph, "nest")
    b.locs = ("m:nest",)
    y, x = (b.input(name, TensorType((2, 3), f64)) for name in "yx")
    w = b.param("w", TensorType((3, 3), f64))
    deep = Builder(Level.graph, "")
    deep.locs = b.locs
    deep.input("i", TensorType((), i64))
    yy, xx = deep.input("y", y.type), deep.input("x", x.type)
    made = deep(t.Map("mul", (deep(t.Map("add", (yy, xx))), xx)))
    outer = Builder(Level.graph, "")
    outer.locs = b.locs
    outer.input("i", TensorType((), i64))
    ya, xa, wa = (outer.input(v.name, v.type) for v in (y, x, w))
    mid = outer.add(t.Loop(deep.finish([made]), 2, (ya,), (xa,)))[0]
    body = outer.finish([outer(t.Matmul(mid, wa))])
    (last,) = b.add(t.Loop(body, 3, (y,), (x, w)))

    def loss(y, x, w):
        for _ in range(3):
            for _ in range(2):
                y = (y + x) * x
            y = y @ w
        return (y * y).sum()

    agrees(b.finish([total(b, last)]), loss)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_gradient_of_a_branch(seed):
    """tanh(x w) where the first cell of p is positive, else x - w[0]."""
    b = Builder(Level.graph, "branch")
    b.locs = ("m:if",)
    p = b.input("p", TensorType((), f64))
    x, w = b.input("x", TensorType((2, 3), f64)), b.param("w", TensorType((3, 3), f64))
    sides: list[Graph] = []
    for side in ("then", "else"):
        inner = Builder(Level.graph, side)
        inner.locs = b.locs
        xi, wi = inner.input("x", x.type), inner.input("w", w.type)
        if side == "then":
            y = inner(t.Map("tanh", (inner(t.Matmul(xi, wi)),)))
        else:
            row = inner(t.Slice(wi, (0, 0), (1, 3), (1, 1)))
            y = inner(t.Map("sub", (xi, row)))
        sides.append(inner.finish([y]))
    (y,) = b.add(t.Cond(b(t.Map("gt", (p,), (0.0,))), sides[0], sides[1], (x, w)))

    def loss(p, x, w):
        y = torch.tanh(x @ w) if p > 0 else x - w[0]
        return (y * y).sum()

    agrees(b.finish([total(b, y)]), loss, "x w", seed)


def test_a_loop_that_may_end_early_is_refused():
    g = recurrent(lambda b, i: i)
    loop = g.nodes[0].op
    assert isinstance(loop, t.Loop)
    go = Value("go", TensorType((), bool_))
    last = Node(t.Constant(go.type, (True,)), (go,), g.nodes[0].locs)
    body = loop.body
    body = replace(body, nodes=(*body.nodes, last), outputs=(go, *body.outputs))
    ends = replace(loop, body=body, has_condition=True)
    g = replace(g, nodes=(replace(g.nodes[0], op=ends), *g.nodes[1:]))
    with pytest.raises(ModelError, match="with a condition") as error:
        pipeline("autodiff").run(g)
    assert "m:rnn" in str(error.value)


def test_what_it_cannot_do_it_says():
    with pytest.raises(UsageError, match="option 'every' is out of range"):
        pipeline("autodiff{every=-1}")
    with pytest.raises(UsageError, match="loss_scale is out of range"):
        pipeline("autodiff{loss_scale=0.0}")
    with pytest.raises(UsageError, match="already has a backward pass"):
        pipeline("autodiff,autodiff").run(recurrent(lambda b, i: i))
    b = Builder(Level.graph, "none")
    b.locs = ("m:none",)
    x = b.input("x", TensorType((2,), f64))
    with pytest.raises(UsageError, match="the model has no floating-point parameters") as error:
        pipeline("autodiff").run(b.finish([x]))
    assert 'wrt="x y"' in str(error.value)
    with pytest.raises(ModelError, match="no output to differentiate"):
        pipeline("autodiff").run(b.finish([b(t.Iota(TensorType((2,), i64)))]))
    op = t.Opaque("Mystery", (b.param("w", x.type),), (x.type,))
    with pytest.raises(ModelError, match=r"no gradient of t\.opaque") as error:
        pipeline("autodiff").run(b.finish([b(op)]))
    assert "m:none" in str(error.value)


# ---------------------------------------------------------------------------- any graph


@given(graphs())
def test_gradients_are_the_slopes_of_any_graph(g):
    """In f64, along one direction in which all inputs and params change at once: what the
    gradients say, and the difference quotient."""
    text = show(g).replace("f32", "f64").replace("f16", "f64")
    g = parse(text)
    g = replace(g, outputs=g.outputs[:1], over=())
    if not g.outputs[0].type.dtype.is_float:
        return
    grad = pipeline('autodiff{wrt="*"}').run(g)
    assert show(parse(show(grad))) == show(grad)
    assert [n.op.name for n in grad.nodes if phase_of(n) is None] == [n.op.name for n in g.nodes]
    rng = np.random.default_rng(0)
    names = [v.name for v in (*g.inputs, *g.params)]
    at = {v.name: rng.uniform(-1, 1, v.type.shape) for v in (*g.inputs, *g.params)}
    way = {name: rng.uniform(-1, 1, x.shape) for name, x in at.items()}

    def loss(step: float) -> float:
        moved = {name: at[name] + step * way[name] for name in names}
        return float(next(iter(interp.run(g, moved).values())).sum())

    with np.errstate(all="ignore"):
        found = interp.run(grad, at)
        slope = sum(
            float((found[f"{name}.grad"] * way[name]).sum())
            for name in names
            if f"{name}.grad" in found
        )
        quotient = (loss(1e-6) - loss(-1e-6)) / 2e-6
    if np.isfinite(slope) and np.isfinite(quotient) and abs(slope) < 1e6:
        np.testing.assert_allclose(slope, quotient, rtol=1e-3, atol=1e-3)
    pipeline(LOWER).run(grad)


def test_gradient_of_complex_numbers():
    """Rotary embeddings as products of complex numbers: (x c) conj(c) - x, squared."""
    b = Builder(Level.graph, "rotary")
    b.locs = ("m:rotary",)
    x, c = (b.input(name, TensorType((3, 2), f64)) for name in "xc")
    z, w = b(t.Parts(x)), b(t.Parts(c))
    turned = b(t.Map("mul", (b(t.Map("mul", (z, w))), b(t.Map("conj", (w,))))))
    y = b(t.Parts(b(t.Map("sub", (turned, z)))))

    def loss(x, c):
        z, w = torch.view_as_complex(x), torch.view_as_complex(c)
        y = torch.view_as_real(z * w * w.conj() - z)
        return (y * y).sum()

    agrees(b.finish([total(b, y)]), loss)


@given(graphs())
def test_checkpointing_any_graph_keeps_its_gradients(g):
    g = parse(show(g).replace("f32", "f64").replace("f16", "f64"))
    g = replace(g, outputs=g.outputs[:1], over=())
    if not g.outputs[0].type.dtype.is_float or not g.nodes:
        return
    rng = np.random.default_rng(0)
    at = {v.name: rng.uniform(-1, 1, v.type.shape) for v in (*g.inputs, *g.params)}
    plain = pipeline('autodiff{wrt="*"}').run(g)
    again = pipeline('autodiff{wrt="*",checkpoint="**"},canonicalize').run(g)
    with np.errstate(all="ignore"):
        expected, found = interp.run(plain, at), interp.run(again, at)
    for a, b in zip(plain.outputs, again.outputs, strict=True):
        np.testing.assert_allclose(found[b.name], expected[a.name], rtol=1e-9, atol=1e-12)
