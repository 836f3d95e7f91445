"""How far the `ort` profile's launches are the nodes of onnxruntime's own optimised model.

    python -m validation.agreement.ort DIR [--filter SUBSTR] [--level all] [--cpu] [--nodes]

DIR holds an index.json of `{"file": ..., "shapes": {"x": "1x3x320x320"}}`, or else just .onnx
files. onnxruntime writes the model as it would run it. This build of it has the CPU alone: the
optimisers that its source registers for the CPU and not for CUDA are switched off (`CPU_ONLY`),
unless `--cpu` asks for what the CPU would run.

A model node belongs to the node of the optimised file that computes it, found by the names of
tensors that survive, and to the launch of gpuir's that names it. Compared are the nodes of the top
graph that are left as nodes or in launches; what is folded, and what only renames or reshapes
(`SHAPE_ONLY`), is left out. Per model:

    same    the share of its nodes whose whole group is the same on both sides
    pairs   F1 of the pairs of nodes that share a launch
    count   gpuir's launches over onnxruntime's nodes; a node of the model that several kernels
            run (an LSTM) is one launch
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.frontends.emit import UnknownValue
from gpuir.frontends.onnx.load import load
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Level
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.stacks.table import pipeline
from gpuir.targets.profile import load_profile
from validation.agreement.model_zoo import models

Shapes = Mapping[str, tuple[int, ...]]
Groups = dict[str, int]  # the launch that each model node is in

# onnxruntime/core/optimizer/graph_transformer_utils.cc (commit 001290de, GenerateTransformers)
# registers these for the CPU and not for CUDA. Of the rules of QDQSelectorActionTransformer, CUDA
# has only those of MatMulNBits.
CPU_ONLY = (
    *("ConvActivationFusion", "ConvAddActivationFusion", "GemmActivationFusion"),
    *("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion", "MatMulNBitsFusion"),
    *("NchwcTransformer", "NhwcTransformer", "TransposeOptimizer_CPUExecutionProvider"),
    *("QDQS8ToU8Transformer", "Avx2WeightS8ToU8Transformer"),
)
QDQ = "QDQSelectorActionTransformer"
MOVES = {
    *("Expand", "Flatten", "Gather", "GatherElements", "Reshape", "Slice", "Split", "Squeeze"),
    *("Tile", "Transpose", "Unsqueeze"),
}
# BiasSoftmaxFusion and SwiGluFusion fuse nodes of CUDA alone: no file of a CPU shows them.
CUDA_ONLY = ("add:keys>softmax", "silu:32bit>mul:same", "mul+sigmoid+mul:32bit>mul:same")
SHAPE_ONLY = {
    *("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout", "Shape", "Size"),
    *("Constant", "ConstantOfShape"),
}


@dataclass
class Agreement:
    """One model, both sides."""

    file: str
    ort: Groups = field(default_factory=Groups)
    ours: Groups = field(default_factory=Groups)
    kinds: dict[str, str] = field(default_factory=dict[str, str])  # operator of each node
    nodes: int = 0  # of the optimised graph, those that reshape left out
    copies: int = 0  # gpuir's launches for transposes that a model's one became
    problem: str = ""

    def groups(self, side: Groups) -> dict[str, frozenset[str]]:
        """Each compared node's fellows in its launch; none where it has no launch."""
        launches: dict[int, set[str]] = defaultdict(set)
        for name, launch in side.items():
            launches[launch].add(name)
        return {n: frozenset(launches[side[n]]) if n in side else frozenset() for n in self.kinds}

    @property
    def same(self) -> float:
        a, b = self.groups(self.ort), self.groups(self.ours)
        return sum(a[n] == b[n] for n in self.kinds) / max(len(self.kinds), 1)

    @property
    def shared(self) -> tuple[int, int]:
        """Pairs of nodes that share a launch on both sides, and those of each side added up."""
        a, b = (
            {p for g in set(self.groups(s).values()) for p in combinations(sorted(g), 2)}
            for s in (self.ort, self.ours)
        )
        return len(a & b), len(a) + len(b)

    @property
    def pairs(self) -> float:
        both, each = self.shared
        return 2 * both / each if each else 1.0

    @property
    def counts(self) -> tuple[int, int]:
        return self.nodes, len(set(self.ours.values())) + self.copies

    def differences(self) -> Counter[str]:
        """What differs, as text: onnxruntime's group of operators, then gpuir's."""
        a, b = self.groups(self.ort), self.groups(self.ours)
        order = {n: i for i, n in enumerate(self.kinds)}

        def words(group: frozenset[str]) -> str:
            return "+".join(self.kinds[n] for n in sorted(group, key=order.__getitem__)) or "-"

        return Counter(f"{words(a[n])}  |  {words(b[n])}" for n in self.kinds if a[n] != b[n])


