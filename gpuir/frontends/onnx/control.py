"""If, Loop and Scan: taken at load time where that is known, else regions of `t.cond`, `t.loop`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpuir.frontends.emit import Emitter, UnknownValue
from gpuir.frontends.idioms import backwards
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.frontends.onnx.sequence import Grown, Items, NotAppended, SequenceItem, taken, whole
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Graph, Value
from gpuir.ir.types import TensorType, bool_, i64
from gpuir.ops import tensor as t

UNROLLED = 64  # trips of a loop whose values change their shapes
COMPUTED = 1024  # trips of a loop that is computed while loading
UNBOUNDED = 1 << 31  # a trip count from here on stands for "until the condition fails"

Values = tuple[Value, ...]
Result = Value | Items
Results = tuple[Result, ...]


# ---------------------------------------------------------------------------- If


def if_(n: OnnxNode, e: Emitter) -> Any:
    """The branch whose condition is known, else both.

    Branches that give different shapes, or one that does not fit the inputs' shapes, leave a
    choice that numbers alone decide: it is made, and said.
    """
    then, orelse = n.attr("then_branch"), n.attr("else_branch")
    known = n.known(0)
    if known is not None:
        taken, other = (then, orelse) if known.reshape(-1)[0] else (orelse, then)
        n.walk.skip(other)
        return n.walk.inside().enter(taken, ())
    tried = {"then": _branch(n, e, then), "else": _branch(n, e, orelse)}
    good = {name: b for name, b in tried.items() if isinstance(b, ImportedBranch)}
    how = n.walk.how_to_know(n[0])
    if not good:
        raise next(b for b in tried.values() if isinstance(b, ModelError))
    if len(good) == 1:
        ((name, branch),) = good.items()
        error = next(b for b in tried.values() if isinstance(b, ModelError))
        e.assume(
            f"{n.name}: the {name} branch is assumed, because the other branch cannot "
            f"be analysed ({error.what}); {how}"
        )
        return branch.splice(e)
    a, b = good.values()
    types = [[v.type for v in branch.outputs] for branch in (a, b)]
    if types[0] == types[1] and lengths(a.results) == lengths(b.results):
        captures = tuple(dict.fromkeys((*a.emit.captures, *b.emit.captures)))
        op = t.Cond(n[0], a.graph(captures), b.graph(captures), captures)
        return regrouped(a.results, e.add(op))
    if dtypes(a.results) != dtypes(b.results):
        raise n.refused(
            "the two branches return different types",
            "the same",
            f"{_list(types[0])} and {_list(types[1])}",
        )
    name, dearer = max(good.items(), key=lambda item: item[1].flops())
    e.assume(
        f"{n.name}: the branches return different shapes (then {_list(types[0])}, "
        f"else {_list(types[1])}); the slower branch, {name}, is assumed; {how}"
    )
    return dearer.splice(e)


class ImportedBranch:
    """A branch imported as a region."""

    def __init__(self, emit: Emitter, results: Results):
        self.emit, self.results = emit, results
        self.values = flat(emit, results)
        self.outputs = tuple(emit.place(v) for v in self.values)

    def flops(self) -> int:
        return sum(node.op.flops() for node in self.emit.builder.nodes)

    def graph(self, captures: Values) -> Graph:
        return replace(self.emit.builder.finish(self.outputs), inputs=captures)

    def splice(self, e: Emitter) -> Results:
        """The branch's nodes in the graph around it: its captures are values of that graph."""
        for value in self.emit.captures:
            e.place(value)
        for node in self.emit.builder.nodes:
            e.builder.put(node)
            e.own.update(node.results)
        for value, const in self.emit.known.items():
            e.known.setdefault(value, const)
        pairs = zip(self.values, self.outputs, strict=True)
        return regrouped(self.results, tuple(v if e.const_of(v) else o for v, o in pairs))


def flat(e: Emitter, results: Sequence[Result]) -> Values:
    """The tensors among results, those of sequences one after the other."""
    found: list[Value] = []
    for v in results:
        found += [taken(e, x) for x in v] if isinstance(v, Items) else [v]
    return tuple(found)


def regrouped(like: Sequence[Result], values: Sequence[Value]) -> Results:
    """Tensors as results, in sequences where those they are `like` are."""
    left = iter(values)
    return tuple(
        type(v)(next(left) for _ in v) if isinstance(v, Items) else next(left) for v in like
    )


