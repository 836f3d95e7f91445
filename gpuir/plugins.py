"""What others add to our tables: names, looked up when one is asked for, and modules."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from gpuir.files import note_input
from gpuir.ir.errors import GpuirError, PluginError, UsageError, nearest, raised, reason

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class LazyTable(Mapping[str, T]):
    """Our own things by name, from `module:name`: imported when one is asked for."""

    def __init__(self, places: Mapping[str, str]):
        self._places = places

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self._places[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points that installed packages declare in `gpuir.<group>`, by name."""
    from importlib.metadata import entry_points  # slow to import, seldom needed

    return {point.name: point for point in entry_points(group=f"gpuir.{group}")}


def find_named(
    name: str,
    ours: Mapping[str, T],
    loaded: Mapping[str, T] | None,
    *,
    kind: str,
    group: str,
    fits: Callable[[object], bool] = callable,
) -> T:
    """The one of that name: ours, then of a module the user loaded, then an entry point's of
    `gpuir.<group>`; UsageError, with the nearest names, when nobody has it. PluginError when an
    entry point does not load, or is nothing that `fits`."""
    loaded = loaded or {}
    if (found := ours.get(name) or loaded.get(name)) is not None:
        return found
    points = installed(group)
    if name not in points:
        raise UsageError(f"no {kind} {name!r}", fix=nearest(name, [*ours, *loaded, *points]))
    found = load_point(points[name], kind)
    if not fits(found):
        raise PluginError(f"{name!r} is not a {kind}", where=place(points[name]), found=repr(found))
    return found


def find_added(name: str, loaded: Mapping[str, T], *, kind: str, group: str) -> T | None:
    """What others call by that name, where we have nothing: of a module the user loaded, then an
    entry point's of `gpuir.<group>`; None where nobody has it."""
    if name in loaded:
        return loaded[name]
    points = installed(group)
    return load_point(points[name], kind) if name in points else None


def load_point(point: EntryPoint, kind: str) -> Any:
    """What an entry point names; PluginError where it does not load."""
    try:
        return point.load()
    except Exception as error:  # a plug-in may fail in any way
        raise PluginError(
            f"the {kind} {point.name!r} cannot be loaded",
            where=place(point),
            found=reason(error),
            fix="upgrade or uninstall the package that declares it",
        ) from error


def place(point: EntryPoint) -> str:
    return f"entry point {point.name} = {point.value}"


def own_module(name: str, where: str) -> ModuleType:
    """A module of the user's: one that Python finds, looked for in the current folder too, or the
    path of a `.py` file, which may import what lies beside it, as when Python runs it. UsageError,
    with what its own code says, where it does not load."""
    try:
        with unwarned():
            return _own_module(name)
    except (Exception, SystemExit) as error:  # it may fail in any way
        raise UsageError(
            "the module cannot be loaded",
            where=where,
            expected="a module that Python can import from here, or the path of a .py file",
            found=raised(error),
        ) from error


def _own_module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _from_file(Path(name))
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = importlib.import_module(name)
    if module.__file__:
        note_input(module.__file__)
    return module


@contextmanager
def unwarned() -> Generator[None]:
    """Of what a user's code imports, libraries warn of nothing: our own message is to be seen."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    note_input(path)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last: what is installed is not to be hidden by a file here
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


def is_ours(thing: object) -> bool:
    """Whether gpuir itself defines a function, or the class of an object."""
    return getattr(thing, "__module__", "").partition(".")[0] == "gpuir"


@contextmanager
def blamed(thing: object, what: str) -> Generator[None]:
    """What goes wrong inside is a PluginError where `thing` is not ours; `what` names it."""
    try:
        yield
    except GpuirError:
        raise
    except Exception as error:
        if is_ours(thing):
            raise
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        raise PluginError(
            f"{what} failed",
            where=f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else "",
            found=reason(error),
            fix=f"the error comes from the module {thing.__module__}; `gpuir "
            "--debug ...` prints more",
        ) from error
