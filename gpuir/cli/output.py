"""Where text goes: stdout for results, a file whole or not at all, stderr for all else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import click


def emit(text: str | bytes, path: str | None = None) -> None:
    """The result of a command, to stdout or to a file."""
    if path is not None and path != "-":
        write(path, text)
        return
    from gpuir.ir.errors import UsageError

    if not sys.stdout:  # closed by whoever started us
        raise UsageError("there is no stdout to write to", fix="-o FILE")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = None  # Python would try once more at exit
        raise UsageError("cannot write to stdout", found=str(error.strerror)) from error


def write(path: str, text: str | bytes) -> None:
    """The file holds `text`, or what it held before if anything goes wrong on the way.

    A link stays one, and a file keeps its permissions. A device or a pipe (`/dev/null`) has
    nothing to lose: it is written to, never replaced.
    """
    from gpuir.ir.errors import UsageError

    target = Path(path)
    data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as stream:
                stream.write(data)
        else:
            _replace(target.resolve(), data)
    except OSError as error:
        raise UsageError("cannot write the file", where=path, found=str(error.strerror)) from error


def check_ahead(path: str | None) -> None:
    """UsageError where `write` is bound to fail: said before minutes of work, not after."""
    from gpuir.ir.errors import UsageError

    if not path or path == "-":
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise UsageError(
            "there is no such folder to write to", where=path, fix=f"mkdir -p {folder}"
        )
    if Path(path).is_dir():
        raise UsageError("cannot write the file", where=path, found="Is a directory")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise UsageError("cannot write the file", where=path, found="Permission denied")


def _replace(target: Path, data: bytes) -> None:
    part = target.with_name(f".gpuir.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        with suppress(FileNotFoundError):
            part.chmod(target.stat().st_mode & 0o7777)
        os.replace(part, target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def note(text: str) -> None:
    """A line or more for the user; what a model's names hold cannot move the cursor."""
    lines = ("".join(c if c.isprintable() else "?" for c in x) for x in text.split("\n"))
    click.echo(text if text.isprintable() else "\n".join(lines), err=True)


def warn(text: str) -> None:
    note(f"warning: {text}")


@contextmanager
def progress(length: int, label: str) -> Generator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal; call what it gives after each of about `length`
    steps."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield lambda: bar.update(1)
        bar.update(length - bar.pos)
