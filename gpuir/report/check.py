"""What a model took on the device at hand beside what was predicted: for the whole, and for the
steps that its framework runs, paired with our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property

from gpuir.ir.graph import Graph, Level, Node
from gpuir.ops import kernel as k
from gpuir.report.answer import Answer
from gpuir.report.kernels import KernelRow
from gpuir.report.names import node_name
from gpuir.targets.load import load_target

# What frameworks call the steps that multiply, by the kernels that we have for them.
PRODUCTS = {
    "attention": ("scaled_dot_product", "attention"),
    "conv": ("conv",),
    "gemm": ("linear", "addmm", "matmul", "bmm", "mm", "gemm"),
}
OTHER = "other"
MISPAIRED = 20.0  # times longer or shorter, beyond which a step has done something else
Names = Callable[[KernelRow], list[str]]


@dataclass(frozen=True)
class RanStep:
    """A step as a framework ran it: its name, which is that of a model node where the framework
    keeps these, the operator, and seconds."""

    name: str
    op: str
    seconds: float


@dataclass(frozen=True)
class DeviceRun:
    """A run of a model: seconds of a call, and of its steps in order. `spread` is the distance
    between the quartiles over the median, `by` the software, `notes` what a reader should know."""

    seconds: float
    spread: float
    runs: int
    steps: tuple[RanStep, ...]
    by: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckedKernels:
    """Steps of the framework and the kernels that stand for them: mostly one each. Either may be
    none: what we have no kernel for, and what the framework does not run by itself."""

    kernels: tuple[KernelRow, ...]
    steps: tuple[RanStep, ...]

    @property
    def measured_s(self) -> float | None:
        return sum(x.seconds for x in self.steps) if self.steps else None

    @property
    def predicted_s(self) -> float | None:
        return sum(x.time_s for x in self.kernels) if self.kernels else None

    @property
    def more_s(self) -> float:
        """By how much what was measured is more than what was predicted."""
        return (self.measured_s or 0.0) - (self.predicted_s or 0.0)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        if self.measured_s is None or not self.predicted_s:
            return None
        return self.measured_s / self.predicted_s

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between what 80 % of measurements lie, as far off as each in the same direction."""
        found = [x.interval for x in self.kernels if x.time_s > 0]
        ends = [x for x in found if x is not None]
        if not ends or len(ends) < len(found):
            return None
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    @property
    def is_inside(self) -> bool | None:
        """Whether what was measured is inside the interval."""
        if self.interval is None or self.measured_s is None:
            return None
        return self.interval[0] <= self.measured_s <= self.interval[1]

    @property
    def name(self) -> str:
        """The model node it is known by."""
        return self.slowest.label if self.kernels else self.steps[0].name

    @property
    def kind(self) -> str:
        return self.slowest.kind if self.kernels else self.steps[0].op

    @property
    def shape(self) -> str:
        return self.slowest.shape if self.kernels else ""

    @property
    def slowest(self) -> KernelRow:
        return max(self.kernels, key=lambda x: x.time_s)

    @cached_property
    def graph(self) -> Graph | None:
        """The kernels alone, as a graph, if each is launched once and took about what is predicted:
        what a calibration reads."""
        launched = [x for x in self.kernels if x.launches]
        if not launched or self.ratio is None or any(x.runs != 1 for x in launched):
            return None
        if not 1 / MISPAIRED < self.ratio < MISPAIRED:
            return None
        return alone([x.node for x in launched])


@dataclass(frozen=True)
class Check:
    """An answer beside a trial of the same model."""

    answer: Answer
    trial: DeviceRun
    weights: k.HeldWeights
    rows: tuple[CheckedKernels, ...]

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.trial.seconds / self.answer.latency_s

    @property
    def is_inside(self) -> bool | None:
        """Whether what was measured is inside the interval."""
        ends = self.answer.interval
        return None if ends is None else ends[0] <= self.trial.seconds <= ends[1]

    @property
    def device(self) -> str:
        """The shipped target that the device is a variant of."""
        return load_target(str(self.answer.graph.target)).device

    @property
    def steps_s(self) -> float:
        return sum(x.seconds for x in self.trial.steps)

    @property
    def inside(self) -> tuple[int, int]:
        """Of how many kernels the measured time is inside the interval, and how many say one."""
        known = [x.is_inside for x in self.rows if x.is_inside is not None]
        return sum(known), len(known)

    def causes(self) -> list[tuple[str, int, float, float]]:
        """Kinds of kernels by how much they differ: the kind, how many, seconds measured and
        predicted; those that differ most first."""
        found: dict[str, list[CheckedKernels]] = {}
        for row in self.rows:
            found.setdefault(row.kind, []).append(row)
        sums = [
            (
                *(kind, len(rows), sum(x.measured_s or 0.0 for x in rows)),
                sum(x.predicted_s or 0.0 for x in rows),
            )
            for kind, rows in found.items()
        ]
        return sorted(sums, key=lambda x: -abs(x[2] - x[3]))


