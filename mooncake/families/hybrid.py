"""Families whose layers partly keep a state in place of KV: Qwen3-Next (Qwen team 2025) and the text models of Qwen3.5
(Qwen team 2026). Torch-free."""

from __future__ import annotations

import math

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, gated_shapes, layer_kinds, num_layers_of
from mooncake.families.gated import attention_shapes, expert_shapes, layer_norms, read_silu, router_shape
from mooncake.model_config import STATE_WINDOW, ModelConfig, Recurrence, Settings

_STACKED = ".mlp.experts.gate_up_proj"  # how Qwen3.5's mixtures are published


def _read_hybrid(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("attention_bias")
    settings = settings.with_defaults({"partial_rotary_factor": 0.25, "head_dim": 256})
    layers = _recurrent_layers(settings)
    heads = settings.integer("linear_num_key_heads", 16), settings.integer("linear_key_head_dim", 128)
    value_heads = settings.integer("linear_num_value_heads", 32), settings.integer("linear_value_head_dim", 128)
    return {
        **read_silu(settings, shapes, partial=True),
        "qk_norm": True,
        "layer_windows": state_windows(num_layers_of(settings), layers),
        "recurrence": Recurrence(
            layers=layers,
            taps=settings.integer("linear_conv_kernel_dim", 4),
            channels=2 * math.prod(heads) + math.prod(value_heads),
            num_value_heads=value_heads[0],
            value_dim=value_heads[1],
            num_key_heads=heads[0],
            key_dim=heads[1],
        ),
    }


def _recurrent_layers(settings: Settings) -> tuple[int, ...]:
    if settings.get("layer_types") is not None:
        return layers_of_kind(settings, "linear_attention")
    every = settings.integer("full_attention_interval", 4)
    if every < 1:
        raise ModelError(f"{settings.source}: full_attention_interval must be positive, got {every}")
    return tuple(layer for layer in range(num_layers_of(settings)) if (layer + 1) % every)


def layers_of_kind(settings: Settings, recurrent: str) -> tuple[int, ...]:
    """Those that ``layer_types`` calls ``recurrent``; the others attend. Raises ModelError for a third kind."""
    kinds = layer_kinds(settings, settings.get("layer_types"), ("full_attention", recurrent))
    return tuple(layer for layer, kind in enumerate(kinds) if kind == recurrent)


def state_windows(num_layers: int, recurrent: tuple[int, ...]) -> tuple[int, ...]:
    """``ModelConfig.layer_windows``."""
    return tuple(STATE_WINDOW if layer in recurrent else 0 for layer in range(num_layers))


def _read_dense(settings: Settings, shapes: Published) -> dict[str, object]:
    return {**_read_hybrid(settings, shapes), "intermediate_size": settings.integer("intermediate_size")}


def _read_mixture(settings: Settings, shapes: Published) -> dict[str, object]:
    if settings.integer("decoder_sparse_step", 1) != 1 or settings.get("mlp_only_layers"):
        raise ModelError(f"{settings.source} gives only some layers experts, which is not supported")
    return {
        **_read_hybrid(settings, shapes),
        "intermediate_size": settings.integer("moe_intermediate_size", 512),
        "num_experts": settings.integer("num_experts"),
        "experts_per_token": settings.integer("num_experts_per_tok"),
        "norm_expert_weights": settings.flag("norm_topk_prob", True),
        "shared_expert_size": settings.integer("shared_expert_intermediate_size", 512),
        "stacked_experts": any(name.endswith(_STACKED) for name in shapes),
    }


def _attending_layer(config: ModelConfig) -> Shapes:
    queries_and_gates = (2 * config.num_heads * config.head_dim, config.hidden_size)
    return attention_shapes(config) | {"self_attn.q_proj.weight": queries_and_gates} | _rest_of_layer(config)


def _recurrent_layer(config: ModelConfig) -> Shapes:
    shape, hidden = config.recurrence, config.hidden_size
    assert shape is not None
    values = shape.num_value_heads * shape.value_dim
    if config.architecture == "qwen3_next":
        inputs = {"in_proj_qkvz": shape.channels + values, "in_proj_ba": 2 * shape.num_value_heads}
    else:
        of_head = dict.fromkeys(("in_proj_b", "in_proj_a"), shape.num_value_heads)
        inputs = {"in_proj_qkv": shape.channels, "in_proj_z": values, **of_head}
    return {
        **{f"linear_attn.{name}.weight": (size, hidden) for name, size in inputs.items()},
        "linear_attn.conv1d.weight": (shape.channels, 1, shape.taps),
        "linear_attn.dt_bias": (shape.num_value_heads,),
        "linear_attn.A_log": (shape.num_value_heads,),
        "linear_attn.norm.weight": (shape.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
        **_rest_of_layer(config),
    }


def _rest_of_layer(config: ModelConfig) -> Shapes:
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
    if not count:
        return layer_norms(config) | gated_shapes("mlp", hidden, inner)
    stacked = {"mlp.experts.gate_up_proj": (count, 2 * inner, hidden), "mlp.experts.down_proj": (count, hidden, inner)}
    return {
        **layer_norms(config),
        **router_shape(config),
        **(stacked if config.stacked_experts else expert_shapes(config, inner)),
        **gated_shapes("mlp.shared_expert", hidden, config.shared_expert_size),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


def _layer(config: ModelConfig, layer: int) -> Shapes:
    assert config.recurrence is not None
    return (_recurrent_layer if layer in config.recurrence.layers else _attending_layer)(config)


HYBRID_FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(_read_mixture, _attending_layer, own_shapes=_layer),
    "qwen3_5_text": Family(_read_dense, _attending_layer, own_shapes=_layer),
    "qwen3_5_moe_text": Family(_read_mixture, _attending_layer, own_shapes=_layer),
}