def compare(
    file: Path, shapes: Shapes, *, level: str = "all", cpu: bool = False, profile: str = "ort"
) -> Agreement:
    """Both sides of one model file, its inputs fixed to `shapes`."""
    import onnx

    try:
        model = onnx.load(file)
    except Exception as error:
        return Agreement(file.name, problem=" ".join(str(error).split())[:80])
    return compare_model(model, shapes, file.name, level=level, cpu=cpu, profile=profile)


def compare_model(
    model: Any,
    shapes: Shapes,
    name: str,
    *,
    level: str = "all",
    cpu: bool = False,
    profile: str = "ort",
) -> Agreement:
    """Both sides of a model, which is changed: its nodes get names of their own."""
    result = Agreement(name)
    try:
        fix_shapes(model, shapes)
        for i, node in enumerate(model.graph.node):
            node.name = f"n{i}"
        optimised = optimise(model, level, cpu)
        ort, own = of_optimised(model.graph, optimised.graph)
        ours, result.copies = of_launches(model, profile)
    except GpuirError as error:
        result.problem = " ".join(str(error).split())[:100]
        return result
    except Exception as error:
        result.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        return result
    for node in model.graph.node:
        inlined = node.op_type in ("If", "Loop") and node.name not in own
        left_out = inlined or node.op_type in SHAPE_ONLY
        if not left_out and (node.name in own or node.name in ours):
            result.kinds[node.name] = node.op_type
    result.nodes = sum(n.op_type not in SHAPE_ONLY for n in optimised.graph.node)
    result.ort = {n: g for n, g in ort.items() if n in result.kinds}
    result.ours = {n: g for n, g in ours.items() if n in result.kinds}
    return result


def fix_shapes(model: Any, shapes: Shapes) -> None:
    """The inputs' symbolic dimensions as numbers: the given ones, else 1."""
    held = {i.name for i in model.graph.initializer}
    bound: dict[str, int] = {}
    for i in model.graph.input:
        for dim, n in zip(i.type.tensor_type.shape.dim, shapes.get(i.name, ()), strict=False):
            if dim.dim_param:
                bound[dim.dim_param] = n
    for i in model.graph.input:
        if i.name in held or not i.type.HasField("tensor_type"):
            continue
        dims = i.type.tensor_type.shape.dim
        given = shapes.get(i.name, (None,) * len(dims))
        for dim, n in zip(dims, given, strict=True):
            if not dim.HasField("dim_value") or dim.dim_value < 0:
                dim.dim_value = bound.get(dim.dim_param, 1) if n is None else n
    del model.graph.value_info[:]


def optimise(model: Any, level: str, cpu: bool) -> Any:
    """The model as onnxruntime optimises it at a level: `basic`, `extended` or `all`."""
    import onnx
    import onnxruntime as ort

    ort.set_default_logger_severity(4)
    levels = ort.GraphOptimizationLevel
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(levels, f"ORT_ENABLE_{level.upper()}")
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        ort.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=[] if cpu else cpu_only(model),
        )
        return onnx.load(options.optimized_model_filepath)


def cpu_only(model: Any) -> list[str]:
    """The optimisers to switch off. What QDQSelectorActionTransformer does for the CPU alone needs
    a QuantizeLinear, or an activation that is dequantised, and one of 16 bits only does where data
    is moved; where a model has none, what it does is what it does for CUDA."""
    from onnx import TensorProto

    wide = {TensorProto.INT16, TensorProto.UINT16}
    wide = {i.name for i in model.graph.initializer if i.data_type in wide}
    moves = any(n.op_type in MOVES for n in model.graph.node)
    quantised = any(
        n.op_type == "QuantizeLinear" and (moves or wide.isdisjoint(n.input))
        for n in model.graph.node
    )
    return [*CPU_ONLY, *([QDQ] if quantised else [])]


