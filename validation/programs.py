"""Models of published training runs, as torch modules without weights: decoders, mixtures of
experts too, and encoders like BERT. Their sizes are numbers, which `--dims` gives
(`validation.zoo:decoder`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

# What experts compute between their products: GPT-OSS (arXiv 2508.10925, section 2.2; its config).
CLAMPED = {"interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0}


@dataclass(frozen=True)
class Sizes:
    """A decoder, or an encoder like BERT. What is 0 it has not.

    Behind the first `dense` layers `experts` stand in place of the feed-forward, one `moe_ffn`
    wide; each token has `top_k` of them, and all go through a feed-forward of `shared` beside.
    Queries, keys and values may come from `q_rank` and `kv_rank` numbers a token (DeepSeek-V2,
    arXiv 2405.04434, section 2.1): a head has `plain` without its place, `placed` with it, and
    `value`. In every second layer a token sees a `window` of keys. Queries and keys may be `normed`
    head by head. `further` layers predict the word after the next. Of a sequence `predicted` words
    are predicted, or all."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    gated: int = 0
    rms: int = 0
    rope: int = 0
    tied: int = 0
    bias: int = 0
    squared: int = 0  # the activation is that of a squared ReLU
    clamped: int = 0  # experts compute what those of GPT-OSS do
    encoder: int = 0
    predicted: int = 0
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    shared: int = 0
    dense: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    plain: int = 0
    placed: int = 0
    value: int = 0
    window: int = 0
    normed: int = 0
    further: int = 0


@dataclass(frozen=True)
class Form:
    """How a framework writes the program: attention as one call of the `library`, or its `scores`
    (masked by an operator of its own with `masked`); `dropout` of the scores and of what each half
    of a layer adds; logits that the loss reads in f32 with `wide_loss`; as many more runs of its
    forward pass as `metrics`."""

    attention: Literal["library", "scores"] = "library"
    masked: bool = False
    dropout: float = 0.0
    wide_loss: bool = True
    metrics: int = 0
    gelu: Literal["none", "tanh"] = "tanh"


def program(sizes: Sizes, batch: int, seq: int, form: Form) -> Any:
    """A model on the meta device, and its arguments: token ids and labels. It gives the loss, and
    then the metrics."""
    import torch

    from gpuir.frontends.torch.program import TorchProgram

    with torch.device("meta"):
        module = _module(sizes, batch, seq, form)
        ids = torch.zeros((batch, seq), dtype=torch.long)
    return TorchProgram(module, (ids, ids), repeats=True)


