"""Tables of rotary position embedding: one row of cosines and sines per position, for the scalings that models ship.

Frequencies and angles are float32, as in the implementations that the models were trained and published with, so that
the same rounding is applied at long positions. Applying the tables is a kernel's job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mooncake.errors import ModelError
from mooncake.model_config import ModelConfig

Tables = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, float32 [P, D / 2]


def rope_tables(
    head_dim: int, num_positions: int, theta: float, scaling: Mapping[str, object] | None, rotary_dim: int = -1
) -> Tables:
    """For this many positions, multiplied by the scaling's attention factor. Only the first ``rotary_dim`` elements
    of a head rotate (-1: all), once ``rotary_order`` has moved them. Raises ModelError for an unknown scaling."""
    scaling = scaling or {}
    width = head_dim if rotary_dim < 0 else rotary_dim
    periods = theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), _frequencies(periods, theta, scaling))
    sharpness = _number(scaling, "attention_factor") if "attention_factor" in scaling else 1.0
    cos, sin = angles.cos() * sharpness, angles.sin() * sharpness
    if width == head_dim:
        return cos, sin
    still_cos, still_sin = no_rotation(num_positions, head_dim - width)
    return torch.cat([cos, still_cos], 1), torch.cat([sin, still_sin], 1)


def tables_by_layer(config: ModelConfig, num_positions: int, device: torch.device) -> list[Tables]:
    """Each layer's tables; layers that rotate alike share them. Raises ModelError for an unknown scaling."""
    made: dict[tuple[str, int], Tables] = {}

    def tables_of(layer: int) -> Tables:
        dim = config.heads_of(layer)[1]
        is_local = bool(config.local_rope_theta and config.window_of(layer))
        how = "still" if layer in config.still_layers else "locally" if is_local else "widely"
        if (how, dim) not in made:
            if how == "still":
                tables = no_rotation(num_positions, dim)
            elif is_local:
                tables = rope_tables(dim, num_positions, config.local_rope_theta, None, config.rotary_dim)
            else:
                tables = rope_tables(dim, num_positions, config.rope_theta, config.rope_scaling, config.rotary_dim)
            cos, sin = (table.to(device) for table in tables)
            made[how, dim] = cos, sin
        return made[how, dim]

    return [tables_of(layer) for layer in range(config.num_layers)]


def query_scales(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor | None:
    """float32 [P]: what queries at each position are multiplied by; None: nothing (``ModelConfig.query_growth``)."""
    if not config.query_growth:
        return None
    spans = torch.floor((torch.arange(num_positions) + config.query_offset) / config.query_span)
    return (1 + config.query_growth * torch.log(1 + spans)).to(device)


def no_rotation(num_positions: int, head_dim: int) -> Tables:
    """Tables that leave every element unchanged, bit for bit: models with learned positions rotate nothing."""
    half = head_dim // 2
    return torch.ones(num_positions, half), torch.zeros(num_positions, half)


def rotary_order(head_dim: int, rotary_dim: int, in_turn: bool = False) -> torch.Tensor:
    """int64 ``[head_dim]``: the order in which a head whose first elements rotate in pairs (i, i + rotary_dim / 2) has
    the pairs (i, i + head_dim / 2), as kernels expect; elements that do not rotate fill the rest of both halves.
    ``rotary_dim`` as in ``rope_tables``; ``in_turn``: the pairs are (2 i, 2 i + 1).

    Queries and keys are reordered alike, so their products are unchanged.
    """
    pairs, half = (head_dim if rotary_dim < 0 else rotary_dim) // 2, head_dim // 2
    turning, still = torch.arange(2 * pairs), torch.arange(2 * pairs, head_dim)
    first, second = (turning[::2], turning[1::2]) if in_turn else turning.chunk(2)
    return torch.cat([first, still[: half - pairs], second, still[half - pairs :]])


def heads_in_order(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``rows`` ``[heads * D, …]`` with those of each head in ``order`` ``[D]``."""
    return rows.view(-1, len(order), *rows.shape[1:])[:, order].flatten(0, 1)


def _frequencies(periods: torch.Tensor, theta: float, scaling: Mapping[str, object]) -> torch.Tensor:
    """``periods`` [D / 2]: tokens per radian of each pair, before scaling."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return 1.0 / periods
    if kind == "linear":
        return 1.0 / periods / _number(scaling, "factor")
    if kind == "llama3":
        return _llama3(1.0 / periods, scaling)
    if kind == "yarn":
        return _yarn(periods, theta, scaling)
    if kind == "longrope":
        return 1.0 / (_factors(scaling) * periods)
    if kind == "proportional":
        return _proportional(1.0 / periods, scaling)
    raise ModelError(
        f"this model scales its positions by {kind!r}; supported are default, linear, llama3, yarn, longrope "
        "and proportional"
    )


def _proportional(frequencies: torch.Tensor, scaling: Mapping[str, object]) -> torch.Tensor:
    """Only the fastest pairs turn, as fast as if all did (Gemma 4's global layers)."""
    num_turning = int(_number(scaling, "partial_rotary_factor") * len(frequencies))
    frequencies[num_turning:] = 0.0
    return frequencies / _number(scaling, "factor")


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, object]) -> torch.Tensor:
    """Stretch slow frequencies by ``factor``, keep fast ones, blend between (Llama 3.1 model card and code)."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    trained_len = _number(scaling, "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    blend = ((trained_len / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > trained_len / low, frequencies / factor, blended)
    return torch.where(wavelengths < trained_len / high, frequencies, stretched)


def _yarn(periods: torch.Tensor, theta: float, scaling: Mapping[str, object]) -> torch.Tensor:
    """Stretch pairs that rotate fewer than ``beta_slow`` times over the trained length, keep those that rotate more
    than ``beta_fast`` times, and interpolate by pair index between ("NTK-by-parts", Peng et al. 2023)."""
    dim = 2 * len(periods)
    factor, trained_len = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained_len / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = (pair_that_turns(_number(scaling, name)) for name in ("beta_fast", "beta_slow"))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept


def _factors(scaling: Mapping[str, object]) -> torch.Tensor:
    values = scaling.get("factors")
    if not isinstance(values, tuple):
        raise ModelError("which of LongRoPE's factors count is settled by ModelConfig.for_context")
    return torch.tensor(values, dtype=torch.float32)


def _number(scaling: Mapping[str, object], name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, (int, float)):
        raise ModelError(f"the model's rope_scaling lacks a number for {name}: {dict(scaling)!r}")
    return float(value)
