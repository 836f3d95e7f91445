"""Advice: every gain is that of a run, certain where errors cannot undo it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Graph, Level, Node
from gpuir.ir.notes import Cost
from gpuir.plan.advise import Bench, Trial, advise
from gpuir.plan.changes import ModelChange, Setup
from gpuir.report.answer import Answer, Details, Device
from gpuir.targets.profile import load_profile

SETUP = Setup("t4", "eager", dims={"batch": 4, "seq": 8}, options={"optimizer": "adamw"})


def answer(
    *kernels: float, items: int = 4, host_s: float = 0.0, fits: bool = True, target: str = "t4"
) -> Answer:
    """A run of kernels whose times may be 20 % off, behind a host."""
    costs = [
        Cost(s, "compute", "tile@2", (("compute", s),), (), (0.8 * s, 1.2 * s)) for s in kernels
    ]
    nodes = tuple(Node(None, (), (), None, c) for c in costs)  # type: ignore
    graph = Graph(Level.costed, "g", nodes=nodes, target=target)
    graph.__dict__["walk"] = lambda: iter(())
    run: Any = SimpleNamespace(profile=load_profile("eager"))
    nothing: Any = None
    return Answer(
        "g",
        target,
        "eager",
        batch=items,
        latency_s=sum(kernels) + host_s,
        reserved_bytes=1,
        available_bytes=int(fits),
        details=Details(graph, (), run, nothing, Device(target, "")),
    )


def trial(before: Answer, after: Answer) -> Trial:
    change = ModelChange("stack", "x", "y", lambda s: s)
    return Trial((change,), SETUP, before, after)


def test_a_gain_is_of_the_time_of_an_item():
    x = trial(answer(1.0, items=2), answer(1.5, items=6))
    assert x.gain == pytest.approx(1 - (1.5 / 6) / (1.0 / 2)) and x.speedup == pytest.approx(2)
    assert trial(answer(1.0), answer(2.0)).gain == -1


def test_kernels_of_both_runs_are_off_alike():
    before = answer(1.0, 0.5)
    assert trial(before, answer(1.0, 0.2)).is_certain, "0.5 takes 0.4 at least, 0.2 at most 0.24"
    assert not trial(before, answer(1.0, 0.4)).is_certain, "0.4 may take 0.48"
    assert not trial(before, answer(0.9, 0.5)).is_certain
    assert trial(answer(1.0, host_s=0.1), answer(1.0)).is_certain, "the host's part alone"
    assert not trial(answer(1.0, items=4), answer(1.9, items=8)).is_certain


def test_the_host_is_off_alike_in_both_runs():
    """Less of the host for more of a kernel is a gain only where the host is not quick."""
    spread = load_profile("eager").host.uncertainty
    assert spread > 1.2
    slow = trial(answer(host_s=1.0), answer(host_s=0.9))
    assert slow.is_certain, "whatever the host takes"
    sure = trial(answer(1.0, host_s=1.0), answer(1.0, 0.01, host_s=0.9))
    assert sure.is_certain
    unsure = trial(answer(1.0, host_s=1.0), answer(1.0, 0.1 * 0.8 / 1.2, host_s=0.9))
    assert unsure.gain > 0 and not unsure.is_certain


def test_what_needs_less_memory_helps_where_there_is_too_little():
    before = answer(1.0, fits=False)
    assert not trial(before, answer(1.0, fits=False)).fits, "as much is missing"
    assert trial(before, answer(1.0)).fits
    assert not trial(answer(1.0), answer(1.0, fits=False)).fits


def bench(times: dict[str, float], batch_s: float = 1.0) -> tuple[Bench, list[Setup]]:
    """A bench on which what a setup takes follows from its words."""
    ran: list[Setup] = []

    def run(setup: Setup) -> Answer:
        ran.append(setup)
        if setup.profile == "cudagraph":
            raise ModelError("it does not capture")
        size = setup.dims["batch"]
        share = times.get(str(setup.profile), 1.0) * times.get(setup.target, 1.0)
        if setup.options.get("fused"):
            share *= times["fused"]
        time_s = share * (3.0 + batch_s * size)
        return answer(time_s, items=size, fits=size <= 16, target=setup.target)

    graph = Graph(Level.graph, "g")
    return Bench(lambda setup: graph, run), ran


def test_the_best_are_listed_first_and_tried_together():
    test, ran = bench({"compiled": 0.6, "fused": 0.9, "l4": 0.5})
    found = advise(test, SETUP, "torch")
    assert [x.changes[0].what for x in found.advice] == [
        "the compiled profile",
        "batch 16",
        "a fused optimizer",
    ]
    assert [round(x.gain, 3) for x in found.advice] == [
        0.4,
        round(1 - (19 / 16) / (7 / 4), 3),
        0.1,
    ]
    two, three = found.together
    assert [c.kind for c in three.changes] == ["stack", "batch", "optimizer"]
    assert three.gain == pytest.approx(1 - 0.6 * 0.9 * (19 / 16) / (7 / 4))
    assert two.gain < three.gain and three.setup in ran
    (failed,) = [x for x in found.rest if x.refusal]
    assert failed.changes[0].what == "the cudagraph profile"
    assert failed.refusal == "it does not capture"
    too_large = [x for x in found.rest if not x.fits and x.after]
    assert [x.changes[0].what for x in too_large] == ["batch 32"]
    assert found.faster is not None and found.faster.setup.target == "l4"
    assert all(x.setup in ran for x in (*found.advice, *found.together))


def test_the_least_batch_near_the_best_is_advised():
    test, _ = bench({}, batch_s=10.0)
    found = advise(test, SETUP, "torch", kinds=["batch"])
    assert [x.changes[0].what for x in found.advice] == ["batch 8"]


def test_nothing_is_advised_below_two_percent():
    test, _ = bench({"compiled": 0.985, "fused": 0.99}, batch_s=1e6)
    found = advise(test, SETUP, "torch", kinds=["batch", "stack", "optimizer"])
    assert found.advice == () == found.together


def test_a_dearer_stack_for_the_same_gain_is_not_advised():
    runs = {"compiled": 0.5, "cudagraph": 0.495}

    def run(setup: Setup) -> Answer:
        return answer(runs.get(str(setup.profile), 1.0))

    graph = Graph(Level.graph, "g")
    found = advise(Bench(lambda s: graph, run), SETUP, "torch", kinds=["stack"])
    assert [x.changes[0].what for x in found.advice] == ["the compiled profile"]
