"""From the metadata of GGUF files to the fields of ``ModelConfig``: latent attention (DeepSeek-V2 and -V3). Torch-free.

``deepseek2`` is both, and what is built like them. Newer files describe one key per token, whose head is the latent
vector and what rotates; the sizes of real heads have the suffix ``_mla``. Older ones describe the real heads.
"""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.rope_settings import yarn_sharpness
from mooncake.gguf.fields import RMS_EPS, Fields
from mooncake.gguf.metadata import Metadata
from mooncake.gguf.mixtures import GATING, routed_fields
from mooncake.gguf.rope import context_of, log_multiplier, read_scaling, rope_theta
from mooncake.model_config import LatentAttention

_GROUPS = {256: (8, 4), 160: (8, 3)}
"""Groups of experts, and how many of them a token uses, by the number of experts: of DeepSeek-V3 and -V2 as published,
which older files do not say. The small models have no groups."""


def deepseek(meta: Metadata) -> Fields:
    if meta.number("attention.temperature_scale", 0.0):
        raise ModelError(f"{meta.source} asks for attention.temperature_scale, which is not supported")
    latent = _latent(meta)
    of_all = _mscale_all_dim(meta)
    scaling = read_scaling(meta, latent.rope_dim, attention_factor=1.0 if of_all else None)
    sharpness = yarn_sharpness(meta.number("rope.scaling.factor"), of_all) if scaling and of_all else 1.0
    return {
        **_mixture(meta),
        "num_layers": meta.integer("block_count") - meta.integer("nextn_predict_layers", 0),
        "hidden_size": meta.integer("embedding_length"),
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_heads": meta.integer("attention.head_count"),
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rope_dim,
        "rotary_dim": latent.rope_dim,
        "max_model_len": context_of(meta, scaling),
        "rope_theta": rope_theta(meta),
        "rope_scaling": scaling,
        "rms_eps": meta.number(RMS_EPS),
        "attention_scale": (latent.nope_dim + latent.rope_dim) ** -0.5 * sharpness**2,
        "latent": latent,
    }


def _latent(meta: Metadata) -> LatentAttention:
    suffix = "_mla" if meta.get("attention.key_length_mla") is not None else ""
    rope_dim, rank = _size(meta, "rope.dimension_count"), _size(meta, "attention.kv_lora_rank")
    key_dim = _size(meta, f"attention.key_length{suffix}")
    if key_dim <= rope_dim:
        raise meta.wrong(f"attention.key_length{suffix}", f"must be above rope.dimension_count, {rope_dim}")
    value_dim = _size(meta, f"attention.value_length{suffix}")
    return LatentAttention(rank, rope_dim, key_dim - rope_dim, value_dim, meta.integer("attention.q_lora_rank", 0))


def _size(meta: Metadata, key: str) -> int:
    """Rows of the cache have two halves that rotate into each other, so each part must be even."""
    size = meta.integer(key)
    if size < 2 or size % 2:
        raise meta.wrong(key, f"must be even and positive, got {size}")
    return size


def _mscale_all_dim(meta: Metadata) -> float:
    """config.json's, of which the file has a tenth (0: none). YaRN then sharpens all of a head, and the rotations no
    more than that (``mscale``, which files do not have, is the same in published models)."""
    return float(f"{10 * log_multiplier(meta):.6g}")  # the decimal number that was rounded to a float32


def _mixture(meta: Metadata) -> Fields:
    """DeepSeek-V3 chooses experts with a bias, and V2 without. The oldest files do not say how they are scored."""
    names = {number: name for name, number in GATING.items()}
    first = f"blk.{meta.integer('leading_dense_block_count', 0)}.exp_probs_b.bias"
    given = meta.integer("expert_gating_func", 0)  # 0: none
    scoring = names.get(given) if given else "sigmoid" if meta.has_tensor(first) else "softmax"
    if scoring not in ("softmax", "sigmoid"):
        raise meta.wrong("expert_gating_func", f"must be 1 or 2 for this architecture, got {given}")
    groups = _GROUPS.get(meta.integer("expert_count"), (1, 1))
    values = routed_fields(meta, normed=False, scoring=scoring, groups=groups)
    if scoring == "softmax" and values["norm_expert_weights"]:
        raise ModelError(f"{meta.source} asks for expert_weights_norm, which is not supported for softmax")
    return {**values, "architecture": "deepseek_v2" if scoring == "softmax" else "deepseek_v3"}
