"""Local cache-aware (FAST'25 Fig. 5): least queue + prefill, using only each node's own cache and no transfer."""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import allowed, idlest_decode
from conductor.placement.predict import local_ttft_ms
from conductor.placement.view import Choice, PlacementQuery


def local_cache_aware(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    return Choice(int(allowed(query, local_ttft_ms(query)).argmin()), idlest_decode(query))
