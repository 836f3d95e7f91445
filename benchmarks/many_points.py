"""What one more point of a large model takes: a command after another, and the step function.

usage: python benchmarks/many_points.py [--runs N] [--large]    (pip install -e '.[bench]' first)

The model is a decoder of the size of Llama-3.1-8B, by its config. Each run begins with an empty
cache; the commands of a row come in turn, each in a process of its own. A ratio is to the first
command of the run. `--large` adds commands of minutes: a step of GPT-175B on 16,384 GPUs, and plans
of a decoder of 70B on 64. Prints medians; judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from run import ENVIRONMENT, cpu_s, measure

import gpuir

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
SIZE_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
GPT_175B: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "dtype": "bfloat16",
    "n_embd": 12288,
    "n_layer": 96,
    "n_head": 96,
    "n_positions": 2048,
    "vocab_size": 51200,
}
DECODE = "--phase decode --past 4096 --dims batch={batch} --target {target}"
COMMANDS = {  # in this order
    "first": DECODE.format(batch=8, target="h100-sxm"),
    "again": DECODE.format(batch=8, target="h100-sxm"),
    "another target": DECODE.format(batch=8, target="a100"),
    "another stack": f"{DECODE.format(batch=8, target='h100-sxm')} --profile vllm",
    "another size": DECODE.format(batch=64, target="h100-sxm"),
    "a third size": DECODE.format(batch=32, target="h100-sxm"),
}
LARGE = {
    "GPT-175B on 16,384 GPUs": (
        "simulate",
        GPT_175B,
        "--cluster 2048xdgx-h100 --tp 8 --pp 16 --dp 128 --microbatches 16 "
        "--dims batch=2048,seq=2048 --train --optimizer adamw",
    ),
    "plans of 70B on 64 GPUs": (
        "plan",
        {**LLAMA, **SIZE_70B},
        "--cluster 8xdgx-h100 --dims batch=256,seq=4096 --train --optimizer adamw --autocast bf16",
    ),
}
POINTS = 1000


def config(folder: Path, given: dict[str, Any]) -> str:
    path = Path(tempfile.mkdtemp(dir=folder)) / "config.json"
    path.write_text(json.dumps(given))
    return f"hf:{path}"


def gpuir_command(name: str, model: str, text: str) -> list[str]:
    return [sys.executable, "-m", "gpuir", name, model, *text.split()]


def commands(folder: Path, runs: int) -> Table:
    """One command after another on a kept model."""
    model, rows = config(folder, LLAMA), dict[str, list[Sequence[float]]]()
    for i in range(runs):
        ENVIRONMENT["XDG_CACHE_HOME"] = str(folder / f"cache{i}")
        for name, text in COMMANDS.items():
            rows.setdefault(name, []).append(measure(gpuir_command("analyze", model, text)))
    table = Table("gpuir analyze hf:8B, decode", "wall s", "CPU s", "MB", "CPU over the first")
    first = statistics.median(cpu for _, cpu, _ in rows["first"])
    for name, some in rows.items():
        wall, cpu, size = map(statistics.median, zip(*some, strict=True))
        cells = f"{wall:.2f}", f"{cpu:.2f}", f"{size:.0f}", f"{cpu / first:.2f}"
        table.add_row(name, *cells)
    return table


def step_function(folder: Path) -> Table:
    """Decode steps at many batches and contexts, by `gpuir.program`."""
    program = gpuir.program(config(folder, LLAMA), phase="decode", dims={"seq": 1})
    draw = np.random.default_rng(0)
    ends = {"batch": np.array([2, 256]), "past": np.array([128, 32768])}
    table = Table("decode steps of 8B", "points", "CPU s", "us a point")

    def row(name: str, points: dict[str, Any], target: str) -> None:
        seconds, count = cpu_s(lambda: program.times(points, target)), len(points["batch"])
        table.add_row(name, f"{count:,}", f"{seconds:.3f}", f"{seconds / count * 1e6:.0f}")

    def some() -> dict[str, Any]:
        return {n: draw.integers(low, high + 1, POINTS) for n, (low, high) in ends.items()}

    row("ends: the loads", ends, "h100-sxm")
    row("first points", some(), "h100-sxm")
    row("other points", some(), "h100-sxm")
    row("another target, first", some(), "a100")
    row("another target", some(), "a100")
    return table


def large(folder: Path) -> Table:
    table = Table("command", "wall s", "CPU s", "MB")
    for i, (name, (command, model, text)) in enumerate(LARGE.items()):
        ENVIRONMENT["XDG_CACHE_HOME"] = str(folder / f"large{i}")
        line = gpuir_command(command, config(folder, model), text)
        for turn in ("first", "from disk"):
            wall, cpu, size = measure(line)
            table.add_row(f"{name}, {turn}", f"{wall:.1f}", f"{cpu:.1f}", f"{size:,.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    asked = parser.parse_args()
    console = Console(width=140)
    ENVIRONMENT.pop("GPUIR_NO_CACHE", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = name
        began = time.perf_counter()
        console.print(commands(folder, asked.runs))
        console.print(step_function(folder))
        if asked.large:
            console.print(large(folder))
        console.print(f"{time.perf_counter() - began:.0f} s on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
