"""A model over the ranks of a cluster, the whole way."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpuir
import gpuir.run.ranks
from gpuir.backends.steps import step_report
from gpuir.backends.structured import to_json
from gpuir.backends.terminal import Terminal
from gpuir.cli.main import main
from gpuir.cost.batch import tile_cost
from gpuir.ir.alike import shape_of
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.notes import Cost, Tile
from gpuir.ir.phases import phase_of
from gpuir.ir.verify import verify
from gpuir.ops.kernel import Collective, KernelOp
from gpuir.passes.partition.balance import roofline_s
from gpuir.passes.partition.partition import Partition, partition
from gpuir.passes.shard.shard import ShardPass
from gpuir.simulate.memory import memory
from gpuir.simulate.microbatches import PartTimes, run_pipeline, task_orders
from gpuir.simulate.parallel import ContextExchange
from gpuir.targets.target import Target

ROOT = Path(__file__).parents[2]
ENCODER = ROOT / "tests/encoder.onnx"


TIED = """graph @g {
  in %x: f32[8, 16]
  param %e: f32[16, 16]
  param %w: f32[16, 16]
  %a: f32[8, 16] = t.matmul(%x, %e) at "m:a"
  %b: f32[8, 16] = t.matmul(%a, %w) at "m:b"
  %c: f32[8, 16] = t.matmul(%b, %e) at "m:c"
  %d: f32[8, 16] = t.matmul(%c, %e) at "m:d"
  %l: f32[] = t.reduce("mean", %d, [0, 1]) at "m:l"
  out %l
}"""


@pytest.fixture(scope="module")
def training() -> Graph:
    return gpuir.load(ENCODER, dims={"batch": 64, "seq": 64}, train=True, optimizer="adamw")


def step(g: Graph, cluster: str = "dgx-a100", **degrees: Any) -> gpuir.Step:
    return gpuir.simulate_ranks(g, cluster, gpuir.Parallel(**degrees)).step


def test_one_rank_is_what_one_gpu_takes(training: Graph):
    alone = gpuir.analyze(training, "a100-sxm-80gb")
    one = step(training)
    assert one.time_s == pytest.approx(alone.latency_s)
    assert one.slowest.traffic == () and one.exposed_s == 0.0


def test_ranks_share_the_batch_and_send_gradients(training: Graph):
    one, eight = step(training), step(training, dp=8)
    assert one.flops == eight.flops and one.params == eight.params
    assert one.time_s / 8 < eight.time_s < one.time_s
    (dp,) = eight.slowest.traffic
    assert dp.group == "dp" and 0 <= dp.exposed_s <= dp.time_s


def test_zero_takes_memory_from_each_rank(training: Graph):
    parts = [step(training, dp=8, zero=zero).fullest for zero in range(4)]
    held = [sum(n for _, n in part.holds) for part in parts]
    assert held == sorted(held, reverse=True) and held[3] < held[0]


def test_weights_are_gathered_for_the_forward_and_for_the_backward_pass(training: Graph):
    s = gpuir.simulate_ranks(
        training, "dgx-a100", gpuir.Parallel(dp=8, zero=3), profile="eager"
    ).step
    found = [
        (phase_of(n), v.name.partition(".whole")[0])
        for n in s.slowest.runs[0].graph.nodes
        if isinstance(n.op, Collective) and n.op.collective.fn == "all_gather"
        for v in n.results
    ]
    forward, backward = ({v for phase, v in found if phase == p} for p in (None, "backward"))
    assert len(found) == len(set(found)) and len(forward & backward) > len(forward) / 3


def test_microbatches_send_gradients_once(training: Graph):
    one, four = step(training, dp=8), step(training, dp=8, microbatches=4)
    assert four.flops == 4 * one.flops
    assert four.slowest.traffic == one.slowest.traffic
    assert one.time_s < four.time_s < 4 * one.time_s
    every = step(training, dp=8, zero=3, microbatches=4).slowest.traffic[0].count
    assert every > 3 * step(training, dp=8, zero=3).slowest.traffic[0].count


def test_gradients_of_earlier_microbatches_are_there_all_the_time():
    """Two weights of 4 MB; of one batch, none of their gradients when activations are most."""
    text = TIED.replace("16", "1024").replace("f32[8,", "f32[65536,")
    g = gpuir.pipeline("autodiff,optimizer{kind=sgd,fused=true}").run(gpuir.parse(text))
    one, four = step(g).fullest, step(g, microbatches=4).fullest
    assert dict(one.holds).get("gradients", 0) == 0
    assert dict(four.holds)["gradients"] == 2 * 4 * 1024 * 1024
    assert four.held_bytes == one.held_bytes + dict(four.holds)["gradients"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_microbatch_is_a_graph_by_itself(training: Graph, zero: int):
    """What is done once a step is left out, and nothing that is left reads it."""
    first, sums, last = step(training, dp=2, zero=zero, microbatches=4).slowest.runs
    assert (first.times, sums.times, last.times) == (3, 3, 1)
    verify(first.graph)
    assert 0 < memory(first.graph).peak_bytes <= memory(last.graph).peak_bytes
    gradients = [v for v in first.graph.outputs if first.graph.role_of(v) == "gradient"]
    assert len(gradients) == sum(role == "gradient" for _, role in training.roles)
    added = [v.type for v in sums.graph.params]
    assert added == [v.type for v in last.graph.outputs if last.graph.role_of(v) == "gradient"]
    assert not any(phase_of(n) == "optimizer" for n in first.graph.nodes)


def test_a_weight_of_three_parts_of_four_is_added_up_within_the_cluster():
    """The first, third and fourth of two products each have %e; the second has %w."""
    places = enumerate("eewweeee")
    products = [f'%h{i + 1}: f32[8, 16] = t.matmul(%h{i}, %{w}) at "m:h{i}"' for i, w in places]
    lines = ["in %h0: f32[8, 16]", "param %e: f32[16, 16]", "param %w: f32[16, 16]", *products]
    lines += ['%s: f32[8, 16] = t.map("mul", [%h8, %h8]) at "m:s"']
    lines += ['%l: f32[] = t.reduce("mean", %s, [0, 1]) at "m:l"', "out %l"]
    g = gpuir.parse("\n".join(("graph @g {", *lines, "}")).replace("16", "1024"))
    g = gpuir.pipeline("autodiff,optimizer{kind=sgd,fused=true}").run(g)
    s = gpuir.simulate_ranks(g, "dgx-a100", gpuir.Parallel(pp=4, dp=2, microbatches=4)).step
    made = partition(g, 4, roofline_s(gpuir.load_target("a100-sxm-80gb")))
    assert [x.parts for x in made.shared if x.value.name == "e.grad"] == [(0, 2, 3)]
    assert [part.params for part in s.parts] == [1024 * 1024] * 4


def test_collectives_beside_products_show_a_piece(training: Graph):
    """Of four ranks a quarter: the rest is hidden, and kernels take what they took."""
    plain, pieces = (step(training, tp=4, sequence=True, overlap=x) for x in (False, True))
    (alone,), (beside,) = plain.slowest.traffic, pieces.slowest.traffic
    assert alone.time_s / 4 < beside.time_s < alone.time_s / 2  # all-reduces of norms are whole
    assert pieces.slowest.kernels_s == pytest.approx(plain.slowest.kernels_s)
    assert pieces.time_s < plain.time_s


def test_plans_of_a_model_share_what_they_have_in_common(
    training: Graph, monkeypatch: pytest.MonkeyPatch
):
    """Weights are cut once for all stages of ZeRO, and forward and backward passes costed once."""
    calls: list[str] = []
    cut, costed = ShardPass.run, gpuir.run.ranks.costed

    def counted(self: ShardPass, g: Graph) -> Graph:
        calls.append(self.by)
        return cut(self, g)

    def analyzed(g: Graph, **given: Any) -> Graph:
        calls.append("kernels")
        return costed(g, **given)

    monkeypatch.setattr(ShardPass, "run", counted)
    monkeypatch.setattr(gpuir.run.ranks, "costed", analyzed)
    plans = [gpuir.Parallel(tp=2, dp=2, pp=2, microbatches=2, zero=zero) for zero in (0, 1)]
    alone = [gpuir.simulate_ranks(training, "dgx-a100", plan).step for plan in plans]
    assert calls == ["tensor", "data", *["kernels"] * 8] * 2
    calls.clear()
    common = gpuir.run.ranks.SharedByPlans()
    both = [gpuir.simulate_ranks(training, "dgx-a100", plan, common=common).step for plan in plans]
    assert calls == ["tensor", "data", *["kernels"] * 8, "data", *["kernels"] * 2]
    texts = [[to_json(step_report(s, 64), Terminal()) for s in some] for some in (both, alone)]
    assert texts[0] == texts[1]


def test_a_pipeline_waits_for_its_ends(training: Graph):
    """Parts hold the model between them; of two orders that wait less, each is quicker."""
    one = step(training, microbatches=8)
    steps = {
        name: gpuir.simulate_ranks(
            training, "dgx-a100", gpuir.Parallel(pp=2, microbatches=8, schedule=name, chunks=chunks)
        ).step
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1))
    }
    for s in steps.values():
        assert s.pipelined is not None and len(s.parts) == 2
        assert sum(part.params for part in s.parts) == one.params == s.params
        assert one.time_s / 2 < s.time_s < one.time_s and s.flops == one.flops
        assert s.interval is not None and s.interval[0] < s.time_s < s.interval[1]
    bubbles = {name: s.pipelined.bubble for name, s in steps.items() if s.pipelined}
    assert max(bubbles["interleaved"], bubbles["zero-bubble"]) < bubbles["1f1b"]
    assert steps["gpipe"].fullest.held_bytes > steps["1f1b"].fullest.held_bytes


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2},
        {"dp": 2, "zero": 3},
        {"pp": 2, "microbatches": 4},
        {"tp": 2, "sequence": True, "dp": 2, "pp": 2, "microbatches": 4},
    ],
)
def test_a_norm_of_all_gradients_takes_a_little_and_no_memory(
    training: Graph, degrees: dict[str, int]
):
    """Gradients are read twice more and written once more; ranks add up one number."""
    options: dict[str, Any] = {"dims": {"batch": 64, "seq": 64}, "train": True, "clip": 1.0}
    g = gpuir.load(ENCODER, **options, optimizer="adamw")
    plain, clipped = step(training, **degrees), step(g, **degrees)
    assert clipped.flops == plain.flops and clipped.params == plain.params
    assert plain.time_s < clipped.time_s < 1.05 * plain.time_s
    assert clipped.fullest.held_bytes <= 1.01 * plain.fullest.held_bytes
    if clipped.pipelined is not None:
        assert clipped.pipelined.norm_s > 0
        assert {order[-2].kind for order in clipped.pipelined.orders} == {"norm"}
        starts = [s[-1] for s in clipped.pipelined.starts]
        assert starts[0] == starts[1]


PIPELINES: list[dict[str, Any]] = [
    {"pp": 2, "dp": 4, "microbatches": 4},
    {"pp": 2, "dp": 4, "zero": 1, "microbatches": 1},
    {"pp": 2, "dp": 2, "tp": 2, "microbatches": 4, "schedule": "gpipe"},
    {"pp": 2, "dp": 4, "microbatches": 4, "schedule": "interleaved", "chunks": 2},
    {"pp": 2, "dp": 4, "microbatches": 4, "schedule": "zero-bubble"},
]


@pytest.mark.parametrize("degrees", PIPELINES, ids=str)
def test_gradients_are_summed_with_the_last_microbatch(training: Graph, degrees: dict[str, Any]):
    """Beside its pass where nobody waits for that, else beside what follows: a step is no slower
    than if sums took their time behind all passes, but by what they take from later kernels."""
    s = step(training, **degrees)
    assert s.pipelined is not None
    before: list[PartTimes] = []
    for t in s.pipelined.times:
        assert t.last is not None
        before.append(replace(t, last=None, update=t.update + sum(x.time_s for x in t.last.sums)))
    shape = s.parallel.schedule, s.parallel.pp, s.parallel.microbatches, s.parallel.chunks
    sends = s.pipelined.sends, s.pipelined.sends_back
    behind = run_pipeline(task_orders(*shape), before, *sends)
    beside = [t.last for t in s.pipelined.times[:: s.parallel.pp] if t.last]
    taken = sum((x.slows - 1) * y.time_s for x in beside for y in x.sums)
    assert s.time_s < behind.time_s + taken
    for rank, part in enumerate(s.parts):
        (dp,) = (x for x in part.traffic if x.group == "dp")
        assert s.pipelined.sums_s[rank] <= dp.exposed_s <= dp.time_s * (1 + 1e-9)
        runs = {run.name: run.times for run in part.runs}
        base = "weights" if "weights" in runs else "backward"
        assert (runs[base], runs["last"]) == (s.parallel.microbatches - 1, 1)
        update = next(run for run in part.runs if run.name == "update")
        assert all(x.group != "dp" for x in update.timeline.traffic) or s.parallel.zero
        assert s.run_of(rank, s.pipelined.orders[rank][-1]).name == "update"
        last = [t for t in s.pipelined.orders[rank] if s.run_of(rank, t).name == "last"]
        assert [t.kind for t in last] == [*[base] * s.parallel.chunks, "sums"]
    first = s.parts[0].traffic[-1]
    sums = sum(y.time_s for x in beside for y in x.sums)
    assert s.pipelined.sums_s[0] < 0.9 * sums and first.exposed_s < 0.9 * first.time_s


def test_sums_are_in_place(training: Graph):
    """The last microbatch's pass holds no more than others: NCCL sums in the buffers."""
    one, two = (step(training, pp=2, dp=dp, microbatches=4) for dp in (1, 2))
    half = gpuir.load(ENCODER, dims={"batch": 32, "seq": 64}, train=True, optimizer="adamw")
    alone = step(half, pp=2, microbatches=4)
    for a, b in zip(alone.parts, two.parts, strict=True):
        assert dict(b.holds) == pytest.approx(dict(a.holds), rel=0.01)
    assert {run.name for part in one.parts for run in part.runs} == {
        *("forward", "backward", "update"),
    }


