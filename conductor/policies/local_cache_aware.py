"""Local cache-aware (FAST'25 Fig. 5): least queue + prefill, using only each node's own cache and no transfer."""

from __future__ import annotations

import numpy as np

from conductor.policies.pick import allowed, idlest_decode
from conductor.predict import local_ttft_ms
from conductor.view import Choice, Question


def local_cache_aware(question: Question, rng: np.random.Generator) -> Choice:
    return Choice(int(allowed(question, local_ttft_ms(question)).argmin()), idlest_decode(question))
