"""How engines hold device memory: a pool for the keys and values of all sequences, taken at the
start, whatever is in it. What a graph has of caches lies in the pool; a step that needs more than
the engine's share takes what it needs here, where the engine itself would refuse to start."""

from __future__ import annotations

from collections.abc import Collection

from gpuir.stacks.allocators import UNLIMITED, Events, caching

VLLM_SHARE = 0.92  # gpu_memory_utilization: vLLM 0.26, vllm.config.cache (0.9 in earlier ones)
SGLANG_SHARE = 0.88  # mem_fraction_static: assumed of all GPUs, SGLang computes it from their size
TRTLLM_SHARE = 0.9  # free_gpu_memory_fraction: TensorRT-LLM 1.3, llmapi.KvCacheConfig


def vllm(events: Events, weights: Collection[int], limit: int) -> int:
    """A share of the device for all: weights, activations and, of what is left, the pool."""
    return _at_least(VLLM_SHARE, caching(events, weights, limit), limit)


def sglang(events: Events, weights: Collection[int], limit: int) -> int:
    """A share of the device for weights and the pool; activations beside it are small."""
    return _at_least(SGLANG_SHARE, caching(events, weights, limit), limit)


def trtllm(events: Events, weights: Collection[int], limit: int) -> int:
    """A share of what weights, activations and these caches leave, for further ones."""
    held = caching(events, weights, limit)
    return held if limit >= UNLIMITED else held + round(TRTLLM_SHARE * max(limit - held, 0))


def _at_least(share: float, held: int, limit: int) -> int:
    return held if limit >= UNLIMITED else max(held, round(share * limit))
