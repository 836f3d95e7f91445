"""A step of a published run, predicted by what users run: `gpuir.load` of a program with its
backward pass and optimizer, and `gpuir.simulate_ranks` of it on a cluster.

Layers are alike, or by turns. Without a pipeline two short models, of FEW layers and of one turn
more, are simulated, and say what one more turn adds: a line through both gives the whole model
(`tests/validation/test_training.py` compares it with the whole). Pipelines are simulated whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import gpuir
from gpuir.ir.phases import phase_of
from gpuir.ops import kernel as k
from gpuir.simulate.step import Run as Executed
from gpuir.simulate.step import Step
from gpuir.targets.cluster import Cluster, cluster_names, load_cluster
from validation.programs import program
from validation.runs import Run
from validation.software import Software, software_of

FEW = 2  # and first ones of another kind
LAST = ".down/"  # in the location of a block's last product
NETWORK = "the network between nodes"


@dataclass(frozen=True)
class Forecast:
    """A run, and what is predicted of it by part: seconds that add up; between what 80 % of
    measurements lie, as far as kernels can say; what was assumed."""

    run: Run
    parts: Mapping[str, float]
    interval: tuple[float, float]
    assumed: tuple[str, ...]

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


def forecast(run: Run) -> Forecast:
    software = software_of(run)
    cluster, silent = cluster_of(run)
    layers, turn = run.facts.layers, 2 if run.facts.window else 1
    least = FEW + (run.facts.mixture.dense if run.facts.mixture else 0)
    if run.pp > 1 or layers <= least + turn:
        parts = parts_of(simulated(run, software, cluster, layers), software)
    else:
        depths = least, least + turn
        few, many = (parts_of(simulated(run, software, cluster, n), software) for n in depths)
        more = (layers - depths[1]) / turn
        parts = {n: many[n] + more * (many[n] - few[n]) for n in many}
    ends = parts.pop("low"), parts.pop("high")
    return Forecast(run, parts, ends, (*software.assumed, *silent))


def simulated(run: Run, software: Software, cluster: Cluster, layers: int) -> Step:
    """A step of the run's model with so many layers."""
    batch = software.micro * run.dp
    module, args = program(run.facts, layers, batch, run.seq, software.form)
    graph = gpuir.load(
        module,
        args=args,
        train=True,
        autodiff="gpuir",
        profile=software.profile,
        tf32=run.dtype == "tf32",
        warn=lambda _: None,
        **software.options,
    )
    return gpuir.simulate_ranks(
        graph,
        cluster.name,
        software.parallel,
        profile=software.profile,
        tf32=run.dtype == "tf32",
        predictor=software.kernels,
    )


def parts_of(step: Step, software: Software) -> dict[str, float]:
    """Seconds of the ranks that are busy longest: what kernels take, what they wait for collectives
    and for other ranks of a pipeline, the rest (the host; kernels slower beside collectives), what
    of hidden collectives is felt all the same, and what is recomputed for nobody. And both ends of
    the interval."""
    own = step.slowest
    hidden = sum(x.time_s - x.exposed_s for x in own.traffic)
    parts = {"kernels": own.kernels_s, "exposed": step.exposed_s, "bubble": step.idle_s}
    parts["rest"] = step.time_s - sum(parts.values())
    parts["felt"] = software.felt * hidden
    parts["again"] = sum(map(last_products_s, own.runs)) if software.reentrant else 0.0
    more = parts["felt"] + parts["again"]
    low, high = step.interval or (step.time_s, step.time_s)
    return parts | {"low": low + more, "high": high + more}


def last_products_s(run: Executed) -> float:
    """What the last products of a rank's blocks take in the forward pass."""
    return run.times * sum(
        n.cost.time_s
        for n in run.graph.nodes
        if n.cost and isinstance(n.op, k.Gemm) and not phase_of(n) and LAST in n.locs[0]
    )


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
