"""Kernels that eager PyTorch launched one by one, between two events: the NeuSight tables.

The host's dispatch lies inside these measurements. Everything is f32. Source: NeuSight artifact
(Lee, Phanishayee, Mahajan, ASPLOS 2025), its kernel tables as normalised with their README.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuir.cost import sized, work
from gpuir.cost.lanes import LANE_OPS
from gpuir.cost.work import Work
from gpuir.fit.columns import Columns, WordColumn
from gpuir.fit.readers import Reader, Shapes, Unmodelled
from gpuir.ir.types import DType, bf16, f16, f32, tf32

# Software sees one die of a board with two. Half an MI250 has the numbers of an MI210.
DEVICES = {"AMD_Instinct_MI250": "mi210", "AMD_Instinct_MI250X": "mi250x-gcd"}
LAUNCH = ("kernel_name", "grid_x", "grid_y", "grid_z", "block_x", "kernels")

# operator → tensors read, the scalar function whose instructions it costs; `u` is a tensor with a
# Python number.
POINTWISE = {
    **{op: (2, op) for op in ("add", "sub", "mul", "div", "pow")},
    **{f"{op}u": (1, op) for op in ("add", "sub", "mul", "div", "pow")},
    **{op: (1, op) for op in ("relu", "gelu", "tanh", "sigmoid", "silu", "exp", "sqrt", "erf")},
}


def _op(words: Mapping[str, str]) -> str:
    return words["op"]


def _dtype(words: Mapping[str, str]) -> str:
    """NeuSight's tables have no dtype: all of them are f32."""
    return words["dtype"] or "fp32"


DTYPES = {"fp32": f32, "float32": f32, "tf32": f32, "fp16": f16, "float16": f16, "bf16": bf16}


def dtype_of(words: Mapping[str, str]) -> DType:
    if _dtype(words) not in DTYPES:
        raise Unmodelled(f"dtype {words['dtype']} is none we know of eager kernels")
    return DTYPES[_dtype(words)]


def products(s: Shapes) -> tuple[Work, ...]:
    """`bmm`: c[b, m, k] = a[b, m, n] · b[b, n, k]. `linear`: the same with a bias. The contraction
    is n."""
    dtype, math = dtype_of(s.words), tf32 if s.words["dtype"] == "tf32" else None
    match s.words["op"]:
        case "bmm":
            return (sized.gemm(s["m"], s["k"], s["n"], dtype, b=s["b"], math=math),)
        case "linear":
            m = s["m"] * s["b"]
            return (sized.gemm(m, s["k"], s["n"], dtype, epilogue=("bias",), math=math),)
        case op:
            raise Unmodelled(f"operator {op} is no product we know")


def convolutions(s: Shapes) -> tuple[Work, ...]:
    size, window = s["input_size"], s["kernel_size"]
    size = np.where(window <= size + 2 * s["padding"], size, np.nan)  # nothing fits into the others
    return (
        sized.conv(
            s["b"],
            s["in_channels"],
            (size, size),
            s["out_channels"],
            (window, window),
            dtype_of(s.words),
            stride=s["stride"],
            padding=s["padding"],
        ),
    )


def rows(s: Shapes) -> tuple[Work, ...]:
    """Operators on [b, h]: maps, and softmax and layer norm over h."""
    dtype = dtype_of(s.words)
    match s.words["op"]:
        case "softmax":
            return (sized.rows(s["b"], s["h"], dtype, "softmax"),)
        case "layernorm":
            return (sized.rows(s["b"], s["h"], dtype, "norm", parameters=2),)
        case op if op in POINTWISE:
            return (pointwise(op, s["b"] * s["h"], dtype),)
        case op:
            raise Unmodelled(f"operator {op} is no map or row operator we know")


def pointwise(op: str, cells: work.Number, dtype: DType = f32) -> Work:
    reads, function = POINTWISE[op]
    ops = LANE_OPS.get(function, 1.0)
    return sized.pointwise(cells, (dtype,) * reads, (dtype,), ops=ops)


