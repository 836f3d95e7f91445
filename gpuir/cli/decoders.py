"""Tables of whole decoders for `gpuir eval models`: layers of a profile, and deployments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gpuir.cli.output import note

if TYPE_CHECKING:
    from gpuir.evaluate.score import Scores
    from gpuir.evaluate.tables import Table
    from gpuir.ir.graph import Graph

# Columns that tell such a table → what evaluates it.
LAYERS = ("gpu", "model", "op", "tokens", "tp", "hidden", "latency_us")
DEPLOYMENTS = ("model", "system", "framework", "ttft_ms", "tpot_ms", "concurrency")


def evaluate(path: str | Path) -> tuple[Table, Scores] | None:
    """The scores of a table of decoders; None where it is another."""
    from gpuir.evaluate.columns import TableFile

    names = set(TableFile(Path(path)).names)
    if names.issuperset(LAYERS):
        return _layers(path)
    if names.issuperset(DEPLOYMENTS):
        return _deployments(path)
    return None


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
