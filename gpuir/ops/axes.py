"""Ops in index notation: the axes of operands and results by name, as in Einstein's notation.

`k` is an index, `g.c` one of c within g (two axes reshaped to one), `q+r` where a window r moves
along q, `_` an axis of which nothing is said. `...` are the axes ahead of the others, aligned on
the right as numpy broadcasts them: their names are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from gpuir.ir.graph import Op, Value, field_names, values_in
from gpuir.ir.lazy import remembered

Names = tuple[str, ...]  # one an axis; empty where nothing is said, and where an index broadcasts

Tensor = tuple[str | Names, tuple[int, ...]]  # its notation and its shape


@dataclass(frozen=True)
class Axes:
    """The names of the axes of an op's operands and results.

    A result without an index of `summed` is a sum over it, added to `onto` where that is an
    operand. Of an index of `whole` a cell of a result needs all.
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    summed: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    onto: Value | None = None

    @property
    def names(self) -> Names:
        every = (n for names in (*self.operands, *self.results) for n in names if n)
        return tuple(dict.fromkeys(every))


@remembered(4096)
def parted(axes: Axes, adds: bool = True) -> Axes:
    """The indices of which each rank may have a part, where they are outermost. One that is in
    several tensors is cut in all of them or in none. A tensor without it is whole on each rank; a
    result without it is on each rank a term of a sum, if that `adds`."""
    summed = axes.summed if adds else frozenset[str]()
    inner = {i for n in axes.names for i in (indices(n) if "+" in n else indices(n)[1:])}
    read = {i for names in axes.operands for n in names for i in indices(n)}
    given = [{i for n in names for i in indices(n)} for names in axes.results]
    free = read - inner - axes.whole
    found = {i for i in free if i in summed or all(i in there for there in given)}

    def outer(names: Names) -> Names:
        heads = (n.partition(".")[0] for n in names)
        return tuple(n if n in found else "" for n in heads)

    operands, results = tuple(map(outer, axes.operands)), tuple(map(outer, axes.results))
    return Axes(operands, results, summed & found)


@lru_cache(4096)
def indices(name: str) -> Names:
    """The indices that an axis is made of, the outermost first."""
    return tuple(name.replace("+", ".").split(".")) if name else ()


def numbered(rank: int) -> Names:
    return tuple(map(str, range(rank)))


def named(
    op: Op, *gives: str | Names, summed: str = "", whole: str = "", **reads: str | Names
) -> Axes:
    """The axes of an op: the notation of each field that holds operands, and of each result."""
    fields = [(reads[n], values_in(getattr(op, n))) for n in field_names(type(op)) if n in reads]
    operands = tuple((text, v.type.shape) for text, values in fields for v in values)
    shapes = (x.shape for x in op.result_types)
    axes = matched(operands, tuple(zip(gives, shapes, strict=True)))
    return replace(axes, summed=frozenset(summed.split()), whole=frozenset(whole.split()))


def alike(op: Op, *but: int) -> Axes:
    """The axes of an op whose operands and results have the same, but for some axes."""
    rank = op.result_types[0].rank
    names = tuple("" if i in but else f"{i}" for i in range(rank))
    operands = tuple((names[rank - v.type.rank :], v.type.shape) for v in op.operands)
    return matched(operands, tuple((names, x.shape) for x in op.result_types))


def broadcasting(operands: Iterable[Value], results: Iterable[Tensor]) -> Axes:
    """The axes of operands that are aligned as numpy broadcasts them, and of results."""
    return matched(tuple(("...", v.type.shape) for v in operands), tuple(results))


@remembered(4096)
def matched(operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Axes:
    """The axes of tensors. One of extent 1 broadcasts where another of its name is wider."""
    tensors = (*operands, *results)
    ahead = (len(x) - len(n.removeprefix("...").split()) for n, x in tensors if isinstance(n, str))
    lead = max(ahead, default=0)
    names = [_spelled(n, len(x), lead) if isinstance(n, str) else n for n, x in tensors]
    rows = [list(zip(n, x, strict=True)) for n, (_, x) in zip(names, tensors, strict=True)]
    wide = {n for row in rows for n, extent in row if extent != 1}
    axes = [tuple("" if m == 1 and n in wide else n for n, m in row) for row in rows]
    return Axes(tuple(axes[: len(operands)]), tuple(axes[len(operands) :]))


def _spelled(text: str, rank: int, lead: int) -> Names:
    """The names of a tensor's axes; `lead` are the most that `...` stands for in an op."""
    names = tuple("" if n == "_" else n for n in text.removeprefix("...").split())
    ahead = rank - len(names)
    return (*(f"{i}" for i in range(lead - ahead, lead)), *names[max(-ahead, 0) :])
