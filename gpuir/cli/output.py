"""Where text goes: stdout for results, a file whole or not at all, stderr for all else."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click


def emit(text: str, path: str | None = None) -> None:
    """The result of a command, to stdout or to a file."""
    if path is not None and path != "-":
        write(path, text)
        return
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def write(path: str, text: str) -> None:
    """The file holds `text`, or what it held before if anything goes wrong on the way."""
    from gpuir.ir.errors import UsageError

    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")
        os.replace(part, target)
    except OSError as error:
        raise UsageError("cannot write the file", where=path, found=str(error.strerror)) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def note(text: str) -> None:
    click.echo(text, err=True)


def warn(text: str) -> None:
    note(f"warning: {text}")
