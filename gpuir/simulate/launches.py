"""What a graph of kernels launches, whatever the device: its kernels in order, and its copies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Loc, Node, Value
from gpuir.ir.phases import called_from, phase_of
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.simulate.spans import HOST
from gpuir.targets.profile import NO_HOST, Profile
from gpuir.targets.target import Target

AUTOGRAD = "autograd"  # the lane of the host's other thread
SIZED_BY_DATA = ("compress", "nms", "nonzero", "unique")  # routines whose result has such a size
MOST_SPREAD = 100_000  # launches that are spread over several streams


@dataclass(frozen=True)
class Launch:
    """One kernel on its way to the device, for which op of the model. `kernel` is its place among
    the kernels that are costed. A view launches nothing: it has none, and is `empty`.

    `lane` is the host's thread, which goes on when the kernel has ended if it `waits`: for the size
    of what that computes, or because it runs that itself. A collective has the name of the `group`
    of ranks that it joins, and a stream of its own with those of it. `after` are the places of what
    it waits for where several streams run: see `Launches` and `written_out`.
    """

    path: tuple[str, ...]
    op: Loc
    kernel: int = -1
    kind: str = "map"
    lane: str = HOST
    waits: bool = False
    group: str = ""
    after: tuple[int, ...] = ()

    @property
    def empty(self) -> bool:
        return self.kernel < 0


@dataclass(frozen=True)
class Repeat:
    """A loop: the launches of its body, `trips` times. Where those are all of one op of the model
    (`inner`), a library runs it: no trip is a round of the executor."""

    path: tuple[str, ...]
    body: tuple[Found, ...]
    trips: int
    inner: bool


@dataclass(frozen=True)
class Branch:
    """The launches of each side of a branch; of one alone where it is known which runs."""

    path: tuple[str, ...]
    sides: tuple[tuple[Found, ...], ...]


Found = Launch | Repeat | Branch
Place = Callable[[Node], tuple[int, bool]]


@dataclass(frozen=True)
class Launches:
    """All that a call of a model launches. `into` and `back` are the names and bytes of inputs and
    outputs that a stack which copies any would copy. A launch's `after` are places in `found`."""

    found: tuple[Found, ...] = ()
    into: tuple[tuple[str, int], ...] = ()
    back: tuple[tuple[str, int], ...] = ()
    params: int = 0
    is_decoding: bool = False

    @property
    def is_straight(self) -> bool:
        """Whether they follow each other without loops and collectives."""
        return all(isinstance(x, Launch) and not x.group for x in self.found)

    def host(self, profile: Profile, target: Target | None) -> Profile:
        """The profile with the host that it has for these on a target: on a CPU none, as kernels
        run in the host's own thread, and their times hold the calls. What was measured there,
        releases and all, is in a calibrated target's kernels."""
        if target is not None and (target.is_cpu or target.backtest):
            profile = replace(profile, quicker=None, slower=None)
        if target is not None and target.is_cpu:
            return replace(profile, host=NO_HOST, copies=None, streams=1)
        if profile.decode is not None and self.is_decoding:
            return replace(profile, host=profile.decode)
        return profile


def launches_of(graph: Graph, place: Place, apart: bool) -> Launches:
    """The launches of a graph of kernels. `place` gives the place of a kernel among those that are
    costed, and whether the host runs it; of a loop that of what it costs beyond its kernels, -1
    where that is nothing. Without `apart` nothing is said of what waits for what; where there are
    collectives it is.

    A gradient that is done is handed to its param by an op that launches nothing, PyTorch's
    AccumulateGrad, unless it is added to an earlier one, which the graph has.
    """
    into, back = (tuple((v.name, v.type.nbytes) for v in some) for some in copied(graph))
    nodes = _Nodes(place, _handed(graph))
    apart = apart or any(isinstance(n.op, k.Collective) for n in graph.walk())
    return Launches(
        found=tuple(nodes.apart(graph) if apart else nodes.found(graph, ())),
        into=into,
        back=back,
        params=sum(graph.role_of(v) in ("weight", "buffer") for v in graph.params),
        is_decoding=is_decoding(graph),
    )


def is_decoding(graph: Graph) -> bool:
    """Whether each sequence gets one token: attention there is, and all of it of one query."""
    queries = {n.op.product.q.type.shape[-2] for n in graph.walk() if isinstance(n.op, k.Attention)}
    return queries == {1}


def copied(graph: Graph) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The inputs that go to the device, and the outputs that come back: not what stays there, as
    gradients, an optimiser's state or a cache, nor what takes over its storage."""
    over = graph.over or (None,) * len(graph.outputs)
    return (
        tuple(v for v in graph.inputs if graph.role_of(v) == "input" and v not in over),
        tuple(
            v
            for v, kept in zip(graph.outputs, over, strict=True)
            if kept is None and graph.role_of(v) in ("activation", "input", "weight")
        ),
    )


