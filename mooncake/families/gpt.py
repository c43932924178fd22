"""The GPT line: GPT-2, StarCoder, GPT-J, OPT, GPT-NeoX, StarCoder2 and Falcon. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.alibi import alibi_slopes
from mooncake.families.family import Family, Published, Shapes, activation, read_sizes
from mooncake.families.gpt_names import gpt_layer, gpt_top
from mooncake.families.rope_settings import read_rope
from mooncake.model_config import ModelConfig, Settings

# GPT-2 (Radford et al. 2019)


def _read_gpt2(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention")
    return {
        **read_sizes(settings, "n_layer", "n_embd", "n_head"),
        "intermediate_size": settings.integer("n_inner", 4 * settings.integer("n_embd")),
        "max_model_len": settings.integer("n_positions"),
        "rms_eps": settings.number("layer_norm_epsilon", 1e-5),
        "activation": activation(settings, "activation_function", "gelu_new"),
        "attention_scale": 0.0 if settings.flag("scale_attn_weights", True) else 1.0,
        "qkv_bias": True,
        "rotary_dim": 0,
    }


def _gpt2_layer(config: ModelConfig) -> Shapes:
    """Its matrices are stored ``[in, out]``."""
    return {name: shape[::-1] for name, shape in gpt_layer(config).items()}


def _gpt2_top(config: ModelConfig) -> Shapes:
    return {"transformer.wpe.weight": (config.max_model_len, config.hidden_size), **gpt_top(config)}


# StarCoder and SantaCoder (BigCode 2023)


def _read_gpt_bigcode(settings: Settings, shapes: Published) -> dict[str, object]:
    if not settings.flag("multi_query", True):
        raise ModelError(f"{settings.source} has keys and values for each head (multi_query), which is not supported")
    settings = settings.with_defaults({"activation_function": "gelu_pytorch_tanh"})
    return {**_read_gpt2(settings, shapes), "num_kv_heads": 1}


# GPT-J (Wang and Komatsuzaki 2021)


def _read_gptj(settings: Settings, shapes: Published) -> dict[str, object]:
    hidden, heads = settings.integer("n_embd"), settings.integer("n_head")
    head_dim, rotary_dim = hidden // max(1, heads), settings.integer("rotary_dim", 64)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"{settings.source} rotates {rotary_dim} of a head's {head_dim} elements")
    return {
        **read_sizes(settings, "n_layer", "n_embd", "n_head"),
        "intermediate_size": settings.integer("n_inner", 4 * hidden),
        "max_model_len": settings.integer("n_positions"),
        "rms_eps": settings.number("layer_norm_epsilon", 1e-5),
        "activation": activation(settings, "activation_function", "gelu_new"),
        "tie_embeddings": False,
        "rotary_dim": rotary_dim,
        "parallel_residual": True,
    }


# OPT (Zhang et al. 2022)


def _read_opt(settings: Settings, shapes: Published) -> dict[str, object]:
    hidden = settings.integer("hidden_size")
    if not settings.flag("do_layer_norm_before", True):
        raise ModelError(f"{settings.source} norms after each layer (as OPT-350M alone does), which is not supported")
    if settings.integer("word_embed_proj_dim", hidden) != hidden:
        raise ModelError(f"{settings.source} projects its embeddings (as OPT-350M alone does), which is not supported")
    if settings.flag("_remove_final_layer_norm", False) or not settings.flag("enable_bias", True):
        raise ModelError(f"{settings.source} leaves out norms or biases that OPT has, which is not supported")
    return {
        **read_sizes(settings, "num_hidden_layers", "hidden_size", "num_attention_heads"),
        "intermediate_size": settings.integer("ffn_dim"),
        "max_model_len": settings.integer("max_position_embeddings"),
        "rms_eps": 1e-5,
        "activation": activation(settings, "activation_function", "relu"),
        "qkv_bias": True,
        "rotary_dim": 0,
    }


OPT_POSITION_OFFSET = 2
"""Rows of OPT's position table that no position uses: a leftover of its training code."""


def _opt_top(config: ModelConfig) -> Shapes:
    positions = config.max_model_len + OPT_POSITION_OFFSET
    return {"model.decoder.embed_positions.weight": (positions, config.hidden_size), **gpt_top(config)}


# GPT-NeoX (Black et al. 2022; Pythia)


