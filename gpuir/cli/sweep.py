"""`gpuir sweep`: a model at many sizes, on many GPUs: latency, throughput, memory and money."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.lowering import once
from gpuir.cli.modules import Loaded
from gpuir.cli.output import (
    check_ahead,
    check_binary,
    emit,
    points_done,
    progress,
    show,
    warn,
    write,
)
from gpuir.cli.request import ask, held, option, request
from gpuir.run.terms import RunTerm, terms

if TYPE_CHECKING:
    from gpuir.plan.sweep import SweepAnswers
    from gpuir.report.answer import Answer, Dims
    from gpuir.targets.prices import Price

PICTURES = (".png", ".svg")
Sized = tuple[str, tuple[int, ...]]  # a dimension, and its sizes


class SizesType(click.ParamType):  # type: ignore[type-arg]
    """`1,2,4..256`: numbers, and from one to another by doubling; `NAME=` before where `named`."""

    def __init__(self, named: bool):
        self.named = named
        self.name = "NAME=128..4096" if named else "1,2,4..256"

    def get_metavar(self, param: Any = None, ctx: Any = None) -> str:
        return self.name

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, tuple[int, ...]]:
        name, equals, text = value.rpartition("=")
        if self.named != bool(equals and name.strip()):
            self.fail(f"{options.shorter(value)!r} is not like {self.name}", param, ctx)
        try:
            found = options.sizes(text)
        except ValueError:
            self.fail(f"{options.shorter(value)!r} is not like {self.name}", param, ctx)
        return name.strip() or "batch", found


@dataclass(frozen=True)
class SweepOptions(options.Runs):
    model: str = ask(options.model)
    target: str | None = ask(options.targets)
    batch_sizes: Sized | None = option(
        "Batches: 1,2,4..256.", "--batch", type=SizesType(named=False)
    )
    other_sizes: tuple[Sized, ...] = option(
        "Another dimension, as --dims calls it: seq=128..4096 by doubling.",
        "--dim",
        type=SizesType(named=True),
        multiple=True,
    )
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing, without="schedule cluster")
    price: options.Pairs[float] = ask(options.price)
    format: str = ask(options.formats())
    plot: str | None = option("A picture too: FILE.png or FILE.svg.", type=click.Path())
    engine: str | None = option("Who runs a space: local, or ray.  [local]")
    workers: int | None = option(
        "How many run a space beside each other.  [cores]", type=click.IntRange(1)
    )
    store: str | None = option(
        "Where a space's programs and costs are kept.  [in the output's folder]", type=click.Path()
    )
    width: int | None = ask(options.width)
    output: str | None = option(
        "Write to this file, all of it or nothing; of a space, to this folder.",
        "-o",
        "--output",
        type=click.Path(),
    )
    loaded: Loaded = ask(options.load_modules)


@request(SweepOptions)
def command(asked: SweepOptions) -> None:
    """Compare batch sizes, GPUs and stacks: time, memory, money.

    For each combination gpuir predicts how long a run takes, how many items a second it processes,
    how much memory it needs and what it costs. The exit status is 1 if nothing fits.

    \b
    gpuir sweep model.onnx --target a100 --batch 1,2,4..256
    gpuir sweep model.onnx --target all --batch 1..256 --dims seq=128 --format csv -o sweep.csv
    gpuir sweep model.pt2 --target a100,l4 --profile eager,compiled --batch 1..64 --plot sweep.svg
    gpuir sweep hf:config.json --target h100 --dims batch=1 --dim seq=128..4096 --price h100=2.5
    gpuir sweep hf:config.json:generate=128 --target h100 --batch 1..64 --dims seq=1024

    MODEL may be a file that states a design space, SPACE.toml (docs/guide/design-spaces.md): all
    its points are written to a folder as Parquet. A sweep that was killed continues when the same
    command runs again.

    \b
    gpuir sweep space.toml -o points
    gpuir sweep space.toml -o points --engine ray
    """
    from gpuir.backends.sweep import sweep_report
    from gpuir.cli.fitting import fixes_of
    from gpuir.ir.errors import UsageError

    if asked.model.endswith(".toml"):
        sweep_space(asked)
        return
    for name in OF_SPACES:
        if getattr(asked, name):
            raise UsageError(f"--{name} is an option for design spaces", fix="give a SPACE.toml")
    plot = asked.plot
    check_ahead(asked.output)
    check_binary(asked.format, asked.output)
    if plot and not plot.endswith(PICTURES):
        raise UsageError(
            "--plot writes only PNG and SVG files", found=plot, fix="FILE.png or FILE.svg"
        )
    check_ahead(plot)
    axes, prices, several = axes_of(asked), options.prices_of(asked.price), terms(asked.model)
    if several:
        found = run_several(asked.run, several, axes, prices)
    else:
        found = run(asked.run, axes, prices)
    if (p := found.nearest) is not None and not several and asked.format not in ("csv", "parquet"):
        files = {target.name: name for target, name in options.named_targets(asked.run)}
        costing = replace(asked.costing, profile=p.profile, settings=())
        one = options.ModelRun(asked.model, files[p.target], asked.loading, costing, asked.loaded)
        found = replace(found, to_fit=fixes_of(one, dict(p.dims)))
    if plot:
        from gpuir.backends.sweep_plot import sweep_plot

        write(plot, sweep_plot(found, plot[-3:]))
    show(sweep_report(found), asked.format, asked.width, asked.output)
    if found.nearest is not None:
        raise click.exceptions.Exit(1)


OF_SPACES = ("engine", "workers", "store")


def sweep_space(asked: SweepOptions) -> None:
    """Every point of a design space, into a folder of Parquet."""
    from gpuir.backends.parquet import parquet
    from gpuir.backends.space import space_text
    from gpuir.ir.errors import UsageError
    from gpuir.plan.space.engines import find_engine
    from gpuir.plan.space.space import read_space
    from gpuir.run.spaces import SpaceSweep

    context = click.get_current_context()
    for name in context.params:
        said = context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
        if said and name not in (*OF_SPACES, "model", "output"):
            raise UsageError(
                f"{name} is an option for one model, but {asked.model} is a design space",
                fix="write it into the file: docs/guide/design-spaces.md lists the keys",
            )
    check_ahead(asked.output, folder=True)
    folder = str(asked.output)
    parquet()
    space = read_space(asked.model)
    engine = find_engine(asked.engine or "local", asked.workers)
    since = perf_counter()
    with (
        SpaceSweep(space, folder, asked.store or "") as sweep,
        points_done(space.points) as advance,
        engine,
    ):
        done = sweep.run(engine, advance)
    emit(space_text(space, done, folder, perf_counter() - since), None)


def run(
    asked: options.ModelRun,
    axes: Mapping[str, tuple[int, ...]],
    own: Mapping[str, Price] | None = None,
) -> SweepAnswers:
    """A run at every choice of sizes; a model is loaded at a few of the sizes."""
    import gpuir
    from gpuir.cli.sizes import SizedModel
    from gpuir.cost.table import find_predictor
    from gpuir.ir.errors import UsageError
    from gpuir.plan.sweep import sweep

    named = options.named_targets(asked)
    targets = [target for target, _ in named]
    names = [asked.loaded.profile(name) for name in options.split_names(asked.costing.profile)]
    profiles = list({gpuir.load_profile(name).name: name for name in names}.values()) or [None]
    _check_fixed(asked, axes)
    fixed = asked.loading.options(asked.loaded).get("dims", {})
    count = prod(map(len, axes.values())) * len(targets) * len(profiles)
    if count > options.MOST_RUNS:
        raise UsageError(
            "too many runs for one sweep",
            expected=f"at most {options.MOST_RUNS:,}",
            found=f"{count:,} runs (sizes x targets x profiles)",
            fix="use fewer sizes: 1..4096 doubles from one size to the next",
        )
    predictor = find_predictor(asked.costing.predictor, asked.loaded.predictors)
    warnings: list[str] = []
    say = once(warnings)

    def told(point: Mapping[str, int], text: str) -> None:
        if all(n in axes[name] for name, n in point.items()):
            say(text)

    def items(dims: Mapping[str, int]) -> int:
        return options.batch({**fixed, **dims}) or 1

    model = SizedModel(asked.model, asked.loading, asked.costing, asked.loaded, told)
    with progress(len(targets) * len(profiles), "sweep") as done:
        found = sweep(
            model.at,
            axes,
            targets,
            profiles,
            items=items,
            own=own,
            predictor=predictor,
            files={target.name: name for target, name in named},
            done=done,
        )
    for text in warnings:
        warn(text)
    return found


def run_several(
    asked: options.ModelRun,
    several: Sequence[RunTerm],
    axes: Mapping[str, tuple[int, ...]],
    own: Mapping[str, Price] | None = None,
) -> SweepAnswers:
    """A run of several models at every choice of sizes, one after another."""
    from gpuir.cli.runs import answers
    from gpuir.ir.errors import ModelError
    from gpuir.plan.sweep import SweepAnswers
    from gpuir.targets.prices import prices_together

    _check_fixed(asked, axes)
    targets = options.targets_of(asked)
    prices = {
        target.name: price
        for target, price in zip(targets, prices_together(targets, own), strict=True)
        if price
    }
    points: list[Answer] = []
    refused: list[tuple[Dims, ModelError]] = []
    warnings: list[str] = []
    choices = [tuple(zip(axes, n, strict=True)) for n in product(*axes.values())]
    with progress(len(choices), "sweep") as done:
        for dims in choices:
            here = replace(asked, loading=asked.loading.sized(*dims))
            try:
                found = answers(here, several, warnings)
            except ModelError as error:  # a size that a model does not take
                refused.append((dims, error))
                found = []
            for a in found:
                price = prices.get(a.target)
                points.append(replace(a, dims=dims, usd_per_hour=price and price.usd_per_hour))
            done()
    if not points:
        raise refused[0][1]
    for text in warnings:
        warn(text)
    return SweepAnswers(
        model=points[0].model,
        axes=tuple(axes.items()),
        points=tuple(points),
        refused=tuple((dims, error.what) for dims, error in refused),
        prices=tuple(prices.items()),
    )


def _check_fixed(asked: options.ModelRun, axes: Iterable[str]) -> None:
    """UsageError for a size that is given, and swept as well."""
    from gpuir.ir.errors import UsageError

    how = asked.loading.options(asked.loaded)
    if twice := [(name, o) for name in axes if (o := options.given_size(how, name))]:
        name, option = twice[0]
        raise UsageError(
            f"{option} sets {name}, but the sweep changes it", fix="remove one of the two options"
        )


def axes_of(asked: SweepOptions) -> dict[str, tuple[int, ...]]:
    """The sizes to try by dimension, the first of them the one to look along."""
    from gpuir.ir.errors import UsageError

    along = [asked.batch_sizes] if asked.batch_sizes else []
    axes: dict[str, tuple[int, ...]] = {}
    for name, values in (*along, *asked.other_sizes):
        if name in axes:
            raise UsageError(
                f"{name} is listed twice in the sweep", fix=f"--dim {name}=1,2,4..256 once"
            )
        axes[name] = values
    if not axes:
        raise UsageError("the sweep has no sizes", fix="--batch 1,2,4..256, or --dim seq=128..4096")
    return axes
