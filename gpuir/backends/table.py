"""Every backend by name; those of third parties are looked up when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpuir.backends import records, terminal, texts
from gpuir.backends.report import Summary
from gpuir.backends.terminal import Layout
from gpuir.ir.errors import UsageError, nearest

Backend = Callable[[Sequence[Summary], Layout], str]

BACKENDS: dict[str, Backend] = {
    "table": terminal.report,
    "json": records.json_text,
    "csv": records.csv_text,
    "ir": texts.ir,
    "schedule": texts.schedule,
}


def find_backend(name: str, loaded: Mapping[str, Backend] | None = None) -> Backend:
    """The backend of that name: ours, then of a module the user loaded, then an entry point's.

    Entry points are of the group `gpuir.backends`, their name the backend's.
    """
    loaded = loaded or {}
    if found := BACKENDS.get(name) or loaded.get(name):
        return found
    from importlib.metadata import entry_points  # slow to import, seldom needed

    installed = {e.name: e for e in entry_points(group="gpuir.backends")}
    if name in installed:
        return installed[name].load()
    raise UsageError(f"no format {name!r}", fix=nearest(name, [*BACKENDS, *loaded, *installed]))
