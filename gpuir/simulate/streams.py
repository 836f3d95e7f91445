"""Kernels on several streams of one device, sharing it as fluid: what each may take of it, and how
they slow each other down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StreamJob(NamedTuple):
    """A kernel that the host has launched at `arrives_s`, and that would take `work_s` alone,
    filling `share` of the device; it starts after the jobs `after` have ended."""

    arrives_s: float
    work_s: float
    share: float
    after: tuple[int, ...]


class StreamTimes(NamedTuple):
    """When each job starts and ends, on which stream, and which job it waited for (-1: none)."""

    starts: list[float]
    ends: list[float]
    streams: list[int]
    causes: list[int]


def assigned(jobs: Sequence[StreamJob], streams: int) -> list[int]:
    """The stream of each job: behind one that it waits for, if that is still the last of its
    stream, else the stream that was given a job longest ago. Times play no part, so that a stream
    is no more chosen by chance than a captured graph's branch is."""
    last = [-1] * streams  # job of each stream
    found: list[int] = []
    for i, job in enumerate(jobs):
        behind = [s for s in range(streams) if last[s] >= 0 and last[s] in job.after]
        chosen = min(behind or range(streams), key=lambda s: (last[s], s))
        last[chosen] = i
        found.append(chosen)
    return found


def share_device(jobs: Sequence[StreamJob], streams: int) -> StreamTimes:
    """When each job runs. Those on one stream run in order. Those that run at once do not slow each
    other down as long as their shares fill the device at most; beyond, all slow down by the same
    factor.

    Limits: real blocks are scheduled first come, first served, a kernel that holds every SM lets a
    later one in only at its tail, and caches are shared too. So this is the most that streams give.
    """
    stream_of = assigned(jobs, streams)
    queues: list[list[int]] = [[] for _ in range(streams)]
    for i in reversed(range(len(jobs))):
        queues[stream_of[i]].append(i)  # the next job is the last item
    starts, ends = [0.0] * len(jobs), [0.0] * len(jobs)
    causes, done = [-1] * len(jobs), [False] * len(jobs)
    before = [-1] * streams  # job that ended last on each stream
    left: dict[int, float] = {}
    t = 0.0
    while left or any(queues):
        coming = float("inf")
        for stream, queue in enumerate(queues):
            running = before[stream] >= 0 and not done[before[stream]]
            if not queue or running or not all(done[j] for j in jobs[queue[-1]].after):
                continue
            i, job = queue[-1], jobs[queue[-1]]
            if job.arrives_s > t:
                coming = min(coming, job.arrives_s)
                continue
            waited = [j for j in (before[stream], *job.after) if j >= 0 and ends[j] == t]
            causes[i] = waited[0] if waited and job.arrives_s < t else -1
            starts[i], left[i], before[stream] = t, job.work_s, i
            queue.pop()
        slow = max(1.0, sum(jobs[i].share for i in left))
        first = min(left, key=lambda i: (left[i], i), default=None)
        finish = t + left[first] * slow if first is not None else float("inf")
        step = (min(coming, finish) - t) / slow
        t = min(coming, finish)
        for i in [*left]:
            left[i] -= step
            if (i == first and t == finish) or left[i] <= 0:
                del left[i]
                ends[i], done[i] = t, True
    return StreamTimes(starts, ends, stream_of, causes)


def busy(starts: Sequence[float], ends: Sequence[float]) -> float:
    """How long at least one of these spans lasts."""
    total, until = 0.0, 0.0
    for start, end in sorted(zip(starts, ends, strict=True)):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
