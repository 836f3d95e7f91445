"""What runs when: the host that launches kernels, the streams that run them, and copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, cast

from gpuir.ir.door import of_type, takes
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import GRAPH, Graph, Level, Loc, Node, Value, check_level
from gpuir.ir.notes import Cost
from gpuir.ir.phases import phase_of
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.simulate.overlap import overlapped
from gpuir.simulate.spans import HOST, Marks, Span
from gpuir.simulate.streams import Job, Shared, busy, share_device
from gpuir.targets.load import load_target
from gpuir.targets.profile import NO_HOST, Host, Profile
from gpuir.targets.target import Target

AUTOGRAD = "autograd"  # the lane of the host's other thread
SIZED_BY_DATA = ("compress", "nms", "nonzero", "unique")  # routines whose result has such a size
MOST_SPREAD = 100_000  # launches that are spread over several streams
HOST_BOUND = 0.1  # of the time: a device that waits longer for the host is held up by it


@dataclass(frozen=True)
class Launch:
    """One kernel on its way to the device: which, for which op of the model, and how long it runs
    there; `between_s` holds that in 80 % of cases. A view launches nothing: it is `empty`.

    `lane` is the host's thread, which goes on when the kernel has ended if it `waits`: for the size
    of what that computes, or because it runs that itself. `share` is the part of the device it
    fills, and `after` the launches it waits for: both count where several streams run. A collective
    has the name of the `group` of ranks that it joins, and a stream of its own with those of it.
    `cost` is the kernel's, where it is one.
    """

    path: tuple[str, ...]
    op: Loc
    time_s: float
    empty: bool = False
    kind: str = "map"
    lane: str = HOST
    waits: bool = False
    between_s: tuple[float, float] | None = None
    share: float = 1.0
    after: tuple[int, ...] = ()
    group: str = ""
    cost: Cost | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Repeat:
    """A loop: the launches of its body, `trips` times. Where those are all of one op of the model
    (`inner`), a library runs it: no trip is a round of the executor."""

    path: tuple[str, ...]
    body: tuple[Launch | Repeat, ...]
    trips: int
    inner: bool


@dataclass(frozen=True)
class Copy:
    """An input on its way to the device, or an output back, and how long the bus takes for it."""

    name: str
    time_s: float


@dataclass(frozen=True)
class Traffic:
    """The collectives of one group of ranks: how many, how long they take, and how long of that the
    kernels wait for them (`exposed_s`): the rest is hidden behind kernels."""

    group: str
    count: int
    time_s: float
    exposed_s: float


@dataclass(frozen=True)
class Timeline:
    """One call of a model: from the host's first instruction until the last kernel or copy has
    ended and the host is done.

    `device_s` is what the kernels take together, `busy_s` how long at least one runs, `host_s` when
    the host is done, `copies_s` what copies take. `gaps_s` is how long the device runs neither a
    kernel nor a copy before its last kernel ends: its first wait, `head_s`, included. `tail_s` is
    what comes after that kernel.
    `interval` is what 80 % of measurements are expected in: kernels of one kind, and the host, are
    off alike, those of different kinds independently (`together`); None where no kernel can say.
    `traffic` is what ranks send.

    `launches`, `starts` and `spans` leave out trips of a long loop that are like the one before: a
    span of kind `loop` stands for them.
    """

    profile: Profile
    time_s: float
    device_s: float
    busy_s: float
    host_s: float
    gaps_s: float
    head_s: float
    tail_s: float
    copies_s: float
    launches: tuple[Launch, ...] = field(repr=False)
    starts: tuple[float, ...] = field(repr=False)  # of each launch's kernel, on the device
    marks: Marks = field(repr=False, compare=False)
    interval: tuple[float, float] | None = None
    traffic: tuple[Traffic, ...] = ()

    def __repr__(self) -> str:
        parts = f"the device busy {self.busy_s:.4g} s, the host {self.host_s:.4g} s"
        return f"<Timeline under {self.profile.name}: {self.time_s:.4g} s, {parts}>"

    @property
    def launched_s(self) -> float:
        """When the host has launched all, by whatever thread, and is done."""
        last = max(self.marks.begins, default=0.0) + self.marks.launch_s
        return max(self.host_s, last)

    @property
    def is_host_bound(self) -> bool:
        """Whether the device waits for the host for more than a tenth of the time."""
        return self.gaps_s > HOST_BOUND * self.time_s

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Everything that takes time on a lane, lane by lane."""
        return tuple(self.marks.spans([("/".join(x.path), x.lane) for x in self.launches]))

    @cached_property
    def critical(self) -> tuple[Span, ...]:
        """The chain that decides the end, from first to last: stretches of host, copies, and
        kernels, each of which begins because the one before it ends."""
        return tuple(self.marks.critical(self.time_s))


