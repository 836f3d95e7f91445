"""What of a model is a weight: what the file stores, each once, at any size of the inputs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import F32, I64, agrees, const, info, loaded, model, node

import gpuir
from gpuir.frontends.model import Model
from gpuir.simulate.memory import memory

RNG = np.random.default_rng(0)
W = RNG.random((32, 48), np.float32)


def weight_bytes(m: Model) -> int:
    return int(memory(m.graph, block=1).parts["weights"])


def test_a_matrix_that_many_products_read_transposed_is_there_once() -> None:
    nodes = [node("Gemm", ["x", "w"], ["y0"], transB=1)]
    nodes += [node("Gemm", [f"y{i}", "w"], [f"z{i}"]) for i in range(4)]
    nodes += [node("Gemm", [f"z{i}", "w"], [f"y{i + 1}"], transB=1) for i in range(4)]
    m = agrees(
        model(nodes, [info("x", (2, 48))], ["y4"], [const("w", W)]),
        {"x": RNG.random((2, 48), np.float32)},
        rtol=1e-4,
    )
    assert [p.type.shape for p in m.graph.params] == [(48, 32), (32, 48)]
    found = [a for a in m.graph.assumed if a.startswith("weights take")]
    assert len(found) == 1 and "0.01229 MB, but 0.006144 MB in the model" in found[0]
    m = loaded(model(nodes[:1], [info("x", (2, 48))], ["y0"], [const("w", W)]))
    assert weight_bytes(m) == W.nbytes and not m.graph.assumed


def positions(batch: int, seq: int) -> tuple[object, dict[str, object]]:
    """As exporters write it: positions from the input's shape, one row for each of a batch, and a
    table spread over the batch."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "zero"], ["b"], axis=0),
        node("Gather", ["shape", "one"], ["s"], axis=0),
        node("Range", ["zero", "s", "one"], ["range"]),
        node("Unsqueeze", ["range", "axes"], ["row"]),
        node("Expand", ["row", "shape"], ["ids"]),
        node("Gather", ["table", "ids"], ["rows"], axis=0),
        node("Gather", ["table", "x"], ["words"], axis=0),
        node("Add", ["rows", "words"], ["y"]),
    ]
    weights = [const("zero", np.int64(0)), const("one", np.int64(1))]
    weights += [const("axes", np.array([0])), const("table", RNG.random((64, 32), np.float32))]
    proto = model(nodes, [info("x", ("batch", "seq"), I64)], ["y"], weights)
    return proto, {"x": RNG.integers(0, 64, (batch, seq))}


@pytest.mark.parametrize("batch, seq", [(1, 20), (4, 20), (64, 33)])
def test_weights_do_not_grow_with_the_batch(batch: int, seq: int) -> None:
    proto, feeds = positions(batch, seq)
    m = agrees(proto, feeds, dims={"batch": batch, "seq": seq})
    assert weight_bytes(m) == 64 * 32 * 4
    assert not [a for a in m.graph.assumed if a.startswith("weights take")]


def test_what_a_file_of_fixed_sizes_states_is_computed_when_it_is_loaded() -> None:
    """onnxruntime folds these too."""
    proto, feeds = positions(4, 20)
    for dim, n in zip(proto.graph.input[0].type.tensor_type.shape.dim, (4, 20), strict=True):
        dim.dim_value = n
    m = agrees(proto, feeds)
    assert weight_bytes(m) == 64 * 32 * 4 + 4 * 20 * 32 * 4
    assert [a for a in m.graph.assumed if a.startswith("weights take 0.01843 MB, but 0.008")]


def test_the_first_state_of_a_recurrent_net_is_no_weight() -> None:
    cells = {"w": (1, 64, 8), "r": (1, 64, 16)}
    weights = [const(k, RNG.random(s, np.float32)) for k, s in cells.items()]
    proto = model(
        [node("LSTM", ["x", "w", "r"], ["y"], hidden_size=16)],
        [info("x", (5, "batch", 8), F32)],
        ["y"],
        weights,
    )
    feeds = {"x": RNG.random((5, 300, 8), np.float32)}
    m = agrees(proto, feeds, dims={"batch": 300})
    assert weight_bytes(m) == 4 * (64 * 8 + 64 * 16)


