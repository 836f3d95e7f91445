"""What is asked for, what a run of it takes on a part of a GPU, and how parts are shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gpuir.cost.nest import board_watts
from gpuir.cost.power import bend
from gpuir.report.answer import Answer
from gpuir.simulate.memory import CONTEXT_BYTES, available_bytes
from gpuir.simulate.sharing import Load, Mode, SharedResources, Tenant
from gpuir.targets.load import load_target
from gpuir.targets.target import Target

# The share of the device's time that is lost while several processes have it in time slices: their
# contexts change, and each finds the caches full of another's. From one measurement: four
# fine-tunings of BERT at once on an A30 took 1.39 / 1.27 times as long as one after another
# (NVIDIA, Dividing NVIDIA A30 GPUs and Conquering Multiple Workloads), with the steps' own times as
# predicted (docs/validation/data.md).
SWITCH_SHARE = 0.2


@dataclass(frozen=True)
class Workload:
    """A model that is to run, `count` times, each for itself: what is asked of it and which model
    that is, by the index `model`."""

    name: str
    model: int
    count: int = 1
    load: Load = field(default_factory=Load)


Runs = Callable[[int, str], Answer]  # of a model, by its index, on a target, by its name; `needs`


class DoesNotFit(Exception):
    """Models need more memory than a part has, by so many bytes."""

    def __init__(self, target: str, missing_bytes: int):
        super().__init__(target, missing_bytes)
        self.target, self.missing_bytes = target, missing_bytes


@dataclass(frozen=True)
class SharedSlice:
    """A slice, or a whole GPU, as a target of this name, and how models share it. With a
    `percentage` each of them has that much of the SMs, under MPS."""

    target: str
    mode: Mode = "serial"
    percentage: float | None = None

    @property
    def how(self) -> str:
        """`MPS, 25 % of the SMs each`."""
        if self.percentage is not None:
            return f"MPS, {self.percentage:.0f} % of the SMs each"
        return {"serial": "one at a time", "time-slicing": "time slicing", "mps": "MPS"}[self.mode]


@dataclass(frozen=True)
class ServingSetting:
    """What a plan is made for: the workloads, what their runs take, and how many threads of the
    host launch them, each process one; None where there are enough."""

    workloads: tuple[Workload, ...]
    runs: Runs
    host_threads: int | None = None
    seed: int = 0

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The index of the workload of each that is to run."""
        return tuple(i for i, w in enumerate(self.workloads) for _ in range(w.count))

    def alone(self, workload: int, target: str) -> Answer:
        return self.runs(self.workloads[workload].model, target)

    def tenants(self, part: SharedSlice, place: str, members: Sequence[int]) -> tuple[Tenant, ...]:
        """Workloads, by index, in a part at a `place`; DoesNotFit where its memory is too small."""
        names = self._targets(part, len(members))
        found = [(self.workloads[i], self.alone(i, names)) for i in members]
        after = part.mode == "serial" and all(w.load.rate is None for w, _ in found)
        check_memory(load_target(part.target), [a for _, a in found], one_after_another=after)
        return tuple(self._tenant(w, a, part, place, len(members)) for w, a in found)

    def _targets(self, part: SharedSlice, count: int) -> str:
        """The part as one of so many has it: of the L2 its share where others run too."""
        if count == 1 or part.mode != "mps":
            return part.target
        target = load_target(part.target)
        changes = f"+l2.bytes={target.l2.bytes // count}"
        if part.percentage is not None:
            changes += f"+sms={max(1, round(target.sms * part.percentage / 100))}"
        return part.target + changes

    def _tenant(self, w: Workload, a: Answer, part: SharedSlice, place: str, count: int) -> Tenant:
        x = a.alone
        needs = {"host": x.host_s / a.latency_s} if self.host_threads is not None else {}
        board = board_of(place)
        if x.copies_s:
            needs[f"PCIe of {board}"] = x.copies_s / a.latency_s
        device = f"time of {place}"
        if count > 1 and part.mode == "time-slicing":
            needs[device] = x.busy_s / a.latency_s
        if count > 1 and part.mode == "mps":
            needs[f"bandwidth of {place}"] = x.bandwidth
            if part.percentage is None:
                needs[f"SMs of {place}"] = x.filled * x.busy_s / a.latency_s
        return Tenant(
            name=w.name,
            load=w.load,
            time_s=a.latency_s,
            needs=needs,
            watts=min(x.watts, board_watts(load_target(part.target))),  # alone: what it needs
            turn=place if part.mode == "serial" and count > 1 else "",
            sliced=device if count > 1 and part.mode == "time-slicing" else "",
            board=board,
        )

    def common(self, boards: Mapping[str, Target], share: float = 1.0) -> SharedResources:
        """What parts of GPUs have in common, whose places begin with the names of these boards; of
        their power a `share`."""
        watts = {board: board_watts(target) * share for board, target in boards.items()}
        limits = {} if self.host_threads is None else {"host": float(self.host_threads)}
        return SharedResources(limits, SWITCH_SHARE, watts, bend(next(iter(boards.values()))))


def board_of(place: str) -> str:
    """The GPU of a place: `GPU 0` of `GPU 0: 3g.20gb at 4`."""
    return place.partition(":")[0]


def check_memory(target: Target, runs: Sequence[Answer], *, one_after_another: bool) -> None:
    """DoesNotFit where a part is too small for models: for all at once, each process with a context
    of its own, or for the largest of jobs that run one after another."""
    sizes = [a.reserved_bytes + CONTEXT_BYTES for a in runs]
    needed = (max(sizes) if one_after_another else sum(sizes)) - CONTEXT_BYTES
    missing = needed - available_bytes(target)
    if missing > 0:
        raise DoesNotFit(target.name, missing)
