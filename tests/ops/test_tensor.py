"""Tensor ops whose rules nothing else tests by hand: experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuir.interp import evaluate
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, bf16, channels_last, f8e4m3, f16, f32, i64
from gpuir.ops import tensor as t


def value(name: str, dtype: DType, *shape: int) -> Value:
    return Value(name, TensorType(shape, dtype))


def mixture(rows: int = 6, dtype: DType = f32, **more: object) -> t.Experts:
    """5 tokens of 4 cells, each to 2 of 3 experts of width 6 (gated, where up has 12 rows)."""
    x, which = value("x", dtype, 5, 4), value("which", i64, 5, 2)
    up, down = value("up", dtype, 3, rows, 4), value("down", dtype, 3, 4, 6)
    return t.Experts(x, which, value("shares", f32, 5, 2), up, down, **more)  # pyright: ignore


def test_experts_are_of_x_with_the_rows_of_down():
    assert mixture().types() == (TensorType((5, 4), f32),)
    assert replace(mixture(dtype=f8e4m3), dtype=bf16).types() == (TensorType((5, 4), bf16),)
    assert not mixture().is_gated and mixture(12).is_gated
    assert replace(mixture(), gate=value("gate", f32, 3, 6, 4)).is_gated


def test_experts_count_the_rows_that_tokens_make():
    """10 rows of 2 x (6 x 4 + 4 x 6) in the products, 6 x 4 of silu, and 2 x 4 in the sum; a gate
    in the same matrix doubles the product in and multiplies 6 cells."""
    assert mixture().flops() == 10 * (2 * 48 + 6 * 4 + 8)
    assert mixture(12).flops() == 10 * (2 * 72 + 6 * 5 + 8)
    assert mixture(ranks=2).flops() == 5 * (2 * 48 + 6 * 4 + 8)
    assert mixture(ranks=2, imbalance=1.5).rows == 8  # of 5, on the busiest rank


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"up": value("up", f32, 3, 7, 4)}, "operands do not match"),
        ({"down": value("down", f32, 2, 4, 6)}, "operands do not match"),
        ({"shares": value("shares", f32, 5, 3)}, "operands do not match"),
        ({"gate": value("gate", f32, 3, 4, 6)}, "operands do not match"),
        ({"x": value("x", f32, 1, 5, 4)}, "two axes"),
        ({"x": value("x", f16, 5, 4)}, "differ"),
        ({"which": value("which", f32, 5, 2)}, "the indices must be integers"),
        ({"down_bias": value("b", f32, 3, 6)}, "the shape of a bias does not match"),
        ({"gate_bias": value("b", f32, 3, 6)}, "there is a bias for a gate, but no gate"),
        ({"fn": "sliu"}, "did you mean silu"),
        ({"fn": "add"}, "is not an activation"),
        ({"alpha": 0.0}, "alpha"),
        ({"skew": -1.0}, "skew"),
        ({"ranks": 0}, "must be at least 1"),
        ({"ranks": 2, "imbalance": 2.5}, "imbalance is out of range"),
    ],
)
def test_experts_refuse(change: dict[str, object], says: str):
    with pytest.raises(ModelError, match=says):
        replace(mixture(), **change).types()  # pyright: ignore


def test_a_choice_outside_of_the_experts_adds_nothing_and_one_made_twice_counts_twice():
    op = mixture(fn="identity")
    draw = np.random.default_rng(0)
    x, up, down = (
        draw.standard_normal(s).astype(np.float32) for s in ((5, 4), (3, 6, 4), (3, 4, 6))
    )
    which = np.array([[0, 3], [-1, 7], [2, 2], [1, 0], [0, 1]])
    shares = np.full((5, 2), 0.25, np.float32)
    values = dict(zip(op.operands, (x, which, shares, up, down), strict=True))
    (y,) = evaluate(op, values)
    each = np.einsum("ehi,eij,tj->teh", down, up, x) / 4
    wanted = [each[0, 0], 0 * each[1, 0], 2 * each[2, 2], each[3, 0] + each[3, 1]]
    np.testing.assert_allclose(y[:4], np.array(wanted), rtol=1e-5)


def test_rows_between_the_products_are_rounded_as_x_is():
    """0.25 x (3 x 0.1015625 + 0.109375) = 0.1035 is 0.1015625 in f8e4m3, whose step is 1/128."""
    op = replace(mixture(dtype=f8e4m3, fn="identity"), dtype=f32)
    f8 = pytest.importorskip("ml_dtypes").float8_e4m3fn
    x, up, down = np.full((5, 4), 0.25, f8), np.full((3, 6, 4), 0.1015625, f8), np.ones((3, 4, 6))
    up[..., 3] = 0.109375
    shares = np.full((5, 2), 0.5, np.float32)
    arrays = (x, np.zeros((5, 2), int), shares, up, down.astype(f8))
    (y,) = evaluate(op, dict(zip(op.operands, arrays, strict=True)))
    assert np.all(y == 6 * 0.1015625)


def test_a_window_of_nothing_is_refused():
    """Its work would be negative."""
    x = Value("x", TensorType((1, 2, 3), f32))
    with pytest.raises(ModelError, match="the window is empty"):
        t.Pool("mean", x, (-1,), (1,), (0,), (4,), (1,)).types()


def test_a_routine_of_negative_work_is_refused():
    with pytest.raises(ModelError, match="the work of a routine must be 0 or more"):
        t.Routine("sort", (), (), work=-1).types()


def test_a_window_needs_axes_to_move_along():
    x, w = (Value(name, TensorType((3,), f32)) for name in "xw")
    for op in (
        t.Pool("mean", x, (), (), (), (), ()),
        t.Conv(x, w, (), (), (), ()),
        t.ConvTranspose(x, w, (), (), (), ()),
    ):
        with pytest.raises(ModelError, match="at least two axes"):
            op.types()


def test_images_with_one_axis_have_channels_last_too():
    assert channels_last(3) == (0, 2, 1) and channels_last(4) == (0, 2, 3, 1)
    assert channels_last(2) is None
