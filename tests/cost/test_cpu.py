"""Kernels on a CPU: the slower of arithmetic and bytes, by the level that holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gpuir
from gpuir.cost import work
from gpuir.cost.cpu import FACTORS
from gpuir.cost.tile import predict
from gpuir.ir.types import f32
from gpuir.targets.load import load_target
from gpuir.targets.target import Flops, Table

CPU = load_target("cpu")
ENCODER = Path(__file__).parents[2] / "examples" / "encoder.onnx"
SHARE = {f.name: f.value for f in FACTORS}
WORKS = {
    "product": work.gemm(512.0, 512.0, 512.0, f32),
    "vector": work.gemm(1.0, 1024.0, 1024.0, f32),
    "convolution": work.conv(1.0, 64.0, (56.0, 56.0), 64.0, (3.0, 3.0), f32, padding=1.0),
    "attention": work.attention(1.0, 12.0, 128.0, 128.0, 64.0, f32),
    "softmax": work.rows(4096.0, 1024.0, f32, "softmax"),
    "add": work.pointwise(1e6, (f32, f32), (f32,)),
    "transpose": work.pointwise(1e6, (f32,), (f32,), kind="transpose"),
    "gather": work.gather(8192.0, 64.0, f32, 1e6),
}


def seconds(w: work.Work, target=CPU) -> float:
    return float(predict(w, target, model={}).time_s[0])


def test_a_large_product_is_its_flops_over_the_share_of_the_peak():
    n = 8192.0
    arithmetic = 2 * n**3 / (CPU.flops_per_s.vector["f32"] * SHARE["product share"])
    assert seconds(work.gemm(n, n, n, f32)) == pytest.approx(arithmetic, rel=0.05)


def test_a_large_copy_is_three_times_its_tensor_over_the_memory():
    """Read, written, and the lines written to read first."""
    cells = 2.0**28
    moved = 3 * 4 * cells / (CPU.dram_bytes_per_s * SHARE["dram share"])
    assert seconds(work.pointwise(cells, (f32,), (f32,), kind="copy")) == pytest.approx(moved, 1e-2)


def test_nearer_memory_is_faster():
    copies = [work.pointwise(n, (f32,), (f32,), kind="copy") for n in (1e5, 1e6, 1e7)]
    rates = [w.nbytes / (seconds(w) - CPU.launch_s - 3e-6) for w in copies]
    assert rates[0] > 1.5 * rates[1] > 2 * rates[2]


@pytest.mark.parametrize("name", WORKS)
def test_a_cpu_with_every_rate_raised_is_never_slower(name: str):
    faster = replace(
        CPU,
        clock_hz=CPU.clock_hz * 1.5,
        flops_per_s=Flops(Table({d: r * 1.5 for d, r in CPU.flops_per_s.vector.items()})),
        dram=replace(CPU.dram, bytes_per_s=CPU.dram_bytes_per_s * 1.5),
        l2=replace(CPU.l2, bytes_per_s=CPU.l2_bytes_per_s * 1.5),
    )
    assert 0.6 < seconds(WORKS[name], faster) / seconds(WORKS[name]) <= 1


@pytest.mark.parametrize("name", WORKS)
def test_many_at_once_are_as_each_alone(name: str):
    many = WORKS[name].each(lambda n: np.array([n, 2.0 * n, n]))
    times = predict(many, CPU, model={}).time_s
    assert times[0] == times[2] == pytest.approx(seconds(WORKS[name]))


def test_a_model_on_a_cpu():
    g = gpuir.analyze(ENCODER, "cpu", dims={"batch": 1, "seq": 128})
    assert 0.01 < gpuir.summary(g).latency_s < 0.2
    many = gpuir.analyze(ENCODER, "cpu+sms=32", dims={"batch": 1, "seq": 128})
    assert gpuir.summary(many).latency_s < gpuir.summary(g).latency_s
