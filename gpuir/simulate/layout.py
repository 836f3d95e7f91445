"""What a graph allocates and frees in order, whatever the device: sizes that tiles decide, and what
libraries keep, are left open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Literal, NamedTuple, get_args

from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Role, Value
from gpuir.ir.strides import Strided
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.strides import packed, viewed
from gpuir.stacks.allocators import BLOCK, UNLIMITED, rounded

MemoryKind = Literal[
    "weights", "gradients", "optimizer", "cache", "inputs", "activations", "workspace"
]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
KIND_OF: dict[Role, MemoryKind] = {
    "weight": "weights",
    "buffer": "weights",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "cache": "cache",
    "input": "inputs",
    "activation": "activations",
}
FIXED, POOL = -1, -2  # of a storage's `kernel`: of no kernel; what a stack's libraries keep

Place = Callable[[Node], int]


class Moment(NamedTuple):
    """The time while a node runs: its results are there, its operands still. `path` names the
    node as a schedule does; it is empty before the first node."""

    path: tuple[str, ...]
    locs: tuple[Loc, ...]


class Allocation(NamedTuple):
    """What one allocation holds: the value it is made for (workspace has none), its kind and its
    bytes. Of the workspace of a `kernel`, a place among those whose tiles are given, that is `each`
    for every block that shares a sum where several do."""

    name: str
    kind: MemoryKind
    bytes: int
    kernel: int = FIXED
    each: int = 0

    def sized(self, splits: Mapping[int, int], pool_bytes: int) -> int:
        """Its bytes where so many blocks of each kernel, else one, share a sum."""
        if self.kernel == POOL:
            return pool_bytes
        split = splits.get(self.kernel, 1)
        return self.each * split if self.each and split > 1 else self.bytes


@dataclass(frozen=True)
class MemoryLayout:
    """Allocations of a graph. `events` are places of storages in order: i where that is allocated,
    ~i where it is freed. `tops` says for each moment how many events have been by then. Sizes are
    multiples of `block`."""

    storages: tuple[Allocation, ...] = ()
    events: tuple[int, ...] = ()
    tops: tuple[int, ...] = ()
    moments: tuple[Moment, ...] = ()
    block: int = BLOCK

    @property
    def kernels(self) -> list[int]:
        """The places of kernels whose tiles decide something."""
        return sorted({x.kernel for x in self.storages if x.each})

    def sizes(self, splits: Mapping[int, int], pool_bytes: int) -> tuple[int, ...]:
        """Bytes of each storage with the tiles of a device: see `Allocation.sized`."""
        sizes = tuple(rounded(x.sized(splits, pool_bytes), self.block) for x in self.storages)
        made = sum(sizes[i] for i in self.events if i >= 0)
        if made > UNLIMITED:
            raise ModelError(
                "all tensors together take more memory than gpuir can count",
                expected=f"at most {UNLIMITED} bytes",
                found=f"{made} bytes",
            )
        return sizes

    @cached_property
    def peak_bytes(self) -> int:
        """The most at once, where no blocks share sums and no library keeps anything."""
        sizes = self.sizes({}, 0)
        held = list(
            accumulate((sizes[i] if i >= 0 else -sizes[~i] for i in self.events), initial=0)
        )
        return max(held[top] for top in self.tops)


def layout_of(
    graph: Graph, place: Place, block: int = BLOCK, spent: Collection[str] = ()
) -> MemoryLayout:
    """The allocations of a graph: see `memory`. `place` gives the place of a kernel among those
    whose tiles are given, `FIXED` of one without a tile. Of a branch the side counts that takes
    more where no blocks share sums."""
    walk = _AllocationWalk(place, block, {})
    walk.run(graph, spent)
    return walk.layout()


# ---------------------------------------------------------------------------- the walk


@dataclass(eq=False, slots=True)
class _Stored:
    """A storage, which several values may share. `refs` counts readers and outputs still to
    come."""

    id: int
    storage: Allocation
    resident: bool
    refs: int = 0
    live: bool = False


Held = dict[Value, _Stored]


class _AllocationWalk:
    """Runs graphs in their order and notes what is allocated and freed. `peaks` has, by identity,
    the most that a branch takes when it runs alone: found once, whoever asks."""

    def __init__(self, place: Place, block: int, peaks: dict[int, int]):
        self.place, self.block, self.peaks = place, block, peaks
        self.storages: list[_Stored] = []
        self.events: list[int] = []
        self.moments: list[Moment] = []
        self.tops: list[int] = []
        self.has_pool = False

    def run(self, graph: Graph, spent: Collection[str] = ()) -> None:
        """Runs a graph from its first moment, when its inputs and params are there."""
        ends = (*graph.inputs, *graph.params)
        held = {
            v: self.allocate(self.make_for(v, graph, resident=v.name not in spent)) for v in ends
        }
        self.moment((), ())
        self.graph(graph, (), held)

    def layout(self) -> MemoryLayout:
        storages = tuple(x.storage for x in self.storages)
        return MemoryLayout(
            storages, tuple(self.events), tuple(self.tops), tuple(self.moments), self.block
        )

    # -- storages

    def make(self, storage: Allocation, resident: bool = False) -> _Stored:
        """A storage that is not allocated yet."""
        self.storages.append(_Stored(len(self.storages), storage, resident))
        return self.storages[-1]

    def make_for(self, value: Value, graph: Graph, resident: bool = False) -> _Stored:
        kind = KIND_OF[graph.role_of(value)]
        return self.make(Allocation(value.name, kind, value.type.nbytes), resident)

    def allocate(self, storage: _Stored) -> _Stored:
        storage.live = True
        self.events.append(storage.id)
        return storage

    def free(self, storages: Iterable[_Stored]) -> None:
        """Frees those that nobody will read."""
        for storage in storages:
            if storage.live and not storage.refs and not storage.resident:
                storage.live = False
                self.events.append(~storage.id)

    def moment(self, path: tuple[str, ...], locs: tuple[Loc, ...]) -> None:
        self.moments.append(Moment(path, locs))
        self.tops.append(len(self.events))

    # -- graphs

    def graph(self, graph: Graph, path: tuple[str, ...], held: Held) -> None:
        """Runs a graph. `held` has the storages of its inputs and params, and at the end those of
        everything; outputs are still referred to."""
        run = _RunningGraph(graph, held)
        for value in dict.fromkeys((*graph.inputs, *graph.params)):
            held[value].refs += run.uses[value]
        self.free([held[v] for v in graph.inputs])
        for nodes in _launches(graph):
            if not nodes[0].op.control:
                self.launch(nodes, path, run)
                continue
            (node,) = nodes
            here = (*path, node.results[0].name)
            operands = list(dict.fromkeys(node.op.operands))
            if isinstance(node.op, t.Loop):
                operands = self.loop(node, node.op, here, run)
            elif isinstance(node.op, t.Cond):
                self.cond(node, node.op, here, run)
            for value in operands:
                held[value].refs -= 1
            self.free([held[v] for v in (*operands, *node.results)])

    def launch(self, nodes: list[Node], path: tuple[str, ...], run: _RunningGraph) -> None:
        """Nodes of one launch, or of one operator that runs alone: what passes between its steps
        in registers is never stored."""
        made: dict[_Stored, Op] = {}
        read: list[_Stored] = []
        stored: set[_Stored] = set()
        for node in nodes:
            shared = run.view(node)
            for value in node.results:
                storage = shared or run.taken_over(node, value)
                if storage is None:
                    storage = self.make_for(value, run.graph)
                    made[storage] = node.op
                run.hold(value, storage)
            run.lay_out(node)
            for value in dict.fromkeys(node.op.operands):
                storage = run.held[value]
                storage.refs -= 1
                read.append(storage)
                if storage in made and not is_passed_on(made[storage], node.op):
                    stored.add(storage)
        for storage in made:
            if storage.refs or storage in stored or len(nodes) == 1:
                self.allocate(storage)
        if not self.has_pool and any(node.op.contraction for node in nodes):
            self.has_pool = True
            self.allocate(self.make(Allocation("", "workspace", 0, POOL), resident=True))
        extra = self.workspace(nodes)
        self.moment((*path, nodes[-1].results[0].name), nodes[-1].locs)
        self.free([*extra, *read, *made])

    def workspace(self, nodes: list[Node]) -> list[_Stored]:
        """What a launch needs while it runs, allocated."""
        once, twice = (sum(n.op.workspace_bytes(split) for n in nodes) for split in (1, 2))
        if not once and not twice:
            return []
        storage = Allocation("", "workspace", once)
        if once != twice:
            storage = storage._replace(kernel=self.place(nodes[-1]), each=twice // 2)
        return [self.allocate(self.make(storage))]

    def loop(
        self, node: Node, op: t.Loop, here: tuple[str, ...], run: _RunningGraph
    ) -> list[Value]:
        """One trip, a later one where there are several: what it starts from is the last trip's.
        Gives the operands that the loop still holds after it."""
        number, *inputs = op.body.inputs
        carried, captured = inputs[: len(op.init)], inputs[len(op.init) :]
        stacks = node.results[len(op.init) :]
        for value in stacks:
            run.hold(value, self.allocate(self.make_for(value, run.graph)))
        self.moment(here, node.locs)
        inner: Held = {number: self.allocate(self.make_for(number, op.body))}
        inner.update((v, run.held[c]) for v, c in zip(captured, op.captures, strict=True))
        kept = list(dict.fromkeys(op.operands))
        for value, init in zip(carried, op.init, strict=True):
            storage = run.held[init]
            if storage.refs == 1 and not storage.resident and init not in op.captures:
                storage.refs = 0  # nobody else waits for it: a trip may free it
                kept.remove(init)
            elif op.trips > 1:
                storage = self.allocate(self.make_for(value, op.body))
            inner[value] = storage
        self.graph(op.body, here, inner)
        outputs = op.body.outputs[int(op.has_condition) :]
        for value, output in zip(node.results, outputs[: len(op.init)], strict=False):
            run.hold(value, inner[output])
        self.leave(op.body, inner)
        return kept

    def peak(self, branch: Graph) -> int:
        """The most that a branch takes when it runs alone."""
        if id(branch) not in self.peaks:
            alone = _AllocationWalk(self.place, self.block, self.peaks)
            alone.has_pool = True
            alone.run(branch)
            self.peaks[id(branch)] = alone.layout().peak_bytes
        return self.peaks[id(branch)]

    def cond(self, node: Node, op: t.Cond, here: tuple[str, ...], run: _RunningGraph) -> None:
        """The branch that takes more."""
        self.moment(here, node.locs)
        branch = max((op.then, op.orelse), key=self.peak)
        inner = {v: run.held[c] for v, c in zip(branch.inputs, op.captures, strict=True)}
        self.graph(branch, here, inner)
        for value, output in zip(node.results, branch.outputs, strict=True):
            run.hold(value, inner[output])
        self.leave(branch, inner)

    def leave(self, region: Graph, inner: Held) -> None:
        """Lets go of a region's outputs: whoever holds them on has taken them."""
        outputs = [inner[v] for v in dict.fromkeys(region.outputs)]
        for storage in outputs:
            storage.refs -= 1
        self.free(outputs)


