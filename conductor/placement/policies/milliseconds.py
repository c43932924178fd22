"""Our default: the pair with the least predicted milliseconds to the last token.

FAST'25 Algorithm 1 without its two hand-set numbers. A prefix is worth the difference between computing and fetching
it, from whichever store is fastest now, and prefill and decode nodes are chosen together, because moving the bytes
between them takes time too. So a node's queue counts as much as its cache, and the longest match does not herd.

This is the reference; ``search.cpp`` is the same search in C++, and serves where it can be built.
"""

from __future__ import annotations

import numpy as np

from conductor.arrays import Floats
from conductor.placement.predict import FirstToken, decode_work_ms, first_token, sent_bytes
from conductor.placement.view import FASTEST, Choice, PlacementQuery

REPLICA_COST = 0.15  # of the time to compute a block's tokens; fitted to the first half of the conversation trace


def milliseconds(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    view = query.view
    first = first_token(query)
    ttft = first.ttft_ms + replica_cost_ms(query)
    if query.prefill_ok is not None:
        ttft = np.where(query.prefill_ok, ttft, np.inf)
    p = int(ttft.argmin())
    if not query.facts.needs_decode:
        return Choice(p, source=FASTEST)
    num_bytes, work = sent_bytes(query), decode_work_ms(query)

    def row(p: int) -> Floats:
        """[D]: the total with prefill node p. Layers are sent while later ones are computed, except the last."""
        sending = np.where(num_bytes > 0.0, view.link_ms(view.send_link[p], num_bytes), 0.0)
        handoff = np.maximum(sending - first.prefill_ms[p], sending / query.shape.num_layers)
        total: Floats = ttft[p] + handoff + work
        return total

    totals = row(p)
    d = int(totals.argmin())
    for other in _promising(query, first, ttft, num_bytes, work, float(totals[d])):
        others = row(other)
        at = int(others.argmin())
        if others[at] < totals[d]:
            p, d, totals = other, at, others
    return Choice(p, d, FASTEST)


def replica_cost_ms(query: PlacementQuery) -> Floats:
    """[P]: the cost of one more replica of blocks, fetched or computed: others must be evicted for them, and a
    fraction of those will be requested and computed again."""
    view, own = query.view, query.host_runs()
    most = own.max()
    if view.stores.nodes:
        most = max(most, query.store_runs.max())
    result: Floats = REPLICA_COST * view.prefill.costs[1] * ((most - own) * query.shape.block_tokens)
    return result


def _promising(
    query: PlacementQuery, first: FirstToken, ttft: Floats, num_bytes: Floats, work: Floats, best: float
) -> list[int]:
    """Prefill nodes whose total might be below ``best``, by a lower bound: the fastest link of the node, the fewest
    bytes, and the idlest decode node."""
    view, fewest = query.view, float(num_bytes[np.isfinite(work)].min())
    least_latency, least_byte = view.least_send.T
    sending = (least_latency + least_byte * fewest) if fewest > 0.0 else np.zeros(len(ttft))
    bound = ttft + np.maximum(sending - first.prefill_ms, sending / query.shape.num_layers) + work.min()
    return [int(p) for p in (bound < best).nonzero()[0]]
