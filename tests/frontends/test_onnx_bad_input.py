"""Models that cannot be used: a message that says where and what to do, never another exception."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models
import pytest
from calls import calls
from onnx import AttributeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx_models import F32, I64, info, node

from gpuir.frontends.onnx.definition import NEEDED, RANKS
from gpuir.frontends.onnx.load import load
from gpuir.frontends.onnx.table import CONVERTERS
from gpuir.ir.errors import GpuirError, ModelError
from gpuir.ir.verify import verify


def model(
    nodes: list[Any],
    inputs: list[Any] | None = None,
    outputs: tuple[str, ...] = ("y",),
    weights: Sequence[Any] = (),
    opset: int = 17,
) -> Any:
    """With one f32 input x and one result y where nothing else is said."""
    inputs = [info("x", [2, 3])] if inputs is None else inputs
    return onnx_models.model(nodes, inputs, [info(o) for o in outputs], weights, opset)


def message(source: Any, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(source, **options)
    return str(caught.value)


GOOD = model([node("Relu", ["x"], ["y"])])

# ---------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>Not found</html>", "a web page"),
        (b'\n {"model": 1}', "JSON text"),
        (b"PK\x03\x04....", "a zip archive"),
        (gzip.compress(b"x", mtime=0), "a gzip archive"),
        (b"\x1c\0\0\0TFL3....", "TensorFlow Lite"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"hello, world", "this is not an ONNX model"),
        (bytes(range(256)) * 40, "this is not an ONNX model"),
        (b"\0" * 5000, "this is not an ONNX model"),
        (b"\x08\x09", "a protobuf message without a graph"),
        (GOOD.SerializeToString()[:-9], "truncated"),
        (b"\x0a" * 300_000, "without an IR version"),
    ],
)
def test_not_onnx(tmp_path: Path, data: bytes, says: str):
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    assert says in (text := message(path))
    assert text.startswith("m.onnx: ")


def test_no_file(tmp_path: Path):
    assert "no such file" in message(tmp_path / "absent.onnx")
    assert "a directory" in message(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in message(tmp_path / "pipe")
    assert "no such file" in message("a\0b.onnx")
    assert "cannot be read" in message("a" * 5000)
    assert "a path" in message(42)


def test_every_truncation_of_a_model():
    data = helper_model().SerializeToString()
    for end in range(len(data)):
        with pytest.raises(GpuirError):
            load(data[:end])


def helper_model() -> Any:
    weights = [numpy_helper.from_array(np.zeros((3, 4), np.float32), "w")]
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Softmax", ["h"], ["y"], axis=-1)]
    return model(nodes, weights=weights)


@pytest.mark.slow
def test_damaged_bytes_give_messages_only():
    """Flipped bits, changed, dropped and doubled bytes: a graph that verifies, or a message."""
    draw = random.Random(0)
    branch = helper.make_graph([node("Neg", ["x"], ["a"])], "b", [], [info("a", None)])
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        node("If", ["c"], ["h"], then_branch=branch, else_branch=branch),
        node("Conv", ["image", "w"], ["k"], pads=[1, 1, 1, 1]),
        node("Reshape", ["k", "shape"], ["z"]),
        node("Concat", ["h", "x"], ["y"], axis=0),
    ]
    weights = [
        numpy_helper.from_array(np.zeros((2, 3, 3, 3), np.float32), "w"),
        numpy_helper.from_array(np.array([2, -1]), "shape"),
    ]
    inputs = [info("x", [2, 3]), info("image", [1, 3, 4, 4])]
    data = model(nodes, inputs, ("y", "z"), weights).SerializeToString()
    load(data)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(len(damaged))
            match draw.randrange(4):
                case 0:
                    damaged[at] ^= 1 << draw.randrange(8)
                case 1:
                    damaged[at] = draw.choice((0, 1, 127, 128, 255))
                case 2:
                    del damaged[at : at + draw.randrange(1, 20)]
                case _:
                    damaged[at:at] = damaged[at : at + draw.randrange(1, 20)]
        try:
            verify(load(bytes(damaged)).graph, "onnx")
        except ModelError as error:
            assert str(error)


# ---------------------------------------------------------------------------- graphs


def test_cycle():
    nodes = [
        node("Add", ["x", "b"], ["a"], name="first"),
        node("Relu", ["a"], ["b"], name="second"),
        node("Neg", ["b"], ["y"]),
    ]
    text = message(model(nodes))
    assert "the model has a cycle" in text
    assert "first reads second reads first" in text


def test_node_that_reads_itself():
    assert "n reads n" in message(model([node("Add", ["x", "y"], ["y"], name="n")]))


@pytest.mark.slow
def test_long_cycle():
    nodes = [node("Neg", [f"v{(i - 1) % 20_000}"], [f"v{i}"]) for i in range(20_000)]
    assert "the model has a cycle" in message(model(nodes, outputs=("v5",)))


def test_missing_tensor():
    weight = numpy_helper.from_array(np.zeros((3, 3), np.float32), "weight")
    matmul = node("MatMul", ["x", "weigth"], ["y"], name="MatMul_3")
    text = message(model([matmul], weights=[weight]))
    assert text.startswith("model:MatMul_3: 'weigth' is not defined")
    assert "did you mean weight?" in text


def test_missing_output():
    assert "'z' is not defined" in message(model([node("Relu", ["x"], ["y"])], outputs=("z",)))


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Relu", ["x"], ["y"], name="a"), node("Neg", ["x"], ["y"], name="b")],
        [node("Relu", ["x"], ["x"], name="a"), node("Relu", ["x"], ["y"], name="b")],
        [node("Split", ["x"], ["y", "y"], name="b")],
    ],
)
def test_defined_twice(nodes: list[Any]):
    assert "twice" in message(model(nodes))


def test_two_of_one_name():
    w = numpy_helper.from_array(np.zeros(3, np.float32), "w")
    relu = [node("Relu", ["x"], ["y"])]
    assert "two initializers" in message(model(relu, weights=[w, w]))
    assert "two inputs" in message(model(relu, [info("x", [2]), info("x", [2])]))
    assert "two outputs" in message(model(relu, outputs=("y", "y")))


def test_no_nodes():
    assert load(model([], outputs=())).graph.nodes == ()
    assert load(model([], outputs=("x",))).graph.outputs[0].type.shape == (2, 3)


# ---------------------------------------------------------------------------- types and shapes


def test_shapes_that_do_not_fit():
    w = numpy_helper.from_array(np.zeros((4, 5), np.float32), "w")
    text = message(model([node("MatMul", ["x", "w"], ["y"], name="MatMul_3")], weights=[w]))
    assert text.startswith("model:MatMul_3: t.matmul: inner dimensions differ")
    assert "found:" in text


def test_dtypes_that_do_not_fit():
    inputs = [info("x", [2]), info("k", [2], I64)]
    assert "model:n: " in message(model([node("Add", ["x", "k"], ["y"], name="n")], inputs))


@pytest.mark.parametrize("kind", ["sequence", "optional", "strings", "nothing"])
def test_inputs_that_are_no_tensors_of_numbers(kind: str):
    tensor = helper.make_tensor_type_proto(F32, [2])
    proto = {
        "sequence": lambda: helper.make_sequence_type_proto(tensor),
        "optional": lambda: helper.make_optional_type_proto(tensor),
        "strings": lambda: helper.make_tensor_type_proto(TensorProto.STRING, [2]),
        "nothing": TypeProto,
    }[kind]()
    text = message(model([], [helper.make_value_info("x", proto)], ()))
    assert "tensor of numbers" in text


def test_impossible_shapes():
    huge = [info("x", [2**40, 2**40])]
    assert "a shape is not valid" in message(model([node("Relu", ["x"], ["y"])], huge))
    grow = [node("Concat", ["x"] * 4, ["y"], axis=0, name="n")]
    assert "model:n: a shape is not valid" in message(model(grow, [info("x", [2**47])]))
    negative = TensorProto(name="w", data_type=F32, dims=[-1])
    text = message(model([node("Relu", ["w"], ["y"])], weights=[negative]))
    assert "a shape is not valid" in text


def test_huge_is_fine_while_it_is_not_computed():
    """A tensor of petabytes is described like any other."""
    g = load(model([node("Relu", ["x"], ["y"])], [info("x", [2**24, 2**24])])).graph
    assert g.outputs[0].type.nbytes == 2**50


def test_shape_of_a_tensor_too_large_to_compute():
    """Numbers that would take the machine's memory are not computed for a shape."""
    nodes = [
        node("ConstantOfShape", ["n"], ["big"]),
        node("CumSum", ["big", "zero"], ["sums"]),
        node("Cast", ["sums"], ["ints"], to=I64),
        node("Reshape", ["x", "ints"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([2**40]), "n"),
        numpy_helper.from_array(np.array(0), "zero"),
    ]
    text = message(model(nodes, weights=weights))
    assert "Reshape" in text or "too large" in text


def test_wrong_number_of_bytes():
    short = TensorProto(name="w", data_type=I64, dims=[3], raw_data=b"1234")
    assert "does not match its type" in message(
        model([node("Reshape", ["x", "w"], ["y"])], weights=[short])
    )


def test_strings_matter_when_they_are_read():
    words = helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])
    assert load(model([node("Relu", ["x"], ["y"])], weights=[words])).graph
    assert "found:    strings" in message(model([node("Neg", ["w"], ["y"])], weights=[words]))


