"""Models of many equal layers: exported with a few of them, and grown to all.

torch.export takes nearly all the time that such a model takes to load, each layer as long as the
one before. So the model is exported twice with its first layers alone: those that repeat two times
and four times, three and five with a backward pass. What the longer graph has more is whole layers,
and larger numbers in names (`linear_14`, `model.layers.2`), which grow by as much from layer to
layer, and with the number of layers. This law must give both graphs exactly; it is made from the
second and third layer, so the fourth one is its proof. Then it gives the graph of all layers. Where
anything is not so, there is no law, and the whole model is exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NoReturn, cast

import torch

from gpuir.frontends.emit import NumbersMissing
from gpuir.frontends.model import Model, Weights
from gpuir.frontends.torch.node import dtype_of
from gpuir.frontends.torch.program import TorchProgram
from gpuir.frontends.torch.stacks import LayerStack, cut, stacks_of
from gpuir.frontends.torch.walk import numbers
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Graph, Node, Op, Value, field_names
from gpuir.ir.verify import verify

STEP = 2  # how many more periods the longer program has
LEAST = 1.5  # layers that there are for each that is exported: two exports have their own costs too
Unit = tuple[str, bool, int]  # the list, whether in the backward pass, and which of its periods
Item = Any  # of a graph's lists: a value, a node, a location, or a tuple of such


class Irregular(Exception):
    """Two graphs of few layers do not tell that of more."""


def grown(
    program: TorchProgram, load: Callable[[TorchProgram], Model], joint: bool
) -> Model | None:
    """The program's graph, made of those that `load` gives of it with fewer layers; None where too
    few of them are alike, or the graphs do not prove it. A `joint` graph has a backward pass, in
    which the last layer reads what no other does: one between it and the first shows the rest."""
    few = 3 if joint else 2
    depths = few, few + STEP
    stacks = stacks_of(program.module, few + STEP)
    exported = sum(s.length(n) for s in stacks for n in depths)
    if not stacks or LEAST * exported > sum(len(s.layers) for s in stacks):
        return None
    longest = stacks[0].length(few + STEP)

    def made(times: int) -> Model:
        with cut(stacks, times):
            return load(_shorter(program, stacks, times))

    try:
        models = {times: made(times) for times in depths}
        law = _Law(models, _Places(program, stacks))
        if any(law.model(times, known.weights) != known for times, known in models.items()):
            return None
        model = _held(law.model(stacks[0].times, models[few].weights), program.module)
        verify(model.graph, "repeat")
        note = (
            f"the layers after the first {longest} are assumed to do the "
            "same, because they hold the same modules"
        )
        graph = replace(model.graph, assumed=(*model.graph.assumed, note))
    except (Irregular, GpuirError):  # what is at fault in the program itself, the whole one shows
        return None
    return replace(model, graph=graph)


def _shorter(program: TorchProgram, stacks: Sequence[LayerStack], times: int) -> TorchProgram:
    """The program with as many of what it is given of each layer as there are layers."""
    whole, kept = len(stacks[0].layers), stacks[0].length(times)
    per_layer = [name for name, given in program.kwargs.items() if _is_listed(given, whole)]
    gone = {f"{name}_{i}" for name in per_layer for i in range(kept, whole)}
    return replace(
        program,
        kwargs={n: x[:kept] if n in per_layer else x for n, x in program.kwargs.items()},
        roles={name: role for name, role in program.roles.items() if name not in gone},
        over=tuple(name for name in program.over if name not in gone),
        repeats=False,
    )


def _is_listed(given: Any, layers: int) -> bool:
    return isinstance(given, list) and len(cast("list[Any]", given)) == layers


def _held(model: Model, module: torch.nn.Module) -> Model:
    """The model with the module's own tensors as its weights; Irregular where a param is of other
    sizes than the tensor of its name."""
    tensors, compute = _tensors(module), dict[str, Callable[[], Any]]()
    for param in model.graph.params:
        name, type, tensor = param.name, param.type, tensors.get(param.name)
        if tensor is None:  # a number known while exporting: in few layers, or in none
            compute[name] = partial(model.weights.get, name) if name in model.weights else _missing
        elif ((*tensor.shape,), dtype_of(tensor.dtype)) == (type.shape, type.dtype):
            compute[name] = partial(numbers, tensor)
        else:
            raise Irregular
    return replace(model, weights=Weights(compute))


def _missing() -> NoReturn:
    raise NumbersMissing(
        "the layer was not exported, so the numbers of its constants are not known"
    )


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


# ---------------------------------------------------------------------------- which layer


class _Places:
    """Which of a stack's periods things belong to, by the paths of modules in their names."""

    def __init__(self, program: TorchProgram, stacks: Sequence[LayerStack]):
        self.start = len(program.name) + 1
        self.stacks = {stack.path: stack for stack in stacks}
        paths = "|".join(map(re.escape, self.stacks))
        self.path = re.compile(rf"({paths})\.(\d+)(?![^./])")
        whole = len(stacks[0].layers)
        lists = (n for n, given in program.kwargs.items() if _is_listed(given, whole))
        self.listed = {f"{n}_{i}": (n, i) for n in lists for i in range(whole)}
        self.kind = stacks[0]
        self.tensors = _tensors(program.module).keys()

    def unit(self, name: str, layer: int, backward: bool, times: int) -> Unit | None:
        number = (layer - self.kind.first) // self.kind.period
        return (name, backward, number) if 0 <= number < times else None

    def of_path(self, text: str, start: int, times: int) -> Unit | None:
        found = self.path.match(text, start)
        if found is None:
            return None
        return self.unit(found[1], int(found[2]), text.endswith("/backward"), times)

    def of(self, graph: Graph, times: int) -> Callable[[Item], Unit | None]:
        """Where an item of the graph's lists belongs; None for what is of no layer that repeats."""
        known: dict[str, Unit | None] = {}
        for node in reversed(graph.nodes):  # a number known while exporting is of its first reader
            unit = self.of_path(node.locs[0], self.start, times)
            known |= dict.fromkeys((v.name for v in node.op.operands), unit)
        for node in graph.nodes:
            unit = self.of_path(node.locs[0], self.start, times)
            known |= dict.fromkeys((v.name for v in node.results), unit)
        for value in (*graph.inputs, *graph.params):
            if value.name in self.listed:
                known[value.name] = self.unit(*self.listed[value.name], False, times)
            elif value.name in self.tensors:
                known[value.name] = self.of_path(value.name, 0, times)

        def find(item: Item) -> Unit | None:
            match item:
                case Node():
                    return self.of_path(item.locs[0], self.start, times)
                case Value():
                    return known.get(item.name)
                case str():
                    return self.of_path(item, self.start, times)
                case (Value() as value, over):  # an output
                    return known.get(value.name) or (over and known.get(over.name))
                case (name, _):
                    return known.get(name)
                case _:
                    raise Irregular

        return find


