"""The inputs of an ONNX model: dimensions bound, sizes checked, each defined with its shape."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpuir.frontends.onnx.proto import Dim, declared_type, dim_names, subgraphs, text
from gpuir.frontends.onnx.state import OnnxLoad, Shapes
from gpuir.frontends.onnx.walk import OnnxWalk
from gpuir.ir.errors import ModelError, nearest
from gpuir.ir.types import DType, TensorType

if TYPE_CHECKING:
    from onnx import GraphProto


def define_inputs(load: OnnxLoad, graph: GraphProto, walk: OnnxWalk) -> None:
    """Defines the graph's inputs, each of known shape."""
    declared: dict[str, tuple[DType, tuple[Dim, ...] | None]] = {}
    for v in graph.input:
        is_weight = v.name in walk.env and v.name not in load.shapes
        if is_weight and v.name not in load.values:
            continue
        if v.name in declared:
            raise load.source.refused(f"two inputs have the name {v.name!r}")
        try:
            declared[v.name] = declared_type(v.type, v.name)
        except ModelError as error:
            error.where = error.where or f"{load.source.name}: input"
            raise
    for name in load.shapes:
        if name not in declared:
            raise load.source.refused(
                f"--input {name}: the model has no such input", fix=nearest(name, declared)
            )
    load.given_results = load.values.keys() - declared.keys()
    if not load.functions:
        check_given(load, load.given_results - computed_names(graph))
    shapes = {name: tuple(shape) for name, shape in load.shapes.items()}
    bind(load, graph, declared, shapes)
    given: dict[str, np.ndarray] = {}
    for name, (_, dims) in declared.items():
        if name in load.values:
            given[name] = load.laid_out(np.asarray(load.values[name]), dims)
            shapes.setdefault(name, given[name].shape)
    bind(load, graph, declared, {name: a.shape for name, a in given.items()})
    unbound: list[str] = []
    types: dict[str, TensorType] = {}
    for name, (dtype, dims) in declared.items():
        shape = shapes.get(name) or dims
        extents = [load.extent(d) for d in shape] if shape is not None else [None]
        if None in extents:
            unbound.append(name)
            continue
        try:
            types[name] = TensorType(tuple(n for n in extents if n is not None), dtype)
        except ModelError as error:
            error.where = load.loc(name)
            raise
    if unbound:
        raise not_bound(load, declared, unbound)
    for name, type in types.items():
        if name in given:
            walk.env[name] = walk.emit.constant(load.given(name, given[name], type), name=name)
            shown = " ".join(str(given[name]).split())
            walk.emit.assume(f"input {name} holds {shown[:80]}")
        else:
            walk.env[name] = value = walk.emit.input(name, type)
            load.input_types[name] = type
            if not all(isinstance(d, int) for d in declared[name][1] or (None,)):
                load.sized.add(value)


def bind(
    load: OnnxLoad,
    graph: GraphProto,
    declared: Mapping[str, tuple[DType, tuple[Dim, ...] | None]],
    shapes: Shapes,
) -> None:
    """Fills `symbols` from the dims given and from the shapes given."""
    named = {d for _, dims in declared.values() for d in dims or () if isinstance(d, str)}
    parts = {part for d in named for part in dim_names(d)}
    for name, n in load.dims.items():
        if name not in named | parts and name not in _dims_inside(graph):
            known = sorted(named)
            raise load.source.refused(
                f"--dims {name}={n}: the model has no such dimension",
                fix=nearest(name, known)
                if known
                else "the inputs' dimensions have no names: give --input NAME=1x3x224x224",
            )
        if n < 0:
            raise ModelError(f"--dims {name}={n}", expected="a size of 0 or more")
        load.symbols[name] = n
    for name, shape in shapes.items():
        dims = declared[name][1]
        shown = show_type(declared[name])
        option = "--input" if name in load.shapes else "--value"
        if min(shape, default=0) < 0:
            raise ModelError(f"--input {name}", expected="sizes of 0 or more", found=str(shape))
        if dims is not None and len(dims) != len(shape):
            raise load.source.refused(
                f"{option} {name}: the number of dimensions is wrong",
                f"{len(dims)}: {shown}",
                f"{len(shape)}: {list(shape)}",
            )
        for axis, (dim, n) in enumerate(zip(dims or (), shape, strict=False)):
            known = load.extent(dim)
            if known is None and isinstance(dim, str):
                load.symbols[dim] = n
            elif known is not None and known != n:
                fixed = isinstance(dim, int)
                raise load.source.refused(
                    f"{option} {name}: the size of axis {axis} is wrong",
                    f"{known}" + ("" if fixed else f", as {dim} is given elsewhere"),
                    n,
                    "this size is fixed in the model; export the model with a dynamic dimension"
                    if fixed
                    else "",
                )


