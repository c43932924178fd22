"""Families with layer norms whose heads rotate, often in part: Phi, StableLM, Jais 2 and Nemotron. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import (
    Family,
    Published,
    Shapes,
    activation,
    gated_shapes,
    head_shapes,
    linear_shapes,
    norm_shapes,
)
from mooncake.families.gated import attention_shapes, read_unbiased, refuse_activations
from mooncake.model_config import ModelConfig, Settings


def _read(settings: Settings, eps_key: str, default_activation: str, default_share: float) -> dict[str, object]:
    """``default_share``: of each head's elements, those that rotate."""
    settings.refuse("qk_layernorm")
    settings = settings.with_defaults({"partial_rotary_factor": default_share})
    return {
        **read_unbiased(settings, {}, partial=True),
        "rms_eps": settings.number(eps_key, 1e-5),
        "activation": activation(settings, "hidden_act", default_activation),
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
    }


def _top(config: ModelConfig) -> Shapes:
    table = (config.vocab_size, config.hidden_size)
    return {
        "model.embed_tokens.weight": table,
        **norm_shapes("model.norm", config.hidden_size),
        **head_shapes("lm_head", config),
    }


# Phi-1, Phi-1.5 (Li et al. 2023) and Phi-2 (Microsoft 2023)


def _read_phi(settings: Settings, shapes: Published) -> dict[str, object]:
    return {**_read(settings, "layer_norm_eps", "gelu_new", 0.5), "qkv_bias": True, "parallel_residual": True}


def _phi_layer(config: ModelConfig) -> Shapes:
    hidden, inner, attention = config.hidden_size, config.intermediate_size, attention_shapes(config)
    del attention["self_attn.o_proj.weight"]
    return {
        **attention,
        **linear_shapes("self_attn.dense", hidden, config.num_heads * config.head_dim),
        **norm_shapes("input_layernorm", hidden),
        **linear_shapes("mlp.fc1", inner, hidden),
        **linear_shapes("mlp.fc2", hidden, inner),
    }


def _phi_top(config: ModelConfig) -> Shapes:
    table = (config.vocab_size, config.hidden_size)
    return {
        "model.embed_tokens.weight": table,
        **norm_shapes("model.final_layernorm", config.hidden_size),
        **({} if config.tie_embeddings else linear_shapes("lm_head", *table)),
    }


# StableLM (Stability AI 2023, 2024)


def _read_stablelm(settings: Settings, shapes: Published) -> dict[str, object]:
    refuse_activations(settings)
    return {
        **_read(settings, "layer_norm_eps", "silu", 0.25),
        "qkv_bias": settings.flag("use_qkv_bias", False),
        "parallel_residual": settings.flag("use_parallel_residual", False),
    }


def _stablelm_layer(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    return {
        **attention_shapes(config),
        **norm_shapes("input_layernorm", hidden),
        **({} if config.parallel_residual else norm_shapes("post_attention_layernorm", hidden)),
        **gated_shapes("mlp", hidden, config.intermediate_size),
    }


# Jais 2 (Inception and MBZUAI 2025)


def _read_jais2(settings: Settings, shapes: Published) -> dict[str, object]:
    biases = ("attention_bias", "mlp_bias")
    if not all(settings.flag(key, True) for key in biases):
        raise ModelError(f"{settings.source} leaves out the biases that Jais 2 has, which is not supported")
    known = settings.replaced(dict.fromkeys(biases, False))
    return {**_read(known, "layer_norm_eps", "relu2", 1.0), "qkv_bias": True}


def _jais2_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        **attention_shapes(config),
        "self_attn.o_proj.bias": (hidden,),
        **norm_shapes("input_layernorm", hidden),
        **norm_shapes("post_attention_layernorm", hidden),
        **linear_shapes("mlp.up_proj", inner, hidden),
        **linear_shapes("mlp.down_proj", hidden, inner),
    }


# Nemotron (NVIDIA 2024; Minitron)


def _read_nemotron(settings: Settings, shapes: Published) -> dict[str, object]:
    return _read(settings, "norm_eps", "relu2", 0.5)


def _nemotron_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        **attention_shapes(config),
        **norm_shapes("input_layernorm", hidden),
        **norm_shapes("post_attention_layernorm", hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


LAYER_NORM_FAMILIES: dict[str, Family] = {
    "phi": Family(_read_phi, _phi_layer, top_shapes=_phi_top),
    "stablelm": Family(_read_stablelm, _stablelm_layer, top_shapes=_top),
    "jais2": Family(_read_jais2, _jais2_layer, top_shapes=_top),
    "nemotron": Family(_read_nemotron, _nemotron_layer, top_shapes=_top),
}
