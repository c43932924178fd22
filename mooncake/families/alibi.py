"""ALiBi (Press et al. 2021), and the families that know positions by nothing else: BLOOM and MPT. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, cap_of, norm_shapes, read_sizes
from mooncake.families.gpt_names import gpt_layer, gpt_top
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


def _read_bloom(settings: Settings, shapes: Published) -> dict[str, object]:
    if settings.flag("apply_residual_connection_post_layernorm", False):
        raise ModelError(f"{settings.source} adds to what norms give (post_layernorm), which is not supported")
    width, heads = _present(settings, "n_embed", "hidden_size"), _present(settings, "n_head", "num_attention_heads")
    return {
        **read_sizes(settings, _present(settings, "n_layer", "num_hidden_layers"), width, heads),
        "intermediate_size": settings.integer("n_inner", 4 * settings.integer(width)),
        "max_model_len": settings.integer("seq_length", 2048),
        "rms_eps": settings.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "rotary_dim": 0,
        "alibi_slopes": alibi_slopes(settings.integer(heads)),
    }


def _present(settings: Settings, name: str, other: str) -> str:
    """The one of two names that a number has."""
    return name if settings.get(name) is not None else other


def _bloom_top(config: ModelConfig) -> Shapes:
    return gpt_top(config) | norm_shapes("transformer.word_embeddings_layernorm", config.hidden_size)


# MPT (MosaicML 2023)

_KINDS = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
_NORMS = ("low_precision_layernorm", "layernorm")


def _read_mpt(settings: Settings, shapes: Published) -> dict[str, object]:
    attention, mlp = _inside(settings, "attn_config"), _inside(settings, "ffn_config")
    _refuse_other_mpts(settings, attention, mlp)
    hidden, heads = settings.integer("d_model"), settings.integer("n_heads")
    kind = attention.get("attn_type") or _KINDS[0]
    if kind not in _KINDS:
        raise ModelError(f"{settings.source} asks for the attn_type {kind!r}; supported: {', '.join(_KINDS)}")
    return {
        **read_sizes(settings, "n_layers", "d_model", "n_heads"),
        "intermediate_size": settings.integer("expansion_ratio", 4) * hidden,
        "num_kv_heads": {_KINDS[0]: heads, _KINDS[1]: 1}.get(str(kind)) or attention.integer("kv_n_heads"),
        "max_model_len": settings.integer("max_seq_len", 2048),
        "rms_eps": settings.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "attention_scale": attention.number("softmax_scale", 0.0),
        "qkv_bias": not settings.flag("no_bias", True),
        "qkv_limit": cap_of(attention, "clip_qkv", 0.0),
        "rotary_dim": 0,
        "alibi_slopes": alibi_slopes(heads, attention.number("alibi_bias_max", 8.0)),
    }


def _inside(settings: Settings, key: str) -> Settings:
    tree = settings.get(key)
    return Settings(tree if isinstance(tree, dict) else {}, f"{settings.source}: {key}")


def _refuse_other_mpts(settings: Settings, attention: Settings, mlp: Settings) -> None:
    attention.refuse("qk_ln", "qk_gn", "prefix_lm", "rope")
    if not attention.flag("alibi", True):
        raise ModelError(f"{settings.source} has learned positions in place of ALiBi, which is not supported for MPT")
    if attention.integer("sliding_window_size", -1) != -1:
        raise ModelError(f"{settings.source} asks for a sliding_window_size, which is not supported for MPT")
    if settings.get("logit_scale") is not None:
        raise ModelError(f"{settings.source} asks for a logit_scale, which is not supported")
    kind, norm = mlp.get("ffn_type") or "mptmlp", settings.get("norm_type") or _NORMS[0]
    if kind != "mptmlp" or mlp.get("ffn_act_fn") is not None:
        raise ModelError(f"{settings.source} asks for MLPs other than MPT's (ffn_config), which are not supported")
    if norm not in _NORMS:
        raise ModelError(f"{settings.source} asks for the norm_type {norm!r}; supported: {', '.join(_NORMS)}")


def _mpt_layer(config: ModelConfig) -> Shapes:
    return _as_biased(gpt_layer(config), config)


def _mpt_top(config: ModelConfig) -> Shapes:
    return _as_biased(gpt_top(config), config)


def _as_biased(shapes: Shapes, config: ModelConfig) -> Shapes:
    """Without biases, also of norms, if the model has none."""
    return {name: shape for name, shape in shapes.items() if config.qkv_bias or not name.endswith(".bias")}


ALIBI_FAMILIES: dict[str, Family] = {
    "bloom": Family(_read_bloom, gpt_layer, "transformer.h", _bloom_top, prefix="transformer."),
    "mpt": Family(_read_mpt, _mpt_layer, "transformer.blocks", _mpt_top, prefix="transformer."),
}
