"""The longest match wins, whatever its queue. It herds: prompts that share a first block all go to one node."""

from __future__ import annotations

import numpy as np

from conductor.policies.pick import allowed, any_least, idlest_decode
from conductor.view import Choice, Question


def longest_prefix(question: Question, rng: np.random.Generator) -> Choice:
    return Choice(any_least(allowed(question, -question.own_blocks()), rng), idlest_decode(question))
