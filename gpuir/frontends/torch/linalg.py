"""Factorisations and solutions of matrices: library routines.

Their work is counted as G. H. Golub and C. F. Van Loan do (Matrix Computations, 4th edition, 2013:
sections 3.2, 4.2, 5.2, 7.5, 8.3 and figure 8.6.1), for each matrix of a batch.
"""

from __future__ import annotations

from math import prod
from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, line, matrices_turned, widened
from gpuir.frontends.torch.complex import conjugated
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.frontends.torch.pointwise import mapped
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, f32, i32
from gpuir.ops import tensor as t

EPSILON = {32: 2.0**-23, 64: 2.0**-52}  # of a real part: what pinv takes for rcond, times the size


def extents(x: Value) -> tuple[int, int, int]:
    """How many matrices, of how many rows and columns."""
    *lead, m, n = x.type.shape
    return prod(lead), m, n


def routine(
    e: Emitter, fn: str, args: tuple[Value, ...], gives: Any, work: float, **attrs: Any
) -> tuple[Value, ...]:
    """Of complex numbers a routine does four times the operations: its multiply-adds do (LAPACK
    Working Note 41, appendix C: 6 for a product, 2 for a sum)."""
    dtype = args[0].type.dtype
    work = round(work * dtype.multiply_add / f32.multiply_add)
    return e.add(t.Routine(fn, args, tuple(gives), tuple(attrs.items()), work=work))


def zeros(e: Emitter, type: TensorType | None) -> Value | None:
    """An `info` that says that all went well; what a call leaves empty."""
    return None if type is None else e.fill(0, type)


def cholesky(n: TorchNode, e: Emitter) -> Results:
    batch, m, _ = extents(n["self"])
    upper = bool(n.args["upper"])
    y = routine(e, "cholesky", (n["self"],), n.types[:1], batch * m**3 / 3, upper=upper)
    return *y, *(zeros(e, type) for type in n.types[1:])


def cholesky_solve(n: TorchNode, e: Emitter) -> Value:
    """(L L*)^-1 b by two triangles; with `upper` of L*."""
    b, factor, upper = n["self"], n["input2"], bool(n.args["upper"])
    return solved_twice(n, e, b, factor, upper)


def cholesky_inverse(n: TorchNode, e: Emitter) -> Value:
    x = n["self"]
    eye = e(t.Cast(diagonal_of_ones(e, x.type), x.type.dtype))
    return solved_twice(n, e, eye, x, bool(n.args["upper"]))


def diagonal_of_ones(e: Emitter, type: TensorType) -> Value:
    m, k = type.shape[-2:]
    return e.map("eq", line(e, m, axis=0, rank=2), line(e, k, axis=1, rank=2))


def solved_twice(n: TorchNode, e: Emitter, b: Value, factor: Value, upper: bool) -> Value:
    other = adjoint(e, factor)
    first, second = (other, factor) if upper else (factor, other)
    found = triangular(e, first, b, n.type, upper=False)
    return triangular(e, second, found, n.type, upper=True)


def adjoint(e: Emitter, x: Value) -> Value:
    return conjugated(e, matrices_turned(e, x))


def triangular(
    e: Emitter,
    a: Value,
    b: Value,
    type: TensorType,
    *,
    upper: bool,
    left: bool = True,
    unit: bool = False,
) -> Value:
    """Work: a multiply-add for each cell of the triangle and each column."""
    work = type.size * a.type.shape[-1]
    attrs = {"upper": upper, "left": left, "unit": unit}
    return routine(e, "solve_triangular", (a, b), (type,), work, **attrs)[0]


def solve_triangular(n: TorchNode, e: Emitter) -> Value:
    upper, left, unit = (bool(n.args[a]) for a in ("upper", "left", "unitriangular"))
    return triangular(e, n["self"], n["B"], n.type, upper=upper, left=left, unit=unit)


def old_triangular(n: TorchNode, e: Emitter) -> Results:
    """triangular_solve: the other way round; and the matrix itself."""
    a, upper = n["A"], bool(n.args["upper"])
    used = a
    if n.args["transpose"]:
        used, upper = matrices_turned(e, a), not upper
    unit = bool(n.args["unitriangular"])
    y = triangular(e, used, n["self"], n.type, upper=upper, unit=unit)
    type = n.types[1]
    assert type is not None
    return y, widened(e, a, type.shape)


