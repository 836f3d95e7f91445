"""A comparison of reports for a terminal, a pull request, a program, and what runs tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

from gpuir.backends import structured
from gpuir.backends.structured import record
from gpuir.backends.terminal import GAP, Layout, Page, elided, printable
from gpuir.report.diff import Change, Check, Diff, Group
from gpuir.report.equal import pattern
from gpuir.report.saved import METRICS, Entry
from gpuir.report.units import percent, quantity

SCHEMA = "gpuir.diff/1"
KERNEL_WIDTH = 36  # of a kernel's kind and shape
LAYER_WIDTH = 24  # a layer's name gets so much room before columns are dropped
COLUMNS = ("change", "old", "new", "kernels", "what", "kernel", "layer")

Format = Callable[[Sequence[Diff], Sequence[Check], Layout], str]

# ---------------------------------------------------------------------------- words


def amount(metric: str, value: float) -> str:
    """`8.45 ms`, `1,204`."""
    unit = METRICS[metric].unit
    return quantity(value, unit, 4) if unit else f"{value:,.0f}"


def share(old: float, new: float) -> str:
    """`+3.2 %`, `-` where there was nothing."""
    if old == new:
        return "0 %"
    if not old:
        return "-"
    text = percent(new - old, old)
    return f"+{text}" if new > old and not text.startswith("<") else text


def difference(metric: str, old: float, new: float) -> str:
    """`+12 MB`, `-383`."""
    if old == new:
        return "0"
    return ("+" if new > old else "-") + amount(metric, abs(new - old))


def uncertainty(d: Diff) -> str:
    """What the change of latency is beside the error of the predictions."""
    if d.old.values["latency"] == d.new.values["latency"] or d.overlap is None:
        return ""
    ends = [
        " to ".join(quantity(end, "s") for end in run.interval_s or ()) for run in (d.old, d.new)
    ]
    verdict = "within the error" if d.overlap else "beyond the error"
    return f"{verdict}: {ends[0]}, then {ends[1]} in 80 % of cases"


def kept(check: Check) -> str:
    """`latency=+3%  ok: 8.45 ms, of 8.70 ms at most`."""
    name = check.budget.metric
    verdict = "ok" if check.is_kept else "OVER"
    limit = amount(name, check.limit)
    return f"{verdict}: {amount(name, check.new)}, of {limit} at most ({change(check)})"


def change(check: Check) -> str:
    name, old, new = check.budget.metric, check.old, check.new
    return f"{difference(name, old, new)}, {share(old, new)}"


def sides(c: Change) -> str:
    """`gemm f16 b=1 m=8 n=64 k=64`, and what it was before an arrow where that is another; of
    several kernels only the kinds."""

    def text(entries: Sequence[Entry]) -> str:
        whole = len(c.old) < 2 and len(c.new) < 2
        names = (f"{x.kind} {x.shape}".rstrip() if whole else x.kind for x in entries)
        return ", ".join(dict.fromkeys(names))

    return " → ".join(dict.fromkeys(filter(None, (text(c.old), text(c.new)))))


def row(g: Group) -> tuple[str, ...]:
    return (
        difference("latency", g.old_s, g.new_s),
        quantity(g.old_s, "s") if g.one.old else "",
        quantity(g.new_s, "s") if g.one.new else "",
        f"x{len(g.changes)}" if len(g.changes) > 1 else "",
        g.one.what or "time",
        sides(g.one),
        pattern(g.names),
    )


def unchanged(d: Diff) -> str:
    """What the list of kernels leaves out because it is as it was."""
    same = [g for g in d.groups if g.status == "same"]
    count, time_s = sum(len(g.changes) for g in same), sum(g.new_s for g in same)
    return f"{count:,} unchanged kernels: {quantity(time_s, 's')}" if same else ""


# ---------------------------------------------------------------------------- terminal


def table(diffs: Sequence[Diff], checks: Sequence[Check], layout: Layout) -> str:
    """Numbers of both, what kinds of kernels take, the kernels that differ, budgets."""
    page = Page(layout.width, layout.color)
    if len(diffs) > 1:
        _overview(diffs, page)
    for d in diffs:
        if len(diffs) > 1:
            page.line()
        page.heading(f"{d.model} on {d.name}")
        if not d.differs:
            page.line(f"nothing differs: {amount('latency', d.new.values['latency'])}")
            continue
        page.line()
        _metrics(d, page)
        _kinds(d, page)
        _kernels(d, page, layout.top)
        if d.notes:
            page.line()
        for i, note in enumerate(d.notes):
            page.wrapped("" if i else "besides", note, 9)
    if checks:
        page.line()
        columns = [("budget", False), ("run", False), ("", False)]
        rows = [(c.budget.text, c.diff.name, kept(c)) for c in checks]
        page.table(columns, rows, drop=("run",))
    return page.text()


def _overview(diffs: Sequence[Diff], page: Page) -> None:
    page.heading(f"{diffs[0].model}: {len(diffs)} runs compared")
    page.line()
    columns = [("run", False), *((x, True) for x in ("old", "new", "change", "launches"))]
    rows = [
        (
            elided(d.name, max(page.width - 44, 16)),
            amount("latency", d.old.values["latency"]),
            amount("latency", d.new.values["latency"]),
            share(d.old.values["latency"], d.new.values["latency"]),
            difference("launches", d.old.values["launches"], d.new.values["launches"]),
        )
        for d in diffs
    ]
    page.table(columns, rows, drop=("launches", "change"))


def _metrics(d: Diff, page: Page) -> None:
    columns = [("", False), *((x, True) for x in ("old", "new", "change", ""))]
    page.table(columns, metrics(d), drop=("change", "old"))
    if uncertainty(d):
        page.line()
        page.wrapped("", f"The change of latency is {uncertainty(d)}.", 0)


def metrics(d: Diff) -> list[tuple[str, ...]]:
    """A row a metric: old, new, and the change as an amount and a share."""
    rows: list[tuple[str, ...]] = []
    for name in METRICS:
        old, new = d.old.values[name], d.new.values[name]
        cells = amount(name, old), amount(name, new), difference(name, old, new), share(old, new)
        rows.append((name, *cells) if name != "opaque" else ("opaque nodes", *cells))
    return rows


def kinds(d: Diff) -> list[tuple[str, ...]]:
    """A row a kind of kernel, the largest change first."""
    times = sorted(d.kinds, key=lambda x: (-abs(x[2] - x[1]), x[0]))
    return [
        (name, quantity(a, "s"), quantity(b, "s"), difference("latency", a, b), share(a, b))
        for name, a, b in times
        if a or b
    ]


def _kinds(d: Diff, page: Page) -> None:
    if rows := kinds(d):
        page.line()
        columns = [("kernels", False), *((x, True) for x in ("old", "new", "change", ""))]
        page.table(columns, rows, drop=("change", "old"))


def _kernels(d: Diff, page: Page, top: int) -> None:
    found = d.changed
    page.line()
    if found[:top]:
        rows = [dict(zip(COLUMNS, row(g), strict=True)) for g in found[:top]]
        for x in rows:
            x["kernel"] = elided(x["kernel"], KERNEL_WIDTH)
        titles = list(COLUMNS)
        for title in ("kernel", "kernels", "what", "old", ""):  # the first to go, and on
            *others, layer = [max(len(t), *(len(x[t]) for x in rows)) for t in titles]
            room = page.width - sum(width + GAP for width in others)
            if room >= min(layer, LAYER_WIDTH) or not title:
                break
            titles.remove(title)
        cells = [[*(x[t] for t in titles[:-1]), elided(x["layer"], max(room, 8))] for x in rows]
        page.table([(t, t in ("change", "old", "new", "kernels")) for t in titles], cells)
    rest = found[top:]
    if rest:
        old, new = sum(g.old_s for g in rest), sum(g.new_s for g in rest)
        page.line(f"{len(rest):,} more, {difference('latency', old, new)}: see --top", "dim")
    for text in ("" if found else "no kernel differs", unchanged(d)):
        if text:
            page.line(text, "dim")


# ---------------------------------------------------------------------------- pull requests


def markdown(diffs: Sequence[Diff], checks: Sequence[Check], layout: Layout) -> str:
    """GitHub's Markdown: budgets and numbers in sight, kernels to unfold."""
    over = [c for c in checks if not c.is_kept]
    lines = ["## Predicted performance", ""]
    if checks:
        verdict = f"{len(over)} of {len(checks)} budgets exceeded" if over else "Within budget"
        lines += [f"**{verdict}**", ""]
        cells = [
            ("ok" if c.is_kept else "**over**", code(c.budget.text), code(c.diff.name), change(c))
            for c in checks
        ]
        lines += [*_grid(("", "budget", "run", "change"), cells), ""]
    for d in diffs:
        lines += [f"### {code(d.model)} on {code(d.name)}", ""]
        if not d.differs:
            lines += [f"Nothing differs: {amount('latency', d.new.values['latency'])}.", ""]
            continue
        lines += [*_grid(("", "old", "new", "change", ""), metrics(d)), ""]
        if uncertainty(d):
            lines += [f"The change of latency is {uncertainty(d)}.", ""]
        lines += [f"- {code(note)}" for note in d.notes] + [""] * bool(d.notes)
        lines += _unfolded(d, layout.top)
    return "\n".join(lines).rstrip() + "\n"