def lengths(results: Sequence[Result]) -> list[int | None]:
    """How many tensors each sequence among results has."""
    return [len(v) if isinstance(v, Items) else None for v in results]


def dtypes(results: Sequence[Result]) -> list[object]:
    """The dtypes of results; of a sequence, those of its tensors."""
    return [{x.type.dtype for x in v} if isinstance(v, Items) else v.type.dtype for v in results]


def _branch(n: OnnxNode, e: Emitter, graph: Any) -> ImportedBranch | ModelError:
    inner, notes = Emitter("", inside=e), n.walk.notes()
    try:
        return ImportedBranch(inner, n.walk.inside(inner).enter(graph, ()))
    except ModelError as error:
        n.walk.forget(notes)
        return error


def _list(types: Sequence[TensorType]) -> str:
    return ", ".join(map(str, types))


# ---------------------------------------------------------------------------- Loop


def loop(n: OnnxNode, e: Emitter) -> Any:
    """A loop that is known in full is computed, one of known trips and steady shapes becomes a
    `t.loop`, and one of few trips whose shapes change is written out. A sequence to which each trip
    appends is collected as any other value is."""
    body, init = n.attr("body"), tuple(v for v in n.inputs[2:] if v is not None)
    steps = n.walk.load.steps_of(body)
    if len(init) != len(n.inputs[2:]) or len(steps.inputs) != 2 + len(init):
        raise n.refused(
            "the body has the wrong number of inputs",
            f"{2 + len(n.inputs[2:])} inputs",
            len(steps.inputs),
        )
    if len(steps.outputs) < 1 + len(init):
        raise n.refused(
            "the body has too few outputs",
            f"a condition and {len(init)} loop-carried values",
            f"{len(steps.outputs)} outputs",
        )
    n.walk.load.loops.add(n.name)
    starts = n.known(1)
    if n.get(1) is not None and starts is not None and not starts.reshape(-1)[0]:
        return _OnnxLoop(n, e, body, init).unrolled(0)
    return _OnnxLoop(n, e, body, init).convert()


