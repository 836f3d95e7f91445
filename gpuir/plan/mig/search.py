"""The best way to divide GPUs among models.

What a part of a GPU makes of a set of models, a *seat*, is simulated by itself, the other parts
busy. Which seats together, an integer program decides exactly: each model sits once, and a GPU has
the parts of one of its geometries, or is not divided. What it chooses for each geometry of one GPU,
and a plain choice by size, are then simulated whole, with all that parts have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import ceil
from typing import Literal

import numpy as np

from gpuir.ir.errors import UsageError
from gpuir.plan.highs import LinearProgram, Row, require, solve
from gpuir.plan.mig.workloads import DoesNotFit, ServingSetting, SharedSlice, board_of
from gpuir.report.answer import Answer
from gpuir.simulate.sharing import MODES, Mode, Served, Tenant, simulate
from gpuir.targets.load import load_target
from gpuir.targets.mig import Geometry, InstancePlacement, Layout, geometries, mig_of, mig_specs
from gpuir.targets.target import Target

Objective = Literal["throughput", "latency", "fairness", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "fairness", "cost")
Way = Mode | Literal["mig"]
WAYS: tuple[Way, ...] = ("mig", *MODES)
MOST_ON_SLICE = 3  # models that share a slice, or more where there are more for each
MOST_TOGETHER = 4  # models that share one of several whole GPUs, likewise
MOST_SEATS = 20_000
MISSED = 1e3  # what a model that misses what is asked costs, in the units of any objective
SOLVE_S = 20.0
SKETCHED = 300  # requests of the simulation of a seat by itself


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one kind: the target's name, how many, and US dollars an hour of one, if known."""

    gpu: str
    count: int = 1
    usd_per_hour: float | None = None


@dataclass(frozen=True)
class Seat:
    """Models, by the index of their workload, in a part of a GPU; a slice has a `placement`."""

    part: SharedSlice
    members: tuple[int, ...]
    placement: InstancePlacement | None = None


@dataclass(frozen=True)
class Seated:
    """One GPU, by its index, and its seats, empty slices among them; without a geometry it is not
    divided, and MIG is off."""

    index: int
    gpu: str
    geometry: Geometry | None
    seats: tuple[Seat, ...]

    @property
    def layout(self) -> Layout:
        """Where its slices lie; empty where it is not divided."""
        return tuple(seat.placement for seat in self.seats if seat.placement)

    @property
    def is_used(self) -> bool:
        return any(seat.members for seat in self.seats)


@dataclass(frozen=True)
class Outcome:
    """A plan and what came of it. `served` are in the order of GPUs, seats and members; `progress`
    is how much of what each would do with a whole GPU alone it does, or of what is asked."""

    gpus: tuple[Seated, ...]
    served: tuple[Served, ...]
    progress: tuple[float, ...]
    slowdowns: tuple[float, ...]
    usd_per_hour: float | None

    @property
    def missed(self) -> int:
        """How many models miss their deadline, or do not keep up."""
        return sum(not x.in_time for x in self.served)

    @property
    def throughput(self) -> float:
        """The progress of all together: 2 is as much as two whole GPUs would do."""
        return sum(self.progress)

    @property
    def fairness(self) -> float:
        """The least progress."""
        return min(self.progress)

    @property
    def latency(self) -> float:
        """How many times longer than alone on a whole GPU requests take, on average."""
        return float(np.mean(self.slowdowns))

    def order(self, objective: Objective) -> tuple[float, ...]:
        """Less is better."""
        price = self.usd_per_hour or 0.0
        first: dict[Objective, tuple[float, float]] = {
            "throughput": (-self.throughput, self.latency),
            "latency": (self.latency, -self.throughput),
            "fairness": (-self.fairness, -self.throughput),
            "cost": (price, -self.throughput),
        }
        return (self.missed, *first[objective])

    def seats(self) -> Iterator[tuple[Seated, Seat, tuple[Served, ...]]]:
        """Each seat that is taken, with what became of its models."""
        at = 0
        for gpu in self.gpus:
            for seat in gpu.seats:
                if seat.members:
                    yield gpu, seat, self.served[at : at + len(seat.members)]
                at += len(seat.members)


@dataclass(frozen=True)
class Left:
    """A part that a workload does not fit into, and how many bytes are missing."""

    workload: str
    target: str
    missing_bytes: int


