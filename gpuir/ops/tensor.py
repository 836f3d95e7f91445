"""The framework-neutral vocabulary: what frontends produce, `fuse` groups and `legalize` consumes.

An op is its fields, its type rule and its flops. Axes are never negative here: frontends normalise.
Type rules raise `ModelError` without a place; whoever builds the op adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, prod
from typing import Any, ClassVar, Literal, get_args

from gpuir.ir.errors import ModelError, PluginError, nearest
from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.strides import Strided
from gpuir.ir.types import DType, TensorType, bool_, c64, c128, f32, f64, i64
from gpuir.ops.axes import Axes, alike, broadcasting, named, numbered
from gpuir.ops.scalar import SCALARS, flops_of
from gpuir.ops.spread import parse_spread

Scalar = int | float | bool
Setting = int | float | bool | str
Combine = Literal["none", "add", "mul", "min", "max"]


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape numpy broadcasts `shapes` to."""
    if not shapes:
        return ()
    if all(s == shapes[0] for s in shapes):
        return shapes[0]
    rank = max(map(len, shapes))
    result: list[int] = []
    for column in zip(*(((1,) * (rank - len(s)) + s) for s in shapes), strict=True):
        wide = {n for n in column if n != 1}
        if len(wide) > 1:
            found = ", ".join(str(list(s)) for s in shapes)
            raise ModelError(
                "the shapes do not broadcast", expected="equal sizes, or size 1", found=found
            )
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def _check(condition: bool, what: str, expected: object = "", found: object = "") -> None:
    if not condition:
        raise ModelError(what, expected=str(expected), found=str(found))


def _factors(op: str, *types: TensorType) -> None:
    """Operands of a product are of one dtype, or all integers, or all floats of 8 bits."""
    first = types[0].dtype
    if all(x.dtype == first for x in types):
        return
    narrow = all(x.dtype.is_float and x.dtype.bits == 8 for x in types)
    ok = narrow or all(x.dtype.is_integer for x in types)
    _check(ok, f"{op}: dtypes differ", "one dtype, or integers", ", ".join(map(str, types)))


def _indices(op: str, type: TensorType) -> None:
    _check(type.dtype.is_integer, f"{op}: the indices must be integers", "integers", type)


def _axis(op: str, axis: int, type: TensorType) -> None:
    _check(0 <= axis < type.rank, f"{op}: the axis is out of range", f"0..{type.rank - 1}", axis)


# ---------------------------------------------------------------------------- kinds

Fusing = Literal["contraction", "experts", "reduce", "map", "layout", "alone"]
Autocast = Literal["narrow", "wide", "widest", "kept", "any"]


class TensorOp(Op):
    """An op of this vocabulary. What passes and kernels ask of an op is its row: its base class,
    which is its kind, and these fields. An op that says nothing is opaque: costed as its operands
    and results, and counted as not modelled.

    `kernel` is what a launch of it becomes; layout and generating ops go along with the rest of
    their launch. `fuses` is the kind that `fuse` takes it for, `weight` the field with what a
    contraction may unpack on its way into the tile. `by_rows` is of what walks over whole rows, and
    so makes its launch a reduction whatever else is in it. `autocast` is the dtype that torch.amp
    gives its operands: the narrow one, f32 (`wide`), the widest that they have, the one they had
    before the pass (`kept`), or whatever comes (`any`).

    What our ops mean in numpy and their gradients are tables of other rooms (`interp`, `passes`).
    One from outside may bring both, as methods: `meaning(at)` gives its results as arrays, of its
    operands as `at(self.x)`; `gradient(r, results, dy)` gives its operands their gradients,
    `r.give(self.x, dx)`.
    """

    kernel: ClassVar[str] = "k.opaque"
    fuses: ClassVar[Fusing] = "alone"
    weight: ClassVar[str] = ""
    by_rows: ClassVar[bool] = False
    autocast: ClassVar[Autocast] = "any"

    def axis_names(self) -> Axes | None:
        """The op in index notation (`ops.axes`), from which sharding reads how it can be cut; None
        where nothing is known."""
        return None


class Pointwise(TensorOp):
    """A cell of the result from the cells at its place."""

    kernel: ClassVar[str] = "k.map"
    overwrites: ClassVar[bool] = True
    fuses: ClassVar[Fusing] = "map"

    def axis_names(self) -> Axes:
        """Operands broadcast to the results."""
        return broadcasting(self.operands, (("...", x.shape) for x in self.result_types))


class Generating(TensorOp):
    """Reads nothing: each launch that needs it makes it again."""

    kernel: ClassVar[str] = "k.map"


class Layout(TensorOp):
    """The same cells elsewhere: a view, where strides can say it."""

    kernel: ClassVar[str] = "k.copy"
    fuses: ClassVar[Fusing] = "layout"

    def view(self, x: Strided) -> Strided | None:
        """The result as a view of its operand; None where cells have to move."""
        raise NotImplementedError


class Joining(TensorOp):
    """Tensors side by side, or one with cells around it."""

    kernel: ClassVar[str] = "k.copy"
    autocast: ClassVar[Autocast] = "widest"


class Indexing(TensorOp):
    """Cells read where indices say."""

    kernel: ClassVar[str] = "k.gather"


class Scattering(TensorOp):
    """Cells written where indices say."""

    kernel: ClassVar[str] = "k.scatter"
    overwrites: ClassVar[bool] = True
    autocast: ClassVar[Autocast] = "widest"
    x: Value
    updates: Value


class Reducing(TensorOp):
    """Runs along axes of its first operand."""

    kernel: ClassVar[str] = "k.reduce"
    fuses: ClassVar[Fusing] = "reduce"
    x: Value

    def reduced_axes(self) -> tuple[int, ...]:
        """The axes it runs along, in order: those of its field `axes` or `axis`, from 0."""
        axes = getattr(self, "axes", getattr(self, "axis", None))
        if axes is None:
            raise PluginError(
                f"{self.name} is a reducing op that does not say along which axes it runs",
                expected="a field axes or axis, or a method reduced_axes",
                fix="def reduced_axes(self): return (self.x.type.rank - 1,)",
            )
        rank = self.operands[0].type.rank
        found: Iterable[int] = (axes,) if isinstance(axes, int) else axes
        return tuple(sorted(a % rank for a in found))

    def axis_names(self) -> Axes | None:
        """Operands broadcast to the first; results have its axes, or those that are left."""
        rank, reduced = self.operands[0].type.rank, self.reduced_axes()
        whole = numbered(rank)
        left = tuple(n for i, n in enumerate(whole) if i not in reduced)
        if any(x.rank not in (rank, len(left)) for x in self.result_types):
            return None
        shapes = [x.shape for x in self.result_types]
        results = ((whole if len(x) == rank else left, x) for x in shapes)
        axes = broadcasting(self.operands, results)
        return replace(axes, whole=frozenset(map(str, reduced)))


class NormGradient(Reducing):
    """A gradient of a norm, which computes its statistics again."""

    by_rows: ClassVar[bool] = True
    axes: tuple[int, ...]


class Window(TensorOp):
    """A cell from a window of cells around its place."""


class Contraction(TensorOp):
    """Multiplies and sums: at most one to a launch."""

    contraction: ClassVar[bool] = True
    fuses: ClassVar[Fusing] = "contraction"


class Call(TensorOp):
    """A whole call of a library."""


KINDS = (
    *(Pointwise, Generating, Layout, Joining, Indexing, Scattering, Reducing, Window),
    *(Contraction, Call),
)


# ---------------------------------------------------------------------------- pointwise


@dataclass(frozen=True)
class Map(Pointwise):
    """y[i] = fn(args[0][i], args[1][i], ..., *imm), operands broadcast as numpy does.

    `fn` is a row of `ops.scalar`; `imm` are trailing scalar arguments of the operands' dtype.
    """

    name: ClassVar[str] = "t.map"
    autocast: ClassVar[Autocast] = "widest"
    fn: str
    args: tuple[Value, ...]
    imm: tuple[Scalar, ...] = ()

    def types(self) -> tuple[TensorType, ...]:
        row = SCALARS.get(self.fn)
        if row is None:
            raise ModelError(
                f"t.map: the scalar function {self.fn!r} is unknown",
                expected=nearest(self.fn, SCALARS),
            )
        found = len(self.args) + len(self.imm)
        _check(found == row.arity, f"t.map {self.fn}: wrong number of arguments", row.arity, found)
        types = [v.type for v in self.args]
        dtype = types[1 if row.gives == "second" else 0].dtype
        same = types[1:] if row.gives == "second" else types
        if any(t.dtype is not dtype and t.dtype != dtype for t in same):
            found = ", ".join(map(str, types))
            raise ModelError(
                f"t.map {self.fn}: the data types of the arguments differ",
                expected="one dtype",
                found=found,
            )
        if row.takes == "bool" and types[0].dtype != bool_:
            raise ModelError(
                f"t.map {self.fn}: the argument is not a bool", expected="bool", found=str(types[0])
            )
        shape = types[0].shape if len(types) == 1 else broadcast(*(t.shape for t in types))
        return (TensorType(shape, bool_ if row.gives == "bool" else dtype),)

    def flops(self) -> int:
        of = self.args[1 if SCALARS[self.fn].gives == "second" else 0].type.dtype
        return flops_of(self.fn, of) * prod(broadcast(*(v.type.shape for v in self.args)))

    @property
    def is_same(self) -> bool:
        return self.fn == "identity"


@dataclass(frozen=True)
class Cast(Pointwise):
    """y[i] = x[i] as `dtype`. Floats to integers truncate towards zero; `saturate` clamps to the
    range of an 8-bit float or narrower; `rounding` is of f8e8m0 alone."""

    name: ClassVar[str] = "t.cast"
    x: Value
    dtype: DType
    saturate: bool = True
    rounding: Literal["up", "down", "nearest"] = "up"

    def types(self) -> tuple[TensorType, ...]:
        return (TensorType(self.x.type.shape, self.dtype),)

    @property
    def is_same(self) -> bool:
        return self.dtype == self.x.type.dtype


