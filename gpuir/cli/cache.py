"""`gpuir cache`: the models that are kept from one command to the next."""

from __future__ import annotations

import click

from gpuir.cli import options
from gpuir.cli.output import note, show


@click.command()
@click.option("--clear", is_flag=True, help="Delete them all.")
@options.formats()
@options.width
@options.output
def command(clear: bool, format: str, width: int | None, output: str | None) -> None:
    """List the models that are kept, or delete them.

    \b
    gpuir cache
    gpuir cache --clear
    """
    from gpuir.report.table import Column, Report, Table
    from gpuir.run.keeping import cache_path, cleared, entries

    path = cache_path()
    if clear:
        if path:
            cleared(path)
        return
    kept = entries(path)
    table = Table(
        kept,
        (
            Column("model", field="model", least=20, elided=True),
            Column("what", field="what"),
            Column("size", "B", "size_bytes"),
            Column("last used", field="used"),
        ),
    )
    show(
        Report("gpuir.cache/1", lambda: [table], lambda: {"entries": table}), format, width, output
    )
    if not kept:
        note(f"no models are kept in {path}" if path else "no models are kept")
