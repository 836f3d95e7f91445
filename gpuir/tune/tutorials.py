"""The kernels of Triton's tutorials, as templates: their arguments and meta-parameters by name.

A kernel of one's own is described in the same way, in ten lines: `MATMUL` is the one to copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.types import DTYPES, DType, f32, tf32
from gpuir.tune.kernels import Kernel, kernel
from gpuir.tune.templates import Meta, Template, values_of

Args = Mapping[str, Any]


# ---------------------------------------------------------------------------- arguments


def extent(args: Args, name: str) -> int:
    """A whole number that a launch is given."""
    found = given(args, name)
    try:
        return int(found)
    except (TypeError, ValueError):
        raise UsageError(
            f"the argument {name!r} is not a whole number", found=repr(found), fix=f"pass {name}="
        ) from None


def given(args: Args, *names: str) -> Any:
    """The argument of the first of these names that a launch has."""
    for name in names:
        if args.get(name) is not None:
            return args[name]
    raise UsageError(
        f"the launch has no argument {' or '.join(map(repr, names))}",
        found=", ".join(args),
        fix="give gpuir.tune.triton a template whose argument names are the kernel's",
    )


def dtype_of(args: Args, *names: str) -> DType:
    """The dtype that was given as `dtype`, or that of the first of these pointers: of a tensor, a
    tensor descriptor's base, or whatever else has a `.dtype` (of PyTorch, numpy or Triton)."""
    if args.get("dtype") is not None:
        return dtype_named(args["dtype"])
    pointer = given(args, *names)
    found = _pointed(pointer)
    if found is None:
        raise UsageError(
            f"the data type of the argument {names[0]!r} is not known",
            found=repr(pointer),
            fix="give it: pruner(..., dtype='f16')",
        )
    return dtype_named(found)


def own_dtype(args: Args, name: str, otherwise: DType) -> DType:
    """The dtype of a pointer, where it has one."""
    found = _pointed(args.get(name))
    return otherwise if found is None else dtype_named(found)


def _pointed(pointer: Any) -> Any:
    base = getattr(pointer, "base", None)
    return getattr(base if hasattr(base, "dtype") else pointer, "dtype", None)


# Triton's own names beside those of PyTorch and numpy, which say a kind and its bits
# (triton/language/core.py, class dtype).
NAMED = {
    "bool": "bool",
    "int1": "bool",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2": "f8e5m2",
    "float8_e5m2fnuz": "f8e5m2fnuz",
    "float8_e8m0fnu": "f8e8m0",
    "fp8e4nv": "f8e4m3",
    "fp8e4b8": "f8e4m3fnuz",
    "fp8e5": "f8e5m2",
    "fp8e5b16": "f8e5m2fnuz",
    **{f"{long}{bits}": f"{short}{bits}" for bits in (8, 16, 32, 64) for long, short in (
        ("float", "f"), ("fp", "f"), ("int", "i"), ("uint", "u"),
    )},
}  # fmt: skip


def dtype_named(dtype: Any) -> DType:
    """Our dtype of one of PyTorch's, numpy's or Triton's, by its name: `torch.float16`, `*fp16`."""
    if isinstance(dtype, DType):
        return dtype
    name = getattr(dtype, "name", None) or str(dtype)
    name = str(name).removeprefix("torch.").removeprefix("*").strip("<>'")
    found = NAMED.get(name, name)
    if found not in DTYPES:
        raise UsageError(f"no dtype {name!r}", fix=nearest(name, [*NAMED, *DTYPES]))
    return DTYPES[found]


def layout(args: Args, *strides: tuple[str, str]) -> str:
    """ "n" for each operand whose cells lie side by side along its last axis, "t" along the first;
    of each, the names of the strides of both axes."""
    return "".join(
        "t" if args.get(outer) == 1 and args.get(inner) not in (1, None) else "n"
        for outer, inner in strides
    )


# ---------------------------------------------------------------------------- templates


