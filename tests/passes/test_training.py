"""Training steps of whole models: values against torch.autograd, and what they keep."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx_models
import pytest

import gpuir
from gpuir import interp
from gpuir.ir.graph import Graph
from gpuir.ir.phases import phase_of
from gpuir.stacks.table import pipeline

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

LOWER = "canonicalize,fuse,legalize,tile{target=a100},annotate"


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Language(nn.Module):
    """Two layers of a transformer, its head tied to the embedding, and the loss."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Layer(16, 2) for _ in range(2))

    def forward(self, tokens, labels):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), labels.flatten())


class Vision(nn.Module):
    """Strided, depthwise and pointwise convolutions, both pools, group norm, upsampling."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.deep = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.norm, self.wide = nn.GroupNorm(4, 8), nn.Conv2d(8, 16, 1)
        self.back, self.head = nn.ConvTranspose2d(16, 8, 2, 2), nn.Linear(8, 5)

    def forward(self, x, y):
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        x = x + F.silu(self.norm(self.deep(x)))
        x = F.avg_pool2d(F.hardswish(self.wide(x)), 2)
        x = F.interpolate(self.back(x), scale_factor=2.0, mode="bilinear")
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def language() -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Language(), (torch.randint(0, 30, (2, 8)), torch.randint(0, 30, (2, 8)))


def vision() -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Vision(), (torch.randn(2, 3, 16, 16), torch.tensor([1, 3]))


class Recurrent(nn.Module):
    """Two layers of LSTM, both ways."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.cells(x)[0].square().mean()


def recurrent() -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Recurrent(), (torch.randn(2, 4, 5),)