@takes(graph=GRAPH, profile=of_type(Profile, "a profile", "gpuir.load_profile('eager')"))
def timeline(graph: Graph, profile: Profile) -> Timeline:
    """A costed graph as `profile` runs it on the graph's target.

    On a CPU the kernels run in the host's own thread, and their times hold the calls: the host
    takes no time besides.
    """
    check_level(
        "timeline",
        graph,
        Level.costed,
        "gpuir.timeline(gpuir.analyze(graph, 'a100').graph, profile)",
    )
    made = prepared(graph, profile)
    result = run(made.found, made.profile, made.into, made.back, params=made.params)
    if all(x.between_s is None for x in result.launches):
        return result
    shares = together(widths(made.found))
    low, high = (
        run(
            made.found,
            _at_end(made.profile, end),
            made.into,
            made.back,
            end,
            made.params,
            shares[end],
        ).time_s
        for end in (0, 1)
    )
    return replace(result, interval=(low, high))


@dataclass(frozen=True)
class Prepared:
    """What `run` runs of a costed graph: its launches, its copies, the number of its params, and
    the profile with the host that it has there."""

    found: tuple[Launch | Repeat, ...]
    profile: Profile
    into: tuple[Copy, ...]
    back: tuple[Copy, ...]
    params: int


def prepared(graph: Graph, profile: Profile) -> Prepared:
    """A costed graph as `profile` runs it on the graph's target, not run yet."""
    target = load_target(graph.target) if graph.target else None
    if profile.decode is not None and is_decoding(graph):
        profile = replace(profile, host=profile.decode)
    if target is not None and target.is_cpu:
        profile = replace(profile, host=NO_HOST, copies=None, streams=1)
    into, back = copies(graph, profile, target)
    apart = profile.streams > 1 or any(isinstance(n.op, k.Collective) for n in graph.walk())
    found = tuple(_whole_ops(dependent(graph)) if apart else steps(graph))
    params = sum(graph.role_of(v) in ("weight", "buffer") for v in graph.params)
    return Prepared(found, profile, into, back, params)


def widths(found: Iterable[Launch | Repeat], runs: int = 1) -> dict[str, list[float]]:
    """Seconds by which the kernels of each kind may be quicker and slower, all together."""
    sums: dict[str, list[float]] = {}
    for x in found:
        if isinstance(x, Repeat):
            some = widths(x.body, runs * x.trips)
        elif x.between_s is None:
            continue
        else:
            low, high = x.between_s
            some = {x.kind: [runs * (x.time_s - low), runs * (high - x.time_s)]}
        for kind, (quicker, slower) in some.items():
            both = sums.setdefault(kind, [0.0, 0.0])
            both[0] += quicker
            both[1] += slower
    return sums


def together(widths: Mapping[str, Sequence[Any]]) -> tuple[Any, Any]:
    """What of these a whole model may be quicker and slower by, as shares of their sums: errors of
    different kinds are independent, so that their squares add up. Of 284 runs of timm's models it
    holds 80 %, where sums hold 95 (half of the public models; docs/validation/data.md)."""
    shares: list[Any] = []
    for side in (0, 1):
        total: Any = sum(w[side] for w in widths.values())
        squares: Any = sum(w[side] * w[side] for w in widths.values())
        shares.append((squares**0.5) / (total + (total == 0.0)))
    return shares[0], shares[1]


def is_decoding(graph: Graph) -> bool:
    """Whether each sequence gets one token: attention there is, and all of it of one query."""
    queries = {n.op.q.type.shape[-2] for n in graph.walk() if isinstance(n.op, k.Attention)}
    return queries == {1}


