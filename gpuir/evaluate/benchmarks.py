"""Operators that can be timed: their extents, the kernels they run, and how torch runs them.

What is measured and what is predicted of a row come from the same entry of `BENCHMARKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from gpuir.cost import work
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.ir.types import DTYPES, DType, bf16, f32, i32

DRAWS = 8  # of indices, taken in turn, so that a cache does not hold what they ask for
Extents = Mapping[str, Number]
Run = Callable[[], Any]


@dataclass(frozen=True)
class Kit:
    """Makes a benchmark's tensors: torch, a dtype by its name here, and a device of torch's."""

    torch: Any
    dtype: str
    device: str

    @property
    def kind(self) -> Any:
        """torch's dtype."""
        name = {"tf32": "f32"}.get(self.dtype, self.dtype)
        return getattr(self.torch, _TORCH_NAMES[name])

    def random(self, *shape: int) -> Any:
        """Normal numbers; whole ones from -8 to 7 for an integer dtype."""
        if self.dtype.startswith("i"):
            return self.torch.randint(-8, 8, shape, dtype=self.kind, device=self.device)
        wide = self.torch.randn(shape, dtype=self.torch.float32, device=self.device)
        return wide.to(self.kind)

    def indices(self, count: int, most: int) -> Any:
        return self.torch.randint(0, most, (count,), device=self.device)


_TORCH_NAMES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "i8": "int8",
}


@dataclass(frozen=True)
class Benchmark:
    """An operator: `columns` names its extents, `works` are the kernels of so many rows of them,
    `make` gives a call that runs one."""

    columns: tuple[str, ...]
    works: Callable[[Extents, DType, bool], tuple[Work, ...]]
    make: Callable[[Kit, Mapping[str, int]], Run]
    dtypes: tuple[str, ...] = ("f32", "tf32", "f16", "bf16", "f64")


def works_of(op: str, dtype: str, extents: Extents) -> tuple[Work, ...]:
    """The kernels that rows of an operator run. `tf32` is f32 with products in TF32."""
    tf32 = dtype == "tf32"
    return BENCHMARKS[op].works(extents, f32 if tf32 else DTYPES[dtype], tf32)


def is_narrow(e: Extents) -> Number:
    """Convolutions of so few channels a group that their kernels are of another kind
    (`cost.work.conv`): rows of both kinds cannot stand in one work."""
    depth = e["channels"] / e["groups"] * e["window"] ** 2
    return np.minimum(e["filters"] / e["groups"], depth) < 8


# ---------------------------------------------------------------------------- products


def _linear_works(e: Extents, dtype: DType, tf32: bool) -> tuple[Work, ...]:
    out = {"i8": i32, "f8e4m3": bf16}.get(dtype.name, dtype)
    return (work.gemm(e["m"], e["n"], e["k"], dtype, out=out, tf32=tf32),)


def _linear(kit: Kit, e: Mapping[str, int]) -> Run:
    """x[m, k] · w[n, k]ᵀ, as a linear layer without bias stores its weights."""
    x, w = kit.random(e["m"], e["k"]), kit.random(e["n"], e["k"]).t()
    if kit.dtype == "i8":
        return lambda: kit.torch._int_mm(x, w)
    if kit.dtype == "f8e4m3":
        one = kit.torch.ones((), device=kit.device)
        out = kit.torch.bfloat16
        return lambda: kit.torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=out)
    y = kit.torch.empty(e["m"], e["n"], dtype=kit.kind, device=kit.device)
    return lambda: kit.torch.mm(x, w, out=y)


def _matmul(kit: Kit, e: Mapping[str, int]) -> Run:
    """a[b, m, k] · b[b, k, n], all row-major."""
    a, b = kit.random(e["b"], e["m"], e["k"]), kit.random(e["b"], e["k"], e["n"])
    c = kit.torch.empty(e["b"], e["m"], e["n"], dtype=kit.kind, device=kit.device)
    return lambda: kit.torch.bmm(a, b, out=c)


