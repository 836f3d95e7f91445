"""What a torch converter reads: a call of an ATen operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpuir.frontends.emit import Emitter
from gpuir.frontends.node import ModelNode
from gpuir.ir import types as ir
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType

DTYPES: dict[torch.dtype, DType] = {
    torch.bool: ir.bool_,
    torch.int64: ir.i64,
    torch.int32: ir.i32,
    torch.int16: ir.i16,
    torch.int8: ir.i8,
    torch.uint64: ir.u64,
    torch.uint32: ir.u32,
    torch.uint16: ir.u16,
    torch.uint8: ir.u8,
    torch.float64: ir.f64,
    torch.float32: ir.f32,
    torch.float16: ir.f16,
    torch.bfloat16: ir.bf16,
    torch.float8_e4m3fn: ir.f8e4m3,
    torch.float8_e4m3fnuz: ir.f8e4m3fnuz,
    torch.float8_e5m2: ir.f8e5m2,
    torch.float8_e5m2fnuz: ir.f8e5m2fnuz,
    torch.float8_e8m0fnu: ir.f8e8m0,
    **{getattr(torch, f"uint{n}"): ir.DTYPES[f"u{n}"] for n in (2, 4)},
    torch.complex64: ir.c64,
    torch.complex128: ir.c128,
}


def dtype_of(dtype: torch.dtype) -> DType:
    """ModelError for a dtype that the IR has not: quantised ones, complex32."""
    if dtype not in DTYPES:
        raise ModelError("gpuir does not analyse this data type", found=str(dtype))
    return DTYPES[dtype]


class Arguments(dict[str, Any]):
    """Arguments by name; asking for one that the operator has not is a fault of its converter."""

    def __missing__(self, name: str) -> Any:
        raise ModelError(
            f"the converter reads an argument {name!r} that the operator does not have",
            expected=", ".join(self) or "none",
        )


@dataclass
class TorchNode(ModelNode):
    """A call as a converter sees it: the arguments by the names that the operator's schema gives
    them, defaults filled in. Tensors are `Value`s, sizes numbers.

    `fakes` are the tensors and numbers among the arguments as torch has them, for its own rules of
    promotion; `types` are those of the results, None where one is no tensor or is left out.
    `saved`: only the backward pass reads them.
    """

    op: str  # "add.Tensor"
    name: str
    args: Mapping[str, Any]
    fakes: Mapping[str, Any]
    types: Sequence[TensorType | None]
    saved: bool = False

    def __getitem__(self, arg: str) -> Value:
        """The operand of that name, which must be a tensor."""
        value = self.args[arg]
        if not isinstance(value, Value):
            raise ModelError(f"{self.op}: {arg} is not a tensor", found=repr(value))
        return value

    def get(self, arg: str) -> Value | None:
        value = self.args.get(arg)
        return value if isinstance(value, Value) else None

    def one_of(self, *names: str) -> Any:
        """The argument that overloads call by different names."""
        return self.args[next((name for name in names if name in self.args), names[0])]

    @property
    def type(self) -> TensorType:
        """Of the first result."""
        type = self.types[0]
        if type is None:
            raise ModelError(f"{self.op}: the result is not a tensor")
        return type

    def axis(self, rank: int, arg: str = "dim") -> int:
        """The argument as an axis counted from the front."""
        given = self.args[arg]
        if not isinstance(given, int):
            raise ModelError(
                f"{self.op}: {arg} is not an axis", expected="an integer", found=repr(given)
            )
        return given % max(rank, 1)

    def axes(self, rank: int, arg: str = "dim") -> tuple[int, ...]:
        """The argument as axes counted from the front; all where it is left out or empty."""
        given = self.args.get(arg)
        if isinstance(given, int):
            given = (given,)
        if not rank:
            return ()
        return tuple(a % rank for a in given) if given else tuple(range(rank))

    def promoted(self, *args: str) -> DType:
        """The dtype that torch brings two operands to."""
        a, b = (self.fakes[arg] for arg in args)
        return dtype_of(torch.result_type(a, b))


Results = Value | Sequence[Value | None] | None
Converter = Callable[[TorchNode, Emitter], Results]
