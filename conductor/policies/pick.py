"""How the least of several numbers is taken: near-equal costs are told apart by load, then by position."""

from __future__ import annotations

import numpy as np

from conductor.view import NONE, Floats, Question

TIE_MS = 1e-6  # totals nearer than this are equal


def least(cost: Floats, prefer: int = NONE) -> int:
    """Index of the least cost, or ``prefer`` when that is equally good. Loads have told equal nodes apart already."""
    at = int(cost.argmin())
    return prefer if prefer != NONE and cost[prefer] <= cost[at] + TIE_MS else at


def idlest_decode(question: Question) -> int:
    """Decode nodes by load alone, among those with room: what the published policies do. NONE when none is needed."""
    if not question.facts.needs_decode:
        return NONE
    side = question.view.decode
    sequences = side.sequences
    if question.decode_ok is not None:
        sequences = np.where(question.decode_ok, sequences, np.inf)
    room = np.where(side.free_blocks > 0, sequences, np.inf)
    return least((room if np.isfinite(room).any() else sequences) + side.tie_ms)


def allowed(question: Question, cost: Floats) -> Floats:
    """``cost`` [P], inf where the request must not go."""
    return cost if question.prefill_ok is None else np.where(question.prefill_ok, cost, np.inf)
