"""torch's joint graphs, their numbers beside autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.walk import numbers  # noqa: E402
from gpuir.interp import run  # noqa: E402
from gpuir.ir.verify import verify  # noqa: E402

pytestmark = pytest.mark.slow


class Loss(nn.Module):
    """A number to differentiate: what `fn` makes of a module's result."""

    def __init__(self, body: nn.Module, fn: Callable[..., Any]):
        super().__init__()
        self.body, self.fn = body, fn

    def forward(self, *args: Any) -> Any:
        return (self.fn(self.body, *args),)


def squared(body: nn.Module, x: Any) -> Any:
    y = body(x)
    return (y * y).mean()


def image(*layers: nn.Module) -> tuple[nn.Module, tuple[Any, ...]]:
    """A net on images: its layers behind a convolution, so that each has a gradient to pass on."""
    return Loss(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers), squared), (
        torch.randn(2, 3, 8, 8),
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Any) -> Any:
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return self.inner(x, x, x, attn_mask=hidden, need_weights=False)[0]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Any) -> Any:
        return self.head(self.table(ids).amax(1))


class Bags(nn.Module):
    """Sums of rows, weighed by what is given or by a parameter."""

    def __init__(self, mode: str, weigh: bool = False):
        super().__init__()
        self.table = nn.EmbeddingBag(11, 6, mode=mode)
        self.weights = nn.Parameter(torch.rand(4, 3)) if weigh else None

    def forward(self, ids: Any, offsets: Any, weights: Any) -> Any:
        weights = self.weights if weights is None else weights
        return (self.table(ids, offsets, weights).square().sum(),)


def last_state(body: nn.Module, x: Any) -> Any:
    return body(x)[0].square().sum()


