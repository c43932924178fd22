"""Mixtures of experts with extra parts: gpt-oss, Qwen2-MoE, Qwen3-VL's, Hunyuan's, OLMoE, FlexOlmo, Mellum 2 and
Granite's. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, gated_shapes, linear_shapes, num_layers_of
from mooncake.families.gated import (
    attention_shapes,
    expert_names,
    layer_norms,
    moe_layer,
    norms_over_heads,
    read_granite,
    read_hunyuan,
    read_qwen_moe,
    read_silu,
    rope_of_windows,
    router_shape,
    windows_in_turn,
)
from mooncake.families.rope_settings import require_rope_scaling
from mooncake.model_config import ModelConfig, Settings

# gpt-oss (OpenAI 2025)

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""In all published models: the gate's slope, and the limit to which gate and up are clamped."""


def _read_gpt_oss(settings: Settings, shapes: Published) -> dict[str, object]:
    if not settings.flag("attention_bias", True):
        raise ModelError(f"{settings.source} leaves out the biases that gpt-oss has, which is not supported")
    require_rope_scaling(settings)
    for key, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if (value := settings.number(key, known)) != known:
            raise ModelError(f"{settings.source} asks for a {key} of {value}; supported: {known}")
    return {
        **read_silu(settings, shapes, default_theta=150_000.0),
        "intermediate_size": settings.integer("intermediate_size"),
        "layer_windows": windows_in_turn(settings, 2, 128),
        "qkv_bias": True,
        "num_experts": settings.integer("num_local_experts", 128),
        "experts_per_token": settings.integer("num_experts_per_tok", 4),
        "norm_expert_weights": True,
    }


def _gpt_oss_layer(config: ModelConfig) -> Shapes:
    """Experts are in one tensor, each ``[inputs, outputs]``, with gates and ups interleaved."""
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
    return {
        **attention_shapes(config),
        "self_attn.o_proj.bias": (hidden,),
        "self_attn.sinks": (config.num_heads,),
        **linear_shapes("mlp.router", count, hidden),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, inner, hidden),
        "mlp.experts.down_proj_bias": (count, hidden),
        **{f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")},
    }


# Qwen2-MoE and Qwen1.5-MoE (Qwen team 2024)


def _read_qwen2_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    return {
        **read_qwen_moe(settings, shapes, num_experts=60, experts_per_token=4),
        "qkv_bias": settings.flag("qkv_bias", True),
        "shared_expert_size": settings.integer("shared_expert_intermediate_size"),
    }


def _qwen2_moe_layer(config: ModelConfig) -> Shapes:
    shared = gated_shapes("mlp.shared_expert", config.hidden_size, config.shared_expert_size)
    return {**moe_layer(config), **shared, "mlp.shared_expert_gate.weight": (1, config.hidden_size)}


# OLMoE (Muennighoff et al. 2024) and Granite's mixtures (Granite team, IBM 2024)