def t5() -> tuple[Any, tuple[Any, ...]]:
    """Learned position biases, tied embeddings, attention to the encoder."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    more = {"vocab_size": 40, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **more))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return Loss(), (torch.randint(0, 40, (2, 6)),)


def loaded(module: Any, args: tuple[Any, ...], joint: bool = False) -> Graph:
    from gpuir.frontends.torch.load import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(module, args=args, joint=joint).graph


def given(g: Graph, module: Any, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    held = {k: v.detach().numpy() for k, v in (*module.named_parameters(), *module.named_buffers())}
    inputs = {v.name: x.numpy() for v, x in zip(g.inputs, args, strict=True)}
    zeros = {p.name: np.zeros(p.type.shape, np.float32) for p in g.params}  # a first state
    return inputs | {p.name: held.get(p.name, zeros[p.name]) for p in g.params}


def named(g: Graph, module: Any) -> list[tuple[str, Any]]:
    """The module's parameters in the order of a graph's gradients."""
    held = dict(module.named_parameters())
    names = [v.name.removesuffix(".grad") for v in g.outputs[1:]]
    assert sorted(names) == sorted(name for name, p in held.items() if p.grad is not None)
    return [(name, held[name]) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["", "canonicalize,recognize,"])
@pytest.mark.parametrize("model", [language, vision, recurrent, t5])
def test_gradients_are_those_of_torch(model, passes):
    module, args = model()
    loss = module(*args)
    loss.backward()
    g = pipeline(f"{passes}autodiff").run(loaded(module, args))
    for graph in (g, pipeline(LOWER).run(g)):
        found = interp.run(graph, given(g, module, args))
        np.testing.assert_allclose(found[g.outputs[0].name], loss.item(), rtol=1e-5)
        for (name, p), ours in zip(named(g, module), graph.outputs[1:], strict=True):
            np.testing.assert_allclose(found[ours.name], p.grad, rtol=1e-3, atol=1e-6, err_msg=name)


def test_an_onnx_model_trains():
    """Convolution, pooling and a Gemm to ONNX's own loss; file and torch module share weights."""
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 4 * 4, 5)
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([1, 4])
    F.cross_entropy(linear(F.max_pool2d(F.relu(conv(x)), 2).flatten(1)), y).backward()
    weights = {"w": conv.weight, "b": conv.bias, "v": linear.weight, "c": linear.bias}
    nodes = [
        onnx_models.node("Conv", ["x", "w", "b"], ["h"], pads=[1, 1, 1, 1], name="conv"),
        onnx_models.node("Relu", ["h"], ["a"], name="relu"),
        onnx_models.node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2], name="pool"),
        onnx_models.node("Flatten", ["p"], ["f"], name="flatten"),
        onnx_models.node("Gemm", ["f", "v", "c"], ["z"], transB=1, name="gemm"),
        onnx_models.node("SoftmaxCrossEntropyLoss", ["z", "y"], ["loss"], name="loss"),
    ]
    inputs = [onnx_models.info_of("x", x.numpy()), onnx_models.info_of("y", y.numpy())]
    known = [onnx_models.const(name, p.detach().numpy()) for name, p in weights.items()]
    model = onnx_models.loaded(onnx_models.model(nodes, inputs, ["loss"], known))
    g = pipeline("canonicalize,recognize,autodiff").run(model.graph)
    values = {"x": x.numpy(), "y": y.numpy()} | {p.name: model.weights[p.name] for p in g.params}
    for graph in (g, pipeline(LOWER).run(g)):
        found = interp.run(graph, values)
        # the linear layer's weight was transposed at load; biases of up to 16 numbers are constants
        turned = next(p.name for p in g.params if p.type.shape == (64, 5))
        for name, p in (("w", conv.weight), (turned, linear.weight)):
            grad = p.grad if name == "w" else p.grad.T
            np.testing.assert_allclose(found[f"{name}.grad"], grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("model", [language, vision])
def test_torchs_own_joint_graph_has_the_same_products(model):
    """What AOTAutograd derives: as many contractions, as many operations in them."""
    module, args = model()
    ours = pipeline("canonicalize,recognize,autodiff").run(loaded(module, args))
    theirs = pipeline("canonicalize,recognize").run(loaded(module, args, joint=True))
    counts = [
        sorted((n.op.name, n.op.flops()) for n in g.nodes if n.op.contraction)
        for g in (ours, theirs)
    ]
    assert counts[0] == counts[1]


def test_checkpointing_keeps_values_and_saves_memory():
    """Each layer is run again; what is kept of it is its input."""
    module, args = language()
    g = pipeline("canonicalize,recognize").run(loaded(module, args))
    plain = pipeline("autodiff").run(g)
    values = given(g, module, args)
    expected = interp.run(plain, values)
    kept: list[int] = []
    for options in ('checkpoint="layers.*"', "every=1", "every=2"):
        again = pipeline(f"autodiff{{{options}}},canonicalize").run(g)
        found = interp.run(again, values)
        for name, x in expected.items():
            if name.endswith(".grad"):
                np.testing.assert_array_equal(found[name], x, err_msg=name)
        recomputed = [n for n in again.nodes if phase_of(n) == "recomputed"]
        assert sum(n.op.name == "t.attention" for n in recomputed) == 2
        assert all("layers." in n.locs[0] for n in recomputed)
        kept.append(saved(again))
    assert kept[0] == kept[1] < saved(plain) / 3
    assert kept[2] < kept[1]  # one segment, one input


def saved(g: Graph) -> int:
    """Bytes of what the forward pass makes and backward reads."""
    forward = {v for n in g.nodes if phase_of(n) is None and n.op.operands for v in n.results}
    read = {v for n in g.nodes if phase_of(n) is not None for v in n.op.operands}
    return sum(v.type.nbytes for v in forward & read)


def test_a_step_learns():
    """Twenty steps of AdamW in bf16 halve the loss: autocast, autodiff and optimizer together."""
    module, args = language()
    text = "canonicalize,recognize,autocast,autodiff{{loss_scale=8.0}},"
    text += "optimizer{{lr=0.01,step={},loss_scale=8.0}}"
    g = loaded(module, args)
    values = given(g, module, args)
    losses: list[float] = []
    for step in range(1, 21):
        made = pipeline(text.format(step)).run(g)
        known = {
            p.name: values.get(p.name, np.zeros(p.type.shape, np.float32)) for p in made.params
        }
        found = interp.run(made, {v.name: values[v.name] for v in made.inputs} | known)
        losses.append(float(found[g.outputs[0].name]))
        for out, old in zip(made.outputs, made.over, strict=True):
            if old is not None:
                values[old.name] = found[out.name]
    assert losses[-1] < losses[0] / 2


def test_a_whole_step_is_costed():
    module, args = vision()
    g = loaded(module, args)
    train = "canonicalize,recognize,autocast,autodiff,accumulate,optimizer{fused=true}"
    costed = pipeline(f"{train},{LOWER}").run(g)
    assert all(n.cost is not None for n in costed.nodes)
    assert {phase_of(n) for n in costed.nodes} == {None, "backward", "optimizer"}
    # each param with its gradient's buffer and two states
    assert sum(over is not None for over in costed.over) == 4 * len(g.params)


def test_the_gradient_of_a_linear_layers_weight_is_no_copy():
    """It is the product that lies as the weight does, as PyTorch computes it."""
    module = torch.nn.Linear(64, 128)
    g = gpuir.load(module, args=torch.zeros(32, 64), train=True, autodiff="gpuir", profile="eager")
    names = [n.op.name for n in gpuir.lower(g, profile="eager").nodes]
    assert names.count("k.gemm") == 2 and "k.copy" not in names
