"""What the readers of texts share: how long a text may be, and the error at a place in it."""

from __future__ import annotations

from gpuir.ir.errors import TextError

LARGEST = 16 << 20  # characters; tokens take up to some hundred bytes for each


def check_length(text: str, source: str) -> None:
    """TextError for a text that is too long to be read."""
    if len(text) > LARGEST:
        expected = f"at most {LARGEST} characters"
        raise TextError(
            "the text is too long", where=source, expected=expected, found=str(len(text))
        )


def error_at(
    text: str, source: str, line: int, column: int, what: str, expected: str = "", fix: str = ""
) -> TextError:
    """The error that shows the line, with a caret under the column; both count from 1."""
    lines = text.split("\n")
    shown = lines[min(line, len(lines)) - 1].rstrip("\r").replace("\t", " ")
    start = max(0, min(column - 60, len(shown) - 96))
    caret = " " * (column - 1 - start) + "^"
    return TextError(
        what,
        where=f"{source}:{line}:{column}",
        found=f"{shown[start : start + 96]}\n{caret}",
        expected=expected,
        fix=fix,
    )


def number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
