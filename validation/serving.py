"""Operators of inference servers, timed in CUDA graphs: the aiconfigurator tables.

No host time lies inside these measurements. A row is an operator as a framework runs it, which may
be several kernels. Source: github.com/ai-dynamo/aiconfigurator, collected tables, as normalised
with their README.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpuir.cost import sized
from gpuir.cost.nest import has_clusters
from gpuir.cost.sheet import Number
from gpuir.cost.work import Timed, Work
from gpuir.fit.columns import Columns, WordColumn
from gpuir.fit.readers import Reader, Shapes, Unmodelled
from gpuir.fit.tables import target_of
from gpuir.ir.types import DType, bf16, f4e2m1, f8e4m3, f16, f32, i4, i8

# The tables say `a100_sxm` and `a100_pcie` of the boards with 80 GB (systems.csv: 2039 and 1935
# GB/s); as targets those names are the older boards with 40 GB. What is published of a GB300 is a
# B300 with faster memory and more power.
DEVICES = {
    "a100_sxm": "a100-sxm-80gb",
    "a100_pcie": "a100-pcie-80gb",
    "gb300": "b300-sxm-288gb+dram.bytes_per_s=8e12+tdp_w=1400",
    "pipeweave_h20": "h20-sxm-96gb",
    "pipeweave_h800": "h800-sxm-80gb",
}
STACK = ("framework", "version", "kernel_source", "split")

PLAIN: dict[str, DType] = {"bf16": bf16, "fp16": f16, "fp32": f32}
WEIGHT_ONLY: dict[str, DType] = {"int8_wo": i8, "int4_wo": i4}


def products(s: Shapes) -> tuple[Work, ...]:
    """out[m, n] = a[m, k] · w[n, k]ᵀ, timed as `_timed` says. Quantised ones begin by quantising
    `a`, unless they were timed without: a scale for each row of it in one kernel, for all of it in
    five (TensorRT-LLM), one that was given (vLLM), or for each group of a row; SGLang packs the
    groups' scales for Blackwell, some 6 us longer at the smallest rows: three kernels."""
    *before, product = launched(s)
    timed = _timed(s, product)
    return (*(() if s.words["alone"] == "yes" else before), replace(product, detail=timed))


PADDED = 128.0  # rows that PipeWeave's fp8 products compute at the least (README of the tables)


def launched(s: Shapes) -> tuple[Work, ...]:
    """What a product launches, timed or not."""
    m, n, k, name = s["m"], s["n"], s["k"], s.words["dtype"]
    if name in PLAIN:
        return (sized.gemm(m, n, k, PLAIN[name]),)
    if name in WEIGHT_ONLY:
        return (replace(sized.gemm(m, n, k, f16, weight=WEIGHT_ONLY[name]), kind="plugin"),)
    match name:
        case "fp8" | "fp8_static" if s.words["whole"] == "yes":
            return (
                sized.rows(m, k, bf16, "sum"),
                *[sized.pointwise(one(m), (f32,), (f32,))] * 3,
                quantised(m * k, f8e4m3, 3.0),
                sized.gemm(m, n, k, f8e4m3, out=bf16),
            )
        case "fp8" if s.words["profiled"] == "yes":
            padded = sized.gemm(np.maximum(m, PADDED), n, k, f8e4m3, out=bf16)
            return (replace(padded, kind="row scales"),)
        case "fp8" | "fp8_static" | "int8":
            narrow = i8 if name == "int8" else f8e4m3
            quantise = (quantised(m * k, narrow, 3.0 if s.words["given"] == "yes" else 6.0),)
            return (
                *(_quantised_by_operators(m, k) if s.words["chain"] == "yes" else quantise),
                replace(sized.gemm(m, n, k, narrow, out=bf16), kind="row scales"),
            )
        case "fp8_block":
            product = replace(sized.gemm(m, n, k, f8e4m3, out=bf16), kind="block scales")
            packing = s.words["packs"] == "yes" and s.target.isa.startswith("sm_10")
            small = sized.pointwise(one(m), (f32,), (f32,))
            return (*[small] * (3 if packing else 0), quantised(m * k, f8e4m3, 4.0), product)
        case "nvfp4":
            product = sized.gemm(m, n, k, f4e2m1, out=bf16)
            return (quantised(m * k, f4e2m1, 8.0), replace(product, kind="block scales"))
        case "int8_sq":
            return (replace(sized.gemm(m, n, k, i8, out=f16), kind="plugin"),)
        case "w4a16_mxfp4":
            return (sized.gemm(m, n, k, bf16, weight=f4e2m1),)
        case "w4a8_mxfp4_mxfp8":
            product = sized.gemm(m, n, k, f8e4m3, weight=f4e2m1, out=bf16)
            return (quantised(m * k, f8e4m3, 4.0), replace(product, kind="block scales"))
        case _:
            raise Unmodelled(f"dtype {name} is none we know of products")


