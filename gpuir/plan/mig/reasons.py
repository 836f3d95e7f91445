"""Why requests take as long as they do, and why a plan is not the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gpuir.plan.mig.search import Objective, Outcome
from gpuir.plan.mig.workloads import ServingSetting
from gpuir.report.answer import Answer
from gpuir.simulate.sharing import Served

PART, TURN = "part", "turn"  # causes beside what is shared: a smaller part, the wait for a turn
NOTABLE = 0.02  # of the time alone, or of a plan's worth: less is not worth a word


# A deadline that is missed, requests that pile up (`served` of those asked), a rate, a latency.
What = Literal["deadline", "served", "rate", "latency", "price"]


@dataclass(frozen=True)
class Cause:
    """What makes requests longer than alone on a whole GPU, by how many seconds on average: a
    smaller `part`, the wait for their `turn`, or what they share: `time` on the device, `SMs`,
    `bandwidth`, `power`, the `host`, `PCIe`."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Reason:
    """Why a plan lost, by one workload of it: what it gets there, and what in the best plan or
    what is asked, in requests a second or seconds, and the largest cause."""

    workload: str
    what: What
    here: float
    best: float
    cause: Cause | None


def causes(served: Served, reference: Answer) -> tuple[Cause, ...]:
    """What adds to a request's time, the largest first."""
    found = [Cause(PART, served.alone_s - reference.latency_s), Cause(TURN, served.waiting_s)]
    for name, share in served.lost.items():  # `SMs of GPU 0`
        found.append(Cause(name.partition(" of ")[0], share * served.alone_s))
    notable = [x for x in found if x.seconds > NOTABLE * reference.latency_s]
    return tuple(sorted(notable, key=lambda x: -x.seconds))


def _largest(served: Served, reference: Answer) -> Cause | None:
    """The largest cause. Where something is shared, a queue is the effect of slower runs."""
    found = causes(served, reference)
    return next((x for x in found if x.name != TURN or not served.lost), None)


def by_workload(outcome: Outcome) -> dict[int, list[Served]]:
    """What became of each workload, by its index, wherever it runs."""
    found: dict[int, list[Served]] = {}
    for _, seat, served in outcome.seats():
        for member, one in zip(seat.members, served, strict=True):
            found.setdefault(member, []).append(one)
    return found


def reasons(
    outcome: Outcome,
    best: Outcome,
    setting: ServingSetting,
    references: tuple[Answer, ...],
    objective: Objective,
) -> tuple[Reason, ...]:
    """Why a plan is not the best one, what weighs most first."""
    if objective == "cost" and (outcome.usd_per_hour or 0.0) > (best.usd_per_hour or 0.0):
        price = Reason("", "price", outcome.usd_per_hour or 0.0, best.usd_per_hour or 0.0, None)
        return (price,)
    here, there = by_workload(outcome), by_workload(best)
    found: list[tuple[float, Reason]] = []
    for member, some in here.items():
        pairs = _compared(some, there[member], objective)
        for weight, what, one, value, other in pairs:
            cause = _largest(one, references[member])
            reason = Reason(setting.workloads[member].name, what, value, other, cause)
            found.append((weight, reason))
    found.sort(key=lambda x: -x[0])
    late = tuple(r for _, r in found if r.what in ("deadline", "served"))
    return late or tuple(r for weight, r in found if weight > NOTABLE)


def _compared(
    some: list[Served], best: list[Served], objective: Objective
) -> Iterator[tuple[float, What, Served, float, float]]:
    """How much worse a workload's requests fare: a weight, what of them, of which, here, best."""
    slowest = max(some, key=lambda x: x.mean_s)
    if sum(not x.in_time for x in some) > sum(not x.in_time for x in best):
        late = next(x for x in some if not x.in_time)
        if not late.keeps_up:
            asked = late.load.rate or 0.0
            yield 1e6, "served", late, late.rate, asked
        else:
            yield 1e6, "deadline", late, late.percentile_s(99), late.load.deadline_s or 0.0
        return
    if objective == "latency" or some[0].load.rate is not None:
        mean = sum(x.mean_s for x in some) / len(some)
        other = sum(x.mean_s for x in best) / len(best)
        weight = 1 - other / mean
        if objective != "latency":
            weight *= 1e-3  # what is asked is done: its latency counts after the others' rates
        yield weight, "latency", slowest, mean, other
    else:
        rate, other = sum(x.rate for x in some), sum(x.rate for x in best)
        yield 1 - rate / other if other else 0.0, "rate", slowest, rate, other
