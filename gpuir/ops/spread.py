"""How the indices of a lookup spread over the rows of a table: what data decide, as text.

uniform             each row as often as every other
zipf:1.05           the i-th most frequent row in proportion to i ** -1.05
shares:0.1=0.6,...  a tenth of the rows gets 0.6 of the lookups, and so on; what is left out of
                    either is spread over the rest
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

from gpuir.ir.errors import ModelError, nearest

KINDS = ("uniform", "zipf", "shares")
MOST_SKEW = 10.0
MOST_SHARES = 256
FORMS = "uniform, zipf:EXPONENT or shares:ROWS=LOOKUPS,..."


@dataclass(frozen=True)
class Spread:
    """Which rows lookups name. `exponent` is that of Zipf's law, 0 for all alike; `shares` are
    parts of a table from the most to the least frequent rows: of its rows, and of its lookups."""

    exponent: float = 0.0
    shares: tuple[tuple[float, float], ...] = ()

    @property
    def is_uniform(self) -> bool:
        return not self.exponent and not self.shares

    def __str__(self) -> str:
        if self.shares:
            return "shares:" + ",".join(f"{rows:.6g}={part:.6g}" for rows, part in self.shares)
        return f"zipf:{self.exponent:g}" if self.exponent else "uniform"


UNIFORM = Spread()


@lru_cache(maxsize=1024)
def parse_spread(text: str) -> Spread:
    """The spread that a text says. ModelError for another."""
    kind, _, rest = text.partition(":")
    if text in ("", "uniform"):
        return UNIFORM
    if kind == "zipf":
        exponent = _number(text, rest)
        if not 0 <= exponent <= MOST_SKEW:
            raise _wrong(text, f"an exponent from 0 to {MOST_SKEW:g}")
        return Spread(exponent)
    if kind == "shares":
        pairs = [part.partition("=") for part in rest.split(",")]
        return spread_of_shares([(_number(text, a), _number(text, b)) for a, _, b in pairs], text)
    raise ModelError(
        f"no distribution of indices has the name {kind!r}",
        expected=FORMS,
        fix=nearest(kind, KINDS),
    )


def spread_of_shares(pairs: list[tuple[float, float]], text: str = "shares") -> Spread:
    """Parts of a table and of its lookups, in any order; ModelError where they are no shares."""
    rows, lookups = (sum(part) for part in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    if not 1 <= len(pairs) <= MOST_SHARES or not all(0 < a <= 1 and 0 <= b <= 1 for a, b in pairs):
        raise _wrong(text, f"1 to {MOST_SHARES} pairs of shares, each from 0 to 1")
    if rows > 1 + 1e-3 or lookups > 1 + 1e-3:
        raise _wrong(text, "shares with a sum of at most 1")
    left = 1 - rows, 1 - lookups
    if left[0] > 1e-4:
        pairs = [*pairs, (left[0], max(left[1], 0.0))]
    elif left[1] > 1e-2:
        raise _wrong(text, "lookup shares with the sum 1, because the row shares have the sum 1")
    pairs = [(a / sum(x for x, _ in pairs), b / sum(y for _, y in pairs)) for a, b in pairs]
    return Spread(shares=tuple(sorted(pairs, key=lambda pair: -pair[1] / pair[0])))


def _number(text: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise _wrong(text, FORMS) from None
    if not isfinite(value):
        raise _wrong(text, "a finite number")
    return value


def _wrong(text: str, expected: str) -> ModelError:
    fix = "zipf:1.05, say"
    return ModelError(
        "the distribution of the indices is not valid", expected=expected, found=text[:80], fix=fix
    )
