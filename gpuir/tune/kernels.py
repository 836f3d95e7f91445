"""One kernel by its extents, apart from any model; or many of one kind, with arrays for numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuir.cost import routing, sized
from gpuir.cost.generated import cost_of as generated_cost
from gpuir.cost.lanes import lane_ops
from gpuir.cost.sheet import Number
from gpuir.cost.tile import best_tiles, cost_of
from gpuir.cost.work import Grouped, Operand, Staging, Work
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.notes import Cost, Tile
from gpuir.ir.types import DTYPES, DType
from gpuir.ops.scalar import SCALARS
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune.legal import check


@dataclass(frozen=True)
class Kernel:
    """A kernel: what it does (`work`), and, where a target was named, what it costs there.

    `tile` is the one that `cost` is of: the one given, or the one that the library's own kernel
    takes. Without a target both are None.
    """

    name: str
    work: Work
    target: Target | None = None
    tile: Tile | None = None
    cost: Cost | None = None

    def __repr__(self) -> str:
        dims = ", ".join(f"{d}={n}" for d, n in self.work.dims if not np.ndim(n))
        on = f" on {self.target.name}" if self.target else ""
        costs = f": {self.time_s:.4g} s, {self.tile}" if self.cost else ""
        return f"<Kernel {self.name} ({dims}){on}{costs}>"

    @property
    def time_s(self) -> float:
        """Seconds on the device, one launch included."""
        return self._costed.time_s

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Seconds between which 80 % of measurements are expected; None where nobody knows."""
        return self._costed.interval

    @property
    def bound(self) -> str:
        """The largest term: compute, memory or latency."""
        return self._costed.bound

    @property
    def _costed(self) -> Cost:
        if self.cost is None:
            raise UsageError(
                f"the kernel {self.name!r} has no cost: no target was given, or "
                "it describes many kernels",
                fix=f"gpuir.kernel({self.name!r}, ..., target='h100-sxm'), or gpuir.predict",
            )
        return self.cost


def kernel(
    name: str,
    *,
    dtype: str | DType = "f16",
    target: str | Target | None = None,
    tile: Tile | None = None,
    **extents: Any,
) -> Kernel:
    """A kernel of a kind by its extents; with a `target`, what it takes there.

    Without a `tile` it is the library's own kernel (cuBLAS, FlashAttention, PyTorch's), with one a
    kernel generated with that tile, as Triton or CUTLASS would. Extents may be arrays of one
    length: many kernels, for `gpuir.predict`.

    Kinds, their extents and what may be said besides:

    - `gemm`: m n k; b=1 weight= out= math= (dtypes), epilogue=("bias", "gelu"), scales="" ("row" or
      "block"), layout="nn" ("t": that operand lies transposed)
    - `conv`: batch channels size filters window (a pair, or one number for both); stride=1
      dilation=1 padding=0 groups=1
    - `attention`: batch heads queries keys head; kv_heads= value= causal=False window=0
    - `rows`: rows columns; of="softmax" (or "norm", "rms", "sum")
    - `map`: cells; inputs=1 fn="add"
    - `experts`: tokens hidden inter topk experts; gated=True weight= skew=0
    - `grouped`: rows n k groups; weight= out=, scales="": one product a group of weights, whose
      rows are handed out at random

    UsageError for another kind or extent, and for a tile that is not legal on the target.
    """
    if name not in KINDS:
        raise UsageError(f"no kind of kernel has the name {name!r}", fix=nearest(name, KINDS))
    made, needed, options = KINDS[name]
    unknown = [e for e in extents if e not in needed + options]
    missing = [e for e in needed if e not in extents]
    if unknown or missing:
        raise UsageError(
            f"this argument does not describe a {name}",
            expected=" ".join(needed) + (f", and perhaps {' '.join(options)}" if options else ""),
            found=" ".join(extents),
            fix=nearest(unknown[0], needed + options) if unknown else f"give {missing[0]}=",
        )
    found = Kernel(name, made(dtype=dtype_of(dtype), **extents))
    return found if target is None else costed(found, target, tile)