def _quantised_by_operators(m: Number, k: Number) -> tuple[Work, ...]:
    """What PyTorch launches for a scale a row, written in its operators as SGLang's collector does
    for int8 (ai-dynamo/aiconfigurator, collector/sglang/collect_gemm.py at 0.5.6):
    `x = x.float(); s = x.abs().max(-1).clamp(1e-10) / 127; (x / s).round().clamp().to(int8)`."""
    cells = m * k
    same, small = (sized.pointwise(n, (f32,), (f32,)) for n in (cells, m))
    return (
        sized.pointwise(cells, (bf16,), (f32,)),
        same,
        sized.rows(m, k, f32, "sum"),
        small,
        small,
        sized.pointwise(cells, (f32,), (f32,), ops=8.0),
        same,
        same,
        sized.pointwise(cells, (f32,), (i8,)),
    )


# How collectors time products (ai-dynamo/aiconfigurator, collector/*/collect_gemm.py, helper.py):
# 3 warm-up runs, 3 and 6 of a graph, of copies of the layer that take turns. TensorRT-LLM's
# plug-ins (collect_gemm_trt.py) run twice, in an engine behind a layer of 12288 x 12288 in f16.
RUNS, PLUGIN_RUNS = 12, 2
MOST_COPIES = 5
PLUGIN_BETWEEN = 2 * 12288.0**2


def _timed(s: Shapes, work: Work) -> Timed:
    """How often a product ran, and what passed between two readings of its weight."""
    weight = work.operands[1].nbytes
    match s.words["copies"]:
        case "fill":  # TensorRT-LLM from 1.3: as many as the L2 holds, and a part of one
            copies = np.clip(np.ceil(s.target.l2_bytes / weight), 1, MOST_COPIES)
        case "engine":
            return Timed(PLUGIN_BETWEEN + 0.0 * weight, PLUGIN_RUNS + 0.0 * weight)
        case count:
            copies = float(count) + 0.0 * weight
    return Timed((copies - 1) * weight, RUNS * copies, s.words["blank"] == "yes")


def _collected(columns: Columns) -> Columns:
    """How activations are quantised: whether one scale is found for the whole of one, one is given,
    or the product was timed alone; how many copies of a layer took turns, and whether nothing was
    ever written to their weights (`_timed` has the source). PipeWeave's are kernels alone, of which
    no copies are told: one. Rough are stacks whose smallest rows take two to four times those of
    others, as if timed eagerly or made of many kernels."""
    dtype, framework = columns.words("dtype"), columns.words("framework")
    version, fp8 = columns.words("version"), dtype.where("fp8", "fp8_static")
    trtllm, vllm, sglang = (framework.where(n) for n in ("trtllm", "vllm", "sglang"))
    kernels = framework.where("unlabelled")
    odd = vllm & dtype.where("fp8_block")
    odd |= (sglang & dtype.where("int8")) | (vllm & version.where("0.14.0") & fp8)
    plugin = trtllm & dtype.where("int8_wo", "int4_wo", "int8_sq")
    old, single = version.where("1.0.0", "1.2.0rc5"), version.where("0.5.6.post2")
    codes = np.where(trtllm, np.where(plugin, 4, np.where(old, 1, 3)), 2)
    codes = np.where(kernels | (vllm & dtype.where("fp8_block", "nvfp4")) | single, 0, codes)
    cells = {
        "whole": WordColumn.yes_or_no(trtllm & fp8),
        "given": WordColumn.yes_or_no(vllm & fp8),
        "alone": WordColumn.yes_or_no(sglang & dtype.where("fp8_static")),
        "packs": WordColumn.yes_or_no(sglang & dtype.where("fp8_block")),
        "chain": WordColumn.yes_or_no(sglang & dtype.where("int8")),
        "copies": WordColumn(codes.astype(np.int64), ("1", "5", "6", "fill", "engine")),
        "blank": WordColumn.yes_or_no(vllm & dtype.where("bf16", "fp8")),
        "profiled": WordColumn.yes_or_no(kernels),
        "rough": WordColumn.yes_or_no(odd | kernels),
    }
    return columns.with_cells(cells)


