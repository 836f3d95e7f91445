"""Values, ops, nodes and graphs: frozen, made by `Builder` or `rewrite`, never changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import prod
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

from gpuir.ir.door import of_type
from gpuir.ir.errors import UsageError
from gpuir.ir.lazy import lazy
from gpuir.ir.notes import Cost, Tile
from gpuir.ir.types import TensorType

Loc = str  # "mlp.onnx:MatMul_3": the source, a colon, and the model node's own name
Framework = Literal["onnx", "pytorch"]
DEEPEST = 32  # regions inside one another: whoever reads a graph goes down into them by calls
DEEPEST_CONTROL = 24  # of those, loops and branches of a model: the rest is for kernels' bodies
Role = Literal["weight", "buffer", "input", "gradient", "optimizer", "cache", "activation"]


Kind = TypeVar("Kind", bound="Op")


class Level(IntEnum):
    """What a graph holds; the first word of its text. Each level keeps the last one's promises."""

    graph = 0
    fused = 1
    kernel = 2
    tiled = 3
    costed = 4


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor under a name, unique in its graph. The name is the model's own, any string."""

    name: str
    type: TensorType

    def __hash__(self) -> int:
        return hash(self.name)


def values_in(field: object) -> tuple[Value, ...]:
    """The operands that a field holds."""
    if type(field) is Value:
        return (field,)
    if type(field) is tuple and field and type(field[0]) is Value:  # pyright: ignore
        return cast("tuple[Value, ...]", field)
    return ()


@cache
def field_names(op: type[Op]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(op))


@dataclass(frozen=True)
class Op:
    """One operation. A field holding a `Value` (or a tuple of them) is an operand, a `Graph` is a
    region, all else is an attribute. Subclasses are frozen dataclasses, and printing, parsing,
    rewriting and comparing all come from their fields.
    """

    name: ClassVar[str] = ""
    control: ClassVar[bool] = False  # its regions are graphs of the enclosing graph's own level
    tiled: ClassVar[bool] = False  # has a loop nest, its `space`, that a tile cuts
    contraction: ClassVar[bool] = False  # multiplies and sums: at most one to a kernel
    overwrites: ClassVar[bool] = False  # writes cell by cell, or updates to what is there

    def types(self) -> tuple[TensorType, ...]:
        """The types of the results, computed from the operands and attributes."""
        raise NotImplementedError

    def flops(self) -> int:
        """Arithmetic operations on real numbers; two for a multiply-add, of complex numbers eight.
        Zero for what only moves data."""
        return 0

    def space(self) -> Space:
        """The loop nest of a kernel."""
        raise NotImplementedError

    @property
    def is_same(self) -> bool:
        """Whether the result is the operand itself, or its bytes under another dtype."""
        return False

    def may_overwrite(self, value: Value) -> bool:
        """Whether a kernel may write its result where it reads an operand."""
        return self.overwrites

    def workspace_bytes(self, split: int) -> int:
        """What a kernel needs beside operands and results while it runs, where so many blocks share
        a sum. cuDNN's choice of algorithms is not known: nothing is counted for it."""
        return 0

    @lazy
    def result_types(self) -> tuple[TensorType, ...]:
        """`types()`, computed once: an op never changes."""
        return self.types()

    @lazy
    def nest(self) -> Space:
        """`space()`, computed once."""
        return self.space()

    @lazy
    def operands(self) -> tuple[Value, ...]:
        found: list[Value] = []
        for name in field_names(type(self)):
            found += values_in(getattr(self, name))
        return tuple(found)

    @lazy
    def regions(self) -> tuple[Graph, ...]:
        values = (getattr(self, name) for name in field_names(type(self)))
        return tuple(v for v in values if type(v) is Graph)

    def substitute(self, values: Mapping[Value, Value]) -> Self:
        """This op with operands replaced; itself when none is."""
        if values.keys().isdisjoint(self.operands):
            return self
        changes: dict[str, Any] = {}
        for name in field_names(type(self)):
            field = getattr(self, name)
            old = values_in(field)
            if any(v in values for v in old):
                new = tuple(values.get(v, v) for v in old)
                changes[name] = new[0] if type(field) is Value else new
        return dataclasses.replace(self, **changes) if changes else self

    def recast(self, kind: type[Kind], **fields: Any) -> Kind:
        """An op of another kind: its fields that this one has by the same name, and those given."""
        given = {n: getattr(self, n) for n in field_names(kind) if hasattr(self, n)}
        return kind(**{**given, **fields})

    def with_regions(self, change: Callable[[Graph], Graph]) -> Self:
        """This op with each region passed through `change`; itself when none is."""
        changes = {
            name: new
            for name in field_names(type(self))
            if type(old := getattr(self, name)) is Graph and (new := change(old)) is not old
        }
        return dataclasses.replace(self, **changes) if changes else self


