"""A stack says which views its kernels read in place; `legalize` asks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from gpuir.ir.graph import Graph
from gpuir.passes.views import Views
from gpuir.stacks.legalize import LegalizeForStack
from gpuir.text import parse

# A slice for a pointwise reader, and a transpose for a product behind it.
TEXT = """fused @g {
  in %x: f32[8, 4]
  param %w: f32[6, 8]
  %s: f32[8, 2] = t.fused([%x], {
    in %x: f32[8, 4]
    %s: f32[8, 2] = t.slice(%x, [0, 0], [8, 2], [1, 1]) at "m:slice"
    out %s
  }) at "m:slice"
  %r: f32[8, 2] = t.fused([%s], {
    in %s: f32[8, 2]
    %r: f32[8, 2] = t.map("relu", [%s]) at "m:relu"
    out %r
  }) at "m:relu"
  %t: f32[8, 6] = t.fused([%w], {
    in %w: f32[6, 8]
    %t: f32[8, 6] = t.transpose(%w, [1, 0]) at "m:transpose"
    out %t
  }) at "m:transpose"
  %u: f32[2, 8] = t.fused([%r], {
    in %r: f32[8, 2]
    %u: f32[2, 8] = t.reshape(%r, [2, 8]) at "m:reshape"
    out %u
  }) at "m:reshape"
  %y: f32[2, 6] = t.fused([%u, %t], {
    in %u: f32[2, 8]
    in %t: f32[8, 6]
    %y: f32[2, 6] = t.matmul(%u, %t) at "m:matmul"
    out %y
  }) at "m:matmul"
  out %y
}
"""


class Nothing(Views):
    def makes(self, body: Graph) -> bool:
        return False


@dataclass(frozen=True)
class Mine(LegalizeForStack):
    name = "mine"

    def views(self, g: Graph) -> Views:
        return Nothing()


@pytest.mark.parametrize(
    "stack, profile, kinds",
    [
        (LegalizeForStack(), None, "copy map view view gemm"),
        (LegalizeForStack(), "eager", "view map view view gemm"),
        (LegalizeForStack(strides=False), "ort", "copy map view view gemm"),
        (Mine(), "eager", "copy map copy copy gemm"),
    ],
)
def test_a_stack_says_what_is_a_view(stack: LegalizeForStack, profile: str | None, kinds: str):
    g = stack.run(replace(parse(TEXT), profile=profile))
    assert [n.op.name.removeprefix("k.") for n in g.nodes] == kinds.split()
