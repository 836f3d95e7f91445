"""What ops mean: against torch, the math module, and numbers worked out by hand."""

from __future__ import annotations

import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from gpuir.interp import NoMeaning, cast, evaluate, linalg, run, to_type
from gpuir.interp.meanings import MEANINGS
from gpuir.interp.scalars import FUNCTIONS, erf
from gpuir.interp.tensor import pad
from gpuir.ir.build import Builder
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Level, Op, Value
from gpuir.ir.types import DTYPES, TensorType, bool_, f16, f32, i4, i32, i64, u8
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.scalar import SCALARS

rng = np.random.default_rng(0)


def value(array: np.ndarray, name: str) -> Value:
    return Value(name, to_type(array))


def apply(make, *arrays: np.ndarray) -> np.ndarray:
    """The first result of `make(*values)`, an op, on these arrays; its dtype and shape checked."""
    values = [value(a, f"v{i}") for i, a in enumerate(arrays)]
    op: Op = make(*values)
    results = evaluate(op, dict(zip(values, arrays, strict=True)))
    assert [to_type(r) for r in results] == list(op.types())
    return results[0]


def normal(*shape: int, dtype=np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def test_every_op_and_scalar_has_a_meaning():
    assert set(FUNCTIONS) == set(SCALARS)
    assert set(MEANINGS) == {*t.OPS.values(), *k.KERNELS.values()}


# ---------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_dtypes_go_to_numpy_and_back(name: str):
    zero = apply(lambda: t.Constant(TensorType((2,), DTYPES[name]), (1,)))
    assert to_type(zero) == TensorType((2,), DTYPES[name])
    assert (zero.astype(complex) == 1).all()


def test_an_array_of_strings_is_refused():
    with pytest.raises(ModelError, match="does not know"):
        to_type(np.array(["a"]))


# ONNX Cast, "cast to float 8" tables: x, then saturated and unsaturated
@pytest.mark.parametrize(
    "name, largest, infinity, beyond",
    [
        ("f8e4m3", 448, math.nan, math.nan),
        ("f8e4m3fnuz", 240, math.nan, math.nan),
        ("f8e5m2", 57344, math.inf, math.inf),
        ("f8e5m2fnuz", 57344, math.nan, math.nan),
    ],
)
def test_cast_to_float8(name: str, largest: float, infinity: float, beyond: float):
    x = np.array([np.nan, np.inf, -np.inf, 1e6, -1e6, 1], np.float32)
    clamped = [np.nan, largest, -largest, largest, -largest, 1]
    np.testing.assert_array_equal(cast(x, DTYPES[name]).astype(np.float32), clamped)
    free = [np.nan, infinity, -infinity, beyond, -beyond, 1]
    loose = cast(x, DTYPES[name], saturate=False)
    np.testing.assert_array_equal(loose.astype(np.float32), free)


def test_cast_to_exponents_only():
    x = np.array([0.9, 1.0, 1.1, 1.5, 1.6, -4.0, np.inf, 3e38], np.float32)
    rounded = {
        "up": [1, 1, 2, 2, 2, 4, np.nan, 2.0**127],
        "down": [0.5, 1, 1, 1, 1, 4, np.nan, 2.0**127],
        "nearest": [1, 1, 1, 2, 2, 4, np.nan, 2.0**127],
    }
    for rounding, expected in rounded.items():
        y = cast(x, DTYPES["f8e8m0"], True, rounding)
        np.testing.assert_array_equal(y.astype(np.float64), expected, err_msg=rounding)


def test_cast_to_integers_truncates_and_wraps():
    x = np.array([2.7, -2.7, 130.0, 300.5], np.float32)
    assert cast(x, DTYPES["i8"]).tolist() == [2, -2, -126, 44]
    assert cast(np.array([7, 8, -9], np.int32), i4).astype(int).tolist() == [7, -8, 7]
    assert cast(np.array([0.0, -0.0, 0.1, np.nan]), bool_).tolist() == [False, False, True, True]


# ---------------------------------------------------------------------------- scalars


def test_erf_is_exact_to_double_precision():
    x = np.concatenate([np.linspace(-7, 7, 2001), np.logspace(-300, 1, 500)])
    np.testing.assert_allclose(erf(x), np.vectorize(math.erf)(x), rtol=1e-15)
    np.testing.assert_array_equal(erf(np.array([np.inf, -np.inf, -0.0])), [1, -1, -0.0])
    assert np.isnan(erf(np.array([np.nan])))[0]


def test_integer_division_goes_towards_zero():
    x, y = map(np.array, zip(*product([7, -7, 6, 0], [2, -2, 3, -3]), strict=True))
    got = apply(lambda a, b: t.Map("div", (a, b)), x, y)
    assert got.tolist() == [int(a / b) for a, b in zip(x, y, strict=True)]


def test_mod_takes_the_divisors_sign_and_fmod_the_dividends():
    x, y = np.array([5, -5, 5, -5]), np.array([3, 3, -3, -3])
    assert apply(lambda a, b: t.Map("mod", (a, b)), x, y).tolist() == [2, 1, -1, -2]
    assert apply(lambda a, b: t.Map("fmod", (a, b)), x, y).tolist() == [2, -2, 2, -2]


def test_round_is_half_to_even():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.6], np.float16)
    assert apply(lambda a: t.Map("round", (a,)), x).tolist() == [0, 2, 2, 0, -2, 3]


