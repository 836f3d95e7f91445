"""What a model's kernels come to whatever the device: all that latency and memory need of a graph,
small enough to keep for thousands of graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gpuir.cost.habits import Kernel, Release, release_of
from gpuir.cost.host import Hosted, hosted
from gpuir.cost.reading import among
from gpuir.ir import records
from gpuir.ir.graph import Graph, Node
from gpuir.ir.sizes import by_form, is_recorded
from gpuir.ops import kernel as k
from gpuir.simulate.launches import Launches, launches_of
from gpuir.simulate.layout import MemoryLayout, layout_of
from gpuir.store import digest
from gpuir.targets.profile import profile_of
from gpuir.targets.support import dtypes_of, nodes_refused, reason, without_kernel


@dataclass(frozen=True)
class Program:
    """A model's kernels under a profile, whatever the device. `refused` is why nothing of it can be
    said: the stack does not take the model, or the model those sizes. `dtypes` are those of its
    values, and `assumed` what was taken for granted.

    `works` are the kernels that differ, and `keys` tell them from all others, in any program.
    Launches and allocations name kernels by their place: works first, then those that the host's
    CPU runs (`hosted`).
    """

    model: str
    profile: str
    dtypes: tuple[str, ...] = ()
    refused: str = ""
    works: tuple[Kernel, ...] = ()
    hosted: tuple[Hosted, ...] = ()
    launches: Launches = field(default_factory=Launches)
    layout: MemoryLayout = field(default_factory=MemoryLayout)
    assumed: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def program_of(graph: Graph, on_cpu: bool = False) -> Program:
    """The program of a graph of level kernel. That for CPUs knows the weights, which are in their
    caches."""
    profile = profile_of(graph)
    made = Program(graph.name, graph.profile or "ideal", tuple(sorted(dtypes_of(graph))))
    if (error := nodes_refused(graph, profile)) is not None:
        return replace(made, refused=reason(error))
    release = release_of(profile, graph) or Release()
    weights = k.HeldWeights.of(graph) if on_cpu else k.HeldWeights()
    known: dict[Kernel, int] = {}
    kernels = [
        (id(n), release.kernel(n.op, among(n.op, weights)))
        for n in graph.walk()
        if isinstance(n.op, k.KernelOp) and not isinstance(n.op, k.View)
    ]
    with by_form():
        works = {key: known.setdefault(kernel, len(known)) for key, kernel in kernels}
    missing = {} if on_cpu or profile.fallback is None else without_kernel(graph, profile)
    on_host = hosted(graph, missing.keys()) if missing else {}
    places = {v: len(known) + i for i, v in enumerate(on_host)}

    def place(n: Node) -> tuple[int, bool]:
        if n.results and n.results[0] in places:
            return places[n.results[0]], True
        return works.get(id(n), -1), False

    return replace(
        made,
        works=tuple(known),
        hosted=tuple(on_host.values()),
        launches=launches_of(graph, place, profile.streams > 1),
        layout=layout_of(graph, lambda n: works[id(n)]),
        assumed=graph.assumed,
        keys=() if is_recorded() else _keys(known),
    )


def with_keys(program: Program) -> Program:
    """A program of numbers, of which those with symbols have none."""
    return replace(program, keys=_keys(program.works))


def _keys(works: Iterable[Kernel]) -> tuple[str, ...]:
    return tuple(digest(records.written(w)) for w in works)


# ---- as text -----------------------------------------------------------------------------------


def written(program: Program) -> str:
    """A program as text, from which `read` makes the same again. Its first line has the keys of its
    kernels: who only looks costs up reads no more."""
    return f"{' '.join(program.keys)}\n{records.written(replace(program, keys=()))}"


def read(text: str) -> Program:
    """What `written` wrote."""
    program: Program = records.read(text.partition("\n")[2])
    return replace(program, keys=tuple(keys_of(text)))


def keys_of(text: str) -> list[str]:
    """The keys of the kernels of a program that `written` wrote."""
    return text.partition("\n")[0].split()
