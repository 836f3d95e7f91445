"""Predicted times of measured products, beside those of nvidia-matmul-heuristics.

usage: python benchmarks/matmul_heuristics.py TABLE... [--rows N]
       (pip install -e '.[eval]' nvidia-matmul-heuristics first)

TABLE is a table of measured kernels that `gpuir eval kernels` reads. Taken are its 16-bit products
on GPUs that both know, N rows of each operator and GPU drawn by a seed. The peer predicts the
kernel it would take, chosen by its performance model (PERF_MODEL_BASED_AUTO_TUNING); its times
begin at some ten microseconds, so long rows stand apart. Errors are in percent of the measurement.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from gpuir.fit.batch import MeasuredBatch
from gpuir.fit.columns import Floats
from gpuir.fit.score import forecast
from validation.readers import read_table

PEER = "nvMatmulHeuristics"
LONG_S = 50e-6  # rows beyond which a launch does not matter

# The peer's names of our targets' devices, and of the dtypes (sums in f32).
GPUS = {
    "a100-sxm-80gb": "A100_SXM_80GB",
    "a100-pcie-80gb": "A100_PCIE_80GB",
    "a10": "A10_PCIE",
    "a30": "A30_PCIE",
    "a40": "A40_PCIE",
    "b200-sxm-180gb": "B200",
    "gb200-186gb": "GB200_NVL",
    "h100-nvl-94gb": "H100_NVL",
    "h100-pcie-80gb": "H100_PCIE",
    "h100-sxm-80gb": "H100_SXM",
    "h200-sxm-141gb": "H200_SXM",
    "l4": "L4",
    "l40": "L40",
    "l40s": "L40S",
    "rtx-pro-6000-se": "RTX_PRO_6000",
    "rtx3090": "RTX_3090",
    "rtx4090": "RTX_4090",
    "rtx5090": "RTX_5090",
    "rtx6000-ada": "RTX_6000_ADA",
}
PRECISIONS = {"bf16": "TST", "f16": "HSH"}


def peer_seconds(batch: MeasuredBatch) -> Floats:
    """What the peer predicts of each row of a batch of products."""
    peer: Any = import_module(PEER)
    interface = peer.NvMatmulHeuristicsInterfaceEx(
        backend=peer.NvMatmulHeuristicsTarget.GENERIC,
        flags=peer.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=peer.NvMatmulHeuristicsNvidiaGpu[GPUS[batch.target.device]],
    )
    layout = peer.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR  # weights are [n, k]
    work = batch.works[0]
    precision = PRECISIONS[work.dtype.name]
    ones = np.ones(len(batch))
    shapes = [ones * (n[batch.which] if np.ndim(n) else n) for _, n in work.dims]
    times: list[float] = []
    for b, m, n, k in np.stack(shapes, axis=1).astype(int).tolist():
        problem = interface.makeNvMatmulHeuristicsProblem(m, n, k, layout, b)
        found = interface.get(problem, 1, precision)
        times.append(float(found[0]["runtime"]) if found else float("nan"))
    return np.array(times)


def is_plain_product(batch: MeasuredBatch) -> bool:
    works = batch.works
    return (
        len(works) == 1
        and works[0].kernel == "k.gemm"
        and works[0].dtype.name in PRECISIONS
        and not works[0].kind
        and batch.target.device in GPUS
    )


def errors(predicted: Floats, measured: Floats) -> str:
    error = 100 * np.abs(predicted / measured - 1)
    error = error[np.isfinite(error)]
    return f"{error.mean():.1f} / {np.median(error):.1f}" if len(error) else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description="products, beside nvidia-matmul-heuristics")
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--rows", type=int, default=2000)
    args = parser.parse_args()
    if find_spec(PEER) is None:
        raise SystemExit("skipped: pip install nvidia-matmul-heuristics, which is not here")
    found: dict[tuple[str, str], list[Floats]] = {}
    for batch in (b for path in args.tables for b in read_table(path).batches):
        if not is_plain_product(batch):
            continue
        drawn = np.random.default_rng(0).permutation(np.flatnonzero(~batch.on_floor))[: args.rows]
        part = batch.take(np.sort(drawn))
        times = np.stack([part.latency_s, forecast(part).time_s, peer_seconds(part)])
        found.setdefault((batch.target.device, part.works[0].dtype.name), []).append(times)
    table = Table("gpu", "dtype", "rows", "gpuir", "peer", "rows > 50 us", "gpuir", "peer")
    for (device, dtype), parts in sorted(found.items()):
        measured, ours, theirs = np.concatenate(parts, axis=1)
        long = measured > LONG_S
        table.add_row(
            device,
            dtype,
            f"{len(measured):,}",
            errors(ours, measured),
            errors(theirs, measured),
            f"{long.sum():,}",
            errors(ours[long], measured[long]),
            errors(theirs[long], measured[long]),
        )
    console = Console()
    console.print(table)
    console.print("mean / median absolute error in percent")


if __name__ == "__main__":
    main()
