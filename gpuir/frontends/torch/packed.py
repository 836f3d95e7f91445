"""Quantised weights and the layers that multiply by them, as operators of ours: what is in memory
is what lies in the checkpoint, and a product reads it so."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils._dtype_abbrs import dtype_abbrs

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, first_cells, reshaped
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, f4e2m1, f32, i32
from gpuir.ops import tensor as t

# Unsigned numbers by their bits. torch has no text for the narrow ones, and says a program in full
# while it decomposes it.
CODES: dict[int, torch.dtype] = {bits: getattr(torch, f"uint{bits}") for bits in (2, 4, 8)}
for _bits, _dtype in CODES.items():
    dtype_abbrs.setdefault(_dtype, f"u{_bits}")

LARGEST = {"f8e4m3": 448.0, "i8": 127.0}  # the largest number of what rows are quantised to


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix [.., out, in] is stored: numbers of `dtype`, and a scale for each block of rows
    and columns (0: all of them). `zero` is the dtype of the blocks' zero points, None where there
    are none: unsigned numbers then lie around the middle of what they hold. `floats` says that
    `uint4` holds e2m1 floats. Scales may be quantised themselves, `nested` to a block."""

    dtype: torch.dtype
    rows: int = 1
    columns: int = 0
    scale: torch.dtype = torch.float32
    zero: torch.dtype | None = None
    floats: bool = False
    nested: int = 0


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantised: its weights, and the numbers that its rows are brought to before
    the product (`inputs`; None: weights alone are narrow), by their own largest number or,
    `static`, by a scale known before. `ordered` has the order of the columns too. A product of
    `unpacks` rows or more is several launches: the whole matrix is made in memory first, or the
    result in integers is rescaled after."""

    weights: WeightFormat
    inputs: torch.dtype | None = None
    static: bool = False
    ordered: bool = False
    unpacks: int | None = None


# ---------------------------------------------------------------------------- operators


# Of tensors with shapes and no numbers: they are exported, and never run. `unpack` is
# (weight - zero) * scale, a launch of its own; `unpacked` the same as a part of the product that
# reads it. The scale of rows is by default a row's largest number over that of the dtype; a given
# one comes out again.
LIBRARY = torch.library.Library("gpuir", "FRAGMENT")
STORED = "Tensor weight, Tensor scale, Tensor? zero, int rows, int columns, bool floats"
SCHEMAS = {
    "unpack": f"({STORED}, ScalarType dtype) -> Tensor",
    "unpacked": f"({STORED}, ScalarType dtype) -> Tensor",
    "quantize_rows": "(Tensor x, Tensor? scale, ScalarType dtype) -> (Tensor, Tensor)",
    "scaled_linear": "(Tensor x, Tensor scale, Tensor weight, Tensor weight_scale, Tensor? bias, "
    "int rows, int columns, ScalarType dtype) -> Tensor",
    "integer_linear": "(Tensor x, Tensor weight) -> Tensor",
    "rescale": "(Tensor x, Tensor scale, Tensor weight_scale, Tensor? bias, ScalarType dtype) "
    "-> Tensor",
}
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
ops: Any = torch.ops.gpuir


def _numbers(weight: torch.Tensor, *args: Any) -> torch.Tensor:
    return weight.new_empty(weight.shape, dtype=args[-1])


def _rows(x: torch.Tensor, scale: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], 1) if scale is None else ()
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


def _product(x: torch.Tensor, scale: Any, weight: torch.Tensor, *args: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=args[-1])


def _integers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int32)


FAKES: dict[str, Any] = {
    "unpack": _numbers,
    "unpacked": _numbers,
    "quantize_rows": _rows,
    "scaled_linear": _product,
    "integer_linear": _integers,
    "rescale": _numbers,
}
for _name, _fake in FAKES.items():
    torch.library.register_fake(f"gpuir::{_name}", _fake, lib=LIBRARY)


# ---------------------------------------------------------------------------- modules


class PackedMatrix(nn.Module):
    """A quantised matrix, or a stack of them: its numbers, scales and zero points."""

    def __init__(self, shape: tuple[int, ...], stored: WeightFormat, dtype: torch.dtype):
        super().__init__()
        *lead, out, into = shape
        self.stored, self.dtype = stored, dtype
        self.rows, self.columns = stored.rows or out, stored.columns or into
        blocks = (*lead, ceil(out / self.rows), ceil(into / self.columns))
        self.weight = number(shape, stored.dtype)
        if stored.nested:
            self.scale = number(blocks, torch.uint8)
            self.scale_scale = number((1, ceil(self.scale.numel() / stored.nested)), torch.float32)
        else:
            self.scale = number(blocks, stored.scale)
        if stored.zero is not None:
            self.zero = number(blocks, stored.zero)

    def scales(self) -> torch.Tensor:
        """The scales, unpacked by a launch of their own where they are quantised."""
        nested = self.stored.nested
        if not nested:
            return self.scale
        flat = self.scale.reshape(1, -1)
        how = {"rows": 1, "columns": nested, "floats": False, "dtype": torch.float32}
        flat = ops.unpack(flat, self.scale_scale, None, **how)
        return flat.reshape(self.scale.shape)

    def dense(self, apart: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The matrix as numbers of `dtype`."""
        zero = self.zero if self.stored.zero is not None else None
        how = {"rows": self.rows, "columns": self.columns, "floats": self.stored.floats}
        made = ops.unpack if apart else ops.unpacked
        return made(self.weight, self.scales(), zero, **how, dtype=dtype or self.dtype)


