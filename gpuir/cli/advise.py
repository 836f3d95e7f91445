"""`gpuir advise`: what to change so that a model runs faster, each change tried."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuir.cli import options
from gpuir.cli.lowering import refuse_opaque
from gpuir.cli.modules import Loaded
from gpuir.cli.output import progress, show, warn
from gpuir.cli.request import ask, held, option, request

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.plan.advise import Advice, Bench
    from gpuir.plan.changes import ModelForm, Setup
    from gpuir.report.answer import Answer

STEPS = 75  # of the bar: runs that a report usually takes


@dataclass(frozen=True)
class Advise(options.Runs):
    model: str = ask(options.model)
    target: str | None = ask(options.target())
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing, without="schedule cluster")
    only: str | None = option("Kinds of changes to try: batch,precision,stack.  [all]")
    price: options.Pairs[float] = ask(options.price)
    format: str = ask(options.stacked(options.formats(), options.as_json))
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)


@request(Advise)
def command(asked: Advise) -> None:
    """Find the few changes that make MODEL faster or cheaper.

    gpuir tries each change by predicting the model with it.

    \b
    gpuir advise model.onnx --target a100 --dims batch=8,seq=128
    gpuir advise hf:config.json --target l4 --dims batch=1,seq=512 --only precision,stack
    gpuir advise hf:config.json --target a100 --dims batch=8,seq=512 --train --optimizer adamw
    """
    from gpuir.backends.advice import advice_report

    found = run(asked)
    show(advice_report(found, flags), asked.format, asked.width, asked.output)


def run(asked: Advise) -> Advice:
    """The report; what the loader is not sure of is said once."""
    from gpuir.ir.errors import UsageError, nearest
    from gpuir.plan.advise import advise
    from gpuir.plan.changes import CHANGE_KINDS

    targets = options.targets_of(asked.run)
    if len(targets) > 1:
        names = ", ".join(target.name for target in targets)
        raise UsageError("advice is for one target", found=names, fix="give one --target")
    kinds = (asked.only or ",".join(CHANGE_KINDS)).split(",")
    for kind in kinds:
        if kind not in CHANGE_KINDS:
            raise UsageError(
                f"no kind of change is called {kind!r}", fix=nearest(kind, CHANGE_KINDS)
            )
    own = options.prices_of(asked.price)
    warnings: dict[str, None] = {}
    with progress(STEPS, "advise") as done:
        test = bench(asked, lambda text: warnings.setdefault(text), done)
        found = advise(
            test,
            setup_of(asked),
            source_of(asked.model),
            kinds=[kind for kind in CHANGE_KINDS if kind in kinds],
            prices=own,
        )
    for text in warnings:
        warn(text)
    return found


def setup_of(asked: Advise) -> Setup:
    """What the options say, as a setup."""
    from gpuir.plan.changes import Setup

    how = asked.loading.options(asked.loaded)
    dims = dict(how.pop("dims", {}))
    if source_of(asked.model) == "config":
        dims.setdefault("batch", 1)  # as the loader has it
    return Setup(
        target=asked.costing.on(asked.loaded.target(str(asked.target).strip())),
        **asked.costing.stack(asked.loaded),
        passes=asked.costing.pipeline,
        dims=dims,
        options={name: value for name, value in how.items() if value},
    )


def flags(before: Setup, after: Setup) -> tuple[str, ...]:
    """The options that make one setup of another: `--dims batch=16`."""
    found: list[str] = []
    if after.target != before.target:
        found.append(f"--target {after.target}")
    if after.profile != before.profile:
        found.append(f"--profile {after.profile}")
    if after.tf32 != before.tf32:
        found.append("--tf32")
    if after.passes != before.passes:
        found.append(f"--pipeline '{after.passes}'")
    for name, size in after.dims.items():
        if size != before.dims.get(name):
            found.append(f"--dims {name}={size}")
    for name, value in after.options.items():
        if value != before.options.get(name):
            found.append(_flag(name, value))
    return tuple(found)


def _flag(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    return f"{option} {value}" if value else f"without {option}"


def source_of(model: str) -> ModelForm:
    """What kind of model it is."""
    from gpuir.run.loading import is_torch

    if model.endswith(".gir") or model == "-":
        return "text"
    if not is_torch(model):
        return "onnx"
    is_config = model.startswith("hf:") or (os.path.exists(model) and not model.endswith(".pt2"))
    return "config" if is_config else "torch"


def bench(
    asked: Advise,
    say: Callable[[str], Any],
    done: Callable[[], None],
) -> Bench:
    """How setups are run; what two of them share is done once."""
    import gpuir
    from gpuir.cost.table import find_predictor
    from gpuir.ir.graph import Level
    from gpuir.passes.math import run_under
    from gpuir.plan.advise import Bench
    from gpuir.run.analysis import lowering

    predictor = find_predictor(asked.costing.predictor, asked.loaded.predictors)
    models: dict[str, Graph] = {}
    graphs: dict[str, Graph] = {}
    lowered: dict[str, Graph] = {}

    def model(setup: Setup) -> Graph:
        how: Any = {**setup.options, "dims": setup.dims}
        stack: dict[str, Any] = {}
        if setup.options.get("train"):  # the backward pass is the stack's
            stack = {"profile": setup.profile, "tf32": setup.tf32}
        key = json.dumps({**how, **stack}, default=str, sort_keys=True)
        if key not in models:
            models[key] = asked.loading.load(asked.model, asked.loaded, say, how, **stack)
            if asked.loading.strict:
                refuse_opaque(models[key])
        return models[key]

    def graph(setup: Setup) -> Graph:
        g = model(setup)
        if not setup.passes:
            return g
        key = f"{id(g)} {setup.passes} {setup.profile} {setup.tf32}"
        if key not in graphs:
            steps = gpuir.pipeline(
                setup.passes, asked.loaded.passes, asked.loaded.predictors, asked.loaded.targets
            )
            graphs[key] = steps.run(run_under(g, setup.profile, setup.tf32))
        return graphs[key]

    def kernels(setup: Setup) -> Graph:
        g = graph(setup)
        started, target = run_under(g, setup.profile, setup.tf32), gpuir.load_target(setup.target)
        if started.level >= Level.kernel:
            return started
        steps = lowering(started, target, asked.loaded.passes)
        key = f"{id(g)} {setup.profile} {setup.tf32} {steps}"
        if key not in lowered:
            lowered[key] = steps.run(started)
        return lowered[key]

    def run(setup: Setup) -> Answer:
        batch = options.batch(setup.dims) or 1
        return gpuir.analyze(kernels(setup), setup.target, predictor=predictor, batch=batch)

    return Bench(graph, run, done)
