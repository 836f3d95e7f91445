"""A user's files: read as text, JSON and TOML, with errors that say which one it is, and why not;
written whole or not at all, and never over what was read."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpuir.ir.errors import GpuirError, UsageError

LARGEST_TEXT = 64 << 20  # bytes; what is made of a text takes some fifty times as many
STALE_S = 3600  # no write takes so long: a part as old was left by a process that was killed

_read: ContextVar[dict[tuple[int, int], str] | None] = ContextVar("read", default=None)
_heard: ContextVar[list[str] | None] = ContextVar("heard", default=None)


@contextmanager
def noting_inputs() -> Generator[None]:
    """As long as it lasts, `write_whole` refuses to replace what `note_input` is told of."""
    before = _read.set({})
    try:
        yield
    finally:
        _read.reset(before)


@contextmanager
def hearing_inputs() -> Generator[list[str]]:
    """The paths that `note_input` is told of meanwhile, whether there is a file or not."""
    heard: list[str] = []
    before = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(before)


def note_input(path: str | Path) -> None:
    """This file is read, or belongs to one that is, under whatever name."""
    if (heard := _heard.get()) is not None and str(path):
        heard.append(str(path))
    files = _read.get()
    if files is not None and (place := _place(path)):
        files[place] = str(path)


def input_at(path: str | Path) -> str | None:
    """The name under which the file at `path` was read, if it was."""
    place = _place(path)
    return (_read.get() or {}).get(place) if place else None


def _place(path: str | Path) -> tuple[int, int] | None:
    """What tells a regular file from others, however it is linked to."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def write_whole(path: str | Path, data: bytes) -> None:
    """The file holds `data`, or what it held before if anything goes wrong on the way.

    A link stays one, and a file keeps its permissions. A device or a pipe (`/dev/null`) has nothing
    to lose: it is written to, never replaced. UsageError where it cannot be written, or is one of
    the files that were read.
    """
    if own := input_at(path):
        raise UsageError(
            "the output file is also an input",
            where=str(path),
            found=f"{own} was read, and it is the same file" if own != str(path) else "",
            fix="write to another file",
        )
    target = os.path.realpath(path)
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            with open(target, "wb") as stream:
                stream.write(data)
        else:
            _replace(target, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "choose a file elsewhere"
        raise UsageError(
            "cannot write the file", where=str(path), found=reason, fix=fix or "check the path"
        ) from error


@dataclass(frozen=True)
class Folder:
    """What one file cannot hold: files under their names, made as they are asked for."""

    files: Iterable[tuple[str, bytes]]


def write_folder(path: str | Path, folder: Folder) -> None:
    """There is a folder with these files and no other, or what there was before if anything goes
    wrong on the way. A folder that is there is replaced if it has files of these names alone.
    UsageError where it has others, or cannot be written."""
    target = os.path.realpath(path)
    part = os.path.join(os.path.dirname(target), f".gpuir.{os.getpid()}.part")
    try:
        os.mkdir(part)
        for name, data in folder.files:
            with open(os.path.join(part, name), "wb") as stream:
                stream.write(data)
        _replace_folder(target, part)
    except OSError as error:
        raise UsageError(
            "cannot write the folder",
            where=str(path),
            found=error.strerror or str(error),
            fix="choose a folder elsewhere",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _replace_folder(target: str, part: str) -> None:
    """A folder that is there keeps its place until the new one can take it."""
    if not os.path.exists(target):
        os.rename(part, target)
        return
    others = sorted({*os.listdir(target)} - {*os.listdir(part)})
    if others:
        raise UsageError(
            "the folder contains other files",
            where=target,
            found=", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else ""),
            fix="choose another folder, or empty it",
        )
    old = f"{part}.old"
    os.rename(target, old)
    try:
        os.rename(part, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _replace(target: str, data: bytes) -> None:
    """Written under no name where the system can do that (Linux), so that a process which is killed
    leaves nothing; then named, and renamed where there is a file already."""
    folder = os.path.dirname(target)
    part = os.path.join(folder, f".gpuir.{os.getpid()}.part")
    descriptor, named = _opened(folder, part)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            with suppress(FileNotFoundError):
                os.fchmod(descriptor, os.stat(target).st_mode & 0o7777)
            if not named:
                _link(descriptor, part)
        os.replace(part, target)
    finally:
        with suppress(OSError):
            os.unlink(part)


def _opened(folder: str, part: str) -> tuple[int, bool]:
    """A new file to write to, and whether it has the name already; parts that killed processes left
    are cleared away then."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # a file system that has no files without names
            return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), False
    for old in Path(folder).glob(".gpuir.*.part"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > STALE_S:
                old.unlink()
    return os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666), True


def _link(descriptor: int, part: str) -> None:
    """Gives a file without a name this one, as `man 2 open` has it."""
    with suppress(FileNotFoundError):
        os.unlink(part)  # of a process that had our number
    root = os.open("/", os.O_RDONLY)  # or Python would call link, which does not follow
    try:
        os.link(f"/proc/self/fd/{descriptor}", part, src_dir_fd=root, follow_symlinks=True)
    finally:
        os.close(root)


def read_text(
    path: str | Path, what: str, kind: type[GpuirError] = UsageError, fix: str = ""
) -> str:
    """The text of a file, without a byte order mark. `what` it is, as in `the report`, goes into
    the error of this `kind` where there is none to read, or more than `LARGEST_TEXT` bytes."""
    note_input(path)
    try:
        # a pipe that nobody writes to yet would hold up who opens it otherwise
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(opened, "rb") as stream:
            os.set_blocking(opened, True)
            data = bounded(stream, path, what, kind)
            if not data and stat.S_ISFIFO(os.fstat(opened).st_mode):
                raise kind(f"cannot read {what}", where=str(path), found="a pipe with no writer")
    except (OSError, ValueError) as error:  # no path has a null in it
        reason = getattr(error, "strerror", None) or str(error)
        raise kind(
            f"cannot read {what}", where=str(path), found=reason, fix=fix or "check the path"
        ) from error
    return decoded(data, path, kind)


def bounded(
    stream: BinaryIO, path: str | Path, what: str, kind: type[GpuirError] = UsageError
) -> bytes:
    """All that a stream gives, if that is no more than `LARGEST_TEXT` bytes: some never end."""
    data = stream.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise kind(
            f"{what} is too large",
            where=str(path),
            expected=f"a text of at most {LARGEST_TEXT >> 20} MiB",
            found="a larger file",
        )
    return data


def decoded(data: bytes, path: str | Path, kind: type[GpuirError] = UsageError) -> str:
    """What bytes say as UTF-8; an error of this `kind` that names the file where they do not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise kind(
            "not a text file", where=str(path), found=str(error), fix="save it as UTF-8"
        ) from error


def read_json(
    path: str | Path, what: str, kind: type[GpuirError] = UsageError, fix: str = ""
) -> object:
    """What a JSON file holds; errors as in `read_text`, and where it is no JSON."""
    text = read_text(path, what, kind, fix)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        fix = "correct it there"
        raise kind("not a JSON file", where=str(path), found=str(error), fix=fix) from error


def read_toml(
    path: str | Path, what: str, kind: type[GpuirError] = UsageError, fix: str = ""
) -> dict[str, Any]:
    """The tables of a TOML file; errors as in `read_text`, and where it is no TOML."""
    import tomllib

    text = read_text(path, what, kind, fix)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found, where = str(error), str(path)
        if place := re.search(r" ?\(at line (\d+), column (\d+)\)", found):
            line, column = int(place[1]), int(place[2])
            shown = text.split("\n")[line - 1]
            found = f"{shown}\n{' ' * (column - 1)}^ {found[: place.start()]}"
            where = f"{path}:{line}"
        raise kind("not valid TOML", where=where, found=found, fix="correct this line") from error
