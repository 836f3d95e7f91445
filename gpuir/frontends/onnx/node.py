"""What an ONNX converter reads: the model node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from gpuir.frontends.emit import Emitter, UnknownValue
from gpuir.frontends.node import ModelNode
from gpuir.frontends.onnx.proto import DTYPES
from gpuir.interp import wide
from gpuir.ir.errors import ModelError, nearest
from gpuir.ir.graph import Value
from gpuir.ir.types import DType


@dataclass
class OnnxNode(ModelNode):
    """A model node as a converter sees it: operands are `Value`s, absent ones None."""

    op: str
    domain: str
    version: int  # of the domain's opset
    name: str  # location-ready: the node's own name, or one made from its outputs
    inputs: tuple[Value | None, ...]
    outputs: tuple[str, ...]  # wished names; "" where nobody reads it
    attrs: Mapping[str, Any]  # ints, floats, str, lists of them, ndarray, GraphProto
    emit: Emitter
    walk: Any = None  # walk.OnnxWalk: how control flow imports its subgraphs

    def __getitem__(self, i: int) -> Value:
        """Operand i, which must be there."""
        value = self.get(i)
        if value is None:
            raise ModelError(f"{self.op}: input {i} is missing")
        return value

    def get(self, i: int) -> Value | None:
        return self.inputs[i] if i < len(self.inputs) else None

    def attr(self, name: str, default: Any = None) -> Any:
        """The attribute, or `default` where there is none; it is of the default's type."""
        if name not in self.attrs:
            return default
        value = self.attrs[name]
        if default is not None and not _fits(value, default):
            raise ModelError(
                f"{self.op}: the attribute {name!r} has the wrong type",
                expected=f"{_kind(default)}, like {default!r}",
                found=f"{_kind(value)}: {value!r}"[:200],
            )
        return value

    def choice(self, name: str, default: str, allowed: Iterable[str]) -> Any:
        """The attribute, one of the words that are `allowed`."""
        value = self.attr(name, default)
        if value not in allowed:
            close = nearest(str(value), allowed)
            fix = close if close.startswith("did you") else ""
            raise self.refused(f"{name} is unknown", ", ".join(allowed), value, fix)
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """The attribute, a whole number of 1 or more."""
        value = self.attr(name, default)
        if not isinstance(value, int | float) or not isfinite(value) or int(value) < 1:
            expected = f"{name}, 1 or more"
            raise ModelError(f"{self.op}: the attribute {name!r}", expected=expected,
                             found="none" if value is None else str(value))  # fmt: skip
        return int(value)

    def known(self, i: int) -> np.ndarray | None:
        """The numbers of operand i where they are known at load time; None if absent or unknown."""
        value = self.get(i)
        return None if value is None else self.emit.array_of(value)

    def need(self, i: int, what: str) -> np.ndarray:
        """The numbers of operand i, which a result's shape depends on; `what` names them."""
        array = self.known(i)
        if array is None:
            value = self[i]
            if (const := self.emit.const_of(value)) is not None:
                return const.array(limited=True)  # raises the reason why not
            raise UnknownValue(value, f"{self.op}: the shape of the result depends on {what}")
        return array

    def ints(self, i: int, what: str) -> tuple[int, ...]:
        """`need` as a flat tuple of integers."""
        return tuple(int(x) for x in self.numbers(i, what))

    def numbers(self, i: int, what: str) -> tuple[float, ...]:
        """`need` as a flat tuple of finite numbers."""
        array = self.need(i, what).reshape(-1)
        if array.dtype.kind not in "biu" and not np.isfinite(wide(array)).all():
            raise self._not(i, what, "finite numbers", array)
        return tuple(x.item() for x in wide(array))

    def number(self, i: int, what: str) -> float:
        """`need` as one finite number."""
        numbers = self.numbers(i, what)
        if len(numbers) != 1:
            raise self._not(i, what, "one number", self.need(i, what))
        return numbers[0]

    def integer(self, i: int, what: str) -> int:
        """`need` as one integer."""
        return int(self.number(i, what))

    def _not(self, i: int, what: str, expected: str, array: np.ndarray) -> ModelError:
        shown = " ".join(np.array2string(array, threshold=8).split())
        where = f"{self.op}: {what} (input {i})"
        return ModelError(where, expected=expected, found=f"{shown}: {self[i].type}")

    def of_rank(self, i: int, *ranks: int) -> Value:
        """Operand i, which must be there and have one of these ranks."""
        value = self[i]
        if value.type.rank not in ranks:
            raise ModelError(
                f"{self.op}: input {i} has the wrong number of axes",
                expected=" or ".join(map(str, ranks)),
                found=f"{value.type.rank}: {value.type}",
            )
        return value

    def axis(self, rank: int, default: int = 0, attr: str = "axis") -> int:
        """The attribute as an axis of a tensor of this rank, counted from the front."""
        return self.from_front(int(self.attr(attr, default)), rank)

    def from_front(self, axis: int, rank: int) -> int:
        if not -rank <= axis < rank:
            expected = f"{-rank}..{rank - 1}" if rank else "none: the input is a scalar"
            raise ModelError(f"{self.op}: axis is out of range", expected=expected, found=str(axis))
        return axis % rank

    def dtype(self, attr: str, default: DType | None = None) -> DType:
        """The attribute, a TensorProto.DataType, as a dtype."""
        number = self.attr(attr)
        if number is None and default is not None:
            return default
        if number not in DTYPES:
            found = "strings" if number == 8 else f"{attr}={number}"
            raise ModelError(
                f"{self.op}: gpuir does not analyse this data type", expected="numbers", found=found
            )
        return DTYPES[number]

    def has_output(self, i: int) -> bool:
        return i < len(self.outputs) and self.outputs[i] != ""


def _fits(value: Any, default: Any) -> bool:
    """Whether an attribute is of its default's type. A FLOAT may be written as an INT, as may an
    INT as a whole FLOAT (`p` of LpPool was one once)."""
    given, wants = _kind(value), _kind(default)
    if wants == "a number":
        return given in ("a number", "an integer")
    if wants == "an integer":
        return given == wants or (given == "a number" and value.is_integer())
    if wants == "an empty list" or given == "an empty list":
        return isinstance(value, tuple | list) == isinstance(default, tuple | list)
    if wants == "a list of numbers":
        return given in ("a list of numbers", "a list of integers")
    return given == wants


def _kind(value: Any) -> str:
    """What an attribute is, in words."""
    match value:
        case bool() | int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "text"
        case () | []:
            return "an empty list"
        case (first, *_) if not isinstance(first, tuple | list):
            one = _kind(first)
            return f"a list of {one.partition(' ')[2] or one}s"
        case np.ndarray():
            return "tensor"
        case _:
            return type(value).__name__


Results = tuple[Value | None, ...]
Converter = Callable[[OnnxNode, Emitter], Value | Results | None]
