"""From the metadata of a GGUF file to the fields of ``ModelConfig``: a reader for each architecture. Torch-free.

Keys are those that llama.cpp's converter writes (``gguf.constants.Keys``). What it does not write, because llama.cpp
knows it of the architecture, is a constant here: which layers have a window, Gemma's softmax scale, activations.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake.errors import ModelError
from mooncake.families.alibi import alibi_slopes
from mooncake.families.family import rotating_in_windows
from mooncake.families.rope_settings import yarn_sharpness
from mooncake.gguf.fields import LAYER_EPS, RMS_EPS, Fields, decoder_fields, layer_windows, window_of
from mooncake.gguf.gemma4 import gemma4
from mooncake.gguf.hybrid import falcon_h1, granite_states, lfm2, nemotron_h, qwen_next
from mooncake.gguf.latent import deepseek
from mooncake.gguf.metadata import Metadata
from mooncake.gguf.mixtures import (
    dots,
    ernie_moe,
    expert_fields,
    glm_moe,
    gpt_oss,
    hunyuan_moe,
    minimax,
    olmoe,
    qwen_moe,
)
from mooncake.gguf.rope import TRAINED_LEN, log_multiplier, rope_theta
from mooncake.model_config import MAX_LAYERS, MAX_POSITIONS

_LANGUAGE_MODELS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3"}
"""Of multimodal files: positions on several axes, of which they tell the sizes, are the same on each for text."""

_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _known(
    architecture: str, eps: str = RMS_EPS, partial: bool = False, **constants: object
) -> Callable[[Metadata], Fields]:
    """The reader of an architecture of which files tell all but these ``constants``; ``eps`` and ``partial`` as for
    ``decoder_fields``."""
    return lambda meta: {**decoder_fields(meta, eps, partial), "architecture": architecture, **constants}


# Llama and families like it


def _llama(meta: Metadata) -> Fields:
    if meta.integer("expert_count", 0):
        return {**decoder_fields(meta), **expert_fields(meta), "architecture": "mixtral", "norm_expert_weights": True}
    return {
        **decoder_fields(meta),
        "architecture": _LANGUAGE_MODELS.get(meta.prefix, meta.prefix),
        "sliding_window": window_of(meta),
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "qk_norm": meta.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _mistral3(meta: Metadata) -> Fields:
    """Ministral 3. Converters also give the name to older models of Mistral's, whose queries do not grow."""
    growth, of_all = meta.number("attention.temperature_scale", 0.0), log_multiplier(meta)
    if not 0 <= growth < 1e6:
        raise meta.wrong("attention.temperature_scale", f"must be positive or 0, got {growth}")
    factor = meta.number("rope.scaling.factor", 1.0)
    sharpness = yarn_sharpness(factor) / yarn_sharpness(factor, of_all) if of_all else None
    grows = {"query_growth": growth, "query_span": _positions(meta, TRAINED_LEN)} if growth else {}
    return {**decoder_fields(meta, attention_factor=sharpness), **grows, "architecture": "ministral3"}


def _positions(meta: Metadata, key: str) -> int:
    count = meta.integer(key)
    if not 0 < count <= MAX_POSITIONS:
        raise meta.wrong(key, f"must be between 1 and {MAX_POSITIONS}, got {count}")
    return count


def _phi3(meta: Metadata) -> Fields:
    """Phi-4-mini's window is larger than its context."""
    values = decoder_fields(meta, partial=True)
    scaling = values["rope_scaling"]
    if isinstance(scaling, dict) and scaling["rope_type"] != "longrope":
        raise ModelError(f"{meta.source} scales its positions differently from longrope, the family's only way")
    window = meta.integer("attention.sliding_window", 0)
    is_wide = window >= meta.integer("context_length")
    return {**values, "architecture": "phi3", "sliding_window": None if is_wide else window or None}


def _smollm3(meta: Metadata) -> Fields:
    """Every fourth layer does not rotate."""
    still = tuple(layer for layer in range(3, min(meta.integer("block_count"), MAX_LAYERS), 4))
    return {**decoder_fields(meta), "architecture": "smollm3", "still_layers": still}