def _read_gpt_neox(settings: Settings, shapes: Published) -> dict[str, object]:
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_dim = hidden // max(1, heads)
    if not settings.flag("attention_bias", True):
        raise ModelError(f"{settings.source} has no attention_bias, which is not supported")
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope = settings.part(parameters)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ModelError(f"{settings.source} scales its positions by {kind!r}, which is not supported for this family")
    share = rope.number("partial_rotary_factor", settings.number("rotary_pct", 0.25))
    if not 0 <= share <= 1:
        raise ModelError(f"{settings.source}: rotary_pct must be a share of a head, got {share}")
    return {
        **read_sizes(settings, "num_hidden_layers", "hidden_size", "num_attention_heads"),
        "intermediate_size": settings.integer("intermediate_size"),
        "max_model_len": settings.integer("max_position_embeddings"),
        "rope_theta": rope.number("rope_theta", settings.number("rotary_emb_base", 10_000.0)),
        "rms_eps": settings.number("layer_norm_eps", 1e-5),
        "activation": activation(settings, "hidden_act", "gelu"),
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "qkv_bias": True,
        "rotary_dim": int(head_dim * share),
        "parallel_residual": settings.flag("use_parallel_residual", True),
    }


# StarCoder2 (Lozhkov et al. 2024)


def _read_starcoder2(settings: Settings, shapes: Published) -> dict[str, object]:
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    if not settings.flag("use_bias", True):
        raise ModelError(f"{settings.source} leaves out the biases that StarCoder2 has, which is not supported")
    rope = read_rope(settings, hidden // max(1, heads))
    return {
        **read_sizes(settings, "num_hidden_layers", "hidden_size", "num_attention_heads"),
        "intermediate_size": settings.integer("intermediate_size"),
        "num_kv_heads": settings.integer("num_key_value_heads", heads),
        **rope.values,
        "rms_eps": settings.number("norm_epsilon", 1e-5),
        "activation": activation(settings, "hidden_act", "gelu_pytorch_tanh"),
        "qkv_bias": True,
        "sliding_window": settings.integer("sliding_window", 0) or None,
    }


# Falcon (Almazrouei et al. 2023)


def _read_falcon(settings: Settings, shapes: Published) -> dict[str, object]:
    is_new = settings.flag("new_decoder_architecture", False)  # 40B, 180B and 2-11B
    is_parallel, has_alibi = settings.flag("parallel_attn", True), settings.flag("alibi", False)
    if is_new and not is_parallel:
        raise ModelError(f"{settings.source} has no parallel_attn in the new architecture, which is not supported")
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_dim, owners = hidden // max(1, heads), 1 if settings.flag("multi_query", True) else heads
    settings = settings.with_defaults({"max_position_embeddings": 2048})
    rope = read_rope(settings, head_dim)
    return {
        **read_sizes(settings, "num_hidden_layers", "hidden_size", "num_attention_heads"),
        "intermediate_size": settings.integer("ffn_hidden_size", 4 * hidden),
        "num_kv_heads": settings.integer("num_kv_heads", heads) if is_new else owners,
        **rope.values,
        "rms_eps": settings.number("layer_norm_epsilon", 1e-5),
        "activation": activation(settings, "activation", "gelu"),
        "qkv_bias": settings.flag("bias", False),
        "parallel_residual": is_parallel,
        "mlp_has_norm": not is_parallel or (is_new and settings.integer("num_ln_in_parallel_attn", 2) == 2),
        # Scores are scaled after they lose with distance, for which transformers alone rounds slopes to bfloat16.
        "alibi_slopes": tuple(slope * head_dim**-0.5 for slope in alibi_slopes(heads)) if has_alibi else (),
        "rotary_dim": 0 if has_alibi else -1,
    }


GPT_FAMILIES: dict[str, Family] = {
    "gpt2": Family(_read_gpt2, _gpt2_layer, "transformer.h", _gpt2_top, prefix="transformer."),
    "gpt_bigcode": Family(_read_gpt_bigcode, gpt_layer, "transformer.h", _gpt2_top, prefix="transformer."),
    "gptj": Family(_read_gptj, gpt_layer, "transformer.h", gpt_top, prefix="transformer."),
    "opt": Family(_read_opt, gpt_layer, "model.decoder.layers", _opt_top, prefix="model."),
    "gpt_neox": Family(_read_gpt_neox, gpt_layer, "gpt_neox.layers", gpt_top, prefix="gpt_neox."),
    "starcoder2": Family(_read_starcoder2, gpt_layer, top_shapes=gpt_top),
    "falcon": Family(_read_falcon, gpt_layer, "transformer.h", gpt_top, prefix="transformer."),
}
