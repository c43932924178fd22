"""Families with layer norms whose heads rotate, often in part: Phi, StableLM, Jais 2 and Nemotron. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, activation
from mooncake.families.gated import read_unbiased, refuse_activations
from mooncake.families.gpt_names import gpt_layer, gpt_top
from mooncake.model_config import Settings


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


# Phi-1, Phi-1.5 (Li et al. 2023) and Phi-2 (Microsoft 2023)


def _read_phi(settings: Settings, shapes: Published) -> dict[str, object]:
    return {**_read(settings, "layer_norm_eps", "gelu_new", 0.5), "qkv_bias": True, "parallel_residual": True}


# StableLM (Stability AI 2023, 2024)


def _read_stablelm(settings: Settings, shapes: Published) -> dict[str, object]:
    refuse_activations(settings)
    return {
        **_read(settings, "layer_norm_eps", "silu", 0.25),
        "qkv_bias": settings.flag("use_qkv_bias", False),
        "parallel_residual": settings.flag("use_parallel_residual", False),
    }


# Jais 2 (Inception and MBZUAI 2025)


def _read_jais2(settings: Settings, shapes: Published) -> dict[str, object]:
    biases = ("attention_bias", "mlp_bias")
    if not all(settings.flag(key, True) for key in biases):
        raise ModelError(f"{settings.source} leaves out the biases that Jais 2 has, which is not supported")
    known = settings.replaced(dict.fromkeys(biases, False))
    return {**_read(known, "layer_norm_eps", "relu2", 1.0), "qkv_bias": True}


# Nemotron (NVIDIA 2024; Minitron)


def _read_nemotron(settings: Settings, shapes: Published) -> dict[str, object]:
    return _read(settings, "norm_eps", "relu2", 0.5)


LAYER_NORM_FAMILIES: dict[str, Family] = {
    "phi": Family(_read_phi, gpt_layer, top_shapes=gpt_top),
    "stablelm": Family(_read_stablelm, gpt_layer, top_shapes=gpt_top),
    "jais2": Family(_read_jais2, gpt_layer, top_shapes=gpt_top),
    "nemotron": Family(_read_nemotron, gpt_layer, top_shapes=gpt_top),
}