def _conv_works(e: Extents, dtype: DType, tf32: bool) -> tuple[Work, ...]:
    size, window = e["size"], e["window"]
    found = work.conv(
        e["batch"],
        e["channels"],
        (size, size),
        e["filters"],
        (window, window),
        dtype,
        stride=e["stride"],
        padding=np.floor_divide(window, 2),
        groups=e["groups"],
    )
    return (found,)


def _conv(kit: Kit, e: Mapping[str, int]) -> Run:
    """Square windows, padded by half; narrow dtypes with channels last, as libraries like them."""
    x = kit.random(e["batch"], e["channels"], e["size"], e["size"])
    w = kit.random(e["filters"], e["channels"] // e["groups"], e["window"], e["window"])
    if kit.dtype in ("f16", "bf16"):
        x, w = (t.contiguous(memory_format=kit.torch.channels_last) for t in (x, w))
    conv, padding = kit.torch.nn.functional.conv2d, e["window"] // 2
    return lambda: conv(x, w, stride=e["stride"], padding=padding, groups=e["groups"])


def _attention_works(e: Extents, dtype: DType, tf32: bool) -> tuple[Work, ...]:
    found = work.attention(
        e["batch"],
        e["heads"],
        e["queries"],
        e["keys"],
        e["head"],
        dtype,
        kv_heads=e["kv_heads"],
    )
    return (found,)


def _causal_works(e: Extents, dtype: DType, tf32: bool) -> tuple[Work, ...]:
    found = work.attention(
        e["batch"],
        e["heads"],
        e["queries"],
        e["queries"],
        e["head"],
        dtype,
        kv_heads=e["kv_heads"],
        causal=True,
    )
    return (found,)


def _attention(kit: Kit, e: Mapping[str, int]) -> Run:
    """Torch's own choice of kernel; with `queries` alone, causal self-attention."""
    keys = e.get("keys", e["queries"])
    q = kit.random(e["batch"], e["heads"], e["queries"], e["head"])
    k, v = (kit.random(e["batch"], e["kv_heads"], keys, e["head"]) for _ in range(2))
    grouped = e["heads"] != e["kv_heads"]
    attend = kit.torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal="keys" not in e, enable_gqa=grouped)


# ---------------------------------------------------------------------------- maps and rows

# operator → tensors read, the scalar function whose instructions it costs
_MAPS = {
    "add": (2, "add"),
    "mul": (2, "mul"),
    "relu": (1, "relu"),
    "gelu": (1, "gelu"),
    "silu": (1, "silu"),
    "tanh": (1, "tanh"),
    "exp": (1, "exp"),
}


def _map(op: str) -> Benchmark:
    reads, function = _MAPS[op]

    def works(e: Extents, dtype: DType, tf32: bool) -> tuple[Work, ...]:
        ops = work.LANE_OPS.get(function, 1.0)
        return (work.pointwise(e["cells"], (dtype,) * reads, (dtype,), ops=ops),)

    def make(kit: Kit, e: Mapping[str, int]) -> Run:
        xs = [kit.random(e["cells"]) for _ in range(reads)]
        y, aten = kit.torch.empty_like(xs[0]), kit.torch.ops.aten
        if op == "relu":  # torch.relu makes its result anew each time
            return lambda: aten.clamp_min.out(*xs, 0, out=y)
        call = getattr(aten, op).out
        return lambda: call(*xs, out=y)

    return Benchmark(("cells",), works, make, _FLOATS)


_FLOATS = ("f32", "f16", "bf16", "f64")


def _rows(kind: str, parameters: int) -> Callable[[Extents, DType, bool], tuple[Work, ...]]:
    return lambda e, dtype, tf32: (
        work.rows(e["rows"], e["cols"], dtype, kind, parameters=parameters),
    )


