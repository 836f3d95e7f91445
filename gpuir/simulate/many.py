"""One sequence of launches on many devices at once: when it ends on each, to the last digit as
`timeline.run` says of one.

What the host does does not depend on the device, but for when it waits; so the recurrence of
`timeline` runs once, on arrays that have a column a device. Rows are the launches as they are
expected, at the quick end of their intervals, and at the slow end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from gpuir.simulate.spans import HOST
from gpuir.simulate.timeline import Launch, together
from gpuir.targets.profile import Host, Profile

Array = np.ndarray[Any, np.dtype[np.float64]]

ENDS = (None, 0, 1)  # of intervals, a row each: as expected, quick, slow


class Call(NamedTuple):
    """A launch without its time: `kernel` is the place of that among the times. An `empty` one, a
    view, has none."""

    op: int
    kind: str
    lane: str
    kernel: int
    empty: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes of each input that is copied to the device, and of each output that comes back."""

    into: tuple[int, ...] = ()
    back: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ran:
    """Seconds on each device: as `Timeline` has them."""

    time_s: Array
    low_s: Array
    high_s: Array
    device_s: Array
    gaps_s: Array


def is_straight(profile: Profile, calls: Iterable[object]) -> bool:
    """Whether launches follow each other on one stream: no loops, no collectives."""
    return profile.streams == 1 and all(isinstance(x, Launch) and not x.group for x in calls)


def run_many(
    calls: Sequence[Call],
    times: Array,
    profile: Profile,
    sizes: Sizes,
    pcie_bytes_per_s: Array | None,
    params: int = 0,
) -> Ran:
    """The calls in order, on one stream of each device. `times` are seconds: an end of the interval
    by a kernel by a device. Copies go over links of that many bytes a second, where there are any.
    """
    clock = _Clock(profile.host, _held_together(calls, times))
    clock.call(HOST, params)
    into = back = ()
    before: Any = 0.0
    if profile.copies is not None and pcie_bytes_per_s is not None:
        rate = profile.copies.share * pcie_bytes_per_s
        into, back = ([n / rate for n in some] for some in (sizes.into, sizes.back))
        for time in into:
            clock.copy(time, profile.copies.call_s)
        before = _sums(into)
    clock.go(calls)
    clock.close()
    last = clock.free if clock.ran else 0.0
    for time in back:
        assert profile.copies is not None
        clock.copy(time, profile.copies.call_s)
    shape = times.shape[0], times.shape[2]
    end, device = np.maximum(clock.now, clock.free), np.broadcast_to(clock.device_s, shape)
    gaps = np.broadcast_to(np.maximum(last - device - before, 0.0), shape)
    end = np.broadcast_to(end, shape)
    return Ran(end[0], end[1], end[2], device[0], gaps[0])


def _held_together(calls: Sequence[Call], times: Array) -> Array:
    """The times, their ends as near as the kinds of kernels have them together."""
    expected, low, high = times
    sums: dict[str, list[Any]] = {}
    for x in (x for x in calls if not x.empty):
        t = expected[x.kernel]
        both = sums.setdefault(x.kind, [0.0, 0.0])
        both[0] = both[0] + (t - low[x.kernel])
        both[1] = both[1] + (high[x.kernel] - t)
    quicker, slower = together(sums)
    ends = (expected + quicker * (low - expected), expected + slower * (high - expected))
    return np.stack([expected, *ends])


def _sums(times: Sequence[Array]) -> Array:
    """Of each column, as Python adds numbers, which is not the same in all its versions."""
    return np.array([sum(column) for column in zip(*(t.tolist() for t in times), strict=True)])


class _Clock:
    """How far host and stream are, as `timeline._Clock` has it: a row an end of the intervals, a
    column a device."""

    def __init__(self, host: Host, times: Array):
        ends = [
            host if end is None else host.scaled(host.uncertainty ** (2 * end - 1)) for end in ENDS
        ]
        self.host, self.ends, self.times = host, ends, times
        self.now: Any = np.zeros((len(ENDS), 1))
        self.free: Any = np.zeros((len(ENDS), 1))
        self.device_s: Any = np.zeros((len(ENDS), 1))
        self.op, self.lane, self.replaying, self.inside = -1, HOST, False, False
        self.paid: Any = np.zeros((len(ENDS), 1))
        self.pending: list[Any] = []
        self.ran = False

    def _of(self, name: str) -> Array:
        return np.array([[getattr(host, name)] for host in self.ends])

    def call(self, lane: str, params: int = 0) -> None:
        self.close()
        self.now = self.now + (self._of("call_s") + params * self._of("param_s"))
        self.lane, self.op, self.replaying = lane, -1, False

    def copy(self, time_s: Any, call_s: float) -> None:
        start = np.maximum(self.now + call_s, self.free)
        self.now = self.free = start + time_s

    def close(self) -> None:
        if self.inside:
            self.now = self.now + self._of("after_s")
        self.inside = False

    def go(self, calls: Sequence[Call]) -> None:
        for lane, some in groupby(calls, lambda x: x.lane):
            if lane != self.lane:
                self.call(lane)
            items = list(some)
            if self.host.graph:
                self._replayed(items)
            else:
                self._straight(items)

    def _straight(self, items: Sequence[Call]) -> None:
        now, free, device = self.now, self.free, self.device_s
        pending, limit = self.pending, self.host.queue
        between, empty, launch = self._of("between_s"), self._of("empty_s"), self._of("launch_s")
        step, again = self._of("after_s") + between, self._of("next_s")
        first = {
            kind: np.array([[h.before.get(kind, h.before_s)] for h in self.ends])
            for kind in {x.kind for x in items}
        }
        for x in items:
            if x.empty:
                if x.op != self.op:
                    now = now + (step if self.inside else between)
                    self.op, self.inside = x.op, False
                now = now + empty
                continue
            if x.op == self.op and self.inside:
                now = now + (again + np.maximum(first[x.kind] - self.paid, 0.0))
                self.paid = np.maximum(self.paid, first[x.kind])
            else:
                if x.op != self.op:
                    now = now + (step if self.inside else between)
                self.paid = first[x.kind]
                now = now + self.paid
                self.op, self.inside = x.op, True
            if len(pending) >= limit:
                now = np.maximum(now, pending[-limit])
            now = now + launch
            time = self.times[:, x.kernel]
            free = np.maximum(now, free) + time
            device = device + time
            pending.append(free)
            if x.waits:
                now = np.maximum(now, free)
            self.ran = True
        self.now, self.free, self.device_s = now, free, device

    def _replayed(self, items: Sequence[Call]) -> None:
        launch, gap = self._of("launch_s"), self._of("graph_s")
        for x in items:
            if x.empty:
                continue
            if not self.replaying:
                self.now, self.replaying = self.now + launch, True
            time = self.times[:, x.kernel]
            self.free = np.maximum(self.free, self.now) + gap + time
            self.device_s = self.device_s + time
            self.ran = True


def decoding(profile: Profile, is_decoding: bool) -> Profile:
    """The profile with the host of a step of generation, for one."""
    return replace(profile, host=profile.decode) if is_decoding and profile.decode else profile
