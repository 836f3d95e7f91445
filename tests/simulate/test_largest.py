"""The search, against memories whose answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.simulate.largest import largest
from gpuir.simulate.layout import Allocation, MemoryLayout, Moment
from gpuir.simulate.memory import Memory


def holding(size: int, available: int) -> Memory:
    """One allocation of so many MiB, of so many that there are."""
    layout = MemoryLayout((Allocation("w", "weights", size << 20),), (0,), (1,), (Moment((), ()),))
    return Memory(layout, (size << 20,), available << 20)


def search(size, available: int, least: int = 1, most: int = 65536):
    asked: list[int] = []

    def memory_of(n: int) -> Memory:
        asked.append(n)
        return holding(size(n), available)

    return largest(memory_of, least, most), asked


def test_a_line_takes_a_handful_of_loads():
    found, asked = search(lambda n: 400 + 26 * n, 40000)
    assert found.value == (40000 - 400) // 26 and len(asked) <= 10
    assert 400 + 26 * (found.value + 1) > 40000 and found.value + 1 in found.tried


@pytest.mark.parametrize(
    ("available", "least", "most", "value"),
    [(1000, 1, 8, 8), (1000, 1, 1, 1), (99, 1, 8, None), (100, 10, 64, 10), (1000, 3, 100, 100)],
)
def test_the_ends(available: int, least: int, most: int, value: int | None):
    found, _ = search(lambda n: 10 * max(n, 10), available, least, most)
    assert found.value == value and found.impossible is None


def test_what_the_model_does_not_take_ends_the_search():
    asked: list[int] = []

    def memory_of(n: int) -> Memory | None:
        asked.append(n)
        return holding(n, 10**6) if n <= 512 else None

    found = largest(memory_of, 1, 65536)
    assert found.value == 512 and found.impossible == 513 and len(asked) < 30


def test_memory_that_shrinks_is_told():
    found, _ = search(lambda n: 1000 - n, 2000, 1, 100)
    assert found.value == 100 and found.shrinking
    assert not search(lambda n: 10 * n, 2000)[0].shrinking


@given(
    st.integers(10, 1000),
    st.integers(0, 50),
    st.integers(0, 3),
    st.integers(10, 100000),
    st.integers(1, 5000),
)
def test_nothing_larger_fits(base: int, slope: int, curve: int, available: int, most: int):
    def size(n: int) -> int:
        return base + slope * n + curve * n * n

    found, asked = search(size, available, 1, most)
    fits = [n for n in range(1, most + 1) if holding(size(n), available).fits]
    assert found.value == (fits[-1] if fits else None)
    assert len(asked) <= 2 * most.bit_length() + 4
