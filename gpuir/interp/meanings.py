"""Runs a graph of any level: each op by its row of `MEANINGS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpuir.interp.arrays import Array, NoMeaning, to_numpy_dtype, to_type
from gpuir.interp.gradients import GRADIENTS
from gpuir.interp.ranks import RANKS
from gpuir.interp.tensor import TENSOR, Meaning, Operands
from gpuir.ir.errors import GpuirError, ModelError, nearest
from gpuir.ir.graph import Graph, Node, Op, Value
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t


def evaluate(op: Op, values: Mapping[Value, Array], loose: bool = False) -> tuple[Array, ...]:
    """The results of one op, given the arrays of its operands, in exactly the dtypes of its types.

    Raises `NoMeaning` for an op that computes nothing we know, or not with these operands.
    """
    meaning = MEANINGS.get(type(op)) or _own_meaning(op)
    if meaning is None:
        raise NoMeaning(f"gpuir cannot compute {op.name} with numpy")
    try:
        with np.errstate(all="ignore"):
            results = meaning(op, Operands(values, loose))
    except (ValueError, IndexError, TypeError, ArithmeticError, MemoryError) as error:
        found = ", ".join(f"%{v.name}: {v.type}" for v in op.operands)
        why = "the sizes that depend on data are upper bounds in this graph" if loose else ""
        raise NoMeaning(f"{op.name}: numpy says: {error}", found=found, fix=why) from error
    return results if isinstance(results, tuple) else (np.asarray(results),)


def _own_meaning(op: Op) -> Meaning | None:
    """What an op from outside computes: it brings that with it, or has a body."""
    return _body if isinstance(op, k.BodyKernel) else getattr(type(op), "meaning", None)


def run(graph: Graph, values: Mapping[str, Array]) -> dict[str, Array]:
    """The graph's outputs by name, given its inputs and params by name.

    Arrays are freed after their last use. A result whose dtype or shape is not the op's own type
    raises `NoMeaning`: a bug in interp or in a type rule. In a graph with assumed (data-dependent)
    sizes a result may be smaller than its type.
    """
    arrays: list[Array] = []
    for v in (*graph.inputs, *graph.params):
        if v.name not in values:
            raise ModelError(
                f"there is no array for %{v.name}",
                expected=str(v.type),
                fix=f"one of {', '.join(values)}"
                if values
                else "give an array for each input and parameter",
            )
        array = np.asarray(values[v.name])
        found = to_type(array)
        if (found.shape, found.dtype) != (v.type.shape, v.type.dtype):
            raise ModelError(
                f"the array for %{v.name} has the wrong type or shape",
                expected=str(v.type),
                found=str(found),
            )
        arrays.append(array)
    unknown = set(values) - {v.name for v in (*graph.inputs, *graph.params)}
    if unknown:
        name = min(unknown)
        known = [v.name for v in (*graph.inputs, *graph.params)]
        raise ModelError(f"no input or parameter has the name {name!r}", fix=nearest(name, known))
    outputs = _run(graph, arrays, bool(graph.assumed))
    return {v.name: a for v, a in zip(graph.outputs, outputs, strict=True)}


def _run(graph: Graph, arrays: Sequence[Array], loose: bool) -> list[Array]:
    """The outputs of a graph or region, given arrays for its inputs and then its params."""
    here: dict[Value, Array] = dict(zip((*graph.inputs, *graph.params), arrays, strict=True))
    last = {v: i for i, node in enumerate(graph.nodes) for v in node.op.operands}
    kept = set(graph.outputs)
    for i, node in enumerate(graph.nodes):
        try:
            results = evaluate(node.op, here, loose)
        except GpuirError as error:
            error.where = error.where or f"{' + '.join(node.locs)}: {node}"
            raise
        _check(node, results, loose)
        here.update(zip(node.results, results, strict=True))
        for v in (*node.op.operands, *node.results):
            if last.get(v, i) <= i and v not in kept:
                here.pop(v, None)
    return [here[v] for v in graph.outputs]


def _is_within(shape: tuple[int, ...], bounds: tuple[int, ...]) -> bool:
    return len(shape) == len(bounds) and all(n <= m for n, m in zip(shape, bounds, strict=True))


def _check(node: Node, results: tuple[Array, ...], loose: bool) -> None:
    types = [v.type for v in node.results]
    fits = len(types) == len(results) and all(
        a.dtype == to_numpy_dtype(type.dtype)
        and (a.shape == type.shape or (loose and _is_within(a.shape, type.shape)))
        for a, type in zip(results, types, strict=True)
    )
    if not fits:
        raise NoMeaning(
            f"{node.op.name}: the result of interp does not have the type of the op",
            where=f"{' + '.join(node.locs)}: {node}",
            expected=", ".join(map(str, types)),
            found=", ".join(f"{a.dtype}{list(a.shape)}" for a in results),
            fix="this is a bug in interp, in the routine, or in the type rule of the op",
        )


# ---------------------------------------------------------------------------- control, groups


def _loop(op: t.Loop, at: Operands) -> tuple[Array, ...]:
    carried, captures = at.all(op.init), at.all(op.captures)
    skip = int(op.has_condition)
    collected: list[list[Array]] = []
    for trip in range(op.trips):
        outputs = _run(op.body, [np.asarray(trip, np.int64), *carried, *captures], at.loose)
        carried = outputs[skip : skip + len(op.init)]
        collected.append(outputs[skip + len(op.init) :])
        if op.has_condition and not bool(outputs[0]):
            break
    types = [v.type for v in op.body.outputs[skip + len(op.init) :]]
    stacked = (
        np.stack(columns) if columns else np.zeros((0, *type.shape), to_numpy_dtype(type.dtype))
        for type, columns in zip(types, _columns(collected, len(types)), strict=True)
    )
    return (*carried, *stacked)


def _columns(rows: list[list[Array]], count: int) -> list[list[Array]]:
    return [[row[i] for row in rows] for i in range(count)]


def _cond(op: t.Cond, at: Operands) -> tuple[Array, ...]:
    branch = op.then if bool(at(op.pred)) else op.orelse
    return tuple(_run(branch, at.all(op.captures), at.loose))


def _body(op: t.Fused | k.BodyKernel, at: Operands) -> tuple[Array, ...]:
    return tuple(_run(op.body, at.all(op.args), at.loose))


MEANINGS: dict[type[Op], Meaning] = {
    **TENSOR,
    **GRADIENTS,
    **RANKS,
    t.Loop: _loop,
    t.Cond: _cond,
    t.Fused: _body,
    k.Loop: _loop,
    k.Cond: _cond,
    **{op: _body for op in k.KERNELS.values() if issubclass(op, k.BodyKernel)},
}
