"""Greedy answers of transformers' models, told by one pass where one knows what they ought to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NEW_TOKENS = 12  # of an answer


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    """The first ``count`` tokens of the answer, each chosen from the whole context without a cache; nothing ends it
    early.

    A pass over prompt and guess tells what follows each token, so a guess that it confirms whole is the answer (by
    induction: each token is right behind those before it). Otherwise its choices are the next guess: one token more is
    right after each pass, as when tokens are generated one by one. So a wrong guess costs passes, and changes nothing.
    Not for a model whose earlier choices depend on how many tokens follow.
    """
    found = [*guess, *[0] * count][:count]
    while True:
        logits = model(torch.tensor([[*prompt, *found[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        chosen: list[int] = logits.argmax(-1).tolist()
        if chosen == found:
            return found
        found = chosen


class Answering:
    """What has transformers' model, ``theirs``, beside ours."""

    theirs: Any

    def greedy(self, prompt: list[int], guess: Sequence[int] = ()) -> list[int]:
        return greedy(self.theirs, prompt, NEW_TOKENS, guess)

    def greedy_all(self, prompts: list[list[int]], guesses: list[list[int]]) -> list[list[int]]:
        return [self.greedy(*pair) for pair in zip(prompts, guesses, strict=True)]
