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


def largest(
    memory_of: Callable[[int], Memory | None],
    least: int,
    most: int,
    unfit: Mapping[int, Memory] | None = None,
) -> Largest:
    """The largest value from `least` to `most` whose memory fits, provided that memory grows with
    it; `memory_of` gives None for a value that the model does not take. `unfit` has memory that is
    known not to fit, of the value behind `most`.

    Memory is nearly a line in a batch, and a parabola at worst in a length: a step aims at where
    two values lead, and the one after a step that did not halve what is left does.
    """
    tried: dict[int, Memory] = dict(unfit or {})
    fits, beyond, value = least - 1, most + 1, least
    impossible = None
    aimed = False
    while (left := beyond - fits) > 1:
        found = memory_of(value)
        if found is not None:
            tried[value] = found
        if found is None:
            beyond = impossible = value
        elif found.fits is False:
            beyond = value
        else:
            fits = value
        is_slow = aimed and (beyond <= most or beyond in tried) and beyond - fits > left / 2
        aimed = not is_slow and beyond != impossible and fits in tried and len(tried) > 1
        aim = _aim(tried, fits, beyond) if aimed else min(2 * value, (fits + beyond) // 2)
        value = min(max(aim, fits + 1), beyond - 1)
    by_value = {n: tried[n] for n in sorted(tried)}
    return Largest(fits if fits >= least else None, by_value, impossible)


def _aim(tried: Mapping[int, Memory], fits: int, beyond: int) -> int:
    """Where a line through two values says that memory is used up. Before one is known that does
    not fit, it is the line of peaks, which what is reserved follows in jumps."""
    near = tried[fits]
    if beyond in tried:
        room, over = near.spare_bytes or 0, -(tried[beyond].spare_bytes or 0)
        return fits + int((beyond - fits) * room / (room + over))
    other = max(n for n in tried if n != fits)
    per_step = (near.peak_bytes - tried[other].peak_bytes) / (fits - other)
    room = (near.available_bytes or 0) - near.peak_bytes
    return fits + int(room / per_step) if per_step > 0 else (fits + beyond) // 2
