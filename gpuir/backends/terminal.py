"""The report as a table for a terminal: one model on one target, or several targets compared."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from unicodedata import east_asian_width

from gpuir.ir.notes import Bound
from gpuir.report.answer import Answer
from gpuir.report.equal import Alike, alike, layer
from gpuir.report.kernels import Kernel, Total
from gpuir.report.modules import modules
from gpuir.report.names import node_name
from gpuir.report.table import Column, Drawing, Heading, Notes, Part, Report, Table
from gpuir.report.units import percent, quantity, rate
from gpuir.targets.host import load_host
from gpuir.targets.profile import Profile, load_profile

if TYPE_CHECKING:
    from gpuir.simulate.causes import Gain
    from gpuir.simulate.fitting import ToFit
    from gpuir.simulate.memory import Memory, Moment
    from gpuir.simulate.timeline import Traffic

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
NOT_MEASURED = {  # words of `Cost.unseen`, where they are not "this" dtype or size
    "gpu": "this GPU",
    "indices": "indices like these",
    "links": "links like these",
    "ranks": "so many ranks",
    "network": "this network",
}
NAME_WIDTH = 22  # a layer's name gets at least so much room before columns are dropped
GAP = 2
WAITS = "waits"  # a column of the comparison
NARROWEST = 8  # characters of a column that is cut
LEAST_SHARE = 0.005  # of the time: modules below are not listed
LEAST_GAIN = 0.01  # of the time: causes below are not listed
GONE = {"host": "the host"}  # of causes, where the word alone does not read well

Group = Literal["kernel", "module", "phase"]


@dataclass(frozen=True)
class Layout:
    """How wide a terminal is, whether it shows colour, and how many kernels to list; or the name of
    the file to be written, whose suffix may say in which form."""

    width: int = 120
    color: bool = False
    top: int = 15
    memory: bool = False  # list who holds memory at the peak
    group: Group = "kernel"  # what the table of totals adds up
    file: str = ""


@dataclass(frozen=True)
class KernelColumn:
    """A column of the kernel table. `keep` ranks it: when room is short, the lowest goes first."""

    title: str
    keep: int
    cell: Callable[[Alike], str]
    right: bool = True


def report(summaries: Sequence[Answer], layout: Layout) -> str:
    """Head, slowest kernels, totals, coverage and assumptions; or a comparison of targets."""
    page = Page(layout.width, layout.color)
    if len(summaries) == 1:
        _single(summaries[0], page, layout)
    else:
        _compare(summaries, page, layout)
    return page.text()


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

    def table(
        self,
        columns: Sequence[tuple[str, bool]],
        rows: Sequence[Sequence[str]],
        drop: Sequence[str] = (),
    ) -> None:
        """Rows of text under titles, each set to the right or not; the columns `drop` go first."""
        order = {title: i for i, title in enumerate(drop, 1)}
        self.grid(
            [Column(title, "x" * right, drop=order.get(title, 0)) for title, right in columns], rows
        )

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


def text(report: Report, layout: Layout) -> str:
    """A report for a terminal: an empty line between its parts."""
    page = Page(layout.width, layout.color)
    for i, part in enumerate(report.parts()):
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


# ---------------------------------------------------------------------------- one target


def _single(s: Answer, page: Page, layout: Layout) -> None:
    title = f"{s.device.title} ({s.device.name})" if s.device.title else s.device.name
    short = f"does not fit, {lacking(s.memory)}: " if s.memory.fits is False else ""
    page.heading(f"{short}{s.model} on {title}")
    page.line()
    for label, text in answers(s):
        page.wrapped(label, text)
    page.line()
    for label, text in head(s):
        page.wrapped(label, text)
    _slowest(s, page, layout)
    _totals(s, page, layout)
    if layout.memory:
        _memory(s.memory, page, layout)
    _coverage(s, page)
    _notes(s, page)


def machine_text(profile: Profile) -> str:
    """The machine whose times the host's are."""
    if not profile.machine:
        return "one of the profile's own"
    host = load_host(profile.machine)
    if host.slowdown == 1:
        return f"{host.name}: {host.title}"
    on = f"{host.title}, {host.processor}" if host.processor else host.title
    return f"{host.name}, {host.slowdown:.3g} times as long as the reference: {on}"


