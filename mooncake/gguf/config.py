"""A GGUF file's metadata as a model configuration, and which of its tensors stay codes. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import unsupported
from mooncake.gguf.families import READERS
from mooncake.gguf.file import GGUF
from mooncake.gguf.metadata import Metadata
from mooncake.gguf.tokens import end_ids
from mooncake.model_config import ModelConfig

GROUPED_KINDS = {
    **{"Q4_0": 5, "Q4_1": 6, "Q5_0": 9, "Q5_1": 10, "Q8_0": 9, "Q4_K": 6, "Q5_K": 10, "Q6_K": 10},
    "MXFP4": 5,
}
"""Kinds of tensors whose codes CPUs multiply without dequantising them first, with the bits per weight this takes
(codes of 5 and 6 bits take 8, scales and offsets 32 per group)."""

_FLOAT_KINDS = frozenset({"F32", "F16", "BF16", "F64"})


def keeps_groups(file: GGUF) -> bool:
    """Whether all its quantised tensors are of such kinds."""
    kinds = {tensor.kind.name for tensor in file.tensors.values()} - _FLOAT_KINDS
    return bool(kinds) and kinds <= GROUPED_KINDS.keys()


def read_gguf_config(file: GGUF) -> ModelConfig:
    """Raises ModelError for anything missing, wrong or unsupported."""
    architecture = file.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in READERS:
        raise unsupported(f"the architecture {architecture!r} of {file.path}", READERS)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no token embedding (token_embd.weight)")
    bos = file.get("tokenizer.ggml.bos_token_id")
    fields: dict[str, object] = {
        "vocab_size": embedding.shape[0],
        "tie_embeddings": "output.weight" not in file.tensors,
        "qkv_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "bos_id": bos if isinstance(bos, int) else None,
        "eos_ids": end_ids(file),
    }
    return ModelConfig(**(fields | READERS[architecture](Metadata(file, architecture))))  # type: ignore[arg-type]
