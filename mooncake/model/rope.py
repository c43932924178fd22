"""Tables of rotary position embedding: one row of cosines and sines per position, for the scalings that models ship.

Frequencies and angles are float32, as in the implementations that the models were trained and published with, so that
the same rounding is applied at long positions. Applying the tables is a kernel's job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mooncake.errors import ModelError


def rope_tables(
    head_dim: int, num_positions: int, theta: float, scaling: Mapping[str, object] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 ``[num_positions, head_dim / 2]`` each. Raises ModelError for an unknown scaling."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies = _scale(frequencies, scaling or {})
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _scale(frequencies: torch.Tensor, scaling: Mapping[str, object]) -> torch.Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / _number(scaling, "factor")
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ModelError(f"this model scales its positions by {kind!r}; supported are default, linear and llama3")


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


def _number(scaling: Mapping[str, object], name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, (int, float)):
        raise ModelError(f"the model's rope_scaling lacks a number for {name}: {dict(scaling)!r}")
    return float(value)
