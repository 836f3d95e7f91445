"""Which formulas describe which kernel."""

from __future__ import annotations

from gpuir.cost import plain
from gpuir.cost.sheet import Family
from gpuir.cost.work import Work
from gpuir.targets.target import Target

FAMILIES: dict[str, Family] = {f.name: f for f in (plain.FAMILY,)}


def family_of(work: Work, target: Target) -> Family:
    """The family that a kernel belongs to on a target."""
    return plain.FAMILY