def test_immediates_have_the_operands_dtype():
    x = np.array([1, 2], np.uint8)
    assert apply(lambda a: t.Map("add", (a,), (255,)), x).tolist() == [0, 1]
    x = np.array([1, 2], ml_dtypes.bfloat16)
    got = apply(lambda a: t.Map("mul", (a,), (1.001,)), x)  # 1.001 is 1 in bf16
    assert got.astype(float).tolist() == [1, 2]


def test_sigmoid_and_softplus_do_not_overflow():
    x = np.array([-1e4, -1, 0, 1, 1e4], np.float32)
    with np.errstate(all="raise", under="ignore"):
        s = FUNCTIONS["sigmoid"](x)
        p = FUNCTIONS["softplus"](x)
    np.testing.assert_allclose(s, [0, 0.26894143, 0.5, 0.7310586, 1], rtol=1e-6)
    np.testing.assert_allclose(p, [0, 0.31326166, math.log(2), 1.3132616, 1e4], rtol=1e-6)


@pytest.mark.parametrize(
    "fn, name",
    [
        *((f, f) for f in ("sigmoid", "softplus", "silu", "relu", "mish", "elu", "leaky_relu")),
        *(("gelu", "gelu"), ("gelu_tanh", "gelu"), ("hard_swish", "hardswish")),
    ],
)
def test_activations_against_torch(fn: str, name: str):
    torch = pytest.importorskip("torch")
    x = normal(1000, dtype=np.float64) * 4
    imm = (0.3,) if fn in ("elu", "leaky_relu") else ()
    options = {"approximate": "tanh"} if fn == "gelu_tanh" else {}
    expected = getattr(torch.nn.functional, name)(torch.from_numpy(x), *imm, **options)
    got = apply(lambda a: t.Map(fn, (a,), imm), x)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-7, atol=1e-12)


# ---------------------------------------------------------------------------- layout, indexing


def test_slices_go_backwards():
    x = np.arange(12).reshape(3, 4)
    got = apply(lambda a: t.Slice(a, (2, 3), (3, 2), (-1, -2)), x)
    np.testing.assert_array_equal(got, x[::-1, 3::-2])
    assert apply(lambda a: t.Slice(a, (0, 4), (3, 0), (1, 1)), x).shape == (3, 0)


def test_pads_crop_below_zero():
    x = np.arange(5)
    assert pad(x, [-1], [2], 9).tolist() == [1, 2, 3, 4, 9, 9]
    assert pad(x, [2], [-1], mode="reflect").tolist() == [2, 1, 0, 1, 2, 3]
    assert pad(x, [2], [1], mode="edge").tolist() == [0, 0, 0, 1, 2, 3, 4, 4]
    assert pad(x, [2], [1], mode="wrap").tolist() == [3, 4, 0, 1, 2, 3, 4, 0]