def test_strings_and_sequences_are_refused_in_words():
    make = node("SequenceConstruct", ["x"], ["s"], name="make")
    assert "the output 's' is a sequence" in message(model([make], outputs=("s",)))
    text = message(model([make, node("Relu", ["s"], ["y"], name="n")]))
    assert text.startswith("model:n: Relu reads a sequence")
    text = message(model([node("StringNormalizer", ["x"], ["y"], name="n")]))
    assert text.startswith("model:n: StringNormalizer works on strings")
    text = message(
        model(
            [node("SequenceAt", ["x", "i"], ["y"], name="n")],
            weights=[numpy_helper.from_array(np.array(0), "i")],
        )
    )
    assert "the first input is not a sequence" in text


# ---------------------------------------------------------------------------- operators


def test_no_such_operator():
    assert "did you mean Softmax" in message(model([node("SoftMax", ["x"], ["y"])]))
    text = message(model([node("Binarizer", ["x"], ["y"])]))
    assert text.startswith("model:Binarizer#0: Binarizer: opset 17 of ai.onnx has no such operator")


@pytest.mark.parametrize("opset", [0, 99, 2**40])
def test_opsets(opset: int):
    assert "is not supported" in message(model([node("Relu", ["x"], ["y"])], opset=opset))


def test_operands_that_are_missing():
    assert "MatMul" in message(model([node("MatMul", ["x"], ["y"])]))
    assert "MatMul" in message(model([node("MatMul", ["", ""], ["y"])]))
    assert "Relu" in message(model([node("Relu", [], ["y"])]))


