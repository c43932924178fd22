"""A tiny random model for embeddings, in a folder as such models are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny_model import tiny_tokenizer, write_tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel

END = 0  # <|endoftext|>


def write_embedder(folder: Path, *modules: str, mode: str = "pooling_mode_lasttoken", **changes: Any) -> Any:
    """As Qwen3-Embedding is published: without a head and the names above it, and with an end token behind each text.
    Returns transformers' own model."""
    settings = {"head_dim": 16, "intermediate_size": 64, "tie_word_embeddings": False} | changes
    write_tiny_model(folder, "qwen3", **settings)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, file)
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = TemplateProcessing("$A <|endoftext|>:0", None, [("<|endoftext|>", END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if modules:
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
        prefix = "sentence_transformers.models"
        (folder / "modules.json").write_text(
            json.dumps([{"idx": i, "path": paths[name], "type": f"{prefix}.{name}"} for i, name in enumerate(modules)])
        )
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False} | {mode: True})
        )
    return AutoModel.from_pretrained(folder).eval()
