"""What a costed graph comes to on its device: how long, of which how sure, in how much memory."""

from __future__ import annotations

from dataclasses import dataclass

from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Graph
from gpuir.simulate.memory import Memory, memory
from gpuir.simulate.timeline import Timeline, timeline
from gpuir.targets.profile import profile_of
from gpuir.targets.target import Target


@dataclass(frozen=True, eq=False)
class Outcome:
    """One run of a model. `items` is how many it does at once: its batch."""

    graph: Graph
    target: Target
    timeline: Timeline
    memory: Memory
    items: int = 1

    @property
    def latency_s(self) -> float:
        return self.timeline.time_s

    @property
    def item_s(self) -> float:
        """Seconds for each of its items."""
        return self.latency_s / self.items

    @property
    def items_per_s(self) -> float:
        return 1 / self.item_s

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between what 80 % of measurements are expected; None where no kernel can say."""
        return self.timeline.interval


def outcome(graph: Graph, target: Target, items: int = 1) -> Outcome:
    """The run of a costed graph under its profile, `ideal` where it has none. ModelError where
    nothing takes any time: what is tried is compared by its rate."""
    run = timeline(graph, profile_of(graph))
    if not run.time_s:
        raise ModelError(
            f"nothing runs under {run.profile.name}",
            where=graph.name,
            expected="a model that launches a kernel",
            fix="run `gpuir analyze` to see what happened to the nodes of the model",
        )
    return Outcome(
        graph=graph, target=target, timeline=run, memory=memory(graph, target), items=items
    )