def of_optimised(graph: Any, optimised: Any) -> tuple[Groups, set[str]]:
    """The node of the optimised graph that computes each node of the model's graph, and the model
    nodes that are such a node themselves.

    A fused node has the name of one it was made of, or writes what the last of them wrote, or what
    is called after them; what it reads shows where it begins. A Gemm is called after the product,
    whose sum is its own too. What a reshape that onnxruntime added writes, the node ahead of it
    computes.
    """
    producer = {v: n for n in graph.node for v in n.output if v}
    names = {n.name for n in graph.node}
    held = {i.name for i in optimised.initializer}
    held |= {n.output[0] for n in optimised.node if n.op_type == "Constant"}
    nodes = [n for n in optimised.node if n.op_type != "Constant"]
    writer = {v: i for i, n in enumerate(nodes) for v in n.output}

    def computes(i: int) -> int:
        """The node at i, or the one whose result it reshapes."""
        while nodes[i].name not in names and nodes[i].op_type in SHAPE_ONLY:
            if nodes[i].input[0] not in writer:
                break
            i = writer[nodes[i].input[0]]
        return i

    groups: Groups = {}
    for i, n in enumerate(nodes):
        if (name := n.name.split("/")[0]) in names:
            groups[name] = i
    for i, n in enumerate(nodes):
        for v in n.output:
            if v in names or v in producer:
                groups.setdefault(v if v in names else producer[v].name, computes(i))
    products = [n for n in graph.node if n.op_type == "MatMul" and n.name in groups]
    reader = {v: n for n in graph.node for v in n.input}
    for n in products:
        if nodes[groups[n.name]].op_type == "Gemm" and n.output[0] in reader:
            groups.setdefault(reader[n.output[0]].name, groups[n.name])
    own = set(groups)
    give_twins(graph, groups)
    for i, n in enumerate(nodes):
        launch = computes(i)
        stack = [v for v in n.output if v in producer]
        seen = set(stack)
        while stack:
            for v in producer[stack.pop()].input:
                maker = producer.get(v)
                if maker is None or v in held or v in seen:
                    continue
                if groups.setdefault(maker.name, launch) == launch:
                    seen.add(v)
                    stack.append(v)
    for n in graph.node:  # what a convolution took in keeps the convolution's name alone
        maker = next((producer[v] for v in n.input if v in producer), None)
        while maker is not None and maker.op_type in ("Transpose", "Cast"):
            maker = producer.get(maker.input[0])
        taken = maker is not None and maker.op_type.startswith("Conv") and maker.name in own
        if taken and n.op_type in ("Add", "Mul", "BatchNormalization"):
            groups.setdefault(n.name, groups[maker.name])
    unpacked: set[str] = set()
    for n in graph.node:  # and a product that unpacks its weight, the product's
        maker = producer.get(n.input[1]) if len(n.input) > 1 else None
        unpacks = n.name in groups and nodes[groups[n.name]].op_type == "MatMulNBits"
        if unpacks and maker is not None and maker.op_type == "DequantizeLinear":
            groups.setdefault(maker.name, groups[n.name])
            unpacked.add(maker.name)
    gone = constant(graph) - own - unpacked
    return {name: i for name, i in groups.items() if name not in gone}, own


def give_twins(graph: Any, groups: Groups) -> None:
    """Puts nodes that were merged with others, as they compute the same, into their groups."""
    for alike in twins(graph):
        launch = next((groups[name] for name in alike if name in groups), None)
        for name in alike if launch is not None else ():
            groups.setdefault(name, launch)


def twins(graph: Any) -> list[list[str]]:
    """Nodes that compute the same from the same, in groups of two or more."""
    first: dict[tuple[object, ...], Any] = {}
    same: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    for n in graph.node:
        read = tuple(same.get(v, v) for v in n.input)
        attributes = tuple(sorted(a.SerializeToString() for a in n.attribute))
        other = first.setdefault((n.domain, n.op_type, read, attributes), n)
        if other is not n:
            found.setdefault(other.name, [other.name]).append(n.name)
            same.update(zip(n.output, other.output, strict=False))
    return list(found.values())


