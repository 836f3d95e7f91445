"""A comparison of reports, and what runs tests reads of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

from gpuir.backends.structured import record
from gpuir.backends.terminal import printable
from gpuir.report.diff import BudgetCheck, Diff, KernelChange
from gpuir.report.equal import pattern
from gpuir.report.saved import METRICS, SavedKernel
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import between, percent, quantity


def diff_report(diffs: Sequence[Diff], checks: Sequence[BudgetCheck], top: int = 15) -> Report:
    """Budgets, numbers of both, what kinds of kernels take, the kernels that differ. JSON is
    described in docs/guide/diff.md; programs have a row for each group of kernels."""
    return Report(
        "gpuir.diff/1",
        lambda: _parts(diffs, checks, top),
        lambda: {
            "kept": all(c.is_kept for c in checks),
            "runs": [_record(d, [c for c in checks if c.diff is d]) for d in diffs],
        },
    )


# ---------------------------------------------------------------------------- words


def amount(metric: str, value: float, digits: int = 4) -> str:
    """`8.45 ms`, `1,204`."""
    unit = METRICS[metric].unit
    return quantity(value, unit, digits) if unit else f"{value:,.0f}"


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
    """How sure it is that the change is one, beside the error of the predictions."""
    old, new = d.old.values["latency"], d.new.values["latency"]
    if old == new or d.slower is None:
        return ""
    word, odds = ("slower", d.slower) if new > old else ("faster", 1 - d.slower)
    ends = [between(run.interval_s) for run in (d.old, d.new)]
    return f"{word} in {percent(odds)} of cases: {ends[0]}, then {ends[1]} (80 %)"


def kept(check: BudgetCheck) -> str:
    """`latency=+3%  ok: 8.45 ms, of 8.70 ms at most`."""
    name = check.budget.metric
    verdict = "ok" if check.is_kept else "OVER"
    limit = amount(name, check.limit)
    return f"{verdict}: {amount(name, check.new)}, of {limit} at most ({change(check)})"


def change(check: BudgetCheck) -> str:
    name, old, new = check.budget.metric, check.old, check.new
    return f"{difference(name, old, new)}, {share(old, new)}"


def sides(c: KernelChange) -> str:
    """`gemm f16 b=1 m=8 n=64 k=64`, and what it was before an arrow where that is another; of
    several kernels only the kinds."""

    def text(entries: Sequence[SavedKernel]) -> str:
        whole = len(c.old) < 2 and len(c.new) < 2
        names = (f"{x.kind} {x.shape}".rstrip() if whole else x.kind for x in entries)
        return ", ".join(dict.fromkeys(names))

    return " → ".join(dict.fromkeys(filter(None, (text(c.old), text(c.new)))))


def unchanged(d: Diff) -> str:
    """What the list of kernels leaves out because it is as it was."""
    same = [g for g in d.groups if g.status == "same"]
    count, time_s = sum(len(g.changes) for g in same), sum(g.new_s for g in same)
    return f"{count:,} unchanged kernels: {quantity(time_s, 's')}" if same else ""


# ---------------------------------------------------------------------------- for people


def _parts(diffs: Sequence[Diff], checks: Sequence[BudgetCheck], top: int) -> Iterator[Part]:
    if checks:
        over = sum(not c.is_kept for c in checks)
        yield Heading(f"{over} of {len(checks)} budgets exceeded" if over else "within budget")
        run = Column("run", "", "diff.name", drop=1)
        yield Table(checks, (Column("budget", "", "budget.text"), run, Column("", text=kept)))
    if len(diffs) > 1:
        yield Heading(f"{diffs[0].model}: {len(diffs)} runs compared")
        yield _overview(diffs)
    for d in diffs:
        same = f"nothing differs: {amount('latency', d.new.values['latency'])}"
        yield Heading(f"{d.model} on {d.name}", "" if d.differs else same)
        if d.differs:
            yield from _changes(d, top)


def _overview(diffs: Sequence[Diff]) -> Table:
    def of(metric: str, text: Callable[[str, float, float], str]) -> Callable[[Diff], str]:
        return lambda d: text(metric, d.old.values[metric], d.new.values[metric])

    return Table(
        diffs,
        (
            Column("run", "", "name", least=16, elided=True),
            Column("old", "s", text=of("latency", lambda name, old, _: amount(name, old))),
            Column("new", "s", text=of("latency", lambda name, _, new: amount(name, new))),
            Column("change", "%", text=of("latency", lambda _, a, b: share(a, b)), drop=2),
            Column("launches", "count", text=of("launches", difference), drop=1),
        ),
    )


def _changes(d: Diff, top: int) -> Iterator[Part]:
    names = {name: name for name in METRICS} | {"opaque": "opaque nodes"}
    yield _sides("", [(names[x], x, d.old.values[x], d.new.values[x]) for x in METRICS])
    if text := uncertainty(d):
        yield Notes([("", f"The new run is {text}.")], 0)
    kinds = sorted(d.kinds, key=lambda x: (-abs(x[2] - x[1]), x[0]))
    if times := [(name, "latency", a, b) for name, a, b in kinds if a or b]:
        yield _sides("kernels", times, 3)
    yield _kernels(d, top)
    if d.notes:
        yield Notes([("" if i else "besides", note) for i, note in enumerate(d.notes)], 9)


def _sides(title: str, rows: Sequence[tuple[str, str, float, float]], digits: int = 4) -> Table:
    """A name, a metric, what it was and what it is, and the change as an amount and a share."""
    return Table(
        rows,
        (
            Column(title, text=lambda x: x[0]),
            Column("old", "s", text=lambda x: amount(x[1], x[2], digits), drop=2),
            Column("new", "s", text=lambda x: amount(x[1], x[3], digits)),
            Column("change", "s", text=lambda x: difference(x[1], x[2], x[3]), drop=1),
            Column("", "%", text=lambda x: share(x[2], x[3])),
        ),
    )


def _kernels(d: Diff, top: int) -> Table:
    rest = d.changed[top:]
    old, new = sum(g.old_s for g in rest), sum(g.new_s for g in rest)
    more = f"{len(rest):,} more, {difference('latency', old, new)}: see --top" if rest else ""
    none = "" if d.changed else "no kernel differs"
    return replace(
        _groups(d),
        rows=d.changed,
        top=top,
        more=tuple(filter(None, (more, none, unchanged(d)))),
        folded=f"Kernels that differ: {len(d.changed):,}",
    )


def _groups(d: Diff) -> Table:
    """All kernels, those of like changes together."""

    def took(kernels: Sequence[SavedKernel], time_s: float) -> str:
        return quantity(time_s, "s") if kernels else ""

    return Table(
        d.groups,
        (
            Column("change", "s", text=lambda g: difference("latency", g.old_s, g.new_s)),
            Column("old", "s", "old_s", text=lambda g: took(g.one.old, g.old_s), drop=4),
            Column("new", "s", "new_s", text=lambda g: took(g.one.new, g.new_s)),
            Column("kernels", "x", "count", lambda g: len(g.changes), drop=2),
            Column("what", text=lambda g: g.one.what or "time", drop=3),
            Column("kernel", "", "kernel", lambda g: sides(g.one), least=36, elided=True, drop=1),
            Column("layer", "", "layer", lambda g: pattern(g.names), least=24, elided=True),
            *fields("status"),
            *fields("what", "one"),
            Column(field="old", value=lambda g: [c.old for c in g.changes]),
            Column(field="new", value=lambda g: [c.new for c in g.changes]),
        ),
        {"model": d.model, "run": d.name},
    )


# ---------------------------------------------------------------------------- for programs


def _record(d: Diff, checks: Sequence[BudgetCheck]) -> dict[str, Any]:
    side = "model target profile batch interval_s nodes"
    return record(
        d,
        "slower notes",
        old=record(d.old, side),
        new=record(d.new, side),
        metrics={n: {"old": d.old.values[n], "new": d.new.values[n]} for n in METRICS},
        kinds={name: {"old_s": old, "new_s": new} for name, old, new in d.kinds},
        kernels=_groups(d),
        budgets=[
            record(c, "old new limit", budget=c.budget.text, metric=c.budget.metric, kept=c.is_kept)
            for c in checks
        ],
    )


def junit(checks: Sequence[BudgetCheck]) -> str:
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
