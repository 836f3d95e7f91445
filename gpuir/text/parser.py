"""Text to graphs and schedules. A lark tree never leaves this file."""

# pyright: basic

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken

from gpuir.ir.door import TEXT, takes
from gpuir.ir.errors import GpuirError, ModelError, UsageError, nearest
from gpuir.ir.graph import DEEPEST, Cut, Framework, Graph, Level, Node, Op, Role, Value
from gpuir.ir.notes import BY_DIMENSION, BY_OPERAND, Bound, Cost, Schedule, Tile
from gpuir.ir.types import DTYPES, TensorType, tf32
from gpuir.ops.vocabulary import find_op
from gpuir.text.place import TextPlace, check_length, error_at, number


@takes(text=TEXT, source=TEXT)
def parse(text: str, source: str = "<text>") -> Graph:
    """The graph that `text` states. Raises `TextError` with line and caret where it does not."""
    return _Build(text, source).graph(_tree("graph", text, source))


@takes(text=TEXT, source=TEXT)
def parse_schedule(text: str, source: str = "<text>") -> Schedule:
    """The schedule that `text` states, kernels by the path of their first results' names."""
    build = _Build(text, source)
    name, target, entries = _tree("schedule", text, source)
    tiles: dict[tuple[str, ...], Tile] = {}
    for path, tile in entries:
        key = tuple(build.name(token) for token in path)
        if key in tiles:
            build.fail(path[-1], f"the kernel {'/'.join(path)} has two tiles")
        tiles[key] = build.tile(tile)
    return Schedule(build.name(name), build.target(target), tuple(tiles.items()))


@cache
def _lark(start: str) -> Lark:
    return Lark(
        (Path(__file__).parent / "grammar.lark").read_text(),
        start=start,
        parser="lalr",
        transformer=_Plain(),
        maybe_placeholders=True,
    )


LARGEST_INT = 1 << 64


def _tree(start: str, text: str, source: str) -> Any:
    check_length(text, source)
    try:
        return _lark(start).parse(text)
    except UnexpectedEOF as e:
        at = TextPlace(text, source, len(text.splitlines()), 1)
        _unexpected(at, e.expected, "the end of the text")
    except UnexpectedToken as e:
        found = "the end of the text" if e.token.type == "$END" else repr(str(e.token))
        line = e.line if e.line and e.line > 0 else len(text.splitlines())
        at = TextPlace(text, source, line, max(e.column or 1, 1))
        _unexpected(at, e.accepts or e.expected, found)
    except UnexpectedCharacters as e:
        _unexpected(TextPlace(text, source, e.line, e.column), e.allowed or (), repr(e.char))
    except UnexpectedInput as e:
        _unexpected(TextPlace(text, source, e.line or 1, e.column or 1), (), "something else")


WORDS = {
    "VALUE": "%value",
    "GRAPH_NAME": "@name",
    "LEVEL": "graph|fused|kernel|tiled|costed",
    "TYPE": "a type, like f32[2, 3]",
    "INTS": "[1, 2]",
    "OP": "an op, like t.map",
    "TILE": "tile(...)",
    "COST": "cost(...)",
    "STRING": '"text"',
    "NUMBER": "a number",
    "NAME": "a name",
    "RBRACE": "}",
    "LBRACE": "{",
    "RPAR": ")",
    "LPAR": "(",
    "LSQB": "[",
    "RSQB": "]",
    "COMMA": ",",
    "COLON": ":",
    "EQUAL": "=",
    "SLASH": "/",
    "$END": "the end",
}


def _unexpected(at: TextPlace, want: Any, found: str) -> NoReturn:
    expected = sorted({str(WORDS.get(w, w.lower())) for w in want if not w.startswith("__IGNORE")})
    raise error_at(at, f"unexpected {found}", " or ".join(expected[:8]))


