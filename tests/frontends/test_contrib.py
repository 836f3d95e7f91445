"""com.microsoft operators: what gpuir loads means what onnxruntime's CPU kernel computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import helper, numpy_helper  # noqa: E402

from gpuir.frontends.model import Model  # noqa: E402
from gpuir.frontends.onnx.definition import RANKS  # noqa: E402
from gpuir.frontends.onnx.load import load  # noqa: E402
from gpuir.interp import run  # noqa: E402
from gpuir.ir.errors import ModelError  # noqa: E402
from gpuir.ir.verify import verify  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402

MS = "com.microsoft"
OPSET = 21


@dataclass
class Case:
    """One node. `known` operands are initializers; None is an absent one."""

    op: str
    operands: list[Any]
    attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    known: tuple[int, ...] = ()
    outputs: int = 1
    absent: tuple[int, ...] = ()  # results that nobody reads
    domain: str = MS
    tolerance: float = 1e-5
    steps: int = 0  # by how many units an 8-bit result may be off, having been rounded twice
    label: str = ""
    floats: bool = False  # results are declared: onnxruntime does not infer their type

    def __str__(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op


def model_of(case: Case) -> Any:
    names = ["" if v is None else f"x{i}" for i, v in enumerate(case.operands)]
    results = ["" if i in case.absent else f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, results, name="node", domain=case.domain, **case.attrs)
    inputs, weights = [], []
    for i, v in enumerate(case.operands):
        if v is None:
            continue
        if i in case.known:
            weights.append(numpy_helper.from_array(v, names[i]))
        else:
            dtype = helper.np_dtype_to_tensor_dtype(v.dtype)
            inputs.append(helper.make_tensor_value_info(names[i], dtype, v.shape))
    declare = helper.make_empty_tensor_value_info
    if case.floats:
        declare = partial(helper.make_tensor_value_info, elem_type=1, shape=None)
    outputs = [declare(name) for name in results if name]
    graph = helper.make_graph([node], "case", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def expected_of(case: Case, model: Any) -> list[np.ndarray]:
    """What onnxruntime gives; skips where it has no kernel for this."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        if "NOT_IMPLEMENTED" in str(error) or "NotImplemented" in type(error).__name__:
            pytest.skip(f"onnxruntime has no CPU kernel: {error}"[:200])
        raise
    feeds = {
        f"x{i}": v for i, v in enumerate(case.operands) if v is not None and i not in case.known
    }
    try:
        return session.run(None, feeds)
    except Exception as error:
        if "not implemented" in str(error).lower():
            pytest.skip(f"onnxruntime has no CPU kernel: {error}"[:200])
        raise


def results_of(case: Case, model: Any) -> tuple[Model, list[np.ndarray]]:
    loaded = load(model)
    verify(loaded.graph, "onnx")
    feeds = {v.name: case.operands[int(v.name[1:])] for v in loaded.graph.inputs}
    results = run(loaded.graph, {**loaded.weights, **feeds})
    return loaded, [results[v.name] for v in loaded.graph.outputs]


# ---------------------------------------------------------------------------- data

rng = np.random.default_rng(7)


def f(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape) * scale, np.float32)


def ints(
    *shape: int, dtype: Any = np.uint8, low: int | None = None, high: int | None = None
) -> Any:
    info = np.iinfo(dtype)
    low, high = info.min if low is None else low, info.max + 1 if high is None else high
    return rng.integers(low, high, shape).astype(dtype)


def seven_bits(*shape: int) -> np.ndarray:
    """Bytes of 7 bits: products of u8 by s8 add up in 16 bits, and saturate, in onnxruntime on CPUs
    without VNNI (its docs, "Quantize ONNX models", on `reduce_range`)."""
    return ints(*shape, dtype=np.int8, low=-64, high=64)


