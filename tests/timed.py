"""Launches whose kernels take given times, and when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuir.ir.notes import Cost
from gpuir.simulate.clock import Script
from gpuir.simulate.launches import Launch, Launches, Repeat
from gpuir.simulate.timeline import Prepared, Timeline
from gpuir.targets.profile import Profile


@dataclass(frozen=True)
class Timed:
    """A launch, the time of its kernel, and the part of the device that this fills."""

    launch: Launch
    time_s: float = 0.0
    share: float = 1.0


def timed(op: str, time_s: float, *, empty: bool = False, share: float = 1.0, **fields) -> Timed:
    return Timed(Launch((op,), op, -1 if empty else 0, **fields), time_s, share)


def run(
    items: Sequence[Timed | Repeat],
    profile: Profile,
    into: Sequence[tuple[str, float]] = (),
    back: Sequence[tuple[str, float]] = (),
    params: int = 0,
) -> Timeline:
    """When they run, behind and before copies that take so many seconds."""
    costs: list[Cost] = []

    def placed(x: Timed | Repeat) -> Launch | Repeat:
        if isinstance(x, Repeat):
            return replace(x, body=tuple(map(placed, x.body)))
        if x.launch.empty:
            return x.launch
        costs.append(Cost(x.time_s, "latency", "given", (), (("device_share", x.share),)))
        return replace(x.launch, kernel=len(costs) - 1)

    launches = Launches(tuple(map(placed, items)), tuple(into), tuple(back), params)
    made = Prepared(Script(launches, profile), tuple(costs), link=1.0)
    return made.run([x.time_s for x in costs])
