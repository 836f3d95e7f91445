"""A design space, the whole way: its jobs lowered once, their kernels costed together on every
device, a file of Parquet for each part; by many processes or machines, going on after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from gpuir.backends.parquet import counts_of, part_bytes
from gpuir.cost.batch import Batch
from gpuir.cost.tile import BY
from gpuir.files import write_whole
from gpuir.ir.errors import GpuirError, ModelError, UsageError
from gpuir.ir.graph import Graph, Level
from gpuir.ir.records import FORM
from gpuir.passes.manager import Pass, Pipeline
from gpuir.passes.math import run_under
from gpuir.plan.space.answers import Held, answers, cost_table, run
from gpuir.plan.space.engines import Engine
from gpuir.plan.space.points import at
from gpuir.plan.space.program import Program, keys_of, program_of, read, with_keys, written
from gpuir.plan.space.space import OWN, DesignSpace, Job, RankPlan, Site
from gpuir.report.answer import Answer
from gpuir.run.analysis import lowering
from gpuir.run.loading import load
from gpuir.run.program import FEW, ReadProgram
from gpuir.run.ranks import SharedByPlans, simulate_ranks
from gpuir.stacks.table import pipeline
from gpuir.store import Store, digest, version
from gpuir.targets.load import load_target
from gpuir.targets.profile import default_profile, load_profile
from gpuir.targets.target import Target, walk

MOST_JOBS = 1024  # whose kernels are costed together
ROWS = (1024, 16384)  # of a part, at least and at most, where there are as many
PARTS = 16  # in between: as many as fill a few workers evenly
LOWERED = 4  # jobs of one task
SIZED = 256  # the same, of jobs that differ in their sizes alone
PLANNED = 2  # the same, of jobs that are cut over ranks
MANIFEST = "_space.json"


@dataclass(frozen=True)
class JobLoading:
    """How all jobs of a space are loaded, and what their models hold: digests by path."""

    options: tuple[tuple[str, Any], ...]
    digests: Mapping[str, str]


# ---- what workers do ---------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _loaded(model: str, dims: tuple[tuple[str, int], ...], dtype: str, options: Any, profile: str):
    how: dict[str, Any] = {**dict(options), "dims": dict(dims)}
    if how.get("phase") and "past" in how["dims"]:
        how["past"] = how["dims"].pop("past")
    if dtype != OWN:
        how["dtype"] = dtype
    return load(model, warn=lambda _: None, profile=profile or None, **how)


def _is_config(model: str) -> bool:
    return model.startswith("hf:")


def graph_of(job: Job, loading: JobLoading) -> Graph:
    """The model of a job as its profile finds it, in its dtype. Only of a training step does what
    is loaded hang on the profile."""
    first = job.profile if dict(loading.options).get("train") else ""
    dtype = job.dtype if _is_config(job.model) else OWN  # which others are converted to
    g = _loaded(job.model, job.dims, dtype, loading.options, first)
    g = run_under(g, job.profile or None)
    if job.dtype == OWN or _is_config(job.model):
        return g
    return pipeline(f"convert{{dtype={job.dtype}}}").run(g)


@lru_cache(maxsize=2)
def _kernels(job: Job, options: Any, target: str | None) -> Graph:
    g = graph_of(job, JobLoading(options, {}))
    if g.level >= Level.kernel:
        return g
    return lowering(g, load_target(target) if target else None).run(g)


def _kernels_on(job: Job, loading: JobLoading, target: str) -> Graph:
    return _kernels(job, loading.options, target if _depends(job.profile) else None)


def lowered(tasks: Sequence[tuple[Job, str]], loading: JobLoading) -> list[str]:
    """The programs of jobs, as text: each as its profile makes it for a target. Jobs that differ in
    their sizes alone are one program, asked for its points."""
    texts: dict[tuple[Job, str], str] = {}
    for (_, target), jobs in grouped(tasks).items():
        if len(jobs) <= FEW:
            programs = (_lowered(job, target, loading) for job in jobs)
        else:
            programs = _sized(jobs, target, loading)
        texts.update(((job, target), written(x)) for job, x in zip(jobs, programs, strict=True))
    return [texts[task] for task in tasks]


def grouped(tasks: Iterable[tuple[Job, str]]) -> dict[tuple[Job, str], list[Job]]:
    """Jobs of one model, dtype and profile on one target, whose sizes have the same names."""
    groups: dict[tuple[Job, str], list[Job]] = {}
    for job, target in tasks:
        alike = replace(job, dims=tuple((name, 0) for name, _ in job.dims))
        groups.setdefault((alike, target), []).append(job)
    return groups


def _sized(jobs: Sequence[Job], target: str, loading: JobLoading) -> Iterator[Program]:
    """Programs of jobs that differ in their sizes alone."""
    job = jobs[0]

    def graph(point: Mapping[str, int]) -> Graph:
        return graph_of(replace(job, dims=tuple(point.items())), loading)

    made = ReadProgram(job.model, {}, job.profile or None, read=graph)
    points = {name: np.array([dict(x.dims)[name] for x in jobs]) for name, _ in job.dims}
    found: dict[int, Program] = {}
    for error, x in made.kernels_at(points, load_target(target)):
        for i, place in enumerate(x.places.tolist()):
            if isinstance(error, GpuirError):
                found[place] = _refused(job, error)
            else:
                found[place] = with_keys(at(x.program, x.points, i))
    return (found[i] for i in range(len(jobs)))


def _lowered(job: Job, target: str, loading: JobLoading) -> Program:
    try:
        return program_of(_kernels_on(job, loading, target), load_target(target).is_cpu)
    except GpuirError as error:
        return _refused(job, error)


def _refused(job: Job, error: GpuirError) -> Program:
    return Program(Path(job.model).stem, job.profile, refused=in_a_line(error))


def in_a_line(error: GpuirError) -> str:
    return " ".join(str(error).split())


@cache
def _depends(profile: str) -> bool:
    """Whether a stack makes other kernels for other devices."""
    passes = pipeline(load_profile(profile).passes).passes
    return any(type(p).on is not Pass.on for p in passes)


def variant_of(profile: str, target: Target) -> str:
    """What tells a program on a target from those on others: the kernels that a stack makes for it,
    and whether it is a CPU."""
    own = str(pipeline(load_profile(profile).passes).on(target)) if _depends(profile) else ""
    return f"{own} on a CPU" if target.is_cpu else own


@dataclass(frozen=True)
class Block:
    """Jobs whose kernels are costed together: the programs of each, as text, by their variant.
    `first` is the number of the first job."""

    key: str
    first: int
    jobs: tuple[Job, ...]
    texts: tuple[Mapping[str, str], ...]
    loading: JobLoading


class _Read:
    """A block's programs, and their kernels by key."""

    def __init__(self, block: Block):
        self.programs = [
            {variant: read(text) for variant, text in texts.items()} for texts in block.texts
        ]
        self.works = {
            key: work
            for programs in self.programs
            for p in programs.values()
            for key, work in zip(p.keys, p.works, strict=True)
        }
        self.batches: dict[tuple[str, ...], Batch] = {}
        self.held: dict[int, Held] = {}

    def batch(self, keys: Sequence[str]) -> Batch:
        """Kernels that are costed together, made once for the devices of all parts."""
        key = tuple(keys)
        if key not in self.batches:
            if len(self.batches) > 1:  # of GPUs, and of CPUs
                self.batches.clear()
            self.batches[key] = Batch.of([self.works[k] for k in keys])
        return self.batches[key]


