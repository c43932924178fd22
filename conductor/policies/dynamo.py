"""NVIDIA Dynamo's KV router: blocks of prefill not covered by what a worker holds, and active blocks for decode.

Disaggregated defaults: the prefill stage ignores decode blocks, the decode stage assumes no reuse; temperature 0, so
the least cost, uniformly among exact ties. A block in host memory counts three quarters of one in the device.
"""

from __future__ import annotations

import numpy as np

from conductor.policies.pick import allowed, any_least, decode_choices
from conductor.view import NONE, Choice, Question

DEVICE_CREDIT, HOST_CREDIT = 1.0, 0.75


def dynamo(question: Question, rng: np.random.Generator) -> Choice:
    side, block_tokens = question.view.prefill, question.shape.block_tokens
    blocks = -(-question.facts.num_tokens // block_tokens)
    device = question.prefill_runs
    host = np.maximum(question.home_runs() - device, 0.0)
    raw = side.queued_tokens / block_tokens + blocks
    cost = np.maximum(raw - DEVICE_CREDIT * device - HOST_CREDIT * host, 0.0)
    p = any_least(allowed(question, cost), rng)
    if not question.facts.needs_decode:
        return Choice(p)
    active = question.view.decode.context_tokens / block_tokens + blocks
    return Choice(p, any_least(np.where(decode_choices(question), active, np.inf), rng), NONE)
