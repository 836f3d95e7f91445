"""Dtypes, and tensor types: dtype, shape and the order of the axes in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from gpuir.ir.errors import ModelError
from gpuir.ir.lazy import lazy
from gpuir.ir.sizes import whole

LARGEST = 1 << 50  # bytes of a tensor, 1 PiB: more than any device has, and sums stay in 64 bits

DTypeKind = Literal["bool", "int", "uint", "float", "complex"]


@dataclass(frozen=True)
class DType:
    """An element type. `name` is its text, `bits` its width in memory."""

    name: str
    bits: int
    kind: DTypeKind

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_complex(self) -> bool:
        return self.kind == "complex"

    @property
    def is_inexact(self) -> bool:
        """Whether its numbers are rounded, and so have gradients: floats and complex ones."""
        return self.is_float or self.is_complex

    @property
    def multiply_add(self) -> int:
        """Operations of a multiply-add: of complex numbers four products and four sums."""
        return 8 if self.is_complex else 2


bool_ = DType("bool", 8, "bool")
i64, i32, i16, i8 = (DType(f"i{b}", b, "int") for b in (64, 32, 16, 8))
i4, i2 = (DType(f"i{b}", b, "int") for b in (4, 2))
u64, u32, u16, u8 = (DType(f"u{b}", b, "uint") for b in (64, 32, 16, 8))
u4, u2 = (DType(f"u{b}", b, "uint") for b in (4, 2))
f64, f32, f16 = (DType(f"f{b}", b, "float") for b in (64, 32, 16))
bf16 = DType("bf16", 16, "float")
f8e4m3 = DType("f8e4m3", 8, "float")  # the "fn" variant: finite, no infinities
f8e4m3fnuz = DType("f8e4m3fnuz", 8, "float")
f8e5m2 = DType("f8e5m2", 8, "float")
f8e5m2fnuz = DType("f8e5m2fnuz", 8, "float")
f8e8m0 = DType("f8e8m0", 8, "float")
f4e2m1 = DType("f4e2m1", 4, "float")
c64, c128 = DType("c64", 64, "complex"), DType("c128", 128, "complex")
tf32 = DType("tf32", 32, "float")  # of no tensor: what products of f32 may run in

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        *(bool_, i64, i32, i16, i8, i4, i2, u64, u32, u16, u8, u4, u2, f64, f32, f16, bf16),
        *(f8e4m3, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f8e8m0, f4e2m1, c64, c128),
    )
}


@dataclass(frozen=True)
class TensorType:
    """`f16[8, 64, 56, 56]{0, 2, 3, 1}`: dtype, shape, axes from outermost to innermost in memory.

    `order` is None when the tensor is row-major. Elements are packed: no padding between rows.
    `ModelError` where an extent is negative, or the tensor larger than `LARGEST`: extents count as
    1 at least, so that strides of an empty tensor have a bound too.
    """

    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        bits = self.dtype.bits
        for n in self.shape:
            bits *= whole(n) if n > 0 else 1
            if n < 0 or bits > 8 * LARGEST:
                raise ModelError(
                    "a shape is not valid",
                    expected=f"sizes of 0 or more, and at most {LARGEST} bytes in all",
                    found=str(self),
                )
        if self.order is not None and self.order == tuple(range(len(self.shape))):
            object.__setattr__(self, "order", None)

    @lazy
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @lazy
    def nbytes(self) -> int:
        """Bytes in memory; sub-byte dtypes pack, the last byte is rounded up."""
        return (self.size * self.dtype.bits + 7) // 8

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_channels_last(self) -> bool:
        """Whether axis 1 lies innermost, and the others in order: NHWC, as images go."""
        return self.order is not None and self.order == channels_last(self.rank)

    def with_order(self, order: tuple[int, ...] | None) -> TensorType:
        return TensorType(self.shape, self.dtype, order)

    def with_shape(self, shape: tuple[int, ...]) -> TensorType:
        """The same dtype, row-major, in another shape."""
        return TensorType(shape, self.dtype)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(self.shape, dtype, self.order)

    def __str__(self) -> str:
        order = f"{{{', '.join(map(str, self.order))}}}" if self.order is not None else ""
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]{order}"

    __repr__ = __str__


def channels_last(rank: int) -> tuple[int, ...] | None:
    """The memory order of images [n, c, ..] whose channels lie innermost; None below three axes."""
    return (0, *range(2, rank), 1) if rank > 2 else None
