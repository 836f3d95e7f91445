"""A step of a published run, by what a user runs: `gpuir simulate`, and the same call in Python.

What a table calls software is a model of `validation.zoo`, a recipe and a profile of gpuir, and
options of both; what its page does not say is assumed, and said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gpuir.cli.exam import ScoredRow
from gpuir.simulate.parallel import Parallel
from gpuir.simulate.step import Step
from gpuir.targets.cluster import Cluster, cluster_names, load_cluster
from validation.commands import Simulation
from validation.precisions import precision_of
from validation.runs import EXAMPLES, LLM_FOUNDRY, MEGATRON_LM, MEGATRON_ON_FOUR, Run

NETWORK = "the network between nodes"
NARROW = ("fp8", "mxfp8")
# Releases of Megatron Core with the kernels of 2024.
OF_2024 = ("NeMo container 24", "r0.8.0, July 2024")
# Megatron Core: products and collectives of tensor ranks in pieces that run beside each other, and
# the distributed optimizer (its README; docs of NeMo, performance).
CORE = (
    *("NeMo / Megatron Core", "Megatron-Bridge / Megatron Core"),
    "Megatron-LM / Megatron Core",
)
PASS_TOKENS = 16384  # assumed, of a rank and pass, where a page does not print them
EXCHANGE = "tokens go to experts by all_to_all, a row for each, and nothing runs beside it"
ONE_BY_ONE = ("September 2020", "April 2021")  # before norms were cut along the sequence
# Constants of its profile were fitted to these models of llm-foundry's.
FITTED = ("mpt-1b", "mpt-7b")


@dataclass(frozen=True)
class Forecast:
    """A run, and what is predicted of it by part: seconds that add up; between what 80 % of
    measurements lie, as far as kernels can say; what was asked, and what of it is assumed."""

    run: Run
    parts: Mapping[str, float]
    interval: tuple[float, float]
    asked: Simulation
    assumed: tuple[str, ...] = ()

    @property
    def time_s(self) -> float:
        return sum(self.parts.values())

    @property
    def error(self) -> float:
        return 100 * (self.time_s / self.run.measured_s - 1)

    @property
    def is_stated(self) -> bool:
        """Whether its page says what software ran: all but the network between nodes."""
        return all(text.startswith(NETWORK) for text in self.assumed)

    @property
    def is_inside(self) -> bool:
        low, high = self.interval
        return low <= self.run.measured_s <= high

    @property
    def row(self) -> ScoredRow:
        return ScoredRow(self.time_s, "s", self.asked.command, "time_s")


def forecast(run: Run) -> Forecast:
    asked, assumed = asked_of(run)
    step = asked.step()
    ends = step.interval or (step.time_s, step.time_s)
    return Forecast(run, parts_of(step), ends, asked, assumed)


def parts_of(step: Step) -> dict[str, float]:
    """Seconds of the ranks that are busy longest: what kernels take, what they wait for collectives
    and for other ranks of a pipeline, what of hidden collectives is felt all the same, what is run
    again for nobody, and the rest (the host; kernels slower beside collectives)."""
    parts = {
        "kernels": step.slowest.kernels_s,
        "exposed": step.exposed_s,
        "bubble": step.idle_s,
        "felt": step.felt_s,
        "again": step.again_s,
    }
    return parts | {"rest": step.time_s - sum(parts.values())}


def asked_of(run: Run) -> tuple[Simulation, tuple[str, ...]]:
    """What ran, and what of it is assumed."""
    micro, assumed = _micro(run)
    cluster, silent = cluster_of(run)
    profile, tf32 = None, False
    dtype = {"dtype": "f16" if run.dtype == "fp16" else "bf16"}
    full = {"checkpoint": "layers.*"} if run.recomputed.startswith("full") else {}
    if run.framework == LLM_FOUNDRY:
        kind = "pure-bf16" if run.is_pure else "fp8" if run.dtype == "fp8" else "bf16"
        more = {**full, **(dtype if run.dtype == "fp16" else {})}
        model, recipe = "mpt", f"llm-foundry-{kind}"
        if run.is_pure and run.dtype in NARROW:
            profile = f"llm-foundry+products={run.dtype}"
    elif run.framework == MEGATRON_LM:
        model, recipe = "gpt", "megatron-lm-fp16"
        if run.recomputed.startswith("selective"):
            full = {"checkpoint": "layers.*.core"}
        more = {**full, **(dtype if run.dtype != "fp16" else {})}
    elif run.framework == MEGATRON_ON_FOUR:
        # Gradients are added to buffers, which are summed over ranks when all are there
        # (megatron/core/distributed: main_grad; overlap_grad_reduce is off by default).
        model, recipe = "gpt_in_f32", "megatron-lm-f32"
        more = {**full, **({"accumulate": True} if run.pp == 1 else {})}
    elif run.framework == EXAMPLES:
        precision = precision_of(run.dtype)
        model, more, tf32 = "bert", full, run.dtype == "tf32"
        recipe = f"autocast-{precision.autocast}" if precision.autocast else "eager-f32"
    else:
        kind = run.dtype if run.dtype in NARROW else "bf16"
        model, recipe = "decoder", f"megatron-{kind}"
        more = dtype if run.dtype == "fp16" else {}
        if run.version.startswith(OF_2024):
            profile = "megatron-2024" + (f"+products={kind}" if kind in NARROW else "")
        assumed = ("no recomputation", *(EXCHANGE,) * (run.ep > 1), *assumed)
    dims = {"batch": run.batch, "seq": run.seq, **_sizes(run)}
    step = {"dims": dims, "train": True, "autodiff": "gpuir", "recipe": recipe, **more}
    asked = Simulation(
        f"validation.zoo:{model}",
        step,
        profile=profile,
        tf32=tf32,
        cluster=cluster.name,
        parallel=_parallel(run, micro),
    )
    return asked, (*assumed, *silent)


def _sizes(run: Run) -> dict[str, int]:
    return {name: n for name, n in asdict(run.sizes).items() if n}


def _micro(run: Run) -> tuple[int, tuple[str, ...]]:
    """Sequences a rank and pass."""
    if run.micro:
        return run.micro, ()
    most = min(max(PASS_TOKENS // run.seq, 1), run.batch // run.dp)
    fits = max(n for n in range(1, most + 1) if run.batch // run.dp % n == 0)
    return fits, (f"the micro batch is as many sequences as {PASS_TOKENS:,} tokens are",)


def is_fitted(run: Run) -> bool:
    """Whether constants of its profile were fitted to a run."""
    return run.framework == LLM_FOUNDRY and run.model in FITTED


def _parallel(run: Run, micro: int) -> Parallel:
    """FSDP is stage 3: `SHARD_GRAD_OP` too, though it gathers weights once a pass and not twice.
    Megatron Core's distributed optimizer is stage 1. Ranks that share experts have tokens of their
    own, and count to the table's dp."""
    zero, dp = 0, run.dp // run.ep
    if dp > 1:
        zero = 3 if run.is_fsdp else 1 if run.framework in CORE else 0
    chunks = max(run.vp, 1) if run.pp > 1 else 1
    return Parallel(
        dp=dp,
        ep=run.ep,
        tp=run.tp,
        pp=run.pp,
        cp=run.cp,
        zero=zero,
        sequence=sequential(run),
        overlap=sequential(run) and run.framework in CORE,
        microbatches=run.batch // run.dp // micro,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )


def sequential(run: Run) -> bool:
    """Whether norms and residuals are cut along the sequence: since 2022 (arXiv 2205.05198)."""
    return run.tp > 1 and run.framework != MEGATRON_ON_FOUR and run.version not in ONE_BY_ONE


def cluster_of(run: Run) -> tuple[Cluster, tuple[str, ...]]:
    """The machines of a run, and what of them is assumed."""
    nodes = run.gpus // run.node
    if nodes < 1 or run.gpus % run.node:
        return load_cluster(f"{run.gpus}x{run.target}"), ()
    name = f"dgx-{run.target.partition('-')[0]}"
    if name not in cluster_names() or load_cluster(name).gpu != run.target:
        cluster = load_cluster(f"{run.gpus}x{run.target}")
    else:
        cluster = load_cluster(f"{nodes}x{name}" if nodes > 1 else name)
    silent = nodes > 1 and not run.network
    text = f"{NETWORK} is {cluster.fabric.technology}" if cluster.fabric else NETWORK
    return cluster, (text,) * silent
