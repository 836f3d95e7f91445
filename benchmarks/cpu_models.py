"""Whole models on this CPU, predicted and measured: a transformer encoder and a convolutional net.

usage: gpuir calibrate --target cpu -o my-cpu.toml
       python benchmarks/cpu_models.py my-cpu.toml            (both with the same OMP_NUM_THREADS)

The models are built twice with the same shapes, as ONNX to predict and in PyTorch to run, eagerly,
as calibration runs its kernels, and timed by the same clock: with one thread its own. The fastest
of some runs counts: what else the machine does only adds time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from onnx import TensorProto, helper, save

import gpuir

ENCODER = Path(__file__).parent.parent / "examples" / "encoder.onnx"
RUNS = 8
STAGES = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))


class Layer(torch.nn.Module):
    """A layer of BERT-base."""

    def __init__(self, width: int = 768, inner: int = 3072, heads: int = 12):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.out, self.up = torch.nn.Linear(width, width), torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.qkv)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.norms[0](x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.down(torch.nn.functional.gelu(self.up(x))))


def convolutions() -> torch.nn.Sequential:
    """3x3 convolutions and relus on an image of 56 x 56, as in a residual net without residuals."""
    layers: list[torch.nn.Module] = []
    channels = 64
    for filters, stride in STAGES:
        layers += [torch.nn.Conv2d(channels, filters, 3, stride, 1), torch.nn.ReLU()]
        channels = filters
    return torch.nn.Sequential(*layers)


def as_onnx(path: Path, batch: int) -> Path:
    """The same net as an ONNX file without weights."""
    nodes, weights, channels, size, value = [], [], 64, 56, "x"
    for i, (filters, stride) in enumerate(STAGES):
        shapes = {f"w{i}": (filters, channels, 3, 3), f"b{i}": (filters,)}
        for name, dims in shapes.items():
            weight = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT)
            weight.data_location = TensorProto.EXTERNAL
            weight.external_data.add(key="location", value="none")
            weights.append(weight)
        args = {"strides": [stride] * 2, "pads": [1] * 4, "kernel_shape": [3, 3]}
        nodes.append(helper.make_node("Conv", [value, *shapes], [f"c{i}"], f"Conv_{i}", **args))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"y{i}"], f"Relu_{i}"))
        channels, size, value = filters, size // stride, f"y{i}"
    kind = TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", kind, (batch, 64, 56, 56))
    y = helper.make_tensor_value_info(value, kind, (batch, channels, size, size))
    graph = helper.make_graph(nodes, "convolutions", [x], [y], weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def fastest(run: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    found: list[float] = []
    for _ in range(RUNS):
        began = clock()
        run()
        found.append(clock() - began)
    return min(found)


def show(name: str, predicted_s: float, measured_s: float) -> None:
    error = predicted_s / measured_s - 1
    print(f"{name:28} {measured_s * 1e3:9.2f} ms  {predicted_s * 1e3:9.2f} ms  {error:+6.0%}")


def main(target: str) -> None:
    print(f"{'model':28} {'measured':>12}  {'predicted':>12}  error")
    with torch.no_grad():
        layers = torch.nn.Sequential(*(Layer() for _ in range(12))).eval()
        for batch, seq in ((1, 16), (1, 128), (4, 64), (1, 384)):
            x = torch.randn(batch, seq, 768)
            measured_s = fastest(lambda x=x: layers(x))
            g = gpuir.analyze(ENCODER, target, dims={"batch": batch, "seq": seq}).graph
            show(f"encoder {batch} x {seq}", gpuir.analyze(g).latency_s, measured_s)
        net = convolutions().eval()
        for batch in (1, 8):
            x = torch.randn(batch, 64, 56, 56)
            measured_s = fastest(lambda x=x: net(x))
            path = as_onnx(Path("/tmp/convolutions.onnx"), batch)
            latency_s = gpuir.analyze(path, target).latency_s
            show(f"convolutions {batch}", latency_s, measured_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
