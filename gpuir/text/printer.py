"""Graphs and schedules as text that parses back to the same thing."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from itertools import groupby
from typing import Any, cast

from gpuir.ir.door import takes
from gpuir.ir.graph import GRAPH, Graph, Node, Op, Value
from gpuir.ir.notes import SCHEDULE, Schedule

PLAIN = re.compile(r"[\w.\-]+\Z", re.ASCII)
PLAIN_TARGET = re.compile(r"[A-Za-z_][\w.\-+]*\Z", re.ASCII)


@takes(thing=GRAPH | SCHEDULE)
def show(thing: Graph | Schedule) -> str:
    """The text of a graph or a schedule; `parse` and `parse_schedule` read it back."""
    if isinstance(thing, Schedule):
        return _schedule(thing)
    lines: list[str] = []
    _graph(thing, "", lines, _header(thing))
    return "\n".join(lines) + "\n"


@cache
def quoted(name: str) -> str:
    """A name as it stands after % or @: bare where it can be, else a JSON string."""
    return name if PLAIN.match(name) else _string(name)


def target_text(name: str) -> str:
    return name if PLAIN_TARGET.match(name) else _string(name)


def _string(text: str) -> str:
    """A JSON string: as it is where all of it can be seen, else in escapes."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _header(g: Graph) -> str:
    of = f" of {g.framework}" if g.framework is not None else ""
    target = f" for {target_text(g.target)}" if g.target is not None else ""
    on = f" on {target_text(g.cluster)}" if g.cluster is not None else ""
    under = f" under {target_text(g.profile)}" if g.profile is not None else ""
    return f"{g.level.name} @{quoted(g.name)}{of}{target}{on}{under} "


def _graph(g: Graph, indent: str, lines: list[str], before: str) -> None:
    """Appends the graph's lines, the first one opened by `before`. A region has no header: its
    level and target follow from the op it belongs to."""
    inner = indent + "  "
    lines.append(f"{indent}{before}{{")
    lines += [f"{inner}in %{quoted(v.name)}: {v.type}" for v in g.inputs]
    lines += [f"{inner}param %{quoted(v.name)}: {v.type}" for v in g.params]
    for node in g.nodes:
        _node(node, inner, lines)
    for role in dict.fromkeys(role for _, role in g.roles):
        names = ", ".join(f"%{quoted(name)}" for name, r in g.roles if r == role)
        lines.append(f"{inner}role {role} {names}")
    if g.mesh:
        lines.append(f"{inner}mesh {', '.join(f'{axis}={n}' for axis, n in g.mesh)}")
    for cut, cuts in groupby(g.cuts, key=lambda pair: pair[1]):
        names = ", ".join(f"%{quoted(name)}" for name, _ in cuts)
        parts = f"{list(cut.parts)} " if cut.parts else ""
        lines.append(f"{inner}cut {cut.group} {cut.axis} {parts}{names}")
    origins: dict[str, list[str]] = {}
    for loc, origin in g.origins:
        origins.setdefault(origin, []).append(_string(loc))
    for origin, locs in origins.items():
        lines.append(f"{inner}from {_string(origin)} at {', '.join(locs)}")
    if g.folded:
        lines.append(f"{inner}folded at {', '.join(map(_string, g.folded))}")
    lines += [f"{inner}assumed {_string(text)}" for text in g.assumed]
    over = g.over or (None,) * len(g.outputs)
    outputs = ", ".join(map(_output, g.outputs, over))
    lines.append(f"{inner}out {outputs}".rstrip())
    lines.append(f"{indent}}}")


def _output(value: Value, over: Value | None) -> str:
    taken = f" over %{quoted(over.name)}" if over is not None else ""
    return f"%{quoted(value.name)}{taken}"


@cache
def _layout(op: type[Op]) -> tuple[tuple[str, Any], ...]:
    """Field names with their defaults; MISSING for those that print by position."""
    return tuple((f.name, f.default) for f in dataclasses.fields(op))


def _node(node: Node, indent: str, lines: list[str]) -> None:
    results = ", ".join(f"%{quoted(v.name)}: {v.type}" for v in node.results)
    tail = ")"
    if node.tile is not None:
        tail += f" {node.tile}"
    if node.cost is not None:
        tail += f" {node.cost}"
    if node.locs:
        tail += f" at {', '.join(map(_string, node.locs))}"
    text = f"{results} = {node.op.name}("
    separator = ""
    for name, default in _layout(type(node.op)):
        value = getattr(node.op, name)
        if default is dataclasses.MISSING:
            label = ""
        elif value == default and type(value) is type(default):
            continue
        else:
            label = f"{name}="
        if isinstance(value, Graph):
            _graph(value, indent, lines, f"{text}{separator}{label}")
            text, separator = lines.pop()[len(indent) :], ", "
        else:
            text += f"{separator}{label}{_value(value)}"
            separator = ", "
    lines.append(f"{indent}{text}{tail}")


def _value(value: Any) -> str:
    if type(value) is Value:
        return f"%{quoted(value.name)}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, cast('tuple[Any, ...]', value)))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if value is None:
        return "none"
    return str(value)  # numbers, dtypes and types


def _schedule(schedule: Schedule) -> str:
    target = target_text(schedule.target)
    lines = [f"schedule @{quoted(schedule.name)} for {target} {{"]
    for path, tile in schedule:
        lines.append(f"  {'/'.join(f'%{quoted(name)}' for name in path)}: {tile}")
    return "\n".join([*lines, "}"]) + "\n"
