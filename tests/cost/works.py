"""Tables of works, drawn: a row a kernel, of every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from hypothesis import strategies as st

from gpuir.cost import routing, sized
from gpuir.cost.sheet import Number
from gpuir.cost.work import Detail, Work
from gpuir.ir.types import bf16, f8e4m3, f16, f32, i8, tf32

EXTENT = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 512, 777, 4096]))
HEAD = st.sampled_from([16, 64, 128, 256])
FEW = st.integers(1, 8)


@dataclass(frozen=True)
class Kind:
    """How to build a work, and what its numbers are drawn from."""

    build: Callable[..., Work]
    numbers: tuple[st.SearchStrategy[int], ...]


def _grouped(m: Number, n: Number, b: Number, dtype=f16) -> Work:
    return sized.conv(b, 16 * m, (14, 14), 16 * n, (3, 3), dtype)


KINDS: dict[str, Kind] = {
    "f32 gemm": Kind(lambda m, n, k: sized.gemm(m, n, k, f32), (EXTENT,) * 3),
    "f32 bmm": Kind(lambda b, m, n, k: sized.gemm(m, n, k, f32, b=b), (FEW, *(EXTENT,) * 3)),
    "tf32 gemm": Kind(lambda m, n, k: sized.gemm(m, n, k, f32, math=tf32), (EXTENT,) * 3),
    "f16 gemm": Kind(lambda m, n, k: sized.gemm(m, n, k, f16, epilogue=("bias",)), (EXTENT,) * 3),
    "f16 bmm": Kind(lambda b, m, n, k: sized.gemm(m, n, k, f16, b=b), (FEW, *(EXTENT,) * 3)),
    "f8 gemm": Kind(lambda m, n, k: sized.gemm(m, n, k, f8e4m3, out=bf16), (EXTENT,) * 3),
    "i8 weights": Kind(lambda m, n, k: sized.gemm(m, n, k, f16, weight=i8), (EXTENT,) * 3),
    "top k": Kind(lambda r, n, k: sized.top_k(r, n, np.minimum(k, n), f32), (FEW, EXTENT, EXTENT)),
    "f16 conv": Kind(_grouped, (FEW, FEW, FEW)),
    "f32 conv": Kind(lambda m, n, b: _grouped(m, n, b, f32), (FEW, FEW, FEW)),
    "strided conv": Kind(
        lambda c, n, b: sized.conv(b, c, (57, 57), 8 * n, (7, 7), f16, stride=2, padding=3),
        (EXTENT, EXTENT, FEW),
    ),
    "depthwise conv": Kind(
        lambda c, b: sized.conv(b, c, (28, 28), c, (3, 3), f16, padding=1, groups=c), (EXTENT, FEW)
    ),
    "prefill": Kind(
        lambda b, h, s, e: sized.attention(b, h, s, s, e, f16, causal=True),
        (FEW, FEW, EXTENT, HEAD),
    ),
    "decode": Kind(
        lambda b, g, s, e: sized.attention(b, 4 * g, 1, s, e, bf16, kv_heads=g),
        (FEW, FEW, EXTENT, HEAD),
    ),
    "window": Kind(
        lambda h, s, e: sized.attention(2, h, s, s, e, f16, causal=True, window=100),
        (FEW, EXTENT, HEAD),
    ),
    "add": Kind(lambda n, m: sized.pointwise(n * m, (f32, f32), (f32,)), (EXTENT, EXTENT)),
    "gelu": Kind(lambda n, m: sized.pointwise(n * m, (f16,), (f16,), ops=26.0), (EXTENT, EXTENT)),
    "copy": Kind(
        lambda n, m: sized.pointwise(n * m, (f16,), (f16,), kind="copy"), (EXTENT, EXTENT)
    ),
    "softmax": Kind(lambda n, m: sized.rows(n, m, f32, "softmax"), (EXTENT, EXTENT)),
    "norm": Kind(lambda n, m: sized.rows(n, m, f16, "norm", parameters=2), (EXTENT, EXTENT)),
    "sum": Kind(lambda n, m: sized.rows(n, m, f32, "sum"), (EXTENT, EXTENT)),
    "gather": Kind(lambda n, m, t: sized.gather(n, m, f32, t), (EXTENT, EXTENT, EXTENT)),
    **{
        f"moe {stack}": Kind(
            lambda m, h, stack=stack: routing.mixture(m, 64 * h, 128, 2, 8, bf16, library=stack),
            (EXTENT, FEW),
        )
        for stack in ("cutlass", "sglang", "trtllm")
    },
}


@st.composite
def tables(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Work]:
    """One work of a few kernels, then each of them by itself."""
    kind = KINDS[draw(st.sampled_from(kinds))]
    row = st.tuples(*kind.numbers)
    rows = draw(st.lists(row, min_size=1, max_size=4))
    columns = np.array(rows, float).T
    return [kind.build(*columns), *(kind.build(*map(float, r)) for r in rows)]


def flat(x: object, name: str = "") -> dict[str, float]:
    """The numbers of a detail, by name."""
    match x:
        case Detail():
            parts = [(f.name, getattr(x, f.name)) for f in fields(x)]
        case tuple():
            parts = [(str(i), part) for i, part in enumerate(x)]
        case None | str():
            return {}
        case _:
            return {name: x}
    return {k: v for key, part in parts for k, v in flat(part, f"{name}.{key}").items()}
