"""The language model of a multimodal checkpoint: its settings within config.json, and its weights by their usual names.

Only text goes in, so what encodes images or sound is left out. A family is listed if its language model then is one
that opens by itself: Qwen-VL's positions of three axes (M-RoPE) are the same on each axis for text. Torch-free.
"""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.model_config import Settings

_MULTIMODAL = (
    *("mistral3", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("llava", "llava_next", "internvl", "aya_vision", "kimi_k25", "llama4"),
    *("smolvlm", "idefics3", "llava_onevision", "cohere2_vision", "exaone4_5", "glm4v", "glm46v", "glm4v_moe"),
    *("gemma3n", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe"),
)
_LANGUAGE_MODELS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "exaone4_5_text": "exaone4",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
_GEMMA3_DEFAULTS = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"vocab_size": 262_208, "max_position_embeddings": 131_072},
}
"""Of transformers, which published configurations leave out."""

_SHARED = ("quantization_config", "compression_config", "bos_token_id", "eos_token_id")
_OTHER_PARTS = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "mm_projector.", "image_newline"),
    *(
        "model.vision_tower.",
        "model.visual.",
        "model.multi_modal_projector.",
        "model.mm_projector.",
        "model.image_newline",
        "model.vision_model.",
        "model.connector.",
        "model.embed_vision.",
        "model.vision_embedder.",
        "model.embed_audio.",
        "model.audio_tower.",
    ),
)
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}


def is_multimodal(settings: Settings) -> bool:
    return settings.get("model_type") in _MULTIMODAL


def language_model(settings: Settings) -> Settings:
    """Settings as if the language model of a multimodal one with these ``settings`` had been published alone. Raises
    ModelError if they say nothing about it."""
    text = settings.get("text_config")
    if text is None and settings.get("hidden_size") is not None:  # older Qwen-VL
        text = {key: value for key, value in settings.tree.items() if key != "vision_config"}
    if not isinstance(text, dict):
        raise ModelError(f"{settings.source} does not describe the language model (text_config)")
    family = text.get("model_type")
    tree: dict[str, object] = {
        **(_GEMMA3_DEFAULTS if family == "gemma3_text" else {}),
        **{key: settings.tree[key] for key in _SHARED if settings.get(key) is not None},
        **{key: value for key, value in text.items() if value is not None},
        # What is said beside the language model counts, in transformers too: of Gemma 4, that turns end as texts do.
        **{key: settings.tree[key] for key in ("bos_token_id", "eos_token_id") if settings.get(key) is not None},
        "tie_word_embeddings": settings.get("tie_word_embeddings"),
        "model_type": _LANGUAGE_MODELS.get(family, family) if isinstance(family, str) else family,
    }
    return Settings(tree, settings.source)


def is_of_another_part(name: str) -> bool:
    """Whether the weight does not belong to the language model."""
    return name.startswith(_OTHER_PARTS)


def name_of_text(name: str) -> str:
    """The name that a weight of the language model has when it is published alone."""
    for prefix, usual in _PREFIXES.items():
        if name.startswith(prefix):
            return usual + name.removeprefix(prefix)
    return name
