"""Layers of whole models: vidur's kernel times, LLMCompass's wall clocks.

Sources: github.com/microsoft/vidur, profiling data (summed GPU time of the kernels under a label in
a profiler trace: no host time inside); github.com/PrincetonUniversity/LLMCompass, measured
operators (host clock around one operator and a synchronisation).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuir.cost import sized
from gpuir.cost.lanes import LANE_OPS
from gpuir.cost.work import Work
from gpuir.fit.columns import Columns, WordColumn
from gpuir.fit.readers import Reader, Shapes, Unmodelled
from validation.serving import PLAIN, dtype_of

# Both measured A100s with 80 GB: vidur's `a100` is a node of a DGX A100 with 80 GB, LLMCompass
# states 2 TB/s.
DEVICES = {"a100": "a100-sxm-80gb", "A100": "a100-sxm-80gb"}


def layers(s: Shapes) -> tuple[Work, ...]:
    """The kernels under one label of a decoder layer.

    `rope` turns queries and keys in place, a pair of cells at a time. Where the feed-forward is
    gated, norms are by root mean square; where it is not (phi-2), attention and feed-forward run
    beside each other and both are added. Gated activations, their models' norms and `rope` are
    kernels of vLLM of 2023, whose threads take no vectors.
    """
    tokens, hidden, tp = s["tokens"], s["hidden"], s["tp"]
    op, dtype = s.words["op"], dtype_of(PLAIN, s.words["dtype"], "layers")
    if s.words["product"] == "yes":
        return (sized.gemm(s["gemm_m"], s["gemm_n"], s["gemm_k"], dtype),)
    match op:
        case "add":
            add = sized.pointwise(tokens * hidden, (dtype, dtype), (dtype,))
            return (add,) if s.words["gated"] == "1" else (add, add)
        case "emb":
            return (sized.gather(tokens, hidden, dtype, s["vocab"] / tp),)
        case "input_layernorm" | "post_attention_layernorm":
            if s.words["gated"] == "1":
                return (sized.rows(tokens, hidden, dtype, "rms", parameters=1),)
            return (sized.rows(tokens, hidden, dtype, "norm", parameters=2),)
        case "mlp_act":
            cells = tokens * s["ffn"] / tp
            ops = LANE_OPS["silu"]
            if s.words["gated"] == "1":
                gate = sized.pointwise(cells, (dtype, dtype), (dtype,), ops=ops + 1, kind="scalar")
                return (gate,)
            return (sized.pointwise(cells, (dtype,), (dtype,), ops=LANE_OPS["gelu"]),)
        case "attn_rope":
            head = hidden / s["q_heads"]
            pairs = tokens * head * (s["q_heads"] + s["kv_heads"]) / tp / 2
            return (sized.pointwise(pairs, (dtype,) * 2, (dtype,) * 2, ops=8.0, kind="scalar"),)
        case _:
            raise Unmodelled(f"operator {op} is no part of a layer we know")


def _which_are_products(columns: Columns) -> Columns:
    extents = np.nan_to_num(columns.numbers("gemm_k", 0.0))
    return columns.with_cells({"product": WordColumn.yes_or_no(extents > 0)})


def operators(s: Shapes) -> tuple[Work, ...]:
    m, n, k = s["m"], s["n"], s["k"]
    dtype = dtype_of(PLAIN, s.words["dtype"], "operators")
    match s.words["op"]:
        case "matmul":
            return (sized.gemm(m, n, k, dtype),)
        case "softmax":
            return (sized.rows(m, n, dtype, "softmax"),)
        case "layernorm":
            return (sized.rows(m, n, dtype, "norm", parameters=2),)
        case "gelu":
            cells = m * np.maximum(n, 1)
            return (sized.pointwise(cells, (dtype,), (dtype,), ops=LANE_OPS["gelu_tanh"]),)
        case op:
            raise Unmodelled(f"{op} is a part of a layer whose shapes the table does not give")


def _op(words: Mapping[str, str]) -> str:
    return words["op"]


def _dtype(words: Mapping[str, str]) -> str:
    return words["dtype"]


READERS = (
    Reader(
        name="layers of a profile",
        key=(
            *("gpu", "op", "dtype", "tokens", "tp", "hidden", "ffn", "q_heads", "kv_heads"),
            *("vocab", "gated", "gemm_m", "gemm_n", "gemm_k"),
        ),
        words=("op", "dtype", "gated", "product"),
        shape=(
            *("tokens", "tp", "hidden", "ffn", "q_heads", "kv_heads", "vocab"),
            *("gemm_m", "gemm_n", "gemm_k"),
        ),
        or_zero=("gemm_m", "gemm_n", "gemm_k", "vocab", "ffn", "q_heads", "kv_heads"),
        works=layers,
        op=_op,
        dtype=_dtype,
        beside=("model", "split"),
        device="gpu",
        clock="profiler",
        devices=DEVICES,
        prepare=_which_are_products,
    ),
    Reader(
        name="operators by wall clock",
        key=("gpu", "op", "dtype", "m", "n", "k"),
        words=("op", "dtype"),
        shape=("m", "n", "k"),
        or_zero=("n", "k"),
        works=operators,
        op=_op,
        dtype=_dtype,
        beside=("split",),
        device="gpu",
        clock="host",
        devices=DEVICES,
    ),
)