class QuantisedLinear(PackedMatrix):
    """x weight^T + bias by a quantised weight."""

    def __init__(self, out: int, into: int, bias: bool, scheme: Scheme, dtype: torch.dtype):
        super().__init__((out, into), scheme.weights, dtype)
        self.in_features, self.out_features, self.scheme = into, out, scheme
        self.bias = number((out,), dtype) if bias else None
        if scheme.ordered:
            self.order = number((into,), torch.int32)
        if scheme.static:
            self.input_scale = number((), torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scheme = self.scheme
        apart = scheme.unpacks is not None and x.numel() >= scheme.unpacks * x.shape[-1]
        if scheme.inputs is None:
            return functional.linear(x, self.dense(apart, x.dtype), self.bias)
        static = self.input_scale if scheme.static else None
        rows, scale = ops.quantize_rows(x, static, scheme.inputs)
        if apart:
            made = ops.integer_linear(rows, self.weight)
            return ops.rescale(made, scale, self.scale, self.bias, x.dtype)
        block = {"rows": self.rows, "columns": self.columns, "dtype": x.dtype}
        return ops.scaled_linear(rows, scale, self.weight, self.scale, self.bias, **block)


def number(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(made, requires_grad=dtype.is_floating_point)


def dense(weight: torch.Tensor | PackedMatrix, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A weight that may be packed."""
    return weight.dense(dtype=dtype) if isinstance(weight, PackedMatrix) else weight


# ---------------------------------------------------------------------------- converters

VIEWS = ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.numpy_T.default")


def launched(node: fx.Node) -> fx.Node:
    """The call whose launch does what this one says: of a weight that is unpacked on its way into
    a product, the product."""
    part = ops.unpacked.default
    if node.target is part:
        while len(node.users) == 1 and (node.target is part or _is_view(node)):
            (node,) = node.users
    return node


def _is_view(node: fx.Node) -> bool:
    return str(node.target) in VIEWS


def scaled(
    e: Emitter,
    w: Value,
    scale: Value,
    zero: Value | None = None,
    *,
    block: tuple[int, int],
    dtype: DType,
    floats: bool = False,
) -> Value:
    """[.., out, in] numbers less their block's zero point, times its scale."""
    *lead, out, into = w.type.shape
    (r, c), kinds = block, w.type.dtype
    blocks = (*lead, ceil(out / r), 1, ceil(into / c), 1)
    even = out % r == 0 and into % c == 0
    shape = (*lead, ceil(out / r), r, ceil(into / c), c)

    def spread(v: Value) -> Value:
        """A number a block, to be met by the matrix in blocks or, where they do not divide it, by
        the matrix as it is."""
        v = cast(e, reshaped(e, v, blocks), dtype)
        if even:
            return v
        whole = reshaped(e, e(t.Broadcast(v, shape)), (*lead, blocks[-4] * r, blocks[-2] * c))
        return first_cells(e, whole, (*lead, out, into))

    y = reshaped(e, w, shape) if even else w
    y = e(t.Cast(e(t.Bitcast(y, f4e2m1)) if floats else y, dtype), fold=False)
    if zero is not None:
        y = e.map("sub", y, spread(zero))
    elif kinds.kind == "uint" and not floats:
        y = e.map("sub", y, float(2 ** (kinds.bits - 1)))
    return reshaped(e, e.map("mul", y, spread(scale)), (*lead, out, into))


def convert_unpack(n: TorchNode, e: Emitter) -> Results:
    w, floats = n["weight"], bool(n.args["floats"])
    block = (int(n.args["rows"]), int(n.args["columns"]))
    wanted = n.type.dtype
    wide = f32 if wanted.bits == 8 else wanted  # scaled, then rounded to what is multiplied
    y = scaled(e, w, n["scale"], n.get("zero"), block=block, dtype=wide, floats=floats)
    return cast(e, y, wanted)


def convert_quantize(n: TorchNode, e: Emitter) -> Results:
    x, given, dtype = cast(e, n["x"], f32), n.get("scale"), n.type.dtype
    most = LARGEST[dtype.name]
    scale = given
    if scale is None:
        last = (x.type.rank - 1,)
        top = e(t.Reduce("max", e.map("abs", x), last, keepdims=True))
        scale = e.map("mul", top, 1 / most)
    y = e.map("div", x, scale)
    if dtype.is_integer:
        y = e.map("round", y)
    y = e(t.Cast(e.map("clip", y, -most, most), dtype))
    return y, scale


def rescaled(n: TorchNode, e: Emitter, y: Value, columns: Value | None) -> Value:
    """A product of rows that have a scale each, as have `columns`; with the bias, if any."""
    y, bias = e.map("mul", cast(e, y, f32), n["scale"]), n.get("bias")
    if columns is not None:
        y = e.map("mul", y, reshaped(e, cast(e, columns, f32), (columns.type.size,)))
    y = cast(e, y, n.type.dtype)
    return y if bias is None else e.map("add", y, bias)


def convert_scaled_linear(n: TorchNode, e: Emitter) -> Results:
    x, w, scale = n["x"], n["weight"], n["weight_scale"]
    rows, columns = int(n.args["rows"]), int(n.args["columns"])
    out, into = w.type.shape
    whole = columns == into and rows in (1, out)
    if not whole:
        w = cast(e, scaled(e, w, scale, block=(rows, columns), dtype=f32), x.type.dtype)
    y = e(t.Matmul(x, e(t.Transpose(w, (1, 0))), i32 if x.type.dtype.is_integer else f32))
    return rescaled(n, e, y, scale if whole else None)


def convert_integer_linear(n: TorchNode, e: Emitter) -> Results:
    return e(t.Matmul(n["x"], e(t.Transpose(n["weight"], (1, 0))), i32))


def convert_rescale(n: TorchNode, e: Emitter) -> Results:
    return rescaled(n, e, n["x"], n["weight_scale"])


CONVERTERS: dict[str, Converter] = {
    "gpuir::unpack": convert_unpack,
    "gpuir::unpacked": convert_unpack,
    "gpuir::quantize_rows": convert_quantize,
    "gpuir::scaled_linear": convert_scaled_linear,
    "gpuir::integer_linear": convert_integer_linear,
    "gpuir::rescale": convert_rescale,
}
