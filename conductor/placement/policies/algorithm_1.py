"""FAST'25 Algorithm 1 as published, threshold included. Decode nodes are chosen by load.

The publication leaves two cases open. If no node matches, nothing is transferred. If the node's own match is zero and
another's is not, the ratio is infinite and the prefix is transferred. The threshold's value was never published
("adjusted manually"); between 1 and 4 it changes the mean by less than 2 %.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conductor.placement.policies.pick import allowed, idlest_decode
from conductor.placement.predict import prefill_array_ms, transfer_array_ms
from conductor.placement.view import NONE, Choice, PlacementQuery

BALANCING_THRESHOLD = 2.0  # kvcache_balancing_threshold


def algorithm_1_with(threshold: float) -> Callable[[PlacementQuery, np.random.Generator], Choice]:
    def algorithm_1(query: PlacementQuery, rng: np.random.Generator) -> Choice:
        own = query.host_runs()
        sources = query.sources(1)
        best = sources[0] if sources else NONE
        best_run = float(query.store_runs[best]) if sources else 0.0
        fetches = (best_run > own * threshold) & (best_run > own)  # best / own > threshold, without dividing by zero
        tokens = np.minimum(np.where(fetches, best_run, own) * query.shape.block_tokens, query.usable_tokens)
        ttft = query.queue_ms() + prefill_array_ms(query, tokens)
        if sources:
            missing = (best_run - own) * query.shape.block_tokens
            ttft = ttft + np.where(fetches, transfer_array_ms(query, best, np.maximum(missing, 0.0)), 0.0)
        p = int(allowed(query, ttft).argmin())
        return Choice(p, idlest_decode(query), best if fetches[p] else NONE)

    return algorithm_1


algorithm_1 = algorithm_1_with(BALANCING_THRESHOLD)