def _unfolded(d: Diff, top: int) -> list[str]:
    found = d.changed
    if not found:
        return []
    rows = [(*x[:-2], code(x[-2]), code(x[-1])) for x in map(row, found[:top])]
    more = [f"{len(found) - top:,} more"] if len(found) > top else []
    tail = ", ".join(filter(None, (*more, unchanged(d))))
    return [
        "<details>",
        f"<summary>Kernels that differ: {len(found):,}</summary>",
        "",
        *_grid(("kernels", "old", "new", "change", ""), kinds(d)),
        "",
        *_grid(COLUMNS, rows),
        *(("", tail) if tail else ()),
        "",
        "</details>",
        "",
    ]


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruled = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(cells)} |" for cells in ruled]


def code(text: str) -> str:
    """A name as it is, whatever it holds, inside a cell of a table."""
    plain = printable(text).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else ""


# ---------------------------------------------------------------------------- for programs


def json_text(diffs: Sequence[Diff], checks: Sequence[Check], _: Layout) -> str:
    """`{"schema": "gpuir.diff/1", "kept": true, "runs": [...]}`; fields: docs/guide/diff.md."""
    runs = [_record(d, [c for c in checks if c.diff is d]) for d in diffs]
    return structured.json_text(SCHEMA, kept=all(c.is_kept for c in checks), runs=runs)


