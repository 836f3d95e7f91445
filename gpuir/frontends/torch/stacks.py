"""The equal layers of a module, found by what they hold, and left out for a while."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

OWN = {*vars(nn.Module())} - {"training"}  # what torch itself keeps in each module
Described = dict[tuple[str, ...], Any]  # what a layer holds, by the module in it and the name


@dataclass(frozen=True)
class LayerStack:
    """A list of layers in which, behind the `first` few, every `period` layers are alike: `times`
    whole ones, and what is left of another."""

    parent: nn.Module
    name: str
    path: str
    layers: nn.ModuleList
    first: int
    period: int

    @property
    def times(self) -> int:
        return (len(self.layers) - self.first) // self.period

    def length(self, times: int) -> int:
        """How many layers there are when those that are alike come so often."""
        return len(self.layers) - (self.times - times) * self.period


def stacks_of(module: nn.Module, times: int) -> list[LayerStack]:
    """The longest lists of a module in which more than `times` whole periods follow one another,
    those of one length and period."""
    found = sorted(_stacks(module, "", (), times), key=lambda s: -len(s.layers))
    kind = [(len(s.layers), s.first, s.period) for s in found[:1]]
    return [s for s in found if [(len(s.layers), s.first, s.period)] == kind]


def _stacks(
    module: nn.Module, path: str, configs: tuple[Any, ...], times: int
) -> Iterator[LayerStack]:
    if (own := getattr(module, "config", None)) is not None:
        configs = (*configs, own)
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and len(child) > times:
            first, period = regular(kinds(child, configs))
            stack = LayerStack(
                parent=module, name=name, path=place, layers=child, first=first, period=period
            )
            if stack.times > times:
                yield stack
                continue
        yield from _stacks(child, place, configs, times)


def regular(kinds: Sequence[int]) -> tuple[int, int]:
    """How many come first, and the period of all behind them, so that the fewest tell the rest."""
    n = len(kinds)

    def first(period: int) -> int:
        differ = (i + 1 for i in reversed(range(n - period)) if kinds[i] != kinds[i + period])
        return next(differ, 0)

    def cost(choice: tuple[int, int]) -> tuple[int, int]:
        first, period = choice
        return first + (n - first) % period + 3 * period, period

    return min(((first(p), p) for p in range(1, n + 1)), key=cost)


def kinds(layers: nn.ModuleList, configs: Sequence[Any]) -> list[int]:
    """A number for each layer, the same for those that are alike: made of the same modules, with
    the same settings and sizes, and the same entries in their configs' lists of layers. A setting
    that counts the layers does not tell them apart."""
    described = [_described(layer) for layer in layers]
    for i, layer in enumerate(described):
        for place, config in enumerate(configs):
            for name, value in vars(config).items():
                if isinstance(value, list | tuple) and len(value) == len(layers):
                    layer["config", str(place), name] = _plain(value[i])
    offsets: dict[tuple[str, ...], set[int]] = {}
    for i, layer in enumerate(described):
        for key, value in layer.items():
            if type(value) is int:
                offsets.setdefault(key, set()).add(value - i)
    counts = {key for key, found in offsets.items() if len(found) == 1}
    numbers: dict[Any, int] = {}
    kinds = (
        frozenset((key, None if key in counts else value) for key, value in layer.items())
        for layer in described
    )
    return [numbers.setdefault(layer, len(numbers)) for layer in kinds]


def _described(layer: nn.Module) -> Described:
    found: Described = {}
    for path, module in layer.named_modules():
        found["class", path] = type(module)
        for name, value in vars(module).items():
            if name not in OWN:
                found["setting", path, name] = _plain(value)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            found["tensor", path, name] = _plain(tensor)
    return found


def _plain(value: Any) -> Any:
    """What can be compared: of a tensor its sizes, of any other object only itself."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return tuple((key, _plain(item)) for key, item in value.items())
    if isinstance(value, partial):
        return id(value.func), _plain(value.args), _plain(value.keywords)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    return id(value)


@contextmanager
def cut(stacks: Sequence[LayerStack], times: int) -> Generator[None]:
    """The modules without the layers behind so many whole periods, and what is left of another."""
    try:
        for stack in stacks:
            kept = nn.ModuleList(stack.layers[i] for i in range(stack.length(times)))
            setattr(stack.parent, stack.name, kept)
        yield
    finally:
        for stack in stacks:
            setattr(stack.parent, stack.name, stack.layers)