def _matmul(args: Args) -> Kernel:
    a = dtype_of(args, "a_ptr")
    # tl.dot takes TF32 for f32, unless it is told otherwise (triton/language/core.py, dot)
    math: dict[str, Any] = {"math": tf32} if a == f32 else {}
    return kernel(
        "gemm",
        **math,
        m=extent(args, "M"),
        n=extent(args, "N"),
        k=extent(args, "K"),
        dtype=a,
        weight=own_dtype(args, "b_ptr", a),
        out=own_dtype(args, "c_ptr", a),
        layout=layout(args, ("stride_am", "stride_ak"), ("stride_bk", "stride_bn")),
    )


def _blocks(meta: Meta) -> Tiles:
    return Tiles(
        {
            "b": 1.0,
            "m": meta["BLOCK_SIZE_M"],
            "n": meta["BLOCK_SIZE_N"],
            "k": meta["BLOCK_SIZE_K"],
        },
        stages=meta["num_stages"],
        warps=meta["num_warps"],
        group=meta["GROUP_SIZE_M"],
    )


# python/tutorials/03-matrix-multiplication.py: matmul_kernel
MATMUL = Template(
    "matmul",
    _matmul,
    _blocks,
    values_of("matmul"),
)


# 01-vector-add.py: add_kernel
ADD = Template(
    "add",
    lambda args: kernel(
        "map",
        cells=extent(args, "n_elements"),
        inputs=2,
        fn="add",
        dtype=dtype_of(args, "x_ptr"),
    ),
    lambda meta: Tiles({"i": meta["BLOCK_SIZE"]}, warps=meta["num_warps"]),
    values_of("add"),
)


def _row(meta: Meta) -> Tiles:
    return Tiles({"o": 1.0, "r": meta["BLOCK_SIZE"]}, warps=meta["num_warps"])


def _holds_a_row(k: Kernel, meta: Meta) -> Any:
    columns = k.work.extents["r"]
    return (meta["BLOCK_SIZE"] >= columns) & (meta["BLOCK_SIZE"] < 2 * np.maximum(columns, 64))


# 02-fused-softmax.py: softmax_kernel. A block holds the whole row. Its programs go over several
# rows each, and `num_stages` is how many of them are under way, which is not modelled.
SOFTMAX = Template(
    "softmax",
    lambda args: kernel(
        "rows",
        rows=extent(args, "n_rows"),
        columns=extent(args, "n_cols"),
        of="softmax",
        dtype=dtype_of(args, "input_ptr"),
    ),
    _row,
    values_of("softmax"),
    _holds_a_row,
)


def _norm(args: Args) -> Kernel:
    x, columns = given(args, "X"), extent(args, "N")
    if args.get("rows") is not None:
        rows = extent(args, "rows")
    elif hasattr(x, "shape"):
        rows = int(np.prod(tuple(x.shape))) // max(columns, 1)
    else:
        raise UsageError(
            "the launch does not give the number of rows",
            found=f"X={x!r}",
            fix="give X as a tensor, or rows= beside the arguments",
        )
    return kernel("rows", rows=rows, columns=columns, of="norm", dtype=dtype_of(args, "X"))


# 05-layer-norm.py: _layer_norm_fwd_fused. A program takes a row, in steps of a block.
LAYER_NORM = Template("layer norm", _norm, _row, values_of("layer norm"))


def _attention(args: Args) -> Kernel:
    length = extent(args, "N_CTX")
    return kernel(
        "attention",
        batch=extent(args, "Z"),
        heads=extent(args, "H"),
        queries=length,
        keys=length,
        head=extent(args, "HEAD_DIM"),
        causal=bool(args.get("CAUSAL")) or args.get("STAGE") == 3,
        dtype=dtype_of(args, "Q", "desc_q"),
    )


def _fits_the_head(k: Kernel, meta: Meta) -> Any:
    return meta["BLOCK_N"] <= k.work.extents["e"]


# 06-fused-attention.py: _attn_fwd, by pointers (Q) and by descriptors (desc_q). It asserts that a
# block has no more keys than a head has cells.
ATTENTION = Template(
    "attention",
    _attention,
    lambda meta: Tiles(
        {"b": 1.0, "h": 1.0, "s": meta["BLOCK_M"], "d": meta["BLOCK_N"]},
        stages=meta["num_stages"],
        warps=meta["num_warps"],
    ),
    values_of("attention"),
    _fits_the_head,
)

TEMPLATES = {t.name: t for t in (ADD, SOFTMAX, MATMUL, LAYER_NORM, ATTENTION)}
