"""vLLM production-stack: ``kvaware``, and its later ``loadaware``."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from conductor.policies.pick import allowed, any_least, idlest_decode, prefill_choices
from conductor.view import Choice, Question

UNMATCHED_TOKENS = 2000
LOAD_WEIGHT = 1.0


def production_stack(question: Question, rng: np.random.Generator) -> Choice:
    """kvaware: the first node that holds all but 2,000 tokens; else by session, and without one the least loaded."""
    facts, decode = question.facts, idlest_decode(question)
    matched = question.own_blocks() * question.shape.block_tokens
    nodes = prefill_choices(question)
    for p in nodes:
        if matched[p] and matched[p] >= facts.num_tokens - UNMATCHED_TOKENS:
            return Choice(p, decode)
    if facts.session:
        return Choice(nodes[crc32(facts.session.encode()) % len(nodes)], decode)
    return Choice(any_least(allowed(question, question.view.prefill.queued_requests), rng), decode)


def production_stack_load(question: Question, rng: np.random.Generator) -> Choice:
    """loadaware: the fraction matched, minus how far the load is above the mean."""
    load = question.view.prefill.queued_requests
    matched = question.own_blocks() * question.shape.block_tokens / question.facts.num_tokens
    score = matched - LOAD_WEIGHT * (load - load.mean()) / max(1.0, float(load.mean()))
    return Choice(any_least(allowed(question, -score), rng), idlest_decode(question))
