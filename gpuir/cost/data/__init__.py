"""Tables of numbers beside the formulas that use them: what was fitted, what was read off hardware
and off libraries. Each is a CSV file, which says where its numbers are from.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, Protocol, TypeVar, cast

Row = TypeVar("Row")
CELLS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "tuple[int, ...]": lambda cell: tuple(map(int, cell.split())),
    "tuple[str, ...]": lambda cell: tuple(cell.split()),
}


def table(name: str, row: type[Row], room: str = "cost") -> tuple[Row, ...]:
    """The rows of `name`.csv in the folder `data` of a room, read once: see `parsed`."""
    return cast(tuple[Row, ...], _table(name, row, room))


@cache
def _table(name: str, row: type[Any], room: str) -> tuple[Any, ...]:
    place = files("gpuir").joinpath(room, "data", f"{name}.csv")
    return tuple(parsed(place.read_text(), row, f"{name}.csv"))


def parsed(text: str, row: type[Row], where: str) -> Iterable[Row]:
    """The rows of a table, one to a line after a line with the names of its columns: fields of the
    dataclass `row`. A cell may be empty, or a column missing, where the field has a default.

    The first lines, with `#`, say what the table holds, and after `# source:` where the numbers are
    from: what a field `source` gets where its cell is empty. ValueError where there is no source,
    or where columns or cells are not as `row` has them.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line[:1] != "#"), len(lines))
    source = _source(lines[:start])
    names, *rest = csv.reader(lines[start:])
    known = {f.name: f for f in fields(cast(Any, row))}
    needed = {f.name for f in known.values() if f.default is MISSING} - {"source"}
    if not needed <= set(names) <= set(known) or len(names) > len(set(names)):
        raise ValueError(f"{where}: the columns are {names}, those of {row.__name__} {[*known]}")
    default = {"source": source} if "source" in known else {}
    columns = [(name, CELLS[str(known[name].type)]) for name in names]
    for number, cells in enumerate(rest, start + 2):
        given = dict[str, Any](default)
        try:
            for (name, made), cell in zip(columns, cells, strict=True):
                if cell or (name != "source" and known[name].default is MISSING):
                    given[name] = made(cell)
        except ValueError as error:
            raise ValueError(f"{where}:{number}: {error}, in {cells}") from error
        if not source and not given.get("source"):
            raise ValueError(f"{where}:{number}: nothing says where the numbers are from")
        yield row(**given)


def _source(head: list[str]) -> str:
    """What stands after `# source:`, in the lines that go on with three blanks too."""
    found: list[str] = []
    for line in head:
        if line.startswith("# source: ") or (found and line.startswith("#   ")):
            found.append(line.removeprefix("# source:").lstrip("# "))
    return " ".join(found)


# ---------------------------------------------------------------------------- by architecture


class OfIsa(Protocol):
    """What holds for architectures whose names begin so; of all that do not say otherwise, ""."""

    @property
    def isa(self) -> str: ...


Own = TypeVar("Own", bound=OfIsa)


def nearest(rows: Iterable[Own], isa: str) -> tuple[Own, ...]:
    """The rows of an architecture: of those whose `isa` its name begins with, the longest."""
    found = [r for r in rows if isa.startswith(r.isa)]
    most = max((len(r.isa) for r in found), default=0)
    return tuple(r for r in found if len(r.isa) == most)


@dataclass(frozen=True)
class OfArchitecture:
    """One number of architectures whose names begin with `isa`."""

    quantity: str
    isa: str
    value: float
    source: str


@cache
def of_isa(quantity: str, isa: str) -> float:
    """A quantity of `architectures.csv` on an architecture."""
    known = [r for r in table("architectures", OfArchitecture) if r.quantity == quantity]
    (found,) = nearest(known, isa)
    return found.value


@dataclass(frozen=True)
class KnownGpu:
    """A GPU of an architecture on which kernels were seen."""

    kernels: str
    isa: str
    gpu: str
    sms: int
    source: str


@cache
def known_gpus(kernels: str) -> dict[str, KnownGpu]:
    """The GPUs of `known_gpus.csv` on which such kernels were seen, by architecture."""
    return {g.isa: g for g in table("known_gpus", KnownGpu) if g.kernels == kernels}


# ---------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class LibraryTile:
    """LibraryTile of a result that a block computes, of a kernel that a library has."""

    kernel: str
    b: int
    m: int
    n: int


@cache
def tiles_of(kernel: str) -> tuple[tuple[int, int, int], ...]:
    """The tiles of `tiles.csv` that a library has for a kernel: b, m, n, the usual ones first."""
    return tuple((c.b, c.m, c.n) for c in table("tiles", LibraryTile) if c.kernel == kernel)
