"""Recommenders with tables over many GPUs, as published: step times of plans like those that ran.

What is known of a run is its model (rows, widths, lookups, perceptrons), its GPUs, batch and dtype,
and in words where tables lay. What is built:

- synthetic models (TensorFlow, distributed-embeddings): whole tables or columns, as `gpuir shard`
  places them, Adagrad, indices by a power law of exponent 1.05; sums pooled by `interact_stride`,
  beside the numerical features, through one perceptron, data parallel.
- DLRM (PyTorch, DeepLearningExamples): whole tables on all GPUs but the first, the largest first;
  SGD; indices by a power law of 1.45 (that of synthetic data of these sizes: the pages train on
  Criteo's own); products of pairs and the top perceptron, data parallel; the bottom one on the
  first GPU alone, for the whole batch, while the others look up. With `amp fp16` tables are f16.

What is data parallel is one GPU's share of the batch under the profile `cudagraph`, its gradients
added up over ranks after it. A step is all of these one after another: nothing else is taken to
overlap. Of TensorFlow nothing is modelled but the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from typing import Any, cast

from gpuir.cli.exam import ScoredRow
from gpuir.files import read_json
from gpuir.fit.columns import TableFile, count_of
from gpuir.fit.tables import target_of
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.ir.types import f16, f32
from gpuir.ops.spread import Spread
from gpuir.plan.exchange import collective_of
from gpuir.plan.sharding import PlacementPlan, PlacementSetting, greedily, options, shard
from gpuir.plan.tables import EmbeddingTable
from gpuir.targets.cluster import Cluster, load_cluster
from validation import commands

COLUMNS = ("model", "gpu", "gpus", "gpus_per_node", "dtype", "global_batch", "step_time_s")
DTYPES = {"amp fp16": "f16", "tf32": "tf32", "fp32": "f32", "not stated": "f32"}
SKEW = {"synthetic": 1.05, "dlrm": 1.45}
FACTS = {"synthetic": ("mlp_sizes", "interact_stride"), "dlrm": ("bottom_mlp", "top_mlp")}
MEMORY = 0.9  # of a GPU, for tables: runs are published that fill it


@dataclass(frozen=True)
class Run:
    """A line of the table."""

    id: str
    model: str
    target: str
    gpus: int
    node: int
    dtype: str
    batch: int
    measured_s: float


@dataclass(frozen=True)
class Forecast:
    """A run, and what is predicted of it by part; what gives the parts, where a command does."""

    run: Run
    parts: Mapping[str, float]
    given: tuple[ScoredRow, ...] = ()

    @property
    def time_s(self) -> float:
        return sum(self.parts.values())

    @property
    def rows(self) -> tuple[ScoredRow, ...]:
        return ScoredRow(
            self.time_s, "s", "", "the sum of its parts, which follow: no command has all of them"
        ), *self.given

    @property
    def error(self) -> float:
        return 100 * (self.time_s / self.run.measured_s - 1)


def are_in(path: str | Path) -> bool:
    names = TableFile(Path(path)).names
    return all(name in names for name in (*COLUMNS, "placement"))


def read(
    path: str | Path, models: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Run], dict[str, int]]:
    """The runs of a table, and why lines are none."""
    file = TableFile(Path(path))
    columns = file.read(("id", *COLUMNS))
    counts = ("gpus", "gpus_per_node", "global_batch")
    runs: list[Run] = []
    skipped: Counter[str] = Counter()
    for line in columns.lines(("id", "model", "gpu", "dtype"), (*counts, "step_time_s")):
        gpus, node, batch = (count_of(line[n]) for n in counts)
        target, seconds = target_of(line["gpu"]), line["step_time_s"]
        if target is None:
            skipped[f"no target is called {line['gpu'] or 'nothing'}"] += 1
        elif why := _unbuilt(line["model"], models):
            skipped[why] += 1
        elif line["dtype"] not in DTYPES:
            skipped[f"dtype {line['dtype'] or 'not stated'} is not modelled"] += 1
        elif not (gpus and node and 0 < seconds < inf):
            skipped["a count or the time is missing"] += 1
        elif batch < gpus:
            skipped["the batch has no sample for each GPU"] += 1
        else:
            dtype = DTYPES[line["dtype"]]
            runs.append(
                Run(line["id"], line["model"], target.name, gpus, node, dtype, batch, seconds)
            )
    return runs, dict(skipped)


def _name(model: str) -> str:
    """That of its facts: those of DLRM are of the data that it reads."""
    return model.removeprefix("dlrm-")


def _unbuilt(model: str, models: Mapping[str, Mapping[str, Any]]) -> str:
    """Why a model is not built, empty where it is."""
    kind = model.partition("-")[0]
    if kind not in SKEW:
        return f"{model or 'a model without a name'} is not built here"
    facts = models.get(_name(model))
    if facts is None:
        return f"no facts of {model}"
    missing = [n for n in ("tables", "numerical_features", *FACTS[kind]) if n not in facts]
    return f"the facts of {model} have no {', '.join(missing)}" if missing else ""


def read_models(path: str | Path) -> dict[str, dict[str, Any]]:
    content = read_json(path, "the models")
    models = cast("dict[str, dict[str, Any]]", content) if isinstance(content, dict) else {}
    if not models or not all(isinstance(m, dict) and "tables" in m for m in models.values()):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "no models of recommenders",
            where=str(path),
            expected='{"dlrm": {"tables": [...], ...}}',
            fix="--models embedding_models.json",
        )
    return models


def forecast(runs: Iterable[Run], models: Mapping[str, Mapping[str, Any]]) -> Iterator[Forecast]:
    for run in runs:
        yield predicted(run, models[_name(run.model)])


def machine(run: Run) -> Cluster:
    """The page's machines: DGX A100, or as many GPUs of a node as ran (on a DGX-2 sixteen behind
    one switch, at the rate of eight)."""
    if run.target == "a100-sxm-80gb" and run.gpus >= 8:
        return load_cluster("dgx-a100" if run.gpus == 8 else f"{run.gpus // 8}xdgx-a100")
    one = load_cluster(f"{min(run.gpus, 8)}x{run.target}")
    if run.gpus <= 8 or one.domain is None:
        return one
    return replace(one, name=f"{run.gpus} of a node", domain=replace(one.domain, joins=run.gpus))


def predicted(run: Run, model: Mapping[str, Any]) -> Forecast:
    """A step by part."""
    cluster = machine(run)
    collective = collective_of(cluster)
    is_dlrm = run.model.startswith("dlrm")
    tables = tuple(tables_of(model, run))
    setting = PlacementSetting(
        cluster.target,
        cluster.gpus,
        cluster.target.dram.bytes * MEMORY,
        run.batch,
        collective,
        "sgd" if is_dlrm else "adagrad",
        ("table",) if is_dlrm else ("table", "column"),
    )
    plan = placed(tables, setting, is_dlrm)
    found = dict(plan.parts)
    given = [ScoredRow(plan.time_s, "s of its tables", *_placing(run, tables, setting, cluster))]
    local = run.batch // run.gpus
    shape, pairs = shape_of(model, tables, is_dlrm)
    if is_dlrm and run.gpus > 1:
        bottom, shape = (shape[0], (), 0, 0), ((), *shape[1:])
        alone_s, _ = dense(bottom, False, run.batch, run.dtype, run.target)
        found["bottom perceptron"] = max(alone_s - found["lookups"] - found["updates"], 0.0)
    dense_s, gradient_bytes = dense(shape, pairs, local, run.dtype, run.target)
    found["dense"] = dense_s
    apart = sum(found[name] for name in ("dense", "bottom perceptron") if name in found)
    given.append(
        ScoredRow(
            apart,
            "s of its dense layers",
            "",
            "perceptrons of these widths are modules of PyTorch, which no command takes",
        )
    )
    if run.gpus > 1:
        found["dense all-reduce"] = collective("all_reduce", gradient_bytes)
        call = f"gpuir.collective('all_reduce', {gradient_bytes!r}, {cluster.name!r}, dtype='f32')"
        said = (f"{call}.time_s", "") if _is_named(cluster) else ("", NAMELESS)
        given.append(ScoredRow(found["dense all-reduce"], "s of its all-reduce", *said))
    return Forecast(run, found, tuple(given))


NAMELESS = "no cluster is called like these GPUs of a node"


def _is_named(cluster: Cluster) -> bool:
    try:
        return load_cluster(cluster.name) == cluster
    except GpuirError:
        return False


def _placing(
    run: Run, tables: Sequence[EmbeddingTable], setting: PlacementSetting, cluster: Cluster
) -> tuple[str, str]:
    """The command that places the tables of a run, and the field of its time; or why none does."""
    if not _is_named(cluster):
        return "", NAMELESS
    if run.model.startswith("dlrm") and run.gpus > 1:
        return "", "tables lie on all GPUs but the first"
    facts = ("name", "rows", "width", "lookups", "features")
    lines = [
        {n: getattr(t, n) for n in facts} | {"dtype": t.dtype.name, "indices": str(t.spread)}
        for t in tables
    ]
    options = {
        "cluster": cluster.name,
        "batch": run.batch,
        "optimizer": setting.optimizer,
        "cut": ",".join(setting.ways),
        "memory": MEMORY,
        "seconds": "0",
    }
    path = commands.kept({"tables": lines}, run.model, "tables.json")
    return commands.line("shard", str(path), options), "time_s"


def placed(
    tables: Sequence[EmbeddingTable], setting: PlacementSetting, is_dlrm: bool
) -> PlacementPlan:
    """The tables of DLRM on all GPUs but the first; others as `gpuir shard` has them."""
    if not is_dlrm or setting.gpus == 1:
        return shard(tables, setting).plan
    fewer = replace(setting, gpus=setting.gpus - 1)
    ways = [options(t, fewer) for t in tables]
    # A table that no GPU has room for is on one all the same: f16 or unequal memory made it fit.
    roomy = replace(fewer, memory_bytes=1e15)
    ways = [w or options(t, roomy) for t, w in zip(tables, ways, strict=True)]
    waits = max(o.waits_s for some in ways for o in some)
    plan = greedily(tables, ways, replace(roomy, waits_s=waits), cut=False)
    assert plan is not None
    return plan


def tables_of(model: Mapping[str, Any], run: Run) -> Iterator[EmbeddingTable]:
    dtype = f16 if run.dtype == "f16" and run.model.startswith("dlrm") else f32
    spread = Spread(SKEW[run.model.partition("-")[0]])
    for i, t in enumerate(model["tables"]):
        each = [float(n) for n in t["lookups_per_feature"]]
        lookups = sum(each) / len(each)
        for j in range(int(t["count"])):
            size = int(t["rows"]), int(t["width"])
            features = int(t["features_per_table"])
            yield EmbeddingTable(f"t{i}.{j}", *size, lookups, features, dtype, spread)


Shape = tuple[tuple[int, ...], tuple[int, ...], int, int]


def shape_of(
    model: Mapping[str, Any], tables: Sequence[EmbeddingTable], is_dlrm: bool
) -> tuple[Shape, bool]:
    """Widths of the bottom and the top perceptron, and what is between: sums and their width."""
    numbers = int(model["numerical_features"])
    if is_dlrm:
        sums, width = sum(t.features for t in tables), tables[0].width
        pairs = sums * (sums + 1) // 2
        top = (width + pairs, *model["top_mlp"])
        return ((numbers, *model["bottom_mlp"]), top, sums, width), True
    cells = sum(t.features * t.width for t in tables)
    cells = cells // int(model["interact_stride"] or 1)
    return ((), (cells + numbers, *model["mlp_sizes"]), 1, cells), False


@cache
def dense(shape: Shape, pairs: bool, batch: int, dtype: str, target: str) -> tuple[float, float]:
    """Seconds of the dense part of a training step, and bytes of its gradients."""
    import torch
    from torch import nn

    import gpuir

    bottom, top, sums, width = shape

    def perceptron(widths: tuple[int, ...]) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers)

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom, self.top = perceptron(bottom), perceptron(top)
            self.at: torch.Tensor
            self.register_buffer("at", torch.tril_indices(sums + 1, sums + 1, -1, device="cpu"))

        def forward(self, numbers: Any, found: Any) -> Any:
            x = self.bottom(numbers)
            if not top:
                return x.sum()
            if not pairs:
                return self.top(torch.cat([x, found.flatten(1)], dim=1)).sum()
            both = torch.cat([x.unsqueeze(1), found], dim=1)
            dots = torch.bmm(both, both.transpose(1, 2))[:, self.at[0], self.at[1]]
            return self.top(torch.cat([x, dots], dim=1)).sum()

    module = Dense()
    numbers = bottom[0] if bottom else width if pairs else top[0] - width
    args = torch.zeros(batch, numbers), torch.zeros(batch, sums, width)
    more = {"autocast": "f16"} if dtype == "f16" else {}
    g = gpuir.load(
        module, args=args, train=True, optimizer="sgd", warn=lambda _: None, **cast(Any, more)
    )
    costed = gpuir.analyze(g, target, profile="cudagraph", tf32=dtype == "tf32").graph
    run = gpuir.timeline(costed, gpuir.load_profile("cudagraph"))
    held = sum(p.numel() for p in module.parameters())
    return run.time_s, held * (2.0 if dtype == "f16" else 4.0)


def in_order(found: Sequence[Forecast]) -> tuple[int, int]:
    """Of pairs of runs of one model in one dtype on different GPUs, or numbers of them, how many
    are predicted in the order that was measured, and how many there are; 5 % apart at least."""
    right = total = 0
    for a, b in combinations(found, 2):
        if (a.run.model, a.run.dtype) != (b.run.model, b.run.dtype):
            continue
        apart = a.run.measured_s / b.run.measured_s
        if 1 / 1.05 < apart < 1.05:
            continue
        total += 1
        right += (apart > 1) == (a.time_s > b.time_s)
    return right, total
