"""`gpuir plan`: the quickest way to spread a model over a cluster."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.lowering import once
from gpuir.cli.modules import load_modules
from gpuir.cli.output import check_ahead, emit, layout, note, warn

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.plan.parallel import Choice, Model, Tried
    from gpuir.simulate.step import Step
    from gpuir.targets.cluster import Cluster

RECOMPUTED = "every=1"  # as --checkpoint has it: each block by itself


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """`1,2,4`."""

    name = "1,2,4"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]
        try:
            return tuple(options.extent(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{options.shorter(value)!r} is not like 1,2,4", param, ctx)


@click.command()
@options.model
@click.option("--cluster", required=True, help="A cluster: dgx-a100, 8xdgx-h100, my.toml.")
@click.option("--tp", type=Numbers(), help="Degrees to try.  [those that divide a node's GPUs]")
@click.option("--pp", type=Numbers(), help="Degrees to try.  [those that divide the GPUs]")
@click.option("--dp", type=Numbers(), help="Degrees to try.  [what is left]")
@click.option("--cp", type=Numbers(), help="Degrees to try.  [1]")
@click.option("--ep", type=Numbers(), help="Degrees to try.  [1]")
@click.option("--zero", type=Numbers(), help="Stages of ZeRO to try.  [0, 1, without pp 3]")
@click.option(
    "--microbatch", type=Numbers(), help="Sequences of a rank at a time to try.  [1,2,4,8]"
)
@click.option(
    "--recompute",
    type=click.Choice(["try", "never", "always"]),
    default="try",
    show_default=True,
    help="Blocks computed again in the backward pass.",
)
@click.option("--best", type=click.IntRange(1, 100), default=5, show_default=True, help="Listed.")
@click.option("--exhaustive", is_flag=True, help="Simulate every plan: no bounds.")
@click.option(
    "--resume", type=click.Path(), help="Keep what is simulated in this file, and go on from it."
)
@options.price
@click.option(
    "--format",
    default="table",
    show_default=True,
    help="table, json; of the best plan: plan, pytorch, megatron, deepspeed.",
)
@options.loading
@options.profile
@options.predictor
@options.tf32
@options.width
@options.output
@options.load_modules
def command(**given: Any) -> None:
    """Which degrees of parallelism make a step of MODEL quickest on all GPUs of a cluster.

    MODEL is loaded with the batch of a whole step. Plans that cannot fit, or be quicker than the
    best, are left out by bounds; the rest is simulated.

    \b
    gpuir plan hf:config.json --cluster 8xdgx-h100 --dims batch=256,seq=4096 --train \\
        --optimizer adamw --autocast bf16 --resume plan.jsonl
    gpuir plan model.onnx --cluster dgx-a100 --dims batch=64 --train --optimizer adamw
    """
    from gpuir.backends.plan import chosen, forms, json_text, report
    from gpuir.plan.parallel import search, space
    from gpuir.targets.cluster import load_cluster
    from gpuir.targets.prices import price_of

    check_ahead(given["output"])
    forms(given["format"])
    machine = load_cluster(given["cluster"])
    warnings: list[str] = []
    graphs = _Graphs(given, warnings)
    whole = graphs.model(False)
    model = measured(whole, machine, options.batch(given["dims"]))
    degrees = {
        name: given[name]
        for name in ("tp", "pp", "dp", "cp", "ep", "zero", "microbatch")
        if given[name]
    }
    again = {"try": (False, True), "never": (False,), "always": (True,)}[given["recompute"]]
    if not given["train"] or given["checkpoint"]:
        again = (False,)
    choices = list(space(model, degrees, again))
    kept = _Kept(given["resume"], str((whole.name, model, given["cluster"], given["profile"])))

    def simulate(choice: Choice) -> Step:
        note(f"{choice}")
        return graphs.step(choice)

    found = search(
        choices,
        model,
        simulate,
        exhaustive=given["exhaustive"],
        known=kept.known,
        done=kept.add,
    )
    for text in warnings:
        warn(text)
    price = price_of(machine.target, options.prices_of(given))
    title = f"{whole.name} on {machine.gpus:,} GPUs of {machine.name}"
    if given["format"] == "json":
        emit(json_text(found, model, machine, price, whole.name), given["output"])
    elif given["format"] == "table":
        shape = layout(given["width"], given["output"])
        emit(report(found, model, title, price, given["best"], shape), given["output"])
    else:
        text = chosen(found, given["format"], model.batch, whole.name, machine.name)
        emit(text, given["output"])


def measured(g: Graph, machine: Cluster, batch: int | None) -> Model:
    """What bounds need; UsageError where no dimension is called a batch."""
    from gpuir.distributed import product_dtype
    from gpuir.ir.errors import UsageError
    from gpuir.plan.parallel import Model
    from gpuir.simulate.memory import available_bytes
    from gpuir.simulate.step import model_flops

    if batch is None:
        raise UsageError(
            "which dimension is the batch is not known",
            fix="--dims batch=256, of a whole step, all GPUs together",
        )
    target = machine.target
    sizes: dict[str, int] = {"weight": 0, "optimizer": 0}
    for v in g.params:
        role = g.role_of(v)
        if role in sizes:
            sizes[role] += v.type.nbytes
    return Model(
        flops=model_flops(g),
        weight_bytes=sizes["weight"],
        state_bytes=sizes["optimizer"],
        batch=batch,
        gpus=machine.gpus,
        node_gpus=machine.node_gpus,
        peak_flops_per_s=target.peak("tensor", product_dtype(g, rounded=True)),
        available_bytes=available_bytes(target),
    )


class _Graphs:
    """The model, loaded once, and once more with blocks computed again."""

    def __init__(self, given: dict[str, Any], warnings: list[str]):
        self.given, self.warnings = given, warnings
        self.loaded = load_modules(given["modules"])
        self.profile = self.loaded.profile(given["profile"]) if given["profile"] else None
        self.model = lru_cache(maxsize=2)(self._model)
        self.part = lru_cache(maxsize=4)(self._part)

    def _model(self, again: bool) -> Graph:
        import gpuir

        given: dict[str, Any] = dict(self.given)
        if again:
            given["checkpoint"] = RECOMPUTED
        return gpuir.load(
            given["model"],
            warn=once(self.warnings),
            profile=self.profile,
            tf32=given["tf32"],
            **options.load_options(given, self.loaded),
        )

    def _part(self, again: bool, microbatches: int) -> Graph:
        from gpuir.passes.microbatch import Microbatch

        return Microbatch(microbatches).run(self.model(again))

    def step(self, choice: Choice) -> Step:
        import gpuir
        from gpuir.cost.table import find_predictor

        given = self.given
        predictor: Any = find_predictor(given["predictor"], self.loaded.predictors)
        if given["predictor"].partition("@")[0] not in self.loaded.predictors:
            predictor = given["predictor"]
        return gpuir.simulate_ranks(
            self.part(choice.recompute, choice.parallel.microbatches),
            given["cluster"],
            choice.parallel,
            profile=self.profile,
            predictor=predictor,
            tf32=given["tf32"],
        )


class _Kept:
    """What has been simulated, in a file whose first line says of what."""

    def __init__(self, path: str | None, of: str):
        import json

        from gpuir.ir.errors import UsageError
        from gpuir.plan.parallel import read_lines

        self.path, self.known = path, dict[str, "Tried"]()
        if path is None:
            return
        head = json.dumps({"schema": "gpuir.plans/1", "of": of}) + "\n"
        file = Path(path)
        text = file.read_text("utf-8") if file.exists() else ""
        if not text:
            file.write_text(head, "utf-8")
        elif not text.startswith(head):
            raise UsageError(
                "this search is of something else",
                where=path,
                expected=of,
                fix="name another file, or delete this one",
            )
        self.known = read_lines(text.removeprefix(head), path)

    def add(self, tried: Tried) -> None:
        from gpuir.plan.parallel import line_of

        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as out:
                out.write(line_of(tried))
