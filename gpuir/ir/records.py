"""Frozen records as text: a graph, a program, conditions, or whatever else they hold.

An object that occurs many times is written once: the text is a table in which an entry names those
before it by their places. Plain values stand first, each once, then the records. A class is found
by its name in one of our own modules that define records; nothing else can be made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, cast

from gpuir.ir.sizes import FIRST, Key, Size, each_size, value

FORM = 1  # of the text
ROOMS = ("gpuir.ir.", "gpuir.ops.", "gpuir.cost.", "gpuir.simulate.", "gpuir.plan.", "gpuir.run.")
PLAIN = frozenset((str, int, float, bool, type(None)))
APART = ("gpuir.ir.graph:Node", "gpuir.ir.graph:Graph")  # two that are equal stay two


class NotWritten(ValueError):
    """There is something that is no record of ours."""


def written(record: Any) -> str:
    """A record as text, from which `read` makes the same again. NotWritten where it holds something
    else than records, plain values, and tuples and mappings of them."""
    table = _Entries()
    last = table.place(record)
    count = len(table.plain)
    rows = [[row[0], *(_after(x, count) for x in row[1:])] for row in table.rows]
    whole = ([*table.kinds], [*table.plain.values()], rows, _after(last, count))
    return json.dumps(whole, separators=(",", ":"))


def _after(place: int, count: int) -> int:
    """The place of an entry in a text where records stand behind so many plain values."""
    return place if place >= 0 else count - 1 - place


def read(text: str, point: Mapping[str, int] | None = None) -> Any:
    """What `written` wrote; with a point, the numbers that sizes are there in their place. Any
    error of Python's where it is something else."""
    names, made, rows, last = json.loads(text)
    makers = [_maker(name) for name in names]
    if point is not None:
        made = [_numbered(x, point) for x in made]
        makers = [
            _number_at(point) if x == "size" else y for x, y in zip(names, makers, strict=True)
        ]
    at, add = made.__getitem__, made.append
    for kind, *row in rows:
        add(makers[kind](*map(at, row)))
    return made[last]


class _Entries:
    """Entries, each once, by what they are. Places of records are -1, -2 and so on."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.plain: dict[tuple[type, Any], Any] = {}
        self.places: dict[tuple[type, Any], int] = {}
        self.rows: list[tuple[int, ...]] = []
        self.equal: dict[tuple[int, ...], int] = {}
        self.known: dict[int, tuple[int, Any]] = {}  # by identity, with the object that has it

    def place(self, x: Any) -> int:
        kind = cast(Any, type(x))
        if kind in PLAIN:
            # 1, 1.0 and True are three, 0.0 and -0.0 two
            key = kind, repr(x) if kind is float else x
            place = self.places.get(key)
            if place is None:
                place = self.places[key] = len(self.places)
                self.plain[key] = x
            return place
        known = self.known.get(id(x))
        if known is None:
            known = self.known[id(x)] = self.record(kind, x), x
        return known[0]

    def record(self, kind: Any, x: Any) -> int:
        if kind is tuple:
            return self.row("()", x)
        if kind is Size:
            return self.row("size", (x.at, x.key))
        if kind in (dict, frozenset):
            rows = cast("dict[Any, Any]", x).items() if kind is dict else sorted(x)
            return self.row(kind.__name__, (tuple(rows),))
        if not _is_record(kind):
            if getattr(x, "shape", None) == ():  # a number of numpy's
                return self.place(x.item())
            raise NotWritten(f"{_name(kind)} is no record")
        return self.row(_name(kind), _values(kind)(x))

    def row(self, name: str, parts: Any) -> int:
        kind = self.kinds.setdefault(name, len(self.kinds))
        row = (kind, *map(self.place, parts))
        place = None if name in APART else self.equal.get(row)
        if place is None:
            self.rows.append(row)
            place = self.equal[row] = -len(self.rows)
        return place


@cache
def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _is_record(kind: type[Any]) -> bool:
    """Whether it is one of our own classes of records, all of whose fields are given in order."""
    if not kind.__module__.startswith(ROOMS) or "." in kind.__qualname__:
        return False
    if is_dataclass(kind):
        return all(f.init and not f.kw_only for f in fields(kind)) and _is_frozen(kind)
    named: Any = kind
    return issubclass(kind, Enum) or (issubclass(kind, tuple) and hasattr(named, "_fields"))


@cache
def _values(kind: type[Any]) -> Callable[[Any], Any]:
    """What gives the fields of a record, in order."""
    if issubclass(kind, Enum):
        return lambda x: (x.value,)
    if issubclass(kind, tuple):
        return tuple
    names = [f.name for f in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda x: [getattr(x, name) for name in names]


def _is_frozen(kind: Any) -> bool:
    return kind.__dataclass_params__.frozen


@cache
def _maker(name: str) -> Callable[..., Any]:
    if name in MAKERS:
        return MAKERS[name]
    module, _, own = name.partition(":")
    if not module.startswith(ROOMS):
        raise NotWritten(f"{name} is no record")
    kind = vars(import_module(module))[own]
    if not isinstance(kind, type) or kind.__module__ != module or not _is_record(kind):
        raise NotWritten(f"{name} is no record")
    return kind


def _tuple(*parts: Any) -> tuple[Any, ...]:
    return parts


def _size(at: Any, key: Key) -> Any:
    return Size(at, dict(key))


def _number_at(point: Mapping[str, int]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def number(at: Any, key: Key) -> Any:
        return value(_size(at, key), point, known)

    return number


def _numbered(x: Any, point: Mapping[str, int]) -> Any:
    """A plain value; a text with the numbers of sizes that stand in it."""
    return each_size(x, lambda n: value(n, point)) if type(x) is str and FIRST in x else x


MAKERS: Mapping[str, Callable[..., Any]] = {
    "()": _tuple,
    "size": _size,
    "dict": cast("Callable[..., Any]", dict),
    "frozenset": cast("Callable[..., Any]", frozenset),
}
