"""llm-d's endpoint picker: weighted scores between 0 and 1; the highest sum wins, ties are broken at random.

Default weights: queue 2, KV utilisation 2, prefix 3. A prefill node gives its KV away, so its utilisation is
meaningless and left out; decode nodes are scored by active requests, as in the published guide for disaggregation.
"""

from __future__ import annotations

import numpy as np

from conductor.arrays import Floats
from conductor.placement.policies.pick import allowed, any_least, idlest_decode
from conductor.placement.view import Choice, PlacementQuery

QUEUE_WEIGHT, PREFIX_WEIGHT = 2.0, 3.0


def llm_d(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    blocks = max(len(query.facts.keys), 1)
    score = QUEUE_WEIGHT * _emptiness(query.view.prefill.queued_requests)
    score = score + PREFIX_WEIGHT * query.host_runs() / blocks
    return Choice(any_least(allowed(query, -score), rng), idlest_decode(query))


def _emptiness(queue: Floats) -> Floats:
    """1 for the shortest queue, 0 for the longest; 1 for all if they are equal."""
    spread = queue.max() - queue.min()
    result: Floats = (queue.max() - queue) / spread if spread else np.ones(len(queue))
    return result
