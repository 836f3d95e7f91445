"""With what change a model fits that does not: each was tried, and says what it leaves free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from gpuir.ir.graph import Graph
from gpuir.simulate.memory import available_bytes, memory
from gpuir.targets.load import load_target, target_names
from gpuir.targets.mig import mig_specs
from gpuir.targets.support import refusal
from gpuir.targets.target import Target

Change = Literal["batch", "dtype", "tp", "zero", "target"]


@dataclass(frozen=True)
class ToFit:
    """A change with which a model fits: of what, the option that makes it, and the bytes that then
    stay free."""

    change: Change
    option: str
    spare_bytes: int


def larger_target(graph: Graph, target: Target) -> ToFit | None:
    """The smallest that holds a costed graph: of the larger slices of the same GPU, with the whole,
    else of the vendor's GPUs. None where none does."""
    for on in chain(_slices(str(graph.target), target), _larger(target)):
        held = memory(graph, on)
        if held.fits and refusal(graph, on) is None:
            return ToFit("target", f"--target {on.name}", held.spare_bytes or 0)
    return None


def _slices(name: str, target: Target) -> list[Target]:
    """The slices of a slice's GPU that have more memory, and the GPU, the smallest first."""
    mig = mig_specs().get(target.device)
    if target.slice is None or mig is None:
        return []
    gpu = name.rpartition(":")[0]
    return _more((gpu, *(f"{gpu}:{p.name}" for p in mig.profiles if not p.variant)), target)


def _larger(target: Target) -> list[Target]:
    """The vendor's GPUs that have more memory, the smallest first, its own architecture before
    others."""
    return _more((name for name in target_names() if _is_alike(load_target(name), target)), target)


def _is_alike(other: Target, target: Target) -> bool:
    return other.vendor == target.vendor and other.is_cpu == target.is_cpu


def _more(names: Iterable[str], target: Target) -> list[Target]:
    found = {on.name: on for on in map(load_target, names)}
    more = [on for on in found.values() if available_bytes(on) > available_bytes(target)]
    return sorted(more, key=lambda on: (on.dram.bytes, on.arch != target.arch, on.sms, on.name))