def test_attributes_of_the_wrong_kind():
    text = message(model([node("Transpose", ["x"], ["y"], perm="abc")]))
    assert text.startswith("model:Transpose#0")


def test_names_that_are_not_text():
    data = model([node("Relu", ["xx"], ["y"])], [info("xx", [2])]).SerializeToString()
    assert "is not valid UTF-8 text" in message(data.replace(b"xx", b"\xff\xfe"))


# ---------------------------------------------------------------------------- options


def test_options_with_wrong_names():
    proto = model([node("Relu", ["image"], ["y"])], [info("image", ["batch", 3])])
    assert "did you mean batch?" in message(proto, dims={"bacth": 2})
    assert "did you mean image?" in message(proto, inputs={"imgae": (2, 3)})
    assert "did you mean image?" in message(proto, values={"imgae": 2})
    assert "the model has no loops" in message(proto, dims={"batch": 1}, trip_counts={"l": 2})


def test_options_with_wrong_values():
    proto = model([node("Relu", ["x"], ["y"])], [info("x", ["batch", 3])])
    assert "the number of dimensions is wrong" in message(proto, inputs={"x": (2,)})
    assert "the size of axis 1 is wrong" in message(proto, inputs={"x": (2, 4)})
    assert "sizes of 0 or more" in message(proto, inputs={"x": (-2, 3)})
    assert "0 or more" in message(proto, dims={"batch": -1})
    assert "a shape is not valid" in message(proto, dims={"batch": 2**62})
    assert "--value x: the size of axis 0" in message(
        proto, values={"x": [[1, 2, 3]]}, dims={"batch": 2}
    )
    assert "the value does not match the type" in message(proto, values={"x": [["a", "b", "c"]]})


# ---------------------------------------------------------------------------- depth


