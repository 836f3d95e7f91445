"""A step of a model over the ranks of a cluster: as a table for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

from gpuir.backends import structured
from gpuir.backends.structured import record
from gpuir.backends.terminal import Layout, Page, gains_text, to_fit_text, traffic
from gpuir.report.units import percent, quantity, rate
from gpuir.simulate.memory import available_bytes
from gpuir.simulate.microbatches import Task
from gpuir.simulate.step import Part, Step
from gpuir.targets.load import load_target
from gpuir.targets.support import title_on

SCHEMA = "gpuir.step/1"
MOST_OWNERS = 5  # of the critical path, named in one line


def json_text(s: Step, batch: int | None) -> str:
    """`{"schema", "model", "cluster", "parallel", "time_s", ..., "parts": [...]}`."""
    return structured.json_text(
        SCHEMA,
        **record(
            s,
            "model cluster target parallel time_s interval flops peak_flops_per_s mfu params "
            "exposed_s idle_s assumed tp_shared",
        ),
        gains=[record(x, "cause gain_s") for x in s.gains],
        fits=s.fits,
        to_fit=[record(x, "change option spare_bytes") for x in s.to_fit],
        ranks=s.parallel.ranks,
        profile=s.profile.name,
        batch=batch,
        parts=[
            record(
                part,
                "kernels_s traffic held_bytes available_bytes fits params",
                gpus=[
                    record(x, "gpu first count", kernels_s=part.kernels_on[x.gpu])
                    for x in part.where
                ],
                holds=dict(part.holds),
                runs=[
                    record(r, "name times", time_s=r.timeline.time_s, host_s=r.timeline.host_s)
                    for r in part.runs
                ],
            )
            for part in s.parts
        ],
    )


def report(s: Step, batch: int | None, layout: Layout, path: bool = False) -> str:
    """What a step takes, what of it is computed, sent and waited for, what ranks hold; with `path`
    also each turn of the chain that decides the end."""
    page = Page(layout.width, layout.color)
    gpus = f"{s.parallel.ranks:,} GPU{'s' * (s.parallel.ranks > 1)}"
    lacks = "" if s.fits else f"does not fit, {quantity(-s.spare_bytes, 'bytes')} short: "
    page.heading(f"{lacks}{s.model} on {gpus} of {s.cluster} ({s.target})")
    page.line()
    for label, text in head(s, batch):
        page.wrapped(label, text)
    page.line()
    if s.is_mixed:
        page.table(KINDS, list(_kinds(s)), drop=("has", "weights", "of the step"))
        page.line()
    if path:
        page.table([("starts", True), ("takes", True), ("owner", False)], list(_turns(s)))
        page.line()
    for i, text in enumerate(s.assumed):
        page.wrapped("" if i else "assumed", text)
    return page.text()


KINDS = (
    *(("ranks", False), ("GPU", False), ("kernels", True), ("of the step", True)),
    *(("weights", True), ("holds", True), ("has", True)),
)


def _kinds(s: Step) -> Iterator[tuple[str, ...]]:
    """Which ranks have which GPU, how long their kernels take there, and what they hold."""
    for part in s.parts:
        for x in part.where:
            kernels_s = part.kernels_on[x.gpu]
            yield (
                f"{x.first} to {x.first + x.count - 1}" if x.count > 1 else str(x.first),
                x.gpu,
                quantity(kernels_s, "s"),
                percent(kernels_s, s.time_s),
                f"{part.params:,}",
                quantity(part.held_bytes, "bytes"),
                quantity(available_bytes(load_target(x.gpu)), "bytes"),
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


def _turns(s: Step) -> Iterator[list[str]]:
    """Links of one owner that follow each other, as one."""
    turns: list[tuple[float, float, str]] = []
    for start, time, owner in _links(s):
        if turns and turns[-1][2] == owner:
            turns[-1] = turns[-1][0], turns[-1][1] + time, owner
        else:
            turns.append((start, time, owner))
    for start, time, owner in turns:
        yield [quantity(start, "s"), quantity(time, "s"), owner]


def memory(part: Part) -> str:
    """`29.4 GB of a rank, 54.6 GB to spare; weights 1.2 GB, ...`."""
    held = sorted(part.holds, key=lambda pair: -pair[1])
    parts = ", ".join(f"{kind} {quantity(n, 'bytes')}" for kind, n in held if n)
    spare = part.available_bytes - part.held_bytes
    word = "to spare" if part.fits else "too much: it does not fit"
    text = f"{quantity(part.held_bytes, 'bytes')} of a rank, {quantity(abs(spare), 'bytes')} {word}"
    return f"{text}; {parts}"
