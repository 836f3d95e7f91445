"""Operators that can be timed: their extents, the kernels they run, and how torch runs them.

What is measured and what is predicted of a row come from the same entry of `BENCHMARKS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from operator import attrgetter

import numpy as np

from gpuir.cost import sized
from gpuir.cost.sheet import Number
from gpuir.cost.work import Lookup, Operand, Work
from gpuir.fit.kit import FLOATS, Benchmark, Extents, Kit, Run
from gpuir.fit.layers import LAYERS
from gpuir.ir.types import DTYPES, DType, bf16, f32, i8, i32, tf32

DRAWS = 8  # of indices, taken in turn, so that a cache does not hold what they ask for


def works_of(op: str, dtype: str, extents: Extents) -> tuple[Work, ...]:
    """The kernels that rows of an operator run. `tf32` is f32 with products in TF32."""
    if dtype != tf32.name:
        return BENCHMARKS[op].works(extents, DTYPES[dtype])
    found = BENCHMARKS[op].works(extents, f32)
    return tuple(replace(w, math=tf32) if w.kernel == "k.gemm" else w for w in found)


def is_narrow(op: str, e: Extents) -> Number:
    """Convolutions of so few channels a group that their kernels are of another kind
    (`cost.sized.conv`): rows of both kinds cannot stand in one work."""
    if op not in _CONVOLUTIONS:
        return np.zeros(np.shape(next(iter(e.values()))), bool)
    rank, transposed = _CONVOLUTIONS[op]
    taps = e["window"] ** rank
    results, depth = e["filters"] / e["groups"], e["channels"] / e["groups"]
    wide = np.minimum(results * taps, depth) if transposed else np.minimum(results, depth * taps)
    return wide < 8


# ---------------------------------------------------------------------------- products


def _linear_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    out = {"i8": i32, "f8e4m3": bf16}.get(dtype.name, dtype)
    return (sized.gemm(e["m"], e["n"], e["k"], dtype, out=out),)


def _linear(kit: Kit, e: Mapping[str, int]) -> Run:
    """x[m, k] · w[n, k]ᵀ, as a linear layer without bias stores its weights."""
    x, w = kit.random(e["m"], e["k"]), kit.random(e["n"], e["k"]).t()
    if kit.dtype == "i8":
        return lambda: kit.torch._int_mm(x, w)
    if kit.dtype == "f8e4m3":
        one = kit.torch.ones((), device=kit.device)
        out = kit.torch.bfloat16
        return lambda: kit.torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=out)
    y = kit.empty(e["m"], e["n"])
    return lambda: kit.torch.mm(x, w, out=y)


def _matmul(kit: Kit, e: Mapping[str, int]) -> Run:
    """a[b, m, k] · b[b, k, n], all row-major."""
    a, b = kit.random(e["b"], e["m"], e["k"]), kit.random(e["b"], e["k"], e["n"])
    c = kit.empty(e["b"], e["m"], e["n"])
    return lambda: kit.torch.bmm(a, b, out=c)


# operator → dimensions of its images, and whether it is the gradient form
_CONVOLUTIONS = {
    "conv": (2, False),
    "conv1d": (1, False),
    "conv3d": (3, False),
    "conv_transposed": (2, True),
}


def _convolution(op: str) -> Benchmark:
    """Cubes and windows of equal sides, padded by half a window; narrow dtypes with channels last,
    as libraries like them."""
    rank, transposed = _CONVOLUTIONS[op]

    def works(e: Extents, dtype: DType) -> tuple[Work, ...]:
        found = sized.conv(
            e["batch"],
            e["channels"],
            (e["size"],) * rank,
            e["filters"],
            (e["window"],) * rank,
            dtype=dtype,
            stride=e["stride"],
            padding=np.floor_divide(e["window"], 2),
            groups=e["groups"],
            transposed=transposed,
        )
        return (found,)

    def make(kit: Kit, e: Mapping[str, int]) -> Run:
        x = kit.random(e["batch"], e["channels"], *(e["size"],) * rank)
        channels = (e["filters"], e["channels"] // e["groups"])
        if transposed:
            channels = (e["channels"], e["filters"] // e["groups"])
        w = kit.random(*channels, *(e["window"],) * rank)
        if kit.dtype in ("f16", "bf16") and rank == 2:
            x, w = (t.contiguous(memory_format=kit.torch.channels_last) for t in (x, w))
        name = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
        call, padding = getattr(kit.torch.nn.functional, name), e["window"] // 2
        return lambda: call(x, w, stride=e["stride"], padding=padding, groups=e["groups"])

    columns = ("batch", "channels", "size", "filters", "window", "stride", "groups")
    return Benchmark(columns, works, make, _PRODUCTS)


_PRODUCTS = ("f32", "tf32", "f16", "bf16", "f64")


def _attention_works(causal: bool) -> Callable[[Extents, DType], tuple[Work, ...]]:
    """The keys of causal self-attention are its queries."""
    return lambda e, dtype: (
        sized.attention(
            e["batch"],
            e["heads"],
            queries=e["queries"],
            keys=e["queries" if causal else "keys"],
            head=e["head"],
            dtype=dtype,
            kv_heads=e["kv_heads"],
            causal=causal,
        ),
    )


def _attention(kit: Kit, e: Mapping[str, int]) -> Run:
    """Torch's own choice of kernel; with `queries` alone, causal self-attention."""
    keys = e.get("keys", e["queries"])
    q = kit.random(e["batch"], e["heads"], e["queries"], e["head"])
    k, v = (kit.random(e["batch"], e["kv_heads"], keys, e["head"]) for _ in range(2))
    grouped = e["heads"] != e["kv_heads"]
    attend = kit.torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal="keys" not in e, enable_gqa=grouped)