@v_args(inline=True)
class _Plain(Transformer[Token, Any]):
    """Trees as plain tuples, made while parsing."""

    def graph(self, level, name, framework, target, cluster, profile, *items):
        return level, name, framework, target, cluster, profile, items

    def region(self, *items):
        return "region", items

    def target(self, token):
        return token

    def input(self, name, type):
        return "in", name, type

    def param(self, name, type):
        return "param", name, type

    def node(self, results, op, args, *rest):
        return "node", results, op, args, rest

    def origin(self, text, locs):
        return "origin", text, locs

    def folded(self, texts):
        return "folded", texts

    def assumed(self, texts):
        return "assumed", texts

    def role(self, role, values):
        return "role", role, values

    def mesh(self, axes):
        return "mesh", axes

    def axes(self, *axes):
        return axes

    def axis(self, name, ranks):
        return name, ranks

    def cut(self, group, axis, parts, values):
        return "cut", group, axis, parts, values

    def out(self, outputs):
        return "out", outputs or ()

    def outputs(self, *outputs):
        return outputs

    def output(self, value, over):
        return value, over

    def results(self, *pairs):
        return pairs

    def result(self, name, type):
        return name, type

    def values(self, *tokens):
        return tokens

    def strings(self, *tokens):
        return tokens

    def args(self, *values):
        return () if values == (None,) else values

    def keyword(self, name, value):
        return "keyword", name, value

    def list(self, *values):
        return ("list", () if values == (None,) else values)

    def schedule(self, name, target, *entries):
        return name, target, entries

    def entry(self, path, tile):
        return path, tile

    def path(self, *names):
        return names


@lru_cache(maxsize=65536)
def _type(text: str) -> TensorType | None:
    head, _, rest = text.partition("[")
    shape, _, order = rest.partition("]")
    if head not in DTYPES:
        return None
    ints = tuple(int(n) for n in shape.split(",")) if shape.strip() else ()
    if not order:
        return TensorType(ints, DTYPES[head])
    axes = tuple(int(n) for n in order.strip("{}").split(",")) if order.strip("{} ") else ()
    if sorted(axes) != list(range(len(ints))):
        return None
    return TensorType(ints, DTYPES[head], axes)


NATURAL = re.compile(r"[1-9][0-9]{0,9}\Z")
NOTE = re.compile(r'\s*(\w+)\s*=\s*("[^"]*"|[^\s,;"]+)\s*(?:([,;])|$)')
TILE_OPTIONS = {"stages", "warps", "split", "group", "unroll"}


@dataclasses.dataclass(frozen=True)
class _Wrong:
    """Why a token is not what it should be, and from which of its characters on."""

    what: str
    at: int = 0


@lru_cache(maxsize=65536)
def _tile(text: str) -> Tile | _Wrong:
    """A tile, or why the text is not one."""
    dims, _, options = text[5:-1].partition(";")
    found: dict[str, int] = {}
    places: dict[str, int] = {}
    names: list[str] = []
    at = 5
    for part, is_dim in (
        *((p, True) for p in dims.split(",")),
        *((p, False) for p in options.split(",")),
    ):
        begin, at = at + len(part) - len(part.lstrip()), at + len(part) + 1
        if not part.strip():
            continue
        key, _, number = (s.strip() for s in part.partition("="))
        option, dot, of = key.partition(".")
        if not NATURAL.match(number) or not (option + of).isidentifier():
            return _Wrong(f"{part.strip()!r} has another form than m=64", begin)
        if key in found:
            return _Wrong(f"{key} is given twice", begin)
        if dot and (is_dim or not _is_part(option, of)):
            return _Wrong(f"{key!r} has another form than threads.m or direct.0", begin)
        found[key], places[key] = int(number), begin
        names += [key] if is_dim else []
    dims_found = tuple((n, found[n]) for n in names)
    parts = {k: n for k, n in found.items() if "." in k}
    if unknown := set(found) - set(names) - TILE_OPTIONS - set(parts):
        known, first = ", ".join(sorted(TILE_OPTIONS)), min(unknown)
        return _Wrong(
            f"{first!r} is not a tile option: {known} follow the semicolon", places[first]
        )
    if swapped := set(names) & TILE_OPTIONS:
        first = min(swapped)
        what = f"{first} goes after the semicolon: tile(m=64; {first}=2)"
        return _Wrong(what, places[first])
    given: dict[str, Any] = {k: v for k, v in found.items() if k in TILE_OPTIONS}
    given |= {name: _parts(name, parts, str) for name in BY_DIMENSION}
    given |= {name: _parts(name, parts, int) for name in BY_OPERAND}
    return Tile(dims_found, **given)


