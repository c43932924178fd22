"""From the metadata of a GGUF file to the fields of ``ModelConfig``: a reader for each architecture. Torch-free.

Keys are those that llama.cpp's converter writes (``gguf.constants.Keys``). What it does not write, because llama.cpp
knows it of the architecture, is a constant here: which layers have a window, Gemma's softmax scale, activations.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake.errors import ModelError
from mooncake.gguf_metadata import Metadata
from mooncake.gguf_rope import context_of, read_scaling, rope_theta
from mooncake.model_config import MAX_LAYERS

Fields = dict[str, object]

_RMS_EPS, _LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _decoder(meta: Metadata, eps: str = _RMS_EPS, partial: bool = False, truncate: bool = True) -> Fields:
    """What all architectures say alike. ``partial``: a part of each head may rotate; ``truncate``: of YaRN."""
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", hidden // max(1, heads))
    if (value_dim := meta.integer("attention.value_length", head_dim)) != head_dim:
        raise ModelError(f"{meta.source} has values of {value_dim} elements and keys of {head_dim}")
    rotary_dim = meta.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not partial:
        raise ModelError(f"{meta.source} rotates only a part of each head, which is not supported")
    if partial and (not 0 < rotary_dim <= head_dim or rotary_dim % 2):
        raise meta.wrong("rope.dimension_count", f"must be even and at most {head_dim}, got {rotary_dim}")
    scaling = read_scaling(meta, rotary_dim, truncate)
    return {
        "num_layers": meta.integer("block_count"),
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_heads": heads,
        "num_kv_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_model_len": context_of(meta, scaling),
        "rope_theta": rope_theta(meta),
        "rope_scaling": scaling,
        "rotary_dim": -1 if rotary_dim == head_dim else rotary_dim,
        "rms_eps": meta.number(eps),
    }


def _window(meta: Metadata) -> int | None:
    return meta.integer("attention.sliding_window", 0) or None


def _windows(meta: Metadata, every: int, default: int | None = None) -> tuple[int, ...]:
    """Each layer's window, 0 for none; unless the file says which layers have one, all but each ``every``-th."""
    window, num_layers = meta.integer("attention.sliding_window", default), meta.integer("block_count")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelError(f"num_layers of the model must be between 1 and {MAX_LAYERS}, got {num_layers}")
    key = "attention.sliding_window_pattern"
    pattern = meta.get(key)
    if pattern is None or isinstance(pattern, int):
        period = every if pattern is None else pattern
        if period < 1:
            raise meta.wrong(key, f"must be positive, got {period}")
        pattern = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) < num_layers:
        raise meta.wrong(key, f"must say of each of the {num_layers} layers whether it has a window")
    if window < 1 and any(pattern):
        raise meta.wrong("attention.sliding_window", f"must be positive, got {window}")
    return tuple(window if has_window else 0 for has_window in pattern[:num_layers])


# Llama and families like it


