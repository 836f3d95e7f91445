"""Models of published training runs, as torch modules without weights: decoders, and encoders like
BERT, written from the facts that `runs` reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from validation.runs import Facts

if TYPE_CHECKING:
    import torch

Attention = Literal["library", "scores"]


@dataclass(frozen=True)
class Form:
    """How a program is written.

    Weights are stored as `weights` and cast where they are read to `compute`, the dtype of all
    activations. Attention is one call of the `library`, or writes its `scores` (masked by an
    operator of its own with `masked`). `dropout` is that of attention's scores and of what each
    half of a layer adds. The loss reads logits in f32 with `wide_loss`; `metrics` are as many more
    runs of its forward pass.
    """

    weights: torch.dtype
    compute: torch.dtype
    attention: Attention = "library"
    masked: bool = False
    dropout: float = 0.0
    wide_loss: bool = True
    metrics: int = 0
    gelu: Literal["none", "tanh"] = "tanh"


def program(facts: Facts, layers: int, batch: int, seq: int, form: Form) -> tuple[Any, Any]:
    """A model of so many layers, on the meta device, and its arguments: token ids and labels. It
    gives the loss, and then the metrics."""
    import torch

    with torch.device("meta"):
        module = _module(facts, layers, batch, seq, form)
        ids = torch.zeros((batch, seq), dtype=torch.long)
    return module.to(form.weights), (ids, ids)


def _module(f: Facts, layers: int, batch: int, seq: int, form: Form) -> torch.nn.Module:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    def read(weight: Tensor | None) -> Tensor | None:
        return None if weight is None else weight.to(form.compute)

    class Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight.to(form.compute), read(self.bias))

    class Embedding(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return F.embedding(input, self.weight.to(form.compute))

    class LayerNorm(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return F.layer_norm(input, self.normalized_shape, read(self.weight), read(self.bias))

    class RMSNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, self.normalized_shape, read(self.weight), 1e-5)

    def norm() -> nn.Module:
        return RMSNorm(f.hidden) if f.rms else LayerNorm(f.hidden, bias=f.bias)

    def linear(a: int, b: int) -> nn.Linear:
        return Linear(a, b, bias=f.bias)

    class Core(nn.Module):
        """Attention of each token to those before it; of an encoder to all."""

        def __init__(self) -> None:
            super().__init__()
            self.mask: Tensor
            self.register_buffer("mask", torch.zeros(seq, seq, dtype=torch.bool))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
            if form.attention == "library":
                grouped = q.shape[1] != k.shape[1]
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            scores = q @ k.transpose(-1, -2)  # scaled by the product itself
            if f.encoder:
                scores = scores * f.head**-0.5 + padding
            elif form.masked:
                scores = scores.masked_fill(self.mask, -1e4)
            return F.dropout(F.softmax(scores, dim=-1), form.dropout) @ v

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = norm(), norm()
            self.qkv = linear(f.hidden, (f.heads + 2 * f.kv_heads) * f.head)
            self.o = linear(f.heads * f.head, f.hidden)
            self.up = linear(f.hidden, f.ffn * (2 if f.gated else 1))
            self.down = linear(f.ffn, f.hidden)
            self.core = Core()

        def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-b, a], dim=-1) * sin

        def attention(self, n: Tensor, cos: Tensor, sin: Tensor, padding: Tensor) -> Tensor:
            b, t, _ = n.shape
            widths = [f.heads * f.head, f.kv_heads * f.head, f.kv_heads * f.head]
            parts = self.qkv(n).split(widths, dim=-1)
            q, k, v = (y.view(b, t, -1, f.head).transpose(1, 2) for y in parts)
            if f.rope:
                q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
            a = self.core(q, k, v, padding).transpose(1, 2)
            return self.o(a.reshape(b, t, f.heads * f.head))

        def feed_forward(self, n: Tensor) -> Tensor:
            up = self.up(n)
            if f.gated:
                gate, up = up.chunk(2, dim=-1)
                up = F.silu(gate) * up
            elif f.activation == "squared relu":
                up = F.relu(up).square()
            else:
                up = F.gelu(up, approximate=form.gelu)
            return self.down(up)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, padding: Tensor) -> Tensor:
            x = x + F.dropout(self.attention(self.n1(x), cos, sin, padding), form.dropout)
            return x + F.dropout(self.feed_forward(self.n2(x)), form.dropout)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding(f.vocab, f.hidden)
            self.places = None if f.rope else Embedding(seq, f.hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = norm()
            self.head = None if f.tied else Linear(f.hidden, f.vocab, bias=False)
            self.cos: Tensor
            self.sin: Tensor
            self.padding: Tensor
            self.register_buffer("cos", torch.zeros(seq, f.head))
            self.register_buffer("sin", torch.zeros(seq, f.head))
            self.register_buffer("padding", torch.zeros(batch, 1, 1, seq))

        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            x = self.embedding(ids)
            if self.places is not None:
                x = x + self.places.weight.to(form.compute)
            for layer in self.layers:
                x = layer(x, self.cos, self.sin, self.padding)
            x = self.norm(x)
            if f.predicted < 1:
                kept = math.ceil(x.shape[1] * f.predicted)
                x, labels = x[:, :kept], labels[:, :kept]
            if self.head is None:
                logits = F.linear(x, self.embedding.weight.to(form.compute))
            else:
                logits = self.head(x)
            logits, labels = logits.flatten(0, 1), labels.flatten()
            logits = logits.float() if form.wide_loss else logits
            loss = F.cross_entropy(logits, labels)
            known = logits.detach()
            return loss, *(F.cross_entropy(known, labels) for _ in range(form.metrics))

    return Model()
