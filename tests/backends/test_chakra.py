"""Chakra's traces: read by a decoder of their own, by Chakra's tools where they are installed, and
replayed on all ranks by ASTRA-sim's rules."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from strategies import graphs

import gpuir
from gpuir.backends.chakra import traces
from gpuir.backends.chakra.traces import chakra, step_traces
from gpuir.backends.terminal import Terminal
from gpuir.cli.main import main
from gpuir.ir.errors import UsageError
from gpuir.ops import kernel as k
from gpuir.report.answer import Answer

MLP = """graph @mlp {
  in %x: f16[8, 64]
  param %w: f16[64, 256]
  param %v: f16[256, 64]
  %a: f16[8, 256] = t.matmul(%x, %w) at "m.onnx:up"
  %b: f16[8, 256] = t.map("relu", [%a]) at "m.onnx:relu"
  %c: f16[8, 64] = t.matmul(%b, %v) at "m.onnx:down"
  out %c
}
"""
COLLECTIVES = """graph @all {
  in %x: f16[8, 64]
  %a: f16[8, 64] = t.collective("all_reduce", %x, "tp", [2], [1]) at "m:a"
  %b: f16[16, 64] = t.collective("all_gather", %a, "tp", [2], [1], axis=0) at "m:b"
  %c: f16[4, 64] = t.collective("reduce_scatter", %b, "dp", [4], [2], axis=0) at "m:c"
  %d: f16[4, 64] = t.collective("all_to_all", %c, "tp", [2], [1], axis=0, to=0) at "m:d"
  %e: f16[4, 64] = t.collective("broadcast", %d, "all", [2, 4], [1, 2]) at "m:e"
  mesh tp=2, dp=4
  out %e
}
"""
LOOP = """graph @loop {
  in %x: f32[4, 4]
  %y: f32[4, 4] = t.loop({
    in %i: i64[]
    in %s: f32[4, 4]
    %t: f32[4, 4] = t.map("exp", [%s]) at "m:exp"
    out %t
  }, 3, [%x]) at "m:loop"
  out %y
}
"""
CUT = "canonicalize,recognize,shard{ranks=2},shard{ranks=2,by=data}"
SHARDED = f"{CUT},fuse,legalize"
ENCODER = Path(__file__).parents[1] / "encoder.onnx"
TYPES = {4: "COMP_NODE", 5: "COMM_SEND_NODE", 6: "COMM_RECV_NODE", 7: "COMM_COLL_NODE"}
ALL_REDUCE, ALL_GATHER, BROADCAST, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 5, 6, 7


def summary(text: str, pipeline: str = "", cluster: str | None = None) -> Answer:
    """Under `ideal`, which has no host."""
    graph = gpuir.load_text(text)
    if pipeline:
        graph = gpuir.pipeline(pipeline).run(graph)
    target = None if cluster else "a100"
    return gpuir.analyze(graph, target, profile="ideal", cluster=cluster)


def encoder(pipeline: str = "", profile: str = "eager", **more: Any) -> Answer:
    """A training step with `train`; of several ranks on a dgx-a100."""
    graph = gpuir.load(ENCODER, dims={"batch": 4, "seq": 64}, **more)
    if not pipeline:
        return gpuir.analyze(graph, "a100", profile=profile)
    graph = gpuir.pipeline(pipeline).run(graph)
    return gpuir.analyze(graph, profile=profile, cluster="dgx-a100")


# ---- a decoder, from the field numbers of Chakra's et_def.proto ----------------------------------


@dataclass
class Node:
    id: int = 0
    name: str = ""
    type: str = ""
    ctrl: list[int] = field(default_factory=list[int])
    data: list[int] = field(default_factory=list[int])
    micros: int = 0
    attr: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def sends(self) -> bool:
        return self.type == "COMM_COLL_NODE"


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        match key & 7:
            case 0:
                value, at = varint(data, at)
            case 1:
                value, at = struct.unpack_from("<d", data, at)[0], at + 8
            case 2:
                size, at = varint(data, at)
                value, at = data[at : at + size], at + size
            case kind:
                raise AssertionError(f"wire type {kind}")
        yield key >> 3, value


def attribute(data: bytes) -> tuple[str, Any]:
    found = dict(fields(data))
    name = found.pop(1).decode()
    [(number, value)] = found.items()
    return name, {27: bool, 29: lambda x: x.decode()}.get(number, lambda x: x)(value)


def packed(data: bytes) -> list[int]:
    at, found = 0, list[int]()
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found


def read(data: bytes) -> tuple[dict[str, Any], list[Node]]:
    """The metadata of a trace, and its nodes."""
    messages: list[bytes] = []
    at = 0
    while at < len(data):
        size, at = varint(data, at)
        messages.append(data[at : at + size])
        at += size
    head, *rest = messages
    about = dict(attribute(x) for number, x in fields(head) if number == 2)
    assert dict(fields(head))[1] == b"0.0.4"
    nodes: list[Node] = []
    for message in rest:
        node = Node()
        for number, value in fields(message):
            match number:
                case 1:
                    node.id = value
                case 2:
                    node.name = value.decode()
                case 3:
                    node.type = TYPES[value]
                case 4:
                    node.ctrl += packed(value)
                case 5:
                    node.data += packed(value)
                case 7:
                    node.micros = value
                case 10:
                    name, own = attribute(value)
                    node.attr[name] = own
                case _:
                    raise AssertionError(f"field {number}")
        nodes.append(node)
    return about, nodes


Files = dict[str, bytes]


def files(s: Answer) -> Files:
    return dict(chakra([s], Terminal()).files)


def ranks(made: Files) -> list[list[Node]]:
    return [read(made[f"workload.{i}.et"])[1] for i in range(len(made) - 1)]


# ---- ASTRA-sim's rules ---------------------------------------------------------------------------


def lane(node: Node) -> str:
    if node.type == "COMP_NODE":
        return "host" if node.attr["is_cpu_op"] else "compute"
    return "received" if node.type == "COMM_RECV_NODE" else "network"


def ends_of(node: Node) -> tuple[int, ...]:
    """Of a message, who sends it to whom, its tag and its bytes."""
    if node.type not in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
        return ()
    return tuple(node.attr[f"comm_{name}"] for name in ("src", "dst", "tag", "size"))


def replay(made: Files) -> float:
    """When all ranks are done, in microseconds. Of the nodes of a kind that wait for nobody the
    first runs: one of the host, one kernel and one collective or send at a time; a collective takes
    its duration, from when each rank of its group has come to it. What is received is there when it
    has been sent. AssertionError where ranks wait for each other."""
    groups: dict[str, list[int]] = json.loads(made["workload.json"])
    programs = ranks(made)
    everyone = list(range(len(programs)))
    left = [dict[str, deque[Node]]() for _ in programs]
    for queues, nodes in zip(left, programs, strict=True):
        for x in nodes:
            queues.setdefault(lane(x), deque()).append(x)
    done = [dict[int, float]() for _ in programs]
    free = [dict.fromkeys(("host", "compute", "network", "received"), 0.0) for _ in programs]
    sent: dict[tuple[int, ...], float] = {}

    def ready(r: int, x: Node) -> bool:
        gone = x.type != "COMM_RECV_NODE" or ends_of(x) in sent
        return gone and all(i in done[r] for i in (*x.ctrl, *x.data))

    def begin(r: int, x: Node) -> float:
        return max((free[r][lane(x)], *(done[r][i] for i in (*x.ctrl, *x.data))))

    while any(queue for queues in left for queue in queues.values()):
        moved, met = False, dict[tuple[int, ...], dict[int, Node]]()
        for r, queues in enumerate(left):
            for name, queue in queues.items():
                while queue and ready(r, queue[0]) and not queue[0].sends:
                    x, moved = queue.popleft(), True
                    start = begin(r, x)
                    if name == "received":
                        start = max(start, sent[ends_of(x)])
                    free[r][name] = done[r][x.id] = start + x.micros
                    if x.type == "COMM_SEND_NODE":
                        assert x.attr["comm_src"] == r
                        sent[ends_of(x)] = done[r][x.id]
                if queue and queue[0].sends and ready(r, queue[0]):
                    group = groups.get(queue[0].attr.get("pg_name", ""), everyone)
                    assert r in group
                    met.setdefault(tuple(group), {})[r] = queue[0]
        for group, calls in met.items():
            if len(calls) < len(group):
                continue
            [_] = {(x.attr["comm_type"], x.attr["comm_size"]) for x in calls.values()}
            start = max(begin(r, x) for r, x in calls.items())
            for r, x in calls.items():
                free[r]["network"] = done[r][x.id] = start + x.micros
                left[r]["network"].popleft()
            moved = True
        assert moved, "ranks wait for each other"
    return max((x for own in done for x in own.values()), default=0.0)


# ---- tests ---------------------------------------------------------------------------------------


def test_a_rank_computes_and_sends_what_its_graph_does():
    s = summary(MLP, SHARDED)
    made = files(s)
    assert sorted(made) == [*(f"workload.{i}.et" for i in range(4)), "workload.json"]
    assert json.loads(made["workload.json"]) == {"1": [0, 1], "2": [2, 3]}
    about, nodes = read(made["workload.3.et"])
    assert (about["rank"], about["ranks"], about["mesh"]) == (3, 4, "tp=2, dp=2")
    up, down, summed = nodes
    assert [x.type for x in nodes] == ["COMP_NODE", "COMP_NODE", "COMM_COLL_NODE"]
    assert (down.data, summed.data, summed.ctrl) == ([up.id], [down.id], [])
    assert up.attr["num_ops"] == 2 * 4 * 64 * 128 + 4 * 128  # of a rank's part, relu included
    assert up.attr["tensor_size"] == 2 * (4 * 64 + 64 * 128 + 4 * 128)
    assert not up.attr["is_cpu_op"]
    assert summed.attr["comm_type"] == ALL_REDUCE
    assert summed.attr["comm_size"] == 2 * 4 * 64
    assert summed.attr["pg_name"] == "2"
    kernels = {x.name: x.cost.time_s for x in s.kernels}
    assert up.attr["time_s"] == kernels[up.attr["kernel"]]


def test_collectives_have_sizes_and_groups_as_astra_sim_takes_them():
    made = files(summary(COLLECTIVES))
    groups = json.loads(made["workload.json"])
    assert {tuple(x) for x in groups.values()} == {
        *((i, i + 1) for i in range(0, 8, 2)),
        (0, 2, 4, 6),
        (1, 3, 5, 7),
    }
    for rank, nodes in enumerate(ranks(made)):
        sent = [(x.attr["comm_type"], x.attr["comm_size"]) for x in nodes]
        row = 2 * 64
        assert sent == [
            (ALL_REDUCE, 8 * row),
            (ALL_GATHER, 8 * row),  # what a rank gives
            (REDUCE_SCATTER, 16 * row),
            (ALL_TO_ALL, 4 * row),
            (BROADCAST, 4 * row),
        ]
        named = [x.attr.get("pg_name") for x in nodes]
        assert named[-1] is None  # all ranks
        assert all(rank in groups[x] for x in named[:-1])
    replay(made)


def test_collectives_without_a_cluster_have_no_time_and_with_one_its_own():
    unknown = ranks(files(summary(COLLECTIVES)))[0]
    assert all(x.micros == 0 and "time_s" not in x.attr for x in unknown)
    s = summary(COLLECTIVES, cluster="dgx-a100")
    known = ranks(files(s))[0]
    assert [x.attr["time_s"] for x in known] == [x.cost.time_s for x in s.kernels]
    assert sum(x.micros for x in known) == round(1e6 * sum(x.cost.time_s for x in s.kernels))


def test_a_bucket_is_one_node_with_the_bytes_of_all():
    s = encoder(f"{SHARDED},bucket", profile="ort", train=True)
    nodes = [x for x in ranks(files(s))[0] if x.sends]
    calls = [x.node.op for x in s.kernels if isinstance(x.node.op, k.Collective)]
    assert [x.attr["comm_size"] for x in nodes] == [
        sum(c.x.type.nbytes for c in op.collectives) for op in calls
    ]
    assert max(len(op.collectives) for op in calls) > 1


def test_what_a_collective_only_comes_after_is_no_data():
    """Gathered weights are read by nobody before; the kernels launched before are waited for."""
    s = encoder(CUT.replace("by=data", "by=data,zero=3"), train=True)
    nodes = ranks(files(s))[0]
    gathers = [x for x in nodes if x.attr.get("comm_type") == ALL_GATHER]
    assert any(not x.data and x.ctrl for x in gathers)
    sums = [x for x in nodes if x.attr.get("comm_type") in (ALL_REDUCE, REDUCE_SCATTER)]
    assert all(x.data for x in sums)


@settings(max_examples=20)
@given(graphs())
def test_durations_are_whole_and_stay_within_half_a_microsecond_together(graph: gpuir.Graph):
    s = gpuir.analyze(graph, "a100", profile="ideal")
    for nodes in ranks(files(s)):
        exact = whole = 0.0
        for x in nodes:
            exact, whole = exact + 1e6 * x.attr.get("time_s", 0.0), whole + x.micros
            assert abs(exact - whole) <= 0.5 + 1e-6
        assert [x.id for x in nodes] == list(range(1, len(nodes) + 1))
        assert all(i < x.id for x in nodes for i in (*x.ctrl, *x.data))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_training_step_replays_on_all_ranks(zero: int):
    s = encoder(CUT.replace("by=data", f"by=data,zero={zero}"), "ideal", train=True)
    made = files(s)
    kinds = {x.attr["comm_type"] for x in ranks(made)[0] if x.sends}
    assert ALL_REDUCE in kinds
    assert (ALL_GATHER in kinds) is (zero == 3)
    found, computed = replay(made), sum(x.time_s for x in s.running if x.kind != "collective")
    # no kernel is slower for a collective beside it, so that all together are no slower
    assert 1e6 * computed - 1 <= found <= 1e6 * s.device_s + 1


@pytest.mark.parametrize("profile", ["eager", "ort", "cudagraph", "ideal"])
def test_one_gpu_replays_as_its_timeline(profile: str):
    """The host included: here it holds the device up, or launches one graph."""
    s = encoder(profile=profile)
    kernels = s.timeline.marks.ends[-1]
    assert replay(files(s)) == pytest.approx(1e6 * kernels, rel=0.002, abs=0.5 + 1e-6)


def test_ranks_that_wait_for_what_they_send_replay_as_their_timeline():
    s = encoder("canonicalize,recognize,shard{ranks=4}", "eager")
    assert s.timeline.traffic[0].exposed_s > 0
    last = max(s.timeline.marks.ends)
    assert replay(files(s)) == pytest.approx(1e6 * last, rel=0.01)


def test_a_step_of_microbatches_is_one_run_after_another():
    graph = gpuir.load(ENCODER, dims={"batch": 8, "seq": 64}, train=True, optimizer="adamw")
    step = gpuir.simulate_ranks(graph, "dgx-a100", gpuir.Parallel(dp=2, tp=2, microbatches=3)).step
    made = dict(step_traces(step).files)
    nodes = ranks(made)[3]
    assert [x.id for x in nodes] == list(range(1, len(nodes) + 1))
    counts = [r.times * len(r.timeline.launches) for r in step.slowest.runs]
    assert sum("kernel" in x.attr for x in nodes) == sum(counts)
    sums = [x for x in nodes if x.sends and x.attr["pg_name"] in ("3", "4")]  # of dp
    assert sums and all(x.id > len(nodes) / 2 for x in sums)  # the last microbatch alone
    kernels, found = 1e6 * step.slowest.kernels_s, replay(made)
    # ASTRA-sim runs one collective at a time, the timeline one of each group
    assert kernels < found < 1e6 * step.time_s * 1.05


PIPELINES = [
    gpuir.Parallel(pp=2, microbatches=4),
    gpuir.Parallel(pp=4, microbatches=4, schedule="gpipe"),
    gpuir.Parallel(pp=2, microbatches=4, schedule="interleaved", chunks=2),
    gpuir.Parallel(pp=2, microbatches=3, schedule="zero-bubble"),
    gpuir.Parallel(pp=2, tp=2, dp=2, microbatches=2, zero=1),
    gpuir.Parallel(pp=2, dp=2, microbatches=4, schedule="interleaved", chunks=2),
    gpuir.Parallel(pp=2, dp=2, microbatches=3, schedule="zero-bubble"),
]


@pytest.mark.parametrize("parallel", PIPELINES, ids=str)
def test_a_pipeline_replays_on_all_ranks(parallel: gpuir.Parallel):
    graph = gpuir.load(ENCODER, dims={"batch": 4, "seq": 64}, train=True, optimizer="adamw")
    step = gpuir.simulate_ranks(graph, "dgx-a100", parallel).step
    made = dict(step_traces(step).files)
    programs = ranks(made)
    assert len(programs) == parallel.ranks
    messages = [x for nodes in programs for x in nodes if ends_of(x)]
    sent = sorted(ends_of(x) for x in messages if x.type == "COMM_SEND_NODE")
    assert sent == sorted(ends_of(x) for x in messages if x.type == "COMM_RECV_NODE")
    assert len({x[:3] for x in sent}) == len(sent)  # no two under one tag
    stride = parallel.ranks // parallel.pp
    assert {abs(a - b) % (parallel.ranks - stride) for a, b, *_ in sent} <= {0, stride}
    links = parallel.pp * parallel.chunks - 1
    assert len(sent) == 2 * links * parallel.microbatches * stride
    found = replay(made)
    # a host runs ahead of its device, and a rank computes while it sends: no slower than that
    assert 1e6 * max(part.kernels_s for part in step.parts) < found < 1.03e6 * step.time_s


def test_loops_are_written_out():
    [nodes] = ranks(files(summary(LOOP)))
    assert [x.attr["kernel"] for x in nodes] == ["y/t"] * 3
    assert [x.data for x in nodes] == [[], [1], [2]]


def test_what_is_too_much_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(traces, "LARGEST", 1000)
    with pytest.raises(UsageError, match=r"traces of 4 ranks are too large"):
        files(summary(MLP, SHARDED))
    monkeypatch.setattr(traces, "MOST_SPREAD", 2)
    with pytest.raises(UsageError, match="too many kernels"):
        files(summary(LOOP))


def test_a_send_has_no_form_yet():
    text = COLLECTIVES.replace('"broadcast"', '"send"')
    with pytest.raises(UsageError, match="send of %d cannot be written"):
        files(summary(text))


def test_several_targets_are_refused():
    s = summary(MLP)
    with pytest.raises(UsageError, match="can hold only one target under one profile"):
        chakra([s, s], Terminal())


def test_the_command_fills_a_folder(tmp_path: Path):
    model, folder = tmp_path / "mlp.gir", tmp_path / "out"
    model.write_text(MLP)

    def run(*more: str) -> Result:
        given = ("analyze", str(model), "--target", "a100", "--format", "chakra")
        return CliRunner().invoke(main, (*given, *more))

    assert run("-o", str(folder)).exit_code == 0
    assert sorted(x.name for x in folder.iterdir()) == ["workload.0.et", "workload.json"]
    assert run("-o", f"{folder}/").exit_code == 0  # again: the folder is replaced
    (folder / "notes.txt").write_text("mine")
    refused = run("-o", str(folder))
    assert (refused.exit_code, (folder / "notes.txt").read_text()) == (2, "mine")
    assert "other files" in refused.stderr
    nameless = run()
    assert (nameless.exit_code, nameless.stdout) == (2, "")
    assert "-o FOLDER" in nameless.stderr
    assert run("-o", str(model)).exit_code == 2
    assert model.read_text() == MLP
    assert sorted(x.name for x in tmp_path.iterdir()) == ["mlp.gir", "out"]


@pytest.mark.skipif(find_spec("chakra") is None, reason="mlcommons/chakra is not installed")
def test_chakras_own_tools_read_it(tmp_path: Path):
    s = summary(MLP, SHARDED)
    file, found = tmp_path / "workload.1.et", tmp_path / "found.json"
    file.write_bytes(files(s)[file.name])
    names = ("--input_filename", str(file), "--output_filename", str(found))
    tool = [sys.executable, "-m", "chakra.src.jsonizer.jsonizer"]
    subprocess.run([*tool, *names], check=True)
    decoder, text, objects = json.JSONDecoder(), found.read_text(), list[Any]()
    while text:
        value, end = decoder.raw_decode(text)
        objects.append(value)
        text = text[end:].lstrip()
    head, up, down, summed = objects
    assert head["version"] == "0.0.4"
    assert [x["type"] for x in objects[1:]] == ["COMP_NODE", "COMP_NODE", "COMM_COLL_NODE"]
    assert down["dataDeps"] == [up["id"]]
    assert {"name": "comm_size", "int64Val": str(2 * 4 * 64)} in summed["attr"]
