"""Small random models of transformers whose only positions are ALiBi."""

from __future__ import annotations

from collections.abc import Callable

from tiny_families import IDS, VOCAB, member
from transformers import PreTrainedModel

_WIDE = {"vocab_size": VOCAB, "initializer_range": 0.3, **IDS}
_MPT = {"d_model": 96, "n_layers": 3, "max_seq_len": 512, **_WIDE}
_FALCON = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 512, **_WIDE}
_BLOOM = {"hidden_size": 96, "n_layer": 3, **_WIDE}

ALIBI: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": member("bloom", _BLOOM, {"n_head": 8}),
    "bloom-of-6-heads": member("bloom", _BLOOM, {"n_head": 6, "tie_word_embeddings": False}),
    "falcon-rw": member("falcon", _FALCON, {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
    "falcon-7b-with-slopes": member("falcon", _FALCON, {"alibi": True}),
    "falcon-40b-with-slopes": member(
        "falcon", _FALCON, {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    ),
    "mpt": member("mpt", _MPT, {"n_heads": 6}),
    "mpt-clamped": member(
        "mpt",
        _MPT,
        {"n_heads": 8, "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.4}},
    ),
}
