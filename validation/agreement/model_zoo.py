"""Real models through gpuir: loaded, every shape static, and the numbers onnxruntime gives.

    python -m validation.agreement.model_zoo DIR [--filter SUBSTR] [--timeout SECONDS] [--rtol R]

DIR holds an index.json of `{"file": ..., "shapes": {"x": "1x3x320x320"}}`, or else just .onnx
files. Inputs are random (integers in a small range), the same for both. Exit code 1 if a model is
not read, has a shape that is not static, or differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.interp import run
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Graph
from gpuir.ir.verify import verify

PASSES = "canonicalize,recognize,fuse,legalize"


@dataclass
class Result:
    """One model: what came of it, and how long each step took."""

    file: str
    status: str = "crashed"
    detail: str = ""
    nodes: int = 0
    load_s: float = 0.0
    interp_s: float = 0.0
    passes_s: float = 0.0
    error: float = 0.0  # largest difference, in units of the tolerance

    @property
    def is_right(self) -> bool:
        return self.status in ("same", "static")


def models(folder: Path) -> list[tuple[Path, dict[str, tuple[int, ...]]]]:
    """Files with the input shapes to load them with."""
    index = folder / "index.json"
    if not index.exists():
        return [(file, {}) for file in sorted(folder.rglob("*.onnx"))]
    found = []
    for row in json.loads(index.read_text()):
        places = (Path(row["file"]), folder / row["file"], folder.parent / row["file"])
        file = next((p for p in places if p.exists()), places[-1])
        shapes = {
            name: () if text == "scalar" else tuple(map(int, text.split("x")))
            for name, text in row.get("shapes", {}).items()
        }
        found.append((file, shapes))
    return found


def random_inputs(
    session: Any, shapes: dict[str, tuple[int, ...]], integers: int | None = None
) -> dict[str, np.ndarray]:
    """Normal floats; integers 0 to 3, which index what a model is likely to have, or all alike."""
    rng = np.random.default_rng(0)
    kinds = {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"}
    inputs, dims = {}, {}
    for i in session.get_inputs():  # what a symbolic dimension is where it is given
        dims.update(zip(i.shape, shapes.get(i.name, ()), strict=False))
    for i in session.get_inputs():
        dtype = np.dtype(kinds.get(name := i.type[7:-1], name))
        free = tuple(n if isinstance(n, int) else dims.get(n, 1) for n in i.shape)
        shape = shapes.get(i.name, free)
        if dtype.kind == "f":
            inputs[i.name] = rng.standard_normal(shape).astype(dtype)
        elif integers is not None:
            inputs[i.name] = np.full(shape, integers, dtype)
        else:
            inputs[i.name] = rng.integers(0, 2 if dtype.kind == "b" else 4, shape).astype(dtype)
    return inputs


def distance(found: np.ndarray, expected: np.ndarray, rtol: float) -> float:
    """The largest difference over `rtol` times the largest magnitude there is; 1 is the limit.

    Measured against the whole tensor: cells near zero are sums of larger ones, and round as those.
    The magnitude is at least 1e-3: onnxruntime's sigmoid is off by some 1e-7 near zero.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.size:
        return 0.0
    if found.dtype.kind != "f":
        return 0.0 if (found == expected).all() else float("inf")
    a, b = found.astype(np.float64), expected.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    gap = np.where(same, 0, np.abs(a - b))
    finite = np.abs(b[np.isfinite(b)])
    scale = max(float(finite.max(initial=0)), 1e-3)
    return float(np.nan_to_num(gap, nan=np.inf).max() / (rtol * scale))


