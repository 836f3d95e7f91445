"""The sweep from the last node to the first, through loops and branches too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuir.ir.build import Builder, NameTable
from gpuir.ir.errors import GpuirError, ModelError
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.phases import in_phase
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t
from gpuir.passes.gradients import Rule, rows, rule_of
from gpuir.passes.reverse import Reverse
from gpuir.plugins import blamed


def dependent(nodes: Sequence[Node], on: Iterable[Value]) -> set[Value]:
    """The float and complex values that depend on one of those, themselves included."""
    found = set(on)
    for node in nodes:
        if any(v in found for v in node.op.operands):
            found.update(v for v in node.results if v.type.dtype.is_inexact)
    return found


def prepare(nodes: Sequence[Node], needs: set[Value], names: NameTable) -> list[Node]:
    """The nodes with the results that their gradients will read besides their own."""

    def more(node: Node, op: Op) -> Node:
        old = node.results
        types = op.result_types[len(old) :]
        added = (Value(names.fresh(f"{old[0].name}.saved"), type) for type in types)
        return replace(node, op=op, results=(*old, *added))

    prepared: list[Node] = []
    for node in nodes:
        op = node.op
        if any(v in needs for v in op.operands):
            match op:
                case t.Attention(stats=False):
                    node = more(node, replace(op, stats=True))
                case t.Loop(has_condition=False):
                    node = more(node, _LoopGradient(op, needs.__contains__).saving())
                case t.Cond():
                    node = more(node, _Cond(op, needs.__contains__).saving())
                case _:
                    pass
        prepared.append(node)
    return prepared


def sweep(r: Reverse, nodes: Sequence[Node], segments: Sequence[int | None] = ()) -> None:
    """Appends the gradients of prepared nodes, last to first. A segment is run again before its
    first."""
    segments = segments or [None] * len(nodes)
    again: dict[int, dict[Value, Value]] = {}
    for node, segment in zip(reversed(nodes), reversed(segments), strict=True):
        gradients = [r.take(v) for v in node.results]
        if not any(gradients):
            continue
        r.late.update(
            (v, dv) for v, dv in zip(node.results, gradients, strict=True) if v in r.late and dv
        )
        if not any(r.wants(v) for v in node.op.operands):
            continue
        if segment is not None and segment not in again:
            inside = [n for n, s in zip(nodes, segments, strict=True) if s == segment]
            again[segment] = recompute(r, inside)
        copies = again[segment] if segment is not None else {}
        r.b.locs = in_phase(node.locs, "backward")
        try:
            differentiate(r, node.op.substitute(copies), node, copies, gradients)
        except GpuirError as error:
            error.where = error.where or f"{' + '.join(node.locs)}: {node}"
            raise


def recompute(r: Reverse, nodes: Sequence[Node]) -> dict[Value, Value]:
    """Appends copies of the nodes, and gives the copy of each value they make."""
    copies: dict[Value, Value] = {}
    for node in nodes:
        names = [f"{v.name}.again" for v in node.results]
        made = r.b.add(node.op.substitute(copies), names, in_phase(node.locs, "recomputed"))
        copies.update(zip(node.results, made, strict=True))
    r.original.update((new, old) for old, new in copies.items())
    return copies


def differentiate(
    r: Reverse,
    op: Op,
    node: Node,
    copies: Mapping[Value, Value],
    gradients: Sequence[Value | None],
) -> None:
    """Gives the operands of one op their gradients."""
    results = [copies.get(v, v) for v in node.results]
    match op:
        case t.Loop(has_condition=False):
            _LoopGradient(op, r.wants).differentiate(r, results, gradients)
        case t.Cond():
            _Cond(op, r.wants).differentiate(r, results, gradients)
        case _:
            rule = rule_of(op) or _own_rule(op)
            if rule is None:
                ends = " with a condition" if isinstance(op, t.Loop) else ""
                raise ModelError(
                    "gpuir has no gradient of "
                    f"{op.fn if isinstance(op, t.Routine) else op.name}{ends}",
                    fix="train only parameters after this operator (wrt=...), or write "
                    "the operator with simpler ones",
                )
            if gradients[0] is not None:
                rule(r, op, results, gradients[0])


def _own_rule(op: Op) -> Rule | None:
    """The gradient that an op from outside brings with it."""
    own: Callable[..., None] | None = getattr(op, "gradient", None)
    if own is None:
        return None

    def rule(r: Reverse, _: Op, results: Sequence[Value], dy: Value) -> None:
        with blamed(op, f"the gradient of {op.name}"):
            own(r, results, dy)

    return rule


def live(nodes: Sequence[Node], outputs: Collection[Value]) -> list[Node]:
    """Those nodes whose results somebody reads."""
    read, kept = set(outputs), list[Node]()
    for node in reversed(nodes):
        if any(v in read for v in node.results):
            kept.append(node)
            read.update(node.op.operands)
    return kept[::-1]


# ---------------------------------------------------------------------------- regions


@dataclass(frozen=True)
class _Region:
    """The backward pass of a region while it is built: what it reads of the forward pass are
    values of `nodes`, to be saved there, or inputs."""

    body: Graph
    nodes: tuple[Node, ...]
    r: Reverse

    @staticmethod
    def of(body: Graph, needs: set[Value], prepared: bool) -> _Region:
        names = NameTable()
        names.taken.update(v.name for v in body.inputs)
        names.taken.update(v.name for n in body.nodes for v in n.results)
        nodes = body.nodes if prepared else tuple(prepare(body.nodes, needs, names))
        b = Builder(Level.graph, body.name, names=names)
        b.locs = in_phase(nodes[-1].locs if nodes else ("",), "backward")
        return _Region(body, nodes, Reverse(b, needs))

    def reads(self, outputs: Collection[Value]) -> tuple[list[Node], list[Value]]:
        """The nodes that make `outputs`, constants among them, and the values of the forward pass
        that they read."""
        made = {v: n for n in self.nodes for v in n.results}
        nodes = live(self.r.b.nodes, outputs)
        own = {v for n in nodes for v in n.results}
        read = dict.fromkeys(v for n in nodes for v in n.op.operands if v not in own)
        read |= dict.fromkeys(v for v in outputs if v not in own)
        constants = {id(n): n for v in read if (n := made.get(v)) and not n.op.operands}
        known = {v for n in constants.values() for v in n.results}
        known |= {v for v in read if self.r.b.is_input(v)}
        locs = self.r.b.locs
        copies = (replace(n, locs=locs) for n in constants.values())
        return [*copies, *nodes], [v for v in read if v not in known]

    def or_zero(self, gradient: Value | None, like: Value) -> Value:
        return gradient or self.r.constant(like.type)


class _LoopGradient:
    """A loop of known trips and its gradient, which runs through them backwards.

    What a trip's gradient reads is stacked by the forward loop. What the body captures gets the
    sum over all trips; where the body reads it once, as the right factor of a product or by an
    index, that sum is left for one product, or one scatter, after the loop (`late`).
    """

    def __init__(self, op: t.Loop, wants: Callable[[Value], bool]):
        self.op, self.body = op, op.body
        count = len(op.init)
        self.trip, self.carried = op.body.inputs[0], op.body.inputs[1 : 1 + count]
        self.captured = op.body.inputs[1 + count :]
        self.updated = op.body.outputs[:count]
        self.collected = op.body.outputs[count:]
        outer = zip((*op.init, *op.captures), op.body.inputs[1:], strict=True)
        wanted = {inner for v, inner in outer if wants(v)}
        while True:
            self.needs = dependent(op.body.nodes, wanted)
            pairs = zip(self.carried, self.updated, strict=True)
            grown = wanted | {c for c, u in pairs if u in self.needs}
            if grown == wanted:
                break
            wanted = grown
        self.wanted = wanted

    def late_node(self, v: Value) -> Node | None:
        """The node whose gradient by a captured value is left for after the loop."""
        readers = [n for n in self.body.nodes if v in n.op.operands]
        if len(readers) != 1 or v in self.body.outputs:
            return None
        match readers[0].op:
            case t.Matmul(a, b) if b == v and a != v and v.type.rank == 2:
                return readers[0]
            case t.Gather(x, indices, 0) if x == v and indices.type.size == 1:
                return readers[0]
            case _:
                return None

    def build(self, given: Collection[int], prepared: bool) -> _Built:
        """The body of the gradient, where those of `collected` have one."""
        region = _Region.of(self.body, self.needs, prepared)
        r, b = region.r, region.r.b
        captured = [v for v in self.captured if v in self.wanted]
        late = {v: n for v in captured if (n := self.late_node(v))}
        r.needs = self.needs - set(late)
        r.late = {n.results[0]: None for n in late.values()}
        summed = [v for v in captured if v not in late]
        carried = [c for c in self.carried if c in self.wanted]
        back = b.input(f"{self.trip.name}.back", TensorType((), i64))
        inputs = [b.input(f"{v.name}.grad", v.type) for v in (*carried, *summed)]
        stacks = {i: b.input(f"{v.name}.grad", self.stacked(v)) for i, v in self.seeds(given)}
        updated = dict(zip(self.carried, self.updated, strict=True))
        for c, dv in zip(carried, inputs, strict=False):
            r.give(updated[c], dv)
        for i, stack in stacks.items():
            r.give(self.collected[i], b(from_stack(b, stack, back)))
        sweep(r, region.nodes)
        outputs = [region.or_zero(r.take(c), c) for c in carried]
        for v, before in zip(summed, inputs[len(carried) :], strict=True):
            dv = r.take(v)
            outputs.append(r.map("add", before, dv) if dv else before)
        waiting = {n.results[0]: v for v, n in late.items()}
        outputs += [region.or_zero(r.late[y], y) for y in waiting]
        nodes, read = region.reads(outputs)
        factors = [v for n in late.values() if (v := _factor(n.op)) is not None]
        known = {self.trip, *self.captured, *self.collected}
        saved = [v for v in dict.fromkeys((*read, *factors)) if v not in known]
        return _Built(
            self,
            region,
            back,
            nodes,
            outputs,
            read=read,
            saved=saved,
            carried=carried,
            summed=summed,
            late=late,
            stacks=stacks,
        )

    def seeds(self, given: Collection[int]) -> list[tuple[int, Value]]:
        return [(i, v) for i, v in enumerate(self.collected) if i in given and v in self.needs]

    def stacked(self, v: Value) -> TensorType:
        return TensorType((self.op.trips, *v.type.shape), v.type.dtype)

    def saving(self) -> t.Loop:
        """The loop, its body giving what the gradient reads, too."""
        built = self.build(range(len(self.collected)), prepared=False)
        nodes = built.region.nodes
        outputs = (*self.body.outputs, *built.saved)
        return replace(self.op, body=replace(self.body, nodes=nodes, outputs=outputs))

    def differentiate(
        self, r: Reverse, results: Sequence[Value], gradients: Sequence[Value | None]
    ) -> None:
        op, count = self.op, len(self.op.init)
        known = {v: results[count + i] for i, v in enumerate(self.collected)}
        of_collected = {i: dv for i, dv in enumerate(gradients[count:]) if dv is not None}
        built = self.build(of_collected, prepared=True)
        outer = dict(zip(self.body.inputs[1:], (*op.init, *op.captures), strict=True))
        by_carried = dict(zip(self.carried, gradients, strict=False))
        init = [by_carried[c] or r.constant(c.type) for c in built.carried]
        init += [r.constant(v.type) for v in built.summed]
        captures = [of_collected[i] for i in built.stacks]
        body, extra = built.finish(known, outer)
        made = r.b.add(t.Loop(body, op.trips, tuple(init), (*captures, *extra)))
        for v, dv in zip((*built.carried, *built.summed), made, strict=False):
            r.give(outer[v], dv)
        for (v, node), stack in zip(built.late.items(), made[len(init) :], strict=True):
            r.give(outer[v], self.after(r, node, stack, known, outer))

    def after(
        self,
        r: Reverse,
        node: Node,
        stack: Value,
        known: Mapping[Value, Value],
        outer: Mapping[Value, Value],
    ) -> Value:
        """The gradient of what one node captures, from those of all its trips, last to first."""

        def every(v: Value) -> Value:
            """What a value of the body was in each trip."""
            return known[v] if v in known else r.broadcast(outer[v], self.stacked(v).shape)

        shape, rank = stack.type.shape, stack.type.rank
        starts = (self.op.trips - 1, *(0,) * (rank - 1))
        dy = r.b(t.Slice(stack, starts, shape, (-1, *(1,) * (rank - 1))))
        match node.op:
            case t.Matmul(a):
                a, dy = rows(r, every(a)), rows(r, r.cast(dy, a.type.dtype))
                return r.b(t.Matmul(r.turned(a), dy))
            case t.Gather(x, indices):
                trips = self.op.trips
                dy = r.reshape(dy, (trips, *x.type.shape[1:]))
                if indices == self.trip and trips == x.type.shape[0]:
                    return dy
                if indices == self.trip:
                    places = r.b(t.Iota(TensorType((trips, 1), i64)))
                else:
                    places = r.reshape(every(indices), (trips, 1))
                return r.b(t.ScatterND(r.constant(x.type), places, dy, "add"))
            case op:
                raise AssertionError(op.name)


def from_stack(b: Builder, stack: Value, back: Value) -> t.Gather:
    """What the trip gave that `back` counts from the last: at index -1 - back."""
    return t.Gather(stack, b(t.Map("bit_not", (back,))))


def _factor(op: Op) -> Value | None:
    """What else the gradient of a late op reads: the left factor, or the index."""
    return op.a if isinstance(op, t.Matmul) else op.indices if isinstance(op, t.Gather) else None


@dataclass(frozen=True)
class _Built:
    """A loop's gradient, in parts: its nodes read `read` of the forward pass, of which `saved` (and
    what late products read) comes from stacks."""

    loop: _LoopGradient
    region: _Region
    back: Value
    nodes: list[Node]
    outputs: list[Value]
    read: list[Value]
    saved: list[Value]
    carried: list[Value]
    summed: list[Value]
    late: dict[Value, Node]
    stacks: dict[int, Value]

    def finish(
        self, known: Mapping[Value, Value], outer: Mapping[Value, Value]
    ) -> tuple[Graph, list[Value]]:
        """The body, and what it captures besides the gradients that are given."""
        loop, b = self.loop, self.region.r.b
        b.nodes.clear()
        captures: list[Value] = []
        for v in self.read:
            if v in loop.captured:
                b.capture(v)
                captures.append(outer[v])
                continue
            if v == loop.trip:
                op = t.Map("add", (b(t.Map("neg", (self.back,))),), (loop.op.trips - 1,))
            else:
                stack = b.input(f"{v.name}.saved", loop.stacked(v))
                captures.append(known[v])
                op = from_stack(b, stack, self.back)
            b.nodes.append(Node(op, (v,), b.locs))
        b.nodes += self.nodes
        return b.finish(self.outputs), captures


class _Cond:
    """A branch and its gradient, taken by the same predicate. What a branch's gradient reads is a
    result of the forward pass; where the other branch was taken it is zeros that nobody reads."""

    def __init__(self, op: t.Cond, wants: Callable[[Value], bool]):
        self.op = op
        self.wanted = [i for i, v in enumerate(op.captures) if wants(v)]

    def build(
        self, body: Graph, given: Collection[int], prepared: bool
    ) -> tuple[_Region, list[Value], list[Node], list[Value], list[Value]]:
        """The gradient of one branch: its region, the gradients it is given, its nodes, what it
        gives, and what it reads of the forward pass."""
        inner = [body.inputs[i] for i in self.wanted]
        region = _Region.of(body, dependent(body.nodes, inner), prepared)
        r = region.r
        seeds = [r.b.input(f"{i}.grad", body.outputs[i].type) for i in given]
        for i, seed in zip(given, seeds, strict=True):
            r.give(body.outputs[i], seed)
        sweep(r, region.nodes)
        outputs = [region.or_zero(r.take(v), v) for v in inner]
        nodes, read = region.reads(outputs)
        return region, seeds, nodes, outputs, read

    def floats(self) -> list[int]:
        outputs = self.op.then.outputs
        return [i for i, v in enumerate(outputs) if v.type.dtype.is_inexact]

    def saving(self) -> t.Cond:
        """The branch, both sides giving what the gradient of one reads, too."""
        sides = (self.op.then, self.op.orelse)
        built = [self.build(body, self.floats(), prepared=False) for body in sides]
        saved = [
            [v for v in read if v not in body.inputs]
            for body, (*_, read) in zip(sides, built, strict=True)
        ]
        made: list[Graph] = []
        for own, (body, (region, *_)) in enumerate(zip(sides, built, strict=True)):
            b = Builder(Level.graph, body.name, names=region.r.b.names)
            b.locs = region.nodes[-1].locs if region.nodes else region.r.b.locs
            fill = [
                [v if side == own else b(t.Constant(v.type, (0,))) for v in values]
                for side, values in enumerate(saved)
            ]
            nodes = (*region.nodes, *b.nodes)
            made.append(replace(body, nodes=nodes, outputs=(*body.outputs, *fill[0], *fill[1])))
        return replace(self.op, then=made[0], orelse=made[1])

    def differentiate(
        self, r: Reverse, results: Sequence[Value], gradients: Sequence[Value | None]
    ) -> None:
        op = self.op
        given = {i: dv for i, dv in enumerate(gradients) if dv is not None}
        sides = [(body, *self.build(body, given, prepared=True)) for body in (op.then, op.orelse)]
        known = [dict(zip(body.outputs, results, strict=True)) for body in (op.then, op.orelse)]
        reads = [list(dict.fromkeys(side[-1])) for side in sides]
        captures = [*given.values()]
        for (body, *_), own, values in zip(sides, known, reads, strict=True):
            outer = dict(zip(body.inputs, op.captures, strict=True))
            captures += [outer[v] if v in outer else own[v] for v in values]
        branches: list[Graph] = []
        for i, (_, region, _, nodes, outputs, _) in enumerate(sides):
            b = region.r.b
            b.nodes = nodes
            for j, values in enumerate(reads):
                for v in values:
                    b.capture(v) if i == j else b.input(f"{v.name}.other", v.type)
            branches.append(b.finish(outputs))
        made = r.b.add(t.Cond(op.pred, branches[0], branches[1], tuple(captures)))
        for i, dv in zip(self.wanted, made, strict=True):
            r.give(op.captures[i], dv)