def _seed_oss(meta: Metadata) -> Fields:
    has_bias = meta.has_tensor("blk.0.attn_q.bias")
    return {**decoder_fields(meta), "architecture": "seed_oss", "qkv_bias": has_bias}


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
    values = {**_gemma(meta), **caps, "architecture": "gemma2", "layer_windows": layer_windows(meta, 2, 4096)}
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
        "layer_windows": layer_windows(meta, 6),
        "logit_cap": meta.number("final_logit_softcapping", 0.0),
        "qk_norm": True,
    }


def _gemma(meta: Metadata) -> Fields:
    values = decoder_fields(meta)
    is_27b = meta.integer("block_count") == _GEMMA_27B_LAYERS[meta.prefix]
    heads, width = meta.integer("attention.head_count"), meta.integer("attention.key_length", 256)
    per_query = meta.integer("embedding_length") // max(1, heads) if is_27b else width
    scale = meta.positive("attention.scale", max(1, per_query) ** -0.5)
    return {**values, "attention_scale": scale, "activation": "gelu_tanh"}


# Granite, OLMo-2 and -3, EXAONE 4


def _granite(meta: Metadata) -> Fields:
    """Granite 4, too. Whether heads rotate is said by a key that elsewhere means something else."""
    factors = {
        "attention_scale": meta.positive("attention.scale", 1.0),
        "embedding_factor": meta.positive("embedding_scale", 1.0),
        "residual_factor": meta.positive("residual_scale", 1.0),
        "logit_divisor": meta.positive("logit_scale", 1.0),
    }
    values = {**decoder_fields(meta), **factors, "architecture": "granite"}
    if not meta.flag("rope.scaling.finetuned", True):
        values["still_layers"] = tuple(range(min(meta.integer("block_count"), MAX_LAYERS)))
    if meta.prefix == "granitehybrid":
        return {**values, **granite_states(meta)}
    if not meta.integer("expert_count", 0):
        return values
    if meta.integer("expert_shared_feed_forward_length", 0):
        raise ModelError(f"{meta.source} has experts that all tokens use, which is not supported for this family")
    return {**values, **expert_fields(meta), "architecture": "granitemoe", "norm_expert_weights": True}


def _olmo2(meta: Metadata) -> Fields:
    """With windows it is OLMo-3, which scales positions in its other layers only."""
    values = {**decoder_fields(meta), "qk_norm": True, "architecture": "olmo2"}
    if not window_of(meta):
        return values
    theta = meta.positive("rope.freq_base_swa", rope_theta(meta))
    return {**values, "architecture": "olmo3", "layer_windows": layer_windows(meta, 4), "local_rope_theta": theta}


def _exaone4(meta: Metadata) -> Fields:
    """If some layers have a window, the others do not rotate."""
    values = {**decoder_fields(meta), "qk_norm": True, "architecture": "exaone4"}
    if not window_of(meta):
        return values
    return {**values, **rotating_in_windows(layer_windows(meta, 4))}


# Command R and GLM-4, which rotate neighbouring elements