class _OnnxLoop:
    def __init__(self, n: OnnxNode, e: Emitter, body: Any, init: Results):
        self.n, self.e, self.body, self.init = n, e, body, init
        self.steps = n.walk.load.steps_of(body)
        self.fixed = [
            _origin(self.steps, self.steps.outputs[1 + k]) == self.steps.inputs[2 + k]
            for k in range(len(init))
        ]

    def convert(self) -> Results:
        bound = self.bound()
        if self.is_known():
            trips = self.count(COMPUTED if bound is None else min(bound, COMPUTED))
            if trips is not None and (trips < COMPUTED or trips == bound):
                return self.unrolled(trips)
        given = self.n.walk.load.trip_counts.get(self.n.name)
        if given is not None and (given < 0 or (bound is not None and given > bound)):
            expected = (
                "0 or more" if bound is None else f"at most {bound}, the trip count in the model"
            )
            raise ModelError(f"--trip-count {self.n.name}={given}", expected=expected)
        trips, why = (given, "by --trip-count") if given is not None else (bound, "from the model")
        if given is None and not self.never_ends():
            most = COMPUTED if bound is None else min(bound, COMPUTED)
            found = self.count(most)  # where the condition is known in each trip
            if found is not None and (found < most or found == bound):
                trips, why = found, "from its condition"
        if trips is None:
            raise ModelError(
                "Loop: the trip count is not known",
                expected="a trip count in the model or in the option --trip-count",
                found=self.unknown(),
                fix=f"--trip-count {self.n.name}=10   (for example)",
            )
        try:
            return self.region(trips, why)
        except (UnknownValue, _Changes, NotAppended) as error:
            if trips > UNROLLED:
                raise ModelError(
                    f"{error.what}, in a loop of {trips} trips",
                    where=error.where,
                    expected=f"shapes that are the same in each trip, or at most {UNROLLED} trips",
                    found=error.found,
                    fix=f"--trip-count {self.n.name}={UNROLLED}   (or fewer)",
                ) from None
            self.e.assume(f"{self.n.name}: {trips} trips, {why}, unrolled")
            return self.unrolled(trips)

    def bound(self) -> int | None:
        """The most trips the model allows, where it says."""
        if self.n.get(0) is None:
            return None
        known = self.n.known(0)
        trips = None if known is None else int(known.reshape(-1)[0])
        return None if trips is None or trips >= UNBOUNDED else max(trips, 0)

    def unknown(self) -> str:
        if self.n.get(0) is None or self.n.known(0) is not None:
            return "a condition that is computed at run time"
        value = self.n[0]
        return f"%{value.name}: {value.type}; {self.n.walk.how_to_know(value)}"

    def is_known(self) -> bool:
        """Whether everything the loop reads is known."""
        free = (self.n.walk.find(name) for name in self.n.walk.free(self.body))
        read = [v for v in (*self.init, *free) if v is not None]
        values = [x for v in read for x in (v if isinstance(v, Items) else (v,))]
        return all(isinstance(v, Value) and self.e.const_of(v) for v in values)

    def arguments(self, e: Emitter, trip: Value, carried: Sequence[Result]) -> Results:
        return (trip, e.constant(True, bool_, "condition"), *carried)

    def count(self, most: int) -> int | None:
        """Trips until the condition is false, found by running what is known; None when the
        condition is not."""
        if self.bound() is None and self.never_ends():
            return None
        scratch, notes = self.e.scratch(), self.n.walk.notes()
        carried = list(self.init)
        try:
            for i in range(most):
                trip = scratch.constant(i, i64)
                arguments = self.arguments(scratch, trip, carried)
                outputs = self.n.walk.inside(scratch).enter(self.body, arguments)
                going = scratch.array_of(outputs[0])
                if going is None:
                    return None
                if not going.reshape(-1)[0]:
                    return i + 1
                carried = outputs[1 : 1 + len(carried)]
        except ModelError:
            return None
        finally:
            self.n.walk.forget(notes)
        return most if self.bound() is not None else None

    def never_ends(self) -> bool:
        """Whether the condition is handed on, or a constant."""
        name = _origin(self.steps, self.steps.outputs[0])
        step = next((s for s in self.steps.each if name in s.outputs), None)
        return step is None or step.op == "Constant"

    def region(self, trips: int, why: str) -> Results:
        """One `t.loop`. Carried values that the body hands on untouched are captured instead, and
        what it appends to a sequence is collected."""
        n, e = self.n, self.e
        inner, notes = Emitter("", inside=e), n.walk.notes()
        names = self.steps.inputs
        trip = inner.input(names[0], TensorType((), i64))
        moving = [k for k, fixed in enumerate(self.fixed) if not fixed]
        init = {k: v for k in moving if isinstance(v := self.init[k], Value)}
        sequences = {k: v for k in moving if isinstance(v := self.init[k], Items)}
        carried = list(self.init)
        for k in sequences:
            carried[k] = Grown()
        for k, v in init.items():
            carried[k] = inner.input(names[2 + k], v.type)
        try:
            outputs = n.walk.inside(inner).enter(self.body, self.arguments(inner, trip, carried))
            for k in moving:
                self.check_steady(names[2 + k], self.init[k], outputs[1 + k])
        except ModelError:
            n.walk.forget(notes)
            raise
        going = inner.array_of(outputs[0])
        if going is not None and not going.reshape(-1)[0]:
            trips = min(trips, 1)
        condition = () if going is not None else (outputs[0],)
        scans = outputs[1 + len(self.init) :]
        appended = {k: flat(inner, (outputs[1 + k],)) for k in sequences}
        given = (*condition, *(outputs[1 + k] for k in init), *scans)
        given += tuple(v for values in appended.values() for v in values)
        graph = inner.builder.finish(tuple(inner.place(v) for v in given))
        if condition and why == "from the model":
            e.assume(
                f"{n.name}: {trips} trips are assumed, the most that are possible: the "
                "condition is computed at run time"
            )
        else:
            e.assume(f"{n.name}: {trips} trips, {why}")
        op = t.Loop(
            body=graph,
            trips=trips,
            init=tuple(init.values()),
            captures=tuple(inner.captures),
            has_condition=bool(condition),
        )
        results = iter(e.add(op))
        last = list(self.init)
        for k in init:
            last[k] = next(results)
        collected = tuple(next(results) for _ in scans)
        for k, before in sequences.items():
            stacks = [next(results) for _ in appended[k]]
            last[k] = before.appended(SequenceItem(x, i) for i in range(trips) for x in stacks)
        return (*last, *collected)

    def check_steady(self, name: str, before: Result, after: Result) -> None:
        """Raises where a trip leaves a carried value of another type."""
        if isinstance(before, Items) and isinstance(after, Grown):
            return
        if isinstance(before, Items) or isinstance(after, Items):
            what = f"Loop: the loop-carried sequence {name!r} is not the same plus more items"
            raise _Changes(what, found="another sequence")
        if before.type != after.type:
            what = f"Loop: the loop-carried value {name!r} changes its type"
            raise _Changes(what, found=f"{before.type}, then {after.type}")

    def unrolled(self, trips: int) -> Results:
        """The body once for each trip; in a known loop everything folds."""
        n, e = self.n, self.e
        carried, collected = tuple(self.init), []
        for i in range(trips):
            arguments = self.arguments(e, e.constant(i, i64), carried)
            outputs = n.walk.inside().enter(self.body, arguments)
            carried = outputs[1 : 1 + len(self.init)]
            collected.append(outputs[1 + len(self.init) :])
            going = e.array_of(outputs[0])
            if going is not None and not going.reshape(-1)[0]:
                break
        if not collected:
            n.walk.skip(self.body)
            return (*carried, *self.nothing())
        return (*carried, *(_stack(e, column) for column in zip(*collected, strict=True)))

    def nothing(self) -> Values:
        """The collected values of no trips: empty, of the types one trip would give."""
        scratch, notes = self.e.scratch(), self.n.walk.notes()
        trip = scratch.input("", TensorType((), i64))
        arguments = self.arguments(scratch, trip, self.init)
        outputs = self.n.walk.inside(scratch).enter(self.body, arguments)
        self.n.walk.forget(notes)
        types = [v.type for v in outputs[1 + len(self.init) :]]
        return tuple(self.e.fill(0, TensorType((0, *x.shape), x.dtype)) for x in types)


