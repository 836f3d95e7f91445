"""What a rank computes for one microbatch: seconds of a decoder's layers and of its ends, by phase.

The model is written here from its facts, with a rank's share of heads, feed-forward and vocabulary
(Megatron-LM, arXiv 1909.08053, section 3; sequence parallel as in arXiv 2205.05198, section 4.2).
Its backward pass is gpuir's. Layers are alike: a model of two and one of one layer say what each
costs, and what embedding, head and loss cost besides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast

import numpy as np

from gpuir.cost.work import Work
from gpuir.fit import sized
from gpuir.fit.score import kernel_s
from gpuir.ir.graph import Graph, Node
from gpuir.ir.phases import phase_of
from gpuir.ir.types import DType, bf16, f8e4m3, f32
from gpuir.ops import kernel as k
from gpuir.targets.load import load_target
from validation.runs import Facts

FORWARD, RECOMPUTED, BACKWARD = "forward", "recomputed", "backward"
# Where data of other ranks arrive or leave: collectives stand there, and no kernel.
EXCHANGES = re.compile(r"\.(gather|scatter|ring)(/|$)")
DTYPES = {"fp16": "float16", **dict.fromkeys(("fp32", "tf32", "amp fp16"), "float32")}
BLOCKS = ("mxfp8",)  # whose scales are those of blocks


# The first FlashAttention: forward 30 to 50 % of an A100's peak, backward 25 to 35 % (Dao,
# FlashAttention-2, arXiv 2307.08691, section 1). Its products are `mma.sync`, of which an SM does
# 2048 operations a clock in 16 bits, on Hopper too (half of its `wgmma`).
FIRST_FLASH = {FORWARD: (0.4, 0.3, 0.5), BACKWARD: (0.3, 0.25, 0.35)}
SYNC_FLOPS = 2048.0


@dataclass(frozen=True)
class Stack:
    """How the software computes a layer: gpuir's profile; the dtype of products (`amp fp16`: by
    PyTorch's autocast, of weights in f32); attention by the
    profile's `library`, by the `first` FlashAttention on sequences that are packed before and
    unpacked behind it, or by `scores` that are kept; whether the loss reads logits in f32, how
    often more its forward pass runs, for metrics; what of a layer is recomputed: nothing, or
    `scores`."""

    profile: str
    dtype: str
    attention: Literal["library", "first", "scores"] = "library"
    wide_loss: bool = True
    metrics: int = 0
    recomputed: str = ""


@dataclass(frozen=True)
class Share:
    """A rank's part: of `tp` ranks that share each layer (norms and residuals too, with
    `sequence`), of `cp` that share each sequence; `batch` sequences of `seq` tokens."""

    batch: int
    seq: int
    tp: int = 1
    cp: int = 1
    sequence: bool = False


@dataclass(frozen=True)
class Seconds:
    """Kernels one after another: the expected time, and between what 80 % of measurements lie."""

    time_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.time_s + other.time_s, self.low_s + other.low_s, self.high_s + other.high_s
        )

    def __sub__(self, other: Seconds) -> Seconds:
        return self + other * -1

    def __mul__(self, by: float) -> Seconds:
        return Seconds(self.time_s * by, self.low_s * by, self.high_s * by)


Phases = dict[str, Seconds]  # by FORWARD, RECOMPUTED and BACKWARD


@dataclass(frozen=True)
class Times:
    """Of one microbatch: of a layer, and of what is before and behind the layers; of a layer's
    weight gradients alone, beside which communication can run; by kind of kernel, for reports."""

    layer: Phases
    ends: Phases
    weights: Seconds
    kinds: Mapping[str, float]


@cache
def times(facts: Facts, share: Share, stack: Stack, target: str) -> Times:
    """Autograd adds up the two gradients of each residual in a kernel of its own, which is in the
    norm's here; the dropout of hidden states, which Megatron's GPT has, is not written below."""
    one, two = (_phases(_graph(facts, n, share, stack, target), stack) for n in (1, 2))
    layer = {p: two[0][p] - one[0][p] for p in one[0]}
    tokens = share.batch * share.seq / share.cp / (share.tp if share.sequence else 1)
    dtype = f32 if DTYPES.get(stack.dtype) == "float32" else bf16
    kernels = 4 if stack.attention == "scores" else 2
    layer[BACKWARD] += copies(tokens * facts.hidden, target, dtype) * kernels
    return Times(
        layer,
        {p: one[0][p] * 2 - two[0][p] for p in layer},
        two[1] - one[1],
        {n: s - one[2].get(n, 0.0) for n, s in two[2].items()},
    )


def _phases(costed: Graph, stack: Stack) -> tuple[Phases, Seconds, dict[str, float]]:
    found: Phases = dict.fromkeys((FORWARD, RECOMPUTED, BACKWARD), Seconds())
    weights = Seconds()
    kinds: dict[str, float] = {}
    for node in costed.nodes:
        if node.cost is None or all(EXCHANGES.search(loc) for loc in node.locs):
            continue
        time = _seconds(node, stack, costed.target or "")
        phase = phase_of(node) or FORWARD
        found[phase] += time
        kind = f"{phase} {type(node.op).__name__}"
        kinds[kind] = kinds.get(kind, 0.0) + time.time_s
        if phase == BACKWARD and _is_weight_gradient(node):
            weights += time
    return found, weights, kinds


def _is_weight_gradient(node: Node) -> bool:
    return isinstance(node.op, k.Gemm) and node.results[0].type.rank == 2


def _seconds(node: Node, stack: Stack, target: str) -> Seconds:
    assert node.cost is not None
    op, phase = node.op, phase_of(node) or FORWARD
    within = any(loc.partition(":")[2].startswith("layers.") for loc in node.locs)
    if stack.dtype in ("fp8", "mxfp8") and isinstance(op, k.Gemm) and within:
        return _narrow(op, stack.dtype, target, phase == BACKWARD)
    if stack.attention == "first" and isinstance(op, k.Attention | k.AttentionGradient):
        return _first_flash(op, target, phase)
    low, high = node.cost.interval or (node.cost.time_s,) * 2
    found = Seconds(node.cost.time_s, low, high)
    if stack.metrics and phase == FORWARD and any("cross_entropy" in loc for loc in node.locs):
        return found * (1 + stack.metrics)
    return found


def _first_flash(op: k.Attention | k.AttentionGradient, target: str, phase: str) -> Seconds:
    """With the copies around it: queries, keys and values without their padding, the result with
    it, which is zeroed first; the same of gradients (flash_attn/bert_padding.py)."""
    gpu = load_target(target)
    peak = min(gpu.peak("tensor", bf16), SYNC_FLOPS * gpu.sms * gpu.clock_hz)
    share, least, most = FIRST_FLASH[phase]
    found = Seconds(*(op.flops() / peak / by for by in (share, most, least)))
    cells = float(op.operands[0].type.size)
    zeros = 1.0 if phase == FORWARD else 3.0
    return found + copies(cells * (4.0 + zeros / 2), target)


def copies(cells: float, target: str, dtype: DType = bf16, to: DType | None = None) -> Seconds:
    """A kernel that reads and writes as many cells."""
    return _kernel(sized.pointwise(np.full(1, cells), (dtype,), (to or dtype,)), target)


def _kernel(work: Work, target: str) -> Seconds:
    time, low, high, _ = (float(x[0]) for x in kernel_s(work, load_target(target)))
    return Seconds(time, low, high)


def _narrow(op: k.Gemm, dtype: str, target: str, backward: bool) -> Seconds:
    """A product in fp8, and the kernel that casts what it reads, as it lies and turned
    (Transformer Engine's cast_transpose): once for the two products that read a gradient."""
    dims = op.space().dims
    m, n, depth = (np.full(1, float(dims[d] * (dims["b"] if d == "m" else 1))) for d in "mnk")
    product = sized.gemm(m, n, depth, f8e4m3, out=bf16)
    if dtype in BLOCKS:
        product = replace(product, kind="block scales")
    cells = m * depth * (0.5 if backward else 1.0)
    cast_work = sized.pointwise(cells, (bf16,), (f8e4m3, f8e4m3), ops=4.0)
    return _kernel(product, target) + _kernel(cast_work, target)


@cache
def _graph(facts: Facts, layers: int, share: Share, stack: Stack, target: str) -> Graph:
    """A costed training step, without an optimizer, of so many layers."""
    import torch

    import gpuir

    with torch.device("meta"):
        module = _module(facts, layers, share, stack)
        size = share.batch, share.seq // share.cp
        ids = torch.zeros(size, dtype=torch.long)
    more: dict[str, Any] = {}
    if stack.dtype == "amp fp16":
        more["autocast"] = "f16"
    if stack.recomputed == "scores":
        more["checkpoint"] = "layers.*.core"
    g = gpuir.load(
        module.to(getattr(torch, DTYPES.get(stack.dtype, "bfloat16"))),
        args=(ids, ids),
        train=True,
        autodiff="gpuir",
        profile=stack.profile,
        warn=lambda _: None,
        **cast(Any, more),
    )
    return gpuir.analyze(g, target, profile=stack.profile, tf32=stack.dtype == "tf32")


def _module(f: Facts, layers: int, s: Share, stack: Stack) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    heads, kv = f.heads // s.tp, max(f.kv_heads // s.tp, 1)
    ffn, vocab = f.ffn // s.tp, -(-f.vocab // s.tp)
    own = s.seq // s.cp // (s.tp if s.sequence else 1)  # tokens of a rank, between products

    class Exchange(nn.Module):
        """Tokens of `times` ranks from those of one, or those of one from them."""

        def __init__(self, ranks: int, tokens: int) -> None:
            super().__init__()
            self.ranks, self.tokens = ranks, tokens

        def forward(self, x: Tensor) -> Tensor:
            if self.ranks == 1 or x.shape[-2] == self.tokens:
                return x
            if x.shape[-2] > self.tokens:
                return x[..., : self.tokens, :]
            return torch.cat([x] * self.ranks, dim=-2)

    def norm() -> nn.Module:
        return nn.RMSNorm(f.hidden) if f.rms else nn.LayerNorm(f.hidden, bias=f.bias)

    def linear(a: int, b: int) -> nn.Linear:
        return nn.Linear(a, b, bias=f.bias)

    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask: Tensor
            self.padding: Tensor
            self.register_buffer("padding", torch.zeros(s.batch, 1, 1, s.seq))
            self.register_buffer("mask", torch.zeros(s.seq, s.seq, dtype=torch.bool))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = q.shape[1] != k.shape[1]
            if stack.attention != "scores":
                causal = s.cp == 1
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
            scores = q @ k.transpose(-1, -2)  # scaled by the product itself
            if f.encoder:
                scores = scores * f.head**-0.5 + self.padding
            elif stack.dtype == "fp32":  # Megatron's fused softmax, which masks too, is of 16 bits
                scores = scores.masked_fill(self.mask, -1e4)
            return F.dropout(F.softmax(scores, dim=-1), 0.1) @ v

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = norm(), norm()
            self.qkv = linear(f.hidden, (heads + 2 * kv) * f.head)
            self.o = linear(heads * f.head, f.hidden)
            self.up = linear(f.hidden, ffn * (2 if f.gated else 1))
            self.down = linear(ffn, f.hidden)
            whole = s.seq // s.cp
            self.gather = Exchange(s.tp, whole)
            self.scatter = Exchange(s.tp, own)
            self.ring = Exchange(s.cp // 2 or 1, s.seq // 2)
            self.core = Core()

        def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-b, a], dim=-1) * sin

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            n = self.gather(self.n1(x))
            b, t, _ = n.shape
            parts = self.qkv(n).split([heads * f.head, kv * f.head, kv * f.head], dim=-1)
            q, k, v = (y.view(b, t, -1, f.head).transpose(1, 2) for y in parts)
            if f.rope:
                q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
            if s.cp > 1:
                k, v = self.ring(k), self.ring(v)
            a = self.core(q, k, v).transpose(1, 2).reshape(b, t, heads * f.head)
            x = x + self.scatter(self.o(a))
            up = self.up(self.gather(self.n2(x)))
            if f.gated:
                gate, up = up.chunk(2, dim=-1)
                up = F.silu(gate) * up
            elif f.activation == "squared relu":
                up = F.relu(up).square()
            else:
                up = F.gelu(up, approximate="none" if stack.profile == "eager" else "tanh")
            return x + self.scatter(self.down(up))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab, f.hidden)
            self.places = None if f.rope else nn.Embedding(s.seq // s.cp, f.hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = norm()
            self.gather, self.scatter = Exchange(s.tp, s.seq // s.cp), Exchange(s.tp, own)
            self.head = None if f.tied else nn.Linear(f.hidden, vocab, bias=False)
            self.cos: Tensor
            self.sin: Tensor
            self.register_buffer("cos", torch.zeros(s.seq // s.cp, f.head))
            self.register_buffer("sin", torch.zeros(s.seq // s.cp, f.head))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embedding(ids)
            if self.places is not None:
                x = x + self.places.weight
            x = self.scatter(x)
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            weight = self.embedding.weight if self.head is None else self.head.weight
            x = self.gather(self.norm(x))
            if f.predicted < 1:
                kept = math.ceil(x.shape[1] * f.predicted)
                x, labels = x[:, :kept], labels[:, :kept]
            logits = F.linear(x, weight).flatten(0, 1)
            logits = logits.float() if stack.wide_loss else logits
            return F.cross_entropy(logits, labels.flatten())

    return Decoder()
