"""Text for a terminal: a report at any width, and the page that it is written on."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from unicodedata import east_asian_width

from gpuir.report.table import Column, Drawing, Heading, Notes, Part, Report, Table

STYLES = {  # of a title, of notes, and of words that mean something where they fill a cell
    "bold": "1",
    "dim": "2",
    "compute": "32",
    "memory": "36",
    "latency": "33",
    "network": "35",
    "explained": "36",
    "doubtful": "1;31",
    "illegal": "1;31",
}
GAP = 2
NARROWEST = 8  # characters of a column that is cut

Group = Literal["kernel", "module", "phase"]


@dataclass(frozen=True)
class Terminal:
    """How wide a terminal is, whether it shows colour, and how many kernels to list; or the name of
    the file to be written, whose suffix may say in which form."""

    width: int = 120
    color: bool = False
    top: int = 15
    memory: bool = False  # list who holds memory at the peak
    group: Group = "kernel"  # what the table of totals adds up
    file: str = ""


LONGEST_WORD = 1000  # characters: no model's own names are as long


class Page:
    """Lines and tables of a given width, as plain text or with colour codes."""

    def __init__(self, width: int, color: bool = False):
        self.width, self.color = width, color
        self._lines: list[str] = []

    def line(self, text: str = "", style: str = "") -> None:
        self._lines.append(self.styled(printable(text.rstrip()), style))

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.color and style and text else text

    def wrapped(self, label: str, text: str, indent: int = 11) -> None:
        """`label` in a left margin, `text` wrapped in the room beside it."""
        room = max(self.width - indent, 20)
        lines = textwrap.wrap(short_words(text), room, break_on_hyphens=False) or [""]
        for i, part in enumerate(lines):
            margin = "" if i else label
            self.line(f"{margin:{indent}}{part}")

    def heading(self, text: str) -> None:
        for part in textwrap.wrap(short_words(printable(text)), self.width) or [""]:
            self.line(part, "bold")

    def grid(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Cells under bold titles; `Column` says what goes or is cut where room is short."""
        kept = list(columns)
        cells = [[c.title or "" for c in kept], *([printable(x) for x in row] for row in rows)]
        widths = [max(map(cell_width, column)) for column in zip(*cells, strict=True)]
        while sum(_least(kept, widths)) > self._room(kept):
            going = [(c.drop, i) for i, c in enumerate(kept) if c.drop]
            if not going:
                break
            for row in (kept, widths, *cells):
                del row[min(going)[1]]
        widths = _fitted(kept, widths, self._room(kept))
        for j, row in enumerate(cells):
            parts: list[str] = []
            for text, width, c in zip(row, widths, kept, strict=True):
                text = elided(text, width) if c.elided else cut(text, width)
                pad = " " * (width - cell_width(text))
                style = "bold" if j == 0 else text if text in STYLES else ""
                text = self.styled(text, style)
                parts.append(pad + text if c.unit else text + pad)
            self._lines.append((" " * GAP).join(parts).rstrip())

    def _room(self, columns: Sequence[Column]) -> int:
        return self.width - GAP * (len(columns) - 1)

    def part(self, part: Part) -> None:
        """A part of a report."""
        match part:
            case Heading():
                self.heading(part.text)
                if part.remark:
                    self.line(part.remark, "dim")
            case Notes():
                if part.title:
                    self.line(part.title, "bold")
                for label, text in part.lines:
                    self.wrapped(label, text, part.margin)
            case Drawing():
                if part.title:
                    self.heading(part.title)
                for line in part.lines:
                    self.line(line)
            case Table():
                if part.caption:
                    self.line(part.caption)
                columns, rows = part.cells()
                if rows:
                    self.grid(columns, rows)
                for line in part.more:
                    self.line(line, "dim")

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)


def text(report: Report, layout: Terminal) -> str:
    """A report for a terminal: an empty line between its parts; no table with nothing in it."""
    page = Page(layout.width, layout.color)
    parts = (x for x in report.parts() if not isinstance(x, Table) or x.rows or x.more)
    for i, part in enumerate(parts):
        if i:
            page.line()
        page.part(part)
    return page.text()


def _least(columns: Sequence[Column], widths: Sequence[int], floor: int = 0) -> list[int]:
    """How narrow columns may be for others to stay: what is cut is the last, and what is elided."""
    last = len(columns) - 1
    return [
        min(width, max(len(c.title or ""), floor or c.least)) if c.elided or i == last else width
        for i, (c, width) in enumerate(zip(columns, widths, strict=True))
    ]


def _fitted(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """The widths that columns get, the last of those that may be cut as much as it needs."""
    found = _least(columns, widths)
    if sum(found) > room:
        found = _least(columns, widths, NARROWEST)
    spare = max(room - sum(found), 0)
    for i in reversed(range(len(found))):
        more = min(widths[i] - found[i], spare)
        found[i] += more
        spare -= more
    return found


def printable(text: str) -> str:
    """`text` without what moves the cursor: a model's names may hold anything."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def cell_width(text: str) -> int:
    """Columns that a text takes on a terminal: Chinese, Japanese and Korean take two each."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(c) in "WF") for c in text)


def cut(text: str, width: int) -> str:
    """`text` in `width` columns: the last items of a list left out, or the end, but never a part of
    a number."""
    if cell_width(text) <= width:
        return text
    text = text[: width + 1]  # a character takes a column or more
    items = text.split(", ")
    while len(items) > 1:
        items.pop()
        if cell_width(shorter := f"{', '.join(items)}, …") <= width:
            return shorter
    while text and cell_width(text) >= width:
        text = text[:-1]
    return re.sub(r" [\d.,]*$", "", text) + "…"


def elided(text: str, width: int) -> str:
    """`text` in `width` columns, its middle left out where it is longer: the end tells most."""
    if cell_width(text) <= width:
        return text
    head = cut(text, max((width - 1) // 3 + 1, 1))
    tail = ""
    for c in reversed(text):
        if cell_width(head) + cell_width(c + tail) > width:
            break
        tail = c + tail
    return head + tail


def short_words(text: str) -> str:
    """A text whose words are of no more than `LONGEST_WORD` characters: `textwrap` copies the rest
    of a word for each line of it."""
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda m: elided(m[0], LONGEST_WORD), text)