class _Changes(ModelError):
    """A carried value has another type after a trip than before."""


def _origin(steps: Any, name: str) -> str:
    """What a name stands for, identities looked through."""
    producers = {out: step for step in steps.each for out in step.outputs}
    while (step := producers.get(name)) is not None and step.op == "Identity":
        name = step.inputs[0]
    return name


def _stack(e: Emitter, values: Sequence[Value]) -> Value:
    """Values of one type along a new axis 0."""
    rows = tuple(e(t.Reshape(v, (1, *v.type.shape))) for v in values)
    return rows[0] if len(rows) == 1 else e(t.Concat(rows, 0))


# ---------------------------------------------------------------------------- Scan


def scan(n: OnnxNode, e: Emitter) -> Values:
    """A `t.loop` over slices; in opset 8 within a loop over the batch."""
    body, count = n.attr("body"), int(n.attr("num_scan_inputs", 0))
    batched = n.version < 9
    given = n.inputs[1:] if batched else n.inputs
    operands = tuple(v for v in given if v is not None)
    if not 0 < count <= len(operands) or len(operands) != len(given):
        raise n.refused("inputs are missing", f"{count} inputs to scan, and the initial states")
    states, scanned = operands[: len(operands) - count], operands[len(operands) - count :]
    results = len(n.walk.load.steps_of(body).outputs) - len(states)
    s = _Scan(n, body, results, batched)
    if not batched:
        return s.over_sequence(n.walk, e, states, scanned)
    if n.get(0) is not None:
        e.assume(f"{n.name}: every sequence is assumed to have its full length")
    batch = operands[0].type.shape[0]
    outer = Emitter("", inside=e)
    item = outer.input(f"{n.name}/batch", TensorType((), i64))
    states, scanned = (
        tuple(outer(t.Gather(v, item, 0)) for v in group) for group in (states, scanned)
    )
    outputs = s.over_sequence(n.walk.inside(outer), outer, states, scanned)
    graph = outer.builder.finish(tuple(outer.place(v) for v in outputs))
    return e.add(t.Loop(graph, batch, (), tuple(outer.captures)))