@dataclass(frozen=True, slots=True)
class Node:
    """An op, the values it defines, the model nodes it stands for, and its notes."""

    op: Op
    results: tuple[Value, ...]
    locs: tuple[Loc, ...] = ()
    tile: Tile | None = None
    cost: Cost | None = None

    def __str__(self) -> str:
        names = ", ".join(f"%{v.name}" for v in self.results)
        return f"{names} = {self.op.name}({', '.join(f'%{v.name}' for v in self.op.operands)})"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Cut:
    """That each rank has a part of a value: along `axis`, one of as many as `group`, an axis of the
    mesh, has ranks. With `parts` the extents of what lies packed side by side along that axis, each
    of which is cut by itself."""

    group: str
    axis: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A list of nodes in order, with what goes in and what comes out.

    `params` are the weights: a name and a type, never data. `folded` are the model nodes that no
    node stands for any more. `assumed` says in words what was taken for granted (a trip count, a
    data-dependent length), for people: no code goes by what it says. `framework` is what the
    program was written in. `target` names the device from level `tiled` on, and `profile` the
    software stack that a graph was lowered for. A region is a graph that sees only its own inputs.

    `over` is empty or goes along `outputs`: the input or param whose storage the output takes over
    (an updated cache, an optimiser's step), or None. `roles` names the values that hold something
    else than params (weights), inputs (inputs) and results (activations) do; a buffer is a param
    that is not trained.

    `cluster` names what joins the ranks, once collectives are costed.

    `mesh` is empty or names the axes of the ranks that run the graph, and how many each has, the
    axis of neighbours first. The graph is then what one rank runs, its types are of what one rank
    has, and `cuts` are the inputs, params and outputs that it has a part of.

    `clock` says how long such a graph takes, once all of it is costed.
    """

    level: Level
    name: str
    inputs: tuple[Value, ...] = ()
    params: tuple[Value, ...] = ()
    nodes: tuple[Node, ...] = ()
    outputs: tuple[Value, ...] = ()
    folded: tuple[Loc, ...] = ()
    assumed: tuple[str, ...] = ()
    framework: Framework | None = None
    target: str | None = None
    cluster: str | None = None
    profile: str | None = None
    over: tuple[Value | None, ...] = ()
    roles: tuple[tuple[str, Role], ...] = ()
    origins: tuple[tuple[Loc, str], ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    cuts: tuple[tuple[str, Cut], ...] = ()

    def __repr__(self) -> str:
        on = f" for {self.target}" if self.target else ""
        under = f" under {self.profile}" if self.profile else ""
        nodes = f"{len(self.nodes):,} nodes{self._takes}"
        return f"<Graph @{self.name} of level {self.level.name}{on}{under}: {nodes}>"

    @property
    def _takes(self) -> str:
        return f", kernels {self.time_s:.4g} s" if self.level == Level.costed else ""

    @lazy
    def _roles(self) -> dict[str, Role]:
        inputs: dict[str, Role] = {v.name: "input" for v in self.inputs}
        return {**inputs, **{v.name: "weight" for v in self.params}, **dict(self.roles)}

    def role_of(self, value: Value) -> Role:
        """What a value holds."""
        return self._roles.get(value.name, "activation")

    @property
    def ranks(self) -> int:
        """How many run this graph."""
        return prod(n for _, n in self.mesh)

    def cuts_of(self, value: Value) -> tuple[Cut, ...]:
        """How a value's parts lie on the ranks."""
        return tuple(cut for name, cut in self.cuts if name == value.name)

    @lazy
    def time_s(self) -> float:
        """What the kernels of a costed graph take on the device, one after another. That is not how
        long the model takes (`gpuir.analyze(..).latency_s`): the host launches them, and copies."""
        return sum(n.cost.time_s for n in self.nodes if n.cost)

    def walk(self) -> Iterator[Node]:
        """Every node, those inside control regions (loops, branches) included, in order."""
        for node in self.nodes:
            yield node
            if node.op.control:
                for region in node.op.regions:
                    yield from region.walk()

    def uses(self) -> dict[Value, list[Node]]:
        """The nodes that read each value; a graph output is not a use."""
        uses: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.op.operands):
                uses.setdefault(value, []).append(node)
        return uses

    def readers(self) -> dict[Value, list[int]]:
        """As `uses`, by the nodes' places in the graph."""
        readers: dict[Value, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.op.operands):
                readers.setdefault(value, []).append(i)
        return readers

    def producers(self) -> dict[Value, Node]:
        return {value: node for node in self.nodes for value in node.results}


@dataclass(frozen=True)
class Access:
    """A tensor as a loop nest reads or writes it: its real type and the dimensions that index it.

    Where the nest visits more cells than the tensor has (a convolution's halo, a broadcast, grouped
    query heads), the difference is reuse: a footprint never exceeds the tensor.
    """

    type: TensorType
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """The iteration space of a kernel: named extents, and what each operand is indexed by."""

    dims: Mapping[str, int]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    reduced: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        """Iterations of the whole nest."""
        return prod(self.dims.values())


def region(inputs: tuple[Value, ...], nodes: tuple[Node, ...], outputs: Iterable[Value]) -> Graph:
    """What a launch computes: a graph of tensor ops that sees its inputs alone."""
    return Graph(Level.graph, "", inputs, nodes=nodes, outputs=tuple(outputs))


def aligned(type: TensorType, dims: tuple[str, ...]) -> Access:
    """The access of `type` by `dims`, right-aligned as numpy broadcasts: axes that are missing
    or of extent 1 are not indexed, and leading axes beyond `dims` belong to the first."""
    shape = type.shape
    if len(shape) > len(dims):
        head = len(shape) - len(dims) + 1
        shape = (prod(shape[:head]), *shape[head:])
    named = zip(reversed(dims), reversed(shape), strict=False)
    return Access(type, tuple(reversed([d for d, n in named if n != 1])))


GRAPH = of_type(Graph, "a graph", "gpuir.load(...) gives one, and gpuir.analyze(...).graph")


def check_level(where: str, g: Graph, least: Level, fix: str) -> None:
    """UsageError where a graph has not got as far as a function needs it."""
    if g.level < least:
        raise UsageError(
            f"{where} needs a graph of level {least.name}",
            found=f"@{g.name} has the level {g.level.name}",
            fix=fix,
        )
