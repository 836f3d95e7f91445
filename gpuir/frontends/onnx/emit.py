"""What a converter works with: the model node it reads, and the emitter it writes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuir.interp import evaluate, to_numpy_dtype, to_type
from gpuir.ir.build import Builder
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Level, Loc, NameTable, Op, Value
from gpuir.ir.types import DType, TensorType
from gpuir.ops import tensor as t

INLINE = 16  # a known tensor of at most so many elements is a t.constant, a larger one a param


@dataclass(eq=False)
class Const:
    """A tensor known at load time, computed when somebody asks: weights are not read otherwise."""

    value: Value
    compute: Callable[[], np.ndarray]
    cached: np.ndarray | None = None
    uniform: bool = False  # one number throughout: a t.constant whatever its size

    def array(self) -> np.ndarray:
        if self.cached is None:
            self.cached = self.compute()
        return self.cached


@dataclass
class Scope:
    """What is shared by the whole load: weights of the params made so far, and what to report."""

    weights: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    folded: list[Loc] = field(default_factory=list)


class Emitter:
    """Appends tensor ops to a graph; folds those whose operands are all known.

    Values given to and by it are ordinary `Value`s. One that is known at load time is not in the
    graph yet: it becomes a `t.constant` or a param when a real node first reads it. An emitter made
    with `inside` fills a region: it sees the outer known values, and other outer values become the
    region's captures.
    """

    def __init__(self, name: str, scope: Scope | None = None, inside: Emitter | None = None):
        self._names: NameTable = inside._names if inside else NameTable()
        self.builder = Builder(Level.graph, "" if inside else name, names=self._names)
        self.outer = inside
        self.scope = inside.scope if inside else scope or Scope()
        self.known: dict[Value, Const] = {}
        self.placed: dict[Value, Value] = {}  # known or captured value -> the value in this graph
        self.captures: list[Value] = []  # outer values this region reads, in order
        self.own: set[Value] = set()

    # -- making values

    def input(self, name: str, type: TensorType) -> Value:
        value = self.builder.input(name, type)
        self.own.add(value)
        return value

    def constant(self, array: Any, dtype: DType | None = None, name: str = "const") -> Value:
        """A known value from numbers: `constant([2, 3], i64)`."""
        array = np.asarray(array) if dtype is None else np.asarray(array, to_numpy_dtype(dtype))
        return self.lazy(TensorType(array.shape, dtype or to_type(array).dtype), lambda: array, name)

    def lazy(
        self, type: TensorType, compute: Callable[[], np.ndarray], name: str = "const"
    ) -> Value:
        """A known value of this type, computed only if its numbers are needed."""
        value = Value(self._names.fresh("\0" + name), type)  # its final name is given when placed
        self.known[value] = Const(value, compute)
        return value

    def fill(self, number: Any, type: TensorType, name: str = "fill") -> Value:
        """A known value that holds one number throughout, and takes no memory for it."""
        one = np.asarray(number, to_numpy_dtype(type.dtype)).reshape(())
        value = self.lazy(type, lambda: np.broadcast_to(one, type.shape), name)
        self.known[value].uniform = True
        return value

    def __call__(self, op: Op, name: str = "", fold: bool = True) -> Value:
        return self.add(op, (name,) if name else (), fold)[0]

    def add(self, op: Op, names: Sequence[str] = (), fold: bool = True) -> tuple[Value, ...]:
        """Appends `op`, or folds it when every operand is known (unless `fold` is off: for
        dequantised weights, which stay quantised in memory)."""
        if isinstance(op, t.Map):
            op = self._immediates(op)
        if fold and not op.control and all(self.const_of(v) is not None for v in op.operands):
            return self._fold(op, names)
        placed = {v: self.place(v) for v in op.operands}
        results = self.builder.add(op.substitute(placed), names)
        self.own.update(results)
        return results

    # -- known values

    def const_of(self, value: Value) -> Const | None:
        scope: Emitter | None = self
        while scope is not None:
            if value in scope.known:
                return scope.known[value]
            scope = scope.outer
        return None

    def array_of(self, value: Value) -> np.ndarray | None:
        """The numbers of a value where they are known."""
        const = self.const_of(value)
        return None if const is None else const.array()

    def _fold(self, op: Op, names: Sequence[str]) -> tuple[Value, ...]:
        types = op.types()
        done: list[tuple[np.ndarray, ...]] = []

        def compute(i: int) -> np.ndarray:
            if not done:
                operands = {v: self.const_of(v) for v in op.operands}
                done.append(evaluate(op, {v: c.array() for v, c in operands.items() if c}))
            return done[0][i]

        self.scope.folded += self.builder.locs
        return tuple(
            self.lazy(type, lambda i=i: compute(i), names[i] if i < len(names) else op.name[2:])
            for i, type in enumerate(types)
        )

    def _immediates(self, op: t.Map) -> t.Map:
        """t.map(fn, [x, c])  →  t.map(fn, [x], [c])  where c is one known number that does not
        widen the result."""
        args, imm = list(op.args), list(op.imm)
        while len(args) > 1:
            last, rest = args[-1], args[:-1]
            if last.type.size != 1 or op.fn == "where":
                break
            const = self.const_of(last)
            if const is None or all(self.const_of(v) is not None for v in rest):
                break
            shape = t.broadcast(*(v.type.shape for v in rest))
            if t.broadcast(shape, last.type.shape) != shape or last.type.dtype.kind == "complex":
                break
            args.pop()
            imm.insert(0, const.array().reshape(()).item())
        return t.Map(op.fn, tuple(args), tuple(imm))

    def place(self, value: Value) -> Value:
        """The value as nodes of this graph read it: a known one becomes a constant or a param, one
        of an outer graph a capture."""
        if value in self.own:
            return value
        if value in self.placed:
            return self.placed[value]
        const = self.const_of(value)
        if const is not None:
            here = self._place_known(const)
        else:
            if self.outer is None:
                raise AssertionError(f"%{value.name} belongs to no scope")
            self.captures.append(value)
            here = self.builder.capture(value)
        self.placed[value] = here
        return here

    def _place_known(self, const: Const) -> Value:
        value = const.value
        name = value.name.removeprefix("\0")
        small = value.type.size <= INLINE or const.uniform
        if small and value.type.dtype.kind != "complex":
            array = const.array()
            data = array.reshape(-1) if not const.uniform else array[(0,) * array.ndim].reshape(-1)
            if len(data) and all(x == data[0] for x in data):
                data = data[:1]
            return self.builder(t.Constant(value.type, tuple(x.item() for x in data)), name)
        if self.outer is not None:
            self.outer.known.setdefault(value, const)  # folded in here, a param out there
            self.captures.append(value)
            return self.builder.input(name, value.type)  # param in the outermost graph
        here = self.builder.param(name, value.type)
        self.scope.weights[here.name] = const.array
        return here

    def assume(self, text: str) -> None:
        """Something taken for granted, which the report must say."""
        self.scope.assumed.append(text)


@dataclass
class OnnxNode:
    """A model node as a converter sees it: operands are `Value`s, absent ones None."""

    op: str
    domain: str
    version: int  # of the domain's opset
    name: str  # location-ready: the node's own name, or one made from its outputs
    inputs: tuple[Value | None, ...]
    outputs: tuple[str, ...]  # wished names; "" where nobody reads it
    attrs: Mapping[str, Any]  # ints, floats, str, lists of them, ndarray, GraphProto
    emit: Emitter

    def __getitem__(self, i: int) -> Value:
        """Operand i, which must be there."""
        value = self.get(i)
        if value is None:
            raise ModelError(f"{self.op}: input {i} is missing")
        return value

    def get(self, i: int) -> Value | None:
        return self.inputs[i] if i < len(self.inputs) else None

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def known(self, i: int) -> np.ndarray | None:
        """The numbers of operand i where they are known at load time; None if absent or unknown."""
        value = self.get(i)
        return None if value is None else self.emit.array_of(value)

    def need(self, i: int, what: str) -> np.ndarray:
        """The numbers of operand i, which a result's shape depends on; `what` names them."""
        array = self.known(i)
        if array is None:
            value = self[i]
            raise UnknownValue(value, f"{self.op}: the shape of the result depends on {what}")
        return array

    def ints(self, i: int, what: str) -> tuple[int, ...]:
        """`need` as a flat tuple of integers."""
        return tuple(int(x) for x in self.need(i, what).reshape(-1))

    def axis(self, rank: int, default: int = 0, attr: str = "axis") -> int:
        """The attribute as an axis of a tensor of this rank, counted from the front."""
        return self.from_front(int(self.attr(attr, default)), rank)

    def from_front(self, axis: int, rank: int) -> int:
        if not -rank <= axis < max(rank, 1):
            expected = f"{-rank}..{rank - 1}"
            raise ModelError(f"{self.op}: no such axis", expected=expected, found=str(axis))
        return axis % rank if rank else 0

    def has_output(self, i: int) -> bool:
        return i < len(self.outputs) and self.outputs[i] != ""


class UnknownValue(ModelError):
    """A result's shape depends on a tensor that is not known at load time."""

    def __init__(self, value: Value, what: str):
        super().__init__(
            what,
            expected="a value known at load time",
            found=f"%{value.name}: {value.type}, computed at run time or a model input",
        )
        self.value = value


Converter = Callable[[OnnxNode, Emitter], "Value | tuple[Value | None, ...] | None"]
Converters = Mapping[str, Converter]


def names(values: Iterable[Value]) -> str:
    return ", ".join(f"%{v.name}" for v in values)