def classes(loss: Callable[..., Any], *target: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    def fn(body: nn.Module, x: Any, *given: Any) -> Any:
        return loss(body(x), *given)

    return Loss(nn.Linear(6, 5), fn), (torch.randn(4, 6), *target)


def zoo() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    torch.manual_seed(0)
    places = torch.tensor([0, 4, 2, 2])
    near = torch.randn(4, 5)
    odds = torch.rand(4, 5)
    rows = torch.randn(2, 5, 16)
    offsets = torch.tensor([0, 3, 3, 9, 15])  # the second bag is empty
    return {
        "max pool": image(nn.MaxPool2d(3, 2, 1)),
        "mean pool": image(nn.AvgPool2d(3, 2, 1)),
        "mean pool of what is there": image(nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        "adaptive mean": image(nn.AdaptiveAvgPool2d(4)),
        "adaptive mean, unequal": image(nn.AdaptiveAvgPool2d((3, 5))),
        "global mean": image(nn.AdaptiveAvgPool2d(1)),
        "batch norm": image(nn.BatchNorm2d(4)),
        "group norm": image(nn.GroupNorm(2, 4)),
        "instance norm": image(nn.InstanceNorm2d(4, affine=True)),
        "layer norm": image(nn.LayerNorm((8, 8))),
        "channels apart": image(nn.Conv2d(4, 4, 3, 2, 1, groups=4)),
        "dilated": image(nn.Conv2d(4, 6, 3, dilation=2, bias=False)),
        "transposed": image(nn.ConvTranspose2d(4, 2, 3, 2, 1, 1)),
        "nearest": image(nn.Upsample(scale_factor=2)),
        "bilinear": image(nn.Upsample(scale_factor=2, mode="bilinear")),
        "bilinear, corners": image(nn.Upsample(size=13, mode="bilinear", align_corners=True)),
        "bicubic": image(nn.Upsample(scale_factor=2, mode="bicubic")),
        "bicubic, corners": image(nn.Upsample(size=5, mode="bicubic", align_corners=True)),
        "nearest, exact": image(nn.Upsample(size=13, mode="nearest-exact")),
        "reflected": image(nn.ReflectionPad2d(2)),
        "edges": image(nn.ReplicationPad2d(1)),
        "shuffle": image(nn.PixelShuffle(2)),
        "unfolded": image(nn.Unfold(2, stride=2)),
        **{
            fn.__name__: image(fn())
            for fn in (
                *(nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.LeakyReLU, nn.Hardswish),
                *(nn.Hardsigmoid, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.PReLU, nn.LogSigmoid),
                *(nn.Softsign, nn.CELU, nn.SELU, nn.ReLU6, nn.Hardtanh),
            )
        },
        "attention": (Loss(Attention(), squared), (rows,)),
        "encoder": (
            Loss(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), squared),
            (rows,),
        ),
        "embedding": (Loss(Bag(), squared), (torch.randint(0, 11, (4, 3)),)),
        **{
            f"bag, {mode}": (Bags(mode), (torch.randint(0, 11, (7, 3)), None, None))
            for mode in ("sum", "mean", "max")
        },
        "bags of a long run": (Bags("sum"), (torch.randint(3, 5, (60, 2)), None, None)),
        "many bags": (Bags("sum"), (torch.randint(0, 11, (800, 3)), None, None)),
        "bags apart": (Bags("sum"), (torch.randint(0, 11, (20,)), offsets, None)),
        "bags apart, mean": (Bags("mean"), (torch.randint(0, 11, (20,)), offsets, None)),
        "bags weighed": (Bags("sum"), (torch.randint(0, 11, (20,)), offsets, torch.rand(20))),
        "bags weighed alike": (Bags("sum", True), (torch.randint(0, 11, (4, 3)), None, None)),
        "GRU cell": (Loss(nn.GRUCell(16, 8), squared), (rows[0],)),
        "RMS norm": (Loss(nn.Sequential(nn.Linear(16, 8), nn.RMSNorm(8)), squared), (rows,)),
        "mse": classes(F.mse_loss, near),
        "l1": classes(F.l1_loss, near),
        "smooth l1": classes(F.smooth_l1_loss, near),
        "huber": classes(F.huber_loss, near),
        "bce": classes(F.binary_cross_entropy_with_logits, odds),
        "cross entropy": classes(F.cross_entropy, places),
        "smoothed": classes(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), places),
        "kl": classes(lambda x, y: F.kl_div(x.log_softmax(1), y, reduction="batchmean"), odds),
        "margin": classes(F.multi_margin_loss, places),
        "cosine": classes(lambda x, y: 1 - F.cosine_similarity(x, y).mean(), near),
    }


@pytest.mark.filterwarnings("ignore")  # of torch's export
@pytest.mark.parametrize("name", list(zoo()))
def test_joint_graph_computes_what_autograd_does(name: str):
    module, args = zoo()[name]
    module.train()
    model = load(module, args=args, train=True, joint=True, strict=True)
    verify(model.graph)
    given = [x for x in args if x is not None]
    values = {v.name: numbers(x).copy() for v, x in zip(model.graph.inputs, given, strict=True)}
    values |= {p.name: np.copy(model.weights[p.name]) for p in model.graph.params}
    found = run(model.graph, values)
    (loss,) = module(*args)
    loss.backward()
    first = next(v for v in model.graph.outputs if not v.type.shape)
    np.testing.assert_allclose(found[first.name], float(loss), rtol=1e-4, atol=1e-6)
    for weight, parameter in module.named_parameters():
        np.testing.assert_allclose(
            found[f"{weight}.grad"], parameter.grad.numpy(), rtol=2e-3, atol=2e-5, err_msg=weight
        )


