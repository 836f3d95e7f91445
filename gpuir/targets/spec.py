"""Spec files: TOML in SI units, each number with its source, perhaps laid over a base's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from decimal import Decimal
from functools import cache
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from gpuir.files import read_toml
from gpuir.ir.errors import PluginError, TargetError, nearest
from gpuir.plugins import blamed, load_point, place
from gpuir.targets.target import FrozenTable, Sourced, Spec, source_of, specs, walk

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Raw = dict[str, Any]
SI = "values are in SI units: Hz, bytes, bytes/s, flop/s, s, W"
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*(?:@[a-z0-9][a-z0-9.-]*)?")  # and a version
_NOTES = ("sources", "discrepancies")


# ---- names ------------------------------------------------------------------------------------


def spec_folder() -> Path:
    """`specs/` inside the installed package, else beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "specs"
    return inside if inside.exists() else package.parent / "specs"


@cache
def spec_files(*folders: str) -> Mapping[str, Path]:
    """The files in folders of `specs/`, by their names and sorted by their paths."""
    root = spec_folder()
    paths = sorted(path for folder in folders for path in (root / folder).glob("*.toml"))
    return {path.stem: path for path in paths}


def is_path(name: str) -> bool:
    """Whether a name is that of a file, not of something we know."""
    return name.endswith(".toml") or "/" in name or "\\" in name