def quantised(cells: Number, narrow: DType, ops: float) -> Work:
    return sized.pointwise(cells, (bf16,), (narrow,), ops=ops, kind="quantise")


def one(like: Number) -> Number:
    return 1.0 + 0.0 * like


def prefill(s: Shapes) -> tuple[Work, ...]:
    """Causal attention of whole prompts on themselves, quantised before where `narrows`. SGLang's
    kernel in Triton reads new keys as they come, not out of the cache (extend_attention.py)."""
    cells = s["batch"] * s["isl"] * s["head_dim"]
    keys = quantised(cells * s["kv_heads"], f8e4m3, 3.0)
    narrowed = (quantised(cells * s["q_heads"], f8e4m3, 3.0), keys, keys)
    fresh = s.words["stack"] == "triton"
    own = _attention(s, queries=s["isl"], keys=s["isl"], fresh=fresh)
    return (*narrowed, own) if s.words["narrows"] == "yes" else (own,)


def decode(s: Shapes) -> tuple[Work, ...]:
    """One query a sequence on the keys in the cache and its own."""
    return (_attention(s, queries=one(s["batch"]), keys=s["past_kv"] + 1),)


def _attention(s: Shapes, queries: Number, keys: Number, fresh: bool = False) -> Work:
    dtype, kv = _attention_dtypes(s.words)
    return sized.attention(
        s["batch"],
        s["q_heads"],
        queries,
        keys,
        s["head_dim"],
        dtype,
        kv_heads=s["kv_heads"],
        cache=dtype if fresh else kv,
        causal=True,
        window=s["window"],
        out=bf16,
        append=s.words["append"] == "yes",
        paged=True,
        library=s.words["stack"],
    )


def encoder(s: Shapes) -> tuple[Work, ...]:
    """Every query on every key of its sequence."""
    length, dtype = s["seq_len"], dtype_of(PLAIN, s.words["attn_dtype"], "attention")
    return (
        sized.attention(
            s["batch"], s["heads"], length, length, s["head_dim"], dtype, library=s.words["stack"]
        ),
    )


def _libraries(columns: Columns) -> Columns:
    """Whose kernels ran, from their source, where it matters: those in Triton, of SGLang or vLLM;
    TensorRT-LLM's; FlashInfer's own; FlashAttention-3's in SGLang's hands, which has them on older
    GPUs too; or others' in the manner of FlashAttention. And whether the call also writes its keys
    to a cache, which vLLM's did as a kernel apart up to 0.22, and SGLang's `fa3`, `triton` and
    FlashInfer's own kernels seem to, the latter two where the cache has the operands' dtype (their
    smallest rows take no longer than those).
    SGLang 0.5.14 quantises queries, keys and values for Blackwell's fp8 kernels in the
    call: its smallest rows take 6 us longer than those of 0.5.9.

    Nothing should be fitted to TensorRT-LLM 1.3.0rc10, which reads the cache again for each head;
    and where a cache is narrower than the operands, as the tables do not say in which of the two
    the kernel computes."""
    source, version = columns.words("kernel_source"), columns.words("version")
    own = source.where("flashinfer") & columns.words("system").mapped(_has_own).where("yes")
    own |= source.where("vllm_flashinfer_fidecode", "vllm_flashinfer_fiprefill")
    own |= source.where("vllm_flashinfer") & version.where("0.14.0")
    apart = source.where("vllm_flash_attn", "vllm_flashinfer", "fa3") & ~version.where("0.14.0")
    library, odd = source.mapped(_library), version.where("1.3.0rc10")
    library = WordColumn(
        np.where(own, len(library.names), library.codes), (*library.names, "flashinfer")
    )
    if "compute_dtype" in columns.cells:
        ambiguous = columns.words("compute_dtype").where("ambiguous")
        odd |= ambiguous
        apart |= (own | source.where("triton")) & ~ambiguous
    narrows = source.where("trtllm_mha") & version.where("0.5.14")
    narrows &= columns.words("attn_dtype").where("fp8")
    cells = {
        "stack": library,
        "append": WordColumn.yes_or_no(~apart),
        "narrows": WordColumn.yes_or_no(narrows),
        "rough": WordColumn.yes_or_no(odd),
    }
    return columns.with_cells(cells)