class Biased(nn.Module):
    """Two weights whose gradients are one tensor, as the two biases of an LSTM's gates have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return (x + (self.a + self.b)).square().mean()


@pytest.mark.filterwarnings("ignore")  # of torch's export
@pytest.mark.parametrize("name", ["nearest", "nearest, exact", "bilinear", "bicubic"])
def test_resampling_is_one_operator_each_way(name: str):
    """As in eager PyTorch: a trace had 270 operators for bicubic."""
    module, args = zoo()[name]
    ops = [n.op.name for n in load(module, args=args, train=True, joint=True).graph.nodes]
    assert ops.count("t.resize") == ops.count("t.resize_gradient") == 1
    assert "t.gather_nd" not in ops and "t.scatter_nd" not in ops


def test_weights_with_one_gradient_have_one_each():
    graph = gpuir.load(
        Biased(), args=(torch.randn(2, 4),), train=True, autodiff="torch", accumulate=True
    )
    taken = {v.name: over and over.name for v, over in zip(graph.outputs, graph.over, strict=True)}
    assert taken["a.grad.new"] == "a.grad" and taken["b.grad.new"] == "b.grad"


def counted(body: nn.Module, x: Any, count: Any) -> Any:
    count.add_(1.0)
    return (body(x) * count).mean()


def test_an_input_that_is_written_to_is_written_in_place():
    module = Loss(nn.Linear(4, 4), counted)
    graph = load(module, args=(torch.randn(2, 4), torch.ones(2, 4)), joint=True).graph
    over = [v.name for v in graph.over if v is not None]
    assert over == [graph.inputs[1].name]


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Any) -> dict[str, Any]:
        near, far = self.a(x).square().mean(), self.b(x).abs().mean()
        return {"near": near, "far": far, "all": near + far}


@pytest.mark.parametrize("autodiff", ["torch", "gpuir"])
def test_which_of_several_losses_it_is_is_said(autodiff: str):
    args = (torch.randn(2, 4),)
    graph = gpuir.load(Losses(), args=args, train=True, autodiff=autodiff)
    (said,) = [text for text in graph.assumed if "the first output" in text]
    assert said.startswith(f"the loss is %{graph.outputs[0].name},") and said.count("%") == 3
    graph = gpuir.load(Losses(), args=args, train=True, loss="all")
    assert not any("the first output" in text for text in graph.assumed)


ACTIVATIONS = {
    "silu": True,
    "hardswish": True,
    "hardsigmoid": True,
    "mish": True,
    "relu6": True,
    "relu": False,
    "leaky_relu": False,
    "elu": False,
}


class Activated(nn.Module):
    def __init__(self, name: str, inplace: bool) -> None:
        super().__init__()
        self.a, self.fn, self.inplace = nn.Linear(4, 4), getattr(F, name), inplace

    def forward(self, x: Any) -> Any:
        return self.fn(self.a(x), inplace=self.inplace).square().mean()


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.clones = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.clones += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, {}) for name in ACTIVATIONS),
        *((name, {"autodiff": "gpuir"}) for name in ("silu", "relu")),
        *((name, {"autocast": "f16"}) for name in ("silu", "relu")),
    ],
)
def test_what_is_overwritten_is_copied_for_the_backward_pass_as_torch_does(name: str, how: Any):
    args = (torch.randn(2, 4),)
    with Launches() as launches:
        Activated(name, inplace=True)(*args)
    assert launches.clones == ACTIVATIONS[name]

    def copies(inplace: bool, profile: str) -> int:
        module = Activated(name, inplace).train()
        graph = gpuir.load(module, args=args, train=True, **how)
        return gpuir.show(gpuir.lower(graph, profile=profile)).count('t.map("copy"')

    assert copies(inplace=True, profile="eager") == ACTIVATIONS[name]
    assert copies(inplace=False, profile="eager") == 0
    assert copies(inplace=True, profile="compiled") == 0


def test_a_program_that_is_given_stays_as_it_is():
    program = torch.export.export(Activated("silu", inplace=True).train(), (torch.randn(2, 4),))
    before = str(program)
    for _ in range(2):
        graph = gpuir.load(program, train=True, autodiff="gpuir")
        assert gpuir.show(graph).count('t.map("copy"') == 1
    assert str(program) == before
    program.module()(torch.randn(2, 4))


class OfHidden(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).pow(2).mean()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_step_is_traced_under_any_default_device(device: str):
    x = torch.empty(4, 8)
    outside = gpuir.load(OfHidden(), args=(x,), train=True)
    with torch.device(device):
        inside = gpuir.load(OfHidden(), args=(torch.empty(4, 8),), train=True)
    assert inside == outside