def slug(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` → `nvidia-h100-80gb-hbm3`: what a driver calls a GPU, as a name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def check_name(name: str, what: str, where: str, path: str = "name") -> None:
    """TargetError for a name that a target or profile cannot have."""
    if not _NAME.fullmatch(name):
        refuse(
            f"{name!r} cannot be the name of a {what}",
            where,
            path,
            expected="lower-case letters, digits, `-` and `.`; a version behind an `@`",
            fix=f"write {slug(name) or f'my-{what}'}",
        )


def unknown(what: str, name: str, names: Iterable[str]) -> TargetError:
    """That no target, or profile, has this name."""
    if os.path.isfile(f"{name}.toml"):
        return TargetError(f"no {what} is called {name!r}", fix=f"for the file, write {name}.toml")
    close = nearest(slug(name), names)
    known = close if close.startswith("did") else f"`gpuir {what}s` lists the names"
    return TargetError(
        f"no {what} is called {name!r}",
        fix=f"{known}\nor give the path of your own .toml file",
    )


def plugin_path(point: EntryPoint, what: str) -> Path:
    """An entry point of a target or profile is a path, or a function that gives one. PluginError
    where it is neither, or fails."""
    found = load_point(point, what)
    if callable(found):
        with blamed(found, f"the {what} {point.name!r}"):
            found = found()
    if not isinstance(found, str | Path):
        raise PluginError(
            f"the {what} {point.name!r} is not a spec file",
            where=place(point),
            expected="a path, or a function that returns a path",
            found=repr(found),
            fix="upgrade or uninstall the package that declares it",
        )
    return Path(found)


# ---- text -------------------------------------------------------------------------------------


def read_spec(path: Path) -> Raw:
    """The tables of a spec file, unchecked; TargetError when it cannot be read or is not TOML."""
    fix = "check the path; gpuir looks up a name only if it has neither `.toml` nor `/`"
    return read_toml(path, "the spec file", TargetError, fix)


@dataclass(frozen=True)
class SpecKind:
    """A kind of spec files: `what` they describe, one that is shipped as an `example`, the folders
    of those that are, what a whole file's tables are read as, and how one is found by its name
    where that is not a path or the name of a shipped one. A name may be that of a part (`divided`
    gives the whole's and the part), which `cut` makes of the whole. `tables` is what one file says
    by itself."""

    what: str
    example: str
    folders: tuple[str, ...]
    read: Callable[[Raw, str], Sourced]
    find: Callable[[str], Path] | None = None
    divided: Callable[[str], tuple[str, str]] = lambda name: (name, "")
    cut: Callable[[Raw, str, str], Raw] = lambda raw, part, where: raw
    tables: Callable[[Path], Raw] = read_spec

    @property
    def shipped(self) -> Mapping[str, Path]:
        """The files that come with gpuir, by name."""
        return spec_files(*self.folders)

    def is_shipped(self, path: Path) -> bool:
        return path in self.shipped.values()

    def path_of(self, name: str) -> Path:
        """The file of a name; TargetError where nothing has it."""
        if self.find is not None:
            return self.find(name)
        if is_path(name):
            return Path(name)
        if name not in self.shipped:
            raise unknown(self.what, name, self.shipped)
        return self.shipped[name]

    def load(self, name: str) -> Sourced:
        """What the file of a name says, over its bases; of a shipped one it is read once."""
        path = self.path_of(name)
        return _shipped(self, path) if self.is_shipped(path) else _read(self, path)


@cache
def _shipped(kind: SpecKind, path: Path) -> Sourced:
    return _read(kind, path)


def _read(kind: SpecKind, path: Path) -> Sourced:
    return kind.read(on_base(kind.tables(path), path, kind), str(path))


MOST_BASES = 32  # on one another


def on_base(raw: Raw, path: Path, kind: SpecKind, above: tuple[str, ...] = ()) -> Raw:
    """The tables of the spec file at `path`, those of its `base` under them where it names one.

    A number that the file gives counts in place of the base's and needs a source of its own: one of
    the base is of its own number alone. `base` becomes the shipped one that all this starts from.
    """
    name, where = raw.get("base"), str(path)
    if name is None:
        return raw
    if not isinstance(name, str):
        fix = f'write base = "{kind.example}"'
        refuse("the base must be text", where, "base", found=shown(name), fix=fix)
    whole, part = kind.divided(name)
    try:
        file = kind.path_of(whole)
    except TargetError as error:
        error.where = error.where or f"{where}:base"
        raise
    file = path.parent / file if is_path(whole) else file
    if len(above) == MOST_BASES:
        expected, fix = f"at most {MOST_BASES}", "use one of the lower ones as the base"
        refuse("there are too many levels of bases", where, "base", expected=expected, fix=fix)
    if realpath(file) in (realpath(path), *above):
        what = f"a {kind.what} cannot be its own base"
        refuse(what, where, "base", found=name, fix="name another")
    below = on_base(kind.tables(file), file, kind, (realpath(path), *above))
    below = kind.cut(below, part, str(file))
    found = kind.read(below, str(file))  # what is wrong there is not blamed on this file
    given = {path for path, _ in leaves(raw)}
    numbers = (path for path, quantity, _ in walk(found) if quantity)
    old = {
        "sources": {path: found.source(path) for path in numbers},
        "discrepancies": paths_to_text(below, "discrepancies", str(file)),
    }
    own = {table: paths_to_text(raw, table, where) for table in _NOTES}
    notes = {t: {p: x for p, x in old[t].items() if p not in given} | own[t] for t in _NOTES}
    bare = {name: x for name, x in below.items() if name not in ("aliases", "notes", *_NOTES)}
    base = file.stem if kind.is_shipped(file) else found.base
    return {**_over(bare, raw), **{t: x for t, x in notes.items() if x}, "base": base}


def _over(below: Raw, above: Raw) -> Raw:
    """Tables with those of another file over them, field by field."""
    both = dict(below)
    for name, value in above.items():
        old = below.get(name)
        both[name] = (
            _over(cast(Raw, old), cast(Raw, value))
            if isinstance(value, dict) and isinstance(old, dict)
            else value
        )
    return both


def leaves(raw: Raw, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a file by its dotted path; not its sources and discrepancies."""
    for name, value in raw.items():
        if isinstance(value, dict):
            if prefix or name not in _NOTES:
                yield from leaves(cast(Raw, value), prefix + name + ".")
        else:
            yield prefix + name, value


def key_text(name: str) -> str:
    """A name as a key: bare where it can be, else quoted."""
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else quoted(name)


def quoted(text: str) -> str:
    """Text as TOML has it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def remark(text: str) -> str:
    """A comment line of TOML, which ends where the line does."""
    return "# " + "".join(c if c.isprintable() else "?" for c in text)


def number_text(value: float) -> str:
    """A number that reads back exactly, its exponent a multiple of three: `1.555e12`, `400`."""
    if isinstance(value, int) or 1 <= abs(value) < 1e4:
        return str(value).removesuffix(".0")
    number = Decimal(repr(value)).normalize()
    power = 3 * (number.adjusted() // 3) if number else 0
    return f"{number.scaleb(-power):f}e{power}" if power else f"{number:f}"


# ---- values -----------------------------------------------------------------------------------


def record(cls: type[Any], raw: Raw, prefix: str, where: str) -> Any:
    """A frozen dataclass from a table of a spec file, by its annotations; TargetError at the first
    field that is unknown, missing or out of range."""
    known = specs(cls)
    for name in raw:
        if name not in known:
            refuse(
                f"no such field: {prefix}{name}",
                where,
                prefix + name,
                fix=nearest(name, [k for k in known if k not in _NOTES]),
            )
    values: Raw = {}
    for name, spec in known.items():
        path = prefix + name
        if name in raw:
            values[name] = _value(spec, raw[name], path, where)
        elif spec.required:
            refuse(
                f"{path} is missing",
                where,
                path,
                expected=_expected(spec),
                fix=f"add {path}, with its source under [sources]",
            )
    return cls(**values)


def _value(spec: Spec, value: Any, path: str, where: str) -> Any:
    holds = spec.holds
    if isinstance(value, FrozenTable):
        return cast(Any, value)
    if is_dataclass(holds) or holds is FrozenTable:
        if not isinstance(value, dict):
            refuse(f"{path} is a table", where, path, found=shown(value), fix=f"write [{path}]")
        inner = cast(Raw, value)
        if is_dataclass(holds):
            return record(cast(type[Any], holds), inner, path + ".", where)
        if spec.quantity is None:
            text = Spec(str, None, False)
            return FrozenTable({k: _value(text, v, f"{path}.{k}", where) for k, v in inner.items()})
        rate = Spec(float, spec.quantity, False)
        return FrozenTable({k: checked(rate, v, f"{path}.{k}", where) for k, v in inner.items()})
    if spec.quantity:
        return checked(spec, value, path, where)
    if holds is tuple:
        if not isinstance(value, list) or not all(isinstance(v, str) for v in cast(Any, value)):
            refuse(
                f"{path} must be a list of text",
                where,
                path,
                found=shown(value),
                fix=f'write {path} = ["a", "b"]',
            )
        return tuple(cast(list[str], value))
    if type(value) is not holds:
        refuse(
            f"{path} is not {_KINDS[holds]}",
            where,
            path,
            expected=_KINDS[holds],
            found=shown(value),
            fix="write " + {str: f'{path} = "..."', bool: f"{path} = true or false"}[holds],
        )
    return value


_KINDS: dict[Any, str] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number"
}  # fmt: skip


def checked(spec: Spec, value: Any, path: str, where: str) -> float:
    """The value of a field that holds a number; TargetError where it cannot be."""
    quantity = spec.quantity
    assert quantity
    if isinstance(value, bool) or not isinstance(value, int | float):
        what, fix = "is not a number", "write a plain number in SI units, without quotes or a unit"
    elif not quantity.low <= value <= quantity.high:  # also true of NaN
        what = "is out of range"
        fix = SI if quantity.unit and value > 0 else "look the number up again"
    elif spec.holds is int and value != int(value):
        what, fix = "is not a whole number", "round it"
    else:
        what = fix = ""
    if what:
        expected, found = _expected(spec), shown(value)
        refuse(f"{path} {what}", where, path, expected=expected, found=found, fix=fix)
    return spec.holds(value)


def _expected(spec: Spec) -> str:
    if spec.quantity is None:
        return "a table" if is_dataclass(spec.holds) else _KINDS.get(spec.holds, "text")
    low, high = number_text(spec.quantity.low), number_text(spec.quantity.high)
    unit = f" {spec.quantity.unit}" if spec.quantity.unit else ""
    return f"{_KINDS[spec.holds]} from {low} to {high}{unit}"


def shown(value: Any) -> str:
    """A value as an error shows it, not at any length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number that is far too large"
    return text if len(text) <= 60 else text[:57] + "..."


def refuse(
    what: str, where: str, path: str = "", *, expected: str = "", found: str = "", fix: str
) -> NoReturn:
    """TargetError at a field of a spec file."""
    at = f"{where}:{path}" if path else where
    raise TargetError(what, where=at, expected=expected, found=found, fix=fix)


def paths_to_text(raw: Raw, table: str, where: str) -> dict[str, str]:
    """Sources or discrepancies: `"sms, dram" = "text"` → one entry a path."""
    found: dict[str, str] = {}
    entries = raw.get(table, {})
    if not isinstance(entries, dict):
        refuse(f"{table} is a table", where, table, found=shown(entries), fix=f"write [{table}]")
    for key, text in cast(Raw, entries).items():
        if not isinstance(text, str) or not text.strip():
            refuse(
                f"the {table[:-1]} of {key} must be text",
                where,
                f"{table}.{key}",
                found=shown(text),
                fix=f'quote the path: "{key}.{next(iter(cast(Raw, text)), "")}" = "..."'
                if isinstance(text, dict)
                else "write the name of a document, or `assumed: why`",
            )
        for path in map(str.strip, key.split(",")):
            if path in found:
                refuse(
                    f"[{table}] has two entries for {path}",
                    where,
                    f"{table}.{path}",
                    found=f"{shown(found[path])}\n{shown(text)}",
                    fix="leave one",
                )
            found[path] = text
    return found


def check_notes(
    of: Sourced, notes: Mapping[str, Mapping[str, str]], where: str, also: Iterable[str] = ()
) -> None:
    """TargetError unless every source and discrepancy is of a field there is, or `also` may be, and
    every number has a source."""
    known = {path for path, _, _ in walk(of)} | {path for path, _ in all_specs(type(of))}
    known |= {prefix for path in known for prefix in _prefixes(path)} | set(also)
    for table, entries in notes.items():
        for path in entries:
            if path not in known:
                refuse(
                    f"[{table}] has an entry for {path}, which is not a field",
                    where,
                    f"{table}.{path}",
                    fix=nearest(path, known),
                )
    for path, quantity, _ in walk(of):
        if quantity and not source_of(path, notes["sources"]):
            refuse(
                f"{path} has no source",
                where,
                path,
                fix=f'add "{path}" = "..." under [sources]: a document, or `assumed: why`',
            )


def _prefixes(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def all_specs(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Spec]]:
    """Every field that a record may have, by its dotted path; not those of tables."""
    for name, spec in specs(cls).items():
        yield prefix + name, spec
        if is_dataclass(spec.holds):
            yield from all_specs(cast(type[Any], spec.holds), prefix + name + ".")
