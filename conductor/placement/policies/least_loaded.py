"""Load balancing (FAST'25 Fig. 5): the prefill node with the least queued work, whatever it has cached."""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import allowed, any_least, idlest_decode
from conductor.placement.view import Choice, PlacementQuery


def least_loaded(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    return Choice(any_least(allowed(query, query.queue_ms()), rng), idlest_decode(query))