def _llama(meta: Metadata) -> Fields:
    if meta.integer("expert_count", 0):
        return {**_decoder(meta), **_experts(meta), "architecture": "mixtral", "norm_expert_weights": True}
    return {
        **_decoder(meta),
        "architecture": meta.prefix,
        "sliding_window": _window(meta),
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "qk_norm": meta.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _phi3(meta: Metadata) -> Fields:
    """Phi-4-mini's window is larger than its context."""
    values = _decoder(meta, partial=True)
    scaling = values["rope_scaling"]
    if isinstance(scaling, dict) and scaling["rope_type"] != "longrope":
        raise ModelError(f"{meta.source} scales its positions differently from longrope, the family's only way")
    window = meta.integer("attention.sliding_window", 0)
    is_wide = window >= meta.integer("context_length")
    return {**values, "architecture": "phi3", "sliding_window": None if is_wide else window or None}


# Gemma


def _gemma2(meta: Metadata) -> Fields:
    caps = {
        name: meta.number(key, default)
        for name, key, default in (
            ("score_cap", "attn_logit_softcapping", 50.0),
            ("logit_cap", "final_logit_softcapping", 30.0),
        )
    }
    if wrong := [cap for cap in caps.values() if not 0 <= cap < 1e6]:
        raise ModelError(f"{meta.source}: the soft caps of {meta.prefix} must be positive or 0, got {wrong[0]}")
    values = {**_gemma(meta), **caps, "architecture": "gemma2", "layer_windows": _windows(meta, 2, 4096)}
    if values["rope_scaling"]:
        raise ModelError(f"{meta.source} scales its positions, which is not supported for this family")
    return {**values, "local_rope_theta": meta.positive("rope.freq_base_swa", rope_theta(meta))}


def _gemma3(meta: Metadata) -> Fields:
    """Positions are scaled in layers without a window only."""
    return {
        **_gemma(meta),
        "architecture": "gemma3_text",
        "rope_theta": meta.number("rope.freq_base", 1e6),
        "local_rope_theta": meta.positive("rope.freq_base_swa", 10_000.0),
        "layer_windows": _windows(meta, 6),
        "logit_cap": meta.number("final_logit_softcapping", 0.0),
        "qk_norm": True,
    }


def _gemma(meta: Metadata) -> Fields:
    values = _decoder(meta)
    is_27b = meta.integer("block_count") == _GEMMA_27B_LAYERS[meta.prefix]
    heads, width = meta.integer("attention.head_count"), meta.integer("attention.key_length", 256)
    per_query = meta.integer("embedding_length") // max(1, heads) if is_27b else width
    scale = meta.positive("attention.scale", max(1, per_query) ** -0.5)
    return {**values, "attention_scale": scale, "activation": "gelu_tanh"}


# Mixtures of experts


def _experts(meta: Metadata) -> Fields:
    """The width of an expert was not written by older converters."""
    count, used = meta.integer("expert_count"), meta.integer("expert_used_count")
    return {
        "num_experts": count,
        "experts_per_token": used,
        "intermediate_size": meta.integer("expert_feed_forward_length", 0) or meta.integer("feed_forward_length"),
    }


def _qwen_moe(meta: Metadata) -> Fields:
    is_qwen3 = meta.prefix == "qwen3moe"
    values = {**_decoder(meta), **_experts(meta)}
    if not meta.integer("expert_feed_forward_length", 0):
        values["intermediate_size"] = meta.integer("feed_forward_length") // max(1, meta.integer("expert_used_count"))
    shared = 0 if is_qwen3 else meta.integer("expert_shared_feed_forward_length", meta.integer("feed_forward_length"))
    return {
        **values,
        "architecture": "qwen3_moe" if is_qwen3 else "qwen2_moe",
        "norm_expert_weights": meta.flag("expert_weights_norm", is_qwen3),
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "qk_norm": is_qwen3,
        "shared_expert_size": shared,
    }


def _gpt_oss(meta: Metadata) -> Fields:
    values = {**_decoder(meta, truncate=False), **_experts(meta)}
    if values["rope_scaling"] is None:
        raise ModelError(f"{meta.source} does not say how positions are scaled ({meta.prefix}.rope.scaling.type)")
    return {
        **values,
        "architecture": "gpt_oss",
        "layer_windows": _windows(meta, 2),
        "qkv_bias": True,
        "norm_expert_weights": True,
    }


def _olmoe(meta: Metadata) -> Fields:
    normed = meta.flag("expert_weights_norm", False)
    return {
        **{**_decoder(meta), **_experts(meta)},
        **{"architecture": "olmoe", "qk_norm": True, "norm_expert_weights": normed},
    }


# Granite, OLMo-2 and -3


def _granite(meta: Metadata) -> Fields:
    factors = {
        "attention_scale": meta.positive("attention.scale", 1.0),
        "embedding_factor": meta.positive("embedding_scale", 1.0),
        "residual_factor": meta.positive("residual_scale", 1.0),
        "logit_divisor": meta.positive("logit_scale", 1.0),
    }
    values = {**_decoder(meta), **factors, "architecture": "granite"}
    if not meta.integer("expert_count", 0):
        return values
    if meta.integer("expert_shared_feed_forward_length", 0):
        raise ModelError(f"{meta.source} has experts that all tokens use, which is not supported for this family")
    return {**values, **_experts(meta), "architecture": "granitemoe", "norm_expert_weights": True}


def _olmo2(meta: Metadata) -> Fields:
    """With windows it is OLMo-3, which scales positions in its other layers only."""
    values = {**_decoder(meta), "qk_norm": True, "architecture": "olmo2"}
    if not _window(meta):
        return values
    theta = meta.positive("rope.freq_base_swa", rope_theta(meta))
    return {**values, "architecture": "olmo3", "layer_windows": _windows(meta, 4), "local_rope_theta": theta}


# Command R and GLM-4, which rotate neighbouring elements


def _cohere(meta: Metadata) -> Fields:
    return {
        **_decoder(meta, _LAYER_EPS),
        "architecture": "cohere",
        "logit_divisor": 1 / meta.positive("logit_scale", 0.0625),
        "parallel_residual": True,
        "qk_norm": meta.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _cohere2(meta: Metadata) -> Fields:
    windows = _windows(meta, 4)
    still = tuple(layer for layer, window in enumerate(windows) if not window)
    return {**_cohere(meta), "architecture": "cohere2", "layer_windows": windows, "still_layers": still}


def _glm(meta: Metadata) -> Fields:
    if meta.get("rope.dimension_sections"):
        raise ModelError(f"{meta.source} rotates by rope.dimension_sections, which is not supported")
    return {
        **_decoder(meta, partial=True),
        "architecture": "glm4" if meta.has_tensor("blk.0.post_attention_norm.weight") else "glm",
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias"),
    }


# Layer norms


def _starcoder2(meta: Metadata) -> Fields:
    """Converters do not write the window, with which llama.cpp runs none of these models."""
    return {
        **_decoder(meta, _LAYER_EPS),
        "architecture": "starcoder2",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "sliding_window": _window(meta),
    }


def _falcon(meta: Metadata) -> Fields:
    return {
        **_decoder(meta, _LAYER_EPS),
        "architecture": "falcon",
        "activation": "gelu",
        "parallel_residual": True,
        "mlp_has_norm": meta.has_tensor("blk.0.attn_norm_2.weight"),
    }


def _gpt2(meta: Metadata) -> Fields:
    return {
        **_decoder(meta, _LAYER_EPS),
        "architecture": "gpt2",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "rotary_dim": 0,
    }


READERS: dict[str, Callable[[Metadata], Fields]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "gpt-oss": _gpt_oss,
    "olmoe": _olmoe,
    "granite": _granite,
    "granitemoe": _granite,
    "olmo2": _olmo2,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "glm4": _glm,
    "starcoder2": _starcoder2,
    "falcon": _falcon,
    "gpt2": _gpt2,
}
