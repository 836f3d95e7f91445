"""Regions of a program under torch.autocast, which an export leaves to cast when it runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch.export import ExportedProgram

Region = tuple[str, bool, fx.GraphModule, set[str]]  # for a device, on or off; where tensors are


def regions(program: ExportedProgram) -> Iterator[Region]:
    """Those of the program, one inside another too."""
    for module in program.graph_module.modules():
        nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
        for node in nodes:
            if str(node.target) != "wrap_with_autocast":
                continue
            device, _, on, _, inner, *given = node.args
            values = [n.meta.get("val") for n in given if isinstance(n, fx.Node)]
            places = {v.device.type for v in values if isinstance(v, torch.Tensor)}
            yield device, on, getattr(module, inner.target), places


def has_casts(program: ExportedProgram) -> bool:
    """Whether a region casts the tensors that it is given."""
    return any(on and device in places for device, on, _, places in regions(program))


@contextmanager
def kept_places(program: ExportedProgram) -> Generator[None]:
    """Meanwhile what is traced in a region keeps the names of its modules."""
    inner = [region for _, _, region, _ in regions(program)]
    for region in inner:
        region.__dict__["forward"] = fx.Interpreter(region).run
    try:
        yield
    finally:
        for region in inner:
            region.__dict__.pop("forward")


def unreached(program: ExportedProgram) -> tuple[str, ...]:
    """What to say of regions that do nothing: torch.autocast casts tensors of its own device alone,
    and turns itself off for a GPU where none is. That of the CPU is off only where it is meant."""
    found = {
        (device, place)
        for device, on, _, places in regions(program)
        for place in places
        if device not in places and (on or device != "cpu")
    }
    return tuple(
        f"torch.autocast({device!r}) casts no tensors on {place}, where the program was exported: "
        f"there it keeps its dtypes (with a module on the CPU, torch.autocast('cpu') casts)"
        for device, place in sorted(found)
    )
