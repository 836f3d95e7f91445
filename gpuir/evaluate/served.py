"""A step of a language model as an inference server runs it: the launches of one rank.

The products, experts and norms are those of the graph that transformers builds from the config, one
rank's share of it. Servers launch fewer kernels than transformers, and this says which: products
of one input as one product, weights in the deployment's dtype, the rotation as one kernel, residual
additions within norms, attention that writes its cache, routing as one kernel (vLLM, SGLang and
TensorRT-LLM: the layers of their Llama, Qwen3, MiniMax and gpt-oss models).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gpuir.cost import grouped, work
from gpuir.cost.sheet import Number
from gpuir.cost.work import Operand, Work
from gpuir.evaluate import experts, serving
from gpuir.evaluate.columns import Floats
from gpuir.evaluate.kinds import Shapes
from gpuir.evaluate.steps import PLACE
from gpuir.ir.graph import Graph
from gpuir.ir.types import bf16, f8e4m3, f32
from gpuir.ops import kernel as k
from gpuir.targets.load import read_spec, spec_folder
from gpuir.targets.target import Target

# A Hugging Face config, tokens → the kernels of a prompt of so many tokens, one sequence.
Build = Callable[[Mapping[str, Any], int], Graph]
TOKENS = 256  # of the graph: any number that is more than a window of attention

# Collectives in two terms, the time of the smallest and bytes over a share of the links: medians of
# all_reduce in CUDA graphs on A100, H100, H200 and B200 (aiconfigurator's collectives, 16 KiB and
# below: 4 to 7 us; 64 MiB and above: 0.56 to 0.91 of the links), within 9 to 25 % of their rows.
ALL_REDUCE_S = 5e-6
LINK_SHARE = 0.7

# Whose kernel the experts are on Hopper, and on Blackwell: sources named by the newest version of
# each framework in aiconfigurator's tables of experts.
EXPERTS: dict[tuple[str, str], tuple[str, str]] = {
    ("trtllm", "fp8_block"): ("moe_torch_flow_cutlass", "deepgemm"),
    ("sglang", "fp8_block"): ("sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"),
    ("sglang", "bf16"): ("sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"),
    ("vllm", "bf16"): ("vllm_fused_moe", "vllm_flashinfer_trtllm"),
    ("vllm", "fp8_block"): ("vllm_fused_moe", "vllm_flashinfer_trtllm"),
    ("vllm", "mxfp4"): ("vllm_oaitriton", "vllm_flashinfer_trtllm"),
}
PACKED = {"mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8")}  # on Hopper, and on Blackwell


@dataclass(frozen=True, eq=False)
class Decoder:
    """A language model: its config, and what its checkpoints are stored in (specs/decoders.toml)."""

    name: str
    source: str
    config: Mapping[str, Any]
    fp8: str = "fp8"
    experts: str = ""
    cache_fp8: bool = False

    def divided(self, ranks: int) -> dict[str, Any]:
        """One layer of a rank's share: heads, feed-forward and vocabulary divided as Megatron does
        (arXiv 1909.08053, section 3), experts whole. ValueError where heads do not divide."""
        c = dict(self.config)
        if c["num_attention_heads"] % ranks:
            raise ValueError(f"{c['num_attention_heads']} heads on {ranks} ranks")
        c["num_attention_heads"] //= ranks
        c["num_key_value_heads"] = max(c["num_key_value_heads"] // ranks, 1)
        c["vocab_size"] = -(-c["vocab_size"] // ranks)
        if "num_experts_per_tok" not in c:
            c["intermediate_size"] //= ranks
        return {**c, "num_hidden_layers": 1}

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
    """Columns and depth of the weights that one input is multiplied by."""

    module: str
    n: int
    depth: int


@dataclass(frozen=True)
class Share:
    """What a rank has of a layer: its products, those of one input as one; the experts; the cells
    and rows a token of the norms within attention."""

    config: Mapping[str, Any]
    products: tuple[Product, ...]
    experts: k.Experts | None
    norms: tuple[tuple[int, int], ...]

    @staticmethod
    def of(build: Build, config: Mapping[str, Any]) -> Share:
        graph = build(config, TOKENS)
        products: dict[Any, Product] = {}
        mix: k.Experts | None = None
        norms: dict[str, tuple[int, int]] = {}
        for node in graph.nodes:
            found = PLACE.match(str(node.locs[0])) if node.locs else None
            module = found["module"] if found else ""
            match node.op:
                case k.Gemm(a=a, b=b) if module.count(".") or module == "lm_head":
                    depth, n = b.type.shape[-2:]
                    before = products.get(a, Product(module, 0, depth))
                    products[a] = before._replace(n=before.n + n)
                case k.Experts():
                    mix = node.op
                case k.Reduce() if module in ("self_attn.q_norm", "self_attn.k_norm"):
                    rows, cells = node.op.space().dims.values()
                    norms.setdefault(module, (rows // TOKENS, cells))
                case _:
                    pass
        return Share(config, tuple(products.values()), mix, tuple(norms.values()))

    @property
    def head(self) -> tuple[int, int, int]:
        """Heads, those of keys and values, and cells of each."""
        c = self.config
        return c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]


@dataclass(frozen=True)
class Deployment:
    """A model on ranks of one kind, under a framework: `tp` ranks share each layer, experts are cut
    in `expert_tp` and spread over `expert_ep`. `products` and `experts` are their dtypes."""

    decoder: Decoder
    target: Target
    framework: str
    products: str
    experts: str
    tp: int
    expert_tp: int = 1
    expert_ep: int = 1

    @property
    def is_blackwell(self) -> bool:
        return self.target.isa.startswith("sm_10")

    @cached_property
    def is_quantised(self) -> bool:
        return self.products != "bf16"

    @property
    def attention_stack(self) -> str:
        """Whose attention, as `cost.work.attention` names it."""
        if self.framework == "sglang":
            return "" if self.is_blackwell else "fa3"
        return "trtllm" if self.framework == "trtllm" else ""


@dataclass(frozen=True)
class Step:
    """`sequences` with `new` tokens each, which see `keys`: arrays of one length."""

    sequences: Floats
    new: Floats
    keys: Floats

    @property
    def tokens(self) -> Floats:
        return self.sequences * self.new


def launches(share: Share, d: Deployment, step: Step) -> Iterator[tuple[int, Work]]:
    """The kernels of a step, and how often each is launched."""
    layers = d.decoder.config["num_hidden_layers"]
    hidden, tokens = d.decoder.config["hidden_size"], step.tokens
    heads, kv_heads, head = share.head
    one = (1, step.sequences)
    yield 1, work.gather(tokens, hidden, bf16, share.config["vocab_size"])
    yield 2 * layers, residual_norm(tokens, hidden)
    yield 1, residual_norm(step.sequences, hidden)
    for rows, cells in share.norms:
        yield layers, work.rows(tokens * rows, cells, bf16, "rms", parameters=1)
    pairs = tokens * (heads + kv_heads) * head / 2
    yield layers, work.pointwise(pairs, (bf16,) * 2, (bf16,) * 2, ops=8.0, kind="scalar")
    for times, window in d.decoder.attention:
        yield times, attention(share, d, step, window)
    for p in share.products:
        times, rows = one if p.module == "lm_head" else (layers, tokens)
        for each in product(p, d, rows):
            yield times, each
    if share.experts is not None:
        count = share.experts.experts.up.type.shape[0]
        yield layers, work.rows(tokens, count, f32, "softmax")
        yield layers, mixture(share.experts, d, tokens)
    else:
        cells = tokens * next(p.depth for p in share.products if p.module.startswith("mlp.down"))
        ops = work.LANE_OPS["silu"] + 1
        yield layers, work.pointwise(cells, (bf16,) * 2, (bf16,), ops=ops, kind="scalar")


def residual_norm(tokens: Number, hidden: int) -> Work:
    """A norm of the sum of two, which is written too."""
    norm = work.rows(tokens, hidden, bf16, "rms", parameters=1)
    nbytes = tokens * hidden * 2.0
    other = Operand(("o", "r"), 2.0, nbytes, "streamed"), Operand(("o", "r"), 2.0, nbytes, "written")
    return replace(norm, operands=(norm.operands[0], other[0], *norm.operands[1:], other[1]))


def attention(share: Share, d: Deployment, step: Step, window: int) -> Work:
    heads, kv_heads, head = share.head
    narrow = d.is_quantised and d.decoder.cache_fp8
    return work.attention(
        step.sequences,
        heads,
        step.new,
        step.keys,
        head,
        bf16,
        kv_heads=kv_heads,
        kv_dtype=f8e4m3 if narrow else bf16,
        causal=True,
        window=window,
        append=True,
        stack=d.attention_stack,
    )


def product(p: Product, d: Deployment, rows: Floats) -> tuple[Work, ...]:
    """Routers and the head stay in 16 bits, and so do layers of models with experts alone packed."""
    plain = p.module in ("lm_head", "mlp.gate", "mlp.router") or d.decoder.experts
    said = {"dtype": "bf16" if plain else d.products, "whole": "no", "packs": "no"}
    size = np.ones(len(rows))
    return serving.products(
        Shapes(said, {"m": rows, "n": p.n * size, "k": p.depth * size}, d.target)
    )


def mixture(op: k.Experts, d: Deployment, tokens: Floats) -> Work:
    mix = op.experts
    name = d.decoder.experts or d.experts
    sources = EXPERTS.get((d.framework, name))
    dtype, weight = experts.EXPERTS[PACKED.get(name, (name, name))[d.is_blackwell]]
    return work.experts(
        tokens,
        mix.x.type.shape[1],
        mix.inter,
        mix.which.type.shape[1],
        mix.up.type.shape[0],
        dtype,
        weight=weight,
        shards=d.expert_tp,
        ranks=d.expert_ep,
        stack=grouped.stack_of(sources[d.is_blackwell] if sources else ""),
        block=name == "fp8_block",
    )


def collectives_s(d: Deployment, step: Step) -> Floats:
    """Seconds of all-reduces: of the embedding, and after attention and feed-forward of each layer.

    A ring moves 2 (n - 1) / n of the bytes over each rank's links (Patarasuk and Yuan, JPDC 2009).
    """
    if d.tp == 1:
        return 0.0 * step.tokens
    nbytes = step.tokens * d.decoder.config["hidden_size"] * 2
    assert d.target.link is not None
    rate = LINK_SHARE * d.target.link.bytes_per_s
    each = ALL_REDUCE_S + nbytes * 2 * (d.tp - 1) / d.tp / rate
    return (2 * d.decoder.config["num_hidden_layers"] + 1) * each