def _at_end(profile: Profile, end: int) -> Profile:
    """The profile with a host as quick (end 0) or as slow (1) as it may well be."""
    by = profile.host.uncertainty ** (2 * end - 1)
    return replace(profile, host=profile.host.scaled(by))


# ---- what is launched --------------------------------------------------------------------------


def steps(graph: Graph, path: tuple[str, ...] = ()) -> Iterator[Launch | Repeat]:
    """The launches of a costed graph in order. Of two branches, the dearer runs. What a loop costs
    beyond its kernels, if its predictor says so, counts as one kernel more. A gradient that is done
    is handed to its param by an op that launches nothing, PyTorch's AccumulateGrad, unless it is
    added to an earlier one, which the graph has."""
    return _whole_ops(_nodes(graph, path))


def _whole_ops(found: Iterable[Launch | Repeat]) -> Iterator[Launch | Repeat]:
    """Without the views of ops that launch kernels too, which are in their T2 and T5."""
    for _, some in groupby(found, lambda x: x.op if isinstance(x, Launch) else x):
        op = list(some)
        yield from [x for x in op if isinstance(x, Repeat) or not x.empty] or op[:1]


def _nodes(graph: Graph, path: tuple[str, ...]) -> Iterator[Launch | Repeat]:
    handed = _handed(graph)
    for node in graph.nodes:
        yield from _of_node(node, path, handed)


def _handed(graph: Graph) -> frozenset[str]:
    """The gradients that are handed to their params when they are done."""
    if any(v is not None and graph.role_of(v) == "gradient" for v in graph.over):
        return frozenset()
    return frozenset(name for name, role in graph.roles if role == "gradient")


def _of_node(
    node: Node, path: tuple[str, ...], handed: Collection[str]
) -> Iterator[Launch | Repeat]:
    here = (*path, node.results[0].name) if node.results else path
    op = node.op
    if isinstance(op, k.Loop):
        body = tuple(steps(op.body, here))
        inner = {loc for x in op.body.nodes for loc in x.locs} <= set(node.locs)
        yield Repeat(here, body, op.trips, inner)
        cost = node.cost
        rest = cost.time_s - op.trips * op.body.time_s if cost else 0.0
        if cost and rest > 1e-9 * cost.time_s:
            yield replace(_launch(here, node, cost), time_s=rest, between_s=None, cost=None)
    elif isinstance(op, k.Cond):
        yield from _nodes(op.dearer, here)
    elif node.cost is not None:
        yield _launch(here, node, node.cost)
        for v in node.results:
            if v.name in handed:
                yield Launch(here, f"{v.name} accumulated", 0.0, empty=True, lane=AUTOGRAD)


def _launch(path: tuple[str, ...], node: Node, cost: Cost) -> Launch:
    """PyTorch's autograd runs what is backward, or recomputed for it, in a thread of its own."""
    return Launch(
        path,
        node.locs[0] if node.locs else "",
        cost.time_s,
        empty=isinstance(node.op, k.View),
        kind=node.op.name.removeprefix("k."),
        waits=cost.on_host or (isinstance(node.op, k.Routine) and _sizes_itself(node.op)),
        lane=AUTOGRAD if phase_of(node) in ("backward", "recomputed") else HOST,
        between_s=cost.interval,
        group=node.op.collective.group if isinstance(node.op, k.Collective) else "",
        cost=cost,
    )


def _sizes_itself(op: k.Routine) -> bool:
    """Whether the size of a result is known only after the kernel, to the host that allocates it
    (PyTorch documentation, torch.nonzero: on CUDA it causes host-device synchronization)."""
    inside = (n.op for region in op.regions for n in region.nodes)
    return any(isinstance(x, t.Routine) and x.fn in SIZED_BY_DATA for x in inside)


def filled(cost: Cost) -> float:
    """The part of the device that a kernel keeps busy: of the blocks it can hold, of its bandwidth,
    of its peak, the largest. All of it where the predictor does not say."""
    if (taken := cost.fact("device_share")) is not None:
        return taken
    facts = [cost.fact(name) for name in ("waves", "dram_share", "peak_share")]
    known = [fact for fact in facts if fact is not None]
    return min(1.0, max(known)) if cost.fact("waves") is not None else 1.0


