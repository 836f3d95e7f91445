"""Which of two runs is faster, as sure as their intervals allow."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, log
from statistics import NormalDist

from gpuir.report.answer import Answer

NORMAL = NormalDist()
WIDE = 2 * NORMAL.inv_cdf(0.9)  # standard deviations that hold 80 % of cases


def slower_share(one: Answer, other: Answer) -> float | None:
    """In what share of cases one run is slower than another: their errors are taken for normal in
    the logarithm, and for independent. Those of one stack on two GPUs are partly alike, so that
    the order is a little surer than this. None without intervals; 0.5 where the two are equal and
    nothing is uncertain."""
    if not (one.interval and other.interval and one.latency_s and other.latency_s):
        return None
    apart = log(one.latency_s / other.latency_s)
    spread = hypot(*(log(high / low) / WIDE for low, high in (one.interval, other.interval)))
    if not spread:
        return 0.5 + 0.5 * ((apart > 0) - (apart < 0))
    return NORMAL.cdf(apart / spread)


def slower_than_fastest(answers: Sequence[Answer]) -> list[float | None]:
    """Of each run the share of cases in which it is slower than the fastest; None of that."""
    fastest = min(answers, key=lambda x: x.latency_s or float("inf"))
    return [None if x is fastest else slower_share(x, fastest) for x in answers]
