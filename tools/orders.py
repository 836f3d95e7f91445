"""How often predictions put two GPUs, two sizes or two stacks the wrong way round.

    python tools/orders.py [--models] [--worst N]

Orders that hold on paper:

- a GPU that has at least every rate of another of its architecture is no slower than that one: over
  all such pairs of shipped targets, kernel by kernel;
- nor is a GPU given more of one thing: SMs, clock, bandwidth, L2, power, all rates;
- one row of a matrix takes no longer than two, nor those than four, up to 64;
- with --models: the same of whole models; and `ideal` is no slower than any other profile, and
  `compiled` none than `eager`.

Printed are how many cases are slower by more than 0, 3 and 10 %, and the worst. A library may well
be slower by a few percent (another tile, a wave more); none of this is measured. The same every
time. Kernels take some 20 seconds, models a minute or two. Models are examples/encoder.onnx, those
that the onnx package brings, and a few small torch programs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpuir
from gpuir.cost import routing, sized
from gpuir.cost.tile import predict
from gpuir.cost.work import Work
from gpuir.ir.types import DType, bf16, f8e4m3, f16, f32, tf32
from gpuir.passes.annotate import Annotate
from gpuir.passes.tile import TilePass
from gpuir.targets.load import load_target, target_names
from gpuir.targets.order import pairs
from gpuir.targets.target import Target

HERE = Path(__file__).resolve().parent.parent
TOLERANCES = (0.0, 0.03, 0.10)
ROUNDING = 1e-9

# What users compare though their architectures, or one clock, differ.
ASKED = (
    *(("rtx5090", "rtx4090"), ("b200-sxm-180gb", "h100-sxm-80gb")),
    ("h100-sxm-80gb", "a100-sxm-80gb"),
)
# One GPU with more of something: what of it, by how much.
MORE: Mapping[str, tuple[str, ...]] = {
    "SMs": ("sms",),
    "clock": ("clock_hz",),
    "DRAM bandwidth": ("dram.bytes_per_s",),
    "L2 size": ("l2.bytes",),
    "L2 bandwidth": ("l2.bytes_per_s",),
    "power": ("tdp_w",),
    "all": ("sms", "clock_hz", "dram.bytes_per_s", "l2.bytes", "l2.bytes_per_s", "tdp_w"),
}
BY = (1.05, 1.25)
CHANGED = (
    *("a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb"),
    *("l4", "l40s", "rtx4090", "rtx5090", "t4", "v100-sxm-16gb", "a10", "p100-pcie-16gb", "mi300x"),
)


@dataclass(frozen=True)
class Case:
    """A kernel and a GPU, or a model and a stack: what should be no slower, and than what."""

    group: str
    name: str
    slow_s: float  # of what may be slower
    fast_s: float  # of what should not be

    @property
    def over(self) -> float:
        """By what share the one that should be no slower is."""
        return self.fast_s / self.slow_s - 1


# ---------------------------------------------------------------------------- kernels


def corpus() -> dict[str, Work]:
    """Kernels by kind, each kind a table: sizes at even distances in their logarithms."""
    found: dict[str, Work] = {}
    wide = np.array([1, 2, 4, 8, 16, 32, 64, 128, 333, 1024, 4096, 8192], float)
    sides = np.array([(512, 512), (768, 3072), (1000, 1000), (4096, 1024), (4096, 14336)], float)
    m, n, k = (a.ravel() for a in _crossed(wide, sides))
    for dtype in (f32, f16, bf16, f8e4m3):
        out = bf16 if dtype == f8e4m3 else dtype
        found[f"gemm {dtype.name}"] = sized.gemm(m, n, k, dtype, out=out)
    found["layer f32"] = sized.gemm(m, n, k, f32, epilogue=("bias",))
    some = m > 1  # a matrix times a vector never runs in TF32 (`passes.math`)
    found["gemm tf32"] = sized.gemm(m[some], n[some], k[some], f32, math=tf32)
    found["gemm f16, lopsided"] = sized.gemm(
        *np.array([(1, 64, 25088), (8, 64, 25088), (64, 32000, 4096), (100000, 64, 64)], float).T,
        f16,
    )
    found["gemm f32, lopsided"] = sized.gemm(
        *np.array([(1, 64, 25088), (8, 64, 25088), (64, 32000, 4096), (100000, 64, 64)], float).T,
        f32,
    )
    b, s = (a.ravel() for a in np.meshgrid([8.0, 96.0], [64.0, 197.0, 512.0, 1024.0]))
    for dtype in (f32, f16):
        found[f"bmm {dtype.name}"] = sized.gemm(s, s, 64.0 + 0 * s, dtype, b=b)
    cells = np.round(2.0 ** np.arange(10, 29, 1.5))
    for dtype in (f32, f16):
        found[f"add {dtype.name}"] = sized.pointwise(cells, (dtype, dtype), (dtype,))
        found[f"gelu {dtype.name}"] = sized.mapped("gelu", cells, (dtype,), dtype)
        found[f"copy {dtype.name}"] = sized.pointwise(cells, (dtype,), (dtype,), kind="copy")
        o, r = (a.ravel() for a in np.meshgrid(4.0 ** np.arange(0, 9), [64.0, 777.0, 4096.0, 5e4]))
        for kind in ("softmax", "norm", "sum"):
            found[f"{kind} {dtype.name}"] = sized.rows(o, r, dtype, kind)
        found[f"gather {dtype.name}"] = sized.gather(cells // 256, 256.0, dtype, 50_000.0)
    for dtype in (f32, f16):
        found[f"conv {dtype.name}"] = _convolutions(dtype)
    for dtype in (f16, bf16):
        b, s = (a.ravel() for a in np.meshgrid([1.0, 8.0], [128.0, 512.0, 2048.0, 8192.0]))
        found[f"prefill {dtype.name}"] = sized.attention(
            b, 32.0, s, s, 128.0, dtype, kv_heads=8.0, causal=True
        )
        b, s = (a.ravel() for a in np.meshgrid([1.0, 8.0, 64.0], [128.0, 1024.0, 8192.0]))
        found[f"decode {dtype.name}"] = sized.attention(
            b, 32.0, 1.0 + 0 * s, s, 128.0, dtype, kv_heads=8.0
        )
    found["encoder f32"] = sized.attention(8.0, 12.0, s, s, 64.0, f32)
    for stack in ("cutlass", "vllm"):
        found[f"experts {stack}"] = routing.mixture(
            np.array([1.0, 4, 16, 64, 256, 1024, 4096]), 4096.0, 14336.0, 2, 8, bf16, library=stack
        )
    return found


def _crossed(extents: np.ndarray, sides: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = np.repeat(extents, len(sides))
    n, k = np.tile(sides, (len(extents), 1)).T
    return m, n, k


def _convolutions(dtype: DType) -> Work:
    shapes = [(b, c, f) for b in (1.0, 8.0, 64.0) for c, f in ((64.0, 64.0), (256.0, 512.0))]
    b, c, f = np.array([s for s in shapes for _ in range(2)]).T
    side = np.tile([14.0, 56.0], len(shapes))
    return sized.conv(b, c, (side, side), f, (3.0, 3.0), dtype, padding=1)


def label(many: Work, i: int) -> str:
    size = np.shape(many.points)
    return " x ".join(f"{float(np.broadcast_to(n, size)[i]):g}" for _, n in many.dims)


@dataclass(frozen=True)
class Times:
    """Predictions of the corpus, each GPU's once."""

    kernels: Mapping[str, Work]
    known: dict[str, dict[str, np.ndarray]]

    def on(self, target: Target) -> dict[str, np.ndarray]:
        if target.name not in self.known:
            self.known[target.name] = {
                kind: predict(many, target).time_s for kind, many in self.kernels.items()
            }
        return self.known[target.name]

    def compared(self, group: str, more: Target, less: Target) -> Iterator[Case]:
        slow, fast = self.on(less), self.on(more)
        for kind, many in self.kernels.items():
            if not (less.peak(many.pipe, many.dtype) and _runs(many, less) and _runs(many, more)):
                continue
            for i, (a, b) in enumerate(zip(slow[kind], fast[kind], strict=True)):
                yield Case(group, f"{kind} {label(many, i)}, {more.name} after {less.name}", a, b)


