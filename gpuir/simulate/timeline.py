"""What runs when: a costed graph as a software stack runs it on its target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log

import numpy as np

from gpuir.ir.door import of_type, takes
from gpuir.ir.graph import GRAPH, Graph, Level, Node, check_level
from gpuir.ir.notes import Cost
from gpuir.ops import kernel as k
from gpuir.simulate.clock import KernelTimes, Number, Ran, Script
from gpuir.simulate.launches import (
    Found,
    Launch,
    Launches,
    chosen,
    counted,
    launches_of,
)
from gpuir.simulate.spans import Span
from gpuir.targets.load import load_target
from gpuir.targets.profile import Profile
from gpuir.targets.target import Target

LEAST_END = 1e-3  # of their time: kernels that may take no time at all are taken to take so much
HOST_BOUND = 0.1  # of the time: a device that waits longer for the host is held up by it


@dataclass(frozen=True)
class Timeline(Ran[float]):
    """When a costed graph runs, under a profile with the host that it has there. `costs` are those
    of its kernels, by the places that launches name.

    `interval` is what 80 % of measurements are expected in: kernels of one kind, and the host, are
    off alike, those of different kinds independently (`together`); None where no kernel can say.
    """

    profile: Profile
    costs: tuple[Cost, ...] = field(repr=False)
    interval: tuple[float, float] | None = None

    def __repr__(self) -> str:
        parts = f"the device busy {self.busy_s:.4g} s, the host {self.host_s:.4g} s"
        return f"<Timeline under {self.profile.name}: {self.time_s:.4g} s, {parts}>"

    @property
    def starts(self) -> list[float]:
        """Of each launch's kernel, on the device."""
        return self.marks.starts

    @property
    def launched_s(self) -> float:
        """When the host has launched all, by whatever thread, and is done."""
        last = max(self.marks.begins, default=0.0) + self.marks.launch_s
        return max(self.host_s, last)

    @property
    def is_host_bound(self) -> bool:
        """Whether the device waits for the host for more than a tenth of the time."""
        return self.gaps_s > HOST_BOUND * self.time_s

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Everything that takes time on a lane, lane by lane."""
        return tuple(self.marks.spans([("/".join(x.path), x.lane) for x in self.launches]))

    @cached_property
    def critical(self) -> tuple[Span, ...]:
        """The chain that decides the end, from first to last: stretches of host, copies, and
        kernels, each of which begins because the one before it ends."""
        return tuple(self.marks.critical(self.time_s))


@takes(graph=GRAPH, profile=of_type(Profile, "a profile", "gpuir.load_profile('eager')"))
def timeline(graph: Graph, profile: Profile) -> Timeline:
    """A costed graph as `profile` runs it on the graph's target.

    On a CPU the kernels run in the host's own thread, and their times hold the calls: the host
    takes no time besides.
    """
    check_level(
        "timeline",
        graph,
        Level.costed,
        "gpuir.timeline(gpuir.analyze(graph, 'a100').graph, profile)",
    )
    made = Prepared.of(graph, profile)
    return replace(made.run([x.time_s for x in made.costs]), interval=made.interval)


def costed_launches(graph: Graph, apart: bool) -> tuple[Launches, tuple[Cost, ...]]:
    """The launches of a costed graph, and the costs of their kernels by their places; of branches
    those of the dearer side. What a loop costs beyond its kernels is a kernel more."""
    costs: list[Cost] = []

    def place(node: Node) -> tuple[int, bool]:
        cost = node.cost
        if cost is not None and isinstance(node.op, k.Loop):
            rest = cost.time_s - node.op.trips * node.op.body.time_s
            cost = Cost(rest, "latency", "rest", ()) if rest > 1e-9 * cost.time_s else None
        if cost is None or isinstance(node.op, k.View | k.Cond):
            return -1, False
        costs.append(cost)
        return len(costs) - 1, cost.on_host

    found = launches_of(graph, place, apart)
    known = chosen(found.found, [x.time_s for x in costs])
    return replace(found, found=known), tuple(costs)


@dataclass(frozen=True)
class Prepared:
    """A costed graph, ready to run: the costs of its kernels by their places, and the bytes a
    second of the link to its device, None where there is none."""

    script: Script
    costs: tuple[Cost, ...]
    link: float | None = None

    @staticmethod
    def of(graph: Graph, profile: Profile) -> Prepared:
        launches, costs = costed_launches(graph, profile.streams > 1)
        target = load_target(graph.target) if graph.target else None
        return Prepared(
            Script(launches, launches.host(profile, target), graph.name), costs, link_of(target)
        )

    def run(self, seconds: Sequence[float], host: float = 1.0) -> Timeline:
        """When kernels that take so long run, with a host that takes so many times as long."""

        def share(x: Launch) -> float:
            return share_of(x, self.costs)

        ran = self.script.run(KernelTimes(seconds, share, host, self.link))
        return Timeline(**vars(ran), profile=self.script.profile, costs=self.costs)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of its time; None where no kernel can say."""
        found, costs = self.script.calls.found, self.costs
        if not any(costs[x.kernel].interval for x, _ in counted(found) if not x.empty):
            return None
        times = [(x.time_s, *(x.interval or (x.time_s, x.time_s))) for x in costs]
        profile = self.script.profile
        by = profile.host.uncertainty
        low, high = ends_of(found, times, profile)
        return self.run(low, 1 / by).time_s, self.run(high, by).time_s