def _read_olmoe(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("attention_bias", "clip_qkv")
    return {
        **read_silu(settings, shapes),
        "intermediate_size": settings.integer("intermediate_size"),
        "qk_norm": True,
        "num_experts": settings.integer("num_experts", 64),
        "experts_per_token": settings.integer("num_experts_per_tok", 8),
        "norm_expert_weights": settings.flag("norm_topk_prob", False),
    }


def _olmoe_layer(config: ModelConfig) -> Shapes:
    return moe_layer(config) | norms_over_heads(config)


def _read_granite_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    return {
        **read_granite(settings, shapes),
        "num_experts": settings.integer("num_local_experts", 8),
        "experts_per_token": settings.integer("num_experts_per_tok", 2),
        "norm_expert_weights": True,
    }


def _granite_moe_layer(config: ModelConfig) -> Shapes:
    """Experts are in one tensor, each with gates above ups."""
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
    return {
        **attention_shapes(config),
        **layer_norms(config),
        **router_shape(config),
        "block_sparse_moe.input_linear.weight": (count, 2 * inner, hidden),
        "block_sparse_moe.output_linear.weight": (count, hidden, inner),
    }


# FlexOlmo (Shi et al. 2025) and Mellum 2 (JetBrains 2026)


def _read_flex_olmo(settings: Settings, shapes: Published) -> dict[str, object]:
    usual = {"rope_theta": 500_000.0, "num_experts": 7, "num_experts_per_tok": 5}
    return _read_olmoe(settings.with_defaults(usual), shapes)


def _flex_olmo_layer(config: ModelConfig) -> Shapes:
    layer = {name: shape for name, shape in _olmoe_layer(config).items() if name != "input_layernorm.weight"}
    return {**layer, "post_feedforward_layernorm.weight": (config.hidden_size,)}


def _read_mellum(settings: Settings, shapes: Published) -> dict[str, object]:
    """Layers with a window rotate in their own way."""
    kinds = settings.get("mlp_layer_types") or ["sparse"]
    if not isinstance(kinds, list) or set(kinds) != {"sparse"}:
        raise ModelError(f"{settings.source} gives only some layers experts, which is not supported for this family")
    by_kind = settings.get("rope_parameters")
    if not isinstance(by_kind, dict) or not isinstance(by_kind.get("full_attention"), dict):
        raise ModelError(f"{settings.source} does not say how layers of full_attention rotate (rope_parameters)")
    usual = {"norm_topk_prob": True, "layer_types": ["full_attention"] * num_layers_of(settings)}
    own = {"rope_parameters": by_kind["full_attention"]}
    settings = settings.with_defaults(usual).replaced(own)
    return {
        **read_qwen_moe(settings, shapes, num_experts=64, experts_per_token=8),
        "qk_norm": True,
        "layer_windows": windows_in_turn(settings, 1, 1024),
        "local_rope_theta": rope_of_windows(settings, by_kind).number("rope_theta", 10_000.0),
    }


# The language model of Qwen3-VL's mixtures (Qwen team 2025)


def _read_qwen3_vl_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    settings = settings.with_defaults({"norm_topk_prob": True})
    return {**read_qwen_moe(settings, shapes, num_experts=60, experts_per_token=4), "qk_norm": True}


def _qwen3_vl_moe_layer(config: ModelConfig) -> Shapes:
    """Experts are in one tensor, each ``[inputs, outputs]``, with gates before ups."""
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
    return {
        **attention_shapes(config),
        **layer_norms(config),
        **router_shape(config),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
        "mlp.experts.down_proj": (count, inner, hidden),
    }


# Hunyuan's mixtures (Hunyuan-A13B, Tencent 2025)


def _read_hunyuan_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    values = read_hunyuan(settings, shapes)
    return {
        **values,
        "num_experts": _of_every_layer(settings, "num_experts"),
        "experts_per_token": _of_every_layer(settings, "moe_topk"),
        "shared_expert_size": values["intermediate_size"],
        "norm_expert_weights": True,
    }


def _of_every_layer(settings: Settings, key: str) -> int:
    """A number that may be given for each layer."""
    given = settings.get(key)
    if isinstance(given, list):
        if not given or any(each != given[0] for each in given):
            raise ModelError(f"{settings.source}: {key} differs between layers, which is not supported")
        settings = Settings({key: given[0]}, settings.source)
    return settings.integer(key, 1)


def _hunyuan_moe_layer(config: ModelConfig) -> Shapes:
    shared = gated_shapes(expert_names(config).shared, config.hidden_size, config.shared_expert_size)
    norms = {f"self_attn.{name}_layernorm.weight": (config.head_dim,) for name in ("query", "key")}
    layer = {name: shape for name, shape in moe_layer(config).items() if "_norm." not in name}
    return {**layer, **norms, **shared}


MIXTURE_FAMILIES: dict[str, Family] = {
    "gpt_oss": Family(_read_gpt_oss, _gpt_oss_layer),
    "olmoe": Family(_read_olmoe, _olmoe_layer),
    "flex_olmo": Family(_read_flex_olmo, _flex_olmo_layer),
    "mellum": Family(_read_mellum, moe_layer),
    "granitemoe": Family(_read_granite_moe, _granite_moe_layer),
    "qwen3_vl_moe_text": Family(_read_qwen3_vl_moe, _qwen3_vl_moe_layer),
    "hunyuan_v1_moe": Family(_read_hunyuan_moe, _hunyuan_moe_layer),
    "qwen2_moe": Family(_read_qwen2_moe, _qwen2_moe_layer),
}