# ---------------------------------------------------------------------------- maps and rows

# operator → tensors read, what torch calls it
_MAPS = {
    **{op: (2, op) for op in ("add", "mul", "div")},
    **{op: (1, op) for op in ("tanh", "exp", "log", "sqrt", "erf", "sigmoid", "sin")},
    "relu": (1, "clamp_min"),  # torch.relu makes its result anew each time
    **{op: (1, f"_C._nn.{op}") for op in ("gelu", "silu")},
}


def _map(op: str) -> Benchmark:
    reads, name = _MAPS[op]

    def works(e: Extents, dtype: DType) -> tuple[Work, ...]:
        return (sized.mapped(op, e["cells"], (dtype,) * reads, dtype),)

    def make(kit: Kit, e: Mapping[str, int]) -> Run:
        xs = [kit.random(e["cells"]).abs() for _ in range(reads)]  # of which all have a logarithm
        y, call = kit.empty(e["cells"]), attrgetter(name)(kit.torch)
        least = (0,) if op == "relu" else ()
        return lambda: call(*xs, *least, out=y)

    return Benchmark(("cells",), works, make, FLOATS)


def _rows(kind: str, parameters: int) -> Callable[[Extents, DType], tuple[Work, ...]]:
    return lambda e, dtype: (sized.rows(e["rows"], e["cols"], dtype, kind, parameters=parameters),)


