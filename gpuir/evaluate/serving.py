"""Operators of inference servers, timed in CUDA graphs: the aiconfigurator tables.

No host time lies inside these measurements. A row is an operator as a framework runs it, which may
be several kernels. Source: github.com/ai-dynamo/aiconfigurator, collected tables, as normalised
with their README.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuir.cost import work
from gpuir.cost.work import Number, Work
from gpuir.evaluate.kinds import Kind, Shapes, Unmodelled
from gpuir.ir.types import DType, bf16, f4e2m1, f8e4m3, f16, f32, i4, i8

# The tables say `a100_sxm` and `a100_pcie` of the boards with 80 GB (systems.csv: 2039 and 1935
# GB/s); as targets those names are the older boards with 40 GB.
DEVICES = {"a100_sxm": "a100-sxm-80gb", "a100_pcie": "a100-pcie-80gb"}
STACK = ("framework", "version", "kernel_source", "split")

PLAIN: dict[str, DType] = {"bf16": bf16, "fp16": f16, "fp32": f32}
# Products of activations quantised on the fly: what the matrix units multiply.
QUANTISED: dict[str, DType] = {
    "fp8": f8e4m3,
    "fp8_block": f8e4m3,
    "fp8_static": f8e4m3,
    "nvfp4": f4e2m1,
    "int8": i8,
}
WEIGHT_ONLY: dict[str, DType] = {"int8_wo": i8, "int4_wo": i4}


def products(s: Shapes) -> tuple[Work, ...]:
    """out[m, n] = a[m, k] · w[n, k]ᵀ. Quantised ones begin by quantising `a`."""
    m, n, k = s["m"], s["n"], s["k"]
    match s.said["dtype"]:
        case name if name in PLAIN:
            return (work.gemm(m, n, k, PLAIN[name]),)
        case name if name in WEIGHT_ONLY:
            return (work.gemm(m, n, k, bf16, weight=WEIGHT_ONLY[name]),)
        case "int8_sq":
            return (work.gemm(m, n, k, i8, out=bf16),)
        case name if name in QUANTISED:
            narrow = QUANTISED[name]
            return (quantise(m, k, narrow), work.gemm(m, n, k, narrow, out=bf16))
        case name:
            raise Unmodelled(f"dtype {name} is none we know of products")


def quantise(m: Number, k: Number, narrow: DType) -> Work:
    """A scale for each row of a[m, k], and the row in `narrow`."""
    return work.rows(m, k, bf16, "norm", out=narrow)


def prefill(s: Shapes) -> tuple[Work, ...]:
    """Causal attention of whole prompts on themselves."""
    dtype, kv = _attention_dtypes(s.said)
    return (
        work.attention(
            s["batch"],
            s["q_heads"],
            s["isl"],
            s["isl"],
            s["head_dim"],
            dtype,
            kv_heads=s["kv_heads"],
            kv_dtype=kv,
            causal=True,
            window=s["window"],
            out=bf16,
        ),
    )


def decode(s: Shapes) -> tuple[Work, ...]:
    """One query a sequence on the keys in the cache and its own."""
    dtype, kv = _attention_dtypes(s.said)
    return (
        work.attention(
            s["batch"],
            s["q_heads"],
            1.0 + 0.0 * s["batch"],
            s["past_kv"] + 1,
            s["head_dim"],
            dtype,
            kv_heads=s["kv_heads"],
            kv_dtype=kv,
            causal=True,
            window=s["window"],
            out=bf16,
        ),
    )


def encoder(s: Shapes) -> tuple[Work, ...]:
    """Every query on every key of its sequence."""
    length, dtype = s["seq_len"], _of(PLAIN, s.said["attn_dtype"], "attention")
    heads = s["heads"]
    return (work.attention(s["batch"], heads, length, length, s["head_dim"], dtype),)


def _attention_dtypes(said: Mapping[str, str]) -> tuple[DType, DType]:
    names = {**PLAIN, "fp8": f8e4m3}
    return _of(names, said["attn_dtype"], "attention"), _of(names, said["kv_dtype"], "a cache")


def _of(names: Mapping[str, DType], name: str, what: str) -> DType:
    if name not in names:
        raise Unmodelled(f"dtype {name} is none we know of {what}")
    return names[name]


# DeepSeek-V2 (arXiv 2405.04434, section 2.1): 512 latent cells and 64 that carry the position; a
# head's query and key have 128 cells besides, its value 128.
LATENT, ROPE, HEAD = 512.0, 64.0, 128.0


def latent_attention(s: Shapes) -> tuple[Work, ...]:
    """Prefill with keys and values expanded to every head; decode on the latent, which all heads
    share and which is key and value at once."""
    dtype, kv = _attention_dtypes(s.said)
    batch, heads = s["batch"], s["heads"]
    if s.said["phase"] == "prefill":
        keys = s["isl"] + s["past_kv"]
        return (
            work.attention(
                batch, heads, s["isl"], keys, HEAD + ROPE, dtype, value=HEAD, causal=True, out=bf16
            ),
        )
    if s.said["phase"] == "decode":
        one = 1.0 + 0.0 * batch
        keys = s["past_kv"] + 1
        return (
            work.attention(
                batch,
                heads,
                one,
                keys,
                LATENT + ROPE,
                dtype,
                value=LATENT,
                kv_heads=one,
                kv_dtype=kv,
                out=bf16,
            ),
        )
    raise Unmodelled(f"phase {s.said['phase']} is neither prefill nor decode")


def absorbed(s: Shapes) -> tuple[Work, ...]:
    """The products a head that turn queries into the latent space, and results back."""
    n, k = (HEAD, LATENT) if s.said["op"].endswith("post") else (LATENT, HEAD)
    dtype = f8e4m3 if s.said["dtype"] == "fp8" else _of(PLAIN, s.said["dtype"], "products")
    tokens = s["tokens"]
    product = work.gemm(tokens, n + 0 * tokens, k + 0 * tokens, dtype, b=s["heads"], out=bf16)
    if dtype is f8e4m3:
        return (quantise(s["heads"] * tokens, k + 0 * tokens, dtype), product)
    return (product,)


def quantisation(s: Shapes) -> tuple[Work, ...]:
    if s.said["op"] != "static_quantize":
        raise Unmodelled(f"{s.said['op']} is a difference of two measurements, not a kernel")
    cells = s["m"] * s["k"]
    return (work.pointwise(cells, (bf16,), (f8e4m3,), ops=3.0),)


def experts(s: Shapes) -> tuple[Work, ...]:
    raise Unmodelled("grouped products are not modelled yet")


def state_space(s: Shapes) -> tuple[Work, ...]:
    raise Unmodelled("linear attention is not modelled yet")


def connections(s: Shapes) -> tuple[Work, ...]:
    raise Unmodelled("hyper-connections are not modelled yet")


def _dtype(said: Mapping[str, str]) -> str:
    return said["dtype"]


def _attention_dtype(said: Mapping[str, str]) -> str:
    """`bf16`, or `bf16/fp8` where the cache holds another dtype than the arithmetic's."""
    own, kv = said["attn_dtype"], said.get("kv_dtype", "")
    return own if kv in ("", own) else f"{own}/{kv}"


