"""Command A+ (Cohere 2026): Command A with mixtures of experts. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, gated_shapes, num_layers_of, windows_of_kinds
from mooncake.families.gated import attention_shapes, expert_names, expert_shapes, router_shape
from mooncake.families.interleaved import read_cohere
from mooncake.model_config import ModelConfig, Routing, Settings


def _read_cohere2_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    """The first layers may be dense. Those with a window rotate, and dense ones mostly, too."""
    if settings.get("rms_norm_eps") is not None:
        raise ModelError(f"{settings.source} asks for norms of another kind (rms_norm_eps), which is not supported")
    settings = settings.with_defaults({"rope_theta": 10_000.0})
    num_layers, expert_size = num_layers_of(settings), settings.integer("intermediate_size")
    dense = _dense_layers(settings, num_layers)
    prefix_every = settings.integer("prefix_dense_sliding_window_pattern", 1)
    windows = _windows(settings, len(dense), prefix_every)
    turns = [bool(window) or (layer in dense and prefix_every == 1) for layer, window in enumerate(windows)]
    return {
        **read_cohere(settings, shapes),
        "layer_windows": windows,
        "still_layers": tuple(layer for layer in range(num_layers) if not turns[layer]),
        "intermediate_size": settings.integer("prefix_dense_intermediate_size", expert_size),
        "num_experts": settings.integer("num_experts", 8),
        "experts_per_token": settings.integer("num_experts_per_tok", 2),
        "shared_expert_size": expert_size * settings.integer("num_shared_experts", 0),
        **_read_routing(settings, dense, expert_size),
    }


def _read_routing(settings: Settings, dense: tuple[int, ...], expert_size: int) -> dict[str, object]:
    ways = {"softmax": "softmax", "sigmoid": "unbiased_sigmoid"}
    chosen, joined = (
        settings.get(key) or usual
        for key, usual in (("expert_selection_fn", "softmax"), ("shared_expert_combination_strategy", "average"))
    )
    if not isinstance(chosen, str) or chosen not in ways:
        raise ModelError(f"{settings.source} chooses experts by {chosen!r}; supported: {', '.join(ways)}")
    if joined not in ("average", "sum"):
        raise ModelError(f"{settings.source} adds its shared expert by {joined!r}; supported: average, sum")
    has_shared = settings.integer("num_shared_experts", 0) > 0
    factor = 0.5 if has_shared and joined == "average" else 1.0
    return {
        "norm_expert_weights": chosen == "softmax" or settings.flag("norm_topk_prob", True),
        "routing": Routing(dense, expert_size, scoring=ways[chosen], factor=factor, shared_factor=factor),
    }


def _dense_layers(settings: Settings, num_layers: int) -> tuple[int, ...]:
    kinds = settings.get("mlp_layer_types")
    if kinds is None:
        return tuple(range(min(settings.integer("first_k_dense_replace", 0), num_layers)))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise ModelError(f"{settings.source}: mlp_layer_types must be dense or sparse for each of {num_layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def _windows(settings: Settings, num_dense: int, prefix_every: int) -> tuple[int, ...]:
    """Without a list, one layer in so many sees everything, counted anew after the dense ones."""
    every, num_layers = settings.integer("sliding_window_pattern", 4), num_layers_of(settings)
    if min(every, prefix_every) < 1:
        raise ModelError(f"{settings.source}: patterns of windows must be positive, got {every} and {prefix_every}")
    places = [(layer, prefix_every) for layer in range(num_dense)]
    places += [(layer, every) for layer in range(num_layers - num_dense)]
    kinds = ["sliding_attention" if (layer + 1) % each else "full_attention" for layer, each in places]
    given = settings.get("layer_types")
    return windows_of_kinds(settings, kinds if given is None else given, 4096)


def _attention(config: ModelConfig) -> Shapes:
    return attention_shapes(config) | {"input_layernorm.weight": (config.hidden_size,)}


def _layer(config: ModelConfig) -> Shapes:
    assert config.routing is not None
    shared = config.shared_expert_size
    return {
        **_attention(config),
        **router_shape(config),
        **expert_shapes(config, config.routing.expert_size),
        **(gated_shapes(expert_names(config).shared, config.hidden_size, shared) if shared else {}),
    }


def _dense_layer(config: ModelConfig) -> Shapes:
    return _attention(config) | gated_shapes("mlp", config.hidden_size, config.intermediate_size)


COHERE_MOE_FAMILIES: dict[str, Family] = {
    "cohere2_moe": Family(_read_cohere2_moe, _layer, dense_shapes=_dense_layer),
}
