"""A step of a language model as an inference server runs it: the launches of one rank.

The products, experts and norms are those of the graph that transformers builds from the config, one
rank's share of it. Servers launch fewer kernels than transformers, and this says which: products
of one input as one product, weights in the deployment's dtype, the rotation as one kernel, residual
additions within norms, attention that writes its cache, routing as one kernel (vLLM, SGLang and
TensorRT-LLM: the layers of their Llama, Qwen3, MiniMax, gpt-oss and DeepSeek models). Latent
attention is decoded in its latent space, which transformers does not do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpuir.cost import routing, sized
from gpuir.cost.lanes import LANE_OPS, NORM_LANE_OPS
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.fit.columns import Floats
from gpuir.fit.readers import Shapes
from gpuir.ir.graph import Graph
from gpuir.ir.types import bf16, f8e4m3, f32
from gpuir.ops import kernel as k
from gpuir.stacks.serving.engines import Generation, experts_of
from gpuir.targets.spec import read_spec, spec_folder
from gpuir.targets.target import Target
from validation import experts, serving
from validation.steps import PLACE

# A Hugging Face config, tokens → the kernels of a prompt of so many tokens, one sequence.
Build = Callable[[Mapping[str, Any], int], Graph]
TOKENS = 256  # of the graph: any number that is more than a window of attention

NORM = re.compile(r"self_attn\.\w*norm")
EXPANDING = "self_attn.kv_b_proj"  # of the latent, to keys and values of every head

# An all-reduce in one shot, where each rank reads what all others have, or in two, where each sums
# its part and then reads the others' sums: the quicker of the two, as TensorRT-LLM, vLLM and SGLang
# choose by size (AllReduceStrategy there; custom_all_reduce of vLLM). What the smallest takes, and
# which share of the links is reached: fitted to all_reduce in CUDA graphs of the three on A100,
# H100, H200 and B200 (aiconfigurator's collectives), 20 % off on average.
ONE_SHOT = 4.6e-6, 0.59
TWO_SHOTS = 12.6e-6, 0.64

# The share of a GPU's memory that weights and caches may take: vLLM's default of
# gpu_memory_utilization (vllm/config), TensorRT-LLM's of free_gpu_memory_fraction.
MEMORY_SHARE = 0.9

# What the GPU waits for the host after each step, by sequence: in vLLM before 0.14, the first that
# schedules a step while the one before runs (vllm-project/vllm pull request 27614). Its developers
# saw 5 to 6 ms at 256 sequences, and hardly any with it (pull request 11133).
GAP_S = 5.5e-3 / 256
OVERLAPPING = (0, 14)

# How unevenly tokens choose experts: the milder of the two skews that aiconfigurator measures
# experts at, for those of trained models are never all as popular.
SKEW = 1.01
PACKED = {"mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8")}  # on Hopper, and on Blackwell


@dataclass(frozen=True, eq=False)
class Decoder:
    """A language model: its config, and what its checkpoints hold (specs/decoders.toml)."""

    name: str
    source: str
    config: Mapping[str, Any]
    fp8: str = "fp8"
    experts: str = ""
    cache_fp8: bool = False
    plain_attention: bool = False

    def divided(self, ranks: int) -> dict[str, Any]:
        """A layer of each kind, a rank's share: heads, feed-forward and vocabulary divided as
        Megatron does (arXiv 1909.08053, section 3), experts whole. ValueError where heads do not
        divide."""
        c = dict(self.config)
        if c["num_attention_heads"] % ranks:
            raise ValueError(f"{c['num_attention_heads']} heads on {ranks} ranks")
        c["num_attention_heads"] //= ranks
        c["num_key_value_heads"] = max(c["num_key_value_heads"] // ranks, 1)
        c["vocab_size"] = -(-c["vocab_size"] // ranks)
        if "num_experts_per_tok" not in c or "moe_intermediate_size" in c:
            c["intermediate_size"] //= ranks
        if "first_k_dense_replace" in c:
            c["first_k_dense_replace"] = 1
        return {**c, "num_hidden_layers": len(self.layers)}

    @property
    def layers(self) -> tuple[int, ...]:
        """How many layers there are of each kind: all alike, or the first without experts."""
        layers, first = (
            self.config.get(n, 0) for n in ("num_hidden_layers", "first_k_dense_replace")
        )
        return (first, layers - first) if first else (layers,)

    @property
    def latent(self) -> int:
        """Cells of what keys and values of all heads are made from (DeepSeek-V2, arXiv 2405.04434,
        section 2.1), without the part that carries the position; 0 where each head has its own."""
        return self.config.get("kv_lora_rank", 0)

    @property
    def attention(self) -> tuple[tuple[int, int], ...]:
        """How many layers have a window of how many keys (0: none)."""
        layers, window = self.config["num_hidden_layers"], self.config.get("sliding_window", 0)
        return ((layers // 2, window), (layers - layers // 2, 0)) if window else ((layers, 0),)


def decoders() -> dict[str, Decoder]:
    """Those we have configs of, by the names of their deployments."""
    tables = read_spec(spec_folder() / "decoders.toml")
    return {name: Decoder(name, **facts) for name, facts in tables.items()}


class Product(NamedTuple):
    """Columns and depth of the weights that one input is multiplied by, in which kind of layer."""

    module: str
    layer: int
    n: int
    depth: int


@dataclass(frozen=True)
class Share:
    """What a rank has of the layers: its products, those of one input as one; the experts, in
    layers of the last kind; the cells a token of the norms within attention, and whether one is
    over all heads, so that ranks have to add up their sums of squares."""

    config: Mapping[str, Any]
    products: tuple[Product, ...]
    experts: k.Experts | None
    norms: tuple[int, ...]
    over_heads: bool

    @staticmethod
    def of(build: Build, decoder: Decoder, ranks: int) -> Share:
        config = decoder.divided(ranks)
        graph = build(config, TOKENS)
        products: dict[Any, Product] = {}
        mix: k.Experts | None = None
        norms: dict[str, int] = {}
        row = 0
        for node in graph.nodes:
            found = PLACE.match(str(node.locs[0])) if node.locs else None
            module, layer = (found["module"], int(found["layer"] or 0)) if found else ("", 0)
            match node.op:
                case k.Gemm() if module.count(".") or module == "lm_head":
                    dims, a = node.op.space().dims, node.op.factors[0]
                    before = products.get(a, Product(module, layer, 0, dims["k"]))
                    products[a] = before._replace(n=before.n + dims["n"])
                case k.Experts():
                    mix = node.op
                case k.Reduce() if NORM.fullmatch(module):
                    norms.setdefault(module, node.op.operands[0].type.size // TOKENS)
                    row = max(row, node.op.space().dims["r"])
                case _:
                    pass
        shares = tuple(_divided(p, ranks) for p in products.values())
        over_heads = "head_dim" in config and row > config["head_dim"]
        return Share(config, shares, mix, tuple(norms.values()), over_heads)

    def weight_bytes(self, d: Deployment) -> float:
        """What the rank's weights take, embedding and head among them."""
        found = 2.0 * self.config["vocab_size"] * d.decoder.config["hidden_size"]
        for p in self.products:
            *_, last = product(p, d, np.ones(1))
            times = 1 if p.module == "lm_head" else d.decoder.layers[p.layer]
            found += times * float(np.sum(last.operands[1].nbytes))
        if self.experts is not None:
            stored = mixture(self.experts, d, np.full(1, 1e5))  # tokens enough for every expert
            found += d.decoder.layers[-1] * float(np.sum(stored.operands[1].nbytes))
        return found

    def cached_bytes(self, d: Deployment, tokens: Floats) -> Floats:
        """What the keys and values of a sequence of so many tokens take."""
        _, kv_heads, head = self.head
        cells = 2 * kv_heads * head
        if d.decoder.latent:
            cells = d.decoder.latent + self.config["qk_rope_head_dim"]
        each = cells * (1 if d.has_narrow_cache else 2)
        kept = [
            times * np.minimum(tokens, window or np.inf) for times, window in d.decoder.attention
        ]
        return each * np.sum(kept, axis=0)

    @property
    def head(self) -> tuple[int, int, int]:
        """Heads, those of keys and values, and cells of each, or those that are rotated."""
        c = self.config
        if "kv_lora_rank" in c:
            return c["num_attention_heads"], 1, c["qk_rope_head_dim"]
        return c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]


