"""Greedy answers: of transformers' models, told by one pass where one knows what they ought to be, and of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence as Asked
from mooncake.hashing import Chain
from mooncake.sampling import SamplingParams

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


def greedy_answers(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The engine's, all in one batch; nothing ends them early."""
    sampling, limit = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True), engine.config.max_model_len
    for index, prompt in enumerate(prompts):
        tokens = np.array(prompt, np.uint32)
        engine.add(Asked(str(index), tokens, len(tokens), sampling, Chain(bytes(32)), eos_ids=(), max_model_len=limit))
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)].append(output.token.token_id)
    return found


class Answering:
    """What has transformers' model, ``theirs``, beside ours."""

    theirs: Any

    def greedy(self, prompt: list[int], guess: Sequence[int] = ()) -> list[int]:
        return greedy(self.theirs, prompt, NEW_TOKENS, guess)

    def greedy_all(self, prompts: list[list[int]], guesses: list[list[int]]) -> list[list[int]]:
        return [self.greedy(*pair) for pair in zip(prompts, guesses, strict=True)]
