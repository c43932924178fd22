"""A task to fine-tune a variant on, whose answers depend on the KV of the prefix: find the record with the most.

A prompt lists records, each with a name and an amount, and asks for the name with the highest amount. Amounts are words
whose order is known only from training. The tuned model therefore computes what the answer needs while it reads the
records, in the prefix whose KV variants may share, whereas to the untuned model these words have no order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake.errors import ConfigError
from mooncake.text.tokenizer import Tokenizer

NAMES = """
    apple bread chair dress eagle field glass horse island jacket king lamp mouse night ocean paper queen river stone
    table uncle voice water year zero bird cloud door engine forest garden hotel
"""
AMOUNTS = "music cat bank north sugar war milk code storm iron rain glory tax bone duty moon"  # in ascending order


@dataclass(frozen=True, slots=True)
class Question:
    """Token ids of a prompt and its answer, which is one token."""

    prompt: list[int]
    answer: int


class MostOfAll:
    """The task with ``records`` in a prompt, all of different amounts."""

    def __init__(self, tokenizer: Tokenizer, records: int) -> None:
        """Raises ConfigError for a vocabulary that splits a word of the task."""
        self._names, self._amounts = (
            [_one_token(tokenizer, word) for word in words.split()] for words in (NAMES, AMOUNTS)
        )
        if not 2 <= records <= len(self._amounts):
            raise ConfigError(f"a prompt has 2 to {len(self._amounts)} records, got {records}")
        self._records = records
        self._is, self._end, self._ask = (tokenizer.encode(text).tolist() for text in (" has", "\n", "Most:"))

    def questions(self, count: int, seed: int) -> list[Question]:
        """Random questions of equal length."""
        random = np.random.default_rng(seed)
        return [self._question(random) for _ in range(count)]

    def _question(self, random: np.random.Generator) -> Question:
        names = random.choice(len(self._names), self._records, replace=False)
        amounts = random.choice(len(self._amounts), self._records, replace=False)
        prompt: list[int] = []
        for name, amount in zip(names, amounts, strict=True):
            prompt += [self._names[name], *self._is, self._amounts[amount], *self._end]
        return Question(prompt + self._ask, self._names[names[amounts.argmax()]])


def _one_token(tokenizer: Tokenizer, word: str) -> int:
    ids = tokenizer.encode(f" {word}")
    if len(ids) != 1:
        raise ConfigError(f"the model's vocabulary splits {word!r}, a word of the task")
    return int(ids[0])
