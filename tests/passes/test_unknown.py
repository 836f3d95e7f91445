"""An op that says nothing of what it is: nothing is guessed about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

import gpuir
from gpuir.ir.build import Builder
from gpuir.ir.graph import Graph, Level, Op, Value
from gpuir.ir.types import TensorType, f32
from gpuir.ops import tensor as t
from gpuir.targets.profile import profile_names


@dataclass(frozen=True)
class Solve(t.TensorOp):
    """x with a x = b: a class without a row."""

    name: ClassVar[str] = "t.solve"
    a: Value
    b: Value

    def types(self) -> tuple[TensorType, ...]:
        return (self.b.type,)


@dataclass(frozen=True)
class SparseProduct(t.Contraction):
    """A kind, and no kernel."""

    name: ClassVar[str] = "t.sparse_product"
    a: Value
    b: Value

    def types(self) -> tuple[TensorType, ...]:
        return (self.b.type,)


@dataclass(frozen=True)
class Stranger(Op):
    """Of no vocabulary at all."""

    name: ClassVar[str] = "t.stranger"
    a: Value
    b: Value

    def types(self) -> tuple[TensorType, ...]:
        return (self.b.type,)


def graph(op: type[Op]) -> Graph:
    b = Builder(Level.graph, "m")
    b.locs = ("m:solve",)
    a, x = b.input("a", TensorType((64, 64), f32)), b.input("b", TensorType((64, 8), f32))
    (y,) = b.add(op(a, b(t.Map("relu", (x,)))))
    return b.finish([b(t.Map("neg", (y,)))])


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("op", [Solve, SparseProduct, Stranger])
def test_what_has_no_row_is_opaque(op: type[Op], profile: str):
    costed = gpuir.analyze(graph(op), target="a100", profile=profile).graph
    s = gpuir.analyze(costed)
    kernel = next(x for x in s.kernels if op.name.removeprefix("t.") in x.unmodelled)
    assert kernel.kind == kernel.status == "opaque"
    low, high = kernel.cost.interval or (0.0, 0.0)
    assert high >= 3 * low  # a factor, not a percent
    assert next(c.nodes for c in s.coverage if c.status == "opaque") == 1
