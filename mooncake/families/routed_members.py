"""Families built of the parts of those in ``routed``: GLM-4.7-Flash, MiniCPM3, Youtu, Mistral 4, Solar Open, K-EXAONE,
Hy3 and Trinity. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, gated_shapes, num_layers_of, rotating_in_windows
from mooncake.families.gated import expert_names, read_silu, router_shape, windows_in_turn
from mooncake.families.rope_settings import read_query_growth
from mooncake.families.routed import (
    glm_first_layer,
    glm_layer,
    latent_attention,
    latent_first_layer,
    latent_layer,
    read_deepseek,
    read_deepseek_v3,
    read_glm_moe,
    read_mixture,
)
from mooncake.model_config import ModelConfig, Settings

# With latent attention: GLM-4.7-Flash (GLM team 2026), MiniCPM3 (OpenBMB 2024), Youtu (Tencent 2025) and Mistral 4
# (Mistral 2026)


def _read_glm_lite(settings: Settings, shapes: Published) -> dict[str, object]:
    settings = settings.with_defaults({"routed_scaling_factor": 1.8})
    return read_deepseek_v3(_with_dense_layers(settings), shapes)


def _read_minicpm3(settings: Settings, shapes: Published) -> dict[str, object]:
    """Embeddings, what layers add and logits are scaled; a null scales nothing."""
    hidden, num_layers = settings.integer("hidden_size"), num_layers_of(settings)
    usual = {
        **{"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
        **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True},
    }
    settings = settings.with_defaults(usual).replaced({"rope_interleave": False})
    value_dim = settings.integer("v_head_dim", hidden // max(settings.integer("num_attention_heads"), 1))
    factors = {
        "embedding_factor": settings.number("scale_emb", 1.0),
        "residual_factor": settings.number("scale_depth", num_layers**0.5) / num_layers**0.5,
        "logit_divisor": hidden / (settings.number("dim_model_base", hidden) or -1.0),
    }
    if wrong := [value for value in factors.values() if not 0 < value < 1e6]:
        what = "scale_emb, scale_depth and dim_model_base must be positive"
        raise ModelError(f"{settings.source}: {what}, got a factor of {wrong[0]}")
    return {**read_deepseek(settings.replaced({"v_head_dim": value_dim}), shapes), **factors}


def _read_mistral4(settings: Settings, shapes: Published) -> dict[str, object]:
    """Its ``partial_rotary_factor`` repeats the sizes of the two parts of a head."""
    if settings.integer("n_group", 1) != 1:
        raise ModelError(f"{settings.source} chooses experts from groups (n_group), which is not supported")
    rope = settings.get("rope_parameters")
    own = (
        {key: value for key, value in rope.items() if key != "partial_rotary_factor"} if isinstance(rope, dict) else {}
    )
    settings = settings.with_defaults({"norm_topk_prob": True}).replaced({"rope_parameters": own})
    return {
        **read_deepseek(settings, shapes),
        **read_mixture(settings, "softmax", factor=1.0, is_grouped=False),
        **read_query_growth(settings),
    }


def _mistral4_layer(config: ModelConfig) -> Shapes:
    """Experts are in one tensor, each with gates above ups."""
    hidden, routing, count = config.hidden_size, config.routing, config.num_experts
    assert routing is not None
    shared = config.shared_expert_size
    return {
        **latent_attention(config),
        **router_shape(config),
        "mlp.experts.gate_up_proj": (count, 2 * routing.expert_size, hidden),
        "mlp.experts.down_proj": (count, hidden, routing.expert_size),
        **(gated_shapes(expert_names(config).shared, hidden, shared) if shared else {}),
    }


# With ordinary attention: Solar Open (Upstage 2026), K-EXAONE (LG AI Research 2026) and Hy3 (Tencent 2026)


def _read_solar(settings: Settings, shapes: Published) -> dict[str, object]:
    """Every layer has experts, and whole heads rotate."""
    fixed = {"use_qk_norm": False, "first_k_dense_replace": 0}
    inner = {"intermediate_size": settings.integer("moe_intermediate_size")}
    usual = {"partial_rotary_factor": 1.0, "rope_theta": 1_000_000.0}
    return read_glm_moe(settings.with_defaults(usual).replaced({**fixed, **inner}), shapes)


def _read_exaone_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    """As in EXAONE 4, if some layers have a window, the others do not rotate."""
    every = 4 if settings.get("layer_types") else settings.integer("sliding_window_pattern", 4)
    windows = windows_in_turn(settings, every, 4096) if settings.get("sliding_window") else ()
    return {**_read_plain(settings, shapes), **rotating_in_windows(windows)}


def _read_hy3(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("mlp_bias")
    factor = {"routed_scaling_factor": settings.number("router_scaling_factor", 2.826), "norm_topk_prob": True}
    return _read_plain(settings.replaced(factor), shapes, default_theta=11_158_840.0)


# Trinity (AFMoE, Arcee 2025)


def _read_afmoe(settings: Settings, shapes: Published) -> dict[str, object]:
    """Only layers with a window rotate."""
    if (settings.get("score_func") or "sigmoid") != "sigmoid" or not settings.flag("route_norm", True):
        raise ModelError(f"{settings.source} chooses experts by other scores than normalised sigmoids (score_func)")
    mixture = {
        "num_shared_experts": settings.integer("num_shared_experts", 2),
        "mlp_layer_types": None,
        "first_k_dense_replace": settings.integer("num_dense_layers", 1),
        "routed_scaling_factor": settings.number("route_scale", 1.0),
        "norm_topk_prob": True,
    }
    hidden, every = settings.integer("hidden_size"), settings.integer("global_attn_every_n_layers", 4)
    return {
        **_read_plain(settings.with_defaults({"head_dim": 128}).replaced(mixture), shapes),
        **rotating_in_windows(windows_in_turn(settings, every, 1024)),
        "embedding_factor": hidden**0.5 if settings.flag("mup_enabled", False) else 1.0,
    }


def _afmoe_norms(config: ModelConfig) -> Shapes:
    """And the gate of attention, which the layers of others lack."""
    hidden = config.hidden_size
    return {
        **{f"{name}_mlp_layernorm.weight": (hidden,) for name in ("pre", "post")},
        "self_attn.gate_proj.weight": (config.num_heads * config.head_dim, hidden),
    }


def _afmoe_layer(config: ModelConfig) -> Shapes:
    return glm_layer(config) | _afmoe_norms(config)


def _afmoe_first_layer(config: ModelConfig) -> Shapes:
    return glm_first_layer(config) | _afmoe_norms(config)


def _read_plain(settings: Settings, shapes: Published, default_theta: float = 10_000.0) -> dict[str, object]:
    """With norms of each head, and experts that are counted as in Qwen's mixtures."""
    settings.refuse("attention_bias")
    mixture = {
        "n_routed_experts": settings.integer("num_experts"),
        "n_shared_experts": settings.integer("num_shared_experts", 1),
    }
    settings = _with_dense_layers(settings.replaced(mixture))
    return {
        **read_silu(settings, shapes, default_theta),
        **read_mixture(settings, "sigmoid", factor=2.5, is_grouped=True),
        "intermediate_size": settings.integer("intermediate_size"),
        "qk_norm": True,
    }