def costed(k: Kernel, target: str | Target, tile: Tile | None = None) -> Kernel:
    """The kernel with its cost on a target, under a tile or as the library would run it. Many
    kernels in one have none: `gpuir.predict` gives arrays."""
    device = load_target(target) if isinstance(target, str) else target
    if np.ndim(k.work.points):
        if tile is not None:
            raise UsageError(
                f"{k.name} describes many kernels, so it has no single tile",
                fix="use gpuir.predict(kernels, tiles, target)",
            )
        return replace(k, target=device)
    if tile is not None:
        check(k.work, tile, device, k.name)
        return replace(k, target=device, tile=tile, cost=generated_cost(k.work, tile, device))
    taken = best_tiles({k.work: k.name}, device)[k.work]
    return replace(k, target=device, tile=taken, cost=cost_of(k.work, taken, device))


def dtype_of(name: str | DType) -> DType:
    """A dtype by its name; UsageError where there is none."""
    if isinstance(name, DType):
        return name
    if name not in DTYPES:
        raise UsageError(f"no dtype {name!r}", fix=nearest(name, DTYPES))
    return DTYPES[name]


# ---------------------------------------------------------------------------- kinds


def _gemm(
    *,
    m: Number,
    n: Number,
    k: Number,
    dtype: DType,
    b: Number = 1,
    layout: str = "nn",
    epilogue: Sequence[str] = (),
    scales: str = "",
    **dtypes: str | DType,
) -> Work:
    if layout not in ("nn", "nt", "tn", "tt"):
        raise UsageError(f"no layout {layout!r}", expected="nn, nt, tn or tt")
    kind = _scaled(scales)
    fns = [fn for fn in epilogue if fn != "bias"]
    for fn in fns:
        if fn not in SCALARS:
            raise UsageError(f"no epilogue {fn!r}", fix=nearest(fn, [*SCALARS, "bias"]))
    found = sized.gemm(
        m,
        n,
        k,
        dtype,
        b=b,
        bias="bias" in epilogue,
        **{name: dtype_of(d) for name, d in dtypes.items()},
    )
    ops = b * m * n * sum(lane_ops(fn, dtype) for fn in fns)
    operands = list(found.operands)
    for i, letter in enumerate(layout):
        if letter == "t":
            batch, outer, inner = operands[i].dims
            operands[i] = replace(operands[i], dims=(batch, inner, outer))
    return replace(
        found,
        operands=tuple(operands),
        lane_ops=found.lane_ops + ops,
        flops=found.flops + ops,
        kind=kind,
    )


def _scaled(scales: str) -> str:
    """What a product whose operands have scales is called."""
    if scales not in ("", "row", "block"):
        raise UsageError(f"no scales {scales!r}", expected='"", "row" or "block"')
    return f"{scales} scales" if scales else ""


def _conv(*, dtype: DType, **extents: Any) -> Work:
    batch, channels, size, filters, window = (
        extents.pop(e) for e in ("batch", "channels", "size", "filters", "window")
    )
    size, window = ((n, n) if isinstance(n, int) else n for n in (size, window))
    return sized.conv(batch, channels, size, filters, window, dtype, **extents)


def _attention(
    *,
    batch: Number,
    heads: Number,
    queries: Number,
    keys: Number,
    head: Number,
    dtype: DType,
    **more: Any,
) -> Work:
    return sized.attention(batch, heads, queries, keys, head, dtype, **more)


def _rows(*, rows: Number, columns: Number, dtype: DType, of: str = "softmax") -> Work:
    if of not in ("softmax", "norm", "rms", "sum"):
        raise UsageError(
            f"the kind of rows is unknown: {of!r}", expected="softmax, norm, rms or sum"
        )
    return sized.rows(rows, columns, dtype, of)


def _map(*, cells: Number, dtype: DType, inputs: int = 1, fn: str = "add") -> Work:
    if fn not in SCALARS:
        raise UsageError(f"no function {fn!r}", fix=nearest(fn, SCALARS))
    return sized.mapped(fn, cells, [dtype] * inputs, dtype)


