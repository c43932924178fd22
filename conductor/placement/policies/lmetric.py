"""LMetric (arXiv 2603.15202): prefill tokens, queued and new, times batch size. No weight to set."""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import allowed, any_least, least_decode, uncached_tokens
from conductor.placement.view import Choice, PlacementQuery


def lmetric(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    side, decode = query.view.prefill, query.view.decode
    score = (side.queued_tokens + uncached_tokens(query)) * (side.queued_requests + 1.0)
    context = decode.context_tokens + query.facts.num_tokens
    return Choice(any_least(allowed(query, score), rng), least_decode(query, context * (decode.sequences + 1.0)))
