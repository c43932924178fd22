"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624), also Nemotron Nano 2 and Nemotron 3: each published layer is one of
Mamba-2, attention, an MLP and a mixture of experts. Torch-free.

A layer, as the cache has them, is one of the former two with all of the latter that follow it.
"""

from __future__ import annotations

from dataclasses import replace

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, activation, llama_top
from mooncake.families.gated import attention_shapes, expert_names, read_silu
from mooncake.families.mamba import mamba_shapes, read_mamba
from mooncake.families.routed import read_mixture
from mooncake.model_config import MAX_LAYERS, Mamba, ModelConfig, Settings

MAMBA, ATTENTION, MLP, MIXTURE = MIXERS_AND_MLPS = "M*-E"
_LETTERS = {
    **{"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION},
    **{"mlp": MLP, "moe": MIXTURE},
}
_AS_MAMBA = {
    **{"mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "n_groups": "mamba_n_groups"},
    **{"ssm_state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"},
    **{"use_bias": "mamba_proj_bias", "layer_norm_epsilon": "rms_norm_eps"},
}
_USUAL = {
    **{"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 8, "mamba_d_state": 128, "rms_norm_eps": 1e-5},
    **{"head_dim": 128, "num_key_value_heads": 8, "mamba_proj_bias": False},
}


_STILL = {"rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None}  # no head rotates


def _read(settings: Settings, shapes: Published) -> dict[str, object]:
    """A ``time_step_min`` is for training alone."""
    settings.refuse("attention_bias", "mlp_bias")
    pattern = _pattern(settings)
    mixers = [letter for letter in pattern if letter in (MAMBA, ATTENTION)]
    recurrent = tuple(layer for layer, letter in enumerate(mixers) if letter == MAMBA)
    renamed = {_AS_MAMBA[key]: value for key, value in settings.tree.items() if key in _AS_MAMBA}
    own = {**renamed, **_STILL, "num_hidden_layers": len(mixers)}
    settings = settings.with_defaults(_USUAL).replaced(own)
    inner = settings.integer("mamba_n_heads") * settings.integer("mamba_d_head")
    states = read_mamba(settings.replaced({"mamba_d_ssm": inner}), recurrent)
    mamba = states["mamba"]
    assert isinstance(mamba, Mamba)
    values = {
        **read_silu(settings, shapes),
        **states,
        "intermediate_size": settings.integer("intermediate_size", 21_504),
        "activation": activation(settings, "mlp_hidden_act", "relu2"),
        "still_layers": tuple(range(len(mixers))),
        "mamba": replace(mamba, pattern=pattern, latent_size=settings.integer("moe_latent_size", 0)),
    }
    if MIXTURE not in pattern:
        return values
    if values["activation"] != "relu2":
        raise ModelError(
            f"{settings.source} asks for experts with an activation other than relu2, which is not supported"
        )
    shared = settings.integer("moe_shared_expert_intermediate_size")
    return {**values, **read_mixture(settings, "sigmoid", factor=1.0, is_grouped=True), "shared_expert_size": shared}


def _pattern(settings: Settings) -> str:
    """Of a letter for each published layer."""
    given = settings.get("hybrid_override_pattern")
    if not isinstance(given, str):
        kinds = settings.get("layers_block_type") or settings.get("layer_types")
        if not isinstance(kinds, list):
            raise ModelError(f"{settings.source} does not say of which kind its layers are (hybrid_override_pattern)")
        given = "".join(_LETTERS.get(str(kind), "?") for kind in kinds)
    if not set(given) <= set(MIXERS_AND_MLPS) or not given or given[0] not in (MAMBA, ATTENTION):
        raise ModelError(
            f"{settings.source}: the pattern of layers must be of the letters {MIXERS_AND_MLPS}, the first M or *"
        )
    if len(given) > MAX_LAYERS:
        raise ModelError(f"num_layers of the model must be between 1 and {MAX_LAYERS}, got {len(given)}")
    return given


def published_layers(pattern: str) -> list[list[int]]:
    """Of each layer as the cache has them, the numbers of those published."""
    layers: list[list[int]] = []
    for number, letter in enumerate(pattern):
        if letter in (MAMBA, ATTENTION):
            layers.append([])
        layers[-1].append(number)
    return layers


def _all(config: ModelConfig) -> Shapes:
    assert config.mamba is not None
    parts = {letter: _shapes_of(letter, config) for letter in set(config.mamba.pattern)}
    return llama_top(config) | {
        f"model.layers.{number}.{name}": shape
        for number, letter in enumerate(config.mamba.pattern)
        for name, shape in parts[letter].items()
    }


def _shapes_of(letter: str, config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    norm: Shapes = {"norm.weight": (hidden,)}
    if letter == MAMBA:
        return norm | mamba_shapes("mixer", config)
    if letter == ATTENTION:
        return norm | {name.replace("self_attn", "mixer"): shape for name, shape in attention_shapes(config).items()}
    return norm | (_mlp("mixer", hidden, config.intermediate_size) if letter == MLP else _mixture(config))


def _mixture(config: ModelConfig) -> Shapes:
    names, hidden, count = expert_names(config), config.hidden_size, config.num_experts
    assert config.routing is not None and config.mamba is not None
    latent = config.mamba.latent_size
    shapes: Shapes = {f"{names.router}.weight": (count, hidden), names.choice_bias: (count,)}
    for expert in range(count):
        shapes |= _mlp(f"{names.experts}.{expert}", latent or hidden, config.routing.expert_size)
    if latent:
        shapes |= {
            "mixer.fc1_latent_proj.weight": (latent, hidden),
            "mixer.fc2_latent_proj.weight": (hidden, latent),
        }
    return shapes | _mlp(names.shared, hidden, config.shared_expert_size)


def _mlp(name: str, hidden: int, inner: int) -> Shapes:
    return {f"{name}.up_proj.weight": (inner, hidden), f"{name}.down_proj.weight": (hidden, inner)}


NEMOTRON_H_FAMILIES: dict[str, Family] = {
    "nemotron_h": Family(
        _read,
        attention_shapes,
        "model.layers",
        _all,
        own_shapes=lambda config, layer: {},
        renamed=(
            *((f"{base}.embeddings.", "model.embed_tokens.") for base in ("backbone", "model")),
            *((f"{base}.norm_f.", "model.norm.") for base in ("backbone", "model")),
            ("backbone.", "model."),
        ),
    )
}
