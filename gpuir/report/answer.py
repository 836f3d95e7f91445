"""What a run of a model comes to: one record for all commands and functions that predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Protocol

from gpuir.ir.errors import ModelError, UsageError
from gpuir.ir.graph import Graph, Level
from gpuir.ir.notes import Bound
from gpuir.ir.types import f32
from gpuir.ops import kernel as k
from gpuir.report.find import walk
from gpuir.report.kernels import (
    KernelRow,
    Share,
    Total,
    Unseen,
    bounds_of,
    coverage_of,
    kernels_of,
    totals,
    unseen_of,
)
from gpuir.targets.profile import has_views, profile_of
from gpuir.targets.support import title_on

if TYPE_CHECKING:
    from gpuir.simulate.causes import Gain
    from gpuir.simulate.fitting import ToFit
    from gpuir.simulate.memory import Memory
    from gpuir.simulate.step import Step
    from gpuir.simulate.timeline import Timeline
    from gpuir.targets.profile import Profile, Tf32

Dims = tuple[tuple[str, int], ...]
Fixes = Callable[["Answer"], "tuple[ToFit, ...]"]
SCHEMA = "gpuir.report/2"  # of a report as JSON
HOUR_S = 3600.0
# What views, and the rule of TF32, mean for the kernels of a graph.
VIEWS = "slices and transposes are views if the next kernel accepts strides"
TF32: Mapping[Tf32, str] = {
    "all": "f32 products in TF32, also in fused attention",
    "products": "f32 products in TF32",
    "conv": "f32 convolutions in TF32, other f32 products without tensor cores",
    "none": "f32 products without tensor cores (TF32 off)",
}


class SpecRow(Protocol):
    """A number of the device's specification: `Target.rows()` gives them."""

    @property
    def field(self) -> str: ...
    @property
    def value(self) -> str | float | bool | tuple[str, ...]: ...
    @property
    def unit(self) -> str: ...
    @property
    def source(self) -> str: ...


class Line(Protocol):
    """One quantity behind a cost: `formula` has its numbers filled in, `source` says where one
    comes from."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Device:
    """The target as a reader knows it, and what its specification takes for granted."""

    name: str
    title: str
    assumed: tuple[str, ...] = ()
    numbers: tuple[SpecRow, ...] = ()
    vendor: str = ""


@dataclass(frozen=True)
class Needs:
    """What a run takes of its target, alone there: seconds in which a kernel runs (`busy_s`), in
    which the host works and in which copies run; the part of the SMs that its kernels fill while
    they run, and of the memory's bandwidth over the whole run; watts at the full clock."""

    busy_s: float
    host_s: float
    copies_s: float
    filled: float
    bandwidth: float
    watts: float


@dataclass(frozen=True)
class Details:
    """What there is to show of one graph that ran: `explain` gives the lines that lead to a
    kernel's cost, `fixes` the changes with which a model fits that does not, `html` what a notebook
    shows."""

    graph: Graph
    kernels: tuple[KernelRow, ...]  # in graph order, views and idle branches included
    timeline: Timeline
    memory: Memory
    device: Device
    warnings: tuple[str, ...] = ()
    explain: Callable[[KernelRow], Sequence[Line]] = lambda _: ()
    fixes: Fixes = lambda _: ()
    html: Callable[[Answer], str] = lambda _: ""


@dataclass(frozen=True)
class RunPart:
    """A part of a run of several: `times` runs one after another of what `text` names. `each` is
    one of them. Where they differ, as steps do whose cache grows, it has the means of their
    numbers, and `last` is the last one, whole."""

    text: str
    times: int
    each: Answer
    last: Answer | None = None

    @property
    def whole(self) -> Answer:
        """One that has its graph and kernels."""
        return self.last or self.each

    @property
    def latency_s(self) -> float:
        """Of all its runs together."""
        return self.times * self.each.latency_s


