"""Models of complex numbers: what torch computes, forward and backward, and what it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch_calls import Call, gives, loaded

import gpuir
from gpuir.frontends.torch.load import load
from gpuir.frontends.torch.program import TorchProgram
from gpuir.frontends.torch.walk import numbers
from gpuir.interp import run
from gpuir.ops import tensor as t
from gpuir.stacks.table import pipeline

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

WIDE = torch.complex128
X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def weights(*shape: int) -> Any:
    rng = torch.Generator().manual_seed(sum(shape))
    return nn.Parameter(torch.randn(shape, dtype=WIDE, generator=rng))


def whole(x: Any) -> Any:
    return torch.complex(x, x.flip(-1))


class Fourier(nn.Module):
    """A layer of a Fourier neural operator: low frequencies of both signs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weights(3, 4, 4, 4), weights(3, 4, 4, 4)

    def forward(self, x: Any) -> Any:
        f = torch.fft.rfft2(x, norm="ortho")
        y = torch.zeros(2, 4, 8, 5, dtype=f.dtype)
        y[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", f[:, :, :4, :4], self.a)
        y[:, :, -4:, :4] = torch.einsum("bixy,ioxy->boxy", f[:, :, -4:, :4], self.b)
        return F.gelu(torch.fft.irfft2(y, s=x.shape[-2:], norm="ortho"))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1, stride=2, dtype=WIDE)
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2, dtype=WIDE)

    def forward(self, x: Any) -> Any:
        return self.up(self.down(whole(x)))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 4, padding="same", groups=3, dilation=2, bias=False, dtype=WIDE)

    def forward(self, x: Any) -> Any:
        return self.conv(whole(x).flatten(2)).abs()


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 9, dtype=WIDE), nn.Linear(9, 5, dtype=WIDE)

    def forward(self, x: Any) -> Any:
        h = self.up(whole(x))
        return (self.down(torch.complex(F.relu(h.real), F.relu(h.imag))).abs() ** 2).mean()


class Norm(nn.Module):
    """A batch norm as it is written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = weights(3, 1, 1), weights(3, 1, 1)

    def forward(self, x: Any) -> Any:
        z = whole(x)
        off = z - z.mean((0, 2, 3), keepdim=True)
        var = z.var((0, 2, 3), keepdim=True, unbiased=False)
        return torch.view_as_real(off * torch.rsqrt(var + 1e-5) * self.scale + self.shift)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = weights(8, 8), weights(8, 8), weights(8, 8)

    def forward(self, x: Any) -> Any:
        z = whole(x).flatten(1, 2)
        scores = (z @ self.q) @ (z @ self.k).mH
        return (torch.softmax(scores.abs(), -1).to(WIDE) @ (z @ self.v)).abs()


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = weights(8)

    def forward(self, x: Any) -> Any:
        z = whole(x) * self.w
        y = torch.tanh(0.3 * z) + torch.sin(0.2 * z) * torch.sigmoid(0.1 * z) / (z + 3)
        y = y + torch.sqrt(z) + torch.log(z + 2) + z**2 + torch.exp(0.1j * z)
        return (y + torch.polar(z.abs(), z.angle()) + z.sgn()).abs().mean()


class States(nn.Module):
    """A diagonal state space, convolved by transforms (S4D)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = weights(5), weights(5)

    def forward(self, x: Any) -> Any:
        u = x.flatten(1)
        count = u.shape[-1]
        steps = torch.exp((0.1 * self.a - 1)[:, None] * torch.arange(count))
        kernel = 2 * torch.einsum("n,nl->l", self.c, steps).real
        f = torch.fft.rfft(u, n=2 * count) * torch.fft.rfft(kernel, n=2 * count)
        return torch.fft.irfft(f, n=2 * count)[..., :count]


MODELS = (Fourier, Conv, Padded, Linear, Norm, Attention, Functions, States)
PROFILES = ("eager", "compiled", "ideal")


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_a_model_gives_what_torch_gives(model: Any):
    module = model()
    wanted = numbers(module(X).detach())
    loaded_model = load(TorchProgram(module, (X,)), strict=True)
    graph = loaded_model.graph
    values = {v.name: numbers(X) for v in graph.inputs}
    values |= {p.name: loaded_model.weights[p.name] for p in graph.params}
    for g in (graph, *(gpuir.lower(graph, profile=p) for p in PROFILES)):
        (found,) = run(g, values).values()
        np.testing.assert_allclose(found, wanted, rtol=1e-8)


