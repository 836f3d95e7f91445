"""A file of what was computed: what is kept, and what is said of files that are no store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpuir.ir.errors import UsageError
from gpuir.store import AT_ONCE, Store


def test_entries_of_all_kinds_share_a_file(tmp_path: Path):
    keys = [f"k{i}" for i in range(2 * AT_ONCE + 1)]
    with Store(tmp_path / "s.db") as store:
        store.put("programs", ((k, k.upper()) for k in keys))
        store.put("costs", [("k1", "devices", b"parts"), ("k1", "others", b"other parts")])
        store.put("plans", {"tp=2": "{}"}.items())
    with Store(tmp_path / "s.db") as store:
        found = dict(store.among("select key, text from programs where key", [*keys, "none"]))
        assert found == {k: k.upper() for k in keys}
        here = "select work, parts from costs where devices = 'devices' and work"
        assert dict(store.among(here, keys)) == {"k1": b"parts"}
        store.put("programs", [("k1", "another")])  # what is there stays
        assert store.all("select text from programs where key = ?", ("k1",)) == [("K1",)]


def test_what_entries_rest_on_is_said_once(tmp_path: Path):
    with Store(tmp_path / "s.db") as store:
        assert store.rests_on("space", {"predictor": "tile@1"}) == {"predictor": "tile@1"}
        assert store.rests_on("plan", {"gpuir": "1"}) == {"gpuir": "1"}
    with Store(tmp_path / "s.db") as store:
        assert store.rests_on("space", {"predictor": "tile@2"}) == {"predictor": "tile@1"}


def test_a_transaction_is_whole_or_not_at_all(tmp_path: Path):
    def rows():
        yield "a", "text"
        raise KeyError

    with Store(tmp_path / "s.db") as store:
        with pytest.raises(KeyError):
            store.put("programs", rows())
        assert store.all("select * from programs") == []


def test_a_damaged_file_is_refused(tmp_path: Path):
    path = tmp_path / "s.db"
    with Store(path) as store:
        store.put("programs", [("a", "text" * 10_000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cannot use the store") as caught, Store(path) as store:
        store.all("select * from programs")
    assert caught.value.fix == "use another file for the store"


def test_what_is_wrong_is_said(tmp_path: Path):
    (tmp_path / "text.db").write_text("no database, but long enough to have a head" * 10)
    with pytest.raises(UsageError, match=r"text\.db: gpuir cannot use the store"):
        Store(tmp_path / "text.db")
    with pytest.raises(UsageError, match="use a file in a folder in which you can write"):
        Store(tmp_path / "none" / "s.db")
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("create table mine (x)")
        other.commit()
    with pytest.raises(UsageError, match="the file is a database of another program"):
        Store(tmp_path / "other.db")
    with Store(tmp_path / "later.db"):
        pass
    with closing(sqlite3.connect(tmp_path / "later.db")) as later:
        later.execute("pragma user_version = 99")
        later.commit()
    with pytest.raises(UsageError, match="later version of gpuir"):
        Store(tmp_path / "later.db")
