"""Ranks the architectures of a small search space by predicted latency on three GPUs.

usage: python examples/rank_architectures.py [--count 10000] [--csv FILE] [--plot FILE.svg]

The space: convolutional networks for images of 224x224, a stem, four stages of inverted residuals
(Sandler et al., MobileNetV2, CVPR 2018) and a classifier. Each stage has one block or two, of a
narrow, a usual or a wide width, with windows of 3x3 or 5x5: 12 choices a stage, 20,736 networks, of
which COUNT are drawn. Batches of 32, in f32, under onnxruntime; one image at a time the host would
decide, and all GPUs be alike. `gpuir.analyze` of one of them gives the same numbers.

No network is trained, so nothing is said of accuracy. What latency is set against is the number of
parameters: a proxy of what a network can learn, and a poor one between networks of one space. Put a
predictor of accuracy of your own in its place (`objective`) to search for real.

Needs `pip install 'gpuir[plot]'` for the picture.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from gpuir.ir.build import Builder
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ir.types import TensorType, f32
from gpuir.ops import tensor as t
from gpuir.plan.space.engines import find_engine
from gpuir.run.spaces import latencies

GPUS = ("t4", "l4", "a100-sxm-80gb")
DEPTHS, WIDTHS, WINDOWS = (1, 2), (0.75, 1.0, 1.5), (3, 5)
STAGES = (32, 64, 128, 256)  # usual channels
EXPANSION = 4
BATCH = 32
CHUNK = 125  # architectures whose kernels are costed together


@dataclass(frozen=True)
class Stage:
    depth: int
    width: float
    window: int


Architecture = tuple[Stage, ...]


def space() -> list[Architecture]:
    stages = [Stage(*choice) for choice in product(DEPTHS, WIDTHS, WINDOWS)]
    return list(product(stages, repeat=len(STAGES)))


class Network:
    """Builds a network layer by layer."""

    def __init__(self, name: str):
        self.b = Builder(Level.graph, name)
        self.count = 0

    def conv(self, x: Value, channels: int, window: int, stride: int, groups: int = 1) -> Value:
        """A convolution and its bias; batch norms are folded into these before a model runs."""
        self.count += 1
        self.b.locs = (f"conv{self.count}",)
        shape = (channels, x.type.shape[1] // groups, window, window)
        w = self.b.param(f"w{self.count}", TensorType(shape, f32))
        bias = self.b.param(f"b{self.count}", TensorType((1, channels, 1, 1), f32))
        steps, pad = (stride, stride), (window // 2, window // 2)
        y = self.b(t.Conv(x, w, steps, pad, pad, (1, 1), groups))
        return self.b(t.Map("add", (y, bias)))

    def relu(self, x: Value) -> Value:
        self.count += 1
        self.b.locs = (f"relu{self.count}",)
        return self.b(t.Map("relu", (x,)))

    def block(self, x: Value, channels: int, window: int, stride: int) -> Value:
        inner = EXPANSION * x.type.shape[1]
        y = self.relu(self.conv(x, inner, 1, 1))
        y = self.relu(self.conv(y, inner, window, stride, groups=inner))
        y = self.conv(y, channels, 1, 1)
        if y.type != x.type:
            return y
        self.b.locs = (f"add{self.count}",)
        return self.b(t.Map("add", (x, y)))

    def head(self, x: Value) -> Value:
        self.b.locs = ("pool",)
        y = self.b(t.Reduce("mean", x, (2, 3)))
        w = self.b.param("classifier", TensorType((x.type.shape[1], 1000), f32))
        self.b.locs = ("classifier",)
        return self.b(t.Matmul(y, w))


def build(choice: Architecture, batch: int = BATCH) -> Graph:
    net = Network("net")
    x = net.b.input("image", TensorType((batch, 3, 224, 224), f32))
    x = net.relu(net.conv(x, 16, 3, 2))
    for stage, usual in zip(choice, STAGES, strict=True):
        for i in range(stage.depth):
            x = net.block(x, int(stage.width * usual), stage.window, 2 if i == 0 else 1)
    return net.b.finish([net.head(x)])


def objective(graph: Graph) -> float:
    """What is traded for latency: parameters, a proxy and no accuracy."""
    return float(sum(prod(v.type.shape) for v in graph.params))


def ranked(choices: Sequence[Architecture]) -> list[tuple[float, ...]]:
    """Of each architecture what it is worth, and its latency on each GPU."""
    graphs = [build(choice) for choice in choices]
    found = latencies(graphs, GPUS, "ort")
    return [
        (objective(g), *(answer.latency_s or np.nan for answer in row))
        for g, row in zip(graphs, found, strict=True)
    ]


def all_ranked(choices: Sequence[Architecture], workers: int | None) -> np.ndarray:
    """The same of all, by several processes."""
    rows: dict[int, list[tuple[float, ...]]] = {}
    starts = range(0, len(choices), CHUNK)
    with find_engine("local", workers) as engine:
        tasks = ((i, (choices[i : i + CHUNK],)) for i in starts)
        for i, some in engine.each(ranked, tasks):
            rows[i] = some
            print(f"\r{sum(map(len, rows.values())):,}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return np.array([row for i in starts for row in rows[i]])


def front(worth: np.ndarray, latency_s: np.ndarray) -> list[int]:
    """Those that nothing beats: whatever is quicker is worth less. The quickest first."""
    best, found = -np.inf, []
    for i in np.lexsort((-worth, latency_s)).tolist():
        if worth[i] > best:
            best = worth[i]
            found.append(i)
    return found


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def lines(choices: Sequence[Architecture], table: np.ndarray) -> Iterator[str]:
    worth = table[:, 0]
    for g, gpu in enumerate(GPUS, 1):
        some = front(worth, table[:, g])
        yield f"{gpu}: {len(some)} on the front, of {len(table):,}"
        for i in (some[0], some[len(some) // 2], some[-1]):
            stages = " ".join(f"{s.depth}x{s.width:g}/{s.window}" for s in choices[i])
            yield f"  {table[i, g] * 1e3:6.3f} ms  {worth[i] / 1e6:5.2f} M  {stages}"
    yield "rank correlation of latencies:"
    for a, b in ((1, 2), (1, 3), (2, 3)):
        yield f"  {GPUS[a - 1]}, {GPUS[b - 1]}: {agreement(table[:, a], table[:, b]):.3f}"
    for g, gpu in enumerate(GPUS, 1):
        yield f"  parameters, {gpu}: {agreement(worth, table[:, g]):.3f}"


def draw(table: np.ndarray, path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "gpuir"  # the same bytes for the same numbers
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(GPUS), figsize=(12, 4), sharey=True)
    for g, (gpu, ax) in enumerate(zip(GPUS, axes, strict=True), 1):
        some = front(table[:, 0], table[:, g])
        ax.plot(table[:, g] * 1e3, table[:, 0] / 1e6, ".", ms=2, color="#b0b0b0", rasterized=True)
        ax.step(
            table[some, g] * 1e3, table[some, 0] / 1e6, "o-", ms=3, color="#c0392b", where="post"
        )
        ax.set_title(gpu)
        ax.set_xlabel("predicted latency, ms")
    axes[0].set_ylabel("parameters, millions (no accuracy)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=10_000)
    options.add_argument("--workers", type=int)
    options.add_argument("--csv")
    options.add_argument("--plot")
    given = options.parse_args()
    choices = random.Random(0).sample(space(), given.count)
    begun = time.perf_counter()
    table = all_ranked(choices, given.workers)
    took = time.perf_counter() - begun
    print("\n".join(lines(choices, table)))
    each = took / len(table)
    print(f"{len(table):,} on {len(GPUS)} GPUs in {took:.0f} s: {each * 1e3:.1f} ms each")
    if given.csv:
        with open(given.csv, "w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(["architecture", "parameters", *(f"{gpu} s" for gpu in GPUS)])
            for choice, row in zip(choices, table.tolist(), strict=True):
                rows.writerow([" ".join(f"{s.depth}x{s.width:g}/{s.window}" for s in choice), *row])
    if given.plot:
        draw(table, given.plot)


if __name__ == "__main__":
    main()