def _has_own(system: str) -> str:
    """Whether FlashInfer's kernels of a GPU are its own: `yes` before sm_90."""
    target = target_of(DEVICES.get(system, system))
    return "no" if target is None or has_clusters(target) else "yes"


def _encoders(columns: Columns) -> Columns:
    """As of other attention. Rows of the older releases, nothing to fit to, take up to six times
    those of all others from a thousand tokens on."""
    older = columns.words("version").where("0.5.10", "0.19.0", "1.3.0rc10")
    return _libraries(columns).with_cells({"rough": WordColumn.yes_or_no(older)})


def _library(source: str) -> str:
    if "triton" in source:
        return "unified" if source == "vllm_triton_attn" else "triton"
    if source in ("fa3", "flash_attention"):
        return "fa3"
    return "trtllm" if source in ("default", "torch_flow", "torch_flow_flashinfer") else ""


def _attention_dtypes(words: Mapping[str, str]) -> tuple[DType, DType]:
    names = {**PLAIN, "fp8": f8e4m3}
    return dtype_of(names, words["attn_dtype"], "attention"), dtype_of(
        names, words["kv_dtype"], "a cache"
    )


def dtype_of(names: Mapping[str, DType], name: str, what: str) -> DType:
    if name not in names:
        raise Unmodelled(f"dtype {name} is none we know of {what}")
    return names[name]


# DeepSeek-V2 (arXiv 2405.04434, section 2.1): 512 latent cells and 64 that carry the position; a
# head's query and key have 128 cells besides, its value 128.
LATENT, ROPE, HEAD = 512.0, 64.0, 128.0
# Lane instructions to widen a cell of 8 bits in PyTorch, whose copies between dtypes ask for both
# cell by cell (`unrolled_elementwise_kernel`): by hand on H100; H200 takes as long.
WIDENING_OPS = 80.0


def _latent(columns: Columns) -> Columns:
    """Whether a prompt is computed on the latent, as SGLang's kernels do, and what becomes of a
    cache in 8 bits: SGLang widens all of it for FlashAttention-3 (flashattention_backend.py), and
    TensorRT-LLM 1.0.0 stored it in 16 on A100 and L40S (rows of both dtypes take the same time).

    Nothing should be fitted to vLLM's rows, which are more than the attention: of tens of
    microseconds at the least; to those of TensorRT-LLM 1.0.0 on caches, whose kernels are none of
    later versions'; and where the cache is narrower than the operands (see `_libraries`)."""
    absorbed = columns.words("kernel_source").where("flash_attention")
    narrow = columns.words("kv_dtype").where("fp8")
    stored = columns.words("version").where("1.0.0")
    odd = columns.words("framework").where("vllm") | narrow
    odd |= stored & columns.words("phase").where("decode")
    cells = {
        "absorbed": WordColumn.yes_or_no(absorbed),
        "widened": WordColumn.yes_or_no(absorbed & narrow),
        "wide": WordColumn.yes_or_no(stored & narrow),
        "vllm": WordColumn.yes_or_no(columns.words("framework").where("vllm")),
        "padded": WordColumn.yes_or_no(columns.words("kernel_source").where("vllm_triton_mla")),
        "rough": WordColumn.yes_or_no(odd),
    }
    return _libraries(columns).with_cells(cells)


