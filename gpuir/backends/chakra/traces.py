"""Execution traces in Chakra's format, a file a rank, as ASTRA-sim replays them.

What ASTRA-sim reads of a node, and in which unit, follows its own source (astra-sim/astra-sim):
`astra-sim/workload/Workload.cc` (durations in microseconds, `pg_name`, sizes in bytes, the files
`PREFIX.RANK.et` and that of communicator groups), `feeder_v3/et_feeder_node_attr.h` (names of
attributes), and `system/astraccl/native_collectives/collective_algorithm/Ring.cc` (a size is that
of what one rank gives: its part in an all-gather, all of it in a reduce-scatter).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from gpuir.backends.chakra.schema import (
    COMM_TYPES,
    NODE_TYPES,
    VERSION,
    NodeType,
    attribute,
    delimited,
    messages,
)
from gpuir.backends.terminal import Terminal
from gpuir.backends.texts import only
from gpuir.files import Folder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.report.answer import Answer
from gpuir.report.kernels import KernelRow, kernels_of
from gpuir.report.units import quantity
from gpuir.simulate.launches import MOST_SPREAD, written_out
from gpuir.simulate.microbatches import Pipelined
from gpuir.simulate.step import GraphRun, Step
from gpuir.simulate.timeline import Timeline, costed_launches

PREFIX = "workload"
LARGEST = 16 << 30  # bytes of all files together
LEFT_OUT = "the host, where a long loop is unrolled: times are those of the kernels"
Axes = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides of a group of ranks


def chakra(summaries: Sequence[Answer], _: Terminal) -> Folder:
    """What `traces` gives of one run."""
    s = only(summaries, "chakra")
    return traces([StageProgram.of([_Ran(s.device.name, s.graph, s.timeline, s.kernels)])])


def step_traces(step: Step) -> Folder:
    """What `traces` gives of a step of many ranks: microbatch by microbatch, with what stages of a
    pipeline send each other."""

    for part in step.parts:
        if len(part.kernels_on) > 1:
            raise UsageError(
                f"@{step.model}: all ranks in a trace must have the same GPU",
                expected="stages of a pipeline that each use one kind of GPU",
                found=f"{', '.join(part.kernels_on)} in one",
                fix="choose --pp by the kinds of nodes, or use a cluster with one kind",
            )

    if step.pipelined is None:
        whole = [(_ran(r), r.times) for part in step.parts for r in part.runs]
        return traces([StageProgram.of([r for r, times in whole for _ in range(times)])])
    return traces([_stage(step, step.pipelined, rank) for rank in range(len(step.parts))])


def _stage(step: Step, pipelined: Pipelined, rank: int) -> StageProgram:
    """What a rank of a pipeline does: it has the parts `rank`, `rank` plus the number of ranks,
    and so on of the model."""
    count, parts = len(pipelined.orders), len(pipelined.times)
    known = {id(run): _ran(run) for run in step.parts[rank].runs}
    walk, entries = _RankProgress(), list[TraceNode]()
    for task in pipelined.orders[rank]:
        if task.kind == "sums":  # nothing runs: what follows waits
            continue
        part = rank + count * task.chunk
        ahead, back = task.kind == "forward", task.kind == "backward"
        arrived: tuple[int, ...] = ()
        tag = task.microbatch * 2 * parts  # and the link, and the direction
        if ahead and part:
            nbytes = pipelined.sent[part - 1]
            message = Message((part - 1) % count, nbytes, tag + 2 * part - 2, False)
            entries.append(walk.received(message))
            arrived = (walk.count,)
        if back and part + 1 < parts:
            nbytes = pipelined.sent_back[part]
            message = Message((part + 1) % count, nbytes, tag + 2 * part + 1, False)
            entries.append(walk.received(message))
            arrived = (walk.count,)
        if task.kind in ("norm", "update"):
            arrived = walk.sums.after()
        entries += walk.steps(known[id(step.run_of(rank, task))], arrived)
        if ahead and part + 1 < parts:
            message = Message((part + 1) % count, pipelined.sent[part], tag + 2 * part, True)
            entries.append(walk.sent(message, pipelined.sends[part]))
        if back and part:
            nbytes = pipelined.sent_back[part - 1]
            message = Message((part - 1) % count, nbytes, tag + 2 * part - 1, True)
            entries.append(walk.sent(message, pipelined.sends_back[part - 1]))
    return StageProgram(tuple(known.values()), tuple(entries))


@dataclass(frozen=True)
class _Ran:
    """A costed graph, and when its kernels run; `sums` are collectives that only the update waits
    for, by their first result."""

    target: str
    graph: Graph
    timeline: Timeline
    kernels: tuple[KernelRow, ...]
    sums: frozenset[str] = frozenset()

    @property
    def is_launched(self) -> bool:
        """Whether the timeline has each launch, and none as more trips of a loop."""
        launches = sum(x.launches + x.rest for x in self.kernels if x.runs)
        return len(self.timeline.launches) == launches


def _ran(run: GraphRun) -> _Ran:
    found = k.sums_of_gradients(run.graph) if run.name == "last" else ()
    sums = frozenset(v.name for v in found)
    return _Ran(run.gpu, run.graph, run.timeline, kernels_of(run.graph), sums)


def traces(stages: Sequence[StageProgram]) -> Folder:
    """Of what the ranks of each stage run, of one without a pipeline: `workload.RANK.et` for each
    rank, and `workload.json` with the groups of ranks that communicate. UsageError where that is
    too much, or a collective has no form in Chakra."""
    world = _World(tuple(stages))
    size = sum(x.ranks * len(world.trace(i, 0)) for i, x in enumerate(stages))
    if size > LARGEST:
        raise UsageError(
            f"@{stages[0].runs[0].graph.name}: traces of {world.ranks:,} ranks are too large",
            expected=f"at most {quantity(LARGEST, 'bytes')}",
            found=f"{quantity(size, 'bytes')}",
            fix="use fewer ranks or fewer layers",
        )
    return Folder(world.files)


@dataclass(frozen=True)
class Message:
    """What a rank sends (`sends`) to its neighbour in another `stage`, or gets from there."""

    stage: int
    bytes: int
    tag: int
    sends: bool


@dataclass(frozen=True)
class TraceNode:
    """One node of a trace: a kernel, collectives that are launched together (`call` is the first),
    or, without a kernel, what the host does until a launch. It waits for those whose results it
    reads (`data`) and for others (`control`), such as the one before it on its lane. Ids count
    from 1."""

    id: int
    name: str
    data: tuple[int, ...]
    control: tuple[int, ...]
    micros: int
    kernel: KernelRow | None = None
    message: Message | None = None

    @property
    def collectives(self) -> tuple[t.Collective, ...]:
        op = self.kernel.node.op if self.kernel else None
        return op.collectives if isinstance(op, k.Collective) else ()

    @property
    def call(self) -> t.Collective | None:
        return self.collectives[0] if self.collectives else None


@dataclass(frozen=True)
class StageProgram:
    """What every rank of a stage runs, in order; ranks differ in whom they communicate with."""

    runs: Sequence[_Ran] = field(repr=False)
    steps: tuple[TraceNode, ...] = field(repr=False)

    @classmethod
    def of(cls, runs: Sequence[_Ran]) -> StageProgram:
        """Runs one after another."""
        walk = _RankProgress()
        return cls(runs, tuple(x for r in runs for x in walk.steps(r)))

    @property
    def ranks(self) -> int:
        return self.runs[0].graph.ranks

    @cached_property
    def axes(self) -> list[Axes]:
        """Along which ranks communicate."""
        return list(dict.fromkeys(_axes(x.call) for x in self.steps if x.call))

    @cached_property
    def pieces(self) -> list[bytes | _Calls | TraceNode]:
        """The nodes in order; those side by side that are alike on all ranks as one."""
        pieces: list[bytes | _Calls | TraceNode] = []
        for alike, some in groupby(self.steps, lambda x: not x.call and not x.message):
            if alike:
                pieces.append(b"".join(delimited(_node(x)) for x in some))
            else:
                pieces += (_Calls(x, x.call) if x.call else x for x in some)
        return pieces


@dataclass(frozen=True)
class _World:
    """All ranks: those of one stage are neighbours."""

    stages: tuple[StageProgram, ...]

    @property
    def ranks(self) -> int:
        return sum(x.ranks for x in self.stages)

    def place(self, stage: int, rank: int) -> int:
        """A rank's number among all, by that in its stage."""
        return sum(x.ranks for x in self.stages[:stage]) + rank

    def group(self, stage: int, rank: int, axes: Axes) -> tuple[int, ...]:
        return tuple(sorted(self.place(stage, r) for r in t.members(rank, *axes)))

    @cached_property
    def groups(self) -> dict[tuple[int, ...], int]:
        """The groups of ranks that communicate, but for that of all, each under its number."""
        found = dict.fromkeys(
            self.group(i, r, axes)
            for i, x in enumerate(self.stages)
            for axes in x.axes
            for r in range(x.ranks)
        )
        return {x: i for i, x in enumerate((x for x in found if len(x) < self.ranks), 1)}

    @property
    def files(self) -> Iterator[tuple[str, bytes]]:
        groups = {str(i): ranks for ranks, i in self.groups.items()}
        yield f"{PREFIX}.json", f"{json.dumps(groups)}\n".encode()
        for i, x in enumerate(self.stages):
            for rank in range(x.ranks):
                yield f"{PREFIX}.{self.place(i, rank)}.et", self.trace(i, rank)

    def trace(self, stage: int, rank: int) -> bytes:
        """The file of one rank of a stage."""
        program = self.stages[stage]
        own = {a: self.groups.get(self.group(stage, rank, a), 0) for a in program.axes}
        parts = [self._head(stage, rank)]
        for x in program.pieces:
            match x:
                case bytes():
                    parts.append(x)
                case _Calls():
                    parts.append(x[own[_axes(x.call)]])
                case TraceNode():
                    other = self.place(x.message.stage, rank) if x.message else 0
                    parts.append(delimited(_node(x, 0, (self.place(stage, rank), other))))
        return b"".join(parts)

    def _head(self, stage: int, rank: int) -> bytes:
        runs = self.stages[stage].runs
        ran = runs[0]
        mesh = [*ran.graph.mesh, *[("pp", len(self.stages))] * (len(self.stages) > 1)]
        about = {
            "model": ran.graph.name,
            "target": ran.target,
            "profile": ran.timeline.profile.name,
            "cluster": ran.graph.cluster or "",
            "mesh": ", ".join(f"{axis}={n}" for axis, n in mesh),
            "left_out": "" if all(r.is_launched for r in runs) else LEFT_OUT,
        }
        found = [attribute(name, _text(x), "string_val") for name, x in about.items() if x]
        numbers = {"rank": self.place(stage, rank), "ranks": self.ranks}
        found += [attribute(name, n, "int64_val") for name, n in numbers.items()]
        return delimited(messages().GlobalMetadata(version=VERSION, attr=found))