# ---------------------------------------------------------------------------- the law


class _Law:
    """What the models of two depths say of any."""

    def __init__(self, models: Mapping[int, Model], places: _Places):
        few, self.like = models.values()
        if _ends(few) != _ends(self.like):
            raise Irregular
        self.times = min(models)
        finds = [places.of(model.graph, times) for times, model in models.items()]
        self.lists: list[list[_Fixed | _Ladder]] = []
        for items in zip(*map(_lists, models.values()), strict=True):
            ours = zip(items, finds, models, strict=True)
            parts = [_parts(list(x), find, times) for x, find, times in ours]
            if len(parts[0]) != len(parts[1]):
                raise Irregular
            self.lists.append([_joined(a, b) for a, b in zip(*parts, strict=True)])

    def model(self, times: int, weights: Mapping[str, Any]) -> Model:
        """The model in which the layers come so often."""
        made = (
            tuple(chain.from_iterable(part.at(times, times - self.times) for part in x))
            for x in self.lists
        )
        inputs, params, nodes, ends, folded, roles, keys = made
        over = tuple(place for _, place in ends)
        graph = replace(
            self.like.graph,
            inputs=inputs,
            params=params,
            nodes=nodes,
            outputs=tuple(value for value, _ in ends),
            over=over if any(over) else (),
            folded=folded,
            roles=roles,
        )
        named = {key: name for name, key in keys}
        return replace(self.like, graph=graph, weights=weights, keys=named)


