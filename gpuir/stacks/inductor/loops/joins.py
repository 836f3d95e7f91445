"""Who reads a join, and of what it is one."""

from __future__ import annotations

from gpuir.fusion.flow import Flow
from gpuir.ir.graph import Node, Value
from gpuir.ops import tensor as t


def is_cellwise(flow: Flow, reader: Node) -> bool:
    """Whether an op reads cell by cell: it is pointwise, or a view that pointwise ops read. (torch
    2.13: torch/_inductor/utils.py, is_pointwise_use.)"""
    if isinstance(reader.op, t.Layout):
        return is_read_cellwise(flow, reader.results[0], joins=False)
    return isinstance(reader.op, t.Pointwise)


def is_read_cellwise(flow: Flow, v: Value, joins: bool = True) -> bool:
    """Whether all that read a value do so cell by cell, joins and paddings among them or not."""
    allowed = t.Pointwise | t.Joining if joins else t.Pointwise
    return v not in flow.outputs and all(
        is_read_cellwise(flow, n.results[0], joins)
        if isinstance(n.op, t.Layout)
        else isinstance(n.op, allowed)
        for n in flow.read_by(v)
    )


def is_index(flow: Flow, join: Node) -> bool:
    """Whether a join is the index of a gather: PyTorch keeps the indices of its axes apart."""
    readers = flow.read_by(join.results[0])
    return bool(readers) and all(isinstance(n.op, t.GatherND | t.ScatterND) for n in readers)


def is_roll(flow: Flow, join: Node) -> bool:
    """Whether a model node joins slices of one tensor again: an index into it, in PyTorch."""
    made = [flow.maker(x) for x in join.op.operands]
    cut = [n for n in made if n and isinstance(n.op, t.Slice) and n.locs == join.locs]
    return len(cut) == len(made) and len({n.op.operands[0] for n in cut}) == 1
