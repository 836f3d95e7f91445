"""Operators of whole models, each run by itself: NeuSight's traces of torch.fx graphs.

Everything is f32 and eager; only forward times are read. Source: NeuSight artifact (Lee,
Phanishayee, Mahajan, ASPLOS 2025), per-operator traces as normalised with their README.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod

import numpy as np

from gpuir.cost import sized
from gpuir.cost.work import Work
from gpuir.fit.batch import number_rows
from gpuir.fit.columns import Columns, WordColumn
from gpuir.fit.readers import Reader, Shapes, Unmodelled
from gpuir.ir.types import f32, u8
from validation.eager import DEVICES, POINTWISE, pointwise

# fx nodes that launch nothing, or nothing worth telling
VIEWS = frozenset(
    ("view", "permute", "transpose", "expand", "unsqueeze", "squeeze", "getitem", "split")
    + ("reshape", "to", "type", "size", "detach", "chunk")
)
SHAPE = r"\[[1-9]\d{0,11}(?:, ?[1-9]\d{0,11})*\]"
SHAPES = re.compile(rf"\[{SHAPE}(?:, ?{SHAPE})*\]")
MAPS = {
    **{name: name for name in ("add", "sub", "mul", "tanh", "relu", "gelu", "sigmoid", "pow")},
    "Tanh": "tanh",
    "truediv": "div",
    "where": "add",
}
# Several traces of one machine were up to 1.5 times slower than the same kernels alone, while their
# whole models were not: README of the tables, `fw_vs_opsum` near 0.67.
SUSPECT = {("NVIDIA_A100-PCIE-40GB", "bert_large"), ("NVIDIA_A100-PCIE-40GB", "gpt2_large")}


@dataclass(frozen=True)
class Traced:
    """What a node runs: an operator and its extents; or why it is left out."""

    op: str = ""
    b: int = 1
    m: int = 1
    n: int = 1
    k: int = 1
    why: str = ""


def node(
    kind: str, target: str, module: str, shapes: str, output: str, dense: str, mode: str
) -> Traced:
    """The kernel that an fx node launches, from the columns that describe it."""
    name = module if kind == "call_module" else target
    if name in VIEWS or (name == "Dropout" and mode != "train"):
        return Traced(why=f"{name} launches nothing")
    inputs, results = _shapes(shapes), _shapes(f"[{output}]")
    if not inputs or not results:
        return Traced(why=f"{name or kind} without shapes")
    x, result, cells = inputs[0], results[0], prod(results[0])
    match name:
        case "Linear":
            return Traced("linear", m=prod(x[:-1]), n=result[-1], k=x[-1])
        case "addmm" if [len(shape) for shape in inputs[1:2]] == [2]:
            rows, inner = inputs[1]
            return Traced("addmm", m=rows, n=result[-1], k=inner)
        case "matmul" | "bmm" if len(x) > 1:
            *batch, m, k = x
            return Traced("matmul", prod(batch), m, result[-1], k)
        case "LayerNorm" | "softmax":
            return Traced(name.lower(), m=prod(x[:-1]), n=x[-1])
        case "Embedding":
            return Traced("embedding", m=prod(result[:-1]), n=result[-1])
        case "ones" | "full" | "arange":
            return Traced("fill", m=cells)
        case "contiguous" if "0" in dense:
            return Traced("transpose", m=cells)
        case "Dropout":
            return Traced("dropout", m=cells)
        case _ if name in MAPS:
            large = sum(prod(shape) == cells for shape in inputs)
            op = MAPS[name]
            return Traced(op if large > 1 or f"{op}u" not in POINTWISE else f"{op}u", m=cells)
        case _:
            return Traced(why=f"{name or kind} is no operator we know")


def _shapes(text: str) -> list[list[int]]:
    """Of `[[8,1024],[1]]`; none where the text is no list of shapes."""
    shapes: list[list[int]] = json.loads(text) if SHAPES.fullmatch(text) else []
    return shapes


def traced(columns: Columns) -> Columns:
    """The operator and extents of each node; equal nodes are read once."""
    asked = ("kind", "target", "module", "input_shapes", "output_shape", "contiguous_in", "mode")
    words = [columns.words(name) for name in asked]
    number, first = number_rows([w.codes for w in words])
    nodes = [node(*(w.names[w.codes[i]] for w in words)) for i in first.tolist()]
    extents = {d: np.array([getattr(t, d) for t in nodes], np.float64)[number] for d in "bmnk"}
    ops = WordColumn.of(t.op for t in nodes)
    why = WordColumn.of(t.why for t in nodes)
    suspect = np.zeros(columns.count, bool)
    for device, model in SUSPECT:
        suspect |= columns.words("device").where(device) & columns.words("model").where(model)
    return columns.with_cells(
        {
            **extents,
            "node": WordColumn(ops.codes[number], ops.names),
            "why": WordColumn(why.codes[number], why.names),
            "suspect": WordColumn(
                suspect.astype(np.int64), ("", "slower than the same kernels alone")
            ),
        }
    )


def operators(s: Shapes) -> tuple[Work, ...]:
    b, m, n, k = (s[d] for d in "bmnk")
    match s.words["node"]:
        case "":
            raise Unmodelled(s.words["why"])
        case "linear" | "addmm":
            return (sized.gemm(m, n, k, f32, epilogue=("bias",)),)
        case "matmul":
            return (sized.gemm(m, n, k, f32, b=b),)
        case "layernorm":
            return (sized.rows(m, n, f32, "norm", parameters=2),)
        case "softmax":
            return (sized.rows(m, n, f32, "softmax"),)
        case "transpose":
            return (sized.pointwise(m, (f32,), (f32,), kind="transpose"),)
        case "embedding":  # every token was the same: a row that the caches hold
            return (sized.gather(m, n, f32, np.ones_like(m)),)
        case "fill":
            return (sized.pointwise(m, (), (f32,)),)
        case "dropout":
            return (sized.pointwise(m, (f32,), (f32, u8), ops=10.0),)
        case op:
            return (pointwise(op, m),)


READERS = (
    Reader(
        name="operators of a trace",
        key=("model", "mode", "kind", "target", "module", "input_shapes", "output_shape"),
        words=("node", "why", "suspect"),
        shape=("b", "m", "n", "k"),
        works=operators,
        op=lambda words: words["node"],
        dtype=lambda _: "fp32",
        beside=("model", "mode", "in_layer"),
        latency="fw_us",
        clock="events",
        devices=DEVICES,
        prepare=traced,
        needs=("contiguous_in",),
    ),
)
