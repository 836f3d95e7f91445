"""Passes, predictors, targets and backends of the user's own, from modules named on the command
line."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuir.backends.table import Backend
    from gpuir.cost.table import Predictor
    from gpuir.passes.manager import Pass

TABLES = ("PASSES", "PREDICTORS", "TARGETS", "PROFILES", "BACKENDS", "CONVERTERS")


@dataclass(frozen=True)
class Loaded:
    """What the modules add, by name. A target or profile is the path of its file."""

    passes: dict[str, type[Pass]]
    predictors: dict[str, Predictor]
    targets: dict[str, str | Path]
    profiles: dict[str, str | Path]
    backends: dict[str, Backend]
    converters: dict[str, Callable[..., Any]]

    def profile(self, name: str) -> str:
        """`mine+host=dgx-1` with the path of the module's profile in place of its name."""
        base, plus, rest = name.partition("+")
        return f"{self.profiles.get(base, base)}{plus}{rest}"

    def target(self, name: str) -> str:
        """`mine+sms=60` with the path of the module's target in place of its name."""
        base, plus, numbers = name.partition("+")
        return f"{self.targets.get(base, base)}{plus}{numbers}"


def load_modules(names: Iterable[str]) -> Loaded:
    """The tables PASSES, PREDICTORS, TARGETS, PROFILES, BACKENDS and CONVERTERS of each module, put
    together.

    A name is a module's, looked for in the current folder too, or the path of a `.py` file.
    """
    from gpuir.ir.errors import UsageError
    from gpuir.plugins import own_module

    loaded = Loaded(passes={}, predictors={}, targets={}, profiles={}, backends={}, converters={})
    for name in names:
        module = own_module(name, f"--load {name}")
        tables: dict[str, dict[str, object]] = {
            table: getattr(module, table)
            for table in TABLES
            if isinstance(getattr(module, table, None), dict)
        }
        if not tables:
            raise UsageError(
                "the module adds nothing",
                where=f"--load {name}",
                expected=f"a dictionary with the name {', '.join(TABLES[:-1])} or {TABLES[-1]}",
                found=", ".join(sorted(n for n in vars(module) if not n.startswith("_"))),
                fix='add one, for example PASSES = {"my-pass": MyPass}',
            )
        for table, found in tables.items():
            mine: dict[str, Any] = getattr(loaded, table.lower())
            for key, thing in found.items():
                _check(f"--load {name}: {table}[{key!r}]", table, key, thing)
                mine[key] = thing
    return loaded


def _check(where: str, table: str, key: str, thing: object) -> None:
    """UsageError when a table has a name of ours, or something that is of no use in it."""
    from gpuir.backends.table import BACKENDS
    from gpuir.cost.table import PREDICTORS
    from gpuir.ir.errors import UsageError
    from gpuir.stacks.table import PASSES, is_pass

    rules: dict[str, tuple[Container[str], Callable[[object], bool], str]] = {
        "PASSES": (PASSES, is_pass, "a subclass of gpuir.passes.manager.Pass"),
        "CONVERTERS": ((), callable, "a function of a node and an emitter"),
        "PREDICTORS": (PREDICTORS, callable, "a function of op, tile and target"),
        "TARGETS": ((), lambda x: isinstance(x, str | Path), "the path of a spec file"),
        "PROFILES": ((), lambda x: isinstance(x, str | Path), "the path of a profile's file"),
        "BACKENDS": (BACKENDS, callable, "a function of summaries and a layout"),
    }
    ours, fits, expected = rules[table]
    if key in ours:
        raise UsageError(
            "gpuir already has something with this name", where=where, fix="give it another name"
        )
    if not fits(thing):
        raise UsageError(
            "gpuir cannot use this object", where=where, expected=expected, found=repr(thing)
        )
