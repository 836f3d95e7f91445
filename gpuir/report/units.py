"""Numbers as people read them. What is printed uses this: inside gpuir everything is SI."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isfinite, log10
from typing import Any

PREFIXES = {
    -4: "p",
    -3: "n",
    -2: "u",
    -1: "m",
    0: "",
    1: "k",
    2: "M",
    3: "G",
    4: "T",
    5: "P",
    6: "E",
}
SHORT = {"bytes": "B", "bytes/s": "B/s", "bit/s": "bit/s"}
PREFIXED = ("s", "Hz", "bytes", "bytes/s", "bit/s", "flop", "flop/s", "W", "J")


def quantity(value: float, unit: str, digits: int = 3) -> str:
    """`quantity(1.555e12, "bytes/s")` is `1.56 TB/s`; prefixes are powers of 1000."""
    if unit not in PREFIXED:
        return f"{plain(value)} {unit}".rstrip()
    if value == 0 or not isfinite(value):
        return f"{value:g} {SHORT.get(unit, unit)}"
    if unit in ("flop", "bytes") and abs(value) < 1000 and value == int(value):
        return f"{int(value)} {SHORT.get(unit, unit)}"
    power = min(max(floor(log10(abs(value)) / 3), -4), 6)
    if unit.startswith(("bytes", "bit", "flop")):
        power = max(power, 0)
    if unit == "s":
        power = min(power, 0)
    if abs(value) < 0.01 * 1000.0**power:  # no smaller prefix is left, nor is half a byte a mB
        return f"{value:.{digits}g} {SHORT.get(unit, unit)}"
    text = significant(value / 1000.0**power, digits)
    if abs(float(text)) >= 1000 and power < (0 if unit == "s" else 6):  # 999.96 rounds up
        power += 1
        text = significant(value / 1000.0**power, digits)
    return f"{text} {PREFIXES[power]}{SHORT.get(unit, unit)}"


def between(ends: Sequence[float] | None) -> str:
    """An interval of seconds: `2.70 ms to 4.71 ms`; nothing where there is none."""
    return " to ".join(quantity(end, "s") for end in ends or ())


def significant(value: float, digits: int = 3) -> str:
    """A number from 1 to 1000 with so many digits, never fewer than it has before the point."""
    if value == 0:
        return "0"
    value = float(f"{value:.{digits - 1}e}")
    after = max(digits - 1 - floor(log10(abs(value)) + 1e-12), 0)
    return f"{value:.{after}f}"


def plain(value: float) -> str:
    """A number without a unit: whole ones in full with commas, others with four digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def in_unit(value: Any, unit: str, digits: int = 3) -> str:
    """A value as a cell of a table. `unit` is one of `quantity`, or `%` (of a share of one), `1/s`,
    `usd`, `count`, `x` (a multiple, none for 1), `number` (of so many digits); words have none."""
    match unit:
        case "":
            return str(value)
        case "%":
            return percent(value)
        case "1/s":
            return rate(value)
        case "usd":
            return usd(value)
        case "count":
            return f"{value:,}"
        case "x":
            return f"x{value:,}" if value != 1 else ""
        case "number":
            return significant(value, digits)
        case _:
            return quantity(value, unit, digits)


def share(part: float, whole: float) -> float | None:
    """The part of a whole, for a column in `%`; of nothing None."""
    return part / whole if whole else None


def usd(value: float) -> str:
    """`$0.0123`, `$12.30`: two digits behind the point, or three that count."""
    return f"${value:,.2f}" if value >= 1 else f"${value:#.3g}"


def rate(value: float) -> str:
    """How many a second: `1,159`, `8.27`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(part: float, whole: float = 1.0) -> str:
    """`41 %`, below ten `0.3 %`, of a loss `-1.6 %`; the part of nothing is a dash."""
    if not whole:
        return "-"
    if part < 0:
        text = percent(-part, whole)
        return text if text.startswith(("<", "0 ")) else f"-{text}"
    share = 100 * part / whole
    if share == 0 or share >= 9.95:
        return f"{share:.0f} %"
    return f"{share:.1f} %" if share >= 0.05 else "<0.1 %"
