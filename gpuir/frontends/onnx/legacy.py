"""Nodes of opsets before 7, read by the rules of opset 7 where those say the same thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuir.frontends.onnx.node import OnnxNode
from gpuir.ir.errors import ModelError
from gpuir.ops import tensor as t

MODERN = 7  # the first opset whose operators broadcast as numpy does
IGNORED = {"consumed_inputs", "is_test", "broadcast", "axis"}  # "axis" beside "broadcast" only


def modernise(n: OnnxNode) -> OnnxNode:
    """The node as opset 7 would have it. `ModelError` where opset 7 has no such attributes or
    operands: the operator has changed since."""
    from onnx import defs

    if n.op == "PRelu" and n[1].type.rank == 1 < n[0].type.rank:  # one slope for each channel
        n = _aligned(n, 1)
    elif n.attr("broadcast") and n.attr("axis") is not None and n.op != "Gemm":
        n = _aligned(n, n.from_front(int(n.attr("axis")), n[0].type.rank))
    try:
        then, now = (defs.get_schema(n.op, v) for v in (n.version, MODERN))
    except defs.SchemaError:
        raise _changed(n, "an operator that opset 7 no longer has") from None
    if then.since_version != now.since_version:
        _check(n, now)
    return replace(n, version=MODERN)


def _check(n: OnnxNode, schema: Any) -> None:
    ignored = IGNORED if "broadcast" in n.attrs else IGNORED - {"axis"}
    for name in n.attrs:
        if name not in schema.attributes and name not in ignored:
            raise _changed(n, f"the attribute {name!r}")
        if name in schema.attributes:
            proto = n.attrs.proto(name)  # type: ignore[attr-defined]
            if proto is not None and proto.type != int(schema.attributes[name].type):
                raise _changed(n, f"the attribute {name!r} with another type")
    for name, attribute in schema.attributes.items():
        if attribute.required and name not in n.attrs:
            raise _changed(n, f"no attribute {name!r}")
    if not schema.min_input <= len(n.inputs) <= schema.max_input:
        raise _changed(n, f"{len(n.inputs)} operands")


def _aligned(n: OnnxNode, axis: int) -> OnnxNode:
    """The second operand's axes are the first's from `axis` on."""
    a, b = n[0].type, n[1].type
    trailing = a.rank - axis - b.rank
    if trailing < 0:
        raise n.refused("the shapes of the inputs do not match", found=f"{a}, {b}, axis={axis}")
    reshaped = n.emit(t.Reshape(n[1], (*b.shape, *(1,) * trailing))) if trailing else n[1]
    return replace(n, inputs=(n[0], reshaped, *n.inputs[2:]))


def _changed(n: OnnxNode, found: str) -> ModelError:
    return n.refused(
        f"the operator is different in opset {n.version}, and gpuir reads such nodes as in opset 7",
        "a node that is also valid in opset 7",
        found,
        "convert the model to opset 7 or later with onnx.version_converter",
    )