def test_gathers_count_negative_indices_from_the_end():
    x = np.arange(12).reshape(3, 4)
    i = np.array([[0, -1]])
    assert apply(lambda a, b: t.Gather(a, b, 1), x, i).tolist() == [[[0, 3]], [[4, 7]], [[8, 11]]]
    assert apply(lambda a, b: t.GatherElements(a, b, 1), x, i).tolist() == [[0, 3]]
    assert apply(lambda a, b: t.GatherND(a, b), x, i).tolist() == [3]
    rows = np.array([[1], [-1], [0]])
    assert apply(lambda a, b: t.GatherND(a, b, 1), x, rows).tolist() == [1, 7, 8]


def test_an_index_out_of_range_is_said():
    with pytest.raises(NoMeaning, match="out of bounds"):
        apply(lambda a, b: t.Gather(a, b, 0), np.arange(3), np.array([3]))


@pytest.mark.parametrize(
    "how, expected",
    [
        ("none", [5, 2, 7]),
        ("add", [8, 2, 10]),
        ("mul", [10, 2, 21]),
        ("min", [1, 2, 3]),
        ("max", [5, 2, 7]),
    ],
)
def test_scatters_combine(how, expected):
    x, i, u = np.array([1, 2, 3]), np.array([0, 0, -1]), np.array([2, 5, 7])
    if how in ("min", "max"):
        i, u = i[1:], u[1:]
    got = apply(lambda a, b, c: t.ScatterElements(a, b, c, 0, how), x, i, u)
    assert got.tolist() == expected
    got = apply(lambda a, b, c: t.ScatterND(a, b, c, how), x, i[:, None], u)
    assert got.tolist() == expected
    assert x.tolist() == [1, 2, 3]


# ---------------------------------------------------------------------------- reductions


def test_reductions_keep_narrow_dtypes():
    x = np.full((300, 2), 200, np.uint8)
    assert apply(lambda a: t.Reduce("sum", a, (0,)), x).tolist() == [60000 % 256] * 2
    assert apply(lambda a: t.Reduce("mean", a, (1,)), x[:0]).shape == (0,)


def test_an_empty_max_is_the_least_value():
    none = np.zeros((0, 2), np.float32)
    assert apply(lambda a: t.Reduce("max", a, (0,)), none).tolist() == [-math.inf] * 2
    assert apply(lambda a: t.Reduce("min", a, (0,)), none.astype(np.int8)).tolist() == [127] * 2


def test_topk_breaks_ties_by_the_lower_index():
    x = np.array([3, 1, 3, 2, 3, 1], np.float16)
    op = t.TopK(value(x, "x"), 4, 0)
    values, indices = evaluate(op, {op.x: x})
    assert (values.tolist(), indices.tolist()) == ([3, 3, 3, 2], [0, 2, 4, 3])
    op = t.TopK(value(x, "x"), 3, 0, largest=False)
    values, indices = evaluate(op, {op.x: x})
    assert (values.tolist(), indices.tolist()) == ([1, 1, 2], [1, 5, 3])


def test_cumulative():
    x = np.array([1, 2, 3, 4])

    def total(**options):
        return apply(lambda a: t.Cumulative("sum", a, 0, **options), x).tolist()

    assert total() == [1, 3, 6, 10]
    assert total(exclusive=True) == [0, 1, 3, 6]
    assert total(reverse=True) == [10, 9, 7, 4]
    assert total(exclusive=True, reverse=True) == [9, 7, 4, 0]


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_against_torch(groups: int):
    torch = pytest.importorskip("torch")
    x, s, b = normal(2, 6, 3, 5), normal(6, 1, 1), normal(6, 1, 1)
    got = apply(lambda x, s, b: t.Normalize(x, (1, 2, 3), s, b, 1e-3, groups=groups), x, s, b)
    args = [torch.from_numpy(a) for a in (x, s.reshape(-1), b.reshape(-1))]
    expected = torch.nn.functional.group_norm(args[0], groups, *args[1:], eps=1e-3)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_rms_norm():
    x = np.array([[3, 4]], np.float16)
    got = apply(lambda x: t.Normalize(x, (1,), eps=0.0, center=False), x)
    np.testing.assert_allclose(got, x / math.sqrt(12.5), rtol=1e-3)


# ---------------------------------------------------------------------------- windows


