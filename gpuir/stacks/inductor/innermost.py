"""Which axis of each tensor lies innermost in memory, as Inductor lays tensors out."""

from __future__ import annotations

from collections import Counter

from gpuir.ir.graph import Graph, Node, Op, Value
from gpuir.ops import tensor as t
from gpuir.ops.strides import packed, viewed

ALIKE = t.Pointwise | t.Normalize | t.Softmax  # lies as what it reads

Votes = Counter[int]


def innermost(g: Graph, images: bool) -> dict[Value, int]:
    """The axis of each value that has neighbours side by side. A pointwise result lies as most of
    the tensors that it is computed from, a view as it is cut; `images` have channels innermost,
    all else lies as its axes are. (torch 2.13: torch/_inductor/ir.py, get_fill_order and
    pick_loop_order.)"""
    votes = {v: Votes([last_axis(v)]) for v in (*g.inputs, *g.params)}
    for node in g.nodes:
        for v in node.results:
            votes[v] = votes_of(node, v, votes, images)
    return {v: leading(found) for v, found in votes.items()}


def votes_of(node: Node, v: Value, votes: dict[Value, Votes], images: bool) -> Votes:
    match node.op:
        case t.Conv() if images and v.type.rank == 4:
            return Votes([1])
        case op if isinstance(op, t.Layout):
            x = op.operands[0]
            found = Votes()
            for axis, count in votes[x].items():
                found[axis_of_view(x, axis, op, v)] += count
            return found
        case op if isinstance(op, ALIKE):
            alike = [votes[x] for x in op.operands if x.type.shape == v.type.shape]
            return sum(alike, Votes()) or Votes([last_axis(v)])
        case _:
            return Votes([last_axis(v)])


def axis_of_view(x: Value, axis: int, op: Op, v: Value) -> int:
    """The innermost axis of what a layout op makes of a tensor, by that of the tensor."""
    rank = x.type.rank
    order = (*(a for a in range(rank) if a != axis), axis) if rank else ()
    back = tuple(order.index(a) for a in range(rank))
    lies = packed(x.type.with_shape(tuple(x.type.shape[a] for a in order)))
    y = viewed(lies.transpose(back), op)
    moving = [] if y is None else [a for a, n in enumerate(y.shape) if n > 1 and y.strides[a]]
    return last_axis(v) if y is None or not moving else min(moving, key=lambda a: y.strides[a])


def last_axis(v: Value) -> int:
    return max((a for a, n in enumerate(v.type.shape) if n > 1), default=0)


def leading(votes: Votes) -> int:
    """The axis with most votes; of equals the last."""
    return max(votes, key=lambda axis: (votes[axis], axis))
