"""SGLang's cache_aware: the holder of the longest match, unless loads are far apart or the match is short.

Thresholds are its command-line defaults. Decode nodes are chosen by the power of two choices, its setting for
disaggregation. Its approximate tree of what was sent where corresponds to our index of what is there.
"""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import allowed, any_least, decode_choices
from conductor.placement.view import NONE, Choice, PlacementQuery

CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5


def sglang(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    load = query.view.prefill.queued_requests
    own = query.host_runs()
    is_imbalanced = load.max() - load.min() > BALANCE_ABS and load.max() > BALANCE_REL * load.min()
    matched = float(own.max()) * query.shape.block_tokens / query.facts.num_tokens
    cost = load if is_imbalanced or matched <= CACHE_THRESHOLD else -own
    return Choice(any_least(allowed(query, cost), rng), _power_of_two(query, rng))


def _power_of_two(query: PlacementQuery, rng: np.random.Generator) -> int:
    """The less loaded of two randomly drawn nodes."""
    if not query.facts.needs_decode:
        return NONE
    nodes = decode_choices(query).nonzero()[0]
    two = rng.choice(nodes, min(2, len(nodes)), replace=False)
    return int(two[query.view.decode.sequences[two].argmin()])