_blocks: dict[str, _Read] = {}  # the last block of this process


def _block(block: Block) -> _Read:
    if block.key not in _blocks:
        _blocks.clear()
        _blocks[block.key] = _Read(block)
    return _blocks[block.key]


def ran(
    block: Block,
    columns: Sequence[Site],
    numbers: Sequence[int],
    width: int,
    known: Mapping[str, bytes],
    space: DesignSpace,
) -> tuple[bytes, dict[str, bytes]]:
    """The file of a block's jobs on some devices, which have these `numbers` of `width`, and what
    kernels cost there of which that was not `known`."""
    found = _block(block)
    targets: list[Target] = []
    failed: dict[int, str] = {}
    for i, column in enumerate(columns):
        try:
            targets.append(load_target(column.name))
        except GpuirError as error:
            failed[i] = in_a_line(error)
    there = [i for i in range(len(columns)) if i not in failed]
    table = cost_table(found.works, targets, known, found.batch)
    rows = _PointColumns(space, block.loading)
    for j, (job, programs) in enumerate(zip(block.jobs, found.programs, strict=True)):
        here = {t: programs[variant_of(job.profile, target)] for t, target in enumerate(targets)}
        name = here[0].model if here else ""
        got = {i: Answer(job.model, why=why) for i, why in failed.items()}
        got |= {there[t]: a for t, a in answers(here, targets, table, found.held).items()}
        for i, column in enumerate(columns):
            point = (block.first + j) * width + numbers[i]
            rows.add(point, job, name, column, got[i])
    new = (key for key in found.works if key not in known)
    packed = {key: data for key in new if (data := table.packed(key)) is not None}
    return rows.bytes(), packed if len(targets) == len(columns) else {}


