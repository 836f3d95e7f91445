"""From which size on the device, and no longer the host, decides how long a model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuir.simulate.timeline import Timeline

FINE = 32  # where the answer is larger, it is found to one part in so many


@dataclass(frozen=True)
class Crossover:
    """What a search found: `value` is the least at which the device waits for the host for no more
    than a tenth of the time, None when it does even at the largest that was tried.

    `tried` has the timelines by value, from the least to the largest. `held_up` is the largest
    value tried below the one found; the two are neighbours, or within one part in 32. `refused` is
    a value that the model does not take, if there is one.
    """

    value: int | None
    held_up: int | None
    tried: Mapping[int, Timeline]
    refused: int | None = None


def crossover(timeline_of: Callable[[int], Timeline | None], least: int, most: int) -> Crossover:
    """Doubles from `least` to `most` until the run is not host-bound, then halves the gap, provided
    that kernels grow with the value and the host's work does not. `timeline_of` gives None for a
    value that the model does not take."""
    tried: dict[int, Timeline] = {}
    held_up: int | None = None
    free: int | None = None
    refused: int | None = None
    value = least
    while True:
        found = timeline_of(value)
        if found is None:
            refused = value
        else:
            tried[value] = found
            if found.is_host_bound:
                held_up = value
            else:
                free = value
        end = free if free is not None else refused
        if end is None:
            if value == most:
                break
            value = min(2 * value, most)
            continue
        if held_up is None or end - held_up <= max(1, held_up // FINE):
            break
        value = (held_up + end) // 2
    return Crossover(free, held_up, {n: tried[n] for n in sorted(tried)}, refused)
