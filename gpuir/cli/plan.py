"""`gpuir plan`: the quickest way to spread a model over a cluster."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.kept import decides, earlier
from gpuir.cli.lowering import once
from gpuir.cli.modules import Loaded
from gpuir.cli.output import check_ahead, emit, note, show, warn
from gpuir.cli.request import ask, held, option, request
from gpuir.cli.simulate import PLANS, few_cut

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.plan.parallel import Choice, ModelBounds, Tried
    from gpuir.report.answer import Answer
    from gpuir.targets.cluster import Cluster
    from gpuir.targets.prices import Price

RECOMPUTED = "every=1"  # as --checkpoint has it: each block by itself


class WholeNumbers(click.ParamType):  # type: ignore[type-arg]
    """`1,2,4`: whole numbers within bounds, each once."""

    name = "1,2,4"

    def __init__(self, least: int = 1, most: int = 1 << 20):
        self.least, self.most = least, most

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]
        words = [part.strip() for part in value.split(",")]
        if not all(word.isascii() and word.isdecimal() for word in words):
            self.fail(f"{options.shorter(value)!r} is not like 1,2,4", param, ctx)
        for word in words:
            if len(word) > 20 or not self.least <= int(word) <= self.most:
                asked = f"{self.least:,} to {self.most:,}"
                self.fail(f"{options.shorter(word)} is not from {asked}", param, ctx)
        return tuple(dict.fromkeys(map(int, words)))


DEGREES = WholeNumbers()


@dataclass(frozen=True)
class Plans:
    model: str = ask(options.model)
    cluster: str = option("A cluster: dgx-a100, 8xdgx-h100, my.toml.", required=True)
    tp: tuple[int, ...] | None = option(
        "Degrees to try.  [those that divide a node's GPUs]", type=DEGREES
    )
    pp: tuple[int, ...] | None = option(
        "Degrees to try.  [those that divide the GPUs]", type=DEGREES
    )
    dp: tuple[int, ...] | None = option("Degrees to try.  [what is left]", type=DEGREES)
    cp: tuple[int, ...] | None = option("Degrees to try.  [1]", type=DEGREES)
    ep: tuple[int, ...] | None = option("Degrees to try.  [1]", type=DEGREES)
    zero: tuple[int, ...] | None = option(
        "Stages of ZeRO to try.  [0, 1, without pp 3]", type=WholeNumbers(0, 3)
    )
    microbatch: tuple[int, ...] | None = option(
        "Sequences of a rank at a time to try.  [1,2,4,8]", type=DEGREES
    )
    recompute: str = option(
        "Blocks computed again in the backward pass.",
        type=click.Choice(["try", "never", "always"]),
        default="try",
    )
    best: int = option("Listed.", type=click.IntRange(1, 100), default=5)
    exhaustive: bool = option("Simulate every plan: no bounds.")
    resume: str | None = option(
        "Keep what is simulated in this file, and go on from it.", type=click.Path()
    )
    price: options.Pairs[float] = ask(options.price)
    format: str = ask(
        options.formats(
            PLANS, help="The last four are the best plan: as JSON, and for who runs it."
        )
    )
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing, without="settings schedule pipeline cluster")
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)


@request(Plans)
def command(asked: Plans) -> None:
    """Find the fastest parallel plan for the GPUs of a cluster.

    gpuir loads MODEL with the batch of the whole step. It skips plans that cannot fit in memory or
    cannot be faster than the best one so far, and simulates the rest.

    \b
    gpuir plan hf:config.json --cluster 8xdgx-h100 --dims batch=256,seq=4096 --train \\
        --optimizer adamw --autocast bf16 --resume plan.db
    gpuir plan model.onnx --cluster dgx-a100 --dims batch=64 --train --optimizer adamw
    """
    from gpuir.backends.plan import SearchReport, chosen, plan_report
    from gpuir.ir.phases import is_training
    from gpuir.plan.degrees import choices_of, left_out
    from gpuir.plan.parallel import search, written
    from gpuir.store import Store
    from gpuir.targets.cluster import load_cluster

    check_ahead(asked.resume)
    machine = load_cluster(asked.cluster)
    price = _price(machine, _prices(asked, machine))
    warnings: list[str] = []
    graphs = _Graphs(asked, warnings)
    whole = graphs.model(False)
    model = measured(whole, machine, asked.loading.batch)
    names = ("tp", "pp", "dp", "cp", "ep", "zero", "microbatch")
    degrees: dict[str, tuple[int, ...]] = {n: x for n in names if (x := getattr(asked, n))}
    again = {"try": (False, True), "never": (False,), "always": (True,)}[asked.recompute]
    if not asked.loading.train or asked.loading.checkpoint:
        again = (False,)
    if not is_training(whole):
        _no_zero(asked.zero)
        degrees["zero"] = (0,)
    choices = choices_of(whole, model, degrees, again)
    warnings += left_out(model, degrees)

    def simulate(choice: Choice) -> Answer:
        note(f"{choice}")
        return graphs.step(choice)

    with Store(asked.resume) if asked.resume else nullcontext() as store:
        known: dict[str, Tried] = {}
        if store is not None:
            known = earlier(store, decides(whole, machine, asked.costing, asked.loaded))

        def keep(tried: Tried) -> None:
            if store is not None:
                store.put("plans", [(str(tried.choice), written(tried))])

        found = search(
            choices, model, simulate, exhaustive=asked.exhaustive, known=known, done=keep
        )
    little = {x.choice.parallel.tp: x.tp_shared for x in found.best[: asked.best]}
    warnings += [few_cut(tp, x) for tp, x in sorted(little.items()) if x and x.is_little]
    for text in warnings:
        warn(text)
    if asked.format in PLANS:
        emit(chosen(found, asked.format), asked.output)
    else:
        show(
            plan_report(SearchReport(found, model, machine, price), asked.best),
            asked.format,
            asked.width,
            asked.output,
        )


def _no_zero(stages: tuple[int, ...] | None) -> None:
    from gpuir.ir.errors import UsageError

    if any(stages or ()):
        raise UsageError(
            "--zero needs a training step with an optimizer",
            found=f"--zero {','.join(map(str, stages or ()))}",
            fix="add --train --optimizer adamw, or remove --zero",
        )


def _prices(asked: Plans, machine: Cluster) -> dict[str, Price]:
    """Prices of one's own; UsageError for one of a GPU that the cluster has not."""
    from gpuir.ir.errors import UsageError

    prices, targets = options.prices_of(asked.price), machine.targets
    for name, price in prices.items():
        if not any(name in (target.name, target.device) for target in targets):
            own = " or ".join(f"--price {x.name}={price.usd_per_hour:g}" for x in targets)
            raise UsageError(
                f"{machine.name} has no GPU with this name",
                where=f"--price {name}={price.usd_per_hour:g}",
                fix=f"{own}, or remove it",
            )
    return prices


