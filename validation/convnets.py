"""Convolutional nets as they were trained beside the recommenders, as programs that
gpuir reads: benchmark.py of github.com/moderato/convnet-benchmark-py.

An iteration is timed in three spans, each from an idle device: forward, loss and backward, and the
optimizer's step; images lie on the device, and setting gradients to zero is in none of them.
ResNet-50 is transformers' (the same layers as torchvision's: stride in the 3 x 3 convolution).
Inception-V3 is built here. Its auxiliary head is switched off, as that program has it
(`net.aux_logits = False`): its weights are there, and neither trained nor used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import gpuir
from gpuir.ir.graph import Graph
from gpuir.ir.phases import phase_of
from validation.models import is_loss

MODELS = {"ResNet50": 224, "Inception-V3": 299}  # cells of a side of an image
CLASSES = 1000


def program(name: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = (resnet50() if name == "ResNet50" else inception_v3(auxiliary=False)).train()
            self.loss = nn.CrossEntropyLoss()

        def forward(self, images: Any, labels: Any) -> Any:
            return self.loss(self.net(images), labels)

    side = MODELS[name]
    return Net(), (torch.zeros(batch, 3, side, side), torch.zeros(batch, dtype=torch.long))


def resnet50() -> Any:
    from torch import nn
    from transformers import ResNetConfig, ResNetForImageClassification

    classes: dict[str, Any] = {"num_labels": CLASSES}

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ResNetForImageClassification(ResNetConfig(**classes))

        def forward(self, images: Any) -> Any:
            return self.net(images).logits

    return Logits()


def inception_v3(auxiliary: bool = True) -> Any:
    """Inception-V3: blocks A to E between layers that halve the image, each the channels of several
    branches side by side (Szegedy and others, Rethinking the Inception Architecture, arXiv
    1512.00567, table 1 and figures 5 to 10; filters as torchvision's). In training it gives the
    logits of its auxiliary head too, if that is on."""
    from torch import cat, nn

    def conv(a: int, b: int, size: int | tuple[int, int] = 1, stride: int = 1, pad: bool = True):
        """Convolution, batch norm, ReLU; the image keeps its size but where it is halved."""
        down, across = (size, size) if isinstance(size, int) else size
        padding = (down // 2, across // 2) if pad and stride == 1 else 0
        layer = nn.Conv2d(a, b, (down, across), stride, padding, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(b, eps=1e-3), nn.ReLU())

    def chain(a: int, *layers: tuple[Any, ...]):
        """Convolutions one after another: filters, window and stride of each."""
        widths = pairwise((a, *(layer[0] for layer in layers)))
        return nn.Sequential(
            *(conv(*ab, *rest) for ab, (_, *rest) in zip(widths, layers, strict=True))
        )

    class Branches(nn.ModuleList):
        def forward(self, x: Any) -> Any:
            return cat([branch(x) for branch in self], 1)

    def pooled(a: int, b: int):
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(a, b))

    def block_a(a: int, pool: int):
        long = chain(a, (64,), (96, 3), (96, 3))
        return Branches([conv(a, 64), chain(a, (48,), (64, 5)), long, pooled(a, pool)])

    def block_b(a: int):
        long = chain(a, (64,), (96, 3), (96, 3, 2))
        return Branches([conv(a, 384, 3, 2), long, nn.MaxPool2d(3, 2)])

    def block_c(a: int, w: int):
        flat, tall = (1, 7), (7, 1)
        short = chain(a, (w,), (w, flat), (192, tall))
        long = chain(a, (w,), (w, tall), (w, flat), (w, tall), (192, flat))
        return Branches([conv(a, 192), short, long, pooled(a, 192)])

    def block_d(a: int):
        long = chain(a, (192,), (192, (1, 7)), (192, (7, 1)), (192, 3, 2))
        return Branches([chain(a, (192,), (320, 3, 2)), long, nn.MaxPool2d(3, 2)])

    def block_e(a: int):
        def forked():
            return Branches([conv(384, 384, (1, 3)), conv(384, 384, (3, 1))])

        short = nn.Sequential(conv(a, 384), forked())
        long = nn.Sequential(chain(a, (448,), (384, 3)), forked())
        return Branches([conv(a, 320), short, long, pooled(a, 192)])

    class Inception(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                *(conv(3, 32, 3, 2), conv(32, 32, 3, pad=False), conv(32, 64, 3)),
                *(nn.MaxPool2d(3, 2), conv(64, 80), conv(80, 192, 3, pad=False)),
                nn.MaxPool2d(3, 2),
            )
            self.early = nn.Sequential(
                *(block_a(192, 32), block_a(256, 64), block_a(288, 64), block_b(288)),
                *(block_c(768, w) for w in (128, 160, 160, 192)),
            )
            self.late = nn.Sequential(block_d(768), block_e(1280), block_e(2048))
            mean = nn.AdaptiveAvgPool2d(1), nn.Flatten()
            self.head = nn.Sequential(*mean, nn.Dropout(), nn.Linear(2048, CLASSES))
            self.auxiliary_head = nn.Sequential(
                *(nn.AvgPool2d(5, 3), conv(768, 128), conv(128, 768, 5, pad=False)),
                *(*mean, nn.Linear(768, CLASSES)),
            )

        def forward(self, images: Any) -> Any:
            early = self.early(self.stem(images))
            logits = self.head(self.late(early))
            return (logits, self.auxiliary_head(early)) if auxiliary and self.training else logits

    return Inception()


def step(name: str, batch: int) -> Graph:
    """A training step as a graph."""
    module, args = program(name, batch)
    g = gpuir.load(module, args=args, train=True, accumulate=True, warn=lambda _: None)
    return gpuir.pipeline('optimizer{kind="sgd",foreach=false}').run(g)


def spans(g: Graph) -> Iterator[Graph]:
    """Forward, loss and backward, the optimizer's step."""
    kinds = [
        2 if phase_of(n) == "optimizer" else 1 if phase_of(n) or is_loss(n) else 0 for n in g.nodes
    ]
    for wanted in range(3):
        nodes = (n for n, kind in zip(g.nodes, kinds, strict=True) if kind == wanted)
        yield replace(g, nodes=tuple(nodes))
