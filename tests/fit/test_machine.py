"""The path that a GPU takes, with a torch whose GPU is this CPU."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from gpuir.fit import machine
from gpuir.fit.campaign import Problem, read_plan, shipped_plan
from gpuir.fit.collect import measure
from gpuir.fit.machine import Machine, gpu_numbers
from gpuir.fit.timing import MOST_FLUSHES, CudaWatch, HostWatch
from gpuir.ir.errors import UsageError
from gpuir.targets.load import load_target

torch = pytest.importorskip("torch")

A100 = load_target("a100-pcie")
SMALL = Problem("softmax", "f32", (("rows", 8), ("cols", 16)))


class Event:
    """A time on a clock that runs here."""

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Pretender:
    """torch, with tensors of `cuda` made on the CPU."""

    def __init__(self, fail: str = ""):
        self.dead, self.synchronised = False, 0
        self.fail = fail
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            get_device_name=lambda: "NVIDIA A100-PCIE-40GB",
            get_device_properties=lambda _: SimpleNamespace(
                multi_processor_count=98, total_memory=40 << 30
            ),
            mem_get_info=lambda: (1 << 30, 40 << 30),
            memory_reserved=lambda: 3 << 28,
            memory_allocated=lambda: 1 << 28,
            Event=Event,
            synchronize=self.synchronize,
            empty_cache=lambda: None,
        )

    def synchronize(self) -> None:
        self.synchronised += 1
        if self.dead and self.synchronised > 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name == self.fail:
            raise RuntimeError("CUDA error")
        if name not in ("randn", "randint", "empty", "ones", "zeros", "tensor"):
            return found

        def made(*args: Any, device: str = "cpu", **extra: Any) -> Any:
            return found(*args, device="cpu" if device == "cuda" else device, **extra)

        return made


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    def with_torch(**how: Any) -> Machine:
        fake = Pretender(**how)
        monkeypatch.setattr("gpuir.fit.timing.WAKE_S", 0.0)
        monkeypatch.setattr("gpuir.fit.machine.import_module", lambda name: fake)
        return Machine.of(A100)

    return with_torch


def test_a_gpu_is_found_and_named(pretend):
    machine = pretend()
    assert machine.device == "cuda"
    assert machine.facts["device"] == "NVIDIA A100-PCIE-40GB"
    assert machine.provenance.startswith("NVIDIA A100-PCIE-40GB, torch ")
    assert list(machine.differences(A100)) == []
    assert list(machine.differences(load_target("h100"))) == [
        "NVIDIA A100-PCIE-40GB has 98 SMs, h100-sxm-80gb 132",
        "NVIDIA A100-PCIE-40GB has 40 GiB of memory, h100-sxm-80gb 80",
    ]


def test_rows_are_measured_between_events_with_the_l2_flushed(pretend):
    machine = pretend()
    assert isinstance(machine.watch, CudaWatch)
    assert machine.watch.buffer.numel() * 4 == 1 << 28  # more than four times 40 MiB
    row = measure(machine, SMALL, 0.2)
    assert row.is_measured and row.repeats >= 5
    assert row.latency_s > 1e-8
    assert gpu_numbers(machine, 0.05)["launch_s"] > 1e-8


def test_a_row_too_large_is_left_out(pretend):
    machine = pretend()
    assert machine.free_bytes == 3 << 29  # with what torch only keeps for later tensors
    note = measure(machine, Problem("add", "f32", (("cells", 1 << 28),))).note
    assert note == "needs 3.22 GB of memory"


def test_the_gpu_is_kept_busy_while_the_host_launches(pretend, monkeypatch):
    """A call of many launches: the buffer is written until they are all under way."""
    now = 0.0

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    for module in (__name__, "gpuir.fit.timing"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: now)
    watch = replace(pretend().watch, buffer=SimpleNamespace(zero_=lambda: passes(0.002)))
    assert watch._flushes(lambda: None) == 1
    assert watch._flushes(lambda: passes(0.05)) == 50
    assert watch._flushes(lambda: passes(10)) == MOST_FLUSHES


def test_what_a_gpu_does_not_have_is_left_out(pretend):
    row = measure(
        pretend(fail="_scaled_mm"), Problem("linear", "f8e4m3", (("m", 16), ("n", 16), ("k", 16)))
    )
    assert row.note == "CUDA error"


def test_a_gpu_that_stopped_answering_ends_the_run(pretend):
    machine = pretend()
    machine.torch.dead, machine.torch.synchronised = True, 0
    with pytest.raises(UsageError, match="the GPU no longer answers") as error:
        measure(machine, SMALL)
    assert error.value.where == "softmax f32 rows=8 cols=16"


@pytest.mark.slow
def test_every_kernel_of_the_plan_can_be_made(pretend):
    """As much of each as this CPU computes in no time: one row, one head, small extents."""
    machine = pretend()
    for op, dtype in {(c.op, c.dtype): c for c in read_plan(shipped_plan("calibrate"))}:
        if dtype in ("f8e4m3", "i8", "tf32") or op == "lstm":  # whose weights are made elsewhere
            continue
        problem = next(
            c for c in read_plan(shipped_plan("calibrate")) if (c.op, c.dtype) == (op, dtype)
        )
        kept = {"window", "stride"}
        shape = {c: n if c in kept else min(n, 16) for c, n in problem.extents}
        shape |= {"kv_heads": shape["heads"]} if "heads" in shape else {}
        row = measure(machine, Problem(op, dtype, tuple(shape.items())), 1e-3)
        assert row.is_measured, (problem, row.note)


def test_the_clock_of_a_cpu_measures_what_a_call_takes():
    timing = HostWatch()(lambda: sum(range(1000)), 0.02)
    assert 0 < timing.least <= timing.seconds
    assert timing.repeats >= 5 and timing.spread >= 0


@pytest.mark.parametrize(("fast_to", "held"), [(32, 32), (256, 64), (0, 64)])
def test_a_shared_cache_is_as_large_as_it_is_fast(
    fast_to: int, held: int, monkeypatch: pytest.MonkeyPatch
):
    """MiB up to which footprints are fast, of a cache listed with 64: all of it where no end is
    seen."""
    mib = 1 << 20

    def bandwidth(_: Machine, size: int, __: float) -> float:
        return 4e10 if size <= fast_to * mib else 1e10

    monkeypatch.setattr(machine, "_bandwidth", bandwidth)
    listed = {"sm.smem_bytes": 2 * mib, "l2.bytes": 64 * mib}
    here = Machine.of(load_target("cpu"))
    found = machine._memories(here, listed, 1, 0.0)  # pyright: ignore[reportPrivateUsage]
    assert found["l2.bytes_per_s"] >= found["dram.bytes_per_s"]
    assert held * mib <= found["l2.bytes"] <= 2 * held * mib


def test_a_target_is_of_this_machine_or_not():
    mine = replace(load_target("cpu"), title=machine.cpu_title(Machine.of(load_target("cpu"))))
    assert machine.check_at_hand(replace(mine, sms=1)) == "cpu"
    for other in (load_target("cpu"), replace(mine, sms=1 << 10)):
        with pytest.raises(UsageError, match="does not describe a device of this machine"):
            machine.check_at_hand(other)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch finds no GPU"):
            machine.check_at_hand(A100)
