"""Dense families of others' parts: Gemma, VaultGemma, AFM, Apertus, OLMo (1), nanochat and HyperCLOVA X.
Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, activation, cap_of, llama_top
from mooncake.families.gated import (
    attention_shapes,
    dense_layer,
    layer_norms,
    read_dense,
    read_gemma2,
    read_granite,
    read_unbiased,
)
from mooncake.families.rope_settings import require_rope_scaling
from mooncake.model_config import ModelConfig, Settings

# Gemma (Gemma team 2024) and VaultGemma (Google 2025)


def _read_gemma(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("use_bidirectional_attention")
    key = "hidden_activation" if settings.get("hidden_activation") else "hidden_act"
    return {
        **read_unbiased(settings.with_defaults({"head_dim": 256}), shapes),
        "activation": activation(settings, key, "gelu_pytorch_tanh"),
        "tie_embeddings": settings.flag("tie_word_embeddings", True),
    }


def _gemma_layer(config: ModelConfig) -> Shapes:
    return dense_layer(config) | layer_norms(config)


def _vault_gemma_layer(config: ModelConfig) -> Shapes:
    norms = ("input_layernorm", "pre_feedforward_layernorm")
    return dense_layer(config) | {f"{name}.weight": (config.hidden_size,) for name in norms}


# AFM-4.5B (Arcee 2025) and Apertus (Swiss AI 2025), whose MLPs have no gate


def _read_arcee(settings: Settings, shapes: Published) -> dict[str, object]:
    return {**read_unbiased(settings, shapes), "activation": activation(settings, "hidden_act", "relu2")}


def _arcee_layer(config: ModelConfig) -> Shapes:
    return attention_shapes(config) | layer_norms(config) | _ungated(config)


def _ungated(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {"mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner)}


def _read_apertus(settings: Settings, shapes: Published) -> dict[str, object]:
    if (name := settings.get("hidden_act") or "xielu") != "xielu":
        raise ModelError(f"{settings.source} asks for the activation {name!r}; only xielu is supported for this family")
    require_rope_scaling(settings)
    return {**read_unbiased(settings, shapes, default_theta=12e6), "activation": "xielu", "qk_norm": True}


def _apertus_layer(config: ModelConfig) -> Shapes:
    """Each layer has an activation of its own."""
    shape: Shapes = {
        "mlp.act_fn.alpha_p": (1,),
        "mlp.act_fn.alpha_n": (1,),
        "mlp.act_fn.beta": (),
        "mlp.act_fn.eps": (),
    }
    norms = {f"{name}_layernorm.weight": (config.hidden_size,) for name in ("attention", "feedforward")}
    return {**attention_shapes(config), **norms, **_ungated(config), **shape}


# OLMo (Groeneveld et al. 2024) and nanochat (Karpathy 2025), whose norms have no weights


def _read_olmo(settings: Settings, shapes: Published) -> dict[str, object]:
    return {**read_dense(settings, shapes), "rms_eps": 1e-5, "qkv_limit": cap_of(settings, "clip_qkv", 0.0)}


def _read_nanochat(settings: Settings, shapes: Published) -> dict[str, object]:
    return {
        **read_unbiased(settings, shapes),
        "activation": activation(settings, "hidden_act", "relu2"),
        "logit_cap": cap_of(settings, "final_logit_softcapping", 15.0),
    }


def _nanochat_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {**attention_shapes(config), "mlp.fc1.weight": (inner, hidden), "mlp.fc2.weight": (hidden, inner)}


def _top_without_norm(config: ModelConfig) -> Shapes:
    return {name: shape for name, shape in llama_top(config).items() if name != "model.norm.weight"}


# HyperCLOVA X (NAVER 2025)


def _read_hyperclovax(settings: Settings, shapes: Published) -> dict[str, object]:
    """Its ``logits_scaling`` is a factor, where Granite's is a divisor."""
    if not settings.flag("use_post_norm", True):
        raise ModelError(f"{settings.source} leaves out norms that HyperCLOVA X has, which is not supported")
    values = read_granite(settings, shapes)
    scale = settings.number("attention_multiplier", 0.0)
    return {**values, "attention_scale": scale, "logit_divisor": 1 / settings.number("logits_scaling", 1.0)}


def _hyperclovax_layer(config: ModelConfig) -> Shapes:
    return _gemma_layer(config) | {f"post_norm{number}.weight": (config.hidden_size,) for number in (1, 2)}


DENSE_MEMBERS: dict[str, Family] = {
    "gemma": Family(_read_gemma, _gemma_layer),
    "vaultgemma": Family(read_gemma2, _vault_gemma_layer),
    "arcee": Family(_read_arcee, _arcee_layer),
    "apertus": Family(_read_apertus, _apertus_layer),
    "olmo": Family(_read_olmo, dense_layer, top_shapes=_top_without_norm),
    "nanochat": Family(_read_nanochat, _nanochat_layer, top_shapes=_top_without_norm),
    "hyperclovax": Family(_read_hyperclovax, _hyperclovax_layer),
}
