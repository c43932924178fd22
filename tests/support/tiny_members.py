"""Small random models of transformers, of families that are built like others."""

from __future__ import annotations

from collections.abc import Callable

from tiny_families import EVEN, GATED, GLM_MOE, IDS, LATENT, VOCAB, WIDE, YARN, member
from transformers import PreTrainedModel

DENSE_LATENT = {
    key: value for key, value in LATENT.items() if not any(part in key for part in ("moe", "expert", "first"))
}
GROWING = (
    YARN
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    | {
        "factor": 16.0,
        "original_max_position_embeddings": 32,
    }
)
COUNTED = {
    **{"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1},
    **WIDE,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5_000.0, "factor": 6.0}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
GRANITE_4 = {
    **{"num_local_experts": 0, "shared_intermediate_size": 112, "layer_types": ["full_attention"] * 3, **WIDE},
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.15, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    **{"mamba_n_heads": 4, "mamba_d_head": 48},
}
COMMAND = {"intermediate_size": 64, "num_experts": 6, "sliding_window": 20, "logit_scale": 0.25, **WIDE}
LLAMA_4 = {
    **{"num_hidden_layers": 4, "intermediate_size": 48, "intermediate_size_mlp": 160, "num_local_experts": 6},
    **{"attention_chunk_size": 20, "floor_scale": 8, "attn_scale": 0.5, **WIDE},
}
_FIRST = ("first_k_dense_replace",)


MEMBERS: dict[str, Callable[[], PreTrainedModel]] = {
    "ministral3": member("ministral3", GATED, WIDE, {"rope_parameters": GROWING}),
    "ministral3-in-a-window": member(
        "ministral3", GATED, WIDE, {"rope_parameters": GROWING, "sliding_window": 20, "tie_word_embeddings": True}
    ),
    "mistral4": member("mistral4", LATENT, {"q_lora_rank": 24, "n_routed_experts": 6, "rope_parameters": GROWING}),
    "mistral4-without-dense-layers": member(
        "mistral4",
        LATENT,
        {"q_lora_rank": None, "n_routed_experts": 6, "first_k_dense_replace": 0, "norm_topk_prob": False},
        {"rope_parameters": GROWING | {"mscale_all_dim": 0.5}, "routed_scaling_factor": 1.5},
    ),
    "glm-4.7-flash": member("glm4_moe_lite", LATENT, {"q_lora_rank": 24, "n_routed_experts": 6}, without=_FIRST),
    "glm-4.7-flash-in-groups": member(
        "glm4_moe_lite",
        LATENT,
        {"q_lora_rank": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
        {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
        without=_FIRST,
    ),
    "youtu": member(
        "youtu", DENSE_LATENT, {"q_lora_rank": 24, "initializer_range": 0.2, "embedding_initializer_range": 0.2}
    ),
    "youtu-whose-halves-turn": member(
        "youtu",
        DENSE_LATENT,
        {"q_lora_rank": None, "rope_interleave": False, "initializer_range": 0.2, "embedding_initializer_range": 0.2},
    ),
    "minicpm3": member(
        "minicpm3", DENSE_LATENT, {"q_lora_rank": 24, "scale_emb": 3, "scale_depth": 0.8, "dim_model_base": 48, **WIDE}
    ),
    "solar-open": member("solar_open", GLM_MOE, {"n_shared_experts": 1}, without=(*_FIRST, "intermediate_size")),
    "k-exaone": member(
        "exaone_moe",
        GATED,
        COUNTED,
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"n_group": 4, "topk_group": 2},
    ),
    "gemma": member("gemma", GATED, WIDE, {"initializer_range": 0.15}),
    "gemma-with-a-head": member("gemma", GATED, WIDE, {"hidden_act": "gelu", "tie_word_embeddings": False}),
    "vaultgemma": member(
        "vaultgemma",
        GATED,
        {"sliding_window": 20, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, **WIDE},
        {"final_logit_softcapping": None, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "afm": member("arcee", GATED, WIDE, {"rope_parameters": YARN}),
    "apertus": member("apertus", GATED, WIDE, {"rope_parameters": LLAMA3}),
    "granite-4": member("granitemoehybrid", GATED, GRANITE_4, {"position_embedding_type": "rope"}),
    "granite-4-without-rotation": member("granitemoehybrid", GATED, GRANITE_4, {"tie_word_embeddings": True}),
    "trinity": member(
        "afmoe",
        GATED,
        COUNTED,
        {"num_dense_layers": 1, "sliding_window": 20, "global_attn_every_n_layers": 2, "route_scale": 2.5},
        {"mup_enabled": True},
    ),
    "trinity-of-full-attention": member(
        "afmoe", GATED, COUNTED, {"num_dense_layers": 2, "layer_types": ["full_attention"] * 3}
    ),
    "hunyuan-moe": member("hunyuan_v1_moe", GATED, WIDE, {"num_experts": 6, "moe_topk": [3, 3, 3]}),
    "iquest-coder": member("iquestcoder", GATED, WIDE),
    "starcoder": member(
        "gpt_bigcode",
        {"vocab_size": VOCAB, "n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 512, "initializer_range": 0.25},
        IDS,
    ),
    "jais-2": member("jais2", GATED, {"initializer_range": 0.15}),
    "olmo-1": member("olmo", EVEN, {"intermediate_size": 160, "num_key_value_heads": 2, "clip_qkv": 1.5, **WIDE}),
    "nanochat": member("nanochat", EVEN, {"intermediate_size": 160, "num_key_value_heads": 2, **WIDE}),
    "hyperclova-x": member(
        "hyperclovax",
        GATED,
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5, **WIDE},
    ),
    "flex-olmo": member("flex_olmo", EVEN, WIDE, {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "mellum-2": member(
        "mellum",
        GATED,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "sliding_window": 20, **WIDE},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}},
    ),
    "command-a-plus": member(
        "cohere2_moe",
        GATED,
        COMMAND,
        {"num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"prefix_dense_intermediate_size": 112},
    ),
    "command-a-plus-by-sigmoids": member(
        "cohere2_moe",
        GATED,
        COMMAND,
        {"num_shared_experts": 1, "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"},
        {"sliding_window_pattern": 2},
    ),
    "internlm3": member("internlm3", GATED, WIDE, {"rope_parameters": DYNAMIC}),
    "helium": member("helium", GATED, WIDE, {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}}),
    "cwm": member("cwm", GATED, WIDE, {"sliding_window": 20, "rope_parameters": LLAMA3}),
    "hy3": member("hy_v3", GATED, COUNTED),
    "llama-4": member(
        "llama4_text",
        GATED,
        LLAMA_4,
        {"interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "no_rope_layers": [1, 0, 1, 0]},
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}},
    ),
    "llama-4-without-norms": member("llama4_text", GATED, LLAMA_4, {"use_qk_norm": False, "moe_layers": [0, 2, 3]}),
}
