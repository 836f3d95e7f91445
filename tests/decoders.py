"""Small decoders, and their graphs as `eval models` builds them."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}
QWEN = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
LATENT = LLAMA | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 8,
    "head_dim": 16,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 2,
}
MIXTURE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}

# A model as tables of serving measurements state it.
SERVED: dict[str, object] = {
    "architecture": "Qwen3ForCausalLM",
    "layers": 2,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 512,
    "vocab": 1024,
    "activation": "silu",
    "tied_embeddings": False,
    "dtype": "bfloat16",
}