def answers(s: Answer) -> Iterator[tuple[str, str]]:
    """What a reader asks first: how long, how sure, what bounds it, what to do. Of each line its
    label and text."""
    unfit = s.memory.fits is False
    if unfit:
        yield "fits", fits_text(s.memory)
        yield "to fit", to_fit_text(s.to_fit)
    where = ", were there enough memory" if unfit else ""
    yield "latency", f"{quantity(s.latency_s, 's', 4)}{where}, {throughput(s)}"
    if s.interval is not None:
        yield "interval", interval(s)
    bound = bounds(s.bounds, s.device_s) if s.device_s else ""
    if s.timeline.is_host_bound:
        yield "bound", f"the host, whose launches the device waits for; kernels: {bound}"
    elif s.device_s:
        yield "bound", f"{bound} of the kernels' time"
    if s.latency_s:
        yield "gains", gains_text(s.gains, s.latency_s)
    if s.timeline.is_host_bound:
        graphs = (name for name in s.software.alternatives if load_profile(name).host.graph)
        one = "".join(f"one launch for all (--profile {name}) or " for name in graphs)
        yield "try", f"{one}a larger batch (--crossover batch finds it) to hide the host"
    elif s.device_s:
        yield "try", "gpuir advise: changes that help; gpuir explain: one kernel's terms"


def head(s: Answer) -> Iterator[tuple[str, str]]:
    """What the answers rest on: of each line its label and text."""
    yield "profile", f"{s.profile}: {s.stack}"
    if s.software.host.call_s:
        yield "host", machine_text(s.software)
    if s.graph.mesh:
        mesh = ", ".join(f"{axis}={n}" for axis, n in s.graph.mesh)
        on = f" on {s.graph.cluster}" if s.graph.cluster else ", over links that nothing names"
        yield "ranks", f"{s.graph.ranks:,} ({mesh}){on}; this is one of them"
    if s.graph.cluster and s.timeline.traffic:
        yield "sends", "; ".join(map(traffic, s.timeline.traffic))
    if s.latency_s > s.timeline.busy_s * (1 + 1e-9):
        yield "device", host_text(s)
    parts = [f"{s.launches:,} launch{'es' * (s.launches != 1)}"]
    listed = sum(x.launches > 0 for x in s.kernels)
    if listed != s.launches:
        parts[0] += f" of {listed:,} kernels"
    if s.views:
        parts.append(f"{s.views:,} free view{'s' * (s.views > 1)}")
    if s.idle:
        parts.append(f"{s.idle:,} in branches not taken")
    yield "kernels", ", ".join(parts)
    if s.latency_s:
        flops = f"{quantity(s.flops, 'flop')} at {quantity(s.flops / s.latency_s, 'flop/s')}"
        moved = f"{quantity(s.bytes, 'bytes')} at {quantity(s.bytes / s.latency_s, 'bytes/s')}"
        yield "work", f"{flops}; reads and writes {moved}{dram_text(s)}"
    yield "memory", memory_text(s.memory)
    if s.memory.fits:
        yield "fits", fits_text(s.memory)
    yield "predictor", ", ".join(s.by) or "none: nothing to run"
    if s.interval is not None or s.unseen:
        yield "fitted on", fitted(s)
    if s.unfitted_s:
        yield "unfitted", unfitted(s)
    if not any(share.nodes for share in s.coverage[1:]):
        folded = f", {s.folded:,} of them folded away" if s.folded else ""
        yield "coverage", f"all {s.nodes:,} model nodes{folded}"