@dataclass(frozen=True)
class _Calls:
    """A collective: its bytes by the number of the group, made once for all ranks of that group."""

    step: TraceNode
    call: t.Collective
    made: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def __getitem__(self, group: int) -> bytes:
        if group not in self.made:
            self.made[group] = delimited(_node(self.step, group))
        return self.made[group]


def _axes(call: t.Collective) -> Axes:
    return call.sizes, call.strides


@dataclass
class _Lane:
    """One after another: the last step, and what all of them take, in seconds. Durations are whole
    microseconds in Chakra: each is rounded so that all up to it are off by half of one at most."""

    last: int = 0
    end_s: float = 0.0

    def micros(self, time_s: float) -> int:
        before, self.end_s = self.end_s, self.end_s + time_s
        return round(self.end_s * 1e6) - round(before * 1e6)

    def after(self, *others: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(x for x in (self.last, *others) if x))


@dataclass
class _RankProgress:
    """How far a rank is: runs follow each other on the same lanes."""

    count: int = 0
    host: _Lane = field(default_factory=_Lane)
    compute: _Lane = field(default_factory=_Lane)
    network: _Lane = field(default_factory=_Lane)
    sums: _Lane = field(default_factory=_Lane)

    def steps(self, ran: _Ran, arrived: tuple[int, ...] = ()) -> Iterator[TraceNode]:
        """What one rank runs, in the order of launches; kernels that read no result wait for what
        has `arrived`."""
        _check_count(ran, self.count)
        kernels = {x.path: x for x in ran.kernels if x.runs}
        begun = iter(_host(ran))
        ids: list[int] = []  # of each launch
        made: dict[str, tuple[int, ...]] = {}  # launches a value comes from, views looked through
        launches, _ = costed_launches(ran.graph, apart=True)
        for launch in written_out(launches.found, ran.graph.name):
            kernel = kernels[launch.path]
            if launch.empty:
                if isinstance(kernel.node.op, k.View):
                    made.update((v.name, launch.after) for v in kernel.node.results)
                continue
            time_s, waits = next(begun, (0.0, None))
            if (micros := self.host.micros(time_s)) or waits is not None:
                control = self.host.after(*(() if waits is None else (ids[waits],)))
                yield self._next(TraceNode(self.count + 1, "host", (), control, micros), self.host)
            lane = self.network if launch.group else self.compute
            if launch.path[0] in ran.sums:
                lane = self.sums
            read = launch.after
            if launch.group and len(launch.path) == 1:  # it waits for kernels before it, too
                read = {x for v in kernel.node.op.operands for x in made.get(v.name, ())}
            data = tuple(ids[x] for x in launch.after if x in read) or arrived
            beside = [ids[x] for x in launch.after if x not in read]
            ordered = (
                lane.after() if launch.group or ran.timeline.profile.streams == 1 or not ids else ()
            )
            control = dict.fromkeys((*ordered, *beside, *self.host.after()))
            taken = 0.0 if kernel.is_unlinked else kernel.cost.time_s + ran.timeline.marks.gap_s
            made.update((v.name, (len(ids),)) for v in kernel.node.results)
            step = TraceNode(
                id=self.count + 1,
                name=kernel.label,
                data=data,
                control=tuple(x for x in control if x not in data),
                micros=lane.micros(taken),
                kernel=kernel,
            )
            yield self._next(step, lane)
            ids.append(self.count)

    def received(self, message: Message) -> TraceNode:
        """What comes from another stage, once the rank is done with what it computes before."""
        self.count += 1
        control = self.compute.after()
        return TraceNode(self.count, "receive", (), control, 0, message=message)

    def sent(self, message: Message, time_s: float) -> TraceNode:
        """What goes to another stage, made by all before it."""
        data = self.compute.after(*self.network.after())
        micros = self.network.micros(time_s)
        step = TraceNode(self.count + 1, "send", data, (), micros, message=message)
        return self._next(step, self.network)

    def _next(self, step: TraceNode, lane: _Lane) -> TraceNode:
        self.count = lane.last = step.id
        return step