def constant(graph: Any) -> set[str]:
    """Nodes that compute the same whatever the input, whose shape is fixed."""
    held = {i.name for i in graph.initializer}
    found: set[str] = set()
    for n in graph.node:
        if not n.output or any(a.HasField("g") for a in n.attribute):
            continue
        if n.op_type.startswith(("Random", "Bernoulli", "Multinomial")):
            continue
        if n.op_type in ("Shape", "Size") or all(v in held or not v for v in n.input):
            held.update(n.output)
            found.add(n.name)
    return found


def of_launches(model: Any, profile: str) -> tuple[Groups, int]:
    """gpuir's launch that each model node is in, but for constants that several launches repeat;
    and how many launches there are besides for transposes that were moved, and became several on
    the way. Views are no launches. What a shape depends on of the data is taken as zero."""
    values: dict[str, Any] = {}
    while True:
        try:
            graph = load(model, values=values).graph
            break
        except UnknownValue as error:
            v = error.value
            if v.name in values:
                raise
            values[v.name] = np.zeros(v.type.shape, v.type.dtype.name.replace("bool", "bool_"))
    fused = graph
    passes = load_profile(profile).passes
    for rule in CUDA_ONLY:
        passes = passes.replace(rule, "")
    for step in pipeline(passes).passes:
        graph = step.run(graph)
        fused = graph if graph.level == Level.fused else fused
    views = {v.name for n in graph.nodes if isinstance(n.op, k.View) for v in n.results}
    groups: Groups = {}
    transposes: list[int] = []
    for i, launch in enumerate(fused.nodes):
        if launch.results and launch.results[0].name in views:
            continue
        body = launch.op.body.nodes if isinstance(launch.op, t.Fused) else (launch,)
        for loc in (loc for n in body if not isinstance(n.op, t.Generating) for loc in n.locs):
            groups[loc.rpartition(":")[2].split("/")[0]] = i
            transposes += [i] if all(isinstance(n.op, t.Transpose) for n in body) else []
    copies = len(set(transposes) - set(groups.values()))
    give_twins(model.graph, groups)
    return groups, copies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--filter", default="", help="only files whose path holds this")
    parser.add_argument("--level", default="all", choices=("basic", "extended", "all"))
    parser.add_argument("--cpu", action="store_true", help="what the CPU provider would run")
    parser.add_argument("--profile", default="ort")
    parser.add_argument("--nodes", action="store_true", help="say what differs")
    options = parser.parse_args()
    print("| model | nodes | onnxruntime | gpuir | count | same | pairs |")
    print("|---|---|---|---|---|---|---|")
    found: list[Agreement] = []
    differences: Counter[str] = Counter()
    for file, shapes in models(options.folder):
        if options.filter not in str(file):
            continue
        r = compare(file, shapes, level=options.level, cpu=options.cpu, profile=options.profile)
        if r.problem:
            print(f"| {r.file} | {r.problem} |", flush=True)
            continue
        found.append(r)
        a, b = r.counts
        print(
            f"| {r.file} | {len(r.kinds)} | {a} | {b} | {b / max(a, 1):.2f} | {r.same:.1%} |"
            f" {r.pairs:.2f} |",
            flush=True,
        )
        differences += r.differences()
    if found:
        same = sum(r.same * len(r.kinds) for r in found) / sum(len(r.kinds) for r in found)
        ratio = sum(r.counts[1] for r in found) / sum(r.counts[0] for r in found)
        both, each = (sum(r.shared[i] for r in found) for i in (0, 1))
        print(
            f"{len(found)} models: {same:.1%} of the nodes, {np.mean([r.same for r in found]):.1%} "
            f"by model; count {ratio:.3f}; pairs {2 * both / max(each, 1):.3f}, "
            f"{np.mean([r.pairs for r in found]):.3f} by model"
        )
    if options.nodes:
        for text, n in differences.most_common(60):
            print(f"{n:5}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
