"""Passes, predictors, targets and backends of the user's own, from modules named on the command
line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuir.backends.table import Backend
    from gpuir.cost.table import Predictor
    from gpuir.passes.manager import Pass

TABLES = ("PASSES", "PREDICTORS", "TARGETS", "PROFILES", "BACKENDS")


@dataclass(frozen=True)
class Loaded:
    """What the modules add, by name. A target or profile is the path of its file."""

    passes: dict[str, type[Pass]]
    predictors: dict[str, Predictor]
    targets: dict[str, str | Path]
    profiles: dict[str, str | Path]
    backends: dict[str, Backend]

    def profile(self, name: str) -> str:
        """The path of the module's profile in place of its name."""
        return str(self.profiles.get(name, name))

    def target(self, name: str) -> str:
        """`mine+sms=60` with the path of the module's target in place of its name."""
        base, plus, numbers = name.partition("+")
        return f"{self.targets.get(base, base)}{plus}{numbers}"


def load_modules(names: Iterable[str]) -> Loaded:
    """The tables PASSES, PREDICTORS, TARGETS, PROFILES and BACKENDS of each module, put together.

    A name is a module's, looked for in the current folder too, or the path of a `.py` file.
    """
    from gpuir.ir.errors import UsageError

    loaded = Loaded({}, {}, {}, {}, {})
    for name in names:
        module = _import(name)
        tables: dict[str, dict[str, object]] = {
            table: getattr(module, table)
            for table in TABLES
            if isinstance(getattr(module, table, None), dict)
        }
        if not tables:
            raise UsageError(
                "the module adds nothing",
                where=f"--load {name}",
                expected=f"a dictionary called {', '.join(TABLES[:-1])} or {TABLES[-1]}",
                found=", ".join(sorted(n for n in vars(module) if not n.startswith("_"))),
                fix='add one, like PASSES = {"my-pass": MyPass}',
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
    from gpuir.passes.table import PASSES, is_pass

    rules: dict[str, tuple[Container[str], Callable[[object], bool], str]] = {
        "PASSES": (PASSES, is_pass, "a subclass of gpuir.passes.manager.Pass"),
        "PREDICTORS": (PREDICTORS, callable, "a function of op, tile and target"),
        "TARGETS": ((), lambda x: isinstance(x, str | Path), "the path of a spec file"),
        "PROFILES": ((), lambda x: isinstance(x, str | Path), "the path of a profile's file"),
        "BACKENDS": (BACKENDS, callable, "a function of summaries and a layout"),
    }
    ours, fits, expected = rules[table]
    if key in ours:
        raise UsageError("gpuir has one of that name", where=where, fix="give it another name")
    if not fits(thing):
        raise UsageError("this cannot be used", where=where, expected=expected, found=repr(thing))


def _import(name: str) -> ModuleType:
    from gpuir.ir.errors import UsageError

    try:
        if name.endswith(".py"):
            return _from_file(Path(name))
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the module's own code may fail in any way
        raise UsageError(
            "the module cannot be loaded",
            where=f"--load {name}",
            expected="a module that Python finds from here, or the path of a .py file",
            found=f"{type(error).__name__}: {error}",
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module