class _Scan:
    def __init__(self, n: OnnxNode, body: Any, results: int, batched: bool):
        self.n, self.body = n, body
        count = int(n.attr("num_scan_inputs", 0))
        name = "directions" if batched else "scan_input_directions"
        self.reverse_in = n.attr(name, (0,) * count)
        self.axes_in = n.attr("scan_input_axes", (0,) * count)
        self.reverse_out = n.attr("scan_output_directions", (0,) * results)
        self.axes_out = n.attr("scan_output_axes", (0,) * results)

    def over_sequence(self, walk: Any, e: Emitter, states: Values, scanned: Values) -> Values:
        n = self.n
        axes = [
            n.from_front(axis, v.type.rank) for axis, v in zip(self.axes_in, scanned, strict=True)
        ]
        lengths = {v.type.shape[axis] for axis, v in zip(axes, scanned, strict=True)}
        if len(lengths) != 1:
            found = ", ".join(str(v.type) for v in scanned)
            raise ModelError(
                "Scan: the scanned inputs have different lengths", expected="one", found=found
            )
        (trips,) = lengths
        inner = Emitter("", inside=e)
        names = walk.load.steps_of(self.body).inputs
        if len(names) != len(states) + len(scanned):
            raise ModelError(
                "Scan: the body has the wrong number of inputs",
                expected=str(len(states) + len(scanned)),
                found=str(len(names)),
            )
        trip = inner.input(f"{n.name}/trip", TensorType((), i64))
        carried = tuple(inner.input(name, v.type) for name, v in zip(names, states, strict=False))
        slices: list[Value] = []
        for v, axis, reverse in zip(scanned, axes, self.reverse_in, strict=True):
            last = inner.constant(max(trips - 1, 0), i64)
            index = inner.map("sub", last, trip) if reverse else trip
            slices.append(inner(t.Gather(v, index, axis)))
        outputs = walk.inside(inner).enter(self.body, (*carried, *slices))
        graph = inner.builder.finish(tuple(inner.place(v) for v in outputs))
        e.assume(f"{n.name}: {trips} trips, the length of the scanned inputs")
        results = e.add(t.Loop(graph, trips, tuple(states), tuple(inner.captures)))
        last, stacked = results[: len(states)], results[len(states) :]
        rows = zip(stacked, self.axes_out, self.reverse_out, strict=True)
        return (*last, *(self.arrange(e, *row) for row in rows))

    def arrange(self, e: Emitter, x: Value, axis: int, reverse: int) -> Value:
        """The collected slices, newest first if `reverse`, along `axis`."""
        shape, rank = x.type.shape, x.type.rank
        if reverse and shape[0] > 0:
            x = backwards(e, x, 0)
        axis = self.n.from_front(axis, rank)
        if axis == 0:
            return x
        rest = list(range(1, rank))
        return e(t.Transpose(x, (*rest[:axis], 0, *rest[axis:])))


# ---------------------------------------------------------------------------- SequenceMap


def sequence_map(n: OnnxNode, e: Emitter) -> Any:
    """The body once for each item of the first sequence: on it, on the item at its place of each
    other sequence, and on tensors as they are."""
    body = n.attr("body")
    first, *others = (whole(n, v) if isinstance(v, Items) else v for v in n.inputs)
    if not isinstance(first, Items):
        raise n.refused("the first input is not a sequence", found=first)
    if any(isinstance(v, Items) and len(v) != len(first) for v in others):
        raise n.refused("the sequences have different lengths")
    rows: list[Results] = []
    for i, item in enumerate(first):
        more = (taken(e, v[i]) if isinstance(v, Items) else v for v in others)
        rows.append(n.walk.inside().enter(body, (taken(e, item), *more)))
    return tuple(Items(column) for column in zip(*rows, strict=True)) or (Items(),) * len(n.outputs)


# ---------------------------------------------------------------------------- optionals


def has_element(n: OnnxNode, e: Emitter) -> Value:
    """Whether there is an operand: optional types are refused, so one that is there has one."""
    return e.constant(n.get(0) is not None, bool_)


def get_element(n: OnnxNode, e: Emitter) -> Value:
    return n[0]


CONVERTERS: dict[str, Converter] = {
    "If": if_,
    "Loop": loop,
    "OptionalGetElement": get_element,
    "OptionalHasElement": has_element,
    "Scan": scan,
    "SequenceMap": sequence_map,
}
