"""A graph in parts that lie one after another, for a pipeline of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from gpuir.ir.build import Builder, begin
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Loc, Node, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from gpuir.passes.accumulate import Accumulate
from gpuir.passes.partition.balance import Weigh, work
from gpuir.passes.partition.homes import Homes, module, parts_in_order
from gpuir.passes.partition.sums import Sum, sums_of
from gpuir.passes.partition.update import Updates

PassName = Literal["forward", "backward", "weights", "last", "norm", "update"]


@dataclass(frozen=True)
class PartGraphs:
    """What one part of a model runs, as graphs.

    `forward` and `backward` are of one microbatch, `update` is once a step, and before it `norm`,
    where gradients are clipped to a norm of all of them. `last` is the backward pass of the last
    microbatch where ranks sum gradients, which it does beside. What crosses from part
    to part is under one name on both sides: the outputs `sends` of `forward` are inputs of the next
    part's, the outputs `sends_back` of `backward` of the one before. `saved` are inputs and outputs
    of `forward` that its `backward` reads. With `weights` the backward pass is in two: `backward`
    gives what is sent back, `weights` gradients of weights alone, from what is saved, and from
    the outputs `kept` of `backward`; `last` is then of `weights`.
    """

    forward: Graph
    backward: Graph | None = None
    weights: Graph | None = None
    last: Graph | None = None
    norm: Graph | None = None
    update: Graph | None = None
    sends: tuple[Value, ...] = ()
    sends_back: tuple[Value, ...] = ()
    saved: tuple[Value, ...] = ()
    kept: tuple[Value, ...] = ()

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return tuple(self.passes.values())

    @property
    def passes(self) -> dict[PassName, Graph]:
        """Each graph, under its name, in the order in which they first run."""
        found = {name: getattr(self, name) for name in get_args(PassName)}
        return {name: g for name, g in found.items() if g is not None}


@dataclass(frozen=True)
class SharedGradient:
    """A gradient that several parts have terms of: before they update the weight, each of which has
    a copy, they add up what they have under this name. Or what `norm` gives of a square of a norm,
    which `update` takes of all."""

    value: Value
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """The parts of a model, first to last. `lengths` is what each weighs in forward and backward
    passes, in the unit in which nodes were weighed. `shared` are gradients, `norms` what adds up to
    the norm that all are clipped to: what each `norm` gives, every `update` takes the sum of."""

    parts: tuple[PartGraphs, ...]
    shared: tuple[SharedGradient, ...]
    lengths: tuple[float, ...]
    norms: tuple[SharedGradient, ...] = ()


def partition(
    g: Graph, parts: int, weigh: Weigh | Sequence[Weigh] = work, apart: bool = False
) -> Partition:
    """A graph of level `graph`, forward alone or a training step, in so many consecutive parts, the
    longest of which is as short as can be by `weigh`: one for each part, where they run on several
    kinds of device.

    A training step becomes that of one microbatch: gradients are added up in buffers from one to
    the next (the pass `accumulate`), so a step has the gradient of the sum of the microbatches'
    losses. For that of their mean, `autodiff{loss_scale=...}` is one through their number. With the
    last one, collectives sum gradients over ranks, and behind it the optimiser runs. With `apart`
    gradients of weights are a graph of their own.

    UsageError for a graph that has fewer operators than parts, adds up gradients already, or has an
    optimiser that joins weights of several parts.
    """
    if g.level != Level.graph:
        raise UsageError(
            f"@{g.name} has the level {g.level.name}, but only a graph of "
            "tensor ops can be split into parts"
        )
    if parts < 1:
        raise UsageError("the number of parts must be at least 1", found=f"parts={parts}")
    if any(g.role_of(v) == "gradient" for v in g.params):
        raise UsageError(
            f"@{g.name} already accumulates gradients",
            fix="remove the pass accumulate: the parts of a pipeline accumulate "
            "gradients themselves",
        )
    weighs = [weigh] * parts if callable(weigh) else weigh
    return _Maker(Homes(g, weighs), apart).run()


class _Maker:
    def __init__(self, homes: Homes, apart: bool):
        self.homes, self.g, self.count, self.apart = homes, homes.g, homes.parts, apart
        self.order = {v: i for i, n in enumerate(self.g.nodes) for v in n.results}
        self.named = {v.name: i for v, i in self.order.items()}
        self.params = {v: i for i, v in enumerate(self.g.params)}
        self.roles = dict(self.g.roles)
        self.over = dict(zip(self.g.outputs, self.g.over, strict=True)) if self.g.over else {}
        self.forward = parts_in_order(homes.forward, homes.part, self.count)
        backward = parts_in_order(homes.backward, homes.part, self.count)
        self.sums, gone = sums_of(homes, self.weight_readers(backward))
        homes.sink_views(gone)
        backward = parts_in_order(homes.backward, homes.part, self.count)
        self.backward = [[n for n in nodes if n.results[0] not in gone] for nodes in backward]
        self.extra: list[list[Node]] = [[] for _ in range(self.count)]
        self.called: list[dict[Value, Value]] = [{} for _ in range(self.count)]
        for found in self.sums:
            for term in found.terms:
                self.extra[term.part] += term.nodes
                if term.called is not None:
                    self.called[term.part][term.called] = found.own
        self.own = {found.own for found in self.sums}
        self.roots = {found.gradient for found in self.sums}
        self.is_training = bool(homes.backward or self.sums)
        self.updates = Updates(self.g, self.sums, self.count)

    def weight_readers(self, backward: Sequence[Sequence[Node]]) -> dict[Value, set[int]]:
        """The parts that read each param."""
        found: dict[Value, set[int]] = {v: set() for v in self.params}
        for part, nodes in enumerate(zip(self.forward, backward, strict=True)):
            for node in (*nodes[0], *nodes[1]):
                for v in self.homes.sources(node) & found.keys():
                    found[v].add(part)
        return found

    # -- what each part reads

    def run(self) -> Partition:
        every = range(self.count)
        outputs, others = self.outputs()
        self.forward = [self.pulled(self.forward[p], outputs[p], set()) for p in every]
        made = [{v for n in nodes for v in n.results} for nodes in self.forward]
        self.backward = [
            self.pulled([*self.backward[p], *self.extra[p]], self.owned(p), self.savable(made[p]))
            for p in every
        ]
        reads = [reads_of(nodes, outputs[p]) for p, nodes in enumerate(self.forward)]
        reads_back = [reads_of(nodes) for nodes in self.backward]
        sent: list[list[Value]] = [[] for _ in every]  # from each part to the next
        sent_back: list[list[Value]] = [[] for _ in every]
        self.cross(reads, reads_back, sent, sent_back)
        parts: list[PartGraphs] = []
        for p in every:
            received = sent[p - 1] if p else []
            returned = sent_back[p + 1] if p + 1 < self.count else []
            here = {*made[p], *received, *self.g.inputs}
            wanted = [*reads_back[p], *(v for v in sent_back[p] if v not in returned)]
            saved = [v for v in dict.fromkeys(wanted) if v in here]
            part = self.part(
                p,
                outputs=outputs[p],
                others=others[p],
                received=received,
                returned=returned,
                sends=sent[p],
                sends_back=sent_back[p],
                saved=saved,
            )
            parts.append(part)
        shared = tuple(SharedGradient(s.passed, s.parts) for s in self.sums if len(s.parts) > 1)
        having = tuple(p for p, part in enumerate(parts) if part.norm is not None)
        norms = tuple(SharedGradient(v, having) for v in self.updates.totals)
        return Partition(tuple(parts), shared, self.homes.lengths, norms)

    def outputs(self) -> tuple[list[list[Value]], list[list[Value]]]:
        """The graph's outputs that each part's forward and backward passes give. What no node with
        a home makes, the last part's forward pass gives."""
        forward: list[list[Value]] = [[] for _ in range(self.count)]
        backward: list[list[Value]] = [[] for _ in range(self.count)]
        for v in dict.fromkeys(self.g.outputs):
            if v in self.homes.place:
                forward[self.homes.part[v]].append(v)
            elif v in self.own or v in self.roots:
                continue
            elif v in self.homes.part:
                backward[self.homes.part[v]].append(v)
            elif v in self.params or v in self.g.inputs or v in self.homes.free:
                forward[-1].append(v)
        return forward, backward

    def owned(self, part: int) -> list[Value]:
        """The gradients that a part's backward pass gives, where no node but a free one does."""
        return [s.own for s in self.sums for x in s.terms if x.part == part and not x.called]

    def savable(self, made: set[Value]) -> set[Value]:
        """Of what a forward pass made, what is not as well made again."""
        again = (t.Layout, t.Generating)
        return {
            v
            for v in made
            if v not in self.homes.free or not isinstance(self.homes.producers[v].op, again)
        }

    def pulled(
        self, nodes: Sequence[Node], outputs: Iterable[Value], have: set[Value]
    ) -> list[Node]:
        """Nodes with the free ones that they and outputs read, in order: new ones last."""
        extra = [n for n in nodes if n.results[0] not in self.order]
        found = {n.results[0]: n for n in nodes}
        left = [*outputs, *(v for n in nodes for v in n.op.operands)]
        while left:
            v = left.pop()
            if v in self.homes.free and v not in have:
                node = self.homes.producers[v]
                if node.results[0] not in found:
                    found[node.results[0]] = node
                    left += node.op.operands
        own = sorted((v for v in found if v in self.order), key=self.order.__getitem__)
        return [*(found[v] for v in own), *extra]

    def cross(
        self,
        reads: list[dict[Value, None]],
        reads_back: list[dict[Value, None]],
        sent: list[list[Value]],
        sent_back: list[list[Value]],
    ) -> None:
        """What goes from part to part, through those in between."""
        to: dict[Value, int] = {}
        back_to: dict[Value, int] = {}
        for p in range(self.count):
            for v in (*reads[p], *reads_back[p]):
                home = self.homes.part.get(v)
                if home is not None and home < p and v in self.homes.place:
                    to[v] = p
        for p in reversed(range(self.count)):
            for v in reads_back[p]:
                if (home := self.homes.part.get(v)) is not None and home > p:
                    back_to[v] = p
        for v in sorted(to, key=self.order.__getitem__):
            for p in range(self.homes.part[v], to[v]):
                sent[p].append(v)
        for v in sorted(back_to, key=self.order.__getitem__):
            for p in range(self.homes.part[v], back_to[v], -1):
                sent_back[p].append(v)

    # -- graphs

    def part(
        self,
        p: int,
        *,
        outputs: list[Value],
        others: list[Value],
        received: list[Value],
        returned: list[Value],
        sends: list[Value],
        sends_back: list[Value],
        saved: list[Value],
    ) -> PartGraphs:
        made = {v for n in self.forward[p] for v in n.results}
        unread = self.unread if p == 0 else ()
        forward = self.graph(
            f"part{p}.forward",
            received,
            self.forward[p],
            [*outputs, *sends, *(v for v in saved if v in made)],
            unread,
        )
        if p == 0:
            forward = replace(forward, folded=self.g.folded)
        if not self.is_training:
            return PartGraphs(forward, sends=tuple(sends))
        called = self.called[p]
        nodes = [
            replace(
                n,
                op=n.op.substitute(called),
                results=tuple(called.get(v, v) for v in n.results),
            )
            for n in self.backward[p]
        ]
        sums = [s for s in self.sums if any(x.part == p for x in s.terms)]
        gradients = [s.own for s in sums]
        outside = [*saved, *returned]
        both = self.graph(f"part{p}.backward", outside, nodes, [*gradients, *others, *sends_back])
        both = with_roles(both, gradients)
        norm, update = self.update(p)
        kept: tuple[Value, ...] = ()
        weights = None
        if self.apart:
            both, weights, kept = apart(both, gradients, [*others, *sends_back])
            weights = accumulated(weights)
        backward = accumulated(both)
        return PartGraphs(
            forward,
            backward,
            weights,
            last=self.last(p, weights or backward, [s for s in sums if s.sent]),
            norm=norm,
            update=update,
            sends=tuple(sends),
            sends_back=tuple(sends_back),
            saved=tuple(saved),
            kept=kept,
        )

    def last(self, part: int, g: Graph, sums: Sequence[Sum]) -> Graph | None:
        """A backward pass with collectives that sum what the microbatches have added up, in its
        buffer where that is as large."""
        if not sums:
            return None
        b = begin(g, g.level)
        b.name = f"{self.g.name}.part{part}.last"
        ends = dict(zip(g.outputs, g.over or (None,) * len(g.outputs), strict=True))
        added = {v.name: total for total, v in ends.items() if v is not None}
        for x in sums:
            if x.own.name not in added:  # gradients of weights are apart, but `backward` adds it up
                b.param(x.own.name, x.own.type)
        for node in g.nodes:
            b.put(node)
        for x in sums:
            own = added.get(x.own.name, x.own)
            for node in x.sent:
                b.put(replace(node, op=node.op.substitute({x.own: own})))
            in_place = own.type == x.passed.type
            ends[x.passed] = ends.pop(own, x.own) if in_place else None
            b.roles |= dict.fromkeys((x.own.name, x.passed.name), "gradient")
        found = b.finish(ends, ends.values())
        passed = {x.passed.name for x in sums}
        cuts = (cut for cut in self.g.cuts if cut[0] in passed)
        return replace(found, cuts=(*g.cuts, *cuts))

    @property
    def unread(self) -> tuple[Value, ...]:
        """Params that no part reads."""
        read = {v for n in self.g.nodes for v in n.op.operands}
        return tuple(v for v in self.g.params if v not in read)

    @cached_property
    def output_order(self) -> dict[Value, int]:
        return {v: i for i, v in enumerate(self.g.outputs)}

    def update(self, part: int) -> tuple[Graph | None, Graph | None]:
        """What a part does once a step: its share of a norm, where there is one, and the rest."""
        own = [s for s in self.sums if part in s.parts]
        gradients = [s.passed for s in own]
        once = [n for s in own for n in s.once]
        early, late = self.updates.of(part)
        if not early:
            return None, self.at_the_end(f"part{part}.update", gradients, [*once, *late])
        totals = [v for n in early for v in n.results if v in self.updates.totals]
        for n in early:  # one with fewer terms than the whole graph's has another type
            self.order.setdefault(n.results[0], self.named[n.results[0].name])
        early = [*once, *early]
        made = {v for n in early for v in n.results}
        passed = [v for v in reads_of(late) if v in made and v not in totals]
        norm = self.at_the_end(f"part{part}.norm", gradients, early, [*totals, *passed])
        gradients += [v for v in passed if v in self.roots]
        given = [*passed, *self.updates.totals]
        return norm, self.at_the_end(f"part{part}.update", gradients, late, given=given)

    def at_the_end(
        self,
        name: str,
        gradients: Sequence[Value],
        nodes: Sequence[Node],
        more: Sequence[Value] = (),
        given: Sequence[Value] = (),
    ) -> Graph | None:
        """Nodes that run behind all microbatches: None of what gives no output, and no `more`."""
        made = {v for n in nodes for v in n.results}
        order = self.output_order
        outputs = sorted((v for v in made if v in order), key=order.__getitem__)
        if not outputs and not more:
            return None
        inputs = [*gradients, *given]
        nodes = self.pulled(nodes, outputs, made.union(inputs))
        return with_roles(self.graph(name, inputs, nodes, [*outputs, *more]), gradients)

    def graph(
        self,
        name: str,
        received: Sequence[Value],
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        params: Sequence[Value] = (),
    ) -> Graph:
        """A graph of some nodes: what they read of `received` and of the whole graph's inputs are
        its inputs, its params those that they read, and `params`."""
        made = {v for n in nodes for v in n.results}
        read = {**reads_of(nodes, outputs), **dict.fromkeys(params)}
        b = Builder(Level.graph, f"{self.g.name}.{name}")
        b.inherit(self.g)
        b.folded, b.cuts = [], ()
        names = (v.name for v in (*read, *(v for n in nodes for v in n.results)))
        b.roles = {name: self.roles[name] for name in names if name in self.roles}
        for v in dict.fromkeys((*self.g.inputs, *received)):
            if v in read and v not in made:
                b.input(v.name, v.type)
        for v in sorted((v for v in read if v in self.params), key=self.params.__getitem__):
            b.param(v.name, v.type)
        for node in nodes:
            b.put(node)
        outputs = list(dict.fromkeys(outputs))
        over = [v if (v := self.over.get(o)) in read and o in made else None for o in outputs]
        found = b.finish(outputs, over)
        ends = {v.name for v in (*found.inputs, *found.params, *found.outputs)}
        return replace(found, cuts=tuple(cut for cut in self.g.cuts if cut[0] in ends))


