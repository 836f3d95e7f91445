"""Linear attention and hyper-connections, in aiconfigurator's tables.

Linear attention (gated delta nets, Yang et al., arXiv 2412.06464; Kimi's, arXiv 2510.26692; Mamba2,
Dao and Gu, arXiv 2405.21060) keeps a state a head, of keys by values, in place of a cache. A prompt
is taken in chunks: within a chunk products as of attention, all chunks beside each other; from
chunk to chunk the state, one after another. One token updates the state. Before either a short
convolution along the tokens. In flash-linear-attention's Triton kernels each of these steps is a
kernel or two; FlashInfer has one kernel for a whole prompt, a block a head and sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpuir.cost import sized
from gpuir.cost.sheet import Number
from gpuir.cost.work import Serial, Work
from gpuir.fit.columns import Columns, WordColumn
from gpuir.fit.readers import Reader, Shapes, Unmodelled
from gpuir.ir.types import bf16, f32
from validation.serving import DEVICES, STACK

CHUNK = 64.0  # tokens: flash-linear-attention's, FlashInfer's
THREADS = 128.0  # of a block
STATE_BLOCKS = 4.0  # that share the values of a head: 32 of 128 each
LEAST_BYTES = 64.0


@dataclass(frozen=True)
class Scan:
    """A prompt's kernels, in numbers by hand: least absolute errors on H100, H200 and L40S (of
    FlashInfer's on H100). B200 was not used."""

    nbytes: float  # between kernels, of a token and head of values
    ops: float  # lane instructions of a cell of values
    start: float  # turns of a block that has all tokens of a chunk
    least: float  # of them, those of a block with one token
    step: float  # turns from chunk to chunk
    launches: float  # of small kernels besides
    late: float  # of the bytes, those of the kernel that goes from chunk to chunk
    states: float  # passes over all states


FLA = Scan(4000.0, 460.0, 56.0, 15.0, 3.4, 4.0, 0.27, 3.9)
SCANS = {
    "flashinfer": Scan(1090.0, 0.0, 21.0, 21.0, 10.8, 1.0, 1.0, 2.0),
    "flashkda": Scan(700.0, 174.0, 20.0, 4.0, 11.8, 4.0, 0.3, 4.6),
    "kda": Scan(8300.0, 510.0, 90.0, 40.0, 7.3, 5.4, 0.52, 3.8),
    "trtllm": Scan(3600.0, 183.0, 9.7, 2.2, 4.7, 4.0, 0.17, 2.9),
}
UPDATE = 8.0  # turns of a block that updates a state: by the same rows, of one sequence

# The convolution in CUDA (github.com/Dao-AILab/causal-conv1d) starts a block for each channel of
# each sequence. Turns of one by the rows of short sequences on H100 (110 to 211 ns of an SM; A100
# takes twice as long): SGLang's, TensorRT-LLM's until and since 1.3.0rc20; of a step's, of both.
CHANNEL, OLDER_CHANNEL, NEWER_CHANNEL = 9.6, 12.0, 6.4
STEP = 7.0
# That in Triton takes tiles of 8 tokens by 256 channels: lane instructions of a cell, by hand.
CONVOLUTION_OPS = 50.0


def _kernel(nbytes: Number, threads: Number, turns: Number, ops: Number = 0.0) -> Work:
    """A kernel of so many threads, each of which waits for one load after another, so often."""
    nbytes = np.maximum(nbytes, LEAST_BYTES)
    work = sized.pointwise(nbytes / (2 * bf16.bits / 8), (bf16,), (bf16,))
    dims = (("i", threads * turns),)
    return replace(work, dims=dims, lane_ops=ops + 0.0 * nbytes, detail=Serial(turns))


def linear_attention(s: Shapes) -> tuple[Work, ...]:
    """Rough: numbers by hand."""
    source, mamba = s.words["kernel_source"], s.words["family"] == "mamba2"
    heads, value = (s["nheads"], s["head_dim"]) if mamba else (s["num_v_heads"], s["head_v_dim"])
    key = s["d_state"] if mamba else s["head_k_dim"]
    tokens = np.maximum(s["num_tokens"], s["batch_size"])
    if source.startswith("causal_conv1d"):
        return _convolution(s, tokens, heads * value, mamba)
    states = s["batch_size"] * heads
    if s.words["phase"] == "context":
        own = "trtllm" if s.words["trtllm"] == "yes" else source
        scan = next((v for k, v in SCANS.items() if k in own), FLA)
        return _scan(scan, s, states, tokens * heads, value, 4.0 * key * value)
    # A state is read once, and written after each token.
    nbytes = 4.0 * key * value * states * (1 + tokens / s["batch_size"])
    return (_kernel(nbytes, states * STATE_BLOCKS * 32, UPDATE + 0.0 * tokens),)


def _scan(
    scan: Scan, s: Shapes, states: Number, rows: Number, value: Number, state: Number
) -> tuple[Work, ...]:
    """A prompt: `rows` of tokens and heads, `states` of `state` bytes."""
    length = np.maximum(s["seq_len"], 1.0)
    chunks = np.ceil(length / CHUNK)
    filled = np.minimum(length, CHUNK) / CHUNK
    start = scan.least + (scan.start - scan.least) * filled
    nbytes, passed = scan.nbytes * rows, scan.states * state * states
    if scan.late == 1.0:  # one kernel, with an SM a block
        many = THREADS * 16
        return (_kernel(nbytes + passed, states * many, start + scan.step * chunks),)
    one, blocks = 1.0 + 0.0 * rows, states * chunks * THREADS
    small = sized.pointwise(one, (f32,), (f32,))
    return (
        *[small] * round(scan.launches),
        _kernel(nbytes * (1 - scan.late), blocks, start),
        _kernel(passed, passed / 16, one),
        _kernel(one, blocks, one, rows * value * scan.ops),
        _kernel(nbytes * scan.late, states * STATE_BLOCKS * THREADS, scan.step * chunks),
    )


