"""Power: the rate that a board sustains, and what kernels draw.

Boards whose power does not feed every unit at the boost clock slow their clock down under load.
Slices of a board share its power and its clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuir.cost import tensor
from gpuir.cost.data import of_isa
from gpuir.cost.learned import factors, shipped
from gpuir.cost.nest import board_watts
from gpuir.cost.work import Work
from gpuir.targets.target import Target


def sustained(target: Target, peak: float, on_tensor: bool, bits: int) -> float:
    """The share of `peak` (flop/s) that the board's power feeds. Without a power limit in the spec
    the share is 1."""
    return min(1.0, fed(target, on_tensor, bits) / peak)


def fed(target: Target, on_tensor: bool, bits: int) -> float:
    """Flop/s at the full clock that take all the power left for arithmetic; infinite without a
    power limit in the spec.

    Energy a flop falls with the width of the operands, as the rate rises with it.
    """
    return board_watts(target) / (matrix_j if on_tensor else lane_j)(target, bits)


def lane_j(target: Target, bits: int) -> float:
    """Joules of a flop on the lanes."""
    return of_isa("lane_j", target.isa) * max(bits, 16) / 32


def matrix_j(target: Target, bits: int) -> float:
    """Joules of a flop on the matrix units."""
    return of_isa("matrix_j", target.isa) * bits / 16


def drawn(kernels: Iterable[tuple[Work, float]], target: Target) -> float:
    """Watts that kernels draw for arithmetic, on average over their seconds: what each computes,
    and how long it takes at the full clock (of a target whose `tdp_w` does not slow it).

    A flop on the matrix units takes what the products' power limit reckons with (factor `joules` of
    the family tensor, times the target's own); one on the lanes `lane_j`. Memory, fans and
    leakage are the share `nest.IDLE_SHARE` of the board, whatever runs: bytes draw nothing more.
    """
    joules = total_s = 0.0
    for work, time_s in kernels:
        joules += _energy(work, target)
        total_s += time_s
    return joules / total_s if total_s else 0.0


def bend(target: Target) -> float:
    """The power of the watts with which the clock goes, as products have it."""
    return float(tensor.power_bend(target, factors(tensor.FAMILY, target, shipped())))


def _energy(work: Work, target: Target) -> float:
    rest = float(work.flops) - float(work.products)
    bits = work.dtype.bits
    if work.pipe == "tensor":
        p = factors(tensor.FAMILY, target, shipped())
        matrix = float(tensor.flop_joules(target, p, bits))
        return matrix * float(work.products) + lane_j(target, 16) * max(rest, 0.0)
    return lane_j(target, bits) * float(work.flops)
