"""Writes examples/encoder.onnx: a BERT-base-shaped encoder as PyTorch's exporter spells it.

usage: python examples/make_encoder.py [FILE]

The weights are declared as external data in a file that does not exist: gpuir needs shapes, not
numbers. `batch` and `seq` are symbolic.
"""

from __future__ import annotations

import sys

from onnx import TensorProto, helper, save

LAYERS, WIDTH, HEADS, INNER, WORDS = 12, 768, 12, 3072, 30522


class Encoder:
    """Collects nodes and weights in the order of the model."""

    def __init__(self) -> None:
        self.nodes, self.weights = [], []

    def op(self, kind: str, *inputs: str, name: str, **attributes: object) -> str:
        output = f"{name}_output_0"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=name, **attributes))
        return output

    def weight(self, name: str, *shape: int) -> str:
        tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="encoder.onnx.data")
        self.weights.append(tensor)
        return name

    def constant(self, name: str, kind: int, values: list[float] | list[int], *shape: int) -> str:
        self.weights.append(helper.make_tensor(name, kind, shape, values))
        return name

    def linear(self, x: str, path: str, inputs: int, outputs: int) -> str:
        dot = path.replace("/", ".").strip(".")
        weight = self.weight(f"{dot}.weight", inputs, outputs)
        y = self.op("MatMul", x, weight, name=f"{path}/MatMul")
        return self.op("Add", self.weight(f"{dot}.bias", outputs), y, name=f"{path}/Add")

    def norm(self, x: str, path: str) -> str:
        dot = path.replace("/", ".").strip(".")
        mean = self.op("ReduceMean", x, name=f"{path}/ReduceMean", axes=[-1])
        off = self.op("Sub", x, mean, name=f"{path}/Sub")
        square = self.op("Pow", off, "two", name=f"{path}/Pow")
        var = self.op("ReduceMean", square, name=f"{path}/ReduceMean_1", axes=[-1])
        shifted = self.op("Add", var, "eps", name=f"{path}/Add")
        root = self.op("Sqrt", shifted, name=f"{path}/Sqrt")
        y = self.op("Div", off, root, name=f"{path}/Div")
        y = self.op("Mul", y, self.weight(f"{dot}.weight", WIDTH), name=f"{path}/Mul")
        return self.op("Add", y, self.weight(f"{dot}.bias", WIDTH), name=f"{path}/Add_1")

    def heads(self, x: str, path: str, perm: list[int]) -> str:
        shape = self.op("Concat", "batch_1", "seq_1", "heads_shape", name=f"{path}/Concat", axis=0)
        split = self.op("Reshape", x, shape, name=f"{path}/Reshape")
        return self.op("Transpose", split, name=f"{path}/Transpose", perm=perm)

    def attention(self, x: str, path: str, mask: str) -> str:
        q, k, v = (
            self.linear(x, f"{path}/self/{part}", WIDTH, WIDTH)
            for part in ("query", "key", "value")
        )
        q = self.heads(q, f"{path}/self/q", [0, 2, 1, 3])
        k = self.heads(k, f"{path}/self/k", [0, 2, 3, 1])
        v = self.heads(v, f"{path}/self/v", [0, 2, 1, 3])
        scores = self.op("MatMul", q, k, name=f"{path}/self/MatMul")
        scores = self.op("Div", scores, "root_d", name=f"{path}/self/Div")
        scores = self.op("Add", scores, mask, name=f"{path}/self/Add")
        weights = self.op("Softmax", scores, name=f"{path}/self/Softmax", axis=-1)
        y = self.op("MatMul", weights, v, name=f"{path}/self/MatMul_1")
        y = self.op("Transpose", y, name=f"{path}/self/Transpose", perm=[0, 2, 1, 3])
        shape = self.op("Concat", "batch_1", "seq_1", "width", name=f"{path}/self/Concat", axis=0)
        y = self.op("Reshape", y, shape, name=f"{path}/self/Reshape")
        y = self.linear(y, f"{path}/output/dense", WIDTH, WIDTH)
        y = self.op("Add", y, x, name=f"{path}/output/Add")
        return self.norm(y, f"{path}/output/LayerNorm")

    def gelu(self, x: str, path: str) -> str:
        y = self.op("Div", x, "root_2", name=f"{path}/Div")
        y = self.op("Erf", y, name=f"{path}/Erf")
        y = self.op("Add", y, "one", name=f"{path}/Add")
        y = self.op("Mul", x, y, name=f"{path}/Mul")
        return self.op("Mul", y, "half", name=f"{path}/Mul_1")

    def layer(self, x: str, path: str, mask: str) -> str:
        x = self.attention(x, f"{path}/attention", mask)
        y = self.linear(x, f"{path}/intermediate/dense", WIDTH, INNER)
        y = self.gelu(y, f"{path}/intermediate/gelu")
        y = self.linear(y, f"{path}/output/dense", INNER, WIDTH)
        y = self.op("Add", y, x, name=f"{path}/output/Add")
        return self.norm(y, f"{path}/output/LayerNorm")

    def model(self):
        for name, value in (
            *(("two", 2.0), ("eps", 1e-12), ("one", 1.0), ("half", 0.5)),
            *(("root_2", 2**0.5), ("root_d", (WIDTH / HEADS) ** 0.5), ("hide", -3.4e38)),
        ):
            self.constant(name, TensorProto.FLOAT, [value])
        self.constant("heads_shape", TensorProto.INT64, [HEADS, WIDTH // HEADS], 2)
        self.constant("width", TensorProto.INT64, [WIDTH], 1)
        self.constant("axes", TensorProto.INT64, [1, 2], 2)
        self.constant("zero", TensorProto.INT64, [0], 1)
        shape = self.op("Shape", "input_ids", name="/Shape")
        for i, dim in enumerate(("batch_1", "seq_1")):
            index = self.constant(f"index_{i}", TensorProto.INT64, [i], 1)
            self.nodes.append(
                helper.make_node("Gather", [shape, index], [dim], name=f"/Gather_{i}")
            )
        mask = self.op("Unsqueeze", "attention_mask", "axes", name="/Unsqueeze")
        mask = self.op("Cast", mask, name="/Cast", to=TensorProto.FLOAT)
        mask = self.op("Sub", "one", mask, name="/Sub")
        mask = self.op("Mul", mask, "hide", name="/Mul")
        words = self.weight("embeddings.word.weight", WORDS, WIDTH)
        x = self.op("Gather", words, "input_ids", name="/embeddings/word/Gather")
        positions = self.weight("embeddings.position.weight", 512, WIDTH)
        rows = self.op(
            "Slice", positions, "zero", "seq_1", "zero", name="/embeddings/position/Slice"
        )
        x = self.op("Add", x, rows, name="/embeddings/Add")
        x = self.norm(x, "/embeddings/LayerNorm")
        for i in range(LAYERS):
            x = self.layer(x, f"/encoder/layer.{i}", mask)
        self.nodes.append(
            helper.make_node("Identity", [x], ["last_hidden_state"], name="/Identity")
        )
        ids, kept = (
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"])
            for name in ("input_ids", "attention_mask")
        )
        y = helper.make_tensor_value_info(
            "last_hidden_state", TensorProto.FLOAT, ["batch", "seq", WIDTH]
        )
        graph = helper.make_graph(self.nodes, "encoder", [ids, kept], [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


if __name__ == "__main__":
    save(Encoder().model(), sys.argv[1] if len(sys.argv) > 1 else "examples/encoder.onnx")
