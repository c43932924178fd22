"""vLLM production-stack: ``kvaware``, and its later ``loadaware``."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from conductor.placement.policies.pick import allowed, any_least, idlest_decode, prefill_choices
from conductor.placement.view import Choice, PlacementQuery

UNMATCHED_TOKENS = 2000
LOAD_WEIGHT = 1.0


def production_stack(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    """kvaware: the first node that holds all but 2,000 tokens; else by session, and without one the least loaded."""
    facts, decode = query.facts, idlest_decode(query)
    matched = query.host_runs() * query.shape.block_tokens
    nodes = prefill_choices(query)
    for p in nodes:
        if matched[p] and matched[p] >= facts.num_tokens - UNMATCHED_TOKENS:
            return Choice(p, decode)
    if facts.session:
        return Choice(nodes[crc32(facts.session.encode()) % len(nodes)], decode)
    return Choice(any_least(allowed(query, query.view.prefill.queued_requests), rng), decode)


def production_stack_load(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    """loadaware: the fraction matched, minus how far the load is above the mean."""
    load = query.view.prefill.queued_requests
    matched = query.host_runs() * query.shape.block_tokens / query.facts.num_tokens
    score = matched - LOAD_WEIGHT * (load - load.mean()) / max(1.0, float(load.mean()))
    return Choice(any_least(allowed(query, -score), rng), idlest_decode(query))
