"""What a kernel does, whatever its tile and target: its loop nest, its bytes, its operations.

`reading.work_of` reads it off an IR kernel. One work may be of many kernels, with arrays for
numbers; equal works cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Literal, Protocol, Self, TypeVar, cast

import numpy as np

from gpuir.cost.sheet import Number
from gpuir.ir.types import DType
from gpuir.targets.target import Pipe

# How an operand reaches the arithmetic: `staged` through shared memory step by step, `held` there
# for the whole block, `streamed` straight to registers, `kept` in constant memory, or `written`.
Staging = Literal["staged", "held", "streamed", "kept", "written"]

BY_CELL = "of odd rows"  # what `Work.form` says of products whose loads are a cell each
ODD_CHANNELS = "of odd channels"  # and of convolutions of images whose channels fill no load of 4

SECTOR_BYTES = 32  # the least a cache fetches: CUDA C++ Best Practices Guide, coalesced access


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand in the nest: the dimensions that index it, and the bytes behind one index.

    It has no name, so that kernels that differ in names alone have equal works.
    """

    dims: tuple[str, ...]
    cell_bytes: Number
    nbytes: Number  # what has to move at least: each cell that the nest visits, once
    staging: Staging


@dataclass(frozen=True)
class Detail:
    """What the formulas of one family of kernels go by, besides the nest: numbers, details again or
    tuples of them, and words or flags, which all kernels in one work share."""

    def each(self, change: Callable[[Number], Number]) -> Self:
        """The detail with every number changed."""
        return type(self)(*(_each(getattr(self, name), change) for name in _names(type(self))))


@dataclass(frozen=True)
class ConvShape(Detail):
    """Of a convolution: cells of an image and of the window, and the largest of its extents,
    strides and dilations; whose kernel it is; how many times as many products as it needs matrix
    units do, with zeros."""

    cells: Number
    taps: Number
    widest: Number
    stride: Number
    dilation: Number
    zeros: Number = 1.0
    transposed: bool = False
    library: str = ""


SdpaCall = Literal["", "sdpa", "odd sdpa", "wide sdpa", "cudnn"]


@dataclass(frozen=True)
class Heads(Detail):
    """Of an attention: cells of a head of queries and keys, heads of queries that share one of
    keys, heads of keys, keys that a query may see, and bytes that the call writes to a cache.

    `call` is how PyTorch's attention is called, if it is: as FlashAttention takes it; as cuDNN
    alone does, with a mask or heads of keys and values that differ; with heads of more cells than
    either takes (sdp_utils.cpp). `windowed` is 1 of a call that states a window, however wide;
    `paged`: keys and values lie in pages of a cache; `blocked` is 1 where blocks of a mask are
    computed, each of them whole."""

    head: Number
    group: Number
    kv_heads: Number
    reach: Number
    append: Number = 0.0
    windowed: Number = 0.0
    blocked: Number = 0.0
    paged: bool = False
    call: SdpaCall = ""


@dataclass(frozen=True)
class Looped(Detail):
    """Of a product in a loop: bytes that pass between two readings of its weight."""

    between: Number


@dataclass(frozen=True)
class Timed(Detail):
    """Of a product as it was measured: bytes that passed between two readings of its weight, how
    often it ran, one time after another, and whether its weight was `blank`: memory that nothing
    was written to, of which hardly a bit switches."""

    between: Number
    runs: Number
    blank: bool = False


@dataclass(frozen=True)
class Grouped(Detail):
    """Of a batch of products whose rows were handed out at random: `m` is their mean, and `active`
    the share of the batch that gets one."""

    active: Number


@dataclass(frozen=True)
class Lookup(Detail):
    """Of a gather: bytes of what one index names, of the whole table, and of what is read of it
    again. `named` are the bytes of the rows that indices name, `missed` those that a cache misses
    again, at each part of them that it holds (`lookup.CACHED`): nothing where none are given.
    `fewer` is by how much `named` is less than for indices drawn evenly, as those measured were."""

    row: Number
    table: Number
    again: Number
    named: Number = 0.0
    missed: tuple[Number, ...] = ()
    fewer: Number = 0.0


