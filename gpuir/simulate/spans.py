"""The marks that a run leaves behind: as spans on lanes, and as the chain that decides its end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

SpanKind = Literal["call", "launch", "copy", "kernel", "loop", "host"]
HOST = "host"


@dataclass(frozen=True)
class Span:
    """Something that takes time on one lane: `host`, `autograd` (the host's thread for backward
    passes), `copy`, `stream 0` and on. `launch` is an index into the launches."""

    lane: str
    kind: SpanKind
    name: str
    start_s: float
    end_s: float
    launch: int | None = None


@dataclass
class Marks:
    """When each launch began on the host, and its kernel started and ended on the device.

    `waits` are launches before which the host waited for the device, and until when. Where there
    are several streams, `streams` are those of the kernels, `causes` the kernels that they waited
    for, -1 for the host, and `lanes` the streams' names, where these are not numbers. `graph` says
    that no kernel is launched alone, and `gap_s` what lies between two. The first `into` copies are
    inputs.
    """

    graph: bool
    launch_s: float
    gap_s: float = 0.0
    begins: list[float] = field(default_factory=list[float])
    starts: list[float] = field(default_factory=list[float])
    ends: list[float] = field(default_factory=list[float])
    causes: list[int] = field(default_factory=list[int])
    waits: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    streams: list[int] = field(default_factory=list[int])
    lanes: tuple[str, ...] = ()
    other: list[Span] = field(default_factory=list[Span])
    into: int = 0

    def spans(self, named: Sequence[tuple[str, str]]) -> Iterator[Span]:
        """`named` has the name of each launch, and the lane of the thread that launches it."""
        yield from self.other
        if not self.graph:
            for i, (name, lane) in enumerate(named):
                yield Span(
                    lane=lane,
                    kind="launch",
                    name=name,
                    start_s=self.begins[i],
                    end_s=self.begins[i] + self.launch_s,
                    launch=i,
                )
        for i, (name, _) in enumerate(named):
            yield Span(
                lane=self._lane(i),
                kind="kernel",
                name=name,
                start_s=self.starts[i],
                end_s=self.ends[i],
                launch=i,
            )

    def _lane(self, i: int) -> str:
        stream = self.streams[i] if self.streams else 0
        return self.lanes[stream] if self.lanes else f"stream {stream}"

    def critical(self, end_s: float) -> list[Span]:
        """From the first instruction to `end_s` without a hole. Kernels that follow each other on
        one lane are one span, and so is what the host does between two that it waits for."""
        chain: list[Span] = []
        copies = [s for s in self.other if s.kind == "copy"]
        loops = [s.end_s for s in self.other if s.kind == "loop" and s.lane != HOST]
        last, t = max((*self.ends, *loops), default=0.0), end_s
        for copy in reversed(copies[self.into :]):
            t = self._copied(chain, copy, t)
        since = max((s.end_s for s in copies[: self.into]), default=0.0)
        i = len(self.ends) if t > last else self._ending(t, len(self.ends))
        if i == len(self.ends):  # the host is done later than the device
            t, i = self._host(chain, i, t, since)
        while i >= 0:
            if self.ends[i] < t:
                chain.append(
                    Span(
                        lane=self._lane(i),
                        kind="loop",
                        name="more trips",
                        start_s=self.ends[i],
                        end_s=t,
                    )
                )
            end, first = i, i
            while self._follows(first):
                first = self._cause(first)
            t = self.starts[first]
            chain.append(
                Span(
                    lane=self._lane(i),
                    kind="kernel",
                    name="",
                    start_s=t,
                    end_s=self.ends[end],
                    launch=end,
                )
            )
            i = self._cause(first)
            if i < 0:
                t, i = self._host(chain, first, t, since)
        for copy in reversed(copies[: self.into]):
            t = self._copied(chain, copy, t)
        if t > 0:
            chain.append(Span(lane=HOST, kind="host", name="", start_s=0.0, end_s=t))
        return chain[::-1]

    def _cause(self, i: int) -> int:
        """The kernel that one waited for, -1 for the host."""
        if self.streams:
            return self.causes[i]
        return i - 1 if self.starts[i] > self.begins[i] + self.launch_s + self.gap_s else -1

    def _follows(self, i: int) -> bool:
        """Whether a kernel began as another, which it waited for, ended on the same stream."""
        cause = self._cause(i)
        return (
            cause >= 0
            and self.ends[cause] + self.gap_s == self.starts[i]
            and self._lane(cause) == self._lane(i)
        )

    def _ending(self, t: float, before: int) -> int:
        """The kernel, of those launched before that one, that is the last to end by then."""
        if not self.streams:
            return bisect_right(self.ends, t, hi=before) - 1
        return max(((end, i) for i, end in enumerate(self.ends[:before]) if end <= t))[1]

    def _host(self, chain: list[Span], launch: int, t: float, since: float) -> tuple[float, int]:
        """A stretch of host up to `t`: from when it last waited for the device, and the kernel that
        it waited for; or from `since`, and no kernel."""
        at = bisect_right(self.waits, (launch, float("inf"))) - 1
        waited = at >= 0 and self.waits[at][1] >= since
        start = self.waits[at][1] if waited else since
        if start < t:
            chain.append(Span(lane=HOST, kind="host", name="", start_s=start, end_s=t))
        return start, self._ending(start, self.waits[at][0]) if waited else -1

    def _copied(self, chain: list[Span], copy: Span, t: float) -> float:
        """A copy, and the host's part between it and what comes after."""
        if copy.end_s < t:
            chain.append(Span(lane=HOST, kind="host", name="", start_s=copy.end_s, end_s=t))
        chain.append(copy)
        return copy.start_s
