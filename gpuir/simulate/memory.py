"""How much device memory a graph takes from moment to moment, and who holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from gpuir.ir.door import TEXT, many, of_type, takes, whole
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import GRAPH, Graph, Level, Node, Op, Role, Value
from gpuir.ir.notes import Tile
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.strides import Strided, packed, viewed
from gpuir.stacks.allocators import BLOCK, UNLIMITED, find_allocator, reserved_beside, rounded
from gpuir.targets.profile import profile_of
from gpuir.targets.target import Target

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
MIB = 1 << 20
CONTEXT_BYTES = 512 * MIB  # assumed: the CUDA context and the libraries' code, once loaded
DRIVER_SHARE = 0.015  # assumed: what the driver keeps of a GPU's memory for itself


def by_kind(bytes_: NDArray[np.int64]) -> dict[MemoryKind, int]:
    """Bytes of each kind, of an array in the order of `MEMORY_KINDS`."""
    return {kind: int(n) for kind, n in zip(MEMORY_KINDS, bytes_, strict=True)}


class Moment(NamedTuple):
    """The time while a node runs: its results are there, its operands still. `path` names the
    node as a schedule does; it is empty before the first node."""

    path: tuple[str, ...]
    node: Node | None


class Holder(NamedTuple):
    """One allocation: the value it was made for (empty for workspace), its kind and its bytes."""

    name: str
    kind: MemoryKind
    bytes: int


@dataclass(frozen=True, eq=False)
class Memory:
    """What a graph holds while it runs, node after node.

    `live` are bytes by kind (a row each, as in `MEMORY_KINDS`) and moment. `events` are the
    allocations made and freed in order, by their place in `holders`, with their bytes, negative
    when freed; `tops` says for each moment how many have been by then. `allocator` is that of the
    stack, and `available_bytes` what the device has for it, if there is a device.
    """

    moments: tuple[Moment, ...]
    live: NDArray[np.int64]
    holders: tuple[Holder, ...]
    events: tuple[tuple[int, int], ...]
    tops: tuple[int, ...]
    available_bytes: int | None = None
    allocator: str = "caching"

    def __repr__(self) -> str:
        has = self.available_bytes
        of = "" if has is None else f" of {has:,} available"
        return f"<Memory: {self.peak_bytes:,} bytes at the peak{of}>"

    @cached_property
    def total(self) -> NDArray[np.int64]:
        """Bytes at each moment."""
        return self.live.sum(axis=0)

    @cached_property
    def at(self) -> int:
        """The moment of the peak, the first one if there are several."""
        return int(self.total.argmax())

    @property
    def peak_bytes(self) -> int:
        return int(self.total[self.at])

    @property
    def peak(self) -> Moment:
        return self.moments[self.at]

    @property
    def parts(self) -> dict[MemoryKind, int]:
        """The bytes of each kind at the peak."""
        return by_kind(self.live[:, self.at])

    @cached_property
    def largest(self) -> tuple[Holder, ...]:
        """Who holds memory at the peak, the most first."""
        held: dict[int, Holder] = {}
        for place, size in self.events[: self.tops[self.at]]:
            if size < 0:
                del held[place]
            elif size:
                held[place] = self.holders[place]
        return tuple(sorted(held.values(), key=lambda holder: -holder.bytes))

    @cached_property
    def reserved_bytes(self) -> int:
        """What the stack's allocator takes from the device: more than the peak, because free memory
        is in pieces."""
        limit = UNLIMITED if self.available_bytes is None else self.available_bytes
        weights = {i for i, holder in enumerate(self.holders) if holder.kind == "weights"}
        return find_allocator(self.allocator)(self.events, weights, limit)

    @property
    def spare_bytes(self) -> int | None:
        """What stays free of the device's memory, negative when it does not fit; None without a
        device."""
        if self.available_bytes is None:
            return None
        return self.available_bytes - self.reserved_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough; None without a device."""
        return None if self.spare_bytes is None else self.spare_bytes >= 0


def available_bytes(target: Target) -> int:
    """The memory that a process may allocate: all, but for the driver's share and the context. Of
    a MIG slice the driver states what it leaves. Of a CPU's memory, all."""
    if target.is_cpu:
        return target.dram.bytes
    if target.slice is not None:
        return target.dram.bytes - CONTEXT_BYTES
    return round(target.dram.bytes * (1 - DRIVER_SHARE)) - CONTEXT_BYTES


@takes(
    graph=GRAPH,
    target=of_type(Target, "a target", "gpuir.load_target('a100')"),
    block=whole(1),
    spent=many(TEXT),
)
def memory(
    graph: Graph, target: Target | None = None, block: int = BLOCK, spent: Collection[str] = ()
) -> Memory:
    """What a graph holds from moment to moment: params and inputs all the time, a result until its
    last reader is done, outputs to the end. Inputs that nobody needs again, the names in `spent`,
    are there as long as results are.

    At level `graph` every model node allocates its results, as eager execution does, but for what
    PyTorch makes a view; from `fused` on every launch does, but for `k.view`. An output over an
    input takes no memory where it can be written in place. Of a loop one trip counts, of a branch
    the larger. Sizes are multiples of `block`; 1 gives the bytes of the tensors. What the stack's
    libraries reserve beside on `target` counts where it is known.
    """
    profile = profile_of(graph)
    walk = Walk(block, reserved_beside(profile.workspace, target), {})
    walk.run(graph, spent)
    return walk.result(profile.allocator, None if target is None else available_bytes(target))


