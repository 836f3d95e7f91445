"""Every backend by name; those of third parties are looked up when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpuir.backends import json_csv, roofline, terminal, texts, trace
from gpuir.backends.html.page import html
from gpuir.backends.terminal import Layout
from gpuir.plugins import find_named
from gpuir.report.summary import Summary

Backend = Callable[[Sequence[Summary], Layout], str | bytes]

BACKENDS: dict[str, Backend] = {
    "table": terminal.report,
    "json": json_csv.json_text,
    "html": html,
    "csv": json_csv.csv_text,
    "roofline": roofline.roofline,
    "ir": texts.ir,
    "schedule": texts.schedule,
    "trace": trace.trace,
}


def find_backend(name: str, loaded: Mapping[str, Backend] | None = None) -> Backend:
    """The backend of that name: ours, a loaded module's, or an entry point's of
    `gpuir.backends`."""
    return find_named(name, BACKENDS, loaded, kind="format", group="backends")
