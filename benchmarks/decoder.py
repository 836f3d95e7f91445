"""A language model as an ONNX file, without its numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def decoder(path: Path, layers: int = 16) -> None:
    """Writes a decoder of 1.2 billion weights on a prompt of 512 tokens, as Llama-3.2-1B has its
    sizes: the weights are constants of a shape, as in the light networks."""
    h, heads, groups, ffn, vocab, seq = 2048, 32, 8, 8192, 128256, 512
    made, weights, d = [], {}, h // heads

    def weight(name, *shape):
        key = f"{name}_shape"
        weights[key] = numpy_helper.from_array(np.array(shape, np.int64), key)
        value = helper.make_tensor("value", TensorProto.FLOAT16, [1], [0.01])
        made.append(helper.make_node("ConstantOfShape", [key], [name], name, value=value))
        return name

    def const(name, array):
        weights.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def op(kind, *args, outputs=1, **attributes):
        names = [f"v{len(made)}" + (f"_{i}" if i else "") for i in range(outputs)]
        made.append(helper.make_node(kind, args, names, f"{kind}_{len(made)}", **attributes))
        return names[0] if outputs == 1 else names

    def norm(x, name):
        wide = op("Cast", x, to=TensorProto.FLOAT)
        mean = op("ReduceMean", op("Pow", wide, two), axes=[-1], keepdims=1)
        y = op("Mul", wide, op("Reciprocal", op("Sqrt", op("Add", mean, eps))))
        return op("Mul", op("Cast", y, to=TensorProto.FLOAT16), weight(name, h))

    def split(x, n, name):
        y = op(
            "Reshape",
            op("MatMul", x, weight(name, h, n * d)),
            const(f"heads{n}", np.array([1, seq, n, d])),
        )
        return op("Transpose", y, perm=[0, 2, 1, 3])

    def turned(x):
        a, b = op("Split", x, const("halves", np.array([d // 2] * 2)), outputs=2, axis=-1)
        return op(
            "Add", op("Mul", x, "cos"), op("Mul", op("Concat", op("Neg", b), a, axis=-1), "sin")
        )

    def spread(x):
        y = op("Unsqueeze", x, const("axis2", np.array([2])))
        y = op("Expand", y, const("wide", np.array([1, groups, heads // groups, seq, d])))
        return op("Reshape", y, const("all", np.array([1, heads, seq, d])))

    two, eps = const("two", np.array(2, np.float32)), const("eps", np.array(1e-5, np.float32))
    x = op("Gather", weight("embed", vocab, h), "ids")
    for i in range(layers):
        y = norm(x, f"{i}.norm1")
        q, k, v = (split(y, n, f"{i}.{s}") for s, n in (("q", heads), ("k", groups), ("v", groups)))
        q, k, v = turned(q), spread(turned(k)), spread(v)
        s = op("MatMul", q, op("Transpose", k, perm=[0, 1, 3, 2]))
        s = op("Add", op("Mul", s, const("scale", np.array(d**-0.5, np.float16))), "mask")
        y = op("Transpose", op("MatMul", op("Softmax", s, axis=-1), v), perm=[0, 2, 1, 3])
        y = op("Reshape", y, const("flat", np.array([1, seq, h])))
        x = op("Add", x, op("MatMul", y, weight(f"{i}.o", h, h)))
        y = norm(x, f"{i}.norm2")
        gate = op("MatMul", y, weight(f"{i}.gate", h, ffn))
        y = op(
            "Mul", op("Mul", gate, op("Sigmoid", gate)), op("MatMul", y, weight(f"{i}.up", h, ffn))
        )
        x = op("Add", x, op("MatMul", y, weight(f"{i}.down", ffn, h)))
    x = op("MatMul", norm(x, "norm"), op("Transpose", "embed", perm=[1, 0]))
    f16, info = TensorProto.FLOAT16, helper.make_tensor_value_info
    ends = [info("ids", TensorProto.INT64, [1, seq]), info("mask", f16, [1, 1, seq, seq])]
    ends += [info(name, f16, [1, 1, seq, d]) for name in ("cos", "sin")]
    graph = helper.make_graph(
        made, "decoder", ends, [info(x, f16, [1, seq, vocab])], [*weights.values()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, path)
