"""What a benchmark is, and what it makes its tensors with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.ir.types import DType

Extents = Mapping[str, Number]
Run = Callable[[], Any]

_TORCH_NAMES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "i8": "int8",
}


@dataclass(frozen=True)
class Kit:
    """Makes a benchmark's tensors: torch, a dtype by its name here, and a device of torch's."""

    torch: Any
    dtype: str
    device: str

    @property
    def kind(self) -> Any:
        """torch's dtype."""
        name = {"tf32": "f32"}.get(self.dtype, self.dtype)
        return getattr(self.torch, _TORCH_NAMES[name])

    def random(self, *shape: int) -> Any:
        """Normal numbers; whole ones from -8 to 7 for an integer dtype."""
        if self.dtype.startswith("i"):
            return self.torch.randint(-8, 8, shape, dtype=self.kind, device=self.device)
        wide = self.torch.randn(shape, dtype=self.torch.float32, device=self.device)
        return wide.to(self.kind)

    def empty(self, *shape: int) -> Any:
        return self.torch.empty(shape, dtype=self.kind, device=self.device)

    def indices(self, most: int, *shape: int) -> Any:
        """Whole numbers below `most`, drawn evenly."""
        return self.torch.randint(0, most, shape, device=self.device)

    def of(self, dtype: str) -> Kit:
        """The same with another dtype."""
        return Kit(self.torch, dtype, self.device)


@dataclass(frozen=True)
class Benchmark:
    """An operator: `columns` names its extents, `works` are the kernels of so many rows of them,
    `make` gives a call that runs one."""

    columns: tuple[str, ...]
    works: Callable[[Extents, DType], tuple[Work, ...]]
    make: Callable[[Kit, Mapping[str, int]], Run]
    dtypes: tuple[str, ...] = ("f32", "tf32", "f16", "bf16", "f64")


FLOATS = ("f32", "f16", "bf16", "f64")