@pytest.fixture(scope="module")
def decoding() -> Graph:
    """A causal attention of 32,768 tokens, between two products."""
    long, heads = "bf16[1, 32768, 1024]", "bf16[1, 8, 32768, 128]"
    return gpuir.parse(f"""graph @g {{
      in %x: {long}
      param %w: bf16[1024, 1024]
      param %u: bf16[1024, 1024]
      %a: {long} = t.matmul(%x, %w) at "m:a"
      %b: bf16[1, 32768, 8, 128] = t.reshape(%a, [1, 32768, 8, 128]) at "m:b"
      %h: {heads} = t.transpose(%b, [0, 2, 1, 3]) at "m:h"
      %y: {heads} = t.attention(%h, %h, %h, causal=true) at "m:y"
      %t: bf16[1, 32768, 8, 128] = t.transpose(%y, [0, 2, 1, 3]) at "m:t"
      %r: {long} = t.reshape(%t, [1, 32768, 1024]) at "m:r"
      %z: {long} = t.matmul(%r, %u) at "m:z"
      out %z
    }}""")


def test_keys_go_round_a_ring_while_attention_runs(decoding: Graph):
    """Of what is sent to gather keys, much is waited for; round a ring next to nothing."""
    exchanges: tuple[ContextExchange, ...] = ("keys", "ring")
    steps = {
        name: gpuir.simulate_ranks(
            decoding, "dgx-h100", gpuir.Parallel(cp=8, exchange=name), profile="compiled"
        ).step
        for name in exchanges
    }
    exposed = {n: sum(x.exposed_s for x in s.slowest.traffic) for n, s in steps.items()}
    assert exposed["ring"] < 0.5 * exposed["keys"]
    assert steps["ring"].flops == steps["keys"].flops
    assert str(steps["ring"].parallel) == "cp=8, exchange=ring"
    with pytest.raises(UsageError, match="exchange needs context parallelism"):
        step(decoding, exchange="ring")


