"""Writes a .gguf model as the HF folder that other engines read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mooncake.app.extras import require


@contextmanager
def hf_folder(model: Path, dtype: str, given: str = "") -> Iterator[str]:
    """An HF folder of ``model``: the ``given`` one, itself, or a temporary one for a .gguf file. Raises
    MissingDependency."""
    if given or model.suffix != ".gguf":
        yield given or str(model)
        return
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        _write_hf_folder(model, Path(folder), dtype)
        yield folder


def _write_hf_folder(gguf: Path, folder: Path, dtype: str) -> None:
    """Dequantise a .gguf file into ``folder``: configuration, weights, tokenizer. Raises MissingDependency."""
    require("transformers", "test", "converting a .gguf file for another engine")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, file_name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=file_name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the saved weights are not quantised
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file_name, local_files_only=True).save_pretrained(folder)
