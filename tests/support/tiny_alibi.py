"""Small random models of transformers whose only positions are ALiBi."""

from __future__ import annotations

from collections.abc import Callable

from tiny_families import IDS, VOCAB
from tiny_members import member
from transformers import PreTrainedModel

_WIDE = {"vocab_size": VOCAB, "initializer_range": 0.3, **IDS}
_MPT = {"d_model": 96, "n_layers": 3, "max_seq_len": 512, **_WIDE}
_BLOOM = {"hidden_size": 96, "n_layer": 3, **_WIDE}

ALIBI: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": member("bloom", _BLOOM, {"n_head": 8}),
    "bloom-of-6-heads": member("bloom", _BLOOM, {"n_head": 6, "tie_word_embeddings": False}),
    "mpt": member("mpt", _MPT, {"n_heads": 6}),
    "mpt-clamped": member(
        "mpt",
        _MPT,
        {"n_heads": 8, "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.4}},
    ),
}