def test_an_inference_goes_through_a_pipeline_one_way():
    g = gpuir.load(ENCODER, dims={"batch": 8, "seq": 64})
    s = gpuir.simulate_ranks(g, "dgx-a100", gpuir.Parallel(pp=2, tp=2, microbatches=4)).step
    assert s.pipelined is not None
    assert {t.kind for order in s.pipelined.orders for t in order} == {"forward"}
    assert [r.name for part in s.parts for r in part.runs] == ["forward", "forward"]


def test_a_slow_rank_holds_up_the_others(training: Graph):
    """One of data parallelism all of them; one of a pipeline its part alone."""

    def slowed(parallel: gpuir.Parallel, slow: dict[int, float]) -> gpuir.Step:
        return gpuir.simulate_ranks(training, "dgx-a100", parallel, slow=slow).step

    dp, pp = gpuir.Parallel(dp=8), gpuir.Parallel(tp=2, pp=2, microbatches=8)
    one, two = slowed(dp, {}), slowed(dp, {5: 2.0})
    assert two.slowest.kernels_s == pytest.approx(2 * one.slowest.kernels_s)
    assert two == slowed(dp, {2: 2.0}) and one.time_s < two.time_s < 2 * one.time_s
    even, uneven = slowed(pp, {}), slowed(pp, {2: 2.0})
    assert uneven.time_s > even.time_s and uneven.slowest == uneven.parts[1]
    assert uneven.parts[0].kernels_s == even.parts[0].kernels_s
    for s in (even, uneven):
        assert s.pipelined is not None
        path = s.pipelined.critical
        assert path[-1].end_s == s.time_s and path[0].start_s == 0.0
    with pytest.raises(UsageError, match="slow is out of range"):
        slowed(dp, {8: 2.0})
    with pytest.raises(UsageError, match="slow is not a mapping"):
        slowed(dp, {1: float("inf")})