def dependent(graph: Graph) -> Iterator[Launch]:
    """The launches of a costed graph, each with those that it must wait for: whose results it
    reads, views in between looked through. A collective waits for the kernels launched before it,
    too: PyTorch's c10d records an event on the stream of kernels. A loop is a chain that waits for
    all before it, written out: `UsageError` beyond `MOST_SPREAD` launches."""
    size = _count(_nodes(graph, ()))
    if size > MOST_SPREAD:
        raise UsageError(
            f"@{graph.name}: with its loops unrolled it has {size} launches, "
            "too many to simulate on several streams",
            expected=f"at most {MOST_SPREAD}",
            fix="use a profile with one stream, or fewer trips",
        )
    made: dict[str, tuple[int, ...]] = {}  # launches that a value comes from
    count, computed = 0, -1  # launches, the last kernel of them
    handed = _handed(graph)
    for node in graph.nodes:
        inner = list(_flat(_of_node(node, (), handed)))
        after = tuple(dict.fromkeys(i for v in node.op.operands for i in made.get(v.name, ())))
        if node.op.control:
            after = tuple(range(count))
        for launch in inner:
            if launch.group and computed >= 0:
                after = tuple(dict.fromkeys((*after, computed)))
            share = filled(node.cost) if node.cost and not node.op.control else 1.0
            yield replace(launch, after=after, share=share)
            after = after if launch.empty else (count,)
            computed = computed if launch.empty or launch.group else count
            count += not launch.empty
        made.update((v.name, after) for v in node.results)


def _count(found: Iterable[Launch | Repeat]) -> int:
    """Launches, trips of loops written out."""
    return sum(x.trips * _count(x.body) if isinstance(x, Repeat) else 1 for x in found)


def _flat(found: Iterable[Launch | Repeat]) -> Iterator[Launch]:
    for x in found:
        if isinstance(x, Repeat):
            for _ in range(x.trips):
                yield from _flat(x.body)
        else:
            yield x


def copies(
    graph: Graph, profile: Profile, target: Target | None
) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
    """The inputs that a profile copies to the device, and the outputs that it copies back: not what
    stays there, as gradients, an optimiser's state or a cache, nor what takes over its storage."""
    if profile.copies is None or target is None or target.pcie is None:
        return (), ()
    rate = profile.copies.share * target.pcie.bytes_per_s
    into, back = (tuple(Copy(v.name, v.type.nbytes / rate) for v in some) for some in copied(graph))
    return into, back


