"""Spec file → `Target`: by name, alias or path, with single fields set by the user."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from gpuir.ir.errors import TargetError, nearest
from gpuir.ir.plugins import installed
from gpuir.ir.types import DTYPES
from gpuir.targets.target import Flops, Quantity, Spec, Table, Target, source_of, specs, walk

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Raw = dict[str, Any]
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_POINT = re.compile(r"\w+=\d{1,40}(?: \w+=\d{1,40})*")
_SI = "values are in SI units: Hz, bytes, bytes/s, flop/s, s, W"


# ---- names ------------------------------------------------------------------------------------


def load_target(name: str | Path, overrides: Mapping[str, str | float] | None = None) -> Target:
    """The target of a built-in name or alias, of a `.toml` path, or of a plug-in's name.

    `overrides` sets single numbers by their dotted path in the file, as `--set sms=120` does; they
    may also follow the name: `a100+sms=120+dram.bytes_per_s=2e12`, which is the name that the
    result has. Setting `sms` or `clock_hz` scales what hangs on them (see `scaled`); any other
    field is changed alone. TargetError when nothing has that name or a value is impossible.
    """
    base, *sets = re.split(r"\+(?=[\w.]+=)", str(name))
    chosen: dict[str, str | float] = {}
    for text in sets:
        path, _, value = text.partition("=")
        chosen[path] = value
    chosen.update(overrides or {})
    path = _find(base)
    target = _shipped(path) if path in _spec_files() else target_of(whole_spec(path), str(path))
    if chosen:
        raw = scaled(whole_spec(path), _numbers(chosen, target))
        target = target_of(raw, raw["name"])
    return target


@cache
def _shipped(path: Path) -> Target:
    return target_of(read_spec(path), str(path))


def target_names() -> tuple[str, ...]:
    """Names of the built-in targets and of those that installed plug-ins add, sorted."""
    return tuple(sorted({p.stem for p in _spec_files()} | set(installed("targets"))))


def aliases() -> dict[str, str]:
    """Other names a built-in target goes by (its title is one too), and which target it is."""
    return dict(_aliases())


def slug(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` → `nvidia-h100-80gb-hbm3`: what a driver calls a GPU, as a name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def spec_folder() -> Path:
    """`specs/` inside the installed package, else beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "specs"
    return inside if inside.exists() else package.parent / "specs"


@cache
def _spec_files() -> tuple[Path, ...]:
    return tuple(
        sorted(p for kind in ("gpus", "cpus") for p in (spec_folder() / kind).glob("*.toml"))
    )


@cache
def _aliases() -> dict[str, str]:
    import tomllib

    known: dict[str, str] = {}
    for path in _spec_files():
        head = path.read_text(encoding="utf-8").partition("\n[")[0]  # names stand before any table
        raw: Raw = tomllib.loads(head)
        for alias in (slug(str(raw.get("title", ""))), *raw.get("aliases", ())):
            if alias and alias != path.stem:
                known[alias] = path.stem
    return known


def _find(name: str) -> Path:
    if name.endswith(".toml") or "/" in name or "\\" in name:
        return Path(name)
    files = {path.stem: path for path in _spec_files()}
    wanted = slug(name)
    for key in (wanted, wanted.removeprefix("nvidia-")):
        if key in files:
            return files[key]
        if key in _aliases():
            return files[_aliases()[key]]
    plugins = installed("targets")
    for key in (name, wanted):
        if key in plugins:
            return plugin_path(plugins[key])
    base, _, rest = name.partition("+")
    if rest and base:
        raise TargetError(
            f"no target is called {name!r}", fix=f"a changed number has a value: {base}+{rest}=120"
        )
    close = nearest(wanted, (*files, *_aliases(), *plugins))
    raise TargetError(
        f"no target is called {name!r}",
        fix=(close if close.startswith("did") else "`gpuir targets` lists the names")
        + "\nor give the path of a .toml file of your own",
    )


