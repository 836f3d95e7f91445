"""Programs on many devices: latency, interval, memory and bound of each point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from gpuir.cost.batch import BOUNDS, Batch, Costs
from gpuir.cost.work import Work
from gpuir.plan.space.program import Program, Straight
from gpuir.report.answer import Answer
from gpuir.simulate.layout import Layout, Sized
from gpuir.simulate.many import Ran, decoding, run_many
from gpuir.simulate.memory import available_bytes
from gpuir.simulate.timeline import HOST_BOUND
from gpuir.targets.profile import Profile, load_profile
from gpuir.targets.support import device_refused, reason
from gpuir.targets.target import Target

Numbers = np.ndarray[Any, Any]
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
    works: Mapping[str, Work],
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
    if not new:
        return table
    batch = batch_of(new) if batch_of else Batch.of([works[key] for key in new])
    places = [table.rows[key] for key in new]
    for t, target in enumerate(targets):
        costs = batch.on(target)
        for name in PARTS:
            table.parts[name][places, t] = getattr(costs, name)
        table.failed.update({(places[i], t): why for i, why in costs.failed.items()})
    return table


Alone = Callable[[Target], Answer]


def answers(
    program: Program, targets: Sequence[Target], table: CostTable, alone: Alone
) -> list[Answer]:
    """The program on each target; `alone` gives the answer where it has to be run whole. Columns of
    the table are the targets."""
    return answers_on(program, targets, range(len(targets)), table, alone)


def answers_on(
    program: Program,
    targets: Sequence[Target],
    which: Sequence[int],
    table: CostTable,
    alone: Alone,
    held: Held | None = None,
) -> list[Answer]:
    """The same on some of them. `held` keeps what is found of the program's memory."""
    if program.refused:
        return [_none(program, program.refused) for _ in which]
    found: dict[int, Answer] = {}
    together: dict[Profile, list[int]] = {}
    for t in which:
        profile = load_profile(program.profile, targets[t])
        if (error := device_refused(profile, program.dtypes, targets[t])) is not None:
            found[t] = _none(program, reason(error))
        elif program.straight is None or targets[t].is_cpu:
            found[t] = alone(targets[t])
        else:
            together.setdefault(profile, []).append(t)
    held = held or Held({}, {})
    for profile, alike in together.items():
        assert program.straight is not None
        some = _answers(program, program.straight, profile, targets, alike, table, held)
        found |= dict(zip(alike, some, strict=True))
    return [found[t] for t in which]


def _answers(
    program: Program,
    straight: Straight,
    profile: Profile,
    targets: Sequence[Target],
    which: Sequence[int],
    table: CostTable,
    held: Held,
) -> Iterator[Answer]:
    rows = [table.rows[key] for key in program.keys]
    here = np.ix_(rows, which)
    part: dict[str, Numbers] = {name: table.parts[name][here] for name in PARTS}
    ran = _ran(straight, profile, [targets[t] for t in which], part)
    called = [x.kernel for x in straight.calls if not x.empty]
    device_s: list[float] = [sum(column) for column in part["time_s"][called].T.tolist()]
    bounds: list[int] = _bounds(part, called).tolist()
    memory = _memory(straight.layout, [targets[t] for t in which], part["split"], held)
    own = set(rows)
    broken = {t: why for (row, t), why in table.failed.items() if row in own}
    for i, t in enumerate(which):
        if t in broken:
            yield _none(program, " ".join(broken[t].split()))
        elif not ran.time_s[i]:
            yield _none(program, f"nothing runs under {profile.name}")
        else:
            peak, reserved, available = memory[i]
            yield Answer(
                program.model,
                targets[t].name,
                profile.name,
                latency_s=float(ran.time_s[i]),
                interval=(float(ran.low_s[i]), float(ran.high_s[i])) if called else None,
                device_s=device_s[i],
                is_host_bound=bool(ran.gaps_s[i] > HOST_BOUND * ran.time_s[i]),
                bound=BOUNDS[bounds[i]],
                peak_bytes=peak,
                reserved_bytes=reserved,
                available_bytes=available,
                why=unfit(reserved, available),
            )


def _none(program: Program, why: str) -> Answer:
    """There is no latency, and why."""
    return Answer(program.model, profile=program.profile, why=why)


def unfit(reserved: int, available: int) -> str:
    """Why a point does not fit, or an empty text."""
    if reserved <= available:
        return ""
    return f"does not fit: {reserved:,} bytes are reserved, and {available:,} available"


def _ran(
    straight: Straight, profile: Profile, targets: Sequence[Target], part: Mapping[str, Any]
) -> Ran:
    """The timelines. Devices without a link to the host copy nothing."""
    own = decoding(profile, straight.is_decoding)
    times = np.stack([part[name] for name in ("time_s", "low_s", "high_s")])
    room = Ran(*(np.zeros(len(targets)) for _ in fields(Ran)))
    for links in ([t.pcie for t in targets], None):
        some = [i for i, t in enumerate(targets) if (t.pcie is None) == (links is None)]
        if not some:
            continue
        rates = (
            None if links is None else np.array([x.bytes_per_s for i in some if (x := links[i])])
        )
        ran = run_many(
            straight.calls, times[:, :, some], own, straight.sizes, rates, straight.params
        )
        for name in vars(room):
            getattr(room, name)[some] = getattr(ran, name)
    return room


def _bounds(part: Mapping[str, Any], called: Sequence[int]) -> Numbers:
    """What bounds the kernels that take the most time, of equals the first."""
    times, bound = part["time_s"], part["bound"]
    total = np.zeros((len(BOUNDS), times.shape[1]))
    columns = np.array(range(times.shape[1]))
    for kernel in called:
        total[bound[kernel], columns] += times[kernel]
    return total.argmax(axis=0)


@dataclass(frozen=True)
class Held:
    """What is known of a program's memory: with these tiles and what libraries keep, and of that
    what is reserved on a device of so many bytes."""

    sized: dict[tuple[int, ...], Sized]
    reserved: dict[tuple[int, ...], int]


def _memory(
    layout: Layout, targets: Sequence[Target], splits: Numbers, held: Held
) -> list[tuple[int, int, int]]:
    """Bytes at the peak, reserved and available, found once for equal tiles and devices."""
    used = sorted({part.kernel for part in layout.parts if part.kernel >= 0})
    found: list[tuple[int, int, int]] = []
    for target, some in zip(targets, splits[used].T.tolist(), strict=True):
        available = available_bytes(target)
        key = (layout.pool_bytes(target), *some)
        if key not in held.sized:
            held.sized[key] = layout.sized(dict(zip(used, some, strict=True)), key[0])
        if (*key, available) not in held.reserved:
            held.reserved[*key, available] = held.sized[key].reserved_bytes(available)
        found.append((held.sized[key].peak_bytes, held.reserved[*key, available], available))
    return found
