"""What the metadata of GGUF files say alike of all architectures, as fields of ``ModelConfig``. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.gguf.metadata import Metadata
from mooncake.gguf.rope import context_of, read_scaling, rope_theta
from mooncake.model_config import MAX_LAYERS

Fields = dict[str, object]

RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


def decoder_fields(
    meta: Metadata,
    eps: str = RMS_EPS,
    partial: bool = False,
    truncate: bool = True,
    attention_factor: float | None = None,
    rotates: bool = True,
) -> Fields:
    """What all architectures say alike. ``partial``: a part of each head may rotate; ``truncate`` and
    ``attention_factor``: of YaRN. If no head ``rotates``, it does not matter how many of its elements would."""
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", hidden // max(1, heads))
    if (value_dim := meta.integer("attention.value_length", head_dim)) != head_dim:
        raise ModelError(f"{meta.source} has values of {value_dim} elements and keys of {head_dim}")
    rotary_dim = meta.integer("rope.dimension_count", head_dim) if rotates else head_dim
    if rotary_dim != head_dim and not partial:
        raise ModelError(f"{meta.source} rotates only a part of each head, which is not supported")
    if partial and (not 0 < rotary_dim <= head_dim or rotary_dim % 2):
        raise meta.wrong("rope.dimension_count", f"must be even and at most {head_dim}, got {rotary_dim}")
    scaling = read_scaling(meta, rotary_dim, truncate, attention_factor)
    return {
        "num_layers": meta.integer("block_count"),
        "hidden_size": hidden,
        "intermediate_size": meta.uniform("feed_forward_length"),
        "num_heads": heads,
        "num_kv_heads": meta.uniform("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_model_len": context_of(meta, scaling),
        "rope_theta": rope_theta(meta),
        "rope_scaling": scaling,
        "rotary_dim": -1 if rotary_dim == head_dim else rotary_dim,
        "rms_eps": meta.number(eps),
    }


def window_of(meta: Metadata) -> int | None:
    return meta.integer("attention.sliding_window", 0) or None


def layer_windows(meta: Metadata, every: int, default: int | None = None) -> tuple[int, ...]:
    """Each layer's window, 0 for none; unless the file says which layers have one, all but each ``every``-th."""
    window, num_layers = meta.integer("attention.sliding_window", default), meta.integer("block_count")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelError(f"num_layers of the model must be between 1 and {MAX_LAYERS}, got {num_layers}")
    key = "attention.sliding_window_pattern"
    pattern = meta.get(key)
    if pattern is None or isinstance(pattern, int):
        period = every if pattern is None else pattern
        if period < 1:
            raise meta.wrong(key, f"must be positive, got {period}")
        pattern = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if not isinstance(pattern, list) or len(pattern) < num_layers:
        raise meta.wrong(key, f"must say of each of the {num_layers} layers whether it has a window")
    if window < 1 and any(pattern):
        raise meta.wrong("attention.sliding_window", f"must be positive, got {window}")
    return tuple(window if has_window else 0 for has_window in pattern[:num_layers])
