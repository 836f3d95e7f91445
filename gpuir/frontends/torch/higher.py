"""torch's operators on graphs: branches, loops, and attention with functions of its own."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast
from gpuir.frontends.torch.dims import Dims
from gpuir.frontends.torch.pointwise import mapped
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, bool_, i64
from gpuir.ops import tensor as t

COUNTED = 1024  # trips that are found by computing a condition while loading
SCORES = 2**22  # of one head, that a mask is looked at in: so many rows of it
LEAST, MOST = -1e4, 1e4  # scores that a function of scores is tried on

Values = tuple[Any, ...]


class Walk(Protocol):
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

    def inside(self, emit: Emitter) -> Walk:
        """The walk over a graph inside, which writes to an emitter of its own."""
        ...


def branch(
    walk: Walk,
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
    walk: Walk, fill: Callable[[Walk], Sequence[Any]], inner: Emitter | None = None
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
    walk: Walk,
    trips: int,
    init: Sequence[Value],
    body: Callable[
        [Walk, Value, Sequence[Value]], tuple[Value | None, Sequence[Any], Sequence[Any]]
    ],
) -> Values:
    """A `t.loop`; `body` gives, of a trip's number and what is carried, whether to go on, what is
    carried on, and what is collected."""
    inner = Emitter("", inside=walk.emit)
    trip = inner.input("trip", TensorType((), i64))
    carried = [inner.input(f"carried.{i}", v.type) for i, v in enumerate(init)]
    conditions: list[Value] = []

    def fill(walk: Walk) -> Sequence[Any]:
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
    walk: Walk,
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

    def step(walk: Walk, trip: Value, before: Sequence[Value]) -> Any:
        after = walk.run(body, (*before, *additional))
        (going,) = walk.run(test, (*after, *additional))
        return as_value(walk.emit, going), after, ()

    return loop(walk, trips, init, step)


def count(
    walk: Walk,
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
    walk: Walk,
    node: fx.Node,
    combine: fx.GraphModule,
    init: Sequence[Value],
    xs: Sequence[Value],
    additional: Sequence[Any] = (),
) -> Values:
    """combine(carried, x[i]) gives what is carried on, and a row of each result."""

    def step(walk: Walk, trip: Value, before: Sequence[Value]) -> Any:
        rows = [walk.emit(t.Gather(x, trip, 0)) for x in xs]
        made = walk.run(combine, (*before, *rows, *additional))
        return None, made[: len(init)], made[len(init) :]

    return loop(walk, xs[0].type.shape[0], init, step)


def map_rows(
    walk: Walk,
    node: fx.Node,
    body: fx.GraphModule,
    xs: Sequence[Value],
    additional: Sequence[Any] = (),
) -> Values:
    """The body of each row by itself."""
    return scan(walk, node, body, (), xs, additional)


# ---------------------------------------------------------------------------- attention


def flex_attention(
    walk: Walk,
    node: fx.Node,
    q: Value,
    k: Value,
    v: Value,
    score_mod: fx.GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    options: Any = None,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Values:
    """One kernel, as torch.compile makes it. What its functions say of scores is found by running
    them: a causal mask, a window, a soft cap. What is none of these is said, and left out."""
    e = walk.emit
    e.assume(f"{node.name}: one kernel, as torch.compile makes for flex_attention")
    cap = softcap(score_mod, score_buffers)
    if cap is None:
        work = sum(n.op == "call_function" for n in score_mod.graph.nodes)
        e.assume(
            f"{node.name}: score_mod is not applied; its {work} operations "
            "for each score are counted as free"
        )
    seen = visible(block_mask[-1], mask_buffers, q.type.shape, k.type.shape)
    if seen is None:
        seen = kept_blocks(e, block_mask, q.type.shape[-2], k.type.shape[-2])
        e.assume(f"{node.name}: the form of its mask is unknown: {seen.text}")
    op = t.Attention(
        *(q, k, v, None, float(scale)),
        causal=seen.causal,
        window=seen.window,
        softcap=cap or 0.0,
        stats=True,
    )
    y, stats = e.add(op)
    result, sums, largest = node.meta["val"]
    stats = mapped(e, "mul", stats.type.dtype, stats, 1 / math.log(2))  # of base 2
    found = [cast(e, y, walk.dims.type(result).dtype), cast(e, stats, walk.dims.type(sums).dtype)]
    return *found, e.fill(0, walk.dims.type(largest))


class Seen:
    """Which keys a query sees: all, those up to itself, or those within a window behind it."""

    def __init__(self, causal: bool = False, window: int | None = None, text: str = ""):
        self.causal, self.window, self.text = causal, window, text


def visible(
    mask_mod: fx.GraphModule, buffers: Sequence[Any], q: Sequence[int], k: Sequence[int]
) -> Seen | None:
    """What a mask leaves, by its rows, few of them where there are many; None where it is none of
    the forms known, or differs from head to head, or depends on numbers that are not known."""
    rows, keys = q[-2], k[-2]
    count = max(1, min(rows, SCORES // max(keys, 1)))
    at = torch.linspace(0, rows - 1, count).round().long()[:, None]
    behind = torch.arange(keys)[None, :]
    shown = [
        answer(mask_mod, (*(torch.tensor(i) for i in ends), at, behind, *buffers))
        for ends in {(0, 0), (q[0] - 1, q[1] - 1)}
    ]
    if any(x is None or not torch.equal(x, shown[0]) for x in shown):
        return None
    mask = torch.broadcast_to(shown[0], (count, keys))
    apart = at - behind
    if bool(mask.all()):
        return Seen()
    if torch.equal(mask, apart >= 0):
        return Seen(causal=True)
    window = int(apart[mask].max()) if bool(mask.any()) else -1
    if window >= 0 and torch.equal(mask, (apart >= 0) & (apart <= window)):
        return Seen(causal=True, window=window)
    return None


def answer(module: fx.GraphModule, args: Sequence[Any]) -> Any:
    """What the function gives for real numbers; None where they are not known, or where it does
    more than compute with what it is given: it may come from a file."""
    if not all(map(is_arithmetic, module.graph.nodes)):
        return None
    try:
        found = module(*args)
        found = found[0] if isinstance(found, list | tuple) else found
        return found.cpu() if isinstance(found, torch.Tensor) and not found.is_meta else None
    except Exception:  # whatever a function of the user's stumbles over
        return None


def is_arithmetic(node: fx.Node) -> bool:
    """Whether a node of such a function computes each cell from the same cells of others, looks
    numbers up, or makes a single one."""
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    value = node.meta.get("val")
    single = isinstance(value, torch.Tensor) and value.numel() == 1
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target is torch.ops.aten.index.Tensor or single


def softcap(score_mod: fx.GraphModule, buffers: Sequence[Any]) -> float | None:
    """0 for a function that leaves scores alone, c for c tanh(score / c); None for any other."""
    scores = torch.linspace(LEAST, MOST, 4097, dtype=torch.float64)
    indices = (torch.arange(4097) % n for n in (2, 3, 7, 11))  # no two alike
    found = answer(score_mod, (scores, *indices, *buffers))
    if found is None:
        return None
    if torch.equal(found, scores):
        return 0.0
    cap = float(found[-1])
    bent = torch.broadcast_to(found, scores.shape)
    fits = cap > 0 and torch.allclose(bent, cap * torch.tanh(scores / cap), rtol=1e-6)
    return cap if fits else None


def kept_blocks(e: Emitter, block_mask: Sequence[Any], rows: int, keys: int) -> Seen:
    """A window with as many keys a query as the blocks that are visited have; all of them where
    that is not known."""
    counts = [
        e.array_of(block_mask[i]) if isinstance(block_mask[i], Value) else None for i in (2, 4)
    ]
    if counts[0] is None:
        return Seen(text="all blocks are computed")
    columns = -(-keys // int(block_mask[-2]))
    visited = sum(float(c.mean()) for c in counts if c is not None)
    share = min(1.0, visited / columns)
    text = f"{share:.1%} of the blocks are computed, as for a sliding window with this many keys"
    return Seen(True, max(round(share * keys) - 1, 0), text)


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
    return None if fn is None else mapped(e, fn, i64, *args)


HIGHER: dict[str, Callable[..., Values]] = {
    "cond": branch,
    "while_loop": while_loop,
    "scan": scan,
    "map_impl": map_rows,
    "flex_attention": flex_attention,
}
