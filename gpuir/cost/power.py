"""Power: the rate that a board sustains, and what kernels draw.

Boards whose power does not feed every unit at the boost clock slow their clock down under load.
Slices of a board share its power and its clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gpuir.cost import tensor
from gpuir.cost.learned import factors, shipped
from gpuir.cost.work import Work
from gpuir.targets.target import Target

# Joules a flop at the boost clock, on-chip operand movement included: f32 on the lanes, f16 on the
# matrix units. By compute capability, because it goes with the process (16, 12, 7, 8 and 4 nm).
# First order: from the share of peak that large products reach on power-limited boards (T4, A100
# PCIe, A100 and H100 SXM in the measurement tables), read across to neighbours of like process.
JOULES = {
    "sm_60": (14e-12, 14e-12),
    "sm_61": (16e-12, 16e-12),
    "sm_70": (12e-12, 1.7e-12),
    "sm_75": (15.5e-12, 1.7e-12),
    "sm_80": (11.3e-12, 0.8e-12),
    "sm_86": (7.5e-12, 1.2e-12),
    "sm_89": (4.3e-12, 0.95e-12),
    "sm_90": (4.3e-12, 0.63e-12),
}
OTHER_JOULES = (4.3e-12, 0.45e-12)  # later and other chips: as B200's f16
IDLE_SHARE = 0.25  # assumed: of the board power, for memory, fans and leakage


def sustained(target: Target, peak: float, on_tensor: bool, bits: int) -> float:
    """The share of `peak` (flop/s) that the board's power feeds. Without a power limit in the spec
    the share is 1."""
    return min(1.0, fed(target, on_tensor, bits) / peak)


def fed(target: Target, on_tensor: bool, bits: int) -> float:
    """Flop/s at the full clock that take all the power left for arithmetic; infinite without a
    power limit in the spec.

    Energy a flop falls with the width of the operands, as the rate rises with it.
    """
    if target.tdp_w is None:
        return math.inf
    lane, matrix = JOULES.get(target.isa, OTHER_JOULES)
    joules = matrix * bits / 16 if on_tensor else lane * max(bits, 16) / 32
    return target.tdp_w * (1 - IDLE_SHARE) / joules


def drawn(kernels: Iterable[tuple[Work, float]], target: Target) -> float:
    """Watts that kernels draw for arithmetic, on average over their seconds: what each computes,
    and how long it takes at the full clock (of a target whose `tdp_w` does not slow it).

    A flop on the matrix units takes what the products' power limit reckons with (factor `joules` of
    the family tensor, times the target's own); one on the lanes what JOULES has. Memory, fans and
    leakage are the share IDLE_SHARE of the board, whatever runs: bytes draw nothing more.
    """
    joules = total_s = 0.0
    for work, time_s in kernels:
        joules += _energy(work, target)
        total_s += time_s
    return joules / total_s if total_s else 0.0


def bend(target: Target) -> float:
    """The power of the watts with which the clock goes, as products have it."""
    return float(factors(tensor.FAMILY, target, shipped())["power bend"])


def _energy(work: Work, target: Target) -> float:
    lane, _ = JOULES.get(target.isa, OTHER_JOULES)
    rest = float(work.flops) - float(work.products)
    bits = work.dtype.bits
    if work.pipe == "tensor":
        p = factors(tensor.FAMILY, target, shipped())
        matrix = float(tensor.flop_joules(target, p, bits))
        return matrix * float(work.products) + lane / 2 * max(rest, 0.0)
    return lane * max(bits, 16) / 32 * float(work.flops)