def factors(e: Emitter, x: Value, packed: Any, pivots: Any) -> tuple[Value, ...]:
    """L and U in one, and the exchanges of rows."""
    batch, m, n = extents(x)
    k = min(m, n)
    return routine(
        e, "lu", (x,), (packed, pivots), batch * (m * n * k - (m + n) * k * k / 2 + k**3 / 3)
    )


def lu_factor(n: TorchNode, e: Emitter) -> Results:
    if n.args.get("pivot") is False:
        raise n.refused("without pivoting is not supported")
    return *factors(e, n["A"], *n.types[:2]), zeros(e, n.types[2])


def lu(n: TorchNode, e: Emitter) -> Results:
    if n.args.get("pivot") is False:
        raise n.refused("without pivoting is not supported")
    x = n["A"]
    *lead, rows, columns = x.type.shape
    pivots = TensorType((*lead, min(rows, columns)), i32)
    packed, order = factors(e, x, x.type, pivots)
    return routine(e, "lu_unpack", (packed, order), n.types, 0)


def lu_unpack(n: TorchNode, e: Emitter) -> Results:
    """P, L and U; empty ones where they are not asked for."""
    x = n["LU_data"]
    *lead, rows, columns = x.type.shape
    inner = min(rows, columns)
    shapes = ((rows, rows), (rows, inner), (inner, columns))
    gives = tuple(TensorType((*lead, *shape), x.type.dtype) for shape in shapes)
    found = routine(e, "lu_unpack", (x, n["LU_pivots"]), gives, 0)
    return tuple(
        y if type is not None and y.type.shape == type.shape else zeros(e, type)
        for y, type in zip(found, n.types, strict=True)
    )


def lu_solve(n: TorchNode, e: Emitter) -> Value:
    attrs = {"left": bool(n.args["left"]), "adjoint": bool(n.args["adjoint"])}
    work = 2 * n.type.size * n["LU"].type.shape[-1]
    return routine(e, "lu_solve", (n["LU"], n["pivots"], n["B"]), (n.type,), work, **attrs)[0]


def solve(n: TorchNode, e: Emitter) -> Results:
    """By Gaussian elimination: one routine, and the factors for the backward pass."""
    a, b = n["A"], n["B"]
    batch, m, _ = extents(a)
    work = batch * 2 * m**3 / 3 + 2 * n.type.size * m
    (y,) = routine(e, "solve", (a, b), n.types[:1], work, left=bool(n.args["left"]))
    return y, *factors(e, a, *n.types[1:3]), *(zeros(e, type) for type in n.types[3:])


def determinant(n: TorchNode, e: Emitter) -> Results:
    a = n["A"]
    batch, m, _ = extents(a)
    log = n.op.startswith("_linalg_slogdet")
    count = 2 if log else 1
    fn, work = ("slogdet" if log else "det"), batch * 2 * m**3 / 3
    return *routine(e, fn, (a,), n.types[:count], work), *factors(e, a, *n.types[count:])


def inverse(n: TorchNode, e: Emitter) -> Results:
    batch, m, _ = extents(n["A"])
    found = routine(e, "inverse", (n["A"],), n.types[:1], 2 * batch * m**3)
    return *found, zeros(e, n.types[1])


def qr(n: TorchNode, e: Emitter) -> Results:
    """By Householder's reflections; Q made of them costs as much again."""
    x, mode = n["A"], n.args["mode"]
    batch, m, k = extents(x)
    least = min(m, k)
    work = 2 * batch * (m * k * least - (m + k) * least**2 / 2 + least**3 / 3)
    if mode == "r":
        return zeros(e, n.types[0]), *routine(e, "qr", (x,), n.types[1:], work, mode="r")
    return routine(e, "qr", (x,), n.types, 2 * work, mode=mode)


