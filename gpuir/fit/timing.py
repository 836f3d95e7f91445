"""How long a call into torch takes on a device, by events on a GPU, by the clock on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import quantiles
from time import perf_counter, thread_time
from typing import Any, Protocol

from gpuir.fit.kit import Run

FEWEST, MOST = 5, 50  # runs of one measurement
WARM = 3  # runs before it: a library picks its kernel, a cache fills
FLUSH_BYTES = 1 << 28  # at least; writing so much outlasts the host's dispatch of the next call
FLUSH_TIMES = 4  # the L2's size
MOST_FLUSHES = 200
WAKE_S = 0.3  # of work, after which a GPU has left its idle clock; assumed
SAMPLE_S = 2e-4  # of one sample on a CPU, so that the clock's own cost does not count


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, and of the fastest; `spread` is the distance between the quartiles over
    the median."""

    seconds: float
    least: float
    spread: float
    repeats: int


class Stopwatch(Protocol):
    """Times a call in about `budget_s`."""

    @property
    def method(self) -> str: ...

    def __call__(self, run: Run, budget_s: float) -> Timing: ...


@dataclass(frozen=True)
class CudaWatch:
    """Times calls on a GPU, each alone between two events, with the L2 full of other data.

    The buffer is written before each call as often as it takes for the host to launch the call
    meanwhile, all its kernels, so that the GPU never waits for the host and no dispatch is in what
    the events measure. Clocks are left as they are; the GPU works for a while before the first
    call, as an idle one has a lower clock. The result is the median. Events tell half a microsecond
    (CUDA Runtime API, cudaEventElapsedTime).
    """

    torch: Any
    buffer: Any
    method = "cuda events, L2 flushed, median"

    @staticmethod
    def of(torch: Any, l2_bytes: int) -> CudaWatch:
        size = max(FLUSH_BYTES, FLUSH_TIMES * l2_bytes)
        watch = CudaWatch(torch, torch.empty(size // 4, dtype=torch.int32, device="cuda"))
        ends = perf_counter() + WAKE_S
        while perf_counter() < ends:
            watch._seconds(lambda: None, 1, 1)
        return watch

    def __call__(self, run: Run, budget_s: float) -> Timing:
        for _ in range(WARM):
            run()
        self.torch.cuda.synchronize()
        flushes = self._flushes(run)
        began = perf_counter()
        self._seconds(run, 1, flushes)
        cost_s = max(perf_counter() - began, 1e-6)
        count = round(min(max(budget_s / cost_s, FEWEST), MOST))
        return _median(self._seconds(run, count, flushes))

    def _flushes(self, run: Run) -> int:
        """How often the buffer is written, so that this lasts twice as long as the launches."""
        (flush_s,) = self._seconds(self.buffer.zero_, 1, 1)
        began = perf_counter()
        run()
        launches_s = perf_counter() - began
        self.torch.cuda.synchronize()
        return min(max(1, ceil(2 * launches_s / max(flush_s, 1e-6))), MOST_FLUSHES)

    def _seconds(self, run: Run, count: int, flushes: int) -> list[float]:
        event = self.torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
        for start, end in pairs:
            for _ in range(flushes):
                self.buffer.zero_()
            start.record()
            run()
            end.record()
        self.torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


@dataclass(frozen=True)
class HostWatch:
    """Times calls on a CPU, one after another on the same data, so that caches hold what fits.

    With one thread it counts the time that the thread had the core, with several it takes the
    clock on the wall. What else runs on the machine only adds time: the result is the lower
    quartile.
    """

    threads: int = 1

    @property
    def method(self) -> str:
        clock = "thread_time" if self.threads == 1 else "perf_counter"
        return f"{clock}, data in cache, lower quartile"

    def __call__(self, run: Run, budget_s: float) -> Timing:
        for _ in range(WARM):
            run()
        one_s = max(self._seconds(run, 1), 1e-8)
        calls = max(1, round(SAMPLE_S / one_s))
        samples = round(min(max(budget_s / (calls * one_s), FEWEST), MOST))
        seconds = [self._seconds(run, calls) for _ in range(samples)]
        timing, low = _median(seconds), quantiles(seconds, n=4)[0]
        return Timing(low, timing.least, timing.spread, samples * calls)

    def _seconds(self, run: Run, calls: int) -> float:
        clock = thread_time if self.threads == 1 else perf_counter
        began = clock()
        for _ in range(calls):
            run()
        return (clock() - began) / calls


def _median(seconds: Sequence[float]) -> Timing:
    low, middle, high = quantiles(seconds, n=4)
    return Timing(middle, min(seconds), (high - low) / middle, len(seconds))
