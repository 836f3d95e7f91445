"""A step over many ranks as a Chrome trace, for Perfetto: a group of lanes for ranks alike."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpuir.backends.terminal import Terminal
from gpuir.simulate.step import GraphRun, RankPart, Step

MOST = 200_000  # kernels in a trace: of more, those of each pass are shown once a rank
PASSES = "passes"
Event = dict[str, Any]


class Shown(NamedTuple):
    """A pass of a rank, from when to when, and the run whose kernels it launches: none where it
    waits for sums of gradients."""

    name: str
    start_s: float
    end_s: float
    run: GraphRun | None


def step_trace(s: Step, layout: Terminal) -> str | bytes:
    """A JSON object with an event a line: a process for ranks that are alike, a thread a lane. For
    a file that ends in .gz, compressed."""
    lines = [json.dumps(e, allow_nan=False) for e in _events(s)]
    about = {
        "model": s.model,
        "cluster": s.cluster,
        "parallel": str(s.parallel),
        "time_s": s.time_s,
    }
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about}, allow_nan=False)
    text = f'{head[:-1]},\n"traceEvents": [\n{",".join(chr(10) + x for x in lines)}\n]}}\n'
    return gzip.compress(text.encode(), mtime=0) if layout.file.endswith(".gz") else text


def _events(s: Step) -> Iterator[Event]:
    ranks = [list(_passes(s, r)) for r in range(len(s.parts))]
    kernels = sum(len(x.run.timeline.launches) for some in ranks for x in some if x.run)
    stride = s.parallel.ranks // len(s.parts)
    for r, some in enumerate(ranks):
        first, last = r * stride, (r + 1) * stride - 1
        name = f"rank {first}" if first == last else f"ranks {first} to {last}, alike"
        if s.is_mixed:
            name = f"{name.removesuffix(', alike')}: {kinds_of(s.parts[r])}"
        yield _named("process_name", r, 0, name)
        yield _named("thread_name", r, 0, PASSES)
        lanes: dict[str, int] = {PASSES: 0}
        seen: set[int] = set()
        free: dict[str, float] = {}  # of lanes of collectives, which may go on beside what follows
        for x in some:
            yield _complete(x.name, r, 0, start_s=x.start_s, end_s=x.end_s)
            if x.run is None:
                continue
            if kernels > MOST and id(x.run.graph) in seen:
                continue
            seen.add(id(x.run.graph))
            for span in x.run.timeline.spans:
                if span.kind not in ("kernel", "copy"):
                    continue
                if span.lane not in lanes:
                    lanes[span.lane] = len(lanes)
                    yield _named("thread_name", r, lanes[span.lane], span.lane)
                start = x.start_s + span.start_s
                if span.lane.startswith("communication"):
                    start = max(start, free.get(span.lane, 0.0))
                free[span.lane] = end = start + span.end_s - span.start_s
                lane, args = lanes[span.lane], {"pass": x.name}
                yield _complete(span.name, r, lane, start_s=start, end_s=end, args=args)


def kinds_of(part: RankPart) -> str:
    """`a100-sxm-80gb`, or of several kinds `the slower of h100-sxm-80gb and a100-sxm-80gb`."""
    names = list(dict.fromkeys(x.gpu for x in part.where))
    return names[0] if len(names) == 1 else f"the slowest of {', '.join(names)}"


def _passes(s: Step, rank: int) -> Iterator[Shown]:
    part = s.parts[rank]
    if s.pipelined is None:
        now = 0.0
        for run in part.runs:
            for i in range(run.times):
                name = run.name if run.times == 1 else f"{run.name} {i}"
                yield Shown(name, now, now + run.timeline.time_s, run)
                now += run.timeline.time_s
        return
    order = s.pipelined.orders[rank]
    clock = zip(s.pipelined.starts[rank], s.pipelined.ends[rank], strict=True)
    for task, (start, end) in zip(order, clock, strict=True):
        run = None if task.kind == "sums" else s.run_of(rank, task)
        chunk = f", chunk {task.chunk}" if s.parallel.chunks > 1 else ""
        once = task.kind in ("sums", "norm", "update")
        named = task.kind if once else f"{task.kind} {task.microbatch}"
        yield Shown(f"{named}{chunk}", start, end, run)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(
    name: str, pid: int, tid: int, *, start_s: float, end_s: float, args: Mapping[str, Any] = {}
) -> Event:
    at = {"ts": round(start_s * 1e6, 3), "dur": round((end_s - start_s) * 1e6, 3)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **at, "args": args}