def latent_attention(s: Shapes) -> tuple[Work, ...]:
    """Prefill with keys and values expanded to every head; decode on the latent, which all heads
    share and which is key and value at once. Decoding writes the cache in the same call but by
    FlashAttention-3 (its smallest rows take no longer than those of `fa3`)."""
    dtype, kv = _attention_dtypes(s.words)
    batch, heads = s["batch"], s["heads"]
    kv = dtype if "yes" in (s.words["wide"], s.words["widened"]) else kv
    if s.words["phase"] == "prefill" and s.words["absorbed"] == "no":
        keys = s["isl"] + s["past_kv"]
        return (
            *_expanded(s, batch * keys * heads),
            sized.attention(
                batch,
                heads,
                s["isl"],
                keys,
                HEAD + ROPE,
                dtype,
                value=HEAD + ROPE if s.words["padded"] == "yes" else HEAD,
                causal=True,
                out=bf16,
                append=(LATENT + ROPE) / (heads * (2 * HEAD + ROPE)),  # the latent alone
                library="" if s.words["padded"] == "yes" else s.words["stack"],
            ),
        )
    if s.words["phase"] in ("prefill", "decode"):
        queries = s["isl"] if s.words["phase"] == "prefill" else one(batch)
        keys = s["past_kv"] + queries
        cells = batch * keys * (LATENT + ROPE)
        cast = sized.pointwise(cells, (f8e4m3,), (bf16,), ops=WIDENING_OPS)
        return (
            *([cast] if s.words["widened"] == "yes" else ()),
            sized.attention(
                batch,
                heads,
                queries,
                keys,
                LATENT + ROPE,
                dtype,
                value=LATENT,
                kv_heads=one(batch),
                cache=kv,
                causal=True,
                out=bf16,
                shared=True,
                append=s.words["phase"] == "prefill" or s.words["stack"] != "fa3",
                library=s.words["stack"],
            ),
        )
    raise Unmodelled(f"phase {s.words['phase']} is neither prefill nor decode")


def _expanded(s: Shapes, rows: Number) -> tuple[Work, ...]:
    """What vLLM launches around a prompt's attention (mla/common.py), by `rows` of all heads: the
    product that expands the latent, keys joined to their positions; and where FlashAttention-2
    takes values as wide as keys alone, values padded and results cut."""
    if s.words["vllm"] == "no":
        return ()
    both, wide = 2 * HEAD, HEAD + ROPE
    product = sized.gemm(rows / s["heads"], s["heads"] * both, LATENT, bf16)
    joined, cut = (
        sized.pointwise(rows * cells, (bf16,), (bf16,), kind="copy") for cells in (wide, HEAD)
    )
    padding = (joined, cut) if s.words["padded"] == "yes" else ()
    return (product, joined, *padding)


def _quantised_heads(columns: Columns) -> Columns:
    """Which products quantise what they are given."""
    quantised = columns.words("dtype").where("fp8")
    for source in columns.words("kernel_source").names:
        if "dequant" in source:
            quantised &= ~columns.words("kernel_source").where(source)
    return columns.with_cells({"rough": WordColumn.yes_or_no(quantised)})


def absorbed(s: Shapes) -> tuple[Work, ...]:
    """The products a head that turn queries into the latent space, and results back. In fp8 the
    activation is quantised first, and the latent side passes through f32, strided and slowly (some
    ten bytes a cell, by the rows themselves); TensorRT-LLM's run in bf16 on Blackwell."""
    n, k = (HEAD, LATENT) if s.words["op"].endswith("post") else (LATENT, HEAD)
    tokens, heads = s["tokens"], s["heads"]
    if s.words["dtype"] != "fp8" or s.words["rough"] == "no":
        dtype = bf16 if s.words["dtype"] == "fp8" else dtype_of(PLAIN, s.words["dtype"], "products")
        return (sized.gemm(tokens, n, k, dtype, b=heads),)
    return (
        quantised(heads * tokens * k, f8e4m3, 4.0),
        sized.pointwise(heads * tokens * LATENT, (bf16, f32), (f32,)),
        sized.gemm(tokens, n, k, f8e4m3, b=heads, out=bf16),
    )


def _composed(columns: Columns) -> Columns:
    """SGLang's rows are a chain of PyTorch operators."""
    chain = columns.words("framework").where("sglang")
    return columns.with_cells(
        {"chain": WordColumn.yes_or_no(chain), "rough": WordColumn.yes_or_no(chain)}
    )


def quantisation(s: Shapes) -> tuple[Work, ...]:
    if s.words["op"] != "static_quantize":
        raise Unmodelled(f"{s.words['op']} is a difference of two measurements, not a kernel")
    narrow = {"fp8": f8e4m3, "fp8_block": f8e4m3, "nvfp4": f4e2m1, "int8": i8}
    cells, dtype = s["m"] * s["k"], dtype_of(narrow, s.words["dtype"], "quantisation")
    if s.words["chain"] == "yes":  # x / scale in f32, clamp, to(narrow), copy_
        return (
            sized.pointwise(cells, (bf16,), (f32,), ops=8.0),
            sized.pointwise(cells, (f32,), (f32,), ops=2.0),
            sized.pointwise(cells, (f32,), (dtype,)),
            sized.pointwise(cells, (dtype,), (dtype,)),
        )
    return (quantised(cells, dtype, 3.0),)


