"""Kernels that tuners know, with their measured sweeps, and sweeps made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Number
from gpuir.tune.choices import Choices, choices_of
from gpuir.tune.kernels import Kernel, kernel
from gpuir.tune.published import TEMPLATES
from gpuir.tune.templates import Template

TUNING = Path(__file__).parents[2] / "shared" / "data" / "tuning"
# Of each kind of `gpuir.kernel`, what it has to be given.
EXTENTS: dict[str, dict[str, Any]] = {
    "gemm": {"m": 512, "n": 512, "k": 512},
    "conv": {"batch": 8, "channels": 64, "size": (28, 28), "filters": 64, "window": 3},
    "attention": {"batch": 2, "heads": 8, "queries": 512, "keys": 512, "head": 64},
    "rows": {"rows": 4096, "columns": 768},
    "map": {"cells": 1 << 20},
    "experts": {"tokens": 64, "hidden": 1024, "inter": 512, "topk": 2, "experts": 8},
    "grouped": {"rows": 512, "n": 1024, "k": 1024, "groups": 8},
    "gather": {"rows": 4096, "width": 128, "table": 100_000},
    "topk": {"rows": 64, "columns": 4096, "k": 8},
}


def _blocks(launch: Mapping[str, Any]) -> Kernel:
    return kernel("gemm", m=launch["m"], n=launch["n"], k=launch["k"])


def _block(meta: Mapping[str, Number]) -> Tiles:
    dims = {"b": 1.0, "m": meta["BM"], "n": meta["BN"], "k": meta["BK"]}
    return Tiles(dims, meta["stages"], meta["warps"])


# A matrix product as a tutorial of Triton has it: small, for tests that need no data.
PRODUCT = Template(
    "product",
    _blocks,
    _block,
    {
        "BM": (32, 64, 128, 256),
        "BN": (32, 64, 128, 256),
        "BK": (32, 64),
        "stages": (2, 3, 5),
        "warps": (4, 8),
    },
)
LAUNCH = {"m": 4096, "n": 4096, "k": 1024}


def product(target: str = "a100-sxm-80gb") -> Choices:
    return choices_of(PRODUCT, LAUNCH, target, lambda c: c["BM"] * c["BN"] <= 128 * 256)


def made_up(found: Choices, seed: int = 0) -> dict[tuple[int, ...], float]:
    """Seconds of each configuration: what is predicted, times what a model may be wrong by. What it
    holds for not legal fails."""
    wrong = np.sin(found.features @ np.random.default_rng(seed).normal(size=len(found.names)))
    seconds = found.predictions.time_s * np.exp(0.25 * wrong)
    return {tuple(row): float(t) for row, t in zip(found.rows.tolist(), seconds)}


# ---------------------------------------------------------------------------- measured


def convolution(gpu: str, target: str) -> tuple[Choices, dict[tuple[int, ...], float]]:
    """Kernel Tuner's convolution of 4096 by 4096, and its measured seconds, of what was measured:
    blocks of 1, 2, 4, 8 and 16 rows."""
    launch = {"y": 4096, "x": 4096, "i": 15, "j": 15}
    rows = (1, 2, 4, 8, 16)
    whole = TEMPLATES["kernel_tuner.convolution"]
    measured = replace(whole, parameters={**whole.parameters, "block_size_y": rows})
    found = choices_of(measured, launch, target, fits)
    seconds = sweep("convolution_a", gpu, found.names)
    assert set(seconds) == set(map(tuple, found.rows.tolist()))
    return found, seconds


def fits(c: Mapping[str, Any]) -> Any:
    """The restrictions of convolution_a, as shared/data/tuning/README.md has them."""
    bx, by = c["block_size_x"], c["block_size_y"]
    cells = (bx * c["tile_size_x"] + 14) * (by * c["tile_size_y"] + 14)
    padded = (c["use_padding"] == 0) | ((bx % 32 != 0) & (c["use_shmem"] == 1))
    return padded & (bx * by <= 1024) & ((c["use_shmem"] == 0) | (cells < 12 * 1024))


def sweep(kernel: str, gpu: str, names: tuple[str, ...]) -> dict[tuple[int, ...], float]:
    """Measured seconds of each configuration, infinite for those that failed."""
    file = TUNING / f"sweeps_{kernel.partition('_')[0]}.parquet"
    parquet = pytest.importorskip("pyarrow.parquet", reason="reads parquet: gpuir[eval]")
    if not file.exists():
        pytest.skip(f"{file} is not there: measured sweeps are beside the repository")
    table = parquet.read_table(file, filters=[("kernel", "=", kernel), ("gpu", "=", gpu)])
    columns = [table[n].to_pylist() for n in names]
    times = zip(table["status"].to_pylist(), table["median_ms"].to_pylist())
    seconds = [t * 1e-3 if status == "ok" else np.inf for status, t in times]
    return dict(zip(zip(*columns), seconds))


def write_cache(path: Path, found: Choices, seconds: Mapping[tuple[int, ...], float]) -> None:
    """A sweep as a cache file of Kernel Tuner's, format 1.x: milliseconds."""
    rows: dict[str, dict[str, Any]] = {}
    for row, t in seconds.items():
        timing = {"compile_time": 0, "verification_time": 0, "benchmark_time": 0}
        values: dict[str, Any] = dict(zip(found.names, row)) | timing
        values |= {"strategy_time": 0, "framework_time": 0, "timestamp": "2026-01-01T00:00:00"}
        values["time"] = t * 1e3 if np.isfinite(t) else "RuntimeFailedConfig"
        rows[",".join(map(str, row))] = values
    head = {
        "schema_version": "1.0.0",
        "device_name": found.target.name,
        "kernel_name": found.kernel.name,
        "problem_size": [1],
        "tune_params_keys": list(found.names),
        "tune_params": found.parameters,
        "objective": "time",
        "cache": rows,
    }
    path.write_text(json.dumps(head))
