"""What `gpuir mig plan` and `gpuir mig timetable` are asked: GPUs, models, and how they share."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.modules import Loaded
from gpuir.cli.request import ask, held, option
from gpuir.run.terms import WORDS, settings

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.plan.mig.search import GpuKind, Objective, Way
    from gpuir.plan.mig.workloads import Runs, Workload
    from gpuir.report.answer import Answer

MOST_COUNT = 64
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Asked:
    """A model as `--model` names it: its source, what is asked of it, and how it is loaded."""

    text: str
    source: str
    workload: Workload
    dims: tuple[tuple[str, int], ...]
    words: tuple[tuple[str, str], ...]
    profile: str | None
    train: bool


class Models(click.ParamType):  # type: ignore[type-arg]
    """`bert.onnx:batch=8:count=4`: a model, and behind colons what is asked of it."""

    name = "MODEL[:KEY=VALUE]..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Asked:
        if isinstance(value, Asked):
            return value
        source, given = settings(value)
        if not source:
            self.fail(f"{options.shorter(value)!r} names no model", param, ctx)

        def number(key: str, low: float, high: float, whole: bool = False) -> float | None:
            text = given.pop(key, None)
            if text is None:
                return None
            try:
                read = int(text) if whole else float(text)
            except ValueError:
                read = float("nan")
            if not low <= read <= high:
                kind = "a whole number" if whole else "a number"
                wanted = f"{kind} from {low:g} to {high:g}"
                self.fail(f"{key}={options.shorter(text)} is not {wanted}", param, ctx)
            return read

        count = number("count", 1, MOST_COUNT, whole=True)
        rate = number("rate", 1e-3, 1e7)
        deadline = self._deadline(given.pop("deadline", None), param, ctx)
        name = given.pop("name", None) or _short(source)
        profile, train = given.pop("profile", None), given.pop("train", None)
        if train:
            self.fail("train takes no value: leave it out for inference", param, ctx)
        words = tuple((key, given.pop(key)) for key in WORDS if key in given)
        dims: list[tuple[str, int]] = []
        for key, text in given.items():
            if not text.isdecimal() or len(text) > 12:
                self.fail(f"{key}={options.shorter(text)} is no size: {KEYS}", param, ctx)
            dims.append((key, int(text)))
        workload = _workload(name, int(count or 1), rate, deadline)
        sized, trains = tuple(dims), train is not None
        return Asked(
            value, source, workload, dims=sized, words=words, profile=profile, train=trains
        )

    def _deadline(self, text: str | None, param: Any, ctx: Any) -> float | None:
        if text is None:
            return None
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(us|ms|s)", text)
        if found is None or not float(found[1]):
            shown = options.shorter(text)
            self.fail(f"deadline={shown} is not a valid time: write 50ms or 0.2s", param, ctx)
        return float(found[1]) * UNITS[found[2]]


KEYS = "keys are count, rate, deadline, name, profile, train, dtype and the like, or dimensions"


def _short(source: str) -> str:
    """`models/bert.onnx` → `bert`."""
    last = re.split(r"[/\\]", source.removeprefix("hf:").rstrip("/\\"))[-1]
    stem = re.sub(r"\.(onnx|pt2|gir|json)$", "", last)
    return stem.rpartition(":")[2] or source


def _workload(name: str, count: int, rate: float | None, deadline_s: float | None) -> Workload:
    from gpuir.plan.mig.workloads import Workload
    from gpuir.simulate.sharing import Load

    return Workload(name, 0, count, Load(rate, deadline_s))


class Ways(click.ParamType):  # type: ignore[type-arg]
    """`mig,serial`: ways to share a GPU."""

    name = "mig,serial,time-slicing,mps"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        from gpuir.ir.errors import nearest
        from gpuir.plan.mig.search import WAYS

        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]
        found = options.split_names(value)
        for name in found:
            if name not in WAYS:
                self.fail(f"no way to share is called {name!r}: {nearest(name, WAYS)}", param, ctx)
        return tuple(found) or WAYS


def simulated(requests: int) -> int:
    """The option of how many requests are simulated: so many, if it is not given."""
    bounds = click.IntRange(50, 100_000)
    return option("Simulated of each model with a rate.", type=bounds, default=requests)


@dataclass(frozen=True)
class Sharing:
    """GPUs, and the models that share them."""

    gpus: tuple[str, ...] = option(
        "A GPU, or several: a30, 2xa100-80gb.", "--gpu", multiple=True, required=True
    )
    models: tuple[Asked, ...] = option(
        "A model and its load: count=4 (so many copies, each on its own), rate=200 (requests a "
        "second, at random; without it a closed loop), deadline=50ms (for 99 % of requests), "
        "sizes (batch=8), train, name=, profile=, dtype= and the like.",
        "--model",
        type=Models(),
        multiple=True,
        required=True,
    )
    ways: tuple[Way, ...] = option(
        "Ways to share that are tried; mig alone: a slice for each model.  [all]",
        type=Ways(),
        default=Ways.name,
    )
    objective: Objective = option(
        "What is best, once all keep up and in time.",
        type=click.Choice(["throughput", "latency", "fairness", "cost"]),
        default="throughput",
    )
    requests: int = simulated(2000)
    host_threads: int | None = option(
        "That launch kernels.  [enough for all]", type=click.IntRange(1, 4096)
    )
    seed: int = option("Of what is drawn.", type=options.SEED, default=0)
    price: options.Pairs[float] = ask(options.price)
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing, without="settings schedule pipeline cluster")
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)


def kinds_of(asked: Sharing) -> tuple[GpuKind, ...]:
    """The GPUs, equal ones together, with their prices."""
    from gpuir.ir.errors import UsageError
    from gpuir.plan.mig.search import GpuKind
    from gpuir.targets.load import is_changed, load_target
    from gpuir.targets.prices import price_of
    from gpuir.targets.spec import is_path

    prices = options.prices_of(asked.price)
    counts: dict[str, int] = {}
    for text in (name for some in asked.gpus for name in options.split_names(some)):
        found = re.fullmatch(r"(?:(\d{1,4})x)?(.+)", text)
        assert found
        target = load_target(found[2])
        if target.slice is not None:
            raise UsageError(
                "--gpu must be a whole GPU, not a MIG slice",
                found=text,
                fix=f"--gpu {target.slice.gpu}",
            )
        if is_changed(found[2]):
            raise UsageError(
                "--gpu must be a GPU without changed numbers",
                found=text,
                fix="write the numbers into a file: gpuir targets NAME --set ... --format toml",
            )
        if not 0 < int(found[1] or 1) <= 64:
            raise UsageError("the number of GPUs is out of range", found=text, fix="from 1 to 64")
        name = found[2] if is_path(found[2]) else target.name
        counts[name] = counts.get(name, 0) + int(found[1] or 1)
    found = {name: price_of(load_target(name), prices) for name in counts}
    unknown = [name for name, price in found.items() if price is None]
    if asked.objective == "cost" and unknown:
        raise UsageError(
            f"no price is known for {', '.join(unknown)}",
            fix=f"give a price in US dollars an hour: --price {unknown[0]}=1.5",
        )
    return tuple(
        GpuKind(name, count, None if (p := found[name]) is None else p.usd_per_hour)
        for name, count in counts.items()
    )


class Runner:
    """The models that a command names: each loaded and lowered once, its runs predicted where they
    are asked for."""

    def __init__(self, sharing: Sharing):
        self.sharing, self.asked = sharing, _told_apart(sharing.models)
        self.warnings: list[str] = []
        self.profiles: dict[str, None] = {}
        self.lowered = lru_cache(maxsize=None)(self._lowered)
        self.runs: Runs = lru_cache(maxsize=None)(self._run)

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return tuple(replace(x.workload, model=i) for i, x in enumerate(self.asked))

    def _graph(self, model: int, profile: str | None) -> Graph:
        from gpuir.cli.lowering import once

        asked, loading = self.asked[model], self.sharing.loading
        own: dict[str, Any] = {**dict(asked.words), "train": loading.train or asked.train}
        loading = replace(loading.sized(*asked.dims), **own)
        stack: dict[str, Any] = {"profile": profile, "tf32": self.sharing.costing.tf32}
        return loading.load(asked.source, self.sharing.loaded, once(self.warnings), **stack)

    def _lowered(self, model: int, device: str) -> Graph:
        """The kernels of a model on a GPU: its slices have the same."""
        import gpuir

        costing = self.sharing.costing
        name = self.asked[model].profile or costing.profile
        profile = self.sharing.loaded.profile(name) if name else None
        graph = self._graph(model, profile)
        made = gpuir.lower(graph, target=device, profile=profile, tf32=costing.tf32)
        self.profiles.setdefault(str(made.profile))
        return made

    def _run(self, model: int, target: str) -> Answer:
        from gpuir.run.analysis import answer, costed, run_alone
        from gpuir.targets.load import load_target

        predictor = self.sharing.costing.predicts(self.sharing.loaded)
        kernels = self.lowered(model, load_target(target).device)
        return run_alone(answer(costed(kernels, target, predictor=predictor)))


def _told_apart(asked: tuple[Asked, ...]) -> list[Asked]:
    """The models, those of one name with a number behind it."""
    names = [x.workload.name for x in asked]
    made: list[Asked] = []
    for i, x in enumerate(asked):
        name = x.workload.name
        if names.count(name) > 1:
            name = f"{name}-{names[: i + 1].count(name)}"
        made.append(replace(x, workload=replace(x.workload, name=name)))
    return made


def notes(threads: int | None, found: Runner) -> tuple[str, ...]:
    """What a plan takes for granted."""
    from gpuir.plan.mig.workloads import SWITCH_SHARE

    return (
        f"profile {', '.join(found.profiles)}",
        "requests with a rate arrive at random (Poisson); each is one run at the model's batch",
        f"processes in time slices lose {SWITCH_SHARE:.0%} of the device's time (one measurement, "
        "four BERT fine-tunings on an A30)",
        "under MPS each model has an equal share of the L2; no measurement of MPS was compared",
        "without MIG, models share memory and faults: --ways mig gives each a slice of its own",
        "the host has a thread for each model"
        if threads is None
        else f"the host has {threads} threads for all models",
    )
