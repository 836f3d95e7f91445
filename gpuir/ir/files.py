"""A user's files as text, JSON and TOML, with errors that say which one it is, and why not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gpuir.ir.errors import GpuirError, UsageError


def read_text(
    path: str | Path, what: str, kind: type[GpuirError] = UsageError, fix: str = ""
) -> str:
    """The text of a file, without a byte order mark. `what` it is, as in `the report`, goes into
    the error of this `kind` where there is none to read."""
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # no path has a null in it
        found = getattr(error, "strerror", None) or str(error)
        raise kind(f"cannot read {what}", where=str(path), found=found, fix=fix) from error
    return decoded(data, path, kind)


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
        raise kind("not a JSON file", where=str(path), found=str(error)) from error


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