def _cohere(meta: Metadata) -> Fields:
    return {
        **decoder_fields(meta, LAYER_EPS),
        "architecture": "cohere",
        "logit_divisor": 1 / meta.positive("logit_scale", 0.0625),
        "parallel_residual": True,
        "qk_norm": meta.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _cohere2(meta: Metadata) -> Fields:
    return {**_cohere(meta), "architecture": "cohere2", **rotating_in_windows(layer_windows(meta, 4))}


def _glm(meta: Metadata) -> Fields:
    if meta.get("rope.dimension_sections"):
        raise ModelError(f"{meta.source} rotates by rope.dimension_sections, which is not supported")
    return {
        **decoder_fields(meta, partial=True),
        "architecture": "glm" if meta.prefix == "chatglm" else "glm4",
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias") or meta.has_tensor("blk.0.attn_qkv.bias"),
    }


# Layer norms


def _starcoder2(meta: Metadata) -> Fields:
    """Converters do not write the window, with which llama.cpp runs none of these models."""
    return {
        **decoder_fields(meta, LAYER_EPS),
        "architecture": "starcoder2",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "sliding_window": window_of(meta),
    }


def _falcon(meta: Metadata) -> Fields:
    return {
        **decoder_fields(meta, LAYER_EPS),
        "architecture": "falcon",
        "activation": "gelu",
        "parallel_residual": True,
        "mlp_has_norm": meta.has_tensor("blk.0.attn_norm_2.weight"),
    }


def _stablelm(meta: Metadata) -> Fields:
    return {
        **decoder_fields(meta, LAYER_EPS, partial=True),
        "architecture": "stablelm",
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "parallel_residual": not meta.has_tensor("blk.0.ffn_norm.weight"),
    }


def _gpt_neox(meta: Metadata) -> Fields:
    return {
        **decoder_fields(meta, LAYER_EPS, partial=True),
        "rotary_dim": meta.integer("rope.dimension_count"),
        "architecture": "gpt_neox",
        "activation": "gelu",
        "qkv_bias": True,
        "parallel_residual": meta.flag("use_parallel_residual", True),
    }


def _bloom(meta: Metadata) -> Fields:
    return {
        **decoder_fields(meta, LAYER_EPS, rotates=False),
        "architecture": "bloom",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "rotary_dim": 0,
        "alibi_slopes": alibi_slopes(meta.integer("attention.head_count")),
    }


def _mpt(meta: Metadata) -> Fields:
    limit = meta.number("attention.clamp_kqv", 0.0)
    if not 0 <= limit < 1e6:
        raise meta.wrong("attention.clamp_kqv", f"must be positive or 0, got {limit}")
    heads, most = meta.integer("attention.head_count"), meta.number("attention.max_alibi_bias", 0.0)
    return {
        **decoder_fields(meta, LAYER_EPS, rotates=False),
        "architecture": "mpt",
        "activation": "gelu",
        "qkv_bias": meta.has_tensor("blk.0.attn_qkv.bias"),
        "qkv_limit": limit,
        "rotary_dim": 0,
        "alibi_slopes": alibi_slopes(heads, most),
    }


READERS: dict[str, Callable[[Metadata], Fields]] = {
    "llama": _llama,
    "mistral": _llama,
    "mistral3": _mistral3,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen2vl": _llama,
    "qwen3vl": _llama,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "ernie4_5": _known("ernie4_5"),
    "gemma": _known("gemma", activation="gelu_tanh"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": gemma4,
    "qwen2moe": qwen_moe,
    "qwen3moe": qwen_moe,
    "qwen3vlmoe": qwen_moe,
    "gpt-oss": gpt_oss,
    "olmoe": olmoe,
    "glm4moe": glm_moe,
    "dots1": dots,
    "deepseek2": deepseek,
    "minimax-m2": minimax,
    "ernie4_5-moe": ernie_moe,
    "arcee": _known("arcee", activation="relu2"),
    "apertus": _known("apertus", activation="xielu", qk_norm=True),
    "granite": _granite,
    "granitemoe": _granite,
    "granitehybrid": _granite,
    "olmo2": _olmo2,
    "exaone4": _exaone4,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "glm4": _glm,
    "chatglm": _glm,
    "hunyuan-dense": _known("hunyuan_v1_dense", qk_norm=True),  # theta is stored as stretched
    "hunyuan-moe": hunyuan_moe,
    "starcoder2": _starcoder2,
    "falcon": _falcon,
    "phi2": _known("phi", LAYER_EPS, True, activation="gelu_tanh", qkv_bias=True, parallel_residual=True),
    "stablelm": _stablelm,
    "nemotron": _known("nemotron", LAYER_EPS, True, activation="relu2"),
    "gptneox": _gpt_neox,
    "gpt2": _known("gpt2", LAYER_EPS, activation="gelu_tanh", qkv_bias=True, rotary_dim=0),
    "bloom": _bloom,
    "mpt": _mpt,
    "lfm2": lfm2,
    "lfm2moe": lfm2,
    "qwen3next": qwen_next,
    "qwen35": qwen_next,
    "qwen35moe": qwen_next,
    "falcon-h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
}
