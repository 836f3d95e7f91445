"""Several ranks at once: each runs its graph in a thread of its own, and collectives are where they
wait for each other."""

# numpy's stubs leave many types partly unknown
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from threading import Condition

import numpy as np

from gpuir.interp.arrays import Array, NoMeaning, to_numpy_dtype
from gpuir.interp.tensor import Meaning, Operands
from gpuir.ir.graph import Cut, Graph, Op
from gpuir.ops import tensor as t

WAIT_S = 60.0  # after which a rank that nobody joins gives up


@dataclass
class World:
    """What ranks leave for each other: under each group's how-manieth call, what each has given."""

    left: dict[object, dict[int, Array]] = field(default_factory=dict[object, dict[int, Array]])
    changed: Condition = field(default_factory=Condition)
    failed: BaseException | None = None  # of the first rank that did

    def exchange(self, key: object, rank: int, ranks: Sequence[int], x: Array) -> list[Array]:
        """What every rank of a group has given, in the group's order."""
        with self.changed:
            given = self.left.setdefault(key, {})
            given[rank] = x
            self.changed.notify_all()
            here = self.changed.wait_for(lambda: self.failed or len(given) == len(ranks), WAIT_S)
            if self.failed or not here:
                raise NoMeaning("some ranks of a group did not reach a collective")
            return [given[r] for r in ranks]

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()


@dataclass
class Member:
    """A rank of a world, and how often each of its groups has met."""

    world: World
    rank: int
    met: dict[object, int] = field(default_factory=dict[object, int])

    def exchange(self, op: t.Collective, x: Array) -> tuple[int, list[Array]]:
        """The rank's place in the group, and what every rank of it has given."""
        ranks = t.members(self.rank, op.sizes, op.strides)
        key = (op.fn, ranks)
        self.met[key] = self.met.get(key, 0) + 1
        return ranks.index(self.rank), self.world.exchange(
            (key, self.met[key]), self.rank, ranks, x
        )


_member: ContextVar[Member | None] = ContextVar("member", default=None)


def run_ranks(
    work: Callable[[Mapping[str, Array]], dict[str, Array]],
    values: Sequence[Mapping[str, Array]],
) -> list[dict[str, Array]]:
    """What `work` gives on each rank, of the rank's own values. The ranks run at the same time."""
    world = World()

    def one(rank: int) -> dict[str, Array]:
        token = _member.set(Member(world, rank))
        try:
            return work(values[rank])
        except BaseException as error:
            world.fail(error)
            raise
        finally:
            _member.reset(token)

    with ThreadPoolExecutor(len(values)) as pool:
        futures = [pool.submit(one, rank) for rank in range(len(values))]
    if world.failed is not None:
        raise world.failed
    return [future.result() for future in futures]


def scattered(graph: Graph, values: Mapping[str, Array]) -> list[dict[str, Array]]:
    """What each rank of a graph has of its inputs and params, given all of them."""
    ends = (*graph.inputs, *graph.params)
    found = [{v.name: values[v.name] for v in ends} for _ in range(graph.ranks)]
    for rank, own in enumerate(found):
        for name, cut in graph.cuts:
            if name in own:
                group, n = _along(graph, rank, cut)
                own[name] = _own(own[name], cut, group.index(rank), n)
    return found


def gathered(graph: Graph, outputs: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """All of each output, as each rank's group has it together."""
    found = [dict(own) for own in outputs]
    for v in graph.outputs:
        for cut in reversed(graph.cuts_of(v)):
            parts = [own[v.name] for own in found]
            for rank, own in enumerate(found):
                group, n = _along(graph, rank, cut)
                own[v.name] = _joined([parts[r] for r in group], cut, n)
    return found


def _along(graph: Graph, rank: int, cut: Cut) -> tuple[tuple[int, ...], int]:
    """The ranks that a value is cut over, and how many they are."""
    stride = 1
    for axis, n in graph.mesh:
        if axis == cut.group:
            return t.members(rank, (n,), (stride,)), n
        stride *= n
    raise NoMeaning(f"the mesh has no axis {cut.group}")


def _own(x: Array, cut: Cut, place: int, n: int) -> Array:
    edges = np.cumsum(cut.parts)[:-1] if cut.parts else []
    packed = np.split(x, edges, cut.axis)
    return np.concatenate([np.split(piece, n, cut.axis)[place] for piece in packed], cut.axis)


def _joined(parts: Sequence[Array], cut: Cut, n: int) -> Array:
    edges = np.cumsum(cut.parts)[:-1] // n if cut.parts else []
    packed = zip(*(np.split(x, edges, cut.axis) for x in parts), strict=True)
    return np.concatenate([piece for row in packed for piece in row], cut.axis)


def _here(op: Op) -> Member:
    member = _member.get()
    if member is None:
        raise NoMeaning(f"gpuir cannot compute {op.name} with numpy on one rank alone")
    return member


COMBINE: dict[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def _collective(op: t.Collective, at: Operands) -> Array:
    place, given = _here(op).exchange(op, at(op.x))
    n = len(given)
    match op.fn:
        case "all_reduce":
            return _combined(op, given)
        case "reduce_scatter":
            return np.split(_combined(op, given), n, op.axis)[place]
        case "all_gather":
            return np.concatenate(given, op.axis)
        case "all_to_all":
            return np.concatenate([np.split(x, n, op.axis)[place] for x in given], op.to)
        case "broadcast":
            return given[0]
        case "shift":
            return given[place - 1]
        case _:
            return at(op.x)


def _combined(op: t.Collective, given: Sequence[Array]) -> Array:
    """Floats are summed in 32 bits or more."""
    dtype = to_numpy_dtype(op.x.type.dtype)
    wide = np.float32 if op.x.type.dtype.is_float and op.x.type.dtype.bits < 32 else dtype
    combine = COMBINE[op.combine]
    return reduce(combine, [x.astype(wide) for x in given]).astype(dtype)


def _shard(op: t.Shard, at: Operands) -> Array:
    member = _here(op)
    ranks = t.members(member.rank, op.sizes, op.strides)
    return np.split(at(op.x), len(ranks), op.axis)[ranks.index(member.rank)]


RANKS: dict[type[Op], Meaning] = {t.Collective: _collective, t.Shard: _shard}
