"""Convolutional nets as they were trained beside the recommenders, as programs that
gpuir reads: benchmark.py of github.com/moderato/convnet-benchmark-py.

An iteration is timed in three spans, each from an idle device: forward, loss and backward, and the
optimizer's step; images lie on the device, and setting gradients to zero is in none of them.
ResNet-50 is transformers' (the same layers as torchvision's: stride in the 3 x 3 convolution).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpuir
from gpuir.ir.graph import Graph
from gpuir.ir.phases import phase_of
from validation.models import is_loss

MODELS = {"ResNet50": 224}  # cells of a side of an image


def program(name: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    import torch
    from torch import nn
    from transformers import ResNetConfig, ResNetForImageClassification

    classes: dict[str, Any] = {"num_labels": 1000}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ResNetForImageClassification(ResNetConfig(**classes)).train()
            self.loss = nn.CrossEntropyLoss()

        def forward(self, images: Any, labels: Any) -> Any:
            return self.loss(self.net(images).logits, labels)

    side = MODELS[name]
    return Net(), (torch.zeros(batch, 3, side, side), torch.zeros(batch, dtype=torch.long))


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
