"""Regions of a program under torch.autocast, which an export leaves to cast when it runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from gpuir.frontends.torch.node import dtype_of
from gpuir.ir.types import DType

# For a device, in a dtype, on or off; where tensors are.
Region = tuple[str, torch.dtype, bool, fx.GraphModule, set[str]]


def regions(program: ExportedProgram) -> Iterator[Region]:
    """Those of the program, one inside another too."""
    for module in program.graph_module.modules():
        nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
        for node in nodes:
            if str(node.target) != "wrap_with_autocast":
                continue
            device, dtype, on, _, inner, *given = node.args
            values = [n.meta.get("val") for n in given if isinstance(n, fx.Node)]
            places = {v.device.type for v in values if isinstance(v, torch.Tensor)}
            dtype = dtype or torch.get_autocast_dtype(device)
            yield device, dtype, on, getattr(module, inner.target), places


def has_casts(program: ExportedProgram) -> bool:
    """Whether a region casts the tensors that it is given."""
    return any(on and device in places for device, _, on, _, places in regions(program))


@contextmanager
def kept_places(program: ExportedProgram) -> Generator[None]:
    """Meanwhile what is traced in a region keeps the names of its modules."""
    inner: list[Any] = [region for *_, region, _ in regions(program)]
    for region in inner:
        region.forward = fx.Interpreter(region).run
    try:
        yield
    finally:
        for region in inner:
            del region.forward


def unreached(program: ExportedProgram) -> tuple[str, ...]:
    """What to say of regions that do nothing: torch.autocast casts tensors of its own device alone,
    and turns itself off for a GPU where none is. That of the CPU is off only where it is meant."""
    found: dict[tuple[str, str], DType] = {}  # of the outermost
    for device, dtype, on, _, places in regions(program):
        for place in places:
            if device not in places and (on or device != "cpu"):
                found.setdefault((device, place), dtype_of(dtype))
    return tuple(
        f"torch.autocast({device!r}) does not cast tensors on {place}, "
        "where the program was exported: the products in it are costed "
        f"in their own data types, not in {dtype} (--autocast {dtype} "
        "casts the whole model as on a GPU)"
        for (device, place), dtype in sorted(found.items())
    )
