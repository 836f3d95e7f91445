"""Which of two runs is faster, as sure as their intervals allow."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, log
from statistics import NormalDist

from gpuir.report.answer import Answer

NORMAL = NormalDist()
WIDE = 2 * NORMAL.inv_cdf(0.9)  # standard deviations that hold 80 % of cases


def spread(interval: tuple[float, float]) -> float:
    """The standard deviation of a time's logarithm, of which 80 % of cases lie in an interval."""
    low, high = interval
    return log(high / low) / WIDE


def share_of_cases(apart: float, spread: float) -> float:
    """In what share of cases a difference that is normal around `apart` is more than none; 0.5
    where nothing is apart and nothing is uncertain."""
    if not spread:
        return 0.5 + 0.5 * ((apart > 0) - (apart < 0))
    return NORMAL.cdf(apart / spread)


def slower_share(one: Answer, other: Answer) -> float | None:
    """In what share of cases one run is slower than another, an item: their errors are taken for
    normal in the logarithm, and for independent. Those of one stack on two GPUs are partly alike,
    so that the order is a little surer than this. None without intervals."""
    if not (one.interval and other.interval and one.latency_s and other.latency_s):
        return None
    apart = log(one.item_s / other.item_s)
    return share_of_cases(apart, hypot(spread(one.interval), spread(other.interval)))


def slower_than_fastest(answers: Sequence[Answer]) -> list[float | None]:
    """Of each run the share of cases in which it is slower than the fastest; None of that."""
    fastest = min(answers, key=lambda x: x.item_s or float("inf"))
    return [None if x is fastest else slower_share(x, fastest) for x in answers]
