"""What the readers of texts share: how long a text may be, and the error at a place in it."""

from __future__ import annotations

from dataclasses import dataclass

from gpuir.ir.errors import TextError

LARGEST = 16 << 20  # characters; tokens take up to some hundred bytes for each


def check_length(text: str, source: str) -> None:
    """TextError for a text that is too long to be read."""
    if len(text) > LARGEST:
        expected = f"at most {LARGEST} characters"
        raise TextError(
            "the text is too long", where=source, expected=expected, found=str(len(text))
        )


@dataclass(frozen=True)
class TextPlace:
    """A character of a text, by its line and column, which count from 1."""

    text: str
    source: str
    line: int
    column: int


def error_at(place: TextPlace, what: str, expected: str = "", fix: str = "") -> TextError:
    """The error that shows the line, with a caret under the column."""
    lines = place.text.split("\n")
    shown = lines[min(place.line, len(lines)) - 1].rstrip("\r").replace("\t", " ")
    start = max(0, min(place.column - 60, len(shown) - 96))
    caret = " " * (place.column - 1 - start) + "^"
    return TextError(
        what,
        where=f"{place.source}:{place.line}:{place.column}",
        found=f"{shown[start : start + 96]}\n{caret}",
        expected=expected,
        fix=fix,
    )


def number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