def _module(f: Sizes, batch: int, seq: int, form: Form) -> torch.nn.Module:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from gpuir.frontends.torch.attention import attention as windowed
    from gpuir.frontends.torch.experts import experts as mixed

    class RMSNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, self.normalized_shape, self.weight, 1e-5)

    def norm(width: int = f.hidden) -> nn.Module:
        return RMSNorm(width) if f.rms else nn.LayerNorm(width, bias=bool(f.bias))

    def linear(a: int, b: int) -> nn.Linear:
        return nn.Linear(a, b, bias=bool(f.bias))

    class Core(nn.Module):
        """Attention of each token to those before it, within a `window` if there is one; of an
        encoder to all."""

        def __init__(self, window: int) -> None:
            super().__init__()
            self.window = window
            self.mask: Tensor
            self.register_buffer("mask", torch.zeros(seq, seq, dtype=torch.bool))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
            if self.window:
                return windowed(q, k, v, f.head**-0.5, self.window - 1)
            if form.attention == "library":
                grouped = q.shape[1] != k.shape[1]
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            scores = q @ k.transpose(-1, -2)  # scaled by the product itself
            if f.encoder:
                scores = scores * f.head**-0.5 + padding
            elif form.masked:
                scores = scores.masked_fill(self.mask, -1e4)
            return F.dropout(F.softmax(scores, dim=-1), form.dropout) @ v

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin

    class Heads(nn.Module):
        """Queries, keys and values, each by a product with the same tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv = linear(f.hidden, (f.heads + 2 * f.kv_heads) * f.head)
            self.norms = nn.ModuleList(norm(f.head) for _ in range(2 * f.normed))

        def forward(self, n: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            b, t, _ = n.shape
            widths = [f.heads * f.head, f.kv_heads * f.head, f.kv_heads * f.head]
            q, k, v = (x.view(b, t, -1, f.head) for x in self.qkv(n).split(widths, dim=-1))
            if f.normed:
                q, k = self.norms[0](q), self.norms[1](k)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return (rotated(q, cos, sin), rotated(k, cos, sin), v) if f.rope else (q, k, v)

    class LatentHeads(nn.Module):
        """The same from few numbers a token. Of a key, what says its place is that of all heads."""

        def __init__(self) -> None:
            super().__init__()
            self.q_down, self.q_norm = linear(f.hidden, f.q_rank), norm(f.q_rank)
            self.kv_down, self.kv_norm = linear(f.hidden, f.kv_rank + f.placed), norm(f.kv_rank)
            self.q_up = linear(f.q_rank, f.heads * (f.plain + f.placed))
            self.kv_up = linear(f.kv_rank, f.heads * (f.plain + f.value))

        def forward(self, n: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            b, t, _ = n.shape
            queries = self.q_up(self.q_norm(self.q_down(n)))
            latent, place = self.kv_down(n).split([f.kv_rank, f.placed], dim=-1)
            pairs = self.kv_up(self.kv_norm(latent))
            queries, pairs = (y.view(b, t, f.heads, -1).transpose(1, 2) for y in (queries, pairs))
            q, q_place = queries.split([f.plain, f.placed], dim=-1)
            k, v = pairs.split([f.plain, f.value], dim=-1)
            place = rotated(place.view(b, 1, t, f.placed), cos, sin).expand(b, f.heads, t, f.placed)
            q = torch.cat([q, rotated(q_place, cos, sin)], dim=-1)
            return q, torch.cat([k, place], dim=-1), v

    class Experts(nn.Module):
        """A mixture of experts: the router's choice, and one call of ours for the rest."""

        def __init__(self) -> None:
            super().__init__()
            count, width = f.experts, f.moe_ffn
            rows = width * (2 if f.gated else 1)
            self.router = linear(f.hidden, count)
            self.up = nn.Parameter(torch.zeros(count, rows, f.hidden))
            self.down = nn.Parameter(torch.zeros(count, f.hidden, width))
            self.up_bias = nn.Parameter(torch.zeros(count, rows)) if f.bias else None
            self.down_bias = nn.Parameter(torch.zeros(count, f.hidden)) if f.bias else None

        def forward(self, n: Tensor) -> Tensor:
            rows = n.flatten(0, 1)
            chances = F.softmax(self.router(rows).float(), dim=-1)
            shares, which = chances.topk(f.top_k, dim=-1)
            shares = (shares / shares.sum(-1, keepdim=True)).to(n.dtype)
            weights = (self.up, self.down, self.up_bias, self.down_bias)
            how = CLAMPED if f.clamped else {}
            return mixed(rows, which, shares, *weights, **how).view_as(n)

    class Layer(nn.Module):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.n1, self.n2 = norm(), norm()
            self.heads = LatentHeads() if f.q_rank else Heads()
            self.o = linear(f.heads * (f.value if f.q_rank else f.head), f.hidden)
            self.experts = Experts() if f.experts and at >= f.dense else None
            width = f.shared if self.experts else f.ffn
            self.up = linear(f.hidden, width * (2 if f.gated else 1)) if width else None
            self.down = linear(width, f.hidden) if width else None
            self.core = Core(0 if at % 2 else f.window)

        def attention(self, n: Tensor, cos: Tensor, sin: Tensor, padding: Tensor) -> Tensor:
            q, k, v = self.heads(n, cos, sin)
            return self.o(self.core(q, k, v, padding).transpose(1, 2).flatten(2))

        def feed_forward(self, n: Tensor) -> Tensor:
            if self.experts is None:
                return self.every(n)
            return self.experts(n) if self.up is None else self.experts(n) + self.every(n)

        def every(self, n: Tensor) -> Tensor:
            """What all tokens go through."""
            assert self.up is not None and self.down is not None
            up = self.up(n)
            if f.gated:
                gate, up = up.chunk(2, dim=-1)
                up = F.silu(gate) * up
            elif f.squared:
                up = F.relu(up).square()
            else:
                up = F.gelu(up, approximate=form.gelu)
            return self.down(up)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, padding: Tensor) -> Tensor:
            x = x + F.dropout(self.attention(self.n1(x), cos, sin, padding), form.dropout)
            return x + F.dropout(self.feed_forward(self.n2(x)), form.dropout)

    class Further(nn.Module):
        """A layer that predicts one word more, from what the last layer gives and the words there
        (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2, self.layer = norm(), norm(), Layer(f.layers)
            self.joined = linear(2 * f.hidden, f.hidden)

        def forward(self, x: Tensor, words: Tensor, *rest: Tensor) -> Tensor:
            return self.layer(self.joined(torch.cat([self.n1(words), self.n2(x)], dim=-1)), *rest)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(f.vocab, f.hidden)
            self.places = None if f.rope else nn.Embedding(seq, f.hidden)
            self.layers = nn.ModuleList(Layer(i) for i in range(f.layers))
            self.further = nn.ModuleList(Further() for _ in range(f.further))
            self.norm = norm()
            self.head = None if f.tied else nn.Linear(f.hidden, f.vocab, bias=False)
            self.cos: Tensor
            self.sin: Tensor
            self.padding: Tensor
            placed = f.placed if f.q_rank else f.head
            self.register_buffer("cos", torch.zeros(seq, placed))
            self.register_buffer("sin", torch.zeros(seq, placed))
            self.register_buffer("padding", torch.zeros(batch, 1, 1, seq))

        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            words = x = self.embedding(ids)
            if self.places is not None:
                x = x + self.places.weight
            ends = self.cos, self.sin, self.padding
            for layer in self.layers:
                x = layer(x, *ends)
            logits, known = self.words(x, labels)
            loss = F.cross_entropy(logits, known)
            more = (F.cross_entropy(logits.detach(), known) for _ in range(form.metrics))
            for layer in self.further:
                x = layer(x, words, *ends)
                loss = loss + 0.1 * F.cross_entropy(*self.words(x, labels))
            return loss, *more

        def words(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            """The scores of all words, and which are right."""
            x = self.norm(x)
            if f.predicted:
                x, labels = x[:, : f.predicted], labels[:, : f.predicted]
            logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
            logits = logits.flatten(0, 1)
            return logits.float() if form.wide_loss else logits, labels.flatten()

    return Model()