def _convolution(s: Shapes, tokens: Number, width: Number, mamba: bool) -> tuple[Work, ...]:
    """Of keys, queries and values; of keys alone in the older collectors of gated delta nets, whose
    times go by these (collector/sglang/collect_gdn.py has all since 0.5.14)."""
    source, batch = s.words["kernel_source"], s["batch_size"]
    key = s["n_groups"] * s["d_state"] if mamba else s["num_k_heads"] * s["head_k_dim"]
    channels = key if s.words["keys"] == "yes" else width + 2 * key
    cells = tokens * channels
    trtllm = s.words["trtllm"] == "yes"
    if "update" in source:  # a token and its result, and the three before it, read and written
        if trtllm:
            return (_kernel(10.0 * cells, cells, STEP + 0.0 * cells),)
        return (sized.pointwise(cells, (bf16,) * 5, (bf16,) * 5, ops=8.0),)
    if s.words["cuda"] == "yes":
        turns = OLDER_CHANNEL if trtllm else CHANNEL
        turns = NEWER_CHANNEL if s.words["newer"] == "yes" else turns
        work = _kernel(2 * bf16.bits / 8 * cells, batch * channels * THREADS, turns + 0.0 * cells)
        return (replace(work, lane_ops=CONVOLUTION_OPS / 2 * cells),)
    parts = 3 if source.endswith("qkv3") else 1
    return (sized.pointwise(cells / parts, (bf16,), (bf16,), ops=CONVOLUTION_OPS),) * parts


def _versions(columns: Columns) -> Columns:
    """Which convolution ran, on what."""
    framework, version = columns.words("framework"), columns.words("version")
    delta, trtllm = columns.words("family").where("gdn"), framework.where("trtllm")
    older = framework.where("sglang") & version.where("0.5.9", "0.5.10")
    keys = delta & (trtllm | older | version.where("0.22.0"))
    return columns.with_cells(
        {
            "trtllm": WordColumn.yes_or_no(trtllm),
            "cuda": WordColumn.yes_or_no(trtllm | older),
            "newer": WordColumn.yes_or_no(version.where("1.3.0rc20")),
            "keys": WordColumn.yes_or_no(keys),
        }
    )


def _operator(words: Mapping[str, str]) -> str:
    part = "_conv" if words["kernel_source"].startswith("causal_conv1d") else ""
    return f"{words['family']}_{words['phase']}{part}"


MOST_STREAMS = 64
USUAL_SITES = 2  # of a row of hyper-connections, as where the table says


def connections(s: Shapes) -> tuple[Work, ...]:
    """Hyper-connections: `hc_mult` residual streams. Before a layer their mix is computed from a
    narrow product and taken; after it the layer's result is added to all of them. Some rows hold
    several such sites."""
    tokens, streams = s["tokens"], s["hc_mult"]
    if not re.fullmatch(r"\d{0,2}", s.words["num_sites"]):
        raise Unmodelled(f"num_sites {s.words['num_sites']} is no number of sites")
    sites = int(s.words["num_sites"] or 0) or USUAL_SITES
    cells = tokens * s["hidden"]
    if not np.all(streams == streams[:1]):
        raise Unmodelled("hyper-connections with different numbers of streams in one table")
    if streams[0] > MOST_STREAMS:
        raise Unmodelled(f"hyper-connections with more than {MOST_STREAMS} streams")
    n = int(streams[0])
    if s.words["op"] == "post":
        return (sized.pointwise(cells, (bf16,) * (n + 1), (bf16,) * n, ops=2.0 * n),) * sites
    mixes = streams * (streams + 2)
    return (
        sized.gemm(tokens, mixes, streams * s["hidden"], bf16, out=f32),
        sized.pointwise(tokens * mixes, (f32,), (f32,), ops=8.0 * s["sinkhorn_iters"].max()),
        sized.pointwise(cells, (bf16,) * n, (bf16,), ops=2.0 * n),
    ) * sites


_STATES = (
    *("batch_size", "seq_len", "num_tokens", "d_model", "d_conv", "num_k_heads", "head_k_dim"),
    *("num_v_heads", "head_v_dim", "d_state", "nheads", "head_dim", "n_groups", "chunk_size"),
)

READERS = (
    Reader(
        name="linear attention",
        key=("system", "family", "phase", *_STATES),
        words=("family", "phase", "kernel_source", "trtllm", "cuda", "newer", "keys"),
        shape=_STATES,
        or_zero=_STATES,
        works=linear_attention,
        prepare=_versions,
        needs=("framework", "version"),
        rough=True,
        op=_operator,
        dtype=lambda _: "bf16",
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
    Reader(
        name="hyper-connections",
        key=("system", "op", "tokens", "hidden", "hc_mult", "sinkhorn_iters"),
        words=("op", "num_sites"),
        shape=("tokens", "hidden", "hc_mult", "sinkhorn_iters"),
        or_zero=("sinkhorn_iters",),
        works=connections,
        rough=True,
        op=lambda words: f"mhc_{words['op']}",
        dtype=lambda _: "bf16",
        beside=STACK,
        device="system",
        devices=DEVICES,
    ),
)
