"""Speed and memory, each beside a peer or a baseline measured in the same run.

usage: python benchmarks/run.py [--runs N]        (pip install -e '.[bench]' first)

Prints medians and ratios; judges nothing. Processes run in turn, from compiled bytecode, as an
installed package does; CPU seconds are user and system time, which a busy machine disturbs less.
Models: the light networks inside the onnx package, and others made here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
from decoder import decoder
from matmul_heuristics import GPUS, PEER, PRECISIONS
from rich.console import Console
from rich.table import Table

from gpuir.ir.graph import Graph
from gpuir.run.analysis import lower
from gpuir.run.loading import load_text

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT["GPUIR_NO_CACHE"] = "1"  # a second run is to do what the first did

Measured = tuple[float, float, float]  # wall seconds, CPU seconds, peak resident MB


def measure(command: list[str]) -> Measured:
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def medians(*commands: list[str], runs: int) -> list[Measured]:
    """Of each command, run in turn after one warm-up of each."""
    rounds = [[measure(command) for command in commands] for _ in range(runs + 1)][1:]
    return [tuple(map(statistics.median, zip(*rows))) for rows in zip(*rounds)]


def nodes(path: Path) -> int:
    return len(onnx.load(path, load_external_data=False).graph.node)


def analyze(path: Path) -> list[str]:
    return [sys.executable, "-m", "gpuir", "analyze", str(path), "--target", "a100"]


def cold_start(runs: int) -> Table:
    columns = [
        f"{what} {column}"
        for what in ("wall s", "CPU s", "MB")
        for column in ("gpuir", "onnx-tool", "ratio")
    ]
    table = Table("model", "nodes", *columns)
    for name in ("light_resnet50", "light_shufflenet", "light_inception_v2", "light_densenet121"):
        path = LIGHT / f"{name}.onnx"
        peer = [sys.executable, "-m", "onnx_tool", "-i", str(path)]
        pairs = zip(*medians(analyze(path), peer, runs=runs), (".2f", ".2f", ".0f"))
        cells = (f"{a:{form}} {b:{form}} {a / b:.2f}".split() for a, b, form in pairs)
        table.add_row(name[6:], str(nodes(path)), *(cell for row in cells for cell in row))
    return table


def kept(runs: int) -> Table:
    """The same with what commands keep, and a second command, which starts from that."""
    table = Table("model", "", "wall s", "ratio", "CPU s", "ratio")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "decoder.onnx"
        decoder(made)
        light = (LIGHT / f"light_{name}.onnx" for name in ("resnet50", "densenet121"))
        for path in (*light, made):
            home = Path(folder) / path.stem
            own = {"GPUIR_NO_CACHE": "", "XDG_CACHE_HOME": str(home)}
            analyze_kept = ["env", *(f"{name}={x}" for name, x in own.items()), *analyze(path)]
            first = ["sh", "-c", f'rm -rf {home}; exec "$@"', "sh", *analyze_kept]
            peer = [sys.executable, "-m", "onnx_tool", "-i", str(path)]
            rows = medians(peer, first, analyze_kept, runs=runs)
            for what, (s, cpu, _) in zip(("onnx-tool", "gpuir", "gpuir again"), rows):
                ratios = f"{s / rows[0][0]:.2f}", f"{cpu / rows[0][1]:.2f}"
                name = path.stem.removeprefix("light_")
                table.add_row(name, what, f"{s:.2f}", ratios[0], f"{cpu:.2f}", ratios[1])
    return table


def imports(runs: int) -> Table:
    table = Table("import", "wall s", "CPU s", "wall s over numpy")
    commands = {
        "numpy": "import numpy",
        "gpuir": "import gpuir",
        "gpuir, parser and printer": "import gpuir; gpuir.parse, gpuir.show, gpuir.Graph",
        "gpuir, analyze": "import numpy, gpuir; gpuir.analyze",
    }
    rows = medians(*([sys.executable, "-c", text] for text in commands.values()), runs=runs)
    for name, (s, cpu, _) in zip(commands, rows):
        table.add_row(name, f"{s:.3f}", f"{cpu:.3f}", f"{s - rows[0][0]:+.3f}")
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


def huge(path: Path) -> None:
    """Writes 64 products of 2.7 GB in all, the weights inside the file and holes on the disk."""
    from onnx import TensorProto, helper

    width, each = 4608, 4608 * 4608 * 2
    made = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(64)]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, [16, width])
        for name in ("x0", "x64")
    ]
    head = helper.make_model(
        helper.make_graph(made, "huge", ends[:1], ends[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    graph = head.graph.SerializeToString()
    head.ClearField("graph")
    weights: list[bytes] = []
    for i in range(64):  # ends in a field of 84,934,656 bytes, which are not there
        tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT16, dims=[width, width])
        begun = tensor.SerializeToString() + b"\x4a" + varint(each)
        weights.append(b"\x2a" + varint(len(begun) + each) + begun)
    size = len(graph) + sum(map(len, weights)) + 64 * each
    with path.open("wb") as file:
        file.write(head.SerializeToString() + b"\x3a" + varint(size) + graph)
        for weight in weights:
            file.write(weight)
            file.seek(each, os.SEEK_CUR)
        file.truncate()


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes((low | 128,)) + varint(rest) if rest else bytes((low,))


def memory(runs: int) -> Table:
    table = Table("weights in the file, GB", "wall s", "CPU s", "peak MB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "huge.onnx"
        huge(path)
        ((s, cpu, mb),) = medians(analyze(path), runs=runs)
        size = f"{path.stat().st_size / 1e9:.1f}"
    table.add_row(size, f"{s:.2f}", f"{cpu:.2f}", f"{mb:.0f}")
    return table


def scale() -> Table:
    """10,000 nodes in one process; the baseline is `onnx.load` and shape inference of the file."""
    import gpuir
    from gpuir.stacks.table import pipeline

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


def predictions() -> Table:
    """The cost model alone: a table of products at once, and distinct kernels through the passes.
    CPU seconds are of all threads."""
    import numpy as np

    from gpuir.cost import sized
    from gpuir.cost.tile import predict
    from gpuir.ir.types import f16, f32
    from gpuir.stacks.table import pipeline
    from gpuir.targets.load import load_target

    table = Table("cost model", "number", "a wall second", "a CPU second")

    def row(name: str, count: int, run: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        table.add_row(name, f"{count:,}", f"{count / wall:,.0f}", f"{count / cpu:,.0f}")

    count, rng, target = 1_000_000, np.random.default_rng(0), load_target("a100")
    m, n, k = (rng.integers(1, 8192, count).astype(float) for _ in range(3))
    for dtype in (f32, f16):
        predict(sized.gemm(m[:1000], n[:1000], k[:1000], dtype), target)  # what is found once
        products = partial(predict, sized.gemm(m, n, k, dtype), target)
        row(f"{dtype.name} products", count, products)
    tiles, annotate = pipeline("tile{target=a100}"), pipeline("annotate")
    annotate.run(tiles.run(kernels(50)))
    graph = kernels(2000)
    count = len(graph.nodes)
    row("kernels tiled", count, lambda: tiles.run(graph))
    tiled = tiles.run(graph)
    row("kernels annotated", count, lambda: annotate.run(tiled))
    again = kernels(2000)
    row("kernels tiled and annotated", count, lambda: annotate.run(tiles.run(again)))
    return table


def best_tiles(count: int = 1000) -> Table:
    """The eight tiles to try first of products that were not asked for before, in a process that
    has run for as long: CPU seconds of all threads. The peer is nvidia-matmul-heuristics, where it
    is installed, by its performance model; ratios are to it, or to gpuir one by one."""
    import numpy as np

    import gpuir

    rng = np.random.default_rng(0)
    shapes = np.exp2(rng.uniform(4, 13, (4 * count, 3))).astype(int).tolist()
    warm, alone, together, known = (shapes[i * count : (i + 1) * count] for i in range(4))

    def products(shapes: list[list[int]]) -> list[gpuir.Kernel]:
        named = (dict(zip("mnk", shape)) for shape in shapes)
        return [gpuir.kernel("gemm", dtype="bf16", **sizes) for sizes in named]

    def one_by_one(kernels: list[gpuir.Kernel]) -> None:
        for kernel in kernels:
            gpuir.heuristics(kernel, "h100-sxm")

    def many(kernels: list[gpuir.Kernel]) -> None:
        gpuir.heuristics(kernels, "h100-sxm")

    one_by_one(products(warm))
    seconds = {
        "one by one": cpu_s(partial(one_by_one, products(alone))),
        f"{count:,} at once": cpu_s(partial(many, products(together))),
    }
    base = seconds["one by one"]
    if find_spec(PEER):
        ask = peer("h100-sxm-80gb")
        for shape in warm:
            ask(*shape)
        base = seconds["peer, one by one"] = cpu_s(lambda: [ask(*shape) for shape in known])
    table = Table("eight tiles of a product", "shapes", "CPU ms a shape", "ratio")
    for name, s in seconds.items():
        table.add_row(name, f"{count:,}", f"{s / count * 1e3:.2f}", f"{s / base:.2f}")
    return table


def many_sizes(most: int = 64) -> Table:
    """An encoder of twelve layers at all batches up to 64: analyzed one by one, and as a program.
    The last row is the program's second target."""
    import numpy as np

    import gpuir

    model, seq = str(Path(__file__).parents[1] / "examples/encoder.onnx"), {"seq": 128}
    gpuir.analyze(model, "l4", dims={**seq, "batch": 1})  # imports
    program, batches = gpuir.program(model, dims=seq), {"batch": np.arange(1, most + 1)}

    def one_by_one() -> None:
        for batch in range(1, most + 1):
            gpuir.analyze(model, "a100", dims={**seq, "batch": batch})

    seconds = {
        "one by one": cpu_s(one_by_one),
        "program": cpu_s(lambda: program.times(batches, "a100")),
        "program, known": cpu_s(lambda: program.times(batches, "h100-sxm")),
    }
    table = Table("an encoder", "sizes", "CPU ms a size", "ratio")
    for name, s in seconds.items():
        cells = f"{s / most * 1e3:.2f}", f"{s / seconds['one by one']:.3f}"
        table.add_row(name, f"{most:,}", *cells)
    return table


