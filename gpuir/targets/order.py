"""Which GPUs are another with nothing taken away: every rate and size at least as much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from gpuir.targets.target import Target, walk

# What says nothing of how fast a kernel runs, or what another field says: peaks have the clocks
# that vendors quote them at, bandwidths their pins, `launch_s` is no rate but a time.
BESIDE = (
    *("base_clock_hz", "tensor_clock_hz", "dram.bytes", "dram.bus_bits", "dram.clock_hz"),
    *("dram.pin_bits_per_s", "launch_s"),
)
TABLES = ("link.", "pcie.", "slice.", "factors.", "local.", "backtest.")
# An SM of another make is another architecture, whatever it is called.
MAKE = ("sm.warp", "sm.fp32_lanes", "sm.flops_per_lane_clock", "sm.tensor_flops_per_clock")


def rates(target: Target) -> dict[str, float]:
    """What the speed of kernels hangs on, more being better: rates, clocks, sizes of caches and of
    SMs, the board's power, of which one that states none has enough."""
    found = {"tdp_w": inf}
    for path, quantity, value in walk(target):
        if quantity is not None and path not in BESIDE and not path.startswith(TABLES):
            assert isinstance(value, (int, float))
            found[path] = float(value)
    return found


def is_at_least(more: Target, less: Target) -> bool:
    """Whether one GPU has at least every rate of another, of the same architecture and kind of
    memory."""
    a, b = rates(more), rates(less)
    alike = _make(more) == _make(less) and all(a.get(path) == b.get(path) for path in MAKE)
    return alike and all(a.get(path, 0.0) >= n for path, n in b.items())


def _make(target: Target) -> tuple[str, str, str, bool]:
    return target.vendor, target.isa, target.dram.kind[:3], bool(target.dram.ecc)


def pairs(targets: Iterable[Target]) -> Iterator[tuple[Target, Target]]:
    """Of each two GPUs of which one `is_at_least` the other: that one, and the other. Two with the
    same rates come both ways."""
    targets = list(targets)
    for less in targets:
        for more in targets:
            if more is not less and is_at_least(more, less):
                yield more, less
