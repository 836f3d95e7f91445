"""Names that others add to our tables, looked up when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from gpuir.ir.errors import UsageError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points that installed packages declare in `gpuir.<group>`, by name."""
    from importlib.metadata import entry_points  # slow to import, seldom needed

    return {point.name: point for point in entry_points(group=f"gpuir.{group}")}


def find_named(
    name: str, ours: Mapping[str, T], loaded: Mapping[str, T] | None, *, kind: str, group: str
) -> T:
    """The one of that name: ours, then of a module the user loaded, then an entry point's of
    `gpuir.<group>`; UsageError, with the nearest names, when nobody has it."""
    loaded = loaded or {}
    if (found := ours.get(name) or loaded.get(name)) is not None:
        return found
    points = installed(group)
    if name in points:
        return points[name].load()
    raise UsageError(f"no {kind} {name!r}", fix=nearest(name, [*ours, *loaded, *points]))
