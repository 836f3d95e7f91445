"""What was computed, kept in a file of SQLite: what tuners found, programs and costs of design
spaces, plans that were simulated, models that were loaded.

What belongs together is written in one transaction, so a process may be killed at any moment and
several may share a store. An entry's key says what it depends on; what all entries of a kind depend
on (the version of gpuir, of a predictor) the file says once.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from os import PathLike, fspath
from typing import Any, Self

from gpuir.files import note_input
from gpuir.ir.errors import UsageError

FORM = 1  # of the tables
MARK = 0x67707569  # "gpui", in the file's head: whose database it is
WAIT_S = 60.0  # for other processes, each of which writes for milliseconds
AT_ONCE = 500  # keys of one query

TABLES = """
create table if not exists facts (
  kind text, name text, value text,
  primary key (kind, name)
) without rowid;
create table if not exists results (
  kernel text, kernel_text text, target text, target_name text, predictor text, gpuir text,
  tile text, predicted_s real, low_s real, high_s real, measured_s real, at text,
  primary key (kernel, target, predictor, tile)
) without rowid;
create table if not exists searches (
  kernel text, target text, predictor text, search text,
  by text, tried integer, legal integer, count integer, tiles text, at text,
  primary key (kernel, target, predictor, search)
) without rowid;
create table if not exists programs (key text primary key, text text);
create table if not exists costs (
  work text, devices text, parts blob,
  primary key (work, devices)
) without rowid;
create table if not exists plans (name text primary key, plan text);
create table if not exists models (
  key text primary key, model text, what text, needs text, record blob, bytes integer, used_s real
);
"""


def digest(*texts: str) -> str:
    """A key of what these texts say, none of which has the separator."""
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:32]


@cache
def version() -> str:
    """The version of gpuir that computes."""
    from importlib.metadata import version as of

    return of("gpuir")


class Store:
    """The entries in a file, which is made where there is none. Close it, or use `with`.

    UsageError where the file is no store, is damaged, or was made by a later gpuir.
    """

    def __init__(self, path: str | PathLike[str], wait_s: float = WAIT_S):
        self.path, self.wait_s = fspath(path), wait_s
        note_input(self.path)
        with self._said():
            self._db = sqlite3.connect(self.path, timeout=wait_s, isolation_level=None)
        try:
            with self._said():
                self._open()
        except UsageError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def rests_on(self, kind: str, facts: Mapping[str, str]) -> dict[str, str]:
        """What the entries of a kind depend on: these facts, if there are no others yet."""
        with self.writing():
            there = dict(self.all("select name, value from facts where kind = ?", (kind,)))
            if not there:
                self._put("facts", ((kind, *fact) for fact in facts.items()))
        return there or dict(facts)

    def all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """The rows that a query finds."""
        with self._said():
            return self._db.execute(query, values).fetchall()

    def among(self, query: str, keys: Sequence[str]) -> Iterator[Any]:
        """The rows that a query, which ends with the name of a column, finds of many keys."""
        for i in range(0, len(keys), AT_ONCE):
            some = keys[i : i + AT_ONCE]
            yield from self.all(f"{query} in ({', '.join('?' * len(some))})", some)

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Adds entries; those that are there stay as they are."""
        with self.writing():
            self._put(table, rows)

    def _put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        for row in rows:
            self.change(f"insert or ignore into {table} values ({', '.join('?' * len(row))})", row)

    def change(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Changes entries, inside `writing`."""
        self._db.execute(statement, values)

    @contextmanager
    def writing(self) -> Generator[None]:
        """One transaction, whole or not at all."""
        with self._said():
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")

    # -- the file

    def _open(self) -> None:
        """Makes the tables where there are none. Several processes may do so at once."""
        ((tables,),) = self.all("select count(*) from sqlite_master")
        ((mark,),) = self.all("pragma application_id")
        if tables and mark != MARK:
            raise UsageError(
                "the file is a database of another program",
                where=self.path,
                fix="use another file for the store, or a file that does not exist yet",
            )
        ((form,),) = self.all("pragma user_version")
        if form > FORM:
            raise UsageError(
                "the store was made by a later version of gpuir",
                where=self.path,
                expected=f"format version {FORM} or before",
                found=f"form {form}",
                fix="install a newer gpuir, or use another file",
            )
        self.change("pragma synchronous = full")  # a transaction survives a loss of power too
        self._patiently("pragma journal_mode = wal")
        with self.writing():
            for statement in TABLES.split(";"):
                self.change(statement)
            self.change(f"pragma application_id = {MARK}")
            self.change(f"pragma user_version = {FORM}")

    def _patiently(self, statement: str) -> None:
        """SQLite does not wait for others before it changes the kind of journal."""
        until = time.monotonic() + self.wait_s
        while True:
            try:
                self.change(statement)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _said(self) -> Generator[None]:
        """What SQLite has against the file, as a UsageError."""
        try:
            yield
        except sqlite3.Error as error:
            found = str(error)
            fix = "use a file in a folder in which you can write"
            if "not a database" in found or "malformed" in found:
                fix = "use another file for the store"
            elif "locked" in found:
                fix = "another process has locked the store for a minute: wait for it, or end it"
            raise UsageError(
                "gpuir cannot use the store",
                where=self.path,
                expected="an SQLite file, or a file that does not exist yet",
                found=found,
                fix=fix,
            ) from error
