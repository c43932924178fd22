"""LFM2 (Liquid AI 2025): most layers are short convolutions, the others attend. MLPs are dense, or mixtures behind the
first layers. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, head_shapes, num_layers_of
from mooncake.families.gated import expert_names, expert_shapes, read_silu, router_shape
from mooncake.families.hybrid import layers_of_kind, state_windows
from mooncake.families.routed import read_mixture
from mooncake.model_config import ModelConfig, Recurrence, Settings


def _read_lfm2(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("conv_bias")
    num_layers, hidden = num_layers_of(settings), settings.integer("hidden_size")
    if settings.get("layer_types") is not None:
        recurrent = layers_of_kind(settings, "conv")
    else:
        attending = settings.get("full_attn_idxs")
        if not isinstance(attending, list):
            raise ModelError(f"{settings.source} says of no layer that it attends (layer_types, full_attn_idxs)")
        recurrent = tuple(layer for layer in range(num_layers) if layer not in attending)
    return {
        **read_silu(settings, shapes, default_theta=1e6),
        "intermediate_size": _mlp_size(settings),
        "rms_eps": settings.number("norm_eps", 1e-5),
        "tie_embeddings": settings.flag("tie_embedding", settings.flag("tie_word_embeddings", True)),
        "qk_norm": True,
        "layer_windows": state_windows(num_layers, recurrent),
        "recurrence": Recurrence(layers=recurrent, taps=settings.integer("conv_L_cache", 3), channels=hidden),
    }


def _read_lfm2_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    usual = {"num_experts_per_tok": 4, "moe_intermediate_size": 1792, "norm_topk_prob": True, "intermediate_size": 7168}
    settings = settings.with_defaults(usual)
    counts = {
        "n_routed_experts": settings.integer("num_experts", 32),
        "first_k_dense_replace": settings.integer("num_dense_layers", 2),
    }
    scoring = "sigmoid" if settings.flag("use_expert_bias", True) else "unbiased_sigmoid"
    mixture = read_mixture(settings.replaced(counts), scoring, 1.0, is_grouped=False)
    own = {"intermediate_size": settings.integer("intermediate_size"), "shared_expert_size": 0}
    return {**_read_lfm2(settings, shapes), **mixture, **own}


def _mlp_size(settings: Settings) -> int:
    size = settings.integer("block_ff_dim", settings.integer("intermediate_size", 12_288))
    if not settings.flag("block_auto_adjust_ff_dim", True):
        return size
    factor, unit = settings.number("block_ffn_dim_multiplier", 1.0), settings.integer("block_multiple_of", 256)
    if not 0 < factor < 1e6 or unit < 1:
        raise ModelError(f"{settings.source}: block_ffn_dim_multiplier and block_multiple_of must be positive")
    return -(-int(factor * int(2 * size / 3)) // unit) * unit


def _layer(config: ModelConfig, layer: int) -> Shapes:
    assert config.recurrence is not None
    mixer = _convolution(config) if layer in config.recurrence.layers else _attention(config)
    is_dense = config.routing is None or layer in config.routing.dense_layers
    return mixer | _norms(config) | (_dense(config) if is_dense else _mixture(config))


def _attention(config: ModelConfig) -> Shapes:
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    return {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.out_proj.weight": (hidden, query),
        "self_attn.q_layernorm.weight": (dim,),
        "self_attn.k_layernorm.weight": (dim,),
    }


def _convolution(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    assert config.recurrence is not None
    return {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.conv.weight": (hidden, 1, config.recurrence.taps),
        "conv.out_proj.weight": (hidden, hidden),
    }


def _norms(config: ModelConfig) -> Shapes:
    return {"operator_norm.weight": (config.hidden_size,), "ffn_norm.weight": (config.hidden_size,)}


def _mixture(config: ModelConfig) -> Shapes:
    assert config.routing is not None
    shapes = router_shape(config) | expert_shapes(config, config.routing.expert_size)
    return shapes | (
        {expert_names(config).choice_bias: (config.num_experts,)} if config.routing.has_choice_bias else {}
    )


def _dense(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "feed_forward.w1.weight": (inner, hidden),
        "feed_forward.w3.weight": (inner, hidden),
        "feed_forward.w2.weight": (hidden, inner),
    }


def _top(config: ModelConfig) -> Shapes:
    table = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    return {**table, "model.embedding_norm.weight": (config.hidden_size,), **head_shapes("lm_head", config)}


LFM2_FAMILIES: dict[str, Family] = {
    "lfm2": Family(_read_lfm2, _attention, top_shapes=_top, own_shapes=_layer),
    "lfm2_moe": Family(_read_lfm2_moe, _attention, top_shapes=_top, own_shapes=_layer),
}
