"""Families with layers of Mamba-2: Granite 4 (Granite team, IBM 2025; some have none) and Bamba (Ahuja et al. 2024).
Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, gated_shapes, head_shapes, num_layers_of
from mooncake.families.gated import attention_shapes, layer_norms, read_granite, read_silu, router_shape
from mooncake.families.hybrid import layers_of_kind, state_windows
from mooncake.model_config import Mamba, ModelConfig, Recurrence, Settings

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # as layers were called before
_UNLIMITED = [[0, upper] for upper in (float("inf"), "Infinity", {"__float__": "Infinity"})]  # as files have it


# Granite 4


def _read_granite(settings: Settings, shapes: Published) -> dict[str, object]:
    num_layers, kinds = num_layers_of(settings), settings.get("layer_types")
    num_experts = settings.integer("num_local_experts", 8)
    own: dict[str, object] = {"shared_intermediate_size": 1024, **settings.tree}
    own["layer_types"] = [_KINDS.get(str(kind), kind) for kind in kinds] if isinstance(kinds, list) else kinds
    inner = own["intermediate_size" if num_experts else "shared_intermediate_size"]
    settings = Settings({**own, "intermediate_size": inner}, settings.source)
    recurrent = layers_of_kind(settings, "linear_attention")
    if num_experts and not recurrent:
        raise ModelError(f"{settings.source} has experts and no layers of Mamba, which is not supported")
    rotates = settings.get("position_embedding_type") == "rope"
    values: dict[str, object] = {
        **read_granite(settings, shapes),
        "still_layers": () if rotates else tuple(range(num_layers)),
    }
    if num_experts:
        values |= {
            "num_experts": num_experts,
            "experts_per_token": settings.integer("num_experts_per_tok", 2),
            "norm_expert_weights": True,
            "shared_expert_size": settings.integer("shared_intermediate_size"),
        }
    return values | (read_mamba(settings, recurrent) if recurrent else {})


def _granite_layer(config: ModelConfig, layer: int) -> Shapes:
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
    shared = config.shared_expert_size or inner
    experts: Shapes = {
        **router_shape(config),
        "block_sparse_moe.input_linear.weight": (count, 2 * inner, hidden),
        "block_sparse_moe.output_linear.weight": (count, hidden, inner),
    }
    return {
        **mixer_shapes(config, layer),
        **layer_norms(config),
        **(experts if count else {}),
        "shared_mlp.input_linear.weight": (2 * shared, hidden),
        "shared_mlp.output_linear.weight": (hidden, shared),
    }


# Bamba


def _read_bamba(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("attention_bias", "mlp_bias")
    attending, usual = settings.get("attn_layer_indices"), {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}
    if not isinstance(attending, list):
        raise ModelError(f"{settings.source} says of no layer that it attends (attn_layer_indices)")
    settings = settings.with_defaults(usual)
    recurrent = tuple(layer for layer in range(num_layers_of(settings)) if layer not in attending)
    return {
        **read_silu(settings, shapes, partial=True),
        "intermediate_size": settings.integer("intermediate_size"),
        **read_mamba(settings, recurrent),
    }


def _bamba_layer(config: ModelConfig, layer: int) -> Shapes:
    return mixer_shapes(config, layer) | mlp_shapes(config)


# Shared by families with Mamba-2


def mlp_shapes(config: ModelConfig) -> Shapes:
    """Of a layer's MLP and norms, as Bamba and Falcon-H1 name them."""
    hidden = config.hidden_size
    norms: Shapes = {f"{name}.weight": (hidden,) for name in ("input_layernorm", "pre_ff_layernorm")}
    return norms | gated_shapes("feed_forward", hidden, config.intermediate_size)


def top_shapes(config: ModelConfig) -> Shapes:
    """As Bamba and Falcon-H1 name them."""
    table = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    return {**table, "model.final_layernorm.weight": (config.hidden_size,), **head_shapes("lm_head", config)}


def read_mamba(settings: Settings, layers: tuple[int, ...]) -> dict[str, object]:
    """Of a model with these ``layers`` of Mamba-2."""
    limits = settings.get("time_step_limit")
    if limits is not None and limits not in _UNLIMITED:
        raise ModelError(f"{settings.source} asks for a time_step_limit of {limits}, which is not supported")
    heads, groups = settings.integer("mamba_n_heads", 128), settings.integer("mamba_n_groups", 1)
    inner, state_dim = _inner_size(settings), settings.integer("mamba_d_state", 256)
    return {
        "layer_windows": state_windows(num_layers_of(settings), layers),
        "recurrence": Recurrence(
            layers=layers,
            taps=settings.integer("mamba_d_conv", 4),
            channels=inner + 2 * groups * state_dim,
            num_value_heads=heads,
            value_dim=inner // max(1, heads),
            num_key_heads=groups,
            key_dim=state_dim,
        ),
        "mamba": Mamba(
            norm_groups=groups,
            has_conv_bias=settings.flag("mamba_conv_bias", True),
            has_biases=settings.flag("mamba_proj_bias", False),
        ),
    }


def _inner_size(settings: Settings) -> int:
    """Of all heads of x."""
    heads = settings.integer("mamba_n_heads", 128)
    expanded = settings.integer("mamba_expand", 2) * settings.integer("hidden_size")
    inner, given = settings.integer("mamba_d_ssm", expanded), settings.get("mamba_d_head")
    head_dim = inner // max(1, heads) if given in (None, "auto") else settings.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(f"{settings.source}: {heads} heads of Mamba of {head_dim} are not {inner} elements")
    return inner


def mixer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Of the layer's attention or state space."""
    it = config.recurrence
    return mamba_shapes("mamba", config) if it and layer in it.layers else attention_shapes(config)


def mamba_shapes(name: str, config: ModelConfig) -> Shapes:
    shape, mamba, hidden = config.recurrence, config.mamba, config.hidden_size
    assert shape is not None and mamba is not None
    heads = shape.num_value_heads
    inner = heads * shape.value_dim
    biases: Shapes = {"in_proj.bias": (inner + shape.channels + heads,), "out_proj.bias": (hidden,)}
    shapes: Shapes = {
        "in_proj.weight": (inner + shape.channels + heads, hidden),
        "conv1d.weight": (shape.channels, 1, shape.taps),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "out_proj.weight": (hidden, inner),
        **({"norm.weight": (inner,)} if mamba.norm_groups else {}),
        **({"conv1d.bias": (shape.channels,)} if mamba.has_conv_bias else {}),
        **(biases if mamba.has_biases else {}),
    }
    return {f"{name}.{part}": size for part, size in shapes.items()}


MAMBA_FAMILIES: dict[str, Family] = {
    "granitemoehybrid": Family(_read_granite, attention_shapes, own_shapes=_granite_layer),
    "bamba": Family(_read_bamba, attention_shapes, top_shapes=top_shapes, own_shapes=_bamba_layer),
}