def link_of(target: Target | None) -> float | None:
    """Bytes a second of the link to a device."""
    return None if target is None or target.pcie is None else target.pcie.bytes_per_s


def ends_of(
    found: Iterable[Found], times: Sequence[tuple[Number, Number, Number]], profile: Profile
) -> tuple[list[Number], list[Number]]:
    """What each kernel takes at the ends of its interval, as near as kernels of its kind have them
    together, and further apart by what a whole run is off under the profile. `times` are, by the
    places of kernels, as expected and from when to when."""
    widths: dict[str, list[Number]] = {}
    total: Number = 0.0
    for x, runs in counted(found):
        if not x.empty:
            time, low, high = times[x.kernel]
            total = total + runs * time
            both = widths.setdefault(x.kind, [0.0, 0.0])
            both[0] = both[0] + runs * (time - low)
            both[1] = both[1] + runs * (high - time)
    quicker, slower = together(widths)
    total = total + (total == 0.0)
    down = 1 - quicker * sum(w[0] for w in widths.values()) / total
    up = 1 + slower * sum(w[1] for w in widths.values()) / total
    lower = further(down, -log(profile.quicker or 1.0))
    higher = further(up, log(profile.slower or 1.0))
    return (
        [lower * (time + quicker * (low - time)) for time, low, _ in times],
        [higher * (time + slower * (high - time)) for time, _, high in times],
    )


def further(end: Number, spread: float) -> Number:
    """By how much an end of the kernels' interval, as a multiple of their time, moves where a run
    is off besides by a `spread` in the logarithm, down or up: errors that are independent."""
    if not spread:
        return 1.0
    alone = np.log(np.maximum(end, LEAST_END))
    moved = np.exp(np.copysign(np.hypot(alone, spread), spread) - alone)
    return moved if isinstance(end, np.ndarray) else float(moved)


def together(widths: Mapping[str, Sequence[Number]]) -> tuple[Number, Number]:
    """Of the seconds by which the kernels of each kind may be quicker and slower, all together,
    what a whole model may be, as shares of their sums: errors of
    different kinds are independent, so that their squares add up. Of 284 runs of timm's models it
    holds 80 %, where sums hold 95 (half of the public models; docs/validation/data.md)."""
    shares: list[Number] = []
    for side in (0, 1):
        total: Number = sum(w[side] for w in widths.values())
        squares: Number = sum(w[side] * w[side] for w in widths.values())
        shares.append((squares**0.5) / (total + (total == 0.0)))
    return shares[0], shares[1]


def share_of(x: Launch, costs: Sequence[Cost]) -> float:
    """The part of the device that a launch fills; of one in a loop or a branch, all."""
    return filled(costs[x.kernel]) if len(x.path) == 1 else 1.0


def filled(cost: Cost) -> float:
    """The part of the device that a kernel keeps busy: of the blocks it can hold, of its bandwidth,
    of its peak, the largest. All of it where the predictor does not say."""
    if (taken := cost.fact("device_share")) is not None:
        return taken
    facts = [cost.fact(name) for name in ("waves", "dram_share", "peak_share")]
    known = [fact for fact in facts if fact is not None]
    return min(1.0, max(known)) if cost.fact("waves") is not None else 1.0
