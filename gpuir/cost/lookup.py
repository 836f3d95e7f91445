"""Lookups in a table: how many of its rows they name, and how many of them a cache has.

Lookups are independent draws from a distribution over rows (the independent reference model). Of n
draws, a row of probability p is among them with 1 - (1 - p)^n. A cache of the C rows used last
holds, once it is full, those drawn among the last T draws, T being that number of draws which name
C rows on average (Che, Tung, Wang: Hierarchical web caching systems, IEEE JSAC 20(7), 2002; shown
to be precise by Fricker, Robert, Roberts, 2012). Before that each row misses once: the cold start.
For rows drawn evenly this is the formula of Lin and others, TPDS 2024, for batched embeddings:
X + (n - X)(1 - C / R) misses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gpuir.cost.sheet import Number
from gpuir.ir.sizes import of_sizes
from gpuir.ops.spread import Spread, parse_spread

Array = np.ndarray[Any, np.dtype[np.float64]]

# What of the L2 rows of a table have: the rest is indices, results, other operands (the same paper,
# 0.9 of it over the tables that are looked up at once).
L2_SHARE = 0.9
HEAD = 64  # the most frequent rows of Zipf's law stand for themselves, the rest in classes
CLASSES = 160
# Caches at which misses are counted, as parts of the rows that are named: between them, a line.
CACHED = (0.0, *(2.0**-k for k in range(14, 0, -1)), 0.75, 1.0)


@dataclass(frozen=True)
class Classes:
    """Rows that are drawn alike: how many, and the probability that a draw names a given one."""

    rows: Array
    p: Array

    def named(self, draws: Number) -> float:
        """Expected rows among so many draws: at most the rows, and the draws."""
        return float(np.sum(-self.rows * np.expm1(draws * self._log)))

    def fresh(self, draws: float) -> float:
        """The probability that a draw names none of the rows of so many draws before it."""
        return float(np.sum(self.rows * self.p * np.exp(draws * self._log)))

    @property
    def _log(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.log1p(-np.minimum(self.p, 1.0))

    def misses(self, draws: float, cached: float) -> float:
        """Expected misses of `draws` in a cache of so many rows that begins empty."""
        if cached < 1 or draws <= 1:
            return float(draws)
        named = self.named(draws)
        if named <= cached:
            return named
        low, high = 0.0, float(draws)  # how many draws fill the cache
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.named(middle) < cached else (low, middle)
        return min(draws, cached + (draws - high) * self.fresh(high))


@lru_cache(maxsize=4096)
def classes_of(spread: Spread, rows: int) -> Classes:
    """The rows of a table by how often they are drawn."""
    if spread.is_uniform or rows <= 1:
        return Classes(np.array([float(rows)]), np.array([1.0 / max(rows, 1)]))
    if spread.shares:
        part, lookups = np.array(spread.shares).T
        return Classes(part * rows, lookups / (part * rows))
    edges = np.arange(1, min(rows, HEAD) + 1, dtype=float)
    if rows > HEAD:
        tail = np.unique(np.geomspace(HEAD + 1, rows + 1, CLASSES).round())
        edges = np.concatenate([edges, tail])
    else:
        edges = np.append(edges, rows + 1.0)
    count = np.diff(edges)
    mass = _zipf_mass(edges - 0.5, spread.exponent)
    alone = count == 1
    mass[alone] = edges[:-1][alone] ** -spread.exponent
    return Classes(count, mass / mass.sum() / count)


def _zipf_mass(edges: Array, exponent: float) -> Array:
    """The integral of x ** -exponent between edges half a row before each class."""
    if abs(exponent - 1) < 1e-9:
        return np.diff(np.log(edges))
    return np.diff(edges ** (1 - exponent)) / (1 - exponent)


def named_rows(lookups: float, rows: float) -> float:
    """Expected rows among lookups drawn evenly."""
    if rows <= 1:
        return float(min(lookups, rows))
    return float(-rows * np.expm1(lookups * np.log1p(-1.0 / rows)))


def missed_again(lookups: float, rows: float) -> tuple[float, ...]:
    """For rows drawn evenly, misses beyond the first of each row, at each of `CACHED`."""
    rows = max(rows, 2.0)
    named = named_rows(lookups, rows)
    found: list[float] = []
    for part in CACHED:
        cached = part * named
        full = np.log1p(-min(cached / rows, 1 - 1e-12)) / np.log1p(-1.0 / rows)
        missed = cached + (lookups - min(full, lookups)) * (1 - cached / rows)
        found.append(max((lookups if cached < 1 else float(missed)) - named, 0.0))
    return (*found[:-1], 0.0)


@lru_cache(maxsize=4096)
def _drawn(spread: str, lookups: float, rows: float) -> tuple[float, tuple[float, ...]]:
    how = parse_spread(spread)
    if how.is_uniform:
        return named_rows(lookups, rows), missed_again(lookups, rows)
    classes = classes_of(how, int(rows))
    named = min(classes.named(lookups), float(lookups))
    missed = [max(classes.misses(lookups, part * named) - named, 0.0) for part in CACHED]
    return named, (*missed[:-1], 0.0)


@of_sizes
def rows_named(spread: str, lookups: float, rows: float) -> float:
    """Of so many lookups in a table of so many rows, how many of these they name."""
    return _drawn(spread, lookups, rows)[0]


@of_sizes
def _missed(spread: str, part: int, lookups: float, rows: float) -> float:
    return _drawn(spread, lookups, rows)[1][int(part)]


def rows_missed(spread: str, lookups: float, rows: float) -> tuple[float, ...]:
    """Misses of lookups beyond the first of each row, at each of `CACHED`."""
    return tuple(_missed(spread, i, lookups, rows) for i in range(len(CACHED)))


def between(xp: Any, share: Number, values: tuple[Number, ...]) -> Number:
    """What a falling curve given at `CACHED` is at a share, lines between, by the functions of a
    sheet. Added up from its end, so that rounding leaves nothing below it."""
    total = values[-1] + 0.0 * share
    for low, high, a, b in zip(CACHED, CACHED[1:], values, values[1:], strict=False):
        left = xp.minimum(xp.maximum(high - share, 0.0), high - low)
        total = total + (a - b) / (high - low) * left
    return total