def test_a_trace_has_a_group_of_lanes_for_ranks_alike(tmp_path: Path):
    out = tmp_path / "step.json"
    args = ["simulate", str(ENCODER), "--cluster", "dgx-a100", "--pp", "2", "--tp", "2"]
    args += ["--microbatches", "4", "--train", "--dims", "batch=8,seq=64", "-o", str(out)]
    CliRunner().invoke(main, [*args, "--format", "trace"], catch_exceptions=False)
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "ranks 0 to 1, alike", 1: "ranks 2 to 3, alike"}
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"passes", "stream 0", "communication tp"}
    spans = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert {e["name"] for e in spans if e["pid"] == 0} >= {"forward 0", "forward 3", "backward 3"}
    for pid in names:
        own = sorted((e["ts"], e["dur"]) for e in spans if e["pid"] == pid)
        for (a, took), (b, _) in pairwise(own):
            assert a + took <= b + 0.01


def test_sums_in_a_trace_run_on_beside_what_follows(tmp_path: Path):
    """No two on one lane at a time; an update's kernels start behind the last of them."""
    out = tmp_path / "step.json"
    args = ["simulate", str(ENCODER), "--cluster", "dgx-a100", "--pp", "2", "--dp", "4"]
    args += ["--schedule", "interleaved", "--chunks", "2", "--microbatches", "4", "--train"]
    args += ["--optimizer", "adamw", "--dims", "batch=256,seq=64", "-o", str(out)]
    CliRunner().invoke(main, [*args, "--format", "trace"], catch_exceptions=False)
    events = json.loads(out.read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for pid in (0, 1):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        passes = {e["name"]: e for e in spans if e["tid"] == 0}
        assert "sums, chunk 0" in passes
        sums = [e for e in spans if lanes[pid, e["tid"]] == "communication dp"]
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in sums)
        assert len(own) > 1 and all(a[1] <= b[0] + 0.01 for a, b in pairwise(own))
        assert own[-1][1] <= passes["update, chunk 0"]["ts"] + 0.01
        first = [e for e in sums if e["args"]["pass"] == "backward 3, chunk 1"]
        following = passes["backward 0, chunk 0"]
        assert max(e["ts"] + e["dur"] for e in first) > following["ts"]