@dataclass(frozen=True, repr=False)
class Answer:
    """One run of a model: what was asked, and what it comes to.

    `target` and `profile` are names; `dims` are the sizes that the question fixes, `batch` how many
    items a run does at once. `latency_s` is from the host's start to the end of the last kernel or
    copy; `device_s` is what the kernels take, `busy_s` how long one runs, and `gaps_s` how long the
    device waits for the host. `interval` is where 80 % of measurements are
    expected: kernels of one kind, and the host, are off alike, those of different kinds
    independently; None where no kernel can say. `bound` is what the kernels of most time are bound
    by. `available_bytes` is what the device has for the model, None without a device.
    `why` says why there is no latency (it is nan then), or that the run does not fit.

    A run of many ranks has its `cluster`, its `plan` and the `step`; its bytes are those of the
    rank that holds the most. A run on a shared GPU has what it `needs` of the GPU. A run of several
    models has its `parts`, one after another, of which its numbers are sums; its bytes are those of
    the part that needs the most, beside the weights of the others; `tokens` are those that it
    generates. What was analyzed as a whole has its `graph`, `timeline`, `memory` and `kernels`; a
    point of a sweep has the numbers alone.
    """

    model: str
    target: str = ""
    profile: str = ""
    dims: Dims = ()
    batch: int | None = None
    latency_s: float = nan
    interval: tuple[float, float] | None = None
    device_s: float = nan
    busy_s: float = nan
    gaps_s: float = nan
    is_host_bound: bool | None = None
    bound: Bound | None = None
    peak_bytes: int = 0
    reserved_bytes: int = 0
    available_bytes: int | None = None
    usd_per_hour: float | None = None
    why: str = ""
    cluster: str = ""
    plan: str = ""
    needs: Needs | None = None
    tokens: int | None = None
    parts: tuple[RunPart, ...] = ()
    over: Step | None = field(default=None, compare=False)
    details: Details | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        place = f"{self.model} on {self.cluster or self.target} under {self.profile}"
        return f"<Answer: {place}: {self.why or f'{self.latency_s:.4g} s'}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        if self.parts:
            shown = (f"{x.times:,} x {x.whole._repr_html_()}" for x in self.parts)
            return f"<p>{escape(repr(self))}</p>{''.join(shown)}"
        return self._details.html(self)

    @property
    def items(self) -> int:
        return self.batch or 1

    @property
    def item_s(self) -> float:
        """Seconds for each of its items."""
        return self.latency_s / self.items

    @property
    def items_per_s(self) -> float:
        return self.items / self.latency_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that all its sequences generate in a second."""
        return self.tokens / self.latency_s if self.tokens else None

    @property
    def usd_per_million(self) -> float | None:
        """US dollars for a million items, the GPU being busy all the time."""
        if self.usd_per_hour is None:
            return None
        return self.usd_per_hour / HOUR_S / self.items_per_s * 1e6

    @property
    def spare_bytes(self) -> int | None:
        """What stays free of the device's memory, negative when it does not fit."""
        return None if self.available_bytes is None else self.available_bytes - self.reserved_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory; None without a device."""
        return None if self.available_bytes is None else self.reserved_bytes <= self.available_bytes

    @property
    def ran(self) -> bool:
        """Whether it has a latency by which it can be compared."""
        return self.latency_s > 0

    @property
    def numbers(self) -> Answer:
        """The same without its graph and kernels."""
        return replace(self, details=None)

    def row(self) -> dict[str, float | int | str | bool | None]:
        """What it comes to by the names of columns; None for what it does not have."""
        ran = not isnan(self.latency_s)
        low_s, high_s = self.interval or (None, None)
        return {
            "latency_s": self.latency_s if ran else None,
            "low_s": low_s,
            "high_s": high_s,
            "device_s": None if isnan(self.device_s) else self.device_s,
            "host_bound": self.is_host_bound,
            "bound": self.bound,
            "peak_bytes": self.peak_bytes if ran else None,
            "reserved_bytes": self.reserved_bytes if ran else None,
            "available_bytes": self.available_bytes,
            "why": self.why,
        }

    @property
    def alone(self) -> Needs:
        """What it takes of its target, where others may run too."""
        if self.needs is None:
            raise UsageError(
                "nobody has asked what this run takes of its GPU",
                found=repr(self),
                fix="gpuir.run.analysis.run_alone(gpuir.analyze(model, target))",
            )
        return self.needs

    @property
    def step(self) -> Step:
        """What each of many ranks does, and waits for."""
        if self.over is None:
            raise UsageError(
                "this answer is of one device",
                found=repr(self),
                fix="gpuir.simulate_ranks(graph, cluster, parallel) gives one of many ranks",
            )
        return self.over

    # ---- of what was analyzed as a whole ---------------------------------------------------------

    @property
    def _details(self) -> Details:
        if self.parts:
            raise UsageError(
                "this answer is of several runs",
                found=repr(self),
                fix="answer.parts[0].whole has the graph and the kernels of one of them",
            )
        if self.details is None:
            raise UsageError(
                "this answer has numbers alone",
                found=f"{self!r}, {'a step of many ranks' if self.over else 'one of many points'}",
                fix="answer.step.parts has the graphs that ranks run"
                if self.over
                else "gpuir.analyze(model, target) gives one with its graph and kernels",
            )
        return self.details

    @property
    def graph(self) -> Graph:
        """The costed graph."""
        return self._details.graph

    @property
    def timeline(self) -> Timeline:
        return self._details.timeline

    @property
    def memory(self) -> Memory:
        return self._details.memory

    @property
    def device(self) -> Device:
        return self._details.device

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._details.warnings

    @property
    def fixes(self) -> Fixes:
        return self._details.fixes

    def with_details(self, **changed: Any) -> Answer:
        """The same with other fields of its `details`."""
        return replace(self, details=replace(self._details, **changed))

    @property
    def explain(self) -> Callable[[KernelRow], Sequence[Line]]:
        return self._details.explain

    @property
    def software(self) -> Profile:
        """The profile that `profile` names."""
        return self.timeline.profile

    @property
    def stack(self) -> str:
        """What the profile is on this device: its title, or what of the stack would run here."""
        return title_on(self.software, self.device.vendor)

    @property
    def kernels(self) -> tuple[KernelRow, ...]:
        """In graph order, views and idle branches included."""
        return self._details.kernels

    @cached_property
    def running(self) -> tuple[KernelRow, ...]:
        """The kernels that run, views included."""
        return tuple(x for x in self.kernels if x.runs)

    def slowest(self) -> list[KernelRow]:
        """The kernels that take time, the slowest first."""
        return sorted((x for x in self.kernels if x.time_s > 0), key=lambda x: -x.time_s)

    @cached_property
    def by(self) -> tuple[str, ...]:
        """The predictors that signed the costs."""
        return tuple(sorted({x.cost.by for x in self.kernels if x.cost.terms}))

    @property
    def certain_s(self) -> float:
        """The time of kernels that have no interval, and count as they are."""
        return sum(x.time_s for x in self.running if x.interval is None)

    @cached_property
    def unseen(self) -> tuple[Unseen, ...]:
        return tuple(unseen_of(self.running))

    @property
    def unfitted_s(self) -> float:
        """The time of kernels of a kind that no measurement is of: unknown operators, routines of
        which steps are counted, and those whose family measured others."""
        return sum(u.time_s for u in self.unseen if u.what == "kind")

    @property
    def launches(self) -> int:
        return sum(x.launches for x in self.running)

    @property
    def views(self) -> int:
        return sum(isinstance(x.node.op, k.View) for x in self.kernels)

    @property
    def idle(self) -> int:
        """How many kernels are in branches that are not taken."""
        return len(self.kernels) - len(self.running)

    @cached_property
    def flops(self) -> int:
        return sum(x.runs * x.flops for x in self.running)

    @cached_property
    def bytes(self) -> int:
        return sum(x.runs * x.bytes for x in self.running)

    @cached_property
    def dram_bytes(self) -> int:
        return sum(x.runs * x.dram_bytes for x in self.running)

    @cached_property
    def bounds(self) -> tuple[tuple[Bound, float], ...]:
        """Seconds by what bounds the kernel."""
        return bounds_of(self.running)

    @cached_property
    def totals(self) -> tuple[Total, ...]:
        """Kernels of each kind together, the slowest first."""
        return totals(self.running)

    @property
    def phases(self) -> tuple[Total, ...]:
        """The kernels of each phase of a training step together."""
        return totals(self.running, lambda x: x.phase)

    @cached_property
    def coverage(self) -> tuple[Share, ...]:
        return tuple(coverage_of(self.graph, self.kernels))

    @cached_property
    def folded(self) -> int:
        """How many nodes of the model no kernel stands for."""
        return len(set(self.graph.folded) - {loc for x in walk(self.graph) for loc in x.node.locs})

    @property
    def nodes(self) -> int:
        """Of the model, those folded included."""
        return sum(s.nodes for s in self.coverage) + self.folded

    @property
    def tf32(self) -> Tf32 | None:
        """Which of the products in f32 may run in TF32: none, those of convolutions, all but those
        in fused attention (`products`), or all. None where there is no product in f32."""
        return tf32_of(self.graph)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was taken for granted, in words."""
        return (*_assumed(self.graph, self.device), *self.software.assumptions)

    @cached_property
    def to_fit(self) -> tuple[ToFit, ...]:
        """Changes with which the model fits, where it does not, the smallest first: each tried."""
        return self.fixes(self) if self.fits is False else ()

    @cached_property
    def gains(self) -> tuple[Gain, ...]:
        """By how much the run would be shorter without each cause, the most first: the timeline,
        run again without it."""
        from gpuir.simulate.causes import gains_of

        return gains_of(self.graph, self.software, self.latency_s)


