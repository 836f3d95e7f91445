"""A design space swept, against `gpuir.analyze` once for each of its points.

usage: python benchmarks/design_space.py [BATCHES] [GPUS] [--engine ray] [--workers N]

Five public architectures (three convolutional networks whose graphs the package `onnx` ships, and
encoders as large as BERT-base and BERT-large, by examples/make_encoder.py) at BATCHES batches, 20
by default, on GPUS GPUs, 1,000 by default: A100s with other numbers of SMs and other bandwidths.
Both ways are timed in this run: the sweep whole, from reading the file to the last part of the
result, and `analyze` on some of its points, drawn at random, all of whose numbers must be the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import tempfile
import time
from math import isclose
from pathlib import Path

import onnx
import pyarrow.parquet as pq
from onnx import numpy_helper

import gpuir
from gpuir.plan.space.engines import find_engine
from gpuir.plan.space.space import read_space
from gpuir.run.spaces import SpaceSweep

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
ALONE = 40  # points that are analysed one by one
SAME = ("latency_s", "low_s", "high_s", "device_s", "peak_bytes", "reserved_bytes")


def convolutional(name: str, folder: Path) -> None:
    """A model of the package `onnx`, its batch made symbolic."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    images = (i.type.tensor_type.shape.dim for i in model.graph.input)
    for dims in [d for d in images if len(d) == 4 and d[1].dim_value == 3]:
        dims[0].dim_param = "batch"
    for output in model.graph.output:
        output.type.tensor_type.shape.dim[0].dim_param = "batch"
    shapes = {n.input[1] for n in model.graph.node if n.op_type == "Reshape"}
    for weight in model.graph.initializer:
        if weight.name in shapes:  # 0: as many as the operand has
            kept = numpy_helper.to_array(weight).copy()
            kept[0] = 0
            weight.CopyFrom(numpy_helper.from_array(kept, weight.name))
    del model.graph.value_info[:]
    onnx.save(model, folder / f"{name}.onnx")


def encoder(name: str, folder: Path, layers: int, width: int, heads: int) -> None:
    path = Path(__file__).parents[1] / "examples" / "make_encoder.py"
    spec = importlib.util.spec_from_file_location("make_encoder", path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.LAYERS, made.WIDTH, made.HEADS, made.INNER = layers, width, heads, 4 * width
    onnx.save(made.Encoder().model(), folder / f"{name}.onnx")


def written(folder: Path, batches: int, gpus: int) -> Path:
    """The space as a file, its models beside it."""
    for name in ("squeezenet", "resnet50", "densenet121"):
        convolutional(name, folder)
    encoder("bert_base", folder, 12, 768, 12)
    encoder("bert_large", folder, 24, 1024, 16)
    rates = max(1, gpus // 40)
    sms = [60 + 2 * i for i in range(gpus // rates)]
    text = f"""
models = [
  "squeezenet.onnx", "resnet50.onnx", "densenet121.onnx",
  {{ path = "bert_base.onnx", dims = {{ seq = 128 }} }},
  {{ path = "bert_large.onnx", dims = {{ seq = 128 }} }},
]

[dims]
batch = {list(range(1, batches + 1))}

[hardware]
base = "a100"

[hardware.set]
sms = {sms}
dram.bytes_per_s = {[round(1e12 + 1e11 * i) for i in range(rates)]}
"""
    path = folder / "space.toml"
    path.write_text(text)
    return path


def alone(row: dict[str, object]) -> dict[str, object]:
    """What `analyze` says of a point."""
    dims = {k.removeprefix("dim."): v for k, v in row.items() if k.startswith("dim.") and v}
    found = gpuir.analyze(row["model"], row["target"], dims=dims)
    low_s, high_s = found.interval or (None, None)
    held = found.memory
    values = found.latency_s, low_s, high_s, found.device_s, held.peak_bytes, held.reserved_bytes
    return dict(zip(SAME, values, strict=True))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("batches", type=int, nargs="?", default=20)
    options.add_argument("gpus", type=int, nargs="?", default=1000)
    options.add_argument("--engine", default="local")
    options.add_argument("--workers", type=int)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = written(folder, given.batches, given.gpus)
        begun = time.perf_counter()
        space = read_space(str(path))
        sweep = SpaceSweep(space, str(folder / "out"))
        with sweep, find_engine(given.engine, given.workers) as engine:
            ready = time.perf_counter()
            done = sweep.run(engine)
        swept, cpu = time.perf_counter() - begun, sum(os.times()[:4])
        rate = done.points / swept
        print(f"{done.points:,} points, {space.jobs} jobs on {space.devices:,} GPUs")
        print(f"engine {given.engine}, {engine.workers} workers, up in {ready - begun:.1f} s")
        print(f"swept in {swept:.1f} s: {rate:,.0f} points a second, {1e6 / rate:.0f} us a point")
        if given.engine == "local":  # Ray's workers are no children of this process
            print(f"CPU, of all processes from their start: {cpu:.1f} s")
        table = pq.read_table(folder / "out")
        drawn = random.Random(0).sample(range(len(table)), min(ALONE, len(table)))
        rows = [table.slice(i, 1).to_pylist()[0] for i in drawn]
        begun = time.perf_counter()
        found = [alone(row) for row in rows]
        each = (time.perf_counter() - begun) / len(rows)
        for row, one in zip(rows, found, strict=True):
            assert all(isclose(row[name], one[name], rel_tol=1e-12) for name in SAME), (row, one)
        print(f"analyze, a point: {each * 1e3:.0f} ms; all {len(rows)} points drawn are equal")
        print(f"ratio: {each * rate:.0f} times as fast")


if __name__ == "__main__":
    sys.exit(main())
