"""Small random multimodal models of transformers, whose language models we open."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from tiny_families import GATED, GLM_MOE, LATENT, YARN
from tiny_members import GROWING, LLAMA_4
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
PIXTRAL = {"model_type": "pixtral", **SMALL, "patch_size": 14, "head_dim": 16}
SIGLIP = {"model_type": "siglip_vision_model", **SMALL, "patch_size": 14}
CLIP = {"model_type": "clip_vision_model", **SMALL, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 96}
GLM_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 96}
TEXT = {**GATED, "initializer_range": 0.2}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}


def multimodal(
    family: str, text: dict[str, Any], without: tuple[str, ...] = (), **settings: Any
) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        wanted = {key: deepcopy(value) for key, value in {**TEXT, **text}.items() if key not in without}
        config = AutoConfig.for_model(family, text_config=wanted, **settings)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
        return model

    return make


MULTIMODAL: dict[str, Callable[[], PreTrainedModel]] = {
    "mistral3": multimodal("mistral3", {"model_type": "mistral", "sliding_window": None}, vision_config=PIXTRAL),
    "ministral3": multimodal(
        "mistral3", {"model_type": "ministral3", "rope_parameters": GROWING}, vision_config=PIXTRAL
    ),
    "mistral4": multimodal(
        "mistral3",
        {**LATENT, "model_type": "mistral4", "q_lora_rank": 24, "n_routed_experts": 6, "rope_parameters": GROWING},
        without=("head_dim", "num_key_value_heads"),
        vision_config=PIXTRAL,
    ),
    "gemma3": multimodal(
        "gemma3",
        {
            "model_type": "gemma3_text",
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        initializer_range=0.15,
    ),
    "qwen2-vl": multimodal(
        "qwen2_vl",
        {"rope_parameters": MROPE},
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 96},
    ),
    "qwen2.5-vl": multimodal("qwen2_5_vl", {"rope_parameters": MROPE}, vision_config=QWEN_VISION),
    "qwen3-vl": multimodal(
        "qwen3_vl",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        tie_word_embeddings=True,
    ),
    "qwen3-vl-yarn": multimodal(
        "qwen3_vl",
        {"rope_parameters": YARN | {"mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "internvl": multimodal(
        "internvl",
        {"model_type": "qwen2"},
        vision_config={"model_type": "internvl_vision", **SMALL, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "llava": multimodal("llava", {"model_type": "llama"}, vision_config=CLIP),
    "llava-next": multimodal(
        "llava_next",
        {"model_type": "mistral", "sliding_window": None},
        vision_config=CLIP,
        image_grid_pinpoints=[[28, 56]],
    ),
    "llama4": multimodal(
        "llama4",
        {"model_type": "llama4_text", **LLAMA_4},
        vision_config={**SMALL, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
        | {"patch_size": 14, "num_hidden_layers": 1, "pixel_shuffle_ratio": 0.5, "intermediate_size": 128},
    ),
    "smolvlm": multimodal(
        "smolvlm", {"model_type": "llama"}, vision_config={**SMALL, "patch_size": 14}, scale_factor=2
    ),
    "idefics3": multimodal(
        "idefics3", {"model_type": "llama"}, vision_config={**SMALL, "patch_size": 14}, scale_factor=2
    ),
    "llava-onevision": multimodal(
        "llava_onevision", {"model_type": "qwen2"}, vision_config=SIGLIP, image_grid_pinpoints=[[28, 56]]
    ),
    "command-a-vision": multimodal(
        "cohere2_vision",
        {
            "model_type": "cohere2",
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config=SIGLIP,
    ),
    "exaone-4.5": multimodal(
        "exaone4_5",
        {"model_type": "exaone4", "sliding_window": 20, "sliding_window_pattern": 3},
        vision_config=QWEN_VISION | {"num_key_value_heads": 2, "fullatt_block_indexes": [0]},
    ),
    "glm-4.1v": multimodal(
        "glm4v",
        {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        vision_config=GLM_VISION,
    ),
    "glm-4.6v-flash": multimodal(
        "glm46v",
        {"model_type": "glm4v_text"}
        | {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        vision_config={"model_type": "glm4v_vision", **GLM_VISION},
    ),
    "glm-4.5v": multimodal(
        "glm4v_moe",
        {**GLM_MOE, "rope_parameters": MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        vision_config=GLM_VISION,
    ),
    "aya-vision": multimodal(
        "aya_vision",
        {
            "model_type": "cohere2",
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config=SIGLIP,
    ),
}

QWEN3_VL_MOE = multimodal(
    "qwen3_vl_moe",
    {"rope_parameters": MROPE, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2},
    vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
)

KIMI = multimodal(
    "kimi_k25",
    {**LATENT, "model_type": "deepseek_v3", "q_lora_rank": 24, "n_routed_experts": 6, "n_group": 1, "topk_group": 1},
    without=("head_dim", "num_key_value_heads"),
    vision_config=SMALL | {"image_size": 224},
)