def _divided(p: Product, ranks: int) -> Product:
    """Shared experts have no size of their own in a config: theirs is divided afterwards."""
    if not p.module.startswith("mlp.shared"):
        return p
    if p.module.endswith("down_proj"):
        return p._replace(depth=p.depth // ranks)
    return p._replace(n=p.n // ranks)


@dataclass(frozen=True)
class Deployment:
    """A model on ranks of one kind, under a framework: `tp` ranks share each layer, experts are cut
    in `expert_tp` and spread over `expert_ep`. `products` and `experts` are their dtypes; `version`
    the framework's, empty where it is not known: then it is taken as a new one."""

    decoder: Decoder
    target: Target
    framework: str
    products: str
    experts: str
    tp: int
    expert_tp: int = 1
    expert_ep: int = 1
    version: str = ""

    @property
    def gap_s(self) -> float:
        """Seconds by sequence that the GPU waits for the host after a step."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        old = found and tuple(map(int, found.groups())) < OVERLAPPING
        return GAP_S if old and self.framework == "vllm" else 0.0

    @property
    def is_blackwell(self) -> bool:
        return Generation.of(self.target.isa).is_blackwell

    @property
    def has_narrow_cache(self) -> bool:
        return self.decoder.cache_fp8 and self.products != "bf16"

    @property
    def mixes(self) -> bool:
        """Whether prompts share a step with tokens that are decoded: not in SGLang, unless asked to
        (--enable-mixed-chunk in its server arguments)."""
        return self.framework != "sglang"

    @property
    def attention_stack(self) -> str:
        """Whose attention, as `cost.sized.attention` names it."""
        if self.framework == "sglang":
            return "" if self.is_blackwell else "fa3"
        return "trtllm" if self.framework == "trtllm" else ""


class Part(NamedTuple):
    """`sequences` with `new` tokens each, which see `keys`: arrays of one length."""

    sequences: Floats
    new: Floats
    keys: Floats

    @property
    def tokens(self) -> Floats:
        return self.sequences * self.new

    @property
    def is_decode(self) -> bool:
        return bool(np.all(self.new == 1))


@dataclass(frozen=True)
class Step:
    """What one pass through the layers computes: prompts, tokens that are decoded, or both."""

    parts: tuple[Part, ...]

    @property
    def tokens(self) -> Floats:
        return np.sum([p.tokens for p in self.parts], axis=0)

    @property
    def sequences(self) -> Floats:
        return np.sum([p.sequences for p in self.parts], axis=0)


def launches(share: Share, d: Deployment, step: Step) -> Iterator[tuple[int, Work]]:
    """The kernels of a step, and how often each is launched."""
    layers = d.decoder.config["num_hidden_layers"]
    hidden, tokens = d.decoder.config["hidden_size"], step.tokens
    heads, kv_heads, head = share.head
    one = (1, step.sequences)
    yield 1, sized.gather(tokens, hidden, bf16, share.config["vocab_size"])
    yield 2 * layers, norm(tokens * hidden, residual=True)
    yield 1, norm(step.sequences * hidden, residual=True)
    for cells in share.norms:
        yield layers, norm(tokens * cells, residual=False)
    pairs = tokens * (heads + kv_heads) * head / 2
    yield layers, sized.pointwise(pairs, (bf16,) * 2, (bf16,) * 2, ops=8.0)
    for part in step.parts:
        for times, window in d.decoder.attention:
            for each in attention(share, d, part, window):
                yield times, each
    for p in share.products:
        times, rows = one if p.module == "lm_head" else (d.decoder.layers[p.layer], tokens)
        if p.module == EXPANDING:
            continue
        for each in product(p, d, rows):
            yield times, each
        if p.module.endswith("down_proj"):
            ops = LANE_OPS["silu"] + 1
            yield times, sized.pointwise(tokens * p.depth, (bf16,) * 2, (bf16,), ops=ops)
    if share.experts is not None:
        times, count = d.decoder.layers[-1], share.experts.experts.up.type.shape[0]
        yield times, sized.rows(tokens, count, f32, "softmax")
        yield times, mixture(share.experts, d, tokens)


def norm(cells: Number, *, residual: bool) -> Work:
    """A norm; of the sum of two, which is written too, with a `residual`. A row is read once."""
    both = (bf16,) * (1 + residual)
    return sized.pointwise(cells, both, both, ops=NORM_LANE_OPS)


def attention(share: Share, d: Deployment, part: Part, window: int) -> tuple[Work, ...]:
    heads, kv_heads, head = share.head
    if d.decoder.latent:
        return latent_attention(share, d, part)
    return (
        sized.attention(
            part.sequences,
            heads,
            part.new,
            part.keys,
            head,
            bf16,
            kv_heads=kv_heads,
            cache=f8e4m3 if d.has_narrow_cache else bf16,
            causal=True,
            window=window,
            append=True,
            library=d.attention_stack,
        ),
    )


def latent_attention(share: Share, d: Deployment, part: Part) -> tuple[Work, ...]:
    """Prompts expand keys and values of every head; tokens that are decoded are turned into the
    latent space, and what they find there back, a product a head each."""
    c, stack, latent = share.config, d.attention_stack, d.decoder.latent
    heads, rope = c["num_attention_heads"], c["qk_rope_head_dim"]
    key, value = c["qk_nope_head_dim"], c["v_head_dim"]
    if part.is_decode:
        into = sized.gemm(part.tokens, latent, key, bf16, b=heads)
        found = sized.attention(
            part.sequences,
            heads,
            part.new,
            part.keys,
            latent + rope,
            bf16,
            value=latent,
            kv_heads=1,
            causal=True,
            shared=True,
            append=stack != "fa3",
            library=stack,
        )
        return into, found, sized.gemm(part.tokens, value, latent, bf16, b=heads)
    expand = next(p for p in share.products if p.module == EXPANDING)
    found = sized.attention(
        part.sequences,
        heads,
        part.new,
        part.keys,
        key + rope,
        bf16,
        value=value,
        causal=True,
        append=(latent + rope) / (heads * (key + rope + value)),  # the latent alone
        library=stack,
    )
    return *product(expand, d, part.tokens), found


def product(p: Product, d: Deployment, rows: Floats) -> tuple[Work, ...]:
    """Routers and the head stay in 16 bits, and so does all of a model whose experts are packed."""
    plain = p.module in ("lm_head", "mlp.gate", "mlp.router") or d.decoder.experts
    plain = plain or (d.decoder.plain_attention and p.module.startswith("self_attn"))
    words = {"dtype": "bf16" if plain else d.products}
    words |= dict.fromkeys(("whole", "packs", "chain", "profiled", "given"), "no")
    size = np.ones(len(rows))
    return serving.launched(
        Shapes(words, {"m": rows, "n": p.n * size, "k": p.depth * size}, d.target)
    )


def mixture(op: k.Experts, d: Deployment, tokens: Floats) -> Work:
    mix = op.experts
    name = d.decoder.experts or d.experts
    dtype, weight = experts.EXPERTS[PACKED.get(name, (name, name))[d.is_blackwell]]
    return routing.mixture(
        tokens,
        mix.x.type.shape[1],
        mix.inter,
        mix.which.type.shape[1],
        mix.up.type.shape[0],
        dtype,
        weight=weight,
        shards=d.expert_tp,
        ranks=d.expert_ep,
        skew=SKEW,
        library=experts_of(d.framework, name, Generation.of(d.target.isa)),
        scales="block" if name == "fp8_block" else "",
    )


def held(share: Share, d: Deployment, tokens: Floats) -> Floats:
    """How many sequences of so many tokens the caches of all ranks have room for."""
    room = MEMORY_SHARE * d.target.dram_bytes - share.weight_bytes(d)
    return np.maximum(np.floor(room / share.cached_bytes(d, tokens)), 1.0)


def collectives_s(share: Share, d: Deployment, step: Step) -> Floats:
    """Seconds of all-reduces: of the embedding, after attention and feed-forward of each layer, and
    of two numbers a token where norms are over all heads (vLLM, MiniMaxText01RMSNormTP)."""
    if d.tp == 1:
        return 0.0 * step.tokens
    layers, hidden = (d.decoder.config[n] for n in ("num_hidden_layers", "hidden_size"))
    found = (2 * layers + 1) * all_reduce_s(d, step.tokens * hidden * 2)
    return found + share.over_heads * layers * all_reduce_s(d, step.tokens * 2 * 4)


def all_reduce_s(d: Deployment, nbytes: Floats) -> Floats:
    """In one shot a rank's links carry (n - 1) of the bytes; in two, 2 (n - 1) / n, as in a ring
    (Patarasuk and Yuan, JPDC 2009)."""
    assert d.target.link is not None
    carried = nbytes * (d.tp - 1) / d.target.link.bytes_per_s
    (one, one_share), (two, two_share) = ONE_SHOT, TWO_SHOTS
    return np.minimum(one + carried / one_share, two + 2 / d.tp * carried / two_share)
