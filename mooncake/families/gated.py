"""Families other than Llama's with gated MLPs: Gemma, mixtures of experts, Granite, Hunyuan, OLMo and EXAONE 4.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mooncake.errors import ModelError
from mooncake.families.family import (
    Family,
    Published,
    Shapes,
    activation,
    cap_of,
    gated_shapes,
    num_layers_of,
    rotating_in_windows,
    windows_of_kinds,
)
from mooncake.families.rope_settings import Rope, read_rope
from mooncake.model_config import ModelConfig, Settings

# Gemma 2 (Gemma team 2024) and Gemma 3, text (Gemma team 2025)


def read_gemma2(settings: Settings, shapes: Published) -> dict[str, object]:
    head_dim = settings.integer("head_dim", 256)
    rope = read_rope(settings, head_dim)
    if rope.scaling:
        raise ModelError(f"{settings.source} scales its positions, which is not supported for this family")
    return {
        **_read_gemma(settings, every=2),
        "head_dim": head_dim,
        "max_model_len": rope.max_model_len,
        "rope_theta": rope.theta,
        "local_rope_theta": rope.theta,
        "score_cap": cap_of(settings, "attn_logit_softcapping", 50.0),
        "logit_cap": cap_of(settings, "final_logit_softcapping", 30.0),
    }


def _read_gemma3(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("attn_logit_softcapping", "final_logit_softcapping")
    head_dim = settings.integer("head_dim", 256)
    rope, local = gemma3_rope(settings, head_dim)
    return {
        **_read_gemma(settings, every=settings.integer("sliding_window_pattern", 6)),
        "head_dim": head_dim,
        "max_model_len": settings.integer("max_position_embeddings"),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "local_rope_theta": local,
        "qk_norm": True,
    }


def _read_gemma(settings: Settings, every: int) -> dict[str, object]:
    """``every``: one layer in this many is global, unless a list says which."""
    settings.refuse("attention_bias", "use_bidirectional_attention")
    num_layers, heads = settings.integer("num_hidden_layers"), settings.integer("num_attention_heads")
    return {
        "num_layers": num_layers,
        "hidden_size": settings.integer("hidden_size"),
        "intermediate_size": settings.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_key_value_heads", heads),
        "vocab_size": settings.integer("vocab_size"),
        "rms_eps": settings.number("rms_norm_eps", 1e-6),
        "activation": activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
        "layer_windows": windows_in_turn(settings, every, 4096),
        "attention_scale": settings.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def gemma3_rope(settings: Settings, head_dim: int) -> tuple[Rope, float]:
    """The rotation of the global layers and theta of the local ones, from the keys of either generation of
    config.json. Only the global layers may be scaled, within ``max_position_embeddings``."""
    given = settings.get("rope_parameters")
    parameters = given if isinstance(given, dict) else {}
    widely = parameters.get("full_attention") or settings.get("rope_scaling") or {}
    widely = {"rope_theta": settings.number("rope_theta", 1_000_000.0), **(widely if isinstance(widely, dict) else {})}
    rope = read_rope(settings.replaced({"rope_parameters": widely}), head_dim)
    if rope.scaling and rope.scaling["rope_type"] != "linear":
        raise ModelError(f"{settings.source} scales its positions differently from linear, the family's only way")
    locally = rope_of_windows(settings, parameters)
    return rope, locally.number("rope_theta", settings.number("rope_local_base_freq", 10_000.0))


def rope_of_windows(settings: Settings, parameters: Mapping[str, object]) -> Settings:
    """Of layers with a window, without scaling."""
    rope = settings.part(parameters.get("sliding_attention"))
    if (rope.get("rope_type") or "default") != "default":
        raise ModelError(f"{settings.source} scales its positions, which is not supported for this family")
    return rope


def _gemma_layer(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return {
        **attention_shapes(config),
        **gated_shapes("mlp", hidden, config.intermediate_size),
        **{f"{n}.weight": (hidden,) for n in names},
    }


# Mixtures of experts: Qwen3's (Qwen team 2025) and Mixtral (Jiang et al. 2024)


def _read_qwen3_moe(settings: Settings, shapes: Published) -> dict[str, object]:
    return {**read_qwen_moe(settings, shapes, num_experts=128, experts_per_token=8), "qk_norm": True}


def read_qwen_moe(settings: Settings, shapes: Published, num_experts: int, experts_per_token: int) -> dict[str, object]:
    """``num_experts`` and ``experts_per_token`` are defaults."""
    if settings.flag("attention_bias", False) or settings.flag("use_sliding_window", False):
        raise ModelError(f"{settings.source} asks for attention_bias or a sliding window, which is not supported")
    if settings.integer("decoder_sparse_step", 1) != 1 or settings.get("mlp_only_layers"):
        raise ModelError(f"{settings.source} gives only some layers experts, which is not supported")
    return {
        **read_silu(settings, shapes),
        "intermediate_size": settings.integer("moe_intermediate_size"),
        "num_experts": settings.integer("num_experts", settings.integer("num_local_experts", num_experts)),
        "experts_per_token": settings.integer("num_experts_per_tok", experts_per_token),
        "norm_expert_weights": settings.flag("norm_topk_prob", False),
    }


def _read_mixtral(settings: Settings, shapes: Published) -> dict[str, object]:
    return {
        **read_silu(settings, shapes, default_theta=1e6),
        "intermediate_size": settings.integer("intermediate_size"),
        "sliding_window": settings.integer("sliding_window", 0) or None,
        "num_experts": settings.integer("num_local_experts", settings.integer("num_experts", 8)),
        "experts_per_token": settings.integer("num_experts_per_tok", 2),
        "norm_expert_weights": True,
    }


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in a layer's mixture, relative to the layer; ``gate``, ``up`` and ``down`` relative to each expert."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts"
    dense: str = "mlp"  # in layers without experts


_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    **dict.fromkeys(("granitemoe", "granitemoehybrid"), ExpertNames(router="block_sparse_moe.router.layer")),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        ExpertNames(
            *("feed_forward.gate", "feed_forward.experts", "w1", "w3", "w2"),
            choice_bias="feed_forward.expert_bias",
            dense="feed_forward",
        ),
    ),
    "afmoe": ExpertNames(router="mlp.router.gate", choice_bias="mlp.expert_bias"),
    "hunyuan_v1_moe": ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp"),
    "llama4_text": ExpertNames(
        "feed_forward.router", "feed_forward.experts", shared="feed_forward.shared_expert", dense="feed_forward"
    ),
    "exaone_moe": ExpertNames(choice_bias="mlp.e_score_correction_bias"),
    "hy_v3": ExpertNames(router="mlp.router.gate", choice_bias="mlp.expert_bias", shared="mlp.shared_mlp"),
    "ernie4_5_moe": ExpertNames(choice_bias="mlp.moe_statics.e_score_correction_bias"),
    "nemotron_h": ExpertNames(
        "mixer.gate",
        "mixer.experts",
        choice_bias="mixer.gate.e_score_correction_bias",
        shared="mixer.shared_experts",
    ),
    "minimax_m2": ExpertNames(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts",
        *("w1", "w3", "w2"),
        choice_bias="block_sparse_moe.e_score_correction_bias",
    ),
}


def expert_names(config: ModelConfig) -> ExpertNames:
    return _NAMES.get(config.architecture, ExpertNames())


def moe_layer(config: ModelConfig) -> Shapes:
    experts = expert_shapes(config, config.intermediate_size)
    return attention_shapes(config) | layer_norms(config) | router_shape(config) | experts


def router_shape(config: ModelConfig) -> Shapes:
    return {f"{expert_names(config).router}.weight": (config.num_experts, config.hidden_size)}


def expert_shapes(config: ModelConfig, inner: int) -> Shapes:
    """Of experts that are published one by one, each ``inner`` wide."""
    hidden, names = config.hidden_size, expert_names(config)
    shapes: Shapes = {}
    for expert in range(config.num_experts):
        at = f"{names.experts}.{expert}"
        shapes |= {f"{at}.{name}.weight": (inner, hidden) for name in (names.gate, names.up)}
        shapes[f"{at}.{names.down}.weight"] = (hidden, inner)
    return shapes


# Granite (Granite team, IBM 2024) and Hunyuan's dense models (Tencent 2025)


def read_granite(settings: Settings, shapes: Published) -> dict[str, object]:
    factors = {
        "attention_scale": settings.number("attention_multiplier", 1.0),
        "embedding_factor": settings.number("embedding_multiplier", 1.0),
        "residual_factor": settings.number("residual_multiplier", 1.0),
        "logit_divisor": settings.number("logits_scaling", 1.0),
    }
    if wrong := [value for value in factors.values() if not 0 < value < 1e6]:
        raise ModelError(f"{settings.source}: multipliers and logits_scaling must be positive, got {wrong[0]}")
    return {**read_dense(settings, shapes), **factors}


def read_hunyuan(settings: Settings, shapes: Published) -> dict[str, object]:
    values = read_dense(_with_stretched_theta(settings), shapes)
    return {**values, "qk_norm": True}


def _with_stretched_theta(settings: Settings) -> Settings:
    """Its positions are scaled by ``alpha``, which only changes theta, and not, as its name says, dynamically."""
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling")
    rope = settings.part(parameters)
    alpha = rope.number("alpha", 0.0)
    if (rope.get("rope_type") or rope.get("type")) != "dynamic" or not 0 < alpha < 1e9:
        return settings
    heads = settings.integer("num_attention_heads")
    dim = settings.integer("head_dim", settings.integer("hidden_size") // max(1, heads))
    theta = rope.number("rope_theta", settings.number("rope_theta", 10_000.0)) * alpha ** (dim / max(dim - 2, 1))
    return settings.replaced({"rope_parameters": {"rope_theta": theta}})


def _pre_normed_layer(config: ModelConfig) -> Shapes:
    return dense_layer(config) | layer_norms(config)


def _hunyuan_layer(config: ModelConfig) -> Shapes:
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    return {
        ".".join(names.get(part, part) for part in name.split(".")): shape
        for name, shape in _pre_normed_layer(config).items()
    }


# OLMo-2 and OLMo-3 (OLMo team 2025) and EXAONE 4 (LG AI Research 2025)


def _read_olmo2(settings: Settings, shapes: Published) -> dict[str, object]:
    return {**read_dense(settings, shapes), "qk_norm": True}


def _read_olmo3(settings: Settings, shapes: Published) -> dict[str, object]:
    """Its positions are scaled in layers without a window only."""
    parameters = settings.get("rope_parameters")
    by_kind = parameters if isinstance(parameters, dict) else {}
    if "full_attention" in by_kind:
        settings = settings.replaced({"rope_parameters": by_kind["full_attention"]})
    values = read_dense(settings, shapes, default_theta=500_000.0)
    local = rope_of_windows(settings, by_kind)
    return {
        **values,
        "qk_norm": True,
        "layer_windows": windows_in_turn(settings, 4, 4096),
        "local_rope_theta": local.number("rope_theta", settings.number("rope_theta", 500_000.0)),
    }


def _read_exaone4(settings: Settings, shapes: Published) -> dict[str, object]:
    """If some layers have a window, the others do not rotate."""
    values = {**read_dense(settings, shapes), "qk_norm": True}
    if settings.get("sliding_window") is None:
        return values
    every = 4 if settings.get("layer_types") else settings.integer("sliding_window_pattern", 4)
    return {**values, **rotating_in_windows(windows_in_turn(settings, every, 4096))}


def _post_normed_layer(config: ModelConfig) -> Shapes:
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return dense_layer(config) | {f"{name}.weight": (config.hidden_size,) for name in norms}


def _olmo_layer(config: ModelConfig) -> Shapes:
    return _post_normed_layer(config) | norms_over_heads(config)


def norms_over_heads(config: ModelConfig) -> Shapes:
    """Of all queries together, and of all keys."""
    return {
        "self_attn.q_norm.weight": (config.num_heads * config.head_dim,),
        "self_attn.k_norm.weight": (config.num_kv_heads * config.head_dim,),
    }


def read_dense(settings: Settings, shapes: Published, default_theta: float = 10_000.0) -> dict[str, object]:
    refuse_activations(settings)
    return read_unbiased(settings, shapes, default_theta)


def dense_layer(config: ModelConfig) -> Shapes:
    return attention_shapes(config) | gated_shapes("mlp", config.hidden_size, config.intermediate_size)


# Shared by several families


def refuse_activations(settings: Settings) -> None:
    """Raises ModelError for others than silu."""
    if activation(settings, "hidden_act", "silu") != "silu":
        raise ModelError(f"{settings.source} asks for an activation other than silu, which is not supported")


def read_silu(
    settings: Settings, shapes: Published, default_theta: float = 10_000.0, partial: bool = False
) -> dict[str, object]:
    """With no other activation. ``partial`` as for ``read_rope``."""
    refuse_activations(settings)
    return _read_sizes(settings, shapes, default_theta, partial)


def read_unbiased(
    settings: Settings, shapes: Published, default_theta: float = 10_000.0, partial: bool = False
) -> dict[str, object]:
    """With an MLP of one size in all layers, and any activation."""
    settings.refuse("attention_bias", "mlp_bias")
    values = _read_sizes(settings, shapes, default_theta, partial)
    return {**values, "intermediate_size": settings.integer("intermediate_size")}


def _read_sizes(settings: Settings, shapes: Published, default_theta: float, partial: bool) -> dict[str, object]:
    heads = settings.integer("num_attention_heads")
    head_dim = settings.integer("head_dim", settings.integer("hidden_size") // max(1, heads))
    rope = read_rope(settings, head_dim, default_theta, partial)
    return {
        "num_layers": settings.integer("num_hidden_layers"),
        "hidden_size": settings.integer("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": settings.integer("vocab_size"),
        **rope.values,
        "rms_eps": settings.number("rms_norm_eps", 1e-6),
        "tie_embeddings": settings.flag("tie_word_embeddings", "lm_head.weight" not in shapes),
    }


def windows_in_turn(settings: Settings, every: int, default: int) -> tuple[int, ...]:
    """Each layer's window, 0 for none; without a list, one layer in ``every`` is global."""
    kinds = settings.get("layer_types")
    if kinds is None:
        if every < 1:
            raise ModelError(f"{settings.source}: sliding_window_pattern must be positive, got {every}")
        layers = range(1, num_layers_of(settings) + 1)
        kinds = ["sliding_attention" if layer % every else "full_attention" for layer in layers]
    return windows_of_kinds(settings, kinds, default)


def layer_norms(config: ModelConfig) -> Shapes:
    """Before attention and the MLP."""
    return {f"{name}.weight": (config.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}


def attention_shapes(config: ModelConfig) -> Shapes:
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    return {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        **({f"self_attn.{name}_norm.weight": (dim,) for name in "qk"} if config.qk_norm else {}),
        **(
            {f"self_attn.{name}_proj.bias": (query if name == "q" else kv,) for name in "qkv"}
            if config.qkv_bias
            else {}
        ),
    }


GATED_FAMILIES: dict[str, Family] = {
    "gemma2": Family(read_gemma2, _gemma_layer),
    "gemma3_text": Family(_read_gemma3, _gemma_layer),
    "qwen3_moe": Family(_read_qwen3_moe, moe_layer),
    "mixtral": Family(_read_mixtral, moe_layer),
    "granite": Family(read_granite, _pre_normed_layer),
    "hunyuan_v1_dense": Family(read_hunyuan, _hunyuan_layer),
    "olmo2": Family(_read_olmo2, _olmo_layer),
    "olmo3": Family(_read_olmo3, _olmo_layer),
    "exaone4": Family(_read_exaone4, _post_normed_layer),
}
