"""torch's operators on graphs: branches and loops. Attention is in `flex`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import fx

from gpuir.frontends.emit import Emitter
from gpuir.frontends.torch.dims import Dims
from gpuir.frontends.torch.pointwise import mapped
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, bool_, i64
from gpuir.ops import tensor as t

COUNTED = 1024  # trips that are found by computing a condition while loading

Values = tuple[Any, ...]


class HigherOrderWalk(Protocol):
    """What these operators ask of the walk that meets them: to run the graphs that they are
    given."""

    @property
    def emit(self) -> Emitter: ...
    @property
    def dims(self) -> Dims: ...
    @property
    def trip_counts(self) -> Mapping[str, int]: ...
    @property
    def loops(self) -> set[str]: ...

    def run(self, module: fx.GraphModule, given: Sequence[Any]) -> tuple[Any, ...]:
        """What the graph gives for these placeholders."""
        ...

    def inside(self, emit: Emitter) -> HigherOrderWalk:
        """The walk over a graph inside, which writes to an emitter of its own."""
        ...


def branch(
    walk: HigherOrderWalk,
    node: fx.Node,
    pred: Any,
    then: fx.GraphModule,
    orelse: fx.GraphModule,
    operands: Sequence[Any] = (),
) -> Values:
    """torch.cond: the branch that is known to be taken, else both, as regions."""
    if not isinstance(pred, Value):
        return walk.run(then if pred else orelse, operands)
    made = [region(walk, lambda w, m=m: w.run(m, operands)) for m in (then, orelse)]
    captures = tuple(dict.fromkeys(v for inner, _ in made for v in inner.captures))
    a, b = (replace(inner.builder.finish(out), inputs=captures) for inner, out in made)
    return walk.emit.add(t.Cond(pred, a, b, captures))


def region(
    walk: HigherOrderWalk,
    fill: Callable[[HigherOrderWalk], Sequence[Any]],
    inner: Emitter | None = None,
) -> tuple[Emitter, tuple[Value, ...]]:
    """What a graph inside gives, in an emitter of its own."""
    inner = inner or Emitter("", inside=walk.emit)
    made = fill(walk.inside(inner))
    return inner, tuple(inner.place(as_value(inner, v)) for v in made)


def as_value(e: Emitter, x: Any) -> Value:
    """A number of the program as a scalar."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool | int):
        return e.constant(x, bool_ if isinstance(x, bool) else i64)
    raise ModelError(
        "a value that the loop carries is neither a tensor nor an integer", found=repr(x)
    )


# ---------------------------------------------------------------------------- loops


def loop(
    walk: HigherOrderWalk,
    trips: int,
    init: Sequence[Value],
    body: Callable[
        [HigherOrderWalk, Value, Sequence[Value]], tuple[Value | None, Sequence[Any], Sequence[Any]]
    ],
) -> Values:
    """A `t.loop`; `body` gives, of a trip's number and what is carried, whether to go on, what is
    carried on, and what is collected."""
    inner = Emitter("", inside=walk.emit)
    trip = inner.input("trip", TensorType((), i64))
    carried = [inner.input(f"carried.{i}", v.type) for i, v in enumerate(init)]
    conditions: list[Value] = []

    def fill(walk: HigherOrderWalk) -> Sequence[Any]:
        going, after, collected = body(walk, trip, carried)
        conditions.extend([] if going is None else [going])
        after = [as_value(inner, v) for v in after]
        for before, v in zip(carried, after, strict=True):
            if v.type != before.type:
                raise ModelError(
                    "a loop-carried value changes its type",
                    expected=str(before.type),
                    found=str(v.type),
                )
        return (*conditions, *after, *collected)

    inner, outputs = region(walk, fill, inner)
    graph = inner.builder.finish(outputs)
    return walk.emit.add(
        t.Loop(
            body=graph,
            trips=trips,
            init=tuple(init),
            captures=tuple(inner.captures),
            has_condition=bool(conditions),
        )
    )


