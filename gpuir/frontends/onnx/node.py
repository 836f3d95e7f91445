"""What an ONNX converter reads: the model node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuir.frontends.emit import Emitter, UnknownValue
from gpuir.frontends.onnx.proto import DTYPES
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType


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
    walk: Any = None  # load.Walk: how control flow imports its subgraphs

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
            if (const := self.emit.const_of(value)) is not None:
                return const.array(limited=True)  # raises the reason why not
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

    def dtype(self, attr: str, default: DType | None = None) -> DType:
        """The attribute, a TensorProto.DataType, as a dtype."""
        number = self.attr(attr)
        if number is None and default is not None:
            return default
        if number not in DTYPES:
            found = "strings" if number == 8 else f"{attr}={number}"
            raise ModelError(
                f"{self.op}: no dtype that gpuir analyses", expected="numbers", found=found
            )
        return DTYPES[number]

    def has_output(self, i: int) -> bool:
        return i < len(self.outputs) and self.outputs[i] != ""


Converter = Callable[[OnnxNode, Emitter], "Value | tuple[Value | None, ...] | None"]