def dram_text(s: Answer) -> str:
    """`; 1.2 GB from or to device memory at 890 GB/s`, where that is not as much."""
    if s.dram_bytes == s.bytes:
        return ""
    if is_cached(s):
        return ", all of it within the caches"
    rate_text = quantity(s.dram_bytes / s.latency_s, "bytes/s")
    return f"; {quantity(s.dram_bytes, 'bytes')} from or to device memory at {rate_text}"


def is_cached(what: Answer | Total) -> bool:
    """Whether less goes from or to device memory than a formula for caches can tell from nothing:
    a thousandth."""
    return what.dram_bytes * 1000 <= what.bytes


def host_text(s: Answer) -> str:
    """`busy 37 % of the time, waits for the host 63 % (7.76 ms): host-bound`."""
    run = s.timeline
    text = f"busy {percent(run.busy_s, s.latency_s)} of the time"
    if run.gaps_s:
        share = percent(run.gaps_s, s.latency_s)
        text += f", waits for the host {share} ({quantity(run.gaps_s, 's')})"
    if run.copies_s:
        share = percent(run.copies_s, s.latency_s)
        text += f", copies {share} ({quantity(run.copies_s, 's')})"
    return f"{text}: host-bound" if run.is_host_bound else text


def traffic(x: Traffic) -> str:
    """`dp: 25 collectives of 3.52 ms, 80 % hidden behind kernels, 704 us exposed`."""
    text = f"{x.group}: {x.count:,} collective{'s' * (x.count != 1)} of {quantity(x.time_s, 's')}"
    hidden = percent(x.time_s - x.exposed_s, x.time_s)
    return f"{text}, {hidden} hidden behind kernels, {quantity(x.exposed_s, 's')} exposed"


def gains_text(gains: Sequence[Gain], whole: float) -> str:
    """`34 % without launches (638 us), 23 % without the host (443 us)`: causes that count."""
    listed = [x for x in gains if x.gain_s >= LEAST_GAIN * whole] or list(gains[:1])
    without = ((GONE.get(x.cause, x.cause), x.gain_s) for x in listed)
    return ", ".join(f"{percent(s, whole)} without {it} ({quantity(s, 's')})" for it, s in without)


def interval(s: Answer) -> str:
    """`88.1 us to 115 us in 80 % of cases`, and how much of the time is in it as it is."""
    low, high = s.interval or (s.latency_s, s.latency_s)
    text = f"{quantity(low, 's')} to {quantity(high, 's')} in 80 % of cases"
    if s.certain_s:
        text += f"; {percent(s.certain_s, s.device_s)} of the kernels' time has no interval"
    return text


def fitted(s: Answer) -> str:
    """Whether this GPU, and the dtypes of its kernels, were measured for what predicts."""
    groups: dict[tuple[tuple[str, ...], float], list[str]] = {}
    for u in (u for u in s.unseen if u.what != "kind"):
        what = NOT_MEASURED.get(u.what, f"this {u.what}")
        groups.setdefault((u.kinds, u.time_s), []).append(what)
    parts: list[str] = []
    for (kinds, time_s), what in groups.items():
        share = percent(time_s, s.device_s)
        of = "" if share == "100 %" else f" for {', '.join(kinds)} ({share} of the kernels' time)"
        parts.append(f"no measurements of {' or '.join(what)}{of}")
    other = "measurements of this GPU, in these dtypes"
    on_host_s = sum(x.time_s for x in s.kernels if x.runs and x.cost.on_host)
    if on_host_s:
        share = percent(on_host_s, s.device_s)
        parts.append(f"no measurements of the CPU, whose rates are assumed ({share} of that time)")
    elif s.unfitted_s >= s.device_s * (1 - 1e-9):
        other = "no measurements of these kinds of kernels"
    return "; ".join(parts) or other