def cpu_s(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def peer(device: str) -> Callable[[int, int, int], object]:
    """The peer's answer for m, n and k in bf16 on one of our devices."""
    package: Any = import_module(PEER)
    interface = package.NvMatmulHeuristicsInterfaceEx(
        backend=package.NvMatmulHeuristicsTarget.GENERIC,
        flags=package.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=package.NvMatmulHeuristicsNvidiaGpu[GPUS[device]],
    )
    layout = package.NvMatmulHeuristicsMatmulLayout.NN_ROW_MAJOR

    def ask(m: int, n: int, k: int) -> object:
        problem = interface.makeNvMatmulHeuristicsProblem(m, n, k, layout, 1)
        return interface.get(problem, 8, PRECISIONS["bf16"])

    return ask


def kernels(rounds: int) -> Graph:
    """Three kernels a round, no two alike: a product, its softmax, a product in f32."""
    inputs = [
        f"  in %x{i}: f16[{64 + i}, 256]\n  in %z{i}: f32[{i + 1}, 96]" for i in range(rounds)
    ]
    nodes = [
        f'  %y{i}: f16[{64 + i}, 512] = t.matmul(%x{i}, %w) at "m:{i}"\n'
        f'  %s{i}: f16[{64 + i}, 512] = t.softmax(%y{i}, 1) at "m:s{i}"\n'
        f'  %o{i}: f32[{i + 1}, 64] = t.matmul(%z{i}, %v) at "m:o{i}"'
        for i in range(rounds)
    ]
    out = ", ".join(f"%s{i}, %o{i}" for i in range(rounds))
    params = ["  param %w: f16[256, 512]", "  param %v: f32[96, 64]"]
    text = "\n".join(("graph @kernels {", *inputs, *params, *nodes, f"  out {out}", "}"))
    return lower(load_text(text), profile="ideal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as folder:
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = folder
        measured = cold_start(runs), kept(runs), imports(runs), memory(runs)
        for table in (*measured, scale(), predictions(), best_tiles(), many_sizes()):
            console.print(table)


if __name__ == "__main__":
    main()
