"""AIBrix's rendering of Mooncake's conductor: TTFT and TBT from constants, not from measurements.

TTFT = requests · mean prefill + (0.005 · hit + 1) + (0.001 · miss^1.5 + 5) ms, tokens hit and missed
TBT  = 1000 / throughput · (1 + 1 / max(requests, 1)) ms, 1.5 times that when KV is more than 90 % full
"""

from __future__ import annotations

import numpy as np

from conductor.arrays import Floats
from conductor.placement.policies.pick import allowed, any_least, least_decode, uncached_tokens
from conductor.placement.view import NONE, Choice, PlacementQuery

FULL = 0.9


def aibrix(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    side = query.view.prefill
    miss = uncached_tokens(query)
    hit = query.facts.num_tokens - miss
    # requests · mean prefill time of requests is the queue in ms
    ttft = side.queued_ms + (0.005 * hit + 1.0) + (0.001 * miss**1.5 + 5.0)
    p = any_least(allowed(query, ttft), rng)
    return Choice(p, least_decode(query, _tbt_ms(query)) if query.facts.needs_decode else NONE)


def _tbt_ms(query: PlacementQuery) -> Floats:
    side = query.view.decode
    a_second = np.maximum(side.sequences, 1.0) * 1e3 / np.maximum(side.next_step_ms, 1e-3)
    tbt = 1e3 / a_second * (1.0 + 1.0 / np.maximum(side.sequences, 1.0))
    is_full = (side.total_blocks > 0) & (side.free_blocks < (1.0 - FULL) * side.total_blocks)
    return np.where(is_full, 1.5 * tbt, tbt)
