"""Spec file → `Target`: by name, alias or path, with single fields set by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from gpuir.ir.door import NUMBER, PATH, TEXT, named, takes
from gpuir.ir.errors import TargetError, nearest
from gpuir.ir.types import DTYPES
from gpuir.plugins import installed
from gpuir.targets.host import host_names
from gpuir.targets.mig import nested, sliced
from gpuir.targets.spec import (
    SI,
    Raw,
    SpecKind,
    all_specs,
    check_name,
    check_notes,
    checked,
    is_path,
    key_text,
    leaves,
    number_text,
    on_base,
    paths_to_text,
    plugin_path,
    quoted,
    read_spec,
    record,
    refuse,
    remark,
    shown,
    slug,
    unknown,
)
from gpuir.targets.target import Flops, FrozenTable, Quantity, Spec, Target, specs, walk

_CHANGES = re.compile(r"\+(?=[\w.]+=)")  # before each number that a name sets
_POINT = re.compile(r"\w+=\d{1,40}(?: \w+=\d{1,40})*")  # extents of a kernel that was measured

# ---- names ------------------------------------------------------------------------------------


@takes(name=PATH, overrides=named(TEXT | NUMBER))
def load_target(name: str | Path, overrides: Mapping[str, str | float] | None = None) -> Target:
    """The target of a built-in name or alias, of a `.toml` path, or of a plug-in's name.

    `overrides` sets single numbers by their dotted path in the file, as `--set sms=120` does; they
    may also follow the name: `a100+sms=120+dram.bytes_per_s=2e12`, which is the name that the
    result has. Setting `sms` or `clock_hz` scales what hangs on them (see `scaled`); any other
    field is changed alone. A name may be that of a MIG slice: `a30:1g.6gb`, `a100:1c.3g.20gb`, and
    `a100:mig` with MIG on and one instance. TargetError when nothing has that name or a value is
    impossible.
    """
    base, *sets = _CHANGES.split(str(name))
    chosen: dict[str, str | float] = {}
    for text in sets:
        path, _, value = text.partition("=")
        chosen[path] = value
    chosen.update(overrides or {})
    whole, part = _divided(base)
    path = _find(whole)
    target = _shipped(path, part) if _KIND.is_shipped(path) else _read(path, part)
    if chosen:
        raw = scaled(_spec(path, part), _numbers(chosen, target))
        target = target_of(raw, raw["name"])
    return target


def is_changed(name: str) -> bool:
    """Whether a name sets numbers of a target: `a100+sms=120`."""
    return _CHANGES.search(name) is not None


def _divided(name: str) -> tuple[str, str]:
    """A GPU's name and that of a slice of it, empty for the whole GPU: `a30:1g.6gb`."""
    whole, colon, part = name.rpartition(":")
    is_slice = whole and not re.search(r"[\\/]", part)  # a colon may be a drive's
    return (whole, part) if colon and is_slice else (name, "")


def _spec(path: Path, part: str) -> Raw:
    """The tables of a target's file, or of a slice of it."""
    return _cut(whole_spec(path), part, str(path))


def _cut(raw: Raw, part: str, where: str) -> Raw:
    """The tables of a slice, from those of its GPU; of the GPU itself where no part is named."""
    return sliced(raw, target_of(raw, where), part) if part else raw


@cache
def _shipped(path: Path, part: str) -> Target:
    return _read(path, part)


def _read(path: Path, part: str) -> Target:
    raw = _spec(path, part)
    return target_of(raw, raw["name"] if part else str(path))


def target_names() -> tuple[str, ...]:
    """Names of the built-in targets and of those that installed plug-ins add, sorted."""
    return tuple(sorted({*_KIND.shipped, *installed("targets")}))


def aliases() -> dict[str, str]:
    """Other names a built-in target goes by (its title is one too), and which target it is."""
    return dict(_aliases())


@cache
def _aliases() -> dict[str, str]:
    import tomllib

    known: dict[str, str] = {}
    for path in _KIND.shipped.values():
        head = path.read_text(encoding="utf-8").partition("\n[")[0]  # names stand before any table
        raw: Raw = tomllib.loads(head)
        for alias in (slug(str(raw.get("title", ""))), *raw.get("aliases", ())):
            if alias and alias != path.stem:
                known[alias] = path.stem
    return known


