"""Reads how a GGUF file scales its rotary positions, as ``ModelConfig.rope_scaling`` says it. Torch-free.

llama.cpp stores YaRN and linear scaling as parameters, Llama 3's as a table of what frequencies are divided by, and
LongRoPE's two sets of divisors as tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mooncake.errors import ModelError
from mooncake.families.rope_settings import yarn_scaling
from mooncake.gguf.metadata import Metadata
from mooncake.model_config import MAX_POSITIONS

Scaling = Mapping[str, object]

THETA = "rope.freq_base"
TRAINED_LEN = "rope.scaling.original_context_length"
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
FREQUENCIES = "rope_freqs.weight"  # a tensor of what frequencies are divided by

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

# Llama 3.1 and 3.2 GGUF files contain scaled frequencies, not parameters: these are the ones they were made with.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_theta(meta: Metadata) -> float:
    return meta.number(THETA, 10_000.0)


def read_scaling(
    meta: Metadata, rotary_dim: int, truncate: bool = True, attention_factor: float | None = None
) -> Scaling | None:
    """``rotary_dim``: elements of a head that rotate. ``truncate``: YaRN's borders are whole numbers of pairs.
    ``attention_factor``: YaRN's, as the architecture reads it out of ``LOG_MULTIPLIER``. Raises ModelError for what is
    unsupported or invalid."""
    kind = meta.text("rope.scaling.type", "none")
    if meta.has_tensor(FREQUENCIES):
        return _llama3(meta, rotary_dim)
    if meta.has_tensor(_LONG) or meta.has_tensor(_SHORT):
        return _longrope(meta, rotary_dim)
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta.positive("rope.scaling.factor")}
    if kind == "yarn":
        return {"rope_type": "yarn", **_yarn(meta, truncate, attention_factor)}
    if kind == "longrope":
        raise ModelError(f"{meta.source} scales its positions by 'longrope' and lacks the factors ({_LONG})")
    if kind != "none":
        raise ModelError(f"{meta.source} scales its positions by {kind!r}; supported: linear, llama3, yarn, longrope")
    return None


def log_multiplier(meta: Metadata) -> float:
    """What YaRN divides its sharpness by: ``mscale_all_dim`` or, in files of DeepSeek, a tenth of it; 0: nothing."""
    stored = meta.number(LOG_MULTIPLIER, 0.0)
    if not 0 <= stored < 1e6:
        raise meta.wrong(LOG_MULTIPLIER, f"must be positive or 0, got {stored}")
    return stored


def context_of(meta: Metadata, scaling: Scaling | None) -> int:
    """Tokens of prompt plus answer; with YaRN the same as from config.json, whatever else the file says."""
    length = meta.integer("context_length")
    if scaling and scaling["rope_type"] == "yarn":
        return int(meta.number(TRAINED_LEN, length) * meta.number("rope.scaling.factor"))
    return length


def _yarn(meta: Metadata, truncate: bool, attention_factor: float | None) -> Scaling:
    for key in ("rope.scaling.attn_factor", *(() if attention_factor else (LOG_MULTIPLIER,))):
        if meta.number(key, 0.0):
            raise ModelError(f"{meta.source} asks for {key}, which is not supported")
    if meta.number("rope.scaling.yarn_ext_factor", 1.0) not in (0.0, 1.0):
        raise ModelError(f"{meta.source} asks for rope.scaling.yarn_ext_factor, which is not supported")
    if not rope_theta(meta) > 1:
        raise ModelError(f"{meta.source}: YaRN needs a {THETA} above 1")
    own = meta.number("rope.scaling.yarn_attn_factor", 0.0)  # config.json's attention_factor
    return yarn_scaling(
        meta.source,
        meta.number("rope.scaling.factor"),
        meta.number(TRAINED_LEN, meta.integer("context_length")),
        meta.number("rope.scaling.yarn_beta_fast", 32.0),
        meta.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate,
        own or attention_factor,
    )


def _llama3(meta: Metadata, rotary_dim: int) -> Scaling:
    """The parameters behind a table of frequency divisors, verified by recomputing the table from them."""
    table, theta = floats(meta, FREQUENCIES), rope_theta(meta)
    factor = max(table, default=0.0)
    low, high = _LLAMA3_SCALING["low_freq_factor"], _LLAMA3_SCALING["high_freq_factor"]
    trained_len = _LLAMA3_SCALING["original_max_position_embeddings"]

    def divisor(pair: int) -> float:
        turns = trained_len / (2 * math.pi * math.pow(theta, 2 * pair / rotary_dim))
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        return 1 / ((1 - keep) / factor + keep)

    if len(table) != rotary_dim // 2 or not all(
        math.isclose(divisor(pair), value, rel_tol=1e-3) for pair, value in enumerate(table)
    ):
        raise ModelError(f"{meta.source} scales its positions by a table that is not Llama 3's, which is not supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}


def _longrope(meta: Metadata, rotary_dim: int) -> Scaling:
    """LongRoPE (Ding et al. 2024) as Phi-3's files have it."""
    trained_len = meta.number(TRAINED_LEN)
    if not 1 < trained_len <= MAX_POSITIONS:
        raise meta.wrong(TRAINED_LEN, f"must be above 1, got {trained_len}")
    divisors = {}
    for name, tensor in (("short_factor", _SHORT), ("long_factor", _LONG)):
        divisors[name] = tuple(floats(meta, tensor))
        if len(divisors[name]) != rotary_dim // 2 or not all(0 < value < MAX_POSITIONS for value in divisors[name]):
            raise ModelError(f"{meta.source}: {tensor} must hold {rotary_dim // 2} positive numbers (F32)")
    stretch = meta.integer("context_length") / trained_len
    usual = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(trained_len))
    sharpness = meta.positive("rope.scaling.attn_factor", usual)
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": trained_len,
        **divisors,
        "attention_factor": sharpness,
    }


def floats(meta: Metadata, name: str) -> Sequence[float]:
    """The numbers of a small tensor; none if it is missing or of another kind than F32."""
    tensor = meta.file.tensors.get(name)
    if tensor is None or tensor.kind.name != "F32":
        return []
    return meta.file.tensor_bytes(tensor).cast("f").tolist()
