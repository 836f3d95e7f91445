"""`gpuir simulate`: one step of a model over the ranks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import click

from gpuir.backends.table import FORMATS
from gpuir.cli import options
from gpuir.cli.lowering import once
from gpuir.cli.modules import load_modules
from gpuir.cli.output import emit, layout, show, warn
from gpuir.simulate.parallel import ContextExchange, PipelineSchedule

if TYPE_CHECKING:
    from gpuir.cli.modules import Loaded
    from gpuir.simulate.step import Shared, Step

DEGREE = click.IntRange(1, 1 << 20)
PLANS = ("plan", "pytorch", "megatron", "deepspeed")


@click.command()
@options.model
@click.option("--cluster", required=True, help="A cluster: dgx-a100, 2xdgx-h100+dgx-a100, my.toml.")
@click.option("--dp", type=DEGREE, default=1, help="Ranks that share a batch.  [1]")
@click.option("--tp", type=DEGREE, default=1, help="Ranks that share the weights of a layer.  [1]")
@click.option("--pp", type=DEGREE, default=1, help="Ranks that share the layers.  [1]")
@click.option("--cp", type=DEGREE, default=1, help="Ranks that share a sequence.  [1]")
@click.option("--ep", type=DEGREE, default=1, help="Ranks that share the experts.  [1]")
@click.option(
    "--zero", type=click.IntRange(0, 3), default=0, help="Stage of ZeRO within dp; 3 is FSDP.  [0]"
)
@click.option("--sequence", is_flag=True, help="With tp: norms and residuals by sequence, too.")
@click.option(
    "--overlap", is_flag=True, help="With sequence: products and collectives of tp side by side."
)
@click.option(
    "--microbatches", type=DEGREE, default=1, help="Into which a step's batch is cut.  [1]"
)
@click.option(
    "--schedule",
    type=click.Choice(get_args(PipelineSchedule)),
    default="1f1b",
    show_default=True,
    help="In which order ranks of pp run microbatches.",
)
@click.option("--chunks", type=DEGREE, default=1, help="Groups of layers a rank: interleaved.  [1]")
@click.option(
    "--exchange",
    type=click.Choice(get_args(ContextExchange)[1:]),
    help="What ranks of cp send in attention: heads, keys to all, keys round a ring.  [the fewest "
    "bytes of the first two]",
)
@click.option(
    "--slow",
    type=options.Assignments("RANK=1.3", float),
    multiple=True,
    help="A rank whose kernels take so many times as long: a straggler.",
)
@click.option("--critical-path", is_flag=True, help="List what decides the end, and whose it is.")
@options.formats(
    *("trace", "chakra", *PLANS),
    help="Of the result; chakra is a folder. The last four are the plan: as JSON, and for who runs "
    "it.",
)
@options.loading
@options.profile
@options.predictor
@options.tf32
@options.width
@options.output
@options.load_modules
@options.verbose
def command(**given: Any) -> None:
    """Predict a step of MODEL on many GPUs.

    gpuir loads MODEL with the batch of the whole step, of all ranks together, then splits it. Ranks
    that do the same work are simulated once. The report says first if the step does not fit.

    \b
    gpuir simulate model.onnx --cluster dgx-a100 --tp 4 --dims batch=8
    gpuir simulate hf:config.json --cluster 4xdgx-h100 --dp 32 --zero 3 --dims batch=64,seq=2048 \\
        --train --optimizer adamw
    gpuir simulate model.onnx --cluster dgx-h100+dgx-a100 --dp 8 --pp 2 --microbatches 8 \\
        --dims batch=64
    gpuir simulate model.onnx --cluster dgx-a100 --tp 4 --dims batch=8 --format chakra -o traces
    gpuir simulate model.onnx --cluster dgx-a100 --tp 4 --dims batch=8 --format megatron
    """
    from gpuir.cli.fitting import step_fixes

    loaded = load_modules(given["modules"])
    warnings: list[str] = []
    step = _step(given, loaded, once(warnings))
    if step.tp_shared and step.tp_shared.is_little:
        warnings.append(few_cut(step.parallel.tp, step.tp_shared))
    for warning in warnings:
        warn(warning)
    if given["format"] in FORMATS:
        step = step_fixes(step, given, lambda other: _step(other, loaded, lambda _: None))
    _show(step, given)


def _step(given: dict[str, Any], loaded: Loaded, say: Callable[[str], None]) -> Step:
    """The step that options ask for."""
    import gpuir
    from gpuir.cost.table import find_predictor
    from gpuir.passes.microbatch import Microbatch

    parallel = gpuir.Parallel(
        **{name: given[name] for name in ("dp", "tp", "pp", "cp", "ep", "zero")},
        **{name: given[name] for name in ("sequence", "overlap", "microbatches")},
        **{name: given[name] for name in ("schedule", "chunks")},
        exchange=given["exchange"] or "",
    )
    gpuir.load_cluster(given["cluster"])
    profile = loaded.profile(given["profile"]) if given["profile"] else None
    predictor: Any = find_predictor(given["predictor"], loaded.predictors)
    if given["predictor"].partition("@")[0] not in loaded.predictors:
        predictor = given["predictor"]
    g = gpuir.load(
        given["model"],
        warn=say,
        profile=profile,
        tf32=given["tf32"],
        **options.load_options(given, loaded),
    )
    return gpuir.simulate_ranks(
        Microbatch(given["microbatches"]).run(g),
        given["cluster"],
        parallel,
        profile=profile,
        predictor=predictor,
        tf32=given["tf32"],
        slow=_slow(given["slow"]),
    )


def _show(step: Step, given: dict[str, Any]) -> None:
    from gpuir.backends.steps import step_report

    batch, form = options.batch(given["dims"]), given["format"]
    if form in FORMATS:
        show(step_report(step, batch, given["critical_path"]), given)
    elif form in PLANS:
        emit(_planned(form, step, batch), given["output"])
    elif form == "chakra":
        from gpuir.backends.chakra.traces import step_traces

        emit(step_traces(step), given["output"])
    else:
        from gpuir.backends.step_trace import step_trace

        shape = replace(layout(given["width"], given["output"]), file=given["output"] or "")
        emit(step_trace(step, shape), given["output"])


def few_cut(tp: int, shared: Shared) -> str:
    """A warning that tensor parallelism cuts little of a model."""
    return (
        f"tp={tp} cuts only {shared}: heads or columns that do not divide by {tp}, or that are not "
        "worth it, are whole on each rank"
    )


def _slow(given: tuple[tuple[tuple[str, float], ...], ...]) -> dict[int, float]:
    from gpuir.ir.errors import UsageError

    found: dict[int, float] = {}
    for rank, factor in (pair for pairs in given for pair in pairs):
        if not rank.isdecimal():
            raise UsageError(
                "the factor of a slow rank is not valid",
                found=f"--slow {rank}={factor:g}",
                fix="--slow 0=1.3",
            )
        found[int(rank)] = factor
    return found


def _planned(form: str, step: Step, batch: int | None) -> str:
    """The plan of a step, as text of that form."""
    from gpuir.backends.plans.cuts import module_cuts
    from gpuir.backends.plans.table import PLAN_FORMATS, Plan
    from gpuir.ir.errors import UsageError

    if batch is None:
        raise UsageError(
            f"the format {form!r} needs the size of the batch", fix="for example --dims batch=8"
        )
    graphs = [run.graph for part in step.parts for run in part.runs]
    found = [module_cuts(g) for g in graphs]
    cuts = dict(cut for known, _ in found for cut in known)
    if step.is_mixed and len(step.parts) > 1:
        sizes = ", ".join(f"{part.params:,}" for part in step.parts)
        warn(
            f"the pipeline stages are sized for their GPUs ({sizes} weights a "
            "rank), but the plan file holds only the degrees"
        )
    for name in dict.fromkeys(name for _, others in found for name in others):
        warn(f"{name} is split over tp in a way that the plan file cannot describe")
    plan = Plan(step.parallel, batch, step.model, step.cluster, tuple(cuts.items()))
    return PLAN_FORMATS[form](plan)
