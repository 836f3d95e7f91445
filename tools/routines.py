"""Routines that nothing was fitted to, measured on this machine's CPU beside what gpuir says.

    python tools/routines.py [--target TARGET] [--csv FILE]

Times one core: sorts, selections, running sums, decompositions, transforms and searches of a few
sizes, by PyTorch and by numpy, the lower quartile of repeated calls. Beside each the prediction
and its 80 % interval; at the end the share of rows that intervals hold, and how far off an operator
would be of which bytes alone are known. `--target` is a core like the one at hand, with numbers
changed where they differ (`epyc-zen5-core-avx2+clock_hz=2.5e9`); `gpuir calibrate --target cpu`
makes one.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.update(OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")  # before numpy reads it

import numpy as np

from gpuir.cost.batch import best_tiles, costs_of
from gpuir.cost.reading import work_of
from gpuir.cost.uncertainty import OPAQUE
from gpuir.cost.work import Work
from gpuir.ir.build import Builder
from gpuir.ir.graph import Level, Op, Value
from gpuir.ir.types import TensorType, c64, f32, i64
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.targets.load import load_target

LEAST_S, MOST_CALLS = 0.05, 200
Row = tuple[str, str, Callable[[], object], k.KernelOp]


def kernel(kind: Any, make: Callable[..., Op], *types: TensorType) -> k.KernelOp:
    values = tuple(Value(f"x{i}", type) for i, type in enumerate(types))
    b = Builder(Level.graph, "body")
    b.locs = ("routine",)
    for v in values:
        b.capture(v)
    return kind(values, b.finish(list(b.add(make(*values)))))


def routine(
    fn: str, types: tuple[TensorType, ...], gives: tuple[TensorType, ...], work: float, **attrs: Any
) -> k.KernelOp:
    settings = tuple(attrs.items())
    return kernel(k.Routine, lambda *v: t.Routine(fn, v, gives, settings, work=round(work)), *types)


def rows() -> Iterator[Row]:
    """Who computes it, what, a call, and the kernel it is."""
    import torch

    torch.set_num_threads(1)
    for r, n in ((1, 1000), (1, 100_000), (1, 1_000_000), (1000, 1000)):
        x, type = torch.randn(r, n), TensorType((r, n), f32)
        host = x.numpy()
        shape = f"{r} x {n}"
        for found in (1, 50, n):
            op = kernel(k.Routine, lambda v, found=found: t.TopK(v, found, 1), type)
            if found == n:
                yield "torch", f"sort {shape}", lambda x=x: torch.sort(x, -1), op
                yield "numpy", f"argsort {shape}", lambda h=host: np.argsort(h, -1), op
            else:
                yield "torch", f"topk {shape}, {found}", lambda x=x, f=found: torch.topk(x, f), op
        op = kernel(k.Reduce, lambda v: t.Cumulative("sum", v, 1), type)
        yield "torch", f"cumsum {shape}", lambda x=x: torch.cumsum(x, -1), op
        yield "numpy", f"cumsum {shape}", lambda h=host: np.cumsum(h, -1), op
        flat, cells = x.reshape(-1), r * n
        some = (flat > 0).to(torch.float32)
        gives = (TensorType((cells, 1), i64),)
        op = routine("nonzero", (TensorType((cells,), f32),), gives, cells)
        yield "torch", f"nonzero {cells}", lambda s=some: torch.nonzero(s), op
        yield "numpy", f"nonzero {cells}", partial(np.nonzero, some.numpy()), op
        whole = torch.randint(0, cells, (cells,))
        line = TensorType((cells,), i64)
        op = routine("unique", (line,), (line,), cells)
        yield "torch", f"unique {cells}", lambda w=whole: torch.unique(w), op
        yield "numpy", f"unique {cells}", partial(np.unique, whole.numpy()), op
        points = n if n < 1_000_000 else 1 << 20
        signal = torch.randn(r, points, dtype=torch.complex64)
        of = TensorType((r, points), c64)
        work = 5 * r * points * np.log2(points)
        op = routine("fft", (of,), (of,), work, kind="c2c", axes=(1,))
        yield "torch", f"fft {r} x {points}", lambda s=signal: torch.fft.fft(s), op
        yield "numpy", f"fft {r} x {points}", partial(np.fft.fft, signal.numpy()), op
        ordered, asked = torch.sort(flat).values, torch.randn(10_000)
        many = TensorType((10_000,), f32)
        op = routine("search", (TensorType((cells,), f32), many), (many,), 10_000 * np.log2(cells))
        call = lambda o=ordered, a=asked: torch.searchsorted(o, a)  # noqa: E731
        yield "torch", f"searchsorted 10000 in {cells}", call, op
        drawn = TensorType((cells,), f32)
        op = routine("random", (), (drawn,), cells, kind="normal")
        yield "torch", f"randn {cells}", lambda c=cells: torch.randn(c), op
    la, nl = torch.linalg, np.linalg
    for b, n in ((1, 32), (1, 128), (1, 512), (1, 1024), (64, 32)):
        shape = (b, n, n) if b > 1 else (n, n)
        x = torch.randn(*shape)
        good = x @ x.mT + n * torch.eye(n)
        type, cube = TensorType(shape, f32), b * float(n) ** 3
        named = " x ".join(map(str, shape))
        several = (type, type.with_shape(shape[:-1]), type)
        for fn, of, gives, work, calls in (
            ("cholesky", good, (type,), cube / 3, (la.cholesky, nl.cholesky)),
            ("qr", x, (type, type), 8 * cube / 3, (la.qr, nl.qr)),
            ("svd", x, several, 23 * cube, (la.svd, nl.svd)),
            ("eigh", good, several[1:], 9 * cube, (la.eigh, nl.eigh)),
            ("inverse", good, (type,), 2 * cube, (la.inv, nl.inv)),
            ("det", good, (type.with_shape(shape[:-2]),), 2 * cube / 3, (la.det, nl.det)),
        ):
            op = routine(fn, (type,), gives, work)
            yield "torch", f"{fn} {named}", partial(calls[0], of), op
            yield "numpy", f"{fn} {named}", partial(calls[1], of.numpy()), op


def timed(call: Callable[[], object]) -> float:
    """Seconds of this thread: the lower quartile, of one call at least."""
    call()
    spent: list[float] = []
    while len(spent) < 3 or (sum(spent) < LEAST_S and len(spent) < MOST_CALLS):
        start = time.thread_time()
        call()
        spent.append(time.thread_time() - start)
    return float(np.quantile(spent, 0.25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="epyc-zen5-core-avx2")
    parser.add_argument("--only", default="", help="operators whose names have this in them")
    parser.add_argument("--csv", help="a row a call")
    given = parser.parse_args()
    target = load_target(given.target)
    found: list[dict[str, Any]] = []
    for by, what, call, op in rows():
        if given.only not in what:
            continue
        work: Work = work_of(op)
        (cost,) = costs_of([*best_tiles({work: what}, target).items()], target)
        low, high = cost.interval or (cost.time_s, cost.time_s)
        unknown = work.nbytes / target.dram_bytes_per_s + target.launch_s
        measured = timed(call)
        row = {"by": by, "what": what, "measured_us": measured * 1e6, "said_us": cost.time_s * 1e6}
        row |= {"low_us": low * 1e6, "high_us": high * 1e6, "held": low <= measured <= high}
        row |= {"ratio": measured / cost.time_s, "over_bytes": measured / unknown}
        found.append(row)
        print(f"{by:6} {what:32} {measured * 1e6:12.1f} us, said {cost.time_s * 1e6:12.1f} "
              f"({low * 1e6:.1f} to {high * 1e6:.1f}){'' if row['held'] else '  *'}")  # fmt: skip
    if given.csv:
        with open(given.csv, "w", newline="") as file:
            out = csv.DictWriter(file, list(found[0]))
            out.writeheader()
            out.writerows(found)
    summary(found)


def summary(found: list[dict[str, Any]]) -> None:
    """By operator: rows, the middle ratio of measured to said, and how many intervals hold."""
    print(f"\n{'operator':14} rows  held  measured over said: middle, 10 % to 90 %")
    names = dict.fromkeys(row["what"].split()[0] for row in found)
    for name in (*names, "all"):
        some = [x for x in found if name in ("all", x["what"].split()[0])]
        ratios = np.array([x["ratio"] for x in some])
        low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
        held = sum(x["held"] for x in some)
        print(f"{name:14} {len(some):4} {held:5}  {middle:6.2f}, {low:.2f} to {high:.2f}")
    over = np.array([x["over_bytes"] for x in found])
    low, middle, high = np.quantile(over, (0.1, 0.5, 0.9))
    inside = np.mean((over >= np.exp(-OPAQUE[0])) & (over <= np.exp(OPAQUE[1])))
    print(f"as unknown operators, measured over bytes once: {middle:.1f}, {low:.1f} to {high:.1f}; "
          f"{100 * inside:.0f} % within cost.uncertainty.OPAQUE")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
