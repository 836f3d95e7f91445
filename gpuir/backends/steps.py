"""A step of a model over the ranks of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from gpuir.backends.analysis import gains_text, to_fit_text, traffic
from gpuir.backends.structured import record
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import percent, quantity, rate, share
from gpuir.simulate.memory import available_bytes
from gpuir.simulate.microbatches import Task
from gpuir.simulate.step import RankPart as Ranks
from gpuir.simulate.step import Step, Where
from gpuir.targets.load import load_target
from gpuir.targets.support import title_on

MOST_OWNERS = 5  # of the critical path, named in one line


def step_report(s: Step, batch: int | None, path: bool = False) -> Report:
    """What a step takes, what of it is computed, sent and waited for, what ranks hold; with `path`
    also each turn of the chain that decides the end. Programs have a row for each kind of rank."""
    return Report(
        "gpuir.step/1",
        lambda: _parts(s, batch, path),
        lambda: _fields(s, batch),
    )


def _fields(s: Step, batch: int | None) -> dict[str, Any]:
    return record(
        s,
        "model cluster target parallel time_s interval flops peak_flops_per_s mfu params "
        "exposed_s idle_s felt_s again_s assumed tp_shared gains fits to_fit",
        ranks=s.parallel.ranks,
        profile=s.profile.name,
        batch=batch,
        parts=replace(_kinds(s), nested=lambda: list(map(_part, s.parts))),
    )


def _part(x: Ranks) -> dict[str, Any]:
    return record(
        x,
        "kernels_s traffic held_bytes available_bytes fits params",
        gpus=[record(w, "gpu first count", kernels_s=x.kernels_on[w.gpu]) for w in x.where],
        holds=dict(x.holds),
        runs=[
            record(r, "name times", time_s=r.timeline.time_s, host_s=r.timeline.host_s)
            for r in x.runs
        ],
    )


def _parts(s: Step, batch: int | None, path: bool) -> Iterator[Part]:
    gpus = f"{s.parallel.ranks:,} GPU{'s' * (s.parallel.ranks > 1)}"
    lacks = "" if s.fits else f"does not fit, {quantity(-s.spare_bytes, 'bytes')} short: "
    yield Heading(f"{lacks}{s.model} on {gpus} of {s.cluster} ({s.target})")
    yield Notes(list(head(s, batch)))
    if s.is_mixed:
        yield _kinds(s)
    if path:
        starts, takes = (
            Column(x, "s", value=lambda t, i=i: t[i]) for i, x in enumerate(("starts", "takes"))
        )
        yield Table(list(_turns(s)), (starts, takes, Column("owner", value=lambda t: t[2])))
    if s.assumed:
        yield Notes([("" if i else "assumed", text) for i, text in enumerate(s.assumed)])


class RankKind(NamedTuple):
    """Ranks of one part on one kind of GPU."""

    part: Ranks
    where: Where

    @property
    def kernels_s(self) -> float:
        return self.part.kernels_on[self.where.gpu]

    @property
    def ranks(self) -> str:
        first, count = self.where.first, self.where.count
        return f"{first} to {first + count - 1}" if count > 1 else str(first)

    @property
    def available_bytes(self) -> int:
        return available_bytes(load_target(self.where.gpu))


def _kinds(s: Step) -> Table:
    """Which ranks have which GPU, how long their kernels take there, and what they hold."""
    names = "model cluster time_s mfu exposed_s idle_s"
    return Table(
        [RankKind(part, x) for part in s.parts for x in part.where],
        (
            Column("ranks", "", "ranks"),
            *fields("first count", "where"),
            Column("GPU", "", "gpu", "where.gpu"),
            Column("kernels", "s", "kernels_s"),
            Column("of the step", "%", "", lambda x: share(x.kernels_s, s.time_s), drop=3),
            Column("weights", "count", "params", "part.params", drop=2),
            Column("holds", "bytes", "held_bytes", "part.held_bytes"),
            Column("has", "bytes", "available_bytes", drop=1),
            *fields("fits", "part"),
        ),
        record(s, names, parallel=str(s.parallel), profile=s.profile.name),
    )


def head(s: Step, batch: int | None) -> Iterator[tuple[str, str]]:
    p, part = s.parallel, s.slowest
    if not s.fits:
        yield "to fit", to_fit_text(s.to_fit)
    speed = f", {rate(batch / s.time_s)} items a second" if batch and s.time_s else ""
    yield "step", f"{quantity(s.time_s, 's', 4)}{speed}"
    if s.interval is not None:
        low, high = (quantity(end, "s") for end in s.interval)
        yield "interval", f"{low} to {high} in 80 % of cases"
    yield "gains", gains_text(s.gains, s.time_s)
    yield "ranks", str(p)
    parts = f"in {p.microbatches:,} microbatch{'es' * (p.microbatches != 1)}"
    yield "batch", f"{batch:,} a step, {parts}" if batch else parts
    vendor = load_target(s.parts[0].where[0].gpu).vendor
    yield "profile", f"{s.profile.name}: {title_on(s.profile, vendor)}"
    yield (
        "work",
        (
            f"{quantity(s.flops, 'flop')} of products a step, {percent(s.mfu, 1)} of what the GPUs "
            "could do (MFU)"
        ),
    )
    yield (
        "kernels",
        f"{quantity(part.kernels_s, 's')} of a rank, {percent(part.kernels_s, s.time_s)}",
    )
    for x in part.traffic:
        yield "sends", traffic(x)
    if s.felt_s:
        yield "felt", f"{quantity(s.felt_s, 's')} of collectives beside kernels"
    if s.again_s:
        yield "again", f"{quantity(s.again_s, 's')} of products that checkpoints repeat for nobody"
    yield "path", _path(s)
    if s.pipelined is not None:
        yield (
            "pipeline",
            (
                f"{percent(s.pipelined.bubble, 1)} of the ranks' time is bubble; the busiest waits "
                f"{quantity(s.idle_s, 's')}"
            ),
        )
    yield "memory", memory(s.fullest)
    yield "weights", f"{s.params:,}, of which a rank has {max(x.params for x in s.parts):,}"
    if s.tp_shared is not None:
        yield "tp cuts", f"{s.tp_shared}, by bytes and by flops; each rank has the rest whole"


def _links(s: Step) -> Iterator[tuple[float, float, str]]:
    """The chain that decides the end: when each link starts, how long it takes, and whose it is."""
    if s.pipelined is not None:
        end = 0.0
        for x in s.pipelined.critical:
            if x.start_s > end:
                what = (
                    "sum of a norm over parts" if x.task.kind == "update" else "send between parts"
                )
                yield end, x.start_s - end, what
            yield x.start_s, x.end_s - x.start_s, f"{_rank(s, x.rank, x.task)}, {x.task.kind}"
            end = x.end_s
        return
    now = 0.0
    for run in s.slowest.runs:
        for span in run.timeline.critical:
            sends = span.lane.startswith("communication")
            owner = span.lane if sends else {"host": "the host", "copy": "copies"}.get(span.kind)
            time = run.times * (span.end_s - span.start_s)
            kernels = f"kernels on {run.gpu}" if s.is_mixed else "kernels"
            yield now + span.start_s, time, f"{run.name}: {owner or kernels}"
        now += run.times * run.timeline.time_s


def _rank(s: Step, rank: int, task: Task) -> str:
    """`rank 8`, of several kinds of GPU `rank 8 (a100-sxm-80gb)`: the first that has the slowest
    GPU of its part."""
    if not s.is_mixed:
        return f"rank {rank * s.parallel.ranks // len(s.parts)}"
    gpu = s.run_of(rank, task).gpu
    first = next(x.first for x in s.parts[rank].where if x.gpu == gpu)
    return f"rank {first} ({gpu})"


def _path(s: Step) -> str:
    """`rank 0, forward 1.2 s; rank 3, backward 0.4 s`: by owner, the most first."""
    sums: dict[str, float] = {}
    for _, time, owner in _links(s):
        sums[owner] = sums.get(owner, 0.0) + time
    largest = sorted(sums.items(), key=lambda pair: -pair[1])
    shown = "; ".join(f"{owner} {quantity(time, 's')}" for owner, time in largest[:MOST_OWNERS])
    more = sum(time for _, time in largest[MOST_OWNERS:])
    return f"{shown}; others {quantity(more, 's')}" if more else shown


def _turns(s: Step) -> list[tuple[float, float, str]]:
    """Links of one owner that follow each other, as one."""
    turns: list[tuple[float, float, str]] = []
    for start, time, owner in _links(s):
        if turns and turns[-1][2] == owner:
            turns[-1] = turns[-1][0], turns[-1][1] + time, owner
        else:
            turns.append((start, time, owner))
    return turns


def memory(part: Ranks) -> str:
    """`29.4 GB of a rank, 54.6 GB to spare; weights 1.2 GB, ...`."""
    held = sorted(part.holds, key=lambda pair: -pair[1])
    parts = ", ".join(f"{kind} {quantity(n, 'bytes')}" for kind, n in held if n)
    spare = part.available_bytes - part.held_bytes
    word = "to spare" if part.fits else "too much: it does not fit"
    text = f"{quantity(part.held_bytes, 'bytes')} of a rank, {quantity(abs(spare), 'bytes')} {word}"
    return f"{text}; {parts}"
