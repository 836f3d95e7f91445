"""One Hypothesis strategy that draws valid graphs: odd names, rank 0, broadcasts, shared values,
many outputs, control flow. Every law and every new pass runs on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from gpuir.interp import to_numpy_dtype
from gpuir.ir.build import ROLES, Builder
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Graph, Level, Op, Value
from gpuir.ir.types import TensorType, bool_, f16, f32, i64
from gpuir.ops import tensor as t

NAMES = st.one_of(
    st.sampled_from(
        ["x", "h", "/layer.1/Add:0", 'a "quoted" name', "日本", "", "%", "}\n{", "a b"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4).map(tuple)
UNARY = ("relu", "sigmoid", "tanh", "neg", "abs", "identity", "gelu", "silu")
BINARY = ("add", "sub", "mul", "max", "min")


@st.composite
def graphs(draw: Callable, max_ops: int = 12, control: bool = True) -> Graph:
    """A graph at level `graph` of up to `max_ops` ops on small f32 and f16 tensors."""
    b = Builder(Level.graph, draw(NAMES))
    values: list[Value] = []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from([f32, f32, f16]))
        values.append(b.input(draw(NAMES), TensorType(draw(SHAPES), dtype)))
    for i in range(draw(st.integers(1, max_ops))):
        b.locs = (f"drawn:{draw(NAMES)}{i}",)
        try:
            made = draw(st.sampled_from(MAKERS if control else MAKERS[:-1]))(draw, b, values)
        except ModelError:
            continue  # the drawn operands do not fit; the type rule said so
        values += b.add(made, [draw(NAMES)]) if isinstance(made, Op) else made
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
    for v in draw(st.lists(st.sampled_from(values), max_size=3)):
        b.roles[v.name] = draw(st.sampled_from(ROLES))
    free = [v for v in values if b.producer(v) is None]
    over: list[Value | None] = []
    for v in outputs:
        fits = [None, *(u for u in free if u.type == v.type and u not in over)]
        over.append(draw(st.sampled_from(fits)))
    return b.finish(outputs, over)


def _pick(draw: Callable, values: list[Value], fits: Callable[[Value], bool]) -> Value:
    found = [v for v in values if fits(v)]
    if not found:
        raise ModelError("nothing fits")
    return draw(st.sampled_from(found))


def _unary(draw, b, values) -> Op:
    return t.Map(draw(st.sampled_from(UNARY)), (_pick(draw, values, is_float),))


def _binary(draw, b, values) -> Op:
    x = _pick(draw, values, is_float)
    if draw(st.booleans()):
        return t.Map(draw(st.sampled_from(BINARY)), (x,), (draw(st.sampled_from([0.5, 1, 0])),))
    y = _pick(draw, values, lambda v: v.type.dtype == x.type.dtype)
    op = t.Map(draw(st.sampled_from(BINARY)), (x, y))
    op.types()
    return op


def _where(draw, b, values) -> Op:
    x = _pick(draw, values, is_float)
    return t.Map("where", (b(t.Map("gt", (x,), (0.1,))), x, b(t.Map("neg", (x,)))))


def _cast(draw, b, values) -> Op:
    return t.Cast(_pick(draw, values, is_float), draw(st.sampled_from([f32, f16])))


def _reshape(draw, b, values) -> Op:
    x = draw(st.sampled_from(values))
    flat = draw(st.booleans())
    shape = (x.type.size,) if flat else tuple(draw(st.permutations(x.type.shape)))
    return t.Reshape(x, shape)


def _transpose(draw, b, values) -> Op:
    x = draw(st.sampled_from(values))
    return t.Transpose(x, tuple(draw(st.permutations(range(x.type.rank)))))


def _broadcast(draw, b, values) -> Op:
    x = draw(st.sampled_from(values))
    return t.Broadcast(
        x, (2, *(n if n > 1 else draw(st.sampled_from([1, 3])) for n in x.type.shape))
    )


def _slice(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank > 0)
    rows = [
        draw(st.tuples(st.integers(0, n - 1), st.sampled_from([1, 2, -1]))) for n in x.type.shape
    ]
    sizes = [1 if s != 1 else n - a for n, (a, s) in zip(x.type.shape, rows, strict=True)]
    return t.Slice(x, tuple(a for a, _ in rows), tuple(sizes), tuple(s for _, s in rows))


def _concat(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank > 0)
    return t.Concat((x, x), draw(st.integers(0, x.type.rank - 1)))


def _pad(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank > 0)
    return t.Pad(x, (1,) * x.type.rank, (0,) * x.type.rank)


def _reduce(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank > 0 and is_float(v))
    axes = draw(st.sets(st.integers(0, x.type.rank - 1), min_size=1))
    fn = draw(st.sampled_from(["sum", "max", "mean"]))
    return t.Reduce(fn, x, tuple(sorted(axes)), draw(st.booleans()))


def _softmax(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank > 0 and is_float(v))
    return t.Softmax(x, draw(st.integers(0, x.type.rank - 1)))


def _centred(draw, b, values) -> Op:
    """The start of a norm in primitives: x - mean(x)."""
    x = _pick(draw, values, lambda v: v.type.rank > 0 and is_float(v))
    return t.Map("sub", (x, b(t.Reduce("mean", x, (x.type.rank - 1,), True))))


def _normalize(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank > 0 and is_float(v))
    return t.Normalize(x, (x.type.rank - 1,), center=draw(st.booleans()))


def _matmul(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank >= 2 and is_float(v))
    if draw(st.booleans()):
        perm = (*range(x.type.rank - 2), x.type.rank - 1, x.type.rank - 2)
        return t.Matmul(x, b(t.Transpose(x, perm)))
    return t.Matmul(x, b.param(draw(NAMES), TensorType((x.type.shape[-1], 3), x.type.dtype)))


def _dequantised(draw, b, values) -> Op:
    """x times a weight stored in f16 and widened, as weight-only quantisation does."""
    x = _pick(draw, values, lambda v: v.type.rank >= 2 and v.type.dtype == f32)
    w = b.param(draw(NAMES), TensorType((x.type.shape[-1], 2), f16))
    return t.Matmul(x, b(t.Map("mul", (b(t.Cast(w, f32)),), (0.5,))))


def _residual(draw, b, values) -> Op:
    """f(x) + f(x) @ w: the skip connection around a product."""
    x = b(_unary(draw, b, values))
    if x.type.rank < 2:
        raise ModelError("nothing fits")
    w = b.param(draw(NAMES), TensorType((x.type.shape[-1],) * 2, x.type.dtype))
    return t.Map("add", (x, b(t.Matmul(x, w))))


def _conv(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank in (3, 4) and is_float(v))
    n = x.type.rank - 2
    w = b.param(draw(NAMES), TensorType((2, x.type.shape[1], *(1,) * n), x.type.dtype))
    return t.Conv(x, w, (1,) * n, (0,) * n, (0,) * n, (1,) * n)


def _attention(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank >= 3 and is_float(v))
    return t.Attention(x, x, x, causal=draw(st.booleans()))


def _experts(draw, b, values) -> Op:
    """Three experts of width 2; weights that are stored in f16 and widened, or plain."""
    x = _pick(draw, values, lambda v: v.type.rank == 2 and is_float(v))
    (tokens, hidden), rows, k = x.type.shape, draw(st.sampled_from([2, 4])), draw(st.integers(1, 2))
    which = b(t.Constant(TensorType((tokens, k), i64), tuple(i % 3 for i in range(tokens * k))))
    shares = b(t.Constant(TensorType((tokens, k), f32), (0.5,)))
    up = b.param(draw(NAMES), TensorType((3, rows, hidden), f16))
    up = b(t.Cast(up, f32)) if x.type.dtype == f32 else up
    down = b.param(draw(NAMES), TensorType((3, hidden, 2), x.type.dtype))
    fn = draw(st.sampled_from(["silu", "relu"]))
    interleaved, skew = draw(st.booleans()), draw(st.sampled_from([0.0, 1.2]))
    return t.Experts(x, which, shares, up, down, fn=fn, interleaved=interleaved, skew=skew)


def _constant(draw, b, values) -> Op:
    return t.Constant(TensorType(draw(SHAPES), f32), (draw(st.sampled_from([0.0, -1.5])),))


def _gather(draw, b, values) -> Op:
    x = _pick(draw, values, lambda v: v.type.rank > 0)
    index = b(t.Constant(TensorType((2,), i64), (0, -1)))
    return t.Gather(x, index, draw(st.integers(0, x.type.rank - 1)))


def _topk(draw, b, values) -> tuple[Value, ...]:
    x = _pick(draw, values, lambda v: v.type.rank > 0 and is_float(v))
    return b.add(t.TopK(x, 1, x.type.rank - 1), [draw(NAMES)])


def _loop(draw, b, values) -> tuple[Value, ...]:
    """x = x * 0.5 + captured, three times, each trip's x collected."""
    x = _pick(draw, values, is_float)
    body = Builder(Level.graph, "")
    body.locs = b.locs
    body.input("i", TensorType((), i64))
    carried, captured = body.input("x", x.type), body.input("c", x.type)
    half = body(t.Map("mul", (carried,), (0.5,)))
    body.locs = (*b.locs, f"{b.locs[0]}/body")
    y = body(t.Map("identity", (body(t.Map("add", (half, captured))),)))
    return b.add(t.Loop(body.finish([y, half]), 3, (x,), (x,)), [draw(NAMES)])


def is_float(v: Value) -> bool:
    return v.type.dtype in (f32, f16)


MAKERS = [
    *(_unary, _binary, _binary, _where, _cast, _reshape, _transpose, _broadcast, _slice, _concat),
    *(_pad, _reduce, _softmax, _centred, _normalize, _matmul, _dequantised, _residual, _conv),
    *(_attention, _experts, _constant, _gather, _topk, _loop),
]


def arrays(g: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs and params for a graph, by name."""
    rng = np.random.default_rng(seed)

    def array(type: TensorType) -> np.ndarray:
        if type.dtype == bool_:
            return rng.random(type.shape) < 0.5
        return np.asarray(rng.uniform(-1, 1, type.shape)).astype(to_numpy_dtype(type.dtype))

    return {v.name: array(v.type) for v in (*g.inputs, *g.params)}
