"""Models that were loaded and lowered before, kept in the user's cache folder.

An entry says of what it was made: its key has the options, the versions of all that is installed
and gpuir's own files, and beside it are the files that were read, with what they held. Where one of
these is another, the model is loaded anew. What cannot be read or written costs time, never the
answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Self, Unpack, cast

from gpuir.files import hearing_inputs, note_input
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.records import FORM, NotWritten, read, written
from gpuir.passes.manager import Pipeline
from gpuir.run.loading import LoadOptions, load
from gpuir.store import Store, digest
from gpuir.targets.profile import load_profile, profile_of
from gpuir.targets.recipe import load_recipe
from gpuir.targets.spec import spec_folder

MOST_BYTES = 256 << 20  # of all entries: the least recently used ones go
WAIT_S = 2.0  # for other processes
DIGESTED = 64 << 20  # bytes of a file whose content counts; of a larger one its dates do
REFRESHED_S = 3600  # an entry that was used so long ago is marked as used again
OURS = ("onnx", "pt2", "json")  # suffixes of models that are kept
COLUMNS = "key, model, what, needs, record, bytes, used_s"
VARIABLES = ("TORCH", "PYTORCH", "TRANSFORMERS", "HF_", "ONNX", "GPUIR", "USE_")
LOG = logging.getLogger("gpuir.run.keeping")

Needs = list[tuple[str, Any]]  # files that were read, and what told them from others


@dataclass
class ModelCache:
    """The entries in a file, which is opened when one is asked for. Use it with `with`."""

    path: str
    store: Store | None = None
    graphs: dict[int, tuple[str, Graph]] = field(default_factory=dict[int, tuple[str, Graph]])

    def load(
        self,
        model: str,
        *,
        warn: Callable[[str], None],
        profile: str | None = None,
        tf32: bool | None = None,
        **options: Unpack[LoadOptions],
    ) -> Graph:
        """As `gpuir.load`, which runs where there is no entry."""
        plain = cast("Mapping[str, Any]", options)
        key = _key_of_load(model, profile, tf32, plain)
        store = self._opened() if key else None
        if key is None or store is None:
            return load(model, warn=warn, profile=profile, tf32=tf32, **options)
        if (found := _entry(store, key)) is not None:
            needs, (graph, warnings) = found
            for path, _ in needs:
                note_input(path)
        else:
            own, since = _own_files(model), time.time_ns()
            before = _states(own)
            said: list[str] = []
            with hearing_inputs() as heard:
                graph = load(model, warn=said.append, profile=profile, tf32=tf32, **options)
            needs, warnings = _states([*own, *heard]), tuple(said)
            if needs[: len(before)] == before and _are_older(needs, since):
                _put(store, (key, model, "graph"), needs, (graph, warnings))
        for text in warnings:
            warn(text)
        self.graphs[id(graph.nodes)] = digest(key, json.dumps(needs)), graph
        return graph

    def lowered(self, graph: Graph, steps: Pipeline) -> Graph:
        """What the passes make of a graph that was loaded here, under a profile."""
        key = self._key_of_passes(graph, steps)
        store = self._opened() if key else None
        if key is None or store is None:
            return steps.run(graph)
        if (found := _entry(store, key)) is not None:
            return found[1]
        made = steps.run(graph)
        _put(store, (key, graph.name, f"kernels under {graph.profile}"), [], made)
        return made

    def _key_of_passes(self, graph: Graph, steps: Pipeline) -> str | None:
        """Of a graph whose nodes are those of one that was loaded; None of another."""
        loaded = self.graphs.get(id(graph.nodes))
        if loaded is None or any(not type(p).__module__.startswith("gpuir.") for p in steps.passes):
            return None
        try:
            passes = [(type(p).__qualname__, p.name, *_parts(p)) for p in steps.passes]
            rest = written(replace(graph, nodes=()))
            return digest(loaded[0], json.dumps(passes), rest, repr(_parts(profile_of(graph))))
        except (NotWritten, TypeError):
            return None

    def _opened(self) -> Store | None:
        if self.store is None and self.path:
            self.store = _opened(self.path)
            self.path = self.path if self.store else ""  # it is not tried again
        return self.store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.store is not None:
            with suppress(sqlite3.Error):
                self.store.close()
        self.store, self.path = None, ""


# ---- the file ----------------------------------------------------------------------------------


def cache_path() -> str:
    """Where models are kept; empty where there is none, or none is wanted."""
    if os.environ.get("GPUIR_NO_CACHE"):
        return ""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # as the specification has it
        home = os.path.expanduser("~/.cache")
    return os.path.join(home, "gpuir", "models.sqlite") if os.path.isabs(home) else ""


def _opened(path: str) -> Store | None:
    """The store in a file. One that is none, or of another version, is made anew."""
    for again in (True, False):
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            store = Store(path, WAIT_S)
            store.change("pragma synchronous = normal")
            store.all(f"select {COLUMNS} from models limit 0")
            return store
        except UsageError as error:
            other = "no such column" in error.found
            if not again or (isinstance(error.__cause__, sqlite3.OperationalError) and not other):
                LOG.debug("no cache: %s", error)
                return None
            LOG.warning("warning: %s cannot be read, and is made anew", path)
            cleared(path)
        except (OSError, sqlite3.Error) as error:
            LOG.debug("no cache: %s", error)
            return None
    return None


def cleared(path: str) -> None:
    """Without the file, and what SQLite has beside it."""
    for end in ("", "-wal", "-shm", "-journal"):
        with suppress(OSError):
            os.unlink(path + end)


def _entry(store: Store, key: str) -> tuple[Needs, Any] | None:
    """What a key has, where the files that it was made of are as they were."""
    try:
        rows = store.all("select needs, record, used_s from models where key = ?", (key,))
        if not rows:
            return None
        text, record, used_s = rows[0]
        needs = [(path, state) for path, state in json.loads(text)]
        if needs != _states([path for path, _ in needs]):
            return None
        found = read(zlib.decompress(record).decode())
        if abs(time.time() - used_s) > REFRESHED_S:
            with store.writing():
                change = "update models set used_s = ? where key = ?"
                store.change(change, (time.time(), key))
        LOG.debug("read from the cache: %s", key)
        return needs, found
    except Exception as error:  # whatever stands there, the model can be loaded
        LOG.debug("the cache cannot be read: %s", error)
        return None


def _put(store: Store, named: tuple[str, str, str], needs: Needs, record: Any) -> None:
    """Keeps an entry; the least recently used ones go where there are too many."""
    try:
        data = zlib.compress(written(record).encode(), 1)
        if len(data) > MOST_BYTES // 4:
            return
        row = (*named, json.dumps(needs), data, len(data), time.time())
        with store.writing():
            store.change("delete from models where key = ?", named[:1])
            store.change("insert into models values (?, ?, ?, ?, ?, ?, ?)", row)
            total = 0
            for old, size in store.all("select key, bytes from models order by used_s desc"):
                total += size
                if total > MOST_BYTES:
                    store.change("delete from models where key = ?", (old,))
    except Exception as error:  # a disk that is full, a record that is not ours
        LOG.debug("not kept: %s", error)


@dataclass(frozen=True)
class CacheEntry:
    """What is kept of a model: its graph, or the kernels that a stack makes of it. `used_s` is when
    it was asked for last, within an hour."""

    model: str
    what: str
    size_bytes: int
    used_s: float

    @property
    def used(self) -> str:
        return datetime.fromtimestamp(self.used_s, UTC).isoformat(timespec="minutes")


def entries(path: str) -> list[CacheEntry]:
    """All that a file keeps, the last used first."""
    store = _opened(path) if path and os.path.exists(path) else None
    if store is None:
        return []
    with store:
        rows = store.all("select model, what, bytes, used_s from models order by used_s desc")
    return [CacheEntry(*row) for row in rows]


# ---- what an entry depends on ------------------------------------------------------------------


def _key_of_load(
    model: str, profile: str | None, tf32: bool | None, options: Mapping[str, Any]
) -> str | None:
    """None where the model is not kept: text, what Python code makes, or what a plug-in reads."""
    given = {name: x for name, x in options.items() if x not in (None, False, "") and x != {}}
    if {"args", "kwargs", "converters"} & given.keys() or not _is_kept(model):
        return None
    under: Any = None
    if given.get("train"):  # else what is loaded does not hang on the stack
        own = None if profile is None else _parts(load_profile(profile))
        under = repr((profile, tf32, own))
    recipe = given.get("recipe")
    try:
        asked = json.dumps([model, os.path.abspath(model), given, under])
    except (TypeError, ValueError):
        return None
    made = repr(_parts(load_recipe(recipe))) if recipe else ""
    return digest(str(FORM), environment(), asked, made)


def _is_kept(model: str) -> bool:
    """Whether it is a file of ours: an ONNX model, a saved torch program, a config."""
    path = model.removeprefix("hf:")
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, "config.json"))
    return os.path.isfile(path) and path.rpartition(".")[2] in OURS


def _own_files(model: str) -> list[str]:
    """Those that are the model, whether or not its loader says that it reads them."""
    path = os.path.abspath(model.removeprefix("hf:"))
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    if os.path.isdir(path) or os.path.basename(path) == "config.json":
        beside = sorted(str(p) for p in Path(folder).glob("*.json"))
        return list(dict.fromkeys([path, *beside]))
    return [path]


def _states(paths: list[str]) -> Needs:
    return [(p, _state(p)) for p in dict.fromkeys(map(os.path.abspath, paths))]


def _state(path: str) -> Any:
    """What tells a file from what may stand there at another time; None where there is none."""
    try:
        status = os.stat(path)
        if os.path.isdir(path):
            return sorted(os.listdir(path))
        if status.st_size <= DIGESTED:
            with open(path, "rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        times = status.st_mtime_ns, status.st_ctime_ns
        return [status.st_dev, status.st_ino, status.st_size, *times]
    except (OSError, ValueError):
        return None


def _are_older(needs: Needs, since_ns: int) -> bool:
    """Whether nobody has written to the files since then."""
    for path, _ in needs:
        with suppress(OSError, ValueError):
            if os.stat(path).st_mtime_ns >= since_ns:
                return False
    return True


@cache
def environment() -> str:
    """A digest of all that decides how a model is loaded, but for the model and the options."""
    variables = sorted(x for x in os.environ.items() if x[0].startswith(VARIABLES))
    own = [list(_dates(str(folder))) for folder in (Path(__file__).parents[1], spec_folder())]
    packages = [(path, sorted(_packages(path))) for path in sys.path]
    return digest(repr((sys.version, sys.platform, variables, own, packages)))


def _packages(folder: str) -> Iterator[str]:
    """The names of packages that are installed in a folder, with their versions."""
    with suppress(OSError):
        yield from (n for n in os.listdir(folder) if n.endswith((".dist-info", ".egg-info")))


def _dates(folder: str) -> Iterator[tuple[str, int, int]]:
    """Each file in a folder, its size and date."""
    with os.scandir(folder) as entries:
        for x in sorted(entries, key=lambda x: x.name):
            if x.is_dir():
                yield from () if x.name == "__pycache__" else _dates(x.path)
            else:
                yield x.path, x.stat().st_size, x.stat().st_mtime_ns


def _parts(x: Any) -> Any:
    """A record as plain values."""
    if is_dataclass(x):
        return [_parts(getattr(x, f.name)) for f in fields(x)]
    if isinstance(x, Mapping):
        return [[_parts(y) for y in row] for row in cast("Mapping[Any, Any]", x).items()]
    if isinstance(x, tuple):
        return [_parts(y) for y in cast("tuple[Any, ...]", x)]
    return x