@dataclass(frozen=True)
class CellByCell(Detail):
    """Of a map or a copy whose threads find one cell after another by strides: how many cells apart
    neighbours fetch, and cells of a row of the result."""

    apart: Number
    row: Number


@dataclass(frozen=True)
class Windowed(Detail):
    """Of a pool whose threads take a cell of the result each: loads that wait for one another."""

    waits: Number


@dataclass(frozen=True)
class Serial(Detail):
    """Of a kernel with few threads, so many `turns` each, which wait for one another's loads."""

    turns: Number


@dataclass(frozen=True)
class Threads(Detail):
    """Of a kernel whose threads have nothing to say to each other: its `warps`, in blocks of so
    many; the turns of each, one after another; the clocks of an SM that a warp's turn takes, and
    the loads in it that wait for one another; and the clocks that it takes `once`."""

    warps: Number
    turns: Number
    clocks: Number
    waits: Number
    block: Number
    once: Number = 0.0


@dataclass(frozen=True)
class Channels(Detail):
    """Of a reduction of images channel by channel: whether over a batch of them, and whether the
    cells of one channel lie apart, as in channels-last images."""

    batch: bool
    last: bool


@dataclass(frozen=True)
class WeightBytes(Detail):
    """Of a kernel in a model: bytes of the model's weights that it reads, and that others do."""

    own: Number
    others: Number


D = TypeVar("D", bound=Detail)


@dataclass(frozen=True)
class Work:
    """What a kernel does, or many kernels of one kind: then numbers are arrays of one length.

    `kind` tells kernels apart that share a nest: of a reduction "softmax", "norm", "sum" or "scan"
    (running sums), of a map "copy", "transpose", "quantise" or "scalar" (a cell at a time, where
    others take vectors). `detail` is what the formulas of its family go by besides.
    """

    kernel: str
    dims: tuple[tuple[str, Number], ...]
    reduced: tuple[str, ...]
    operands: tuple[Operand, ...]
    flops: Number  # as the kernel counts them
    products: Number  # flops of the contraction, of the operands' dtype
    lane_ops: Number  # instructions on the vector lanes besides
    dtype: DType
    pipe: Pipe
    accumulator_bits: int = 32
    density: Number = 1.0  # the share of the nest that runs: causal attention skips the rest
    math: DType | None = None  # what products run in, where that is not `dtype`: TF32
    kind: str = ""
    detail: Detail | None = None
    simd_ops: Number = 0.0  # of the lanes' instructions, what a CPU takes beyond them
    times: Number | None = None  # of one launched again and again: how often
    own_bytes: Number | None = None  # of its operands, where `operands` are those of another kernel
    weights: WeightBytes | None = None
    # Kernels that the library launches besides where it runs on the matrix units: conversions.
    beside: tuple[Work, ...] = ()
    novel: bool = False  # weights in a dtype that the measurements of its kind have not
    # What it is besides, where a family's formulas take it for one of their kernels: the gradient
    # of one, a resampling for a gather. Measurements of those say nothing of it.
    form: str = ""

    @property
    def sort(self) -> str:
        """What measurements tell kernels apart by, whatever their dtype: `reduce softmax`."""
        name, kind = self.kernel.partition(".")[2], self.kind.replace(".", " ")
        return " ".join(filter(None, (name, "" if kind == name else kind, self.form)))

    @cached_property
    def extents(self) -> dict[str, Number]:
        return dict(self.dims)

    @property
    def is_of_columns(self) -> bool:
        """Whether the rows of a reduction lie side by side in memory."""
        return isinstance(self.detail, Channels) and self.detail.last

    @property
    def writes_rows(self) -> bool:
        """Whether a reduction gives the cells of its rows, too."""
        return any(o.staging == "written" and "r" in o.dims for o in self.operands)

    def detail_as(self, kind: type[D]) -> D:
        """What the formulas of its family go by, which is of that kind."""
        assert isinstance(self.detail, kind), f"{self.kernel}: {self.detail}"
        return self.detail

    @property
    def rate_dtype(self) -> DType:
        """The dtype whose listed rate bounds the arithmetic."""
        return self.math or self.dtype

    @property
    def multiply_add(self) -> int:
        """Operations at each point of a product."""
        return self.dtype.multiply_add

    @property
    def points(self) -> Number:
        return product(n for _, n in self.dims)

    @property
    def grid(self) -> tuple[str, ...]:
        """The dimensions that blocks divide among them."""
        return tuple(d for d, _ in self.dims if d not in self.reduced)

    @property
    def nbytes(self) -> Number:
        """Each operand moved once."""
        return sum((o.nbytes for o in self.operands), 0.0)

    @property
    def operand_bytes(self) -> Number:
        """Bytes of the kernel's own operands."""
        return self.nbytes if self.own_bytes is None else self.own_bytes

    @property
    def output_points(self) -> Number:
        return product(self.extents[d] for d in self.grid)

    @property
    def is_contraction(self) -> bool:
        return self.kernel in ("k.gemm", "k.conv", "k.attention", "k.experts")

    @property
    def is_sum(self) -> bool:
        """Whether blocks may share out what is summed and join their parts: not where its sums are
        needed for the cells that the same launch writes."""
        if self.kernel == "k.reduce":
            return self.is_of_columns or not self.writes_rows
        return self.is_contraction or (self.kernel == "nest" and bool(self.reduced))

    def take(self, which: Number) -> Work:
        """The kernels at these places, of many."""
        return self.each(lambda n: np.asarray(n)[which] if np.ndim(n) else n)

    @property
    def likeness(self) -> tuple[Hashable, ...]:
        """All that is no number: works that agree in it go into one of many kernels."""
        return (
            *(self.kernel, self.reduced, self.dtype, self.pipe, self.accumulator_bits),
            *(self.math, self.kind, self.novel, self.form, tuple(d for d, _ in self.dims)),
            *((o.dims, o.staging) for o in self.operands),
            *map(_likeness, (self.detail, self.times, self.own_bytes, self.weights, self.beside)),
        )

    def each(self, change: Callable[[Number], Number]) -> Work:
        """The work with every number changed: to a column, a tensor, a selection of rows."""
        return replace(
            self,
            dims=tuple((d, change(n)) for d, n in self.dims),
            operands=tuple(
                Operand(o.dims, change(o.cell_bytes), change(o.nbytes), o.staging)
                for o in self.operands
            ),
            flops=change(self.flops),
            products=change(self.products),
            lane_ops=change(self.lane_ops),
            density=change(self.density),
            detail=_each(self.detail, change),
            simd_ops=change(self.simd_ops),
            times=_each(self.times, change),
            own_bytes=_each(self.own_bytes, change),
            weights=_each(self.weights, change),
            beside=_each(self.beside, change),
        )