def plugin_path(point: EntryPoint, what: str = "target") -> Path:
    """An entry point of group `gpuir.targets` is a path, or a function that gives one."""
    where = f"entry point {point.name} = {point.value}"
    try:
        found: Any = point.load()
        found = found() if callable(found) else found
    except Exception as error:  # a plug-in may fail in any way
        raise TargetError(
            f"the plug-in that provides this {what} does not load",
            where=where,
            found=f"{type(error).__name__}: {error}",
            fix="upgrade or uninstall the package that declares it",
        ) from error
    if not isinstance(found, str | Path):
        raise TargetError(
            "the plug-in gives no spec file",
            where=where,
            expected="a path, or a function that returns one",
            found=repr(found),
            fix="upgrade or uninstall the package that declares it",
        )
    return Path(found)


# ---- text -------------------------------------------------------------------------------------


def read_spec(path: Path) -> Raw:
    """The tables of a TOML file, unchecked; TargetError when it cannot be read or is not TOML."""
    import tomllib

    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TargetError(
            "not a text file", where=str(path), found=str(error), fix="save it as UTF-8"
        ) from error
    except (OSError, ValueError) as error:
        raise TargetError(
            "cannot read the spec file",
            where=str(path),
            found=getattr(error, "strerror", None) or str(error),
            fix="check the path; only a name without `.toml` or `/` is looked up as a name",
        ) from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found, where = str(error), str(path)
        if place := re.search(r" ?\(at line (\d+), column (\d+)\)", found):
            line, column = int(place[1]), int(place[2])
            shown = text.split("\n")[line - 1]
            found = f"{shown}\n{' ' * (column - 1)}^ {found[: place.start()]}"
            where = f"{path}:{line}"
        raise TargetError(
            "not valid TOML", where=where, found=found, fix="correct this line"
        ) from error


def whole_spec(path: Path) -> Raw:
    """The tables of a spec file, those of its `base` under them where it names one.

    A number that the file gives counts in place of the base's and needs a source of its own.
    """
    return _on_base(read_spec(path), path, ())


def _on_base(raw: Raw, path: Path, above: tuple[Path, ...]) -> Raw:
    name, where = raw.get("base"), str(path)
    if name is None:
        return raw
    if not isinstance(name, str):
        refuse("base is not text", where, "base", found=_shown(name), fix='write base = "a100"')
    if re.search(r"\+[\w.]+=", name):
        plain = name.partition("+")[0]
        fix = f'write base = "{plain}", and the numbers with their sources below'
        refuse("a base is a whole target", where, "base", found=name, fix=fix)
    own = name.endswith(".toml") or "/" in name or "\\" in name
    file = path.parent / name if own else _find(name)
    if file.resolve() in (path.resolve(), *above):
        refuse("a target cannot be its own base", where, "base", found=name, fix="name another")
    below = _on_base(read_spec(file), file, (path.resolve(), *above))
    target = target_of(below, str(file))  # what is wrong there is not blamed on this file
    base = file.stem if file in _spec_files() else target.base
    return _laid_over(target, below, raw, where) | {"base": base}


def _laid_over(target: Target, below: Raw, raw: Raw, where: str) -> Raw:
    """A base's tables with those of a file over them. A source of the base is of its own number
    alone, so that a new number has none but the file's."""
    fields = dict(_flat(below))
    for path in ("aliases", "notes"):
        fields.pop(path, None)
    sources = {path: target.source(path) for path, quantity, _ in walk(target) if quantity}
    doubts = dict(target.doubts)
    for path, value in _flat(raw):
        sources.pop(path, None)
        doubts.pop(path, None)
        fields[path] = value
    sources |= paths_to_text(raw, "sources", where)
    doubts |= paths_to_text(raw, "doubts", where)
    return {**_nested(fields), "sources": sources, "doubts": doubts}


def _nested(flat: Mapping[str, Any]) -> Raw:
    """`{"l2.bytes": 1}` → `{"l2": {"bytes": 1}}`."""
    result: Raw = {}
    for path, value in flat.items():
        *tables, name = path.split(".")
        inner = result
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return result