def _runs(many: Work, target: Target) -> bool:
    """Whether a GPU has units for what is multiplied: what it does not have it would not run."""
    if many.pipe != "tensor" or many.dtype == f32:
        return True
    return many.dtype.name in target.flops_per_s.tensor


def given_more(target: Target) -> Iterator[tuple[str, Target]]:
    """The target with more of something."""
    for what, fields in MORE.items():
        for by in BY:
            values = {f: _field(target, f) for f in fields}
            chosen = {f: _more(f, v, by) for f, v in values.items() if v is not None}
            if chosen:
                yield f"{what} +{100 * by - 100:.0f} %", load_target(target.name, chosen)


def _more(path: str, value: float, by: float) -> float:
    return float(round(value * by)) if path in ("sms", "l2.bytes") else value * by


def _field(target: Target, path: str) -> float | None:
    value: Any = target
    for name in path.split("."):
        value = getattr(value, name)
    return value


def in_rows(times: Times, target: Target) -> Iterator[Case]:
    """Products of few rows, each beside the next with twice as many."""
    for kind, many in times.kernels.items():
        if not kind.startswith(("gemm", "layer")) or not _runs(many, target):
            continue
        m, n, k = (np.broadcast_to(many.extents[d], np.shape(many.points)) for d in "mnk")
        at = {(x, y, z): i for i, (x, y, z) in enumerate(zip(m, n, k, strict=True))}
        found = times.on(target)[kind]
        for (x, y, z), i in at.items():
            for more in (2 * x, 8 * x):
                if x <= 16 and (more, y, z) in at:
                    j = at[more, y, z]
                    name = f"{kind} {x:g} after {more:g} x {y:g} x {z:g} on {target.name}"
                    yield Case(f"rows: {x:g} after {more:g}", name, found[j], found[i])


