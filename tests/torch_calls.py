"""Functions of torch tensors as modules, for tests, and whether what gpuir makes of them agrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import gpuir
from gpuir.frontends.torch.load import load
from gpuir.frontends.torch.walk import numbers
from gpuir.interp import run


class Call(torch.nn.Module):
    """A function as a module, which is what can be exported."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def loaded(fn: Callable[..., Any], *args: Any) -> gpuir.Graph:
    return load(Call(fn), args=args, strict=True).graph


def gives(graph: gpuir.Graph, args: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    """The graph's one result on these numbers."""
    values = {v.name: numbers(a) for v, a in zip(graph.inputs, args, strict=True)}
    (found,) = run(graph, values).values()
    return found