def _with_dense_layers(settings: Settings) -> Settings:
    """With ``first_k_dense_replace``, which newer configurations say by the kind of each layer's MLP."""
    kinds = settings.get("mlp_layer_types")
    if kinds is None:
        return settings.with_defaults({"first_k_dense_replace": 1})
    num_layers = settings.integer("num_hidden_layers")
    count = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * count + ["sparse"] * (num_layers - count):
        raise ModelError(
            f"{settings.source}: mlp_layer_types must be dense layers, then sparse ones, {num_layers} in all"
        )
    return settings.replaced({"first_k_dense_replace": count})


ROUTED_MEMBERS: dict[str, Family] = {
    "glm4_moe_lite": Family(_read_glm_lite, latent_layer, dense_shapes=latent_first_layer),
    "minicpm3": Family(_read_minicpm3, latent_first_layer),
    "youtu": Family(read_deepseek, latent_first_layer),
    "mistral4": Family(_read_mistral4, _mistral4_layer, dense_shapes=latent_first_layer),
    "solar_open": Family(_read_solar, glm_layer),
    "exaone_moe": Family(_read_exaone_moe, glm_layer, dense_shapes=glm_first_layer),
    "afmoe": Family(_read_afmoe, _afmoe_layer, dense_shapes=_afmoe_first_layer),
    "hy_v3": Family(_read_hy3, glm_layer, dense_shapes=glm_first_layer),
}