def _dtype(words: Mapping[str, str]) -> str:
    return words["dtype"]


def _attention_dtype(words: Mapping[str, str]) -> str:
    """`bf16`, or `bf16/fp8` where the cache holds another dtype than the arithmetic's."""
    own, kv = words["attn_dtype"], words.get("kv_dtype", "")
    return own if kv in ("", own) else f"{own}/{kv}"


_HEADS = ("batch", "q_heads", "kv_heads", "head_dim", "window")
_ATTENTION = ("attn_dtype", "kv_dtype")
READERS = (
    Reader(
        name="products",
        key=("system", "dtype", "m", "n", "k"),
        words=(
            *("dtype", "whole", "given", "alone", "packs", "chain"),
            *("copies", "blank", "profiled", "rough"),
        ),
        shape=("m", "n", "k"),
        works=products,
        op=lambda _: "gemm",
        dtype=_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
        prepare=_collected,
        needs=("framework", "version"),
    ),
    Reader(
        name="attention, prefill",
        key=("system", *_ATTENTION, *_HEADS, "isl"),
        words=(*_ATTENTION, "stack", "append", "narrows", "rough"),
        shape=(*_HEADS, "isl"),
        or_zero=("window",),
        works=prefill,
        op=lambda _: "attention_prefill",
        dtype=_attention_dtype,
        beside=(*STACK, "compute_dtype"),
        device="system",
        devices=DEVICES,
        prepare=_libraries,
        needs=("kernel_source", "version"),
    ),
    Reader(
        name="attention, decode",
        key=("system", *_ATTENTION, *_HEADS, "past_kv"),
        words=(*_ATTENTION, "stack", "append", "rough"),
        shape=(*_HEADS, "past_kv"),
        or_zero=("window", "past_kv"),
        works=decode,
        op=lambda _: "attention_decode",
        dtype=_attention_dtype,
        beside=(*STACK, "compute_dtype"),
        device="system",
        devices=DEVICES,
        prepare=_libraries,
        needs=("kernel_source", "version"),
    ),
    Reader(
        name="attention, encoder",
        key=("system", "attn_dtype", "batch", "seq_len", "heads", "head_dim"),
        words=("attn_dtype", "stack", "rough"),
        shape=("batch", "seq_len", "heads", "head_dim"),
        works=encoder,
        op=lambda _: "attention_encoder",
        dtype=_attention_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
        prepare=_encoders,
        needs=("kernel_source", "version"),
    ),
    Reader(
        name="latent attention",
        key=("system", *_ATTENTION, "phase", "heads", "batch", "isl", "past_kv"),
        words=(
            *_ATTENTION,
            "phase",
            "stack",
            "absorbed",
            "widened",
            "wide",
            "vllm",
            "padded",
            "rough",
        ),
        shape=("heads", "batch", "isl", "past_kv"),
        or_zero=("isl", "past_kv"),
        works=latent_attention,
        op=lambda words: f"mla_{words['phase']}",
        dtype=_attention_dtype,
        beside=(*STACK, "tp"),
        device="system",
        devices=DEVICES,
        prepare=_latent,
        needs=("kernel_source", "version", "framework"),
    ),
    Reader(
        name="latent attention, products",
        key=("system", "op", "dtype", "tokens", "heads"),
        words=("op", "dtype", "rough"),
        prepare=_quantised_heads,
        needs=("kernel_source",),
        shape=("tokens", "heads"),
        works=absorbed,
        op=lambda words: words["op"],
        dtype=_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
        rough=True,  # few, and their weights stay in the L2 as no model's do
    ),
    Reader(
        name="quantisation",
        key=("system", "op", "dtype", "m", "k"),
        words=("op", "dtype", "chain", "rough"),
        shape=("m", "k"),
        prepare=_composed,
        needs=("framework",),
        works=quantisation,
        op=lambda words: words["op"],
        dtype=_dtype,
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
)
