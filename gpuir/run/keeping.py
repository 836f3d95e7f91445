"""Models that were loaded and lowered before, kept in the user's cache folder.

What was loaded at two sizes is joined to a graph with expressions (`run.symbols`), from which the
model has any size between them and far beyond, without its frontend.

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
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self, Unpack, cast

from gpuir.files import hearing_inputs, note_input
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.records import FORM, read, written
from gpuir.ir.sizes import each_size, moved, recorded
from gpuir.passes.manager import Pipeline
from gpuir.run.loading import LoadOptions, load
from gpuir.run.symbols import APART, Point, Sampled, SymbolicGraph, UnlikeGraphs, is_between
from gpuir.store import Store, digest
from gpuir.targets.profile import load_profile, profile_of
from gpuir.targets.recipe import load_recipe
from gpuir.targets.spec import spec_folder

MOST_BYTES = 256 << 20  # of all entries: the least recently used ones go
WAIT_S = 2.0  # for other processes
DIGESTED = 8 << 20  # bytes of a file whose content counts; of a larger one its dates do
MOST_FAILED = 2  # times that graphs of several sizes may turn out not to tell others
MOST_POINTS = 16  # at which a model was loaded, that are kept
MOST_VARIANTS = 4  # of kernels: what passes decide by sizes
REFRESHED_S = 3600  # an entry that was used so long ago is marked as used again
OURS = ("onnx", "pt2", "json")  # suffixes of models that are kept
COLUMNS = "key, model, what, needs, record, bytes, used_s"
VARIABLES = ("TORCH", "PYTORCH", "TRANSFORMERS", "HF_", "ONNX", "GPUIR", "USE_")
LOG = logging.getLogger("gpuir.run.keeping")

Needs = list[tuple[str, Any]]  # files that were read, and what told them from others
Entry = tuple[Needs, Any]


@dataclass(frozen=True)
class KnownSizes:
    """Of a model and all options but its sizes: at which points it was loaded, and the keys of
    graphs that have all points between two."""

    points: tuple[Point, ...] = ()
    graphs: tuple[tuple[Point, Point, str], ...] = ()
    failed: int = 0

    def key(self, point: Point) -> str | None:
        """That of a graph which has a point."""
        found = (key for low, high, key in self.graphs if is_between(low, point, high))
        return next(found, None)

    def alike(self, point: Point) -> list[Point]:
        """Other points that are alike in what of them is 0 or 1, those first that differ in the
        fewest sizes."""
        found = [p for p in self.points if p != point and _kind(p) == _kind(point)]
        return sorted(found, key=lambda p: sum(p[name] != n for name, n in point.items()))


@dataclass
class ModelCache:
    """The entries in a file, which is opened when one is asked for. Use it with `with`. One that
    `joins` tells from the second size on what further ones are, which takes another load."""

    path: str
    joins: bool = True
    store: Store | None = None
    graphs: dict[int, KeptGraph] = field(default_factory=dict[int, "KeptGraph"])

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
        asked = AskedModel(model, profile, tf32, cast("Mapping[str, Any]", options))
        key = asked.key
        store = self._opened() if key else None
        if key is None or store is None:
            return load(model, warn=warn, profile=profile, tf32=tf32, **options)
        found = _entry(store, key) or _at_size(store, asked)
        if found is None:
            found, is_sure = asked.loaded(store)
            if self.joins and is_sure:
                _widen(store, asked, found)
        needs, (graph, warnings) = found
        for path, _ in needs:
            note_input(path)
        for text in warnings:
            warn(text)
        state, own = json.dumps(needs), _key_of_others(store, asked, needs)
        of = KeptGraph(graph, digest(key, state), asked.point, own, own and digest(own, state))
        self.graphs[id(graph.nodes)] = of
        return graph

    def lowered(self, graph: Graph, steps: Pipeline) -> Graph:
        """What the passes make of a graph that was loaded here, under a profile."""
        loaded = self.graphs.get(id(graph.nodes))
        passes = loaded and loaded.key_of(graph, steps)
        store = self._opened() if passes else None
        if loaded is None or not passes or store is None:
            return steps.run(graph)
        key, what = digest(loaded.key, passes), f"kernels under {graph.profile}"
        if (found := _entry(store, key)) is not None:
            return found[1]
        if (own := loaded.sizes) is not None:
            variants = _Variants(store, (digest(own, passes), graph.name, f"{what}, of sizes"))
            made = variants.at(loaded.point) or variants.made(loaded, graph.profile, steps)
            if made is not None:
                return made
        made = steps.run(graph)
        _put(store, (key, graph.name, what), [], made)
        return made

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


class KeptGraph(NamedTuple):
    """A graph that was loaded, and its key with the state of its files. Where it is one of others
    at a point: the key of those, without the state and with it."""

    graph: Graph
    key: str
    point: Point
    others: str | None
    sizes: str | None

    def key_of(self, graph: Graph, steps: Pipeline) -> str | None:
        """Of what passes make of it under a profile; None of another graph, and of passes that are
        not ours."""
        changed = (
            f.name
            for f in fields(graph)
            if getattr(self.graph, f.name) is not getattr(graph, f.name)
        )
        ours = all(type(p).__module__.startswith("gpuir.") for p in steps.passes)
        if {*changed} - {"profile"} or not ours:
            return None
        try:
            passes = [(type(p).__qualname__, p.name, *_parts(p)) for p in steps.passes]
            return digest(json.dumps(passes), str(graph.profile), repr(_parts(profile_of(graph))))
        except TypeError:
            return None


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


def _entry(store: Store, key: str, point: Point | None = None) -> Entry | None:
    """What a key has, at a point of its sizes if one is given, where the files that it was made of
    are as they were."""
    try:
        rows = store.all("select needs, record, used_s from models where key = ?", (key,))
        if not rows:
            return None
        text, record, used_s = rows[0]
        needs = [(path, state) for path, state in json.loads(text)]
        if needs != _states([path for path, _ in needs]):
            return None
        found = read(zlib.decompress(record).decode(), point)
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


# ---- sizes -------------------------------------------------------------------------------------


def _key_of_others(store: Store, asked: AskedModel, needs: Needs | None = None) -> str | None:
    """That of a graph of sizes, made of files in this state, which has the sizes asked for."""
    known = _entry(store, asked.sizes) if asked.sizes else None
    if known is None or needs not in (None, known[0]):
        return None
    return known[1].key(asked.point)


def _at_size(store: Store, asked: AskedModel) -> Entry | None:
    """The model from a graph of other sizes."""
    key = _key_of_others(store, asked)
    return _entry(store, key, asked.point) if key else None


def _widen(store: Store, asked: AskedModel, found: Entry) -> None:
    """Notes the point at which a model was loaded, and makes what tells others from it and those
    that are known."""
    if (own := asked.sizes) is None:
        return
    needs, (_, warnings) = found
    told: list[Point] = [asked.point]

    def graph_at(point: Point) -> Graph:
        there = asked.at(point)
        kept = _entry(store, there.key or "")
        (of, (graph, said)), is_sure = (kept, True) if kept else there.loaded(store)
        if not is_sure or of != needs or said != warnings:
            raise UnlikeGraphs
        if point not in told:
            told.append(point)
        return graph

    before = _entry(store, own)
    known = before[1] if before and before[0] == needs else KnownSizes()
    made, alike = None, known.alike(asked.point)
    if alike and known.failed < MOST_FAILED:
        made = _reached(store, known, asked.point, graph_at)
        made = made or _joined(known, asked.point, graph_at)
        known = replace(known, failed=known.failed + (made is None))
    told += (p for p in known.points if p not in told)
    known = replace(known, points=tuple(told[:MOST_POINTS]))
    if made is not None:
        key, one = made
        if not key:
            key = digest(own, json.dumps([one.low, one.high]))
            _put(store, (key, asked.model, "graph of sizes"), needs, (one.graph, warnings))
        rest = (x for x in known.graphs if not one.holds(x[0], x[1]))
        known = replace(known, graphs=((one.low, one.high, key), *rest))
    _put(store, (own, asked.model, "sizes that are known"), needs, known)


Joined = tuple[str, SymbolicGraph]  # the key of one that is kept, and the graph


def _reached(
    store: Store, known: KnownSizes, point: Point, load: Callable[[Point], Graph]
) -> Joined | None:
    """A graph of sizes that is known, where it is right at a point too."""
    for low, high, key in known.graphs:
        out = {name for name, n in point.items() if not low[name] <= n <= high[name]}
        if all(low[n] < high[n] for n in out) and (found := _entry(store, key)) is not None:
            with suppress(UnlikeGraphs):
                one = SymbolicGraph(found[1][0], low, high)
                if (reached := Sampled(load, [one]).reached(point, point)) is not None:
                    return key, reached
    return None


def _joined(known: KnownSizes, point: Point, load: Callable[[Point], Graph]) -> Joined | None:
    """A graph of a point and others that are known."""
    try:
        return "", Sampled(load).beyond(point, known.alike(point))
    except (UnlikeGraphs, GpuirError) as error:
        LOG.debug("what is between sizes is not known: %r", error)
        return None


def _kind(point: Point) -> list[int]:
    return [min(n, APART + 1) for n in point.values()]


@dataclass
class _Variants:
    """The kernels that passes make of a graph of sizes, each with the conditions under which they
    do: an entry."""

    store: Store
    named: tuple[str, str, str]

    def at(self, point: Point) -> Graph | None:
        """Those of a point; None where no conditions hold there."""
        if (found := _entry(self.store, self.named[0])) is None:
            return None
        for conditions, kernels in found[1]:
            if conditions.hold_at(point):
                return read(kernels, point)
        return None

    def made(self, loaded: KeptGraph, profile: str | None, steps: Pipeline) -> Graph | None:
        """Those of a point, made and kept. None where the passes do not take sizes."""
        others = _entry(self.store, loaded.others or "")
        if others is None:
            return None
        graph = replace(others[1][0], profile=profile)
        with recorded() as recording:
            try:
                text = written(steps.run(each_size(graph, lambda x: moved(x, loaded.point))))
            except Exception as error:  # what code does not do with sizes, it does with numbers
                LOG.debug("%s at %s alone: %r", graph.name, loaded.point, error)
                return None
        conditions = recording.conditions()
        if not conditions.hold_at(loaded.point):  # as of rounding
            return None
        before = _entry(self.store, self.named[0])
        variants = ((conditions, text), *(before[1] if before else ()))
        _put(self.store, self.named, [], variants[:MOST_VARIANTS])
        return read(text, loaded.point)


# ---- what an entry depends on ------------------------------------------------------------------


@dataclass(frozen=True)
class AskedModel:
    """A model as it is asked for."""

    model: str
    profile: str | None
    tf32: bool | None
    options: Mapping[str, Any]

    @property
    def point(self) -> dict[str, int]:
        """Its sizes, by name; the tokens behind which a step begins are one."""
        past = self.options.get("past")
        sizes = {**self.options.get("dims", {}), **({"past": past} if past else {})}
        return dict(sorted(sizes.items()))

    def at(self, point: Point) -> AskedModel:
        """At other sizes."""
        sizes = dict(point)
        past = {"past": sizes.pop("past")} if self.options.get("past") else {}
        return replace(self, options={**self.options, "dims": sizes, **past})

    @property
    def key(self) -> str | None:
        return self._key("", self.options)

    @property
    def sizes(self) -> str | None:
        """The key of what is known of other sizes."""
        if not self.point or "past" in self.options.get("dims", {}):
            return None
        options = {**self.options, "past": bool(self.options.get("past"))}
        return self._key("sizes", {**options, "dims": list(self.point)})

    def _key(self, kind: str, options: Mapping[str, Any]) -> str | None:
        """None where the model is not kept: text, what Python code makes, or what a plug-in
        reads."""
        given = {name: x for name, x in options.items() if x not in (None, False, "") and x != {}}
        if {"args", "kwargs", "converters"} & given.keys() or not _is_kept(self.model):
            return None
        under: Any = None
        if given.get("train"):  # else what is loaded does not hang on the stack
            own = None if self.profile is None else _parts(load_profile(self.profile))
            under = repr((self.profile, self.tf32, own))
        recipe = given.get("recipe")
        try:
            asked = json.dumps([self.model, os.path.abspath(self.model), given, under])
        except (TypeError, ValueError):
            return None
        made = repr(_parts(load_recipe(recipe))) if recipe else ""
        return digest(str(FORM), kind, environment(), asked, made)

    def loaded(self, store: Store) -> tuple[Entry, bool]:
        """By its frontend. It is kept where it is sure that nobody wrote to its files meanwhile."""
        own, since = _own_files(self.model), time.time_ns()
        before = _states(own)
        said: list[str] = []
        how: Any = {**self.options}
        with hearing_inputs() as heard:
            graph = load(self.model, warn=said.append, profile=self.profile, tf32=self.tf32, **how)
        needs, record = _states([*own, *heard]), (graph, tuple(said))
        is_sure = needs[: len(before)] == before and _are_older(needs, since)
        if is_sure:
            _put(store, (self.key or "", self.model, "graph"), needs, record)
        return (needs, record), is_sure


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
        times = status.st_mtime_ns, status.st_ctime_ns
        found = [status.st_dev, status.st_ino, status.st_size, *times]
        return _content(path, tuple(found)) if status.st_size <= DIGESTED else found
    except (OSError, ValueError):
        return None


@lru_cache(64)
def _content(path: str, found: tuple[int, ...]) -> str:
    """A digest of a file that is as it was found."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
