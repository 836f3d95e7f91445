"""Which part of a training step a node belongs to: its locations say so, by their last word."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from gpuir.ir.graph import Graph, Loc, Node

Phase = Literal["backward", "recomputed", "optimizer"]
PHASES: tuple[Phase, ...] = ("backward", "recomputed", "optimizer")
WITHIN = "::"  # before the name of what a model's operator calls: `m:distance::sub`
SUM = "sum"  # the part `beside` an operator that adds its gradient to that of another reader


def in_phase(locs: tuple[Loc, ...], phase: Phase) -> tuple[Loc, ...]:
    """Where a node is that another pass over the model adds: `m.onnx:MatMul_3/backward`."""
    return tuple(f"{loc}/{phase}" for loc in locs)


def beside(locs: tuple[Loc, ...], part: str, mark: str = ".") -> tuple[Loc, ...]:
    """Where a launch is that an operator makes besides: `m:h/softmax/backward` →
    `m:h/softmax.product/backward`."""

    def named(loc: Loc) -> Loc:
        head, slash, last = loc.rpartition("/")
        inside = f"{head}{mark}{part}{slash}{last}"
        return inside if last in PHASES else f"{loc}{mark}{part}"

    return tuple(map(named, locs))


def called_from(loc: Loc) -> Loc:
    """The model's operator that a launch is a part of: its own, or that which calls it."""
    caller, mark, rest = loc.partition(WITHIN)
    _, slash, phase = rest.partition("/")
    return f"{caller}{slash}{phase}" if mark else loc


def operator_of(loc: Loc) -> str:
    """The name of the model's operator that a launch is a part of: `m:layer/distance::sub` →
    `distance`."""
    return called_from(loc).rpartition(":")[2].rpartition("/")[2]


def phase_of(node: Node) -> Phase | None:
    """The phase of a node; None is the forward pass. What a compiler computes once more within a
    backward launch has locations of both: it is backward."""
    return _phase_at(node.locs)


@lru_cache(maxsize=1 << 16)
def _phase_at(locs: tuple[Loc, ...]) -> Phase | None:
    words = {loc.rpartition("/")[2] for loc in locs}
    return next((phase for phase in PHASES if phase in words), None)


def is_training(g: Graph) -> bool:
    """Whether a graph has a backward pass already."""
    return any(phase_of(node) == "backward" for node in g.nodes)
