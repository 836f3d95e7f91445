"""Every backend by name; those of third parties are looked up when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuir.plugins import Lazy, find_named

if TYPE_CHECKING:
    from gpuir.backends.terminal import Layout
    from gpuir.files import Folder
    from gpuir.report.summary import Summary

    Backend = Callable[[Sequence[Summary], Layout], str | bytes | Folder]

BACKENDS: Mapping[str, Backend] = Lazy(
    {
        "table": "gpuir.backends.terminal:report",
        "html": "gpuir.backends.html.page:html",
        "json": "gpuir.backends.json_csv:json_text",
        "csv": "gpuir.backends.json_csv:csv_text",
        "roofline": "gpuir.backends.roofline:roofline",
        "trace": "gpuir.backends.trace:trace",
        "ir": "gpuir.backends.texts:ir",
        "schedule": "gpuir.backends.texts:schedule",
        "chakra": "gpuir.backends.chakra.traces:chakra",
    }
)
FOLDERS = ("chakra",)  # formats that fill a folder


def listed() -> str:
    """Our formats, for the help of a command."""
    return ", ".join(f"{name} (a folder)" if name in FOLDERS else name for name in BACKENDS)


def find_backend(name: str, loaded: Mapping[str, Backend] | None = None) -> Backend:
    """The backend of that name: ours, a loaded module's, or an entry point's of
    `gpuir.backends`."""
    return find_named(name, BACKENDS, loaded, kind="format", group="backends")
