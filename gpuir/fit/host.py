"""How much longer the host at hand takes than the reference, by one tiny op of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from gpuir.fit.machine import cpu_name, sees_gpu, torch_here
from gpuir.fit.timing import HostWatch, Timing
from gpuir.targets.host import HostMachine
from gpuir.targets.spec import slug
from gpuir.targets.target import FrozenTable

# What the reference (specs/hosts/reference.toml) takes for a subtraction of two small tensors: on a
# GPU between two events, less a call that does nothing, the mean of NeuSight's machines with an
# A100 and an MI100 (12.6 and 13.7 us, docs/validation/profiles.md); on the CPU alone, one core of
# an AMD EPYC 7003, which the reference is taken to have, the fastest of many runs, PyTorch 2.13.
ON_GPU_S, ON_CPU_S = 13.2e-6, 1.6e-6
RUNS, FASTEST = 25, 5  # as NeuSight timed: the mean of the fastest 5 of 25
CELLS = 16  # of a tensor: no arithmetic to speak of
# Assumed: rounds differ by a tenth, where they did not differ by more. What a CPU takes without a
# GPU says nothing of the driver's calls, a third of an op, nor of where the process will run.
ROUNDS_OFF, CPU_OFF = 1.1, 1.3
FEWEST_ROUNDS = 2
MOST_OFF = 10.0  # HostMachine.uncertainty

Run = Callable[[], object]


class MeasuredHost(NamedTuple):
    """A host, and what its rounds differed by: the distance between their quartiles over the
    median."""

    host: HostMachine
    spread: float


def measured_host(name: str, budget_s: float) -> MeasuredHost:
    """The host at hand: by a GPU's events where torch sees a GPU, else by what its CPU takes.
    UsageError without torch."""
    torch = torch_here()
    on_gpu = sees_gpu()
    seconds, rounds = (_gpu_s if on_gpu else _cpu_s)(torch, budget_s)
    low, first, middle, third, high = np.quantile(rounds, (0.1, 0.25, 0.5, 0.75, 0.9)).tolist()
    where = f"on {torch.cuda.get_device_name()}" if on_gpu else "on the CPU, without a GPU"
    reference_s = ON_GPU_S if on_gpu else ON_CPU_S
    how = (
        f"measured by gpuir calibrate --host {where}, torch "
        f"{torch.__version__}: a subtraction of {CELLS} elements takes "
        f"{seconds * 1e6:.3g} us, and {reference_s * 1e6:.3g} us on the "
        "reference"
    )
    off = (
        "assumed: rounds of the same measurement differ by a tenth at most"
        if on_gpu
        else "assumed: measured without a GPU, so calls of the driver (a "
        "third of an op) are not included"
    )
    least_off = ROUNDS_OFF if on_gpu else CPU_OFF
    low = max(low, seconds / MOST_OFF)  # less than nothing, where the call subtracted took longer
    rounds_off = min(max(high / seconds, seconds / low), MOST_OFF)
    if rounds_off > least_off:
        off = "measured: 80 % of the rounds took from "
        off += f"{low / seconds:.3g} to {high / seconds:.3g} times as long"
    processor = cpu_name()
    host = HostMachine(
        name=name or slug(processor),
        title=processor,
        slowdown=float(f"{seconds / reference_s:.3g}"),
        uncertainty=float(f"{max(least_off, rounds_off):.3g}"),
        sources=FrozenTable({"slowdown": how, "uncertainty": off}),
    )
    return MeasuredHost(host, (third - first) / middle)


def _cpu_s(torch: Any, budget_s: float) -> tuple[float, list[float]]:
    """The fastest: what else runs on the machine only adds to it; and each round. One thread
    launches kernels."""
    one, other = (torch.zeros(CELLS) for _ in range(2))
    ends, rounds = perf_counter() + budget_s, list[Timing]()
    while perf_counter() < ends or len(rounds) < FEWEST_ROUNDS:
        rounds.append(HostWatch(1)(lambda: one - other, budget_s / 10))
    return min(r.least for r in rounds), [r.seconds for r in rounds]


def _gpu_s(torch: Any, budget_s: float) -> tuple[float, list[float]]:
    """Between two events around a subtraction, less what is between them around nothing: the
    median, and each round."""
    one, other = (torch.zeros(CELLS, device="cuda") for _ in range(2))
    ends, rounds = perf_counter() + budget_s, list[float]()
    while perf_counter() < ends or len(rounds) < 1 + FEWEST_ROUNDS:
        idle_s = _between_events(torch, lambda: one.to(one.dtype))
        rounds.append(_between_events(torch, lambda: one - other) - idle_s)
    return median(rounds[1:]), rounds[1:]  # the first loads the kernel


def _between_events(torch: Any, run: Run) -> float:
    seconds: list[float] = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return fmean(sorted(seconds)[:FASTEST])