def dump_target(target: Target) -> str:
    """The spec file of a target: what `load_target` reads back, and a start for one's own GPU."""
    lines = [f"# {target.title or target.name}. SI units, dense rates.", ""]
    table = ""
    for path, quantity, value in walk(target):
        parent, _, key = path.rpartition(".")
        if parent != table:
            lines += ["", _heading(parent)]
            table = parent
        if path == "sms":
            lines.append("")
        text = f"{_key(key)} = {_toml(value, quantity)}"
        lines.append(f"{text}  # {quantity.remark}" if quantity and quantity.remark else text)
    for name, notes in (("sources", target.sources), ("doubts", target.doubts)):
        if notes:
            together: dict[str, list[str]] = {}
            for path, text in notes.items():
                together.setdefault(text, []).append(path)
            lines += ["", f"[{name}]"]
            lines += [f"{_quoted(', '.join(p))} = {_quoted(t)}" for t, p in together.items()]
    return "\n".join(lines) + "\n"


def dump_difference(
    head: Mapping[str, str], numbers: Mapping[str, float], sources: Mapping[str, str]
) -> str:
    """A spec file of what differs from a base: `head` holds `base`, `name` and other text,
    `numbers` are by their path, factors among them, `sources` by path or prefix."""
    lines = [f"# {head['name']}: what differs from {head['base']}. SI units, dense rates.", ""]
    lines += [f"{key} = {_quoted(text)}" for key, text in head.items()]
    table = ""
    for path, value in sorted(numbers.items(), key=lambda n: n[0].rpartition(".")[0]):
        parent, _, key = path.rpartition(".")
        if parent != table:
            lines += ["", _heading(parent)]
            table = parent
        lines.append(f"{_key(key)} = {number_text(value)}")
    lines += ["", "[sources]"]
    lines += [f"{_quoted(paths)} = {_quoted(text)}" for paths, text in sources.items()]
    return "\n".join(lines) + "\n"


def parse_target(text: str, path: Path) -> Target:
    """The target that a spec file at `path` with this text would be."""
    import tomllib

    return target_of(_on_base(tomllib.loads(text), path, ()), str(path))


def _heading(path: str) -> str:
    return f"[{'.'.join(map(_key, path.split('.')))}]"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _quoted(name)