def reads_of(nodes: Iterable[Node], outputs: Iterable[Value] = ()) -> dict[Value, None]:
    """What nodes, and outputs, take that the nodes do not make."""
    nodes = list(nodes)
    made = {v for n in nodes for v in n.results}
    read = (*(v for n in nodes for v in n.op.operands), *outputs)
    return dict.fromkeys(v for v in read if v not in made)


def with_roles(g: Graph, gradients: Sequence[Value]) -> Graph:
    """With these gradients, and no others."""
    names = dict.fromkeys(v.name for v in gradients)
    others = tuple((n, role) for n, role in g.roles if role != "gradient" and n not in names)
    made = {v.name for v in (*g.inputs, *g.params)}.union(
        v.name for n in g.nodes for v in n.results
    )
    return replace(g, roles=(*((n, "gradient") for n in names if n in made), *others))


def accumulated(g: Graph) -> Graph:
    """With its gradients added to those of earlier microbatches."""
    return Accumulate().run(g) if any(g.role_of(v) == "gradient" for v in g.outputs) else g


def apart(
    g: Graph, gradients: Sequence[Value], others: Sequence[Value]
) -> tuple[Graph, Graph, tuple[Value, ...]]:
    """A backward pass without what is for gradients of weights alone, the rest, and what goes from
    the one to the other. That is what leads to the gradients of one operator's weights only, and is
    of its module: the gradient that goes on to the operator before leads to those of others, and
    so, whatever comes before, is early (Qi et al., arXiv 2401.10241, figure 1). What is computed
    again never waits: a checkpointed segment runs when a backward pass first needs something of it
    (torch 2.13: torch/utils/checkpoint.py, `_checkpoint_hook`)."""
    producers = g.producers()
    reach: dict[Value, set[tuple[Loc, ...]]] = {v: {()} for v in others}
    for v in gradients:
        if v in producers:
            reach.setdefault(v, set()).add(producers[v].locs)
    late: list[Node] = []
    early: list[Node] = []
    for node in reversed(g.nodes):
        found = {x for v in node.results for x in reach.get(v, ())}
        own = set(map(module, node.locs))
        is_late = (
            len(found) == 1
            and not own.isdisjoint(module(loc) for x in found for loc in x)
            and phase_of(node) != "recomputed"
        )
        (late if is_late else early).append(node)
        for v in node.op.operands:
            reach.setdefault(v, set()).update(found)
    late.reverse()
    early.reverse()
    wanted = reads_of(late, [v for v in gradients if any(v in n.results for n in late)])
    made = {v for n in early for v in n.results}
    again = [v for v in wanted if v in made and isinstance(producers[v].op, t.Generating)]
    late = [*(producers[v] for v in again), *late]
    kept = tuple(v for v in wanted if v in made and v not in again)
    done = {v for n in late for v in n.results}.difference(again)
    first = some_of(g, early, [*(v for v in g.outputs if v not in done), *kept], "backward")
    return first, some_of(g, late, [v for v in g.outputs if v in done], "weights", kept), kept


def some_of(
    g: Graph, nodes: Sequence[Node], outputs: Sequence[Value], name: str, more: Sequence[Value] = ()
) -> Graph:
    """Some nodes of a graph as one by themselves."""
    read = reads_of(nodes, outputs)
    b = Builder(g.level, g.name.removesuffix("backward") + name)
    b.inherit(g)
    b.cuts = ()
    for v in (*g.inputs, *more):
        if v in read:
            b.input(v.name, v.type)
    for v in g.params:
        if v in read:
            b.param(v.name, v.type)
    for node in nodes:
        b.put(node)
    found = b.finish(dict.fromkeys(outputs), ())
    ends = {v.name for v in (*found.inputs, *found.params, *found.outputs)}
    return replace(found, cuts=tuple(cut for cut in g.cuts if cut[0] in ends))