def test_slower_links_make_slower_steps(training: Graph):
    fast = step(training, "8xh100-sxm", tp=4, dp=2)
    slow = step(training, "8xh100-pcie", tp=4, dp=2)
    assert slow.exposed_s > fast.exposed_s


def test_what_cannot_be_is_refused(training: Graph):
    for degrees, text in (
        ({"dp": 16}, "too few GPUs"),
        ({"zero": 1}, "zero needs data parallelism"),
        ({"dp": 0}, "counts from 1"),
        ({"dp": 3}, "cannot be split evenly over 3"),
        ({"dp": 3, "microbatches": 2}, r"(?s)of a batch of 128\) cannot .*fix: +a batch that"),
        ({"dp": 5, "microbatches": 64}, "a multiple of 5"),
        ({"chunks": 2}, "schedule and chunks need a pipeline"),
        ({"sequence": True}, "needs tensor parallelism"),
        ({"tp": 2, "overlap": True}, "overlap without sequence"),
        ({"schedule": "gpipe"}, "schedule and chunks need a pipeline"),
    ):
        with pytest.raises(UsageError, match=text):
            step(training, **degrees)
    with pytest.raises(UsageError, match="is already lowered or split"):
        step(gpuir.lower(training), dp=2)


def test_the_command_says_what_the_record_does(training: Graph):
    args = ["simulate", str(ENCODER), "--cluster", "dgx-a100", "--dp", "8", "--train"]
    args += ["--optimizer", "adamw", "--dims", "batch=64,seq=64", "--microbatches", "2"]
    found = CliRunner().invoke(main, [*args, "--format", "json"], catch_exceptions=False)
    half = gpuir.pipeline("microbatch{count=2}").run(training)
    said, s = json.loads(found.stdout), step(half, dp=8, microbatches=2)
    assert said["schema"] == "gpuir.step/1" and said["time_s"] == s.time_s
    assert said["batch"] == 64 and said["ranks"] == 8
    assert said["parts"][0]["traffic"][0]["exposed_s"] == s.exposed_s
    text = CliRunner().invoke(main, args, catch_exceptions=False).stdout
    assert "8 GPUs of dgx-a100" in text and "64 a step, in 2 microbatches" in text