def fixed_batch(graph: Graph) -> int | None:
    """How many images or sequences of tokens a graph without symbolic sizes reads at once: the
    leading extent of its inputs, where one of them is images ([n, c, h, w], or more axes) or tokens
    (integers [n, s]) and the first output, a loss apart, has it too. None for one alone, or where
    that cannot be told."""
    given = [v for v in graph.inputs if graph.role_of(v) == "input" and v.type.rank]
    extents = {v.type.shape[0] for v in given}
    made = graph.outputs[0].type.shape[:1] if graph.outputs else ()
    if not any(v.type.rank >= 4 or (v.type.rank == 2 and v.type.dtype.is_integer) for v in given):
        return None
    (extent, *others) = extents
    return extent if not others and extent > 1 and made in ((), (extent,)) else None


def answer_of(
    graph: Graph,
    device: Device,
    *,
    batch: int | None = None,
    held: Memory | None = None,
    warnings: tuple[str, ...] = (),
    explain: Callable[[KernelRow], Sequence[Line]] = lambda _: (),
    fixes: Fixes = lambda _: (),
    html: Callable[[Answer], str] = lambda _: "",
) -> Answer:
    """The answer that a costed graph is; UsageError when it is not costed. One without a profile
    runs as under `ideal`. Without a `batch` it is the one that the graph was built for. `held` is
    its memory on the device; without it, that of no device in particular."""
    if graph.level != Level.costed:
        raise UsageError(
            "a report needs a graph with costs",
            expected="a graph of level costed",
            found=f"@{graph.name}, of level {graph.level.name}",
            fix="run the graph through `gpuir.analyze`, or through the passes tile and annotate",
        )
    from gpuir.simulate.memory import memory  # and with it numpy
    from gpuir.simulate.timeline import timeline

    run = timeline(graph, profile_of(graph))
    held = held or memory(graph)
    kernels = kernels_of(graph)
    running = [x for x in kernels if x.runs]
    bounds = dict(bounds_of(running))
    shown = Details(graph, kernels, run, held, device, warnings=warnings)
    return Answer(
        model=graph.name,
        target=device.name,
        profile=run.profile.name,
        batch=fixed_batch(graph) if batch is None else batch,
        latency_s=run.time_s,
        interval=run.interval,
        device_s=sum(x.time_s for x in running),
        busy_s=run.busy_s,
        gaps_s=run.gaps_s,
        is_host_bound=run.is_host_bound,
        bound=max(bounds, key=lambda name: bounds[name]) if running else None,
        peak_bytes=held.peak_bytes,
        reserved_bytes=held.reserved_bytes,
        available_bytes=held.available_bytes,
        details=replace(shown, explain=explain, fixes=fixes, html=html),
    )