# ---------------------------------------------------------------------------- whole models

PYTORCH, ONNX = ("eager", "compiled", "cudagraph"), ("ort", "tensorrt")
ON = (
    *("a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb"),
    *("rtx4090", "rtx5090", "t4"),
)


def graphs() -> Iterator[tuple[str, Any]]:
    """Loaded models."""
    for batch, seq in ((1, 16), (1, 128), (8, 128), (64, 512)):
        dims = {"batch": batch, "seq": seq}
        yield f"encoder {batch} x {seq}", gpuir.load(HERE / "examples/encoder.onnx", dims=dims)
    import onnx

    light = Path(os.path.dirname(onnx.__file__)) / "backend/test/data/light"
    for name in ("densenet121", "resnet50", "shufflenet", "squeezenet"):
        yield name, gpuir.load(str(light / f"light_{name}.onnx"))
    yield from _programs()


def _programs() -> Iterator[tuple[str, Any]]:
    import torch
    from torch import nn

    def layer(width: int, heads: int) -> nn.Module:
        return nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)

    def perceptron(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def convolutions(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000),
        )  # fmt: skip

    def norms(width: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Softmax(-1), nn.LayerNorm(width))

    programs: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...]], ...] = (
        ("layer 1 x 128", lambda: layer(512, 8), (1, 128, 512)),
        ("layer 16 x 512", lambda: layer(1024, 16), (16, 512, 1024)),
        ("perceptron 1", lambda: perceptron(1024), (1, 1024)),
        ("perceptron 4096", lambda: perceptron(1024), (4096, 1024)),
        ("convolutions 1", lambda: convolutions(32), (1, 3, 112, 112)),
        ("convolutions 32", lambda: convolutions(64), (32, 3, 112, 112)),
        ("norms", lambda: norms(1024), (8192, 1024)),
    )
    for dtype in (torch.float32, torch.float16):
        for name, make, shape in programs:
            torch.manual_seed(0)
            module = make().eval().to(dtype)
            x = torch.zeros(shape, dtype=dtype)
            short = str(dtype).removeprefix("torch.")
            yield f"{name} {short}", gpuir.load(module, args=(x,))


