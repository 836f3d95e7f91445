"""Where text goes: stdout for results, a file whole or not at all, stderr for all else."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from gpuir.run.terms import sources

if TYPE_CHECKING:
    from gpuir.backends.terminal import Terminal
    from gpuir.files import Folder
    from gpuir.report.table import Report

PIPED_WIDTH = 120  # columns
ELSEWHERE = "name one elsewhere"


def emit(text: str | bytes | Folder, path: str | None = None) -> None:
    """The result of a command, to stdout or to a file; a folder has to be named."""
    if not isinstance(text, str | bytes):
        from gpuir.files import write_folder

        _check_named(path)
        write_folder(path or "", text)
        return
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


def show(report: Report, format: str, width: int | None, output: str | None) -> None:
    """A report as `--format` says, to where `--output` says."""
    from gpuir.backends.table import FORMATS

    emit(FORMATS[format](report, layout(width, output)), output)


def check_binary(format: str | None, path: str | None, fix: str = "-o FILE.parquet") -> None:
    """UsageError for bytes that would go to a terminal."""
    if format == "parquet" and path in (None, "-") and sys.stdout and sys.stdout.isatty():
        from gpuir.ir.errors import UsageError

        raise UsageError("parquet is not text, and stdout is a terminal", fix=fix)


def write(path: str, text: str | bytes) -> None:
    """The file holds `text`, or what it held before if anything goes wrong on the way."""
    from gpuir.files import write_whole

    write_whole(path, text if isinstance(text, bytes) else text.encode("utf-8", "replace"))


def _check_named(path: str | None) -> None:
    from gpuir.ir.errors import UsageError

    if not path or path == "-":
        raise UsageError("this format writes a folder", fix="-o FOLDER")


def check_ahead(path: str | None, folder: bool = False) -> None:
    """UsageError where `write`, or `write_folder`, is bound to fail, or would take the place of a
    file that the command names: said before minutes of work, not after."""
    from gpuir.ir.errors import UsageError

    if folder:
        _check_named(path)
    if not path or path == "-":
        return
    parent = os.path.dirname(os.path.normpath(path) if folder else path) or "."
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        found = str(error.strerror)
        raise UsageError("cannot write the file", where=path, found=found, fix=ELSEWHERE) from error
    if not os.path.isdir(parent):
        raise UsageError(
            "there is no such folder to write to", where=path, fix=f"mkdir -p {parent}"
        )
    if mode is not None and stat.S_ISDIR(mode) != folder:
        found = "not a directory" if folder else "Is a directory"
        fix = "name a folder" if folder else "name a file in it, or another"
        raise UsageError("cannot write the file", where=path, found=found, fix=fix)
    if not os.access(parent if mode is None or folder else path, os.W_OK):
        raise UsageError(
            "cannot write the file", where=path, found="Permission denied", fix=ELSEWHERE
        )
    same = [x for x in _outputs() if os.path.realpath(x) == os.path.realpath(path)]
    if len(same) > 1 and (mode is None or stat.S_ISREG(mode)):
        raise UsageError(
            "two results would be written to one file",
            where=path,
            fix="give one of them another file",
        )
    if mode is not None and stat.S_ISREG(mode):
        for named in _named_files():
            if os.path.exists(named) and os.path.samefile(named, path):
                raise UsageError(
                    "the output file is also an input",
                    where=path,
                    found=f"{named} is the same file" if named != path else "",
                    fix="write to another file",
                )


# options that name what is written
OUTPUTS = ("output", "out", "page", "plot", "json_path", "resume", "store")


def _outputs() -> Iterator[str]:
    """What the options of the command name to be written."""
    context = click.get_current_context(silent=True)
    for name, value in context.params.items() if context else ():
        if name in OUTPUTS and value and str(value) != "-":
            yield str(value)


def _named_files() -> Iterator[str]:
    """What the arguments and options of the command may name a file with."""
    context = click.get_current_context(silent=True)
    for name, value in context.params.items() if context else ():
        values = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
        for text in values:
            if name not in OUTPUTS and isinstance(text, str | Path):
                for part in (*sources(str(text)), *str(text).split(",")):
                    yield from (part, part.removeprefix("hf:"), part.partition("+")[0])


LOG = logging.getLogger("gpuir")


class OnStderr(logging.Handler):
    """Log records as lines on stderr. What a model's names hold cannot move the cursor there."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        lines = ("".join(c if c.isprintable() else "?" for c in x) for x in text.split("\n"))
        click.echo(text if text.isprintable() else "\n".join(lines), err=True)


def listen(level: int = logging.INFO) -> None:
    """Shows what gpuir logs, from a level of `logging` on."""
    if not any(isinstance(h, OnStderr) for h in LOG.handlers):
        LOG.addHandler(OnStderr())
        LOG.propagate = False
    LOG.setLevel(level)


def note(text: str) -> None:
    """A line or more about the work that is going on."""
    LOG.info("%s", text)


def warn(text: str) -> None:
    LOG.warning("warning: %s", text)


def complain(text: str) -> None:
    """Why the command fails."""
    LOG.error("%s", text)


@contextmanager
def progress(length: int, label: str) -> Generator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal; call what it gives after each of about `length`
    steps."""
    if not sys.stderr or not sys.stderr.isatty():
        yield lambda: None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield lambda: bar.update(1)
        bar.update(length - bar.pos)


@contextmanager
def points_done(count: int) -> Generator[Callable[[int], None]]:
    """How many of so many points are there, how fast they come and when all will be, on stderr,
    where that is a terminal and rich is installed; call what it gives with points that are done."""
    from importlib.util import find_spec

    if not sys.stderr or not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("points", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("points", total=count)
        yield lambda n: bar.advance(task, n)


def layout(width: int | None, output: str | None = None) -> Terminal:
    """The terminal's width and colour; in a pipe or a file, a fixed width and none."""
    from gpuir.backends.terminal import Terminal

    terminal = bool(sys.stdout) and sys.stdout.isatty() and not output
    if width is None:
        width = shutil.get_terminal_size((PIPED_WIDTH, 0)).columns
        width = max(width, 40) if terminal or "COLUMNS" in os.environ else PIPED_WIDTH
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(width, color)
