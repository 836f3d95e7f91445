"""The call of `gpuir.kernel` that describes a work: what a user types to have its kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from gpuir.cost.lanes import OWN_LANE_OPS, lane_ops
from gpuir.cost.nest import PARTS, PLAIN, Tiles
from gpuir.cost.routing import Routed
from gpuir.cost.sheet import Number
from gpuir.cost.steps import RoutineSteps
from gpuir.cost.work import ConvShape, Grouped, Heads, Lookup, Timed, Work
from gpuir.ir.errors import GpuirError
from gpuir.ir.types import DType, bf16, f8e4m3, f16, f32, f64, i4, i32
from gpuir.ops.scalar import SCALARS
from gpuir.tune.kernels import CHOICES, kernel

Arguments = Mapping[str, Any]
OF_BITS = {4: i4, 8: f8e4m3, 16: f16, 32: f32, 64: f64}  # a work knows the bits of operands alone
SAME = 1e-12  # relative: the order of a sum or two
SKEWS = (0.0, 1.01, 1.2)  # of popularity, as mixtures of experts are measured


def call_of(work: Work, target: str = "") -> str:
    """`gpuir.kernel(...)`, whose work is equal to this one of one kernel; empty where none is."""
    for name, given in _candidates(work):
        given = {n: _plain(value) for n, value in given.items()}
        try:
            found = kernel(name, **given).work
        except (GpuirError, ZeroDivisionError):
            continue
        if is_same(found, work):
            words = {**given, "target": target} if target else given
            text = ", ".join(f"{n}={value!r}" for n, value in words.items())
            return f"gpuir.kernel({name!r}, {text})"
    return ""


def tiles_call(tiles: Tiles) -> str:
    """`gpuir.Tiles(...)` of one tile, without what it is where nothing is said."""
    usual = Tiles({})
    given = {name: _plain(float(getattr(tiles, name))) for name in PLAIN}
    words: dict[str, Any] = {n: value for n, value in given.items() if value != getattr(usual, n)}
    for part in PARTS:
        words[part] = {of: _plain(float(n)) for of, n in getattr(tiles, part).items()}
    dims = {d: _plain(float(n)) for d, n in tiles.dims.items()}
    said = (f"{name}={value!r}" for name, value in words.items() if value != {})
    return f"gpuir.Tiles({', '.join((repr(dims), *said))})"


def why_none(work: Work) -> str:
    """Why `gpuir.kernel` does not describe a work."""
    if isinstance(work.detail, Timed):
        return "gpuir.kernel has no product that runs again and again, as this was measured"
    if isinstance(work.detail, Routed) and work.detail.again:
        return "gpuir.kernel has no experts that run again and again, as these were measured"
    return f"no kind of gpuir.kernel is this {work.sort}"


def is_same(a: Work, b: Work) -> bool:
    """Whether two works of one kernel are equal, but for the last digits."""
    return a.likeness == b.likeness and np.allclose(_numbers(a), _numbers(b), rtol=SAME, atol=0.0)


def _numbers(work: Work) -> list[float]:
    found: list[Number] = []
    work.each(lambda n: found.append(n) or n)
    return [float(n) for n in found]


def _plain(value: Any) -> Any:
    """An argument as it is typed: whole numbers as such, dtypes by name."""
    if isinstance(value, DType):
        return value.name
    if isinstance(value, tuple):
        return tuple(_plain(n) for n in value)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float):
        near = round(value)
        return near if abs(value - near) <= 1e-9 * max(near, 1) else value
    return value


def _candidates(work: Work) -> Iterator[tuple[str, Arguments]]:
    """Kinds and arguments of which one may be it."""
    math = {"math": work.math} if work.math else {}
    read = READERS.get(work.kernel)
    for name, given in read(work) if read else ():
        yield name, {"dtype": work.dtype, **math, **given}


def _but(given: Arguments, usual: Arguments) -> dict[str, Any]:
    """Without what a call takes where nothing is said."""
    return {n: value for n, value in given.items() if n not in usual or usual[n] != value}


def _of_bits(cell_bytes: Number, dtype: DType) -> DType:
    """A dtype of so many bytes a cell: the one that is multiplied, if it may be."""
    bits = round(float(cell_bytes) * 8)
    return dtype if bits == dtype.bits else OF_BITS.get(bits, dtype)


def _gemm(work: Work) -> Iterator[tuple[str, Arguments]]:
    e, of = work.extents, work.dtype
    left, right, *rest, result = work.operands
    if isinstance(work.detail, Timed) or work.kind not in ("", "row scales", "block scales"):
        return
    given = {
        "weight": _of_bits(right.cell_bytes, of),
        "scales": work.kind.partition(" scales")[0],
        "epilogue": ("bias",) if any(o.dims == ("n",) for o in rest) else (),
        "group": next((2.0 / float(o.cell_bytes) for o in rest if o.dims == ("b", "k", "n")), 0),
        "b": e["b"],
        "layout": "".join("nt"[o.dims[1] != first] for o, first in ((left, "m"), (right, "k"))),
    }
    usual = {"weight": of, "scales": "", "epilogue": (), "group": 0, "b": 1, "layout": "nn"}
    sizes = {"m": e["m"], "n": e["n"], "k": e["k"]}
    grouped = isinstance(work.detail, Grouped)
    for out in dict.fromkeys((_of_bits(result.cell_bytes, of), f32, bf16, i32)):
        if out.bits != round(float(result.cell_bytes) * 8):
            continue
        options = _but({**given, "out": out}, {**usual, "out": of})
        if grouped:
            shape = {"rows": e["m"] * e["b"], "n": e["n"], "k": e["k"], "groups": e["b"]}
            kept = {n: options[n] for n in ("weight", "out", "scales") if n in options}
            yield "grouped", shape | kept
        else:
            yield "gemm", {**sizes, **options}


def _conv(work: Work) -> Iterator[tuple[str, Arguments]]:
    """Images and windows have equal extents along each axis; which, and how far they are padded,
    is looked for."""
    c, e = work.detail_as(ConvShape), work.extents
    groups, image = e["b"], work.operands[0]
    channels, filters = groups * e["k"] / c.taps, groups * e["n"]
    if c.transposed:
        channels, filters = groups * e["k"], groups * e["n"] / c.taps
    batch = image.nbytes / (channels * c.cells * image.cell_bytes)
    given = {"stride": c.stride, "dilation": c.dilation, "groups": groups, "library": c.library}
    given |= {"epilogue": ("bias",) if len(work.operands) > 3 else (), "transposed": c.transposed}
    usual = {"stride": 1, "dilation": 1, "groups": 1, "library": "", "epilogue": ()}
    for axes, padding in product((2, 1, 3), range(int(c.widest) * int(c.dilation) + 1)):
        size = round(float(c.cells) ** (1 / axes))
        if size**axes != c.cells or c.widest**axes != c.taps:
            continue
        shape = {"batch": batch, "channels": channels, "size": (size,) * axes, "filters": filters}
        shape["window"] = (int(c.widest),) * axes
        some = _but(given | {"padding": padding}, usual | {"padding": 0, "transposed": False})
        yield "conv", shape | some


def _attention(work: Work) -> Iterator[tuple[str, Arguments]]:
    a, e, of = work.detail_as(Heads), work.extents, work.dtype
    _, keys, values, result = work.operands
    shape = {"batch": e["b"], "heads": e["h"], "queries": e["s"], "keys": e["d"], "head": a.head}
    given = {
        "kv_heads": a.kv_heads,
        "value": e["e"],
        "cache": _of_bits(keys.cell_bytes / a.head, of),
        "out": _of_bits(result.cell_bytes, of),
        "shared": not values.cell_bytes,
        "append": bool(a.append),
        "paged": a.paged,
        "window": a.reach if a.windowed else 0,
        "library": "cudnn" if a.call == "cudnn" else "sdpa" if a.call else work.kind,
    }
    usual = {"kv_heads": e["h"], "value": a.head, "cache": of, "out": of, "shared": False}
    usual |= {"append": False, "paged": False, "window": 0, "library": ""}
    some = _but(given, usual)
    yield "attention", {**shape, **some}
    yield "attention", {**shape, "causal": True, **some}


def _rows(work: Work) -> Iterator[tuple[str, Arguments]]:
    parameters = sum(o.dims == ("r",) for o in work.operands)
    if "o" in work.extents and work.kind in CHOICES["rows", "of"]:
        shape = {"rows": work.extents["o"], "columns": work.extents["r"], "of": work.kind}
        yield "rows", shape | _but({"parameters": parameters}, {"parameters": 0})


@cache
def _functions(ops: float, dtype: DType) -> tuple[str, ...]:
    """Functions that take so many instructions a cell, the usual ones first."""
    names = dict.fromkeys(("add", "relu", "gelu", "silu", *SCALARS))
    return tuple(n for n in names if n in SCALARS and abs(lane_ops(n, dtype) - ops) < 1e-9)


def _map(work: Work) -> Iterator[tuple[str, Arguments]]:
    cells = work.extents.get("i", 0)
    reads = [o for o in work.operands if o.staging == "streamed"]
    writes = [o for o in work.operands if o.staging == "written"]
    if len(writes) != 1 or len({float(o.cell_bytes) for o in reads}) > 1 or not cells:
        return
    out = _of_bits(writes[0].cell_bytes, work.dtype)
    of = _of_bits(reads[0].cell_bytes, work.dtype) if reads else out
    given = {"inputs": len(reads), "out": out, "of": work.kind}
    some = _but(given, {"inputs": 1, "out": of, "of": ""})
    ops = float(work.lane_ops / cells) - OWN_LANE_OPS
    for fn in _functions(ops, of):
        yield "map", {"dtype": of, "cells": cells, **some, **_but({"fn": fn}, {"fn": "add"})}


def _experts(work: Work) -> Iterator[tuple[str, Arguments]]:
    r, e = work.detail_as(Routed), work.extents
    if r.again:
        return
    weight = work.operands[1]
    library, scheme = work.kind.split(" ", 1)
    experts = r.sent / e["m"]
    shape = {"tokens": r.tokens, "hidden": e["k"], "inter": e["n"], "topk": r.sent / r.tokens}
    given = {
        "ranks": experts / e["b"],
        "gated": r.into == 2,
        "library": library,
        "scales": "block" if " block" in scheme else "",
        "weight": _of_bits(weight.cell_bytes, work.dtype),
    }
    usual = {"ranks": 1, "gated": True, "library": "cutlass", "scales": "", "weight": work.dtype}
    for skew in SKEWS:
        some = _but(given | {"skew": skew}, usual | {"skew": 0.0})
        yield "experts", {**shape, "experts": experts, **some}


def _gather(work: Work) -> Iterator[tuple[str, Arguments]]:
    if not isinstance(work.detail, Lookup) or len(work.operands) < 3:
        return
    found, indices, result = work.operands
    width = work.detail.row / result.cell_bytes
    rows = work.extents["i"] / width
    shape = {"rows": rows, "width": width, "table": work.detail.table / work.detail.row}
    bag = indices.nbytes / 8.0 / rows if found.cell_bytes == result.cell_bytes else 1
    yield "gather", shape | _but({"bag": bag}, {"bag": 1.0})


def _top_k(work: Work) -> Iterator[tuple[str, Arguments]]:
    if work.kind == "topk" and isinstance(work.detail, RoutineSteps):
        found, rows = work.operands[1], work.detail.pieces
        shape = {"rows": rows, "columns": work.extents["i"] / rows}
        yield "topk", {**shape, "k": found.nbytes / found.cell_bytes / rows}


READERS = {
    "k.gemm": _gemm,
    "k.conv": _conv,
    "k.attention": _attention,
    "k.reduce": _rows,
    "k.map": _map,
    "k.copy": _map,
    "k.experts": _experts,
    "k.gather": _gather,
    "k.routine": _top_k,
}
