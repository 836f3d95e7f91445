"""The largest value of a dimension with which a model still fits a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from gpuir.simulate.memory import Memory


@dataclass(frozen=True)
class Largest:
    """What a search found: `value` is the largest that fits, None when not even the least does.

    `tried` are the memories that say so, by value, from the least to the largest. `impossible` is
    the least value tried that the model does not take at all, if there is one.
    """

    value: int | None
    tried: Mapping[int, Memory]
    impossible: int | None = None

    @cached_property
    def shrinking(self) -> tuple[tuple[int, int], ...]:
        """Neighbours among the values tried of which the larger needs less memory: then a value
        beyond the one found may fit too."""
        pairs = pairwise(self.tried.items())
        return tuple((a, b) for (a, x), (b, y) in pairs if y.peak_bytes < x.peak_bytes)


def largest(memory_of: Callable[[int], Memory | None], least: int, most: int) -> Largest:
    """The largest value from `least` to `most` whose memory fits, provided that memory grows with
    it; `memory_of` gives None for a value that the model does not take.

    Memory is nearly a line in a batch, and a parabola at worst in a length: a step aims at where
    the last two values lead, and once one does not fit, every other step halves what is left.
    """
    tried: dict[int, Memory] = {}
    fits, beyond, value = least - 1, most + 1, least
    impossible = None
    while beyond - fits > 1:
        found = memory_of(value)
        if found is not None:
            tried[value] = found
        if found is None:
            beyond = impossible = value
        elif found.fits is False:
            beyond = value
        else:
            fits = value
        value = min(max(_aim(tried, fits, beyond), fits + 1), beyond - 1)
    by_value = {n: tried[n] for n in sorted(tried)}
    return Largest(fits if fits >= least else None, by_value, impossible)


def _aim(tried: Mapping[int, Memory], fits: int, beyond: int) -> int:
    """The next value to try: where a line through two others says that memory is used up."""
    half = (fits + beyond) // 2
    others = [n for n in tried if n != fits]
    if not others or fits not in tried:
        return min(2 * fits, half)
    other = beyond if beyond in tried else max(others)
    if other == beyond and len(tried) % 2:
        return half
    spare, rest = tried[fits].spare_bytes or 0, tried[other].spare_bytes or 0
    per_step = (spare - rest) / (other - fits)
    return fits + int(spare / per_step) if per_step > 0 else half
