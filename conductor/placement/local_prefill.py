"""Local prefill: when a decode node should compute the few uncached tokens of a prompt itself, without a hand-off.

Pure. Only a decode node that can switch roles is able to. Nothing is fetched and nothing sent; the price is that every
sequence decoding there waits for the prefill. The limit is ``conductor.max_tail_tokens``.
"""

from __future__ import annotations

import numpy as np

from conductor.placement.cost import CostModel
from conductor.placement.predict import Breakdown
from conductor.placement.scheduler import Placement
from conductor.placement.view import PlacementQuery


def local_prefill(query: PlacementQuery, placement: Placement, costs: CostModel, max_tokens: int) -> Placement | None:
    """The fastest placement of the whole request on one decode node that computes at most ``max_tokens`` of the prompt;
    None unless one is predicted to be faster than ``placement``."""
    side, facts, block_tokens = query.view.decode, query.facts, query.shape.block_tokens
    runs = query.decode_runs
    held = np.minimum(runs * block_tokens, query.usable_tokens)
    is_candidate = (runs > 0.0) & (facts.num_tokens - held <= max_tokens)
    if query.decode_ok is not None:
        is_candidate &= query.decode_ok
    parts = placement.breakdown
    best, best_ms = None, placement.predicted_ttft_ms + parts.handoff_ms + parts.step_ms
    for d in map(int, is_candidate.nonzero()[0]):  # few nodes hold that much of a prompt
        found = _on(query, d, int(held.item(d)), costs)
        if found is None:
            continue
        total_ms = found.queue_ms + found.prefill_ms * (1 + side.sequences.item(d)) + found.step_ms
        if total_ms < best_ms:
            best, best_ms = _placement(placement, query, d, int(held.item(d)), found), total_ms
    return best


def _on(query: PlacementQuery, d: int, cached: int, costs: CostModel) -> Breakdown | None:
    """What the request would take on decode node ``d``; None if it cannot compute prompts or has no room."""
    side, facts, block_tokens = query.view.decode, query.facts, query.shape.block_tokens
    new = facts.num_tokens - cached
    cost = costs.prefill(side.nodes[d].node_id)
    needed_blocks = -(-(new + facts.expected_tokens) // block_tokens)
    if not (side.nodes[d].can_switch and cost.is_known) or side.free_blocks.item(d) < needed_blocks:
        return None
    step_ms = side.next_step_ms.item(d) + side.context_ms.item(d) * facts.num_tokens
    queue_ms = step_ms / 2 if side.sequences.item(d) else 0.0  # the step in progress
    return Breakdown(queue_ms=queue_ms, prefill_ms=cost.ms(new, cached), step_ms=step_ms)


def _placement(base: Placement, query: PlacementQuery, d: int, cached: int, breakdown: Breakdown) -> Placement:
    return base._replace(
        prefill=query.view.decode.nodes[d],
        decode=None,
        local_tokens=cached,
        fetched_tokens=0,
        new_tokens=query.facts.num_tokens - cached,
        sent_blocks=0,
        is_known=True,
        breakdown=breakdown,
        pool_tokens=0,
    )
