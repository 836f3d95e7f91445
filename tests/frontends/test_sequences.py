"""Sequences through loops and branches, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import BOOL, F32, I64, agrees, const, graph, info, loaded, model_of, node

from gpuir.frontends.onnx.load import load
from gpuir.ir.errors import ModelError
from gpuir.ops import tensor as t

rng = np.random.default_rng(2)
X = rng.random((6, 4, 8), np.float32)
WEIGHTS = [
    const("w", rng.random((8, 3), np.float32)),
    *(const(f"i{i}", np.int64(i)) for i in range(7)),
    const("n1", np.int64(-1)),
    const("n", np.int64(6)),
    const("many", np.int64(100)),
    const("yes", np.array(True)),
]
EMPTY = node("SequenceEmpty", [], ["s0"])


def sequence(name: str, dtype: int = F32) -> Any:
    return helper.make_tensor_sequence_value_info(name, dtype, None)


def body(steps: list[Any], carried: str = "s", result: str = "s2", *more: Any) -> Any:
    """A trip: of a sequence `carried`, and what else is carried or collected: pairs of info."""
    ins, outs = [p for p in more if p[0]], more
    return graph(
        [node("Identity", ["c"], ["c2"]), *steps],
        [info("i", [], I64), info("c", [], BOOL), sequence(carried), *(p[0] for p in ins)],
        [info("c2", [], BOOL), sequence(result), *(p[1] for p in outs)],
    )


ROW = [node("Gather", ["x", "i"], ["xi"], axis=0), node("MatMul", ["xi", "w"], ["yi"])]
APPEND = [*ROW, node("SequenceInsert", ["s", "yi"], ["s2"])]


def loop(steps: list[Any] | None = None, trips: str = "n", start: str = "s0") -> list[Any]:
    b = body(APPEND if steps is None else steps)
    return [EMPTY, node("Loop", [trips, "", start], ["sT"], body=b, name="loop")]


def concat(axis: int = 0, new: int = 0, of: str = "sT") -> Any:
    return node("ConcatFromSequence", [of], ["y"], axis=axis, new_axis=new)


def at(position: str, of: str = "sT", to: str = "y") -> Any:
    return node("SequenceAt", [of, position], [to])


def made(nodes: list[Any], outputs: Any = ("y",), inputs: list[Any] | None = None) -> Any:
    x = [info("x", X.shape)] if inputs is None else inputs
    return model_of(graph(nodes, x, list(outputs), WEIGHTS))


FIRST = node("SequenceInsert", ["s", "yi", "i0"], ["s2"])
TWICE = [
    *ROW,
    node("SequenceInsert", ["s", "yi"], ["s1"]),
    node("Neg", ["yi"], ["zi"]),
    node("SequenceInsert", ["s1", "zi"], ["s2"]),
]
GROWING = [  # the last item, and one row more
    node("SequenceAt", ["s", "n1"], ["last"]),
    node("Gather", ["x", "i"], ["xi"], axis=0),
    node("MatMul", ["xi", "w"], ["yi"]),
    node("Concat", ["last", "yi"], ["next"], axis=0),
    node("SequenceInsert", ["s", "next"], ["s2"]),
]
QUEUE = [
    *ROW,
    node("SequenceInsert", ["s", "yi"], ["s1"]),
    node("SequenceErase", ["s1", "i0"], ["s2"]),
]
LENGTH = [
    *ROW,
    node("SequenceLength", ["s"], ["len"]),
    node("Cast", ["len"], ["f"], to=F32),
    node("Add", ["yi", "f"], ["zi"]),
    node("SequenceInsert", ["s", "zi"], ["s2"]),
]
START = [
    node("Gather", ["x", "i0"], ["x0"], axis=0),
    node("MatMul", ["x0", "w"], ["y0"]),
    node("SequenceConstruct", ["y0"], ["s0"]),
]
SPLIT = node("SplitToSequence", ["x"], ["parts"], axis=0, keepdims=0)
OVER = [  # the rows of a sequence from outside
    node("SequenceAt", ["parts", "i"], ["xi"]),
    node("MatMul", ["xi", "w"], ["yi"]),
    node("SequenceInsert", ["s", "yi"], ["s2"]),
]
INNER = graph(
    [
        node("Identity", ["ci"], ["ci2"]),
        node("Gather", ["xi", "j"], ["row"], axis=0),
        node("SequenceInsert", ["t", "row"], ["t2"]),
    ],
    [info("j", [], I64), info("ci", [], BOOL), sequence("t")],
    [info("ci2", [], BOOL), sequence("t2")],
)
NESTED = [
    node("Gather", ["x", "i"], ["xi"], axis=0),
    node("Loop", ["i4", "", "s"], ["s2"], body=INNER),
]

CASES: dict[str, list[Any]] = {
    **{f"joined along {a}": [*loop(), concat(a)] for a in (0, 1, -1)},
    **{f"joined along a new axis {a}": [*loop(), concat(a, 1)] for a in (0, 1, 2, -1)},
    "one item": [*loop(), at("i4")],
    "the last item": [*loop(), at("n1")],
    "two appended each time": [*loop(TWICE), concat()],
    "put first": [*loop([*ROW, FIRST]), concat(0, 1)],
    "a queue": [*START, loop(QUEUE)[1], concat()],
    "mapped": [
        *loop(),
        node(
            "SequenceMap",
            ["sT", "w"],
            ["u"],
            body=graph(
                [node("Gemm", ["a", "b"], ["ab"], transB=1)],
                [info("a", [4, 3]), info("b", [8, 3])],
                [info("ab", [4, 8])],
            ),
        ),
        concat(0, 1, "u"),
    ],
    "the length is read": [*loop(LENGTH), concat()],
    "the length after": [*loop(), node("SequenceLength", ["sT"], ["y"])],
    "a start that is not empty": [*START, loop()[1], concat(0, 1)],
    "items that grow": [*START, loop(GROWING)[1], at("i3")],
    "erased after": [*loop(), node("SequenceErase", ["sT", "i2"], ["u"]), concat(0, 1, "u")],
    "inserted after": [
        *loop(),
        at("i2", to="two"),
        node("SequenceInsert", ["sT", "two", "i0"], ["u"]),
        concat(0, 1, "u"),
    ],
    "over a sequence from outside": [SPLIT, *loop(OVER), concat()],
    "a loop in a loop": [*loop(NESTED), concat(0, 1)],
    "read by another loop": [
        *loop(),
        node(
            "Loop",
            ["n", "", "s0"],
            ["u"],
            body=body(
                [
                    at("i", to="a"),
                    node("Neg", ["a"], ["b"]),
                    node("SequenceInsert", ["s", "b"], ["s2"]),
                ]
            ),
        ),
        concat(0, 1, "u"),
    ],
    "twice the same, as it is": [*loop(), node("Identity", ["sT"], ["u"]), concat(1, 0, "u")],
}


@pytest.mark.parametrize("name", CASES)
def test_as_onnxruntime(name: str):
    agrees(made(CASES[name]), {"x": X})


def carried() -> Any:
    """A tensor carried beside the sequence, and one collected."""
    steps = [
        *ROW,
        node("Add", ["a", "yi"], ["a2"]),
        node("SequenceInsert", ["s", "a2"], ["s2"]),
        node("Neg", ["yi"], ["z"]),
    ]
    pairs = ((info("a", [4, 3]), info("a2", [4, 3])), (None, info("z", [4, 3])))
    b = body(steps, "s", "s2", *pairs)
    start = [
        EMPTY,
        node("Gather", ["x", "i0"], ["x0"], axis=0),
        node("MatMul", ["x0", "w"], ["a0"]),
    ]
    run = node("Loop", ["n", "", "s0", "a0"], ["sT", "aT", "zs"], body=b)
    return made([*start, run, concat(0, 1)], ("y", "aT", "zs"))


def test_beside_tensors_that_are_carried_and_collected():
    agrees(carried(), {"x": X})


def test_what_is_appended_is_collected_by_one_loop():
    """However many trips there are: it is no longer than one trip."""
    x = rng.random((100, 4, 8), np.float32)
    m = agrees(made([*loop(trips="many"), concat()], inputs=[info("x", x.shape)]), {"x": x})
    assert [type(n.op) for n in m.graph.nodes] == [t.Loop, t.Reshape]
    assert m.graph.outputs[0].type.shape == (400, 3)


def test_what_changes_in_each_trip_is_written_out_up_to_64_trips():
    m = loaded(made([*START, loop(QUEUE)[1], concat()]))
    assert not any(isinstance(n.op, t.Loop) for n in m.graph.nodes)
    assert any("6 trips, from the model, unrolled" in text for text in m.graph.assumed)
    long = [info("x", [100, 4, 8])]
    with pytest.raises(ModelError, match="in a loop of 100 trips") as error:
        load(made([*START, loop(QUEUE, trips="many")[1], concat()], inputs=long))
    assert "--trip-count loop=64" in error.value.fix


def test_trips_from_a_size_or_from_the_command_line():
    sized = [node("Shape", ["x"], ["sh"]), node("Gather", ["sh", "i0"], ["rows"])]
    nodes = [*sized, *loop(trips="rows"), concat(0, 1)]
    m = agrees(made(nodes, inputs=[info("x", ["N", 4, 8])]), {"x": X}, dims={"N": 6})
    assert m.graph.outputs[0].type.shape == (6, 4, 3)
    given = made([*loop(trips="k"), concat()], inputs=[info("x", X.shape), info("k", [], I64)])
    m = loaded(given, trip_counts={"loop": 5})
    assert m.graph.outputs[0].type.shape == (20, 3)
    with pytest.raises(ModelError, match="the trip count is not known"):
        load(given)


@pytest.mark.parametrize("bound", ["n", ""])
def test_trips_from_a_condition_that_depends_on_the_trip_alone(bound: str):
    b = body([*APPEND, node("Less", ["i", "i3"], ["c3"])])
    b.output[0].name = "c3"
    nodes = [EMPTY, node("Loop", [bound, "yes", "s0"], ["sT"], body=b, name="loop"), concat(0, 1)]
    m = agrees(made(nodes), {"x": X})
    assert m.graph.outputs[0].type.shape == (4, 4, 3)
    assert "loop: 4 trips, from its condition" in m.graph.assumed


def test_no_trips_leave_the_sequence_as_it_was():
    agrees(made([*START, loop(trips="i0")[1], concat()]), {"x": X})
    with pytest.raises(ModelError, match="the sequence is empty"):
        load(made([*loop(trips="i0"), concat()]))


def branches(known: bool, other: str = "Relu") -> Any:
    def side(op: str) -> Any:
        steps = [node(op, ["y0"], ["a"]), node("SequenceConstruct", ["a", "y0"], ["b"])]
        return graph(steps, [], [sequence("b")])

    choose = node(
        "If",
        ["yes" if known else "p"],
        ["sT"],
        then_branch=side("Neg"),
        else_branch=side(other),
    )
    inputs = [info("x", X.shape), *([] if known else [info("p", [], BOOL)])]
    return made([*START[:2], choose, concat(0, 1)], inputs=inputs)


@pytest.mark.parametrize("p", [True, False])
def test_a_sequence_out_of_a_branch(p: bool):
    agrees(branches(known=True), {"x": X})
    m = agrees(branches(known=False), {"x": X, "p": np.array(p)})
    assert any(isinstance(n.op, t.Cond) for n in m.graph.nodes)


def test_a_position_that_is_not_known_picks_among_items_of_one_type():
    inputs = [info("x", X.shape), info("k", [], I64)]
    m = agrees(made([SPLIT, at("k", "parts")], inputs=inputs), {"x": X, "k": np.array(4)})
    assert any(isinstance(n.op, t.Gather) for n in m.graph.nodes)


def test_a_sequence_as_operand_of_another_operator_is_refused():
    with pytest.raises(ModelError, match="Relu reads a sequence"):
        load(made([*loop(), node("Relu", ["sT"], ["y"])]))


def test_dtypes_of_the_items():
    nodes = [
        node("SequenceEmpty", [], ["s0"], dtype=TensorProto.INT64),
        node("Cast", ["x"], ["k"], to=I64),
        node("SequenceInsert", ["s0", "k"], ["sT"]),
        concat(2, 0),
    ]
    agrees(made(nodes), {"x": X})