def alone(nodes: Sequence[Node]) -> Graph:
    """Kernels as a graph of level kernel: what they read of others are its inputs."""
    made = {v for n in nodes for v in n.results}
    read = dict.fromkeys(v for n in nodes for v in n.op.operands if v not in made)
    plain = tuple(Node(n.op, n.results) for n in nodes)
    outputs = tuple(v for n in nodes for v in n.results)
    return Graph(Level.kernel, "check", inputs=tuple(read), nodes=plain, outputs=outputs)


def checked(answer: Answer, trial: DeviceRun) -> Check:
    """The trial's steps paired with the answer's kernels: by the names of model nodes, where
    the framework keeps them, else in order, by what multiplies and what does not."""
    kernels = [x for x in answer.running if not x.rest]
    last = answer.graph.framework == "pytorch"  # whose nodes have names that are alone

    def names(x: KernelRow) -> list[str]:
        found = map(node_name, x.locs)
        return [name.rpartition("/")[2] if last else name for name in found]

    known = {name for x in kernels for name in names(x)}
    named_s = sum(x.seconds for x in trial.steps if x.name in known)
    if 2 * named_s >= sum(x.seconds for x in trial.steps):
        pairs = by_name(kernels, trial.steps, names)
    else:
        pairs = in_order(kernels, trial.steps)
    rows = map(_without_views, pairs)
    told = tuple(row for row in rows if row.steps or row.kernels)
    return Check(answer, trial, k.HeldWeights.of(answer.graph), told)


def _without_views(row: CheckedKernels) -> CheckedKernels:
    return replace(row, kernels=tuple(x for x in row.kernels if x.launches))


def params_of(graph: Graph, weights: k.HeldWeights) -> Graph:
    """The graph with those of its inputs as params that are weights."""
    params = tuple(v for v in graph.inputs if v in weights.values)
    inputs = tuple(v for v in graph.inputs if v not in weights.values)
    return replace(graph, params=params, inputs=inputs)


# ---------------------------------------------------------------------------- pairing


def by_name(
    kernels: Sequence[KernelRow], steps: Sequence[RanStep], names: Names
) -> list[CheckedKernels]:
    """Kernels and steps that share a model node, and whatever shares one with these."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while (up := root.setdefault(name, name)) != name:
            name = up
        return name

    for x in kernels:
        first, *others = names(x) or (x.name,)
        for name in others:
            root[find(name)] = find(first)
    groups: dict[str, tuple[list[KernelRow], list[RanStep]]] = {}
    for x in kernels:
        groups.setdefault(find((names(x) or (x.name,))[0]), ([], []))[0].append(x)
    for step in steps:
        groups.setdefault(find(step.name), ([], []))[1].append(step)
    return [CheckedKernels(tuple(a), tuple(b)) for a, b in groups.values()]


def in_order(kernels: Sequence[KernelRow], steps: Sequence[RanStep]) -> list[CheckedKernels]:
    """The longest run of kinds that both have in common pairs them one by one; what lies between
    goes together."""
    launched = [x for x in kernels if x.launches]
    ours = [x.kind if x.kind in PRODUCTS else OTHER for x in launched]
    theirs = [kind_of(x.op) for x in steps]
    rows: list[CheckedKernels] = []
    for tag, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs = zip(launched[a:b], steps[c:d], strict=True)
            rows += [CheckedKernels((x,), (y,)) for x, y in pairs]
        else:
            rows.append(CheckedKernels(tuple(launched[a:b]), tuple(steps[c:d])))
    return rows


def kind_of(op: str) -> str:
    """What a framework's operator is among our products, by its name."""
    name = op.lower()
    return next((kind for kind, words in PRODUCTS.items() if _has(name, words)), OTHER)


def _has(name: str, words: Iterable[str]) -> bool:
    return any(word in name for word in words) and "fused" not in name
