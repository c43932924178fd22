"""NVIDIA Dynamo's KV router: blocks of prefill not covered by what a worker holds, and active blocks for decode.

Disaggregated defaults: the prefill stage ignores decode blocks, the decode stage assumes no reuse; temperature 0, so
the least cost, uniformly among exact ties. A block in host memory counts three quarters of one in the device.
"""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import allowed, any_least, decode_choices
from conductor.placement.view import NONE, Choice, PlacementQuery

DEVICE_CREDIT, HOST_CREDIT = 1.0, 0.75


def dynamo(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    side, block_tokens = query.view.prefill, query.shape.block_tokens
    blocks = -(-query.facts.num_tokens // block_tokens)
    device = query.prefill_runs
    host = np.maximum(query.local_store_runs() - device, 0.0)
    raw = side.queued_tokens / block_tokens + blocks
    cost = np.maximum(raw - DEVICE_CREDIT * device - HOST_CREDIT * host, 0.0)
    p = any_least(allowed(query, cost), rng)
    if not query.facts.needs_decode:
        return Choice(p)
    active = query.view.decode.context_tokens / block_tokens + blocks
    return Choice(p, any_least(np.where(decode_choices(query), active, np.inf), rng), NONE)
