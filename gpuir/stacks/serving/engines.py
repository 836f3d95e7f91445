"""Which kernels engines that serve language models call, for attention and for mixtures of experts,
and what they call those of experts themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuir.ir.types import DType, f4e2m1

# Whose attention runs, as `gpuir.ops.kernel.LIBRARIES` names it: before Hopper, on it, and from
# Blackwell on. vLLM has FlashAttention of the GPU's generation, and FlashInfer's on Blackwell
# (vllm/platforms/cuda.py); SGLang FlashInfer's, FlashAttention-3, FlashInfer's (its documentation,
# attention backend); TensorRT-LLM its own. FlashInfer's of Blackwell are costed as no library's is.
ATTENTION: Mapping[str, tuple[str, str, str]] = {
    "vllm": ("", "", ""),
    "sglang": ("flashinfer", "fa3", ""),
    "trtllm": ("trtllm", "trtllm", "trtllm"),
}

# Whose kernel experts are before Blackwell, and from there on, by the engine and what weights are
# in: sources named by the newest version of each in aiconfigurator's tables of experts. TensorRT-
# LLM's `cutlass` where none is named.
EXPERTS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("trtllm", "fp8_block"): ("moe_torch_flow_cutlass", "deepgemm"),
    ("sglang", "fp8_block"): ("sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"),
    ("sglang", "bf16"): ("sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe"),
    ("vllm", "bf16"): ("vllm_fused_moe", "vllm_flashinfer_trtllm"),
    ("vllm", "fp8_block"): ("vllm_fused_moe", "vllm_flashinfer_trtllm"),
    ("vllm", "mxfp4"): ("vllm_oaitriton", "vllm_flashinfer_trtllm"),
    ("vllm", "int4_wo"): ("vllm_marlin", "vllm_marlin"),
    ("sglang", "nvfp4"): ("", "sglang_flashinfer_trtllm_moe"),
}

# A part of an engine's name for its kernel of experts → the implementation that it stands for
# (`gpuir.cost.grouped`).
NAMES: Mapping[str, str] = {
    "vllm_marlin_int4_moe": "vllm",  # scales and times are those of Triton's kernels
    "oaitriton": "oai",
    "vllm_mxfp4_moe": "oai",
    "marlin": "marlin",
    "deepgemm": "deepgemm",
    "cutedsl": "cutedsl",
    "flashinfer_trtllm": "trtllm",
    "min_latency": "trtllm",
    "flashinfer_cutlass": "flashinfer",
    "torch_flow": "cutlass",
    "sglang": "sglang",
    "vllm": "vllm",
}
ENGINES = tuple(ATTENTION)


@dataclass(frozen=True)
class Generation:
    """Of a GPU, as far as engines go by it."""

    is_hopper: bool = False
    is_blackwell: bool = False

    @staticmethod
    def of(isa: str) -> Generation:
        """`sm_90` → Hopper; `sm_100`, `sm_103` → Blackwell of data centers."""
        return Generation(isa.startswith("sm_90"), isa.startswith("sm_10"))


def implementation(kernel_source: str) -> str:
    """Which implementation of experts an engine's name for its kernel stands for."""
    return next((name for part, name in NAMES.items() if part in kernel_source), "cutlass")


def experts_of(engine: str, weights: str, gpu: Generation) -> str:
    """The implementation of experts with weights in `weights` (as `EXPERTS` calls it) there."""
    sources = EXPERTS.get((engine, weights))
    return implementation(sources[gpu.is_blackwell] if sources else "")


def attention_of(engine: str, gpu: Generation) -> str:
    """The library of attention there."""
    return ATTENTION[engine][2 if gpu.is_blackwell else 1 if gpu.is_hopper else 0]


def weights_of(dtype: DType, stored: DType, block: bool) -> str:
    """What `EXPERTS` calls experts that are multiplied in `dtype` and stored in `stored`, with
    scales by blocks or not."""
    if dtype.bits == 16 and stored.bits < 16:
        return "mxfp4" if stored == f4e2m1 else f"int{stored.bits}_wo"
    if dtype.bits == 8:
        return "mxfp4" if stored == f4e2m1 else "fp8_block" if block else "fp8"
    return "nvfp4" if dtype == f4e2m1 else "bf16"
