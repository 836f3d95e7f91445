"""Models that share a GPU: who runs when, how far they slow each other down, and how long requests
wait. Discrete events, by SimPy (MIT licence).

A run of a model takes `time_s` alone. For shares of that time it uses what it has in common with
others: SMs, bandwidth, the host's threads. As long as all that run find room, each goes at its full
speed. Where they do not, what is short takes all of its users `stretch` times as long, the least
with which they find room: a run takes 1 + sum over resources of share x (stretch - 1) times as
long. Whoever uses little of it loses little. Power is the clock's, the same for all of a GPU.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpuir.ir.errors import UsageError

Mode = Literal["serial", "time-slicing", "mps"]
MODES: tuple[Mode, ...] = ("serial", "time-slicing", "mps")
POWER = "power"
WARM_UP = 0.1  # of the requests, which are not counted: queues begin empty
MOST_WAITING = 2_000
MOST_EVENTS = 400_000  # of one simulation
KEEPS_UP = 0.97  # of the requests that arrive are served: fewer, and the queue grows
EPSILON = 1e-9
MOST_ROUNDS = 50


@dataclass(frozen=True)
class Load:
    """What is asked of a model: `rate` requests a second, which arrive at random (Poisson), none
    with 0, or a closed loop, which asks again as soon as it is served. A request is one run.

    `deadline_s` is what 99 % of the requests are to be done within."""

    rate: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class Tenant:
    """A model in its place: how long one run takes alone there, and for which shares of that time
    it uses what is common (0 to 1). Of tenants with one `turn` a single one runs at a time, in the
    order of arrival. `sliced` is the resource that is had in time slices, if there is one, `board`
    whose power and clock it has."""

    name: str
    load: Load
    time_s: float
    needs: Mapping[str, float]
    watts: float = 0.0
    turn: str = ""
    sliced: str = ""
    board: str = ""


@dataclass(frozen=True)
class SharedResources:
    """What tenants have in common: `limits` of the resources that have another one than 1, the
    share of the time that is lost where several have one in time slices (`switch_share`), and the
    watts that each board has for arithmetic. A clock slows with the power that is missing, to
    `bend`."""

    limits: Mapping[str, float]
    switch_share: float
    watts: Mapping[str, float] = field(default_factory=dict[str, float])
    bend: float = 1.0


@dataclass(frozen=True)
class Served:
    """What became of a tenant's requests. `latencies_s` are from arrival to the end, in order. A
    request waits `waiting_s` before its run, which takes `running_s`, both on average; `lost` is
    what sharing adds to a run by cause, in shares of `alone_s`."""

    name: str
    load: Load
    alone_s: float
    rate: float
    latencies_s: NDArray[np.float64]
    waiting_s: float
    running_s: float
    lost: Mapping[str, float]
    keeps_up: bool

    def percentile_s(self, percent: float) -> float:
        """The latency that so many percent of the requests stay below."""
        return float(np.percentile(self.latencies_s, percent))

    @cached_property
    def mean_s(self) -> float:
        return float(self.latencies_s.mean())

    @property
    def in_time(self) -> bool:
        """Whether the requests keep their deadline, where there is one, and none piles up."""
        late = self.load.deadline_s is not None and self.percentile_s(99) > self.load.deadline_s
        return self.keeps_up and not late


@dataclass(frozen=True)
class Speed:
    """How fast a run goes, of its speed alone, and what it loses: the seconds more for each second
    that it takes alone, by cause."""

    of: float
    lost: Mapping[str, float]


def speeds(running: Sequence[Tenant], common: SharedResources) -> tuple[Speed, ...]:
    """How fast tenants run that run at once: the least stretch of each resource with which all
    find room, found by one resource after another until none changes."""
    if not running:
        return ()
    sliced = Counter(x.sliced for x in running if x.sliced)
    limits = {r: common.limits.get(r, 1.0) for x in running for r in x.needs}
    for resource, count in sliced.items():
        if count > 1:
            limits[resource] = limits.get(resource, 1.0) * (1 - common.switch_share)
    names = list(limits)
    needs = np.array([[x.needs.get(r, 0.0) for r in names] for x in running])
    more = np.zeros(len(names))  # stretch - 1
    short = [j for j, r in enumerate(names) if needs[:, j].sum() > limits[r]]
    for _ in range(MOST_ROUNDS if len(short) > 1 else len(short)):
        before = more.copy()
        for j in short:
            others = 1.0 + needs @ more - needs[:, j] * more[j]
            more[j] = _stretched(needs[:, j], others, limits[names[j]])
        if np.allclose(more, before, rtol=1e-4):
            break
    times = 1.0 + needs @ more
    clocks = _clocks(running, times.tolist(), common)
    found: list[Speed] = []
    for x, row, time in zip(running, needs, times.tolist(), strict=True):
        lost = {names[j]: float(row[j] * more[j]) for j in short if row[j] * more[j] > 0}
        if (clock := clocks.get(x.board, 1.0)) < 1.0:
            lost[POWER] = time / clock - time
        found.append(Speed(clock / time, lost))
    return tuple(found)


def _clocks(
    running: Sequence[Tenant], times: Sequence[float], common: SharedResources
) -> dict[str, float]:
    """The clock of each board whose power does not feed all that run on it, of the full one."""
    wanted: dict[str, float] = {}
    for x, time in zip(running, times, strict=True):
        wanted[x.board] = wanted.get(x.board, 0.0) + x.watts / time
    return {
        board: (watts / wanted[board]) ** common.bend
        for board, watts in common.watts.items()
        if wanted.get(board, 0.0) > watts
    }


def _stretched(needs: NDArray[np.float64], others: NDArray[np.float64], limit: float) -> float:
    """How much longer a resource takes its users: x of sum(needs / (others + needs x)) = limit."""
    if (needs / others).sum() <= limit:
        return 0.0
    low, high = 0.0, len(needs) / limit  # each term is at most 1 / x
    for _ in range(60):
        middle = (low + high) / 2
        if (needs / (others + needs * middle)).sum() > limit:
            low = middle
        else:
            high = middle
    return high


def simulate(
    tenants: Sequence[Tenant], common: SharedResources, *, requests: int = 2000, seed: int = 0
) -> tuple[Served, ...]:
    """Runs all tenants beside each other until each with a rate had so many requests, and each
    closed loop a tenth of that; UsageError without SimPy."""
    try:
        import simpy
    except ImportError:
        raise UsageError(
            "SimPy, which simulates the queues, is not installed", fix="pip install 'gpuir[mig]'"
        ) from None
    asked = [x for x in tenants if x.load.rate != 0]
    found = iter(_Simulation(simpy, asked, common, requests, seed).served() if asked else ())
    return tuple(next(found) if x.load.rate != 0 else _unasked(x) for x in tenants)


def _unasked(x: Tenant) -> Served:
    """Of a model that nobody asks: as if one request had been alone."""
    return Served(
        x.name,
        x.load,
        x.time_s,
        rate=0.0,
        latencies_s=np.array([x.time_s]),
        waiting_s=0.0,
        running_s=x.time_s,
        lost={},
        keeps_up=True,
    )


class _Simulation:
    """Between two events the same tenants run, at the same speeds. An event is the end of a run, or
    a request that begins one; the end that was foreseen before is stale then, and passed over."""

    def __init__(
        self,
        simpy: Any,
        tenants: Sequence[Tenant],
        common: SharedResources,
        requests: int,
        seed: int,
    ):
        self.env: Any = simpy.Environment()
        self.tenants, self.common = tenants, common
        count = range(len(tenants))
        self.wanted = [requests if x.load.rate else max(requests // 10, 20) for x in tenants]
        self.short = set(count)  # tenants that have not had as many
        self.waiting: list[deque[float]] = [deque() for _ in count]  # arrivals of each
        self.turns: dict[str, deque[int]] = {x.turn: deque() for x in tenants if x.turn}
        self.taken: set[str] = set()  # turns of those that run
        self.left: dict[int, float] = {}  # alone-seconds, of the run of each that runs
        self.begun = [0.0] * len(tenants)
        self.arrived = [0.0] * len(tenants)
        self.latencies: list[list[float]] = [[] for _ in count]
        self.ends: list[list[float]] = [[] for _ in count]
        self.waited, self.ran = [0.0] * len(tenants), [0.0] * len(tenants)
        self.known: dict[tuple[int, ...], tuple[Speed, ...]] = {}
        self.passed: dict[tuple[int, ...], float] = {}  # seconds in which these ran
        self.running: tuple[int, ...] = ()
        self.at = 0.0  # the last event
        self.foreseen = 0  # ends that were foreseen: the last counts
        self.events = 0
        self.done: Any = self.env.event()
        self.rng = np.random.default_rng(seed)

    def served(self) -> tuple[Served, ...]:
        for i, x in enumerate(self.tenants):
            if x.load.rate:
                self.env.process(self._arrivals(i, x.load.rate))
            else:
                self._ask(i)
        self._foresee()
        self.env.run(until=self.done)
        return tuple(self._result(i) for i in range(len(self.tenants)))

    def _arrivals(self, i: int, rate: float) -> Iterator[Any]:
        rng = np.random.default_rng(self.rng.integers(1 << 32))
        most = 2 * self.wanted[i] + MOST_WAITING  # with so many it has fallen behind for good
        while len(self.waiting[i]) < most:
            for gap in rng.exponential(1 / rate, 256).tolist():
                yield self.env.timeout(gap)
                if self._would_begin(i):
                    self._advance()
                    self._ask(i)
                    self._foresee()
                else:
                    self._ask(i)

    def _would_begin(self, i: int) -> bool:
        turn = self.tenants[i].turn
        return turn not in self.taken if turn else i not in self.left

    def _ask(self, i: int) -> None:
        turn = self.tenants[i].turn
        self.waiting[i].append(self.env.now)
        if turn:
            self.turns[turn].append(i)
        self._begin(i)

    def _begin(self, i: int) -> None:
        """Starts the next run of a tenant, or of the one whose turn it is, if it can."""
        turn = self.tenants[i].turn
        if turn:
            if turn in self.taken or not self.turns[turn]:
                return
            i = self.turns[turn].popleft()
            self.taken.add(turn)
        elif i in self.left or not self.waiting[i]:
            return
        self.arrived[i] = self.waiting[i].popleft()
        self.begun[i] = self.env.now
        self.left[i] = self.tenants[i].time_s
        self.waited[i] += self.env.now - self.arrived[i]

    def _foresee(self) -> None:
        """Plans the event at which the first of those that run now ends."""
        self.running = running = tuple(sorted(self.left))
        if running not in self.known:
            self.known[running] = speeds([self.tenants[i] for i in running], self.common)
        self.foreseen += 1
        if running:
            found = self.known[running]
            first = min(self.left[i] / x.of for i, x in zip(running, found, strict=True))
            self.env.timeout(first, self.foreseen).callbacks.append(self._ended)

    def _ended(self, event: Any) -> None:
        if event.value != self.foreseen or self.done.triggered:
            return
        self._advance()
        for i in self.running:
            if self.left[i] <= EPSILON * self.tenants[i].time_s:
                self._end(i)
        self.events += 1
        if self.events >= MOST_EVENTS or not self.short:
            self.done.succeed()
        self._foresee()

    def _advance(self) -> None:
        """Lets those that run go on until now."""
        passed = self.env.now - self.at
        self.at = self.env.now
        if passed:
            for i, x in zip(self.running, self.known[self.running], strict=True):
                self.left[i] -= passed * x.of
            self.passed[self.running] = self.passed.get(self.running, 0.0) + passed

    def _end(self, i: int) -> None:
        del self.left[i]
        self.latencies[i].append(self.env.now - self.arrived[i])
        self.ends[i].append(self.env.now)
        self.ran[i] += self.env.now - self.begun[i]
        if len(self.ends[i]) == self.wanted[i]:
            self.short.discard(i)
        self.taken.discard(self.tenants[i].turn)
        if self.tenants[i].load.rate is None:
            self._ask(i)
        self._begin(i)

    def _lost(self, i: int) -> dict[str, float]:
        """Seconds that a tenant's runs lost, by cause."""
        found: dict[str, float] = {}
        for running, passed in self.passed.items():
            if i in running:
                x = self.known[running][running.index(i)]
                for cause, more in x.lost.items():
                    found[cause] = found.get(cause, 0.0) + passed * x.of * more
        return found

    def _result(self, i: int) -> Served:
        x, now = self.tenants[i], float(self.env.now)
        found, ends = np.array(self.latencies[i]), np.array(self.ends[i])
        count = len(found)
        if count == 0:  # not one was done: as if the first were, now
            found, ends = np.array([now or x.time_s]), np.array([now or x.time_s])
        first = min(int(WARM_UP * len(found)), len(found) - 1)
        since = ends[first - 1] if first else 0.0
        arrived = count + len(self.waiting[i]) + (i in self.left)
        runs = max(count, 1)
        return Served(
            name=x.name,
            load=x.load,
            alone_s=x.time_s,
            rate=0.0 if count == 0 else float((len(found) - first) / (ends[-1] - since)),
            latencies_s=found[first:],
            waiting_s=self.waited[i] / runs,
            running_s=self.ran[i] / runs,
            lost={cause: s / runs / x.time_s for cause, s in self._lost(i).items()},
            keeps_up=x.load.rate is None or count >= KEEPS_UP * arrived - 3,
        )