def _find(name: str) -> Path:
    if is_path(name):
        return Path(name)
    files = _KIND.shipped
    wanted = slug(name)
    for key in (wanted, wanted.removeprefix("nvidia-")):
        if key in files:
            return files[key]
        if key in _aliases():
            return files[_aliases()[key]]
    plugins = installed("targets")
    for key in (name, wanted):
        if key in plugins:
            return plugin_path(plugins[key], "target")
    base, _, rest = name.partition("+")
    if rest and base:
        raise TargetError(
            f"no target is called {name!r}",
            fix=f"write a changed number with a value: {base}+{rest}=120",
        )
    raise unknown("target", name, (*files, *_aliases(), *plugins))


def _find_base(name: str) -> Path:
    if is_changed(name):
        plain = name.partition("+")[0]
        fix = f'write base = "{plain}", and the numbers with their sources below'
        raise TargetError("the base of a target must be an unchanged target", found=name, fix=fix)
    return _find(name)


# ---- text -------------------------------------------------------------------------------------


def whole_spec(path: Path) -> Raw:
    """The tables of a spec file, those of its `base` under them where it names one."""
    return _with_base(read_spec(path), path)


def _with_base(given: Raw, path: Path) -> Raw:
    """The tables of a spec file on those of its base. A variant without a name of its own has the
    file's: two targets of one name could not be told apart."""
    raw = on_base(given, path, _KIND)
    name, own = str(raw.get("name", "")), slug(path.stem)
    is_taken = name in _KIND.shipped or ("base" in given and "name" not in given)
    if _KIND.is_shipped(path) or not is_taken or not own or own == name:
        return raw
    return {**raw, "name": own, "base": raw.get("base") or name}


def dump_target(target: Target) -> str:
    """The spec file of a target: what `load_target` reads back, and a start for one's own GPU."""
    lines = [remark(f"{target.title or target.name}. SI units, dense rates."), ""]
    table = ""
    for path, quantity, value in walk(target):
        parent, _, key = path.rpartition(".")
        if parent != table:
            lines += ["", _heading(parent)]
            table = parent
        if path == "sms":
            lines.append("")
        text = f"{key_text(key)} = {_toml(value, quantity)}"
        lines.append(f"{text}  # {quantity.remark}" if quantity and quantity.remark else text)
    for name, notes in (("sources", target.sources), ("discrepancies", target.discrepancies)):
        if notes:
            together: dict[str, list[str]] = {}
            for path, text in notes.items():
                together.setdefault(text, []).append(path)
            lines += ["", f"[{name}]"]
            lines += [f"{quoted(', '.join(p))} = {quoted(t)}" for t, p in together.items()]
    return "\n".join(lines) + "\n"


def dump_difference(
    head: Mapping[str, str], numbers: Mapping[str, float], sources: Mapping[str, str]
) -> str:
    """A spec file of what differs from a base: `head` holds `base`, `name` and other text,
    `numbers` are by their path, factors among them, `sources` by path or prefix."""
    lines = [remark(f"{head['name']}: what differs from {head['base']}. SI units, dense rates.")]
    lines.append("")
    lines += [f"{key} = {quoted(text)}" for key, text in head.items()]
    table = ""
    for path, value in sorted(numbers.items(), key=lambda n: n[0].rpartition(".")[0]):
        parent, _, key = path.rpartition(".")
        if parent != table:
            lines += ["", _heading(parent)]
            table = parent
        lines.append(f"{key_text(key)} = {number_text(value)}")
    lines += ["", "[sources]"]
    lines += [f"{quoted(paths)} = {quoted(text)}" for paths, text in sources.items()]
    return "\n".join(lines) + "\n"


def parse_target(text: str, path: Path) -> Target:
    """The target that a spec file at `path` with this text would be."""
    import tomllib

    return target_of(_with_base(tomllib.loads(text), path), str(path))


def _heading(path: str) -> str:
    return f"[{'.'.join(map(key_text, path.split('.')))}]"


