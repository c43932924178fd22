"""Families with DeepSeek's mixtures: DeepSeek-V2 and -V3 (R1, Moonlight, Kimi K2), GLM-4.5, dots.llm1, ERNIE 4.5 and
MiniMax-M2. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, gated_shapes
from mooncake.families.gated import (
    attention_shapes,
    expert_names,
    expert_shapes,
    layer_norms,
    norms_over_heads,
    read_silu,
    refuse_activations,
    router_shape,
)
from mooncake.families.rope_settings import Rope, read_rope, yarn_sharpness
from mooncake.model_config import MAX_LAYERS, LatentAttention, ModelConfig, Routing, Settings

# DeepSeek-V2 (DeepSeek 2024a) and -V3 (DeepSeek 2024b)


def read_deepseek(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("attention_bias", "mlp_bias")
    refuse_activations(settings)
    latent = LatentAttention(
        rank=_size(settings, "kv_lora_rank", 512),
        rope_dim=_size(settings, "qk_rope_head_dim", 64),
        nope_dim=_size(settings, "qk_nope_head_dim", 128),
        value_dim=_size(settings, "v_head_dim", 128),
        query_rank=settings.integer("q_lora_rank", 0),
        turns_halves=not settings.flag("rope_interleave", True),
    )
    rope = read_rope(settings, latent.rope_dim)
    return {
        "num_layers": settings.integer("num_hidden_layers"),
        "hidden_size": settings.integer("hidden_size"),
        "intermediate_size": settings.integer("intermediate_size"),
        "num_heads": settings.integer("num_attention_heads"),
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rope_dim,
        "vocab_size": settings.integer("vocab_size"),
        **rope.values,
        "rotary_dim": latent.rope_dim,
        "rms_eps": settings.number("rms_norm_eps", 1e-6),
        "tie_embeddings": settings.flag("tie_word_embeddings", "lm_head.weight" not in shapes),
        "attention_scale": _attention_scale(settings, latent, rope),
        "latent": latent,
    }


def _size(settings: Settings, key: str, default: int) -> int:
    """Rows of the cache have two halves that rotate into each other, so each part must be even."""
    size = settings.integer(key, default)
    if size < 2 or size % 2:
        raise ModelError(f"{settings.source}: {key} must be even and positive, got {size}")
    return size


def _attention_scale(settings: Settings, latent: LatentAttention, rope: Rope) -> float:
    """Here YaRN also sharpens the part without positions, so it changes the softmax scale and not only the
    rotations."""
    scale = float((latent.nope_dim + latent.rope_dim) ** -0.5)
    if rope.scaling is None:
        return scale
    given = settings.get("rope_parameters") or settings.get("rope_scaling")
    parameters = settings.part(given)
    of_all = parameters.number("mscale_all_dim", 0.0)
    sharpness = yarn_sharpness(parameters.number("factor", 1.0), of_all) if of_all else 1.0
    if not 0 < sharpness < 1e6:
        raise ModelError(f"{settings.source}: mscale_all_dim must be positive, got {of_all}")
    return scale * sharpness**2


def _read_deepseek_v2(settings: Settings, shapes: Published) -> dict[str, object]:
    method = settings.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"{settings.source} chooses experts by {method!r}, which is not supported for this family")
    if (scoring := settings.get("scoring_func") or "softmax") != "softmax":
        raise ModelError(f"{settings.source} asks for scoring_func {scoring!r}, which is not supported for this family")
    if settings.flag("norm_topk_prob", False):
        raise ModelError(f"{settings.source} asks for norm_topk_prob, which is not supported for this family")
    return {
        **read_deepseek(settings, shapes),
        **read_mixture(settings, "softmax", factor=1.0, is_grouped=method != "greedy"),
    }


def read_deepseek_v3(settings: Settings, shapes: Published) -> dict[str, object]:
    for key, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if (value := settings.get(key) or only) != only:
            raise ModelError(f"{settings.source} asks for {key} {value!r}; only {only!r} is supported for this family")
    return {**read_deepseek(settings, shapes), **read_mixture(settings, "sigmoid", factor=2.5, is_grouped=True)}


def latent_attention(config: ModelConfig) -> Shapes:
    latent, hidden = config.latent, config.hidden_size
    assert latent is not None
    queries = config.num_heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank:
        query: Shapes = {
            "self_attn.q_a_proj.weight": (latent.query_rank, hidden),
            "self_attn.q_a_layernorm.weight": (latent.query_rank,),
            "self_attn.q_b_proj.weight": (queries, latent.query_rank),
        }
    else:
        query = {"self_attn.q_proj.weight": (queries, hidden)}
    return {
        **query,
        "self_attn.kv_a_proj_with_mqa.weight": (latent.rank + latent.rope_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.rank,),
        "self_attn.kv_b_proj.weight": (config.num_heads * (latent.nope_dim + latent.value_dim), latent.rank),
        "self_attn.o_proj.weight": (hidden, config.num_heads * latent.value_dim),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def latent_first_layer(config: ModelConfig) -> Shapes:
    return latent_attention(config) | gated_shapes("mlp", config.hidden_size, config.intermediate_size)


def latent_layer(config: ModelConfig) -> Shapes:
    return latent_attention(config) | _mixture(config)


# GLM-4.5 (GLM team 2025), dots.llm1 (rednote 2025), ERNIE 4.5 (Baidu 2025) and MiniMax-M2 (MiniMax 2025)


def read_glm_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    settings = settings.with_defaults({"partial_rotary_factor": 0.5})
    return {
        **read_silu(settings, shapes, partial=True),
        **read_mixture(settings, "sigmoid", factor=1.0, is_grouped=True),
        "intermediate_size": settings.integer("intermediate_size"),
        "qkv_bias": settings.flag("attention_bias", False),
        "qk_norm": settings.flag("use_qk_norm", False),
    }


def _read_dots(settings: Settings, shapes: Published) -> dict[str, object]:
    kinds, num_layers = settings.get("layer_types"), settings.integer("num_hidden_layers")
    if kinds is None and settings.get("sliding_window") and settings.integer("max_window_layers", 62) < num_layers:
        kinds = ["sliding_attention"]
    if settings.flag("attention_bias", False) or (isinstance(kinds, list) and "sliding_attention" in kinds):
        raise ModelError(f"{settings.source} asks for attention_bias or a sliding window, which is not supported")
    settings = settings.with_defaults({"norm_topk_prob": False})
    return {
        **read_silu(settings, shapes),
        **read_mixture(settings, "sigmoid", factor=1.0, is_grouped=True),
        "intermediate_size": settings.integer("intermediate_size"),
        "qk_norm": True,
    }


def _read_ernie(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("use_bias")
    num_layers = settings.integer("num_hidden_layers")
    if settings.integer("moe_layer_end_index", -1) not in (-1, num_layers - 1):
        raise ModelError(f"{settings.source} gives its last layers no experts, which is not supported")
    mixture = {
        "n_routed_experts": settings.integer("moe_num_experts", 64),
        "num_experts_per_tok": settings.integer("moe_k", 6),
        "n_shared_experts": settings.integer("moe_num_shared_experts", 2),
        "first_k_dense_replace": settings.integer("moe_layer_start_index", 1),
        "moe_layer_freq": settings.integer("moe_layer_interval", 1),
        "norm_topk_prob": True,
    }
    settings = settings.replaced(mixture)
    return {
        **read_silu(settings, shapes, default_theta=500_000.0),
        **read_mixture(settings, "biased_softmax", factor=1.0, is_grouped=False),
        "intermediate_size": settings.integer("intermediate_size"),
    }


def _read_minimax(settings: Settings, shapes: Published) -> dict[str, object]:
    """``rotary_dim`` is that of the released models."""
    share = settings.integer("rotary_dim", 0) / max(settings.integer("head_dim", 128), 1)
    mixture = {
        "n_routed_experts": settings.integer("num_local_experts", 256),
        "num_experts_per_tok": settings.integer("num_experts_per_tok", 8),
        "moe_intermediate_size": settings.integer("intermediate_size"),
    }
    partial = {"partial_rotary_factor": share} if share else {}
    settings = settings.replaced({**mixture, **partial})
    return {
        **read_silu(settings, shapes, default_theta=5_000_000.0, partial=True),
        **read_mixture(settings, "sigmoid", factor=1.0, is_grouped=False),
        "intermediate_size": settings.integer("intermediate_size"),
        "qk_norm": True,
    }


def _minimax_layer(config: ModelConfig) -> Shapes:
    return glm_layer(config) | norms_over_heads(config)


def _glm_attention(config: ModelConfig) -> Shapes:
    return attention_shapes(config) | layer_norms(config)


def glm_first_layer(config: ModelConfig) -> Shapes:
    return _glm_attention(config) | gated_shapes("mlp", config.hidden_size, config.intermediate_size)


def glm_layer(config: ModelConfig) -> Shapes:
    return _glm_attention(config) | _mixture(config)


# Mixtures


def read_mixture(settings: Settings, scoring: str, factor: float, is_grouped: bool) -> dict[str, object]:
    if settings.integer("moe_layer_freq", 1) != 1:
        raise ModelError(f"{settings.source} gives only some layers experts, which is not supported")
    expert_size, num_experts = settings.integer("moe_intermediate_size"), settings.integer("n_routed_experts")
    groups, top = (settings.integer(key, 1) if is_grouped else 1 for key in ("n_group", "topk_group"))
    in_groups = num_experts // max(groups, 1)
    if not 1 <= top <= groups or num_experts % groups or settings.integer("num_experts_per_tok") > top * in_groups:
        raise ModelError(f"{settings.source}: {num_experts} experts cannot be chosen from {top} of {groups} groups")
    scale = settings.number("routed_scaling_factor", factor)
    if not 0 < scale < 1e6:
        raise ModelError(f"{settings.source}: routed_scaling_factor must be positive, got {scale}")
    routing = Routing(
        dense_layers=tuple(range(min(settings.integer("first_k_dense_replace", 0), MAX_LAYERS))),
        expert_size=expert_size,
        scoring=scoring,
        factor=scale,
        num_groups=groups,
        top_groups=top,
    )
    return {
        "num_experts": num_experts,
        "experts_per_token": settings.integer("num_experts_per_tok"),
        "norm_expert_weights": settings.flag("norm_topk_prob", scoring == "sigmoid"),
        "shared_expert_size": expert_size * settings.integer("n_shared_experts", 0),
        "routing": routing,
    }


def _mixture(config: ModelConfig) -> Shapes:
    routing, hidden, shared = config.routing, config.hidden_size, config.shared_expert_size
    assert routing is not None
    shapes = router_shape(config) | expert_shapes(config, routing.expert_size)
    if routing.has_choice_bias:
        one = (1,) if config.architecture == "ernie4_5_moe" else ()
        shapes[expert_names(config).choice_bias] = (*one, config.num_experts)
    return shapes | (gated_shapes(expert_names(config).shared, hidden, shared) if shared else {})


ROUTED_FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(_read_deepseek_v2, latent_layer, dense_shapes=latent_first_layer),
    "deepseek_v3": Family(read_deepseek_v3, latent_layer, dense_shapes=latent_first_layer),
    "kimi_k2": Family(read_deepseek_v3, latent_layer, dense_shapes=latent_first_layer),
    "glm4_moe": Family(read_glm_moe, glm_layer, dense_shapes=glm_first_layer),
    "dots1": Family(_read_dots, glm_layer, dense_shapes=glm_first_layer),
    "ernie4_5_moe": Family(_read_ernie, glm_layer, dense_shapes=glm_first_layer),
    "minimax_m2": Family(_read_minimax, _minimax_layer),
}