def while_loop(
    walk: HigherOrderWalk,
    node: fx.Node,
    test: fx.GraphModule,
    body: fx.GraphModule,
    carried: Sequence[Any],
    additional: Sequence[Any] = (),
) -> Values:
    """So many trips as the condition says, where it can be computed now; else as many as are told,
    each with its condition."""
    walk.loops.add(node.name)
    given = walk.trip_counts.get(node.name)
    counted = count(walk, test, body, carried, additional) if given is None else None
    trips = counted if given is None else given
    if trips is None or trips < 0:
        raise ModelError(
            "while_loop: the trip count is not known",
            found="a condition that is computed at run time" if trips is None else str(trips),
            fix=f"--trip-count {node.name}=10   (for example)",
        )
    init = tuple(as_value(walk.emit, v) for v in carried)
    if not trips:
        return init
    how = "by --trip-count" if counted is None else "from its condition"
    walk.emit.assume(f"{node.name}: {trips} trips, {how}")

    def step(walk: HigherOrderWalk, trip: Value, before: Sequence[Value]) -> Any:
        after = walk.run(body, (*before, *additional))
        (going,) = walk.run(test, (*after, *additional))
        return as_value(walk.emit, going), after, ()

    return loop(walk, trips, init, step)


def count(
    walk: HigherOrderWalk,
    test: fx.GraphModule,
    body: fx.GraphModule,
    carried: Sequence[Any],
    additional: Sequence[Any],
) -> int | None:
    """Trips until the condition fails, where that can be computed now: by what of the body the
    condition depends on."""
    wanted = wanted_by(test, body, len(carried))
    short = only(body, wanted)
    scratch = walk.inside(walk.emit.scratch())
    now = list(carried)
    for trips in range(COUNTED):
        (going,) = scratch.run(test, (*now, *additional))
        if isinstance(going, Value):
            array = scratch.emit.array_of(going)
            if array is None:
                return None
            going = bool(array)
        if not going:
            return trips
        for i, v in zip(sorted(wanted), scratch.run(short, (*now, *additional)), strict=True):
            now[i] = v
    return None


def wanted_by(test: fx.GraphModule, body: fx.GraphModule, carried: int) -> set[int]:
    """Which carried values the condition depends on, also by way of others."""
    wanted = read_by(test, None, carried)
    while (more := wanted | read_by(body, wanted, carried)) != wanted:
        wanted = more
    return wanted


def read_by(module: fx.GraphModule, outputs: set[int] | None, carried: int) -> set[int]:
    """Which of the first placeholders these outputs are computed from; all outputs for None."""
    found = module.graph.output_node().args[0]
    results = found if isinstance(found, list | tuple) else (found,)
    stack = [n for i, n in enumerate(results) if outputs is None or i in outputs]
    seen: set[fx.Node] = set()
    while stack:
        at = stack.pop()
        if isinstance(at, fx.Node) and at not in seen:
            seen.add(at)
            stack += at.all_input_nodes
    places = module.graph.find_nodes(op="placeholder")
    return {i for i, n in enumerate(places[:carried]) if n in seen}


def only(module: fx.GraphModule, outputs: set[int]) -> fx.GraphModule:
    """The graph of these outputs alone."""
    graph = fx.Graph()
    found: Any = graph.graph_copy(module.graph, {})
    graph.output(tuple(found[i] for i in sorted(outputs)))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def scan(
    walk: HigherOrderWalk,
    node: fx.Node,
    combine: fx.GraphModule,
    init: Sequence[Value],
    xs: Sequence[Value],
    additional: Sequence[Any] = (),
) -> Values:
    """combine(carried, x[i]) gives what is carried on, and a row of each result."""

    def step(walk: HigherOrderWalk, trip: Value, before: Sequence[Value]) -> Any:
        rows = [walk.emit(t.Gather(x, trip, 0)) for x in xs]
        made = walk.run(combine, (*before, *rows, *additional))
        return None, made[: len(init)], made[len(init) :]

    return loop(walk, xs[0].type.shape[0], init, step)


def map_rows(
    walk: HigherOrderWalk,
    node: fx.Node,
    body: fx.GraphModule,
    xs: Sequence[Value],
    additional: Sequence[Any] = (),
) -> Values:
    """The body of each row by itself."""
    return scan(walk, node, body, (), xs, additional=additional)


# ---------------------------------------------------------------------------- numbers


PLAIN = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.mod: "mod",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
    operator.eq: "eq",
    operator.ne: "ne",
}


def arithmetic(e: Emitter, target: Any, args: Sequence[Any]) -> Any:
    """An integer that a loop carries, computed with others; None for what is not known here."""
    fn = PLAIN.get(target)
    return None if fn is None else mapped(e, fn, *args, dtype=i64)


HIGHER: dict[str, Callable[..., Values]] = {
    "cond": branch,
    "while_loop": while_loop,
    "scan": scan,
    "map_impl": map_rows,
}
