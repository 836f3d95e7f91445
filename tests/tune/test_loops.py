"""Scheduled loop nests: what they touch, by hand; and which of two a CPU runs faster."""

from __future__ import annotations

import pytest

from gpuir.targets.load import load_target
from gpuir.tune.loops import (
    BufferAccess,
    NestLoop,
    Statement,
    cpu_seconds,
    cpu_terms,
    distinct,
    interval,
    span,
)

CPU = load_target("x86-64-v4")


def product(
    loops: list[NestLoop], i: object, j: object, k: object, unrolls: int = 0, cell: float = 4.0
) -> Statement:
    """c[i, j] += a[i, k] b[k, j]."""

    def access(name: str, *axes: str) -> BufferAccess:
        sums = tuple(((1, v),) for v in axes)
        return BufferAccess(name, "global", cell, sums, (1,) * len(axes), writes=name == "c")

    return Statement(
        "c",
        tuple(loops),
        {"a": i, "b": j, "c": k},  # pyright: ignore[reportArgumentType]
        frozenset("c"),
        (access("a", "a", "c"), access("b", "c", "b"), access("c", "a", "b")),
        unrolls,
    )


def naive(n: int = 512) -> Statement:
    return product([NestLoop("i", n), NestLoop("j", n), NestLoop("k", n)], "i", "j", "k")


def blocked(n: int = 512, parallel: str = "parallel") -> Statement:
    """Tiles of 8 rows by 64 columns, 16 of k at a time; each row of 16 columns in a register."""
    loops = [
        NestLoop("i0", n // 8, parallel),
        NestLoop("j0", n // 64),
        NestLoop("k0", n // 16),
        NestLoop("j1", 4),
        NestLoop("k1", 16),
        NestLoop("i1", 8),
        NestLoop("j2", 16, "vector"),
    ]
    j = ("+", ("*", "j0", 64), ("+", ("*", "j1", 16), "j2"))
    rows, steps = ("+", ("*", "i0", 8), "i1"), ("+", ("*", "k0", 16), "k1")
    return product(loops, rows, j, steps, unrolls=256)


def test_how_far_an_expression_goes():
    fused = ("+", ("*", ("%", "f", 8), 64), "x")  # f % 8 * 64 + x
    assert interval(fused, {"x": 32}) == (0, 31)
    assert span(fused, {"f": 8, "x": 32}) == 7 * 64 + 32
    assert span(("//", "f", 8), {"f": 24}) == 3
    assert span(("%", "f", 8), {"f": 3}) == 3  # not gone around yet
    assert interval(("-", "x", "y"), {"x": 4, "y": 3}) == (-2, 3)


def test_how_many_numbers_threads_give():
    threads = [NestLoop("t", 32, "threadIdx.x")]
    assert distinct(("*", ("//", "t", 4), 4), threads) == 8
    assert distinct(("*", ("%", "t", 4), 16), threads) == 4
    assert distinct(("%", ("+", "t", "other"), 64), threads) == 32


def test_footprints_by_hand():
    """Inside k1: 8 rows of 16 of k of a, a row of 16 columns of each of b; lines of 16 cells."""
    s = blocked()
    a, b, c = s.accesses
    assert s.runs == 512**3
    assert s.cells(a, 4) == (8, 16) and s.footprint(a, 4) == 8 * 64
    assert s.cells(b, 4) == (16, 16) and s.footprint(b, 4) == 16 * 64
    assert s.cells(c, 4) == (8, 16) and s.footprint(c, 7) == 64
    assert s.footprint(b, 0) == 512 * 512 * 4
    assert s.moves(b, s.loops[-1]) == 1 and s.moves(a, s.loops[-1]) == 0
    assert s.moves(b, s.loops[4]) == 64  # the next row


def test_a_window_touches_its_halo():
    image = BufferAccess("x", "global", 4.0, (((2, "y"), (1, "i")),), (1,))
    s = Statement(
        "s", (NestLoop("y", 8), NestLoop("i", 3)), {"y": "y", "i": "i"}, frozenset("i"), (image,)
    )
    assert s.cells(image, 0) == (2 * 7 + 2 + 1,)


def test_arithmetic_by_hand():
    """512^3 multiply-adds in words of 16, two a clock of 3 GHz, on two cores."""
    terms = cpu_terms(blocked(), CPU, 2)
    assert terms["arithmetic"] == pytest.approx(512**3 / 16 / 2 / 3e9 / 2)
    alone = cpu_terms(blocked(parallel="serial"), CPU, 2)
    assert alone["arithmetic"] == pytest.approx(2 * terms["arithmetic"])


def test_a_cache_that_holds_all_is_filled_once():
    """Three matrices of 1 MiB fit 16 MiB of the shared cache; c is read and written."""
    terms = cpu_terms(blocked(), CPU, 2)
    assert terms["memory"] * CPU.dram.bytes_per_s == pytest.approx(4 << 20)


def test_blocks_and_vectors_are_faster():
    order = [
        cpu_seconds([blocked()], CPU, 2),
        cpu_seconds([blocked(parallel="serial")], CPU, 2),
        cpu_seconds([naive()], CPU, 2),
    ]
    assert order == sorted(order) and order[2] > 10 * order[0]


def test_seven_parallel_trips_on_two_cores_take_four():
    seven = product(
        [NestLoop("i", 7, "parallel"), NestLoop("j", 64), NestLoop("k", 64)], "i", "j", "k"
    )
    eight = product(
        [NestLoop("i", 8, "parallel"), NestLoop("j", 64), NestLoop("k", 64)], "i", "j", "k"
    )
    found = [cpu_terms(s, CPU, 2)["trips"] for s in (seven, eight)]
    assert found[0] == pytest.approx(found[1])
