"""An op in index notation agrees with its type rule: each axis has a name, each name one extent."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from strategies import graphs

from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.types import DType, TensorType, f32, i32, i64
from gpuir.ops import tensor as t
from gpuir.ops.axes import indices, parted
from gpuir.ops.tensor import OPS
from gpuir.text import parse

GOLDEN = Path(__file__).parent.parent / "golden"
# What reads nothing, or has no axes of which anything is known.
UNKNOWN = {"t.constant", "t.iota", "t.parts", "t.routine", "t.opaque"}


def v(name: str, *shape: int, dtype: DType = f32) -> Value:
    return Value(name, TensorType(shape, dtype))


def index(*shape: int) -> Value:
    return v("i", *shape, dtype=i64)


IMAGE, STEPS = v("x", 2, 12, 9, 8), ((2, 1), (1, 1), (1, 0), (1, 2))
Q, KEYS, VALUES = v("q", 2, 6, 4, 8), v("k", 2, 3, 5, 8), v("v", 2, 3, 5, 10)
ROUTE, DOWN = (index(7, 2), v("shares", 7, 2)), v("down", 3, 8, 6)
MIXTURES = (
    (v("up", 3, 6, 8), False, None),
    (v("up", 3, 12, 8), False, None),
    (v("up", 3, 12, 8), True, v("b", 3, 8)),
)
GROUP = ("tp", (2,), (1,))
WINDOW = ((3, 2), *STEPS)

CASES: tuple[Op, ...] = (
    t.Map("add", (v("x", 3, 4), v("y", 4))),
    t.Bitcast(v("x", 3, 4), i32),
    t.Reshape(v("x", 6, 4), (2, 3, 4)),
    t.Reshape(v("x", 4, 6), (8, 3)),
    t.Transpose(v("x", 2, 3, 4), (2, 0, 1)),
    t.Broadcast(v("x", 3, 1), (2, 3, 4)),
    t.Slice(v("x", 4, 6), (0, 1), (4, 2), (1, 2)),
    t.Concat((v("x", 4, 6), v("y", 4, 2)), 1),
    t.Pad(v("x", 4, 6), (0, 1), (0, 2), v("p")),
    t.Gather(v("x", 4, 6, 5), index(2, 3), 1),
    t.GatherElements(v("x", 4, 6, 5), index(4, 2, 3), 1),
    t.GatherND(v("x", 4, 6, 5), index(4, 3, 1), 1),
    t.ScatterElements(v("x", 4, 6), index(4, 2), v("u", 4, 2), 1),
    t.ScatterND(v("x", 4, 6), index(3, 1), v("u", 3, 6), "add"),
    t.ScatterND(v("x", 4, 6), index(3, 1), v("u", 3, 6)),
    t.Reduce("sum", v("x", 4, 6, 5), (1,)),
    t.Reduce("max", v("x", 4, 6, 5), (0, 2), True),
    t.ArgReduce("max", v("x", 4, 6, 5), 1),
    t.Cumulative("sum", v("x", 4, 6), 1),
    t.TopK(v("x", 4, 6), 2, 1),
    t.Softmax(v("x", 4, 6), 1),
    t.Normalize(v("x", 4, 6), (1,), v("s", 6), v("b", 6)),
    t.Normalize(v("x", 4, 6, 5), (1, 2), v("s", 6, 1), groups=2),
    t.NormalizeGradient(v("x", 4, 6), v("dy", 4, 6), (1,), v("s", 6)),
    t.NormalizeScaleGradient(v("x", 4, 6), v("dy", 4, 6), (1,), (6,), True),
    t.Pool("max", IMAGE, *WINDOW),
    t.PoolGradient("mean", v("dy", 2, 12, 5, 7), IMAGE.type.shape, *WINDOW),
    t.Resize(IMAGE, (2, 12, 18, 16), (1, 1, 2, 2)),
    t.ResizeGradient(v("dy", 2, 12, 18, 16), IMAGE.type.shape, (1, 1, 2, 2)),
    t.Matmul(v("a", 3, 1, 4, 5), v("b", 2, 5, 6)),
    t.Conv(IMAGE, v("w", 6, 12, 3, 2), *STEPS),
    t.Conv(IMAGE, v("w", 8, 3, 3, 2), *STEPS, groups=4),
    t.ConvTranspose(IMAGE, v("w", 12, 5, 3, 2), *STEPS),
    t.ConvTranspose(IMAGE, v("w", 12, 5, 3, 2), *STEPS, groups=3),
    t.ConvWeightGradient(IMAGE, v("dy", 2, 8, 5, 7), (3, 2), *STEPS),
    t.ConvWeightGradient(IMAGE, v("dy", 2, 8, 5, 7), (3, 2), *STEPS, groups=4),
    t.Attention(Q, KEYS, VALUES, v("m", 1, 4, 5), stats=True),
    t.Attention(Q, KEYS, VALUES, v("m", 4, 5), causal=True),
    t.AttentionGradient(
        *(Q, KEYS, VALUES, v("y", 2, 6, 4, 10), v("stats", 2, 6, 4), v("dy", 2, 6, 4, 10)),
        *(v("m", 4, 5),),
        of_mask=True,
    ),
    *(
        t.Experts(v("x", 7, 8), *ROUTE, up, DOWN, interleaved=turns, down_bias=bias)
        for up, turns, bias in MIXTURES
    ),
    *(
        t.ExpertsGradient(
            *(v("dy", 7, 8), v("x", 7, 8), *ROUTE, up, DOWN), interleaved=turns, down_bias=bias
        )
        for up, turns, bias in MIXTURES
    ),
    t.Collective("all_gather", v("x", 4, 6), *GROUP, axis=1),
    t.Collective("all_to_all", v("x", 4, 6), *GROUP, axis=1, to=0),
    t.Shard(v("x", 4, 6), 1, *GROUP),
    t.Cast(v("x", 3, 4), i64),
    t.Ordered(v("x", 3, 4), (1, 0)),
)


def check(op: Op) -> None:
    axes = op.axis_names() if isinstance(op, t.TensorOp) else None
    if axes is None:
        return
    types = (*(x.type for x in op.operands), *op.result_types)
    rows = (*axes.operands, *axes.results)
    pairs = [pair for names, x in zip(rows, types, strict=True) for pair in zip(names, x.shape)]
    assert [len(names) for names in rows] == [x.rank for x in types]
    if isinstance(op, t.Reshape):  # an axis there has the outermost part of its name
        return
    extents: dict[str, int] = {}
    for name, n in sorted(pairs * 2, key=lambda pair: "." in pair[0]):
        missing = [i for i in indices(name) if i not in extents]
        if "+" in name or len(missing) > 1:
            continue
        factors = prod(extents[i] for i in indices(name) if i in extents)
        extents.update((i, n // factors) for i in missing)
        assert not name or prod(extents[i] for i in indices(name)) == n, (op, name)
    assert axes.summed | axes.whole <= {i for name in axes.names for i in indices(name)} | {""}


@pytest.mark.parametrize("op", CASES, ids=lambda op: op.name)
def test_names_have_the_extents_of_the_type_rule(op: Op):
    assert isinstance(op, t.TensorOp) and op.axis_names() is not None
    check(op)


def test_every_op_says_its_axes_or_is_known_not_to():
    cases = {op.name for op in CASES}
    silent = {name for name, op in OPS.items() if not issubclass(op, t.TensorOp)}
    assert cases | UNKNOWN | silent == {*OPS} and not cases & (UNKNOWN | silent)


def nested(g: Graph) -> Iterator[Op]:
    for node in g.nodes:
        yield node.op
        for region in node.op.regions:
            yield from nested(region)


@given(graphs())
def test_names_of_drawn_graphs_agree(g: Graph):
    for op in nested(g):
        check(op)


def test_names_of_golden_graphs_agree():
    for path in sorted(GOLDEN.rglob("*.gir")):
        text = path.read_text().partition("\n")[2].partition("\n# gives:")[0]
        for op in nested(parse(text.partition("\n# fails:")[0])):
            check(op)


def test_what_can_be_cut():
    """An index can be, if every result has it or is a sum over it, and it is outermost."""

    def parts(op: t.TensorOp) -> tuple[str, ...]:
        axes = op.axis_names()
        assert axes is not None
        return parted(axes).names

    assert parts(t.Matmul(v("a", 4, 5), v("b", 5, 6))) == ("m", "k", "n")
    assert parts(t.Softmax(v("x", 4, 6), 1)) == ("0",)
    assert parts(t.Reduce("max", v("x", 4, 6), (1,))) == ("0",)
    assert parts(t.Reduce("sum", v("x", 4, 6), (1,))) == ("0", "1")
    assert parts(t.Conv(IMAGE, v("w", 6, 12, 3, 2), *STEPS)) == ("n", "c", "k")
    assert parts(t.Conv(IMAGE, v("w", 8, 3, 3, 2), *STEPS, groups=4)) == ("n", "g")
    assert parts(t.Attention(Q, KEYS, VALUES)) == ("0", "h", "s")
    assert parts(t.Attention(Q, KEYS, VALUES, causal=True)) == ("0", "h")
    added = t.ScatterND(v("x", 4, 6), index(3, 1), v("u", 3, 6), "add").axis_names()
    assert added is not None
    assert parted(added).names == ("1", "i0") and parted(added, adds=False).names == ("1",)
