"""Drawn graphs at drawn sizes: a point of a program is the graph that is loaded there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs

import gpuir
from gpuir.ir.build import Builder
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t
from gpuir.run.program import ModelProgram
from gpuir.targets.support import refusal

EXTENT = 4  # of a drawn graph, that stands for the size
STACKS = ("ideal", "eager", "compiled", "ort", "tensorrt")
TARGETS = ("a100", "t4", "x86-64-v3")


def at(g: Graph, n: int) -> Graph:
    """The graph with n in place of each extent of 4; ModelError where its ops do not take that."""
    b = Builder(g.level, g.name)
    b.inherit(replace(g, over=()))
    new: dict[Value, Value] = {}
    for v in g.inputs:
        new[v] = b.input(v.name, sized(v.type, n))
    for v in g.params:
        new[v] = b.param(v.name, sized(v.type, n))
    for node in g.nodes:
        op = resized(node.op.substitute(new).with_regions(lambda region: at(region, n)), n)
        made = b.add(op, [v.name for v in node.results], node.locs)
        new.update(zip(node.results, made, strict=True))
    over = g.over or (None,) * len(g.outputs)
    return b.finish((new[v] for v in g.outputs), (v and new[v] for v in over))


def resized(op: Op, n: int) -> Op:
    match op:
        case t.Reshape(x, shape) if len(shape) == 1:
            return replace(op, shape=(x.type.size,))
        case t.Reshape(shape=shape) | t.Broadcast(shape=shape):
            return replace(op, shape=extents(shape, n))
        case t.Slice(sizes=sizes):
            return replace(op, sizes=extents(sizes, n))
        case t.Constant(type, values) if EXTENT in type.shape:
            type = sized(type, n)
            if len(values) > 1:  # the experts of tokens
                values = tuple(i % 3 for i in range(prod(type.shape)))
            return t.Constant(type, values)
        case _:
            return op


def sized(type: TensorType, n: int) -> TensorType:
    return replace(type, shape=extents(type.shape, n))


def extents(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(n if extent == EXTENT else extent for extent in shape)


@dataclass
class DrawnProgram(ModelProgram):
    """A drawn graph as a function of its size."""

    loads: int = field(default=0, kw_only=True)

    def load(self, point: Mapping[str, int]) -> Graph:
        self.loads += 1
        return at(self.model, point["n"])


@settings(max_examples=60)
@given(
    graphs(),
    st.lists(st.integers(1, 300), min_size=3, max_size=6),
    st.sampled_from(STACKS),
    st.sampled_from(TARGETS),
)
def test_a_point_is_the_graph_of_that_size(g, sizes, profile, target):
    assert gpuir.show(at(g, EXTENT)) == gpuir.show(g)
    if refusal(gpuir.lower(g, profile=profile), gpuir.load_target(target)):
        return
    program = DrawnProgram(g, {}, profile)
    try:
        times = program.times({"n": sizes}, target)
    except GpuirError:
        for n in sizes:
            with pytest.raises(GpuirError):
                at(g, n)
        return
    for i, n in enumerate(sizes):
        try:
            found = gpuir.analyze(at(g, n), target, profile=profile)
        except GpuirError:
            assert times.why[i]
            continue
        if not found.latency_s:
            assert times.why[i] == f"nothing runs under {profile}"
            continue
        assert times.why[i] == ""
        assert times.latency_s[i] == pytest.approx(found.latency_s, rel=1e-12)
        ends = times.low_s[i], times.high_s[i]
        assert found.interval is None or ends == pytest.approx(found.interval, rel=1e-12)
        assert times.peak_bytes[i] == found.peak_bytes
        assert times.reserved_bytes[i] == found.reserved_bytes