def _price(machine: Cluster, own: dict[str, Price]) -> Price | None:
    """What one GPU is an hour: of several kinds the mean over all. None where one has no price."""
    from gpuir.targets.load import load_target
    from gpuir.targets.prices import Price, price_of

    each = [(price_of(load_target(x.cluster.gpu), own), x.end - x.first) for x in machine.stretches]
    known = [(price, count) for price, count in each if price is not None]
    if len(known) < len(each):
        return None
    if len({price for price, _ in known}) == 1:
        return known[0][0]
    mean = sum(price.usd_per_hour * count for price, count in known) / machine.gpus
    sources = dict.fromkeys(str(price) for price, _ in known)
    return Price(mean, f"the mean of {' and '.join(sources)}")


def measured(g: Graph, machine: Cluster, batch: int | None) -> ModelBounds:
    """What bounds need; UsageError where no dimension is called a batch."""
    from gpuir.ir.errors import UsageError
    from gpuir.plan.parallel import ModelBounds
    from gpuir.run.ranks import product_dtype
    from gpuir.simulate.memory import available_bytes
    from gpuir.simulate.step import model_flops
    from gpuir.targets.profile import profile_of

    if batch is None:
        raise UsageError(
            "gpuir cannot tell which dimension is the batch",
            fix="give the batch of a whole step on all GPUs together: --dims batch=256",
        )
    targets, dtype = machine.targets, product_dtype(g, rounded=True)
    sizes: dict[str, int] = {"weight": 0, "optimizer": 0}
    for v in g.params:
        role = g.role_of(v)
        if role in sizes:
            sizes[role] += v.type.nbytes
    return ModelBounds(
        model=g.name,
        target=", ".join(target.name for target in targets),
        profile=profile_of(g).name,
        cluster=machine.name,
        flops=model_flops(g),
        weight_bytes=sizes["weight"],
        state_bytes=sizes["optimizer"],
        batch=batch,
        gpus=machine.gpus,
        node_gpus=machine.node_gpus,
        peak_flops_per_s=max(target.peak("tensor", dtype) for target in targets),
        available_bytes=max(map(available_bytes, targets)),
        alike=not machine.kinds,
    )


class _Graphs:
    """The model, loaded once, and once more with blocks computed again."""

    def __init__(self, asked: Plans, warnings: list[str]):
        from gpuir.run.ranks import SharedByPlans

        self.asked, self.warnings = asked, warnings
        self.stack = asked.costing.stack(asked.loaded)
        self.predictor = asked.costing.predicts(asked.loaded)
        self.common = SharedByPlans()
        self.model = lru_cache(maxsize=2)(self._model)
        self.part = lru_cache(maxsize=4)(self._part)

    def _model(self, again: bool) -> Graph:
        from gpuir.passes.math import run_under

        asked, say = self.asked, once(self.warnings)
        how = asked.loading.options(asked.loaded)
        if again:
            how["checkpoint"] = RECOMPUTED
        g = asked.loading.load(asked.model, asked.loaded, say, how, **self.stack)
        return run_under(g, **self.stack)

    def _part(self, again: bool, microbatches: int) -> Graph:
        from gpuir.passes.microbatch import Microbatch

        return Microbatch(microbatches).run(self.model(again))

    def step(self, choice: Choice) -> Answer:
        import gpuir

        return gpuir.simulate_ranks(
            self.part(choice.recompute, choice.parallel.microbatches),
            self.asked.cluster,
            choice.parallel,
            predictor=self.predictor,
            common=self.common,
            **self.stack,
        )