CONVOLUTIONS = [  # x, w, strides, low = high, dilations, groups
    ((2, 3, 9), (4, 3, 3), (2,), (1,), (2,), 1),
    ((2, 4, 8, 7), (6, 2, 3, 2), (1, 2), (1, 0), (1, 2), 2),
    ((1, 6, 8, 7), (6, 1, 3, 3), (2, 1), (1, 2), (2, 1), 6),
    ((1, 6, 5, 5), (12, 1, 3, 3), (1, 1), (1, 1), (1, 1), 6),
    ((1, 2, 5, 6, 4), (3, 2, 2, 3, 1), (1, 2, 1), (0, 1, 0), (1, 1, 1), 1),
    ((0, 2, 5, 5), (3, 2, 3, 3), (1, 1), (0, 0), (1, 1), 1),
]


@pytest.mark.parametrize("x, w, strides, pads, dilations, groups", CONVOLUTIONS)
def test_conv_against_torch(x, w, strides, pads, dilations, groups):
    torch = pytest.importorskip("torch")
    x, w = normal(*x, dtype=np.float64), normal(*w, dtype=np.float64)
    fn = getattr(torch.nn.functional, f"conv{x.ndim - 2}d")
    args = [torch.from_numpy(a) for a in (x, w)]
    expected = fn(*args, None, strides, pads, dilations, groups).numpy()
    got = apply(lambda x, w: t.Conv(x, w, strides, pads, pads, dilations, groups), x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)

    # the kernel does the same, and then its epilogue on the accumulator
    def kernel(x: Value, w: Value) -> k.Conv:
        b = Builder(Level.graph, "body")
        b.locs = ("m:conv",)
        b.capture(x), b.capture(w)
        acc = b(t.Conv(x, w, strides, pads, pads, dilations, groups, f32))
        return k.Conv((x, w), b.finish([b(t.Map("relu", (acc,)))]))

    got = apply(kernel, x, w)
    np.testing.assert_allclose(got, np.maximum(expected, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("x, w, strides, pads, dilations, groups", CONVOLUTIONS)
def test_conv_transpose_against_torch(x, w, strides, pads, dilations, groups):
    torch = pytest.importorskip("torch")
    w = (x[1], w[1], *w[2:])
    x, w = normal(*x, dtype=np.float64), normal(*w, dtype=np.float64)
    extra = tuple(max(s, d) - 1 for s, d in zip(strides, dilations, strict=True))
    fn = getattr(torch.nn.functional, f"conv_transpose{x.ndim - 2}d")
    args = [torch.from_numpy(a) for a in (x, w)]
    expected = fn(*args, None, strides, pads, extra, groups, dilations).numpy()
    got = apply(
        lambda x, w: t.ConvTranspose(x, w, strides, pads, pads, dilations, groups, extra), x, w
    )
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_integer_products_are_exact():
    a = rng.integers(0, 256, (5, 4000)).astype(np.uint8)
    b = rng.integers(-128, 128, (4000, 3)).astype(np.int8)
    got = apply(lambda a, b: t.Matmul(a, b, i32), a, b)
    np.testing.assert_array_equal(got, a.astype(int) @ b.astype(int))


@pytest.mark.parametrize("fn", ["max", "mean"])
def test_pools_against_torch(fn: str):
    torch = pytest.importorskip("torch")
    x = -np.abs(normal(2, 3, 9, 8))  # below zero: padding would win
    parts = ((3, 2), (2, 1), (1, 0), (1, 0))
    if fn == "max":
        expected, at = torch.nn.functional.max_pool2d(
            torch.from_numpy(x), *parts[:3], (2, 3), return_indices=True
        )
        got = apply(lambda x: t.Pool("argmax", x, *parts, (2, 3)), x)
        np.testing.assert_array_equal(got, at.numpy())
        got = apply(lambda x: t.Pool("max", x, *parts, (2, 3)), x)
        np.testing.assert_array_equal(got, expected.numpy())
        return
    for include in (True, False):
        expected = torch.nn.functional.avg_pool2d(
            torch.from_numpy(x), *parts[:3], count_include_pad=include
        )
        got = apply(lambda x: t.Pool("mean", x, *parts, (1, 1), include), x)  # noqa: B023
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5)


def test_cells_beyond_the_declared_padding_do_not_count():
    x = np.ones((1, 1, 4), np.float32)  # windows of 3, stride 3: cells -1..1, 2..4, 5..7
    op = t.Pool("mean", value(x, "x"), (3,), (3,), (1,), (4,), (1,), include_pad=True, extra=(3,))
    (got,) = evaluate(op, {op.x: x})
    np.testing.assert_allclose(got[0, 0, :2], [2 / 3, 2 / 3])


# ---------------------------------------------------------------------------- attention, resize


@pytest.mark.parametrize(
    "causal, masked, heads", list(product([False, True], [None, bool, float], [1, 2, 6]))
)
def test_attention_against_torch(causal, masked, heads):
    torch = pytest.importorskip("torch")
    q, key, v = normal(2, 6, 5, 8), normal(2, heads, 7, 8), normal(2, heads, 7, 4)
    args = [torch.from_numpy(a) for a in (q, key, v)]
    args[1:] = [a.repeat_interleave(6 // heads, 1) for a in args[1:]]
    mask = {None: None, bool: rng.random((5, 7)) > 0.3, float: normal(1, 5, 7)}[masked]
    if masked is bool:
        mask[:, 0] = True
    hidden = np.arange(5)[:, None] < np.arange(7) if causal else np.zeros((5, 7), bool)
    whole = np.where(hidden, -np.inf, 0.0)
    if masked is bool:
        whole = np.where(mask, whole, -np.inf)
    elif masked is float:
        whole = whole + mask
    expected = torch.nn.functional.scaled_dot_product_attention(
        *args, attn_mask=torch.from_numpy(whole.astype(np.float32)), scale=0.3
    )
    arrays = [q, key, v] + ([] if mask is None else [mask])
    got = apply(lambda *a: t.Attention(*a, scale=0.3, causal=causal), *arrays)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_no_key_gives_zeros():
    q = normal(1, 2, 3, 4)
    mask = np.array([[False, False, False], [True, True, True], [False, True, False]])
    got = apply(lambda q, m: t.Attention(q, q, q, m), q, mask)
    assert not got[0, :, 0].any()
    np.testing.assert_allclose(got[0, :, 2], q[0, :, 1], rtol=1e-6)


def test_attention_windows_look_back_only_so_far():
    q = np.zeros((1, 1, 2, 4), np.float32)
    v = np.eye(4, dtype=np.float32)[None, None]
    got = apply(lambda q, v: t.Attention(q, v, v, causal=True, offset=2, window=1), q, v)
    np.testing.assert_allclose(got[0, 0], [[0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]])


@pytest.mark.parametrize(
    "mode, ours", [("nearest", "nearest"), ("bilinear", "linear"), ("bicubic", "cubic")]
)
@pytest.mark.parametrize(
    "size, align, antialias",
    [*((s, a, False) for s in [(7, 11), (3, 2)] for a in (False, True)), ((3, 2), False, True)],
)
def test_resize_against_torch(mode, ours, size, align, antialias):
    torch = pytest.importorskip("torch")
    if mode == "nearest" and (align or antialias):
        pytest.skip("torch has no such mode")
    x = normal(1, 2, 5, 6, dtype=np.float64)
    options = {} if mode == "nearest" else {"align_corners": align, "antialias": antialias}
    expected = torch.nn.functional.interpolate(torch.from_numpy(x), size, mode=mode, **options)
    coords = "asymmetric" if mode == "nearest" else "align_corners" if align else "half_pixel"
    shape = (1, 2, *size)
    scales = tuple(b / a for a, b in zip(x.shape, shape, strict=True))
    got = apply(
        lambda x: t.Resize(
            *(x, shape, scales, ours, coords, "floor", -0.5 if antialias else -0.75),
            exclude_outside=antialias,
            antialias=antialias,
        ),
        x,
    )
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------- graphs


def counting(has_condition: bool, trips: int) -> t.Loop:
    """Adds the trip number to a carried value, and collects the sums; stops once above 4."""
    b = Builder(Level.graph, "body")
    i, x = b.input("i", TensorType((), i64)), b.input("x", TensorType((), i64))
    y = b(t.Map("add", (x, i)))
    going = [b(t.Map("le", (y,), (4,)))] if has_condition else []
    body = b.finish([*going, y, y])
    return t.Loop(body, trips, (Value("x0", TensorType((), i64)),), has_condition=has_condition)


def test_loops_collect_and_stop():
    def total(op: t.Loop) -> tuple[int, list[int]]:
        last, all_ = evaluate(op, {op.init[0]: np.int64(1) + np.zeros((), np.int64)})
        return int(last), all_.tolist()

    assert total(counting(False, 4)) == (7, [1, 2, 4, 7])
    assert total(counting(True, 9)) == (7, [1, 2, 4, 7])
    assert total(counting(False, 0)) == (1, [])


def small_graph():
    b = Builder(Level.graph, "g")
    b.locs = ("m:Add_1",)
    x, w = b.input("x", TensorType((2, 3), f32)), b.param("w", TensorType((3,), f32))
    return b.finish([b(t.Map("add", (x, w)), "y")])


def test_run_checks_what_it_is_given():
    g = small_graph()
    x, w = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    assert run(g, {"x": x, "w": w})["y"].tolist() == [[2] * 3] * 2
    with pytest.raises(ModelError, match="no array for %w"):
        run(g, {"x": x})
    with pytest.raises(ModelError, match="wrong type or shape"):
        run(g, {"x": x.astype(np.float64), "w": w})
    with pytest.raises(ModelError, match="has the name 'ww'"):
        run(g, {"x": x, "w": w, "ww": w})


def test_opaque_ops_have_no_meaning():
    b = Builder(Level.graph, "g")
    b.locs = ("m:Frob_1",)
    x = b.input("x", TensorType((2,), f32))
    g = b.finish([b(t.Opaque("Frob", (x,), (x.type,)))])
    with pytest.raises(NoMeaning, match="Frob") as raised:
        run(g, {"x": np.ones(2, np.float32)})
    assert raised.value.where.startswith("m:Frob_1")


def test_a_gemm_with_prologue_and_epilogue():
    b = Builder(Level.graph, "body")
    b.locs = ("m:gemm",)
    a, q = b.input("a", TensorType((2, 4), f16)), b.input("q", TensorType((4, 3), u8))
    bias, s = (b.input(name, TensorType((3,), f16)) for name in ("bias", "s"))
    unpacked = b(t.Map("mul", (b(t.Cast(q, f16)), s)))
    total = b(t.Cast(b(t.Matmul(a, unpacked, f32)), f16))
    body = b.finish([b(t.Map("add", (total, bias)))])
    x, w = normal(2, 4, dtype=np.float16), rng.integers(0, 9, (4, 3)).astype(np.uint8)
    scale, bias_ = normal(3, dtype=np.float16), normal(3, dtype=np.float16)
    got = apply(
        lambda x, w, s, b: k.Gemm((x, w, b, s), body),
        *(x, w, scale, bias_),
    )
    np.testing.assert_allclose(got, x @ (w * scale) + bias_, rtol=2e-2, atol=2e-2)


def test_lengths_may_fall_short_of_assumed_upper_bounds():
    b = Builder(Level.graph, "g")
    b.locs = ("m:NonZero_1",)
    b.assumed.append("NonZero_1: all 6 elements are assumed to be nonzero")
    x = b.input("x", TensorType((6,), f32))
    (i,) = b.add(t.Routine("nonzero", (x,), (TensorType((1, 6), i64),)))
    y = b(t.Reshape(i, (6, 1)), "y")
    z = b(t.Broadcast(y, (2, 6, 1)), "z")
    g = b.finish([y, z])
    got = run(g, {"x": np.array([0, 3, 0, 0, 1, 0], np.float32)})
    assert got["y"].tolist() == [[1], [4]] and got["z"].tolist() == [[[1], [4]]] * 2


def test_a_pseudoinverse_leaves_out_what_is_small_beside_the_largest():
    x = np.diag([10.0, 0.5])
    how = {"hermitian": False, "atol": 0.0}
    (all_kept,) = linalg.pinv({**how, "rtol": 0.04}, x)
    np.testing.assert_allclose(all_kept, np.diag([0.1, 2.0]))
    (one_kept,) = linalg.pinv({**how, "rtol": 0.06}, x)
    np.testing.assert_allclose(one_kept, np.diag([0.1, 0.0]), atol=1e-15)
