"""A program at many points of its sizes, on one device: seconds and bytes as columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpuir.cost.batch import BOUNDS, Batch, KernelRows
from gpuir.cost.host import Hosted, host_cost
from gpuir.ir.errors import GpuirError
from gpuir.ir.lazy import once
from gpuir.ir.sizes import Columns, by_form, each_size, symbols, value
from gpuir.plan.space.answers import PARTS, RunColumns, alone, is_straight, none, side_by_side, told
from gpuir.plan.space.program import Program
from gpuir.report.answer import Answer, unfit
from gpuir.simulate.layout import FIXED, POOL, Allocation, MemoryLayout
from gpuir.simulate.memory import Memory, available_bytes, room
from gpuir.targets.profile import Profile, load_profile
from gpuir.targets.support import device_refused, reason
from gpuir.targets.target import Target

R = TypeVar("R")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
COLUMNS = ("latency_s", "low_s", "high_s", "peak_bytes", "available_bytes", "why")


@dataclass(frozen=True, repr=False)
class PointTimes:
    """What a model comes to at points, an element each: seconds, between what 80 % of measurements
    are expected (`low_s`, `high_s`), and bytes. `why` says of a point why there is no latency,
    which is nan then."""

    latency_s: Floats
    low_s: Floats
    high_s: Floats
    peak_bytes: Ints
    available_bytes: Ints
    why: NDArray[np.object_]
    memory: tuple[PointsMemory | ReservedBytes, ...] = field(default=(), repr=False)
    which: Ints | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        ran = self.latency_s[~np.isnan(self.latency_s)]
        span = f"{ran.min():.4g} to {ran.max():.4g} s" if ran.size else "none has a latency"
        return f"<PointTimes: {len(self.latency_s):,} points, {span}>"

    @cached_property
    def reserved_bytes(self) -> Ints:
        """What the stack's allocator takes from the device for it; 0 where nothing runs."""
        count = len(self.latency_s) if self.which is None else self.which.max() + 1
        found = np.zeros(count, np.int64)
        for part in self.memory:
            found[part.places] = part.reserved
        return found if self.which is None else found[self.which]

    def take(self, which: Ints) -> PointTimes:
        """Those of these points."""
        columns = {name: n[which] for name, n in vars(self).items() if name in COLUMNS}
        return replace(self, **columns, which=which)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether the device has enough memory, of points that run."""
        return (self.reserved_bytes <= self.available_bytes) & ~np.isnan(self.latency_s)

    @staticmethod
    def room(count: int) -> PointTimes:
        """For so many points, which nothing is known of."""
        latency_s, low_s, high_s = np.full((3, count), np.nan)
        peak, available = np.zeros((2, count), np.int64)
        return PointTimes(latency_s, low_s, high_s, peak, available, why=np.full(count, "", object))


class ReservedBytes(NamedTuple):
    """What is reserved at some of the points (`places`)."""

    places: Ints
    reserved: Ints


@dataclass(frozen=True)
class StorageKinds:
    """The storages of a layout by what says their size. Of each kind one (`first`); `which` is the
    kind of each storage; `held` has a row for each moment that differs, how many of a kind are
    there then."""

    first: tuple[Allocation, ...]
    which: Ints
    held: Ints


@once
def kinds_of(layout: MemoryLayout) -> StorageKinds:
    """The storages of a layout by kind."""
    places: dict[Hashable, int] = {}
    first: list[Allocation] = []
    which = np.empty(len(layout.storages), np.int64)
    with by_form():
        for i, x in enumerate(layout.storages):
            key = (x.bytes, x.each, x.kernel if x.each or x.kernel == POOL else FIXED)
            which[i] = places.setdefault(key, len(places))
            if which[i] == len(first):
                first.append(x)
    events = np.array(layout.events, np.int64)
    kinds = which[np.where(events < 0, ~events, events)]
    steps = np.zeros((len(events) + 1, len(first)), np.int64)
    steps[np.arange(1, len(events) + 1), kinds] = np.where(events < 0, -1, 1)
    held = np.unique(steps.cumsum(axis=0)[list(layout.tops)], axis=0)
    return StorageKinds(tuple(first), which, held)


@dataclass(frozen=True)
class PointsMemory:
    """A program's memory at some of the points (`places`): `sizes` has a row a kind of storage and
    a column a point."""

    layout: MemoryLayout
    kinds: StorageKinds
    sizes: Ints
    places: Ints
    available: int
    allocator: str

    @property
    def peaks(self) -> Ints:
        return (self.kinds.held @ self.sizes).max(axis=0)

    @property
    def reserved(self) -> Ints:
        """Points whose storages are as large are one."""
        columns, which = np.unique(self.sizes, axis=1, return_inverse=True)
        every = (self._memory(column) for column in columns.T)
        return np.array([x.reserved_bytes for x in every], np.int64)[which.reshape(-1)]

    def _memory(self, sizes: Ints) -> Memory:
        own: list[int] = sizes[self.kinds.which].tolist()
        return Memory(self.layout, tuple(own), self.available, self.allocator)


class ProgramPoints(NamedTuple):
    """A program, in which sizes are columns of `points`, which have these `places` among all."""

    program: Program
    points: Columns
    places: Ints

    def taking(self, some: NDArray[np.bool_]) -> ProgramPoints:
        """Some of its points."""
        return ProgramPoints(
            self.program, {name: n[some] for name, n in self.points.items()}, self.places[some]
        )


Able = Sequence[tuple[ProgramPoints, Profile]]


def times(asked: Sequence[ProgramPoints], count: int, target: Target) -> PointTimes:
    """Programs at so many points together, on a target: their kernels are costed together."""
    found = PointTimes.room(count)
    found.available_bytes[:] = available_bytes(target)
    able, refused = _able(asked, target)
    for x, why in refused:
        found.why[x.places] = why
    costs = _costs(able, target)
    memory = tuple(
        _write(x, profile, own, target, found)
        for (x, profile), own in zip(able, costs, strict=True)
    )
    return replace(found, memory=memory)


def answers(asked: Sequence[ProgramPoints], target: Target) -> dict[int, Answer]:
    """What programs come to at points together on a target, by the place of the point."""
    able, refused = _able(asked, target)
    found = {int(i): none(x.program, why) for x, why in refused for i in x.places}
    for (x, profile), costs in zip(able, _costs(able, target), strict=True):
        rows = _answers(x, profile, costs, target)
        found.update(zip(x.places.tolist(), rows, strict=True))
    return found


def _able(
    asked: Sequence[ProgramPoints], target: Target
) -> tuple[Able, list[tuple[ProgramPoints, str]]]:
    """The programs that run on a target, with their profile there, and why the rest does not."""
    able: list[tuple[ProgramPoints, Profile]] = []
    refused: list[tuple[ProgramPoints, str]] = []
    for x in asked:
        profile = load_profile(x.program.profile, target)
        why = x.program.refused
        if not why and (error := device_refused(profile, x.program.dtypes, target)) is not None:
            why = reason(error)
        if why:
            refused.append((x, why))
        else:
            able.append((x, profile))
    return able, refused


@dataclass(frozen=True)
class PointCosts:
    """What kernels cost, a row a kernel and a column a point, by `PARTS`; of points where no tile
    fits one, what is said."""

    parts: Mapping[str, Any]
    failed: Mapping[int, str]

    def column(self, i: int) -> dict[str, Any]:
        return {name: n[:, i : i + 1] for name, n in self.parts.items()}


def _write(
    x: ProgramPoints, profile: Profile, costs: PointCosts, target: Target, into: PointTimes
) -> PointsMemory:
    """Writes what a program comes to at its points."""
    places, own = x.places, x.program.launches.host(profile, target)
    ends, why = np.full((3, len(places)), np.nan), np.full(len(places), "", object)
    if is_straight(x.program, own):
        ran = _beside(x, own, costs, target)
        ends[: 1 if ran.is_empty else 3] = ran.ends[: 1 if ran.is_empty else 3]
    else:
        for i, a in enumerate(_each(x, own, costs, target)):
            why[i] = a.why
            ends[:, i] = a.latency_s, *(a.interval or (np.nan, np.nan))
    for i, text in costs.failed.items():
        why[i] = text
    why[(ends[0] == 0) & (why == "")] = f"nothing runs under {profile.name}"
    nothing = why != ""
    ends[:, nothing] = np.nan
    into.why[places] = why
    into.latency_s[places], into.low_s[places], into.high_s[places] = ends
    memory = _memory(x, profile, costs.parts["split"], target)
    into.peak_bytes[places] = np.where(nothing, 0, memory.peaks)
    some = ~nothing
    return replace(memory, sizes=memory.sizes[:, some], places=places[some])


def _answers(
    x: ProgramPoints, profile: Profile, costs: PointCosts, target: Target
) -> Iterator[Answer]:
    """What a program comes to at each of its points."""
    own, available = x.program.launches.host(profile, target), available_bytes(target)
    if is_straight(x.program, own):
        names = [target.name] * len(x.places)
        runs = told(x.program, own, names, costs.parts, _beside(x, own, costs, target))
    else:
        runs = _each(x, own, costs, target)
    memory = _memory(x, profile, costs.parts["split"], target)
    rows = zip(runs, memory.peaks.tolist(), memory.reserved.tolist(), strict=True)
    for i, (a, peak, reserved) in enumerate(rows):
        why = costs.failed.get(i, a.why)
        if why or not a.latency_s:
            yield none(x.program, why or f"nothing runs under {profile.name}")
            continue
        yield replace(
            a,
            peak_bytes=peak,
            reserved_bytes=reserved,
            available_bytes=available,
            why=unfit(reserved, available),
        )


def _beside(x: ProgramPoints, own: Profile, costs: PointCosts, target: Target) -> RunColumns:
    """All points at once."""
    launches = x.program.launches
    copies = {name: _valued(getattr(launches, name), x.points) for name in ("into", "back")}
    there = replace(x.program, launches=replace(launches, **copies))
    link = None if target.pcie is None else np.array([target.pcie.bytes_per_s])
    return side_by_side(there, own, costs.parts, link)


def _each(x: ProgramPoints, own: Profile, costs: PointCosts, target: Target) -> Iterator[Answer]:
    """One point after another, without their memory."""
    for i in range(len(x.places)):
        try:
            yield alone(at(x.program, x.points, i), own, target, costs.column(i))
        except GpuirError as error:
            yield none(x.program, " ".join(str(error).split()))


def _valued(rows: Iterable[tuple[str, Any]], points: Columns) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value(n, points)) for name, n in rows)


def at(record: R, points: Columns, i: int) -> R:
    """A record with the numbers of one point."""
    point = {name: int(n[i]) for name, n in points.items()}
    return each_size(record, lambda n: value(n, point))


def _costs(able: Able, target: Target) -> Iterator[PointCosts]:
    """What the kernels of programs cost, all together: a kernel once at each value of the symbols
    that it has."""
    rows: list[KernelRows] = []
    which: list[Ints] = []
    for x, _ in able:
        for kernel, names in zip(x.program.works, _symbols(x.program), strict=True):
            own, inverse = distinct(x.points, names)
            rows.append(KernelRows(kernel, len(next(iter(own.values()), (0,))), own))
            which.append(inverse)
    first = [0, *accumulate(x.points for x in rows)]
    costs = Batch.at(rows).on(target)
    places = iter([start + inverse for start, inverse in zip(first, which, strict=False)])
    for x, profile in able:
        shape = len(x.program.works), len(x.places)
        index: Ints = np.array([next(places) for _ in x.program.works], int).reshape(shape)
        parts = {name: getattr(costs, name)[index] for name in PARTS}
        for host in x.program.hosted:
            row = zip(*_hosted(host, profile, x.points, target), strict=True)
            parts = {name: np.vstack([parts[name], n]) for name, n in zip(PARTS, row, strict=True)}
        failed = {
            int(i): " ".join(why.split())
            for place, why in costs.failed.items()
            for i in np.flatnonzero((index == place).any(axis=0))
        }
        yield PointCosts(parts, failed)


def _hosted(
    x: Hosted, profile: Profile, points: Columns, target: Target
) -> Iterator[tuple[float, float, float, int, int]]:
    """What the CPU takes for a kernel, at each point."""
    for i in range(len(next(iter(points.values())))):
        cost = host_cost(at(x, points, i), target, profile)
        low_s, high_s = cost.interval or (cost.time_s, cost.time_s)
        yield cost.time_s, low_s, high_s, BOUNDS.index(cost.bound), 1


@once
def _symbols(program: Program) -> tuple[tuple[str, ...], ...]:
    """Those that each kernel has."""
    every: list[tuple[str, ...]] = []
    for kernel in program.works:
        found: set[str] = set()

        def note(x: Any, found: set[str] = found) -> Any:
            found.update(symbols(x))
            return x

        each_size(kernel, note)
        every.append(tuple(sorted(found)))
    return tuple(every)


def distinct(points: Columns, names: Sequence[str]) -> tuple[Columns, Ints]:
    """The points that differ in some symbols, and which of them each is."""
    if not names:
        return {}, np.zeros(len(next(iter(points.values()))), np.int64)
    if len(names) == 1:
        column, which = np.unique(points[names[0]], return_inverse=True)
        return {names[0]: column}, which
    columns, which = np.unique(np.array([points[n] for n in names]), axis=1, return_inverse=True)
    return dict(zip(names, columns, strict=True)), which.reshape(-1)


def _memory(x: ProgramPoints, profile: Profile, splits: Any, target: Target) -> PointsMemory:
    layout = x.program.layout
    kept, available = room(profile, target)
    kinds = kinds_of(layout)
    sizes = np.empty((len(kinds.first), len(x.places)), np.int64)
    known: dict[Any, Any] = {}
    for row, storage in zip(sizes, kinds.first, strict=True):
        row[:] = value(storage.sized({}, kept), x.points, known)
        if storage.each:
            split: Ints = splits[storage.kernel].astype(np.int64)
            row[:] = np.where(split > 1, value(storage.each, x.points, known) * split, row)
    sizes = -(-sizes // layout.block) * layout.block
    return PointsMemory(
        layout=layout,
        kinds=kinds,
        sizes=sizes,
        places=x.places,
        available=available or 0,
        allocator=profile.allocator,
    )