def _check_count(ran: _Ran, before: int) -> None:
    """UsageError where a rank has too many kernels."""
    count = before + sum(x.runs for x in ran.kernels)
    if count > MOST_SPREAD:
        raise UsageError(
            f"@{ran.graph.name}: with its loops unrolled there are too many kernels for a trace",
            expected=f"at most {MOST_SPREAD:,}",
            found=f"{count:,} and more",
            fix="use fewer trips or fewer microbatches",
        )


def _host(ran: _Ran) -> list[tuple[float, int | None]]:
    """How long the host takes until each launch has reached the device, from the one before, or
    from the end of the kernel that it waits for; which is that launch."""
    if not ran.is_launched:
        return []
    marks, before, found = ran.timeline.marks, 0.0, list[tuple[float, int | None]]()
    waits = dict(marks.waits)
    for i, begin in enumerate(marks.begins):
        end = waits.get(i)
        since = before if end is None else end
        arrives = begin + marks.launch_s
        found.append((arrives - since, None if end is None else bisect_left(marks.ends, end)))
        before = arrives
    return found


def _node(step: TraceNode, group: int = 0, ends: tuple[int, int] = (0, 0)) -> Any:
    """A node of Chakra's. Types of attributes are those that chakra's feeder asks for
    (mlcommons/chakra, `src/feeder/et_feeder_node.cpp`); `time_s`, `op` and `kernel` are ours: the
    time before it was rounded, the kernel's kind and its name. `ends` are the rank and the other
    one of a message."""
    x, sent = step.kernel, step.collectives
    kind: NodeType = "COMM_COLL_NODE" if sent else "COMP_NODE"
    on_host = x.cost.on_host if x else step.message is None
    attributes = [attribute("is_cpu_op", on_host, "bool_val")]
    if step.message:
        kind = "COMM_SEND_NODE" if step.message.sends else "COMM_RECV_NODE"
        source, to = ends if step.message.sends else ends[::-1]
        attributes += [
            attribute("comm_size", step.message.bytes, "int64_val"),
            attribute("comm_src", source, "int32_val"),
            attribute("comm_dst", to, "int32_val"),
            attribute("comm_tag", step.message.tag, "int32_val"),
        ]
    elif sent:
        size = sum(c.x.type.nbytes if c.routed is None else c.routed for c in sent)
        attributes += [
            attribute("comm_type", COMM_TYPES[_kind(sent[0])], "int64_val"),
            attribute("comm_size", size, "int64_val"),
        ]
        if group:
            attributes.append(attribute("pg_name", str(group), "string_val"))
    else:
        attributes += [
            attribute("num_ops", x.flops if x else 0, "int64_val"),
            attribute("tensor_size", x.bytes if x else 0, "uint64_val"),
        ]
    if x is not None:
        attributes += [
            attribute("op", x.node.op.name, "string_val"),
            attribute("kernel", _text(x.name), "string_val"),
        ]
        if not x.is_unlinked:
            attributes.append(attribute("time_s", x.cost.time_s, "double_val"))
    return messages().Node(
        id=step.id,
        name=_text(step.name),
        type=NODE_TYPES[kind],
        ctrl_deps=step.control,
        data_deps=step.data,
        duration_micros=step.micros,
        attr=attributes,
    )


def _kind(call: t.Collective) -> str:
    """How cells move; UsageError for what Chakra's collectives have no word for."""
    if call.carried_by not in COMM_TYPES:
        raise UsageError(
            f"{call.fn} of %{call.x.name} cannot be written into a trace of alike ranks",
            expected=", ".join(COMM_TYPES),
        )
    return call.carried_by


def _text(name: str) -> str:
    """A name as protobuf takes it: UTF-8, without halves of a surrogate pair."""
    return name.encode("utf-8", "replace").decode()
