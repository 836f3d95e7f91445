"""Which dtype each op runs in under autocast, and that the numbers stay near."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from strategies import arrays, graphs, is_float

from gpuir import interp
from gpuir.ir.build import Builder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Op
from gpuir.ir.types import DType, TensorType, bf16, f16, f32, f64, i32
from gpuir.ops import tensor as t
from gpuir.stacks.table import pipeline

SQUARE = (4, 4, 4)


def one(op: Callable[..., Op], *dtypes: DType) -> Graph:
    """The op on square matrices of these dtypes."""
    b = Builder(Level.graph, "g")
    b.locs = ("m:op",)
    values = [b.input(f"x{i}", TensorType(SQUARE, d)) for i, d in enumerate(dtypes)]
    return b.finish(b.add(op(*values), ["y"]))


def gives(op: Callable[..., Op], *dtypes: DType, to: str = "bf16") -> DType:
    """The dtype of what the op gives under autocast."""
    return pipeline(f"autocast{{dtype={to}}}").run(one(op, *dtypes)).outputs[0].type.dtype


# PyTorch documentation, torch.amp, "Autocast Op Reference", on ops of f32
NARROW: dict[str, Callable[..., Op]] = {
    "matmul": lambda a: t.Matmul(a, a),
    "conv1d": lambda a: t.Conv(a, a, (1,), (0,), (0,), (1,)),
    "conv_transpose1d": lambda a: t.ConvTranspose(a, a, (1,), (0,), (0,), (1,)),
    "scaled_dot_product_attention": lambda a: t.Attention(a, a, a),
}
WIDE: dict[str, Callable[..., Op]] = {
    **{
        fn: lambda a, fn=fn: t.Map(fn, (a,))
        for fn in ("acos", "asin", "cosh", "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt")
    },
    **{fn: lambda a, fn=fn: t.Map(fn, (a,)) for fn in ("sinh", "softplus", "tan")},
    "pow": lambda a: t.Map("pow", (a,), (2.0,)),
    "cumsum": lambda a: t.Cumulative("sum", a, 1),
    "cumprod": lambda a: t.Cumulative("prod", a, 1),
    "layer_norm": lambda a: t.Normalize(a, (2,)),
    "softmax": lambda a: t.Softmax(a, 2),
    "log_softmax": lambda a: t.Softmax(a, 2, True),
    "prod": lambda a: t.Reduce("prod", a, (1,)),
    "sum": lambda a: t.Reduce("sum", a, (1,)),
}
OTHERS: dict[str, Callable[..., Op]] = {
    "relu": lambda a: t.Map("relu", (a,)),
    "gelu": lambda a: t.Map("gelu", (a,)),
    "amax": lambda a: t.Reduce("max", a, (1,)),
    "batch_norm": lambda a: t.Normalize(a, (0, 2)),
    "transpose": lambda a: t.Transpose(a, (0, 2, 1)),
    "max_pool1d": lambda a: t.Pool("max", a, (2,), (2,), (0,), (0,), (1,)),
}


@pytest.mark.parametrize("name", NARROW)
def test_products_are_narrow(name):
    assert [gives(NARROW[name], d) for d in (f32, bf16, f16, f64)] == [bf16, bf16, bf16, f64]
    assert gives(NARROW[name], f32, to="f16") == f16


@pytest.mark.parametrize("name", WIDE)
def test_sums_and_norms_are_wide(name):
    assert [gives(WIDE[name], d) for d in (f32, bf16, f16, f64)] == [f32, f32, f32, f64]


@pytest.mark.parametrize("name", OTHERS)
def test_others_run_in_what_they_are_given(name):
    assert [gives(OTHERS[name], d) for d in (f32, bf16, f64)] == [f32, bf16, f64]


def test_a_weight_is_cast_once_an_activation_by_each():
    b = Builder(Level.graph, "g")
    b.locs = ("m:op",)
    x, w = b.input("x", TensorType((4, 4), f32)), b.param("w", TensorType((4, 4), f32))
    turned = b(t.Transpose(w, (1, 0)))
    y = b(t.Map("add", (b(t.Matmul(x, turned)), b(t.Matmul(x, turned)))))
    g = pipeline("autocast").run(b.finish([b(t.Matmul(y, w))]))
    cast = [n.op.x.name for n in g.nodes if isinstance(n.op, t.Cast)]
    assert sorted(cast) == ["w", "x", "x"]
    kernels = pipeline("canonicalize,fuse,legalize").run(g)
    assert [n.op.name for n in kernels.nodes].count("k.gemm") == 2  # the two were one
    assert not any(getattr(n.op, "prologue", ()) for n in kernels.nodes)


def test_what_is_taken_over_keeps_its_type():
    b = Builder(Level.graph, "g")
    b.locs = ("m:op",)
    x, w = b.input("x", TensorType((4, 4), f32)), b.param("w", TensorType((4, 4), f32))
    g = pipeline("autocast").run(b.finish([b(t.Matmul(x, w))], [x]))
    assert g.outputs[0].type == x.type


@given(graphs())
def test_numbers_stay_near(g):
    before, after = g, pipeline("autocast{dtype=f16}").run(g)
    pipeline("canonicalize,fuse,legalize,tile{target=a100},annotate").run(after)
    values = arrays(g)
    with np.errstate(all="ignore"):
        expected, found = interp.run(before, values), interp.run(after, values)
    for a, b in zip(before.outputs, after.outputs, strict=True):
        if is_float(a):
            x, y = expected[a.name].astype(float), found[b.name].astype(float)
            near = np.isclose(x, y, rtol=0.05, atol=0.05 * max(1, np.abs(x).max(initial=0)))
            assert near.mean(where=np.abs(x) < 1e4) > 0.9 if near.size else True


def test_bits_and_complex_numbers_keep_their_width():
    b = Builder(Level.graph, "g")
    b.locs = ("m:op",)
    x = b.input("x", TensorType((4, 2), f32))
    y = b(t.Matmul(x, b.input("w", TensorType((2, 2), f32))))
    g = b.finish([b(t.Parts(y)), b(t.Bitcast(y, i32))])
    assert [v.type for v in pipeline("autocast").run(g).outputs] == [v.type for v in g.outputs]


def test_gradients_come_after():
    with pytest.raises(UsageError, match="has a backward pass"):
        g = one(lambda a: t.Map("relu", (a,)), f32)
        pipeline('autodiff{wrt="x0"},autocast').run(g)
    with pytest.raises(UsageError, match="'f8e4m3' is not supported"):
        pipeline("autocast{dtype=f8e4m3}")


def test_gradients_of_weights_are_in_their_own_dtype():
    b = Builder(Level.graph, "g")
    b.locs = ("m:op",)
    x, w = b.input("x", TensorType((4, 4), f32)), b.param("w", TensorType((4, 4), f32))
    loss = b(t.Reduce("sum", b(t.Matmul(x, w)), (0, 1)), "loss")
    g = pipeline("autocast,autodiff").run(b.finish([loss]))
    grad = next(v for v in g.outputs if v.name == "w.grad")
    assert grad.type == w.type
    product = next(n.op for n in g.nodes if n.locs[0].endswith("/backward") and n.op.contraction)
    assert isinstance(product, t.Matmul) and product.a.type.dtype == bf16
