"""The report as a table for a terminal: one model on one target, or several targets compared."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, NamedTuple

from gpuir.backends.report import Kernel, Summary, node_name
from gpuir.backends.units import percent, quantity
from gpuir.ir.notes import Bound

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {"compute": "green", "memory": "cyan", "latency": "yellow"}
NAME_WIDTH = 22  # a layer's name gets at least so much room before columns are dropped
GAP = 2


@dataclass(frozen=True)
class Layout:
    """How wide a terminal is, whether it shows colour, and how many kernels to list."""

    width: int = 120
    color: bool = False
    top: int = 15


class Column(NamedTuple):
    """A column of the kernel table. `keep` ranks it: when room is short, the lowest goes first."""

    title: str
    keep: int
    cell: Callable[[Kernel], str]
    right: bool = True


def report(summaries: Sequence[Summary], layout: Layout) -> str:
    """Head, slowest kernels, totals, coverage and assumptions; or a comparison of targets."""
    page = Page(layout)
    if len(summaries) == 1:
        _single(summaries[0], page, layout)
    else:
        _compare(summaries, page, layout)
    return page.text()


class Page:
    """Lines and tables of a given width, as plain text or with colour codes."""

    def __init__(self, layout: Layout):
        from rich.console import Console

        self.width = layout.width
        self._file = StringIO()
        self._console = Console(
            file=self._file,
            width=layout.width,
            force_terminal=layout.color,
            color_system="standard" if layout.color else None,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )

    def line(self, text: str = "", style: str = "") -> None:
        self._console.print(text, style=style or None, soft_wrap=True)

    def wrapped(self, label: str, text: str, indent: int = 11) -> None:
        """`label` in a left margin, `text` wrapped in the room beside it."""
        room = max(self.width - indent, 20)
        lines = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
        for i, part in enumerate(lines):
            margin = label if i == 0 else ""
            self.line(f"{margin:{indent}}{part}")

    def table(self, table: Table) -> None:
        self._console.print(table)

    def text(self) -> str:
        return "".join(f"{line.rstrip()}\n" for line in self._file.getvalue().splitlines())


def plain_table(*columns: tuple[str, bool]) -> Table:
    """An unboxed table; a column is its title and whether it is set to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for title, right in columns:
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    return table


# ---------------------------------------------------------------------------- one target


def _single(s: Summary, page: Page, layout: Layout) -> None:
    title = f"{s.device.title} ({s.device.name})" if s.device.title else s.device.name
    page.line(f"{s.model} on {title}", style="bold")
    page.line()
    _head(s, page)
    _slowest(s, page, layout)
    _totals(s, page)
    _coverage(s, page)
    _notes(s, page)


def _head(s: Summary, page: Page) -> None:
    page.wrapped("latency", f"{quantity(s.latency_s, 's', 4)}, {rate(s)}")
    parts = [f"{s.launches:,} launches"]
    listed = sum(x.launches > 0 for x in s.kernels)
    if listed != s.launches:
        parts[0] += f" of {listed:,} kernels"
    if s.views:
        parts.append(f"{s.views:,} views that launch nothing")
    if s.idle:
        parts.append(f"{s.idle:,} in branches not taken or loops that never run")
    page.wrapped("kernels", ", ".join(parts))
    if s.latency_s:
        flops = f"{quantity(s.flops, 'flop')} at {quantity(s.flops / s.latency_s, 'flop/s')}"
        moved = f"{quantity(s.bytes, 'bytes')} at {quantity(s.bytes / s.latency_s, 'bytes/s')}"
        page.wrapped("work", f"{flops}, {moved}")
        page.wrapped("bound", f"{bounds(s.bounds, s.latency_s)} (share of time)")
    page.wrapped("predictor", ", ".join(s.by) or "none: nothing to run")


def rate(s: Summary) -> str:
    """Runs a second, and items a second where the batch is known."""
    if not s.latency_s:
        return "nothing runs"
    runs = f"{_count(1 / s.latency_s)} runs/s"
    return f"{runs} of batch {s.batch:,}: {_count(s.batch / s.latency_s)}/s" if s.batch else runs


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bounds(shares: Sequence[tuple[Bound, float]], whole: float) -> str:
    """`memory 61 %, compute 39 %`, the largest first."""
    largest = sorted(shares, key=lambda pair: -pair[1])
    return ", ".join(f"{name} {percent(part, whole)}" for name, part in largest if part)


def _slowest(s: Summary, page: Page, layout: Layout) -> None:
    slowest = s.slowest()
    rows = slowest[: layout.top]
    if not rows:
        return
    columns = [
        Column("time", 9, lambda x: quantity(x.time_s, "s")),
        Column("share", 9, lambda x: percent(x.time_s, s.latency_s)),
        Column("runs", 6, lambda x: f"x{x.runs:,}" if x.runs != 1 else ""),
        Column("kernel", 8, lambda x: x.kind, right=False),
        Column("bound", 7, lambda x: x.cost.bound, right=False),
        Column("peak", 5, lambda x: _fact(x, "peak_share", percent)),
        Column("waves", 4, lambda x: _fact(x, "waves", _short)),
        Column("occup", 3, lambda x: _fact(x, "occupancy", percent)),
        Column("tile", 2, lambda x: tile_text(x), right=False),
    ]
    columns = [c for c in columns if any(c.cell(x) for x in rows)]
    room = page.width - NAME_WIDTH
    while (used := sum(_width(c, rows) + GAP for c in columns)) > room and len(columns) > 3:
        columns.remove(min(columns, key=lambda c: c.keep))
    table = plain_table(*((c.title, c.right) for c in columns), ("layer", False))
    for x in rows:
        cells = (_styled(c.cell(x)) for c in columns)
        table.add_row(*cells, elided(layer(x), max(page.width - used, 8)))
    page.line()
    page.table(table)
    others = slowest[layout.top :]
    if others:
        time = sum(x.time_s for x in others)
        share = percent(time, s.latency_s)
        page.line(f"{len(others):,} more take {quantity(time, 's')}, {share}: see --top", "dim")