def unfitted(s: Answer) -> str:
    """`62 % of the kernels' time, routine, pool: no measurements of such kernels; of it 40 % by
    library routines, 3 % by unknown operators`."""
    kinds = next((u.kinds for u in s.unseen if u.what == "kind"), ())
    share = percent(s.unfitted_s, s.device_s)
    text = f"{share} of the kernels' time, {', '.join(kinds)}: no measurements of such kernels"
    words = {"approximated": "library routines", "opaque": "unknown operators"}
    parts = [
        f"{percent(x.time_s, s.device_s)} by {words[x.status]}"
        for x in s.coverage
        if x.status in words and x.time_s
    ]
    return text + (f"; {', '.join(parts)}" if parts else "")


def memory_text(m: Memory) -> str:
    """`6.2 GB at the peak, in MatMul_3: weights 4.1 GB, activations 2.1 GB`."""
    held = sorted(m.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{kind} {quantity(n, 'bytes')}" for kind, n in held if n)
    return f"{quantity(m.peak_bytes, 'bytes')} at the peak, in {moment_name(m.peak)}: {parts}"


def fits_text(m: Memory) -> str:
    """`34.1 GB to spare: 7.7 GB reserved of 41.8 GB (allocator caching)`."""
    spare, has = m.spare_bytes or 0, m.available_bytes or 0
    room = quantity(abs(spare), "bytes")
    verdict = f"{room} to spare" if spare >= 0 else f"no, {room} short"
    reserved = f"{quantity(m.reserved_bytes, 'bytes')} reserved of {quantity(has, 'bytes')}"
    return f"{verdict}: {reserved} (allocator {m.allocator})"


def lacking(m: Memory) -> str:
    """`5.04 GB short`."""
    return f"{quantity(-(m.spare_bytes or 0), 'bytes')} short"


def to_fit_text(changes: Sequence[ToFit]) -> str:
    """`--dims batch=6 (1.2 GB to spare), or --target a100-sxm-80gb (41 GB to spare)`."""
    words = (
        f"{x.option} ({quantity(x.spare_bytes, 'bytes')} to spare)" if x.spare_bytes else x.option
        for x in changes
    )
    return ", or ".join(words) or (
        "nothing that was tried; `gpuir largest` and `gpuir plan` try more"
    )


def moment_name(moment: Moment) -> str:
    """The model node that a moment is named after."""
    if moment.node is None:
        return "the first node"
    return node_name(moment.node.locs[-1]) if moment.node.locs else "/".join(moment.path)


def throughput(s: Answer) -> str:
    """Runs a second, and items a second where the batch is known."""
    if not s.latency_s:
        return "nothing runs"
    runs = f"{rate(1 / s.latency_s)} runs/s"
    return f"{runs} of batch {s.batch:,}: {rate(s.batch / s.latency_s)}/s" if s.batch else runs


def bounds(shares: Sequence[tuple[Bound, float]], whole: float) -> str:
    """`memory 61 %, compute 39 %`, the largest first."""
    largest = sorted(shares, key=lambda pair: -pair[1])
    return ", ".join(f"{name} {percent(part, whole)}" for name, part in largest if part)


def _slowest(s: Answer, page: Page, layout: Layout) -> None:
    groups = alike(s)
    rows = groups[: layout.top]
    if not rows:
        return
    several = len({x.one.cost.by for x in rows if x.one.tile}) > 1
    columns: list[KernelColumn] = [
        KernelColumn("time", 10, lambda x: quantity(x.time_s, "s")),
        KernelColumn("share", 10, lambda x: percent(x.time_s, s.latency_s)),
        KernelColumn("runs", 7, lambda x: f"x{x.runs:,}" if x.runs != 1 else ""),
        KernelColumn("each", 1, lambda x: quantity(x.one.cost.time_s, "s") if x.runs != 1 else ""),
        KernelColumn("kernel", 9, lambda x: x.one.kind, right=False),
        KernelColumn("bound", 8, lambda x: x.one.cost.bound, right=False),
        KernelColumn("peak", 6, lambda x: _or_blank(x.one.peak_share, percent)),
        KernelColumn("80 %", 5, lambda x: spread(x.one)),
        KernelColumn("waves", 4, lambda x: _or_blank(x.one.cost.fact("waves"), _short)),
        KernelColumn("occup", 3, lambda x: _or_blank(x.one.cost.fact("occupancy"), percent)),
        KernelColumn("tile", 2, lambda x: tile_text(x.one), right=False),
        KernelColumn("by", 9, lambda x: x.one.cost.by if several else "", right=False),
    ]
    columns = [c for c in columns if any(c.cell(x) for x in rows)]
    names = [layer(x) for x in rows]
    room = page.width - min(NAME_WIDTH, max(map(len, names)))
    while (used := sum(_width(c, rows) + GAP for c in columns)) > room and len(columns) > 3:
        columns.remove(min(columns, key=lambda c: c.keep))
    room = max(page.width - used, 8)
    cells = [
        [*(c.cell(x) for c in columns), elided(name, room)]
        for x, name in zip(rows, names, strict=True)
    ]
    page.line()
    page.table([*((c.title, c.right) for c in columns), ("layer", False)], cells)
    rest = groups[layout.top :]
    if rest:
        time, count = sum(x.time_s for x in rest), sum(len(x.kernels) for x in rest)
        share = percent(time, s.latency_s)
        page.line(f"{count:,} more take {quantity(time, 's')}, {share}: see --top", "dim")


def _width(column: KernelColumn, rows: Sequence[Alike]) -> int:
    return max(len(column.title), *(len(column.cell(x)) for x in rows))


def spread(x: Kernel) -> str:
    """`-9 +14 %`: the ends of the interval, beside the time."""
    if x.cost.interval is None or not x.cost.time_s:
        return ""
    low, high = (100 * (end / x.cost.time_s - 1) for end in x.cost.interval)
    return f"{low:+.0f} {high:+.0f} %"


def _or_blank(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def tile_text(x: Kernel) -> str:
    """`128x64x32` in the order of the loop nest, batch and heads left out where the tile holds one;
    `/4` behind it where so many blocks share the reduced dimension."""
    if x.tile is None:
        return ""
    dims = [str(n) for d, n in x.tile.dims if n > 1 or d not in "bh"]
    return "x".join(dims) + (f"/{x.tile.split}" if x.tile.split > 1 else "")


def _totals(s: Answer, page: Page, layout: Layout) -> None:
    """A row a kind of kernels, a phase of training, or a module."""
    match layout.group:
        case "kernel":
            named = [(total.kind, total) for total in s.totals]
        case "phase":
            named = [(total.kind, total) for total in s.phases]
        case "module":
            tree = [m for m in modules(s.running) if m.total.time_s >= LEAST_SHARE * s.latency_s]
            named = [("  " * m.depth + ".".join(m.path), m.total) for m in tree]
    if not named:
        return
    differs = ("dram",) if any(total.dram_bytes != total.bytes for _, total in named) else ()
    titles = ("launches", "time", "share", "flop", "bytes", *differs)
    columns = [(layout.group, False), *((title, True) for title in titles), ("bound", False)]
    rows = [
        (
            name,
            f"{total.launches:,}",
            quantity(total.time_s, "s"),
            percent(total.time_s, s.latency_s),
            quantity(total.flops, "flop") if total.flops else "-",
            quantity(total.bytes, "bytes") if total.bytes else "-",
            *("-" if is_cached(total) else quantity(total.dram_bytes, "bytes") for _ in differs),
            bounds(total.bounds, total.time_s),
        )
        for name, total in named
    ]
    page.line()
    page.table(columns, rows, drop=(*differs, "bytes", "flop", "launches"))


def _memory(m: Memory, page: Page, layout: Layout) -> None:
    """The peak by kind, and who holds the most."""
    columns = [("at the peak", False), ("bytes", True), ("share", True), ("", False)]
    rows = [
        (kind, quantity(n, "bytes"), percent(n, m.peak_bytes), "#" * round(40 * n / m.peak_bytes))
        for kind, n in m.parts.items()
        if n
    ]
    page.line()
    page.table(columns, rows)
    columns = [("bytes", True), ("share", True), ("held as", False), ("by", False)]
    rows = [
        (quantity(h.bytes, "bytes"), percent(h.bytes, m.peak_bytes), h.kind, h.name)
        for h in m.largest[: layout.top]
    ]
    page.line()
    page.table(columns, rows)


def _coverage(s: Answer, page: Page) -> None:
    """The ledger, where something is not modelled."""
    if not any(share.nodes for share in s.coverage[1:]):
        return
    titles = ("nodes", "time", "flop", "bytes")
    columns = [("coverage", False), *((title, True) for title in titles), ("", False)]
    page.line()
    page.table(columns, coverage(s), drop=("flop", "bytes"))


def coverage(s: Answer) -> list[tuple[str, ...]]:
    """A row a status: nodes, and the share of the time, flops and bytes; names of what is not
    modelled."""
    rows = [
        (
            share.status,
            f"{share.nodes:,}",
            percent(share.time_s, s.device_s),
            "?" if share.status == "opaque" and share.nodes else percent(share.flops, s.flops),
            percent(share.bytes, sum(x.bytes for x in s.coverage)),
            ", ".join(f"{name} x{n}" if n > 1 else name for name, n in share.what),
        )
        for share in s.coverage
    ]
    if s.folded:
        rows.append(("folded", f"{s.folded:,}", "", "", "", "known at load, or no work left"))
    return rows


def _notes(s: Answer, page: Page) -> None:
    page.line()
    _labelled("assumed", s.assumed, page)
    _labelled("warning", s.warnings, page)


def _labelled(label: str, notes: Sequence[str], page: Page) -> None:
    for i, text in enumerate(notes):
        page.wrapped("" if i else label, text.replace(": assumed: ", ": "))


# ---------------------------------------------------------------------------- several targets


def _compare(summaries: Sequence[Answer], page: Page, layout: Layout) -> None:
    first = summaries[0]
    page.heading(f"{first.model} {of_what(summaries)}")
    for name, s in zip(run_names(summaries), summaries, strict=True):
        if s.memory.fits is False:
            changes = f"; {to_fit_text(s.to_fit)}" if s.to_fit else ""
            page.wrapped("", f"does not fit on {name}: {lacking(s.memory)}{changes}", indent=0)
    page.line()
    titles, rows = comparison(summaries)
    columns = [(title, title not in (titles[0], "bound")) for title in titles]
    room = max(page.width - 52, 16)
    rows = [(elided(name, room), *row) for name, *row in rows]
    ends = [title for title in titles if title.startswith("80 %")]
    page.table(columns, rows, drop=("launches", "runs/s", "to spare", *ends))
    _by_kind(summaries, page)
    _coverage(first, page)
    page.line()
    if WAITS in titles:
        page.wrapped(WAITS, "share of the time that the device waits for the host")
    signed = dict.fromkeys(by for s in summaries for by in s.by)
    page.wrapped("predictor", ", ".join(signed) or "none: nothing to run")
    runs = list(zip(run_names(summaries), summaries, strict=True))
    known = {n: (fitted(s),) for n, s in runs if s.interval is not None or s.unseen}
    _labelled("fitted on", _of_each(known), page)
    apart = {n: (unfitted(s),) if s.unfitted_s else () for n, s in runs}
    _labelled("unfitted", _of_each(apart), page)
    _labelled("assumed", _of_each({n: s.assumed for n, s in runs}), page)
    _labelled("warning", list(dict.fromkeys(w for s in summaries for w in s.warnings)), page)


def comparison(summaries: Sequence[Answer]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles, and a row a run."""
    fastest = min(s.latency_s for s in summaries)
    ends = ("80 % of cases",) if any(s.interval for s in summaries) else ()
    waits = (WAITS,) if any(s.timeline.gaps_s > 0.01 * s.latency_s for s in summaries) else ()
    what = "target" if len({s.device.name for s in summaries}) > 1 else "profile"
    titles = (
        what,
        "latency",
        *ends,
        "x fastest",
        *waits,
        "runs/s",
        "launches",
        "to spare",
        "bound",
    )
    rows = [
        (
            name,
            quantity(s.latency_s, "s", 4),
            *(" to ".join(quantity(end, "s") for end in s.interval or ()) for _ in ends),
            f"{s.latency_s / fastest:.2f}" if fastest else "-",
            *(percent(s.timeline.gaps_s, s.latency_s) for _ in waits),
            rate(1 / s.latency_s) if s.latency_s else "-",
            f"{s.launches:,}",
            _spare(s.memory),
            bounds(s.bounds, s.device_s),
        )
        for name, s in zip(run_names(summaries), summaries, strict=True)
    ]
    return titles, rows


def run_names(summaries: Sequence[Answer]) -> list[str]:
    """What tells the runs apart: `a100`, `eager`, or `a100 eager` where both differ."""
    given = [s.graph.target or s.device.name for s in summaries]
    names = [s.device.name for s in summaries]
    targets = names if len(set(names)) >= len(set(given)) else given
    profiles = [s.profile for s in summaries]
    if len(set(profiles)) == 1:
        return targets
    if len(set(targets)) == 1:
        return profiles
    return [f"{target} {profile}" for target, profile in zip(targets, profiles, strict=True)]


def of_what(summaries: Sequence[Answer]) -> str:
    """`on 3 targets`, `on a100 under 2 profiles`."""
    targets = {s.device.name: s.device for s in summaries}
    profiles = {s.profile for s in summaries}
    on = f"{len(targets)} targets" if len(targets) > 1 else next(iter(targets))
    under = f"{len(profiles)} profiles" if len(profiles) > 1 else next(iter(profiles))
    return f"on {on} under {under}"


def _spare(m: Memory) -> str:
    """Memory that stays free, and a minus where it does not fit."""
    return "-" if m.spare_bytes is None else quantity(m.spare_bytes, "bytes")


def _of_each(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Each note once, behind the names of the targets that it is of."""
    own: dict[str, list[str]] = {}
    for name, texts in notes.items():
        for text in texts:
            own.setdefault(text, []).append(name)
    return [_whose(names, len(notes)) + text for text, names in own.items()]


def _whose(names: Sequence[str], of: int) -> str:
    """`a100, l4 and 3 more: `; nothing where it is said of all."""
    if len(names) == of:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}: "


def _by_kind(summaries: Sequence[Answer], page: Page) -> None:
    """Time by kind of kernel: a column a target, or where those do not fit, a row."""
    kinds = tuple(dict.fromkeys(total.kind for s in summaries for total in s.totals))
    if not kinds:
        return
    names = run_names(summaries)
    times = [{total.kind: total.time_s for total in s.totals} for s in summaries]
    cells = [[quantity(t[kind], "s") if kind in t else "-" for kind in kinds] for t in times]
    page.line()
    if sum(max(len(name), 9) + GAP for name in names) + max(map(len, kinds)) <= page.width:
        columns = [("kernel", False), *((name, True) for name in names)]
        page.table(columns, list(zip(kinds, *cells, strict=True)))
    else:
        room = max(page.width - 52, 16)
        columns = [("target", False), *((kind, True) for kind in kinds)]
        rows = [(elided(name, room), *row) for name, row in zip(names, cells, strict=True)]
        page.table(columns, rows, drop=kinds[:0:-1])