def test_a_predictor_of_kernels_leaves_collectives_to_the_cluster(training: Graph):
    def twice(op: KernelOp, tile: Tile | None, target: Target) -> Cost:
        cost = tile_cost(op, tile, target)
        return Cost(2 * cost.time_s, cost.bound, "twice@1", cost.terms)

    parallel = gpuir.Parallel(dp=8)
    ours, theirs = (
        gpuir.simulate_ranks(training, "dgx-a100", parallel, predictor=p).step
        for p in ("tile", twice)
    )
    assert theirs.slowest.kernels_s == pytest.approx(2 * ours.slowest.kernels_s)
    assert theirs.slowest.traffic[0].time_s == pytest.approx(ours.slowest.traffic[0].time_s)


# ---- several kinds of GPU -----------------------------------------------------------------------

BOTH = "dgx-h100+dgx-a100"


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 16},
        {"tp": 8, "dp": 2},
        {"dp": 8, "pp": 2, "microbatches": 4},
        {"dp": 16, "zero": 3, "microbatches": 2},
    ],
    ids=str,
)
def test_kinds_of_the_same_gpu_are_one_cluster(training: Graph, degrees: dict[str, int]):
    """To the last bit: what they take, hold, send and could do."""
    whole, two = (
        step(training, "2xdgx-a100", **degrees),
        step(training, "dgx-a100+dgx-a100", **degrees),
    )
    assert two.time_s == whole.time_s and two.interval == whole.interval
    assert two.peak_flops_per_s == whole.peak_flops_per_s and two.mfu == whole.mfu
    assert not two.is_mixed and two.target == whole.target
    for one, other in zip(whole.parts, two.parts, strict=True):
        assert (one.traffic, one.kernels_s, one.holds) == (
            other.traffic, other.kernels_s, other.holds
        )  # fmt: skip


