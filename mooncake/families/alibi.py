"""ALiBi (Press et al. 2021), and the families that know positions by nothing else: BLOOM and MPT. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake.errors import ModelError
from mooncake.families.family import Family, Shapes, head_shapes, linear_shapes, norm_shapes
from mooncake.model_config import ModelConfig, Settings

MAX_HEADS = 1 << 12


def alibi_slopes(num_heads: int, most: float = 8.0) -> tuple[float, ...]:
    """What each head's scores lose per token between key and query: 2^(-most · i / n) for the i-th of n heads. If n is
    no power of two, every second slope of the next power, then those between them. Raises ModelError if there can be no
    such heads."""
    if not (1 <= num_heads <= MAX_HEADS and 0 < most <= 64):
        raise ModelError(f"there are no slopes of ALiBi for {num_heads} heads and a largest bias of {most}")
    count = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-most * (i + 1) / count) for i in range(count)]
    return tuple(slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


# BLOOM (BigScience 2022)


def _read_bloom(settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    if settings.flag("apply_residual_connection_post_layernorm", False):
        raise ModelError(f"{settings.source} adds to what norms give (post_layernorm), which is not supported")
    hidden, heads = _integer(settings, "n_embed", "hidden_size"), _integer(settings, "n_head", "num_attention_heads")
    return {
        "num_layers": _integer(settings, "n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": settings.integer("n_inner", 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // max(1, heads),
        "vocab_size": settings.integer("vocab_size"),
        "max_model_len": settings.integer("seq_length", 2048),
        "rms_eps": settings.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "rotary_dim": 0,
        "alibi_slopes": alibi_slopes(heads),
    }


def _integer(settings: Settings, name: str, other: str) -> int:
    """A number that has two names."""
    return settings.integer(name if settings.get(name) is not None else other)


def _bloom_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        **norm_shapes("input_layernorm", hidden),
        **linear_shapes("self_attention.query_key_value", 3 * hidden, hidden),
        **linear_shapes("self_attention.dense", hidden, hidden),
        **norm_shapes("post_attention_layernorm", hidden),
        **linear_shapes("mlp.dense_h_to_4h", inner, hidden),
        **linear_shapes("mlp.dense_4h_to_h", hidden, inner),
    }


def _bloom_top(config: ModelConfig) -> Shapes:
    return {
        "transformer.word_embeddings.weight": (config.vocab_size, config.hidden_size),
        **norm_shapes("transformer.word_embeddings_layernorm", config.hidden_size),
        **norm_shapes("transformer.ln_f", config.hidden_size),
        **head_shapes("lm_head", config),
    }


ALIBI_FAMILIES: dict[str, Family] = {
    "bloom": Family(_read_bloom, _bloom_layer, "transformer.h", _bloom_top, prefix="transformer."),
}