def planned(
    jobs: Sequence[tuple[int, Job]],
    plans: Sequence[tuple[int, RankPlan]],
    loading: JobLoading,
    space: DesignSpace,
) -> bytes:
    """The file of jobs under plans, which have these numbers of all columns."""
    rows = _PointColumns(space, loading)
    for number, job in jobs:
        common = SharedByPlans()
        for column, plan in plans:
            answer, name, items = _planned(job, plan, loading, common)
            point = number * space.columns + column
            rows.add(point, job, name, Site(plan=plan), answer, items=items)
    return rows.bytes()


def _planned(
    job: Job, plan: RankPlan, loading: JobLoading, common: SharedByPlans
) -> tuple[Answer, str, int]:
    items = job.items * plan.parallel.microbatches
    try:
        graph = graph_of(job, loading)
        found = simulate_ranks(
            graph, plan.cluster, plan.parallel, profile=job.profile or None, common=common
        )
    except GpuirError as error:
        return Answer(job.model, why=in_a_line(error)), Path(job.model).stem, items
    return found, graph.name, items


class _PointColumns:
    """Points as columns."""

    def __init__(self, space: DesignSpace, loading: JobLoading):
        self.space, self.loading = space, loading
        self.sizes = [f"dim.{name}" for name in space.dims]
        self.set = [f"set.{path}" for path, _ in space.hardware.numbers]
        self.rows: list[dict[str, Any]] = []

    def add(
        self, point: int, job: Job, name: str, column: Site, found: Answer, *, items: int = 0
    ) -> None:
        items = items or job.items
        plan = column.plan
        self.rows.append(
            {
                "point": point,
                "model": job.model,
                "model_sha256": self.loading.digests[job.model],
                "graph": name,
                **dict.fromkeys(self.sizes),
                **{f"dim.{d}": n for d, n in job.dims},
                "dtype": job.dtype,
                "profile": job.profile,
                "target": column.name if plan is None else "",
                "base": column.target,
                **dict.fromkeys(self.set),
                **{f"set.{path}": float(n) for path, n in column.numbers},
                "cluster": plan.cluster if plan else "",
                "plan": _text(plan) if plan else "",
                "predictor": BY,
                "gpuir": version(),
                **found.row(),
                "items": items,
                "items_per_s": items / found.latency_s if found.ran else None,
            }
        )

    def bytes(self) -> bytes:
        names = list(self.rows[0])
        columns = {name: [row[name] for row in self.rows] for name in names}
        return part_bytes(columns, self.sizes)


def _text(plan: RankPlan) -> str:
    p = plan.parallel
    return str(p) if p.microbatches == 1 else f"{p}, microbatches={p.microbatches}"


