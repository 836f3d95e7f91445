"""Tables of whole decoders for `gpuir eval models`: layers of a profile, deployments, and
batches of several GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gpuir.cli.output import note
from gpuir.ir.errors import UsageError

if TYPE_CHECKING:
    from gpuir.cost.learned import Model
    from gpuir.fit.score import GroupScores
    from gpuir.fit.tables import MeasuredTable
    from gpuir.ir.graph import Graph
    from gpuir.report.table import Report
    from gpuir.targets.target import Target

# Columns that tell such a table → what evaluates it.
LAYERS = ("gpu", "model", "op", "tokens", "tp", "hidden", "latency_us")
BATCHES = ("engine", "model", "workload", "prefill_ms", "decode_ms", "output_len")
DEPLOYMENTS = ("model", "system", "framework", "ttft_ms", "tpot_ms", "concurrency")


def are_in(path: str | Path) -> bool:
    """Whether a table is of decoders: their layers, batches, or deployments."""
    return _kind(path) is not None


def _kind(
    path: str | Path,
) -> Callable[[str | Path, str | None], tuple[MeasuredTable, GroupScores]] | None:
    from gpuir.fit.columns import TableFile

    names = TableFile(Path(path)).names
    if set(LAYERS).issubset(names):
        return _layers
    if set(BATCHES).issubset(names):
        return _batches
    return _deployments if set(DEPLOYMENTS).issubset(names) else None


def evaluate(path: str | Path, unseen: str | None = None) -> tuple[MeasuredTable, GroupScores]:
    """The table and its scores; those of GPUs alone that the folder `unseen` has weights for, by
    those. UsageError where it is a table of something else."""
    kind = _kind(path)
    if kind is None:
        raise UsageError(
            "no table of decoders",
            where=str(path),
            expected=" or ".join(", ".join(x) for x in (LAYERS, BATCHES, DEPLOYMENTS)),
        )
    return kind(path, unseen)


def report(path: str, unseen: str | None = None, commands: bool = False) -> Report:
    """The scores of a table, or its commands."""
    from gpuir.backends.scores import scores_report
    from gpuir.cost.tile import BY

    if commands:
        return _commands(path)
    table, errors = evaluate(path, unseen)
    head = {"kind": "models", "predictor": BY, "calibrated_rows": None}
    head |= {"left_out": "device" if unseen else None, "seed": None}
    return scores_report([table], errors, head)


def _commands(path: str) -> Report:
    from gpuir.cli.exam import commands_report
    from validation import batches

    if _kind(path) is not _batches:
        raise UsageError(
            "no command gives the numbers of this table",
            where=path,
            found="layers and deployments are predicted from parts of steps",
            fix="leave out --commands",
        )
    found = batches.forecast(batches.read(path).cases, note)
    return commands_report("models", (row for f in found for row in f.rows))


def _layers(path: str | Path, unseen: str | None) -> tuple[MeasuredTable, GroupScores]:
    from gpuir.fit.tables import MeasuredTable
    from validation import llm

    read = llm.read(path)
    weights = _weights(unseen, {m.target for m in read.models})
    models = [m for m in read.models if unseen is None or m.target.name in weights]
    errors = llm.score(models, build, note, weights)
    return MeasuredTable(
        read.file, "layers of language models", read.count, (), read.skipped
    ), errors


def _weights(folder: str | None, targets: Iterable[Target]) -> dict[str, Model]:
    """Weights that were trained without a GPU, by its name; UsageError where none are there."""
    from validation.weights import read_weights

    if folder is None:
        return {}
    weights = {t.name: read_weights(folder, t) for t in targets}
    there = {name: model for name, model in weights.items() if model is not None}
    if not there:
        raise UsageError(
            "no weights of these GPUs",
            where=folder,
            expected=", ".join(f"{name}.json" for name in sorted(weights)),
        )
    return there


def _deployments(path: str | Path, unseen: str | None) -> tuple[MeasuredTable, GroupScores]:
    from gpuir.fit.tables import MeasuredTable
    from validation import deployments

    read = deployments.read(path)
    weights = _weights(unseen, {r.deployment.target for r in read.runs})
    runs = [r for r in read.runs if unseen is None or r.deployment.target.name in weights]
    made = deployments.forecast(runs, served, note, weights)
    errors = deployments.score(made, read.file)
    return MeasuredTable(
        read.file, "deployments of language models", read.count, (), read.skipped
    ), errors


def _batches(path: str | Path, unseen: str | None) -> tuple[MeasuredTable, GroupScores]:
    from gpuir.fit.tables import MeasuredTable
    from validation import batches

    if unseen is not None:
        raise UsageError("--unseen is not for batches", where=str(path), fix="leave it out")
    read = batches.read(path)
    errors = batches.score(batches.forecast(read.cases, note), read.file)
    return MeasuredTable(
        read.file, "batches of language models", read.count, (), read.skipped
    ), errors


def build(config: Mapping[str, Any], tokens: int, profile: str) -> Graph:
    """The kernels of a prompt under a profile."""
    from gpuir.run.analysis import lower

    return lower(_loaded(json.dumps(dict(config)), tokens), profile=profile)


def served(config: Mapping[str, Any], tokens: int) -> Graph:
    """The kernels of a prompt, nothing fused: what servers launch is another matter."""
    from gpuir.run.analysis import lower

    return lower(_loaded(json.dumps({**config, "dtype": "bfloat16"}), tokens), profile="eager")


@cache
def _loaded(config: str, tokens: int) -> Graph:
    """A prompt of one sequence; transformers wants the config as a file."""
    from gpuir.run.loading import load

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return load(
            f"hf:{folder}",
            phase="prefill",
            dims={"batch": 1, "seq": tokens},
            warn=lambda text: None,
        )