def test_a_mask_of_ones_is_no_weight_however_it_is_computed() -> None:
    """What holds one number throughout stays one number through pointwise ops."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["ones"], value=const("", np.float32([1]))),
        node("Sub", ["two", "ones"], ["left"]),
        node("Mul", ["left", "least"], ["mask"]),
        node("Add", ["x", "mask"], ["y"]),
    ]
    weights = [const("two", np.float32(2)), const("least", np.float32([-5]))]
    proto = model(nodes, [info("x", ("batch", "seq"))], ["y"], weights)
    m = agrees(proto, {"x": RNG.random((7, 9), np.float32)}, dims={"batch": 7, "seq": 9})
    assert weight_bytes(m) == 0 and [n.op.name for n in m.graph.nodes] == ["t.constant", "t.map"]


@pytest.mark.parametrize("size, step, made", [(16, 16, 0), (16, 8, 8 * 16 * 8)])
def test_windows_side_by_side_are_a_view_and_others_are_listed(
    size: int, step: int, made: int
) -> None:
    torch = pytest.importorskip("torch")

    class Windows(torch.nn.Module):
        def forward(self, x: object) -> object:
            return x.unfold(1, size, step) * 2

    graph = gpuir.load(Windows(), args=(torch.zeros(3, 72 if made else 70),))
    assert memory(graph, block=1).parts.get("weights", 0) == made
    assert [a.split(" MB")[0] for a in graph.assumed] == ["weights take 0.001024"] * bool(made)


def test_a_weight_that_is_folded_keeps_its_name() -> None:
    """Transposed, cast, scaled, reshaped, cut into parts: each is called as the file calls it, as
    with PyTorch, whose programs do all that when they run."""
    nodes = [
        node("Transpose", ["lin.weight"], ["turned"], perm=[1, 0]),
        node("MatMul", ["x", "turned"], ["a"]),
        node("Cast", ["half.weight"], ["wide"], to=F32),
        node("Mul", ["wide", "scale"], ["scaled"]),
        node("MatMul", ["a", "scaled"], ["b"]),
        node("Split", ["qkv.weight"], ["q", "k"], axis=1),
        node("MatMul", ["b", "q"], ["c"]),
        node("MatMul", ["b", "k"], ["d"]),
        node("Add", ["c", "d"], ["y"]),
    ]
    square, wide = RNG.random((32, 32), np.float32), RNG.random((32, 8), np.float32)
    weights = [const("lin.weight", square), const("half.weight", square.astype(np.float16))]
    weights += [const("scale", np.float32(0.5)), const("qkv.weight", wide)]
    m = agrees(
        model(nodes, [info("x", (2, 32))], ["y"], weights),
        {"x": RNG.random((2, 32), np.float32)},
        rtol=1e-3,
    )
    names = [p.name for p in m.graph.params]
    assert names == ["lin.weight", "half.weight", "qkv.weight", "qkv.weight.1"]


def test_a_weight_that_is_an_output_too_is_called_as_the_output() -> None:
    nodes = [node("Transpose", ["w"], ["turned"], perm=[1, 0]), node("Identity", ["x"], ["y"])]
    m = loaded(model(nodes, [info("x", (2, 48))], ["y", "turned"], [const("w", W)]))
    assert [p.name for p in m.graph.params] == ["turned"]


def test_numbers_out_of_several_weights_are_called_as_the_result() -> None:
    nodes = [node("Add", ["v", "w"], ["sum"]), node("Gemm", ["x", "sum"], ["y"], transB=1)]
    proto = model(nodes, [info("x", (2, 48))], ["y"], [const("v", W), const("w", W)])
    assert [p.name for p in loaded(proto).graph.params] == ["sum"]
