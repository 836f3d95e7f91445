"""What each cause would gain: by hand, against changed specs, and laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gpuir
from gpuir.simulate.causes import CAUSES, gains_of, less
from gpuir.simulate.microbatches import orders_of, run_pipeline
from gpuir.simulate.step import part_times
from gpuir.simulate.timeline import Prepared, timeline
from gpuir.targets.profile import NO_HOST, profile_of

ENCODER = "tests/encoder.onnx"


def costed(batch: int = 1, profile: str = "eager", target: str = "a100", **options):
    dims = {"batch": batch, "seq": 128}
    return gpuir.analyze(ENCODER, target, dims=dims, profile=profile, **options).graph


def gains(g) -> dict[str, float]:
    return {x.cause: x.gain_s for x in gpuir.analyze(g).gains}


def latency(g) -> float:
    return timeline(g, profile_of(g)).time_s


PROFILES = ["eager", "compiled", "cudagraph", "ort", "tensorrt", "ideal"]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("batch", [1, 16])
def test_every_cause_is_there_and_the_most_comes_first(profile: str, batch: int):
    g = costed(batch, profile)
    found = gpuir.analyze(g).gains
    assert {x.cause for x in found} == {*CAUSES}
    assert [x.gain_s for x in found] == sorted((x.gain_s for x in found), reverse=True)
    assert all(0 <= x.gain_s <= latency(g) for x in found)


@pytest.mark.parametrize("profile", ["eager", "ort", "tensorrt"])
def test_the_timeline_run_again_with_nothing_gone_is_the_timeline(profile: str):
    g = costed(2, profile)
    made = Prepared.of(g, profile_of(g))
    assert made.run([x.time_s for x in made.costs]).time_s == latency(g)


@pytest.mark.parametrize("batch", [1, 16])
def test_without_the_host_the_device_runs_alone(batch: int):
    g = costed(batch)
    alone = timeline(g, replace(profile_of(g), host=NO_HOST)).time_s
    assert gains(g)["host"] == pytest.approx(latency(g) - alone)


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_a_quicker_host_gains_no_more_than_none(batch: int):
    g = costed(batch)
    profile = profile_of(g)
    halved = timeline(g, replace(profile, host=profile.host.scaled(0.5))).time_s
    assert 0 <= latency(g) - halved <= gains(g)["host"] + 1e-12


def test_on_the_device_alone_gains_are_sums_over_kernels():
    """Under `ideal` a run is its kernels, one after another."""
    g = costed(16, "ideal")
    costs = [n.cost for n in g.walk() if n.cost and n.cost.terms]
    found = gains(g)
    for cause, other in (("memory", "compute"), ("compute", "memory")):
        more = (max(c.term(cause) - c.term(other), 0.0) for c in costs)
        assert found[cause] == pytest.approx(sum(more))
    launch_s = gpuir.load_target("a100").launch_s
    assert found["launches"] == pytest.approx(launch_s * len(costs))
    assert found["waits"] == pytest.approx(sum(c.term("latency") - launch_s for c in costs))
    assert found["host"] == found["copies"] == found["communication"] == 0


def test_copies_gain_what_they_take():
    g = costed(16, "ort")
    s = gpuir.analyze(g)
    assert gains(g)["copies"] >= s.timeline.copies_s > 0
    alone = timeline(g, replace(s.software, copies=None)).time_s
    assert gains(g)["copies"] == pytest.approx(latency(g) - alone)


LOOP = """graph @looped {
  in %x: f32[1024]
  %y: f32[1024] = t.loop({
    in %i: i64[]
    in %a: f32[1024]
    %b: f32[1024] = t.map("relu", [%a]) at "relu"
    out %b
  }, 50, [%x]) at "loop"
  out %y
}
"""


def test_a_loop_gains_what_its_trips_do():
    """The kernels of a loop's body count as often as they run."""
    looped = gpuir.analyze(gpuir.parse(LOOP), "a100", profile="ideal").graph
    launch_s = gpuir.load_target("a100").launch_s
    assert gains(looped)["launches"] == pytest.approx(50 * launch_s)


def test_a_kernel_takes_its_next_largest_term():
    cost = gpuir.Cost(
        9e-6, "memory", "mine@1", (("compute", 4e-6), ("memory", 7e-6), ("latency", 2e-6))
    )
    seconds = {cause: less(cost, cause, 1.5e-6) for cause in CAUSES}
    assert seconds["memory"] == pytest.approx(6e-6)
    assert seconds["compute"] == seconds["host"] == 9e-6
    assert seconds["launches"] == pytest.approx(7.5e-6)
    assert seconds["waits"] == pytest.approx(8.5e-6)


def test_the_ranks_of_a_graph_send_nothing_without_communication():
    g = gpuir.load(ENCODER, dims={"batch": 8, "seq": 128})
    step = gpuir.simulate_ranks(g, "dgx-a100", gpuir.Parallel(tp=4)).step
    (r,) = step.parts[0].runs
    silent = timeline(mute(r.graph), r.timeline.profile).time_s
    found = {x.cause: x.gain_s for x in step.gains}
    assert found["communication"] == pytest.approx(step.time_s - silent, rel=1e-6)
    assert found == pytest.approx(
        {x.cause: x.gain_s for x in gains_of(r.graph, r.timeline.profile, step.time_s)}
    )


def mute(g: gpuir.Graph) -> gpuir.Graph:
    """The graph with collectives that take no time."""
    nodes = (
        replace(n, cost=gpuir.Cost(0.0, "network", n.cost.by, (("network", 0.0),)))
        if n.cost and n.op.name == "k.collective"
        else n
        for n in g.nodes
    )
    return replace(g, nodes=tuple(nodes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        gpuir.Parallel(pp=2, microbatches=4),
        gpuir.Parallel(pp=2, dp=2, microbatches=4),
        gpuir.Parallel(pp=2, microbatches=4, schedule="interleaved", chunks=2),
        gpuir.Parallel(pp=2, microbatches=4, schedule="zero-bubble"),
    ],
    ids=str,
)
@pytest.mark.parametrize("train", [True, False])
def test_a_pipeline_is_run_again_as_it_ran(parallel: gpuir.Parallel, train: bool):
    if parallel.schedule == "zero-bubble" and not train:
        pytest.skip("a schedule of training")
    options = {"train": True, "optimizer": "adamw", "fused": True} if train else {}
    g = gpuir.load(
        "tests/encoder.onnx", dims={"batch": 4, "seq": 64}, profile="compiled", **options
    )
    step = gpuir.simulate_ranks(g, "dgx-a100", parallel, profile="compiled").step
    pipe = step.pipelined
    assert pipe is not None
    orders = orders_of(parallel, train)
    again = run_pipeline(orders, part_times(step.stages), pipe.sends, pipe.sends_back, pipe.norm_s)
    assert again.time_s == pytest.approx(step.time_s)
    found = {x.cause: x.gain_s for x in step.gains}
    assert all(0 <= gain < step.time_s for gain in found.values())
    assert found["communication"] > 0
    slow = gpuir.simulate_ranks(g, "dgx-a100", parallel, profile="compiled", slow={0: 1.5}).step
    assert max(step.gains, key=lambda x: x.gain_s).cause in ("host", "launches", "compute")
    kernels = ("compute", "memory")
    more = {x.cause: x.gain_s for x in slow.gains}
    assert sum(more[c] for c in kernels) > sum(found[c] for c in kernels)
