"""What runs when: the host thread that launches kernels, and the stream that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from gpuir.ir.graph import Graph, Loc, Node
from gpuir.ops import kernel as k
from gpuir.targets.profile import Host, Profile

Kind = Literal["call", "op", "launch", "kernel"]


@dataclass(frozen=True)
class Launch:
    """One kernel on its way to the device: which, for which op of the model, and how long it runs
    there. A view launches nothing: it is `empty`."""

    path: tuple[str, ...]
    op: Loc
    time_s: float
    empty: bool = False


@dataclass(frozen=True)
class Span:
    """Something that takes time on one lane: `host`, or `stream 0`. `launch` counts launches."""

    lane: str
    kind: Kind
    name: str
    start_s: float
    end_s: float
    launch: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One call of a model, from the host's first instruction to the end of the last kernel.

    `device_s` is what the kernels take together, `host_s` until the host is done, `gaps_s` how
    long the device waits for the host, its first wait, `head_s`, included.
    """

    profile: Profile
    time_s: float
    device_s: float
    host_s: float
    gaps_s: float
    head_s: float
    launches: tuple[Launch, ...] = field(repr=False)
    starts: tuple[float, ...] = field(repr=False)  # of each launch's kernel, on the device
    spans: tuple[Span, ...] = field(repr=False)

    @cached_property
    def is_host_bound(self) -> bool:
        """Whether the device waits for the host for more than a tenth of the time."""
        return self.gaps_s > 0.1 * self.time_s


def timeline(graph: Graph, profile: Profile) -> Timeline:
    """A costed graph as `profile` runs it."""
    return run(tuple(launches(graph)), profile)


def launches(graph: Graph, path: tuple[str, ...] = ()) -> Iterator[Launch]:
    """Every launch of a costed graph in order, those of loops as often as they run."""
    for node in graph.nodes:
        here = (*path, node.results[0].name) if node.results else path
        op = node.op
        if isinstance(op, k.Loop):
            body = tuple(launches(op.body, here))
            for _ in range(op.trips):
                yield from body
        elif isinstance(op, k.Cond):
            yield from launches(max((op.then, op.orelse), key=_time), here)
        elif node.cost is not None:
            yield Launch(here, _op(node), node.cost.time_s, isinstance(op, k.View))


def _op(node: Node) -> Loc:
    return node.locs[0] if node.locs else ""


def _time(graph: Graph) -> float:
    return sum(n.cost.time_s for n in graph.nodes if n.cost)


def run(items: Sequence[Launch], profile: Profile) -> Timeline:
    """The launches in order: each kernel starts when it has been launched and the one before it has
    ended (Lin et al., TPDS 2024, algorithm 1)."""
    host = profile.host
    if host.graph:
        return _replayed(items, profile)
    spans: list[Span] = []
    starts: list[float] = []
    ends: list[float] = []
    now = host.call_s
    spans.append(Span("host", "call", "call", 0.0, now))
    free = 0.0  # when the stream is
    before: Loc | None = None
    for i, item in enumerate(items):
        new = item.op != before
        if item.empty:
            now += host.between_s * new + host.empty_s
            before = item.op
            starts.append(free)
            continue
        now = _prepared(host, now, new, bool(starts))
        if len(ends) >= host.queue:
            now = max(now, ends[-host.queue])
        spans.append(Span("host", "launch", "/".join(item.path), now, now + host.launch_s, i))
        now += host.launch_s
        start = max(free, now)
        free = start + item.time_s
        starts.append(start)
        ends.append(free)
        spans.append(Span("stream 0", "kernel", "/".join(item.path), start, free, i))
        before = item.op
    now += host.after_s if ends else 0.0
    return _made(items, profile, now, starts, spans)


def _prepared(host: Host, now: float, new: bool, later: bool) -> float:
    """When the host is ready to launch: the rest of the op before, the way here, its own start."""
    if not new:
        return now + host.next_s
    return now + (host.after_s + host.between_s if later else 0.0) + host.before_s


def _replayed(items: Sequence[Launch], profile: Profile) -> Timeline:
    """All launches as one CUDA graph: the host launches once."""
    host = profile.host
    launched = host.call_s + host.launch_s
    spans = [
        Span("host", "call", "call", 0.0, host.call_s),
        Span("host", "launch", "graph", host.call_s, launched),
    ]
    starts: list[float] = []
    free = launched
    for i, item in enumerate(items):
        starts.append(free)
        if not item.empty:
            end = free + host.graph_s + item.time_s
            spans.append(Span("stream 0", "kernel", "/".join(item.path), free, end, i))
            free = end
    return _made(items, profile, launched, starts, spans)


def _made(
    items: Sequence[Launch],
    profile: Profile,
    host_s: float,
    starts: list[float],
    spans: list[Span],
) -> Timeline:
    kernels = [s for s in spans if s.kind == "kernel"]
    device = sum(s.end_s - s.start_s for s in kernels)
    end = max((s.end_s for s in spans), default=0.0)
    head = kernels[0].start_s if kernels else end
    last = kernels[-1].end_s if kernels else 0.0
    return Timeline(
        profile=profile,
        time_s=max(end, host_s) if not kernels else end,
        device_s=device,
        host_s=host_s,
        gaps_s=max(last - device, 0.0) if kernels else 0.0,
        head_s=head,
        launches=tuple(items),
        starts=tuple(starts),
        spans=tuple(spans),
    )
