"""Tables of whole decoders for `gpuir eval models`: layers of a profile, and deployments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gpuir.cli.output import emit, note
from gpuir.ir.errors import UsageError

if TYPE_CHECKING:
    from gpuir.evaluate.score import Scores
    from gpuir.evaluate.tables import Table
    from gpuir.ir.graph import Graph

# Columns that tell such a table → what evaluates it.
LAYERS = ("gpu", "model", "op", "tokens", "tp", "hidden", "latency_us")
DEPLOYMENTS = ("model", "system", "framework", "ttft_ms", "tpot_ms", "concurrency")


def are_in(path: str | Path) -> bool:
    """Whether a table is of decoders: their layers, or deployments of them."""
    return _kind(path) is not None


def _kind(path: str | Path) -> Callable[[str | Path], tuple[Table, Scores]] | None:
    from gpuir.evaluate.columns import TableFile

    names = TableFile(Path(path)).names
    if set(LAYERS).issubset(names):
        return _layers
    return _deployments if set(DEPLOYMENTS).issubset(names) else None


def evaluate(path: str | Path) -> tuple[Table, Scores]:
    """The table and its scores. UsageError where it is of something else."""
    kind = _kind(path)
    if kind is None:
        raise UsageError(
            "no table of decoders",
            where=str(path),
            expected=f"the columns {', '.join(LAYERS)}, or {', '.join(DEPLOYMENTS)}",
        )
    return kind(path)


def show(
    path: str,
    *,
    json_path: str | None,
    output: str | None,
    width: int | None,
    unseen: str | None,
) -> None:
    """The scores of a table to where a command's options say."""
    from gpuir.backends import scores
    from gpuir.cli.analyze import layout
    from gpuir.cost.tile import BY

    if unseen is not None:
        raise UsageError("--unseen is for labels of whole models", where=path, fix="leave it out")
    table, found = evaluate(path)
    if json_path:
        head = {"kind": "models", "predictor": BY, "calibrated_rows": None}
        head |= {"left_out": None, "seed": None}
        emit(scores.json_text([table], found, head), json_path)
    if json_path != "-":
        emit(scores.report([table], found, layout(width, output)), output)


def _layers(path: str | Path) -> tuple[Table, Scores]:
    from gpuir.evaluate import llm
    from gpuir.evaluate.tables import Table

    read = llm.read(path)
    found = llm.score(read.models, build, note)
    return Table(read.file, "layers of language models", read.count, (), read.skipped), found


def _deployments(path: str | Path) -> tuple[Table, Scores]:
    from gpuir.evaluate import deployments
    from gpuir.evaluate.tables import Table

    read = deployments.read(path)
    made = deployments.forecast(read.runs, served, note)
    found = deployments.score(made, read.file)
    return Table(read.file, "deployments of language models", read.count, (), read.skipped), found


def build(config: Mapping[str, Any], tokens: int, profile: str) -> Graph:
    """The kernels of a prompt under a profile, in the dtype that vidur measured."""
    from gpuir.analysis import lower

    return lower(_loaded(json.dumps(dict(config)), tokens, "f16"), profile=profile)


def served(config: Mapping[str, Any], tokens: int) -> Graph:
    """The kernels of a prompt, nothing fused: what servers launch is another matter."""
    from gpuir.analysis import lower

    return lower(_loaded(json.dumps(dict(config)), tokens, "bf16"), profile="eager")


@cache
def _loaded(config: str, tokens: int, dtype: str) -> Graph:
    """A prompt of one sequence; transformers wants the config as a file."""
    from gpuir.loading import load

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return load(
            f"hf:{folder}",
            phase="prefill",
            dims={"batch": 1, "seq": tokens},
            dtype=dtype,
            warn=lambda text: None,
        )
