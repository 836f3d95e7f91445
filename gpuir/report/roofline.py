"""Kernels under the roofs of their device: flops for each byte, and what bounds their rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuir.report.answer import Answer
from gpuir.report.equal import EqualKernels

MEMORIES = {"l2": "L2", "l3": "L3", "dram": "memory"}


@dataclass(frozen=True)
class Roof:
    """A rate that no kernel beats: of arithmetic in flop/s, or of a memory in bytes/s."""

    name: str
    rate: float


@dataclass(frozen=True)
class Point:
    """Equal kernels: flops for each byte that they read and write (each byte once, wherever it is),
    and flops a second."""

    of: EqualKernels
    intensity: float
    rate: float


def points(groups: Iterable[EqualKernels]) -> list[Point]:
    """Of the kernels that compute something and say what they read and write."""
    return [
        Point(x, x.one.flops / x.one.bytes, x.one.flops / x.one.cost.time_s)
        for x in groups
        if x.one.flops and x.one.bytes
    ]


def memories(s: Answer) -> list[Roof]:
    """What the device's memories deliver, the fastest first."""
    rates = _numbers(s)
    return [
        Roof(name, rates[f"{field}.bytes_per_s"])
        for field, name in MEMORIES.items()
        if f"{field}.bytes_per_s" in rates
    ]


def ceilings(s: Answer, groups: Iterable[EqualKernels]) -> list[Roof]:
    """The listed peaks that these kernels could reach, or a third of one where they take three
    products for one, each by its pipe and dtype, the fastest first: `tensor tf32`."""
    listed = [
        (field.removeprefix("flops_per_s."), rate)
        for field, rate in _numbers(s).items()
        if field.startswith("flops_per_s.")
    ]
    found: dict[float, str] = {}
    for x in groups:
        peak = x.one.cost.fact("peak")
        if not peak or not x.one.flops:
            continue
        names = [name for name, rate in listed if rate == peak]
        names += [f"{name} / 3" for name, rate in listed if rate / 3 == peak]  # three for one
        dtype = x.one.shape.partition(" ")[0]
        own = [name for name in names if name.endswith(f".{dtype}")]
        found.setdefault(peak, (own or names or [dtype])[0].replace(".", " "))
    return [Roof(name, rate) for rate, name in sorted(found.items(), reverse=True)]


def _numbers(s: Answer) -> dict[str, float]:
    return {n.field: n.value for n in s.device.numbers if isinstance(n.value, int | float)}