def _launches(graph: Graph) -> Iterator[list[Node]]:
    """The nodes that run as one. Before kernels are made, the nodes in a row that stand for the
    same model node do, library routines aside: eager execution has a kernel for each operator."""
    if graph.level != Level.graph:
        yield from ([node] for node in graph.nodes)
        return
    alone = (t.Routine, t.Opaque, t.Loop, t.Cond)

    def launch(place: tuple[int, Node]) -> object:
        i, node = place
        return i if isinstance(node.op, alone) else node.locs

    for _, group in groupby(enumerate(graph.nodes), launch):
        yield [node for _, node in group]


class _RunningGraph:
    """One graph while it runs: who holds what, and what shares storage."""

    def __init__(self, graph: Graph, held: Held):
        self.graph, self.held = graph, held
        self.uses = Counter(v for n in graph.nodes for v in dict.fromkeys(n.op.operands))
        self.outputs = set(graph.outputs)
        self.uses.update(self.outputs)
        self.roles: dict[str, MemoryKind] = {name: KIND_OF[role] for name, role in graph.roles}
        self.strided: dict[Value, Strided] = {}  # of values that are not packed
        self.updated = dict(pair for node in graph.nodes for pair in _updated(node))
        self.clipped = set(_clipped(graph))  # gradients that are written over gradients
        for value in self.clipped:
            if (before := self.updated[value]) in self.outputs:
                self.uses[before] -= 1
                self.uses[value] += 1
        self.over = dict(_over(graph, self.updated)) if graph.over else {}

    def hold(self, value: Value, storage: _Stored) -> None:
        storage.refs += self.uses[value]
        if value.name in self.roles and not storage.resident:
            storage.storage = storage.storage._replace(kind=self.roles[value.name])
        self.held[value] = storage

    def lay_out(self, node: Node) -> None:
        """Fused attention writes a token's heads side by side: what it gives, and takes, are
        [.., s, h, f] turned around (the interface of `flash_attn_func`, and what PyTorch's
        scaled_dot_product_attention returns)."""
        if isinstance(node.op, t.Attention | t.AttentionGradient):
            for value in node.results:
                shape = value.type.shape
                if len(shape) >= 4:
                    turned = (*shape[:-3], shape[-2], shape[-3], shape[-1])
                    self.strided[value] = packed(value.type.with_shape(turned)).swapaxes(-3, -2)

    def view(self, node: Node) -> _Stored | None:
        """The storage of the operand that the result is a view of, if it is one."""
        op = node.op
        if isinstance(op, k.View) and (not joins(op) or set(op.args) <= set(self.graph.params)):
            return self.held[op.args[0]]
        if len(op.operands) != 1 or len(node.results) != 1:
            return None
        (first,), (result,) = op.operands, node.results
        layout = [n.op for n in op.body.nodes] if isinstance(op, t.Fused) else [op]
        if not all(isinstance(o, t.Layout) or o.is_same for o in layout):
            return None
        x: Strided | None = self.strided.get(first)
        x = packed(first.type) if x is None else x
        for o in layout:
            x = x if o.is_same else viewed(x, o)
            if x is None:
                return None
        self.strided[result] = x
        return self.held[first]

    def taken_over(self, node: Node, value: Value) -> _Stored | None:
        """The storage that a result is written over, where that can be: the node is its last reader
        and reads each cell before it writes it."""
        taken = self.over.get(value) or self.updated.get(value)
        if taken is None:
            return None
        storage = self.held[taken]
        if storage.resident and value not in self.over and value not in self.clipped:
            return None
        read = [v for v in dict.fromkeys(node.op.operands) if self.held[v] is storage]
        last = storage.refs == len(read)
        return storage if last and all(node.op.may_overwrite(v) for v in read) else None


