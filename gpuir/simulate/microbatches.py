"""Microbatches through a pipeline of ranks: in which order each rank runs them, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from gpuir.ir.errors import UsageError, nearest
from gpuir.simulate.parallel import Parallel, PipelineSchedule

TaskKind = Literal["forward", "backward", "weights", "sums", "norm", "update"]


class Task(NamedTuple):
    """What a rank does at a time: of one microbatch the forward or the backward pass of one chunk,
    or its gradients of weights by themselves (`weights`); at the end of a step the wait for `sums`
    of gradients that are still under way, and the `update`, which waits for each rank's share of a
    `norm` of all gradients, where they are clipped.

    Rank r of p has the parts r, r + p, r + 2p ... of the model, its chunks 0, 1, 2 ...
    """

    kind: TaskKind
    microbatch: int
    chunk: int = 0


Order = tuple[Task, ...]


class Sums(NamedTuple):
    """Collectives of one group of ranks that sum gradients, beside the pass that makes them: what
    they take together, and when after its start the last of them ends, if none had to wait for
    those of an earlier pass."""

    group: str
    time_s: float
    end_s: float


class LastPass(NamedTuple):
    """The pass that makes gradients of the last microbatch: how long its kernels take beside its
    `sums`, which nobody waits for but the update. While these run, kernels of passes that follow
    take `slows` times as long."""

    time_s: float
    sums: tuple[Sums, ...]
    slows: float = 1.0


@dataclass(frozen=True)
class PartTimes:
    """Seconds that the passes of a part take. `weights` is what of the backward pass are gradients
    of weights alone: not in `backward`. Where an order has no tasks `weights`, a task `backward`
    does both. `last` is the last of them that makes gradients, where ranks sum these."""

    forward: float
    backward: float
    weights: float = 0.0
    update: float = 0.0
    norm: float = 0.0
    last: LastPass | None = None


# ---- in which order ----------------------------------------------------------------------------


def task_orders(
    schedule: PipelineSchedule, ranks: int, microbatches: int, chunks: int = 1
) -> tuple[Order, ...]:
    """The tasks of each rank in order.

    gpipe: all forward passes, then all backward passes (Huang et al., GPipe, arXiv 1811.06965; the
    first microbatch first, as PyTorch's `ScheduleGPipe`). 1f1b: rank r of p begins with p - 1 - r
    forward passes, then one forward, one backward (Narayanan et al., arXiv 2006.09503,
    "PipeDream-Flush"). interleaved: the same with `chunks` chunks a rank, p microbatches of a chunk
    at a time (Narayanan et al., arXiv 2104.04473, section 2.2). zero-bubble: 1f1b with gradients of
    weights apart, which rank r puts off by r of them (ZB-H1: Qi et al., arXiv 2401.10241, 2.1).

    UsageError for a number of ranks, microbatches or chunks that a schedule does not take.
    """
    _check(schedule, ranks, microbatches, chunks)
    match schedule:
        case "gpipe":
            all = range(microbatches)
            order = (
                *(Task("forward", m) for m in all),
                *(Task("backward", m) for m in all),
            )
            return (order,) * ranks
        case "1f1b":
            return tuple(_one_by_one(ranks - 1 - r, microbatches) for r in range(ranks))
        case "zero-bubble":
            orders = (_one_by_one(ranks - 1 - r, microbatches) for r in range(ranks))
            return tuple(_put_off(order, r, microbatches) for r, order in enumerate(orders))
        case "interleaved":
            return tuple(_interleaved(r, ranks, microbatches, chunks) for r in range(ranks))


def orders_of(parallel: Parallel, is_training: bool) -> tuple[Order, ...]:
    """The tasks of each rank of a pipeline; of inference microbatches go through one way."""
    p = parallel
    orders = task_orders(p.schedule, p.pp, p.microbatches, p.chunks)
    if is_training:
        return orders
    return tuple(tuple(t for t in order if t.kind == "forward") for order in orders)


def _check(schedule: str, ranks: int, microbatches: int, chunks: int) -> None:
    if schedule not in get_args(PipelineSchedule):
        fix = nearest(schedule, get_args(PipelineSchedule))
        raise UsageError(f"no pipeline schedule has the name {schedule!r}", fix=fix)
    for name, n in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if n < 1:
            raise UsageError(f"{name} count from 1", found=f"{name}={n}")
    if schedule == "interleaved" and chunks == 1:
        raise UsageError(
            "the schedule interleaved needs several chunks on each rank",
            found="chunks=1",
            fix="chunks=2, or 1f1b",
        )
    if schedule != "interleaved" and chunks > 1:
        raise UsageError(
            f"the schedule {schedule} has one chunk on each rank",
            found=f"chunks={chunks}",
            fix="use the schedule interleaved, or remove chunks",
        )
    if schedule == "interleaved" and microbatches % ranks:
        near = sorted({max(microbatches // ranks, 1) * ranks, (microbatches // ranks + 1) * ranks})
        raise UsageError(
            f"interleaved needs a number of microbatches that {ranks} (the "
            "number of ranks) divides",
            found=f"{microbatches} microbatches",
            fix=f"{' or '.join(map(str, near))} microbatches, or 1f1b",
        )


def _one_by_one(first: int, microbatches: int) -> Order:
    """`first` forward passes, then one forward and one backward, then what backward is left."""
    return _mixed(
        [Task("forward", m) for m in range(microbatches)],
        [Task("backward", m) for m in range(microbatches)],
        first,
    )


def _mixed(forward: list[Task], backward: list[Task], first: int) -> Order:
    first = min(first, len(forward))
    order = forward[:first]
    for ahead, behind in zip(forward[first:], backward, strict=False):
        order += (ahead, behind)
    return (*order, *backward[len(forward) - first :])


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Order:
    """Megatron-LM's order: in a round, `ranks` microbatches of chunk 0, then of chunk 1 ..."""
    forward = [
        Task("forward", start + m, chunk)
        for start in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for m in range(ranks)
    ]
    backward = [Task("backward", m, chunks - 1 - chunk) for _, m, chunk in forward]
    return _mixed(forward, backward, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)


def _put_off(order: Order, rank: int, microbatches: int) -> Order:
    """With the gradients of weights of microbatch m behind the backward pass of m + rank, the rest
    at the end."""
    found: list[Task] = []
    for task in order:
        found.append(task)
        if task.kind == "backward" and task.microbatch >= rank:
            found.append(Task("weights", task.microbatch - rank))
    left = range(max(microbatches - rank, 0), microbatches)
    return (*found, *(Task("weights", m) for m in left))


def last_passes(order: Order) -> frozenset[Task]:
    """Of each chunk, the task that makes the last gradients."""
    found = {task.chunk: task for task in order if task.kind in ("backward", "weights")}
    return frozenset(found.values())


# ---- when --------------------------------------------------------------------------------------


class PathTask(NamedTuple):
    """A task of the critical path. It began because of the one before it in the path: on the same
    rank, or on another, whose result took `sent_s` to come."""

    rank: int
    task: Task
    start_s: float
    end_s: float
    sent_s: float


@dataclass(frozen=True)
class Pipelined:
    """One step of a pipeline of ranks: when each task of each rank starts and ends.

    `starts` and `ends` go along `orders`. `sends` and `sends_back` are what a result takes from
    part i to part i + 1, and a gradient back; `sent` and `sent_back` their bytes, where known.
    `norm_s` is what ranks take to add up their shares of a norm.
    """

    orders: tuple[Order, ...] = field(repr=False)
    times: tuple[PartTimes, ...] = field(repr=False)
    sends: tuple[float, ...] = field(repr=False)
    sends_back: tuple[float, ...] = field(repr=False)
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    ends: tuple[tuple[float, ...], ...] = field(repr=False)
    norm_s: float = 0.0
    sent: tuple[int, ...] = ()
    sent_back: tuple[int, ...] = ()

    @cached_property
    def time_s(self) -> float:
        return max(ends[-1] for ends in self.ends)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """How long each rank has a task."""
        return tuple(
            sum(b - a for a, b in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def idle_s(self) -> tuple[float, ...]:
        """How long each rank has none: its bubble."""
        return tuple(self.time_s - busy for busy in self.busy_s)

    @cached_property
    def last(self) -> tuple[frozenset[Task], ...]:
        """Of each rank the tasks that make the last gradients of its chunks."""
        return tuple(map(last_passes, self.orders))

    @cached_property
    def sums_s(self) -> tuple[float, ...]:
        """How long each rank waits for sums of gradients when all its passes are done."""
        clocks = zip(self.orders, self.starts, self.ends, strict=True)
        return tuple(
            sum(ends[i] - starts[i] for i in places_of("sums", order))
            for order, starts, ends in clocks
        )

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they have no task."""
        return sum(self.idle_s) / (self.time_s * len(self.orders)) if self.time_s else 0.0

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Of each rank, the most forward passes whose backward pass is not done yet."""
        return tuple(most_in_flight(order) for order in self.orders)

    @cached_property
    def critical(self) -> tuple[PathTask, ...]:
        """The chain of tasks that decides the end, from first to last: they and what travels
        between them take the whole time."""
        ranks = len(self.orders)
        places = [{task: i for i, task in enumerate(order)} for order in self.orders]
        rank = max(range(ranks), key=lambda r: self.ends[r][-1])
        at: tuple[int, int] | None = (rank, len(self.orders[rank]) - 1)
        found: list[PathTask] = []
        while at is not None:
            rank, i = at
            task, start = self.orders[rank][i], self.starts[rank][i]
            at, sent = ((rank, i - 1) if i else None), 0.0
            if start > (self.ends[rank][i - 1] if i else 0.0):
                at, sent = self._waited_for(rank, task, places)
            found.append(PathTask(rank, task, start, self.ends[rank][i], sent))
        return tuple(reversed(found))

    def _waited_for(
        self, rank: int, task: Task, places: Sequence[dict[Task, int]]
    ) -> tuple[tuple[int, int], float]:
        """The task of another part that a task had to wait for, and how long its result took."""
        ranks = len(self.orders)
        if task.kind == "update":
            norms = ((r, i) for r in range(ranks) for i in places_of("norm", self.orders[r]))
            return max(norms, key=lambda at: self.ends[at[0]][at[1]]), self.norm_s
        part = rank + ranks * task.chunk
        before = part - 1 if task.kind == "forward" else part + 1
        there, other = before % ranks, task._replace(chunk=before // ranks)
        sent = self.sends[before] if before < part else self.sends_back[part]
        return (there, places[there][other]), sent


def places_of(kind: TaskKind, order: Order) -> Iterator[int]:
    return (i for i, task in enumerate(order) if task.kind == kind)


def most_in_flight(order: Iterable[Task]) -> int:
    """The most forward passes at a time whose backward pass is not done yet."""
    now = most = 0
    for kind, _, _ in order:
        now += (kind == "forward") - (kind == "backward")
        most = max(most, now)
    return most


def run_pipeline(
    orders: Sequence[Order],
    times: Sequence[PartTimes],
    sends: Sequence[float] = (),
    sends_back: Sequence[float] | None = None,
    norm_s: float = 0.0,
) -> Pipelined:
    """When ranks that keep to their `orders` run each task.

    `times` are those of the parts of the model, first to last; rank r of p has the parts r, r + p
    ... as its chunks. `sends` are the seconds from part i to part i + 1, none by default, and
    `sends_back` those of gradients, the same by default. A task starts when the rank is done with
    the one before, and what it needs has come; ranks compute while they send. Sums of gradients run
    beside whatever follows, one after another within their group. Behind its last task, and its
    sums, a rank updates its weights, if any of its parts takes time for it: where some have a norm,
    when all have, and `norm_s` later.

    UsageError where the numbers do not go together, or ranks wait for each other for ever.
    """
    ranks, parts = len(orders), len(times)
    sends = tuple(sends) or (0.0,) * (parts - 1)
    back = sends if sends_back is None else tuple(sends_back)
    if parts % ranks or len(sends) != parts - 1 or len(back) != parts - 1:
        raise UsageError(
            "each rank of a pipeline needs the same number of parts, with one send between parts",
            expected=f"a multiple of {ranks} parts, and one send fewer than parts",
            found=f"{parts} parts, {len(sends)} sends forward, {len(back)} back",
        )
    orders = tuple(map(_with_update(times, ranks), range(ranks), orders))
    seconds, last = _task_seconds(orders, times), [t.last for t in times]
    starts, ends = _simulate(orders, seconds, last, sends=sends, back=back, norm_s=norm_s)
    return Pipelined(
        orders, (*times,), sends=sends, sends_back=back, starts=starts, ends=ends, norm_s=norm_s
    )


def _with_update(times: Sequence[PartTimes], ranks: int):
    def added(rank: int, order: Order) -> Order:
        own = range(rank, len(times), ranks)
        sums = [Task("sums", 0, c) for c, part in enumerate(own) if times[part].last][:1]
        norms = (Task("norm", 0, c) for c, part in enumerate(own) if times[part].norm)
        updates = (Task("update", 0, c) for c, part in enumerate(own) if times[part].update)
        return (*order, *sums, *norms, *updates)

    return added


def _task_seconds(
    orders: Sequence[Order], times: Sequence[PartTimes]
) -> dict[TaskKind, list[float]]:
    """By kind and part. Backward passes whose gradients of weights are not apart hold them."""
    apart = any(task.kind == "weights" for order in orders for task in order)
    return {
        "forward": [t.forward for t in times],
        "backward": [t.backward + (0.0 if apart else t.weights) for t in times],
        "weights": [t.weights for t in times],
        "sums": [0.0 for _ in times],
        "norm": [t.norm for t in times],
        "update": [t.update for t in times],
    }


Clock = tuple[tuple[float, ...], ...]


def _simulate(
    orders: Sequence[Order],
    seconds: dict[TaskKind, list[float]],
    last: Sequence[LastPass | None],
    *,
    sends: Sequence[float],
    back: Sequence[float],
    norm_s: float,
) -> tuple[Clock, Clock]:
    """Each rank goes on until what its next task needs is not there; whoever makes it wakes it.
    Sums of a group are a queue: of those of a pass the last is done as late as by themselves, or
    as all of them take behind those before (Lindley, 1952)."""
    ranks, parts = len(orders), len(seconds["forward"])
    count = 1 + max((task.microbatch for order in orders for task in order), default=0)
    arrived: dict[str, list[list[float | None]]] = {  # when what a task needs is on its rank
        "forward": [[0.0 if part == 0 else None] * count for part in range(parts)],
        "backward": [[0.0 if part == parts - 1 else None] * count for part in range(parts)],
    }
    done: list[list[float | None]] = [[None] * count for _ in range(parts)]  # forward passes
    ending = [last_passes(order) for order in orders]
    summed: list[dict[str, float]] = [{} for _ in orders]  # by group, when sums so far are done
    slows = [1.0] * ranks  # how many times as long kernels take until then
    norms_left, all_norms = sum(kind == "norm" for order in orders for kind, *_ in order), 0.0
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    waiting = deque(range(ranks))
    while waiting:
        rank = waiting.popleft()
        order, begun, ended = orders[rank], starts[rank], ends[rank]
        now = ended[-1] if ended else 0.0
        for i in range(len(begun), len(order)):
            kind, m, chunk = order[i]
            part = rank + ranks * chunk
            start = now
            if kind == "forward" or kind == "backward":
                ready = arrived[kind][part][m]
                if ready is None or (kind == "backward" and done[part][m] is None):
                    break
                start = max(now, ready)
            elif kind == "update":
                if norms_left:
                    break
                start = max(now, all_norms)
            own = last[part] if order[i] in ending[rank] else None
            alone = seconds[kind][part] if own is None else own.time_s
            until = max(summed[rank].values(), default=0.0)
            later = (1 - 1 / slows[rank]) * min(max(until - start, 0.0), slows[rank] * alone)
            now = start + alone + later
            if kind == "sums":
                now = max(start, until)
            elif own is not None:
                slows[rank] = own.slows
                for group, time_s, end_s in own.sums:
                    before = summed[rank].get(group, 0.0)
                    summed[rank][group] = max(start + later + end_s, before + time_s)
            begun.append(start)
            ended.append(now)
            if kind == "forward":
                done[part][m] = now
                if part + 1 < parts:
                    arrived["forward"][part + 1][m] = now + sends[part]
                    waiting.append((rank + 1) % ranks)
            elif kind == "norm":
                norms_left, all_norms = norms_left - 1, max(all_norms, now + norm_s)
                if not norms_left:
                    waiting.extend(range(ranks))
            elif kind == "backward" and part:
                arrived["backward"][part - 1][m] = now + back[part - 1]
                waiting.append((rank - 1) % ranks)
    for rank, order in enumerate(orders):
        if len(ends[rank]) < len(order):
            task = order[len(ends[rank])]
            raise UsageError(
                "the schedule never ends: the ranks wait for each other",
                where=f"rank {rank}",
                found=f"{task.kind} of microbatch {task.microbatch}, chunk {task.chunk}",
            )
    return tuple(map(tuple, starts)), tuple(map(tuple, ends))
