"""Which module of the model a kernel belongs to, and what each module takes in all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuir.ops import kernel as k
from gpuir.report.kernels import KernelRow, Total, total_of
from gpuir.report.names import Path

OWN = "(itself)"  # a module's kernels outside of those inside it


@dataclass(frozen=True)
class Module:
    """A module, or all those whose paths differ in numbers alone, with everything inside."""

    path: Path  # `*` for a number
    depth: int
    total: Total


def without_numbers(path: Path) -> Path:
    """The path without its numbers, by which layers are told apart."""
    return tuple("*" if word.isdecimal() else word for word in path)


def modules(kernels: Iterable[KernelRow]) -> tuple[Module, ...]:
    """The tree of modules, each before those inside it, the most time first. A module that has one
    module inside and no kernels of its own is one line with it."""
    listed: dict[Path, list[KernelRow]] = {}
    for x in kernels:
        if not isinstance(x.node.op, k.View):
            path = without_numbers(x.module)
            listed.setdefault(path, []).append(x)
    children: dict[Path, set[Path]] = {}
    inside: dict[Path, list[KernelRow]] = {}
    for path, group in listed.items():
        for i in range(len(path) + 1):
            inside.setdefault(path[:i], []).extend(group)
            if i:
                children.setdefault(path[: i - 1], set()).add(path[:i])

    def tree(path: Path, start: int, depth: int) -> Iterator[Module]:
        below = sorted(children.get(path, ()), key=lambda p: (-sum(x.time_s for x in inside[p]), p))
        if len(below) == 1 and path not in listed:
            yield from tree(below[0], start, depth)
            return
        if path:
            yield Module(path[start:], depth, total_of(".".join(path), inside[path]))
        for child in below:
            yield from tree(child, len(path), depth + bool(path))
        if path in listed and below:
            own = total_of(".".join((*path, OWN)), listed[path])
            yield Module((OWN,), depth + bool(path), own)

    return tuple(tree((), 0, 0))