def joins(op: k.View) -> bool:
    """Whether a view is of several tensors side by side: counted as one of its own, which the parts
    become, unless they are params, which are there already."""
    return any(isinstance(n.op, t.Concat) for n in op.body.nodes)


def _updated(node: Node) -> Iterator[tuple[Value, Value]]:
    """Results of a kernel on lists of tensors, each with what it is written over: PyTorch's
    `_foreach_mul_` and its like work in place, on the first list, and an optimiser's fused kernel
    on its states as well, which are behind the gradients."""
    op = node.op
    if isinstance(op, t.Routine) and op.fn == "multi_tensor" and function_of(op) != "squares":
        lists = dict(op.attrs)["lists"]
        count = len(op.args) // lists if isinstance(lists, int) else 1
        states = op.args[2 * count :]
        yield from zip(node.results, (*op.args[:count], *states), strict=False)
    elif isinstance(op, t.Fused | k.Routine | k.Opaque) and len(op.body.nodes) == 1:
        inner = dict(_updated(op.body.nodes[0]))
        outer = dict(zip(op.body.inputs, op.args, strict=True))
        for value, output in zip(node.results, op.body.outputs, strict=True):
            if output in inner:
                yield value, outer[inner[output]]


def function_of(op: t.Routine) -> t.Scalar | str | tuple[t.Scalar, ...]:
    """What a kernel on lists of tensors does to each."""
    return dict(op.attrs).get("fn", "")