def _is_part(option: str, of: str) -> bool:
    if option in BY_DIMENSION:
        return of.isidentifier()
    return option in BY_OPERAND and of.isdecimal()


def _parts(name: str, parts: dict[str, int], key: Callable[[str], Any]) -> tuple[Any, ...]:
    return tuple(
        (key(k.partition(".")[2]), n) for k, n in parts.items() if k.startswith(f"{name}.")
    )


COST_HEAD = ("time_s", "bound", "by", "low_s", "high_s", "unseen")


def _cost(text: str) -> Cost | _Wrong:
    """A cost, or why the text is not one."""
    known: dict[str, Any] = {}
    terms: list[tuple[Any, float]] = []
    facts: list[tuple[str, float]] = []
    body, at, after = text[5:-1], 0, ","
    rest: list[Any] = terms
    while at < len(body):
        m = NOTE.match(body, at)
        if m is None:
            what = (
                "the cost has another form than cost(time_s=1e-6, bound=memory, "
                'by="roofline@1", memory=1e-6)'
            )
            return _Wrong(what, 5 + at + len(body[at:]) - len(body[at:].lstrip()))
        key, value, begin = m[1], m[2], 5 + m.start(1)
        try:
            if rest is terms and key in COST_HEAD:
                if key in known:
                    return _Wrong(f"{key} is given twice", begin)
                known[key] = float(value) if key.endswith("_s") else value.strip('"')
            else:
                given = number(value)
                rest.append((key, given if abs(given) < LARGEST_INT else float(value)))
        except ValueError:
            return _Wrong(f"{key} is not a number", begin)
        at, after = m.end(), m[3] or ","
        if after == ";":
            rest = facts
    if missing := {"time_s", "bound", "by"} - set(known):
        return _Wrong(f"{', '.join(sorted(missing))} missing")
    if known["bound"] not in get_args(Bound):
        return _Wrong(
            f"bound must be {', '.join(get_args(Bound)[:-1])} or {get_args(Bound)[-1]}",
            text.index("bound"),
        )
    interval: Any = tuple(known[end] for end in ("low_s", "high_s") if end in known)
    if len(interval) == 1:
        return _Wrong(
            "low_s and high_s must be given together",
            text.index("low_s" if "low_s" in known else "high_s"),
        )
    return Cost(
        known["time_s"],
        known["bound"],
        known["by"],
        terms=tuple(terms),
        facts=tuple(facts),
        interval=interval or None,
        unseen=tuple(known.get("unseen", "").split()),
    )


@cache
def _fields(op: type[Op]) -> tuple[tuple[str, ...], frozenset[str]]:
    fields = dataclasses.fields(op)
    needed = (f.name for f in fields if f.default is dataclasses.MISSING)
    return tuple(f.name for f in fields), frozenset(needed)


Check = Callable[[Any], bool]