def check(file: Path, shapes: dict[str, tuple[int, ...]], rtol: float, passes: bool) -> Result:
    from gpuir.frontends.emit import UnknownValue
    from gpuir.frontends.onnx.load import load

    result = Result(file.name)
    inputs: dict[str, np.ndarray] = {}
    try:
        import onnxruntime

        onnxruntime.set_default_logger_severity(4)
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.x64quantprecision", "1")  # int8 never saturates
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        names = [o.name for o in session.get_outputs()]
        for integers in (None, 0, 16000):  # an index into nothing, a sample rate
            inputs = random_inputs(session, shapes, integers)
            try:
                expected = session.run(names, inputs)
                break
            except Exception:
                if integers == 16000:
                    raise
    except Exception as error:
        result.status, result.detail = "onnxruntime fails", " ".join(str(error).split())[:120]
        expected = None

    values: dict[str, np.ndarray] = {}
    start = time.perf_counter()
    while True:
        try:
            sizes = {n: a.shape for n, a in inputs.items()} if inputs else shapes
            model = load(
                file, inputs={n: s for n, s in sizes.items() if n not in values}, values=values
            )
            break
        except UnknownValue as error:
            name = error.value.name
            if name not in inputs or name in values:
                raise
            values[name] = inputs[name]
            result.detail = "value given: " + ", ".join(values)
    verify(model.graph, "onnx")
    result.load_s = time.perf_counter() - start
    result.nodes = sum(1 for _ in model.graph.walk())
    if expected is None:
        return result
    result.status = "static"
    if model.graph.assumed:
        result.detail = "; ".join(filter(None, (result.detail, *model.graph.assumed)))

    def same(graph: Graph) -> bool:
        weights = {v.name: model.weights[v.name] for v in graph.params}
        given = {v.name: inputs[v.name] for v in graph.inputs}
        found = run(graph, {**given, **weights})
        worst = 0.0
        for name, v, b in zip(names, graph.outputs, expected, strict=True):
            a = found[v.name]
            far = distance(a, b, rtol)
            worst = max(worst, far)
            if far > 1:
                result.status = "differs"
                result.detail = f"{name}: {a.dtype}{list(a.shape)}, {b.dtype}{list(b.shape)}"
        result.error = max(result.error, worst)
        return worst <= 1

    start = time.perf_counter()
    if same(model.graph):
        result.status = "same"
    result.interp_s = time.perf_counter() - start
    if passes and result.status == "same":
        from gpuir.stacks.table import pipeline

        start = time.perf_counter()
        graph = model.graph
        for step in pipeline(PASSES).passes:
            graph = step.run(graph)
            verify(graph, step.name)
        result.passes_s = time.perf_counter() - start
        if not same(graph):
            result.status, result.detail = "differs", "after legalize: " + result.detail
    return result


def _child(pipe: Connection, *args: Any) -> None:
    try:
        pipe.send(check(*args))
    except GpuirError as error:
        pipe.send(Result(args[0].name, "refused", " ".join(str(error).split())[:200]))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        pipe.send(Result(args[0].name, "crashed", " ".join(text.split())[:200]))


def check_apart(timeout_s: float, *args: Any) -> Result:
    """`check` in a process of its own, ended after `timeout_s`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        result = (
            ours.recv() if ours.poll(timeout_s) else Result(args[0].name, f"over {timeout_s:g} s")
        )
    except EOFError:
        result = Result(args[0].name, "crashed", "the process ended")
    process.kill()
    process.join()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--filter", default="", help="only files whose path holds this")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one model")
    parser.add_argument("--rtol", type=float, default=1e-3, help="of the largest magnitude")
    parser.add_argument("--passes", action="store_true", help="compare after legalize too")
    options = parser.parse_args()
    print(f"{'model':44} {'status':10} {'nodes':>6} {'load':>7} {'interp':>7} {'error':>8}")
    results = []
    for file, shapes in models(options.folder):
        if options.filter in str(file):
            r = check_apart(options.timeout, file, shapes, options.rtol, options.passes)
            results.append(r)
            times = f"{r.load_s:6.2f}s {r.interp_s:6.2f}s {r.error * options.rtol:8.1e}"
            print(f"{r.file:44} {r.status:10} {r.nodes:6} {times}  {r.detail}", flush=True)
    right = sum(r.is_right for r in results)
    print(f"{right} of {len(results)} models give onnxruntime's numbers")
    return int(right < len(results))


if __name__ == "__main__":
    sys.exit(main())
