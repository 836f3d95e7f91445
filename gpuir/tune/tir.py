"""TVM's TIR: what a scheduled module says of its loops, its kernel and its tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.tune.kernels import Kernel, nest
from gpuir.tune.loops import BufferAccess, Expression, NestLoop, Statement, distinct, lying
from gpuir.tune.space import Floats

_KINDS = {0: "serial", 1: "parallel", 2: "vector", 3: "unrolled"}
_OPS = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%"}


class Unread(Exception):
    """A schedule of a form that is not read; it is counted as slow, and no more."""


# ---------------------------------------------------------------------------- reading


def statements(mod: Any) -> list[Statement]:
    """The statements of a module's function, in order, as `loops` has them."""
    functions = [f for f in mod.functions.values() if hasattr(f, "body")]
    if len(functions) != 1:
        raise Unread(f"{len(functions)} functions")
    found: list[Statement] = []
    _walk(functions[0].body, (), {}, 0, found)
    return found


def _walk(
    stmt: Any,
    loops: tuple[NestLoop, ...],
    known: Mapping[int, Expression],
    unrolls: int,
    found: list[Statement],
) -> None:
    kind = type(stmt).__name__
    if kind == "For":
        name = f"{len(found)}.{len(loops)}"
        if stmt.thread_binding is not None:
            sort = str(stmt.thread_binding.thread_tag)
        else:
            sort = _KINDS.get(int(stmt.kind), "serial")
        loop = NestLoop(name, _whole(stmt.extent), sort)
        if "pragma_auto_unroll_max_step" in stmt.annotations:
            unrolls = int(stmt.annotations["pragma_auto_unroll_max_step"])
        _walk(stmt.body, (*loops, loop), {**known, hash(stmt.loop_var): name}, unrolls, found)
    elif kind == "SeqStmt":
        for part in stmt.seq:
            _walk(part, loops, known, unrolls, found)
    elif kind == "SBlockRealize":
        block = stmt.block
        inside = dict(known)
        variables: dict[str, Expression] = {}
        for i, (var, value) in enumerate(zip(block.iter_vars, stmt.iter_values)):
            variables[_letter(i)] = inside[hash(var.var)] = _expression(value, known)
        before = len(found)
        _walk(block.body, loops, inside, unrolls, found)
        if len(found) == before and block.iter_vars:  # a block with no block inside
            found.append(_statement(block, loops, variables, unrolls))
    elif kind in ("IfThenElse", "LetStmt", "AttrStmt"):
        _walk(getattr(stmt, "then_case", None) or stmt.body, loops, known, unrolls, found)


def _statement(
    block: Any, loops: tuple[NestLoop, ...], variables: Mapping[str, Expression], unrolls: int
) -> Statement:
    letters = {hash(v.var): _letter(i) for i, v in enumerate(block.iter_vars)}
    reduced = {_letter(i) for i, v in enumerate(block.iter_vars) if int(v.iter_type) == 2}
    written = {str(r.source.name) for r in block.writes}
    reads = [r for r in block.reads if str(r.source.name) not in written]
    return Statement(
        str(block.name_hint),
        loops,
        variables,
        frozenset(reduced),
        accesses=(
            *(_access(r, letters, False) for r in reads),
            *(_access(r, letters, True) for r in block.writes),
        ),
        unrolls=unrolls,
    )


def _access(region: Any, letters: Mapping[int, str], writes: bool) -> BufferAccess:
    source = region.source
    axes: list[tuple[tuple[int, str], ...]] = []
    exact = True
    for r in region.region:
        try:
            axes.append(_sum(r.min, letters))
        except Unread:
            exact = False
            axes.append(tuple((1, letters[v]) for v in _variables(r.min) if v in letters))
    cells = tuple(_whole(r.extent) for r in region.region)
    cell_bytes = _bits(str(source.dtype)) / 8
    access = BufferAccess(str(source.name), str(source.scope()), cell_bytes, tuple(axes), cells)
    return replace(access, writes=writes, exact=exact)


def _bits(dtype: str) -> int:
    digits = "".join(c for c in dtype.partition("x")[0] if c.isdigit())
    return int(digits[:2] or 8) if dtype.startswith(("float", "int", "uint", "bfloat")) else 8


def _letter(i: int) -> str:
    return chr(ord("a") + i) if i < 26 else f"v{i}"


def _whole(e: Any) -> int:
    if type(e).__name__ != "IntImm":
        raise Unread(f"an extent is not a number: {e}")
    return int(e.value)


def _expression(e: Any, known: Mapping[int, Expression]) -> Expression:
    """What a variable is of the loops around it."""
    kind = type(e).__name__
    if kind == "IntImm":
        return int(e.value)
    if kind == "Var":
        return known.get(hash(e), 0)
    if kind == "Cast":
        return _expression(e.value, known)
    if kind in _OPS:
        return (_OPS[kind], _expression(e.a, known), _expression(e.b, known))
    raise Unread(f"an index is not a sum, product or remainder of loops: {e}")


def _sum(e: Any, letters: Mapping[int, str]) -> tuple[tuple[int, str], ...]:
    """An index as a sum of steps times variables; what is added to it moves nothing."""
    kind = type(e).__name__
    if kind == "IntImm":
        return ()
    if kind == "Var" and hash(e) in letters:
        return ((1, letters[hash(e)]),)
    if kind in ("Add", "Sub"):
        sign = 1 if kind == "Add" else -1
        return (*_sum(e.a, letters), *((sign * n, v) for n, v in _sum(e.b, letters)))
    if kind == "Mul" and type(e.b).__name__ == "IntImm":
        return tuple((n * int(e.b.value), v) for n, v in _sum(e.a, letters))
    raise Unread(f"an index is not a sum of loops: {e}")