def not_bound(
    load: OnnxLoad,
    declared: Mapping[str, tuple[DType, tuple[Dim, ...] | None]],
    unbound: Sequence[str],
) -> ModelError:
    """The error for inputs whose shapes are not known, with a line to copy."""
    names: dict[str, int] = {}
    lines: list[str] = []
    fixes = fixed_by_weights(load.source.model.graph)
    fixed_names: set[str] = set()
    for name in unbound:
        dtype, dims = declared[name]
        fixed = fixes.get(name, {})
        missing = [d for d in dims or () if load.extent(d) is None]
        if dims is None or any(d is None for d in missing):
            guess = dims if dims is not None else (None,) * 2
            extents = [
                known
                if (known := load.extent(d)) is not None
                else fixed.get(i, fixed.get(i - len(guess))) or _guess(d, i, guess, dtype)
                for i, d in enumerate(guess)
            ]
            shape = "x".join(map(str, extents))
            lines.append(f"--input {shlex.quote(f'{name}={shape}')}")
            continue
        for i, d in enumerate(dims):
            if isinstance(d, str) and load.extent(d) is None and d not in fixed_names:
                size = fixed.get(i, fixed.get(i - len(dims)))
                names[d] = size or names.get(d) or _guess(d, i, dims, dtype)
                fixed_names |= {d} if size else set()
    if names:
        pairs = ",".join(f"{name}={n}" for name, n in names.items())
        lines.insert(0, f"--dims {shlex.quote(pairs)}")
    shown = [f"{name}: {show_type(declared[name])}" for name in unbound]
    return load.source.refused(
        "the sizes of some input dimensions are not known",
        "an extent for each"
        + (f": {', '.join(names)}" if names else " ?")
        + (", and for each ?" if names and len(lines) > 1 else ""),
        "\n".join(shown[:20]),
        " ".join(lines[:20]) + "   (for example)",
    )


def check_given(load: OnnxLoad, unknown: Iterable[str]) -> None:
    """Refuses `values` for what the model neither takes nor computes."""
    for name in sorted(unknown):
        graph = load.source.model.graph
        raise load.source.refused(
            f"--value {name}: the model has no such input and computes no such tensor",
            fix=nearest(name, [*(v.name for v in graph.input), *sorted(computed_names(graph))]),
        )


def _dims_inside(graph: GraphProto) -> set[str]:
    """Names of symbolic dims anywhere in the graph."""
    found: set[str] = set()
    for v in (*graph.value_info, *graph.output):
        found.update(d.dim_param for d in v.type.tensor_type.shape.dim if d.dim_param)
    return found


def computed_names(graph: GraphProto) -> set[str]:
    """Names of the nodes' results, here and in subgraphs."""
    found: set[str] = set()
    for node in graph.node:
        found.update(map(text, node.output))
        for inner in subgraphs({a.name: a for a in node.attribute}):
            found |= computed_names(inner)
    return found


def show_type(declared: tuple[DType, tuple[Dim, ...] | None]) -> str:
    dtype, dims = declared
    if dims is None:
        return f"{dtype} of unknown rank"
    return f"{dtype}[{', '.join('?' if d is None else str(d) for d in dims)}]"


def fixed_by_weights(graph: GraphProto) -> dict[str, dict[int, int]]:
    """What the weights that they are multiplied with say of inputs: extents by axis, which is
    counted from the end where it is negative."""
    weights = {text(w.name): tuple(w.dims) for w in graph.initializer}
    found: dict[str, dict[int, int]] = {}
    for node in graph.node:
        x, w, *_ = (*map(text, node.input), "", "")
        shape = weights.get(w, ())
        given = {text(a.name): a.i for a in node.attribute}
        match text(node.op_type):
            case "MatMul" if len(shape) > 1:
                found.setdefault(x, {})[-1] = shape[-2]
            case "Gemm" if len(shape) == 2 and not given.get("transA"):
                found.setdefault(x, {})[-1] = shape[1 if given.get("transB") else 0]
            case "Conv" if len(shape) > 2:
                found.setdefault(x, {})[1] = shape[1] * (given.get("group") or 1)
            case _:
                pass
    return found


def _guess(dim: Dim, axis: int, dims: Sequence[Dim], dtype: DType) -> int:
    """A plausible extent, for the line an error offers to copy."""
    name = str(dim or "").lower()
    if "batch" in name or name in ("n", "b", "bs") or (axis == 0 and "seq" not in name):
        return 1
    if "seq" in name or "len" in name or "token" in name or dtype.is_integer:
        return 128
    if len(dims) == 4:
        channels_last = dims[3] in (1, 3, 4)
        return 3 if axis == (3 if channels_last else 1) else 224
    if len(dims) == 3 and axis == 1 and isinstance(dims[0], int) and isinstance(dims[2], int):
        return 1  # the state of a recurrent network: [layers, batch, hidden]
    return 128