def _styled(cell: str) -> str:
    return cell


def _width(column: Column, rows: Sequence[Kernel]) -> int:
    return max(len(column.title), *(len(column.cell(x)) for x in rows))


def _fact(x: Kernel, name: str, text: Callable[[float], str]) -> str:
    value = x.cost.fact(name)
    return "" if value is None else text(value)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def tile_text(x: Kernel) -> str:
    """`128x64x32` in the order of the loop nest; `/4` where blocks share the reduced dimension."""
    if x.tile is None:
        return ""
    return "x".join(str(n) for _, n in x.tile.dims) + (f"/{x.tile.split}" if x.tile.split > 1 else "")


def layer(x: Kernel) -> str:
    """The first model node a kernel stands for, and how many more; inside a loop, after its own."""
    names = list(dict.fromkeys(map(node_name, x.locs)))
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    return names[0] + more if names else x.name


def elided(text: str, width: int) -> str:
    """`text` in `width` characters, its middle left out where it is longer."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _totals(s: Summary, page: Page) -> None:
    if not s.totals:
        return
    titles = ("launches", "time", "share", "flop", "bytes")
    table = plain_table(("kernel", False), *((title, True) for title in titles), ("bound", False))
    for total in s.totals:
        table.add_row(
            total.kind,
            f"{total.launches:,}",
            quantity(total.time_s, "s"),
            percent(total.time_s, s.latency_s),
            quantity(total.flops, "flop").removesuffix("flop").rstrip() if total.flops else "-",
            quantity(total.bytes, "bytes") if total.bytes else "-",
            bounds(total.bounds, total.time_s),
        )
    page.line()
    page.table(table)


def _coverage(s: Summary, page: Page) -> None:
    table = plain_table(
        ("coverage", False), ("nodes", True), ("flop", True), ("bytes", True), ("", False)
    )
    for share in s.coverage:
        what = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in share.what)
        table.add_row(
            share.status,
            f"{share.nodes:,}",
            "?" if share.status == "opaque" and share.nodes else percent(share.flops, s.flops),
            percent(share.bytes, s.bytes),
            elided(what, max(page.width - 40, 20)),
        )
    if s.folded:
        table.add_row("folded", f"{s.folded:,}", "", "", "known at load, or no work left")
    page.line()
    page.table(table)


def _notes(s: Summary, page: Page) -> None:
    for label, notes in (("assumed", s.assumed), ("warning", s.warnings)):
        if notes:
            page.line()
        for text in notes:
            page.wrapped(label, text)


# ---------------------------------------------------------------------------- several targets


def _compare(summaries: Sequence[Summary], page: Page, layout: Layout) -> None:
    first = summaries[0]
    page.line(f"{first.model} on {len(summaries)} targets", style="bold")
    page.line()
    fastest = min(s.latency_s for s in summaries)
    titles = ("latency", "x fastest", "runs/s", "launches")
    table = plain_table(("target", False), *((title, True) for title in titles), ("bound", False))
    for s in summaries:
        table.add_row(
            s.device.name,
            quantity(s.latency_s, "s", 4),
            f"{s.latency_s / fastest:.2f}" if fastest else "-",
            _count(1 / s.latency_s) if s.latency_s else "-",
            f"{s.launches:,}",
            bounds(s.bounds, s.latency_s),
        )
    page.table(table)
    _by_kind(summaries, page)
    _coverage(first, page)
    page.line()
    page.wrapped("predictor", ", ".join(dict.fromkeys(by for s in summaries for by in s.by)))
    shared = [a for a in first.assumed if all(a in s.assumed for s in summaries)]
    for text in shared:
        page.wrapped("assumed", text)
    for s in summaries:
        for text in s.assumed:
            if text not in shared:
                page.wrapped("assumed", f"{s.device.name}: {text}")
    for text in dict.fromkeys(w for s in summaries for w in s.warnings):
        page.wrapped("warning", text)


def _by_kind(summaries: Sequence[Summary], page: Page) -> None:
    """Time by kind of kernel, a column a target."""
    kinds = dict.fromkeys(total.kind for s in summaries for total in s.totals)
    if not kinds:
        return
    names = [s.device.name for s in summaries]
    room = max((page.width - 12) // len(names) - GAP, 9)
    table = plain_table(("kernel", False), *((elided(name, room), True) for name in names))
    times = [{total.kind: total.time_s for total in s.totals} for s in summaries]
    for kind in kinds:
        table.add_row(kind, *(quantity(t[kind], "s") if kind in t else "-" for t in times))
    page.line()
    page.table(table)
