"""What a run would gain if a cause of its time were gone: the timeline, run again without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from gpuir.simulate.clock import Script
from gpuir.simulate.launches import counted
from gpuir.simulate.timeline import Prepared, Timeline
from gpuir.targets.load import load_target
from gpuir.targets.profile import Profile

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.ir.notes import Cost

Cause = Literal["host", "launches", "compute", "memory", "waits", "communication", "copies"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True)
class Gain:
    """The seconds by which a run would be shorter without a cause, all others as they are. Causes
    hide each other, so that gains add up to less than the run or to more.

    - `host`: nothing on the host takes time, kernels that it runs itself included
    - `launches`: launching a kernel takes no time, on the host and from kernel to kernel
    - `compute`, `memory`: a kernel takes its next largest term
    - `waits`: no kernel waits, beyond its launch: for its first bytes, its last blocks, its steps
    - `communication`: collectives, and what ranks of a pipeline send, take no time
    - `copies`: inputs lie on the device, and outputs stay there
    """

    cause: Cause
    gain_s: float


def gains(latency_s: float, without: Callable[[Cause], float]) -> tuple[Gain, ...]:
    """What each cause would gain, the most first, of a run that takes so long without it."""
    found = (Gain(cause, max(latency_s - without(cause), 0.0)) for cause in CAUSES)
    return tuple(sorted(found, key=lambda gain: -gain.gain_s))


def gains_of(graph: Graph, profile: Profile, latency_s: float) -> tuple[Gain, ...]:
    """What each cause would gain in a costed graph that takes so long under a profile."""
    again = Again(graph, profile)
    return gains(latency_s, lambda cause: again.without(cause).time_s)


class Again:
    """A costed graph under a profile, to be run again."""

    def __init__(self, graph: Graph, profile: Profile):
        self.made = Prepared.of(graph, profile)
        self.launch_s = load_target(graph.target).launch_s if graph.target else 0.0
        found = counted(self.made.script.calls.found)
        self.sent = {x.kernel for x, _ in found if x.group}
        costs = enumerate(self.made.costs)
        self.each = [*{id(x): x for i, x in costs if i not in self.sent}.values()]  # alike are one

    def without(self, cause: Cause) -> Timeline:
        """When it runs, were one cause gone."""
        made, script = self.made, self.made.script
        if cause in ("host", "launches"):
            script = Script(script.calls, _unhosted(script.profile, cause))
        link = None if cause == "copies" else made.link
        return replace(made, script=script, link=link).run(self.seconds(cause))

    def seconds(self, cause: Cause) -> list[float]:
        """What each kernel would take."""
        sent = 0.0 if cause == "communication" else 1.0
        each = {id(x): less(x, cause, self.launch_s) for x in self.each}
        return [
            sent * x.time_s if i in self.sent else each[id(x)]
            for i, x in enumerate(self.made.costs)
        ]


def _unhosted(profile: Profile, cause: Cause) -> Profile:
    """The profile, where the host takes no time, or where launches take none."""
    if cause == "launches":
        return replace(profile, host=replace(profile.host, launch_s=0.0, graph_s=0.0))
    copies = profile.copies and replace(profile.copies, call_s=0.0)
    return replace(profile, host=profile.host.scaled(0.0), copies=copies)


def less(cost: Cost, cause: Cause, launch_s: float) -> float:
    """Seconds of a kernel that is no collective, were one cause gone."""
    if cost.on_host:
        return 0.0 if cause == "host" else cost.time_s
    terms: dict[str, float] = dict(cost.terms)
    latency = terms.pop("latency", 0.0)
    launch = min(launch_s, latency)
    drop = {"launches": launch, "waits": latency - launch}.get(cause, 0.0)
    if cause in terms:
        drop = max(terms.values()) - _largest(terms, cause)
    return max(cost.time_s - drop, _largest(terms, cause))


def _largest(terms: Mapping[str, float], but: str) -> float:
    return max((s for name, s in terms.items() if name != but), default=0.0)
