"""Kernels for the tests of the cost model, built by hand."""

from __future__ import annotations

from typing import Any, TypeVar

from gpuir.ir.build import Builder
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import DType, TensorType, f16, f32, i64
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t


def value(name: str, dtype: DType, *shape: int) -> Value:
    return Value(name, TensorType(shape, dtype))


Kind = TypeVar("Kind", bound=k.Product)


def summed(kind: type[Kind], op: t.TensorOp, dtype: DType) -> Kind:
    """A product, then its sum in `dtype`."""
    b = Builder(Level.graph, "body")
    b.locs = ("test:product",)
    for v in op.operands:
        b.capture(v)
    acc = b(op)
    out = b(t.Cast(acc, dtype)) if dtype != f32 else b(t.Map("identity", (acc,)))
    return kind(op.operands, b.finish([out]))


def gemm(m: int, n: int, depth: int, dtype: DType = f16, batch: int = 1) -> k.Gemm:
    """c[m, n] in the operands' dtype, summed in f32."""
    lead = (batch,) if batch != 1 else ()
    a, b = value("a", dtype, *lead, m, depth), value("b", dtype, *lead, depth, n)
    return summed(k.Gemm, t.Matmul(a, b, f32), dtype)


def mapped(fn: str, dtype: DType, *shapes: tuple[int, ...]) -> k.Map:
    args = tuple(value(f"x{i}", dtype, *shape) for i, shape in enumerate(shapes))
    b = Builder(Level.graph, "body")
    b.locs = ("test:map",)
    for v in args:
        b.capture(v)
    return k.Map(args, b.finish([b(t.Map(fn, args))]))


def softmax(rows: int, columns: int, dtype: DType = f32) -> k.Reduce:
    x = value("x", dtype, rows, columns)
    b = Builder(Level.graph, "body")
    b.locs = ("test:softmax",)
    b.capture(x)
    return k.Reduce((x,), b.finish([b(t.Softmax(x, 1))]))


def running(rows: int, columns: int) -> k.Reduce:
    """Running sums along each row."""
    x = value("x", f32, rows, columns)
    b = Builder(Level.graph, "body")
    b.locs = ("test:running",)
    b.capture(x)
    return k.Reduce((x,), b.finish([b(t.Cumulative("sum", x, 1))]))


def conv(
    n: int, c: int, size: int, channels: int, window: int, stride: int = 1, groups: int = 1
) -> k.Conv:
    """In f16, summed in f32."""
    x, w = value("x", f16, n, c, size, size), value("w", f16, channels, c // groups, window, window)
    pads = (window // 2, window // 2)
    direct = t.Conv(x, w, (stride, stride), pads, pads, (1, 1), groups, f32)
    return summed(k.Conv, direct, f16)


def attention(
    batch: int,
    heads: int,
    s: int,
    d: int,
    e: int,
    groups: int = 0,
    dtype: DType = f16,
    **fields: Any,
) -> k.Attention:
    groups = groups or heads
    q = value("q", dtype, batch, heads, s, e)
    keys, values = (value(name, dtype, batch, groups, d, e) for name in "kv")
    return k.Attention.of(t.Attention(q, keys, values, **fields))


def attention_gradient(batch: int, heads: int, s: int, d: int, e: int) -> k.AttentionGradient:
    forward = attention(batch, heads, s, d, e, stats=True)
    y, stats = (Value(n, x) for n, x in zip(("y", "stats"), forward.result_types, strict=True))
    dy = Value("dy", y.type)
    args = (*forward.args, y, stats, dy)
    op = t.AttentionGradient(*args)
    names = ("dq", "dk", "dv")
    made = tuple(Value(n, x) for n, x in zip(names, op.result_types, strict=True))
    body = Graph(Level.graph, "", args, (), (Node(op, made, ("m:attention/backward",)),), made)
    return k.AttentionGradient(args, body)


def gather(rows: int, width: int, count: int) -> k.Gather:
    x, i = value("table", f32, rows, width), value("ids", i64, count)
    b = Builder(Level.graph, "body")
    b.locs = ("test:gather",)
    b.capture(x), b.capture(i)
    return k.Gather((x, i), b.finish([b(t.Gather(x, i, 0))]))


def scatter(rows: int, width: int, count: int) -> k.Scatter:
    x, i = value("cache", f16, rows, width), value("at", i64, count, 1)
    u = value("updates", f16, count, width)
    b = Builder(Level.graph, "body")
    b.locs = ("test:scatter",)
    for v in (x, i, u):
        b.capture(v)
    return k.Scatter((x, i, u), b.finish([b(t.ScatterND(x, i, u))]))


def graph(*ops: k.KernelOp) -> Graph:
    """A graph of level kernel with these kernels in a row, named y0, y1, ..."""
    b = Builder(Level.kernel, "test")
    given: dict[str, Value] = {}
    outputs = []
    for j, op in enumerate(ops):
        b.locs = (f"test:node{j}",)
        names = {v: given.setdefault(f"{j}.{v.name}", b.input(f"{j}.{v.name}", v.type))
                 for v in op.operands}  # fmt: skip
        outputs += b.add(op.substitute(names), [f"y{j}"])
    return b.finish(outputs)