@pytest.mark.parametrize(
    "degrees", [{"dp": 16}, {"tp": 8, "dp": 2}, {"dp": 8, "pp": 2, "microbatches": 4}], ids=str
)
def test_a_mixed_cluster_is_between_its_kinds(training: Graph, degrees: dict[str, int]):
    quick, slow = step(training, "2xdgx-h100", **degrees), step(training, "2xdgx-a100", **degrees)
    for name in (BOTH, "dgx-a100+dgx-h100"):
        mixed = step(training, name, **degrees)
        assert quick.time_s < mixed.time_s <= slow.time_s * (1 + 1e-9)
        assert mixed.flops == quick.flops and mixed.params == quick.params
        sums = (quick.peak_flops_per_s + slow.peak_flops_per_s) / 2
        assert mixed.peak_flops_per_s == pytest.approx(sums)


def test_ranks_that_share_a_part_wait_for_the_slowest(training: Graph):
    """All kernels of it are the slow GPU's; what the quick one takes is there beside it."""
    mixed, quick = step(training, BOTH, dp=16), step(training, "2xdgx-h100", dp=16)
    (part,) = mixed.parts
    assert [(x.gpu, x.first, x.count) for x in part.where] == [
        ("h100-sxm-80gb", 0, 8), ("a100-sxm-80gb", 8, 8)
    ]  # fmt: skip
    assert {run.gpu for run in part.runs} == {"a100-sxm-80gb"}
    assert part.kernels_on["a100-sxm-80gb"] == part.kernels_s
    assert part.kernels_on["h100-sxm-80gb"] == pytest.approx(quick.slowest.kernels_s, rel=0.05)
    assert any("equal shares" in text for text in mixed.assumed)
    slow = gpuir.simulate_ranks(training, BOTH, gpuir.Parallel(dp=16), slow={0: 9.0}).step
    assert {run.gpu for run in slow.parts[0].runs} == {"h100-sxm-80gb"}


def deep(layers: int) -> Graph:
    """Layers that are alike, each a product that takes a GPU longer than its launch."""
    lines = ["  in %h0: f16[2048, 4096]"]
    lines += [f"  param %w{i}: f16[4096, 4096]" for i in range(layers)]
    lines += [
        f'  %h{i + 1}: f16[2048, 4096] = t.matmul(%h{i}, %w{i}) at "m:{i}"' for i in range(layers)
    ]
    return gpuir.parse("\n".join(["graph @deep {", *lines, f"  out %h{layers}", "}"]))


@pytest.mark.parametrize("kinds", [BOTH, "dgx-a100+dgx-h100", "dgx-h100+8xl40s", "8xt4+dgx-h100"])
def test_parts_are_cut_for_their_gpus(kinds: str, monkeypatch: pytest.MonkeyPatch):
    """The quick GPUs get more, and the step is quicker than of parts as if all were alike."""
    parallel = gpuir.Parallel(dp=8, pp=2, microbatches=8)
    found = gpuir.simulate_ranks(deep(24), kinds, parallel).step
    sizes = {part.where[0].gpu: part.params for part in found.parts}
    assert sum(sizes.values()) == found.params
    assert sizes["h100-sxm-80gb"] == max(sizes.values()) > found.params / 2

    def alike(g: Graph, parts: int, weigh: Any, apart: bool) -> Partition:
        return partition(g, parts, weigh if callable(weigh) else weigh[0], apart)

    monkeypatch.setattr(gpuir.run.ranks, "partition", alike)
    even = gpuir.simulate_ranks(deep(24), kinds, parallel).step
    assert [part.params for part in even.parts] == [found.params / 2] * 2
    assert found.time_s < even.time_s


def test_memory_is_that_of_the_smallest_gpu(training: Graph):
    kinds = "8xa100-sxm-80gb+8xa100-sxm-40gb"
    small = step(training, "8xa100-sxm-40gb", dp=8).fullest.available_bytes
    large = step(training, "8xa100-sxm-80gb", dp=8).fullest.available_bytes
    assert [p.available_bytes for p in step(training, kinds, dp=16).parts] == [small]
    piped = step(training, kinds, dp=8, pp=2, microbatches=2)
    assert [p.available_bytes for p in piped.parts] == [large, small]


