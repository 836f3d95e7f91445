"""Two reports compared: what changed, kernel by kernel, and whether that is within a budget."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.phases import PHASES
from gpuir.report.order import share_of_cases, spread
from gpuir.report.saved import METRICS, SavedKernel, SavedRun

SAME = 1e-9  # relative: closer numbers are one

# ---------------------------------------------------------------------------- kernel by kernel


@dataclass(frozen=True)
class KernelChange:
    """Kernels of the old report, and those of the new one that do their work. One side is empty
    where the work came or went."""

    old: tuple[SavedKernel, ...]
    new: tuple[SavedKernel, ...]

    @property
    def what(self) -> str:
        """What is another in it: `2 fused to 1`, `shape, tile`; empty where only its time is."""
        if not self.old or not self.new:
            return "new" if self.new else "gone"
        if len(self.old) != len(self.new):
            verb = "fused" if len(self.old) > len(self.new) else "split"
            return f"{len(self.old)} {verb} to {len(self.new)}"
        pairs = list(zip(self.old, self.new, strict=True))
        named = ("op", "shape", "tile", "bound", "runs")
        return ", ".join(x for x in named if any(getattr(a, x) != getattr(b, x) for a, b in pairs))

    @property
    def is_same(self) -> bool:
        times = [sum(x.time_s for x in side) for side in (self.old, self.new)]
        return math.isclose(*times, rel_tol=SAME) and not self.what


@dataclass(frozen=True)
class ChangeGroup:
    """Changes that are alike, as those of layers that repeat."""

    changes: tuple[KernelChange, ...]

    @property
    def one(self) -> KernelChange:
        return self.changes[0]

    @property
    def names(self) -> list[str]:
        return [(c.new or c.old)[0].name for c in self.changes]

    @property
    def old_s(self) -> float:
        return sum(x.time_s for c in self.changes for x in c.old)

    @property
    def new_s(self) -> float:
        return sum(x.time_s for c in self.changes for x in c.new)

    @property
    def status(self) -> Literal["came", "went", "changed", "same"]:
        if not self.one.old:
            return "came"
        if not self.one.new:
            return "went"
        return "same" if self.one.is_same else "changed"


def groups(old: Sequence[SavedKernel], new: Sequence[SavedKernel]) -> tuple[ChangeGroup, ...]:
    """Every kernel of both, the largest difference first."""
    alike: dict[object, list[KernelChange]] = {}
    for c in changes(old, new):
        sides = tuple(tuple((x.op, x.shape) for x in side) for side in (c.old, c.new))
        alike.setdefault((c.what, c.is_same, sides), []).append(c)
    found = (ChangeGroup(tuple(group)) for group in alike.values())
    return tuple(sorted(found, key=lambda g: (-abs(g.new_s - g.old_s), g.names[0])))


def changes(old: Sequence[SavedKernel], new: Sequence[SavedKernel]) -> Iterator[KernelChange]:
    """Kernels of one op that stand for the same model nodes belong together; then those that have
    nodes in common, as where one was fused; then those of one op and shape.

    Exporters number nodes as they come (`mm_41`). Where the models have not the same nodes, numbers
    may have moved on: kernels of one shape whose nodes differ in these alone come first then.
    """
    keys: list[Key] = [
        lambda x: (x.op, x.shape, x.nodes),
        lambda x: (x.op, x.nodes),
        lambda x: (x.op, x.shape, bare(x)),
    ]
    if {n for x in old for n in x.nodes} != {n for x in new for n in x.nodes}:
        keys[1:] = reversed(keys[1:])
    for key in keys:
        pairs, old, new = _paired(old, new, key)
        yield from pairs
    shared, old, new = _sharing(old, new)
    yield from shared
    pairs, old, new = _paired(old, new, lambda x: (x.op, x.shape))
    yield from pairs
    yield from (KernelChange((x,), ()) for x in old)
    yield from (KernelChange((), (x,)) for x in new)


def bare(x: SavedKernel) -> tuple[str, ...]:
    """Its model nodes without their numbers: `h.0/mm_41/backward` → `h.0/mm/backward`."""
    return tuple(_NUMBER.sub("", node) for node in x.nodes)


_NUMBER = re.compile(rf"_\d+(?=(/({'|'.join(PHASES)}))?$)")
Key = Callable[[SavedKernel], Hashable]
Rest = tuple[list[KernelChange], list[SavedKernel], list[SavedKernel]]


def _paired(old: Sequence[SavedKernel], new: Sequence[SavedKernel], key: Key) -> Rest:
    """Those of equal key one to one, in their order; and what is left of both."""
    waiting: dict[Hashable, deque[SavedKernel]] = {}
    for x in old:
        waiting.setdefault(key(x), deque()).append(x)
    pairs: list[KernelChange] = []
    taken: set[int] = set()
    rest: list[SavedKernel] = []
    for x in new:
        if queue := waiting.get(key(x)):
            pairs.append(KernelChange((queue[0],), (x,)))
            taken.add(id(queue.popleft()))
        else:
            rest.append(x)
    return pairs, [x for x in old if id(x) not in taken], rest


def _sharing(old: Sequence[SavedKernel], new: Sequence[SavedKernel]) -> Rest:
    """Those that share model nodes, directly or through others, together; and what is left."""
    holders: dict[str, list[int]] = {}
    everything = [*old, *new]
    for i, x in enumerate(everything):
        for node in x.nodes:
            holders.setdefault(node, []).append(i)
    seen: set[int] = set()
    found: list[KernelChange] = []
    rest: tuple[list[SavedKernel], list[SavedKernel]] = [], []
    for i in range(len(everything)):
        if i in seen:
            continue
        seen.add(i)
        group, queue = [i], deque([i])
        while queue:
            for node in everything[queue.popleft()].nodes:
                for j in holders.pop(node, ()):
                    if j not in seen:
                        seen.add(j)
                        group.append(j)
                        queue.append(j)
        before = [everything[j] for j in sorted(group) if j < len(old)]
        after = [everything[j] for j in sorted(group) if j >= len(old)]
        if before and after:
            found.append(KernelChange(tuple(before), tuple(after)))
        else:
            rest[0].extend(before)
            rest[1].extend(after)
    return found, *rest


# ---------------------------------------------------------------------------- run by run


@dataclass(frozen=True)
class Diff:
    """One run of the old report beside one of the new."""

    old: SavedRun
    new: SavedRun
    groups: tuple[ChangeGroup, ...]

    @property
    def name(self) -> str:
        """`a100 eager`; `a100 eager → compiled` where the two are not alike."""
        sides = (self.old.target, self.new.target), (self.old.profile, self.new.profile)
        return " ".join(" → ".join(dict.fromkeys(names)) for names in sides)

    @property
    def model(self) -> str:
        return " → ".join(dict.fromkeys((self.old.model, self.new.model)))

    @property
    def changed(self) -> list[ChangeGroup]:
        return [g for g in self.groups if g.status != "same"]

    @property
    def differs(self) -> bool:
        return bool(self.changed or self.notes or self.old.values != self.new.values)

    @property
    def kinds(self) -> list[tuple[str, float, float]]:
        """What each kind of kernels took, and takes."""
        a, b = self.old.kinds, self.new.kinds
        return [(name, a.get(name, 0.0), b.get(name, 0.0)) for name in dict.fromkeys((*a, *b))]

    @property
    def slower(self) -> float | None:
        """In what share of cases the new run takes longer; None without intervals. Kernels of one
        GPU that are as they were are wrong alike in both, so that only the rest is uncertain."""
        a, b = self.old.interval_s, self.new.interval_s
        if a is None or b is None or not (a[0] and b[0]):
            return None
        old, new = self.old.values["latency"], self.new.values["latency"]
        alike = self.old.target == self.new.target
        same_s = sum(g.new_s for g in self.groups if g.status == "same") if alike else 0.0
        ends = ((old, a), (new, b))
        errors = (max(time_s - same_s, 0.0) * spread(interval) for time_s, interval in ends)
        return share_of_cases(new - old, math.hypot(*errors))

    @property
    def notes(self) -> tuple[str, ...]:
        """What else is not as it was, and may be why."""
        a, b = self.old, self.new
        found: list[str] = []
        if a.batch != b.batch:
            found.append(f"batch: {a.batch or '?'} → {b.batch or '?'}")
        if a.predictors != b.predictors:
            found.append(f"predictor: {', '.join(a.predictors)} → {', '.join(b.predictors)}")
        if a.target == b.target:
            found += [
                f"target: {name} {a.numbers.get(name)} → {b.numbers.get(name)}"
                for name in dict.fromkeys((*a.numbers, *b.numbers))
                if a.numbers.get(name) != b.numbers.get(name)
            ]
        found += [
            f"{status} model nodes: {count} → {b.nodes.get(status, 0)}"
            for status, count in a.nodes.items()
            if count != b.nodes.get(status, 0)
        ]
        labels = ("assumed", "warnings") if a.name == b.name else ("warnings",)
        for label in labels:
            before, after = getattr(a, label), getattr(b, label)
            found += [f"{label}, no longer: {text}" for text in before if text not in after]
            found += [f"{label}, new: {text}" for text in after if text not in before]
        return tuple(found)


def compare(old: Sequence[SavedRun], new: Sequence[SavedRun]) -> tuple[Diff, ...]:
    """The runs of both by name of target and profile; where each report has one run, these.
    UsageError where one has no partner, or the models have nothing in common."""
    if len(old) == len(new) == 1:
        pairs = [(old[0], new[0])]
    else:
        partners = {run.name: run for run in new}
        lone = {x.name for x in old} ^ set(partners)
        if lone:
            raise UsageError(
                "the two reports have different targets or profiles",
                expected="the same runs in both reports",
                found="\n".join(
                    f"{name}, only in the {'new' if name in partners else 'old'} report"
                    for name in sorted(lone)
                ),
                fix="choose runs with --target and --profile, or analyze both models "
                "for the same ones",
            )
        pairs = [(run, partners[run.name]) for run in old]
    return tuple(_compared(a, b) for a, b in pairs)


def _compared(old: SavedRun, new: SavedRun) -> Diff:
    found = Diff(old, new, groups(old.kernels, new.kernels))
    alike = any(g.status in ("same", "changed") for g in found.groups)
    if old.model != new.model and found.groups and not alike:
        raise UsageError(
            "the reports are of two different models",
            expected="two versions of one model, with nodes of the same name or "
            "kernels of the same shape",
            found=f"{old.model} and {new.model}",
            fix="run `gpuir analyze` on each of them",
        )
    return found


# ---------------------------------------------------------------------------- budgets

UNITS: dict[str, dict[str, float]] = {
    "s": {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "bytes": {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30},
    "flop": {"flop": 1, "kflop": 1e3, "Mflop": 1e6, "Gflop": 1e9, "Tflop": 1e12, "Pflop": 1e15},
    "": {"": 1},
}
EXAMPLES = {
    "s": "+3%, +50us or 12ms",
    "bytes": "+3%, +100MB or 2GB",
    "flop": "+3%, +10Mflop or 2Tflop",
    "": "+3%, +0 or 400",
}
_BUDGET = re.compile(r"\s*(\w+)\s*=\s*([+-]?)\s*(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*(%|[a-zA-Z]*)\s*")


@dataclass(frozen=True)
class Budget:
    """How much a metric may be: so much more than it was, by share or amount, or so much."""

    text: str
    metric: str
    amount: float
    of: Literal["share", "amount", "whole"]

    def limit(self, old: float) -> float:
        match self.of:
            case "share":
                return old * (1 + self.amount)
            case "amount":
                return old + self.amount
            case "whole":
                return self.amount


@dataclass(frozen=True)
class BudgetCheck:
    """One budget on one run."""

    budget: Budget
    diff: Diff

    @property
    def old(self) -> float:
        return self.diff.old.values[self.budget.metric]

    @property
    def new(self) -> float:
        return self.diff.new.values[self.budget.metric]

    @property
    def limit(self) -> float:
        return self.budget.limit(self.old)

    @property
    def is_kept(self) -> bool:
        return self.new <= self.limit + SAME * abs(self.limit)


def read_budget(text: str) -> Budget:
    """`latency=+3%`, `memory=+100MB`, `launches=+0`, `latency=12ms`; UsageError for anything
    else."""
    found = _BUDGET.fullmatch(text)
    name = found[1] if found else text.partition("=")[0].strip()
    if name not in METRICS:
        raise UsageError(
            f"no budget can be set for {name!r}", where=text, fix=nearest(name, METRICS)
        )
    units = UNITS[METRICS[name].unit]
    example = EXAMPLES[METRICS[name].unit]
    expected = f"{name}={example}"
    if not found:
        raise UsageError("not a budget", where=text, expected=expected)
    _, sign, number, unit = found.groups()
    amount = float(f"{sign}{number}")
    if unit == "%" and sign:
        return Budget(text, name, amount / 100, "share")
    if unit not in units:
        what = (
            "a percentage needs a sign: + or -"
            if unit == "%"
            else f"the unit {unit!r} does not belong to it"
        )
        what = what if unit else "which unit"
        raise UsageError(f"not a budget: {what}", where=text, expected=expected)
    return Budget(text, name, amount * units[unit], "amount" if sign else "whole")


def checks(diffs: Sequence[Diff], budgets: Sequence[Budget]) -> tuple[BudgetCheck, ...]:
    return tuple(BudgetCheck(budget, diff) for diff in diffs for budget in budgets)
