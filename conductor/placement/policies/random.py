"""Any prefill node: the baseline of all other policies (FAST'25 Fig. 5)."""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import idlest_decode, prefill_choices
from conductor.placement.view import Choice, PlacementQuery


def random(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    return Choice(int(rng.choice(prefill_choices(query))), idlest_decode(query))
