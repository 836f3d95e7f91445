"""MoE and QMoE of com.microsoft: what gpuir loads means what onnxruntime's CPU kernel computes, and
where it has none, what the definition says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto
from onnx_models import Array, agrees, expected, loaded, one_node, results

import gpuir
from gpuir.ir.errors import ModelError, UsageError
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.passes.legalize import Legalize

MS = "com.microsoft"
TOKENS, HIDDEN, INTER, EXPERTS, K = 5, 32, 48, 4, 2
SWIGLU = {
    "activation_type": "swiglu",
    "activation_alpha": 1.702,
    "activation_beta": 1.0,
    "swiglu_limit": 0.7,
}
PLAIN = [{"activation_type": kind} for kind in ("relu", "gelu", "silu", "identity")]
draw = np.random.default_rng(11)


def f(*shape: int) -> Array:
    return draw.standard_normal(shape).astype(np.float32)


def moe(attrs: dict[str, Any], third: bool = False, x: Array | None = None) -> list[Any]:
    """x, scores, fc1, its biases, fc2, its biases and, where there is a third matrix, that."""
    rows = 2 * INTER if attrs.get("swiglu_fusion") else INTER
    weights = [f(EXPERTS, rows, HIDDEN), f(EXPERTS, rows), f(EXPERTS, HIDDEN, INTER)]
    weights += [f(EXPERTS, HIDDEN), *([f(EXPERTS, INTER, HIDDEN), f(EXPERTS, INTER)] * third)]
    return [f(TOKENS, HIDDEN) if x is None else x, 2 * f(TOKENS, EXPERTS), *weights]


def case(op: str, operands: list[Any], **attrs: Any) -> tuple[ModelProto, dict[str, Array]]:
    return one_node(op, operands, {"k": K, **attrs}, domain=MS)


def known(operands: list[Any]) -> list[Any]:
    """All but x and the scores as initializers."""
    return [v if i < 2 or v is None else (v,) for i, v in enumerate(operands)]


@pytest.mark.parametrize("normalised", [0, 1])
@pytest.mark.parametrize("attrs", [*PLAIN, {**SWIGLU, "swiglu_fusion": 1}], ids=str)
def test_experts_agree(attrs: dict[str, Any], normalised: int):
    attrs = {**attrs, "normalize_routing_weights": normalised}
    m = agrees(*case("MoE", known(moe(attrs)), **attrs), rtol=1e-4, atol=1e-3)
    assert [n.op.name for n in m.graph.nodes if n.op.contraction] == ["t.experts"]


def test_three_axes_agree():
    agrees(*case("MoE", moe({}, x=f(1, TOKENS, HIDDEN))), rtol=1e-4, atol=1e-3)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def by_hand(operands: list[Any], between: Any) -> Array:
    """Shares over all experts; `between` the products what the activation does to fc1 and fc3."""
    x, scores, fc1, b1, fc2, b2, *third = operands
    share = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    y = np.zeros_like(x)
    for i, row in enumerate(x):
        for e in np.argsort(-scores[i])[:K]:
            fc3 = third[0][e] @ row + third[1][e] if third else None
            y[i] += share[i, e] * (fc2[e] @ between(fc1[e] @ row + b1[e], fc3) + b2[e])
    return y


def swiglu(g: Array, u: Array) -> Array:
    g, u = np.minimum(g, 0.7), np.clip(u, -0.7, 0.7)
    return g * sigmoid(1.702 * g) * (u + 1)


@pytest.mark.parametrize(
    ("attrs", "third", "between"),
    [
        ({"activation_type": "silu"}, True, lambda g, u: g * sigmoid(g) * u),
        ({**SWIGLU, "swiglu_fusion": 0}, True, swiglu),
        ({**SWIGLU, "swiglu_fusion": 2}, False, lambda h, _: swiglu(h[:INTER], h[INTER:])),
    ],
    ids=["gated by fc3", "swiglu by fc3", "swiglu in halves"],
)
def test_gates_that_onnxruntime_has_no_cpu_kernel_for(attrs: Any, third: bool, between: Any):
    operands = moe(attrs, third)
    made, feeds = case("MoE", operands, **attrs)
    (y,) = results(loaded(made), **feeds).values()
    np.testing.assert_allclose(y, by_hand(operands, between), rtol=1e-4, atol=1e-3)


# ---------------------------------------------------------------------------- quantised


def packed(codes: Array, bits: int) -> Array:
    """[.., n] small numbers  →  [.., ceil(n bits / 8)] bytes, low bits first."""
    per = 8 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)])
    parts = padded.reshape(*codes.shape[:-1], -1, per) << (bits * np.arange(per))
    return parts.sum(-1).astype(np.uint8)


def layer(rows: int, cells: int, bits: int, block: int, zero: bool) -> tuple[Any, ...]:
    """Weights, scales and zero points of all experts, packed."""
    blocks = [cells // block] if block else []
    codes = draw.integers(0, 2**bits, (EXPERTS, rows, cells))
    scales = (0.02 + 0.05 * draw.random((EXPERTS, rows, *blocks))).astype(np.float32)
    zeros = draw.integers(0, 2**bits, (EXPERTS, rows, *blocks))
    return packed(codes, bits), scales, packed(zeros, bits) if zero else None


def qmoe(bits: int, block: int, zero: bool) -> list[Any]:
    w1, s1, z1 = layer(2 * INTER, HIDDEN, bits, block, zero)
    w2, s2, z2 = layer(HIDDEN, INTER, bits, block, zero)
    operands = [f(TOKENS, HIDDEN), f(TOKENS, EXPERTS), w1, s1, f(EXPERTS, 2 * INTER), w2, s2]
    return [*operands, f(EXPERTS, HIDDEN), None, None, None, z1, z2]


QUANTISED = {**SWIGLU, "swiglu_fusion": 1}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [False, True], ids=["", "zero points"])
@pytest.mark.parametrize(("bits", "block"), [(4, 0), (4, 16), (8, 0), (8, 16), (2, 16)])
def test_quantised_experts_agree_and_stay_packed(bits: int, block: int, zero: bool):
    attrs = {**QUANTISED, "expert_weight_bits": bits, **({"block_size": block} if block else {})}
    operands = qmoe(bits, block, zero)
    made, feeds = case("QMoE", operands, **attrs)  # of initializers in blocks of 8 bits it takes
    (y,) = expected(made, feeds)  # products with rows rounded to 8 bits
    agrees(made, feeds, rtol=1e-4, atol=1e-4)
    m = loaded(case("QMoE", known(operands), **attrs)[0])
    (found,) = results(m, **feeds).values()
    np.testing.assert_allclose(found, y, rtol=1e-4, atol=1e-4)
    kernels = [n.op for n in gpuir.lower(m.graph, profile="ideal").nodes]
    (op,) = (op for op in kernels if isinstance(op, k.Experts))
    weights = [v.type for v in op.args if v.type.dtype.bits == bits]
    assert weights[0].size == EXPERTS * 2 * INTER * HIDDEN
    assert not [op for op in kernels if isinstance(op, k.Map) and op.result_types[0].rank > 2]


def test_shares_from_scores_of_their_own_agree():
    operands = [*qmoe(4, 16, False)[:11], None, None, None, np.abs(f(TOKENS, EXPERTS))]
    attrs = {**QUANTISED, "expert_weight_bits": 4, "block_size": 16}
    for normalised in (0, 1):
        made, feeds = case("QMoE", operands, **attrs, normalize_routing_weights=normalised)
        agrees(made, feeds, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [0, 16])
def test_f8_weights_are_the_numbers_times_their_scales(block: int):
    """The same as the experts in f32 of those numbers, which onnxruntime computes."""
    plain = moe({})
    stored = [plain[i].astype(ml_dtypes.float8_e4m3fn) for i in (2, 4)]
    if block:
        shapes = [(EXPERTS, w.shape[1] // block, w.shape[2] // block) for w in stored]
        scales = [0.5 + draw.random(shape).astype(np.float32) for shape in shapes]
        spread = [s.repeat(block, 1).repeat(block, 2) for s in scales]
    else:
        scales = [0.5 + draw.random(EXPERTS).astype(np.float32) for _ in stored]
        spread = [s[:, None, None] for s in scales]
    plain[2], plain[4] = (w.astype(np.float32) * s for w, s in zip(stored, spread, strict=True))
    attrs = {"activation_type": "silu"}
    (wanted,) = expected(*case("MoE", plain, **attrs, normalize_routing_weights=1))
    x, scores, _, b1, _, b2 = plain
    own = scales if block else [None, None]
    tail = [] if block else [*[None] * 7, *scales]
    operands = [x, scores, stored[0], own[0], b1, stored[1], own[1], b2, *tail]
    more = {"block_size": block} if block else {}
    made, feeds = case("QMoE", operands, **attrs, quant_type="fp8", **more)
    (found,) = results(loaded(made), **feeds).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # OCP Microscaling Formats 1.0, 5.3.3


@pytest.mark.parametrize(("kind", "block"), [("fp4", 32), ("nvfp4", 16)])
def test_f4_weights_are_the_numbers_times_their_scales(kind: str, block: int):
    plain = moe({})
    codes = [draw.integers(0, 16, plain[i].shape) for i in (2, 4)]
    dtype = ml_dtypes.float8_e8m0fnu if kind == "fp4" else ml_dtypes.float8_e4m3fn
    shapes = [(*c.shape[:2], -(-c.shape[2] // block)) for c in codes]
    scales = [(2.0 ** draw.integers(-2, 2, s)).astype(np.float32) for s in shapes]
    each = [0.5 + draw.random(EXPERTS).astype(np.float32) for _ in codes]
    for i, c, s, g in zip((2, 4), codes, scales, each, strict=True):
        values = np.where(c < 8, 1, -1) * E2M1[c % 8]
        plain[i] = (values * s.repeat(c.shape[2] // s.shape[2], 2) * g[:, None, None]).astype("f")
    (wanted,) = expected(*case("MoE", plain, normalize_routing_weights=1))
    x, scores, _, b1, _, b2 = plain
    (w1, w2), (s1, s2) = (packed(c, 4) for c in codes), (s.astype(dtype) for s in scales)
    operands = [x, scores, w1, s1, b1, w2, s2, b2, *[None] * 7, *each]
    made, feeds = case("QMoE", known(operands), quant_type=kind)
    m = loaded(made)
    (found,) = results(m, **feeds).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    assert sum(v.type.dtype.name == "f4e2m1" for v in m.graph.params) == 2


# ---------------------------------------------------------------------------- how it is said


def test_the_expectation_of_routing_is_stated_and_adjustable():
    made, _ = case("MoE", known(moe({})))
    even, skewed = loaded(made).graph, loaded(made, expert_skew=1.2).graph
    assert even.assumed == ("rows spread over 4 experts evenly (--expert-skew)",)
    assert "power law of exponent 1.2" in skewed.assumed[0]
    (mix,) = (n.op for n in skewed.nodes if isinstance(n.op, t.Experts))
    assert mix.skew == 1.2


def test_the_expectation_is_given_where_a_model_is_loaded(tmp_path: Path):
    file, text = tmp_path / "moe.onnx", tmp_path / "moe.gir"
    made, _ = case("MoE", known(moe({})))
    file.write_bytes(made.SerializeToString())
    g = gpuir.load(str(file), expert_skew=1.2)
    text.write_text(gpuir.show(g))
    assert "skew=1.2" in text.read_text() and gpuir.load(str(text)) == g
    with pytest.raises(UsageError, match="expert_skew cannot be given for IR text"):
        gpuir.load(str(text), expert_skew=1.2)


def test_a_weight_that_a_view_transposes_moves_nothing():
    """The matrices of a model that has them as [experts, hidden, inter]."""
    g = gpuir.load_text(
        """fused @g {
  in %x: f16[4, 8]
  in %which: i64[4, 2]
  in %shares: f16[4, 2]
  param %w: f16[3, 8, 16]
  param %down: f16[3, 8, 16]
  %up: f16[3, 16, 8] = t.fused([%w], {
    in %w: f16[3, 8, 16]
    %up: f16[3, 16, 8] = t.transpose(%w, [0, 2, 1]) at "m:t"
    out %up
  }) at "m:t"
  %y: f16[4, 8] = t.fused([%x, %which, %shares, %up, %down], {
    in %x: f16[4, 8]
    in %which: i64[4, 2]
    in %shares: f16[4, 2]
    in %up: f16[3, 16, 8]
    in %down: f16[3, 8, 16]
    %y: f16[4, 8] = t.experts(%x, %which, %shares, %up, %down) at "m:e"
    out %y
  }) at "m:e"
  out %y
}"""
    )
    assert [n.op.name for n in Legalize().run(g).nodes] == ["k.view", "k.experts"]


REFUSED = [
    (case("MoE", moe({}), activation_type="silly"), "silu"),
    (case("MoE", moe({}), activation_type="swiglu"), "needs the weights fc3"),
    (case("MoE", moe({}), use_sparse_mixer=1), "use_sparse_mixer"),
    (case("QMoE", qmoe(4, 0, False)[:5]), "input 5 is missing"),
    (case("QMoE", qmoe(4, 0, False), quant_type="wfp4afp8"), "int, fp8, fp4, nvfp4"),
    (case("MoE", [*moe({})[:4], f(EXPERTS, HIDDEN, INTER + 1)]), "operands do not match"),
]


@pytest.mark.parametrize(("made", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_refuses_what_it_cannot_say(made: tuple[ModelProto, Any], says: str):
    with pytest.raises(ModelError, match=says) as error:
        loaded(made[0])
    assert "MoE" in error.value.where
