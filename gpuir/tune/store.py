"""A store of what searches and measurements found: a file of SQLite.

A row is one tile of one kernel on one target, by one version of the predictor. What is found is
written in one transaction, so a process may be killed at any moment and several may share a store.
Measured seconds do not hang on who predicted: they stay when the predictor changes.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import Any, Self

from gpuir.cost.generated import BY
from gpuir.files import note_input
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Tile
from gpuir.tune.kernels import Kernel
from gpuir.tune.keys import kernel_key, kernel_text, target_key, tile_in
from gpuir.tune.search import Ranking
from gpuir.tune.space import Ranked, device_of

FORM = 1  # of the tables
MARK = 0x67707569  # "gpui", in the file's head: whose database it is
WAIT_S = 60.0  # for other processes, each of which writes for milliseconds

TABLES = """
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
"""


@dataclass(frozen=True)
class Result:
    """A tile of a kernel, by its text, on a target: what it is predicted to take, between what 80 %
    of them lie, and what was measured, in seconds."""

    kernel: str
    kernel_text: str
    tile: Tile
    time_s: float
    interval_s: tuple[float, float]
    measured_s: float | None


class Store:
    """The results in a file, which is made where there is none. Close it, or use `with`.

    UsageError where the file is no store, or one of a later gpuir. `predictor` is the version that
    predictions are read and written of; those of others stay in the file and are not read.
    """

    def __init__(self, path: str | PathLike[str], predictor: str = BY):
        self.path, self.predictor = fspath(path), predictor
        note_input(self.path)
        with self._said():
            self._db = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
        try:
            with self._said():
                self._open()
        except UsageError:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    # -- rankings

    def ranking(self, kernel: Kernel, search: str) -> Ranking | None:
        """What a search, with its options as text, found for a kernel before, if it did."""
        where = (*self._place(kernel), self.predictor)
        row = self._one(
            "select by, tried, legal, count, tiles from searches"
            " where kernel = ? and target = ? and predictor = ? and search = ?",
            (*where, search),
        )
        if row is None:
            return None
        by, tried, legal, count, tiles = row
        found = {
            text: Ranked(tile_in(text), time_s, (low_s, high_s))
            for text, time_s, low_s, high_s in self._all(
                "select tile, predicted_s, low_s, high_s from results"
                " where kernel = ? and target = ? and predictor = ?",
                where,
            )
        }
        best = tuple(found[text] for text in tiles.split("\n") if text in found)
        return Ranking(best, by, tried, legal, count)

    def keep_ranking(self, kernel: Kernel, search: str, ranking: Ranking) -> None:
        """Keeps what a search found."""
        place = (*self._place(kernel), self.predictor)
        tiles = "\n".join(x.tile.settings for x in ranking.best)
        with self._writing():
            for x in ranking.best:
                self._keep(kernel, x)
            self._db.execute(
                "insert or replace into searches values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(*place, search, ranking.by),
                    *(ranking.tried, ranking.legal, ranking.count, tiles, _now()),
                ),
            )

    # -- measurements

    def keep_measured(self, kernel: Kernel, predicted: Ranked, seconds: float) -> None:
        """Keeps what a tile was measured to take beside what was predicted."""
        place = (*self._place(kernel), self.predictor, predicted.tile.settings)
        with self._writing():
            self._keep(kernel, predicted)
            self._db.execute(
                "update results set measured_s = ?, at = ?"
                " where kernel = ? and target = ? and predictor = ? and tile = ?",
                (seconds, _now(), *place),
            )

    def measured(self, kernel: Kernel) -> dict[Tile, float]:
        """What tiles of a kernel were measured to take, whoever predicted them; the last counts."""
        rows = self._all(
            "select tile, measured_s from results"
            " where kernel = ? and target = ? and measured_s is not null order by at, predictor",
            self._place(kernel),
        )
        return {tile_in(text): seconds for text, seconds in rows}

    def results(self, target: str) -> list[Result]:
        """What this version of the predictor is known to have said of a target, by its key, in the
        order in which it was found."""
        rows = self._all(
            "select kernel, kernel_text, tile, predicted_s, low_s, high_s, measured_s from results"
            " where target = ? and predictor = ? order by at, kernel, tile",
            (target, self.predictor),
        )
        return [
            Result(key, text, tile_in(tile), time_s, (low_s, high_s), measured_s)
            for key, text, tile, time_s, low_s, high_s, measured_s in rows
        ]

    # -- what others wrote

    def others(self) -> dict[str, int]:
        """How many predictions are by other versions of the predictor, by version."""
        rows = self._all(
            "select predictor, count(*) from results where predictor <> ? group by predictor"
            " order by predictor",
            (self.predictor,),
        )
        return dict(rows)

    def forget_others(self) -> None:
        """Takes out what other versions of the predictor said. Rows with measurements stay."""
        with self._writing():
            self._db.execute(
                "delete from results where predictor <> ? and measured_s is null", (self.predictor,)
            )
            self._db.execute("delete from searches where predictor <> ?", (self.predictor,))

    # -- the file

    def _place(self, kernel: Kernel) -> tuple[str, str]:
        return kernel_key(kernel.work), target_key(device_of(kernel, ""))

    def _keep(self, kernel: Kernel, x: Ranked) -> None:
        import gpuir

        target = device_of(kernel, "")
        self._db.execute(
            "insert into results (kernel, kernel_text, target, target_name, predictor, gpuir, tile,"
            " predicted_s, low_s, high_s, at) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " on conflict do update set predicted_s = excluded.predicted_s,"
            " low_s = excluded.low_s, high_s = excluded.high_s, gpuir = excluded.gpuir",
            (
                *(kernel_key(kernel.work), kernel_text(kernel.work)),
                *(target_key(target), target.name, self.predictor, gpuir.__version__),
                *(x.tile.settings, x.time_s, *x.interval_s, _now()),
            ),
        )

    def _open(self) -> None:
        """Makes the tables where there are none. Several processes may do so at once."""
        (tables,) = self._must("select count(*) from sqlite_master")
        (mark,) = self._must("pragma application_id")
        if tables and mark != MARK:
            raise UsageError(
                "the file is a database of another program",
                where=self.path,
                fix="use another file for the store, or a file that does not exist yet",
            )
        (form,) = self._must("pragma user_version")
        if form > FORM:
            raise UsageError(
                "the store was made by a later version of gpuir",
                where=self.path,
                expected=f"format version {FORM} or before",
                found=f"form {form}",
                fix="install a newer gpuir, or use another file",
            )
        self._db.execute("pragma synchronous = full")  # a transaction survives a loss of power too
        self._patiently("pragma journal_mode = wal")
        with self._writing():
            for statement in TABLES.split(";"):
                self._db.execute(statement)
            self._db.execute(f"pragma application_id = {MARK}")
            self._db.execute(f"pragma user_version = {FORM}")

    def _patiently(self, statement: str) -> None:
        """SQLite does not wait for others before it changes the kind of journal."""
        until = time.monotonic() + WAIT_S
        while True:
            try:
                self._db.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    @contextmanager
    def _writing(self) -> Generator[None]:
        """One transaction, whole or not at all."""
        with self._said():
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")

    def _all(self, query: str, values: Iterable[Any] = ()) -> list[Any]:
        with self._said():
            return self._db.execute(query, tuple(values)).fetchall()

    def _one(self, query: str, values: Iterable[Any] = ()) -> Any:
        return next(iter(self._all(query, values)), None)

    def _must(self, query: str) -> Any:
        return self._db.execute(query).fetchone()

    @contextmanager
    def _said(self) -> Generator[None]:
        """What SQLite has against the file, as a UsageError."""
        try:
            yield
        except sqlite3.Error as error:
            broken = isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error)
            locked = "locked" in str(error)
            raise UsageError(
                "gpuir cannot use the store",
                where=self.path,
                expected="an SQLite file, or a file that does not exist yet",
                found=str(error),
                fix="use another file for the store"
                if broken
                else "another process has locked the store for a minute: wait for it, or end it"
                if locked
                else "use a file in a folder in which you can write",
            ) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
