"""What a measurement holds besides its kernels, found in the table itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.roofline import bounds
from gpuir.cost.sheet import Number
from gpuir.fit.batch import Clock, MeasuredBatch
from gpuir.fit.columns import Floats
from gpuir.fit.readers import Timing


@dataclass(frozen=True)
class EagerCall:
    """The host's part of an operator's call: a row of data/eager_calls.csv."""

    op: str
    lead_nvidia: float
    lead_amd: float
    floor_nvidia_s: float
    floor_amd_s: float


def _call(op: str) -> EagerCall:
    calls = {c.op: c for c in table("eager_calls", EagerCall, "fit")}
    return calls.get(op, calls[""])


# The floor is what tiny kernels measure. A kernel of which the roofline is `TINY_S` takes less than
# any host's dispatch, if it is not of the few that are slow for another reason: the lower quartile.
TINY_S = 2e-6
QUANTILE = 0.25
# The host's time for a convolution that cudnn.benchmark has chosen varies from 0.1 to 0.8 ms in
# NeuSight's table: by the shape, alike on all GPUs, and with nothing that the shape says. What is
# above any kernel of such a roofline is the host's; the upper quartile.
VARIED_S = {"conv": 5e-5}
FEWEST_TINY = 6


def clocked(batches: Sequence[MeasuredBatch], timing: Timing) -> tuple[MeasuredBatch, ...]:
    """The batches of a table with what their measurements hold besides the kernels: the same for
    all of one operator and device."""
    if timing == "profiler":
        return tuple(replace(b, clock=Clock(launches=False)) for b in batches)
    if timing == "graph":
        return tuple(_host_bound(batches))
    clocks: dict[tuple[str, str], Clock] = {}
    for key in dict.fromkeys((b.op, b.device) for b in batches):
        mine = [b for b in batches if (b.op, b.device) == key]
        clocks[key] = clock_of(mine, timing)
    return tuple(replace(b, clock=clocks[b.op, b.device]) for b in batches)


# A stack whose tiniest kernels take so many times as long as those of the quickest, and so long,
# was timed eagerly after all. README of the aiconfigurator tables, on `host_bound`: 30 to 300 us
# where other stacks need 2 to 12.
HOST_BOUND, HOST_BOUND_S = 3.0, 15e-6
STACK = ("framework", "version")


def _host_bound(batches: Sequence[MeasuredBatch]) -> Iterator[MeasuredBatch]:
    """Batches timed in CUDA graphs; rows of stacks that were not, in batches of their own."""
    floors: dict[tuple[str, ...], Floats] = {}
    for batch in batches:
        tiny = roof_s(batch) < TINY_S
        for stack, rows in batch.rows_by(*STACK):
            key = (batch.op, batch.device, batch.dtype, *stack)
            some = batch.latency_s[rows][tiny[rows]]
            floors[key] = np.concatenate([floors.get(key, some[:0]), some])
    quartile = {
        k: float(np.quantile(v, QUANTILE)) for k, v in floors.items() if len(v) >= FEWEST_TINY
    }
    for batch in batches:
        place = (batch.op, batch.device, batch.dtype)
        least_s = min((f for k, f in quartile.items() if k[:3] == place), default=0.0)
        bound = np.zeros(len(batch), bool)
        for stack, rows in batch.rows_by(*STACK):
            floor_s = quartile.get((*place, *stack), 0.0)
            if floor_s > max(HOST_BOUND * least_s, HOST_BOUND_S):
                bound[rows] = True
                clock = Clock(floor_s, _call("").lead_nvidia * floor_s)
                yield replace(batch.take(rows), clock=clock, rough=True)
        if not bound.all():
            yield batch.take(~bound) if bound.any() else batch


def clock_of(batches: Sequence[MeasuredBatch], timing: Timing) -> Clock:
    """The clock of one operator's measurements on one device, made by events or the host."""
    op, amd = batches[0].op, batches[0].target.vendor == "AMD"
    call = _call(op)
    least = VARIED_S.get(op, TINY_S)
    tiny = np.concatenate([b.latency_s[roof_s(b) < least] for b in batches])
    if len(tiny) >= FEWEST_TINY:
        floor_s = float(np.quantile(tiny, 0.75 if op in VARIED_S else QUANTILE))
    else:
        least_s = min(float(b.latency_s.min()) for b in batches)
        floor_s = min(call.floor_amd_s if amd else call.floor_nvidia_s, least_s)
    lead = call.lead_amd if amd else call.lead_nvidia
    share = lead if timing == "events" else 1.0
    return Clock(floor_s, floor_s * share)


def roof_s(batch: MeasuredBatch) -> Floats:
    """The least time of each row's kernels, by the roofline."""
    least: Number = sum((np.maximum(*bounds(w, batch.target)) for w in batch.works), 0.0)
    return np.asarray(least)[batch.which]