@cache
def _names(kind: type[Detail]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def _each(value: Any, change: Callable[[Number], Number]) -> Any:
    """A value of a detail with its numbers changed."""
    match value:
        case None | str() | bool():
            return value
        case tuple():
            return tuple(_each(x, change) for x in cast("tuple[Any, ...]", value))
        case Detail() | Work():
            return value.each(change)
        case _:
            return change(value)


def _likeness(value: Any) -> Hashable:
    """All of it that is no number."""
    match value:
        case None | str() | bool():
            return value
        case tuple():
            return tuple(map(_likeness, cast("tuple[Any, ...]", value)))
        case Work():
            return value.likeness
        case Detail():
            parts = (_likeness(getattr(value, name)) for name in _names(type(value)))
            return (type(value), *parts)
        case _:
            return ...


class HasNumbers(Protocol):
    """Anything of numbers: a work, tiles."""

    def each(self, change: Callable[[Number], Number]) -> Self: ...


N = TypeVar("N", bound=HasNumbers)


def stacked(ones: Sequence[N]) -> N:
    """One of many kernels from those of one each, which agree in likeness."""
    rows: list[list[Number]] = []
    for one in ones:
        row: list[Number] = []
        one.each(row.append)
        rows.append(row)
    columns = iter(np.array(rows, float).T)
    return ones[0].each(lambda _: next(columns))


def product(numbers: Iterable[Number]) -> Number:
    result: Number = 1
    for n in numbers:
        result = result * n
    return result
