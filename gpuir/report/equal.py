"""Kernels that are equal, as those of layers that repeat: together, under one name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuir.report.answer import Answer
from gpuir.report.kernels import KernelRow


@dataclass(frozen=True)
class EqualKernels:
    """Kernels with the same nest, tile and cost: layers repeat."""

    kernels: tuple[KernelRow, ...]

    @property
    def one(self) -> KernelRow:
        return self.kernels[0]

    @property
    def runs(self) -> int:
        return sum(x.runs for x in self.kernels)

    @property
    def time_s(self) -> float:
        return self.runs * self.one.cost.time_s


def alike(s: Answer) -> list[EqualKernels]:
    """The kernels that take time, equal ones together, the slowest group first."""
    groups: dict[object, list[KernelRow]] = {}
    for x in s.kernels:
        if x.time_s > 0:
            groups.setdefault((x.kind, x.shape, x.tile, x.cost, x.flops, x.rest), []).append(x)
    return sorted((EqualKernels(tuple(g)) for g in groups.values()), key=lambda x: -x.time_s)


def layer(x: EqualKernels) -> str:
    """The model node that the kernels are named after, and how many more they stand for; of several
    kernels, what their names have in common."""
    names = [kernel.label for kernel in x.kernels]
    more = len(dict.fromkeys(x.one.locs)) - 1
    return pattern(names) + (f" +{more}" if more > 0 else "")


def pattern(names: Sequence[str]) -> str:
    """`layer.*/MatMul` for names that begin and end alike; else the first of them and dots."""
    first, last = min(names), max(names)
    if first == last:
        return first
    head = _alike(first, last)
    backwards = [name[head:][::-1] for name in names]
    tail = _alike(min(backwards), max(backwards))
    if head + tail < len(names[0]) // 2:
        return f"{names[0]} ..."
    return f"{first[:head]}*{first[len(first) - tail :]}"


def _alike(a: str, b: str) -> int:
    """How many characters two texts begin with alike; of the least and greatest of many, all do."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def tile_text(x: KernelRow) -> str:
    """`128x64x32` in the order of the loop nest, batch and heads left out where the tile holds one;
    `/4` behind it where so many blocks share the reduced dimension."""
    if x.tile is None:
        return ""
    dims = [str(n) for d, n in x.tile.dims if n > 1 or d not in "bh"]
    return "x".join(dims) + (f"/{x.tile.split}" if x.tile.split > 1 else "")
