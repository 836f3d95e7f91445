"""Programs on many devices: latency, interval, memory and bound of each point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpuir.cost.batch import BOUNDS, Batch, Costs, best_tiles, costs_of
from gpuir.cost.habits import Kernel, usual
from gpuir.cost.host import host_cost
from gpuir.cost.tile import BY
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Graph
from gpuir.ir.notes import Bound, Cost
from gpuir.plan.space.program import Program, program_of
from gpuir.report.answer import Answer, unfit
from gpuir.simulate.clock import KernelTimes, Script
from gpuir.simulate.launches import Found, chosen, counted
from gpuir.simulate.layout import MemoryLayout
from gpuir.simulate.memory import available_bytes, room, sized
from gpuir.simulate.timeline import HOST_BOUND, Prepared, ends_of, link_of
from gpuir.targets.profile import Profile, load_profile
from gpuir.targets.support import device_refused, reason
from gpuir.targets.target import Target

Numbers = np.ndarray[Any, Any]
Held = dict[tuple[int | None, ...], tuple[int, int, int]]  # a program's memory, by tiles and room
PARTS = ("time_s", "low_s", "high_s", "bound", "split")  # of costs, each an array


@dataclass
class CostTable:
    """What kernels cost on devices, a row a kernel and a column a device: `parts` as `Costs` has
    them. `rows` are by the kernel's key; `failed` are those that no tile fits."""

    rows: dict[str, int]
    parts: dict[str, Numbers]
    failed: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])

    def packed(self, key: str) -> bytes | None:
        """A kernel's row; None where there is more to say than numbers."""
        row = self.rows[key]
        if any(failed == row for failed, _ in self.failed):
            return None
        return b"".join(self.parts[name][row].tobytes() for name in PARTS)

    def unpack(self, key: str, data: bytes) -> None:
        """Fills a kernel's row with what `packed` gave."""
        at = 0
        for name in PARTS:
            row = self.parts[name][self.rows[key]]
            row[:] = np.frombuffer(data, row.dtype, len(row), at)
            at += row.nbytes


def cost_table(
    works: Mapping[str, Kernel],
    targets: Sequence[Target],
    known: Mapping[str, bytes] | None = None,
    batch_of: Callable[[Sequence[str]], Batch] | None = None,
) -> CostTable:
    """The costs of kernels by their keys, of which some are `known`: as a table packs them. What
    `batch_of` gives costs the rest together."""
    known, room = known or {}, vars(Costs.room(0))
    shape = len(works), len(targets)
    table = CostTable(
        {key: i for i, key in enumerate(works)},
        {name: np.zeros(shape, room[name].dtype) for name in PARTS},
    )
    for key in works.keys() & known.keys():
        table.unpack(key, known[key])
    new = [key for key in works if key not in known]
    for on_cpu in (False, True):  # where caches hold weights counts on CPUs alone
        some = [key for key in new if on_cpu or works[key].weights is None]
        columns = [t for t, x in enumerate(targets) if x.is_cpu == on_cpu]
        if not some or not columns:
            continue
        batch = batch_of(some) if batch_of else Batch.of([works[key] for key in some])
        places = [table.rows[key] for key in some]
        for t in columns:
            costs = batch.on(targets[t])
            for name in PARTS:
                table.parts[name][places, t] = getattr(costs, name)
            table.failed.update({(places[i], t): why for i, why in costs.failed.items()})
    return table


def run(rows: Iterable[Mapping[int, Graph]], targets: Sequence[Target]) -> list[dict[int, Answer]]:
    """What each of several questions comes to on those of the targets that it has a graph of
    kernels for, by their place: the kernels of all are costed together."""
    programs = [_programs(row, targets) for row in rows]
    made = [p for row in programs for p in row.values()]
    works = {key: work for p in made for key, work in zip(p.keys, p.works, strict=True)}
    table = cost_table(works, targets)
    return [answers(row, targets, table) for row in programs]


def _programs(row: Mapping[int, Graph], targets: Sequence[Target]) -> dict[int, Program]:
    """Of each graph one for its GPUs, and one for its CPUs."""
    made: dict[tuple[int, bool], Program] = {}
    found: dict[int, Program] = {}
    for t, g in row.items():
        key = id(g), targets[t].is_cpu
        if key not in made:
            made[key] = program_of(g, targets[t].is_cpu)
        found[t] = made[key]
    return found