@dataclass(frozen=True)
class _Nodes:
    """Nodes to launches. `handed` are the gradients that are handed to their params."""

    place: Place
    handed: Collection[str]

    def found(self, graph: Graph, path: tuple[str, ...]) -> Iterator[Found]:
        return whole_ops(x for node in graph.nodes for x in self.node(node, path))

    def apart(self, graph: Graph) -> Iterator[Found]:
        """With what each launch waits for: whose results it reads."""
        made: dict[str, int] = {}  # the place of what makes a value
        count = 0
        for node in graph.nodes:
            after = tuple(dict.fromkeys(made[v.name] for v in node.op.operands if v.name in made))
            first = count
            for x in self.node(node, ()):
                yield replace(x, after=after) if isinstance(x, Launch) else x
                after = (count,)
                count += 1
            made.update((v.name, count - 1 if node.op.control else first) for v in node.results)

    def node(self, node: Node, path: tuple[str, ...]) -> Iterator[Found]:
        here = (*path, node.results[0].name) if node.results else path
        kernel, on_host = self.place(node)
        op = node.op
        if isinstance(op, k.Loop):
            inner = {loc for x in op.body.nodes for loc in x.locs} <= set(node.locs)
            body = _Nodes(self.place, _handed(op.body)).found(op.body, here)
            yield Repeat(here, tuple(body), op.trips, inner)
        elif isinstance(op, k.Cond):
            sides = (_Nodes(self.place, _handed(g)).found(g, here) for g in (op.then, op.orelse))
            yield Branch(here, tuple(map(tuple, sides)))
        if op.control and kernel < 0:
            return
        yield Launch(
            here,
            called_from(node.locs[0]) if node.locs else "",
            kernel,
            kind=op.name.removeprefix("k."),
            waits=on_host or (isinstance(op, k.Routine) and _sizes_itself(op)),
            # PyTorch's autograd runs what is backward, or recomputed for it, in its own thread
            lane=AUTOGRAD if phase_of(node) in ("backward", "recomputed") else HOST,
            group=op.collective.group if isinstance(op, k.Collective) else "",
        )
        for v in node.results if not op.control else ():
            if v.name in self.handed:
                yield Launch(here, f"{v.name} accumulated", lane=AUTOGRAD)


def _handed(graph: Graph) -> frozenset[str]:
    """The gradients that are handed to their params when they are done."""
    if any(v is not None and graph.role_of(v) == "gradient" for v in graph.over):
        return frozenset()
    return frozenset(name for name, role in graph.roles if role == "gradient")


def _sizes_itself(op: k.Routine) -> bool:
    """Whether the size of a result is known only after the kernel, to the host that allocates it
    (PyTorch documentation, torch.nonzero: on CUDA it causes host-device synchronization)."""
    inside = (n.op for region in op.regions for n in region.nodes)
    return any(isinstance(x, t.Routine) and x.fn in SIZED_BY_DATA for x in inside)


def whole_ops(found: Iterable[Found]) -> Iterator[Found]:
    """Without the views of ops that launch kernels too, which are in their T2 and T5."""
    for _, some in groupby(found, lambda x: x.op if isinstance(x, Launch) else x):
        op = list(some)
        yield from [x for x in op if not isinstance(x, Launch) or not x.empty] or op[:1]


def chosen(found: Iterable[Found], seconds: Sequence[float]) -> tuple[Found, ...]:
    """The same, of each branch the side whose kernels take longer: of equals the first."""
    some: list[Found] = []
    for x in found:
        if isinstance(x, Repeat):
            x = replace(x, body=chosen(x.body, seconds))
        elif isinstance(x, Branch):
            sides = (chosen(side, seconds) for side in x.sides)
            x = replace(x, sides=(max(sides, key=lambda side: _total(side, seconds)),))
        some.append(x)
    return tuple(some)


def _total(found: Iterable[Found], seconds: Sequence[float]) -> float:
    return sum(runs * seconds[x.kernel] for x, runs in counted(found) if not x.empty)


def counted(found: Iterable[Found], runs: int = 1) -> Iterator[tuple[Launch, int]]:
    """Each launch once, and how often it runs. Branches have been chosen."""
    for x in found:
        if isinstance(x, Launch):
            yield x, runs
        elif isinstance(x, Repeat):
            yield from counted(x.body, runs * x.trips)
        else:
            yield from counted(x.sides[0], runs)


def written_out(found: Iterable[Found], name: str = "") -> Iterator[Launch]:
    """All launches, loops written out, each with those that it must wait for as places among the
    launches that are not empty: whose results it reads, views in between looked through. A
    collective waits for the kernels launched before it, too: PyTorch's c10d records an event on the
    stream of kernels. A loop, and a branch, is a chain that waits for all before it. `UsageError`
    beyond `MOST_SPREAD` launches of the graph of that `name`."""
    found = tuple(found)
    size = sum(runs for _, runs in counted(found))
    if size > MOST_SPREAD:
        raise UsageError(
            f"@{name}: with its loops unrolled it has {size} launches, "
            "too many to simulate on several streams",
            expected=f"at most {MOST_SPREAD}",
            fix="use a profile with one stream, or fewer trips",
        )
    made: list[tuple[int, ...]] = []  # launches that what an item makes comes from
    count, computed = 0, -1  # launches, the last kernel of them
    for x in found:
        if isinstance(x, Launch):
            after = tuple(dict.fromkeys(i for place in x.after for i in made[place]))
        else:
            after = tuple(range(count))
        for launch in _flat((x,)):
            if launch.group and computed >= 0:
                after = tuple(dict.fromkeys((*after, computed)))
            yield replace(launch, after=after)
            after = after if launch.empty else (count,)
            computed = computed if launch.empty or launch.group else count
            count += not launch.empty
        made.append(after)


def _flat(found: Iterable[Found]) -> Iterator[Launch]:
    for x in found:
        if isinstance(x, Launch):
            yield x
        elif isinstance(x, Repeat):
            for _ in range(x.trips):
                yield from _flat(x.body)
        else:
            yield from _flat(x.sides[0])