def nested(depth: int) -> Any:
    """`If` in `If` in `If`."""
    inner = [node("Neg", ["x"], ["a0"])]
    for i in range(depth):
        branch = helper.make_graph(inner, "b", [], [info(f"a{i}", None)])
        at = node("If", ["c"], [f"a{i + 1}"])
        for name in ("then_branch", "else_branch"):
            at.attribute.add(name=name, type=AttributeProto.GRAPH)
        at.attribute[0].g.CopyFrom(branch)
        at.attribute[1].g.CopyFrom(
            helper.make_graph([node("Abs", ["x"], [f"e{i}"])], "e", [], [info(f"e{i}", None)])
        )
        inner = [at]
    return model(inner, [info("x", [2]), info("c", [], TensorProto.BOOL)], (f"a{depth}",))


def test_deep_nesting():
    verify(load(nested(20)).graph, "onnx")
    try:
        load(nested(30).SerializeToString())
    except ModelError as error:
        assert "nested" in str(error) or "protobuf" in str(error)


def test_nested_deeper_than_protobuf_reads():
    """Messages inside one another by the thousand, each large enough to be looked into."""
    inner = b"\0" * 5000
    for _ in range(300):  # graph > node > attribute > graph
        for tag in (0x32, 0x2A, 0x0A):
            size, length = len(inner), bytearray()
            while size > 127:
                length.append(size & 127 | 128)
                size >>= 7
            inner = bytes((tag, *length, size)) + inner
    size, length = len(inner), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    assert "nested" in message(b"\x08\x09\x3a" + bytes(length) + bytes((size,)) + inner)