def answers(
    programs: Mapping[int, Program],
    targets: Sequence[Target],
    table: CostTable,
    held: dict[int, Held] | None = None,
) -> dict[int, Answer]:
    """Programs on targets, by the place of the target, which is its column of the table. `held`
    keeps what is found of their memory, by the identity of the program."""
    held = {} if held is None else held
    found: dict[int, Answer] = {}
    for key, program in {id(p): p for p in programs.values()}.items():
        places = [t for t, x in programs.items() if x is program]
        found |= _answers(program, targets, places, table, held.setdefault(key, {}))
    return found


def _answers(
    program: Program,
    targets: Sequence[Target],
    which: Sequence[int],
    table: CostTable,
    held: Held,
) -> dict[int, Answer]:
    if program.refused:
        return dict.fromkeys(which, none(program, program.refused))
    found: dict[int, Answer] = {}
    together: dict[tuple[Profile, bool, bool], list[int]] = {}
    rows = {table.rows[key] for key in program.keys}
    broken = {t: why for (row, t), why in table.failed.items() if row in rows}
    for t in which:
        target = targets[t]
        profile = load_profile(program.profile, target)
        if (error := device_refused(profile, program.dtypes, target)) is not None:
            found[t] = none(program, reason(error))
        elif t in broken:
            found[t] = none(program, " ".join(broken[t].split()))
        else:
            alike = profile, target.is_cpu, target.pcie is None
            together.setdefault(alike, []).append(t)
    for (profile, *_), alike in together.items():
        here = [targets[t] for t in alike]
        costs = _costs(program, profile, here, table, alike)
        memory = _memory(program.layout, profile, here, costs["split"], held)
        runs = _runs(program, profile, here, costs)
        for t, run, (peak, reserved, available) in zip(alike, runs, memory, strict=True):
            if run.why or not run.latency_s:
                found[t] = none(program, run.why or f"nothing runs under {profile.name}")
                continue
            found[t] = replace(
                run,
                peak_bytes=peak,
                reserved_bytes=reserved,
                available_bytes=available,
                why=unfit(reserved, available),
            )
    return found


def _costs(
    program: Program,
    profile: Profile,
    targets: Sequence[Target],
    table: CostTable,
    which: Sequence[int],
) -> dict[str, Numbers]:
    """What a program's kernels cost, a row a kernel and a column a device, by `PARTS`."""
    rows = [table.rows[key] for key in program.keys]
    parts: dict[str, Numbers] = {name: table.parts[name][np.ix_(rows, which)] for name in PARTS}
    for x in program.hosted:
        costs = [host_cost(x, target, profile) for target in targets]
        ends = [x.interval or (x.time_s, x.time_s) for x in costs]
        row = (
            *([x.time_s for x in costs], *zip(*ends, strict=True)),
            *([BOUNDS.index(x.bound) for x in costs], [1] * len(costs)),
        )
        parts = {name: np.vstack([parts[name], n]) for name, n in zip(PARTS, row, strict=True)}
    return parts


def _runs(
    program: Program, profile: Profile, targets: Sequence[Target], costs: Mapping[str, Numbers]
) -> Iterator[Answer]:
    """On each device, without its memory."""
    own = program.launches.host(profile, targets[0])
    if is_straight(program, own):
        yield from _together(program, own, targets, costs)
        return
    for i, target in enumerate(targets):
        try:
            yield alone(program, own, target, {name: n[:, i : i + 1] for name, n in costs.items()})
        except GpuirError as error:
            yield none(program, " ".join(str(error).split()))


def is_straight(program: Program, profile: Profile) -> bool:
    """Whether what comes next is the same whatever the numbers."""
    return program.launches.is_straight and profile.streams == 1


@dataclass(frozen=True)
class RunColumns:
    """Runs of a program beside one another: `ends` has a row an end of the intervals (as expected,
    quick, slow) and a column a run; `busy_s` and `gaps_s` are a number each."""

    ends: Numbers
    busy_s: Numbers
    gaps_s: Numbers
    is_empty: bool


def side_by_side(
    program: Program, profile: Profile, costs: Mapping[str, Numbers], link: Numbers | None
) -> RunColumns:
    """A program, whose launches are straight, under a profile with the host that it has: `costs` by
    `PARTS`, a row a kernel and a column a run, and the `link` of each run's device."""
    launches, count = program.launches, costs["time_s"].shape[1]
    times = list(zip(*(costs[name] for name in PARTS[:3]), strict=True))
    ends = zip((time for time, *_ in times), *ends_of(launches.found, times, profile), strict=True)
    by = profile.host.uncertainty
    kernels = KernelTimes(
        seconds=[np.stack(x) for x in ends], host=np.array([[1.0], [1 / by], [by]]), link=link
    )
    ran, shape = Script(launches, profile).run(kernels), (3, count)
    return RunColumns(
        np.broadcast_to(ran.time_s, shape),
        np.broadcast_to(ran.busy_s, shape)[0],
        np.broadcast_to(ran.gaps_s, shape)[0],
        is_empty=all(x.empty for x, _ in counted(launches.found)),
    )