def _clipped(graph: Graph) -> Iterator[Value]:
    """Gradients scaled down to a norm: in PyTorch they are the gradients from then on."""
    for node in graph.nodes:
        body = node.op.body.nodes if isinstance(node.op, t.Fused | k.Routine) else (node,)
        match body:
            case (Node(op=t.Routine("multi_tensor") as op),) if function_of(op) == "times":
                yield from node.results
            case _:
                pass


def _over(graph: Graph, updated: Mapping[Value, Value]) -> Iterator[tuple[Value, Value]]:
    """The values that are written over an input or param: outputs, and what they are views, updates
    or sums over ranks of."""
    before = dict(updated)
    for node in graph.nodes:
        if isinstance(node.op, t.Reshape | t.Transpose | k.View) or node.op.is_same:
            before[node.results[0]] = node.op.operands[0]
        elif isinstance(node.op, k.Collective) and node.op.collective.fn == "all_reduce":
            outer = dict(zip(node.op.body.inputs, node.op.args, strict=True))
            calls = zip(node.results, node.op.collectives, strict=False)
            before.update((v, outer[x.x]) for v, x in calls if x.x in outer)
    for value, taken in zip(graph.outputs, graph.over, strict=True):
        at: Value | None = value
        while taken is not None and at is not None and at.type.nbytes == taken.type.nbytes:
            yield at, taken
            at = before.get(at)


def is_passed_on(op: Op, to: Op) -> bool:
    """Whether one step of an operator takes what another makes as it comes: cell by cell, or a
    reduction what was computed cell by cell. A product, a gather or a scatter reads memory."""
    if isinstance(to, t.Reducing):
        return isinstance(op, t.Pointwise | t.Layout | t.Reducing)
    return isinstance(to, t.Pointwise | t.Layout) or isinstance(op, t.Generating)