def _experts(
    *,
    tokens: Number,
    hidden: Number,
    inter: Number,
    topk: Number,
    experts: Number,
    dtype: DType,
    weight: str | DType | None = None,
    **more: Any,
) -> Work:
    stored = None if weight is None else dtype_of(weight)
    return routing.mixture(tokens, hidden, inter, topk, experts, dtype, weight=stored, **more)


def _grouped(
    *,
    rows: Number,
    n: Number,
    k: Number,
    groups: Number,
    dtype: DType,
    scales: str = "",
    **dtypes: str | DType,
) -> Work:
    named: dict[str, Any] = {name: dtype_of(d) for name, d in dtypes.items()}
    found = sized.gemm(rows / groups, n, k, dtype, b=groups, **named)
    active = 1 - np.exp(-rows / groups)
    operands = list(found.operands)
    operands[1] = replace(operands[1], nbytes=operands[1].nbytes * active)
    return replace(
        found,
        operands=tuple(operands),
        detail=Grouped(active),
        kind=_scaled(scales),
    )


Made = Callable[..., Work]
KINDS: Mapping[str, tuple[Made, tuple[str, ...], tuple[str, ...]]] = {
    "gemm": (
        _gemm,
        ("m", "n", "k"),
        ("b", "layout", "weight", "out", "math", "epilogue", "scales"),
    ),
    "conv": (
        _conv,
        ("batch", "channels", "size", "filters", "window"),
        ("stride", "dilation", "padding", "groups"),
    ),
    "attention": (
        _attention,
        ("batch", "heads", "queries", "keys", "head"),
        ("value", "kv_heads", "causal", "window"),
    ),
    "rows": (_rows, ("rows", "columns"), ("of",)),
    "map": (_map, ("cells",), ("inputs", "fn")),
    "experts": (
        _experts,
        ("tokens", "hidden", "inter", "topk", "experts"),
        ("weight", "gated", "skew"),
    ),
    "grouped": (_grouped, ("rows", "n", "k", "groups"), ("weight", "out", "scales")),
}


# ---------------------------------------------------------------------------- of one's own


def nest(
    name: str,
    dims: Mapping[str, Number],
    *,
    reads: Sequence[tuple[str, ...]],
    writes: Sequence[tuple[str, ...]],
    reduced: Sequence[str] = (),
    dtype: str | DType = "f32",
    ops: float = 1.0,
    products: bool = False,
    kept: Sequence[int] = (),
    dtypes: Mapping[int, str | DType] | None = None,
) -> Kernel:
    """A loop nest of one's own, for a generated kernel: a `Kernel` of no library.

    `dims` are its loops with their extents, outermost first. Each operand is a tuple of its axes,
    outermost in memory first; an axis is a loop, or a sum of loops with steps: a stencil reads
    `("y+i", "x+j")`, a dilated one `("y+2i", "x+2j")`. `reduced` loops are summed over. Each point
    of the nest takes `ops` instructions of the lanes (a multiply-add is one), or, for `products`,
    a multiply-add of the matrix units. `kept` are the reads that lie in constant memory; `dtypes`
    is by operand, reads first, where it is not `dtype`.
    """
    plain = dtype_of(dtype)
    operands: list[Operand] = []
    for i, (axes, staging) in enumerate(
        [*((a, "staged") for a in reads), *((a, "written") for a in writes)]
    ):
        cell = dtype_of((dtypes or {}).get(i, plain)).bits / 8
        cells: Number = 1.0
        for axis in axes:
            cells = cells * sized.reach(axis, dims, name)
        how: Staging = "kept" if i in kept else staging  # pyright: ignore[reportAssignmentType]
        operands.append(Operand(tuple(axes), cell, cells * cell, how))
    points: Number = 1.0
    for extent in dims.values():
        points = points * extent
    return Kernel(
        name,
        Work(
            kernel="nest",
            dims=tuple(dims.items()),
            reduced=tuple(reduced),
            operands=tuple(operands),
            flops=(2.0 if products else 1.0) * points * ops,
            products=2.0 * points if products else 0.0,
            lane_ops=0.0 if products else points * ops,
            dtype=plain,
            pipe="tensor" if products else "vector",
            kind=name,
        ),
    )
