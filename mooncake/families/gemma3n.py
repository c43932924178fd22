"""Gemma 3n's language models (Gemma team 2025): several residual streams, an embedding of each layer for every token,
and last layers without KV of their own. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, activation, cap_of, num_layers_of
from mooncake.families.gated import gemma3_rope, windows_in_turn
from mooncake.families.gemma4 import input_shapes, layer_shapes, parts_of, positive
from mooncake.families.layer_settings import sources_of_last
from mooncake.model_config import GemmaParts, ModelConfig, Settings, Streams

_DEFAULTS: dict[str, object] = {
    **{"vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768},
    **{"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 15},
    **{"altup_num_inputs": 4, "laurel_rank": 64},
}
"""Of transformers, which published configurations may leave out."""


def _read(settings: Settings, shapes: Published) -> dict[str, object]:
    settings = settings.with_defaults(_DEFAULTS)
    if settings.flag("attention_bias", False) or settings.integer("altup_active_idx", 0):
        raise ModelError(f"{settings.source} asks for attention_bias or altup_active_idx, which is not supported")
    num_layers, head_dim = num_layers_of(settings), settings.integer("head_dim")
    windows, shared = list(windows_in_turn(settings, 5, 512)), settings.integer("num_kv_shared_layers")
    rope, local_theta = gemma3_rope(settings, head_dim)
    streams = Streams(
        count=positive(settings, "altup_num_inputs", 16),
        low_rank=positive(settings, "laurel_rank"),
        are_scaled=settings.flag("altup_correct_scale", True),
        sparsity=_sparsity(settings, num_layers),
    )
    parts = GemmaParts(
        input_size=positive(settings, "hidden_size_per_layer_input"),
        input_vocab=positive(settings, "vocab_size_per_layer_input"),
        streams=streams,
    )
    return {
        "num_layers": num_layers,
        "hidden_size": settings.integer("hidden_size"),
        "intermediate_size": _inner(settings, num_layers),
        "num_heads": settings.integer("num_attention_heads"),
        "num_kv_heads": settings.integer("num_key_value_heads"),
        "head_dim": head_dim,
        "vocab_size": settings.integer("vocab_size"),
        "max_model_len": settings.integer("max_position_embeddings"),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "local_rope_theta": local_theta,
        "rms_eps": settings.number("rms_norm_eps", 1e-6),
        "activation": activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
        "layer_windows": tuple(windows),
        "kv_sources": tuple(sources_of_last(settings, windows, shared)) if shared else (),
        "attention_scale": 1.0,
        "logit_cap": cap_of(settings, "final_logit_softcapping", 30.0),
        "qk_norm": True,
        "gemma": parts,
    }


def _inner(settings: Settings, num_layers: int) -> int:
    """Of all layers; given once for each, too."""
    given = settings.get("intermediate_size")
    if not isinstance(given, list):
        return settings.integer("intermediate_size")
    if len(given) != num_layers or len(set(given)) != 1 or type(given[0]) is not int:
        raise ModelError(
            f"{settings.source}: intermediate_size must be the same number for each of {num_layers} layers"
        )
    return given[0]


def _sparsity(settings: Settings, num_layers: int) -> tuple[float, ...]:
    sparse = 10 if num_layers > 10 else 0
    given = settings.get("activation_sparsity_pattern")
    shares = [0.95] * sparse + [0.0] * (num_layers - sparse) if given is None else given
    if not isinstance(shares, list) or len(shares) != num_layers:
        raise ModelError(f"{settings.source}: activation_sparsity_pattern must have a share for each layer")
    if not all(isinstance(share, (int, float)) and 0 <= share < 1 for share in shares):
        raise ModelError(f"{settings.source}: activation_sparsity_pattern must have shares from 0 to less than 1")
    return tuple(map(float, shares))


def _top(config: ModelConfig) -> Shapes:
    square = (config.hidden_size, config.hidden_size)
    streams = range(_streams(config).count - 1)
    names = [f"model.altup_{kind}projections.{stream}.weight" for kind in ("", "unembed_") for stream in streams]
    return input_shapes(config) | dict.fromkeys(names, square)


def _layer(config: ModelConfig, layer: int) -> Shapes:
    hidden, streams = config.hidden_size, _streams(config)
    count = streams.count
    return {
        **layer_shapes(config, layer),
        "altup.router_norm.weight": (hidden,),
        "altup.modality_router.weight": (count, hidden),
        "altup.prediction_coefs.weight": (count * count, count),
        "altup.correction_coefs.weight": (count, count),
        "altup.correct_output_scale": (hidden,),
        "laurel.linear_left.weight": (streams.low_rank, hidden),
        "laurel.linear_right.weight": (hidden, streams.low_rank),
        "laurel.post_laurel_norm.weight": (hidden,),
    }


def _streams(config: ModelConfig) -> Streams:
    streams = parts_of(config).streams
    assert streams is not None
    return streams


GEMMA3N_FAMILIES: dict[str, Family] = {
    "gemma3n_text": Family(_read, lambda config: {}, top_shapes=_top, own_shapes=_layer)
}