def latencies(
    graphs: Iterable[Graph],
    targets: Sequence[str],
    profile: str | None = None,
) -> list[list[Answer]]:
    """Many graphs on a few devices, each as `analyze` would find it: lowered one by one, their
    kernels costed together. The answers of each graph are in the order of the targets.

        latencies([build(choice) for choice in choices], ["t4", "a100"])

    A graph of level `graph` is lowered under the profile, its framework's own by default.
    """
    loaded = [load_target(name) for name in targets]
    rows = (_kernels_of(run_under(g, profile), loaded) for g in graphs)
    return [[found[t] for t in range(len(loaded))] for found in run(rows, loaded)]


def _kernels_of(g: Graph, targets: Sequence[Target]) -> dict[int, Graph]:
    """The kernels of a graph on each target, the same graph where they are the same."""

    @cache
    def lowered(passes: Pipeline) -> Graph:
        return g if g.level >= Level.kernel else passes.run(g)

    return {t: lowered(lowering(g, target)) for t, target in enumerate(targets)}


# ---- what the sweep does -----------------------------------------------------------------------


@dataclass(frozen=True)
class ResultFile:
    """A file of the result: jobs from `first` on, `jobs` of them, on columns from `column` on,
    `columns` of them."""

    first: int
    jobs: int
    column: int
    columns: int

    @property
    def name(self) -> str:
        return f"part-{self.first:010}-{self.column:010}.parquet"

    @property
    def points(self) -> int:
        return self.jobs * self.columns


@dataclass(frozen=True)
class Done:
    """What there is of a space: points, of which so many have no latency, or do not fit, and how
    many of all were `there` already when the sweep began."""

    points: int
    without: int
    unfit: int
    there: int