def _lists(model: Model) -> tuple[Sequence[Item], ...]:
    """What grows with the layers."""
    g = model.graph
    ends = list(zip(g.outputs, g.over or (None,) * len(g.outputs), strict=True))
    keys = [(name, key) for key, name in model.keys.items()]
    return g.inputs, g.params, g.nodes, ends, g.folded, g.roles, keys


def _ends(model: Model) -> Any:
    """What does not."""
    empty: dict[str, Any] = dict.fromkeys(LISTS, ())
    return replace(model.graph, **empty), model.warnings


LISTS = ("inputs", "params", "nodes", "outputs", "over", "folded", "roles")
Run = tuple[Unit, int, int]  # items that belong together: from, to


def _parts(
    items: list[Item], find: Callable[[Item], Unit | None], times: int
) -> list[list[Item] | dict[int, list[Item]]]:
    """The items in turn as a list of those that come once, and, by their number, those of all
    periods of a stack, upwards or downwards. What lies between two periods is of the higher."""
    runs: list[Run] = []
    for i, item in enumerate(items):
        unit = find(item)
        if unit is not None and runs and runs[-1][0] == unit:
            runs[-1] = (unit, runs[-1][1], i + 1)
        elif unit is not None:
            runs.append((unit, i, i + 1))
    parts: list[list[Item] | dict[int, list[Item]]] = []
    done = at = 0
    while at < len(runs):
        ladder = runs[at : at + times]
        whose, first = ladder[0][0][:2], ladder[0][0][2]
        step = -1 if first else 1
        wanted = [(*whose, first + step * i) for i in range(times)]
        if first not in (0, times - 1) or [unit for unit, _, _ in ladder] != wanted:
            at += 1
            continue
        parts.append(items[done : ladder[0][1]])
        if step > 0:
            bounds = [ladder[0][1], *(end for _, _, end in ladder)]
        else:
            bounds = [*(start for _, start, _ in ladder), ladder[-1][2]]
        slices = zip(ladder, bounds, bounds[1:], strict=False)
        parts.append({unit[2]: items[start:end] for (unit, _, _), start, end in slices})
        done, at = bounds[-1], at + times
    return [*parts, items[done:]]


def _joined(few: Any, more: Any) -> _Fixed | _Ladder:
    if isinstance(few, list) and isinstance(more, list):
        return _Fixed(cast("list[Item]", few), cast("list[Item]", more))
    if isinstance(few, dict) and isinstance(more, dict):
        return _Ladder(cast("dict[int, list[Item]]", few), cast("dict[int, list[Item]]", more))
    raise Irregular


class _Fixed:
    """Items that come once: numbers in their names grow with the layers that there are."""

    def __init__(self, few: list[Item], more: list[Item]):
        self.items = _alike(few, more, more)

    def at(self, times: int, further: int) -> Iterator[Item]:
        return (item.at(0, further) for item in self.items)


class _Ladder:
    """The items of each period. The first one is apart: it is where names have no number yet. So is
    the last where they come downwards, in a backward pass."""

    def __init__(self, few: dict[int, list[Item]], more: dict[int, list[Item]]):
        self.down = next(iter(more)) != 0
        if self.down != (next(iter(few)) != 0):
            raise Irregular
        self.first = _Fixed(few[0], more[0])
        self.last = _Fixed(few[max(few)], more[max(more)]) if self.down else None
        self.items = _alike(few[1], more[2], more[1])

    def at(self, times: int, further: int) -> Iterator[Item]:
        between = range(times - 2, 0, -1) if self.last else range(1, times)
        if self.last:
            yield from self.last.at(times, further)
        else:
            yield from self.first.at(times, further)
        yield from (item.at(number - 1, further) for number in between for item in self.items)
        if self.last:
            yield from self.first.at(times, further)


