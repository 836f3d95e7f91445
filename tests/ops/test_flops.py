"""Flops of every product: of real numbers torch's, of complex ones 8 a multiply-add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch_calls import loaded

import gpuir
from gpuir.ir.build import Builder
from gpuir.ir.graph import Graph, Level, Op
from gpuir.ir.types import DTYPES, TensorType, c64, c128, f32
from gpuir.ops import tensor as t
from gpuir.ops.scalar import COMPLEX, SCALARS, flops_of
from gpuir.stacks.table import pipeline

torch = pytest.importorskip("torch")
flop_counter = pytest.importorskip("torch.utils.flop_counter")
F = torch.nn.functional

DRAWS = 4
Drawn = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def products_of(g: Graph) -> int:
    """Flops of the products: a softmax between two, and what is done one by one, torch does not
    count."""
    kinds = t.Attention | t.AttentionGradient
    ops = [n.op for n in g.walk() if n.op.contraction and isinstance(n.op, t.TensorOp)]
    return sum(op.products if isinstance(op, kinds) else op.flops() for op in ops)


def sizes(rng: np.random.Generator, count: int, most: int = 12) -> list[int]:
    return [int(n) for n in rng.integers(1, most, count)]


def conv(rng: np.random.Generator, dims: int, transposed: bool, groups: int) -> Drawn:
    batch, c, k = sizes(rng, 3, 5)
    size, window, stride, dilation = sizes(rng, 4, 4)
    size += dilation * (window - 1)
    how = {"stride": stride, "dilation": dilation, "groups": groups}
    how["padding"] = 0 if transposed else int(rng.integers(0, 2))
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    rows = (groups * c, k) if transposed else (groups * k, c)
    shapes = ((batch, groups * c, *(size,) * dims), (*rows, *(window,) * dims))
    return lambda x, w: getattr(F, name)(x, w, **how), shapes


def draws(kind: str, rng: np.random.Generator) -> Drawn:
    b, m, k, n = sizes(rng, 4)
    match kind:
        case "mm":
            return torch.mm, ((m, k), (k, n))
        case "addmm":
            return torch.addmm, ((n,), (m, k), (k, n))
        case "bmm":
            return torch.bmm, ((b, m, k), (b, k, n))
        case "baddbmm":
            return torch.baddbmm, ((b, m, n), (b, m, k), (b, k, n))
        case "linear":
            return F.linear, ((b, m, k), (n, k), (n,))
        case "matmul":
            return torch.matmul, ((b, 1, m, k), (3, k, n))
        case "einsum":
            return lambda x, y: torch.einsum("bmk,bnk->bnm", x, y), ((b, m, k), (b, n, k))
        case "grouped conv2d":
            return conv(rng, 2, False, 3)
        case _:
            return conv(rng, int(kind[-2]), "transpose" in kind, 1)


KINDS = (
    *("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "einsum", "conv1d", "conv2d", "conv3d"),
    *("grouped conv2d", "conv_transpose1d", "conv_transpose2d"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_real_products_have_the_flops_of_torch(kind: str):
    """Forward, and with the gradients of all operands. (Of the weights of groups torch counts all
    pairs of channels, as if there were one group: there the forward pass alone.)"""
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(DRAWS):
        fn, shapes = draws(kind, rng)
        args = [torch.randn(shape, requires_grad=True) for shape in shapes]
        graph = loaded(fn, *(x.detach() for x in args))
        with flop_counter.FlopCounterMode(display=False) as counted:
            y = fn(*args)
            assert products_of(graph) == counted.get_total_flops(), shapes
            y.sum().backward()
        if "grouped" not in kind:
            both = pipeline('autodiff{wrt="*"}').run(graph)
            assert products_of(both) == counted.get_total_flops(), shapes


def test_attention_has_the_flops_of_torch():
    """Its two products, and five in its gradient; whatever the heads' widths."""
    rng = np.random.default_rng(0)
    for _ in range(DRAWS):
        b, h, s, d, e, f = sizes(rng, 6)
        shapes = (b, h, s, e), (b, h, d, e), (b, h, d, f)
        graph = loaded(F.scaled_dot_product_attention, *map(torch.randn, shapes))
        forward = flop_counter.sdpa_flop_count(*shapes)
        assert products_of(graph) == forward
        backward = flop_counter.sdpa_backward_flop_count((b, h, s, f), *shapes)
        assert products_of(pipeline('autodiff{wrt="*"}').run(graph)) == forward + backward


