"""The caching allocator's rules, one at a time."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.simulate.segments import MIB, reserved

NO_LIMIT = 1 << 60


def trace(*steps: int) -> list[tuple[int, int]]:
    """Sizes are allocated under the numbers 0, 1, ...; -n frees storage n - 1."""
    sizes: list[int] = []
    events: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            events.append((len(sizes), step))
            sizes.append(step)
        else:
            events.append((-step - 1, -sizes[-step - 1]))
    return events


@pytest.mark.parametrize(
    ("steps", "segments"),
    [
        ((1,), 2 * MIB),
        ((MIB, MIB), 2 * MIB),
        ((MIB, MIB, 1), 4 * MIB),
        ((MIB + 1,), 20 * MIB),
        ((9 * MIB, 9 * MIB), 20 * MIB),
        ((9 * MIB, 9 * MIB, 3 * MIB), 40 * MIB),
        ((10 * MIB,), 10 * MIB),
        ((10 * MIB + 1,), 12 * MIB),
        ((30 * MIB, -1, 29 * MIB), 30 * MIB),  # less than 1 MiB over: not split
        ((30 * MIB, -1, 10 * MIB, 20 * MIB), 30 * MIB),
        ((30 * MIB, -1, 31 * MIB), 62 * MIB),  # what is free is in the way
        ((12 * MIB, 12 * MIB, -1, -2, 24 * MIB), 48 * MIB),  # segments are not joined
        ((8 * MIB, 8 * MIB, -1, -2, 16 * MIB), 20 * MIB),  # blocks of one are
    ],
)
def test_segments(steps: tuple[int, ...], segments: int):
    assert reserved(trace(*steps), NO_LIMIT) == segments


def test_near_the_limit_free_segments_are_given_back():
    steps = trace(30 * MIB, -1, 32 * MIB)
    assert reserved(steps, 62 * MIB) == 62 * MIB
    assert reserved(steps, 61 * MIB) == 32 * MIB
    assert reserved(trace(30 * MIB, 32 * MIB), 61 * MIB) == 62 * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB), st.integers(0, 30))))
def test_never_less_than_what_is_allocated(steps: list[tuple[bool, int, int]]):
    live: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    numbers, held, most = count(), 0, 0
    for is_new, size, which in steps:
        if is_new or not live:
            live[name := next(numbers)] = size
            events.append((name, size))
            held += size
            most = max(most, held)
        else:
            name = list(live)[which % len(live)]
            held -= live[name]
            events.append((name, -live.pop(name)))
    assert reserved(events, NO_LIMIT) >= most
    assert reserved(events, 0) >= most