# ---------------------------------------------------------------------------- workspace


def workspace_bytes(op: Op, tile: Tile | None) -> int:
    """What a kernel needs beside operands and results while it runs.

    Partial sums in f32 where blocks share a sum; of attention the log-sum-exp of every row, unless
    that is a result already, and of its gradient the sum of every row and dQ, all f32 (Dao:
    FlashAttention-2, 2023, algorithms 1 and 2); of a mixture of experts the rows of both products
    and of the activation, which vLLM's `fused_moe.py` holds as three caches at once. cuDNN's choice
    of algorithms is not known: nothing is counted for it.
    """
    mix = op.experts if isinstance(op, k.Experts) else op
    if isinstance(mix, t.Experts):
        cells = sum(v.type.shape[1] for v in mix.weights) + mix.inter
        return mix.rows * cells * mix.result_types[0].dtype.bits // 8
    if isinstance(op, k.AttentionGradient):
        op = op.gradient
    if isinstance(op, t.AttentionGradient):
        return 4 * (prod(op.q.type.shape[:-1]) + op.q.type.size)
    if isinstance(op, t.Attention | k.Attention) and (tile is None or tile.split == 1):
        return 4 * prod(op.q.type.shape[:-1]) if len(op.result_types) == 1 else 0
    if tile is None or tile.split == 1 or not op.contraction:
        return 0
    nest = op.nest
    return 4 * tile.split * prod(n for d, n in nest.dims.items() if d not in nest.reduced)


# ---------------------------------------------------------------------------- the walk


@dataclass(eq=False, slots=True)
class Storage:
    """Bytes that several values may share. `refs` counts readers and outputs still to come."""

    id: int
    name: str
    bytes: int
    kind: MemoryKind
    resident: bool
    refs: int = 0
    live: bool = False


Held = dict[Value, Storage]


class Walk:
    """Runs graphs in their order and notes what is allocated and freed. `peaks` has, by identity,
    the most that a branch takes when it runs alone: found once, whoever asks."""

    def __init__(self, block: int, pool_bytes: int, peaks: dict[int, int]):
        self.block, self.pool_bytes, self.peaks = block, pool_bytes, peaks
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []
        self.moments: list[Moment] = []
        self.tops: list[int] = []  # for each moment how many events have been by then

    def run(self, graph: Graph, spent: Collection[str] = ()) -> None:
        """Runs a graph from its first moment, when its inputs and params are there."""
        ends = (*graph.inputs, *graph.params)
        held = {
            v: self.allocate(self.make_for(v, graph, resident=v.name not in spent)) for v in ends
        }
        self.moment((), None)
        self.graph(graph, (), held)

    def peak(self, branch: Graph) -> int:
        """The most that a branch takes when it runs alone."""
        if id(branch) not in self.peaks:
            alone = Walk(self.block, 0, self.peaks)
            alone.run(branch)
            self.peaks[id(branch)] = alone.result().peak_bytes
        return self.peaks[id(branch)]

    def result(self, allocator: str = "", available: int | None = None) -> Memory:
        made = sum(size for _, size in self.events if size > 0)
        if made > UNLIMITED:
            raise ModelError(
                "all tensors together take more memory than gpuir can count",
                expected=f"at most {UNLIMITED} bytes",
                found=f"{made} bytes",
            )
        kinds = np.array([MEMORY_KINDS.index(s.kind) for s in self.storages], np.int64)
        events = np.array(self.events, np.int64).reshape(-1, 2)
        live = np.zeros((len(MEMORY_KINDS), len(events) + 1), np.int64)
        live[kinds[events[:, 0]], np.arange(1, len(events) + 1)] = events[:, 1]
        return Memory(
            moments=tuple(self.moments),
            live=live.cumsum(axis=1)[:, self.tops],
            holders=tuple(Holder(s.name, s.kind, s.bytes) for s in self.storages),
            events=tuple(self.events),
            tops=tuple(self.tops),
            allocator=allocator,
            available_bytes=available,
        )

    # -- storages

    def make(self, size: int, kind: MemoryKind, name: str = "", resident: bool = False) -> Storage:
        """A storage that is not allocated yet."""
        storage = Storage(len(self.storages), name, rounded(size, self.block), kind, resident)
        self.storages.append(storage)
        return storage

    def make_for(self, value: Value, graph: Graph, resident: bool = False) -> Storage:
        return self.make(value.type.nbytes, KIND_OF[graph.role_of(value)], value.name, resident)

    def allocate(self, storage: Storage) -> Storage:
        storage.live = True
        self.events.append((storage.id, storage.bytes))
        return storage

    def free(self, storages: Iterable[Storage]) -> None:
        """Frees those that nobody will read."""
        for storage in storages:
            if storage.live and not storage.refs and not storage.resident:
                storage.live = False
                self.events.append((storage.id, -storage.bytes))

    def moment(self, path: tuple[str, ...], node: Node | None) -> None:
        self.moments.append(Moment(path, node))
        self.tops.append(len(self.events))

    # -- graphs

    def graph(self, graph: Graph, path: tuple[str, ...], held: Held) -> None:
        """Runs a graph. `held` has the storages of its inputs and params, and at the end those of
        everything; outputs are still referred to."""
        run = _Run(graph, held)
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

    def launch(self, nodes: list[Node], path: tuple[str, ...], run: _Run) -> None:
        """Nodes of one launch, or of one operator that runs alone: what passes between its steps
        in registers is never stored."""
        made: dict[Storage, Op] = {}
        read: list[Storage] = []
        stored: set[Storage] = set()
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
        if self.pool_bytes and any(node.op.contraction for node in nodes):
            self.allocate(self.make(self.pool_bytes, "workspace", resident=True))
            self.pool_bytes = 0
        extra = self.workspace(nodes)
        self.moment((*path, nodes[-1].results[0].name), nodes[-1])
        self.free([*extra, *read, *made])

    def workspace(self, nodes: list[Node]) -> list[Storage]:
        """What a launch needs while it runs, allocated."""
        own = sum(workspace_bytes(node.op, node.tile) for node in nodes)
        return [self.allocate(self.make(own, "workspace"))] if own else []

    def loop(self, node: Node, op: t.Loop, here: tuple[str, ...], run: _Run) -> list[Value]:
        """One trip, a later one where there are several: what it starts from is the last trip's.
        Gives the operands that the loop still holds after it."""
        number, *inputs = op.body.inputs
        carried, captured = inputs[: len(op.init)], inputs[len(op.init) :]
        stacks = node.results[len(op.init) :]
        for value in stacks:
            run.hold(value, self.allocate(self.make_for(value, run.graph)))
        self.moment(here, node)
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

    def cond(self, node: Node, op: t.Cond, here: tuple[str, ...], run: _Run) -> None:
        """The branch that takes more."""
        self.moment(here, node)
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


