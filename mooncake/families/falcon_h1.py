"""Falcon-H1 (TII 2025, arXiv 2507.22448): attention and Mamba-2 beside each other in every layer. Torch-free.

As the cache has them these are two layers, one with a state and one with KV.
"""

from __future__ import annotations

from dataclasses import replace

from mooncake.errors import ModelError
from mooncake.families.family import Family, Published, Shapes, num_layers_of
from mooncake.families.gated import attention_shapes, read_silu
from mooncake.families.hybrid import state_windows
from mooncake.families.mamba import mamba_shapes, mlp_shapes, read_mamba, top_shapes
from mooncake.model_config import Factors, Mamba, ModelConfig, Settings


def _read(settings: Settings, shapes: Published) -> dict[str, object]:
    settings.refuse("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
    settings = settings.with_defaults({"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024})
    num_layers = 2 * num_layers_of(settings)
    recurrent = tuple(range(0, num_layers, 2))
    values, states = read_silu(settings, shapes), read_mamba(settings, recurrent)
    mamba, head_dim = states["mamba"], values["head_dim"]
    assert isinstance(mamba, Mamba) and isinstance(head_dim, int)
    entering = _factor(settings, "attention_in_multiplier")
    # Scores grow with what enters queries and keys, and what attention adds with what enters values.
    scale = head_dim**-0.5 * entering**2 * _factor(settings, "key_multiplier")
    gate, down = _factors(settings, "mlp_multipliers", 2)
    factors = Factors(
        inputs=tuple(
            _factor(settings, "ssm_in_multiplier") * each for each in _factors(settings, "ssm_multipliers", 5)
        ),
        state_space=_factor(settings, "ssm_out_multiplier"),
        attention=entering * _factor(settings, "attention_out_multiplier"),
        gate=gate,
        mlp=down,
    )
    has_norm = settings.flag("mamba_rms_norm", False)
    return {
        **values,
        **states,
        "num_layers": num_layers,
        "layer_windows": state_windows(num_layers, recurrent),
        "intermediate_size": settings.integer("intermediate_size"),
        "attention_scale": scale,
        "embedding_factor": _factor(settings, "embedding_multiplier"),
        "logit_divisor": 1 / _factor(settings, "lm_head_multiplier"),
        "mamba": replace(
            mamba,
            norm_groups=mamba.norm_groups if has_norm else 0,
            norms_first=settings.flag("mamba_norm_before_gate", True),
            factors=factors,
        ),
    }


def _factor(settings: Settings, key: str) -> float:
    value = settings.number(key, 1.0)
    if not 0 < abs(value) < 1e6:
        raise ModelError(f"{settings.source}: {key} must be a number other than 0, got {value}")
    return value


def _factors(settings: Settings, key: str, count: int) -> list[float]:
    given = settings.get(key) or [1.0] * count
    if not isinstance(given, list) or len(given) != count:
        raise ModelError(f"{settings.source}: {key} must be {count} numbers, got {given!r}")
    return [_factor(Settings({key: each}, settings.source), key) for each in given]


def _all(config: ModelConfig) -> Shapes:
    layer = attention_shapes(config) | mamba_shapes("mamba", config) | mlp_shapes(config)
    layers = range(config.num_layers // 2)
    return top_shapes(config) | {f"model.layers.{n}.{name}": shape for n in layers for name, shape in layer.items()}


FALCON_H1_FAMILIES: dict[str, Family] = {
    "falcon_h1": Family(_read, attention_shapes, top_shapes=_all, own_shapes=lambda config, layer: {})
}
