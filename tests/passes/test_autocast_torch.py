"""Op by op the dtypes that torch.autocast itself gives on CUDA, on tensors that hold no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch._subclasses import FakeTensor, FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import functional  # noqa: E402
from gpuir.frontends.torch.program import TorchProgram  # noqa: E402
from gpuir.ir.types import f16, f32  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402
from validation.agreement.inductor import autocasting  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

DTYPES = {torch.float16: f16, torch.float32: f32}
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """A tensor on a GPU that need not be there. One that wants a gradient would need it."""
    return FakeTensor(FAKE, x.detach().to("meta"), torch.device("cuda:0"))


class Recorded(torch.fx.Interpreter):
    """What each call of a program gives, by the node's name."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if str(n.target).startswith("aten._assert"):  # of dtypes without autocast
            return None
        if "device" in n.kwargs:
            n.kwargs = {**n.kwargs, "device": "cuda:0"}
        found = super().run_node(n)
        first = found[0] if isinstance(found, tuple | list) and found else found
        if n.op == "call_function" and isinstance(first, torch.Tensor) and first.dtype in DTYPES:
            self.dtypes[n.name] = DTYPES[first.dtype]
        return found


def by_torch(module: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    program = functional(TorchProgram(module, (x,)).export())
    graph_module = program.graph_module
    given = [on_gpu(n.meta["val"]) for n in graph_module.graph.find_nodes(op="placeholder")]
    recorded = Recorded(graph_module)
    recorded.dtypes = {}
    with torch.no_grad(), FAKE, autocasting(torch.float16):
        recorded.run(*given)
    return recorded.dtypes


def by_us(module: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    graph = gpuir.load(module, args=(x,), autocast="f16")
    places = {loc.rpartition(":")[2].rpartition("/")[2] for n in graph.nodes for loc in n.locs}
    return {v.name: v.type.dtype for n in graph.nodes for v in n.results if v.name in places}


class Does(nn.Module):
    """`run` of the module and an input, for ops of two branches `a` and `b`."""

    def __init__(self, run: Callable[..., torch.Tensor], **parts: Any):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def rows(run: Callable[..., Any], **parts: Any) -> tuple[nn.Module, torch.Tensor]:
    """On what linear layers give, in 16 bits."""
    two = {"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)}
    return Does(lambda s, x: run(s, s.a(x), s.b(x), x), **two, **parts), torch.randn(2, 6, 16)


def images(run: Callable[..., Any], **parts: Any) -> tuple[nn.Module, torch.Tensor]:
    """On what a convolution gives, in 16 bits."""
    conv = nn.Conv2d(8, 8, 3, padding=1)
    return Does(lambda s, x: run(s, s.c(x), x), c=conv, **parts), torch.randn(2, 8, 8, 8)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def scores(q: torch.Tensor) -> torch.Tensor:
    return q @ q.transpose(1, 2) * 0.25


CASES: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "batch norm": images(lambda s, y, x: s.n(y).relu() + y, n=nn.BatchNorm2d(8)),
    "batch norm without weights": images(
        lambda s, y, x: s.n(y) * 2, n=nn.BatchNorm2d(8, affine=False)
    ),
    "batch norm of f32": images(lambda s, y, x: s.n(x) + y, n=nn.BatchNorm2d(8)),
    "batch norm of rows": rows(lambda s, a, b, x: s.n(a.flatten(0, 1)), n=nn.BatchNorm1d(16)),
    "group norm": images(lambda s, y, x: s.n(y).relu(), n=nn.GroupNorm(2, 8)),
    "instance norm": images(lambda s, y, x: s.n(y), n=nn.InstanceNorm2d(8, affine=True)),
    "layer norm": rows(lambda s, a, b, x: s.n(a) + b, n=nn.LayerNorm(16)),
    "RMS norm": rows(lambda s, a, b, x: s.n(a) + b, n=nn.RMSNorm(16)),
    "layer scale": rows(lambda s, a, b, x: x + a * s.g, g=weight(16)),
    "a number that is a weight": rows(lambda s, a, b, x: a * s.g.exp(), g=weight()),
    "a product and a sum": rows(lambda s, a, b, x: x @ s.w + s.g, w=weight(16, 16), g=weight(16)),
    "addmm": rows(
        lambda s, a, b, x: torch.addmm(s.g, x[0], s.w), w=weight(16, 16), g=weight(6, 16)
    ),
    "baddbmm": rows(lambda s, a, b, x: torch.baddbmm(s.g, x, b.transpose(1, 2)), g=weight(2, 6, 6)),
    "einsum": rows(lambda s, a, b, x: torch.einsum("bij,jk->bik", x, s.w), w=weight(16, 16)),
    "attention spelled out": rows(lambda s, a, b, x: scores(a).softmax(-1) @ b),
    "attention with a bias": rows(
        lambda s, a, b, x: (scores(a) + s.g).softmax(-1) @ b, g=weight(6, 6)
    ),
    "attention": rows(
        lambda s, a, b, x: F.scaled_dot_product_attention(a, b, x, attn_mask=s.g), g=weight(6, 6)
    ),
    "self-attention": rows(
        lambda s, a, b, x: s.m(a, b, x)[0], m=nn.MultiheadAttention(16, 2, batch_first=True)
    ),
    "activations": rows(
        lambda s, a, b, x: [
            f(a)
            for f in (
                *(F.gelu, F.silu, F.mish, F.elu, F.leaky_relu, F.relu6, F.hardtanh, F.selu),
                *(F.hardswish, F.hardsigmoid, torch.tanh, torch.sigmoid, torch.erf, torch.sqrt),
            )
        ]
    ),
    "functions in f32": rows(
        lambda s, a, b, x: [
            f(a)
            for f in (
                *(torch.exp, torch.log, torch.log2, torch.log10, torch.log1p, torch.expm1),
                *(torch.rsqrt, torch.reciprocal, torch.tan, torch.sinh, torch.cosh, torch.acos),
                *(torch.asin, torch.erfinv, F.softplus),
            )
        ]
    ),
    "GELU spelled out": rows(
        lambda s, a, b, x: 0.5 * a * (1 + torch.tanh(0.79 * (a + 0.04 * torch.pow(a, 3))))
    ),
    "powers": rows(lambda s, a, b, x: [a**2, a**3, 2**a, 1 / a]),
    "PReLU": images(lambda s, y, x: [s.p(y), s.p(x)], p=nn.PReLU(8)),
    "squeeze and excite": images(
        lambda s, y, x: y * s.u(F.relu(s.d(y.mean((2, 3), keepdim=True)))).sigmoid(),
        d=nn.Conv2d(8, 4, 1),
        u=nn.Conv2d(4, 8, 1),
    ),
    "sums": rows(lambda s, a, b, x: [a.sum(-1), a.mean(-1), a.prod(-1), a.cumsum(-1), a.amax(-1)]),
    "norms of vectors": rows(
        lambda s, a, b, x: [a.norm(dim=-1), F.normalize(a, dim=-1), a.logsumexp(-1)]
    ),
    "softmax": rows(lambda s, a, b, x: [a.softmax(-1), a.log_softmax(-1)]),
    "cross entropy": rows(
        lambda s, a, b, x: F.cross_entropy(a.flatten(0, 1), torch.zeros(12, dtype=torch.long))
    ),
    "other losses": rows(
        lambda s, a, b, x: [
            F.binary_cross_entropy_with_logits(a, b),
            F.kl_div(a.log_softmax(-1), b.softmax(-1)),
            F.cosine_similarity(a, b, dim=-1),
        ]
    ),
    "pooling": images(lambda s, y, x: F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1)),
    "interpolation": images(
        lambda s, y, x: [F.interpolate(y, scale_factor=2, mode=m) for m in ("nearest", "bilinear")]
    ),
    "joined": rows(lambda s, a, b, x: [torch.cat([a, x], 1), torch.stack([a, b], 1)]),
    "chosen": rows(lambda s, a, b, x: torch.where(x > 0, a, x)),
    "gathered": rows(lambda s, a, b, x: a.gather(1, torch.zeros(2, 1, 16, dtype=torch.long))),
    "looked up": (
        Does(lambda s, x: s.a(s.e(x)), a=nn.Linear(16, 16), e=nn.Embedding(10, 16)),
        torch.zeros(2, 5, dtype=torch.long),
    ),
    "transposed convolution": images(lambda s, y, x: s.t(x), t=nn.ConvTranspose2d(8, 4, 2, 2)),
    "LSTM": (Does(lambda s, x: s.r(x)[0] * 2, r=nn.LSTM(16, 8)), torch.randn(6, 2, 16)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_op_gives_what_torch_does(name: str):
    module, x = CASES[name]
    theirs, ours = by_torch(module.eval(), x), by_us(module.eval(), x)
    shared = theirs.keys() & ours.keys()
    assert shared and {k: ours[k] for k in shared} == {k: theirs[k] for k in shared}


def test_norms_are_fast_where_they_are_asked_to_be():
    """As timm.layers.fast_norm: operand and weights in 16 bits; a batch norm is as it was."""
    module, x = images(
        lambda s, y, x: s.g(s.n(x)) + s.m(x), g=nn.GroupNorm(2, 8), n=nn.BatchNorm2d(8), m=nn.ReLU()
    )
    graph = gpuir.load(module.eval(), args=(x,), autocast="f16", fast_norms=True)
    (norm,) = [n.op for n in graph.nodes if isinstance(n.op, t.Normalize)]
    assert {v.type.dtype for v in norm.operands} == {f16}
    assert graph.outputs[0].type.dtype == f32


def test_a_weight_is_cast_by_a_launch_of_its_own_each_call():
    """Of two layers with one weight: the weight once, each bias, each operand (cached_cast)."""
    linear = nn.Linear(64, 64)
    module = Does(lambda s, x: s.n(s.a(x)) + s.a(s.n(x)), a=linear, n=nn.LayerNorm(64))
    kernels = gpuir.analyze(module.eval(), torch.randn(8, 64), target="a100", autocast="f16").graph
    casts = [n.results[0].name for n in kernels.nodes if ".cast" in "".join(n.locs)]
    assert sorted(c.partition(".f")[0] for c in casts) == sorted(
        ["a.weight", "a.bias", "x", "layer_norm_1", "linear"]
    )


def test_a_batch_norm_of_a_run_is_one_pass_over_its_operand():
    module, x = CASES["batch norm"]
    graph = gpuir.analyze(module.eval(), x, target="a100", autocast="f16", profile="eager").graph
    (norm,) = [n for n in graph.nodes if "batch_norm" in "".join(n.locs) and n.op.name == "k.map"]
    assert [v.type.dtype for v in norm.results] == [f16]
    assert {v.type.dtype for v in norm.op.operands if v.type.rank == 4} == {f16}


def test_columns_are_added_up_in_16_bits():
    """col2im is on no list, and torch has no kernel of it without a GPU."""
    module, x = images(lambda s, y, x: F.fold(y.flatten(2)[:, :, :49], (8, 8), 2))
    graph = gpuir.load(module, args=(x,), autocast="f16")
    assert graph.outputs[0].type.dtype == f16


class Block(nn.Module):
    """Of ConvNeXt and its like: a depthwise convolution, a norm over channels, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.deep = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = weight(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return (x + y.permute(0, 3, 1, 2)).mean((2, 3)).sum()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("profile", ["eager", "compiled", "ort", "tensorrt", "ideal"])
def test_a_depthwise_block_is_trained_under_every_stack(profile: str, dtype: str):
    module, x = Block(), torch.randn(2, 3, 32, 32)
    step = gpuir.load(module, args=(x,), train=True, autocast=dtype, profile=profile)
    kernels = [n.op for n in gpuir.lower(step, profile=profile).walk() if n.op.name == "k.conv"]
    assert len(kernels) == 5  # two, by both operands, but for the gradient of the images
    assert all(op.compute_dtype.bits == 16 for op in kernels)