def _together(
    program: Program, profile: Profile, targets: Sequence[Target], costs: Mapping[str, Numbers]
) -> Iterator[Answer]:
    """On all devices at once."""
    links = [x.pcie for x in targets]
    link = np.array([x.bytes_per_s for x in links if x]) if all(links) else None
    ran = side_by_side(program, profile, costs, link)
    yield from told(program, profile, [x.name for x in targets], costs, ran)


def told(
    program: Program,
    profile: Profile,
    targets: Sequence[str],
    costs: Mapping[str, Numbers],
    ran: RunColumns,
) -> Iterator[Answer]:
    """What runs beside one another come to, each on the target of this name."""
    busy: list[float] = ran.busy_s.tolist()
    gaps: list[float] = ran.gaps_s.tolist()
    device_s, bounds = _sums(_called(program.launches.found), costs)
    for i, (time_s, low_s, high_s) in enumerate(ran.ends.T.tolist()):
        yield Answer(
            program.model,
            targets[i],
            profile.name,
            latency_s=time_s,
            interval=None if ran.is_empty else (low_s, high_s),
            device_s=device_s[i],
            busy_s=busy[i],
            gaps_s=gaps[i],
            is_host_bound=gaps[i] > HOST_BOUND * time_s,
            bound=bounds[i],
        )


def alone(
    program: Program, profile: Profile, target: Target, costs: Mapping[str, Numbers]
) -> Answer:
    """On one device, where what comes next depends on the numbers."""
    launches = program.launches
    seconds: list[float]
    seconds, low, high, by, _ = (costs[name][:, 0].tolist() for name in PARTS)
    launches = replace(launches, found=chosen(launches.found, seconds))
    if profile.streams == 1 and not any(x.group for x, _ in counted(launches.found)):
        made = tuple(
            Cost(time_s, BOUNDS[int(by[i])], BY, (), (), interval=(low[i], high[i]))
            for i, time_s in enumerate(seconds)
        )
    else:  # what kernels fill of the device counts
        tiles = best_tiles(dict.fromkeys(map(usual, program.works), ""), target)
        made = tuple(costs_of([(x, tiles[usual(x)]) for x in program.works], target))
        made += tuple(host_cost(x, target, profile) for x in program.hosted)
    run = Prepared(Script(launches, profile, program.model), made, link_of(target))
    line = run.run(seconds)
    (device_s,), (most,) = _sums(_called(launches.found), costs)
    return Answer(
        program.model,
        target.name,
        profile.name,
        latency_s=line.time_s,
        interval=run.interval,
        device_s=device_s,
        busy_s=line.busy_s,
        gaps_s=line.gaps_s,
        is_host_bound=line.is_host_bound,
        bound=most,
    )


def _called(found: Iterable[Found]) -> list[tuple[int, int]]:
    """The kernels that run, and how often."""
    return [(x.kernel, runs) for x, runs in counted(found) if not x.empty]


def _sums(
    called: Sequence[tuple[int, int]], costs: Mapping[str, Numbers]
) -> tuple[list[float], list[Bound]]:
    """What kernels take together on each device, and what bounds those that take the most time, of
    equals the first."""
    kernels, runs = [x for x, _ in called], np.array([n for _, n in called])
    times, bound = costs["time_s"][kernels] * runs.reshape(-1, 1), costs["bound"][kernels]
    total = np.zeros((len(BOUNDS), times.shape[1]))
    columns: list[int] = list(range(times.shape[1]))
    for time_s, by in zip(times, bound, strict=True):
        total[by, columns] += time_s
    return [sum(column) for column in times.T.tolist()], [BOUNDS[i] for i in total.argmax(axis=0)]


def none(program: Program, why: str) -> Answer:
    """There is no latency, and why."""
    return Answer(program.model, profile=program.profile, why=why)


def _memory(
    layout: MemoryLayout, profile: Profile, targets: Sequence[Target], splits: Numbers, held: Held
) -> list[tuple[int, int, int]]:
    """Bytes at the peak, reserved and available, found once for equal tiles and devices."""
    used = layout.kernels
    found: list[tuple[int, int, int]] = []
    for target, some in zip(targets, splits[used].T.tolist(), strict=True):
        own = room(profile, target)
        key = (*own, *some)
        if key not in held:
            memory = sized(layout, dict(zip(used, some, strict=True)), profile, own)
            held[key] = memory.peak_bytes, memory.reserved_bytes, available_bytes(target)
        found.append(held[key])
    return found
