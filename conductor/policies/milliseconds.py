"""Our default: the pair with the least predicted milliseconds to the last token.

FAST'25 Algorithm 1 without its two hand-set numbers. A prefix is worth the difference between computing and fetching
it, from whichever store is fastest now, and prefill and decode nodes are chosen together, because moving the bytes
between them takes time too. So a node's queue counts as much as its cache, and the longest match does not herd.

This is the reference; ``placing.cpp`` is the same search in C++, which the scheduler uses where it can be built.
"""

from __future__ import annotations

import numpy as np

from conductor.predict import FirstToken, decode_work_ms, first_token, sent_bytes
from conductor.view import FASTEST, Choice, Floats, Question

COPY_RENT = 0.15  # of the time to compute a block's tokens; fitted to the first half of the conversation trace


def milliseconds(question: Question, rng: np.random.Generator) -> Choice:
    view = question.view
    first = first_token(question)
    ttft = first.ttft_ms + copy_rent_ms(question)
    if question.prefill_ok is not None:
        ttft = np.where(question.prefill_ok, ttft, np.inf)
    p = int(ttft.argmin())
    if not question.facts.needs_decode:
        return Choice(p, source=FASTEST)
    num_bytes, work = sent_bytes(question), decode_work_ms(question)

    def row(p: int) -> Floats:
        """[D]: the total with prefill node p. Layers are sent while later ones are computed, except the last."""
        sending = np.where(num_bytes > 0.0, view.link_ms(view.send_link[p], num_bytes), 0.0)
        handoff = np.maximum(sending - first.prefill_ms[p], sending / question.shape.num_layers)
        total: Floats = ttft[p] + handoff + work
        return total

    totals = row(p)
    d = int(totals.argmin())
    for other in _promising(question, first, ttft, num_bytes, work, float(totals[d])):
        others = row(other)
        at = int(others.argmin())
        if others[at] < totals[d]:
            p, d, totals = other, at, others
    return Choice(p, d, FASTEST)


def copy_rent_ms(question: Question) -> Floats:
    """[P]: the cost of blocks that will exist in one more place, fetched or computed: others must be evicted for
    them, and a fraction of those will be asked for and computed again."""
    view, own = question.view, question.own_blocks()
    most = own.max()
    if view.stores.nodes:
        most = max(most, question.store_runs.max())
    result: Floats = COPY_RENT * view.prefill.costs[1] * ((most - own) * question.shape.block_tokens)
    return result


def _promising(
    question: Question, first: FirstToken, ttft: Floats, num_bytes: Floats, work: Floats, best: float
) -> list[int]:
    """Prefill nodes whose total might be below ``best``: no pair is faster than the node with its fastest link, the
    fewest bytes and the idlest decode node."""
    view, fewest = question.view, float(num_bytes[np.isfinite(work)].min())
    least_latency, least_byte = view.least_send.T
    sending = (least_latency + least_byte * fewest) if fewest > 0.0 else np.zeros(len(ttft))
    bound = ttft + np.maximum(sending - first.prefill_ms, sending / question.shape.num_layers) + work.min()
    return [int(p) for p in (bound < best).nonzero()[0]]
