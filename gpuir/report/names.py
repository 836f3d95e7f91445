"""What the location of a model node says: its name, and the module that it is in."""

from __future__ import annotations

from gpuir.ir.graph import Loc
from gpuir.ir.phases import PHASES

Path = tuple[str, ...]
DEEPEST = 64  # modules inside one another that are told apart: each is listed with all above it


def node_name(loc: Loc) -> str:
    """The model node's own name, without the file it is in."""
    return loc.partition(":")[2] or loc


def module_of(loc: Loc) -> Path:
    """`bert.pt2:encoder.layer.0/linear/backward`, or `bert.onnx:/encoder/layer.0/MatMul` →
    encoder, layer, 0; of a path that is too deep the outermost ones."""
    parts = [part for part in node_name(loc).split("/") if part]
    if parts and parts[-1] in PHASES:
        parts.pop()
    return tuple(word for part in parts[:-1] for word in part.split(".") if word)[:DEEPEST]
