"""Kernels and collectives on lanes of their own: what waits for what, and what communication takes
from compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpuir.simulate.streams import StreamJob, StreamTimes

COMPUTE = 0  # the lane of kernels; each group of ranks has a lane of its own behind it
LEAST_RATE = 0.1  # of compute, beside collectives that would leave it nothing. Assumed


class Overlap(NamedTuple):
    """When jobs ran, and of each lane but the first how long compute waited for it: its exposed
    part."""

    shared: StreamTimes
    exposed_s: tuple[float, ...]


def rate_beside(taken: float, share: float) -> float:
    """How fast a kernel runs that would fill a `share` of the device, of which collectives have
    `taken` theirs: 1 alone."""
    if not taken or share + taken <= 1.0:
        return 1.0
    return max((1.0 - taken) / share, LEAST_RATE)


def overlapped(jobs: Sequence[StreamJob], lanes: Sequence[int], count: int) -> Overlap:
    """Jobs in order on each of `count` lanes, each after those it waits for.

    Collectives run at their own pace: links are what they need. While they run, they hold a `share`
    of the device (the SMs their blocks run on, or memory bandwidth, the larger), and a kernel that
    would fill more than the rest is slower in proportion: Rashidi et al., Enabling Compute-
    Communication Overlap in Distributed Deep Learning Training Platforms, 2021, section 3, measure
    both causes.
    """
    queues: list[list[int]] = [[] for _ in range(count)]
    for i in reversed(range(len(jobs))):
        queues[lanes[i]].append(i)
    starts, ends = [0.0] * len(jobs), [0.0] * len(jobs)
    causes, done = [-1] * len(jobs), [False] * len(jobs)
    running: list[int] = [-1] * count
    before: list[int] = [-1] * count
    waited = [0.0] * count
    left, t = 0.0, 0.0  # of the kernel that runs, alone
    while True:
        coming = float("inf")
        for lane in range(count):
            queue = queues[lane]
            if running[lane] >= 0 or not queue:
                continue
            i = queue[-1]
            job = jobs[i]
            ready, cause = job.arrives_s, -1
            last = before[lane]
            if last >= 0 and ends[last] > ready:
                ready, cause = ends[last], last
            for j in job.after:
                if not done[j]:
                    break
                if ends[j] > ready:
                    ready, cause = ends[j], j
            else:
                if ready > t:
                    coming = min(coming, ready)
                    continue
                queue.pop()
                starts[i], causes[i], running[lane] = t, cause, i
                if lane == COMPUTE:
                    left = job.work_s
                    idle = t - max(ends[last] if last >= 0 else 0.0, job.arrives_s)
                    if cause >= 0 and lanes[cause] != COMPUTE and idle > 0:
                        waited[lanes[cause]] += idle
                else:
                    ends[i] = t + job.work_s
        if all(i < 0 for i in running) and coming == float("inf"):
            break
        taken = sum(jobs[i].share for i in running[1:] if i >= 0)
        finish, rate = float("inf"), 1.0
        kernel = running[COMPUTE]
        if kernel >= 0:
            rate = rate_beside(taken, jobs[kernel].share)
            finish = t + left / rate
        next_t = min(coming, finish, *(ends[i] for i in running[1:] if i >= 0))
        left -= (next_t - t) * rate
        t = next_t
        for lane, i in enumerate(running):
            if i >= 0 and (finish if lane == COMPUTE else ends[i]) <= t:
                ends[i], done[i], before[lane], running[lane] = t, True, i, -1
    last = max((ends[i] for i in before if i >= 0), default=0.0)
    after = ends[before[COMPUTE]] if before[COMPUTE] >= 0 else 0.0
    for lane in range(1, count):  # what is sent when nothing is left to compute
        if before[lane] >= 0 and ends[before[lane]] == last and last > after:
            waited[lane] += last - after
            break
    return Overlap(StreamTimes(starts, ends, list(lanes), causes), tuple(waited[1:]))
