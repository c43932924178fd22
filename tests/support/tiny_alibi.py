"""Small random models of transformers whose only positions are ALiBi."""

from __future__ import annotations

from collections.abc import Callable

from tiny_families import IDS, VOCAB
from tiny_members import member
from transformers import PreTrainedModel

_WIDE = {"vocab_size": VOCAB, "initializer_range": 0.3, **IDS}
_BLOOM = {"hidden_size": 96, "n_layer": 3, **_WIDE}

ALIBI: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": member("bloom", _BLOOM, {"n_head": 8}),
    "bloom-of-6-heads": member("bloom", _BLOOM, {"n_head": 6, "tie_word_embeddings": False}),
}