def _softmax(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y = kit.torch.empty_like(x)
    return lambda: kit.torch.softmax(x, -1, out=y)


def _norm(kit: Kit, e: Mapping[str, int]) -> Run:
    x, w, b = kit.random(e["rows"], e["cols"]), kit.random(e["cols"]), kit.random(e["cols"])
    return lambda: kit.torch.nn.functional.layer_norm(x, (e["cols"],), w, b)


def _sum(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y = kit.empty(e["rows"])
    return lambda: kit.torch.sum(x, -1, out=y)


def _cumsum_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    whole = sized.rows(e["rows"], e["cols"], dtype, "norm", ops=1.0)
    return (replace(whole, kind="scan"),)


def _cumsum(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y = kit.empty(e["rows"], e["cols"])
    return lambda: kit.torch.cumsum(x, -1, out=y)


def _topk_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    return (sized.top_k(e["rows"], e["cols"], e["k"], dtype),)


def _topk(kit: Kit, e: Mapping[str, int]) -> Run:
    """The `k` largest of each row, sorted, and where they were."""
    x = kit.random(e["rows"], e["cols"])
    return lambda: kit.torch.topk(x, e["k"], -1)


# ---------------------------------------------------------------------------- moving data


def _copy_works(kind: str) -> Callable[[Extents, DType], tuple[Work, ...]]:
    return lambda e, dtype: (
        sized.pointwise(e["rows"] * e["cols"], (dtype,), (dtype,), ops=0.0, kind=kind),
    )


def _copy(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y = kit.torch.empty_like(x)
    return lambda: y.copy_(x)


def _transpose(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y = kit.empty(e["cols"], e["rows"])
    return lambda: y.copy_(x.t())


def _cast_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    return (sized.pointwise(e["cells"], (f32,), (dtype,), ops=1.0),)


def _cast(kit: Kit, e: Mapping[str, int]) -> Run:
    """From f32."""
    x = kit.of("f32").random(e["cells"])
    y = kit.empty(e["cells"])
    return lambda: y.copy_(x)


def _concat_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    return (sized.pointwise(2 * e["rows"] * e["cols"], (dtype,), (dtype,), ops=0.0, kind="copy"),)


def _concat(kit: Kit, e: Mapping[str, int]) -> Run:
    """Two tensors side by side."""
    xs = [kit.random(e["rows"], e["cols"]) for _ in range(2)]
    y = kit.empty(e["rows"], 2 * e["cols"])
    return lambda: kit.torch.cat(xs, -1, out=y)


def _quantise_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    """Scaled, rounded, clamped."""
    return (sized.pointwise(e["cells"], (dtype,), (i8,), ops=4.0, kind="quantise"),)


def _quantise(kit: Kit, e: Mapping[str, int]) -> Run:
    """To whole numbers of eight bits with one scale, as long as torch has it."""
    x, to = kit.random(e["cells"]), kit.torch.qint8
    with warnings.catch_warnings():  # that it will not have it for ever, said once
        warnings.simplefilter("ignore")
        kit.torch.quantize_per_tensor(x, 0.1, 0, to)
    return lambda: kit.torch.quantize_per_tensor(x, 0.1, 0, to)


def _dequantise_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    return (sized.pointwise(e["cells"], (i8,), (dtype,), ops=2.0),)


def _dequantise(kit: Kit, e: Mapping[str, int]) -> Run:
    """Whole numbers of eight bits times a scale of the dtype."""
    x, scale = kit.of("i8").random(e["cells"]), kit.random(1)
    y = kit.empty(e["cells"])
    return lambda: kit.torch.mul(x, scale, out=y)


def _embedding_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    return (sized.gather(e["rows"], e["cols"], dtype, e["table"]),)


def _embedding(kit: Kit, e: Mapping[str, int]) -> Run:
    """`rows` rows of `cols` cells, drawn evenly from `table` of them, others each time."""
    w = kit.random(e["table"], e["cols"])
    turns = cycle([kit.indices(e["table"], e["rows"]) for _ in range(DRAWS)])
    return lambda: kit.torch.nn.functional.embedding(next(turns), w)


def _bag_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    return (sized.gather(e["rows"], e["cols"], dtype, e["table"], bag=e["bag"]),)


def _bag(kit: Kit, e: Mapping[str, int]) -> Run:
    """`rows` sums of `bag` rows each, drawn as for `embedding`."""
    w = kit.random(e["table"], e["cols"])
    turns = cycle([kit.indices(e["table"], e["rows"], e["bag"]) for _ in range(DRAWS)])
    call = kit.torch.nn.functional.embedding_bag
    return lambda: call(next(turns), w, mode="sum")


def _gather_works(e: Extents, dtype: DType) -> tuple[Work, ...]:
    """`picks` single cells a row; the table of each is its row."""
    cell = dtype.bits / 8
    cells = e["rows"] * e["picks"]
    moved = sized.pointwise(cells, (dtype,), (dtype,), ops=0.0)
    whole = e["rows"] * e["cols"] * cell
    table = Operand(("i",), cell, np.minimum(cells * cell, whole), "streamed")
    places = Operand(("i",), 8.0, cells * 8.0, "streamed")
    operands = (table, places, moved.operands[-1])
    again = np.maximum(0.0, cells * cell - whole)
    detail = Lookup(cell + 0.0 * cells, whole, again)
    return (replace(moved, kernel="k.gather", operands=operands, flops=0 * cells, detail=detail),)


def _gather(kit: Kit, e: Mapping[str, int]) -> Run:
    """y[i, j] = x[i, where[i, j]], drawn evenly."""
    x, y = kit.random(e["rows"], e["cols"]), kit.empty(e["rows"], e["picks"])
    where = kit.indices(e["cols"], e["rows"], e["picks"])
    return lambda: kit.torch.gather(x, 1, where, out=y)


_CELLS = ("rows", "cols")

BENCHMARKS: dict[str, Benchmark] = {
    "linear": Benchmark(("m", "n", "k"), _linear_works, _linear, (*_PRODUCTS, "f8e4m3", "i8")),
    "matmul": Benchmark(
        ("b", "m", "n", "k"),
        lambda e, dtype: (sized.gemm(e["m"], e["n"], e["k"], dtype, b=e["b"]),),
        _matmul,
        _PRODUCTS,
    ),
    **{op: _convolution(op) for op in _CONVOLUTIONS},
    "attention": Benchmark(
        ("batch", "heads", "kv_heads", "queries", "keys", "head"),
        _attention_works(causal=False),
        _attention,
        ("f32", "f16", "bf16"),
    ),
    "attention_causal": Benchmark(
        ("batch", "heads", "kv_heads", "queries", "head"),
        _attention_works(causal=True),
        _attention,
        ("f32", "f16", "bf16"),
    ),
    **{op: _map(op) for op in _MAPS},
    "softmax": Benchmark(_CELLS, _rows("softmax", 0), _softmax, FLOATS),
    "layernorm": Benchmark(_CELLS, _rows("norm", 2), _norm, FLOATS),
    "sum": Benchmark(_CELLS, _rows("sum", 0), _sum, FLOATS),
    "cumsum": Benchmark(_CELLS, _cumsum_works, _cumsum, FLOATS),
    "topk": Benchmark((*_CELLS, "k"), _topk_works, _topk, FLOATS),
    "embedding": Benchmark(("rows", "cols", "table"), _embedding_works, _embedding, FLOATS),
    "embedding_bag": Benchmark(("rows", "cols", "table", "bag"), _bag_works, _bag, FLOATS),
    "gather": Benchmark((*_CELLS, "picks"), _gather_works, _gather, FLOATS),
    "concat": Benchmark(_CELLS, _concat_works, _concat, (*FLOATS, "i8")),
    "copy": Benchmark(_CELLS, _copy_works("copy"), _copy, (*FLOATS, "i8")),
    "transpose": Benchmark(_CELLS, _copy_works("transpose"), _transpose, (*FLOATS, "i8")),
    "cast": Benchmark(("cells",), _cast_works, _cast, ("f16", "bf16", "f8e4m3", "i8")),
    "quantise": Benchmark(("cells",), _quantise_works, _quantise, ("f32",)),
    "dequantise": Benchmark(("cells",), _dequantise_works, _dequantise, ("f32", "f16")),
    **LAYERS,
}

COLUMNS = tuple(dict.fromkeys(c for b in BENCHMARKS.values() for c in b.columns))
