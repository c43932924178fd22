"""Gemma 4's language models (Gemma team 2026): layers of two kinds with other heads each, the last ones perhaps without
KV of their own, and perhaps an embedding of each layer, or a mixture beside each MLP. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake.errors import ModelError
from mooncake.families.family import (
    Family,
    Published,
    Shapes,
    activation,
    cap_of,
    gated_shapes,
    llama_top,
    num_layers_of,
)
from mooncake.families.gated import rope_of_windows, windows_in_turn
from mooncake.families.layer_settings import sources_of_last
from mooncake.model_config import MAX_POSITIONS, GemmaParts, ModelConfig, Settings

_TOKENS = 262_144
_DEFAULTS: dict[str, object] = {
    **{"vocab_size": _TOKENS, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072},
}
"""Of transformers, which published configurations may leave out."""

_UNIFIED_DEFAULTS: dict[str, object] = {"max_position_embeddings": 262_144, "sliding_window": 1024}


def _read_gemma4(settings: Settings, shapes: Published) -> dict[str, object]:
    settings = settings.with_defaults({**_DEFAULTS, "hidden_size_per_layer_input": 256})
    size = settings.integer("hidden_size_per_layer_input")
    vocab, tokens = settings.integer("vocab_size_per_layer_input", _TOKENS), settings.integer("vocab_size")
    if size < 0 or (size and vocab < tokens):
        what = f"embeddings of {size} for {vocab} tokens in each layer, of {tokens} tokens"
        raise ModelError(f"{settings.source} asks for {what}, which is not supported")
    has_mixture = settings.flag("enable_moe_block", False)
    mixture: dict[str, object] = (
        {
            "num_experts": settings.integer("num_experts"),
            "experts_per_token": settings.integer("top_k_experts"),
        }
        if has_mixture
        else {}
    )
    parts = GemmaParts(
        input_size=size,
        input_vocab=vocab if size else 0,
        has_wide_mlps=settings.flag("use_double_wide_mlp", False),
        keys_are_values=settings.flag("attention_k_eq_v", False),
        expert_size=positive(settings, "moe_intermediate_size") if has_mixture else 0,
    )
    values = _read(settings)
    if has_mixture and values["activation"] not in ("gelu_tanh", "silu"):
        raise ModelError(f"{settings.source} asks for experts with the activation {values['activation']!r}")
    return {**values, **mixture, "gemma": parts}


def _read_unified(settings: Settings, shapes: Published) -> dict[str, object]:
    settings = settings.with_defaults({**_DEFAULTS, **_UNIFIED_DEFAULTS})
    parts = GemmaParts(
        has_wide_mlps=settings.flag("use_double_wide_mlp", False),
        keys_are_values=settings.flag("attention_k_eq_v", False),
    )
    return {**_read(settings), "gemma": parts}


def _read(settings: Settings) -> dict[str, object]:
    """What all of them have."""
    settings.refuse("attention_bias")
    if settings.get("use_bidirectional_attention") == "all":
        raise ModelError(f"{settings.source} lets tokens see later ones, which is not supported")
    num_layers, windows = num_layers_of(settings), list(windows_in_turn(settings, 6, 512))
    windows[-1] = 0  # whatever the list says, in transformers too
    heads = _heads(settings, windows)
    wide_dims = {dim for window, (_, dim) in zip(windows, heads, strict=True) if not window}
    theta, scaling = _wide_rotation(settings)
    local = rope_of_windows(settings, _by_kind(settings))
    num_positions = settings.integer("max_position_embeddings")
    if len(wide_dims) > 1 or not 0 < num_positions <= MAX_POSITIONS:
        raise ModelError(
            f"{settings.source}: global layers have heads of one size, and at most {MAX_POSITIONS} positions"
        )
    shared = settings.integer("num_kv_shared_layers", 0)
    return {
        "num_layers": num_layers,
        "hidden_size": settings.integer("hidden_size"),
        "intermediate_size": settings.integer("intermediate_size"),
        "num_heads": settings.integer("num_attention_heads"),
        "num_kv_heads": heads[0][0],
        "head_dim": heads[0][1],
        "layer_heads": tuple(heads) if len(set(heads)) > 1 else (),
        "vocab_size": settings.integer("vocab_size"),
        "max_model_len": num_positions,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local.number("rope_theta", 10_000.0),
        "rms_eps": settings.number("rms_norm_eps", 1e-6),
        "activation": activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
        "layer_windows": tuple(windows),
        "kv_sources": tuple(sources_of_last(settings, windows, shared)) if shared else (),
        "attention_scale": 1.0,
        "logit_cap": cap_of(settings, "final_logit_softcapping", 0.0),
        "qk_norm": True,
    }


def _heads(settings: Settings, windows: list[int]) -> list[tuple[int, int]]:
    """KV heads of each layer, and their size: from a list of what differs, or from the keys of global layers."""
    local = settings.integer("num_key_value_heads"), settings.integer("head_dim")
    listed = settings.get("per_layer_config")
    if listed is None:
        number = "num_global_key_value_heads" if settings.flag("attention_k_eq_v", False) else "num_key_value_heads"
        wide = settings.integer(number, local[0]), settings.integer("global_head_dim", 512)
        return [local if window else wide for window in windows]
    if not isinstance(listed, dict) or not all(isinstance(own, dict) for own in listed.values()):
        raise ModelError(f"{settings.source}: per_layer_config must have settings of single layers")
    others = {key for own in listed.values() for key in own} - {"num_key_value_heads", "head_dim"}
    if others:
        raise ModelError(f"{settings.source} sets {min(others)} for single layers, which is not supported")
    of_layers = [Settings(listed.get(str(layer), {}), settings.source) for layer in range(len(windows))]
    return [(own.integer("num_key_value_heads", local[0]), own.integer("head_dim", local[1])) for own in of_layers]


def _by_kind(settings: Settings) -> Mapping[str, object]:
    given = settings.get("rope_parameters")
    return given if isinstance(given, dict) else {}


def _wide_rotation(settings: Settings) -> tuple[float, dict[str, object] | None]:
    """Theta and ``ModelConfig.rope_scaling`` of global layers."""
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    given = _by_kind(settings).get("full_attention", default)
    rope = settings.part(given)
    theta, kind = rope.number("rope_theta", 1_000_000.0), rope.get("rope_type") or "default"
    if kind == "default":
        return theta, None
    share, factor = rope.number("partial_rotary_factor", 1.0), rope.number("factor", 1.0)
    if kind != "proportional" or not (0 <= share <= 1 and 0 < factor < 1e6):
        raise ModelError(f"{settings.source} rotates heads by {kind!r}, a share of {share} and a factor of {factor}")
    return theta, {"rope_type": kind, "partial_rotary_factor": share, "factor": factor}


def positive(settings: Settings, key: str, most: int = 1 << 24) -> int:
    value = settings.integer(key)
    if not 0 < value <= most:
        raise ModelError(f"{settings.source}: {key} must be positive and at most {most}, got {value}")
    return value


def input_shapes(config: ModelConfig) -> Shapes:
    size = parts_of(config).input_size
    if not size:
        return llama_top(config)
    return {
        **llama_top(config),
        "model.embed_tokens_per_layer.weight": (parts_of(config).input_vocab, config.num_layers * size),
        "model.per_layer_model_projection.weight": (config.num_layers * size, config.hidden_size),
        "model.per_layer_projection_norm.weight": (size,),
    }


def _layer(config: ModelConfig, layer: int) -> Shapes:
    return layer_shapes(config, layer) | {"layer_scalar": (1,)}


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    parts, hidden, owns_kv = parts_of(config), config.hidden_size, config.owns_kv(layer)
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    inner = config.intermediate_size * (2 if parts.has_wide_mlps and not owns_kv else 1)
    shapes = _attention(config, layer) | gated_shapes("mlp", hidden, inner)
    if parts.input_size:
        norms.append("post_per_layer_input_norm")
        shapes["per_layer_input_gate.weight"] = (parts.input_size, hidden)
        shapes["per_layer_projection.weight"] = (hidden, parts.input_size)
    if parts.expert_size:
        norms += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
        shapes["router.proj.weight"] = (config.num_experts, hidden)
        shapes |= {"router.scale": (hidden,), "router.per_expert_scale": (config.num_experts,)}
        shapes["experts.gate_up_proj"] = (config.num_experts, 2 * parts.expert_size, hidden)
        shapes["experts.down_proj"] = (config.num_experts, hidden, parts.expert_size)
    return shapes | {f"{norm}.weight": (hidden,) for norm in norms}


def _attention(config: ModelConfig, layer: int) -> Shapes:
    (num_kv_heads, dim), hidden = config.heads_of(layer), config.hidden_size
    query, kv = config.num_heads * dim, num_kv_heads * dim
    names = ["k"] if keys_are_values(config, layer) else ["k", "v"]
    own = {f"self_attn.{name}_proj.weight": (kv, hidden) for name in names} | {"self_attn.k_norm.weight": (dim,)}
    return {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (dim,),
        **(own if config.owns_kv(layer) else {}),
    }


def keys_are_values(config: ModelConfig, layer: int) -> bool:
    return parts_of(config).keys_are_values and not config.window_of(layer)


def parts_of(config: ModelConfig) -> GemmaParts:
    assert config.gemma is not None
    return config.gemma


GEMMA4_FAMILIES: dict[str, Family] = {
    name: Family(read, lambda config: {}, top_shapes=input_shapes, own_shapes=_layer)
    for name, read in (("gemma4_text", _read_gemma4), ("gemma4_unified_text", _read_unified))
}
