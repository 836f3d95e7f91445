"""When launches run: one recurrence, on numbers of one device or on arrays of many.

The host's seconds between two launches do not depend on the device, but for where it waits: they
are found once for all. A kernel starts when it has been launched and the one before it on its
stream has ended (Lin et al., TPDS 2024, algorithm 1). A number is a float, or an array with a row
an end of the intervals and a column a device: one device alone is several times quicker in floats.
Loops, and launches on several streams, run in floats: what comes next depends on the numbers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from gpuir.ir.graph import Loc
from gpuir.simulate.launches import (
    Branch,
    Found,
    Launch,
    Launches,
    Repeat,
    counted,
    whole_ops,
    written_out,
)
from gpuir.simulate.overlap import overlapped
from gpuir.simulate.spans import HOST, Marks, Span
from gpuir.simulate.streams import StreamJob, StreamTimes, busy, share_device
from gpuir.targets.profile import Host, Profile

Number = Any  # float | np.ndarray, of which pyright knows no common arithmetic
N = TypeVar("N")
ENDLESS = 1 << 62


@dataclass(frozen=True)
class KernelTimes:
    """What differs between devices: seconds of each kernel, by its place, and the part of the
    device that a launch fills, which counts where several streams run. The host takes `host` times
    as long as its profile says; `link` is the bytes a second of its bus, None where there is none.
    """

    seconds: Sequence[Number]
    share: Callable[[Launch], float] = lambda x: 1.0
    host: Number = 1.0
    link: Number | None = None


@dataclass(frozen=True)
class Traffic:
    """The collectives of one group of ranks: how many, how long they take, and how long of that the
    kernels wait for them (`exposed_s`): the rest is hidden behind kernels."""

    group: str
    count: int
    time_s: float
    exposed_s: float


@dataclass(frozen=True)
class Ran(Generic[N]):
    """One call of a model: from the host's first instruction until the last kernel or copy has
    ended and the host is done.

    `device_s` is what the kernels take together, `busy_s` how long at least one runs, `host_s` when
    the host is done, `copies_s` what copies take. `gaps_s` is how long the device runs neither a
    kernel nor a copy before its last kernel ends. `tail_s` is what comes after that kernel.

    Of one device there is more: its first wait, `head_s`; what ranks send, `traffic`; `launches`
    and `marks` without those trips of a long loop that are like the one before, for which a span of
    kind `loop` stands.
    """

    time_s: N
    device_s: N
    busy_s: N
    host_s: N
    gaps_s: N
    tail_s: N
    copies_s: N
    head_s: N
    traffic: tuple[Traffic, ...]
    launches: tuple[Launch, ...] = field(repr=False)
    marks: Marks = field(repr=False, compare=False)


def _most(number: Number) -> Callable[[Number, Number], Number]:
    return np.maximum if isinstance(number, np.ndarray) else max


class Script:
    """Launches under a profile with the host that they have (`Launches.host`), to be run. Branches
    have been chosen. What the host does is found once, whatever kernels take. UsageError, of a
    graph of that `name`, where there are too many launches for several streams."""

    def __init__(self, launches: Launches, profile: Profile, name: str = ""):
        self.calls, self.profile = launches, profile
        self.groups = tuple(dict.fromkeys(x.group for x, _ in counted(launches.found) if x.group))
        self.bounded = profile.streams == 1 and not self.groups
        found = launches.found
        if not self.bounded:
            found = tuple(whole_ops(written_out(found, name)))
        self.parts = tuple(_parts(found, self.bounded and not profile.host.graph))
        self.stretches: dict[tuple[int, _At], _Stretch] = {}

    def stretch(self, items: tuple[Launch, ...], at: _At) -> _Stretch:
        key = id(items), at
        if key not in self.stretches:
            self.stretches[key] = _stretch(self.profile.host, items, at)
        return self.stretches[key]

    def run(self, kernels: KernelTimes) -> Ran[Any]:
        """Each kernel starts when it has been launched and the one before it on its stream has
        ended. Copies go through memory that is not pinned: the host waits for each."""
        clock, copies = _Clock(self, kernels), self.profile.copies
        clock.call(params=self.calls.params)
        into = back = ()
        call_s = copies.call_s if copies is not None else 0.0
        if copies is not None and kernels.link is not None:
            rate, calls = copies.share * kernels.link, self.calls
            into, back = ([(x, n / rate) for x, n in some] for some in (calls.into, calls.back))
        for x, time_s in into:
            clock.copy(x, time_s, call_s)
        clock.go(self.parts)
        traffic: tuple[Traffic, ...] = ()
        if self.groups:
            traffic = clock.overlap(self.groups)
        elif not self.bounded:
            clock.share(self.profile.streams)
        clock.close()
        last = clock.free if clock.launches else 0.0
        for x, time_s in back:
            clock.copy(x, time_s, call_s)
        marks, into_s = clock.marks, sum(time_s for _, time_s in into)
        marks.into = len(into)
        time_s = clock.most(clock.now, clock.free)
        occupied = busy(marks.starts, marks.ends) if marks.streams else clock.device_s
        return Ran(
            time_s=time_s,
            device_s=clock.device_s,
            busy_s=occupied,
            host_s=clock.now,
            gaps_s=clock.most(last - occupied - into_s, 0.0),
            tail_s=time_s - last,
            copies_s=into_s + sum(time_s for _, time_s in back),
            head_s=max(marks.starts[0] - into_s, 0.0) if marks.starts else time_s - into_s,
            traffic=traffic,
            launches=tuple(clock.launches),
            marks=marks,
        )


# ---- what the host does ------------------------------------------------------------------------


class _ClockLoop(NamedTuple):
    loop: Repeat
    body: tuple[_Part, ...]


_Part = tuple[Launch, ...] | _ClockLoop


def _parts(found: Iterable[Found], waits: bool) -> Iterator[_Part]:
    """Launches cut where threads take turns, and behind each kernel that the host waits for, if it
    does."""
    for _, some in groupby(found, lambda x: x.lane if isinstance(x, Launch) else None):
        items: list[Launch] = []
        for x in some:
            if isinstance(x, Repeat):
                yield _ClockLoop(x, tuple(_parts(x.body, waits)))
            elif isinstance(x, Branch):
                yield from _parts(x.sides[0], waits)
            else:
                items.append(x)
                if waits and x.waits and not x.empty:
                    yield tuple(items)
                    items = []
        if items:
            yield tuple(items)


class _At(NamedTuple):
    """What the host is at: the op, whether that has launched a kernel and is not over, what it has
    `paid` for before its first launch; its thread, and whether that replays a CUDA graph already;
    and the seconds until an op launches again."""

    op: Loc | None
    inside: bool
    paid: float
    lane: str
    replaying: bool
    next_s: float


class _Stretch(NamedTuple):
    """Launches of kernels, these, the host's seconds before each, behind the last, and what it is
    at then."""

    launches: tuple[Launch, ...]
    kernels: tuple[int, ...]
    before: tuple[float, ...]
    behind: float
    at: _At


_MODULE = re.compile(r"[^.]+(?:\.\d+)*")  # a list of modules is not called, one of it is


def entered(before: Loc, after: Loc) -> int:
    """The modules that are called on the way from one op of a model to another: those around the
    second that are not around the first (`model:encoder.layers.0.fc/linear`)."""
    outer, inner = _modules(before), _modules(after)
    if outer == inner:
        return 0
    one, other = _MODULE.findall(outer), _MODULE.findall(inner)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return len(other) - same


def _modules(loc: Loc) -> str:
    return loc.partition(":")[2].rpartition("/")[0]


def _stretch(host: Host, items: Sequence[Launch], at: _At) -> _Stretch:
    """What a host does for launches one after another. An op prepares for the dearest of its
    kernels."""
    launches = tuple(x for x in items if not x.empty)
    kernels = tuple(x.kernel for x in launches)
    if host.graph:
        return _Stretch(launches, kernels, (0.0,) * len(launches), 0.0, at)
    op, inside, paid, now = at.op, at.inside, at.paid, 0.0
    step, again_s = host.after_s + host.between_s, at.next_s
    module_s = host.module_s if at.lane == HOST else 0.0
    before: list[float] = []
    for x in items:
        if x.op != op and module_s:
            now += module_s * max(entered(op or "", x.op) - 1, 0)
        if x.empty:
            if x.op != op:
                now += step if inside else host.between_s
                op, inside = x.op, False
            now += host.empty_s
            continue
        first = host.before.get(x.kind, host.before_s)
        if x.op == op and inside:
            now += again_s + max(first - paid, 0.0)
            paid = max(paid, first)
        else:
            if x.op != op:
                now += step if inside else host.between_s
            now += first
            paid, op, inside = first, x.op, True
        before.append(now)
        now = 0.0
    at = at._replace(op=op, inside=inside, paid=paid)
    return _Stretch(launches, kernels, tuple(before), now, at)


# ---- when it runs ------------------------------------------------------------------------------


class _Moment(NamedTuple):
    """How far host and stream are, and what kernels have taken; or by how much they moved."""

    now: float
    free: float
    device_s: float

    def since(self, before: _Moment) -> _Moment:
        return _Moment(*(b - a for a, b in zip(before, self, strict=True)))

    def is_as(self, before: _Moment) -> bool:
        pace = 1e-9 * (self.now + self.free)
        return abs(self.now - before.now) <= pace and abs(self.free - before.free) <= pace


class _Past(NamedTuple):
    """A run of a loop: by how much it moved on, what the host was at when it left, and whether it
    moved as the run before did."""

    moved: _Moment
    left: _At
    steady: bool


class _Clock:
    """How far the host (`now`) and the stream (`free`) are, and the marks they leave.

    `bounded`: the host waits for the device, where the queue is full and where a size must be
    known. That is left out where several streams run: their kernels' times are known only after all
    launches are.
    """

    def __init__(self, script: Script, kernels: KernelTimes):
        host = script.profile.host
        self.script, self.host, self.bounded, self.kernels = script, host, script.bounded, kernels
        self.scale, self.most = kernels.host, _most(kernels.host)
        self.in_floats = not isinstance(kernels.host, np.ndarray)
        self.limit = host.queue if self.bounded and not host.graph else ENDLESS
        self.now: Number = 0.0 * self.scale
        self.free: Number = 0.0 * self.scale
        self.device_s: Number = 0.0 * self.scale
        self.at = _At(None, False, 0.0, lane=HOST, replaying=False, next_s=host.next_s)
        self.launches: list[Launch] = []
        self.pending: list[Number] = []  # when the kernels launched end, for the queue
        self.past: dict[int, _Past] = {}  # of each loop, by identity, its last run
        self.seen: dict[tuple[int, float, int, _At], _Past] = {}  # by what it began with
        self.marks = (
            Marks(True, 0.0, gap_s=host.graph_s)
            if host.graph
            else Marks(False, self.scale * host.launch_s)
        )

    def _pass(self, host_s: float, lane: str = "", kind: Any = "", name: str = "") -> None:
        """The host works on for so long; in a span of that lane."""
        since, self.now = self.now, self.now + self.scale * host_s
        if lane:
            self._span(lane, kind, name, since, self.now)

    def _span(self, lane: str, kind: Any, name: str, start_s: Number, end_s: Number) -> None:
        if self.in_floats:
            self.marks.other.append(Span(lane, kind, name, start_s, end_s))

    def call(self, lane: str = HOST, params: int = 0) -> None:
        """Into the model, or over to another thread: its backward pass, its optimizer. Each is a
        function that is compiled, and captured, alone."""
        self.close()
        self._pass(self.host.call_s + params * self.host.param_s, lane, "call", "call")
        self.at = self.at._replace(op=None, lane=lane, replaying=False)

    def copy(self, name: str, time_s: Number, call_s: float) -> None:
        start = self.most(self.now + call_s, self.free)
        self.now = self.free = start + time_s
        self._span("copy", "copy", name, start, self.now)

    def close(self) -> None:
        """The end of the op that launched last."""
        if self.at.inside:
            self._pass(self.host.after_s)
        self.at = self.at._replace(inside=False)

    def go(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            if isinstance(part, _ClockLoop):
                self._repeat(part)
                continue
            if part[0].lane != self.at.lane:
                self.call(part[0].lane)
            self._straight(part)

    def _straight(self, items: tuple[Launch, ...]) -> None:
        """The recurrence. Locals: it runs a million times."""
        launches, kernels, before, behind, self.at = self.script.stretch(items, self.at)
        if not launches:
            self._pass(behind)
            return
        if self.host.graph and not self.at.replaying:  # the host launches it for the first of them
            self._pass(self.host.launch_s, self.at.lane, "launch", "graph")
            self.at = self.at._replace(replaying=True)
        seconds, marks, in_floats = self.kernels.seconds, self.marks, self.in_floats
        scale, most, launch_s, gap_s = self.scale, self.most, marks.launch_s, marks.gap_s
        now, free, device_s = self.now, self.free, self.device_s
        pending, limit = self.pending, self.limit
        begins, starts, ends = marks.begins, marks.starts, marks.ends
        for kernel, host_s in zip(kernels, before, strict=True):
            now = now + scale * host_s
            if len(pending) >= limit:
                now = most(since := now, pending[-limit])
                if in_floats and now > since:
                    marks.waits.append((len(ends), now))
            begin = now
            now = now + launch_s
            start = most(now, free) + gap_s
            time_s = seconds[kernel]
            free = start + time_s
            device_s = device_s + time_s
            pending.append(free)
            if in_floats:
                begins.append(begin)
                starts.append(start)
                ends.append(free)
        self.launches += launches
        if launches[-1].waits and self.bounded and not self.host.graph:
            now = most(since := now, free)
            if in_floats and now > since:
                marks.waits.append((len(ends), now))
        self.now, self.free, self.device_s = now, free, device_s
        self._pass(behind)

    # -- loops, in floats

    @property
    def _moment(self) -> _Moment:
        return _Moment(self.now, self.free, self.device_s)

    def _repeat(self, part: _ClockLoop) -> None:
        """Trips, until two in a row moved host and device on by the same: so do all the rest. Of a
        loop within a loop, so do its runs as a whole, in a row or with what they began with the
        same; one in which the host never waited need not be seen twice. So each level is run a few
        times, not a few times for each run of the level around it."""
        loop, began = part.loop, self._began(part.loop)
        last, alike = self.past.get(id(loop)), self.seen.get(began)
        for past in (last, alike):
            if past is not None and past.steady:
                self._skip(f"{'/'.join(loop.path)}: as before", 1, past.moved)
                self.at = past.left
                return
        since, waits = self._moment, len(self.marks.waits)
        self._trips(part)
        moved = self._moment.since(since)
        in_a_row = last is not None and self._steady(last.moved, moved)
        self.past[id(loop)] = _Past(moved, self.at, self.bounded and in_a_row)
        again = alike is not None and moved.is_as(alike.moved)
        known = self.bounded and (again or len(self.marks.waits) == waits)
        self.seen[began] = _Past(moved, self.at, known)

    def _began(self, loop: Repeat) -> tuple[int, float, int, _At]:
        """All that how a loop runs depends on, to a tenth of a nanosecond: the loop, how far the
        device is behind, how many kernels are in the queue, what the host is at."""
        queued = len(self.pending) - bisect_right(self.pending, self.now)
        return id(loop), round(self.free - self.now, 10), queued, self.at

    def _trips(self, part: _ClockLoop) -> None:
        loop, before = part.loop, None
        outside_s = self.at.next_s
        if loop.inner and self.host.library_s is not None:
            self.at = self.at._replace(next_s=self.host.library_s)
        for trip in range(loop.trips):
            since = self._moment
            if not loop.inner and not self.host.graph:
                self.close()
                self._pass(self.host.trip_s)
                self.at = self.at._replace(op=None)
            self.go(part.body)
            moved = self._moment.since(since)
            left = loop.trips - trip - 1
            if before is not None and left and self.bounded and self._steady(before, moved):
                self._skip(f"{'/'.join(loop.path)}: {left:,} more trips", left, moved)
                break
            before = moved
        self.at = self.at._replace(next_s=outside_s)

    def _steady(self, before: _Moment, moved: _Moment) -> bool:
        """Whether both moved on as in the trip before, and at one pace; in a graph the host may be
        ahead, a host that takes no time stays, as does a device that is given nothing to do."""
        host, device = moved.now, moved.free
        ahead = self.host.graph and host <= device
        at_one = abs(host - device) <= 1e-9 * (host + device)
        return moved.is_as(before) and (ahead or not (host and device) or at_one)

    def _skip(self, name: str, runs: int, moved: _Moment) -> None:
        """Moves on by so many runs, each as the last one was."""
        for lane, since, by in ((HOST, self.now, moved.now), ("stream 0", self.free, moved.free)):
            if by:
                self._span(lane, "loop", name, since, since + runs * by)
        self.now += runs * moved.now
        self.free += runs * moved.free
        self.device_s += runs * moved.device_s
        self.pending = [end + runs * moved.free for end in self.pending[-self.host.queue :]]

    # -- several streams, in floats

    def share(self, streams: int) -> None:
        """Kernels on several streams, launched when the host has come to them."""
        self._placed(share_device(self._jobs(), streams))

    def overlap(self, groups: Sequence[str]) -> tuple[Traffic, ...]:
        """Kernels on one stream, and the collectives of each group on one of theirs: what these
        send."""
        lane = {group: i + 1 for i, group in enumerate(groups)}
        lanes = [lane.get(x.group, 0) for x in self.launches]
        found = overlapped(self._jobs(), lanes, len(groups) + 1)
        self._placed(found.shared)
        self.marks.lanes = ("stream 0", *(f"communication {group}" for group in groups))
        traffic: list[Traffic] = []
        for group, waited in zip(groups, found.exposed_s, strict=True):
            own = [i for i, x in enumerate(self.launches) if x.group == group]
            total = sum(self.marks.ends[i] - self.marks.starts[i] for i in own)
            traffic.append(Traffic(group, len(own), total, min(waited, total)))
        return tuple(traffic)

    def _jobs(self) -> list[StreamJob]:
        made, marks = self.kernels, self.marks
        return [
            StreamJob(begin + marks.launch_s, made.seconds[x.kernel], made.share(x), x.after)
            for begin, x in zip(marks.begins, self.launches, strict=True)
        ]

    def _placed(self, shared: StreamTimes) -> None:
        self.marks.starts[:] = shared.starts
        self.marks.ends[:] = shared.ends
        self.marks.causes[:] = shared.causes
        self.marks.streams = shared.streams
        self.free = max(shared.ends, default=self.free)