def _toml(value: str | float | bool | tuple[str, ...], quantity: Quantity | None) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(quoted, value))}]"
    if isinstance(value, int):
        return f"{value:_}" if quantity and quantity.unit else str(value)
    return number_text(value)


# ---- values -----------------------------------------------------------------------------------


def target_of(raw: Raw, where: str) -> Target:
    """The target that a spec file's tables describe; TargetError at the first thing wrong."""
    raw = dict(raw)
    notes = {name: paths_to_text(raw, name, where) for name in ("sources", "discrepancies")}
    raw |= {name: FrozenTable(found) for name, found in notes.items()}
    raw |= {t: _multipliers(raw[t], t, where) for t in ("factors", "local", "backtest") if t in raw}
    target = cast(Target, record(Target, raw, "", where))
    _check_names(target, where)
    _check_values(target, where)
    check_notes(target, notes, where, also=_RATES)
    return target


def _multipliers(groups: Any, table: str, where: str) -> FrozenTable[float]:
    """`{"stream": {"dram share": 0.9}}` → `{"stream.dram share": 0.9}`."""
    if not isinstance(groups, dict):
        refuse(f"{table} is a table", where, table, found=shown(groups), fix=f"write [{table}]")
    found: dict[str, float] = {}
    one = specs(Target)[table]._replace(holds=float)
    for group, inner in cast(Raw, groups).items():
        if not isinstance(inner, dict):
            refuse(
                f"{table}.{group} is a table",
                where,
                f"{table}.{group}",
                found=shown(inner),
                fix=f"write [{table}.{key_text(group)}], and what it multiplies below it",
            )
        for name, value in cast(Raw, inner).items():
            path = f"{group}.{name}"
            if table == "local" and not _POINT.fullmatch(name):
                refuse(
                    f"{name!r} must give the sizes of a kernel",
                    where,
                    f"local.{path}",
                    expected='whole numbers, for example "m=128 n=128 k=64 bytes=98304 '
                    'flops=2097152 ops=0"',
                    fix="use `gpuir calibrate`, which writes these lines",
                )
            found[path] = checked(one, value, f"{table}.{path}", where)
    if table == "backtest":
        _check_ends(found, where)
    return FrozenTable(found)


def _check_ends(found: Mapping[str, float], where: str) -> None:
    """A backtest has two ends of each family, and a prediction that is right lies between."""
    for path, value in found.items():
        family, _, end = path.partition(".")
        other = f"{family}.{'high' if end == 'low' else 'low'}"
        if end not in ("low", "high") or other not in found:
            refuse(
                f"backtest.{family} has two ends, low and high",
                where,
                f"backtest.{path}",
                found=", ".join(p for p in found if p.startswith(f"{family}.")),
                fix=f"write low and high below [backtest.{key_text(family)}]",
            )
        if value > 1 if end == "low" else value < 1:
            refuse(
                f"backtest.{path} is on the wrong side of 1",
                where,
                f"backtest.{path}",
                expected="low at most 1, high at least 1: measured over predicted time",
                found=f"{value:g}",
                fix="write 1 where all errors are to the other side",
            )


_ISA = re.compile(r"sm_[0-9]{2,4}[a-z]?|(?!sm_)[A-Za-z0-9_.-]{0,32}")  # the number is counted with
_KIND = SpecKind(
    "target", "a100", ("gpus", "cpus"), target_of, _find_base, divided=_divided, cut=_cut
)


def _check_names(target: Target, where: str) -> None:
    if target.host and target.host not in host_names():
        wrong = f"host: no host is called {target.host}"
        refuse(wrong, where, "host", fix=nearest(target.host, host_names()))
    check_name(re.split("[:+]", target.name)[0], "target", where)
    if not _ISA.fullmatch(target.isa):
        refuse(
            "no instruction set has this name",
            where,
            "isa",
            expected="sm_90, gfx942, x86-64-v3",
            found=target.isa[:80],
            fix="correct the name",
        )
    for alias in target.aliases:
        check_name(alias, "target", where, "aliases")
    for path, quantity, _ in walk(target):
        if quantity and path.startswith("flops_per_s.") and path not in _RATES:
            dtype = path.rpartition(".")[2]
            refuse(
                f"no such dtype: {dtype}",
                where,
                path,
                fix=nearest(dtype, ("tf32", *DTYPES)),
            )


