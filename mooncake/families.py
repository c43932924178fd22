"""Families beside Llama's: what their config.json says, and which weights they have. Torch-free.

Each family is one entry of ``OTHER_FAMILIES``: a reader from its settings to a ``ModelConfig``, and the names and
shapes of its weights as Hugging Face publishes them. What a family's arithmetic is stands in ``mooncake.model``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mooncake.errors import ModelError
from mooncake.model_config import ModelConfig, Settings
from mooncake.rope_settings import read_rope

Shapes = dict[str, tuple[int, ...]]

_ACTIVATIONS = {
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """``prefix``: what some publishers leave out in front of every weight's name."""

    read: Callable[[Settings, Mapping[str, tuple[int, ...]]], dict[str, object]]
    layer_shapes: Callable[[ModelConfig], Shapes]
    layers_at: str
    top_shapes: Callable[[ModelConfig], Shapes]
    prefix: str = ""


def read_config(
    family: str,
    settings: Settings,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> ModelConfig:
    """The configuration of a model of one of ``OTHER_FAMILIES``. Raises ModelError for what is unsupported."""
    values = OTHER_FAMILIES[family].read(settings, shapes)
    base: dict[str, object] = {
        "architecture": family,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_embeddings": settings.flag("tie_word_embeddings", True),
        "qkv_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "bos_id": bos_id,
        "eos_ids": eos_ids,
    }
    return ModelConfig(**(base | values))  # type: ignore[arg-type]


def weight_shapes_of(config: ModelConfig) -> Shapes:
    """Name and shape of every weight of a model of one of ``OTHER_FAMILIES``."""
    family = OTHER_FAMILIES[config.architecture]
    shapes = dict(family.top_shapes(config))
    layer = family.layer_shapes(config)
    for number in range(config.num_layers):
        shapes |= {f"{family.layers_at}.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def published_name(architecture: str, name: str) -> str:
    """A weight's full name, where its publisher left the family's prefix out."""
    family = OTHER_FAMILIES.get(architecture)
    if family is None or not family.prefix or name.startswith((family.prefix, "lm_head.", "embed_out.")):
        return name
    return family.prefix + name


def _activation(settings: Settings, key: str, default: str) -> str:
    name = settings.get(key) or default
    if name not in _ACTIVATIONS:
        raise ModelError(f"{settings.source} asks for the activation {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[str(name)]


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _head(name: str, config: ModelConfig) -> Shapes:
    """None, where the embeddings are the head."""
    return {} if config.tie_embeddings else {f"{name}.weight": (config.vocab_size, config.hidden_size)}


# GPT-2 (Radford et al. 2019)


def _read_gpt2(settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if settings.flag(key, False):
            raise ModelError(f"{settings.source} asks for {key}, which is not supported")
    hidden, heads = settings.integer("n_embd"), settings.integer("n_head")
    return {
        "num_layers": settings.integer("n_layer"),
        "hidden_size": hidden,
        "intermediate_size": settings.integer("n_inner", 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // max(1, heads),
        "vocab_size": settings.integer("vocab_size"),
        "max_model_len": settings.integer("n_positions"),
        "rms_eps": settings.number("layer_norm_epsilon", 1e-5),
        "activation": _activation(settings, "activation_function", "gelu_new"),
        "attention_scale": 0.0 if settings.flag("scale_attn_weights", True) else 1.0,
        "qkv_bias": True,
        "rotary_dim": 0,
    }


def _gpt2_layer(config: ModelConfig) -> Shapes:
    """Its matrices are stored ``[in, out]``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        **_norm("ln_1", hidden),
        **{"attn.c_attn.weight": (hidden, 3 * hidden), "attn.c_attn.bias": (3 * hidden,)},
        **{"attn.c_proj.weight": (hidden, hidden), "attn.c_proj.bias": (hidden,)},
        **_norm("ln_2", hidden),
        **{"mlp.c_fc.weight": (hidden, inner), "mlp.c_fc.bias": (inner,)},
        **{"mlp.c_proj.weight": (inner, hidden), "mlp.c_proj.bias": (hidden,)},
    }


def _gpt2_top(config: ModelConfig) -> Shapes:
    return {
        "transformer.wte.weight": (config.vocab_size, config.hidden_size),
        "transformer.wpe.weight": (config.max_model_len, config.hidden_size),
        **_norm("transformer.ln_f", config.hidden_size),
        **_head("lm_head", config),
    }


# OPT (Zhang et al. 2022)


def _read_opt(settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    if not settings.flag("do_layer_norm_before", True):
        raise ModelError(f"{settings.source} norms after each layer (as OPT-350M alone does), which is not supported")
    if settings.integer("word_embed_proj_dim", hidden) != hidden:
        raise ModelError(f"{settings.source} projects its embeddings (as OPT-350M alone does), which is not supported")
    if settings.flag("_remove_final_layer_norm", False) or not settings.flag("enable_bias", True):
        raise ModelError(f"{settings.source} leaves out norms or biases that OPT has, which is not supported")
    return {
        "num_layers": settings.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": settings.integer("ffn_dim"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // max(1, heads),
        "vocab_size": settings.integer("vocab_size"),
        "max_model_len": settings.integer("max_position_embeddings"),
        "rms_eps": 1e-5,
        "activation": _activation(settings, "activation_function", "relu"),
        "qkv_bias": True,
        "rotary_dim": 0,
    }


OPT_POSITION_OFFSET = 2
"""Rows of OPT's position table that no position uses: an inheritance of its training code."""


def _opt_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        **{
            key: shape
            for name in ("q", "k", "v")
            for key, shape in _linear(f"self_attn.{name}_proj", hidden, hidden).items()
        },
        **_linear("self_attn.out_proj", hidden, hidden),
        **_norm("self_attn_layer_norm", hidden),
        **_linear("fc1", inner, hidden),
        **_linear("fc2", hidden, inner),
        **_norm("final_layer_norm", hidden),
    }


def _opt_top(config: ModelConfig) -> Shapes:
    positions = config.max_model_len + OPT_POSITION_OFFSET
    return {
        "model.decoder.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.decoder.embed_positions.weight": (positions, config.hidden_size),
        **_norm("model.decoder.final_layer_norm", config.hidden_size),
        **_head("lm_head", config),
    }


# GPT-NeoX (Black et al. 2022; Pythia)


def _read_gpt_neox(settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_dim = hidden // max(1, heads)
    if not settings.flag("attention_bias", True):
        raise ModelError(f"{settings.source} has no attention_bias, which is not supported")
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope = Settings(parameters if isinstance(parameters, dict) else {}, settings.source)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ModelError(f"{settings.source} scales its positions by {kind!r}, which is not supported for this family")
    share = rope.number("partial_rotary_factor", settings.number("rotary_pct", 0.25))
    return {
        "num_layers": settings.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": settings.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "vocab_size": settings.integer("vocab_size"),
        "max_model_len": settings.integer("max_position_embeddings"),
        "rope_theta": rope.number("rope_theta", settings.number("rotary_emb_base", 10_000.0)),
        "rms_eps": settings.number("layer_norm_eps", 1e-5),
        "activation": _activation(settings, "hidden_act", "gelu"),
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "qkv_bias": True,
        "rotary_dim": int(head_dim * share),
        "parallel_residual": settings.flag("use_parallel_residual", True),
    }


def _gpt_neox_layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        **_norm("input_layernorm", hidden),
        **_linear("attention.query_key_value", 3 * hidden, hidden),
        **_linear("attention.dense", hidden, hidden),
        **_norm("post_attention_layernorm", hidden),
        **_linear("mlp.dense_h_to_4h", inner, hidden),
        **_linear("mlp.dense_4h_to_h", hidden, inner),
    }


def _gpt_neox_top(config: ModelConfig) -> Shapes:
    table = (config.vocab_size, config.hidden_size)
    norm = _norm("gpt_neox.final_layer_norm", config.hidden_size)
    return {"gpt_neox.embed_in.weight": table, **norm, **_head("embed_out", config)}


# Gemma 3, text (Gemma team 2025)


def _read_gemma3(settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention_bias", "use_bidirectional_attention"):
        if settings.get(key):
            raise ModelError(f"{settings.source} asks for {key}, which is not supported")
    num_layers, heads = settings.integer("num_hidden_layers"), settings.integer("num_attention_heads")
    window = settings.integer("sliding_window", 4096)
    kinds = settings.get("layer_types")
    if kinds is None:
        every = settings.integer("sliding_window_pattern", 6)
        kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"{settings.source}: layer_types must name the kind of each of the {num_layers} layers")
    theta, local = _gemma3_rope(settings)
    return {
        "num_layers": num_layers,
        "hidden_size": settings.integer("hidden_size"),
        "intermediate_size": settings.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_key_value_heads", heads),
        "head_dim": settings.integer("head_dim", 256),
        "vocab_size": settings.integer("vocab_size"),
        "max_model_len": settings.integer("max_position_embeddings"),
        "rope_theta": theta,
        "local_rope_theta": local,
        "rms_eps": settings.number("rms_norm_eps", 1e-6),
        "activation": _activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
        "qk_norm": True,
        "layer_windows": tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        "attention_scale": settings.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _gemma3_rope(settings: Settings) -> tuple[float, float]:
    """Theta of the global and of the local layers, from the keys of either generation of config.json."""
    parameters = settings.get("rope_parameters")
    if not isinstance(parameters, dict):
        scaling = settings.get("rope_scaling")
        if isinstance(scaling, dict) and (scaling.get("rope_type") or "default") != "default":
            raise ModelError(f"{settings.source} scales its positions, which is not supported for this family")
        return settings.number("rope_theta", 1_000_000.0), settings.number("rope_local_base_freq", 10_000.0)
    thetas = []
    for kind, default in (("full_attention", 1_000_000.0), ("sliding_attention", 10_000.0)):
        own = parameters.get(kind)
        rope = Settings(own if isinstance(own, dict) else {}, settings.source)
        if (rope.get("rope_type") or "default") != "default":
            raise ModelError(f"{settings.source} scales its positions, which is not supported for this family")
        thetas.append(rope.number("rope_theta", default))
    return thetas[0], thetas[1]


def _gemma3_layer(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return {
        **_attention(config),
        **_gated("mlp", hidden, config.intermediate_size),
        **{f"{n}.weight": (hidden,) for n in names},
    }


# Mixtures of experts: Qwen3's (Qwen team 2025) and Mixtral (Jiang et al. 2024)


def _read_qwen3_moe(settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    if settings.flag("attention_bias", False) or settings.flag("use_sliding_window", False):
        raise ModelError(f"{settings.source} asks for attention_bias or a sliding window, which is not supported")
    if settings.integer("decoder_sparse_step", 1) != 1 or settings.get("mlp_only_layers"):
        raise ModelError(f"{settings.source} gives only some layers experts, which is not supported")
    return {
        **_read_moe(settings, shapes),
        "intermediate_size": settings.integer("moe_intermediate_size"),
        "qk_norm": True,
        "num_experts": settings.integer("num_experts", settings.integer("num_local_experts", 128)),
        "experts_per_token": settings.integer("num_experts_per_tok", 8),
        "norm_expert_weights": settings.flag("norm_topk_prob", False),
    }


def _read_mixtral(settings: Settings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    return {
        **_read_moe(settings, shapes, default_theta=1e6),
        "intermediate_size": settings.integer("intermediate_size"),
        "sliding_window": settings.integer("sliding_window", 0) or None,
        "num_experts": settings.integer("num_local_experts", settings.integer("num_experts", 8)),
        "experts_per_token": settings.integer("num_experts_per_tok", 2),
        "norm_expert_weights": True,
    }


def _read_moe(
    settings: Settings, shapes: Mapping[str, tuple[int, ...]], default_theta: float = 10_000.0
) -> dict[str, object]:
    if _activation(settings, "hidden_act", "silu") != "silu":
        raise ModelError(f"{settings.source} asks for an activation other than silu, which is not supported")
    heads = settings.integer("num_attention_heads")
    head_dim = settings.integer("head_dim", settings.integer("hidden_size") // max(1, heads))
    rope = read_rope(settings, head_dim, default_theta)
    return {
        "num_layers": settings.integer("num_hidden_layers"),
        "hidden_size": settings.integer("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": settings.integer("vocab_size"),
        "max_model_len": rope.max_model_len,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rms_eps": settings.number("rms_norm_eps", 1e-6),
        "tie_embeddings": settings.flag("tie_word_embeddings", "lm_head.weight" not in shapes),
    }


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Of a layer's mixture, below the layer; ``gate``, ``up`` and ``down`` below each expert."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


EXPERT_NAMES = {
    "qwen3_moe": ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
}


def _moe_layer(config: ModelConfig) -> Shapes:
    hidden, inner, names = config.hidden_size, config.intermediate_size, EXPERT_NAMES[config.architecture]
    layer = {**_attention(config), f"{names.router}.weight": (config.num_experts, hidden)}
    for expert in range(config.num_experts):
        at = f"{names.experts}.{expert}"
        layer |= {f"{at}.{name}.weight": (inner, hidden) for name in (names.gate, names.up)}
        layer[f"{at}.{names.down}.weight"] = (hidden, inner)
    return layer | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _attention(config: ModelConfig) -> Shapes:
    hidden, dim = config.hidden_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    return {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        **({f"self_attn.{name}_norm.weight": (dim,) for name in "qk"} if config.qk_norm else {}),
    }


def _gated(name: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def _llama_top(config: ModelConfig) -> Shapes:
    table = (config.vocab_size, config.hidden_size)
    norm = {"model.norm.weight": (config.hidden_size,)}
    return {"model.embed_tokens.weight": table, **norm, **_head("lm_head", config)}


OTHER_FAMILIES: dict[str, Family] = {
    "gpt2": Family(_read_gpt2, _gpt2_layer, "transformer.h", _gpt2_top, prefix="transformer."),
    "opt": Family(_read_opt, _opt_layer, "model.decoder.layers", _opt_top, prefix="model."),
    "gpt_neox": Family(_read_gpt_neox, _gpt_neox_layer, "gpt_neox.layers", _gpt_neox_top, prefix="gpt_neox."),
    "gemma3_text": Family(_read_gemma3, _gemma3_layer, "model.layers", _llama_top),
    "qwen3_moe": Family(_read_qwen3_moe, _moe_layer, "model.layers", _llama_top),
    "mixtral": Family(_read_mixtral, _moe_layer, "model.layers", _llama_top),
}
