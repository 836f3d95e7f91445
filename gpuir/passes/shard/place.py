"""Where the cells of a tensor are, when several ranks have it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType

# What a byte over a link is worth, for choosing between ways alone: a GPU of 300 Tflop/s and
# 2 TB/s with links of 300 GB/s. Assumed; costs of what is chosen come from the cluster.
FLOPS_A_BYTE = 1000.0
MEMORY_A_BYTE = 7.0
WIDE = 5.0  # times as long a product of f32 takes, which PyTorch rounds to TF32 only if told to

Group = tuple[str, tuple[int, ...], tuple[int, ...]]  # as a `t.collective` has it
Kept = dict[tuple[Value, str], Value]  # what a rank has of others' values, by how it came


class Placed(NamedTuple):
    """What each rank of a group has: the whole tensor, its own part along `axis`, or a term of the
    sum that the tensor is. With `parts`, the extents of what lies packed along the axis, a rank has
    its part of each."""

    kind: Literal["whole", "part", "sum"]
    axis: int = 0
    parts: tuple[int, ...] = ()

    @property
    def is_part(self) -> bool:
        return self.kind == "part"

    def type(self, whole: TensorType, ranks: int) -> TensorType:
        """What a rank has of a tensor."""
        if not self.is_part:
            return whole
        extent = whole.shape[self.axis] // ranks
        shape = (*whole.shape[: self.axis], extent, *whole.shape[self.axis + 1 :])
        return TensorType(shape, whole.dtype)

    def fits(self, type: TensorType, ranks: int) -> bool:
        """Whether a tensor can be cut so."""
        if not self.is_part:
            return True
        extents = self.parts or (type.shape[self.axis],)
        return all(n % ranks == 0 and n > 0 for n in extents)


WHOLE = Placed("whole")
SUM = Placed("sum")


def part(axis: int, parts: tuple[int, ...] = ()) -> Placed:
    return Placed("part", axis, parts)


def moved_bytes(type: TensorType, have: Placed, want: Placed, ranks: int) -> float | None:
    """What a rank sends to bring a tensor from one place to another; None where it cannot be.

    As rings do it: (n - 1) / n of the tensor to gather and to scatter (Thakur, Rabenseifner, Gropp:
    Optimization of Collective Communication Operations in MPICH, 2005, section 4).
    """
    if have == want:
        return 0.0
    once = type.nbytes * (ranks - 1) / ranks
    match have.kind, want.kind:
        case "whole", "part":
            return 0.0
        case "sum", "whole":
            return 2 * once
        case ("sum", "part") | ("part", "whole"):
            return once
        case "whole", "sum" if type.rank < 2 and type.dtype.is_inexact:
            return 0.0  # a bias, of which each rank adds its share
        case "part", "part" if not have.parts and not want.parts:
            return once / ranks
        case "part", "part":
            return once
        case _:
            return None