def _variables(e: Any) -> list[int]:
    if type(e).__name__ == "Var":
        return [hash(e)]
    parts = (getattr(e, name, None) for name in ("a", "b", "value"))
    return [v for part in parts if hasattr(part, "dtype") for v in _variables(part)]


# ---------------------------------------------------------------------------- a GPU


def read_kernel(mod: Any) -> tuple[Kernel, str]:
    """The kernel of a module before it was scheduled, and its main block: the loop nest with the
    most runs. Its dimensions are a, b, c ... in the order of the block's own."""
    main = max(statements(mod), key=lambda s: (bool(s.reduced), s.runs))
    reads = [a for a in main.accesses if not a.writes]
    writes = [a for a in main.accesses if a.writes]
    plain = all(a.exact and n > 0 for a in main.accesses for axis in a.axes for n, _ in axis)
    if not (reads and plain and all(a.exact for a in main.accesses)):
        raise Unread(f"{main.name} has an index that is not a sum of loops")
    dtypes = {i: f"{'f' if a.cell_bytes > 1 else 'i'}{int(a.cell_bytes * 8)}" for i, a in
              enumerate((*reads, *writes))}  # fmt: skip
    found = nest(
        main.name,
        {v: spans[0] for v, spans in main.spans.items()},
        reads=[_axes(a) for a in reads],
        writes=[_axes(a) for a in writes],
        reduced=[v for v in main.spans if v in main.reduced],
        dtype=dtypes[0],
        dtypes=dtypes,
    )
    return found, main.name


def _axes(a: BufferAccess) -> tuple[str, ...]:
    """The axes that any loop moves, as `nest` takes them."""
    sums = ["+".join(v if n == 1 else f"{n}{v}" for n, v in axis) for axis in a.axes]
    return tuple(filter(None, sums))


def read_tile(mod: Any, main: str, kernel: Kernel) -> dict[str, Any]:
    """How a scheduled module cuts its main block: the fields of `Tiles`, as numbers."""
    found = statements(mod)
    named = [s for s in found if s.name in (main, f"{main}_update", f"{main}_rf")]
    if not named:
        raise Unread(f"no block {main}")
    s = max(named, key=lambda x: x.runs)
    extents = kernel.work.extents
    if set(s.variables) != set(extents):
        raise Unread(f"{main} has other dimensions after scheduling")
    first = next((d for d, x in enumerate(s.loops) if not x.kind.startswith("blockIdx")), 0)
    if not first:
        raise Unread("no loop is bound to blocks")
    step = first  # from where on all of a sum's loops are within one step of it
    for d, loop in enumerate(s.loops[first:], first):
        if loop.kind == "serial" and _moves_a_sum(s, loop):
            step = d + 1
            break
    bound = [x for x in s.loops if x.kind.startswith("threadIdx")]
    lie = {v: lying(e, bound) for v, e in s.variables.items()}
    threads = {v: lie[v].places for v in sorted(lie, key=lambda v: lie[v].first)}
    dims = {v: s.spans[v][step if v in s.reduced else first] for v in s.variables}
    copies = {a.buffer: c for c in found for a in c.accesses if a.writes and a.scope == "shared"}
    reads = [a for a in s.accesses if not a.writes]
    count = prod(x.extent for x in bound)
    vector: dict[str, int] = {}
    fetch: dict[int, int] = {}
    for i, a in enumerate(reads):
        copy = copies.get(a.buffer)
        if copy is None or not (a.axes and a.axes[-1]):
            continue
        wide = prod(x.extent for x in copy.loops if x.kind == "vector")
        row = prod(dims[v] for _, v in a.axes[-1])
        fetch[i] = max(min(count, row // wide), 1)  # copies go along rows
        if wide > 1:
            vector[a.axes[-1][-1][1]] = wide
    inner = [dims[v] for v in s.variables if v in s.reduced]
    return {
        "dims": dims,
        "warps": max(ceil(count / 32), 1),
        "unroll": max(min(s.unrolls, prod(inner)), 1),
        "threads": threads,
        "vector": vector,
        "strided": {v: int(lie[v].step == 1 and dims[v] > n > 1) for v, n in threads.items()},
        "direct": {i: int(a.scope != "shared") for i, a in enumerate(reads)},
        "fetch": fetch,
    }


def _moves_a_sum(s: Statement, loop: NestLoop) -> bool:
    return any(distinct(s.variables[v], [loop]) > 1 for v in s.reduced)


def tiles_of(rows: Sequence[Mapping[str, Any]]) -> Tiles:
    """Many tiles in arrays, whose threads lie in one order."""

    def column(part: str, key: Any, default: float) -> Floats:
        return np.array([float(r[part].get(key, default)) for r in rows])

    keys = {
        part: {k: None for r in rows for k in r[part]} for part in ("dims", "threads", "vector")
    }
    return Tiles(
        {d: column("dims", d, 1.0) for d in keys["dims"]},
        warps=np.array([float(r["warps"]) for r in rows]),
        unroll=np.array([float(r["unroll"]) for r in rows]),
        threads={d: column("threads", d, 1.0) for d in keys["threads"]},
        vector={d: column("vector", d, 1.0) for d in keys["vector"]},
        direct={i: column("direct", i, 1.0) for i in rows[0]["direct"]},
    )
