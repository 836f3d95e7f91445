"""`gpuir simulate`: one step of a model over the ranks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args

import click

from gpuir.backends.table import FORMATS
from gpuir.cli import options
from gpuir.cli.lowering import once
from gpuir.cli.modules import Loaded
from gpuir.cli.output import emit, layout, note, show, warn
from gpuir.cli.request import ask, held, option, request
from gpuir.simulate.parallel import ContextExchange, PipelineSchedule

if TYPE_CHECKING:
    from gpuir.cli.modules import Loaded
    from gpuir.simulate.fitting import Change
    from gpuir.simulate.step import SharedByTp, Step

DEGREE = click.IntRange(1, 1 << 20)
PLANS = ("plan", "pytorch", "megatron", "deepspeed")


@dataclass(frozen=True)
class Simulate:
    model: str = ask(options.model)
    cluster: str = option("A cluster: dgx-a100, 2xdgx-h100+dgx-a100, my.toml.", required=True)
    dp: int = option("Ranks that share a batch.  [1]", type=DEGREE, default=1)
    tp: int = option("Ranks that share the weights of a layer.  [1]", type=DEGREE, default=1)
    pp: int = option("Ranks that share the layers.  [1]", type=DEGREE, default=1)
    cp: int = option("Ranks that share a sequence.  [1]", type=DEGREE, default=1)
    ep: int = option("Ranks that share the experts.  [1]", type=DEGREE, default=1)
    zero: int = option(
        "Stage of ZeRO within dp; 3 is FSDP.  [0]", type=click.IntRange(0, 3), default=0
    )
    sequence: bool = option("With tp: norms and residuals by sequence, too.")
    overlap: bool = option("With sequence: products and collectives of tp side by side.")
    microbatches: int = option("Into which a step's batch is cut.  [1]", type=DEGREE, default=1)
    schedule: PipelineSchedule = option(
        "In which order ranks of pp run microbatches.",
        type=click.Choice(get_args(PipelineSchedule)),
        default="1f1b",
    )
    chunks: int = option("Groups of layers a rank: interleaved.  [1]", type=DEGREE, default=1)
    exchange: ContextExchange | None = option(
        "What ranks of cp send in attention: heads, keys to all, keys round a ring.  [the "
        "fewest bytes of the first two]",
        type=click.Choice(get_args(ContextExchange)[1:]),
    )
    slow: options.Pairs[float] = option(
        "A rank whose kernels take so many times as long: a straggler.",
        type=options.Assignments("RANK=1.3", float),
        multiple=True,
    )
    critical_path: bool = option("List what decides the end, and whose it is.")
    format: str = ask(
        options.formats(
            ("trace", "chakra", *PLANS),
            help="Of the result; chakra is a folder. The last four are the plan: as JSON, and for "
            "who runs it.",
        )
    )
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing, without="settings schedule pipeline cluster")
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)
    verbose: bool = ask(options.verbose)


@request(Simulate)
def command(asked: Simulate) -> None:
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
    warnings: list[str] = []
    step = _step(asked, once(warnings))
    if step.tp_shared and step.tp_shared.is_little:
        warnings.append(few_cut(step.parallel.tp, step.tp_shared))
    for warning in warnings:
        warn(warning)
    if asked.format in FORMATS:
        step = _with_fixes(step, asked)
    _show(step, asked)


def _step(asked: Simulate, say: Callable[[str], None]) -> Step:
    """The step that options ask for."""
    import gpuir
    from gpuir.passes.microbatch import Microbatch

    named = [f.name for f in fields(gpuir.Parallel)]
    degrees: dict[str, Any] = {n: getattr(asked, n) for n in named if n != "exchange"}
    parallel = gpuir.Parallel(**degrees, exchange=asked.exchange or "")
    gpuir.load_cluster(asked.cluster)
    stack, predictor = asked.costing.stack(asked.loaded), asked.costing.predicts(asked.loaded)
    g = asked.loading.load(asked.model, asked.loaded, say, **stack)
    return gpuir.simulate_ranks(
        Microbatch(asked.microbatches).run(g),
        asked.cluster,
        parallel,
        predictor=predictor,
        **stack,
        slow=_slow(asked.slow),
    ).step


def _with_fixes(step: Step, asked: Simulate) -> Step:
    """A step that does not fit, with the smallest change that was found: a smaller batch, more
    sharding, more ranks that share the weights."""
    from gpuir.cli.fitting import DEGREES, HALVINGS, batch_of
    from gpuir.ir.errors import GpuirError
    from gpuir.simulate.fitting import ToFit

    if step.fits:
        return step
    note(f"{step.model} does not fit: looking for what does")
    name, size = batch_of({"dims": options.merged(asked.loading.dims)})
    sizes = (size >> i for i in range(1, HALVINGS) if size % (1 << i) == 0 and size >> i)
    tries: list[tuple[Change, str, Simulate]] = [
        ("batch", f"--dims {name}={n}", replace(asked, loading=asked.loading.sized((name, n))))
        for n in sizes
    ]
    if asked.loading.train and asked.dp > 1:
        more = range(asked.zero + 1, 4)
        tries.extend(("zero", f"--zero {n}", replace(asked, zero=n)) for n in more)
    tries.extend(("tp", f"--tp {n}", replace(asked, tp=n)) for n in DEGREES if n > asked.tp)
    for change, how, changed in tries:
        try:
            found = _step(changed, lambda _: None)
        except GpuirError:
            continue
        if found.fits:
            return replace(step, to_fit=(ToFit(change, how, found.spare_bytes),))
    return step


def _show(step: Step, asked: Simulate) -> None:
    from gpuir.backends.steps import step_report

    batch, form = asked.loading.batch, asked.format
    if form in FORMATS:
        show(step_report(step, batch, asked.critical_path), asked.format, asked.width, asked.output)
    elif form in PLANS:
        emit(_planned(form, step, batch), asked.output)
    elif form == "chakra":
        from gpuir.backends.chakra.traces import step_traces

        emit(step_traces(step), asked.output)
    else:
        from gpuir.backends.step_trace import step_trace

        shape = replace(layout(asked.width, asked.output), file=asked.output or "")
        emit(step_trace(step, shape), asked.output)


def few_cut(tp: int, shared: SharedByTp) -> str:
    """A warning that tensor parallelism cuts little of a model."""
    return (
        f"tp={tp} cuts only {shared}: heads or columns that do not divide by {tp}, or that are not "
        "worth it, are whole on each rank"
    )


def _slow(factors: options.Pairs[float]) -> dict[int, float]:
    from gpuir.ir.errors import UsageError

    found: dict[int, float] = {}
    for rank, factor in (pair for pairs in factors for pair in pairs):
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
    from gpuir.backends.plans.table import PLAN_FORMATS, TrainingPlan
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
    plan = TrainingPlan(step.parallel, batch, step.model, step.cluster, tuple(cuts.items()))
    return PLAN_FORMATS[form](plan)
