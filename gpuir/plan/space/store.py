"""What sweeps have computed, kept in one SQLite file: programs, and what kernels cost.

Keys are digests of all that an answer depends on: the model's bytes, sizes, passes and profile; a
kernel's work; the numbers of the devices. What they do not hold, versions of gpuir, of its
predictor and of what training found, the file says once, and is refused under others.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from gpuir.ir.errors import UsageError

SCHEMA = 1
AT_ONCE = 500  # keys of one query


def digest(*texts: str) -> str:
    """A key of what these texts say, none of which has the separator."""
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:32]


class Store:
    """A file of programs and costs. One process at a time writes it."""

    def __init__(self, path: str | Path, versions: Mapping[str, str]):
        """UsageError where the file is no store, or of other versions."""
        self.path = str(path)
        self.versions = {"schema": str(SCHEMA), **versions}
        try:
            self.db = sqlite3.connect(self.path, isolation_level=None)
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        try:
            self.db.execute("pragma journal_mode=wal")
            self.db.execute("pragma synchronous=normal")  # whole after a kill; a cache besides
            self.db.executescript(
                "create table if not exists versions (name text primary key, value text);"
                "create table if not exists programs (key text primary key, text text);"
                "create table if not exists costs (work text, devices text, parts blob,"
                " primary key (work, devices)) without rowid;"
            )
            found = dict(self.db.execute("select name, value from versions"))
        except sqlite3.Error as error:
            self.close()
            raise self._unusable(error) from error
        if not found:
            rows = self.versions.items()
            self.db.executemany("insert or ignore into versions values (?, ?)", rows)
        elif found != self.versions:
            self.close()
            raise UsageError(
                "the store was made by another version",
                where=self.path,
                expected=_listed(self.versions),
                found=_listed(found),
                fix="use another --store, or delete the file: gpuir can compute its content again",
            )

    def _unusable(self, error: sqlite3.Error) -> UsageError:
        return UsageError(
            "gpuir cannot use the store",
            where=self.path,
            found=str(error),
            fix="use another --store, or delete the file",
        )

    def programs(self, keys: Sequence[str]) -> dict[str, str]:
        """The texts of the programs that are there, by key."""
        return dict(self._found("select key, text from programs where key in", keys))

    def keep_programs(self, texts: Mapping[str, str]) -> None:
        self._keep("insert or ignore into programs values (?, ?)", texts.items())

    def costs(self, works: Sequence[str], devices: str) -> dict[str, bytes]:
        """The parts of the costs of kernels on these devices that are there."""
        query = f"select work, parts from costs where devices = '{devices}' and work in"
        return dict(self._found(query, works))

    def keep_costs(self, devices: str, parts: Mapping[str, bytes]) -> None:
        rows = ((work, devices, blob) for work, blob in parts.items())
        self._keep("insert or ignore into costs values (?, ?, ?)", rows)

    def _found(self, query: str, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
        for i in range(0, len(keys), AT_ONCE):
            some = keys[i : i + AT_ONCE]
            with closing(self.db.execute(f"{query} ({','.join('?' * len(some))})", some)) as rows:
                yield from rows

    def _keep(self, query: str, rows: Iterable[tuple[object, ...]]) -> None:
        self.db.execute("begin")
        self.db.executemany(query, rows)
        self.db.execute("commit")

    def close(self) -> None:
        self.db.close()


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())