def _check_of(hint: Any) -> Check:
    """Whether a value is of an annotated type. Whole numbers are floats too, booleans neither."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return lambda value: type(value) is str and value in parts
    if origin in (Union, UnionType):
        checks = [_check_of(part) for part in parts]
        return lambda value: any(check(value) for check in checks)
    if origin is tuple and parts[-1] is ...:
        each = _check_of(parts[0])
        return lambda value: type(value) is tuple and all(map(each, value))
    if origin is tuple:
        checks = [_check_of(part) for part in parts]
        return lambda value: (
            type(value) is tuple
            and len(value) == len(checks)
            and all(check(item) for check, item in zip(checks, value, strict=True))
        )
    if hint is float:
        return lambda value: type(value) in (int, float)
    kind = NoneType if hint is None else hint
    return lambda value: type(value) is kind


@cache
def _checks(op: type[Op]) -> dict[str, Check]:
    hints = get_type_hints(op)
    return {f.name: _check_of(hints[f.name]) for f in dataclasses.fields(op)}


class _Build:
    """From tuples to frozen graphs, with a caret under whatever is wrong."""

    def __init__(self, text: str, source: str):
        self.text, self.source = text, source
        self.depth = -1  # of regions inside one another

    def fail(
        self, token: Token, what: str, expected: str = "", fix: str = "", at: int = 0
    ) -> NoReturn:
        """With the caret under the token, or under one of its characters."""
        before = str(token)[:at]
        line = (token.line or 1) + before.count("\n")
        column = len(before) - before.rfind("\n") if "\n" in before else (token.column or 1) + at
        raise error_at(TextPlace(self.text, self.source, line, column), what, expected, fix)

    def string(self, token: Token) -> str:
        try:
            return json.loads(str(token))
        except ValueError:
            self.fail(token, "the string has a character or an escape that JSON does not know")

    def name(self, token: Token) -> str:
        text = str(token)[1:]
        if not text.startswith('"'):
            return text
        try:
            return json.loads(text)
        except ValueError:
            self.fail(token, "the name has a character or an escape that JSON does not know")

    def target(self, token: Token) -> str:
        return self.string(token) if token.type == "STRING" else str(token)

    def type(self, token: Token) -> TensorType:
        try:
            found = _type(str(token))
        except ModelError as error:
            self.fail(token, error.what, error.expected)
        if found is None:
            head = str(token).partition("[")[0]
            if head in DTYPES:
                self.fail(token, "the order is not a permutation of the axes")
            self.fail(token, f"no dtype {head!r}", nearest(head, DTYPES))
        return found

    def tile(self, token: Token) -> Tile:
        found = _tile(str(token))
        if isinstance(found, _Wrong):
            expected = "tile(m=64, n=64, k=32; stages=2, warps=4, split=1)"
            self.fail(token, found.what, expected, at=found.at)
        return found

    def graph(self, tree: Any) -> Graph:
        level, name, framework, target, cluster, profile, items = tree
        graph = self.items(
            items,
            name,
            Level[str(level)],
            self.name(name),
            None if target is None else self.target(target),
        )
        return replace(
            graph,
            framework=framework and self.one_of(framework, "framework", get_args(Framework)),
            cluster=cluster and self.target(cluster),
            profile=profile and self.target(profile),
        )

    def one_of(self, token: Token, what: str, known: tuple[str, ...]) -> Any:
        if token not in known:
            self.fail(token, f"no {what} {str(token)!r}", ", ".join(known))
        return str(token)

    def items(
        self, items: Any, at: Token, level: Level, name: str = "", target: str | None = None
    ) -> Graph:
        """A graph or region from its lines; `at` is where to point when a line is missing."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(at, "regions are nested too deep", f"at most {DEEPEST} inside one another")
        values: dict[str, Value] = {}
        found: dict[str, list[Any]] = {
            "in": [],
            "param": [],
            "node": [],
            "origin": [],
            "folded": [],
            "assumed": [],
        }
        outputs: list[Value] | None = None
        over: list[Value | None] = []
        roles: dict[str, Any] = {}
        mesh: dict[str, int] = {}
        cuts: list[tuple[str, Cut]] = []
        for item in items:
            kind = item[0]
            if outputs is not None:
                self.fail(_first(item[1:]) or at, "there is text after `out`")
            if kind == "node":
                found[kind].append(self.node(item, values, level, target))
            elif kind == "out":
                outputs = [self.value(token, values) for token, _ in item[1]]
                over = [o and self.value(o, values) for _, o in item[1]]
            elif kind == "role":
                self.role(item, values, roles)
            elif kind == "mesh":
                mesh.update((str(a), self.count(n, str(n))) for a, n in item[1])
            elif kind == "cut":
                self.cut(item, values, mesh, cuts)
            elif kind == "origin":
                text = self.string(item[1])
                found[kind] += [(self.string(token), text) for token in item[2]]
            elif kind in ("folded", "assumed"):
                found[kind] += [self.string(token) for token in item[1]]
            else:
                found[kind].append(self.define(item[1], self.type(item[2]), values))
        self.depth -= 1
        if outputs is None:
            self.fail(at, "there is no `out` line", "out %a, %b as the last line")
        return Graph(
            level=level,
            name=name,
            inputs=tuple(found["in"]),
            params=tuple(found["param"]),
            nodes=tuple(found["node"]),
            outputs=tuple(outputs),
            folded=tuple(found["folded"]),
            assumed=tuple(found["assumed"]),
            target=target,
            over=tuple(over) if any(over) else (),
            roles=tuple(roles.items()),
            origins=tuple(found["origin"]),
            mesh=tuple(mesh.items()),
            cuts=tuple(cuts),
        )

    def cut(
        self,
        item: Any,
        values: dict[str, Value],
        mesh: dict[str, int],
        cuts: list[tuple[str, Cut]],
    ) -> None:
        """Adds the cuts that a line gives."""
        _, group, axis, parts, tokens = item
        group = self.one_of(group, "axis of the mesh", tuple(mesh))
        extents = tuple(self.count(parts, x) for x in parts.strip("[]").split(",")) if parts else ()
        cut = Cut(group, self.count(axis, str(axis)), extents)
        cuts += [(self.value(token, values).name, cut) for token in tokens]

    def role(self, item: Any, values: dict[str, Value], roles: dict[str, Any]) -> None:
        """Adds the roles that a line gives."""
        _, role, tokens = item
        role = self.one_of(role, "role", get_args(Role))
        for token in tokens:
            name = self.value(token, values).name
            if name in roles:
                self.fail(token, f"{token} has two roles")
            roles[name] = role

    def define(self, token: Token, type: TensorType, values: dict[str, Value]) -> Value:
        name = self.name(token)
        if name in values:
            self.fail(token, f"{token} is defined twice")
        value = values[name] = Value(name, type)
        return value

    def value(self, token: Token, values: dict[str, Value]) -> Value:
        value = values.get(self.name(token))
        if value is None:
            self.fail(
                token, f"{token} is used before it is defined", nearest(self.name(token), values)
            )
        return value

    def node(self, tree: Any, values: dict[str, Value], level: Level, target: str | None) -> Node:
        _, results, token, args, notes = tree
        op = self.op(token, args, values, level, target)
        given = tuple(self.type(t) for _, t in results)
        if op.result_types != given:
            self.fail(
                results[0][0],
                "the result types are not the ones that the op computes",
                ", ".join(map(str, op.result_types)),
            )
        locs, tile, cost = self.notes(notes)
        defined = tuple(
            self.define(name, type, values) for (name, _), type in zip(results, given, strict=True)
        )
        return Node(op, defined, locs, tile, cost)

    def op(
        self, token: Token, args: Any, values: dict[str, Value], level: Level, target: str | None
    ) -> Op:
        """The op named by `token`, each of its fields held to its type."""
        try:
            kind = find_op(str(token))
        except UsageError as error:
            self.fail(token, f"no op {token}", error.fix)
        names, needed = _fields(kind)
        fields: dict[str, Any] = {}

        def read(arg: Any) -> Any:
            if type(arg) is tuple and arg[0] == "region":
                if kind.control:
                    return self.items(arg[1], token, level, target=target)
                return self.items(arg[1], token, Level.graph)
            return self.attribute(arg, values, token)

        for i, arg in enumerate(args):
            if type(arg) is tuple and arg[0] == "keyword":
                key = str(arg[1])
                if key not in names or key in fields:
                    what = "is given twice" if key in fields else f"is not a field of {token}"
                    self.fail(arg[1], f"{key} {what}", ", ".join(names))
                fields[key] = read(arg[2])
            elif i < len(names) and len(fields) == i:
                fields[names[i]] = read(arg)
            else:
                self.fail(token, f"{token} has too many arguments", ", ".join(names))
        if missing := needed - set(fields):
            lacks = ", ".join(n for n in names if n in missing)
            self.fail(token, f"{token} lacks {lacks}", f"{token}({', '.join(names)})")
        for name, value in fields.items():
            if not _checks(kind)[name](value):
                hint = next(f.type for f in dataclasses.fields(kind) if f.name == name)
                self.fail(token, f"{token}: {name} has the wrong type", str(hint))
        try:
            op = kind(**fields)
            _ = op.result_types
        except GpuirError as e:
            found = f"; found {e.found}" if e.found else ""
            self.fail(token, e.what + found, e.expected, e.fix)
        except (ValueError, IndexError):  # tuples of unequal lengths, or empty
            self.fail(token, f"the arguments do not fit {token}", _signature(kind))
        return op

    def notes(self, notes: Any) -> tuple[tuple[str, ...], Tile | None, Cost | None]:
        """What stands behind an op: its locations, tile and cost."""
        locs: tuple[str, ...] = ()
        tile = cost = None
        for note in notes:
            if note is None:
                continue
            if type(note) is tuple:
                locs = tuple(self.string(token) for token in note)
            elif note.type == "TILE":
                tile = self.tile(note)
            else:
                cost = _cost(str(note))
                if isinstance(cost, _Wrong):
                    self.fail(note, cost.what, at=cost.at)
        return locs, tile, cost

    def count(self, token: Token, text: str) -> int:
        if not text.strip().isdecimal():
            self.fail(token, f"not a count: {text}", "a whole number of 0 or more")
        return self.integer(token, text)

    def integer(self, token: Token, text: str) -> int:
        number = int(text)
        if abs(number) >= LARGEST_INT:
            self.fail(token, "the integer is too large", "an integer of 64 bits")
        return number

    def attribute(self, tree: Any, values: dict[str, Value], at: Token, depth: int = 0) -> Any:
        """A field's value; `at` is the op, to point at where a list holds what it cannot."""
        if type(tree) is tuple:
            if tree[0] != "list" or depth == DEEPEST:
                self.fail(
                    at, "a list can hold values, numbers, words and lists of these", "[%a, %b]"
                )
            return tuple(self.attribute(item, values, at, depth + 1) for item in tree[1])
        kind, text = tree.type, str(tree)
        if kind == "VALUE":
            return self.value(tree, values)
        if kind == "INTS":
            return tuple(self.integer(tree, n) for n in text[1:-1].split(","))
        if kind == "NUMBER":
            given = number(text)
            return given if isinstance(given, float) else self.integer(tree, text)
        if kind == "STRING":
            return self.string(tree)
        if kind == "TYPE":
            return self.type(tree)
        if text in ("true", "false", "none"):
            return {"true": True, "false": False, "none": None}[text]
        if text in DTYPES or text == tf32.name:
            return DTYPES.get(text, tf32)
        self.fail(
            tree, f"{text!r} is not a value", "true, false, none, a data type, or text in quotes"
        )


def _first(tree: Any) -> Token | None:
    """The first token in a tree, for the caret."""
    if isinstance(tree, Token):
        return tree
    if not isinstance(tree, tuple):
        return None
    return next((token for part in tree if (token := _first(part))), None)


def _signature(kind: type[Op]) -> str:
    return f"{kind.name}({', '.join(f'{f.name}: {f.type}' for f in dataclasses.fields(kind))})"