def _softmax(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y, call = kit.torch.empty_like(x), kit.torch.ops.aten._softmax.out
    return lambda: call(x, -1, False, out=y)


def _norm(kit: Kit, e: Mapping[str, int]) -> Run:
    x, w, b = kit.random(e["rows"], e["cols"]), kit.random(e["cols"]), kit.random(e["cols"])
    return lambda: kit.torch.nn.functional.layer_norm(x, (e["cols"],), w, b)


def _sum(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y = kit.torch.empty(e["rows"], dtype=kit.kind, device=kit.device)
    return lambda: kit.torch.sum(x, -1, out=y)


# ---------------------------------------------------------------------------- moving data


def _copy_works(kind: str) -> Callable[[Extents, DType, bool], tuple[Work, ...]]:
    return lambda e, dtype, tf32: (
        work.pointwise(e["rows"] * e["cols"], (dtype,), (dtype,), ops=0.0, kind=kind),
    )


def _copy(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y = kit.torch.empty_like(x)
    return lambda: y.copy_(x)


def _transpose(kit: Kit, e: Mapping[str, int]) -> Run:
    x = kit.random(e["rows"], e["cols"])
    y = kit.torch.empty(e["cols"], e["rows"], dtype=kit.kind, device=kit.device)
    return lambda: y.copy_(x.t())


def _cast_works(e: Extents, dtype: DType, tf32: bool) -> tuple[Work, ...]:
    return (work.pointwise(e["cells"], (f32,), (dtype,), ops=1.0),)


def _cast(kit: Kit, e: Mapping[str, int]) -> Run:
    """From f32."""
    x = Kit(kit.torch, "f32", kit.device).random(e["cells"])
    y = kit.torch.empty(e["cells"], dtype=kit.kind, device=kit.device)
    return lambda: y.copy_(x)


def _embedding_works(e: Extents, dtype: DType, tf32: bool) -> tuple[Work, ...]:
    return (work.gather(e["rows"], e["cols"], dtype, e["table"]),)


def _embedding(kit: Kit, e: Mapping[str, int]) -> Run:
    """`rows` rows of `cols` cells, drawn evenly from `table` of them, others each time."""
    w = kit.random(e["table"], e["cols"])
    turns = cycle([kit.indices(e["rows"], e["table"]) for _ in range(DRAWS)])
    return lambda: kit.torch.nn.functional.embedding(next(turns), w)


_PRODUCTS = ("f32", "tf32", "f16", "bf16", "f64")
_CELLS = ("rows", "cols")

BENCHMARKS: dict[str, Benchmark] = {
    "linear": Benchmark(("m", "n", "k"), _linear_works, _linear, (*_PRODUCTS, "f8e4m3", "i8")),
    "matmul": Benchmark(
        ("b", "m", "n", "k"),
        lambda e, dtype, tf32: (work.gemm(e["m"], e["n"], e["k"], dtype, b=e["b"], tf32=tf32),),
        _matmul,
        _PRODUCTS,
    ),
    "conv": Benchmark(
        ("batch", "channels", "size", "filters", "window", "stride", "groups"),
        _conv_works,
        _conv,
        _PRODUCTS,
    ),
    "attention": Benchmark(
        ("batch", "heads", "kv_heads", "queries", "keys", "head"),
        _attention_works,
        _attention,
        ("f32", "f16", "bf16"),
    ),
    "attention_causal": Benchmark(
        ("batch", "heads", "kv_heads", "queries", "head"),
        _causal_works,
        _attention,
        ("f32", "f16", "bf16"),
    ),
    **{op: _map(op) for op in _MAPS},
    "softmax": Benchmark(_CELLS, _rows("softmax", 0), _softmax, _FLOATS),
    "layernorm": Benchmark(_CELLS, _rows("norm", 2), _norm, _FLOATS),
    "sum": Benchmark(_CELLS, _rows("sum", 0), _sum, _FLOATS),
    "embedding": Benchmark(("rows", "cols", "table"), _embedding_works, _embedding, _FLOATS),
    "copy": Benchmark(_CELLS, _copy_works("copy"), _copy, (*_FLOATS, "i8")),
    "transpose": Benchmark(_CELLS, _copy_works("transpose"), _transpose, (*_FLOATS, "i8")),
    "cast": Benchmark(("cells",), _cast_works, _cast, ("f16", "bf16", "f8e4m3", "i8")),
}

COLUMNS = tuple(dict.fromkeys(c for b in BENCHMARKS.values() for c in b.columns))
