"""Speed and memory, each beside a peer or a baseline measured in the same run.

usage: python benchmarks/run.py [--runs N]        (pip install -e '.[bench]' first)

Prints medians and ratios; judges nothing. Models: the light networks inside the onnx package, the
encoder of examples/, and chains made here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
ROOT = Path(__file__).parent.parent


def measure(command: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident MB of one process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return seconds, usage.ru_maxrss / 1024


def paired(ours: list[str], theirs: list[str], runs: int) -> tuple[list[float], list[float]]:
    """Median (seconds, MB) of each command, run in turn after one warm-up of each."""
    rows = [(measure(ours), measure(theirs)) for _ in range(runs + 1)][1:]
    return tuple([statistics.median(r[i][j] for r in rows) for j in (0, 1)] for i in (0, 1))


def nodes(path: Path) -> int:
    return len(onnx.load(path, load_external_data=False).graph.node)


def cold_start(runs: int) -> Table:
    table = Table(
        "model", "nodes", "gpuir s", "onnx-tool s", "ratio", "gpuir MB", "onnx-tool MB", "ratio"
    )
    for name in ("light_resnet50", "light_shufflenet", "light_inception_v2", "light_densenet121"):
        path = LIGHT / f"{name}.onnx"
        ours = [sys.executable, "-m", "gpuir", "analyze", str(path), "--target", "a100"]
        theirs = [sys.executable, "-m", "onnx_tool", "-i", str(path)]
        (s, mb), (peer_s, peer_mb) = paired(ours, theirs, runs)
        table.add_row(
            *(name, str(nodes(path)), f"{s:.2f}", f"{peer_s:.2f}", f"{s / peer_s:.2f}"),
            *(f"{mb:.0f}", f"{peer_mb:.0f}", f"{mb / peer_mb:.2f}"),
        )
    return table


def imports(runs: int) -> Table:
    table = Table("import gpuir s", "import numpy s", "difference s", "ratio")
    ours = [sys.executable, "-c", "import gpuir, numpy; gpuir.parse, gpuir.show, gpuir.Graph"]
    (s, _), (base, _) = paired(ours, [sys.executable, "-c", "import numpy"], runs)
    table.add_row(f"{s:.3f}", f"{base:.3f}", f"{s - base:.3f}", f"{s / base:.2f}")
    return table


def chain(path: Path, blocks: int) -> None:
    """Writes a model of `blocks` times matmul, add, relu, layer norm in primitives: ten nodes."""
    from onnx import TensorProto, helper

    width, made, x = 64, [], "x"
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, (width, width), [0.01] * width**2),
        helper.make_tensor("b", TensorProto.FLOAT, (width,), [0.0] * width),
        *(
            helper.make_tensor(n, TensorProto.FLOAT, (), [v])
            for n, v in (("two", 2), ("eps", 1e-5))
        ),
    ]
    for i in range(blocks):

        def op(kind: str, *args: str, i: int = i, **attributes: object) -> str:
            made.append(helper.make_node(kind, args, [f"/{i}/{len(made)}"], **attributes))
            return made[-1].output[0]

        y = op("Relu", op("Add", op("MatMul", x, "w"), "b"))
        off = op("Sub", y, op("ReduceMean", y, axes=[-1]))
        var = op("ReduceMean", op("Pow", off, "two"), axes=[-1])
        x = op("Div", off, op("Sqrt", op("Add", var, "eps")))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        *(made, "chain", [value("x", TensorProto.FLOAT, [32, width])]),
        *([value(x, TensorProto.FLOAT, [32, width])], weights),
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


def scale() -> Table:
    """10,000 nodes in one process; the baseline is `onnx.load` and shape inference of the file."""
    import gpuir
    from gpuir.passes.table import pipeline

    table = Table("10,000 nodes", "seconds", "ratio to onnx load + shape inference")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain.onnx"
        chain(path, 1000)
        start = time.perf_counter()
        onnx.shape_inference.infer_shapes(onnx.load(path))
        baseline = time.perf_counter() - start

        def row(name: str, seconds: float) -> None:
            table.add_row(name, f"{seconds:.2f}", f"{seconds / baseline:.2f}")

        start = time.perf_counter()
        graph = gpuir.load(path)
        loaded = time.perf_counter() - start
        row("load", loaded)
        seen = [time.perf_counter()]

        def watch(p: object, _: object) -> None:
            seen.append(time.perf_counter())
            row(str(p), seen[-1] - seen[-2])

        text = "canonicalize,recognize,fuse,legalize,tile{target=a100},annotate"
        pipeline(text).run(graph, watch=watch)
        row("whole pipeline, load included", loaded + seen[-1] - seen[0])
        gpuir.parse("graph @warm { out }")  # the grammar is compiled once
        start = time.perf_counter()
        text = gpuir.show(graph)
        shown = time.perf_counter()
        gpuir.parse(text)
        row("print", shown - start)
        row("parse", time.perf_counter() - shown)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    console = Console(width=120)
    for table in (cold_start(runs), imports(runs), scale()):
        console.print(table)


if __name__ == "__main__":
    main()
