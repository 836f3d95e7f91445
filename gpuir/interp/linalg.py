"""What the routines on matrices compute: numpy's, a matrix at a time where it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpuir.interp.arrays import Array

Attrs = Mapping[str, Any]


def each(fn: Callable[..., tuple[Array, ...]], *operands: Array) -> tuple[Array, ...]:
    """`fn` of matrix after matrix, the leading axes broadcast together."""
    lead = np.broadcast_shapes(*(x.shape[:-2] for x in operands))
    wide = [np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in operands]
    if not lead:
        return fn(*wide)
    if not all(lead):
        found = fn(*(np.eye(*x.shape[-2:], dtype=x.dtype) for x in operands))
        return tuple(np.zeros((*lead, *y.shape), y.dtype) for y in found)
    rows = [fn(*(x[i] for x in wide)) for i in np.ndindex(*lead)]
    return tuple(np.stack(ys).reshape(*lead, *ys[0].shape) for ys in zip(*rows, strict=True))


def adjoint(x: Array) -> Array:
    return np.conjugate(np.swapaxes(x, -1, -2))


def cholesky(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    """L with L L* = x; with `upper` its adjoint. Only that triangle of x is read."""
    if attrs["upper"]:
        x = adjoint(x)
    factor = np.linalg.cholesky(x)
    return (adjoint(factor) if attrs["upper"] else factor,)


def factored(x: Array) -> tuple[Array, Array]:
    """L below the diagonal and U from it on, in one; and the row (from 1) each was exchanged with:
    Gaussian elimination with partial pivoting. A complex pivot is the one whose parts add up to
    most, as LAPACK takes it (izamax)."""
    a = np.array(x)
    rows, columns = a.shape
    pivots = np.zeros(min(rows, columns), np.int32)
    for j in range(len(pivots)):
        best = j + int(np.argmax(np.abs(np.real(a[j:, j])) + np.abs(np.imag(a[j:, j]))))
        pivots[j] = best + 1
        a[[j, best]] = a[[best, j]]
        if a[j, j] != 0:
            a[j + 1 :, j] /= a[j, j]
        a[j + 1 :, j + 1 :] -= np.outer(a[j + 1 :, j], a[j, j + 1 :])
    return a, pivots


def unpacked(packed: Array, pivots: Array) -> tuple[Array, Array, Array]:
    """P, L, U of `factored`."""
    rows, columns = packed.shape
    inner = min(rows, columns)
    order = np.arange(rows, dtype=np.int64)
    for j, k in enumerate(pivots.reshape(-1)):
        order[[j, k - 1]] = order[[k - 1, j]]
    swaps = np.eye(rows, dtype=packed.dtype)[:, order]
    lower = np.tril(packed[:, :inner], -1) + np.eye(rows, inner, dtype=packed.dtype)
    return swaps, lower, np.triu(packed[:inner])


def lu(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    return each(factored, x)


def lu_unpack(attrs: Attrs, packed: Array, pivots: Array) -> tuple[Array, ...]:
    return each(unpacked, packed, pivots[..., None])


def lu_solve(attrs: Attrs, packed: Array, pivots: Array, b: Array) -> tuple[Array, ...]:
    """The solution of A x = b (or A* x = b, x A = b) from the factors of A."""
    p, lower, upper = lu_unpack({}, packed, pivots)
    a = p @ lower @ upper
    return solve({"left": attrs["left"]}, adjoint(a) if attrs["adjoint"] else a, b)


def solve(attrs: Attrs, a: Array, b: Array) -> tuple[Array, ...]:
    """x with a x = b, or x a = b; b may be a vector for each matrix."""
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    b = b[..., None] if vector else b
    if attrs["left"]:
        x = np.linalg.solve(a, b)
    else:
        x = np.swapaxes(np.linalg.solve(np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2)), -1, -2)
    return (x[..., 0] if vector else x,)


def solve_triangular(attrs: Attrs, a: Array, b: Array) -> tuple[Array, ...]:
    """As `solve`, of one triangle of a; `unit` takes its diagonal as ones."""
    a = np.triu(a) if attrs["upper"] else np.tril(a)
    if attrs["unit"]:
        one = np.eye(a.shape[-1], dtype=a.dtype)
        a = a * (1 - one) + one
    return solve(attrs, a, b)


def slogdet(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    sign, size = np.linalg.slogdet(x)
    return np.asarray(sign, x.dtype), np.asarray(size, x.real.dtype)


def qr(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    mode = attrs["mode"]
    if mode == "r":
        return (np.asarray(np.linalg.qr(x, "r")),)
    q, r = np.linalg.qr(x, mode)
    return q, r


def svd(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    if not attrs["vectors"]:
        return (np.linalg.svd(x, compute_uv=False),)
    u, s, v = np.linalg.svd(x, attrs["full"])
    return u, s, v


def eigh(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    """The eigenvalues, then the vectors, of Hermitian matrices, of which one triangle is read."""
    values, vectors = np.linalg.eigh(x, attrs["triangle"])
    return (values, vectors) if attrs["vectors"] else (values,)


def eig(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    wide = np.complex128 if x.dtype in (np.float64, np.complex128) else np.complex64
    values, vectors = np.linalg.eig(x)
    found = (values, vectors) if attrs["vectors"] else (values,)
    return tuple(y.astype(wide) for y in found)


def pinv(attrs: Attrs, x: Array, *least: Array) -> tuple[Array, ...]:
    """Moore and Penrose's inverse. Singular values up to `atol`, or `rtol` of the largest, count as
    none: they are operands where the attribute of that name is negative. A Hermitian x is read
    below its diagonal, which is real."""
    if attrs["hermitian"]:
        below = np.tril(x, -1)
        x = below + adjoint(below) + np.real(x) * np.eye(x.shape[-1], dtype=x.dtype)
    given = iter(least)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    atol, rtol = (
        next(given)[..., None] if attrs[name] < 0 else attrs[name] for name in ("atol", "rtol")
    )
    most = s.max(-1, keepdims=True, initial=0)
    kept = s > np.maximum(atol, rtol * most)
    inverse = np.where(kept, 1 / np.where(kept, s, 1), 0)
    return ((adjoint(v) * inverse[..., None, :] @ adjoint(u)).astype(x.dtype),)


def matrix_exp(attrs: Attrs, x: Array) -> tuple[Array, ...]:
    """Taylor's series of x halved until it is small, squared as often (Moler and Van Loan, Nineteen
    dubious ways to compute the exponential of a matrix, 1978, method 3)."""
    wide = x.astype(np.result_type(x, np.float64))
    most = float(np.max(np.abs(wide).sum(-1), initial=0))
    times = max(0, int(np.ceil(np.log2(most))) + 2) if most > 0 else 0
    term = total = np.broadcast_to(np.eye(x.shape[-1]), x.shape).astype(wide.dtype)
    for i in range(1, 19):
        term = term @ (wide / 2**times) / i
        total = total + term
    for _ in range(times):
        total = total @ total
    return (total.astype(x.dtype),)


LINALG: dict[str, Callable[..., tuple[Array, ...]]] = {
    "cholesky": cholesky,
    "lu": lu,
    "lu_unpack": lu_unpack,
    "lu_solve": lu_solve,
    "solve": solve,
    "solve_triangular": solve_triangular,
    "slogdet": slogdet,
    "qr": qr,
    "svd": svd,
    "eigh": eigh,
    "eig": eig,
    "pinv": pinv,
    "matrix_exp": matrix_exp,
}