def test_ranks_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch):
    """No graph twice for one GPU."""
    calls: list[Any] = []

    def counted(g: Graph, *, target: str, **options: Any) -> Graph:
        calls.append((target, shape_of(g)))
        return gpuir.analyze(g, target=target, **options).graph

    monkeypatch.setattr(gpuir.run.ranks, "costed", counted)
    for nodes in (1, 2):
        calls.clear()
        kinds = f"{nodes}xdgx-h100+{nodes}xdgx-a100"
        gpuir.simulate_ranks(deep(24), kinds, gpuir.Parallel(dp=4, pp=4 * nodes)).step
        assert {target for target, _ in calls} == {"h100-sxm-80gb", "a100-sxm-80gb"}
        assert len(set(calls)) == len(calls) <= 12


def test_the_command_says_which_part_is_on_which_gpu(tmp_path: Path):
    args = ["simulate", str(ENCODER), "--cluster", BOTH, "--pp", "2", "--dp", "8", "--train"]
    args += ["--dims", "batch=64,seq=64", "--microbatches", "4"]

    def said(*more: str) -> str:
        result = CliRunner().invoke(main, [*args, *more], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    for width in ("80", "120"):
        text = said("--width", width, "--critical-path")
        assert max(map(len, text.splitlines())) <= int(width)
        assert "rank 8 (a100-sxm-80gb), backward" in text and "0 to 7   h100-sxm-80gb" in text
        assert "equal shares" in text
    parts = json.loads(said("--format", "json"))["parts"]
    assert [p["gpus"][0]["gpu"] for p in parts] == ["h100-sxm-80gb", "a100-sxm-80gb"]
    events = json.loads(said("--format", "trace"))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"ranks 0 to 7: h100-sxm-80gb", "ranks 8 to 15: a100-sxm-80gb"}
    shared = ["simulate", str(ENCODER), "--cluster", BOTH, "--dp", "16", "--format", "chakra"]
    shared += ["--dims", "batch=64,seq=64", "-o", str(tmp_path / "traces")]
    refused = CliRunner().invoke(main, shared)
    assert (
        refused.exit_code == 2 and "all ranks in a trace must have the same GPU" in refused.output
    )
    rest = [str(ENCODER), "--cluster", BOTH, "--dims", "batch=64,seq=64"]
    refused = CliRunner().invoke(main, ["analyze", *rest])
    assert refused.exit_code == 2 and "several kinds of GPU" in refused.output


def test_a_table_is_cut_by_what_each_replica_looks_up():
    """A batch that many groups share looks up more than a table holds, each group less."""
    held = []
    for batch, options in ((64, ""), (4096, ""), (4096, ",replicas=64")):
        g = gpuir.load(ENCODER, dims={"batch": batch, "seq": 64})
        cut = gpuir.pipeline(f"shard{{ranks=2{options}}}").run(g)
        held.append(sum(v.type.size for v in cut.params))
    assert held[0] == held[2] < held[1]
    with pytest.raises(UsageError, match="groups of ranks that will split the batch"):
        gpuir.pipeline("shard{ranks=2,by=data,replicas=2}")


def test_a_cut_that_shares_little_out_is_said():
    """Twelve heads, and 3072 columns, divide by 6, and by 5 neither."""
    shared: list[gpuir.Step] = []
    for tp in (6, 5):
        g = gpuir.load(ROOT / "examples/encoder.onnx", dims={"batch": 8, "seq": 64})
        shared.append(step(g, tp=tp))
    six, five = (s.tp_shared for s in shared)
    assert six and six.flops == pytest.approx(1.0) and six.weights > 0.99
    assert five and five.flops < 0.01 and 0.2 < five.weights < 0.25 and five.is_little
    assert step(gpuir.load(ENCODER, dims={"batch": 8, "seq": 64}), dp=2).tp_shared is None
    for command in (["simulate", "--tp", "5"], ["plan", "--tp", "5", "--pp", "1"]):
        args = [*command, str(ROOT / "examples/encoder.onnx"), "--cluster", "5xa100-sxm"]
        said = CliRunner().invoke(main, [*args, "--dims", "batch=8,seq=64"])
        assert said.exit_code == 0, said.output
        assert "tp=5 cuts only 22 % of the weights and 0 % of the products" in said.stderr
        assert "tp cuts" in said.stdout
