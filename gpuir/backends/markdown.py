"""A report as GitHub's Markdown: for a pull request, an issue, a page."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuir.backends.terminal import Terminal, printable
from gpuir.report.table import Drawing, Heading, Notes, Part, Report, Table

MEANT = re.compile(r"[\\`*_\[\]>|~]|<(?![\d ])")  # what Markdown takes for more than a character


def markdown(report: Report, _: Terminal) -> str:
    """Headings, lists of labelled sentences, tables."""
    lines: list[str] = []
    level = "##"
    for part in report.parts():
        if isinstance(part, Heading):
            lines.append(f"{level} {escaped(part.text)}")
            level = "###"
            lines += ["", escaped(part.remark)] if part.remark else []
        else:
            lines += _lines(part)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _lines(part: Part) -> Iterator[str]:
    match part:
        case Notes():
            if part.title:
                yield from (f"**{escaped(part.title)}**", "")
            for label, text in part.lines:
                if not part.margin:
                    yield escaped(text)
                else:
                    head = f"- **{escaped(label)}**: " if label else "  - "
                    yield head + escaped(text)
        case Drawing():
            if part.title:
                yield from (f"**{escaped(part.title)}**", "")
            yield from ("```text", *map(printable, part.lines), "```")
        case Table():
            yield from _table(part)
        case _:
            return


def _table(table: Table) -> Iterator[str]:
    columns, rows = table.cells()
    if table.folded and rows:
        yield from ("<details>", f"<summary>{escaped(table.folded)}</summary>", "")
    if table.caption:
        yield from (escaped(table.caption), "")
    if rows:
        yield _row([escaped(c.title or "") for c in columns])
        yield _row(["--:" if c.unit else "---" for c in columns])
        yield from (_row(list(map(cell, row))) for row in rows)
    if table.more:
        yield from ("", *map(escaped, table.more))
    if table.folded and rows:
        yield from ("", "</details>")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(text: str) -> str:
    """A text in a table: as code where it is a name that would be read as more than a name."""
    plain = printable(text)
    if not MEANT.search(plain) and "@" not in plain:
        return plain
    name = plain.replace("`", "'").replace("|", "\\|")
    return f"`{name}`"


def escaped(text: str) -> str:
    """A sentence as it is, whatever it names."""
    return MEANT.sub(r"\\\g<0>", printable(text))
