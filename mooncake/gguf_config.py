"""Reads a Llama-family GGUF file's metadata into a model configuration, and translates its weight names. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from mooncake.errors import ModelError
from mooncake.family import unsupported
from mooncake.gguf_file import GGUFFile
from mooncake.model_config import ModelConfig
from mooncake.rope_settings import yarn_scaling

GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

GROUPED_KINDS = {"Q4_0": 5, "Q4_1": 6, "Q5_0": 9, "Q5_1": 10, "Q8_0": 9, "Q4_K": 6, "Q5_K": 10, "Q6_K": 10}
"""Kinds of tensors whose codes CPUs multiply without dequantising them first, with the bits per weight this takes
(codes of 5 and 6 bits take 8, scales and offsets 32 per group)."""

_FLOAT_KINDS = frozenset({"F32", "F16", "BF16", "F64"})

# Llama 3.1 and 3.2 GGUF files contain scaled frequencies, not parameters: these are the ones they were made with.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def keeps_groups(file: GGUFFile) -> bool:
    """Whether all its quantised tensors are of such kinds."""
    kinds = {tensor.kind.name for tensor in file.tensors.values()} - _FLOAT_KINDS
    return bool(kinds) and kinds <= GROUPED_KINDS.keys()


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Raises ModelError for anything missing, wrong or unsupported."""
    family = file.get("general.architecture")
    if family not in GGUF_FAMILIES:
        raise unsupported(f"the architecture {family!r} of {file.path}", GGUF_FAMILIES)
    assert isinstance(family, str)
    meta = _Metadata(file, family)
    if meta.integer("expert_count", 0):
        raise unsupported(f"the mixture of experts in {file.path}", GGUF_FAMILIES)
    num_heads, hidden_size = meta.integer("attention.head_count"), meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", hidden_size // max(1, num_heads))
    if meta.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path} rotates only a part of each head, which is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no token embedding (token_embd.weight)")
    eos = (file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    bos = file.get("tokenizer.ggml.bos_token_id")
    scaling, max_model_len = _gguf_scaling(file, meta, head_dim), meta.integer("context_length")
    if scaling and scaling["rope_type"] == "yarn":  # the same as from config.json, whatever else the file says
        max_model_len = int(meta.number(_TRAINED_LEN, max_model_len) * meta.number("rope.scaling.factor"))
    return ModelConfig(
        architecture=family,
        num_layers=meta.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=meta.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=meta.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_model_len=max_model_len,
        rope_theta=meta.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        rms_eps=meta.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=meta.integer("attention.sliding_window", 0) or None,
        bos_id=bos if isinstance(bos, int) else None,
        eos_ids=tuple(dict.fromkeys(i for i in eos if isinstance(i, int))),
    )


class _Metadata:
    """Typed look-ups in a GGUF file's metadata, under one architecture's prefix."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self._file.path}: {self._prefix}.{key} must be one integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self._file.path}: {self._prefix}.{key} must be one number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, default))

    def _get(self, key: str, default: object) -> object:
        stored = self._file.get(f"{self._prefix}.{key}")
        value = default if stored is None else stored
        if value is None:
            raise ModelError(f"{self._file.path} lacks the metadata {self._prefix}.{key}")
        return value


def _gguf_scaling(file: GGUFFile, meta: _Metadata, head_dim: int) -> Mapping[str, object] | None:
    kind = meta.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, meta.number("rope.freq_base", 10000.0), head_dim)
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        return {"rope_type": "yarn", **_gguf_yarn(file, meta)}
    if kind != "none":
        raise ModelError(f"{file.path} scales its positions by {kind!r}; supported: linear, llama3, yarn")
    return None


_TRAINED_LEN = "rope.scaling.original_context_length"


def _gguf_yarn(file: GGUFFile, meta: _Metadata) -> Mapping[str, object]:
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if meta.number(f"rope.scaling.{name}", 0.0):
            raise ModelError(f"{file.path} asks for rope.scaling.{name}, which is not supported")
    if not meta.number("rope.freq_base", 10000.0) > 1:
        raise ModelError(f"{file.path}: YaRN needs a rope.freq_base above 1")
    return yarn_scaling(
        str(file.path),
        meta.number("rope.scaling.factor"),
        meta.number(_TRAINED_LEN, meta.integer("context_length")),
        meta.number("rope.scaling.yarn_beta_fast", 32.0),
        meta.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> Mapping[str, object]:
    """The parameters behind a table of frequency divisors, verified by recomputing the table from them."""
    tensor = file.tensors["rope_freqs.weight"]
    table = memoryview(file.tensor_bytes(tensor)).cast("f") if tensor.kind.name == "F32" else memoryview(b"")
    factor = max(table, default=0.0)
    low, high = _LLAMA3_SCALING["low_freq_factor"], _LLAMA3_SCALING["high_freq_factor"]
    trained_len = _LLAMA3_SCALING["original_max_position_embeddings"]

    def divisor(pair: int) -> float:
        turns = trained_len / (2 * math.pi * math.pow(theta, 2 * pair / head_dim))
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        return 1 / ((1 - keep) / factor + keep)

    if len(table) != head_dim // 2 or not all(
        math.isclose(divisor(pair), value, rel_tol=1e-3) for pair, value in enumerate(table)
    ):
        raise ModelError(f"{file.path} scales its positions by a table that is not Llama 3's, which is not supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_name(gguf_name: str) -> str:
    """``"blk.3.attn_q.weight"`` to ``"model.layers.3.self_attn.q_proj.weight"``; unknown names stay as they are."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if match and match[2] in _GGUF_NAMES:
        return f"model.layers.{match[1]}.{_GGUF_NAMES[match[2]]}.{match[3]}"
    return _GGUF_TOP_NAMES.get(gguf_name, gguf_name)