def test_functions_that_double():
    """Fifty functions, each calling the next twice: 2^50 nodes are counted, none is converted."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    functions = [
        helper.make_function("mine", f"f{i}", ["a"], ["c"], body, opsets)
        for i in range(50)
        for body in (
            [
                node(f"f{i + 1}", ["a"], ["b"], domain="mine"),
                node(f"f{i + 1}", ["b"], ["c"], domain="mine"),
            ],
        )
    ]
    functions.append(
        helper.make_function("mine", "f50", ["a"], ["c"], [node("Neg", ["a"], ["c"])], opsets)
    )
    proto = model([node("f0", ["x"], ["y"], domain="mine")])
    proto.opset_import.append(opsets[1])
    proto.functions.extend(functions)
    assert calls(lambda: message(proto)) < 20_000
    assert "the model expands to more than 100002 nodes" in message(proto)


@pytest.mark.slow
def test_a_number_in_many_shapes():
    """A long chain of layouts of one number is followed without recursion, and takes no memory."""
    shapes = [numpy_helper.from_array(np.array(s), f"s{i}") for i, s in enumerate(([1, 1], [1]))]
    nodes = [node("Reshape", [f"v{i}", f"s{i % 2}"], [f"v{i + 1}"]) for i in range(6000)]
    nodes += [node("Expand", ["v6000", "big"], ["wide"]), node("Add", ["x", "wide"], ["y"])]
    big = numpy_helper.from_array(np.array([2**20, 2, 3]), "big")
    one = numpy_helper.from_array(np.ones(1, np.float32), "v0")
    g = load(model(nodes, weights=[*shapes, big, one])).graph
    assert g.outputs[0].type.shape == (2**20, 2, 3)


@pytest.mark.slow
def test_ten_thousand_nodes_load():
    nodes = [node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(10_000)]
    proto = model(nodes, [info("v0", [4])], ("v10000",))
    assert len(load(proto).graph.nodes) == 10_000


# ---------------------------------------------------------------------------- inside converters


def tensor(name: str, values: Any, dtype: Any = np.float32) -> Any:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


INF, NAN = float("inf"), float("nan")
IMAGE = [info("x", [1, 1, 4, 4])]


@pytest.mark.parametrize(
    ("made", "inputs", "weights", "says"),
    [
        (node("Einsum", ["x", "x"], ["y"]), None, [], "attribute 'equation' is missing"),
        (node("If", ["c"], ["y"]), [info("c", [], 9)], [], "_branch' is missing"),
        (node("Loop", ["", "", "x"], ["y"]), None, [], "attribute 'body' is missing"),
        (node("Concat", ["x", "x"], ["y"], axis=[0, 1]), None, [], "'axis' has the wrong type"),
        (node("Elu", ["x"], ["y"], alpha="a"), None, [], "'alpha' has the wrong type"),
        (node("TopK", ["x"], ["y"]), None, [], "input 1 is missing"),
        (node("Conv", ["x", ""], ["y"]), IMAGE, [], "input 1"),
        (
            node("Resize", ["x", "", "s"], ["y"]),
            IMAGE,
            [tensor("s", [1, 1, INF, 2])],
            "the scales (input 2)",
        ),
        (node("Resize", ["x", "", "s"], ["y"]), IMAGE, [tensor("s", [1, 1, 0, 2])], "a scale"),
        *(
            (
                node("Range", ["a", "b", "c"], ["y"]),
                [],
                [tensor(n, v) for n, v in zip("abc", bounds, strict=True)],
                says,
            )
            for bounds, says in (
                ((0, INF, 1), "limit (input 1)"),
                ((NAN, 1, 1), "start (input 0)"),
                ((0, 1, 0), "give no valid range"),
                ((0, [1, 2], 1), "one number"),
            )
        ),
        (node("TopK", ["x", "k"], ["y", ""]), None, [tensor("k", [], np.int64)], "one number"),
        (
            node("Attention", ["x", "x", "x"], ["y"]),
            None,
            [],
            "input 0 has the wrong number of axes",
        ),
        (
            node("Squeeze", ["x", "a"], ["y"]),
            [info("x", [])],
            [tensor("a", [0], np.int64)],
            "Squeeze: axis is out of range",
        ),
        (
            node("Attention", ["x", "x", "x"], ["y"]),
            [info("x", [1, 2, 2, 0])],
            [],
            "the head size is 0",
        ),
        (
            node("NonMaxSuppression", ["x", "x"], ["y"]),
            None,
            [],
            "input 0 has the wrong number of axes",
        ),
        (node("Split", ["x"], ["y"], num_outputs=2**62), None, [], "Split: num_outputs"),
        (node("SplitToSequence", ["x"], ["y"]), [info("x", [2**32])], [], "at most 10000 pieces"),
        (
            node("Expand", ["x", "s"], ["y"]),
            None,
            [tensor("s", [2**62, 2, 3], np.int64)],
            "a shape is not valid",
        ),
        (
            node("Tile", ["x", "s"], ["y"]),
            None,
            [tensor("s", [2**61, 2], np.int64)],
            "a shape is not valid",
        ),
    ],
)
def test_what_a_converter_cannot_use(made: Any, inputs: Any, weights: list[Any], says: str):
    """The node by its place in the file, its attribute or input, and what was found there."""
    made.name = "here"
    text = message(model([made], inputs, weights=weights, opset=24))
    assert text.startswith("model:here: ") and says in text
    assert "reads it wrongly" not in text


def test_extents_are_not_enumerated():
    """What n-grams there are, windows over many images, masks of many keys: in closed form."""
    pool = {"pool_int64s": [1, 2, 1, 2], "ngram_counts": [0, 2], "ngram_indexes": [0, 1, 2]}
    grams = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 2**40}
    found = [
        model([node("TfIdfVectorizer", ["x"], ["y"], **pool, **grams)], [info("x", [2**40], I64)]),
        model(
            [node("MaxPool", ["x"], ["y", "i"], kernel_shape=[2])],
            [info("x", [2**20, 2**20, 4])],
            ("y", "i"),
        ),
        model(
            [node("Attention", ["x", "x", "x"], ["y", "", "", "s"], is_causal=1)],
            [info("x", [1, 1, 2**22, 8])],
            ("y", "s"),
            opset=24,
        ),
    ]
    for made in found:
        assert load(made).graph.nodes


def test_what_is_ours_names_the_node_and_its_attributes(monkeypatch: pytest.MonkeyPatch):
    def broken(n: Any, e: Any) -> Any:
        raise KeyError("k")

    monkeypatch.setitem(CONVERTERS, "Gather", broken)
    inputs = [info("x", [4]), info("i", [2], I64)]
    text = message(model([node("Gather", ["x", "i"], ["y"], axis=0, name="here")], inputs))
    assert text.startswith(
        "model:here: Gather: the node is not valid ONNX, or gpuir reads it wrongly"
    )
    assert "Gather(f32[4], i64[2]; axis=0)" in text and "KeyError" in text


def test_external_data_stays_with_the_model(tmp_path: Path):
    """A link out of the folder is refused; one that the model itself goes by too is not."""
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.arange(2, dtype=np.int64).tobytes())
    shape = TensorProto(name="s", data_type=I64, dims=[2], data_location=TensorProto.EXTERNAL)
    shape.external_data.add(key="location", value="w.bin")
    made = model([node("Reshape", ["x", "s"], ["y"])], [info("x", [0, 1])], weights=[shape])
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    (folder / "w.bin").symlink_to(secret)
    assert "is outside the model's folder" in message(folder / "m.onnx")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (folder / "w.bin").unlink()
    for name in ("m.onnx", "w.bin"):  # as in the cache of a hub
        data = made.SerializeToString() if name == "m.onnx" else secret.read_bytes()
        (blobs / name).write_bytes(data)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(blobs / name)
    assert load(folder / "m.onnx").graph.outputs[0].type.shape == (0, 1)


@pytest.mark.parametrize(("length", "fits"), [("8", True), ("4", False), ("16", False)])
def test_external_data_is_as_long_as_it_says(tmp_path: Path, length: str, fits: bool):
    (tmp_path / "w.bin").write_bytes(np.arange(1, 5, dtype=np.int64).tobytes())
    shape = TensorProto(name="s", data_type=I64, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", "8"), ("length", length)):
        shape.external_data.add(key=key, value=value)
    made = model([node("Reshape", ["x", "s"], ["y"])], [info("x", [1, 2])], weights=[shape])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    if fits:
        assert load(tmp_path / "m.onnx").graph.outputs[0].type.shape == (2,)
    else:
        assert "does not match its type" in message(tmp_path / "m.onnx")


def test_a_function_is_defined_once():
    """Runtimes differ in which of two they take; the same twice is one."""
    opsets = [helper.make_opsetid("", 21)]
    relu, neg = (
        helper.make_function("f", "f", ["a"], ["b"], [node(op, ["a"], ["b"])], opsets)
        for op in ("Relu", "Neg")
    )
    made = model([node("f", ["x"], ["y"], domain="f")], [info("x", [4])])
    made.opset_import.append(helper.make_opsetid("f", 1))
    made.functions.extend([relu, relu])
    assert load(made).graph.nodes
    made.functions.append(neg)
    assert "defined twice" in message(made)


def test_a_model_that_holds_for_one_size_alone():
    """Its input says any batch, a Reshape has the shape of one."""
    made = model(
        [node("Reshape", ["x", "shape"], ["y"])],
        [info("x", ["batch", 6])],
        weights=[tensor("shape", [2, 3], np.int64)],
    )
    assert load(made, dims={"batch": 1}).graph.outputs[0].type.shape == (2, 3)
    text = message(made, dims={"batch": 8})
    assert "fix:      --dims batch=1, if the model was exported for that size only" in text
    unnamed = model([node("Relu", ["x"], ["y"])], [info("x", [None, 6])])
    assert "expected: an extent for each ?" in message(unnamed)


MS, ML = "com.microsoft", "ai.onnx.ml"


def converted(made: Any, *shapes: Sequence[int], opset: int = 24) -> str:
    """What is said of one node whose operands x0, x1 ... have these shapes."""
    inputs = [info(f"x{i}", list(shape)) for i, shape in enumerate(shapes)]
    made = model([made], inputs, ("y",), opset=opset)
    for domain in (MS, ML):
        made.opset_import.append(helper.make_opsetid(domain, {MS: 1, ML: 5}[domain]))
    return message(made)


@pytest.mark.parametrize("key", sorted(RANKS))
def test_each_stated_rank_is_asked_for(key: str):
    """An operand of a rank that its operator does not take is refused as that, one by one."""
    domain, _, op = key.rpartition("::")
    needed = {
        name: [1, 1, 1] if name == "mrope_section" else 1 for name in NEEDED.get(key, "").split()
    }
    rules = RANKS[key].split()
    for i, rule in enumerate(rules):
        if rule == "*":
            continue
        shapes = [(1,) * (int(one[0]) if (one := r.split("|")[0]) != "*" else 1) for r in rules]
        shapes[i] = (1,) * 6 if not rule.endswith("+") else ()
        names = [f"x{j}" for j in range(len(shapes))]
        text = converted(node(op, names, ["y"], domain=domain, **needed), *shapes)
        assert f"{op}: input {i} has the wrong number of axes" in text


@pytest.mark.parametrize("key", sorted(NEEDED))
def test_each_needed_attribute_is_asked_for(key: str):
    domain, _, op = key.rpartition("::")
    names = NEEDED[key].split()
    for missing in names:
        given = {name: 1 for name in names if name != missing}
        made = node(op, [f"x{i}" for i in range(5)], ["y"], domain=domain, **given)
        shapes = [(1,) * int(r[0]) if r[0] != "*" else (1,) for r in RANKS.get(key, "").split()]
        text = converted(made, *shapes, *[(1, 1)] * (5 - len(shapes)))
        assert f"{op}: the attribute {missing!r}" in text
        assert "1 or more" in text


TREE = {"nodes_featureids": [0], "nodes_modes": tensor("m", [0], np.uint8)}
TREE |= {key: [0] for key in ("nodes_truenodeids", "nodes_falsenodeids", "nodes_falseleafs")}
TREE |= {"nodes_trueleafs": [1], "nodes_splits": tensor("s", [0.5]), "tree_roots": [0]}
TREE |= {"leaf_targetids": [0], "leaf_weights": tensor("w", [1.0])}
NAMED = {"nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_values": [0.5, 0.0, 0.0]}
NAMED |= {"nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_featureids": [0, 0, 0]}
NAMED |= {"nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "target_ids": [0]}
NAMED |= {"target_treeids": [0], "target_nodeids": [1], "target_weights": [1.0]}


@pytest.mark.parametrize(
    ("op", "attributes", "says"),
    [
        ("TreeEnsemble", TREE | {"nodes_trueleafs": [1, 1]}, "different lengths"),
        ("TreeEnsemble", TREE | {"leaf_targetids": [0, 1]}, "different lengths"),
        ("TreeEnsemble", TREE | {"aggregate_function": 7}, "no such aggregate_function"),
        ("TreeEnsemble", TREE | {"post_transform": -1}, "no such post_transform"),
        ("TreeEnsembleRegressor", NAMED | {"nodes_nodeids": [0, 1]}, "different lengths"),
        ("TreeEnsembleRegressor", NAMED | {"nodes_truenodeids": [9, 0, 0]}, "node 9 of tree 0"),
        ("TreeEnsembleRegressor", NAMED | {"target_nodeids": [0]}, "do not belong to a leaf"),
        ("TreeEnsembleRegressor", NAMED | {"target_ids": [0, 0]}, "do not belong to a leaf"),
        ("LinearRegressor", {"targets": 0}, "no targets or no input columns"),
    ],
)
def test_tables_of_trees_that_do_not_fit(op: str, attributes: dict[str, Any], says: str):
    text = converted(node(op, ["x0"], ["y"], domain=ML, **attributes), (2, 3))
    assert says in text and "reads it wrongly" not in text


@pytest.mark.parametrize(
    ("made", "shapes", "says"),
    [
        (node("GlobalLpPool", ["x0"], ["y"], p=0), [(1, 2, 3)], "the attribute 'p'"),
        (node("LRN", ["x0"], ["y"], size=-1), [(1, 2, 3)], "the attribute 'size'"),
        (node("MaxPool", ["x0"], ["y"], kernel_shape=[-1]), [(1, 2, 3)], "must be at least 1"),
        (
            node("RandomUniformLike", ["x0"], ["y"], seed=np.inf),
            [(3,)],
            "the seed must be a finite",
        ),
        (node("Bernoulli", ["x0"], ["y"], seed=np.nan), [(3,)], "the seed must be a finite"),
    ],
)
def test_numbers_that_no_operator_takes(made: Any, shapes: Any, says: str):
    text = converted(made, *shapes)
    assert says in text and "reads it wrongly" not in text


def test_an_operator_that_the_opset_does_not_have_and_a_broken_node():
    """The first definition says what is wrong with it."""
    text = converted(node("Einsum", ["x0"], ["y"]), (2, 3), opset=11)
    assert "the attribute 'equation' is missing" in text


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (node("Gelu", ["x"], ["y"], approximate="tahn"), "none, tanh"),
        (
            node("Pad", ["x"], ["y"], mode="edges", pads=[0, 1, 0, 1]),
            "constant, edge, reflect, wrap",
        ),
        (
            node("LpPool", ["x"], ["y"], auto_pad="SAME", kernel_shape=[2]),
            "NOTSET, VALID, SAME_UPPER",
        ),
    ],
)
def test_a_word_that_an_attribute_does_not_have(made: Any, words: str):
    name, word = next((a.name, a.s.decode()) for a in made.attribute if a.s)
    text = message(model([made], inputs=[info("x", [2, 3, 8])], opset=20))
    assert f"{made.op_type}: {name} is unknown\n  expected: {words}" in text
    assert f"found:    {word}\n  fix:      did you mean " in text
