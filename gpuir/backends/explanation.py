"""Why one kernel takes the time it does, for a reader: every quantity, its formula, its source."""

from __future__ import annotations

from collections.abc import Sequence

from gpuir.backends.terminal import Page, Terminal, cell_width
from gpuir.ops import kernel as k
from gpuir.report.answer import Answer, Line
from gpuir.report.find import Located
from gpuir.report.kernels import KernelRow
from gpuir.report.names import node_name
from gpuir.report.table import Column, Table
from gpuir.report.units import percent, plain, quantity, share

INLINE = 44  # a longer source stands below, once, under a number


def explanation(s: Answer, found: Located, lines: Sequence[Line], layout: Terminal) -> str:
    """What a kernel is and stands for, then the lines that lead to its time; of a loop or branch,
    its kernels."""
    page = Page(layout.width, layout.color)
    node, cost = found.node, found.node.cost
    page.heading(f"{node.op.name} %{'/'.join(found.path)} on {s.device.title or s.device.name}")
    page.line()
    page.wrapped("computes", ", ".join(dict.fromkeys(map(node_name, node.locs))), 12)
    kernel = next((x for x in s.kernels if x.path == found.path), None)
    if kernel is not None and kernel.shape:
        page.wrapped("nest", kernel.shape, 12)
    if node.tile is not None:
        page.wrapped("tile", node.tile.settings, 12)
    if cost is not None and cost.terms:
        terms = ", ".join(f"{name} {quantity(t, 's')}" for name, t in cost.terms)
        page.wrapped("time", f"{quantity(cost.time_s, 's', 4)}: {terms}", 12)
        page.wrapped("bound", f"{cost.bound}, by {cost.by}", 12)
        if cost.interval is not None:
            low, high = (quantity(end, "s") for end in cost.interval)
            page.wrapped("interval", f"{low} to {high} in 80 % of cases", 12)
        if cost.unseen:
            page.wrapped("unseen", f"{', '.join(cost.unseen)}: not in the fitted data", 12)
    if kernel is not None and kernel.runs != 1:
        page.wrapped("runs", f"{kernel.runs:,}, {quantity(kernel.time_s, 's')} in all", 12)
    page.line()
    if node.op.control:
        _parts(s, [found], page, layout.top)
    elif isinstance(node.op, k.View):
        page.line("The same bytes under another shape: no launch, no time.")
    else:
        _lines(lines, s.device.name, page)
    return page.text()


def several(s: Answer, name: str, found: Sequence[Located], layout: Terminal) -> str:
    """The kernels of one model node, and what they take together."""
    page = Page(layout.width, layout.color)
    page.heading(f"{name} on {s.device.title or s.device.name}")
    page.line()
    page.wrapped("runs as", ", ".join(f"{x.node.op.name} %{'/'.join(x.path)}" for x in found), 12)
    page.line()
    _parts(s, found, page, layout.top)
    return page.text()


def _parts(s: Answer, found: Sequence[Located], page: Page, top: int) -> None:
    """The kernels that were found, or are in a loop or branch that was, the dearest first, and
    their sum."""
    paths = {x.path for x in found}
    inside = [x for x in s.kernels if x.launches and any(x.path[: len(p)] == p for p in paths)]
    inside.sort(key=lambda x: -x.time_s)
    total = sum(x.time_s for x in inside)

    ends = [("", inside, f"in all, {percent(total, s.device_s)} of the device's time")]
    if rest := inside[top:]:
        ends.insert(0, ("", rest, f"{len(rest):,} more: see --top"))
    each = [(x.kind, [x], f"%{'/'.join(x.path)}") for x in inside[:top]]

    def time_s(some: Sequence[KernelRow]) -> float:
        return sum(x.time_s for x in some)

    def each_s(x: tuple[str, Sequence[KernelRow], str]) -> float | None:
        return x[1][0].cost.time_s if x[0] else None

    page.part(
        Table(
            [*each, *ends],
            (
                Column("time", "s", value=lambda x: time_s(x[1])),
                Column("share", "%", value=lambda x: share(time_s(x[1]), total)),
                Column("runs", "x", text=lambda x: f"x{sum(y.launches for y in x[1]):,}"),
                Column("each", "s", value=each_s, blank=""),
                Column("kernel", value=lambda x: x[0]),
                Column("", value=lambda x: x[2]),
            ),
        )
    )


def _lines(lines: Sequence[Line], device: str, page: Page) -> None:
    """A quantity a line, its formula and source beside it or below; a name that leaves no room for
    the value has a line of its own. The GPU is named in the heading."""
    sources: dict[str, int] = {}
    names = [x.name.replace(f"{device}: ", "gpu: ", 1) for x in lines]
    room = min(page.width // 2 - 4, max(map(cell_width, names), default=0))
    for name, x in zip(names, lines, strict=True):
        value = quantity(x.value, x.unit, 4) if x.unit else plain(x.value)
        if cell_width(name) > room:
            page.line(name)
            name = ""
        head = f"{name:{room}}  {value:>12}"
        tail = f"= {x.formula}" if x.formula and x.formula != value else ""
        if x.source:
            short = len(x.source) <= INLINE
            note = (
                f"({x.source})" if short else f"[{sources.setdefault(x.source, len(sources) + 1)}]"
            )
            tail = f"{tail}  {note}".strip()
        if len(head) + 2 + len(tail) <= page.width:
            page.line(f"{head}  {tail}")
        else:
            page.line(head)
            page.wrapped("", tail, 4)
    if sources:
        page.line()
    for source, i in sources.items():
        page.wrapped(f"[{i}]", source, 5)
