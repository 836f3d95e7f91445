"""A report as a page of HTML without scripts, in the style of the page of charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from gpuir.backends.terminal import Terminal, printable
from gpuir.report.table import Column, Drawing, Heading, Notes, Part, Report, Table

CELL = '<{0} class="{1}">{2}</{0}>'
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} - gpuir</title>
<style>
{style}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def html(report: Report, _: Terminal) -> str:
    """One file that asks for nothing: headings, labelled sentences, tables."""
    parts = list(report.parts())
    title = next((x.text for x in parts if isinstance(x, Heading)), "report")
    body = "\n".join(
        line for i, part in enumerate(parts) for line in _lines(part, "h2" if i else "h1")
    )
    style = Path(__file__).with_name("page.css").read_text()
    return PAGE.format(title=seen(title), style=style, body=body)


def _lines(part: Part, heading: str) -> Iterator[str]:
    match part:
        case Heading():
            yield f"<{heading}>{seen(part.text)}</{heading}>"
            if part.remark:
                yield f'<p class="source">{seen(part.remark)}</p>'
        case Notes():
            if part.title:
                yield f"<h3>{seen(part.title)}</h3>"
            if part.margin:
                yield '<dl class="facts">'
                yield from (f"<dt>{seen(a)}</dt><dd>{seen(b)}</dd>" for a, b in part.lines)
                yield "</dl>"
            else:
                yield from (f"<p>{seen(text)}</p>" for _, text in part.lines)
        case Drawing():
            if part.title:
                yield f"<h3>{seen(part.title)}</h3>"
            yield f"<pre>{chr(10).join(map(seen, part.lines))}</pre>"
        case Table():
            yield from _table(part)


def _table(table: Table) -> Iterator[str]:
    columns, rows = table.cells()
    if rows and table.folded:
        yield f"<details><summary>{seen(table.folded)}</summary>"
    if table.caption:
        yield f"<p>{seen(table.caption)}</p>"
    if rows:
        yield f'<div class="scroll">{table_html(columns, rows)}</div>'
    yield from (f'<p class="source">{seen(line)}</p>' for line in table.more)
    if rows and table.folded:
        yield "</details>"


def table_html(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """The element of a table: figures to the right, words to the left."""
    kinds = ["figure" if c.unit else "word" for c in columns]

    def row(tag: str, cells: Iterable[str]) -> str:
        pairs = zip(kinds, cells, strict=True)
        tags = ((tag if x else "td", kind, seen(x)) for kind, x in pairs)  # no title, no header
        return f"<tr>{''.join(CELL.format(t, kind, x) for t, kind, x in tags)}</tr>"

    body = "\n".join(row("td", cells) for cells in rows)
    head = row("th", [c.title or "" for c in columns])
    return f'<table class="plain"><thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table>'


def seen(text: str) -> str:
    """A text that is no markup, whatever it holds."""
    return escape(printable(text))
