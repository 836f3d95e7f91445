"""An ONNX file run by onnxruntime on the device at hand, node by node and as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gpuir.fit.timing import HostWatch
from gpuir.interp import to_numpy_dtype
from gpuir.ir.errors import ModelError, UsageError, reason
from gpuir.ir.graph import Graph, Value
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.report.check import DeviceRun, RanStep

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
NODE = "_kernel_time"  # behind a node's name, in what onnxruntime writes of its time
ROUNDS = 20  # of the steps one by one
SCALE = 0.02  # standard deviation of weights that are made
RANDOM = "the weights are random numbers: those that {} names in other files are not there"


def onnxruntime() -> Any:
    """The library, or a UsageError that says how to have it."""
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        raise UsageError(
            "onnxruntime, which runs ONNX files, is not installed",
            fix="pip install onnxruntime (onnxruntime-gpu for a GPU), or give a PyTorch program",
        ) from error


def run_ort(path: str, graph: Graph, device: str, threads: int, budget_s: float) -> DeviceRun:
    """The file as onnxruntime runs it. `graph` has its inputs, with all sizes known."""
    ort = onnxruntime()
    model, notes = _with_weights(path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    lookups = [n.op for n in graph.walk() if isinstance(n.op, k.Gather)]
    feeds = {v.name: made(v, lookups) for v in graph.inputs}
    with TemporaryDirectory() as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "ran")
        try:
            seen = ort.InferenceSession(model, options, providers=[PROVIDERS[device]])
            for _ in range(ROUNDS):
                seen.run(None, feeds)
        except Exception as error:  # whatever the library meets in the file
            raise ModelError(
                "onnxruntime cannot run the model", where=path, found=reason(error)
            ) from error
        steps = _steps(Path(seen.end_profiling()))
    options.enable_profiling = False
    session = ort.InferenceSession(model, options, providers=[PROVIDERS[device]])
    watch = HostWatch(threads if device == "cpu" else 2)
    timing = watch(lambda: session.run(None, feeds), budget_s)
    by = f"onnxruntime {ort.__version__}"
    return DeviceRun(timing.seconds, timing.spread, timing.repeats, steps=steps, by=by, notes=notes)


def made(value: Value, lookups: Iterable[k.Gather]) -> Any:
    """Numbers for an input: normal ones; whole ones that name rows of the smallest table that they
    are looked up in; else ones, as of a mask."""
    draw, shape = np.random.default_rng(0), value.type.shape
    kind = to_numpy_dtype(value.type.dtype)
    if np.issubdtype(kind, np.floating):
        return draw.standard_normal(shape).astype(kind)
    inside = [n.op for op in lookups if value in op.operands for n in op.body.nodes]
    tables = [op.x.type.shape[op.axis] for op in inside if isinstance(op, t.Gather)]
    if not tables or kind == np.bool_:
        return np.ones(shape, kind)
    return draw.integers(0, min(tables), shape).astype(kind)


def _with_weights(path: str) -> tuple[Any, tuple[str, ...]]:
    """What a session reads: the path, or where files of weights are missing, the bytes of a model
    that has random ones."""
    onnx: Any = import_module("onnx")
    model = onnx.load(path, load_external_data=False)
    folder, draw, missing = Path(path).parent, np.random.default_rng(0), 0
    for x in model.graph.initializer:
        names = [e.value for e in x.external_data if e.key == "location"]
        if x.data_location != onnx.TensorProto.EXTERNAL or (folder / names[0]).exists():
            continue
        kind = onnx.helper.tensor_dtype_to_np_dtype(x.data_type)
        numbers = SCALE * draw.standard_normal(tuple(x.dims), np.float32)
        x.CopyFrom(onnx.numpy_helper.from_array(numbers.astype(kind), x.name))
        missing += 1
    if not missing:
        return os.fspath(path), ()
    return model.SerializeToString(), (RANDOM.format(path),)


def _steps(file: Path) -> tuple[RanStep, ...]:
    """The nodes in order, each with the lower quartile of its rounds."""
    found: dict[tuple[str, str], list[float]] = {}
    for event in json.loads(file.read_text()):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(NODE):
            key = name.removesuffix(NODE), str(event["args"].get("op_name", ""))
            found.setdefault(key, []).append(float(event["dur"]) * 1e-6)
    times = ((name, op, sorted(x)[len(x) // 4]) for (name, op), x in found.items())
    return tuple(RanStep(*x) for x in times)