class _Run:
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

    def hold(self, value: Value, storage: Storage) -> None:
        storage.refs += self.uses[value]
        if value.name in self.roles and not storage.resident:
            storage.kind = self.roles[value.name]
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

    def view(self, node: Node) -> Storage | None:
        """The storage of the operand that the result is a view of, if it is one."""
        op = node.op
        if isinstance(op, k.View) and (not joins(op) or set(op.args) <= set(self.graph.params)):
            return self.held[op.args[0]]
        if len(op.operands) != 1 or len(node.results) != 1:
            return None
        (first,), (result,) = op.operands, node.results
        layout = [n.op for n in op.body.nodes] if isinstance(op, t.Fused) else [op]
        if not all(isinstance(o, t.Layout) or is_same(o) for o in layout):
            return None
        x: Strided | None = self.strided.get(first)
        x = packed(first.type) if x is None else x
        for o in layout:
            x = x if is_same(o) else viewed(x, o)
            if x is None:
                return None
        self.strided[result] = x
        return self.held[first]

    def taken_over(self, node: Node, value: Value) -> Storage | None:
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
        return storage if last and all(is_in_place(node.op, v) for v in read) else None


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
        if isinstance(node.op, t.Reshape | t.Transpose | k.View) or is_same(node.op):
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


def is_same(op: Op) -> bool:
    """Whether the result is the operand itself, or its bytes under another dtype."""
    match op:
        case t.Map("identity"):
            return True
        case t.Cast(x):
            return op.result_types[0].dtype == x.type.dtype
        case t.Bitcast(x):
            return op.result_types[0].shape == x.type.shape
        case _:
            return False


def _readers(op: t.Fused | k.BodyKernel, value: Value) -> Iterator[tuple[Value, Op]]:
    """The ops of a body that read an operand, each with what the operand is called there."""
    for inner, outer in zip(op.body.inputs, op.args, strict=True):
        if outer == value:
            yield from ((inner, n.op) for n in op.body.nodes if inner in n.op.operands)


def is_in_place(op: Op, value: Value) -> bool:
    """Whether a kernel may write its result where it reads `value`: cell by cell, or updates to
    what is there. A product may over an operand of its epilogue; a routine is taken to, and NCCL
    sums in place where both buffers are one."""
    match op:
        case k.Gemm(a, b):
            return value not in (a, b, *op.weights)
        case k.Conv(x, w):
            return value not in (x, w, *op.weights)
        case k.Map() | k.Scatter() | k.Routine() | k.Opaque() | t.Routine() | t.Opaque():
            return True
        case t.Fused():
            return all(is_in_place(reader, v) for v, reader in _readers(op, value))
        case k.Collective():
            return op.collective.fn == "all_reduce"
        case k.BodyKernel():
            return all(
                isinstance(reader, t.Scattering) and reader.operands.count(v) == 1 and reader.x == v
                for v, reader in _readers(op, value)
            )
        case _:
            return isinstance(op, t.Pointwise | t.Scattering)