_HEADS = ("batch", "q_heads", "kv_heads", "head_dim", "window")
_ATTENTION = ("attn_dtype", "kv_dtype")
_STATES = (
    *("batch_size", "seq_len", "num_tokens", "d_model", "d_conv", "num_k_heads", "head_k_dim"),
    *("num_v_heads", "head_v_dim", "d_state", "nheads", "head_dim", "n_groups", "chunk_size"),
)

KINDS = (
    Kind(
        name="products",
        key=("system", "dtype", "m", "n", "k"),
        words=("dtype",),
        shape=("m", "n", "k"),
        works=products,
        op=lambda _: "gemm",
        dtype=_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="attention, prefill",
        key=("system", *_ATTENTION, *_HEADS, "isl"),
        words=_ATTENTION,
        shape=(*_HEADS, "isl"),
        works=prefill,
        op=lambda _: "attention_prefill",
        dtype=_attention_dtype,
        beside=(*STACK, "compute_dtype"),
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="attention, decode",
        key=("system", *_ATTENTION, *_HEADS, "past_kv"),
        words=_ATTENTION,
        shape=(*_HEADS, "past_kv"),
        works=decode,
        op=lambda _: "attention_decode",
        dtype=_attention_dtype,
        beside=(*STACK, "compute_dtype"),
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="attention, encoder",
        key=("system", "attn_dtype", "batch", "seq_len", "heads", "head_dim"),
        words=("attn_dtype",),
        shape=("batch", "seq_len", "heads", "head_dim"),
        works=encoder,
        op=lambda _: "attention_encoder",
        dtype=_attention_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="latent attention",
        key=("system", *_ATTENTION, "phase", "heads", "batch", "isl", "past_kv"),
        words=(*_ATTENTION, "phase"),
        shape=("heads", "batch", "isl", "past_kv"),
        works=latent_attention,
        op=lambda said: f"mla_{said['phase']}",
        dtype=_attention_dtype,
        beside=(*STACK, "tp"),
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="latent attention, products",
        key=("system", "op", "dtype", "tokens", "heads"),
        words=("op", "dtype"),
        shape=("tokens", "heads"),
        works=absorbed,
        op=lambda said: said["op"],
        dtype=_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="experts",
        key=(
            *("system", "dtype", "distribution", "tokens", "hidden", "inter", "topk", "experts"),
            *("tp", "ep"),
        ),
        words=("dtype", "distribution", "gated"),
        shape=("tokens", "hidden", "inter", "topk", "experts", "tp", "ep"),
        works=experts,
        op=lambda _: "moe",
        dtype=_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="quantisation",
        key=("system", "op", "dtype", "m", "k"),
        words=("op", "dtype"),
        shape=("m", "k"),
        works=quantisation,
        op=lambda said: said["op"],
        dtype=_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="linear attention",
        key=("system", "family", "phase", *_STATES),
        words=("family", "phase", "kernel_source"),
        shape=_STATES,
        works=state_space,
        op=lambda said: f"{said['family']}_{said['phase']}",
        dtype=lambda _: "bf16",
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
    Kind(
        name="hyper-connections",
        key=("system", "op", "tokens", "hidden", "hc_mult", "sinkhorn_iters"),
        words=("op",),
        shape=("tokens", "hidden", "hc_mult", "num_sites", "sinkhorn_iters"),
        works=connections,
        op=lambda said: f"mhc_{said['op']}",
        dtype=lambda _: "bf16",
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
)
