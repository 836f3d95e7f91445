"""Every format by name: of any report, and of what `analyze` finds. Backends of third parties are
looked up when asked for."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from gpuir.plugins import LazyTable, find_named

if TYPE_CHECKING:
    from gpuir.backends.terminal import Terminal
    from gpuir.files import Folder
    from gpuir.report.answer import Answer
    from gpuir.report.table import Report

    Writer = Callable[[Report, Terminal], str | bytes]
    Backend = Callable[[Sequence[Answer], Terminal], str | bytes | Folder]

FORMATS: Mapping[str, Writer] = LazyTable(
    {
        "text": "gpuir.backends.terminal:text",
        "json": "gpuir.backends.structured:to_json",
        "csv": "gpuir.backends.structured:to_csv",
        "markdown": "gpuir.backends.markdown:markdown",
        "html": "gpuir.backends.html.plain:html",
        "parquet": "gpuir.backends.parquet:to_parquet",
    }
)


def _of_runs(form: str) -> Backend:
    """The report of `analyze` in a format of any report."""

    def write(answers: Sequence[Answer], layout: Terminal) -> str | bytes:
        from gpuir.backends.analysis import analysis_report

        return FORMATS[form](analysis_report(answers, layout), layout)

    return write


OF_RUNS: Mapping[str, Backend] = LazyTable(  # what analyze alone has; html is a page of charts
    {
        "html": "gpuir.backends.html.page:html",
        "roofline": "gpuir.backends.roofline:roofline",
        "trace": "gpuir.backends.trace:trace",
        "ir": "gpuir.backends.texts:ir",
        "schedule": "gpuir.backends.texts:schedule",
        "chakra": "gpuir.backends.chakra.traces:chakra",
    }
)
BACKENDS: Mapping[str, Backend] = ChainMap(
    cast(Any, OF_RUNS), {form: _of_runs(form) for form in FORMATS}
)
FOLDERS = ("chakra",)  # formats that fill a folder


def listed() -> str:
    """Our formats, for the help of a command."""
    return ", ".join(f"{name} (a folder)" if name in FOLDERS else name for name in BACKENDS)


def find_backend(name: str, loaded: Mapping[str, Backend] | None = None) -> Backend:
    """The backend of that name: ours, a loaded module's, or an entry point's of
    `gpuir.backends`."""
    return find_named(name, BACKENDS, loaded, kind="format", group="backends")
