"""Collectives in buckets, and weights gathered ahead of what reads them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from gpuir.ir.build import Builder, begin, within
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import kernel as k
from gpuir.passes.manager import Pass

SUMS = ("all_reduce", "reduce_scatter")
BLOCK = re.compile(r".*?[./]\d+(?=[./])")  # of a location: as far as its first numbered module


@dataclass(frozen=True)
class Bucket(Pass):
    """Joins collectives of one kind and group, as a launch of all of them: up to `bytes` together,
    or with `blocks` those of one numbered module, whatever their bytes.

    Sums wait for the last of their bucket, unless a kernel reads one before (PyTorch's
    DistributedDataParallel, bucket_cap_mb: 25 MiB); without `early` each stays where it is, and not
    right behind what makes its terms. Gathers of weights, and what these read, go
    to the first of their bucket, and `ahead` buckets earlier, so that they are on their way while
    kernels run that come before (FSDP's prefetching, of one module).
    """

    bytes: int = 25 << 20
    blocks: bool = False
    ahead: int = 1
    early: bool = True

    name: ClassVar[str] = "bucket"
    takes: ClassVar[Level | None] = Level.kernel
    gives: ClassVar[Level | None] = Level.kernel

    def __post_init__(self) -> None:
        if self.bytes < 1 or self.ahead < 1:
            raise UsageError(
                "pass 'bucket': bytes and ahead must be at least 1",
                found=f"bytes={self.bytes}, ahead={self.ahead}",
            )

    def run(self, g: Graph) -> Graph:
        b = begin(g, g.level)
        read = {v for n in g.nodes for v in n.op.operands}
        nodes = self._gathered(g)
        late = k.sums_of_gradients(g)
        for n in self._waiting(_early(nodes) if self.early else nodes, read, late):
            b.put(replace(n, op=within(n.op, self.run, b.folded)) if n.op.control else n)
        return b.finish(g.outputs)

    def _gathered(self, g: Graph) -> Iterator[Node]:
        """The nodes, with gathers of weights in buckets, where these are launched."""
        made: dict[Value, int] = {}
        weights: set[Value] = {*g.params}  # and what they alone lead to
        buckets: list[_Bucket] = []
        first: list[int] = []  # node of each bucket
        for i, n in enumerate(g.nodes):
            made.update((v, i) for v in n.results)
            if n.op.control or not weights.issuperset(n.op.operands):
                continue
            weights.update(n.results)
            if isinstance(n.op, k.Collective) and n.op.collective.fn == "all_gather":
                if not buckets or not self._takes(buckets[-1], n, n.op):
                    buckets.append(_Bucket())
                    first.append(i)
                buckets[-1].add(n, n.op)
        before: dict[int, list[Node]] = {}
        moved: set[int] = {made[v] for x in buckets for v in x.results}
        for j, bucket in enumerate(buckets):
            here = before.setdefault(first[max(j - self.ahead, 0)], [])
            for n in bucket.nodes:
                for i in _leading(n, g.nodes, made, moved):
                    here.append(g.nodes[i])
            here.append(bucket.launch())
        for i, n in enumerate(g.nodes):
            yield from before.get(i, ())
            if i not in moved:
                yield n

    def _waiting(
        self, nodes: Iterable[Node], read: Collection[Value], late: Collection[Value]
    ) -> Iterator[Node]:
        """The nodes, with sums in buckets, and what nobody reads, as weights after their update:
        each bucket where its last is. Who reads a sum does not wait for those that are read `late`,
        behind the graph."""
        found = list(nodes)
        filling: dict[tuple[_Kind, bool], _Bucket] = {}
        bucket_of: dict[int, _Bucket] = {}
        last: dict[int, int] = {}  # of each bucket, by identity, the place of its last
        for i, n in enumerate(found):
            for kind in [kind for kind, x in filling.items() if x.is_read(n)]:
                del filling[kind]
            waits = _is_sum(n) or not any(v in read for v in n.results)
            if not isinstance(n.op, k.Collective) or not waits:
                continue
            kind = _kind(n.op), n.results[0] in late
            if kind in filling and not self._takes(filling[kind], n, n.op):
                del filling[kind]
            bucket = bucket_of[i] = filling.setdefault(kind, _Bucket())
            bucket.add(n, n.op)
            last[id(bucket)] = i
        for i, n in enumerate(found):
            if i not in bucket_of:
                yield n
            elif last[id(bucket_of[i])] == i:
                yield bucket_of[i].launch()

    def _takes(self, bucket: _Bucket, n: Node, op: k.Collective) -> bool:
        """Whether a bucket is for one more."""
        if bucket.ops and _kind(bucket.ops[0]) != _kind(op):
            return False
        if bucket.nodes and phase_of(bucket.nodes[0]) != phase_of(n):
            return False
        if self.blocks:
            return _block(bucket.nodes[0]) == _block(n)
        return bucket.bytes + _sent(op) <= self.bytes


def _is_sum(n: Node) -> bool:
    return isinstance(n.op, k.Collective) and n.op.collective.fn in SUMS


def _early(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes, with each sum right behind what gives its terms."""
    found = list(nodes)
    made = {v: i for i, n in enumerate(found) for v in n.results}
    behind: dict[int, list[Node]] = {}
    for n in found:
        if _is_sum(n):
            last = max((made[v] for v in n.op.operands if v in made), default=-1)
            behind.setdefault(last, []).append(n)

    def sums_of(i: int) -> Iterator[Node]:
        """Sums of a node's results, and sums of these."""
        for n in behind.get(i, ()):
            yield n
            yield from sums_of(made[n.results[0]])

    yield from sums_of(-1)
    for i, n in enumerate(found):
        if not _is_sum(n):
            yield n
            yield from sums_of(i)


@dataclass
class _Bucket:
    """Collectives that are launched together."""

    nodes: list[Node] = field(default_factory=list[Node])
    ops: list[k.Collective] = field(default_factory=list[k.Collective])
    results: set[Value] = field(default_factory=set[Value])
    bytes: int = 0

    def add(self, n: Node, op: k.Collective) -> None:
        self.nodes.append(n)
        self.ops.append(op)
        self.results.update(n.results)
        self.bytes += _sent(op)

    def is_read(self, n: Node) -> bool:
        return not self.results.isdisjoint(n.op.operands)

    def launch(self) -> Node:
        """One kernel of all of these, which do not read each other."""
        if len(self.nodes) == 1:
            return self.nodes[0]
        b = Builder(self.ops[0].body.level, "")
        outputs: list[Value] = []
        for op in self.ops:
            new = {v: b.input(v.name, v.type) for v in op.body.inputs}
            for n in op.body.nodes:
                names = [v.name for v in n.results]
                results = b.add(n.op.substitute(new), names, n.locs)
                new.update(zip(n.results, results, strict=True))
            outputs += [new[v] for v in op.body.outputs]
        args = tuple(v for op in self.ops for v in op.args)
        return Node(
            replace(self.ops[0], args=args, body=b.finish(outputs)),
            tuple(v for n in self.nodes for v in n.results),
            tuple(dict.fromkeys(loc for n in self.nodes for loc in n.locs)),
        )


class _Kind(NamedTuple):
    """What collectives of one launch have in common: sums their width, which gathers need not."""

    fn: str
    combine: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    bits: int
    library: str


def _kind(op: k.Collective) -> _Kind:
    x = op.collective
    bits = x.x.type.dtype.bits if x.fn in SUMS else 0
    return _Kind(x.fn, x.combine, x.sizes, x.strides, bits=bits, library=op.library)


def _sent(op: k.Collective) -> int:
    """The larger of what a rank has before and after."""
    before, after = op.args, op.body.outputs
    return max(sum(v.type.nbytes for v in before), sum(v.type.nbytes for v in after))


def _block(n: Node) -> str:
    """The first numbered module that a node is in, by its location."""
    found = BLOCK.match(n.locs[0]) if n.locs else None
    return found[0] if found else ""


def _leading(
    n: Node, nodes: Sequence[Node], made: dict[Value, int], moved: set[int]
) -> Iterator[int]:
    """The nodes that lead to one, first to last, but those that have been moved; they are now."""
    for v in n.op.operands:
        i = made.get(v)
        if i is not None and i not in moved:
            yield from _leading(nodes[i], nodes, made, moved)
            moved.add(i)
            yield i
