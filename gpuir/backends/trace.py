"""The run as a trace for Perfetto and chrome://tracing, named as PyTorch's profiler names things.

Events are those of Google's "Trace Event Format" (JSON object format; docs/guide/trace.md).
Categories, and the `correlation` that ties a kernel to its launch, are as torch.profiler writes
them (pytorch/kineto, libkineto/src/output_json.cpp), so that tools for its traces can read ours.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from gpuir.backends.json_csv import kernel_record
from gpuir.backends.structured import record
from gpuir.backends.terminal import Terminal
from gpuir.ir.graph import Loc
from gpuir.ir.phases import PHASES
from gpuir.report.answer import Answer
from gpuir.report.kernels import KernelRow
from gpuir.report.names import module_of, node_name
from gpuir.simulate.launches import Launch
from gpuir.simulate.layout import MEMORY_KINDS
from gpuir.simulate.spans import HOST, Span

Event = dict[str, Any]
PROCESS = 200  # so far are processes apart: room for the numbers of 128 streams and more
MODEL = "model"
CRITICAL = "critical path"
STEP = "ProfilerStep#0"  # torch.profiler's name of an iteration, by which tools find it
SHARES = {"flop/s": "peak_share", "memory bandwidth": "dram_share"}
IDLE = dict.fromkeys(SHARES, 0.0)
DEVICE = {"kernel": "kernel", "copy": "gpu_memcpy", "loop": "gpu_user_annotation"}
SHOWN = (
    "op",
    "shape",
    "tile",
    "flops",
    "bytes",
    "dram_bytes",
    "cost",
    "locs",
    "module",
    "phase",
    "status",
)


def trace(summaries: Sequence[Answer], layout: Terminal) -> str | bytes:
    """A JSON object with an event a line: a process a target and profile, a thread a lane. For a
    file that ends in .gz, compressed."""
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": summaries[0].model,
        "distributedInfo": {"backend": "none", "rank": 0, "world_size": 1},
        "deviceProperties": [_device(i, s) for i, s in enumerate(summaries)],
        "otherData": {"runs": [_about(s) for s in summaries]},
    }
    lines: list[str] = []
    taken = 1
    for i, s in enumerate(summaries):
        lines += (json.dumps(event, allow_nan=False) for event in _RunEvents(s, i, taken).events())
        taken += len(s.timeline.launches)
    events = ",\n".join(lines)
    text = f'{json.dumps(head, allow_nan=False)[:-1]},\n"traceEvents": [\n{events}\n]}}\n'
    return gzip.compress(text.encode(), mtime=0) if layout.file.endswith(".gz") else text


def _device(i: int, s: Answer) -> dict[str, Any]:
    numbers = {n.field: n.value for n in s.device.numbers}
    known = {"totalGlobalMem": numbers.get("dram.bytes"), "numSms": numbers.get("sms")}
    named = {"id": i, "name": s.device.title or s.device.name}
    return named | {name: value for name, value in known.items() if value is not None}


def _about(s: Answer) -> dict[str, Any]:
    """What a reader should know of a run, in the words of the JSON report."""
    return record(
        s,
        "model latency_s assumed warnings",
        target=s.device.name,
        profile=s.profile,
        predictors=s.by,
        interval_s=s.interval,
    )


@dataclass(frozen=True)
class _Op:
    """What the host does for one op of the model, and its launches."""

    loc: Loc
    lane: str
    start_s: float
    end_s: float
    launches: tuple[int, ...] = ()


@dataclass(frozen=True)
class _RunEvents:
    """The events of one run, the `place`th of the trace. Launch `i` and its kernel have the
    correlation `taken + i`; a CUDA graph and all its kernels that of its first."""

    s: Answer
    place: int
    taken: int

    def events(self) -> Iterator[Event]:
        yield from self._names()
        # what encloses other events comes before them
        yield from sorted(self._host(), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
        for lane in self._lanes:
            if not _is_host(lane):
                spans = [x for x in self.s.timeline.spans if x.lane == lane]
                yield from map(self._on_device, spans)
                yield from self._shares(lane, spans)
        yield from self._arrows()
        for x in self.s.timeline.critical:
            yield self._complete("critical_path", x.name or x.kind, replace(x, lane=CRITICAL), {})
        yield from self._memory()

    # ------------------------------------------------------------------------ the lanes

    @property
    def pid(self) -> int:
        return PROCESS * (self.place + 1)

    @cached_property
    def _lanes(self) -> dict[str, int]:
        """The thread of each lane, those of the host first. Perfetto takes threads of one number
        for one, in whatever process, and the one that has its process's number for the main one."""
        lanes = {HOST, *(x.lane for x in (*self.s.timeline.spans, *self._ops))}
        ordered = sorted(
            lanes, key=lambda lane: (lane != HOST, not _is_host(lane), len(lane), lane)
        )
        return {lane: self.pid + i for i, lane in enumerate((*ordered, CRITICAL))}

    def _names(self) -> Iterator[Event]:
        """Metadata: what the process and its threads are called, and their order."""
        s = self.s
        name = f"{s.model} on {s.device.name} under {s.profile}"
        yield self._named("process_name", self.pid, name=name)
        yield self._named("process_sort_index", self.pid, sort_index=self.place)
        for lane, tid in self._lanes.items():
            yield self._named("thread_name", tid, name=lane)
            yield self._named("thread_sort_index", tid, sort_index=tid)

    def _named(self, what: str, tid: int, **args: str | int) -> Event:
        return {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": args}

    def _complete(
        self, cat: str, name: str, x: Span | _Op, args: Event, end_s: float | None = None
    ) -> Event:
        """Something that takes time. Its ends are rounded, not its length: what lies inside another
        event must not come to stick out."""
        start, end = _us(x.start_s), _us(x.end_s if end_s is None else end_s)
        at = {"pid": self.pid, "tid": self._lanes[x.lane], "ts": start}
        return {"ph": "X", "cat": cat, "name": name, **at, "dur": round(end - start, 3)} | {
            "args": args
        }

    # ------------------------------------------------------------------------ the host

    def _host(self) -> Iterator[Event]:
        spans = self.s.timeline.spans
        yield self._complete("user_annotation", STEP, _Op("", HOST, 0.0, self._end_s), {})
        for _, ops in groupby(self._ops, lambda op: op.lane):
            yield from self._modules(list(ops))
        for op in self._ops:
            args = {"External id": self._external[op.launches[0]], "loc": op.loc}
            yield self._complete("cpu_op", _op_name(op.loc), op, args)
        for x in spans:
            if _is_host(x.lane) and x.kind != "launch" and x.end_s > x.start_s:
                yield self._complete("user_annotation", x.name, x, {})
        for i, x in self._calls.items():
            if x.launch is None:
                args = {"correlation": self.taken + i}
                yield self._complete("cuda_runtime", "cudaGraphLaunch", x, args)
            else:
                yield self._complete("cuda_runtime", "cudaLaunchKernel", x, self._links(i))

    @cached_property
    def _end_s(self) -> float:
        return max([self.s.latency_s, *(x.end_s for x in self.s.timeline.spans)])

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """For each launch the first that the same call launches: itself, or where each thread of
        the host replays a CUDA graph in its turn, that graph's first."""
        lanes = [x.lane for x in self.s.timeline.launches]
        if not self.s.timeline.profile.host.graph:
            return tuple(range(len(lanes)))
        found: list[int] = []
        for i, lane in enumerate(lanes):
            found.append(found[-1] if i and lane == lanes[i - 1] else i)
        return tuple(found)

    @cached_property
    def _calls(self) -> dict[int, Span]:
        """The calls that launch something and take time, by the first that they launch."""
        spans = self.s.timeline.spans
        lasting = [x for x in spans if x.kind == "launch" and x.end_s > x.start_s]
        graphs = sorted((x for x in lasting if x.launch is None), key=lambda x: x.start_s)
        alone = {x.launch: x for x in lasting if x.launch is not None}
        return alone or dict(zip(dict.fromkeys(self._firsts), graphs, strict=False))

    def _correlation(self, launch: int) -> int:
        return self.taken + self._firsts[launch]

    def _links(self, launch: int) -> Event:
        """The numbers that tie a kernel to its launch call, and both to their op."""
        op = {"External id": self._external[launch]} if launch in self._external else {}
        return op | {"correlation": self._correlation(launch)}

    @cached_property
    def _external(self) -> dict[int, int]:
        """The number of the op that a launch is for."""
        return {x: self.taken + i for i, op in enumerate(self._ops) for x in op.launches}

    def _loc(self, x: Launch) -> Loc:
        """The model node that the launch's kernel is named after."""
        return self._anchors.get(x.path, x.op)

    @cached_property
    def _anchors(self) -> dict[tuple[str, ...], Loc]:
        return {x.path: x.anchor for x in self.s.kernels if x.locs}

    @cached_property
    def _ops(self) -> tuple[_Op, ...]:
        """The ops of the model: on the host, or where launching them takes it no time, as in a CUDA
        graph, on the device."""
        return tuple(self._host_ops()) or tuple(self._device_ops())

    def _host_ops(self) -> Iterator[_Op]:
        """Each with what the host does before and after its launches, up to where something else
        begins."""
        run, host = self.s.timeline, self.s.timeline.profile.host
        calls = [(i, x) for i, x in self._calls.items() if x.launch is not None]
        begins: dict[str, list[float]] = {}
        for x in sorted(run.spans, key=lambda x: x.start_s):
            begins.setdefault(x.lane, []).append(x.start_s)
        free = dict.fromkeys(begins, 0.0)
        for (_, lane), group in groupby(calls, lambda x: (run.launches[x[0]].op, x[1].lane)):
            pairs = list(group)
            made, own = tuple(i for i, _ in pairs), [x for _, x in pairs]
            launch = run.launches[made[0]]
            start = own[0].start_s - host.before.get(launch.kind, host.before_s)
            end, after = own[-1].end_s, bisect_right(begins[lane], own[-1].start_s)
            end = min([end + host.after_s, self._end_s, *begins[lane][after : after + 1]])
            yield _Op(self._loc(launch), lane, max(start, free[lane]), end, made)
            free[lane] = end

    def _device_ops(self) -> Iterator[_Op]:
        """Each from its first kernel to its last, if there is one stream."""
        run = self.s.timeline
        if len({x.lane for x in run.spans if x.kind == "kernel"}) != 1:
            return
        kernels = [(x.launch, x) for x in run.spans if x.kind == "kernel"]
        launched = [(i, x) for i, x in kernels if i is not None]
        for _, group in groupby(launched, lambda x: run.launches[x[0]].op):
            pairs = list(group)
            loc = self._loc(run.launches[pairs[0][0]])
            start, end = pairs[0][1].start_s, pairs[-1][1].end_s
            yield _Op(loc, MODEL, start, end, tuple(i for i, _ in pairs))

    def _modules(self, ops: Sequence[_Op]) -> list[Event]:
        """The modules that the ops of one lane are in, nested as calls are, the outer ones first;
        the phase of a training step is the outermost."""
        events: list[Event] = []
        opened: list[tuple[str, _Op]] = []
        for before, op in zip((None, *ops), (*ops, None), strict=True):
            path = _scopes(op.loc) if op else ()
            alike = _alike([name for name, _ in opened], path)
            while len(opened) > alike and before:
                whole = ".".join(name for name, _ in opened)
                name, first = opened.pop()
                args = {"module": whole}
                events.append(self._complete("python_function", name, first, args, before.end_s))
            opened += [(name, op) for name in path[alike:] if op]
        return events[::-1]

    # ------------------------------------------------------------------------ the device

    @cached_property
    def _kernels(self) -> dict[tuple[str, ...], tuple[str, Event]]:
        """A kernel's name and arguments by its path; of two branches, those of the one that
        runs."""
        ordered = sorted(self.s.kernels, key=lambda x: x.runs)
        return {x.path: (f"{x.kind} {x.shape}".rstrip(), _explained(x)) for x in ordered}

    def _kernel(self, x: Span) -> tuple[str, Event]:
        if x.launch is None:
            return x.name, {}
        return self._kernels.get(self.s.timeline.launches[x.launch].path, (x.name, {}))

    def _on_device(self, x: Span) -> Event:
        name, explained = self._kernel(x)
        stream = [lane for lane in self._lanes if not _is_host(lane)].index(x.lane)
        args = {"device": self.place, "context": 1, "stream": stream}
        if x.launch is not None:
            args |= self._links(x.launch)
        return self._complete(DEVICE[x.kind], name, x, args | explained)

    def _arrows(self) -> Iterator[Event]:
        """From each launch call to its kernel; from that of a CUDA graph to the first of all."""
        for x in self.s.timeline.spans:
            if x.kind == "kernel" and x.launch in self._calls:
                number = self._correlation(x.launch)
                yield self._arrow("s", self._calls[x.launch], number)
                yield self._arrow("f", x, number) | {"bp": "e"}

    def _arrow(self, ph: str, x: Span, number: int) -> Event:
        at = {"pid": self.pid, "tid": self._lanes[x.lane], "ts": _us(x.start_s)}
        return {"ph": ph, "cat": "ac2g", "name": "ac2g", "id": number, **at}

    # ------------------------------------------------------------------------ counters

    def _counter(self, name: str, at_s: float, args: Event) -> Event:
        return {"ph": "C", "name": name, "pid": self.pid, "ts": _us(at_s), "args": args}

    def _shares(self, lane: str, spans: Sequence[Span]) -> Iterator[Event]:
        """What the kernels of one stream achieve of what the device is listed with, as far as the
        predictor says; 0 while nothing runs."""
        name, last = f"% of peak, {lane}", IDLE
        for x, after in zip(spans, (*spans[1:], None), strict=True):
            facts = self._kernel(x)[1].get("cost", {}).get("facts", {})
            shares = {title: round(100 * facts.get(fact, 0), 1) for title, fact in SHARES.items()}
            if x.kind == "loop":  # trips like the one before
                shares = last
            if shares != last:
                yield self._counter(name, x.start_s, shares)
            last = shares
            if last != IDLE and (after is None or after.start_s > x.end_s):
                yield self._counter(name, x.end_s, IDLE)
                last = IDLE

    def _memory(self) -> Iterator[Event]:
        """What is allocated, by kind, whenever that changes; of a loop what one trip holds."""
        m, run = self.s.memory, self.s.timeline
        rows: list[list[int]] = m.live.T.tolist()
        place = {moment.path: i for i, moment in enumerate(m.moments)}
        kinds = [i for i in range(len(MEMORY_KINDS)) if any(row[i] for row in rows)]
        held: list[int] = []
        paths = ((), *(x.path for x in run.launches))
        for path, at_s in zip(paths, (0.0, *run.starts), strict=True):
            row = rows[place[path]] if path in place else held
            if row != held:
                yield self._counter("memory, bytes", at_s, {MEMORY_KINDS[i]: row[i] for i in kinds})
            held = row


def _explained(x: KernelRow) -> Event:
    """Why a kernel takes its time, in the words of the JSON report."""
    known = kernel_record(x)
    shown = {name: known[name] for name in SHOWN}
    occupancy = x.cost.fact("occupancy")
    # under kineto's name for it
    kineto = {} if occupancy is None else {"est. achieved occupancy %": round(100 * occupancy)}
    return kineto | shown


def _is_host(lane: str) -> bool:
    return lane.split()[0] not in ("stream", "copy", "communication")


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e9) / 1e3


def _op_name(loc: Loc) -> str:
    """`m.onnx:/encoder/MatMul_3/backward` → `MatMul_3`."""
    parts = [part for part in node_name(loc).split("/") if part and part not in PHASES]
    return parts[-1] if parts else loc


def _scopes(loc: Loc) -> tuple[str, ...]:
    """`m.pt2:encoder.layer.0/linear/backward` → `backward`, `encoder`, `layer.0`."""
    phase = node_name(loc).rpartition("/")[2]
    scopes = [phase] if phase in PHASES else []
    for word in module_of(loc):
        if word.isdecimal() and scopes:
            scopes[-1] += f".{word}"
        else:
            scopes.append(word)
    return tuple(scopes)


def _alike(a: Sequence[str], b: Sequence[str]) -> int:
    """With how many words both begin."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