# The campaign ran in jobs by b, of which some found the GPU at a lower clock: what SMs bound takes
# 1.2 to 1.6 times as long up to that b as beyond it, a step in the time of a row (powers, softmax
# and layer norm of the train rows). Operators → device, the largest such b.
LOWER_CLOCK = {
    ("pow", "powu", "softmax", "layernorm"): ("NVIDIA_A100-PCIE-40GB", 8192),
    ("softmax",): ("Tesla_T4", 1024),
    ("layernorm",): ("Tesla_T4", 4096),
}


def suspect(columns: Columns) -> Columns:
    """The rows that were measured at a lower clock than the rest."""
    slow = np.zeros(columns.count, bool)
    b, train = columns.numbers("b", 0.0), columns.words("split").where("train")
    for ops, (device, largest) in LOWER_CLOCK.items():
        rows = train & columns.words("device").where(device) & (b <= largest)
        for op in ops:
            slow |= rows & columns.words("op").where(op)
    reason = WordColumn(slow.astype(np.int64), ("", "measured at a lower clock"))
    return columns.with_cells({"suspect": reason})


# Likewise batched products, in jobs by b and m: up to these, what SMs bound ran at the base clock:
# 1.11 times as long on P100, 1.12 on V100, up to 1.9 on A100 and 2.6 on T4, with steps from one b
# or m to the next (train rows of few blocks; T4's end less sharply).
BASE_CLOCK = {
    "NVIDIA_A100-PCIE-40GB": (33, 66),
    "Tesla_P100-PCIE-16GB": (33, 256),
    "Tesla_T4": (66, 256),
    "Tesla_V100-PCIE-32GB": (33, 256),
}


def odd_products(columns: Columns) -> Columns:
    """Scored, but nothing is fitted to them: batched products measured at the base clock, and P4's
    linear layers. Of the same shapes, rows of the train campaign (maxwell_sgemm, about 20 % of the
    peak) and of the test campaign (sgemm_128x128x8, about 70 %) came from different paths of cuBLAS
    (README of the tables)."""
    device, op = columns.words("device"), columns.words("op")
    b, m = columns.numbers("b", 0.0), columns.numbers("m", 0.0)
    slow = np.zeros(columns.count, bool)
    for name, (most_b, most_m) in BASE_CLOCK.items():
        slow |= device.where(name) & (b <= most_b) & (m <= most_m)
    slow &= columns.words("split").where("train") & op.where("bmm")
    odd = device.where("Tesla_P4") & op.where("linear")
    reason = WordColumn(slow.astype(np.int64), ("", "measured at the base clock"))
    return columns.with_cells({"rough": WordColumn.yes_or_no(odd), "suspect": reason})


READERS = (
    Reader(
        name="eager products",
        key=("op", "b", "m", "n", "k"),
        words=("op", "dtype", "rough", "suspect"),
        shape=("b", "m", "n", "k"),
        works=products,
        op=_op,
        dtype=_dtype,
        beside=("split", *LAUNCH),
        clock="events",
        devices=DEVICES,
        prepare=odd_products,
    ),
    Reader(
        name="eager convolutions",
        key=("b", "in_channels", "out_channels", "kernel_size", "input_size", "stride", "padding"),
        words=("dtype",),
        shape=(
            *("b", "in_channels", "out_channels", "kernel_size", "input_size"),
            *("stride", "padding"),
        ),
        works=convolutions,
        op=lambda _: "conv",
        dtype=_dtype,
        beside=("split", *LAUNCH),
        clock="events",
        devices=DEVICES,
    ),
    Reader(
        name="eager maps and rows",
        key=("op", "b", "h"),
        words=("op", "dtype", "suspect"),
        shape=("b", "h"),
        works=rows,
        op=_op,
        dtype=_dtype,
        beside=("split", *LAUNCH),
        clock="events",
        devices=DEVICES,
        prepare=suspect,
    ),
)
