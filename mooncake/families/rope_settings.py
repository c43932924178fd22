"""Reads and checks the settings of rotary positions from config.json, in the keys of either generation. Torch-free.

Derived values, such as the scaling's ``attention_factor``, are computed here; ``mooncake.model.rope`` computes the
tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mooncake.errors import ModelError
from mooncake.model_config import MAX_POSITIONS, Settings

Scaling = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: Scaling | None  # as ``ModelConfig.rope_scaling`` before ``ModelConfig.for_context``
    rotary_dim: int  # elements of a head that rotate; -1: all
    max_model_len: int  # tokens

    @property
    def values(self) -> dict[str, object]:
        """As in ``ModelConfig``."""
        return {
            "rope_theta": self.theta,
            "rope_scaling": self.scaling,
            "rotary_dim": self.rotary_dim,
            "max_model_len": self.max_model_len,
        }


def require_rope_scaling(settings: Settings) -> None:
    """Raises ModelError for a configuration without it, whose family has no usual one."""
    if not (settings.get("rope_parameters") or settings.get("rope_scaling")):
        raise ModelError(f"{settings.source} does not say how positions are scaled (rope_scaling)")


def read_rope(settings: Settings, head_dim: int, default_theta: float = 10_000.0, partial: bool = False) -> Rope:
    """From rope_parameters, or rope_theta and rope_scaling. ``partial``: a part of each head may rotate.

    Raises ModelError for unsupported or invalid settings.
    """
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError(f"{settings.source}: the rope parameters must be an object")
    rope = Settings(parameters, settings.source)
    theta = rope.number("rope_theta", settings.number("rope_theta", default_theta))
    rotary_dim = _rotary_dim(settings, rope, head_dim, partial)
    rotating = -1 if rotary_dim == head_dim else rotary_dim
    num_positions = settings.integer("max_position_embeddings")
    if not 0 < num_positions <= MAX_POSITIONS:
        raise ModelError(f"{settings.source}: max_position_embeddings must be between 1 and {MAX_POSITIONS}")
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    kind = _FORMER_NAMES.get(kind, kind)
    if kind == "dynamic" and rope.get("alpha"):
        raise ModelError(f"{settings.source} changes its rope_theta by alpha, which is not supported")
    if kind in ("default", "dynamic"):  # the latter scales only from the end of our context on
        return Rope(theta, None, rotating, num_positions)
    if kind not in _READERS:
        raise ModelError(f"{settings.source} scales its positions by {kind!r}; supported: {', '.join(_READERS)}")
    if kind == "yarn" and theta <= 1:
        raise ModelError(f"{settings.source}: the rope scaling 'yarn' needs a rope_theta above 1, got {theta:g}")
    scaling = _READERS[kind](settings, rope, rotary_dim)
    if kind == "linear":  # config.json counts positions before scaling; so many tokens share one
        num_positions = int(num_positions * _of(scaling, "factor"))
    if kind == "yarn":
        num_positions = int(_of(scaling, "original_max_position_embeddings") * _of(scaling, "factor"))
    return Rope(theta, {"rope_type": kind, **scaling}, rotating, num_positions)


def _rotary_dim(settings: Settings, rope: Settings, head_dim: int, partial: bool) -> int:
    """How many of a head's elements rotate. Raises ModelError."""
    share = rope.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0))
    if not abs(share) < 1e6:
        raise ModelError(f"{settings.source}: partial_rotary_factor must be a share of a head, got {share}")
    rotary_dim = int(head_dim * share)
    if rotary_dim != head_dim and not partial:
        raise ModelError(f"{settings.source} rotates only a part of each head, which is not supported")
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"{settings.source} rotates {rotary_dim} of a head's {head_dim} elements")
    return rotary_dim


def read_query_growth(settings: Settings) -> dict[str, object]:
    """``ModelConfig.query_growth`` of Mistral's models of 2025 and later. Raises ModelError for invalid numbers."""
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling")
    if not isinstance(parameters, dict) or not parameters:
        raise ModelError(f"{settings.source} does not say how positions are scaled (rope_parameters)")
    rope = Settings(parameters, settings.source)
    growth, span = rope.number("llama_4_scaling_beta", 0.0), rope.integer("original_max_position_embeddings", 0)
    if not 0 <= growth < 1e6 or (growth and not 0 < span <= MAX_POSITIONS):
        what = "llama_4_scaling_beta must not be negative, and needs original_max_position_embeddings"
        raise ModelError(f"{settings.source}: {what}, got {growth} and {span}")
    return {"query_growth": growth, "query_span": span} if growth else {}


