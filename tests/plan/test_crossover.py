"""The search for the size from which on the host does not hold the device up."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from timed import run, timed

from gpuir.cli.main import main
from gpuir.plan.crossover import crossover
from gpuir.report.answer import Answer
from gpuir.targets.profile import Host, Profile

pytestmark = pytest.mark.slow

HOST = Host(1e-6, 4e-6, 3e-6, 1e-6, 2e-6, 1e-6, 10e-6, queue=1024)


def of_size(n: int, per_item_s: float) -> Answer:
    """100 ops whose kernels take so long for each item."""
    items = [timed(str(i), n * per_item_s) for i in range(100)]
    line = run(items, Profile("mine", "", "", "none", HOST))
    return Answer(
        "m",
        latency_s=line.time_s,
        busy_s=line.busy_s,
        gaps_s=line.gaps_s,
        is_host_bound=line.is_host_bound,
    )


@given(st.floats(1e-8, 1e-5), st.integers(1, 20))
def test_the_neighbour_below_is_held_up(per_item_s: float, least: int):
    found = crossover(lambda n: of_size(n, per_item_s), least, 1 << 14)
    assert found.value is not None
    assert not of_size(found.value, per_item_s).is_host_bound
    if found.held_up is None:
        assert found.value == least
    else:
        assert found.tried[found.held_up].is_host_bound
        assert found.value - found.held_up <= max(1, found.held_up // 32)
    assert len(found.tried) <= 1 + 14 + 5  # what doubling to 2^14, then halving take


def by_doubling(is_held_up: Callable[[int], bool], least: int, most: int) -> tuple[int, int] | None:
    """The answer as it is defined: doubles from `least`, then halves the gap; None where the host
    holds up all or none."""
    below, above = least, least
    while is_held_up(above):
        if above == most:
            return None
        below, above = above, min(2 * above, most)
    while above - below > max(1, below // 32):
        middle = (below + above) // 2
        below, above = (middle, above) if is_held_up(middle) else (below, middle)
    return (below, above) if below < above else None


@given(st.integers(1, 40), st.integers(1, 1 << 16), st.none() | st.integers(41, 1 << 16))
def test_leaps_end_where_doubling_does(least: int, first_free: int, refused: int | None):
    """Kernels that just hide the host from some value on, of a model that takes no more than so
    many."""
    most, limit = 1 << 16, refused or 1 << 17
    cells = {True: of_size(1, 1e-9), False: of_size(1, 1e-3)}
    found = crossover(lambda n: None if n >= limit else cells[n < first_free], least, most)
    expected = by_doubling(lambda n: n < min(first_free, limit), least, most)
    if expected is None:
        assert (found.value, found.held_up) in ((least, None), (None, most))
        return
    below, above = expected
    assert found.held_up == below
    assert (found.value, found.refused) == ((None, above) if above >= limit else (above, None)) or (
        found.value == above and found.refused is not None  # a leap went too far
    )


def test_a_fall_that_is_even_takes_few_tries():
    tried: list[int] = []

    def of(n: int) -> Answer:
        tried.append(n)
        return of_size(n, 1e-8)

    found = crossover(of, 1, 1 << 16)
    assert found.value is not None and found.value > 700
    assert len(tried) == len(set(tried)) <= 9


def test_there_may_be_none():
    found = crossover(lambda n: of_size(n, 1e-9), 1, 64)
    assert found.value is None and found.held_up == 64
    assert [*found.tried] == [1, 16, 64]


def test_sizes_that_the_model_does_not_take_end_the_search():
    found = crossover(lambda n: of_size(n, 1e-9) if n <= 5 else None, 1, 1 << 16)
    assert (found.value, found.held_up, found.refused) == (None, 5, 6)


# ---- at the command line -----------------------------------------------------------------------


def analyze(*args: str, status: int = 0) -> Result:
    given = ("analyze", "examples/encoder.onnx", "--target", "a100", *args)
    done = CliRunner().invoke(main, given)
    assert done.exit_code == status, (done.output, done.exception)
    return done


@pytest.mark.slow
def test_the_encoder_stops_being_host_bound_at_some_batch():
    args = ("--dims", "seq=64", "--crossover", "batch", "--profile", "eager,ideal")
    found = json.loads(analyze(*args, "--format", "json").stdout)
    assert found["schema"] == "gpuir.crossover/1"
    eager, ideal = found["runs"]
    assert ideal["value"] == 1 and ideal["host_bound_at"] is None
    assert eager["value"] > 1
    bound = {x["value"]: x["host_bound"] for x in eager["tried"]}
    assert bound[eager["host_bound_at"]] and not bound[eager["value"]]
    report = analyze("--dims", f"seq=64,batch={eager['value']}", "--profile", "eager").stdout
    assert "host-bound" not in report
    report = analyze("--dims", "seq=64,batch=1", "--profile", "eager").stdout
    assert ": host-bound" in report and "--crossover batch" in report


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ("cudagraph", "not host-bound at 1, the smallest value that was tried"),
        ("eager", r"not host-bound from \d+ on"),
    ],
)
def test_the_text_says_from_where_on(profile: str, says: str):
    args = ("--dims", "seq=512,batch=1", "--crossover", "batch", "--profile", profile)
    assert re.search(says, analyze(*args).stdout)


def test_it_begins_where_dims_says():
    args = ("--dims", "seq=512,batch=32", "--crossover", "batch", "--profile", "eager")
    (only,) = json.loads(analyze(*args, "--format", "json").stdout)["runs"]
    assert only["value"] == 32 and len(only["tried"]) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--dims", "seq=64", "--crossover", "bath"), "did you mean batch"),
        (("--dims", "seq=64", "--crossover", "batch", "--format", "ir"), "no format ir"),
    ],
)
def test_what_cannot_be_searched_is_said(args: tuple[str, ...], says: str):
    assert says in analyze(*args, status=2).output