def copied(graph: Graph) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The inputs and outputs that a stack which copies any would copy."""
    over = graph.over or (None,) * len(graph.outputs)
    return (
        tuple(v for v in graph.inputs if graph.role_of(v) == "input" and v not in over),
        tuple(
            v
            for v, kept in zip(graph.outputs, over, strict=True)
            if kept is None and graph.role_of(v) in ("activation", "input", "weight")
        ),
    )


# ---- when it runs ------------------------------------------------------------------------------


def run(
    found: Sequence[Launch | Repeat],
    profile: Profile,
    into: Sequence[Copy] = (),
    back: Sequence[Copy] = (),
    end: int | None = None,
    params: int = 0,
    share: float = 1.0,
    takes: Callable[[Launch], float] | None = None,
) -> Timeline:
    """The launches in order: each kernel starts when it has been launched and the one before it on
    its stream has ended (Lin et al., TPDS 2024, algorithm 1). The model has so many `params`.

    Copies go through memory that is not pinned: the host waits for each. With `end`, each kernel
    takes what that end of its interval says, so far as `share`; with `takes`, what that says.
    """
    groups = tuple(dict.fromkeys(_groups(found)))
    clock = _Clock(profile.host, profile.streams == 1 and not groups, end, share, takes)
    clock.call(params=params)
    for copy in into:
        clock.copy(copy, profile)
    clock.go(found)
    exposed: tuple[float, ...] = ()
    if groups:
        exposed = clock.overlap(groups)
    elif profile.streams > 1:
        clock.share(profile.streams)
    clock.close()
    marks, before = clock.marks, sum(copy.time_s for copy in into)
    marks.into = len(into)
    last = clock.free if marks.starts else 0.0
    for copy in back:
        clock.copy(copy, profile)
    occupied = busy(marks.starts, marks.ends) if marks.streams else clock.device_s
    time = max(clock.now, clock.free)
    return Timeline(
        profile=profile,
        time_s=time,
        device_s=clock.device_s,
        busy_s=occupied,
        host_s=clock.now,
        gaps_s=max(last - occupied - before, 0.0),
        head_s=max(marks.starts[0] - before, 0.0) if marks.starts else time - before,
        tail_s=time - last,
        copies_s=before + sum(copy.time_s for copy in back),
        launches=tuple(clock.launches),
        starts=tuple(marks.starts),
        marks=marks,
        traffic=tuple(_traffic(clock.launches, clock.marks, groups, exposed)),
    )


def _groups(found: Iterable[Launch | Repeat]) -> Iterator[str]:
    """The groups of ranks that collectives join."""
    for x in found:
        if isinstance(x, Repeat):
            yield from _groups(x.body)
        elif x.group:
            yield x.group


def _traffic(
    launches: Sequence[Launch], marks: Marks, groups: Sequence[str], exposed: Sequence[float]
) -> Iterator[Traffic]:
    for group, waited in zip(groups, exposed, strict=True):
        own = [i for i, x in enumerate(launches) if x.group == group]
        total = sum(marks.ends[i] - marks.starts[i] for i in own)
        yield Traffic(group, len(own), total, min(waited, total))


class _Past(NamedTuple):
    """A run of a loop: how far it moved host and device on, what the kernels took, what the host
    was at when it left, and whether it moved both as the run before did."""

    moved: tuple[float, float]
    device_s: float
    left: tuple[Loc | None, bool, float, str, bool]
    steady: bool


class _State(NamedTuple):
    """What a loop begins with."""

    loop: int
    lead_s: float
    queued: int
    next_s: float
    at: tuple[Loc | None, bool, float, str, bool]


def _same(before: tuple[float, float], moved: tuple[float, float]) -> bool:
    pace = 1e-9 * (moved[0] + moved[1])
    return abs(moved[0] - before[0]) <= pace and abs(moved[1] - before[1]) <= pace


class _Clock:
    """How far the host (`now`) and the stream (`free`) are, and the marks they leave.

    `bounded`: the host waits for the device, where the queue is full and where a size must be
    known. That is left out where several streams run: their kernels' times are known only after all
    launches are.
    """

    def __init__(
        self,
        host: Host,
        bounded: bool,
        end: int | None,
        share: float = 1.0,
        takes: Callable[[Launch], float] | None = None,
    ):
        self.host, self.bounded, self.end, self.part = host, bounded, end, share
        self.takes = takes
        self.now = self.free = self.device_s = 0.0
        self.op: Loc | None = None
        self.lane = HOST
        self.replaying = False
        self.inside = False  # whether `op` has launched a kernel and is not over
        self.paid = 0.0  # of what leads to its first launch
        self.next_s = host.next_s  # until it launches again
        self.launches: list[Launch] = []
        self.pending: list[float] = []  # when the kernels launched end, for the queue
        self.past: dict[int, _Past] = {}  # of each loop, by identity, its last run
        self.seen: dict[
            _State, _Past
        ] = {}  # of each loop and what it began with, where nobody waited
        self.marks = (
            Marks(True, 0.0, gap_s=host.graph_s) if host.graph else Marks(False, host.launch_s)
        )

    def call(self, lane: str = HOST, params: int = 0) -> None:
        """Into the model, or over to another thread: its backward pass, its optimizer. Each is a
        function that is compiled, and captured, alone."""
        self.close()
        start = self.now
        self.now += self.host.call_s + params * self.host.param_s
        self.marks.other.append(
            Span(lane=lane, kind="call", name="call", start_s=start, end_s=self.now)
        )
        self.lane, self.op, self.replaying = lane, None, False

    def copy(self, copy: Copy, profile: Profile) -> None:
        assert profile.copies is not None
        start = max(self.now + profile.copies.call_s, self.free)
        self.now = self.free = start + copy.time_s
        self.marks.other.append(
            Span(lane="copy", kind="copy", name=copy.name, start_s=start, end_s=self.now)
        )

    def close(self) -> None:
        """The end of the op that launched last."""
        if self.inside:
            self.now += self.host.after_s
        self.inside = False

    def go(self, found: Sequence[Launch | Repeat]) -> None:
        for lane, some in groupby(found, lambda x: x.lane if isinstance(x, Launch) else None):
            if lane is None:
                for loop in cast(Iterator[Repeat], some):
                    self._repeat(loop)
                continue
            if lane != self.lane:
                self.call(lane)
            items = tuple(cast(Iterator[Launch], some))
            if self.host.graph:
                self._replayed(items)
            else:
                self._straight(items)

    def _times(self, items: Sequence[Launch]) -> list[float]:
        if self.takes is not None:
            return [self.takes(x) for x in items]
        if self.end is None:
            return [x.time_s for x in items]
        end, share = self.end, self.part
        return [
            x.time_s + share * (x.between_s[end] - x.time_s) if x.between_s else x.time_s
            for x in items
        ]

    def _straight(self, items: Sequence[Launch]) -> None:
        """The recurrence, for launches one after another. Locals: it runs a million times."""
        host, marks = self.host, self.marks
        now, free, op, inside, device = self.now, self.free, self.op, self.inside, self.device_s
        begins, starts, ends, causes = marks.begins, marks.starts, marks.ends, marks.causes
        pending, limit = self.pending, host.queue if self.bounded else 1 << 62
        step = host.after_s + host.between_s
        first = {kind: host.before.get(kind, host.before_s) for kind in {x.kind for x in items}}
        paid, again_s = self.paid, self.next_s
        for x, time in zip(items, self._times(items), strict=True):
            if x.empty:
                if x.op != op:
                    now += step if inside else host.between_s
                    op, inside = x.op, False
                now += host.empty_s
                continue
            if x.op == op and inside:  # an op prepares for the dearest of its kernels
                now += again_s + max(first[x.kind] - paid, 0.0)
                paid = max(paid, first[x.kind])
            else:
                now += (step if inside else host.between_s) if x.op != op else 0.0
                now += (paid := first[x.kind])
                op, inside = x.op, True
            if len(pending) >= limit and pending[-limit] > now:
                now = pending[-limit]
                marks.waits.append((len(ends), now))
            begins.append(now)
            now += host.launch_s
            start = now if now >= free else free
            causes.append(-1 if now >= free else len(ends) - 1)
            free = start + time
            starts.append(start)
            ends.append(free)
            pending.append(free)
            device += time
            self.launches.append(x)
            if x.waits and self.bounded and free > now:
                now = free
                marks.waits.append((len(ends), now))
        self.now, self.free, self.op, self.inside, self.device_s = now, free, op, inside, device
        self.paid = paid

    def _replayed(self, items: Sequence[Launch]) -> None:
        """Kernels of one CUDA graph, which the host launches for the first of them."""
        marks = self.marks
        for x, time in zip(items, self._times(items), strict=True):
            if x.empty:
                continue
            if not self.replaying:
                since, self.now, self.replaying = self.now, self.now + self.host.launch_s, True
                marks.other.append(
                    Span(lane=self.lane, kind="launch", name="graph", start_s=since, end_s=self.now)
                )
            marks.causes.append(-1 if self.now > self.free else len(marks.ends) - 1)
            start = max(self.free, self.now) + self.host.graph_s
            marks.begins.append(self.now)
            marks.starts.append(start)
            self.free = start + time
            marks.ends.append(self.free)
            self.device_s += time
            self.launches.append(x)

    def _repeat(self, loop: Repeat) -> None:
        """Trips, until two in a row moved host and device on by the same: so do all the rest. Of a
        loop within a loop, so do its runs as a whole, in a row or with what they began with the
        same; one in which the host never waited need not be seen twice. So each level is run a few
        times, not a few times for each run of the level around it."""
        began = self._state(loop)
        last, alike = self.past.get(id(loop)), self.seen.get(began)
        for past in (last, alike):
            if past is not None and past.steady:
                self._skip(f"{'/'.join(loop.path)}: as before", 1, past.moved, past.device_s)
                self.op, self.inside, self.paid, self.lane, self.replaying = past.left
                return
        since, waits = (self.now, self.free, self.device_s), len(self.marks.waits)
        self._trips(loop)
        moved = self.now - since[0], self.free - since[1]
        left = self.op, self.inside, self.paid, self.lane, self.replaying
        device_s = self.device_s - since[2]
        in_a_row = last is not None and self._steady(last.moved, moved)
        self.past[id(loop)] = _Past(moved, device_s, left, self.bounded and in_a_row)
        again = alike is not None and _same(alike.moved, moved)
        known = self.bounded and (again or len(self.marks.waits) == waits)
        self.seen[began] = _Past(moved, device_s, left, known)

    def _state(self, loop: Repeat) -> _State:
        """All that how a loop runs depends on, to a tenth of a nanosecond: the loop, how far the
        device is behind, how many kernels are in the queue, what the host is at."""
        queued = len(self.pending) - bisect_right(self.pending, self.now)
        lead = round(self.free - self.now, 10)
        at = self.op, self.inside, self.paid, self.lane, self.replaying
        return _State(id(loop), lead, queued, self.next_s, at)

    def _trips(self, loop: Repeat) -> None:
        before: tuple[float, float] | None = None
        outside_s = self.next_s
        if loop.inner and self.host.library_s is not None:
            self.next_s = self.host.library_s
        for trip in range(loop.trips):
            now, free, device = self.now, self.free, self.device_s
            if not loop.inner and not self.host.graph:
                self.close()
                self.now += self.host.trip_s
                self.op = None
            self.go(loop.body)
            moved = self.now - now, self.free - free
            left = loop.trips - trip - 1
            if before is not None and left and self.bounded and self._steady(before, moved):
                name = f"{'/'.join(loop.path)}: {left:,} more trips"
                self._skip(name, left, moved, self.device_s - device)
                break
            before = moved
        self.next_s = outside_s

    def _steady(self, before: tuple[float, float], moved: tuple[float, float]) -> bool:
        """Whether both moved on as in the trip before, and at one pace; in a graph the host may be
        ahead, a host that takes no time stays, as does a device that is given nothing to do."""
        ahead = self.host.graph and moved[0] <= moved[1]
        at_one = abs(moved[0] - moved[1]) <= 1e-9 * (moved[0] + moved[1])
        return _same(before, moved) and (ahead or not all(moved) or at_one)

    def _skip(self, name: str, runs: int, moved: tuple[float, float], device_s: float) -> None:
        """Moves on by so many runs, each as the last one was."""
        for lane, since, by in ((HOST, self.now, moved[0]), ("stream 0", self.free, moved[1])):
            if by:
                self.marks.other.append(
                    Span(lane=lane, kind="loop", name=name, start_s=since, end_s=since + runs * by)
                )
        self.now += runs * moved[0]
        self.free += runs * moved[1]
        self.device_s += runs * device_s
        self.pending = [end + runs * moved[1] for end in self.pending[-self.host.queue :]]

    def share(self, streams: int) -> None:
        """Kernels on several streams, launched when the host has come to them."""
        self._placed(share_device(self._jobs(), streams))

    def overlap(self, groups: Sequence[str]) -> tuple[float, ...]:
        """Kernels on one stream, and the collectives of each group on one of theirs: how long
        kernels waited for each group."""
        lane = {group: i + 1 for i, group in enumerate(groups)}
        lanes = [lane.get(x.group, 0) for x in self.launches]
        found = overlapped(self._jobs(), lanes, len(groups) + 1)
        self._placed(found.shared)
        self.marks.lanes = ("stream 0", *(f"communication {group}" for group in groups))
        return found.exposed_s

    def _jobs(self) -> list[Job]:
        times = self._times(self.launches)
        return [
            Job(begin + self.marks.launch_s, time, x.share, x.after)
            for begin, time, x in zip(self.marks.begins, times, self.launches, strict=True)
        ]

    def _placed(self, shared: Shared) -> None:
        self.marks.starts[:] = shared.starts
        self.marks.ends[:] = shared.ends
        self.marks.causes[:] = shared.causes
        self.marks.streams = shared.streams
        self.free = max(shared.ends, default=self.free)
