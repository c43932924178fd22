"""Small random models of transformers with the parts of each published Gemma 3n and 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny_families import VOCAB
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

LAYERS = {"s": "sliding_attention", "f": "full_attention"}
COMMON: dict[str, Any] = {
    **{"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 64, "intermediate_size": 96},
    **{"num_attention_heads": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16},
    **{"max_position_embeddings": 256, "final_logit_softcapping": 30.0, "initializer_range": 0.2},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
}
SMALL: dict[
    str, Any
] = {  # E2B, E4B: KV of the last layers is that of earlier ones, and layers have inputs of their own
    **{"num_key_value_heads": 1, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True},
    **{"num_kv_shared_layers": 4, "layer_types": [LAYERS[kind] for kind in "ssfssfsfsf"], "num_hidden_layers": 10},
}
LARGE: dict[str, Any] = {  # 31B, 26B-A4B: values of global layers are their keys
    **{"num_key_value_heads": 4, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    **{"attention_k_eq_v": True, "use_bidirectional_attention": "vision"},
    **{"layer_types": [LAYERS[kind] for kind in "sssfsssf"], "num_hidden_layers": 8},
}
MIXTURE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
UNIFIED = {name: value for name, value in LARGE.items() if name != "hidden_size_per_layer_input"}
THREE_N: dict[str, Any] = {
    **{"num_key_value_heads": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB - 40},
    **{"num_kv_shared_layers": 4, "layer_types": SMALL["layer_types"], "num_hidden_layers": 10, "laurel_rank": 8},
    **{"activation_sparsity_pattern": [0.95, 0.8, *[0.0] * 8]},
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


def text(family: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        given = {**COMMON, **settings}
        if family == "gemma3n_text":
            given.pop("global_head_dim")
        if family == "gemma4_unified_text":
            given.pop("vocab_size_per_layer_input")
        config = AutoConfig.for_model(family, **given)
        return with_scales(AutoModelForCausalLM.from_config(config))

    return make


def whole(family: str, text_settings: dict[str, Any], **settings: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        config = AutoConfig.for_model(
            family, text_config={**COMMON, **text_settings}, initializer_range=0.2, **settings
        )
        return with_scales(AutoModelForImageTextToText.from_config(config))

    return make


def with_scales(model: PreTrainedModel) -> PreTrainedModel:
    """Published layers have other scales than one."""
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.4)
    return model


GEMMA4: dict[str, Callable[[], PreTrainedModel]] = {
    "small": text("gemma4_text", **SMALL),
    "large": text("gemma4_text", **LARGE),
    "mixture": text("gemma4_text", **LARGE, **MIXTURE),
    "all-at-once": text("gemma4_text", **{**SMALL, **LARGE, **MIXTURE, "hidden_size_per_layer_input": 8}),
    "unified": text("gemma4_unified_text", **UNIFIED),
}
GEMMA3N: dict[str, Callable[[], PreTrainedModel]] = {
    "3n": text("gemma3n_text", **THREE_N),
    "3n-of-two-streams": text(
        "gemma3n_text", **THREE_N | {"altup_num_inputs": 2, "altup_correct_scale": False, "num_kv_shared_layers": 0}
    ),
}
WHOLE: dict[str, Callable[[], PreTrainedModel]] = {
    "small-with-eyes": whole("gemma4", SMALL, vision_config=VISION, audio_config=None),
    "unified-with-eyes": whole(
        "gemma4_unified", UNIFIED, vision_config={"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16}
    ),
}