@pytest.mark.parametrize("kind", [k for k in KINDS if "conv" not in k])
def test_complex_products_have_four_times_the_flops(kind: str):
    rng = np.random.default_rng(KINDS.index(kind))
    fn, shapes = draws(kind, rng)
    real, whole = (
        loaded(fn, *(torch.randn(shape, dtype=d) for shape in shapes))
        for d in (torch.float32, torch.complex64)
    )
    assert products_of(whole) == 4 * products_of(real)
    both = [pipeline('autodiff{wrt="*"}').run(g) for g in (real, whole)]
    assert products_of(both[1]) == 4 * products_of(both[0])
    for profile in ("eager", "compiled", "ideal"):
        kernels = gpuir.lower(whole, profile=profile)
        gemms = [n.op for n in kernels.nodes if n.op.name == "k.gemm"]
        assert sum(op.flops() for op in gemms) >= products_of(whole)


@pytest.mark.parametrize("kind", [k for k in KINDS if "conv" in k])
def test_complex_convolutions_are_three_real_ones(kind: str):
    """As torch counts and runs them."""
    rng = np.random.default_rng(KINDS.index(kind))
    fn, shapes = draws(kind, rng)
    args = [torch.randn(shape, dtype=torch.complex64) for shape in shapes]
    graph = loaded(fn, *args)
    with flop_counter.FlopCounterMode(display=False) as counted:
        fn(*args)
    assert products_of(graph) == counted.get_total_flops()
    kernels = [n.op for n in gpuir.lower(graph, profile="eager").nodes]
    assert sum(op.name == "k.conv" for op in kernels) == 3


def each(op: Callable[..., Op], *types: TensorType) -> int:
    b = Builder(Level.graph, "case")
    return op(*(b.input(f"x{i}", type) for i, type in enumerate(types))).flops()


@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
def test_operations_on_complex_numbers(dtype: Any):
    """2 for a sum, 6 for a product, 8 for both."""
    cells = TensorType((4, 6), dtype)
    assert each(lambda x, y: t.Map("add", (x, y)), cells, cells) == 2 * 24
    assert each(lambda x, y: t.Map("mul", (x, y)), cells, cells) == 6 * 24
    assert each(lambda x, y: t.Map("div", (x, y)), cells, cells) == 11 * 24
    assert each(lambda x: t.Reduce("sum", x, (1,)), cells) == 2 * 24
    assert each(lambda x: t.Reduce("prod", x, (1,)), cells) == 6 * 24
    assert each(lambda x: t.Cumulative("sum", x, 1), cells) == 2 * 24
    assert each(lambda x, y: t.Matmul(x, y), cells, TensorType((6, 5), dtype)) == 8 * 4 * 6 * 5
    image, window = TensorType((2, 3, 8, 8), dtype), TensorType((4, 3, 3, 3), dtype)
    steps = ((1, 1), (0, 0), (0, 0), (1, 1))
    assert each(lambda x, w: t.Conv(x, w, *steps), image, window) == 8 * 2 * 4 * 36 * 27


def test_a_function_of_complex_numbers_takes_more_than_one_of_real_ones():
    """But those that only move them."""
    for fn in COMPLEX:
        assert flops_of(fn, c64) >= flops_of(fn, f32), fn
        assert (flops_of(fn, c64) == 0) == (SCALARS[fn].flops == 0), fn
        assert flops_of(fn, c64) == flops_of(fn, c128)


def test_no_other_dtype_counts_otherwise():
    real = [d for d in DTYPES.values() if not d.is_complex]
    assert {flops_of("mul", d) for d in real} == {1}
    assert {d.multiply_add for d in real} == {2}


POINTS = {"fft2": 8 * 16, "ifft": 16, "fftn": 4 * 8 * 16}


@pytest.mark.parametrize("name", POINTS)
def test_transforms_count_5_n_log_n(name: str):
    graph = loaded(getattr(torch.fft, name), torch.randn(4, 8, 16, dtype=torch.complex64))
    (routine,) = [n.op for n in graph.nodes if isinstance(n.op, t.Routine)]
    assert routine.flops() == 5 * 4 * 8 * 16 * np.log2(POINTS[name])
