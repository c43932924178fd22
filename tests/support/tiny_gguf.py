"""Tiny random models in GGUF files, in the layout of llama.cpp's tools, with or without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

CONTROL, USER_DEFINED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>"]
MERGES = ["t h", "th e", "Ġ the", "1 2", "12 3", "o n"]
TOKENS = [
    *CONTROL,
    *USER_DEFINED,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *("".join(merge.split(" ")) for merge in MERGES),
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WIDTH, INNER, HEADS, KV_HEADS = 32, 64, 4, 2


def write_gguf(
    path: Path,
    architecture: str = "llama",
    pre: str | None = None,
    add_bos: bool | None = False,
    rope_freqs: np.ndarray | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tensors_a_file: int = 0,
    whole_keys: Mapping[str, object] = MappingProxyType({}),
    **changes: Any,
) -> None:
    """``pre`` names the pre-tokenizer (None: no tokenizer); ``add_bos`` None omits the key; ``kind`` is the matrices'
    quantisation; with ``tensors_a_file`` there are several files; ``whole_keys`` are added as they are.

    ``changes`` of metadata below the architecture's name; None omits a key.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    values: dict[str, Any] = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if architecture == "qwen3":
        values["attention.key_length"] = head_dim(architecture)
    for key, value in (values | changes).items():
        add_metadata(writer, f"{architecture}.{key}", value)
    for key, value in whole_keys.items():
        add_metadata(writer, key, value)
    if pre is not None:
        _add_tokenizer(writer, pre, add_bos)
    random = np.random.default_rng(0)
    for name, shape in _shapes(architecture).items():
        tensor = random.standard_normal(shape, dtype=np.float32)
        if tensor.ndim == 2 and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    finish(writer)


def add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """In the type that llama.cpp's converter gives such values; None adds nothing."""
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):  # before int, which it is too
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        assert value is None, f"{key}: {value!r}"


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str, add_bos: bool | None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    types = [gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.USER_DEFINED] * len(USER_DEFINED)
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(types)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)


def head_dim(architecture: str) -> int:
    """Qwen3's heads are wider than hidden size / heads; 128 is the default of transformers."""
    return 128 if architecture == "qwen3" else WIDTH // HEADS


def _shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    head = head_dim(architecture)
    query, kv = HEADS * head, KV_HEADS * head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (query, WIDTH),
        "attn_k.weight": (kv, WIDTH),
        "attn_v.weight": (kv, WIDTH),
        "attn_output.weight": (WIDTH, query),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (INNER, WIDTH),
        "ffn_up.weight": (INNER, WIDTH),
        "ffn_down.weight": (WIDTH, INNER),
    }
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (query,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture == "qwen3":
        layer |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for number in range(2):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return shapes
