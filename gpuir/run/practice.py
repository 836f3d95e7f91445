"""Small models that a CPU's calibration runs: kernels among others, in sizes of everyday models.

A kernel by itself finds its operands and its code in the caches, in a model it does not. None of
these is a model that somebody uses; together they have the operators of encoders, decoders,
convolutional nets, recommenders.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[Any, ...]]


def _layers(sizes: tuple[int, ...]) -> Iterator[nn.Module]:
    """Dense layers from one width to the next."""
    for a, b in pairwise(sizes):
        yield nn.Linear(a, b)
        yield nn.ReLU()


def _across(channels: int, stride: int = 1) -> nn.Module:
    """A depthwise convolution."""
    return nn.Conv2d(channels, channels, 3, stride, 1, groups=channels)


class PracticeBlock(nn.Module):
    """A layer of a transformer, its norms first or last; keys and values of before, if given."""

    def __init__(self, width: int, heads: int, inner: int, first: bool, causal: bool = False):
        super().__init__()
        self.heads, self.first, self.causal = heads, first, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def attend(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, past: Any = None) -> torch.Tensor:
        a, b = self.norms
        if self.first:
            x = x + self.attend(a(x), past)
            return x + self.down(F.gelu(self.up(b(x))))
        x = a(x + self.attend(x, past))
        return b(x + self.down(F.gelu(self.up(x))))


class Decoder(nn.Module):
    """Embeddings, blocks and logits: of a prompt, or of one token behind others."""

    def __init__(self, width: int, layers: int, words: int, causal: bool):
        super().__init__()
        self.words, self.out = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        made = (PracticeBlock(width, width // 64, 4 * width, True, causal) for _ in range(layers))
        self.blocks, self.norm = nn.ModuleList(made), nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, *past: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, past[2 * i : 2 * i + 2] or None)
        return self.out(self.norm(x)[:, -1])


class Images(nn.Module):
    """Convolutions as residual, depthwise and upsampling nets have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 48, 7, 2, 3, bias=False), nn.BatchNorm2d(48)
        self.convs = nn.ModuleList()
        for c, d, stride in ((48, 96, 1), (96, 96, 1), (96, 192, 2), (192, 384, 2), (384, 384, 1)):
            conv = nn.Conv2d(c, d, 3, stride, 1, bias=False)
            self.convs.append(nn.Sequential(conv, nn.BatchNorm2d(d)))
        self.deep = nn.ModuleList()
        for c, hidden, stride in ((384, 768, 1), (384, 576, 2)):
            widen, across = (
                nn.Conv2d(c, hidden, 1),
                _across(hidden, stride),
            )
            norm = nn.BatchNorm2d(hidden)
            self.deep.append(nn.Sequential(widen, nn.ReLU6(), across, norm, nn.ReLU6()))
            self.deep.append(nn.Conv2d(hidden, c, 1))
        self.light = nn.Sequential(nn.Conv2d(48, 144, 1), nn.ReLU6(), _across(144))
        self.up, self.norm = nn.Conv2d(528, 96, 3, 1, 1), nn.GroupNorm(8, 96)
        self.out = nn.Linear(384, 1000)

    def forward(self, x: torch.Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.first(self.stem(x))), 3, 2, 1)
        light = self.light(x)
        for conv in self.convs:
            y = conv(x)
            x = F.relu(x + y if x.shape == y.shape else y)
        small = x
        for wide, narrow in zip(self.deep[::2], self.deep[1::2], strict=True):
            y = narrow(wide(x))
            x = x + y if x.shape == y.shape else y
        large = torch.cat([F.interpolate(small, scale_factor=4.0), light], 1)
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1)), F.silu(self.norm(self.up(large)))


class Tables(nn.Module):
    """Embeddings and dense layers, as a recommender's."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(60_000, 48) for _ in range(5))
        self.dense = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 48), nn.ReLU())
        sizes = (288, 400, 200)
        self.top = nn.Sequential(*_layers(sizes), nn.Linear(200, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
        looked = (table(i) for table, i in zip(self.tables, ids, strict=True))
        return self.top(torch.cat([self.dense(x), *looked], 1))


def encoder() -> Made:
    blocks = (
        PracticeBlock(320, 5, 1280, False),
        PracticeBlock(320, 5, 960, False),
        PracticeBlock(320, 5, 1280, False),
    )
    return nn.Sequential(*blocks).eval(), (torch.randn(1, 180, 320),)


def encoders() -> Made:
    blocks = (PracticeBlock(320, 5, 1280, True), PracticeBlock(320, 5, 960, True))
    return nn.Sequential(*blocks).eval(), (torch.randn(6, 160, 320),)


def prompt() -> Made:
    return Decoder(448, 2, 6000, True).eval(), (torch.randint(0, 6000, (1, 96)),)


def token() -> Made:
    past = [torch.randn(1, 7, 200, 64) for _ in range(8)]
    return Decoder(448, 4, 6000, False).eval(), (torch.randint(0, 6000, (1, 1)), *past)


def images() -> Made:
    return Images().eval(), (torch.randn(1, 3, 192, 192),)


def batch_of_images() -> Made:
    return Images().eval(), (torch.randn(6, 3, 160, 160),)


def dense() -> Made:
    sizes = (512, 1536, 1536, 768, 20)
    return nn.Sequential(*_layers(sizes)).eval(), (torch.randn(48, 512),)


def tables() -> Made:
    ids = [torch.randint(0, 60_000, (160,)) for _ in range(5)]
    return Tables().eval(), (torch.randn(160, 20), *ids)


MODELS = (encoder, encoders, prompt, token, images, batch_of_images, dense, tables)
