"""What autograd keeps of operators that write over their operand."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from gpuir.frontends.emit import Emitter
from gpuir.frontends.torch.node import Converter, TorchNode
from gpuir.ir.graph import Value

# A copy of a tensor, for the backward pass.
LIBRARY = torch.library.Library("gpuir", "FRAGMENT")
LIBRARY.define("kept(Tensor x) -> Tensor")
torch.library.register_fake("gpuir::kept", torch.empty_like, lib=LIBRARY)

aten: Any = torch.ops.aten
# Their derivatives are of the operand, not of the result (tools/autograd/derivatives.yaml): it is
# cloned before (torch/csrc/autograd, VariableType).
OVERWRITING = frozenset(
    op.default
    for op in (
        *(aten.silu_, aten.mish_, aten.hardswish_, aten.hardsigmoid_),
        *(aten.hardtanh_, aten.relu6_),
    )
)


@contextmanager
def kept_operands(program: ExportedProgram) -> Generator[None]:
    """Has those operators of a training program work on a copy of their operand meanwhile: as many
    bytes as they take on the operand itself, of which the copy is for the backward pass."""
    graph = program.graph
    made: list[tuple[Node, Node, Node]] = []
    for node in graph.nodes:
        if node.target not in OVERWRITING:
            continue
        x: Any = node.args[0]
        if len(x.users) > 1:
            continue
        with graph.inserting_before(node):
            kept = graph.call_function(torch.ops.gpuir.kept.default, (x,))
        kept.meta = {**node.meta, "val": x.meta["val"]}
        node.replace_input_with(x, kept)
        made.append((node, kept, x))
    try:
        yield
    finally:
        for node, kept, x in made:
            node.replace_input_with(kept, x)
            graph.erase_node(kept)


def convert_kept(n: TorchNode, e: Emitter) -> Value:
    return e.map("copy", n["x"])


CONVERTERS: dict[str, Converter] = {"gpuir::kept": convert_kept}
