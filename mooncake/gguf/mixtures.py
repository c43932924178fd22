"""From the metadata of GGUF files to the fields of ``ModelConfig``: mixtures of experts. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.gguf.fields import Fields, decoder_fields, layer_windows
from mooncake.gguf.metadata import Metadata
from mooncake.model_config import MAX_LAYERS, Routing

GATING = {"biased_softmax": 1, "softmax": 1, "sigmoid": 2}  # ``gguf.ExpertGatingFuncType``


def expert_fields(meta: Metadata) -> Fields:
    """The width of an expert was not written by older converters."""
    count, used = meta.integer("expert_count"), meta.integer("expert_used_count")
    return {
        "num_experts": count,
        "experts_per_token": used,
        "intermediate_size": meta.integer("expert_feed_forward_length", 0) or meta.integer("feed_forward_length"),
    }


def qwen_moe(meta: Metadata) -> Fields:
    is_qwen3 = meta.prefix != "qwen2moe"
    values = {**decoder_fields(meta), **expert_fields(meta)}
    if not meta.integer("expert_feed_forward_length", 0):
        values["intermediate_size"] = meta.integer("feed_forward_length") // max(1, meta.integer("expert_used_count"))
    shared = 0 if is_qwen3 else meta.integer("expert_shared_feed_forward_length", meta.integer("feed_forward_length"))
    return {
        **values,
        "architecture": "qwen3_moe" if is_qwen3 else "qwen2_moe",
        "norm_expert_weights": meta.flag("expert_weights_norm", is_qwen3),
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "qk_norm": is_qwen3,
        "shared_expert_size": shared,
    }


def gpt_oss(meta: Metadata) -> Fields:
    values = {**decoder_fields(meta, truncate=False), **expert_fields(meta)}
    if values["rope_scaling"] is None:
        raise ModelError(f"{meta.source} does not say how positions are scaled ({meta.prefix}.rope.scaling.type)")
    return {
        **values,
        "architecture": "gpt_oss",
        "layer_windows": layer_windows(meta, 2),
        "qkv_bias": True,
        "norm_expert_weights": True,
    }


def olmoe(meta: Metadata) -> Fields:
    normed = meta.flag("expert_weights_norm", False)
    return {
        **{**decoder_fields(meta), **expert_fields(meta)},
        **{"architecture": "olmoe", "qk_norm": True, "norm_expert_weights": normed},
    }


def hunyuan_moe(meta: Metadata) -> Fields:
    """Its theta is stored as stretched."""
    values = {**decoder_fields(meta), **expert_fields(meta)}
    return {
        **values,
        "architecture": "hunyuan_v1_moe",
        "qk_norm": True,
        "norm_expert_weights": True,
        "shared_expert_size": meta.integer("expert_shared_feed_forward_length"),
    }


# With a routing of their own: GLM-4.5, dots.llm1, MiniMax-M2 and ERNIE 4.5


def glm_moe(meta: Metadata) -> Fields:
    """GLM-4.5 and what is built like it. Layers that predict further tokens come last and are left out."""
    predicting = meta.integer("nextn_predict_layers", 0)
    values = {**decoder_fields(meta, partial=True), **routed_fields(meta, normed=True)}
    return {
        **values,
        "architecture": "glm4_moe",
        "num_layers": meta.integer("block_count") - predicting,
        "qkv_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "qk_norm": meta.has_tensor("blk.0.attn_q_norm.weight"),
    }


def dots(meta: Metadata) -> Fields:
    return {
        **decoder_fields(meta),
        **routed_fields(meta, normed=False),
        "architecture": "dots1",
        "qk_norm": True,
    }


def minimax(meta: Metadata) -> Fields:
    """All layers have experts."""
    values = {**decoder_fields(meta, partial=True), **routed_fields(meta, normed=True)}
    return {**values, "architecture": "minimax_m2", "qk_norm": True}


def ernie_moe(meta: Metadata) -> Fields:
    if meta.integer("interleave_moe_layer_step", 1) != 1:
        raise ModelError(f"{meta.source} gives only some layers experts, which is not supported")
    values = {**decoder_fields(meta), **routed_fields(meta, normed=True, scoring="biased_softmax")}
    return {**values, "architecture": "ernie4_5_moe"}


def routed_fields(meta: Metadata, normed: bool, scoring: str = "sigmoid", groups: tuple[int, int] = (1, 1)) -> Fields:
    """``normed``: the chosen experts' weights sum to one; ``groups``: how many there are of experts, and how many of
    them a token uses. Both unless the file says otherwise."""
    known = GATING[scoring]
    if (gating := meta.integer("expert_gating_func", known)) != known:
        raise meta.wrong("expert_gating_func", f"must be {known} for this architecture, got {gating}")
    count, used = meta.integer("expert_count"), meta.integer("expert_used_count")
    num_groups, top = meta.integer("expert_group_count", groups[0]), meta.integer("expert_group_used_count", groups[1])
    if not 1 <= top <= num_groups or count % num_groups or used > top * (count // num_groups):
        raise ModelError(f"{meta.source}: {count} experts cannot be chosen from {top} of {num_groups} groups")
    size = meta.integer("expert_feed_forward_length")
    routing = Routing(
        dense_layers=tuple(range(min(meta.integer("leading_dense_block_count", 0), MAX_LAYERS))),
        expert_size=size,
        scoring=scoring,
        factor=meta.positive("expert_weights_scale", 1.0),
        num_groups=num_groups,
        top_groups=top,
    )
    return {
        "num_experts": count,
        "experts_per_token": used,
        "norm_expert_weights": meta.flag("expert_weights_norm", normed),
        "shared_expert_size": size * meta.integer("expert_shared_count", 0),
        "routing": routing,
    }