@dataclass(frozen=True)
class FoundPlans:
    """Plans, the best first, of `tried` that were simulated whole; which parts were too small for
    which model."""

    outcomes: tuple[Outcome, ...]
    tried: int
    left: tuple[Left, ...]
    references: tuple[Answer, ...]


@dataclass(frozen=True)
class _Column:
    """A way to take a part: of a kind of GPU, the part's target, its models, and what they get."""

    kind: int
    target: str
    seat: Seat
    worth: float
    least: float

    @property
    def is_whole(self) -> bool:
        return not is_slice(self.target)


def search(
    kinds: Sequence[GpuKind],
    setting: ServingSetting,
    objective: Objective = "throughput",
    *,
    requests: int = 2000,
    whole: int = 8,
    ways: Sequence[Way] = WAYS,
    watch: Callable[[str], None] = lambda text: None,
) -> FoundPlans:
    """The plans for a node's GPUs, the best first.

    Of one GPU: the best of each geometry, of which `whole` are simulated whole, and each way to
    share the GPU without MIG. Of several: the best, the best without MIG and with MIG on all that
    have it. Beside these a plain choice by size. With `ways` fewer ways to share are tried: with
    `mig` alone every model has a slice to itself. UsageError where a model fits nowhere, or HiGHS
    is not installed.
    """
    made = Search(kinds, setting, objective, requests=requests, whole=whole, ways=ways, watch=watch)
    return made.found()


# For each kind of GPU the ways to divide one, and how many may be divided so; None: not divided.
_Ways = dict[int, dict[Geometry | None, int]]


