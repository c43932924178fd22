"""Llama 4's language model (Meta 2025): layers that rotate see chunks, and some layers have experts. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, gated_shapes, layer_kinds, num_layers_of
from mooncake.families.gated import attention_shapes, expert_names, layer_norms, read_silu, router_shape
from mooncake.families.layer_settings import still_layers
from mooncake.model_config import MAX_POSITIONS, ModelConfig, Routing, Settings


def _read_llama4(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("attention_bias")
    num_layers, expert_size = num_layers_of(settings), settings.integer("intermediate_size")
    still = still_layers(settings, num_layers)
    return {
        **read_silu(settings.with_defaults({"head_dim": 128}), shapes, default_theta=500_000.0),
        "intermediate_size": settings.integer("intermediate_size_mlp", 16_384),
        "qk_norm": settings.flag("use_qk_norm", True),
        "layer_windows": _chunks(settings, still, num_layers),
        "still_layers": still,
        "num_experts": settings.integer("num_local_experts", 16),
        "experts_per_token": settings.integer("num_experts_per_tok", 1),
        "shared_expert_size": expert_size,
        "routing": Routing(_dense_layers(settings, num_layers), expert_size, scoring="sigmoid_inputs", factor=1.0),
        **(_growth(settings) if still and settings.flag("attn_temperature_tuning", True) else {}),
    }


def _chunks(settings: Settings, still: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """As ``ModelConfig.layer_windows``. Without a list, what rotates sees chunks."""
    kinds = settings.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if layer in still else "chunked_attention" for layer in range(num_layers)]
    kinds = layer_kinds(settings, kinds, ("full_attention", "chunked_attention"))
    size = settings.integer("attention_chunk_size", 8192)
    if not 0 < size <= MAX_POSITIONS:
        raise ModelError(f"{settings.source}: attention_chunk_size must be positive, got {size}")
    return tuple(-size if kind == "chunked_attention" else 0 for kind in kinds)


def _dense_layers(settings: Settings, num_layers: int) -> tuple[int, ...]:
    sparse, every = settings.get("moe_layers"), settings.integer("interleave_moe_layer_step", 1)
    if sparse is None:
        if every < 1:
            raise ModelError(f"{settings.source}: interleave_moe_layer_step must be positive, got {every}")
        sparse = list(range(every - 1, num_layers, every))
    if not isinstance(sparse, list) or not all(type(layer) is int for layer in sparse):
        raise ModelError(f"{settings.source}: moe_layers must be numbers of layers")
    return tuple(layer for layer in range(num_layers) if layer not in sparse)


def _growth(settings: Settings) -> dict[str, object]:
    """Of queries in layers that do not rotate."""
    growth, span = settings.number("attn_scale", 0.1), settings.integer("floor_scale", 8192)
    if not 0 <= growth < 1e6 or not 0 < span <= MAX_POSITIONS:
        what = "attn_scale must not be negative, and floor_scale must be positive"
        raise ModelError(f"{settings.source}: {what}, got {growth} and {span}")
    return {"query_growth": growth, "query_span": span, "query_offset": 1}


def _attention(config: ModelConfig) -> Shapes:
    """Norms of heads have no weights."""
    shapes = attention_shapes(config) | layer_norms(config)
    return {
        name: shape for name, shape in shapes.items() if not name.startswith(("self_attn.q_norm", "self_attn.k_norm"))
    }


def _layer(config: ModelConfig) -> Shapes:
    """Experts are in one tensor, each ``[inputs, outputs]``, with gates before ups."""
    hidden, count, names = config.hidden_size, config.num_experts, expert_names(config)
    assert config.routing is not None
    inner = config.routing.expert_size
    return {
        **_attention(config),
        **router_shape(config),
        f"{names.experts}.gate_up_proj": (count, hidden, 2 * inner),
        f"{names.experts}.down_proj": (count, inner, hidden),
        **gated_shapes(names.shared, hidden, config.shared_expert_size),
    }


def _dense_layer(config: ModelConfig) -> Shapes:
    return _attention(config) | gated_shapes(expert_names(config).dense, config.hidden_size, config.intermediate_size)


LLAMA4_FAMILIES: dict[str, Family] = {
    "llama4_text": Family(_read_llama4, _layer, dense_shapes=_dense_layer),
}