def _alike(few: list[Item], above: list[Item], more: list[Item]) -> list[_Growing]:
    if not len(few) == len(above) == len(more):
        raise Irregular
    return [_Growing(*items) for items in zip(few, above, more, strict=True)]


class _Growing:
    """An item whose names hold numbers: as it is in the graph of few layers, one period above in
    that of more, and there itself."""

    def __init__(self, few: Item, above: Item, more: Item):
        self.item = few
        if any(_renamed(x, _words) != _renamed(few, _words) for x in (above, more)):
            raise Irregular
        self.names = [_law(*x) for x in zip(*map(_names, (few, above, more)), strict=True)]

    def at(self, above: int, further: int) -> Item:
        if all(isinstance(name, str) for name in self.names):
            return self.item
        made = (x if isinstance(x, str) else _spelled(x, above, further) for x in self.names)
        return _renamed(self.item, lambda _: next(made))


def _names(item: Item) -> list[str]:
    found: list[str] = []
    _renamed(item, lambda name: found.append(name) or name)
    return found


def _renamed(item: Any, name: Callable[[str], str]) -> Any:
    """The item with each name in it replaced, those in regions too, in turn."""
    match item:
        case str():
            return name(item)
        case Value():
            return Value(name(item.name), item.type)
        case tuple():
            return tuple(_renamed(x, name) for x in cast("tuple[Any, ...]", item))
        case Node():
            op = _renamed(item.op, name)
            return Node(op, _renamed(item.results, name), _renamed(item.locs, name))
        case Op():
            held = {field: getattr(item, field) for field in field_names(type(item))}
            named = {field: x for field, x in held.items() if _has_names(x)}
            changes: dict[str, Any] = {field: _renamed(x, name) for field, x in named.items()}
            return replace(item, **changes) if changes else item
        case Graph():
            lists = {field: _renamed(getattr(item, field), name) for field in LISTS}
            return replace(item, **lists)
        case _:
            return item


def _has_names(field: Any) -> bool:
    """Whether a field of an op is an operand, several, or a region."""
    first = field[0] if isinstance(field, tuple) and field else field
    return isinstance(first, Value | Graph)


# ---------------------------------------------------------------------------- numbers in names

Piece = tuple[str, int, int, int]  # a word, its number, and by how much that grows


def _pieces(name: str) -> list[tuple[str, int]]:
    """`model.layers.2/linear_14` → the words, each with the number behind it, 0 for none: torch
    calls the first of a kind `linear`, and we call others that are called so `linear.1`."""
    found: list[tuple[str, int]] = []
    for piece in re.split(r"([./:])", name):
        word, _, number = piece.rpartition("_")
        if piece.isdecimal():
            found.append(("", int(piece)))
        elif word and number.isdecimal() and number[0] != "0":
            found.append((word, int(number)))
        else:
            found.append((piece, 0))
    if len(found) < 3 or found[-2:][0] != (".", 0) or found[-1][0]:
        found += [(".", 0), ("", 0)]
    return found


def _words(name: str) -> str:
    return "\0".join(word for word, _ in _pieces(name))


def _law(few: str, above: str, more: str) -> str | list[Piece]:
    """The name where it never changes, else its pieces."""
    if few == above == more:
        return few
    pieces: list[Piece] = []
    for (word, a), (_, b), (_, c) in zip(*map(_pieces, (few, above, more)), strict=True):
        further, rest = divmod(c - a, STEP)
        if rest:
            raise Irregular
        pieces.append((word, a, b - c, further))
    return pieces


def _spelled(pieces: list[Piece], above: int, further: int) -> str:
    """The name so many periods above, and in a graph of so many more."""
    found: list[str] = []
    for word, number, by_above, by_further in pieces:
        n = number + by_above * above + by_further * further
        if n < 0:
            raise Irregular
        found.append(str(n) if not word else f"{word}_{n}" if n else word)
    return "".join(found).removesuffix(".0")