class Search:
    """`found` gives the plans; `outcome` simulates any plan under the search's load."""

    def __init__(
        self,
        kinds: Sequence[GpuKind],
        setting: ServingSetting,
        objective: Objective,
        *,
        requests: int,
        whole: int = 8,
        ways: Sequence[Way] = WAYS,
        watch: Callable[[str], None] = lambda text: None,
    ):
        require("pip install 'gpuir[mig]'")
        self.kinds, self.setting = kinds, setting
        self.objective: Objective = objective
        self.requests, self.whole, self.ways, self.watch = requests, whole, ways, watch
        self.left: dict[tuple[str, str], int] = {}
        self.references = tuple(map(self._reference, range(len(setting.workloads))))
        self.known: dict[tuple[SharedSlice, tuple[int, ...]], tuple[Served, ...] | None] = {}

    # ---- what a model takes alone ---------------------------------------------------------------

    def _reference(self, workload: int) -> Answer:
        """A run on a whole GPU, of the first kind that it fits."""
        missing: dict[str, int] = {}
        for kind in self.kinds:
            try:
                self.setting.tenants(SharedSlice(kind.gpu), "GPU", (workload,))
            except DoesNotFit as error:
                missing[kind.gpu] = error.missing_bytes
                continue
            return self.setting.alone(workload, kind.gpu)
        name = self.setting.workloads[workload].name
        gpu, bytes_ = min(missing.items(), key=lambda x: x[1])
        raise UsageError(
            f"{name} fits none of the given GPUs",
            found=f"{gpu} has {bytes_ / 2**30:.2f} GiB less than it needs",
            fix="use a smaller batch, a narrower data type or a larger GPU",
        )

    # ---- seats by themselves --------------------------------------------------------------------

    def _served(self, part: SharedSlice, members: tuple[int, ...]) -> tuple[Served, ...] | None:
        """What becomes of models in a part, all other parts busy; None where they do not fit."""
        key = part, members
        if key not in self.known:
            self.known[key] = self._sketch(part, members)
        return self.known[key]

    def _sketch(self, part: SharedSlice, members: tuple[int, ...]) -> tuple[Served, ...] | None:
        target = load_target(part.target)
        place = "GPU: a part"
        try:
            tenants = self.setting.tenants(part, place, members)
        except DoesNotFit as error:
            if len(members) == 1:
                name = self.setting.workloads[members[0]].name
                self.left[name, part.target] = error.missing_bytes
            return None
        gpu = next(k.gpu for k in self.kinds if part.target in (k.gpu, _slice_of(k.gpu, target)))
        share = target.sms / load_target(gpu).sms
        common = self.setting.common({board_of(place): target}, share)
        return simulate(tenants, common, requests=SKETCHED, seed=self.setting.seed)

    def _columns(self, kind: int, target: str, sets: Sequence[tuple[int, ...]]) -> list[_Column]:
        """The best way in which each set of models takes a part."""
        found: list[_Column] = []
        for members in sets:
            ways = [
                self._column(kind, target, Seat(part, members), served)
                for part in parts_of(target, len(members), self.ways)
                if (served := self._served(part, members)) is not None
            ]
            if ways:
                found.append(max(ways, key=lambda c: c.worth))
        return found

    def _column(self, kind: int, target: str, seat: Seat, served: Sequence[Served]) -> _Column:
        progress = [self._progress(i, s) for i, s in zip(seat.members, served, strict=True)]
        slow = [s.mean_s / self.references[i].latency_s for i, s in zip(seat.members, served)]
        worth = -sum(slow) if self.objective == "latency" else sum(progress)
        missed = sum(not s.in_time for s in served)
        return _Column(kind, target, seat, worth - MISSED * missed, min(progress) - MISSED * missed)

    def _progress(self, workload: int, served: Served) -> float:
        asked = served.load.rate
        if asked is not None:
            return 1.0 if served.keeps_up else min(1.0, served.rate / asked)
        return served.rate * self.references[workload].latency_s

    # ---- choosing -------------------------------------------------------------------------------

    def found(self) -> FoundPlans:
        plans = self._of_one() if self._gpus == 1 else self._of_several()
        self.watch(f"{len(plans)} plans are simulated whole")
        outcomes = [self.outcome(plan) for plan in plans]
        if not outcomes:
            raise UsageError(
                "the models together fit no division of these GPUs",
                found="\n".join(self._too_small()),
                fix="use smaller batches, fewer models, more GPUs, or other --ways to share a GPU",
            )
        outcomes.sort(key=self._order)
        names = [(w, t, b) for (w, t), b in self.left.items()]
        left = tuple(Left(*x) for x in names)
        return FoundPlans(tuple(outcomes), len(outcomes), left, self.references)

    def _too_small(self) -> Iterator[str]:
        """More models than slices, and the largest slices that a model does not fit."""
        if tuple(self.ways) == ("mig",):
            most = {
                k.gpu: max(map(_slices_of, geometries(mig_of(load_target(k.gpu)))))
                for k in self.kinds
                if self._divides(k.gpu)
            }
            slices = sum(most.get(k.gpu, 1) * k.count for k in self.kinds)
            if len(self.setting.members) > slices:
                yield f"{len(self.setting.members)} models, and at most {slices} slices"
        least: dict[str, tuple[int, str]] = {}
        for (name, target), missing in self.left.items():
            least[name] = min(least.get(name, (missing, target)), (missing, target))
        for name, (missing, target) in least.items():
            yield f"{name} needs {missing / 2**30:.2f} GiB more than {target} has"

    def _order(self, outcome: Outcome) -> tuple[float, ...]:
        return outcome.order(self.objective)

    @property
    def _gpus(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def _of_one(self) -> list[tuple[Seated, ...]]:
        gpu, everyone = self.kinds[0].gpu, self.setting.members
        plans = [
            (Seated(0, gpu, None, (Seat(part, everyone),)),)
            for part in parts_of(gpu, len(everyone), self.ways)
            if self._served(part, everyone) is not None
        ]
        if not self._divides(gpu):
            return plans
        mig = mig_of(load_target(gpu))
        kinds = geometries(mig)
        columns = self._slices(0, gpu)
        chosen: list[tuple[float, tuple[Seated, ...]]] = []
        for geometry in kinds:
            found = self._chosen(columns, {0: {geometry: 1}})
            if found is not None:
                worth = sum(c.worth for c in found)
                if self.objective == "fairness":
                    worth = min(c.least for c in found)
                chosen.append((worth, self._laid(found, [(0, geometry)])))
        chosen.sort(key=lambda x: -x[0])
        plans += [plan for _, plan in chosen[: self.whole]]
        plain = self._plain(gpu, kinds)
        known = set(map(_kind_of, plans))
        return plans + ([plain] if plain and _kind_of(plain) not in known else [])

    def _divides(self, gpu: str) -> bool:
        return "mig" in self.ways and load_target(gpu).device in mig_specs()

    def _slices(self, kind: int, gpu: str) -> list[_Column]:
        """Every way to take a slice of a GPU."""
        mig = mig_of(load_target(gpu))
        each = len(self.setting.members) / (max(map(_slices_of, geometries(mig))) * self._gpus)
        sets = list(self._sets(max(MOST_ON_SLICE, ceil(each))))
        profiles = [p for p in mig.profiles if not p.variant]
        self.watch(f"{gpu}: {len(sets)} sets of models on {len(profiles)} profiles")
        return [
            column
            for profile in profiles
            for column in self._columns(kind, f"{gpu}:{profile.name}", sets)
        ]

    def _sets(self, most: int) -> Iterator[tuple[int, ...]]:
        """Sets of so many of the models at most, equal ones told apart by none."""
        workloads = self.setting.workloads
        count = 0
        for size in range(1, min(most, len(self.setting.members)) + 1):
            for some in combinations_with_replacement(range(len(workloads)), size):
                if all(some.count(i) <= workloads[i].count for i in set(some)):
                    count += 1
                    if count > MOST_SEATS:
                        self.watch(f"sets of more than {size} models are not tried: too many")
                        return
                    yield some

    def _of_several(self) -> list[tuple[Seated, ...]]:
        columns: list[_Column] = []
        options: _Ways = {}
        each = len(self.setting.members) / self._gpus
        sets = list(self._sets(max(MOST_TOGETHER, ceil(each) + 1)))
        for k, kind in enumerate(self.kinds):
            self.watch(f"{kind.gpu}: {len(sets)} sets of models on the whole GPU")
            columns += self._columns(k, kind.gpu, sets)
            options[k] = {None: kind.count}
            if self._divides(kind.gpu):
                columns += self._slices(k, kind.gpu)
                options[k] |= dict.fromkeys(geometries(mig_of(load_target(kind.gpu))), kind.count)
        plans: list[tuple[Seated, ...]] = []
        undivided: _Ways = {k: {None: kind.count} for k, kind in enumerate(self.kinds)}
        divided: _Ways = {
            k: {g: n for g, n in some.items() if g is not None or len(some) == 1}
            for k, some in options.items()
        }
        for some in (options, undivided, divided):
            found = self._chosen(columns, some)
            if found is not None:
                plan = self._several_laid(found)
                if _kind_of(plan) not in map(_kind_of, plans):
                    plans.append(plan)
        dealt = self._dealt()
        new = dealt is not None and _kind_of(dealt) not in map(_kind_of, plans)
        return [*plans, dealt] if dealt is not None and new else plans

    def _dealt(self) -> tuple[Seated, ...] | None:
        """What one would do by hand with several GPUs: none divided, the longest runs first, each
        to the GPU that has least to do."""
        gpus = [kind.gpu for kind in self.kinds for _ in range(kind.count)]
        hands: list[list[int]] = [[] for _ in gpus]
        for i in sorted(self.setting.members, key=lambda i: -self.references[i].latency_s):
            busy = [
                sum(self.setting.alone(j, gpu).latency_s for j in hand)
                for gpu, hand in zip(gpus, hands)
            ]
            hands[min(range(len(gpus)), key=busy.__getitem__)].append(i)
        made: list[Seated] = []
        for index, (gpu, hand) in enumerate(zip(gpus, hands, strict=True)):
            members = tuple(sorted(hand))
            found = self._columns(0, gpu, [members]) if members else []
            if members and not found:
                return None
            seat = found[0].seat if found else Seat(SharedSlice(gpu), ())
            made.append(Seated(index, gpu, None, (seat,)))
        return tuple(made)

    def _chosen(self, columns: Sequence[_Column], options: _Ways) -> list[_Column] | None:
        """The seats that together are worth most, where each GPU is divided in one of these ways;
        None where not all models find one."""
        if self.objective != "fairness":
            return self._solved(columns, options)
        levels = sorted({c.least for c in columns})
        best, low, high = self._solved(columns, options), 0, len(levels) - 1
        while best is not None and low <= high:  # the highest level that all can have
            middle = (low + high) // 2
            some = [c for c in columns if c.least >= levels[middle]]
            found = self._solved(some, options)
            if found is None:
                high = middle - 1
            else:
                best, low = found, middle + 1
        return best

    def _solved(self, columns: Sequence[_Column], options: _Ways) -> list[_Column] | None:
        """Columns of the program: how often each seat is taken, then how many GPUs of each kind are
        divided in each way."""
        ways = [(k, g, most) for k, some in options.items() for g, most in some.items()]
        usable = {(k, t) for k, g, _ in ways for t in _targets(self.kinds[k].gpu, g)}
        columns = [c for c in columns if (c.kind, c.target) in usable]
        workloads = self.setting.workloads
        seats, count = len(columns), len(columns) + len(ways)
        cost, upper = np.zeros(count), np.zeros(count)
        entries: dict[object, list[tuple[int, float]]] = {}
        for i, c in enumerate(columns):
            cost[i], upper[i] = -c.worth, len(self.setting.members)
            for w in set(c.seat.members):
                entries.setdefault(w, []).append((i, float(c.seat.members.count(w))))
            entries.setdefault((c.kind, c.target), []).append((i, 1.0))
        if any(not entries.get(w) for w in range(len(workloads))):
            return None
        for j, (k, geometry, most) in enumerate(ways, seats):
            upper[j] = most
            cost[j] = self._hired(self.kinds[k])
            entries.setdefault(("gpus", k), []).append((j, 1.0))
            for target, held in _targets(self.kinds[k].gpu, geometry).items():
                entries.setdefault((k, target), []).append((j, -float(held)))
        rows: list[Row] = []
        for w, workload in enumerate(workloads):
            rows.append((workload.count, workload.count, entries[w]))
        rows += [(-np.inf, 0.0, entries[k, t]) for k, t in sorted(usable) if (k, t) in entries]
        for k in options:
            rows.append((0.0, float(self.kinds[k].count), entries["gpus", k]))
        values, _ = solve(LinearProgram(cost, upper, [True] * count, rows), SOLVE_S)
        if values is None:
            return None
        return [c for c, v in zip(columns, values[:seats]) for _ in range(round(v))]

    def _hired(self, kind: GpuKind) -> float:
        """What a GPU that is used counts against what the models get."""
        if self.objective != "cost" or kind.usd_per_hour is None:
            return 1e-6
        return kind.usd_per_hour * len(self.setting.members) * 2

    # ---- plans ----------------------------------------------------------------------------------

    def _laid(
        self, columns: Sequence[_Column], gpus: Sequence[tuple[int, Geometry]]
    ) -> tuple[Seated, ...]:
        """The seats on slices of GPUs: one after another on those that are left."""
        rest = sorted(columns, key=lambda c: c.seat.members)
        made: list[Seated] = []
        for index, (k, geometry) in enumerate(gpus):
            gpu, seats = self.kinds[k].gpu, list[Seat]()
            for placement in geometry.layout:
                target = f"{gpu}:{placement.profile.name}"
                taken = next((c for c in rest if (c.kind, c.target) == (k, target)), None)
                if taken is None:
                    seats.append(Seat(SharedSlice(target), (), placement))
                    continue
                rest.remove(taken)
                seats.append(Seat(taken.seat.part, taken.seat.members, placement))
            made.append(Seated(index, gpu, geometry, tuple(seats)))
        return tuple(made)

    def _several_laid(self, columns: Sequence[_Column]) -> tuple[Seated, ...]:
        """GPUs for the seats that were chosen: of each kind the undivided ones, then geometries
        that have the slices which are still to be had, the fewest first."""
        made: list[Seated] = []
        for k, kind in enumerate(self.kinds):
            mine = [c for c in columns if c.kind == k]
            left = kind.count
            for c in [c for c in mine if c.is_whole]:
                made.append(Seated(len(made), kind.gpu, None, (c.seat,)))
                left -= 1
            slices = [c for c in mine if not c.is_whole]
            if slices:
                used = _covering(kind.gpu, [c.target for c in slices], left)
                for x in self._laid(slices, [(k, g) for g in used]):
                    made.append(Seated(len(made), x.gpu, x.geometry, x.seats))
                left -= len(used)
            for _ in range(left):
                made.append(Seated(len(made), kind.gpu, None, (Seat(SharedSlice(kind.gpu), ()),)))
        return tuple(made)

    def _plain(self, gpu: str, kinds: Sequence[Geometry]) -> tuple[Seated, ...] | None:
        """What one would do by hand: the fewest slices that are enough, the longest runs on the
        largest."""
        members = sorted(self.setting.members, key=lambda i: -self.references[i].latency_s)
        enough = [g for g in kinds if len(g.profiles) >= len(members)]
        for geometry in sorted(enough, key=lambda g: (len(g.profiles), -g.sms)):
            places = sorted(geometry.layout, key=lambda x: -x.profile.sms)
            seats = {
                place: Seat(SharedSlice(f"{gpu}:{place.profile.name}"), (i,), place)
                for place, i in zip(places, members)
            }
            if all(self._served(x.part, x.members) for x in seats.values()):
                empty = {
                    x: Seat(SharedSlice(f"{gpu}:{x.profile.name}"), (), x)
                    for x in geometry.layout
                    if x not in seats
                }
                both = seats | empty
                return (Seated(0, gpu, geometry, tuple(both[x] for x in geometry.layout)),)
        return None

    def outcome(self, gpus: tuple[Seated, ...]) -> Outcome:
        """A plan simulated whole: GPUs by themselves, or together where they share a host."""
        groups = [gpus] if self.setting.host_threads is not None else [(gpu,) for gpu in gpus]
        served: list[Served] = []
        for group in groups:
            tenants: list[Tenant] = []
            for gpu in group:
                for j, seat in enumerate(gpu.seats):
                    if seat.members:
                        place = f"GPU {gpu.index}: part {j}"
                        tenants += self.setting.tenants(seat.part, place, seat.members)
            if not tenants:
                continue
            boards = {f"GPU {gpu.index}": load_target(gpu.gpu) for gpu in group}
            common = self.setting.common(boards)
            served += simulate(tenants, common, requests=self.requests, seed=self.setting.seed)
        members = [i for gpu in gpus for seat in gpu.seats for i in seat.members]
        prices = [self._price(gpu.gpu) for gpu in gpus if gpu.is_used]
        known = [p for p in prices if p is not None]
        return Outcome(
            gpus,
            tuple(served),
            tuple(self._progress(i, s) for i, s in zip(members, served, strict=True)),
            tuple(s.mean_s / self.references[i].latency_s for i, s in zip(members, served)),
            sum(known) if len(known) == len(prices) else None,
        )

    def _price(self, gpu: str) -> float | None:
        return next(kind.usd_per_hour for kind in self.kinds if kind.gpu == gpu)


def parts_of(target: str, count: int, ways: Sequence[Way] = WAYS) -> tuple[SharedSlice, ...]:
    """The ways in which so many models can share a part. MPS is for whole GPUs."""
    if count == 1:
        return (SharedSlice(target),)
    found = [SharedSlice(target, mode) for mode in MODES if mode in ways and mode != "mps"]
    if "mps" in ways and not is_slice(target):
        found += [SharedSlice(target, "mps"), SharedSlice(target, "mps", 100 / count)]
    return tuple(found)


def _slice_of(gpu: str, target: Target) -> str:
    """What a slice like this one is called on a GPU."""
    return f"{gpu}:{target.slice.profile}" if target.slice is not None else ""


def is_slice(target: str) -> bool:
    return load_target(target).slice is not None


def _slices_of(geometry: Geometry) -> int:
    return len(geometry.profiles)


def _kind_of(plan: tuple[Seated, ...]) -> object:
    """What two plans have in common that differ by which of equal slices a model has."""
    seats = (sorted((str(s.part), s.members) for s in x.seats) for x in plan)
    return tuple((x.gpu, x.geometry, tuple(some)) for x, some in zip(plan, seats, strict=True))


def _targets(gpu: str, geometry: Geometry | None) -> dict[str, int]:
    """The parts of a GPU, as targets, and how many it has of each."""
    if geometry is None:
        return {gpu: 1}
    names = [f"{gpu}:{p.name}" for p in geometry.profiles]
    return {name: names.count(name) for name in names}


def _covering(gpu: str, wanted: Sequence[str], most: int) -> list[Geometry]:
    """The fewest geometries, at most so many, that have all slices which are wanted."""
    known = geometries(mig_of(load_target(gpu)))
    held = [_targets(gpu, g) for g in known]
    names = sorted(set(wanted))
    rows: list[Row] = [
        (float(wanted.count(n)), np.inf, [(j, float(h[n])) for j, h in enumerate(held) if n in h])
        for n in names
    ]
    count = len(known)
    program = LinearProgram(np.ones(count), np.full(count, float(most)), [True] * count, rows)
    values, _ = solve(program, SOLVE_S)
    assert values is not None  # the choice of seats has found room
    return [g for g, v in zip(known, values) for _ in range(round(v))]