def of_ranks(step: Step) -> Answer:
    """The answer that a step over many ranks is."""
    full = step.fullest
    return Answer(
        step.model,
        step.target,
        step.profile.name,
        latency_s=step.time_s,
        interval=step.interval,
        peak_bytes=full.held_bytes,
        reserved_bytes=full.held_bytes,
        available_bytes=full.available_bytes,
        why=unfit(full.held_bytes, full.available_bytes),
        cluster=step.cluster,
        plan=str(step.parallel),
        over=step,
    )


def unfit(reserved: int, available: int) -> str:
    """Why a run does not fit, or an empty text."""
    if reserved <= available:
        return ""
    return f"does not fit: {reserved:,} bytes are reserved, and {available:,} available"


def check_runs(a: Answer) -> Answer:
    """The answer. ModelError where nothing of it takes any time: what is tried is compared by its
    rate."""
    if a.ran:
        return a
    raise ModelError(
        a.why or f"nothing runs under {a.profile}",
        where=a.model,
        expected="a model that launches a kernel",
        fix="run `gpuir analyze` to see what happened to the nodes of the model",
    )


def _assumed(graph: Graph, device: Device) -> Iterator[str]:
    """What was taken for granted, in words."""
    if has_views(graph):
        yield VIEWS
    yield from graph.assumed
    has_tf32 = any(n.field == "flops_per_s.tensor.tf32" for n in device.numbers)
    if has_tf32 and (rule := tf32_of(graph)) is not None:
        yield TF32[rule]
    yield from device.assumed


def tf32_of(graph: Graph) -> Tf32 | None:
    """Which products in f32 the kernels of a graph let run in TF32."""
    wide = [
        n.op for n in graph.walk() if isinstance(n.op, k.Contraction) and n.op.compute_dtype == f32
    ]
    if not wide:
        return None
    rounded = [op for op in wide if op.math is not None]
    if any(isinstance(op, k.Attention | k.AttentionGradient) for op in rounded):
        return "all"
    if any(not isinstance(op, k.Conv) for op in rounded):
        return "products"
    return "conv" if rounded else "none"
