"""Short uncached tails: when the decode node that holds a conversation should compute its new tokens itself.

Pure. A decode node that can switch roles serves both, so a prompt of which it holds all but a few tokens needs no other
node: nothing is fetched and nothing handed off. The price is that all sequences decoding there wait for the tail.
"""

from __future__ import annotations

import numpy as np

from conductor.cost import CostModel
from conductor.predict import Breakdown
from conductor.scheduler import Placement
from conductor.view import Question


def on_decode_node(question: Question, placement: Placement, costs: CostModel, max_tokens: int) -> Placement | None:
    """The placement of the whole request on one decode node, if that is predicted to be faster than ``placement``
    and computes at most ``max_tokens`` of the prompt there; else None."""
    side, facts, block_tokens = question.view.decode, question.facts, question.shape.block_tokens
    runs = question.decode_runs
    held = np.minimum(runs * block_tokens, question.usable_tokens)
    is_near = (runs > 0.0) & (facts.num_tokens - held <= max_tokens)
    if question.decode_ok is not None:
        is_near &= question.decode_ok
    parts = placement.breakdown
    best, best_ms = None, placement.predicted_ttft_ms + parts.handoff_ms + parts.step_ms
    for d in map(int, is_near.nonzero()[0]):  # few nodes hold that much of a prompt
        info = side.nodes[d]
        cached = int(held.item(d))
        new = facts.num_tokens - cached
        wanted = -(-(new + facts.expected_tokens) // block_tokens)
        cost = costs.prefill(info.node_id)
        if not (info.can_switch and cost.is_known) or side.free_blocks.item(d) < wanted:
            continue
        context_ms = side.context_ms.item(d) * facts.num_tokens
        step_ms = side.next_step_ms.item(d) + context_ms
        waits_ms = step_ms / 2 if side.sequences.item(d) else 0.0  # for the step in progress
        prefill_ms = cost.ms(new, cached)
        total_ms = waits_ms + prefill_ms * (1 + side.sequences.item(d)) + step_ms
        if total_ms < best_ms:
            breakdown = Breakdown(queue_ms=waits_ms, prefill_ms=prefill_ms, step_ms=step_ms)
            best, best_ms = (
                placement._replace(
                    prefill=info,
                    decode=None,
                    local_tokens=cached,
                    fetched_tokens=0,
                    new_tokens=new,
                    sent_blocks=0,
                    is_known=True,
                    breakdown=breakdown,
                    pool_tokens=0,
                ),
                total_ms,
            )
    return best