@dataclass(frozen=True)
class Bitcast(Pointwise):
    """The same bits read as `dtype`, of equal width."""

    name: ClassVar[str] = "t.bitcast"
    autocast: ClassVar[Autocast] = "kept"
    x: Value
    dtype: DType

    def types(self) -> tuple[TensorType, ...]:
        _check(
            self.x.type.dtype.bits == self.dtype.bits, "t.bitcast: the two types differ in width"
        )
        return (TensorType(self.x.type.shape, self.dtype),)

    @property
    def is_same(self) -> bool:
        return True


@dataclass(frozen=True)
class Ordered(Pointwise):
    """y[i] = x[i], stored in memory with the axes in `order`, outermost first. Where x lies
    so already, nothing moves."""

    name: ClassVar[str] = "t.ordered"
    x: Value
    order: tuple[int, ...]

    def types(self) -> tuple[TensorType, ...]:
        type = self.x.type
        _check(
            sorted(self.order) == list(range(type.rank)),
            "t.ordered: the order must list every axis once",
            f"each of the axes 0..{type.rank - 1} once",
            list(self.order),
        )
        return (type.with_order(self.order),)


@dataclass(frozen=True)
class Parts(Layout):
    """Complex numbers as pairs along a new last axis, real part and imaginary, or such pairs as
    complex numbers: the same bytes."""

    name: ClassVar[str] = "t.parts"
    autocast: ClassVar[Autocast] = "kept"
    x: Value

    def view(self, x: Strided) -> Strided | None:
        if self.x.type.dtype.kind == "complex":
            return Strided((*x.shape, 2), (*(2 * s for s in x.strides), 1))
        if x.strides[-1] != 1 or any(s % 2 for s in x.strides[:-1]):
            return None
        return Strided(x.shape[:-1], tuple(s // 2 for s in x.strides[:-1]))

    def types(self) -> tuple[TensorType, ...]:
        shape, dtype = self.x.type.shape, self.x.type.dtype
        for part, both in ((f32, c64), (f64, c128)):
            if dtype == both:
                return (TensorType((*shape, 2), part),)
            if dtype == part and shape[-1:] == (2,):
                return (TensorType(shape[:-1], both),)
        raise ModelError(
            "t.parts: the operand is neither complex nor pairs of numbers", found=str(self.x.type)
        )


# ---------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Constant(Generating):
    """A small tensor of known values: `data` in row-major order, or one number for all cells."""

    name: ClassVar[str] = "t.constant"
    type: TensorType
    data: tuple[Scalar, ...]

    def types(self) -> tuple[TensorType, ...]:
        size = self.type.size
        _check(
            len(self.data) in (1, size),
            "t.constant: wrong number of elements",
            size,
            len(self.data),
        )
        return (self.type,)


@dataclass(frozen=True)
class Iota(Generating):
    """y[i] = i[axis]."""

    name: ClassVar[str] = "t.iota"
    type: TensorType
    axis: int = 0

    def types(self) -> tuple[TensorType, ...]:
        _axis("t.iota", self.axis, self.type)
        return (self.type,)


# ---------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Reshape(Layout):
    """The same elements in row-major order, in another shape."""

    name: ClassVar[str] = "t.reshape"
    x: Value
    shape: tuple[int, ...]

    def view(self, x: Strided) -> Strided | None:
        return x.reshape(self.shape)

    def axis_names(self) -> Axes:
        """Axes whose extents multiply to the same, from the left, go together: the first of them
        is outermost on both sides."""
        old, new = self.x.type.shape, self.shape
        here, there = [""] * len(old), [""] * len(new)
        i = j = 0
        while 0 not in old and i < len(old) and j < len(new):
            start = (i, j)
            a, b = old[i], new[j]
            i, j = i + 1, j + 1
            while a != b:
                if a < b and i < len(old):
                    a, i = a * old[i], i + 1
                elif j < len(new):
                    b, j = b * new[j], j + 1
                else:
                    break
            first = next((n for n in range(start[0], i) if old[n] != 1), None)
            second = next((n for n in range(start[1], j) if new[n] != 1), None)
            if first is not None and second is not None and a == b:
                here[first] = there[second] = f"{start[0]}"
        return Axes((tuple(here),), (tuple(there),))

    def types(self) -> tuple[TensorType, ...]:
        _check(
            prod(self.shape) == self.x.type.size,
            "t.reshape: the number of elements changes",
            f"{self.x.type.size} elements",
            list(self.shape),
        )
        return (TensorType(self.shape, self.x.type.dtype),)


@dataclass(frozen=True)
class Transpose(Layout):
    """y's axis i is x's axis `perm[i]`."""

    name: ClassVar[str] = "t.transpose"
    x: Value
    perm: tuple[int, ...]

    def view(self, x: Strided) -> Strided | None:
        return x.transpose(self.perm)

    def axis_names(self) -> Axes:
        return named(self, tuple(f"{i}" for i in self.perm), x="...")

    def types(self) -> tuple[TensorType, ...]:
        shape = self.x.type.shape
        _check(
            sorted(self.perm) == list(range(len(shape))),
            "t.transpose: not a permutation of the axes",
            f"each of the axes 0..{len(shape) - 1} once",
            list(self.perm),
        )
        return (TensorType(tuple(shape[p] for p in self.perm), self.x.type.dtype),)


@dataclass(frozen=True)
class Broadcast(Layout):
    """x repeated to `shape` as numpy broadcasts it."""

    name: ClassVar[str] = "t.broadcast"
    x: Value
    shape: tuple[int, ...]

    def view(self, x: Strided) -> Strided | None:
        return x.broadcast_to(self.shape)

    def axis_names(self) -> Axes:
        return named(self, "...", x="...")

    def types(self) -> tuple[TensorType, ...]:
        _check(
            broadcast(self.x.type.shape, self.shape) == self.shape,
            "t.broadcast: the operand does not broadcast to the shape",
            list(self.shape),
            self.x.type,
        )
        return (TensorType(self.shape, self.x.type.dtype),)


@dataclass(frozen=True)
class Slice(Layout):
    """y[i] = x[starts + i * steps] for i below `sizes`, one an axis; steps may be negative."""

    name: ClassVar[str] = "t.slice"
    x: Value
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]

    def view(self, x: Strided) -> Strided | None:
        if any(s <= 0 for s in self.steps):
            return None
        return x.sliced(self.sizes, self.steps)

    def axis_names(self) -> Axes:
        rows = zip(self.x.type.shape, self.starts, self.sizes, self.steps, strict=True)
        cut = (i for i, (n, a, size, step) in enumerate(rows) if (a, size, step) != (0, n, 1))
        return alike(self, *cut)

    def types(self) -> tuple[TensorType, ...]:
        rows = zip(self.x.type.shape, self.starts, self.sizes, self.steps, strict=True)
        for n, start, size, step in rows:
            last = start + (size - 1) * step
            ok = size == 0 or (0 <= start < n and 0 <= last < n)
            _check(step != 0, "t.slice: a step of zero")
            _check(ok, "t.slice: out of range", self.x.type, f"from {start}, {size} by {step}")
        return (TensorType(self.sizes, self.x.type.dtype),)


@dataclass(frozen=True)
class Concat(Joining):
    """The operands one after another along `axis`. `in_place`: whoever made them has written them
    to where they are to be, and nothing moves."""

    name: ClassVar[str] = "t.concat"
    args: tuple[Value, ...]
    axis: int
    in_place: bool = False

    def axis_names(self) -> Axes:
        return alike(self, self.axis)

    def types(self) -> tuple[TensorType, ...]:
        first = self.args[0].type
        _axis("t.concat", self.axis, first)
        rest = [
            t.shape[: self.axis] + t.shape[self.axis + 1 :] for t in (v.type for v in self.args)
        ]
        found = ", ".join(str(v.type) for v in self.args)
        alike = all(r == rest[0] for r in rest) and all(
            v.type.dtype == first.dtype for v in self.args
        )
        _check(
            alike,
            "t.concat: the types of the operands do not match",
            f"the same sizes, except on axis {self.axis}",
            found,
        )
        total = sum(v.type.shape[self.axis] for v in self.args)
        shape = first.shape[: self.axis] + (total,) + first.shape[self.axis + 1 :]
        return (TensorType(shape, first.dtype),)


@dataclass(frozen=True)
class Pad(Joining):
    """x with `low` cells before and `high` after on each axis; a negative count crops.

    The new cells hold `value` (a scalar operand; zero when left out), or what `mode` says: the
    nearest cell (edge), the mirror image (reflect), the other end (wrap).
    """

    name: ClassVar[str] = "t.pad"
    x: Value
    low: tuple[int, ...]
    high: tuple[int, ...]
    value: Value | None = None
    mode: Literal["constant", "edge", "reflect", "wrap"] = "constant"

    def axis_names(self) -> Axes:
        ends = enumerate(zip(self.low, self.high, strict=True))
        return alike(self, *(i for i, pads in ends if pads != (0, 0)))

    def types(self) -> tuple[TensorType, ...]:
        rows = zip(self.x.type.shape, self.low, self.high, strict=True)
        shape = tuple(n + a + b for n, a, b in rows)
        _check(
            min(shape, default=0) >= 0,
            "t.pad: a negative pad removes more than the axis has",
            self.x.type,
            list(shape),
        )
        return (TensorType(shape, self.x.type.dtype),)


# ---------------------------------------------------------------------------- indexing


@dataclass(frozen=True)
class Gather(Indexing):
    """y[a, i, b] = x[a, indices[i], b]; i replaces the axis `axis`. Negative indices count from
    the end. numpy's `take`.

    Which rows are named depends on the data: costs expect any as often as any other, or as `spread`
    says (`ops.spread`: `zipf:1.05`).
    """

    name: ClassVar[str] = "t.gather"
    x: Value
    indices: Value
    axis: int = 0
    spread: str = ""

    def axis_names(self) -> Axes:
        index = tuple(f"i{i}" for i in range(self.indices.type.rank))
        x = numbered(self.x.type.rank)
        before, after = x[: self.axis], x[self.axis + 1 :]
        return named(self, (*before, *index, *after), x=(*before, "", *after), indices=index)

    def types(self) -> tuple[TensorType, ...]:
        parse_spread(self.spread)
        _axis("t.gather", self.axis, self.x.type)
        _indices("t.gather", self.indices.type)
        shape, index = self.x.type.shape, self.indices.type.shape
        return (TensorType(shape[: self.axis] + index + shape[self.axis + 1 :], self.x.type.dtype),)


def _differing(x: tuple[int, ...], y: tuple[int, ...], first: int | None = None) -> Iterable[int]:
    """The axes that shapes differ in, and those from `first` on."""
    pairs = enumerate(zip(x, y, strict=True))
    return (i for i, (n, m) in pairs if n != m or (first is not None and i >= first))


@dataclass(frozen=True)
class GatherElements(Indexing):
    """y[i] = x[i with i[axis] replaced by indices[i]]; y has the indices' shape."""

    name: ClassVar[str] = "t.gather_elements"
    x: Value
    indices: Value
    axis: int

    def axis_names(self) -> Axes:
        return alike(self, self.axis, *_differing(self.indices.type.shape, self.x.type.shape))

    def types(self) -> tuple[TensorType, ...]:
        _axis("t.gather_elements", self.axis, self.x.type)
        return (TensorType(self.indices.type.shape, self.x.type.dtype),)


@dataclass(frozen=True)
class GatherND(Indexing):
    """y[b, i, c] = x[b, *indices[b, i, :], c]; x and indices share `batch` leading axes."""

    name: ClassVar[str] = "t.gather_nd"
    x: Value
    indices: Value
    batch: int = 0

    def axis_names(self) -> Axes:
        index = tuple(f"i{i}" for i in range(self.indices.type.rank - 1))
        depth = self.indices.type.shape[-1]
        rest = numbered(self.x.type.rank)[self.batch + depth :]
        x = (*index[: self.batch], *("",) * depth, *rest)
        return named(self, (*index, *rest), x=x, indices=(*index, ""))

    def types(self) -> tuple[TensorType, ...]:
        index, shape = self.indices.type.shape, self.x.type.shape
        _check(len(index) > self.batch, "t.gather_nd: the indices have too few axes")
        depth = index[-1]
        _check(
            self.batch + depth <= len(shape),
            "t.gather_nd: there are more indices than axes",
            self.x.type,
            depth,
        )
        return (TensorType(index[:-1] + shape[self.batch + depth :], self.x.type.dtype),)


@dataclass(frozen=True)
class ScatterElements(Scattering):
    """x with updates[i] combined into x[i with i[axis] replaced by indices[i]]."""

    name: ClassVar[str] = "t.scatter_elements"
    x: Value
    indices: Value
    updates: Value
    axis: int
    combine: Combine = "none"

    def axis_names(self) -> Axes:
        indices, updates, x = (v.type.shape for v in (self.indices, self.updates, self.x))
        differ = _differing(updates, x, None if indices == updates else 0)
        return alike(self, self.axis, *differ)

    def types(self) -> tuple[TensorType, ...]:
        _axis("t.scatter_elements", self.axis, self.x.type)
        return (TensorType(self.x.type.shape, self.x.type.dtype),)

    def flops(self) -> int:
        if self.combine == "none":
            return 0
        return flops_of(self.combine, self.x.type.dtype) * self.updates.type.size


@dataclass(frozen=True)
class ScatterND(Scattering):
    """x with updates[i] combined into x[*indices[i, :]]; `spread` as in `Gather`."""

    name: ClassVar[str] = "t.scatter_nd"
    x: Value
    indices: Value
    updates: Value
    combine: Combine = "none"
    spread: str = ""

    def axis_names(self) -> Axes:
        """Rows that are added are terms of a sum."""
        depth = self.indices.type.shape[-1]
        rest = numbered(self.x.type.rank)[depth:]
        index = tuple(f"i{i}" for i in range(self.indices.type.rank - 1))
        x = (*("",) * depth, *rest)
        adds = " ".join(index) if self.combine == "add" else ""
        axes = named(self, x, summed=adds, x=x, indices=(*index, ""), updates=(*index, *rest))
        return replace(axes, onto=self.x)

    def types(self) -> tuple[TensorType, ...]:
        parse_spread(self.spread)
        return (TensorType(self.x.type.shape, self.x.type.dtype),)

    def flops(self) -> int:
        if self.combine == "none":
            return 0
        return flops_of(self.combine, self.x.type.dtype) * self.updates.type.size


# ---------------------------------------------------------------------------- reductions


def _reduced(type: TensorType, axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    for axis in axes:
        _axis("reduction", axis, type)
    _check(len(set(axes)) == len(axes), "reduction: an axis is listed twice", found=list(axes))
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(type.shape))
    return tuple(n for i, n in enumerate(type.shape) if i not in axes)


@dataclass(frozen=True)
class Reduce(Reducing):
    """y[o] = fn over the cells of x along `axes`. An empty max is the dtype's least value."""

    name: ClassVar[str] = "t.reduce"
    fn: Literal["sum", "prod", "max", "min", "mean"]
    x: Value
    axes: tuple[int, ...]
    keepdims: bool = False

    def reduced_axes(self) -> tuple[int, ...]:
        return tuple(sorted(self.axes))

    def axis_names(self) -> Axes | None:
        axes = super().axis_names()
        if axes is None or self.fn not in ("sum", "mean"):
            return axes
        return replace(axes, summed=axes.whole, whole=frozenset())

    def types(self) -> tuple[TensorType, ...]:
        return (TensorType(_reduced(self.x.type, self.axes, self.keepdims), self.x.type.dtype),)

    def flops(self) -> int:
        return flops_of(self.fn, self.x.type.dtype) * self.x.type.size


@dataclass(frozen=True)
class ArgReduce(Reducing):
    """The index along `axis` of the largest or smallest cell; of equal cells the first, or the
    last."""

    name: ClassVar[str] = "t.arg_reduce"
    fn: Literal["max", "min"]
    x: Value
    axis: int
    keepdims: bool = False
    last: bool = False

    def reduced_axes(self) -> tuple[int, ...]:
        return (self.axis,)

    def types(self) -> tuple[TensorType, ...]:
        return (TensorType(_reduced(self.x.type, (self.axis,), self.keepdims), i64),)

    def flops(self) -> int:
        return self.x.type.size


@dataclass(frozen=True)
class Cumulative(Reducing):
    """y[.., i, ..] = fn over x[.., 0..i, ..] along `axis`; `exclusive` leaves out i itself (sums
    and products only). `logaddexp` is the logarithm of the running sum of exponentials."""

    name: ClassVar[str] = "t.cumulative"
    fuses: ClassVar[Fusing] = "alone"
    autocast: ClassVar[Autocast] = "wide"
    fn: Literal["sum", "prod", "max", "min", "logaddexp"]
    x: Value
    axis: int
    exclusive: bool = False
    reverse: bool = False

    def reduced_axes(self) -> tuple[int, ...]:
        return (self.axis,)

    def types(self) -> tuple[TensorType, ...]:
        _axis("t.cumulative", self.axis, self.x.type)
        neutral = self.fn in ("sum", "prod") or not self.exclusive
        _check(
            neutral,
            "t.cumulative: `exclusive` has no first value for this function",
            "not exclusive",
        )
        return (TensorType(self.x.type.shape, self.x.type.dtype),)

    def flops(self) -> int:
        return flops_of(self.fn, self.x.type.dtype) * self.x.type.size


@dataclass(frozen=True)
class TopK(Call):
    """The k largest (or smallest) cells along `axis` and their indices; ties by lower index."""

    name: ClassVar[str] = "t.topk"
    kernel: ClassVar[str] = "k.routine"
    x: Value
    k: int
    axis: int
    largest: bool = True

    def axis_names(self) -> Axes:
        return alike(self, self.axis)

    def types(self) -> tuple[TensorType, ...]:
        _axis("t.topk", self.axis, self.x.type)
        shape = self.x.type.shape
        _check(
            self.k <= shape[self.axis],
            "t.topk: k is larger than the axis",
            shape[self.axis],
            self.k,
        )
        shape = shape[: self.axis] + (self.k,) + shape[self.axis + 1 :]
        return TensorType(shape, self.x.type.dtype), TensorType(shape, i64)

    def flops(self) -> int:
        """One comparison per element and doubling of k, as a bitonic top-k does at least."""
        return self.x.type.size * max(self.k - 1, 1).bit_length()


@dataclass(frozen=True)
class Softmax(Reducing):
    """exp(x - max x) / sum exp(x - max x) along `axis`; with `log`, its logarithm."""

    name: ClassVar[str] = "t.softmax"
    by_rows: ClassVar[bool] = True
    autocast: ClassVar[Autocast] = "wide"
    x: Value
    axis: int
    log: bool = False

    def reduced_axes(self) -> tuple[int, ...]:
        return (self.axis,)

    def types(self) -> tuple[TensorType, ...]:
        _axis("t.softmax", self.axis, self.x.type)
        return (TensorType(self.x.type.shape, self.x.type.dtype),)

    def flops(self) -> int:
        """Max, subtract, exp, sum and divide (or subtract): five an element."""
        return 5 * self.x.type.size


@dataclass(frozen=True)
class Normalize(Reducing):
    """(x - mean) / sqrt(var + eps) over `axes`, times `scale`, plus `bias`; both broadcast to x.

    Without `center` the mean is not taken off and var is the mean square: RMS norm. With `groups`,
    axis 1 is cut into that many groups and statistics are per group: group norm. Statistics are
    computed in f32 for narrower dtypes.
    """

    name: ClassVar[str] = "t.normalize"
    by_rows: ClassVar[bool] = True
    autocast: ClassVar[Autocast] = "wide"
    x: Value
    axes: tuple[int, ...]
    scale: Value | None = None
    bias: Value | None = None
    eps: float = 1e-5
    center: bool = True
    groups: int | None = None

    def reduced_axes(self) -> tuple[int, ...]:
        return tuple(sorted(self.axes))

    def types(self) -> tuple[TensorType, ...]:
        type = self.x.type
        for axis in self.axes:
            _axis("t.normalize", axis, type)
        for v in (self.scale, self.bias):
            ok = v is None or broadcast(v.type.shape, type.shape) == type.shape
            _check(ok, "t.normalize: scale or bias does not broadcast to x", type, v and v.type)
        if self.groups is not None:
            ok = 1 in self.axes and self.groups > 0 and type.shape[1] % self.groups == 0
            _check(
                ok, "t.normalize: the number of groups does not divide axis 1", type, self.groups
            )
        return (TensorType(type.shape, type.dtype),)

    def flops(self) -> int:
        """Two to reduce (and two to centre), one to normalise, one each for scale and bias."""
        per = 3 + 2 * self.center + (self.scale is not None) + (self.bias is not None)
        return per * self.x.type.size


@dataclass(frozen=True)
class SlidingWindow:
    """How windows slide over spatial axes: one entry each. `extra` cells of `high` are there only
    because the last window hangs over the padding that was declared."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilations: tuple[int, ...]
    extra: tuple[int, ...] = ()

    @property
    def slide(self) -> dict[str, Any]:
        """What a convolution or a pool says of it, beside its sizes."""
        names = ("strides", "low", "high", "dilations")
        return {name: getattr(self, name) for name in names}

    @property
    def reaches(self) -> tuple[int, ...]:
        """Cells from the first of a window to its last."""
        return tuple(d * (n - 1) + 1 for n, d in zip(self.sizes, self.dilations, strict=True))

    def counts(self, cells: Sequence[int]) -> tuple[int, ...]:
        """How many windows there are on so many cells: none of one that does not fit."""
        rest = (sum(x) for x in zip(cells, self.low, self.high, strict=True))
        rows = zip(rest, self.reaches, self.strides, strict=True)
        return tuple(max((n - reach) // stride + 1, 0) for n, reach, stride in rows)

    def hanging(self, cells: Sequence[int], counts: Sequence[int]) -> SlidingWindow:
        """As many windows as `counts` says, padded at the end where these are more or fewer."""
        high, extra = list(self.high), [0] * len(self.high)
        for i, (count, found) in enumerate(zip(counts, self.counts(cells), strict=True)):
            if count != found:
                last = (count - 1) * self.strides[i] + self.reaches[i] - cells[i] - self.low[i]
                high[i], extra[i] = max(last, 0), max(last - high[i], 0)
        return replace(self, high=tuple(high), extra=tuple(extra))


def _has_axes(op: str, *types: TensorType) -> None:
    """Images, channels, and what lies behind."""
    ok = all(type.rank >= 2 for type in types)
    _check(
        ok, f"{op}: the operand needs at least two axes", "[n, c, ..]", ", ".join(map(str, types))
    )


def _steps(op: str, *parts: tuple[int, ...], groups: int = 1) -> None:
    """Strides and dilations, and the groups that channels are divided by, are at least 1."""
    ok = groups >= 1 and all(n >= 1 for part in parts for n in part)
    _check(ok, f"{op}: strides, dilations and groups must be at least 1", found=(*parts, groups))


@dataclass(frozen=True)
class Pool(Window):
    """y[n, c, p] = fn over x[n, c, p * strides - low + w * dilations] for w in `window`.

    `low` and `high` pad each spatial axis; padding never wins a max, and counts in the average's
    divisor only under `include_pad`, where `extra` trailing cells (of a window that hangs over the
    declared padding) still do not. `lp` is the `p`-norm. `argmax` gives the flat index into the
    n, c image (row-major; spatially column-major under `column_major`) of the winning cell.
    `adaptive` says that the size of the result was given: PyTorch has other kernels for such pools.
    """

    name: ClassVar[str] = "t.pool"
    kernel: ClassVar[str] = "k.pool"
    fn: Literal["max", "mean", "lp", "argmax"]
    x: Value
    window: tuple[int, ...]
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilations: tuple[int, ...]
    include_pad: bool = False
    extra: tuple[int, ...] = ()
    p: int = 2
    column_major: bool = False
    adaptive: bool = False

    def axis_names(self) -> Axes:
        return alike(self, *range(2, self.result_types[0].rank))

    def types(self) -> tuple[TensorType, ...]:
        _has_axes("t.pool", self.x.type)
        n, c, *spatial = self.x.type.shape
        parts = (self.window, self.strides, self.low, self.high, self.dilations)
        ok = all(len(p) == len(spatial) for p in parts)
        _check(
            ok,
            "t.pool: the window needs one entry for each spatial axis",
            len(spatial),
            [len(p) for p in parts],
        )
        _check(
            min(self.window, default=1) > 0, "t.pool: the window is empty", "1 or more", self.window
        )
        _steps("t.pool", self.strides, self.dilations)
        extents = SlidingWindow(*parts).counts(spatial)
        dtype = i64 if self.fn == "argmax" else self.x.type.dtype
        return (TensorType((n, c, *extents), dtype),)

    def flops(self) -> int:
        return self.result_types[0].size * prod(self.window)


# ---------------------------------------------------------------------------- contractions


@dataclass(frozen=True)
class Matmul(Contraction):
    """c[.., m, n] = sum over k of a[.., m, k] * b[.., k, n]; leading axes broadcast. Both operands
    have rank 2 or more. `dtype` is the result's where it is not a's (integer accumulation)."""

    name: ClassVar[str] = "t.matmul"
    weight: ClassVar[str] = "b"
    kernel: ClassVar[str] = "k.gemm"
    autocast: ClassVar[Autocast] = "narrow"
    a: Value
    b: Value
    dtype: DType | None = None

    def axis_names(self) -> Axes:
        return named(self, "... m n", a="... m k", b="... k n", summed="k")

    def types(self) -> tuple[TensorType, ...]:
        a, b = self.a.type, self.b.type
        _check(
            min(a.rank, b.rank) >= 2, "t.matmul: operands need at least two axes", found=f"{a}, {b}"
        )
        _check(
            a.shape[-1] == b.shape[-2],
            "t.matmul: inner dimensions differ",
            f"b with {a.shape[-1]} rows",
            f"a: {a}, b: {b}",
        )
        _factors("t.matmul", a, b)
        shape = (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        return (TensorType(shape, self.dtype or a.dtype),)

    def flops(self) -> int:
        return self.a.type.dtype.multiply_add * self.result_types[0].size * self.a.type.shape[-1]


def _image_axes(op: Op, groups: int, y: str, summed: str, **reads: str) -> Axes:
    """The axes of a convolution: `C` and `K` are channels of all groups, `Q` positions, `R` cells
    of a window, and `W` the cells that windows read."""
    axes = range(op.operands[0].type.rank - 2)
    each = {"C": "g.c" if groups > 1 else "c", "K": "g.k" if groups > 1 else "k"}
    for name, one in (("Q", "q{0}"), ("R", "r{0}"), ("W", "q{0}+r{0}")):
        each[name] = " ".join(map(one.format, axes))

    def spelled(text: str) -> str:
        return " ".join(each.get(n, n) for n in text.split())

    texts = {name: spelled(text) for name, text in reads.items()}
    return named(op, spelled(y), summed=spelled(summed), **texts)


@dataclass(frozen=True)
class Conv(Contraction):
    """y[n, k, p] = sum over c, r of x[n, c, p * strides - low + r * dilations] * w[k, c, r].

    x is [N, C, *spatial], w is [K, C / groups, *window], any number of spatial axes.
    """

    name: ClassVar[str] = "t.conv"
    weight: ClassVar[str] = "w"
    kernel: ClassVar[str] = "k.conv"
    autocast: ClassVar[Autocast] = "narrow"
    x: Value
    w: Value
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    dtype: DType | None = None

    def axis_names(self) -> Axes:
        return _image_axes(self, self.groups, "n K Q", "c R", x="n C W", w="K c R")

    def types(self) -> tuple[TensorType, ...]:
        x, w = self.x.type, self.w.type
        _has_axes("t.conv", x, w)
        n, c, *spatial = x.shape
        k, per_group, *window = w.shape
        _factors("t.conv", x, w)
        _steps("t.conv", self.strides, self.dilations, groups=self.groups)
        ok = per_group * self.groups == c and k % self.groups == 0 and len(window) == len(spatial)
        _check(
            ok,
            "t.conv: the shape of the weights does not match x",
            f"w with the shape [K, {c} / groups, {len(spatial)} window axes], "
            "where K is a multiple of groups",
            f"x: {x}, w: {w}, groups={self.groups}",
        )
        parts = (tuple(window), self.strides, self.low, self.high, self.dilations)
        _check(
            all(len(p) == len(spatial) for p in parts),
            "t.conv: window attributes need one entry for each spatial axis",
            len(spatial),
            [len(p) for p in parts],
        )
        extents = SlidingWindow(*parts).counts(spatial)
        return (TensorType((n, k, *extents), self.dtype or x.dtype),)

    def flops(self) -> int:
        cells = self.result_types[0].size * prod(self.w.type.shape[1:])
        return self.x.type.dtype.multiply_add * cells


@dataclass(frozen=True)
class ConvTranspose(Contraction):
    """y[n, k, q] = sum over c, r, p with q = p * strides - low + r * dilations of
    x[n, c, p] * w[c, k, r]: the gradient of a convolution. w is [C, K / groups, *window]; `extra`
    cells are added at the high end of each spatial axis."""

    name: ClassVar[str] = "t.conv_transpose"
    kernel: ClassVar[str] = "k.conv"
    autocast: ClassVar[Autocast] = "narrow"
    x: Value
    w: Value
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    extra: tuple[int, ...] = ()
    dtype: DType | None = None

    def axis_names(self) -> Axes:
        return _image_axes(self, self.groups, "n K W", "c Q", x="n C Q", w="C k R")

    def types(self) -> tuple[TensorType, ...]:
        x, w = self.x.type, self.w.type
        _has_axes("t.conv_transpose", x, w)
        n, c, *spatial = x.shape
        rows, per_group, *window = w.shape
        _factors("t.conv_transpose", x, w)
        _steps("t.conv_transpose", self.strides, self.dilations, groups=self.groups)
        ok = rows == c and c % self.groups == 0 and len(window) == len(spatial)
        _check(
            ok,
            "t.conv_transpose: the shape of the weights does not match x",
            f"w with {c} rows",
            f"x: {x}, w: {w}",
        )
        extra = self.extra or (0,) * len(spatial)
        pads = zip(self.low, self.high, extra, strict=True)
        taken = [low + high - more for low, high, more in pads]
        steps = zip(spatial, self.strides, self.dilations, window, strict=True)
        spans = ((n - 1) * s + d * (r - 1) + 1 for n, s, d, r in steps)
        extents = tuple(span - n for span, n in zip(spans, taken, strict=True))
        _check(min(extents, default=0) >= 0, "t.conv_transpose: the pads remove more than there is")
        return (TensorType((n, per_group * self.groups, *extents), self.dtype or x.dtype),)

    def flops(self) -> int:
        """Each input cell meets each weight of its channel once."""
        cells = self.x.type.size * prod(self.w.type.shape[1:])
        return self.x.type.dtype.multiply_add * cells


# Heads of queries are j for each of h heads of keys.
ATTENTION = {"q": "... h.j s e", "k": "... h d e", "v": "... h d f", "mask": "... h.j s d"}


def _dependent(op: Attention | AttentionGradient) -> str:
    """The index of queries, where what one sees depends on its place."""
    return "s" if op.causal or op.window is not None or op.block else ""


@dataclass(frozen=True)
class Attention(Contraction):
    """y[.., h, s, f] = sum over d of softmax(scale * q . k, over d)[.., h, s, d] * v[.., g, d, f].

    q is [.., h, s, e], k is [.., g, d, e] and v is [.., g, d, f], where g divides h: grouped-query
    heads, head i reading group i // (h / g). `mask` broadcasts to [.., h, s, d]: boolean (False
    hides) or added. `causal` lets query i see the keys up to i + `offset`; `window` hides those
    more than `window` behind. `softcap` c > 0 bends scores to c * tanh(score / c). With `stats`
    there is a second result, what the gradient reads: the logarithm of each query's sum of
    exponentials, [.., h, s], in f32 or wider. `hidden` scores of a head are known to be hidden by
    the mask, so that nothing is computed of them.

    A kernel that goes by the blocks of a mask (torch's FlexAttention) computes those that hold a
    score that is seen, and each of them whole: `block` is their extent in queries and keys, and
    `visited` how many there are of all heads, how many a row of blocks has at most, and of how many
    blocks of keys, of all heads of keys, any is among them.
    """

    name: ClassVar[str] = "t.attention"
    kernel: ClassVar[str] = "k.attention"
    autocast: ClassVar[Autocast] = "narrow"
    q: Value
    k: Value
    v: Value
    mask: Value | None = None
    scale: float = 1.0
    causal: bool = False
    offset: int = 0
    window: int | None = None
    softcap: float = 0.0
    stats: bool = False
    hidden: int = 0
    block: tuple[int, ...] = ()
    visited: tuple[int, ...] = ()

    def axis_names(self) -> Axes:
        gives = ("... h.j s f", "... h.j s")[: 1 + self.stats]
        return named(self, *gives, whole=f"f {_dependent(self)}", **ATTENTION)

    def types(self) -> tuple[TensorType, ...]:
        q, k, v = self.q.type, self.k.type, self.v.type
        ranks = q.rank == k.rank == v.rank and q.rank >= 3
        ok = (
            ranks
            and q.shape[-1] == k.shape[-1]
            and k.shape[-2] == v.shape[-2]
            and k.shape[:-2] == v.shape[:-2]
            and q.shape[:-3] == k.shape[:-3]
            and k.shape[-3] > 0
            and q.shape[-3] % k.shape[-3] == 0
        )
        found = f"q: {q}, k: {k}, v: {v}"
        _check(
            ok,
            "t.attention: the shapes of the operands do not match",
            "[.., h, s, e], [.., g, d, e], [.., g, d, f]",
            found,
        )
        if self.mask is not None:
            scores = (*q.shape[:-1], k.shape[-2])
            fits = broadcast(self.mask.type.shape, scores) == scores
            _check(
                fits,
                "t.attention: the shape of the mask does not match",
                list(scores),
                self.mask.type,
            )
        most = 0 if self.mask is None else q.shape[-2] * k.shape[-2]
        expected = f"0 to {most}, of a mask"
        _check(
            0 <= self.hidden <= most,
            "t.attention: the value of `scores` is out of range",
            expected,
            self.hidden,
        )
        self._check_blocks()
        result = TensorType((*q.shape[:-1], v.shape[-1]), q.dtype)
        return (result, _stats_type(q)) if self.stats else (result,)

    @property
    def seen(self) -> int:
        """Scores of one head that `causal`, `window` and `hidden` leave: of the others nothing is
        computed. What else an explicit mask hides is known only when it is read."""
        s, d = self.q.type.shape[-2], self.k.type.shape[-2]
        last = _below(s, d, self.offset + 1) if self.causal else s * d
        first = 0 if self.window is None else _below(s, d, self.offset - self.window)
        return max(last - first - self.hidden, 0)

    @property
    def computed(self) -> int:
        """Scores of all heads that are computed: those that are seen, or the blocks visited."""
        if self.block:
            return self.visited[0] * prod(self.block)
        return prod(self.q.type.shape[:-2]) * self.seen

    @property
    def products(self) -> int:
        """Flops of both products, of the scores that are computed."""
        return 2 * self.computed * (self.q.type.shape[-1] + self.v.type.shape[-1])

    def flops(self) -> int:
        """Both products and five a score for the softmax."""
        return self.products + 5 * self.computed

    def workspace_bytes(self, split: int) -> int:
        """The log-sum-exp of every row in f32, unless that is a result already (Dao:
        FlashAttention-2, 2023, algorithm 1)."""
        return 0 if self.stats else 4 * prod(self.q.type.shape[:-1])

    def _check_blocks(self) -> None:
        """ModelError for blocks that there cannot be."""
        if not self.block and not self.visited:
            return
        sizes = len(self.block) == 2 and min(self.block) > 0
        expected, found = "the queries and keys of a block", self.block
        if sizes:
            heads, groups = prod(self.q.type.shape[:-2]), prod(self.k.type.shape[:-2])
            extents = (self.q.type.shape[-2], self.k.type.shape[-2])
            lines, columns = (-(-n // size) for n, size in zip(extents, self.block, strict=True))
            most = (heads * lines * columns, columns, groups * columns)
            sizes = len(self.visited) == 3
            sizes = sizes and all(0 <= n <= m for n, m in zip(self.visited, most, strict=True))
            expected, found = f"three numbers up to {list(most)}", self.visited
        _check(sizes, "t.attention: no mask has such blocks", expected, list(found))


def _below(s: int, d: int, reach: int) -> int:
    """Pairs of a query i of s and a key j of d with j < i + reach."""

    def before(n: int) -> int:
        """The sum over m < n of the keys below m: m, from 0 to d."""
        full = max(n - d - 1, 0)
        part = max(n - full, 0)
        return part * (part - 1) // 2 + full * d

    return before(reach + s) - before(reach)


@dataclass(frozen=True)
class Experts(Contraction):
    """A mixture of experts, from the router's choice to the weighted sum: y[i] = sum over j of
    shares[i, j] * expert which[i, j] of x[i].

    x is [tokens, hidden], `which` and `shares` are [tokens, k], up is [experts, inter, hidden] and
    down is [experts, hidden, inter]; biases have a row an expert. An expert is down · act(up · x),
    with act(g) = fn(alpha * g) / alpha. Gated, it is down · (act(g) * (u + beta)): g = gate · x and
    u = up · x, or, where there is no `gate`, both are rows of up, which then has 2 * inter: first
    those of g, or by turns when `interleaved`. `limit` bounds g from above and u on both sides.
    Rows between the products are rounded to x's dtype; `dtype` is the result's where it is another.
    `which` outside of the experts adds nothing.

    How many rows an expert gets depends on the data. Costs expect them to be equal, or, with `skew`
    above 0, popularity drawn from a power law of that exponent (`cost.routing`).

    The experts here may be one rank's of `ranks` that have as many each: rows of others' experts
    add nothing, and costs expect one rank's share, times `imbalance`, the busiest's over the mean.
    With `routed`, all_to_all brought the tokens: costs leave out those without a row here.

    `each` says that the model's own code runs one expert after another (Switch Transformer), and
    how many rows it expects for each: none where an expert gets none, fewer than were sent in all
    where those beyond an expert's capacity have no expert.
    """

    name: ClassVar[str] = "t.experts"
    weight: ClassVar[str] = "weights"
    kernel: ClassVar[str] = "k.experts"
    fuses: ClassVar[Fusing] = "experts"
    autocast: ClassVar[Autocast] = "narrow"
    x: Value
    which: Value
    shares: Value
    up: Value
    down: Value
    gate: Value | None = None
    up_bias: Value | None = None
    down_bias: Value | None = None
    gate_bias: Value | None = None
    fn: str = "silu"
    interleaved: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    skew: float = 0.0
    dtype: DType | None = None
    ranks: int = 1
    imbalance: float = 1.0
    routed: bool = False
    each: tuple[int, ...] = ()

    @property
    def sent(self) -> int:
        """The rows that are expected to have an expert, on any rank."""
        return sum(self.each) if self.each else self.which.type.size

    @property
    def rows(self) -> int:
        """Those that are expected here, on the busiest rank."""
        return ceil(self.sent * self.imbalance / self.ranks)

    @property
    def inter(self) -> int:
        """The width of an expert, between its products."""
        return self.down.type.shape[-1]

    @property
    def is_gated(self) -> bool:
        return self.gate is not None or self.up.type.shape[1] != self.inter

    @property
    def weights(self) -> tuple[Value, ...]:
        """The matrices of the experts."""
        return tuple(v for v in (self.gate, self.up, self.down) if v is not None)

    def axis_names(self) -> Axes:
        return named(self, "t o", summed="i", whole=_between(self), **_expert_axes(self))

    def types(self) -> tuple[TensorType, ...]:
        x, which, up, down = (v.type for v in (self.x, self.which, self.up, self.down))
        ranks = (x.rank, which.rank, up.rank, down.rank) == (2, 2, 3, 3)
        _check(
            ranks, "t.experts: x and which need two axes, the weights need three", found=_all(self)
        )
        (tokens, hidden), (experts, rows, inner) = x.shape, up.shape
        wide = self.inter if self.gate is not None else 2 * self.inter
        expected = (
            f"x [{tokens}, hidden], which and shares [{tokens}, k], up [experts, inter or 2 inter, "
            "hidden], down [experts, hidden, inter], gate as up, with inter rows"
        )
        ok = (
            which.shape[0] == tokens
            and self.shares.type.shape == which.shape
            and inner == hidden
            and down.shape[0] == experts
            and rows in (self.inter, wide)
            and (self.gate is None or self.gate.type.shape == up.shape)
        )
        _check(ok, "t.experts: the shapes of the operands do not match", expected, _all(self))
        biases = ((self.up_bias, up), (self.down_bias, down), (self.gate_bias, up))
        for bias, matrix in biases:
            ok = bias is None or bias.type.shape == matrix.shape[:2]
            _check(
                ok,
                "t.experts: the shape of a bias does not match",
                list(matrix.shape[:2]),
                bias and bias.type,
            )
        ok = self.gate is not None or self.gate_bias is None
        _check(ok, "t.experts: there is a bias for a gate, but no gate")
        _indices("t.experts", which)
        for v in self.weights:
            _factors("t.experts", x, v.type)
        ok = self.fn in SCALARS and SCALARS[self.fn].arity == 1
        _check(ok, f"t.experts: {self.fn!r} is not an activation", nearest(self.fn, SCALARS))
        _check(self.alpha != 0, "t.experts: alpha must not be 0")
        _check(0 <= self.skew < inf, "t.experts: skew is out of range", "0 or more", self.skew)
        _check(self.ranks >= 1, "t.experts: ranks must be at least 1", found=self.ranks)
        ok = 1 <= self.imbalance <= self.ranks
        found, expected = self.imbalance, f"1 to {self.ranks}, the ranks"
        _check(ok, "t.experts: imbalance is out of range", expected, found)
        ok = not self.each or (len(self.each) == experts and min(self.each) >= 0)
        ok = ok and sum(self.each) <= which.size
        expected = f"rows of {experts} experts, {which.size} in all at most"
        _check(ok, "t.experts: the rows of each expert are not valid", expected, list(self.each))
        return (TensorType((tokens, down.shape[1]), self.dtype or x.dtype),)

    def flops(self) -> int:
        """Of the rows that tokens make, not of all experts: products, activation, weighted sum."""
        cells = sum(prod(v.type.shape[1:]) for v in self.weights)
        activation = SCALARS[self.fn].flops + self.is_gated
        return (
            self.sent * (2 * cells + self.inter * activation + 2 * self.down.type.shape[1])
        ) // self.ranks

    def workspace_bytes(self, split: int) -> int:
        """The rows of both products and of the activation, which vLLM's `fused_moe.py` holds as
        three caches at once."""
        cells = sum(v.type.shape[1] for v in self.weights) + self.inter
        return self.rows * cells * self.result_types[0].dtype.bits // 8


def _expert_axes(op: Experts | ExpertsGradient) -> dict[str, str]:
    """u are the gate and the other rows of one matrix."""
    halves = op.gate is None and op.up.type.shape[1] != op.down.type.shape[-1]
    rows = ("i.u" if op.interleaved else "u.i") if halves else "i"
    tokens = {"x": "t h", "which": "t j", "shares": "t j", "dy": "t o"}
    up = {"up": f"e {rows} h", "gate": "e i h", "up_bias": f"e {rows}", "gate_bias": "e i"}
    return {**tokens, **up, "down": "e o i", "down_bias": "e o"}


def _between(op: Experts | ExpertsGradient) -> str:
    """What is read whole: the results' width, and what is between the products where something is
    added behind the second."""
    return "o" if op.down_bias is None else "o i"


def _all(op: Op) -> str:
    return ", ".join(str(v.type) for v in op.operands)


# ---------------------------------------------------------------------------- resampling, routines


@dataclass(frozen=True)
class Resize(Window):
    """x resampled to `shape`; the factors `scales` set where the sampling points are.

    Modes and coordinate rules are those of ONNX Resize, opset 19: `mode` nearest, linear or cubic;
    `coords` maps an output index to the input; `nearest` rounds it; `roi` (starts, then ends, one
    an axis, normalised) serves tf_crop_and_resize, which puts `outside` where it leaves the image.
    """

    name: ClassVar[str] = "t.resize"
    kernel: ClassVar[str] = "k.gather"
    autocast: ClassVar[Autocast] = "wide"
    x: Value
    shape: tuple[int, ...]
    scales: tuple[float, ...]
    mode: Literal["nearest", "linear", "cubic"] = "nearest"
    coords: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, ...] = ()
    outside: float = 0.0

    @property
    def taps(self) -> int:
        """Input cells read for one output cell: 1, 2 or 4 along each axis that is resampled."""
        per_axis = {"nearest": 1, "linear": 2, "cubic": 4}[self.mode]
        return per_axis ** sum(a != b for a, b in zip(self.x.type.shape, self.shape, strict=True))

    def axis_names(self) -> Axes:
        return alike(self, *_differing(self.x.type.shape, self.shape, 2))

    def types(self) -> tuple[TensorType, ...]:
        _check(
            len(self.shape) == self.x.type.rank,
            "t.resize: the number of axes must not change",
            self.x.type,
            list(self.shape),
        )
        return (TensorType(self.shape, self.x.type.dtype),)

    def flops(self) -> int:
        return 0 if self.mode == "nearest" else 2 * self.taps * prod(self.shape)


@dataclass(frozen=True)
class Routine(Call):
    """A whole library routine with a name, such as non-maximum suppression or a Fourier transform.

    `gives` are the result types, worked out by the frontend; where the length depends on the data
    they hold its upper bound, and the graph says so in `assumed`. `attrs` are the routine's
    settings, by name. What it computes is a row of interp's routine table.
    """

    name: ClassVar[str] = "t.routine"
    overwrites: ClassVar[bool] = True
    kernel: ClassVar[str] = "k.routine"
    autocast: ClassVar[Autocast] = "kept"
    fn: str
    args: tuple[Value, ...]
    gives: tuple[TensorType, ...]
    attrs: tuple[tuple[str, Scalar | str | tuple[Scalar, ...]], ...] = ()
    work: int = 0

    @property
    def draws(self) -> bool:
        """Whether it makes random numbers of nothing, which any thread may do for its own cells."""
        return self.fn == "random" and not self.args

    def types(self) -> tuple[TensorType, ...]:
        _check(self.work >= 0, "the work of a routine must be 0 or more", "0 or more", self.work)
        return self.gives

    def flops(self) -> int:
        """What the frontend that knows the routine has counted."""
        return self.work


@dataclass(frozen=True)
class Opaque(TensorOp):
    """A model op that gpuir does not know: it reads all operands and writes all results once, and
    its arithmetic is not counted. Reports list it; `strict` refuses it.

    `attrs` are the model node's own settings, by name, for whoever knows the op: a predictor."""

    name: ClassVar[str] = "t.opaque"
    overwrites: ClassVar[bool] = True
    kernel: ClassVar[str] = "k.opaque"
    autocast: ClassVar[Autocast] = "kept"
    kind: str
    args: tuple[Value, ...]
    gives: tuple[TensorType, ...]
    attrs: tuple[tuple[str, Setting | tuple[Setting, ...]], ...] = ()

    def types(self) -> tuple[TensorType, ...]:
        return self.gives


# ---------------------------------------------------------------------------- ranks

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift", "send", "recv"
]


