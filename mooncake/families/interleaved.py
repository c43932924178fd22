"""Families that rotate neighbouring elements of a head with each other: GLM-4 and Command R. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, gated_shapes, rotating_in_windows
from mooncake.families.gated import attention_shapes, read_silu, windows_in_turn
from mooncake.model_config import ModelConfig, Settings

# GLM-4 (GLM team 2024; "glm4" from 0414 on)


def _read_glm(settings: Settings, shapes: Published) -> dict[str, object]:
    settings = settings.with_defaults({"partial_rotary_factor": 0.5})
    return {
        **read_silu(settings, shapes, partial=True),
        "intermediate_size": settings.integer("intermediate_size"),
        "qkv_bias": settings.flag("attention_bias", True),
    }


def _glm_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    norms = ["input_layernorm", "post_attention_layernorm"]  # and of what attention and the MLP add:
    norms += ["post_self_attn_layernorm", "post_mlp_layernorm"] if config.architecture == "glm4" else []
    return {
        **attention_shapes(config),
        "mlp.gate_up_proj.weight": (2 * inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        **{f"{name}.weight": (hidden,) for name in norms},
    }


# Command R ("cohere", Cohere 2024) and Command R7B and A ("cohere2", Cohere 2024, 2025)


def read_cohere(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("attention_bias")
    scale = settings.number("logit_scale", 0.0625)
    if not 0 < scale < 1e6:
        raise ModelError(f"{settings.source}: logit_scale must be positive, got {scale}")
    if settings.get("model_max_length"):  # Command R and R+: more than the positions that their other key names
        length = {"max_position_embeddings": settings.integer("model_max_length")}
        settings = settings.replaced(length)
    return {
        **read_silu(settings, shapes, default_theta=500_000.0),
        "intermediate_size": settings.integer("intermediate_size"),
        "rms_eps": settings.number("layer_norm_eps", 1e-5),
        "tie_embeddings": settings.flag("tie_word_embeddings", True),
        "logit_divisor": 1 / scale,
        "parallel_residual": True,
        "qk_norm": settings.flag("use_qk_norm", False),
    }


def _read_cohere2(settings: Settings, shapes: Published) -> dict[str, object]:
    every = settings.integer("sliding_window_pattern", 4)
    return {**read_cohere(settings, shapes), **rotating_in_windows(windows_in_turn(settings, every, 4096))}


def _cohere_layer(config: ModelConfig) -> Shapes:
    hidden, dim = config.hidden_size, config.head_dim
    layer = attention_shapes(config) | gated_shapes("mlp", hidden, config.intermediate_size)
    if config.qk_norm:  # a weight for each head
        layer["self_attn.q_norm.weight"] = config.num_heads, dim
        layer["self_attn.k_norm.weight"] = config.num_kv_heads, dim
    return {**layer, "input_layernorm.weight": (hidden,)}


INTERLEAVED_FAMILIES: dict[str, Family] = {
    "glm": Family(_read_glm, _glm_layer),
    "glm4": Family(_read_glm, _glm_layer),
    "cohere": Family(read_cohere, _cohere_layer),
    "cohere2": Family(_read_cohere2, _cohere_layer),
}