def _toml(value: str | float | bool | tuple[str, ...], quantity: Quantity | None) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, int):
        return f"{value:_}" if quantity and quantity.unit else str(value)
    return number_text(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def number_text(value: float) -> str:
    """A number that reads back exactly, its exponent a multiple of three: `1.555e12`, `400`."""
    if isinstance(value, int) or 1 <= abs(value) < 1e4:
        return str(value).removesuffix(".0")
    number = Decimal(repr(value)).normalize()
    power = 3 * (number.adjusted() // 3) if number else 0
    return f"{number.scaleb(-power):f}e{power}" if power else f"{number:f}"


# ---- values -----------------------------------------------------------------------------------


def target_of(raw: Raw, where: str) -> Target:
    """The target that a spec file's tables describe; TargetError at the first thing wrong."""
    raw = dict(raw)
    notes = {name: paths_to_text(raw, name, where) for name in ("sources", "doubts")}
    raw |= {name: Table(found) for name, found in notes.items()}
    target = cast(Target, record(Target, raw, "", where))
    _check_names(target, where)
    _check_values(target, where)
    _check_notes(target, notes, where)
    return target


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
                fix=nearest(name, [k for k in known if k not in ("sources", "doubts")]),
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
    if isinstance(value, Table):
        return cast(Any, value)
    if is_dataclass(holds) or holds is Table:
        if not isinstance(value, dict):
            refuse(f"{path} is a table", where, path, found=_shown(value), fix=f"write [{path}]")
        inner = cast(Raw, value)
        if is_dataclass(holds):
            return record(cast(type[Any], holds), inner, path + ".", where)
        assert spec.quantity
        if path in ("factors", "near"):
            return _multipliers(spec, inner, path, where)
        for key in inner:
            if path.startswith("flops_per_s.") and key not in DTYPES and key != "tf32":
                refuse(
                    f"no such dtype: {key}",
                    where,
                    f"{path}.{key}",
                    fix=nearest(key, ("tf32", *DTYPES)),
                )
        rate = Spec(float, spec.quantity, False)
        return Table({k: _number(rate, v, f"{path}.{k}", where) for k, v in inner.items()})
    if spec.quantity:
        return _number(spec, value, path, where)
    if holds is tuple:
        if not isinstance(value, list) or not all(isinstance(v, str) for v in cast(Any, value)):
            refuse(
                f"{path} is a list of text",
                where,
                path,
                found=_shown(value),
                fix=f'write {path} = ["a", "b"]',
            )
        return tuple(cast(list[str], value))
    if type(value) is not holds:
        refuse(
            f"{path} is not {_KINDS[holds]}",
            where,
            path,
            expected=_KINDS[holds],
            found=_shown(value),
            fix="write " + {str: f'{path} = "..."', bool: f"{path} = true or false"}[holds],
        )
    return value


def _multipliers(spec: Spec, groups: Raw, table: str, where: str) -> Table[float]:
    """`{"stream": {"dram share": 0.9}}` → `{"stream.dram share": 0.9}`."""
    found: dict[str, float] = {}
    one = Spec(float, spec.quantity, False)
    for group, inner in groups.items():
        if not isinstance(inner, dict):
            refuse(
                f"{table}.{group} is a table",
                where,
                f"{table}.{group}",
                found=_shown(inner),
                fix=f"write [{table}.{_key(group)}], and what it multiplies below it",
            )
        for name, value in cast(Raw, inner).items():
            path = f"{group}.{name}"
            if table == "near" and not _POINT.fullmatch(name):
                refuse(
                    f"{name!r} is no kernel's extents",
                    where,
                    f"near.{path}",
                    expected='whole numbers: "m=128 n=128 k=64 bytes=98304 flops=2097152 ops=0"',
                    fix="let `gpuir calibrate` write these",
                )
            found[path] = _number(one, value, f"{table}.{path}", where)
    return Table(found)


_KINDS: dict[Any, str] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number"
}  # fmt: skip


def _number(spec: Spec, value: Any, path: str, where: str) -> float:
    quantity = spec.quantity
    assert quantity
    if isinstance(value, bool) or not isinstance(value, int | float):
        what, fix = "is not a number", "write a plain number in SI units, without quotes or a unit"
    elif not quantity.low <= value <= quantity.high:  # also true of NaN
        what = "is out of range"
        fix = _SI if quantity.unit and value > 0 else "look the number up again"
    elif spec.holds is int and value != int(value):
        what, fix = "is not a whole number", "round it"
    else:
        what = fix = ""
    if what:
        expected, found = _expected(spec), _shown(value)
        refuse(f"{path} {what}", where, path, expected=expected, found=found, fix=fix)
    return spec.holds(value)


def _expected(spec: Spec) -> str:
    if spec.quantity is None:
        return "a table" if is_dataclass(spec.holds) else _KINDS.get(spec.holds, "text")
    low, high = number_text(spec.quantity.low), number_text(spec.quantity.high)
    unit = f" {spec.quantity.unit}" if spec.quantity.unit else ""
    return f"{_KINDS[spec.holds]} from {low} to {high}{unit}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number far too large"
    return text if len(text) <= 60 else text[:57] + "..."


def refuse(
    what: str, where: str, path: str = "", *, expected: str = "", found: str = "", fix: str
) -> NoReturn:
    """TargetError at a field of a spec file."""
    at = f"{where}:{path}" if path else where
    raise TargetError(what, where=at, expected=expected, found=found, fix=fix)


def paths_to_text(raw: Raw, table: str, where: str) -> dict[str, str]:
    """Sources or doubts: `"sms, dram" = "text"` → one entry a path."""
    found: dict[str, str] = {}
    entries = raw.get(table, {})
    if not isinstance(entries, dict):
        refuse(f"{table} is a table", where, table, found=_shown(entries), fix=f"write [{table}]")
    for key, text in cast(Raw, entries).items():
        if not isinstance(text, str) or not text.strip():
            refuse(
                f"the {table[:-1]} of {key} is not text",
                where,
                f"{table}.{key}",
                found=_shown(text),
                fix=f'quote the path: "{key}.{next(iter(cast(Raw, text)), "")}" = "..."'
                if isinstance(text, dict)
                else "name a document, or write `assumed: why`",
            )
        for path in map(str.strip, key.split(",")):
            if path in found:
                refuse(
                    f"[{table}] has two entries for {path}",
                    where,
                    f"{table}.{path}",
                    found=f"{_shown(found[path])}\n{_shown(text)}",
                    fix="leave one",
                )
            found[path] = text
    return found


def _check_names(target: Target, where: str) -> None:
    for path, name in (("name", target.name), *(("aliases", a) for a in target.aliases)):
        bare = name.split("+", 1)[0] if path == "name" else name
        if not _NAME.fullmatch(bare):
            refuse(
                f"{name!r} cannot be the name of a target",
                where,
                path,
                expected="lower-case letters, digits, `-` and `.`",
                fix=f"write {slug(bare) or 'my-gpu'}",
            )


def _check_notes(target: Target, notes: Mapping[str, Mapping[str, str]], where: str) -> None:
    """Every source and doubt is of a field there is, and every number has a source."""
    covered = {path for path, _, _ in walk(target)}
    covered |= {prefix for path in covered for prefix in _prefixes(path)}
    possible = covered | {path for path, _ in _all_specs(Target)} | set(_RATES)
    for table, entries in notes.items():
        for path in entries:
            if path not in possible:
                refuse(
                    f"[{table}] names no field: {path}",
                    where,
                    f"{table}.{path}",
                    fix=nearest(path, possible),
                )
    refuse_without_source(target, target.sources, where)


def refuse_without_source(of: Any, sources: Mapping[str, str], where: str) -> None:
    """TargetError at the first number of a record that `sources` do not cover."""
    for path, quantity, _ in walk(of):
        if quantity and not source_of(path, sources):
            refuse(
                f"{path} has no source",
                where,
                path,
                fix=f'add "{path}" = "..." under [sources]: a document, or `assumed: why`',
            )


_RATES = [f"flops_per_s.{table}.{dtype}" for table in specs(Flops) for dtype in (*DTYPES, "tf32")]


def _prefixes(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def _check_values(target: Target, where: str) -> None:
    """What two numbers together make impossible."""
    sm, f32 = target.sm, target.flops_per_s.vector.get("f32")
    if f32 is None:
        refuse(
            "flops_per_s.vector.f32 is missing",
            where,
            "flops_per_s.vector.f32",
            expected="flop/s; other rates fall back to it",
            fix="add it under [flops_per_s.vector], with its source",
        )
    most = target.sms * sm.fp32_lanes * sm.flops_per_lane_clock * target.clock_hz
    if not most / 50 <= f32 <= most * 50:
        refuse(
            "flops_per_s.vector.f32 does not belong to these SMs and this clock",
            where,
            "flops_per_s.vector.f32",
            expected=f"about {number_text(float(f'{most:.4g}'))} flop/s: "
            "sms x sm.fp32_lanes x sm.flops_per_lane_clock x clock_hz",
            found=number_text(f32),
            fix=_SI,
        )
    for table in ("vector", "tensor", "tensor_f16_acc"):
        for dtype, rate in getattr(target.flops_per_s, table).items():
            if not f32 / 100 <= rate <= f32 * 1000:
                refuse(
                    f"flops_per_s.{table}.{dtype} is out of proportion to the f32 rate",
                    where,
                    f"flops_per_s.{table}.{dtype}",
                    expected=f"1/100 to 1000 times flops_per_s.vector.f32, {number_text(f32)}",
                    found=number_text(rate),
                    fix=_SI,
                )
    pairs = (
        ("base_clock_hz", target.base_clock_hz, "clock_hz", target.clock_hz),
        ("sm.smem_bytes_per_block", sm.smem_bytes_per_block, "sm.smem_bytes", sm.smem_bytes),
        ("sm.warp", sm.warp, "sm.threads", sm.threads),
        ("sm.blocks", sm.blocks, "sm.threads", sm.threads),
        ("l2.bytes", target.l2.bytes, "dram.bytes", target.dram.bytes),
        *(
            [("sm.smem_bytes", sm.smem_bytes, "sm.l1_bytes", sm.l1_bytes)]
            if sm.l1_holds_smem
            else []
        ),
    )
    for path, small, other, large in pairs:
        if small is not None and large is not None and small > large:
            refuse(
                f"{path} exceeds {other}",
                where,
                path,
                expected=f"at most {number_text(large)}",
                found=number_text(small),
                fix=f"check both {path} and {other}; " + _SI,
            )


# ---- overrides --------------------------------------------------------------------------------


def _numbers(chosen: Mapping[str, str | float], target: Target) -> dict[str, float]:
    """The overrides, their text read as numbers, each possible for the field it names."""
    rate = Spec(float, specs(Flops)["vector"].quantity, False)
    known = {path: spec for path, spec in _all_specs(Target) if spec.quantity}
    known = {p: s for p, s in known.items() if s.holds is not Table} | dict.fromkeys(_RATES, rate)
    numbers: dict[str, float] = {}
    for path, value in chosen.items():
        if path not in known:
            listed = [p for p, quantity, _ in walk(target) if quantity]
            below = [p for p in listed if p.startswith(path + ".")]
            close = nearest(path, known)
            refuse(
                f"{path} is a table, not a number" if below else f"no number is called {path}",
                "set",
                path,
                fix=f"one of {', '.join(below or listed)}"
                if below or not close.startswith("did")
                else close,
            )
        try:
            number: Any = float(value)
            number = int(number) if number.is_integer() else number
        except (ValueError, TypeError, OverflowError):
            number = value
        numbers[path] = _number(known[path], number, path, "set")
    return numbers


def _all_specs(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Spec]]:
    for name, spec in specs(cls).items():
        yield prefix + name, spec
        if is_dataclass(spec.holds):
            yield from _all_specs(cast(type[Any], spec.holds), prefix + name + ".")


def scaled(raw: Raw, chosen: Mapping[str, float]) -> Raw:
    """A spec with numbers set by the user, and with what follows from them.

    `sms` scales every compute peak; `clock_hz` scales those, the tensor clock and the bandwidth
    of the L2, whose slices do not belong to the SMs, and no base clock stays above it. A number
    that the user sets too is taken as it is. Nothing else follows from anything.
    """
    flat = dict(_flat(raw))
    sources = paths_to_text(raw, "sources", str(raw["name"]))
    before = {path: flat.get(path) for path in ("sms", "clock_hz")}
    new = {**flat, **chosen}
    sms = new["sms"] / flat["sms"]
    clock = new["clock_hz"] / flat["clock_hz"]
    why = " and ".join(f"{p} = {number_text(chosen[p])}" for p in before if p in chosen)
    for path in flat:
        by = sms * clock if path.startswith("flops_per_s.") else 1.0
        if path in ("tensor_clock_hz", "l2.bytes_per_s"):
            by = clock
        if path == "base_clock_hz":
            by = min(1.0, new["clock_hz"] / flat[path])
        if by != 1.0 and path not in chosen:
            new[path] = flat[path] * by
            sources[path] = f"scaled by {by:.4g} because {why} was set by the user"
    for path in chosen:
        old = f", instead of {number_text(flat[path])}" if path in flat else ""
        sources[path] = f"set by the user{old}"
    result = _nested(new)
    result["name"] = "+".join(
        [str(raw["name"]), *(f"{p}={number_text(float(v))}" for p, v in sorted(chosen.items()))]
    )
    return {**result, "sources": sources, "doubts": raw.get("doubts", {})}


def _flat(raw: Raw, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        if isinstance(value, dict):
            if prefix or name not in ("sources", "doubts"):
                yield from _flat(cast(Raw, value), prefix + name + ".")
        else:
            yield prefix + name, value
