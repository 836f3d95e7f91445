"""The rules of each stack's allocator, one at a time."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.ir.errors import UsageError
from gpuir.stacks.allocators import ALLOCATORS, GIB, MIB, arena, caching, find_allocator, planned

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
    assert caching(trace(*steps), (), NO_LIMIT) == segments


def test_near_the_limit_free_segments_are_given_back():
    steps = trace(30 * MIB, -1, 32 * MIB)
    assert caching(steps, (), 62 * MIB) == 62 * MIB
    assert caching(steps, (), 61 * MIB) == 32 * MIB
    assert caching(trace(30 * MIB, 32 * MIB), (), 61 * MIB) == 62 * MIB


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
    for name in ALLOCATORS:
        for limit in (0, NO_LIMIT):
            assert find_allocator(name)(events, (), limit) >= most


@pytest.mark.parametrize(
    ("steps", "held"),
    [
        ((1,), MIB),
        ((MIB, 1), 3 * MIB),  # each segment is twice the one before
        ((MIB, 2 * MIB, 4 * MIB), 7 * MIB),
        ((5 * MIB,), 8 * MIB),  # or the next power of two that holds the block
        ((5 * MIB, 3 * MIB), 16 * MIB),  # whose rest is not used: less than the block
        ((3 * MIB, MIB), 8 * MIB),
        ((5 * MIB, -1, 2 * MIB, 6 * MIB), 8 * MIB),
        ((8 * MIB, -1, 5 * MIB, 3 * MIB), 16 * MIB),  # not twice as large: not cut
        ((8 * MIB, -1, 4 * MIB, 4 * MIB), 8 * MIB),
        ((GIB, GIB, GIB), 3 * GIB),  # no longer doubled
        ((300 * MIB, -1, 20 * MIB), 512 * MIB),  # kept
    ],
)
def test_an_arena_grows_by_powers_of_two(steps: tuple[int, ...], held: int):
    assert arena(trace(*steps), (), NO_LIMIT) == held


def test_an_arena_takes_what_is_left():
    assert arena(trace(5 * MIB), (), 6 * MIB) == 6 * MIB
    assert arena(trace(5 * MIB), (), 4 * MIB) == 5 * MIB, "which does not fit"


def test_weights_lie_outside_the_arena_in_one_piece():
    steps = trace(100 * MIB + 512, 3 * MIB + 512, 5 * MIB)
    assert arena(steps, {0, 1}, NO_LIMIT) == 103 * MIB + 1024 + 8 * MIB


def test_what_is_planned_takes_its_peak():
    assert planned(trace(30 * MIB, 4, -1, 31 * MIB), (), NO_LIMIT) == 31 * MIB + 4


def test_a_name_that_no_allocator_has():
    assert find_allocator("arena") is ALLOCATORS["arena"]
    with pytest.raises(UsageError, match="no allocator 'arna'"):
        find_allocator("arna")