_RATES = [f"flops_per_s.{table}.{dtype}" for table in specs(Flops) for dtype in (*DTYPES, "tf32")]


def _check_values(target: Target, where: str) -> None:
    """What two numbers together make impossible."""
    sm, f32 = target.sm, target.flops_per_s.vector.get("f32")
    if f32 is None:
        refuse(
            "flops_per_s.vector.f32 is missing",
            where,
            "flops_per_s.vector.f32",
            expected="flop/s; gpuir uses this number for all rates that are missing",
            fix="add it under [flops_per_s.vector], with its source",
        )
    most = target.sms * sm.fp32_lanes * sm.flops_per_lane_clock * target.clock_hz
    if not most / 50 <= f32 <= most * 50:
        refuse(
            "flops_per_s.vector.f32 does not match the SMs and the clock",
            where,
            "flops_per_s.vector.f32",
            expected=f"about {number_text(float(f'{most:.4g}'))} flop/s: "
            "sms x sm.fp32_lanes x sm.flops_per_lane_clock x clock_hz",
            found=number_text(f32),
            fix=SI,
        )
    for table in ("vector", "tensor", "tensor_f16_acc"):
        for dtype, rate in getattr(target.flops_per_s, table).items():
            if not f32 / 100 <= rate <= f32 * 1000:
                refuse(
                    f"flops_per_s.{table}.{dtype} does not match the f32 rate",
                    where,
                    f"flops_per_s.{table}.{dtype}",
                    expected=f"1/100 to 1000 times flops_per_s.vector.f32, {number_text(f32)}",
                    found=number_text(rate),
                    fix=SI,
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
                fix=f"check both {path} and {other}; " + SI,
            )


# ---- overrides --------------------------------------------------------------------------------


def _numbers(chosen: Mapping[str, str | float], target: Target) -> dict[str, float]:
    """The overrides, their text read as numbers, each possible for the field it names."""
    rate = Spec(float, specs(Flops)["vector"].quantity, False)
    known = {path: spec for path, spec in all_specs(Target) if spec.quantity}
    known = {p: s for p, s in known.items() if s.holds is not FrozenTable} | dict.fromkeys(
        _RATES, rate
    )
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
        numbers[path] = checked(known[path], number, path, "set")
    return numbers


def scaled(raw: Raw, chosen: Mapping[str, float]) -> Raw:
    """A spec with numbers set by the user, and with what follows from them.

    `sms` scales every compute peak; `clock_hz` scales those, the other clocks under load and the
    bandwidth of the L2, whose slices do not belong to the SMs, and no base clock stays above it. A
    number that the user sets too is taken as it is. Nothing else follows from anything.
    """
    flat = dict(leaves(raw))
    sources = paths_to_text(raw, "sources", str(raw["name"]))
    before = {path: flat.get(path) for path in ("sms", "clock_hz")}
    new = {**flat, **chosen}
    sms = new["sms"] / flat["sms"]
    clock = new["clock_hz"] / flat["clock_hz"]
    why = " and ".join(f"{p} = {number_text(chosen[p])}" for p in before if p in chosen)
    for path in flat:
        by = sms * clock if path.startswith("flops_per_s.") else 1.0
        if path in ("observed_clock_hz", "tensor_clock_hz", "l2.bytes_per_s"):
            by = clock
        if path == "base_clock_hz":
            by = min(1.0, new["clock_hz"] / flat[path])
        if by != 1.0 and path not in chosen:
            new[path] = flat[path] * by
            sources[path] = f"scaled by {by:.4g} because {why} was set by the user"
    for path in chosen:
        old = f", instead of {number_text(flat[path])}" if path in flat else ""
        sources[path] = f"set by the user{old}"
    result = nested(new)
    result["name"] = "+".join(
        [str(raw["name"]), *(f"{p}={number_text(float(v))}" for p, v in sorted(chosen.items()))]
    )
    return {**result, "sources": sources, "discrepancies": raw.get("discrepancies", {})}
