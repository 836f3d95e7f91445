"""From which size on the device, and no longer the host, decides how long a model takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuir.report.answer import Answer
from gpuir.simulate.timeline import HOST_BOUND

FINE = 32  # where the answer is larger, it is found to one part in so many
GUESSES = 3  # where the answer lies, before the gap is halved
LEAP = 16  # times as large is what is tried next, until the run is not host-bound


@dataclass(frozen=True)
class Crossover:
    """What a search found: `value` is the least at which the device waits for the host for no more
    than a tenth of the time, None when it does even at the largest that was tried.

    `tried` has the answers by value, from the least to the largest. `held_up` is the largest
    value tried below the one found; the two are neighbours, or within one part in 32. `refused` is
    a value that the model does not take, if there is one.
    """

    value: int | None
    held_up: int | None
    tried: Mapping[int, Answer]
    refused: int | None = None


def crossover(answer_of: Callable[[int], Answer | None], least: int, most: int) -> Crossover:
    """The least value from `least` to `most` at which the run is not host-bound, provided that
    kernels grow with the value and the host's work does not. `answer_of` gives None for a value
    that the model does not take.

    A value may cost a load, so few are tried: by leaps, then among doublings of `least`, between
    two of which the gap is halved, first where what is known says that the answer lies.
    """
    tries = Tries(answer_of)
    last = least
    while tries.is_held_up(last) and last < most:
        last = min(last * LEAP, most)
    doublings = [least]
    while doublings[-1] < last:
        doublings.append(min(2 * doublings[-1], most))
    i = bisect_left(doublings, True, key=lambda n: not tries.is_held_up(n))
    if 0 < i < len(doublings):
        below, above = doublings[i - 1 : i + 1]
        for _ in range(GUESSES if tries.free else 0):
            expected = tries.expected()
            for n in reversed(halved(below, above, lambda n, x=expected: n < x)):
                tries.is_held_up(n)
        halved(below, above, tries.is_held_up)
    return Crossover(tries.free, tries.held_up, dict(sorted(tries.tried.items())), tries.refused)


def halved(below: int, above: int, is_below: Callable[[int], bool]) -> tuple[int, int]:
    """Neighbours, or nearly, of which the first is below what is looked for and the second not."""
    while above - below > max(1, below // FINE):
        middle = (below + above) // 2
        below, above = (middle, above) if is_below(middle) else (below, middle)
    return below, above


@dataclass
class Tries:
    """What was tried so far: of the values that the host holds up the largest, of those that it
    does not, or that the model does not take, the least."""

    answer_of: Callable[[int], Answer | None]
    tried: dict[int, Answer] = field(default_factory=dict[int, Answer], init=False)
    held_up: int | None = field(default=None, init=False)
    free: int | None = field(default=None, init=False)
    refused: int | None = field(default=None, init=False)

    def is_held_up(self, value: int) -> bool:
        """Whether the host holds a value up, by what is known of others or by trying."""
        ends = [n for n in (self.free, self.refused) if n is not None]
        if self.held_up is not None and value <= self.held_up:
            return True
        if ends and value >= min(ends):
            return False
        found = self.answer_of(value)
        if found is None:
            self.refused = value
            return False
        self.tried[value] = found
        if found.is_host_bound:
            self.held_up = value
        else:
            self.free = value
        return bool(found.is_host_bound)

    def expected(self) -> float:
        """Where the answer lies between the nearest that was tried, if the share of the time that
        the device waits falls evenly."""
        assert self.held_up and self.free
        most, least = (
            x.gaps_s / x.latency_s for x in (self.tried[self.held_up], self.tried[self.free])
        )
        return self.held_up + (self.free - self.held_up) * (most - HOST_BOUND) / (most - least)