def _group(op: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many ranks a group has."""
    _check(
        len(sizes) == len(strides) and all(n > 1 for n in sizes) and all(s > 0 for s in strides),
        f"{op}: a group of ranks needs a size of at least 2 and a stride for each axis of the mesh",
        "sizes and strides lists of the same length",
        f"sizes {list(sizes)}, strides {list(strides)}",
    )
    return prod(sizes)


def members(rank: int, sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a rank's group, in order along the axes of the mesh, the first axis quickest."""
    first = rank - sum(rank // step % n * step for n, step in zip(sizes, strides, strict=True))
    steps = [[i * step for i in range(n)] for n, step in zip(sizes, strides, strict=True)]
    return tuple(first + sum(offsets) for offsets in product(*reversed(steps)))


def _divided(op: str, type: TensorType, axis: int, ranks: int) -> TensorType:
    _axis(op, axis, type)
    extent = type.shape[axis]
    _check(
        extent % ranks == 0,
        f"{op}: the size of axis {axis} is not divisible",
        f"{ranks} parts",
        type,
    )
    shape = (*type.shape[:axis], extent // ranks, *type.shape[axis + 1 :])
    return TensorType(shape, type.dtype)


def _multiplied(op: str, type: TensorType, axis: int, ranks: int) -> TensorType:
    _axis(op, axis, type)
    shape = (*type.shape[:axis], type.shape[axis] * ranks, *type.shape[axis + 1 :])
    return TensorType(shape, type.dtype)


@dataclass(frozen=True)
class Collective(Call):
    """What the ranks of a group compute together, each from its own x (a collective of MPI or
    NCCL).

    The group of rank r are the ranks that differ from it along some axes of the mesh alone, whose
    `sizes` and `strides` are given; `group` is the name of those axes. With n ranks in it:
    all_reduce: the sum of all x (or what `combine` says). all_gather: all x side by side along
    `axis`. reduce_scatter: part i of n, along `axis`, of the sum, for rank i of the group.
    all_to_all: part i of each rank's x, cut along `axis`, side by side along `to`. broadcast: x of
    the first. shift: x of the rank before, that of the last for the first, as round a ring. send
    and recv: x as it is, on its way from one stage of a pipeline to another.

    With `routed`, not all cells go to all ranks: only some are read of an all_gather's result, and
    of a reduce_scatter's operand most are zero (rows of tokens on their way to experts and back).
    An all_to_all of unequal parts carries it out, of so many bytes on the busiest rank."""

    name: ClassVar[str] = "t.collective"
    kernel: ClassVar[str] = "k.collective"
    fn: CollectiveKind
    x: Value
    group: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    axis: int = 0
    to: int = 0
    combine: Literal["add", "mul", "min", "max"] = "add"
    routed: int | None = None

    @property
    def ranks(self) -> int:
        """How many take part."""
        return prod(self.sizes)

    @property
    def carried_by(self) -> CollectiveKind:
        """The collective that moves the cells."""
        return self.fn if self.routed is None else "all_to_all"

    def axis_names(self) -> Axes:
        match self.fn:
            case "all_gather" | "reduce_scatter":
                return alike(self, self.axis)
            case "all_to_all":
                return alike(self, self.axis, self.to)
            case _:
                return alike(self)

    def types(self) -> tuple[TensorType, ...]:
        ranks = _group("t.collective", self.sizes, self.strides)
        name = f"t.collective {self.fn}"
        kinds = get_args(CollectiveKind)
        _check(self.fn in kinds, "t.collective: the kind is unknown", ", ".join(kinds), self.fn)
        routes = self.routed is None or (
            self.routed >= 0 and self.fn in ("all_gather", "reduce_scatter")
        )
        expected = "0 or more, of an all_gather or a reduce_scatter"
        _check(routes, f"{name}: no such bytes to route", expected, self.routed)
        type = TensorType(self.x.type.shape, self.x.type.dtype)
        match self.fn:
            case "all_gather":
                type = _multiplied(name, type, self.axis, ranks)
            case "reduce_scatter":
                type = _divided(name, type, self.axis, ranks)
            case "all_to_all":
                type = _multiplied(name, _divided(name, type, self.axis, ranks), self.to, ranks)
            case _:
                pass
        return (type,)


@dataclass(frozen=True)
class Shard(Layout):
    """One part of an x that all ranks of a group have: rank i takes part i of n along `axis`. The
    group is given as that of `t.collective` is."""

    name: ClassVar[str] = "t.shard"
    x: Value
    axis: int
    group: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, x: Strided) -> Strided | None:
        return Strided(self.result_types[0].shape, x.strides)  # where the first rank's lies

    def axis_names(self) -> Axes:
        return alike(self, self.axis)

    def types(self) -> tuple[TensorType, ...]:
        ranks = _group("t.shard", self.sizes, self.strides)
        return (_divided("t.shard", self.x.type, self.axis, ranks),)


# ---------------------------------------------------------------------------- gradients


def _stats_type(q: TensorType) -> TensorType:
    return TensorType(q.shape[:-1], f64 if q.dtype == f64 else f32)


@dataclass(frozen=True)
class AttentionGradient(Contraction):
    """The gradients of q, k and v from dy, the gradient of the result; with `of_mask` also that of
    an added mask, in its full size. Scores are computed again from q, k and the `stats` of the
    attention, as FlashAttention does (Dao et al., 2022, algorithm 4); y is its result. Other fields
    are those of `t.attention`."""

    name: ClassVar[str] = "t.attention_gradient"
    kernel: ClassVar[str] = "k.attention_gradient"
    fuses: ClassVar[Fusing] = "alone"
    q: Value
    k: Value
    v: Value
    y: Value
    stats: Value
    dy: Value
    mask: Value | None = None
    scale: float = 1.0
    causal: bool = False
    offset: int = 0
    window: int | None = None
    softcap: float = 0.0
    of_mask: bool = False
    hidden: int = 0
    block: tuple[int, ...] = ()
    visited: tuple[int, ...] = ()

    @property
    def products(self) -> int:
        """Flops of the five products: of the scores again, of dq and dk the width of a head of q,
        of dv and of the scores' gradient that of v."""
        q, v = (x.type.shape[-1] for x in (self.q, self.v))
        return 2 * self.direct().computed * (3 * q + 2 * v)

    def direct(self) -> Attention:
        """The attention whose gradient this is."""
        return self.recast(Attention, stats=True)

    def axis_names(self) -> Axes:
        gives = [ATTENTION[x] for x in ("q", "k", "v", "mask")[: 3 + self.of_mask]]
        more = {"y": "... h.j s f", "stats": "... h.j s", "dy": "... h.j s f"}
        return named(self, *gives, summed="s", whole=_dependent(self), **ATTENTION, **more)

    def types(self) -> tuple[TensorType, ...]:
        y, stats = self.direct().result_types
        name = "t.attention_gradient"
        for given, wants in ((self.y, y), (self.dy, y), (self.stats, stats)):
            ok = (given.type.shape, given.type.dtype) == (wants.shape, wants.dtype)
            _check(ok, f"{name}: the operand is not the result of the attention", wants, given.type)
        found = tuple(v.type.with_shape(v.type.shape) for v in (self.q, self.k, self.v))
        if not self.of_mask:
            return found
        _check(self.mask is not None, f"{name}: the attention has no mask")
        return (*found, TensorType((*self.q.type.shape[:-1], self.k.type.shape[-2]), y.dtype))

    def flops(self) -> int:
        """Five products where the attention has two, and as much more beside them: 2.5 times as
        many (Dao: FlashAttention-2, 2023, section 4.1)."""
        return self.products + 25 * self.direct().computed // 2

    def workspace_bytes(self, split: int) -> int:
        """The sum of every row and dQ, in f32 (Dao: FlashAttention-2, 2023, algorithm 2)."""
        return 4 * (prod(self.q.type.shape[:-1]) + self.q.type.size)


@dataclass(frozen=True)
class ExpertsGradient(Contraction):
    """The gradients of x, `shares` and each matrix and bias that is there (up, down, gate, then
    their biases) from that of the result of a `t.experts`, dy; other fields are its own. What is
    between the products is computed again.
    """

    name: ClassVar[str] = "t.experts_gradient"
    kernel: ClassVar[str] = "k.experts_gradient"
    fuses: ClassVar[Fusing] = "alone"
    dy: Value
    x: Value
    which: Value
    shares: Value
    up: Value
    down: Value
    gate: Value | None = None
    up_bias: Value | None = None
    down_bias: Value | None = None
    gate_bias: Value | None = None
    fn: str = "silu"
    interleaved: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    skew: float = 0.0
    ranks: int = 1
    imbalance: float = 1.0
    routed: bool = False
    each: tuple[int, ...] = ()

    def direct(self) -> Experts:
        """The experts whose gradient this is."""
        return self.recast(Experts, dtype=self.dy.type.dtype)

    @property
    def weights(self) -> tuple[Value, ...]:
        """The matrices of the experts."""
        return self.direct().weights

    @property
    def subjects(self) -> tuple[Value, ...]:
        """The operands whose gradients these are, in order."""
        weights = (self.up, self.down, self.gate, self.up_bias, self.down_bias, self.gate_bias)
        return (self.x, self.shares, *(v for v in weights if v is not None))

    def axis_names(self) -> Axes:
        axes = _expert_axes(self)
        weights = ("up", "down", "gate", "up_bias", "down_bias", "gate_bias")
        there = ("x", "shares", *(n for n in weights if getattr(self, n) is not None))
        gives = (axes[n] for n in there)
        return named(self, *gives, summed="t i", whole=_between(self), **axes)

    def types(self) -> tuple[TensorType, ...]:
        (y,) = self.direct().result_types
        _check(
            y.shape == self.dy.type.shape,
            f"{self.name}: the shape of dy does not match",
            y,
            self.dy.type,
        )
        return tuple(v.type.with_shape(v.type.shape) for v in self.subjects)

    def flops(self) -> int:
        """For each product that of dy and the other factor, and that by the weight."""
        return 2 * self.direct().flops()


@dataclass(frozen=True)
class NormalizeGradient(NormGradient):
    """The gradient of x from dy, the gradient of a `t.normalize` of x; the other fields are those
    of the norm.

    With n = (x - mean) / deviation and g = dy * scale it is (g - mean(g) - n * mean(g * n)) /
    deviation, without mean(g) if there is no `center`."""

    name: ClassVar[str] = "t.normalize_gradient"
    x: Value
    dy: Value
    axes: tuple[int, ...]
    scale: Value | None = None
    eps: float = 1e-5
    center: bool = True
    groups: int | None = None

    def direct(self) -> Normalize:
        """The norm whose gradient this is."""
        return self.recast(Normalize)

    def reduced_axes(self) -> tuple[int, ...]:
        return tuple(sorted(self.axes))

    def types(self) -> tuple[TensorType, ...]:
        (y,) = self.direct().result_types
        ok = (y.shape, y.dtype) == (self.dy.type.shape, self.dy.type.dtype)
        _check(
            ok,
            "t.normalize_gradient: dy does not have the type of the result of the norm",
            y,
            self.dy.type,
        )
        return (TensorType(y.shape, y.dtype),)

    def flops(self) -> int:
        """To normalise again, and two each for the two means and what is taken off."""
        per = 3 + 2 * self.center + 4 + 2 * self.center + (self.scale is not None)
        return per * self.x.type.size


@dataclass(frozen=True)
class NormalizeScaleGradient(NormGradient):
    """The gradient of the scale of a `t.normalize`: dy * n summed to `shape`. With `bias` also that
    of a bias of this shape: the sum of dy. Statistics are those of the forward pass."""

    name: ClassVar[str] = "t.normalize_scale_gradient"
    x: Value
    dy: Value
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    bias: bool = False
    eps: float = 1e-5
    center: bool = True
    groups: int | None = None

    @property
    def summed(self) -> tuple[int, ...]:
        """The axes of x that are added up."""
        lead = self.x.type.rank - len(self.shape)
        wide = zip(self.shape, self.x.type.shape[lead:], strict=True)
        return (*range(lead), *(lead + i for i, (n, m) in enumerate(wide) if n != m))

    def reduced_axes(self) -> tuple[int, ...]:
        return self.summed

    def axis_names(self) -> Axes:
        names = numbered(self.x.type.rank)
        summed, whole = (" ".join(names[i] for i in axes) for axes in (self.summed, self.axes))
        gives = ("...",) * (1 + self.bias)
        return named(self, *gives, summed=summed, whole=whole, x="...", dy="...")

    def types(self) -> tuple[TensorType, ...]:
        x = self.x.type
        fits = broadcast(self.shape, x.shape) == x.shape == self.dy.type.shape
        _check(fits, "t.normalize_scale_gradient: the shape does not match", x, list(self.shape))
        return (TensorType(self.shape, x.dtype),) * (1 + self.bias)

    def flops(self) -> int:
        return (4 + self.bias) * self.x.type.size


@dataclass(frozen=True)
class ConvWeightGradient(Contraction):
    """dw[k, c, r] = sum over n, p of dy[n, k, p] * x[n, c, p * strides - low + r * dilations].

    x is [N, C, *spatial] and dy [N, K, *p], as in `t.conv`; dw is [K, C / groups, *window]. With
    the two exchanged it is the gradient of a transposed convolution.
    """

    name: ClassVar[str] = "t.conv_weight_gradient"
    kernel: ClassVar[str] = "k.conv"
    x: Value
    dy: Value
    window: tuple[int, ...]
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    dtype: DType | None = None

    def axis_names(self) -> Axes:
        return _image_axes(self, self.groups, "K c R", "n Q", x="n C W", dy="n K Q")

    def types(self) -> tuple[TensorType, ...]:
        x, dy = self.x.type, self.dy.type
        c, k = x.shape[1], dy.shape[1]
        ok = c % self.groups == 0 and k % self.groups == 0
        _check(
            ok,
            "t.conv_weight_gradient: the number of groups does not divide the channels",
            self.groups,
            (c, k),
        )
        w = Value("w", TensorType((k, c // self.groups, *self.window), x.dtype))
        (y,) = self.recast(Conv, w=w, dtype=None).result_types
        ok = (y.shape, y.dtype) == (dy.shape, dy.dtype)
        _check(
            ok,
            "t.conv_weight_gradient: dy does not have the type of the result of the convolution",
            y,
            dy,
        )
        return (w.type.with_dtype(self.dtype or x.dtype),)

    def flops(self) -> int:
        """As the convolution: each of its products is here the product of two others."""
        cells = self.dy.type.size * prod(self.result_types[0].shape[1:])
        return self.x.type.dtype.multiply_add * cells


@dataclass(frozen=True)
class PoolGradient(Call):
    """The gradient of x (of `shape`) from dy, the gradient of a `t.pool` of x.

    A max hands each cell of dy to the cell of its window that was the first to attain it, which
    takes x; a mean shares it out evenly, by the same divisor, and a sum gives it to all.
    """

    name: ClassVar[str] = "t.pool_gradient"
    kernel: ClassVar[str] = "k.pool"
    fn: Literal["max", "mean", "sum"]
    dy: Value
    shape: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilations: tuple[int, ...]
    x: Value | None = None
    include_pad: bool = False
    extra: tuple[int, ...] = ()

    def direct(self) -> Pool:
        """A pool whose gradient this is."""
        x = self.x or Value("x", TensorType(self.shape, self.dy.type.dtype))
        return self.recast(Pool, x=x, fn="max" if self.fn == "max" else "mean")

    def axis_names(self) -> Axes:
        return alike(self, *range(2, self.result_types[0].rank))

    def types(self) -> tuple[TensorType, ...]:
        (y,) = self.direct().result_types
        _check(
            y.shape == self.dy.type.shape,
            "t.pool_gradient: the shape of dy does not match",
            y,
            self.dy.type,
        )
        ok = (self.x is not None) == (self.fn == "max")
        _check(ok, "t.pool_gradient: x belongs to a max pool, and only to it")
        return (TensorType(self.shape, self.dy.type.dtype),)

    def flops(self) -> int:
        return self.dy.type.size * prod(self.window)


@dataclass(frozen=True)
class ResizeGradient(Call):
    """The gradient of x (of `shape`) from dy, the gradient of a `t.resize` of x. Each cell of dy
    goes to the cells it was made of, by the weights it was made with. Other fields are those of the
    resize."""

    name: ClassVar[str] = "t.resize_gradient"
    kernel: ClassVar[str] = "k.gather"
    dy: Value
    shape: tuple[int, ...]
    scales: tuple[float, ...]
    mode: Literal["nearest", "linear", "cubic"] = "nearest"
    coords: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, ...] = ()

    def direct(self) -> Resize:
        """The resize whose gradient this is."""
        x = Value("x", TensorType(self.shape, self.dy.type.dtype))
        return self.recast(Resize, x=x, shape=self.dy.type.shape)

    def axis_names(self) -> Axes:
        return alike(self, *_differing(self.dy.type.shape, self.shape, 2))

    def types(self) -> tuple[TensorType, ...]:
        assert self.direct().result_types
        return (TensorType(self.shape, self.dy.type.dtype),)

    def flops(self) -> int:
        return max(self.direct().flops(), self.dy.type.size)


# ---------------------------------------------------------------------------- control, fusion


@dataclass(frozen=True)
class Loop(Op):
    """Runs `body` `trips` times. If the body computes a condition, it stops when that is false.

    The body's inputs are the trip number (i64[]), then the carried values, then `captures`. Its
    outputs are the condition (bool[]) when `has_condition`, then the carried values, then the
    values collected from each trip. Results are the carried values after the last trip, then the
    collected ones stacked along a new axis 0.
    """

    name: ClassVar[str] = "t.loop"
    control: ClassVar[bool] = True
    body: Graph
    trips: int
    init: tuple[Value, ...]
    captures: tuple[Value, ...] = ()
    has_condition: bool = False

    def types(self) -> tuple[TensorType, ...]:
        _check(self.trips >= 0, "loop: trips must be 0 or more", "0 or more", self.trips)
        skip = int(self.has_condition)
        carried = len(self.init)
        outputs = [v.type for v in self.body.outputs[skip:]]
        for i, (v, out) in enumerate(zip(self.init, outputs, strict=False)):
            _check(v.type == out, f"loop: loop-carried value {i} changes its type", v.type, out)
        given = [v.type for v in (*self.init, *self.captures)]
        takes = [v.type for v in self.body.inputs[1:]]
        _check(
            given == takes, "loop: the operands do not match the inputs of the body", takes, given
        )
        stacked = (TensorType((self.trips, *t.shape), t.dtype) for t in outputs[carried:])
        return (*outputs[:carried], *stacked)

    def flops(self) -> int:
        return self.trips * sum(n.op.flops() for n in self.body.nodes)


@dataclass(frozen=True)
class Cond(Op):
    """Runs `then` if `pred` (bool[]) is true, else `orelse`; both take `captures` and return the
    same types. Flops are those of the dearer branch."""

    name: ClassVar[str] = "t.cond"
    control: ClassVar[bool] = True
    pred: Value
    then: Graph
    orelse: Graph
    captures: tuple[Value, ...] = ()

    def types(self) -> tuple[TensorType, ...]:
        a, b = ([v.type for v in g.outputs] for g in (self.then, self.orelse))
        _check(a == b, "cond: the branches return different types", a, b)
        return tuple(a)

    def flops(self) -> int:
        return max(sum(n.op.flops() for n in g.nodes) for g in (self.then, self.orelse))


def readers(body: Graph, args: tuple[Value, ...], value: Value) -> Iterator[tuple[Value, Op]]:
    """The ops of a body that read an operand, each with what the operand is called there."""
    for inner, outer in zip(body.inputs, args, strict=True):
        if outer == value:
            yield from ((inner, n.op) for n in body.nodes if inner in n.op.operands)


@dataclass(frozen=True)
class Fused(Op):
    """The work of one launch: `body` applied to `args`. The body sees nothing else."""

    name: ClassVar[str] = "t.fused"
    args: tuple[Value, ...]
    body: Graph

    def types(self) -> tuple[TensorType, ...]:
        given, takes = [v.type for v in self.args], [v.type for v in self.body.inputs]
        _check(
            given == takes,
            "t.fused: the operands do not match the inputs of the body",
            takes,
            given,
        )
        return tuple(v.type for v in self.body.outputs)

    def flops(self) -> int:
        return sum(n.op.flops() for n in self.body.nodes)

    def may_overwrite(self, value: Value) -> bool:
        return all(op.may_overwrite(v) for v, op in readers(self.body, self.args, value))


OPS: dict[str, type[Op]] = {
    op.name: op
    for op in (
        *(Map, Cast, Bitcast, Ordered, Constant, Iota, Reshape, Transpose, Broadcast, Slice, Parts),
        *(Concat, Pad),
        *(Gather, GatherElements, GatherND, ScatterElements, ScatterND),
        *(Reduce, ArgReduce, Cumulative, TopK, Softmax, Normalize, Pool),
        *(
            Matmul,
            Conv,
            ConvTranspose,
            Attention,
            Experts,
            Resize,
            AttentionGradient,
            ExpertsGradient,
            NormalizeGradient,
            NormalizeScaleGradient,
            ConvWeightGradient,
            PoolGradient,
            ResizeGradient,
            Routine,
            Opaque,
            Collective,
            Shard,
            Loop,
            Cond,
            Fused,
        ),
    )
}
