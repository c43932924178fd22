"""Any prefill node: the baseline of all other policies (FAST'25 Fig. 5)."""

from __future__ import annotations

import numpy as np

from conductor.policies.pick import idlest_decode, prefill_choices
from conductor.view import Choice, Question


def random(question: Question, rng: np.random.Generator) -> Choice:
    return Choice(int(rng.choice(prefill_choices(question))), idlest_decode(question))
