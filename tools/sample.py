"""Draws the small table of measurements that the tests check accuracy on.

usage: python tools/sample.py DATA [--rows 80] [--seed 0]

DATA holds the folders `neusight` and `kernels` (docs/validation/data.md). Of each table, device,
operator and dtype some rows are drawn, as they are, into validation/sample/TABLE.parquet. Their
README has a table of errors, of the full tables and of the sample, which this writes anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gpuir.cli import checkout
from gpuir.fit.score import Errors, score
from gpuir.fit.tables import read_table

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "validation" / "sample"
TABLES = {
    "neusight/gemm": ("device", "op"),
    "neusight/conv": ("device",),
    "neusight/elementwise": ("device",),
    "neusight/softmax": ("device",),
    "neusight/layernorm": ("device",),
    "kernels/gemm": ("system", "dtype"),
    "kernels/gemm_l40s": ("system", "dtype"),
    "kernels/attention_prefill": ("system", "attn_dtype", "kv_dtype"),
    "kernels/attention_decode": ("system", "attn_dtype", "kv_dtype"),
    "kernels/moe": ("system", "dtype"),
}
UNUSED = ("kernels", "torch", "cuda", "repeats")  # columns that no reader needs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lines: list[str] = []
    for name, by in TABLES.items():
        full = given.data / f"{name}.parquet"
        written = SAMPLE / f"{name.replace('/', '_')}.parquet"
        some = drawn(pq.read_table(full), by, given.rows, given.seed)
        pq.write_table(some, written, compression="zstd")
        whole, sample = errors(full), errors(written)
        both = sorted(sample.keys() & whole.keys())
        lines += [row(written.stem, key, whole[key], sample[key]) for key in both]
    readme = SAMPLE / "README.md"
    head = readme.read_text().partition("| sample |")[0]
    title = (
        "| sample | operator | dtype | rows | full table | sample |\n|---|---|---|---|---|---|\n"
    )
    readme.write_text(head + title + "\n".join(lines) + "\n")


def drawn(table: pa.Table, by: tuple[str, ...], rows: int, seed: int) -> pa.Table:
    """Some rows of each group, in the order of the table; flagged ones are left out."""
    if "flag" in table.column_names:
        table = table.filter(pc.equal(pc.fill_null(pc.cast(table["flag"], pa.string()), ""), ""))
    names = [pc.cast(table[column], pa.string()).to_pylist() for column in by]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(zip(*names, strict=True)):
        groups.setdefault(key, []).append(i)
    chosen = np.random.default_rng(seed)
    kept = [chosen.choice(some, min(rows, len(some)), replace=False) for some in groups.values()]
    kept = table.take(np.sort(np.concatenate(kept)))
    return kept.drop_columns([c for c in UNUSED if c in kept.column_names])


def errors(path: Path) -> dict[tuple[str, str], tuple[int, float]]:
    """Of each operator and dtype, over all GPUs: rows, and the mean absolute error in percent. Rows
    at the launch floor and suspect ones are left out, as `gpuir eval kernels` does."""
    parts: dict[tuple[str, str], list[Errors]] = {}
    for found in score(read_table(path, checkout.readers()).batches).groups:
        if not (found.group.floor or found.group.suspect):
            key = found.group.op, found.group.dtype
            parts.setdefault(key, []).append(found.errors)
    return {key: (sum(e.n for e in some), mean(some)) for key, some in parts.items()}


def mean(some: list[Errors]) -> float:
    return float(np.average([e.mape for e in some], weights=[e.n for e in some]))


def row(name: str, key: tuple[str, str], whole: tuple[int, float], some: tuple[int, float]) -> str:
    return f"| {name} | {key[0]} | {key[1]} | {some[0]} | {whole[1]:.1f} | {some[1]:.1f} |"


if __name__ == "__main__":
    main()