def _record(d: Diff, checks: Sequence[Check]) -> dict[str, Any]:
    side = "model target profile batch interval_s nodes"
    return record(
        d,
        "overlap notes",
        old=record(d.old, side),
        new=record(d.new, side),
        metrics={n: {"old": d.old.values[n], "new": d.new.values[n]} for n in METRICS},
        kinds={name: {"old_s": old, "new_s": new} for name, old, new in d.kinds},
        kernels=[
            record(
                g,
                "status old_s new_s",
                what=g.one.what,
                count=len(g.changes),
                old=[c.old for c in g.changes],
                new=[c.new for c in g.changes],
            )
            for g in d.groups
        ],
        budgets=[
            record(c, "old new limit", budget=c.budget.text, metric=c.budget.metric, kept=c.is_kept)
            for c in checks
        ],
    )


def junit(diffs: Sequence[Diff], checks: Sequence[Check], _: Layout) -> str:
    """A test case a budget and run, as the JUnit schema of Ant has it (github.com/windyroad/
    JUnit-Schema): a failed one says by how much."""
    failed = str(sum(not c.is_kept for c in checks))
    counts = {"tests": str(len(checks)), "failures": failed, "errors": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "gpuir diff", **counts})
    for c in checks:
        named = {"classname": printable(c.diff.name), "name": printable(c.budget.text), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", named)
        if not c.is_kept:
            failure = {"message": f"{c.budget.metric} {change(c)}", "type": "budget"}
            ElementTree.SubElement(case, "failure", failure).text = kept(c)
    ElementTree.indent(suites, " ")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suites, "unicode")}\n'


FORMATS: dict[str, Format] = {
    "table": table,
    "markdown": markdown,
    "json": json_text,
    "junit": junit,
}
