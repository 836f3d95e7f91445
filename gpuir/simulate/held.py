"""What a rank of a pipeline holds at its fullest, by the order in which it runs microbatches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuir.ir.graph import Graph
from gpuir.simulate.layout import KIND_OF, MEMORY_KINDS, MemoryKind
from gpuir.simulate.memory import Memory, by_kind, memory
from gpuir.simulate.microbatches import Order, last_passes
from gpuir.stacks.allocators import BLOCK, rounded
from gpuir.targets.target import Target


@dataclass(frozen=True)
class PartBytes:
    """Bytes of a part of a model on its rank.

    `params` are there all the time, by name: what they hold, and how much. `saved` is what a
    forward pass leaves for its backward pass; `later` what a backward pass leaves, of that and of
    its own, for gradients of weights that come later. `needs` is what a pass takes at its peak
    besides params, and besides what an earlier pass has left for it.
    """

    params: Mapping[str, tuple[MemoryKind, int]] = field(repr=False)
    saved: int
    later: int
    needs: Mapping[str, int]


def beside_gradients(held: Memory) -> tuple[dict[MemoryKind, int], int]:
    """What a graph holds at its fullest by kind, and what its allocator takes, where all gradients
    are there from the start: those of earlier microbatches, to which a later one adds its own."""
    live = held.live.copy()
    row = MEMORY_KINDS.index("gradients")
    live[row] = live[row].max()
    total = live.sum(axis=0)
    at = int(total.argmax())
    return by_kind(live[:, at]), held.reserved_bytes + int(total[at]) - held.peak_bytes


def part_bytes(
    passes: Mapping[str, Graph],
    saved: Collection[str],
    kept: Collection[str] = (),
    target: Target | None = None,
    called: Mapping[str, Mapping[str, str]] | None = None,
) -> PartBytes:
    """Of a part's lowered graphs, by the kind of task that runs each. `saved` are the names of what
    `forward` has or makes that is read later, `kept` of what `backward` makes for `weights`. Where
    a graph was lowered for another part, `called` has the part's names of its inputs and outputs.

    A pass lets go of what was left for it after its last reader, as PyTorch's autograd does; what
    the gradients of weights read all waits for them.
    """
    params: dict[str, tuple[MemoryKind, int]] = {}
    needs: dict[str, int] = {}
    left = {*saved, *kept}
    names = called or {}

    def among(kind: str, wanted: Collection[str]) -> set[str]:
        """The graph's own names of what the part has under one of these."""
        g, own = passes[kind], names.get(kind, {})
        return {v.name for v in (*g.inputs, *g.outputs) if own.get(v.name, v.name) in wanted}

    last, late = passes.get("last"), set[str]()  # by the part's names
    if "weights" in passes:
        own = names.get("weights", {})
        late = {own.get(v.name, v.name) for v in passes["weights"].inputs} & left
    summed = 0  # what `last` gives the update in no buffer
    if last is not None:
        over = last.over or (None,) * len(last.outputs)
        own = (v for v, x in zip(last.outputs, over, strict=True) if x is None)
        summed = sum(rounded(v.type.nbytes, BLOCK) for v in own if last.role_of(v) == "gradient")
    for kind, g in passes.items():
        is_backward = kind in ("backward", "weights", "last")
        given = among(kind, left) & {v.name for v in g.inputs} if is_backward else set[str]()
        spent = given - among(kind, late) if kind == "backward" else given
        own = params_of((g,))
        there = sum(n for _, n in own.values())
        there += sum(rounded(v.type.nbytes, BLOCK) for v in g.inputs if v.name in given)
        if kind in ("norm", "update"):  # gradients are inputs, which other passes have as params
            there += sum(rounded(v.type.nbytes, BLOCK) for v in g.inputs) - summed
        needs[kind] = max(memory(g, target, spent=spent).peak_bytes - there, 0)
        params |= own
    forward, backward = passes["forward"], passes.get("backward")
    later = _left(forward, among("forward", late)) if late else 0
    if backward is not None and late:
        later += _left(backward, among("backward", late & set(kept)))
    whole = _left(forward, among("forward", saved)) if backward else 0
    return PartBytes(params, whole, later, needs)


def params_of(graphs: Iterable[Graph]) -> dict[str, tuple[MemoryKind, int]]:
    """The params of graphs by name: what they hold, and how much."""
    found: dict[str, tuple[MemoryKind, int]] = {}
    for g in graphs:
        for v in g.params:
            found[v.name] = KIND_OF[g.role_of(v)], rounded(v.type.nbytes, BLOCK)
    return found


def _left(g: Graph, names: Collection[str]) -> int:
    """The bytes of what a graph leaves behind for later, of its inputs and results: views take
    none of their own."""
    outputs = tuple(v for v in g.outputs if v.name in names)
    m = memory(replace(g, outputs=outputs, over=()))
    held: dict[int, int] = {}
    for place, size in m.events:
        held[place] = held.get(place, 0) + size
    gone = {v.name for v in (*g.params, *(v for v in g.inputs if v.name not in names))}
    return sum(n for place, n in held.items() if m.layout.storages[place].name not in gone)


def held_bytes(order: Order, chunks: Sequence[PartBytes]) -> dict[MemoryKind, int]:
    """What a rank holds at its fullest, by kind: of its chunks the params, and under `activations`
    the most that microbatches in flight have left, and the pass that runs needs."""
    found: dict[MemoryKind, int] = {}
    for kind, size in {k: x for part in chunks for k, x in part.params.items()}.values():
        found[kind] = found.get(kind, 0) + size
    now = most = 0
    apart, last = any(task.kind == "weights" for task in order), last_passes(order)
    for task in order:
        part = chunks[task.chunk]
        kind = "last" if task in last and "last" in part.needs else task.kind
        most = max(most, now + part.needs.get(kind, 0))
        match task.kind:
            case "forward":
                now += part.saved
            case "backward":
                now -= part.saved - (part.later if apart else 0)
            case "weights":
                now -= part.later
            case "sums" | "norm" | "update":
                pass
    found["activations"] = most
    return found
