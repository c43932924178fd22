"""From the metadata of GGUF files to the fields of ``ModelConfig``: mixtures with a ``Routing`` (GLM-4.5, dots.llm1,
MiniMax-M2, ERNIE 4.5). Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.gguf_fields import Fields, decoder_fields
from mooncake.gguf_metadata import Metadata
from mooncake.model_config import Routing

_GATING = {"biased_softmax": 1, "sigmoid": 2}  # ``gguf.ExpertGatingFuncType``


def glm_moe(meta: Metadata) -> Fields:
    """GLM-4.5 and what is built like it. Layers that guess further tokens come last and are left out."""
    guessing = meta.integer("nextn_predict_layers", 0)
    values = {**decoder_fields(meta, partial=True), **_routed(meta, normed=True)}
    return {
        **values,
        "architecture": "glm4_moe",
        "num_layers": meta.integer("block_count") - guessing,
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "qk_norm": meta.has_tensor("blk.0.attn_q_norm.weight"),
    }


def dots(meta: Metadata) -> Fields:
    return {
        **decoder_fields(meta),
        **_routed(meta, normed=False),
        "architecture": "dots1",
        "qk_norm": True,
    }


def minimax(meta: Metadata) -> Fields:
    """All layers have experts."""
    values = {**decoder_fields(meta, partial=True), **_routed(meta, normed=True)}
    return {**values, "architecture": "minimax_m2", "qk_norm": True}


def ernie_moe(meta: Metadata) -> Fields:
    if meta.integer("interleave_moe_layer_step", 1) != 1:
        raise ModelError(f"{meta.source} gives only some layers experts, which is not supported")
    values = {**decoder_fields(meta), **_routed(meta, normed=True, scoring="biased_softmax")}
    return {**values, "architecture": "ernie4_5_moe"}


def _routed(meta: Metadata, normed: bool, scoring: str = "sigmoid") -> Fields:
    """``normed``: the chosen experts' weights sum to one, unless the file says otherwise."""
    known = _GATING[scoring]
    if (gating := meta.integer("expert_gating_func", known)) != known:
        raise meta.wrong("expert_gating_func", f"must be {known} for this architecture, got {gating}")
    count, used = meta.integer("expert_count"), meta.integer("expert_used_count")
    groups, top = meta.integer("expert_group_count", 1), meta.integer("expert_group_used_count", 1)
    if not 1 <= top <= groups or count % groups or used > top * (count // groups):
        raise ModelError(f"{meta.source}: {count} experts cannot be chosen from {top} of {groups} groups")
    size = meta.integer("expert_feed_forward_length")
    routing = Routing(
        num_dense_layers=meta.integer("leading_dense_block_count", 0),
        expert_size=size,
        scoring=scoring,
        factor=meta.positive("expert_weights_scale", 1.0),
        num_groups=groups,
        top_groups=top,
    )
    return {
        "num_experts": count,
        "experts_per_token": used,
        "norm_expert_weights": meta.flag("expert_weights_norm", normed),
        "shared_expert_size": size * meta.integer("expert_shared_count", 0),
        "routing": routing,
    }