@pytest.mark.parametrize("autodiff", ["torch", "gpuir"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_its_gradients_are_those_of_torch(model: Any, autodiff: str):
    """Of the sum of the result; of a complex one of the sums of both parts."""
    module = model()
    y = module(X)
    (torch.view_as_real(y) if y.is_complex() else y).sum().backward()
    wanted = {f"{n}.grad": numbers(p.grad.resolve_conj()) for n, p in module.named_parameters()}
    ours = autodiff == "gpuir"
    made = load(TorchProgram(module, (X,)), strict=True, train=True, joint=not ours)
    graph = pipeline("autodiff").run(made.graph) if ours else made.graph
    values = {v.name: numbers(X) for v in graph.inputs}
    values |= {p.name: made.weights[p.name] for p in graph.params}
    places = {v.name: i for i, v in enumerate(graph.outputs)}
    assert set(wanted) <= set(places)
    for g in (graph, gpuir.lower(graph, profile="eager"), gpuir.lower(graph, profile="compiled")):
        found = run(g, values)
        for name, gradient in wanted.items():
            here = found[g.outputs[places[name]].name]
            np.testing.assert_allclose(here, gradient, rtol=1e-7, atol=1e-9, err_msg=name)


class Operator(nn.Module):
    """A Fourier layer of the usual size."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(64, 64, 32, 32, dtype=torch.cfloat, device="meta"))

    def forward(self, x: Any) -> Any:
        f = torch.fft.rfft2(x)
        y = torch.einsum("bixy,ioxy->boxy", f[:, :, :32, :32], self.w)
        return torch.fft.irfft2(y, s=x.shape[-2:])


def kernels_of(module: Any, x: Any, profile: str = "eager") -> list[Any]:
    graph = gpuir.analyze(loaded(module, x), target="a100", profile=profile).graph
    return list(gpuir.analyze(graph).kernels)


def test_a_fourier_layer_multiplies_four_times_and_adds_four_times():
    found = kernels_of(Operator(), torch.empty(64, 64, 64, 64, device="meta"))
    (gemm,) = [k for k in found if k.kind == "gemm"]
    assert gemm.flops == 8 * 64 * 64 * 64 * 32 * 32
    assert gemm.cost.time_s >= gemm.flops / 19.5e12


def test_a_convolution_is_three_kernels():
    """And the sums around them."""
    module = nn.Conv2d(64, 64, 3, padding=1, dtype=torch.cfloat, device="meta")
    found = kernels_of(module, torch.empty(8, 64, 56, 56, dtype=torch.cfloat, device="meta"))
    convs = [k for k in found if k.kind == "conv"]
    assert [k.flops for k in convs] == [2 * 8 * 64 * 64 * 9 * 56 * 56] * 3
    assert sum(k.kind == "map" for k in found) == 3 + 2 + 5  # of operands, biases, results


def test_a_size_is_right_however_large_the_parts_are():
    x = torch.tensor([1e30 + 1e30j, 1e-30 - 1e-30j, 3e38 + 4j, 0j])
    np.testing.assert_allclose(gives(loaded(torch.abs, x), (x,)), x.abs(), rtol=1e-6)


def test_running_logarithms_of_sums_keep_what_is_small():
    x = torch.tensor([0.0, 1.0, 1000.0, -1000.0, 5.0])
    run_ = lambda x: torch.logcumsumexp(x, 0)  # noqa: E731
    np.testing.assert_allclose(gives(loaded(run_, x), (x,)), run_(x), rtol=1e-6)


def test_zeros_that_results_are_written_to_are_no_weights():
    """A Fourier layer writes its frequencies into zeros: made when it runs."""
    graph = load(TorchProgram(Fourier(), (X,)), strict=True).graph
    assert [p.name for p in graph.params] == ["a", "b"]
    assert any(isinstance(n.op, t.Constant) and n.op.type.dtype.is_complex for n in graph.nodes)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_updates_both_parts_apart(kind: str, fused: bool):
    module = Linear()
    made = load(TorchProgram(module, (X,)), strict=True, train=True)
    step = f"autodiff,optimizer{{kind={kind},fused={str(fused).lower()},clip=0.5"
    graph = pipeline(step + (",momentum=0.9}" if kind == "sgd" else "}")).run(made.graph)
    values = {v.name: numbers(X) for v in graph.inputs}
    values |= {p.name: np.array(made.weights[p.name]) for p in made.graph.params}  # copies
    for p in graph.params:
        if p.name not in values:
            values[p.name] = np.zeros(p.type.shape, np.complex128)
    found = run(graph, values)
    way = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    more = {"momentum": 0.9} if kind == "sgd" else {}
    optimizer = way(module.parameters(), lr=1e-3, **more)
    module(X).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()
    for name, p in module.named_parameters():
        np.testing.assert_allclose(found[f"{name}.new"], numbers(p.detach()), rtol=1e-6)
    lowered = run(gpuir.lower(graph, profile="eager"), values)
    for (name, one), two in zip(found.items(), lowered.values(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"n_fft": 8, "window": torch.ones(8)},
        {
            "n_fft": 8,
            "hop_length": 3,
            "win_length": 6,
            "window": torch.hamming_window(6),
            "length": 30,
        },
        {"n_fft": 8, "win_length": 8, "window": torch.hann_window(8), "length": 36},
        {"n_fft": 8, "hop_length": 2, "normalized": True, "window": torch.hamming_window(8)},
        {"n_fft": 8, "onesided": False, "window": torch.hamming_window(8)},
        {
            "n_fft": 8,
            "window": torch.ones(8),
            "onesided": False,
            "return_complex": True,
            "center": False,
        },
    ],
    ids=lambda options: " ".join(options),
)
def test_short_transforms_there_and_back(options: dict[str, Any]):
    """Arithmetic, and no operator whose bytes alone are counted."""
    back = dict(options)
    there = {k: v for k, v in back.items() if k not in ("length", "return_complex")}

    def model(x: Any) -> Any:
        f = torch.stft(x, **there, return_complex=True)
        return torch.istft(f * (1 + 0.5j), **back)

    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    found = load(Call(model), args=(x,), strict=True)
    assert not any(isinstance(n.op, t.Opaque) for n in found.graph.nodes)
    values = {found.graph.inputs[0].name: numbers(x)}
    values |= {v.name: found.weights[v.name] for v in found.graph.params}
    (y,) = run(found.graph, values).values()
    np.testing.assert_allclose(y, numbers(model(x)), rtol=1e-4, atol=1e-5)
