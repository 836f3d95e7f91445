"""Sizes that stay symbols: what an expression is at other points, and what conditions say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuir.ir.sizes import (
    Conditions,
    Size,
    by_form,
    each_size,
    is_size,
    moved,
    of_sizes,
    pinned,
    real,
    recorded,
    symbols,
    value,
    whole,
)

NUMBERS = st.integers(0, 300)
POINTS = st.fixed_dictionaries({"a": NUMBERS, "b": NUMBERS})


@of_sizes
def less(n: float) -> float:
    return 50.0 - n


STEPS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (abs(y) + 1),
    "floor": lambda x, y: x // (abs(y) + 1),
    "mod": lambda x, y: x % (abs(y) + 1),
    "up": lambda x, y: -(-x // 8) + y,
    "most": lambda x, y: max(x, y),
    "least": lambda x, y: min(x, 64 * y),
    "square": lambda x, y: x**2 - y,
    "ceil": lambda x, y: math.ceil(x / 4) + y,
    "if": lambda x, y: x + 7 if x % 8 == 0 else y,
    "count": lambda x, y: sum(1 for _ in range(min(int(x), 5))) + y,
    "set": lambda x, y: len({x, y, x + y}),
}


@dataclass
class Program:
    """Steps, each on two of the numbers before it."""

    steps: tuple[tuple[str, int, int], ...]

    def __call__(self, a, b):
        found = [a, b, 3]
        for name, i, j in self.steps:
            x, y = found[i % len(found)], found[j % len(found)]
            assume(abs(x.at if type(x) is Size else x) < 2**40)
            found.append(STEPS[name](x, y))
        return found[-1]


PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=6
).map(lambda steps: Program(tuple(steps)))


def at(point):
    return {name: Size.symbol(name, n) for name, n in point.items()}


@given(PROGRAMS, POINTS, st.lists(POINTS, min_size=1, max_size=8))
def test_where_the_conditions_hold_it_is_what_the_code_gives(program, here, others):
    with recorded() as recording:
        found = program(**at(here))
    conditions = recording.conditions()
    columns = {name: np.array([p[name] for p in (here, *others)]) for name in here}
    hold = conditions.hold(columns)
    assert hold[0]
    for point, there in zip((here, *others), hold, strict=True):
        if there:
            assert value(found, point) == pytest.approx(program(**point), rel=1e-12)


@given(PROGRAMS, POINTS)
def test_a_size_is_the_number_here(program, here):
    with recorded():
        found = program(**at(here))
    assert pinned(found) == pytest.approx(program(**here), rel=1e-12)


def test_what_holds_at_all_points_is_no_condition():
    with recorded() as recording:
        n = Size.symbol("n", 12)
        assert (8 * n) // 4 == n + n
        assert (8 * n) % 4 == 0
        assert n + 1 > n
        assert 6 * n != 7
        assert n * 2 >= n
    assert recording.conditions() == Conditions()


def test_parts_of_parts_are_parts():
    with recorded() as recording:
        n = Size.symbol("n", 224)
        assert ((n - 4) // 4) + 1 == n // 4
        assert (n // 2 + 1) // 2 == (n + 2) // 4
        assert (n // 4 - 2) // 2 + 1 == n // 8
        assert math.ceil(2.0 * n) == 2 * n
        assert 6.0 * n * n / (2 * n) == 3 * n
    assert recording.conditions() == Conditions()


@pytest.mark.parametrize(
    ("found", "here", "there"),
    [
        (lambda n: -(-n // 8) == 1, 8, 9),
        (lambda n: -(-n // 8) > 1, 8, 9),
        (lambda n: n // -8 < -1, 8, 9),
        (lambda n: (n - 20) // 3 == -4, 8, 12),
        (lambda n: (n - 20) // 3 < 0, 8, 20),
        (lambda n: 2 * (n / (n + 3)) == 1, 3, 4),
        (lambda n: less(n) > 0, 8, 60),
    ],
)
def test_what_may_be_below_zero_is_a_condition(found, here, there):
    with recorded() as recording:
        held = found(Size.symbol("n", here))
    assert found(there) != held
    hold = recording.conditions().hold({"n": np.array([here, there])})
    assert hold.tolist() == [True, False]


def test_filled_up_is_one_expression():
    with recorded() as recording:
        n = Size.symbol("n", 12)
        assert -(-n // 8) == (n + 7) // 8
        assert -(-n // 8) >= 0
    assert recording.conditions() == Conditions()


def test_conditions_in_words():
    with recorded() as recording:
        n = Size.symbol("n", 12)
        assert n > 8
        assert n % 8 != 0
        assert [0] * n
    assert str(recording.conditions()).splitlines() == [
        "n + -12 == 0",
        "((n) % (8)) != 0",
        "8 + -1*n < 0",
    ]


def test_what_differs_in_a_table_has_to_differ():
    with recorded() as recording:
        n = Size.symbol("n", 12)
        assert len({n, 2 * n}) == 2
    hold = recording.conditions().hold({"n": np.array([12, 13, 0])})
    assert hold.tolist() == [True, True, False]


def test_it_passes_for_a_number():
    n = Size.symbol("n", 12)
    assert isinstance(n, int)
    assert isinstance(n / 8, float)
    assert whole(n) is n
    assert is_size(real(n)) and real(n) == n
    assert (whole(np.int64(3)), real(3)) == (3, 3.0)
    match n:
        case int():
            pass
        case _:
            pytest.fail("no int")


@dataclass(frozen=True)
class Row:
    sizes: tuple[int, ...]
    text: str
    other: object = None


def test_records_move_to_other_points():
    with recorded():
        n = Size.symbol("n", 12)
        row = Row((n, 3), f"{n:,} cells of {n * n}")
        there = each_size(row, lambda x: moved(x, {"n": 1500}))
        assert there.sizes[0] == 1500
    assert each_size(row, lambda x: value(x, {"n": 1500})) == Row(
        (1500, 3), "1,500 cells of 2250000"
    )
    plain = Row((1, 2), "plain", {"a": (1,)})
    assert each_size(plain, lambda x: pytest.fail("no size")) is plain


def test_equal_by_form_alone():
    n = Size.symbol("n", 12)
    with recorded() as recording, by_form():
        assert n * 2 == n + n
        assert n != 12
        assert len({n, n + 0, Size.symbol("m", 12)}) == 2
    assert recording.conditions() == Conditions()


@of_sizes
def twice(how: str, n: float) -> float:
    return math.sqrt(float(n)) if how == "root" else 2.0 * n


def test_a_function_is_called_anew_at_each_point():
    with recorded() as recording:
        n = Size.symbol("n", 16)
        found = twice("root", n * n) + 1
    assert recording.conditions() == Conditions()
    assert symbols(found) == {"n"}
    assert value(found, {"n": np.array([3, 5, 3])}).tolist() == [4.0, 6.0, 4.0]
    assert twice("", 4) == 8.0


def test_a_size_made_real_is_a_float_at_all_points():
    """As `float` of the number is: texts have 180.0, not 180."""
    n = Size.symbol("n", 4)
    for x in (real(n // 2 * 3), real(n * n + 1)):
        assert isinstance(x, float)
        assert type(value(x, {"n": 12})) is float
    assert value(real(n // 2 * 3), {"n": 12}) == 18.0
    assert type(real(3)) is float


@given(st.integers(1, 5000), st.integers(1, 300))
def test_a_quotient_is_rounded_as_python_does(n, times):
    size = Size.symbol("a", n)
    with recorded() as recording:
        assert size / n >= 1.0
        assert (times * size) / (3 * n) == times / 3
    assert recording.conditions().hold({"a": np.array([n])}).all()
    assert value(size / 239, {"a": np.array([n, 239])}).tolist() == [n / 239, 1.0]