def parts_of(space: DesignSpace) -> Iterator[ResultFile]:
    """The parts that a space is cut into, those of one block of jobs together."""
    block = min(space.jobs, MOST_JOBS)
    rows = min(max(space.jobs * space.devices // PARTS, ROWS[0]), ROWS[1])
    wide = max(1, min(space.devices, rows // max(block, 1)))
    for first in range(0, space.jobs, block):
        jobs = min(block, space.jobs - first)
        for column in range(0, space.devices, wide):
            yield ResultFile(first, jobs, column, min(wide, space.devices - column))
    for first in range(0, space.jobs, PLANNED) if space.plans else ():
        jobs = min(PLANNED, space.jobs - first)
        yield ResultFile(first, jobs, space.devices, len(space.plans))


class SpaceSweep:
    """A space that is being computed into a folder, in a `with` block. UsageError where the folder
    is of another space, or somebody else is at work in it."""

    def __init__(self, space: DesignSpace, folder: str, store: str = ""):
        self.space, self.folder = space, Path(folder)
        digests = {m.path: _digest_of(m.path) for m in space.models}
        self.loading = JobLoading(space.load, digests)
        self.defaults = {m.path: self._default(m.path, m.at(0)) for m in space.models}
        self.bases = {
            name: digest(repr(list(walk(load_target(name)))))
            for name in dict.fromkeys((*space.targets, *space.hardware.base))
        }
        self.versions = {"gpuir": version(), "predictor": BY, "weights": _weights()}
        self.kept = store or str(self.folder / "_store.sqlite")
        self.open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._lock())
            self._check()
            self.store = stack.enter_context(Store(self.kept))
            self._check_store()
            self.open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.open.close()

    def _default(self, model: str, dims: tuple[tuple[str, int], ...]) -> str:
        """The profile of a model that is given none; ModelError, before any work, where it does not
        load at its first sizes."""
        dtype = self.space.dtypes[0]
        first = next((x for x in self.space.profiles if x), "")
        g = graph_of(Job(model, dims, dtype, first), self.loading)
        return default_profile(g)

    def job(self, i: int) -> Job:
        job = self.space.job(i)
        return job if job.profile else replace(job, profile=self.defaults[job.model])

    @property
    def identity(self) -> dict[str, Any]:
        """What the numbers of the folder rest on."""
        return json.loads(
            json.dumps(
                {
                    "schema": "gpuir.space/1",
                    **self.versions,
                    "models": self.loading.digests,
                    "targets": self.bases,
                    "space": asdict(self.space),
                }
            )
        )

    def _lock(self) -> IO[str]:
        """A lock that the system lets go of when this process ends, however it ends."""
        import fcntl

        try:
            self.folder.mkdir(exist_ok=True)
            stream = (self.folder / "_lock").open("w")
        except OSError as error:
            raise UsageError(
                "cannot write the folder",
                where=str(self.folder),
                found=error.strerror or str(error),
                fix="choose a folder elsewhere",
            ) from error
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.close()
            raise UsageError(
                "another sweep is running in this folder",
                where=str(self.folder),
                fix="wait until it ends, or choose another folder with -o",
            ) from error
        return stream

    def _check(self) -> None:
        """Writes down what the folder is of, or compares it with what is there."""
        manifest = self.folder / MANIFEST
        if manifest.exists():
            found = json.loads(manifest.read_text(encoding="utf-8"))
            if found != self.identity:
                other = [k for k, v in self.identity.items() if found.get(k) != v]
                raise UsageError(
                    "the folder holds the results of another space",
                    where=str(self.folder),
                    expected=", ".join(f"{k} {_short(self.identity[k])}" for k in other),
                    found=", ".join(f"{k} {_short(found.get(k))}" for k in other),
                    fix="choose another folder with -o, or delete this one",
                )
        elif strange := sorted({x.name for x in self.folder.iterdir()} - {"_lock"}):
            raise UsageError(
                "the folder contains other files",
                where=str(self.folder),
                found=", ".join(strange[:3]),
                fix="choose another folder, or empty this one",
            )
        else:
            text = json.dumps(self.identity, indent=1)
            write_whole(manifest, text.encode())

    def _check_store(self) -> None:
        """UsageError where the store has programs and costs of other versions."""
        found = self.store.rests_on("space", self.versions)
        if found != self.versions:
            raise UsageError(
                "the store was made by another version",
                where=self.kept,
                expected=_listed(self.versions),
                found=_listed(found),
                fix="use another --store, or delete the file: gpuir can compute its content again",
            )

    def run(self, engine: Engine, advance: Callable[[int], None] = lambda n: None) -> Done:
        """Computes what is missing; `advance` is told of points that are there."""
        there = 0
        left: list[ResultFile] = []
        every = list(parts_of(self.space))
        for part in every:
            if (self.folder / part.name).exists():
                there += part.points
            else:
                left.append(part)
        advance(there)
        devices = [p for p in left if p.column < self.space.devices]
        for first in dict.fromkeys(p.first for p in devices):
            self._block([p for p in devices if p.first == first], engine, advance)
        self._plans([p for p in left if p.column >= self.space.devices], engine, advance)
        counts = [counts_of(self.folder / part.name) for part in every]
        total = {name: sum(c[name] for c in counts) for name in ("points", "without", "unfit")}
        return Done(there=there, **total)

    def _block(
        self, parts: Sequence[ResultFile], engine: Engine, advance: Callable[[int], None]
    ) -> None:
        first, count = parts[0].first, parts[0].jobs
        jobs = tuple(self.job(i) for i in range(first, first + count))
        texts = self._texts(jobs, parts, engine)
        key = digest(str(first), str(count), json.dumps(self.identity))
        block = engine.share(Block(key, first, jobs, texts, self.loading))
        keys = list(dict.fromkeys(k for some in texts for x in some.values() for k in keys_of(x)))
        devices: dict[ResultFile, str] = {}

        def tasks() -> Iterator[tuple[ResultFile, tuple[Any, ...]]]:
            for part in parts:
                numbers = range(part.column, part.column + part.columns)
                columns = [self.space.column(i) for i in numbers]
                devices[part] = digest(*(self._device(c) for c in columns))
                query = f"select work, parts from costs where devices = '{devices[part]}' and work"
                known = dict(self.store.among(query, keys))
                yield part, (block, columns, numbers, self.space.columns, known, self.space)

        for part, (data, costs) in engine.each(ran, tasks()):
            on = devices.pop(part)
            self.store.put("costs", ((work, on, blob) for work, blob in costs.items()))
            write_whole(self.folder / part.name, data)
            advance(part.points)

    def _device(self, column: Site) -> str:
        """What tells a device's numbers from all others: those of its base, and those set."""
        return self.bases[column.target] + column.name.removeprefix(column.target)

    def _texts(
        self, jobs: Sequence[Job], parts: Sequence[ResultFile], engine: Engine
    ) -> tuple[dict[str, str], ...]:
        """The programs of jobs, by variant: of the store, or lowered and kept there."""
        variants = {
            profile: self._variants(profile, parts) for profile in {j.profile for j in jobs}
        }
        wanted = [(j, v, target) for j in jobs for v, target in variants[j.profile].items()]
        keys = {(job, variant): self._key(job, variant) for job, variant, _ in wanted}
        query = "select key, text from programs where key"
        found = dict(self.store.among(query, list(keys.values())))
        missing = [x for x in wanted if keys[x[0], x[1]] not in found]
        variant = {(j, target): v for j, v, target in missing}
        alike = [[(j, t) for j in x] for (_, t), x in grouped(variant).items()]
        others = [task for x in alike if len(x) <= FEW for task in x]
        chunks = [x[i : i + SIZED] for x in alike if len(x) > FEW for i in range(0, len(x), SIZED)]
        chunks += [others[i : i + LOWERED] for i in range(0, len(others), LOWERED)]
        for some, texts in engine.each(lowered, ((tuple(c), (c, self.loading)) for c in chunks)):
            new = {keys[j, variant[j, t]]: x for (j, t), x in zip(some, texts, strict=True)}
            self.store.put("programs", new.items())
            found |= new
        return tuple({v: found[keys[job, v]] for v in variants[job.profile]} for job in jobs)

    def _variants(self, profile: str, parts: Sequence[ResultFile]) -> dict[str, str]:
        """What a stack makes for the devices of some parts, each with a device that it is for."""
        if not _depends(profile):
            return {variant_of(profile, load_target(name)): name for name in self.bases}
        found: dict[str, str] = {}
        for part in parts:
            for i in range(part.column, part.column + part.columns):
                name = self.space.column(i).name
                try:
                    found.setdefault(variant_of(profile, load_target(name)), name)
                except GpuirError:
                    continue  # a row says so
        return found

    def _key(self, job: Job, variant: str) -> str:
        model, asked = self.loading.digests[job.model], repr((job.dims, job.dtype, job.profile))
        profile = repr(list(walk(load_profile(job.profile))))
        options = repr((FORM, self.loading.options))  # the form of the text that is kept
        return digest(model, asked, profile, options, variant)

    def _plans(
        self, parts: Sequence[ResultFile], engine: Engine, advance: Callable[[int], None]
    ) -> None:
        plans = [(self.space.devices + i, plan) for i, plan in enumerate(self.space.plans)]

        def tasks() -> Iterator[tuple[ResultFile, tuple[Any, ...]]]:
            for part in parts:
                jobs = [(i, self.job(i)) for i in range(part.first, part.first + part.jobs)]
                yield part, (jobs, plans, self.loading, self.space)

        for part, data in engine.each(planned, tasks()):
            write_whole(self.folder / part.name, data)
            advance(part.points)


def _digest_of(model: str) -> str:
    """Of a model's file, or of the files of its folder."""
    path = Path(model.removeprefix("hf:"))
    try:
        files = (
            sorted(x for x in path.iterdir() if x.suffix == ".json") if path.is_dir() else [path]
        )
        return hashlib.sha256(b"".join(x.read_bytes() for x in files)).hexdigest()
    except OSError as error:
        raise ModelError(
            "cannot read the model", where=model, found=error.strerror or "", fix="check the path"
        ) from error


def _weights() -> str:
    from importlib.resources import files

    return digest(files("gpuir.cost").joinpath("weights", "tile2.json").read_text())


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({digest(text)[:8]})"