def one(x: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(x, dtype)


def u8(x: int) -> np.ndarray:
    return np.array(x, np.uint8)


def i8(x: int) -> np.ndarray:
    return np.array(x, np.int8)


def i32(*x: int) -> np.ndarray:
    return np.array(x, np.int32)


def packed(n: int, k: int, block: int, bits: int) -> np.ndarray:
    return ints(n, -(-k // block), block * bits // 8)


B, S, H, D = 2, 5, 4, 16  # batch, sequence, heads, head
W = H * D
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], np.int32)
COS, SIN = np.cos(np.arange(24)[:, None] * 0.7 ** np.arange(D // 2)), None
SIN = np.sin(np.arange(24)[:, None] * 0.7 ** np.arange(D // 2)).astype(np.float32)
COS = COS.astype(np.float32)

ACTIVATIONS = [
    Case("Gelu", [f(3, 8)]),
    Case("BiasGelu", [f(2, 3, 8), f(8)]),
    Case("FastGelu", [f(2, 3, 8)], label="plain"),
    Case("FastGelu", [f(2, 3, 8), f(8)], label="bias"),
    Case("QuickGelu", [f(3, 8)], {"alpha": 1.702}),
    Case("QuickGelu", [f(3, 8)], {"alpha": 1.0}, label="silu"),
]
NORMS = [
    Case("SkipLayerNormalization", [f(B, S, W), f(B, S, W), f(W), f(W), f(W)], outputs=1),
    Case(
        "SkipLayerNormalization",
        [f(B, S, W), f(S, W), f(W)],
        outputs=4,
        absent=(1, 2),
        label="sum",
    ),
    Case("SkipSimplifiedLayerNormalization", [f(B, S, W), f(B, S, W), f(W)], {"epsilon": 1e-6}),
    Case(
        "SkipSimplifiedLayerNormalization",
        [f(B, S, W), f(1, S, W), f(W), f(W)],
        outputs=4,
        absent=(1, 2),
        label="sum",
    ),
    Case(
        "SimplifiedLayerNormalization", [f(B, S, W), f(W)], {"axis": -1, "epsilon": 1e-6}, domain=""
    ),
    Case(
        "EmbedLayerNormalization",
        [
            *(
                ints(B, S, dtype=np.int32, low=0, high=11),
                ints(B, S, dtype=np.int32, low=0, high=2),
            ),
            *(f(11, W), f(9, W), f(2, W), f(W), f(W), MASK),
        ],
        {"epsilon": 1e-12},
        outputs=3,
    ),
    Case(
        "EmbedLayerNormalization",
        [
            *(
                ints(B, S, dtype=np.int32, low=0, high=11),
                None,
                f(11, W),
                f(9, W),
                None,
                f(W),
                f(W),
            ),
            *(None, ints(B, S, dtype=np.int32, low=0, high=9)),
        ],
        outputs=2,
        label="positions",
    ),
]
PRODUCTS = [
    Case("FusedMatMul", [f(2, 3, 4), f(2, 4, 5)], {"alpha": 0.5}),
    Case("FusedMatMul", [f(2, 4, 3), f(2, 5, 4)], {"transA": 1, "transB": 1}, label="both"),
    Case("FusedMatMul", [f(3, 2, 4), f(2, 4, 5)], {"transBatchA": 1}, label="batch"),
    Case(
        "FusedMatMul",
        [f(4, 2, 3), f(5, 2, 4)],
        {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1},
        label="batch-both",
    ),
    Case("FusedMatMul", [f(2, 2, 3, 4), f(4, 5)], label="matrix"),
    Case("TransposeMatMul", [f(2, 4, 3), f(2, 4, 5)], {"transA": 1}),
    Case("FusedGemm", [f(3, 4), f(4, 5), f(5)], {"activation": "Relu", "alpha": 0.5}),
    Case(
        "FusedGemm",
        [f(3, 4), f(5, 4), f(5)],
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1},
        label="leaky",
    ),
    Case("FusedConv", [f(1, 3, 8, 8), f(4, 3, 3, 3), f(4)], {"activation": "Relu"}, known=(1, 2)),
    Case(
        "FusedConv",
        [f(1, 4, 8, 8), f(4, 4, 3, 3), f(4), f(1, 4, 8, 8)],
        {"activation": "Relu", "pads": [1, 1, 1, 1]},
        known=(1, 2),
        label="sum",
    ),
    Case(
        "FusedConv",
        [f(1, 3, 8, 8), f(4, 3, 3, 3), f(4)],
        {"activation": "Clip", "activation_params": [0.0, 6.0], "strides": [2, 2]},
        known=(1, 2),
        label="clip",
    ),
    Case("NhwcMaxPool", [ints(1, 6, 6, 3)], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case(
        "ConvTransposeWithDynamicPads",
        [f(1, 3, 4, 4), f(3, 2, 3, 3), np.array([1, 1, 1, 1], np.int64)],
        {"strides": [2, 2]},
        known=(2,),
    ),
    Case("CDist", [f(5, 4), f(3, 4)], {"metric": "sqeuclidean"}, tolerance=1e-4),
    Case("CDist", [f(5, 4), f(3, 4)], {"metric": "euclidean"}, label="root", tolerance=1e-4),
    Case("Inverse", [f(2, 4, 4) + 3 * np.eye(4, dtype=np.float32)]),
]
LAYOUT = [
    Case("Trilu", [f(4, 5), np.array(1, np.int64)], {"upper": 1}, known=(1,)),
    Case("Pad", [f(2, 3), np.array([0, 1, 0, 2], np.int64), f()], known=(1,)),
    Case("Range", [one(1), one(7), one(2)], known=(0, 1, 2)),
    Case("Unique", [np.array([2, 1, 1, 3, 4, 3], np.float32)], outputs=3, known=(0,)),
    Case("GatherND", [f(3, 4, 5), ints(2, 2, dtype=np.int64, low=0, high=3)]),
    Case("ExpandDims", [f(3, 4), np.array(-1, np.int32)], known=(1,)),
    Case("UnfoldTensor", [f(2, 9)], {"dim": -1, "size": 3, "step": 2}),
    Case(
        "CropAndResize",
        [
            f(2, 3, 6, 7),
            np.array([[0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1]], np.float32),
            i32(1, 0),
            i32(3, 4),
        ],
        {"mode": "bilinear"},
        known=(3,),
    ),
    Case(
        "CropAndResize",
        [
            f(2, 3, 6, 7),
            np.array([[0.1, 0.2, 1.3, 0.9], [1, 0, 0, 1]], np.float32),
            i32(1, 0),
            i32(3, 4),
        ],
        {"mode": "nearest", "extrapolation_value": 5.0},
        known=(3,),
        label="nearest",
    ),
    Case("GridSample", [f(1, 2, 4, 5), f(1, 3, 3, 2, scale=0.5)], {"align_corners": 1}),
]

QKV = [f(B, S, W), f(B, S, W), f(B, S, W)]
PAST = [f(B, H, 3, D), f(B, H, 3, D)]
ROOM = [np.pad(x, ((0, 0), (0, 0), (0, 5), (0, 0))) for x in PAST]  # a buffer with room for more
ATTENTION = [
    Case(
        "Attention",
        [f(B, S, 12), f(12, 3 * W, scale=0.3), f(3 * W)],
        {"num_heads": H},
        known=(1, 2),
    ),
    Case(
        "Attention",
        [f(B, S, 12), f(12, 3 * W, scale=0.3), f(3 * W), MASK],
        {"num_heads": H},
        known=(1, 2),
        label="mask",
    ),
    Case(
        "Attention",
        [f(B, S, 12), f(12, 3 * W, scale=0.3), f(3 * W), i32(4, 3)],
        {"num_heads": H},
        known=(1, 2),
        label="lengths",
    ),
    Case(
        "Attention",
        [f(B, S, 12), f(12, 3 * W, scale=0.3), f(3 * W), i32(4, 5, 0, 1)],
        {"num_heads": H},
        known=(1, 2),
        label="ends-starts",
    ),
    Case(
        "Attention",
        [f(B, S, 12), f(12, 3 * W, scale=0.3), f(3 * W), None, f(2, B, H, 3, D)],
        {"num_heads": H, "unidirectional": 1},
        known=(1, 2),
        outputs=2,
        label="past",
    ),
    Case(
        "Attention",
        [f(B, S, 12), f(12, 3 * W, scale=0.3), f(3 * W), MASK, None, f(B, H, S, S)],
        {"num_heads": H},
        known=(1, 2),
        label="added",
    ),
    Case(
        "Attention",
        [f(B, S, 12), f(12, 2 * W + 24, scale=0.3), f(2 * W + 24)],
        {"num_heads": H, "qkv_hidden_sizes": [W, W, 24]},
        known=(1, 2),
        label="sizes",
    ),
    Case("MultiHeadAttention", QKV, {"num_heads": H}),
    Case("MultiHeadAttention", [*QKV, f(3 * W)], {"num_heads": H}, known=(3,), label="bias"),
    Case("MultiHeadAttention", [*QKV, None, MASK], {"num_heads": H}, label="mask"),
    Case("MultiHeadAttention", [*QKV, None, i32(4, 3)], {"num_heads": H}, label="lengths"),
    Case(
        "MultiHeadAttention",
        [*QKV, None, None, f(1, H, S, S)],
        {"num_heads": H, "unidirectional": 1, "scale": 0.25},
        label="added",
    ),
    Case(
        "MultiHeadAttention",
        [*QKV, None, None, None, *PAST],
        {"num_heads": H},
        outputs=3,
        label="past",
    ),
    Case(
        "MultiHeadAttention",
        [f(B, S, W), f(B, H, 7, D), f(B, H, 7, D)],
        {"num_heads": H},
        label="cross",
    ),
    Case("MultiHeadAttention", [f(B, S, H, 3, D)], {"num_heads": H}, label="packed"),
    Case("MultiHeadAttention", [f(B, S, W), f(B, 7, H, 2, D)], {"num_heads": H}, label="packed-kv"),
    Case(
        "MultiHeadAttention",
        [*QKV],
        {"num_heads": H},
        outputs=4,
        absent=(1, 2),
        floats=True,
        label="scores",
    ),
    Case(
        "DecoderMaskedMultiHeadAttention",
        [f(B, 1, W), f(B, 1, W), f(B, 1, W), None, None, *ROOM, i32(3)],
        {"num_heads": H, "past_present_share_buffer": 1},
        known=(7,),
        outputs=3,
    ),
    Case(
        "GroupQueryAttention",
        [f(B, S, W), f(B, S, 2 * D), f(B, S, 2 * D), None, None, i32(S - 1, S - 1), i32(S)],
        {"num_heads": H, "kv_num_heads": 2},
        known=(6,),
        outputs=3,
        label="prompt",
    ),
    Case(
        "GroupQueryAttention",
        [
            *(f(B, 1, W), f(B, 1, 2 * D), f(B, 1, 2 * D), f(B, 2, 6, D), f(B, 2, 6, D)),
            *(i32(6, 6), i32(7), COS, SIN),
        ],
        {"num_heads": H, "kv_num_heads": 2, "do_rotary": 1},
        known=(6, 7, 8),
        outputs=3,
        label="decode-rotary",
    ),
    Case(
        "GroupQueryAttention",
        [
            *(f(B, 1, W), f(B, 1, 2 * D), f(B, 1, 2 * D), ROOM[0][:, :2], ROOM[1][:, :2]),
            *(i32(3, 3), i32(4), COS, SIN),
        ],
        {"num_heads": H, "kv_num_heads": 2, "do_rotary": 1, "rotary_interleaved": 1},
        known=(6, 7, 8),
        outputs=3,
        label="shared-buffer",
    ),
    Case(
        "GroupQueryAttention",
        [f(B, S, W + 4 * D), None, None, None, None, i32(S - 1, S - 1), i32(S)],
        {"num_heads": H, "kv_num_heads": 2, "local_window_size": 2, "softcap": 3.0},
        known=(6,),
        outputs=3,
        label="packed-window",
    ),
    Case(
        "GroupQueryAttention",
        [
            *(f(B, S, W), f(B, S, 2 * D), f(B, S, 2 * D), None, None),
            *(i32(S - 1, S - 1), i32(S), None, None, None, f(1, 1, S, S), f(H)),
        ],
        {"num_heads": H, "kv_num_heads": 2},
        known=(6,),
        outputs=3,
        label="sink",
    ),
    Case(
        "GroupQueryAttention",
        [f(B, S, W), f(B, S, 2 * D), f(B, S, 2 * D), None, None, i32(S - 1, S - 1), i32(S)],
        {"num_heads": H, "kv_num_heads": 2, "smooth_softmax": 1},
        known=(6,),
        outputs=3,
        label="smooth",
    ),
    Case(
        "GroupQueryAttention",
        [
            *(f(1, 1, W), f(1, 1, 2 * D), f(1, 1, 2 * D), f(1, 2, 6, D), f(1, 2, 6, D)),
            *(i32(6), i32(7)),
        ],
        {"num_heads": H, "kv_num_heads": 2, "local_window_size": 3},
        known=(6,),
        outputs=3,
        label="decode-window",
    ),
    Case(
        "RotaryEmbedding",
        [f(B, S, W), ints(B, S, dtype=np.int64, low=0, high=20), COS, SIN],
        known=(2, 3),
    ),
    Case(
        "RotaryEmbedding",
        [f(B, H, S, D), np.array([3], np.int64), COS, SIN],
        {"interleaved": 1},
        known=(2, 3),
        label="interleaved",
    ),
    Case("RotaryEmbedding", [f(B, H, S, D), one(3, np.int64), COS, SIN], label="no-axis"),
    Case(
        "RotaryEmbedding",
        [
            f(B, S, W),
            ints(B, S, dtype=np.int64, low=0, high=20),
            COS[:, :2].copy(),
            SIN[:, :2].copy(),
        ],
        {"num_heads": H, "rotary_embedding_dim": 4},
        known=(2, 3),
        label="partial",
    ),
    *(
        Case(
            "MRotaryEmbedding",
            [f(B, S, W), ints(3, B, S, dtype=np.int64, low=0, high=20), COS, SIN],
            {"mrope_section": [4, 2, 2], "num_heads": H, "mrope_layout": layout},
            known=(2, 3),
            label=str(layout),
        )
        for layout in (0, 1)
    ),
    Case(
        "QAttention",
        [
            *(ints(B, S, 12), seven_bits(12, 3 * W), f(3 * W), one(0.02), one(0.01)),
            *(i32(4, 3), u8(120), i8(0)),
        ],
        {"num_heads": H},
        known=(1, 2, 4, 7),
    ),
    *(
        Case(
            "LinearAttention",
            [
                *(f(B, S, W), f(B, S, 2 * D, scale=0.3), f(B, S, 2 * 6), f(B, 2, D, 6)),
                -np.abs(f(B, S, 2)) if "gated" in rule else None,
                np.abs(f(B, S, 2, scale=0.3)) if "delta" in rule else None,
            ],
            {"q_num_heads": H, "kv_num_heads": 2, "update_rule": rule},
            outputs=2,
            label=rule,
        )
        for rule in ("linear", "gated", "delta", "gated_delta")
    ),
    Case(
        "CausalConvWithState",
        [f(B, 6, S), f(6, 1, 4), f(6), f(B, 6, 3)],
        {"activation": "silu"},
        known=(1, 2),
        outputs=2,
    ),
    Case("CausalConvWithState", [f(B, 6, S), f(6, 1, 4)], known=(1,), outputs=2, label="no-state"),
]

QLINEAR = [one(0.03), u8(120)]
QUANTIZED = [
    Case("QuantizeLinear", [f(3, 4), one(0.1), u8(128)]),
    Case("QuantizeLinear", [f(3, 4), np.abs(f(4)) + 0.1, ints(4)], {"axis": 1}, label="axis"),
    Case("DequantizeLinear", [ints(3, 4), one(0.1), u8(128)]),
    Case("MatMulInteger16", [ints(3, 4, dtype=np.int16), ints(4, 5, dtype=np.int16)]),
    Case("DynamicQuantizeMatMul", [f(2, 3, 8), ints(8, 5), one(0.02), u8(113)], known=(1, 2, 3)),
    Case(
        "DynamicQuantizeMatMul",
        [f(3, 8), seven_bits(8, 5), np.abs(f(5)), i8(0), f(5)],
        known=(1, 2, 3, 4),
        label="bias",
    ),
    Case(
        "MatMulIntegerToFloat",
        [ints(2, 3, 8), seven_bits(8, 5), one(0.1), one(0.02), u8(130), i8(3), f(5)],
        known=(1, 3, 5, 6),
    ),
    Case(
        "MatMulIntegerToFloat",
        [ints(3, 8), ints(8, 5), one(0.1), np.abs(f(5)), u8(130), ints(5)],
        known=(1, 3, 5),
        label="columns",
    ),
    *(
        Case(
            op,
            [ints(2, 3, 4), one(0.02), u8(120), ints(3, 1), one(0.03), u8(100), one(0.05), u8(128)],
            steps=1,
        )
        for op in ("QLinearAdd", "QLinearMul")
    ),
    Case(
        "QLinearSigmoid",
        [ints(3, 4), one(0.05), u8(128), one(1 / 256), u8(0)],
        known=(1, 2, 3, 4),
        steps=1,
    ),
    Case(
        "QLinearLeakyRelu",
        [ints(3, 4), one(0.05), u8(128), one(0.06), u8(100)],
        {"alpha": 0.1},
        known=(1, 2, 3, 4),
        steps=1,
    ),
    Case(
        "QLinearSoftmax",
        [ints(3, 8), one(0.05), u8(128), one(1 / 256), u8(0)],
        {"axis": -1, "opset": 13},
        known=(1, 2, 3, 4),
        steps=1,
    ),
    Case(
        "QLinearGlobalAveragePool",
        [ints(1, 3, 4, 5), one(0.05), u8(128), one(0.06), u8(100)],
        known=(1, 2, 3, 4),
        steps=1,
    ),
    Case(
        "QLinearGlobalAveragePool",
        [ints(1, 4, 5, 3), one(0.05), u8(128), one(0.06), u8(100)],
        {"channels_last": 1},
        known=(1, 2, 3, 4),
        steps=1,
        label="last",
    ),
    Case(
        "QLinearAveragePool",
        [ints(1, 3, 7, 7), one(0.05), u8(128), one(0.06), u8(100)],
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        known=(1, 2, 3, 4),
        steps=1,
    ),
    Case(
        "QLinearConcat",
        [one(0.05), u8(100), ints(2, 3), one(0.05), u8(100), ints(2, 4), one(0.02), u8(30)],
        {"axis": 1},
        known=(0, 1, 3, 4, 6, 7),
        steps=1,
    ),
    Case(
        "QLinearWhere",
        [
            *(ints(3, 4) > 128, ints(3, 4), one(0.05), u8(100), ints(3, 1), one(0.04), u8(90)),
            *(one(0.06), u8(110)),
        ],
        known=(2, 3, 5, 6, 7, 8),
        steps=1,
    ),
    *(
        Case(
            "QLinearConv",
            [
                *(
                    ints(1, 6, 6, 4),
                    one(0.05),
                    u8(100),
                    seven_bits(5, 4, 3, 3),
                    np.abs(f(5)),
                ),
                *(
                    np.zeros(5, np.int8),
                    one(2.0),
                    u8(128),
                    ints(5, dtype=np.int32, low=-99, high=99),
                ),
            ],
            {"channels_last": 1, "pads": pads},
            known=(1, 2, 3, 4, 5, 6, 7, 8),
            steps=1,
            label=f"last-{pads[0]}",
        )
        for pads in ([0, 0, 0, 0], [1, 1, 1, 1])
    ),
    Case(
        "QGemm",
        [
            *(ints(3, 8), one(0.05), u8(120), seven_bits(5, 8), one(0.02), i8(0)),
            *(ints(5, dtype=np.int32, low=-99, high=99), one(0.5), u8(100)),
        ],
        {"transB": 1, "alpha": 0.5},
        known=(3, 4, 5, 6),
        steps=1,
    ),
    Case(
        "QGemm",
        [ints(3, 8), one(0.05), u8(120), ints(8, 5), np.abs(f(5)), ints(5)],
        known=(3, 4, 5),
        label="float",
        tolerance=1e-4,
    ),
    *(
        Case(
            "MatMulNBits",
            [f(2, 3, k), packed(5, k, 32, bits), np.abs(f(5, -(-k // 32)))],
            {"bits": bits, "block_size": 32, "N": 5, "K": k},
            known=(1, 2),
            tolerance=1e-3,
            label=f"{bits}-{k}",
        )
        for bits, k in ((4, 64), (8, 64), (2, 64), (4, 80))
    ),
    Case(
        "MatMulNBits",
        [f(3, 96), packed(5, 96, 32, 4), np.abs(f(5, 3)), ints(5, 2)],
        {"bits": 4, "block_size": 32, "N": 5, "K": 96},
        known=(1, 2, 3),
        tolerance=1e-3,
        label="zero-points",
    ),
    Case(
        "MatMulNBits",
        [f(3, 96), packed(5, 96, 32, 4), np.abs(f(5, 3)), None, None, f(5)],
        {"bits": 4, "block_size": 32, "N": 5, "K": 96},
        tolerance=1e-3,
        label="run-time-bias",
    ),
    *(
        Case(
            "MatMulBnb4",
            [f(3, 64), ints(5 * 32), np.abs(f(20))],
            {"N": 5, "K": 64, "block_size": 16, "quant_type": kind},
            known=(1, 2),
            tolerance=1e-3,
            label=("fp4", "nf4")[kind],
        )
        for kind in (0, 1)
    ),
    Case(
        "GatherBlockQuantized",
        [ints(7, 32), ints(2, 3, dtype=np.int64, low=0, high=7), np.abs(f(7, 4))],
        {"block_size": 16, "bits": 4, "quantize_axis": 1},
        known=(0, 2),
    ),
    Case(
        "GatherBlockQuantized",
        [ints(7, 32), ints(2, 3, dtype=np.int64, low=0, high=7), np.abs(f(7, 4)), ints(7, 2)],
        {"block_size": 16, "bits": 4, "quantize_axis": 1},
        known=(0, 2, 3),
        label="zero-points",
    ),
    Case(
        "QEmbedLayerNormalization",
        [
            *(ints(B, S, dtype=np.int32, low=0, high=9), ints(B, S, dtype=np.int32, low=0, high=2)),
            *(ints(9, W), ints(9, W), ints(2, W), ints(W), ints(W), None),
            *(one(0.1), one(0.1), one(0.1), one(0.02), one(0.02)),
            *(u8(120), u8(110), u8(100), u8(90), u8(80)),
        ],
        known=tuple(range(2, 18)),
        outputs=2,
        tolerance=1e-4,
    ),
    *(
        Case(
            "DynamicQuantizeLSTM",
            [
                *(f(4, 2, 6), seven_bits(d, 6, 20), seven_bits(d, 5, 20)),
                *(f(d, 40), None, None, None, None),
                *(np.full(d, 0.01, np.float32), np.zeros(d, np.int8)),
                *(np.full(d, 0.01, np.float32), np.zeros(d, np.int8)),
            ],
            {"hidden_size": 5, "direction": "bidirectional" if d == 2 else "forward"},
            known=(1, 2, 3, 8, 9, 10, 11),
            outputs=3,
            tolerance=2e-2,
            label=str(d),
        )
        for d in (1, 2)
    ),
]
CASES = [*ACTIVATIONS, *NORMS, *PRODUCTS, *LAYOUT, *ATTENTION, *QUANTIZED]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_means_what_onnxruntime_computes(case: Case) -> None:
    model = model_of(case)
    expected = expected_of(case, model)
    _, found = results_of(case, model)
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if case.steps and want.dtype.kind in "iu":
            assert np.abs(got.astype(int) - want.astype(int)).max() <= case.steps
        else:
            close = case.tolerance
            np.testing.assert_allclose(got, want, rtol=close, atol=close * np.abs(want).max())


def of_other_ranks(case: Case) -> Iterator[Case]:
    """The same node with an axis more, or one less, to one operand."""
    for i, v in enumerate(case.operands):
        if v is None:
            continue
        for other in (v[None], v[..., None], *((v[0], v[..., 0]) if v.ndim and v.size else ())):
            operands = [*case.operands[:i], np.ascontiguousarray(other), *case.operands[i + 1 :]]
            yield replace(case, operands=operands)


def is_refused_by_onnxruntime(case: Case, model: Any) -> bool:
    try:
        expected_of(case, model)
    except Exception:  # it raises many kinds
        return True
    return False


RANKED = [c for c in CASES if f"{c.domain}::{c.op}".removeprefix("::") in RANKS]


@pytest.mark.parametrize("case", RANKED, ids=str)
def test_no_rank_that_onnxruntime_takes_is_refused(case: Case) -> None:
    for other in of_other_ranks(case):
        model = model_of(other)
        try:
            load(model)
        except ModelError as error:
            if "wrong number of axes" not in str(error):
                continue
            assert is_refused_by_onnxruntime(other, model), error


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case("CausalConvWithState", [f(1, 4, 6, 6), f(4, 1, 3, 3)], {"ndim": 2}), "ndim = 1"),
        (
            Case(
                "LinearAttention",
                [f(1, 3, 8), f(1, 3, 8), f(1, 3, 8), f(2, 1, 2, 4, 4)],
                {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear", "state_window": 2},
            ),
            "state_window is not supported",
        ),
    ],
    ids=["two-dimensions", "window"],
)
def test_what_is_not_modelled_is_not_called_a_wrong_rank(case: Case, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load(model_of(case))


# ---------------------------------------------------------------------------- without a kernel


def erf(x: np.ndarray) -> np.ndarray:
    from math import erf as one_erf

    return np.vectorize(one_erf)(x.astype(np.float64))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def group_normed(x: np.ndarray, groups: int, eps: float = 1e-5) -> np.ndarray:
    """x [n, h, w, c], channels last, before scale and bias."""
    n, h, w, c = x.shape
    parts = x.reshape(n, h * w, groups, c // groups)
    mean = parts.mean((1, 3), keepdims=True)
    var = parts.var((1, 3), keepdims=True)
    return ((parts - mean) / np.sqrt(var + eps)).reshape(x.shape)


def t5_bucket(distance: int, buckets: int, most: int) -> int:
    """Key minus query position, both directions, as in the T5 paper's code."""
    buckets //= 2
    start = buckets if distance > 0 else 0
    distance, exact = abs(distance), buckets // 2
    if distance < exact:
        return start + distance
    far = exact + int(np.log(distance / exact) / np.log(most / exact) * (buckets - exact))
    return start + min(far, buckets - 1)


X, Z, BIAS = f(2, 3, 8), f(2, 3, 8), f(8)
IMAGE, SKIP, GAMMA, BETA = f(2, 4, 5, 6), f(2, 4, 5, 6), f(6), f(6)
PACKED = f(B, S, H, 3, D)
SIGNAL = f(3, 8)
SPECTRUM = np.stack([np.fft.rfft(SIGNAL).real, np.fft.rfft(SIGNAL).imag], -1)
TABLE = f(8, 3)
P, Q = f(4, 2), f(4, 2)
A8, B8 = ints(3, 4, dtype=np.int8), ints(3, 4, dtype=np.int8)
KERNEL = f(4, 6, 1, 1)


def heads_first(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 1, 3)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    y = softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])) @ v
    return heads_first(y).reshape(q.shape[0], q.shape[2], -1)


BY_HAND = [
    (Case("BiasAdd", [X, BIAS, Z]), X + BIAS + Z),
    (Case("BiasSplitGelu", [X, BIAS]), (X + BIAS)[..., :4] * gelu((X + BIAS)[..., 4:])),
    (Case("BiasDropout", [X, BIAS, Z]), X + BIAS + Z),
    (Case("BitmaskDropout", [X]), X),
    (Case("BiasSoftmax", [X, Z], {"axis": 2, "is_inner_broadcast": 0}), softmax(X + Z)),
    (Case("GemmFastGelu", [X, f(8, 8) * 0, BIAS]), gelu_tanh(np.broadcast_to(BIAS, X.shape))),
    (Case("TorchEmbedding", [TABLE, np.array([[1, 2]])]), TABLE[[[1, 2]]]),
    (Case("IsAllFinite", [X, np.array([np.inf], np.float32)]), np.array(False)),
    (Case("IsAllFinite", [X, Z], label="yes"), np.array(True)),
    (Case("GroupNorm", [IMAGE, GAMMA, BETA], {"groups": 2, "activation": 0}),
     group_normed(IMAGE, 2) * GAMMA + BETA),
    (Case("GroupNorm", [heads_first(IMAGE), f(5) * 0 + 1, f(5) * 0],
          {"groups": 5, "activation": 1, "channels_last": 0}, label="first-silu"),
     None),
    (Case("SkipGroupNorm", [IMAGE, GAMMA, BETA, SKIP, BIAS[:6]], {"groups": 3, "activation": 0}),
     group_normed(IMAGE + SKIP + BIAS[:6], 3) * GAMMA + BETA),
    (Case("NhwcConv", [IMAGE, KERNEL, BIAS[:4]], known=(1, 2)),
     IMAGE @ KERNEL[:, :, 0, 0].T + BIAS[:4]),
    (Case("NhwcFusedConv", [IMAGE, KERNEL, None, f(2, 4, 5, 4) * 0 - 0.5], {"activation": "Relu"}),
     np.maximum(IMAGE @ KERNEL[:, :, 0, 0].T - 0.5, 0)),
    (Case("FusedMatMulActivation", [X, f(8, 4) * 0 + 1], {"activation": "Relu", "alpha": 2.0}),
     np.maximum(2 * X.sum(-1, keepdims=True) + np.zeros(4), 0)),
    (Case("ComplexMul", [P, Q]),
     np.stack([P[:, 0] * Q[:, 0] - P[:, 1] * Q[:, 1], P[:, 0] * Q[:, 1] + P[:, 1] * Q[:, 0]], 1)),
    (Case("ComplexMulConj", [P, Q]),
     np.stack([P[:, 0] * Q[:, 0] + P[:, 1] * Q[:, 1], P[:, 1] * Q[:, 0] - P[:, 0] * Q[:, 1]], 1)),
    (Case("Rfft", [SIGNAL], {"signal_ndim": 1}), SPECTRUM),
    (Case("Irfft", [SPECTRUM.astype(np.float32)], {"signal_ndim": 1}), SIGNAL),
    (Case("MulInteger", [A8, i8(3), B8, i8(0)]), (A8.astype(int) - 3) * B8),
    (Case("ReduceSumInteger", [A8], {"axes": [1], "keepdims": 0}), A8.astype(int).sum(1)),
    (Case("QLinearReduceMean", [ints(2, 8) * 0 + 40, one(0.5), u8(20), one(0.25), u8(5)],
          {"axes": [1], "keepdims": 0}),
     np.full(2, 45)),
    (Case("GemmaRotaryEmbedding", [np.zeros((B, S, D), np.float32), *[f(B, H, S, D)] * 4],
          outputs=2),
     None),
    (Case("MultiHeadAttention", [PACKED], {"num_heads": H}, label="packed"),
     attended(*(heads_first(PACKED[:, :, :, i]) for i in range(3)))),
    (Case("RelativePositionBias", [TABLE, np.array([20]), np.array([20])],
          {"max_distance": 16, "is_bidirectional": 1}, known=(1, 2)),
     TABLE[[[t5_bucket(j - i, 8, 16) for j in range(20)] for i in range(20)]]
     .transpose(2, 0, 1)[None]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), BY_HAND, ids=[str(c) for c, _ in BY_HAND])
def test_means_what_its_definition_says(case: Case, expected: np.ndarray | None) -> None:
    loaded, (found, *_) = results_of(case, model_of(case))
    assert not loaded.warnings
    if expected is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------- how it is said


def load_case(case: Case) -> Model:
    return load(model_of(case))


def named(label: str) -> Case:
    return next(case for case in CASES if str(case) == label)


@pytest.mark.parametrize(
    ("label", "dtype", "bits"),
    [("MatMulNBits-4-64", "u4", 4), ("MatMulNBits-2-64", "u2", 2), ("MatMulNBits-8-64", "u8", 8)],
)
def test_a_packed_weight_stays_narrow(label: str, dtype: str, bits: int) -> None:
    graph = load_case(named(label)).graph
    weight = next(v for v in graph.params if str(v.type.dtype) == dtype)
    assert weight.type.size == 5 * 64
    assert weight.type.nbytes == 5 * 64 * bits // 8


def test_a_dequantised_weight_stays_narrow() -> None:
    weight, scale = ints(64, 32, dtype=np.int8), np.abs(f(32))
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=1),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", 1, [4, 64])
    y = helper.make_tensor_value_info("y", 1, [4, 32])
    weights = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(scale, "s")]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    found = load(model).graph
    assert [str(v.type) for v in found.params] == ["i8[64, 32]", "f32[32]"]
    assert [n.op.name for n in found.nodes] == ["t.cast", "t.map", "t.matmul"]


@pytest.mark.parametrize(
    "label",
    [
        "Attention-mask",
        "MultiHeadAttention-past",
        "GroupQueryAttention-decode-rotary",
        "QAttention",
    ],
)
def test_attention_stays_whole(label: str) -> None:
    ops = [n.op for n in load_case(named(label)).graph.nodes]
    assert sum(isinstance(op, t.Attention) for op in ops) == 1
    assert not any(isinstance(op, t.Softmax) for op in ops)


def test_a_cache_with_room_is_written_in_place() -> None:
    case = named("GroupQueryAttention-shared-buffer")
    loaded = load_case(case)
    written = [n.op for n in loaded.graph.nodes if isinstance(n.op, t.ScatterND)]
    assert [op.updates.type.shape for op in written] == [(B, 2, 1, D)] * 2
    assert any("every sequence" in text for text in loaded.graph.assumed)


REFUSED = [
    (Case("BeamSearch", [i32(1)]), "analyse the encoder"),
    (Case("Conv", [f(1, 8, 4, 4), f(8, 8, 1, 1)], domain="com.microsoft.nchwc"), "EXTENDED"),
    (
        Case(
            "MatMulNBits",
            [f(1, 32), packed(5, 32, 32, 4), f(5, 1), None, i32(*range(32))],
            {"N": 5, "K": 32, "block_size": 32},
        ),
        "act-order",
    ),
    (Case("Attention", [f(1, 2, 4), f(4, 12)], {"num_heads": 2, "do_rotary": 1}), "rotary"),
    (Case("Attention", [f(1, 2, 4), f(4, 12)], {"num_heads": 3}), "multiple of 3"),
    (Case("FusedGemm", [f(2, 3), f(3, 4)], {"activation": "Relo"}), "Relu"),
    (Case("QuantizeLinear", [f(3, 4), f(5)], {"axis": 1}), "4 scales"),
]


@pytest.mark.parametrize(("case", "says"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_refuses_what_it_cannot_say(case: Case, says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:
        load_case(case)
    assert "node" in error.value.where


OPAQUE = [
    Case("NGramRepeatBlock", [np.ones((2, 3), np.int64), f(2, 9)], {"ngram_size": 2}),
    Case("RestorePadding", [f(4, 6), np.zeros((2, 2), np.int32)]),
    Case("RemovePadding", [f(2, 3, 6), i32(3, 3)], outputs=4),
    Case("PackedAttention", [f(6, 8), f(8, 24), f(24)], {"num_heads": 2}),
    Case("PackedMultiHeadAttention", [f(6, 2, 3, 4)], {"num_heads": 2}),
    Case(
        "PagedAttention",
        [f(6, 8), f(6, 8), f(6, 8), f(3, 2, 2, 4), f(3, 2, 2, 4)],
        {"num_heads": 2, "kv_num_heads": 2},
        outputs=3,
    ),
]


@pytest.mark.parametrize("case", OPAQUE, ids=str)
def test_opaque_operators_have_types_and_a_warning(case: Case) -> None:
    loaded = load_case(case)
    assert any(isinstance(n.op, t.Opaque) for n in loaded.graph.nodes)
    assert len(loaded.warnings) == 1 and "does not know" in loaded.warnings[0]
    with pytest.raises(ModelError, match="does not know"):
        load(model_of(case), strict=True)
