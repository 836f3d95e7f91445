"""The backward half of a graph while it is built: the gradient of each value so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gpuir.ir.build import Builder
from gpuir.ir.graph import Value
from gpuir.ir.phases import SUM, beside
from gpuir.ir.types import DType, TensorType
from gpuir.ops import tensor as t

Fold = Literal["sum", "prod", "max", "min", "mean"]


class Reverse:
    """Gradients by value, and the few ops that rules make them of, in their simplest form.

    Only values in `needs` get one. A gradient has the shape and dtype of its value: `give` adds up
    what was broadcast and casts back. `original` says what a recomputed value is a copy of; `late`
    are values whose gradient is kept for later, once it is known.
    """

    def __init__(self, b: Builder, needs: set[Value]):
        self.b, self.needs = b, needs
        self.original: dict[Value, Value] = {}
        self.late: dict[Value, Value | None] = {}
        self._gradients: dict[Value, Value] = {}
        self._parts: dict[Value, list[tuple[t.Slice, Value]]] = {}

    # -- gradients

    def wants(self, value: Value | None) -> bool:
        return value is not None and self.original.get(value, value) in self.needs

    def give(self, value: Value | None, gradient: Value | None) -> None:
        """Adds to the gradient of `value`, which may also be one that needs none."""
        if value is None or gradient is None or not self.wants(value):
            return
        value = self.original.get(value, value)
        gradient = self.cast(self.sum_to(gradient, value.type.shape), value.type.dtype)
        before = self._gradients.get(value)
        self._gradients[value] = self._sum(before, gradient) if before else gradient

    def _sum(self, a: Value, b: Value) -> Value:
        """Autograd adds two gradients of a value in a kernel of its own, beside the operator that
        gives the second (PyTorch, torch/csrc/autograd/input_buffer.cpp)."""
        own, self.b.locs = self.b.locs, beside(self.b.locs, SUM)
        added = self.map("add", a, b)
        self.b.locs = own
        return added

    def give_part(self, part: t.Slice, gradient: Value) -> None:
        """Adds to the gradient of the cells that `part` takes of its operand. Parts wait for each
        other: those that lie side by side (the heads of one projection) are joined at no cost."""
        if self.wants(part.x):
            value = self.original.get(part.x, part.x)
            self._parts.setdefault(value, []).append((part, gradient))

    def take(self, value: Value) -> Value | None:
        """The whole gradient of a value that no op further up reads any more, if it has one."""
        parts = self._parts.pop(value, [])
        joined = self._joined(value.type, parts)
        for gradient in [joined] if joined else [self._spread(*part) for part in parts]:
            self.give(value, gradient)
        return self._gradients.get(value)

    def _joined(self, type: TensorType, parts: list[tuple[t.Slice, Value]]) -> Value | None:
        """Parts that make up the whole along one axis  →  their gradients one after another."""
        if len(parts) < 2 or any(step != 1 for part, _ in parts for step in part.steps):
            return None
        cut = {a for part, _ in parts for a, n in enumerate(part.sizes) if n != type.shape[a]}
        if len(cut) != 1:
            return None
        (axis,) = cut
        parts = sorted(parts, key=lambda p: p[0].starts[axis])
        end = 0
        for part, _ in parts:
            if part.starts[axis] != end:
                return None
            end += part.sizes[axis]
        if end != type.shape[axis]:
            return None
        return self.b(t.Concat(tuple(gradient for _, gradient in parts), axis))

    def _spread(self, part: t.Slice, dy: Value) -> Value:
        """The cells of dy where `part` took them from, zeros around them."""
        x, rank = dy, dy.type.rank
        flipped = [a for a, step in enumerate(part.steps) if step < 0]
        if flipped:
            starts = tuple(n - 1 if a in flipped else 0 for a, n in enumerate(part.sizes))
            steps = tuple(-1 if a in flipped else 1 for a in range(rank))
            x = self.b(t.Slice(x, starts, part.sizes, steps))
        for axis, step in enumerate(map(abs, part.steps)):  # zeros between the cells
            if step > 1:
                shape = x.type.shape
                x = self.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
                wide = (0,) * (axis + 1), (step - 1,), (0,) * (rank - axis - 1)
                x = self.b(t.Pad(x, (0,) * (rank + 1), sum(wide, ())))
                x = self.reshape(x, (*shape[:axis], shape[axis] * step, *shape[axis + 1 :]))
        rows = list(zip(part.starts, part.sizes, part.steps, strict=True))
        low = tuple(a if s > 0 else a + (n - 1) * s for a, n, s in rows)
        made = zip(part.x.type.shape, low, x.type.shape, strict=True)
        return self.b(t.Pad(x, low, tuple(n - a - m for n, a, m in made)))

    # -- ops

    def map(self, fn: str, *args: Value | float) -> Value:
        """A `t.map`: values, then numbers as its immediates."""
        values = tuple(a for a in args if isinstance(a, Value))
        numbers = tuple(a for a in args if not isinstance(a, Value))
        if fn == "mul" and numbers and (scaled := self._scaled(values[0], numbers[0])):
            return scaled
        return self.b(t.Map(fn, values, numbers))

    def conj(self, x: Value) -> Value:
        """The conjugate of complex numbers: what a product's gradient is multiplied by."""
        return self.map("conj", x) if x.type.dtype.is_complex else x

    def _scaled(self, x: Value, number: float) -> Value | None:
        """x times a number without an op: by one, or of a constant."""
        match self.b.producer(x):
            case t.Constant(type, (one,)):
                return self.constant(type, one * number)
            case _:
                return x if number == 1 else None

    def constant(self, type: TensorType, number: float = 0.0) -> Value:
        return self.b(t.Constant(TensorType(type.shape, type.dtype), (number,)))

    def zero(self, like: Value) -> Value:
        """One zero of that dtype, to broadcast."""
        return self.constant(TensorType((), like.type.dtype))

    def cast(self, x: Value, dtype: DType) -> Value:
        return x if x.type.dtype == dtype else self.b(t.Cast(x, dtype))

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        match self.b.producer(x):
            case t.Reshape(inner):
                x = inner
            case t.Constant(type, (number,)):
                return self.constant(type.with_shape(shape), number)
            case _:
                pass
        return x if x.type.shape == shape else self.b(t.Reshape(x, shape))

    def transpose(self, x: Value, perm: Iterable[int]) -> Value:
        perm = tuple(perm)
        match self.b.producer(x):
            case t.Transpose(inner, before):
                x, perm = inner, tuple(before[a] for a in perm)
            case _:
                pass
        return x if perm == tuple(range(len(perm))) else self.b(t.Transpose(x, perm))

    def turned(self, x: Value) -> Value:
        """A matrix with rows for columns."""
        rank = x.type.rank
        return self.b(t.Transpose(x, (*range(rank - 2), rank - 1, rank - 2)))

    def broadcast(self, x: Value, shape: tuple[int, ...]) -> Value:
        match self.b.producer(x):
            case t.Constant(type, (number,)):
                return self.constant(type.with_shape(shape), number)
            case _:
                return x if x.type.shape == shape else self.b(t.Broadcast(x, shape))

    def reduce(self, fn: Fold, x: Value, axes: Iterable[int], keepdims: bool = True) -> Value:
        axes = tuple(axes)
        return self.b(t.Reduce(fn, x, axes, keepdims)) if axes else x

    def sum_to(self, x: Value, shape: tuple[int, ...]) -> Value:
        """x added up over the axes along which `shape` was broadcast to it."""
        if x.type.shape == shape:
            return x
        lead = x.type.rank - len(shape)
        short = {lead + i for i, n in enumerate(shape) if n == 1 != x.type.shape[lead + i]}
        axes = sorted({*range(lead), *short})
        return self.reshape(self.reduce("sum", x, axes, keepdims=False), shape)