_FORMER_NAMES = {"su": "longrope", "mrope": "default"}  # M-RoPE, for text


def _linear(settings: Settings, rope: Settings, rotary_dim: int) -> Scaling:
    return {"factor": _positive(rope, "linear", "factor")}


def _llama3(settings: Settings, rope: Settings, rotary_dim: int) -> Scaling:
    factors = {name: _positive(rope, "llama3", name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return factors | {"original_max_position_embeddings": _trained_len(settings, rope, "llama3")}


def _yarn(settings: Settings, rope: Settings, rotary_dim: int) -> Scaling:
    factor = _positive(rope, "yarn", "factor")
    return yarn_scaling(
        settings.source,
        factor,
        _trained_len(settings, rope, "yarn"),
        rope.number("beta_fast", 0.0) or 32.0,
        rope.number("beta_slow", 0.0) or 1.0,
        rope.flag("truncate", True),
        _attention_factor(rope, "yarn", lambda: _yarn_attention_factor(rope, factor)),
    )


def yarn_scaling(
    source: str,
    factor: float,
    trained_len: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    attention_factor: float | None,
) -> Scaling:
    """YaRN (Peng et al. 2023), with its attention temperature as a factor on the rotations.

    Raises ModelError, naming ``source``, for invalid numbers.
    """
    numbers = {
        "factor": factor,
        "original_max_position_embeddings": trained_len,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "attention_factor": yarn_sharpness(factor) if attention_factor is None else attention_factor,
    }
    return {name: _checked(source, "yarn", name, value) for name, value in numbers.items()} | {"truncate": truncate}


def _yarn_attention_factor(rope: Settings, factor: float) -> float:
    mscale, of_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and of_all:
        return yarn_sharpness(factor, mscale) / yarn_sharpness(factor, of_all)
    return yarn_sharpness(factor)


def yarn_sharpness(factor: float, mscale: float = 1.0) -> float:
    """YaRN's sqrt(1 / t) for a context extended by ``factor`` (its section 3.4)."""
    return 1.0 if not factor > 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(settings: Settings, rope: Settings, rotary_dim: int) -> Scaling:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, one set for short contexts and one for long ones."""
    trained_len = _trained_len(settings, rope, "longrope")
    factor = rope.number("factor", settings.integer("max_position_embeddings") / trained_len)

    def attention_factor() -> float:
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained_len))

    return {
        "original_max_position_embeddings": trained_len,
        "short_factor": _divisors(rope, "short_factor", rotary_dim // 2),
        "long_factor": _divisors(rope, "long_factor", rotary_dim // 2),
        "attention_factor": _attention_factor(rope, "longrope", attention_factor),
    }


_READERS: dict[str, Callable[[Settings, Settings, int], Scaling]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _trained_len(settings: Settings, rope: Settings, kind: str) -> float:
    """The trained context (tokens). If it is given twice, the value beside max_position_embeddings counts, as in other
    implementations."""
    name = "original_max_position_embeddings"
    own = rope.number(name, settings.integer("max_position_embeddings"))
    trained_len = _checked(settings.source, kind, name, settings.number(name, own))
    if trained_len <= 1:
        raise ModelError(f"{settings.source}: the rope scaling {kind!r} needs {name} above 1")
    return trained_len


def _attention_factor(rope: Settings, kind: str, default: Callable[[], float]) -> float:
    given = rope.get("attention_factor")
    return default() if given is None else _positive(rope, kind, "attention_factor")


def _divisors(rope: Settings, name: str, count: int) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(f"{rope.source}: the rope scaling 'longrope' needs {count} numbers as {name}")
    return tuple(_checked(rope.source, "longrope", name, value) for value in values)


def _positive(rope: Settings, kind: str, name: str) -> float:
    return _checked(rope.source, kind, name, rope.number(name, math.nan))


def _checked(source: str, kind: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_POSITIONS:
        raise ModelError(f"{source}: the rope scaling {kind!r} needs a positive {name}")
    return float(value)


def _of(scaling: Scaling, name: str) -> float:
    value = scaling[name]
    assert isinstance(value, float)
    return value
