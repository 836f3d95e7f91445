"""Twelve models on this CPU, measured, and predicted by one target or several.

usage: gpuir calibrate --target cpu -o my-cpu.toml
       python benchmarks/cpu_models.py my-cpu.toml [other.toml ...]   (same OMP_NUM_THREADS)
       gpuir check benchmarks/cpu_models.py:resnet18 --target my-cpu.toml --dims batch=8

PyTorch runs them eagerly. Each is measured in three rounds, all models one after another: what
else the machine does only adds time, so the fastest round counts. A calibration runs none of them.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import gpuir
from gpuir.fit.timing import HostWatch
from gpuir.frontends.torch.program import TorchProgram

ROUNDS, BUDGET_S = 3, 1.0
Made = tuple[nn.Module, tuple[Any, ...]]


class Layer(nn.Module):
    """A layer of BERT; with `past`, that of a decoder which reads one token."""

    def __init__(self, width: int, causal: bool = False):
        super().__init__()
        self.heads, self.causal = width // 64, causal
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor, *past: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.qkv)
        if past:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = self.norms[0](x + self.out(y.transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.down(F.gelu(self.up(x))))


class Decoder(nn.Module):
    def __init__(self, width: int = 512, layers: int = 6, words: int = 8000, causal: bool = True):
        super().__init__()
        self.words, self.out = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Layer(width, causal) for _ in range(layers))

    def forward(self, ids: torch.Tensor, *past: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, *past[2 * i : 2 * i + 2])
        return self.out(x[:, -1])


class Basic(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, channels: int, filters: int, stride: int):
        super().__init__()
        self.one, self.two = norm(channels, filters, 3, stride), norm(filters, filters, 3)
        same = channels == filters and stride == 1
        self.down = nn.Identity() if same else norm(channels, filters, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.two(F.relu(self.one(x))) + self.down(x))


class Inverted(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, channels: int, filters: int, stride: int, times: int):
        super().__init__()
        wide = channels * times
        widen = [norm(channels, wide, 1), nn.ReLU6()] if times > 1 else []
        across = norm(wide, wide, 3, stride, groups=wide)
        self.layers = nn.Sequential(*widen, across, nn.ReLU6(), norm(wide, filters, 1))
        self.adds = stride == 1 and channels == filters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class Vision(nn.Module):
    """ViT-Tiny."""

    def __init__(self, width: int = 192):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.Sequential(*(Layer(width) for _ in range(12)))
        self.out = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.out(self.layers(x)[:, 0])


class UNet(nn.Module):
    """Two levels of a diffusion model's net."""

    def __init__(self, c: int = 64):
        super().__init__()
        self.down, self.deep, self.bottom = two(4, c), two(c, 2 * c), two(2 * c, 4 * c)
        self.rise, self.up, self.out = two(6 * c, 2 * c), two(3 * c, c), nn.Conv2d(c, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down(x)
        b = self.deep(F.max_pool2d(a, 2))
        y = F.interpolate(self.bottom(F.max_pool2d(b, 2)), scale_factor=2.0)
        y = F.interpolate(self.rise(torch.cat([y, b], 1)), scale_factor=2.0)
        return self.out(self.up(torch.cat([y, a], 1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(256, 512, 2, batch_first=True), nn.Linear(512, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


class Tables(nn.Module):
    """A small DLRM, its features joined."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100_000, 64) for _ in range(8))
        self.bottom, self.top = dense(13, 256, 64), dense(576, 512, 256)
        self.out = nn.Linear(256, 1)

    def forward(self, x: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
        looked = (table(i) for table, i in zip(self.tables, ids, strict=True))
        return torch.sigmoid(self.out(self.top(torch.cat([self.bottom(x), *looked], 1))))


def norm(a: int, b: int, window: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """A convolution and its batch norm."""
    how: dict[str, Any] = {"padding": window // 2, "groups": groups, "bias": False}
    return nn.Sequential(nn.Conv2d(a, b, window, stride, **how), nn.BatchNorm2d(b))


def two(a: int, b: int) -> nn.Module:
    sizes = ((a, b), (b, b))
    parts = ((nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(8, o), nn.SiLU()) for i, o in sizes)
    return nn.Sequential(*(x for part in parts for x in part))


def dense(*sizes: int) -> nn.Module:
    return nn.Sequential(*(x for a, b in pairwise(sizes) for x in (nn.Linear(a, b), nn.ReLU())))


def ready(module: nn.Module, *args: torch.Tensor) -> Made:
    return module.eval(), args


def mlp(batch: int = 64) -> Made:
    return ready(dense(784, 1024, 1024, 10), torch.randn(batch, 784))


def encoder(batch: int = 1, seq: int = 128) -> Made:
    layers = (Layer(384) for _ in range(4))
    return ready(nn.Sequential(*layers), torch.randn(batch, seq, 384))


def prefill(seq: int = 128) -> Made:
    return ready(Decoder(), torch.randint(0, 8000, (1, seq)))


def decode(past: int = 256) -> Made:
    caches = (torch.randn(1, 8, past, 64) for _ in range(12))
    return ready(Decoder(causal=False), torch.randint(0, 8000, (1, 1)), *caches)


def resnet18(batch: int = 1) -> Made:
    stages = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1))
    stages += ((128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1))
    stem = (norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    return ready(nn.Sequential(*stem, *(Basic(*x) for x in stages), *ends), images(batch))


def mobilenet(batch: int = 1) -> Made:
    layers, channels = [norm(3, 32, 3, 2), nn.ReLU6()], 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1))
    for times, filters, count, stride in (*stages, (6, 160, 3, 2), (6, 320, 1, 1)):
        for i in range(count):
            layers.append(Inverted(channels, filters, 1 if i else stride, times))
            channels = filters
    ends = (norm(320, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return ready(nn.Sequential(*layers, *ends, nn.Linear(1280, 1000)), images(batch))


def vit(batch: int = 1) -> Made:
    return ready(Vision(), images(batch))


def unet() -> Made:
    return ready(UNet(), torch.randn(1, 4, 64, 64))


def lstm(batch: int = 8, steps: int = 64) -> Made:
    return ready(Recurrent(), torch.randn(batch, steps, 256))


def recommender(batch: int = 256) -> Made:
    ids = (torch.randint(0, 100_000, (batch,)) for _ in range(8))
    return ready(Tables(), torch.randn(batch, 13), *ids)


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 224, 224)


MODELS = {
    "MLP, batch 64": mlp,
    "encoder, batch 1": encoder,
    "encoder, batch 8": lambda: encoder(8),
    "decoder, a prompt of 128": prefill,
    "decoder, a token behind 256": decode,
    "ResNet-18, batch 1": resnet18,
    "ResNet-18, batch 8": lambda: resnet18(8),
    "MobileNetV2": mobilenet,
    "ViT-Tiny": vit,
    "U-Net": unet,
    "LSTM, 64 steps": lstm,
    "recommender, batch 256": recommender,
}


def main(targets: list[str]) -> None:
    torch.default_generator.manual_seed(0)
    watch = HostWatch(torch.get_num_threads())
    made = {name: make() for name, make in MODELS.items()}
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, (module, args) in made.items():
                timing = watch(lambda m=module, a=args: m(*a), BUDGET_S)
                found.setdefault(name, []).append(timing.seconds)
    errors: dict[str, list[float]] = {t: [] for t in targets}
    inside: dict[str, int] = dict.fromkeys(targets, 0)
    for name, (module, args) in made.items():
        measured_s, cells = min(found[name]), list[str]()
        with torch.no_grad():
            program = TorchProgram(module, args).export()
        for t in targets:
            answer = gpuir.analyze(program, t, profile="eager")
            low, high = answer.interval or (0.0, 0.0)
            errors[t].append(answer.latency_s / measured_s - 1)
            inside[t] += low <= measured_s <= high
            text = f"{1e3 * answer.latency_s:8.2f} ms {errors[t][-1]:+6.0%}"
            cells.append(f"{text} [{1e3 * low:.2f}, {1e3 * high:.2f}]")
        slowest = max(found[name]) / measured_s
        print(f"{name:28} {1e3 * measured_s:8.2f} ms (x{slowest:.2f})  {'  '.join(cells)}")
    for t in targets:
        mean = np.mean(np.abs(errors[t]))
        print(f"{t}: mean error {mean:.1%}, {inside[t]} of {len(made)} inside")


if __name__ == "__main__":
    main(sys.argv[1:])
