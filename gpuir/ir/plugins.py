"""Names that others add to our tables, looked up when one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from gpuir.ir.errors import GpuirError, PluginError, UsageError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


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
    point = points[name]
    where = f"entry point {name} = {point.value}"
    try:
        found = point.load()
    except Exception as error:  # a plug-in may fail in any way
        raise PluginError(
            f"the {kind} {name!r} cannot be loaded",
            where=where,
            found=f"{type(error).__name__}: {error}",
            fix="upgrade or uninstall the package that declares it",
        ) from error
    if not fits(found):
        raise PluginError(f"{name!r} is no {kind}", where=where, found=repr(found))
    return found


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
            found=f"{type(error).__name__}: {error}",
            fix=f"it comes from the module {thing.__module__}; `gpuir --debug ...` shows more",
        ) from error
