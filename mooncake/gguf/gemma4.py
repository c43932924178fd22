"""Gemma 4 from the metadata of a GGUF file. Torch-free.

Global layers are what keys without ``_swa`` describe. Which pairs of their heads turn is a tensor of divisors: 1, or so
large that a pair stands still. That their values are keys is said by missing tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.errors import ModelError
from mooncake.families.layer_settings import sources_of_last
from mooncake.gguf.fields import RMS_EPS, Fields, layer_windows
from mooncake.gguf.metadata import Metadata
from mooncake.gguf.rope import FREQUENCIES, THETA, Scaling, floats
from mooncake.model_config import GemmaParts, Settings

_TABLE, _TOKENS = "per_layer_token_embd.weight", "token_embd.weight"
_STANDS_STILL = 1e29  # divided by so much and more


def gemma4(meta: Metadata) -> Fields:
    windows = layer_windows(meta, 6)
    dim, shared = meta.integer("attention.key_length_swa"), meta.integer("attention.shared_kv_layers", 0)
    wide_dim = meta.integer("attention.key_length")
    counts = meta.of_layers("attention.head_count_kv", len(windows))
    heads = [(count, dim if window else wide_dim) for count, window in zip(counts, windows, strict=True)]
    has_mixture = meta.integer("expert_count", 0) > 0
    cap = meta.number("final_logit_softcapping", 0.0)
    if not 0 <= cap < 1e6:
        raise meta.wrong("final_logit_softcapping", f"must be positive or 0, got {cap}")
    sources = tuple(sources_of_last(Settings({}, meta.source), list(windows), shared)) if shared else ()
    size = meta.integer("embedding_length_per_layer_input", 0)
    inner = _inner(meta, len(windows) - shared, len(windows))
    return {
        "architecture": "gemma4_text",
        "num_layers": len(windows),
        "hidden_size": meta.integer("embedding_length"),
        "intermediate_size": inner[0],
        "num_heads": meta.integer("attention.head_count"),
        "num_kv_heads": next((count for count, window in zip(counts, windows, strict=True) if window), counts[0]),
        "head_dim": dim,
        "layer_heads": tuple(heads) if len(set(heads)) > 1 else (),
        "max_model_len": meta.integer("context_length"),
        "rope_theta": meta.number(THETA, 1e6),
        "rope_scaling": _scaling(meta),
        "local_rope_theta": meta.positive("rope.freq_base_swa", 10_000.0),
        "rms_eps": meta.number(RMS_EPS),
        "activation": "gelu_tanh",
        "layer_windows": windows,
        "kv_sources": sources,
        "attention_scale": 1.0,
        "logit_cap": cap,
        "qk_norm": True,
        "num_experts": meta.integer("expert_count") if has_mixture else 0,
        "experts_per_token": meta.integer("expert_used_count") if has_mixture else 0,
        "gemma": GemmaParts(
            input_size=size,
            input_vocab=_input_vocab(meta) if size else 0,
            has_wide_mlps=inner[-1] != inner[0],
            keys_are_values=_lacks_values(meta, windows, shared),
            expert_size=meta.integer("expert_feed_forward_length") if has_mixture else 0,
        ),
    }


def _input_vocab(meta: Metadata) -> int:
    """Tokens with embeddings of each layer."""
    found, needed = (meta.file.tensors[name].shape[0] if meta.has_tensor(name) else 0 for name in (_TABLE, _TOKENS))
    if found < needed:
        raise ModelError(f"{meta.source} has embeddings of each layer ({_TABLE}) for {found} of {needed} tokens")
    return found


def _inner(meta: Metadata, num_owners: int, num_layers: int) -> Sequence[int]:
    """The width of each layer's MLP."""
    found = meta.of_layers("feed_forward_length", num_layers)
    expected = [found[0] * (1 if layer < num_owners else found[-1] // found[0]) for layer in range(num_layers)]
    if found != expected or found[-1] not in (found[0], 2 * found[0]):
        raise meta.wrong("feed_forward_length", "must be alike in all layers, or twice as much in those without own KV")
    return found


def _lacks_values(meta: Metadata, windows: Sequence[int], shared: int) -> bool:
    wide = [layer for layer, window in enumerate(windows[: len(windows) - shared]) if not window]
    return any(not meta.has_tensor(f"blk.{layer}.attn_v.weight") for layer in wide)


def _scaling(meta: Metadata) -> Scaling | None:
    """``ModelConfig.rope_scaling`` of the global layers."""
    if not meta.has_tensor(FREQUENCIES):
        return None
    divisors = floats(meta, FREQUENCIES)
    turning = sum(divisor == 1 for divisor in divisors)
    if (
        not divisors
        or any(divisor != 1 for divisor in divisors[:turning])
        or min(divisors[turning:], default=_STANDS_STILL) < _STANDS_STILL
    ):
        raise ModelError(f"{meta.source} scales its positions by a table that is not Gemma 4's, which is not supported")
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(divisors), "factor": 1.0}