def svd(n: TorchNode, e: Emitter) -> Results:
    x = n["A"]
    batch, m, k = extents(x)
    m, k = max(m, k), min(m, k)
    if not n.args["compute_uv"]:
        work = batch * (4 * m * k * k - 4 * k**3 / 3)
        (s,) = routine(e, "svd", (x,), n.types[1:2], work, vectors=False, full=False)
        return zeros(e, n.types[0]), s, zeros(e, n.types[2])
    full = bool(n.args["full_matrices"])
    work = batch * ((4 * m * m * k + 8 * m * k * k if full else 14 * m * k * k) + 9 * k**3)
    return routine(e, "svd", (x,), n.types, work, vectors=True, full=full)


def hermitian(n: TorchNode, e: Emitter) -> Results:
    x, vectors = n["A"], bool(n.args["compute_v"])
    batch, m, _ = extents(x)
    attrs = {"triangle": n.args["UPLO"], "vectors": vectors}
    work = batch * m**3 * (9 if vectors else 4 / 3)
    if vectors:
        return routine(e, "eigh", (x,), n.types, work, **attrs)
    return *routine(e, "eigh", (x,), n.types[:1], work, **attrs), zeros(e, n.types[1])


def eigen(n: TorchNode, e: Emitter) -> Results:
    x, vectors = n["self"], len(n.types) == 2
    batch, m, _ = extents(x)
    work = batch * m**3 * (25 if vectors else 10)
    return routine(e, "eig", (x,), n.types, work, vectors=vectors)


def pseudo_inverse(n: TorchNode, e: Emitter) -> Value:
    x = n["self"]
    atol, rtol = n.get("atol"), n.get("rtol")
    given = tuple(v for v in (atol, rtol) if v is not None)
    batch, m, k = extents(x)
    size = x.type.dtype.bits // (2 if x.type.dtype.kind == "complex" else 1)
    work = batch * (14 * m * k * min(m, k) + 2 * m * k * min(m, k))
    usual = 0.0 if atol is not None else max(m, k) * EPSILON[size]
    attrs = {
        "atol": 0.0 if atol is None else -1.0,
        "rtol": usual if rtol is None else -1.0,
        "hermitian": bool(n.args["hermitian"]),
    }
    return routine(e, "pinv", (x, *given), (n.type,), work, **attrs)[0]


def matrix_exp(n: TorchNode, e: Emitter) -> Value:
    """Work: some ten products (Moler and Van Loan, 1978)."""
    batch, m, _ = extents(n["self"])
    return routine(e, "matrix_exp", (n["self"],), (n.type,), 20 * batch * m**3)[0]


def trilinear(n: TorchNode, e: Emitter) -> Value:
    """The sum over `sumdim` of three tensors' product, each given axes to spread along."""
    y: Value | None = None
    for name, axes in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        x = n[name]
        shape = list(x.type.shape)
        for axis in sorted(n.args[axes]):
            shape.insert(axis, 1)
        x = e(t.Reshape(cast(e, x, n.type.dtype), tuple(shape)))
        y = x if y is None else mapped(e, "mul", y, x, dtype=n.type.dtype)
    assert y is not None
    axes = tuple(sorted(n.args["sumdim"]))
    return e(t.Reduce("sum", y, axes)) if axes else y


CONVERTERS: dict[str, Converter] = {
    "linalg_cholesky_ex": cholesky,
    "cholesky": cholesky,
    "cholesky_solve": cholesky_solve,
    "cholesky_inverse": cholesky_inverse,
    "linalg_solve_triangular": solve_triangular,
    "triangular_solve": old_triangular,
    "linalg_lu_factor_ex": lu_factor,
    "linalg_lu": lu,
    "lu_unpack": lu_unpack,
    "linalg_lu_solve": lu_solve,
    "_linalg_solve_ex": solve,
    "_linalg_slogdet": determinant,
    "_linalg_det": determinant,
    "linalg_inv_ex": inverse,
    "linalg_qr": qr,
    "_linalg_svd": svd,
    "_linalg_eigh": hermitian,
    "linalg_eig": eigen,
    "_linalg_eigvals": eigen,
    "linalg_pinv.atol_rtol_tensor": pseudo_inverse,
    "linalg_matrix_exp": matrix_exp,
    "_trilinear": trilinear,
}