def of_models() -> Iterator[Case]:
    """Whole models: on pairs of GPUs, and under profiles."""
    targets = [load_target(name) for name in ON]
    ordered = [(f"models: {b.name} after {a.name}", b.name, a.name) for b, a in pairs(targets)]
    ordered += [(f"models, asked: {b} after {a}", b, a) for b, a in ASKED]
    for model, graph in graphs():
        torch = graph.framework == "pytorch"
        profiles = (*(PYTORCH if torch else ONNX), "ideal")
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for profile in profiles:
            kernels = gpuir.lower(graph, profile=profile)
            for target in targets:
                found[profile, target.name] = _both(kernels, target.name)
        for group, more, less in ordered:
            yield Case(group, model, found[profiles[0], less][0], found[profiles[0], more][0])
        for target in targets:
            where = f"{model} on {target.name}"
            for faster, slower in _profiles(profiles):
                slow, fast = found[slower, target.name], found[faster, target.name]
                for part, a, b in (("device", slow[0], fast[0]), ("with host", slow[1], fast[1])):
                    yield Case(f"{faster} after {slower}, {part}", where, a, b)


def _profiles(profiles: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Of two profiles the one that should be no slower, and the other."""
    if "compiled" in profiles:
        yield "compiled", "eager"
    for profile in profiles[:-1]:
        yield "ideal", profile


def _both(kernels: Any, name: str) -> tuple[float, float]:
    """Seconds of the device, and with the host."""
    costed = Annotate().run(TilePass(target=name).run(kernels))
    summary = gpuir.analyze(costed)
    return summary.device_s, summary.latency_s


# ---------------------------------------------------------------------------- the table


def table(cases: Iterable[Case], worst: int) -> str:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    over = " | ".join(f"> {100 * t:g} %" for t in TOLERANCES)
    lines = [f"| order | cases | {over} | worst |", "|---|---|" + "---|" * (len(TOLERANCES) + 1)]
    for group, some in groups.items():
        counts = [sum(c.over > t + ROUNDING for c in some) for t in TOLERANCES]
        last = max(some, key=lambda c: c.over)
        said = f"{100 * last.over:+.1f} %: {last.name}" if last.over > ROUNDING else ""
        lines.append(f"| {group} | {len(some)} | {' | '.join(map(str, counts))} | {said} |")
    every = [c for some in groups.values() for c in some]
    counts = [sum(c.over > t + ROUNDING for c in every) for t in TOLERANCES]
    lines.append(f"| all | {len(every)} | {' | '.join(map(str, counts))} | |")
    lines.extend(
        f"  {100 * c.over:+6.1f} %  {1e6 * c.slow_s:10.1f} us, {1e6 * c.fast_s:10.1f}  {c.name}"
        for c in sorted(every, key=lambda c: -c.over)[:worst]
    )
    return "\n".join(lines)


def of_kernels() -> Iterator[Case]:
    targets = [t for t in map(load_target, target_names()) if not t.is_cpu]
    times = Times(corpus(), {})
    for more, less in pairs(targets):
        yield from times.compared(f"{more.name} after {less.name}", more, less)
    for more, less in ASKED:
        a, b = load_target(more), load_target(less)
        yield from times.compared(f"asked: {a.name} after {b.name}", a, b)
    for name in CHANGED:
        target = load_target(name)
        for what, more in given_more(target):
            yield from times.compared(f"given {what}", more, target)
    for target in targets:
        yield from in_rows(times, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", action="store_true", help="whole models, not kernels")
    parser.add_argument("--worst", type=int, default=10, help="cases to list")
    given = parser.parse_args()
    print(table(of_models() if given.models else of_kernels(), given.worst))


if __name__ == "__main__":
    main()
