"""Complex numbers: their parts, sizes and angles, as arithmetic on pairs."""

from __future__ import annotations

from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, pick, widened
from gpuir.frontends.torch.node import Converter, TorchNode
from gpuir.frontends.torch.pointwise import constant, mapped
from gpuir.ir.graph import Value
from gpuir.ir.phases import beside
from gpuir.ops import tensor as t


def is_complex(x: Any) -> bool:
    return isinstance(x, Value) and x.type.dtype.kind == "complex"


def parts(n: TorchNode, e: Emitter) -> Value:
    """The same bytes as pairs, or as complex numbers."""
    return e(t.Parts(n["self"]))


def pair(e: Emitter, x: Value) -> tuple[Value, Value]:
    """The real part and the imaginary one."""
    both = e(t.Parts(x))
    axis = x.type.rank
    return pick(e, both, axis, 0), pick(e, both, axis, 1)


def joined(e: Emitter, real: Value, imaginary: Value) -> Value:
    """real + i imaginary."""
    shape = t.broadcast(real.type.shape, imaginary.type.shape)
    columns: list[Value] = []
    for v in (real, imaginary):
        v = widened(e, v, shape)
        columns.append(e(t.Reshape(v, (*shape, 1))))
    return e(t.Parts(e(t.Concat(tuple(columns), len(shape)))))


def complex_of(n: TorchNode, e: Emitter) -> Value:
    return joined(e, n["real"], n["imag"])


def polar(n: TorchNode, e: Emitter) -> Value:
    """abs (cos angle + i sin angle)."""
    size, angle = n["abs"], n["angle"]
    columns = (e.map("mul", size, e.map(fn, angle)) for fn in ("cos", "sin"))
    return joined(e, *columns)


def magnitude(e: Emitter, x: Value) -> Value:
    """sqrt(real² + imaginary²), however large they are."""
    return e.map("hypot", *pair(e, x))


def absolute(n: TorchNode, e: Emitter) -> Value:
    """That of complex numbers is computed as complex ones, whose real parts a second kernel copies
    (aten/src/ATen/native/UnaryOps.cpp, unary_op_impl_with_complex_to_float_out)."""
    x = n["self"]
    if not is_complex(x):
        return mapped(e, "abs", x, dtype=n.type.dtype)
    size = e(t.Cast(magnitude(e, x), x.type.dtype))
    where, e.builder.locs = e.builder.locs, beside(e.builder.locs, "real")
    y = e(t.Cast(size, n.type.dtype))
    e.builder.locs = where
    return y


def angle(n: TorchNode, e: Emitter) -> Value:
    """The angle to the real axis: pi of a negative number; NaN stays."""
    x, dtype = n["self"], n.type.dtype
    if is_complex(x):
        real, imaginary = pair(e, x)
        return e.map("atan2", imaginary, real)
    x = cast(e, x, dtype)
    zero = e.map("mul", x, x)  # not below zero: the angle is 0, or pi where x turns it
    return e.map("atan2", mapped(e, "mul", zero, 0, dtype=dtype), x)


def conjugated(e: Emitter, x: Value) -> Value:
    return e.map("conj", x) if is_complex(x) else x


def conjugate(n: TorchNode, e: Emitter) -> Value:
    """Of a tensor, or of a number that the program multiplies by."""
    x = n.args["self"]
    if isinstance(x, complex):
        return constant(e, x.conjugate(), n.type.dtype)
    return conjugated(e, n["self"])


def real(n: TorchNode, e: Emitter) -> Value:
    x = n["self"]
    return pair(e, x)[0] if is_complex(x) else x


def imaginary(n: TorchNode, e: Emitter) -> Value:
    return pair(e, n["self"])[1]


def sign(n: TorchNode, e: Emitter) -> Value:
    """x / |x|, and 0 of 0."""
    x = n["self"]
    if not is_complex(x):
        return e.map("sign", x)
    size = magnitude(e, x)
    none = e.map("eq", size, 0.0)
    size = e.map("where", none, e.constant(1, size.type.dtype), size)
    return joined(e, *(e.map("div", v, size) for v in pair(e, x)))


CONVERTERS: dict[str, Converter] = {
    "view_as_real": parts,
    "view_as_complex": parts,
    "complex": complex_of,
    "polar": polar,
    "abs": absolute,
    "angle": angle,
    **dict.fromkeys(("conj", "_conj", "conj_physical", "_conj_physical"), conjugate),
    "real": real,
    "imag": imaginary,
    "sgn": sign,
}
